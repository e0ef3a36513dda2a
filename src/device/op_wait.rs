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
/// As for [`Device::stream_wait_event`].
pub unsafe fn stream_wait_op(device: &Arc<dyn Device>, raw_stream: u64, op: &Op) -> Result<()> {
    if op.state() & RELEASED != 0 {
        return Ok(());
    }
    let user_event = device.create_user_event()?;
    // A device that has gone has kept all of its promises.
    let kept = Arc::downgrade(device);
    // SAFETY: the caller's promise.
    let held = unsafe { device.stream_wait_event(raw_stream, user_event) };
    let joined = held.and_then(|()| {
        op.when_released(Box::new(move || {
            kept.upgrade().into_iter().for_each(|device| end(&device, user_event));
        }))
    });
    joined.inspect_err(|_| end(device, user_event))
}

fn end(device: &Arc<dyn Device>, user_event: Event) {
    if let Err(error) = device.signal_event(user_event) {
        log::error!("a stream that waits for an op may stand still: {error}");
    }
    device.forget(user_event);
}

/// Has a device of a runtime keep its promises when that ends: what waits for the last ops may be
/// behind them.
pub struct SignalOnShutdown(Weak<dyn Device>);

impl SignalOnShutdown {
    /// Of a device; the runtime is to know it as an owner.
    pub fn new(device: &Arc<dyn Device>) -> Arc<SignalOnShutdown> {
        Arc::new(SignalOnShutdown(Arc::downgrade(device)))
    }
}

impl Owner for SignalOnShutdown {
    fn abandoned(&self, _op: &Op) {}

    fn shut(&self, _status: Status) {
        self.0.upgrade().into_iter().for_each(|device| device.signal_all_events());
    }

    fn serve(&self) {}
}
