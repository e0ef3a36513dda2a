//! Attention of prompts, dense and sparse.

use kvtier::attention::{self, Head, Keys, Kind as How, Prefill};
use kvtier::base::spec::Spec;
use kvtier::base::status::Status;
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::kernels::attend::OUT_F32;
use kvtier::meta::dtype::Dtype;
use kvtier::sparse::{Context, Index, registry};

use crate::attention::data::{Bytes, Problem, Shape, rows};
use crate::gpu::{run, run_within};

/// Contents of index lists, of one head or of several.
#[derive(Default)]
struct Lists {
    heads: Vec<Head>,
    starts: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    fn add(&mut self, head: Head, lists: &[&[u32]]) {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        let (first, lists_count) = (self.starts.len() as u32 - 1, lists.len() as u32);
        self.heads.push(Head { first, lists: lists_count, ..head });
        for list in lists {
            self.items.extend_from_slice(list);
            self.starts.push(self.items.len() as u32);
        }
    }
    fn keys(&self) -> Keys<'_> {
        Keys { heads: &self.heads, starts: &self.starts, items: &self.items }
    }
}

/// Results and log-sum-exps.
struct Got {
    out: Vec<f32>,
    lse: Vec<f32>,
}

fn compute(problem: &Problem, lists: &Lists, is_f32: bool) -> Got {
    let shape = problem.shape;
    let rows = shape.queries * shape.heads;
    let each = if is_f32 { 4 } else { 2 };
    let mut out = Bytes::new(rows * shape.dims.1 * each);
    let mut lse = Bytes::new(rows * 4);
    let scratch = Bytes::new(1 << 16);
    // Nothing is asked of an index without heads.
    let at = |n: u64| if lists.heads.is_empty() { 0 } else { n };
    let call = Call {
        out: out.at(),
        more: lse.at(),
        // A list without items has no address, so scratch stands in.
        index: at(if lists.items.is_empty() { scratch.at() } else { lists.items.as_ptr() as u64 }),
        counts: at(lists.starts.as_ptr() as u64),
        numbers: at(lists.heads.as_ptr() as u64),
        count: lists.heads.len() as u32,
        scratch: scratch.at(),
        scratch_bytes: 1 << 16,
        out_stride: (shape.heads * shape.dims.1 * each) as i64,
        out_head_stride: (shape.dims.1 * each) as i64,
        flags: if is_f32 { OUT_F32 } else { 0 },
        ..problem.call(Kind::Prefill)
    };
    // SAFETY: all of it is memory above.
    unsafe { run_within(&call, shape.shared_bytes) }.expect("sound");
    let dtype = if is_f32 { Dtype::F32 } else { shape.query_dtype };
    Got { out: out.numbers(rows * shape.dims.1, dtype), lse: lse.numbers(rows, Dtype::F32) }
}

/// Largest value is 1, and weights are kept in as many bits as numbers.
fn bound(dtype: Dtype) -> f64 {
    if dtype == Dtype::Bf16 { 5e-3 } else { 7e-4 }
}

/// Compares with binary64, `sees` being what (head, position, key) says, and with the library.
fn check(shape: Shape, lists: &Lists, sees: impl Fn(usize, usize, usize) -> bool) {
    let problem = Problem::new(shape, 5);
    let got = compute(&problem, lists, true);
    let dim = shape.dims.1;
    for query in 0..shape.queries {
        for head in 0..shape.heads {
            let at = query * shape.heads + head;
            let position = shape.first + query;
            let (_, out, lse) = problem.attend((query, head), |key| sees(head, position, key));
            let (a, b) = (f64::from(got.lse[at]), lse);
            assert!(a == b || (a - b).abs() < 1e-5 * b.abs().max(1.0), "{query} {head}: {a} {b}");
            for (d, want) in out.iter().enumerate() {
                let got = f64::from(got.out[at * dim + d]);
                let is_close = (got - want).abs() < bound(shape.dtype);
                assert!(is_close, "query {query} head {head} number {d}: {got} {want}");
            }
        }
    }
    let own = by_library(&problem, lists);
    for (a, b) in got.lse.iter().zip(&own.lse) {
        assert!(a == b || (a - b).abs() < 1e-5 * b.abs().max(1.0), "{a}, the library {b}");
    }
    for (a, b) in got.out.iter().zip(&own.out) {
        assert!(f64::from((a - b).abs()) < bound(shape.dtype), "{a}, the library {b}");
    }
}

fn by_library(problem: &Problem, lists: &Lists) -> Got {
    let Shape { queries, heads, key_heads, dims, first, .. } = problem.shape;
    let asked = attention::Problem {
        queries: rows(&problem.queries, heads, dims.0),
        keys: rows(&problem.keys, key_heads, dims.0),
        values: rows(&problem.values, key_heads, dims.1),
        first_key: 0,
        first_query: first as u32,
        scale: 0.0,
        select: lists.keys(),
    };
    let (mut out, mut lse) = (vec![0.0; queries * heads * dims.1], vec![0.0; queries * heads]);
    let mut job = Prefill::new(asked, &mut out, Some(&mut lse)).expect("sound");
    let mut scratch = vec![0.0; job.scratch()];
    job.all(&mut scratch).expect("it runs");
    Got { out, lse }
}

fn shapes() -> Vec<Shape> {
    let mut all = Vec::new();
    for (queries, tokens, heads, key_heads) in
        [(1, 1, 1, 1), (63, 63, 2, 1), (130, 130, 4, 2), (70, 200, 8, 1), (65, 129, 3, 3)]
    {
        all.push(Shape::new(queries, tokens, heads, key_heads));
    }
    all[1].dtype = Dtype::Bf16;
    all[1].query_dtype = Dtype::Bf16;
    all[2].dims = (128, 128);
    all[2].page_tokens = 16;
    all[3].page_tokens = 24;
    all[4].dtype = Dtype::Bf16;
    all[4].query_dtype = Dtype::Bf16;
    all[4].dims = (128, 128);
    all
}

#[test]
fn dense_prefill_equals_attention() {
    for shape in shapes() {
        check(shape, &Lists::default(), |_, _, _| true);
    }
    // Queries before the last keys, as in a sequence that continues.
    check(Shape { first: 3, ..Shape::new(20, 90, 2, 2) }, &Lists::default(), |_, _, _| true);
    // Queries behind all keys.
    check(Shape { first: 500, ..Shape::new(5, 90, 2, 2) }, &Lists::default(), |_, _, _| true);
}

fn latent(queries: usize, tokens: usize, heads: usize) -> Shape {
    Shape { dims: (576, 512), is_latent: true, ..Shape::new(queries, tokens, heads, 1) }
}

#[test]
fn latent_rows_serve_as_keys_and_values() {
    let half = Dtype::Bf16;
    let shapes = [
        latent(70, 70, 1),
        latent(3, 140, 2),
        Shape { page_tokens: 32, dtype: half, query_dtype: half, ..latent(66, 90, 1) },
    ];
    // With the shared memory of compute capability 9.0, and with that of 8.6, as much as is asked.
    let all = shapes.map(|shape| [shape, Shape { shared_bytes: 99 << 10, ..shape }]);
    for shape in all.into_iter().flatten() {
        check(shape, &Lists::default(), |_, _, _| true);
        let mut lists = Lists::default();
        let lines = Head { kind: How::Lines, ..Head::DENSE };
        lists.add(lines, &[&some(140, 20, 4), &some(140, 20, 5)]);
        check(shape, &lists, |_, position, key| sees_lines(&lists, 0, position, key));
        let mut lists = Lists::default();
        let blocks = Head { kind: How::Blocks, query_block: 64, key_block: 16, ..Head::DENSE };
        lists.add(blocks, &[&[0, 2, 3], &[1, 4, 5]]);
        let rows = [[0, 2, 3], [1, 4, 5]];
        check(shape, &lists, |_, position, key| {
            rows[(position - shape.first) / 64].contains(&(key / 16))
        });
    }
}

/// Numbers up to one, about one of `each`.
fn some(end: u32, each: u32, seed: u64) -> Vec<u32> {
    let is_in = |n: &u32| {
        crate::attention::data::number(seed << 32 | u64::from(*n)) < 2.0 / each as f32 - 1.0
    };
    (0..end).filter(is_in).collect()
}

fn sees_lines(lists: &Lists, entry: usize, position: usize, key: usize) -> bool {
    let head = lists.heads[entry];
    let keys = lists.keys();
    head.kind == How::Dense
        || position >= head.dense_from as usize
        || keys.list(head.first).contains(&(key as u32))
        || keys.list(head.first + 1).contains(&((position - key) as u32))
}

#[test]
fn only_selected_columns_and_diagonals_are_attended() {
    let lines = Head { kind: How::Lines, ..Head::DENSE };
    for (shape, each) in shapes().into_iter().zip([1, 5, 20, 9, 40]) {
        let tokens = shape.tokens as u32;
        // One list for each query head.
        let mut lists = Lists::default();
        for head in 0..shape.heads as u64 {
            lists.add(lines, &[&some(tokens, each, head), &some(tokens, each, head + 50)]);
        }
        check(shape, &lists, |head, position, key| sees_lines(&lists, head, position, key));
        // One list for all heads, some rows dense; only the first key and the last ones besides.
        let mut lists = Lists::default();
        let dense_from = (shape.first + shape.queries * 3 / 4) as u32;
        lists.add(Head { dense_from, ..lines }, &[&[0], &[0, 1, 65]]);
        check(shape, &lists, |_, position, key| sees_lines(&lists, 0, position, key));
    }
    // One list for each key head: one head sees no keys, one sees all.
    let shape = Shape { first: 7, ..Shape::new(90, 120, 6, 3) };
    let mut lists = Lists::default();
    lists.add(lines, &[&[], &[]]);
    lists.add(Head::DENSE, &[]);
    lists.add(lines, &[&[119], &[96, 4000]]);
    check(shape, &lists, |head, position, key| sees_lines(&lists, head / 2, position, key));
}

#[test]
fn long_index_lists_are_read_in_windows() {
    let shape = Shape::new(3, 2500, 1, 1);
    let lines = Head { kind: How::Lines, ..Head::DENSE };
    let mut lists = Lists::default();
    lists.add(lines, &[&some(2500, 30, 1), &some(2500, 30, 2)]);
    check(shape, &lists, |_, position, key| sees_lines(&lists, 0, position, key));
    let ranges = Head { kind: How::Ranges, ..Head::DENSE };
    let mut lists = Lists::default();
    lists.add(ranges, &[&some(2500, 60, 3), &[5, 9, 1000, 1100, 1101, 2300, 2490, 2600]]);
    let there = lists.keys();
    check(shape, &lists, |_, _, key| {
        let is_inside = |range: &[u32]| (range[0]..range[1]).contains(&(key as u32));
        there.list(0).contains(&(key as u32)) || there.list(1).chunks(2).any(is_inside)
    });
}

#[test]
fn each_row_attends_its_own_blocks() {
    for (shape, (rows, keys)) in
        shapes().into_iter().zip([(64, 64), (64, 64), (64, 64), (16, 10), (128, 128)])
    {
        let count = shape.queries.div_ceil(rows);
        let mut lists = Lists::default();
        for head in 0..shape.heads {
            let all: Vec<Vec<u32>> = (0..count)
                .map(|row| some(shape.tokens.div_ceil(keys) as u32, 2, (head * 100 + row) as u64))
                .collect();
            let all: Vec<&[u32]> = all.iter().map(Vec::as_slice).collect();
            let (query_block, key_block) = (rows as u32, keys as u32);
            lists.add(Head { kind: How::Blocks, query_block, key_block, ..Head::DENSE }, &all);
        }
        let there = lists.keys();
        check(shape, &lists, |head, position, key| {
            let row = (position - shape.first) / rows;
            there.list(lists.heads[head].first + row as u32).contains(&((key / keys) as u32))
        });
    }
}

#[test]
fn each_row_attends_its_own_ranges_and_columns() {
    for (shape, rows) in shapes().into_iter().zip([64, 64, 64, 30, 100]) {
        let count = shape.queries.div_ceil(rows);
        let mut lists = Lists::default();
        let columns = some(shape.tokens as u32, 6, 9);
        let ranges: Vec<Vec<u32>> = (0..count as u32)
            .map(|row| {
                let end = (shape.first + rows) as u32 + row * 31;
                vec![row * 3, row * 3 + 5, (end / 2).max(row * 3 + 7), end.max(row * 3 + 9)]
            })
            .collect();
        let mut all = vec![columns.as_slice()];
        all.extend(ranges.iter().map(Vec::as_slice));
        let query_block = rows as u32;
        lists.add(Head { kind: How::Ranges, query_block, ..Head::DENSE }, &all);
        check(shape, &lists, |_, position, key| {
            let range = &ranges[(position - shape.first) / rows];
            let is_inside = |range: &[u32]| (range[0]..range[1]).contains(&(key as u32));
            columns.contains(&(key as u32)) || range.chunks(2).any(is_inside)
        });
    }
}

#[test]
fn results_have_the_dtype_of_queries() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let shape = Shape { dtype, query_dtype: dtype, ..Shape::new(40, 70, 4, 1) };
        let problem = Problem::new(shape, 8);
        let wide = compute(&problem, &Lists::default(), true);
        let narrow = compute(&problem, &Lists::default(), false);
        let rounded: Vec<f32> =
            wide.out.iter().map(|&x| crate::attention::data::rounded(x, dtype)).collect();
        assert_eq!((narrow.out, narrow.lse), (rounded, wide.lse));
    }
}

#[test]
fn block_aligned_prompt_parts_are_bit_identical_to_the_whole() {
    let whole = Problem::new(Shape::new(200, 200, 2, 1), 3);
    let got = compute(&whole, &Lists::default(), true);
    let mut part = Problem::new(Shape::new(200, 200, 2, 1), 3);
    part.shape.first = 128;
    part.shape.queries = 72;
    let row = 2 * 64;
    part.skip_queries(128);
    let of = compute(&part, &Lists::default(), true);
    assert_eq!(of.out, got.out[128 * row..]);
    assert_eq!(of.lse, got.lse[128 * 2..]);
}

#[test]
fn prefill_follows_a_policy_index() {
    let shape = Shape::new(130, 200, 4, 2);
    let problem = Problem::new(shape, 5);
    let of = kvtier::sparse::Shape {
        layers: 1,
        query_heads: 4,
        key_heads: 2,
        key_dim: 64,
        value_dim: 64,
        scale: 0.0,
        kind: Default::default(),
        block_tokens: 16,
        max_tokens: 1000,
    };
    let context = Context { is_prefill: true, first_query: 70, tokens: 200, ..Context::default() };
    for spec in [
        "minference(vertical=20,slash=30,sinks=3,recent=5)",
        "minference(vertical=9,slash=12,sinks=3,recent=5,form=kernel)",
        "minference(vertical=2,slash=3,sinks=1,recent=1,form=blocks)",
        "minference(type=tri_shape,vertical=9,slash=12,sinks=3,recent=5,dense_rows=30)",
        "streaming(sinks=4,recent=40)",
    ] {
        let mut policy =
            registry::make(&Spec::parse(spec).expect(spec), &of).expect("a policy for prompts");
        let queries = rows(&problem.queries, 4, 64);
        let keys = rows(&problem.keys, 2, 64);
        let mut index = Index::default();
        policy.index(0, &queries, Some(&keys), &context, &mut index).expect(spec);
        let Keys { heads, starts, items } = index.keys();
        assert!(!index.is_dense(), "{spec}");
        let (heads, starts, items) = (heads.to_vec(), starts.to_vec(), items.to_vec());
        check(shape, &Lists { heads, starts, items }, |head, position, key| {
            index.sees(head as u32, 70, position as u32, key as u32)
        });
    }
}

#[test]
fn results_do_not_depend_on_thread_order() {
    // The emulator runs threads in another order each time.
    let problem = Problem::new(Shape::new(70, 150, 2, 1), 2);
    let mut lists = Lists::default();
    let lines = Head { kind: How::Lines, ..Head::DENSE };
    lists.add(lines, &[&some(150, 9, 4), &some(150, 9, 5)]);
    for lists in [Lists::default(), lists] {
        let first = compute(&problem, &lists, true);
        for _ in 0..2 {
            let again = compute(&problem, &lists, true);
            assert_eq!((&first.out, &first.lse), (&again.out, &again.lse));
        }
    }
}

#[test]
fn key_pieces_merge_by_log_sum_exp() {
    let shape = Shape::new(90, 190, 4, 2);
    let whole = compute(&Problem::new(shape, 7), &Lists::default(), true);
    let mut all: Option<Got> = None;
    for (from, to) in [(0, 33), (33, 100), (100, 190)] {
        let mut piece = Problem::new(shape, 7);
        piece.only_keys(from, to);
        let got = compute(&piece, &Lists::default(), true);
        match &mut all {
            None => all = Some(got),
            Some(all) => attention::merge(&mut all.out, &mut all.lse, &got.out, &got.lse)
                .expect("the same rows"),
        }
    }
    let all = all.expect("pieces");
    for (a, b) in all.out.iter().zip(&whole.out).chain(all.lse.iter().zip(&whole.lse)) {
        assert!(f64::from((a - b).abs()) < bound(shape.dtype) * f64::from(b.abs().max(1.0)));
    }
}

#[test]
fn prefill_without_keys_is_zero() {
    let problem = Problem::new(Shape::new(3, 0, 2, 1), 2);
    let got = compute(&problem, &Lists::default(), true);
    assert!(got.out.iter().all(|&x| x == 0.0) && got.lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn invalid_prefill_calls_are_rejected() {
    let problem = Problem::new(Shape::new(4, 64, 2, 1), 1);
    let memory = Bytes::new(1 << 12);
    let good = Call {
        out: memory.at(),
        out_stride: 256,
        out_head_stride: 128,
        ..problem.call(Kind::Prefill)
    };
    // SAFETY: all of it is memory above, or is refused.
    let try_it = |call: &Call| unsafe { run(call) }.map_err(|e| e.status());
    assert_eq!(try_it(&good), Ok(()));
    let at = memory.at();
    let listed = Call { index: at, counts: at, numbers: at, count: 1, ..good };
    for (bad, status) in [
        (Call { dtype: 1, ..good }, Status::Unsupported),
        (Call { dtype: 77, ..good }, Status::Unsupported),
        (Call { other_dtype: Dtype::Bf16 as u32, ..good }, Status::Invalid),
        (Call { key_dim: 96, ..good }, Status::Unsupported),
        (Call { value_dim: 128, ..good }, Status::Unsupported),
        (Call { key_heads: 0, ..good }, Status::Invalid),
        (Call { query_heads: 3, key_heads: 2, ..good }, Status::Invalid),
        (Call { queries: 0, ..good }, Status::Invalid),
        (Call { keys: good.keys + 8, ..good }, Status::Invalid),
        (Call { value_stride: 24, ..good }, Status::Invalid),
        (Call { out_stride: 4, ..good }, Status::Invalid),
        (Call { scale: f32::NAN, ..good }, Status::Invalid),
        (Call { scale: -1.0, ..good }, Status::Invalid),
        (Call { first: 1 << 30, ..good }, Status::Limit),
        (Call { flags: 2, ..good }, Status::Invalid),
        (Call { keep: 1, ..good }, Status::Invalid),
        (Call { index: at, ..good }, Status::Invalid),
        (Call { reserved: [0, 1, 0], ..good }, Status::Invalid),
        (Call { table: at, ..good }, Status::Invalid),
        (Call { more: at + 2, ..good }, Status::Invalid),
        (listed, Status::Invalid),
        (Call { scratch: at, scratch_bytes: 100, ..listed }, Status::TooSmall),
        (Call { count: 5, scratch: at, scratch_bytes: 4096, ..listed }, Status::Invalid),
        (Call { counts: 0, scratch: at, scratch_bytes: 4096, ..listed }, Status::Invalid),
    ] {
        assert_eq!(try_it(&bad), Err(status), "{bad:?}");
    }
}
