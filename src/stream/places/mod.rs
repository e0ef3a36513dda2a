//! Memory: slots, staging and homes, and where in it each unit is.

mod expert_slots;

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::fault::Faults;
use crate::base::memory::{Buffer, MemoryWish, Wish};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::base::window::Window;
use crate::device::{Device, DeviceMemory, Memory};
use crate::fail;
use crate::stream::core::Goal;
use crate::stream::in_window::InWindow;
use crate::stream::places::expert_slots::ExpertSlots;
use crate::stream::plan::{Home, Plan, Seat};
use crate::stream::units::{Role, Units};

/// Memory of a device.
pub struct OnDevice {
    device: Arc<dyn Device>,
    memory: DeviceMemory,
    account: Option<Arc<Account>>,
}

impl OnDevice {
    /// # Safety
    /// No unit in it is in use, and no work that does is under way.
    unsafe fn free(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        let freed = unsafe { self.device.free(&self.memory) };
        // What the device still uses is there still, and stays paid for.
        let is_gone = !freed.as_ref().is_err_and(|error| error.status() == Status::Busy);
        if let Some(account) = self.account.as_ref().filter(|_| is_gone) {
            account.give_back(Tier::Device, self.memory.bytes);
        }
        let bytes = self.memory.bytes;
        freed.map_err(|error| error.within(&format!("{bytes} bytes of the device stay taken")))
    }
}

/// Host memory, of which the device was told where it copies from there.
struct OnHost {
    buffer: Buffer,
    told: Option<Arc<dyn Device>>,
}

impl Drop for OnHost {
    fn drop(&mut self) {
        let Some(device) = &self.told else { return };
        // SAFETY: whoever lets a home or staging go has nothing under way there.
        if let Err(error) = unsafe { device.forget_host(self.buffer.address()) } {
            log::warn!("host memory of weights stays registered: {error}");
        }
    }
}

enum Block {
    Host(OnHost),
    Device(OnDevice),
    /// Its own stretch of the window, which its account pays for while it is a home.
    Own,
}

/// Addresses of units that never change, and memory behind some of them.
struct InPlace {
    window: Window,
    /// Where each unit begins; one more at the end.
    offsets: Vec<u64>,
    account: Option<Arc<Account>>,
    /// What slots cost, whoever is in them.
    slots_bytes: u64,
}

impl Drop for InPlace {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.slots_bytes);
        }
    }
}

/// Where a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The address of its image.
    pub address: u64,
    /// Where that is valid.
    pub memory: Memory,
}

/// Who gives memory, and who pays.
pub struct Source<'a> {
    /// The device, where the engine computes on one.
    pub device: Option<&'a Arc<dyn Device>>,
    /// Who pays.
    pub account: Option<&'a Arc<Account>>,
    /// Planted faults.
    pub faults: Option<&'a Faults>,
}

/// Memory of the device that was a home. It goes back under no lock: drivers take their time.
pub struct Spent {
    unit: u32,
    on: OnDevice,
}

impl Spent {
    /// Gives it back, if the device does not say that it uses it.
    ///
    /// # Safety
    /// Nobody uses it, and nothing that does is under way.
    pub unsafe fn free(self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.on.free() }
    }
}

/// The memory of a streamer.
#[derive(Default)]
pub struct Places {
    line: Option<Block>,
    line_bytes: u64,
    experts: ExpertSlots,
    staging: Option<OnHost>,
    chunk_bytes: u64,
    homes: Vec<Option<Block>>,
    images: Vec<u64>,
    in_place: Option<InPlace>,
    in_window: Option<InWindow>,
    /// Homes that are not used any more, and how many are being given back or made.
    spent: Vec<Spent>,
    under_way: usize,
    /// A unit for whose home memory of the device is to be had, with no lock held; `NONE`: for
    /// slots of experts.
    wanted: Option<u32>,
    /// Such memory, or why there is none.
    made: Option<(u32, Result<OnDevice>)>,
}

impl Places {
    /// Takes the memory that a plan says.
    pub fn new(units: &Units, plan: &Plan, in_place: bool, source: &Source) -> Result<Places> {
        let seat = plan.seat;
        let images: Vec<u64> = units.units.iter().map(|unit| unit.image_bytes).collect();
        let total = |count: u32, bytes: u64| u64::from(count).checked_mul(bytes);
        let line = total(plan.slots, plan.slot_bytes).ok_or(Status::Limit)?;
        total(plan.expert_slots, plan.expert_slot_bytes).ok_or(Status::Limit)?;
        let mut homes = Vec::new();
        homes.try_reserve_exact(images.len()).map_err(|_| Status::NoMem)?;
        homes.resize_with(images.len(), || None);
        let mut places = Places {
            line: None,
            line_bytes: plan.slot_bytes,
            experts: ExpertSlots::of(plan),
            staging: None,
            chunk_bytes: plan.chunk_bytes,
            homes,
            images,
            in_place: None,
            in_window: None,
            spent: Vec::new(),
            under_way: 0,
            wanted: None,
            made: None,
        };
        if in_place && seat == Seat::Device {
            places.in_window = Some(places.device_window(units, plan, source)?);
        } else if in_place {
            places.in_place = Some(places.window(line, source)?);
        } else if line > 0 {
            places.line = Some(slots(seat, line, source)?);
        }
        while places.expert_slots() < plan.expert_slots {
            places.add_expert_slots(seat, source)?;
        }
        if seat == Seat::Device {
            places.staging = Some(host(plan.staging_bytes, true, source)?);
        }
        for (unit, home) in plan.homes.iter().enumerate() {
            places.make_home(unit as u32, *home, seat, source)?;
        }
        Ok(places)
    }

    fn window(&self, slots_bytes: u64, source: &Source) -> Result<InPlace> {
        let mut offsets = Vec::new();
        offsets.try_reserve_exact(self.images.len() + 1).map_err(|_| Status::NoMem)?;
        let mut at = 0u64;
        for image in &self.images {
            offsets.push(at);
            at = at.checked_add(*image).ok_or(Status::Limit)?;
        }
        offsets.push(at);
        let window = Window::reserve(at)?;
        if let Some(account) = source.account {
            account.take(Tier::Host, slots_bytes)?;
        }
        Ok(InPlace { window, offsets, account: source.account.cloned(), slots_bytes })
    }

    fn device_window(&self, units: &Units, plan: &Plan, source: &Source) -> Result<InWindow> {
        let device = source.device.ok_or(Status::Invalid)?.clone();
        let is_expert: Vec<bool> =
            units.units.iter().map(|unit| unit.role == Role::Expert).collect();
        let reserve = |bytes| device.window(bytes);
        InWindow::new(&self.images, &is_expert, plan, reserve, source.account)
    }

    /// Memory for a unit's home.
    pub fn make_home(&mut self, unit: u32, home: Home, seat: Seat, source: &Source) -> Result<()> {
        let bytes = self.images[unit as usize];
        let block = match (home, &self.in_place) {
            (Home::File, _) => None,
            (Home::Host, Some(in_place)) => {
                if let Some(account) = &in_place.account {
                    account.take(Tier::Host, bytes)?;
                }
                Some(Block::Own)
            }
            (Home::Host, None) => Some(Block::Host(host(bytes, seat == Seat::Device, source)?)),
            (Home::Device, _) => match &mut self.in_window {
                Some(in_window) => in_window.make_home(unit).map(|()| Some(Block::Own))?,
                None => Some(Block::Device(match self.made.take_if(|made| made.0 == unit) {
                    Some((_, made)) => made?,
                    None => match self.spent.iter().position(|spent| spent.unit == unit) {
                        Some(at) => self.spent.swap_remove(at).on,
                        None => on_device(bytes, source)?,
                    },
                })),
            },
        };
        self.homes[unit as usize] = block;
        Ok(())
    }

    /// Gives the memory of a unit's home back, that of the device later; also where that fails.
    ///
    /// # Safety
    /// Nobody uses it, and nothing that does is under way; where units are in place, the
    /// unit is in no slot either.
    pub unsafe fn free_home(&mut self, unit: u32) -> Result<()> {
        let block = match self.homes[unit as usize].take() {
            Some(Block::Device(on)) => {
                self.spent.push(Spent { unit, on });
                return Ok(());
            }
            block => block,
        };
        let freed = match (&block, &self.in_place) {
            (Some(Block::Own), None) => {
                self.in_window.iter_mut().for_each(|in_window| in_window.free_home(unit));
                Ok(())
            }
            (Some(Block::Own), Some(in_place)) => {
                // SAFETY: the caller's promise.
                let cleared = unsafe { self.clear(unit) };
                if let Some(account) = &in_place.account {
                    account.give_back(Tier::Host, self.images[unit as usize]);
                }
                cleared
            }
            _ => Ok(()),
        };
        drop(block);
        freed
    }

    /// Whether a unit's home on the device has memory to be made of; else it is asked for.
    pub fn has_memory_for(&mut self, unit: u32) -> bool {
        let made = self.made.as_ref().map(|(made, _)| *made);
        if self.in_window.is_none() && made.is_none() {
            self.wanted.get_or_insert(unit);
        }
        self.in_window.is_some() || made == Some(unit)
    }

    /// Whose memory is to be had, and how much, with no lock held; [`Places::made`] takes it.
    pub fn take_wanted(&mut self) -> Option<(u32, u64)> {
        let unit = self.wanted.take()?;
        self.under_way += 1;
        let bytes = self.images.get(unit as usize).copied();
        Some((unit, bytes.unwrap_or_else(|| self.experts.next_bytes())))
    }

    /// Memory that was asked for, or why there is none.
    pub fn made(&mut self, unit: u32, made: Result<OnDevice>) {
        self.freed(1);
        self.made = Some((unit, made));
    }

    /// Lets go of memory for units that are not to have it any more.
    pub fn forget_made(&mut self, is_due: impl Fn(u32) -> bool) {
        self.wanted.take_if(|unit| !is_due(*unit));
        if let Some((unit, Ok(on))) = self.made.take_if(|(unit, _)| !is_due(*unit)) {
            self.spent.push(Spent { unit, on });
        }
    }

    /// What is to be given back with no lock held; to be followed by [`Places::freed`].
    pub fn take_spent(&mut self) -> Vec<Spent> {
        self.under_way += self.spent.len();
        std::mem::take(&mut self.spent)
    }

    /// So many of those were.
    pub fn freed(&mut self, count: usize) {
        self.under_way = self.under_way.saturating_sub(count);
    }

    /// Whether memory of the device for homes comes or goes: then no more is asked for.
    pub fn is_leaving(&self) -> bool {
        let is_leaving = self.in_window.as_ref().is_some_and(InWindow::is_leaving);
        is_leaving || !self.spent.is_empty() || self.under_way > 0
    }

    /// Gives all memory back; the first error, if there was any.
    ///
    /// # Safety
    /// Nobody uses any of it, and nothing that does is under way.
    pub unsafe fn free_all(&mut self) -> Result<()> {
        let mut freed = Ok(());
        for unit in 0..self.homes.len() {
            // SAFETY: the caller's promise.
            freed = freed.and(unsafe { self.free_home(unit as u32) });
        }
        self.forget_made(|_| false);
        for spent in self.take_spent() {
            // SAFETY: the caller's promise.
            freed = freed.and(unsafe { spent.free() });
        }
        let experts = std::mem::take(&mut self.experts).blocks;
        for block in self.line.take().into_iter().chain(experts) {
            if let Block::Device(on) = &block {
                // SAFETY: the caller's promise.
                freed = freed.and(unsafe { on.free() });
            }
        }
        if let Some(mut in_window) = self.in_window.take() {
            // SAFETY: the caller's promise.
            freed = freed.and(unsafe { in_window.free_all() });
        }
        (self.staging, self.in_place) = (None, None);
        freed
    }

    /// Gives the memory back that a unit in place had while it was in a slot.
    ///
    /// # Safety
    /// Nobody uses it, and nothing that does is under way.
    pub unsafe fn clear(&self, unit: u32) -> Result<()> {
        let Some(in_place) = &self.in_place else { return Ok(()) };
        let (from, to) = (in_place.offsets[unit as usize], in_place.offsets[unit as usize + 1]);
        // SAFETY: the caller's promise.
        let given = unsafe { in_place.window.give_back(from, to - from) };
        given
            .map(|_| ())
            .map_err(|error| error.within(&format!("{} bytes of a unit stay taken", to - from)))
    }

    /// Where a unit is, or comes to.
    pub fn at(&self, unit: u32, goal: Goal) -> Result<At> {
        if let Some(in_place) = &self.in_place {
            let address = in_place.window.address() as u64 + in_place.offsets[unit as usize];
            return Ok(At { address, memory: Memory::Host });
        }
        if let Some(in_window) = &self.in_window {
            match (goal, &self.homes[unit as usize]) {
                (Goal::Home, Some(Block::Host(_))) => {}
                _ => return Ok(At { address: in_window.address(unit), memory: Memory::Device }),
            }
        }
        let (block, offset) = match goal {
            Goal::Home => (self.homes[unit as usize].as_ref(), 0),
            Goal::Line(slot) => (self.line.as_ref(), u64::from(slot) * self.line_bytes),
            Goal::Expert(slot) => self.experts.at(slot),
        };
        let (address, memory) = match block {
            Some(Block::Host(on)) => (on.buffer.address() as u64, Memory::Host),
            Some(Block::Device(on)) => (on.memory.address, on.memory.memory),
            _ => return Err(Status::State.into()),
        };
        Ok(At { address: address + offset, memory })
    }

    /// Where a staging slot is.
    pub fn staging(&self, slot: u32) -> Result<u64> {
        let staging = self.staging.as_ref().ok_or(Status::State)?;
        Ok(staging.buffer.address() as u64 + u64::from(slot) * self.chunk_bytes)
    }

    /// The address of a unit in place, which never changes: in host memory where the processor
    /// uses it beside a device.
    pub fn fixed(&self, unit: u32, on_processor: bool) -> Result<u64> {
        match &self.in_window {
            Some(in_window) if !on_processor => Ok(in_window.address(unit)),
            _ => Ok(self.at(unit, Goal::Home)?.address),
        }
    }

    /// Units in place on a device.
    pub fn in_window(&mut self) -> Option<&mut InWindow> {
        self.in_window.as_mut()
    }

    /// The slots in memory of the device: where they begin, and how long they are.
    pub fn slots_on_device(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.line.iter().chain(&self.experts.blocks).filter_map(|block| match block {
            Block::Device(on) if on.memory.memory == Memory::Device => {
                Some((on.memory.address, on.memory.bytes))
            }
            _ => None,
        })
    }

    /// The stretch of addresses that units in place have.
    pub fn range(&self) -> Option<(u64, u64)> {
        if let Some(in_window) = &self.in_window {
            return Some(in_window.range());
        }
        self.in_place.as_ref().map(|p| (p.window.address() as u64, p.window.bytes()))
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // SAFETY: the last of those who had it: threads have ended, and engines have
        // promised not to use what they were given any more.
        if let Err(error) = unsafe { self.free_all() } {
            log::warn!("{error}");
        }
    }
}

fn host(bytes: u64, pinned: bool, source: &Source) -> Result<OnHost> {
    let wish = MemoryWish {
        bytes,
        pin: if pinned { Wish::Try } else { Wish::No },
        // Direct reads touch every page for the first time: fewer of them is faster. Whole huge
        // pages would take more than the plan says.
        prefer_huge: true,
        account: source.account.cloned(),
        ..MemoryWish::default()
    };
    let mut on = OnHost { buffer: Buffer::map(&wish, source.faults)?, told: None };
    let device = source.device.filter(|device| pinned && device.facts().wants_pinned);
    let Some(device) = device else { return Ok(on) };
    // SAFETY: the memory stays until the device was told that it goes.
    match unsafe { device.know_host(on.buffer.address(), on.buffer.bytes()) } {
        Ok(()) => on.told = Some(device.clone()),
        Err(error) if error.status() == Status::Unavailable => return Err(error),
        Err(error) => log::warn!("copies from host memory of weights are slow: {error}"),
    }
    Ok(on)
}

/// Memory of the device. Drivers take their time for it.
pub fn on_device(bytes: u64, source: &Source) -> Result<OnDevice> {
    let Some(device) = source.device else {
        fail!(Invalid, "a plan for a device, and no device was given");
    };
    if let Some(account) = source.account {
        account.take(Tier::Device, bytes)?;
    }
    let memory = device.allocate(bytes).inspect_err(|_| {
        if let Some(account) = source.account {
            account.give_back(Tier::Device, bytes);
        }
    })?;
    let account = source.account.cloned();
    Ok(OnDevice { device: device.clone(), memory, account })
}

fn slots(seat: Seat, bytes: u64, source: &Source) -> Result<Block> {
    match seat {
        Seat::Host => host(bytes, false, source).map(Block::Host),
        Seat::Device => on_device(bytes, source).map(Block::Device),
    }
}
