//! What decides in a store: which cell is where, what moves next, who leaves. It
//! touches no bytes and never blocks. Whoever carries work out asks for it with
//! [`Core::take`] and says with [`Core::done`] how it went; between the two nothing
//! is locked. So one thread can drive it as well as many, in an order that a seed
//! chooses.

mod along;
pub mod asks;
pub mod audit;
pub mod behind;
pub mod blocks;
pub mod board;
pub mod books;
mod check;
pub mod clear;
mod config;
mod copies;
mod debt;
pub mod deed;
pub mod demote;
mod down;
mod early;
pub mod far;
mod far_blocks;
mod far_known;
pub mod fetches;
pub mod gauge;
pub mod grain;
mod held;
pub mod holds;
mod hung;
mod jobs;
mod ledger;
mod limits;
mod line;
pub mod look;
mod metrics;
pub mod moves;
mod notes;
mod objects;
mod pins;
pub mod plans;
mod reads;
mod recover;
mod rectangle;
pub mod replicas;
mod reserve;
mod room;
pub mod sends;
mod session;
pub mod shelf;
pub mod sight;
pub mod slabs;
mod spaces;
mod speeds;
mod syncs;
pub mod table;
pub mod tenants;
pub mod times;
mod told;
pub mod trial;
mod upkeep;
mod vacancies;
pub mod views;
mod wait;
pub mod work;
mod write_behind;

pub use board::Board;
pub use config::{Config, Counters, DeviceConfig, Write};
pub use down::RECORD_CELLS;
pub use far::{FarConfig, FarCounters};
pub use jobs::Job;
pub use ledger::BESIDE_BYTES as ROW_BESIDE_BYTES;
pub use moves::{Deed, Finished, Level, MoveSpec};
pub use recover::Adopted;
pub use rectangle::{Rectangle, TO_THE_END, Wanted};
pub use session::{SessionOpts, Truncated};
pub use spaces::{MAX_BOARDS, MAX_SPACES, Space, SpaceOpts};
pub use upkeep::disk_room;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::format::keys::Key;
use crate::format::record;
use crate::kv::admission::Admission;
use crate::kv::core::grain::Leave;
use crate::kv::core::line::Line;
use crate::kv::core::moves::Move;
use crate::kv::core::session::Session;
use crate::kv::core::shelf::Shelf;
use crate::kv::core::spaces::Spaces;
use crate::kv::core::table::Table;
use crate::kv::core::work::Hands;
use crate::kv::events::{Event, Events, Kind};
use crate::kv::queues::Queues;
use crate::meta::chunks::{Cell, Place};
use crate::meta::index::Slot;
use crate::tier::disk::{DiskTier, Spot};
use crate::tier::host::{HostTier, Piece};

/// A chunk of a board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct At {
    pub board: u32,
    pub slot: Slot,
}

/// What decides.
pub struct Core {
    pub(super) config: Config,
    pub(super) now_ns: u64,
    pub(super) host: HostTier,
    pub(super) disk: Option<Arc<DiskTier>>,
    pub(super) boards: Vec<Board>,
    spaces: Spaces,
    pub(super) sessions: Table<Session>,
    pub(super) moves: Table<Move>,
    pub(super) jobs: Table<Job>,
    pub(super) host_shelf: Shelf,
    pub(super) disk_shelf: Option<Shelf>,
    /// Copies of cells in device memory.
    pub(super) near: Option<Box<replicas::Replicas>>,
    /// The remote, if there is one.
    far: Option<Box<far::Far>>,
    pub(super) admission: Admission,
    copies: Queues,
    reads: Queues,
    feeding: VecDeque<u32>,
    /// Jobs whose cell can be looked at again.
    woken: Vec<u32>,
    /// Jobs that wait for memory.
    hungry: Line,
    hungry_bytes: u64,
    /// The one of them that tries again now.
    served: Option<u32>,
    /// The one that may take the reserve.
    reserved: Option<u32>,
    /// Jobs that wait for what others do with a cell.
    waiting: BTreeMap<(At, usize), Line>,
    /// Chunks to be written down.
    downs: VecDeque<At>,
    /// Chunks whose memory is given back once they are on disk, and what of it.
    leaving: BTreeMap<At, Leave>,
    leaving_bytes: u64,
    /// Chunks in a row that were to leave memory, and could not.
    refusals: u32,
    /// When the last of them was.
    refused_ns: u64,
    /// Puts that wait for a chunk to be on disk, and which of theirs it is: NONE = it is
    /// only taken along.
    chunk_waits: BTreeMap<At, Vec<(u32, u32)>>,
    /// Writes of chunks that were not made durable yet.
    fresh: BTreeMap<At, Vec<syncs::Fresh>>,
    /// With so many all are synced, whoever waits.
    flush_at: usize,
    /// Puts that wait for that.
    commits: Vec<u32>,
    /// Pins, the weakest first.
    pins: BTreeSet<pins::Hold>,
    /// The same, by when they end.
    ends: BTreeSet<(u64, u8, At)>,
    /// Sessions opened so far.
    names: u64,
    write_behind: write_behind::WriteBehind,
    upkeep: upkeep::Upkeep,
    debt: debt::Debt,
    ledger: ledger::Ledger,
    limits: limits::Limits,
    /// Batches under way, by kind.
    pub(super) under_way: [u32; work::KINDS],
    speeds: speeds::Speeds,
    times: times::Times,
    tenants: tenants::Tenants,
    scratch: look::Scratch,
    drafts: plans::Drafts,
    waits: wait::Waits,
    behind: behind::Behind,
    turns: clear::Turns,
    finished: Vec<Finished>,
    /// What is counted.
    pub counters: Counters,
    /// What changed.
    pub events: Events,
}

impl Core {
    /// A store without namespaces.
    pub fn new(
        config: Config,
        account: Option<Arc<Account>>,
        disk: Option<Arc<DiskTier>>,
    ) -> Result<Core> {
        config.check()?;
        let disk_bytes = disk.as_deref().map(|disk| disk.stats().budget_bytes);
        let opts = config.host_opts();
        let (host_shelf, disk_shelf) = config.open_shelves(disk_bytes)?;
        let mut copies = Queues::new(config.max_jobs, config.max_sessions + 1)?;
        copies.in_parts_of(config.copy_bytes / copies::PARTS);
        Ok(Core {
            now_ns: 0,
            host: HostTier::new(account.clone(), &opts)?,
            near: replicas::Replicas::open(&config, account.clone())?,
            far: far::Far::open(&config)?,
            ledger: ledger::Ledger::new(account),
            limits: limits::Limits::default(),
            boards: Vec::new(),
            spaces: Spaces::default(),
            sessions: Table::new(config.max_sessions as usize),
            moves: Table::new(config.max_moves as usize),
            jobs: Table::new(config.max_jobs as usize),
            host_shelf,
            disk_shelf,
            admission: Admission::open(&config.admission, 0)?,
            copies,
            reads: Queues::new(config.max_jobs, config.max_sessions + 1)?,
            feeding: VecDeque::new(),
            woken: Vec::new(),
            hungry: Line::default(),
            hungry_bytes: 0,
            served: None,
            reserved: None,
            waiting: BTreeMap::new(),
            downs: VecDeque::new(),
            leaving: BTreeMap::new(),
            leaving_bytes: 0,
            refusals: 0,
            refused_ns: 0,
            chunk_waits: BTreeMap::new(),
            fresh: BTreeMap::new(),
            flush_at: syncs::MOST_FRESH,
            commits: Vec::new(),
            pins: BTreeSet::new(),
            ends: BTreeSet::new(),
            names: 0,
            write_behind: write_behind::WriteBehind::default(),
            upkeep: upkeep::Upkeep::default(),
            debt: debt::Debt::default(),
            under_way: [0; work::KINDS],
            speeds: speeds::Speeds::default(),
            times: times::Times::default(),
            tenants: tenants::Tenants::default(),
            scratch: look::Scratch::default(),
            drafts: plans::Drafts::default(),
            waits: wait::Waits::default(),
            behind: behind::Behind::default(),
            turns: clear::Turns::default(),
            finished: Vec::new(),
            counters: Counters::default(),
            events: Events::new(config.events)?,
            disk,
            config,
        })
    }

    /// Says what time it is. It does not go back.
    pub fn tick(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        self.end_pins();
        self.leave_overdue();
        self.settle();
    }

    /// The host tier, to be looked at.
    pub fn host(&self) -> &HostTier {
        &self.host
    }

    /// Parts of moves that have ended since this was last asked.
    pub fn finished(&mut self, out: &mut Vec<Finished>) {
        out.append(&mut self.finished);
    }

    /// Whether nothing is under way or waits.
    pub fn is_idle(&self) -> bool {
        let none_goes_down = self.downs.is_empty() && !self.upkeep.has_parked();
        let none_goes_out = self.far.as_ref().is_none_or(|far| far.is_quiet());
        self.moves.is_empty()
            && self.under_way.iter().all(|&n| n == 0)
            && none_goes_down
            && none_goes_out
    }

    /// Whether there is nothing to do either.
    pub fn is_quiet(&self) -> bool {
        self.is_idle() && Hands::ALL.iter().all(|&hands| !self.has_work(hands))
    }

    /// Does all that has become possible, until nothing has.
    pub(super) fn settle(&mut self) {
        self.leave_queues();
        for turn in 0u64.. {
            debug_assert!(turn < 1 << 22, "a store that never settles: {}", self.what_waits());
            if let Some(job) = self.woken.pop() {
                self.route(job);
                continue;
            }
            self.pay_again();
            if !self.feed()
                && !self.feed_hungry()
                && !self.make_room()
                && !self.pay()
                && !self.fetch_early()
            {
                break;
            }
        }
    }

    /// A place is free.
    pub(super) fn free_place(&mut self, board: u32, cell: Cell, place: Place) {
        match place {
            Place::Host(piece) => {
                if let Err(error) = self.host.free(Piece(piece)) {
                    log::error!("a piece of memory was not in use: {error}");
                }
            }
            Place::Disk { spot, coded, .. } => {
                let bytes = self.boards[board as usize].disk_bytes(cell, coded);
                if let Some(disk) = &self.disk {
                    disk.drop_cells([(Spot(spot), bytes)]);
                    self.upkeep.dropped(Spot(spot), bytes);
                }
            }
            Place::Device => {
                let piece = self.boards[board as usize].piece(cell);
                self.free_near(piece);
            }
            Place::Remote => {}
        }
    }

    /// One less holds a chunk; a row that nobody needs goes.
    pub(super) fn let_go(&mut self, board: u32, slot: Slot) {
        let may_leave = self.boards[board as usize].chunks.release(slot);
        debug_assert!(may_leave.is_ok(), "{may_leave:?}");
        self.debt.released();
        self.note_held(board, slot);
        self.tidy(board, slot);
    }

    /// Removes a row without cells that nobody holds, and those before it that are
    /// like that.
    pub(super) fn tidy(&mut self, board: u32, slot: Slot) {
        let mut next = Some(slot);
        while let Some(slot) = next.take() {
            let chunks = &self.boards[board as usize].chunks;
            let Some(row) = chunks.chunk(slot) else { return };
            let (is_bare, space) = (row.cells_somewhere() == 0, row.namespace());
            let at = At { board, slot };
            if !is_bare || !chunks.may_leave(slot) || self.is_kept_by_hint(at) {
                return;
            }
            self.forget_chunk(at);
            match self.boards[board as usize].chunks.remove(slot, |_, _| ()) {
                Ok(above) => {
                    self.row_left(space);
                    // Nobody continues it any more: policies may choose it.
                    above.into_iter().for_each(|above| self.note_held(board, above));
                    next = above;
                }
                Err(error) => log::error!("a chunk without cells stays: {error}"),
            }
        }
    }

    /// Nothing is noted of a chunk any more.
    fn forget_chunk(&mut self, at: At) {
        self.untell(at, Tier::Host);
        self.untell(at, Tier::Disk);
        self.untell(at, Tier::Device);
        let board = &mut self.boards[at.board as usize];
        board.notes[at.slot as usize] = 0;
        board.uses[at.slot as usize] = 0;
        if board.users[at.slot as usize] != 0 {
            board.users[at.slot as usize] = 0;
        }
        self.fresh.remove(&at);
        self.stop_leaving(at);
    }

    /// Writes an event.
    pub(super) fn say(&mut self, kind: Kind, tier: Tier, at: At) {
        let record = self.record_of(at);
        self.events.add(Event {
            number: 0,
            at_ns: self.now_ns,
            kind: kind as u32,
            tier: tier as u32,
            tokens: record.valid_tokens,
            position: record.position,
            key: record.key.0,
            parent: record.parent.0,
            namespace: record.namespace.0,
        });
    }

    /// What a chunk is called in records.
    pub(super) fn record_of(&self, at: At) -> record::Chunk {
        let board = &self.boards[at.board as usize];
        let row = board.chunks.chunk(at.slot);
        let space = row.and_then(|row| self.spaces.get(row.namespace() as usize));
        board.record_of(at.slot, space.map_or(Key::default(), |space| space.key))
    }
}
