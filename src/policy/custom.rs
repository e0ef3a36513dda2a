//! `custom`: the caller's own scores decide; the least leaves first.
//!
//! A scorer sees many candidates at once, as columns. It may be foreign code
//! that takes its time and calls back, so it never runs while the evictor is in
//! use: [`Evictor::snapshot`] copies what it needs to see, the scorer runs, and
//! [`Evictor::evict_ids`] takes those with the least scores that are still as
//! they were. Where nobody scores (an inner policy, a new policy that takes the
//! objects over) the order is that of the last use.

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

/// Its name in specs.
pub const NAME: &str = "custom";

/// Fails for a spec that names `custom` anywhere, for those who have no scorer: it would
/// decide by last use, and say nothing of that.
pub fn refuse(spec: &Spec, who: &str) -> Result<()> {
    if spec.name == NAME {
        let text = format!(
            "'{NAME}' at offset {} needs a score function, and {who} has none",
            spec.offset
        );
        return Err(Error::at(Status::Invalid, spec.offset, text));
    }
    spec.args.iter().try_for_each(|arg| match &arg.value {
        Value::Spec(inner) => refuse(inner, who),
        _ => Ok(()),
    })
}

/// The caller's order: scores for all rows in one call.
pub trait Scorer: Send {
    /// Fills `out`, one score a row; the least leaves first. A NaN is an error.
    fn score(&mut self, view: &Columns, now: i64, out: &mut [f64]) -> Result<()>;
}

/// Candidates as they were at a moment, for a scorer to look at.
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
    /// What a scorer sees. Columns of facts are absent where none are kept.
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

    /// How many candidates there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
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

/// What is asked of [`Evictor::evict_ids`].
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Units to be freed.
    pub required: u64,
    /// Most victims.
    pub most: usize,
    /// Nothing leaves: it only says who would.
    pub keep: bool,
}

impl Evictor {
    /// Copies what may leave: what is neither referenced nor pinned. Objects that
    /// others continue are in it, since they may be free by the time they matter.
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

    /// Evicts by the scores of a snapshot, the least first. Who was used,
    /// referenced or taken away since the snapshot stays; of objects that
    /// continue each other the last goes first.
    pub fn evict_ids(
        &mut self,
        now: i64,
        snapshot: &Snapshot,
        scores: &[f64],
        ask: &Ask,
        out: &mut Vec<Victim>,
    ) -> Result<Outcome> {
        check_scores(snapshot, scores)?;
        let mut waiting = Vec::new();
        if waiting.try_reserve_exact(snapshot.len()).is_err() {
            fail!(NoMem, "no memory to order {} candidates", snapshot.len());
        }
        // The scorer, or another thread meanwhile, may have told a later time.
        let now = self.tick(self.not_before(now), 1)?;
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
        let freed = self.choose(now, ask.required, ask.most, |this| {
            // What the last one continued may be free to leave by now.
            if let Ok(row) = snapshot.slots.binary_search(&above) {
                waiting.extend(free(this, &row).then(|| turn(row)));
            }
            let Reverse((_, _, row)) = waiting.pop()?;
            above = this.objects.node(snapshot.slots[row]).parent;
            Some(snapshot.slots[row])
        })?;
        Ok(match ask.keep {
            true => self.only_say(now, ask.required, freed, NAME, out),
            false => self.carry_out(now, ask.required, freed, start, NAME, out),
        })
    }

    /// The columns that a scorer of candidates sees in place of the caller's: of
    /// ids in the table, what was recorded.
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

    /// Whether the object of a row is there, with nothing having happened to it.
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

/// Asks a scorer, with its answer checked.
pub fn score(scorer: &mut dyn Scorer, view: &Columns, now: i64) -> Result<Vec<f64>> {
    let mut scores = Vec::new();
    reserve(&mut scores, view.rows())?;
    // A row that the scorer forgets is noticed.
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
    use crate::policy::evictor::{New, Options, Who};

    /// The larger the id, the earlier it leaves.
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
            let new = New { id, parent, units: 2, ..New::default() };
            evictor.insert(0, &Who::default(), &[new]).expect("room");
        }
        evictor
    }

    fn ids(out: &[Victim]) -> Vec<u64> {
        out.iter().map(|v| v.id).collect()
    }

    #[test]
    fn the_least_score_leaves_and_what_changed_stays() {
        let mut evictor = evictor(false);
        evictor.pin(&[4], true).expect("known");
        let snapshot = evictor.snapshot().expect("memory");
        assert_eq!(snapshot.len(), 4);
        let scores = score(&mut Backwards, &snapshot.view(), 0).expect("numbers");
        // While the scorer ran: 5 was used, 3 referenced, 2 taken away and back.
        let who = Who::default();
        evictor.touch(0, &who, &[5]).expect("a time");
        evictor.acquire(&[3]).expect("known");
        evictor.remove(0, &[2]).expect("known");
        evictor.insert(0, &who, &[New { id: 2, units: 1, ..New::default() }]).expect("room");
        let mut out = Vec::new();
        let ask = Ask { required: 9, most: 9, keep: false };
        let told = evictor.evict_ids(0, &snapshot, &scores, &ask, &mut out).expect("a time");
        assert_eq!((ids(&out), told.shortfall_units, told.decided_by), (vec![1], 7, NAME));
        evictor.check().expect("sound");
    }

    #[test]
    fn a_path_leaves_from_its_end_in_one_call_of_the_scorer() {
        let mut evictor = evictor(true);
        let snapshot = evictor.snapshot().expect("memory");
        let forward: Vec<f64> = snapshot.ids.iter().map(|&id| id as f64).collect();
        let mut out = Vec::new();
        let ask = Ask { required: 5, most: 9, keep: true };
        evictor.evict_ids(0, &snapshot, &forward, &ask, &mut out).expect("a time");
        assert_eq!((ids(&out), evictor.objects().len()), (vec![5, 4, 3], 5));
        evictor.check().expect("sound");
        out.clear();
        let ask = Ask { required: 5, most: 2, keep: false };
        let told = evictor.evict_ids(0, &snapshot, &forward, &ask, &mut out).expect("a time");
        assert_eq!((ids(&out), told.shortfall_units), (vec![5, 4], 1));
        evictor.check().expect("sound");
    }

    #[test]
    fn a_score_that_is_no_number_changes_nothing() {
        let mut evictor = evictor(false);
        let new = New { id: 666, units: 1, ..New::default() };
        evictor.insert(0, &Who::default(), &[new]).expect("room");
        let snapshot = evictor.snapshot().expect("memory");
        let error = score(&mut Backwards, &snapshot.view(), 0).expect_err("a NaN");
        assert_eq!(error.status(), Status::Invalid);
        let ask = Ask { required: 5, most: 2, keep: false };
        let nans = vec![f64::NAN; 6];
        assert!(evictor.evict_ids(0, &snapshot, &nans, &ask, &mut Vec::new()).is_err());
        assert!(evictor.evict_ids(0, &snapshot, &[1.0], &ask, &mut Vec::new()).is_err());
        assert_eq!((evictor.objects().len(), evictor.metrics.counts.decisions), (6, 0));
    }
}
