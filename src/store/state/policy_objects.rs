//! Chunks and cells as policies know them.

use crate::base::budget::Tier;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Facts;
use crate::policy::evictor::New;
use crate::store::state::granularity::{Member, cell_id};
use crate::store::state::tier_cache::units_of;
use crate::store::state::transfer::TransferKind;
use crate::store::state::{At, ChunkTable, Spaces};

const DISK: usize = Tier::Disk as usize;

/// Whether a move brings a chunk to memory.
pub(super) fn comes(rows: &ChunkTable, slot: Slot, kind: TransferKind) -> bool {
    kind == TransferKind::Put || rows.chunks.chunk(slot).is_some_and(|row| row.cells()[DISK] > 0)
}

pub(super) fn member(rows: &ChunkTable, at: At) -> Member {
    let row = rows.chunks.chunk(at.slot);
    Member {
        at,
        position: row.map_or(0, |row| row.position()),
        units: units_of(rows.chunk_bytes(at.slot)),
        tokens: row.map_or(0, |row| row.valid_tokens()),
    }
}

/// A chunk as policies know it. Where holes can be computed it stands for itself: it may
/// leave before those that continue it.
pub(super) fn new_object(spaces: &Spaces, rows: &ChunkTable, slot: Slot) -> New {
    let row = rows.chunks.chunk(slot);
    let space = row.and_then(|row| spaces.get(row.namespace() as usize));
    let holes = space.is_some_and(|space| space.holes);
    let parent = rows.chunks.parent(slot).filter(|&parent| parent != NONE && !holes);
    let tokens = row.map_or(0, |row| row.valid_tokens());
    let context = row.map_or(0, |row| row.position()).saturating_mul(rows.layout.chunk_tokens());
    New {
        id: rows.id(slot),
        parent: parent.map(|parent| rows.id(parent)),
        units: units_of(rows.chunk_bytes(slot)),
        facts: Facts { tokens, context, ..Facts::default() },
    }
}

/// The same of a cell: it continues that of its layer in the chunk before.
pub(super) fn new_cell(spaces: &Spaces, rows: &ChunkTable, cell: Cell) -> New {
    let chunk = new_object(spaces, rows, cell.chunk);
    let small = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    New {
        id: cell_id(chunk.id, cell.layer),
        parent: chunk.parent.map(|parent| cell_id(parent, cell.layer)),
        units: units_of(rows.planes(cell).bytes()),
        facts: Facts {
            layer: small(cell.layer),
            layers: small(rows.layout.layers()),
            chunk: rows.chunks.chunk(cell.chunk).map_or(0, |row| row.position()),
            ..chunk.facts
        },
    }
}
