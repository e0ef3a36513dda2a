//! The thread that looks after copies behind events of the device.

use crate::base::panic;
use crate::base::status::{Result, Status};
use crate::device::{Event, State};
use crate::fail;
use crate::store::executor::Tools;
use crate::store::executor::device_batches::{Crew, Desk};
use crate::store::handle::{Inner, Store, finish};
use crate::store::state::{StoreState, TransferKind};

/// How long nobody looks while nothing happens.
const LOOK_NS: u64 = 250_000;

impl Desk for &Inner {
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState)) {
        let mut state = self.state.lock();
        state.core.tick(self.runtime.clock().now_ns());
        act(&mut state.core);
        let news = self.news(&mut state);
        drop(state);
        finish(news);
    }
}

impl Inner {
    /// The life of that thread.
    pub(super) fn serve_behind(&self, tools: Tools) {
        let mut crew = Crew::new(tools);
        while self.wait_for_events(&crew) {
            // SAFETY: the core hears of the end of what is begun from here; views are of memory
            // that the caller promised to keep until the op is released, which follows that.
            let did = panic::catch(|| unsafe { crew.turn(&mut &*self) });
            match did {
                Ok(true) => {}
                Ok(false) => self.rest_behind(&crew),
                Err(text) => {
                    self.runtime.poison(&text);
                    self.state.lock().broken = true;
                    self.give_up();
                }
            }
        }
    }

    /// Sleeps until there are events to look after; false when there never will be.
    fn wait_for_events(&self, crew: &Crew) -> bool {
        let mut state = self.state.lock();
        while !state.broken && crew.is_idle() && !state.core.has_events_ahead() {
            if state.stop {
                return false;
            }
            state.crew_sleeps = true;
            self.behind.wait(&mut state);
            state.crew_sleeps = false;
        }
        !state.broken
    }

    fn rest_behind(&self, crew: &Crew) {
        let until_ns = self.runtime.clock().now_ns().saturating_add(LOOK_NS);
        match crew.is_idle() {
            false => crew.rest(until_ns),
            true => {
                let mut state = self.state.lock();
                if !state.stop {
                    self.behind.wait_for(&mut state, LOOK_NS);
                }
            }
        }
    }
}

impl Store {
    /// What a move is behind: nothing, if its event has come already. What can be seen of a
    /// wrong one is said here.
    pub(super) fn check_after(
        &self,
        kind: TransferKind,
        after: Option<Event>,
    ) -> Result<Option<Event>> {
        let Some(event) = after else { return Ok(None) };
        if !self.has_device {
            fail!(
                Unavailable,
                "the store was opened without a device, and knows no event {:#x}: wait for it, or \
                 name a ready event",
                event.0
            );
        }
        if kind == TransferKind::Prefetch {
            fail!(Invalid, "a prefetch has no tensors: nothing of it can be behind an event");
        }
        let device = self.inner.tools.lock().device.clone();
        match device.state(event) {
            Ok(State::Done) => Ok(None),
            Err(error) if error.status() == Status::Handle => Err(error.within("after")),
            _ => Ok(Some(event)),
        }
    }
}
