//! Sessions: a token path in a namespace, its owner, and the cell ranges that may be requested of
//! it.

use std::ops::Range;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::fail;
use crate::format::keys::media::Medium;
use crate::meta::chunks::id_of;
use crate::meta::index::{NONE, Slot};
use crate::meta::layout::Layout;
use crate::policy::Hint;
use crate::policy::evictor::RequestContext;
pub use crate::store::state::batches::{LayerViews, PlaneView, Tokens, Views};
use crate::store::state::blocks::Holds;
use crate::store::state::transfer::{Level, TransferKind, TransferSpec};
use crate::store::state::{At, StoreState};
use crate::store::token_path::{Path, PathOwner};

/// Most bytes of a session's name.
pub const MAX_NAME_BYTES: usize = 256;

/// How to open a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionOpts<'a> {
    /// Name; empty = none.
    pub name: &'a [u8],
    /// Tenant.
    pub tenant: u32,
    /// Priority class; 0 is evicted first.
    pub priority: Option<u8>,
    /// Most tokens; 0 = not known.
    pub max_tokens: u32,
    /// Chunks that it stores are removed so long after its last put or get of them; 0 = never.
    pub ttl_ns: u64,
}

/// A session.
pub struct Session {
    pub(super) path: Path,
    pub(super) namespace: u32,
    pub(super) context: RequestContext,
    pub(super) ttl_ns: u64,
    /// Blocks that it holds by name.
    pub(super) holds: Holds,
    /// Chunks at its front that a remote lookup has covered.
    pub(super) looked_up: usize,
}

/// Outcome of [`StoreState::truncate`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncated {
    /// Tokens that remain.
    pub tokens: u64,
}

impl StoreState {
    /// Opens a session without tokens and returns its number.
    pub fn open_session(&mut self, namespace: u32, opts: &SessionOpts<'_>) -> Result<u32> {
        self.open_session_from(namespace, opts, None)
    }

    /// Opens a session with all tokens of another one.
    fn open_session_from(
        &mut self,
        namespace: u32,
        opts: &SessionOpts<'_>,
        fork: Option<u32>,
    ) -> Result<u32> {
        let Some(entry) = self.namespaces.get(namespace as usize).copied() else {
            fail!(NotFound, "there is no namespace {namespace}");
        };
        if opts.name.len() > MAX_NAME_BYTES {
            fail!(Limit, "a session name of {} bytes: at most {MAX_NAME_BYTES}", opts.name.len());
        }
        if !self.sessions.has_room() {
            fail!(
                Again,
                "{} sessions are open, the limit: close some, or raise sessions= in the \
                 store's spec",
                self.sessions.len()
            );
        }
        self.session_serial += 1;
        let serial = self.session_serial.to_le_bytes();
        // The name and serial are part of the keys of private chunks, so that two sessions of one name
        // have different tails.
        let name = [opts.name, &[0], &serial].concat();
        let rows = &mut self.tables[entry.table as usize];
        let chunk_tokens = rows.layout.chunk_tokens();
        let mut context = RequestContext {
            session: Some(self.session_serial),
            tenant: opts.tenant,
            priority: opts.priority,
            length: 0,
            max_length: opts.max_tokens,
            tokens_each: chunk_tokens,
        };
        let session = self.sessions.vacant();
        let (key, namespace, holes) = (entry.key, namespace, entry.holes);
        let path = match fork.and_then(|fork| self.sessions.get(fork)) {
            Some(fork) => fork.path.fork(&mut rows.chunks, session, &name)?,
            None => Path::new(PathOwner { key, namespace, chunk_tokens, holes, session }, &name)?,
        };
        context.length = u32::try_from(path.tokens().len()).unwrap_or(u32::MAX);
        let added = self.sessions.add(Session {
            path,
            namespace,
            context,
            ttl_ns: opts.ttl_ns,
            holds: Holds::default(),
            looked_up: 0,
        })?;
        self.namespaces.session_opened(namespace);
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

    /// Appends tokens to a session.
    pub fn append(&mut self, at: u32, tokens: &[u32]) -> Result<()> {
        self.append_media(at, tokens, &[])
    }

    /// Appends tokens and media that start in them; media positions count from the start of the
    /// session.
    pub fn append_media(&mut self, at: u32, tokens: &[u32], media: &[Medium]) -> Result<()> {
        let new = self.session(at)?.path.keys().len()..usize::MAX;
        self.with_path(at, new, |path, rows| path.append_media(&mut rows.chunks, tokens, media))?;
        let session = self.session_mut(at)?;
        session.context.length = u32::try_from(session.path.tokens().len()).unwrap_or(u32::MAX);
        self.start_lookup_after_append(at, tokens.len());
        Ok(())
    }

    /// Appends tokens, and media whose positions count from the first of these.
    pub fn append_after(&mut self, at: u32, tokens: &[u32], mut media: Vec<Medium>) -> Result<()> {
        let before = self.session(at)?.path.tokens().len() as u64;
        for one in &mut media {
            one.token = one.token.saturating_add(before);
        }
        self.append_media(at, tokens, &media)
    }

    /// A number of tokens from `first` on; 0 = all up to the end of the session.
    pub fn range_tokens(&self, at: u32, first: u64, tokens: u64) -> Result<u64> {
        let all = self.session(at)?.path.tokens().len() as u64;
        Ok(if tokens == 0 { all.saturating_sub(first) } else { tokens })
    }

    /// Runs `act` on some chunks of a path, then notifies the policies which of those are
    /// referenced now.
    pub(super) fn with_path<R>(
        &mut self,
        at: u32,
        chunks: Range<usize>,
        act: impl FnOnce(&mut Path, &mut super::ChunkTable) -> Result<R>,
    ) -> Result<R> {
        let namespace = self.session(at)?.namespace;
        let table = self.namespaces[namespace as usize].table;
        let session = &mut self.sessions[at];
        let rows = &mut self.tables[table as usize];
        let before = rows.chunks.len();
        let result = act(&mut session.path, rows);
        let more = rows.chunks.len() - before;
        self.namespaces[namespace as usize].rows += more as u32;
        for i in chunks.start..chunks.end.min(self.sessions[at].path.slots().len()) {
            let slot = self.sessions[at].path.slots()[i];
            if slot != NONE {
                self.note_held(table, slot);
            }
        }
        result
    }

    /// Looks up chunks of a path again that had no row.
    pub(super) fn refresh(&mut self, at: u32, chunks: Range<usize>) -> Result<()> {
        let first = self.session_mut(at)?.path.known().max(chunks.start);
        let chunks = first..chunks.end;
        if chunks.is_empty() {
            return Ok(());
        }
        self.with_path(at, chunks.clone(), |path, rows| path.refresh(&mut rows.chunks, chunks))
    }

    /// Adds rows for the full chunks of a path before `end` that have none.
    pub(super) fn make_chunks(&mut self, at: u32, end: usize) -> Result<()> {
        let first = self.session_mut(at)?.path.known();
        self.with_path(at, first..end, |path, rows| path.make(&mut rows.chunks, end))
    }

    /// Truncates a session to so many tokens.
    pub fn truncate(&mut self, at: u32, tokens: u64) -> Result<Truncated> {
        let tokens = usize::try_from(tokens).map_err(|_| Status::Invalid)?;
        let table = self.namespaces[self.session(at)?.namespace as usize].table;
        let session = &mut self.sessions[at];
        let old = session.path.held_after_event(tokens);
        let mut freed = Vec::new();
        let chunks = &mut self.tables[table as usize].chunks;
        session.path.truncate(chunks, tokens, &mut |slot| freed.push(slot))?;
        session.context.length = u32::try_from(tokens).unwrap_or(u32::MAX);
        let chunks = session.path.keys().len();
        session.looked_up = session.looked_up.min(chunks);
        self.shorten_lookup(at, chunks);
        self.were_held(table, &freed);
        self.were_held(table, &old);
        self.settle();
        Ok(Truncated { tokens: tokens as u64 })
    }

    /// Opens a session with the tokens of `at`.
    pub fn fork(&mut self, at: u32, opts: &SessionOpts<'_>) -> Result<u32> {
        let namespace = self.session(at)?.namespace;
        let fork = self.open_session_from(namespace, opts, Some(at))?;
        self.with_path(fork, 0..usize::MAX, |path, rows| {
            path.refresh(&mut rows.chunks, 0..usize::MAX)
        })?;
        self.start_lookup_after_append(fork, self.sessions[fork].path.tokens().len());
        Ok(fork)
    }

    /// Closes a session and releases its chunks. Its transfers continue.
    pub fn close_session(&mut self, at: u32) -> Result<()> {
        let table = self.namespaces[self.session(at)?.namespace as usize].table;
        self.forget_lookup(at);
        let Some(session) = self.sessions.remove(at) else { return Ok(()) };
        let old = session.path.held_after_event(0);
        let mut freed = Vec::new();
        let chunks = &mut self.tables[table as usize].chunks;
        let closed = session.path.close(chunks, &mut |slot| freed.push(slot));
        // These are referenced no more. An older tail of the session may have left already.
        self.were_held(table, &freed);
        self.were_held(table, &old);
        self.end_holds(table, session.holds);
        self.namespaces.session_closed(session.namespace);
        self.settle();
        closed
    }

    /// Releases references to chunks, the last first, so that children are released before parents.
    fn were_held(&mut self, table: u32, slots: &[Slot]) {
        for &slot in slots.iter().rev() {
            self.note_held(table, slot);
            self.tidy(table, slot);
        }
    }

    /// Range of full chunks of a range of tokens, and whether the tail belongs to it.
    pub(super) fn chunks_of(
        &self,
        at: u32,
        first: u64,
        tokens: u64,
    ) -> Result<(usize, usize, bool)> {
        let session = self.session(at)?;
        let table = self.namespaces[session.namespace as usize].table;
        let each = u64::from(self.tables[table as usize].layout.chunk_tokens());
        let all = session.path.tokens().len() as u64;
        let Some(end) = first.checked_add(tokens).filter(|&end| end <= all && tokens > 0) else {
            if all == 0 {
                fail!(Invalid, "the session has no tokens yet: append those of the KV first");
            }
            fail!(
                Invalid,
                "{tokens} tokens from token {first} on, but the session has {all}: give at least 1, \
                 and no more than it has; append the others first"
            );
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

    /// Rows of chunks of a path, NONE for those without a row. A get evicts nothing to make rows.
    pub(super) fn rows_there(
        &mut self,
        at: u32,
        first: usize,
        end: usize,
        tail: bool,
    ) -> Result<Vec<Slot>> {
        self.refresh(at, first..end)?;
        let path = &self.sessions[at].path;
        let mut slots = Vec::new();
        slots.try_reserve_exact(end - first + 1).map_err(|_| Status::NoMem)?;
        slots.extend_from_slice(&path.slots()[first..end]);
        slots.extend(tail.then(|| path.tail().unwrap_or(NONE)));
        Ok(slots)
    }

    /// Policy ids of chunks of a path, those without rows included.
    pub(super) fn ids_of(&self, at: u32, first: usize, end: usize, tail: bool) -> Result<Vec<u64>> {
        let session = self.session(at)?;
        let rows = &self.tables[self.namespaces[session.namespace as usize].table as usize];
        let mut ids = Vec::new();
        ids.try_reserve_exact(end - first + 1).map_err(|_| Status::NoMem)?;
        ids.extend(session.path.keys()[first..end].iter().map(id_of));
        ids.extend(session.path.tail().filter(|_| tail).map(|slot| rows.id(slot)));
        Ok(ids)
    }

    /// Rows of chunks of a path. Missing rows are added if that evicts nothing; else only existing
    /// chunks are returned.
    pub(super) fn rows_if_free(&mut self, at: u32, first: u64, tokens: u64) -> Result<Vec<Slot>> {
        let (from, end, tail) = self.chunks_of(at, first, tokens)?;
        let known = self.known_chunks(at, first, tokens)?;
        let missing = self.missing_before(at, end)?;
        match missing + usize::from(tail) <= self.free_rows() {
            true => self.rows_of(at, from, end, tail),
            false => Ok(known.into_iter().map(|at| at.slot).collect()),
        }
    }

    /// Number of chunks of a path before `end` without a row.
    pub(super) fn missing_before(&mut self, at: u32, end: usize) -> Result<usize> {
        let path = &mut self.session_mut(at)?.path;
        let known = path.known().min(end);
        Ok(path.slots()[known..end].iter().filter(|&&slot| slot == NONE).count())
    }

    /// Rows of chunks of a path; missing ones are added.
    pub(super) fn rows_of(
        &mut self,
        at: u32,
        first: usize,
        end: usize,
        tail: bool,
    ) -> Result<Vec<Slot>> {
        self.refresh(at, 0..end)?;
        let missing = self.missing_before(at, end)?;
        self.reserve_rows(missing + usize::from(tail))?;
        self.make_chunks(at, end)?;
        let mut slots = Vec::new();
        slots.try_reserve_exact(end - first + 1).map_err(|_| Status::NoMem)?;
        slots.extend_from_slice(&self.sessions[at].path.slots()[first..end]);
        if tail {
            let table = self.namespaces[self.sessions[at].namespace as usize].table;
            let mut freed = Vec::new();
            let made = self.with_path(at, end..end, |path, rows| {
                path.make_tail(&mut rows.chunks, &mut |slot| freed.push(slot))
            });
            self.were_held(table, &freed);
            slots.extend(made?);
        }
        Ok(slots)
    }

    /// Chunks of a range of tokens that have rows, in order.
    pub(super) fn known_chunks(&mut self, at: u32, first: u64, tokens: u64) -> Result<Vec<At>> {
        let (first, end, tail) = self.chunks_of(at, first, tokens)?;
        self.refresh(at, first..end)?;
        let session = self.session(at)?;
        let table = self.namespaces[session.namespace as usize].table;
        let slots = session.path.slots()[first..end].iter().copied().filter(|&slot| slot != NONE);
        let slots = slots.chain(session.path.tail().filter(|_| tail));
        Ok(slots.map(|slot| At { table, slot }).collect())
    }

    /// Releases the chunks of a part of a path, the last first, and returns them. The session can
    /// find the retained chunks again.
    pub(super) fn release_range(
        &mut self,
        at: u32,
        chunks: Range<usize>,
        tail: bool,
    ) -> Result<Vec<Slot>> {
        self.refresh(at, chunks.clone())?;
        let path = &self.sessions[at].path;
        let mut slots: Vec<Slot> = path.tail().filter(|_| tail).into_iter().collect();
        slots.extend(path.slots()[chunks.clone()].iter().rev().filter(|&&slot| slot != NONE));
        self.with_path(at, 0..0, |path, rows| path.release_range(&mut rows.chunks, chunks, tail))?;
        let table = self.namespaces[self.session(at)?.namespace as usize].table;
        slots.iter().for_each(|&slot| self.note_held(table, slot));
        Ok(slots)
    }

    /// Passes a hint about a session to the policies.
    pub fn hint(&mut self, at: u32, hint: &Hint) -> Result<()> {
        let session = self.session(at)?;
        let table = self.namespaces[session.namespace as usize].table;
        let (context, slots) = (session.context, session.path.slots().to_vec());
        self.notify_hint(table, &slots, &context, hint)
    }
}

impl Session {
    /// Its token path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of its namespace.
    pub fn namespace(&self) -> u32 {
        self.namespace
    }
}

// ---------- cell range
//
// Cell ranges of a session: tokens × layers, and the engine's tensors for them.

/// As a number of tokens: all that the session has when the transfer begins.
pub const TO_THE_END: u64 = u64::MAX;

/// Selection of cells of a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// All.
    #[default]
    All,
    /// Cells needed to continue after the last token: of windows and states only the end. Other
    /// cells of these layers are not touched and are no misses.
    Needed,
    /// These chunks of the range, by index, ascending. The views hold their tokens without gaps.
    Chunks(Vec<u32>),
}

/// A range of tokens by a range of layers of a session, with the engine's tensors.
pub struct CellRange {
    /// First token; a multiple of the chunk length.
    pub first_token: u64,
    /// Number of tokens: a multiple of the chunk length, or up to the end of the session, as with
    /// [`TO_THE_END`].
    pub tokens: u64,
    /// First layer.
    pub first_layer: usize,
    /// Number of layers.
    pub layers: usize,
    /// Each layer completes by itself.
    pub by_layer: bool,
    /// Selected cells; all of them for a put.
    pub wanted: Wanted,
    /// The engine's tensors.
    pub views: Arc<Views>,
    /// Device event before which no copy to or from the views may run. The engine keeps it until
    /// the transfer has completed.
    pub after: Option<Event>,
}

impl StoreState {
    /// Begins a put or get of a cell range and returns the number of the transfer.
    pub fn submit_cell_range(
        &mut self,
        at: u32,
        kind: TransferKind,
        level: Level,
        lane: usize,
        cell_range: CellRange,
    ) -> Result<u32> {
        self.begin_cell_range(at, (kind, level, lane), cell_range, None)
    }

    /// The same; with a ticket the transfer waits for [`StoreState::begin_waiting`].
    pub(super) fn begin_cell_range(
        &mut self,
        at: u32,
        (kind, level, lane): (TransferKind, Level, usize),
        mut cell_range: CellRange,
        ticket: Option<u64>,
    ) -> Result<u32> {
        if cell_range.tokens == TO_THE_END {
            let all = self.session(at)?.path.tokens().len() as u64;
            cell_range.tokens = all.saturating_sub(cell_range.first_token);
        }
        let CellRange { first_token, tokens, first_layer, layers, by_layer, wanted, views, after } =
            cell_range;
        let (first, end, tail) = self.chunks_of(at, first_token, tokens)?;
        let Session { namespace, context, ttl_ns, .. } = *self.session(at)?;
        let table = self.namespaces[namespace as usize].table;
        if kind == TransferKind::Put && wanted != Wanted::All {
            fail!(Invalid, "a put needs all cells of its layers and tokens: Wanted::All");
        }
        let all = (end - first + usize::from(tail)) as u32;
        let picked = match &wanted {
            Wanted::Chunks(picked) => Some(&picked[..]),
            _ => None,
        };
        let each = u64::from(self.tables[table as usize].layout.chunk_tokens());
        let moved = match picked {
            Some(picked) => tokens_of(picked, all, tokens, each)?,
            None => tokens,
        };
        let moved = u32::try_from(moved).map_err(|_| Status::Limit)?;
        let chunks = picked.map_or(all, |picked| picked.len() as u32);
        self.check_views((table, kind), &views, first_layer, moved, chunks)?;
        let mut spec = TransferSpec {
            table,
            flow: at,
            context,
            ttl_ns,
            lane,
            kind,
            level,
            slots: Vec::new(),
            requested: Vec::new(),
            first_layer,
            layers,
            by_layer,
            by_chunk: false,
            needed_from: Vec::new(),
            views,
            after,
            ticket,
        };
        // Checked before rows are added: a request that is refused must evict nothing.
        self.check_transfer(&spec, chunks as usize)?;
        spec.slots = match kind {
            TransferKind::Put => self.rows_of(at, first, end, tail)?,
            TransferKind::Get | TransferKind::Prefetch => self.rows_there(at, first, end, tail)?,
        };
        pick(&mut spec.slots, picked);
        if kind == TransferKind::Get && spec.slots.contains(&NONE) {
            spec.requested = self.ids_of(at, first, end, tail)?;
        }
        pick(&mut spec.requested, picked);
        if wanted == Wanted::Needed {
            let layout = &self.tables[table as usize].layout;
            let end = first_token + tokens;
            let of = first_layer..first_layer + layers;
            spec.needed_from = needed_from(layout, of, first as u64, end);
        }
        self.submit(spec)
    }
}

/// Keeps the picked elements of `all`.
fn pick<T: Copy>(all: &mut Vec<T>, picked: Option<&[u32]>) {
    let Some(picked) = picked.filter(|_| !all.is_empty()) else { return };
    let mut kept = 0;
    // The picks ascend, so no element is read after it was overwritten. A tail without a row has no
    // id yet.
    for &from in picked {
        if let Some(&one) = all.get(from as usize) {
            all[kept] = one;
            kept += 1;
        }
    }
    all.truncate(kept);
}

/// Tokens of the picked chunks out of `all` chunks with `tokens` tokens; each has `each` but the
/// last.
fn tokens_of(picked: &[u32], all: u32, tokens: u64, each: u64) -> Result<u64> {
    let ascend = picked.is_sorted_by(|a, b| a < b);
    let Some(&last) = picked.last().filter(|&&last| ascend && last < all) else {
        fail!(
            Invalid,
            "chunks of a transfer: one or more, ascending, each once, below the {all} of its tokens"
        );
    };
    let missing = if last + 1 == all { u64::from(all) * each - tokens } else { 0 };
    Ok(picked.len() as u64 * each - missing)
}

/// For each layer, the first chunk after `first` that is needed to continue at token `end`.
fn needed_from(layout: &Layout, layers: Range<usize>, first: u64, end: u64) -> Vec<u32> {
    let each = u64::from(layout.chunk_tokens());
    let from = |layer| {
        let reach = layout.group(layer).map_or(u64::MAX, |group| group.rule.reach_tokens());
        (end.saturating_sub(reach) / each).saturating_sub(first) as u32
    };
    layers.map(from).collect()
}

// ---------- views
//
// The engine's tensors of a transfer, copied from the caller's structs, which need not outlive the
// call.
