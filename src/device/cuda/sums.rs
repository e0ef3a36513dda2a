//! Checksums of device memory, which callers compare with the bytes on the other side of the bus. A
//! contiguous plane is summed in place. Other planes are first gathered in staging memory of the
//! stream, because a checksum is of canonical order.

use crate::base::checksum::BLOCK_BYTES;
use crate::base::status::{Result, Status};
use crate::device::call::{Call, Kind};
use crate::device::cuda::abi::{HOST_PORTABLE, Handle, Pointer};
use crate::device::cuda::kernels::Step;
use crate::device::cuda::peers::{MemoryOwner, PeerCopy};
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Direction, Event, Memory};
use crate::fail;

/// Limit: lists in use, one for each unreleased batch with checksums.
const LISTS: usize = 256;
/// Minimum capacity of a list, in ranges and in blocks.
const LEAST: (usize, usize) = (256, 4096);
/// Minimum staging memory of a stream.
const STAGE_BYTES: u64 = 8 << 20;
/// Alignment of planes in staging memory.
const STAGE_ALIGN_BYTES: u64 = 256;

/// A range, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    address: u64,
    bytes: u64,
}

/// Ranges and checksums in host and device memory, and the batch that uses them.
struct List {
    host: usize,
    device: Pointer,
    ranges: usize,
    blocks: usize,
    user: Option<Event>,
    /// Ranges of that batch.
    count: usize,
}

impl List {
    /// Offset of the checksums, after the ranges.
    fn sums_at(&self) -> usize {
        self.ranges * size_of::<Range>()
    }

    /// Offset of the scratch memory, after the checksums.
    fn scratch_at(&self) -> usize {
        self.sums_at() + self.ranges * 8
    }

    fn scratch_bytes(&self) -> usize {
        8 * (self.ranges + 1 + self.blocks)
    }

    fn call(&self, first: usize, count: usize) -> Call {
        Call {
            kind: Kind::Sum as u32,
            table: self.device + (first * size_of::<Range>()) as u64,
            count: count as u32,
            out: self.device + (self.sums_at() + first * 8) as u64,
            scratch: self.device + self.scratch_at() as u64,
            scratch_bytes: self.scratch_bytes() as u64,
            ..Call::default()
        }
    }
}

/// Staging memory of a stream. Work of a stream is in order, and so is the use of this memory.
#[derive(Clone, Copy, Default)]
pub struct Stage {
    pub address: Pointer,
    pub bytes: u64,
}

/// State of checksums; memory is allocated on first use, and reused.
#[derive(Default)]
pub struct Sums {
    lists: Vec<List>,
    stages: Vec<Stage>,
    /// Outgrown staging memory: freeing it could wait for the whole device.
    outgrown: Vec<Pointer>,
    steps: Vec<Step>,
    /// Functions of the kernel by name.
    functions: Vec<(&'static str, usize)>,
}

impl Sums {
    /// Host allocations.
    pub fn host_allocations(&self) -> impl Iterator<Item = usize> {
        self.lists.iter().map(|list| list.host)
    }

    /// Device allocations.
    pub fn taken(&self) -> impl Iterator<Item = Pointer> {
        let stages = self.stages.iter().map(|stage| stage.address).filter(|at| *at != 0);
        let lists = self.lists.iter().map(|list| list.device);
        stages.chain(self.outgrown.iter().copied()).chain(lists)
    }
}

/// Copies, and those of memory without access.
type Batch<'a, 'b> = (&'a [Copy<'b>], &'a [PeerCopy]);

/// Plan of a batch's checksums.
pub struct Plan {
    ranges: Vec<Range>,
    /// Index of the copy for each range that is gathered first.
    staged: Vec<Option<usize>>,
    /// Ends of the groups that share the staging memory.
    groups: Vec<usize>,
    list: usize,
}

/// Start of a copy's summed side, if it is contiguous and kernels can access it.
fn piece_of(copy: &Copy<'_>, no_access: Option<&PeerCopy>) -> Option<u64> {
    if no_access.is_some_and(|no_access| side_of(copy, no_access).lacks_access()) {
        return None;
    }
    if is_plane(copy) {
        return Some(copy.plane.expose_provenance() as u64);
    }
    let mut strips = copy.tensor.strips();
    let first = strips.next()?;
    let is_one = first.count == 1 || first.stride_bytes == first.run_bytes;
    (is_one && strips.next().is_none()).then_some(first.address)
}

/// Whether the plane is summed: the side on the device, of two the target.
fn is_plane(copy: &Copy<'_>) -> bool {
    let is_alone = copy.memory == Memory::Host;
    copy.plane_memory == Memory::Device && (is_alone || copy.direction == Direction::Gather)
}

/// Owner of the summed side.
fn side_of(copy: &Copy<'_>, no_access: &PeerCopy) -> MemoryOwner {
    if is_plane(copy) { no_access.plane } else { no_access.tensor }
}

impl Cuda {
    /// Loads the kernel.
    pub(super) fn load_sum_kernel(&self) -> Result<()> {
        if self.kernels & Kind::Sum.bit() == 0 {
            fail!(Unsupported, "copies cannot be verified: the checksum kernel is not built in");
        }
        let (host, device, (ranges, blocks)) = (0, STAGE_ALIGN_BYTES, LEAST);
        let any = List { host, device, ranges, blocks, user: None, count: 0 };
        let prepared = self.prepare(&[any.call(0, 1)]);
        let launches = prepared.map_err(|e| e.within("copies cannot be verified"))?;
        let functions = launches.iter().map(|launch| (launch.step.name, launch.function));
        self.inner.lock().sums.functions = functions.collect();
        Ok(())
    }

    /// Rejects checksums that cannot be computed.
    pub(super) fn check_sums(&self, copies: &[Copy<'_>]) -> Result<()> {
        let in_host = |copy: &Copy<'_>| [copy.memory, copy.plane_memory] == [Memory::Host; 2];
        if self.verifies && copies.iter().any(|copy| copy.wants_sum && in_host(copy)) {
            fail!(
                Unsupported,
                "a checksum of a copy within host memory is not supported: compute it on the host"
            );
        }
        Ok(())
    }

    /// Allocates what a batch's checksums need; none if it has no checksums.
    pub(super) fn plan_sums(
        &self,
        inner: &mut Inner,
        (copies, no_access): Batch<'_, '_>,
        event: Event,
        queue: usize,
    ) -> Result<Option<Plan>> {
        let piece_at = |at: usize, copy: &Copy<'_>| piece_of(copy, PeerCopy::find(no_access, at));
        let summed = || copies.iter().enumerate().filter(|(_, copy)| copy.wants_sum);
        let (mut count, mut blocks, mut longest) = (0, 0, 0);
        for (at, copy) in summed() {
            let bytes = copy.tensor.bytes();
            (count, blocks) = (count + 1, blocks + bytes.div_ceil(BLOCK_BYTES as u64) as usize);
            longest = if piece_at(at, copy).is_none() { bytes.max(longest) } else { longest };
        }
        if count == 0 || !self.verifies {
            return Ok(None);
        }
        let stage = self.stage(&mut inner.sums, queue, longest)?;
        let list = self.take_list(inner, event, count, blocks)?;
        let (mut ranges, mut staged, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let room = ranges.try_reserve_exact(count).and_then(|()| staged.try_reserve_exact(count));
        room.map_err(|_| Status::NoMem)?;
        let mut used = 0;
        for (at, copy) in summed() {
            let bytes = copy.tensor.bytes();
            let piece = piece_at(at, copy);
            if piece.is_none() && used + bytes > stage.bytes {
                groups.push(ranges.len());
                used = 0;
            }
            ranges.push(Range { address: piece.unwrap_or(stage.address + used), bytes });
            staged.push(piece.is_none().then_some(at));
            if piece.is_none() {
                used = (used + bytes).next_multiple_of(STAGE_ALIGN_BYTES);
            }
        }
        groups.push(count);
        Ok(Some(Plan { ranges, staged, groups, list }))
    }

    /// Staging memory of a queue, at least `longest` bytes.
    pub(super) fn stage(&self, sums: &mut Sums, queue: usize, longest: u64) -> Result<Stage> {
        if longest == 0 {
            return Ok(Stage::default());
        }
        if sums.stages.len() <= queue {
            sums.stages.resize(queue + 1, Stage::default());
        }
        if sums.stages[queue].bytes < longest {
            let bytes = longest.checked_next_power_of_two().ok_or(Status::Limit)?;
            let bytes = bytes.max(STAGE_BYTES);
            let new = Stage { address: self.allocate_memory(bytes)?, bytes };
            let old = std::mem::replace(&mut sums.stages[queue], new);
            sums.outgrown.extend(Some(old.address).filter(|at| *at != 0));
        }
        Ok(sums.stages[queue])
    }

    /// Takes an unused list for a batch.
    fn take_list(
        &self,
        inner: &mut Inner,
        event: Event,
        count: usize,
        blocks: usize,
    ) -> Result<usize> {
        let (events, lists) = (&inner.events, &mut inner.sums.lists);
        for list in lists.iter_mut() {
            list.user = list.user.filter(|event| events.get(*event).is_ok());
        }
        let fits =
            |list: &List| list.user.is_none() && list.ranges >= count && list.blocks >= blocks;
        let at = match lists.iter().position(fits) {
            Some(at) => at,
            None if lists.len() == LISTS => {
                fail!(Again, "{LISTS} batches with checksums are not released: release some first")
            }
            None => {
                let ranges = count.next_power_of_two().max(LEAST.0);
                let list = self.new_list(ranges, blocks.next_power_of_two().max(LEAST.1))?;
                lists.push(list);
                lists.len() - 1
            }
        };
        (lists[at].user, lists[at].count) = (Some(event), count);
        Ok(at)
    }

    fn new_list(&self, ranges: usize, blocks: usize) -> Result<List> {
        let mut list = List { host: 0, device: 0, ranges, blocks, user: None, count: 0 };
        let mut host = std::ptr::null_mut();
        let bytes = list.scratch_at();
        // SAFETY: a place for an address.
        let code = unsafe { (self.driver.allocate_host)(&mut host, bytes, HOST_PORTABLE) };
        self.driver.check("cuMemHostAlloc", code)?;
        list.host = host.expose_provenance();
        match self.allocate_memory((bytes + list.scratch_bytes()) as u64) {
            Ok(device) => Ok(List { device, ..list }),
            Err(error) => {
                // SAFETY: allocated just now.
                self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(host) });
                Err(error)
            }
        }
    }

    /// Issues a batch's checksums on its stream, after its copies.
    ///
    /// # Safety
    /// As for [`Cuda::issue`]; the plan is of these copies.
    pub(super) unsafe fn issue_sums(
        &self,
        inner: &mut Inner,
        (batch, plan): (Batch<'_, '_>, &Plan),
        event: Event,
        (queue, stream): (usize, Handle),
        begun: &mut bool,
    ) -> Result<()> {
        let list = &inner.sums.lists[plan.list];
        let (host, device) = (list.host, list.device);
        let (sums_at, bytes) = (list.sums_at(), std::mem::size_of_val(&plan.ranges[..]));
        let target: *mut Range = std::ptr::with_exposed_provenance_mut(host);
        *begun = true;
        // SAFETY: the list's own memory, which has room for the ranges and belongs to this batch.
        let code = unsafe {
            std::ptr::copy_nonoverlapping(plan.ranges.as_ptr(), target, plan.ranges.len());
            (self.driver.to_device)(device, target.cast_const().cast(), bytes, stream)
        };
        self.driver.check("cuMemcpyHtoDAsync", code)?;
        let mut first = 0;
        for &end in &plan.groups {
            if end > first {
                // SAFETY: the caller's promise.
                unsafe {
                    self.issue_group(inner, (batch, plan), first..end, event, (queue, stream))?
                };
            }
            first = end;
        }
        let sums: Handle = std::ptr::with_exposed_provenance_mut(host + sums_at);
        // SAFETY: as above; as many checksums as ranges, and places for them.
        let code = unsafe {
            (self.driver.from_device)(sums, device + sums_at as u64, 8 * plan.ranges.len(), stream)
        };
        self.driver.check("cuMemcpyDtoHAsync", code)
    }

    /// # Safety
    /// As for [`Cuda::issue_sums`].
    unsafe fn issue_group(
        &self,
        inner: &mut Inner,
        ((copies, no_access), plan): (Batch<'_, '_>, &Plan),
        part: std::ops::Range<usize>,
        event: Event,
        (queue, stream): (usize, Handle),
    ) -> Result<()> {
        let (mut gathers, mut peer_copies) = (Vec::new(), Vec::new());
        let room = gathers.try_reserve_exact(part.len());
        room.and_then(|()| peer_copies.try_reserve_exact(no_access.len().min(part.len())))
            .map_err(|_| Status::NoMem)?;
        for at in part.clone() {
            let Some(number) = plan.staged[at] else { continue };
            let (copy, Range { address, bytes }) = (&copies[number], plan.ranges[at]);
            let owner = PeerCopy::find(no_access, number)
                .map_or(MemoryOwner::Own, |one| side_of(copy, one));
            if owner.lacks_access() {
                peer_copies.push(PeerCopy {
                    copy: gathers.len(),
                    tensor: owner,
                    plane: MemoryOwner::Own,
                });
            }
            let target = std::ptr::with_exposed_provenance_mut(address as usize);
            let from = copy.plane.expose_provenance() as u64;
            let whole = Copy::bytes(target, from, bytes, Direction::Gather, Memory::Device)?;
            let tensor = if is_plane(copy) { whole.tensor } else { copy.tensor };
            gathers.push(Copy { tensor, plane_memory: Memory::Device, ..whole });
        }
        let mut begun = true;
        // SAFETY: tensors of the caller, and staging memory of this stream.
        unsafe { self.issue(inner, (&gathers, &peer_copies), event, (queue, stream), &mut begun)? };
        let mut found = std::mem::take(&mut inner.sums.steps);
        let call = inner.sums.lists[plan.list].call(part.start, part.len());
        // SAFETY: ranges of this batch's memory, and a list that it owns until it is released.
        let issued = unsafe {
            self.issue_call(&call, (&mut found, &inner.sums.functions), stream, &mut begun)
        };
        inner.sums.steps = found;
        issued
    }

    /// Implements [`crate::device::Device::sums`].
    pub(super) fn sums_of(&self, event: Event, sums: &mut [u64]) -> Result<usize> {
        if !self.verifies {
            fail!(Unsupported, "the device was opened without verify: it computes no checksums");
        }
        let mut inner = self.inner.lock();
        self.look(&mut inner, event)?.ok_or(Status::Busy)??;
        let list = inner.sums.lists.iter().find(|list| list.user == Some(event));
        let Some(list) = list else { return Ok(0) };
        let count = list.count.min(sums.len());
        let from = std::ptr::with_exposed_provenance::<u64>(list.host + list.sums_at());
        // SAFETY: checksums of the list, which the device has written: its event has completed.
        unsafe { std::ptr::copy_nonoverlapping(from, sums.as_mut_ptr(), count) };
        Ok(count)
    }
}
