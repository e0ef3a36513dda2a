/* What a device has of its own, for kernels that are compiled for a processor (`EMULATED`): a block
 * at a time, a fiber a thread. Lanes of a warp meet where an instruction is the warp's, threads of
 * a block at barriers; who does not come where others wait, or has ended, fails the launch.
 *
 * Shared memory is full of 0xDB when a block begins. That of templates is not: declare it in
 * functions. What `copy16` copies arrives when it is waited for, and is 0xDB until then.
 *
 * Compile with -ffp-contract=off: what is fused on a device is rounded twice here, or is `fmaf`. */
#pragma once

#include <math.h>
#include <string.h>

#include "call.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("shared_memory")))
#define DEVICE static inline

struct cpu_place {
    unsigned x, y, z;
};
extern cpu_place cpu_thread, cpu_block, cpu_block_size, cpu_grid_size;
#define threadIdx cpu_thread
#define blockIdx cpu_block
#define blockDim cpu_block_size
#define gridDim cpu_grid_size

/* What lanes do together: called once, when all named have come, with what each of them gave. */
typedef void (*cpu_together)(void *const *lanes, u32 mask);
void cpu_collect(cpu_together what, u32 mask, void *mine);
void cpu_barrier();
void cpu_fail(const char *words);
unsigned char *cpu_dynamic();
unsigned cpu_lane();

void cpu_copy16(void *to, const void *from, bool is);
void cpu_copy_group();
void cpu_copy_wait(unsigned left);
void cpu_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], int is_bf16);
void cpu_load_matrix(u32 *to, const void *row, u32 count, int is_across);

float cpu_from_f16(u16 half);
u16 cpu_to_f16(float x);
u16 cpu_to_bf16(float x);
inline float cpu_exp2(float x) { return exp2f(x); }
inline float cpu_log2(float x) { return log2f(x); }

/* ---- What is built into compilers of device code ---- */

inline float __uint_as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 __float_as_uint(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline u64 __umul64hi(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline int __clz(u32 x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline u32 __brev(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline u32 __byte_perm(u32 low, u32 high, u32 pick) {
    u64 bytes = (u64)high << 32 | low;
    u32 y = 0;
    for (int i = 0; i < 4; i++) y |= (u32)(bytes >> 8 * (pick >> 4 * i & 7) & 0xFF) << 8 * i;
    return y;
}

inline void __syncthreads() { cpu_barrier(); }
inline void __threadfence() {}
inline void __threadfence_block() {}

inline void __syncwarp(u32 mask = 0xFFFFFFFFu) {
    cpu_collect([](void *const *, u32) {}, mask, nullptr);
}

struct cpu_vote {
    u32 is, all, any;
};
inline cpu_vote cpu_ask(u32 mask, bool is) {
    cpu_vote mine = {is, 0, 0};
    auto meet = [](void *const *lanes, u32 mask) {
        u32 yes = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) yes |= ((cpu_vote *)lanes[i])->is << i;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) ((cpu_vote *)lanes[i])->any = yes;
    };
    cpu_collect(meet, mask, &mine);
    mine.all = mine.any == mask;
    return mine;
}
inline u32 __ballot_sync(u32 mask, bool is) { return cpu_ask(mask, is).any; }
inline bool __any_sync(u32 mask, bool is) { return cpu_ask(mask, is).any != 0; }
inline bool __all_sync(u32 mask, bool is) { return cpu_ask(mask, is).all != 0; }
/* Only the lane itself is known to be here. */
inline u32 __activemask() { return 1u << cpu_lane(); }

template <class T> struct cpu_given {
    T x, got;
    u32 from;
};
/* A lane that does not take part gives no value: a lane that reads it gets back its own value. */
template <class T> T cpu_shuffle(u32 mask, T x, u32 from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what a shuffle moves");
    cpu_given<T> mine = {x, x, from};
    auto meet = [](void *const *lanes, u32 mask) {
        for (int i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            cpu_given<T> *lane = (cpu_given<T> *)lanes[i];
            if (!(mask >> lane->from & 1)) cpu_fail("a shuffle reads a lane that is not in it");
            lane->got = ((cpu_given<T> *)lanes[lane->from])->x;
        }
    };
    cpu_collect(meet, mask, &mine);
    return mine.got;
}
template <class T> T __shfl_sync(u32 mask, T x, u32 from, u32 width = 32) {
    return cpu_shuffle(mask, x, (cpu_lane() & ~(width - 1)) | (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(u32 mask, T x, u32 bit, u32 width = 32) {
    u32 from = cpu_lane() ^ bit;
    return cpu_shuffle(mask, x, from / width <= cpu_lane() / width ? from : cpu_lane());
}
template <class T> T __shfl_up_sync(u32 mask, T x, u32 by, u32 width = 32) {
    u32 lane = cpu_lane();
    return cpu_shuffle(mask, x, lane % width >= by ? lane - by : lane);
}
template <class T> T __shfl_down_sync(u32 mask, T x, u32 by, u32 width = 32) {
    u32 lane = cpu_lane();
    return cpu_shuffle(mask, x, lane % width + by < width ? lane + by : lane);
}
template <class T> u32 __match_any_sync(u32 mask, T x) {
    cpu_given<T> mine = {x, x, 0};
    auto meet = [](void *const *lanes, u32 mask) {
        for (int i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            cpu_given<T> *lane = (cpu_given<T> *)lanes[i];
            for (int j = 0; j < 32; j++) {
                bool is_same = mask >> j & 1 && ((cpu_given<T> *)lanes[j])->x == lane->x;
                lane->from |= (u32)is_same << j;
            }
        }
    };
    cpu_collect(meet, mask, &mine);
    return mine.from;
}
inline u32 __reduce_add_sync(u32 mask, u32 x) {
    cpu_given<u32> mine = {x, 0, 0};
    auto meet = [](void *const *lanes, u32 mask) {
        u32 sum = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) sum += ((cpu_given<u32> *)lanes[i])->x;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) ((cpu_given<u32> *)lanes[i])->got = sum;
    };
    cpu_collect(meet, mask, &mine);
    return mine.got;
}

template <class T> T cpu_exchange(T *at, T now) {
    T before = *at;
    *at = now;
    return before;
}
template <class T> T atomicAdd(T *at, T x) { return cpu_exchange(at, (T)(*at + x)); }
template <class T> T atomicMax(T *at, T x) { return cpu_exchange(at, *at < x ? x : *at); }
template <class T> T atomicMin(T *at, T x) { return cpu_exchange(at, x < *at ? x : *at); }
template <class T> T atomicOr(T *at, T x) { return cpu_exchange(at, (T)(*at | x)); }
template <class T> T atomicAnd(T *at, T x) { return cpu_exchange(at, (T)(*at & x)); }
template <class T> T atomicExch(T *at, T x) { return cpu_exchange(at, x); }
template <class T> T atomicCAS(T *at, T is, T x) { return cpu_exchange(at, *at == is ? x : *at); }
