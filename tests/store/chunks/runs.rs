//! Runs of cells do what calls for each of their cells do.

use kvtier::base::budget::Tier;
use kvtier::meta::chunks::{Cell, Chunks, Dropped, Location, NewChunk, Shape};
use kvtier::meta::index::{NONE, Slot};
use kvtier::meta::key::Key;
use proptest::prelude::*;

const LAYERS: usize = 6;

fn table() -> (Chunks, Slot) {
    let mut table =
        Chunks::new(Shape { layers: LAYERS, chunk_tokens: 4, max_chunks: 4 }).expect("small");
    let new = NewChunk {
        key: Key([1; 32]),
        namespace: 0,
        parent: NONE,
        position: 0,
        valid_tokens: 4,
        owner: NONE,
        holes: false,
    };
    let slot = table.add(&new).expect("room").slot();
    (table, slot)
}

/// The cells of a run, alone.
fn each(first: Cell, cells: usize) -> impl Iterator<Item = Cell> {
    (first.layer..first.layer + cells).map(move |layer| Cell { layer, ..first })
}

fn assert_equal(runs: &Chunks, alone: &Chunks, slot: Slot) {
    assert_eq!(runs.marks(slot), alone.marks(slot));
    assert_eq!(runs.counts(), alone.counts());
    let rows = [runs, alone].map(|table| *table.chunk(slot).expect("the chunk"));
    assert_eq!(rows[0].cells(), rows[1].cells());
    assert_eq!(rows[0].cells_somewhere(), rows[1].cells_somewhere());
    assert_eq!(rows[0].is_moving(), rows[1].is_moving());
    for cell in each(Cell { chunk: slot, layer: 0 }, LAYERS) {
        let readers = [runs, alone].map(|table| table.readers(cell, Tier::Host).expect("a cell"));
        assert_eq!(readers[0], readers[1]);
        let places = [runs, alone].map(|table| table.place(cell, Tier::Host).expect("a cell"));
        assert_eq!(places[0], places[1]);
    }
}

/// Two tables, one of which is called by runs, and what is under way in both.
struct Both {
    runs: Chunks,
    alone: Chunks,
    slot: Slot,
    storing: Vec<(Cell, usize)>,
    reading: Vec<(Cell, usize)>,
    pieces: u32,
}

impl Both {
    fn store(&mut self, first: Cell, cells: usize) {
        let pieces: Vec<u32> = (0..cells as u32).map(|i| self.pieces + i).collect();
        self.pieces += cells as u32;
        let marks = self.runs.marks(self.slot).expect("the chunk");
        let is_idle = marks[first.layer..first.layer + cells].iter().all(|m| m.is_nowhere());
        assert_eq!(self.runs.begin_store_run(first, &pieces).is_ok(), is_idle);
        if is_idle {
            assert_eq!(self.runs.run_pieces(first, cells).expect("cells"), pieces);
            for cell in each(first, cells) {
                self.alone.begin_store(cell, Tier::Host).expect("idle");
            }
            self.storing.push((first, cells));
        }
    }

    fn end_store(&mut self, at: usize, has_arrived: bool) {
        let (first, cells) = self.storing.swap_remove(at);
        let pieces = self.runs.run_pieces(first, cells).expect("cells").to_vec();
        self.runs.end_store_run(first, cells, has_arrived).expect("stored");
        for (cell, piece) in each(first, cells).zip(pieces) {
            let place = has_arrived.then_some(Location::Host(piece));
            self.alone.end_store(cell, Tier::Host, place).expect("stored");
        }
    }

    fn read(&mut self, first: Cell, cells: usize) {
        let read = self.runs.begin_read_run(first, cells).expect("cells");
        let alone = each(first, cells)
            .take_while(|&cell| self.alone.begin_read(cell, Tier::Host).is_ok())
            .count();
        assert_eq!(read, alone);
        self.reading.extend((read > 0).then_some((first, read)));
    }

    fn end_read(&mut self, at: usize) {
        let (first, cells) = self.reading.swap_remove(at);
        let mut freed = Vec::new();
        let push = |layer, piece| freed.push((layer, Location::Host(piece)));
        self.runs.end_read_run(first, cells, push).expect("readers");
        let alone = each(first, cells).filter_map(|cell| {
            let place = self.alone.end_read(cell, Tier::Host).expect("a reader");
            place.map(|place| (cell.layer, place))
        });
        assert_eq!(freed, alone.collect::<Vec<_>>());
    }

    fn drop_where(&mut self, layers: u16) {
        let may = |layer: usize, _: u8| layers & 1 << layer != 0;
        let mut dropped = Vec::new();
        self.runs.drop_cells(self.slot, Tier::Host, may, &mut dropped);
        let cells = each(Cell { chunk: self.slot, layer: 0 }, LAYERS);
        let alone = cells.filter(|cell| may(cell.layer, 0)).filter_map(|cell| {
            let how = self.alone.begin_drop(cell, Tier::Host).ok()?;
            (how != Dropped::Absent).then_some((cell, how))
        });
        assert_eq!(dropped, alone.collect::<Vec<_>>());
    }
}

proptest! {
    #[test]
    fn runs_are_equal_to_calls_for_each_cell(
        calls in prop::collection::vec((0u8..8, 0usize..LAYERS, 1usize..=LAYERS, any::<u16>()), 1..200),
    ) {
        let ((runs, slot), (alone, _)) = (table(), table());
        let (storing, reading) = (Vec::new(), Vec::new());
        let mut both = Both { runs, alone, slot, storing, reading, pieces: 1 };
        for (what, layer, cells, any) in calls {
            let (first, cells) = (Cell { chunk: slot, layer }, cells.min(LAYERS - layer));
            let any = usize::from(any);
            match what {
                0 | 1 => both.store(first, cells),
                2 if !both.storing.is_empty() => both.end_store(any % both.storing.len(), any & 64 != 0),
                3 | 4 => both.read(first, cells),
                5 if !both.reading.is_empty() => both.end_read(any % both.reading.len()),
                6 => both.drop_where(any as u16),
                7 => {
                    // A referenced chunk keeps its last copies.
                    let refs = both.runs.chunk(slot).expect("the chunk").refs();
                    for table in [&mut both.runs, &mut both.alone] {
                        match refs {
                            0 => drop(table.retain(slot).expect("few")),
                            _ => drop(table.release(slot).expect("held")),
                        }
                    }
                }
                _ => {}
            }
            assert_equal(&both.runs, &both.alone, slot);
        }
    }
}

#[test]
fn runs_past_the_last_layer_and_of_idle_cells_are_refused() {
    let (mut table, slot) = table();
    let first = Cell { chunk: slot, layer: 4 };
    assert!(table.begin_store_run(first, &[1, 2, 3]).is_err());
    assert!(table.end_store_run(first, 2, true).is_err());
    assert!(table.end_read_run(first, 2, |_, _| ()).is_err());
    assert_eq!(table.begin_read_run(first, 2).expect("cells"), 0);
    assert!(table.begin_read_run(Cell { chunk: 9, layer: 0 }, 1).is_err());
}
