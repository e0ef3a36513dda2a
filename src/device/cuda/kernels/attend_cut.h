/* How a decode is cut, and where what parts come to is: for all its kernels, of which `decode_join`
 * puts parts together. */
#pragma once

#include "attend.h"

constexpr u32 SHORT_PART = 128, LONG_PART = 512, LONG_FROM = 16384;

/* How a decode is cut: `Cut` of attend_decode.rs. */
struct cut {
    /* Keys that there may be at most, of each part, and parts. */
    u32 keys, part, parts;
    /* Heads that share what is chosen, and rows of them. */
    u32 group, rows;
};

DEVICE cut cut_of(const call &c) {
    cut cut;
    cut.keys = c.count == 0 ? c.tokens : c.keep * c.recent;
    cut.part = cut.keys > LONG_FROM ? LONG_PART : SHORT_PART;
    cut.parts = most(ceil_div(cut.keys, cut.part), 1u);
    cut.group = c.count <= 1 || c.count == c.key_heads ? c.query_heads / c.key_heads : 1;
    cut.rows = c.query_count * cut.group;
    return cut;
}

/* Scratch: results of parts, their most and sum, the log-sum-exps of rows to the base of 2, and
 * products where sums are wanted. Rows are queries, of each all heads. */
struct results {
    float *out, *logs, *all, *products;
};

DEVICE results results_of(const call &c, const cut &cut) {
    u64 rows = (u64)c.query_count * c.query_heads;
    float *out = (float *)c.scratch, *logs = out + rows * cut.parts * c.value_dim;
    float *all = logs + rows * cut.parts * 2;
    return {out, logs, all, all + rows};
}
