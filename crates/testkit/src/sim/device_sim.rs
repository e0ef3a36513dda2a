//! Stores with a device tier: its size and policy change, and the device fails or is lost. Device
//! replicas must match host memory or disk.

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

/// Device tier of a run.
pub(super) struct DeviceSim {
    random: Random,
    seed: u64,
    lives: u64,
    config: DeviceConfig,
    /// The device may be lost.
    loses: bool,
}

impl DeviceSim {
    /// For a seed: half of those with an asynchronous device. The other seeds run as without.
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

    /// Copies over the bus that are damaged, in thousandths.
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
    /// Address space of the next transfer's tensors.
    pub(super) fn memory(&mut self) -> Memory {
        let draws = self.device_sim.as_mut().map(|device_sim| device_sim.random.below(4));
        if draws.is_some_and(|n| n > 0) { Memory::Device } else { Memory::Host }
    }

    /// Whether copies may be damaged twice.
    pub(super) fn may_damage(&self) -> bool {
        self.device_sim.as_ref().is_some_and(|device_sim| device_sim.damage_permille() > 0)
    }

    pub(super) fn may_lose_device(&self) -> bool {
        self.device_sim.as_ref().is_some_and(|device_sim| device_sim.loses)
    }

    /// The device of the next life: a lost one does not return.
    pub(super) fn next_device(&mut self) -> Outcome<Arc<dyn Device>> {
        match &mut self.device_sim {
            Some(device_sim) => {
                device_sim.lives += 1;
                device_sim.device(&self.clock)
            }
            None => Ok(self.tools.device.clone()),
        }
    }

    /// One random step of the device tier.
    pub(super) fn device_step(&mut self) -> Outcome<()> {
        let Some(device_sim) = &mut self.device_sim else { return Ok(()) };
        let bytes = device_sim.random.below(9) * LEAST_BYTES;
        let policy = POLICIES[device_sim.random.below(4) as usize];
        let choice = device_sim.random.below(120);
        let mut core = self.core.0.lock();
        match choice {
            0 => core.set_device_bytes(bytes)?,
            1 => drop(core.shrink_device(bytes)),
            2 => core.set_policy(Tier::Device, policy)?,
            _ => {}
        }
        core.check_replicas()?;
        drop(core);
        if choice < 12 {
            self.damage(choice as usize);
            self.core.0.lock().check_replicas()?;
        }
        if choice == 3 {
            self.report.audited += self.audit()?;
        }
        Ok(())
    }

    /// Simulates compaction that finds a damaged cell of some session on disk.
    fn damage(&mut self, draw: usize) {
        let Some(session) = self.sessions.get(draw % self.sessions.len().max(1)) else { return };
        let mut core = self.core.0.lock();
        let found = core.session(session.number).ok().and_then(|one| {
            let (table, namespace) =
                (core.table_of(one.namespace())?, core.namespace(one.namespace())?);
            let layer = draw % table.layout.layers();
            // Prefer a cell that is being copied to the device.
            let is_filled = |slot: &Slot| {
                let marks = table.chunks.marks(*slot).and_then(|all| all.get(layer));
                marks.is_some_and(|marks| marks.arriving() & 1 != 0)
            };
            let slots = one.path().slots();
            let slot = *slots.iter().find(|slot| is_filled(slot)).or(slots.first())?;
            let cell = Cell { chunk: slot, layer };
            let place = table.chunks.place(cell, Tier::Disk).ok()?;
            let Some(Location::Disk { spot, seal, coded }) = place else { return None };
            let chunk = table.record_of(slot, namespace.key);
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

    /// Reads back all device replicas; returns the number of right ones.
    pub(super) fn audit(&mut self) -> Outcome<u64> {
        let list = self.core.0.lock().audit_list();
        let all = self.core.0.lock().begin_audit(&list);
        let mut audited = Audited::default();
        for audit in all {
            // SAFETY: the audit is ended below.
            let found = unsafe { self.tools.audit(&audit, Stream(0)) };
            let known = [None, Some(Status::Io), Some(Status::Unavailable)];
            if !known.contains(&found.as_ref().err().map(|error| error.status())) {
                return Err(wrong(format!("an audit ended with {found:?}")));
            }
            self.core.0.lock().end_audit(audit, found, &mut audited);
        }
        match audited.wrong {
            0 => Ok(audited.right),
            n => Err(wrong(format!("{n} device replicas are wrong"))),
        }
    }
}
