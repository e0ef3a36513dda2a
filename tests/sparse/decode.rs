//! Sparse policies for writing text, against models written from their rules in float64.
//!
//! Numbers are small multiples of a power of two where a sum of them is exact, so that both
//! sides agree on ties and every choice can be compared as it is.

use std::collections::BTreeSet;

use kvtier::attention::{Rows, Scales};
use kvtier::base::spec::Spec;
use kvtier::base::status::Status;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::index::{Head, Kind as HeadKind, NO_QUERY};
use kvtier::sparse::pages::{Bound, Pages, product, split};
use kvtier::sparse::{Context, Index, Kind, RetainedTokens, Scope, Shape, Sparse, caps, registry};
use proptest::prelude::*;

/// Rows of numbers: tokens, heads, numbers of a head.
#[derive(Clone)]
struct Table {
    numbers: Vec<f32>,
    heads: usize,
    dim: usize,
}

impl Table {
    fn tokens(&self) -> usize {
        self.numbers.len() / self.heads / self.dim
    }

    fn row(&self, token: usize, head: usize) -> &[f32] {
        let from = (token * self.heads + head) * self.dim;
        &self.numbers[from..from + self.dim]
    }

    /// Some of its tokens.
    fn rows(&self, from: usize, to: usize) -> Rows<'_> {
        let (each, size) = (self.heads * self.dim, 4);
        let view = View {
            place: Place::At(self.numbers[from * each..].as_ptr() as u64),
            tokens: (to - from) as u32,
            heads: self.heads as u32,
            run_bytes: (self.dim * size) as u64,
            token_stride_bytes: (each * size) as u64,
            head_stride_bytes: (self.dim * size) as u64,
        };
        assert!(to <= self.tokens());
        // SAFETY: those are tokens of `numbers`, which is borrowed for as long.
        unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
    }

    fn all(&self) -> Rows<'_> {
        self.rows(0, self.tokens())
    }
}

/// Numbers that look random, the same each time.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Quarters from -2 to 2: products and their sums are exact.
    fn table(&mut self, tokens: usize, heads: usize, dim: usize) -> Table {
        let numbers = (0..tokens * heads * dim).map(|_| self.below(17) as f32 / 4.0 - 2.0);
        Table { numbers: numbers.collect(), heads, dim }
    }

    /// About normally distributed.
    fn normal(&mut self, tokens: usize, heads: usize, dim: usize) -> Table {
        let mut one = || {
            let sum: u64 = (0..6).map(|_| self.next() & 0xFFFF).sum();
            (sum as f32 / 65535.0 - 3.0) * std::f32::consts::SQRT_2
        };
        let numbers = (0..tokens * heads * dim).map(|_| one()).collect();
        Table { numbers, heads, dim }
    }
}

fn shape(query_heads: u32, key_heads: u32, dim: u32, block_tokens: u32) -> Shape {
    Shape {
        layers: 4,
        query_heads,
        key_heads,
        key_dim: dim,
        value_dim: dim,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens,
        max_tokens: 1 << 16,
    }
}

fn make(text: &str, shape: &Shape) -> Box<dyn Sparse> {
    registry::make(&Spec::parse(text).expect(text), shape).expect(text)
}

fn refusal(text: &str, shape: &Shape) -> String {
    let made = registry::make(&Spec::parse(text).expect(text), shape);
    made.err().unwrap_or_else(|| panic!("{text} was made")).message().to_string()
}

fn decode(tokens: usize) -> Context {
    let (first_query, tokens) = (tokens as u32 - 1, tokens as u32);
    Context { is_prefill: false, part: 0, parts: 1, first_query, tokens }
}

fn prefill(tokens: usize) -> Context {
    Context { is_prefill: true, part: 0, parts: 1, first_query: 0, tokens: tokens as u32 }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// The `count` greatest; of equal ones the lower index.
fn top(scores: &[f64], count: usize) -> BTreeSet<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("no NaN").then(a.cmp(&b)));
    order.into_iter().take(count).collect()
}

/// Indices without the `count` lowest scores; of equal scores the lower index is dropped first.
fn without_lowest(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[a].partial_cmp(&scores[b]).expect("no NaN").then(a.cmp(&b)));
    let mut stays = order.split_off(count.min(scores.len()));
    stays.sort_unstable();
    stays
}

// ---- quest and arkvale ----

/// The corners of the box around a page's keys of a head: least and greatest of each number.
fn corners(keys: &Table, head: usize, from: usize, to: usize) -> (Vec<f64>, Vec<f64>) {
    let of = |d: usize| (from..to).map(move |t| f64::from(keys.row(t, head)[d]));
    let least = (0..keys.dim).map(|d| of(d).fold(f64::INFINITY, f64::min)).collect();
    let most = (0..keys.dim).map(|d| of(d).fold(f64::NEG_INFINITY, f64::max)).collect();
    (least, most)
}

fn bound(query: &[f32], (least, most): &(Vec<f64>, Vec<f64>)) -> f64 {
    query
        .iter()
        .zip(least.iter().zip(most))
        .map(|(&q, (m, n))| (f64::from(q) * m).max(f64::from(q) * n))
        .sum()
}

/// For each list of `how` the scores of pages.
fn quest_scores(how: &str, keys: &Table, query: &Table, page: usize) -> Vec<Vec<f64>> {
    let (heads, group) = (query.heads, query.heads / keys.heads);
    let pages: Vec<(usize, usize)> =
        (0..keys.tokens()).step_by(page).map(|p| (p, (p + page).min(keys.tokens()))).collect();
    let by_head = |head: usize, (from, to): (usize, usize)| {
        let key_head = head / group;
        if how != "centre" {
            return bound(query.row(0, head), &corners(keys, key_head, from, to));
        }
        let (mut least, mut most) = corners(keys, key_head, from, to);
        for d in 0..keys.dim {
            let centre = (least[d] + most[d]) / 2.0;
            let distance = |t: usize| (f64::from(keys.row(t, key_head)[d]) - centre).abs();
            let reach = (from..to).map(distance).sum::<f64>() / (to - from) as f64;
            (least[d], most[d]) = (centre - reach, centre + reach);
        }
        bound(query.row(0, head), &(least, most))
    };
    match how {
        "each" => (0..heads).map(|h| pages.iter().map(|&p| by_head(h, p)).collect()).collect(),
        "fork" => {
            let score = |&(from, to): &(usize, usize)| {
                let by_key_head = (0..keys.heads).map(|k| {
                    let mean: Vec<f64> = (0..keys.dim)
                        .map(|d| {
                            let of = (0..group).map(|g| f64::from(query.row(0, k * group + g)[d]));
                            of.sum::<f64>() / group as f64
                        })
                        .collect();
                    let (least, most) = corners(keys, k, from, to);
                    let times = |c: &[f64]| mean.iter().zip(c).map(|(q, c)| q * c).sum::<f64>();
                    times(&least).max(times(&most))
                });
                by_key_head.sum::<f64>() / keys.heads as f64
            };
            vec![pages.iter().map(score).collect()]
        }
        _ => {
            let mean =
                |&p: &(usize, usize)| (0..heads).map(|h| by_head(h, p)).sum::<f64>() / heads as f64;
            vec![pages.iter().map(mean).collect()]
        }
    }
}

/// The id of the block at a place: they need not be in order.
fn id(place: usize) -> u32 {
    1000 - 7 * place as u32
}

/// Appends keys to a policy: whole blocks are sealed, or appended and then sealed. Other keys are
/// appended in small steps.
fn append_blocks(policy: &mut dyn Sparse, layer: u32, keys: &Table, block: usize, dice: &mut Dice) {
    let mut at = 0;
    while at < keys.tokens() {
        let is_whole = keys.tokens() - at >= block && at % block == 0;
        if is_whole && dice.below(2) == 0 {
            policy
                .seal(layer, id(at / block), at as u32, &keys.rows(at, at + block))
                .expect("seal");
            at += block;
            continue;
        }
        let to = (at + 1 + dice.below(block)).min(at / block * block + block).min(keys.tokens());
        policy.append(layer, at as u32, &keys.rows(at, to)).expect("append");
        if to % block == 0 {
            let first = to - block;
            let rows = keys.rows(first, to);
            policy.seal(layer, id(first / block), first as u32, &rows).expect("seal");
        }
        at = to;
    }
}

/// The keys before `end` that each list of an index names.
fn lists(index: &Index, end: usize) -> Vec<Vec<u32>> {
    let of = |head: u32| {
        let Head { kind, query_block, key_block, lists, dense_from, .. } = index.head(head);
        assert_eq!((kind, query_block, lists, dense_from), (HeadKind::Blocks, 0, 1, NO_QUERY));
        let blocks = index.list(head, 0).iter();
        let keys = blocks.flat_map(|at| at * key_block..(at * key_block + key_block));
        keys.filter(|&key| (key as usize) < end).collect()
    };
    (0..index.heads.len() as u32).map(of).collect()
}

/// Pages to select; the first and last pages in `forced` are always among them.
fn choice(scores: &[f64], count: usize, forced: &BTreeSet<usize>) -> BTreeSet<usize> {
    let free: Vec<f64> = (0..scores.len())
        .map(|p| if forced.contains(&p) { f64::INFINITY } else { scores[p] })
        .collect();
    top(&free, count)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn quest_selects_pages_by_its_definition(
        seed in any::<u64>(),
        (key_heads, group) in prop::sample::select(vec![(1usize, 1usize), (2, 2), (1, 4), (4, 1)]),
        blocks in 1usize..24,
        tail in 0usize..8,
        budget in 1usize..60,
        how in prop::sample::select(vec!["each", "last", "bound", "fork", "centre"]),
    ) {
        let (block, dim, mut dice) = (8usize, 6, Dice(seed));
        let page = match how { "fork" => 8, _ => 4 };
        let spec = match how {
            "each" => format!("quest(page=4,dense=1,budget={budget})"),
            "last" => format!("quest(page=4,dense=1,budget={budget},last=always)"),
            "bound" => format!("quest(page=4,dense=1,budget={budget},share=bound)"),
            "fork" => "quest(compat=fork,dense=1,topk=5,threshold=3)".to_string(),
            _ => format!("arkvale(page=4,dense=1,budget={},sinks=1,window=2)", budget + 16),
        };
        let count = match how { "fork" => 5, "centre" => (budget + 16) / 4, _ => (budget / 4).max(3) };
        // The mean of a whole page is exact.
        let tokens = blocks * block + if how == "centre" { tail / 4 * 4 } else { tail };
        let shape = shape((key_heads * group) as u32, key_heads as u32, dim as u32, block as u32);
        let keys = dice.table(tokens, key_heads, dim);
        let query = dice.table(1, key_heads * group, dim);
        let mut policy = make(&spec, &shape);
        append_blocks(&mut *policy, 1, &keys, block, &mut dice);
        let pages = tokens.div_ceil(page);
        let forced: BTreeSet<usize> = match how {
            "last" => [pages - 1].into(),
            "centre" => (0..1).chain(pages.saturating_sub(2)..pages).collect(),
            _ => BTreeSet::new(),
        };
        let scores = quest_scores(if how == "last" { "each" } else { how }, &keys, &query, page);

        // Keys that it computes with.
        let mut index = Index::default();
        policy.index(1, &query.all(), None, &decode(tokens), &mut index).expect("index");
        let mut wanted = BTreeSet::new();
        if pages <= count {
            prop_assert_eq!(&index, &Index::default());
        } else {
            let lists = lists(&index, tokens);
            prop_assert_eq!(lists.len(), scores.len());
            for (list, scores) in scores.iter().enumerate() {
                let chosen = choice(scores, count, &forced);
                let positions: Vec<u32> = chosen
                    .iter()
                    .flat_map(|p| p * page..(p * page + page).min(tokens))
                    .map(|t| t as u32)
                    .collect();
                prop_assert_eq!(&lists[list], &positions, "list {}", list);
                wanted.extend(chosen);
            }
        }

        // Blocks that it loads, out of some non-resident ones.
        let away: Vec<usize> = (0..blocks).filter(|_| dice.below(5) > 0).collect();
        let candidates: Vec<u32> = away.iter().map(|&place| id(place)).collect();
        let each = block / page;
        let there: Vec<usize> = away.iter().flat_map(|b| b * each..(b + 1) * each).collect();
        let mut expected = BTreeSet::new();
        if there.len() <= count.max(if how == "fork" { 3 } else { 0 }) {
            expected.extend(&candidates);
        } else {
            for scores in &scores {
                let own: BTreeSet<usize> =
                    (0..there.len()).filter(|&at| forced.contains(&there[at])).collect();
                let own_count = count - forced.len().min(count) + own.len();
                let scores: Vec<f64> = there.iter().map(|&p| scores[p]).collect();
                let chosen = choice(&scores, own_count, &own);
                expected.extend(chosen.iter().map(|&at| id(there[at] / each)));
            }
        }
        let mut out = vec![77];
        policy.select(1, Some(&query.all()), &candidates, &decode(tokens), &mut out).expect("select");
        prop_assert_eq!(&out, &expected.iter().copied().collect::<Vec<u32>>());
        // The keys that it computes with are a subset of the loaded ones.
        let loaded: BTreeSet<u32> = out.iter().copied().collect();
        for place in wanted.iter().map(|page| page / each).filter(|b| away.contains(b)) {
            prop_assert!(loaded.contains(&id(place)));
        }
        // The order of candidates does not matter.
        let mut turned = candidates.clone();
        turned.reverse();
        let mut again = Vec::new();
        policy.select(1, Some(&query.all()), &turned, &decode(tokens), &mut again).expect("select");
        prop_assert_eq!(&again, &out);
        // A dense layer, no query, the prompt: all.
        let mut all = candidates.clone();
        all.sort_unstable();
        let rows = query.all();
        for (layer, query, context) in [
            (0, Some(&rows), decode(tokens)),
            (1, None, decode(tokens)),
            (1, Some(&rows), prefill(tokens)),
        ] {
            policy.select(layer, query, &turned, &context, &mut out).expect("select");
            prop_assert_eq!(&out, &all);
        }
    }

    #[test]
    fn page_score_bounds_every_key(
        seed in any::<u64>(),
        steps in prop::collection::vec((0u8..3, 1usize..40), 1..24),
    ) {
        let (page, heads, dim) = (8usize, 2usize, 16usize);
        let mut dice = Dice(seed);
        let mut pages = Pages::new(page as u32, heads as u32, dim as u32, Bound::Range);
        let mut keys = Table { numbers: Vec::new(), heads, dim };
        for (what, n) in steps {
            let there = keys.tokens();
            if what == 0 && there > 0 {
                let left = there.saturating_sub(n);
                keys.numbers.truncate(left * heads * dim);
                pages.truncate(left as u32);
            } else {
                keys.numbers.extend(dice.normal(n, heads, dim).numbers);
                pages.put(there as u32, &keys.rows(there, there + n), false).expect("in order");
            }
            let query = dice.normal(1, heads, dim);
            for at in 0..keys.tokens().div_ceil(page) {
                prop_assert_eq!(pages.filled(at as u32) as usize, (keys.tokens() - at * page).min(page));
                for head in 0..heads {
                    let mut turned = vec![0.0; 2 * dim];
                    split(query.row(0, head), &mut turned);
                    let corners = &pages.corners(at as u32)[head * 2 * dim..(head + 1) * 2 * dim];
                    let bound = f64::from(product(&turned, corners));
                    for token in at * page..(at * page + page).min(keys.tokens()) {
                        let exact = dot(query.row(0, head), keys.row(token, head));
                        prop_assert!(bound >= exact - 1e-3, "{} < {}", bound, exact);
                    }
                }
            }
        }
        pages.truncate(0);
        prop_assert_eq!(pages.filled(0), 0);
    }
}

const BLOCK: usize = 8;

/// A policy with blocks in layer 3, and their keys.
fn policy_with_blocks(
    spec: &str,
    blocks: usize,
    seed: u64,
) -> (Box<dyn Sparse>, Table, Table, Vec<u32>) {
    let mut dice = Dice(seed);
    let mut policy = make(spec, &shape(4, 2, 6, BLOCK as u32));
    let keys = dice.table(blocks * BLOCK, 2, 6);
    append_blocks(&mut *policy, 3, &keys, BLOCK, &mut dice);
    let query = dice.table(1, 4, 6);
    (policy, keys, query, (0..blocks).map(id).collect())
}

fn chosen(policy: &mut dyn Sparse, query: &Table, ids: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    let context = decode(ids.len() * BLOCK);
    policy.select(3, Some(&query.all()), ids, &context, &mut out).expect("select");
    out
}

fn saved(policy: &dyn Sparse, ids: &[u32]) -> Vec<Vec<u8>> {
    let save = |&id: &u32| {
        let mut bytes = vec![9];
        policy.save(3, id, &mut bytes).expect("known");
        assert_eq!(bytes.remove(0), 9, "what was there stays");
        bytes
    };
    ids.iter().map(save).collect()
}

#[test]
fn invalid_calls_of_page_policies_change_nothing() {
    for spec in ["quest(page=4,budget=16)", "arkvale(page=4,budget=24)"] {
        let (mut policy, keys, query, ids) = policy_with_blocks(spec, 12, 1);
        let before = (saved(&*policy, &ids), chosen(&mut *policy, &query, &ids));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut wrong = keys.clone();
            let last = wrong.numbers.len() - 1;
            wrong.numbers[last] = bad;
            let rows = wrong.rows(11 * BLOCK, 12 * BLOCK);
            assert!(policy.append(3, 12 * BLOCK as u32, &rows).is_err());
            assert!(policy.seal(3, id(11), 11 * BLOCK as u32, &rows).is_err());
            assert!(policy.seal(3, id(0), 0, &rows).is_err());
            let mut wrong = query.clone();
            wrong.numbers[23] = bad;
            let mut out = vec![5, 4];
            let context = decode(12 * BLOCK);
            assert!(policy.select(3, Some(&wrong.all()), &ids, &context, &mut out).is_err());
            let mut index = Index::default();
            index.lists.push([3]);
            assert!(policy.index(3, &wrong.all(), None, &context, &mut index).is_err());
            assert_eq!((out, index.lists.get(0)), (vec![5, 4], &[3][..]));
        }
        let block = keys.rows(0, BLOCK);
        // Layers, heads, numbers, places, lengths.
        assert!(policy.append(4, 0, &block).is_err() && policy.seal(9, 1, 0, &block).is_err());
        let mut dice = Dice(3);
        let (heads, dims) = (dice.table(BLOCK, 4, 6), dice.table(BLOCK, 2, 7));
        for rows in [heads.all(), dims.all(), query.all()] {
            assert!(policy.append(3, 96, &rows).is_err() && policy.seal(3, 1, 0, &rows).is_err());
        }
        assert!(
            policy.seal(3, 1, 4, &block).is_err()
                && policy.seal(3, 1, 0, &keys.rows(0, 9)).is_err()
        );
        assert!(policy.append(3, 98, &block).is_err(), "a gap in a page");
        assert_eq!(
            policy.append(3, 1 << 16, &block).expect_err("beyond the limit").status(),
            Status::Limit
        );
        assert_eq!(
            policy.seal(3, 1, u32::MAX - 7, &block).expect_err("beyond the limit").status(),
            Status::Limit
        );
        // Candidates.
        let mut out = vec![5, 4];
        let rows = query.all();
        for ids in [[id(0), 3], [id(1), id(1)]] {
            for query in [Some(&rows), None].iter().take(if ids[1] == 3 { 1 } else { 2 }) {
                let refused = policy.select(3, *query, &ids, &decode(96), &mut out);
                assert_eq!(refused.expect_err("named").status(), Status::Invalid);
            }
        }
        assert!(policy.select(3, Some(&keys.rows(0, 1)), &ids, &decode(96), &mut out).is_err());
        let beyond = decode((1 << 16) + 1);
        assert!(policy.select(3, Some(&rows), &ids, &beyond, &mut out).is_err());
        let mut index = Index::default();
        assert!(policy.index(3, &rows, None, &beyond, &mut index).is_err());
        assert!(policy.save(3, 77, &mut Vec::new()).is_err());
        assert_eq!((saved(&*policy, &ids), chosen(&mut *policy, &query, &ids)), before, "{spec}");
    }
}

#[test]
fn overflowing_scores_are_rejected() {
    let mut policy = make("quest(page=4,budget=4,dense=0)", &shape(2, 2, 6, 4));
    let keys = Table { numbers: vec![3e38; 32 * 12], heads: 2, dim: 6 };
    for place in 0..8 {
        policy.seal(0, place, place * 4, &keys.rows(0, 4)).expect("finite");
    }
    let query = Table { numbers: [3e38, -3e38].repeat(6), heads: 2, dim: 6 };
    let mut out = Vec::new();
    let ids: Vec<u32> = (0..8).collect();
    assert!(policy.select(0, Some(&query.all()), &ids, &decode(32), &mut out).is_err());
}

#[test]
fn saved_block_summaries_round_trip() {
    for spec in
        ["quest(page=4,budget=16)", "quest(compat=fork,topk=3)", "arkvale(page=8,budget=48)"]
    {
        let (mut policy, _, query, ids) = policy_with_blocks(spec, 12, 2);
        let bytes = saved(&*policy, &ids);
        let mut other = make(spec, &shape(4, 2, 6, BLOCK as u32));
        // In any order, and under other names.
        for place in [7, 3, 11, 0, 1, 2, 4, 5, 6, 8, 9, 10] {
            other.load(3, place as u32, (place * BLOCK) as u32, &bytes[place]).expect("its own");
        }
        let names: Vec<u32> = (0..12).collect();
        assert_eq!(saved(&*other, &names), bytes);
        let expected: BTreeSet<u32> = chosen(&mut *policy, &query, &ids).into_iter().collect();
        let found = chosen(&mut *other, &query, &names);
        assert!(found.len() < 12, "something was chosen");
        assert_eq!(
            found.iter().map(|&place| id(place as usize)).collect::<BTreeSet<_>>(),
            expected
        );
        // A dense layer has nothing to keep.
        let mut none = Vec::new();
        if !spec.contains("fork") {
            policy.save(0, 1, &mut none).expect("nothing");
            assert!(none.is_empty() && other.load(0, 1, 0, &none).is_ok());
            assert!(other.load(0, 1, 0, &bytes[0]).is_err());
        }
        assert!(other.load(3, 1, 0, &none).is_err());
    }
}

#[test]
fn saved_block_summaries_are_compact() {
    let (policy, _, _, ids) = policy_with_blocks("quest(page=4)", 1, 2);
    // Two pages, two heads, two corners of six numbers, two bytes each.
    assert_eq!(saved(&*policy, &ids)[0].len(), 24 + 2 * 2 * 2 * 6 * 2);
    let mut dice = Dice(4);
    let mut policy = make("quest(page=4)", &shape(4, 2, 6, BLOCK as u32));
    policy.seal(3, 1, 0, &dice.normal(BLOCK, 2, 6).all()).expect("sound");
    assert_eq!(saved(&*policy, &[1])[0].len(), 24 + 2 * 2 * 2 * 6 * 4);
}

#[test]
fn damaged_summaries_are_rejected_or_valid() {
    let spec = "quest(page=4,budget=12)";
    let (mut policy, _, query, ids) = policy_with_blocks(spec, 6, 5);
    let sound = saved(&*policy, &ids[2..3]).remove(0);
    let before = saved(&*policy, &ids);
    for len in 0..sound.len() {
        assert!(policy.load(3, ids[2], 16, &sound[..len]).is_err(), "{len} bytes");
    }
    assert!(policy.load(3, ids[2], 16, &[&sound[..], &[0]].concat()).is_err());
    assert!(
        policy.load(3, ids[2], 17, &sound).is_err() && policy.load(4, ids[2], 16, &sound).is_err()
    );
    assert_eq!(saved(&*policy, &ids), before);
    for at in 0..sound.len() {
        for value in [0, 1, 0x7F, 0x80, 0xFF, sound[at] ^ 1, sound[at] ^ 0x40] {
            let mut bytes = sound.clone();
            bytes[at] = value;
            match policy.load(3, ids[2], 16, &bytes) {
                Ok(()) => {
                    // Then they are what it has, and nothing breaks.
                    let now = saved(&*policy, &ids[2..3]).remove(0);
                    assert!(at >= 20 || bytes == sound, "byte {at}");
                    assert!(now == bytes || at < 24, "byte {at}");
                    // Numbers may be so large that no product of them is one.
                    let _ =
                        policy.select(3, Some(&query.all()), &ids, &decode(48), &mut Vec::new());
                    policy.load(3, ids[2], 16, &sound).expect("its own");
                }
                Err(error) => {
                    assert!(matches!(error.status(), Status::Corrupt | Status::TooNew), "{error}");
                    assert_eq!(saved(&*policy, &ids), before);
                }
            }
        }
    }
    // Pages of another policy, model or kind.
    for (spec, shape) in [
        ("quest(page=8)", shape(4, 2, 6, 8)),
        ("arkvale(page=4)", shape(4, 2, 6, 8)),
        ("quest(page=4)", shape(4, 1, 12, 8)),
    ] {
        assert!(make(spec, &shape).load(3, 1, 16, &sound).is_err(), "{spec}");
    }
}

#[test]
fn truncate_and_fork_match_a_fresh_policy() {
    for spec in ["quest(page=4,budget=12)", "arkvale(page=4,budget=24)"] {
        let (mut policy, keys, query, ids) = policy_with_blocks(spec, 10, 6);
        let all = chosen(&mut *policy, &query, &ids);
        let mut copy = policy.fork().expect("memory");
        // Taken back to the middle of a page, written again and sealed: as if nothing was.
        policy.truncate(50).expect("always");
        let mut out = Vec::new();
        let rows = query.all();
        assert!(policy.select(3, Some(&rows), &ids, &decode(50), &mut out).is_err(), "no more");
        policy.select(3, Some(&rows), &ids[..7], &decode(50), &mut out).expect("there");
        policy.append(3, 50, &keys.rows(50, 80)).expect("where it ends");
        for place in 6..10 {
            let rows = keys.rows(place * BLOCK, place * BLOCK + BLOCK);
            policy.seal(3, id(place), (place * BLOCK) as u32, &rows).expect("sound");
        }
        assert_eq!(saved(&*policy, &ids), saved(&*copy, &ids));
        assert_eq!(chosen(&mut *policy, &query, &ids), all);
        let bytes = policy.state_bytes();
        assert!(bytes >= 10 * 2 * 2 * 2 * 6 * 4, "{bytes}");
        // A copy is its own.
        policy.reset();
        assert!(policy.save(3, ids[0], &mut out.iter().map(|_| 0).collect()).is_err());
        assert_eq!(chosen(&mut *copy, &query, &ids), all);
        append_blocks(&mut *policy, 3, &keys, BLOCK, &mut Dice(9));
        assert_eq!(chosen(&mut *policy, &query, &ids), all);
    }
}

#[test]
fn ties_select_the_first_pages() {
    let mut policy = make("quest(page=8,budget=24,dense=0)", &shape(2, 1, 4, 8));
    let keys = Table { numbers: vec![1.0; 80 * 4], heads: 1, dim: 4 };
    for place in 0..10u32 {
        policy.seal(0, place, place * 8, &keys.rows(0, 8)).expect("sound");
    }
    let query = Table { numbers: vec![0.5; 8], heads: 2, dim: 4 };
    let mut out = Vec::new();
    let ids = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0];
    policy.select(0, Some(&query.all()), &ids, &decode(80), &mut out).expect("select");
    assert_eq!(out.len(), 3);
    let mut index = Index::default();
    policy.index(0, &query.all(), None, &decode(80), &mut index).expect("index");
    assert_eq!(lists(&index, 80)[1], (0..24).collect::<Vec<u32>>());
}

#[test]
fn every_query_of_a_step_counts() {
    let (mut policy, keys, _, ids) = policy_with_blocks("quest(page=4,budget=12)", 12, 14);
    let queries = Dice(15).table(3, 4, 6);
    let one =
        |at: usize| Table { numbers: queries.numbers[at * 24..at * 24 + 24].to_vec(), ..queries };
    let scores: Vec<Vec<Vec<f64>>> =
        (0..3).map(|at| quest_scores("each", &keys, &one(at), 4)).collect();
    let mut index = Index::default();
    let context = Context { first_query: 93, ..decode(96) };
    // Blocks with a gap between them are scored in two runs.
    for away in [(0..12).collect::<Vec<usize>>(), (0..12).filter(|b| *b != 5).collect()] {
        let mut expected = BTreeSet::new();
        for head in 0..4 {
            let most = |page: usize| scores.iter().map(|s| s[head][page]).fold(f64::MIN, f64::max);
            let pages: Vec<usize> = away.iter().flat_map(|b| [2 * b, 2 * b + 1]).collect();
            let there: Vec<f64> = pages.iter().map(|&page| most(page)).collect();
            expected.extend(top(&there, 3).iter().map(|&at| id(pages[at] / 2)));
        }
        let candidates: Vec<u32> = away.iter().map(|&place| ids[place]).collect();
        let mut out = Vec::new();
        policy.select(3, Some(&queries.all()), &candidates, &context, &mut out).expect("select");
        assert_eq!(out, expected.into_iter().collect::<Vec<u32>>());
    }
    policy.index(3, &queries.all(), None, &context, &mut index).expect("index");
    assert_eq!(lists(&index, 96).len(), 4);
    // Tokens that nothing is known of are seen.
    policy.index(3, &queries.all(), None, &decode(101), &mut index).expect("index");
    for list in lists(&index, 101) {
        assert_eq!(&list[list.len() - 5..], [96, 97, 98, 99, 100]);
        assert_eq!(list.len(), 17);
    }
}

#[test]
fn latent_rows_have_one_key_head() {
    let latent = Shape { kind: Kind::Latent, value_dim: 4, ..shape(4, 1, 6, 8) };
    let mut dice = Dice(11);
    let mut policy = make("quest(page=8,budget=24,dense=0)", &latent);
    let keys = dice.table(80, 1, 6);
    append_blocks(&mut *policy, 0, &keys, 8, &mut dice);
    let query = dice.table(1, 4, 6);
    let mut index = Index::default();
    policy.index(0, &query.all(), None, &decode(80), &mut index).expect("index");
    for (head, scores) in quest_scores("each", &keys, &query, 8).iter().enumerate() {
        let pages: BTreeSet<u32> = lists(&index, 80)[head].iter().map(|t| t / 8).collect();
        assert_eq!(pages, top(scores, 3).iter().map(|&p| p as u32).collect());
    }
}

#[test]
fn invalid_specs_are_rejected_with_a_reason() {
    let shape = shape(4, 2, 6, 8);
    for (text, words) in [
        ("quest", "whole pages of 16"),
        ("quest(page=3)", "whole pages of 3"),
        ("quest(page=8,budget=0)", "budget"),
        ("quest(page=8,compat=spoon)", "spoon"),
        ("quest(page=8,topk=3)", "topk"),
        ("arkvale(page=8,budget=32)", "must exceed sinks + window"),
        ("h2o(budget=0)", "budget"),
        ("h2o(evict_every=0)", "evict_every"),
        ("snapkv(budget=64,window=64)", "window of 64"),
        ("snapkv(kernel=4)", "no middle"),
        ("tova(ratio=2)", "ratio"),
        ("duo", "alpha and file"),
        ("duo(alpha=\"1 2 3\")", "3 numbers, there are 8"),
        ("duo(alpha=\"1 2 3 4 5 6 7 8 9\")", "more numbers"),
        ("duo(alpha=\"1 2 3 4 5 6 7 x\")", "'x'"),
        ("duo(alpha=\"1 2 3 4 5 6 7 nan\")", "finite"),
        ("duo(file=\"/nowhere/at/all\")", "/nowhere"),
        ("predict(of=h2o)", "by queries"),
        ("predict(of=predict(of=quest(page=3)))", "pages of 3"),
    ] {
        let message = refusal(text, &shape);
        assert!(message.contains(words), "{text}: {message}");
    }
    let latent = Shape { kind: Kind::Latent, value_dim: 4, ..self::shape(4, 1, 6, 8) };
    assert!(refusal("h2o(heads=each)", &latent).contains("latent"));
    assert!(refusal("snapkv(form=original)", &latent).contains("latent"));
    assert_eq!(make("h2o", &latent).traits().scope, Scope::Layer);
    assert_eq!(make("h2o(heads=all)", &shape).traits().scope, Scope::Layer);
    assert_eq!(make("h2o", &shape).traits().scope, Scope::KeyHead);
}

// ---- h2o, tova ----

/// Tokens that a policy retains, one list per head; `None` if it retains all.
fn stays(
    policy: &mut dyn Sparse,
    layer: u32,
    context: &Context,
) -> Option<(RetainedTokens, Vec<Vec<u32>>)> {
    let mut keep = RetainedTokens::default();
    let goes = policy.evict(layer, context, &mut keep).expect("evict");
    assert!(goes || keep == RetainedTokens::default());
    let lists = (0..keep.heads.len()).map(|at| keep.heads.get(at).to_vec()).collect();
    goes.then_some((keep, lists))
}

/// Sums of attention in 64ths: for each head a number a token.
fn sums(dice: &mut Dice, heads: usize, tokens: usize) -> Vec<f32> {
    (0..heads * tokens).map(|_| dice.below(9) as f32 / 64.0).collect()
}

/// Tokens of one list as the rule keeps them: position and score.
type Held = Vec<(u32, f64)>;

/// H2O for one list, from the words of its rule.
fn h2o_step(held: &mut Held, (sink, recent, budget, every): (usize, usize, usize, usize)) -> bool {
    let n = held.len();
    if n <= sink + recent || n - sink - recent < budget + every {
        return false;
    }
    let between: Vec<f64> = held[sink..n - recent].iter().map(|t| t.1).collect();
    let best = without_lowest(&between, between.len() - budget);
    let mut kept: Held = held[..sink].to_vec();
    kept.extend(best.iter().map(|&at| held[sink + at]));
    kept.extend(&held[n - recent..]);
    *held = kept;
    true
}

/// The same by whole blocks.
fn h2o_blocks(held: &mut Held, size: u32, rule: (usize, usize, usize, usize)) -> bool {
    let (sink, recent, budget, every) = rule;
    let (n, next) = (held.len(), held.last().map_or(0, |t| t.0 + 1));
    let mut sure: BTreeSet<u32> = held.iter().take(sink).map(|t| t.0 / size).collect();
    sure.extend(held[n.saturating_sub(recent)..].iter().map(|t| t.0 / size));
    if next % size != 0 {
        sure.insert(next / size);
    }
    let blocks: BTreeSet<u32> = held.iter().map(|t| t.0 / size).collect();
    let free: Vec<u32> = blocks.difference(&sure).copied().collect();
    let most = (budget / size as usize).max(1);
    if free.len() <= most || (free.len() - most) * (size as usize) < every {
        return false;
    }
    let of = |b: u32| held.iter().filter(|t| t.0 / size == b).map(|t| t.1).sum::<f64>();
    let scores: Vec<f64> = free.iter().map(|&b| of(b)).collect();
    let stay: BTreeSet<u32> =
        without_lowest(&scores, free.len() - most).iter().map(|&at| free[at]).collect();
    held.retain(|t| sure.contains(&(t.0 / size)) || stay.contains(&(t.0 / size)));
    true
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn h2o_keeps_heavy_hitters(
        seed in any::<u64>(),
        (key_heads, group) in prop::sample::select(vec![(1usize, 1usize), (2, 2), (1, 4), (3, 1)]),
        sink in 0usize..6,
        recent in 0usize..9,
        budget in 1usize..20,
        every in 1usize..12,
        prompt in 1usize..90,
        is_all in any::<bool>(),
        is_block in any::<bool>(),
        is_pinned in any::<bool>(),
    ) {
        let mut dice = Dice(seed);
        let (heads, size) = (key_heads * group, 4u32);
        let shape = shape(heads as u32, key_heads as u32, 2, size);
        let (who, form) = (if is_all { "all" } else { "each" }, if is_block { "block" } else { "token" });
        let spec = format!("h2o(sink={sink},recent={recent},budget={budget},heads={who},evict_every={every},form={form})");
        let mut policy = make(&spec, &shape);
        let rule = (sink, recent, budget, every);
        let lists = if is_all { 1 } else { key_heads };
        let mut model: Vec<Held> = vec![Vec::new(); lists];
        let mut tokens = 0u32;
        for step in 0..40 {
            if step == 23 {
                // Some is taken back.
                tokens -= (tokens / 3).min(5);
                policy.truncate(tokens).expect("always");
                model.iter_mut().for_each(|held| held.retain(|t| t.0 < tokens));
                if model.iter().any(|held| held.len() != model[0].len()) {
                    break;
                }
            }
            let new = if step == 0 { prompt as u32 } else { 1 };
            model.iter_mut().for_each(|held| held.extend((tokens..tokens + new).map(|t| (t, 0.0))));
            tokens += new;
            let count = model[0].len();
            let got = sums(&mut dice, heads, count);
            policy.observe(2, new, &got, count as u32).expect("observe");
            for (head, got) in got.chunks(count).enumerate() {
                let list = if is_all { 0 } else { head / group };
                for (held, &sum) in model[list].iter_mut().zip(got) {
                    held.1 += f64::from(sum);
                }
            }
            let goes: Vec<bool> = model
                .iter_mut()
                .map(|held| if is_block { h2o_blocks(held, size, rule) } else { h2o_step(held, rule) })
                .collect();
            let context = if step == 0 { prefill(tokens as usize) } else { decode(tokens as usize) };
            match stays(&mut *policy, 2, &context) {
                None => prop_assert!(!goes.contains(&true)),
                Some((keep, said)) => {
                    prop_assert!(goes.contains(&true), "step {}", step);
                    let expected: Vec<Vec<u32>> =
                        model.iter().map(|held| held.iter().map(|t| t.0).collect()).collect();
                    prop_assert_eq!(&said, &expected);
                    policy.evicted(2, &keep).expect("what it said");
                }
            }
            // The most that ever stays.
            let up = |n: usize| if is_block { n.next_multiple_of(size as usize) } else { n };
            let block = if is_block { size as usize } else { 0 };
            let peak = up(sink) + up(budget) + up(recent) + up(every - 1) + block;
            for held in &model {
                prop_assert!(held.len() <= peak, "{} of {}", held.len(), peak);
            }
            prop_assert!(stays(&mut *policy, 2, &context).is_none(), "nothing more to do");
        }
        // A new sequence knows nothing of the old one; another layer never did.
        prop_assert!(policy.evict(1, &decode(1), &mut RetainedTokens::default()).is_ok_and(|goes| !goes));
        policy.reset();
        let got = sums(&mut dice, heads, 2);
        policy.observe(2, 2, &got, 2).expect("two tokens");
        // Pinned tokens stay resident.
        if is_pinned && !is_block && sink < 2 {
            policy.reset();
            let count = sink + recent + budget + every + 1;
            policy.observe(2, 1, &sums(&mut dice, heads, count), count as u32).expect("new");
            let (keep, said) = stays(&mut *policy, 2, &decode(count)).expect("too many");
            let mut pinned = RetainedTokens::default();
            for list in &said {
                let with: BTreeSet<u32> = list.iter().copied().chain([2]).collect();
                pinned.heads.push(with);
            }
            policy.evicted(2, &pinned).expect("a subset of the tokens");
            let all: BTreeSet<usize> = said.iter().map(|l| l.len() + usize::from(!l.contains(&2))).collect();
            let now = *all.first().expect("one");
            let observed = policy.observe(2, 1, &sums(&mut dice, heads, now), now as u32);
            prop_assert_eq!(observed.is_ok(), all.len() == 1);
            drop(keep);
        }
    }

    #[test]
    fn tova_evicts_by_the_newest_query(
        seed in any::<u64>(),
        heads in 1usize..4,
        budget in 1usize..20,
        prompt in 1usize..50,
        is_free in any::<bool>(),
        one_row in any::<bool>(),
    ) {
        let mut dice = Dice(seed);
        let newest = if is_free { "free" } else { "kept" };
        let shape = shape(heads as u32, 1, 2, 4);
        let mut policy = make(&format!("tova(budget={budget},newest={newest})"), &shape);
        let mut held: Vec<u32> = Vec::new();
        for step in 0..30u32 {
            let next = prompt as u32 + step;
            held.extend(if step == 0 { 0..prompt as u32 } else { next - 1..next });
            let (count, rows) = (held.len(), if one_row { 1 } else { heads });
            let got = sums(&mut dice, rows, count);
            policy.observe(0, 1, &got, count as u32).expect("observe");
            let mean = |t: usize| (0..rows).map(|h| f64::from(got[h * count + t])).sum::<f64>();
            let free = if is_free { count } else { count - 1 };
            let scores: Vec<f64> = (0..free).map(mean).collect();
            let go = count.saturating_sub(budget).min(free);
            let mut expected: Vec<u32> = without_lowest(&scores, go).iter().map(|&at| held[at]).collect();
            expected.extend(&held[free..]);
            match stays(&mut *policy, 0, &decode(next as usize)) {
                None => prop_assert_eq!(go, 0),
                Some((keep, said)) => {
                    prop_assert_eq!(said, vec![expected.clone()]);
                    policy.evicted(0, &keep).expect("what it said");
                }
            }
            held = expected;
        }
    }
}

#[test]
fn invalid_attention_sums_change_nothing() {
    let shape = shape(4, 2, 2, 4);
    for spec in ["h2o(sink=1,recent=1,budget=2)", "tova(budget=4)", "snapkv(window=1,budget=4)"] {
        let mut policy = make(spec, &shape);
        let mut dice = Dice(8);
        policy.observe(1, 1, &sums(&mut dice, 4, 9), 9).expect("sound");
        let mut copy = policy.fork().expect("memory");
        let mut bad = sums(&mut dice, 4, 10);
        for wrong in [f32::NAN, f32::INFINITY, -1.0] {
            bad[39] = wrong;
            assert!(policy.observe(1, 1, &bad, 10).is_err());
        }
        for (heads, tokens, said) in [(4, 8, 8), (3, 10, 10), (4, 10, 9), (4, 0, 0), (4, 10, 39)] {
            assert!(policy.observe(1, 1, &sums(&mut dice, heads, tokens), said).is_err(), "{spec}");
        }
        assert!(policy.observe(4, 1, &sums(&mut dice, 4, 9), 9).is_err(), "{spec}: no such layer");
        let beyond = sums(&mut dice, 4, (1 << 16) + 1);
        let error = policy.observe(1, 1, &beyond, (1 << 16) + 1).expect_err("too many");
        assert_eq!(error.status(), Status::Limit);
        assert!(policy.evict(4, &prefill(9), &mut RetainedTokens::default()).is_err(), "{spec}");
        let mut keep = RetainedTokens::default();
        let lists = if policy.traits().scope == Scope::Layer { 1 } else { 2 };
        for wrong in [vec![3, 2], vec![0, 9], vec![1, 1]] {
            keep.clear();
            (0..lists).for_each(|_| keep.heads.push(wrong.clone()));
            assert!(policy.evicted(1, &keep).is_err(), "{spec}: {wrong:?}");
        }
        let (said, same) = (stays(&mut *policy, 1, &prefill(9)), stays(&mut *copy, 1, &prefill(9)));
        assert!(said.is_some() && said == same, "{spec}");
        // The policy rejects unsupported calls, or answers that all is needed.
        assert!(policy.score(0, &[1.0]).is_err() && policy.load(0, 0, 0, &[1]).is_err());
    }
    let mut policy = make("h2o", &shape);
    assert!(policy.observe(0, 1, &[0.5; 9], 9).is_err(), "one row for heads of their own");
    assert!(make("h2o(heads=all)", &shape).observe(0, 1, &[0.5; 9], 9).is_ok());
    assert!(make("tova", &shape).observe(0, 2, &[0.5; 36], 9).is_err(), "two queries");
    assert!(make("snapkv", &shape).observe(0, 65, &[0.5; 36], 9).is_err(), "more than the window");
}

// ---- snapkv, pyramidkv, adakv ----

/// Retained ones of `tokens` by scores of the first ones; the window is always retained.
fn snap(scores: &[f64], tokens: usize, stay: usize) -> Vec<u32> {
    let mut kept: Vec<u32> =
        without_lowest(scores, tokens - stay).iter().map(|&t| t as u32).collect();
    kept.extend(scores.len() as u32..tokens as u32);
    kept
}

/// Scores of each list: sums of rows, evened out over a kernel, nothing beyond the ends.
fn snap_scores(
    got: &[f32],
    tokens: usize,
    group: usize,
    window: usize,
    kernel: usize,
    max: bool,
) -> Vec<Vec<f64>> {
    let old = tokens - window.min(tokens);
    let rows: Vec<&[f32]> = got.chunks(tokens).collect();
    rows.chunks(group)
        .map(|rows| {
            let sum = |t: usize| rows.iter().map(|row| f64::from(row[t])).sum::<f64>();
            (0..old)
                .map(|t| {
                    let neighbours = (t as i64 - kernel as i64 / 2..=t as i64 + kernel as i64 / 2)
                        .map(|t| if t < 0 || t >= old as i64 { 0.0 } else { sum(t as usize) });
                    if max {
                        neighbours.fold(0.0, f64::max)
                    } else {
                        neighbours.sum::<f64>() / kernel as f64
                    }
                })
                .collect()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn snapkv_family_keeps_tokens_of_the_last_queries(
        seed in any::<u64>(),
        (key_heads, group) in prop::sample::select(vec![(1usize, 1usize), (2, 2), (1, 4), (4, 1)]),
        tokens in 1usize..120,
        window in 1usize..9,
        more in 1usize..40,
        kernel in prop::sample::select(vec![1usize, 4, 8]),
        is_original in any::<bool>(),
        is_max in any::<bool>(),
        ratio in prop::option::of(0usize..10),
        how in prop::sample::select(vec!["snapkv", "pyramidkv", "adakv"]),
    ) {
        let kernel = kernel + 1 - kernel % 2;
        let (mut dice, heads, layers) = (Dice(seed), key_heads * group, 4usize);
        let shape = shape(heads as u32, key_heads as u32, 2, 4);
        let form = if is_original { "original" } else { "kvpress" };
        let pool = if is_max { "max" } else { "avg" };
        let budget = window + more;
        let cap = match ratio {
            Some(tenths) => format!("ratio={}", tenths as f64 / 10.0),
            None => format!("budget={budget}"),
        };
        let spec = format!("{how}({cap},window={window},kernel={kernel},form={form},pool={pool})");
        let mut policy = make(&spec, &shape);
        prop_assert_eq!(policy.traits().is_ragged, how == "adakv");
        for layer in 0..layers {
            let got = sums(&mut dice, heads, tokens);
            policy.observe(layer as u32, window.min(tokens) as u32, &got, tokens as u32).expect("observe");
            let own = if is_original { 1 } else { group };
            let scores = snap_scores(&got, tokens, own, window, kernel, is_max);
            // The budget.
            let n = tokens as f64;
            let exact = ratio.map_or(budget as f64, |r| n * (1.0 - r as f64 / 10.0)).min(n);
            let whole = exact.floor() as usize;
            let (l, last) = (layer as f64, (layers - 1) as f64);
            let stay = match (how, is_original) {
                ("pyramidkv", true) => {
                    let b = whole as i64 - window as i64;
                    let (t, w) = (tokens as i64, window as i64);
                    if tokens <= whole || t < 2 * b.max(0) {
                        whole
                    } else {
                        let b = b.max(0);
                        let (mut m, mut most) = (b / 20, 2 * b - b / 20);
                        if most >= t - w {
                            (most, m) = (t - w, 2 * b - (t - w));
                        }
                        let step = ((most - m) as f64 / last).floor() as i64;
                        (most - layer as i64 * step + w).clamp(0, t) as usize
                    }
                }
                ("pyramidkv", false) => {
                    // In the order of kvpress: halves of a token hang on the last bit.
                    let w = window as f64;
                    let base = (w + exact) - w;
                    let (mut m, mut most) = (base / 20.0, 2.0 * base - base / 20.0);
                    if most >= n - w {
                        (most, m) = (n - w, 2.0 * base - (n - w));
                    }
                    let is_pyramid = n >= most && most >= m && m >= w && exact < n;
                    let step = (most - m) / last;
                    let stay = if is_pyramid { most - l * step } else { exact };
                    stay.round_ties_even().clamp(0.0, n) as usize
                }
                _ => whole,
            };
            let stay = stay.max(window.min(tokens)).min(tokens);
            let expected: Vec<Vec<u32>> = if how == "adakv" {
                let sure = (stay as f64 * 0.2).floor() as usize;
                let flat: Vec<f64> = scores
                    .iter()
                    .flat_map(|scores| {
                        let mut all = scores.clone();
                        all.resize(tokens, f64::INFINITY);
                        top(&all, sure).iter().for_each(|&t| all[t] = f64::INFINITY);
                        all
                    })
                    .collect();
                let left = without_lowest(&flat, scores.len() * (tokens - stay));
                let of = |head: usize| left.iter().filter(move |&&at| at / tokens == head);
                (0..scores.len()).map(|h| of(h).map(|at| (at % tokens) as u32).collect()).collect()
            } else {
                scores.iter().map(|scores| snap(scores, tokens, stay)).collect()
            };
            // Not while text is written, not before the last part.
            let early = Context { part: 0, parts: 2, ..prefill(tokens) };
            prop_assert!(stays(&mut *policy, layer as u32, &decode(tokens)).is_none());
            prop_assert!(stays(&mut *policy, layer as u32, &early).is_none());
            match stays(&mut *policy, layer as u32, &prefill(tokens)) {
                None => prop_assert_eq!(stay, tokens, "{}", spec),
                Some((keep, said)) => {
                    prop_assert!(stay < tokens);
                    prop_assert_eq!(said, expected, "{} layer {}", spec, layer);
                    policy.evicted(layer as u32, &keep).expect("what it said");
                    prop_assert!(stays(&mut *policy, layer as u32, &prefill(tokens)).is_none());
                }
            }
        }
        policy.reset();
        prop_assert!(policy.evict(0, &prefill(9999), &mut RetainedTokens::default()).is_err() || ratio == Some(0));
    }
}

// ---- knorm, keydiff ----

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn knorm_and_keydiff_evict_by_keys_alone(
        seed in any::<u64>(),
        heads in 1usize..4,
        steps in prop::collection::vec(1usize..20, 1..10),
        budget in 1usize..30,
        sink in 0usize..3,
        recent in 0usize..3,
        is_norm in any::<bool>(),
    ) {
        let (dim, mut dice) = (8, Dice(seed));
        let shape = shape(heads as u32 * 2, heads as u32, dim as u32, 4);
        let name = if is_norm { "knorm" } else { "keydiff" };
        let mut policy = make(&format!("{name}(budget={budget},sink={sink},recent={recent})"), &shape);
        let mut keys = Table { numbers: Vec::new(), heads, dim };
        let mut held: Vec<Vec<u32>> = vec![Vec::new(); heads];
        for new in steps {
            let first = keys.tokens();
            let table = if is_norm { dice.table(new, heads, dim) } else { dice.normal(new, heads, dim) };
            keys.numbers.extend(table.numbers);
            policy.append(3, first as u32, &keys.rows(first, first + new)).expect("in order");
            held.iter_mut().for_each(|held| held.extend(first as u32..(first + new) as u32));
            let said = stays(&mut *policy, 3, &decode(first + new));
            for (head, held) in held.iter_mut().enumerate() {
                let key = |t: u32| keys.row(t as usize, head);
                let length = |t: u32| dot(key(t), key(t)).sqrt();
                let mut anchor = vec![0.0f64; dim];
                for &t in held.iter() {
                    let n = length(t);
                    anchor.iter_mut().zip(key(t)).for_each(|(a, &k)| *a += f64::from(k) / n);
                }
                let n = anchor.iter().map(|a| a * a).sum::<f64>().sqrt();
                let angle = |t: u32| {
                    let product: f64 = key(t).iter().zip(&anchor).map(|(&k, a)| f64::from(k) * a).sum();
                    product / length(t) / n
                };
                let score = |t: u32| if is_norm { -length(t) } else { -angle(t) };
                let to = held.len().saturating_sub(recent);
                let from = sink.min(to);
                let scores: Vec<f64> = held[from..to].iter().map(|&t| score(t)).collect();
                let go = held.len().saturating_sub(budget).min(to - from);
                let mut expected = held[..from].to_vec();
                expected.extend(without_lowest(&scores, go).iter().map(|&at| held[from + at]));
                expected.extend(&held[to..]);
                let Some((_, said)) = &said else {
                    prop_assert_eq!(go, 0);
                    continue;
                };
                if is_norm {
                    prop_assert_eq!(&said[head], &expected);
                } else {
                    // Directions are rounded: what differs must be nearly equal.
                    prop_assert_eq!(said[head].len(), expected.len());
                    let only = |a: &Vec<u32>, b: &Vec<u32>| -> Vec<f64> {
                        a.iter().filter(|t| !b.contains(t)).map(|&t| score(t)).collect()
                    };
                    let (ours, theirs) = (only(&said[head], &expected), only(&expected, &said[head]));
                    prop_assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < 3e-4));
                }
                *held = said[head].clone();
            }
            if let Some((keep, _)) = said {
                policy.evicted(3, &keep).expect("what it said");
            }
        }
        // Keys in a gap, or again, or that are no numbers.
        let next = keys.tokens() as u32;
        let rows = keys.rows(0, 1);
        prop_assert!(policy.append(3, next + 1, &rows).is_err() && policy.append(3, 0, &rows).is_err());
        let bad = Table { numbers: vec![f32::NAN; heads * dim], heads, dim };
        prop_assert!(policy.append(3, next, &bad.all()).is_err());
        // Taken back and written again: the same.
        let mut copy = policy.fork().expect("memory");
        policy.append(3, next, &rows).expect("in order");
        policy.truncate(next).expect("always");
        policy.append(3, next, &keys.rows(0, 1)).expect("in order");
        copy.append(3, next, &rows).expect("in order");
        let context = decode(next as usize + 1);
        prop_assert_eq!(stays(&mut *policy, 3, &context), stays(&mut *copy, 3, &context));
    }
}

// ---- duo, external, predict ----

#[test]
fn duo_streaming_heads_keep_sinks_and_recent_tokens() {
    let shape = shape(4, 2, 2, 4);
    let alpha = "0.5 0.25; 0.5 0.125\n0.75,1; 0 0.5";
    // Eight heads: from the median on, 8 - ceil(3.5) = 4 of them, of equal ones the first.
    let mut policy = make(&format!("duo(alpha=\"{alpha}\",sink=2,recent=3,evict_every=2)"), &shape);
    assert!(policy.traits().is_ragged);
    assert!(stays(&mut *policy, 0, &decode(6)).is_none(), "one is not two");
    let (keep, said) = stays(&mut *policy, 0, &decode(9)).expect("too many");
    assert_eq!(said, [(0..9).collect(), vec![0, 1, 6, 7, 8]]);
    policy.evicted(0, &keep).expect("what it said");
    assert!(stays(&mut *policy, 0, &decode(10)).is_none());
    let (_, said) = stays(&mut *policy, 0, &decode(11)).expect("two more");
    assert_eq!(said[1], [0, 1, 8, 9, 10]);
    policy.truncate(8).expect("always");
    assert!(stays(&mut *policy, 0, &decode(10)).is_none(), "6, 7 and two new ones");
    assert_eq!(stays(&mut *policy, 0, &decode(11)).expect("two more").1[1], [0, 1, 8, 9, 10]);
    assert_eq!(
        stays(&mut *policy, 1, &decode(9)).expect("two").1,
        [(0..9).collect(), vec![0, 1, 6, 7, 8]]
    );
    assert!(stays(&mut *policy, 2, &decode(999)).is_none(), "all heads keep all");
    assert_eq!(stays(&mut *policy, 3, &decode(9)).expect("two").1, vec![vec![0, 1, 6, 7, 8]; 2]);
    assert!(policy.evict(4, &decode(9), &mut RetainedTokens::default()).is_err());
    policy.reset();
    assert!(stays(&mut *policy, 0, &decode(6)).is_none());
    let none = |sparsity: f64, layer: u32| {
        let mut policy =
            make(&format!("duo(alpha=\"{alpha}\",sink=2,recent=3,sparsity={sparsity})"), &shape);
        stays(&mut *policy, layer, &decode(9)).is_none()
    };
    assert!((0..4).all(|layer| none(0.0, layer)) && !(0..4).any(|layer| none(1.0, layer)));
    let path = std::env::temp_dir().join(format!("kvtier-duo-{}", std::process::id()));
    std::fs::write(&path, "0.5\t0.25\n0.5\t0.125\n0.75\t1\n0\t0.5\n").expect("a file");
    let mut read = make(&format!("duo(file=\"{}\",sink=2,recent=3)", path.display()), &shape);
    std::fs::remove_file(&path).expect("there");
    assert_eq!(
        stays(&mut *read, 0, &decode(9)).expect("two").1,
        [(0..9).collect(), vec![0, 1, 6, 7, 8]]
    );
}

#[test]
fn external_policy_uses_engine_scores() {
    let shape = shape(4, 2, 2, 4);
    let mut policy = make("external(topk=3,last=1)", &shape);
    let mut out = vec![1];
    let ids = [40, 10, 30, 20, 50];
    policy.select(0, None, &ids, &decode(20), &mut out).expect("no scores");
    assert_eq!(out, [10, 20, 30, 40, 50]);
    // Among equal scores the first candidate is selected; `last=1` adds the last candidate.
    policy.score(0, &[1.0, 2.0, 1.0, 1.0, 0.0]).expect("finite");
    assert!(policy.score(0, &[f32::NAN]).is_err() && policy.score(9, &[1.0]).is_err());
    assert!(policy.select(0, None, &ids[1..], &decode(20), &mut out).is_err());
    assert!(policy.select(0, None, &[1, 2, 3, 3, 4], &decode(20), &mut out).is_err());
    assert!(policy.select(4, None, &ids, &decode(20), &mut out).is_err());
    policy.select(0, None, &ids, &decode(20), &mut out).expect("five scores");
    assert_eq!(out, [10, 40, 50]);
    policy.select(0, None, &ids, &decode(20), &mut out).expect("they are used up");
    assert_eq!(out.len(), 5);
    policy.score(1, &[0.0; 5]).expect("finite");
    policy.truncate(3).expect("always");
    policy.select(1, None, &ids, &decode(20), &mut out).expect("forgotten");
    assert_eq!(out.len(), 5);
    let mut policy = make("external(threshold=0.5)", &shape);
    policy.score(0, &[0.5, 0.6, -1.0, 0.51, 0.0]).expect("finite");
    policy.select(0, None, &ids, &decode(20), &mut out).expect("five scores");
    assert_eq!(out, [10, 20]);
}

#[test]
fn prefetched_selection_is_audited_by_the_own_query() {
    use kvtier::sparse::infinigen::Predict;
    let shape = shape(4, 2, 6, BLOCK as u32);
    let mut dice = Dice(21);
    let inner = make("quest(page=4,budget=12,dense=1)", &shape);
    let mut truth = make("quest(page=4,budget=12,dense=1)", &shape);
    let mut policy = Predict::new(inner, &shape, 2, true).expect("sound");
    assert_eq!(policy.traits().dense_layers, 2);
    assert!(policy.traits().caps & caps::LOAD_DECODE != 0);
    let keys = dice.table(20 * BLOCK, 2, 6);
    for layer in 1..4 {
        append_blocks(&mut policy, layer, &keys, BLOCK, &mut Dice(5));
        append_blocks(&mut *truth, layer, &keys, BLOCK, &mut Dice(6));
    }
    let ids: Vec<u32> = (0..20).map(id).collect();
    let (mut wanted, mut found, mut chosen) = (0, 0, 0);
    for _ in 0..10 {
        let (early, own) = (dice.table(1, 4, 6), dice.table(1, 4, 6));
        let (mut said, mut right) = (Vec::new(), Vec::new());
        let context = decode(20 * BLOCK);
        policy.select(1, Some(&early.all()), &ids, &context, &mut said).expect("select");
        assert_eq!(said.len(), 20, "no query exists before layer 1");
        policy.select(3, Some(&early.all()), &ids, &context, &mut said).expect("select");
        truth.select(3, Some(&early.all()), &ids, &context, &mut right).expect("select");
        assert_eq!(said, right);
        truth.select(3, Some(&own.all()), &ids, &context, &mut right).expect("select");
        let (mut index, mut same) = (Index::default(), Index::default());
        policy.index(3, &own.all(), None, &context, &mut index).expect("index");
        truth.index(3, &own.all(), None, &context, &mut same).expect("index");
        assert_eq!(index, same);
        chosen += said.len() as u64;
        wanted += right.len() as u64;
        found += right.iter().filter(|id| said.contains(id)).count() as u64;
        // Asked again, nothing is counted twice.
        policy.index(3, &own.all(), None, &context, &mut index).expect("index");
    }
    let stats = policy.stats();
    assert_eq!((stats.wanted, stats.found, stats.audited), (wanted, found, 10));
    // Those for layer 1, which all were chosen, and those for layer 3.
    assert_eq!((stats.selections, stats.candidates), (20, 400));
    assert_eq!((stats.chosen + stats.spared, stats.chosen), (400, 200 + chosen));
    assert_eq!(policy.fork().expect("memory").stats(), Default::default());
    assert!(found > 0 && found < wanted);
    let again = make("infinigen(of=quest(page=4),ahead=3)", &shape);
    assert_eq!((again.traits().dense_layers, again.traits().ahead), (3, 3));
}

// ---- how long it takes ----

/// The shortest of several times, in microseconds.
fn best(mut work: impl FnMut()) -> f64 {
    let mut least = f64::INFINITY;
    for _ in 0..30 {
        let start = std::time::Instant::now();
        work();
        least = least.min(start.elapsed().as_secs_f64() * 1e6);
    }
    least
}

/// Prints what decisions cost; `cargo test --release --test sparse decode:: -- --ignored
/// --nocapture`. Goals: 100 us for choosing pages, 200 us for a step of H2O, 1 us for nothing.
#[test]
#[ignore = "a measurement"]
fn measure_decode_policies() {
    use kvtier::sparse::ranks::Ranks;
    let (pages, heads) = (4096usize, 32usize);
    let mut dice = Dice(1);
    let scores = dice.normal(heads, 1, pages).numbers;
    let (mut ranks, mut out) = (Ranks::default(), Vec::new());
    let all = |ranks: &mut Ranks, out: &mut Vec<u32>, count: usize| {
        out.clear();
        scores
            .chunks_exact(pages)
            .for_each(|scores| ranks.top(scores, count, out).expect("memory"));
    };
    for count in [8, 64, 128] {
        println!(
            "choose {count} of 4096 x 32: {:.1} us",
            best(|| all(&mut ranks, &mut out, count))
        );
    }
    let rising: Vec<f32> = (0..pages).map(|at| at as f32).collect();
    let worst = best(|| {
        out.clear();
        (0..heads).for_each(|_| ranks.top(&rising, 8, &mut out).expect("memory"));
    });
    println!("choose 8 of 4096 x 32, each better than all before: {worst:.1} us");

    let shape = shape(32, 8, 128, 16);
    let mut quest = make("quest(budget=128,dense=0)", &shape);
    let keys = dice.normal(1024, 8, 128);
    for place in 0..pages as u32 {
        let from = (place as usize % 64) * 16;
        quest.seal(0, place, place * 16, &keys.rows(from, from + 16)).expect("sound");
    }
    let query = dice.normal(1, 32, 128);
    let ids: Vec<u32> = (0..pages as u32).collect();
    let time = best(|| {
        quest.select(0, Some(&query.all()), &ids, &decode(65536), &mut out).expect("select");
    });
    println!("quest: select of 4096 blocks, scores included: {time:.0} us, {} chosen", out.len());
    let mut index = Index::default();
    let time = best(|| {
        quest.index(0, &query.all(), None, &decode(65536), &mut index).expect("index");
    });
    println!("quest: index of 4096 pages, scores included: {time:.0} us");
    let one = keys.rows(0, 1);
    quest.truncate(65000).expect("always");
    let mut at = 65000;
    let time = best(|| {
        quest.append(0, at, &one).expect("in order");
        at += 1;
    });
    println!("quest: append of a token: {time:.2} us");

    for spec in
        ["h2o(sink=4,recent=256,budget=7932)", "h2o(sink=4,recent=256,budget=7932,heads=all)"]
    {
        let shape = Shape { key_heads: 32, ..shape };
        let mut h2o = make(spec, &shape);
        let mut tokens = 8192;
        h2o.observe(0, 1, &vec![0.25; 32 * 8192], 8192).expect("sound");
        let got: Vec<f32> = dice.normal(1, 32, 8193).numbers.iter().map(|n| n * n).collect();
        let mut keep = RetainedTokens::default();
        let (mut step, mut forget) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..60 {
            tokens += 1;
            let start = std::time::Instant::now();
            h2o.observe(0, 1, &got, 8193).expect("sound");
            assert!(h2o.evict(0, &decode(tokens), &mut keep).expect("evict"));
            step = step.min(start.elapsed().as_secs_f64() * 1e6);
            let start = std::time::Instant::now();
            h2o.evicted(0, &keep).expect("what it said");
            forget = forget.min(start.elapsed().as_secs_f64() * 1e6);
        }
        println!("{spec}: step of 8192 x 32: {step:.0} us, and {forget:.0} us to forget");
    }
    let mut h2o = make("h2o", &shape);
    h2o.observe(0, 1, &[0.5; 3200], 100).expect("sound");
    let mut keep = RetainedTokens::default();
    let ids: Vec<u32> = (0..8).collect();
    let nothing = |name: &str, work: &mut dyn FnMut()| {
        println!("{name}: {:.3} us", best(|| (0..100).for_each(|_| work())) / 100.0);
    };
    nothing("h2o: nothing to evict", &mut || {
        assert!(!h2o.evict(0, &decode(100), &mut keep).expect("evict"));
    });
    nothing("quest: select of 8 blocks, no query", &mut || {
        quest.select(0, None, &ids, &decode(128), &mut out).expect("select");
    });
    nothing("quest: index of a short sequence", &mut || {
        quest.index(0, &query.all(), None, &decode(128), &mut index).expect("index");
    });
    nothing("quest: traits", &mut || assert!(quest.traits().requires_block_selection));
    let mut snapkv = make("snapkv", &shape);
    nothing("snapkv: a step", &mut || {
        assert!(!snapkv.evict(0, &decode(100), &mut keep).expect("evict"));
    });
}
