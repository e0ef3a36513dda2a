//! Who stands behind ops that no worker carries out, and hears of the runtime's end.

use crate::base::op::Op;
use crate::base::status::Status;

/// Someone who holds promised ops and must hear when one ends without them.
/// Called with no lock held.
pub trait Owner: Send + Sync {
    /// An op was ended by a cancel or a deadline before it was issued, or nobody waits for
    /// it any more.
    fn abandoned(&self, op: &Op);
    /// The runtime closes or is poisoned: end everything promised.
    fn shut(&self, status: Status);
    /// A turn on the notifier thread that was asked for.
    fn serve(&self);
}
