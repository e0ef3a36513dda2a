//! Streams of an engine's that wait for an op, which need not have begun; and what becomes of
//! promises when a runtime ends.

use crate::base::op::{Op, RELEASED};
use crate::base::owner::Owner;
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Weak};
use crate::device::{Device, Event};

/// Has a stream of the engine's own go on only when an op was released, well or not. Nobody
/// waits. When it fails the stream does not wait either.
///
/// # Safety
/// As for [`Device::hold`].
pub unsafe fn hold_until_released(
    device: &Arc<dyn Device>,
    raw_stream: u64,
    op: &Op,
) -> Result<()> {
    if op.state() & RELEASED != 0 {
        return Ok(());
    }
    let promise = device.promise()?;
    // A device that has gone has kept all of its promises.
    let kept = Arc::downgrade(device);
    // SAFETY: the caller's promise.
    let held = unsafe { device.hold(raw_stream, promise) };
    let joined = held.and_then(|()| {
        op.when_released(Box::new(move || {
            kept.upgrade().into_iter().for_each(|device| end(&device, promise));
        }))
    });
    joined.inspect_err(|_| end(device, promise))
}

fn end(device: &Arc<dyn Device>, promise: Event) {
    if let Err(error) = device.keep(promise) {
        log::error!("a stream that waits for an op may stand still: {error}");
    }
    device.forget(promise);
}

/// Has a device of a runtime keep its promises when that ends: what waits for the last ops may be
/// behind them.
pub struct Keeper(Weak<dyn Device>);

impl Keeper {
    /// Of a device; the runtime is to know it as an owner.
    pub fn new(device: &Arc<dyn Device>) -> Arc<Keeper> {
        Arc::new(Keeper(Arc::downgrade(device)))
    }
}

impl Owner for Keeper {
    fn abandoned(&self, _op: &Op) {}

    fn shut(&self, _status: Status) {
        self.0.upgrade().into_iter().for_each(|device| device.keep_all());
    }

    fn serve(&self) {}
}
