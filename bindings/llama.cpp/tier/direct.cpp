// Finds the rows of new cells in the tensors of the engine's cache, so that the store can copy into them.
//
// The engine restores a state through a reader, an interface of its private headers. The reader of this
// file gives it the cells, and notes where the engine would copy the rows.
#include "tier/tier.hpp"

#if defined(KVTIER_LLAMA_PRIVATE) && KVTIER_LLAMA_TENSOR_READER

#include <ggml-backend.h>
#include <llama-io.h>
#include <llama-memory.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace kvtier_llama {

namespace {

/// Magic word and sequence id, which the context reads, not its memory.
constexpr size_t context_bytes = 8;

/// Reads a packed blob. Replaces the offset of each plane by that of the tensor's part.
class tensor_finder final : public llama_io_read_i {
public:
    tensor_finder(const std::vector<uint8_t> &packed, std::vector<uint64_t *> planes, const uint8_t *base)
        : packed_(packed), planes_(std::move(planes)), base_(base) {}

    void read(void *to, size_t size) override {
        if (size > packed_.size() - packed_at_ || (next_ < planes_.size() && size > *planes_[next_] - at_)) {
            throw std::runtime_error("the engine reads another state");
        }
        std::memcpy(to, packed_.data() + packed_at_, size);
        packed_at_ += size;
        at_ += size;
    }

    void read_tensor(ggml_tensor *tensor, size_t offset, size_t size) override {
        const ggml_tensor *owner = tensor->view_src ? tensor->view_src : tensor;
        const bool in_host = owner->buffer && ggml_backend_buffer_is_host(owner->buffer);
        // A plane that comes in several parts has cells that are not in a row.
        if (!in_host || next_ == planes_.size() || *planes_[next_] != at_ || offset > ggml_nbytes(tensor) ||
            size > ggml_nbytes(tensor) - offset) {
            throw std::runtime_error("the rows are not in host memory, or not in a row");
        }
        const auto *row = static_cast<const uint8_t *>(tensor->data) + offset;
        *planes_[next_++] = reinterpret_cast<uintptr_t>(row) - reinterpret_cast<uintptr_t>(base_);
        at_ += size;
    }

    size_t n_bytes() override { return at_; }

private:
    const std::vector<uint8_t> &packed_;
    std::vector<uint64_t *> planes_;
    const uint8_t *base_;
    size_t packed_at_ = context_bytes, next_ = 0;
    uint64_t at_ = context_bytes;
};

/// The offsets of all planes, in the order of the blob.
std::vector<uint64_t *> planes_of(blob_place &place) {
    std::vector<uint64_t *> planes;
    for (section_place &section : place.sections) {
        for (uint64_t &at : section.at) {
            planes.push_back(&at);
        }
    }
    return planes;
}

} // namespace

bool take_cells(tier_t &tier, const std::vector<cell_range> &cells, const uint8_t *base, blob_place *place) {
    if (blob_bytes(tier.shape, cells) == 0) {
        return false;
    }
    std::vector<uint8_t> packed(build_blob(tier.shape, cells, 0, nullptr).heading_bytes);
    *place = build_blob(tier.shape, cells, 0, packed.data(), true);
    tensor_finder finder(packed, planes_of(*place), base);
    llama_synchronize(tier.ctx);
    try {
        tier.memory->state_read(finder, tier.scratch);
        if (finder.n_bytes() == place->bytes) {
            return true;
        }
    } catch (const std::exception &) {
        // The engine has freed the cells, or had too few.
    }
    llama_memory_seq_rm(tier.memory, tier.scratch, -1, -1);
    return false;
}

} // namespace kvtier_llama

#else

namespace kvtier_llama {

bool take_cells(tier_t &, const std::vector<cell_range> &, const uint8_t *, blob_place *) { return false; }

} // namespace kvtier_llama

#endif
