//! What a tier's policy is told. Its objects are chunks, cells or sessions; a unit is a
//! block of 4 KiB.

use std::collections::BTreeSet;

use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::fail;
use crate::meta::objects::{Facts, MAX_UNITS};
use crate::policy::Hint;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, New, Options, Who};
use crate::store::state::At;
use crate::store::state::granularity::{Granularity, Groups, Member};
use crate::store::state::shadow::Shadow;

/// Bytes of a unit.
pub const UNIT_BYTES: u64 = 4096;

/// Units that some bytes take.
pub fn units_of(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT_BYTES).max(1)
}

/// Whom a policy chose to leave; it does not know them any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// A chunk, by what policies call it.
    Chunk(u64),
    /// A cell, by what policies call it, and where it was.
    Cell(u64, u64),
    /// A chunk of a session that leaves.
    Member(At),
}

/// A policy at work for one tier.
pub struct TierCache {
    /// The policy.
    pub evictor: Evictor,
    /// What its objects are.
    pub granularity: Granularity,
    /// Of cells: where the cell of each object is.
    homes: Zeroed<u64>,
    /// Of sessions: the chunks of each.
    pub(super) groups: Groups,
    shadow: Option<Shadow>,
    victims: Vec<Victim>,
}

impl TierCache {
    /// Opens one for up to `max_objects` objects and `bytes` bytes.
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
            homes: Zeroed::new(if granularity == Granularity::Cell { max_objects } else { 0 })?,
            groups: Groups::default(),
            shadow: None,
            victims: Vec::new(),
        })
    }

    /// Bytes of its tables that were used so far.
    pub fn used_bytes(&self) -> u64 {
        let most = self.evictor.objects().most();
        self.evictor.used_bytes() + self.homes.front_bytes(most)
    }

    /// The time that the policy can be told: it does not go back.
    fn time(&self, now_ns: u64) -> i64 {
        self.evictor.now_ns().max(i64::try_from(now_ns).unwrap_or(i64::MAX / 2))
    }

    /// Whether the policy has an object.
    pub fn knows(&self, id: u64) -> bool {
        self.evictor.objects().find(id).is_some()
    }

    /// Whether that many objects more can be told of, and `spare` others after them.
    pub fn has_room(&self, more: usize, spare: u64) -> bool {
        let objects = self.evictor.objects();
        (objects.len() as u64).saturating_add(more as u64 + spare) <= objects.limit() as u64
    }

    /// Objects of a path are asked for.
    pub fn look(&mut self, now_ns: u64, who: &Who, ids: &[u64]) {
        let now = self.time(now_ns);
        if let Err(error) = self.evictor.lookup(now, who, ids, &mut []) {
            log::debug!("a policy refused a lookup: {error}");
        }
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.look(now, &self.evictor, who, ids);
        }
    }

    /// Objects come. False when the policy has no room for them.
    pub fn insert(&mut self, now_ns: u64, who: &Who, new: &[New]) -> bool {
        let now = self.time(now_ns);
        let entered = self.evictor.insert(now, who, new);
        if let Err(error) = &entered {
            log::debug!("a policy refused {} objects: {error}", new.len());
        }
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.take_in(now, who, new);
        }
        // One that has left the tier, and that others continue, is known still.
        entered.is_ok() || new.iter().all(|one| self.knows(one.id))
    }

    /// Says where a cell is; whether the policy knows it.
    pub fn set_home(&mut self, id: u64, home: u64) -> bool {
        let slot = self.evictor.objects().find(id);
        if let Some(slot) = slot {
            self.homes[slot as usize] = home;
        }
        slot.is_some()
    }

    /// Chunks are a session's from now on, or one is alone.
    pub fn join(&mut self, now_ns: u64, who: &Who, id: u64, members: &[Member]) -> bool {
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
        if self.insert(now_ns, who, &[New { id, parent: None, units, facts }]) {
            return true;
        }
        for member in members {
            self.groups.leave(member.at);
        }
        false
    }

    /// A chunk is of no session any more.
    pub(super) fn leave(&mut self, now_ns: u64, at: At) {
        if let Some(id) = self.groups.leave(at) {
            self.adjust(now_ns, id);
        }
    }

    /// What a session's object has, as policies count.
    fn sized(&self, id: u64) -> Option<(u64, Facts)> {
        let (units, tokens) = self.groups.size(id)?;
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        Some((units.min(MAX_UNITS), Facts { tokens, ..Facts::default() }))
    }

    /// A session's object has another size, or is gone.
    fn adjust(&mut self, now_ns: u64, id: u64) {
        let Some((units, facts)) = self.sized(id) else {
            self.remove(now_ns, id);
            return;
        };
        if let Err(error) = self.evictor.describe(id, units, &facts) {
            log::debug!("a policy does not know a session: {error}");
        }
    }

    /// An object is gone, and not by the policy's choice. False when others continue
    /// it: then it stays, and frees nothing when it is chosen.
    pub fn remove(&mut self, now_ns: u64, id: u64) -> bool {
        let now = self.time(now_ns);
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.forget(now, id);
        }
        self.evictor.remove(now, &[id]).is_ok()
    }

    /// An object is in use, or no longer.
    pub fn hold(&mut self, id: u64, held: bool) -> bool {
        let ids = [id];
        let notified = if held { self.evictor.acquire(&ids) } else { self.evictor.release(&ids) };
        notified.is_ok()
    }

    /// What the engine says of the future of objects.
    pub fn hint(&mut self, now_ns: u64, who: &Who, ids: &[u64], hint: &Hint) -> Result<()> {
        let now = self.time(now_ns);
        if let Some(shadow) = watching(&mut self.shadow, now_ns) {
            shadow.hint(now, who, ids, hint);
        }
        self.evictor.hint(now, who, ids, hint).map(|_| ())
    }

    /// Chooses who leaves, up to `most` objects; they are gone from the policy.
    pub(crate) fn choose(&mut self, now_ns: u64, bytes: u64, most: usize, out: &mut Vec<Chosen>) {
        let now = self.time(now_ns);
        self.victims.clear();
        let units = units_of(bytes);
        if let Err(error) = self.evictor.evict_most(now, units, most, &mut self.victims) {
            log::debug!("a policy chose nobody: {error}");
        }
        self.evictor.bound_history(REMEMBERED);
        let ids = self.victims.iter().map(|victim| victim.id);
        match self.granularity {
            Granularity::Chunk => out.extend(ids.map(Chosen::Chunk)),
            Granularity::Cell => {
                let homes = self.evictor.victim_slots().map(|slot| self.homes[slot as usize]);
                out.extend(ids.zip(homes).map(|(id, home)| Chosen::Cell(id, home)));
            }
            Granularity::Session => {
                for id in ids {
                    out.extend(self.groups.take(id).map(Chosen::Member));
                }
            }
        }
    }

    /// The tier has another size; room is made ahead of need at a share of it.
    pub fn set_bytes(&mut self, bytes: u64, high: f64) {
        self.evictor.set_capacity(bytes / UNIT_BYTES);
        if let Some(shadow) = &mut self.shadow {
            shadow.set_capacity(bytes / UNIT_BYTES, high);
        }
    }

    /// Begins a trial of other policies. BUSY = one is under way.
    pub fn begin_shadow(&mut self, now_ns: u64, mut shadow: Shadow) -> Result<()> {
        self.tick(now_ns);
        if self.shadow.as_ref().is_some_and(Shadow::is_on) {
            fail!(Busy, "policies are being compared already: wait for that, or end it");
        }
        shadow.begin(now_ns);
        self.shadow = Some(shadow);
        Ok(())
    }

    /// The trial, also one that has ended.
    pub fn shadow(&self) -> Option<&Shadow> {
        self.shadow.as_ref()
    }

    /// Sees to it that a trial has ended whose time has come.
    pub fn tick(&mut self, now_ns: u64) {
        watching(&mut self.shadow, now_ns);
    }

    /// Ends the trial; what it came to is forgotten here.
    pub fn end_shadow(&mut self, now_ns: u64) -> Option<Shadow> {
        let mut shadow = self.shadow.take()?;
        shadow.end(now_ns);
        Some(shadow)
    }
}

/// A trial that still looks.
fn watching(shadow: &mut Option<Shadow>, now_ns: u64) -> Option<&mut Shadow> {
    let shadow = shadow.as_mut().filter(|shadow| shadow.is_on())?;
    shadow.tick(now_ns);
    shadow.is_on().then_some(shadow)
}

/// Evictions that can be read afterwards.
const LOG_ENTRIES: usize = 4096;
/// Evicted ids that are remembered for each object that there is room for.
const REMEMBERED: usize = 4;
