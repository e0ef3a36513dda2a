//! User events of the simulated device. Work behind a pending one has no known start.

use crate::base::status::{Result, Status};
use crate::base::sync::Guard;
use crate::device::simulated::{Batch, Inner, NEVER, Phase, Simulated};
use crate::device::{Event, MAX_USER_EVENTS};
use crate::fail;

impl Simulated {
    /// Implements [`crate::device::Device::create_user_event`].
    pub(super) fn new_user_event(&self) -> Result<Event> {
        let mut inner = self.now();
        if inner.lost || inner.closed {
            let status = if inner.lost { Status::Unavailable } else { Status::Closed };
            return Err(status.into());
        }
        if inner.user_events.len() >= MAX_USER_EVENTS {
            fail!(Again, "{MAX_USER_EVENTS} user events are not released: release some first");
        }
        let number = inner.batches;
        let event = inner.known.insert(Phase::Pending(Batch {
            number,
            after: None,
            stream: 0,
            length_ns: 0,
            finish_ns: NEVER,
            doom: None,
            spoils: false,
            loses: false,
            copies: Vec::new(),
        }))?;
        inner.user_events.insert(event.0);
        inner.pending += 1;
        Ok(event)
    }

    /// Implements [`crate::device::Device::signal_event`].
    pub(super) fn signal_user_event(&self, event: Event) -> Result<()> {
        let mut inner = self.now();
        if !inner.user_events.contains(&event.0) {
            fail!(Handle, "event {:#x} is not a user event of this device", event.0);
        }
        inner.signal(event, self.clock.now_ns());
        self.changed.notify_all();
        Ok(())
    }

    /// Signals all pending user events.
    pub(super) fn signal_open_events(&self, inner: &mut Guard<'_, Inner>) {
        let all: Vec<u64> = inner.user_events.iter().copied().collect();
        all.into_iter().for_each(|event| inner.signal(Event(event), self.clock.now_ns()));
        self.changed.notify_all();
    }
}

impl Inner {
    fn signal(&mut self, event: Event, now: u64) {
        if let Ok(Phase::Pending(_)) = self.known.get(event) {
            self.end(event, Ok(()));
            self.unpark(now);
            self.run_until(now);
        }
    }

    /// Time of the next step, at most `longest_ns` from now.
    pub(super) fn next_or(&self, longest_ns: u64, now: u64) -> u64 {
        let next = self.agenda.first_key_value().map(|((time, _), _)| *time);
        next.unwrap_or(u64::MAX).min(now.saturating_add(longest_ns))
    }
}
