/* What a kernel is asked: the same 256 bytes as `Call` of src/device/call.rs.
 *
 * Addresses are the device's: memory of the device, or of the host where the device reaches it.
 * Strides are bytes, may be negative, and are 0 where there is one of the things that they lead
 * between. Numbers lie at multiples of their size: addresses and strides of them are such. Fields
 * that a kernel does not name are 0. What is written does not overlap what is read.
 *
 * MOVE: runs of bytes go elsewhere.
 *   table      `count` pieces, at a multiple of 8, each: u64 from, u64 to, i64 from_stride,
 *              i64 to_stride, u32 run_bytes, u32 runs. Run r of a piece goes from `from + r *
 *              from_stride` to `to + r * to_stride`. 16 bytes go at once where addresses, strides
 *              and `run_bytes` are multiples of 16; anything else is right, and slower.
 *   count      1 or more.
 *   keep       at most so many blocks of 256 threads; 0 = as many as fill a large device.
 *   scratch    8 * (count + 1) bytes at a multiple of 8.
 *
 * CONVERT: numbers become numbers of another type. Rows are [count, key_heads, key_dim].
 *   keys       numbers of the first token, of type `dtype`: any but BYTES and I4; `key_stride`
 *              from a token to the next, `key_head_stride` from a head to the next.
 *   table      0, or addresses of blocks of `page_tokens` tokens: then token i is at place
 *              `first + i` of the blocks, which begin `keys` bytes behind their addresses.
 *   out        what they become, of type `other_dtype`; `out_stride`, `out_head_stride`.
 *   scaling    SCALES_*; with it one of both types has 8 bits, the other has more.
 *   scales     f32, [count, key_heads] or [key_heads, key_dim]. To 8 bits they are written: the
 *              largest size divided by 127 (F8_E4M3: 448, F8_E5M2: 57344); with flag 1 they are
 *              given, and read. From 8 bits they are read.
 *   A number is multiplied with the inverse of its scale (which is 0 where a scale is below the
 *   smallest normal number), or with its scale, and rounded to the nearest, ties to the even one.
 *   I8 ends at -127 and 127, F8 at its greatest number. What is no number does not count for
 *   scales, and becomes 0 as I8.
 *
 * SUM: the checksum of src/base/checksum.rs, of many ranges.
 *   table      `count` ranges, at a multiple of 8, each: u64 address, u64 bytes. Any address, any
 *              length; eight bytes are read at once where an address is a multiple of 8.
 *   count      1 or more.
 *   out        `count` sums, u64, at a multiple of 8.
 *   scratch    8 * (count + 1) bytes, and 8 for each 4096 bytes of each range, the last of which
 *              may be short; at a multiple of 8. Too little for the ranges: all sums are 0.
 *
 * PAGE_BOXES: `extend` of src/attention/pages.rs: least and greatest numbers of pages are widened.
 *   keys       F32, F16 or BF16 by `dtype`: `count` keys from position `first` on, [count,
 *              key_heads, key_dim], key_dim up to 1024; `key_stride`, `key_head_stride`. Without a
 *              table it leads to the first of these keys.
 *   table      0, or addresses of blocks of `tokens` tokens (0 = page_tokens; else a multiple of
 *              it): position p is in block p / tokens, which begins `keys` bytes behind its
 *              address.
 *   flags      1: addresses in the table are multiples of 16. 0: they may not be, and it is slower.
 *   page_tokens  tokens of a page.
 *   out        F32 or BF16 by `other_dtype`: [pages, key_heads, 2 * key_dim], page 0 first;
 *              `out_stride` from a page to the next, `out_head_stride`. A page whose first token is
 *              told begins anew, others are widened.
 *
 * PAGE_SCORES: `scores` of src/attention/pages.rs.
 *   queries    F32, F16 or BF16 by `other_dtype`: [query_count, query_heads, key_dim];
 *              `query_stride`, `query_head_stride`.
 *   numbers    boxes, F32 or BF16 by `dtype`: [pages, key_heads, 2 * key_dim]; `key_stride` from a
 *              page to the next, `key_head_stride`. query_heads is a multiple of key_heads.
 *   index      0, or `count` numbers of pages, u32. Without it they are `first` and the next.
 *   out        f32, [query_count, query_heads, count].
 *
 * TOP: the largest of each row, of equal ones the first.
 *   numbers    f32, [query_count, query_heads, count]. What is no number is less than any.
 *   keep       how many are chosen of a row: 1 or more.
 *   sinks, recent  so many first and last ones are always among them; together at most `keep`.
 *   flags      1: heads of a query that share a head of keys (key_heads of them) have one list;
 *              2: all heads have one; by the largest score, or with 4 by the mean (no number where
 *              one of them is none). 8: of several queries the largest counts, and they have one
 *              list.
 *   index      lists, u32, ascending, `keep` places each, in the order of queries and heads; places
 *              that are left over are 0xFFFFFFFF. `out_stride` from a list to the next.
 *   counts     0, or how many each list has, u32.
 *   scratch    with flags 1, 2 or 8: 4 bytes for each list and column.
 *
 * ADD: what tokens got is added to their scores, row after row. A score or sum is f32.
 *   numbers    scores: key_heads lists of `tokens`, `out_head_stride` from a list to the next.
 *   more       sums: query_heads rows of `tokens`, a multiple of key_heads: as many for each list;
 *              `query_head_stride` from a row to the next.
 *
 * KEEP: which tokens stay. Of equal scores the lower place goes; none is less than nothing.
 *   numbers    scores, as for ADD.
 *   sinks, recent, keep  so many first and last ones stay, and so many of the others.
 *   index      lists, u32, ascending, `out_stride` from one to the next; room for min(tokens, sinks
 *              + recent + keep) in each.
 *   counts     key_heads of them, u32: how long each list is.
 *
 * COMPACT: rows that stay move to the first places, in the order of their list; what lies behind
 * stays as it is. Rows of key_heads heads.
 *   index, counts, out_stride  as KEEP writes them: `count` lists, one for all heads or one for
 *              each.
 *   keys, values  rows of key_dim and value_dim numbers of type `dtype` (BYTES: bytes), and their
 *              strides. value_dim 0: there are only keys, as of latent rows.
 *   table      0, or addresses of blocks of `page_tokens` tokens, at multiples of 16: token i is in
 *              block i / page_tokens, rows begin `keys` and `values` bytes behind its address.
 *   numbers    0, or scores that move alike: `count` lists of `tokens`, `out_head_stride`.
 *
 * ESTIMATE: what keys and distances get of the attention of the last queries.
 *   queries    F16 or BF16 by `dtype` and `other_dtype`, which are the same: [query_count,
 *              query_heads, key_dim], up to 64 queries; strides are multiples of 16.
 *   keys       [tokens, key_heads, key_dim] of the same type, key_dim 64, 128 or 576; multiples of
 *              16.
 *   table      as for COMPACT.
 *   first      the position of the first query: query_count before `tokens`.
 *   scale      of products; 0 = 1 / sqrt(key_dim).
 *   numbers    out: by key, query_heads rows of `tokens` f32, `out_head_stride` from one to the
 *              next.
 *   more       out: the same by distance.
 *   scratch    4 * query_heads * (ceil(tokens / 1024) * 1216 + 64) bytes.
 *
 * PREFILL: attention of a prompt, or of a part of one: a query sees keys up to its position.
 *   queries    as for ESTIMATE, any number of them; `first` is the position of the first.
 *   keys, values  as for ESTIMATE; 64 and 64 numbers, 128 and 128, or 576 and 512, the values being
 *              the first numbers of keys (`values` and its strides are those of keys). A block of
 *              threads takes 70 KB of shared memory at most, with 576 numbers 161, or 83
 *              where a device has no more.
 *   out        [query_count, query_heads, value_dim] of the type of queries, with flag 1 f32;
 *              multiples of 16. Zeros where a query sees nothing.
 *   more       0, or log-sum-exps, f32, [query_count, query_heads]; minus infinity for nothing.
 *   count      0: all keys. Else keys are chosen by an index that is sound: `count` heads, one,
 *              key_heads or query_heads. kvt_kernel_pack_index checks one and lays it out.
 *   numbers    heads of it, `Head` of src/attention/keys.rs or kvt_index_head_t, 24 bytes each.
 *   counts     where each list begins in `index`, and where the last ends, u32.
 *   index      what is in lists, u32.
 *   scratch    with an index: 12 * count * (max(tokens, first + query_count) / 32 + 8) bytes.
 *
 * DECODE: attention of few queries over all keys or some blocks of them.
 *   queries    F32, F16 or BF16 by `other_dtype`: [query_count, query_heads, key_dim]; `first` is
 *              the position of the first. Addresses and strides are multiples of 8.
 *   keys, values  F32, F16, BF16 or I8 by `dtype`: [tokens, key_heads, key_dim] and value_dim
 *              numbers, multiples of 8 up to 1024; addresses and strides are multiples of 16, of I8
 *              of 8.
 *   table      as for COMPACT.
 *   scaling, scales  of I8: f32, [tokens, key_heads] or [key_heads, key_dim] of keys, and behind
 *              them the same of values.
 *   count      0: all keys. Else so many lists of blocks: one, key_heads or query_heads.
 *   index      lists, u32, `keep` places each; what lies beyond the keys is not seen.
 *   counts     how many of each list are there, u32.
 *   recent     tokens of a block.
 *   out, more  as for PREFILL, multiples of 8; in the type of queries, or f32 with flag 1.
 *   flags      2, 4 or 6: what each key got is written to `numbers`, f32, a row for each query
 *              head, for each head of keys, or one; in the order of lists (keep * recent places)
 *              or, without lists, of keys (`tokens` places). 4 not with lists of query heads, 6
 *              with one list.
 *   scratch    4 * query_count * query_heads * (parts * (value_dim + 2) + 1) bytes, and with sums 4
 *              * query_count * query_heads * places. Parts are of 128 places, of 512 where there
 *              are more than 16384.
 *   Where 16 queries and heads or more share latent rows (576 and 512 numbers, values being the
 *   first of keys) of F16 or BF16, queries are of the same type at multiples of 16, and no sums are
 *   wanted, products are those of tiles, on tensor cores: a device may round them a little more.
 */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/* dtype, other_dtype: KVT_DTYPE_* of the C header. */
enum { BYTES = 0, F32 = 1, F16 = 2, BF16 = 3, F8_E4M3 = 4, F8_E5M2 = 5, I8 = 6, I4 = 7 };
/* scaling: KVT_SCALES_*. One scale for each token and head, or for each head and number. */
enum { SCALES_NONE = 0, SCALES_TOKEN = 1, SCALES_CHANNEL = 2 };

/* flags of PREFILL and DECODE: what is written is f32, whatever queries are. */
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

static_assert(sizeof(call) == 256, "the description of a kernel is 256 bytes");
