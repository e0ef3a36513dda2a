//! User events of a custom device: the engine creates and signals them.

use crate::base::status::{Result, Status};
use crate::device::foreign::Foreign;
use crate::device::{Device, Event, MAX_USER_EVENTS};
use crate::fail;

impl Foreign {
    /// Implements [`crate::device::Device::create_user_event`].
    pub(super) fn new_user_event(&self) -> Result<Event> {
        self.sweep();
        if self.inner.lock().user_events.len() >= MAX_USER_EVENTS {
            fail!(Again, "{MAX_USER_EVENTS} user events are not released: release some first");
        }
        // User events complete in any order, as imported events do.
        let event =
            self.begin(self.facts.streams as usize, None, |_| self.engine.create_user_event())?;
        let mut inner = self.inner.lock();
        inner.user_events.insert(event.0, false);
        let is_late = inner.closed;
        drop(inner);
        if is_late {
            // A concurrent close did not see this event.
            self.signal_user_event(event)?;
        }
        Ok(event)
    }

    /// Implements [`crate::device::Device::signal_event`].
    pub(super) fn signal_user_event(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        let Some(is_signalled) = inner.user_events.get_mut(&event.0) else {
            fail!(Handle, "event {:#x} is not a user event", event.0);
        };
        if std::mem::replace(is_signalled, true) || inner.lost.is_some() {
            return Ok(());
        }
        let (raw, _) = inner.events.get(event)?;
        drop(inner);
        let signalled = self.checked(self.engine.signal_event(raw.number()));
        if signalled.is_err()
            && let Some(is_signalled) = self.inner.lock().user_events.get_mut(&event.0)
        {
            *is_signalled = false;
        }
        signalled
    }

    /// Implements [`Device::forget`]. An engine may complete a signalled event later.
    pub(super) fn forget_later(&self, event: Event) {
        self.inner.lock().leaving.push(event);
        self.sweep();
    }

    /// Releases forgotten events that have completed.
    fn sweep(&self) {
        let mut leaving = std::mem::take(&mut self.inner.lock().leaving);
        leaving.retain(|event| {
            self.release(*event).is_err_and(|error| error.status() == Status::Busy)
        });
        self.inner.lock().leaving.append(&mut leaving);
    }

    /// Signals all pending user events, so that nothing waits forever.
    pub(super) fn signal_open_events(&self) {
        let open: Vec<u64> = {
            let inner = self.inner.lock();
            let all = inner.user_events.iter().filter(|(_, is_signalled)| !**is_signalled);
            all.map(|(event, _)| *event).collect()
        };
        for event in open {
            if let Err(error) = self.signal_user_event(Event(event)) {
                log::warn!(
                    "signalling a user event of a closing device failed: {}",
                    error.message()
                );
            }
        }
    }
}
