/* `Kind::Move`: copies runs of bytes. Pieces have any size, so they are cut into parts of equal
 * size. Each warp copies the same number of consecutive parts, and finds its first by search.
 * Assigning whole pieces to blocks would wait for the largest piece. A search for each part would
 * cost as much as the part. */
#include "plan.h"

struct piece {
    u64 from, to;
    i64 from_stride, to_stride;
    u32 run_bytes, runs;
};

constexpr u32 PART_BYTES = 8192;

DEVICE u64 bytes_of(const piece &p) { return (u64)p.run_bytes * p.runs; }

extern "C" __global__ void __launch_bounds__(PLANNERS) move_plan(const __grid_constant__ call c) {
    __shared__ u64 sums[PLANNERS / WARP];
    const piece *pieces = (const piece *)c.table;
    plan((u64 *)c.scratch, c.count, sums,
         [&](u32 i) { return ceil_div<u64>(bytes_of(pieces[i]), PART_BYTES); });
}

template <class T> DEVICE T read(const T *from) { return *from; }
DEVICE quad read(const quad *from) { return load16_once(from); }
template <class T> DEVICE void write(T *to, T x) { *to = x; }
DEVICE void write(quad *to, quad x) { store16_once(to, x); }

/* Copies a part of a piece in units of T. */
template <class T> DEVICE void move_part(const piece &p, u64 part) {
    constexpr u32 UNROLLED = 4;
    u64 start = part * PART_BYTES;
    u32 units = (u32)(least<u64>(bytes_of(p) - start, PART_BYTES) / sizeof(T));
    u32 run_units = p.run_bytes / sizeof(T);
    u64 run = start / p.run_bytes, at = start % p.run_bytes / sizeof(T);
    // Units left in the run in which the part begins.
    u64 left = run_units - at;
    const u8 *from = (const u8 *)p.from + (i64)run * p.from_stride;
    u8 *to = (u8 *)p.to + (i64)run * p.to_stride;
    for (u32 first = lane(); first < units; first += UNROLLED * WARP) {
        T units_read[UNROLLED];
        u8 *targets[UNROLLED];
#pragma unroll
        for (u32 i = 0; i < UNROLLED; i++) {
            u32 unit = first + i * WARP;
            if (unit >= units) break;
            bool is_first = unit < left;
            u32 beyond = is_first ? 0 : unit - (u32)left;
            u64 next = is_first ? 0 : beyond / run_units + 1;
            u64 column = (is_first ? at + unit : beyond % run_units) * sizeof(T);
            units_read[i] = read((const T *)(from + (i64)next * p.from_stride + column));
            targets[i] = to + (i64)next * p.to_stride + column;
        }
#pragma unroll
        for (u32 i = 0; i < UNROLLED; i++)
            if (first + i * WARP < units) write((T *)targets[i], units_read[i]);
    }
}

/* Copies all parts, each with the widest unit that its addresses allow. */
extern "C" __global__ void __launch_bounds__(256) move_parts(const __grid_constant__ call c) {
    const piece *pieces = (const piece *)c.table;
    const u64 *before = (const u64 *)c.scratch;
    share own = share_of(before[c.count]);
    if (own.from == own.to) return;
    u32 at = piece_of(before, c.count, own.from);
    for (u64 part = own.from; part < own.to; part++) {
        while (before[at + 1] <= part) at++;
        piece p = pieces[at];
        u64 bits = p.from | p.to | p.run_bytes;
        if (p.runs > 1) bits |= (u64)p.from_stride | (u64)p.to_stride;
        u64 own_part = part - before[at];
        if (bits % 16 == 0) move_part<quad>(p, own_part);
        else if (bits % 8 == 0) move_part<u64>(p, own_part);
        else if (bits % 4 == 0) move_part<u32>(p, own_part);
        else if (bits % 2 == 0) move_part<u16>(p, own_part);
        else move_part<u8>(p, own_part);
    }
}
