//! What an object of a tier's policy stands for: a chunk, a cell of one, or a session with
//! all that it was the last to use.

use std::collections::{BTreeMap, BTreeSet};

use crate::store::state::At;

/// What policies choose among.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Granularity {
    /// Chunks, with all their layers.
    #[default]
    Chunk,
    /// Cells: late layers leave memory before early ones.
    Cell,
    /// Sessions: what one was the last to use leaves together.
    Session,
}

/// Which cells of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All.
    All,
    /// That of one layer.
    Layer(usize),
}

impl Part {
    /// Whether it has a layer.
    pub fn has(self, layer: usize) -> bool {
        self == Part::All || self == Part::Layer(layer)
    }
}

/// What policies call a cell: as spread out as what they call its chunk.
pub fn cell_id(chunk: u64, layer: usize) -> u64 {
    chunk ^ (layer as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Cells of a chunk that leave memory once they are on disk.
#[derive(Default)]
pub(super) struct Leave {
    /// What they have.
    pub bytes: u64,
    is_all: bool,
    layers: BTreeSet<usize>,
}

impl Leave {
    /// More of the chunk leaves.
    pub fn add(&mut self, part: Part, bytes: u64) {
        self.bytes += bytes;
        match part {
            Part::All => self.is_all = true,
            Part::Layer(layer) => drop(self.layers.insert(layer)),
        }
    }

    /// Whether all layers are among them.
    pub fn is_whole(&self) -> bool {
        self.is_all
    }

    /// Whether a layer is among them.
    pub fn has(&self, layer: usize) -> bool {
        self.is_all || self.layers.contains(&layer)
    }
}

/// A chunk of a session's object.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Where it is.
    pub(crate) at: At,
    /// Its position in its sequence.
    pub position: u32,
    /// What it has.
    pub units: u64,
    /// Its tokens.
    pub tokens: u32,
}

/// What a session's object has.
#[derive(Default)]
struct Group {
    units: u64,
    tokens: u64,
    members: BTreeMap<(u32, At), Member>,
}

/// Which chunks each session's object has. A chunk is with the session that used it last;
/// one that nobody has used yet, or that had to stay when its session left, is alone.
#[derive(Default)]
pub struct Groups {
    of: BTreeMap<At, (u64, u32)>,
    groups: BTreeMap<u64, Group>,
}

impl Groups {
    /// The object that a chunk is of.
    pub(crate) fn of(&self, at: At) -> Option<u64> {
        self.of.get(&at).map(|&(id, _)| id)
    }

    /// Units and tokens of an object.
    pub fn size(&self, id: u64) -> Option<(u64, u64)> {
        self.groups.get(&id).map(|group| (group.units, group.tokens))
    }

    /// A chunk is of an object from now on; of which it was, if that is another.
    pub fn join(&mut self, member: Member, id: u64) -> Option<u64> {
        if self.of(member.at) == Some(id) {
            return None;
        }
        let before = self.leave(member.at);
        self.of.insert(member.at, (id, member.position));
        let group = self.groups.entry(id).or_default();
        group.units += member.units;
        group.tokens += u64::from(member.tokens);
        group.members.insert((member.position, member.at), member);
        before
    }

    /// A chunk is of none any more; of which it was.
    pub(crate) fn leave(&mut self, at: At) -> Option<u64> {
        let (id, position) = self.of.remove(&at)?;
        let group = self.groups.get_mut(&id)?;
        if let Some(member) = group.members.remove(&(position, at)) {
            group.units -= member.units;
            group.tokens -= u64::from(member.tokens);
        }
        if group.members.is_empty() {
            self.groups.remove(&id);
        }
        Some(id)
    }

    /// Takes an object apart: its chunks, those behind others first.
    pub(crate) fn take(&mut self, id: u64) -> impl Iterator<Item = At> {
        let members = self.groups.remove(&id).map(|group| group.members).unwrap_or_default();
        for member in members.values() {
            self.of.remove(&member.at);
        }
        members.into_values().rev().map(|member| member.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(slot: u32, position: u32) -> Member {
        Member { at: At { table: 0, slot }, position, units: 3, tokens: 16 }
    }

    #[test]
    fn a_chunk_is_with_who_used_it_last_and_leaves_from_the_end() {
        let mut groups = Groups::default();
        for slot in 0..4 {
            assert_eq!(groups.join(member(slot, slot), 7), None);
        }
        assert_eq!(groups.size(7), Some((12, 64)));
        assert_eq!(groups.join(member(0, 0), 8), Some(7));
        assert_eq!(groups.join(member(0, 0), 8), None);
        assert_eq!(groups.leave(At { table: 0, slot: 2 }), Some(7));
        assert_eq!((groups.size(7), groups.size(8)), (Some((6, 32)), Some((3, 16))));
        let left: Vec<u32> = groups.take(7).map(|at| at.slot).collect();
        assert_eq!((left, groups.size(7)), (vec![3, 1], None));
        assert_eq!(groups.of(At { table: 0, slot: 3 }), None);
        assert_eq!(groups.leave(At { table: 0, slot: 0 }), Some(8));
        assert_eq!(groups.size(8), None);
    }

    #[test]
    fn what_leaves_adds_up() {
        let mut leave = Leave::default();
        leave.add(Part::Layer(3), 5);
        leave.add(Part::Layer(1), 5);
        assert_eq!((leave.bytes, leave.has(3), leave.has(2)), (10, true, false));
        leave.add(Part::All, 0);
        assert!(leave.has(2));
        assert!(Part::All.has(9) && Part::Layer(9).has(9) && !Part::Layer(9).has(8));
        assert_ne!(cell_id(1, 0), cell_id(1, 1));
    }
}
