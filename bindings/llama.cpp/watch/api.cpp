// The C functions of the watch: check arguments, turn exceptions into a status and a text.
#include "watch/watch.hpp"

#include <algorithm>
#include <cstdio>
#include <new>

using namespace kvt_llama;

namespace {

constexpr uint32_t block_tokens_max = 4096;

void set_why(kvt_llama_why_t *why, const std::string &message) {
    if (why) {
        std::snprintf(why->text, sizeof why->text, "%s", message.c_str());
    }
}

// Runs the body of an exported function; no exception leaves it.
template <typename work>
kvt_status_t guarded(kvt_llama_why_t *why, work &&run) {
    set_why(why, "");
    try {
        std::string message;
        const kvt_status_t status = run(message);
        set_why(why, status == KVT_OK ? "" : message);
        return status;
    } catch (const std::bad_alloc &) {
        set_why(why, "out of memory: free memory, or use a smaller context");
        return KVT_E_NOMEM;
    } catch (...) {
        set_why(why, "internal error: an unexpected exception");
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
    return guarded(why, [&](std::string &message) -> kvt_status_t {
        if (!model || !out) {
            message = "model or out is null: both are required";
            return KVT_E_INVALID;
        }
        *out = new kvt_llama_watch_t(model, opts ? *opts : kvt_llama_watch_opts_t{});
        return KVT_OK;
    });
}

kvt_status_t kvt_llama_watch_params(kvt_llama_watch_t *watch, llama_context_params *params,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &message) -> kvt_status_t {
        if (!watch || !params) {
            message = "watch or params is null: both are required";
            return KVT_E_INVALID;
        }
        return watch->set_params(*params, message);
    });
}

kvt_status_t kvt_llama_watch_attach(kvt_llama_watch_t *watch, llama_context *ctx,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &message) -> kvt_status_t {
        if (!watch || !ctx) {
            message = "watch or ctx is null: both are required";
            return KVT_E_INVALID;
        }
        return watch->attach(ctx, message);
    });
}

kvt_status_t kvt_llama_watch_policy(kvt_llama_watch_t *watch, llama_seq_id seq,
                                    const kvt_llama_sparse_opts_t *opts, kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &message) -> kvt_status_t {
        if (!watch || seq < 0 || (opts && opts->block_tokens > block_tokens_max)) {
            message = "watch is null, seq is negative, or block_tokens is above 4096";
            return KVT_E_INVALID;
        }
        return watch->set_policy(seq, opts ? *opts : kvt_llama_sparse_opts_t{}, message);
    });
}

kvt_status_t kvt_llama_watch_decode(kvt_llama_watch_t *watch, llama_batch batch, int32_t *rc,
                                    kvt_llama_why_t *why) {
    return guarded(why, [&](std::string &message) -> kvt_status_t {
        if (!watch || !rc) {
            message = "watch or rc is null: both are required";
            return KVT_E_INVALID;
        }
        return watch->decode(batch, *rc, message);
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
    return guarded(why, [&](std::string &message) -> kvt_status_t {
        message = watch ? watch->fault_message_ : "watch is null: pass an open watch";
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

kvt_status_t kvt_llama_watch_t::set_params(llama_context_params &params, std::string &message) {
    if (ctx_) {
        message = "the watch already has a context: open another watch for another context";
        return KVT_E_STATE;
    }
    if (params.cb_eval != on_node) {
        user_eval_ = params.cb_eval;
        user_eval_data_ = params.cb_eval_user_data;
    }
    params.cb_eval = on_node;
    params.cb_eval_user_data = this;
    flash_ = params.flash_attn_type;
    return KVT_OK;
}

kvt_status_t kvt_llama_watch_t::attach(llama_context *ctx, std::string &message) {
    if (ctx_ && ctx_ != ctx) {
        message = "the watch already has a context: open another watch for another context";
        return KVT_E_STATE;
    }
    if (llama_get_model(ctx) != model_) {
        message = "the context has another model than the watch: open a watch for its model";
        return KVT_E_INVALID;
    }
    ctx_ = ctx;
    return KVT_OK;
}

// The policy's traits decide whether it chooses blocks or evicts tokens. Blocks are tried first.
kvt_status_t kvt_llama_watch_t::make(const kvt_llama_sparse_opts_t &opts, sequence_policy &out,
                                     std::string &message) const {
    policy_source source;
    source.spec = opts.spec && !opts.custom ? opts.spec : "";
    source.custom = opts.custom;
    const uint32_t n_window = (uint32_t) std::max(llama_model_n_swa(model_), 0);
    kvt_status_t status = block_select::make(source, opts.block_tokens, opts.keep_tokens, roles_.n_layers(), n_window,
                                             out.select, message);
    if (status == KVT_OK && opts.audit_every && flash_ == LLAMA_FLASH_ATTN_TYPE_ENABLED) {
        message = "audit_every needs attention probabilities, which flash attention does not have: open the "
                "context with LLAMA_FLASH_ATTN_TYPE_DISABLED";
        return KVT_E_INVALID;
    }
    if (status != KVT_E_UNSUPPORTED) {
        return status;
    }
    token_evict::model_facts model;
    model.n_layers = roles_.n_layers();
    model.key_heads = (uint32_t) std::max(llama_model_n_head_kv(model_), 1);
    model.max_tokens = 4 * llama_n_ctx(ctx_) + 4096;
    model.has_windows = n_window > 0;
    status = token_evict::make(source, model, out.evict, message);
    if (status == KVT_OK && out.evict->uses_attention() &&
        flash_ == LLAMA_FLASH_ATTN_TYPE_ENABLED) {
        message = source.name() + " needs attention probabilities, which flash attention does not have: open "
                "the context with LLAMA_FLASH_ATTN_TYPE_DISABLED";
        status = KVT_E_UNSUPPORTED;
    }
    return status;
}

kvt_status_t kvt_llama_watch_t::set_policy(llama_seq_id seq, const kvt_llama_sparse_opts_t &opts,
                                           std::string &message) {
    if (!ctx_) {
        message = "the watch has no context yet: call kvt_llama_watch_attach first";
        return KVT_E_STATE;
    }
    if ((uint32_t) seq >= llama_n_seq_max(ctx_)) {
        message = "the context has no sequence " + std::to_string(seq) + ": raise n_seq_max";
        return KVT_E_INVALID;
    }
    sequence_policy made;
    made.audit_every = opts.audit_every;
    kvt_status_t status = KVT_OK;
    if (opts.spec || opts.custom) {
        status = make(opts, made, message);
    }
    if (status != KVT_OK) {
        return status;
    }
    const auto found = policies_.find(seq);
    if (found != policies_.end()) {
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
    policies_[seq] = std::move(made);
    return KVT_OK;
}
