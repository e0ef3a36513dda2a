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
    Given,
    /// Cancelled: it will never be signalled.
    Cancelled,
}

/// An owner of waiting transfers.
pub trait Listener: Send + Sync {
    /// The event of a ticket's transfer was signalled or cancelled. Called without a lock.
    fn signalled(&self, ticket: u64, word: EventState);

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
    word: Option<EventState>,
    waiting: Waiting,
}

/// Notifies all waiters, without a lock.
fn signal_all(waiting: Waiting, word: EventState) {
    for (listener, ticket) in waiting {
        if let Some(listener) = listener.upgrade() {
            listener.signalled(ticket, word);
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
    pub fn word(&self) -> Option<EventState> {
        self.state.lock().word
    }

    /// Signals it: waiting transfers begin. Later calls have no effect.
    pub fn give(&self) {
        self.say(EventState::Given);
    }

    /// Cancels it: waiting transfers fail.
    pub fn take_back(&self) {
        self.say(EventState::Cancelled);
    }

    fn say(&self, word: EventState) {
        let waiting = {
            let mut state = self.state.lock();
            if state.word.is_some() {
                return;
            }
            state.word = Some(word);
            std::mem::take(&mut state.waiting)
        };
        signal_all(waiting, word);
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
        let mut kept = std::mem::take(&mut self.state.lock().waiting);
        kept.retain(|(all, ticket)| all.upgrade().is_some_and(|all| all.waits(*ticket)));
        let word = {
            let mut state = self.state.lock();
            if state.word.is_none() {
                kept.append(&mut state.waiting);
                state.waiting = std::mem::take(&mut kept);
            }
            state.word
        };
        if let Some(word) = word {
            signal_all(kept, word); // it came meanwhile
        }
    }

    /// Adds a waiting transfer. If the event is not pending, its owner is notified at once.
    pub fn join(&self, listener: Weak<dyn Listener>, ticket: u64) {
        let word = {
            let mut state = self.state.lock();
            if state.word.is_none() {
                state.waiting.push((listener.clone(), ticket));
            }
            state.word
        };
        if let (Some(word), Some(listener)) = (word, listener.upgrade()) {
            listener.signalled(ticket, word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sync::Arc;

    struct Ears(Mutex<Vec<(u64, EventState)>>);

    fn ears() -> Arc<Ears> {
        Arc::new(Ears(Mutex::new(Vec::new())))
    }

    impl Listener for Ears {
        fn signalled(&self, ticket: u64, word: EventState) {
            self.0.lock().push((ticket, word));
        }

        fn waits(&self, _: u64) -> bool {
            true
        }
    }

    fn weak(ears: &Arc<Ears>) -> Weak<dyn Listener> {
        let all: Arc<dyn Listener> = ears.clone();
        Arc::downgrade(&all)
    }

    #[test]
    fn the_first_word_counts_and_everyone_hears_it_once() {
        let ears = ears();
        let ready = Ready::default();
        ready.join(weak(&ears), 1);
        ready.join(weak(&ears), 2);
        let deaf = self::ears();
        ready.join(weak(&deaf), 3);
        drop(deaf);
        assert!(ears.0.lock().is_empty() && ready.word().is_none());
        ready.give();
        ready.give();
        ready.take_back();
        ready.join(weak(&ears), 4);
        let heard = [1, 2, 4].map(|ticket| (ticket, EventState::Given));
        assert_eq!((&ears.0.lock()[..], ready.word()), (&heard[..], Some(EventState::Given)));

        let other = Ready::default();
        other.join(weak(&ears), 5);
        other.take_back();
        other.give();
        assert_eq!(ears.0.lock().last(), Some(&(5, EventState::Cancelled)));
    }

    #[test]
    fn so_many_may_wait() {
        let (ears, ready) = (ears(), Ready::default());
        for ticket in 0..MOST_WAITING as u64 {
            ready.check_room().unwrap();
            ready.join(weak(&ears), ticket);
        }
        assert!(ready.check_room().is_err());
        ready.give();
        assert!(ready.check_room().is_ok());
        assert_eq!(ears.0.lock().len(), MOST_WAITING);
    }
}
