//! `quest`: selects the pages whose keys could matter most to the query (Tang et al., ICML'24).
//!
//! The policy keeps the least and the greatest value of each dimension, for each page and head of
//! keys. The product of any key of the page with a query is at most `sum over d of max(q_d *
//! least_d, q_d * greatest_d)`. Pages are selected by that bound. No attention is needed, so a page
//! that was left out can be selected later.
//!
//! If there are no more pages than may be selected, all are. A block is loaded if one of its pages
//! is selected, so the keys of `index` are a subset of the loaded ones.
//!
//! Keys that are written again for a position widen the box of their page; sealing makes it exact.
//! The same holds after a truncation: until it is sealed, a box may be too wide, never too small.

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::sparse::eviction::{conflict, count};
use crate::sparse::index::NO_QUERY;
use crate::sparse::index_builder::IndexBuilder;
use crate::sparse::numbers::{check, check_rows, fill, grow, reserve, zeros};
use crate::sparse::pages::{BlockMap, Bound, Pages, decode, encode, product, split};
use crate::sparse::ranks::{Ranks, ascending};
use crate::sparse::{
    Context, Granularity, Index, Scope, Shape, Sparse, Stats, Traits, caps, needs,
};

/// Parameters of `quest`.
pub const PARAMS: &[Param] = &[
    Param::new("budget", "tokens that a head sees: `max(3, budget / page)` pages"),
    Param::new("page", "tokens of a page; blocks are whole pages"),
    Param::new("dense", "number of first layers that see all pages")
        .default_is("2; 0 with `compat=fork`"),
    Param::new(
        "last",
        "`always`: the newest page is always selected, as in the authors' kernels. `free`: it \
         competes with the others, as in their reference",
    ),
    Param::new(
        "share",
        "`none`: each query head has its own pages, and blocks that any head needs are loaded. \
         `bound`: all heads share the pages with the greatest mean bound",
    ),
    Param::new(
        "compat",
        "`fork`: as in an existing offloading engine. A page is a block; queries are averaged over \
         their group, the greater of the two corner products counts, and the mean over heads of \
         keys. That is no upper bound and misses pages that matter",
    ),
    Param::new("topk", "with `compat=fork` only: blocks that are selected"),
    Param::new("threshold", "with `compat=fork` only: up to this many blocks, all are selected"),
];

/// Heads that share a list of pages, and how pages are scored for the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSharing {
    /// Each query head has its own list.
    None,
    /// All heads, by the mean of the bound.
    Bound,
    /// All heads, by the mean of the greater product with the mean query of a group.
    Fork,
}

/// How pages are selected.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Tokens of a page.
    pub page: u32,
    /// Number of selected pages.
    pub count: u32,
    /// Up to this many pages, all are selected.
    pub threshold: u32,
    /// First pages that are always selected.
    pub sinks: u32,
    /// Last pages that are always selected.
    pub window: u32,
    /// This many first layers see all.
    pub dense: u32,
    /// Kind of box.
    pub bound: Bound,
    /// Sharing of lists.
    pub share: PageSharing,
}

#[derive(Clone, Debug)]
struct Layer {
    pages: Pages,
    blocks: BlockMap,
}

/// Selects pages by the boxes around their keys.
#[derive(Clone, Debug)]
pub struct Quest {
    rule: Rule,
    shape: Shape,
    layers: Vec<Layer>,
    work: PageSelector,
    stats: Stats,
}

impl Quest {
    /// Reads the parameters of `quest`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Quest> {
        let is_fork = reader.choice("compat", &["none", "fork"])? == Some(1);
        let tokens = count(reader, "budget", 2048, 1)?;
        let page = reader.u64("page", 16, 1..=1 << 20)? as u32;
        let is_kept = reader.choice("last", &["free", "always"])? == Some(1);
        let share = match reader.choice("share", &["none", "bound"])? {
            Some(1) => PageSharing::Bound,
            _ => PageSharing::None,
        };
        let rule = Rule {
            page,
            count: (tokens / page).max(3),
            threshold: 0,
            sinks: 0,
            window: u32::from(is_kept),
            dense: reader.u64("dense", if is_fork { 0 } else { 2 }, 0..=2048)? as u32,
            bound: Bound::Range,
            share,
        };
        if !is_fork {
            return Quest::new(rule, shape);
        }
        let (topk, threshold) = (count(reader, "topk", 8, 1)?, count(reader, "threshold", 4, 0)?);
        let page = shape.block_tokens;
        Quest::new(Rule { page, count: topk, threshold, share: PageSharing::Fork, ..rule }, shape)
    }

    /// A policy with a rule, for a model.
    pub fn new(rule: Rule, shape: &Shape) -> Result<Quest> {
        shape.check()?;
        if rule.page == 0 || shape.block_tokens % rule.page != 0 {
            let (page, block) = (rule.page, shape.block_tokens);
            return Err(conflict(format!(
                "blocks of {block} tokens are not whole pages of {page}: page must divide the block"
            )));
        }
        let pages = Pages::new(rule.page, shape.key_heads, shape.key_dim, rule.bound);
        let layer = Layer { pages, blocks: BlockMap::default() };
        let mut layers = Vec::new();
        grow(&mut layers, shape.layers as usize, layer)?;
        let (work, stats) = (PageSelector::default(), Stats::default());
        Ok(Quest { rule, shape: *shape, layers, work, stats })
    }

    fn is_dense(&self, layer: u32) -> bool {
        layer < self.rule.dense
    }

    /// Checks the position and length of a block; returns its block index.
    fn place(&self, first: u32, tokens: u32) -> Result<u32> {
        let each = self.shape.block_tokens;
        let end = u64::from(first) + u64::from(tokens);
        if first % each != 0 || tokens == 0 || tokens > each {
            fail!(
                Invalid,
                "a block of {tokens} tokens at {first}: blocks start at multiples of {each} and have 1 to {each} tokens"
            );
        }
        self.shape.check_tokens(end)?;
        Ok(first / each)
    }

    fn score(&mut self, layer: u32, queries: &Rows<'_>) -> Result<()> {
        let Quest { rule, shape, layers, work, .. } = self;
        let Some(state) = layers.get(layer as usize) else { return Ok(()) };
        work.score(PageScoring { rule, shape, boxes: &state.pages }, queries)
    }

    fn is_all(&self, pages: usize) -> bool {
        pages <= self.rule.count.max(self.rule.threshold) as usize
    }

    /// Selects the candidates to load.
    fn choose(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let Some(query) = query.filter(|_| !context.is_prefill && !self.is_dense(layer)) else {
            return ascending(candidates, out);
        };
        self.shape.check_queries(layer, query)?;
        self.shape.check_tokens(context.tokens.into())?;
        self.gather(layer, candidates)?;
        if self.is_all(self.work.pages.len()) || query.tokens() == 0 {
            return ascending(candidates, out);
        }
        let count = self.work.mark(&self.rule, context.tokens.div_ceil(self.rule.page))?;
        self.score(layer, query)?;
        let mut marks = std::mem::take(&mut self.work.marks);
        marks.clear();
        grow(&mut marks, self.work.found.len(), false)?;
        for list in 0..PageSelector::lists(&self.rule, &self.shape) {
            self.work.list(list, count)?;
            for &column in &self.work.chosen {
                let owner = self.work.owners.get(column as usize);
                if let Some(mark) = owner.and_then(|&owner| marks.get_mut(owner as usize)) {
                    *mark = true;
                }
            }
        }
        out.clear();
        reserve(out, self.work.found.len())?;
        let chosen = self.work.found.iter().zip(&marks).filter(|(_, mark)| **mark);
        out.extend(chosen.map(|(&(id, _), _)| id));
        out.sort_unstable();
        self.work.marks = marks;
        Ok(())
    }

    /// Puts the known pages of the candidates into `work.pages`.
    fn gather(&mut self, layer: u32, candidates: &[u32]) -> Result<()> {
        let Some(state) = self.layers.get(layer as usize) else { return Ok(()) };
        let PageSelector { pages, owners, found, .. } = &mut self.work;
        state.blocks.find(layer, candidates, found)?;
        let each = self.shape.block_tokens / self.rule.page;
        pages.clear();
        owners.clear();
        reserve(pages, found.len() * each as usize)?;
        reserve(owners, found.len() * each as usize)?;
        for (owner, &(_, place)) in (0..).zip(found.iter()) {
            for page in place * each..(place + 1) * each {
                if state.pages.filled(page) > 0 {
                    pages.push(page);
                    owners.push(owner);
                }
            }
        }
        Ok(())
    }
}

/// Traits of a policy that selects pages.
fn traits(rule: &Rule) -> Traits {
    Traits {
        caps: caps::LOAD_DECODE | caps::INDEX_DECODE,
        needs: needs::KEYS | needs::QUERIES,
        scope: if rule.share == PageSharing::None { Scope::QueryHead } else { Scope::Layer },
        granularity: Granularity::Block,
        requires_block_selection: true,
        dense_layers: rule.dense,
        ..Traits::NONE
    }
}

impl Sparse for Quest {
    fn traits(&self) -> Traits {
        traits(&self.rule)
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn state_bytes(&self) -> u64 {
        let state = |layer: &Layer| layer.pages.bytes() + layer.blocks.bytes();
        self.work.bytes() + self.layers.iter().map(state).sum::<u64>()
    }

    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.shape.check_keys(layer, keys)?;
        let end = u64::from(first) + u64::from(keys.tokens());
        self.shape.check_tokens(end)?;
        if self.is_dense(layer) {
            return Ok(());
        }
        check_rows("keys", keys)?;
        match self.layers.get_mut(layer as usize) {
            Some(layer) => layer.pages.put(first, keys, false),
            None => Ok(()),
        }
    }

    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.shape.check_keys(layer, keys)?;
        let place = self.place(first, keys.tokens())?;
        if self.is_dense(layer) {
            return Ok(());
        }
        check_rows("keys", keys)?;
        if let Some(layer) = self.layers.get_mut(layer as usize) {
            layer.blocks.reserve(place)?;
            layer.pages.put(first, keys, true)?;
            layer.blocks.set(id, place);
        }
        Ok(())
    }

    fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        self.choose(layer, query, candidates, context, out)?;
        self.stats.count(candidates.len(), out.len());
        Ok(())
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        _keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        let Some(state) = self.layers.get(layer as usize) else {
            return self.shape.check_queries(layer, queries);
        };
        self.shape.check_queries(layer, queries)?;
        self.shape.check_tokens(context.tokens.into())?;
        let page = self.rule.page;
        let total = context.tokens.div_ceil(page);
        let is_all = self.is_all(total as usize);
        if context.is_prefill || self.is_dense(layer) || is_all || queries.tokens() == 0 {
            out.set_dense();
            return Ok(());
        }
        // Pages without known keys are always selected.
        let (mut unknown, known) = (Vec::new(), &mut self.work.pages);
        known.clear();
        reserve(known, total as usize)?;
        reserve(&mut unknown, (0..total).filter(|&at| state.pages.filled(at) == 0).count())?;
        for at in 0..total {
            if state.pages.filled(at) > 0 { known.push(at) } else { unknown.push(at) }
        }
        let count = self.work.mark(&self.rule, total)?;
        self.score(layer, queries)?;
        // Reuses the memory of the last answer.
        let mut builder = IndexBuilder::within(std::mem::take(out));
        for list in 0..PageSelector::lists(&self.rule, &self.shape) {
            builder.blocks(0, page, NO_QUERY)?;
            self.work.list(list, count)?;
            let PageSelector { pages, chosen, .. } = &mut self.work;
            chosen.iter_mut().for_each(|at| *at = pages.get(*at as usize).copied().unwrap_or(0));
            if !unknown.is_empty() {
                chosen.extend_from_slice(&unknown);
                chosen.sort_unstable();
            }
            builder.list(chosen.iter().copied())?;
        }
        *out = builder.into_index();
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        for layer in &mut self.layers {
            layer.pages.truncate(tokens);
            layer.blocks.truncate(tokens.div_ceil(self.shape.block_tokens));
        }
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(Quest { stats: Stats::default(), ..self.clone() }))
    }

    fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        let Some(state) = self.layers.get(layer as usize).filter(|_| !self.is_dense(layer)) else {
            return Ok(());
        };
        let Some(place) = state.blocks.place(id) else {
            fail!(NotFound, "block {id} of layer {layer} is unknown: seal or load it first");
        };
        let each = self.shape.block_tokens / self.rule.page;
        let filled = (place * each..(place + 1) * each).map(|page| state.pages.filled(page));
        let mut tokens = 0;
        for known in filled {
            tokens += known;
            if known < self.rule.page {
                break;
            }
        }
        encode(&state.pages, place * each, tokens, out)
    }

    fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        let place = self.place(first, 1)?;
        self.shape.check_layer(layer)?;
        let Some(state) = self.layers.get_mut(layer as usize) else { return Ok(()) };
        if layer < self.rule.dense {
            return if bytes.is_empty() { Ok(()) } else { Err(Status::Corrupt.into()) };
        }
        let most = (self.shape.max_tokens - first).min(self.shape.block_tokens);
        let (tokens, corners) = decode(&state.pages, most, bytes)?;
        state.blocks.reserve(place)?;
        state.pages.restore(first / self.rule.page, tokens, &corners)?;
        state.blocks.set(id, place);
        Ok(())
    }
}

/// Inputs of the scores of pages.
#[derive(Clone, Copy)]
pub struct PageScoring<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// The model's shape.
    pub shape: &'a Shape,
    /// Boxes of the layer.
    pub boxes: &'a Pages,
}

/// Working memory of a selection.
#[derive(Clone, Debug, Default)]
pub struct PageSelector {
    ranks: Ranks,
    /// Pages to select from.
    pub pages: Vec<u32>,
    /// Index into `found` of the block of each page.
    pub owners: Vec<u32>,
    /// Candidates with their block index, sorted by that index.
    pub found: Vec<(u32, u32)>,
    /// The queries as f32.
    query_numbers: Vec<f32>,
    /// Queries in the form that boxes are multiplied with: one row a list (or head of keys).
    queries: Vec<f32>,
    /// For each list one score a page.
    scores: Vec<f32>,
    /// Scores of consecutive pages, all queries; then working memory of the kernel.
    run: Vec<f32>,
    memory: Vec<f32>,
    /// Selected pages, as indices into `pages`.
    pub chosen: Vec<u32>,
    /// Marks of pages, or of candidates.
    pub marks: Vec<bool>,
}

/// The higher of two scores. NaN is kept, so that it is found.
fn higher(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

impl PageSelector {
    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let PageSelector { query_numbers, queries, scores, run, memory, .. } = self;
        [query_numbers, queries, scores, run, memory]
            .iter()
            .map(|table| 4 * table.capacity() as u64)
            .sum()
    }

    /// Number of lists of pages.
    pub fn lists(rule: &Rule, shape: &Shape) -> usize {
        if rule.share == PageSharing::None { shape.query_heads as usize } else { 1 }
    }

    /// Scores `pages`. Of several queries the greatest score counts.
    pub fn score(&mut self, scoring: PageScoring<'_>, queries: &Rows<'_>) -> Result<()> {
        self.read_queries(queries)?;
        let count = self.pages.len();
        let lists = PageSelector::lists(scoring.rule, scoring.shape);
        self.scores.clear();
        grow(&mut self.scores, lists * count, f32::NEG_INFINITY)?;
        if scoring.rule.share == PageSharing::None && scoring.boxes.has_kernel() {
            self.score_runs(scoring, queries)?;
        } else {
            for at in 0..queries.tokens() as usize {
                self.prepare(scoring, at)?;
                self.score_one(scoring, count);
            }
        }
        check("products of queries and keys", &self.scores)?;
        self.force(lists, count);
        Ok(())
    }

    /// Scores runs of consecutive pages together.
    fn score_runs(&mut self, scoring: PageScoring<'_>, queries: &Rows<'_>) -> Result<()> {
        let PageSelector { pages, scores, run, memory, .. } = self;
        let (columns, lists) = (pages.len(), scoring.shape.query_heads as usize);
        let mut at = 0;
        for run_of_pages in pages.chunk_by(|a, b| a + 1 == *b) {
            let count = run_of_pages.len();
            let all = (run_of_pages.first().copied().unwrap_or(0), count as u32);
            if queries.tokens() == 1 && count == columns {
                return scoring.boxes.score(queries, all, scores, memory);
            }
            grow(run, queries.tokens() as usize * lists * count, 0.0)?;
            run.truncate(queries.tokens() as usize * lists * count);
            scoring.boxes.score(queries, all, run, memory)?;
            for (row, found) in run.chunks_exact(count).enumerate() {
                let to = scores.iter_mut().skip(row % lists * columns + at);
                to.zip(found).for_each(|(to, &x)| *to = higher(*to, x));
            }
            at += count;
        }
        Ok(())
    }

    /// Converts queries. Fails if a number is not finite.
    fn read_queries(&mut self, queries: &Rows<'_>) -> Result<()> {
        let (heads, dim) = (queries.heads(), queries.dim() as usize);
        zeros(&mut self.query_numbers, queries.tokens() as usize * heads as usize * dim)?;
        for (at, row) in (0..).zip(self.query_numbers.chunks_exact_mut(dim.max(1))) {
            fill(queries, at / heads, at % heads, row);
        }
        check("queries", &self.query_numbers)
    }

    /// Brings one query, all heads, into the form that boxes are multiplied with.
    fn prepare(&mut self, scoring: PageScoring<'_>, at: usize) -> Result<()> {
        let dim = scoring.shape.key_dim as usize;
        let group = scoring.shape.group() as usize;
        let rows = scoring.shape.query_heads as usize;
        let query =
            self.query_numbers.get(at * rows * dim..(at + 1) * rows * dim).unwrap_or_default();
        let out = &mut self.queries;
        out.clear();
        match scoring.rule.share {
            PageSharing::None => {
                grow(out, rows * 2 * dim, 0.0)?;
                for (query, to) in query.chunks_exact(dim).zip(out.chunks_exact_mut(2 * dim)) {
                    split(query, to);
                }
            }
            // Products are linear in this form, so heads are added first.
            PageSharing::Bound => {
                grow(out, rows / group * 2 * dim, 0.0)?;
                let groups = query.chunks_exact(dim * group);
                for (queries, to) in groups.zip(out.chunks_exact_mut(2 * dim)) {
                    queries.chunks_exact(dim).for_each(|query| split(query, to));
                    to.iter_mut().for_each(|number| *number /= rows as f32);
                }
            }
            PageSharing::Fork => {
                grow(out, rows / group * dim, 0.0)?;
                let groups = query.chunks_exact(dim * group);
                for (queries, to) in groups.zip(out.chunks_exact_mut(dim)) {
                    for query in queries.chunks_exact(dim) {
                        to.iter_mut().zip(query).for_each(|(to, number)| *to += number);
                    }
                    to.iter_mut().for_each(|number| *number /= group as f32);
                }
            }
        }
        Ok(())
    }

    fn score_one(&mut self, scoring: PageScoring<'_>, count: usize) {
        let PageSelector { pages, queries, scores, .. } = self;
        let (dim, group) = (scoring.shape.key_dim as usize, scoring.shape.group() as usize);
        let heads = scoring.shape.key_heads as f32;
        for (column, &page) in pages.iter().enumerate() {
            let corners = scoring.boxes.corners(page).chunks_exact(2 * dim);
            let mut raise_to = |list: usize, score: f32| {
                if let Some(to) = scores.get_mut(list * count + column) {
                    *to = higher(*to, score);
                }
            };
            match scoring.rule.share {
                PageSharing::None => {
                    for (head, corners) in corners.enumerate() {
                        let rows = queries.chunks_exact(2 * dim).skip(head * group).take(group);
                        for (list, query) in (head * group..).zip(rows) {
                            raise_to(list, product(query, corners));
                        }
                    }
                }
                PageSharing::Bound => {
                    let rows = queries.chunks_exact(2 * dim);
                    raise_to(
                        0,
                        rows.zip(corners).map(|(query, corners)| product(query, corners)).sum(),
                    );
                }
                PageSharing::Fork => {
                    let rows = queries.chunks_exact(dim).zip(corners);
                    let of = |(query, corners): (&[f32], &[f32])| {
                        let (low, high) = corners.split_at(dim);
                        let (low, high) = (product(query, low), product(query, high));
                        if high >= low { high } else { low }
                    };
                    raise_to(0, rows.map(of).sum::<f32>() / heads);
                }
            }
        }
    }

    /// Gives pages that are always selected an infinite score.
    fn force(&mut self, lists: usize, count: usize) {
        let PageSelector { pages, scores, marks, .. } = self;
        for (column, _) in marks.iter().zip(pages).enumerate().filter(|(_, (mark, _))| **mark) {
            for list in 0..lists {
                if let Some(score) = scores.get_mut(list * count + column) {
                    *score = f32::INFINITY;
                }
            }
        }
    }

    /// Marks in `marks` the `pages` that are always selected, of `total` pages. Returns how many to
    /// select, those included.
    pub fn mark(&mut self, rule: &Rule, total: u32) -> Result<usize> {
        let Rule { sinks, window, count, .. } = *rule;
        let is_forced = |page: u32| page < sinks || page >= total.saturating_sub(window);
        let PageSelector { pages, marks, .. } = self;
        marks.clear();
        reserve(marks, pages.len())?;
        marks.extend(pages.iter().map(|&page| is_forced(page)));
        let present = marks.iter().filter(|mark| **mark).count();
        let forced = (u64::from(sinks) + u64::from(window)).min(total.into()) as usize;
        Ok((count as usize).saturating_sub(forced) + present)
    }

    /// Puts the selected pages of a list into `chosen`, as indices into `pages`.
    pub fn list(&mut self, list: usize, count: usize) -> Result<()> {
        let PageSelector { pages, scores, ranks, chosen, .. } = self;
        let from = list * pages.len();
        chosen.clear();
        ranks.top(scores.get(from..from + pages.len()).unwrap_or_default(), count, chosen)
    }
}
