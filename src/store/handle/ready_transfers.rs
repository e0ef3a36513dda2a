//! Moves of a store that wait for the engine's word.

use crate::base::status::Status;
use crate::store::handle::{Inner, finish};
use crate::store::ready_event::{Listener, Word};

impl Listener for Inner {
    fn notified(&self, ticket: u64, word: Word) {
        let mut state = self.state.lock();
        if state.stop || state.broken {
            return;
        }
        state.core.tick(self.runtime.clock().now_ns());
        match word {
            Word::Given => state.core.begin_waiting(ticket),
            Word::TakenBack => state.core.give_up_waiting(ticket, Status::Cancelled),
        }
        let news = self.news(&mut state);
        drop(state);
        finish(news);
    }

    fn waits(&self, ticket: u64) -> bool {
        self.state.lock().core.is_waiting(ticket)
    }
}
