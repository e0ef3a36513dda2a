// SHA-256, which identifies media by their embeddings.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvtier_run {

class digest_t {
public:
    void add(const void *data, size_t bytes);
    /// Of all bytes so far. Nothing may be added after it.
    std::array<uint8_t, 32> value();

private:
    void take_block(const uint8_t *block);

    std::array<uint32_t, 8> state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> rest{};
    uint64_t bytes = 0;
};

} // namespace kvtier_run
