//! Sessions: a path of tokens in a namespace, who asks, and what may be asked of it.

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::kv::core::moves::{Deed, Level, MoveSpec};
use crate::kv::core::views::Views;
use crate::kv::core::{At, Core};
use crate::kv::path::{Home, Path};
use crate::meta::chunks::Pin;
use crate::meta::index::{NONE, Slot};
use crate::policy::Hint;
use crate::policy::evictor::Who;

/// Longest name of a session.
pub const MAX_NAME_BYTES: usize = 256;

/// Who asks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionOpts<'a> {
    /// What it is called; empty = nobody will ask for it by name.
    pub name: &'a [u8],
    /// Its tenant.
    pub tenant: u32,
    /// Its class, 0 leaves first.
    pub priority: Option<u8>,
    /// Most tokens it can have; 0 = not known.
    pub max_tokens: u32,
}

/// A session.
pub struct Session {
    pub(super) path: Path,
    pub(super) space: u32,
    pub(super) who: Who,
}

/// What became of a path that was cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncated {
    /// Its tokens now.
    pub tokens: u64,
}

/// A rectangle of a session's cells, and where the engine has them.
pub struct Rectangle {
    /// The first token: a multiple of a chunk's tokens.
    pub first_token: u64,
    /// How many; a multiple too, unless they go to the end of the session.
    pub tokens: u64,
    /// The first layer.
    pub first_layer: usize,
    /// How many.
    pub layers: usize,
    /// One result a layer.
    pub by_layer: bool,
    /// Where the engine has them.
    pub views: Arc<Views>,
}

impl Core {
    /// Opens a session without tokens; its number.
    pub fn open_session(&mut self, space: u32, opts: &SessionOpts<'_>) -> Result<u32> {
        let Some(home) = self.spaces.get(space as usize).copied() else {
            fail!(NotFound, "there is no namespace {space}");
        };
        if opts.name.len() > MAX_NAME_BYTES {
            fail!(Limit, "a name of {} bytes; {MAX_NAME_BYTES} can be", opts.name.len());
        }
        if !self.sessions.has_room() {
            fail!(Again, "{} sessions are open, as many as may be", self.sessions.len());
        }
        self.names += 1;
        let serial = self.names.to_le_bytes();
        // Names of private chunks: two sessions of one name have different tails.
        let name = [opts.name, &[0], &serial].concat();
        let chunk_tokens = self.boards[home.board as usize].layout.chunk_tokens();
        let who = Who {
            session: Some(self.names),
            tenant: opts.tenant,
            priority: opts.priority,
            length: 0,
            max_length: opts.max_tokens,
            tokens_each: chunk_tokens,
        };
        let session = self.sessions.vacant();
        let (key, namespace, holes) = (home.key, space, home.holes);
        let path = Path::new(Home { key, namespace, chunk_tokens, holes, session }, &name)?;
        self.sessions.add(Session { path, space, who })
    }

    fn session_mut(&mut self, at: u32) -> Result<&mut Session> {
        match self.sessions.get_mut(at) {
            Some(session) => Ok(session),
            None => fail!(NotFound, "there is no session {at}"),
        }
    }

    /// A session.
    pub fn session(&self, at: u32) -> Result<&Session> {
        match self.sessions.get(at) {
            Some(session) => Ok(session),
            None => fail!(NotFound, "there is no session {at}"),
        }
    }

    /// Adds tokens to a session.
    pub fn append(&mut self, at: u32, tokens: &[u32]) -> Result<()> {
        self.with_path(at, |path, rows| path.append(&mut rows.chunks, tokens))?;
        let session = self.session_mut(at)?;
        session.who.length = u32::try_from(session.path.tokens().len()).unwrap_or(u32::MAX);
        Ok(())
    }

    /// Does something to a path, and tells the policies which chunks are in use now.
    fn with_path<R>(
        &mut self,
        at: u32,
        act: impl FnOnce(&mut Path, &mut super::Board) -> Result<R>,
    ) -> Result<R> {
        let space = self.session(at)?.space;
        let board = self.spaces[space as usize].board;
        let session = &mut self.sessions[at];
        let rows = &mut self.boards[board as usize];
        let unknown = session.path.known();
        let result = act(&mut session.path, rows);
        for i in unknown..self.sessions[at].path.slots().len() {
            let slot = self.sessions[at].path.slots()[i];
            if slot != NONE {
                self.note_held(board, slot);
            }
        }
        result
    }

    /// Cuts a session to so many tokens.
    pub fn truncate(&mut self, at: u32, tokens: u64) -> Result<Truncated> {
        let tokens = usize::try_from(tokens).map_err(|_| Status::Invalid)?;
        let board = self.spaces[self.session(at)?.space as usize].board;
        let session = &mut self.sessions[at];
        let old = held_by(&session.path);
        let mut freed = Vec::new();
        let chunks = &mut self.boards[board as usize].chunks;
        session.path.truncate(chunks, tokens, &mut |slot| freed.push(slot))?;
        session.who.length = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.were_held(board, &freed);
        self.were_held(board, &old);
        self.settle();
        Ok(Truncated { tokens: tokens as u64 })
    }

    /// Another session that goes on from where one is.
    pub fn fork(&mut self, at: u32, opts: &SessionOpts<'_>) -> Result<u32> {
        let space = self.session(at)?.space;
        let other = self.open_session(space, opts)?;
        let tokens = self.session(at)?.path.tokens().to_vec();
        if let Err(error) = self.append(other, &tokens) {
            self.close_session(other)?;
            return Err(error);
        }
        Ok(other)
    }

    /// Ends a session: its chunks may leave. Its moves go on.
    pub fn close_session(&mut self, at: u32) -> Result<()> {
        let board = self.spaces[self.session(at)?.space as usize].board;
        let Some(session) = self.sessions.remove(at) else { return Ok(()) };
        let old = held_by(&session.path);
        let mut freed = Vec::new();
        let chunks = &mut self.boards[board as usize].chunks;
        let closed = session.path.close(chunks, &mut |slot| freed.push(slot));
        // Those are the ones that may go now; one of an older tail is only there.
        self.were_held(board, &freed);
        self.were_held(board, &old);
        self.settle();
        closed
    }

    /// Chunks are held once less; from the end, so that what continues one goes first.
    fn were_held(&mut self, board: u32, slots: &[Slot]) {
        for &slot in slots.iter().rev() {
            self.note_held(board, slot);
            self.tidy(board, slot);
        }
    }

    /// Begins a put or a get of a rectangle; the number of its move.
    pub fn submit_rectangle(
        &mut self,
        at: u32,
        deed: Deed,
        level: Level,
        lane: usize,
        rectangle: Rectangle,
    ) -> Result<u32> {
        self.begin_rectangle(at, (deed, level, lane), rectangle, None)
    }

    /// The same; with a ticket it waits.
    pub(super) fn begin_rectangle(
        &mut self,
        at: u32,
        (deed, level, lane): (Deed, Level, usize),
        rectangle: Rectangle,
        ticket: Option<u64>,
    ) -> Result<u32> {
        let (first, end, tail) = self.chunks_of(at, rectangle.first_token, rectangle.tokens)?;
        let space = self.session(at)?.space;
        let board = self.spaces[space as usize].board;
        let tokens = u32::try_from(rectangle.tokens).map_err(|_| Status::Limit)?;
        if deed != Deed::Prefetch {
            let way = if deed == Deed::Put {
                crate::device::Way::Gather
            } else {
                crate::device::Way::Scatter
            };
            let chunks = (end - first + usize::from(tail)) as u32;
            let layout = &self.boards[board as usize].layout;
            rectangle.views.check(layout, rectangle.first_layer, tokens, chunks, way)?;
        }
        let slots = self.rows_of(at, first, end, tail)?;
        let who = self.session(at)?.who;
        let flow = at;
        let Rectangle { first_layer, layers, by_layer, views, .. } = rectangle;
        self.submit(MoveSpec {
            board,
            flow,
            who,
            lane,
            deed,
            level,
            slots,
            first_layer,
            layers,
            by_layer,
            views,
            ticket,
        })
    }

    /// The full chunks of a range of tokens, and whether the tail belongs to it.
    pub(super) fn chunks_of(
        &self,
        at: u32,
        first: u64,
        tokens: u64,
    ) -> Result<(usize, usize, bool)> {
        let session = self.session(at)?;
        let board = self.spaces[session.space as usize].board;
        let each = u64::from(self.boards[board as usize].layout.chunk_tokens());
        let all = session.path.tokens().len() as u64;
        let Some(end) = first.checked_add(tokens).filter(|&end| end <= all && tokens > 0) else {
            fail!(Invalid, "{tokens} tokens from {first} on, of a session with {all}");
        };
        if first % each != 0 || (end % each != 0 && end != all) {
            fail!(
                Invalid,
                "tokens {first} to {end}: both must be multiples of the {each} of a chunk, or the \
                 end of the session ({all})"
            );
        }
        Ok(((first / each) as usize, (end / each) as usize, end % each != 0))
    }

    /// The rows of chunks of a path, made where there are none.
    fn rows_of(&mut self, at: u32, first: usize, end: usize, tail: bool) -> Result<Vec<Slot>> {
        self.with_path(at, |path, rows| path.refresh(&mut rows.chunks))?;
        let path = &mut self.sessions[at].path;
        let known = path.known().min(end);
        let unknown = path.slots()[known..end].iter().filter(|&&slot| slot == NONE).count();
        self.rows_for(unknown + usize::from(tail))?;
        self.with_path(at, |path, rows| path.make(&mut rows.chunks, end))?;
        let mut slots = Vec::new();
        slots.try_reserve_exact(end - first + 1).map_err(|_| Status::NoMem)?;
        slots.extend_from_slice(&self.sessions[at].path.slots()[first..end]);
        if tail {
            let board = self.spaces[self.sessions[at].space as usize].board;
            let mut freed = Vec::new();
            let made = self.with_path(at, |path, rows| {
                path.make_tail(&mut rows.chunks, &mut |slot| freed.push(slot))
            });
            self.were_held(board, &freed);
            slots.extend(made?);
        }
        Ok(slots)
    }

    /// Keeps the chunks of a range of tokens, as long as the budget allows, until a
    /// time.
    pub fn pin(&mut self, at: u32, first: u64, tokens: u64, pin: Pin) -> Result<()> {
        let (first, end, tail) = self.chunks_of(at, first, tokens)?;
        let slots = self.rows_of(at, first, end, tail)?;
        let board = self.spaces[self.session(at)?.space as usize].board;
        for slot in slots {
            let chunks = &mut self.boards[board as usize].chunks;
            let place = At { board, slot };
            if let Some(old) = chunks.chunk(slot).and_then(|row| row.pin()) {
                self.pins.remove(&(old.priority, old.until_ns, place));
            }
            chunks.pin(slot, pin)?;
            if let Some(new) = chunks.chunk(slot).and_then(|row| row.pin()) {
                self.pins.insert((new.priority, new.until_ns, place));
                self.ends.insert((new.until_ns, new.priority, place));
            }
            self.note_held(board, slot);
        }
        Ok(())
    }

    /// Takes the pins of the chunks of a range of tokens away, whoever has set them.
    pub fn unpin_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<()> {
        let (first, end, tail) = self.chunks_of(at, first, tokens)?;
        self.with_path(at, |path, rows| path.refresh(&mut rows.chunks))?;
        let (session, board) =
            (self.session(at)?, self.spaces[self.session(at)?.space as usize].board);
        let slots = session.path.slots()[first..end].iter().copied().filter(|&slot| slot != NONE);
        let slots: Vec<Slot> = slots.chain(session.path.tail().filter(|_| tail)).collect();
        for slot in slots {
            let row = self.boards[board as usize].chunks.chunk(slot);
            if let Some(pin) = row.and_then(|row| row.pin()) {
                let place = At { board, slot };
                self.pins.remove(&(pin.priority, pin.until_ns, place));
                self.ends.remove(&(pin.until_ns, pin.priority, place));
                self.unpin(place);
            }
        }
        self.settle();
        Ok(())
    }

    /// Lets the chunks of a part of a path go, the last one first; what they were.
    /// The session finds those again that stay.
    pub(super) fn let_go_range(
        &mut self,
        at: u32,
        chunks: std::ops::Range<usize>,
        tail: bool,
    ) -> Result<Vec<Slot>> {
        self.with_path(at, |path, rows| path.refresh(&mut rows.chunks))?;
        let path = &self.sessions[at].path;
        let mut slots: Vec<Slot> = path.tail().filter(|_| tail).into_iter().collect();
        slots.extend(path.slots()[chunks.clone()].iter().rev().filter(|&&slot| slot != NONE));
        self.with_path(at, |path, rows| path.let_go(&mut rows.chunks, chunks, tail))?;
        let board = self.spaces[self.session(at)?.space as usize].board;
        slots.iter().for_each(|&slot| self.note_held(board, slot));
        Ok(slots)
    }

    /// Ends pins whose time has come.
    pub(super) fn end_pins(&mut self) {
        while let Some(&(until, priority, at)) = self.ends.first() {
            if until > self.now_ns {
                return;
            }
            self.ends.pop_first();
            if self.pins.remove(&(priority, until, at)) {
                self.unpin(at);
            }
        }
    }

    /// Gives up the weakest pin, when nothing else may leave.
    pub(super) fn drop_weakest_pin(&mut self) -> bool {
        let Some((priority, until, at)) = self.pins.pop_first() else { return false };
        self.ends.remove(&(until, priority, at));
        self.unpin(at);
        true
    }

    fn unpin(&mut self, at: At) {
        if let Err(error) = self.boards[at.board as usize].chunks.unpin(at.slot) {
            log::error!("a pinned chunk is gone: {error}");
        }
        self.debt.released();
        self.note_held(at.board, at.slot);
        self.tidy(at.board, at.slot);
    }

    /// Passes on to the policies what the engine says of the future of a session.
    pub fn hint(&mut self, at: u32, hint: &Hint) -> Result<()> {
        let session = self.session(at)?;
        let board = self.spaces[session.space as usize].board;
        let rows = &self.boards[board as usize];
        let slots = session.path.slots().iter().filter(|&&slot| slot != NONE);
        let ids: Vec<u64> = slots.map(|&slot| rows.id(slot)).collect();
        let who = session.who;
        for shelf in [Some(&mut self.host_shelf), self.disk_shelf.as_mut()].into_iter().flatten() {
            shelf.hint(self.now_ns, &who, &ids, hint)?;
        }
        Ok(())
    }
}

impl Session {
    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its namespace.
    pub fn space(&self) -> u32 {
        self.space
    }
}

/// The chunks that a path holds.
fn held_by(path: &Path) -> Vec<Slot> {
    let full = path.slots().iter().copied().filter(|&slot| slot != NONE);
    full.chain(path.tail()).collect()
}
