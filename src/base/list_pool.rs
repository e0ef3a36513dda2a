//! Recycled lists, so that a submission does not allocate.

use crate::base::status::{Result, Status};
use crate::base::sync::Mutex;

/// Most idle lists of one kind.
const MAX_LISTS: usize = 64;
/// Most entries in all idle lists of one kind.
const MAX_ENTRIES: usize = 131_072;
/// Smallest capacity of a list, so that a recycled one fits most uses.
const MIN_ENTRIES: usize = 64;

/// Idle empty lists.
pub struct ListPool<T>(Mutex<Vec<Vec<T>>>);

impl<T> Default for ListPool<T> {
    fn default() -> Self {
        ListPool(Mutex::new(Vec::with_capacity(MAX_LISTS)))
    }
}

impl<T> ListPool<T> {
    /// An empty list with capacity for `n` entries.
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
    pub fn put_back(&self, mut list: Vec<T>) {
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
    fn a_returned_list_is_reused_empty() {
        let pool = ListPool::default();
        let mut list: Vec<u32> = pool.take(100).unwrap();
        list.push(1);
        let at = list.as_ptr();
        pool.put_back(list);
        let again = pool.take(90).unwrap();
        assert!(again.is_empty() && again.as_ptr() == at);
        let other = pool.take(90).unwrap();
        assert!(other.as_ptr() != at);
    }

    #[test]
    fn idle_lists_are_bounded() {
        let pool = ListPool::default();
        (0..200).for_each(|_| pool.put_back(Vec::<u8>::with_capacity(MAX_ENTRIES / 2)));
        assert_eq!(pool.0.lock().len(), 2);
    }
}
