/* `Kind::Convert`: converts numbers to another type, with or without scales. A warp converts a row,
 * which is one head of one token. A lane converts four numbers at a time if the row is aligned. */
#include "device.h"

/* Flag: scales are given. */
enum { GIVEN = 1 };

struct four {
    float x[4];
};

DEVICE u32 size_of(u32 dtype) { return dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1; }

DEVICE float read_one(u32 dtype, const u8 *at) {
    switch (dtype) {
    case F32: return *(const float *)at;
    case F16: return from_f16(*(const u16 *)at);
    case BF16: return from_bf16(*(const u16 *)at);
    case F8_E4M3: return from_e4m3(*at);
    case F8_E5M2: return from_e5m2(*at);
    default: return (float)*(const signed char *)at;
    }
}

/* Rounds to the nearest integer, ties to even; saturates at -127 and 127. NaN becomes 0. */
DEVICE u8 to_i8(float x) {
    // After this addition the low bits are the integer, as in src/format/codec/int8.rs.
    constexpr float ROUND = 12582912.0f;
    x = x < -127.0f ? -127.0f : x;
    x = x > 127.0f ? 127.0f : x;
    return x == x ? (u8)to_bits(add_rounded(x, ROUND)) : 0;
}

DEVICE void write_one(u32 dtype, u8 *at, float x) {
    switch (dtype) {
    case F32: *(float *)at = x; break;
    case F16: *(u16 *)at = to_f16(x); break;
    case BF16: *(u16 *)at = to_bf16(x); break;
    case F8_E4M3: *at = to_e4m3(x); break;
    case F8_E5M2: *at = to_e5m2(x); break;
    default: *at = to_i8(x); break;
    }
}

DEVICE four read_four(u32 dtype, const u8 *at) {
    if (dtype == F32) {
        quad q = load16_once(at);
        return {{from_bits(q.x), from_bits(q.y), from_bits(q.z), from_bits(q.w)}};
    }
    if (dtype == F16 || dtype == BF16) {
        pair p = *(const pair *)at;
        if (dtype == F16) return {{low_f16(p.x), high_f16(p.x), low_f16(p.y), high_f16(p.y)}};
        return {{low_bf16(p.x), high_bf16(p.x), low_bf16(p.y), high_bf16(p.y)}};
    }
    u32 word = *(const u32 *)at;
    four all;
    for (u32 i = 0; i < 4; i++) {
        u8 code = (u8)(word >> 8 * i);
        all.x[i] = dtype == F8_E4M3   ? from_e4m3(code)
                   : dtype == F8_E5M2 ? from_e5m2(code)
                                      : (float)(signed char)code;
    }
    return all;
}

DEVICE void write_four(u32 dtype, u8 *at, const four &all) {
    const float *x = all.x;
    if (dtype == F32) {
        store16(at, {to_bits(x[0]), to_bits(x[1]), to_bits(x[2]), to_bits(x[3])});
    } else if (dtype == F16) {
        *(pair *)at = {two_f16(x[0], x[1]), two_f16(x[2], x[3])};
    } else if (dtype == BF16) {
        *(pair *)at = {two_bf16(x[0], x[1]), two_bf16(x[2], x[3])};
    } else {
        u32 word = 0;
        for (u32 i = 0; i < 4; i++) {
            u8 code = dtype == F8_E4M3   ? to_e4m3(x[i])
                      : dtype == F8_E5M2 ? to_e5m2(x[i])
                                         : to_i8(x[i]);
            word |= (u32)code << 8 * i;
        }
        *(u32 *)at = word;
    }
}

/* The largest finite number of an 8-bit type. */
DEVICE float greatest(u32 dtype) {
    return dtype == F8_E4M3 ? 448.0f : dtype == F8_E5M2 ? 57344.0f : 127.0f;
}

/* The inverse of a scale; 0 for a scale below the smallest normal number. */
DEVICE float inverse(float scale) {
    return scale >= 1.17549435e-38f ? __fdiv_rn(1.0f, scale) : 0.0f;
}

DEVICE bool is_narrow(u32 dtype) { return size_of(dtype) == 1; }

struct row {
    const u8 *from;
    u8 *to;
    u64 token;
    u32 head;
    /* Four numbers are contiguous and aligned on both sides. */
    bool is_even;
};

DEVICE row row_of(const call &c, u64 i) {
    row r;
    r.token = i / c.key_heads;
    r.head = (u32)(i % c.key_heads);
    u64 base = c.keys, at = r.token;
    if (c.table != 0) {
        u64 place = r.token + c.first;
        base += ((const u64 *)c.table)[place / c.page_tokens];
        at = place % c.page_tokens;
    }
    r.from = (const u8 *)base + (i64)at * c.key_stride + (i64)r.head * c.key_head_stride;
    r.to = (u8 *)c.out + (i64)r.token * c.out_stride + (i64)r.head * c.out_head_stride;
    r.is_even = c.key_dim % 4 == 0 && (u64)r.from % (4 * size_of(c.dtype)) == 0 &&
                (u64)r.to % (4 * size_of(c.other_dtype)) == 0;
    return r;
}

DEVICE u64 rows_of(const call &c) { return (u64)c.count * c.key_heads; }
DEVICE u64 first_row() { return (u64)blockIdx.x * (blockDim.x / WARP) + warp(); }
DEVICE u64 all_warps() { return (u64)gridDim.x * (blockDim.x / WARP); }

/* Four numbers of a row; 0 past its end. */
DEVICE four numbers(const call &c, const row &r, u32 d) {
    if (r.is_even) return read_four(c.dtype, r.from + d * size_of(c.dtype));
    four all = {};
    for (u32 i = 0; i < 4; i++)
        if (d + i < c.key_dim) all.x[i] = read_one(c.dtype, r.from + (d + i) * size_of(c.dtype));
    return all;
}

DEVICE float larger(float most, float x) { return fabsf(x) > most ? fabsf(x) : most; }

DEVICE float largest_of(const call &c, const row &r) {
    float most = 0;
    for (u32 d = 4 * lane(); d < c.key_dim; d += 4 * WARP) {
        four all = numbers(c, r, d);
        for (u32 i = 0; i < 4; i++) most = larger(most, all.x[i]);
    }
    return warp_most(most);
}

/* The factors of numbers d to d + 3. */
DEVICE four factors(const call &c, const row &r, u32 d, float shared, bool is_inverse) {
    four all = {{shared, shared, shared, shared}};
    if (c.scaling != SCALES_CHANNEL) return all;
    const float *scales = (const float *)c.scales + (u64)r.head * c.key_dim;
    for (u32 i = 0; i < 4; i++) {
        if (d + i >= c.key_dim) break;
        all.x[i] = is_inverse ? inverse(scales[d + i]) : scales[d + i];
    }
    return all;
}

DEVICE void convert_row(const call &c, const row &r, float shared, bool is_inverse) {
    for (u32 d = 4 * lane(); d < c.key_dim; d += 4 * WARP) {
        four all = numbers(c, r, d), by = factors(c, r, d, shared, is_inverse);
        if (c.scaling != SCALES_NONE)
            for (u32 i = 0; i < 4; i++) all.x[i] = mul_rounded(all.x[i], by.x[i]);
        u8 *to = r.to + d * size_of(c.other_dtype);
        if (r.is_even) {
            write_four(c.other_dtype, to, all);
            continue;
        }
        for (u32 i = 0; i < 4 && d + i < c.key_dim; i++)
            write_one(c.other_dtype, to + i * size_of(c.other_dtype), all.x[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256) convert_rows(const __grid_constant__ call c) {
    bool is_inverse = is_narrow(c.other_dtype);
    for (u64 i = first_row(); i < rows_of(c); i += all_warps()) {
        row r = row_of(c, i);
        float shared = 1;
        if (c.scaling == SCALES_TOKEN) {
            float *scale = (float *)c.scales + i;
            if (is_inverse && !(c.flags & GIVEN)) {
                shared = __fdiv_rn(largest_of(c, r), greatest(c.other_dtype));
                if (lane() == 0) *scale = shared;
            } else {
                shared = *scale;
            }
            shared = is_inverse ? inverse(shared) : shared;
        }
        convert_row(c, r, shared, is_inverse);
    }
}

/* Scales by channel take three kernels: clear, find the largest magnitudes, divide them. */
extern "C" __global__ void __launch_bounds__(256) convert_clear(const __grid_constant__ call c) {
    u64 all = (u64)c.key_heads * c.key_dim, each = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += each)
        ((u32 *)c.scales)[i] = 0;
}

/* A warp compares 128 numbers of a head, in every `lines`th token. Magnitudes of floats compare
 * like their bits. */
extern "C" __global__ void __launch_bounds__(256) convert_largest(const __grid_constant__ call c) {
    u32 parts = ceil_div<u32>(c.key_dim, 4 * WARP);
    u64 columns = (u64)c.key_heads * parts, lines = all_warps() / columns;
    u64 own = first_row();
    if (own >= lines * columns) return;
    u32 column = (u32)(own % columns), head = column / parts;
    u32 d = column % parts * (4 * WARP) + 4 * lane();
    if (d >= c.key_dim) return;
    four most = {};
    for (u64 token = own / columns; token < c.count; token += lines) {
        four all = numbers(c, row_of(c, token * c.key_heads + head), d);
        for (u32 i = 0; i < 4; i++) most.x[i] = larger(most.x[i], all.x[i]);
    }
    u32 *to = (u32 *)c.scales + (u64)head * c.key_dim + d;
    for (u32 i = 0; i < 4 && d + i < c.key_dim; i++) atomicMax(to + i, to_bits(most.x[i]));
}

extern "C" __global__ void __launch_bounds__(256) convert_divide(const __grid_constant__ call c) {
    u64 all = (u64)c.key_heads * c.key_dim, each = (u64)gridDim.x * blockDim.x;
    float *scales = (float *)c.scales;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += each)
        scales[i] = __fdiv_rn(scales[i], greatest(c.other_dtype));
}
