//! How long chunks stay: pins, which keep them resident until a time, and ends, at which they are
//! removed from all tiers.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::base::status::Result;
use crate::fail;
use crate::format::keys::Key;
use crate::meta::chunks::{Cell, Chunks, Pin};
use crate::meta::index::{NONE, Slot};
use crate::store::state::chunk_table::note;
use crate::store::state::disk_gc::Cleared;
use crate::store::state::tier_cache::PIECE_BYTES;
use crate::store::state::transfer::TransferKind;
use crate::store::state::{At, ChunkTable, StoreState};

/// Pins and ends of chunks.
#[derive(Default)]
pub(super) struct Retention {
    /// Pins, the weakest first.
    pins: BTreeSet<Hold>,
    /// The same, by when they end.
    pin_ends: BTreeSet<(u64, u8, At)>,
    /// Bytes of pinned chunks in all layers, in whole pieces, stored or not.
    pinned_bytes: u64,
    /// Chunks that have an end, by the time at which they are to be removed; equal times from the end
    /// of the path, so that no chunk is continued by one that is removed later.
    ends: BTreeSet<End>,
    /// Chunks among them that something held at their end.
    overdue: BTreeSet<At>,
}

impl Retention {
    /// Number of pinned chunks.
    pub(super) fn pins(&self) -> usize {
        self.pins.len()
    }

    /// Their bytes.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }
}

// ---------- pins
//
// Pins keep chunks resident without a reference, as long as the budget allows. When nothing else can
// be evicted, the weakest pin is given up: of the lowest class the one that expires first; a pin
// without expiry is the last of its class.

/// Time, position, chunk.
type End = (u64, Reverse<u32>, At);

/// Strength of a pin: class, end, position. Among equal pins the last one of a path is the weakest,
/// because its ancestors are usable without it.
type Hold = (u8, u64, Reverse<u32>, At);

/// The pin of a chunk.
fn hold_of(chunks: &Chunks, at: At) -> Option<Hold> {
    let row = chunks.chunk(at.slot)?;
    row.pin().map(|pin| (pin.priority, pin.until_ns, Reverse(row.position()), at))
}

/// Bytes that the pin of a chunk may keep from others: those of its cells in whole pieces.
fn pin_bytes(rows: &ChunkTable, slot: Slot) -> u64 {
    let cells = (0..rows.layout.layers()).map(|layer| rows.planes(Cell { chunk: slot, layer }));
    cells.map(|planes| planes.bytes().next_multiple_of(PIECE_BYTES)).sum()
}

impl StoreState {
    /// Pins the chunks of a range of tokens until a time, as long as the budget allows. Chunks that
    /// do not exist yet are pinned, too, if the table has room for all of them.
    pub fn pin(&mut self, at: u32, first: u64, tokens: u64, pin: Pin) -> Result<()> {
        let slots = self.rows_if_free(at, first, tokens)?;
        let table = self.namespaces[self.session(at)?.namespace as usize].table;
        self.pin_chunks(table, &slots, pin)
    }

    /// Pins blocks. Keys without a block are skipped.
    pub fn pin_blocks(&mut self, at: u32, keys: &[Key], pin: Pin) -> Result<()> {
        let (table, mut slots) = self.named(at, keys)?;
        slots.retain(|&slot| slot != NONE);
        slots.sort_unstable();
        slots.dedup();
        self.pin_chunks(table, &slots, pin)
    }

    /// Pins chunks: all, or none if pins would exceed their share of the last tier.
    fn pin_chunks(&mut self, table: u32, slots: &[Slot], pin: Pin) -> Result<()> {
        let rows = &self.tables[table as usize];
        let is_new = |slot: Slot| rows.chunks.chunk(slot).is_some_and(|row| row.pin().is_none());
        let new = slots.iter().filter(|&&slot| is_new(slot));
        let more: u64 = new.clone().map(|&slot| pin_bytes(rows, slot)).sum();
        let (pinned, limit) = (self.retention.pinned_bytes, self.pin_limit());
        if more > 0 && pinned.saturating_add(more) > limit {
            self.counters.rejected_pins += new.count() as u64;
            fail!(
                Budget,
                "a pin of {more} bytes: {pinned} bytes are pinned, and pins would exceed their share of \
                 {limit} bytes. Pin less, wait until pins end, or raise pins= in the store's spec"
            );
        }
        for &slot in slots {
            let place = At { table, slot };
            let rows = &mut self.tables[table as usize];
            let old = hold_of(&rows.chunks, place);
            rows.chunks.pin(slot, pin)?;
            let (new, bytes) = (hold_of(&rows.chunks, place), pin_bytes(rows, slot));
            match old {
                Some(old) => self.forget_pin(old),
                None => self.retention.pinned_bytes += bytes,
            }
            if let Some(new) = new {
                self.retention.pins.insert(new);
                self.retention.pin_ends.insert((new.1, new.0, place));
            }
            self.note_held(table, slot);
        }
        Ok(())
    }

    /// Bytes that pinned chunks may have: a share of the last tier, since a pin keeps a chunk there.
    fn pin_limit(&self) -> u64 {
        let tier = match &self.disk {
            Some(disk) => disk.stats().budget_bytes,
            None => self.config.host_bytes,
        };
        (tier as f64 * self.config.pins) as u64
    }

    fn forget_pin(&mut self, hold: Hold) {
        self.retention.pins.remove(&hold);
        self.retention.pin_ends.remove(&(hold.1, hold.0, hold.3));
    }

    /// Removes the pins of the chunks of a range of tokens, regardless of their owner.
    pub fn unpin_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<()> {
        for place in self.known_chunks(at, first, tokens)? {
            if let Some(hold) = hold_of(&self.tables[place.table as usize].chunks, place) {
                self.unpin(hold);
            }
        }
        self.settle();
        Ok(())
    }

    /// Ends pins that are due.
    pub(super) fn end_pins(&mut self) {
        while let Some(&(until, _, at)) = self.retention.pin_ends.first() {
            if until > self.now_ns {
                return;
            }
            self.retention.pin_ends.pop_first();
            if let Some(hold) = hold_of(&self.tables[at.table as usize].chunks, at) {
                self.unpin(hold);
            }
        }
    }

    /// Gives up the weakest pin when nothing else can be evicted: in the lowest class the pin that
    /// ends first, which has the least time left. A pin without an end is the last of its class.
    pub(super) fn drop_weakest_pin(&mut self) -> bool {
        let Some(&hold) = self.retention.pins.first() else { return false };
        self.unpin(hold);
        true
    }

    fn unpin(&mut self, hold: Hold) {
        let at = hold.3;
        self.forget_pin(hold);
        let rows = &mut self.tables[at.table as usize];
        let bytes = pin_bytes(rows, at.slot);
        match rows.chunks.unpin(at.slot) {
            Ok(_) => {
                self.retention.pinned_bytes = self.retention.pinned_bytes.saturating_sub(bytes)
            }
            Err(error) => log::error!("internal: a pin of a missing chunk: {error}"),
        }
        self.eviction.reclaim_targets.released();
        self.note_held(at.table, at.slot);
        self.tidy(at.table, at.slot);
    }

    /// Checks the pins and ends against the rows.
    pub(super) fn check_retention(&self) -> Result<()> {
        let (mut pins, mut bytes, mut ends) = (0, 0, 0);
        for (number, table) in (0u32..).zip(&self.tables) {
            for slot in table.chunks.slots() {
                let at = At { table: number, slot };
                if let Some(hold) = hold_of(&table.chunks, at) {
                    (pins, bytes) = (pins + 1, bytes + pin_bytes(table, slot));
                    if !self.retention.pins.contains(&hold) {
                        fail!(State, "the pin {hold:?} is not listed");
                    }
                }
                let end = table.ends[slot as usize];
                ends += usize::from(end != 0);
                if end != 0 && !self.retention.ends.contains(&self.end_of(at, end)) {
                    fail!(State, "the end {end} of {at:?} is not listed");
                }
                if end == 0 && self.retention.overdue.contains(&at) {
                    fail!(State, "{at:?} is overdue without an end");
                }
            }
        }
        let Retention { pins: all, pin_ends, pinned_bytes, ends: listed, .. } = &self.retention;
        let counts = (all.len(), pin_ends.len(), *pinned_bytes, listed.len());
        if counts != (pins, pins, bytes, ends) {
            fail!(
                State,
                "{counts:?} pins, their ends, bytes, chunks with ends: {pins} {bytes} {ends}"
            );
        }
        Ok(())
    }
}

// ---------- ends
//
// A session with a TTL gives an end to the chunks that it stores first. Each later put or get of a
// session with a TTL moves the end, never to an earlier time. A put without a TTL removes the end:
// a session cannot shorten the life of KV that another session stored without an end. A chunk that is
// referenced, pinned, in flight, or continued by chunks that stay, is removed when that is over.

/// Time after which a chunk that was in flight at its end is tried again.
const RETRY_NS: u64 = 1_000_000_000;
/// The same for a chunk that was held. It is tried again at once when it is released.
const HELD_RETRY_NS: u64 = 60 * RETRY_NS;
/// Most chunks that one tick removes, since it holds the store's lock. The others follow in the next
/// ticks.
const AT_ONCE: usize = 512;

impl StoreState {
    /// Notes that a transfer stores or uses chunks: their ends, and their tenant's use.
    pub(super) fn note_retention(&mut self, number: u32) {
        let spec = &mut self.transfers.table[number].spec;
        let (table, kind, ttl_ns) = (spec.table, spec.kind, spec.ttl_ns);
        let is_use = ttl_ns > 0 || self.quotas.is_used();
        if kind == TransferKind::Prefetch || kind == TransferKind::Get && !is_use {
            return;
        }
        let slots = std::mem::take(&mut spec.slots);
        let until_ns = self.now_ns.saturating_add(ttl_ns);
        // From the end, so that the first chunks of a path are the last used of a tenant.
        for &slot in slots.iter().rev().filter(|&&slot| slot != NONE) {
            let rows = &mut self.tables[table as usize];
            let (end, mut is_new) = (rows.ends[slot as usize], false);
            if kind == TransferKind::Put && !rows.has(slot, note::STORED) {
                is_new = rows.chunks.chunk(slot).is_some_and(|row| row.cells_somewhere() == 0);
                rows.set(slot, note::STORED);
            }
            let at = At { table, slot };
            // The end of a chunk that was held at its end has passed.
            let end = if self.retention.overdue.contains(&at) { end.min(1) } else { end };
            match ttl_ns {
                0 if end != 0 && kind == TransferKind::Put => self.set_end(at, 0),
                0 => {}
                _ if is_new || end != 0 => self.set_end(at, end.max(until_ns)),
                _ => {}
            }
            self.used_by_tenant(at);
        }
        self.transfers.table[number].spec.slots = slots;
    }

    fn end_of(&self, at: At, end: u64) -> End {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        (end, Reverse(row.map_or(0, |row| row.position())), at)
    }

    /// Sets the end of a chunk; 0 = none.
    fn set_end(&mut self, at: At, end: u64) {
        let old = &mut self.tables[at.table as usize].ends[at.slot as usize];
        let old = std::mem::replace(old, end);
        if old != 0 {
            let listed = self.end_of(at, old);
            self.retention.ends.remove(&listed);
            self.retention.overdue.remove(&at);
        }
        if end != 0 {
            let listed = self.end_of(at, end);
            self.retention.ends.insert(listed);
        }
    }

    /// A chunk may be held by nothing any more: if its end has passed, the next tick removes it.
    pub(super) fn released_at_end(&mut self, at: At) {
        if self.retention.overdue.contains(&at) {
            self.set_end(at, self.now_ns.max(1));
        }
    }

    /// When the next chunk ends.
    pub fn next_end_ns(&self) -> Option<u64> {
        self.retention.ends.first().map(|&(end, ..)| end)
    }

    /// Removes chunks that are due from all tiers, the first ones of them.
    pub(super) fn end_chunks(&mut self) {
        if self.next_end_ns().is_none_or(|end| end > self.now_ns) {
            return;
        }
        let due = self.retention.ends.iter().take_while(|&&(end, ..)| end <= self.now_ns);
        let mut due: Vec<End> = due.take(AT_ONCE).copied().collect();
        due.sort_unstable_by_key(|&(_, position, at)| (at.table, position, at.slot));
        for all in due.chunk_by(|a, b| a.2.table == b.2.table) {
            let table = all[0].2.table;
            // A removed row must not be looked for in the set.
            all.iter().for_each(|&(_, _, at)| self.set_end(at, 0));
            let slots: Vec<Slot> = all.iter().map(|(_, _, at)| at.slot).collect();
            let cleared = self.remove_chunks(table, &slots, Cleared::default());
            self.counters.expired_chunks += cleared.removed;
            slots.iter().for_each(|&slot| self.retry_end(At { table, slot }));
        }
    }

    /// Lists a chunk again that could not be removed at its end. A row without KV keeps its end, too,
    /// for a put that is repeated.
    fn retry_end(&mut self, at: At) {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        let Some(is_moving) = row.map(|row| row.is_moving()) else { return };
        let retry_ns = if is_moving { RETRY_NS } else { HELD_RETRY_NS };
        self.set_end(at, self.now_ns.saturating_add(retry_ns));
        self.retention.overdue.insert(at);
    }

    /// Forgets the end and the quota of a chunk whose row is removed.
    pub(super) fn forget_retention(&mut self, at: At) {
        self.set_end(at, 0);
        self.forget_owner(at);
    }
}
