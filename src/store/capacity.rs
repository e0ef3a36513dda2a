//! Capacity of a store: the calculation of `kvtier plan`.

use crate::base::status::Result;
use crate::fail;
use crate::format::record::{self, blocks_of};
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{CELL_BYTES, CHUNK_BYTES};
use crate::meta::layout::Layout;
use crate::store::state::{Config, RECORD_CELLS, ROW_BESIDE_BYTES, disk_room};
use crate::tier::disk::{least_bytes_for, usual_record_bytes, usual_segment_bytes};
use crate::tier::host::{HostOpts, HostTier};

/// Sizes of a store.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// `host=`.
    pub host_bytes: u64,
    /// `disk(bytes=)`; 0 = no disk.
    pub disk_bytes: u64,
    /// `disk(segment=)`; 0 = default.
    pub segment_bytes: u64,
}

/// Capacity of a store for chunks of one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes of a full chunk.
    pub chunk_bytes: u64,
    /// Bytes of its longest cell.
    pub cell_bytes: u64,
    /// Bytes that a chunk takes in memory: cells take whole pages, and slabs have an unused rest.
    pub host_chunk_bytes: u64,
    /// Chunks that fit in memory.
    pub host_chunks: u64,
    /// Bytes that a chunk takes on disk, headers included.
    pub disk_chunk_bytes: u64,
    /// Bytes of a disk segment.
    pub segment_bytes: u64,
    /// Chunks on a full disk after an eviction.
    pub disk_chunks: u64,
    /// Bytes of tables for each chunk in memory or on disk, charged to the same budget.
    pub table_bytes: u64,
    /// Least host memory in which a chunk can be stored.
    pub least_host_bytes: u64,
    /// Least disk whose segments hold its cells.
    pub least_disk_bytes: u64,
}

/// Computes the capacity of a store of these sizes for a layout.
pub fn of(layout: &Layout, sizes: &Sizes) -> Result<Capacity> {
    let tokens = layout.chunk_tokens();
    let cells: Vec<u64> = (0..layout.layers())
        .filter_map(|layer| layout.group(layer))
        .map(|group| group.planes(tokens).bytes())
        .collect();
    let cell_bytes = cells.iter().copied().max().unwrap_or(0);
    let config = Config { host_bytes: sizes.host_bytes, ..Config::default() };
    let host =
        HostTier::new(None, &HostOpts { max_bytes: sizes.host_bytes, ..config.host_opts() })?;
    let host_chunk_bytes = cells.iter().map(|&bytes| host.share_of(bytes)).sum::<f64>();
    let segment_bytes = match sizes.segment_bytes {
        0 => usual_segment_bytes(sizes.disk_bytes),
        bytes => bytes,
    };
    if sizes.disk_bytes > 0 && cell_bytes + 2 * BLOCK_BYTES as u64 > segment_bytes {
        fail!(
            Limit,
            "a cell has {cell_bytes} bytes, and a segment of this disk {segment_bytes}: give \
             segment= at least twice a cell"
        );
    }
    let disk_chunk_bytes = on_disk(&cells, segment_bytes);
    let disk_room = disk_room(sizes.disk_bytes, config.disk_share(), 3 * segment_bytes);
    Ok(Capacity {
        chunk_bytes: layout.chunk_bytes(tokens),
        cell_bytes,
        host_chunk_bytes: host_chunk_bytes as u64,
        host_chunks: (sizes.host_bytes as f64 / host_chunk_bytes.max(1.0)) as u64,
        disk_chunk_bytes,
        segment_bytes: if sizes.disk_bytes > 0 { segment_bytes } else { 0 },
        disk_chunks: disk_room / disk_chunk_bytes.max(1),
        table_bytes: (CHUNK_BYTES + layout.layers() * CELL_BYTES) as u64 + ROW_BESIDE_BYTES,
        least_host_bytes: least_host(&cells)?,
        least_disk_bytes: least_disk(cell_bytes),
    })
}

/// Bytes that the cells of a chunk take on disk: whole blocks, record headers, and the unused end
/// of a segment.
fn on_disk(cells: &[u64], segment_bytes: u64) -> u64 {
    let most_bytes = usual_record_bytes(segment_bytes);
    let (mut blocks, mut longest, mut first) = (0, 0, 0);
    while first < cells.len() {
        let (mut count, mut bytes, mut record) = (0_usize, 0, 0);
        for &cell in &cells[first..] {
            if count > 0 && (count == RECORD_CELLS || bytes + cell > most_bytes) {
                break;
            }
            record += blocks_of(cell);
            (count, bytes) = (count + 1, bytes + cell);
        }
        let header = record::header_blocks(count, 2 * count);
        record += u64::from(header.unwrap_or(1));
        longest = longest.max(record);
        blocks += record;
        first += count;
    }
    let all = segment_bytes / BLOCK_BYTES as u64;
    let filled = (all.saturating_sub(1) / longest.max(1) * longest).max(1);
    (blocks as f64 * all as f64 / filled as f64) as u64 * BLOCK_BYTES as u64
}

/// Least host memory in which each cell of a chunk finds a segment of its length.
fn least_host(cells: &[u64]) -> Result<u64> {
    let fits = |host_bytes: u64| -> Result<bool> {
        let config = Config { host_bytes, ..Config::default() };
        let host = HostTier::new(None, &HostOpts { max_bytes: host_bytes, ..config.host_opts() })?;
        let mut lengths = cells.to_vec();
        lengths.sort_unstable();
        lengths.dedup();
        let segments = lengths.iter().map(|&bytes| host.slab_for(bytes));
        Ok(segments.sum::<u64>() <= host_bytes)
    };
    let mut host_bytes = crate::store::state::LEAST_HOST_BYTES;
    while !fits(host_bytes)? && host_bytes < 1 << 46 {
        host_bytes *= 2;
    }
    Ok(host_bytes)
}

/// Least disk whose default segments hold a cell.
fn least_disk(cell_bytes: u64) -> u64 {
    let holds = |bytes: u64| usual_segment_bytes(bytes) >= cell_bytes + 2 * BLOCK_BYTES as u64;
    let mut bytes = 1 << 20;
    while !holds(bytes) && bytes < 1 << 46 {
        bytes *= 2;
    }
    bytes.max(least_bytes_for(usual_segment_bytes(bytes)))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::meta::dtype::Dtype;
    use crate::meta::layout::Group;

    fn layout(layers: u16) -> Layout {
        let group = Group::gqa(0..layers, 8, 128, Dtype::Bf16).expect("sound");
        Layout::new(64, vec![group]).expect("sound")
    }

    #[test]
    fn capacity_matches_a_computation_by_hand() {
        let sizes = Sizes { host_bytes: 8 << 30, disk_bytes: 200 << 30, segment_bytes: 0 };
        let all = of(&layout(32), &sizes).expect("sound");
        assert_eq!((all.chunk_bytes, all.cell_bytes), (8 << 20, 256 << 10));
        assert_eq!((all.host_chunk_bytes, all.host_chunks), (8 << 20, 1024));
        assert_eq!(all.segment_bytes, 64 << 20);
        // Records of 4 cells with 256 blocks and a header; 63 of them fill a segment, except for
        // its header and the rest.
        let blocks = 8.0 * 257.0 * 16384.0 / (63.0 * 257.0);
        assert_eq!(all.disk_chunk_bytes, blocks as u64 * 4096);
        let room = (200u64 << 30) as f64 * 0.9575 - (3u64 * 64 * 1024 * 1024) as f64;
        assert_eq!(all.disk_chunks, room as u64 / all.disk_chunk_bytes);
        let none = of(&layout(2), &Sizes { disk_bytes: 0, ..sizes }).expect("sound");
        assert_eq!((none.disk_chunks, none.segment_bytes), (0, 0));
    }

    #[test]
    fn a_cell_longer_than_a_segment_is_refused() {
        let sizes = Sizes { host_bytes: 1 << 30, disk_bytes: 1 << 30, segment_bytes: 128 << 10 };
        let error = of(&layout(1), &sizes).expect_err("too long");
        assert!(error.message().contains("segment="), "{error}");
    }

    #[test]
    fn the_reported_minimum_sizes_suffice() {
        let all = of(&layout(4), &Sizes { host_bytes: 1 << 30, disk_bytes: 0, segment_bytes: 0 });
        let all = all.expect("sound");
        let least = Sizes {
            host_bytes: all.least_host_bytes,
            disk_bytes: all.least_disk_bytes,
            segment_bytes: 0,
        };
        assert!(all.least_host_bytes <= 1 << 20, "{all:?}");
        let all = of(&layout(4), &least).expect("sound");
        assert!(all.segment_bytes > 256 << 10, "{all:?}");
    }
}
