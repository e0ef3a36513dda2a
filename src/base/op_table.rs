//! Where ops live: one table of the process, since an op's handle says no more
//! than its slot.

use crate::base::op::Op;
use crate::base::slab::Slab;

#[cfg(not(feature = "shuttle"))]
static OPS: Slab<Op> = Slab::new();

/// The table of all ops of the process.
#[cfg(not(feature = "shuttle"))]
pub fn ops() -> &'static Slab<Op> {
    &OPS
}

#[cfg(feature = "shuttle")]
shuttle::lazy_static! {
    static ref OPS: Slab<Op> = Slab::new();
}

/// The table of all ops of the process (of one model run).
#[cfg(feature = "shuttle")]
pub fn ops() -> &'static Slab<Op> {
    &OPS
}
