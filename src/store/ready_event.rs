//! Ready events: the engine signals that the memory of a transfer may be touched. An event is
//! signalled once, or cancelled.

use crate::base::status::Result;
use crate::base::sync::{Mutex, Weak};
use crate::fail;

/// Most transfers that wait for one event.
const MOST_WAITING: usize = 1 << 16;

/// State of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventState {
    /// Signalled.
    Signalled,
    /// Cancelled: it will never be signalled.
    Cancelled,
}

/// An owner of waiting transfers.
pub trait Listener: Send + Sync {
    /// The event of a ticket's transfer was signalled or cancelled. Called without a lock.
    fn signalled(&self, ticket: u64, outcome: EventState);

    /// Whether the transfer of a ticket still waits; it may have been cancelled. Called without a
    /// lock.
    fn waits(&self, ticket: u64) -> bool;
}

/// A ready event.
pub struct Ready {
    state: Mutex<State>,
}

/// Waiting transfers, with their owners.
type Waiting = Vec<(Weak<dyn Listener>, u64)>;

#[derive(Default)]
struct State {
    outcome: Option<EventState>,
    waiting: Waiting,
}

/// Notifies all waiters, without a lock.
fn signal_all(waiting: Waiting, outcome: EventState) {
    for (listener, ticket) in waiting {
        if let Some(listener) = listener.upgrade() {
            listener.signalled(ticket, outcome);
        }
    }
}

impl Default for Ready {
    fn default() -> Ready {
        Ready { state: Mutex::new(State::default()) }
    }
}

impl Ready {
    /// Its state; `None` = pending.
    pub fn state(&self) -> Option<EventState> {
        self.state.lock().outcome
    }

    /// Signals it: waiting transfers begin. Later calls have no effect.
    pub fn signal(&self) {
        self.settle(EventState::Signalled);
    }

    /// Cancels it: waiting transfers fail.
    pub fn cancel(&self) {
        self.settle(EventState::Cancelled);
    }

    fn settle(&self, outcome: EventState) {
        let waiting = {
            let mut state = self.state.lock();
            if state.outcome.is_some() {
                return;
            }
            state.outcome = Some(outcome);
            std::mem::take(&mut state.waiting)
        };
        signal_all(waiting, outcome);
    }

    /// Fails if no more transfers may wait.
    pub fn check_room(&self) -> Result<()> {
        if self.state.lock().waiting.len() >= MOST_WAITING {
            self.forget_ended();
        }
        let waiting = self.state.lock().waiting.len();
        if waiting >= MOST_WAITING {
            fail!(Again, "{waiting} transfers wait for one event, the limit");
        }
        Ok(())
    }

    /// Forgets transfers that have ended while the event was pending.
    fn forget_ended(&self) {
        let mut retained = std::mem::take(&mut self.state.lock().waiting);
        retained.retain(|(all, ticket)| all.upgrade().is_some_and(|all| all.waits(*ticket)));
        let outcome = {
            let mut state = self.state.lock();
            if state.outcome.is_none() {
                retained.append(&mut state.waiting);
                state.waiting = std::mem::take(&mut retained);
            }
            state.outcome
        };
        if let Some(outcome) = outcome {
            signal_all(retained, outcome); // it was signalled meanwhile
        }
    }

    /// Adds a waiting transfer. If the event is not pending, its owner is notified at once.
    pub fn join(&self, listener: Weak<dyn Listener>, ticket: u64) {
        let outcome = {
            let mut state = self.state.lock();
            if state.outcome.is_none() {
                state.waiting.push((listener.clone(), ticket));
            }
            state.outcome
        };
        if let (Some(outcome), Some(listener)) = (outcome, listener.upgrade()) {
            listener.signalled(ticket, outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sync::Arc;

    struct RecordingListener(Mutex<Vec<(u64, EventState)>>);

    fn recorder() -> Arc<RecordingListener> {
        Arc::new(RecordingListener(Mutex::new(Vec::new())))
    }

    impl Listener for RecordingListener {
        fn signalled(&self, ticket: u64, outcome: EventState) {
            self.0.lock().push((ticket, outcome));
        }

        fn waits(&self, _: u64) -> bool {
            true
        }
    }

    fn weak(listener: &Arc<RecordingListener>) -> Weak<dyn Listener> {
        let all: Arc<dyn Listener> = listener.clone();
        Arc::downgrade(&all)
    }

    #[test]
    fn the_first_outcome_wins_and_each_waiter_is_notified_once() {
        let listener = recorder();
        let ready = Ready::default();
        ready.join(weak(&listener), 1);
        ready.join(weak(&listener), 2);
        let dropped = self::recorder();
        ready.join(weak(&dropped), 3);
        drop(dropped);
        assert!(listener.0.lock().is_empty() && ready.state().is_none());
        ready.signal();
        ready.signal();
        ready.cancel();
        ready.join(weak(&listener), 4);
        let expected = [1, 2, 4].map(|ticket| (ticket, EventState::Signalled));
        assert_eq!(
            (&listener.0.lock()[..], ready.state()),
            (&expected[..], Some(EventState::Signalled))
        );

        let other = Ready::default();
        other.join(weak(&listener), 5);
        other.cancel();
        other.signal();
        assert_eq!(listener.0.lock().last(), Some(&(5, EventState::Cancelled)));
    }

    #[test]
    fn waiting_transfers_are_limited() {
        let (listener, ready) = (recorder(), Ready::default());
        for ticket in 0..MOST_WAITING as u64 {
            ready.check_room().unwrap();
            ready.join(weak(&listener), ticket);
        }
        assert!(ready.check_room().is_err());
        ready.signal();
        assert!(ready.check_room().is_ok());
        assert_eq!(listener.0.lock().len(), MOST_WAITING);
    }
}
