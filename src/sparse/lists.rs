//! Lists of ascending numbers in one allocation, and the retained tokens of heads in this form.

use crate::base::status::Result;
use crate::sparse::numbers::reserve;
use crate::sparse::ranks::without;

/// Lists, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// Start of each list in `items`, and the end of the last.
    pub starts: Vec<u32>,
    /// Contents, each list ascending.
    pub items: Vec<u32>,
}

impl Lists {
    /// The number of lists.
    pub fn len(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all lists.
    pub fn clear(&mut self) {
        self.starts.clear();
        self.items.clear();
    }

    /// Adds a list.
    pub fn push(&mut self, items: impl IntoIterator<Item = u32>) {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        self.items.extend(items);
        self.starts.push(self.items.len() as u32);
    }

    /// List `at`; empty beyond the last.
    pub fn get(&self, at: usize) -> &[u32] {
        match (self.starts.get(at), self.starts.get(at + 1)) {
            (Some(&from), Some(&to)) => {
                self.items.get(from as usize..to as usize).unwrap_or_default()
            }
            _ => &[],
        }
    }
}

/// The tokens of a layer that stay: ascending logical positions, one list for each head or one list
/// for all heads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetainedTokens {
    /// One list for each head, or one.
    pub heads: Lists,
}

impl RetainedTokens {
    /// Removes all lists.
    pub fn clear(&mut self) {
        self.heads.clear();
    }

    /// Empties it and reserves memory for `lists` lists with `tokens` tokens in total.
    pub fn begin(&mut self, lists: usize, tokens: usize) -> Result<()> {
        self.clear();
        reserve(&mut self.heads.items, tokens)?;
        reserve(&mut self.heads.starts, lists + 1)
    }

    /// Adds a list: `positions` without those at the indices `victims`, which ascend.
    pub fn push_without(&mut self, positions: &[u32], victims: &[u32]) -> Result<()> {
        self.heads.push([]);
        without(positions, victims, &mut self.heads.items)?;
        let end = self.heads.items.len() as u32;
        self.heads.starts.iter_mut().rev().take(1).for_each(|start| *start = end);
        Ok(())
    }

    /// The tokens that a head retains.
    pub fn of(&self, head: u32) -> &[u32] {
        let at = if self.heads.len() == 1 { 0 } else { head as usize };
        self.heads.get(at)
    }
}
