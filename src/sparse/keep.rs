//! Which tokens stay.

use crate::sparse::lists::Lists;

/// Which tokens of a layer stay: logical positions, ascending, for each head of keys, or one
/// list for all heads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// A list a head, or one.
    pub heads: Lists,
}

impl Keep {
    /// Nothing is said yet.
    pub fn clear(&mut self) {
        self.heads.clear();
    }

    /// What a head keeps.
    pub fn of(&self, head: u32) -> &[u32] {
        let at = if self.heads.len() == 1 { 0 } else { head as usize };
        self.heads.get(at)
    }
}
