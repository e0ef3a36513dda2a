/* Attention of the next token or of a few: `Kind::Decode`. call.h defines its fields.
 *
 * Memory bandwidth limits the kernel. A part of a head's keys is read once for up to 8 rows,
 * where a row is a query of one of the heads that share keys. The steps are: products with all
 * keys of the part, softmax, weighted values. `decode_join` combines the parts in order. The
 * partition depends on the number of keys only, so equal input gives equal bits.
 *
 * A thread block takes 31 to 45 KB of shared memory for 128 to 576 numbers: up to 8 queries,
 * their products with 512 keys, and the addresses of 512 keys and values. 64 of about 140
 * registers hold sums of 8 rows. */
#include "attend_cut.h"
#include "attend_numbers.h"

/* Keys that a thread reads at once; it reads twice as many values. */
constexpr u32 TOGETHER = 2;

/* Layout of a thread block's shared memory. */
struct smem {
    /* Queries, later results. Each step of 64 numbers holds the first 4 of every 8, then the
     * others, so that 8 lanes read adjacent numbers. */
    float *queries;
    /* Products, then weights: the rows of a key are adjacent. */
    float *weights;
    u64 *keys, *values;
    u32 *at;
    float *warps;
};

DEVICE u32 padded(u32 dim) { return (dim + 63) / 64 * 64; }

template <u32 ROWS> DEVICE smem carve_smem(const call &c, const cut &cut) {
    float *at = (float *)dynamic_shared();
    smem smem;
    smem.queries = at;
    smem.weights = at + ROWS * padded(most(c.key_dim, c.value_dim));
    smem.keys = (u64 *)(smem.weights + ROWS * cut.part);
    smem.values = smem.keys + cut.part;
    smem.at = (u32 *)(smem.values + cut.part);
    smem.warps = (float *)(smem.at + cut.part);
    return smem;
}

DEVICE float read_one(u64 from, u32 kind, u32 at) {
    if (kind == F32) return ((const float *)from)[at];
    u16 half = ((const u16 *)from)[at];
    return kind == BF16 ? from_bf16(half) : from_f16(half);
}

/* The scale of a token or channel. The scales of values follow those of keys. */
DEVICE float scale_of(const call &c, bool is_value, u32 token, u32 head, u32 d) {
    const float *scales = (const float *)c.scales;
    if (c.scaling == SCALES_TOKEN) {
        u64 at = (u64)token * c.key_heads + head;
        return scales[at + (is_value ? (u64)c.tokens * c.key_heads : 0)];
    }
    if (c.scaling != SCALES_CHANNEL) return 1.0f;
    return scales[is_value ? c.key_heads * c.key_dim + head * c.value_dim + d
                           : head * c.key_dim + d];
}

/* Work of a thread block. */
struct work {
    u32 part, group, key_head, first_row, rows;
};

/* The query and head of a row. */
DEVICE u32 query_of(const cut &cut, const work &work, u32 row) {
    return (work.first_row + row) / cut.group;
}
DEVICE u32 head_of(const cut &cut, const work &work, u32 row) {
    return work.group * cut.group + (work.first_row + row) % cut.group;
}

/* Reads the queries, multiplied by all factors that do not depend on the token. */
template <u32 ROWS>
DEVICE void read_queries(const call &c, const cut &cut, const work &work, const smem &smem) {
    u32 wide = padded(c.key_dim);
    float scale = binary_scale(c);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * wide; i += THREADS) {
        u32 row = i / wide, d = i % wide, chunk = d / 8;
        float x = 0.0f;
        if (row < work.rows && d < c.key_dim) {
            u64 from = query_at(c, query_of(cut, work, row), head_of(cut, work, row));
            x = read_one(from, c.other_dtype, d) * scale;
            if (c.scaling == SCALES_CHANNEL) x *= scale_of(c, false, 0, work.key_head, d);
        }
        u32 to = ((chunk / 8 * 2 + d % 8 / 4) * 8 + chunk % 8) * 4 + d % 4;
        smem.queries[row * wide + to] = x;
    }
}

/* Finds the addresses of the part's keys and values. Returns its number of places, with or
 * without a key. */
DEVICE u32 find_keys(const call &c, const cut &cut, const work &work, const smem &smem) {
    u32 first = work.part * cut.part, count = least(cut.part, cut.keys - least(first, cut.keys));
    u32 end = least(c.tokens, c.first + c.query_count);
    u32 list = c.count <= 1 ? 0 : work.group;
    const u32 *chosen = (const u32 *)c.index + (u64)list * c.keep;
    u32 blocks = c.count == 0 ? 0 : ((const u32 *)c.counts)[list];
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 at = first + i;
        if (c.count != 0) {
            u32 block = (first + i) / c.recent;
            at = block < blocks ? (u64)chosen[block] * c.recent + (first + i) % c.recent : NOWHERE;
        }
        bool valid = at < end;
        smem.at[i] = valid ? (u32)at : NOWHERE;
        smem.keys[i] = valid ? key_at(c, (u32)at, work.key_head) : 0;
        smem.values[i] = valid ? value_at(c, (u32)at, work.key_head) : 0;
    }
    return count;
}

/* Products of some keys with all rows: each of 8 lanes takes 8 of 64 numbers. Address 0 = no
 * key. */
template <class T, u32 ROWS>
DEVICE void multiply(const call &c, const smem &smem, const u64 (&keys)[TOGETHER],
                     float (&sums)[TOGETHER][ROWS]) {
    u32 wide = padded(c.key_dim), own = threadIdx.x % 8;
#pragma unroll
    for (u32 i = 0; i < TOGETHER * ROWS; i++) sums[i / ROWS][i % ROWS] = 0.0f;
#pragma unroll 2
    for (u32 chunk = own; chunk < c.key_dim / 8; chunk += 8) {
        typename T::raw all[TOGETHER] = {};
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++)
            if (keys[n] != 0) all[n] = T::load(keys[n] + chunk * 8 * T::BYTES);
        const float *from = smem.queries + chunk / 8 * 64 + own * 4;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            quad low = load16(from + row * wide), high = load16(from + row * wide + 32);
            const u32 query[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 i = 0; i < 8 * TOGETHER; i++)
                sums[i / 8][row] += T::number(all[i / 8], i % 8) * from_bits(query[i % 8]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < TOGETHER * ROWS; i++)
        sums[i / ROWS][i % ROWS] = warp_sum<8>(sums[i / ROWS][i % ROWS]);
}

/* Writes the products of a key of the part; minus infinity where a row does not see the key. */
template <u32 ROWS>
DEVICE void put_products(const call &c, const cut &cut, const work &work, const smem &smem,
                         const results &to, u32 i, const float (&sums)[ROWS]) {
    u32 at = smem.at[i];
    bool has_scale = c.scaling == SCALES_TOKEN && at != NOWHERE;
    float scale = has_scale ? scale_of(c, false, at, work.key_head, 0) : 1.0f;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (threadIdx.x % 8 != row) continue;
        u32 query = query_of(cut, work, row), head = head_of(cut, work, row);
        bool is_seen = row < work.rows && at != NOWHERE && at <= c.first + query;
        float product = is_seen ? sums[row] * scale : minus_infinity();
        smem.weights[i * ROWS + row] = product;
        u64 line = (u64)query * c.query_heads + head;
        if (c.numbers != 0 && row < work.rows)
            to.products[line * cut.keys + work.part * cut.part + i] = product;
    }
}

/* Products of all keys of the part with all rows. */
template <class T, u32 ROWS>
DEVICE void find_products(const call &c, const cut &cut, const work &work, const smem &smem,
                          const results &to, u32 count) {
    constexpr u32 GROUPS = THREADS / 8;
    // All lanes of a warp stay in the loop until the last one is done.
    for (u32 i = threadIdx.x / 8; i < (count + 3) / 4 * 4; i += TOGETHER * GROUPS) {
        u64 keys[TOGETHER];
        float sums[TOGETHER][ROWS];
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++)
            keys[n] = i + n * GROUPS < count ? smem.keys[i + n * GROUPS] : 0;
        multiply<T, ROWS>(c, smem, keys, sums);
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++)
            if (i + n * GROUPS < count)
                put_products<ROWS>(c, cut, work, smem, to, i + n * GROUPS, sums[n]);
    }
}

/* Converts products to weights, and computes the maximum and sum of each row. */
template <u32 ROWS>
DEVICE void weigh(const smem &smem, u32 count, float (&all_most)[ROWS], float (&sums)[ROWS]) {
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        all_most[row] = minus_infinity();
        sums[row] = 0.0f;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < count; i += THREADS)
            all_most[row] = fmaxf(all_most[row], smem.weights[i * ROWS + row]);
        all_most[row] = warp_most(all_most[row]);
        if (lane() == 0) smem.warps[warp() * ROWS + row] = all_most[row];
    }
    __syncthreads();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        for (u32 w = 0; w < THREADS / WARP; w++)
            all_most[row] = fmaxf(all_most[row], smem.warps[w * ROWS + row]);
        float base = all_most[row] == minus_infinity() ? 0.0f : all_most[row];
#pragma unroll 1
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            float weight = exp2_near(smem.weights[i * ROWS + row] - base);
            smem.weights[i * ROWS + row] = weight;
            sums[row] += weight;
        }
        sums[row] = warp_sum(sums[row]);
    }
    __syncthreads();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (lane() == 0) smem.warps[warp() * ROWS + row] = sums[row];
    }
    __syncthreads();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        sums[row] = 0.0f;
        for (u32 w = 0; w < THREADS / WARP; w++) sums[row] += smem.warps[w * ROWS + row];
    }
}

/* Adds weighted values into the memory of the queries. A thread has 8 numbers of every `sets`th
 * key. */
template <class T, u32 ROWS>
DEVICE void add_values(const call &c, const work &work, const smem &smem, u32 count) {
    u32 chunks = c.value_dim / 8, chunk = threadIdx.x % chunks, set = threadIdx.x / chunks;
    u32 sets = THREADS / chunks;
    float sums[ROWS][8] = {};
    for (u32 first = set; set < sets && first < count; first += 2 * TOGETHER * sets) {
        typename T::raw all[2 * TOGETHER] = {};
#pragma unroll
        for (u32 n = 0; n < 2 * TOGETHER; n++) {
            u64 value = first + n * sets < count ? smem.values[first + n * sets] : 0;
            if (value != 0) all[n] = T::load(value + chunk * 8 * T::BYTES);
        }
#pragma unroll
        for (u32 n = 0; n < 2 * TOGETHER; n++) {
            u32 i = first + n * sets;
            if (i >= count) break;
            float scale = 1.0f;
            if (c.scaling == SCALES_TOKEN && smem.values[i] != 0)
                scale = scale_of(c, true, smem.at[i], work.key_head, 0);
#pragma unroll
            for (u32 row = 0; row < ROWS; row++) {
                float weight = smem.weights[i * ROWS + row] * scale;
#pragma unroll
                for (u32 d = 0; d < 8; d++) sums[row][d] += T::number(all[n], d) * weight;
            }
        }
    }
#pragma unroll 1
    for (u32 turn = 0; turn < sets; turn++) {
        if (set == turn) {
#pragma unroll
            for (u32 row = 0; row < ROWS; row++)
#pragma unroll
                for (u32 d = 0; d < 8; d++) {
                    float *to = smem.queries + row * c.value_dim + chunk * 8 + d;
                    *to = sums[row][d] + (turn == 0 ? 0.0f : *to);
                }
        }
        __syncthreads();
    }
}

/* Attention of some rows over a part of the keys. Grid: parts, groups of heads, rows. */
template <class T, u32 ROWS> DEVICE void decode(const call &c) {
    cut cut = cut_of(c);
    results to = results_of(c, cut);
    work work;
    work.part = blockIdx.x;
    work.group = blockIdx.y;
    work.key_head = work.group * cut.group / (c.query_heads / c.key_heads);
    work.first_row = blockIdx.z * ROWS;
    work.rows = least(ROWS, cut.rows - work.first_row);
    smem smem = carve_smem<ROWS>(c, cut);
    read_queries<ROWS>(c, cut, work, smem);
    u32 count = find_keys(c, cut, work, smem);
    __syncthreads();
    find_products<T, ROWS>(c, cut, work, smem, to, count);
    __syncthreads();
    float all_most[ROWS], sums[ROWS];
    weigh<ROWS>(smem, count, all_most, sums);
    add_values<T, ROWS>(c, work, smem, count);
#pragma unroll 1
    for (u32 row = 0; row < work.rows; row++) {
        u64 at = (u64)query_of(cut, work, row) * c.query_heads + head_of(cut, work, row);
        at = at * cut.parts + work.part;
#pragma unroll 1
        for (u32 d = threadIdx.x; d < c.value_dim; d += THREADS)
            to.out[at * c.value_dim + d] = smem.queries[row * c.value_dim + d];
    }
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (threadIdx.x != 0 || row >= work.rows) continue;
        u64 at = (u64)query_of(cut, work, row) * c.query_heads + head_of(cut, work, row);
        at = at * cut.parts + work.part;
        to.logs[at * 2] = all_most[row];
        to.logs[at * 2 + 1] = sums[row];
    }
}

/* Combines the parts of a row. Grid: rows. */
extern "C" __global__ void __launch_bounds__(THREADS) decode_join(const __grid_constant__ call c) {
    cut cut = cut_of(c);
    results from = results_of(c, cut);
    u64 row = blockIdx.x;
    u32 query = blockIdx.x / c.query_heads, head = blockIdx.x % c.query_heads;
    u32 key_head = head / (c.query_heads / c.key_heads);
    const float *logs = from.logs + row * cut.parts * 2;
    const float *parts = from.out + row * cut.parts * c.value_dim;
    float all_most = minus_infinity(), sum = 0.0f;
    for (u32 part = 0; part < cut.parts; part++) all_most = fmaxf(all_most, logs[2 * part]);
    bool is_any = all_most != minus_infinity();
    for (u32 part = 0; is_any && part < cut.parts; part++)
        sum += logs[2 * part + 1] * exp2_near(logs[2 * part] - all_most);
    u32 kind = c.flags & OUT_F32 ? (u32)F32 : c.other_dtype, bytes = kind == F32 ? 4 : 2;
    for (u32 d = 2 * threadIdx.x; d < c.value_dim; d += 2 * THREADS) {
        float x = 0.0f, y = 0.0f;
        for (u32 part = 0; is_any && part < cut.parts; part++) {
            float share = exp2_near(logs[2 * part] - all_most);
            if (share == 0.0f) continue;
            pair two = *(const pair *)(parts + (u64)part * c.value_dim + d);
            x += share * from_bits(two.x);
            y += share * from_bits(two.y);
        }
        if (is_any) x /= sum, y /= sum;
        if (c.scaling == SCALES_CHANNEL) {
            x *= scale_of(c, true, 0, key_head, d);
            y *= scale_of(c, true, 0, key_head, d + 1);
        }
        write_two(out_at(c, query, head) + d * bytes, kind, x, y);
    }
    if (threadIdx.x != 0) return;
    float log = is_any ? all_most + log2_near(sum) : minus_infinity();
    from.all[row] = log;
    if (c.more != 0) ((float *)c.more)[row] = log * LN_2;
}

/* Sums the weights of each key over queries, and over one head, the heads that share keys, or all
 * heads. Grid: keys, rows of the output. */
extern "C" __global__ void __launch_bounds__(THREADS) decode_sums(const __grid_constant__ call c) {
    cut cut = cut_of(c);
    results from = results_of(c, cut);
    u32 key = blockIdx.x * THREADS + threadIdx.x;
    u32 heads = c.query_heads / gridDim.y, first = blockIdx.y * heads;
    if (key >= cut.keys) return;
    float sum = 0.0f;
    for (u32 query = 0; query < c.query_count; query++)
        for (u32 head = first; head < first + heads; head++) {
            u64 row = (u64)query * c.query_heads + head;
            float product = from.products[row * cut.keys + key], log = from.all[row];
            if (product != minus_infinity()) sum += exp2_near(product - log);
        }
    ((float *)c.numbers)[(u64)blockIdx.y * cut.keys + key] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_f32_1(const __grid_constant__ call c) {
    decode<is_f32, 1>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_f32_4(const __grid_constant__ call c) {
    decode<is_f32, 4>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    decode_f32_8(const __grid_constant__ call c) {
    decode<is_f32, 8>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_f16_1(const __grid_constant__ call c) {
    decode<is_f16, 1>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_f16_4(const __grid_constant__ call c) {
    decode<is_f16, 4>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    decode_f16_8(const __grid_constant__ call c) {
    decode<is_f16, 8>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_bf16_1(const __grid_constant__ call c) {
    decode<is_bf16, 1>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_bf16_4(const __grid_constant__ call c) {
    decode<is_bf16, 4>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    decode_bf16_8(const __grid_constant__ call c) {
    decode<is_bf16, 8>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_i8_1(const __grid_constant__ call c) {
    decode<is_i8, 1>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    decode_i8_4(const __grid_constant__ call c) {
    decode<is_i8, 4>(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    decode_i8_8(const __grid_constant__ call c) {
    decode<is_i8, 8>(c);
}
