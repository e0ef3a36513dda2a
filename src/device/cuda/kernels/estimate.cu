/* Sums the attention weights of the last queries, up to 64, by key and by distance:
 * `Kind::Estimate`. call.h defines its fields.
 *
 * Keys are cut into splits of 1024 on every device. The steps are:
 *   1. the maximum and sum of each row in each split, then over all splits;
 *   2. the products again, and from them the weight of each key, and of each distance per split;
 *   3. the weight of each distance over all splits. A distance is in at most two of them.
 * All sums have a fixed order.
 *
 * Shared memory of a thread block for 64, 128 and 576 numbers: queries 8192, 16384 and 73728
 * bytes; keys, later weights, 18432, 18432 and 73728; other data 4864.
 */
#include "attend.h"

constexpr u32 ROWS = 64, SPLIT = 1024;
/* Pitch of rows of weights: neither rows nor diagonals have bank conflicts. */
constexpr u32 PITCH = 72;
constexpr u32 DISTANCES = SPLIT + ROWS;

struct smem {
    u8 *queries, *keys;
    float *weights, *distances;
    u64 *at;
};

template <u32 DIM> DEVICE smem carve_smem() {
    constexpr u32 TILE = KEYS * DIM * 2, WEIGHTS = ROWS * PITCH * 4;
    u8 *at = dynamic_shared();
    smem smem;
    smem.queries = at;
    smem.keys = at + ROWS * DIM * 2;
    // Weights replace the keys.
    smem.weights = (float *)smem.keys;
    smem.distances = (float *)(smem.keys + (TILE > WEIGHTS ? TILE : WEIGHTS));
    smem.at = (u64 *)(smem.distances + DISTANCES);
    return smem;
}

/* Scratch memory: maximum and sum of each row in each split, log-sum-exp of each row to base 2, and
 * the weight of each distance in each split. The head is the outermost dimension. */
struct results {
    float *rows, *logs, *distances;
    u32 splits;
};

DEVICE results results_of(const call &c) {
    u32 splits = ceil_div(c.tokens, SPLIT);
    float *rows = (float *)c.scratch, *logs = rows + (u64)c.query_heads * splits * ROWS * 2;
    return {rows, logs, logs + (u64)c.query_heads * ROWS, splits};
}

/* Products of all rows with the tile of keys at position `key`. Keys behind a row are masked. */
template <bool BF, u32 DIM>
DEVICE void find_products(const call &c, const smem &smem, u32 key, float (&s)[1][KEYS / 8][4]) {
    __syncthreads();
    if (threadIdx.x < KEYS) {
        u32 head = blockIdx.y / (c.query_heads / c.key_heads);
        smem.at[threadIdx.x] = key_at(c, least(key + threadIdx.x, c.tokens - 1), head);
    }
    __syncthreads();
    copy_rows<DIM, KEYS>(smem.keys, smem.at);
    copy_group();
    copy_wait<0>();
    __syncthreads();
    multiply<BF, DIM, 1>(s, smem.queries, smem.keys);
    u32 row = c.first + warp() * 16 + lane() / 4;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (key + 8 * n + lane() % 4 * 2 + i % 2 > row + i / 2 * 8)
                s[0][n][i] = minus_infinity();
}

template <u32 DIM> DEVICE void begin_split(const call &c, const smem &smem) {
    copy_queries<DIM, ROWS>(c, smem.queries, 0, blockIdx.y, c.query_count);
    copy_group();
}

/* The maximum and sum of each row in a split. Grid: splits, query heads. */
template <bool BF, u32 DIM> DEVICE void find_rows(const call &c) {
    smem smem = carve_smem<DIM>();
    results to = results_of(c);
    // Only the maximum and the sum are used, so the results have the smallest size.
    softmax_rows<1, 8> rows;
    float scale = binary_scale(c);
    begin_rows(rows);
    begin_split<DIM>(c, smem);
    u32 first = blockIdx.x * SPLIT, end = least(first + SPLIT, c.tokens);
    for (u32 key = first; key < end; key += KEYS) {
        float s[1][KEYS / 8][4];
        find_products<BF, DIM>(c, smem, key, s);
        softmax_tile(s, rows, scale);
    }
    end_rows(rows);
    float *out = to.rows + ((u64)blockIdx.y * to.splits + blockIdx.x) * ROWS * 2;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (lane() % 4 != 0) continue;
        u32 row = warp() * 16 + half * 8 + lane() / 4;
        out[row * 2] = rows.most[0][half] * scale;
        out[row * 2 + 1] = rows.sum[0][half];
    }
}

/* The log-sum-exps of all rows. Grid: query heads; one thread per row. */
extern "C" __global__ void __launch_bounds__(ROWS) estimate_join(const __grid_constant__ call c) {
    results to = results_of(c);
    const float *rows = to.rows + (u64)blockIdx.x * to.splits * ROWS * 2 + threadIdx.x * 2;
    float all_most = minus_infinity(), sum = 0.0f;
    for (u32 split = 0; split < to.splits; split++)
        all_most = fmaxf(all_most, rows[(u64)split * ROWS * 2]);
    for (u32 split = 0; split < to.splits; split++) {
        const float *row = rows + (u64)split * ROWS * 2;
        if (row[1] > 0.0f) sum += row[1] * exp2_near(row[0] - all_most);
    }
    // Rows without a query get weight 0.
    bool valid = threadIdx.x < c.query_count;
    to.logs[(u64)blockIdx.x * ROWS + threadIdx.x] =
        valid ? all_most + log2_near(sum) : -minus_infinity();
}

/* Writes the weights of a tile's keys, and adds those of its distances: one thread per diagonal. */
DEVICE void add_tile(const call &c, const smem &smem, u32 key, u32 first) {
    u32 column = threadIdx.x % KEYS, half = threadIdx.x / KEYS;
    float sum = 0.0f;
    for (u32 row = half * 32; row < half * 32 + 32; row++)
        sum += smem.weights[row * PITCH + column];
    float *both = (float *)smem.at;
    if (half == 1) both[column] = sum;
    __syncthreads();
    if (half == 0 && key + column < c.tokens) {
        u64 to = c.numbers + (u64)((i64)blockIdx.y * c.out_head_stride);
        ((float *)to)[key + column] = sum + both[column];
    }
    if (threadIdx.x >= ROWS + KEYS - 1) return;
    // In row i this is key i + 63 - threadIdx.x.
    float along = 0.0f;
    for (u32 row = 0; row < ROWS; row++) {
        u32 at = row + KEYS - 1 - threadIdx.x;
        if (at < KEYS) along += smem.weights[row * PITCH + at];
    }
    smem.distances[SPLIT - KEYS - (key - first) + threadIdx.x] += along;
}

/* The weights of a split's keys, and of the distances in it. Grid as in `find_rows`. */
template <bool BF, u32 DIM> DEVICE void find_sums(const call &c) {
    smem smem = carve_smem<DIM>();
    results to = results_of(c);
    float scale = binary_scale(c), logs[2];
    for (u32 i = threadIdx.x; i < DISTANCES; i += THREADS) smem.distances[i] = 0.0f;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        logs[half] = to.logs[blockIdx.y * ROWS + warp() * 16 + half * 8 + lane() / 4];
    begin_split<DIM>(c, smem);
    u32 first = blockIdx.x * SPLIT, end = least(first + SPLIT, c.tokens);
    for (u32 key = first; key < end; key += KEYS) {
        float s[1][KEYS / 8][4];
        find_products<BF, DIM>(c, smem, key, s);
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float *at = smem.weights + (warp() * 16 + half * 8 + lane() / 4) * PITCH;
                float x = exp2_near(s[0][n][2 * half] * scale - logs[half]);
                float y = exp2_near(s[0][n][2 * half + 1] * scale - logs[half]);
                *(pair *)(at + 8 * n + lane() % 4 * 2) = {to_bits(x), to_bits(y)};
            }
        __syncthreads();
        add_tile(c, smem, key, first);
    }
    __syncthreads();
    float *out = to.distances + ((u64)blockIdx.y * to.splits + blockIdx.x) * DISTANCES;
    for (u32 i = threadIdx.x; i < DISTANCES; i += THREADS) out[i] = smem.distances[i];
}

/* The weights of distances over all splits. Grid: distances, query heads. */
extern "C" __global__ void __launch_bounds__(256)
    estimate_distances(const __grid_constant__ call c) {
    results from = results_of(c);
    u32 distance = blockIdx.x * 256 + threadIdx.x;
    if (distance >= c.tokens) return;
    float sum = 0.0f;
    // Place 0 of a split is the distance of its last key to the first query.
    i64 farthest = (i64)c.first - distance - (SPLIT - 1);
    u32 split = farthest <= 0 ? 0 : (u32)((farthest + SPLIT - 1) / SPLIT);
    for (; split < from.splits; split++) {
        i64 at = (i64)split * SPLIT - farthest;
        if (at >= DISTANCES) break;
        sum += from.distances[((u64)blockIdx.y * from.splits + split) * DISTANCES + (u32)at];
    }
    u64 to = c.more + (u64)((i64)blockIdx.y * c.out_head_stride);
    ((float *)to)[distance] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_rows_f16_64(const __grid_constant__ call c) {
    find_rows<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_sums_f16_64(const __grid_constant__ call c) {
    find_sums<false, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_rows_f16_128(const __grid_constant__ call c) {
    find_rows<false, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_sums_f16_128(const __grid_constant__ call c) {
    find_sums<false, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_rows_f16_576(const __grid_constant__ call c) {
    find_rows<false, 576>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_sums_f16_576(const __grid_constant__ call c) {
    find_sums<false, 576>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_rows_bf16_64(const __grid_constant__ call c) {
    find_rows<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_sums_bf16_64(const __grid_constant__ call c) {
    find_sums<true, 64>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_rows_bf16_128(const __grid_constant__ call c) {
    find_rows<true, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_sums_bf16_128(const __grid_constant__ call c) {
    find_sums<true, 128>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_rows_bf16_576(const __grid_constant__ call c) {
    find_rows<true, 576>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    estimate_sums_bf16_576(const __grid_constant__ call c) {
    find_sums<true, 576>(c);
}
