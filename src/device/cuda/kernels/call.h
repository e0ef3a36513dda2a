/* Argument of a kernel: the same 256 bytes as `Call` of src/device/call.rs.
 *
 * Addresses are device addresses, or host addresses that the device can reach. Strides are in
 * bytes and may be negative; a stride is 0 where its dimension has length 1. Numbers, their
 * addresses and their strides are aligned to the size of the number. Fields that a kernel does
 * not name are 0. Outputs do not overlap inputs.
 *
 * MOVE: copies runs of bytes.
 *   table      `count` pieces, aligned to 8 bytes, each: u64 from, u64 to, i64 from_stride,
 *              i64 to_stride, u32 run_bytes, u32 runs. Run r of a piece is copied from `from + r *
 *              from_stride` to `to + r * to_stride`. Where addresses, strides and `run_bytes` are
 *              multiples of 16, 16 bytes are copied at once. Other values are valid but slower.
 *   count      1 or more.
 *   keep       limit: blocks of 256 threads; 0 = enough to fill a large device.
 *   scratch    8 * (count + 1) bytes, aligned to 8 bytes.
 *
 * CONVERT: converts numbers to another type. Rows are [count, key_heads, key_dim].
 *   keys       input: numbers of the first token, of type `dtype`: any but BYTES and I4.
 *              `key_stride` from token to token, `key_head_stride` from head to head.
 *   table      0, or addresses of blocks of `page_tokens` tokens: token i is then at place
 *              `first + i` of the blocks. `keys` is added to each block's address.
 *   out        output, of type `other_dtype`; `out_stride`, `out_head_stride`.
 *   scaling    SCALES_*; with scales, one of the two types has 8 bits and the other has more.
 *   scales     f32, [count, key_heads] or [key_heads, key_dim]. A conversion to 8 bits writes them:
 *              the largest magnitude divided by 127 (F8_E4M3: 448, F8_E5M2: 57344). With flag 1 it
 *              reads given scales. A conversion from 8 bits reads them.
 *   To 8 bits a number is multiplied by the inverse of its scale; from 8 bits, by its scale. The
 *   inverse is 0 where the scale is below the smallest normal number. Results are rounded to
 *   nearest, ties to even. I8 saturates at -127 and 127, F8 at its largest finite number. NaN does
 *   not count for scales, and becomes 0 as I8.
 *
 * SUM: the checksum of src/base/checksum.rs, of many ranges.
 *   table      `count` ranges, aligned to 8 bytes, each: u64 address, u64 bytes. Any address and
 *              any length are valid; at a multiple of 8 the kernel reads eight bytes at once.
 *   count      1 or more.
 *   out        `count` sums, u64, aligned to 8 bytes.
 *   scratch    8 * (count + 1) bytes, and 8 bytes for each started 4096 bytes of each range;
 *              aligned to 8 bytes. If it is too small for the ranges, all sums are 0.
 *
 * PAGE_BOXES: `extend` of src/attention/pages.rs: widens minima and maxima of pages.
 *   keys       F32, F16 or BF16 by `dtype`: `count` keys from position `first` on, [count,
 *              key_heads, key_dim], key_dim up to 1024; `key_stride`, `key_head_stride`. Without a
 *              table: the address of the first of these keys.
 *   table      0, or addresses of blocks of `tokens` tokens (0 = page_tokens; else a multiple of
 *              page_tokens): position p is in block p / tokens. `keys` is added to each block's
 *              address.
 *   flags      1: addresses in the table are multiples of 16. 0: they may be unaligned, which is
 *              slower.
 *   page_tokens  tokens of a page.
 *   out        F32 or BF16 by `other_dtype`: [pages, key_heads, 2 * key_dim], page 0 first;
 *              `out_stride` from page to page, `out_head_stride`. A page whose first token is among
 *              the keys starts anew; other pages are widened.
 *
 * PAGE_SCORES: `scores` of src/attention/pages.rs.
 *   queries    F32, F16 or BF16 by `other_dtype`: [query_count, query_heads, key_dim];
 *              `query_stride`, `query_head_stride`.
 *   numbers    boxes, F32 or BF16 by `dtype`: [pages, key_heads, 2 * key_dim]; `key_stride` from
 *              page to page, `key_head_stride`. query_heads is a multiple of key_heads.
 *   index      0, or `count` page numbers, u32. With 0, pages `first` to `first + count - 1`.
 *   out        f32, [query_count, query_heads, count].
 *
 * TOP: chooses the largest numbers of each row; among equal numbers, the first.
 *   numbers    f32, [query_count, query_heads, count]. NaN is less than any number.
 *   keep       numbers to choose from each row: 1 or more.
 *   sinks, recent  first and last columns that are always chosen; together at most `keep`.
 *   flags      1: the heads of a query that share a key head (of key_heads) share a list. 2: all
 *              heads of a query share a list. Shared lists rank by the largest score, or with 4 by
 *              the mean (NaN if one score is NaN). 8: all queries share a list; the largest score
 *              counts.
 *   index      lists, u32, ascending, `keep` places each, in the order of queries and heads; unused
 *              places are 0xFFFFFFFF. `out_stride` from list to list.
 *   counts     0, or the length of each list, u32.
 *   scratch    with flags 1, 2 or 8: 4 bytes for each list and column.
 *
 * ADD: adds weights of tokens to their scores, row by row. Scores and sums are f32.
 *   numbers    scores: key_heads lists of `tokens`, `out_head_stride` from list to list.
 *   more       sums: query_heads rows of `tokens`, `query_head_stride` from row to row.
 *              query_heads is a multiple of key_heads: each list has the same number of rows.
 *
 * KEEP: chooses the tokens to keep. Among equal scores the lower position is evicted. -0 equals 0.
 *   numbers    scores, as for ADD.
 *   sinks, recent, keep  first and last tokens that are always kept, and how many others.
 *   index      lists, u32, ascending, `out_stride` from list to list; room for min(tokens, sinks +
 *              recent + keep) in each.
 *   counts     key_heads numbers, u32: the length of each list.
 *
 * COMPACT: moves kept rows to the first places, in the order of their list. Rows behind them are
 * unchanged. Rows have key_heads heads.
 *   index, counts, out_stride  as KEEP writes them: `count` lists, one for all heads or one for
 *              each.
 *   keys, values  rows of key_dim and value_dim numbers of type `dtype` (BYTES: bytes), and their
 *              strides. value_dim 0: keys only, as for latent rows.
 *   table      0, or addresses of blocks of `page_tokens` tokens, multiples of 16: token i is in
 *              block i / page_tokens. `keys` and `values` are added to each block's address.
 *   numbers    0, or scores that move with the rows: `count` lists of `tokens`, `out_head_stride`.
 *
 * ESTIMATE: sums attention weights of the last queries by key and by distance.
 *   queries    F16 or BF16 by `dtype` and `other_dtype`, which are the same: [query_count,
 *              query_heads, key_dim], up to 64 queries; strides are multiples of 16.
 *   keys       [tokens, key_heads, key_dim] of the same type, key_dim 64, 128 or 576; multiples of
 *              16.
 *   table      as for COMPACT.
 *   first      position of the first query: tokens - query_count.
 *   scale      factor of the products; 0 = 1 / sqrt(key_dim).
 *   numbers    output by key: query_heads rows of `tokens` f32, `out_head_stride` from row to row.
 *   more       output by distance, in the same shape.
 *   scratch    4 * query_heads * (ceil(tokens / 1024) * 1216 + 64) bytes.
 *
 * PREFILL: attention of a prompt or of a part of one. A query sees keys up to its position.
 *   queries    as for ESTIMATE, in any number; `first` is the position of the first.
 *   keys, values  as for ESTIMATE; key_dim and value_dim are 64 and 64, 128 and 128, or 576 and
 *              512. With 576, values are the first numbers of keys: `values` and its strides are
 *              those of keys. A thread block takes at most 70 KB of shared memory. With 576 it
 *              takes 161 KB, or 83 KB where the device has less.
 *   out        [query_count, query_heads, value_dim] of the type of the queries, with flag 1 f32;
 *              multiples of 16. Zeros where a query sees no key.
 *   more       0, or log-sum-exps, f32, [query_count, query_heads]; minus infinity for no key.
 *   count      0: all keys. Else an index chooses keys: `count` heads, which is 1, key_heads or
 *              query_heads. The index must be valid; kvt_kernel_pack_index checks one and lays it out.
 *   numbers    heads of the index, `Head` of src/attention/keys.rs or kvt_index_head_t, 24 bytes
 *              each.
 *   counts     the offset of each list in `index`, and the end of the last list, u32.
 *   index      contents of the lists, u32.
 *   scratch    with an index: 12 * count * (max(tokens, first + query_count) / 32 + 8) bytes.
 *
 * DECODE: attention of few queries over all keys or over chosen blocks of keys.
 *   queries    F32, F16 or BF16 by `other_dtype`: [query_count, query_heads, key_dim]; `first` is
 *              the position of the first. Addresses and strides are multiples of 8.
 *   keys, values  F32, F16, BF16 or I8 by `dtype`: [tokens, key_heads, key_dim] and value_dim
 *              numbers, multiples of 8 up to 1024. Addresses and strides are multiples of 16, of I8
 *              multiples of 8.
 *   table      as for COMPACT.
 *   scaling, scales  for I8: f32, [tokens, key_heads] or [key_heads, key_dim] of keys, followed by
 *              the same of values.
 *   count      0: all keys. Else the number of lists of blocks: 1, key_heads or query_heads.
 *   index      lists, u32, `keep` places each. Blocks beyond the keys are not seen.
 *   counts     length of each list, u32.
 *   recent     tokens of a block.
 *   out, more  as for PREFILL, multiples of 8; in the type of the queries, or f32 with flag 1.
 *   flags      2, 4 or 6: `numbers` receives the weight of each key, f32: a row for each query
 *              head (2), for each key head (4), or one row (6). Rows are in the order of the list
 *              (keep * recent places) or, without lists, of keys (`tokens` places). 4 excludes
 *              lists for each query head; 6 excludes more than one list.
 *   scratch    4 * query_count * query_heads * (parts * (value_dim + 2) + 1) bytes, and with
 *              weights 4 * query_count * query_heads * places more. A part has 128 places, or 512
 *              where there are more than 16384 places.
 *   Tensor cores compute the products where 16 or more rows (queries times heads) share latent rows
 *   (576 and 512 numbers, values being the first of keys) of F16 or BF16. The queries must then
 *   have the same type and be aligned to 16 bytes, and no weights are requested. A device may then
 *   round a little more.
 */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/* dtype, other_dtype: KVT_DTYPE_* of the C header. */
enum { BYTES = 0, F32 = 1, F16 = 2, BF16 = 3, F8_E4M3 = 4, F8_E5M2 = 5, I8 = 6, I4 = 7 };
/* scaling: KVT_SCALES_*. One scale for each token and head, or for each head and element. */
enum { SCALES_NONE = 0, SCALES_TOKEN = 1, SCALES_CHANNEL = 2 };

/* Flag of PREFILL and DECODE: the output is f32, whatever the type of the queries. */
enum { OUT_F32 = 1 };

struct call {
    u32 kind, dtype, other_dtype, scaling;
    u64 queries, keys, values, out;
    u64 index, counts, table, numbers;
    u64 more, scales, scratch, scratch_bytes;
    i64 query_stride, query_head_stride, key_stride, key_head_stride;
    i64 value_stride, value_head_stride, out_stride, out_head_stride;
    u32 query_count, query_heads, key_heads, key_dim;
    u32 value_dim, page_tokens, tokens, first;
    u32 count, keep, recent, sinks;
    float scale;
    u32 flags;
    u64 reserved[3];
};

static_assert(sizeof(call) == 256, "the argument of a kernel has 256 bytes");
