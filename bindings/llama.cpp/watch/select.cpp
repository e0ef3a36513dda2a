#include "watch/select.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace kvt_llama {
namespace {

// A block is a whole number of policy pages. Only the spec knows their size: the first of these that
// fits is used.
constexpr uint32_t block_sizes[] = {16, 32, 64, 128, 256};

kvt_rows_t rows_of(const rows_view &rows, const attention_shape &shape, size_t n) {
    kvt_rows_t out = {};
    out.struct_size = sizeof out;
    out.view.address = const_cast<void *>(rows.data);
    out.view.tokens = (uint32_t) n;
    out.view.heads = shape.key_heads;
    out.view.run_bytes = shape.key_dim * ggml_type_size(rows.type);
    out.view.token_stride_bytes = rows.stride_bytes;
    out.dtype = dtype_of(rows.type);
    return out;
}

// Copies the mask values of some tokens, and returns how many of them are present.
template <typename number>
size_t copy_cells(const number *from, number *to, const cell_order &order, size_t first, size_t last) {
    size_t copied = 0;
    for (size_t token = first; token < last; token++) {
        const int32_t cell = order.cell(token);
        if (cell >= 0) {
            to[cell] = from[cell];
            copied++;
        }
    }
    return copied;
}

} // namespace

kvt_status_t block_select::make(const policy_source &source, uint32_t block_tokens, uint32_t keep_tokens,
                                int n_layers, uint32_t n_window, std::unique_ptr<block_select> &out,
                                std::string &message) {
    std::unique_ptr<block_select> made(new block_select);
    made->n_window_ = n_window;
    made->keep_tokens_ = std::max(keep_tokens, 1u);
    made->kept_.resize((size_t) n_layers);
    // Heads are known only from a graph; the spec is checked before.
    attention_shape shape = {(uint32_t) n_layers, 1, 1, 64, block_tokens, 1u << 20};
    kvt_status_t status = made->policy_.set_source(source, message);
    for (const uint32_t size : block_sizes) {
        shape.block_tokens = block_tokens ? block_tokens : size;
        if (status != KVT_OK || made->policy_.is_custom()) {
            break;
        }
        status = made->policy_.open(shape, message);
        if (status != KVT_E_SPEC || block_tokens) {
            break;
        }
        status = size == block_sizes[std::size(block_sizes) - 1] ? status : KVT_OK;
    }
    if (status != KVT_OK) {
        return status;
    }
    message.clear();
    const kvt_sparse_traits_t &traits = made->policy_.traits();
    constexpr uint32_t supported_needs = KVT_NEEDS_KEYS | KVT_NEEDS_QUERIES | KVT_NEEDS_NEXT_QUERY;
    if (!(traits.caps & KVT_SPARSE_LOAD_DECODE) || (traits.needs & ~supported_needs)) {
        message = source.name() + " does not choose blocks by keys and queries: use quest or arkvale";
        return KVT_E_UNSUPPORTED;
    }
    made->shape_ = shape;
    made->sealed_.assign((size_t) n_layers, 0);
    made->queries_.resize(traits.ahead ? (size_t) n_layers : 0);
    out = std::move(made);
    return KVT_OK;
}

void block_select::begin_graph(bool is_own, bool is_audit) {
    is_own_ = is_own;
    is_audit_ = is_own && is_audit;
    has_audit_ = has_narrowed_ = false;
    masks_.clear();
    for (pool &of : pools_) {
        of.is_narrowed = false;
    }
    counts_.tokens += is_own;
}

void block_select::forget() {
    bool is_known = false;
    for (pool &of : pools_) {
        is_known = is_known || of.order.size() > 0;
        of.order.clear();
        of.order.take_changed();
        of.marks.forget_from(0);
    }
    std::fill(sealed_.begin(), sealed_.end(), 0);
    std::fill(kept_.begin(), kept_.end(), choice());
    kvt_sparse_reset(policy_.get());
    counts_.rebuilds += is_known;
}

block_select::pool &block_select::pool_of(const layer_roles &layer, bool &is_first) {
    const auto known = std::find(masks_.begin(), masks_.end(), layer.mask);
    const size_t at = (size_t) (known - masks_.begin());
    is_first = known == masks_.end();
    if (is_first) {
        masks_.push_back(layer.mask);
    }
    if (at >= pools_.size()) {
        pools_.emplace_back();
    }
    return pools_[at];
}

// Called at the first layer of a graph that uses a mask: reads it and updates the map of cells.
kvt_status_t block_select::read_mask(const layer_roles &layer, pool &of, std::string &message) {
    of.is_narrowed = of.is_open = false;
    of.mask = layer.mask;
    if (!of.row.read(layer.mask)) {
        message = "the mask cannot be narrowed: it must have one token, type f16 or f32, and be filled "
                  "by the "
                "engine";
        return KVT_E_UNSUPPORTED;
    }
    int64_t cell = -1;
    ggml_backend_tensor_get(layer.k_idxs, &cell, 0, sizeof cell);
    of.first_cell = (int64_t) (layer.keys->view_offs / layer.cache_k->nb[1]);
    of.own_cell = cell - of.first_cell;
    of.order.update(of.row, of.own_cell);
    size_t changed = of.order.take_changed();
    of.marks.forget_from(changed);
    if (of.last_cache && of.marks.has_changed(of.last_cache, of.first_cell, of.order, of.own_cell)) {
        forget();
        of.order.update(of.row, of.own_cell);
        changed = of.order.take_changed();
    }
    of.is_open = of.order.visible() > n_window_ && of.order.size() > shape_.block_tokens;
    if (of.is_open && changed != SIZE_MAX) {
        const size_t blocks = changed / shape_.block_tokens;
        for (size_t &sealed : sealed_) {
            sealed = std::min(sealed, blocks);
        }
        std::fill(kept_.begin(), kept_.end(), choice());
        kvt_sparse_truncate(policy_.get(), (uint32_t) (blocks * shape_.block_tokens), nullptr);
    }
    return KVT_OK;
}

// Opens the policy for the model's heads, once they are known.
kvt_status_t block_select::open_for_heads(const layer_roles &layer, std::string &message) {
    attention_shape shape = shape_;
    shape.key_dim = (uint32_t) layer.keys->ne[0];
    shape.key_heads = (uint32_t) layer.keys->ne[2];
    shape.query_heads = (uint32_t) layer.q->ne[2];
    // Removed tokens keep their places in the map until they are half of all.
    shape.max_tokens = (uint32_t) (2 * layer.cache_k->ne[1] + 128);
    if (has_shape_ && shape == shape_) {
        return KVT_OK;
    }
    if (has_shape_ || shape.key_dim * shape.key_heads != layer.cache_k->ne[0]) {
        message = "its heads differ from those of earlier layers, which is not supported";
        return KVT_E_UNSUPPORTED;
    }
    const kvt_status_t status = policy_.open(shape, message);
    if (status == KVT_OK) {
        shape_ = shape;
        has_shape_ = true;
    }
    return status;
}

// Seals the keys of newly complete blocks in the policy. The current token is not among them.
kvt_status_t block_select::seal(const layer_roles &layer, int il, const pool &of,
                                std::string &message) {
    const size_t each = shape_.block_tokens, complete = (of.order.size() - 1) / each;
    size_t &sealed = sealed_[(size_t) il];
    cells_.resize(each);
    for (; sealed < complete; sealed++) {
        int64_t any = -1;
        for (size_t i = 0; i < each; i++) {
            cells_[i] = of.order.cell(sealed * each + i);
            any = cells_[i] >= 0 ? cells_[i] : any;
        }
        if (any < 0) {
            continue;
        }
        // A token that was removed before its block was sealed is replaced by a present one. The
        // bounding box of the keys allows that.
        for (int64_t &cell : cells_) {
            cell = of.first_cell + (cell >= 0 ? cell : any);
        }
        rows_view rows;
        if (!reader_.read(layer.cache_k, cells_.data(), each, rows)) {
            message = std::string("keys of type ") + ggml_type_name(layer.cache_k->type) +
                    " cannot be read: open the context with another type_k";
            return KVT_E_UNSUPPORTED;
        }
        const kvt_rows_t keys = rows_of(rows, shape_, each);
        kvt_error_t *error = nullptr;
        const kvt_status_t status =
            kvt_sparse_add_block(policy_.get(), (uint32_t) il, (uint32_t) sealed,
                            (uint32_t) (sealed * each), &keys, &error);
        if (status != KVT_OK) {
            message = take_message(&error, status);
            return status;
        }
    }
    return KVT_OK;
}

void block_select::keep_query(const layer_roles &layer, int il) {
    if (!queries_.empty()) {
        const size_t dim = shape_.key_dim;
        std::vector<float> &kept = queries_[(size_t) il];
        kept.resize(dim * shape_.query_heads);
        for (size_t head = 0; head < shape_.query_heads; head++) {
            ggml_backend_tensor_get(layer.q, kept.data() + head * dim, head * layer.q->nb[2],
                                    dim * sizeof(float));
        }
    }
}

// Fills ids_ with the chosen candidates.
kvt_status_t block_select::choose(const layer_roles &layer, int il, const pool &of,
                                  std::string &message) {
    const size_t each = shape_.block_tokens, complete = (of.order.size() - 1) / each;
    candidates_.clear();
    for (size_t block = 0; block < complete; block++) {
        bool is_there = false;
        for (size_t i = 0; i < each && !is_there; i++) {
            is_there = of.order.cell(block * each + i) >= 0;
        }
        if (is_there) {
            candidates_.push_back((uint32_t) block);
        }
    }
    ids_.resize(candidates_.size());

    const uint32_t ahead = policy_.traits().ahead;
    const size_t dim = shape_.key_dim;
    rows_view one;
    one.data = ahead ? queries_[(size_t) il - ahead].data() : (const void *) host_bytes(layer.q);
    size_t head_bytes = ahead ? dim * sizeof(float) : layer.q->nb[2];
    if (!one.data) {
        row_.resize(shape_.query_heads * dim * sizeof(float));
        for (size_t head = 0; head < shape_.query_heads; head++) {
            ggml_backend_tensor_get(layer.q, row_.data() + head * dim * sizeof(float),
                                    head * layer.q->nb[2], dim * sizeof(float));
        }
        one.data = row_.data();
        head_bytes = dim * sizeof(float);
    }
    kvt_rows_t query = rows_of(one, shape_, 1);
    query.view.heads = shape_.query_heads;
    query.view.token_stride_bytes = head_bytes * shape_.query_heads;
    query.view.head_stride_bytes = head_bytes;
    kvt_sparse_context_t context = KVT_SPARSE_CONTEXT_INIT;
    context.tokens = (uint32_t) of.order.size();
    context.first_query = context.tokens - 1;
    kvt_error_t *error = nullptr;
    const kvt_status_t status =
        kvt_sparse_select(policy_.get(), (uint32_t) il, &query, candidates_.data(),
                          candidates_.size(), &context, ids_.data(), ids_.size(), &n_ids_, &error);
    if (status != KVT_OK) {
        message = take_message(&error, status);
    }
    return status;
}

// Narrows the mask to the choice for an earlier token and the blocks that are complete since. False if
// the layer must choose. Layers choose at different tokens, so that all tokens take about as long.
bool block_select::use_kept(int il, pool &of) {
    const choice &kept = kept_[(size_t) il];
    const size_t n = of.order.size(), complete = (n - 1) / shape_.block_tokens;
    if (is_audit_ || !kept.tokens || n <= kept.tokens || n - kept.tokens >= keep_tokens_ ||
        (n + (size_t) il) % keep_tokens_ == 0) {
        return false;
    }
    if (kept.has_all) {
        restore(of);
        return true;
    }
    ids_ = kept.ids;
    for (size_t block = kept.blocks; block < complete; block++) {
        ids_.push_back((uint32_t) block);
    }
    n_ids_ = ids_.size();
    counts_.kept_layers++;
    narrow(of);
    return true;
}

void block_select::keep(int il, const pool &of) {
    choice &kept = kept_[(size_t) il];
    kept.ids.assign(ids_.begin(), ids_.begin() + (std::ptrdiff_t) n_ids_);
    kept.tokens = of.order.size();
    kept.blocks = (kept.tokens - 1) / shape_.block_tokens;
    kept.has_all = n_ids_ == candidates_.size();
}

void block_select::restore(pool &of) {
    if (of.is_narrowed) {
        ggml_backend_tensor_set(of.mask, of.row.bytes.data(), 0, of.row.bytes.size());
        of.is_narrowed = false;
    }
}

void block_select::restore_masks() {
    for (pool &of : pools_) {
        restore(of);
    }
}

// Writes the mask: chosen blocks, and tokens after the last complete block.
void block_select::narrow(pool &of) {
    const size_t each = shape_.block_tokens, n = of.order.size(), complete = (n - 1) / each;
    row_.resize(of.row.bytes.size());
    const auto copy = [&](auto *numbers, auto nothing) {
        using number = std::remove_pointer_t<decltype(numbers)>;
        const number *from = reinterpret_cast<const number *>(of.row.bytes.data());
        std::fill(numbers, numbers + of.row.cells, nothing);
        size_t copied = copy_cells(from, numbers, of.order, complete * each, n);
        for (uint64_t i = 0; i < n_ids_; i++) {
            copied += copy_cells(from, numbers, of.order, ids_[i] * each, (ids_[i] + 1) * each);
        }
        counts_.masked_cells += of.order.visible() - copied;
        audit_.resize(is_audit_ ? of.row.cells : 0);
        for (size_t cell = 0; cell < audit_.size(); cell++) {
            audit_[cell] = numbers[cell] != nothing;
        }
    };
    if (of.row.type == GGML_TYPE_F16) {
        copy(reinterpret_cast<uint16_t *>(row_.data()), (uint16_t) 0xFC00);
    } else {
        copy(reinterpret_cast<float *>(row_.data()), -INFINITY);
    }
    counts_.layers++;
    counts_.seen_cells += of.order.visible();
    if (is_audit_) {
        has_audit_ = true;
        return;
    }
    ggml_backend_tensor_set(of.mask, row_.data(), 0, row_.size());
    of.is_narrowed = has_narrowed_ = true;
}

kvt_status_t block_select::at_attention(const roles &found, int il, std::string &message) {
    const layer_roles &layer = found.layer(il);
    bool is_first = false;
    pool &of = pool_of(layer, is_first);
    has_audit_ = false;
    if (!is_own_) {
        if (is_first) {
            cells_.resize((size_t) ggml_nelements(layer.k_idxs));
            ggml_backend_tensor_get(layer.k_idxs, cells_.data(), 0, ggml_nbytes(layer.k_idxs));
            for (int64_t &cell : cells_) {
                cell -= of.first_cell;
            }
            of.order.overwritten(cells_.data(), cells_.size());
        }
        return KVT_OK;
    }
    kvt_status_t status = is_first ? read_mask(layer, of, message) : KVT_OK;
    of.last_cache = layer.cache_k;
    if (status == KVT_OK && of.is_open && !found.is_computed(layer.q)) {
        message = "its queries are not computed before its keys are written: this engine is not supported";
        status = KVT_E_UNSUPPORTED;
    }
    if (status == KVT_OK && of.is_open) {
        status = open_for_heads(layer, message);
    }
    if (status != KVT_OK || !of.is_open) {
        restore(of);
        return status;
    }
    keep_query(layer, il);
    // The first layers have no earlier layer whose queries they could use.
    if ((uint32_t) il < std::max(policy_.traits().dense_layers, policy_.traits().ahead)) {
        restore(of);
        return KVT_OK;
    }
    if (use_kept(il, of)) {
        return KVT_OK;
    }
    status = seal(layer, il, of, message);
    status = status == KVT_OK ? choose(layer, il, of, message) : status;
    if (status != KVT_OK || n_ids_ == candidates_.size()) {
        restore(of);
    } else {
        narrow(of);
    }
    if (status == KVT_OK && keep_tokens_ > 1) {
        keep(il, of);
    }
    return status;
}

// Adds the share of the attention that the choice covers, as the mean over heads.
void block_select::after_soft_max(const layer_roles &layer) {
    const ggml_tensor *node = layer.attention;
    const size_t cells = (size_t) node->ne[0], heads = (size_t) node->ne[2];
    if (audit_.size() != cells || !heads) {
        return;
    }
    std::vector<float> row(cells);
    double mass = 0;
    for (size_t head = 0; head < heads; head++) {
        ggml_backend_tensor_get(node, row.data(), head * node->nb[2], cells * sizeof(float));
        for (size_t cell = 0; cell < cells; cell++) {
            mass += audit_[cell] ? row[cell] : 0.0f;
        }
    }
    counts_.audited_mass += mass / (double) heads;
    counts_.audited_layers++;
    has_audit_ = false;
}

} // namespace kvt_llama
