/* Attention of a prompt or of a part of one: `Kind::Prefill`. call.h defines its fields.
 *
 * A thread block processes some queries of a head tile by tile, as FlashAttention-2 does. Values
 * load while keys are multiplied, and the next keys load while values are. The tiles, and so the
 * bits of a result, depend only on the keys that the block of queries sees.
 *
 * Shared memory of a thread block, in bytes for 64 and 128 numbers:
 *   dense: 128 queries (16384, 32768), keys and values of a tile (16384, 32768), tiles (3584).
 *     Each warp has 32 queries, so one read of a tile serves two products. Two blocks fit on a
 *     multiprocessor: a thread has at most 255 registers, 128 for results and 64 for products.
 *   listed: 64 queries (8192, 16384), a tile (16384, 32768), tiles (3584), the queue (4552).
 *     Lists cover 64 queries; a larger block would compute keys of other lists. A thread has at
 *     most 168 registers, so that three blocks fit.
 */
#include "attend_walk.h"

/* Masks keys behind a query. */
template <u32 SETS>
DEVICE void mask_causal(float (&s)[SETS][KEYS / 8][4], const tile &tile, u32 position) {
    u32 row = position + warp() * 16 + lane() / 4;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
        pair at = *(const pair *)&tile.at[8 * n + lane() % 4 * 2];
#pragma unroll
        for (u32 set = 0; set < SETS; set++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if ((i % 2 == 0 ? at.x : at.y) > row + set * 64 + i / 2 * 8)
                    s[set][n][i] = minus_infinity();
    }
}

/* Masks keys outside a query's columns and diagonals. */
DEVICE void mask_lines(float (&s)[1][KEYS / 8][4], const tile &tile) {
    u32 bit = warp() % 2 * 16 + lane() / 4;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
        pair seen = *(const pair *)&tile.seen[warp() / 2][8 * n + lane() % 4 * 2];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (((i % 2 == 0 ? seen.x : seen.y) >> (bit + i / 2 * 8) & 1) == 0)
                s[0][n][i] = minus_infinity();
    }
}

template <u32 SETS, u32 DIM>
DEVICE void write_rows(const call &c, softmax_rows<SETS, DIM> &rows, const walk &walk, u32 head,
                       float scale) {
    end_rows(rows);
    u32 kind = c.flags & OUT_F32 ? (u32)F32 : c.other_dtype;
#pragma unroll
    for (u32 set = 0; set < SETS; set++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 query = walk.query + set * 64 + warp() * 16 + half * 8 + lane() / 4;
            if (query >= walk.until) continue;
            float sum = rows.sum[set][half], share = sum > 0.0f ? 1.0f / sum : 0.0f;
            u64 to = out_at(c, query, head);
            u32 bytes = kind == F32 ? 4 : 2;
#pragma unroll
            for (u32 n = 0; n < DIM / 8; n++)
                write_two(to + (8 * n + lane() % 4 * 2) * bytes, kind,
                          rows.out[set][n][2 * half] * share,
                          rows.out[set][n][2 * half + 1] * share);
            if (c.more != 0 && lane() % 4 == 0)
                ((float *)c.more)[(u64)query * c.query_heads + head] =
                    log_of(rows.most[set][half], sum, scale);
        }
}

/* Layout of shared memory. */
struct smem {
    u8 *keys, *values, *queries;
    tile *tiles;
    queue *line;
};

template <u32 DIM, u32 SETS> DEVICE smem carve_smem() {
    u8 *at = dynamic_shared();
    smem smem;
    smem.keys = at;
    smem.values = at + KEYS * DIM * 2;
    smem.tiles = (tile *)(at + 2 * KEYS * DIM * 2);
    smem.queries = (u8 *)(smem.tiles + 2);
    smem.line = (queue *)(smem.queries + SETS * 64 * DIM * 2);
    return smem;
}

/* Attention of a block of queries of a head. */
template <bool BF, u32 DIM, u32 SETS, bool LISTED>
DEVICE void attend(const call &c, walk &walk, u32 head) {
    smem smem = carve_smem<DIM, SETS>();
    softmax_rows<SETS, DIM> rows;
    float scale = binary_scale(c);
    begin_rows(rows);
    copy_queries<DIM, SETS * 64>(c, smem.queries, walk.query, head, walk.until);
    bool is_more = next_tile<LISTED>(c, walk, smem.line, smem.tiles[0]);
    __syncthreads();
    if (is_more) copy_rows<DIM, KEYS>(smem.keys, smem.tiles[0].keys);
    copy_group();
    for (u32 turn = 0; is_more; turn ^= 1) {
        const tile &tile = smem.tiles[turn];
        copy_wait<0>();
        __syncthreads();
        copy_rows<DIM, KEYS>(smem.values, tile.values);
        copy_group();
        is_more = next_tile<LISTED>(c, walk, smem.line, smem.tiles[turn ^ 1]);
        float s[SETS][KEYS / 8][4];
        multiply<BF, DIM, SETS>(s, smem.queries, smem.keys);
        if (tile.at[KEYS - 1] > walk.position) mask_causal<SETS>(s, tile, walk.position);
        if constexpr (LISTED)
            if (walk.kind == LINES) mask_lines(s, tile);
        softmax_tile(s, rows, scale);
        copy_wait<0>();
        __syncthreads();
        if (is_more) copy_rows<DIM, KEYS>(smem.keys, smem.tiles[turn ^ 1].keys);
        copy_group();
        add_values<BF>(rows, s, smem.values);
    }
    // Without any key, the copy of the queries is still pending.
    copy_wait<0>();
    write_rows(c, rows, walk, head, scale);
}

template <bool BF, u32 DIM> DEVICE void attend_dense(const call &c) {
    constexpr u32 ROWS = 128;
    // The last blocks have the most keys, so they run first.
    u32 query = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y;
    walk walk;
    begin_walk(c, walk, query, least(query + ROWS, c.query_count),
               head / (c.query_heads / c.key_heads));
    attend<BF, DIM, 2, false>(c, walk, head);
}

template <bool BF, u32 DIM> DEVICE void attend_listed(const call &c) {
    u32 head = blockIdx.y;
    head_lists lists = ((const head_lists *)c.numbers)[entry_of(c, head)];
    u32 blocks = blocks_of(c, lists).all;
    queue &line = *carve_smem<DIM, 1>().line;
    for (u32 block = blockIdx.x; block < blocks; block += gridDim.x) {
        walk walk;
        if (!begin_listed(c, walk, line, head, block)) continue;
        attend<BF, DIM, 1, true>(c, walk, head);
        __syncthreads();
    }
}

/* Converts the columns and diagonals of a head to bit sets. Grid: heads of the index. */
extern "C" __global__ void __launch_bounds__(256) prefill_lines(const __grid_constant__ call c) {
    head_lists head = ((const head_lists *)c.numbers)[blockIdx.x];
    if (head.kind != LINES) return;
    lines bits = lines_of(c, blockIdx.x);
    u32 words = line_words(c), reach = reach_of(c);
    for (u32 i = threadIdx.x; i < 2 * words; i += blockDim.x) bits.columns[i] = 0;
    __syncthreads();
    for (u32 which = 0; which < 2; which++) {
        list list = list_of(c, head.first + which);
        u32 *to = which == 0 ? bits.columns : bits.diagonals, pad = which == 0 ? 0 : PAD;
        for (u32 i = threadIdx.x; i < list.count; i += blockDim.x) {
            u32 at = list.items[i];
            if (at < reach) atomicOr(&to[(at + pad) / 32], 1u << (at + pad) % 32);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        u32 own = bits.diagonals[i], next = i + 1 < words ? bits.diagonals[i + 1] : 0;
        u32 third = i + 2 < words ? bits.diagonals[i + 2] : 0;
        // Bit x is set if one of the next 64 bits is: below the highest bit of this word, all if
        // the next word has a bit, and above the lowest bit of the third word.
        u32 upper = own == 0 ? 0 : ALL_LANES >> __clz(own);
        u32 lower = third == 0 ? 0 : ~(((third & (0u - third)) << 1) - 1);
        bits.near[i] = upper | (next != 0 ? ALL_LANES : 0) | lower;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_f16_64(const __grid_constant__ call c) {
    attend_dense<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prefill_listed_f16_64(const __grid_constant__ call c) {
    attend_listed<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_f16_128(const __grid_constant__ call c) {
    attend_dense<false, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prefill_listed_f16_128(const __grid_constant__ call c) {
    attend_listed<false, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_bf16_64(const __grid_constant__ call c) {
    attend_dense<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prefill_listed_bf16_64(const __grid_constant__ call c) {
    attend_listed<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_bf16_128(const __grid_constant__ call c) {
    attend_dense<true, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prefill_listed_bf16_128(const __grid_constant__ call c) {
    attend_listed<true, 128>(c);
}
