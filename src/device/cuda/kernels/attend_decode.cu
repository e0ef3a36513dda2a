/* Attention of the next token, or of a few: `Kind::Decode`. call.h says which fields it takes.
 *
 * It is bound by what it reads: a part of the keys of a head is read once for up to 8 rows, a row
 * being a query of one of the heads that share keys. First products of all keys of the part, then
 * softmax, then values; what parts come to is joined in their order. How keys are cut depends on
 * their number alone: equal bits come out of equal input.
 *
 * A block of threads takes 31 to 45 KB of shared memory for 128 to 576 numbers: up to 8 queries,
 * products of 512 keys with them, and where 512 keys and values are. 64 of about 140 registers hold
 * sums of 8 rows. */
#include "attend_cut.h"
#include "attend_numbers.h"

/* Keys that a thread reads at once; of values twice as many. */
constexpr u32 TOGETHER = 2;

/* What one block of threads has in shared memory. */
struct room {
    /* Queries, later results. In steps of 64 numbers: of each 8 the first 4, then the others, so
     * that 8 lanes read what lies side by side. */
    float *queries;
    /* Products, then weights: rows of a key side by side. */
    float *weights;
    u64 *keys, *values;
    u32 *at;
    float *warps;
};

DEVICE u32 padded(u32 dim) { return (dim + 63) / 64 * 64; }

template <u32 ROWS> DEVICE room make_room(const call &c, const cut &cut) {
    float *at = (float *)dynamic_shared();
    room room;
    room.queries = at;
    room.weights = at + ROWS * padded(most(c.key_dim, c.value_dim));
    room.keys = (u64 *)(room.weights + ROWS * cut.part);
    room.values = room.keys + cut.part;
    room.at = (u32 *)(room.values + cut.part);
    room.warps = (float *)(room.at + cut.part);
    return room;
}

DEVICE float read_one(u64 from, u32 kind, u32 at) {
    if (kind == F32) return ((const float *)from)[at];
    u16 half = ((const u16 *)from)[at];
    return kind == BF16 ? from_bf16(half) : from_f16(half);
}

/* The scale of a token or number; those of values stand behind those of keys. */
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

/* What a block of threads works on. */
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

/* Queries, with all factors that do not depend on the token. */
template <u32 ROWS>
DEVICE void read_queries(const call &c, const cut &cut, const work &work, const room &room) {
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
        room.queries[row * wide + to] = x;
    }
}

/* Where the keys of the part are; how many places it has, whether there is a key or not. */
DEVICE u32 find_keys(const call &c, const cut &cut, const work &work, const room &room) {
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
        bool is = at < end;
        room.at[i] = is ? (u32)at : NOWHERE;
        room.keys[i] = is ? key_at(c, (u32)at, work.key_head) : 0;
        room.values[i] = is ? value_at(c, (u32)at, work.key_head) : 0;
    }
    return count;
}

/* Products of some keys with all rows: 8 lanes each take 8 of 64 numbers. 0 = no key. */
template <class T, u32 ROWS>
DEVICE void multiply(const call &c, const room &room, const u64 (&keys)[TOGETHER],
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
        const float *from = room.queries + chunk / 8 * 64 + own * 4;
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

/* Writes the products of a key of the part; minus infinity where a row does not see it. */
template <u32 ROWS>
DEVICE void put_products(const call &c, const cut &cut, const work &work, const room &room,
                         const results &to, u32 i, const float (&sums)[ROWS]) {
    u32 at = room.at[i];
    bool has_scale = c.scaling == SCALES_TOKEN && at != NOWHERE;
    float scale = has_scale ? scale_of(c, false, at, work.key_head, 0) : 1.0f;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (threadIdx.x % 8 != row) continue;
        u32 query = query_of(cut, work, row), head = head_of(cut, work, row);
        bool is_seen = row < work.rows && at != NOWHERE && at <= c.first + query;
        float product = is_seen ? sums[row] * scale : minus_infinity();
        room.weights[i * ROWS + row] = product;
        u64 line = (u64)query * c.query_heads + head;
        if (c.numbers != 0 && row < work.rows)
            to.products[line * cut.keys + work.part * cut.part + i] = product;
    }
}

/* Products of all keys of the part with all rows. */
template <class T, u32 ROWS>
DEVICE void find_products(const call &c, const cut &cut, const work &work, const room &room,
                          const results &to, u32 count) {
    constexpr u32 GROUPS = THREADS / 8;
    // All lanes of a warp go on as long as one of them does.
    for (u32 i = threadIdx.x / 8; i < (count + 3) / 4 * 4; i += TOGETHER * GROUPS) {
        u64 keys[TOGETHER];
        float sums[TOGETHER][ROWS];
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++)
            keys[n] = i + n * GROUPS < count ? room.keys[i + n * GROUPS] : 0;
        multiply<T, ROWS>(c, room, keys, sums);
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++)
            if (i + n * GROUPS < count)
                put_products<ROWS>(c, cut, work, room, to, i + n * GROUPS, sums[n]);
    }
}

/* Makes weights of products: the most and the sum of each row. */
template <u32 ROWS>
DEVICE void weigh(const room &room, u32 count, float (&all_most)[ROWS], float (&sums)[ROWS]) {
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        all_most[row] = minus_infinity();
        sums[row] = 0.0f;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < count; i += THREADS)
            all_most[row] = fmaxf(all_most[row], room.weights[i * ROWS + row]);
        all_most[row] = warp_most(all_most[row]);
        if (lane() == 0) room.warps[warp() * ROWS + row] = all_most[row];
    }
    __syncthreads();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        for (u32 w = 0; w < THREADS / WARP; w++)
            all_most[row] = fmaxf(all_most[row], room.warps[w * ROWS + row]);
        float base = all_most[row] == minus_infinity() ? 0.0f : all_most[row];
#pragma unroll 1
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            float weight = exp2_near(room.weights[i * ROWS + row] - base);
            room.weights[i * ROWS + row] = weight;
            sums[row] += weight;
        }
        sums[row] = warp_sum(sums[row]);
    }
    __syncthreads();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        if (lane() == 0) room.warps[warp() * ROWS + row] = sums[row];
    }
    __syncthreads();
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        sums[row] = 0.0f;
        for (u32 w = 0; w < THREADS / WARP; w++) sums[row] += room.warps[w * ROWS + row];
    }
}

/* Adds values by their weights, into what queries were: threads have 8 numbers each, of keys that
 * stand some apart. */
template <class T, u32 ROWS>
DEVICE void add_values(const call &c, const work &work, const room &room, u32 count) {
    u32 chunks = c.value_dim / 8, chunk = threadIdx.x % chunks, set = threadIdx.x / chunks;
    u32 sets = THREADS / chunks;
    float sums[ROWS][8] = {};
    for (u32 first = set; set < sets && first < count; first += 2 * TOGETHER * sets) {
        typename T::raw all[2 * TOGETHER] = {};
#pragma unroll
        for (u32 n = 0; n < 2 * TOGETHER; n++) {
            u64 value = first + n * sets < count ? room.values[first + n * sets] : 0;
            if (value != 0) all[n] = T::load(value + chunk * 8 * T::BYTES);
        }
#pragma unroll
        for (u32 n = 0; n < 2 * TOGETHER; n++) {
            u32 i = first + n * sets;
            if (i >= count) break;
            float scale = 1.0f;
            if (c.scaling == SCALES_TOKEN && room.values[i] != 0)
                scale = scale_of(c, true, room.at[i], work.key_head, 0);
#pragma unroll
            for (u32 row = 0; row < ROWS; row++) {
                float weight = room.weights[i * ROWS + row] * scale;
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
                    float *to = room.queries + row * c.value_dim + chunk * 8 + d;
                    *to = sums[row][d] + (turn == 0 ? 0.0f : *to);
                }
        }
        __syncthreads();
    }
}

/* Some keys of some rows. Blocks of threads: parts, groups of heads, rows. */
template <class T, u32 ROWS> DEVICE void decode(const call &c) {
    cut cut = cut_of(c);
    results to = results_of(c, cut);
    work work;
    work.part = blockIdx.x;
    work.group = blockIdx.y;
    work.key_head = work.group * cut.group / (c.query_heads / c.key_heads);
    work.first_row = blockIdx.z * ROWS;
    work.rows = least(ROWS, cut.rows - work.first_row);
    room room = make_room<ROWS>(c, cut);
    read_queries<ROWS>(c, cut, work, room);
    u32 count = find_keys(c, cut, work, room);
    __syncthreads();
    find_products<T, ROWS>(c, cut, work, room, to, count);
    __syncthreads();
    float all_most[ROWS], sums[ROWS];
    weigh<ROWS>(room, count, all_most, sums);
    add_values<T, ROWS>(c, work, room, count);
#pragma unroll 1
    for (u32 row = 0; row < work.rows; row++) {
        u64 at = (u64)query_of(cut, work, row) * c.query_heads + head_of(cut, work, row);
        at = at * cut.parts + work.part;
#pragma unroll 1
        for (u32 d = threadIdx.x; d < c.value_dim; d += THREADS)
            to.out[at * c.value_dim + d] = room.queries[row * c.value_dim + d];
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

/* What the parts of a row come to. Blocks of threads: queries and heads. */
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

/* What each key got: of the queries of a head, of the heads that share keys, or of all. Blocks of
 * threads: keys, and rows of what is written. */
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
