/* Work plan for pieces of unequal size: the number of parts before each piece. With it, warps share
 * all parts evenly. */
#pragma once

#include "device.h"

constexpr u32 PLANNERS = 1024;
/* Consecutive pieces that one planning thread reads in a round. */
constexpr u32 EACH = 4;

/* Exclusive prefix sum: `before[i]` becomes the parts of all pieces before i, `before[count]` the
 * total. Runs in one block of PLANNERS threads. `sums` is shared memory, one number per warp. */
template <class Parts> DEVICE void plan(u64 *before, u32 count, u64 *sums, Parts parts) {
    u64 done = 0;
    for (u64 first = 0; first < count; first += PLANNERS * EACH) {
        u64 from = first + threadIdx.x * EACH, own[EACH], total = 0;
        for (u32 i = 0; i < EACH; i++) {
            own[i] = from + i < count ? parts((u32)(from + i)) : 0;
            total += own[i];
        }
        u64 up_to = warp_up_to(total);
        if (lane() == WARP - 1) sums[warp()] = up_to;
        __syncthreads();
        u64 at = done + up_to - total;
        for (u32 i = 0; i < PLANNERS / WARP; i++) {
            at += i < warp() ? sums[i] : 0;
            done += sums[i];
        }
        for (u32 i = 0; i < EACH; i++) {
            if (from + i < count) before[from + i] = at;
            at += own[i];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) before[count] = done;
}

/* A range of parts that one warp processes. */
struct share {
    u64 from, to;
};

/* This warp's share of all parts. */
DEVICE share share_of(u64 all) {
    u32 warps = blockDim.x / WARP;
    u64 one = (u64)blockIdx.x * warps + warp(), each = (u64)gridDim.x * warps;
    return {all / each * one + least(one, all % each),
            all / each * (one + 1) + least(one + 1, all % each)};
}

/* The piece that a part belongs to: the last one that begins at the part or before it. */
DEVICE u32 piece_of(const u64 *before, u32 count, u64 part) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (before[middle] <= part) low = middle;
        else high = middle;
    }
    return low;
}
