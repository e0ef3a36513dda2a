//! The pieces of work an op is made of.

use crate::base::memory::Buffer;
use crate::base::status::Error;
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

/// The status of what is not done yet.
pub(crate) const PENDING: i32 = 1;

/// Most items of one op.
pub const MAX_ITEMS: usize = 65_536;

/// How one item went.
pub struct Outcome {
    /// What the item computed: a checksum, also when it is the wrong one.
    pub value: u64,
    /// What went wrong.
    pub error: Option<Error>,
}

/// Carries out one item. Must not block on other ops.
pub type RunFn = fn(&Item) -> Outcome;

/// An op's items: one inline, many in recycled memory.
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

/// One piece of work on up to two buffers.
pub struct Item {
    /// What to do; the executor's own bits.
    pub kind: u32,
    dst: AtomicPtr<Buffer>,
    src: AtomicPtr<Buffer>,
    /// Where in the target.
    pub dst_offset: u64,
    /// Where in the source.
    pub src_offset: u64,
    /// How much.
    pub bytes: u64,
    /// A checksum to compare with.
    pub expect: u64,
    pub(crate) status: AtomicI32,
    pub(crate) value: AtomicU64,
}

impl Item {
    /// An item; the buffers stay alive, and count as in flight once submitted.
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
        // SAFETY: the pointer came from Arc::into_raw and its count is given up
        // only in `let_go`, which runs after the last executor is done.
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

    /// Gives the buffers back. `leak` keeps their memory for ever: after a panic
    /// nobody knows who still writes there.
    pub(crate) fn let_go(&self, leak: bool) {
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

    /// Status (`None` while pending) and value.
    pub fn outcome(&self) -> (Option<i32>, u64) {
        match self.status.load(Ordering::Acquire) {
            PENDING => (None, 0),
            status => (Some(status), self.value.load(Ordering::Acquire)),
        }
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.let_go(false);
    }
}
