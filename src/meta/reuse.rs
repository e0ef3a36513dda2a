//! What a lookup means: how far a sequence can go on with what is there, what of
//! it each group of layers needs for that, and what has to be moved.
//!
//! To go on from a point, a group needs the tokens that its rule reaches back
//! over. All rules are one here: full reaches to the start, a window over its
//! tokens, a state over the last one. A chunk that has one of those tokens must be
//! there with every layer of the group.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::chunks::{Chunk, Chunks, TIERS};
use crate::meta::index::Slot;
use crate::meta::layout::{Layout, MAX_GROUPS};

/// The remote among the tiers.
const REMOTE: usize = Tier::Remote as usize;

/// What a chunk of a path is good for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// What is needed of it is not all there: the engine computes it.
    #[default]
    Miss,
    /// All that is needed of it can be read.
    Hit,
    /// All that is needed of it can be read, or is on its way into some tier.
    Pending,
    /// Nothing is needed of it: no group reaches back so far.
    Unneeded,
}

/// What is known of a chunk of a path. Groups are bits, group 0 the lowest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkReuse {
    /// Groups whose every cell can be read in some tier.
    pub ready: u64,
    /// The same if all that is on its way has come.
    pub soon: u64,
    /// Groups that need it.
    pub needed: u64,
    /// Bytes of the cells that are needed, in the nearest tier of each.
    pub bytes: [u64; TIERS],
    /// Its tokens.
    pub tokens: u32,
    /// What it is good for.
    pub state: State,
    /// Set by the caller: if it is needed it is computed, whatever is there.
    pub given_up: bool,
}

impl ChunkReuse {
    /// The farthest tier that a needed cell must be read from.
    pub fn farthest(&self) -> Option<usize> {
        self.bytes.iter().rposition(|&bytes| bytes > 0)
    }
}

/// How far a path goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReusablePrefix {
    /// Chunks of the longest prefix from which the sequence can go on now.
    pub chunks: usize,
    /// Its tokens.
    pub tokens: u64,
    /// The same, once what is on its way has come.
    pub soon_chunks: usize,
    /// Its tokens.
    pub soon_tokens: u64,
}

/// What it takes to go on from a point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseCost {
    /// Bytes to be read from each tier; those of the device are there.
    pub bytes: [u64; TIERS],
    /// Tokens of chunks that are used as they are, or not needed.
    pub reused_tokens: u64,
    /// Tokens of chunks that must be computed first, in holes or at the end.
    pub computed_tokens: u64,
}

/// Looks at the chunks of a path, from the first on, NONE where one is not there.
/// Fills a [`ChunkReuse`] for each and says how far a prefix of them reaches.
pub fn find_reusable(
    chunks: &Chunks,
    layout: &Layout,
    path: &[Slot],
    found: &mut [ChunkReuse],
) -> Result<ReusablePrefix> {
    check(chunks, layout, path, found)?;
    let all = u64::MAX >> (MAX_GROUPS - layout.groups().len());
    // Tokens in a row that each group has before the point, now and soon.
    let mut runs = [[0u64; 2]; MAX_GROUPS];
    let (mut reach, mut tokens) = (ReusablePrefix::default(), 0u64);
    for (at, (&slot, found)) in path.iter().zip(found).enumerate() {
        let row = chunks.chunk(slot);
        *found = ChunkReuse { tokens: layout.chunk_tokens(), ..ChunkReuse::default() };
        if let Some(row) = row {
            if row.position() as usize != at {
                fail!(Invalid, "chunk {at} of a path is number {} of its own", row.position());
            }
            if row.valid_tokens() < layout.chunk_tokens() && at + 1 < path.len() {
                fail!(Invalid, "chunk {at} of a path is partial, and not the last");
            }
            found.tokens = row.valid_tokens();
            (found.ready, found.soon) = groups_of(chunks, layout, slot, row, all);
        }
        tokens += u64::from(found.tokens);
        let mut goes = [true; 2];
        for (g, (runs, group)) in runs.iter_mut().zip(layout.groups()).enumerate() {
            let reach = group.rule.reach_tokens().min(tokens);
            for (i, has) in [found.ready, found.soon].into_iter().enumerate() {
                let kept = has >> g & 1;
                runs[i] = (runs[i] + u64::from(found.tokens)) * kept;
                goes[i] &= runs[i] >= reach;
            }
        }
        if goes[0] {
            (reach.chunks, reach.tokens) = (at + 1, tokens);
        }
        if goes[1] {
            (reach.soon_chunks, reach.soon_tokens) = (at + 1, tokens);
        }
    }
    Ok(reach)
}

fn check(chunks: &Chunks, layout: &Layout, path: &[Slot], found: &[ChunkReuse]) -> Result<()> {
    let shape = chunks.shape();
    if shape.layers != layout.layers() || shape.chunk_tokens != layout.chunk_tokens() {
        fail!(Invalid, "the table is not one for this layout");
    }
    if path.len() != found.len() {
        fail!(Invalid, "{} chunks, and room for {}", path.len(), found.len());
    }
    Ok(())
}

/// The groups of a chunk that can be read, and those that can be soon.
#[inline]
fn groups_of(chunks: &Chunks, layout: &Layout, slot: Slot, row: &Chunk, all: u64) -> (u64, u64) {
    if usize::from(row.cells_somewhere()) == layout.layers() {
        return (all, all);
    }
    let (mut ready, mut soon) = (all, all);
    let remote = chunks.counts_remote();
    for (marks, &group) in chunks.marks(slot).unwrap_or_default().iter().zip(layout.group_of()) {
        let (there, coming) =
            (marks.there() != 0 || remote && marks.is_remote(), marks.arriving() != 0);
        ready &= !(u64::from(!there) << group);
        soon &= !(u64::from(!there & !coming) << group);
    }
    (ready, soon)
}

/// Says what is needed to go on after the first `until` chunks of a path that
/// [`find_reusable`] has looked at: of each chunk its state, the groups that need it and the
/// bytes to be read, the fewest chunks to be computed among them. A chunk that is
/// computed needs what is before it like any point. With `wait` what is on its way
/// is counted on. Chunks from `until` on are misses. May be called again, with
/// other chunks given up.
///
/// Without a miss before `until` the engine can load all and go on; that is so up to
/// what `find_reusable` returned. Else it must be able to compute holes.
pub fn plan_reuse(
    chunks: &Chunks,
    layout: &Layout,
    path: &[Slot],
    until: usize,
    wait: bool,
    found: &mut [ChunkReuse],
) -> Result<ReuseCost> {
    check(chunks, layout, path, found)?;
    if until > path.len() {
        fail!(Invalid, "{until} of {} chunks", path.len());
    }
    let mut moves = ReuseCost::default();
    let mut end: u64 = found.iter().take(until).map(|found| u64::from(found.tokens)).sum();
    // The point nearest behind that is gone on from. Those further behind reach
    // less far back, and need not be looked at.
    let mut point = end;
    for (at, (&slot, found)) in path.iter().zip(found).enumerate().rev() {
        (found.needed, found.bytes, found.state) = (0, [0; TIERS], State::Miss);
        if at >= until {
            continue;
        }
        for (g, group) in layout.groups().iter().enumerate() {
            let reached = end.saturating_add(group.rule.reach_tokens()) > point;
            found.needed |= u64::from(reached) << g;
        }
        let start = end - u64::from(found.tokens);
        found.state = match found.needed {
            0 => State::Unneeded,
            _ if found.given_up => State::Miss,
            needed if needed & !found.ready == 0 => State::Hit,
            needed if wait && needed & !found.soon == 0 => State::Pending,
            _ => State::Miss,
        };
        if found.state == State::Miss {
            moves.computed_tokens += u64::from(found.tokens);
            point = start;
        } else {
            moves.reused_tokens += u64::from(found.tokens);
            add_bytes(chunks, layout, slot, found);
            for (sum, bytes) in moves.bytes.iter_mut().zip(found.bytes) {
                *sum += bytes;
            }
        }
        end = start;
    }
    Ok(moves)
}

/// Adds up what is needed of a chunk by the nearest tier of each cell.
#[inline]
fn add_bytes(chunks: &Chunks, layout: &Layout, slot: Slot, found: &mut ChunkReuse) {
    let Some(row) = chunks.chunk(slot) else { return };
    let wanted = found.needed;
    let needed = |group: usize| wanted >> group & 1 != 0;
    // Mostly the whole depth of a chunk is in one tier, and in none before that.
    let places = if chunks.counts_remote() { TIERS } else { REMOTE };
    let first = row.cells()[..places].iter().position(|&cells| cells > 0);
    if let Some(tier) = first.filter(|&t| usize::from(row.cells()[t]) == layout.layers()) {
        for (_, group) in layout.groups().iter().enumerate().filter(|(g, _)| needed(*g)) {
            found.bytes[tier] += group.planes(found.tokens).bytes() * group.layers.len() as u64;
        }
        return;
    }
    let cells = chunks.marks(slot).unwrap_or_default().iter().zip(layout.group_of());
    for (marks, &g) in cells.filter(|(_, g)| needed(usize::from(**g))) {
        // One that is on its way is in no tier yet.
        let remote = (chunks.counts_remote() && marks.is_remote()).then_some(REMOTE);
        let Some(tier) = marks.nearest().or(remote) else { continue };
        if let Some(group) = layout.groups().get(usize::from(g)) {
            found.bytes[tier] += group.planes(found.tokens).bytes();
        }
    }
}

/// Chunks in a row of the same state and farthest tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first one.
    pub first: usize,
    /// How many.
    pub chunks: usize,
    /// Their tokens.
    pub tokens: u64,
    /// What they are good for.
    pub state: State,
    /// The farthest tier that something of them must be read from.
    pub farthest: Option<usize>,
    /// Bytes to be read from each tier.
    pub bytes: [u64; TIERS],
}

/// The ranges of a path, in its order.
pub fn ranges(found: &[ChunkReuse]) -> impl Iterator<Item = Range> + '_ {
    let mut first = 0;
    std::iter::from_fn(move || {
        let rest = found.get(first..)?;
        let head = rest.first()?;
        let (state, farthest) = (head.state, head.farthest());
        let mut range = Range { first, chunks: 0, tokens: 0, state, farthest, bytes: [0; TIERS] };
        for next in rest.iter().take_while(|f| (f.state, f.farthest()) == (state, farthest)) {
            range.chunks += 1;
            range.tokens += u64::from(next.tokens);
            for (sum, bytes) in range.bytes.iter_mut().zip(next.bytes) {
                *sum += bytes;
            }
        }
        first += range.chunks;
        Some(range)
    })
}
