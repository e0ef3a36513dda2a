//! Clearing a namespace of a store, and waiting until that lasts.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::store::handle::Store;
use crate::store::state::clear::{Cleared, Clearing};

/// Chunks that leave while the lock is held: others wait for no more.
const AT_ONCE: usize = 512;
/// Nobody is told when a batch of writes ends: it is looked so often.
const LOOK_NS: u64 = 1_000_000;
/// So often it was looked, or a batch of writes has ended, and none of those that stayed can
/// leave: the engine has them.
const MOST_IN_VAIN: u32 = 3;

impl Store {
    /// Takes everything of a namespace away that nobody holds, and waits until it is
    /// sure to stay away, or for a deadline (0 = none). After that it can be asked for again,
    /// with any deadline: it goes on from there, and tells of all that has left.
    pub fn clear(&self, space: u32, deadline_ns: u64) -> Result<Cleared> {
        let mut clearing = self.with(|core| core.begin_clear(space))?;
        let came = self.clear_all(&mut clearing, deadline_ns);
        let turn = self.with(|core| Ok(core.ask_to_last_cleared(&mut clearing)))?;
        let waited = came.and_then(|()| self.wait_to_last(turn, deadline_ns));
        if !matches!(&waited, Err(error) if error.status() == Status::Timeout) {
            self.let_go(|core| {
                core.end_clear(&clearing);
                Ok(())
            })?;
        }
        waited.map(|()| clearing.cleared)
    }

    /// Clears what may leave. Chunks that the store is writing leave when that has ended; those
    /// that the engine moves stay.
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
                // The last one has ended since it was in the way, or none was.
                clearing.again();
                continue;
            }
            let mut state = self.inner.state.lock();
            while state.core.writes_so_far() == written && !state.stop && !state.broken {
                let now_ns = self.inner.runtime.clock().now_ns();
                if deadline_ns != 0 && now_ns >= deadline_ns {
                    fail!(Timeout, "chunks that are to go are being written: ask again");
                }
                self.inner.ended.wait_for(&mut state, LOOK_NS);
            }
            drop(state);
            clearing.again();
        }
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
