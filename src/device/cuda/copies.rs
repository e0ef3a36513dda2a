//! Lowers copies to driver calls: runs of bytes, single or batched, and 2D copies.

use std::ffi::c_void;

use crate::base::status::Result;
use crate::device::cuda::abi::{Handle, KIND_DEVICE, KIND_HOST, Pointer, Rows, is_sticky};
use crate::device::cuda::batches::{CopyMethod, Runs};
use crate::device::cuda::peers::PeerCopy;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Direction, Event, Memory};
use crate::meta::view::Strip;

/// Runs of at least this length go into a batch rather than a 2D copy.
const ROW_BYTES: u64 = 4096;

/// A run of bytes to copy.
#[derive(Clone, Copy)]
pub struct Run {
    pub to: Pointer,
    pub from: Pointer,
    pub bytes: usize,
    pub to_memory: Memory,
    pub from_memory: Memory,
}

impl Cuda {
    /// Issues copies on a stream. After a failure `begun` says whether some may be in flight.
    ///
    /// # Safety
    /// As for [`crate::device::Device::submit`]. The stream is of this context, which is current.
    pub(super) unsafe fn issue(
        &self,
        inner: &mut Inner,
        (copies, no_access): (&[Copy<'_>], &[PeerCopy]),
        event: Event,
        (queue, stream): (usize, Handle),
        begun: &mut bool,
    ) -> Result<()> {
        let mut runs = std::mem::take(&mut inner.runs);
        runs.clear();
        inner.begin_copy_lists();
        let mut issue = || {
            for (at, copy) in copies.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    match PeerCopy::find(no_access, at) {
                        None => self.issue_copy(inner, copy, &mut runs, stream, begun)?,
                        Some(peer_copy) => {
                            self.issue_peer_copy(inner, (copy, peer_copy), (queue, stream), begun)?
                        }
                    }
                    if inner.has_full_list() {
                        self.issue_copy_lists(inner, event, stream, begun)?;
                    }
                }
            }
            // SAFETY: as above.
            unsafe {
                self.issue_runs(inner, &runs, stream, begun)?;
                self.issue_copy_lists(inner, event, stream, begun)
            }
        };
        let issued = issue();
        inner.runs = runs;
        issued
    }

    /// # Safety
    /// As for [`Cuda::issue`].
    unsafe fn issue_copy(
        &self,
        inner: &mut Inner,
        copy: &Copy<'_>,
        runs: &mut Runs,
        stream: Handle,
        begun: &mut bool,
    ) -> Result<()> {
        let method = self.method_for(copy);
        // Runs that the kernel cannot take are batched instead.
        let gathers = method != CopyMethod::Plain && self.batch_call.is_some();
        for strip in copy.tensor.strips() {
            if method == CopyMethod::Kernel && inner.note_piece(copy, &strip) {
                continue;
            }
            let is_one = runs_of(&strip).0 == 1;
            // The driver rejects overlapping rows and pitches above its limit.
            let fits = (strip.run_bytes..=self.max_pitch).contains(&strip.stride_bytes);
            if !is_one && fits && !(gathers && strip.run_bytes >= ROW_BYTES) {
                let rows = rows(copy, &strip);
                // SAFETY: the caller's promise: a strip of the copy.
                let code = unsafe { (self.driver.rows)(&rows, stream) };
                if code == 0 {
                    *begun = true;
                    continue;
                }
                // Some pitches within a device are rejected: then copy row by row.
                if is_sticky(code) {
                    return Err(self.driver.error("cuMemcpy2DAsync", code));
                }
            }
            let (count, bytes) = runs_of(&strip);
            for row in 0..count {
                let run = run_of(copy, &strip, row, bytes);
                if gathers && inner.is_batched(&run) {
                    runs.push(run)?;
                    continue;
                }
                // SAFETY: as above: a run of a strip.
                unsafe { self.issue_run(&run, stream)? };
                *begun = true;
            }
        }
        Ok(())
    }

    /// Issues one run on a stream.
    ///
    /// # Safety
    /// As for [`Cuda::issue`].
    pub(super) unsafe fn issue_run(&self, run: &Run, stream: Handle) -> Result<()> {
        let (call, bytes) = (&self.driver, run.bytes);
        let host =
            |address: Pointer| std::ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        // SAFETY: the caller's promise.
        unsafe {
            match (run.from_memory, run.to_memory) {
                (Memory::Host, Memory::Device) => call.check(
                    "cuMemcpyHtoDAsync",
                    (call.to_device)(run.to, host(run.from).cast_const(), bytes, stream),
                ),
                (Memory::Device, Memory::Host) => call.check(
                    "cuMemcpyDtoHAsync",
                    (call.from_device)(host(run.to), run.from, bytes, stream),
                ),
                (Memory::Device, Memory::Device) => call.check(
                    "cuMemcpyDtoDAsync",
                    (call.within_device)(run.to, run.from, bytes, stream),
                ),
                (Memory::Host, Memory::Host) => {
                    call.check("cuMemcpyAsync", (call.anywhere)(run.to, run.from, bytes, stream))
                }
            }
        }
    }
}

/// A strip as runs: their number and length.
pub fn runs_of(strip: &Strip) -> (u64, u64) {
    match strip.count == 1 || strip.stride_bytes == strip.run_bytes {
        true => (1, strip.bytes()),
        false => (strip.count, strip.run_bytes),
    }
}

/// Run number `row` of a strip.
pub fn run_of(copy: &Copy<'_>, strip: &Strip, row: u64, bytes: u64) -> Run {
    let tensor = strip.address.wrapping_add(row.wrapping_mul(strip.stride_bytes));
    let plane = copy.plane.expose_provenance() as u64 + strip.at + row * strip.run_bytes;
    let bytes = bytes as usize;
    let (tensor_memory, plane_memory) = (copy.memory, copy.plane_memory);
    match copy.direction {
        Direction::Gather => Run {
            to: plane,
            from: tensor,
            bytes,
            to_memory: plane_memory,
            from_memory: tensor_memory,
        },
        Direction::Scatter => Run {
            to: tensor,
            from: plane,
            bytes,
            to_memory: tensor_memory,
            from_memory: plane_memory,
        },
    }
}

/// One side of a 2D copy.
struct RowSide {
    kind: u32,
    host: *mut c_void,
    device: Pointer,
    pitch: usize,
}

impl RowSide {
    fn new(memory: Memory, address: u64, pitch: u64) -> RowSide {
        let pitch = pitch as usize;
        match memory {
            Memory::Device => {
                RowSide { kind: KIND_DEVICE, host: std::ptr::null_mut(), device: address, pitch }
            }
            Memory::Host => {
                let host = std::ptr::with_exposed_provenance_mut(address as usize);
                RowSide { kind: KIND_HOST, host, device: 0, pitch }
            }
        }
    }
}

/// A strip as a 2D copy.
fn rows(copy: &Copy<'_>, strip: &Strip) -> Rows {
    let plane = copy.plane.expose_provenance() as u64 + strip.at;
    let tensor = RowSide::new(copy.memory, strip.address, strip.stride_bytes);
    let plane = RowSide::new(copy.plane_memory, plane, strip.run_bytes);
    let (from, to) =
        if copy.direction == Direction::Gather { (tensor, plane) } else { (plane, tensor) };
    Rows {
        from_x_bytes: 0,
        from_y: 0,
        from_kind: from.kind,
        from_host: from.host,
        from_device: from.device,
        from_array: std::ptr::null_mut(),
        from_pitch: from.pitch,
        to_x_bytes: 0,
        to_y: 0,
        to_kind: to.kind,
        to_host: to.host,
        to_device: to.device,
        to_array: std::ptr::null_mut(),
        to_pitch: to.pitch,
        width_bytes: strip.run_bytes as usize,
        height: strip.count as usize,
    }
}
