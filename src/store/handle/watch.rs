//! Ops that end when something has changed: what readers of events wait for, on a queue of
//! theirs.

use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::fail;
use crate::store::handle::submit::undo;
use crate::store::handle::{Guarded, News, Store, finish, given_up};
use crate::store::state::Finished;

/// Most that wait.
const MAX_WATCHES: usize = 1024;
/// Places of theirs begin here: the numbers of moves are lower.
const FIRST: u32 = 1 << 31;

/// All that wait.
pub(super) struct Watches {
    all: Vec<Option<(u64, OpRef)>>,
    /// The lowest number of an event that one waits for.
    least: u64,
}

impl Default for Watches {
    fn default() -> Watches {
        Watches { all: Vec::new(), least: u64::MAX }
    }
}

impl Watches {
    /// One waits for the event of a number, or a later one; its place.
    fn add(&mut self, from: u64, op: OpRef) -> Result<u32> {
        let at = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        if at == MAX_WATCHES {
            fail!(Again, "{MAX_WATCHES} watches wait, as many as may: end one");
        }
        if at == self.all.len() {
            self.all.push(None);
        }
        self.all[at] = Some((from, op));
        self.least = self.least.min(from);
        Ok(FIRST + at as u32)
    }

    /// Ends those whose event there is, now that the next one will have this number.
    pub fn notify(&mut self, next: u64, news: &mut News) {
        if self.least >= next {
            return;
        }
        for one in &mut self.all {
            if let Some((from, op)) = one.take_if(|(from, _)| *from < next) {
                news.push((op, ended(next - from, None)));
            }
        }
        self.least = self.all.iter().flatten().map(|(from, _)| *from).min().unwrap_or(u64::MAX);
    }

    /// Whether an op's place is one of these.
    pub fn has(place: u32) -> bool {
        place >= FIRST
    }

    /// Ends one that was given up. Its place may be another's by now, which is asked then.
    pub fn drop_given_up(&mut self, place: u32, news: &mut News) {
        let Some(one) = self.all.get_mut((place - FIRST) as usize) else { return };
        let status = one.as_ref().and_then(|(_, op)| given_up(std::slice::from_ref(op)));
        if let (Some(status), Some((_, op))) = (status, one.take_if(|_| status.is_some())) {
            news.push((op, ended(0, Some(status))));
        }
    }

    /// Ends all.
    pub fn end_all(&mut self, status: Status, news: &mut News) {
        news.extend(self.take().map(|op| (op, ended(0, Some(status)))));
    }

    /// Forgets all.
    pub fn take(&mut self) -> impl Iterator<Item = OpRef> + use<> {
        let all = std::mem::take(self).all;
        all.into_iter().flatten().map(|(_, op)| op)
    }
}

/// How one ended, and how many events it found.
fn ended(events: u64, status: Option<Status>) -> Finished {
    Finished {
        number: 0,
        part: 0,
        error: status.map(Into::into),
        tokens: events,
        bytes: 0,
        outcomes: Vec::new(),
        last: true,
    }
}

impl Store {
    /// Begins an op that ends when there is an event with a number, or a later one; its value is
    /// how many there are. `u64::MAX` stands for the next one to come.
    pub fn watch(&self, from: u64, opts: &OpOpts) -> Result<OpRef> {
        let op = self.inner.runtime.promise(opts, self.inner.clone())?;
        // A deadline that has passed, or a close beside this, may have ended it.
        if !op.begin() {
            return Ok(op);
        }
        let mut state = self.inner.state.lock();
        let added = state.check_open().and_then(|()| {
            let Guarded { core, watches, .. } = &mut *state;
            let from = if from == u64::MAX { core.events.next_number() } else { from };
            watches.add(from, op.clone())
        });
        let place = match added {
            Ok(place) => place,
            Err(error) => {
                drop(state);
                return Err(undo(vec![op], error));
            }
        };
        // Whoever gives it up from here on, and has waited for the lock, finds it.
        op.note_place(place);
        let mut news = News::new();
        state.watches.drop_given_up(place, &mut news);
        news.extend(self.inner.news(&mut state));
        drop(state);
        op.announce();
        finish(news);
        Ok(op)
    }
}
