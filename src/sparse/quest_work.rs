//! Pages are scored and chosen: the part of `quest` and `arkvale` that runs for each query.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::numbers::{check, fill, grow, room, zeros};
use crate::sparse::pages::{Pages, product, split};
use crate::sparse::quest::{Rule, Share};
use crate::sparse::ranks::Ranks;

/// By what pages are scored.
#[derive(Clone, Copy)]
pub struct How<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// The model.
    pub shape: &'a Shape,
    /// Boxes of the layer.
    pub boxes: &'a Pages,
}

/// What is used while pages are chosen.
#[derive(Clone, Debug, Default)]
pub struct Work {
    ranks: Ranks,
    /// Pages to choose from.
    pub pages: Vec<u32>,
    /// In which of `found` each is.
    pub owners: Vec<u32>,
    /// Candidates with their places, in the order of those.
    pub found: Vec<(u32, u32)>,
    /// Queries as they came, as f32.
    asked: Vec<f32>,
    /// Queries as boxes are multiplied with them, one row a list (or head of keys).
    queries: Vec<f32>,
    /// For each list a score a page.
    scores: Vec<f32>,
    /// Scores of pages one after the other, all queries; and what the kernel needs.
    run: Vec<f32>,
    memory: Vec<f32>,
    /// Which pages were chosen, by their place in `pages`.
    pub chosen: Vec<u32>,
    /// Marks of pages, or of candidates.
    pub marks: Vec<bool>,
}

/// The higher of two scores; what is not a number stays, to be found.
fn higher(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

impl Work {
    /// What this takes.
    pub fn bytes(&self) -> u64 {
        let Work { asked, queries, scores, run, memory, .. } = self;
        [asked, queries, scores, run, memory].iter().map(|table| 4 * table.capacity() as u64).sum()
    }

    /// How many lists of pages there are.
    pub fn lists(rule: &Rule, shape: &Shape) -> usize {
        if rule.share == Share::None { shape.query_heads as usize } else { 1 }
    }

    /// Scores the pages in `pages`: of several queries the greatest counts.
    pub fn score(&mut self, how: How<'_>, queries: &Rows<'_>) -> Result<()> {
        self.ask(queries)?;
        let count = self.pages.len();
        let lists = Work::lists(how.rule, how.shape);
        self.scores.clear();
        grow(&mut self.scores, lists * count, f32::NEG_INFINITY)?;
        if how.rule.share == Share::None && how.boxes.has_kernel() {
            self.score_runs(how, queries)?;
        } else {
            for at in 0..queries.tokens() as usize {
                self.prepare(how, at)?;
                self.score_one(how, count);
            }
        }
        check("products of queries and keys", &self.scores)?;
        self.force(lists, count);
        Ok(())
    }

    /// Scores pages that follow each other together.
    fn score_runs(&mut self, how: How<'_>, queries: &Rows<'_>) -> Result<()> {
        let Work { pages, scores, run, memory, .. } = self;
        let (columns, lists) = (pages.len(), how.shape.query_heads as usize);
        let mut at = 0;
        for near in pages.chunk_by(|a, b| a + 1 == *b) {
            let count = near.len();
            let all = (near.first().copied().unwrap_or(0), count as u32);
            if queries.tokens() == 1 && count == columns {
                return how.boxes.score(queries, all, scores, memory);
            }
            grow(run, queries.tokens() as usize * lists * count, 0.0)?;
            run.truncate(queries.tokens() as usize * lists * count);
            how.boxes.score(queries, all, run, memory)?;
            for (row, found) in run.chunks_exact(count).enumerate() {
                let to = scores.iter_mut().skip(row % lists * columns + at);
                to.zip(found).for_each(|(to, &x)| *to = higher(*to, x));
            }
            at += count;
        }
        Ok(())
    }

    /// Takes queries in; an error if they are not finite.
    fn ask(&mut self, queries: &Rows<'_>) -> Result<()> {
        let (heads, dim) = (queries.heads(), queries.dim() as usize);
        zeros(&mut self.asked, queries.tokens() as usize * heads as usize * dim)?;
        for (at, row) in (0..).zip(self.asked.chunks_exact_mut(dim.max(1))) {
            fill(queries, at / heads, at % heads, row);
        }
        check("queries", &self.asked)
    }

    /// Puts one of the queries, all heads, into the form that boxes are multiplied with.
    fn prepare(&mut self, how: How<'_>, at: usize) -> Result<()> {
        let dim = how.shape.key_dim as usize;
        let group = how.shape.group() as usize;
        let rows = how.shape.query_heads as usize;
        let query = self.asked.get(at * rows * dim..(at + 1) * rows * dim).unwrap_or_default();
        let out = &mut self.queries;
        out.clear();
        match how.rule.share {
            Share::None => {
                grow(out, rows * 2 * dim, 0.0)?;
                for (query, to) in query.chunks_exact(dim).zip(out.chunks_exact_mut(2 * dim)) {
                    split(query, to);
                }
            }
            // Products are linear in what boxes are multiplied with: add up first.
            Share::Bound => {
                grow(out, rows / group * 2 * dim, 0.0)?;
                let groups = query.chunks_exact(dim * group);
                for (queries, to) in groups.zip(out.chunks_exact_mut(2 * dim)) {
                    queries.chunks_exact(dim).for_each(|query| split(query, to));
                    to.iter_mut().for_each(|number| *number /= rows as f32);
                }
            }
            Share::Fork => {
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

    fn score_one(&mut self, how: How<'_>, count: usize) {
        let Work { pages, queries, scores, .. } = self;
        let (dim, group) = (how.shape.key_dim as usize, how.shape.group() as usize);
        let heads = how.shape.key_heads as f32;
        for (column, &page) in pages.iter().enumerate() {
            let corners = how.boxes.corners(page).chunks_exact(2 * dim);
            let mut lift = |list: usize, score: f32| {
                if let Some(to) = scores.get_mut(list * count + column) {
                    *to = higher(*to, score);
                }
            };
            match how.rule.share {
                Share::None => {
                    for (head, corners) in corners.enumerate() {
                        let rows = queries.chunks_exact(2 * dim).skip(head * group).take(group);
                        for (list, query) in (head * group..).zip(rows) {
                            lift(list, product(query, corners));
                        }
                    }
                }
                Share::Bound => {
                    let rows = queries.chunks_exact(2 * dim);
                    lift(
                        0,
                        rows.zip(corners).map(|(query, corners)| product(query, corners)).sum(),
                    );
                }
                Share::Fork => {
                    let rows = queries.chunks_exact(dim).zip(corners);
                    let of = |(query, corners): (&[f32], &[f32])| {
                        let (low, high) = corners.split_at(dim);
                        let (low, high) = (product(query, low), product(query, high));
                        if high >= low { high } else { low }
                    };
                    lift(0, rows.map(of).sum::<f32>() / heads);
                }
            }
        }
    }

    /// Pages that always are chosen get more than any score.
    fn force(&mut self, lists: usize, count: usize) {
        let Work { pages, scores, marks, .. } = self;
        for (column, _) in marks.iter().zip(pages).enumerate().filter(|(_, (mark, _))| **mark) {
            for list in 0..lists {
                if let Some(score) = scores.get_mut(list * count + column) {
                    *score = f32::INFINITY;
                }
            }
        }
    }

    /// Marks in `marks` which of `pages` always are chosen, of so many pages in all;
    /// gives how many are to be chosen, those included.
    pub fn mark(&mut self, rule: &Rule, total: u32) -> Result<usize> {
        let Rule { sinks, window, count, .. } = *rule;
        let is_forced = |page: u32| page < sinks || page >= total.saturating_sub(window);
        let Work { pages, marks, .. } = self;
        marks.clear();
        room(marks, pages.len())?;
        marks.extend(pages.iter().map(|&page| is_forced(page)));
        let present = marks.iter().filter(|mark| **mark).count();
        let forced = (u64::from(sinks) + u64::from(window)).min(total.into()) as usize;
        Ok((count as usize).saturating_sub(forced) + present)
    }

    /// Puts the pages of a list into `chosen`: their places in `pages`.
    pub fn list(&mut self, list: usize, count: usize) -> Result<()> {
        let Work { pages, scores, ranks, chosen, .. } = self;
        let from = list * pages.len();
        chosen.clear();
        ranks.top(scores.get(from..from + pages.len()).unwrap_or_default(), count, chosen)
    }
}
