//! Sessions: a path of tokens in a namespace, who asks, and what may be asked of it.

use std::ops::Range;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::fail;
use crate::format::keys::media::Medium;
use crate::kv::core::holds::Holds;
use crate::kv::core::moves::{Deed, Level, MoveSpec};
use crate::kv::core::views::Views;
use crate::kv::core::{At, Core};
use crate::kv::path::{Home, Path};
use crate::meta::chunks::id_of;
use crate::meta::index::{NONE, Slot};
use crate::meta::layout::Layout;
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
    /// Blocks that it holds by name.
    pub(super) holds: Holds,
    /// So many chunks from its front were looked for at the remote.
    pub(super) asked: usize,
}

/// What became of a path that was cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncated {
    /// Its tokens now.
    pub tokens: u64,
}

/// What of a rectangle is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// All.
    #[default]
    All,
    /// Only what going on after its last token needs. Windows and states need the end;
    /// other cells of their layers are left alone, and are no misses.
    Needed,
    /// Some of its chunks, by their places in it, ascending. Views have their tokens one
    /// after the other.
    Chunks(Vec<u32>),
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
    /// What of it; all of it, for a put.
    pub wanted: Wanted,
    /// Where the engine has them.
    pub views: Arc<Views>,
    /// An event of the store's device: no copy to or from the views runs before it has come.
    /// It stays known until the move has ended.
    pub after: Option<Event>,
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
        let added =
            self.sessions.add(Session { path, space, who, holds: Holds::default(), asked: 0 })?;
        self.session_came(space);
        Ok(added)
    }

    pub(super) fn session_mut(&mut self, at: u32) -> Result<&mut Session> {
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
        self.append_media(at, tokens, &[])
    }

    /// The same, with media that start in them, by the session's tokens.
    pub fn append_media(&mut self, at: u32, tokens: &[u32], media: &[Medium]) -> Result<()> {
        self.with_path(at, |path, rows| path.append_media(&mut rows.chunks, tokens, media))?;
        let session = self.session_mut(at)?;
        session.who.length = u32::try_from(session.path.tokens().len()).unwrap_or(u32::MAX);
        self.inquire_after(at, tokens.len());
        Ok(())
    }

    /// Does something to a path, and tells the policies which chunks are in use now.
    pub(super) fn with_path<R>(
        &mut self,
        at: u32,
        act: impl FnOnce(&mut Path, &mut super::Board) -> Result<R>,
    ) -> Result<R> {
        let space = self.session(at)?.space;
        let board = self.spaces[space as usize].board;
        let session = &mut self.sessions[at];
        let rows = &mut self.boards[board as usize];
        let (unknown, before) = (session.path.known(), rows.chunks.len());
        let result = act(&mut session.path, rows);
        let more = rows.chunks.len() - before;
        self.spaces[space as usize].rows += more as u32;
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
        let chunks = session.path.keys().len();
        session.asked = session.asked.min(chunks);
        self.cut_inquiry(at, chunks);
        self.were_held(board, &freed);
        self.were_held(board, &old);
        self.settle();
        Ok(Truncated { tokens: tokens as u64 })
    }

    /// Another session that goes on from where one is.
    pub fn fork(&mut self, at: u32, opts: &SessionOpts<'_>) -> Result<u32> {
        let space = self.session(at)?.space;
        let other = self.open_session(space, opts)?;
        let path = &self.session(at)?.path;
        let (tokens, media) = (path.tokens().to_vec(), path.media().to_vec());
        if let Err(error) = self.append_media(other, &tokens, &media) {
            self.close_session(other)?;
            return Err(error);
        }
        Ok(other)
    }

    /// Ends a session: its chunks may leave. Its moves go on.
    pub fn close_session(&mut self, at: u32) -> Result<()> {
        let board = self.spaces[self.session(at)?.space as usize].board;
        self.forget_inquiry(at);
        let Some(session) = self.sessions.remove(at) else { return Ok(()) };
        let old = held_by(&session.path);
        let mut freed = Vec::new();
        let chunks = &mut self.boards[board as usize].chunks;
        let closed = session.path.close(chunks, &mut |slot| freed.push(slot));
        // Those are the ones that may go now; one of an older tail is only there.
        self.were_held(board, &freed);
        self.were_held(board, &old);
        self.end_holds(board, session.holds);
        self.session_left(session.space);
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
        if deed == Deed::Put && rectangle.wanted != Wanted::All {
            fail!(Invalid, "a put is one of a whole rectangle");
        }
        let all = (end - first + usize::from(tail)) as u32;
        let picked = match &rectangle.wanted {
            Wanted::Chunks(picked) => Some(&picked[..]),
            _ => None,
        };
        let each = u64::from(self.boards[board as usize].layout.chunk_tokens());
        let tokens = match picked {
            Some(picked) => tokens_of(picked, all, rectangle.tokens, each)?,
            None => rectangle.tokens,
        };
        let tokens = u32::try_from(tokens).map_err(|_| Status::Limit)?;
        let chunks = picked.map_or(all, |picked| picked.len() as u32);
        let Rectangle { first_layer, layers, by_layer, wanted, views, after, .. } = &rectangle;
        self.check_views((board, deed), views, *first_layer, tokens, chunks)?;
        let who = self.session(at)?.who;
        let mut spec = MoveSpec {
            board,
            flow: at,
            who,
            lane,
            deed,
            level,
            slots: Vec::new(),
            asked: Vec::new(),
            first_layer: *first_layer,
            layers: *layers,
            by_layer: *by_layer,
            by_chunk: false,
            needed_from: Vec::new(),
            views: views.clone(),
            after: *after,
            ticket,
        };
        // What is refused sends nobody away.
        self.check_move(&spec, chunks as usize)?;
        spec.slots = match deed {
            Deed::Put => self.rows_of(at, first, end, tail)?,
            Deed::Get | Deed::Prefetch => self.rows_there(at, first, end, tail)?,
        };
        pick(&mut spec.slots, picked);
        if deed == Deed::Get && spec.slots.contains(&NONE) {
            spec.asked = self.ids_of(at, first, end, tail)?;
        }
        pick(&mut spec.asked, picked);
        if *wanted == Wanted::Needed {
            let layout = &self.boards[board as usize].layout;
            let end = rectangle.first_token + rectangle.tokens;
            let of = *first_layer..first_layer + layers;
            spec.needed_from = needed_from(layout, of, first as u64, end);
        }
        self.submit(spec)
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

    /// The rows of chunks of a path, NONE where there is none: who only looks for chunks
    /// sends nobody away for those that are not there.
    fn rows_there(&mut self, at: u32, first: usize, end: usize, tail: bool) -> Result<Vec<Slot>> {
        self.with_path(at, |path, rows| path.refresh(&mut rows.chunks))?;
        let path = &self.sessions[at].path;
        let mut slots = Vec::new();
        slots.try_reserve_exact(end - first + 1).map_err(|_| Status::NoMem)?;
        slots.extend_from_slice(&path.slots()[first..end]);
        slots.extend(tail.then(|| path.tail().unwrap_or(NONE)));
        Ok(slots)
    }

    /// What policies call chunks of a path, also those that are not there.
    fn ids_of(&self, at: u32, first: usize, end: usize, tail: bool) -> Result<Vec<u64>> {
        let session = self.session(at)?;
        let rows = &self.boards[self.spaces[session.space as usize].board as usize];
        let mut ids = Vec::new();
        ids.try_reserve_exact(end - first + 1).map_err(|_| Status::NoMem)?;
        ids.extend(session.path.keys()[first..end].iter().map(id_of));
        ids.extend(session.path.tail().filter(|_| tail).map(|slot| rows.id(slot)));
        Ok(ids)
    }

    /// The rows of chunks of a path, made where there are none if nobody has to leave for
    /// that; else those that are there.
    pub(super) fn rows_if_free(&mut self, at: u32, first: u64, tokens: u64) -> Result<Vec<Slot>> {
        let (from, end, tail) = self.chunks_of(at, first, tokens)?;
        let known = self.known_chunks(at, first, tokens)?;
        let path = &self.sessions[at].path;
        let all = path.slots()[..end].iter().filter(|&&slot| slot == NONE).count();
        match all + usize::from(tail) <= self.free_rows() {
            true => self.rows_of(at, from, end, tail),
            false => Ok(known.into_iter().map(|at| at.slot).collect()),
        }
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

    /// The chunks of a range of tokens that are in the table, in their order.
    pub(super) fn known_chunks(&mut self, at: u32, first: u64, tokens: u64) -> Result<Vec<At>> {
        let (first, end, tail) = self.chunks_of(at, first, tokens)?;
        self.with_path(at, |path, rows| path.refresh(&mut rows.chunks))?;
        let session = self.session(at)?;
        let board = self.spaces[session.space as usize].board;
        let slots = session.path.slots()[first..end].iter().copied().filter(|&slot| slot != NONE);
        let slots = slots.chain(session.path.tail().filter(|_| tail));
        Ok(slots.map(|slot| At { board, slot }).collect())
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

    /// Passes on to the policies what the engine says of the future of a session.
    pub fn hint(&mut self, at: u32, hint: &Hint) -> Result<()> {
        let session = self.session(at)?;
        let board = self.spaces[session.space as usize].board;
        let (who, slots) = (session.who, session.path.slots().to_vec());
        self.tell_hint(board, &slots, &who, hint)
    }
}

/// Leaves those of a rectangle's chunks that were picked.
fn pick<T: Copy>(all: &mut Vec<T>, picked: Option<&[u32]>) {
    let Some(picked) = picked.filter(|_| !all.is_empty()) else { return };
    let mut kept = 0;
    // They ascend, so none is read after it was written over. A tail that is not there has
    // no name yet.
    for &from in picked {
        if let Some(&one) = all.get(from as usize) {
            all[kept] = one;
            kept += 1;
        }
    }
    all.truncate(kept);
}

/// The tokens of some of `all` chunks, which have `tokens` together, each as many as any
/// other but the last.
fn tokens_of(picked: &[u32], all: u32, tokens: u64, each: u64) -> Result<u64> {
    let ascend = picked.is_sorted_by(|a, b| a < b);
    let Some(&last) = picked.last().filter(|&&last| ascend && last < all) else {
        fail!(
            Invalid,
            "chunks of a move: one or more, ascending, each once, below the {all} of its tokens"
        );
    };
    let missing = if last + 1 == all { u64::from(all) * each - tokens } else { 0 };
    Ok(picked.len() as u64 * each - missing)
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

/// For each layer of some, the first chunk after `first` that going on at a token needs.
fn needed_from(layout: &Layout, layers: Range<usize>, first: u64, end: u64) -> Vec<u32> {
    let each = u64::from(layout.chunk_tokens());
    let from = |layer| {
        let reach = layout.group(layer).map_or(u64::MAX, |group| group.rule.reach_tokens());
        (end.saturating_sub(reach) / each).saturating_sub(first) as u32
    };
    layers.map(from).collect()
}

/// The chunks that a path holds.
fn held_by(path: &Path) -> Vec<Slot> {
    let full = path.slots().iter().copied().filter(|&slot| slot != NONE);
    full.chain(path.tail()).collect()
}
