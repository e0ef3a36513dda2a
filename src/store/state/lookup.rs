//! Lookups: how far a sequence could go on with what is there, and what that takes.
//! Nobody's use is counted: whoever chooses between places asks many and takes one.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::format::keys::chain::Chain;
use crate::meta::chunks::{Chunks, PLACES};
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;
use crate::meta::layout::Layout;
use crate::meta::reuse::{self, Found, Reach, State};
use crate::store::plan::{Route, SOURCES};
use crate::store::state::StoreState;
use crate::store::token_path::MAX_TOKENS;

const DEVICE: usize = Tier::Device as usize;
const HOST: usize = Tier::Host as usize;
const DISK: usize = Tier::Disk as usize;
const REMOTE: usize = Tier::Remote as usize;
/// Chunks for which memory is kept between lookups.
pub(super) const MOST_KEPT: usize = 1 << 17;

/// Tokens in a row of which the same can be said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch {
    /// The first one.
    pub first_token: u64,
    /// How many.
    pub tokens: u64,
    /// What they are good for.
    pub state: State,
    /// The farthest tier that something of them must be read from.
    pub farthest: Option<usize>,
    /// Bytes to be read from each tier.
    pub bytes: [u64; PLACES],
    /// Bytes that are on their way from outside, and in no tier yet.
    pub pending_bytes: u64,
    /// How long loading them takes by itself.
    pub load_ns: u64,
}

/// What a lookup has found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Tokens that were asked for.
    pub tokens: u64,
    /// The longest prefix that can be gone on from now.
    pub now_tokens: u64,
    /// The same, once what is on its way has come.
    pub soon_tokens: u64,
    /// All tokens, in their order: what has to be loaded to go on after
    /// `soon_tokens`, or after all of them where holes can be computed. Those of
    /// chunks that are not full are misses, but for a session's own.
    pub ranges: Vec<Stretch>,
    /// Bytes to be read from each tier.
    pub bytes: [u64; PLACES],
    /// Bytes that are on their way from outside.
    pub pending_bytes: u64,
    /// How long loading all that takes, and what waits before it.
    pub load_ns: u64,
}

/// Memory of lookups, used again.
#[derive(Default)]
pub(super) struct Scratch {
    keys: Vec<Key>,
    pub(super) slots: Vec<Slot>,
    pub(super) found: Vec<Found>,
    look: Look,
}

impl StoreState {
    /// Looks a sequence up in a namespace.
    pub fn lookup(&mut self, space: u32, tokens: &[u32]) -> Result<&Look> {
        let (home, _) = self.home_of(space)?;
        let each = self.tables[home.table as usize].layout.chunk_tokens();
        if tokens.len() > MAX_TOKENS {
            fail!(Limit, "a lookup of {} tokens, the limit is {MAX_TOKENS}", tokens.len());
        }
        let mut keys = std::mem::take(&mut self.scratch.keys);
        room(&mut keys, tokens.len() / each as usize)?;
        let hashed = Chain::new(home.key, each)?.extend(tokens, &[], &mut keys);
        let looked = match hashed {
            Ok(_) => self.look_up(space, &keys, tokens.len() as u64),
            Err(error) => Err(error),
        };
        self.scratch.keys = keys;
        looked.map(|()| &self.scratch.look)
    }

    /// Looks up the keys of a sequence's full chunks; `tokens` is its length. Who has
    /// hashed them before need not keep the store waiting meanwhile.
    pub fn lookup_keys(&mut self, space: u32, keys: &[Key], tokens: u64) -> Result<&Look> {
        let (home, _) = self.home_of(space)?;
        let each = u64::from(self.tables[home.table as usize].layout.chunk_tokens());
        if tokens > MAX_TOKENS as u64 || keys.len() as u64 != tokens / each {
            let many = keys.len();
            fail!(Invalid, "{many} keys are not those of {tokens} tokens, {each} a chunk");
        }
        self.look_up(space, keys, tokens)?;
        Ok(&self.scratch.look)
    }

    /// For each key, the tiers that have every cell of that chunk of a namespace (bit 0
    /// the device), and [`WHOLE`](crate::meta::chunks::WHOLE) if every cell is in some of
    /// this store; the remote's bit is a hint.
    pub fn exists(&self, space: u32, keys: &[Key], found: &mut [u8]) -> Result<()> {
        const GROUP: usize = 64;
        let chunks = &self.home_of(space)?.1.chunks;
        let mut slots = [NONE; GROUP];
        for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
            let slots = &mut slots[..keys.len()];
            chunks.find_many(keys, slots);
            for (found, &slot) in found.iter_mut().zip(&*slots) {
                // Keys may be anyone's.
                let is_it = chunks
                    .chunk(slot)
                    .is_some_and(|row| row.namespace() == space && row.owner().is_none());
                *found = if is_it { chunks.tiers_believed(slot) } else { 0 };
            }
        }
        Ok(())
    }

    /// Looks at the path of a session: with what others have stored since.
    pub fn look_session(&mut self, session: u32) -> Result<&Look> {
        let (space, tokens, reach) = self.find_path(session)?;
        self.describe(space, tokens, reach)?;
        Ok(&self.scratch.look)
    }

    fn home_of(&self, space: u32) -> Result<(super::Space, &super::ChunkTable)> {
        let Some(&home) = self.spaces.get(space as usize) else {
            fail!(NotFound, "there is no namespace {space}");
        };
        Ok((home, &self.tables[home.table as usize]))
    }

    fn look_up(&mut self, space: u32, keys: &[Key], tokens: u64) -> Result<()> {
        let table = self.home_of(space)?.0.table as usize;
        let scratch = &mut self.scratch;
        room(&mut scratch.slots, keys.len())?;
        scratch.slots.resize(keys.len(), NONE);
        let rows = &self.tables[table];
        rows.chunks.find_many(keys, &mut scratch.slots);
        // Keys may be anyone's.
        let each = rows.layout.chunk_tokens();
        for (at, slot) in scratch.slots.iter_mut().enumerate() {
            let is_it = rows.chunks.chunk(*slot).is_some_and(|row| {
                (row.namespace(), row.position() as usize) == (space, at)
                    && row.valid_tokens() == each
            });
            *slot = if is_it { *slot } else { NONE };
        }
        let reach = scratch.look(&rows.chunks, &rows.layout)?;
        self.describe(space, tokens, reach)
    }

    /// Finds the chunks of a session: its namespace, its tokens, how far they reach.
    pub(super) fn find_path(&mut self, session: u32) -> Result<(u32, u64, Reach)> {
        let space = self.session(session)?.space;
        let rows = &self.tables[self.home_of(space)?.0.table as usize];
        let (path, scratch) = (&self.sessions[session].path, &mut self.scratch);
        room(&mut scratch.slots, path.slots().len() + 1)?;
        scratch.slots.extend_from_slice(path.slots());
        if let Some(first) = path.slots().iter().position(|&slot| slot == NONE) {
            rows.chunks.find_many(&path.keys()[first..], &mut scratch.slots[first..]);
        }
        scratch.slots.extend(path.tail());
        let tokens = path.tokens().len() as u64;
        let reach = scratch.look(&rows.chunks, &rows.layout)?;
        Ok((space, tokens, reach))
    }

    /// Says what was found.
    fn describe(&mut self, space: u32, tokens: u64, reach: Reach) -> Result<()> {
        let home = self.home_of(space)?.0;
        let rows = &self.tables[home.table as usize];
        let routes = self.routes(space, 0)?;
        let scratch = &mut self.scratch;
        let (slots, found) = (&scratch.slots, &mut scratch.found);
        let until = if home.holes { slots.len() } else { reach.soon_chunks };
        let moves = reuse::choose(&rows.chunks, &rows.layout, slots, until, true, found)?;
        let look = &mut scratch.look;
        (look.tokens, look.bytes, look.pending_bytes) = (tokens, moves.bytes, 0);
        (look.now_tokens, look.soon_tokens) = (reach.tokens, reach.soon_tokens);
        look.ranges.clear();
        let (mut counts, mut at) = ([0; SOURCES], 0);
        for range in reuse::ranges(found) {
            let parts = &found[range.first..range.first + range.chunks];
            let pending = parts.iter().map(|one| pending_bytes(&rows.layout, one)).sum();
            let of = |tier: usize| parts.iter().filter(|one| one.bytes[tier] > 0).count();
            let copies = parts.iter().filter(|one| loads(one)).count();
            let these = [copies, of(DISK), of(REMOTE), of(DEVICE)];
            let load_ns = time(&routes, &range.bytes, pending, these, false);
            look.pending_bytes += pending;
            counts.iter_mut().zip(these).for_each(|(sum, n)| *sum += n);
            let stretch = Stretch {
                first_token: at,
                tokens: range.tokens,
                state: range.state,
                farthest: range.farthest,
                bytes: range.bytes,
                pending_bytes: pending,
                load_ns,
            };
            at += range.tokens;
            add(&mut look.ranges, stretch)?;
        }
        look.load_ns = time(&routes, &look.bytes, look.pending_bytes, counts, true);
        if tokens > at {
            let rest = Stretch { first_token: at, tokens: tokens - at, ..MISS };
            add(&mut look.ranges, rest)?;
        }
        Ok(())
    }
}

const MISS: Stretch = Stretch {
    first_token: 0,
    tokens: 0,
    state: State::Miss,
    farthest: None,
    bytes: [0; PLACES],
    pending_bytes: 0,
    load_ns: 0,
};

impl Scratch {
    fn look(&mut self, chunks: &Chunks, layout: &Layout) -> Result<Reach> {
        room(&mut self.found, self.slots.len())?;
        self.found.resize(self.slots.len(), Found::default());
        reuse::look(chunks, layout, &self.slots, &mut self.found)
    }
}

/// Empties a list, and sees to it that so many fit. What a very long sequence needed
/// is not kept for short ones.
fn room<T>(list: &mut Vec<T>, count: usize) -> Result<()> {
    list.clear();
    if list.capacity() > count.max(MOST_KEPT) {
        *list = Vec::new();
    }
    if list.try_reserve(count).is_err() {
        fail!(NoMem, "no memory to look at {count} chunks");
    }
    Ok(())
}

/// Adds a range, or lengthens the last one where that is a miss, too.
fn add(ranges: &mut Vec<Stretch>, next: Stretch) -> Result<()> {
    if let Some(last) =
        ranges.last_mut().filter(|last| (last.state, next.state) == (State::Miss, State::Miss))
    {
        last.tokens += next.tokens;
        return Ok(());
    }
    if ranges.try_reserve(1).is_err() {
        fail!(NoMem, "no memory for another range");
    }
    ranges.push(next);
    Ok(())
}

/// Whether something of a chunk has to be copied that is not on the device.
fn loads(one: &Found) -> bool {
    let uses_device =
        one.bytes[DEVICE] > 0 && one.bytes[HOST] + one.bytes[DISK] + one.bytes[REMOTE] == 0;
    matches!(one.state, State::Hit | State::Pending) && !uses_device
}

/// Bytes that are needed of a chunk and in no tier yet.
pub(super) fn pending_bytes(layout: &Layout, one: &Found) -> u64 {
    if one.state != State::Pending {
        return 0;
    }
    let groups = layout.groups().iter().enumerate().filter(|(g, _)| one.needed >> g & 1 != 0);
    let bytes =
        groups.map(|(_, group)| group.planes(one.tokens).bytes() * group.layers.len() as u64);
    bytes.sum::<u64>().saturating_sub(one.bytes.iter().sum())
}

/// How long so many chunks take to be copied, and those of them on disk to be read
/// beside that, those at the remote to be fetched, and those on the device to be copied there.
fn time(
    routes: &[Route; SOURCES],
    bytes: &[u64; PLACES],
    pending_bytes: u64,
    counts: [usize; SOURCES],
    queued: bool,
) -> u64 {
    let above = bytes[HOST] + bytes[DISK] + bytes[REMOTE] + pending_bytes;
    let moved = [above, bytes[DISK], bytes[REMOTE], bytes[DEVICE]];
    let ways = routes.iter().zip(moved).zip(counts);
    let ns = ways.filter(|((_, bytes), _)| *bytes > 0).map(|((route, bytes), chunks)| {
        let waits = if queued { route.queued_ns } else { 0.0 };
        route.speed.ns(bytes, chunks as u64) + waits
    });
    ns.fold(0.0, f64::max) as u64
}
