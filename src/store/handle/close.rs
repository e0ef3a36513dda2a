//! Closing a store, clearing a namespace, and reclaiming memory for other owners of the budget.
//! Each call remembers its progress, so that it may be repeated with any deadline.

use crate::base::budget::{Reclaim, Tier};
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Mutex, Weak};
use crate::device::host::Host;
use crate::fail;
use crate::store::executor::Tools;
use crate::store::handle::{Inner, Store, finish};
use crate::store::state::disk_gc::{Cleared, Clearing};
use crate::store::state::{Config, StoreState};
use crate::tier::disk::DiskTier;

impl Store {
    /// Reads the state; also while the store closes, not after.
    pub fn inspect<R>(&self, read: impl FnOnce(&StoreState) -> R) -> Result<R> {
        let state = self.inner.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        Ok(read(&state.core))
    }

    /// Ends what a handle stood for; also while the store or its runtime closes. Does nothing for a
    /// closed store.
    pub fn release_with(&self, end: impl FnOnce(&mut StoreState) -> Result<()>) -> Result<()> {
        let mut state = self.inner.state.lock();
        if state.stop || state.broken {
            return Ok(());
        }
        state.core.tick(self.inner.runtime.clock().now_ns());
        let result = end(&mut state.core);
        let completions = self.inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        result
    }

    /// Waits until nothing is in flight, or for a deadline (0 = none).
    pub fn settle(&self, deadline_ns: u64) -> Result<()> {
        self.wait_until(deadline_ns, StoreState::is_idle)
    }

    fn wait_until(&self, deadline_ns: u64, holds: impl Fn(&StoreState) -> bool) -> Result<()> {
        let mut state = self.inner.state.lock();
        while !holds(&state.core) {
            if state.broken {
                return Err(Status::Panic.into());
            }
            let now = self.inner.runtime.clock().now_ns();
            match deadline_ns {
                0 => self.inner.ended.wait(&mut state),
                deadline if now >= deadline => {
                    fail!(
                        Busy,
                        "transfers of the store are in flight: call again, it continues from there"
                    )
                }
                deadline => self.inner.ended.wait_for(&mut state, deadline - now),
            }
        }
        Ok(())
    }

    /// The disk tier, until the store is closed.
    pub fn disk(&self) -> Option<Arc<DiskTier>> {
        self.inner.tools.lock().disk.clone()
    }

    /// Cancels open transfers, waits until nothing is in flight or for a deadline (0 = none). Then
    /// BUSY: the store still exists and refuses new work.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.state.lock().closing = true;
        self.inner.cancel_all(Status::Cancelled);
        match self.settle(deadline_ns).and_then(|()| self.write_back_and_checkpoint(deadline_ns)) {
            // After a panic nothing becomes idle; the workers end below.
            Err(error) if error.status() != Status::Panic => return Err(error),
            _ => {}
        }
        self.inner.stop();
        // A concurrent close waits here until the threads have ended.
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                log::error!("a worker thread of the store panicked");
            }
        }
        let ended = self.disk().map_or(Ok(()), |disk| disk.close());
        self.release_resources()?;
        ended
    }

    /// Writes what is in memory only, where allowed, and a checkpoint, which makes the next opening
    /// fast.
    fn write_back_and_checkpoint(&self, deadline_ns: u64) -> Result<()> {
        for (step, begin) in
            [StoreState::write_back_all, StoreState::request_checkpoint].iter().enumerate()
        {
            let mut state = self.inner.state.lock();
            let is_next = state.close_step == step;
            state.close_step += usize::from(is_next);
            drop(state);
            if is_next {
                self.release_with(|core| {
                    begin(core);
                    Ok(())
                })?;
            }
            self.wait_until(deadline_ns, StoreState::is_quiet)?;
        }
        Ok(())
    }

    /// Frees memory and directory, although ops and handles may be kept for longer.
    fn release_resources(&self) -> Result<()> {
        let config = Config {
            max_chunks: 1,
            max_sessions: 1,
            max_transfers: 1,
            max_jobs: 1,
            events: 1,
            ..Config::default()
        };
        let empty = StoreState::new(config, None, None)?;
        let auditing = self.auditing.lock();
        let core = std::mem::replace(&mut self.inner.state.lock().core, empty);
        drop(core);
        drop(auditing);
        // The device may be closed while an op is kept.
        let none = Tools { device: Arc::new(Host::default()), disk: None, remote: None };
        let tools = std::mem::replace(&mut *self.inner.tools.lock(), none);
        drop(tools);
        if let Some(account) = &self.account {
            match account.close() {
                Err(error) if error.status() != Status::Closed => {
                    log::warn!("the account of a closed store stays open: {error}");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

// ---------- clear
//
// Clears a namespace, and waits until that is durable.

/// Chunks removed under one lock; other callers wait no longer than for these.
const AT_ONCE: usize = 512;
/// Interval of checks, since the end of a batch of writes wakes no thread.
const POLL_NS: u64 = 1_000_000;
/// Checks without progress after which chunks that stayed are taken as referenced by the engine.
const MOST_IN_VAIN: u32 = 3;

impl Store {
    /// Removes everything of a namespace that is not referenced, and waits until that survives a
    /// restart, or for a deadline (0 = none). May be called again with any deadline: it continues
    /// from there, and reports everything removed.
    pub fn clear(&self, namespace: u32, deadline_ns: u64) -> Result<Cleared> {
        let mut clearing = self.with(|core| core.begin_clear(namespace))?;
        let cleared = self.clear_all(&mut clearing, deadline_ns);
        let removal = self.with(|core| Ok(core.request_durable_clear(&mut clearing)))?;
        let waited = cleared.and_then(|()| self.wait_to_last(removal, deadline_ns));
        if !matches!(&waited, Err(error) if error.status() == Status::Timeout) {
            self.release_with(|core| {
                core.end_clear(&clearing);
                Ok(())
            })?;
        }
        waited.map(|()| clearing.cleared)
    }

    /// Removes what may leave. Chunks in a write are removed when that has ended; chunks in a
    /// transfer stay.
    fn clear_all(&self, clearing: &mut Clearing, deadline_ns: u64) -> Result<()> {
        let (mut before, mut in_vain) = (u64::MAX, 0);
        loop {
            while self.with(|core| Ok(core.clear_more(clearing, AT_ONCE)))? {}
            let written = self.with(|core| Ok(core.writes_so_far()))?;
            let moving = clearing.cleared.moving;
            in_vain = if moving < before { 0 } else { in_vain + 1 };
            if moving == 0 || in_vain >= MOST_IN_VAIN {
                return Ok(());
            }
            before = moving;
            if written.is_none() {
                // The last blocking write has ended, or there was none.
                clearing.again();
                continue;
            }
            let mut state = self.inner.state.lock();
            while state.core.writes_so_far() == written && !state.stop && !state.broken {
                let now_ns = self.inner.runtime.clock().now_ns();
                if deadline_ns != 0 && now_ns >= deadline_ns {
                    fail!(Timeout, "chunks to be removed are being written: call again");
                }
                self.inner.ended.wait_for(&mut state, POLL_NS);
            }
            drop(state);
            clearing.again();
        }
    }

    fn wait_to_last(&self, removal: u64, deadline_ns: u64) -> Result<()> {
        let mut state = self.inner.state.lock();
        loop {
            if let Some(result) = state.core.durability(removal) {
                return result.map_err(|e| e.within("cleared chunks may reappear after a restart"));
            }
            if state.broken {
                return Err(Status::Panic.into());
            }
            if state.stop {
                return Err(Status::Closed.into());
            }
            let now_ns = self.inner.runtime.clock().now_ns();
            match deadline_ns {
                0 => self.inner.ended.wait(&mut state),
                deadline if now_ns >= deadline => {
                    fail!(Timeout, "the removal is not durable yet: call again")
                }
                deadline => self.inner.ended.wait_for(&mut state, deadline - now_ns),
            }
        }
    }
}

// ---------- reclaimer
//
// Gives memory back when another owner of the budget needs it.

/// Returns memory when other owners of the budget need it.
pub(super) fn reclaimer(slot: &Arc<Mutex<Weak<Inner>>>) -> Reclaim {
    let slot = slot.clone();
    Box::new(move |tier, bytes, _deadline| {
        let inner = slot.lock().upgrade();
        let has = matches!(tier, Tier::Host | Tier::Device);
        let Some(inner) = inner.filter(|_| has) else { return 0 };
        if tier == Tier::Device {
            let mut state = inner.state.lock();
            let promised = state.core.shrink_device(bytes);
            let completions = inner.collect_completions(&mut state);
            drop(state);
            finish(completions);
            return promised;
        }
        // Unused buffers are returned first.
        let trimmed = inner.tools.lock().disk.as_ref().map_or(0, |disk| disk.trim());
        if trimmed >= bytes {
            return trimmed;
        }
        let mut state = inner.state.lock();
        let promised = trimmed + state.core.shrink(bytes - trimmed);
        let completions = inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        promised
    })
}
