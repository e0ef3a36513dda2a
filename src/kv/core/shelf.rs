//! What a tier's policy is told. Its objects are chunks; a unit is a block of
//! 4 KiB.

use crate::base::status::Result;
use crate::fail;
use crate::kv::core::trial::Trial;
use crate::policy::Hint;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, New, Options, Who};

/// Bytes of a unit.
pub const UNIT_BYTES: u64 = 4096;

/// Units that some bytes take.
pub fn units_of(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT_BYTES).max(1)
}

/// A policy at work for one tier.
pub struct Shelf {
    /// The policy.
    pub evictor: Evictor,
    trial: Option<Trial>,
}

impl Shelf {
    /// Opens one for up to `max_objects` chunks and `bytes` bytes.
    pub fn open(spec: &str, max_objects: usize, bytes: u64, holes: bool) -> Result<Shelf> {
        let options = Options {
            max_objects,
            capacity_units: bytes / UNIT_BYTES,
            holes,
            log_entries: LOG_ENTRIES,
            remember: max_objects.min(1 << 20),
            ..Options::default()
        };
        Ok(Shelf { evictor: Evictor::open(spec, &options)?, trial: None })
    }

    /// The time that the policy can be told: it does not go back.
    fn time(&self, now_ns: u64) -> i64 {
        self.evictor.now_ns().max(i64::try_from(now_ns).unwrap_or(i64::MAX / 2))
    }

    /// Chunks of a path are asked for.
    pub fn look(&mut self, now_ns: u64, who: &Who, ids: &[u64]) {
        let now = self.time(now_ns);
        if let Err(error) = self.evictor.lookup(now, who, ids, &mut []) {
            log::debug!("a policy refused a lookup: {error}");
        }
        if let Some(trial) = watching(&mut self.trial, now_ns) {
            trial.look(now, &self.evictor, who, ids);
        }
    }

    /// Chunks come. False when the policy has no room for them.
    pub fn insert(&mut self, now_ns: u64, who: &Who, new: &[New]) -> bool {
        let now = self.time(now_ns);
        let entered = self.evictor.insert(now, who, new);
        if let Err(error) = &entered {
            log::debug!("a policy refused {} chunks: {error}", new.len());
        }
        if let Some(trial) = watching(&mut self.trial, now_ns) {
            trial.take_in(now, who, new);
        }
        // One that has left the tier, and that others continue, is known still.
        let is_known = |one: &New| self.evictor.objects().find(one.id).is_some();
        entered.is_ok() || new.iter().all(is_known)
    }

    /// A chunk is gone, and not by the policy's choice. False when others continue
    /// it: then it stays, and frees nothing when it is chosen.
    pub fn remove(&mut self, now_ns: u64, id: u64) -> bool {
        let now = self.time(now_ns);
        if let Some(trial) = watching(&mut self.trial, now_ns) {
            trial.forget(now, id);
        }
        self.evictor.remove(now, &[id]).is_ok()
    }

    /// A chunk is in use, or no longer.
    pub fn hold(&mut self, id: u64, held: bool) -> bool {
        let ids = [id];
        let told = if held { self.evictor.acquire(&ids) } else { self.evictor.release(&ids) };
        told.is_ok()
    }

    /// What the engine says of the future of chunks.
    pub fn hint(&mut self, now_ns: u64, who: &Who, ids: &[u64], hint: &Hint) -> Result<()> {
        let now = self.time(now_ns);
        if let Some(trial) = watching(&mut self.trial, now_ns) {
            trial.hint(now, who, ids, hint);
        }
        self.evictor.hint(now, who, ids, hint).map(|_| ())
    }

    /// Chooses who leaves, up to `most`; they are gone from the policy.
    pub fn choose(&mut self, now_ns: u64, bytes: u64, most: usize, out: &mut Vec<Victim>) {
        let now = self.time(now_ns);
        if let Err(error) = self.evictor.evict_most(now, units_of(bytes), most, out) {
            log::debug!("a policy chose nobody: {error}");
        }
    }

    /// The tier has another size; room is made ahead of need at a share of it.
    pub fn set_bytes(&mut self, bytes: u64, high: f64) {
        self.evictor.set_capacity(bytes / UNIT_BYTES);
        if let Some(trial) = &mut self.trial {
            trial.set_capacity(bytes / UNIT_BYTES, high);
        }
    }

    /// Begins a trial of other policies. BUSY = one is under way.
    pub fn begin_trial(&mut self, now_ns: u64, mut trial: Trial) -> Result<()> {
        self.tick(now_ns);
        if self.trial.as_ref().is_some_and(Trial::is_on) {
            fail!(Busy, "policies are being compared already: wait for that, or end it");
        }
        trial.begin(now_ns);
        self.trial = Some(trial);
        Ok(())
    }

    /// The trial, also one that has ended.
    pub fn trial(&self) -> Option<&Trial> {
        self.trial.as_ref()
    }

    /// Sees to it that a trial has ended whose time has come.
    pub fn tick(&mut self, now_ns: u64) {
        watching(&mut self.trial, now_ns);
    }

    /// Ends the trial; what it came to is forgotten here.
    pub fn end_trial(&mut self, now_ns: u64) -> Option<Trial> {
        let mut trial = self.trial.take()?;
        trial.end(now_ns);
        Some(trial)
    }
}

/// A trial that still looks.
fn watching(trial: &mut Option<Trial>, now_ns: u64) -> Option<&mut Trial> {
    let trial = trial.as_mut().filter(|trial| trial.is_on())?;
    trial.tick(now_ns);
    trial.is_on().then_some(trial)
}

/// Evictions that can be read afterwards.
const LOG_ENTRIES: usize = 4096;
