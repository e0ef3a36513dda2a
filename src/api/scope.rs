//! Transfers of a session that run while the engine computes.
//!
//! Safety: the store's threads read and write the engine's memory through addresses. No code here is
//! `unsafe`, since submitting addresses is a safe call inside the library; what keeps it sound is:
//!
//! 1. A [`Scope`] cannot end before every op that it began is released: its drop waits, and nothing
//!    outside [`Session::scope`](crate::api::Session::scope) owns it, so it cannot be forgotten.
//! 2. Planes are borrowed for `'env`, which outlives the scope. `Scope` is invariant in it.
//! 3. A view never reaches past its slice, and the core refuses targets that overlap themselves.
//!    Different targets cannot overlap, since each is a `&mut`.
//! 4. After a panic of a worker, ops are released while other workers may still copy. Then
//!    `Store::halt` joins them before the scope goes on.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::api::planes::{Layer, Plane, Source, Target};
use crate::api::session::Session;
use crate::base::fork;
use crate::base::op::{OpOpts, OpRef, RELEASED};
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::base::worker::PRIORITIES;
use crate::fail;
use crate::meta::layout::Rule;
use crate::store::state::Level;
use crate::store::state::batches::{LayerViews, Views};
use crate::store::state::session::{CellRange, Wanted};
use crate::store::state::transfer::TransferKind;

/// The result of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Tokens, from the first of the transfer on, that were loaded or stored without a gap.
    pub tokens: u64,
    /// Bytes that were copied.
    pub bytes: u64,
}

/// Begins transfers of a session; see [`Session::scope`].
pub struct Scope<'a, 'env> {
    session: &'a Session,
    ops: Mutex<Ops>,
    env: PhantomData<&'env mut &'env ()>,
}

/// Ops that a scope waits for.
#[derive(Default)]
struct Ops {
    all: Vec<OpRef>,
    /// Number of ops after the last look for ended ones.
    looked: usize,
}

impl Ops {
    /// Forgets ops that have ended, whenever the number of ops has doubled: a runtime has a limited
    /// number of ops. Those that ended by a panic stay, since their memory may still be used.
    fn forget_ended(&mut self) {
        if self.all.len() < 2 * self.looked.max(LEAST_OPS) {
            return;
        }
        self.all.retain(|op| {
            let is_ended = op.state() & RELEASED != 0
                && op.result().err().is_none_or(|error| error.status() != Status::Panic);
            if is_ended {
                op.remove();
            }
            !is_ended
        });
        self.looked = self.all.len();
    }
}

/// Ops that a scope keeps without looking for ended ones.
const LEAST_OPS: usize = 16;

impl<'a, 'env> Scope<'a, 'env> {
    pub(super) fn new(session: &'a Session) -> Scope<'a, 'env> {
        Scope { session, ops: Mutex::new(Ops::default()), env: PhantomData }
    }

    /// Begins a put; see [`Session::put`].
    pub fn put(
        &self,
        tokens: Range<u64>,
        first_layer: usize,
        planes: impl IntoIterator<Item = Layer<Source<'env>>>,
        level: Level,
    ) -> Result<Transfer<'a, Source<'env>>> {
        self.begin(TransferKind::Put, level, tokens, first_layer, planes.into_iter().collect())
    }

    /// Begins a get; see [`Session::get`].
    pub fn get(
        &self,
        tokens: Range<u64>,
        first_layer: usize,
        planes: impl IntoIterator<Item = Layer<Target<'env>>>,
    ) -> Result<Transfer<'a, Target<'env>>> {
        let planes = planes.into_iter().collect();
        self.begin(TransferKind::Get, Level::Ram, tokens, first_layer, planes)
    }

    /// Begins to bring KV of all layers into host memory, for a later get.
    pub fn prefetch(&self, tokens: Range<u64>) -> Result<Transfer<'a, Source<'env>>> {
        self.begin(TransferKind::Prefetch, Level::Ram, tokens, 0, Vec::new())
    }

    fn begin<P: Plane>(
        &self,
        kind: TransferKind,
        level: Level,
        tokens: Range<u64>,
        first_layer: usize,
        mut planes: Vec<Layer<P>>,
    ) -> Result<Transfer<'a, P>> {
        let session = self.session;
        let (views, layers) = match kind {
            TransferKind::Prefetch => (Views::default(), session.space.layout.layers()),
            _ => (self.views(first_layer, &mut planes)?, planes.len()),
        };
        if tokens.end <= tokens.start {
            fail!(Invalid, "the range of tokens {tokens:?} is empty: name at least one token");
        }
        let cells = CellRange {
            first_token: tokens.start,
            tokens: tokens.end - tokens.start,
            first_layer,
            layers,
            by_layer: false,
            wanted: if kind == TransferKind::Put { Wanted::All } else { Wanted::Needed },
            views: Arc::new(views),
            after: None,
        };
        let priority = if kind == TransferKind::Prefetch { PREFETCH } else { 0 };
        let opts = OpOpts { priority, ..OpOpts::default() };
        let shared = &session.space.shared;
        self.ops.lock().forget_ended();
        // If this panics in the library, `call` halts the store: no thread keeps the addresses.
        let ops = shared
            .call(|| shared.store.submit(session.session.number, kind, level, cells, &opts))?;
        let Some(op) = ops.into_iter().next() else { fail!(Panic, "a transfer without an op") };
        self.ops.lock().all.push(op.clone());
        Ok(Transfer { op, session, planes })
    }

    /// The views of the planes.
    fn views<P: Plane>(&self, first_layer: usize, planes: &mut [Layer<P>]) -> Result<Views> {
        let layout = &self.session.space.layout;
        if planes.is_empty() {
            fail!(Invalid, "the transfer has no layers: pass planes of at least one");
        }
        let view = |(i, layer): (usize, &mut Layer<P>)| {
            let at = first_layer.saturating_add(i);
            let Some(group) = layout.group(at) else {
                fail!(Invalid, "there is no layer {at}: the layout has {}", layout.layers());
            };
            let k_bytes = if group.rule == Rule::State { group.state_bytes } else { group.k_bytes };
            let k = layer.k.view(k_bytes).map_err(|e| e.within(&format!("K of layer {at}")))?;
            let v = layer.v.as_mut().map(|v| v.view(group.v_bytes)).transpose();
            let v = v.map_err(|e| e.within(&format!("V of layer {at}")))?;
            Ok(LayerViews { k, v })
        };
        Ok(Views::from(planes.iter_mut().enumerate().map(view).collect::<Result<Vec<_>>>()?))
    }
}

/// Lane of prefetches: the work is needed soon.
const PREFETCH: usize = 1;
const _: () = assert!(PREFETCH < PRIORITIES);

impl Drop for Scope<'_, '_> {
    fn drop(&mut self) {
        if fork::check().is_err() {
            return; // no thread of this process uses the memory
        }
        for op in self.ops.lock().all.drain(..) {
            let _ = self.session.finish(&op);
        }
    }
}

impl Session {
    /// Waits until no thread uses the memory of an op any more, and returns its result.
    fn finish(&self, op: &OpRef) -> Result<()> {
        // Without a deadline it ends only when the op is released, or when `call` has halted the store.
        let wait = || op.wait(RELEASED, 0).and_then(|()| op.result());
        let result = self.space.shared.call(wait);
        if let Err(error) = &result
            && error.status() == Status::Panic
        {
            self.space.shared.halt();
        }
        op.remove();
        result
    }
}

/// A transfer that was begun, and the planes that it uses. A transfer that is dropped goes on; its
/// scope waits for it.
#[must_use = "a transfer that nobody waits for may have failed"]
pub struct Transfer<'a, P> {
    op: OpRef,
    session: &'a Session,
    planes: Vec<Layer<P>>,
}

impl<P> Transfer<'_, P> {
    /// Waits for the end, and returns what was moved, and the planes.
    ///
    /// # Errors
    ///
    /// As [`Session::put`]. Planes come back when their scope has ended.
    pub fn wait(self) -> Result<(Moved, Vec<Layer<P>>)> {
        match self.session.finish(&self.op) {
            // The value says how much is missing.
            Err(error) if error.status() != Status::NotFound => Err(error),
            _ => {
                let Transfer { op, planes, .. } = self;
                let moved = Moved { tokens: op.value(), bytes: op.info().bytes_done };
                Ok((moved, planes))
            }
        }
    }

    /// Whether the transfer has ended; then [`Transfer::wait`] does not block.
    pub fn is_done(&self) -> bool {
        self.op.state() & RELEASED != 0
    }
}

impl<P> fmt::Debug for Transfer<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::api::store::{Shared, Store};
    use crate::api::{Dtype, Group, Identity, Layout};
    use crate::base::runtime::{Runtime, RuntimeOpts};
    use crate::device::host::Host;
    use crate::device::{Copy, Device, Event, Facts, State, Stream};
    use crate::store::handle;
    use crate::store::spec::StoreSpec;

    /// Copies as the host does. Once armed, the first batch copies late, and the second one panics.
    #[derive(Default)]
    struct Broken {
        host: Host,
        armed: AtomicBool,
        batches: AtomicU32,
        panicked: AtomicBool,
        copied: AtomicBool,
    }

    impl Device for Broken {
        fn facts(&self) -> Facts {
            self.host.facts()
        }

        unsafe fn submit(
            &self,
            stream: Stream,
            after: Option<Event>,
            copies: &mut [Copy<'_>],
        ) -> Result<Event> {
            let is_first = match self.armed.load(Ordering::SeqCst) {
                false => false,
                true if self.batches.fetch_add(1, Ordering::SeqCst) == 0 => true,
                true => {
                    self.panicked.store(true, Ordering::SeqCst);
                    panic!("a defect");
                }
            };
            while is_first && !self.panicked.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            if is_first {
                // Time for a wait that does not know of this copy to return.
                std::thread::sleep(Duration::from_millis(300));
            }
            // SAFETY: the caller's promise.
            let event = unsafe { self.host.submit(stream, after, copies) };
            self.copied.fetch_or(is_first, Ordering::SeqCst);
            event
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

    #[test]
    fn a_panic_of_a_worker_frees_no_memory_that_another_worker_uses() -> Result<()> {
        let device = Arc::new(Broken::default());
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let spec = StoreSpec::parse("store(host=16MiB, copiers=2)")?;
        let store = handle::Store::open_with(runtime.core(), None, &spec, device.clone())?;
        let store = Store { shared: Arc::new(Shared::new(runtime, store)) };
        let layout = Layout::new(16, vec![Group::gqa(0..2, 1, 4, Dtype::F32)?])?;
        let mut session = store.namespace(&Identity::default(), &layout)?.session()?;
        session.append(&[1; 16])?;
        let kv = vec![7; 16 * 16];
        session.put(0..16, 0, [Layer::kv(&kv[..], &kv[..]); 2], Level::Ram)?;
        device.armed.store(true, Ordering::SeqCst);
        let mut memory = [(); 4].map(|()| vec![0; kv.len()]);
        let [k0, v0, k1, v1] = &mut memory;
        let (late, broken) = session.scope(|scope| -> Result<_> {
            let late = scope.get(0..16, 0, [Layer::kv(&mut k0[..], &mut v0[..])])?;
            while device.batches.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let broken = scope.get(0..16, 1, [Layer::kv(&mut k1[..], &mut v1[..])])?;
            let late = late.wait().map(|_| ());
            assert!(device.copied.load(Ordering::SeqCst), "the memory was given back too soon");
            Ok((late, broken.wait().map(|_| ())))
        })?;
        assert_eq!(late.map_err(|error| error.status()), Err(Status::Panic));
        assert_eq!(broken.map_err(|error| error.status()), Err(Status::Panic));
        let after = session.reusable_tokens().map_err(|error| error.status());
        assert_eq!(after, Err(Status::Panic), "the store is closed");
        Ok(())
    }
}
