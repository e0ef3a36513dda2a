/* Partition of a decode, and the layout of its partial results. All decode kernels use it;
 * `decode_join` combines the parts. */
#pragma once

#include "attend.h"

constexpr u32 SHORT_PART = 128, LONG_PART = 512, LONG_FROM = 16384;

/* Partition of a decode: `Cut` of attend_decode.rs. */
struct cut {
    /* Maximum of keys, keys of a part, number of parts. */
    u32 keys, part, parts;
    /* Heads that share the chosen keys, and their rows. */
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

/* Scratch memory: results of the parts, maximum and sum of each part, log-sum-exps of rows to base
 * 2, and the products if weights are requested. A row is one head of one query. */
struct results {
    float *out, *logs, *all, *products;
};

DEVICE results results_of(const call &c, const cut &cut) {
    u64 rows = (u64)c.query_count * c.query_heads;
    float *out = (float *)c.scratch, *logs = out + rows * cut.parts * c.value_dim;
    float *all = logs + rows * cut.parts * 2;
    return {out, logs, all, all + rows};
}
