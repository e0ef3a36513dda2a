//! A slab: one mapping of memory, cut into pieces of one size.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::fork::page_bytes;
use crate::base::memory::{AllocationRequest, Buffer, HUGE_PAGE_BYTES, Requirement};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Device;
use crate::tier::host::registration::{Registrar, Registration};
use crate::tier::host::shared::SharedSlabs;
use crate::tier::host::table::Entry;

/// Most pieces of a slab.
pub const MAX_PIECES: u32 = 1 << 15;

const WORD_BITS: u32 = 64;
const SUMMARY: usize = (MAX_PIECES / WORD_BITS / WORD_BITS) as usize;

/// Memory of a slab, and the set of pieces in use.
pub struct Slab {
    /// Dropped first, so that the memory is unregistered before it is unmapped.
    registrar: Option<Registrar>,
    buffer: Buffer,
    /// A bit for each piece in use; bits past the last piece are always set.
    words: Vec<u64>,
    /// Owner of each piece; the caller defines the values.
    owners: Vec<u64>,
    /// A bit for each word with a free piece.
    summary: [u64; SUMMARY],
    piece_bytes: u64,
    mapped_bytes: u64,
    pieces: u32,
    live: u32,
    /// Dropped last: the charge ends when the memory is unmapped.
    cost: Cost,
}

/// Charge to an account for a slab.
struct Cost {
    account: Option<Arc<Account>>,
    bytes: u64,
}

impl Cost {
    fn pay(account: Option<&Arc<Account>>, bytes: u64) -> Result<Cost> {
        if let Some(account) = account {
            account.take(Tier::Host, bytes)?;
        }
        Ok(Cost { account: account.cloned(), bytes })
    }
}

impl Drop for Cost {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.bytes);
        }
    }
}

impl Slab {
    /// Maps a slab, in the shared file if there is one, after charging the account for it and its
    /// tables. It must be cut before use.
    pub fn map(
        (account, shared): (Option<&Arc<Account>>, Option<&Arc<SharedSlabs>>),
        bytes: u64,
        align_bytes: u64,
        huge: Requirement,
    ) -> Result<Self> {
        let most = (bytes / align_bytes).clamp(1, u64::from(MAX_PIECES)) as u32;
        let count = most.div_ceil(WORD_BITS) as usize;
        let (mapped_bytes, huge) = Slab::mapped_for(bytes, huge);
        let table_bytes = size_of::<Entry>() + (count + most as usize) * size_of::<u64>();
        let cost = Cost::pay(account, mapped_bytes + table_bytes as u64)?;
        let mut words = Vec::new();
        if words.try_reserve_exact(count).is_err() {
            return Err(Status::NoMem.into());
        }
        words.resize(count, 0);
        let mut owners = Vec::new();
        if owners.try_reserve_exact(most as usize).is_err() {
            return Err(Status::NoMem.into());
        }
        let buffer = match shared {
            Some(shared) => shared.map(bytes)?,
            None => {
                let request = AllocationRequest { bytes, huge, ..AllocationRequest::default() };
                let faults = account.and_then(|account| account.budget().core().faults());
                Buffer::map(&request, faults)?
            }
        };
        debug_assert!(shared.is_some() || buffer.charged_bytes() == mapped_bytes);
        Ok(Slab {
            registrar: None,
            buffer,
            words,
            owners,
            summary: [0; SUMMARY],
            piece_bytes: bytes,
            mapped_bytes,
            pieces: 0,
            live: 0,
            cost,
        })
    }

    /// Prepares the registration of the memory with a device.
    pub fn register(&mut self, device: &Arc<dyn Device>) -> Arc<Registration> {
        let registrar = Registrar::new(device, self.buffer.address(), self.buffer.bytes());
        let registration = registrar.0.clone();
        self.registrar = Some(registrar);
        registration
    }

    /// Bytes that are mapped for a slab of `bytes` bytes, and whether in huge pages. With `Try`
    /// huge pages are not used if rounding up would waste more than 1 / 16.
    pub fn mapped_for(bytes: u64, huge: Requirement) -> (u64, Requirement) {
        let in_huge_bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let wasteful = in_huge_bytes - bytes > bytes / 16;
        match huge {
            Requirement::Try if wasteful => {
                (bytes.next_multiple_of(page_bytes() as u64), Requirement::No)
            }
            Requirement::No => (bytes.next_multiple_of(page_bytes() as u64), huge),
            _ => (in_huge_bytes, huge),
        }
    }

    /// Cuts an empty slab into `pieces` pieces, which must fit.
    pub fn cut(&mut self, piece_bytes: u64, pieces: u32) {
        debug_assert!(self.live == 0, "a slab in use is cut");
        debug_assert!(u64::from(pieces) * piece_bytes <= self.buffer.bytes());
        debug_assert!(pieces as usize <= self.words.len() * WORD_BITS as usize);
        (self.piece_bytes, self.pieces, self.live) = (piece_bytes, pieces, 0);
        self.owners.clear();
        self.owners.resize(pieces as usize, 0);
        self.summary = [0; SUMMARY];
        let mut left = pieces;
        for (at, word) in self.words.iter_mut().enumerate() {
            let here = left.min(WORD_BITS);
            *word = u64::MAX.checked_shl(here).unwrap_or(0);
            if here > 0 {
                self.summary[at / 64] |= 1 << (at % 64);
            }
            left -= here;
        }
    }

    /// Allocates the first free piece.
    pub fn take(&mut self, owner: u64) -> Option<u32> {
        let group = self.summary.iter().position(|&group| group != 0)?;
        let at = group * 64 + self.summary[group].trailing_zeros() as usize;
        let word = self.words.get_mut(at)?;
        let bit = word.trailing_ones();
        *word |= 1 << bit;
        if *word == u64::MAX {
            self.summary[group] &= !(1 << (at % 64));
        }
        self.live += 1;
        let index = at as u32 * WORD_BITS + bit;
        *self.owners.get_mut(index as usize)? = owner;
        Some(index)
    }

    /// Frees a piece that is in use.
    pub fn give_back(&mut self, index: u32) {
        let at = (index / WORD_BITS) as usize;
        if let Some(word) = self.words.get_mut(at) {
            *word &= !(1 << (index % WORD_BITS));
            self.summary[at / 64] |= 1 << (at % 64);
            self.live -= 1;
        }
    }

    /// Whether a piece is in use.
    pub fn is_live(&self, index: u32) -> bool {
        let word = self.words.get((index / WORD_BITS) as usize);
        index < self.pieces && word.is_some_and(|word| word >> (index % WORD_BITS) & 1 == 1)
    }

    /// The pieces in use, in order.
    pub fn live_pieces(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.pieces).filter(|&index| self.is_live(index))
    }

    /// The last owner of a piece.
    pub fn owner(&self, index: u32) -> u64 {
        self.owners.get(index as usize).copied().unwrap_or_default()
    }

    /// The address of a piece.
    pub fn address(&self, index: u32) -> Option<*mut u8> {
        self.buffer.range(u64::from(index) * self.piece_bytes, self.piece_bytes)
    }

    /// The size of a piece.
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// Number of pieces.
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Number of pieces in use.
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Bytes that are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Bytes that are charged, tables included.
    pub fn cost_bytes(&self) -> u64 {
        self.cost.bytes
    }
}
