//! The host copy engine: the calling thread copies and sums. As items of ops, from
//! plain memory to plain memory; as a [`Device`], between tensors and planes.

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

/// Copy the source to the target.
pub const COPY: u32 = 1;
/// Report the checksum of the source as it was read.
pub const CHECKSUM: u32 = 2;
/// Compare that checksum with the expected one.
pub const VERIFY: u32 = 4;
/// Make the target's pages present.
pub const PREFAULT: u32 = 8;

/// Which buffers a kind of item needs: target, source.
pub fn needs(kind: u32) -> Result<(bool, bool)> {
    match kind {
        PREFAULT => Ok((true, false)),
        0 => fail!(Invalid, "an item without a kind does nothing"),
        kind if kind & !(COPY | CHECKSUM | VERIFY) == 0 => Ok((kind & COPY != 0, true)),
        kind => fail!(Invalid, "kind {kind:#x} is not a combination that can be done"),
    }
}

/// Carries out one item.
pub fn run(item: &Item) -> Outcome {
    match (item.kind, item.dst_ptr(), item.src_ptr()) {
        (PREFAULT, Some(dst), _) => {
            // SAFETY: a range inside a buffer that is the library's until release.
            unsafe { prefault(dst, item.bytes) };
            Outcome { value: 0, error: None }
        }
        (COPY, Some(dst), Some(src)) => {
            // SAFETY: both ranges lie inside buffers kept alive by the item; they
            // may overlap, which `copy` allows.
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
            let text = "an item reached the copy engine without its buffers";
            Outcome { value: 0, error: Some(Error::new(Status::Invalid, text)) }
        }
    }
}

fn mismatch(item: &Item, value: u64) -> Error {
    let text =
        format!("{} bytes sum to {value:#018x}, {:#018x} was expected", item.bytes, item.expect);
    Error::new(Status::Corrupt, text)
}

/// Sums a range block by block, copying each block while it is in cache.
///
/// # Safety
/// `src`, and `dst` if given, must be valid for `bytes`; ranges that overlap
/// are summed as read, and copied like `memmove` only when `dst` <= `src`.
unsafe fn summed(src: *const u8, dst: Option<*mut u8>, bytes: usize) -> u64 {
    let mut summer = Summer::default();
    let overlaps =
        dst.is_some_and(|d| (d as usize) > src as usize && (d as usize) < src as usize + bytes);
    let mut at = 0;
    while at < bytes {
        let n = BLOCK_BYTES.min(bytes - at);
        // SAFETY: inside the caller's ranges; nobody else writes the source while
        // it is the library's.
        let block = unsafe { std::slice::from_raw_parts(src.add(at), n) };
        summer.block(block);
        if let (Some(dst), false) = (dst, overlaps) {
            // SAFETY: inside the caller's ranges; `copy` allows overlap in the block.
            unsafe { std::ptr::copy(src.add(at), dst.add(at), n) };
        }
        at += n;
    }
    if let (Some(dst), true) = (dst, overlaps) {
        // SAFETY: the caller's ranges; block order would overwrite the source.
        unsafe { std::ptr::copy(src, dst, bytes) };
    }
    summer.finish()
}

/// Copies in host memory, done when `submit` returns.
pub struct Host {
    calls: Mutex<Calls>,
    idle: Condvar,
    pool: Pool,
}

#[derive(Default)]
struct Calls {
    /// The event made last.
    last: u64,
    /// Calls that copy now.
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
            fail!(Handle, "event {} is none of this device", event.0);
        }
        Ok(())
    }
}

impl Device for Host {
    fn facts(&self) -> Facts {
        Facts {
            name: "host",
            asynchronous: false,
            sums: true,
            reaches_device: false,
            wants_pinned: false,
            streams: MAX_STREAMS,
            kernels: 0,
        }
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        check(&self.facts(), stream, copies)?;
        self.begin(after)?;
        for copy in copies {
            // SAFETY: the caller's promise.
            let sum = unsafe {
                match copy.direction {
                    Direction::Gather => gather(&copy.tensor, copy.plane, copy.wants_sum),
                    Direction::Scatter => scatter(&copy.tensor, copy.plane, copy.wants_sum),
                }
            };
            copy.sum = sum.unwrap_or(0);
        }
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
                fail!(Busy, "{} batches are under way", calls.under_way);
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
    use crate::base::memory::{Buffer, MemoryWish};
    use crate::base::sync::Arc;
    use proptest::prelude::*;

    fn buffer(content: &[u8]) -> Arc<Buffer> {
        let wish = MemoryWish { bytes: content.len() as u64, ..MemoryWish::default() };
        let buffer = Buffer::map(&wish, None).unwrap();
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
        fn copies_like_memmove_and_sums_what_it_read(
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
            let mut want = start.clone();
            want.copy_within(from..from + n, to);
            prop_assert_eq!(content(&shared), want);
            if kind & CHECKSUM != 0 {
                prop_assert_eq!(outcome.value, checksum(&start[from..from + n]));
            }
        }
    }

    #[test]
    fn a_wrong_sum_is_reported_with_the_true_one() {
        let source = buffer(b"some bytes");
        let item = Item::new(VERIFY, None, Some((source, 0)), 10, 1);
        let outcome = run(&item);
        assert_eq!(outcome.value, checksum(b"some bytes"));
        assert_eq!(outcome.error.unwrap().status(), Status::Corrupt);
    }

    #[test]
    fn kinds_are_checked() {
        assert_eq!(needs(COPY | VERIFY).unwrap(), (true, true));
        assert_eq!(needs(CHECKSUM).unwrap(), (false, true));
        assert_eq!(needs(PREFAULT).unwrap(), (true, false));
        for bad in [0, PREFAULT | COPY, 16, u32::MAX] {
            assert!(needs(bad).is_err());
        }
    }
}
