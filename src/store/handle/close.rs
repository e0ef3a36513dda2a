//! The end of a store, and what may still be asked of one that ends.

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::host::Host;
use crate::fail;
use crate::store::executor::Tools;
use crate::store::handle::{Store, finish};
use crate::store::state::{Config, StoreState};
use crate::tier::disk::DiskTier;

impl Store {
    /// Looks at the core; also while the store closes, not after.
    pub fn look<R>(&self, see: impl FnOnce(&StoreState) -> R) -> Result<R> {
        let state = self.inner.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        Ok(see(&state.core))
    }

    /// Ends what a handle stood for: also while the store or its runtime closes. Of a
    /// closed store nothing is left to end.
    pub fn let_go(&self, end: impl FnOnce(&mut StoreState) -> Result<()>) -> Result<()> {
        let mut state = self.inner.state.lock();
        if state.stop || state.broken {
            return Ok(());
        }
        state.core.tick(self.inner.runtime.clock().now_ns());
        let result = end(&mut state.core);
        let news = self.inner.news(&mut state);
        drop(state);
        finish(news);
        result
    }

    /// Waits until nothing is under way, or a deadline (0 = none).
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
                    fail!(Busy, "work of the store is under way: call again, it goes on from there")
                }
                deadline => self.inner.ended.wait_for(&mut state, deadline - now),
            }
        }
        Ok(())
    }

    /// The disk tier, to be looked at, until the store is closed.
    pub fn disk(&self) -> Option<Arc<DiskTier>> {
        self.inner.tools.lock().disk.clone()
    }

    /// Cancels what is open, waits for what is under way until a deadline (0 = none),
    /// then BUSY: the store is still there, and refuses new work.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.state.lock().closing = true;
        self.inner.cancel_all(Status::Cancelled);
        match self.settle(deadline_ns).and_then(|()| self.put_away(deadline_ns)) {
            // After a defect nothing comes to rest; hands that are at work end below.
            Err(error) if error.status() != Status::Panic => return Err(error),
            _ => {}
        }
        self.inner.stop();
        // Another close beside this one waits here, until nobody is at work.
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                log::error!("a thread of the store has panicked");
            }
        }
        let ended = self.disk().map_or(Ok(()), |disk| disk.close());
        self.give_back()?;
        ended
    }

    /// What is in memory only goes to disk, as far as it may, and a checkpoint makes the
    /// next opening fast.
    fn put_away(&self, deadline_ns: u64) -> Result<()> {
        for (step, begin) in
            [StoreState::write_all_down, StoreState::ask_for_checkpoint].iter().enumerate()
        {
            let mut state = self.inner.state.lock();
            let is_next = state.away == step;
            state.away += usize::from(is_next);
            drop(state);
            if is_next {
                self.let_go(|core| {
                    begin(core);
                    Ok(())
                })?;
            }
            self.wait_until(deadline_ns, StoreState::is_quiet)?;
        }
        Ok(())
    }

    /// Ops and handles that are kept longer keep neither memory nor the directory.
    fn give_back(&self) -> Result<()> {
        let config = Config {
            max_chunks: 1,
            max_sessions: 1,
            max_moves: 1,
            max_jobs: 1,
            events: 1,
            ..Config::default()
        };
        let empty = StoreState::new(config, None, None)?;
        let auditing = self.auditing.lock();
        let core = std::mem::replace(&mut self.inner.state.lock().core, empty);
        drop(core);
        drop(auditing);
        // The device may be closed, too, while an op is kept.
        let none = Tools { device: Arc::new(Host::default()), disk: None, remote: None };
        let tools = std::mem::replace(&mut *self.inner.tools.lock(), none);
        drop(tools);
        if let Some(account) = &self.account {
            match account.close() {
                Err(error) if error.status() != Status::Closed => {
                    log::warn!("the account of a store that was closed stays open: {error}");
                }
                _ => {}
            }
        }
        Ok(())
    }
}
