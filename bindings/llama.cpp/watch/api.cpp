// The C functions of the watch: arguments, words, and nothing thrown.
#include "watch/watch.hpp"

#include <algorithm>
#include <cstdio>
#include <new>

using namespace kvt_llama;

namespace {

constexpr uint32_t block_tokens_max = 4096;

void say(kvt_llama_why_t *why, const std::string &words) {
    if (why) {
        std::snprintf(why->text, sizeof why->text, "%s", words.c_str());
    }
}

// What a function does, with its status and its words; nothing leaves but those.
template <typename work>
kvt_status_t guarded(kvt_llama_why_t *why, work &&run) {
    say(why, "");
    try {
        std::string words;
        const kvt_status_t status = run(words);
        say(why, status == KVT_OK ? "" : words);
        return status;
    } catch (const std::bad_alloc &) {
        say(why, "no memory");
        return KVT_E_NOMEM;
    } catch (...) {
        say(why, "an unexpected failure");
        return KVT_E_PANIC;
    }
}

} // namespace

kvt_status_t kvt_llama_watch_open(const llama_model *model, const kvt_llama_watch_opts_t *opts,
                                  kvt_llama_watch_t **out, kvt_llama_why_t *why) {
    if (out) {
        *out = nullptr;
    }
    const kvt_status_t status = kvt_llama_check(why);
    if (status != KVT_OK) {
        return status;
    }
    return guarded(why, [&](std::string &words) {
        if (!model || !out) {
            words = "a model and a place for the watch are needed";
            return KVT_E_INVALID;
        }
        *out = new kvt_llama_watch_t(model, opts ? *opts : kvt_llama_watch_opts_t{});
        return KVT_OK;
    });
}

kvt_status_t kvt_llama_watch_params(kvt_llama_watch_t *watch, llama_context_params *params,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &words) {
        if (!watch || !params) {
            words = "a watch and parameters are needed";
            return KVT_E_INVALID;
        }
        return watch->set_params(*params, words);
    });
}

kvt_status_t kvt_llama_watch_attach(kvt_llama_watch_t *watch, llama_context *ctx,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &words) {
        if (!watch || !ctx) {
            words = "a watch and a context are needed";
            return KVT_E_INVALID;
        }
        return watch->attach(ctx, words);
    });
}

kvt_status_t kvt_llama_watch_policy(kvt_llama_watch_t *watch, llama_seq_id seq,
                                    const kvt_llama_sparse_opts_t *opts, kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &words) {
        if (!watch || seq < 0 || (opts && opts->block_tokens > block_tokens_max)) {
            words = "a watch, a sequence, and blocks of at most 4096 tokens are needed";
            return KVT_E_INVALID;
        }
        return watch->set_policy(seq, opts ? *opts : kvt_llama_sparse_opts_t{}, words);
    });
}

kvt_status_t kvt_llama_watch_decode(kvt_llama_watch_t *watch, llama_batch batch, int32_t *rc,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &words) {
        if (!watch || !rc) {
            words = "a watch and a place for what llama_decode returns are needed";
            return KVT_E_INVALID;
        }
        return watch->decode(batch, *rc, words);
    });
}

kvt_status_t kvt_llama_watch_evicted(const kvt_llama_watch_t *watch, llama_seq_id seq,
                                     uint64_t *out_tokens) {
    if (!watch || !out_tokens) {
        return KVT_E_INVALID;
    }
    return watch->evicted(seq, *out_tokens);
}

kvt_status_t kvt_llama_watch_is_exact(const kvt_llama_watch_t *watch, llama_seq_id seq,
                                      int *out_exact) {
    if (!watch || !out_exact) {
        return KVT_E_INVALID;
    }
    *out_exact = watch->is_exact(seq);
    return KVT_OK;
}

kvt_status_t kvt_llama_watch_changed(kvt_llama_watch_t *watch, llama_seq_id seq) {
    return guarded(nullptr, [&](std::string &) {
        if (!watch) {
            return KVT_E_INVALID;
        }
        watch->changed(seq);
        return KVT_OK;
    });
}

kvt_status_t kvt_llama_watch_fault(const kvt_llama_watch_t *watch, kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &words) {
        words = watch ? watch->fault_words_ : "a watch is needed";
        return watch ? watch->fault_ : KVT_E_INVALID;
    });
}

kvt_status_t kvt_llama_watch_stats(const kvt_llama_watch_t *watch, kvt_llama_watch_stats_t *out) {
    if (!watch || !out) {
        return KVT_E_INVALID;
    }
    watch->stats(*out);
    return KVT_OK;
}

kvt_status_t kvt_llama_watch_close(kvt_llama_watch_t **watch) {
    if (watch) {
        delete *watch;
        *watch = nullptr;
    }
    return KVT_OK;
}

kvt_status_t kvt_llama_watch_t::set_params(llama_context_params &params, std::string &words) {
    if (ctx_) {
        words = "a watch belongs to one context, and this one has it";
        return KVT_E_STATE;
    }
    if (params.cb_eval != on_node) {
        next_ = params.cb_eval;
        next_data_ = params.cb_eval_user_data;
    }
    params.cb_eval = on_node;
    params.cb_eval_user_data = this;
    flash_ = params.flash_attn_type;
    return KVT_OK;
}

kvt_status_t kvt_llama_watch_t::attach(llama_context *ctx, std::string &words) {
    if (ctx_ && ctx_ != ctx) {
        words = "a watch belongs to one context, and this one has it";
        return KVT_E_STATE;
    }
    if (llama_get_model(ctx) != model_) {
        words = "the context is of another model than the watch";
        return KVT_E_INVALID;
    }
    ctx_ = ctx;
    return KVT_OK;
}

// Whether a policy is for blocks or for tokens, its traits say: blocks are tried first.
kvt_status_t kvt_llama_watch_t::make(const kvt_llama_sparse_opts_t &opts, served &out,
                                     std::string &words) const {
    policy_source source;
    source.spec = opts.spec && !opts.custom ? opts.spec : "";
    source.custom = opts.custom;
    const uint32_t n_window = (uint32_t) std::max(llama_model_n_swa(model_), 0);
    kvt_status_t status = block_select::make(source, opts.block_tokens, roles_.n_layers(), n_window,
                                             out.select, words);
    if (status == KVT_OK && opts.audit_every && flash_ == LLAMA_FLASH_ATTN_TYPE_ENABLED) {
        words = "choices are audited by attention, and flash attention tells of none: open the context "
                "with LLAMA_FLASH_ATTN_TYPE_DISABLED";
        return KVT_E_INVALID;
    }
    if (status != KVT_E_UNSUPPORTED) {
        return status;
    }
    token_evict::made_for model;
    model.n_layers = roles_.n_layers();
    model.key_heads = (uint32_t) std::max(llama_model_n_head_kv(model_), 1);
    model.max_tokens = 4 * llama_n_ctx(ctx_) + 4096;
    model.has_windows = n_window > 0;
    status = token_evict::make(source, model, out.evict, words);
    if (status == KVT_OK && out.evict->goes_by_attention() &&
        flash_ == LLAMA_FLASH_ATTN_TYPE_ENABLED) {
        words = source.name() + " goes by attention, and flash attention tells of none: open the "
                "context with LLAMA_FLASH_ATTN_TYPE_DISABLED";
        status = KVT_E_UNSUPPORTED;
    }
    return status;
}

kvt_status_t kvt_llama_watch_t::set_policy(llama_seq_id seq, const kvt_llama_sparse_opts_t &opts,
                                           std::string &words) {
    if (!ctx_) {
        words = "the watch has no context yet: kvt_llama_watch_attach";
        return KVT_E_STATE;
    }
    if ((uint32_t) seq >= llama_n_seq_max(ctx_)) {
        words = "the context has no sequence " + std::to_string(seq);
        return KVT_E_INVALID;
    }
    served made;
    made.audit_every = opts.audit_every;
    kvt_status_t status = KVT_OK;
    if (opts.spec || opts.custom) {
        status = make(opts, made, words);
    }
    if (status != KVT_OK) {
        return status;
    }
    const auto found = served_.find(seq);
    if (found != served_.end()) {
        add_counts(found->second, stats_);
        if (llama_memory_seq_pos_max(llama_get_memory(ctx_), seq) >= 0) {
            made.evicted = found->second.evicted;
            made.is_narrowed = found->second.is_narrowed;
        }
    }
    if (made.select) {
        made.select->adopt();
    } else if (made.evict) {
        made.evict->adopt();
    }
    served_[seq] = std::move(made);
    return KVT_OK;
}
