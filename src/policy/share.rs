//! Blocks that several candidates hold. Each counts once, and is free when all its holders are
//! evicted.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::hash;
use crate::policy::columns::Columns;
use crate::policy::pick::reserve;

#[derive(Clone, Copy)]
struct Block {
    id: u64,
    /// Rows that list the block.
    listed: u32,
    /// Holders in all, rows and others.
    holders: u32,
    /// Holders not evicted yet.
    left: u32,
    /// The last row that listed it, plus one.
    row: u32,
}

/// The blocks of all candidates.
#[derive(Default)]
pub struct Shares {
    /// Open addressing: index of a block plus one; 0 = empty.
    cells: Vec<u32>,
    blocks: Vec<Block>,
    /// Index of the block for each entry of `block_ids`.
    at: Vec<u32>,
    /// Start of each row's blocks, and the end of the last.
    starts: Vec<u32>,
}

impl Shares {
    /// Reads the blocks of every row.
    pub fn read(&mut self, columns: &Columns) -> Result<()> {
        let places = columns.block_ids.len();
        let cells = (places * 2).next_power_of_two().max(8);
        reserve(&mut self.cells, cells)?;
        reserve(&mut self.blocks, places)?;
        reserve(&mut self.at, places)?;
        reserve(&mut self.starts, columns.rows() + 1)?;
        self.cells.clear();
        self.cells.resize(cells, 0);
        self.blocks.clear();
        self.at.clear();
        self.starts.clear();
        self.starts.extend(columns.block_offsets.iter().map(|&at| at as u32));
        for row in 0..columns.rows() {
            for place in self.places(row) {
                self.list(columns, row, place)?;
            }
        }
        for block in &mut self.blocks {
            if block.holders == 0 {
                block.holders = block.listed;
            }
            if block.holders < block.listed {
                let Block { id, listed, holders, .. } = *block;
                fail!(Invalid, "block {id} is in {listed} rows, its count says {holders}");
            }
        }
        self.reset();
        Ok(())
    }

    fn list(&mut self, columns: &Columns, row: usize, place: usize) -> Result<()> {
        let id = columns.block_ids[place];
        let mask = self.cells.len() - 1;
        let mut cell = hash(id) as usize & mask;
        while self.cells[cell] != 0 && self.blocks[self.cells[cell] as usize - 1].id != id {
            cell = (cell + 1) & mask;
        }
        if self.cells[cell] == 0 {
            self.blocks.push(Block { id, listed: 0, holders: 0, left: 0, row: 0 });
            self.cells[cell] = self.blocks.len() as u32;
        }
        let number = self.cells[cell] - 1;
        let block = &mut self.blocks[number as usize];
        if block.row == row as u32 + 1 {
            fail!(Invalid, "row {row} lists block {id} twice");
        }
        block.row = row as u32 + 1;
        block.listed += 1;
        block.holders = block.holders.max(columns.block_refs.get(place).copied().unwrap_or(0));
        self.at.push(number);
        Ok(())
    }

    fn places(&self, row: usize) -> std::ops::Range<usize> {
        self.starts[row] as usize..self.starts[row + 1] as usize
    }

    /// Resets all blocks to their full number of holders.
    pub fn reset(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.left = block.holders);
    }

    /// Number of blocks that a row lists.
    pub fn len(&self, row: usize) -> usize {
        self.places(row).len()
    }

    /// Whether all blocks of a row have holders that are not rows. Evicting such a row frees
    /// nothing, whatever else is evicted.
    pub fn is_stuck(&self, row: usize) -> bool {
        self.places(row).all(|place| {
            let block = &self.blocks[self.at[place] as usize];
            block.holders > block.listed
        })
    }

    /// Releases all but the first `retained` blocks of a row, and passes those that become free to
    /// `freed`. Returns their number.
    pub fn release(&mut self, row: usize, retained: usize, mut freed: impl FnMut(u64)) -> u64 {
        let places = self.places(row);
        let mut count = 0;
        for place in places.skip(retained) {
            let block = &mut self.blocks[self.at[place] as usize];
            block.left -= 1;
            if block.left == 0 {
                count += 1;
                freed(block.id);
            }
        }
        count
    }

    /// Releases the blocks of a row from the last one on until `need` are free. Returns the number
    /// of freed blocks, and the number of leading blocks that the row keeps.
    pub fn release_tail(&mut self, row: usize, need: u64) -> (u64, usize) {
        let places = self.places(row);
        let start = places.start;
        let mut count = 0;
        for place in places.rev() {
            let block = &mut self.blocks[self.at[place] as usize];
            block.left -= 1;
            count += u64::from(block.left == 0);
            if count == need {
                return (count, place - start);
            }
        }
        (count, 0)
    }

    /// Number of blocks that would not be free if a released row took its blocks back.
    pub fn freed_by(&self, row: usize) -> u64 {
        let free = |place: &usize| self.blocks[self.at[*place] as usize].left == 0;
        self.places(row).filter(free).count() as u64
    }

    /// A row takes all its blocks back.
    pub fn take_back_all(&mut self, row: usize) {
        self.take_back(row, 0);
    }

    /// A row takes its blocks back, all but the first `retained`.
    pub fn take_back(&mut self, row: usize, retained: usize) {
        for place in self.places(row).skip(retained) {
            self.blocks[self.at[place] as usize].left += 1;
        }
    }
}
