/* What a kernel is asked: the same 256 bytes as `Call` of src/device/call.rs. Addresses are the
 * device's, strides are bytes. Fields that a kernel does not name are 0. */
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
