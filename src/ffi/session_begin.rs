//! How a move of a session begins, whatever says what is moved: rectangles, blocks.

use crate::base::op::{Op, OpOpts, OpRef};
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::Event;
use crate::fail;
use crate::ffi::abi::{HasSize, encode, enter, known_flags, pin_optional, read};
use crate::ffi::event::kvt_event_t;
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::session::{SessionNoun, kvt_session_t};
use crate::ffi::session_move::level_of;
use crate::ffi::view::{check_memory, kvt_view_t, views_of};
use crate::store::ready_event::Ready;
use crate::store::state::session::Views;
use crate::store::state::{Level, TransferKind};

/// A struct that says what is moved.
pub(crate) trait Moved: HasSize {
    /// The flags that it has.
    const FLAGS: u64;
    /// Where a caller who wants an op for each item is sent.
    const EACH: &'static str;

    /// What of it all such structs have.
    fn common(&self) -> Common;
}

/// What all structs of moves have.
pub(crate) struct Common {
    pub(crate) flags: u64,
    pub(crate) reserved: u32,
    pub(crate) level: u32,
    pub(crate) ready: *const kvt_event_t,
    pub(crate) first_layer: u32,
    pub(crate) k: *const kvt_view_t,
    pub(crate) v: *const kvt_view_t,
    pub(crate) stride_bytes: u64,
    pub(crate) after: u64,
}

/// How a move is begun.
pub(crate) struct How<'a> {
    pub(crate) level: Level,
    pub(crate) opts: OpOpts,
    pub(crate) ready: Option<&'a Ready>,
}

impl Common {
    /// The event of the store's device that copies are behind.
    pub(crate) fn after(&self) -> Option<Event> {
        (self.after != 0).then_some(Event(self.after))
    }

    /// Where the engine has so many layers and tokens; none = to the end of the session.
    ///
    /// # Safety
    /// What views lead to is valid, as the exported functions say.
    pub(crate) unsafe fn views(
        &self,
        noun: &SessionNoun,
        kind: TransferKind,
        (layers, tokens): (usize, Option<u64>),
    ) -> Result<Arc<Views>> {
        let views = match kind {
            TransferKind::Prefetch if self.k.is_null() && self.v.is_null() => Views::default(),
            TransferKind::Prefetch => fail!(Invalid, "a prefetch has no views"),
            // SAFETY: the caller's promise.
            _ => unsafe {
                views_of((self.k, self.v, self.stride_bytes), self.first_layer, layers, tokens)?
            },
        };
        check_memory(&noun.ns.store, &views, self.first_layer)?;
        Ok(Arc::new(views))
    }
}

/// Reads what all transfers have in common, has `begin` submit one, and gives its ops out.
///
/// # Safety
/// Pointers are null or valid, structs for the size they state; there is room for as many
/// ops as `begin` gives.
pub(crate) unsafe fn submit<M: Moved>(
    session: *const kvt_session_t,
    kind: TransferKind,
    moved: *const M,
    opts: *const kvt_submit_opts_t,
    ops_out: *mut *mut kvt_op_t,
    begin: impl FnOnce(&SessionNoun, &M, &How<'_>) -> Result<Vec<OpRef>>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (given, (opts, each)) = unsafe { (read(moved)?, submit_opts(opts, ops_out.is_null())?) };
    let common = given.common();
    known_flags(common.flags, M::FLAGS)?;
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH has no meaning here: see {}", M::EACH);
    }
    if common.reserved != 0 {
        fail!(Invalid, "reserved is {}", common.reserved);
    }
    let level = level_of(common.level, kind)?;
    let ready = pin_optional(common.ready)?.map(|noun| noun.0.clone());
    let how = How { level, opts, ready: ready.as_deref() };
    let ops = begin(&*enter(session)?, &given, &how)?;
    for (i, op) in ops.iter().enumerate().filter(|_| !ops_out.is_null()) {
        // SAFETY: the caller has room for them.
        unsafe { ops_out.add(i).write(encode::<Op>(op.key())) };
    }
    Ok(())
}
