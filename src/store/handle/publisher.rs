//! The thread that tells a remote what changes. It reads events as any other reader does: it holds
//! nobody up, and what it was too slow for is missed, and said to be.

use crate::base::status::Result;
use crate::store::event_feed::{Entries, MOST, Stage};
use crate::store::events::Event;
use crate::store::handle::Inner;
use crate::tier::remote::{Publish, Trouble};

/// How long nothing is said to a remote that did not take it, at first and at most.
const PAUSE_NS: [u64; 2] = [100_000_000, 5_000_000_000];

/// What that thread has.
pub(super) struct Feed {
    notify: Publish,
    entries: Entries,
    timeout_ns: u64,
}

/// What is to be told next.
struct Turn {
    stage: Stage,
    missed: u64,
    count: usize,
}

impl Feed {
    /// As whom it tells what; a request takes no longer than that.
    pub fn new(node: &str, notify: Publish, timeout_ns: u64) -> Result<Feed> {
        let run = u64::from_le_bytes(crate::base::machine::random_bytes()?);
        Ok(Feed { notify, entries: Entries::new(node, run), timeout_ns })
    }
}

impl Inner {
    /// The life of that thread.
    pub(super) fn serve_feed(&self, mut feed: Feed) {
        let mut events = vec![Event::default(); MOST];
        let (mut from, mut missed) = (0, 0);
        let (mut stage, mut pause_ns) = (Stage::Opened, 0);
        loop {
            if pause_ns > 0 && self.rest_feed(pause_ns) {
                return;
            }
            let turn = self.next_turn(from, stage, &mut events);
            (from, missed) = (from + turn.missed, missed + turn.missed);
            let notified = self.notify(&mut feed, &turn, (from, missed), &events[..turn.count]);
            match notified {
                Ok(()) => {
                    (from, missed, pause_ns) = (from + turn.count as u64, 0, 0);
                    stage = Stage::Open;
                }
                Err(trouble) => {
                    if pause_ns == 0 {
                        let why = crate::base::status::Error::from(trouble);
                        log::warn!("events cannot be told, and are tried again: {why}");
                    }
                    pause_ns = (pause_ns * 2).clamp(PAUSE_NS[0], PAUSE_NS[1]);
                }
            }
            if turn.stage == Stage::Closed {
                return;
            }
        }
    }

    fn notify(
        &self,
        feed: &mut Feed,
        turn: &Turn,
        (from, missed): (u64, u64),
        events: &[Event],
    ) -> std::result::Result<(), Trouble> {
        let fields = feed.entries.make(turn.stage, from, missed, events);
        (feed.notify)(&fields, self.runtime.clock().now_ns().saturating_add(feed.timeout_ns))
    }

    /// Waits until there is something to tell.
    fn next_turn(&self, from: u64, stage: Stage, events: &mut [Event]) -> Turn {
        let mut state = self.state.lock();
        let is_over = |state: &super::Guarded| state.stop || state.broken;
        while stage != Stage::Opened && state.core.events.next_number() <= from && !is_over(&state)
        {
            state.published_until = from;
            self.feed.wait(&mut state);
        }
        state.published_until = u64::MAX;
        let (count, missed) = state.core.events.read(from, events);
        // What is left comes before the end.
        let rest = state.core.events.next_number() - from - missed - count as u64;
        let stage = if is_over(&state) && rest == 0 { Stage::Closed } else { stage };
        Turn { stage, missed, count }
    }

    /// Waits a while; whether the store has ended meanwhile.
    fn rest_feed(&self, pause_ns: u64) -> bool {
        let mut state = self.state.lock();
        if !state.stop && !state.broken {
            self.feed.wait_for(&mut state, pause_ns);
        }
        state.stop || state.broken
    }
}
