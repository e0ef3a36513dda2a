//! Group `attention`: kernels on one core in processor time. Compute-bound kernels are compared with
//! the core's peak of multiply-adds, memory-bound ones with plain reads.

use std::hint::black_box;

use kvtier::attention::{ColumnSums, Level};
use kvtier::attention::{Decode, Head, Keys, Kind, Prefill, Problem, Rows, Scales, pages};
use kvtier::base::spec::Spec;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::{Context, Index, registry};

use super::fixtures::{gqa_shape, thread_ns};
use super::{Bar, Better, median};

const DIM: usize = 128;

/// Processor seconds of this thread.
pub(super) fn seconds(body: impl FnOnce()) -> f64 {
    let start = thread_ns();
    body();
    (thread_ns() - start) * 1e-9
}

/// Pseudorandom numbers from -1 to 1 with a fixed seed.
pub(super) fn numbers(count: usize) -> Vec<f32> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Rows of `[tokens, heads, dim]`.
pub(super) fn rows<T>(memory: &[T], heads: usize, dim: usize, dtype: Dtype) -> Rows<'_> {
    let bytes = (dim * size_of::<T>()) as u64;
    let view = View {
        place: Place::At(memory.as_ptr() as u64),
        tokens: (memory.len() / (heads * dim)) as u32,
        heads: heads as u32,
        run_bytes: bytes,
        token_stride_bytes: bytes * heads as u64,
        head_stride_bytes: bytes,
    };
    // SAFETY: it is `memory`.
    unsafe { Rows::new(view, dtype, Scales::None) }.expect("sound rows")
}

/// Twelve independent chains of multiply-adds, which saturate a core; flop a second.
macro_rules! chains {
    ($name:ident, $features:literal, $width:literal, $splat:path, $fma:path, $sum:path) => {
        #[cfg(target_arch = "x86_64")]
        #[clippy::msrv = "1.89"] // when these instructions became stable
        #[target_feature(enable = $features)]
        fn $name(rounds: u32) -> f64 {
            use std::arch::x86_64::*;
            let (by, plus) = ($splat(black_box(0.998)), $splat(black_box(0.001)));
            let mut all = [$splat(1.0); 12];
            let time = seconds(|| {
                for _ in 0..rounds {
                    all.iter_mut().for_each(|x| *x = $fma(*x, by, plus));
                }
                all = black_box(all);
            });
            black_box(all.into_iter().map(|x| $sum(x)).sum::<f32>());
            f64::from(rounds) * 12.0 * $width * 2.0 / time
        }
    };
}
chains!(chains_512, "avx512f", 16.0, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps);
chains!(chains_256, "avx2,fma", 8.0, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_cvtss_f32);

/// The peak of one core, in flop a second.
fn peak() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    return match Level::best() {
        // SAFETY: the processor has this level.
        Level::Avx512 | Level::Avx512Bf16 => Some(unsafe { chains_512(4_000_000) }),
        // SAFETY: as above.
        Level::Avx2 => Some(unsafe { chains_256(8_000_000) }),
        _ => None,
    };
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Plain reads, in bytes a second.
pub(super) fn reading<T>(memory: &[T]) -> f64 {
    let bytes = size_of_val(memory);
    // SAFETY: plain numbers, within the length of the slice.
    let words = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u64>(), bytes / 8) };
    let time = seconds(|| {
        let mut sums = [0_u64; 32];
        for part in words.chunks_exact(32) {
            sums.iter_mut().zip(part).for_each(|(sum, word)| *sum ^= word);
        }
        black_box(sums);
    });
    bytes as f64 / time
}

/// Medians of a measurement and of its baseline, taken in turn.
pub(super) fn pairs(
    rounds: usize,
    mut a: impl FnMut() -> f64,
    mut b: impl FnMut() -> Option<f64>,
) -> (f64, Option<f64>) {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        right.extend(b());
        left.push(a());
        right.extend(b());
    }
    let baseline = (!right.is_empty()).then(|| median(&mut right));
    (median(&mut left), baseline)
}

/// A bar in percent of a baseline; both are rates a second.
fn share(
    bar: &'static str,
    unit: &'static str,
    baseline: &'static str,
    (value, base): (f64, Option<f64>),
    goal: f64,
) -> Bar {
    Bar::higher(bar, "%")
        .baseline(baseline)
        .baseline_value(base.map(|_| 100.0))
        .goal(goal)
        .value(base.map(|base| value / base * 100.0))
        .note(match base {
            Some(base) => format!("{:.1} of {:.1} {unit}", value / 1e9, base / 1e9),
            None => "no loop of multiply-adds for this processor".to_string(),
        })
}

/// Queries, keys and values of some heads.
struct Prompt {
    tokens: usize,
    heads: usize,
    memory: Vec<f32>,
}

impl Prompt {
    fn new(tokens: usize, heads: usize) -> Prompt {
        let size = tokens * heads * DIM;
        Prompt { tokens, heads, memory: numbers(3 * size) }
    }

    fn problem<'a>(memory: &'a [f32], heads: usize, select: Keys<'a>) -> Problem<'a> {
        let (q, rest) = memory.split_at(memory.len() / 3);
        let (k, v) = rest.split_at(rest.len() / 2);
        let rows = |part| rows(part, heads, DIM, Dtype::F32);
        Problem {
            queries: rows(q),
            keys: rows(k),
            values: rows(v),
            first_key: 0,
            first_query: 0,
            scale: 0.0,
            select,
        }
    }

    fn seconds(&self, select: Keys<'_>) -> f64 {
        let problem = Prompt::problem(&self.memory, self.heads, select);
        let mut out = vec![0.0; self.memory.len() / 3];
        let mut job = Prefill::new(problem, &mut out, None).expect("a prefill");
        let mut memory = vec![0.0; job.scratch()];
        seconds(|| job.all(&mut memory).expect("enough scratch"))
    }

    /// Floating point operations of `pairs` pairs of queries and keys in each head.
    fn flop(&self, pairs: f64) -> f64 {
        4.0 * (self.heads * DIM) as f64 * pairs
    }

    fn all_pairs(&self) -> f64 {
        (self.tokens * (self.tokens + 1)) as f64 / 2.0
    }
}

fn dense(quick: bool) -> Vec<Bar> {
    let prompt = Prompt::new(4096, if quick { 2 } else { 8 });
    let flop = prompt.flop(prompt.all_pairs());
    let best = pairs(3, || flop / prompt.seconds(Keys::DENSE), peak);
    let (heads, tokens) = (prompt.heads, prompt.tokens);
    let mut lse = vec![0.0; tokens * heads];
    let problem = Prompt::problem(&prompt.memory, heads, Keys::DENSE);
    let mut out = vec![0.0; tokens * heads * DIM];
    let mut job = Prefill::new(problem, &mut out, Some(&mut lse)).expect("a prefill");
    let mut memory = vec![0.0; job.scratch()];
    let whole = seconds(|| job.all(&mut memory).expect("enough scratch"));
    let mut sums = vec![0.0; tokens];
    let mut job = ColumnSums::new(problem, &lse, 0, false, &mut sums).expect("sums");
    let mut memory = vec![0.0; job.scratch()];
    let more = seconds(|| job.all(&mut memory).expect("enough scratch"));
    vec![
        share("prefill_f32", "Gflop/s", "multiply-adds of the core", best, 60.0),
        Bar::lower("column_sums", "x")
            .baseline("the prefill they follow")
            .baseline_value(1.0)
            .goal(0.6)
            .value(more / whole),
    ]
}

/// Sparse prefill: the speed-up over dense prefill, and the relative time of a pair.
fn sparse(quick: bool) -> Vec<Bar> {
    let prompt = Prompt::new(if quick { 16_384 } else { 32_768 }, 1);
    let tokens = prompt.tokens as u32;
    let all = prompt.all_pairs();
    // A sink, the diagonal, and blocks at equal distances until three tenths are kept.
    let (mut starts, mut items, mut retained) = (vec![0_u32], Vec::new(), 0.0);
    let blocks = tokens / 64;
    for row in 0..blocks {
        let list = (0..=row).filter(|id| *id == 0 || *id == row || (id + row) % 10 < 3);
        items.extend(list);
        let before = starts.last().map_or(0, |&start| start as usize);
        retained += (items.len() - before) as f64 * 4096.0 - 2016.0;
        starts.push(items.len() as u32);
    }
    let head = Head { kind: Kind::Blocks, query_block: 64, key_block: 64, ..Head::DENSE };
    let heads = [Head { lists: blocks, ..head }];
    let select = Keys { heads: &heads, starts: &starts, items: &items };
    let rounds = if quick { 1 } else { 3 };
    let block = pairs(rounds, || prompt.seconds(select), || Some(prompt.seconds(Keys::DENSE)));
    let budget = tokens * 3 / 10;
    let columns: Vec<u32> = (0..budget / 5).map(|i| if i < 30 { i } else { i * 5 }).collect();
    let slashes = budget / 5 * 4;
    // A recent band, and bands of 64 at equal distances.
    let wide = slashes / 2;
    let distant = (0..slashes - wide).map(|i| wide + i / 64 * 192 + i % 64);
    let diagonals: Vec<u32> = (0..wide).chain(distant).filter(|&d| d < tokens).collect();
    let (from, lists) = (columns.len() as u32, [&columns[..], &diagonals[..]].concat());
    let lines = Keys {
        heads: &[Head { kind: Kind::Lines, lists: 2, ..Head::DENSE }],
        starts: &[0, from, lists.len() as u32],
        items: &lists,
    };
    let line_pairs = pairs_of_lines(tokens, &columns, &diagonals);
    let line = prompt.seconds(lines);
    let dense = block.1.unwrap_or(f64::NAN);
    let bar = |bar, value, goal, better, note| {
        Bar::new(bar, "x", better)
            .baseline("dense prefill")
            .baseline_value(1.0)
            .goal(goal)
            .value(value)
            .note(note)
    };
    let note = |retained: f64| format!("{:.1} % of {tokens} tokens kept", retained / all * 100.0);
    vec![
        bar("block_sparse", dense / block.0, Some(2.5), Better::Higher, note(retained)),
        bar(
            "block_sparse_per_pair",
            block.0 / retained / (dense / all),
            Some(1.05),
            Better::Lower,
            String::new(),
        ),
        bar("vertical_slash", dense / line, None, Better::Higher, note(line_pairs)),
        bar(
            "vertical_slash_per_pair",
            line / line_pairs / (dense / all),
            None,
            Better::Lower,
            String::new(),
        ),
    ]
}

/// The cost of choosing the keys of a prompt, as a share of dense prefill.
fn indices(quick: bool) -> Vec<Bar> {
    let prompt = Prompt::new(if quick { 8192 } else { 32_768 }, 1);
    let problem = Prompt::problem(&prompt.memory, 1, Keys::DENSE);
    let tokens = prompt.tokens as u32;
    let shape = gqa_shape(1, 1, 1, 128, tokens);
    let context = Context { is_prefill: true, part: 0, parts: 1, first_query: 0, tokens };
    let mut bars = Vec::new();
    for (bar, spec) in [
        ("index_minference", "minference"),
        ("index_flexprefill", "flexprefill"),
        ("index_xattention", "xattention"),
        ("index_xattention_stride_16", "xattention(stride=16)"),
    ] {
        let spec = Spec::parse(spec).expect("a spec");
        let mut policy = registry::make(&spec, &shape).expect("a policy");
        let mut index = Index::default();
        let mut run = || {
            let (queries, keys) = (&problem.queries, &problem.keys);
            seconds(|| {
                policy.index(0, queries, Some(keys), &context, &mut index).expect("an index")
            })
        };
        run();
        let rounds = if quick { 3 } else { 1 };
        let (time, dense) = pairs(rounds, run, || Some(prompt.seconds(Keys::DENSE)));
        bars.push(
            Bar::lower(bar, "%")
                .baseline("dense prefill")
                .baseline_value(100.0)
                .goal(5.0)
                .value(dense.map(|dense| time / dense * 100.0))
                .note(format!("{tokens} tokens, one head: {:.1} ms", time * 1e3)),
        );
    }
    bars
}

/// Pairs of queries and keys that columns and diagonals name.
fn pairs_of_lines(tokens: u32, columns: &[u32], diagonals: &[u32]) -> f64 {
    let mut is_diagonal = vec![false; tokens as usize];
    diagonals.iter().for_each(|&d| is_diagonal[d as usize] = true);
    let all: f64 = diagonals.iter().map(|&d| f64::from(tokens - d)).sum();
    // The part of a column that is not on a diagonal.
    let mut beside = vec![0_u32];
    for is in &is_diagonal {
        let before = beside.last().copied().unwrap_or_default();
        beside.push(before + u32::from(!is));
    }
    let more = columns.iter().filter(|&&c| c < tokens);
    all + more.map(|&c| f64::from(beside[(tokens - c) as usize])).sum::<f64>()
}

/// Decode of a token with 32 query heads and 8 key heads over 16k tokens in bf16.
fn decode(quick: bool) -> Vec<Bar> {
    let (tokens, heads, group) = (16_384, 8, 4);
    let half = |x: f32| (x.to_bits() >> 16) as u16;
    let memory: Vec<u16> = numbers(2 * tokens * heads * DIM).into_iter().map(half).collect();
    let query = numbers(heads * group * DIM);
    let (k, v) = memory.split_at(memory.len() / 2);
    let mut bars = Vec::new();
    let all: Vec<u32> = (0..tokens as u32 / 16).filter(|id| id % 8 == 0).collect();
    let starts = [0, all.len() as u32];
    let heads_of = [Head { kind: Kind::Blocks, lists: 1, key_block: 16, ..Head::DENSE }];
    let some = Keys { heads: &heads_of, starts: &starts, items: &all };
    let halves: Vec<u16> = query.iter().copied().map(half).collect();
    let (wide, narrow) = (
        rows(&query, heads * group, DIM, Dtype::F32),
        rows(&halves, heads * group, DIM, Dtype::Bf16),
    );
    for (bar, queries, select, part, goal) in [
        ("decode_bf16", wide, Keys::DENSE, 1, Some(80.0)),
        ("decode_bf16_queries", narrow, Keys::DENSE, 1, Some(80.0)),
        ("decode_bf16_blocks", wide, some, 8, None),
    ] {
        let problem = Problem {
            queries,
            keys: rows(k, heads, DIM, Dtype::Bf16),
            values: rows(v, heads, DIM, Dtype::Bf16),
            first_key: 0,
            first_query: tokens as u32 - 1,
            scale: 0.0,
            select,
        };
        let (mut out, mut lse) = (vec![0.0; query.len()], vec![0.0; heads * group]);
        let mut room = vec![0.0; Decode::memory(&problem, false).expect("a size")];
        let job = Decode::new(problem, &mut out, &mut lse, &mut room, false);
        let mut job = job.expect("a decode");
        let mut scratch = vec![0.0; job.scratch()];
        let bytes = (size_of_val(&memory[..]) / part) as f64;
        let mut run = || bytes / seconds(|| job.all(&mut scratch).expect("enough scratch"));
        run();
        let rounds = if quick { 15 } else { 60 };
        let best = pairs(rounds, run, || Some(reading(&memory)));
        let mut bar = share(bar, "GB/s", "plain reading", best, 0.0);
        bar.goal = goal;
        bars.push(bar);
    }
    bars
}

/// Scores of 8,192 pages of 16 tokens, for 8 key heads with 4 queries each.
fn page_scores(quick: bool) -> Vec<Bar> {
    let (count, heads, group) = (8192, 8, 4);
    let memory = numbers(count * heads * 2 * DIM);
    let half = |x: &f32| (x.to_bits() >> 16) as u16;
    let halves: Vec<u16> = memory.iter().map(half).collect();
    let query = numbers(heads * group * DIM);
    let queries = rows(&query, heads * group, DIM, Dtype::F32);
    let mut bars = Vec::new();
    for (bar, of, bytes) in [
        ("page_scores_f32", rows(&memory, heads, 2 * DIM, Dtype::F32), size_of_val(&memory[..])),
        ("page_scores_bf16", rows(&halves, heads, 2 * DIM, Dtype::Bf16), size_of_val(&halves[..])),
    ] {
        let mut out = vec![0.0; heads * group * count];
        let mut scratch = vec![0.0; pages::scratch(&queries)];
        let run = || {
            let range = (0, count as u32);
            let time = seconds(|| {
                pages::scores(Level::best(), &of, &queries, range, &mut out, &mut scratch)
                    .expect("scores");
            });
            bytes as f64 / time
        };
        let rounds = if quick { 15 } else { 60 };
        let baseline =
            || Some(if bar.ends_with("f32") { reading(&memory) } else { reading(&halves) });
        bars.push(share(bar, "GB/s", "plain reading", pairs(rounds, run, baseline), 70.0));
    }
    bars
}

/// Runs the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let mut bars = dense(quick);
    bars.extend(sparse(quick));
    bars.extend(indices(quick));
    bars.extend(decode(quick));
    bars.extend(page_scores(quick));
    bars
}
