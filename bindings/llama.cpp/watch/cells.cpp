#include "watch/cells.hpp"

#include <kvtier/kvtier.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvt_llama {
namespace {

constexpr uint16_t half_minus_infinity = 0xFC00;

} // namespace

const uint8_t *host_bytes(const ggml_tensor *tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    const bool is_host = buffer && ggml_backend_buffer_is_host(buffer);
    return is_host ? static_cast<const uint8_t *>(tensor->data) : nullptr;
}

uint32_t dtype_of(ggml_type type) {
    return type == GGML_TYPE_F16 ? KVT_DTYPE_F16 : type == GGML_TYPE_BF16 ? KVT_DTYPE_BF16 : KVT_DTYPE_F32;
}

bool mask_row::read(ggml_tensor *mask) {
    const bool is_known = mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32;
    if (!is_known || mask->op != GGML_OP_NONE || mask->ne[1] != 1 || mask->ne[2] != 1 ||
        mask->ne[3] != 1) {
        return false;
    }
    type = mask->type;
    cells = (size_t) mask->ne[0];
    bytes.resize(cells * ggml_type_size(type));
    ggml_backend_tensor_get(mask, bytes.data(), 0, bytes.size());
    return true;
}

bool mask_row::is_visible(size_t cell) const {
    if (type == GGML_TYPE_F16) {
        return reinterpret_cast<const uint16_t *>(bytes.data())[cell] != half_minus_infinity;
    }
    return reinterpret_cast<const float *>(bytes.data())[cell] != -INFINITY;
}

void cell_order::forget(size_t token) {
    if (cells_[token] >= 0) {
        tokens_[(size_t) cells_[token]] = -1;
        cells_[token] = -1;
        visible_--;
    }
}

void cell_order::add(int64_t cell) {
    if ((size_t) cell >= tokens_.size()) {
        tokens_.resize((size_t) cell + 256, -1);
    }
    tokens_[(size_t) cell] = (int32_t) cells_.size();
    cells_.push_back((int32_t) cell);
    visible_++;
}

void cell_order::update(const mask_row &row, int64_t own_cell) {
    overwritten(&own_cell, 1);
    for (size_t token = 0; token < cells_.size(); token++) {
        const int32_t cell = cells_[token];
        if (cell >= 0 && ((size_t) cell >= row.cells || !row.is_visible((size_t) cell))) {
            forget(token);
        }
    }
    // Tokens removed at the end free their places for the tokens that replace them.
    while (!cells_.empty() && cells_.back() < 0) {
        cells_.pop_back();
        changed_ = std::min(changed_, cells_.size());
    }
    for (size_t cell = 0; cell < row.cells; cell++) {
        const bool is_new = cell >= tokens_.size() || tokens_[cell] < 0;
        if (is_new && (int64_t) cell != own_cell && row.is_visible(cell)) {
            add((int64_t) cell);
        }
    }
    if (own_cell >= 0 && (size_t) own_cell < row.cells && row.is_visible((size_t) own_cell)) {
        add(own_cell);
    }
    // More removed tokens than present ones: rebuild the map; all rows are read again.
    if (cells_.size() > 64 && visible_ * 2 < cells_.size()) {
        std::vector<int32_t> left;
        std::copy_if(cells_.begin(), cells_.end(), std::back_inserter(left),
                     [](int32_t cell) { return cell >= 0; });
        clear();
        for (const int32_t cell : left) {
            add(cell);
        }
    }
}

void cell_order::overwritten(const int64_t *cells, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (cells[i] >= 0 && (size_t) cells[i] < tokens_.size() && tokens_[(size_t) cells[i]] >= 0) {
            forget((size_t) tokens_[(size_t) cells[i]]);
        }
    }
}

void cell_order::clear() {
    cells_.clear();
    tokens_.clear();
    visible_ = 0;
    changed_ = 0;
}

size_t cell_order::take_changed() {
    const size_t changed = changed_;
    changed_ = SIZE_MAX;
    return changed;
}

bool cell_marks::has_changed(ggml_tensor *cache, int64_t first_cell, const cell_order &order,
                          int64_t own_cell) {
    const uint8_t *data = host_bytes(cache);
    if (!data || cache->nb[1] < sizeof(uint64_t)) {
        return false;
    }
    marks_.resize(order.size(), 0);
    for (size_t token = 0; token < order.size(); token++) {
        const int64_t cell = order.cell(token);
        if (cell < 0 || cell == own_cell) {
            continue;
        }
        uint64_t mark;
        std::memcpy(&mark, data + (size_t) (first_cell + cell) * cache->nb[1], sizeof mark);
        if (marks_[token] != 0 && marks_[token] != mark) {
            return true;
        }
        marks_[token] = mark;
    }
    return false;
}

bool row_reader::read(ggml_tensor *cache, const int64_t *cells, size_t n, rows_view &out) {
    const ggml_type type = cache->type;
    const size_t row_bytes = ggml_row_size(type, cache->ne[0]);
    const bool is_plain = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    const uint8_t *data = host_bytes(cache);
    bool is_run = true;
    for (size_t i = 1; i < n; i++) {
        is_run = is_run && cells[i] == cells[i - 1] + 1;
    }
    rows_ += n;
    if (data && is_plain && is_run && n) {
        out = {data + (size_t) cells[0] * cache->nb[1], type, cache->nb[1]};
        return true;
    }
    raw_.resize(n * row_bytes);
    for (size_t i = 0; i < n; i++) {
        uint8_t *to = raw_.data() + i * row_bytes;
        const size_t at = (size_t) cells[i] * cache->nb[1];
        data ? (void) std::memcpy(to, data + at, row_bytes)
             : ggml_backend_tensor_get(cache, to, at, row_bytes);
    }
    if (is_plain) {
        out = {raw_.data(), type, row_bytes};
        return true;
    }
    const ggml_type_traits *traits = ggml_get_type_traits(type);
    if (!traits || !traits->to_float) {
        return false;
    }
    numbers_.resize(n * (size_t) cache->ne[0]);
    for (size_t i = 0; i < n; i++) {
        traits->to_float(raw_.data() + i * row_bytes, numbers_.data() + i * (size_t) cache->ne[0],
                         cache->ne[0]);
    }
    out = {numbers_.data(), GGML_TYPE_F32, (size_t) cache->ne[0] * sizeof(float)};
    return true;
}

} // namespace kvt_llama
