//! What a store is to be like, and what it counts.

use crate::format::codec::Codec;
use crate::format::codec::int8::Quality;

/// When what is in memory is written to disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// As soon as a put has ended.
    Through,
    /// When its memory is needed.
    Back,
    /// Never, unless a put asks for it.
    Never,
}

/// What a store is to be like.
#[derive(Clone, Debug)]
pub struct Config {
    /// Most bytes of cells in memory.
    pub host_bytes: u64,
    /// Who leaves memory.
    pub host_policy: String,
    /// Who leaves the disk.
    pub disk_policy: String,
    /// What goes to disk when.
    pub write: Write,
    /// What may go to disk.
    pub admission: String,
    /// What cells are coded with on disk where the namespace's recipe does not say; it
    /// loses nothing.
    pub codec: Codec,
    /// The share of a tier at which room is made ahead of need.
    pub high: f64,
    /// The share at which that ends.
    pub low: f64,
    /// Most chunks.
    pub max_chunks: usize,
    /// Most sessions.
    pub max_sessions: u32,
    /// Most moves at once.
    pub max_moves: u32,
    /// Most cells on their way at once.
    pub max_jobs: u32,
    /// Events that are kept.
    pub events: usize,
    /// Cells of a batch.
    pub batch_cells: usize,
    /// Bytes of a batch.
    pub batch_bytes: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            host_bytes: 1 << 30,
            host_policy: "horizon".into(),
            disk_policy: "lru".into(),
            write: Write::Back,
            admission: "all".into(),
            codec: Codec::None,
            high: 0.97,
            low: 0.92,
            max_chunks: 1 << 20,
            max_sessions: 1 << 16,
            max_moves: 1 << 14,
            max_jobs: 1 << 16,
            events: 1 << 14,
            batch_cells: 64,
            batch_bytes: 8 << 20,
        }
    }
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Moves begun, by deed.
    pub moves: [u64; 3],
    /// Cells stored from outside.
    pub stored: u64,
    /// Cells that were there when they were to be stored.
    pub known: u64,
    /// Cells read from memory.
    pub host_hits: u64,
    /// Cells that had to be read from disk first.
    pub disk_hits: u64,
    /// Cells that were nowhere.
    pub misses: u64,
    /// Cells whose bytes were wrong, and that became misses.
    pub corrupt: u64,
    /// Cells written to disk.
    pub written: u64,
    /// Their bytes, as they are in memory.
    pub written_bytes: u64,
    /// Of those, cells that were coded.
    pub coded: u64,
    /// Their bytes, as they are in memory.
    pub coded_raw_bytes: u64,
    /// Their bytes on disk.
    pub coded_bytes: u64,
    /// What lossy codecs have lost.
    pub lost: Quality,
    /// Bytes loaded from disk.
    pub loaded_bytes: u64,
    /// Chunks that left memory and are on disk.
    pub demoted: u64,
    /// Chunks that left memory and are gone.
    pub dropped: u64,
    /// Chunks that left the disk.
    pub disk_evicted: u64,
    /// Chunks that were to leave memory, and the disk had no room for.
    pub refused: u64,
    /// Jobs that failed for want of room.
    pub no_room: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
}
