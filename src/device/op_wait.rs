//! Makes streams of an engine wait for an op that need not have begun, and signals user events when
//! a runtime shuts down.

use crate::base::op::Owner;
use crate::base::op::{Op, RELEASED};
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Weak};
use crate::device::{Device, Event};

/// Makes a stream of the engine wait until an op is released, whether it succeeded or not. The
/// calling thread does not wait. After an error the stream does not wait either.
///
/// # Safety
/// As for [`Device::stream_wait_event`].
pub unsafe fn stream_wait_op(device: &Arc<dyn Device>, raw_stream: u64, op: &Op) -> Result<()> {
    if op.state() & RELEASED != 0 {
        return Ok(());
    }
    let user_event = device.create_user_event()?;
    // A device that was dropped has signalled all of its user events.
    let weak = Arc::downgrade(device);
    // SAFETY: the caller's promise.
    let held = unsafe { device.stream_wait_event(raw_stream, user_event) };
    let joined = held.and_then(|()| {
        op.on_release(Box::new(move || {
            weak.upgrade().into_iter().for_each(|device| end(&device, user_event));
        }))
    });
    joined.inspect_err(|_| end(device, user_event))
}

fn end(device: &Arc<dyn Device>, user_event: Event) {
    if let Err(error) = device.signal_event(user_event) {
        log::error!("signalling a user event failed; a stream may wait forever: {error}");
    }
    device.forget(user_event);
}

/// Signals a device's user events when its runtime shuts down: streams may wait for the last ops.
pub struct SignalOnShutdown(Weak<dyn Device>);

impl SignalOnShutdown {
    /// Registers a device; the runtime must add the result as an owner.
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
