//! Remote lookups: which chunks the remote has. A session looks up chunks from its front, some chunks at a
//! time, until one is missing; all blocks of a request are looked up. Answers become hints.

use std::collections::{BTreeMap, VecDeque};

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;
use crate::store::state::batches::Views;
use crate::store::state::remote::Named;
use crate::store::state::remote::{RequestKind, Ticket};
use crate::store::state::transfer::{Level, Transfer, TransferKind, TransferSpec};
use crate::store::state::{At, StoreState};
use crate::tier::remote::breaker::{Direction, Permit};
use crate::tier::remote::{Name, RemoteError};

/// Names of the first request of a lookup. The next ones have `GROWTH` times as many as were looked
/// up before: a long lookup takes few round trips, and a short one looks up few names in vain.
const LEAST_NAMES: usize = 64;
const GROWTH: usize = 3;
/// Most cells that are recorded at once from remembered answers, since that holds the lock, maybe
/// on an engine's thread.
const NOTED_CELLS: usize = 8192;

/// The requester of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Requester {
    /// A session, for its path.
    Session(u32),
    /// A transfer, for the blocks that it names.
    Blocks(u32),
}

/// Pending lookup of one requester.
#[derive(Default)]
pub(super) struct PendingLookup {
    /// Identifies the session or transfer, since numbers are reused.
    pub serial: u64,
    /// Next chunk to look up.
    pub next: usize,
    /// Names that were looked up since it was queued.
    pub names: usize,
    /// It is queued, or a request is in flight.
    pub is_busy: bool,
    /// Transfers that wait for the lookup of their session.
    pub waiting: Vec<u32>,
    /// Blocks of a transfer.
    pub named: Named,
}

/// All lookups.
#[derive(Default)]
pub(super) struct Lookups {
    pub queue: VecDeque<Requester>,
    /// A caller waits for the end of the queued lookups.
    pub is_urgent: bool,
    pub pending: BTreeMap<Requester, PendingLookup>,
    /// Counts transfers with lookups.
    pub serial: u64,
}

impl PendingLookup {
    /// Names of its next request, at most `most`.
    pub fn next_names(&self, most: usize) -> usize {
        (GROWTH * self.names).min(most).max(LEAST_NAMES)
    }
}

impl Lookups {
    /// Whether a lookup is queued.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether a transfer waits for its lookup.
    pub fn has_blocks(&self) -> bool {
        self.pending.keys().any(|requester| matches!(requester, Requester::Blocks(_)))
    }
}

/// A name in a request.
pub struct LookupItem {
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
    requester: Requester,
    serial: u64,
    /// The names.
    pub items: Vec<LookupItem>,
    /// Timeout of the batch.
    pub timeout_ns: u64,
    /// When it began.
    since_ns: u64,
    /// It probes an open circuit.
    probes: bool,
    ticket: Ticket,
}

impl LookupBatch {
    fn none(requester: Requester) -> LookupBatch {
        let (items, timeout_ns, since_ns) = (Vec::new(), 0, 0);
        LookupBatch {
            requester,
            serial: 0,
            items,
            timeout_ns,
            since_ns,
            probes: false,
            ticket: (0, 0),
        }
    }
}

/// The next chunks of a lookup, as far as they are known without a request.
#[derive(Default)]
pub(super) struct Window {
    /// Names to look up.
    pub items: Vec<LookupItem>,
    /// Chunks that are present by a remembered answer.
    pub present: Vec<usize>,
    /// First chunk after the window.
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
    fn start_lookup(&mut self, at: u32, may_query: bool) {
        let Ok(session) = self.session(at) else { return };
        let (serial, next) = (session.context.session.unwrap_or(0), session.looked_up);
        if next >= session.path.keys().len() {
            return;
        }
        let Some(remote) = &mut self.remote else { return };
        let lookup = remote.lookups.pending.entry(Requester::Session(at)).or_default();
        if lookup.serial != serial {
            *lookup = PendingLookup { serial, next, ..PendingLookup::default() };
        }
        if std::mem::replace(&mut lookup.is_busy, true) {
            return;
        }
        (lookup.next, lookup.names) = (next, 0);
        match (self.recall(at), &mut self.remote) {
            (true, Some(remote)) if may_query => {
                remote.lookups.queue.push_back(Requester::Session(at))
            }
            _ => self.end_lookup(Requester::Session(at)),
        }
    }

    /// Records remembered answers for a session's next chunks, so that a get finds them. Returns
    /// whether more must be looked up.
    fn recall(&mut self, at: u32) -> bool {
        let window = self.window(at, 1).unwrap_or_default();
        self.note_in_remote(at, &window.present);
        let Some(remote) = &mut self.remote else { return false };
        remote.counters.cached_names += window.present.len() as u64;
        let first = window.items.first().map(|item| item.chunk);
        if let Some(lookup) = remote.lookups.pending.get_mut(&Requester::Session(at)) {
            lookup.next = first.unwrap_or(window.end);
        }
        first.is_some() || window.is_cut
    }

    /// Tokens were appended to a session: looks up what it may continue from. Few tokens at a time
    /// are decoded here and cannot be elsewhere.
    pub(super) fn start_lookup_after_append(&mut self, at: u32, tokens: usize) {
        let may_query = self.remote.as_ref().is_some_and(|remote| remote.config.lookup_on_append);
        let Ok(session) = self.session(at) else { return };
        let table = self.namespaces[session.namespace as usize].table;
        let each = self.tables[table as usize].layout.chunk_tokens() as usize;
        if tokens >= each {
            self.start_lookup(at, may_query);
        }
    }

    /// Begins a transfer that completes when it is known how many tokens a session can continue
    /// from, in the store or at the remote. They are its result.
    pub fn locate(&mut self, at: u32) -> Result<u32> {
        // Chunks that were absent before may be present now.
        self.session_mut(at)?.looked_up = 0;
        let number = self.begin_locating(at, Vec::new())?;
        self.start_lookup(at, true);
        let requester = Requester::Session(at);
        let lookups = self.remote.as_mut().map(|remote| &mut remote.lookups);
        let busy = lookups.and_then(|lookups| {
            let lookup = lookups.pending.get_mut(&requester).filter(|lookup| lookup.is_busy)?;
            lookups.is_urgent = true;
            Some(lookup)
        });
        match busy {
            Some(lookup) => lookup.waiting.push(number),
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
            ttl_ns: 0,
            lane: 0,
            kind: TransferKind::Prefetch,
            level: Level::Ram,
            by_chunk: !slots.is_empty(),
            slots,
            requested: Vec::new(),
            first_layer: 0,
            layers: 1,
            by_layer: false,
            needed_from: Vec::new(),
            views: Arc::new(Views::from(Vec::new())),
            after: None,
            ticket: None,
        };
        self.transfers.check_room()?;
        let number = self.transfers.table.add(Transfer::new(spec, self.now_ns)?)?;
        self.transfers.table[number].locates = Some(0);
        Ok(number)
    }

    /// Completes a transfer that waited for a session's lookup.
    fn located(&mut self, at: u32, number: u32) {
        let found = self.find_path(at).map(|(_, _, reach)| reach.tokens);
        let transfer = &mut self.transfers.table[number];
        match found {
            Ok(tokens) => transfer.locates = Some(tokens),
            Err(error) => transfer.note_failure(0, &error),
        }
        self.end_transfer(number);
    }

    /// Cancels a transfer that waits for a lookup. Returns whether it was one.
    pub(super) fn stop_locating(&mut self, number: u32, status: Status) -> bool {
        let transfer = &self.transfers.table[number];
        if transfer.locates.is_none() {
            return false;
        }
        let at = transfer.spec.flow;
        if transfer.spec.by_chunk {
            self.located_blocks(number, status);
            return true;
        }
        if let Some(remote) = &mut self.remote
            && let Some(lookup) = remote.lookups.pending.get_mut(&Requester::Session(at))
        {
            lookup.waiting.retain(|&waiting| waiting != number);
        }
        self.transfers.table[number].note_failure(0, &status.into());
        self.end_transfer(number);
        true
    }

    /// A session was truncated to so many chunks.
    pub(super) fn shorten_lookup(&mut self, at: u32, chunks: usize) {
        let requester = Requester::Session(at);
        let lookup =
            self.remote.as_mut().and_then(|remote| remote.lookups.pending.get_mut(&requester));
        if let Some(lookup) = lookup {
            lookup.next = lookup.next.min(chunks);
        }
    }

    /// A session was closed: forgets its lookup.
    pub(super) fn forget_lookup(&mut self, at: u32) {
        self.cancel_prefetch(Some(at));
        let Some(remote) = &mut self.remote else { return };
        let requester = Requester::Session(at);
        remote.lookups.queue.retain(|&other| other != requester);
        let lookup = remote.lookups.pending.remove(&requester);
        for number in lookup.map(|lookup| lookup.waiting).unwrap_or_default() {
            self.transfers.table[number].note_failure(0, &Status::Cancelled.into());
            self.end_transfer(number);
        }
    }

    /// Whether a caller waits for a lookup that is queued.
    pub fn is_lookup_urgent(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.lookups.is_urgent)
    }

    /// Takes the next batch of names. An empty batch = a requester has more to do without a request,
    /// and is queued again.
    pub(super) fn take_lookups(&mut self) -> Option<LookupBatch> {
        self.remote.as_mut()?.lookups.is_urgent = false;
        while let Some(requester) = self.remote.as_mut()?.lookups.queue.pop_front() {
            let window = match requester {
                Requester::Session(at) => self.window(at, usize::MAX),
                Requester::Blocks(number) => self.window_of_blocks(number),
            };
            let window = window.unwrap_or_default();
            match requester {
                Requester::Session(at) => self.note_in_remote(at, &window.present),
                Requester::Blocks(number) => self.note_blocks(number, &window.present),
            }
            let remote = self.remote.as_mut()?;
            remote.counters.cached_names += window.present.len() as u64;
            let Some(lookup) = remote.lookups.pending.get_mut(&requester) else { continue };
            if window.items.is_empty() {
                lookup.next = window.end;
                if window.is_cut {
                    let serial = lookup.serial;
                    return Some(LookupBatch { serial, ..LookupBatch::none(requester) });
                }
                self.end_lookup(requester);
                continue;
            }
            let permit = remote.breaker.admit(Direction::Read, self.now_ns);
            if permit == Permit::Deny {
                self.end_lookup(requester);
                continue;
            }
            let probes = permit == Permit::Probe;
            lookup.names += window.items.len();
            let (serial, timeout_ns) = (lookup.serial, remote.config.timeout_ns);
            remote.counters.looked_up_names += window.items.len() as u64;
            let (items, since_ns) = (window.items, self.now_ns);
            let kind = RequestKind::Lookup(requester, serial);
            let ticket = remote.watch.begin(self.now_ns, timeout_ns, kind, probes);
            return Some(LookupBatch {
                requester,
                serial,
                items,
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
        let requester = Requester::Session(at);
        let first = self.remote.as_ref()?.lookups.pending.get(&requester)?.next;
        self.refresh(at, first..usize::MAX).ok()?;
        let namespace = self.session(at).ok()?.namespace;
        let (table, holes) =
            (self.namespaces[namespace as usize].table, self.namespaces[namespace as usize].holes);
        let shape = self.remote_shape(table)?;
        let names = self.remote_names(namespace)?;
        let (remote, session) = (self.remote.as_ref()?, self.session(at).ok()?);
        let mut window = Window { end: first, ..Window::default() };
        let cut = shape.cut(shape.objects() - 1);
        let max_present = noted_chunks(self.tables[table as usize].layout.layers());
        let lookup = remote.lookups.pending.get(&requester)?;
        let most = lookup.next_names(remote.config.names.min(max_present)).min(most);
        for (chunk, key) in session.path.keys().iter().enumerate().skip(first) {
            if window.items.len() >= most || window.present.len() >= max_present {
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
                Some(true) if remote.is_well() => window.present.push(chunk),
                Some(false) if holes => {}
                Some(false) => {
                    // Nothing can be continued after a gap.
                    window.end = chunk;
                    break;
                }
                // With an open circuit remembered names are looked up again: an answer closes it.
                _ => window.items.push(LookupItem {
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
        if batch.items.is_empty() {
            // Not all known chunks fitted into the window, so the requester is queued again.
            if remote
                .lookups
                .pending
                .get(&batch.requester)
                .is_some_and(|one| one.serial == batch.serial)
            {
                remote.lookups.queue.push_back(batch.requester);
            }
            return;
        }
        let in_time = remote.watch.end(batch.ticket);
        let mut failed = false;
        for item in &batch.items {
            match item.result {
                // Another request may have found it present since this one began.
                Ok(false) if remote.known.was_present_since(&item.name, batch.since_ns) => {}
                Ok(is_present) => {
                    remote.known.put(&item.name, is_present, now_ns);
                    remote.counters.found_names += u64::from(is_present);
                }
                Err(_) => failed = true,
            }
        }
        // All names were one request, so one outcome counts for the breaker.
        let worst = batch.items.iter().find(|item| item.result.is_err()).or(batch.items.first());
        if let Some(item) = worst.filter(|_| in_time) {
            remote.record_outcome(Direction::Read, &item.result, batch.probes, now_ns);
        }
        self.follow_breaker();
        let lookup =
            self.remote.as_ref().and_then(|remote| remote.lookups.pending.get(&batch.requester));
        if lookup.is_none_or(|one| one.serial != batch.serial) {
            return;
        }
        let needs_more = match batch.requester {
            Requester::Session(at) => self.note_path_answer(at, &batch.items),
            Requester::Blocks(number) => self.note_block_answers(number, &batch.items),
        };
        match (needs_more && !failed, &mut self.remote) {
            (true, Some(remote)) => remote.lookups.queue.push_back(batch.requester),
            _ => self.end_lookup(batch.requester),
        }
    }

    /// Records the answers for chunks of a session. Returns whether more must be looked up.
    fn note_path_answer(&mut self, at: u32, items: &[LookupItem]) -> bool {
        let Ok(session) = self.session(at) else { return false };
        let (keys, holes) =
            (session.path.keys(), self.namespaces[session.namespace as usize].holes);
        let length = keys.len();
        // The first chunk without an answer, because the session was truncated or the remote did
        // not reply; where holes are not allowed, also the first absent chunk.
        let is_same = |item: &LookupItem| keys.get(item.chunk) == Some(&item.key);
        let is_answered =
            |item: &LookupItem| is_same(item) && item.result.is_ok_and(|present| present || holes);
        let answered = items.iter().position(|item| !is_answered(item)).unwrap_or(items.len());
        let present = |item: &&LookupItem| is_same(item) && item.result == Ok(true);
        let present: Vec<usize> = match holes {
            true => items.iter().filter(present).map(|item| item.chunk).collect(),
            false => items[..answered].iter().map(|item| item.chunk).collect(),
        };
        let next = match (items.get(answered), items.last()) {
            (Some(item), _) => item.chunk,
            (None, last) => last.map_or(0, |item| item.chunk + 1),
        }
        .min(length);
        let remote = self.remote.as_mut();
        if let Some(lookup) =
            remote.and_then(|remote| remote.lookups.pending.get_mut(&Requester::Session(at)))
        {
            lookup.next = next;
        }
        self.note_in_remote(at, &present);
        answered == items.len() && next < length
    }

    /// Ends a lookup: transfers that wait for it complete.
    pub(super) fn end_lookup(&mut self, requester: Requester) {
        let at = match requester {
            Requester::Session(at) => at,
            Requester::Blocks(number) => return self.located_blocks(number, Status::NotFound),
        };
        let Some(remote) = &mut self.remote else { return };
        let Some(lookup) = remote.lookups.pending.get_mut(&requester) else { return };
        lookup.is_busy = false;
        let (next, waiting) = (lookup.next, std::mem::take(&mut lookup.waiting));
        if let Some(session) = self.sessions.get_mut(at) {
            session.looked_up = next.min(session.path.keys().len());
            if remote.config.prefetch_found {
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
