//! Copies as the driver wants them: one run, or rows at a distance.

use crate::base::status::Result;
use crate::device::cuda::Cuda;
use crate::device::cuda::driver::{Handle, KIND_DEVICE, KIND_HOST, Rows};
use crate::device::{Copy, Memory, Way};
use crate::meta::view::Strip;

impl Cuda {
    /// Puts one copy on a stream, run by run or as rows.
    ///
    /// # Safety
    /// As for [`Device::submit`].
    pub(super) unsafe fn issue(&self, copy: &Copy<'_>, stream: Handle) -> Result<()> {
        for strip in copy.tensor.strips() {
            let pitched = strip.count > 1 && strip.stride_bytes <= self.max_pitch;
            let is_one = strip.count == 1 || strip.stride_bytes == strip.run_bytes;
            let rows = if is_one || pitched { 1 } else { strip.count };
            for row in 0..rows {
                let part = match (is_one, pitched) {
                    (true, _) => Strip { count: 1, run_bytes: strip.bytes(), ..strip },
                    (_, true) => strip,
                    _ => Strip {
                        count: 1,
                        address: strip.address.wrapping_add(row * strip.stride_bytes),
                        at: strip.at + row * strip.run_bytes,
                        ..strip
                    },
                };
                // SAFETY: the caller's promise; the part is one of its strips.
                unsafe { self.issue_strip(copy, &part, stream)? };
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Cuda::issue`].
    unsafe fn issue_strip(&self, copy: &Copy<'_>, strip: &Strip, stream: Handle) -> Result<()> {
        let plane = copy.plane.wrapping_add(strip.at as usize);
        let bytes = strip.bytes() as usize;
        let call = &self.driver;
        // SAFETY: the caller's promise; the stream is one of this context, which is entered.
        unsafe {
            match (strip.count, copy.memory, copy.way) {
                (1, Memory::Device, Way::Scatter) => call.check(
                    "cuMemcpyHtoDAsync",
                    (call.to_device)(strip.address, plane.cast(), bytes, stream),
                ),
                (1, Memory::Device, Way::Gather) => call.check(
                    "cuMemcpyDtoHAsync",
                    (call.from_device)(plane.cast(), strip.address, bytes, stream),
                ),
                _ => {
                    let rows = rows(copy, strip, plane);
                    call.check("cuMemcpy2DAsync", (call.rows)(&rows, stream))
                }
            }
        }
    }
}

/// A copy of rows as the driver wants it.
fn rows(copy: &Copy<'_>, strip: &Strip, plane: *mut u8) -> Rows {
    let kind = if copy.memory == Memory::Device { KIND_DEVICE } else { KIND_HOST };
    let tensor = std::ptr::with_exposed_provenance_mut(strip.address as usize);
    let is_device = copy.memory == Memory::Device;
    let (host, device) =
        if is_device { (std::ptr::null_mut(), strip.address) } else { (tensor, 0) };
    let pitch = if strip.count == 1 { strip.run_bytes } else { strip.stride_bytes } as usize;
    let mut rows = Rows {
        from_x_bytes: 0,
        from_y: 0,
        from_kind: kind,
        from_host: host,
        from_device: device,
        from_array: std::ptr::null_mut(),
        from_pitch: pitch,
        to_x_bytes: 0,
        to_y: 0,
        to_kind: KIND_HOST,
        to_host: plane.cast(),
        to_device: 0,
        to_array: std::ptr::null_mut(),
        to_pitch: strip.run_bytes as usize,
        width_bytes: strip.run_bytes as usize,
        height: strip.count as usize,
    };
    if copy.way == Way::Scatter {
        (rows.from_kind, rows.from_host, rows.from_device) = (KIND_HOST, plane.cast(), 0);
        (rows.to_kind, rows.to_host, rows.to_device) = (kind, host, device);
        std::mem::swap(&mut rows.from_pitch, &mut rows.to_pitch);
    }
    rows
}
