/* Attention over latent rows (MLA) on tensor cores. A key has 576 numbers; its first 512 are the
 * value.
 *
 * Results of 64 queries do not fit in the registers of four warps. Therefore eight warps hold
 * the results of 32 queries and 128 numbers each. Each warp computes the products of 16 queries
 * and 16 keys, so none is computed twice, and warps exchange the weights through shared memory.
 * Keys are loaded 32 at a time, and the next ones load meanwhile. One thread block fits on a
 * multiprocessor, so a thread may use 255 registers; 128 of them hold results.
 *
 * Devices of compute capability 8.6, 8.9 and 12.0 have 99 KB of shared memory. There a block of
 * four warps has 32 queries and a single key buffer. The next keys load after these were used. */
#pragma once

#include "attend_walk.h"

constexpr u32 DIM = 576, HALF = 32, HALF_BYTES = HALF * DIM * 2;
/* Threads of a block of ROWS queries, and its key buffers. */
template <u32 ROWS> constexpr u32 THREADS_OF = ROWS * 4;
template <u32 ROWS> constexpr u32 PLACES_OF = ROWS / 32;

template <u32 ROWS> constexpr u32 WEIGHT_BYTES = ROWS * HALF * 2;

/* Layout of shared memory. A weight is stored as the sum of PARTS 16-bit numbers: the second one is
 * the rounding error of the first. */
template <u32 ROWS, u32 PARTS = 1> struct smem {
    u8 *queries, *keys, *weights;
    float *mosts, *shrinks, *sums;
    tile *tiles;
    queue *line;
};

template <u32 ROWS, u32 PARTS = 1> DEVICE smem<ROWS, PARTS> carve_smem() {
    u8 *at = dynamic_shared();
    smem<ROWS, PARTS> smem;
    smem.queries = at;
    smem.keys = at + ROWS * DIM * 2;
    smem.weights = smem.keys + PLACES_OF<ROWS> * HALF_BYTES;
    smem.mosts = (float *)(smem.weights + PARTS * WEIGHT_BYTES<ROWS>);
    smem.shrinks = smem.mosts + 2 * ROWS;
    smem.sums = smem.shrinks + ROWS;
    smem.tiles = (tile *)(smem.sums + 2 * ROWS);
    smem.line = (queue *)(smem.tiles + 2);
    return smem;
}

/* Byte offset of 8 weights of a row. Eight rows have no bank conflict. */
DEVICE u32 weight_place(u32 row, u32 chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

/* A warp's first query and first key of the products: it has 16 of each. */
DEVICE u32 product_row() { return warp() / 2 * 16; }
DEVICE u32 product_key() { return warp() % 2 * 16; }

template <bool BF> DEVICE void multiply(float (&s)[2][4], const u8 *queries, const u8 *keys) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i / 4][i % 4] = 0.0f;
#pragma unroll 4
    for (u32 k = 0; k < DIM / 16; k++) {
        u32 a[4], b[4];
        load_rows<DIM>(a, queries, product_row(), k);
        load_keys<DIM>(b, keys, product_key(), k);
        mma<BF>(s[0], a, b[0], b[1]);
        mma<BF>(s[1], a, b[2], b[3]);
    }
}

/* Maximum and sum of rows so far, in both warps that compute products of them. */
struct progress {
    float most[2], sum[2];
};

/* The rounding errors of two numbers that were stored in 16 bits each. */
template <bool BF> DEVICE u32 two_errors(u32 both, float x, float y) {
    u16 low = (u16)both, high = (u16)(both >> 16);
    return BF ? two_bf16(x - from_bf16(low), y - from_bf16(high))
              : two_f16(x - from_f16(low), y - from_f16(high));
}

/* Online softmax step: converts products to weights, and shares them with all warps. */
template <bool BF, u32 ROWS, u32 PARTS>
DEVICE void softmax_tile(float (&s)[2][4], progress &rows, const smem<ROWS, PARTS> &smem,
                         float scale) {
    u32 row = product_row() + lane() / 4;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float now = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]),
                          fmaxf(s[1][2 * half], s[1][2 * half + 1]));
        now = fmaxf(now, across(now, 1));
        now = fmaxf(now, across(now, 2));
        if (lane() % 4 == 0) smem.mosts[warp() % 2 * ROWS + row + half * 8] = now;
    }
    __syncthreads();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 own = row + half * 8;
        float now = fmaxf(smem.mosts[own], smem.mosts[ROWS + own]), before = rows.most[half];
        now = fmaxf(now, before);
        float base = now == minus_infinity() ? 0.0f : now * scale;
        float shrink = exp2_near(before * scale - base), sum = 0.0f;
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            float x = exp2_near(s[n][2 * half] * scale - base);
            float y = exp2_near(s[n][2 * half + 1] * scale - base);
            sum += x + y;
            u32 to = weight_place(own, product_key() / 8 + n) + lane() % 4 * 4;
            u32 both = two<BF>(x, y);
            *(u32 *)(smem.weights + to) = both;
            if (PARTS == 2)
                *(u32 *)(smem.weights + WEIGHT_BYTES<ROWS> + to) = two_errors<BF>(both, x, y);
        }
        rows.most[half] = now;
        rows.sum[half] = rows.sum[half] * shrink + sum;
        if (warp() % 2 == 0 && lane() % 4 == 0) smem.shrinks[own] = shrink;
    }
    __syncthreads();
}

/* A warp's first query and first 16-number step of the results: it has 32 queries, 128 numbers. */
DEVICE u32 result_row() { return warp() / 4 * 32; }
DEVICE u32 result_step() { return warp() % 4 * 8; }

template <bool BF, u32 ROWS, u32 PARTS>
DEVICE void add_values(float (&out)[2][16][4], const smem<ROWS, PARTS> &smem, const u8 *values) {
#pragma unroll
    for (u32 set = 0; set < 2; set++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float shrink = smem.shrinks[result_row() + set * 16 + half * 8 + lane() / 4];
#pragma unroll
            for (u32 n = 0; n < 16; n++) {
                out[set][n][2 * half] *= shrink;
                out[set][n][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
    for (u32 k = 0; k < HALF / 16; k++) {
        u32 a[PARTS][2][4];
#pragma unroll
        for (u32 i = 0; i < 2 * PARTS; i++)
            load_matrix4(a[i / 2][i % 2],
                         smem.weights + i / 2 * WEIGHT_BYTES<ROWS> +
                             weight_place(result_row() + i % 2 * 16 + lane() % 16,
                                          2 * k + lane() / 16));
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            u32 b[4];
            load_values<DIM>(b, values, 16 * k, result_step() + n);
#pragma unroll
            for (u32 i = 0; i < 2 * PARTS; i++) {
                mma<BF>(out[i % 2][2 * n], a[i / 2][i % 2], b[0], b[1]);
                mma<BF>(out[i % 2][2 * n + 1], a[i / 2][i % 2], b[2], b[3]);
            }
        }
    }
}
