//! Blocks: chunks that an engine names itself. Each is there for itself: none continues
//! another, so they leave and come in any order.

use crate::base::item::MAX_ITEMS;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Way};
use crate::fail;
use crate::format::keys::Key;
use crate::kv::core::clear::Cleared;
use crate::kv::core::moves::{Deed, Level, MoveSpec};
use crate::kv::core::views::Views;
use crate::kv::core::{Core, Space};
use crate::meta::chunks::{NewChunk, id_of};
use crate::meta::index::{NONE, Slot};

/// Most blocks of one call.
pub const MAX_BLOCKS: usize = MAX_ITEMS;

/// Blocks, and where the engine has them.
pub struct BlockMove {
    /// Their keys; one that is there twice is moved twice.
    pub keys: Vec<Key>,
    /// The first layer.
    pub first_layer: usize,
    /// How many.
    pub layers: usize,
    /// Where the engine has them, one after the other.
    pub views: Arc<Views>,
    /// An event of the store's device that the copies are behind.
    pub after: Option<Event>,
}

impl Core {
    /// Begins a move of blocks for a session, which says who asks; the number of the move.
    /// With a ticket it waits.
    fn begin_blocks(
        &mut self,
        at: u32,
        (deed, level, lane): (Deed, Level, usize),
        blocks: BlockMove,
        ticket: Option<u64>,
    ) -> Result<u32> {
        let session = self.session(at)?;
        let (space, who) = (session.space, session.who);
        let board = self.spaces[space as usize].board;
        let BlockMove { keys, first_layer, layers, views, after } = blocks;
        if keys.is_empty() || keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks; a move has 1 to {MAX_BLOCKS}", keys.len());
        }
        let layout = &self.boards[board as usize].layout;
        if deed != Deed::Prefetch {
            let chunks = keys.len() as u32;
            let Some(tokens) = chunks.checked_mul(layout.chunk_tokens()) else {
                fail!(Limit, "{chunks} blocks of {} tokens", layout.chunk_tokens());
            };
            let way = if deed == Deed::Put { Way::Gather } else { Way::Scatter };
            views.check(layout, first_layer, tokens, chunks, way)?;
        }
        let mut slots = Vec::new();
        slots.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        slots.resize(keys.len(), NONE);
        let found = match deed {
            Deed::Put => self.hold_blocks(space, &keys, &mut slots),
            _ => {
                self.find_blocks(space, &keys, &mut slots);
                Ok(())
            }
        };
        let held = if deed == Deed::Put { slots.clone() } else { Vec::new() };
        let asked = match slots.contains(&NONE) {
            true => keys.iter().map(id_of).collect(),
            false => Vec::new(),
        };
        let spec = MoveSpec {
            board,
            flow: at,
            who,
            lane,
            deed,
            level,
            slots,
            by_chunk: true,
            asked,
            first_layer,
            layers,
            by_layer: false,
            needed_from: Vec::new(),
            views,
            after,
            ticket,
        };
        let begun = found.and_then(|()| self.submit(spec));
        // The move holds them now; where there is none, rows without cells go again.
        for &slot in held.iter().filter(|&&slot| slot != NONE) {
            self.let_go(board, slot);
        }
        begun
    }

    /// Begins a move of blocks; its number.
    pub fn submit_blocks(
        &mut self,
        at: u32,
        how: (Deed, Level, usize),
        blocks: BlockMove,
    ) -> Result<u32> {
        self.begin_blocks(at, how, blocks, None)
    }

    /// The same, as [`Core::submit_waiting`] does.
    pub fn submit_blocks_waiting(
        &mut self,
        at: u32,
        how: (Deed, Level, usize),
        blocks: BlockMove,
    ) -> Result<(u32, u64)> {
        let ticket = self.next_ticket();
        let number = self.begin_blocks(at, how, blocks, Some(ticket))?;
        Ok((number, ticket))
    }

    /// The rows of blocks that are there, NONE for the others.
    fn find_blocks(&self, space: u32, keys: &[Key], slots: &mut [Slot]) {
        let board = self.spaces[space as usize].board;
        let chunks = &self.boards[board as usize].chunks;
        chunks.find_many(keys, slots);
        for slot in slots {
            if chunks.chunk(*slot).is_none_or(|row| row.namespace() != space) {
                *slot = NONE;
            }
        }
    }

    /// Makes rows for blocks that have none, and holds all. Those that are held when it
    /// fails are in `slots`.
    fn hold_blocks(&mut self, space: u32, keys: &[Key], slots: &mut [Slot]) -> Result<()> {
        let Space { board, holes, .. } = self.spaces[space as usize];
        let mut found = Vec::new();
        found.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        found.resize(keys.len(), NONE);
        self.find_blocks(space, keys, &mut found);
        let rows = &mut self.boards[board as usize];
        let valid_tokens = rows.layout.chunk_tokens();
        for (slot, &found) in slots.iter_mut().zip(&found).filter(|(_, found)| **found != NONE) {
            rows.chunks.retain(found)?;
            *slot = found;
        }
        // Whoever has to make room is not to choose those.
        found.iter().filter(|&&slot| slot != NONE).for_each(|&slot| self.note_held(board, slot));
        let unknown = found.iter().filter(|&&slot| slot == NONE).count();
        self.rows_for(unknown)?;
        let chunks = &mut self.boards[board as usize].chunks;
        for (slot, key) in slots.iter_mut().zip(keys).filter(|(slot, _)| **slot == NONE) {
            let new = NewChunk {
                key: *key,
                namespace: space,
                parent: NONE,
                position: 0,
                valid_tokens,
                owner: NONE,
                holes,
            };
            let added = chunks.add(&new)?.slot();
            chunks.retain(added)?;
            *slot = added;
        }
        Ok(())
    }

    /// Lets blocks go that nobody holds: they leave all tiers.
    pub fn drop_blocks(&mut self, at: u32, keys: &[Key]) -> Result<Cleared> {
        let space = self.session(at)?.space;
        if keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks; at most {MAX_BLOCKS} go at once", keys.len());
        }
        let mut slots = Vec::new();
        slots.try_reserve_exact(keys.len()).map_err(|_| Status::NoMem)?;
        slots.resize(keys.len(), NONE);
        self.find_blocks(space, keys, &mut slots);
        slots.retain(|&slot| slot != NONE);
        // One that is named twice is counted once.
        slots.sort_unstable();
        slots.dedup();
        let board = self.spaces[space as usize].board;
        let cleared = self.take_away(board, &slots, Cleared::default());
        self.settle();
        Ok(cleared)
    }
}
