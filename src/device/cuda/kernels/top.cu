/* `Kind::Top`: the largest scores of each row, as src/sparse/ranks.rs chooses them. Among equal
 * scores the first ones are chosen. A thread block finds the smallest chosen score by radix select:
 * a histogram of each digit, from the highest, gives that digit. Then it writes the positions of
 * all chosen scores in ascending order. The result does not depend on the order of threads. */
#include "device.h"

enum { BY_KEY_HEAD = 1, BY_ALL = 2, BY_MEAN = 4, OF_ALL_QUERIES = 8 };

constexpr u32 PICKERS = 1024, DIGITS = 2048, COPIES = 4, NONE = 0xFFFFFFFFu;
/* Consecutive scores that a thread reads when lists are written. */
constexpr u32 EACH = 4;

/* ---- Rows that share a list ---- */

/* Number of lists of one query. */
DEVICE u32 lists_of_query(const call &c) {
    return c.flags & BY_ALL ? 1 : c.flags & BY_KEY_HEAD ? c.key_heads : c.query_heads;
}
DEVICE bool is_joined(const call &c) { return c.flags & (BY_KEY_HEAD | BY_ALL | OF_ALL_QUERIES); }
/* Number of lists of the call. */
DEVICE u64 lists(const call &c) {
    return (c.flags & OF_ALL_QUERIES ? 1 : (u64)c.query_count) * lists_of_query(c);
}

/* The larger number; NaN is less than any number. */
DEVICE float higher(float a, float b) { return b > a || a != a ? b : a; }

/* The score of a list for one query: the maximum or mean over the heads that share the list. */
DEVICE float joined(const call &c, u64 query, u32 list, u32 column) {
    u32 heads = c.query_heads / lists_of_query(c);
    const float *from = (const float *)c.numbers +
                        (query * c.query_heads + (u64)list * heads) * c.count + column;
    float x = *from;
    for (u32 h = 1; h < heads; h++) {
        float next = from[(u64)h * c.count];
        x = c.flags & BY_MEAN ? add_rounded(x, next) : higher(x, next);
    }
    return c.flags & BY_MEAN ? __fdiv_rn(x, (float)heads) : x;
}

extern "C" __global__ void __launch_bounds__(256) top_join(const __grid_constant__ call c) {
    u64 all = lists(c) * c.count, each = (u64)gridDim.x * blockDim.x;
    u32 own = lists_of_query(c);
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += each) {
        u32 column = (u32)(i % c.count), list = (u32)(i / c.count % own);
        u64 query = i / c.count / own;
        float x = joined(c, query, list, column);
        if (c.flags & OF_ALL_QUERIES)
            for (u32 q = 1; q < c.query_count; q++) x = higher(x, joined(c, q, list, column));
        ((float *)c.scratch)[i] = x;
    }
}

/* ---- One row ---- */

/* Maps a score to an unsigned integer of the same order. Columns that are always chosen map to the
 * maximum, NaN maps to 0. */
DEVICE u32 order_of(const call &c, const float *row, u32 i) {
    if (i < c.sinks || c.count - i <= c.recent) return NONE;
    float x = add_rounded(row[i], 0.0f);
    u32 bits = to_bits(x);
    return x == x ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0;
}

/* A digit, and how many of the scores with that digit are chosen. */
struct digit_rank {
    u32 digit, left;
};

/* Exclusive prefix sum of `x` over the threads. A barrier must separate two calls. */
DEVICE u32 sum_before(u32 x, u32 *sums) {
    u32 up_to = warp_up_to(x);
    if (lane() == WARP - 1) sums[warp()] = up_to;
    __syncthreads();
    u32 before = up_to - x;
    for (u32 i = 0; i < warp(); i++) before += sums[i];
    return before;
}

/* The digit of the smallest chosen score, where `left` of the counted scores are chosen; and how
 * many of the scores with that digit are chosen. */
DEVICE digit_rank digit_of(const u32 *counts, u32 left, u32 *sums, digit_rank *shared) {
    // From the largest digit down, two digits per thread.
    u32 high = DIGITS - 1 - 2 * threadIdx.x, own[2] = {};
    for (u32 copy = 0; copy < COPIES; copy++) {
        own[0] += counts[copy * DIGITS + high];
        own[1] += counts[copy * DIGITS + high - 1];
    }
    u32 before = sum_before(own[0] + own[1], sums);
    if (before < left && left <= before + own[0]) *shared = {high, left - before};
    before += own[0];
    if (before < left && left <= before + own[1]) *shared = {high - 1, left - before};
    __syncthreads();
    return *shared;
}

/* Writes the positions of scores above `last`, and of the first `left` equal ones, in ascending
 * order. */
DEVICE void write_list(const call &c, const float *row, u32 last, u32 left, u32 *sums, u32 *to) {
    u32 above = 0, equal = 0;
    for (u64 first = 0; first < c.count; first += PICKERS * EACH) {
        u64 from = first + threadIdx.x * EACH;
        u32 order[EACH], own = 0;
        for (u32 i = 0; i < EACH; i++) {
            order[i] = from + i < c.count ? order_of(c, row, (u32)(from + i)) : 0;
            bool is_there = from + i < c.count;
            own += is_there && order[i] > last ? 1 : is_there && order[i] == last ? 1 << 16 : 0;
        }
        // Each of the two counts of a round fits into half a word.
        u32 before = sum_before(own, sums);
        u32 at_above = above + (before & 0xFFFF), at_equal = equal + (before >> 16);
        for (u32 i = 0; i < EACH && from + i < c.count; i++) {
            bool is_above = order[i] > last, is_equal = order[i] == last;
            if (is_above || (is_equal && at_equal < left))
                to[at_above + least(at_equal, left)] = (u32)(from + i);
            at_above += is_above;
            at_equal += is_equal;
        }
        if (threadIdx.x == PICKERS - 1) sums[PICKERS / WARP] = before + own;
        __syncthreads();
        above += sums[PICKERS / WARP] & 0xFFFF;
        equal += sums[PICKERS / WARP] >> 16;
    }
}

/* The mapped value of the smallest chosen score, and how many equal scores are chosen. */
DEVICE digit_rank last_of(const call &c, const float *row, u32 *counts, u32 *sums,
                          digit_rank *shared) {
    u32 last = 0, left = c.keep, done = 0;
    for (u32 bits = 11; done < 32; done += bits) {
        bits = least(11u, 32 - done);
        u32 shift = 32 - done - bits;
        for (u32 i = threadIdx.x; i < COPIES * DIGITS; i += PICKERS) counts[i] = 0;
        __syncthreads();
        u32 *own = counts + warp() % COPIES * DIGITS;
#pragma unroll 4
        for (u64 i = threadIdx.x; i < c.count; i += PICKERS) {
            u32 order = order_of(c, row, (u32)i);
            bool has_prefix = done == 0 || order >> (32 - done) == last;
            if (has_prefix) atomicAdd(own + (order >> shift) % (1u << bits), 1u);
        }
        __syncthreads();
        digit_rank next = digit_of(counts, left, sums, shared);
        last = last << bits | next.digit;
        left = next.left;
    }
    return {last, left};
}

extern "C" __global__ void __launch_bounds__(PICKERS) top_pick(const __grid_constant__ call c) {
    __shared__ u32 counts[COPIES * DIGITS];
    __shared__ u32 sums[PICKERS / WARP + 1];
    __shared__ digit_rank shared;
    const float *rows = (const float *)(is_joined(c) ? c.scratch : c.numbers);
    for (u64 list = blockIdx.x; list < lists(c); list += gridDim.x) {
        const float *row = rows + list * c.count;
        u32 *to = (u32 *)(c.index + (i64)list * c.out_stride);
        u32 chosen = least(c.keep, c.count);
        digit_rank last = {0, NONE};
        if (c.keep < c.count) last = last_of(c, row, counts, sums, &shared);
        write_list(c, row, last.digit, last.left, sums, to);
        for (u64 i = (u64)chosen + threadIdx.x; i < c.keep; i += PICKERS) to[i] = NONE;
        if (threadIdx.x == 0 && c.counts != 0) ((u32 *)c.counts)[list] = chosen;
        __syncthreads();
    }
}
