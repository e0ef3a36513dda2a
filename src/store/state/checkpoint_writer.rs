//! What a checkpoint says: the cells on disk, page by page, so that the core's lock
//! is held for short times only.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::format::checkpoint::Place;
use crate::format::record::Chunk;
use crate::meta::chunks::{Cell, Place as Where};
use crate::store::state::{At, StoreState};
use crate::tier::disk::{Cover, DiskTier, Keeper};

/// Chunks of a page.
const PAGE_CHUNKS: usize = 256;
/// Records after which a new checkpoint is worth writing.
const RECORDS: u64 = 1 << 15;

/// What those ask the core who carry out upkeep.
pub trait CheckpointWriter: Keeper {
    /// Fills a page, from a bookmark on; where the next one begins.
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)>;
}

/// Some chunks and their cells.
#[derive(Default)]
pub struct Page {
    chunks: Vec<(Chunk, usize)>,
    cells: Vec<Place>,
}

/// A checkpoint to be written.
pub struct Checkpoint {
    cover: Cover,
    chunks: usize,
    cells: usize,
}

impl Checkpoint {
    /// Writes it.
    pub fn write(
        &self,
        disk: &Arc<DiskTier>,
        checkpoint_writer: &mut dyn CheckpointWriter,
    ) -> Result<()> {
        disk.checkpoint(&self.cover, self.chunks, self.cells, &mut |sink| {
            let (mut page, mut next) = (Page::default(), Some((0, 0)));
            while let Some(from) = next {
                next = checkpoint_writer.page(from, &mut page);
                let mut first = 0;
                for (chunk, cells) in &page.chunks {
                    sink.chunk(chunk, &page.cells[first..first + cells])?;
                    first += cells;
                }
            }
            Ok(())
        })
    }
}

impl StoreState {
    /// Whether so much was written since the last checkpoint that a new one is due.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        self.upkeep.wants_checkpoint || self.upkeep.records >= RECORDS
    }

    /// Asks for a checkpoint soon: the next opening is faster.
    pub fn ask_for_checkpoint(&mut self) {
        self.upkeep.wants_checkpoint = true;
        self.settle();
    }

    /// Begins a checkpoint. No write may be under way: what was appended before is in
    /// the tables then.
    pub(super) fn begin_checkpoint(&mut self, disk: &Arc<DiskTier>) -> Checkpoint {
        self.upkeep.wants_checkpoint = false;
        self.upkeep.records = 0;
        let counts = self.tables.iter().map(|table| table.chunks.counts());
        let (mut chunks, mut cells) = (0, 0);
        for count in counts {
            chunks += count.chunks as usize;
            cells += count.cells[Tier::Disk as usize] as usize;
        }
        // What comes meanwhile is covered by the log, and may be in both.
        let more = |n: usize| n + n / 8 + 256;
        Checkpoint { cover: disk.cover(), chunks: more(chunks), cells: more(cells) }
    }

    /// Fills a page of a checkpoint, from a bookmark (board, slot) on; where the next
    /// one begins.
    pub fn page(&self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        page.chunks.clear();
        page.cells.clear();
        let (number, first) = from;
        let table = self.tables.get(number as usize)?;
        for slot in table.chunks.slots_from(first) {
            if page.chunks.len() == PAGE_CHUNKS {
                return Some((number, slot));
            }
            let before = page.cells.len();
            for layer in 0..table.layout.layers() {
                let cell = Cell { chunk: slot, layer };
                let place = table.chunks.place(cell, Tier::Disk);
                let Ok(Some(Where::Disk { spot, seal, coded })) = place else { continue };
                let planes = table.stored_planes(cell).count() as u16;
                let stored_bytes = table.disk_bytes(cell, coded) as u32;
                let (layer, codec) = (layer as u32, coded.codec());
                page.cells.push(Place { spot, seal, stored_bytes, layer, codec, planes });
            }
            let cells = page.cells.len() - before;
            if cells > 0 {
                page.chunks.push((self.record_of(At { table: number, slot }), cells));
            }
        }
        Some((number + 1, 0))
    }
}
