//! Lists of numbers, one after the other.

/// Lists one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// Where each begins in `items`, and where the last ends.
    pub starts: Vec<u32>,
    /// What is in them, each ascending.
    pub items: Vec<u32>,
}

impl Lists {
    /// How many.
    pub fn len(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// No list.
    pub fn clear(&mut self) {
        self.starts.clear();
        self.items.clear();
    }

    /// Adds one.
    pub fn push(&mut self, items: impl IntoIterator<Item = u32>) {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        self.items.extend(items);
        self.starts.push(self.items.len() as u32);
    }

    /// One of them; none beyond the last.
    pub fn get(&self, at: usize) -> &[u32] {
        match (self.starts.get(at), self.starts.get(at + 1)) {
            (Some(&from), Some(&to)) => {
                self.items.get(from as usize..to as usize).unwrap_or_default()
            }
            _ => &[],
        }
    }
}
