//! Units in place on a device: each unit has fixed addresses in one window, and memory is mapped
//! there while the unit is loaded. A slot is memory that moves from unit to unit.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::window::{Piece, Window};
use crate::fail;
use crate::stream::memory::{charge, credit};
use crate::stream::plan::{Plan, Residency};
use crate::stream::scheduler::Target;
use crate::stream::units::NONE;

/// Largest mapping granularity of a device.
pub const MAX_GRANULARITY_BYTES: u64 = 1 << 30;

/// Memory that moves from unit to unit.
struct Slot {
    piece: Piece,
    /// Units at whose addresses the memory may be mapped; several after a failed mapping.
    units: Vec<u32>,
}

/// Memory to free, a job for the copier thread.
pub struct FreeJob {
    window: Arc<dyn Window>,
    /// The unit that was resident there, or [`NONE`]: the memory was a slot.
    unit: u32,
    /// Units at whose addresses the memory may be mapped.
    units: Vec<u32>,
    piece: Piece,
    /// Bytes that are charged to the account.
    pub bytes: u64,
}

/// The steps that map memory at the addresses of a unit. They refer to device memory only, so they
/// run without the streamer's lock.
pub struct MapWork {
    window: Arc<dyn Window>,
    /// Slots that are still mapped there, to be unmapped first.
    others: Vec<Piece>,
    /// Memory still mapped there that the device failed to free.
    stuck: Vec<Piece>,
    piece: Piece,
    at: u64,
}

/// The addresses of all units, and their memory.
pub struct DeviceWindow {
    window: Arc<dyn Window>,
    /// Offset of each unit in the window.
    offsets: Vec<u64>,
    images: Vec<u64>,
    granularity_bytes: u64,
    slots: Vec<Slot>,
    /// Number of slots for units other than experts; the other slots are for experts.
    plain_slots: u32,
    /// Bytes of a slot of each kind.
    slot_bytes: [u64; 2],
    residents: Vec<Option<Piece>>,
    freeing: Vec<FreeJob>,
    /// Bytes that are being freed and are still charged.
    freeing_bytes: u64,
    /// Memory that the device failed to free. Freeing is retried before the unit gets memory.
    stuck: Vec<FreeJob>,
    account: Option<Arc<Account>>,
}

impl MapWork {
    /// Runs the steps.
    ///
    /// # Safety
    /// Nothing uses the addresses of the unit, nor the addresses where the memory is mapped now,
    /// and no work in flight does.
    pub unsafe fn run(&self) -> Result<()> {
        for &other in &self.others {
            // SAFETY: the caller's promise.
            unsafe { self.window.take(other)? };
        }
        for &other in &self.stuck {
            // SAFETY: as above.
            match unsafe { self.window.destroy(other) } {
                Err(error) if error.status() == Status::Handle => {} // an earlier attempt freed it
                said => said?,
            }
        }
        // SAFETY: as above.
        unsafe { self.window.put(self.piece, self.at) }
    }
}

impl FreeJob {
    /// Frees the memory.
    ///
    /// # Safety
    /// Nothing uses the memory, and no work in flight does.
    pub unsafe fn destroy(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        let destroyed = unsafe { self.window.destroy(self.piece) };
        let words = || format!("{} bytes of units in place could not be freed", self.bytes);
        destroyed.map_err(|error| error.within(&words()))
    }
}

impl DeviceWindow {
    /// Reserves addresses for all units, and allocates the memory of all slots. Each unit that
    /// fits in a slot has addresses for a whole slot, since a slot is mapped as a whole.
    pub fn new(
        images: &[u64],
        is_expert: &[bool],
        plan: &Plan,
        reserve: impl FnOnce(u64) -> Result<Arc<dyn Window>>,
        account: Option<&Arc<Account>>,
    ) -> Result<DeviceWindow> {
        let mut offsets = Vec::new();
        let mut residents = Vec::new();
        let tried = offsets.try_reserve_exact(images.len());
        tried
            .and_then(|()| residents.try_reserve_exact(images.len()))
            .map_err(|_| Status::NoMem)?;
        residents.resize(images.len(), None);
        let granularity_bytes = plan.device_granularity_bytes;
        let slot_bytes = [plan.slot_bytes, plan.expert_slot_bytes];
        let mut end = 0u64;
        for (&image, &is_expert) in images.iter().zip(is_expert) {
            offsets.push(end);
            let slot = slot_bytes[usize::from(is_expert)];
            let own = plan.footprint_bytes(image, Residency::Device);
            let reach = if image <= slot { own.max(slot) } else { own };
            end = end.checked_add(reach).ok_or(Status::Limit)?;
        }
        let window = reserve(end)?;
        let account = account.cloned();
        let mut all = DeviceWindow {
            window,
            offsets,
            images: images.to_vec(),
            granularity_bytes,
            slots: Vec::new(),
            plain_slots: plan.slots,
            slot_bytes,
            residents,
            freeing: Vec::new(),
            freeing_bytes: 0,
            stuck: Vec::new(),
            account,
        };
        (0..plan.slots).try_for_each(|_| all.add_slot(plan.slot_bytes))?;
        Ok(all)
    }

    fn add_slot(&mut self, bytes: u64) -> Result<()> {
        self.slots.try_reserve(1).map_err(|_| Status::NoMem)?;
        let piece = self.create(bytes)?;
        self.slots.push(Slot { piece, units: Vec::new() });
        Ok(())
    }

    /// Adds an expert slot.
    pub fn add_expert_slot(&mut self) -> Result<()> {
        self.add_slot(self.slot_bytes[1])
    }

    /// Removes the last expert slot, which is unused. The thread that maps memory frees it.
    pub fn drop_expert_slot(&mut self) {
        let last =
            self.slots.len().checked_sub(1).filter(|&last| last >= self.plain_slots as usize);
        let Some(slot) = last.and_then(|last| self.slots.drain(last..).next()) else { return };
        self.queue_free(NONE, slot.units, slot.piece, self.slot_bytes[1]);
    }

    /// Allocates memory and charges the account for it.
    fn create(&self, bytes: u64) -> Result<Piece> {
        charge(self.account.as_ref(), Tier::Device, bytes)?;
        self.window.create(bytes).inspect_err(|_| self.pay_back(bytes))
    }

    fn pay_back(&self, bytes: u64) {
        credit(self.account.as_ref(), Tier::Device, bytes);
    }

    fn footprint_bytes(&self, unit: u32) -> u64 {
        self.images[unit as usize].next_multiple_of(self.granularity_bytes.max(1))
    }

    /// The address of a unit, valid while memory is mapped there.
    pub fn address(&self, unit: u32) -> u64 {
        self.window.address() + self.offsets[unit as usize]
    }

    /// The range of all addresses: start and length.
    pub fn range(&self) -> (u64, u64) {
        (self.window.address(), self.window.bytes())
    }

    /// Allocates memory where a unit stays. It is mapped when the unit is loaded.
    pub fn allocate_resident(&mut self, unit: u32) -> Result<()> {
        if let Some(at) = self.freeing.iter().position(|job| job.unit == unit) {
            // The unit's former memory was not freed yet.
            let job = self.freeing.swap_remove(at);
            self.freeing_bytes -= job.bytes;
            self.residents[unit as usize] = Some(job.piece);
            return Ok(());
        }
        let piece = self.create(self.footprint_bytes(unit))?;
        self.residents[unit as usize] = Some(piece);
        Ok(())
    }

    /// Queues a unit's memory to be freed.
    pub fn free_resident(&mut self, unit: u32) {
        let Some(piece) = self.residents[unit as usize].take() else { return };
        let bytes = self.footprint_bytes(unit);
        self.queue_free(unit, vec![unit], piece, bytes);
    }

    fn queue_free(&mut self, unit: u32, units: Vec<u32>, piece: Piece, bytes: u64) {
        self.freeing.push(FreeJob { window: self.window.clone(), unit, units, piece, bytes });
        self.freeing_bytes += bytes;
    }

    /// Whether memory is being freed that other units may need.
    pub fn is_freeing(&self) -> bool {
        self.freeing_bytes > 0
    }

    /// Takes the memory that is to be freed.
    pub fn take_freeing(&mut self) -> Vec<FreeJob> {
        std::mem::take(&mut self.freeing)
    }

    /// The memory was freed, or the device failed to free it. The account is credited in both
    /// cases.
    pub fn note_freed(&mut self, job: FreeJob, is_stuck: bool) {
        self.freeing_bytes -= job.bytes;
        self.pay_back(job.bytes);
        if is_stuck && !job.units.is_empty() {
            self.stuck.push(job);
        }
    }

    fn slot_index(&self, target: Target) -> Option<usize> {
        match target {
            Target::Resident => None,
            Target::Slot(slot) => Some(slot as usize),
            Target::ExpertSlot(slot) => Some(self.plain_slots as usize + slot as usize),
        }
    }

    fn target_of(&self, number: usize) -> Target {
        match u32::try_from(number).unwrap_or(NONE) {
            slot if slot < self.plain_slots => Target::Slot(slot),
            slot => Target::ExpertSlot(slot - self.plain_slots),
        }
    }

    /// The steps that map memory at a unit's addresses, and the slots that are still mapped there.
    pub fn map_work(&self, unit: u32, target: Target) -> Result<(MapWork, Vec<Target>)> {
        let own = self.slot_index(target);
        let piece = match own {
            None => self.residents[unit as usize],
            Some(number) => self.slots.get(number).map(|slot| slot.piece),
        };
        let Some(piece) = piece else {
            fail!(State, "unit {unit} has no memory that could be mapped at its addresses");
        };
        let (mut others, mut goals) = (Vec::new(), Vec::new());
        for (number, slot) in self.slots.iter().enumerate() {
            if slot.units.contains(&unit) && Some(number) != own {
                others.push(slot.piece);
                goals.push(self.target_of(number));
            }
        }
        let of_unit = self.stuck.iter().filter(|one| one.units.contains(&unit));
        let stuck = of_unit.map(|one| one.piece).collect();
        let (window, at) = (self.window.clone(), self.offsets[unit as usize]);
        Ok((MapWork { window, others, stuck, piece, at }, goals))
    }

    /// The steps succeeded.
    pub fn note_mapped(&mut self, unit: u32, target: Target) {
        let previous = self.slots.iter_mut().filter(|slot| slot.units.contains(&unit));
        previous.for_each(|slot| slot.units.clear());
        self.stuck.retain(|one| !one.units.contains(&unit));
        if let Some(number) = self.slot_index(target) {
            self.slots[number].units.clear();
            self.slots[number].units.push(unit);
        }
    }

    /// The steps failed: a slot may be mapped at its former addresses, at the unit's, or nowhere.
    pub fn note_map_failed(&mut self, unit: u32, target: Target) {
        if let Some(number) = self.slot_index(target) {
            let units = &mut self.slots[number].units;
            units.retain(|&other| other != unit);
            units.push(unit);
        }
    }

    /// Frees all memory. Returns the first error.
    ///
    /// # Safety
    /// Nothing uses any of the memory, and no work in flight does.
    pub unsafe fn free_all(&mut self) -> Result<()> {
        (0..self.residents.len()).for_each(|unit| self.free_resident(unit as u32));
        let plain_slots = self.plain_slots as usize;
        for (number, slot) in std::mem::take(&mut self.slots).into_iter().enumerate() {
            let bytes = self.slot_bytes[usize::from(number >= plain_slots)];
            self.queue_free(NONE, Vec::new(), slot.piece, bytes);
        }
        let mut outcome = Ok(());
        for job in self.take_freeing() {
            // SAFETY: the caller's promise.
            let destroyed = unsafe { job.destroy() };
            self.note_freed(job, false);
            outcome = outcome.and(destroyed);
        }
        outcome
    }
}

impl Drop for DeviceWindow {
    fn drop(&mut self) {
        // SAFETY: the owner of the window is dropped, as for [`super::WeightMemory`].
        if let Err(error) = unsafe { self.free_all() } {
            log::warn!("{error}");
        }
    }
}
