#include "watch/evict.hpp"

#include <algorithm>
#include <cstring>

namespace kvt_llama {
namespace {

// Limit of the values kept for sums of single queries.
constexpr uint64_t window_numbers_max = 64u << 20;

// Tells whether a token sees its own cell. Rows of a graph are the batch's tokens in their order.
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

// Adds in runs of a fixed length, which compilers vectorise at any optimisation level.
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

kvt_status_t token_evict::make(const policy_source &source, const model_facts &model,
                               std::unique_ptr<token_evict> &out, std::string &message) {
    std::unique_ptr<token_evict> made(new token_evict);
    made->shape_ = {1, 1, 1, 64, 256, model.max_tokens};
    kvt_status_t status = made->policy_.set_source(source, message);
    if (status == KVT_OK && !source.custom) {
        status = made->policy_.open(made->shape_, message);
    }
    if (status != KVT_OK) {
        return status;
    }
    const kvt_sparse_traits_t &traits = made->policy_.traits();
    constexpr uint32_t supported_needs = KVT_NEEDS_COLUMN_SUMS | KVT_NEEDS_KEYS;
    constexpr uint32_t evicts = KVT_SPARSE_EVICT_PREFILL | KVT_SPARSE_EVICT_DECODE;
    status = KVT_E_UNSUPPORTED;
    if (!(traits.caps & evicts)) {
        message = source.name() + " neither chooses blocks by keys and queries nor evicts tokens: "
                "use quest, arkvale, h2o, tova, snapkv or streaming";
    } else if (traits.flags & KVT_SPARSE_RAGGED) {
        message = source.name() + " keeps different numbers of tokens per head, but all heads share "
                "llama.cpp's cells: use h2o, tova, snapkv or streaming";
    } else if ((traits.needs & ~supported_needs) || (traits.flags & KVT_SPARSE_ROTATES)) {
        message = source.name() + " needs more than keys and attention of tokens at fixed positions: "
                "use h2o, tova, snapkv or streaming";
    } else if ((traits.needs & KVT_NEEDS_KEYS) && model.has_windows) {
        message = source.name() + " needs all keys, but caches with windows forget them: use h2o or tova";
    } else if (traits.sum_queries != UINT32_MAX &&
               (uint64_t) traits.sum_queries * model.max_tokens > window_numbers_max) {
        message = source.name() + " needs the attention of " + std::to_string(traits.sum_queries) +
                " queries, too many for this context: use a smaller window or context";
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

// Clears the owners of cells from this token on.
void token_evict::clear_owners(size_t first) {
    for (pool &of : pools_) {
        for (int32_t &owner : of.owners) {
            owner = owner >= (int32_t) first ? -1 : owner;
        }
    }
}

void token_evict::abandon_batch() {
    new_.clear();
    queries_.clear();
    clear_owners(positions_.size());
}

// Tokens after the first `tokens` were removed by the caller.
void token_evict::truncate_to(size_t tokens) {
    positions_.resize(tokens);
    kept_.erase(std::lower_bound(kept_.begin(), kept_.end(), (uint32_t) tokens), kept_.end());
    queries_.clear();
    clear_owners(tokens);
    if (tokens == 0) {
        kvt_sparse_reset(policy_.get());
        is_prompt_ = true;
    } else {
        kvt_sparse_truncate(policy_.get(), (uint32_t) tokens, nullptr);
    }
}

// Checks that the sequence is as it was observed, or shorter.
kvt_status_t token_evict::sync_positions(llama_memory_t memory, llama_seq_id seq, std::string &message) {
    const llama_pos last = llama_memory_seq_pos_max(memory, seq);
    const llama_pos known = positions_.empty() ? -1 : positions_.back();
    if (last < known) {
        const auto end = std::upper_bound(positions_.begin(), positions_.end(), last);
        truncate_to((size_t) (end - positions_.begin()));
        return KVT_OK;
    }
    if (last == known) {
        return KVT_OK;
    }
    if (policy_.traits().needs) {
        message = "sequence " + std::to_string(seq) +
                  " holds tokens whose attention or keys were not observed: "
                "set the policy before, and decode all of them with kvt_llama_watch_decode";
        return KVT_E_STATE;
    }
    // Policies that use positions only need nothing else.
    llama_pos from = positions_.empty() ? llama_memory_seq_pos_min(memory, seq) : known + 1;
    for (; from <= last; from++) {
        kept_.push_back((uint32_t) positions_.size());
        positions_.push_back(from);
    }
    return KVT_OK;
}

kvt_status_t token_evict::begin_batch(llama_memory_t memory, llama_seq_id seq,
                                      const llama_pos *positions, size_t n, bool wants_logits,
                                      std::string &message) {
    kvt_status_t status = sync_positions(memory, seq, message);
    // A policy that needs keys is opened once the first keys have been read, because they give its
    // shape.
    if (status == KVT_OK && !policy_.is_open() && !uses_keys()) {
        status = policy_.open(shape_, message);
    }
    if (status != KVT_OK) {
        return status;
    }
    llama_pos before = positions_.empty() ? -1 : positions_.back();
    for (size_t i = 0; i < n; i++) {
        if (positions[i] <= before) {
            message = "position " + std::to_string(positions[i]) + " of sequence " + std::to_string(seq) +
                    " is not above the one before: positions must ascend";
            return KVT_E_INVALID;
        }
        before = positions[i];
    }
    if (positions_.size() + n > model_.max_tokens) {
        message = "the sequence has more than the " + std::to_string(model_.max_tokens) +
                " tokens that its policy supports: use a larger n_ctx";
        return KVT_E_LIMIT;
    }
    new_.assign(positions, positions + n);
    wants_logits_ = wants_logits;
    is_decode_ = !is_prompt_;
    wants_sums_ = uses_attention() &&
                  (is_prompt_ || (policy_.traits().caps & KVT_SPARSE_EVICT_DECODE));
    done_rows_ = graph_rows_ = 0;
    has_unobserved_ = false;
    return KVT_OK;
}

void token_evict::begin_graph() {
    masks_.clear();
    graph_rows_ = observed_layers_ = 0;
    for (pool &of : pools_) {
        of.cells = 0;
    }
}

// Called at the first layer of a graph that uses a mask: records the token of each of its cells.
kvt_status_t token_evict::record_cells(const layer_roles &layer, pool &of, std::string &message) {
    const size_t rows = (size_t) layer.k_idxs->ne[0];
    const int64_t first_cell = (int64_t) (layer.keys->view_offs / layer.cache_k->nb[1]);
    of.cells = (size_t) layer.mask->ne[0];
    of.owners.resize(std::max(of.owners.size(), of.cells), -1);
    cells_.resize(rows);
    ggml_backend_tensor_get(layer.k_idxs, cells_.data(), 0, rows * sizeof(int64_t));
    if (layer.mask->ne[3] != 1 || (size_t) layer.mask->ne[1] != rows ||
        done_rows_ + rows > new_.size()) {
        message = "the rows of its attention are not the tokens of the batch: this engine is not supported";
        return KVT_E_UNSUPPORTED;
    }
    for (size_t row = 0; row < rows; row++) {
        const int64_t cell = cells_[row] - first_cell;
        if (!sees(layer.mask, row, cell)) {
            message = "the order of its attention rows is not the batch's: this engine is not supported";
            return KVT_E_UNSUPPORTED;
        }
        of.owners[(size_t) cell] = (int32_t) (positions_.size() + done_rows_ + row);
    }
    graph_rows_ = rows;
    // Only queries that no later batch pushes out of the window count.
    const size_t window = policy_.traits().sum_queries;
    const size_t first = sums_all_queries() || window >= new_.size() ? 0 : new_.size() - window;
    first_row_ = first > done_rows_ ? std::min(first - done_rows_, rows) : 0;
    wanted_rows_ = wants_sums_ ? rows - first_row_ : 0;
    of.sums.assign((sums_all_queries() ? std::min<size_t>(wanted_rows_, 1) : wanted_rows_) * of.cells, 0.0f);
    return KVT_OK;
}

kvt_status_t token_evict::at_attention(const roles &found, int il, std::string &message) {
    const layer_roles &layer = found.layer(il);
    caches_[(size_t) il] = layer.cache_k;
    if (wants_sums_ && layer.attention->op != GGML_OP_SOFT_MAX) {
        message = std::string("it has no ") + role_name(role_soft_max);
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
    return record_cells(layer, pools_[at], message);
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
    column_sums_.resize(data ? 0 : of.cells);
    for (size_t head = 0; head < heads; head++) {
        for (size_t row = 0; row < wanted_rows_; row++) {
            const size_t offset = head * node->nb[2] + (first_row_ + row) * node->nb[1];
            if (!data) {
                ggml_backend_tensor_get(node, column_sums_.data(), offset, row_bytes);
            }
            const float *from =
                data ? reinterpret_cast<const float *>(data + offset) : column_sums_.data();
            add(of.sums.data() + (sums_all_queries() ? 0 : row * of.cells), from, of.cells);
        }
    }
    graph_heads_ = heads;
    observed_layers_++;
    counts_.observed_layers++;
}

// Turns sums by cells into sums by tokens.
void token_evict::add_token_sums(const pool &of) {
    const size_t rows = of.cells ? of.sums.size() / of.cells : 0;
    const size_t tokens = positions_.size() + done_rows_ + graph_rows_;
    const float share = 1.0f / (float) (observed_layers_ * graph_heads_);
    for (size_t row = 0; row < rows; row++) {
        // One entry per query of this graph; with "all", one for the batch.
        const uint32_t query =
            sums_all_queries() ? (uint32_t) positions_.size()
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
                has_unobserved_ = true;
            }
        }
    }
}

void token_evict::end_graph() {
    if (observed_layers_) {
        for (size_t at = 0; at < masks_.size(); at++) {
            add_token_sums(pools_[at]);
        }
        counts_.observed_rows += wanted_rows_;
    }
    done_rows_ += graph_rows_;
    graph_rows_ = observed_layers_ = 0;
    masks_.clear();
}

kvt_status_t token_evict::observe(std::string &message) {
    const uint32_t window = policy_.traits().sum_queries;
    while (!sums_all_queries() && queries_.size() > window) {
        queries_.pop_front();
    }
    if (queries_.empty()) {
        return KVT_OK;
    }
    column_sums_.assign(kept_.size(), 0.0f);
    for (const query_sums &query : queries_) {
        for (size_t i = 0; i < kept_.size() && kept_[i] < query.sums.size(); i++) {
            column_sums_[i] += query.sums[kept_[i]];
        }
    }
    const uint32_t queries = sums_all_queries() ? (uint32_t) done_rows_ : (uint32_t) queries_.size();
    kvt_error_t *error = nullptr;
    const kvt_status_t status =
        kvt_sparse_observe(policy_.get(), 0, queries, column_sums_.data(), column_sums_.size(),
                           (uint32_t) column_sums_.size(), &error);
    if (status != KVT_OK) {
        message = take_message(&error, status);
    }
    if (sums_all_queries()) {
        queries_.clear();
    }
    return status;
}

kvt_status_t token_evict::end_batch(llama_memory_t memory, llama_seq_id seq, std::string &message) {
    end_graph();
    const bool has_cells = wants_sums_ || uses_keys();
    if (has_unobserved_ || (has_cells && done_rows_ != new_.size())) {
        message = "attention fell on tokens that were not observed: decode all tokens of a sequence with "
                "kvt_llama_watch_decode";
        return KVT_E_STATE;
    }
    for (const llama_pos position : new_) {
        kept_.push_back((uint32_t) positions_.size());
        positions_.push_back(position);
    }
    kvt_status_t status = KVT_OK;
    if (uses_keys()) {
        status = append_keys(message);
    } else if (wants_sums_ && (sums_all_queries() || wants_logits_ || is_decode_)) {
        status = observe(message);
    }
    if (status == KVT_OK) {
        status = evict(memory, seq, message);
    }
    if (is_prompt_ && wants_logits_) {
        is_prompt_ = false;
        queries_.clear();
    }
    return status;
}

} // namespace kvt_llama
