/* Attention of a prompt over latent rows (MLA): `Kind::Prefill`, as attend_prefill.cu. A key has
 * 576 numbers; its first 512 are the value.
 *
 * A thread block takes 161 KB of shared memory: queries 73728 bytes, keys twice 36864, weights
 * 4096, exchange between warps 1280, tiles 3584, and with lists the queue 4552. The small
 * variant takes 83 KB. */
#include "attend_latent.h"

/* Masks keys behind a query, and keys outside its columns and diagonals. */
DEVICE void mask(float (&s)[2][4], const walk &walk, const tile &tile, u32 first) {
    u32 row = product_row() + lane() / 4;
    bool has_lines = walk.kind == LINES;
    if (!has_lines && tile.at[first + HALF - 1] <= walk.position) return;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 key = first + product_key() + i / 4 * 8 + lane() % 4 * 2 + i % 2;
        u32 own = row + i % 4 / 2 * 8;
        bool is_seen = tile.at[key] <= walk.position + own;
        if (has_lines) is_seen = is_seen && (tile.seen[own / 32][key] >> own % 32 & 1);
        if (!is_seen) s[i / 4][i % 4] = minus_infinity();
    }
}

template <u32 ROWS>
DEVICE void write_rows(const call &c, const float (&out)[2][16][4], progress &rows,
                       const smem<ROWS> &smem, const walk &walk, u32 head, float scale) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float sum = warp_sum<4>(rows.sum[half]);
        u32 row = product_row() + half * 8 + lane() / 4;
        if (lane() % 4 == 0) smem.sums[warp() % 2 * ROWS + row] = sum;
        if (lane() % 4 == 0 && warp() % 2 == 0) smem.mosts[row] = rows.most[half];
    }
    __syncthreads();
    u32 kind = c.flags & OUT_F32 ? (u32)F32 : c.other_dtype, bytes = kind == F32 ? 4 : 2;
#pragma unroll
    for (u32 set = 0; set < 2; set++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = result_row() + set * 16 + half * 8 + lane() / 4, query = walk.query + row;
            if (query >= walk.until) continue;
            float sum = smem.sums[row] + smem.sums[ROWS + row];
            float share = sum > 0.0f ? 1.0f / sum : 0.0f;
            u64 to = out_at(c, query, head) + (result_step() * 16 + lane() % 4 * 2) * bytes;
#pragma unroll
            for (u32 n = 0; n < 16; n++)
                write_two(to + 8 * n * bytes, kind, out[set][n][2 * half] * share,
                          out[set][n][2 * half + 1] * share);
            if (c.more != 0 && warp() % 4 == 0 && lane() % 4 == 0)
                ((float *)c.more)[(u64)query * c.query_heads + head] =
                    log_of(smem.mosts[row], sum, scale);
        }
}

/* Begins to copy half a tile if `valid`. */
template <u32 ROWS> DEVICE void copy_half(bool valid, u8 *to, const u64 *rows) {
    if (valid) copy_rows<DIM, HALF, THREADS_OF<ROWS>>(to, rows);
    copy_group();
}

/* Attention of a block of queries of a head. */
template <bool BF, bool LISTED, u32 ROWS> DEVICE void attend(const call &c, walk &walk, u32 head) {
    constexpr u32 PLACES = PLACES_OF<ROWS>;
    smem<ROWS> smem = carve_smem<ROWS>();
    float out[2][16][4] = {}, scale = binary_scale(c);
    progress rows = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
    copy_queries<DIM, ROWS, THREADS_OF<ROWS>>(c, smem.queries, walk.query, head, walk.until);
    bool is_more = next_tile<LISTED>(c, walk, smem.line, smem.tiles[0]), is_any = is_more;
    __syncthreads();
    copy_half<ROWS>(is_any, smem.keys, smem.tiles[0].keys);
    for (u32 turn = 0; is_any; turn++) {
        // The first half of each tile, then the second.
        const tile &tile = smem.tiles[turn / 2 % 2];
        bool is_second = turn % 2 == 1;
        ::tile &next = smem.tiles[(turn / 2 + 1) % 2];
        copy_wait<0>();
        __syncthreads();
        if (!is_second) is_more = next_tile<LISTED>(c, walk, smem.line, next);
        const u64 *coming = is_second ? next.keys : tile.keys + HALF;
        u8 *keys = smem.keys + turn % PLACES * HALF_BYTES;
        u8 *others = smem.keys + (turn + 1) % PLACES * HALF_BYTES;
        is_any = !is_second || is_more;
        if (PLACES == 2) copy_half<ROWS>(is_any, others, coming);
        float s[2][4];
        multiply<BF>(s, smem.queries, keys);
        mask(s, walk, tile, is_second ? HALF : 0);
        softmax_tile<BF>(s, rows, smem, scale);
        add_values<BF>(out, smem, keys);
        if (PLACES == 1) {
            __syncthreads();
            copy_half<ROWS>(is_any, others, coming);
        }
    }
    // All warps have read the exchanged weights.
    copy_wait<0>();
    __syncthreads();
    write_rows(c, out, rows, smem, walk, head, scale);
}

template <bool BF, u32 ROWS> DEVICE void attend_dense(const call &c) {
    // The last blocks have the most keys, so they run first.
    u32 query = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y;
    walk walk;
    begin_walk(c, walk, query, least(query + ROWS, c.query_count),
               head / (c.query_heads / c.key_heads));
    attend<BF, false, ROWS>(c, walk, head);
}

template <bool BF, u32 ROWS> DEVICE void attend_listed(const call &c) {
    u32 head = blockIdx.y;
    head_lists lists = ((const head_lists *)c.numbers)[entry_of(c, head)];
    u32 blocks = blocks_of(c, lists, ROWS).all;
    queue &line = *carve_smem<ROWS>().line;
    for (u32 block = blockIdx.x; block < blocks; block += gridDim.x) {
        walk walk;
        if (!begin_listed(c, walk, line, head, block, ROWS)) continue;
        attend<BF, true, ROWS>(c, walk, head);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    latent_f16(const __grid_constant__ call c) {
    attend_dense<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    latent_listed_f16(const __grid_constant__ call c) {
    attend_listed<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    latent_bf16(const __grid_constant__ call c) {
    attend_dense<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    latent_listed_bf16(const __grid_constant__ call c) {
    attend_listed<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(128, 1)
    latent_small_f16(const __grid_constant__ call c) {
    attend_dense<false, 32>(c);
}

extern "C" __global__ void __launch_bounds__(128, 1)
    latent_small_listed_f16(const __grid_constant__ call c) {
    attend_listed<false, 32>(c);
}

extern "C" __global__ void __launch_bounds__(128, 1)
    latent_small_bf16(const __grid_constant__ call c) {
    attend_dense<true, 32>(c);
}

extern "C" __global__ void __launch_bounds__(128, 1)
    latent_small_listed_bf16(const __grid_constant__ call c) {
    attend_listed<true, 32>(c);
}
