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
use crate::store::state::transfer::{Level, MoveSpec, Transfer, TransferKind};
use crate::store::state::{At, StoreState};
use crate::tier::remote::breaker::{Leave, Way};
use crate::tier::remote::{Name, Trouble};

/// Chunks that are asked for together.
pub(super) const WINDOW: usize = 64;
/// Cells that are noted together, of chunks that are known to be there: whoever does that, maybe
/// an engine's own thread, has the lock meanwhile.
const NOTED_CELLS: usize = 8192;

/// For whom is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Asker {
    /// A session, for its path.
    Session(u32),
    /// A move, for blocks that it names.
    Blocks(u32),
}

/// What is asked for somebody.
#[derive(Default)]
pub(super) struct PendingLookup {
    /// Which session or move: numbers are used again.
    pub serial: u64,
    /// The next chunk that is asked for.
    pub next: usize,
    /// It stands in the line, or is asked for now.
    pub is_busy: bool,
    /// Moves that wait for the end of a session's.
    pub waiting: Vec<u32>,
    /// The blocks of a move's.
    pub named: Named,
}

/// All that is asked for.
#[derive(Default)]
pub(super) struct Asking {
    pub line: VecDeque<Asker>,
    /// Somebody waits for the end of what stands there.
    pub is_urgent: bool,
    pub inquiries: BTreeMap<Asker, PendingLookup>,
    /// Counts moves that ask.
    pub serial: u64,
}

impl Asking {
    /// Whether somebody waits for his turn.
    pub fn waits(&self) -> bool {
        !self.line.is_empty()
    }

    /// Whether a move waits for what it asked for.
    pub fn has_blocks(&self) -> bool {
        self.inquiries.keys().any(|asker| matches!(asker, Asker::Blocks(_)))
    }
}

/// A name that is asked for.
pub struct Asked {
    pub(super) chunk: usize,
    /// Its key: the session may be another by then.
    pub(super) key: Key,
    /// The name: of the object of a chunk that is sent last.
    pub name: Name,
    /// Whether it is there.
    pub result: std::result::Result<bool, Trouble>,
}

/// Names that are asked for together.
pub struct AskBatch {
    asker: Asker,
    serial: u64,
    /// Each of them.
    pub asked: Vec<Asked>,
    /// How long that may take.
    pub timeout_ns: u64,
    /// Since when it is under way.
    since_ns: u64,
    /// It is to see if the remote is well again.
    probes: bool,
    ticket: Ticket,
}

impl AskBatch {
    fn none(asker: Asker) -> AskBatch {
        let (asked, timeout_ns, since_ns) = (Vec::new(), 0, 0);
        AskBatch { asker, serial: 0, asked, timeout_ns, since_ns, probes: false, ticket: (0, 0) }
    }
}

/// What is known of the next chunks before anybody is asked.
#[derive(Default)]
pub(super) struct Window {
    /// These are to be asked for.
    pub asked: Vec<Asked>,
    /// These are there, as was heard lately.
    pub there: Vec<usize>,
    /// The first chunk behind it.
    pub end: usize,
    /// More is known, or to be asked for, than it has room for.
    pub is_cut: bool,
}

/// How many chunks of so many layers are noted together.
pub(super) fn noted_chunks(layers: usize) -> usize {
    (NOTED_CELLS / layers.max(1)).max(1)
}

impl StoreState {
    /// Notes what was heard lately of what a session has and the store has not; has the remote
    /// asked for the rest.
    fn inquire(&mut self, at: u32, asks: bool) {
        let Ok(session) = self.session(at) else { return };
        let (serial, next) = (session.who.session.unwrap_or(0), session.asked);
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

    /// Notes what was heard lately of a session's next chunks, so that a get finds them; whether
    /// more is to be asked for.
    fn recall(&mut self, at: u32) -> bool {
        let window = self.window(at, 1).unwrap_or_default();
        self.note_in_remote(at, &window.there);
        let Some(remote) = &mut self.remote else { return false };
        remote.counters.remembered += window.there.len() as u64;
        let first = window.asked.first().map(|one| one.chunk);
        if let Some(inquiry) = remote.asking.inquiries.get_mut(&Asker::Session(at)) {
            inquiry.next = first.unwrap_or(window.end);
        }
        first.is_some() || window.is_cut
    }

    /// Tokens were added to a session: what it may go on from elsewhere is asked for. What comes
    /// in little by little is computed here, and nowhere else.
    pub(super) fn inquire_after(&mut self, at: u32, tokens: usize) {
        let asks = self.remote.as_ref().is_some_and(|remote| remote.config.asks);
        let Ok(session) = self.session(at) else { return };
        let table = self.namespaces[session.space as usize].table;
        let each = self.tables[table as usize].layout.chunk_tokens() as usize;
        if tokens >= each {
            self.inquire(at, asks);
        }
    }

    /// Begins a move that ends when it is known how far a session can go on with what is here
    /// and at the remote: so many tokens are its result.
    pub fn locate(&mut self, at: u32) -> Result<u32> {
        // What was not there when it was last asked for may be now.
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

    /// A move that moves nothing, and says of so many blocks how it went; none for a path.
    pub(super) fn begin_locating(&mut self, at: u32, slots: Vec<Slot>) -> Result<u32> {
        let session = self.session(at)?;
        let spec = MoveSpec {
            table: self.namespaces[session.space as usize].table,
            flow: at,
            who: session.who,
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

    /// It is known where a session's chunks are.
    fn located(&mut self, at: u32, number: u32) {
        let found = self.find_path(at).map(|(_, _, reach)| reach.tokens);
        let one = &mut self.transfers.table[number];
        match found {
            Ok(tokens) => one.locates = Some(tokens),
            Err(error) => one.note_failure(0, &error),
        }
        self.end_move(number);
    }

    /// A move that waits for answers is given up; whether it was one.
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

    /// A session was cut to so many chunks.
    pub(super) fn shorten_lookup(&mut self, at: u32, chunks: usize) {
        let asker = Asker::Session(at);
        let inquiry =
            self.remote.as_mut().and_then(|remote| remote.asking.inquiries.get_mut(&asker));
        if let Some(inquiry) = inquiry {
            inquiry.next = inquiry.next.min(chunks);
        }
    }

    /// A session is closed: nobody asks for it any more.
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

    /// Whether somebody waits for the answer to what nobody has asked yet.
    pub fn awaits_answer(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.asking.is_urgent)
    }

    /// The next names to be asked for; none in it = there is more to do for somebody, whose turn
    /// comes again.
    pub(super) fn take_lookups(&mut self) -> Option<AskBatch> {
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
            remote.counters.remembered += window.there.len() as u64;
            let Some(inquiry) = remote.asking.inquiries.get_mut(&asker) else { continue };
            if window.asked.is_empty() {
                inquiry.next = window.end;
                if window.is_cut {
                    let serial = inquiry.serial;
                    return Some(AskBatch { serial, ..AskBatch::none(asker) });
                }
                self.end_lookup(asker);
                continue;
            }
            let leave = remote.breaker.leave(Way::Read, self.now_ns);
            if leave == Leave::Stay {
                self.end_lookup(asker);
                continue;
            }
            let probes = leave == Leave::Probe;
            let (serial, timeout_ns) = (inquiry.serial, remote.config.timeout_ns);
            remote.counters.asked += window.asked.len() as u64;
            let (asked, since_ns) = (window.asked, self.now_ns);
            let what = What::Ask(asker, serial);
            let ticket = remote.watch.begin(self.now_ns, timeout_ns, what, probes);
            return Some(AskBatch { asker, serial, asked, timeout_ns, since_ns, probes, ticket });
        }
        None
    }

    /// The next chunks of a session: which to ask for, at most so many.
    fn window(&mut self, at: u32, most: usize) -> Option<Window> {
        let first = self.remote.as_ref()?.asking.inquiries.get(&Asker::Session(at))?.next;
        self.refresh(at, first..usize::MAX).ok()?;
        let space = self.session(at).ok()?.space;
        let (table, holes) =
            (self.namespaces[space as usize].table, self.namespaces[space as usize].holes);
        let shape = self.remote_shape(table)?;
        let names = self.remote_names(space)?;
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
                    // Nobody goes on behind a gap.
                    window.end = chunk;
                    break;
                }
                // What is remembered of a remote that is left alone is asked for again: an answer
                // tells that it is well.
                _ => {
                    window.asked.push(Asked { chunk, key: *key, name, result: Err(Trouble::Later) })
                }
            }
        }
        Some(window)
    }

    pub(super) fn done_lookups(&mut self, batch: &AskBatch) {
        let now_ns = self.now_ns;
        let Some(remote) = &mut self.remote else { return };
        if batch.asked.is_empty() {
            // Not all that was known fitted: its asker's turn comes again.
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
                // It may have been put there since it was asked for.
                Ok(false) if remote.known.was_there_since(&one.name, batch.since_ns) => {}
                Ok(is_there) => {
                    remote.known.put(&one.name, is_there, now_ns);
                    remote.counters.found += u64::from(is_there);
                }
                Err(_) => failed = true,
            }
        }
        // One request was made of all of them.
        let worst = batch.asked.iter().find(|one| one.result.is_err()).or(batch.asked.first());
        if let Some(one) = worst.filter(|_| in_time) {
            remote.heard(Way::Read, &one.result, batch.probes, now_ns);
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

    /// What was heard of chunks of a session; whether more is to be asked for.
    fn note_path_answer(&mut self, at: u32, asked: &[Asked]) -> bool {
        let Ok(session) = self.session(at) else { return false };
        let (keys, holes) = (session.path.keys(), self.namespaces[session.space as usize].holes);
        let length = keys.len();
        // The first that nothing was heard of, since the session was cut or the remote did not
        // answer; where no holes can be computed, or that is not there.
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

    /// Nothing more is asked for somebody: who waits for that goes on.
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

    /// The remote has chunks of a session, as far as is known: they get rows, if nobody has to
    /// leave for those.
    fn note_in_remote(&mut self, at: u32, chunks: &[usize]) {
        let Some(&last) = chunks.last() else { return };
        let Ok(session) = self.session(at) else { return };
        let table = self.namespaces[session.space as usize].table;
        let Ok(missing) = self.missing_before(at, last + 1) else { return };
        if !self.rows_for_hints(missing) || self.make_chunks(at, last + 1).is_err() {
            return;
        }
        for &chunk in chunks {
            let slot = self.sessions[at].path.slots()[chunk];
            self.hint_remote(At { table, slot });
        }
    }

    /// The remote has all of a chunk, as far as is known.
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
