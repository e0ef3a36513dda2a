//! Lists that are used again, so that submitting does not allocate.

use crate::base::status::{Result, Status};
use crate::base::sync::Mutex;

/// Idle lists of one kind, and entries in all of them together, at most.
const MAX_LISTS: usize = 64;
const MAX_ENTRIES: usize = 131_072;
/// No list is made smaller, so that one fits most uses.
const MIN_ENTRIES: usize = 64;

/// A stock of empty lists.
pub struct Spare<T>(Mutex<Vec<Vec<T>>>);

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Spare(Mutex::new(Vec::with_capacity(MAX_LISTS)))
    }
}

impl<T> Spare<T> {
    /// An empty list with room for `n`.
    pub fn take(&self, n: usize) -> Result<Vec<T>> {
        let mut lists = self.0.lock();
        if let Some(i) = lists.iter().position(|list| list.capacity() >= n) {
            return Ok(lists.swap_remove(i));
        }
        drop(lists);
        let mut list = Vec::new();
        list.try_reserve_exact(n.next_power_of_two().max(MIN_ENTRIES))
            .map_err(|_| Status::NoMem)?;
        Ok(list)
    }

    /// Takes a list back; what is still in it is dropped.
    pub fn give(&self, mut list: Vec<T>) {
        list.clear();
        let mut lists = self.0.lock();
        let idle: usize = lists.iter().map(Vec::capacity).sum();
        if lists.len() < MAX_LISTS && idle + list.capacity() <= MAX_ENTRIES {
            lists.push(list);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_list_comes_back_empty_and_is_not_made_anew() {
        let spare = Spare::default();
        let mut list: Vec<u32> = spare.take(100).unwrap();
        list.push(1);
        let at = list.as_ptr();
        spare.give(list);
        let again = spare.take(90).unwrap();
        assert!(again.is_empty() && again.as_ptr() == at);
        let other = spare.take(90).unwrap();
        assert!(other.as_ptr() != at);
    }

    #[test]
    fn what_lies_idle_is_bounded() {
        let spare = Spare::default();
        (0..200).for_each(|_| spare.give(Vec::<u8>::with_capacity(MAX_ENTRIES / 2)));
        assert_eq!(spare.0.lock().len(), 2);
    }
}
