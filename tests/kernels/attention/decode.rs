//! Attention of few queries over the whole sequence.

use kvtier::attention::{self, Decode, Head, Keys, Kind as How};
use kvtier::base::status::Status;
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::kernels::attend::OUT_F32;
use kvtier::meta::dtype::Dtype;

use crate::attention::data::{Bytes, Problem, Shape, rows};
use crate::gpu::{run, run_within};

const BY_QUERY_HEAD: u32 = 2;
const BY_KEY_HEAD: u32 = 4;
const TOGETHER: u32 = 6;

/// Lists of blocks, each as long as the longest.
struct Chosen {
    block: usize,
    lists: Vec<Vec<u32>>,
}

impl Chosen {
    fn keep(&self) -> usize {
        self.lists.iter().map(Vec::len).max().unwrap_or(0).max(1)
    }
    /// The position of each place of a list.
    fn positions(&self, head: usize, shape: &Shape) -> Vec<Option<usize>> {
        let end = shape.tokens.min(shape.first + shape.queries);
        if self.lists.is_empty() {
            return (0..shape.tokens).map(|at| Some(at).filter(|at| *at < end)).collect();
        }
        let list = match self.lists.len() {
            1 => 0,
            n if n == shape.key_heads => head / (shape.heads / shape.key_heads),
            _ => head,
        };
        let list = &self.lists[list];
        (0..self.keep() * self.block)
            .map(|at| list.get(at / self.block).map(|b| *b as usize * self.block + at % self.block))
            .map(|at| at.filter(|at| *at < end))
            .collect()
    }
}

struct Got {
    out: Vec<f32>,
    lse: Vec<f32>,
    sums: Vec<f32>,
}

fn compute(problem: &Problem, chosen: &Chosen, sums: u32) -> Got {
    let shape = problem.shape;
    let rows = shape.queries * shape.heads;
    let (mut out, mut lse) = (Bytes::new(rows * shape.dims.1 * 4), Bytes::new(rows * 4));
    let keep = chosen.keep();
    let table: Vec<u32> = chosen
        .lists
        .iter()
        .flat_map(|list| (0..keep).map(|at| list.get(at).copied().unwrap_or(0)))
        .collect();
    let counts: Vec<u32> = chosen.lists.iter().map(|list| list.len() as u32).collect();
    let keys = if table.is_empty() { shape.tokens } else { keep * chosen.block };
    let mut got = Bytes::new(shape.heads * keys * 4 + 16);
    let scratch = Bytes::new(1 << 21);
    let at = |n: u64| if table.is_empty() { 0 } else { n };
    let call = Call {
        out: out.at(),
        more: lse.at(),
        index: at(table.as_ptr() as u64),
        counts: at(counts.as_ptr() as u64),
        count: counts.len() as u32,
        keep: at(keep as u64) as u32,
        recent: at(chosen.block as u64) as u32,
        numbers: if sums == 0 { 0 } else { got.at() },
        scales: if problem.scales.is_empty() { 0 } else { problem.scales.as_ptr() as u64 },
        scaling: match (problem.scales.is_empty(), shape.is_by_number) {
            (true, _) => 0,
            (false, by_number) => 1 + u32::from(by_number),
        },
        scratch: scratch.at(),
        scratch_bytes: 1 << 21,
        out_stride: (shape.heads * shape.dims.1 * 4) as i64,
        out_head_stride: (shape.dims.1 * 4) as i64,
        flags: OUT_F32 | sums,
        ..problem.call(Kind::Decode)
    };
    // SAFETY: all of it is memory above.
    unsafe { run_within(&call, shape.shared_bytes) }.expect("sound");
    let lines = match sums {
        BY_QUERY_HEAD => shape.heads,
        BY_KEY_HEAD => shape.key_heads,
        TOGETHER => 1,
        _ => 0,
    };
    Got {
        out: out.numbers(rows * shape.dims.1, Dtype::F32),
        lse: lse.numbers(rows, Dtype::F32),
        sums: got.numbers(lines * keys, Dtype::F32),
    }
}

fn is_close(a: f32, b: f64, bound: f64) -> bool {
    f64::from(a) == b || (f64::from(a) - b).abs() < bound * b.abs().max(1.0)
}

/// How far results and log-sum-exps may be off. A GPU's tensor cores cut sums off where the
/// processor rounds them.
fn bounds(shape: &Shape) -> (f64, f64) {
    if shape.is_latent && crate::gpu::is_there() { (5e-5, 2e-5) } else { (4e-6, 2e-6) }
}

/// Compares with binary64.
fn check(shape: Shape, chosen: &Chosen, sums: u32) {
    let problem = Problem::new(shape, 11);
    let got = compute(&problem, chosen, sums);
    let dim = shape.dims.1;
    let lines = match sums {
        BY_QUERY_HEAD => shape.heads,
        BY_KEY_HEAD => shape.key_heads,
        _ => 1,
    };
    let keys = chosen.positions(0, &shape).len();
    let mut want = vec![0.0; lines * keys];
    for query in 0..shape.queries {
        for head in 0..shape.heads {
            let places = chosen.positions(head, &shape);
            let (weights, out, lse) =
                problem.attend((query, head), |key| places.contains(&Some(key)));
            let at = query * shape.heads + head;
            let (bound, lse_bound) = bounds(&shape);
            assert!(is_close(got.lse[at], lse, lse_bound), "{query} {head}: {} {lse}", got.lse[at]);
            for (d, want) in out.iter().enumerate() {
                let got = got.out[at * dim + d];
                assert!(is_close(got, *want, bound), "query {query} head {head} {d}: {got} {want}");
            }
            let line = head / (shape.heads / lines);
            for (sum, place) in want[line * keys..].iter_mut().zip(places) {
                let weight = place.and_then(|key| weights.get(key));
                *sum += weight.copied().unwrap_or(0.0);
            }
        }
    }
    if sums != 0 {
        assert_eq!(got.sums.len(), want.len());
        for (key, (a, b)) in got.sums.iter().zip(&want).enumerate() {
            assert!(is_close(*a, *b, 4e-6), "key {key}: {a} {b}");
        }
    }
}

fn all() -> Chosen {
    Chosen { block: 1, lists: Vec::new() }
}

#[test]
fn decode_over_all_keys_equals_attention() {
    for (n, (queries, tokens, heads, key_heads)) in
        [(1, 1, 1, 1), (1, 300, 8, 1), (2, 129, 4, 2), (16, 70, 3, 3), (1, 128, 6, 2)]
            .into_iter()
            .enumerate()
    {
        let types = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::F16];
        let dims = [(64, 64), (128, 128), (64, 64), (80, 80), (128, 128)];
        for sums in [0, BY_QUERY_HEAD, BY_KEY_HEAD, TOGETHER] {
            let shape = Shape {
                dtype: types[n],
                query_dtype: types[(n + 1) % 3],
                dims: dims[n],
                page_tokens: if n == 1 || n == 3 { 16 } else { 0 },
                ..Shape::new(queries, tokens, heads, key_heads)
            };
            check(shape, &all(), sums);
        }
    }
    let dtype = Dtype::I8;
    check(Shape { dtype, is_by_number: true, ..Shape::new(2, 140, 4, 2) }, &all(), TOGETHER);
    // A sequence that continues, and an empty one.
    check(Shape { first: 3, ..Shape::new(2, 90, 2, 1) }, &all(), BY_KEY_HEAD);
    check(Shape::new(2, 0, 2, 1), &all(), TOGETHER);
}

#[test]
fn latent_rows_serve_as_keys_and_values() {
    for page_tokens in [0, 64] {
        let dims = (576, 512);
        let dtype = Dtype::Bf16;
        let shape =
            Shape { dims, dtype, is_latent: true, page_tokens, ..Shape::new(1, 150, 10, 1) };
        check(shape, &all(), TOGETHER);
    }
}

/// Many heads over latent rows: products of tiles of 64 or 32 rows. Weights as two 16-bit numbers
/// are as exact as f32.
#[test]
fn many_heads_share_latent_rows() {
    let latent = |queries, tokens, heads| Shape {
        dims: (576, 512),
        is_latent: true,
        ..Shape::new(queries, tokens, heads, 1)
    };
    let half = Dtype::Bf16;
    let bf16 = |shape| Shape { dtype: half, query_dtype: half, ..shape };
    for shape in [
        latent(1, 150, 16),
        bf16(Shape { page_tokens: 64, ..latent(3, 139, 10) }),
        bf16(latent(1, 97, 70)),
        Shape { first: 33, ..latent(2, 200, 34) },
        Shape { key_heads: 2, page_tokens: 16, ..latent(1, 40, 40) },
        latent(1, 0, 20),
        // Long parts, of which the queries see the first and the beginning of the second.
        Shape { first: 530, ..latent(1, 16_400, 16) },
    ] {
        for shared_bytes in [shape.shared_bytes, 99 << 10] {
            check(Shape { shared_bytes, ..shape }, &all(), 0);
        }
    }
    // Chosen blocks: of all, and of each head of keys; some beyond the end, and none at all.
    let shape = bf16(Shape { page_tokens: 32, ..latent(2, 333, 20) });
    for (block, lists) in
        [(16, vec![vec![0, 3, 9, 20]]), (32, vec![vec![1, 10]]), (64, vec![vec![]])]
    {
        check(shape, &Chosen { block, lists }, 0);
    }
    let shape = Shape { key_heads: 2, ..latent(1, 200, 40) };
    check(
        shape,
        &Chosen { block: 16, lists: vec![vec![2, 12], vec![0, 1, 7, 8, 9, 10, 11, 3]] },
        0,
    );
    check(shape, &Chosen { block: 16, lists: vec![vec![], vec![12]] }, 0);
}

#[test]
fn each_head_attends_its_own_pages() {
    let shape = Shape { page_tokens: 32, ..Shape::new(2, 333, 4, 2) };
    // Lists for each query head, for each key head, and for all heads; empty ones, and ones with
    // an end.
    for (block, lists) in [
        (16, vec![vec![0, 3, 20], vec![], vec![1, 2, 5, 6, 7], vec![19, 20]]),
        (16, vec![vec![0, 3, 9, 10, 11, 12, 13, 14, 15, 16], vec![20]]),
        (32, vec![vec![0, 10]]),
        (64, vec![vec![]]),
    ] {
        let chosen = Chosen { block, lists };
        check(shape, &chosen, BY_QUERY_HEAD);
        if chosen.lists.len() < 4 {
            check(shape, &chosen, BY_KEY_HEAD);
        }
        if chosen.lists.len() == 1 {
            check(shape, &chosen, TOGETHER);
        }
    }
}

#[test]
fn long_sequences_are_merged_from_parts() {
    let shape = Shape { first: 16_999, ..Shape::new(1, 17_000, 2, 1) };
    check(shape, &all(), TOGETHER);
}

#[test]
fn decode_matches_the_cpu_kernels() {
    let shape = Shape::new(3, 200, 8, 2);
    let problem = Problem::new(shape, 4);
    let chosen = Chosen { block: 16, lists: vec![vec![0, 4, 7, 12], vec![1, 12]] };
    let heads = [0, 1].map(|first| Head {
        kind: How::Blocks,
        first,
        lists: 1,
        key_block: 16,
        ..Head::DENSE
    });
    let (starts, items) = ([0, 4, 6], [0, 4, 7, 12, 1, 12]);
    let asked = attention::Problem {
        queries: rows(&problem.queries, 8, 64),
        keys: rows(&problem.keys, 2, 64),
        values: rows(&problem.values, 2, 64),
        first_key: 0,
        first_query: shape.first as u32,
        scale: 0.0,
        select: Keys { heads: &heads, starts: &starts, items: &items },
    };
    let (mut out, mut lse) = (vec![0.0; 3 * 8 * 64], vec![0.0; 3 * 8]);
    let mut memory = vec![0.0; Decode::memory(&asked, true).expect("sound")];
    let mut job = Decode::new(asked, &mut out, &mut lse, &mut memory, true).expect("sound");
    let mut scratch = vec![0.0; job.scratch()];
    for part in 0..job.parts() {
        // SAFETY: one thread.
        unsafe { job.run(part, &mut scratch) }.expect("it runs");
    }
    for end in 0..job.ends() {
        // SAFETY: one thread, behind the parts.
        unsafe { job.end(end) }.expect("it runs");
    }
    let mut sums = vec![0.0; 8 * job.sum_keys()];
    job.sums(true, &mut sums).expect("kept");
    let got = compute(&problem, &chosen, BY_QUERY_HEAD);
    // The last block ends with the sequence: its last 8 places have no key.
    let there: Vec<f32> = got.sums.chunks(64).flat_map(|row| &row[..56]).copied().collect();
    for (a, b) in [(&got.out, &out), (&got.lse, &lse), (&there, &sums)] {
        assert_eq!(a.len(), b.len());
        a.iter()
            .zip(b.iter())
            .for_each(|(a, b)| assert!(is_close(*a, f64::from(*b), 4e-6), "{a} {b}"));
    }
}

#[test]
fn invalid_decode_calls_are_rejected() {
    let problem = Problem::new(Shape::new(1, 64, 4, 2), 1);
    let memory = Bytes::new(1 << 14);
    let at = memory.at();
    let good = Call {
        out: at,
        out_stride: 512,
        out_head_stride: 128,
        scratch: at + 1024,
        scratch_bytes: 8192,
        ..problem.call(Kind::Decode)
    };
    // SAFETY: all of it is memory above, or is refused.
    let try_it = |call: &Call| unsafe { run(call) }.map_err(|e| e.status());
    assert_eq!(try_it(&good), Ok(()));
    let listed = Call { index: at, counts: at, count: 1, keep: 1, recent: 16, ..good };
    for (bad, status) in [
        (Call { dtype: 4, ..good }, Status::Unsupported),
        (Call { other_dtype: 6, ..good }, Status::Unsupported),
        (Call { key_dim: 60, ..good }, Status::Unsupported),
        (Call { value_dim: 2048, ..good }, Status::Unsupported),
        (Call { scaling: 1, scales: at, ..good }, Status::Invalid),
        (Call { scales: at, ..good }, Status::Invalid),
        (Call { keys: good.keys + 8, ..good }, Status::Invalid),
        (Call { scratch_bytes: 100, ..good }, Status::TooSmall),
        (Call { scratch: 0, ..good }, Status::Invalid),
        (Call { flags: 2, ..good }, Status::Invalid),
        (Call { flags: 32, ..good }, Status::Invalid),
        (Call { numbers: at, ..good }, Status::Invalid),
        (Call { count: 3, ..listed }, Status::Invalid),
        (Call { recent: 0, ..listed }, Status::Invalid),
        (Call { keep: 1 << 30, ..listed }, Status::Limit),
        (Call { keep: 1, ..good }, Status::Invalid),
        (Call { count: 2, flags: TOGETHER, numbers: at, ..listed }, Status::Invalid),
        (Call { count: 4, flags: BY_KEY_HEAD, numbers: at, ..listed }, Status::Invalid),
    ] {
        assert_eq!(try_it(&bad), Err(status), "{bad:?}");
    }
}
