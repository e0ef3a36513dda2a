// The roles found in real graphs are the tensors that the engine computes with.
#include "model.hpp"
#include "watch/roles.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace kvt_llama;
using namespace watch_test;

namespace {

constexpr uint32_t wanted = role_q | role_k | role_v | role_attention | role_mask | role_k_idxs |
                            role_v_idxs | role_cache_k | role_cache_v | role_layer_end;

// Inspects every node, splits the graph after each write to the cache, and compares the found rows with the
// cache.
struct watcher {
    explicit watcher(int n_layers) : found(n_layers) {}

    roles found;
    bool cuts = true;
    bool is_flash = false;
    int graphs = 0, attentions = 0, firsts = 0, ends = 0, rows_equal = 0, not_computed = 0, changes = 0;
    std::vector<ggml_tensor *> masks;
    std::vector<int> order;
    std::string missing;
};

std::vector<float> floats(ggml_tensor *tensor, int64_t first, int64_t n) {
    std::vector<float> out((size_t) n);
    if (tensor->type == GGML_TYPE_F32) {
        ggml_backend_tensor_get(tensor, out.data(), (size_t) first * 4, (size_t) n * 4);
    } else if (tensor->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> half((size_t) n);
        ggml_backend_tensor_get(tensor, half.data(), (size_t) first * 2, (size_t) n * 2);
        ggml_fp16_to_fp32_row(half.data(), out.data(), n);
    }
    return out;
}

// Whether the computed row of keys is in the cache, at the cell of the index.
bool is_row_in_cache(const layer_roles &layer) {
    int64_t cell = -1;
    ggml_backend_tensor_get(layer.k_idxs, &cell, 0, sizeof cell);
    const int64_t n = layer.cache_k->ne[0];
    if (cell < 0 || cell >= layer.cache_k->ne[1] || layer.k->ne[0] != n) {
        return false;
    }
    const std::vector<float> cached = floats(layer.cache_k, cell * n, n), computed = floats(layer.k, 0, n);
    std::vector<ggml_fp16_t> half((size_t) n);
    std::vector<float> rounded((size_t) n);
    ggml_fp32_to_fp16_row(computed.data(), half.data(), n);
    ggml_fp16_to_fp32_row(half.data(), rounded.data(), n);
    const bool is_zero = std::all_of(cached.begin(), cached.end(), [](float x) { return x == 0; });
    return !is_zero && cached == rounded;
}

void at_attention(watcher &w, int il) {
    const layer_roles &layer = w.found.layer(il);
    w.attentions++;
    if (std::find(w.masks.begin(), w.masks.end(), layer.mask) == w.masks.end()) {
        w.masks.push_back(layer.mask);
    }
    const bool is_ready = w.found.is_computed(layer.q) && w.found.is_computed(layer.cache_k);
    w.not_computed += !is_ready;
    w.rows_equal += is_ready && is_row_in_cache(layer);
}

bool on_node(ggml_tensor *node, bool ask, void *user_data) {
    watcher &w = *static_cast<watcher *>(user_data);
    if (!ask) {
        return true;
    }
    const node_info s = w.found.visit(node);
    w.graphs += s.new_graph;
    w.firsts += s.first;
    w.changes += s.what == step::change;
    if (s.what == step::attention) {
        at_attention(w, s.layer);
    } else if (s.what == step::layer_end) {
        w.ends++;
        w.order.push_back(s.layer);
        char text[512];
        const uint32_t all = wanted | (w.is_flash ? 0u : (uint32_t) role_soft_max);
        if (w.found.is_missing(s.layer, all, text, sizeof text) && w.missing.empty()) {
            w.missing = text;
        }
    }
    const bool cut = w.cuts && (s.what == step::write_k || s.what == step::write_v);
    if (cut) {
        w.found.mark_computed();
    }
    return cut;
}

void roles_match_the_computed_values(llama_model *model, bool flash, size_t n_masks) {
    const int n = llama_model_n_layer(model);
    watcher w(n);
    w.is_flash = flash;
    llama_context_params p = params(1024, flash);
    p.cb_eval = on_node;
    p.cb_eval_user_data = &w;
    context_ptr ctx = open(model, p);
    CHECK(ctx != nullptr);
    const std::vector<llama_token> tokens = tokenize(model, "The sun rises in the east and sets in");
    CHECK(decode(ctx.get(), tokens, 0, tokens.size() - 3));
    for (size_t i = tokens.size() - 3; i < tokens.size(); i++) {
        CHECK(decode(ctx.get(), tokens, i, i + 1));
    }
    CHECK(w.missing.empty());
    std::fprintf(stderr, "%s", w.missing.empty() ? "" : (w.missing + "\n").c_str());
    CHECK(w.graphs == 4 && w.attentions == 4 * n && w.ends == 4 * n && w.firsts == 4 * n);
    CHECK(w.not_computed == 0 && w.rows_equal == 4 * n);
    CHECK(w.masks.size() >= n_masks);
    CHECK(w.found.layer(0).mask->ne[1] == 1 && w.found.layer(0).mask->type ==
          (flash ? GGML_TYPE_F16 : GGML_TYPE_F32));
    bool in_order = true;
    for (size_t i = 0; i < w.order.size(); i++) {
        in_order = in_order && w.order[i] == (int) i % n;
    }
    CHECK(in_order);

    // The query has one token and all heads.
    const layer_roles &first = w.found.layer(0);
    CHECK(first.q->ne[1] == 1 && first.q->ne[2] == llama_model_n_head(model));

    // A shift of positions rewrites keys in the cache, which is reported as a change.
    CHECK(w.changes == 0);
    llama_memory_t memory = llama_get_memory(ctx.get());
    if (llama_memory_can_shift(memory)) {
        llama_memory_seq_rm(memory, 0, 1, 2);
        llama_memory_seq_add(memory, 0, 2, -1, -1);
        CHECK(decode(ctx.get(), tokens, tokens.size() - 1, tokens.size()));
        CHECK(w.changes >= n);
    }
}

// Without a split, inputs of the attention are not computed yet when it is asked for. is_computed says so.
void uncomputed_roles_are_reported(llama_model *model) {
    watcher w(llama_model_n_layer(model));
    w.cuts = false;
    w.is_flash = true;
    llama_context_params p = params(512, true);
    p.cb_eval = on_node;
    p.cb_eval_user_data = &w;
    context_ptr ctx = open(model, p);
    const std::vector<llama_token> tokens = tokenize(model, "One two three");
    for (size_t i = 0; i < tokens.size(); i++) {
        CHECK(decode(ctx.get(), tokens, i, i + 1));
    }
    CHECK(w.attentions > 0 && w.not_computed == w.attentions);
}

// Roles that a model lacks are named with their layer: MLA writes no values, recurrent models have no
// attention.
void roles_absent_in_a_model_are_named(const char *name, uint32_t lacking, const char *phrase) {
    model_ptr model = load(name);
    if (!model) {
        return;
    }
    watcher w(llama_model_n_layer(model.get()));
    w.is_flash = true;
    llama_context_params p = params(512, true);
    p.cb_eval = on_node;
    p.cb_eval_user_data = &w;
    context_ptr ctx = open(model.get(), p);
    CHECK(ctx && decode(ctx.get(), {1, 2, 3}, 0, 3));
    CHECK(w.ends > 0 && w.missing.find(phrase) != std::string::npos);
    char text[512];
    CHECK(w.found.is_missing(0, lacking, text, sizeof text));
    CHECK(!w.found.is_missing(0, wanted & ~lacking, text, sizeof text));
    std::printf("%s: %s\n", name, w.missing.c_str());
}

// Nodes for hand-made graphs. Each missing role is named.
struct nodes {
    ggml_context *ctx = ggml_init({1 << 20, nullptr, true});
    ggml_tensor *cache_k = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 64, 256, 1);
    ggml_tensor *rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 1);
    ggml_tensor *idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 1);
    ggml_tensor *q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 1, 1, 1);
    ggml_tensor *mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 256, 1, 1, 1);

    ~nodes() { ggml_free(ctx); }
};

bool names_missing(const roles &found, uint32_t lacking, const char *phrase) {
    char text[512];
    return found.is_missing(0, lacking, text, sizeof text) && std::strstr(text, phrase) &&
           std::strstr(text, "layer 0");
}

void missing_roles_are_named() {
    char text[512];
    for (int lacking = 0; lacking < 4; lacking++) {
        nodes n;
        ggml_set_name(n.cache_k, lacking == 1 ? "keys_of_0" : "cache_k_l0");
        roles found(1);
        ggml_tensor *norm = ggml_norm(n.ctx, n.rows, 1e-5f);
        ggml_set_name(norm, "norm-0");
        found.visit(norm);
        if (lacking != 0) {
            found.visit(ggml_set_rows(n.ctx, n.cache_k, n.rows, n.idxs));
        }
        ggml_tensor *keys = ggml_view_4d(n.ctx, n.cache_k, 64, 256, 1, 1, 128, 128, 128, 0);
        ggml_tensor *attention = ggml_flash_attn_ext(n.ctx, n.q, keys, keys,
                                                     lacking == 2 ? nullptr : n.mask, 1, 0, 0);
        found.visit(attention);
        ggml_tensor *end = ggml_add(n.ctx, norm, norm);
        ggml_set_name(end, lacking == 3 ? "layer_out-0" : "l_out-0");
        found.visit(end);
        CHECK(names_missing(found, role_k_idxs, "cells that keys") == (lacking == 0 || lacking == 1));
        CHECK(names_missing(found, role_attention, "attention") == (lacking == 1));
        CHECK(names_missing(found, role_q, "queries") == (lacking == 1));
        CHECK(names_missing(found, role_cache_k, "cache of keys") == (lacking == 1));
        CHECK(names_missing(found, role_mask, "mask") == (lacking == 1 || lacking == 2));
        CHECK(names_missing(found, role_layer_end, "l_out") == (lacking == 3));
        CHECK(names_missing(found, role_soft_max, "FLASH_ATTN_TYPE_DISABLED"));
        CHECK(names_missing(found, role_v, "values") && names_missing(found, role_v_idxs, "values"));
        CHECK(names_missing(found, role_mask | role_v, "values"));
    }
    const roles nothing(1);
    CHECK(names_missing(nothing, role_cache_v, "cache of values"));
    CHECK(!nothing.is_missing(7, role_q, text, sizeof text) && !nothing.is_missing(0, 0, text, 0));
}

// Node names that are too long, have no layer number, or have one beyond the last layer.
void unknown_node_names_are_ignored() {
    nodes n;
    roles found(2);
    const char *const odd[] = {"",        "-",        "Qcur-",  "Qcur-99999999999", "l_out-2",
                               "l_out-1x", "cache_",   "cache_k_l", "_l"};
    for (const char *name : odd) {
        ggml_tensor *node = ggml_norm(n.ctx, n.rows, 1e-5f);
        ggml_set_name(node, name);
        const node_info s = found.visit(node);
        CHECK(s.what == step::other && s.layer == -1 && !s.first);
        char kind = 0;
        ggml_tensor *leaf = ggml_new_tensor_1d(n.ctx, GGML_TYPE_F32, 1);
        ggml_set_name(leaf, name);
        CHECK(cache_layer(leaf, &kind) == -1);
    }
    CHECK(!found.is_computed(nullptr));
}

} // namespace

int main() {
    missing_roles_are_named();
    unknown_node_names_are_ignored();
    int models = 0;
    const struct {
        const char *name;
        size_t n_masks;
    } all[] = {{"smollm2.gguf", 1}, {"gemma3.gguf", 2}, {"tiny-llama-f16.gguf", 1},
               {"tiny-swa.gguf", 2}, {"tiny-moe.gguf", 1}};
    for (const auto &one : all) {
        model_ptr model = load(one.name);
        if (!model) {
            continue;
        }
        models++;
        for (int flash = 0; flash < 2; flash++) {
            roles_match_the_computed_values(model.get(), flash, one.n_masks);
        }
        uncomputed_roles_are_reported(model.get());
        std::printf("%s\n", one.name);
    }
    roles_absent_in_a_model_are_named("tiny-mla.gguf", role_v | role_v_idxs, "values");
    roles_absent_in_a_model_are_named("tiny-mamba.gguf", wanted & ~role_layer_end, "attention");
    if (!models && !failures) {
        skip("no model in KVTIER_LLAMA_MODELS");
    }
    return failures != 0;
}
