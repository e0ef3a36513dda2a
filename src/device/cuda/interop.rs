//! Events and streams of the engine. No call here waits. Streams and events that belong to a graph
//! capture are rejected: captured work runs when the graph is launched, not now.

use crate::base::status::{Error, Result};
use crate::device::cuda::abi::{DEFAULT_STREAMS, Handle, code};
use crate::device::cuda::submit::Work;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Event, MAX_LEASED_STREAMS, Stream};
use crate::fail;

/// Limit: streams that wait for imported events. Below the limit each pending imported event has
/// its own stream, so that a late one delays no others.
const MAX_LISTENERS: usize = 32;

impl Cuda {
    /// Implements [`crate::device::Device::import_event`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn import_engine_event(&self, raw: u64) -> Result<Event> {
        if raw == 0 {
            fail!(Invalid, "a CUevent of 0 cannot be imported");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let inside = self.enter()?;
        // Only a query shows that an event belongs to a graph: a stream that waited for it would be
        // captured into that graph. SAFETY: the caller's promise: an event.
        let code = unsafe { (self.driver.query)(raw as Handle) };
        if code != 0 && code != code::NOT_READY {
            let error = self.driver.error("cuEventQuery", code);
            self.lose_if_sticky(&mut inner, code, &error);
            return Err(error.within("importing the engine's event"));
        }
        let queue = self.listener(&mut inner)?;
        drop(inside);
        self.put(&mut inner, queue, None, &Work::After(raw as Handle))
    }

    /// The queue of a listener stream that is idle, if possible. The context is current.
    pub(super) fn listener(&self, inner: &mut Inner) -> Result<usize> {
        let first = self.streams.len();
        let queues = first..first + inner.listeners.len();
        for queue in queues.clone() {
            self.query_in_order(inner, queue);
        }
        let is_free = |queue: &usize| !inner.leased.contains(queue);
        let idle = queues.clone().find(|at| is_free(at) && inner.events.open_in(*at) == 0);
        if let Some(queue) = idle {
            return Ok(queue);
        }
        if inner.listeners.len() < MAX_LISTENERS {
            inner.listeners.push(self.driver.make_stream()?);
            return Ok(inner.events.add_queue());
        }
        let shared = queues.filter(is_free).min_by_key(|queue| inner.events.open_in(*queue));
        Ok(shared.unwrap_or(first))
    }

    /// Implements [`crate::device::Device::lease_stream`] with a listener stream.
    pub(super) fn lease_listener(&self) -> Result<Stream> {
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let _guard = self.enter()?;
        let is_over = inner.leased.len() >= MAX_LEASED_STREAMS;
        let queue = if is_over { None } else { Some(self.listener(&mut inner)?) };
        match queue.filter(|queue| inner.events.open_in(*queue) == 0) {
            Some(queue) => {
                inner.leased.push(queue);
                Ok(Stream(queue as u32))
            }
            None => fail!(
                Again,
                "{} streams are leased, the others are busy: return one first",
                inner.leased.len()
            ),
        }
    }

    /// Implements [`crate::device::Device::stream_wait_event`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn engine_stream_wait(&self, raw: u64, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        let outcome = self.look(&mut inner, event)?;
        let inside = self.enter()?;
        self.check_stream(raw)?;
        self.refuse_capturing(raw as Handle)?;
        match outcome {
            Some(Ok(())) => return Ok(()),
            Some(Err(status)) => return Err(status.into()),
            None => {}
        }
        if let Some(number) = inner.events.get(event)?.user_event {
            return self.engine_stream_wait_user_event(&mut inner, raw as Handle, number);
        }
        let before = inner.events.raw(event)?;
        // SAFETY: a stream and an event of this context.
        let code = unsafe { (self.driver.stream_wait)(raw as Handle, before, 0) };
        drop(inside);
        let held = self.driver.check("cuStreamWaitEvent", code);
        held.inspect_err(|error| self.lose_if_sticky(&mut inner, code, error))
    }

    /// Rejects streams of other contexts, and the default streams.
    pub(super) fn check_stream(&self, raw: u64) -> Result<()> {
        if DEFAULT_STREAMS.contains(&raw) {
            fail!(
                Invalid,
                "stream {raw:#x} is a default stream, which all of the process shares: create one"
            );
        }
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: a stream, as the caller promises, and a place for a handle.
        let code = unsafe { (self.driver.stream_context)(raw as Handle, &mut context) };
        self.driver.check("cuStreamGetCtx", code)?;
        if context as usize != self.context {
            fail!(Invalid, "stream {raw:#x} belongs to another context than the device");
        }
        Ok(())
    }

    /// Rejects streams that are being captured into a graph.
    pub(super) fn refuse_capturing(&self, stream: Handle) -> Result<()> {
        let mut state = 0;
        // SAFETY: a stream of the engine's, of this context, and a place for a number.
        let code = unsafe { (self.driver.is_capturing)(stream, &mut state) };
        self.driver.check("cuStreamIsCapturing", code)?;
        if state != 0 {
            fail!(
                State,
                "the stream is being captured into a graph: give the device other streams, or none"
            );
        }
        Ok(())
    }

    /// Marks the device as lost if an error is sticky.
    pub(super) fn lose_if_sticky(&self, inner: &mut Inner, code: i32, error: &Error) {
        if crate::device::cuda::abi::is_sticky(code) {
            self.lose(inner, error);
        }
    }
}
