/* Helpers of attention kernels: rows of 16-bit numbers in shared memory, tile products on tensor
 * cores, online softmax over tiles. Four warps process one or more sets of 16 query rows each, and
 * tiles of 64 keys. */
#pragma once

#include "device.h"

/* Threads of a block, and keys of a tile. */
constexpr u32 THREADS = 128;
constexpr u32 KEYS = 64;
/* Position of a missing key: behind every query, so no query sees it. */
constexpr u32 NOWHERE = 0xFFFFFFFFu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE float minus_infinity() { return from_bits(0xFF800000u); }

/* Factor of the products for a softmax to base 2. */
DEVICE float binary_scale(const call &c) {
    return (c.scale > 0.0f ? c.scale : 1.0f / sqrtf((float)c.key_dim)) * LOG2_E;
}

/* Address of the row of a token and head, in a contiguous array or in pages. */
DEVICE u64 row_at(const call &c, u64 base, i64 stride, i64 head_stride, u32 token, u32 head) {
    u32 at = token;
    if (c.table != 0) {
        u32 page = token / c.page_tokens;
        base += ((const u64 *)c.table)[page];
        at = token - page * c.page_tokens;
    }
    return base + (u64)((i64)at * stride) + (u64)((i64)head * head_stride);
}

DEVICE u64 key_at(const call &c, u32 token, u32 head) {
    return row_at(c, c.keys, c.key_stride, c.key_head_stride, token, head);
}

DEVICE u64 value_at(const call &c, u32 token, u32 head) {
    return row_at(c, c.values, c.value_stride, c.value_head_stride, token, head);
}

DEVICE u64 query_at(const call &c, u32 query, u32 head) {
    return c.queries + (u64)((i64)query * c.query_stride + (i64)head * c.query_head_stride);
}

DEVICE u64 out_at(const call &c, u32 query, u32 head) {
    return c.out + (u64)((i64)query * c.out_stride + (i64)head * c.out_head_stride);
}

/* Byte offset of a 16-byte chunk of a row of DIM numbers in shared memory. Row sizes are multiples
 * of 128 bytes, so adjacent rows would hit the same banks. Therefore the row number swizzles the
 * chunks of a row. */
template <u32 DIM> DEVICE u32 place(u32 row, u32 chunk) {
    return row * (DIM * 2) + ((chunk ^ (row & 7)) << 4);
}

/* Begins to copy `COUNT` rows of DIM numbers. Their addresses are in shared memory. Adjacent
 * threads copy adjacent chunks. */
template <u32 DIM, u32 COUNT, u32 OF = THREADS> DEVICE void copy_rows(u8 *to, const u64 *rows) {
    constexpr u32 CHUNKS = DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += OF) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS;
        copy16(to + place<DIM>(row, chunk), (const void *)(rows[row] + chunk * 16));
    }
}

/* Begins to copy rows of a head's queries, from `query` on. Rows past the last query repeat it. */
template <u32 DIM, u32 COUNT, u32 OF = THREADS>
DEVICE void copy_queries(const call &c, u8 *to, u32 query, u32 head, u32 end) {
    constexpr u32 CHUNKS = DIM / 8;
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += OF) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS;
        u64 from = query_at(c, least(query + row, end - 1), head);
        copy16(to + place<DIM>(row, chunk), (const void *)(from + chunk * 16));
    }
}

template <bool BF> DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    if (BF)
        mma_bf16(d, a, b);
    else
        mma_f16(d, a, b);
}

template <bool BF> DEVICE u32 two(float low, float high) {
    return BF ? two_bf16(low, high) : two_f16(low, high);
}

/* Offset of a lane's row in the `step`th tile of 16 rows and 16 numbers; `row` and `chunk` are the
 * lane's. Only four offsets differ, so all of them stay in registers. */
template <u32 DIM> DEVICE u32 step_place(u32 row, u32 chunk, u32 step) {
    return (place<DIM>(row, chunk) ^ (step % 4 << 5)) + step / 4 * 128;
}

/* Loads 16 rows from `row` on, a multiple of 8, not transposed. */
template <u32 DIM> DEVICE void load_rows(u32 (&a)[4], const u8 *from, u32 row, u32 step) {
    from += row * (DIM * 2);
    load_matrix4(a, from + step_place<DIM>(lane() % 16, lane() / 16, step));
}

/* Loads 16 keys from `key` on, for two products of 8 keys. */
template <u32 DIM> DEVICE void load_keys(u32 (&b)[4], const u8 *from, u32 key, u32 step) {
    u32 row = (lane() & 7) + (lane() >> 4 << 3);
    load_matrix4(b, from + key * (DIM * 2) + step_place<DIM>(row, lane() >> 3 & 1, step));
}

/* Loads 16 numbers of the values of 16 keys from `key` on, for two products of 8 numbers. */
template <u32 DIM> DEVICE void load_values(u32 (&b)[4], const u8 *from, u32 key, u32 step) {
    from += key * (DIM * 2);
    load_matrix4_across(b, from + step_place<DIM>(lane() % 16, lane() / 16, step));
}

/* Products of a warp's queries with a tile of keys. */
template <bool BF, u32 DIM, u32 SETS>
DEVICE void multiply(float (&s)[SETS][KEYS / 8][4], const u8 *queries, const u8 *keys) {
#pragma unroll
    for (u32 set = 0; set < SETS; set++)
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) s[set][n][i] = 0.0f;
    // The offsets of four steps differ, then they repeat.
#pragma unroll(DIM > 128 ? 4 : DIM / 16)
    for (u32 k = 0; k < DIM / 16; k++) {
        u32 a[SETS][4];
#pragma unroll
        for (u32 set = 0; set < SETS; set++)
            load_rows<DIM>(a[set], queries, set * 64 + warp() * 16, k);
#pragma unroll
        for (u32 n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            load_keys<DIM>(b, keys, 16 * n, k);
#pragma unroll
            for (u32 set = 0; set < SETS; set++) {
                mma<BF>(s[set][2 * n], a[set], b[0], b[1]);
                mma<BF>(s[set][2 * n + 1], a[set], b[2], b[3]);
            }
        }
    }
}

/* State of the online softmax: result, maximum and sum of each row. Of each 16 rows a lane has rows
 * lane / 4 and lane / 4 + 8, and of these the numbers 8n + 2 (lane % 4) and the next. Until
 * `end_rows`, `sum` covers only the lane's own keys. */
template <u32 SETS, u32 DIM> struct softmax_rows {
    float out[SETS][DIM / 8][4];
    float most[SETS][2], sum[SETS][2];
};

template <u32 SETS, u32 DIM> DEVICE void begin_rows(softmax_rows<SETS, DIM> &rows) {
#pragma unroll
    for (u32 set = 0; set < SETS; set++) {
#pragma unroll
        for (u32 n = 0; n < DIM / 8; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) rows.out[set][n][i] = 0.0f;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            rows.most[set][half] = minus_infinity();
            rows.sum[set][half] = 0.0f;
        }
    }
}

/* Online softmax step: replaces the products of a tile by weights, and rescales previous results
 * if the maximum grew. Masked products are minus infinity and get weight 0. */
template <u32 SETS, u32 DIM, u32 COLUMNS>
DEVICE void softmax_tile(float (&s)[SETS][COLUMNS][4], softmax_rows<SETS, DIM> &rows, float scale) {
#pragma unroll
    for (u32 set = 0; set < SETS; set++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float before = rows.most[set][half], now = before;
#pragma unroll
            for (u32 n = 0; n < COLUMNS; n++)
                now = fmaxf(now, fmaxf(s[set][n][2 * half], s[set][n][2 * half + 1]));
            now = fmaxf(now, across(now, 1));
            now = fmaxf(now, across(now, 2));
            // Rows that have seen no key have no maximum.
            float base = now == minus_infinity() ? 0.0f : now * scale;
            float shrink = exp2_near(before * scale - base), sum = 0.0f;
#pragma unroll
            for (u32 n = 0; n < COLUMNS; n++)
#pragma unroll
                for (u32 i = 2 * half; i < 2 * half + 2; i++) {
                    s[set][n][i] = exp2_near(s[set][n][i] * scale - base);
                    sum += s[set][n][i];
                }
            rows.most[set][half] = now;
            rows.sum[set][half] = rows.sum[set][half] * shrink + sum;
#pragma unroll
            for (u32 n = 0; n < DIM / 8; n++) {
                rows.out[set][n][2 * half] *= shrink;
                rows.out[set][n][2 * half + 1] *= shrink;
            }
        }
    }
}

/* Adds the weighted values of a tile to the results. */
template <bool BF, u32 SETS, u32 DIM>
DEVICE void add_values(softmax_rows<SETS, DIM> &rows, const float (&s)[SETS][KEYS / 8][4],
                       const u8 *values) {
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
        u32 a[SETS][4];
#pragma unroll
        for (u32 set = 0; set < SETS; set++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                a[set][i] = two<BF>(s[set][2 * k + i / 2][i % 2 * 2],
                                    s[set][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (u32 n = 0; n < DIM / 16; n++) {
            u32 b[4];
            load_values<DIM>(b, values, 16 * k, n);
#pragma unroll
            for (u32 set = 0; set < SETS; set++) {
                mma<BF>(rows.out[set][2 * n], a[set], b[0], b[1]);
                mma<BF>(rows.out[set][2 * n + 1], a[set], b[2], b[3]);
            }
        }
    }
}

/* Adds the sums of all lanes of a row. */
template <u32 SETS, u32 DIM> DEVICE void end_rows(softmax_rows<SETS, DIM> &rows) {
#pragma unroll
    for (u32 set = 0; set < SETS; set++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            rows.sum[set][half] = warp_sum<4>(rows.sum[set][half]);
}

/* The log-sum-exp of a row. */
DEVICE float log_of(float most, float sum, float scale) {
    return sum > 0.0f ? (most * scale + log2_near(sum)) * LN_2 : minus_infinity();
}

/* Writes two adjacent numbers. `kind` is a KVT_DTYPE_*. */
DEVICE void write_two(u64 to, u32 kind, float x, float y) {
    if (kind == F32) {
        *(pair *)to = {to_bits(x), to_bits(y)};
    } else {
        *(u32 *)to = kind == BF16 ? two_bf16(x, y) : two_f16(x, y);
    }
}
