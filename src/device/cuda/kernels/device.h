/* Helpers of all kernels: number formats, warps, memory, tensor cores. They include no CUDA header,
 * because NVRTC comes without them. With EMULATED the same sources compile for the CPU, and
 * ffi-tests/cuda/kernels/cpu.h emulates the device's instructions. */
#pragma once

#include "call.h"

#ifdef EMULATED
#include "cpu.h"
#else
#define DEVICE static __device__ __forceinline__
#endif

constexpr u32 ALL_LANES = 0xFFFFFFFFu;
constexpr u32 WARP = 32;

/* 16 bytes: one load or store. */
struct alignas(16) quad {
    u32 x, y, z, w;
};
struct alignas(8) pair {
    u32 x, y;
};

template <class T> DEVICE T least(T a, T b) { return b < a ? b : a; }
template <class T> DEVICE T most(T a, T b) { return a < b ? b : a; }
template <class T> DEVICE T ceil_div(T a, T b) { return (a + b - 1) / b; }

DEVICE u32 lane() { return threadIdx.x % WARP; }
DEVICE u32 warp() { return threadIdx.x / WARP; }

/* Dynamic shared memory: the `shared_bytes` of the launch. The name is the same in all kernels. */
#ifdef EMULATED
DEVICE u8 *dynamic_shared() { return cpu_dynamic(); }
#else
extern __shared__ quad dynamic_memory[];
DEVICE u8 *dynamic_shared() { return (u8 *)dynamic_memory; }
#endif

/* ---- Numbers ---- */

DEVICE float from_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 to_bits(float x) { return __float_as_uint(x); }

/* The compiler never fuses these two into a multiply-add. */
DEVICE float mul_rounded(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rounded(float a, float b) { return __fadd_rn(a, b); }

DEVICE float from_bf16(u16 half) { return from_bits((u32)half << 16); }
/* The halves of a word: low is the number at the lower address. */
DEVICE float low_bf16(u32 word) { return from_bits(word << 16); }
DEVICE float high_bf16(u32 word) { return from_bits(word & 0xFFFF0000u); }

#ifdef EMULATED
DEVICE float from_f16(u16 half) { return cpu_from_f16(half); }
DEVICE u16 to_f16(float x) { return cpu_to_f16(x); }
DEVICE u16 to_bf16(float x) { return cpu_to_bf16(x); }
DEVICE u32 two_f16(float low, float high) { return to_f16(low) | (u32)to_f16(high) << 16; }
DEVICE u32 two_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
DEVICE float exp2_near(float x) { return cpu_exp2(x); }
DEVICE float log2_near(float x) { return cpu_log2(x); }
#else
DEVICE float from_f16(u16 half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
/* Rounds to nearest, ties to even. NaN becomes some NaN. */
DEVICE u16 to_f16(float x) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
DEVICE u16 to_bf16(float x) {
    u16 half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
DEVICE u32 two_f16(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE u32 two_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
/* Relative error about 2e-7; subnormal results become 0. */
DEVICE float exp2_near(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_near(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

DEVICE float low_f16(u32 word) { return from_f16((u16)word); }
DEVICE float high_f16(u32 word) { return from_f16((u16)(word >> 16)); }

/* 8 bits: sign, 4 of exponent, 3 of mantissa. There is no infinity; 0x7F is NaN. */
DEVICE float from_e4m3(u8 code) {
    // The same bits read as a binary16 are 2^8 too small.
    u16 half = (u16)((code & 0x80) << 8 | (code & 0x7F) << 7);
    float x = mul_rounded(from_f16(half), 256.0f);
    return (code & 0x7F) == 0x7F ? from_bits(0x7FC00000u) : x;
}

/* Rounds to nearest, ties to even; saturates at 448. */
DEVICE u8 to_e4m3(float x) {
    u32 bits = to_bits(x), size = bits & 0x7FFFFFFFu;
    u8 sign = (u8)(bits >> 24 & 0x80);
    // Subnormal results have steps of 2^-9 below 2^-6: adding 2^14 leaves them in the last bits.
    u32 small = to_bits(add_rounded(from_bits(size), 16384.0f)) - 0x46800000u;
    u32 normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    u32 code = size < 0x3C800000u ? small : normal;
    code = size >= 0x43E00000u ? 0x7Eu : code;
    return sign | (u8)(size > 0x7F800000u ? 0x7Fu : code);
}

/* 8 bits: sign, 5 of exponent, 2 of mantissa. These are the upper half of a binary16. */
DEVICE float from_e5m2(u8 code) { return from_f16((u16)(code << 8)); }

/* Rounds to nearest, ties to even; saturates at 57344. */
DEVICE u8 to_e5m2(float x) {
    u32 bits = to_bits(x), size = bits & 0x7FFFFFFFu;
    u8 sign = (u8)(bits >> 24 & 0x80);
    // Subnormal results have steps of 2^-16 below 2^-14.
    u32 small = to_bits(add_rounded(from_bits(size), 128.0f)) - 0x43000000u;
    u32 normal = ((size + 0xFFFFF + (size >> 21 & 1)) >> 21) - ((127 - 15) << 2);
    u32 code = size < 0x38800000u ? small : normal;
    code = size >= 0x47600000u ? 0x7Bu : code;
    return sign | (u8)(size > 0x7F800000u ? 0x7Fu : code);
}

/* ---- Lanes of a warp. All named lanes must take part. ---- */

template <class T> DEVICE T from_lane(T x, u32 from) { return __shfl_sync(ALL_LANES, x, from); }
template <class T> DEVICE T across(T x, u32 bit) { return __shfl_xor_sync(ALL_LANES, x, bit); }

/* Reductions over groups of WIDTH adjacent lanes; every lane gets the result. */
template <u32 WIDTH = WARP> DEVICE float warp_sum(float x) {
    for (u32 bit = WIDTH / 2; bit > 0; bit /= 2) x += across(x, bit);
    return x;
}
template <u32 WIDTH = WARP> DEVICE u32 warp_sum(u32 x) {
    for (u32 bit = WIDTH / 2; bit > 0; bit /= 2) x += across(x, bit);
    return x;
}
template <u32 WIDTH = WARP, class T> DEVICE T warp_most(T x) {
    for (u32 bit = WIDTH / 2; bit > 0; bit /= 2) x = most(x, across(x, bit));
    return x;
}
template <u32 WIDTH = WARP, class T> DEVICE T warp_least(T x) {
    for (u32 bit = WIDTH / 2; bit > 0; bit /= 2) x = least(x, across(x, bit));
    return x;
}

/* Inclusive prefix sum over the lanes. */
template <class T> DEVICE T warp_up_to(T x) {
    for (u32 bit = 1; bit < WARP; bit *= 2) {
        T before = __shfl_up_sync(ALL_LANES, x, bit);
        x += lane() >= bit ? before : 0;
    }
    return x;
}

/* ---- Memory ---- */

DEVICE quad load16(const void *from) { return *(const quad *)from; }
DEVICE void store16(void *to, quad x) { *(quad *)to = x; }

/* Streaming access: data that is used once does not evict other data from the caches. Nothing may
 * write memory that load16_once reads while the kernel runs. */
#ifdef EMULATED
DEVICE quad load16_once(const void *from) { return *(const quad *)from; }
DEVICE void store16_once(void *to, quad x) { *(quad *)to = x; }
#else
DEVICE quad load16_once(const void *from) {
    quad x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}
DEVICE void store16_once(void *to, quad x) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
#endif

/* ---- Asynchronous copies into shared memory ---- */

#ifdef EMULATED
DEVICE void copy16(void *to, const void *from) { cpu_copy16(to, from, true); }
DEVICE void copy16_or_zero(void *to, const void *from, bool valid) { cpu_copy16(to, from, valid); }
DEVICE void copy_group() { cpu_copy_group(); }
template <int LEFT> DEVICE void copy_wait() { cpu_copy_wait(LEFT); }
#else
DEVICE u32 shared_address(const void *at) {
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(at));
    return (u32)address;
}
/* Copies 16 bytes; both addresses are multiples of 16. */
DEVICE void copy16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
/* Writes zeros if not `valid`. `from` is then not read, but must still be a device address. */
DEVICE void copy16_or_zero(void *to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
/* Ends a group of this thread's copies. */
DEVICE void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits for all but the LEFT newest groups of this thread. Other threads see the copies after a
 * barrier. */
template <int LEFT> DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#endif

/* ---- Tensor cores. With g = lane / 4 and t = lane % 4, lanes hold (PTX ISA, m16n8k16):
 * a (16 x 16): a[0] row g, columns 2t and 2t + 1; a[1] row g + 8; a[2] as a[0], 8 columns on; a[3]
 * as a[1], 8 columns on. b (16 x 8): b[0] rows 2t and 2t + 1 of column g; b[1] 8 rows on.
 * d (16 x 8): d[0], d[1] row g, columns 2t and 2t + 1; d[2], d[3] row g + 8. ---- */

#ifdef EMULATED
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { cpu_mma(d, a, b, 0); }
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { cpu_mma(d, a, b, 1); }
DEVICE void load_matrix4(u32 (&r)[4], const void *row) { cpu_load_matrix(r, row, 4, 0); }
DEVICE void load_matrix4_across(u32 (&r)[4], const void *row) { cpu_load_matrix(r, row, 4, 1); }
DEVICE void load_matrix2(u32 (&r)[2], const void *row) { cpu_load_matrix(r, row, 2, 0); }
DEVICE void load_matrix2_across(u32 (&r)[2], const void *row) { cpu_load_matrix(r, row, 2, 1); }
#else
/* d += a * b. */
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* Loads four matrices of 8 x 8 16-bit numbers from shared memory. Lane 8m + i passes the address of
 * row i of matrix m, a multiple of 16. r[m] receives row lane / 4, columns 2 (lane % 4) and up. */
DEVICE void load_matrix4(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
/* The same, transposed. */
DEVICE void load_matrix4_across(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
/* Loads two matrices: lanes 0 to 15 pass addresses, those of other lanes are ignored. */
DEVICE void load_matrix2(u32 (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_matrix2_across(u32 (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
#endif
