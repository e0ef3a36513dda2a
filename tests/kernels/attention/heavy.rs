//! Heavy hitters: scores, selection of the kept tokens, and compaction.

use kvtier::base::spec::Spec;
use kvtier::base::status::Status;
use kvtier::device::call::{Call, Kind};
use kvtier::meta::dtype::Dtype;
use kvtier::sparse::{Context, RetainedTokens, registry};

use crate::attention::data::{Bytes, number};
use crate::gpu::run;

/// Scores of lists, with room behind each.
struct Scores {
    memory: Bytes,
    lists: usize,
}

const ROOM: usize = 3000;

impl Scores {
    fn new(lists: usize) -> Scores {
        Scores { memory: Bytes::new(lists * ROOM * 4), lists }
    }
    fn call(&self, kind: Kind, tokens: usize) -> Call {
        Call {
            kind: kind as u32,
            numbers: self.memory.at(),
            out_head_stride: ROOM as i64 * 4,
            key_heads: self.lists as u32,
            tokens: tokens as u32,
            ..Call::default()
        }
    }
    fn set(&mut self, list: usize, scores: &[f32]) {
        for (at, score) in scores.iter().enumerate() {
            let at = (list * ROOM + at) * 4;
            self.memory.bytes()[at..at + 4].copy_from_slice(&score.to_le_bytes());
        }
    }
    fn get(&mut self, list: usize, count: usize) -> Vec<f32> {
        let all = self.memory.numbers(self.lists * ROOM, Dtype::F32);
        all[list * ROOM..][..count].to_vec()
    }
}

fn call(call: Call) {
    // SAFETY: tests make calls of memory that they hold.
    unsafe { run(&call) }.expect("sound");
}

/// Lists of what stays, of so many tokens.
fn keep(scores: &Scores, tokens: usize, (sinks, recent, keep): (u32, u32, u32)) -> Vec<Vec<u32>> {
    let mut lists = vec![u32::MAX; scores.lists * ROOM];
    let mut counts = vec![u32::MAX; scores.lists];
    call(Call {
        index: lists.as_mut_ptr() as u64,
        out_stride: ROOM as i64 * 4,
        counts: counts.as_mut_ptr() as u64,
        sinks,
        recent,
        keep,
        ..scores.call(Kind::Keep, tokens)
    });
    let list = |at: usize| lists[at * ROOM..][..counts[at] as usize].to_vec();
    let rest = |at: usize| &lists[at * ROOM..][counts[at] as usize..ROOM];
    assert!((0..scores.lists).all(|at| rest(at).iter().all(|&item| item == u32::MAX)));
    (0..scores.lists).map(list).collect()
}

/// By the rule.
fn kept(scores: &[f32], (sinks, recent, keep): (u32, u32, u32)) -> Vec<u32> {
    let to = scores.len().saturating_sub(recent as usize);
    let from = to.min(sinks as usize);
    let mut between: Vec<usize> = (from..to).collect();
    // The worst first, of equal ones the lower; minus zero is zero.
    between.sort_by(|&a, &b| (scores[a] + 0.0).total_cmp(&(scores[b] + 0.0)).then(a.cmp(&b)));
    let gone = &between[..between.len().saturating_sub(keep as usize)];
    (0..scores.len()).filter(|at| !gone.contains(at)).map(|at| at as u32).collect()
}

#[test]
fn heavy_hitters_are_selected_by_the_rule() {
    for (tokens, rule) in [
        (0, (4, 8, 2)),
        (1, (0, 0, 1)),
        (100, (4, 8, 20)),
        (100, (0, 0, 1)),
        (100, (4, 200, 1)),
        (100, (200, 0, 1)),
        (100, (0, 100, 1)),
        (100, (10, 10, 80)),
        (1024, (4, 16, 500)),
        (2600, (3, 100, 700)),
    ] {
        let mut scores = Scores::new(3);
        // All different; few different ones; all equal but for the sign of zero.
        let of = |n: usize, list: usize| match list {
            0 => number(n as u64) + 1.0,
            1 => ((number(n as u64) + 1.0) * 3.0).floor(),
            _ => [0.0, -0.0][n % 2],
        };
        let all: Vec<Vec<f32>> =
            (0..3).map(|list| (0..tokens).map(|n| of(n, list)).collect()).collect();
        all.iter().enumerate().for_each(|(list, of)| scores.set(list, of));
        for (list, got) in keep(&scores, tokens, rule).iter().enumerate() {
            assert_eq!(got, &kept(&all[list], rule), "{tokens} {rule:?} list {list}");
        }
    }
}

/// Rows of a cache, a byte pattern each, and where they are.
struct Rows {
    memory: Bytes,
    table: Vec<u64>,
    row: usize,
    heads: usize,
    tokens: usize,
    page_tokens: usize,
}

impl Rows {
    fn new(row: usize, heads: usize, tokens: usize, page_tokens: usize) -> Rows {
        let mut memory = Bytes::new((tokens + page_tokens) * heads * row + 16);
        for (at, byte) in memory.bytes().iter_mut().enumerate() {
            *byte = (number(at as u64) * 127.0) as i8 as u8;
        }
        let pages = if page_tokens == 0 { 0 } else { tokens.div_ceil(page_tokens) };
        // The other way round.
        let page = (page_tokens * heads * row) as u64;
        let table = (0..pages as u64).rev().map(|at| memory.at() + at * page).collect();
        Rows { memory, table, row, heads, tokens, page_tokens }
    }
    fn get(&mut self, token: usize, head: usize) -> Vec<u8> {
        let base = match self.page_tokens {
            0 => token,
            n => (self.table.len() - 1 - token / n) * n + token % n,
        };
        let at = (base * self.heads + head) * self.row;
        self.memory.bytes()[at..at + self.row].to_vec()
    }
    fn all(&mut self) -> Vec<Vec<Vec<u8>>> {
        let (tokens, heads) = (self.tokens, self.heads);
        (0..heads).map(|head| (0..tokens).map(|token| self.get(token, head)).collect()).collect()
    }
}

fn compact(keys: &mut Rows, values: &mut Rows, scores: &mut Scores, lists: &[Vec<u32>]) {
    let table: Vec<u32> =
        lists.iter().flat_map(|list| (0..ROOM).map(|at| *list.get(at).unwrap_or(&0))).collect();
    let counts: Vec<u32> = lists.iter().map(|list| list.len() as u32).collect();
    let (before, old) = ([keys.all(), values.all()], scores.get(0, 100));
    let is_paged = keys.page_tokens > 0;
    let at = |rows: &Rows| if is_paged { 0 } else { rows.memory.at() };
    let shift = values.memory.at().wrapping_sub(keys.memory.at());
    call(Call {
        dtype: Dtype::Bytes as u32,
        keys: at(keys),
        values: if is_paged { shift } else { at(values) },
        key_dim: keys.row as u32,
        value_dim: values.row as u32,
        key_stride: (keys.heads * keys.row) as i64,
        value_stride: (values.heads * values.row) as i64,
        key_head_stride: keys.row as i64,
        value_head_stride: values.row as i64,
        key_heads: keys.heads as u32,
        count: lists.len() as u32,
        index: table.as_ptr() as u64,
        counts: counts.as_ptr() as u64,
        out_stride: ROOM as i64 * 4,
        table: if is_paged { keys.table.as_ptr() as u64 } else { 0 },
        page_tokens: keys.page_tokens as u32,
        ..scores.call(Kind::Compact, keys.tokens)
    });
    for (rows, before) in [keys, values].into_iter().zip(before) {
        for head in 0..rows.heads {
            let list = &lists[if lists.len() == 1 { 0 } else { head }];
            for (to, &from) in list.iter().enumerate() {
                assert_eq!(rows.get(to, head), before[head][from as usize], "{head} {to}");
            }
            for (to, old) in before[head].iter().enumerate().skip(list.len()) {
                assert_eq!(&rows.get(to, head), old, "what lies behind stays");
            }
        }
    }
    let moved: Vec<f32> = lists[0].iter().filter_map(|at| old.get(*at as usize).copied()).collect();
    assert_eq!(scores.get(0, moved.len()), moved);
}

#[test]
fn kept_rows_are_compacted() {
    for (row, of_values, heads, tokens, page, is_shared) in [
        (32, 32, 3, 400, 0, false),
        (256, 128, 2, 900, 16, false),
        (6, 3, 2, 70, 0, true),
        (1152, 1024, 1, 150, 0, true),
        (20, 20, 4, 300, 8, true),
    ] {
        let mut keys = Rows::new(row, heads, tokens, page);
        let mut values = Rows::new(of_values, heads, tokens, page);
        if page > 0 && row != of_values {
            values = Rows::new(row, heads, tokens, page);
        }
        for (turn, share) in [3, 2, 10].into_iter().enumerate() {
            let count = if is_shared { 1 } else { heads };
            let mut scores = Scores::new(heads);
            scores.set(0, &(0..100).map(|n| n as f32).collect::<Vec<_>>());
            let lists: Vec<Vec<u32>> = (0..count)
                .map(|list| {
                    let seed = (turn * 10 + list) as u64 * 1000;
                    let stays = |n: &u32| number(seed + u64::from(*n)) < 1.0 - 2.0 / share as f32;
                    (0..tokens as u32).filter(stays).collect()
                })
                .collect();
            compact(&mut keys, &mut values, &mut scores, &lists);
        }
        // Nothing, all, and only the last.
        let none = vec![Vec::new(); if is_shared { 1 } else { heads }];
        let all = vec![(0..tokens as u32).collect(); none.len()];
        let last = vec![vec![tokens as u32 - 1]; none.len()];
        for lists in [none, all, last] {
            compact(&mut keys, &mut values, &mut Scores::new(heads), &lists);
        }
    }
}

/// Steps of a sequence with the policy and with kernels side by side.
fn follow(heads: usize, key_heads: usize, is_all: bool) {
    let who = if is_all { "all" } else { "each" };
    let (sink, recent, budget) = (3, 10, 25);
    let spec = format!("h2o(sink={sink},recent={recent},budget={budget},heads={who})");
    let shape = kvtier::sparse::Shape {
        layers: 1,
        query_heads: heads as u32,
        key_heads: key_heads as u32,
        key_dim: 8,
        value_dim: 8,
        scale: 0.0,
        kind: Default::default(),
        block_tokens: 1,
        max_tokens: 500,
    };
    let mut policy = registry::make(&Spec::parse(&spec).expect("sound"), &shape).expect("sound");
    let lists = if is_all { 1 } else { key_heads };
    let mut scores = Scores::new(lists);
    // Positions in each list of the kernels.
    let mut there: Vec<Vec<u32>> = vec![Vec::new(); lists];
    let mut out = RetainedTokens::default();
    let mut position = 0;
    for step in 0..30 {
        let new = if step == 0 { 60 } else { 1 + step % 3 };
        for (list, there) in there.iter_mut().enumerate() {
            let mut all = scores.get(list, there.len());
            all.extend(vec![0.0; new as usize]);
            scores.set(list, &all);
            there.extend(position..position + new);
        }
        position += new;
        let tokens = there[0].len();
        // Few different numbers: scores are equal often.
        let sums: Vec<f32> = (0..heads * tokens)
            .map(|n| ((number((step as u64) << 20 | n as u64) + 1.0) * 4.0).floor() / 3.0)
            .collect();
        policy.observe(0, 1, &sums, tokens as u32).expect("sound");
        call(Call {
            query_heads: heads as u32,
            query_head_stride: tokens as i64 * 4,
            more: sums.as_ptr() as u64,
            ..scores.call(Kind::Add, tokens)
        });
        let context = Context { tokens: position, ..Context::default() };
        let evicts = policy.evict(0, &context, &mut out).expect("sound");
        let stays = keep(&scores, tokens, (sink, recent, budget));
        let mut named = Vec::new();
        for (list, stays) in stays.iter().enumerate() {
            let positions: Vec<u32> = stays.iter().map(|&at| there[list][at as usize]).collect();
            if evicts {
                assert_eq!(out.of(list as u32), positions, "step {step} list {list}");
            } else {
                assert_eq!(positions, there[list], "step {step} list {list}");
            }
            named.push(positions);
        }
        if !evicts {
            continue;
        }
        let mut keys = Rows::new(16, lists, tokens, 0);
        let mut values = Rows::new(16, lists, tokens, 0);
        compact(&mut keys, &mut values, &mut scores, &stays);
        there = named;
        policy.evicted(0, &out).expect("what it said");
    }
}

#[test]
fn kernel_evicts_the_same_tokens_as_the_policy() {
    follow(8, 2, false);
    follow(3, 3, false);
    follow(6, 2, true);
}

#[test]
fn invalid_heavy_hitter_calls_are_rejected() {
    let scores = Scores::new(2);
    let memory = Bytes::new(1 << 12);
    let at = memory.at();
    // SAFETY: refused before anything is read.
    let try_it = |call: &Call| unsafe { run(call) }.map_err(|e| e.status());
    let add = Call { query_heads: 4, more: at, ..scores.call(Kind::Add, 10) };
    let keep = Call {
        index: at,
        counts: at,
        out_stride: 64,
        keep: 4,
        recent: 4,
        ..scores.call(Kind::Keep, 10)
    };
    let compact = Call {
        keys: at,
        key_dim: 16,
        index: at,
        counts: at,
        count: 2,
        dtype: 2,
        ..scores.call(Kind::Compact, 10)
    };
    for (bad, status) in [
        (Call { query_heads: 3, ..add }, Status::Invalid),
        (Call { more: 0, ..add }, Status::Invalid),
        (Call { numbers: at + 1, ..add }, Status::Invalid),
        (Call { out_head_stride: 20, ..add }, Status::Invalid),
        (Call { tokens: u32::MAX, ..add }, Status::Limit),
        (Call { out_stride: 16, ..keep }, Status::Invalid),
        (Call { counts: 0, ..keep }, Status::Invalid),
        (Call { flags: 1, ..keep }, Status::Invalid),
        (Call { count: 3, ..compact }, Status::Invalid),
        (Call { dtype: 9, ..compact }, Status::Unsupported),
        (Call { dtype: 7, key_dim: 3, ..compact }, Status::Invalid),
        (Call { keys: 0, ..compact }, Status::Invalid),
        (Call { values: at, value_dim: 8, ..compact }, Status::Invalid),
        (Call { table: at, ..compact }, Status::Invalid),
        (Call { key_dim: 0, ..compact }, Status::Invalid),
    ] {
        assert_eq!(try_it(&bad), Err(status), "{bad:?}");
    }
}
