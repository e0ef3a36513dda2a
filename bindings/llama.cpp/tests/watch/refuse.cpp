// What cannot be done is said in words, and the engine goes on as without us; the clock of layers and
// a callback of others run beside policies.
#include "watched.hpp"

#include <cstring>

using namespace watch_test;

namespace {

bool says(const kvt_llama_why_t &why, const char *word) {
    const bool has = std::strstr(why.text, word) != nullptr;
    if (!has) {
        std::fprintf(stderr, "no '%s' in: %s\n", word, why.text);
    }
    return has;
}

void refuses_specs(llama_model *model) {
    watched w(model, params(512, false));
    const struct {
        const char *spec;
        kvt_status_t status;
        const char *word;
    } all[] = {{"h20", KVT_E_SPEC, "h2o"},
               {"quest(budgte=1)", KVT_E_SPEC, "budget"},
               {"minference", KVT_E_UNSUPPORTED, "quest"},
               {"external", KVT_E_UNSUPPORTED, "quest"},
               {"dsa", KVT_E_UNSUPPORTED, "quest"},
               {"adakv(budget=128)", KVT_E_UNSUPPORTED, "shared by all heads"},
               {"streaming(rotate=true)", KVT_E_UNSUPPORTED, "stay where they are"},
               {"", KVT_E_SPEC, ""}};
    for (const auto &one : all) {
        CHECK(w.policy(0, one.spec) == one.status && says(w.why, one.word));
    }
    CHECK(w.policy(0, "quest(page=16)", 24) == KVT_E_SPEC && says(w.why, "24"));
    CHECK(w.policy(0, "quest", 1u << 30) == KVT_E_INVALID);
    CHECK(w.policy(77, "h2o") == KVT_E_INVALID && says(w.why, "77"));
    CHECK(w.policy(-1, "h2o") == KVT_E_INVALID);
    CHECK(w.policy(0, nullptr) == KVT_OK);
    CHECK(w.stats().graphs == 0);

    watched flash(model, params(512, true));
    CHECK(flash.policy(0, "h2o") == KVT_E_UNSUPPORTED && says(flash.why, "FLASH_ATTN_TYPE_DISABLED"));
    CHECK(flash.policy(0, "streaming") == KVT_OK && flash.policy(0, "knorm") !=
          KVT_E_SPEC);
}

void refuses_arguments(llama_model *model) {
    kvt_llama_watch_t *watch = reinterpret_cast<kvt_llama_watch_t *>(&model);
    kvt_llama_why_t why;
    CHECK(kvt_llama_watch_open(nullptr, nullptr, &watch, &why) == KVT_E_INVALID && !watch);
    CHECK(kvt_llama_watch_open(model, nullptr, nullptr, nullptr) == KVT_E_INVALID);
    CHECK(kvt_llama_watch_open(model, nullptr, &watch, &why) == KVT_OK && watch);
    kvt_llama_sparse_opts_t opts = {};
    opts.spec = "h2o";
    CHECK(kvt_llama_watch_policy(watch, 0, &opts, &why) == KVT_E_STATE && says(why, "attach"));
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

// Stands before the watch and takes a role away from what it sees.
struct thief {
    int what = 0, layer = 1;
    bool is_active = false;
    ggml_tensor *node = nullptr, *cache = nullptr, *mask = nullptr;
    char name[GGML_MAX_NAME];
    size_t visible = 0; // cells that the last attention was going to look at

    void look(ggml_tensor *row) {
        std::vector<uint8_t> bytes(ggml_nbytes(row));
        ggml_backend_tensor_get(row, bytes.data(), 0, bytes.size());
        visible = 0;
        for (int64_t cell = 0; cell < row->ne[0]; cell++) {
            visible += row->type == GGML_TYPE_F16
                           ? reinterpret_cast<const uint16_t *>(bytes.data())[cell] != 0xFC00
                           : reinterpret_cast<const float *>(bytes.data())[cell] > -1e30f;
        }
    }

    void give_back() {
        if (node && mask) {
            node->src[node->op == GGML_OP_SOFT_MAX ? 1 : 3] = mask;
        }
        if (cache) {
            ggml_set_name(cache, name);
        }
        node = cache = mask = nullptr;
    }

    static bool on_node(ggml_tensor *node, bool ask, void *user_data) {
        thief &self = *static_cast<thief *>(user_data);
        self.give_back();
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
            self.look(node->src[node->op == GGML_OP_SOFT_MAX ? 1 : 3]);
        }
        if (self.what == 0 && is_attention) {
            const int at = node->op == GGML_OP_SOFT_MAX ? 1 : 3;
            self.node = node;
            self.mask = node->src[at];
            node->src[at] = nullptr;
            // The scheduler computes a group only behind its last ask: the next one gives it back.
            return false;
        }
        if (self.what == 1 && node->op == GGML_OP_SET_ROWS && is_own) {
            self.cache = cache;
            std::memcpy(self.name, cache->name, sizeof self.name);
            ggml_set_name(cache, "keys of another name");
        }
        return false;
    }
};

// A role is taken away while a policy serves: it ends with words, and logits stay plain.
void refuses_missing_roles(llama_model *model) {
    const std::vector<llama_token> tokens = any_tokens(model, 60, 21);
    for (int flash = 0; flash < 2; flash++) {
        for (int what = 0; what < 2; what++) {
            for (const char *spec : {"h2o(sink=2, recent=4, budget=90)", "quest(budget=4096)"}) {
                if (flash && spec[0] == 'h') {
                    continue;
                }
                thief robber;
                robber.what = what;
                llama_context_params p = params(512, flash);
                context_ptr other = open(model, p);
                p.cb_eval = thief::on_node;
                p.cb_eval_user_data = &robber;
                watched w(model, p);
                CHECK(w.policy(0, spec) == KVT_OK);
                CHECK(w.decode(tokens, 0, 50) == KVT_OK && w.decode(tokens, 50, 51) == KVT_OK);
                CHECK(decode(other.get(), tokens, 0, 50) && decode(other.get(), tokens, 50, 51));
                robber.is_active = true;
                CHECK(w.decode(tokens, 51, 52) == KVT_E_UNSUPPORTED && w.rc == 0);
                CHECK(says(w.why, what == 0 ? "mask of the attention" : "cells that keys"));
                CHECK(says(w.why, "layer "));
                CHECK(decode(other.get(), tokens, 51, 52));
                CHECK(logits(w.ctx.get()) == logits(other.get()));
                CHECK(w.stats().ended == 1 &&
                      kvt_llama_watch_fault(w.watch, nullptr) == KVT_E_UNSUPPORTED);
                robber.is_active = false;
                CHECK(w.decode(tokens, 52, 53) == KVT_OK && decode(other.get(), tokens, 52, 53));
                CHECK(logits(w.ctx.get()) == logits(other.get()));
            }
        }
    }
}

// A policy that ends in the middle of a graph leaves no mask narrowed behind it.
void gives_masks_back(llama_model *model) {
    const std::vector<llama_token> tokens = any_tokens(model, 120, 27);
    for (int flash = 0; flash < 2; flash++) {
        thief robber;
        robber.what = 1;
        llama_context_params p = params(512, flash);
        p.cb_eval = thief::on_node;
        p.cb_eval_user_data = &robber;
        watched w(model, p);
        CHECK(w.policy(0, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
        CHECK(w.decode(tokens, 0, 100) == KVT_OK && w.decode(tokens, 100, 101) == KVT_OK);
        const uint64_t before = w.stats().sparse_layers;
        robber.is_active = true;
        CHECK(w.decode(tokens, 101, 102) == KVT_E_UNSUPPORTED && w.rc == 0);
        // The layer before was narrowed, the last one sees all.
        CHECK(w.stats().sparse_layers == before + 1 && robber.visible == 102);
    }
}

// Positions that are shifted are others than a policy knows.
void ends_with_a_shift(llama_model *model) {
    const std::vector<llama_token> tokens = any_tokens(model, 60, 28);
    watched w(model, params(512, false));
    CHECK(w.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
    CHECK(w.policy(1, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
    CHECK(w.decode(tokens, 0, 40) == KVT_OK && w.decode(tokens, 40, 41) == KVT_OK);
    CHECK(w.decode(tokens, 0, 50, 1) == KVT_OK && w.decode(tokens, 50, 51, 1) == KVT_OK);
    const uint64_t before = w.evicted();
    llama_memory_seq_add(llama_get_memory(w.ctx.get()), 0, 30, -1, -5);
    CHECK(w.decode(tokens, 36, 37) == KVT_E_UNSUPPORTED && w.rc == 0 && says(w.why, "shifted"));
    CHECK(w.evicted() == before && w.stats().rebuilds == 1 && w.stats().ended == 1);
    CHECK(w.decode(tokens, 37, 38) == KVT_OK && w.evicted() == before);
}

// Tokens that came unseen, batches of several sequences, flash attention that was chosen by itself.
void refuses_what_was_not_seen(llama_model *model) {
    const std::vector<llama_token> tokens = any_tokens(model, 60, 22);
    watched w(model, params(512, false));
    CHECK(decode(w.ctx.get(), tokens, 0, 20));
    CHECK(w.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
    CHECK(w.decode(tokens, 20, 40) == KVT_E_STATE && w.rc == 0 && says(w.why, "not observed"));
    context_ptr other = open(model, params(512, false));
    CHECK(decode(other.get(), tokens, 0, 20) && decode(other.get(), tokens, 20, 40));
    CHECK(logits(w.ctx.get()) == logits(other.get()));

    // Who goes by places takes tokens as they are.
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
    CHECK(says(w.why, "several sequences"));
    llama_batch_free(batch);

    llama_context_params p = params(512, false);
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
    watched by_itself(model, p);
    CHECK(by_itself.policy(0, "h2o") == KVT_OK);
    CHECK(by_itself.decode(tokens, 0, 20) == KVT_E_UNSUPPORTED && by_itself.rc == 0);
    CHECK(says(by_itself.why, "FLASH_ATTN_TYPE_DISABLED"));

    // What the engine refuses is its own to say, and the policy goes on.
    watched small(model, params(256, false));
    CHECK(small.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
    const std::vector<llama_token> many = any_tokens(model, 300, 23);
    CHECK(small.decode(many, 0, 200) == KVT_OK && small.rc == 0);
    CHECK(small.decode(many, 0, 1) == KVT_E_INVALID && says(small.why, "ascend"));
}

// Models that a policy cannot serve.
void refuses_models() {
    model_ptr mla = load("tiny-mla.gguf");
    const std::vector<llama_token> none;
    if (mla) {
        const std::vector<llama_token> tokens = any_tokens(mla.get(), 80, 24);
        watched w(mla.get(), params(512, true));
        CHECK(w.policy(0, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
        CHECK(w.decode(tokens, 0, 70) == KVT_OK);
        for (size_t i = 70; i < tokens.size(); i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.rc == 0);
        }
        CHECK(w.stats().masked_cells > 0);
        std::printf("  tiny-mla: latents are chosen like keys\n");
    }
    model_ptr mamba = load("tiny-mamba.gguf");
    if (mamba) {
        const std::vector<llama_token> tokens = any_tokens(mamba.get(), 20, 25);
        watched w(mamba.get(), params(512, false));
        CHECK(w.policy(0, "h2o") == KVT_OK);
        CHECK(w.decode(tokens, 0, 10) == KVT_E_UNSUPPORTED && w.rc == 0 && says(w.why, "attention"));
    }
    model_ptr hybrid = load("tiny-hybrid.gguf");
    if (hybrid) {
        const std::vector<llama_token> tokens = any_tokens(hybrid.get(), 80, 26);
        watched w(hybrid.get(), params(512, true));
        CHECK(w.policy(0, "quest(budget=48, share=bound, dense=0)") == KVT_OK);
        CHECK(w.decode(tokens, 0, 70) == KVT_OK && w.rc == 0);
        for (size_t i = 70; i < tokens.size(); i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.rc == 0);
        }
        CHECK(w.stats().masked_cells > 0);

        // Tokens leave its attention; its states have taken them in.
        watched h2o(hybrid.get(), params(512, false));
        CHECK(h2o.policy(0, "h2o(sink=2, recent=4, budget=8)") == KVT_OK);
        CHECK(h2o.decode(tokens, 0, 70) == KVT_OK && h2o.rc == 0 && h2o.evicted() == 70 - 14);
        CHECK(h2o.decode(tokens, 70, 71) == KVT_OK && h2o.rc == 0 && h2o.evicted() == 71 - 14);
    }
}

struct clock {
    int n_layers = 0, next = 0, graphs = 0, wrong = 0;
    bool is_in = false;

    static void tick(void *user_data, int32_t layer, int32_t is_end) {
        clock &self = *static_cast<clock *>(user_data);
        self.wrong += layer != self.next || self.is_in != (is_end != 0);
        self.is_in = !is_end;
        self.next = is_end ? (layer + 1) % self.n_layers : layer;
        self.graphs += is_end && self.next == 0;
    }
};

void keeps_the_time(llama_model *model) {
    for (const char *spec : {(const char *) nullptr, "h2o(sink=2, recent=4, budget=8)", "quest"}) {
        clock time;
        time.n_layers = llama_model_n_layer(model);
        kvt_llama_watch_opts_t opts = {};
        opts.on_layer = clock::tick;
        opts.on_layer_data = &time;
        watched w(model, params(512, false), &opts);
        context_ptr other = open(model, params(512, false));
        CHECK(w.policy(0, spec) == KVT_OK);
        const std::vector<llama_token> tokens = any_tokens(model, 30, 31);
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
        refuses_arguments(model.get());
        refuses_specs(model.get());
        refuses_missing_roles(model.get());
        gives_masks_back(model.get());
        ends_with_a_shift(model.get());
        refuses_what_was_not_seen(model.get());
        keeps_the_time(model.get());
    }
    refuses_models();
    if (!models && !failures) {
        skip("no model in KVTIER_LLAMA_MODELS");
    }
    return failures != 0;
}
