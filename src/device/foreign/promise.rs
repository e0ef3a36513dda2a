//! Promises of an engine's device: it makes the events, and has them come when it is told to.

use crate::base::status::{Result, Status};
use crate::device::foreign::Foreign;
use crate::device::{Device, Event, MAX_PROMISES};
use crate::fail;

impl Foreign {
    /// What [`crate::device::Device::promise`] says.
    pub(super) fn make_promise(&self) -> Result<Event> {
        self.sweep();
        if self.inner.lock().promises.len() >= MAX_PROMISES {
            fail!(Again, "{MAX_PROMISES} promises are known, as many as can be");
        }
        // They come in any order, as what was adopted does.
        let event = self.begin(self.facts.streams as usize, None, |_| self.engine.promise())?;
        let mut inner = self.inner.lock();
        inner.promises.insert(event.0, false);
        let is_late = inner.closed;
        drop(inner);
        if is_late {
            // A close beside this did not see it.
            self.keep_promise(event)?;
        }
        Ok(event)
    }

    /// What [`crate::device::Device::keep`] says.
    pub(super) fn keep_promise(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        let Some(is_kept) = inner.promises.get_mut(&event.0) else {
            fail!(Handle, "event {:#x} is no promise", event.0);
        };
        if std::mem::replace(is_kept, true) || inner.lost.is_some() {
            return Ok(());
        }
        let (raw, _) = inner.events.get(event)?;
        drop(inner);
        let kept = self.heard(self.engine.keep(raw.number()));
        if kept.is_err()
            && let Some(is_kept) = self.inner.lock().promises.get_mut(&event.0)
        {
            *is_kept = false;
        }
        kept
    }

    /// What [`Device::forget`] says. An engine may take a while until an event that was kept has
    /// come.
    pub(super) fn forget_later(&self, event: Event) {
        self.inner.lock().leaving.push(event);
        self.sweep();
    }

    /// Releases those that have come meanwhile.
    fn sweep(&self) {
        let mut leaving = std::mem::take(&mut self.inner.lock().leaving);
        leaving.retain(|event| {
            self.release(*event).is_err_and(|error| error.status() == Status::Busy)
        });
        self.inner.lock().leaving.append(&mut leaving);
    }

    /// Has the engine keep all that are open, so that nothing stands still for ever.
    pub(super) fn keep_open(&self) {
        let open: Vec<u64> = {
            let inner = self.inner.lock();
            let all = inner.promises.iter().filter(|(_, is_kept)| !**is_kept);
            all.map(|(event, _)| *event).collect()
        };
        for event in open {
            if let Err(error) = self.keep_promise(Event(event)) {
                log::warn!("a promise of a device that is closed: {}", error.message());
            }
        }
    }
}
