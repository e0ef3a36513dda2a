/* `Kind::PageBoxes` and `Kind::PageScores`: bounding boxes of the keys of pages, and the maximum
 * product of a query with any key in a box. src/attention/pages.rs defines both. Memory bandwidth
 * limits both kernels. */
#include "device.h"

/* Numbers in 16 bytes. */
template <u32 DTYPE> constexpr u32 in_16 = DTYPE == F32 ? 4 : 8;

template <u32 DTYPE> DEVICE void widen(quad q, float (&x)[in_16<DTYPE>]) {
    const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if constexpr (DTYPE == F32) {
            x[i] = from_bits(words[i]);
        } else if constexpr (DTYPE == F16) {
            x[2 * i] = low_f16(words[i]);
            x[2 * i + 1] = high_f16(words[i]);
        } else {
            x[2 * i] = low_bf16(words[i]);
            x[2 * i + 1] = high_bf16(words[i]);
        }
    }
}

DEVICE float any_one(u32 dtype, const void *from, u32 at) {
    if (dtype == F32) return ((const float *)from)[at];
    u16 half = ((const u16 *)from)[at];
    return dtype == F16 ? from_f16(half) : from_bf16(half);
}

/* ---- Boxes ---- */

/* Rounds to bf16 downwards or upwards, so that a box never shrinks. Truncation alone would round
 * towards 0. */
DEVICE u16 outward(float x, bool is_down) {
    u32 bits = to_bits(x);
    // The GPU's NaN has all bits but the sign set; rounding up would make it a zero.
    if (x != x) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits >> 16) + ((bits & 0xFFFF) != 0 && (bits >> 31 != 0) == is_down));
}

/* A number of a box after a write and a read. */
DEVICE float stored(u32 box, float x, bool is_down) {
    return box == F32 ? x : from_bf16(outward(x, is_down));
}

/* Reads N numbers of a box from `at` on. If N > 1, the address is a multiple of their size. */
template <u32 N> DEVICE void read_box(u32 box, const u8 *row, u32 at, float (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = any_one(box, row, at);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            if (box == F32) {
                quad q = load16(row + 4 * (at + i));
                x[i] = from_bits(q.x), x[i + 1] = from_bits(q.y);
                x[i + 2] = from_bits(q.z), x[i + 3] = from_bits(q.w);
            } else {
                pair p = *(const pair *)(row + 2 * (at + i));
                x[i] = low_bf16(p.x), x[i + 1] = high_bf16(p.x);
                x[i + 2] = low_bf16(p.y), x[i + 3] = high_bf16(p.y);
            }
        }
    }
}

template <u32 N>
DEVICE void write_box(u32 box, u8 *row, u32 at, const float (&x)[N], bool is_down) {
    if constexpr (N == 1) {
        if (box == F32) ((float *)row)[at] = x[0];
        else ((u16 *)row)[at] = outward(x[0], is_down);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            if (box == F32) {
                store16(row + 4 * (at + i),
                        {to_bits(x[i]), to_bits(x[i + 1]), to_bits(x[i + 2]), to_bits(x[i + 3])});
            } else {
                u32 low = outward(x[i], is_down) | (u32)outward(x[i + 1], is_down) << 16;
                u32 high = outward(x[i + 2], is_down) | (u32)outward(x[i + 3], is_down) << 16;
                *(pair *)(row + 2 * (at + i)) = {low, high};
            }
        }
    }
}

/* The call's keys of a page: address of the first, their number, and whether the page is new. */
struct key_run {
    const u8 *key;
    u32 count;
    bool is_new;
};

DEVICE key_run keys_of(const call &c, u64 page, u32 head) {
    u64 begin = page * c.page_tokens;
    u64 from = most<u64>(begin, c.first);
    u64 to = least<u64>(begin + c.page_tokens, (u64)c.first + c.count);
    u64 base = c.keys, at = from - c.first;
    if (c.table != 0) {
        u32 tokens = c.tokens == 0 ? c.page_tokens : c.tokens;
        base += ((const u64 *)c.table)[begin / tokens];
        at = from % tokens;
    }
    const u8 *key = (const u8 *)base + (i64)at * c.key_stride + (i64)head * c.key_head_stride;
    return {key, (u32)(to - from), from == begin};
}

DEVICE u8 *box_at(const call &c, u64 page, u32 head) {
    return (u8 *)c.out + (i64)page * c.out_stride + (i64)head * c.out_head_stride;
}

/* Widens N numbers of a page's box from `d` on, key by key in order: with NaN, or zeros of both
 * signs, the order shows in the result. F32 keys are compared with the stored numbers, which may
 * round to 0. For other types both comparisons end with the same result. */
template <u32 N, bool IS_F32, class Read, class Open>
DEVICE void widen_box(const call &c, u64 page, u32 head, u32 d, Read read, Open open) {
    u8 *row = box_at(c, page, head);
    u32 box = c.other_dtype;
    key_run keys = keys_of(c, page, head);
    auto key = [&](u32 t) { return read(keys.key + (i64)least(t, keys.count - 1) * c.key_stride); };
    auto round = [&](float x, bool is_down) { return IS_F32 ? stored(box, x, is_down) : x; };
    auto now = key(0), next = key(1);
    float low[N], high[N], x[N];
    if (keys.is_new) {
        open(now, x);
#pragma unroll
        for (u32 i = 0; i < N; i++) low[i] = round(x[i], true), high[i] = round(x[i], false);
    } else {
        read_box(box, row, d, low);
        read_box(box, row, c.key_dim + d, high);
    }
#pragma unroll 1
    for (u32 t = 0; t < keys.count; t++) {
        open(now, x);
        // The next two keys load while this one is compared.
        now = next;
        next = key(t + 2);
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            low[i] = x[i] < low[i] ? round(x[i], true) : low[i];
            high[i] = x[i] > high[i] ? round(x[i], false) : high[i];
        }
    }
    write_box(box, row, d, low, true);
    write_box(box, row, c.key_dim + d, high, false);
}

/* Each thread has N numbers of a head of a page; adjacent threads read adjacent numbers. */
template <u32 N, class Widen> DEVICE void boxes(const call &c, Widen widen) {
    u64 first = c.first / c.page_tokens, last = ((u64)c.first + c.count - 1) / c.page_tokens;
    u32 parts = c.key_dim / N;
    u64 page_parts = (u64)c.key_heads * parts, all = (last - first + 1) * page_parts;
    u64 each = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += each) {
        u32 part = (u32)(i % page_parts);
        widen(first + i / page_parts, part / parts, part % parts * N);
    }
}

template <u32 KEY> DEVICE void boxes_of(const call &c) {
    boxes<in_16<KEY>>(c, [&](u64 page, u32 head, u32 d) {
        widen_box<in_16<KEY>, KEY == F32>(
            c, page, head, d,
            [&](const u8 *key) { return load16_once(key + 16 * (d / in_16<KEY>)); },
            [](quad q, float(&x)[in_16<KEY>]) { widen<KEY>(q, x); });
    });
}

/* For heads of a multiple of 16 bytes, aligned to 16. */
extern "C" __global__ void __launch_bounds__(256, 4) page_boxes(const __grid_constant__ call c) {
    if (c.dtype == F32) boxes_of<F32>(c);
    else if (c.dtype == F16) boxes_of<F16>(c);
    else boxes_of<BF16>(c);
}

/* For all other heads. */
extern "C" __global__ void __launch_bounds__(256) page_boxes_odd(const __grid_constant__ call c) {
    boxes<1>(c, [&](u64 page, u32 head, u32 d) {
        widen_box<1, true>(
            c, page, head, d, [&](const u8 *key) { return any_one(c.dtype, key, d); },
            [](float one, float(&x)[1]) { x[0] = one; });
    });
}

/* ---- Scores ----
 *
 * A box is a row of minima followed by maxima. A query becomes a row of its negative numbers
 * followed by its positive ones. The score is the product of both rows. A warp processes PAGES
 * boxes of a head at once, and its lanes share their numbers. ROWS queries of the head are in
 * shared memory, and are read once for all boxes. */

constexpr u32 SCORERS = 128;
/* Boxes of a warp: as many as registers allow. */
template <u32 ROWS> constexpr u32 PAGES = ROWS == 8 ? 4 : 8;

/* Numbers of a box that a warp reads at once. */
template <u32 BOX> constexpr u32 line = WARP * in_16<BOX>;

/* Place of a query's number in shared memory: four numbers of each lane, then the next four.
 * Adjacent lanes then read adjacent 16 bytes. */
template <u32 BOX> DEVICE u32 place(u32 at) {
    u32 of_lane = at % line<BOX> / in_16<BOX>, i = at % in_16<BOX>;
    return at / line<BOX> * line<BOX> + i / 4 * (4 * WARP) + of_lane * 4 + i % 4;
}

/* The query and head of a row. */
struct query_row {
    u32 query, head;
};

/* Query and head of row r of a key head. */
DEVICE query_row query_row_of(const call &c, u32 key_head, u32 r) {
    u32 group = c.query_heads / c.key_heads;
    return {r / group, key_head * group + r % group};
}

template <u32 BOX, u32 ROWS>
DEVICE void put_queries(const call &c, u32 key_head, u32 first, u32 rows, u32 step, float *to) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * step; i += SCORERS) {
        u32 r = i / step, at = i % step, d = at % c.key_dim;
        float x = 0;
        if (r < rows - first && at < 2 * c.key_dim) {
            query_row a = query_row_of(c, key_head, first + r);
            const u8 *query = (const u8 *)c.queries + (i64)a.query * c.query_stride +
                              (i64)a.head * c.query_head_stride;
            x = any_one(c.other_dtype, query, d);
            x = at < c.key_dim ? (x < 0 ? x : 0) : (x > 0 ? x : 0);
        }
        to[r * step + place<BOX>(at)] = x;
    }
}

DEVICE u64 page_at(const call &c, u32 i) {
    return c.index == 0 ? (u64)c.first + i : ((const u32 *)c.index)[i];
}

/* Sums N numbers over the lanes: in each round a lane keeps half of its numbers and passes the
 * other half on. With fewer numbers than lanes, several lanes hold the same sum. Returns the
 * index of the lane's first number. */
template <u32 N> DEVICE u32 sum_lanes(float (&x)[N]) {
    u32 first = 0;
#pragma unroll
    for (u32 bit = WARP / 2, left = N; bit > 0; bit /= 2) {
        if (left == 1) {
            x[0] += across(x[0], bit);
            continue;
        }
        left /= 2;
        bool is_up = lane() & bit;
        first += is_up ? left : 0;
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) {
            if (i >= left) break;
            float keep = is_up ? x[left + i] : x[i], give = is_up ? x[i] : x[left + i];
            x[i] = keep + across(give, bit);
        }
    }
    return first;
}

/* Adds products of a line. Four numbers of each query row stay in registers for all boxes. */
template <u32 BOX, u32 ROWS>
DEVICE void add_line(const quad (&read)[PAGES<ROWS>], const float *queries, u32 step,
                     float (&sums)[PAGES<ROWS> * ROWS]) {
#pragma unroll
    for (u32 i = 0; i < in_16<BOX>; i += 4) {
        quad query[ROWS];
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) query[r] = load16(queries + r * step + i * WARP);
#pragma unroll
        for (u32 p = 0; p < PAGES<ROWS>; p++) {
            float x[in_16<BOX>];
            widen<BOX>(read[p], x);
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                float &sum = sums[p * ROWS + r];
                sum = __fmaf_rn(x[i], from_bits(query[r].x), sum);
                sum = __fmaf_rn(x[i + 1], from_bits(query[r].y), sum);
                sum = __fmaf_rn(x[i + 2], from_bits(query[r].z), sum);
                sum = __fmaf_rn(x[i + 3], from_bits(query[r].w), sum);
            }
        }
    }
}

DEVICE const u8 *box_of(const call &c, u32 key_head, u32 i) {
    return (const u8 *)c.numbers + (i64)page_at(c, i) * c.key_stride +
           (i64)key_head * c.key_head_stride;
}

template <u32 BOX, u32 ROWS>
DEVICE void score_boxes(const call &c, u32 key_head, u32 first, const float *queries, u32 step,
                        float (&sums)[PAGES<ROWS> * ROWS]) {
    u32 own = lane() * in_16<BOX>;
    const u8 *box[PAGES<ROWS>];
#pragma unroll
    for (u32 p = 0; p < PAGES<ROWS>; p++)
        box[p] = box_of(c, key_head, least(first + p, c.count - 1)) + 16 * lane();
#pragma unroll
    for (u32 i = 0; i < PAGES<ROWS> * ROWS; i++) sums[i] = 0;
#pragma unroll 1
    for (u32 at = 0; at < 2 * c.key_dim; at += line<BOX>) {
        quad read[PAGES<ROWS>];
        bool is_there = at + own < 2 * c.key_dim;
#pragma unroll
        for (u32 p = 0; p < PAGES<ROWS>; p++) {
            read[p] = is_there ? load16_once(box[p]) : quad{0, 0, 0, 0};
            box[p] += 16 * WARP;
        }
        add_line<BOX, ROWS>(read, queries + at + lane() * 4, step, sums);
    }
}

template <u32 BOX, u32 ROWS> DEVICE void scores(const call &c) {
    float *queries = (float *)dynamic_shared(), *out = (float *)c.out;
    u32 rows = c.query_count * (c.query_heads / c.key_heads);
    u32 step = ceil_div(2 * c.key_dim, line<BOX>) * line<BOX>, key_head = blockIdx.y;
    u32 each = gridDim.x * (SCORERS / WARP) * PAGES<ROWS>;
    for (u64 row = (u64)blockIdx.z * ROWS; row < rows; row += (u64)gridDim.z * ROWS) {
        __syncthreads();
        put_queries<BOX, ROWS>(c, key_head, (u32)row, rows, step, queries);
        __syncthreads();
        u64 first = (u64)(blockIdx.x * (SCORERS / WARP) + warp()) * PAGES<ROWS>;
        for (; first < c.count; first += each) {
            float sums[PAGES<ROWS> * ROWS];
            score_boxes<BOX, ROWS>(c, key_head, (u32)first, queries, step, sums);
            u32 at = sum_lanes(sums);
            // With fewer numbers than lanes, the first of SAME lanes writes.
            constexpr u32 LEFT = PAGES<ROWS> * ROWS > WARP ? PAGES<ROWS> * ROWS / WARP : 1;
            constexpr u32 SAME = PAGES<ROWS> * ROWS < WARP ? WARP / (PAGES<ROWS> * ROWS) : 1;
#pragma unroll
            for (u32 i = 0; i < LEFT; i++) {
                u64 page = first + (at + i) / ROWS, r = row + (at + i) % ROWS;
                if (page >= c.count || r >= rows || lane() % SAME != 0) continue;
                query_row a = query_row_of(c, key_head, (u32)r);
                out[((u64)a.query * c.query_heads + a.head) * c.count + page] = sums[i];
            }
        }
    }
}

template <u32 ROWS> DEVICE void scores_of(const call &c) {
    if (c.dtype == F32) scores<F32, ROWS>(c);
    else scores<BF16, ROWS>(c);
}

extern "C" __global__ void __launch_bounds__(SCORERS, 4)
page_scores_1(const __grid_constant__ call c) {
    scores_of<1>(c);
}
extern "C" __global__ void __launch_bounds__(SCORERS, 4)
page_scores_4(const __grid_constant__ call c) {
    scores_of<4>(c);
}
extern "C" __global__ void __launch_bounds__(SCORERS, 4)
page_scores_8(const __grid_constant__ call c) {
    scores_of<8>(c);
}

/* For boxes that are no multiple of 16 bytes, or not aligned to 16: one warp per score. */
extern "C" __global__ void __launch_bounds__(256) page_scores_odd(const __grid_constant__ call c) {
    u64 rows = (u64)c.query_count * c.query_heads, each = (u64)gridDim.x * blockDim.x / WARP;
    u64 own = (u64)blockIdx.x * (blockDim.x / WARP) + warp();
    for (u64 i = own; i < rows * c.count; i += each) {
        u64 query = i / c.count / c.query_heads;
        u32 head = (u32)(i / c.count % c.query_heads), page = (u32)(i % c.count);
        const u8 *box = box_of(c, head / (c.query_heads / c.key_heads), page);
        const u8 *row = (const u8 *)c.queries + (i64)query * c.query_stride +
                        (i64)head * c.query_head_stride;
        float sum = 0;
        for (u32 d = lane(); d < c.key_dim; d += WARP) {
            float x = any_one(c.other_dtype, row, d);
            sum = __fmaf_rn(any_one(c.dtype, box, d), x < 0 ? x : 0, sum);
            sum = __fmaf_rn(any_one(c.dtype, box, c.key_dim + d), x > 0 ? x : 0, sum);
        }
        sum = warp_sum(sum);
        if (lane() == 0) ((float *)c.out)[i] = sum;
    }
}
