/* Kernels that show what cpu.cpp does where others rely on it. They are never built for a device. */
#include "device.h"

/* out (16 x 8) = keys (16 x 16) * values (16 x 8), through shared memory. Flag 1: the copies are not
 * waited for. */
extern "C" __global__ void probe_product(const __grid_constant__ call c) {
    alignas(16) __shared__ u16 a[16 * 16];
    alignas(16) __shared__ u16 b[16 * 8];
    copy16(a + 8 * lane(), (const u16 *)c.keys + 8 * lane());
    copy16_or_zero(b + 8 * (lane() % 16), (const u16 *)c.values + 8 * (lane() % 16), true);
    copy_group();
    if (c.flags != 1) copy_wait<0>();
    __syncwarp();
    u32 of_a[4], of_b[2];
    float d[4] = {};
    load_matrix4(of_a, a + lane() % 16 * 16 + lane() / 16 * 8);
    load_matrix2_across(of_b, b + lane() % 16 * 8);
    if (c.dtype == F16) mma_f16(d, of_a, of_b);
    else mma_bf16(d, of_a, of_b);
    float *out = (float *)c.out + lane() / 4 * 8 + lane() % 4 * 2;
    out[0] = d[0], out[1] = d[1], out[64] = d[2], out[65] = d[3];
}

/* What lanes find together: four words each. */
extern "C" __global__ void probe_lanes(const __grid_constant__ call c) {
    u32 *out = (u32 *)c.out + 4 * threadIdx.x;
    out[0] = warp_up_to(lane() + 1);
    out[1] = __ballot_sync(ALL_LANES, lane() % 3 == 0);
    out[2] = (u32)warp_sum<8>((float)lane());
    // Halves of a warp that do different things.
    out[3] = lane() < 16 ? __shfl_xor_sync(0xFFFFu, lane(), 3)
                         : __shfl_up_sync(0xFFFF0000u, lane(), 1, 16);
}

/* 1: a thread ends where others wait; 2: one goes another way than its warp; 3: lanes wait for
 * different things; 4: unwritten shared memory is read; 5: nothing is wrong. */
extern "C" __global__ void probe_wrong(const __grid_constant__ call c) {
    __shared__ u32 word[64];
    if (c.flags == 1 && threadIdx.x == 3) return;
    if (c.flags == 2 && threadIdx.x == 3) __syncthreads();
    if (c.flags == 3 && threadIdx.x == 3) __ballot_sync(ALL_LANES, true);
    __syncwarp();
    if (c.flags != 4) word[threadIdx.x] = threadIdx.x;
    __syncthreads();
    ((u32 *)c.out)[threadIdx.x] = word[blockDim.x - 1 - threadIdx.x];
}
