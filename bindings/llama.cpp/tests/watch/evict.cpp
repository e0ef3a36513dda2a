// Tokens that leave: as many stay as a policy promises, and those that stay are the ones that a
// plain accumulation of the same probabilities, computed here, says.
#include "watched.hpp"

#include <cmath>
#include <cstring>
#include <map>
#include <set>

using namespace watch_test;

namespace {

constexpr size_t n_prompt = 120, n_all = 170;

// Stands in cb_eval beside the watch: reads the probabilities for itself, in double, and which
// cells the attention sees.
struct reference {
    std::map<int, std::map<int64_t, llama_pos>> owners; // by layer and cell
    size_t base = 0, row_base = 0;      // position of the first row of this graph
    ggml_tensor *soft_max = nullptr, *mask = nullptr;
    size_t layers = 0, heads = 0;
    std::map<std::pair<size_t, llama_pos>, double> seen; // by query and token: attention, summed up
    std::set<llama_pos> visible;                         // of the last query, in any layer

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
        // Writes say where tokens are, in each cache; the first one of a graph how many it has.
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
    size_t most; // tokens that stay behind each step
    // What stays of these, by what queries gave to tokens so far.
    std::set<llama_pos> (*stays)(const std::set<llama_pos> &there, const reference &seen,
                                 llama_pos newest, bool is_prompt);
};

// The `leave` lowest of the candidates go; of equal ones the lower position.
std::set<llama_pos> without_lowest(const std::set<llama_pos> &there,
                                   const std::vector<llama_pos> &between,
                                   const std::map<llama_pos, double> &scores, size_t stay) {
    std::vector<llama_pos> order = between;
    std::stable_sort(order.begin(), order.end(), [&](llama_pos a, llama_pos b) {
        return scores.at(a) < scores.at(b);
    });
    std::set<llama_pos> out = there;
    for (size_t i = 0; i < order.size() && order.size() - i > stay; i++) {
        out.erase(order[i]);
    }
    return out;
}

std::map<llama_pos, double> scores_of(const std::set<llama_pos> &there, const reference &seen,
                                      size_t first, size_t last) {
    std::map<llama_pos, double> out;
    for (const llama_pos pos : there) {
        out[pos] = 0;
    }
    for (const auto &entry : seen.seen) {
        if (entry.first.first >= first && entry.first.first <= last && there.count(entry.first.second)) {
            out[entry.first.second] += entry.second;
        }
    }
    return out;
}

std::set<llama_pos> h2o(const std::set<llama_pos> &there, const reference &seen, llama_pos newest,
                        bool) {
    std::vector<llama_pos> all(there.begin(), there.end()), between;
    for (size_t i = 4; i + 16 < all.size(); i++) {
        between.push_back(all[i]);
    }
    return without_lowest(there, between, scores_of(there, seen, 0, (size_t) newest), 24);
}

std::set<llama_pos> tova(const std::set<llama_pos> &there, const reference &seen, llama_pos newest,
                         bool) {
    std::vector<llama_pos> between(there.begin(), there.end());
    between.pop_back();
    return without_lowest(there, between,
                          scores_of(there, seen, (size_t) newest, (size_t) newest), 39);
}

// Attention of the last 16 queries, evened out over 5 tokens; nothing beyond the ends.
std::set<llama_pos> snapkv(const std::set<llama_pos> &there, const reference &seen, llama_pos newest,
                           bool is_prompt) {
    if (!is_prompt) {
        return there;
    }
    std::vector<llama_pos> all(there.begin(), there.end());
    const auto raw = scores_of(there, seen, (size_t) newest - 15, (size_t) newest);
    std::map<llama_pos, double> pooled;
    std::vector<llama_pos> between;
    const int old = (int) all.size() - 16;
    for (int i = 0; i < old; i++) {
        double sum = 0;
        for (int j = std::max(0, i - 2); j <= std::min(old - 1, i + 2); j++) {
            sum += raw.at(all[(size_t) j]);
        }
        pooled[all[(size_t) i]] = sum / 5;
        between.push_back(all[(size_t) i]);
    }
    return without_lowest(there, between, pooled, 48 - 16);
}

std::set<llama_pos> streaming(const std::set<llama_pos> &there, const reference &, llama_pos newest,
                              bool is_prompt) {
    std::set<llama_pos> out;
    for (const llama_pos pos : there) {
        if (is_prompt || pos < 4 || pos > newest - 40) {
            out.insert(pos);
        }
    }
    return out;
}

// The prompt comes in two batches, so that windows of queries reach over both.
void keeps_what_it_promises(llama_model *model, const rule &of) {
    reference seen;
    llama_context_params p = params(512, false);
    p.n_ubatch = 64;
    p.cb_eval = reference::on_node;
    p.cb_eval_user_data = &seen;
    watched w(model, p);
    CHECK(w.policy(0, of.spec) == KVT_OK);
    const std::vector<llama_token> tokens = any_tokens(model, n_all, 11);
    std::set<llama_pos> there;
    size_t equal = 0, steps = 0, at_most = 0;
    for (size_t i = 0; i < n_all;) {
        const size_t end = i == 0 ? n_prompt - 8 : i < n_prompt ? n_prompt : i + 1;
        seen.begin(i);
        CHECK(w.decode(tokens, i, end, 0, end >= n_prompt) == KVT_OK && w.rc == 0);
        for (; i < end; i++) {
            there.insert((llama_pos) i);
        }
        // What this decode saw is what was left of the ones before, and itself.
        equal += seen.visible == there;
        steps++;
        if (end >= n_prompt) {
            there = of.stays(there, seen, (llama_pos) end - 1, end == n_prompt);
        }
        at_most += end <= n_prompt || there.size() <= of.most + (end - n_prompt) * (of.most == 48);
        CHECK(w.evicted() == end - there.size());
    }
    std::printf("  %s: %zu of %zu steps, %zu tokens stay\n", of.spec, equal, steps, there.size());
    CHECK(equal == steps && at_most == steps);
    CHECK(w.stats().evicted_tokens == n_all - there.size());
    CHECK(w.stats().ended == 0);
}

// By keys: as many stay as are promised, with and without flash attention, and decoding goes on.
void keeps_by_keys(llama_model *model, bool flash) {
    for (const char *spec : {"knorm(budget=40, sink=4, recent=8)", "keydiff(budget=40, recent=8)"}) {
        watched w(model, params(512, flash));
        CHECK(w.policy(0, spec) == KVT_OK);
        const std::vector<llama_token> tokens = any_tokens(model, n_all, 12);
        CHECK(w.decode(tokens, 0, n_prompt) == KVT_OK);
        CHECK(w.evicted() == n_prompt - 40);
        for (size_t i = n_prompt; i < n_all; i++) {
            CHECK(w.decode(tokens, i, i + 1) == KVT_OK && w.evicted() == i + 1 - 40);
        }
        CHECK(w.stats().rows_read == n_all * (uint64_t) llama_model_n_layer(model));
    }
}

// A sequence beside one that tokens leave is computed as ever. Where both share a cache its new cells
// may lie elsewhere, and sums have another order.
void others_are_untouched(llama_model *model, bool unified) {
    const std::vector<llama_token> a = any_tokens(model, n_all, 3), b = any_tokens(model, n_all, 4);
    llama_context_params p = params(unified ? 1024 : 4096, false);
    p.kv_unified = unified;
    watched w(model, p);
    CHECK(w.policy(1, "h2o(sink=4, recent=16, budget=24)") == KVT_OK);
    context_ptr other = open(model, p);
    CHECK(w.decode(a, 0, n_prompt, 0) == KVT_OK && w.decode(b, 0, n_prompt, 1) == KVT_OK);
    CHECK(decode(other.get(), a, 0, n_prompt, 0) && decode(other.get(), b, 0, n_prompt, 1));
    float most = 0;
    for (size_t i = n_prompt; i < n_all; i++) {
        CHECK(w.decode(a, i, i + 1, 0) == KVT_OK && decode(other.get(), a, i, i + 1, 0));
        const std::vector<float> x = logits(w.ctx.get()), y = logits(other.get());
        for (size_t j = 0; j < x.size(); j++) {
            most = std::max(most, std::abs(x[j] - y[j]));
        }
        CHECK(w.decode(b, i, i + 1, 1) == KVT_OK && decode(other.get(), b, i, i + 1, 1));
    }
    std::printf("  beside h2o: %g\n", most);
    CHECK(most <= (unified ? 1e-2f : 0.0f));
    CHECK(w.stats().ended == 0 && w.evicted(0) == 0 && w.evicted(1) == n_all - 44);
}

// The end of the sequence is taken back, and all of it.
void follows_the_sequence(llama_model *model) {
    const std::vector<llama_token> tokens = any_tokens(model, n_all, 13);
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

// A policy of ours that keeps the first token alone.
kvt_status_t keep_first(void *, uint32_t, const kvt_sparse_context_t *, kvt_token_lists_t *out) {
    static uint32_t starts[2] = {0, 1}, items[1] = {0};
    out->starts = starts;
    out->start_count = 2;
    out->items = items;
    out->item_count = 1;
    return KVT_OK;
}

// The newest token stays whatever a policy says: the engine wants the next one behind it.
void newest_stays(llama_model *model) {
    const std::vector<llama_token> tokens = any_tokens(model, n_all, 14);
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

    // Without a policy it is what it was; empty, it is another sequence.
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
        for (const rule &of : rules) {
            if (name[0] == 't' || &of == rules) {
                keeps_what_it_promises(model.get(), of);
            }
        }
        if (name[0] == 't') {
            keeps_by_keys(model.get(), false);
            keeps_by_keys(model.get(), true);
            others_are_untouched(model.get(), true);
            others_are_untouched(model.get(), false);
            follows_the_sequence(model.get());
            newest_stays(model.get());
        }
    }
    for (const char *name : {"tiny-swa.gguf", "gemma3.gguf"}) {
        model_ptr model = load(name);
        if (model) {
            models++;
            std::printf("%s, window %d\n", name, llama_model_n_swa(model.get()));
            keeps_what_it_promises(model.get(), rules[0]);
            if (name[0] == 't') {
                follows_the_sequence(model.get());
            }
        }
    }
    if (!models && !failures) {
        skip("no model in KVTIER_LLAMA_MODELS");
    }
    return failures != 0;
}
