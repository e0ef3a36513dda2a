//! Memory where the engine computes: who stays in it, and the slots for those who do not.

use crate::base::status::Result;
use crate::stream::plan::place::{self, Item, Spread};
use crate::stream::plan::room::Room;
use crate::stream::plan::{Mode, Placement};

/// Sizes of a slot that are tried: all of a few, a selection of many.
const MAX_TRIES: usize = 12;
/// Units up to which all those sizes are tried, and beyond which hardly any.
const FEW: usize = 128;
const MANY: usize = 1 << 13;

/// One way to use that memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fast {
    /// Which of the items stay.
    pub stays: Vec<bool>,
    /// Slots for the others.
    pub slots: u32,
    /// How large one is.
    pub slot_bytes: u64,
}

/// Ways to use `room` bytes, or how many bytes the least of them takes.
pub(super) enum Ways {
    These(Vec<Fast>),
    TooSmall { needs_bytes: u64 },
}

/// The items' sizes, the largest first, and what those before each come to.
struct Sizes {
    /// Each size once, with the bytes of all larger items.
    sizes: Vec<(u64, u64)>,
}

impl Sizes {
    fn of(items: &[Item]) -> Result<Sizes> {
        let mut all: Vec<u64> = Vec::with_room(items.len())?;
        all.extend(items.iter().map(|item| item.bytes).filter(|&bytes| bytes > 0));
        all.sort_unstable_by(|a, b| b.cmp(a));
        let mut sizes: Vec<(u64, u64)> = Vec::with_room(all.len())?;
        let mut larger = 0u64;
        for bytes in all {
            if sizes.last().is_none_or(|&(last, _)| last != bytes) {
                sizes.push((bytes, larger));
            }
            larger += bytes;
        }
        Ok(Sizes { sizes })
    }

    /// What a slot size takes before anything else, the largest first: all larger items stay.
    fn needs(&self, slots: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let slots = u64::from(slots);
        self.sizes.iter().map(move |&(bytes, larger)| {
            (bytes, larger.saturating_add(bytes.saturating_mul(slots)))
        })
    }
}

/// The slot size with which as few bytes as can be have to be in memory; 0 = all of them,
/// slots would be no less. Of sizes as good the smallest: whatever memory there is, more of
/// it is for items that stay.
pub(super) fn leanest(items: &[Item], slots: u32) -> Result<u64> {
    let sizes = Sizes::of(items)?;
    let none = (0, place::sum(items));
    let best = sizes.needs(slots).chain([none]).min_by_key(|&(bytes, needs)| (needs, bytes));
    Ok(best.map_or(0, |(bytes, _)| bytes))
}

/// The ways that `room` bytes can be used by `items`. `only` is the one slot size that may
/// be; with it slots are there also where all items have room.
pub(super) fn ways(
    items: &[Item],
    room: u64,
    slots: u32,
    mode: Mode,
    how: Placement,
    only: Option<u64>,
) -> Result<Ways> {
    let total = place::sum(items);
    if mode == Mode::Ring {
        return ring(items, room, slots);
    }
    if total <= room && only.is_none_or(|bytes| bytes == 0) {
        let stays = place::place(items, room, how, Spread::Full)?;
        return Ok(Ways::These(vec![Fast { stays, slots: 0, slot_bytes: 0 }]));
    }
    if let Some(slot_bytes) = only {
        return lean(items, room, slots, slot_bytes, how);
    }
    let sizes = Sizes::of(items)?;
    let mut fit: Vec<u64> = Vec::with_room(sizes.sizes.len())?;
    fit.extend(sizes.needs(slots).filter(|&(_, needs)| needs <= room).map(|(bytes, _)| bytes));
    if fit.is_empty() {
        let needs_bytes = sizes.needs(slots).map(|(_, needs)| needs).min().unwrap_or(0).min(total);
        return Ok(Ways::TooSmall { needs_bytes });
    }
    let most = match items.len() {
        0..=FEW => MAX_TRIES,
        n if n > MANY => 2,
        _ => MAX_TRIES / 2,
    };
    let mut all = Vec::new();
    for slot_bytes in selected(&fit, most) {
        for spread in spreads(how) {
            let one = tiered(items, room, slots, slot_bytes, how, *spread)?;
            if !all.contains(&one) {
                all.push(one);
            }
        }
    }
    Ok(Ways::These(all))
}

/// With slots of this size alone, and none where it is 0.
fn lean(items: &[Item], room: u64, slots: u32, slot_bytes: u64, how: Placement) -> Result<Ways> {
    let larger = items.iter().map(|item| item.bytes).filter(|&bytes| bytes > slot_bytes).sum();
    let needs_bytes = slot_bytes.saturating_mul(slots.into()).saturating_add(larger);
    if needs_bytes > room {
        return Ok(Ways::TooSmall { needs_bytes });
    }
    let mut all = Vec::new();
    for spread in spreads(how) {
        let mut one = tiered(items, room, slots, slot_bytes, how, *spread)?;
        // Whoever passes through now, all that fit may have to one day.
        one.slot_bytes = slot_bytes;
        all.push(one);
    }
    Ok(Ways::These(all))
}

fn spreads(how: Placement) -> &'static [Spread] {
    match how {
        Placement::Interleaved => &[Spread::Full, Spread::Even],
        _ => &[Spread::Full],
    }
}

/// All, or the first, the last, and some between.
fn selected(all: &[u64], most: usize) -> impl Iterator<Item = u64> + '_ {
    let count = all.len().min(most);
    (0..count).map(move |i| all[if count < 2 { 0 } else { i * (all.len() - 1) / (count - 1) }])
}

/// Slots of one size: larger items stay, then tiny ones (they would cost a wait for few
/// bytes), then as many of the others as fit.
fn tiered(
    items: &[Item],
    room: u64,
    slots: u32,
    slot_bytes: u64,
    how: Placement,
    spread: Spread,
) -> Result<Fast> {
    let mut left = room - u64::from(slots) * slot_bytes;
    let mut stays = place::none(items)?;
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
    let mut rest: Vec<Item> = Vec::with_room(items.len())?;
    let outside = items.iter().enumerate().filter(|(i, _)| !stays[*i]);
    rest.extend(outside.map(|(i, item)| Item { unit: i, bytes: item.bytes }));
    for (item, chosen) in rest.iter().zip(place::place(&rest, left, how, spread)?) {
        stays[item.unit] |= chosen;
    }
    let moves = items.iter().zip(&stays).filter(|(_, stays)| !**stays);
    let slot_bytes = moves.map(|(item, _)| item.bytes).max().unwrap_or(0);
    Ok(Fast { stays, slots, slot_bytes })
}

/// All memory is slots.
fn ring(items: &[Item], room: u64, slots: u32) -> Result<Ways> {
    let slot_bytes = items.iter().map(|item| item.bytes).max().unwrap_or(0).max(1);
    let most = items.len() as u64;
    let fit = (room / slot_bytes).min(most);
    let least = u64::from(slots).min(most);
    if fit < least {
        return Ok(Ways::TooSmall { needs_bytes: least.saturating_mul(slot_bytes) });
    }
    let fast = Fast { stays: place::none(items)?, slots: fit as u32, slot_bytes };
    Ok(Ways::These(vec![fast]))
}
