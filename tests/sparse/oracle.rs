//! Selections of sparse policies, compared with published implementations on the same inputs:
//! `tests/data/sparse/*.json`, made by `ffi-tests/oracles/sparse/golden.py`. The margin between
//! selected and other scores is wide there, so lists must be equal. Intended differences are named
//! beside the comparison.

use std::collections::BTreeSet;
use std::path::Path;

use kvtier::attention::{Rows, Scales};
use kvtier::base::spec::Spec;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::index::Kind;
use kvtier::sparse::{Context, Index, RetainedTokens, Shape, Sparse, registry, shape};
use serde_json::Value;

type Set = BTreeSet<u32>;

/// Numbers of a stream: splitmix64, the upper 24 bits as -1 up to 1, as in portable.py.
fn numbers(seed: u64, stream: u64, count: usize) -> Vec<f32> {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut state = seed.wrapping_add(stream << 32).wrapping_mul(GOLDEN);
    let next = || {
        state = state.wrapping_add(GOLDEN);
        let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) >> 40) as i32 - (1 << 23)
    };
    std::iter::repeat_with(next).take(count).map(|n| n as f32 / (1 << 23) as f32).collect()
}

/// Rows of numbers: tokens, heads, numbers of a head.
struct Table {
    numbers: Vec<f32>,
    heads: usize,
    dim: usize,
}

impl Table {
    fn row(&self, token: usize, head: usize) -> &[f32] {
        let from = (token * self.heads + head) * self.dim;
        &self.numbers[from..from + self.dim]
    }

    fn rows(&self, from: usize, to: usize) -> Rows<'_> {
        let (each, size) = (self.heads * self.dim, 4);
        assert!(from < to && to * each <= self.numbers.len());
        let view = View {
            place: Place::At(self.numbers[from * each..].as_ptr() as u64),
            tokens: (to - from) as u32,
            heads: self.heads as u32,
            run_bytes: (self.dim * size) as u64,
            token_stride_bytes: (each * size) as u64,
            head_stride_bytes: (self.dim * size) as u64,
        };
        // SAFETY: those are tokens of `numbers`, which is borrowed for as long.
        unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
    }
}

/// One case of a file.
struct Case<'a> {
    value: &'a Value,
    name: &'a str,
    tokens: usize,
    layer: u32,
    shape: Shape,
    queries: Table,
    keys: Table,
}

fn number(value: &Value) -> u32 {
    let n = value.as_u64().unwrap_or_else(|| panic!("{value} is no number"));
    u32::try_from(n).expect("32 bits")
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

fn array(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no array"))
}

/// A set as text: 0-3,7,9-12.
fn set(value: &Value) -> Set {
    let parts = text(value).split(',').filter(|part| !part.is_empty());
    let range = |part: &str| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        from.parse::<u32>().expect("a number")..=to.parse::<u32>().expect("a number")
    };
    parts.flat_map(range).collect()
}

fn sets(value: &Value) -> Vec<Set> {
    array(value).iter().map(set).collect()
}

fn of(items: &[u32]) -> Set {
    items.iter().copied().collect()
}

impl<'a> Case<'a> {
    fn new(value: &'a Value) -> Case<'a> {
        let [heads, key_heads, dim, tokens, layer, layers] =
            ["heads", "key_heads", "dim", "tokens", "layer", "layers"]
                .map(|name| number(&value[name]));
        let shape = Shape {
            layers,
            query_heads: heads,
            key_heads,
            key_dim: dim,
            value_dim: dim,
            scale: 0.0,
            kind: shape::Kind::Split,
            block_tokens: 16,
            max_tokens: 1 << 20,
        };
        let gains = array(&value["gains"]);
        let gains = gains.iter().map(|gain| gain.as_f64().expect("a gain") as f32).collect();
        let mut case = Case {
            value,
            name: text(&value["name"]),
            tokens: tokens as usize,
            layer,
            shape,
            queries: Table { numbers: Vec::new(), heads: 0, dim: 0 },
            keys: Table { numbers: Vec::new(), heads: 0, dim: 0 },
        };
        case.queries = case.table(1, heads, dim, gains);
        case.keys = case.table(3, key_heads, dim, vec![1.0]);
        case
    }

    fn table(&self, stream: u64, heads: u32, dim: u32, gains: Vec<f32>) -> Table {
        let (heads, dim) = (heads as usize, dim as usize);
        let seed = u64::from(number(&self.value["seed"]));
        let period = self.value["period"].as_u64().unwrap_or(0) as usize;
        let mut all = numbers(seed, stream, self.tokens * heads * dim);
        if period > 0 {
            let blocks = self.tokens.div_ceil(period);
            let drift = numbers(seed, stream + 1, blocks * heads * dim);
            for (token, row) in all.chunks_exact_mut(heads * dim).enumerate() {
                let shared = &drift[token / period * heads * dim..];
                row.iter_mut().zip(shared).for_each(|(number, more)| *number += more);
            }
        }
        for (at, row) in all.chunks_exact_mut(dim).enumerate() {
            let gain = gains[at % heads % gains.len()];
            row.iter_mut().for_each(|number| *number *= gain);
        }
        Table { numbers: all, heads, dim }
    }

    fn make(&self) -> Box<dyn Sparse> {
        self.make_of(text(&self.value["spec"]))
    }

    fn make_of(&self, spec: &str) -> Box<dyn Sparse> {
        registry::make(&Spec::parse(spec).expect(spec), &self.shape).expect(spec)
    }

    fn result(&self, name: &str) -> &'a Value {
        &self.value["result"][name]
    }

    fn heads(&self) -> std::ops::Range<usize> {
        0..self.shape.query_heads as usize
    }

    fn number(&self, name: &str) -> usize {
        number(&self.value[name]) as usize
    }

    /// Weights of a query head for some keys, in binary64: zero behind the query.
    fn weights(&self, query: usize, head: usize, keys: &[u32]) -> Vec<f64> {
        let q = self.queries.row(query, head);
        let key_head = head / self.shape.group() as usize;
        let scale = 1.0 / (self.queries.dim as f64).sqrt();
        let logit = |&key: &u32| {
            let k = self.keys.row(key as usize, key_head);
            let product: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            if key as usize > query { f64::NEG_INFINITY } else { product * scale }
        };
        let logits: Vec<f64> = keys.iter().map(logit).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let raised: Vec<f64> = logits.iter().map(|x| (x - most).exp()).collect();
        let sum: f64 = raised.iter().sum();
        raised.iter().map(|x| x / sum).collect()
    }

    /// Sums over queries of the weights of each query head's keys: a row per head.
    fn sums(&self, queries: std::ops::Range<usize>, keys: &[Vec<u32>]) -> Vec<f32> {
        let mut out = Vec::new();
        for (head, keys) in self.heads().zip(keys.iter().cycle()) {
            let mut sums = vec![0.0; keys.len()];
            for query in queries.clone() {
                let weights = self.weights(query, head, keys);
                sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
            }
            out.extend(sums.into_iter().map(|sum| sum as f32));
        }
        out
    }

    /// Keys that the whole prompt is computed with.
    fn prefill(&self, spec: &str) -> Index {
        let (mut policy, mut index) = (self.make_of(spec), Index::default());
        let (queries, keys) = (self.queries.rows(0, self.tokens), self.keys.rows(0, self.tokens));
        let context = context(self.tokens, true);
        policy.index(self.layer, &queries, Some(&keys), &context, &mut index).expect(self.name);
        index
    }

    /// The blocks of each row of a head; where rows have ranges of keys, the keys.
    fn rows_of(&self, index: &Index, head: usize) -> Vec<Set> {
        let (head, of_head) = (head as u32, index.head(head as u32));
        let row = |at: u32| match of_head.kind {
            Kind::Blocks => of(index.list(head, at)),
            Kind::Ranges => {
                let end = (at + 1) * of_head.query_block;
                let ranges = index.list(head, at + 1).chunks_exact(2).flat_map(|r| r[0]..r[1]);
                let keys = ranges.chain(index.list(head, 0).iter().copied());
                keys.filter(|&key| key < end.min(self.tokens as u32)).collect()
            }
            other => panic!("{}: {other:?}", self.name),
        };
        (0..of_head.rows()).map(row).collect()
    }
}

fn context(tokens: usize, is_prefill: bool) -> Context {
    let tokens = tokens as u32;
    let first_query = if is_prefill { 0 } else { tokens - 1 };
    Context { is_prefill, part: 0, parts: 1, first_query, tokens }
}

/// Checks the tokens that remain of a prompt.
fn evict(case: &Case<'_>) {
    let mut policy = case.make();
    let (tokens, layer) = (case.tokens, case.layer);
    let traits = policy.traits();
    if traits.needs & kvtier::sparse::needs::KEYS != 0 {
        // In two parts, as a prompt may come.
        let half = tokens / 2;
        policy.append(layer, 0, &case.keys.rows(0, half)).expect(case.name);
        policy.append(layer, half as u32, &case.keys.rows(half, tokens)).expect(case.name);
    }
    if traits.needs & kvtier::sparse::needs::COLUMN_SUMS != 0 {
        let window = case.value["window"].as_u64().unwrap_or(1) as usize;
        let sums = case.sums(tokens - window..tokens, &[(0..tokens as u32).collect()]);
        policy.observe(layer, window as u32, &sums, tokens as u32).expect(case.name);
    }
    let is_prefill = traits.caps & kvtier::sparse::caps::EVICT_PREFILL != 0;
    let mut keep = RetainedTokens::default();
    let some = policy.evict(layer, &context(tokens, is_prefill), &mut keep).expect(case.name);
    for (head, want) in sets(case.result("lists")).into_iter().enumerate() {
        let stays = if some { of(keep.of(head as u32)) } else { (0..tokens as u32).collect() };
        assert_eq!(stays, want, "{}, head {head}", case.name);
    }
}

/// Checks the tokens that remain after a prompt and after each token behind it.
fn steps(case: &Case<'_>) {
    let (mut policy, prompt) = (case.make(), case.number("prompt"));
    let mut there: Vec<Vec<u32>> = vec![Vec::new(); case.heads().len()];
    for (step, want) in array(case.result("steps")).iter().enumerate() {
        let end = prompt + step;
        let from = if step == 0 { 0 } else { end - 1 };
        there.iter_mut().for_each(|list| list.extend(from as u32..end as u32));
        let sums = case.sums(from..end, &there);
        let count = there[0].len() as u32;
        policy.observe(case.layer, (end - from) as u32, &sums, count).expect(case.name);
        let mut keep = RetainedTokens::default();
        let ask = context(end, step == 0);
        if policy.evict(case.layer, &ask, &mut keep).expect(case.name) {
            policy.evicted(case.layer, &keep).expect(case.name);
            there = case.heads().map(|head| keep.of(head as u32).to_vec()).collect();
        }
        let stays: Vec<Set> = there.iter().map(|list| of(list)).collect();
        assert_eq!(stays, sets(want), "{}, step {step}", case.name);
    }
}

/// Columns and diagonals of heads.
fn lines(case: &Case<'_>) {
    let index = case.prefill(text(&case.value["spec"]));
    for (head, want) in (0..).zip(array(case.result("heads"))) {
        assert_eq!(index.head(head).kind, Kind::Lines, "{}", case.name);
        let got: Vec<Set> = (0..2).map(|list| of(index.list(head, list))).collect();
        assert_eq!(got, sets(want), "{}, columns and diagonals of head {head}", case.name);
    }
}

/// Blocks (of keys, or of one key) for each row of each head.
fn blocks(case: &Case<'_>) {
    let spec = text(&case.value["spec"]);
    let index = case.prefill(spec);
    // Deviations of the published code from its rule add blocks, in the first
    // 16384 tokens alone.
    let plain = spec.contains("compat=true").then(|| case.prefill(&spec.replace("true", "false")));
    let wanted = array(case.result("heads"));
    assert_eq!(wanted.len(), case.heads().len());
    for (head, want) in wanted.iter().enumerate() {
        let want = sets(want);
        for (row, (got, want)) in case.rows_of(&index, head).iter().zip(&want).enumerate() {
            assert_eq!(got, want, "{}, head {head}, row {row}", case.name);
        }
        let Some(plain) = &plain else { continue };
        for (row, (got, want)) in case.rows_of(plain, head).iter().zip(&want).enumerate() {
            let is_late = row * case.number("block") >= 16384;
            let is_right = if is_late { got == want } else { got.is_subset(want) };
            assert!(is_right, "{}, head {head}, row {row}: {got:?}, {want:?}", case.name);
        }
    }
}

/// The same, but that the block that crosses the share is in: published, it is left out.
fn flex(case: &Case<'_>) {
    let index = case.prefill(text(&case.value["spec"]));
    let crossing = array(case.result("crossing"));
    for (head, want) in array(case.result("heads")).iter().enumerate() {
        let mut want = sets(want);
        if let [row, block] = array(&crossing[head]) {
            want[number(row) as usize].insert(number(block));
        }
        assert_eq!(case.rows_of(&index, head), want, "{}, head {head}", case.name);
    }
}

/// The keys of each query head, for the last token.
fn pages(case: &Case<'_>) {
    let (mut policy, mut index) = (case.make(), Index::default());
    let (layer, tokens) = (case.layer, case.tokens);
    let keys = case.keys.rows(0, tokens);
    policy.append(layer, 0, &keys).expect(case.name);
    let query = case.queries.rows(tokens - 1, tokens);
    let ask = context(tokens, false);
    policy.index(layer, &query, Some(&keys), &ask, &mut index).expect(case.name);
    for (head, want) in (0..).zip(sets(case.result("lists"))) {
        let each = index.head(head).key_block;
        let blocks = index.list(head, 0).iter();
        let keys = blocks.flat_map(|&at| at * each..((at + 1) * each).min(tokens as u32));
        assert_eq!(keys.collect::<Set>(), want, "{}, head {head}", case.name);
    }
}

/// The tokens of each query, by an indexer.
fn queries(case: &Case<'_>) {
    let (mut policy, mut index) = (case.make(), Index::default());
    let (tokens, keys) = (case.tokens, case.keys.rows(0, case.tokens));
    let weights = case.table(5, case.shape.query_heads, 1, vec![1.0]);
    policy.append(0, 0, &keys).expect(case.name);
    policy.score(0, &weights.numbers).expect(case.name);
    let rows = case.queries.rows(0, tokens);
    policy.index(0, &rows, Some(&keys), &context(tokens, true), &mut index).expect(case.name);
    assert!(case.number("topk") < tokens);
    let wanted = sets(case.result("queries"));
    assert_eq!(case.rows_of(&index, 0), wanted, "{}", case.name);
    // The last one alone, as while text is written.
    let last = weights.numbers.len() - case.heads().len();
    policy.score(0, &weights.numbers[last..]).expect(case.name);
    let rows = case.queries.rows(tokens - 1, tokens);
    policy.index(0, &rows, Some(&keys), &context(tokens, false), &mut index).expect(case.name);
    assert_eq!(case.rows_of(&index, 0), wanted[tokens - 1..], "{}, alone", case.name);
}

/// Compares all cases of a file; how many there must be at least.
fn compare(file: &str, least: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sparse");
    let all = std::fs::read_to_string(folder.join(file)).expect("the golden file");
    let all: Value = serde_json::from_str(&all).expect("JSON");
    let cases = array(&all["cases"]);
    assert!(cases.len() >= least, "{} cases", cases.len());
    let mut wrong = Vec::new();
    for value in cases {
        let case = Case::new(value);
        let compare = match text(&value["ask"]) {
            "evict" => evict,
            "steps" => steps,
            "lines" => lines,
            "blocks" | "kernel" => blocks,
            "flex" => flex,
            "pages" => pages,
            "queries" => queries,
            other => panic!("nothing is called {other}"),
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| compare(&case))).is_err() {
            wrong.push(case.name.to_string());
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ: {wrong:#?}", wrong.len(), cases.len());
}

#[test]
fn kept_tokens_match_kvpress() {
    compare("kvpress.json", 100);
}

#[test]
fn selected_indices_match_minference() {
    compare("minference.json", 100);
}

#[test]
fn selected_tokens_match_transformers_indexer() {
    compare("dsa.json", 5);
}

#[test]
fn heavy_hitters_match_h2o_reference() {
    compare("h2o.json", 4);
}
