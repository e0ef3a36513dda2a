//! Blocks at the remote: asked for by the names that engines give them. What is there gets a row
//! that nobody holds: the hint alone keeps it, until rows are needed for others.

use std::collections::VecDeque;

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::format::keys::Key;
use crate::meta::index::{NONE, Slot};
use crate::store::state::blocks::MAX_BLOCKS;
use crate::store::state::chunk_table::note;
use crate::store::state::remote_lookup::{Asked, Asker, Inquiry, WINDOW, Window, noted_chunks};
use crate::store::state::{At, StoreState};
use crate::tier::remote::Trouble;

/// Blocks that moves ask for at once, at most.
const MOST_ASKED: usize = 1 << 20;

/// Blocks that a move asks for.
#[derive(Default)]
pub(super) struct Named {
    space: u32,
    keys: Vec<Key>,
}

/// Rows of blocks that were located, the earliest first, and which use of its slot each is.
#[derive(Default)]
pub(super) struct Located(VecDeque<(At, u32)>);

impl StoreState {
    /// Begins a move that ends when it is known which of some blocks are here or at the remote.
    /// It says of each how that went, NOT_FOUND for one that is in neither, and goes on when the
    /// session is closed.
    pub fn locate_blocks(&mut self, at: u32, keys: Vec<Key>) -> Result<u32> {
        let space = self.session(at)?.space;
        if keys.is_empty() || keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks; a move has 1 to {MAX_BLOCKS}", keys.len());
        }
        let table = self.spaces[space as usize].table;
        let mut slots = self.find_blocks(space, &keys)?;
        let asks = slots.iter().any(|&slot| !self.is_found(table, slot));
        let asking = self.remote.as_ref().filter(|_| asks).map(|remote| &remote.asking);
        let waiting: usize = asking
            .iter()
            .flat_map(|all| all.inquiries.values())
            .map(|one| one.named.keys.len())
            .sum();
        if waiting + keys.len() > MOST_ASKED {
            fail!(
                Again,
                "{waiting} blocks are asked for, and {} more; {MOST_ASKED} can be",
                keys.len()
            );
        }
        slots.fill(NONE);
        let number = self.begin_locating(at, slots)?;
        match self.remote.as_mut().filter(|_| asks) {
            Some(remote) => {
                remote.asking.serial += 1;
                let (serial, named) = (remote.asking.serial, Named { space, keys });
                let inquiry = Inquiry { serial, is_busy: true, named, ..Inquiry::default() };
                remote.asking.inquiries.insert(Asker::Blocks(number), inquiry);
                remote.asking.line.push_back(Asker::Blocks(number));
                remote.asking.is_urgent = true;
            }
            None => self.end_locating(number, &Named { space, keys }, Status::NotFound),
        }
        self.settle();
        Ok(number)
    }

    /// Whether all of a chunk is here or, where that counts, at the remote as far as is known.
    pub(super) fn is_found(&self, table: u32, slot: Slot) -> bool {
        let rows = &self.tables[table as usize];
        let marks = rows.chunks.marks(slot).unwrap_or_default();
        marks.len() == rows.layout.layers()
            && marks
                .iter()
                .all(|one| one.there() != 0 || one.is_remote() && rows.chunks.counts_remote())
    }

    /// The row of a block, NONE where there is none.
    fn find_block(&self, space: u32, key: &Key) -> Slot {
        let chunks = &self.tables[self.spaces[space as usize].table as usize].chunks;
        let is_it = |slot: &Slot| chunks.chunk(*slot).is_some_and(|row| row.namespace() == space);
        chunks.find(key).filter(is_it).unwrap_or(NONE)
    }

    fn named_by(&self, number: u32) -> Option<&Inquiry> {
        self.remote.as_ref()?.asking.inquiries.get(&Asker::Blocks(number))
    }

    /// Whether a move asks for blocks of a namespace, whose session may be closed.
    pub(super) fn is_asked_for(&self, space: u32) -> bool {
        let first = Asker::Blocks(0);
        self.remote.as_ref().is_some_and(|remote| {
            remote.asking.inquiries.range(first..).any(|(_, one)| one.named.space == space)
        })
    }

    /// A chunk leaves the table: what the remote has of it is asked for when it is wanted again.
    pub(super) fn forget_remote(&mut self, at: At) {
        let before = self.remote_cells(at);
        if before > 0 {
            self.unhint(at, 0..self.tables[at.table as usize].layout.layers() as u32);
            self.note_remote_index(at, before);
        }
    }

    /// A board will be another layout's: what was located of this one is gone.
    pub(super) fn forget_located_of(&mut self, table: u32) {
        if let Some(remote) = &mut self.remote {
            remote.located.0.retain(|(at, _)| at.table != table);
        }
    }

    /// The next blocks of a move: which to ask for.
    pub(super) fn window_of_blocks(&mut self, number: u32) -> Option<Window> {
        let space = self.named_by(number)?.named.space;
        let table = self.spaces[space as usize].table;
        let (shape, names) = (self.remote_shape(table)?, self.remote_names(space)?);
        let (remote, inquiry) = (self.remote.as_ref()?, self.named_by(number)?);
        let (config, cut) = (&remote.config, shape.cut(shape.objects() - 1));
        let mut window = Window { end: inquiry.next, ..Window::default() };
        let most_there = noted_chunks(self.tables[table as usize].layout.layers());
        for (chunk, key) in inquiry.named.keys.iter().enumerate().skip(inquiry.next) {
            if window.asked.len() >= WINDOW || window.there.len() >= most_there {
                window.is_cut = true;
                break;
            }
            window.end = chunk + 1;
            let is_known = self.is_found(table, self.find_block(space, key));
            // One that is named twice is asked for once.
            if is_known || window.asked.iter().any(|one| one.key == *key) {
                continue;
            }
            let name = names.name(key, &cut);
            match remote.known.get(&name, self.now_ns, config.fresh_ns, config.absent_ns) {
                Some(true) if remote.is_well() => window.there.push(chunk),
                Some(false) => {}
                _ => {
                    window.asked.push(Asked { chunk, key: *key, name, result: Err(Trouble::Later) })
                }
            }
        }
        Some(window)
    }

    /// What was heard of blocks of a move; whether more are to be asked for.
    pub(super) fn heard_of_blocks(&mut self, number: u32, asked: &[Asked]) -> bool {
        let there = asked.iter().filter(|one| one.result == Ok(true)).map(|one| one.chunk);
        let there: Vec<usize> = there.collect();
        self.note_blocks(number, &there);
        let remote = self.remote.as_mut();
        let inquiry =
            remote.and_then(|remote| remote.asking.inquiries.get_mut(&Asker::Blocks(number)));
        let (Some(inquiry), Some(last)) = (inquiry, asked.last()) else { return false };
        inquiry.next = last.chunk + 1;
        inquiry.next < inquiry.named.keys.len()
    }

    /// The remote has some blocks of a move, as far as is known: they get rows, if nobody has to
    /// leave for those but others that were located.
    pub(super) fn note_blocks(&mut self, number: u32, chunks: &[usize]) {
        for &chunk in chunks {
            let Some(Named { space, keys }) = self.named_by(number).map(|one| &one.named) else {
                return;
            };
            let (space, Some(key)) = (*space, keys.get(chunk).copied()) else { return };
            let table = self.spaces[space as usize].table;
            let slot = match self.find_block(space, &key) {
                NONE if !self.rows_for_hints(1) => return,
                NONE => self.add_block(space, &key),
                slot => Ok(slot),
            };
            match slot {
                Ok(slot) => self.keep_by_hint(At { table, slot }),
                Err(error) => log::error!("a block at the remote gets no row: {error}"),
            }
        }
    }

    /// Sees to it that so many rows can be added, if nobody has to leave for them but blocks that
    /// were located; whether they can.
    pub(super) fn rows_for_hints(&mut self, rows: usize) -> bool {
        self.forget_located(rows);
        rows <= self.free_rows() && self.rows_for(rows).is_ok()
    }

    /// The remote has a block, as far as is known, and its row stays for that.
    fn keep_by_hint(&mut self, at: At) {
        self.hint_remote(at);
        let rows = &mut self.tables[at.table as usize];
        let (Some(row), Some(remote)) = (rows.chunks.chunk(at.slot), &mut self.remote) else {
            return;
        };
        if rows.has(at.slot, note::LOCATED) {
            return;
        }
        remote.located.0.push_back((at, row.generation()));
        rows.set(at.slot, note::LOCATED);
        if remote.located.0.len() > remote.config.known.max(1) {
            self.forget_first_located();
        }
    }

    /// Whether a row stays although nobody holds it and none of its cells is here.
    pub(super) fn is_kept_by_hint(&self, at: At) -> bool {
        self.tables[at.table as usize].has(at.slot, note::LOCATED) && self.remote_cells(at) > 0
    }

    /// Forgets blocks that were located until so many rows are free, or no such block is left.
    pub(super) fn forget_located(&mut self, rows: usize) {
        while self.free_rows() < rows && self.forget_first_located() {}
    }

    /// Forgets the block that was located before all others; whether there was one.
    fn forget_first_located(&mut self) -> bool {
        let first = self.remote.as_mut().and_then(|remote| remote.located.0.pop_front());
        let Some((at, generation)) = first else { return false };
        let rows = &mut self.tables[at.table as usize];
        if rows.chunks.chunk_of(at.slot, generation).is_some() {
            rows.clear(at.slot, note::LOCATED);
            self.tidy(at.table, at.slot);
        }
        true
    }

    /// Nothing more is asked for a move. Blocks that are not known to be anywhere end with this
    /// status.
    pub(super) fn located_blocks(&mut self, number: u32, status: Status) {
        let Some(remote) = &mut self.remote else { return };
        let asker = Asker::Blocks(number);
        remote.asking.line.retain(|&other| other != asker);
        if let Some(inquiry) = remote.asking.inquiries.remove(&asker) {
            self.end_locating(number, &inquiry.named, status);
        }
    }

    fn end_locating(&mut self, number: u32, named: &Named, status: Status) {
        let table = self.spaces[named.space as usize].table;
        let error = Error::from(status);
        for (chunk, key) in named.keys.iter().enumerate() {
            let slot = self.find_block(named.space, key);
            if !self.is_found(table, slot) {
                self.moves[number].blame(chunk as u32, &error);
            }
        }
        self.end_move(number);
    }
}
