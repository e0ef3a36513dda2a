/* What keys and distances get of the attention of the last queries, up to 64: `Kind::Estimate`.
 * call.h says which fields it takes.
 *
 * Keys are cut into splits of 1024, whatever the device. First the most and the sum of each row in
 * each split, then of all; then, with products made again, what each key got, and what each
 * distance got in each split; a distance is in two splits at most. Nothing is added in an order
 * that could be another.
 *
 * A block of threads takes, for 64, 128 and 576 numbers, 8192, 16384 and 73728 bytes of shared
 * memory for queries, 18432, 18432 and 73728 for keys and behind them weights, 4864 for the rest.
 */
#include "attend.h"

constexpr u32 ROWS = 64, SPLIT = 1024;
/* From a row of weights to the next, so that neither rows nor diagonals meet in a bank. */
constexpr u32 PITCH = 72;
constexpr u32 DISTANCES = SPLIT + ROWS;

struct room {
    u8 *queries, *keys;
    float *weights, *distances;
    u64 *at;
};

template <u32 DIM> DEVICE room make_room() {
    constexpr u32 TILE = KEYS * DIM * 2, WEIGHTS = ROWS * PITCH * 4;
    u8 *at = dynamic_shared();
    room room;
    room.queries = at;
    room.keys = at + ROWS * DIM * 2;
    // Weights come where keys were.
    room.weights = (float *)room.keys;
    room.distances = (float *)(room.keys + (TILE > WEIGHTS ? TILE : WEIGHTS));
    room.at = (u64 *)(room.distances + DISTANCES);
    return room;
}

/* Scratch: the most and sum of each row of each split, the log-sum-exp of each row to the base of
 * 2, and what distances got in each split. Heads come first. */
struct results {
    float *rows, *logs, *distances;
    u32 splits;
};

DEVICE results results_of(const call &c) {
    u32 splits = ceil_div(c.tokens, SPLIT);
    float *rows = (float *)c.scratch, *logs = rows + (u64)c.query_heads * splits * ROWS * 2;
    return {rows, logs, logs + (u64)c.query_heads * ROWS, splits};
}

/* Products of all rows with the tile of keys that begins at a position, what lies behind a row
 * hidden. */
template <bool BF, u32 DIM>
DEVICE void find_products(const call &c, const room &room, u32 key, float (&s)[1][KEYS / 8][4]) {
    __syncthreads();
    if (threadIdx.x < KEYS) {
        u32 head = blockIdx.y / (c.query_heads / c.key_heads);
        room.at[threadIdx.x] = key_at(c, least(key + threadIdx.x, c.tokens - 1), head);
    }
    __syncthreads();
    copy_rows<DIM, KEYS>(room.keys, room.at);
    copy_group();
    copy_wait<0>();
    __syncthreads();
    multiply<BF, DIM, 1>(s, room.queries, room.keys);
    u32 row = c.first + warp() * 16 + lane() / 4;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (key + 8 * n + lane() % 4 * 2 + i % 2 > row + i / 2 * 8)
                s[0][n][i] = minus_infinity();
}

template <u32 DIM> DEVICE void begin_split(const call &c, const room &room) {
    copy_queries<DIM, ROWS>(c, room.queries, 0, blockIdx.y, c.query_count);
    copy_group();
}

/* The most and sum of rows in a split. Blocks of threads: splits, query heads. */
template <bool BF, u32 DIM> DEVICE void find_rows(const call &c) {
    room room = make_room<DIM>();
    results to = results_of(c);
    // Of results there are none.
    rows_so_far<1, 8> rows;
    float scale = binary_scale(c);
    begin_rows(rows);
    begin_split<DIM>(c, room);
    u32 first = blockIdx.x * SPLIT, end = least(first + SPLIT, c.tokens);
    for (u32 key = first; key < end; key += KEYS) {
        float s[1][KEYS / 8][4];
        find_products<BF, DIM>(c, room, key, s);
        soften(s, rows, scale);
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

/* The log-sum-exps of all rows. Blocks of threads: query heads; a thread a row. */
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
    // Rows that there are none of weigh nothing.
    bool is = threadIdx.x < c.query_count;
    to.logs[(u64)blockIdx.x * ROWS + threadIdx.x] =
        is ? all_most + log2_near(sum) : -minus_infinity();
}

/* What a tile of keys got, and adds what distances got: a thread a diagonal of the tile. */
DEVICE void add_tile(const call &c, const room &room, u32 key, u32 first) {
    u32 column = threadIdx.x % KEYS, half = threadIdx.x / KEYS;
    float sum = 0.0f;
    for (u32 row = half * 32; row < half * 32 + 32; row++)
        sum += room.weights[row * PITCH + column];
    float *both = (float *)room.at;
    if (half == 1) both[column] = sum;
    __syncthreads();
    if (half == 0 && key + column < c.tokens) {
        u64 to = c.numbers + (u64)((i64)blockIdx.y * c.out_head_stride);
        ((float *)to)[key + column] = sum + both[column];
    }
    if (threadIdx.x >= ROWS + KEYS - 1) return;
    // Of row i the key i + 63 - threadIdx.x.
    float along = 0.0f;
    for (u32 row = 0; row < ROWS; row++) {
        u32 at = row + KEYS - 1 - threadIdx.x;
        if (at < KEYS) along += room.weights[row * PITCH + at];
    }
    room.distances[SPLIT - KEYS - (key - first) + threadIdx.x] += along;
}

/* What keys of a split got, and distances in it. Blocks of threads as in `find_rows`. */
template <bool BF, u32 DIM> DEVICE void find_sums(const call &c) {
    room room = make_room<DIM>();
    results to = results_of(c);
    float scale = binary_scale(c), logs[2];
    for (u32 i = threadIdx.x; i < DISTANCES; i += THREADS) room.distances[i] = 0.0f;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        logs[half] = to.logs[blockIdx.y * ROWS + warp() * 16 + half * 8 + lane() / 4];
    begin_split<DIM>(c, room);
    u32 first = blockIdx.x * SPLIT, end = least(first + SPLIT, c.tokens);
    for (u32 key = first; key < end; key += KEYS) {
        float s[1][KEYS / 8][4];
        find_products<BF, DIM>(c, room, key, s);
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float *at = room.weights + (warp() * 16 + half * 8 + lane() / 4) * PITCH;
                float x = exp2_near(s[0][n][2 * half] * scale - logs[half]);
                float y = exp2_near(s[0][n][2 * half + 1] * scale - logs[half]);
                *(pair *)(at + 8 * n + lane() % 4 * 2) = {to_bits(x), to_bits(y)};
            }
        __syncthreads();
        add_tile(c, room, key, first);
    }
    __syncthreads();
    float *out = to.distances + ((u64)blockIdx.y * to.splits + blockIdx.x) * DISTANCES;
    for (u32 i = threadIdx.x; i < DISTANCES; i += THREADS) out[i] = room.distances[i];
}

/* What distances got in all splits. Blocks of threads: distances, query heads. */
extern "C" __global__ void __launch_bounds__(256)
    estimate_distances(const __grid_constant__ call c) {
    results from = results_of(c);
    u32 distance = blockIdx.x * 256 + threadIdx.x;
    if (distance >= c.tokens) return;
    float sum = 0.0f;
    // Place 0 of a split is its last key with the first query.
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
