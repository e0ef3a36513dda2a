//! Placement: which units stay where the engine computes, and which slots the others get.

use crate::base::status::Result;
use crate::stream::plan::{Mode, Placement, filled, reserved};

/// Most slot sizes that are tried.
const MAX_SLOT_SIZES: usize = 12;
/// Up to `FEW` units all those sizes are tried, beyond `MANY` only two.
const FEW: usize = 128;
const MANY: usize = 1 << 13;

/// A candidate for the use of that memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// For each item, whether it is resident.
    pub stays: Vec<bool>,
    /// Slots for the other items.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
}

/// Candidates for `room` bytes, or the number of bytes that the smallest candidate needs.
pub(super) enum Candidates {
    Found(Vec<Candidate>),
    TooSmall { needs_bytes: u64 },
}

/// The different sizes of items, the largest first.
struct Sizes {
    /// Each size once, with the bytes of all larger items.
    sizes: Vec<(u64, u64)>,
}

impl Sizes {
    fn of(items: &[Item]) -> Result<Sizes> {
        let mut all: Vec<u64> = reserved(items.len())?;
        all.extend(items.iter().map(|item| item.bytes).filter(|&bytes| bytes > 0));
        all.sort_unstable_by(|a, b| b.cmp(a));
        let mut sizes: Vec<(u64, u64)> = reserved(all.len())?;
        let mut larger = 0u64;
        for bytes in all {
            if sizes.last().is_none_or(|&(last, _)| last != bytes) {
                sizes.push((bytes, larger));
            }
            larger += bytes;
        }
        Ok(Sizes { sizes })
    }

    /// Bytes that each slot size needs at least, the largest size first: larger items must be
    /// resident.
    fn needs(&self, slots: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let slots = u64::from(slots);
        self.sizes.iter().map(move |&(bytes, larger)| {
            (bytes, larger.saturating_add(bytes.saturating_mul(slots)))
        })
    }
}

/// The slot size that needs the fewest bytes in memory; 0 = no slots, since all items together
/// need no more. Among equals the smallest size: more memory is left for resident items.
pub(super) fn leanest(items: &[Item], slots: u32) -> Result<u64> {
    let sizes = Sizes::of(items)?;
    let none = (0, sum(items));
    let best = sizes.needs(slots).chain([none]).min_by_key(|&(bytes, needs)| (needs, bytes));
    Ok(best.map_or(0, |(bytes, _)| bytes))
}

/// Candidates for the use of `room` bytes. `only` is the one accepted slot size; with it, slots
/// exist even if all items fit.
pub(super) fn candidates(
    items: &[Item],
    room: u64,
    slots: u32,
    mode: Mode,
    placement: Placement,
    only: Option<u64>,
) -> Result<Candidates> {
    let total = sum(items);
    if mode == Mode::Ring {
        return ring(items, room, slots);
    }
    if total <= room && only.is_none_or(|bytes| bytes == 0) {
        let stays = place(items, room, placement, Spread::Full)?;
        return Ok(Candidates::Found(vec![Candidate { stays, slots: 0, slot_bytes: 0 }]));
    }
    if let Some(slot_bytes) = only {
        return with_slot_size(items, room, slots, slot_bytes, placement);
    }
    let sizes = Sizes::of(items)?;
    let mut fit: Vec<u64> = reserved(sizes.sizes.len())?;
    fit.extend(sizes.needs(slots).filter(|&(_, needs)| needs <= room).map(|(bytes, _)| bytes));
    if fit.is_empty() {
        let needs_bytes = sizes.needs(slots).map(|(_, needs)| needs).min().unwrap_or(0).min(total);
        return Ok(Candidates::TooSmall { needs_bytes });
    }
    let most = match items.len() {
        0..=FEW => MAX_SLOT_SIZES,
        n if n > MANY => 2,
        _ => MAX_SLOT_SIZES / 2,
    };
    let mut all = Vec::new();
    for slot_bytes in selected(&fit, most) {
        for spread in spreads(placement) {
            let candidate = tiered(items, room, slots, slot_bytes, placement, *spread)?;
            if !all.contains(&candidate) {
                all.push(candidate);
            }
        }
    }
    Ok(Candidates::Found(all))
}

/// Candidates with this slot size, and no slots if it is 0.
fn with_slot_size(
    items: &[Item],
    room: u64,
    slots: u32,
    slot_bytes: u64,
    placement: Placement,
) -> Result<Candidates> {
    let larger = items.iter().map(|item| item.bytes).filter(|&bytes| bytes > slot_bytes).sum();
    let needs_bytes = slot_bytes.saturating_mul(slots.into()).saturating_add(larger);
    if needs_bytes > room {
        return Ok(Candidates::TooSmall { needs_bytes });
    }
    let mut all = Vec::new();
    for spread in spreads(placement) {
        let mut candidate = tiered(items, room, slots, slot_bytes, placement, *spread)?;
        // Any item that fits may have to pass through the slots later.
        candidate.slot_bytes = slot_bytes;
        all.push(candidate);
    }
    Ok(Candidates::Found(all))
}

fn spreads(placement: Placement) -> &'static [Spread] {
    match placement {
        Placement::Interleaved => &[Spread::Full, Spread::Even],
        _ => &[Spread::Full],
    }
}

/// All sizes, or the first, the last, and some between.
fn selected(all: &[u64], most: usize) -> impl Iterator<Item = u64> + '_ {
    let count = all.len().min(most);
    (0..count).map(move |i| all[if count < 2 { 0 } else { i * (all.len() - 1) / (count - 1) }])
}

/// A candidate with slots of one size. Larger items are resident, then tiny ones (a wait for few
/// bytes is not worthwhile), then as many others as fit.
fn tiered(
    items: &[Item],
    room: u64,
    slots: u32,
    slot_bytes: u64,
    placement: Placement,
    spread: Spread,
) -> Result<Candidate> {
    let mut left = room - u64::from(slots) * slot_bytes;
    let mut stays = filled(false, items.len())?;
    for (item, stays) in items.iter().zip(&mut stays) {
        if item.bytes > slot_bytes {
            left -= item.bytes;
            *stays = true;
        }
    }
    let tiny = slot_bytes / 64;
    for (item, stays) in items.iter().zip(&mut stays) {
        if item.bytes <= tiny && item.bytes <= left {
            left -= item.bytes;
            *stays = true;
        }
    }
    let mut rest: Vec<Item> = reserved(items.len())?;
    let outside = items.iter().enumerate().filter(|(i, _)| !stays[*i]);
    rest.extend(outside.map(|(i, item)| Item { unit: i, bytes: item.bytes }));
    for (item, chosen) in rest.iter().zip(place(&rest, left, placement, spread)?) {
        stays[item.unit] |= chosen;
    }
    let moves = items.iter().zip(&stays).filter(|(_, stays)| !**stays);
    let slot_bytes = moves.map(|(item, _)| item.bytes).max().unwrap_or(0);
    Ok(Candidate { stays, slots, slot_bytes })
}

/// The candidate of [`Mode::Ring`]: all memory is slots.
fn ring(items: &[Item], room: u64, slots: u32) -> Result<Candidates> {
    let slot_bytes = items.iter().map(|item| item.bytes).max().unwrap_or(0).max(1);
    let most = items.len() as u64;
    let fit = (room / slot_bytes).min(most);
    let least = u64::from(slots).min(most);
    if fit < least {
        return Ok(Candidates::TooSmall { needs_bytes: least.saturating_mul(slot_bytes) });
    }
    let candidate = Candidate { stays: filled(false, items.len())?, slots: fit as u32, slot_bytes };
    Ok(Candidates::Found(vec![candidate]))
}

// Choice of resident units: as many bytes as fit, at equal distances.

/// A unit to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// The unit.
    pub unit: usize,
    /// Bytes that it needs.
    pub bytes: u64,
}

/// Most sizes that are treated one by one; more are joined with similar ones.
const MAX_EXACT_SIZES: usize = 64;
/// Sizes within 1/128 of each other are joined.
const JOINED_PART: u64 = 128;
/// Most size classes; the smallest sizes share the last.
const MAX_SIZES: usize = 512;

/// Preference among placements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    /// Most bytes, then equal distances.
    Full,
    /// Equal distances, then as many more as fit.
    Even,
}

pub(super) fn sum(items: &[Item]) -> u64 {
    items.iter().map(|item| item.bytes).sum()
}

/// Chooses the items that are resident within `room` bytes.
pub(super) fn place(
    items: &[Item],
    room: u64,
    placement: Placement,
    spread: Spread,
) -> Result<Vec<bool>> {
    let total = sum(items);
    if total <= room {
        return filled(true, items.len());
    }
    let mut stays = filled(false, items.len())?;
    match placement {
        Placement::First => walk(items.iter().enumerate(), room, &mut stays),
        Placement::Last => walk(items.iter().enumerate().rev(), room, &mut stays),
        Placement::Interleaved => {
            let classes = classes(items)?;
            let (quotas, best) = fill_best(&classes.classes, room);
            match spread {
                Spread::Full => quota(items, &classes, &quotas, best, &mut stays),
                Spread::Even => even(items, best, total, &mut stays),
            }
            fill(items, room, &mut stays)?;
        }
    }
    Ok(stays)
}

/// Takes items in order while they fit.
fn walk<'a>(items: impl Iterator<Item = (usize, &'a Item)>, mut room: u64, stays: &mut [bool]) {
    for (i, item) in items {
        if item.bytes <= room {
            room -= item.bytes;
            stays[i] = true;
        }
    }
}

/// The size classes, and the class of each item.
struct SizeClasses {
    classes: Vec<SizeClass>,
    of: Vec<u32>,
}

/// The size classes of items, the largest first.
fn classes(items: &[Item]) -> Result<SizeClasses> {
    let mut order: Vec<u32> = reserved(items.len())?;
    order.extend(0..items.len() as u32);
    let bytes = |i: u32| items[i as usize].bytes;
    order.sort_unstable_by_key(|&i| std::cmp::Reverse(bytes(i)));
    let differ = order.windows(2).filter(|pair| bytes(pair[0]) != bytes(pair[1])).count();
    let joined = differ >= MAX_EXACT_SIZES;
    let mut all = SizeClasses { classes: Vec::new(), of: filled(0, items.len())? };
    for &i in &order {
        let tolerance = |class: &SizeClass| if joined { class.bytes / JOINED_PART } else { 0 };
        let joins = |class: &SizeClass| class.bytes - bytes(i) <= tolerance(class);
        if all.classes.len() < MAX_SIZES && !all.classes.last().is_some_and(joins) {
            all.classes.push(SizeClass { bytes: bytes(i), count: 0 });
        }
        all.of[i as usize] = all.classes.len() as u32 - 1;
        if let Some(class) = all.classes.last_mut() {
            class.count += 1;
        }
    }
    Ok(all)
}

/// Takes a number of items of each class, spread over all items and over those of the class.
fn quota(items: &[Item], classes: &SizeClasses, quotas: &[u64], best: u64, stays: &mut [bool]) {
    let total: u64 = sum(items).max(1);
    let mut seen = vec![0u64; quotas.len()];
    let mut taken = vec![0u64; quotas.len()];
    let (mut past, mut stay) = (0u64, 0u64);
    for (i, item) in items.iter().enumerate() {
        let class = classes.of[i] as usize;
        let (count, quota) = (classes.classes[class].count, quotas[class]);
        past += item.bytes;
        let left = count - seen[class];
        seen[class] += 1;
        let quota_left = quota - taken[class];
        // The number of bytes behind the ideal, over all items and within the class.
        let all = best as f64 * (past as f64 / total as f64) - stay as f64;
        let own = quota as f64 * (seen[class] as f64 / count as f64) - taken[class] as f64;
        let behind = all + own * item.bytes as f64;
        if quota_left > 0 && (quota_left == left || behind >= item.bytes as f64 * 0.999_999) {
            stays[i] = true;
            taken[class] += 1;
            stay += item.bytes;
        }
    }
}

/// Takes items at equal distances in bytes.
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

/// Takes the largest items that still fit.
fn fill(items: &[Item], room: u64, stays: &mut [bool]) -> Result<()> {
    let used: u64 = items.iter().zip(&*stays).filter(|(_, s)| **s).map(|(i, _)| i.bytes).sum();
    let mut left = room - used;
    let mut order: Vec<u32> = reserved(items.len())?;
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

// Search for the numbers of items of each size that fill a given number of bytes best.

/// A class of items of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SizeClass {
    /// Bytes of an item, or of the largest one if sizes were joined.
    pub bytes: u64,
    /// Number of items.
    pub count: u64,
}

/// Most combinations that are tried: exact for few classes, approximate for many.
const MAX_SEARCH_STEPS: u32 = 4_000;

struct Search<'a> {
    classes: &'a [SizeClass],
    /// Bytes of this class and the smaller ones.
    after: Vec<u64>,
    now: Vec<u64>,
    best: Vec<u64>,
    best_bytes: u64,
    room: u64,
    tries: u32,
}

impl Search<'_> {
    fn search(&mut self, at: usize, used: u64) {
        self.tries += 1;
        if used > self.best_bytes {
            self.best_bytes = used;
            self.best.copy_from_slice(&self.now);
        }
        let left = self.room - used;
        let Some(class) = self.classes.get(at) else { return };
        // All the remaining items would not improve the result.
        if self.after[at].min(left) <= self.best_bytes - used {
            return;
        }
        let most = left.checked_div(class.bytes).map_or(class.count, |fit| fit.min(class.count));
        for count in (0..=most).rev() {
            if self.tries >= MAX_SEARCH_STEPS || self.best_bytes == self.room {
                break;
            }
            self.now[at] = count;
            self.search(at + 1, used + count * class.bytes);
        }
        self.now[at] = 0;
    }
}

/// The number of items of each class, and their bytes: the most that `room` holds.
pub(super) fn fill_best(classes: &[SizeClass], room: u64) -> (Vec<u64>, u64) {
    let mut after: Vec<u64> =
        classes.iter().map(|class| class.bytes.saturating_mul(class.count)).collect();
    for i in (1..after.len()).rev() {
        after[i - 1] = after[i - 1].saturating_add(after[i]);
    }
    let none = vec![0; classes.len()];
    let mut search =
        Search { classes, after, now: none.clone(), best: none, best_bytes: 0, room, tries: 0 };
    search.search(0, 0);
    (search.best, search.best_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_combination_fills_more_bytes(
            sizes in proptest::collection::vec((1u64..60, 0u64..4), 1..5), room in 0u64..300,
        ) {
            let mut classes: Vec<SizeClass> =
                sizes.iter().map(|&(bytes, count)| SizeClass { bytes, count }).collect();
            classes.sort_unstable_by_key(|class| std::cmp::Reverse(class.bytes));
            let (counts, bytes) = fill_best(&classes, room);
            let sum: u64 = counts.iter().zip(&classes).map(|(n, class)| n * class.bytes).sum();
            prop_assert_eq!(sum, bytes);
            prop_assert!(counts.iter().zip(&classes).all(|(n, class)| *n <= class.count));
            let mut reach = vec![false; room as usize + 1];
            reach[0] = true;
            for class in &classes {
                for _ in 0..class.count {
                    for to in (class.bytes as usize..reach.len()).rev() {
                        reach[to] |= reach[to - class.bytes as usize];
                    }
                }
            }
            prop_assert_eq!(reach.iter().rposition(|&r| r).unwrap_or(0) as u64, bytes);
        }
    }
}
