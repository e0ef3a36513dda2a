//! Attention that keys and distances get from the last queries.

use kvtier::base::spec::Spec;
use kvtier::base::status::Status;
use kvtier::device::call::{Call, Kind};
use kvtier::meta::dtype::Dtype;
use kvtier::sparse::{Context, Index, registry};

use crate::attention::data::{Bytes, Problem, Shape, rows};
use crate::gpu::run;

/// Sums by key, and by distance, of each query head.
fn compute(problem: &Problem) -> [Vec<f32>; 2] {
    let Shape { heads, tokens, .. } = problem.shape;
    let (mut columns, mut distances) =
        (Bytes::new(heads * tokens * 4), Bytes::new(heads * tokens * 4));
    let scratch = Bytes::new(1 << 18);
    let call = Call {
        values: 0,
        value_stride: 0,
        value_head_stride: 0,
        value_dim: 0,
        numbers: columns.at(),
        more: distances.at(),
        out_head_stride: 4 * tokens as i64,
        scratch: scratch.at(),
        scratch_bytes: 1 << 18,
        ..problem.call(Kind::Estimate)
    };
    // SAFETY: all of it is memory above.
    unsafe { run(&call) }.expect("sound");
    [&mut columns, &mut distances].map(|all| all.numbers(heads * tokens, Dtype::F32))
}

fn check(shape: Shape) {
    let problem = Problem::new(shape, 21);
    let got = compute(&problem);
    let mut want = [0, 1].map(|_| vec![0.0; shape.heads * shape.tokens]);
    for head in 0..shape.heads {
        for query in 0..shape.queries {
            let (weights, _, _) = problem.attend((query, head), |_| true);
            let line = head * shape.tokens;
            for (key, weight) in weights.iter().enumerate() {
                want[0][line + key] += weight;
                want[1][line + shape.first + query - key] += weight;
            }
        }
    }
    for (got, want) in got.iter().zip(&want) {
        for (at, (a, b)) in got.iter().zip(want).enumerate() {
            assert!((f64::from(*a) - b).abs() < 4e-6 * b.max(1.0), "{at}: {a} {b}");
        }
    }
}

#[test]
fn estimates_sum_softmax_probabilities() {
    check(Shape::new(1, 1, 1, 1));
    check(Shape { page_tokens: 16, ..Shape::new(64, 64, 2, 1) });
    check(Shape { dims: (128, 128), ..Shape::new(64, 130, 4, 2) });
    let half = Dtype::Bf16;
    check(Shape { dtype: half, query_dtype: half, ..Shape::new(17, 1100, 2, 2) });
    check(Shape { page_tokens: 48, ..Shape::new(64, 2111, 1, 1) });
    check(Shape { dims: (576, 512), is_latent: true, ..Shape::new(40, 100, 2, 1) });
}

/// Places of the highest, the lower one of equal ones.
fn top(scores: &[f32], forced: usize, count: usize) -> Vec<u32> {
    let score = |at: usize| if at < forced { f32::INFINITY } else { scores[at] };
    let mut all: Vec<usize> = (0..scores.len()).collect();
    all.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
    let mut all: Vec<u32> = all.into_iter().take(count).map(|at| at as u32).collect();
    all.sort_unstable();
    all
}

#[test]
fn estimates_select_the_same_lines_as_the_policy() {
    let problem = Problem::new(Shape::new(100, 300, 4, 2), 6);
    let shape = kvtier::sparse::Shape {
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
    let spec = Spec::parse("minference(vertical=40,slash=60,sinks=5,recent=9)").expect("sound");
    let mut policy = registry::make(&spec, &shape).expect("sound");
    let context = Context { is_prefill: true, first_query: 200, tokens: 300, ..Context::default() };
    let queries = rows(&problem.queries, 4, 64);
    let keys = rows(&problem.keys, 2, 64);
    let mut index = Index::default();
    policy.index(0, &queries, Some(&keys), &context, &mut index).expect("sound");
    // The policy looks at the last 64 queries.
    let mut last = Problem::new(Shape::new(100, 300, 4, 2), 6);
    last.skip_queries(36);
    last.shape.queries = 64;
    last.shape.first = 236;
    let [columns, distances] = compute(&last);
    for head in 0..4 {
        let line = head * 300..(head + 1) * 300;
        assert_eq!(index.list(head as u32, 0), top(&columns[line.clone()], 5, 40));
        assert_eq!(index.list(head as u32, 1), top(&distances[line], 9, 60));
    }
}

#[test]
fn invalid_estimate_calls_are_rejected() {
    let problem = Problem::new(Shape::new(4, 64, 2, 1), 1);
    let memory = Bytes::new(1 << 14);
    let at = memory.at();
    let good = Call {
        values: 0,
        value_stride: 0,
        value_head_stride: 0,
        value_dim: 0,
        numbers: at,
        more: at + 512,
        out_head_stride: 256,
        scratch: at + 1024,
        scratch_bytes: 12_000,
        ..problem.call(Kind::Estimate)
    };
    // SAFETY: all of it is memory above, or is refused.
    let try_it = |call: &Call| unsafe { run(call) }.map_err(|e| e.status());
    assert_eq!(try_it(&good), Ok(()));
    for (bad, status) in [
        (Call { dtype: 1, other_dtype: 1, ..good }, Status::Unsupported),
        (Call { key_dim: 72, ..good }, Status::Unsupported),
        (Call { other_dtype: 3, ..good }, Status::Invalid),
        (Call { query_count: 65, ..good }, Status::Invalid),
        (Call { query_count: 0, ..good }, Status::Invalid),
        (Call { first: 59, ..good }, Status::Invalid),
        (Call { numbers: 0, ..good }, Status::Invalid),
        (Call { out_head_stride: 128, ..good }, Status::Invalid),
        (Call { values: at, ..good }, Status::Invalid),
        (Call { scratch_bytes: 8000, ..good }, Status::TooSmall),
    ] {
        assert_eq!(try_it(&bad), Err(status), "{bad:?}");
    }
}
