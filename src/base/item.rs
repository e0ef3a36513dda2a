//! Items: the units of work of an op.

use crate::base::memory::Buffer;
use crate::base::status::Error;
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

/// The status of an item or op that has not ended.
pub(crate) const PENDING: i32 = 1;

/// Most items of one op.
pub const MAX_ITEMS: usize = 65_536;

/// The result of one item.
pub struct Outcome {
    /// The value that the item computed, such as a checksum; set even if it does not match.
    pub value: u64,
    /// The failure, if any.
    pub error: Option<Error>,
}

/// Executes one item. Must not block on other ops.
pub type RunFn = fn(&Item) -> Outcome;

/// The items of an op: one inline, several in recycled memory.
#[cfg_attr(feature = "shuttle", allow(clippy::large_enum_variant))] // modelled atomics are large
pub(crate) enum Items {
    None,
    One([Item; 1]),
    Many(Vec<Item>),
}

impl Items {
    pub(crate) fn as_slice(&self) -> &[Item] {
        match self {
            Items::None => &[],
            Items::One(one) => one,
            Items::Many(many) => many,
        }
    }
}

/// One unit of work on up to two buffers.
pub struct Item {
    /// The operation, as bits of its executor.
    pub kind: u32,
    dst: AtomicPtr<Buffer>,
    src: AtomicPtr<Buffer>,
    /// Byte offset in the target.
    pub dst_offset: u64,
    /// Byte offset in the source.
    pub src_offset: u64,
    /// Bytes to process.
    pub bytes: u64,
    /// The expected checksum.
    pub expect: u64,
    pub(crate) status: AtomicI32,
    pub(crate) value: AtomicU64,
}

impl Item {
    /// Creates an item. Its buffers stay alive and count as in flight.
    pub fn new(
        kind: u32,
        dst: Option<(Arc<Buffer>, u64)>,
        src: Option<(Arc<Buffer>, u64)>,
        bytes: u64,
        expect: u64,
    ) -> Item {
        let raw = |b: Arc<Buffer>| {
            b.enter();
            Arc::into_raw(b).cast_mut()
        };
        let (dst, dst_offset) = dst.map_or((std::ptr::null_mut(), 0), |(b, o)| (raw(b), o));
        let (src, src_offset) = src.map_or((std::ptr::null_mut(), 0), |(b, o)| (raw(b), o));
        Item {
            kind,
            dst: AtomicPtr::new(dst),
            src: AtomicPtr::new(src),
            dst_offset,
            src_offset,
            bytes,
            expect,
            status: AtomicI32::new(PENDING),
            value: AtomicU64::new(0),
        }
    }

    fn buffer(slot: &AtomicPtr<Buffer>) -> Option<&Buffer> {
        // SAFETY: the pointer came from Arc::into_raw, and its count is released only in
        // `release_buffers`, which runs after the last executor is done.
        unsafe { slot.load(Ordering::Acquire).as_ref() }
    }

    /// The target's bytes, checked against its size.
    pub fn dst_ptr(&self) -> Option<*mut u8> {
        Self::buffer(&self.dst)?.range(self.dst_offset, self.bytes)
    }

    /// The source's bytes, checked against its size.
    pub fn src_ptr(&self) -> Option<*const u8> {
        Some(Self::buffer(&self.src)?.range(self.src_offset, self.bytes)?.cast_const())
    }

    /// Releases the buffers. `leak` never frees their memory: after a panic, code may still
    /// write there.
    pub(crate) fn release_buffers(&self, leak: bool) {
        for slot in [&self.dst, &self.src] {
            let raw = slot.swap(std::ptr::null_mut(), Ordering::AcqRel);
            if raw.is_null() {
                continue;
            }
            // SAFETY: from Arc::into_raw, taken out exactly once by the swap.
            let buffer = unsafe { Arc::from_raw(raw.cast_const()) };
            buffer.leave();
            if leak {
                std::mem::forget(buffer);
            }
        }
    }

    /// The status (`None` while pending) and the value.
    pub fn outcome(&self) -> (Option<i32>, u64) {
        match self.status.load(Ordering::Acquire) {
            PENDING => (None, 0),
            status => (Some(status), self.value.load(Ordering::Acquire)),
        }
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.release_buffers(false);
    }
}
