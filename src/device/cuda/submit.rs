//! Submits work to a stream, between the event that it waits for and the event that it ends with.

use crate::base::status::Result;
use crate::base::sync::Guard;
use crate::device::call::Call;
use crate::device::cuda::abi::Handle;
use crate::device::cuda::launch::Launch;
use crate::device::cuda::peers::PeerCopy;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Device, Event};

/// Work for a stream. The caller guarantees that its memory belongs to the device until its event.
pub enum Work<'a, 'b> {
    /// Copies.
    Copies(&'a [Copy<'b>]),
    /// Kernels with their arguments.
    Kernels(&'a [Launch], &'a [Call]),
    /// A wait for an event of the engine.
    After(Handle),
}

impl Cuda {
    /// Submits copies to a queue's stream. If the driver may block in a copy, this first waits for
    /// earlier work without a lock, so that queries of other threads do not block.
    pub(super) fn put_copies<'a>(
        &'a self,
        mut inner: Guard<'a, Inner>,
        queue: usize,
        mut after: Option<Event>,
        copies: &[Copy<'_>],
    ) -> Result<Event> {
        if copies.iter().any(|copy| inner.may_block(copy)) {
            // Work that an engine put on its own streams is known to the driver only.
            let mut is_seen = self.owns_streams || queue >= self.streams.len();
            while !is_seen || self.is_behind(&mut inner, queue, after)? {
                is_seen = true;
                let mark = self.put(&mut inner, queue, after.take(), &Work::Copies(&[]))?;
                drop(inner);
                // Polls: loss of the device ends the wait.
                let waited = self.wait(mark, u64::MAX);
                inner = self.inner.lock();
                inner.events.forget(mark)?;
                waited?;
            }
        }
        self.put(&mut inner, queue, after, &Work::Copies(copies))
    }

    /// Whether new work of a queue would have to wait for earlier work.
    fn is_behind(&self, inner: &mut Inner, queue: usize, after: Option<Event>) -> Result<bool> {
        if let Some(event) = after
            && self.look(inner, event)?.is_none()
        {
            return Ok(true);
        }
        let _guard = self.enter()?;
        self.query_in_order(inner, queue);
        Ok(inner.events.open_in(queue) > 0)
    }

    /// Submits work to a queue's stream. If it fails before anything was begun, it returns the
    /// error. If it fails later, it returns an event that ends with the failure once the device has
    /// done the part that was begun.
    pub(super) fn put(
        &self,
        inner: &mut Inner,
        queue: usize,
        after: Option<Event>,
        work: &Work<'_, '_>,
    ) -> Result<Event> {
        Cuda::check_alive(inner)?;
        let waits = match after.map(|event| self.look(inner, event)).transpose()? {
            Some(Some(Err(status))) => return Err(status.into()),
            Some(None) => after
                .map(|event| inner.events.pending_failure(event).map(|()| event))
                .transpose()?,
            _ => None,
        };
        Cuda::check_alive(inner)?; // the query may have found it lost
        let stream = self.stream_of(inner, queue);
        let _guard = self.enter()?;
        if !self.owns_streams && queue < self.streams.len() {
            self.refuse_capturing(stream)?;
        }
        let mut no_access = Vec::new();
        match work {
            Work::Copies(copies) => no_access = self.check_copies(inner, copies)?,
            Work::Kernels(_, calls) => self.check_calls(inner, calls)?,
            Work::After(_) => {}
        }
        let event = inner.events.begin(&self.driver, queue, |known| match work {
            Work::Copies(copies) => known.note_copies(copies),
            Work::Kernels(_, calls) => known.note_calls(calls),
            Work::After(_) => Ok(()),
        })?;
        let mut begun = false;
        let issued = self.wait_for(inner, stream, waits).and_then(|()| {
            self.issue_work(inner, event, (queue, stream), (work, &no_access), &mut begun)
        });
        let raw = inner.events.raw(event)?;
        // SAFETY: an event and a stream of this context.
        let record =
            || self.driver.check("cuEventRecord", unsafe { (self.driver.record)(raw, stream) });
        let Err(error) = issued.and_then(|()| record()) else { return Ok(event) };
        if begun && record().is_ok() {
            log::warn!("a batch failed after it was begun: {}", error.message());
            inner.events.set_failure(event, error.status());
            return Ok(event);
        }
        // Work that may have begun must end before the caller learns of the failure. SAFETY: as
        // above.
        if begun && unsafe { (self.driver.sync_stream)(stream) } != 0 {
            self.lose(inner, &error);
        }
        inner.events.forget(event)?;
        Err(error)
    }

    fn wait_for(&self, inner: &mut Inner, stream: Handle, before: Option<Event>) -> Result<()> {
        let Some(before) = before else { return Ok(()) };
        if let Some(number) = inner.events.get(before)?.user_event {
            return self.wait_for_user_event(inner, stream, number);
        }
        let raw = inner.events.raw(before)?;
        // SAFETY: an event and a stream of this context.
        let code = unsafe { (self.driver.stream_wait)(stream, raw, 0) };
        self.driver.check("cuStreamWaitEvent", code)
    }

    fn issue_work(
        &self,
        inner: &mut Inner,
        event: Event,
        (queue, stream): (usize, Handle),
        (work, no_access): (&Work<'_, '_>, &[PeerCopy]),
        begun: &mut bool,
    ) -> Result<()> {
        match work {
            Work::Copies(copies) => {
                let (batch, onto) = ((*copies, no_access), (queue, stream));
                let plan = self.plan_sums(inner, batch, event, queue)?;
                // SAFETY: the contract of the work.
                unsafe { self.issue(inner, batch, event, onto, begun)? };
                let Some(plan) = plan else { return Ok(()) };
                // SAFETY: as above.
                unsafe { self.issue_sums(inner, (batch, &plan), event, onto, begun) }
            }
            // SAFETY: as above.
            Work::Kernels(launches, calls) => unsafe {
                self.issue_kernels(launches, calls, stream, begun)
            },
            Work::After(raw) => {
                // SAFETY: the engine's event, as it has promised, and a stream of this context.
                let code = unsafe { (self.driver.stream_wait)(stream, *raw, 0) };
                self.driver.check("cuStreamWaitEvent", code)
            }
        }
    }

    fn stream_of(&self, inner: &Inner, queue: usize) -> Handle {
        let own = self.streams.get(queue).copied();
        own.unwrap_or_else(|| inner.listeners[queue - self.streams.len()]) as Handle
    }
}

impl Inner {
    /// End of the allocation that contains an address.
    pub fn allocation_end(&self, address: u64) -> Option<u64> {
        let (&start, &(bytes, _)) = self.allocations.range(..=address).next_back()?;
        let end = start.saturating_add(bytes);
        (address < end).then_some(end)
    }
}
