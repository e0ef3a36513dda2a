//! Small copies by a kernel. It accesses registered host memory in place, so one launch copies any
//! number of pieces in any layout. Lists of pieces are in memory of the device, which is reused
//! after the batch.

use crate::base::status::{Result, Status};
use crate::device::call::{Call, Kind};
use crate::device::cuda::abi::{HOST_PORTABLE, Handle, Pointer};
use crate::device::cuda::kernels::Step;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Direction, Event, Memory};
use crate::meta::view::Strip;

/// Pieces of a launch. A full list is launched while further pieces are added.
const LIST_PIECES: usize = 1024;
/// Limit: lists in use. If all are, copies use another method.
const LISTS: usize = 32;
const LIST_BYTES: usize = LIST_PIECES * size_of::<Piece>();
/// Scratch of the kernel: a number for each piece, and one more.
const SCRATCH_BYTES: usize = (LIST_PIECES + 1) * 8;

/// Runs of equal length at constant strides.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Piece {
    from: u64,
    to: u64,
    from_stride: i64,
    to_stride: i64,
    run_bytes: u32,
    runs: u32,
}

const _: () = assert!(size_of::<Piece>() == 40);

/// A list of pieces, in host and device memory, and the batch that uses it.
struct List {
    host: usize,
    device: Pointer,
    user: Option<Event>,
}

/// All lists, and the pieces of the next one.
#[derive(Default)]
pub struct CopyLists {
    lists: Vec<List>,
    pieces: Vec<Piece>,
    steps: Vec<Step>,
    /// Functions of the kernel by name.
    functions: Vec<(&'static str, usize)>,
    /// Free pieces in unused lists.
    room: usize,
}

impl CopyLists {
    /// Driver allocations: host memory and device memory.
    pub fn taken(&self) -> impl Iterator<Item = (usize, Pointer)> {
        self.lists.iter().map(|list| (list.host, list.device))
    }
}

impl Inner {
    /// Counts the free pieces.
    pub fn begin_copy_lists(&mut self) {
        let events = &self.events;
        for list in &mut self.copy_lists.lists {
            let in_use = |event| events.get(event).is_ok_and(|known| known.outcome.is_none());
            list.user = list.user.filter(|event| in_use(*event));
        }
        let free = self.copy_lists.lists.iter().filter(|list| list.user.is_none()).count();
        self.copy_lists.room = free * LIST_PIECES;
        self.copy_lists.pieces.clear();
    }

    /// Adds a strip; false if the kernel cannot copy it.
    pub fn note_piece(&mut self, copy: &Copy<'_>, strip: &Strip) -> bool {
        let plane = copy.plane.expose_provenance() as u64 + strip.at;
        let tensor_reach = (strip.count - 1).saturating_mul(strip.stride_bytes) + strip.run_bytes;
        let reaches =
            |memory, address, bytes| memory == Memory::Device || self.is_mapped(address, bytes);
        let is_one = strip.count == 1 || strip.stride_bytes == strip.run_bytes;
        let (run, runs) = if is_one { (strip.bytes(), 1) } else { (strip.run_bytes, strip.count) };
        let (Ok(run_bytes), Ok(runs)) = (u32::try_from(run), u32::try_from(runs)) else {
            return false;
        };
        if self.copy_lists.room == 0
            || !reaches(copy.memory, strip.address, tensor_reach)
            || !reaches(copy.plane_memory, plane, strip.bytes())
            || self.copy_lists.pieces.try_reserve(1).is_err()
        {
            return false;
        }
        let (tensor, plane) =
            ((strip.address, strip.stride_bytes as i64), (plane, strip.run_bytes as i64));
        let (from, to) =
            if copy.direction == Direction::Gather { (tensor, plane) } else { (plane, tensor) };
        self.copy_lists.room -= 1;
        self.copy_lists.pieces.push(Piece {
            from: from.0,
            to: to.0,
            from_stride: from.1,
            to_stride: to.1,
            run_bytes,
            runs,
        });
        true
    }

    /// Whether the pieces fill a list.
    pub fn has_full_list(&self) -> bool {
        self.copy_lists.pieces.len() >= LIST_PIECES
    }

    /// Whether kernels use the same addresses for a range of host memory.
    fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        self.host_range(address).is_some_and(|(start, range)| {
            range.is_mapped && bytes <= range.bytes - (address - start)
        })
    }
}

impl Cuda {
    /// Allocates the lists. [`Status::Unsupported`]: there is no such kernel.
    pub(super) fn allocate_lists(&self) -> Result<()> {
        if self.kernels & Kind::Move.bit() == 0 {
            return Err(Status::Unsupported.into());
        }
        let _guard = self.enter()?;
        for _ in 0..LISTS {
            let mut host = std::ptr::null_mut();
            // SAFETY: a place for an address.
            let code = unsafe { (self.driver.allocate_host)(&mut host, LIST_BYTES, HOST_PORTABLE) };
            self.driver.check("cuMemHostAlloc", code)?;
            let device = self.allocate_memory((LIST_BYTES + SCRATCH_BYTES) as u64);
            let list = List { host: host as usize, device: 0, user: None };
            match device {
                Ok(device) => self.inner.lock().copy_lists.lists.push(List { device, ..list }),
                Err(error) => {
                    // SAFETY: allocated just now.
                    self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(host) });
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Loads the kernel now: later launches must not wait for modules that others load.
    pub(super) fn load_copy_kernel(&self) -> Result<()> {
        let device = self.inner.lock().copy_lists.lists.first().map(|list| list.device);
        let Some(device) = device else { return Err(Status::Unsupported.into()) };
        let launches = self.prepare(&[move_call(device, 1)])?;
        let functions = launches.iter().map(|launch| (launch.step.name, launch.function));
        self.inner.lock().copy_lists.functions = functions.collect();
        Ok(())
    }

    /// Launches the pieces so far, and clears them.
    ///
    /// # Safety
    /// As for [`Cuda::issue`].
    pub(super) unsafe fn issue_copy_lists(
        &self,
        inner: &mut Inner,
        event: Event,
        stream: Handle,
        begun: &mut bool,
    ) -> Result<()> {
        let mut copy_lists = std::mem::take(&mut inner.copy_lists);
        let mut issue = || {
            let CopyLists { lists, pieces, steps, functions, .. } = &mut copy_lists;
            let mut free = lists.iter_mut().filter(|list| list.user.is_none());
            for part in pieces.chunks(LIST_PIECES) {
                let Some(list) = free.next() else { return Err(Status::Again.into()) };
                list.user = Some(event);
                // SAFETY: the caller's promise.
                unsafe { self.issue_list(list, part, (steps, functions), stream, begun)? };
            }
            Ok(())
        };
        let issued = issue();
        copy_lists.pieces.clear();
        // A partly filled list is in use as well.
        copy_lists.room =
            copy_lists.lists.iter().filter(|list| list.user.is_none()).count() * LIST_PIECES;
        inner.copy_lists = copy_lists;
        issued
    }

    /// # Safety
    /// As for [`Cuda::issue`].
    unsafe fn issue_list(
        &self,
        list: &List,
        pieces: &[Piece],
        (found, functions): (&mut Vec<Step>, &[(&str, usize)]),
        stream: Handle,
        begun: &mut bool,
    ) -> Result<()> {
        let host: *mut Piece = std::ptr::with_exposed_provenance_mut(list.host);
        let bytes = size_of_val(pieces);
        // SAFETY: the list's own memory, which is long enough and unused.
        let code = unsafe {
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), host, pieces.len());
            (self.driver.to_device)(list.device, host.cast_const().cast(), bytes, stream)
        };
        *begun = true;
        self.driver.check("cuMemcpyHtoDAsync", code)?;
        let call = move_call(list.device, pieces.len() as u32);
        // SAFETY: the caller's promise, and a list that belongs to this launch until its event.
        unsafe { self.issue_call(&call, (found, functions), stream, begun) }
    }
}

/// Argument of the kernel.
fn move_call(device: Pointer, count: u32) -> Call {
    Call {
        kind: Kind::Move as u32,
        table: device,
        count,
        scratch: device + LIST_BYTES as u64,
        scratch_bytes: SCRATCH_BYTES as u64,
        ..Call::default()
    }
}
