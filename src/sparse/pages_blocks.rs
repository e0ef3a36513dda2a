//! Which block is where: candidates name blocks by numbers of the caller's.

use crate::base::status::Result;
use crate::fail;
use crate::sparse::numbers::{grow, room};

/// Blocks of a layer by their ids and by where they lie.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// Id and place, by id.
    places: Vec<(u32, u32)>,
    /// The id at each place.
    ids: Vec<Option<u32>>,
}

impl Blocks {
    /// The place of a block: how many blocks of tokens lie before it.
    pub fn place(&self, id: u32) -> Option<u32> {
        let at = self.places.binary_search_by_key(&id, |&(id, _)| id).ok()?;
        self.places.get(at).map(|&(_, place)| place)
    }

    /// Room for one more, at a place: what comes then cannot fail.
    pub fn reserve(&mut self, place: u32) -> Result<()> {
        room(&mut self.places, 1)?;
        grow(&mut self.ids, place as usize + 1, None)
    }

    /// A block is at a place now, and nowhere else, and no other is there.
    pub fn set(&mut self, id: u32, place: u32) {
        if self.place(id) == Some(place) {
            return;
        }
        if let Some(old) = self.place(id) {
            self.clear(old);
        }
        self.clear(place);
        let at = self.places.partition_point(|&(other, _)| other < id);
        self.places.insert(at, (id, place));
        if let Some(to) = self.ids.get_mut(place as usize) {
            *to = Some(id);
        }
    }

    fn clear(&mut self, place: u32) {
        let Some(id) = self.ids.get_mut(place as usize).and_then(Option::take) else { return };
        self.places.retain(|&(other, _)| other != id);
    }

    /// Blocks from a place on are no more.
    pub fn truncate(&mut self, places: u32) {
        if self.ids.len() > places as usize {
            self.places.retain(|&(_, place)| place < places);
            self.ids.truncate(places as usize);
        }
    }

    /// What this takes.
    pub fn bytes(&self) -> u64 {
        8 * (self.places.capacity() + self.ids.capacity()) as u64
    }

    /// Blocks with their places, in the order of those; an error if one is unknown or named
    /// twice.
    pub fn find(&self, layer: u32, ids: &[u32], out: &mut Vec<(u32, u32)>) -> Result<()> {
        out.clear();
        room(out, ids.len())?;
        for &id in ids {
            let Some(place) = self.place(id) else {
                fail!(Invalid, "block {id} of layer {layer} is not known");
            };
            out.push((id, place));
        }
        out.sort_unstable_by_key(|&(_, place)| place);
        match out.windows(2).find(|two| two.first() == two.last()) {
            Some(two) => {
                let id = two.first().map_or(0, |&(id, _)| id);
                fail!(Invalid, "block {id} is named twice")
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_in_one_place_and_a_place_has_one_block() {
        let mut blocks = Blocks::default();
        for (id, place) in [(7, 0), (3, 1), (9, 2), (7, 3), (4, 1)] {
            blocks.reserve(place).expect("memory");
            blocks.set(id, place);
        }
        let at = |blocks: &Blocks| [3, 4, 7, 9].map(|id| blocks.place(id));
        assert_eq!(at(&blocks), [None, Some(1), Some(3), Some(2)]);
        let mut found = Vec::new();
        blocks.find(0, &[9, 4], &mut found).expect("known");
        assert_eq!(found, [(4, 1), (9, 2)]);
        blocks.find(0, &[7, 4], &mut found).expect("known");
        assert_eq!(found, [(4, 1), (7, 3)]);
        assert!(blocks.find(0, &[9, 9], &mut found).is_err());
        assert!(blocks.find(0, &[9, 3], &mut found).is_err());
        blocks.truncate(2);
        assert_eq!(at(&blocks), [None, Some(1), None, None]);
    }
}
