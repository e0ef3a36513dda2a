/* `Kind::Sum`: the checksum of src/base/checksum.rs. This is XXH3-64 of every 4 KiB block, then
 * XXH3-64 over the sums of the blocks. A warp sums a block. Its lanes share the stripes, because
 * the order of the additions does not matter. */
#include "plan.h"

struct range {
    u64 address, bytes;
};

constexpr u32 BLOCK_BYTES = 4096;
/* Constants of XXH3. */
constexpr u32 STRIPE = 64, SECRET = 192, STRIPES = (SECRET - STRIPE) / 8, STEP = STRIPES * STRIPE;
constexpr u64 PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
              PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
              PRIME64_5 = 0x27D4EB2F165667C5;

alignas(8) __device__ const u8 secret[SECRET] = {
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

__device__ const u64 begun[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                 PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

/* Reads a little-endian number at any address. */
DEVICE u64 read64(const u8 *at) {
    if ((u64)at % 8 == 0) return *(const u64 *)at;
    u64 x = 0;
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) x |= (u64)at[i] << 8 * i;
    return x;
}
DEVICE u32 read32(const u8 *at) {
    u32 x = 0;
    for (u32 i = 0; i < 4; i++) x |= (u32)at[i] << 8 * i;
    return x;
}

DEVICE u64 folded(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }
DEVICE u64 rotated(u64 x, u32 by) { return x << by | x >> (64 - by); }
DEVICE u64 swapped(u64 x) {
    return (u64)__byte_perm((u32)x, 0, 0x0123) << 32 | __byte_perm((u32)(x >> 32), 0, 0x0123);
}
DEVICE u64 xxh64_end(u64 h) {
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}
DEVICE u64 xxh3_end(u64 h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9;
    return h ^ h >> 32;
}
DEVICE u64 mix16(const u8 *at, const u8 *key) {
    return folded(read64(at) ^ read64(key), read64(at + 8) ^ read64(key + 8));
}

DEVICE u64 sum_to_16(const u8 *at, u32 bytes) {
    if (bytes > 8) {
        u64 low = read64(at) ^ read64(secret + 24) ^ read64(secret + 32);
        u64 high = read64(at + bytes - 8) ^ read64(secret + 40) ^ read64(secret + 48);
        return xxh3_end(bytes + swapped(low) + high + folded(low, high));
    }
    if (bytes >= 4) {
        u64 both = read32(at + bytes - 4) + ((u64)read32(at) << 32);
        u64 h = both ^ read64(secret + 8) ^ read64(secret + 16);
        h ^= rotated(h, 49) ^ rotated(h, 24);
        h *= 0x9FB21C651E98DF25;
        h ^= (h >> 35) + bytes;
        h *= 0x9FB21C651E98DF25;
        return h ^ h >> 28;
    }
    if (bytes > 0) {
        u32 all = (u32)at[0] << 16 | (u32)at[bytes >> 1] << 24 | at[bytes - 1] | bytes << 8;
        return xxh64_end(all ^ (u64)(read32(secret) ^ read32(secret + 4)));
    }
    return xxh64_end(read64(secret + 56) ^ read64(secret + 64));
}

DEVICE u64 sum_to_240(const u8 *at, u32 bytes) {
    u64 h = bytes * PRIME64_1;
    if (bytes <= 128) {
        for (u32 i = (bytes - 1) / 32 + 1; i-- > 0;) {
            h += mix16(at + 16 * i, secret + 32 * i);
            h += mix16(at + bytes - 16 * (i + 1), secret + 32 * i + 16);
        }
        return xxh3_end(h);
    }
    for (u32 i = 0; i < 8; i++) h += mix16(at + 16 * i, secret + 16 * i);
    h = xxh3_end(h);
    for (u32 i = 8; i < bytes / 16; i++) h += mix16(at + 16 * i, secret + 16 * (i - 8) + 3);
    return xxh3_end(h + mix16(at + bytes - 16, secret + 136 - 17));
}

/* Accumulators of a lane. Lane l has accumulator l % 8, for every fourth stripe from l / 8 on.
 * Stripes add to its accumulator, and to the adjacent one. */
struct added {
    u64 products, adjacent;
};

DEVICE void add_stripe(added &sum, u64 number, u64 key) {
    u64 mixed = number ^ key;
    sum.products += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    sum.adjacent += number;
}

/* Sums the accumulators of all stripes. */
DEVICE u64 add_up(added sum) {
    u64 all = sum.products + across(sum.adjacent, 1);
    all += across(all, 8);
    return all + across(all, 16);
}

/* Sums more than 240 bytes with a whole warp; all lanes get the sum. */
DEVICE u64 sum_long(const u8 *at, u64 bytes) {
    u32 place = lane() % 8, stripe = lane() / 8;
    u64 keys[STRIPES / 4];
#pragma unroll
    for (u32 i = 0; i < STRIPES / 4; i++) keys[i] = read64(secret + 8 * (stripe + 4 * i + place));
    u64 scramble = read64(secret + SECRET - STRIPE + 8 * place), sum = begun[place];
    u64 steps = (bytes - 1) / STEP;
    const u8 *own = at + stripe * STRIPE + 8 * place;
    for (u64 step = 0; step < steps; step++) {
        added more = {};
#pragma unroll
        for (u32 i = 0; i < STRIPES / 4; i++)
            add_stripe(more, read64(own + step * STEP + 4 * i * STRIPE), keys[i]);
        sum += add_up(more);
        sum = (sum ^ sum >> 47 ^ scramble) * PRIME32_1;
    }
    added more = {};
    u32 stripes = (u32)((bytes - 1 - steps * STEP) / STRIPE);
#pragma unroll
    for (u32 i = 0; i < STRIPES / 4; i++)
        if (stripe + 4 * i < stripes)
            add_stripe(more, read64(own + steps * STEP + 4 * i * STRIPE), keys[i]);
    // The last stripe ends at the end of the data, and may overlap earlier ones.
    if (stripe == 0) {
        u64 key = read64(secret + SECRET - STRIPE - 7 + 8 * place);
        add_stripe(more, read64(at + bytes - STRIPE + 8 * place), key);
    }
    sum += add_up(more);
    u64 mixed = sum ^ read64(secret + 11 + 8 * place);
    u64 h = folded(mixed, across(mixed, 1));
    h += across(h, 2);
    h += across(h, 4);
    return xxh3_end(bytes * PRIME64_1 + h);
}

DEVICE u64 sum_any(const u8 *at, u64 bytes) {
    if (bytes > 240) return sum_long(at, bytes);
    return bytes <= 16 ? sum_to_16(at, (u32)bytes) : sum_to_240(at, (u32)bytes);
}

/* Scratch memory: the number of blocks before each range, then the sums of all blocks. */
DEVICE u64 *sums_of(const call &c) { return (u64 *)c.scratch + c.count + 1; }
DEVICE bool has_room(const call &c) {
    return ((const u64 *)c.scratch)[c.count] <= c.scratch_bytes / 8 - c.count - 1;
}

extern "C" __global__ void __launch_bounds__(PLANNERS) sum_plan(const __grid_constant__ call c) {
    __shared__ u64 sums[PLANNERS / WARP];
    const range *ranges = (const range *)c.table;
    plan((u64 *)c.scratch, c.count, sums,
         [&](u32 i) { return ceil_div<u64>(ranges[i].bytes, BLOCK_BYTES); });
}

extern "C" __global__ void __launch_bounds__(256, 4) sum_blocks(const __grid_constant__ call c) {
    const range *ranges = (const range *)c.table;
    const u64 *before = (const u64 *)c.scratch;
    share own = share_of(before[c.count]);
    if (own.from == own.to || !has_room(c)) return;
    u32 at = piece_of(before, c.count, own.from);
    for (u64 block = own.from; block < own.to; block++) {
        while (before[at + 1] <= block) at++;
        u64 start = (block - before[at]) * BLOCK_BYTES;
        u64 bytes = least<u64>(ranges[at].bytes - start, BLOCK_BYTES);
        u64 sum = sum_any((const u8 *)ranges[at].address + start, bytes);
        if (lane() == 0) sums_of(c)[block] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) sum_ranges(const __grid_constant__ call c) {
    const u64 *before = (const u64 *)c.scratch;
    u64 each = (u64)gridDim.x * blockDim.x / WARP;
    for (u64 i = (u64)blockIdx.x * (blockDim.x / WARP) + warp(); i < c.count; i += each) {
        u64 sums = 8 * (before[i + 1] - before[i]);
        u64 sum = has_room(c) ? sum_any((const u8 *)(sums_of(c) + before[i]), sums) : 0;
        if (lane() == 0) ((u64 *)c.out)[i] = sum;
    }
}
