//! The host copy engine: the calling thread copies and computes checksums. It executes items of ops
//! between plain buffers, and implements [`Device`] for copies between tensors and planes.

use crate::base::checksum::{BLOCK_BYTES, Summer};
use crate::base::clock::Clock;
use crate::base::item::{Item, Outcome};
use crate::base::memory::prefault;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Condvar, Mutex};
use crate::device::pool::Pool;
use crate::device::strips::{gather, scatter};
use crate::device::{
    Copy, Device, DeviceMemory, Direction, Event, Facts, MAX_STREAMS, Memory, State, Stream, check,
};
use crate::fail;

/// Item kind: copy the source to the target.
pub const COPY: u32 = 1;
/// Item kind: report the checksum of the source as it was read.
pub const CHECKSUM: u32 = 2;
/// Item kind: compare the checksum with the expected one.
pub const VERIFY: u32 = 4;
/// Item kind: fault in the target's pages.
pub const PREFAULT: u32 = 8;

/// Buffers that an item kind needs: target, source.
pub fn needs(kind: u32) -> Result<(bool, bool)> {
    match kind {
        PREFAULT => Ok((true, false)),
        0 => fail!(Invalid, "kind 0: an item needs COPY, CHECKSUM, VERIFY or PREFAULT"),
        kind if kind & !(COPY | CHECKSUM | VERIFY) == 0 => Ok((kind & COPY != 0, true)),
        kind => {
            fail!(Invalid, "kind {kind:#x}: PREFAULT alone, or COPY, CHECKSUM and VERIFY combined")
        }
    }
}

/// Executes one item.
pub fn run(item: &Item) -> Outcome {
    match (item.kind, item.dst_ptr(), item.src_ptr()) {
        (PREFAULT, Some(dst), _) => {
            // SAFETY: a range inside a buffer that belongs to the library until release.
            unsafe { prefault(dst, item.bytes) };
            Outcome { value: 0, error: None }
        }
        (COPY, Some(dst), Some(src)) => {
            // SAFETY: both ranges lie inside buffers that the item keeps alive. They may overlap,
            // which `copy` allows.
            unsafe { std::ptr::copy(src, dst, item.bytes as usize) };
            Outcome { value: 0, error: None }
        }
        (kind, dst, Some(src)) => {
            let dst = dst.filter(|_| kind & COPY != 0);
            // SAFETY: as above.
            let value = unsafe { summed(src, dst, item.bytes as usize) };
            let wrong = kind & VERIFY != 0 && value != item.expect;
            Outcome { value, error: wrong.then(|| mismatch(item, value)) }
        }
        _ => {
            let text = "the item lacks a buffer that its kind needs";
            Outcome { value: 0, error: Some(Error::new(Status::Invalid, text)) }
        }
    }
}

fn mismatch(item: &Item, value: u64) -> Error {
    let text = format!(
        "checksum mismatch in {} bytes: {value:#018x}, expected {:#018x}",
        item.bytes, item.expect
    );
    Error::new(Status::Corrupt, text)
}

/// Computes the checksum of a range block by block and copies each block while it is in cache.
///
/// # Safety
/// `src`, and `dst` if given, must be valid for `bytes`. Overlapping ranges are summed as read, and
/// copied like `memmove` only when `dst` <= `src`.
unsafe fn summed(src: *const u8, dst: Option<*mut u8>, bytes: usize) -> u64 {
    let mut summer = Summer::default();
    let overlaps =
        dst.is_some_and(|d| (d as usize) > src as usize && (d as usize) < src as usize + bytes);
    let mut at = 0;
    while at < bytes {
        let n = BLOCK_BYTES.min(bytes - at);
        // SAFETY: inside the caller's ranges. No other code writes the source while it belongs to
        // the library.
        let block = unsafe { std::slice::from_raw_parts(src.add(at), n) };
        summer.block(block);
        if let (Some(dst), false) = (dst, overlaps) {
            // SAFETY: inside the caller's ranges; `copy` allows overlap in the block.
            unsafe { std::ptr::copy(src.add(at), dst.add(at), n) };
        }
        at += n;
    }
    if let (Some(dst), true) = (dst, overlaps) {
        // SAFETY: the caller's ranges. Copying in block order would overwrite the source.
        unsafe { std::ptr::copy(src, dst, bytes) };
    }
    summer.finish()
}

/// Device that copies in host memory; copies are done when `submit` returns.
pub struct Host {
    calls: Mutex<Calls>,
    idle: Condvar,
    pool: Pool,
}

#[derive(Default)]
struct Calls {
    /// The newest event.
    last: u64,
    /// Calls in flight.
    under_way: u32,
    closed: bool,
}

impl Default for Host {
    fn default() -> Host {
        let pool = Pool::new(Memory::Host, 0, None);
        Host { calls: Mutex::new(Calls::default()), idle: Condvar::new(), pool }
    }
}

impl Host {
    fn begin(&self, after: Option<Event>) -> Result<()> {
        let mut calls = self.calls.lock();
        if calls.closed {
            return Err(Status::Closed.into());
        }
        if let Some(event) = after {
            calls.known(event)?;
        }
        calls.under_way += 1;
        Ok(())
    }

    fn end(&self) -> Event {
        let mut calls = self.calls.lock();
        calls.last += 1;
        calls.under_way -= 1;
        if calls.under_way == 0 && calls.closed {
            self.idle.notify_all();
        }
        Event(calls.last)
    }
}

impl Calls {
    fn known(&self, event: Event) -> Result<()> {
        if event.0 == 0 || event.0 > self.last {
            fail!(Handle, "event {} is not an event of this device", event.0);
        }
        Ok(())
    }
}

/// Facts about copies by the calling thread.
const FACTS: Facts = Facts {
    name: "host",
    asynchronous: false,
    sums: true,
    reaches_device: false,
    wants_pinned: false,
    streams: MAX_STREAMS,
    kernels: 0,
};

/// Copies between host addresses; the copies are done when this returns.
///
/// # Safety
/// As [`Device::submit`].
pub unsafe fn copy_now(copies: &mut [Copy<'_>]) -> Result<()> {
    check(&FACTS, Stream(0), copies)?;
    // SAFETY: the caller's promise.
    copies.iter_mut().for_each(|copy| unsafe { execute(copy) });
    Ok(())
}

/// # Safety
/// As [`Device::submit`].
unsafe fn execute(copy: &mut Copy<'_>) {
    // SAFETY: the caller's promise.
    let sum = unsafe {
        match copy.direction {
            Direction::Gather => gather(&copy.tensor, copy.plane, copy.wants_sum),
            Direction::Scatter => {
                scatter(&copy.tensor, copy.plane, copy.past_caches, copy.wants_sum)
            }
        }
    };
    copy.sum = sum.unwrap_or(0);
}

impl Device for Host {
    fn facts(&self) -> Facts {
        FACTS
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        check(&self.facts(), stream, copies)?;
        self.begin(after)?;
        // SAFETY: the caller's promise.
        copies.iter_mut().for_each(|copy| unsafe { execute(copy) });
        Ok(self.end())
    }

    fn state(&self, event: Event) -> Result<State> {
        self.calls.lock().known(event).map(|()| State::Done)
    }

    fn wait(&self, event: Event, _deadline_ns: u64) -> Result<()> {
        self.calls.lock().known(event)
    }

    fn poll(&self, _ended: &mut [Event]) -> usize {
        0
    }

    fn release(&self, event: Event) -> Result<()> {
        self.calls.lock().known(event)
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        self.pool.allocate(bytes)
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        self.pool.free(memory)
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        let mut calls = self.calls.lock();
        calls.closed = true;
        while calls.under_way > 0 {
            let left = match deadline_ns {
                0 => u64::from(u32::MAX),
                deadline => deadline.saturating_sub(Clock::real().now_ns()),
            };
            if left == 0 {
                fail!(Busy, "{} batches are still in flight", calls.under_way);
            }
            self.idle.wait_for(&mut calls, left);
        }
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::checksum::checksum;
    use crate::base::memory::{AllocationRequest, Buffer};
    use crate::base::sync::Arc;
    use crate::meta::view::View;
    use proptest::prelude::*;

    fn buffer(content: &[u8]) -> Arc<Buffer> {
        let request =
            AllocationRequest { bytes: content.len() as u64, ..AllocationRequest::default() };
        let buffer = Buffer::map(&request, None).unwrap();
        // SAFETY: a fresh buffer of that size.
        unsafe {
            std::ptr::copy_nonoverlapping(content.as_ptr(), buffer.address(), content.len());
        }
        Arc::new(buffer)
    }

    fn content(buffer: &Buffer) -> Vec<u8> {
        // SAFETY: nothing is in flight on it.
        unsafe { std::slice::from_raw_parts(buffer.address(), buffer.bytes() as usize) }.to_vec()
    }

    proptest! {
        #[test]
        fn copies_like_memmove_and_sums_the_source_as_read(
            len in 1usize..30_000, from in 0usize..30_000, to in 0usize..30_000,
            n in 0usize..30_000, kind in prop_oneof![Just(COPY), Just(COPY | CHECKSUM)],
        ) {
            let (from, to) = (from % len, to % len);
            let n = n.min(len - from).min(len - to);
            let start: Vec<u8> = (0..len).map(|i| (i * 7 / 3) as u8).collect();
            let shared = buffer(&start);
            let item = Item::new(kind, Some((shared.clone(), to as u64)),
                Some((shared.clone(), from as u64)), n as u64, 0);
            let outcome = run(&item);
            let mut expected = start.clone();
            expected.copy_within(from..from + n, to);
            prop_assert_eq!(content(&shared), expected);
            if kind & CHECKSUM != 0 {
                prop_assert_eq!(outcome.value, checksum(&start[from..from + n]));
            }
        }
    }

    proptest! {
        #[test]
        fn copies_around_the_caches_are_exact(
            shift in 0usize..130, token_bytes in 1000usize..1200, tokens in 1usize..4,
        ) {
            let plane: Vec<u8> = (0..token_bytes * tokens).map(|i| (i * 7 / 3) as u8).collect();
            let mut tensor = vec![0xEE; shift + plane.len() + 64];
            let expected = [&tensor[..shift], &plane, &[0xEE; 64]].concat();
            let address = tensor.as_mut_ptr().expose_provenance() + shift;
            let view = View::canonical(address as u64, tokens as u32, token_bytes as u64);
            let from = plane.as_ptr().cast_mut();
            let copy = Copy::new(&view, 0, tokens as u32, from, Direction::Scatter).unwrap();
            // SAFETY: both buffers live, and nothing else uses them.
            unsafe { copy_now(&mut [Copy { past_caches: true, ..copy }]).unwrap() };
            prop_assert_eq!(tensor, expected);
        }
    }

    #[test]
    fn checksum_mismatch_reports_the_actual_checksum() {
        let source = buffer(b"some bytes");
        let item = Item::new(VERIFY, None, Some((source, 0)), 10, 1);
        let outcome = run(&item);
        assert_eq!(outcome.value, checksum(b"some bytes"));
        assert_eq!(outcome.error.unwrap().status(), Status::Corrupt);
    }

    #[test]
    fn invalid_item_kinds_are_rejected() {
        assert_eq!(needs(COPY | VERIFY).unwrap(), (true, true));
        assert_eq!(needs(CHECKSUM).unwrap(), (false, true));
        assert_eq!(needs(PREFAULT).unwrap(), (true, false));
        for bad in [0, PREFAULT | COPY, 16, u32::MAX] {
            assert!(needs(bad).is_err());
        }
    }
}
