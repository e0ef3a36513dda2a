//! Named blocks: chunks that the engine names itself. A block continues no other block, so blocks
//! are evicted and stored in any order.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::item::MAX_ITEMS;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::fail;
use crate::format::keys::Key;
use crate::meta::chunks::{NewChunk, WHOLE, id_of};
use crate::meta::index::{NONE, Slot};
use crate::policy::Hint;
use crate::policy::evictor::RequestContext;
use crate::store::state::batches::Views;
use crate::store::state::disk_gc::Cleared;
use crate::store::state::transfer::{Level, TransferKind, TransferSpec};
use crate::store::state::{Namespace, StoreState};

/// Most blocks of one call.
pub const MAX_BLOCKS: usize = MAX_ITEMS;

/// Blocks to move, with the engine's tensors.
pub struct BlockTransfer {
    /// Their keys. A key that occurs twice is moved twice.
    pub keys: Vec<Key>,
    /// First layer.
    pub first_layer: usize,
    /// Number of layers.
    pub layers: usize,
    /// The engine's tensors, with the blocks one after the other.
    pub views: Arc<Views>,
    /// Device event before which no copy may run.
    pub after: Option<Event>,
}

impl StoreState {
    /// Begins a transfer of blocks on behalf of a session and returns its number. With a ticket it
    /// waits.
    fn begin_blocks(
        &mut self,
        at: u32,
        (kind, level, lane): (TransferKind, Level, usize),
        blocks: BlockTransfer,
        ticket: Option<u64>,
    ) -> Result<u32> {
        let session = self.session(at)?;
        let (namespace, context, ttl_ns) = (session.namespace, session.context, session.ttl_ns);
        let table = self.namespaces[namespace as usize].table;
        let BlockTransfer { keys, first_layer, layers, views, after } = blocks;
        if keys.is_empty() || keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks: a transfer has 1 to {MAX_BLOCKS}", keys.len());
        }
        let (chunks, each) = (keys.len() as u32, self.tables[table as usize].layout.chunk_tokens());
        let Some(tokens) = chunks.checked_mul(each) else {
            fail!(
                Limit,
                "{chunks} blocks of {each} tokens are more tokens than a transfer may have"
            );
        };
        self.check_views((table, kind), &views, first_layer, tokens, chunks)?;
        let slots = self.find_blocks(namespace, &keys)?;
        let requested = match kind == TransferKind::Get && slots.contains(&NONE) {
            true => keys.iter().map(id_of).collect(),
            false => Vec::new(),
        };
        let mut spec = TransferSpec {
            table,
            flow: at,
            context,
            ttl_ns,
            lane,
            kind,
            level,
            slots,
            by_chunk: true,
            requested,
            first_layer,
            layers,
            by_layer: false,
            needed_from: Vec::new(),
            views,
            after,
            ticket,
        };
        // Checked before rows are added: a request that is refused must evict nothing.
        self.check_transfer(&spec, spec.slots.len())?;
        let mut held = Vec::new();
        let holds = match kind {
            TransferKind::Put => self.hold_blocks(namespace, &keys, &spec.slots, &mut held),
            _ => Ok(()),
        };
        if holds.is_ok() && kind == TransferKind::Put {
            spec.slots.clone_from(&held);
        }
        let begun = holds.and_then(|()| self.submit(spec));
        // The transfer references them now. On failure, rows without cells are removed.
        for &slot in held.iter().filter(|&&slot| slot != NONE) {
            self.release_chunk(table, slot);
        }
        begun
    }

    /// Begins a transfer of blocks and returns its number.
    pub fn submit_blocks(
        &mut self,
        at: u32,
        terms: (TransferKind, Level, usize),
        blocks: BlockTransfer,
    ) -> Result<u32> {
        self.begin_blocks(at, terms, blocks, None)
    }

    /// The same, waiting as [`StoreState::submit_waiting`] does.
    pub fn submit_blocks_waiting(
        &mut self,
        at: u32,
        terms: (TransferKind, Level, usize),
        blocks: BlockTransfer,
    ) -> Result<(u32, u64)> {
        let ticket = self.dependencies.next_ticket();
        let number = self.begin_blocks(at, terms, blocks, Some(ticket))?;
        Ok((number, ticket))
    }

    /// Rows of blocks, NONE for those without one.
    pub(super) fn find_blocks(&self, namespace: u32, keys: &[Key]) -> Result<Vec<Slot>> {
        let table = self.namespaces[namespace as usize].table;
        let chunks = &self.tables[table as usize].chunks;
        let mut slots = Vec::new();
        slots.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        slots.resize(keys.len(), NONE);
        chunks.find_many(keys, &mut slots);
        for slot in &mut slots {
            if chunks.chunk(*slot).is_none_or(|row| row.namespace() != namespace) {
                *slot = NONE;
            }
        }
        Ok(slots)
    }

    /// Adds rows for blocks without one, and references all. On failure `held` has those that are
    /// referenced.
    fn hold_blocks(
        &mut self,
        namespace: u32,
        keys: &[Key],
        found: &[Slot],
        held: &mut Vec<Slot>,
    ) -> Result<()> {
        let table = self.namespaces[namespace as usize].table;
        held.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        held.resize(keys.len(), NONE);
        let rows = &mut self.tables[table as usize];
        for (held, &found) in held.iter_mut().zip(found).filter(|(_, found)| **found != NONE) {
            rows.chunks.retain(found)?;
            *held = found;
        }
        // Policies must know that these are referenced before they choose victims for the new rows.
        found.iter().filter(|&&slot| slot != NONE).for_each(|&slot| self.note_held(table, slot));
        let unknown = keys.iter().zip(found).filter(|(_, found)| **found == NONE);
        let unknown: BTreeSet<&Key> = unknown.map(|(key, _)| key).collect();
        self.reserve_rows(unknown.len())?;
        for (held, key) in held.iter_mut().zip(keys).filter(|(held, _)| **held == NONE) {
            let slot = self.add_block(namespace, key)?;
            self.tables[table as usize].chunks.retain(slot)?;
            *held = slot;
        }
        Ok(())
    }

    /// Row of a block, added if there is none.
    pub(super) fn add_block(&mut self, namespace: u32, key: &Key) -> Result<Slot> {
        let Namespace { table, holes, .. } = self.namespaces[namespace as usize];
        let rows = &mut self.tables[table as usize];
        let new = NewChunk {
            key: *key,
            namespace,
            parent: NONE,
            position: 0,
            valid_tokens: rows.layout.chunk_tokens(),
            owner: NONE,
            holes,
        };
        let added = rows.chunks.add(&new)?;
        self.namespaces.row_added(namespace, added);
        Ok(added.slot())
    }

    /// Removes blocks from all tiers, if nothing references them.
    pub fn drop_blocks(&mut self, at: u32, keys: &[Key]) -> Result<Cleared> {
        let (table, mut slots) = self.named(at, keys)?;
        slots.retain(|&slot| slot != NONE);
        // A block that is named twice is counted once.
        slots.sort_unstable();
        slots.dedup();
        let cleared = self.remove_chunks(table, &slots, Cleared::default());
        self.settle();
        Ok(cleared)
    }

    /// Passes a hint about blocks to the policies. It does not concern the session, which may have
    /// other blocks.
    pub fn hint_blocks(&mut self, at: u32, keys: &[Key], hint: &Hint) -> Result<()> {
        let (table, slots) = self.named(at, keys)?;
        let context = RequestContext { session: None, ..self.session(at)?.context };
        self.notify_hint(table, &slots, &context, hint)
    }
}

// ---------- block references
//
// References to named blocks: a session keeps blocks resident in some tier until it releases them. A
// referenced block may move between tiers.

/// Most holds of a session. A block that is held twice has two.
pub const MAX_HOLDS: usize = 1 << 20;

/// Blocks that a session holds by name.
#[derive(Default)]
pub(super) struct Holds {
    /// Holds of each block. Together they are one reference.
    times: BTreeMap<Slot, u32>,
    /// All holds.
    count: usize,
}

impl Holds {
    /// The held blocks.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.times.keys().copied()
    }

    fn times(&self, slot: Slot) -> u32 {
        self.times.get(&slot).copied().unwrap_or(0)
    }
}

impl StoreState {
    /// Holds those of some blocks that exist, once more each. `found` says which, as
    /// [`StoreState::exists`] does. On failure nothing changes.
    pub fn hold_names(&mut self, at: u32, keys: &[Key], found: &mut [u8]) -> Result<()> {
        let (table, mut slots) = self.named(at, keys)?;
        let chunks = &mut self.tables[table as usize].chunks;
        for (slot, found) in slots.iter_mut().zip(found) {
            *found = chunks.trusted_tiers(*slot);
            if *found & WHOLE == 0 {
                (*slot, *found) = (NONE, 0);
            }
        }
        slots.retain(|&slot| slot != NONE);
        let holds = &self.sessions[at].holds;
        if holds.count + slots.len() > MAX_HOLDS {
            let more = slots.len();
            fail!(
                Limit,
                "{more} more holds and {} held: a session has at most {MAX_HOLDS}",
                holds.count
            );
        }
        let new: BTreeSet<Slot> =
            slots.iter().copied().filter(|&slot| holds.times(slot) == 0).collect();
        for (held, &slot) in new.iter().enumerate() {
            if let Err(error) = chunks.retain(slot) {
                new.iter().take(held).for_each(|&slot| self.release_chunk(table, slot));
                return Err(error);
            }
        }
        new.iter().for_each(|&slot| self.note_held(table, slot));
        let holds = &mut self.sessions[at].holds;
        holds.count += slots.len();
        slots.iter().for_each(|&slot| *holds.times.entry(slot).or_default() += 1);
        Ok(())
    }

    /// Releases one hold of each block. INVALID = the session has none of one of them, and nothing
    /// changes; otherwise a caller could release what others hold.
    pub fn release_names(&mut self, at: u32, keys: &[Key]) -> Result<()> {
        let (table, slots) = self.named(at, keys)?;
        let mut less: BTreeMap<Slot, u32> = BTreeMap::new();
        for (i, &slot) in slots.iter().enumerate() {
            let (less, held) = (less.entry(slot).or_default(), self.sessions[at].holds.times(slot));
            *less += 1;
            if *less > held {
                fail!(Invalid, "block {i} is held {held} times by this session, not {less}");
            }
        }
        for (slot, less) in less {
            let holds = &mut self.sessions[at].holds;
            holds.count -= less as usize;
            let left = holds.times(slot) - less;
            if left == 0 {
                holds.times.remove(&slot);
                self.release_chunk(table, slot);
            } else {
                holds.times.insert(slot, left);
            }
        }
        self.settle();
        Ok(())
    }

    /// Releases all holds of a session.
    pub(super) fn end_holds(&mut self, table: u32, holds: Holds) {
        holds.slots().for_each(|slot| self.release_chunk(table, slot));
    }

    /// Chunk table of a session and rows of blocks there, NONE for those without one.
    pub(super) fn named(&self, at: u32, keys: &[Key]) -> Result<(u32, Vec<Slot>)> {
        let namespace = self.session(at)?.namespace;
        if keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks: a call has at most {MAX_BLOCKS}", keys.len());
        }
        Ok((self.namespaces[namespace as usize].table, self.find_blocks(namespace, keys)?))
    }

    /// Checks that held blocks have rows that may be referenced.
    pub(super) fn check_holds(&self) -> Result<()> {
        let mut refs: BTreeMap<(u32, Slot), u32> = BTreeMap::new();
        for (number, session) in self.sessions.iter() {
            let Holds { times, count } = &session.holds;
            let all: usize = times.values().map(|&times| times as usize).sum();
            if all != *count || times.values().any(|&times| times == 0) {
                fail!(State, "session {number} counts {count} holds and has {all}");
            }
            let table = self.namespaces[session.namespace as usize].table;
            for slot in session.path.slots().iter().copied().chain(session.holds.slots()) {
                *refs.entry((table, slot)).or_default() += u32::from(slot != NONE);
            }
        }
        for ((table, slot), refs) in refs.into_iter().filter(|&(_, refs)| refs > 0) {
            let held = self.tables[table as usize].chunks.chunk(slot).map_or(0, |row| row.refs());
            if held < refs {
                fail!(
                    State,
                    "sessions reference chunk {slot} of table {table} {refs} times, not {held}"
                );
            }
        }
        Ok(())
    }
}
