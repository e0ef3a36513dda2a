//! Namespaces and the boards of their layouts: how they are found, and how they are forgotten.
//! One of which nothing is left is forgotten when others need its place, and its number is
//! another's then. So nothing may remember a number longer than what is counted here: handles,
//! sessions, rows of chunks, and blocks that are asked for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Index, IndexMut};

use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::Key;
use crate::kv::core::board::{Board, note};
use crate::kv::core::notes::Below;
use crate::kv::core::{At, Core};
use crate::meta::chunks::Added;
use crate::meta::index::Slot;
use crate::meta::layout::Layout;

/// Most namespaces.
pub const MAX_SPACES: usize = 1 << 16;
/// Most layouts.
pub const MAX_BOARDS: usize = 64;
/// Namespaces of which nothing is left are known so long, for what was learned of them.
const MOST_IDLE: usize = 1024;
/// Where all that there may be have chunks, this part of them is given up at once: looking for
/// them takes time.
const GIVEN_UP: usize = 16;

/// How a namespace is opened.
#[derive(Clone, Debug)]
pub struct SpaceOpts {
    /// Its key.
    pub key: Key,
    /// What its cells are.
    pub layout: Layout,
    /// Its engine can compute holes: chunks leave in any order.
    pub holes: bool,
}

/// A namespace: who may share.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Its key.
    pub key: Key,
    /// Its engine can compute holes.
    pub holes: bool,
    /// The board of its layout.
    pub board: u32,
    /// Whose its objects are at the remote; 0 = everybody's.
    pub tenant: u64,
    /// What its cells are coded with on disk, if its recipe says so.
    pub codec: Option<Codec>,
    /// Handles that are open.
    pub handles: u32,
    /// Sessions that are open.
    pub(super) sessions: u32,
    /// Chunks in the table.
    pub(super) rows: u32,
    /// Which it is: its number may have been another's before.
    pub(super) serial: u64,
    pub(super) below: Below,
    /// When it was opened or left last, as serials count.
    used: u64,
    is_known: bool,
    /// It stands among those of which nothing may be left.
    is_listed: bool,
}

impl Space {
    /// Whether somebody has it open.
    fn is_open(&self) -> bool {
        self.handles > 0 || self.sessions > 0
    }

    /// Whether nothing is left of it.
    fn is_bare(&self) -> bool {
        !self.is_open() && self.rows == 0 && self.below.is_bare()
    }
}

/// All namespaces, by number.
#[derive(Default)]
pub(super) struct Spaces {
    rows: Vec<Space>,
    by_key: BTreeMap<Key, u32>,
    /// Numbers that no namespace has.
    free: Vec<u32>,
    /// Namespaces of which nothing may be left, the first one first.
    idle: VecDeque<u32>,
    /// Counts openings and closings.
    serial: u64,
}

impl Spaces {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// A namespace.
    pub(super) fn get(&self, at: usize) -> Option<&Space> {
        self.rows.get(at).filter(|space| space.is_known)
    }

    /// The same, to change it.
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Space> {
        self.rows.get_mut(at).filter(|space| space.is_known)
    }

    /// The number of a key.
    fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// All of them, with their numbers.
    pub(super) fn known(&self) -> impl Iterator<Item = (u32, &Space)> {
        (0..).zip(&self.rows).filter(|(_, space)| space.is_known)
    }

    fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Adds one that nobody has open.
    fn add(&mut self, key: Key, holes: bool, board: u32) -> Result<u32> {
        let serial = self.next_serial();
        let space = Space {
            key,
            holes,
            board,
            tenant: 0,
            codec: None,
            handles: 0,
            sessions: 0,
            rows: 0,
            serial,
            below: Below::default(),
            used: serial,
            is_known: true,
            is_listed: false,
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.rows[at as usize] = space;
                at
            }
            None => {
                if self.rows.len() == self.rows.capacity() {
                    self.rows.try_reserve(self.rows.len().max(64)).map_err(|_| Status::NoMem)?;
                    // Forgetting one must not have to allocate.
                    let more = self.rows.capacity() - self.free.len();
                    self.free.try_reserve(more).map_err(|_| Status::NoMem)?;
                }
                self.rows.push(space);
                self.rows.len() as u32 - 1
            }
        };
        self.by_key.insert(key, at);
        Ok(at)
    }

    fn remove(&mut self, at: u32) {
        let space = &mut self.rows[at as usize];
        space.is_known = false;
        self.by_key.remove(&space.key);
        self.free.push(at);
    }

    /// Something of a namespace has ended: nothing may be left of it.
    fn look_at(&mut self, at: u32) {
        let space = &mut self.rows[at as usize];
        if space.is_bare() && !std::mem::replace(&mut space.is_listed, true) {
            self.idle.push_back(at);
        }
    }

    /// The first of those of which nothing may be left.
    fn next_idle(&mut self) -> Option<u32> {
        let at = self.idle.pop_front()?;
        self.rows[at as usize].is_listed = false;
        Some(at)
    }

    /// Somebody has opened it, or left it.
    fn touch(&mut self, at: u32) {
        self.rows[at as usize].used = self.next_serial();
    }
}

impl Index<usize> for Spaces {
    type Output = Space;

    fn index(&self, at: usize) -> &Space {
        &self.rows[at]
    }
}

impl IndexMut<usize> for Spaces {
    fn index_mut(&mut self, at: usize) -> &mut Space {
        &mut self.rows[at]
    }
}

impl Core {
    /// Opens a namespace, or finds it; its number, which is its own as long as a handle or a
    /// session of it is open.
    pub fn open_space(&mut self, opts: &SpaceOpts) -> Result<u32> {
        let at = match self.find_space(&opts.key) {
            Some(at) => at,
            None => {
                self.make_room_for(&opts.layout)?;
                self.add_space(opts)?
            }
        };
        let space = &mut self.spaces[at as usize];
        if self.boards[space.board as usize].layout != opts.layout {
            fail!(Invalid, "that namespace has another layout: layouts are part of identities");
        }
        if space.holes != opts.holes && space.handles > 0 {
            let how = if space.holes { "with" } else { "without" };
            fail!(Invalid, "that namespace is open {how} holes");
        }
        space.holes = opts.holes;
        space.handles += 1;
        self.spaces.touch(at);
        Ok(at)
    }

    /// Adds a namespace that nobody has open.
    pub(super) fn add_space(&mut self, opts: &SpaceOpts) -> Result<u32> {
        let most = self.config.max_spaces;
        if self.spaces.len() >= most {
            fail!(
                Limit,
                "{most} namespaces are as many as can be, and each is open or has chunks that stay: \
                 close some, or end their pins"
            );
        }
        let board = match self.board_for(&opts.layout) {
            Some(at) => at,
            None => {
                let board = self.new_board(&opts.layout)?;
                self.seat(board)?
            }
        };
        let at = self.spaces.add(opts.key, opts.holes, board as u32)?;
        self.boards[board].spaces += 1;
        self.follow_breaker();
        Ok(at)
    }

    /// Says what the recipe of a namespace says of how its cells are kept on disk. None:
    /// as the store keeps them. A lossy codec changes KV: who has another recipe has
    /// another namespace.
    pub fn set_codec(&mut self, space: u32, codec: Option<Codec>) {
        if let Some(space) = self.spaces.get_mut(space as usize) {
            space.codec = codec;
        }
    }

    /// The number of a namespace.
    pub fn find_space(&self, key: &Key) -> Option<u32> {
        self.spaces.find(key)
    }

    /// A handle of a namespace was closed. Its chunks stay.
    pub fn close_space(&mut self, at: u32) {
        let Some(space) = self.spaces.get_mut(at as usize) else { return };
        space.handles = space.handles.saturating_sub(1);
        self.spaces.touch(at);
        self.spaces.look_at(at);
    }

    /// A namespace.
    pub fn space(&self, at: u32) -> Option<&Space> {
        self.spaces.get(at as usize)
    }

    /// The board of a namespace.
    pub fn board_of(&self, space: u32) -> Option<&Board> {
        self.boards.get(self.spaces.get(space as usize)?.board as usize)
    }

    /// A session of a namespace was opened.
    pub(super) fn session_came(&mut self, space: u32) {
        self.spaces[space as usize].sessions += 1;
        self.spaces.touch(space);
    }

    /// One was closed.
    pub(super) fn session_left(&mut self, space: u32) {
        self.spaces[space as usize].sessions -= 1;
        self.spaces.touch(space);
        self.spaces.look_at(space);
    }

    /// A chunk of a namespace has a row, and may not have had one.
    pub(super) fn row_came(&mut self, space: u32, added: Added) {
        self.spaces[space as usize].rows += u32::from(matches!(added, Added::New(_)));
    }

    /// A row of a namespace is gone.
    pub(super) fn row_left(&mut self, space: u32) {
        self.spaces[space as usize].rows -= 1;
        self.spaces.look_at(space);
    }

    /// Namespaces that were found and have nothing after all need not be known.
    pub(super) fn look_at_spaces(&mut self) {
        let all: Vec<u32> = self.spaces.known().map(|(at, _)| at).collect();
        for at in all {
            self.drop_note(at);
            self.spaces.look_at(at);
        }
    }

    /// The board of a layout.
    fn board_for(&self, layout: &Layout) -> Option<usize> {
        self.boards.iter().position(|board| board.layout == *layout)
    }

    fn new_board(&self, layout: &Layout) -> Result<Board> {
        let board = Board::new(layout, self.config.max_chunks)?;
        if self.near.is_some() { board.with_pieces() } else { Ok(board) }
    }

    /// A board that is nobody's. Moves may outlive their sessions, and have no chunks at all:
    /// what they count in are the layers of theirs.
    fn vacant_board(&self) -> Option<usize> {
        let is_moved = |at: usize| self.moves.iter().any(|(_, one)| one.spec.board == at as u32);
        let is_vacant = |board: &Board| board.spaces == 0 && board.chunks.is_empty();
        (0..self.boards.len()).find(|&at| is_vacant(&self.boards[at]) && !is_moved(at))
    }

    /// Gives a board a number, which may have been that of another.
    fn seat(&mut self, board: Board) -> Result<usize> {
        if let Some(at) = self.vacant_board() {
            let number = at as u32;
            // Rows are what all else goes by; this is remembered without.
            self.forget_far_shape(number);
            self.forget_located_of(number);
            self.upkeep.forget_board(number);
            self.boards[at] = board;
            return Ok(at);
        }
        let most = self.config.max_layouts;
        if self.boards.len() >= most {
            fail!(
                Limit,
                "{most} layouts are as many as can be, and namespaces of each are open or have \
                 chunks that stay: close some, or end their pins"
            );
        }
        self.boards.push(board);
        Ok(self.boards.len() - 1)
    }

    /// Sees to it that there can be a namespace more. Where all that there may be have chunks,
    /// those leave that nobody has used for longest.
    fn make_room_for(&mut self, layout: &Layout) -> Result<()> {
        let is_new = self.board_for(layout).is_none();
        let is_full = self.spaces.len() >= self.config.max_spaces;
        self.forget_idle(if is_new || is_full { 0 } else { MOST_IDLE });
        let lacks_space = self.spaces.len() >= self.config.max_spaces;
        if is_new && (lacks_space || self.lacks_board()) {
            // One that can have no table sends nobody away.
            drop(self.new_board(layout)?);
        }
        if lacks_space {
            self.give_up_spaces();
        }
        if is_new && self.lacks_board() {
            self.give_up_board();
        }
        Ok(())
    }

    fn lacks_board(&self) -> bool {
        self.boards.len() >= self.config.max_layouts && self.vacant_board().is_none()
    }

    /// Forgets namespaces of which nothing is left, but for the last ones.
    fn forget_idle(&mut self, most: usize) {
        for _ in most..self.spaces.idle.len() {
            let Some(at) = self.spaces.next_idle() else { break };
            if !self.spaces[at as usize].is_bare() {
                continue; // it is listed again when that is over
            }
            match self.is_asked_for(at) {
                true => self.spaces.look_at(at),
                false => self.forget_space(at),
            }
        }
    }

    /// Nothing is left of a namespace: its number may be another's from now on.
    fn forget_space(&mut self, at: u32) {
        self.drop_note(at);
        self.speeds.forget_space(at);
        self.forget_far_names(at);
        let board = self.spaces[at as usize].board;
        self.boards[board as usize].spaces -= 1;
        self.spaces.remove(at);
    }

    /// All chunks of namespaces that nobody has open leave, of as many as are worth it.
    fn give_up_spaces(&mut self) {
        let most = self.config.max_spaces;
        let closed = self.spaces.known().filter(|(_, space)| !space.is_open());
        let mut closed: Vec<(u64, u32)> = closed.map(|(at, space)| (space.used, at)).collect();
        closed.sort_unstable();
        for part in closed.chunks((most / GIVEN_UP).max(1)) {
            let goes: BTreeSet<u32> = part.iter().map(|&(_, at)| at).collect();
            let boards = goes.iter().map(|&at| self.spaces[at as usize].board);
            for board in boards.collect::<BTreeSet<u32>>() {
                self.send_away(board, |space| goes.contains(&space));
            }
            self.forget_idle(0);
            if self.spaces.len() < most {
                break;
            }
        }
    }

    /// All chunks of a layout leave of which nobody has a namespace open, if all of them may.
    fn give_up_board(&mut self) {
        let mut last = vec![Some(0); self.boards.len()];
        for (_, space) in self.spaces.known() {
            let used = &mut last[space.board as usize];
            *used = used.filter(|_| !space.is_open()).map(|used: u64| used.max(space.used));
        }
        let closed = (0u32..).zip(last).filter_map(|(at, used)| Some((used?, at)));
        let mut closed: Vec<(u64, u32)> = closed.collect();
        closed.sort_unstable();
        for (_, board) in closed {
            if self.boards[board as usize].chunks.slots().all(|slot| self.may_go(board, slot)) {
                self.send_away(board, |_| true);
                self.forget_idle(0);
            }
            if self.vacant_board().is_some() {
                break;
            }
        }
    }

    /// Whether a chunk is held by the store alone, for its turn to be written, and at rest.
    fn may_go(&self, board: u32, slot: Slot) -> bool {
        let rows = &self.boards[board as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return true };
        !row.is_moving()
            && row.pin().is_none()
            && row.refs() == u32::from(rows.has(slot, note::QUEUED))
            && !self.chunk_waits.contains_key(&At { board, slot })
    }

    /// Chunks of some namespaces of a board leave all tiers, as far as they may. The remote
    /// keeps what it has.
    fn send_away(&mut self, board: u32, goes: impl Fn(u32) -> bool) {
        let rows = &self.boards[board as usize].chunks;
        let of = |slot: Slot| rows.chunk(slot).filter(|row| goes(row.namespace()));
        let slots = rows.slots().filter_map(|slot| Some((Reverse(of(slot)?.position()), slot)));
        // Those first that continue others.
        let mut slots: Vec<(Reverse<u32>, Slot)> = slots.collect();
        slots.sort_unstable();
        let slots: Vec<Slot> = slots.into_iter().map(|(_, slot)| slot).collect();
        let left = self.send_all_away(board, &slots);
        log::info!("{} chunks of namespaces that nobody has open left for others", left.gone);
    }

    /// Whether what is counted of namespaces is so, for [`Core::check`].
    pub(super) fn check_spaces(&self) -> Result<()> {
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
}
