// Unsupported requests are refused with a message, and the engine continues without a policy. The layer
// callback and the caller's cb_eval work beside policies.
#include "watched.hpp"

#include <cstring>

using namespace watch_test;

namespace {

bool has_text(const kvt_llama_why_t &why, const char *text) {
    const bool has = std::strstr(why.text, text) != nullptr;
    if (!has) {
        std::fprintf(stderr, "no '%s' in: %s\n", text, why.text);
    }
    return has;
}

void unsupported_specs_are_refused(llama_model *model) {
    watched w(model, params(512, false));
    const struct {
        const char *spec;
        kvt_status_t status;
        const char *text;
    } all[] = {{"h20", KVT_E_SPEC, "h2o"},
               {"quest(budgte=1)", KVT_E_SPEC, "budget"},
               {"minference", KVT_E_UNSUPPORTED, "quest"},
               {"external", KVT_E_UNSUPPORTED, "quest"},
               {"dsa", KVT_E_UNSUPPORTED, "quest"},
               {"adakv(budget=128)", KVT_E_UNSUPPORTED, "all heads share"},
               {"streaming(rotate=true)", KVT_E_UNSUPPORTED, "at fixed positions"},
               {"", KVT_E_SPEC, ""}};
    for (const auto &one : all) {
        CHECK(w.policy(0, one.spec) == one.status && has_text(w.why, one.text));
    }
    CHECK(w.policy(0, "quest(page=16)", 24) == KVT_E_SPEC && has_text(w.why, "24"));
    CHECK(w.policy(0, "quest", 1u << 30) == KVT_E_INVALID);
    CHECK(w.policy(77, "h2o") == KVT_E_INVALID && has_text(w.why, "77"));
    CHECK(w.policy(-1, "h2o") == KVT_E_INVALID);
    CHECK(w.policy(0, nullptr) == KVT_OK);
    CHECK(w.stats().graphs == 0);

    watched flash(model, params(512, true));
    CHECK(flash.policy(0, "h2o") == KVT_E_UNSUPPORTED && has_text(flash.why, "FLASH_ATTN_TYPE_DISABLED"));
    CHECK(flash.policy(0, "streaming") == KVT_OK && flash.policy(0, "knorm") !=
          KVT_E_SPEC);
}

void invalid_arguments_are_refused(llama_model *model) {
    kvt_llama_watch_t *watch = reinterpret_cast<kvt_llama_watch_t *>(&model);
    kvt_llama_why_t why;
    CHECK(kvt_llama_watch_open(nullptr, nullptr, &watch, &why) == KVT_E_INVALID && !watch);
    CHECK(kvt_llama_watch_open(model, nullptr, nullptr, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_open(model, nullptr, &watch, &why) == KVT_OK && watch);
    kvt_llama_sparse_opts_t opts = {};
    opts.spec = "h2o";
    CHECK(kvt_llama_watch_policy(watch, 0, &opts, &why) == KVT_E_STATE && has_text(why, "attach"));
    CHECK(kvt_llama_watch_params(watch, nullptr, &why) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_attach(watch, nullptr, &why) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_decode(watch, llama_batch_get_one(nullptr, 0), nullptr, &why) ==
          KVT_E_INVALID);
    CHECK(kvt_llama_watch_stats(watch, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_evicted(nullptr, 0, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_is_exact(watch, 0, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_changed(nullptr, 0) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_fault(watch, &why) == KVT_OK && why.text[0] == 0);
    CHECK(kvt_llama_watch_close(&watch) == KVT_OK && !watch);
    CHECK(kvt_llama_watch_close(&watch) == KVT_OK && kvt_llama_watch_close(nullptr) == KVT_OK);
}

// A cb_eval before the watch, which hides a mask or a K cache from the watch.
struct node_tamper {
    int mode = 0, layer = 1;
    bool is_active = false;
    ggml_tensor *node = nullptr, *cache = nullptr, *mask = nullptr;
    char name[GGML_MAX_NAME];
    size_t visible = 0; // cells that the last attention may read

    void count_visible(ggml_tensor *row) {
        std::vector<uint8_t> bytes(ggml_nbytes(row));
        ggml_backend_tensor_get(row, bytes.data(), 0, bytes.size());
        visible = 0;
        for (int64_t cell = 0; cell < row->ne[0]; cell++) {
            visible += row->type == GGML_TYPE_F16
                           ? reinterpret_cast<const uint16_t *>(bytes.data())[cell] != 0xFC00
                           : reinterpret_cast<const float *>(bytes.data())[cell] > -1e30f;
        }
    }

    void undo() {
        if (node && mask) {
            node->src[node->op == GGML_OP_SOFT_MAX ? 1 : 3] = mask;
        }
        if (cache) {
            ggml_set_name(cache, name);
        }
        node = cache = mask = nullptr;
    }

    static bool on_node(ggml_tensor *node, bool ask, void *user_data) {
        node_tamper &self = *static_cast<node_tamper *>(user_data);
        self.undo();
        if (!ask || !self.is_active) {
            return true;
        }
        const bool is_attention = node->op == GGML_OP_SOFT_MAX || node->op == GGML_OP_FLASH_ATTN_EXT;
        const std::string own = "cache_k_l" + std::to_string(self.layer);
        ggml_tensor *cache = node;
        while (cache->view_src) {
            cache = cache->view_src;
        }
        const bool is_own = std::string(cache->name) == own;
        if (is_attention) {
            self.count_visible(node->src[node->op == GGML_OP_SOFT_MAX ? 1 : 3]);
        }
        if (self.mode == 0 && is_attention) {
            const int at = node->op == GGML_OP_SOFT_MAX ? 1 : 3;
            self.node = node;
            self.mask = node->src[at];
            node->src[at] = nullptr;
            // The scheduler computes a group after its last ask, so undo in the next call is early enough.
            return false;
        }
        if (self.mode == 1 && node->op == GGML_OP_SET_ROWS && is_own) {
            self.cache = cache;
            std::memcpy(self.name, cache->name, sizeof self.name);
            ggml_set_name(cache, "keys of another name");
        }
        return false;
    }
};

// A role disappears while a policy serves: the policy ends with a message, and logits stay right.
void missing_roles_end_the_policy(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, 60, 21);
    for (int flash = 0; flash < 2; flash++) {
        for (int mode = 0; mode < 2; mode++) {
            for (const char *spec : {"h2o(sink=2, recent=4, budget=90)", "quest(budget=4096)"}) {
                if (flash && spec[0] == 'h') {
                    continue;
                }
                node_tamper tamper;
                tamper.mode = mode;
                llama_context_params p = params(512, flash);
                context_ptr other = open(model, p);
                p.cb_eval = node_tamper::on_node;
                p.cb_eval_user_data = &tamper;
                watched w(model, p);
                CHECK(w.policy(0, spec) == KVT_OK);
                CHECK(w.decode(tokens, 0, 50) == KVT_OK && w.decode(tokens, 50, 51) == KVT_OK);
                CHECK(decode(other.get(), tokens, 0, 50) && decode(other.get(), tokens, 50, 51));
                tamper.is_active = true;
                CHECK(w.decode(tokens, 51, 52) == KVT_E_UNSUPPORTED && w.rc == 0);
                CHECK(has_text(w.why, mode == 0 ? "mask of the attention" : "cells that keys"));
                CHECK(has_text(w.why, "layer "));
                CHECK(decode(other.get(), tokens, 51, 52));
                CHECK(logits(w.ctx.get()) == logits(other.get()));
                CHECK(w.stats().ended == 1 &&
                      kvt_llama_watch_fault(w.watch, nullptr) == KVT_E_UNSUPPORTED);
                tamper.is_active = false;
                CHECK(w.decode(tokens, 52, 53) == KVT_OK && decode(other.get(), tokens, 52, 53));
                CHECK(logits(w.ctx.get()) == logits(other.get()));
            }
        }
    }
}

// A policy that ends inside a graph masks no later layer.
void ended_policy_restores_masks(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, 120, 27);
    for (int flash = 0; flash < 2; flash++) {
        node_tamper tamper;
        tamper.mode = 1;
        llama_context_params p = params(512, flash);
        p.cb_eval = node_tamper::on_node;
        p.cb_eval_user_data = &tamper;
        watched w(model, p);
        CHECK(w.policy(0, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
        CHECK(w.decode(tokens, 0, 100) == KVT_OK && w.decode(tokens, 100, 101) == KVT_OK);
        const uint64_t before = w.stats().sparse_layers;
        tamper.is_active = true;
        CHECK(w.decode(tokens, 101, 102) == KVT_E_UNSUPPORTED && w.rc == 0);
        // The layer before was masked, the last one sees all cells.
        CHECK(w.stats().sparse_layers == before + 1 && tamper.visible == 102);
    }
}

// After a shift a policy's record of positions is invalid.
void position_shift_ends_the_policy(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, 60, 28);
    watched w(model, params(512, false));
    CHECK(w.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
    CHECK(w.policy(1, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
    CHECK(w.decode(tokens, 0, 40) == KVT_OK && w.decode(tokens, 40, 41) == KVT_OK);
    CHECK(w.decode(tokens, 0, 50, 1) == KVT_OK && w.decode(tokens, 50, 51, 1) == KVT_OK);
    const uint64_t before = w.evicted();
    llama_memory_seq_add(llama_get_memory(w.ctx.get()), 0, 30, -1, -5);
    CHECK(w.decode(tokens, 36, 37) == KVT_E_UNSUPPORTED && w.rc == 0 && has_text(w.why, "shifted"));
    CHECK(w.evicted() == before && w.stats().rebuilds == 1 && w.stats().ended == 1);
    CHECK(w.decode(tokens, 37, 38) == KVT_OK && w.evicted() == before);
}

// Tokens decoded without the watch, batches of several sequences, and automatic flash attention.
void unobserved_tokens_and_mixed_batches_are_refused(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, 60, 22);
    watched w(model, params(512, false));
    CHECK(decode(w.ctx.get(), tokens, 0, 20));
    CHECK(w.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
    CHECK(w.decode(tokens, 20, 40) == KVT_E_STATE && w.rc == 0 && has_text(w.why, "not observed"));
    context_ptr other = open(model, params(512, false));
    CHECK(decode(other.get(), tokens, 0, 20) && decode(other.get(), tokens, 20, 40));
    CHECK(logits(w.ctx.get()) == logits(other.get()));

    // A policy by position does not need to observe tokens.
    CHECK(w.policy(0, "streaming(sinks=4, recent=16)") == KVT_OK);
    CHECK(w.decode(tokens, 40, 41) == KVT_OK && w.decode(tokens, 41, 42) == KVT_OK);
    CHECK(w.evicted() == 42 - 20);

    CHECK(w.policy(1, "tova(budget=8)") == KVT_OK);
    llama_batch batch = llama_batch_init(2, 0, 1);
    batch.n_tokens = 2;
    for (int i = 0; i < 2; i++) {
        batch.token[i] = tokens[0];
        batch.pos[i] = 0;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 1 + i;
        batch.logits[i] = true;
    }
    CHECK(kvt_llama_watch_decode(w.watch, batch, &w.rc, &w.why) == KVT_E_UNSUPPORTED && w.rc == 0);
    CHECK(has_text(w.why, "several sequences"));
    llama_batch_free(batch);

    llama_context_params p = params(512, false);
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
    watched auto_flash(model, p);
    CHECK(auto_flash.policy(0, "h2o") == KVT_OK);
    CHECK(auto_flash.decode(tokens, 0, 20) == KVT_E_UNSUPPORTED && auto_flash.rc == 0);
    CHECK(has_text(auto_flash.why, "FLASH_ATTN_TYPE_DISABLED"));

    // An invalid batch is refused, and the policy continues.
    watched small(model, params(256, false));
    CHECK(small.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
    const std::vector<llama_token> tokens_beyond = random_tokens(model, 300, 23);
    CHECK(small.decode(tokens_beyond, 0, 200) == KVT_OK && small.rc == 0);
    CHECK(small.decode(tokens_beyond, 0, 1) == KVT_E_INVALID && has_text(small.why, "ascend"));
}

// MLA and hybrid models are served; models without attention are refused.
void models_are_served_or_refused() {
    model_ptr mla = load("tiny-mla.gguf");
    const std::vector<llama_token> none;
    if (mla) {
        const std::vector<llama_token> tokens = random_tokens(mla.get(), 80, 24);
        watched w(mla.get(), params(512, true));
        CHECK(w.policy(0, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
        CHECK(w.decode(tokens, 0, 70) == KVT_OK);
        for (size_t i = 70; i < tokens.size(); i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.rc == 0);
        }
        CHECK(w.stats().masked_cells > 0);
        std::printf("  tiny-mla: latents are selected like keys\n");
    }
    model_ptr mamba = load("tiny-mamba.gguf");
    if (mamba) {
        const std::vector<llama_token> tokens = random_tokens(mamba.get(), 20, 25);
        watched w(mamba.get(), params(512, false));
        CHECK(w.policy(0, "h2o") == KVT_OK);
        CHECK(w.decode(tokens, 0, 10) == KVT_E_UNSUPPORTED && w.rc == 0 && has_text(w.why, "attention"));
    }
    model_ptr hybrid = load("tiny-hybrid.gguf");
    if (hybrid) {
        const std::vector<llama_token> tokens = random_tokens(hybrid.get(), 80, 26);
        watched w(hybrid.get(), params(512, true));
        CHECK(w.policy(0, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
        CHECK(w.decode(tokens, 0, 70) == KVT_OK && w.rc == 0);
        for (size_t i = 70; i < tokens.size(); i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.rc == 0);
        }
        CHECK(w.stats().masked_cells > 0);

        // Evicted tokens leave the attention layers only; recurrent states keep them.
        watched h2o(hybrid.get(), params(512, false));
        CHECK(h2o.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
        CHECK(h2o.decode(tokens, 0, 70) == KVT_OK && h2o.rc == 0 && h2o.evicted() == 70 - 14);
        CHECK(h2o.decode(tokens, 70, 71) == KVT_OK && h2o.rc == 0 && h2o.evicted() == 71 - 14);
    }
}

struct layer_clock {
    int n_layers = 0, next = 0, graphs = 0, wrong = 0;
    bool is_in = false;

    static void tick(void *user_data, int32_t layer, int32_t is_end) {
        layer_clock &self = *static_cast<layer_clock *>(user_data);
        self.wrong += layer != self.next || self.is_in != (is_end != 0);
        self.is_in = !is_end;
        self.next = is_end ? (layer + 1) % self.n_layers : layer;
        self.graphs += is_end && self.next == 0;
    }
};

void layer_callback_runs_in_order(llama_model *model) {
    for (const char *spec : {(const char *) nullptr, "h2o(sink=2, recent=4, budget=8)", "quest"}) {
        layer_clock time;
        time.n_layers = llama_model_n_layer(model);
        kvt_llama_watch_opts_t opts = {};
        opts.on_layer = layer_clock::tick;
        opts.on_layer_data = &time;
        watched w(model, params(512, false), &opts);
        context_ptr other = open(model, params(512, false));
        CHECK(w.policy(0, spec) == KVT_OK);
        const std::vector<llama_token> tokens = random_tokens(model, 30, 31);
        CHECK(w.decode(tokens, 0, 20) == KVT_OK && decode(other.get(), tokens, 0, 20));
        CHECK(logits(w.ctx.get()) == logits(other.get()));
        for (size_t i = 20; i < 30; i++) {
            CHECK(decode(w.ctx.get(), tokens, i, i + 1));
        }
        CHECK(time.wrong == 0 && time.graphs == 11 && !time.is_in);
        CHECK(w.stats().graphs == 11);
    }
}

} // namespace

int main() {
    int models = 0;
    for (const char *name : {"tiny-llama-f16.gguf", "smollm2.gguf"}) {
        model_ptr model = load(name);
        if (!model) {
            continue;
        }
        models++;
        std::printf("%s\n", name);
        invalid_arguments_are_refused(model.get());
        unsupported_specs_are_refused(model.get());
        missing_roles_end_the_policy(model.get());
        ended_policy_restores_masks(model.get());
        position_shift_ends_the_policy(model.get());
        unobserved_tokens_and_mixed_batches_are_refused(model.get());
        layer_callback_runs_in_order(model.get());
    }
    models_are_served_or_refused();
    if (!models && !failures) {
        skip("no model in KVTIER_LLAMA_MODELS");
    }
    return failures != 0;
}
