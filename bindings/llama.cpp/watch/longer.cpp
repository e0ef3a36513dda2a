// Opens, binds and closes long sequences; the C functions.
#include "watch/longer.hpp"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>

using namespace kvt_llama;
using namespace kvt_llama::longer;

namespace {

constexpr uint32_t max_block_tokens = 1024, max_sequence_tokens = 1u << 26;
constexpr uint64_t gib = 1ull << 30, min_host_bytes = 16ull << 20;

// Runs the body of an exported function; no exception leaves it.
template <typename F> kvt_status_t guarded(kvt_llama_why_t *why, F f) {
    if (why) {
        why->text[0] = 0;
    }
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return refuse(why, KVT_E_NOMEM, "out of memory: lower host_bytes, or free memory");
    } catch (const std::exception &e) {
        return refuse(why, KVT_E_PANIC, "%s", e.what());
    } catch (...) {
        return refuse(why, KVT_E_PANIC, "internal error: an exception of unknown type");
    }
}

kvt_status_t bound(const kvt_llama_longer_t *longer, kvt_llama_why_t *why) {
    if (!longer) {
        return refuse(why, KVT_E_INVALID, "longer is null: pass an object of kvt_llama_longer_open");
    }
    return longer->is_bound ? KVT_OK
                            : refuse(why, KVT_E_STATE,
                                     "it is not bound to a context: call kvt_llama_longer_bind first");
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
        return refuse(why, KVT_E_INVALID, "flags is %#x: only KVT_LLAMA_LONGER_* are allowed",
                      opts.flags);
    }
    if (set.block_tokens > max_block_tokens || set.max_tokens > max_sequence_tokens) {
        return refuse(why, KVT_E_LIMIT,
                      "block_tokens is %u, at most %u is allowed; max_tokens is %u, at most %u is allowed",
                      set.block_tokens, max_block_tokens, set.max_tokens, max_sequence_tokens);
    }
    if (!set.store && set.host_bytes < min_host_bytes) {
        return refuse(why, KVT_E_INVALID, "host_bytes is %llu, an own store needs at least 16 MiB",
                      (unsigned long long) set.host_bytes);
    }
    if (set.has_name && set.model_id.empty()) {
        return refuse(why, KVT_E_INVALID,
                      "name is set without model_id: set it, so that KV of other weights is not found");
    }
    if (set.seq < 0 || set.held_seq < 0) {
        return refuse(why, KVT_E_INVALID, "seq is %d, held_seq is %d: neither may be negative", set.seq,
                      set.held_seq);
    }
    return KVT_OK;
}

// A RoPE scaling value in the model's metadata; "" = none.
std::string rope_scaling(const llama_model *model, const char *name) {
    char arch[128], value[64];
    if (llama_model_meta_val_str(model, "general.architecture", arch, sizeof arch) < 0) {
        return "";
    }
    const std::string key = std::string(arch) + ".rope.scaling." + name;
    return llama_model_meta_val_str(model, key.c_str(), value, sizeof value) > 0 ? value : "";
}

// Such a model rotates keys by factors that depend on the size of the context.
bool has_long_rope(const llama_model *model) { return rope_scaling(model, "type") == "longrope"; }

// Factors for long contexts may exist without a type in the metadata; yarn and linear scaling have
// none.
bool is_long(const llama_context *ctx) {
    const llama_model *model = llama_get_model(ctx);
    const std::string type = rope_scaling(model, "type");
    const std::string original = rope_scaling(model, "original_context_length");
    const unsigned long long tokens = std::strtoull(original.c_str(), nullptr, 10);
    return type != "yarn" && type != "linear" && tokens && llama_n_ctx_seq(ctx) > tokens;
}

// Checksum of the metadata in the model's file. It does not include overrides at load.
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

std::string context_text(const llama_context_params &of) {
    char message[320];
    std::snprintf(message, sizeof message, "rope %d %a %a yarn %a %a %a %a %u attention %d flash",
                  (int) of.rope_scaling_type, (double) of.rope_freq_base,
                  (double) of.rope_freq_scale, (double) of.yarn_ext_factor,
                  (double) of.yarn_attn_factor, (double) of.yarn_beta_fast,
                  (double) of.yarn_beta_slow, of.yarn_orig_ctx, (int) of.attention_type);
    return message;
}

// With quantized K and V the engine rotates heads, unless its environment disables that.
std::string bound_text(const llama_context *ctx) {
    const char *off = std::getenv("LLAMA_ATTN_ROT_DISABLE");
    char message[128];
    std::snprintf(message, sizeof message, " long %d turned %d model %016llx", (int) is_long(ctx),
                  !(off && std::atoi(off)), (unsigned long long) metadata(llama_get_model(ctx)));
    return std::string(llama_version()) + " " + ggml_version() + message;
}

std::string sparse_text(const settings &set, uint32_t cells) {
    char message[160];
    std::snprintf(message, sizeof message, " blocks of %u, sinks %u, slots %u, parts of %u, cells %u",
                  set.block_tokens, set.sink_tokens, set.slot_tokens, set.part_tokens, cells);
    return set.spec + message;
}

} // namespace

kvt_status_t kvt_llama_longer_t::open(const kvt_llama_longer_opts_t &opts,
                                      llama_context_params *params, kvt_llama_why_t *why) {
    kvt_status_t status = kvt_llama_check(why);
    if (status == KVT_OK) {
        status = read_opts(opts, given_, why);
    }
    if (status != KVT_OK) {
        return status;
    }
    if (params && params->flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "flash_attn_type is DISABLED, which transposes V in the cache: set it to "
                      "AUTO or ENABLED");
    }
    settings_ = given_;
    status = store_.open(settings_, why);
    if (status != KVT_OK || !params) {
        return status;
    }
    given_.context = context_text(*params);
    params->n_seq_max = std::max(params->n_seq_max, 2u);
    params->kv_unified = true;
    params->flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    user_eval_ = params->cb_eval;
    user_eval_data_ = params->cb_eval_user_data;
    params->cb_eval = on_node;
    params->cb_eval_user_data = this;
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::check_model(kvt_llama_why_t *why) const {
    const llama_model *model = llama_get_model(ctx_);
    const int32_t rope = llama_model_rope_type(model);
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "recurrent models are not supported: their state has a fixed size, so use "
                      "the engine alone");
    }
    if (llama_model_n_swa(model) > 0) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "models with a sliding window are not supported: use the engine alone, or "
                      "a model without windows");
    }
    if (llama_model_has_encoder(model) || llama_model_is_diffusion(model)) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "only decoder-only models with causal attention are supported");
    }
    if (has_long_rope(model)) {
        return refuse(
            why, KVT_E_UNSUPPORTED,
            "models with longrope scaling are not supported: their RoPE factors depend on n_ctx, "
            "which is smaller than the sequence");
    }
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "models with M-RoPE are not supported: use the engine alone");
    }
    return KVT_OK;
}

kvt_status_t kvt_llama_longer_t::check_sizes(kvt_llama_why_t *why) {
    const uint32_t block = settings_.block_tokens, cells = model_.cells;
    settings_.slot_tokens = settings_.slot_tokens ? settings_.slot_tokens : cells / 3 * 2;
    if (settings_.sink_tokens > cells || settings_.slot_tokens > cells || settings_.part_tokens > cells) {
        return refuse(why, KVT_E_INVALID,
                      "sink_tokens %u, slot_tokens %u and part_tokens %u must not exceed the %u cells",
                      settings_.sink_tokens, settings_.slot_tokens, settings_.part_tokens, cells);
    }
    settings_.sink_tokens = (settings_.sink_tokens + block - 1) / block * block;
    settings_.slot_tokens = settings_.slot_tokens / block * block;
    settings_.part_tokens = std::min(settings_.part_tokens, batch_tokens_);
    if (settings_.slot_tokens == 0) {
        return refuse(why, KVT_E_INVALID, "slot_tokens is less than block_tokens, %u: raise it", block);
    }
    if (settings_.sink_tokens + settings_.slot_tokens + settings_.part_tokens + 3 * block > cells) {
        return refuse(why, KVT_E_INVALID,
                      "%u cells are too few for sinks of %u tokens, slots of %u, a part of %u and "
                      "a window: raise n_ctx, or lower slot_tokens",
                      cells, settings_.sink_tokens, settings_.slot_tokens, settings_.part_tokens);
    }
    settings_.max_tokens = std::min(settings_.max_tokens, max_sequence_tokens) / block * block;
    if (settings_.max_tokens < cells) {
        return refuse(why, KVT_E_INVALID, "max_tokens is %u, at least the %u cells are required",
                      settings_.max_tokens, cells);
    }
    if (settings_.spec.empty()) {
        settings_.spec = "arkvale(sinks=0, window=0, dense=0, page=" + std::to_string(block) +
                    ", budget=" + std::to_string(settings_.slot_tokens) + ")";
    }
    return KVT_OK;
}

// Decodes one token in the held sequence, inspects every layer, and removes the token.
kvt_status_t kvt_llama_longer_t::inspect(kvt_llama_why_t *why) {
    model_ = shape();
    model_.layers = (uint32_t) llama_model_n_layer(llama_get_model(ctx_));
    roles_ = std::make_unique<roles>((int) model_.layers);
    k_.clear();
    v_.clear();
    is_host_ = !settings_.is_staged;
    inspected_layers_ = 0;
    work_ = work::inspect;
    const int rc = run_batch(nullptr, 1, 0, settings_.held_seq, false);
    llama_memory_seq_rm(memory_, settings_.held_seq, -1, -1);
    if (failure_ != KVT_OK) {
        return refuse(why, failure_, "%s", failure_why_.text);
    }
    if (rc != 0) {
        return refuse(why, KVT_E_BUSY, "llama_decode returned %d: see the engine's log", rc);
    }
    if (inspected_layers_ == 0) {
        return refuse(why, KVT_E_INVALID,
                      "the context does not call back, or has no attention with a cache: make it "
                      "from the params that kvt_llama_longer_open has set");
    }
    if (inspected_layers_ != model_.layers) {
        return refuse(why, KVT_E_UNSUPPORTED,
                      "only %u of %u layers have attention with a cache: all must have it", inspected_layers_,
                      model_.layers);
    }
    return KVT_OK;
}

// Upper limit of the memory for maps of cells and slots, staging, and masks.
uint64_t kvt_llama_longer_t::own_bytes() const {
    const uint64_t rows = model_.k_row_bytes + model_.v_row_bytes, slot_tokens = settings_.slot_tokens;
    const uint64_t group = (uint64_t) group_tokens() * model_.layers * rows;
    const uint64_t staging = is_host_ ? 0 : std::max<uint64_t>(group, slot_tokens * rows);
    const uint64_t mask = is_host_ ? 0 : 2ull * model_.cells * (batch_tokens_ + 64);
    const uint64_t query = 4ull * settings_.part_tokens * model_.query_heads * model_.key_dim;
    const uint64_t maps =
        model_.layers * (slot_tokens / settings_.block_tokens * (13 + 4)) + 8ull * model_.cells;
    return staging + mask + query + maps + 64ull * settings_.block_tokens * rows;
}

kvt_status_t kvt_llama_longer_t::bind(llama_context *ctx, kvt_llama_why_t *why) {
    if (is_bound) {
        return refuse(why, KVT_E_STATE, "it is already bound to a context: open another object");
    }
    settings_ = given_;
    ctx_ = ctx;
    memory_ = llama_get_memory(ctx);
    const llama_seq_id sequences = (llama_seq_id) llama_n_seq_max(ctx);
    settings_.held_seq = settings_.held_seq ? settings_.held_seq : sequences - 1;
    if (!memory_ || settings_.seq >= sequences || settings_.held_seq >= sequences ||
        settings_.seq == settings_.held_seq) {
        return refuse(why, KVT_E_INVALID,
                      "seq %d and held_seq %d must differ and be below the context's n_seq_max %d, and "
                      "the context must have memory",
                      settings_.seq, settings_.held_seq, sequences);
    }
    kvt_status_t status = check_model(why);
    if (status != KVT_OK) {
        return status;
    }
    for (llama_seq_id seq = 0; seq < sequences; seq++) {
        if (llama_memory_seq_pos_max(memory_, seq) >= 0) {
            return refuse(why, KVT_E_STATE,
                          "sequence %d of the context has tokens: bind an empty context", seq);
        }
    }
    batch_tokens_ = std::min(llama_n_batch(ctx), llama_n_ubatch(ctx));
    status = inspect(why);
    if (status == KVT_OK) {
        status = check_sizes(why);
    }
    if (status != KVT_OK) {
        return status;
    }
    const uint32_t slot_count = settings_.slot_tokens / settings_.block_tokens;
    cells_ = std::make_unique<cells>(model_.cells, settings_.block_tokens, settings_.sink_tokens, slot_count);
    slots_.assign(model_.layers, slots(slot_count));
    chosen.assign(model_.layers, {});
    char description[256] = "";
    llama_model_desc(llama_get_model(ctx), description, sizeof description);
    settings_.context += bound_text(ctx);
    settings_.sparse = sparse_text(settings_, model_.cells);
    stats_.own_bytes = own_bytes();
    status = store_.begin(settings_, model_, description, stats_.own_bytes, why);
    is_bound = status == KVT_OK;
    return status;
}

void kvt_llama_longer_t::stats(kvt_llama_longer_stats_t &out) const {
    out = stats_;
    if (is_bound) {
        out.tokens = cells_->tokens();
        out.stored_tokens =
            cells_->is_divided() ? cells_->window_first() - cells_->sink_tokens() : 0;
        out.cells = model_.cells;
        out.sink_cells = settings_.sink_tokens;
        out.slot_cells = settings_.slot_tokens;
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
            return refuse(why, KVT_E_INVALID, "opts or out is null: both are required");
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
                             : refuse(why, KVT_E_INVALID, "longer or ctx is null: both are required");
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
            return refuse(why, KVT_E_INVALID, "tokens is null or n_tokens is 0: pass at least one");
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
            return refuse(why, KVT_E_INVALID, "tokens or out_tokens is null: both are required");
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
