/* Attention of few queries over latent rows that many heads share: `Kind::Decode`. Tensor cores
 * multiply tiles of rows and keys, where a row is a head of a query. `decode_join` of
 * attend_decode.cu combines the parts.
 *
 * A weight is stored as two 16-bit numbers. Compared with f32 it loses only the last bits of
 * BF16; tensor cores also truncate sums.
 *
 * A thread block takes 157 KB of shared memory: queries 73728 bytes, keys twice 36864, weights
 * 8192, exchange between warps 1280, tiles 3584. The small variant takes 80 KB. */
#include "attend_cut.h"
#include "attend_latent.h"

/* Work of a thread block: rows of a group of heads, and the places of a part of the keys. */
struct work {
    u32 part, group, key_head, first_row, rows, first, count;
};

/* The position of the key at a place; NOWHERE if there is no key. */
DEVICE u32 position_of(const call &c, const work &work, u32 place) {
    u32 end = least(c.tokens, c.first + c.query_count);
    if (c.count == 0) return place < end ? place : NOWHERE;
    u32 list = c.count == 1 ? 0 : work.group, block = place / c.recent;
    if (block >= ((const u32 *)c.counts)[list]) return NOWHERE;
    u64 at = (u64)((const u32 *)c.index)[(u64)list * c.keep + block] * c.recent + place % c.recent;
    return at < end ? (u32)at : NOWHERE;
}

/* Finds the keys of a tile of the part. A missing key has address 0. */
DEVICE void find_tile(const call &c, const work &work, u32 first, tile &tile) {
    if (threadIdx.x >= KEYS) return;
    u32 i = first + threadIdx.x;
    u32 at = i < work.count ? position_of(c, work, work.first + i) : NOWHERE;
    tile.at[threadIdx.x] = at;
    tile.keys[threadIdx.x] = at == NOWHERE ? 0 : key_at(c, at, work.key_head);
}

/* Begins to copy half a tile if `valid`; missing keys become zeros. */
template <u32 ROWS> DEVICE void copy_half(const call &c, bool valid, u8 *to, const u64 *rows) {
    constexpr u32 CHUNKS = DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; valid && i < HALF * CHUNKS; i += THREADS_OF<ROWS>) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS;
        u64 from = rows[row] == 0 ? c.queries : rows[row] + chunk * 16;
        copy16_or_zero(to + place<DIM>(row, chunk), (const void *)from, rows[row] != 0);
    }
    copy_group();
}

/* The query and head of a row. */
DEVICE u32 query_of(const cut &cut, const work &work, u32 row) {
    return (work.first_row + row) / cut.group;
}
DEVICE u32 head_of(const cut &cut, const work &work, u32 row) {
    return work.group * cut.group + (work.first_row + row) % cut.group;
}

/* Begins to copy the queries of the rows. Rows past the last one repeat it. */
template <u32 ROWS>
DEVICE void copy_rows_of_heads(const call &c, const cut &cut, const work &work, u8 *to) {
    constexpr u32 CHUNKS = DIM / 8;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS_OF<ROWS>) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS, own = least(row, work.rows - 1);
        u64 from = query_at(c, query_of(cut, work, own), head_of(cut, work, own));
        copy16(to + place<DIM>(row, chunk), (const void *)(from + chunk * 16));
    }
}

/* Masks keys behind a row's query, and places without a key. */
DEVICE void mask(float (&s)[2][4], const u32 (&positions)[2], const tile &tile, u32 first) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 key = first + product_key() + i / 4 * 8 + lane() % 4 * 2 + i % 2;
        u32 at = tile.at[key];
        if (at == NOWHERE || at > positions[i % 4 / 2]) s[i / 4][i % 4] = minus_infinity();
    }
}

/* Writes the result of the part: weighted values, and the maximum and sum of weights per row. */
template <u32 ROWS>
DEVICE void write_part(const call &c, const cut &cut, const work &work, const smem<ROWS, 2> &smem,
                       const float (&out)[2][16][4], progress &rows, float scale) {
    results to = results_of(c, cut);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float sum = warp_sum<4>(rows.sum[half]);
        u32 row = product_row() + half * 8 + lane() / 4;
        if (lane() % 4 == 0) smem.sums[warp() % 2 * ROWS + row] = sum;
        if (lane() % 4 == 0 && warp() % 2 == 0) smem.mosts[row] = rows.most[half];
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 set = i / 2, half = i % 2, row = result_row() + set * 16 + half * 8 + lane() / 4;
        if (row >= work.rows) continue;
        u64 at = (u64)query_of(cut, work, row) * c.query_heads + head_of(cut, work, row);
        at = at * cut.parts + work.part;
        u64 place = (u64)(to.out + at * c.value_dim + result_step() * 16 + lane() % 4 * 2);
#pragma unroll
        for (u32 n = 0; n < 16; n++)
            write_two(place + 32 * n, F32, out[set][n][2 * half], out[set][n][2 * half + 1]);
        if (warp() % 4 != 0 || lane() % 4 != 0) continue;
        float most = smem.mosts[row];
        to.logs[at * 2] = most == minus_infinity() ? most : most * scale;
        to.logs[at * 2 + 1] = smem.sums[row] + smem.sums[ROWS + row];
    }
}

/* Attention of some rows over a part of the keys. Grid: parts, groups of heads, rows. */
template <bool BF, u32 ROWS> DEVICE void decode(const call &c) {
    constexpr u32 PLACES = PLACES_OF<ROWS>;
    cut cut = cut_of(c);
    work work;
    work.part = blockIdx.x;
    work.group = blockIdx.y;
    work.key_head = work.group * cut.group / (c.query_heads / c.key_heads);
    work.first_row = blockIdx.z * ROWS;
    work.rows = least(ROWS, cut.rows - work.first_row);
    work.first = work.part * cut.part;
    work.count = least(cut.part, cut.keys - least(work.first, cut.keys));
    // No query sees keys behind the last query.
    u32 end = least(c.tokens, c.first + c.query_count);
    if (c.count == 0) work.count = least(work.count, end - least(work.first, end));
    smem<ROWS, 2> smem = carve_smem<ROWS, 2>();
    float out[2][16][4] = {}, scale = binary_scale(c);
    progress rows = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
    u32 row = product_row() + lane() / 4, turns = ceil_div(work.count, HALF);
    const u32 positions[2] = {c.first + query_of(cut, work, row),
                              c.first + query_of(cut, work, row + 8)};
    copy_rows_of_heads<ROWS>(c, cut, work, smem.queries);
    find_tile(c, work, 0, smem.tiles[0]);
    __syncthreads();
    copy_half<ROWS>(c, turns > 0, smem.keys, smem.tiles[0].keys);
    for (u32 turn = 0; turn < turns; turn++) {
        // The first half of each tile, then the second.
        const tile &tile = smem.tiles[turn / 2 % 2];
        bool is_second = turn % 2 == 1, is_any = turn + 1 < turns;
        ::tile &next = smem.tiles[(turn / 2 + 1) % 2];
        copy_wait<0>();
        __syncthreads();
        if (!is_second) find_tile(c, work, (turn / 2 + 1) * KEYS, next);
        const u64 *coming = is_second ? next.keys : tile.keys + HALF;
        u8 *keys = smem.keys + turn % PLACES * HALF_BYTES;
        u8 *others = smem.keys + (turn + 1) % PLACES * HALF_BYTES;
        if (PLACES == 2) copy_half<ROWS>(c, is_any, others, coming);
        float s[2][4];
        multiply<BF>(s, smem.queries, keys);
        mask(s, positions, tile, is_second ? HALF : 0);
        softmax_tile<BF>(s, rows, smem, scale);
        add_values<BF>(out, smem, keys);
        if (PLACES == 1) {
            __syncthreads();
            copy_half<ROWS>(c, is_any, others, coming);
        }
    }
    // All warps have read the exchanged weights.
    copy_wait<0>();
    __syncthreads();
    write_part<ROWS>(c, cut, work, smem, out, rows, scale);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    latent_decode_f16(const __grid_constant__ call c) {
    decode<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    latent_decode_bf16(const __grid_constant__ call c) {
    decode<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(128, 1)
    latent_decode_small_f16(const __grid_constant__ call c) {
    decode<false, 32>(c);
}

extern "C" __global__ void __launch_bounds__(128, 1)
    latent_decode_small_bf16(const __grid_constant__ call c) {
    decode<true, 32>(c);
}
