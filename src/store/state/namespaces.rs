//! Namespaces and the boards of their layouts: how they are found, and how they are forgotten.
//! One of which nothing is left is forgotten when others need its place, and its number is
//! another's then. So nothing may remember a number longer than what is counted here: handles,
//! sessions, rows of chunks, and blocks that are asked for.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Index, IndexMut};

use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::Key;
use crate::meta::chunks::Added;
use crate::meta::layout::Layout;
use crate::store::state::StoreState;
use crate::store::state::chunk_table::ChunkTable;
use crate::store::state::namespace_notes::Below;

/// Most namespaces.
pub const MAX_SPACES: usize = 1 << 16;
/// Most layouts.
pub const MAX_CHUNK_TABLES: usize = 64;
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
    pub table: u32,
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
    pub(super) used: u64,
    is_known: bool,
    /// It stands among those of which nothing may be left.
    pub(super) is_listed: bool,
    /// What was cleared, and is not sure to stay away yet.
    pub(super) unsure: Unsure,
}

/// What was cleared by a call whose deadline passed before it was sure to stay away. The next
/// call waits on, and tells of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unsure {
    /// The turn that is waited for; 0 = nothing is.
    pub(super) turn: u64,
    pub(super) gone: u64,
}

impl Space {
    /// Whether somebody has it open.
    pub(super) fn is_open(&self) -> bool {
        self.handles > 0 || self.sessions > 0
    }

    /// Whether nothing is left of it.
    pub(super) fn is_bare(&self) -> bool {
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
    pub(super) fn find(&self, key: &Key) -> Option<u32> {
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
    fn add(&mut self, key: Key, holes: bool, table: u32) -> Result<u32> {
        let serial = self.next_serial();
        let space = Space {
            key,
            holes,
            table,
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
            unsure: Unsure::default(),
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

    pub(super) fn remove(&mut self, at: u32) {
        let space = &mut self.rows[at as usize];
        space.is_known = false;
        self.by_key.remove(&space.key);
        self.free.push(at);
    }

    /// Something of a namespace has ended: nothing may be left of it.
    pub(super) fn look_at(&mut self, at: u32) {
        let space = &mut self.rows[at as usize];
        if space.is_bare() && !std::mem::replace(&mut space.is_listed, true) {
            self.idle.push_back(at);
        }
    }

    /// How many there are of which nothing may be left.
    pub(super) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// The first of those.
    pub(super) fn next_idle(&mut self) -> Option<u32> {
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

impl StoreState {
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
        if self.tables[space.table as usize].layout != opts.layout {
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
        let table = match self.table_for(&opts.layout) {
            Some(at) => at,
            None => {
                let table = self.new_table(&opts.layout)?;
                let at = self.seat(table)?;
                self.keep_reserve(at);
                at
            }
        };
        let at = self.spaces.add(opts.key, opts.holes, table as u32)?;
        self.tables[table].spaces += 1;
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
    pub fn table_of(&self, space: u32) -> Option<&ChunkTable> {
        self.tables.get(self.spaces.get(space as usize)?.table as usize)
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

    /// Namespaces were found, those first that were written to last: these are given up last.
    /// One that has nothing after all need not be known.
    pub(super) fn look_at_spaces(&mut self, found: &[u32]) {
        for &at in found.iter().rev() {
            self.spaces.touch(at);
            self.drop_note(at);
            self.spaces.look_at(at);
        }
    }

    /// The board of a layout.
    pub(super) fn table_for(&self, layout: &Layout) -> Option<usize> {
        self.tables.iter().position(|table| table.layout == *layout)
    }

    pub(super) fn new_table(&self, layout: &Layout) -> Result<ChunkTable> {
        let table = ChunkTable::new(layout, self.config.max_chunks)?;
        if self.replicas.is_some() { table.with_pieces() } else { Ok(table) }
    }
}
