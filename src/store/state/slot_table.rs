//! Rows with small numbers that are reused: transfers, jobs, sessions.

use crate::base::status::{Result, Status};

/// A table with a fixed limit of rows.
pub struct Table<T> {
    rows: Vec<Option<T>>,
    free: Vec<u32>,
    limit: usize,
}

impl<T> Table<T> {
    /// An empty table.
    pub fn new(limit: usize) -> Table<T> {
        Table { rows: Vec::new(), free: Vec::new(), limit }
    }

    /// Rows in use.
    pub fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    /// Whether no row is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether one more row fits.
    pub fn has_room(&self) -> bool {
        self.len() < self.limit
    }

    /// Number of the next row.
    pub fn vacant(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.rows.len() as u32)
    }

    /// Adds a row. Fails with AGAIN if the table is full.
    pub fn add(&mut self, row: T) -> Result<u32> {
        if let Some(at) = self.free.pop() {
            self.rows[at as usize] = Some(row);
            return Ok(at);
        }
        if self.rows.len() >= self.limit {
            return Err(Status::Again.into());
        }
        if self.rows.len() == self.rows.capacity() {
            let more = self.rows.len().max(64).min(self.limit - self.rows.len());
            self.rows.try_reserve(more).map_err(|_| Status::NoMem)?;
            // Reserved now, since removing must not allocate.
            self.free.try_reserve(self.rows.capacity()).map_err(|_| Status::NoMem)?;
        }
        self.rows.push(Some(row));
        Ok(self.rows.len() as u32 - 1)
    }

    /// A row.
    pub fn get(&self, at: u32) -> Option<&T> {
        self.rows.get(at as usize)?.as_ref()
    }

    /// A row, mutable.
    pub fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.rows.get_mut(at as usize)?.as_mut()
    }

    /// Removes a row and returns it.
    pub fn remove(&mut self, at: u32) -> Option<T> {
        let row = self.rows.get_mut(at as usize)?.take()?;
        self.free.push(at);
        Some(row)
    }

    /// The rows in use, by number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let number = |(at, row): (usize, &'_ Option<T>)| (at as u32, row.is_some());
        let numbers = self.rows.iter().enumerate().map(number);
        numbers.zip(&self.rows).filter_map(|((at, _), row)| Some((at, row.as_ref()?)))
    }
}

impl<T> std::ops::Index<u32> for Table<T> {
    type Output = T;

    fn index(&self, at: u32) -> &T {
        self.rows[at as usize].as_ref().expect("a row in use")
    }
}

impl<T> std::ops::IndexMut<u32> for Table<T> {
    fn index_mut(&mut self, at: u32) -> &mut T {
        self.rows[at as usize].as_mut().expect("a row in use")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_up_to_the_limit() {
        let mut table = Table::new(3);
        let numbers: Vec<u32> = (0..3).map(|i| table.add(i).unwrap()).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(table.add(3).unwrap_err().status(), Status::Again);
        assert_eq!((table.remove(1), table.remove(1)), (Some(1), None));
        assert_eq!((table.len(), table.has_room()), (2, true));
        assert_eq!(table.add(7).unwrap(), 1);
        assert_eq!(
            table.iter().map(|(at, &row)| (at, row)).collect::<Vec<_>>(),
            [(0, 0), (1, 7), (2, 2)]
        );
        assert_eq!((table[1], table.get(5)), (7, None));
    }
}
