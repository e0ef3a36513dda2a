/* XXH3-64 (seed 0), written from its specification: an independent reference for the library's
 * checksums. Simple and slow. */

#ifndef KVT_TESTS_XXH3_H
#define KVT_TESTS_XXH3_H

#include <stdint.h>
#include <string.h>

static const uint8_t xxh_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define XXH_P32_1 UINT64_C(0x9E3779B1)
#define XXH_P32_2 UINT64_C(0x85EBCA77)
#define XXH_P32_3 UINT64_C(0xC2B2AE3D)
#define XXH_P64_1 UINT64_C(0x9E3779B185EBCA87)
#define XXH_P64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define XXH_P64_3 UINT64_C(0x165667B19E3779F9)
#define XXH_P64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define XXH_P64_5 UINT64_C(0x27D4EB2F165667C5)

static inline uint64_t xxh_r64(const uint8_t *p) {
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

static inline uint64_t xxh_r32(const uint8_t *p) {
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24;
}

static inline uint64_t xxh_rotl(uint64_t v, int n) { return v << n | v >> (64 - n); }

static inline uint64_t xxh_swap(uint64_t v) {
    uint64_t r = 0;
    for (int i = 0; i < 8; i++, v >>= 8) r = r << 8 | (v & 0xff);
    return r;
}

/* The two halves of a 128-bit product, folded. */
static inline uint64_t xxh_fold(uint64_t a, uint64_t b) {
    const uint64_t al = a & 0xffffffff, ah = a >> 32, bl = b & 0xffffffff, bh = b >> 32;
    const uint64_t ll = al * bl, hl = ah * bl, lh = al * bh, hh = ah * bh;
    const uint64_t cross = (ll >> 32) + (hl & 0xffffffff) + lh;
    const uint64_t upper = (hl >> 32) + (cross >> 32) + hh;
    const uint64_t lower = cross << 32 | (ll & 0xffffffff);
    return upper ^ lower;
}

static inline uint64_t xxh_avalanche64(uint64_t h) {
    h = (h ^ h >> 33) * XXH_P64_2;
    h = (h ^ h >> 29) * XXH_P64_3;
    return h ^ h >> 32;
}

static inline uint64_t xxh_avalanche(uint64_t h) {
    h = (h ^ h >> 37) * UINT64_C(0x165667919E3779F9);
    return h ^ h >> 32;
}

static inline uint64_t xxh_mix16(const uint8_t *p, const uint8_t *secret) {
    return xxh_fold(xxh_r64(p) ^ xxh_r64(secret), xxh_r64(p + 8) ^ xxh_r64(secret + 8));
}

static inline uint64_t xxh_short(const uint8_t *p, size_t n) {
    const uint8_t *s = xxh_secret;
    if (n > 8) {
        const uint64_t low = xxh_r64(p) ^ (xxh_r64(s + 24) ^ xxh_r64(s + 32));
        const uint64_t high = xxh_r64(p + n - 8) ^ (xxh_r64(s + 40) ^ xxh_r64(s + 48));
        return xxh_avalanche(n + xxh_swap(low) + high + xxh_fold(low, high));
    }
    if (n >= 4) {
        const uint64_t joined = xxh_r32(p + n - 4) + (xxh_r32(p) << 32);
        uint64_t h = joined ^ (xxh_r64(s + 8) ^ xxh_r64(s + 16));
        h ^= xxh_rotl(h, 49) ^ xxh_rotl(h, 24);
        h *= UINT64_C(0x9FB21C651E98DF25);
        h ^= (h >> 35) + n;
        h *= UINT64_C(0x9FB21C651E98DF25);
        return h ^ h >> 28;
    }
    if (n > 0) {
        const uint64_t joined = (uint64_t)p[0] << 16 | (uint64_t)p[n >> 1] << 24 |
                                (uint64_t)p[n - 1] | (uint64_t)n << 8;
        return xxh_avalanche64(joined ^ (xxh_r32(s) ^ xxh_r32(s + 4)));
    }
    return xxh_avalanche64(xxh_r64(s + 56) ^ xxh_r64(s + 64));
}

static inline uint64_t xxh_middle(const uint8_t *p, size_t n) {
    const uint8_t *s = xxh_secret;
    uint64_t acc = n * XXH_P64_1;
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            acc += xxh_mix16(p + 16 * i, s + 32 * i);
            acc += xxh_mix16(p + n - 16 * (i + 1), s + 32 * i + 16);
        }
        return xxh_avalanche(acc);
    }
    for (size_t i = 0; i < 8; i++) acc += xxh_mix16(p + 16 * i, s + 16 * i);
    acc = xxh_avalanche(acc);
    for (size_t i = 8; i < n / 16; i++) acc += xxh_mix16(p + 16 * i, s + 16 * (i - 8) + 3);
    return xxh_avalanche(acc + xxh_mix16(p + n - 16, s + 136 - 17));
}

static inline void xxh_stripe(uint64_t *acc, const uint8_t *p, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        const uint64_t value = xxh_r64(p + 8 * i);
        const uint64_t keyed = value ^ xxh_r64(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (keyed & 0xffffffff) * (keyed >> 32);
    }
}

static inline uint64_t xxh3_64(const uint8_t *p, size_t n) {
    if (n <= 16) return xxh_short(p, n);
    if (n <= 240) return xxh_middle(p, n);
    uint64_t acc[8] = {XXH_P32_3, XXH_P64_1, XXH_P64_2, XXH_P64_3,
                       XXH_P64_4, XXH_P32_2, XXH_P64_5, XXH_P32_1};
    const size_t stripes_per_block = (192 - 64) / 8;
    const size_t blocks = (n - 1) / (64 * stripes_per_block);
    for (size_t b = 0; b < blocks; b++) {
        for (size_t i = 0; i < stripes_per_block; i++)
            xxh_stripe(acc, p + (b * stripes_per_block + i) * 64, xxh_secret + 8 * i);
        for (int i = 0; i < 8; i++)
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ xxh_r64(xxh_secret + 128 + 8 * i)) * XXH_P32_1;
    }
    const uint8_t *rest = p + blocks * stripes_per_block * 64;
    const size_t stripes = (n - 1 - blocks * stripes_per_block * 64) / 64;
    for (size_t i = 0; i < stripes; i++) xxh_stripe(acc, rest + 64 * i, xxh_secret + 8 * i);
    xxh_stripe(acc, p + n - 64, xxh_secret + 192 - 64 - 7);
    uint64_t h = n * XXH_P64_1;
    for (int i = 0; i < 4; i++)
        h += xxh_fold(acc[2 * i] ^ xxh_r64(xxh_secret + 11 + 16 * i),
                      acc[2 * i + 1] ^ xxh_r64(xxh_secret + 19 + 16 * i));
    return xxh_avalanche(h);
}

/* The library's checksum: XXH3-64 of every 4096 bytes, then XXH3-64 of those sums. */
static inline uint64_t reference_checksum(const uint8_t *p, size_t n) {
    static _Thread_local uint8_t sums[8 * 1024];
    size_t used = 0;
    for (size_t at = 0; at < n; at += 4096) {
        uint64_t sum = xxh3_64(p + at, n - at < 4096 ? n - at : 4096);
        for (int i = 0; i < 8; i++, sum >>= 8) sums[used++] = (uint8_t)sum;
    }
    return xxh3_64(sums, used);
}

#endif
