// Shared by the tests and the benchmark of long sequences: contexts with the adapter, real text, and a large
// reference context with masks.
#ifndef KVTIER_LLAMA_TESTS_WATCH_LONGER_HPP
#define KVTIER_LLAMA_TESTS_WATCH_LONGER_HPP

#include "model.hpp"
#include "watch/roles.hpp"

#include <kvtier/llama_longer.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

namespace watch_test {

struct longer_free {
    void operator()(kvt_llama_longer_t *longer) const {
        kvt_llama_why_t why;
        if (kvt_llama_longer_close(&longer, &why) != KVT_OK) {
            std::fprintf(stderr, "close: %s\n", why.text);
            failures++;
        }
    }
};

// Members are destroyed in reverse order: the context, then the adapter that it calls back.
struct longer_context {
    std::unique_ptr<kvt_llama_longer_t, longer_free> longer;
    context_ptr ctx;
};

inline bool ok(kvt_status_t status, const kvt_llama_why_t &why, const char *what) {
    if (status != KVT_OK) {
        std::fprintf(stderr, "%s: status %d: %s\n", what, (int) status, why.text);
        failures++;
    }
    return status == KVT_OK;
}

inline bool refused(kvt_status_t status, kvt_status_t wanted, const kvt_llama_why_t &why,
             const char *text) {
    const bool matches = status == wanted && std::strstr(why.text, text);
    if (!matches) {
        std::fprintf(stderr, "status %d, not %d: \"%s\" without \"%s\"\n", (int) status,
                     (int) wanted, why.text, text);
    }
    return matches;
}

inline longer_context open_longer(llama_model *model, const kvt_llama_longer_opts_t &opts,
                    llama_context_params p) {
    longer_context out;
    kvt_llama_why_t why;
    kvt_llama_longer_t *longer = nullptr;
    if (!ok(kvt_llama_longer_open(&opts, &p, &longer, &why), why, "open")) {
        return out;
    }
    out.longer.reset(longer);
    out.ctx = open(model, p);
    CHECK(out.ctx != nullptr);
    if (!ok(kvt_llama_longer_bind(longer, out.ctx.get(), &why), why, "bind")) {
        out.longer.reset();
    }
    return out;
}

inline bool decode_longer(longer_context &s, const llama_token *tokens, size_t n) {
    kvt_llama_why_t why;
    return ok(kvt_llama_longer_decode(s.longer.get(), tokens, n, &why), why, "decode");
}

inline kvt_llama_longer_stats_t stats_of(const longer_context &s) {
    kvt_llama_longer_stats_t stats = {};
    CHECK(kvt_llama_longer_stats(s.longer.get(), &stats) == KVT_OK);
    return stats;
}

inline std::vector<uint32_t> chosen_of(const longer_context &s, uint32_t layer) {
    size_t n = 0;
    kvt_llama_longer_chosen(s.longer.get(), layer, nullptr, 0, &n);
    std::vector<uint32_t> out(n);
    CHECK(kvt_llama_longer_chosen(s.longer.get(), layer, out.data(), out.size(), &n) == KVT_OK);
    return out;
}

inline int argmax(const std::vector<float> &logits) {
    return (int) (std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline bool same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    return a.size() == b.size() && !a.empty() &&
           std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double max_difference = 0;
    for (size_t i = 0; i < a.size() && i < b.size(); i++) {
        max_difference = std::max(max_difference, (double) std::fabs(a[i] - b[i]));
    }
    return max_difference;
}

// The first `n` tokens of the text files. Skips the test if there are fewer.
inline std::vector<llama_token> text_of(const llama_model *model, int argc, char **argv, size_t n) {
    std::string text;
    for (int i = 1; i < argc; i++) {
        std::ifstream file(argv[i], std::ios::binary);
        text.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    std::vector<llama_token> tokens = tokenize(model, text);
    if (tokens.size() < n) {
        skip("the text has " + std::to_string(tokens.size()) + " tokens of " + std::to_string(n));
    }
    tokens.resize(n);
    return tokens;
}

// A reference without kvtier: cell numbers are positions. Between sinks and window, a layer sees its selected
// blocks only. It also measures the share of the attention to visible tokens.
struct masked_reference {
    explicit masked_reference(int layers) : found(layers), chosen((size_t) layers) {}

    kvt_llama::roles found;
    std::vector<std::vector<uint32_t>> chosen;
    uint32_t sinks = 0, window_first = 0, tokens = 0, block = 8;
    bool applies_masks = false, measures = false;
    double share = 0, rows = 0;         // sum and count: attention to visible tokens, of all attention
    double old_share = 0, old_rows = 0; // the same for tokens between sinks and window

    void apply_mask(ggml_tensor *mask, const std::vector<uint32_t> &blocks) {
        std::vector<uint16_t> row((size_t) mask->ne[0], 0xFC00);
        for (const uint32_t b : blocks) {
            std::fill_n(row.begin() + b * block, block, (uint16_t) 0);
        }
        std::fill_n(row.begin(), sinks, (uint16_t) 0);
        std::fill(row.begin() + window_first, row.begin() + tokens, (uint16_t) 0);
        ggml_backend_tensor_set(mask, row.data(), 0, row.size() * sizeof(uint16_t));
    }

    // Softmax over all tokens, in double, for the only query.
    void measure(const kvt_llama::layer_roles &layer, const std::vector<uint32_t> &blocks) {
        const size_t dim = (size_t) layer.q->ne[0], heads = (size_t) layer.q->ne[2];
        const size_t kv_heads = (size_t) layer.keys->ne[2], group = heads / kv_heads;
        std::vector<float> q(dim * heads);
        for (size_t h = 0; h < heads; h++) {
            ggml_backend_tensor_get(layer.q, q.data() + h * dim, h * layer.q->nb[2],
                                    dim * sizeof(float));
        }
        std::vector<ggml_fp16_t> half((size_t) tokens * kv_heads * dim);
        std::vector<float> k(half.size()), scores(tokens);
        ggml_backend_tensor_get(layer.cache_k, half.data(), 0, half.size() * sizeof(ggml_fp16_t));
        ggml_fp16_to_fp32_row(half.data(), k.data(), (int64_t) half.size());
        std::vector<char> seen(tokens, 0);
        std::fill_n(seen.begin(), sinks, 1);
        std::fill(seen.begin() + window_first, seen.end(), 1);
        for (const uint32_t b : blocks) {
            std::fill_n(seen.begin() + b * block, block, 1);
        }
        for (size_t h = 0; h < heads; h++) {
            double max_score = -1e30, all = 0, in = 0, old = 0, old_in = 0;
            for (size_t t = 0; t < tokens; t++) {
                const float *key = k.data() + (t * kv_heads + h / group) * dim;
                double dot = 0;
                for (size_t d = 0; d < dim; d++) {
                    dot += (double) q[h * dim + d] * key[d];
                }
                scores[t] = (float) (dot / std::sqrt((double) dim));
                max_score = std::max(max_score, (double) scores[t]);
            }
            for (size_t t = 0; t < tokens; t++) {
                const double e = std::exp(scores[t] - max_score);
                const bool is_old = t >= sinks && t < window_first;
                all += e;
                in += seen[t] ? e : 0;
                old += is_old ? e : 0;
                old_in += is_old && seen[t] ? e : 0;
            }
            share += in / all;
            rows++;
            old_share += old > 0 ? old_in / old : 1;
            old_rows++;
        }
    }

    static bool on_node(ggml_tensor *node, bool ask, void *user_data) {
        masked_reference &self = *static_cast<masked_reference *>(user_data);
        if (!ask) {
            return true;
        }
        const kvt_llama::node_info seen = self.found.visit(node);
        if (seen.what == kvt_llama::step::attention) {
            const kvt_llama::layer_roles &layer = self.found.layer(seen.layer);
            if (self.measures) {
                self.measure(layer, self.chosen[(size_t) seen.layer]);
            }
            if (self.applies_masks) {
                self.apply_mask(layer.mask, self.chosen[(size_t) seen.layer]);
            }
        }
        const bool split =
            (self.measures || self.applies_masks) &&
            (seen.what == kvt_llama::step::write_k || seen.what == kvt_llama::step::write_v);
        if (split) {
            self.found.mark_computed();
        }
        return split;
    }
};

// A store for several contexts. The destructor checks that all memory is released.
struct shared_store {
    kvt_runtime_t *runtime = nullptr;
    kvt_budget_t *budget = nullptr;
    kvt_account_t *account = nullptr;
    kvt_store_t *store = nullptr;

    explicit shared_store(const std::string &spec, const char *faults = "", uint32_t ops = 0) {
        kvt_runtime_opts_t r = KVT_RUNTIME_OPTS_INIT;
        r.workers = 2;
        r.max_ops = ops;
        r.faults = *faults != 0 ? faults : nullptr;
        r.faults_bytes = std::strlen(faults);
        CHECK(kvt_runtime_open(&r, &runtime, nullptr) == KVT_OK);
        kvt_budget_opts_t b = KVT_BUDGET_OPTS_INIT;
        b.host_bytes = 512u << 20;
        b.disk_bytes = 1u << 30;
        CHECK(kvt_budget_open(runtime, &b, &budget, nullptr) == KVT_OK);
        CHECK(kvt_account_open(budget, nullptr, &account, nullptr) == KVT_OK);
        kvt_store_opts_t s = KVT_STORE_OPTS_INIT;
        s.spec = spec.data();
        s.spec_bytes = spec.size();
        CHECK(kvt_store_open(runtime, budget, &s, &store, nullptr) == KVT_OK);
    }
    ~shared_store() {
        CHECK(kvt_store_close(&store, 0, nullptr) == KVT_OK);
        uint64_t reserved = 0, used = 0;
        CHECK(kvt_account_held(account, KVT_TIER_HOST, &reserved, &used) == KVT_OK);
        CHECK(reserved == 0 && used == 0);
        CHECK(kvt_account_close(&account, nullptr) == KVT_OK);
        CHECK(kvt_budget_close(&budget, nullptr) == KVT_OK);
        CHECK(kvt_runtime_close(&runtime, 0, nullptr, nullptr) == KVT_OK);
    }
    shared_store(const shared_store &) = delete;
    shared_store &operator=(const shared_store &) = delete;
};

} // namespace watch_test

#endif
