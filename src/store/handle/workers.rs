//! Worker threads of a store, and the thread that serves the control socket.

use crate::base::op::OpRef;
use crate::base::panic;
use crate::base::runtime::Role;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Guard, JoinHandle, cores, spawn};
use crate::device::Stream;
use crate::io::socket::Listener;
use crate::store::control::{self, Subject};
use crate::store::executor::Tools;
use crate::store::handle::watch::Feed;
use crate::store::handle::{Guarded, Inner, finish};
use crate::store::spec::StoreSpec;
use crate::store::state::StoreState;
use crate::store::state::work::{Work, WorkerKind};

/// A lookup worker checks for more work so often, this interval apart, before it sleeps. Waking it
/// would cost an engine's thread more than the rest of a lookup call, and sessions arrive in
/// bursts. No answer is delayed by this.
const IDLE_CHECKS: u32 = 20;
const POLL_NS: u64 = 50_000;
/// Least time of a sleep with a timer, since a simulated clock may stand still.
const LEAST_SLEEP_NS: u64 = 1_000_000;

/// When a worker must check for work without being woken: write workers for write-behind, copy
/// workers for overdue remote requests.
pub(super) fn due_ns(core: &StoreState, workers: WorkerKind) -> Option<u64> {
    match workers {
        WorkerKind::Write => core.due_ns(),
        WorkerKind::Copy => core.watch_ns(),
        _ => None,
    }
}

impl Inner {
    /// Main function of a worker.
    fn serve(&self, workers: WorkerKind, stream: Stream, tools: &Tools) {
        let mut idle_checks = 0;
        let mut state = self.state.lock();
        while !state.stop && !state.broken {
            let Some(mut work) = state.core.take(workers) else {
                let completions = self.collect_completions(&mut state);
                if !completions.is_empty() {
                    drop(state);
                    finish(completions);
                    state = self.state.lock();
                    continue;
                }
                if idle_checks > 0 {
                    idle_checks -= 1;
                    self.work[workers as usize].wait_for(&mut state, POLL_NS);
                    continue;
                }
                self.sleep(workers, &mut state);
                continue;
            };
            let completions = self.collect_completions(&mut state);
            drop(state);
            finish(completions);
            let began_ns = self.runtime.clock().now_ns();
            let outcome = self.carry_out(&mut work, stream, tools);
            let now_ns = self.runtime.clock().now_ns();
            state = self.state.lock();
            let Ok(outcome) = outcome else {
                state.broken = true;
                break;
            };
            idle_checks = if workers == WorkerKind::Lookup { IDLE_CHECKS } else { 0 };
            state.core.tick(now_ns);
            state.core.done(work, outcome, now_ns.saturating_sub(began_ns));
            let completions = self.collect_completions(&mut state);
            if !completions.is_empty() {
                drop(state);
                finish(completions);
                state = self.state.lock();
            }
        }
        let broken = state.broken;
        drop(state);
        if broken {
            self.abort_all();
        }
    }

    /// Sleeps until there may be work, or until the timer of one worker of the kind.
    fn sleep(&self, workers: WorkerKind, state: &mut Guard<'_, Guarded>) {
        let at = workers as usize;
        let due_ns = due_ns(&state.core, workers).filter(|_| !state.has_alarm[at]);
        state.sleeping[at] += 1;
        match due_ns {
            None => self.work[at].wait(state),
            Some(due_ns) => {
                let wait_ns = due_ns.saturating_sub(self.runtime.clock().now_ns());
                state.has_alarm[at] = true;
                self.work[at].wait_for(state, wait_ns.max(LEAST_SLEEP_NS));
                state.has_alarm[at] = false;
                state.core.tick(self.runtime.clock().now_ns());
            }
        }
        state.sleeping[at] -= 1;
    }

    /// Executes work. Err = a panic was caught, and the runtime is poisoned.
    fn carry_out(
        &self,
        work: &mut Work,
        stream: Stream,
        tools: &Tools,
    ) -> std::result::Result<Result<()>, ()> {
        let mut keeper = self;
        let caught = panic::catch(|| {
            // SAFETY: the core hears of the end of this work after it; views are of
            // memory that the caller promised to keep until the op is released, which
            // follows that.
            unsafe { tools.work(work, stream, &mut keeper) }
        });
        caught.map_err(|text| self.runtime.poison(&text))
    }

    /// After a panic: ends everything, so that no caller waits forever.
    pub(super) fn abort_all(&self) {
        let mut state = self.state.lock();
        let mut ops: Vec<OpRef> = state.ops.iter_mut().flat_map(std::mem::take).collect();
        ops.extend(state.watches.take());
        drop(state);
        for op in ops {
            op.abort(Status::Panic);
        }
        self.work.iter().for_each(|work| work.notify_all());
        self.events_pending.notify_all();
        self.feed.notify_all();
        self.ended.notify_all();
    }

    /// Serves the control socket until the store ends.
    fn answer_all(&self, listener: &Listener) {
        let Some(waker) = &self.waker else { return };
        let mut answer = |line: &str| {
            panic::catch(|| control::answer(self, line)).unwrap_or_else(|text| {
                self.runtime.poison(&text);
                self.state.lock().broken = true;
                self.abort_all();
                Err(Error::from(Status::Panic))
            })
        };
        control::serve(listener, waker, &mut answer);
    }
}

impl Subject for Inner {
    fn inspect(&self, read: &mut dyn FnMut(&StoreState)) -> Result<()> {
        let state = self.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        read(&state.core);
        Ok(())
    }

    fn change(&self, act: &mut dyn FnMut(&mut StoreState) -> Result<()>) -> Result<()> {
        self.runtime.check_open()?;
        let mut state = self.state.lock();
        state.check_open()?;
        state.core.tick(self.runtime.clock().now_ns());
        let result = act(&mut state.core);
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
        result
    }
}

/// Starts all threads of a store.
pub(super) fn start(
    inner: &Arc<Inner>,
    spec: &StoreSpec,
    listener: Option<Listener>,
) -> Result<Vec<JoinHandle<()>>> {
    // What can fail is checked before the first thread starts.
    let publisher = match &spec.remote {
        Some(remote) => remote.publisher(&spec.secrets, inner.runtime.clock())?,
        None => None,
    };
    let copiers = if spec.copiers == 0 { cores().min(4) as u32 } else { spec.copiers };
    let tools = inner.tools.lock().clone();
    let disk_workers = u32::from(tools.disk.is_some());
    let (fetchers, senders) = spec.remote.as_ref().map_or((0, 0), |r| (r.fetchers, r.senders));
    let lookup_workers = u32::from(spec.remote.is_some());
    let counts = [
        copiers,
        spec.readers * disk_workers,
        disk_workers,
        disk_workers,
        disk_workers,
        fetchers,
        senders,
        lookup_workers,
    ];
    let mut threads = Vec::new();
    for (workers, count) in WorkerKind::ALL.into_iter().zip(counts) {
        for at in 0..count {
            let (inner, tools) = (inner.clone(), tools.clone());
            let stream = Stream(at % tools.device.shared_streams().max(1));
            let name = format!("kvt-{}", format!("{workers:?}").to_lowercase());
            let number = threads.len() as u32;
            threads.push(spawn(name, move || {
                inner.runtime.thread_started(Role::Store, number);
                inner.serve(workers, stream, &tools);
            })?);
        }
    }
    if tools.device.facts().asynchronous {
        let inner = inner.clone();
        let number = threads.len() as u32;
        threads.push(spawn("kvt-behind".into(), move || {
            inner.runtime.thread_started(Role::Store, number);
            inner.serve_event_copies(tools);
        })?);
    }
    if let (Some((node, publish)), Some(remote)) = (publisher, &spec.remote) {
        let feed = Feed::new(&node, publish, remote.config.timeout_ns)?;
        let inner = inner.clone();
        let number = threads.len() as u32;
        threads.push(spawn("kvt-feed".into(), move || {
            inner.runtime.thread_started(Role::Store, number);
            if let Err(text) = panic::catch(|| inner.serve_feed(feed)) {
                inner.runtime.poison(&text);
                inner.state.lock().broken = true;
                inner.abort_all();
            }
        })?);
    }
    if let Some(listener) = listener {
        let inner = inner.clone();
        let number = threads.len() as u32;
        threads.push(spawn("kvt-control".into(), move || {
            inner.runtime.thread_started(Role::Store, number);
            inner.answer_all(&listener);
        })?);
    }
    Ok(threads)
}
