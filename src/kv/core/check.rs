//! What must hold whenever nothing is under way; for tests and simulations.

use std::collections::BTreeMap;

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::format::segment::BLOCK_BYTES;
use crate::kv::core::grain::{Grain, cell_id};
use crate::kv::core::told::flag_of;
use crate::kv::core::{At, Core};
use crate::meta::chunks::{Cell, Place};

impl Core {
    /// What is not at rest, in words.
    pub fn what_waits(&self) -> String {
        format!(
            "{} moves, {} jobs, {} hungry, {} cells waited for, {} chunks to go down, {} leaving, \
             {} behind events, {:?} batches, {} to be synced, {}, {}",
            self.moves.len(),
            self.jobs.len(),
            self.hungry.len(),
            self.waiting.len(),
            self.downs.len(),
            self.leaving.len(),
            self.cells_behind(),
            self.under_way,
            self.commits.len(),
            self.upkeep.words(),
            self.far.as_ref().map_or("no remote".into(), |far| far.words()),
        )
    }

    /// Checks the tables against each other and against the tiers.
    pub fn check(&self) -> Result<()> {
        self.check_lines()?;
        self.check_near()?;
        self.check_holds()?;
        self.check_spaces()?;
        let (mut pieces, mut blocks) = (0, 0);
        for (number, board) in self.boards.iter().enumerate() {
            let (p, b) = self.check_board(number)?;
            (pieces, blocks) = (pieces + p, blocks + b);
            if self.is_idle() && board.chunks.counts().moving != 0 {
                fail!(State, "{} ways of board {number} never ended", board.chunks.counts().moving);
            }
        }
        if !self.is_idle() {
            return Ok(());
        }
        let stats = self.host.stats();
        if stats.live_pieces != pieces {
            fail!(State, "{} pieces are in use, {pieces} cells are in memory", stats.live_pieces);
        }
        if let Some(disk) = &self.disk {
            let live: u64 = disk.segments().iter().map(|s| u64::from(s.live_blocks)).sum();
            if live != blocks {
                fail!(State, "{live} blocks of the disk live, cells there have {blocks}");
            }
        }
        self.check_nothing_behind()?;
        if let Some(far) = self.far.as_ref().filter(|far| !far.is_bare()) {
            fail!(State, "something of the remote never ended: {}", far.words());
        }
        let waits = (self.jobs.len(), self.hungry.len(), self.waiting.len(), self.woken.len());
        if waits != (0, 0, 0, 0) || self.hungry_bytes != 0 {
            fail!(State, "jobs {waits:?} are left, for {} bytes", self.hungry_bytes);
        }
        if !self.leaving.is_empty() || self.leaving_bytes != 0 || !self.chunk_waits.is_empty() {
            fail!(State, "{} chunks leave for ever", self.leaving.len());
        }
        Ok(())
    }

    /// Pieces of memory and blocks of the disk that a board's cells have.
    fn check_board(&self, number: usize) -> Result<(u64, u64)> {
        let board = &self.boards[number];
        let (mut pieces, mut blocks) = (0, 0);
        let is_held = |&slot: &u32| board.chunks.chunk(slot).is_some_and(|row| row.refs() > 0);
        let (held, counted) = (board.chunks.slots().filter(is_held), board.chunks.counts().held);
        let held = held.count() as u64;
        if held != counted {
            fail!(State, "{held} chunks of board {number} are held, {counted} are counted");
        }
        for slot in board.chunks.slots() {
            for layer in 0..board.layout.layers() {
                let cell = Cell { chunk: slot, layer };
                pieces += u64::from(board.chunks.place(cell, Tier::Host)?.is_some());
                if let Some(Place::Disk { coded, .. }) = board.chunks.place(cell, Tier::Disk)? {
                    blocks += board.disk_bytes(cell, coded).div_ceil(BLOCK_BYTES as u64);
                }
            }
            let Some(row) = board.chunks.chunk(slot) else { continue };
            let is_kept = self.is_kept_by_hint(At { board: number as u32, slot });
            if row.cells_somewhere() == 0 && board.chunks.may_leave(slot) && !is_kept {
                fail!(State, "chunk {slot} of board {number} has no cells, and nobody needs it");
            }
            for tier in [Tier::Device, Tier::Host, Tier::Disk] {
                if row.cells()[tier as usize] > 0 {
                    self.check_known(At { board: number as u32, slot }, tier)?;
                }
            }
        }
        Ok((pieces, blocks))
    }

    /// Whether what is counted of namespaces is so.
    fn check_spaces(&self) -> Result<()> {
        let (mut rows, mut boards) = (BTreeMap::new(), vec![0; self.boards.len()]);
        for (number, board) in (0u32..).zip(&self.boards) {
            for row in board.chunks.slots().filter_map(|slot| board.chunks.chunk(slot)) {
                *rows.entry((row.namespace(), number)).or_insert(0u32) += 1;
            }
        }
        let mut sessions: BTreeMap<u32, u32> = BTreeMap::new();
        for (_, session) in self.sessions.iter() {
            *sessions.entry(session.space).or_default() += 1;
        }
        let mut known = 0;
        for (at, space) in self.spaces.known() {
            known += 1;
            boards[space.board as usize] += 1;
            let has = rows.remove(&(at, space.board)).unwrap_or(0);
            let open = sessions.remove(&at).unwrap_or(0);
            if (has, open) != (space.rows, space.sessions) {
                fail!(State, "namespace {at} has {has} chunks and {open} sessions: {space:?}");
            }
            if self.spaces.find(&space.key) != Some(at) || space.is_bare() && !space.is_listed {
                fail!(State, "namespace {at} is lost: {space:?}");
            }
        }
        if !rows.is_empty() || !sessions.is_empty() {
            fail!(State, "chunks {rows:?}, sessions {sessions:?} of no namespace");
        }
        let counted = self.boards.iter().map(|board| board.spaces);
        if known != self.spaces.len() || !counted.eq(boards) {
            fail!(State, "{known} namespaces, and {} by their keys", self.spaces.len());
        }
        Ok(())
    }

    /// Whether a tier's policy knows what is there of a chunk, or it leaves.
    fn check_known(&self, at: At, tier: Tier) -> Result<()> {
        let board = &self.boards[at.board as usize];
        let shelf = match tier {
            Tier::Host => Some(&self.host_shelf),
            Tier::Device => self.near.as_ref().map(|near| &near.shelf),
            _ => self.disk_shelf.as_ref(),
        };
        let Some(shelf) = shelf else { return Ok(()) };
        let is_known = board.has(at.slot, flag_of(tier));
        let in_its_grain = |layer| match shelf.grain {
            Grain::Chunk => is_known,
            Grain::Cell => is_known && shelf.knows(cell_id(board.id(at.slot), layer)),
            Grain::Session => is_known && shelf.groups.of(at).is_some_and(|id| shelf.knows(id)),
        };
        for (layer, marks) in board.chunks.marks(at.slot).unwrap_or_default().iter().enumerate() {
            let is_there = marks.there() & 1 << tier as u8 != 0;
            let leaves =
                tier != Tier::Device && self.leaving.get(&at).is_some_and(|leave| leave.has(layer));
            if is_there && !leaves && !in_its_grain(layer) {
                fail!(State, "layer {layer} of {at:?} is in {}, and no policy knows", tier.name());
            }
        }
        Ok(())
    }
}
