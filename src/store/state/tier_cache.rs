//! A tier's policy with its bookkeeping, and the objects that it chooses among.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::fail;
use crate::meta::chunks::Cell;
use crate::meta::objects::{Facts, MAX_UNITS};
use crate::policy::Hint;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};
use crate::store::state::At;
use crate::store::state::chunk_table::{Part, note};
use crate::store::state::shadow::Shadow;

/// Least bytes of host memory that a cell takes.
pub(super) const PIECE_BYTES: u64 = 4096;

// ---------- granularity
//
// The objects of a tier's policy: chunks, cells, or sessions with the chunks that they used last.

/// Granularity of eviction: the objects of the policies of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Granularity {
    /// Chunks, with all their layers.
    #[default]
    Chunk,
    /// Cells: late layers are evicted before early ones.
    Cell,
    /// Sessions: the chunks that a session used last are evicted together.
    Session,
}

/// Policy id of a cell, hashed from the id of its chunk.
pub fn cell_id(chunk: u64, layer: usize) -> u64 {
    chunk ^ (layer as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Cells of a chunk whose memory is freed once they are on disk.
#[derive(Default)]
pub(super) struct Demotion {
    /// Bytes of the cells.
    pub bytes: u64,
    is_all: bool,
    layers: BTreeSet<usize>,
}

impl Demotion {
    /// Adds cells of the chunk.
    pub fn add(&mut self, part: Part, bytes: u64) {
        self.bytes += bytes;
        match part {
            Part::All => self.is_all = true,
            Part::Layer(layer) => drop(self.layers.insert(layer)),
        }
    }

    /// Whether all layers are among them.
    pub fn is_whole(&self) -> bool {
        self.is_all
    }

    /// Whether a layer is among them.
    pub fn has(&self, layer: usize) -> bool {
        self.is_all || self.layers.contains(&layer)
    }
}

/// A chunk of a session's policy object.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its row.
    pub(crate) at: At,
    /// Its position in its sequence.
    pub position: u32,
    /// Its size in units.
    pub units: u64,
    /// Its tokens.
    pub tokens: u32,
}

/// Size of a session's policy object.
#[derive(Default)]
struct Group {
    units: u64,
    tokens: u64,
    members: BTreeMap<(u32, At), Member>,
}

/// Chunks of each session's policy object. A chunk belongs to the session that used it last. A
/// chunk that no session has used, or that stayed when its session was evicted, is an object of its
/// own.
#[derive(Default)]
pub struct Groups {
    of: BTreeMap<At, (u64, u32)>,
    groups: BTreeMap<u64, Group>,
}

impl Groups {
    /// Id of the object that a chunk belongs to.
    pub(crate) fn of(&self, at: At) -> Option<u64> {
        self.of.get(&at).map(|&(id, _)| id)
    }

    /// Units and tokens of an object.
    pub fn size(&self, id: u64) -> Option<(u64, u64)> {
        self.groups.get(&id).map(|group| (group.units, group.tokens))
    }

    /// Moves a chunk to an object. Returns the object that it belonged to, if that is another one.
    pub fn join(&mut self, member: Member, id: u64) -> Option<u64> {
        if self.of(member.at) == Some(id) {
            return None;
        }
        let before = self.remove(member.at);
        self.of.insert(member.at, (id, member.position));
        let group = self.groups.entry(id).or_default();
        group.units += member.units;
        group.tokens += u64::from(member.tokens);
        group.members.insert((member.position, member.at), member);
        before
    }

    /// Removes a chunk from its object, and returns the id of that.
    pub(crate) fn remove(&mut self, at: At) -> Option<u64> {
        let (id, position) = self.of.remove(&at)?;
        let group = self.groups.get_mut(&id)?;
        if let Some(member) = group.members.remove(&(position, at)) {
            group.units -= member.units;
            group.tokens -= u64::from(member.tokens);
        }
        if group.members.is_empty() {
            self.groups.remove(&id);
        }
        Some(id)
    }

    /// Removes an object and yields its chunks, the last of each path first.
    pub(crate) fn take(&mut self, id: u64) -> impl Iterator<Item = At> {
        let members = self.groups.remove(&id).map(|group| group.members).unwrap_or_default();
        for member in members.values() {
            self.of.remove(&member.at);
        }
        members.into_values().rev().map(|member| member.at)
    }
}

// ---------- tier cache
//
// A tier's policy with its table of objects. A unit of size is a block of 4 KiB.

/// Bytes of a unit.
pub const UNIT_BYTES: u64 = 4096;

/// Units of so many bytes, rounded up.
pub fn units_of(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT_BYTES).max(1)
}

/// A victim. The policy has forgotten it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// A chunk, by its policy id.
    Chunk(u64),
    /// A cell, by its policy id and its place.
    Cell(u64, u64),
    /// A chunk of an evicted session.
    Member(At),
}

/// The policy of a tier, with the table of its objects.
pub struct TierCache {
    /// The policy.
    pub evictor: Evictor,
    /// Kind of its objects.
    pub granularity: Granularity,
    /// With cells as objects: the cell of each object.
    cells_of: Zeroed<u64>,
    /// With sessions as objects: the chunks of each.
    pub(super) groups: Groups,
    shadow: Option<Shadow>,
    victims: Vec<Victim>,
}

impl TierCache {
    /// Opens a policy for up to `max_objects` objects and `bytes` bytes.
    pub fn open(
        spec: &str,
        granularity: Granularity,
        max_objects: usize,
        bytes: u64,
        holes: bool,
    ) -> Result<TierCache> {
        let options = Options {
            max_objects,
            capacity_units: bytes / UNIT_BYTES,
            holes,
            log_entries: LOG_ENTRIES,
            remember: max_objects.min(1 << 20),
            ..Options::default()
        };
        Ok(TierCache {
            evictor: Evictor::open(spec, &options)?,
            granularity,
            cells_of: Zeroed::new(if granularity == Granularity::Cell { max_objects } else { 0 })?,
            groups: Groups::default(),
            shadow: None,
            victims: Vec::new(),
        })
    }

    /// Bytes of its tables in use.
    pub fn used_bytes(&self) -> u64 {
        let most = self.evictor.objects().most();
        self.evictor.used_bytes() + self.cells_of.front_bytes(most)
    }

    /// The clock of the policy, which never decreases.
    fn time(&self, now_ns: u64) -> i64 {
        self.evictor.now_ns().max(i64::try_from(now_ns).unwrap_or(i64::MAX / 2))
    }

    /// Whether the policy has an object.
    pub fn knows(&self, id: u64) -> bool {
        self.evictor.objects().find(id).is_some()
    }

    /// Whether `more` objects fit, and `spare` more after them.
    pub fn has_room(&self, more: usize, spare: u64) -> bool {
        let objects = self.evictor.objects();
        (objects.len() as u64).saturating_add(more as u64 + spare) <= objects.limit() as u64
    }

    /// Notifies the policy of an access to the objects of a path.
    pub fn notify_access(&mut self, now_ns: u64, request: &RequestContext, ids: &[u64]) {
        let now = self.time(now_ns);
        if let Err(error) = self.evictor.lookup(now, request, ids, &mut []) {
            log::debug!("a policy refused a lookup: {error}");
        }
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.notify_access(now, &self.evictor, request, ids);
        }
    }

    /// Inserts objects. Returns false if the policy has no room for them.
    pub fn insert(&mut self, now_ns: u64, request: &RequestContext, new: &[NewObject]) -> bool {
        self.insert_as(now_ns, request, new, false)
    }

    /// Inserts objects that are referenced if `held` says so.
    pub(super) fn insert_as(
        &mut self,
        now_ns: u64,
        request: &RequestContext,
        new: &[NewObject],
        held: bool,
    ) -> bool {
        let now = self.time(now_ns);
        let entered = match held {
            true => self.evictor.insert_held(now, request, new),
            false => self.evictor.insert(now, request, new),
        };
        if let Err(error) = &entered {
            log::debug!("a policy refused {} objects: {error}", new.len());
        }
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.take_in(now, request, new);
        }
        if entered.is_ok() {
            return true;
        }
        // An object that was evicted while others continue it is still known.
        let is_known = new.iter().all(|one| self.knows(one.id));
        if held && is_known {
            new.iter().for_each(|one| {
                self.hold(one.id, true);
            });
        }
        is_known
    }

    /// Records the place of a cell. Returns whether the policy knows it.
    pub fn set_cell_owner(&mut self, id: u64, owner: u64) -> bool {
        let slot = self.evictor.objects().find(id);
        if let Some(slot) = slot {
            self.cells_of[slot as usize] = owner;
        }
        slot.is_some()
    }

    /// Moves chunks to a session's object, or one chunk to an object of its own.
    pub fn join(
        &mut self,
        now_ns: u64,
        request: &RequestContext,
        id: u64,
        members: &[Member],
    ) -> bool {
        let before = members.iter().filter_map(|&member| self.groups.join(member, id));
        let before: BTreeSet<u64> = before.collect();
        for other in before {
            self.adjust(now_ns, other);
        }
        if self.knows(id) {
            self.adjust(now_ns, id);
            return true;
        }
        let Some((units, facts)) = self.sized(id) else { return true };
        if self.insert(now_ns, request, &[NewObject { id, parent: None, units, facts }]) {
            return true;
        }
        for member in members {
            self.groups.remove(member.at);
        }
        false
    }

    /// Removes a chunk from its session's object.
    pub(super) fn remove_member(&mut self, now_ns: u64, at: At) {
        if let Some(id) = self.groups.remove(at) {
            self.adjust(now_ns, id);
        }
    }

    /// Size and facts of a session's object.
    fn sized(&self, id: u64) -> Option<(u64, Facts)> {
        let (units, tokens) = self.groups.size(id)?;
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        Some((units.min(MAX_UNITS), Facts { tokens, ..Facts::default() }))
    }

    /// Updates the size of a session's object, or removes an empty one.
    fn adjust(&mut self, now_ns: u64, id: u64) {
        let Some((units, facts)) = self.sized(id) else {
            self.remove(now_ns, id);
            return;
        };
        if let Err(error) = self.evictor.describe(id, units, &facts) {
            log::debug!("a policy has no object of a session: {error}");
        }
    }

    /// Removes an object that was not chosen by the policy. Returns false if others continue it:
    /// then it stays, with size 0.
    pub fn remove(&mut self, now_ns: u64, id: u64) -> bool {
        let now = self.time(now_ns);
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.forget(now, id);
        }
        self.evictor.remove(now, &[id]).is_ok()
    }

    /// Notifies the policy that an object is referenced, or no longer.
    pub fn hold(&mut self, id: u64, held: bool) -> bool {
        let ids = [id];
        let accepted = if held { self.evictor.acquire(&ids) } else { self.evictor.release(&ids) };
        accepted.is_ok()
    }

    /// Notifies the policy of a hint.
    pub fn hint(
        &mut self,
        now_ns: u64,
        request: &RequestContext,
        ids: &[u64],
        hint: &Hint,
    ) -> Result<()> {
        let now = self.time(now_ns);
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.hint(now, request, ids, hint);
        }
        self.evictor.hint(now, request, ids, hint).map(|_| ())
    }

    /// Chooses up to `most` victims, and removes them from the policy.
    pub(crate) fn choose(&mut self, now_ns: u64, bytes: u64, most: usize, out: &mut Vec<Chosen>) {
        let now = self.time(now_ns);
        self.victims.clear();
        let units = units_of(bytes);
        if let Err(error) = self.evictor.evict_most(now, units, most, &mut self.victims) {
            log::debug!("a policy could not choose a victim: {error}");
        }
        self.evictor.bound_history(REMEMBERED);
        let ids = self.victims.iter().map(|victim| victim.id);
        match self.granularity {
            Granularity::Chunk => out.extend(ids.map(Chosen::Chunk)),
            Granularity::Cell => {
                let cells_of = self.evictor.victim_slots().map(|slot| self.cells_of[slot as usize]);
                out.extend(ids.zip(cells_of).map(|(id, owner)| Chosen::Cell(id, owner)));
            }
            Granularity::Session => {
                for id in ids {
                    out.extend(self.groups.take(id).map(Chosen::Member));
                }
            }
        }
    }

    /// Sets the capacity. `high` is the share of it at which eviction begins.
    pub fn set_bytes(&mut self, bytes: u64, high: f64) {
        self.evictor.set_capacity(bytes / UNIT_BYTES);
        if let Some(shadow) = &mut self.shadow {
            shadow.set_capacity(bytes / UNIT_BYTES, high);
        }
    }

    /// Begins a shadow evaluation. Fails with BUSY if one is running.
    pub fn begin_shadow(&mut self, now_ns: u64, mut shadow: Shadow) -> Result<()> {
        self.tick(now_ns);
        if self.shadow.as_ref().is_some_and(Shadow::is_on) {
            fail!(Busy, "a shadow evaluation is running: wait for its end, or end it");
        }
        shadow.begin(now_ns);
        self.shadow = Some(shadow);
        Ok(())
    }

    /// The shadow evaluation, running or ended.
    pub fn shadow(&self) -> Option<&Shadow> {
        self.shadow.as_ref()
    }

    /// Ends a shadow evaluation that is due.
    pub fn tick(&mut self, now_ns: u64) {
        watching(&mut self.shadow, now_ns);
    }

    /// Ends the shadow evaluation and takes it.
    pub fn end_shadow(&mut self, now_ns: u64) -> Option<Shadow> {
        let mut shadow = self.shadow.take()?;
        shadow.end(now_ns);
        Some(shadow)
    }
}

/// The shadow evaluation, while it runs.
fn watching(shadow: &mut Option<Shadow>, now_ns: u64) -> Option<&mut Shadow> {
    let shadow = shadow.as_mut().filter(|shadow| shadow.is_on())?;
    shadow.tick(now_ns);
    shadow.is_on().then_some(shadow)
}

/// Evictions in the log.
const LOG_ENTRIES: usize = 4096;
/// Evicted ids that a policy remembers, for each object that fits.
const REMEMBERED: usize = 4;

/// The flag of chunks that a tier's policy has.
pub(super) fn flag_of(tier: Tier) -> u16 {
    match tier {
        Tier::Device => note::IN_DEVICE,
        Tier::Disk => note::IN_DISK,
        _ => note::IN_HOST,
    }
}

/// A cell as the owner of a piece in the host tier.
pub(super) fn owner_of(table: u32, cell: Cell) -> u64 {
    u64::from(table) << 48 | (cell.layer as u64) << 32 | u64::from(cell.chunk)
}

pub(super) fn cell_of_owner(owner: u64) -> (u32, Cell) {
    let layer = (owner >> 32 & 0xFFFF) as usize;
    ((owner >> 48) as u32, Cell { chunk: owner as u32, layer })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(slot: u32, position: u32) -> Member {
        Member { at: At { table: 0, slot }, position, units: 3, tokens: 16 }
    }

    #[test]
    fn a_chunk_belongs_to_its_last_user_and_is_evicted_from_the_end() {
        let mut groups = Groups::default();
        for slot in 0..4 {
            assert_eq!(groups.join(member(slot, slot), 7), None);
        }
        assert_eq!(groups.size(7), Some((12, 64)));
        assert_eq!(groups.join(member(0, 0), 8), Some(7));
        assert_eq!(groups.join(member(0, 0), 8), None);
        assert_eq!(groups.remove(At { table: 0, slot: 2 }), Some(7));
        assert_eq!((groups.size(7), groups.size(8)), (Some((6, 32)), Some((3, 16))));
        let members: Vec<u32> = groups.take(7).map(|at| at.slot).collect();
        assert_eq!((members, groups.size(7)), (vec![3, 1], None));
        assert_eq!(groups.of(At { table: 0, slot: 3 }), None);
        assert_eq!(groups.remove(At { table: 0, slot: 0 }), Some(8));
        assert_eq!(groups.size(8), None);
    }

    #[test]
    fn parts_of_a_demotion_add_up() {
        let mut demotion = Demotion::default();
        demotion.add(Part::Layer(3), 5);
        demotion.add(Part::Layer(1), 5);
        assert_eq!((demotion.bytes, demotion.has(3), demotion.has(2)), (10, true, false));
        demotion.add(Part::All, 0);
        assert!(demotion.has(2));
        assert!(Part::All.has(9) && Part::Layer(9).has(9) && !Part::Layer(9).has(8));
        assert_ne!(cell_id(1, 0), cell_id(1, 1));
    }
}
