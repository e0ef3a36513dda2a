//! A device that fails when it is told to.

use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::base::status::{Result, Status};
use kvtier::device::host::Host;
use kvtier::device::{Copy, Device, Event, Facts, State, Stream, Way};

/// The host's, with faults: which copy of a way is the next to fail, counted from 1; 0 = none,
/// the greatest number = all.
#[derive(Default)]
pub struct Faulty {
    host: Host,
    pub scatter: AtomicU64,
    pub gather: AtomicU64,
}

/// Every copy fails.
pub const ALL: u64 = u64::MAX;

impl Faulty {
    fn pass(count: &AtomicU64) -> Result<()> {
        let next = |left: u64| match left {
            0 => None,
            ALL => Some(ALL),
            left => Some(left - 1),
        };
        match count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(1 | ALL) => Err(Status::Io.into()),
            _ => Ok(()),
        }
    }
}

impl Device for Faulty {
    fn facts(&self) -> Facts {
        self.host.facts()
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        for copy in copies.iter() {
            Faulty::pass(if copy.way == Way::Scatter { &self.scatter } else { &self.gather })?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.host.submit(stream, after, copies) }
    }

    fn state(&self, event: Event) -> Result<State> {
        self.host.state(event)
    }

    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()> {
        self.host.wait(event, deadline_ns)
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        self.host.poll(ended)
    }

    fn release(&self, event: Event) -> Result<()> {
        self.host.release(event)
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        self.host.close(deadline_ns)
    }
}
