//! Ops that complete when an event is published, and read-only calls: lookup and audit.

use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Device, Stream};
use crate::fail;
use crate::format::keys::Key;
use crate::format::keys::chain::Chain;
use crate::format::keys::media::{self, Medium};
use crate::store::events::{Entries, Event, MOST, Stage};
use crate::store::handle::undo;
use crate::store::handle::{Completions, Guarded, Inner, Store, abandoned_status, finish};
use crate::store::state::Finished;
use crate::store::state::device_tier::Audited;
use crate::store::state::plans::LookupResult;
use crate::store::token_path::MAX_TOKENS;
use crate::tier::remote::{Publish, RemoteError};

/// Most waiting ops.
const MAX_WATCHES: usize = 1024;
/// Numbers of watches begin here, above those of transfers.
const FIRST: u32 = 1 << 31;

/// Ops that wait for events.
pub(super) struct Watches {
    all: Vec<Option<(u64, OpRef)>>,
    /// Least event number that an op waits for.
    least: u64,
}

impl Default for Watches {
    fn default() -> Watches {
        Watches { all: Vec::new(), least: u64::MAX }
    }
}

impl Watches {
    /// Makes an op wait for the event `from` or a later one. Returns its number.
    fn add(&mut self, from: u64, op: OpRef) -> Result<u32> {
        let at = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        if at == MAX_WATCHES {
            fail!(Again, "{MAX_WATCHES} watches are open, the limit: cancel one");
        }
        if at == self.all.len() {
            self.all.push(None);
        }
        self.all[at] = Some((from, op));
        self.least = self.least.min(from);
        Ok(FIRST + at as u32)
    }

    /// Completes ops whose event exists, now that the next one has number `next`.
    pub fn notify(&mut self, next: u64, completions: &mut Completions) {
        if self.least >= next {
            return;
        }
        for one in &mut self.all {
            if let Some((from, op)) = one.take_if(|(from, _)| *from < next) {
                completions.push((op, ended(next - from, None)));
            }
        }
        self.least = self.all.iter().flatten().map(|(from, _)| *from).min().unwrap_or(u64::MAX);
    }

    /// Whether an op's number is one of a watch.
    pub fn has(place: u32) -> bool {
        place >= FIRST
    }

    /// Completes a cancelled op. The number may be another op's by now; then that op is checked.
    pub fn cancel_if_abandoned(&mut self, place: u32, completions: &mut Completions) {
        let Some(one) = self.all.get_mut((place - FIRST) as usize) else { return };
        let status = one.as_ref().and_then(|(_, op)| abandoned_status(std::slice::from_ref(op)));
        if let (Some(status), Some((_, op))) = (status, one.take_if(|_| status.is_some())) {
            completions.push((op, ended(0, Some(status))));
        }
    }

    /// Completes all ops.
    pub fn end_all(&mut self, status: Status, completions: &mut Completions) {
        completions.extend(self.take().map(|op| (op, ended(0, Some(status)))));
    }

    /// Takes all ops.
    pub fn take(&mut self) -> impl Iterator<Item = OpRef> + use<> {
        let all = std::mem::take(self).all;
        all.into_iter().flatten().map(|(_, op)| op)
    }
}

/// Outcome of an op, with the number of events it found.
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
    /// Begins an op that completes when the event `from` or a later one exists; its value is the
    /// number of available events. `u64::MAX` = the next event.
    pub fn watch(&self, from: u64, opts: &OpOpts) -> Result<OpRef> {
        let op = self.inner.runtime.promise(opts, self.inner.clone())?;
        // A passed deadline, or a concurrent close, may have ended the op.
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
        // A cancel from here on finds the op once it has the lock.
        op.set_owner_slot(place);
        let mut completions = Completions::new();
        state.watches.cancel_if_abandoned(place, &mut completions);
        completions.extend(self.inner.collect_completions(&mut state));
        drop(state);
        op.notify_issued();
        finish(completions);
        Ok(op)
    }
}

// ---------- publisher
//
// The thread that publishes events to a remote. It reads events like any other reader: it delays
// no other thread, and reports events that it was too slow for as missed.

/// Least and most time between two attempts after the remote refused events.
const PAUSE_NS: [u64; 2] = [100_000_000, 5_000_000_000];

/// State of the publisher.
pub(super) struct Feed {
    publish: Publish,
    entries: Entries,
    timeout_ns: u64,
}

/// The events to publish next.
struct Publication {
    stage: Stage,
    missed: u64,
    count: usize,
}

impl Feed {
    /// A publisher for an engine of this name. A request takes at most `timeout_ns`.
    pub fn new(node: &str, publish: Publish, timeout_ns: u64) -> Result<Feed> {
        let run = u64::from_le_bytes(crate::base::machine::random_bytes()?);
        Ok(Feed { publish, entries: Entries::new(node, run), timeout_ns })
    }
}

impl Inner {
    /// Main function of the publisher's thread.
    pub(super) fn serve_feed(&self, mut feed: Feed) {
        let mut events = vec![Event::default(); MOST];
        let (mut from, mut missed) = (0, 0);
        let (mut stage, mut pause_ns) = (Stage::Opened, 0);
        loop {
            if pause_ns > 0 && self.pause_feed(pause_ns) {
                return;
            }
            let publication = self.next_publication(from, stage, &mut events);
            (from, missed) = (from + publication.missed, missed + publication.missed);
            let published =
                self.publish(&mut feed, &publication, (from, missed), &events[..publication.count]);
            match published {
                Ok(()) => {
                    (from, missed, pause_ns) = (from + publication.count as u64, 0, 0);
                    stage = Stage::Open;
                }
                Err(failure) => {
                    if pause_ns == 0 {
                        let error = crate::base::status::Error::from(failure);
                        log::warn!("events could not be published; the store retries: {error}");
                    }
                    pause_ns = (pause_ns * 2).clamp(PAUSE_NS[0], PAUSE_NS[1]);
                }
            }
            if publication.stage == Stage::Closed {
                return;
            }
        }
    }

    fn publish(
        &self,
        feed: &mut Feed,
        publication: &Publication,
        (from, missed): (u64, u64),
        events: &[Event],
    ) -> std::result::Result<(), RemoteError> {
        let fields = feed.entries.make(publication.stage, from, missed, events);
        (feed.publish)(&fields, self.runtime.clock().now_ns().saturating_add(feed.timeout_ns))
    }

    /// Waits until there are events to publish.
    fn next_publication(&self, from: u64, stage: Stage, events: &mut [Event]) -> Publication {
        let mut state = self.state.lock();
        let is_over = |state: &super::Guarded| state.stop || state.broken;
        while stage != Stage::Opened && state.core.events.next_number() <= from && !is_over(&state)
        {
            state.published_until = from;
            self.feed.wait(&mut state);
        }
        state.published_until = u64::MAX;
        let (count, missed) = state.core.events.read(from, events);
        // Remaining events are published before the end.
        let rest = state.core.events.next_number() - from - missed - count as u64;
        let stage = if is_over(&state) && rest == 0 { Stage::Closed } else { stage };
        Publication { stage, missed, count }
    }

    /// Waits for a while. Returns whether the store has ended meanwhile.
    fn pause_feed(&self, pause_ns: u64) -> bool {
        let mut state = self.state.lock();
        if !state.stop && !state.broken {
            self.feed.wait_for(&mut state, pause_ns);
        }
        state.stop || state.broken
    }
}

// ---------- lookup
//
// Lookups. Keys are hashed before the store's lock is taken.

impl Store {
    /// Its device.
    pub fn device(&self) -> Arc<dyn Device> {
        self.inner.tools.lock().device.clone()
    }

    /// Looks up a sequence in a namespace.
    pub fn lookup(&self, namespace: u32, tokens: &[u32]) -> Result<LookupResult> {
        self.lookup_media(namespace, tokens, &[])
    }

    /// The same, with media that start in it.
    pub fn lookup_media(
        &self,
        namespace: u32,
        tokens: &[u32],
        media: &[Medium],
    ) -> Result<LookupResult> {
        let keys = self.chunk_keys(namespace, tokens, media)?;
        self.lookup_keys(namespace, &keys, tokens.len() as u64)
    }

    /// Keys of the full chunks of a sequence.
    pub fn chunk_keys(&self, namespace: u32, tokens: &[u32], media: &[Medium]) -> Result<Vec<Key>> {
        if tokens.len() > MAX_TOKENS {
            fail!(Limit, "a lookup of {} tokens, the limit is {MAX_TOKENS}", tokens.len());
        }
        media::check(media, 0..tokens.len() as u64)?;
        let entry = self.inspect(|core| {
            let key = core.namespace(namespace).map(|namespace| namespace.key);
            Some((key?, core.table_of(namespace)?.layout.chunk_tokens()))
        })?;
        let Some((key, each)) = entry else { fail!(NotFound, "there is no namespace {namespace}") };
        let mut keys = Vec::new();
        Chain::new(key, each)?.extend(tokens, &media::extras(media, each)?, &mut keys)?;
        Ok(keys)
    }

    /// Looks up the keys of the full chunks of a sequence with so many tokens.
    pub fn lookup_keys(&self, namespace: u32, keys: &[Key], tokens: u64) -> Result<LookupResult> {
        self.with(|core| core.lookup_keys(namespace, keys, tokens).cloned())
    }
}

// ---------- audit
//
// Audits of device replicas.

/// Cells under audit at once, since they cannot be evicted meanwhile.
const AUDIT_BATCH: usize = 64;

impl Store {
    /// Reads all cells in device memory back and compares them with other tiers. Wrong replicas are
    /// forgotten.
    pub fn audit_device(&self) -> Result<Audited> {
        let list = self.with(|core| Ok(core.audit_list()))?;
        let mut audited = Audited::default();
        for some in list.chunks(AUDIT_BATCH) {
            self.audit_some(some, &mut audited)?;
        }
        Ok(audited)
    }

    fn audit_some(&self, list: &[u64], audited: &mut Audited) -> Result<()> {
        // Locked before the state: after a panic a close waits for nothing in flight but this.
        let _auditing = self.auditing.lock();
        let all = self.with(|core| Ok(core.begin_audit(list)))?;
        let tools = self.inner.tools.lock().clone();
        for one in all {
            // SAFETY: the audit is ended below.
            let found = unsafe { tools.audit(&one, Stream(0)) };
            let mut state = self.inner.state.lock();
            state.core.end_audit(one, found, audited);
            let completions = self.inner.collect_completions(&mut state);
            drop(state);
            super::finish(completions);
        }
        Ok(())
    }
}
