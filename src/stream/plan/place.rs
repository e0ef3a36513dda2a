//! Who stays where not all can: as many bytes as there is room for, at equal distances.

use crate::base::status::Result;
use crate::stream::plan::Placement;
use crate::stream::plan::room::{Room, filled};
use crate::stream::plan::subset::{self, Kind};

/// A unit that is to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// Which unit.
    pub unit: usize,
    /// What it takes.
    pub bytes: u64,
}

/// Sizes that are counted one by one; more are joined with those nearly as large.
const MAX_KINDS: usize = 64;
/// Sizes are nearly the same within one part of so many.
const NEAR: u64 = 128;
/// Sizes there are at most; the smallest are one.
const MOST_KINDS: usize = 512;

/// What to look for among placements as good in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// Most bytes, then equal distances.
    Full,
    /// Equal distances, then what still fits.
    Even,
}

pub(super) fn sum(items: &[Item]) -> u64 {
    items.iter().map(|item| item.bytes).sum()
}

/// Which items stay within `room` bytes.
pub(super) fn place(
    items: &[Item],
    room: u64,
    how: Placement,
    spread: Spread,
) -> Result<Vec<bool>> {
    let total = sum(items);
    if total <= room {
        return filled(true, items.len());
    }
    let mut stays = filled(false, items.len())?;
    match how {
        Placement::First => walk(items.iter().enumerate(), room, &mut stays),
        Placement::Last => walk(items.iter().enumerate().rev(), room, &mut stays),
        Placement::Interleaved => {
            let kinds = kinds(items)?;
            let (quotas, best) = subset::most(&kinds.kinds, room);
            match spread {
                Spread::Full => quota(items, &kinds, &quotas, best, &mut stays),
                Spread::Even => even(items, best, total, &mut stays),
            }
            fill(items, room, &mut stays)?;
        }
    }
    Ok(stays)
}

/// One after the other while they fit.
fn walk<'a>(items: impl Iterator<Item = (usize, &'a Item)>, mut room: u64, stays: &mut [bool]) {
    for (i, item) in items {
        if item.bytes <= room {
            room -= item.bytes;
            stays[i] = true;
        }
    }
}

/// Sizes, and which each item has.
struct Kinds {
    kinds: Vec<Kind>,
    of: Vec<u32>,
}

/// The sizes there are, the largest first.
fn kinds(items: &[Item]) -> Result<Kinds> {
    let mut order: Vec<u32> = Vec::with_room(items.len())?;
    order.extend(0..items.len() as u32);
    let bytes = |i: u32| items[i as usize].bytes;
    order.sort_unstable_by_key(|&i| std::cmp::Reverse(bytes(i)));
    let differ = order.windows(2).filter(|pair| bytes(pair[0]) != bytes(pair[1])).count();
    let joined = differ >= MAX_KINDS;
    let mut all = Kinds { kinds: Vec::new(), of: filled(0, items.len())? };
    for &i in &order {
        let near = |kind: &Kind| if joined { kind.bytes / NEAR } else { 0 };
        let joins = |kind: &Kind| kind.bytes - bytes(i) <= near(kind);
        if all.kinds.len() < MOST_KINDS && !all.kinds.last().is_some_and(joins) {
            all.kinds.push(Kind { bytes: bytes(i), count: 0 });
        }
        all.of[i as usize] = all.kinds.len() as u32 - 1;
        if let Some(kind) = all.kinds.last_mut() {
            kind.count += 1;
        }
    }
    Ok(all)
}

/// So many of each size, spread over all and over those of the size.
fn quota(items: &[Item], kinds: &Kinds, quotas: &[u64], best: u64, stays: &mut [bool]) {
    let total: u64 = sum(items).max(1);
    let mut seen = vec![0u64; quotas.len()];
    let mut taken = vec![0u64; quotas.len()];
    let (mut past, mut stay) = (0u64, 0u64);
    for (i, item) in items.iter().enumerate() {
        let kind = kinds.of[i] as usize;
        let (count, quota) = (kinds.kinds[kind].count, quotas[kind]);
        past += item.bytes;
        let left = count - seen[kind];
        seen[kind] += 1;
        let wants = quota - taken[kind];
        // Behind where it should be by now, over all and among its own size.
        let all = best as f64 * (past as f64 / total as f64) - stay as f64;
        let own = quota as f64 * (seen[kind] as f64 / count as f64) - taken[kind] as f64;
        let behind = all + own * item.bytes as f64;
        if wants > 0 && (wants == left || behind >= item.bytes as f64 * 0.999_999) {
            stays[i] = true;
            taken[kind] += 1;
            stay += item.bytes;
        }
    }
}

/// Equal distances in bytes.
fn even(items: &[Item], best: u64, total: u64, stays: &mut [bool]) {
    let (mut past, mut stay) = (0u64, 0u64);
    for (i, item) in items.iter().enumerate() {
        past += item.bytes;
        let goal = best as f64 * (past as f64 / total.max(1) as f64);
        let fits = stay + item.bytes <= best;
        if fits && goal - stay as f64 >= item.bytes as f64 * 0.499_999 {
            stays[i] = true;
            stay += item.bytes;
        }
    }
}

/// What still fits, the largest first.
fn fill(items: &[Item], room: u64, stays: &mut [bool]) -> Result<()> {
    let used: u64 = items.iter().zip(&*stays).filter(|(_, s)| **s).map(|(i, _)| i.bytes).sum();
    let mut left = room - used;
    let mut order: Vec<u32> = Vec::with_room(items.len())?;
    let outside = (0..items.len()).filter(|&i| !stays[i] && items[i].bytes <= left);
    order.extend(outside.map(|i| i as u32));
    order.sort_unstable_by_key(|&i| std::cmp::Reverse(items[i as usize].bytes));
    for i in order {
        let bytes = items[i as usize].bytes;
        if bytes <= left {
            left -= bytes;
            stays[i as usize] = true;
        }
    }
    Ok(())
}

/// Nobody stays.
pub(super) fn none(items: &[Item]) -> Result<Vec<bool>> {
    filled(false, items.len())
}
