//! An index that several threads share over one disk tier: what `kv/` does, in
//! small. The same steps run on real threads and in a model of threads.
#![allow(dead_code)]

use std::collections::BTreeMap;

use kvtier::base::status::{Result, Status};
use kvtier::base::sync::{Condvar, Mutex};
use kvtier::format::checkpoint::Place;
use kvtier::tier::disk::{CellAt, DiskTier, Keeper, Mark, Recovered, Spot};

use crate::disk::{chunk_of, key_of, number_of, put, read, stored};

type Cells = BTreeMap<(u16, u32), (Spot, u64)>;

#[derive(Default)]
struct Inside {
    cells: Cells,
    /// Appends under way: a checkpoint waits for them.
    appending: u32,
}

/// Which cells live, and where.
pub struct Shared {
    inside: Mutex<Inside>,
    idle: Condvar,
}

/// Answers cleaning for one call.
struct Owner<'a>(&'a Shared);

impl Keeper for Owner<'_> {
    fn wants(&mut self, cell: &CellAt) -> bool {
        self.0.is_at(cell)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        let id = (number_of(&cell.chunk.key), cell.layer);
        let mut inside = self.0.inside.lock();
        match inside.cells.get_mut(&id) {
            Some((spot, _)) if *spot == cell.spot => {
                *spot = to;
                true
            }
            _ => false,
        }
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        panic!("nothing was damaged, and {cell:?} is")
    }
}

impl Shared {
    pub fn new() -> Shared {
        Shared { inside: Mutex::new(Inside::default()), idle: Condvar::new() }
    }

    fn is_at(&self, cell: &CellAt) -> bool {
        let id = (number_of(&cell.chunk.key), cell.layer);
        self.inside.lock().cells.get(&id) == Some(&(cell.spot, cell.seal))
    }

    /// Stores cells of a chunk that is not there.
    pub fn append(&self, tier: &DiskTier, n: u16, layers: &[u32]) -> Result<Mark> {
        self.inside.lock().appending += 1;
        let written = put(tier, n, layers, n % 2 == 0);
        let mut inside = self.inside.lock();
        inside.appending -= 1;
        let result = written.map(|(mark, cells)| {
            inside.cells.extend(layers.iter().map(|&layer| (n, layer)).zip(cells));
            mark
        });
        drop(inside);
        self.idle.notify_all();
        result
    }

    /// Drops a chunk, and says so on the disk if that is asked for.
    pub fn drop_chunk(&self, tier: &DiskTier, n: u16, forget: bool) -> Result<Option<Mark>> {
        let mut inside = self.inside.lock();
        let gone: Vec<(u16, u32)> =
            inside.cells.range((n, 0)..=(n, u32::MAX)).map(|(&id, _)| id).collect();
        let spots: Vec<(Spot, u64)> = gone
            .iter()
            .filter_map(|id| Some((inside.cells.remove(id)?.0, stored(id.0, id.1))))
            .collect();
        drop(inside);
        tier.drop_cells(spots);
        if forget { tier.forget(key_of(n), &[]).map(Some) } else { Ok(None) }
    }

    /// Reads a chunk; an error only counts if nothing was moved meanwhile.
    pub fn read(&self, tier: &DiskTier, n: u16) {
        let find = || -> Vec<(u16, u32, Spot, u64)> {
            let inside = self.inside.lock();
            let cells = inside.cells.range((n, 0)..=(n, u32::MAX));
            cells.map(|(&(n, layer), &(spot, seal))| (n, layer, spot, seal)).collect()
        };
        let cells = find();
        if cells.is_empty() {
            return;
        }
        let results = read(tier, &cells, n % 3 == 0);
        let now = find();
        for (cell, result) in cells.iter().zip(results) {
            if let Err(error) = result {
                assert!(!now.contains(cell), "{error} for {cell:?}, which is still there");
            }
        }
    }

    /// Cleans a segment; how many cells were moved.
    pub fn clean(&self, tier: &DiskTier, segment: u64) -> u64 {
        match tier.clean(segment, &mut Owner(self)) {
            Ok(cleaned) => cleaned.moved,
            Err(error) => {
                let fine = [Status::Busy, Status::NotFound, Status::Budget];
                assert!(fine.contains(&error.status()), "{error}");
                0
            }
        }
    }

    /// Writes a checkpoint.
    pub fn checkpoint(&self, tier: &DiskTier) -> Result<()> {
        let mut inside = self.inside.lock();
        let cover = tier.cover();
        while inside.appending > 0 {
            self.idle.wait(&mut inside);
        }
        let cells = inside.cells.len();
        drop(inside);
        // What is put meanwhile is behind the cover, and may be in it too.
        tier.checkpoint(&cover, cells + 500, cells + 1000, &mut |sink| {
            let mut from = 0;
            loop {
                // One chunk at a time: the index goes on changing.
                let inside = self.inside.lock();
                let Some((&(n, _), _)) = inside.cells.range((from, 0)..).next() else {
                    return Ok(());
                };
                let place = |(&(n, layer), &(spot, seal)): (&(u16, u32), &(Spot, u64))| Place {
                    spot: spot.0,
                    seal,
                    stored_bytes: stored(n, layer) as u32,
                    layer,
                    codec: 0,
                    planes: 2,
                };
                let cells = inside.cells.range((n, 0)..=(n, u32::MAX));
                let places: Vec<Place> = cells.map(place).collect();
                drop(inside);
                sink.chunk(&chunk_of(n), &places)?;
                from = n + 1;
            }
        })
    }

    /// What was found has all that is in the index, every cell once, and its bytes are
    /// right; nothing of the chunks that were forgotten.
    pub fn check(&self, tier: &DiskTier, found: &Recovered, forgotten: &[u16]) {
        let mut there = Cells::new();
        for (chunk, places) in found.chunks() {
            let n = number_of(&chunk.key);
            assert!(!forgotten.contains(&n), "chunk {n} was forgotten and is back");
            for place in places {
                let known = (Spot(place.spot), place.seal);
                assert!(there.insert((n, place.layer), known).is_none(), "found twice");
            }
        }
        let inside = self.inside.lock();
        let mut cells = Vec::new();
        for &(n, layer) in inside.cells.keys() {
            let &(spot, seal) = there.get(&(n, layer)).expect("all that was durable is there");
            cells.push((n, layer, spot, seal));
        }
        drop(inside);
        for (cell, result) in cells.iter().zip(read(tier, &cells, true)) {
            assert!(result.is_ok(), "{result:?} for {cell:?}");
        }
    }
}
