// Copies rows of K and V between the caches of a context and the store: directly if the CPU can address
// the caches, else through staging memory.
#include "watch/longer.hpp"

#include <algorithm>

using namespace kvt_llama::longer;

namespace {

// Calls f(first index, first cell, count) for each run of consecutive cells.
template <typename F> void each_run(const std::vector<uint32_t> &at, F f) {
    for (size_t i = 0; i < at.size();) {
        size_t end = i + 1;
        while (end < at.size() && at[end] == at[end - 1] + 1) {
            end++;
        }
        f(i, at[i], end - i);
        i = end;
    }
}

bool are_blocks_whole(const std::vector<uint32_t> &at, uint32_t block_tokens) {
    for (size_t i = 1; i < at.size(); i++) {
        if (i % block_tokens != 0 && at[i] != at[i - 1] + 1) {
            return false;
        }
    }
    return true;
}

// Approximate size of the staging memory for a put.
constexpr size_t staging_bytes = 8u << 20;

} // namespace

place place::skip_tokens(uint32_t tokens, const shape &model) const {
    place out = *this;
    if (k_pages.empty()) {
        out.k = (char *) k + tokens * model.k_row_bytes;
        out.v = (char *) v + tokens * model.v_row_bytes;
    } else {
        const std::ptrdiff_t pages = tokens / page_tokens;
        out.k_pages.erase(out.k_pages.begin(), out.k_pages.begin() + pages);
        out.v_pages.erase(out.v_pages.begin(), out.v_pages.begin() + pages);
    }
    return out;
}

void kvt_llama_longer_t::pages_of(uint32_t il, const std::vector<uint32_t> &at, place &out) const {
    out.page_tokens = are_blocks_whole(at, settings_.block_tokens) ? settings_.block_tokens : 1;
    out.k_pages.clear();
    out.v_pages.clear();
    for (size_t i = 0; i < at.size(); i += out.page_tokens) {
        out.k_pages.push_back((char *) k_[il]->data + at[i] * model_.k_row_bytes);
        out.v_pages.push_back((char *) v_[il]->data + at[i] * model_.v_row_bytes);
    }
}

void kvt_llama_longer_t::read_rows(ggml_tensor *cache, const std::vector<uint32_t> &at,
                                   size_t row_bytes, uint8_t *to) const {
    each_run(at, [&](size_t i, uint32_t cell, size_t n) {
        ggml_backend_tensor_get(cache, to + i * row_bytes, cell * row_bytes, n * row_bytes);
    });
}

void kvt_llama_longer_t::write_rows(ggml_tensor *cache, const std::vector<uint32_t> &at,
                                    size_t row_bytes, const uint8_t *from) const {
    each_run(at, [&](size_t i, uint32_t cell, size_t n) {
        ggml_backend_tensor_set(cache, from + i * row_bytes, cell * row_bytes, n * row_bytes);
    });
}

// Number of tokens of all layers that are staged at once.
uint32_t kvt_llama_longer_t::group_tokens() const {
    const size_t block_bytes =
        (size_t) settings_.block_tokens * model_.layers * (model_.k_row_bytes + model_.v_row_bytes);
    return settings_.block_tokens *
           (uint32_t) std::max<size_t>(1, std::min<size_t>(64, staging_bytes / block_bytes));
}

kvt_status_t kvt_llama_longer_t::put_cells(uint32_t first, uint32_t n, bool is_durable,
                                           kvt_llama_why_t *why) {
    std::vector<uint32_t> at(n);
    for (uint32_t i = 0; i < n; i++) {
        at[i] = cells_->cell_of(first + i);
    }
    std::vector<place> layers(model_.layers);
    const size_t k_bytes = n * model_.k_row_bytes, v_bytes = n * model_.v_row_bytes;
    if (!is_host_) {
        staging_.resize(std::max(staging_.size(), model_.layers * (k_bytes + v_bytes)));
    }
    for (uint32_t il = 0; il < model_.layers; il++) {
        if (is_host_) {
            pages_of(il, at, layers[il]);
        } else {
            uint8_t *to = staging_.data() + il * (k_bytes + v_bytes);
            read_rows(k_[il], at, model_.k_row_bytes, to);
            read_rows(v_[il], at, model_.v_row_bytes, to + k_bytes);
            layers[il].k = to;
            layers[il].v = to + k_bytes;
        }
    }
    const kvt_status_t status = store_.put(first, n, layers, is_durable, why);
    if (status == KVT_OK) {
        stats_.saved_tokens += n;
        stats_.saved_bytes += model_.layers * (k_bytes + v_bytes);
    }
    return status;
}

kvt_status_t kvt_llama_longer_t::get_cells(uint32_t il, const std::vector<uint32_t> &blocks,
                                           const std::vector<uint32_t> &at, kvt_llama_why_t *why) {
    const size_t k_bytes = at.size() * model_.k_row_bytes, v_bytes = at.size() * model_.v_row_bytes;
    if (is_host_) {
        pages_of(il, at, load_place_);
        return store_.get(il, blocks, load_place_, why);
    }
    staging_.resize(std::max(staging_.size(), k_bytes + v_bytes));
    place to;
    to.k = staging_.data();
    to.v = staging_.data() + k_bytes;
    const kvt_status_t status = store_.get(il, blocks, to, why);
    if (status == KVT_OK) {
        write_rows(k_[il], at, model_.k_row_bytes, staging_.data());
        write_rows(v_[il], at, model_.v_row_bytes, staging_.data() + k_bytes);
    }
    return status;
}

// Seals whole blocks that are in cells.
kvt_status_t kvt_llama_longer_t::seal_cells(uint32_t first, uint32_t n, kvt_llama_why_t *why) {
    std::vector<uint32_t> at(settings_.block_tokens);
    std::vector<uint8_t> keys(settings_.block_tokens * model_.k_row_bytes);
    for (uint32_t block = first / settings_.block_tokens; block < (first + n) / settings_.block_tokens;
         block++) {
        for (uint32_t i = 0; i < settings_.block_tokens; i++) {
            at[i] = cells_->cell_of(block * settings_.block_tokens + i);
        }
        for (uint32_t il = 0; il < model_.layers; il++) {
            read_rows(k_[il], at, model_.k_row_bytes, keys.data());
            const kvt_status_t status = store_.seal(il, block, keys.data(), why);
            if (status != KVT_OK) {
                return status;
            }
        }
    }
    return KVT_OK;
}
