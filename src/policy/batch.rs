//! Selection among candidates that the caller keeps in tables of its own.
//!
//! For ids in the evictor's table, the recorded uses (`record`, `insert`, ...) take precedence over
//! the columns. Columns that describe an object itself (`context`, `tokens`, `layer`, `layers`,
//! `chunk`, `chunks`, `cost`) are newer than the table's facts, because `record` cannot pass them.
//! They are stored in the table if the policy keeps facts. Pinned or shared rows are never
//! selected, nor are rows whose object in the table is referenced, pinned, or the parent of another
//! object. A selection evicts nothing: the caller frees the victims and removes them from the
//! table.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::{Facts, MAX_UNITS};
use crate::policy::Rank;
use crate::policy::columns::Columns;
use crate::policy::evictor::{Evictor, NewObject, RequestContext};
use crate::policy::pick::{Duplicates, Entry, Front, in_order, reserve};
use crate::policy::share::Shares;

/// Options of a selection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SelectOptions {
    /// The last victim may give up a tail of its blocks and keep the rest. Default false.
    pub allow_tail: bool,
    /// A larger answer is the error `TooSmall`. The [`Selection`] is filled nevertheless, and the
    /// call has no other effect.
    pub room: Option<Room>,
}

/// Capacity of the caller's arrays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    /// Victims.
    pub victims: usize,
    /// Entries of [`Selection::block_ids`].
    pub blocks: usize,
}

/// A victim: the row is evicted, or its tail is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SelectedRow {
    /// Its row.
    pub row: usize,
    /// Its id.
    pub id: u64,
    /// Blocks that this victim frees. A shared block counts for its last holder.
    pub freed_blocks: u64,
    /// Leading blocks that the victim keeps; 0 = it is evicted.
    pub kept_blocks: u64,
    /// Start of its freed blocks in [`Selection::block_ids`].
    pub first_block: usize,
}

/// The result of a selection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Victims in the order of their eviction.
    pub victims: Vec<SelectedRow>,
    /// Freed blocks, grouped by victim; empty unless the columns list blocks.
    pub block_ids: Vec<u64>,
    /// Blocks freed.
    pub freed_blocks: u64,
    /// Blocks missing to the number requested.
    pub shortfall_blocks: u64,
    /// Time taken by the selection.
    pub decision_ns: u64,
    /// Name of the policy that decided.
    pub decided_by: &'static str,
}

/// Buffers kept from call to call, so that a call allocates nothing.
#[derive(Default)]
pub(super) struct Scratch {
    duplicates: Duplicates,
    front: Front,
    ranks: Vec<Rank>,
    /// Most blocks that a row frees; 0 = the row is not a candidate.
    weights: Vec<u32>,
    entries: Vec<Entry>,
    spare: Vec<Entry>,
    /// Victims; in reverse order while superfluous ones are removed.
    chosen: Vec<Entry>,
    shares: Shares,
    /// Facts from the columns that differ from those of the table.
    news: Vec<(Slot, Facts)>,
}

impl Evictor {
    /// Records a use of objects, the last one first. Ids that are not in the table are inserted
    /// with the given sizes (`units` empty: 1 each). All or none. Returns the number of inserted
    /// objects.
    pub fn record(
        &mut self,
        now: i64,
        request: &RequestContext,
        ids: &[u64],
        units: &[u64],
    ) -> Result<usize> {
        if !units.is_empty() && units.len() != ids.len() {
            fail!(Invalid, "{} sizes for {} ids", units.len(), ids.len());
        }
        if let Some(row) = units.iter().position(|&u| u > MAX_UNITS) {
            fail!(Limit, "size {} of object {} exceeds {MAX_UNITS}", units[row], ids[row]);
        }
        self.restoring_clock(|this| this.record_all(now, request, ids, units))
    }

    fn record_all(
        &mut self,
        now: i64,
        request: &RequestContext,
        ids: &[u64],
        units: &[u64],
    ) -> Result<usize> {
        let first = self.begin(now, ids.len())?;
        self.find_all(ids);
        let mut unknown = self.slots.iter().filter(|&&slot| slot == NONE).count();
        if unknown > self.objects.limit() - self.objects.len() {
            unknown = self.different_unknown(ids)?;
        }
        if unknown > self.objects.limit() - self.objects.len() {
            fail!(
                Limit,
                "{unknown} new objects exceed the table's limit of {} objects",
                self.objects.limit()
            );
        }
        let session = self.note_session(first, request);
        let mut added = 0;
        for (i, stamp) in (0..ids.len()).rev().zip(first..) {
            // Unknown ids are looked up again: an id may occur twice.
            let known =
                if self.slots[i] != NONE { Some(self.slots[i]) } else { self.objects.find(ids[i]) };
            match known {
                Some(slot) => self.use_slot(slot, session, stamp),
                None => {
                    let units = units.get(i).copied().unwrap_or(1);
                    let new = NewObject { id: ids[i], units, ..NewObject::default() };
                    self.insert_one(&new, session, stamp)?;
                    self.history.remove(ids[i]);
                    added += 1;
                }
            }
        }
        self.metrics.counts.inserts += added as u64;
        Ok(added)
    }

    /// Number of distinct ids without a slot.
    #[cold]
    fn different_unknown(&self, ids: &[u64]) -> Result<usize> {
        let mut unknown = Vec::new();
        reserve(&mut unknown, ids.len())?;
        let slots = ids.iter().zip(&self.slots);
        unknown.extend(slots.filter(|&(_, &slot)| slot == NONE).map(|(&id, _)| id));
        unknown.sort_unstable();
        unknown.dedup();
        Ok(unknown.len())
    }

    /// Selects rows that free `required` blocks, the lowest rank first, without a superfluous one.
    /// The id breaks ties.
    pub fn select(
        &mut self,
        now: i64,
        columns: &Columns,
        required: u64,
        options: &SelectOptions,
        out: &mut Selection,
    ) -> Result<()> {
        self.select_by(now, columns, &[], required, options, out)
    }

    /// As `select`, by the caller's scores, one a row; the time of the last access breaks ties.
    /// Without scores the policy decides.
    pub fn select_by(
        &mut self,
        now: i64,
        columns: &Columns,
        scores: &[f64],
        required: u64,
        options: &SelectOptions,
        out: &mut Selection,
    ) -> Result<()> {
        let start = self.clock.now_ns();
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = self.restoring_clock(|this| {
            this.select_into(&mut scratch, now, columns, scores, required, options, out)
        });
        if let Ok(now) = done {
            self.note_facts(&scratch.news, now);
        }
        self.scratch = scratch;
        done?;
        let by = self.policy.decided_by();
        out.decided_by = if out.victims.is_empty() { self.policy.name() } else { by };
        out.shortfall_blocks = required.saturating_sub(out.freed_blocks);
        out.decision_ns = self.clock.now_ns().saturating_sub(start);
        self.metrics.counts.decisions += 1;
        self.metrics.counts.shortfalls += u64::from(out.shortfall_blocks > 0);
        self.metrics.decision.add(out.decision_ns);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // the parts of one call
    fn select_into(
        &mut self,
        scratch: &mut Scratch,
        now: i64,
        columns: &Columns,
        scores: &[f64],
        required: u64,
        options: &SelectOptions,
        out: &mut Selection,
    ) -> Result<i64> {
        columns.validate()?;
        if let Some(id) = scratch.duplicates.find(columns.ids)? {
            fail!(Invalid, "candidate {id} is given twice");
        }
        let shared = !columns.block_offsets.is_empty();
        if shared {
            scratch.shares.read(columns)?;
        }
        let now = self.tick(now, 0)?;
        out.victims.clear();
        out.block_ids.clear();
        out.freed_blocks = 0;
        scratch.news.clear();
        if required == 0 || columns.rows() == 0 {
            return Ok(now);
        }
        scratch.weigh(columns, shared)?;
        self.rank_rows(scratch, now, columns, scores)?;
        match shared {
            false => scratch.choose(columns, required, options.allow_tail)?,
            true => scratch.choose_shared(columns, required, options.allow_tail)?,
        }
        scratch.write(columns, required, shared, options.allow_tail, out)?;
        match options.room {
            Some(room) => out.fits(room).map(|()| now),
            None => Ok(now),
        }
    }

    /// Stores facts from the columns, once the call cannot fail any more.
    fn note_facts(&mut self, news: &[(Slot, Facts)], now: i64) {
        for &(slot, facts) in news {
            self.set_facts(slot, &facts, now);
        }
    }

    /// The rank of an object with other facts. The facts are set for this call only, because the
    /// selection may still fail.
    fn rank_if(&mut self, slot: Slot, facts: Facts, now: i64) -> Rank {
        let old = self.objects.facts(slot);
        if let Some(known) = self.objects.facts_mut(slot) {
            *known = facts;
        }
        let rank = self.policy.rank(&self.objects, slot, now);
        if let Some(known) = self.objects.facts_mut(slot) {
            *known = old;
        }
        rank
    }

    /// Fills `ranks`, and excludes rows whose object in the table is blocked.
    fn rank_rows(
        &mut self,
        scratch: &mut Scratch,
        now: i64,
        columns: &Columns,
        scores: &[f64],
    ) -> Result<()> {
        let Scratch { ranks, weights, news, .. } = scratch;
        // Values from an earlier call are overwritten.
        reserve(ranks, columns.rows())?;
        ranks.resize(columns.rows(), Rank::default());
        if scores.is_empty() {
            self.policy.seed(columns, now, ranks);
        } else if let Some(row) = scores.iter().position(|score| score.is_nan()) {
            fail!(Invalid, "the score of candidate {} is not a number", columns.ids[row]);
        } else {
            for (row, (rank, &score)) in ranks.iter_mut().zip(scores).enumerate() {
                *rank = Rank::score(score, columns.last_access_ns(row));
            }
        }
        if self.objects.is_empty() {
            return Ok(());
        }
        reserve(&mut self.slots, columns.rows())?;
        self.find_all(columns.ids);
        let news_possible = self.objects.has_facts() && has_fact_columns(columns);
        for row in 0..columns.rows() {
            let slot = self.slots[row];
            if slot == NONE {
                continue;
            }
            if self.objects.is_blocked(slot) {
                weights[row] = 0;
            }
            let known = self.objects.facts(slot);
            let facts = if news_possible { with_columns(known, columns, row) } else { known };
            let is_news = facts != known;
            if is_news {
                reserve_one(news)?;
                news.push((slot, facts));
            }
            if scores.is_empty() {
                ranks[row] = match is_news {
                    true => self.rank_if(slot, facts, now),
                    false => self.policy.rank(&self.objects, slot, now),
                };
            }
        }
        Ok(())
    }
}

/// Whether the columns contain any facts.
fn has_fact_columns(columns: &Columns) -> bool {
    let Columns { context, tokens, length, layer, layers, chunk, chunks, cost, .. } = columns;
    let wide = [context, tokens, length].iter().any(|column| !column.is_empty());
    let narrow = [layer, layers, chunk, chunks].iter().any(|column| !column.is_empty());
    wide || narrow || !cost.is_empty()
}

/// The known facts, replaced by those that the columns contain. Numbers out of range become the
/// largest.
fn with_columns(known: Facts, columns: &Columns, row: usize) -> Facts {
    let wide = |x: u64| u32::try_from(x).unwrap_or(u32::MAX);
    let small = |x: u32| u16::try_from(x).unwrap_or(u16::MAX);
    let tokens = columns.tokens.get(row).or(columns.length.get(row));
    let cost = |x: f64| x.min(f64::from(f32::MAX)) as f32;
    Facts {
        context: columns.context.get(row).map_or(known.context, |&x| wide(x)),
        tokens: tokens.map_or(known.tokens, |&x| wide(x)),
        layer: columns.layer.get(row).map_or(known.layer, |&x| small(x)),
        layers: columns.layers.get(row).map_or(known.layers, |&x| small(x)),
        chunk: columns.chunk.get(row).copied().unwrap_or(known.chunk),
        chunks: columns.chunks.get(row).copied().unwrap_or(known.chunks),
        cost: columns.cost.get(row).map_or(known.cost, |&x| cost(x)),
        next_use_ns: known.next_use_ns,
    }
}

fn reserve_one<T>(list: &mut Vec<T>) -> Result<()> {
    match list.try_reserve(1) {
        Ok(()) => Ok(()),
        Err(_) => fail!(NoMem, "no memory for facts of {} objects", list.len() + 1),
    }
}

impl Selection {
    fn fits(&self, room: Room) -> Result<()> {
        let (victims, blocks) = (self.victims.len(), self.block_ids.len());
        if victims <= room.victims && blocks <= room.blocks {
            return Ok(());
        }
        let text = format!(
            "the arrays are too small: they need room for {victims} victims and {blocks} blocks"
        );
        Err(Error::new(Status::TooSmall, text))
    }
}

impl Scratch {
    /// Fills `weights`.
    fn weigh(&mut self, columns: &Columns, shared: bool) -> Result<()> {
        let Scratch { weights, shares, .. } = self;
        weights.clear();
        reserve(weights, columns.rows())?;
        if shared {
            let weight = |row| if shares.is_stuck(row) { 0 } else { shares.len(row) as u32 };
            weights.extend((0..columns.rows()).map(weight));
        } else {
            // The compiler vectorizes this loop over the column.
            weights.extend(columns.blocks.iter().map(|&blocks| blocks as u32));
            weights.resize(columns.rows(), 1);
        }
        for (weight, &pinned) in weights.iter_mut().zip(columns.pinned) {
            *weight = if pinned != 0 { 0 } else { *weight };
        }
        for (weight, &refs) in weights.iter_mut().zip(columns.refs) {
            *weight = if refs > 1 { 0 } else { *weight };
        }
        Ok(())
    }

    /// Selects rows whose blocks are not shared: sums of sizes decide.
    fn choose(&mut self, columns: &Columns, required: u64, tail: bool) -> Result<()> {
        let Scratch { front, ranks, weights, entries, spare, chosen, .. } = self;
        front.gather(ranks, columns.ids, weights, required, entries)?;
        grow(spare, entries.len())?;
        let (mut freed, mut taken) = (0u64, 0);
        in_order(entries, spare, &mut |entry| {
            freed += u64::from(entry.blocks);
            taken += 1;
            freed < required
        });
        chosen.clear();
        reserve(chosen, taken)?;
        chosen.extend_from_slice(&entries[..taken]);
        if !tail {
            spare_superfluous(chosen, freed.saturating_sub(required));
        }
        Ok(())
    }

    /// Selects rows with shared blocks: the blocks that a row frees depend on earlier victims.
    fn choose_shared(&mut self, columns: &Columns, required: u64, tail: bool) -> Result<()> {
        let Scratch { front, ranks, weights, entries, spare, chosen, shares, .. } = self;
        front.gather(ranks, columns.ids, weights, u64::MAX, entries)?;
        grow(spare, entries.len())?;
        let (mut freed, mut taken) = (0u64, 0);
        in_order(entries, spare, &mut |entry| {
            freed += shares.release(entry.row as usize, 0, |_| ());
            taken += 1;
            freed < required
        });
        chosen.clear();
        reserve(chosen, taken)?;
        chosen.extend_from_slice(&entries[..taken]);
        let mut whole = taken;
        if tail && freed > required {
            // The last victim gives no more than required, so no victim that frees anything is
            // superfluous.
            whole -= 1;
            if let Some(last) = entries[..taken].last() {
                let row = last.row as usize;
                freed -= shares.freed_by(row);
                shares.take_back_all(row);
                freed += shares.release_tail(row, required - freed).0;
            }
        }
        let target = freed.min(required);
        for entry in chosen[..whole].iter_mut().rev() {
            let lost = shares.freed_by(entry.row as usize);
            if freed - lost >= target {
                freed -= lost;
                shares.take_back_all(entry.row as usize);
                entry.blocks = 0;
            }
        }
        chosen.retain(|entry| entry.blocks > 0);
        Ok(())
    }

    /// Writes the selection to `out`.
    fn write(
        &mut self,
        columns: &Columns,
        required: u64,
        shared: bool,
        tail: bool,
        out: &mut Selection,
    ) -> Result<()> {
        let Scratch { chosen, shares, .. } = self;
        reserve(&mut out.victims, chosen.len())?;
        if shared {
            shares.reset();
            reserve(&mut out.block_ids, chosen.iter().map(|e| shares.len(e.row as usize)).sum())?;
        }
        for (i, entry) in chosen.iter().enumerate() {
            let (row, first_block) = (entry.row as usize, out.block_ids.len());
            let missing = required - out.freed_blocks;
            let cut = tail && i + 1 == chosen.len();
            let blocks = u64::from(entry.blocks);
            let (freed_blocks, retained) = if !shared {
                let freed = if cut { blocks.min(missing) } else { blocks };
                (freed, blocks - freed)
            } else {
                let mut retained = 0;
                if cut {
                    retained = shares.release_tail(row, missing).1;
                    shares.take_back(row, retained);
                }
                (shares.release(row, retained, |id| out.block_ids.push(id)), retained as u64)
            };
            out.freed_blocks += freed_blocks;
            let id = columns.ids[row];
            out.victims.push(SelectedRow {
                row,
                id,
                freed_blocks,
                kept_blocks: retained,
                first_block,
            });
        }
        Ok(())
    }
}

fn grow(spare: &mut Vec<Entry>, len: usize) -> Result<()> {
    if spare.len() < len {
        reserve(spare, len)?;
        spare.resize(len, Entry::default());
    }
    Ok(())
}

/// Removes superfluous victims, the last one first. A victim too large for the surplus stays so,
/// hence one pass is enough.
fn spare_superfluous(chosen: &mut Vec<Entry>, mut surplus: u64) {
    if surplus == 0 {
        return;
    }
    for entry in chosen.iter_mut().rev() {
        if u64::from(entry.blocks) <= surplus {
            surplus -= u64::from(std::mem::take(&mut entry.blocks));
        }
    }
    chosen.retain(|entry| entry.blocks > 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use crate::policy::evictor::Options;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn evictor(spec: &str) -> Evictor {
        let options = Options { max_objects: 4096, remember: 64, ..Options::default() };
        Evictor::open(spec, &options).expect("a known policy")
    }

    #[derive(Clone, Debug, Default)]
    struct Table {
        ids: Vec<u64>,
        blocks: Vec<u64>,
        created: Vec<i64>,
        last: Vec<i64>,
        pinned: Vec<u8>,
        refs: Vec<u32>,
        offsets: Vec<u64>,
        block_ids: Vec<u64>,
        block_refs: Vec<u32>,
    }

    impl Table {
        fn columns(&self) -> Columns<'_> {
            Columns {
                ids: &self.ids,
                blocks: &self.blocks,
                created_ns: &self.created,
                last_access_ns: &self.last,
                pinned: &self.pinned,
                refs: &self.refs,
                block_offsets: &self.offsets,
                block_ids: &self.block_ids,
                block_refs: &self.block_refs,
                ..Columns::default()
            }
        }

        /// Candidate rows in the order of eviction by `time`.
        fn order(&self, time: impl Fn(usize) -> i64) -> Vec<usize> {
            let free = |&row: &usize| self.pinned[row] == 0 && self.refs[row] <= 1;
            let mut rows: Vec<usize> = (0..self.ids.len()).filter(free).collect();
            rows.sort_by_key(|&row| (time(row), self.ids[row]));
            rows
        }
    }

    fn table(most: usize) -> impl Strategy<Value = Table> {
        let time = prop_oneof![0..3i64, -500..500i64, any::<i64>()];
        let row = (0..9u64, time.clone(), time, 0..9u8, 0..9u8);
        let ids = prop::collection::btree_set(any::<u64>(), 0..most);
        ids.prop_flat_map(move |ids| {
            let ids: Vec<u64> = ids.into_iter().collect();
            let rows = prop::collection::vec(row.clone(), ids.len());
            (Just(ids).prop_shuffle(), rows)
        })
        .prop_map(|(ids, rows)| {
            let mut table = Table { ids, ..Table::default() };
            for (blocks, created, last, pinned, refs) in rows {
                table.blocks.push(blocks);
                table.created.push(created);
                table.last.push(last);
                table.pinned.push(u8::from(pinned == 0));
                table.refs.push(if refs == 0 { 2 } else { 1 });
            }
            table
        })
    }

    /// The definition: lowest first until enough, then remove superfluous ones from the end.
    fn reference(table: &Table, order: &[usize], required: u64, tail: bool) -> Vec<(u64, u64)> {
        let (mut freed, mut taken) = (0, Vec::new());
        for &row in order.iter().filter(|&&row| table.blocks[row] > 0) {
            if freed >= required {
                break;
            }
            freed += table.blocks[row];
            taken.push((table.ids[row], table.blocks[row]));
        }
        if tail && freed > required {
            let last = taken.last_mut().expect("freed something");
            last.1 -= freed - required;
            return taken;
        }
        for i in (0..taken.len()).rev() {
            if freed - taken[i].1 >= required {
                freed -= taken.remove(i).1;
            }
        }
        taken
    }

    fn select(evictor: &mut Evictor, table: &Table, required: u64, tail: bool) -> Selection {
        let mut out = Selection::default();
        let options = SelectOptions { allow_tail: tail, room: None };
        let done = evictor.select(0, &table.columns(), required, &options, &mut out);
        done.expect("a sound table");
        let missing = required.saturating_sub(out.freed_blocks);
        assert_eq!(out.shortfall_blocks, missing);
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn selection_equals_that_of_a_full_sort(
            table in table(300),
            required in 0..900u64,
            tail: bool,
            fifo: bool,
        ) {
            let mut evictor = evictor(if fifo { "fifo" } else { "lru" });
            let out = select(&mut evictor, &table, required, tail);
            let times = if fifo { &table.created } else { &table.last };
            let expected = reference(&table, &table.order(|row| times[row]), required, tail);
            let got: Vec<_> = out.victims.iter().map(|v| (v.id, v.freed_blocks)).collect();
            prop_assert_eq!(got, expected);
            for pick in &out.victims {
                prop_assert_eq!(table.ids[pick.row], pick.id);
                prop_assert_eq!(pick.freed_blocks + pick.kept_blocks, table.blocks[pick.row]);
            }
        }

        #[test]
        fn recorded_uses_take_precedence_over_columns(
            table in table(60),
            known in 0..60usize,
            required in 0..200u64,
        ) {
            let mut evictor = evictor("lru");
            let known = known.min(table.ids.len());
            let request = RequestContext::default();
            for (i, &id) in table.ids[..known].iter().enumerate() {
                evictor.record(1000 + i as i64, &request, &[id], &[]).expect("room");
            }
            let time = |row: usize| if row < known { 1000 + row as i64 } else { table.last[row] };
            let order = table.order(time);
            let out = select(&mut evictor, &table, required, false);
            let got: Vec<_> = out.victims.iter().map(|v| (v.id, v.freed_blocks)).collect();
            prop_assert_eq!(got, reference(&table, &order, required, false));
        }

        #[test]
        fn shared_blocks_count_once(
            mut table in table(30),
            lists in prop::collection::vec(prop::collection::btree_set(0..40u64, 0..6), 30),
            others in prop::collection::vec(any::<bool>(), 40),
            required in 0..60u64,
            tail: bool,
        ) {
            table.blocks.clear();
            table.offsets.push(0);
            let mut holders: BTreeMap<u64, u32> = BTreeMap::new();
            for list in &lists[..table.ids.len()] {
                table.block_ids.extend(list);
                table.offsets.push(table.block_ids.len() as u64);
                list.iter().for_each(|&block| *holders.entry(block).or_default() += 1);
            }
            for (&block, count) in &mut holders {
                *count += u32::from(others[block as usize]);
            }
            table.block_refs = table.block_ids.iter().map(|block| holders[block]).collect();
            let out = select(&mut evictor("lru"), &table, required, tail);
            check_shared(&table, &lists, &holders, &out, required, tail)?;
        }
    }

    /// Checks the freed blocks by definition, that no victim is superfluous, and the order.
    fn check_shared(
        table: &Table,
        lists: &[BTreeSet<u64>],
        holders: &BTreeMap<u64, u32>,
        out: &Selection,
        required: u64,
        tail: bool,
    ) -> std::result::Result<(), TestCaseError> {
        let free = |without: Option<usize>| -> BTreeSet<u64> {
            let mut left = holders.clone();
            for pick in out.victims.iter().filter(|pick| Some(pick.row) != without) {
                for block in lists[pick.row].iter().skip(pick.kept_blocks as usize) {
                    *left.get_mut(block).expect("listed") -= 1;
                }
            }
            left.into_iter().filter(|&(_, n)| n == 0).map(|(block, _)| block).collect()
        };
        let listed: BTreeSet<u64> = out.block_ids.iter().copied().collect();
        prop_assert_eq!(&listed, &free(None));
        prop_assert_eq!(listed.len(), out.block_ids.len());
        prop_assert_eq!(out.freed_blocks, listed.len() as u64);
        prop_assert_eq!(out.victims.iter().map(|v| v.freed_blocks).sum::<u64>(), out.freed_blocks);
        let order = table.order(|row| table.last[row]);
        let places: Vec<_> =
            out.victims.iter().map(|v| order.iter().position(|&row| row == v.row)).collect();
        prop_assert!(places.iter().all(Option::is_some) && places.is_sorted());
        let enough = required.min(out.freed_blocks);
        for pick in &out.victims {
            prop_assert!(
                (free(Some(pick.row)).len() as u64) < enough,
                "{} is superfluous",
                pick.id
            );
        }
        if tail {
            prop_assert!(out.freed_blocks <= required);
        }
        if out.shortfall_blocks > 0 {
            // No other candidate would have freed more.
            let mut left = holders.clone();
            order.iter().flat_map(|&row| &lists[row]).for_each(|block| {
                *left.get_mut(block).expect("listed") -= 1;
            });
            let most = left.values().filter(|&&n| n == 0).count() as u64;
            prop_assert_eq!(most, out.freed_blocks);
        }
        Ok(())
    }

    #[test]
    fn invalid_columns_are_rejected_without_effect() {
        let mut evictor = evictor("lru");
        let mut out = Selection::default();
        let options = SelectOptions::default();
        let columns = Columns { ids: &[5, 3, 5], ..Columns::default() };
        let error = evictor.select(7, &columns, 1, &options, &mut out).expect_err("twice");
        assert_eq!(error.status(), Status::Invalid);
        let columns = Columns { ids: &[5, 3], blocks: &[1 << 40, 1], ..Columns::default() };
        let error = evictor.select(7, &columns, 1, &options, &mut out).expect_err("huge");
        assert_eq!(error.status(), Status::Limit);
        let columns = Columns { ids: &[5, 3], confidence: &[0.5, f32::NAN], ..Columns::default() };
        assert!(evictor.select(7, &columns, 1, &options, &mut out).is_err());
        for offsets in [&[0, 1][..], &[0, 2, 1], &[1, 1, 1], &[0, 1, 2]] {
            let block_ids = &[9][..];
            let columns =
                Columns { ids: &[5, 3], block_offsets: offsets, block_ids, ..Columns::default() };
            assert!(evictor.select(7, &columns, 1, &options, &mut out).is_err(), "{offsets:?}");
        }
        assert_eq!((evictor.metrics.counts.decisions, out), (0, Selection::default()));
        // The clock did not move either: an earlier time is still accepted.
        evictor.select(3, &Columns::default(), 1, &options, &mut Selection::default()).expect("ok");
        assert!(
            evictor.select(2, &Columns::default(), 1, &options, &mut Selection::default()).is_err()
        );
    }

    #[test]
    fn records_are_all_or_none() {
        let mut evictor = evictor("lru");
        let request = RequestContext::default();
        assert_eq!(evictor.record(1, &request, &[1, 2, 1], &[4, 5, 6]).expect("room"), 2);
        assert_eq!(evictor.objects().units(), 11, "the later of the two objects was evicted first");
        let many: Vec<u64> = (0..5000).collect();
        assert_eq!(
            evictor.record(2, &request, &many, &[]).expect_err("full").status(),
            Status::Limit
        );
        assert_eq!(evictor.objects().len(), 2);
        assert!(evictor.record(2, &request, &[7], &[1 << 40]).is_err());
    }

    #[test]
    fn failed_calls_have_no_effect() {
        let mut evictor = evictor("gdsf");
        let request = RequestContext::default();
        evictor.record(10, &request, &[1, 2, 3], &[]).expect("room");
        let columns = Columns { ids: &[1, 2, 3], cost: &[3.0, 2.0, 1.0], ..Columns::default() };
        let mut out = Selection::default();
        let nan = [0.0, f64::NAN, 1.0];
        let any = SelectOptions::default();
        let error = evictor.select_by(50, &columns, &nan, 2, &any, &mut out).expect_err("NaN");
        assert_eq!(error.status(), Status::Invalid);
        for room in [Room { victims: 1, blocks: 9 }, Room { victims: 0, blocks: 9 }] {
            let little = SelectOptions { room: Some(room), ..any };
            let error = evictor.select(50, &columns, 2, &little, &mut out).expect_err("no room");
            assert_eq!((error.status(), out.victims.len()), (Status::TooSmall, 2));
        }
        let many: Vec<u64> = (0..5000).collect();
        evictor.record(50, &request, &many, &[]).expect_err("full");
        assert_eq!(evictor.now_ns(), 10);
        assert_eq!((evictor.metrics.counts.decisions, evictor.metrics.decision.total()), (0, 0));
        assert_eq!(evictor.objects.facts(0), Facts::default());
        evictor.check().expect("sound");
        let enough = SelectOptions { room: Some(Room { victims: 2, blocks: 0 }), ..any };
        evictor.select(11, &columns, 2, &enough, &mut out).expect("room");
        assert_eq!((evictor.now_ns(), evictor.metrics.counts.decisions), (11, 1));
    }

    fn ids_of(out: &Selection) -> Vec<u64> {
        out.victims.iter().map(|pick| pick.id).collect()
    }

    #[test]
    fn columns_update_the_facts_of_recorded_objects() {
        for spec in ["gdsf(alpha=0.01)", "auto(of=any(gdsf(alpha=0.01),lru))"] {
            let mut evictor = evictor(spec);
            evictor.record(1, &RequestContext::default(), &[1, 2, 3, 4], &[]).expect("room");
            let mut out = Selection::default();
            let any = SelectOptions::default();
            let context = [0, 500, 1000, 2000];
            let columns = Columns {
                ids: &[4, 3, 2, 1],
                context: &context,
                tokens: &[10; 4],
                ..Columns::default()
            };
            evictor.select(2, &columns, 3, &any, &mut out).expect("a sound table");
            assert_eq!(ids_of(&out), [4, 3, 2], "{spec}");
            // The facts stay with the object: for evictions, and where columns are absent.
            evictor.check().expect("sound");
            let silent = Columns { ids: &[1, 2, 3, 4], ..Columns::default() };
            evictor.select(3, &silent, 2, &any, &mut out).expect("a sound table");
            assert_eq!(ids_of(&out), [4, 3], "{spec}");
            let dear = Columns { ids: &[4], cost: &[1e300], ..Columns::default() };
            evictor.select(4, &dear, 1, &any, &mut out).expect("a sound table");
            let mut victims = Vec::new();
            evictor.evict(5, 4, &mut victims).expect("a time");
            let order: Vec<u64> = victims.iter().map(|victim| victim.id).collect();
            assert_eq!(order, [3, 2, 1, 4], "{spec}");
        }
    }

    #[test]
    fn layers_and_chunks_count_for_recorded_cells() {
        let mut evictor = evictor("pensieve(time_weight=false)");
        evictor.record(1, &RequestContext::default(), &[1, 2, 3, 4], &[]).expect("room");
        let columns = Columns {
            ids: &[1, 2, 3, 4],
            context: &[0, 0, 32, 32],
            tokens: &[32; 4],
            layer: &[0, 1, 0, 1 << 20],
            layers: &[2, 2, 2, 1 << 20],
            chunk: &[0, 0, 1, 1],
            chunks: &[2; 4],
            ..Columns::default()
        };
        let mut out = Selection::default();
        let any = SelectOptions::default();
        evictor.select(2, &columns, 4, &any, &mut out).expect("a sound table");
        assert_eq!(ids_of(&out), [4, 2, 1, 3]);
        evictor.check().expect("sound");
        let mut victims = Vec::new();
        evictor.evict(3, 4, &mut victims).expect("a time");
        let order: Vec<u64> = victims.iter().map(|victim| victim.id).collect();
        assert_eq!(order, [4, 2, 1, 3]);
        evictor.check().expect("sound");
    }
}
