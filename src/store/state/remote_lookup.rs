//! Remote lookups: which chunks the remote has. A session asks from its front, some chunks at a
//! time, until one is missing; all blocks of a request are asked for. Answers become hints.

use std::collections::{BTreeMap, VecDeque};

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;
use crate::store::state::remote::Named;
use crate::store::state::remote::{Ticket, What};
use crate::store::state::session::Views;
use crate::store::state::transfer::{Level, Transfer, TransferKind, TransferSpec};
use crate::store::state::{At, StoreState};
use crate::tier::remote::breaker::{Direction, Permit};
use crate::tier::remote::{Name, RemoteError};

/// Chunks of one request.
pub(super) const WINDOW: usize = 64;
/// Most cells that are recorded at once from remembered answers, since that holds the lock, maybe
/// on an engine's thread.
const NOTED_CELLS: usize = 8192;

/// For whom a lookup is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Asker {
    /// A session, for its path.
    Session(u32),
    /// A transfer, for the blocks that it names.
    Blocks(u32),
}

/// Lookup of one asker.
#[derive(Default)]
pub(super) struct PendingLookup {
    /// Identifies the session or transfer, since numbers are reused.
    pub serial: u64,
    /// Next chunk to look up.
    pub next: usize,
    /// It is queued, or a request is in flight.
    pub is_busy: bool,
    /// Transfers that wait for the lookup of their session.
    pub waiting: Vec<u32>,
    /// Blocks of a transfer.
    pub named: Named,
}

/// All lookups.
#[derive(Default)]
pub(super) struct Asking {
    pub line: VecDeque<Asker>,
    /// A caller waits for the end of what is queued.
    pub is_urgent: bool,
    pub inquiries: BTreeMap<Asker, PendingLookup>,
    /// Counts transfers with lookups.
    pub serial: u64,
}

impl Asking {
    /// Whether a lookup is queued.
    pub fn waits(&self) -> bool {
        !self.line.is_empty()
    }

    /// Whether a transfer waits for its lookup.
    pub fn has_blocks(&self) -> bool {
        self.inquiries.keys().any(|asker| matches!(asker, Asker::Blocks(_)))
    }
}

/// A name in a request.
pub struct Asked {
    pub(super) chunk: usize,
    /// Key of its chunk, since the path of the session may change meanwhile.
    pub(super) key: Key,
    /// Name of the object that an upload writes last.
    pub name: Name,
    /// Whether the remote has it.
    pub result: std::result::Result<bool, RemoteError>,
}

/// A batch of lookups.
pub struct LookupBatch {
    asker: Asker,
    serial: u64,
    /// The names.
    pub asked: Vec<Asked>,
    /// Timeout of the batch.
    pub timeout_ns: u64,
    /// When it began.
    since_ns: u64,
    /// It probes an open circuit.
    probes: bool,
    ticket: Ticket,
}

impl LookupBatch {
    fn none(asker: Asker) -> LookupBatch {
        let (asked, timeout_ns, since_ns) = (Vec::new(), 0, 0);
        LookupBatch { asker, serial: 0, asked, timeout_ns, since_ns, probes: false, ticket: (0, 0) }
    }
}

/// The next chunks of a lookup, as far as they are known without a request.
#[derive(Default)]
pub(super) struct Window {
    /// Names to look up.
    pub asked: Vec<Asked>,
    /// Chunks that are present by a remembered answer.
    pub there: Vec<usize>,
    /// First chunk behind the window.
    pub end: usize,
    /// More chunks than fit are known or must be looked up.
    pub is_cut: bool,
}

/// Chunks of so many layers that are recorded at once.
pub(super) fn noted_chunks(layers: usize) -> usize {
    (NOTED_CELLS / layers.max(1)).max(1)
}

impl StoreState {
    /// Records remembered answers for a session's chunks, and queues a lookup for the rest.
    fn inquire(&mut self, at: u32, asks: bool) {
        let Ok(session) = self.session(at) else { return };
        let (serial, next) = (session.context.session.unwrap_or(0), session.asked);
        if next >= session.path.keys().len() {
            return;
        }
        let Some(remote) = &mut self.remote else { return };
        let inquiry = remote.asking.inquiries.entry(Asker::Session(at)).or_default();
        if inquiry.serial != serial {
            *inquiry = PendingLookup { serial, next, ..PendingLookup::default() };
        }
        if std::mem::replace(&mut inquiry.is_busy, true) {
            return;
        }
        inquiry.next = next;
        match (self.recall(at), &mut self.remote) {
            (true, Some(remote)) if asks => remote.asking.line.push_back(Asker::Session(at)),
            _ => self.end_lookup(Asker::Session(at)),
        }
    }

    /// Records remembered answers for a session's next chunks, so that a get finds them. Returns
    /// whether more must be looked up.
    fn recall(&mut self, at: u32) -> bool {
        let window = self.window(at, 1).unwrap_or_default();
        self.note_in_remote(at, &window.there);
        let Some(remote) = &mut self.remote else { return false };
        remote.counters.cached_names += window.there.len() as u64;
        let first = window.asked.first().map(|one| one.chunk);
        if let Some(inquiry) = remote.asking.inquiries.get_mut(&Asker::Session(at)) {
            inquiry.next = first.unwrap_or(window.end);
        }
        first.is_some() || window.is_cut
    }

    /// Tokens were appended to a session: looks up what it may continue from. Few tokens at a time
    /// are decoded here and cannot be elsewhere.
    pub(super) fn inquire_after(&mut self, at: u32, tokens: usize) {
        let asks = self.remote.as_ref().is_some_and(|remote| remote.config.asks);
        let Ok(session) = self.session(at) else { return };
        let table = self.namespaces[session.namespace as usize].table;
        let each = self.tables[table as usize].layout.chunk_tokens() as usize;
        if tokens >= each {
            self.inquire(at, asks);
        }
    }

    /// Begins a transfer that completes when it is known how many tokens a session can continue
    /// from, here or at the remote. They are its result.
    pub fn locate(&mut self, at: u32) -> Result<u32> {
        // What was absent before may be present now.
        self.session_mut(at)?.asked = 0;
        let number = self.begin_locating(at, Vec::new())?;
        self.inquire(at, true);
        let asker = Asker::Session(at);
        let asking = self.remote.as_mut().map(|remote| &mut remote.asking);
        let busy = asking.and_then(|asking| {
            let inquiry = asking.inquiries.get_mut(&asker).filter(|inquiry| inquiry.is_busy)?;
            asking.is_urgent = true;
            Some(inquiry)
        });
        match busy {
            Some(inquiry) => inquiry.waiting.push(number),
            None => self.located(at, number),
        }
        self.settle();
        Ok(number)
    }

    /// Begins a transfer without cells, with an outcome for each of `slots`, or none for a path.
    pub(super) fn begin_locating(&mut self, at: u32, slots: Vec<Slot>) -> Result<u32> {
        let session = self.session(at)?;
        let spec = TransferSpec {
            table: self.namespaces[session.namespace as usize].table,
            flow: at,
            context: session.context,
            lane: 0,
            kind: TransferKind::Prefetch,
            level: Level::Ram,
            by_chunk: !slots.is_empty(),
            slots,
            asked: Vec::new(),
            first_layer: 0,
            layers: 1,
            by_layer: false,
            needed_from: Vec::new(),
            views: Arc::new(Views(Vec::new())),
            after: None,
            ticket: None,
        };
        self.transfers.has_room_for_move()?;
        let number = self.transfers.table.add(Transfer::new(spec, self.now_ns)?)?;
        self.transfers.table[number].locates = Some(0);
        Ok(number)
    }

    /// Completes a transfer that waited for a session's lookup.
    fn located(&mut self, at: u32, number: u32) {
        let found = self.find_path(at).map(|(_, _, reach)| reach.tokens);
        let one = &mut self.transfers.table[number];
        match found {
            Ok(tokens) => one.locates = Some(tokens),
            Err(error) => one.note_failure(0, &error),
        }
        self.end_move(number);
    }

    /// Cancels a transfer that waits for a lookup. Returns whether it was one.
    pub(super) fn stop_locating(&mut self, number: u32, status: Status) -> bool {
        let one = &self.transfers.table[number];
        if one.locates.is_none() {
            return false;
        }
        let at = one.spec.flow;
        if one.spec.by_chunk {
            self.located_blocks(number, status);
            return true;
        }
        if let Some(remote) = &mut self.remote
            && let Some(inquiry) = remote.asking.inquiries.get_mut(&Asker::Session(at))
        {
            inquiry.waiting.retain(|&waiting| waiting != number);
        }
        self.transfers.table[number].note_failure(0, &status.into());
        self.end_move(number);
        true
    }

    /// A session was truncated to so many chunks.
    pub(super) fn shorten_lookup(&mut self, at: u32, chunks: usize) {
        let asker = Asker::Session(at);
        let inquiry =
            self.remote.as_mut().and_then(|remote| remote.asking.inquiries.get_mut(&asker));
        if let Some(inquiry) = inquiry {
            inquiry.next = inquiry.next.min(chunks);
        }
    }

    /// A session was closed: forgets its lookup.
    pub(super) fn forget_lookup(&mut self, at: u32) {
        self.cancel_prefetch(Some(at));
        let Some(remote) = &mut self.remote else { return };
        let asker = Asker::Session(at);
        remote.asking.line.retain(|&other| other != asker);
        let inquiry = remote.asking.inquiries.remove(&asker);
        for number in inquiry.map(|inquiry| inquiry.waiting).unwrap_or_default() {
            self.transfers.table[number].note_failure(0, &Status::Cancelled.into());
            self.end_move(number);
        }
    }

    /// Whether a caller waits for a lookup that is queued.
    pub fn awaits_answer(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.asking.is_urgent)
    }

    /// Takes the next batch of names. An empty batch = an asker has more to do without a request,
    /// and is queued again.
    pub(super) fn take_lookups(&mut self) -> Option<LookupBatch> {
        self.remote.as_mut()?.asking.is_urgent = false;
        while let Some(asker) = self.remote.as_mut()?.asking.line.pop_front() {
            let window = match asker {
                Asker::Session(at) => self.window(at, WINDOW),
                Asker::Blocks(number) => self.window_of_blocks(number),
            };
            let window = window.unwrap_or_default();
            match asker {
                Asker::Session(at) => self.note_in_remote(at, &window.there),
                Asker::Blocks(number) => self.note_blocks(number, &window.there),
            }
            let remote = self.remote.as_mut()?;
            remote.counters.cached_names += window.there.len() as u64;
            let Some(inquiry) = remote.asking.inquiries.get_mut(&asker) else { continue };
            if window.asked.is_empty() {
                inquiry.next = window.end;
                if window.is_cut {
                    let serial = inquiry.serial;
                    return Some(LookupBatch { serial, ..LookupBatch::none(asker) });
                }
                self.end_lookup(asker);
                continue;
            }
            let leave = remote.breaker.admit(Direction::Read, self.now_ns);
            if leave == Permit::Deny {
                self.end_lookup(asker);
                continue;
            }
            let probes = leave == Permit::Probe;
            let (serial, timeout_ns) = (inquiry.serial, remote.config.timeout_ns);
            remote.counters.looked_up_names += window.asked.len() as u64;
            let (asked, since_ns) = (window.asked, self.now_ns);
            let what = What::Ask(asker, serial);
            let ticket = remote.watch.begin(self.now_ns, timeout_ns, what, probes);
            return Some(LookupBatch {
                asker,
                serial,
                asked,
                timeout_ns,
                since_ns,
                probes,
                ticket,
            });
        }
        None
    }

    /// The next chunks of a session to look up, at most so many.
    fn window(&mut self, at: u32, most: usize) -> Option<Window> {
        let first = self.remote.as_ref()?.asking.inquiries.get(&Asker::Session(at))?.next;
        self.refresh(at, first..usize::MAX).ok()?;
        let namespace = self.session(at).ok()?.namespace;
        let (table, holes) =
            (self.namespaces[namespace as usize].table, self.namespaces[namespace as usize].holes);
        let shape = self.remote_shape(table)?;
        let names = self.remote_names(namespace)?;
        let (remote, session) = (self.remote.as_ref()?, self.session(at).ok()?);
        let mut window = Window { end: first, ..Window::default() };
        let cut = shape.cut(shape.objects() - 1);
        let most_there = noted_chunks(self.tables[table as usize].layout.layers());
        for (chunk, key) in session.path.keys().iter().enumerate().skip(first) {
            if window.asked.len() >= most || window.there.len() >= most_there {
                window.is_cut = true;
                return Some(window);
            }
            let slot = session.path.slots().get(chunk).copied().unwrap_or(NONE);
            window.end = chunk + 1;
            if self.is_found(table, slot) {
                continue;
            }
            let name = names.name(key, &cut);
            let config = &remote.config;
            match remote.known.get(&name, self.now_ns, config.fresh_ns, config.absent_ns) {
                Some(true) if remote.is_well() => window.there.push(chunk),
                Some(false) if holes => {}
                Some(false) => {
                    // Nothing can be continued behind a gap.
                    window.end = chunk;
                    break;
                }
                // With an open circuit remembered names are looked up again: an answer closes it.
                _ => window.asked.push(Asked {
                    chunk,
                    key: *key,
                    name,
                    result: Err(RemoteError::Busy),
                }),
            }
        }
        Some(window)
    }

    pub(super) fn done_lookups(&mut self, batch: &LookupBatch) {
        let now_ns = self.now_ns;
        let Some(remote) = &mut self.remote else { return };
        if batch.asked.is_empty() {
            // Not all known chunks fitted into the window, so the asker is queued again.
            if remote
                .asking
                .inquiries
                .get(&batch.asker)
                .is_some_and(|one| one.serial == batch.serial)
            {
                remote.asking.line.push_back(batch.asker);
            }
            return;
        }
        let in_time = remote.watch.end(batch.ticket);
        let mut failed = false;
        for one in &batch.asked {
            match one.result {
                // Another request may have found it present since this one began.
                Ok(false) if remote.known.was_there_since(&one.name, batch.since_ns) => {}
                Ok(is_there) => {
                    remote.known.put(&one.name, is_there, now_ns);
                    remote.counters.found_names += u64::from(is_there);
                }
                Err(_) => failed = true,
            }
        }
        // All names were one request, so one outcome counts for the breaker.
        let worst = batch.asked.iter().find(|one| one.result.is_err()).or(batch.asked.first());
        if let Some(one) = worst.filter(|_| in_time) {
            remote.heard(Direction::Read, &one.result, batch.probes, now_ns);
        }
        self.follow_breaker();
        let inquiry =
            self.remote.as_ref().and_then(|remote| remote.asking.inquiries.get(&batch.asker));
        if inquiry.is_none_or(|one| one.serial != batch.serial) {
            return;
        }
        let goes_on = match batch.asker {
            Asker::Session(at) => self.note_path_answer(at, &batch.asked),
            Asker::Blocks(number) => self.note_block_answers(number, &batch.asked),
        };
        match (goes_on && !failed, &mut self.remote) {
            (true, Some(remote)) => remote.asking.line.push_back(batch.asker),
            _ => self.end_lookup(batch.asker),
        }
    }

    /// Records the answers for chunks of a session. Returns whether more must be looked up.
    fn note_path_answer(&mut self, at: u32, asked: &[Asked]) -> bool {
        let Ok(session) = self.session(at) else { return false };
        let (keys, holes) =
            (session.path.keys(), self.namespaces[session.namespace as usize].holes);
        let length = keys.len();
        // The first chunk without an answer, because the session was truncated or the remote did
        // not reply; where holes are not allowed, also the first absent chunk.
        let is_same = |one: &Asked| keys.get(one.chunk) == Some(&one.key);
        let is_heard = |one: &Asked| is_same(one) && one.result.is_ok_and(|there| there || holes);
        let heard = asked.iter().position(|one| !is_heard(one)).unwrap_or(asked.len());
        let there = |one: &&Asked| is_same(one) && one.result == Ok(true);
        let there: Vec<usize> = match holes {
            true => asked.iter().filter(there).map(|one| one.chunk).collect(),
            false => asked[..heard].iter().map(|one| one.chunk).collect(),
        };
        let next = match (asked.get(heard), asked.last()) {
            (Some(one), _) => one.chunk,
            (None, last) => last.map_or(0, |one| one.chunk + 1),
        }
        .min(length);
        let remote = self.remote.as_mut();
        if let Some(one) =
            remote.and_then(|remote| remote.asking.inquiries.get_mut(&Asker::Session(at)))
        {
            one.next = next;
        }
        self.note_in_remote(at, &there);
        heard == asked.len() && next < length
    }

    /// Ends a lookup: transfers that wait for it complete.
    pub(super) fn end_lookup(&mut self, asker: Asker) {
        let at = match asker {
            Asker::Session(at) => at,
            Asker::Blocks(number) => return self.located_blocks(number, Status::NotFound),
        };
        let Some(remote) = &mut self.remote else { return };
        let Some(inquiry) = remote.asking.inquiries.get_mut(&asker) else { return };
        inquiry.is_busy = false;
        let (next, waiting) = (inquiry.next, std::mem::take(&mut inquiry.waiting));
        if let Some(session) = self.sessions.get_mut(at) {
            session.asked = next.min(session.path.keys().len());
            if remote.config.fetches {
                remote.remote_prefetch.add(at);
            }
        }
        waiting.into_iter().for_each(|number| self.located(at, number));
    }

    /// Adds rows for chunks of a session that the remote has, if that evicts nothing.
    fn note_in_remote(&mut self, at: u32, chunks: &[usize]) {
        let Some(&last) = chunks.last() else { return };
        let Ok(session) = self.session(at) else { return };
        let table = self.namespaces[session.namespace as usize].table;
        let Ok(missing) = self.missing_before(at, last + 1) else { return };
        if !self.rows_for_hints(missing) || self.make_chunks(at, last + 1).is_err() {
            return;
        }
        for &chunk in chunks {
            let slot = self.sessions[at].path.slots()[chunk];
            self.hint_remote(At { table, slot });
        }
    }

    /// Marks all cells of a chunk as present at the remote.
    pub(super) fn hint_remote(&mut self, at: At) {
        let before = self.remote_cells(at);
        let rows = &mut self.tables[at.table as usize];
        for layer in 0..rows.layout.layers() {
            let hinted = rows.chunks.hint(Cell { chunk: at.slot, layer });
            debug_assert!(hinted.is_ok(), "{hinted:?}");
        }
        self.note_remote_index(at, before);
    }
}
