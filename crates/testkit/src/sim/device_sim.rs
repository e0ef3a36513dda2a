//! Stores with a device tier, and what happens to it: it gets larger and smaller, another
//! policy decides, the device fails, or is lost. What is there must be what host memory or
//! the disk has.

use crate::sim::world::{Outcome, World, wrong};
use kvtier::base::budget::Tier;
use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Device, Memory, Stream};
use kvtier::meta::chunks::{Cell, Location};
use kvtier::meta::index::Slot;
use kvtier::store::state::DeviceConfig;
use kvtier::store::state::device_tier::Audited;
use kvtier::tier::disk::{CellAt, Spot};

const POLICIES: [&str; 4] = ["lru", "s3fifo", "sieve", "horizon"];
const LEAST_BYTES: u64 = 64 << 10;

/// What is drawn of that.
pub(super) struct DeviceSim {
    random: Random,
    seed: u64,
    lives: u64,
    config: DeviceConfig,
    /// A life may lose its device.
    loses: bool,
}

impl DeviceSim {
    /// That of a seed: half of those that have a device that takes its time. All others do as
    /// they would without.
    pub(super) fn of(seed: u64) -> Option<DeviceSim> {
        let mut random = Random::new(seed ^ 0x4EA2);
        let has = seed % 2 == 0 && random.coin();
        has.then(|| {
            let config = DeviceConfig {
                bytes: (1 + random.below(8)) * LEAST_BYTES,
                policy: POLICIES[random.below(4) as usize].into(),
                admission: ["all", "all", "select(hits=2)"][random.below(3) as usize].into(),
            };
            let loses = random.coin();
            DeviceSim { random, seed, lives: 0, config, loses }
        })
    }

    pub(super) fn config(&self) -> DeviceConfig {
        self.config.clone()
    }

    /// How many copies of a thousand come damaged over its bus.
    fn damage_permille(&self) -> u64 {
        [0, 0, 10, 60][(self.seed >> 2) as usize % 4]
    }

    /// The device of a life.
    pub(super) fn device(&self, clock: &Clock) -> Outcome<Arc<dyn Device>> {
        let mut random = Random::new(self.seed ^ (self.lives + 1) << 32);
        let failures = random.below(2) * random.below(40);
        let has_little = random.below(4) == 0;
        let opts = SimulatedOpts {
            seed: self.seed,
            fail_at: (0..failures).map(|_| 1 + random.below(300)).collect(),
            lost_at: if self.loses && random.coin() { 1 + random.below(400) } else { 0 },
            memory_bytes: if has_little { (1 + random.below(4)) * LEAST_BYTES } else { 0 },
            sums: self.damage_permille() > 0,
            damage_permille: self.damage_permille(),
            ..SimulatedOpts::default()
        };
        Ok(Arc::new(Simulated::new(clock.clone(), opts)?))
    }
}

impl World {
    /// Where the engine has the tensors of the next move.
    pub(super) fn memory(&mut self) -> Memory {
        let draws = self.device_sim.as_mut().map(|device_sim| device_sim.random.below(4));
        if draws.is_some_and(|n| n > 0) { Memory::Device } else { Memory::Host }
    }

    /// Copies may come damaged twice.
    pub(super) fn may_damage(&self) -> bool {
        self.device_sim.as_ref().is_some_and(|device_sim| device_sim.damage_permille() > 0)
    }

    pub(super) fn may_lose_device(&self) -> bool {
        self.device_sim.as_ref().is_some_and(|device_sim| device_sim.loses)
    }

    /// The device of the next life: one that was lost does not come back.
    pub(super) fn next_device(&mut self) -> Outcome<Arc<dyn Device>> {
        match &mut self.device_sim {
            Some(device_sim) => {
                device_sim.lives += 1;
                device_sim.device(&self.clock)
            }
            None => Ok(self.tools.device.clone()),
        }
    }

    /// Something happens to the device tier, or nothing.
    pub(super) fn near_wish(&mut self) -> Outcome<()> {
        let Some(device_sim) = &mut self.device_sim else { return Ok(()) };
        let bytes = device_sim.random.below(9) * LEAST_BYTES;
        let policy = POLICIES[device_sim.random.below(4) as usize];
        let what = device_sim.random.below(120);
        let mut core = self.core.0.lock();
        match what {
            0 => core.set_device_bytes(bytes)?,
            1 => drop(core.shrink_device(bytes)),
            2 => core.set_policy(Tier::Device, policy)?,
            _ => {}
        }
        core.check_replicas()?;
        drop(core);
        if what < 12 {
            self.damage(what as usize);
            self.core.0.lock().check_replicas()?;
        }
        if what == 3 {
            self.report.audited += self.audit()?;
        }
        Ok(())
    }

    /// Cleaning finds a cell of some session damaged on disk.
    fn damage(&mut self, draw: usize) {
        let Some(session) = self.sessions.get(draw % self.sessions.len().max(1)) else { return };
        let mut core = self.core.0.lock();
        let found = core.session(session.number).ok().and_then(|one| {
            let (table, space) = (core.table_of(one.space())?, core.space(one.space())?);
            let layer = draw % table.layout.layers();
            // One that is on its way to the device, if there is one.
            let is_filled = |slot: &Slot| {
                let marks = table.chunks.marks(*slot).and_then(|all| all.get(layer));
                marks.is_some_and(|marks| marks.arriving() & 1 != 0)
            };
            let slots = one.path().slots();
            let slot = *slots.iter().find(|slot| is_filled(slot)).or(slots.first())?;
            let cell = Cell { chunk: slot, layer };
            let place = table.chunks.place(cell, Tier::Disk).ok()?;
            let Some(Location::Disk { spot, seal, coded }) = place else { return None };
            let chunk = table.record_of(slot, space.key);
            let (spot, stored_bytes) = (Spot(spot), table.disk_bytes(cell, coded));
            Some(CellAt { chunk, layer: layer as u32, spot, seal, stored_bytes })
        });
        let Some(cell) = found else { return };
        if core.lost(&cell)
            && let Some(disk) = &self.tools.disk
        {
            disk.drop_cells([(cell.spot, cell.stored_bytes)]);
        }
    }

    /// Reads all back that is in device memory; how much of it was right.
    pub(super) fn audit(&mut self) -> Outcome<u64> {
        let list = self.core.0.lock().audit_list();
        let all = self.core.0.lock().begin_audit(&list);
        let mut audited = Audited::default();
        for one in all {
            // SAFETY: the audit is ended below.
            let found = unsafe { self.tools.audit(&one, Stream(0)) };
            let known = [None, Some(Status::Io), Some(Status::Unavailable)];
            if !known.contains(&found.as_ref().err().map(|error| error.status())) {
                return Err(wrong(format!("an audit ended with {found:?}")));
            }
            self.core.0.lock().end_audit(one, found, &mut audited);
        }
        match audited.wrong {
            0 => Ok(audited.right),
            n => Err(wrong(format!("{n} cells in device memory are not what they should be"))),
        }
    }
}
