#include "watch/evict.hpp"

#include <algorithm>
#include <cstring>

namespace kvt_llama {
namespace {

// Sums of single queries are kept for so many numbers at most.
constexpr uint64_t window_numbers_max = 64u << 20;

// Whether a token sees its own cell: rows of a graph are the tokens of the batch in their order.
bool sees(ggml_tensor *mask, size_t row, int64_t cell) {
    if (cell < 0 || cell >= mask->ne[0]) {
        return false;
    }
    const size_t at = row * mask->nb[1] + (size_t) cell * mask->nb[0];
    if (mask->type == GGML_TYPE_F16) {
        uint16_t bits = 0;
        ggml_backend_tensor_get(mask, &bits, at, sizeof bits);
        return bits != 0xFC00;
    }
    float number = 0;
    ggml_backend_tensor_get(mask, &number, at, sizeof number);
    return number > -1e30f;
}

// In runs of a fixed length, which compilers turn into wide additions at any level.
void add(float *__restrict to, const float *__restrict from, size_t n) {
    constexpr size_t run = 16;
    size_t i = 0;
    for (; i + run <= n; i += run) {
        for (size_t j = 0; j < run; j++) {
            to[i + j] += from[i + j];
        }
    }
    for (; i < n; i++) {
        to[i] += from[i];
    }
}

} // namespace

kvt_status_t token_evict::make(const policy_source &source, const made_for &model,
                               std::unique_ptr<token_evict> &out, std::string &words) {
    std::unique_ptr<token_evict> made(new token_evict);
    made->shape_ = {1, 1, 1, 64, 256, model.max_tokens};
    kvt_status_t status = made->policy_.set_source(source, words);
    if (status == KVT_OK && !source.custom) {
        status = made->policy_.open(made->shape_, words);
    }
    if (status != KVT_OK) {
        return status;
    }
    const kvt_sparse_traits_t &traits = made->policy_.traits();
    constexpr uint32_t served = KVT_NEEDS_COLUMN_SUMS | KVT_NEEDS_KEYS;
    constexpr uint32_t evicts = KVT_SPARSE_EVICT_PREFILL | KVT_SPARSE_EVICT_DECODE;
    status = KVT_E_UNSUPPORTED;
    if (!(traits.caps & evicts)) {
        words = source.name() + " neither chooses blocks by keys and queries nor lets tokens go: "
                "quest, arkvale, h2o, tova, snapkv and streaming do";
    } else if (traits.flags & KVT_SPARSE_RAGGED) {
        words = source.name() + " lets heads keep different numbers of tokens, and cells of llama.cpp "
                "are shared by all heads: use h2o, tova, snapkv or streaming";
    } else if ((traits.needs & ~served) || (traits.flags & KVT_SPARSE_ROTATES)) {
        words = source.name() + " wants more than keys and attention of tokens that stay where they are";
    } else if ((traits.needs & KVT_NEEDS_KEYS) && model.has_windows) {
        words = source.name() + " goes by keys, and caches with windows forget them: use h2o or tova";
    } else if (traits.sum_queries != UINT32_MAX &&
               (uint64_t) traits.sum_queries * model.max_tokens > window_numbers_max) {
        words = source.name() + " wants attention of more queries than is kept for such a context";
        status = KVT_E_LIMIT;
    } else {
        status = KVT_OK;
    }
    if (status == KVT_OK && (traits.needs & KVT_NEEDS_KEYS)) {
        made->shape_.layers = (uint32_t) model.n_layers;
        made->shape_.query_heads = made->shape_.key_heads = model.key_heads;
    }
    made->model_ = model;
    made->caches_.resize((size_t) model.n_layers);
    if (status == KVT_OK) {
        out = std::move(made);
    }
    return status;
}

// Cells of tokens from here on are nobody's.
void token_evict::disown(size_t first) {
    for (pool &of : pools_) {
        for (int32_t &owner : of.owners) {
            owner = owner >= (int32_t) first ? -1 : owner;
        }
    }
}

void token_evict::abandon_batch() {
    new_.clear();
    queries_.clear();
    disown(positions_.size());
}

// What came behind a token was taken back.
void token_evict::cut_back(size_t tokens) {
    positions_.resize(tokens);
    kept_.erase(std::lower_bound(kept_.begin(), kept_.end(), (uint32_t) tokens), kept_.end());
    queries_.clear();
    disown(tokens);
    if (tokens == 0) {
        kvt_sparse_reset(policy_.get());
        is_prompt_ = true;
    } else {
        kvt_sparse_truncate(policy_.get(), (uint32_t) tokens, nullptr);
    }
}

// The sequence is what was observed of it, or less at its end.
kvt_status_t token_evict::follow(llama_memory_t memory, llama_seq_id seq, std::string &words) {
    const llama_pos last = llama_memory_seq_pos_max(memory, seq);
    const llama_pos known = positions_.empty() ? -1 : positions_.back();
    if (last < known) {
        const auto end = std::upper_bound(positions_.begin(), positions_.end(), last);
        cut_back((size_t) (end - positions_.begin()));
        return KVT_OK;
    }
    if (last == known) {
        return KVT_OK;
    }
    if (policy_.traits().needs) {
        words = "sequence " + std::to_string(seq) + " holds tokens whose attention or keys were not "
                "observed: decode them with kvt_llama_watch_decode, or set the policy before they come";
        return KVT_E_STATE;
    }
    // Who goes by places only needs to know of no more.
    llama_pos from = positions_.empty() ? llama_memory_seq_pos_min(memory, seq) : known + 1;
    for (; from <= last; from++) {
        kept_.push_back((uint32_t) positions_.size());
        positions_.push_back(from);
    }
    return KVT_OK;
}

kvt_status_t token_evict::begin_batch(llama_memory_t memory, llama_seq_id seq,
                                      const llama_pos *positions, size_t n, bool is_asked,
                                      std::string &words) {
    kvt_status_t status = follow(memory, seq, words);
    // Where keys are wanted, their numbers are known when some are there.
    if (status == KVT_OK && !policy_.is_open() && !goes_by_keys()) {
        status = policy_.open(shape_, words);
    }
    if (status != KVT_OK) {
        return status;
    }
    llama_pos before = positions_.empty() ? -1 : positions_.back();
    for (size_t i = 0; i < n; i++) {
        if (positions[i] <= before) {
            words = "positions of sequence " + std::to_string(seq) + " do not ascend";
            return KVT_E_INVALID;
        }
        before = positions[i];
    }
    if (positions_.size() + n > model_.max_tokens) {
        words = "the sequence came to more tokens than its policy was opened for";
        return KVT_E_LIMIT;
    }
    new_.assign(positions, positions + n);
    is_asked_ = is_asked;
    is_decode_ = !is_prompt_;
    wants_sums_ = goes_by_attention() &&
                  (is_prompt_ || (policy_.traits().caps & KVT_SPARSE_EVICT_DECODE));
    done_rows_ = graph_rows_ = 0;
    has_strangers_ = false;
    return KVT_OK;
}

void token_evict::begin_graph() {
    masks_.clear();
    graph_rows_ = observed_layers_ = 0;
    for (pool &of : pools_) {
        of.cells = 0;
    }
}

// The first layer of a graph that uses a mask: which token each of its cells is from now on.
kvt_status_t token_evict::own_cells(const layer_roles &layer, pool &of, std::string &words) {
    const size_t rows = (size_t) layer.k_idxs->ne[0];
    const int64_t first_cell = (int64_t) (layer.keys->view_offs / layer.cache_k->nb[1]);
    of.cells = (size_t) layer.mask->ne[0];
    of.owners.resize(std::max(of.owners.size(), of.cells), -1);
    cells_.resize(rows);
    ggml_backend_tensor_get(layer.k_idxs, cells_.data(), 0, rows * sizeof(int64_t));
    if (layer.mask->ne[3] != 1 || (size_t) layer.mask->ne[1] != rows ||
        done_rows_ + rows > new_.size()) {
        words = "its rows are not the tokens of the batch";
        return KVT_E_UNSUPPORTED;
    }
    for (size_t row = 0; row < rows; row++) {
        const int64_t cell = cells_[row] - first_cell;
        if (!sees(layer.mask, row, cell)) {
            words = "its tokens do not see themselves: their order is not the batch's";
            return KVT_E_UNSUPPORTED;
        }
        of.owners[(size_t) cell] = (int32_t) (positions_.size() + done_rows_ + row);
    }
    graph_rows_ = rows;
    // Of a window of queries only those count that no later batch pushes out.
    const size_t window = policy_.traits().sum_queries;
    const size_t first = is_all() || window >= new_.size() ? 0 : new_.size() - window;
    first_row_ = first > done_rows_ ? std::min(first - done_rows_, rows) : 0;
    wanted_rows_ = wants_sums_ ? rows - first_row_ : 0;
    of.sums.assign((is_all() ? std::min<size_t>(wanted_rows_, 1) : wanted_rows_) * of.cells, 0.0f);
    return KVT_OK;
}

kvt_status_t token_evict::at_attention(const roles &found, int il, std::string &words) {
    const layer_roles &layer = found.layer(il);
    caches_[(size_t) il] = layer.cache_k;
    if (wants_sums_ && layer.attention->op != GGML_OP_SOFT_MAX) {
        words = std::string("it has no ") + role_name(role_soft_max);
        return KVT_E_UNSUPPORTED;
    }
    const auto known = std::find(masks_.begin(), masks_.end(), layer.mask);
    const size_t at = (size_t) (known - masks_.begin());
    if (known != masks_.end()) {
        return KVT_OK;
    }
    masks_.push_back(layer.mask);
    if (at >= pools_.size()) {
        pools_.emplace_back();
    }
    return own_cells(layer, pools_[at], words);
}

void token_evict::after_soft_max(const layer_roles &layer) {
    const auto known = std::find(masks_.begin(), masks_.end(), layer.mask);
    if (known == masks_.end() || !wanted_rows_) {
        return;
    }
    pool &of = pools_[(size_t) (known - masks_.begin())];
    const ggml_tensor *node = layer.attention;
    const size_t heads = (size_t) node->ne[2], row_bytes = of.cells * sizeof(float);
    if ((size_t) node->ne[0] != of.cells || (size_t) node->ne[1] != graph_rows_) {
        return;
    }
    const uint8_t *data = host_bytes(node);
    told_.resize(data ? 0 : of.cells);
    for (size_t head = 0; head < heads; head++) {
        for (size_t row = 0; row < wanted_rows_; row++) {
            const size_t offset = head * node->nb[2] + (first_row_ + row) * node->nb[1];
            if (!data) {
                ggml_backend_tensor_get(node, told_.data(), offset, row_bytes);
            }
            const float *from =
                data ? reinterpret_cast<const float *>(data + offset) : told_.data();
            add(of.sums.data() + (is_all() ? 0 : row * of.cells), from, of.cells);
        }
    }
    graph_heads_ = heads;
    observed_layers_++;
    counts_.observed_layers++;
}

// From cells to tokens.
void token_evict::fold(const pool &of) {
    const size_t rows = of.cells ? of.sums.size() / of.cells : 0;
    const size_t tokens = positions_.size() + done_rows_ + graph_rows_;
    const float share = 1.0f / (float) (observed_layers_ * graph_heads_);
    for (size_t row = 0; row < rows; row++) {
        // Queries of this graph, or of "all" one for the batch.
        const uint32_t query =
            is_all() ? (uint32_t) positions_.size()
                     : (uint32_t) (positions_.size() + done_rows_ + first_row_ + row);
        auto found = std::find_if(queries_.begin(), queries_.end(),
                                  [&](const query_sums &known) { return known.query == query; });
        if (found == queries_.end()) {
            queries_.push_back({query, {}});
            found = queries_.end() - 1;
        }
        found->sums.resize(std::max(found->sums.size(), tokens), 0.0f);
        for (size_t cell = 0; cell < of.cells; cell++) {
            const float sum = of.sums[row * of.cells + cell];
            const int32_t owner = of.owners[cell];
            if (owner >= 0 && (size_t) owner < tokens) {
                found->sums[(size_t) owner] += sum * share;
            } else if (sum > 0) {
                has_strangers_ = true;
            }
        }
    }
}

void token_evict::end_graph() {
    if (observed_layers_) {
        for (size_t at = 0; at < masks_.size(); at++) {
            fold(pools_[at]);
        }
        counts_.observed_rows += wanted_rows_;
    }
    done_rows_ += graph_rows_;
    graph_rows_ = observed_layers_ = 0;
    masks_.clear();
}

kvt_status_t token_evict::observe(std::string &words) {
    const uint32_t window = policy_.traits().sum_queries;
    while (!is_all() && queries_.size() > window) {
        queries_.pop_front();
    }
    if (queries_.empty()) {
        return KVT_OK;
    }
    told_.assign(kept_.size(), 0.0f);
    for (const query_sums &query : queries_) {
        for (size_t i = 0; i < kept_.size() && kept_[i] < query.sums.size(); i++) {
            told_[i] += query.sums[kept_[i]];
        }
    }
    const uint32_t queries = is_all() ? (uint32_t) done_rows_ : (uint32_t) queries_.size();
    kvt_error_t *error = nullptr;
    const kvt_status_t status = kvt_sparse_observe(policy_.get(), 0, queries, told_.data(),
                                                   told_.size(), (uint32_t) told_.size(), &error);
    if (status != KVT_OK) {
        words = words_of(&error, status);
    }
    if (is_all()) {
        queries_.clear();
    }
    return status;
}

kvt_status_t token_evict::end_batch(llama_memory_t memory, llama_seq_id seq, std::string &words) {
    end_graph();
    const bool has_cells = wants_sums_ || goes_by_keys();
    if (has_strangers_ || (has_cells && done_rows_ != new_.size())) {
        words = "attention fell on tokens that were not observed: decode all of a sequence with "
                "kvt_llama_watch_decode";
        return KVT_E_STATE;
    }
    for (const llama_pos position : new_) {
        kept_.push_back((uint32_t) positions_.size());
        positions_.push_back(position);
    }
    kvt_status_t status = KVT_OK;
    if (goes_by_keys()) {
        status = append_keys(words);
    } else if (wants_sums_ && (is_all() || is_asked_ || is_decode_)) {
        status = observe(words);
    }
    if (status == KVT_OK) {
        status = evict(memory, seq, words);
    }
    if (is_prompt_ && is_asked_) {
        is_prompt_ = false;
        queries_.clear();
    }
    return status;
}

} // namespace kvt_llama
