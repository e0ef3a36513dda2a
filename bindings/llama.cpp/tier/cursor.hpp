// Bounds-checked reading and writing of plain numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace kvtier_llama {

/// The first word of a blob, and limits that a blob must keep to.
constexpr uint32_t blob_magic = 0xaf143cd8;
constexpr uint32_t max_streams = 256;
constexpr uint32_t max_layers = 4096;
constexpr uint64_t max_row_bytes = uint64_t(32) << 20;
constexpr uint32_t max_cells = uint32_t(1) << 27;

struct reader {
    const uint8_t *data;
    uint64_t bytes;
    uint64_t at = 0;
    bool ok = true;

    template <typename T> T take() {
        T value{};
        if (!ok || bytes - at < sizeof value) {
            ok = false;
            return value;
        }
        std::memcpy(&value, data + at, sizeof value);
        at += sizeof value;
        return value;
    }

    /// Takes bytes that must be these.
    bool matches(const std::string &wanted) {
        ok = ok && bytes - at >= wanted.size() && std::memcmp(data + at, wanted.data(), wanted.size()) == 0;
        at += ok ? wanted.size() : 0;
        return ok;
    }

    /// The bytes since an earlier position.
    std::string since(uint64_t from) const {
        return ok ? std::string(reinterpret_cast<const char *>(data) + from, at - from) : std::string();
    }

    /// Skips `count` * `each` bytes and returns their offset.
    uint64_t skip(uint64_t count, uint64_t each) {
        const uint64_t here = at;
        if (!ok || (each != 0 && count > (bytes - at) / each)) {
            ok = false;
            return here;
        }
        at += count * each;
        return here;
    }
};

/// Writes if `data` is not null, and counts the bytes in any case. With `packed`, skipped bytes take no
/// space in `data`; offsets are the same.
struct writer {
    uint8_t *data;
    bool packed = false;
    uint64_t at = 0;
    uint64_t skipped = 0;

    template <typename T> void put(T value) {
        if (data) {
            std::memcpy(data + (packed ? at - skipped : at), &value, sizeof value);
        }
        at += sizeof value;
    }

    void put_bytes(const std::string &value) {
        if (data) {
            std::memcpy(data + (packed ? at - skipped : at), value.data(), value.size());
        }
        at += value.size();
    }

    uint64_t skip(uint64_t bytes) {
        const uint64_t here = at;
        at += bytes;
        skipped += bytes;
        return here;
    }
};

} // namespace kvtier_llama
