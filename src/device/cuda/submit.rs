//! Work, put on a stream between what it waits for and the event that it ends with.

use crate::base::status::Result;
use crate::base::sync::Guard;
use crate::device::call::Call;
use crate::device::cuda::abi::Handle;
use crate::device::cuda::launch::Launch;
use crate::device::cuda::peers::PeerCopy;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Device, Event};

/// What is put on a stream. The memory that it names is the device's to use until its event, as
/// whoever made it promised.
pub enum Work<'a, 'b> {
    /// Copies.
    Copies(&'a [Copy<'b>]),
    /// Kernels, and what each of them is asked.
    Kernels(&'a [Launch], &'a [Call]),
    /// An event of the engine's is waited for.
    After(Handle),
}

impl Cuda {
    /// Puts copies on the stream of a line. Where the driver may stand still in one of them, what
    /// is ahead of it is waited for first, with no lock held: nobody who only asks waits with it.
    pub(super) fn put_copies<'a>(
        &'a self,
        mut inner: Guard<'a, Inner>,
        queue: usize,
        mut after: Option<Event>,
        copies: &[Copy<'_>],
    ) -> Result<Event> {
        if copies.iter().any(|copy| inner.may_block(copy)) {
            // Of what an engine puts on its own streams only the driver knows.
            let mut is_seen = self.owns_streams || queue >= self.streams.len();
            while !is_seen || self.is_behind(&mut inner, queue, after)? {
                is_seen = true;
                let mark = self.put(&mut inner, queue, after.take(), &Work::Copies(&[]))?;
                drop(inner);
                // By asking again and again: a device that is lost meanwhile ends it.
                let came = self.wait(mark, u64::MAX);
                inner = self.inner.lock();
                inner.events.forget(mark)?;
                came?;
            }
        }
        self.put(&mut inner, queue, after, &Work::Copies(copies))
    }

    /// Whether work that is put on a line now has to wait for any before it.
    fn is_behind(&self, inner: &mut Inner, queue: usize, after: Option<Event>) -> Result<bool> {
        if let Some(event) = after
            && self.look(inner, event)?.is_none()
        {
            return Ok(true);
        }
        let _guard = self.enter()?;
        self.ask_first(inner, queue);
        Ok(inner.events.open_in(queue) > 0)
    }

    /// Puts work on the stream of a line. When it fails before anything was begun, nothing was.
    /// When it fails later there is an event all the same, which ends with that failure once the
    /// device has done what was begun.
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
        Cuda::check_alive(inner)?; // looking may have found that it is lost
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
            log::warn!("a batch was begun and failed: {}", error.message());
            inner.events.set_failure(event, error.status());
            return Ok(event);
        }
        // What may have been begun must have ended before the caller hears of it.
        // SAFETY: as above.
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
                // SAFETY: the promise that came with the work.
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
    /// Where memory of this device's that an address is in ends.
    pub fn allocation_end(&self, address: u64) -> Option<u64> {
        let (&start, &(bytes, _)) = self.allocations.range(..=address).next_back()?;
        let end = start.saturating_add(bytes);
        (address < end).then_some(end)
    }
}
