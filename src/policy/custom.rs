//! `custom`: the caller's scores decide; the lowest score is evicted first.
//!
//! A scorer receives many candidates at once, as columns. A scorer may be foreign code that is slow
//! and calls back, so it never runs while the evictor is borrowed: [`Evictor::snapshot`] copies the
//! candidates, the scorer runs, and [`Evictor::evict_by_scores`] evicts those with the lowest
//! scores that have not changed since. Without a scorer (as an inner policy, or while another
//! policy takes over) the order is LRU.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::base::spec::{Spec, Value};
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;
use crate::policy::Rank;
use crate::policy::columns::Columns;
use crate::policy::evict::{Outcome, Victim};
use crate::policy::evictor::Evictor;
use crate::policy::pick::reserve;

/// Name in specs.
pub const NAME: &str = "custom";

/// Fails for a spec that names `custom` anywhere, for callers without a scorer. The policy would
/// silently decide by LRU there.
pub fn refuse(spec: &Spec, request: &str) -> Result<()> {
    if spec.name == NAME {
        let text = format!(
            "'{NAME}' at offset {} needs a score function, and {request} has none",
            spec.offset
        );
        return Err(Error::at(Status::Invalid, spec.offset, text));
    }
    spec.args.iter().try_for_each(|arg| match &arg.value {
        Value::Spec(inner) => refuse(inner, request),
        _ => Ok(()),
    })
}

/// The caller's order: scores of all rows in one call.
pub trait Scorer: Send {
    /// Fills `out` with one score a row; the lowest is evicted first. NaN is an error.
    fn score(&mut self, view: &Columns, now: i64, out: &mut [f64]) -> Result<()>;
}

/// Copy of the candidates, for a scorer.
#[derive(Default)]
pub struct Snapshot {
    slots: Vec<Slot>,
    ids: Vec<u64>,
    stamps: Vec<i64>,
    hits: Vec<u64>,
    units: Vec<u64>,
    priority: Vec<u8>,
    tenant: Vec<u32>,
    length: Vec<u64>,
    max_length: Vec<u64>,
    context: Vec<u64>,
    tokens: Vec<u64>,
    layer: Vec<u32>,
    layers: Vec<u32>,
    chunk: Vec<u32>,
    chunks: Vec<u32>,
    cost: Vec<f64>,
}

impl Snapshot {
    /// The scorer's view. Columns of facts are absent where none are kept.
    pub fn view(&self) -> Columns<'_> {
        Columns {
            ids: &self.ids,
            blocks: &self.units,
            last_access_ns: &self.stamps,
            count: &self.hits,
            priority: &self.priority,
            tenant: &self.tenant,
            length: &self.length,
            max_length: &self.max_length,
            context: &self.context,
            tokens: &self.tokens,
            layer: &self.layer,
            layers: &self.layers,
            chunk: &self.chunk,
            chunks: &self.chunks,
            cost: &self.cost,
            ..Columns::default()
        }
    }

    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are no candidates.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    fn reserve(&mut self, rows: usize, facts: bool) -> Result<()> {
        reserve(&mut self.slots, rows)?;
        for column in [&mut self.ids, &mut self.hits, &mut self.units] {
            reserve(column, rows)?;
        }
        for column in [&mut self.length, &mut self.max_length] {
            reserve(column, rows)?;
        }
        reserve(&mut self.stamps, rows)?;
        reserve(&mut self.priority, rows)?;
        reserve(&mut self.tenant, rows)?;
        if facts {
            for column in [&mut self.context, &mut self.tokens] {
                reserve(column, rows)?;
            }
            let small = [&mut self.layer, &mut self.layers, &mut self.chunk, &mut self.chunks];
            for column in small {
                reserve(column, rows)?;
            }
            reserve(&mut self.cost, rows)?;
        }
        Ok(())
    }

    fn push(&mut self, objects: &Objects, slot: Slot) {
        let node = objects.node(slot);
        let session = objects.sessions.of(node.session).copied().unwrap_or_default();
        let known = node.session != NONE;
        self.slots.push(slot);
        self.ids.push(node.id);
        self.stamps.push(node.stamp);
        self.hits.push(u64::from(node.hits));
        self.units.push(u64::from(node.units));
        self.priority.push(if known { session.priority } else { 1 });
        self.tenant.push(session.tenant);
        self.length.push(u64::from(session.length));
        self.max_length.push(u64::from(session.max_length));
        if objects.has_facts() {
            let facts = objects.facts(slot);
            self.context.push(u64::from(facts.context));
            self.tokens.push(u64::from(facts.tokens));
            self.layer.push(u32::from(facts.layer));
            self.layers.push(u32::from(facts.layers));
            self.chunk.push(facts.chunk);
            self.chunks.push(facts.chunks);
            self.cost.push(f64::from(facts.cost));
        }
    }
}

/// Request to [`Evictor::evict_by_scores`].
#[derive(Clone, Copy, Debug)]
pub struct ScoredEviction {
    /// Units to free.
    pub required: u64,
    /// Most victims.
    pub most: usize,
    /// Only report the victims; evict nothing.
    pub report_only: bool,
}

impl Evictor {
    /// Copies the objects that are neither referenced nor pinned. Parents of other objects are
    /// included, since they may become candidates during the eviction.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = Snapshot::default();
        snapshot.reserve(self.objects.len(), self.objects.has_facts())?;
        for slot in self.objects.slots() {
            let node = self.objects.node(slot);
            if node.ref_count() == 0 && !node.is_pinned() {
                snapshot.push(&self.objects, slot);
            }
        }
        Ok(snapshot)
    }

    /// Evicts by the scores of a snapshot, the lowest first. An object used, referenced or removed
    /// since the snapshot stays. Children are evicted before their parents.
    pub fn evict_by_scores(
        &mut self,
        now: i64,
        snapshot: &Snapshot,
        scores: &[f64],
        request: &ScoredEviction,
        out: &mut Vec<Victim>,
    ) -> Result<Outcome> {
        check_scores(snapshot, scores)?;
        let mut waiting = Vec::new();
        if waiting.try_reserve_exact(snapshot.len()).is_err() {
            fail!(NoMem, "no memory to order {} candidates", snapshot.len());
        }
        // The scorer, or another thread meanwhile, may have passed a later time.
        let now = self.tick(self.at_least_last(now), 1)?;
        let start = self.clock.now_ns();
        let turn = |row: usize| {
            let rank = Rank::score(scores[row], snapshot.stamps[row]);
            Reverse((rank, snapshot.ids[row], row))
        };
        let free = |this: &Evictor, row: &usize| {
            this.is_unchanged(snapshot, *row) && !this.objects.is_blocked(snapshot.slots[*row])
        };
        waiting.extend((0..snapshot.len()).filter(|row| free(self, row)).map(turn));
        let mut waiting = BinaryHeap::from(waiting);
        let mut above = NONE;
        let freed = self.choose(now, request.required, request.most, |this| {
            // The parent of the last victim may have become a candidate.
            if let Ok(row) = snapshot.slots.binary_search(&above) {
                waiting.extend(free(this, &row).then(|| turn(row)));
            }
            let Reverse((_, _, row)) = waiting.pop()?;
            above = this.objects.node(snapshot.slots[row]).parent;
            Some(snapshot.slots[row])
        })?;
        Ok(match request.report_only {
            true => self.report_chosen(now, request.required, freed, NAME, out),
            false => self.evict_chosen(now, request.required, freed, start, NAME, out),
        })
    }

    /// Columns for a scorer of the caller's candidates: for ids in the table, the recorded last use
    /// and number of uses.
    pub fn recorded(
        &mut self,
        columns: &Columns,
        last: &mut Vec<i64>,
        count: &mut Vec<u64>,
    ) -> Result<()> {
        columns.validate()?;
        reserve(last, columns.rows())?;
        reserve(count, columns.rows())?;
        for (row, &id) in columns.ids.iter().enumerate() {
            let node = self.objects.find(id).map(|slot| self.objects.node(slot));
            last.push(node.map_or(columns.last_access_ns(row), |node| node.stamp));
            count.push(node.map_or(columns.count(row), |node| u64::from(node.hits)));
        }
        Ok(())
    }

    /// Whether the object of a row is still in the table and was not used.
    fn is_unchanged(&self, snapshot: &Snapshot, row: usize) -> bool {
        let slot = snapshot.slots[row];
        self.objects.find(snapshot.ids[row]) == Some(slot)
            && self.objects.node(slot).stamp == snapshot.stamps[row]
    }
}

fn check_scores(snapshot: &Snapshot, scores: &[f64]) -> Result<()> {
    if scores.len() != snapshot.len() {
        fail!(Invalid, "{} scores for {} candidates", scores.len(), snapshot.len());
    }
    if let Some(row) = scores.iter().position(|score| score.is_nan()) {
        fail!(Invalid, "the score of object {} is not a number", snapshot.ids[row]);
    }
    Ok(())
}

/// Calls a scorer and checks the scores.
pub fn score(scorer: &mut dyn Scorer, view: &Columns, now: i64) -> Result<Vec<f64>> {
    let mut scores = Vec::new();
    reserve(&mut scores, view.rows())?;
    // A row that the scorer leaves out stays NaN and is detected.
    scores.resize(view.rows(), f64::NAN);
    scorer.score(view, now, &mut scores)?;
    match scores.iter().position(|score| score.is_nan()) {
        Some(row) => fail!(Invalid, "the score of {} is not a number", view.ids[row]),
        None => Ok(scores),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::policy::evictor::{NewObject, Options, RequestContext};

    /// The larger the id, the earlier the eviction.
    struct Backwards;

    impl Scorer for Backwards {
        fn score(&mut self, view: &Columns, _now: i64, out: &mut [f64]) -> Result<()> {
            view.validate()?;
            for (score, &id) in out.iter_mut().zip(view.ids) {
                *score = if id == 666 { f64::NAN } else { -(id as f64) };
            }
            Ok(())
        }
    }

    fn evictor(parents: bool) -> Evictor {
        let options = Options { max_objects: 64, remember: 8, ..Options::default() };
        let mut evictor = Evictor::open(NAME, &options).expect("a known policy");
        for id in 1..=5 {
            let parent = (parents && id > 1).then_some(id - 1);
            let new = NewObject { id, parent, units: 2, ..NewObject::default() };
            evictor.insert(0, &RequestContext::default(), &[new]).expect("room");
        }
        evictor
    }

    fn ids(out: &[Victim]) -> Vec<u64> {
        out.iter().map(|v| v.id).collect()
    }

    #[test]
    fn the_lowest_score_is_evicted_and_changed_objects_stay() {
        let mut evictor = evictor(false);
        evictor.pin(&[4], true).expect("known");
        let snapshot = evictor.snapshot().expect("memory");
        assert_eq!(snapshot.len(), 4);
        let scores = score(&mut Backwards, &snapshot.view(), 0).expect("numbers");
        // While the scorer ran: 5 was used, 3 referenced, 2 removed and inserted again.
        let request = RequestContext::default();
        evictor.touch(0, &request, &[5]).expect("a time");
        evictor.acquire(&[3]).expect("known");
        evictor.remove(0, &[2]).expect("known");
        evictor
            .insert(0, &request, &[NewObject { id: 2, units: 1, ..NewObject::default() }])
            .expect("room");
        let mut out = Vec::new();
        let request = ScoredEviction { required: 9, most: 9, report_only: false };
        let outcome =
            evictor.evict_by_scores(0, &snapshot, &scores, &request, &mut out).expect("a time");
        assert_eq!((ids(&out), outcome.shortfall_units, outcome.decided_by), (vec![1], 7, NAME));
        evictor.check().expect("sound");
    }

    #[test]
    fn a_path_is_evicted_from_its_end_with_one_scorer_call() {
        let mut evictor = evictor(true);
        let snapshot = evictor.snapshot().expect("memory");
        let forward: Vec<f64> = snapshot.ids.iter().map(|&id| id as f64).collect();
        let mut out = Vec::new();
        let request = ScoredEviction { required: 5, most: 9, report_only: true };
        evictor.evict_by_scores(0, &snapshot, &forward, &request, &mut out).expect("a time");
        assert_eq!((ids(&out), evictor.objects().len()), (vec![5, 4, 3], 5));
        evictor.check().expect("sound");
        out.clear();
        let request = ScoredEviction { required: 5, most: 2, report_only: false };
        let outcome =
            evictor.evict_by_scores(0, &snapshot, &forward, &request, &mut out).expect("a time");
        assert_eq!((ids(&out), outcome.shortfall_units), (vec![5, 4], 1));
        evictor.check().expect("sound");
    }

    #[test]
    fn a_nan_score_is_rejected_without_effect() {
        let mut evictor = evictor(false);
        let new = NewObject { id: 666, units: 1, ..NewObject::default() };
        evictor.insert(0, &RequestContext::default(), &[new]).expect("room");
        let snapshot = evictor.snapshot().expect("memory");
        let error = score(&mut Backwards, &snapshot.view(), 0).expect_err("a NaN");
        assert_eq!(error.status(), Status::Invalid);
        let request = ScoredEviction { required: 5, most: 2, report_only: false };
        let nans = vec![f64::NAN; 6];
        assert!(evictor.evict_by_scores(0, &snapshot, &nans, &request, &mut Vec::new()).is_err());
        assert!(evictor.evict_by_scores(0, &snapshot, &[1.0], &request, &mut Vec::new()).is_err());
        assert_eq!((evictor.objects().len(), evictor.metrics.counts.decisions), (6, 0));
    }
}
