//! The chunk table written plainly: maps, and a search for every answer.

use kvtier::base::budget::{ALL_TIERS, Tier};
use kvtier::base::status::{Result, Status};
use kvtier::meta::chunks::{
    Arrival, Begin, Cell, Dropped, Location, NewChunk, Pin, StoredForm, TIERS,
};
use kvtier::meta::index::{NONE, Slot};
use kvtier::meta::key::Key;
use std::collections::BTreeMap;

pub const LAYERS: usize = 3;
pub const TOKENS: u32 = 4;
pub const LIMIT: usize = 5;

pub type Answer<T> = std::result::Result<T, Status>;

pub fn status<T>(result: Result<T>) -> Answer<T> {
    result.map_err(|error| error.status())
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Store,
    Copy(usize),
}

/// State of a cell in a tier.
#[derive(Clone, Default)]
pub struct In {
    pub place: Option<Location>,
    pub leaving: Option<Location>,
    pub way: Option<Way>,
    pub readers: u32,
}

pub struct Known {
    pub new: NewChunk,
    /// Number of the add: a slot alone does not identify a chunk.
    pub birth: u64,
    pub parent: Option<(Slot, u64)>,
    /// The key of the missing parent that the chunk waits for.
    pub above: Option<Key>,
    pub rejoined: bool,
    pub refs: u32,
    pub pin: Option<Pin>,
    pub cells: Vec<[In; TIERS]>,
}

#[derive(Default)]
pub struct Model {
    pub live: BTreeMap<Slot, Known>,
    pub births: u64,
    pub places: u64,
    pub lost: [u64; TIERS],
    pub failed: [u64; TIERS],
}

pub fn bit(tier: Tier) -> Answer<usize> {
    if tier == Tier::Pinned { Err(Status::Invalid) } else { Ok(tier as usize) }
}

impl Model {
    pub fn find(&self, key: &Key) -> Option<Slot> {
        self.live.iter().find(|(_, c)| c.new.key == *key).map(|(&slot, _)| slot)
    }

    pub fn children(&self, slot: Slot) -> usize {
        let birth = self.live[&slot].birth;
        self.live.values().filter(|c| c.parent == Some((slot, birth))).count()
    }

    pub fn parent(&self, slot: Slot) -> Option<Slot> {
        let (parent, birth) = self.live.get(&slot)?.parent?;
        (self.live.get(&parent)?.birth == birth).then_some(parent)
    }

    pub fn is_blocked(&self, slot: Slot) -> bool {
        let chunk = &self.live[&slot];
        let continued = self.children(slot) > 0 && !chunk.new.holes;
        chunk.refs > 0 || chunk.pin.is_some() || continued
    }

    pub fn is_moving(&self, slot: Slot) -> bool {
        let at_work = |t: &In| t.readers > 0 || t.leaving.is_some() || t.way.is_some();
        self.live[&slot].cells.iter().flatten().any(at_work)
    }

    pub fn is_removable(&self, slot: Slot) -> bool {
        self.live.contains_key(&slot) && !self.is_blocked(slot) && !self.is_moving(slot)
    }

    pub fn chunk(&mut self, slot: Slot) -> Answer<&mut Known> {
        self.live.get_mut(&slot).ok_or(Status::NotFound)
    }

    pub fn cell(&mut self, cell: Cell) -> Answer<&mut [In; TIERS]> {
        self.chunk(cell.chunk)?.cells.get_mut(cell.layer).ok_or(Status::NotFound)
    }

    /// A place that was never used before.
    pub fn new_place(&mut self, tier: Tier) -> Location {
        self.places += 1;
        match tier {
            Tier::Device => Location::Device,
            Tier::Disk => {
                // Some places are plain, some are coded.
                let coded = StoredForm::new(self.places as u16 % 3, 1 + self.places % 8192);
                let (spot, seal) = (self.places << 20, !self.places);
                Location::Disk { spot, seal, coded: coded.unwrap_or(StoredForm::PLAIN) }
            }
            Tier::Remote => Location::Remote,
            _ => Location::Host(self.places as u32),
        }
    }

    /// Expected answer of the table to a new chunk. The table chooses the slot.
    pub fn check_add(&self, new: &NewChunk) -> Answer<Option<Slot>> {
        if let Some(slot) = self.find(&new.key) {
            let old = &self.live[&slot].new;
            let same = (old.namespace, old.position, old.owner, old.valid_tokens)
                == (new.namespace, new.position, new.owner, new.valid_tokens);
            return if same { Ok(Some(slot)) } else { Err(Status::Invalid) };
        }
        if new.valid_tokens == 0 || new.valid_tokens > TOKENS {
            return Err(Status::Invalid);
        }
        if new.valid_tokens < TOKENS && new.owner == NONE {
            return Err(Status::Invalid);
        }
        if new.parent == NONE {
            if new.position > 0 && !new.holes {
                return Err(Status::Invalid);
            }
        } else {
            let above = &self.live.get(&new.parent).ok_or(Status::NotFound)?.new;
            let follows = above.position + 1 == new.position;
            let shares = above.owner == NONE || above.owner == new.owner;
            let full = above.valid_tokens == TOKENS;
            if above.namespace != new.namespace || !follows || !shares || !full {
                return Err(Status::Invalid);
            }
        }
        if self.live.len() == LIMIT { Err(Status::Limit) } else { Ok(None) }
    }

    pub fn add(&mut self, slot: Slot, new: &NewChunk) {
        let parent = self.live.get(&new.parent).map(|above| (new.parent, above.birth));
        self.births += 1;
        let cells = vec![Default::default(); LAYERS];
        let (new, birth, refs, pin) = (*new, self.births, 0, None);
        let (above, rejoined) = (None, false);
        let known = Known { new, birth, parent, above, rejoined, refs, pin, cells };
        assert!(self.live.insert(slot, known).is_none(), "the slot is in use");
        let waits = |known: &Known| known.above == Some(new.key);
        let orphans = self.live.iter().filter(|(_, known)| waits(known));
        let orphans: Vec<Slot> = orphans.map(|(&orphan, _)| orphan).collect();
        for orphan in orphans {
            self.join(orphan, slot);
        }
    }

    /// Links a chunk that has no parent to `parent`, if that is its parent. Returns whether they
    /// are linked.
    pub fn join(&mut self, slot: Slot, parent: Slot) -> bool {
        if !self.live.contains_key(&slot) || !self.live.contains_key(&parent) {
            return false;
        }
        if let Some(old) = self.parent(slot) {
            return old == parent;
        }
        let (one, above) = (&self.live[&slot].new, &self.live[&parent].new);
        let shares = above.owner == NONE || above.owner == one.owner;
        let follows = (one.namespace, one.position) == (above.namespace, above.position + 1);
        if !follows || !shares || above.valid_tokens < TOKENS {
            return false;
        }
        let birth = self.live[&parent].birth;
        let one = self.live.get_mut(&slot).expect("it is live");
        (one.parent, one.above) = (Some((parent, birth)), None);
        self.live.get_mut(&parent).expect("it is live").rejoined = true;
        true
    }

    /// Same as `check_add`, for a chunk that continues the chunk with key `above`.
    pub fn check_add_behind(&self, new: &NewChunk, above: &Key) -> Answer<Option<Slot>> {
        let parent = if new.position == 0 { None } else { self.find(above) };
        let new = NewChunk { parent: parent.unwrap_or(NONE), ..*new };
        // If the parent is unknown, nothing is required of it.
        self.check_add(&NewChunk { holes: true, ..new })
    }

    pub fn parent_key(&self, slot: Slot) -> Option<Key> {
        match self.parent(slot) {
            Some(parent) => Some(self.live[&parent].new.key),
            None => self.live.get(&slot)?.above,
        }
    }

    pub fn remove(&mut self, slot: Slot) -> Answer<(Vec<Location>, Option<Slot>)> {
        self.chunk(slot)?;
        if !self.is_removable(slot) {
            return Err(Status::Busy);
        }
        let above = self.parent(slot);
        let chunk = self.live.remove(&slot).expect("it is live");
        let places = chunk.cells.iter().flatten().filter_map(|t| t.place).collect();
        Ok((places, above.filter(|&above| self.is_removable(above))))
    }

    pub fn begin_store(&mut self, cell: Cell, tier: Tier) -> Answer<Begin> {
        let tiers = self.cell(cell)?;
        let to = bit(tier)?;
        // A remote hint does not prevent a store in another tier.
        let [upper @ .., _] = &*tiers;
        Ok(if upper.iter().any(|t| t.place.is_some()) || tiers[to].place.is_some() {
            Begin::Resident
        } else if upper.iter().any(|t| t.way.is_some()) || tiers[to].way.is_some() {
            Begin::InFlight
        } else if tiers[to].leaving.is_some() {
            Begin::Leaving
        } else {
            tiers[to].way = Some(Way::Store);
            Begin::Started
        })
    }

    pub fn end_store(&mut self, cell: Cell, tier: Tier, place: Option<Location>) -> Answer<()> {
        let tiers = self.cell(cell)?;
        let to = bit(tier)?;
        if tiers[to].way != Some(Way::Store) {
            return Err(Status::State);
        }
        if place.is_some_and(|place| place.tier() != tier) {
            return Err(Status::Invalid);
        }
        tiers[to].way = None;
        tiers[to].place = place;
        self.failed[to] += u64::from(place.is_none());
        Ok(())
    }

    pub fn begin_copy(&mut self, cell: Cell, from: Tier, to: Tier) -> Answer<Begin> {
        let tiers = self.cell(cell)?;
        let (from, to) = (bit(from)?, bit(to)?);
        let target = &tiers[to];
        if target.place.is_some() {
            return Ok(Begin::Resident);
        }
        if target.way.is_some() {
            return Ok(Begin::InFlight);
        }
        if target.leaving.is_some() {
            return Ok(Begin::Leaving);
        }
        if tiers[from].place.is_none() {
            return Err(Status::NotFound);
        }
        tiers[from].readers += 1;
        tiers[to].way = Some(Way::Copy(from));
        Ok(Begin::Started)
    }

    pub fn end_copy(&mut self, cell: Cell, to: Tier, arrival: Arrival) -> Answer<Option<Location>> {
        let tiers = self.cell(cell)?;
        let target = bit(to)?;
        let Some(Way::Copy(from)) = tiers[target].way else { return Err(Status::State) };
        match arrival {
            Arrival::Arrived(place) if place.tier() != to => return Err(Status::Invalid),
            Arrival::Arrived(place) => tiers[target].place = Some(place),
            _ => {}
        }
        tiers[target].way = None;
        let source = &mut tiers[from];
        let newly = arrival == Arrival::BadSource && source.place.is_some();
        if newly {
            source.leaving = source.place.take();
        }
        self.lost[from] += u64::from(newly);
        self.failed[target] += u64::from(!matches!(arrival, Arrival::Arrived(_)));
        self.end_read(cell, ALL_TIERS[from])
    }

    pub fn begin_read(&mut self, cell: Cell, tier: Tier) -> Answer<Location> {
        let tiers = self.cell(cell)?;
        let here = &mut tiers[bit(tier)?];
        let place = here.place.ok_or(Status::NotFound)?;
        here.readers += 1;
        Ok(place)
    }

    pub fn end_read(&mut self, cell: Cell, tier: Tier) -> Answer<Option<Location>> {
        let tiers = self.cell(cell)?;
        let from = bit(tier)?;
        let copies = tiers.iter().filter(|t| t.way == Some(Way::Copy(from))).count();
        let here = &mut tiers[from];
        if here.readers as usize == copies {
            return Err(Status::State);
        }
        here.readers -= 1;
        Ok(if here.readers == 0 { here.leaving.take() } else { None })
    }

    pub fn begin_drop(&mut self, cell: Cell, tier: Tier) -> Answer<Dropped> {
        let tiers = self.cell(cell)?.clone();
        let from = bit(tier)?;
        if tiers[from].place.is_none() {
            return Ok(Dropped::Absent);
        }
        // A hint can always be dropped, and does not count as another copy.
        let [upper @ .., _] = &tiers;
        let copies = upper.iter().filter(|t| t.place.is_some()).count();
        if copies == 1 && tier != Tier::Remote && self.is_blocked(cell.chunk) {
            return Err(Status::Busy);
        }
        let here = &mut self.cell(cell)?[from];
        let place = here.place.take().expect("a place in this tier");
        if here.readers == 0 {
            return Ok(Dropped::Freed(place));
        }
        here.leaving = Some(place);
        Ok(Dropped::Deferred)
    }

    pub fn lose(&mut self, cell: Cell, tier: Tier) -> Answer<Dropped> {
        let tiers = self.cell(cell)?;
        let from = bit(tier)?;
        let here = &mut tiers[from];
        let Some(place) = here.place.take() else { return Ok(Dropped::Absent) };
        let read = here.readers > 0;
        here.leaving = read.then_some(place);
        self.lost[from] += 1;
        Ok(if read { Dropped::Deferred } else { Dropped::Freed(place) })
    }

    pub fn relocate(&mut self, cell: Cell, from: u64, to: u64) -> Answer<bool> {
        let here = &mut self.cell(cell)?[Tier::Disk as usize];
        match here.place {
            Some(Location::Disk { spot, seal, coded }) if spot == from => {
                here.place = Some(Location::Disk { spot: to, seal, coded });
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}
