//! A file of a simulated disk: its current content, its durable content, and the writes between.

use crate::disk::content::{Content, SECTOR_BYTES};
use kvtier::base::random::Random;
use kvtier::base::status::{Result, Status};

/// Sectors after a write, and the file's length at that time.
struct Write {
    offset: u64,
    data: Vec<u8>,
    len: u64,
}

/// A file without its names.
#[derive(Default)]
pub struct Inode {
    now: Content,
    durable: Content,
    /// Writes since the last sync, in order.
    pending: Vec<Write>,
    pending_bytes: u64,
}

/// Survival of unsynced writes in a crash.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Survival {
    None,
    Some,
    All,
}

impl Inode {
    /// A new file of zeros.
    pub fn new(bytes: u64) -> Inode {
        let mut inode = Inode::default();
        inode.now.set_len(bytes);
        inode.pending.push(Write { offset: 0, data: Vec::new(), len: bytes });
        inode
    }

    /// Content that a reader sees.
    pub fn now(&self) -> &Content {
        &self.now
    }

    /// Content that survives a power failure.
    pub fn durable(&self) -> &Content {
        &self.durable
    }

    /// Unsynced bytes.
    pub fn pending_bytes(&self) -> u64 {
        self.pending_bytes
    }

    /// Writes consecutive ranges.
    pub fn write(&mut self, offset: u64, ranges: &[&[u8]]) -> Result<()> {
        let mut end = offset;
        for range in ranges {
            self.now.write(end, range)?;
            end = end.saturating_add(range.len() as u64);
        }
        self.note(offset, end)
    }

    /// Records the sectors after a write.
    fn note(&mut self, offset: u64, end: u64) -> Result<()> {
        let start = offset / SECTOR_BYTES * SECTOR_BYTES;
        // The whole last sector, also past the end of the file: otherwise two states of different
        // length could mix.
        let stop = end.next_multiple_of(SECTOR_BYTES);
        let bytes = stop.saturating_sub(start) as usize;
        let mut data = Vec::new();
        data.try_reserve_exact(bytes).map_err(|_| Status::NoMem)?;
        data.resize(bytes, 0);
        self.now.read(start, &mut data);
        self.pending.try_reserve(1).map_err(|_| Status::NoMem)?;
        self.pending.push(Write { offset: start, data, len: self.now.len() });
        self.pending_bytes += bytes as u64;
        Ok(())
    }

    /// Makes everything durable.
    pub fn sync(&mut self) -> Result<()> {
        self.write_back(0)
    }

    /// Makes the oldest writes durable until at most `most` bytes are unsynced, as operating
    /// systems do at any time.
    pub fn write_back(&mut self, most: u64) -> Result<()> {
        let mut done = 0;
        for write in &self.pending {
            if most > 0 && self.pending_bytes <= most {
                break;
            }
            self.durable.write(write.offset, &write.data)?;
            self.durable.set_len(write.len);
            self.pending_bytes -= write.data.len() as u64;
            done += 1;
        }
        self.pending.drain(..done);
        Ok(())
    }

    /// A sync fails: unsynced writes are durable or lost, and are not retried. The page cache may
    /// keep lost content until it is dropped.
    pub fn fail_sync(&mut self, random: &mut Random) -> Result<()> {
        self.survive(random)?;
        if random.coin() {
            self.now = self.durable.clone();
        }
        Ok(())
    }

    /// A power failure: each sector may hold any state since the last sync.
    pub fn crash(&mut self, random: &mut Random) -> Result<()> {
        self.survive(random)?;
        self.now = self.durable.clone();
        Ok(())
    }

    fn survive(&mut self, random: &mut Random) -> Result<()> {
        let survival = match random.below(8) {
            0 => Survival::None,
            1 => Survival::All,
            _ => Survival::Some,
        };
        let mut pending = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let last = pending.last().map_or(self.durable.len(), |write| write.len);
        // Any length since the last sync is possible; 0 = the durable one.
        let before = self.durable.len();
        let len = match random.below(pending.len() as u64 + 1) {
            _ if survival == Survival::All => last,
            0 => before,
            _ if survival == Survival::None => before,
            n => pending.get(n as usize - 1).map_or(last, |write| write.len),
        };
        if survival == Survival::Some && random.coin() {
            for i in (1..pending.len()).rev() {
                pending.swap(i, random.below(i as u64 + 1) as usize);
            }
        }
        for write in &pending {
            match (survival, random.below(3)) {
                (Survival::None, _) | (Survival::Some, 0) => {}
                (Survival::All, _) | (Survival::Some, 1) => {
                    self.durable.write(write.offset, &write.data)?
                }
                (Survival::Some, _) => self.tear(write, random)?,
            }
        }
        self.durable.set_len(len);
        Ok(())
    }

    /// Any sectors of a write survive.
    fn tear(&mut self, write: &Write, random: &mut Random) -> Result<()> {
        let often = random.below(1_000_001) as u32;
        for (i, sector) in write.data.chunks(SECTOR_BYTES as usize).enumerate() {
            if random.chance(often) {
                self.durable.write(write.offset + i as u64 * SECTOR_BYTES, sector)?;
            }
        }
        Ok(())
    }

    /// Flips a bit in every copy.
    pub fn rot(&mut self, bit: u64) -> Result<()> {
        self.now.flip(bit)?;
        self.durable.flip(bit)?;
        for write in &mut self.pending {
            let byte = (bit / 8).checked_sub(write.offset).and_then(|at| usize::try_from(at).ok());
            if let Some(byte) = byte.and_then(|at| write.data.get_mut(at)) {
                *byte ^= 1 << (bit % 8);
            }
        }
        Ok(())
    }
}
