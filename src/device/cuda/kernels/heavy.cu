/* Heavy hitters: accumulates the weights of tokens (`Kind::Add`), chooses the tokens to keep
 * (`Kind::Keep`), and compacts their rows (`Kind::Compact`). call.h defines their fields. */
#include "device.h"

DEVICE float *scores_of(const call &c, u32 list) {
    return (float *)(c.numbers + (u64)((i64)list * c.out_head_stride));
}

DEVICE u32 *list_of(const call &c, u32 list) {
    return (u32 *)(c.index + (u64)((i64)list * c.out_stride));
}

/* Adds the rows of sums one after the other, as the CPU does: the bits are equal. Grid: tokens,
 * lists. */
extern "C" __global__ void __launch_bounds__(256) heavy_add(const __grid_constant__ call c) {
    u32 token = blockIdx.x * 256 + threadIdx.x;
    if (token >= c.tokens) return;
    u32 rows = c.query_heads / c.key_heads, first = blockIdx.y * rows;
    float *scores = scores_of(c, blockIdx.y), score = scores[token];
    for (u32 row = first; row < first + rows; row++) {
        u64 from = c.more + (u64)((i64)row * c.query_head_stride);
        score = add_rounded(score, ((const float *)from)[token]);
    }
    scores[token] = score;
}

constexpr u32 KEEP_THREADS = 1024;

/* Maps a score to an unsigned integer of the same order. -0 equals 0. */
DEVICE u32 order_of(float score) {
    u32 bits = to_bits(add_rounded(score, 0.0f));
    return bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u);
}

/* Exclusive prefix sum over the threads, and the total in `all`; `warps` has 32 numbers. All
 * threads must call it, and a barrier must separate two calls. */
DEVICE u32 sum_before(u32 x, u32 *warps, u32 &all) {
    u32 up_to = warp_up_to(x);
    if (lane() == WARP - 1) warps[warp()] = up_to;
    __syncthreads();
    u32 others = warp_up_to(warps[lane()]), own = warp();
    all = from_lane(others, WARP - 1);
    u32 before = from_lane(others, own == 0 ? 0 : own - 1);
    __syncthreads();
    return (own == 0 ? 0 : before) + up_to - x;
}

/* Radix select, eight bits at a time: the mapped value of the score at `rank` in ascending order.
 * The number of smaller scores is subtracted from `rank`. */
DEVICE u32 find_rank(const float *scores, u32 from, u32 to, u32 &rank, u32 *counts, u32 *found) {
    u32 order = 0;
    for (u32 shift = 32; shift > 0;) {
        shift -= 8;
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = from + threadIdx.x; i < to; i += KEEP_THREADS) {
            u32 own = order_of(scores[i]);
            // The higher bits were found in earlier rounds.
            if (shift == 24 || own >> (shift + 8) == order >> (shift + 8))
                atomicAdd(&counts[own >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 digit = 0, left = rank;
            while (left >= counts[digit]) left -= counts[digit++];
            found[0] = digit;
            found[1] = left;
        }
        __syncthreads();
        order |= found[0] << shift;
        rank = found[1];
    }
    return order;
}

/* Chooses the tokens to keep. Grid: lists. */
extern "C" __global__ void __launch_bounds__(KEEP_THREADS)
    heavy_keep(const __grid_constant__ call c) {
    __shared__ u32 counts[256];
    __shared__ u32 warps[WARP];
    __shared__ u32 found[2];
    const float *scores = scores_of(c, blockIdx.x);
    u32 *list = list_of(c, blockIdx.x);
    u32 to = c.tokens - least(c.recent, c.tokens), from = least(c.sinks, to);
    u32 evicted = to - from > c.keep ? to - from - c.keep : 0;
    // The largest evicted score, and how many scores equal to it are evicted.
    u32 bar = 0, equals = 0;
    if (evicted > 0) {
        equals = evicted - 1;
        bar = find_rank(scores, from, to, equals, counts, found);
        equals++;
    }
    u32 kept = 0, same = 0;
    for (u32 first = 0; first < c.tokens; first += KEEP_THREADS) {
        u32 at = first + threadIdx.x, all;
        bool is_candidate = evicted > 0 && from <= at && at < to;
        u32 order = is_candidate ? order_of(scores[at]) : 0;
        // Among equal scores the lower positions are evicted.
        bool is_same = is_candidate && order == bar;
        u32 before = same + sum_before(is_same, warps, all);
        same += all;
        bool is_evicted = is_candidate && (order < bar || (is_same && before < equals));
        bool is_kept = at < c.tokens && !is_evicted;
        u32 place = kept + sum_before(is_kept, warps, all);
        kept += all;
        if (is_kept) list[place] = at;
    }
    if (threadIdx.x == 0) ((u32 *)c.counts)[blockIdx.x] = kept;
}

/* Threads of a block that moves rows, and pieces that each thread moves at a time. */
constexpr u32 COMPACT_THREADS = 256, PIECES = 8;

/* An array of rows: keys or values. */
struct array {
    u64 base;
    i64 stride, head_stride;
    u32 bytes;
};

DEVICE u64 row_at(const call &c, const array &rows, u32 token, u32 head) {
    u64 base = rows.base;
    if (c.table != 0) {
        u32 page = token / c.page_tokens;
        base += ((const u64 *)c.table)[page];
        token -= page * c.page_tokens;
    }
    return base + (u64)((i64)token * rows.stride) + (u64)((i64)head * rows.head_stride);
}

/* Moves a slice of the kept rows, SIDE pieces of T, to the front. Lists ascend, so no row moves
 * towards the end. Each round reads its rows before it writes any. Its writes end before the rows
 * that later rounds read. */
template <class T, u32 SIDE>
DEVICE void compact(const call &c, const array &rows, u32 slice, u32 head, u32 list) {
    constexpr u32 EACH = COMPACT_THREADS * PIECES / SIDE;
    const u32 *kept = list_of(c, list);
    u32 count = ((const u32 *)c.counts)[list], piece = slice * SIDE + threadIdx.x % SIDE;
    bool is_there = piece < rows.bytes / sizeof(T);
    for (u32 first = 0; first < count; first += EACH) {
        T held[PIECES];
        bool moves[PIECES];
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            u32 to = first + i * (COMPACT_THREADS / SIDE) + threadIdx.x / SIDE;
            u32 from = is_there && to < count ? kept[to] : to;
            moves[i] = from != to;
            if (moves[i]) held[i] = ((const T *)row_at(c, rows, from, head))[piece];
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            u32 to = first + i * (COMPACT_THREADS / SIDE) + threadIdx.x / SIDE;
            if (moves[i]) ((T *)row_at(c, rows, to, head))[piece] = held[i];
        }
    }
}

DEVICE u32 row_bytes(const call &c, u32 dim) {
    if (c.dtype == F32) return dim * 4;
    if (c.dtype == F16 || c.dtype == BF16) return dim * 2;
    return c.dtype == I4 ? dim / 2 : dim;
}

/* Compacts keys and values. Grid: slices of 64 bytes, heads, arrays. */
template <class T> DEVICE void compact_rows(const call &c) {
    array rows = {c.keys, c.key_stride, c.key_head_stride, row_bytes(c, c.key_dim)};
    if (blockIdx.z == 1)
        rows = {c.values, c.value_stride, c.value_head_stride, row_bytes(c, c.value_dim)};
    if (blockIdx.x * 64 >= rows.bytes) return;
    compact<T, 64 / sizeof(T)>(c, rows, blockIdx.x, blockIdx.y, c.count == 1 ? 0 : blockIdx.y);
}

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS, 4)
    heavy_compact_16(const __grid_constant__ call c) {
    compact_rows<quad>(c);
}

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS, 4)
    heavy_compact_4(const __grid_constant__ call c) {
    compact_rows<u32>(c);
}

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS, 4)
    heavy_compact_1(const __grid_constant__ call c) {
    compact_rows<u8>(c);
}

/* Compacts the scores like the rows. Grid: lists. */
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS, 4)
    heavy_compact_scores(const __grid_constant__ call c) {
    const u32 *kept = list_of(c, blockIdx.x);
    float *scores = scores_of(c, blockIdx.x);
    u32 count = ((const u32 *)c.counts)[blockIdx.x];
    for (u32 first = 0; first < count; first += COMPACT_THREADS) {
        u32 to = first + threadIdx.x;
        float score = to < count ? scores[kept[to]] : 0.0f;
        __syncthreads();
        if (to < count) scores[to] = score;
    }
}
