//! Asks: which chunks of a session the remote has. A session is asked for from its front, some
//! chunks at a time, as long as they are there; what is heard is noted as hints in the table.

use std::collections::{BTreeMap, VecDeque};

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::kv::core::moves::{Deed, Level, Move, MoveSpec};
use crate::kv::core::views::Views;
use crate::kv::core::{At, Core};
use crate::meta::chunks::Cell;
use crate::meta::index::NONE;
use crate::meta::key::Key;
use crate::tier::remote::breaker::{Leave, Way};
use crate::tier::remote::{Name, Trouble};

/// Chunks that are asked for together.
const WINDOW: usize = 64;

/// What is asked for a session.
#[derive(Default)]
struct Inquiry {
    /// Which session: numbers are used again.
    serial: u64,
    /// The next chunk that is asked for.
    next: usize,
    /// It stands in the line, or is asked for now.
    is_busy: bool,
    /// Moves that wait for its end.
    waiting: Vec<u32>,
}

/// All that is asked for.
#[derive(Default)]
pub(super) struct Asking {
    line: VecDeque<u32>,
    inquiries: BTreeMap<u32, Inquiry>,
}

impl Asking {
    /// Whether a session waits for its turn.
    pub fn waits(&self) -> bool {
        !self.line.is_empty()
    }
}

/// A name that is asked for.
pub struct Asked {
    chunk: usize,
    /// Its key: the session may be another by then.
    key: Key,
    /// The name: of the object of a chunk that is sent last.
    pub name: Name,
    /// Whether it is there.
    pub result: std::result::Result<bool, Trouble>,
}

/// Names that are asked for together.
#[derive(Default)]
pub struct AskBatch {
    session: u32,
    serial: u64,
    /// Each of them.
    pub asked: Vec<Asked>,
    /// How long that may take.
    pub timeout_ns: u64,
}

/// What is known of the next chunks of a session before anybody is asked.
#[derive(Default)]
struct Window {
    /// These are to be asked for.
    asked: Vec<Asked>,
    /// These are there, as was heard lately.
    there: Vec<usize>,
    /// The first chunk behind it.
    end: usize,
    /// Nothing behind it needs to be asked for.
    is_last: bool,
}

impl Core {
    /// Has the remote asked for what a session has and the store has not.
    pub(super) fn inquire(&mut self, at: u32) {
        let Ok(session) = self.session(at) else { return };
        let (serial, next) = (session.who.session.unwrap_or(0), session.asked);
        if next >= session.path.keys().len() {
            return;
        }
        let Some(far) = &mut self.far else { return };
        let inquiry = far.asking.inquiries.entry(at).or_default();
        if inquiry.serial != serial {
            *inquiry = Inquiry { serial, next, ..Inquiry::default() };
        }
        if !std::mem::replace(&mut inquiry.is_busy, true) {
            inquiry.next = next;
            far.asking.line.push_back(at);
        }
    }

    /// Tokens were added to a session: what it may go on from elsewhere is asked for. What comes
    /// in little by little is computed here, and nowhere else.
    pub(super) fn inquire_after(&mut self, at: u32, tokens: usize) {
        let asks = self.far.as_ref().is_some_and(|far| far.config.asks);
        let Ok(session) = self.session(at) else { return };
        let board = self.spaces[session.space as usize].board;
        let each = self.boards[board as usize].layout.chunk_tokens() as usize;
        if asks && tokens >= each {
            self.inquire(at);
        }
    }

    /// Begins a move that ends when it is known how far a session can go on with what is here
    /// and at the remote: so many tokens are its result.
    pub fn locate(&mut self, at: u32) -> Result<u32> {
        let session = self.session(at)?;
        let (who, board) = (session.who, self.spaces[session.space as usize].board);
        let spec = MoveSpec {
            board,
            flow: at,
            who,
            lane: 0,
            deed: Deed::Prefetch,
            level: Level::Ram,
            slots: Vec::new(),
            by_chunk: false,
            asked: Vec::new(),
            first_layer: 0,
            layers: 1,
            by_layer: false,
            needed_from: Vec::new(),
            views: Arc::new(Views(Vec::new())),
            after: None,
            ticket: None,
        };
        // What was not there when it was last asked for may be now.
        self.session_mut(at)?.asked = 0;
        if !self.moves.has_room() {
            fail!(Again, "{} moves are under way, as many as may be", self.moves.len());
        }
        let number = self.moves.add(Move::new(spec, self.now_ns)?)?;
        self.moves[number].locates = Some(0);
        self.inquire(at);
        let inquiry = self.far.as_mut().and_then(|far| far.asking.inquiries.get_mut(&at));
        match inquiry.filter(|inquiry| inquiry.is_busy) {
            Some(inquiry) => inquiry.waiting.push(number),
            None => self.located(at, number),
        }
        self.settle();
        Ok(number)
    }

    /// It is known where a session's chunks are.
    fn located(&mut self, at: u32, number: u32) {
        let found = self.find_path(at).map(|(_, _, reach)| reach.tokens);
        let one = &mut self.moves[number];
        match found {
            Ok(tokens) => one.locates = Some(tokens),
            Err(error) => one.blame(0, &error),
        }
        self.end_move(number);
    }

    /// A move that waits for answers is given up; whether it was one.
    pub(super) fn stop_locating(&mut self, number: u32, status: Status) -> bool {
        let one = &self.moves[number];
        if one.locates.is_none() {
            return false;
        }
        let at = one.spec.flow;
        if let Some(far) = &mut self.far
            && let Some(inquiry) = far.asking.inquiries.get_mut(&at)
        {
            inquiry.waiting.retain(|&waiting| waiting != number);
        }
        self.moves[number].blame(0, &status.into());
        self.end_move(number);
        true
    }

    /// A session was cut to so many chunks.
    pub(super) fn cut_inquiry(&mut self, at: u32, chunks: usize) {
        let inquiry = self.far.as_mut().and_then(|far| far.asking.inquiries.get_mut(&at));
        if let Some(inquiry) = inquiry {
            inquiry.next = inquiry.next.min(chunks);
        }
    }

    /// A session is closed: nobody asks for it any more.
    pub(super) fn forget_inquiry(&mut self, at: u32) {
        self.cancel_early(Some(at));
        let Some(far) = &mut self.far else { return };
        far.asking.line.retain(|&session| session != at);
        let inquiry = far.asking.inquiries.remove(&at);
        for number in inquiry.map(|inquiry| inquiry.waiting).unwrap_or_default() {
            self.moves[number].blame(0, &Status::Cancelled.into());
            self.end_move(number);
        }
    }

    /// The next names to be asked for.
    pub(super) fn take_asks(&mut self) -> Option<AskBatch> {
        while let Some(at) = self.far.as_mut()?.asking.line.pop_front() {
            let window = self.window(at).unwrap_or_default();
            if !window.there.is_empty() {
                self.note_far(at, &window.there);
            }
            let far = self.far.as_mut()?;
            far.counters.remembered += window.there.len() as u64;
            let Some(inquiry) = far.asking.inquiries.get_mut(&at) else { continue };
            if window.asked.is_empty() {
                inquiry.next = window.end;
                self.end_inquiry(at);
                continue;
            }
            if far.breaker.leave(Way::Read, self.now_ns) == Leave::Stay {
                self.end_inquiry(at);
                continue;
            }
            let (serial, timeout_ns) = (inquiry.serial, far.config.timeout_ns);
            far.counters.asked += window.asked.len() as u64;
            return Some(AskBatch { session: at, serial, asked: window.asked, timeout_ns });
        }
        None
    }

    /// The next chunks of a session: which to ask for.
    fn window(&mut self, at: u32) -> Option<Window> {
        self.with_path(at, |path, rows| path.refresh(&mut rows.chunks)).ok()?;
        let inquiry = self.far.as_ref()?.asking.inquiries.get(&at)?;
        let session = self.session(at).ok()?;
        let (space, first) = (session.space, inquiry.next);
        let (board, holes) = (self.spaces[space as usize].board, self.spaces[space as usize].holes);
        let shape = self.far_shape(board)?;
        let names = self.far_names(space)?;
        let (far, session) = (self.far.as_ref()?, self.session(at).ok()?);
        let rows = &self.boards[board as usize];
        let layers = rows.layout.layers();
        let mut window = Window { end: first, ..Window::default() };
        let cut = shape.cut(shape.objects() - 1);
        for (chunk, key) in session.path.keys().iter().enumerate().skip(first) {
            if window.asked.len() >= WINDOW {
                return Some(window);
            }
            let slot = session.path.slots().get(chunk).copied().unwrap_or(NONE);
            let marks = rows.chunks.marks(slot).unwrap_or_default();
            let is_known = marks.len() == layers
                && marks.iter().all(|marks| marks.there() != 0 || marks.is_far());
            window.end = chunk + 1;
            if is_known {
                continue;
            }
            let name = names.name(key, &cut);
            let config = &far.config;
            match far.known.get(&name, self.now_ns, config.fresh_ns, config.absent_ns) {
                Some(true) => window.there.push(chunk),
                Some(false) if holes => {}
                Some(false) => {
                    // Nobody goes on behind a gap.
                    window.end = chunk;
                    break;
                }
                None => {
                    window.asked.push(Asked { chunk, key: *key, name, result: Err(Trouble::Later) })
                }
            }
        }
        window.is_last = true;
        Some(window)
    }

    pub(super) fn done_asks(&mut self, batch: &AskBatch) {
        let now_ns = self.now_ns;
        let Some(far) = &mut self.far else { return };
        let mut failed = false;
        for one in &batch.asked {
            match one.result {
                Ok(is_there) => {
                    far.known.put(&one.name, is_there, now_ns);
                    far.counters.found += u64::from(is_there);
                }
                Err(_) => failed = true,
            }
        }
        // One request was made of all of them.
        let worst = batch.asked.iter().find(|one| one.result.is_err()).or(batch.asked.first());
        if let Some(one) = worst {
            far.heard(Way::Read, &one.result, now_ns);
        }
        self.follow_breaker();
        let at = batch.session;
        let serial = self.session(at).map(|session| session.who.session.unwrap_or(0));
        let inquiry = self.far.as_mut().and_then(|far| far.asking.inquiries.get_mut(&at));
        let Some(inquiry) = inquiry.filter(|one| one.serial == batch.serial) else { return };
        if serial != Ok(batch.serial) {
            return;
        }
        let keys = self.sessions[at].path.keys();
        let length = keys.len();
        let holes = self.spaces[self.sessions[at].space as usize].holes;
        let asked = &batch.asked;
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
        let goes_on = heard == asked.len() && !failed;
        inquiry.next = match (asked.get(heard), asked.last()) {
            (Some(one), _) => one.chunk,
            (None, last) => last.map_or(0, |one| one.chunk + 1),
        }
        .min(length);
        let goes_on = goes_on && inquiry.next < length;
        self.note_far(at, &there);
        match (goes_on, &mut self.far) {
            (true, Some(far)) => far.asking.line.push_back(at),
            _ => self.end_inquiry(at),
        }
    }

    /// Nothing more is asked for a session: who waits for that goes on.
    fn end_inquiry(&mut self, at: u32) {
        let Some(far) = &mut self.far else { return };
        let Some(inquiry) = far.asking.inquiries.get_mut(&at) else { return };
        inquiry.is_busy = false;
        let (next, waiting) = (inquiry.next, std::mem::take(&mut inquiry.waiting));
        if let Some(session) = self.sessions.get_mut(at) {
            session.asked = next.min(session.path.keys().len());
            if far.config.fetches {
                far.early.add(at);
            }
        }
        waiting.into_iter().for_each(|number| self.located(at, number));
    }

    /// The remote has chunks of a session, as far as is known: they get rows, if nobody has to
    /// leave for those.
    fn note_far(&mut self, at: u32, chunks: &[usize]) {
        let Some(&last) = chunks.last() else { return };
        let Ok(session) = self.session(at) else { return };
        let board = self.spaces[session.space as usize].board;
        let slots = &session.path.slots()[..last + 1];
        let missing = slots.iter().filter(|&&slot| slot == NONE).count();
        let made = match missing <= self.free_rows() {
            true => self.rows_for(missing).and_then(|()| {
                self.with_path(at, |path, rows| path.make(&mut rows.chunks, last + 1))
            }),
            false => return,
        };
        if made.is_err() {
            return;
        }
        let layers = self.boards[board as usize].layout.layers();
        for &chunk in chunks {
            let slot = self.sessions[at].path.slots()[chunk];
            let one = At { board, slot };
            let before = self.far_cells(one);
            for layer in 0..layers {
                let hinted = self.boards[board as usize].chunks.hint(Cell { chunk: slot, layer });
                debug_assert!(hinted.is_ok(), "{hinted:?}");
            }
            self.told_far(one, before);
        }
    }
}
