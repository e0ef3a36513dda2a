//! Policies that say what a prompt is computed with, against their rules in binary64,
//! written here once more and plainly.
//!
//! Scores in f32 and f64 differ in their last digits, so where a choice is by score, what was
//! chosen must be at least as good as what was not, up to a margin; counts, what is forced
//! and ties are exact.

#![allow(clippy::manual_is_multiple_of)]

use kvtier::attention::keys::Heads;
use kvtier::attention::{Rows, Scales};
use kvtier::base::spec::Spec;
use kvtier::base::status::{Result, Status};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::index::{Head, Kind};
use kvtier::sparse::{Context, Index, RetainedTokens, Shape, Sparse, caps, needs, registry};
use proptest::prelude::*;

const MARGIN: f64 = 1e-4;

fn shape(heads: u32, key_heads: u32, dim: u32) -> Shape {
    Shape {
        layers: 2,
        query_heads: heads,
        key_heads,
        key_dim: dim,
        value_dim: dim,
        scale: 0.0,
        kind: Default::default(),
        block_tokens: 16,
        max_tokens: 1 << 20,
    }
}

fn make(spec: &str, shape: &Shape) -> Result<Box<dyn Sparse>> {
    registry::make(&Spec::parse(spec)?, shape)
}

fn rows(numbers: &[f32], heads: u32, dim: u32) -> Rows<'_> {
    typed(numbers.as_ptr() as u64, numbers.len(), 4, heads, dim, Dtype::F32)
}

fn typed<'a>(at: u64, len: usize, bytes: u64, heads: u32, dim: u32, dtype: Dtype) -> Rows<'a> {
    let run_bytes = u64::from(dim) * bytes;
    let view = View {
        place: Place::At(at),
        tokens: (len / (heads * dim) as usize) as u32,
        heads,
        run_bytes,
        token_stride_bytes: run_bytes * u64::from(heads),
        head_stride_bytes: run_bytes,
    };
    // SAFETY: tests keep the numbers as long as they use the rows.
    unsafe { Rows::new(view, dtype, Scales::None) }.expect("sound")
}

/// Numbers that look random, about normal.
struct Numbers(u64);

impl Numbers {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as f64) / f64::from(1u32 << 31)
    }

    fn normal(&mut self) -> f32 {
        ((0..6).map(|_| self.unit()).sum::<f64>() - 3.0) as f32 * 1.4
    }

    fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// A prompt of one layer: all tokens, queries and keys.
#[derive(Clone)]
struct Prompt {
    shape: Shape,
    tokens: usize,
    q: Vec<f32>,
    k: Vec<f32>,
}

impl Prompt {
    fn new(heads: u32, key_heads: u32, dim: u32, tokens: usize, seed: u64) -> Prompt {
        let shape = shape(heads, key_heads, dim);
        let mut numbers = Numbers(seed);
        let q = numbers.take(tokens * (heads * dim) as usize);
        let k = numbers.take(tokens * (key_heads * dim) as usize);
        Prompt { shape, tokens, q, k }
    }

    fn dim(&self) -> usize {
        self.shape.key_dim as usize
    }

    fn query(&self, token: usize, head: usize) -> &[f32] {
        let at = (token * self.shape.query_heads as usize + head) * self.dim();
        &self.q[at..at + self.dim()]
    }

    fn key(&self, token: usize, head: usize) -> &[f32] {
        let key_head = head / self.shape.group() as usize;
        let at = (token * self.shape.key_heads as usize + key_head) * self.dim();
        &self.k[at..at + self.dim()]
    }

    fn product(&self, i: usize, j: usize, head: usize) -> f64 {
        dot(self.query(i, head), self.key(j, head))
    }

    /// Attention of a query.
    fn weights(&self, i: usize, head: usize) -> Vec<f64> {
        let scale = 1.0 / (self.dim() as f64).sqrt();
        softmax((0..=i).map(|j| self.product(i, j, head) * scale).collect())
    }

    /// Asks for the queries from `first` up to `end`.
    fn ask(&self, policy: &mut dyn Sparse, first: usize, end: usize) -> Result<Index> {
        let Shape { query_heads, key_heads, key_dim, .. } = self.shape;
        let (wide, narrow) = ((query_heads * key_dim) as usize, (key_heads * key_dim) as usize);
        let queries = rows(&self.q[first * wide..end * wide], query_heads, key_dim);
        let keys = rows(&self.k[..end * narrow], key_heads, key_dim);
        let mut out = Index::default();
        policy.index(0, &queries, Some(&keys), &prefill(first, end), &mut out)?;
        check(&out, &self.shape, first, end);
        Ok(out)
    }

    fn index(&self, spec: &str, first: usize, end: usize) -> Index {
        let mut policy = make(spec, &self.shape).expect(spec);
        self.ask(&mut *policy, first, end).expect(spec)
    }

    fn heads(&self) -> std::ops::Range<usize> {
        0..self.shape.query_heads as usize
    }
}

fn prefill(first: usize, end: usize) -> Context {
    Context { is_prefill: true, part: 0, parts: 1, first_query: first as u32, tokens: end as u32 }
}

fn decode(tokens: usize) -> Context {
    Context { first_query: tokens as u32 - 1, tokens: tokens as u32, ..Context::default() }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn softmax(logits: Vec<f64>) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let raised: Vec<f64> = logits.iter().map(|x| (x - most).exp()).collect();
    let sum: f64 = raised.iter().sum();
    raised.iter().map(|x| x / sum).collect()
}

/// Requirements of kernels on an index: lists ascend without duplicates, and rows exist.
fn check(index: &Index, shape: &Shape, first: usize, end: usize) {
    let heads = Heads { queries: shape.query_heads, keys: shape.key_heads };
    let n = index.heads.len() as u32;
    assert!(n <= 1 || n == shape.query_heads, "{n} heads");
    index.keys().check(heads, first as u32, (end - first) as u32).expect("kernels can follow");
}

/// Columns and diagonals of a head.
fn lines_of(index: &Index, head: usize) -> [&[u32]; 2] {
    assert_eq!(index.head(head as u32).kind, Kind::Lines);
    [0, 1].map(|list| index.list(head as u32, list))
}

/// Rows of blocks: queries and keys of one.
fn sizes_of(index: &Index, head: usize) -> (u32, u32) {
    let Head { kind, query_block, key_block, .. } = index.head(head as u32);
    assert_eq!(kind, Kind::Blocks);
    (query_block, key_block)
}

/// The blocks of a head and row.
fn row_of(index: &Index, head: usize, row: usize) -> &[u32] {
    sizes_of(index, head);
    index.list(head as u32, row as u32)
}

/// An index that no policy returns.
fn marked() -> Index {
    let mut index = Index::default();
    index.lists.push([7]);
    index
}

/// The keys that a query sees.
fn seen(index: &Index, head: usize, first: usize, query: usize) -> Vec<usize> {
    (0..=query)
        .filter(|&key| index.sees(head as u32, first as u32, query as u32, key as u32))
        .collect()
}

/// Checks that the chosen items are `count` many and the best ones.
fn check_best(scores: &[f64], chosen: &[u32], count: usize) {
    assert_eq!(chosen.len(), count);
    let is_in = |at: &usize| chosen.binary_search(&(*at as u32)).is_ok();
    let least = chosen.iter().map(|&at| scores[at as usize]).fold(f64::INFINITY, f64::min);
    let rest = (0..scores.len()).filter(|at| !is_in(at)).map(|at| scores[at]);
    let most = rest.fold(f64::NEG_INFINITY, f64::max);
    assert!(least >= most - MARGIN, "{least} was taken, {most} was left");
}

// minference

/// Scores of columns and diagonals from the last queries before `end`.
fn line_scores(p: &Prompt, head: usize, end: usize, last: usize) -> [Vec<f64>; 2] {
    let mut scores = [vec![0.0; end], vec![0.0; end]];
    for i in end - last..end {
        for (j, weight) in p.weights(i, head).into_iter().enumerate() {
            scores[0][j] += weight;
            scores[1][i - j] += weight;
        }
    }
    scores
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn minference_selects_the_best_columns_and_diagonals(
        seed in any::<u64>(), tokens in 2usize..260, part in 0usize..200, last in 1usize..70,
        sinks in 0usize..9, recent in 1usize..60, vertical in 1usize..90, slash in 1usize..90,
        share in 0usize..12,
    ) {
        let p = Prompt::new(4, 2, 8, tokens, seed);
        let first = part.min(tokens - 1);
        let (sizes, v, s) = if share > 0 {
            let all = (share as f64 / 12.0 * tokens as f64).floor() as usize;
            let sizes = format!("budget={}", share as f64 / 12.0);
            (sizes, (all / 5).max(sinks + 1), (4 * all / 5).max(recent + 1))
        } else {
            let sizes = format!("vertical={vertical},slash={slash}");
            (sizes, vertical.max(sinks), slash.max(recent.min(50)))
        };
        let (v, s) = (v.min(tokens), s.min(tokens));
        let spec = format!("minference({sizes},sinks={sinks},recent={recent},last_q={last})");
        let index = p.index(&spec, first, tokens);
        if v == tokens || s == tokens {
            prop_assert_eq!(index, Index::default());
            return Ok(());
        }
        let last = last.min(tokens - first);
        for head in p.heads() {
            let lines = lines_of(&index, head);
            let mut scores = line_scores(&p, head, tokens, last);
            scores[0].iter_mut().take(sinks).for_each(|x| *x = 1e9);
            for (d, score) in scores[1].iter_mut().take(recent).enumerate() {
                // The nearest forced ones are kept.
                *score = 1e9 - d as f64;
            }
            check_best(&scores[0], lines[0], v);
            check_best(&scores[1], lines[1], s);
        }
    }

    #[test]
    fn minference_index_covers_its_selection(
        seed in any::<u64>(), tokens in 70usize..300, part in 0usize..200,
        vertical in 1usize..40, slash in 1usize..80,
    ) {
        let p = Prompt::new(2, 1, 4, tokens, seed);
        let first = part.min(tokens - 1);
        let of = |form: &str| {
            let spec = format!(
                "minference(vertical={vertical},slash={slash},sinks=2,recent=3,form={form})");
            p.index(&spec, first, tokens)
        };
        let (exact, kernel, blocks) = (of("exact"), of("kernel"), of("blocks"));
        if exact == Index::default() {
            prop_assert_eq!((&kernel, &blocks), (&Index::default(), &Index::default()));
            return Ok(());
        }
        for head in p.heads() {
            prop_assert_eq!(sizes_of(&blocks, head), (64, 64));
            let Head { kind, query_block, .. } = kernel.head(head as u32);
            prop_assert_eq!((kind, query_block), (Kind::Ranges, 64));
            // No more numbers than the published kernel has: columns once, and two a range.
            let [columns, diagonals] = lines_of(&exact, head);
            prop_assert_eq!(kernel.list(head as u32, 0), columns);
            for (row, start) in (first..tokens).step_by(64).enumerate() {
                let end = (start + 64).min(tokens);
                let want = inflate(lines_of(&exact, head), start + 64, end);
                let got: Vec<u32> = (0..end).filter(|&key| kernel_has(&kernel, head, row, key)).map(|key| key as u32).collect();
                prop_assert_eq!(&got, &want);
                prop_assert!(kernel.list(head as u32, row as u32 + 1).len() <= 2 * diagonals.len());
                let mut whole: Vec<u32> = want.iter().map(|key| key / 64).collect();
                whole.dedup();
                prop_assert_eq!(row_of(&blocks, head, row), &whole);
            }
            for query in first..tokens {
                for key in 0..=query {
                    let sees = |i: &Index| i.sees(head as u32, first as u32, query as u32, key as u32);
                    prop_assert!(!sees(&exact) || sees(&kernel));
                    prop_assert!(!sees(&kernel) || sees(&blocks));
                }
            }
        }
    }
}

/// Whether a row of columns and ranges has a key.
fn kernel_has(index: &Index, head: usize, row: usize, key: usize) -> bool {
    let mut ranges = index.list(head as u32, row as u32 + 1).chunks(2);
    index.list(head as u32, 0).contains(&(key as u32))
        || ranges.any(|range| (range[0] as usize..range[1] as usize).contains(&key))
}

/// The kernel's keys of the block of queries that ends before `e`, before `end`: diagonals
/// from the farthest to the nearest become 64 keys each; what touches grows by 64.
fn inflate([columns, diagonals]: [&[u32]; 2], e: usize, end: usize) -> Vec<u32> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    let mut descending: Vec<usize> = diagonals.iter().map(|&d| d as usize).collect();
    descending.sort_by(|a, b| b.cmp(a));
    for d in descending.into_iter().filter(|&d| d < e) {
        let stop = if e - d < 64 { 64 } else { e - d };
        match ranges.last_mut() {
            Some(last) if stop <= last.1 => {}
            Some(last) if stop - last.1 <= 64 => last.1 += 64,
            _ => ranges.push((stop - 64, stop)),
        }
    }
    let is_in = |key: usize| {
        ranges.iter().any(|r| (r.0..r.1).contains(&key)) || columns.contains(&(key as u32))
    };
    (0..end).filter(|&key| is_in(key)).map(|key| key as u32).collect()
}

#[test]
fn minference_defaults_match_the_publication() {
    let p = Prompt::new(1, 1, 4, 1000, 7);
    let sizes = |spec: &str, end: usize| {
        let index = p.index(spec, 0, end);
        let lines = lines_of(&index, 0);
        assert_eq!(lines[1][..50], (0..50).collect::<Vec<u32>>());
        (lines[0].len(), lines[1].len())
    };
    assert_eq!(sizes("minference", 1000), (60, 240));
    assert_eq!(sizes("minference(budget=0.5)", 999), (99, 399));
    assert_eq!(sizes("minference", 200), (31, 101), "never below what is forced");
}

#[test]
fn minference_fixed_sizes_override_the_budget() {
    let p = Prompt::new(1, 1, 4, 1000, 7);
    let index = p.index("minference(vertical=10,slash=60)", 0, 1000);
    let lines = lines_of(&index, 0);
    assert_eq!(lines[0], (0..30).collect::<Vec<u32>>(), "not less than the sinks");
    assert_eq!(lines[1], (0..60).collect::<Vec<u32>>(), "the nearest of those forced");
    assert_eq!(p.index("minference(vertical=500)", 0, 1000), Index::default(), "6096 diagonals");
    let index = p.index("minference(vertical=500,slash=10)", 0, 1000);
    assert_eq!(lines_of(&index, 0)[1].len(), 50);
}

#[test]
fn positional_patterns_need_no_keys() {
    let p = Prompt::new(2, 1, 4, 300, 1);
    for (kind, needs) in [("a_shape", 0), ("tri_shape", 0), ("block_sparse", 130)] {
        let spec = format!("minference(type={kind},vertical=10,slash=70)");
        let mut policy = make(&spec, &p.shape).expect("sound");
        assert_eq!(policy.traits().needs, needs, "{spec}");
        let (queries, mut out) = (rows(&p.q, 2, 4), Index::default());
        let without_keys = policy.index(0, &queries, None, &prefill(0, 300), &mut out);
        match needs {
            0 => assert_eq!((without_keys, out), (Ok(()), p.index(&spec, 0, 300)), "{spec}"),
            _ => assert!(without_keys.is_err(), "{spec}"),
        }
    }
}

#[test]
fn a_shape_selects_sinks_and_recent_keys() {
    let p = Prompt::new(2, 1, 4, 300, 1);
    let in_a = |query: usize, key: usize| key < 10 || query - key < 70;
    for first in [0, 100] {
        let index = p.index("minference(type=a_shape,vertical=10,slash=70)", first, 300);
        for query in first..300 {
            let want: Vec<usize> = (0..=query).filter(|&key| in_a(query, key)).collect();
            assert_eq!(seen(&index, 1, first, query), want);
        }
        let spec = "minference(type=tri_shape,vertical=10,slash=70,dense_rows=40";
        let index = p.index(&format!("{spec})"), first, 300);
        assert_eq!(index.heads.len(), 1, "one for all");
        for query in first..300 {
            let want: Vec<usize> =
                (0..=query).filter(|&key| in_a(query, key) || query >= 260).collect();
            assert_eq!(seen(&index, 1, first, query), want);
        }
        let index = p.index(&format!("{spec},form=blocks)"), first, 300);
        assert_eq!((sizes_of(&index, 1), index.head(0).dense_from), ((64, 64), 260));
        for (row, start) in (first..300).step_by(64).enumerate() {
            let queries = start..(start + 64).min(300);
            let has = |block: usize| {
                let mut keys = block * 64..block * 64 + 64;
                keys.any(|k| queries.clone().any(|q| k <= q && in_a(q, k)))
            };
            let want: Vec<u32> = (0..5).filter(|&b| has(b)).map(|b| b as u32).collect();
            if start < 260 {
                assert_eq!(row_of(&index, 1, row), want, "{row}");
            }
            for query in start.max(260)..start + 64 {
                assert_eq!(seen(&index, 1, first, query).len(), query + 1);
            }
        }
    }
}

/// Mean of 64 rows; what is missing counts as zeros.
fn mean64<'a>(row: impl Fn(usize) -> &'a [f32], first: usize, end: usize) -> Vec<f32> {
    let mut mean = vec![0f64; row(first).len()];
    for at in first..(first + 64).min(end) {
        mean.iter_mut().zip(row(at)).for_each(|(sum, x)| *sum += f64::from(*x) / 64.0);
    }
    mean.iter().map(|x| *x as f32).collect()
}

#[test]
fn block_sparse_selects_the_best_blocks() {
    for (tokens, first, count) in [(700, 0, 3), (704, 0, 2), (640, 192, 4), (650, 100, 3)] {
        let p = Prompt::new(4, 2, 8, tokens, 3 + tokens as u64);
        let spec = format!("minference(type=block_sparse,blocks={count})");
        let index = p.index(&spec, first, tokens);
        assert_eq!(sizes_of(&index, 3), (64, 64));
        for head in p.heads() {
            for (row, start) in (first..tokens).step_by(64).enumerate() {
                let q = mean64(|at| p.query(at, head), start, tokens);
                let open = start / 64 + 1;
                let scores: Vec<f64> = (0..open)
                    .map(|b| dot(&q, &mean64(|at| p.key(at, head), b * 64, tokens)))
                    .collect();
                let (chosen, forced): (Vec<u32>, Vec<u32>) =
                    row_of(&index, head, row).iter().partition(|&&b| (b as usize) < open);
                let end = (start + 64).min(tokens);
                let behind: Vec<u32> = (open as u32..end.div_ceil(64) as u32).collect();
                assert_eq!(forced, behind, "blocks that begin inside of the row");
                check_best(&scores, &chosen, count.min(open));
            }
        }
    }
}

#[test]
fn partial_block_is_padded_with_zeros() {
    let mut p = Prompt::new(1, 1, 4, 321, 1);
    p.q.fill(1.0);
    for (token, key) in p.k.chunks_mut(4).enumerate() {
        // Means of 1 to 5, and of 3.5: not of 224.
        key.fill(if token < 320 { 1.0 + (token / 64) as f32 } else { 3.5 * 64.0 });
    }
    let index = p.index("minference(type=block_sparse,blocks=2)", 0, 321);
    assert_eq!(row_of(&index, 0, 5), [3, 4]);
    let index = p.index("minference(type=block_sparse,blocks=3)", 0, 321);
    assert_eq!(row_of(&index, 0, 5), [3, 4, 5]);
}

struct File(std::path::PathBuf);

impl File {
    fn new(name: &str, text: &str) -> File {
        let path = std::env::temp_dir().join(format!("{name}-{}.json", std::process::id()));
        std::fs::write(&path, text).expect("a temporary file");
        File(path)
    }

    fn spec(&self, more: &str) -> String {
        format!("minference(pattern={:?}{more})", self.0.display().to_string())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn head_patterns_come_from_the_file() {
    let p = Prompt::new(4, 2, 4, 400, 11);
    let file = File::new(
        "kvtier-mixed",
        r#"[{"0": ["vertical_and_slash", 40, 60, 1.5], "1": ["stream_llm", 8, 20, 2],
             "2": ["block_sparse", 2, 0]}, {}]"#,
    );
    let mixed = p.index(&file.spec(",budget=0.4"), 0, 400);
    let kinds = [Kind::Lines, Kind::Lines, Kind::Blocks, Kind::Lines];
    assert_eq!(mixed.heads.iter().map(|head| head.kind).collect::<Vec<Kind>>(), kinds);
    let alone = [
        p.index("minference(vertical=40,slash=60)", 0, 400),
        p.index("minference(type=a_shape,vertical=8,slash=20)", 0, 400),
        p.index("minference(type=block_sparse,blocks=2)", 0, 400),
        p.index("minference(budget=0.4)", 0, 400),
    ];
    for query in 0..400 {
        for (head, alone) in alone.iter().enumerate() {
            assert_eq!(seen(&mixed, head, 0, query), seen(alone, head, 0, query), "{head}");
        }
    }
    // In the kernel's form others stay what they are.
    let kernel = p.index(&file.spec(",budget=0.4,form=kernel"), 0, 400);
    let kinds = [Kind::Ranges, Kind::Lines, Kind::Blocks, Kind::Ranges];
    assert_eq!(kernel.heads.iter().map(|head| head.kind).collect::<Vec<Kind>>(), kinds);
    for (head, query) in (0..4).flat_map(|head| (0..400).map(move |query| (head, query))) {
        let (exact, kernel) = (seen(&mixed, head, 0, query), seen(&kernel, head, 0, query));
        assert!(exact.iter().all(|key| kernel.contains(key)));
        assert!(matches!(head, 0 | 3) || exact == kernel);
    }
    let lines = File::new("kvtier-lines", r#"[[["a_shape",8,20],["vertical_slash",40,60]],[]]"#);
    let index = p.index(&lines.spec(""), 0, 400);
    assert_eq!(lines_of(&index, 0)[0], (0..8).collect::<Vec<u32>>());
    assert_eq!(lines_of(&index, 1)[0].len(), 40);
    assert_eq!(lines_of(&index, 2)[0].len(), 31, "as the spec says");
    for text in ["[{}]", "[{},{},{}]", r#"[{"4":["a_shape",1,1]},{}]"#, "{}", "[{},"] {
        let bad = File::new("kvtier-bad", text);
        assert!(make(&bad.spec(""), &p.shape).is_err(), "{text}");
    }
    assert!(make("minference(pattern=\"/no/such/file\")", &p.shape).is_err());
}

// xattention

/// Sums of the estimated attention by blocks of keys, for the queries of a row.
fn antidiagonals(
    p: &Prompt,
    head: usize,
    first: usize,
    row: (usize, usize),
    block: usize,
    stride: usize,
) -> Vec<f64> {
    let mut sums = vec![0.0; p.tokens.div_ceil(block)];
    let zero = vec![0f32; p.dim()];
    let query = |at: usize| if at < p.tokens { p.query(at, head) } else { &zero };
    let key = |at: usize| if at < p.tokens { p.key(at, head) } else { &zero };
    assert_eq!((row.0 - first) % stride, 0);
    for start in (row.0..row.1).step_by(stride) {
        let logits: Vec<f64> = (0..=start / stride)
            .map(|j| {
                let sum: f64 = (0..stride)
                    .map(|n| dot(query(start + stride - 1 - n), key(j * stride + n)))
                    .sum();
                sum / (p.dim() as f64).sqrt() / stride as f64
            })
            .collect();
        for (j, weight) in softmax(logits).into_iter().enumerate() {
            sums[j * stride / block] += weight;
        }
    }
    sums
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn xattention_stops_at_its_threshold(
        seed in any::<u64>(), tokens in 40usize..400, part in 0usize..300, tau in 1u32..20,
        (block, stride) in prop_oneof![Just((16usize, 4usize)), Just((32, 8)), Just((64, 1)), Just((8, 8))],
        compat in any::<bool>(),
    ) {
        let p = Prompt::new(2, 1, 4, tokens, seed);
        let first = if compat { 0 } else { part.min(tokens - 1) };
        let tau = f64::from(tau) / 20.0;
        let spec = format!("xattention(block={block},stride={stride},tau={tau},compat={compat})");
        let index = p.index(&spec, first, tokens);
        if tokens <= block {
            prop_assert_eq!(index, Index::default());
            return Ok(());
        }
        for head in p.heads() {
            for (row, start) in (first..tokens).step_by(block).enumerate() {
                let end = (start + block).min(tokens);
                let sums = antidiagonals(&p, head, first, (start, end), block, stride);
                let needed = tau * sums.iter().sum::<f64>();
                let own = start / block..end.div_ceil(block);
                let is_forced = |b: &u32| own.contains(&(*b as usize)) || (*b == 0 && !compat);
                let chosen = row_of(&index, head, row);
                prop_assert!(chosen.contains(&0), "{chosen:?}");
                let all_forced = (0..own.end as u32).filter(is_forced).count();
                prop_assert_eq!(chosen.iter().filter(|b| is_forced(b)).count(), all_forced);
                // Whether these are the best, and as many as are needed.
                let is_right = |chosen: &[u32]| {
                    let (forced, free): (Vec<u32>, Vec<u32>) = chosen.iter().partition(|b| is_forced(b));
                    let base: f64 = forced.iter().map(|&b| sums[b as usize]).sum();
                    let mut order: Vec<f64> = free.iter().map(|&b| sums[b as usize]).collect();
                    order.sort_by(|a, b| b.total_cmp(a));
                    let left = (0..own.end as u32).filter(|b| !chosen.contains(b));
                    let best_left = left.map(|b| sums[b as usize]).fold(f64::NEG_INFINITY, f64::max);
                    let are_best = order.last().is_none_or(|least| *least >= best_left - MARGIN);
                    let most = own.end - all_forced;
                    // Whether the `n` best suffice.
                    let enough =
                        |n: usize, slack: f64| base + order[..n].iter().sum::<f64>() >= needed + slack;
                    let n = order.len();
                    are_best && match compat {
                        // One too many, and no more.
                        true => {
                            (n <= most.min(1) || !enough(n - 2, MARGIN))
                                && (n == most || (n > 0 && enough(n - 1, -MARGIN)))
                        }
                        false => (n == 0 || !enough(n - 1, MARGIN)) && (n == most || enough(n, -MARGIN)),
                    }
                };
                // The first block is in whether it is among the best or not.
                let rest: Vec<u32> = chosen.iter().copied().filter(|&b| b > 0).collect();
                let is_free = compat && !own.contains(&0);
                prop_assert!(is_right(chosen) || (is_free && is_right(&rest)), "{chosen:?} of {sums:?}");
            }
        }
    }
}

#[test]
fn prompt_parts_select_the_rows_of_the_whole() {
    let p = Prompt::new(4, 2, 8, 1000, 5);
    for spec in [
        "xattention",
        "xattention(block=64,stride=16,tau=0.5)",
        "minference(type=block_sparse,blocks=3)",
    ] {
        let whole = p.index(spec, 0, 1000);
        let block = sizes_of(&whole, 0).0 as usize;
        let mut policy = make(spec, &p.shape).expect(spec);
        for (first, end) in [(0, 512), (512, 896), (896, 1000)] {
            let index = p.ask(&mut *policy, first, end).expect(spec);
            for head in p.heads() {
                for row in 0..(end - first).div_ceil(block) {
                    let want = row_of(&whole, head, first / block + row);
                    assert_eq!(row_of(&index, head, row), want, "{spec} {first} {row}");
                }
            }
        }
    }
    let whole = p.index("minference", 0, 1000);
    assert_eq!(p.index("minference", 900, 1000), whole, "the same last queries");
}

// flexprefill

struct Flex {
    block: usize,
    gamma: f64,
    tau: f64,
}

/// The blocks of each row of a head.
fn flex(p: &Prompt, head: usize, first: usize, f: &Flex) -> Vec<Vec<u32>> {
    let (n, b) = (p.tokens, f.block);
    let (count, blocks) = (b.min(n - first), n.div_ceil(b));
    let scores = line_scores(p, head, n, count)
        .map(|s| s.iter().map(|x| x / count as f64).collect::<Vec<f64>>());
    let by_block = |s: &[f64]| s.chunks(b).map(|c| c.iter().sum()).collect::<Vec<f64>>();
    let mean = |row: &dyn Fn(usize) -> Vec<f32>, from: usize, to: usize| -> Vec<f64> {
        let mut sum = vec![0.0; p.dim()];
        for at in from..to {
            sum.iter_mut().zip(row(at)).for_each(|(s, x)| *s += f64::from(x) / (to - from) as f64);
        }
        sum
    };
    let query = |at: usize| p.query(at, head).to_vec();
    let key = |at: usize| p.key(at, head).to_vec();
    let keys: Vec<Vec<f64>> = (0..blocks).map(|c| mean(&key, c * b, (c * b + b).min(n))).collect();
    let softened = |q: &[f64], open: usize| {
        let scale = 1.0 / (p.dim() as f64).sqrt();
        softmax(
            keys[..open]
                .iter()
                .map(|k| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * scale)
                .collect(),
        )
    };
    let columns = by_block(&scores[0]);
    let estimate = softened(&mean(&query, n - count, n), blocks);
    let distance: f64 = estimate
        .iter()
        .zip(&columns)
        .map(|(p, q)| {
            let m = (p + q) / 2.0;
            0.5 * p * (p / m).ln() + if *q > 0.0 { 0.5 * q * (q / m).ln() } else { 0.0 }
        })
        .sum::<f64>()
        .sqrt();
    let rows: Vec<(usize, usize)> = (first..n).step_by(b).map(|s| (s, (s + b).min(n))).collect();
    let forced = |row: &(usize, usize)| {
        let mut out = vec![0u32];
        out.extend((row.0 / b..row.1.div_ceil(b)).map(|x| x as u32));
        out
    };
    let ranked = |s: &[f64]| {
        let mut order: Vec<usize> = (0..s.len()).collect();
        order.sort_by(|&x, &y| s[y].total_cmp(&s[x]).then(x.cmp(&y)));
        order
    };
    let mut out: Vec<Vec<u32>> = rows.iter().map(forced).collect();
    if distance < f.tau {
        let mut cells = Vec::new();
        for (at, row) in rows.iter().enumerate() {
            let weights = softened(&mean(&query, row.0, row.1), row.0 / b + 1);
            cells.extend(weights.into_iter().enumerate().map(|(c, w)| (at, c as u32, w)));
        }
        let order = ranked(&cells.iter().map(|c| c.2).collect::<Vec<f64>>());
        let mut reached = 0.0;
        for at in order {
            if reached >= f.gamma * rows.len() as f64 {
                break;
            }
            reached += cells[at].2;
            out[cells[at].0].push(cells[at].1);
        }
    } else {
        let counted = |s: &[f64]| {
            let mut reached = 0.0;
            let within = ranked(s).into_iter().take_while(|&at| {
                reached += s[at];
                reached <= f.gamma
            });
            (within.count() + 1) / 128 + 1
        };
        let chosen = |s: &[f64]| {
            let mut sums = by_block(s);
            sums[0] = f64::INFINITY;
            ranked(&sums).into_iter().take(counted(s)).collect::<Vec<usize>>()
        };
        let (columns, diagonals) = (chosen(&scores[0]), chosen(&scores[1]));
        for (row, out) in rows.iter().zip(&mut out) {
            let last = row.1.div_ceil(b) - 1;
            out.extend(columns.iter().filter(|&&c| c <= last).map(|&c| c as u32));
            for own in row.0 / b..=last {
                out.extend(diagonals.iter().filter_map(|&d| own.checked_sub(d)).map(|c| c as u32));
            }
        }
    }
    for row in &mut out {
        row.sort_unstable();
        row.dedup();
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn flexprefill_sizes_each_head(
        seed in any::<u64>(), tokens in 60usize..500, part in 0usize..300,
        block in prop_oneof![Just(16usize), Just(32), Just(64)], gamma in 5u32..20,
        tau in prop_oneof![Just(0.0), Just(0.1), Just(0.3), Just(1.0)],
    ) {
        let p = Prompt::new(2, 1, 4, tokens, seed);
        let first = part.min(tokens - 1);
        let gamma = f64::from(gamma) / 20.0;
        let spec = format!("flexprefill(block={block},gamma={gamma},tau={tau})");
        let index = p.index(&spec, first, tokens);
        if tokens <= 2 * block {
            prop_assert_eq!(index, Index::default());
            return Ok(());
        }
        for head in p.heads() {
            let got: Vec<Vec<u32>> =
                (0..index.head(0).rows() as usize).map(|row| row_of(&index, head, row).to_vec()).collect();
            // A sum that ends on the threshold may fall to either side of it.
            let slacks = [0.0, 2e-6, -2e-6, 2e-5, -2e-5];
            let is_right = slacks.iter().any(|slack| {
                let f = Flex { block, gamma: gamma + slack, tau: tau + slack };
                flex(&p, head, first, &f) == got
            });
            prop_assert!(is_right, "{spec} of {tokens} from {first}: {got:?}");
        }
    }
}

#[test]
fn flexprefill_budget_bounds_the_lines() {
    let p = Prompt::new(1, 1, 4, 600, 9);
    assert_eq!(p.index("flexprefill(block=16,min_budget=600)", 0, 600), Index::default());
    let index = p.index("flexprefill(block=16,tau=0,max_budget=16)", 0, 600);
    for row in 0..38 {
        let want: Vec<u32> = if row == 0 { vec![0] } else { vec![0, row] };
        assert_eq!(row_of(&index, 0, row as usize), want, "the first block and the nearest");
    }
    let index = p.index("flexprefill(block=16,tau=0,gamma=0.01,min_budget=80)", 0, 600);
    assert!(row_of(&index, 0, 37).len() >= 5);
}

// dsa

/// The indexer's queries, keys and weights of a sequence.
struct Indexer {
    heads: usize,
    dim: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    w: Vec<f32>,
}

impl Indexer {
    fn new(heads: usize, dim: usize, tokens: usize, seed: u64) -> Indexer {
        let mut n = Numbers(seed);
        Indexer {
            heads,
            dim,
            q: n.take(tokens * heads * dim),
            k: n.take(tokens * dim),
            w: n.take(tokens * heads),
        }
    }

    fn queries(&self, first: usize, end: usize) -> Rows<'_> {
        let each = self.heads * self.dim;
        rows(&self.q[first * each..end * each], self.heads as u32, self.dim as u32)
    }

    fn keys(&self, first: usize, end: usize) -> Rows<'_> {
        rows(&self.k[first * self.dim..end * self.dim], 1, self.dim as u32)
    }

    fn weights(&self, first: usize, end: usize) -> &[f32] {
        &self.w[first * self.heads..end * self.heads]
    }

    /// By the definition; keys as they are kept.
    fn scores(&self, t: usize, keys: &[f32]) -> Vec<f64> {
        (0..=t)
            .map(|s| {
                let key = &keys[s * self.dim..(s + 1) * self.dim];
                (0..self.heads)
                    .map(|j| {
                        let at = (t * self.heads + j) * self.dim;
                        let product = dot(&self.q[at..at + self.dim], key);
                        f64::from(self.w[t * self.heads + j]) * product.max(0.0)
                    })
                    .sum()
            })
            .collect()
    }

    /// Keys rounded to the nearest of all numbers with 4 bits of exponent and 3 of mantissa.
    fn rounded(&self) -> Vec<f32> {
        let mut all: Vec<f32> = Vec::new();
        for exponent in 0..16 {
            for fraction in 0..8 {
                let size = match exponent {
                    0 => f64::from(fraction) * 2f64.powi(-9),
                    e => (1.0 + f64::from(fraction) / 8.0) * 2f64.powi(e - 7),
                };
                all.push(size as f32);
            }
        }
        all.pop();
        let nearest = |x: f32| {
            let best = all
                .iter()
                .copied()
                .min_by(|a, b| (a - x.abs()).abs().total_cmp(&(b - x.abs()).abs()));
            best.expect("some").copysign(x)
        };
        let keys = self.k.chunks(self.dim).flat_map(|key| {
            let scale = key.iter().fold(1e-4f32, |most, x| most.max(x.abs())) / 448.0;
            key.iter().map(|x| nearest(x / scale) * scale).collect::<Vec<f32>>()
        });
        keys.collect()
    }

    fn spec(&self, more: &str) -> String {
        format!("dsa(heads={},dim={}{more})", self.heads, self.dim)
    }

    fn ask(&self, policy: &mut dyn Sparse, first: usize, end: usize) -> Result<Index> {
        policy.score(1, self.weights(first, end))?;
        let mut out = Index::default();
        policy.index(1, &self.queries(first, end), None, &prefill(first, end), &mut out)?;
        check(&out, &shape(4, 2, 8), first, end);
        Ok(out)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn dsa_selects_the_top_tokens(
        seed in any::<u64>(), tokens in 2usize..150, part in 0usize..100, topk in 1usize..60,
        heads in prop_oneof![Just(1usize), Just(5), Just(64)], is_small in any::<bool>(),
    ) {
        let x = Indexer::new(heads, 16, tokens, seed);
        let state = if is_small { "fp8" } else { "f32" };
        let mut policy = make(&x.spec(&format!(",topk={topk},state={state}")), &shape(4, 2, 8)).expect("sound");
        let first = part.min(tokens - 1);
        policy.append(1, 0, &x.keys(0, first.max(1))).expect("finite");
        if first.max(1) < tokens {
            policy.append(1, first.max(1) as u32, &x.keys(first.max(1), tokens)).expect("finite");
        }
        let index = x.ask(&mut *policy, first, tokens).expect("sound");
        if tokens <= topk {
            prop_assert_eq!(index, Index::default());
            return Ok(());
        }
        let keys = if is_small { x.rounded() } else { x.k.clone() };
        for t in first..tokens {
            let got: Vec<u32> = seen(&index, 3, first, t).into_iter().map(|s| s as u32).collect();
            let row = if tokens - first == 1 { 0 } else { t - first };
            let listed = row_of(&index, 3, row);
            prop_assert_eq!(listed, &got[..], "nothing behind the query is named");
            check_best(&x.scores(t, &keys), &got, topk.min(t + 1));
        }
    }
}

#[test]
fn dsa_ignores_negative_products() {
    // Without ReLU token 0 would win for the first head and lose for the second.
    let x = Indexer {
        heads: 2,
        dim: 1,
        q: [[0.0; 2]; 3].concat().into_iter().chain([1.0, -1.0]).collect(),
        k: vec![-3.0, 1.0, 0.5, 0.25],
        w: [[0.0; 2]; 3].concat().into_iter().chain([1.0, -1.0]).collect(),
    };
    let mut policy = make(&x.spec(",topk=2,state=f32"), &shape(1, 1, 4)).expect("sound");
    policy.append(1, 0, &x.keys(0, 4)).expect("finite");
    // Scores: -3, 1, 0.5, 0.25.
    let index = x.ask(&mut *policy, 3, 4).expect("sound");
    assert_eq!(seen(&index, 0, 3, 3), [1, 2]);
}

#[test]
fn dsa_loads_saves_and_truncates() {
    let x = Indexer::new(4, 16, 64, 77);
    let mut policy = make(&x.spec(",topk=5,load=true"), &shape(2, 1, 8)).expect("sound");
    let traits = policy.traits();
    assert!(traits.requires_block_selection && traits.caps & caps::LOAD_DECODE != 0);
    assert!(traits.needs & needs::WEIGHTS != 0);
    policy.append(1, 0, &x.keys(0, 64)).expect("finite");
    for block in 0..4u32 {
        let first = block as usize * 16;
        policy.seal(1, 100 - block, block * 16, &x.keys(first, first + 16)).expect("there");
    }
    assert!(policy.state_bytes() >= 64 * 20);
    let query = x.queries(63, 64);
    let ids = [97, 98, 99, 100];
    let select = |policy: &mut dyn Sparse, ids: &[u32]| {
        policy.score(1, x.weights(63, 64)).expect("finite");
        let mut out = vec![7];
        policy.select(1, Some(&query), ids, &decode(64), &mut out).map(|()| out)
    };
    let chosen = seen(&x.ask(&mut *policy, 63, 64).expect("sound"), 0, 63, 63);
    let mut want: Vec<u32> = chosen.iter().map(|&token| 100 - token as u32 / 16).collect();
    want.sort_unstable();
    want.dedup();
    assert_eq!(select(&mut *policy, &ids).expect("sound"), want);
    assert_eq!(
        select(&mut *policy, &ids[..1]).expect("sound"),
        want.iter().copied().filter(|&id| id == 97).collect::<Vec<_>>()
    );
    let mut all = Vec::new();
    policy.select(1, None, &[100, 97], &decode(64), &mut all).expect("no query: all");
    assert_eq!(all, [97, 100]);
    assert_eq!(select(&mut *policy, &[97, 5]).expect_err("unknown").status(), Status::NotFound);
    assert_eq!(select(&mut *policy, &[97, 97]).expect_err("twice").status(), Status::Invalid);
    // Saved state gives the same answers in another policy.
    let mut other = make(&x.spec(",topk=5,load=true"), &shape(2, 1, 8)).expect("sound");
    for block in 0..4u32 {
        let mut saved = Vec::new();
        policy.save(1, 100 - block, &mut saved).expect("there");
        if block == 3 {
            assert!(other.load(1, 1, 64, &saved).is_err(), "a gap");
            assert!(other.load(1, 1, 48, &saved[1..]).is_err());
        }
        other.load(1, 100 - block, block * 16, &saved).expect("sound");
    }
    assert_eq!(select(&mut *other, &ids).expect("sound"), want);
    let mut fork = policy.fork().expect("memory");
    policy.truncate(40).expect("fewer");
    assert_eq!(policy.save(1, 97, &mut Vec::new()).expect_err("gone").status(), Status::NotFound);
    assert_eq!(x.ask(&mut *policy, 63, 64).expect_err("no keys").status(), Status::State);
    policy.append(1, 40, &x.keys(40, 64)).expect("again");
    let gone = policy.save(1, 97, &mut Vec::new()).expect_err("the block was replaced");
    assert_eq!(gone.status(), Status::NotFound);
    assert_eq!(seen(&x.ask(&mut *policy, 63, 64).expect("sound"), 0, 63, 63), chosen);
    assert_eq!(select(&mut *fork, &ids).expect("a copy"), want);
    fork.reset();
    assert!(fork.append(1, 1, &x.keys(0, 1)).is_err(), "begins anew");
}

#[test]
fn dsa_rejects_mismatched_keys() {
    let x = Indexer::new(4, 16, 64, 78);
    let mut policy = make(&x.spec(",topk=5"), &shape(2, 1, 8)).expect("sound");
    assert!(policy.append(2, 0, &x.keys(0, 8)).is_err(), "no such layer");
    assert!(
        policy.append(1, 0, &rows(&x.k, 2, 16)).is_err()
            && policy.append(1, 0, &rows(&x.k, 1, 8)).is_err()
    );
    let mut bad = x.k.clone();
    bad[100] = f32::NAN;
    assert!(policy.append(1, 0, &rows(&bad, 1, 16)).is_err());
    policy.append(1, 0, &x.keys(0, 64)).expect("nothing was kept of the bad ones");
    let mut out = marked();
    let before = out.clone();
    let status = |policy: &mut dyn Sparse,
                  queries: &Rows<'_>,
                  context: &Context,
                  out: &mut Index| {
        policy.index(1, queries, Some(&x.keys(0, 64)), context, out).expect_err("refused").status()
    };
    let none = status(&mut *policy, &x.queries(60, 64), &prefill(60, 64), &mut out);
    assert_eq!(none, Status::State, "no weights");
    assert!(policy.score(1, &[1.0; 3]).is_err() && policy.score(1, &[]).is_err());
    assert!(policy.score(1, &[1.0, f32::NAN, 1.0, 1.0]).is_err());
    policy.score(1, x.weights(60, 64)).expect("finite");
    assert_eq!(status(&mut *policy, &x.queries(61, 64), &prefill(61, 64), &mut out), Status::State);
    let mut numbers = x.q[60 * 64..].to_vec();
    numbers[70] = f32::INFINITY;
    assert_eq!(
        status(&mut *policy, &rows(&numbers, 4, 16), &prefill(60, 64), &mut out),
        Status::Invalid
    );
    assert_eq!(
        status(&mut *policy, &rows(&numbers, 8, 8), &prefill(60, 64), &mut out),
        Status::Invalid
    );
    assert_eq!(out, before);
    assert!(policy.index(1, &x.queries(60, 64), None, &prefill(60, 64), &mut out).is_ok());
    assert!(policy.seal(1, 0, 60, &x.keys(0, 8)).is_err(), "past the last key");
}

// streaming and full

#[test]
fn streaming_selects_sinks_and_recent_tokens() {
    let p = Prompt::new(2, 1, 4, 100, 1);
    for (sinks, recent) in [(4, 20), (0, 1), (1, 50)] {
        let spec = format!("streaming(sinks={sinks},recent={recent},rotate=true)");
        for (first, end) in [(0, 100), (30, 100), (99, 100)] {
            let index = p.index(&spec, first, end);
            for query in first..end {
                let want: Vec<usize> =
                    (0..=query).filter(|&k| k < sinks || k + recent > query).collect();
                assert_eq!(seen(&index, 1, first, query), want, "{spec}");
            }
        }
    }
    assert_eq!(p.index("streaming(sinks=4,recent=96)", 0, 100), Index::default());
    assert_eq!(p.index("streaming", 0, 100), Index::default());
    assert_eq!(sizes_of(&p.index("streaming(recent=5)", 99, 100), 0), (0, 1));
}

#[test]
fn streaming_evicts_the_middle_once() {
    let p = Prompt::new(2, 1, 4, 1, 1);
    let mut policy = make("streaming(sinks=2,recent=3)", &p.shape).expect("sound");
    let mut keep = RetainedTokens::default();
    assert_eq!(policy.evict(0, &decode(5), &mut keep), Ok(false));
    assert_eq!(policy.evict(0, &decode(6), &mut keep), Ok(true));
    assert_eq!(keep.of(1), [0, 1, 3, 4, 5]);
    assert_eq!(policy.evict(0, &decode(6), &mut keep), Ok(true), "nothing was done yet");
    policy.evicted(0, &keep).expect("as said");
    let mut fork = policy.fork().expect("memory");
    assert_eq!(policy.evict(0, &decode(6), &mut keep), Ok(false));
    assert_eq!(policy.evict(1, &decode(6), &mut keep), Ok(true), "each layer for itself");
    assert_eq!(policy.evict(0, &decode(8), &mut keep), Ok(true));
    assert_eq!(keep.of(0), [0, 1, 5, 6, 7]);
    policy.evicted(0, &keep).expect("as said");
    // Tokens taken back do not bring back what was evicted.
    policy.truncate(4).expect("fewer");
    assert_eq!(policy.evict(0, &decode(7), &mut keep), Ok(false));
    assert_eq!(policy.evict(0, &decode(8), &mut keep), Ok(true));
    assert_eq!(fork.evict(0, &decode(7), &mut keep), Ok(true));
    policy.reset();
    assert_eq!(policy.evict(0, &decode(6), &mut keep), Ok(true));
    let before = keep.clone();
    assert_eq!(
        policy.evict(0, &prefill(0, 50), &mut keep).expect_err("a prompt").status(),
        Status::Unsupported
    );
    assert!(policy.evict(2, &decode(6), &mut keep).is_err() && policy.evicted(2, &keep).is_err());
    assert!(policy.evicted(0, &RetainedTokens::default()).is_err());
    assert_eq!(keep, before);
}

#[test]
fn full_policy_selects_everything() {
    let p = Prompt::new(2, 1, 4, 30, 1);
    assert_eq!(p.index("full", 10, 30), Index::default());
    let mut policy = make("full", &p.shape).expect("sound");
    let mut out = vec![9];
    policy.select(0, None, &[3, 1, 2, 2], &decode(30), &mut out).expect("all");
    assert_eq!(out, [1, 2, 3]);
    assert_eq!(policy.evict(0, &decode(30), &mut RetainedTokens::default()), Ok(false));
}

// all of them

const PROMPT_POLICIES: [&str; 9] = [
    "minference(budget=0.4,sinks=2,recent=5)",
    "minference(vertical=9,slash=20,sinks=2,recent=5,form=kernel)",
    "minference(type=block_sparse,blocks=2)",
    "minference(type=a_shape,vertical=5,slash=9)",
    "minference(type=tri_shape,vertical=5,slash=9)",
    "xattention(block=32,stride=8,tau=0.5)",
    "flexprefill(block=32,tau=0)",
    "flexprefill(block=32,tau=1)",
    "streaming(sinks=2,recent=30)",
];

#[test]
fn selection_is_equivariant_to_head_order() {
    let p = Prompt::new(6, 3, 8, 300, 21);
    // Key heads 2, 0, 1, and queries of each group turned around.
    let places = [5, 4, 1, 0, 3, 2];
    let mut moved = p.clone();
    for token in 0..300 {
        for (to, &from) in places.iter().enumerate() {
            let at = (token * 6 + to) * 8;
            moved.q[at..at + 8].copy_from_slice(p.query(token, from));
            let at = (token * 3 + to / 2) * 8;
            moved.k[at..at + 8].copy_from_slice(p.key(token, from));
        }
    }
    for spec in PROMPT_POLICIES {
        let (index, other) = (p.index(spec, 0, 300), moved.index(spec, 0, 300));
        for (to, &from) in places.iter().enumerate() {
            for query in [0, 63, 64, 200, 299] {
                assert_eq!(seen(&other, to, 0, query), seen(&index, from, 0, query), "{spec}");
            }
        }
    }
}

#[test]
fn ties_select_lower_columns_and_nearer_diagonals() {
    let mut p = Prompt::new(2, 1, 8, 512, 2);
    p.q.fill(0.0);
    let index = p.index("minference(vertical=40,slash=60,sinks=3,recent=7)", 0, 512);
    let lines = lines_of(&index, 1);
    assert_eq!(lines[0], (0..40).collect::<Vec<u32>>());
    assert_eq!(lines[1], (0..60).collect::<Vec<u32>>());
    let index = p.index("minference(type=block_sparse,blocks=3)", 0, 512);
    assert_eq!((row_of(&index, 0, 1), row_of(&index, 0, 7)), (&[0, 1][..], &[0, 1, 2][..]));
    let index = p.index("xattention(block=64,stride=8,tau=0.5)", 0, 512);
    // The last row adds 1.06 for each of seven blocks and 0.6 for its own; 4 are needed.
    assert_eq!(row_of(&index, 0, 7), [0, 1, 2, 3, 7]);
    let index = p.index("flexprefill(block=64,tau=0,gamma=0.5)", 0, 512);
    // 241 keys or distances have half of it: two blocks of each.
    assert_eq!(row_of(&index, 0, 7), [0, 1, 6, 7]);
    let mut x = Indexer::new(3, 8, 40, 3);
    x.q.fill(0.0);
    let mut policy = make(&x.spec(",topk=4"), &p.shape).expect("sound");
    policy.append(1, 0, &x.keys(0, 40)).expect("finite");
    assert_eq!(seen(&x.ask(&mut *policy, 20, 40).expect("sound"), 0, 20, 39), [0, 1, 2, 3]);
}

#[test]
fn full_budget_selects_everything() {
    let p = Prompt::new(2, 1, 4, 300, 4);
    for spec in [
        "minference(budget=1)",
        "minference(budget=100%,type=block_sparse)",
        "minference(vertical=300,slash=1)",
        "minference(slash=300,form=blocks)",
        "minference(type=block_sparse,blocks=5)",
        "minference(type=tri_shape,slash=300)",
        "minference(dense_layers=1)",
        "xattention(tau=1)",
        "flexprefill(gamma=1)",
        "streaming(sinks=0,recent=300)",
        "full",
    ] {
        assert_eq!(p.index(spec, 0, 300), Index::default(), "{spec}");
        assert_eq!(p.index(spec, 200, 300), Index::default(), "{spec}");
    }
}

#[test]
fn every_query_attends_itself_and_the_sinks() {
    let p = Prompt::new(2, 1, 4, 330, 5);
    for spec in PROMPT_POLICIES.into_iter().filter(|spec| !spec.contains("block_sparse")) {
        for first in [0, 64, 101] {
            let index = p.index(spec, first, 330);
            for head in p.heads() {
                for query in first..330 {
                    assert!(seen(&index, head, first, query).contains(&query), "{spec} {query}");
                    assert!(seen(&index, head, first, query).contains(&0), "{spec} {query}");
                }
            }
        }
    }
}

#[test]
fn non_finite_inputs_change_nothing() {
    let good = Prompt::new(2, 1, 4, 300, 6);
    for spec in PROMPT_POLICIES {
        // Policies that use positions only read no numbers.
        let looks = !spec.contains("shape") && !spec.contains("streaming");
        for (bad, in_queries) in
            [(f32::NAN, true), (f32::NAN, false), (f32::INFINITY, true), (1e38, false)]
        {
            let mut p = good.clone();
            let place = if in_queries { &mut p.q } else { &mut p.k };
            let at = place.len() - 3;
            place[at] = bad;
            if bad == 1e38 {
                place.fill(bad);
                p.q.fill(bad);
            }
            let mut policy = make(spec, &p.shape).expect(spec);
            let first = p.ask(&mut *policy, 0, 300);
            assert_eq!(first.is_err(), looks, "{spec} {bad}");
            if let Err(error) = first {
                assert_eq!(error.status(), Status::Invalid, "{spec}");
                let mut out = marked();
                let before = out.clone();
                let (queries, keys) = (rows(&p.q, 2, 4), rows(&p.k, 1, 4));
                assert!(
                    policy.index(0, &queries, Some(&keys), &prefill(0, 300), &mut out).is_err()
                );
                assert_eq!(out, before);
            }
            let after = good.ask(&mut *policy, 0, 300).expect(spec);
            assert_eq!(after, good.index(spec, 0, 300), "{spec}: nothing is left of it");
        }
    }
}

#[test]
fn mismatched_queries_are_rejected() {
    let p = Prompt::new(4, 2, 4, 200, 8);
    let (queries, keys) = (rows(&p.q, 4, 4), rows(&p.k, 2, 4));
    for spec in PROMPT_POLICIES {
        let mut policy = make(spec, &p.shape).expect(spec);
        let traits = policy.traits();
        assert!(traits.caps & caps::INDEX_PREFILL != 0);
        let mut out = marked();
        let before = out.clone();
        let mut refused = |layer, queries: &Rows<'_>, keys: &Rows<'_>, context: Context| {
            let status = policy
                .index(layer, queries, Some(keys), &context, &mut out)
                .err()
                .map(|e| e.status());
            assert_eq!(out, before, "{spec}");
            status
        };
        let whole = prefill(0, 200);
        assert_eq!(refused(2, &queries, &keys, whole), Some(Status::Invalid), "{spec}: layer");
        assert_eq!(
            refused(0, &rows(&p.q, 2, 8), &keys, whole),
            Some(Status::Invalid),
            "{spec}: heads"
        );
        assert_eq!(
            refused(0, &rows(&p.q, 4, 2), &keys, whole),
            Some(Status::Invalid),
            "{spec}: dim"
        );
        for context in [
            Context { tokens: 199, ..whole },
            Context { tokens: 201, ..whole },
            Context { first_query: 1, ..whole },
            Context { first_query: u32::MAX, ..whole },
            Context { first_query: 1 << 20, tokens: (1 << 20) + 200, ..whole },
        ] {
            assert_eq!(
                refused(0, &queries, &keys, context),
                Some(Status::Invalid),
                "{spec}: {context:?}"
            );
        }
        if traits.needs & needs::QUERIES != 0 {
            assert_eq!(
                refused(0, &queries, &rows(&p.k, 1, 8), whole),
                Some(Status::Invalid),
                "{spec}"
            );
            let fewer = rows(&p.k[..199 * 8], 2, 4);
            assert_eq!(refused(0, &queries, &fewer, whole), Some(Status::Invalid), "{spec}: keys");
        }
        if traits.caps & caps::INDEX_DECODE == 0 {
            let written = Context { is_prefill: false, ..whole };
            assert_eq!(refused(0, &queries, &keys, written), Some(Status::Unsupported), "{spec}");
        }
        assert!(policy.index(0, &queries, Some(&keys), &whole, &mut out).is_ok(), "{spec}");
    }
}

#[test]
fn invalid_prefill_specs_are_rejected() {
    let good = shape(4, 2, 8);
    for spec in [
        "minference(budget=0)",
        "minference(budget=1.1)",
        "minference(vertical=0)",
        "minference(slash=0)",
        "minference(budget=0.3,slash=5)",
        "minference(last_q=0)",
        "minference(recent=0)",
        "minference(blocks=0)",
        "minference(type=tri)",
        "minference(form=fast)",
        "minference(depth=1)",
        "xattention(tau=0)",
        "xattention(tau=1.5)",
        "xattention(block=12,stride=8)",
        "xattention(stride=0)",
        "flexprefill(gamma=0)",
        "flexprefill(tau=2)",
        "flexprefill(block=0)",
        "flexprefill(min_budget=9,max_budget=8)",
        "streaming(recent=0)",
        "streaming(recent=1048577)",
        "dsa(topk=0)",
        "dsa(heads=0)",
        "dsa(dim=4096)",
        "dsa(state=f16)",
        "full(x=1)",
        "ful",
    ] {
        let error = make(spec, &good).err().expect(spec);
        assert_eq!(error.status(), Status::Spec, "{spec}: {error}");
        assert!(error.detail().is_some_and(|d| d.offset.is_some()), "{spec}: {error}");
    }
    for bad in [
        Shape { layers: 0, ..good },
        Shape { key_heads: 3, ..good },
        Shape { query_heads: 0, ..good },
        Shape { max_tokens: 0, ..good },
        Shape { scale: f32::NAN, ..good },
    ] {
        assert!(make("full", &bad).is_err(), "{bad:?}");
    }
}

#[test]
fn selection_does_not_depend_on_dtype() {
    let mut p = Prompt::new(2, 1, 8, 200, 12);
    // Numbers that bf16 has.
    for x in p.q.iter_mut().chain(&mut p.k) {
        *x = f32::from_bits(x.to_bits() & 0xFFFF_0000);
    }
    let half = |numbers: &[f32]| -> Vec<u16> {
        numbers.iter().map(|x| (x.to_bits() >> 16) as u16).collect()
    };
    let (q, k) = (half(&p.q), half(&p.k));
    for spec in PROMPT_POLICIES {
        let mut out = Index::default();
        let queries = typed(q.as_ptr() as u64, q.len(), 2, 2, 8, Dtype::Bf16);
        let keys = typed(k.as_ptr() as u64, k.len(), 2, 1, 8, Dtype::Bf16);
        let mut policy = make(spec, &p.shape).expect(spec);
        policy.index(0, &queries, Some(&keys), &prefill(0, 200), &mut out).expect(spec);
        assert_eq!(out, p.index(spec, 0, 200), "{spec}");
        let mut fork = policy.fork().expect("memory");
        policy.truncate(0).expect("stateless");
        assert_eq!(p.ask(&mut *fork, 0, 200).expect(spec), out, "{spec}: a copy");
    }
    // Another scale: queries half as long, products twice.
    let mut other = p.clone();
    other.shape.scale = 2.0 / (8f32).sqrt();
    other.q.iter_mut().for_each(|x| *x /= 2.0);
    for spec in
        ["minference(budget=0.4,recent=5)", "xattention(block=32,tau=0.5)", "flexprefill(block=32)"]
    {
        assert_eq!(other.index(spec, 0, 200), p.index(spec, 0, 200), "{spec}");
    }
}
