//! The pieces of a slab: the set of pieces in use, and their owners.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;

const WORD_BITS: u32 = 64;

/// Pieces of one size. The table is in host memory, for which the account is charged.
pub struct Pieces {
    piece_bytes: u64,
    count: u32,
    live: u32,
    /// A bit for each piece in use; bits past the last piece are always set.
    words: Vec<u64>,
    /// Words before this one have no free piece.
    first: usize,
    owners: Vec<u64>,
    cost: Option<(Arc<Account>, u64)>,
}

impl Pieces {
    /// `count` pieces, none in use.
    pub fn new(account: Option<&Arc<Account>>, piece_bytes: u64, count: u32) -> Result<Pieces> {
        let words = count.div_ceil(WORD_BITS) as usize;
        let bytes = ((words + count as usize) * size_of::<u64>()) as u64;
        if let Some(account) = account {
            account.take(Tier::Host, bytes)?;
        }
        let cost = account.map(|account| (account.clone(), bytes));
        let (live, first) = (0, 0);
        let (words_of, owners) = (Vec::new(), Vec::new());
        let mut pieces = Pieces { piece_bytes, count, live, words: words_of, first, owners, cost };
        let is_full = pieces.words.try_reserve_exact(words).is_err()
            || pieces.owners.try_reserve_exact(count as usize).is_err();
        if is_full {
            return Err(Status::NoMem.into());
        }
        pieces.owners.resize(count as usize, 0);
        for at in 0..words as u32 {
            let here = (count - at * WORD_BITS).min(WORD_BITS);
            pieces.words.push(u64::MAX.checked_shl(here).unwrap_or(0));
        }
        Ok(pieces)
    }

    /// Allocates the first free piece.
    pub fn take(&mut self, owner: u64) -> Option<u32> {
        let at = self.words[self.first..].iter().position(|&word| word != u64::MAX)?;
        self.first += at;
        let bit = self.words[self.first].trailing_ones();
        self.words[self.first] |= 1 << bit;
        self.live += 1;
        let index = self.first as u32 * WORD_BITS + bit;
        self.owners[index as usize] = owner;
        Some(index)
    }

    /// Frees a piece. Returns false if it was not in use.
    pub fn give_back(&mut self, index: u32) -> bool {
        let was_live = self.is_live(index);
        if was_live {
            let word = (index / WORD_BITS) as usize;
            self.words[word] &= !(1 << (index % WORD_BITS));
            self.first = self.first.min(word);
            self.live -= 1;
        }
        was_live
    }

    /// Whether a piece is in use.
    pub fn is_live(&self, index: u32) -> bool {
        let word = self.words.get((index / WORD_BITS) as usize);
        index < self.count && word.is_some_and(|word| word >> (index % WORD_BITS) & 1 == 1)
    }

    /// Owners of the pieces in use.
    pub fn owners(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.count).filter(|&index| self.is_live(index)).map(|at| self.owners[at as usize])
    }

    /// The size of a piece.
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// Number of pieces in use.
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Whether no piece is free.
    pub fn is_full(&self) -> bool {
        self.live == self.count
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        if let Some((account, bytes)) = &self.cost {
            account.give_back(Tier::Host, *bytes);
        }
    }
}
