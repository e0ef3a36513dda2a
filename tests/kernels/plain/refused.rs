//! Validation of calls.

use kvtier::base::status::Status;
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::kernels::{MOST_SHARED, steps};

/// Numbers at 4096, of no particular meaning.
fn sound(kind: Kind) -> Call {
    let call = Call { kind: kind as u32, ..Call::default() };
    match kind {
        Kind::Move => Call { table: 4096, count: 3, scratch: 4096, scratch_bytes: 32, ..call },
        Kind::Sum => {
            Call { table: 4096, count: 3, out: 4096, scratch: 4096, scratch_bytes: 64, ..call }
        }
        Kind::Convert => Call {
            dtype: 2,
            other_dtype: 6,
            scaling: 1,
            keys: 4096,
            key_stride: 512,
            key_head_stride: 128,
            out: 8192,
            out_stride: 256,
            out_head_stride: 64,
            scales: 4096,
            count: 5,
            key_heads: 4,
            key_dim: 64,
            ..call
        },
        Kind::PageBoxes => Call {
            dtype: 2,
            other_dtype: 3,
            keys: 4096,
            key_stride: 512,
            key_head_stride: 128,
            out: 8192,
            out_stride: 1024,
            out_head_stride: 256,
            page_tokens: 16,
            count: 40,
            key_heads: 4,
            key_dim: 64,
            ..call
        },
        Kind::PageScores => Call {
            dtype: 3,
            other_dtype: 2,
            queries: 4096,
            query_stride: 1024,
            query_head_stride: 128,
            numbers: 8192,
            key_stride: 1024,
            key_head_stride: 256,
            out: 4096,
            count: 40,
            query_count: 1,
            query_heads: 8,
            key_heads: 4,
            key_dim: 64,
            ..call
        },
        _ => Call {
            numbers: 4096,
            query_count: 2,
            query_heads: 8,
            count: 40,
            keep: 8,
            sinks: 1,
            recent: 1,
            index: 4096,
            out_stride: 32,
            counts: 4096,
            ..call
        },
    }
}

#[test]
fn valid_calls_have_launches() {
    for kind in [Kind::Move, Kind::Sum, Kind::Convert, Kind::PageBoxes, Kind::PageScores, Kind::Top]
    {
        // `steps` replaces the previous content.
        let mut found = Vec::new();
        steps(&sound(kind), MOST_SHARED, &mut found).expect("sound");
        let count = found.len();
        steps(&sound(kind), MOST_SHARED, &mut found).expect("sound");
        assert!((1..=4).contains(&count) && found.len() == count, "{kind:?}");
    }
}

#[test]
fn invalid_calls_are_rejected_with_a_reason() {
    let refused = |call: Call, status: Status, word: &str| {
        let error = steps(&call, MOST_SHARED, &mut Vec::new()).expect_err(word);
        assert!(error.status() == status && error.message().contains(word), "{word}: {error}");
    };
    let wrong = |kind: Kind, change: &dyn Fn(&mut Call), status: Status, word: &str| {
        let mut call = sound(kind);
        change(&mut call);
        refused(call, status, word);
    };
    use Kind::{Convert, Move, PageBoxes, PageScores, Sum, Top};
    use Status::{Invalid, Limit, TooSmall, Unsupported};
    refused(Call { kind: 0, ..Call::default() }, Unsupported, "kernel 0");
    refused(Call { kind: 99, ..Call::default() }, Unsupported, "kernel 99");
    for kind in [Move, Sum, Convert, PageBoxes, PageScores, Top] {
        wrong(kind, &|c| c.reserved[2] = 1, Invalid, "does not use");
        wrong(kind, &|c| c.scale = f32::NAN, Invalid, "does not use");
        wrong(kind, &|c| c.count = 0, Invalid, "at least 1");
    }
    for kind in [Move, Sum] {
        wrong(kind, &|c| c.table = 0, Invalid, "the address of");
        wrong(kind, &|c| c.table = 4100, Invalid, "must be a multiple of 8");
        wrong(kind, &|c| c.scratch = 0, Invalid, "scratch");
        wrong(kind, &|c| c.scratch_bytes = 31, TooSmall, "32 are needed");
    }
    wrong(Sum, &|c| c.out = 0, Invalid, "the address of sums is 0");
    for kind in [Convert, PageBoxes, PageScores] {
        wrong(kind, &|c| c.dtype = 7, Unsupported, "type 7");
        wrong(kind, &|c| c.other_dtype = 0, Unsupported, "type 0");
        wrong(kind, &|c| c.key_heads = 0, Invalid, "0 heads");
        wrong(kind, &|c| c.key_dim = 0, Invalid, "0 numbers");
        wrong(kind, &|c| c.key_dim = 1 << 20, Limit, "at most");
        wrong(kind, &|c| c.key_stride += 1, Invalid, "stride");
        wrong(kind, &|c| c.key_stride = i64::MIN + 512, Invalid, "exceed the address space");
    }
    for kind in [Convert, PageBoxes] {
        wrong(kind, &|c| c.keys = 0, Invalid, "the address of");
        wrong(kind, &|c| c.keys += 1, Invalid, "must be a multiple of 2");
        wrong(kind, &|c| c.out = 0, Invalid, "the address of");
        wrong(kind, &|c| c.out_stride = 0, Invalid, "overlap");
        wrong(kind, &|c| (c.table, c.page_tokens) = (4097, 16), Invalid, "multiple of 8");
    }
    wrong(Convert, &|c| c.first = 1, Invalid, "does not use");
    wrong(Convert, &|c| c.table = 4096, Invalid, "0 tokens of a block");
    wrong(Convert, &|c| c.scaling = 3, Invalid, "scaling 3");
    wrong(Convert, &|c| c.scaling = 0, Invalid, "scaling is 0");
    wrong(Convert, &|c| c.scales = 0, Invalid, "the address of scales is 0");
    wrong(Convert, &|c| c.flags = 2, Invalid, "flags");
    wrong(Convert, &|c| c.other_dtype = 1, Invalid, "scaling from");
    wrong(PageBoxes, &|c| c.page_tokens = 0, Invalid, "0 tokens of a page");
    wrong(PageBoxes, &|c| c.flags = 1, Invalid, "flags");
    wrong(PageBoxes, &|c| (c.table, c.tokens) = (4096, 24), Invalid, "blocks of 24");
    wrong(PageBoxes, &|c| c.other_dtype = 2, Unsupported, "type 2");
    wrong(PageScores, &|c| c.query_heads = 6, Invalid, "6 query heads");
    wrong(PageScores, &|c| c.query_count = 1 << 30, Limit, "queries of 8");
    wrong(PageScores, &|c| c.first = u32::MAX, Invalid, "out of range");
    wrong(PageScores, &|c| c.index = 4098, Invalid, "multiple of 4");
    wrong(PageScores, &|c| (c.index, c.first) = (4096, 1), Invalid, "pages from 1");
    wrong(PageScores, &|c| c.queries = 4097, Invalid, "queries at");
    wrong(PageScores, &|c| c.out = 0, Invalid, "the address of scores is 0");
    wrong(Top, &|c| c.keep = 0, Invalid, "0 places");
    wrong(Top, &|c| c.recent = 8, Invalid, "1 first and 8 last");
    wrong(Top, &|c| c.flags = 3, Invalid, "flags");
    wrong(Top, &|c| c.flags = 4, Invalid, "mean");
    wrong(Top, &|c| (c.flags, c.key_heads) = (1, 3), Invalid, "8 query heads");
    wrong(Top, &|c| c.flags = 2, Invalid, "scratch");
    wrong(Top, &|c| (c.flags, c.scratch, c.scratch_bytes) = (2, 4096, 319), TooSmall, "320");
    wrong(Top, &|c| c.scratch = 4096, Invalid, "does not use");
    wrong(Top, &|c| c.out_stride = 28, Invalid, "stride of 28 bytes");
    wrong(Top, &|c| (c.query_count, c.query_heads) = (1 << 20, 1 << 20), Limit, "lists");
    wrong(Top, &|c| c.numbers = 0, Invalid, "the address of scores is 0");
}
