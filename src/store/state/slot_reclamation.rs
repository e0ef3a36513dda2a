//! Places of namespaces and boards that others have had: who is forgotten, and who is sent away,
//! where as many are known as may be.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::layout::Layout;
use crate::store::state::chunk_table::{ChunkTable, note};
use crate::store::state::{At, StoreState};

/// Namespaces of which nothing is left are known so long, for what was learned of them.
const MOST_IDLE: usize = 1024;
/// Where all that there may be have chunks, this part of them is given up at once: looking for
/// them takes time.
const GIVEN_UP: usize = 16;

impl StoreState {
    /// A board that is nobody's. Moves may outlive their sessions, and have no chunks at all:
    /// what they count in are the layers of theirs.
    fn vacant_table(&self) -> Option<usize> {
        let is_moved = |at: usize| self.moves.iter().any(|(_, one)| one.spec.table == at as u32);
        let is_vacant = |table: &ChunkTable| table.spaces == 0 && table.chunks.is_empty();
        (0..self.tables.len()).find(|&at| is_vacant(&self.tables[at]) && !is_moved(at))
    }

    /// Gives a board a number, which may have been that of another.
    pub(super) fn seat(&mut self, table: ChunkTable) -> Result<usize> {
        if let Some(at) = self.vacant_table() {
            let number = at as u32;
            // Rows are what all else goes by; this is remembered without.
            self.forget_remote_shape(number);
            self.forget_located_of(number);
            self.upkeep.forget_table(number);
            self.tables[at] = table;
            return Ok(at);
        }
        let most = self.config.max_layouts;
        if self.tables.len() >= most {
            fail!(
                Limit,
                "{most} layouts are as many as can be, and namespaces of each are open or have \
                 chunks that stay: close some, or end their pins"
            );
        }
        self.tables.push(table);
        Ok(self.tables.len() - 1)
    }

    /// Sees to it that there can be a namespace more. Where all that there may be have chunks,
    /// those leave that nobody has used for longest.
    pub(super) fn make_room_for(&mut self, layout: &Layout) -> Result<()> {
        let is_new = self.table_for(layout).is_none();
        let is_full = self.spaces.len() >= self.config.max_spaces;
        self.forget_idle(if is_new || is_full { 0 } else { MOST_IDLE });
        let lacks_space = self.spaces.len() >= self.config.max_spaces;
        if is_new && (lacks_space || self.lacks_table()) {
            // One that can have no table sends nobody away.
            drop(self.new_table(layout)?);
        }
        if lacks_space {
            self.give_up_spaces();
        }
        let lacks_table = is_new && self.lacks_table();
        if lacks_table {
            self.give_up_table();
        }
        if lacks_space || lacks_table {
            self.settle(); // what came free may be waited for
        }
        Ok(())
    }

    fn lacks_table(&self) -> bool {
        self.tables.len() >= self.config.max_layouts && self.vacant_table().is_none()
    }

    /// Forgets namespaces of which nothing is left, but for the last ones.
    fn forget_idle(&mut self, most: usize) {
        for _ in most..self.spaces.idle() {
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
        self.forget_remote_names(at);
        let table = self.spaces[at as usize].table;
        self.tables[table as usize].spaces -= 1;
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
            let tables = goes.iter().map(|&at| self.spaces[at as usize].table);
            for table in tables.collect::<BTreeSet<u32>>() {
                self.send_away(table, |space| goes.contains(&space));
            }
            self.forget_idle(0);
            if self.spaces.len() < most {
                break;
            }
        }
    }

    /// All chunks of a layout leave of which nobody has a namespace open, if all of them may.
    fn give_up_table(&mut self) {
        let mut last = vec![Some(0); self.tables.len()];
        for (_, space) in self.spaces.known() {
            let used = &mut last[space.table as usize];
            *used = used.filter(|_| !space.is_open()).map(|used: u64| used.max(space.used));
        }
        let closed = (0u32..).zip(last).filter_map(|(at, used)| Some((used?, at)));
        let mut closed: Vec<(u64, u32)> = closed.collect();
        closed.sort_unstable();
        for (_, table) in closed {
            if self.tables[table as usize].chunks.slots().all(|slot| self.may_go(table, slot)) {
                self.send_away(table, |_| true);
                self.forget_idle(0);
            }
            if self.vacant_table().is_some() {
                break;
            }
        }
    }

    /// Whether a chunk is held by the store alone, for its turn to be written, and at rest.
    fn may_go(&self, table: u32, slot: Slot) -> bool {
        let rows = &self.tables[table as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return true };
        !row.is_moving()
            && row.pin().is_none()
            && row.refs() == u32::from(rows.has(slot, note::QUEUED))
            && !self.chunk_waits.contains_key(&At { table, slot })
    }

    /// Chunks of some namespaces of a board leave all tiers, as far as they may. The remote
    /// keeps what it has.
    fn send_away(&mut self, table: u32, goes: impl Fn(u32) -> bool) {
        let rows = &self.tables[table as usize].chunks;
        let of = |slot: Slot| rows.chunk(slot).filter(|row| goes(row.namespace()));
        let slots = rows.slots().filter_map(|slot| Some((Reverse(of(slot)?.position()), slot)));
        // Those first that continue others.
        let mut slots: Vec<(Reverse<u32>, Slot)> = slots.collect();
        slots.sort_unstable();
        let slots: Vec<Slot> = slots.into_iter().map(|(_, slot)| slot).collect();
        let left = self.send_all_away(table, &slots);
        log::info!("{} chunks of namespaces that nobody has open left for others", left.gone);
    }
}
