//! Memory of a streamer: slots, staging and resident units, and the address of each unit.
//!
//! Units are *in place* if each unit has a fixed address in one reserved address range, the window.
//! Memory is then mapped at the unit's address while the unit is resident or in a slot. Otherwise
//! slots and resident units have memory blocks of their own.

pub mod device_window;

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::fault::Faults;
use crate::base::memory::{AllocationRequest, Buffer, HUGE_PAGE_BYTES, Requirement};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::base::window::Window;
use crate::device::{Device, DeviceMemory, Memory};
use crate::fail;
use crate::stream::memory::device_window::DeviceWindow;
use crate::stream::plan::{ComputeLocation, Plan, Residency};
use crate::stream::scheduler::Target;
use crate::stream::units::{NONE, Role, Units};

fn charge(account: Option<&Arc<Account>>, tier: Tier, bytes: u64) -> Result<()> {
    account.map_or(Ok(()), |account| account.take(tier, bytes))
}

fn credit(account: Option<&Arc<Account>>, tier: Tier, bytes: u64) {
    account.into_iter().for_each(|account| account.give_back(tier, bytes));
}

/// A block of device memory.
pub struct DeviceBlock {
    device: Arc<dyn Device>,
    memory: DeviceMemory,
    account: Option<Arc<Account>>,
}

impl DeviceBlock {
    /// # Safety
    /// No unit in the block is used, and no work in flight uses it.
    unsafe fn free(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.device.free(&self.memory) };
        // Memory that the device still uses is not freed, and stays charged.
        let is_gone = !outcome.as_ref().is_err_and(|error| error.status() == Status::Busy);
        credit(self.account.as_ref().filter(|_| is_gone), Tier::Device, self.memory.bytes);
        let bytes = self.memory.bytes;
        outcome.map_err(|error| {
            error.within(&format!("{bytes} bytes of device memory could not be freed"))
        })
    }
}

/// A block of host memory, registered with the device if the device copies from it.
struct HostBlock {
    buffer: Buffer,
    registered_with: Option<Arc<dyn Device>>,
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        let Some(device) = &self.registered_with else { return };
        // SAFETY: no transfer of a resident unit or of staging is in flight when its block is
        // dropped.
        if let Err(error) = unsafe { device.unregister_host(self.buffer.address()) } {
            log::warn!("host memory of weights stays registered with the device: {error}");
        }
    }
}

enum Block {
    Host(HostBlock),
    Device(DeviceBlock),
    /// Units in place: the unit's part of the window, charged to the account while the unit is
    /// resident.
    InWindow,
}

/// Most units of a window with huge pages. Each may split a mapping of the process in three; the
/// limit of mappings is about 65,000.
const MAX_HUGE_UNITS: usize = 8192;

/// Units in place in host memory: a reserved address range, with memory behind parts of it.
struct HostWindow {
    window: Window,
    /// Offset of each unit.
    offsets: Vec<u64>,
    account: Option<Arc<Account>>,
    /// Bytes charged for slots, independent of the units in them.
    slots_bytes: u64,
}

impl Drop for HostWindow {
    fn drop(&mut self) {
        credit(self.account.as_ref(), Tier::Host, self.slots_bytes);
    }
}

/// The location of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Address of its image.
    pub address: u64,
    /// Memory in which the address is valid.
    pub memory: Memory,
}

/// Where memory is allocated, and which account is charged.
pub struct MemorySource<'a> {
    /// The device, if the engine computes on one.
    pub device: Option<&'a Arc<dyn Device>>,
    /// The account to charge, if there is one.
    pub account: Option<&'a Arc<Account>>,
    /// Planted faults.
    pub faults: Option<&'a Faults>,
}

/// Device memory that is queued to be freed. Drivers are slow, so it is freed without a lock.
pub struct FreedBlock {
    unit: u32,
    block: DeviceBlock,
}

impl FreedBlock {
    /// Frees the memory, unless the device reports that it is still in use.
    ///
    /// # Safety
    /// Nothing uses the memory, and no work in flight does.
    pub unsafe fn free(self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.block.free() }
    }
}

/// The memory of a streamer.
#[derive(Default)]
pub struct WeightMemory {
    slots: Option<Block>,
    slot_bytes: u64,
    experts: ExpertSlots,
    staging: Option<HostBlock>,
    chunk_bytes: u64,
    residents: Vec<Option<Block>>,
    images: Vec<u64>,
    host_window: Option<HostWindow>,
    device_window: Option<DeviceWindow>,
    /// Blocks queued to be freed.
    freed_blocks: Vec<FreedBlock>,
    /// Number of blocks that are being freed or allocated without a lock.
    in_flight: usize,
    /// The unit for which device memory must be allocated without a lock; [`NONE`] = the memory of
    /// expert slots.
    requested: Option<u32>,
    /// The allocated memory for that unit, or the error.
    allocated: Option<(u32, Result<DeviceBlock>)>,
}

impl WeightMemory {
    /// Allocates the memory of a plan. `in_place`: units are in place, in a window of the memory
    /// that the engine computes in.
    pub fn new(
        units: &Units,
        plan: &Plan,
        in_place: bool,
        source: &MemorySource,
    ) -> Result<WeightMemory> {
        let compute = plan.compute;
        let images: Vec<u64> = units.units.iter().map(|unit| unit.image_bytes).collect();
        let total = |count: u32, bytes: u64| u64::from(count).checked_mul(bytes);
        let slots_bytes = total(plan.slots, plan.slot_bytes).ok_or(Status::Limit)?;
        total(plan.expert_slots, plan.expert_slot_bytes).ok_or(Status::Limit)?;
        let mut residents = Vec::new();
        residents.try_reserve_exact(images.len()).map_err(|_| Status::NoMem)?;
        residents.resize_with(images.len(), || None);
        let mut memory = WeightMemory {
            slots: None,
            slot_bytes: plan.slot_bytes,
            experts: ExpertSlots::of(plan),
            staging: None,
            chunk_bytes: plan.chunk_bytes,
            residents,
            images,
            host_window: None,
            device_window: None,
            freed_blocks: Vec::new(),
            in_flight: 0,
            requested: None,
            allocated: None,
        };
        if in_place && compute == ComputeLocation::Device {
            memory.device_window = Some(memory.new_device_window(units, plan, source)?);
        } else if in_place {
            memory.host_window = Some(memory.new_host_window(slots_bytes, source)?);
        } else if slots_bytes > 0 {
            memory.slots = Some(allocate_slots(compute, slots_bytes, source)?);
        }
        while memory.expert_slots() < plan.expert_slots {
            memory.add_expert_slots(compute, source)?;
        }
        if compute == ComputeLocation::Device {
            memory.staging = Some(allocate_on_host(plan.staging_bytes, true, source)?);
        }
        for (unit, residency) in plan.residencies.iter().enumerate() {
            memory.allocate_resident(unit as u32, *residency, compute, source)?;
        }
        Ok(memory)
    }

    fn new_host_window(&self, slots_bytes: u64, source: &MemorySource) -> Result<HostWindow> {
        let mut offsets = Vec::new();
        offsets.try_reserve_exact(self.images.len()).map_err(|_| Status::NoMem)?;
        let mut end = 0u64;
        for image in &self.images {
            // Huge pages hold bytes of one unit only, so that they come and go with it.
            let align = if *image < HUGE_PAGE_BYTES { 1 } else { HUGE_PAGE_BYTES };
            let at = end.checked_next_multiple_of(align).ok_or(Status::Limit)?;
            offsets.push(at);
            end = at.checked_add(*image).ok_or(Status::Limit)?;
        }
        let window = Window::reserve(end)?;
        if offsets.len() <= MAX_HUGE_UNITS {
            let mut units = offsets.iter().zip(&self.images);
            units.try_for_each(|(at, image)| window.prefer_huge(*at, *image))?;
        }
        charge(source.account, Tier::Host, slots_bytes)?;
        Ok(HostWindow { window, offsets, account: source.account.cloned(), slots_bytes })
    }

    fn new_device_window(
        &self,
        units: &Units,
        plan: &Plan,
        source: &MemorySource,
    ) -> Result<DeviceWindow> {
        let device = source.device.ok_or(Status::Invalid)?.clone();
        let is_expert: Vec<bool> =
            units.units.iter().map(|unit| unit.role == Role::Expert).collect();
        let reserve = |bytes| device.window(bytes);
        DeviceWindow::new(&self.images, &is_expert, plan, reserve, source.account)
    }

    /// Allocates memory for a resident unit, according to its residency.
    pub fn allocate_resident(
        &mut self,
        unit: u32,
        residency: Residency,
        compute: ComputeLocation,
        source: &MemorySource,
    ) -> Result<()> {
        let bytes = self.images[unit as usize];
        let block = match (residency, &self.host_window) {
            (Residency::File, _) => None,
            (Residency::Host, Some(host_window)) => {
                charge(host_window.account.as_ref(), Tier::Host, bytes)?;
                Some(Block::InWindow)
            }
            (Residency::Host, None) => Some(Block::Host(allocate_on_host(
                bytes,
                compute == ComputeLocation::Device,
                source,
            )?)),
            (Residency::Device, _) => match &mut self.device_window {
                Some(device_window) => {
                    device_window.allocate_resident(unit).map(|()| Some(Block::InWindow))?
                }
                None => Some(Block::Device(
                    match self.allocated.take_if(|allocated| allocated.0 == unit) {
                        Some((_, allocated)) => allocated?,
                        None => match self.freed_blocks.iter().position(|freed| freed.unit == unit)
                        {
                            Some(at) => self.freed_blocks.swap_remove(at).block,
                            None => allocate_on_device(bytes, source)?,
                        },
                    },
                )),
            },
        };
        self.residents[unit as usize] = block;
        Ok(())
    }

    /// Frees the memory of a resident unit; device memory is only queued. The unit has no memory
    /// afterwards, also after an error.
    ///
    /// # Safety
    /// Nothing uses the memory, and no work in flight does. For units in place, the unit is in no
    /// slot either.
    pub unsafe fn free_resident(&mut self, unit: u32) -> Result<()> {
        let block = match self.residents[unit as usize].take() {
            Some(Block::Device(block)) => {
                self.freed_blocks.push(FreedBlock { unit, block });
                return Ok(());
            }
            block => block,
        };
        let outcome = match (&block, &self.host_window) {
            (Some(Block::InWindow), None) => {
                self.device_window
                    .iter_mut()
                    .for_each(|device_window| device_window.free_resident(unit));
                Ok(())
            }
            (Some(Block::InWindow), Some(host_window)) => {
                // SAFETY: the caller's promise.
                let cleared = unsafe { self.clear(unit) };
                credit(host_window.account.as_ref(), Tier::Host, self.images[unit as usize]);
                cleared
            }
            _ => Ok(()),
        };
        drop(block);
        outcome
    }

    /// Whether device memory for a resident unit is ready; otherwise requests it.
    pub fn has_device_memory_for(&mut self, unit: u32) -> bool {
        let allocated = self.allocated.as_ref().map(|(unit, _)| *unit);
        if self.device_window.is_none() && allocated.is_none() {
            self.requested.get_or_insert(unit);
        }
        self.device_window.is_some() || allocated == Some(unit)
    }

    /// Takes the request: the unit and the number of bytes, to be allocated without a lock and
    /// reported with [`WeightMemory::note_allocated`].
    pub fn take_request(&mut self) -> Option<(u32, u64)> {
        let unit = self.requested.take()?;
        self.in_flight += 1;
        let bytes = self.images.get(unit as usize).copied();
        Some((unit, bytes.unwrap_or_else(|| self.experts.next_bytes())))
    }

    /// Stores the requested memory, or the error.
    pub fn note_allocated(&mut self, unit: u32, allocated: Result<DeviceBlock>) {
        self.note_freed(1);
        self.allocated = Some((unit, allocated));
    }

    /// Cancels the request, and queues the allocated memory to be freed, if `is_needed` is false
    /// for their unit.
    pub fn cancel_requests(&mut self, is_needed: impl Fn(u32) -> bool) {
        self.requested.take_if(|unit| !is_needed(*unit));
        if let Some((unit, Ok(block))) = self.allocated.take_if(|(unit, _)| !is_needed(*unit)) {
            self.freed_blocks.push(FreedBlock { unit, block });
        }
    }

    /// Takes the blocks that the caller frees without a lock and then reports with
    /// [`WeightMemory::note_freed`].
    pub fn take_freed_blocks(&mut self) -> Vec<FreedBlock> {
        self.in_flight += self.freed_blocks.len();
        std::mem::take(&mut self.freed_blocks)
    }

    /// Records that `count` of these blocks were freed.
    pub fn note_freed(&mut self, count: usize) {
        self.in_flight = self.in_flight.saturating_sub(count);
    }

    /// Whether device memory is being freed or allocated. Meanwhile no other memory is requested.
    pub fn is_freeing(&self) -> bool {
        let is_freeing = self.device_window.as_ref().is_some_and(DeviceWindow::is_freeing);
        is_freeing || !self.freed_blocks.is_empty() || self.in_flight > 0
    }

    /// Frees all memory. Returns the first error.
    ///
    /// # Safety
    /// Nothing uses any of the memory, and no work in flight does.
    pub unsafe fn free_all(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for unit in 0..self.residents.len() {
            // SAFETY: the caller's promise.
            outcome = outcome.and(unsafe { self.free_resident(unit as u32) });
        }
        self.cancel_requests(|_| false);
        for freed in self.take_freed_blocks() {
            // SAFETY: the caller's promise.
            outcome = outcome.and(unsafe { freed.free() });
        }
        let experts = std::mem::take(&mut self.experts).blocks;
        for block in self.slots.take().into_iter().chain(experts) {
            if let Block::Device(block) = &block {
                // SAFETY: the caller's promise.
                outcome = outcome.and(unsafe { block.free() });
            }
        }
        if let Some(mut device_window) = self.device_window.take() {
            // SAFETY: the caller's promise.
            outcome = outcome.and(unsafe { device_window.free_all() });
        }
        (self.staging, self.host_window) = (None, None);
        outcome
    }

    /// Frees the memory of a unit in place that was evicted from its slot.
    ///
    /// # Safety
    /// Nothing uses the memory, and no work in flight does.
    pub unsafe fn clear(&self, unit: u32) -> Result<()> {
        let Some(host_window) = &self.host_window else { return Ok(()) };
        let (at, bytes) = (host_window.offsets[unit as usize], self.images[unit as usize]);
        // SAFETY: the caller's promise.
        let freed = unsafe { host_window.window.give_back(at, bytes) };
        freed.map(|_| ()).map_err(|error| {
            error.within(&format!("{bytes} bytes of an evicted unit could not be freed"))
        })
    }

    /// The location of a unit, in a slot or in its resident memory.
    pub fn at(&self, unit: u32, target: Target) -> Result<Location> {
        if let Some(host_window) = &self.host_window {
            let address = host_window.window.address() as u64 + host_window.offsets[unit as usize];
            return Ok(Location { address, memory: Memory::Host });
        }
        if let Some(device_window) = &self.device_window {
            match (target, &self.residents[unit as usize]) {
                (Target::Resident, Some(Block::Host(_))) => {}
                _ => {
                    return Ok(Location {
                        address: device_window.address(unit),
                        memory: Memory::Device,
                    });
                }
            }
        }
        let (block, offset) = match target {
            Target::Resident => (self.residents[unit as usize].as_ref(), 0),
            Target::Slot(slot) => (self.slots.as_ref(), u64::from(slot) * self.slot_bytes),
            Target::ExpertSlot(slot) => self.experts.at(slot),
        };
        let (address, memory) = match block {
            Some(Block::Host(block)) => (block.buffer.address() as u64, Memory::Host),
            Some(Block::Device(block)) => (block.memory.address, block.memory.memory),
            _ => return Err(Status::State.into()),
        };
        Ok(Location { address: address + offset, memory })
    }

    /// The address of a staging slot.
    pub fn staging(&self, slot: u32) -> Result<u64> {
        let staging = self.staging.as_ref().ok_or(Status::State)?;
        Ok(staging.buffer.address() as u64 + u64::from(slot) * self.chunk_bytes)
    }

    /// The fixed address of a unit in place. `on_processor`: the CPU uses the unit, so the address
    /// is in host memory.
    pub fn fixed_address(&self, unit: u32, on_processor: bool) -> Result<u64> {
        match &self.device_window {
            Some(device_window) if !on_processor => Ok(device_window.address(unit)),
            _ => Ok(self.at(unit, Target::Resident)?.address),
        }
    }

    /// The window of units in place on a device.
    pub fn device_window(&mut self) -> Option<&mut DeviceWindow> {
        self.device_window.as_mut()
    }

    /// The slots in device memory: address and length.
    pub fn device_slots(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.slots.iter().chain(&self.experts.blocks).filter_map(|block| match block {
            Block::Device(block) if block.memory.memory == Memory::Device => {
                Some((block.memory.address, block.memory.bytes))
            }
            _ => None,
        })
    }

    /// The address range of units in place: start and length.
    pub fn range(&self) -> Option<(u64, u64)> {
        if let Some(device_window) = &self.device_window {
            return Some(device_window.range());
        }
        self.host_window.as_ref().map(|host| (host.window.address() as u64, host.window.bytes()))
    }
}

impl Drop for WeightMemory {
    fn drop(&mut self) {
        // SAFETY: the streamer is being dropped: its threads have ended, and the engine guarantees
        // that it no longer uses leased units.
        if let Err(error) = unsafe { self.free_all() } {
            log::warn!("{error}");
        }
    }
}

fn allocate_on_host(bytes: u64, pinned: bool, source: &MemorySource) -> Result<HostBlock> {
    let request = AllocationRequest {
        bytes,
        pin: if pinned { Requirement::Try } else { Requirement::No },
        // Direct reads touch each page for the first time, which is faster with huge pages. They
        // are only preferred: rounding the length up to huge pages would exceed the plan.
        prefer_huge: true,
        account: source.account.cloned(),
        ..AllocationRequest::default()
    };
    let mut block =
        HostBlock { buffer: Buffer::map(&request, source.faults)?, registered_with: None };
    let device = source.device.filter(|device| pinned && device.facts().wants_pinned);
    let Some(device) = device else { return Ok(block) };
    // SAFETY: the memory stays until it is unregistered.
    match unsafe { device.register_host(block.buffer.address(), block.buffer.bytes()) } {
        Ok(()) => block.registered_with = Some(device.clone()),
        Err(error) if error.status() == Status::Unavailable => return Err(error),
        Err(error) => log::warn!(
            "copies from host memory of weights are slow, because the device could not register \
             it: {error}"
        ),
    }
    Ok(block)
}

/// Allocates device memory. Drivers are slow: call this without a lock where possible.
pub fn allocate_on_device(bytes: u64, source: &MemorySource) -> Result<DeviceBlock> {
    let Some(device) = source.device else {
        fail!(Invalid, "the plan computes on a device, and no device was given: set `device`");
    };
    charge(source.account, Tier::Device, bytes)?;
    let allocated = device.allocate(bytes);
    let memory = allocated.inspect_err(|_| credit(source.account, Tier::Device, bytes))?;
    let account = source.account.cloned();
    Ok(DeviceBlock { device: device.clone(), memory, account })
}

fn allocate_slots(compute: ComputeLocation, bytes: u64, source: &MemorySource) -> Result<Block> {
    match compute {
        ComputeLocation::Host => allocate_on_host(bytes, false, source).map(Block::Host),
        ComputeLocation::Device => allocate_on_device(bytes, source).map(Block::Device),
    }
}

// Memory of the expert slots. Slots are added and freed at the end.

/// Slots of one size. Memory is allocated and freed in blocks of `step` slots. If units are in
/// place, slots have no addresses of their own, and there are no blocks.
#[derive(Default)]
struct ExpertSlots {
    pub blocks: Vec<Block>,
    slot_bytes: u64,
    count: u32,
    /// Most slots.
    max_count: u32,
    /// Slots of a block.
    step: u32,
}

impl ExpertSlots {
    pub fn of(plan: &Plan) -> ExpertSlots {
        ExpertSlots {
            blocks: Vec::new(),
            slot_bytes: plan.expert_slot_bytes,
            count: 0,
            max_count: plan.expert_slots,
            step: plan.expert_slots_step.max(1),
        }
    }

    /// Slots of the next block; the last block may be smaller.
    fn next_slots(&self) -> u32 {
        (self.max_count - self.count).min(self.step)
    }

    /// Bytes of the next block.
    pub fn next_bytes(&self) -> u64 {
        u64::from(self.next_slots()) * self.slot_bytes
    }

    /// The block of a slot, and the offset of the slot in it.
    pub fn at(&self, slot: u32) -> (Option<&Block>, u64) {
        let step = self.step.max(1);
        (self.blocks.get((slot / step) as usize), u64::from(slot % step) * self.slot_bytes)
    }
}

impl WeightMemory {
    /// Number of expert slots with memory.
    pub fn expert_slots(&self) -> u32 {
        self.experts.count
    }

    /// Allocates one more block of expert slots.
    pub fn add_expert_slots(
        &mut self,
        compute: ComputeLocation,
        source: &MemorySource,
    ) -> Result<bool> {
        let (more, bytes) = (self.experts.next_slots(), self.experts.next_bytes());
        if let Some(host_window) = &mut self.host_window {
            charge(host_window.account.as_ref(), Tier::Host, bytes)?;
            host_window.slots_bytes += bytes;
        } else if let Some(device_window) = &mut self.device_window {
            (0..more).try_for_each(|_| device_window.add_expert_slot())?;
        } else {
            self.experts.blocks.try_reserve(1).map_err(|_| Status::NoMem)?;
            let block = match self.allocated.take_if(|allocated| allocated.0 == NONE) {
                Some((_, allocated)) => Block::Device(allocated?),
                None => allocate_slots(compute, bytes, source)?,
            };
            self.experts.blocks.push(block);
        }
        self.experts.count += more;
        Ok(true)
    }

    /// Allocates one more block of expert slots of an open streamer. Returns false while the copier
    /// thread is still allocating the device memory, without a lock.
    pub fn add_expert_slots_later(
        &mut self,
        compute: ComputeLocation,
        source: &MemorySource,
    ) -> Result<bool> {
        let is_ready = compute == ComputeLocation::Host || self.has_device_memory_for(NONE);
        if is_ready { self.add_expert_slots(compute, source) } else { Ok(false) }
    }

    /// Frees expert slots from the end, in whole blocks, so that at least the first `count` remain.
    /// If units are in place, `dirty` returns the unit whose memory a slot last filled.
    ///
    /// # Safety
    /// The freed slots are unused, and no read or copy to or from them is in flight.
    pub unsafe fn drop_expert_slots(
        &mut self,
        count: u32,
        mut dirty: impl FnMut(u32) -> Option<u32>,
    ) -> Result<()> {
        let mut cleared = Ok(());
        while self.experts.count > count {
            let last = (self.experts.count - 1) % self.experts.step + 1;
            if self.experts.count - last < count {
                break;
            }
            let bytes = u64::from(last) * self.experts.slot_bytes;
            self.experts.count -= last;
            let first = self.experts.count;
            if self.host_window.is_some() {
                for unit in (first..first + last).filter_map(&mut dirty) {
                    // SAFETY: the caller's promise.
                    cleared = cleared.and(unsafe { self.clear(unit) });
                }
                if let Some(host_window) = &mut self.host_window {
                    host_window.slots_bytes -= bytes;
                    credit(host_window.account.as_ref(), Tier::Host, bytes);
                }
            } else if let Some(device_window) = &mut self.device_window {
                (0..last).for_each(|_| device_window.drop_expert_slot());
            } else if let Some(Block::Device(block)) = self.experts.blocks.pop() {
                self.freed_blocks.push(FreedBlock { unit: NONE, block });
            }
        }
        cleared
    }
}
