/* Work of unequal pieces: how many parts come before each piece, so that warps can share all parts
 * evenly, whatever the pieces are. */
#pragma once

#include "device.h"

constexpr u32 PLANNERS = 1024;
/* Pieces that a thread of the plan looks at in a row. */
constexpr u32 EACH = 4;

/* `before[i]` becomes the sum of `parts` of the pieces before i, `before[count]` of all. One block
 * of PLANNERS; `sums` is shared memory, one a warp. */
template <class Parts> DEVICE void plan(u64 *before, u32 count, u64 *sums, Parts parts) {
    u64 done = 0;
    for (u64 first = 0; first < count; first += PLANNERS * EACH) {
        u64 from = first + threadIdx.x * EACH, own[EACH], mine = 0;
        for (u32 i = 0; i < EACH; i++) {
            own[i] = from + i < count ? parts((u32)(from + i)) : 0;
            mine += own[i];
        }
        u64 up_to = warp_up_to(mine);
        if (lane() == WARP - 1) sums[warp()] = up_to;
        __syncthreads();
        u64 at = done + up_to - mine;
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

/* The parts that are this warp's, of all. */
struct share {
    u64 from, to;
};

DEVICE share share_of(u64 all) {
    u32 warps = blockDim.x / WARP;
    u64 one = (u64)blockIdx.x * warps + warp(), each = (u64)gridDim.x * warps;
    return {all / each * one + least(one, all % each),
            all / each * (one + 1) + least(one + 1, all % each)};
}

/* The last piece that begins at a part or before it: the one that the part is of. */
DEVICE u32 piece_of(const u64 *before, u32 count, u64 part) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (before[middle] <= part) low = middle;
        else high = middle;
    }
    return low;
}
