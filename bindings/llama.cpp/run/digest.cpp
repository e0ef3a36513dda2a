// SHA-256 (FIPS 180-4).
#include "run/digest.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier_run {

namespace {

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turn(uint32_t value, int by) { return value >> by | value << (32 - by); }

} // namespace

void digest_t::take_block(const uint8_t *block) {
    uint32_t words[64];
    for (int i = 0; i < 16; i++) {
        words[i] = uint32_t(block[4 * i]) << 24 | uint32_t(block[4 * i + 1]) << 16 |
                   uint32_t(block[4 * i + 2]) << 8 | uint32_t(block[4 * i + 3]);
    }
    for (int i = 16; i < 64; i++) {
        const uint32_t a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + words[i - 7] +
                   (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    std::array<uint32_t, 8> v = state;
    for (int i = 0; i < 64; i++) {
        const uint32_t one = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) +
                             ((v[4] & v[5]) ^ (~v[4] & v[6])) + rounds[i] + words[i];
        const uint32_t two = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) +
                             ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        v = {one + two, v[0], v[1], v[2], v[3] + one, v[4], v[5], v[6]};
    }
    for (size_t i = 0; i < state.size(); i++) {
        state[i] += v[i];
    }
}

void digest_t::add(const void *data, size_t count) {
    const auto *from = static_cast<const uint8_t *>(data);
    while (count != 0) {
        const size_t at = bytes % rest.size();
        const size_t part = std::min(count, rest.size() - at);
        std::memcpy(rest.data() + at, from, part);
        bytes += part;
        from += part;
        count -= part;
        if (at + part == rest.size()) {
            take_block(rest.data());
        }
    }
}

std::array<uint8_t, 32> digest_t::value() {
    const uint64_t bits = bytes * 8;
    const uint8_t end = 0x80, zero = 0;
    add(&end, 1);
    while (bytes % rest.size() != 56) {
        add(&zero, 1);
    }
    uint8_t length[8];
    for (int i = 0; i < 8; i++) {
        length[i] = uint8_t(bits >> (56 - 8 * i));
    }
    add(length, sizeof length);
    std::array<uint8_t, 32> out;
    for (size_t i = 0; i < out.size(); i++) {
        out[i] = uint8_t(state[i / 4] >> (24 - 8 * (i % 4)));
    }
    return out;
}

} // namespace kvtier_run
