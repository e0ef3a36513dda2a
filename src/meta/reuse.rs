//! Reuse of stored KV: how far a sequence can continue from resident chunks, what each group of
//! layers needs for that, and which bytes must be read.
//!
//! To continue from a point, a group needs the tokens within the reach of its rule: all of them
//! (full), its window, or the last one (state). Every chunk with one of these tokens must be
//! resident with every layer of the group.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::chunks::{Chunk, Chunks, TIERS};
use crate::meta::index::Slot;
use crate::meta::layout::{Layout, MAX_GROUPS};

/// Index of the remote tier.
const REMOTE: usize = Tier::Remote as usize;

/// Usability of a chunk of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Some needed cells are missing: the engine computes the chunk.
    #[default]
    Miss,
    /// All needed cells are resident.
    Hit,
    /// All needed cells are resident or in flight into some tier.
    Pending,
    /// No group reaches back to it.
    Unneeded,
}

/// Reuse of a chunk of a path. Groups are bits; bit 0 is group 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkReuse {
    /// Groups whose cells are all resident.
    pub ready: u64,
    /// Groups whose cells are all resident or in flight.
    pub soon: u64,
    /// Groups that need the chunk.
    pub needed: u64,
    /// Bytes of the needed cells, by the fastest tier of each.
    pub bytes: [u64; TIERS],
    /// Its tokens.
    pub tokens: u32,
    /// Usability.
    pub state: State,
    /// Set by the caller: the chunk is computed if it is needed, whatever is resident.
    pub given_up: bool,
}

impl ChunkReuse {
    /// The slowest tier that a needed cell must be read from.
    pub fn farthest(&self) -> Option<usize> {
        self.bytes.iter().rposition(|&bytes| bytes > 0)
    }
}

/// The reusable prefix of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReusablePrefix {
    /// Chunks of the longest prefix from which the sequence can continue now.
    pub chunks: usize,
    /// Its tokens.
    pub tokens: u64,
    /// The same, with everything in flight.
    pub soon_chunks: usize,
    /// Tokens of that prefix.
    pub reusable_soon_tokens: u64,
}

/// The cost to continue from a point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseCost {
    /// Bytes to read from each tier; those of the device are in place.
    pub bytes: [u64; TIERS],
    /// Tokens of chunks that are reused or not needed.
    pub reused_tokens: u64,
    /// Tokens of chunks that must be computed, in holes or at the end.
    pub computed_tokens: u64,
}

/// Finds the reusable prefix of a path of chunks, NONE for chunks that are not in the table. Fills
/// a [`ChunkReuse`] for each chunk.
pub fn find_reusable(
    chunks: &Chunks,
    layout: &Layout,
    path: &[Slot],
    found: &mut [ChunkReuse],
) -> Result<ReusablePrefix> {
    check(chunks, layout, path, found)?;
    let all = u64::MAX >> (MAX_GROUPS - layout.groups().len());
    // Consecutive tokens that each group has before the point: resident; with those in flight.
    let mut runs = [[0u64; 2]; MAX_GROUPS];
    let (mut reach, mut tokens) = (ReusablePrefix::default(), 0u64);
    for (at, (&slot, found)) in path.iter().zip(found).enumerate() {
        let row = chunks.chunk(slot);
        *found = ChunkReuse { tokens: layout.chunk_tokens(), ..ChunkReuse::default() };
        if let Some(row) = row {
            if row.position() as usize != at {
                fail!(Invalid, "chunk {at} of the path has position {}", row.position());
            }
            if row.valid_tokens() < layout.chunk_tokens() && at + 1 < path.len() {
                fail!(Invalid, "chunk {at} of the path is partial but not the last");
            }
            found.tokens = row.valid_tokens();
            (found.ready, found.soon) = groups_of(chunks, layout, slot, row, all);
        }
        tokens += u64::from(found.tokens);
        let mut is_continuable = [true; 2];
        for (g, (runs, group)) in runs.iter_mut().zip(layout.groups()).enumerate() {
            let reach = group.rule.reach_tokens().min(tokens);
            for (i, has) in [found.ready, found.soon].into_iter().enumerate() {
                let has_group = has >> g & 1;
                runs[i] = (runs[i] + u64::from(found.tokens)) * has_group;
                is_continuable[i] &= runs[i] >= reach;
            }
        }
        if is_continuable[0] {
            (reach.chunks, reach.tokens) = (at + 1, tokens);
        }
        if is_continuable[1] {
            (reach.soon_chunks, reach.reusable_soon_tokens) = (at + 1, tokens);
        }
    }
    Ok(reach)
}

fn check(chunks: &Chunks, layout: &Layout, path: &[Slot], found: &[ChunkReuse]) -> Result<()> {
    let shape = chunks.shape();
    if shape.layers != layout.layers() || shape.chunk_tokens != layout.chunk_tokens() {
        fail!(Invalid, "the chunk table belongs to another layout");
    }
    if path.len() != found.len() {
        fail!(
            Invalid,
            "the path has {} chunks, but found has room for {}",
            path.len(),
            found.len()
        );
    }
    Ok(())
}

/// The groups of a chunk that are resident, and those that will be.
#[inline]
fn groups_of(chunks: &Chunks, layout: &Layout, slot: Slot, row: &Chunk, all: u64) -> (u64, u64) {
    if usize::from(row.cells_somewhere()) == layout.layers() {
        return (all, all);
    }
    let (mut ready, mut soon) = (all, all);
    let remote = chunks.counts_remote();
    for (marks, &group) in chunks.marks(slot).unwrap_or_default().iter().zip(layout.group_of()) {
        let (is_resident, is_arriving) =
            (marks.resident_tiers() != 0 || remote && marks.is_remote(), marks.arriving() != 0);
        ready &= !(u64::from(!is_resident) << group);
        soon &= !(u64::from(!is_resident & !is_arriving) << group);
    }
    (ready, soon)
}

/// Plans to continue after the first `until` chunks of a path that [`find_reusable`] has filled.
/// Sets the state of each chunk, the groups that need it and the bytes to read, with the fewest
/// chunks to compute. A computed chunk needs the chunks before it like any point. With `wait`,
/// cells in flight count as resident. Chunks from `until` on are misses. May be called again with
/// other chunks given up.
///
/// Without a miss before `until` the engine can load all chunks and continue. That holds up to the
/// prefix that `find_reusable` returned. Beyond it, the engine must be able to compute holes.
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
        fail!(Invalid, "until is {until}, but the path has {} chunks", path.len());
    }
    let mut moves = ReuseCost::default();
    let mut end: u64 = found.iter().take(until).map(|found| u64::from(found.tokens)).sum();
    // The nearest following point from which computation continues. Points behind it reach less far
    // back and are irrelevant.
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

/// Sums the needed bytes of a chunk by the fastest tier of each cell.
#[inline]
fn add_bytes(chunks: &Chunks, layout: &Layout, slot: Slot, found: &mut ChunkReuse) {
    let Some(row) = chunks.chunk(slot) else { return };
    let wanted = found.needed;
    let needed = |group: usize| wanted >> group & 1 != 0;
    // Usually all layers of a chunk are in one tier, and in no faster one.
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
        // A cell in flight is in no tier yet.
        let remote = (chunks.counts_remote() && marks.is_remote()).then_some(REMOTE);
        let Some(tier) = marks.nearest().or(remote) else { continue };
        if let Some(group) = layout.groups().get(usize::from(g)) {
            found.bytes[tier] += group.planes(found.tokens).bytes();
        }
    }
}

/// Consecutive chunks of the same state and slowest tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Index of the first chunk.
    pub first: usize,
    /// Number of chunks.
    pub chunks: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Usability.
    pub state: State,
    /// The slowest tier that any of their cells must be read from.
    pub farthest: Option<usize>,
    /// Bytes to read from each tier.
    pub bytes: [u64; TIERS],
}

/// The ranges of a path, in order.
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
