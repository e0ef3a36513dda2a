//! A file of a simulated disk: what a reader sees, what would survive, and what
//! was written between.

use crate::disk::content::{Content, SECTOR_BYTES};
use kvtier::base::random::Random;
use kvtier::base::status::{Result, Status};

/// Sectors as they were after a write, and how long the file was then.
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
    /// Since the last sync, in order.
    pending: Vec<Write>,
    pending_bytes: u64,
}

/// How much of what was not synced survives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
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

    /// What a reader sees.
    pub fn now(&self) -> &Content {
        &self.now
    }

    /// What a power failure cannot take.
    pub fn durable(&self) -> &Content {
        &self.durable
    }

    /// Bytes that wait for a sync.
    pub fn pending_bytes(&self) -> u64 {
        self.pending_bytes
    }

    /// Writes ranges one after the other.
    pub fn write(&mut self, offset: u64, ranges: &[&[u8]]) -> Result<()> {
        let mut end = offset;
        for range in ranges {
            self.now.write(end, range)?;
            end = end.saturating_add(range.len() as u64);
        }
        self.note(offset, end)
    }

    /// Notes what sectors hold after a write.
    fn note(&mut self, offset: u64, end: u64) -> Result<()> {
        let start = offset / SECTOR_BYTES * SECTOR_BYTES;
        // The whole of the last sector, also past the end of the file: else of two
        // states of it, one shorter, a mixture could come about.
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

    /// Makes all durable.
    pub fn sync(&mut self) -> Result<()> {
        self.write_back(0)
    }

    /// Makes the oldest writes durable until no more than `most` bytes wait, as
    /// systems do when they please.
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

    /// A sync went wrong: what waited is durable or lost, and nobody will try again.
    /// The page cache may go on to show what is lost, until it forgets.
    pub fn fail_sync(&mut self, random: &mut Random) -> Result<()> {
        self.survive(random)?;
        if random.coin() {
            self.now = self.durable.clone();
        }
        Ok(())
    }

    /// The power failed: of each sector any state since the last sync may be there.
    pub fn crash(&mut self, random: &mut Random) -> Result<()> {
        self.survive(random)?;
        self.now = self.durable.clone();
        Ok(())
    }

    fn survive(&mut self, random: &mut Random) -> Result<()> {
        let mood = match random.below(8) {
            0 => Mood::None,
            1 => Mood::All,
            _ => Mood::Some,
        };
        let mut pending = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let last = pending.last().map_or(self.durable.len(), |write| write.len);
        // Any length the file had is possible; 0 = the durable one.
        let before = self.durable.len();
        let len = match random.below(pending.len() as u64 + 1) {
            _ if mood == Mood::All => last,
            0 => before,
            _ if mood == Mood::None => before,
            n => pending.get(n as usize - 1).map_or(last, |write| write.len),
        };
        if mood == Mood::Some && random.coin() {
            for i in (1..pending.len()).rev() {
                pending.swap(i, random.below(i as u64 + 1) as usize);
            }
        }
        for write in &pending {
            match (mood, random.below(3)) {
                (Mood::None, _) | (Mood::Some, 0) => {}
                (Mood::All, _) | (Mood::Some, 1) => {
                    self.durable.write(write.offset, &write.data)?
                }
                (Mood::Some, _) => self.tear(write, random)?,
            }
        }
        self.durable.set_len(len);
        Ok(())
    }

    /// Any sectors of a write get through.
    fn tear(&mut self, write: &Write, random: &mut Random) -> Result<()> {
        let often = random.below(1_000_001) as u32;
        for (i, sector) in write.data.chunks(SECTOR_BYTES as usize).enumerate() {
            if random.chance(often) {
                self.durable.write(write.offset + i as u64 * SECTOR_BYTES, sector)?;
            }
        }
        Ok(())
    }

    /// Turns a bit over, wherever it is kept.
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
