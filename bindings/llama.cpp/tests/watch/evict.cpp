// Evicting policies: the resident tokens are those that a reference computes here from the same attention
// weights, and their number is within the policy's budget.
#include "watched.hpp"

#include <cmath>
#include <cstring>
#include <map>
#include <set>

using namespace watch_test;

namespace {

constexpr size_t n_prompt = 120, n_all = 170;

// The caller's cb_eval beside the watch. Accumulates attention weights in double, and records the cells that
// attention reads.
struct reference {
    std::map<int, std::map<int64_t, llama_pos>> owners; // by layer and cell
    size_t base = 0, row_base = 0; // position of the first row of this graph
    ggml_tensor *soft_max = nullptr, *mask = nullptr;
    size_t layers = 0, heads = 0;
    std::map<std::pair<size_t, llama_pos>, double> seen; // attention by query and token, summed
    std::set<llama_pos> visible;                         // to the last query, in any layer

    void begin(size_t first) { row_base = base = first; }

    void read() {
        const int64_t cells = soft_max->ne[0], rows = soft_max->ne[1];
        const int layer = std::atoi(std::strrchr(soft_max->name, '-') + 1);
        std::map<int64_t, llama_pos> &owner = owners[layer];
        heads = (size_t) soft_max->ne[2];
        std::vector<float> all((size_t) ggml_nelements(soft_max));
        ggml_backend_tensor_get(soft_max, all.data(), 0, ggml_nbytes(soft_max));
        for (int64_t head = 0; head < (int64_t) heads; head++) {
            for (int64_t row = 0; row < rows; row++) {
                for (int64_t cell = 0; cell < cells; cell++) {
                    const float p = all[(size_t) ((head * rows + row) * cells + cell)];
                    if (p > 0 && owner.count(cell)) {
                        seen[{row_base + (size_t) row, owner[cell]}] += p;
                    }
                }
            }
        }
        layers++;
        std::vector<float> row((size_t) cells);
        ggml_backend_tensor_get(mask, row.data(), (size_t) (rows - 1) * mask->nb[1], row.size() * 4);
        if (layer == 0) {
            visible.clear();
        }
        for (int64_t cell = 0; cell < cells; cell++) {
            if (row[(size_t) cell] > -1e30f && owner.count(cell)) {
                visible.insert(owner[cell]);
            }
        }
    }

    static void row_begin(reference &self, int layer, size_t rows) {
        if (layer == 0) {
            self.row_base = self.base;
            self.base += rows;
        }
    }

    static bool on_node(ggml_tensor *node, bool ask, void *user_data) {
        reference &self = *static_cast<reference *>(user_data);
        if (!ask) {
            if (node == self.soft_max) {
                self.read();
            }
            return true;
        }
        // Writes to the K cache tell the cell of each token, and the first one the number of tokens.
        if (node->op == GGML_OP_SET_ROWS && std::strncmp(node->name, "cache_k_l", 9) == 0) {
            const int layer = std::atoi(node->name + 9);
            std::vector<int64_t> cells((size_t) node->src[1]->ne[0]);
            ggml_backend_tensor_get(node->src[1], cells.data(), 0, cells.size() * 8);
            row_begin(self, layer, cells.size());
            for (size_t i = 0; i < cells.size(); i++) {
                self.owners[layer][cells[i]] = (llama_pos) (self.row_base + i);
            }
        }
        if (node->op == GGML_OP_SOFT_MAX && node->src[1]) {
            self.soft_max = node;
            self.mask = node->src[1];
            return true;
        }
        return false;
    }
};

struct rule {
    const char *spec;
    size_t max_resident; // limit of the resident tokens after each step
    // The tokens that the policy keeps of the resident ones, by the attention so far.
    std::set<llama_pos> (*expected)(const std::set<llama_pos> &resident, const reference &seen,
                                 llama_pos newest, bool is_prompt);
};

// Evicts candidates with the lowest scores until `keep_count` are left. Equal scores: lower positions first.
std::set<llama_pos> evict_lowest(const std::set<llama_pos> &resident,
                                   const std::vector<llama_pos> &candidates,
                                   const std::map<llama_pos, double> &scores, size_t keep_count) {
    std::vector<llama_pos> order = candidates;
    std::stable_sort(order.begin(), order.end(), [&](llama_pos a, llama_pos b) {
        return scores.at(a) < scores.at(b);
    });
    std::set<llama_pos> out = resident;
    for (size_t i = 0; i < order.size() && order.size() - i > keep_count; i++) {
        out.erase(order[i]);
    }
    return out;
}

std::map<llama_pos, double> scores_of(const std::set<llama_pos> &resident, const reference &seen,
                                      size_t first, size_t last) {
    std::map<llama_pos, double> out;
    for (const llama_pos pos : resident) {
        out[pos] = 0;
    }
    for (const auto &entry : seen.seen) {
        if (entry.first.first >= first && entry.first.first <= last && resident.count(entry.first.second)) {
            out[entry.first.second] += entry.second;
        }
    }
    return out;
}

std::set<llama_pos> h2o(const std::set<llama_pos> &resident, const reference &seen, llama_pos newest,
                        bool) {
    std::vector<llama_pos> all(resident.begin(), resident.end()), candidates;
    for (size_t i = 4; i + 16 < all.size(); i++) {
        candidates.push_back(all[i]);
    }
    return evict_lowest(resident, candidates, scores_of(resident, seen, 0, (size_t) newest), 24);
}

std::set<llama_pos> tova(const std::set<llama_pos> &resident, const reference &seen, llama_pos newest,
                         bool) {
    std::vector<llama_pos> candidates(resident.begin(), resident.end());
    candidates.pop_back();
    return evict_lowest(resident, candidates,
                          scores_of(resident, seen, (size_t) newest, (size_t) newest), 39);
}

// Attention of the last 16 queries, averaged over 5 neighbouring tokens, zero outside the prompt.
std::set<llama_pos> snapkv(const std::set<llama_pos> &resident, const reference &seen, llama_pos newest,
                           bool is_prompt) {
    if (!is_prompt) {
        return resident;
    }
    std::vector<llama_pos> all(resident.begin(), resident.end());
    const auto raw = scores_of(resident, seen, (size_t) newest - 15, (size_t) newest);
    std::map<llama_pos, double> pooled;
    std::vector<llama_pos> candidates;
    const int old = (int) all.size() - 16;
    for (int i = 0; i < old; i++) {
        double sum = 0;
        for (int j = std::max(0, i - 2); j <= std::min(old - 1, i + 2); j++) {
            sum += raw.at(all[(size_t) j]);
        }
        pooled[all[(size_t) i]] = sum / 5;
        candidates.push_back(all[(size_t) i]);
    }
    return evict_lowest(resident, candidates, pooled, 48 - 16);
}

std::set<llama_pos> streaming(const std::set<llama_pos> &resident, const reference &, llama_pos newest,
                              bool is_prompt) {
    std::set<llama_pos> out;
    for (const llama_pos pos : resident) {
        if (is_prompt || pos < 4 || pos > newest - 40) {
            out.insert(pos);
        }
    }
    return out;
}

// The prompt is decoded in two batches, so that windows of queries span both.
void residents_match_the_reference_policy(llama_model *model, const rule &r) {
    reference seen;
    llama_context_params p = params(512, false);
    p.n_ubatch = 64;
    p.cb_eval = reference::on_node;
    p.cb_eval_user_data = &seen;
    watched w(model, p);
    CHECK(w.policy(0, r.spec) == KVT_OK);
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 11);
    std::set<llama_pos> resident;
    size_t equal = 0, steps = 0, at_most = 0;
    for (size_t i = 0; i < n_all;) {
        const size_t end = i == 0 ? n_prompt - 8 : i < n_prompt ? n_prompt : i + 1;
        seen.begin(i);
        CHECK(w.decode(tokens, i, end, 0, end >= n_prompt) == KVT_OK && w.rc == 0);
        for (; i < end; i++) {
            resident.insert((llama_pos) i);
        }
        // This decode sees the resident tokens and its own.
        equal += seen.visible == resident;
        steps++;
        if (end >= n_prompt) {
            resident = r.expected(resident, seen, (llama_pos) end - 1, end == n_prompt);
        }
        // snapkv evicts after the prompt only.
        const size_t growth = r.max_resident == 48 ? end - n_prompt : 0;
        at_most += end <= n_prompt || resident.size() <= r.max_resident + growth;
        CHECK(w.evicted() == end - resident.size());
    }
    std::printf("  %s: %zu of %zu steps equal, %zu tokens resident\n", r.spec, equal, steps, resident.size());
    CHECK(equal == steps && at_most == steps);
    CHECK(w.stats().evicted_tokens == n_all - resident.size());
    CHECK(w.stats().ended == 0);
}

// Policies that score keys work with and without flash attention.
void key_policies_keep_their_budget(llama_model *model, bool flash) {
    for (const char *spec : {"knorm(budget=40, sink=4, recent=8)", "keydiff(budget=40, recent=8)"}) {
        watched w(model, params(512, flash));
        CHECK(w.policy(0, spec) == KVT_OK);
        const std::vector<llama_token> tokens = random_tokens(model, n_all, 12);
        CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
        CHECK(w.evicted() == n_prompt - 40);
        for (size_t i = n_prompt; i < n_all; i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.evicted() == i + 1 - 40);
        }
        CHECK(w.stats().rows_read == n_all * (uint64_t) llama_model_n_layer(model));
    }
}

// A sequence beside an evicting one gives the same logits. In a unified cache its cells may differ, which
// changes the order of sums.
void other_sequences_are_unchanged(llama_model *model, bool unified) {
    const std::vector<llama_token> a = random_tokens(model, n_all, 3), b = random_tokens(model, n_all, 4);
    llama_context_params p = params(unified ? 1024 : 4096, false);
    p.kv_unified = unified;
    watched w(model, p);
    CHECK(w.policy(1, "h2o(sink=4, recent=16, budget=24)") == KVT_OK);
    context_ptr other = open(model, p);
    CHECK(w.decode(a, 0, n_prompt, 0) == KVT_OK && w.decode(b, 0, n_prompt, 1) == KVT_OK);
    CHECK(decode(other.get(), a, 0, n_prompt, 0) && decode(other.get(), b, 0, n_prompt, 1));
    float max_difference = 0;
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(a, i, i + 1, 0) == KVT_OK && decode(other.get(), a, i, i + 1, 0));
        const std::vector<float> x = logits(w.ctx.get()), y = logits(other.get());
        for (size_t j = 0; j < x.size(); j++) {
            max_difference = std::max(max_difference, std::abs(x[j] - y[j]));
        }
        CHECK(w.decode(b, i, i + 1, 1) == KVT_OK && decode(other.get(), b, i, i + 1, 1));
    }
    std::printf("  beside h2o: %g\n", max_difference);
    CHECK(max_difference <= (unified ? 1e-2f : 0.0f));
    CHECK(w.stats().ended == 0 && w.evicted(0) == 0 && w.evicted(1) == n_all - 44);
}

// The caller truncates the sequence, and clears it.
void truncated_and_cleared_sequences_are_followed(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 13);
    watched w(model, params(512, false));
    CHECK(w.policy(0, "h2o(sink=4, recent=16, budget=24)") == KVT_OK);
    CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK && w.evicted() == n_prompt - 44);
    for (size_t i = n_prompt; i < n_prompt + 10; i++) {
        CHECK(w.decode(tokens, i, i + 1) == KVT_OK);
    }
    llama_memory_t memory = llama_get_memory(w.ctx.get());
    CHECK(llama_memory_seq_rm(memory, 0, n_prompt + 4, -1));
    for (size_t i = n_prompt + 4; i < n_all; i++) {
        CHECK(w.decode(tokens, i, i + 1) == KVT_OK);
    }
    CHECK(w.stats().ended == 0);
    llama_memory_clear(memory, true);
    CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK && w.evicted() == n_prompt - 44);
    CHECK(w.stats().ended == 0);
}

// A custom policy that keeps the first token only.
kvt_status_t keep_first(void *, uint32_t, const kvt_sparse_context_t *, kvt_token_lists_t *out) {
    static uint32_t starts[2] = {0, 1}, items[1] = {0};
    out->starts = starts;
    out->start_count = 2;
    out->items = items;
    out->item_count = 1;
    return KVT_OK;
}

// The engine requires the position before the next token, so the newest token is kept against the policy.
void newest_token_is_never_evicted(llama_model *model) {
    const std::vector<llama_token> tokens = random_tokens(model, n_all, 14);
    watched w(model, params(512, false));
    kvt_sparse_traits_t traits = KVT_SPARSE_TRAITS_INIT;
    traits.caps = KVT_SPARSE_EVICT_PREFILL | KVT_SPARSE_EVICT_DECODE;
    traits.scope = KVT_SCOPE_LAYER;
    traits.granularity = KVT_GRANULARITY_TOKEN;
    kvt_sparse_custom_t custom = KVT_SPARSE_CUSTOM_INIT;
    custom.traits = &traits;
    custom.evict = keep_first;
    kvt_llama_sparse_opts_t opts = KVT_LLAMA_SPARSE_OPTS_INIT;
    opts.custom = &custom;
    CHECK(kvt_llama_watch_policy(w.watch, 0, &opts, &w.why) == KVT_OK);
    for (size_t i = 0; i < 20;) {
        const size_t end = i == 0 ? 16 : i + 1;
        CHECK(w.decode(tokens, i, end) == KVT_OK && w.rc == 0);
        CHECK(w.evicted() == end - 1 && !w.is_exact());
        i = end;
    }

    // Removing the policy does not bring evicted tokens back. An empty sequence is exact again.
    CHECK(w.policy(0, nullptr) == KVT_OK && w.evicted() == 19 && !w.is_exact());
    llama_memory_clear(llama_get_memory(w.ctx.get()), true);
    CHECK(w.decode(tokens, 0, 16) == KVT_OK && w.evicted() == 0 && w.is_exact());
}

} // namespace

int main() {
    const rule rules[] = {{"h2o(sink=4, recent=16, budget=24)", 44, h2o},
                          {"tova(budget=40)", 40, tova},
                          {"snapkv(budget=48, window=16)", 48, snapkv},
                          {"streaming(sinks=4, recent=40)", 44, streaming}};
    int models = 0;
    for (const char *name : {"tiny-llama-f16.gguf", "tiny-moe.gguf", "smollm2.gguf"}) {
        model_ptr model = load(name);
        if (!model) {
            continue;
        }
        models++;
        std::printf("%s\n", name);
        for (const rule &r : rules) {
            if (name[0] == 't' || &r == rules) {
                residents_match_the_reference_policy(model.get(), r);
            }
        }
        if (name[0] == 't') {
            key_policies_keep_their_budget(model.get(), false);
            key_policies_keep_their_budget(model.get(), true);
            other_sequences_are_unchanged(model.get(), true);
            other_sequences_are_unchanged(model.get(), false);
            truncated_and_cleared_sequences_are_followed(model.get());
            newest_token_is_never_evicted(model.get());
        }
    }
    for (const char *name : {"tiny-swa.gguf", "gemma3.gguf"}) {
        model_ptr model = load(name);
        if (model) {
            models++;
            std::printf("%s, window %d\n", name, llama_model_n_swa(model.get()));
            residents_match_the_reference_policy(model.get(), rules[0]);
            if (name[0] == 't') {
                truncated_and_cleared_sequences_are_followed(model.get());
            }
        }
    }
    if (!models && !failures) {
        skip("no model in KVTIER_LLAMA_MODELS");
    }
    return failures != 0;
}
