//! Clearing a namespace of a store, and waiting until that lasts.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::kv::core::clear::Cleared;
use crate::kv::store::Store;

/// Chunks that leave while the lock is held: others wait for no more.
const AT_ONCE: usize = 512;

impl Store {
    /// Takes everything of a namespace away that nobody holds, and waits until it is
    /// sure to stay away, or for a deadline (0 = none). After that it can be asked for again,
    /// with any deadline: it goes on from there, and tells of all that has left.
    pub fn clear(&self, space: u32, deadline_ns: u64) -> Result<Cleared> {
        let mut clearing = self.with(|core| core.begin_clear(space))?;
        while self.with(|core| Ok(core.clear_more(&mut clearing, AT_ONCE)))? {}
        let turn = self.with(|core| Ok(core.ask_to_last_cleared(&mut clearing)))?;
        let waited = self.wait_to_last(turn, deadline_ns);
        if !matches!(&waited, Err(error) if error.status() == Status::Timeout) {
            self.let_go(|core| {
                core.end_clear(&clearing);
                Ok(())
            })?;
        }
        waited.map(|()| clearing.cleared)
    }

    fn wait_to_last(&self, turn: u64, deadline_ns: u64) -> Result<()> {
        let mut state = self.inner.state.lock();
        loop {
            if let Some(result) = state.core.lasts(turn) {
                return result.map_err(|e| e.within("what is cleared may come back"));
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
                    fail!(Timeout, "what is cleared may come back: that is not written yet")
                }
                deadline => self.inner.ended.wait_for(&mut state, deadline - now_ns),
            }
        }
    }
}
