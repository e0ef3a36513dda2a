// Opening, binding and closing; the C functions.
#include "watch/longer.hpp"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>

using namespace kvt_llama;
using namespace kvt_llama::longer;

namespace {

constexpr uint32_t max_block_tokens = 1024, max_sequence_tokens = 1u << 26;
constexpr uint64_t gib = 1ull << 30, least_host_bytes = 16ull << 20;

// No exception leaves a C function.
template <typename F> kvt_status_t guarded(kvt_llama_why_t *why, F f) {
    if (why) {
        why->text[0] = 0;
    }
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return refuse(why, KVT_E_NOMEM, "no memory");
    } catch (const std::exception &e) {
        return refuse(why, KVT_E_PANIC, "%s", e.what());
    } catch (...) {
        return refuse(why, KVT_E_PANIC, "an unknown exception");
    }
}

kvt_status_t bound(const kvt_llama_longer_t *longer, kvt_llama_why_t *why) {
    if (!longer) {
        return refuse(why, KVT_E_INVALID, "null instead of what kvt_llama_longer_open gave");
    }
    return longer->is_bound ? KVT_OK : refuse(why, KVT_E_STATE, "it is not bound to a context");
}

kvt_status_t read_opts(const kvt_llama_longer_opts_t &opts, settings &set, kvt_llama_why_t *why) {
    set.store = opts.store;
    set.account = opts.account;
    set.host_bytes = opts.host_bytes ? opts.host_bytes : gib;
    set.has_disk = opts.disk_path != nullptr;
    set.disk_path = opts.disk_path ? opts.disk_path : "";
    set.disk_bytes = opts.disk_bytes ? opts.disk_bytes : 8 * gib;
    set.has_name = opts.name != nullptr;
    set.name = opts.name ? opts.name : "";
    set.model_id = opts.model_id ? opts.model_id : "";
    set.spec = opts.spec ? opts.spec : "";
    set.adapters = opts.adapters ? opts.adapters : "";
    set.block_tokens = opts.block_tokens ? opts.block_tokens : 8;
    set.sink_tokens = opts.sink_tokens ? opts.sink_tokens : 16;
    set.slot_tokens = opts.slot_tokens;
    set.part_tokens = opts.part_tokens ? opts.part_tokens : 16;
    set.max_tokens = opts.max_tokens ? opts.max_tokens : 1u << 20;
    set.seq = opts.seq;
    set.held_seq = opts.held_seq;
    set.is_ordered = opts.flags & KVT_LLAMA_LONGER_ORDERED;
    set.is_staged = opts.flags & KVT_LLAMA_LONGER_STAGED;
    if (opts.flags & ~(KVT_LLAMA_LONGER_ORDERED | KVT_LLAMA_LONGER_STAGED)) {
        return refuse(why, KVT_E_INVALID, "unknown flags %#x", opts.flags);
    }
    if (set.block_tokens > max_block_tokens || set.max_tokens > max_sequence_tokens) {
        return refuse(why, KVT_E_LIMIT, "a block has at most %u tokens, a sequence %u",
                      max_block_tokens, max_sequence_tokens);
    }
    if (!set.store && set.host_bytes < least_host_bytes) {
        return refuse(why, KVT_E_INVALID, "host_bytes of an own store are at least 16 MiB");
    }
    if (set.has_name && set.model_id.empty()) {
        return refuse(why, KVT_E_INVALID,
                      "a name needs a model_id: KV of other weights must not be found under it");
    }
    if (set.seq < 0 || set.held_seq < 0) {
        return refuse(why, KVT_E_INVALID, "sequence ids are not negative");
    }
    return KVT_OK;
}

// What the model says of its RoPE, "" for nothing.
std::string rope_scaling(const llama_model *model, const char *name) {
    char arch[128], value[64];
    if (llama_model_meta_val_str(model, "general.architecture", arch, sizeof arch) < 0) {
        return "";
    }
    const std::string key = std::string(arch) + ".rope.scaling." + name;
    return llama_model_meta_val_str(model, key.c_str(), value, sizeof value) > 0 ? value : "";
}

// Such a model turns keys by factors that the size of the context decides.
bool has_long_rope(const llama_model *model) { return rope_scaling(model, "type") == "longrope"; }

// Factors for long contexts may be there without a word of it; yarn and linear scaling have none.
bool is_long(const llama_context *ctx) {
    const llama_model *model = llama_get_model(ctx);
    const std::string type = rope_scaling(model, "type");
    const std::string original = rope_scaling(model, "original_context_length");
    const unsigned long long tokens = std::strtoull(original.c_str(), nullptr, 10);
    return type != "yarn" && type != "linear" && tokens && llama_n_ctx_seq(ctx) > tokens;
}

// A sum of all that the model's file says of itself. What was overridden at load is not in it.
uint64_t metadata(const llama_model *model) {
    std::string all;
    std::vector<char> value(1 << 16);
    char key[256];
    for (int32_t i = 0; i < llama_model_meta_count(model); i++) {
        if (llama_model_meta_key_by_index(model, i, key, sizeof key) >= 0 &&
            llama_model_meta_val_str_by_index(model, i, value.data(), value.size()) >= 0) {
            all += std::string(key) + "=" + value.data() + "\n";
        }
    }
    uint64_t sum = 0;
    kvt_checksum(all.data(), all.size(), &sum);
    return sum;
}

std::string context_words(const llama_context_params &of) {
    char words[320];
    std::snprintf(words, sizeof words, "rope %d %a %a yarn %a %a %a %a %u attention %d flash",
                  (int) of.rope_scaling_type, (double) of.rope_freq_base,
                  (double) of.rope_freq_scale, (double) of.yarn_ext_factor,
                  (double) of.yarn_attn_factor, (double) of.yarn_beta_fast,
                  (double) of.yarn_beta_slow, of.yarn_orig_ctx, (int) of.attention_type);
    return words;
}

// With quantized K and V the engine turns heads, unless its environment says not to.
std::string bound_words(const llama_context *ctx) {
    const char *off = std::getenv("LLAMA_ATTN_ROT_DISABLE");
    char words[128];
    std::snprintf(words, sizeof words, " long %d turned %d model %016llx", (int) is_long(ctx),
                  !(off && std::atoi(off)), (unsigned long long) metadata(llama_get_model(ctx)));
    return std::string(llama_version()) + " " + ggml_version() + words;
}

std::string sparse_words(const settings &set, uint32_t cells) {
    char words[160];
    std::snprintf(words, sizeof words, " blocks of %u, sinks %u, slots %u, parts of %u, cells %u",
                  set.block_tokens, set.sink_tokens, set.slot_tokens, set.part_tokens, cells);
    return set.spec + words;
}

} // namespace

kvt_status_t kvt_llama_longer_t::open(const kvt_llama_longer_opts_t &opts,
                                      llama_context_params *params, kvt_llama_why_t *why) {
    kvt_status_t status = kvt_llama_check(why);
    if (status == KVT_OK) {
        status = read_opts(opts, asked_set_, why);
    }
    if (status != KVT_OK) {
        return status;
    }
    if (params && params->flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "without flash attention V lies transposed in the cache: leave "
                      "flash_attn_type at AUTO, or ENABLED");
    }
    set_ = asked_set_;
    status = store_.open(set_, why);
    if (status != KVT_OK || !params) {
        return status;
    }
    asked_set_.context = context_words(*params);
    params->n_seq_max = std::max(params->n_seq_max, 2u);
    params->kv_unified = true;
    params->flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    next_ = params->cb_eval;
    next_data_ = params->cb_eval_user_data;
    params->cb_eval = on_node;
    params->cb_eval_user_data = this;
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::check_model(kvt_llama_why_t *why) const {
    const llama_model *model = llama_get_model(ctx_);
    const int32_t rope = llama_model_rope_type(model);
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "a recurrent state has the whole sequence in it: nothing of it can be "
                      "left out, and nothing need be");
    }
    if (llama_model_n_swa(model) > 0) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "layers with a sliding window have a cache of their own that holds no "
                      "slots: use the engine as it is, or a model without windows");
    }
    if (llama_model_has_encoder(model) || llama_model_is_diffusion(model)) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "only models that write text from left to right are served");
    }
    if (has_long_rope(model)) {
        return refuse(
            why, KVT_E_UNSUPPORTED,
            "this model rotates by other factors in a longer context (longrope): with few "
            "cells it would take those of short ones");
    }
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "positions with several numbers (M-RoPE) are not served");
    }
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::check_sizes(kvt_llama_why_t *why) {
    const uint32_t block = set_.block_tokens, cells = model_.cells;
    set_.slot_tokens = set_.slot_tokens ? set_.slot_tokens : cells / 3 * 2;
    if (set_.sink_tokens > cells || set_.slot_tokens > cells || set_.part_tokens > cells) {
        return refuse(why, KVT_E_INVALID,
                      "sinks, slots and parts have no more tokens than the %u cells", cells);
    }
    set_.sink_tokens = (set_.sink_tokens + block - 1) / block * block;
    set_.slot_tokens = set_.slot_tokens / block * block;
    set_.part_tokens = std::min(set_.part_tokens, batch_tokens_);
    if (set_.slot_tokens == 0) {
        return refuse(why, KVT_E_INVALID, "slot_tokens are less than a block of %u", block);
    }
    if (set_.sink_tokens + set_.slot_tokens + set_.part_tokens + 3 * block > cells) {
        return refuse(why, KVT_E_INVALID,
                      "%u cells have no room for %u tokens of sinks, %u of slots, a part of %u and "
                      "a window: make n_ctx larger, or slot_tokens smaller",
                      cells, set_.sink_tokens, set_.slot_tokens, set_.part_tokens);
    }
    set_.max_tokens = std::min(set_.max_tokens, max_sequence_tokens) / block * block;
    if (set_.max_tokens < cells) {
        return refuse(why, KVT_E_INVALID, "max_tokens are less than the %u cells", cells);
    }
    if (set_.spec.empty()) {
        set_.spec = "arkvale(sinks=0, window=0, dense=0, page=" + std::to_string(block) +
                    ", budget=" + std::to_string(set_.slot_tokens) + ")";
    }
    return KVT_OK;
}

// A token of the held sequence is decoded, and every layer looked at; then it is taken back.
kvt_status_t kvt_llama_longer_t::learn(kvt_llama_why_t *why) {
    model_ = shape();
    model_.layers = (uint32_t) llama_model_n_layer(llama_get_model(ctx_));
    roles_ = std::make_unique<roles>((int) model_.layers);
    k_.clear();
    v_.clear();
    is_host_ = !set_.is_staged;
    learned_ = 0;
    work_ = work::learn;
    const int rc = run_batch(nullptr, 1, 0, set_.held_seq, false);
    llama_memory_seq_rm(memory_, set_.held_seq, -1, -1);
    if (failure_ != KVT_OK) {
        return refuse(why, failure_, "%s", failure_why_.text);
    }
    if (rc != 0) {
        return refuse(why, KVT_E_BUSY, "llama_decode says %d", rc);
    }
    if (learned_ == 0) {
        return refuse(why, KVT_E_INVALID,
                      "this context does not call back, or has no attention with a cache: it is "
                      "to be made from the params that kvt_llama_longer_open has set");
    }
    if (learned_ != model_.layers) {
        return refuse(why, KVT_E_UNSUPPORTED, "%u of %u layers have attention with a cache",
                      learned_, model_.layers);
    }
    return KVT_OK;
}

// Maps of cells and slots, staging, masks: the most that they become.
uint64_t kvt_llama_longer_t::own_bytes() const {
    const uint64_t rows = model_.k_row_bytes + model_.v_row_bytes, slot_tokens = set_.slot_tokens;
    const uint64_t group = (uint64_t) group_tokens() * model_.layers * rows;
    const uint64_t staging = is_host_ ? 0 : std::max<uint64_t>(group, slot_tokens * rows);
    const uint64_t mask = is_host_ ? 0 : 2ull * model_.cells * (batch_tokens_ + 64);
    const uint64_t query = 4ull * set_.part_tokens * model_.query_heads * model_.key_dim;
    const uint64_t maps =
        model_.layers * (slot_tokens / set_.block_tokens * (13 + 4)) + 8ull * model_.cells;
    return staging + mask + query + maps + 64ull * set_.block_tokens * rows;
}

kvt_status_t kvt_llama_longer_t::bind(llama_context *ctx, kvt_llama_why_t *why) {
    if (is_bound) {
        return refuse(why, KVT_E_STATE, "it is bound to a context already");
    }
    set_ = asked_set_;
    ctx_ = ctx;
    memory_ = llama_get_memory(ctx);
    const llama_seq_id sequences = (llama_seq_id) llama_n_seq_max(ctx);
    set_.held_seq = set_.held_seq ? set_.held_seq : sequences - 1;
    if (!memory_ || set_.seq >= sequences || set_.held_seq >= sequences ||
        set_.seq == set_.held_seq) {
        return refuse(why, KVT_E_INVALID,
                      "sequences %d and %d are wanted of a context with %d, and memory", set_.seq,
                      set_.held_seq, sequences);
    }
    kvt_status_t status = check_model(why);
    if (status != KVT_OK) {
        return status;
    }
    for (llama_seq_id seq = 0; seq < sequences; seq++) {
        if (llama_memory_seq_pos_max(memory_, seq) >= 0) {
            return refuse(why, KVT_E_STATE, "sequence %d of the context has tokens: bind it before",
                          seq);
        }
    }
    batch_tokens_ = std::min(llama_n_batch(ctx), llama_n_ubatch(ctx));
    status = learn(why);
    if (status == KVT_OK) {
        status = check_sizes(why);
    }
    if (status != KVT_OK) {
        return status;
    }
    const uint32_t slot_count = set_.slot_tokens / set_.block_tokens;
    where_ = std::make_unique<cells>(model_.cells, set_.block_tokens, set_.sink_tokens, slot_count);
    slots_.assign(model_.layers, slots(slot_count));
    chosen.assign(model_.layers, {});
    char description[256] = "";
    llama_model_desc(llama_get_model(ctx), description, sizeof description);
    set_.context += bound_words(ctx);
    set_.sparse = sparse_words(set_, model_.cells);
    stats_.own_bytes = own_bytes();
    status = store_.begin(set_, model_, description, stats_.own_bytes, why);
    is_bound = status == KVT_OK;
    return status;
}

void kvt_llama_longer_t::stats(kvt_llama_longer_stats_t &out) const {
    out = stats_;
    if (is_bound) {
        out.tokens = where_->tokens();
        out.stored_tokens =
            where_->is_divided() ? where_->window_first() - where_->sink_tokens() : 0;
        out.cells = model_.cells;
        out.sink_cells = set_.sink_tokens;
        out.slot_cells = set_.slot_tokens;
        out.policy_bytes = store_.policy_bytes();
    }
}

kvt_status_t kvt_llama_longer_t::close(kvt_llama_why_t *why) {
    is_bound = false;
    work_ = work::none;
    return store_.close(why);
}

kvt_status_t kvt_llama_longer_open(const kvt_llama_longer_opts_t *opts,
                                   llama_context_params *params, kvt_llama_longer_t **out,
                                   kvt_llama_why_t *why) {
    if (out) {
        *out = nullptr;
    }
    return guarded(why, [&]() -> kvt_status_t {
        if (!opts || !out) {
            return refuse(why, KVT_E_INVALID, "opts and out must not be null");
        }
        auto longer = std::make_unique<kvt_llama_longer_t>();
        const kvt_status_t status = longer->open(*opts, params, why);
        if (status == KVT_OK) {
            *out = longer.release();
        }
        return status;
    });
}

kvt_status_t kvt_llama_longer_bind(kvt_llama_longer_t *longer, llama_context *ctx,
                                   kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        return longer && ctx ? longer->bind(ctx, why)
                             : refuse(why, KVT_E_INVALID, "null instead of a context");
    });
}

kvt_status_t kvt_llama_longer_decode(kvt_llama_longer_t *longer, const llama_token *tokens,
                                     size_t n_tokens, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        const kvt_status_t status = bound(longer, why);
        if (status != KVT_OK) {
            return status;
        }
        if (!tokens || n_tokens == 0) {
            return refuse(why, KVT_E_INVALID, "no tokens");
        }
        return longer->decode(tokens, n_tokens, why);
    });
}

kvt_status_t kvt_llama_longer_truncate(kvt_llama_longer_t *longer, size_t n_tokens,
                                       kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        const kvt_status_t status = bound(longer, why);
        return status == KVT_OK ? longer->truncate(n_tokens, why) : status;
    });
}

kvt_status_t kvt_llama_longer_save(kvt_llama_longer_t *longer, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        const kvt_status_t status = bound(longer, why);
        return status == KVT_OK ? longer->save(why) : status;
    });
}

kvt_status_t kvt_llama_longer_resume(kvt_llama_longer_t *longer, const llama_token *tokens,
                                     size_t n_tokens, size_t *out_tokens, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        const kvt_status_t status = bound(longer, why);
        if (status != KVT_OK) {
            return status;
        }
        if (!tokens || !out_tokens) {
            return refuse(why, KVT_E_INVALID, "tokens and out_tokens must not be null");
        }
        return longer->resume(tokens, n_tokens, *out_tokens, why);
    });
}

kvt_status_t kvt_llama_longer_stats(const kvt_llama_longer_t *longer,
                                    kvt_llama_longer_stats_t *out) {
    if (!longer || !out) {
        return KVT_E_INVALID;
    }
    longer->stats(*out);
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_chosen(const kvt_llama_longer_t *longer, uint32_t layer,
                                     uint32_t *blocks, size_t room, size_t *count_out) {
    if (!longer || !count_out || layer >= longer->chosen.size() || (!blocks && room)) {
        return KVT_E_INVALID;
    }
    const std::vector<uint32_t> &chosen = longer->chosen[layer];
    *count_out = chosen.size();
    if (room < chosen.size()) {
        return KVT_E_TOO_SMALL;
    }
    std::copy(chosen.begin(), chosen.end(), blocks);
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_close(kvt_llama_longer_t **longer, kvt_llama_why_t *why) {
    return guarded(why, [&]() -> kvt_status_t {
        if (!longer || !*longer) {
            return KVT_OK;
        }
        const kvt_status_t status = (*longer)->close(why);
        if (status == KVT_OK) {
            delete *longer;
            *longer = nullptr;
        }
        return status;
    });
}
