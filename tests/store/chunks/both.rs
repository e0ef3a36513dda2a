//! Calls to the chunk table and to the naive model; all results must be equal.

use crate::chunks::naive::{In, LAYERS, LIMIT, Model, TOKENS, Way, status};
use kvtier::base::budget::{ALL_TIERS, Tier};
use kvtier::base::status::Status;
use kvtier::meta::chunks::{
    Added, Arrival, Cell, Chunks, Dropped, Location, NewChunk, Pin, Shape, TIERS, WHOLE,
};
use kvtier::meta::index::{NONE, Slot};
use kvtier::meta::key::Key;

/// A few keys. Some share their first bytes, and the index knows no others.
pub fn key(n: u16) -> Key {
    let mut key = Key::default();
    key.0[0] = n as u8 & 1;
    key.0[31] = n as u8;
    key
}

/// A call and its arguments.
pub type Call = (u8, u16, u16, u16);

/// Both tables, and all places in use.
pub struct Pair {
    pub table: Chunks,
    pub model: Model,
    pub taken: Vec<Location>,
    /// Calls use few cells and tiers, so that each cell sees many calls.
    pub narrow: bool,
}

impl Pair {
    pub fn new(narrow: bool) -> Pair {
        let shape = Shape { layers: LAYERS, chunk_tokens: TOKENS, max_chunks: LIMIT };
        let table = Chunks::new(shape).expect("small");
        Pair { table, model: Model::default(), taken: Vec::new(), narrow }
    }

    pub fn freed(&mut self, place: Option<Location>) {
        let Some(place) = place else { return };
        let at = self.taken.iter().position(|&taken| taken == place);
        self.taken.swap_remove(at.expect("a freed place was in use"));
    }

    pub fn call_chunk(&mut self, (what, a, b, c): Call) {
        let slot = Slot::from(a % 7);
        match what {
            0..=2 => {
                let position = u32::from(b % 4);
                // Most chunks that continue another chunk have the namespace and position that this
                // requires.
                let above = self.model.live.get(&slot).filter(|_| c % 5 > 0).map(|known| known.new);
                let new = NewChunk {
                    key: key(b),
                    namespace: above.map_or(u32::from(c & 1), |n| n.namespace),
                    parent: if position == 0 && above.is_none() { NONE } else { slot },
                    position: above.map_or(position, |n| n.position + 1),
                    valid_tokens: [TOKENS, TOKENS, TOKENS, 2, 0, 5][usize::from(c / 5 % 6)],
                    owner: [NONE, NONE, 1, 2][usize::from(c / 30 % 4)],
                    holes: b & 8 != 0,
                };
                let want = self.model.check_add(&new);
                let got = status(self.table.add(&new));
                match (got, want) {
                    (Ok(Added::New(slot)), Ok(None)) => self.model.add(slot, &new),
                    (Ok(Added::Existing(slot)), Ok(Some(there))) => {
                        assert_eq!(slot, there);
                        self.model.join(slot, new.parent);
                    }
                    (Err(got), Err(want)) => assert_eq!(got, want, "{new:?}"),
                    (got, want) => panic!("{got:?}, not {want:?}: {new:?}"),
                }
            }
            3 => {
                let mut places = Vec::new();
                let got = status(self.table.remove(slot, |_, place| places.push(place)));
                let want = self.model.remove(slot);
                assert_eq!(got.map(|above| (places.clone(), above)), want);
                places.into_iter().for_each(|place| self.freed(Some(place)));
            }
            4 => {
                let want = self.model.chunk(slot).map(|known| known.refs += 1);
                assert_eq!(status(self.table.retain(slot).map(|_| ())), want);
            }
            5 => {
                let refs = self.model.chunk(slot).and_then(|known| {
                    known.refs = known.refs.checked_sub(1).ok_or(Status::State)?;
                    Ok(())
                });
                let want = refs.map(|()| self.model.is_removable(slot));
                assert_eq!(status(self.table.release(slot)), want);
            }
            6 => {
                let pin = Pin { priority: b as u8, until_ns: u64::from(c) };
                let want = self.model.chunk(slot).map(|known| {
                    let old = known.pin.unwrap_or_default();
                    let until_ns = old.until_ns.max(pin.until_ns);
                    known.pin = Some(Pin { priority: old.priority.max(pin.priority), until_ns });
                });
                assert_eq!(status(self.table.pin(slot, pin)), want);
            }
            _ => {
                let was = self.model.chunk(slot).map(|known| known.pin.take().is_some());
                let want = was.map(|was| was && self.model.is_removable(slot));
                assert_eq!(status(self.table.unpin(slot)), want);
            }
        }
    }

    /// Adds a chunk whose parent may be added later, or never.
    pub fn add_with_parent_key(&mut self, (a, b, c): (u16, u16, u16)) {
        let above = key(a);
        let before = self.model.find(&above).and_then(|slot| self.model.live.get(&slot));
        let before = before.filter(|_| c % 5 > 0).map(|known| known.new);
        let new = NewChunk {
            key: key(b),
            namespace: before.map_or(u32::from(c & 1), |n| n.namespace),
            parent: Slot::from(c % 7),
            position: before.map_or(u32::from(b % 4), |n| n.position + 1),
            valid_tokens: [TOKENS, TOKENS, 2, 0][usize::from(c / 5 % 4)],
            owner: [NONE, NONE, NONE, 1][usize::from(c / 30 % 4)],
            holes: b & 8 != 0,
        };
        let want = self.model.check_add_behind(&new, &above);
        let got = status(self.table.add_with_parent_key(&new, &above));
        let parent = if new.position == 0 { None } else { self.model.find(&above) };
        let new = NewChunk { parent: parent.unwrap_or(NONE), ..new };
        match (got, want) {
            (Ok(Added::New(slot)), Ok(None)) => {
                self.model.add(slot, &new);
                let waits = parent.is_none() && new.position > 0;
                self.model.live.get_mut(&slot).expect("added").above = waits.then_some(above);
            }
            (Ok(Added::Existing(slot)), Ok(Some(there))) => {
                assert_eq!(slot, there);
                self.model.join(slot, new.parent);
            }
            (Err(got), Err(want)) => assert_eq!(got, want, "{new:?}"),
            (got, want) => panic!("{got:?}, not {want:?}: {new:?}"),
        }
    }

    pub fn join(&mut self, slot: Slot, parent: Slot) {
        assert_eq!(self.table.join(slot, parent), self.model.join(slot, parent));
    }

    pub fn call_cell(&mut self, (what, a, b, c): Call) {
        let mut cell = Cell { chunk: Slot::from(a % 6), layer: usize::from(b % 4) };
        let (mut from, mut to) = (c % 16 / 3 % 5, (c >> 4) % 5);
        if self.narrow {
            let first = self.model.live.keys().next();
            cell = Cell { chunk: first.copied().unwrap_or(0), layer: 0 };
            (from, to) = (c % 2 + 1, (c >> 4) % 3);
        }
        let (from, to) = (ALL_TIERS[usize::from(from)], ALL_TIERS[usize::from(to)]);
        // Now and then, a place that is in another tier.
        let place = self.model.new_place(if c >> 9 == 0 { from } else { to });
        match what {
            0..=2 => {
                let want = self.model.begin_store(cell, to);
                assert_eq!(status(self.table.begin_store(cell, to)), want);
            }
            3..=5 => {
                let place = (c % 5 > 0).then_some(place);
                let got = status(self.table.end_store(cell, to, place));
                assert_eq!(got, self.model.end_store(cell, to, place));
                self.taken.extend(place.filter(|_| got.is_ok()));
            }
            6..=8 => {
                let want = self.model.begin_copy(cell, from, to);
                assert_eq!(status(self.table.begin_copy(cell, from, to)), want);
            }
            9..=11 => {
                let arrival = [Arrival::Arrived(place), Arrival::Failed, Arrival::BadSource]
                    [usize::from(b >> 4) % 3];
                let got = status(self.table.end_copy(cell, to, arrival));
                assert_eq!(got, self.model.end_copy(cell, to, arrival));
                if let (Ok(_), Arrival::Arrived(place)) = (&got, arrival) {
                    self.taken.push(place);
                }
                self.freed(got.unwrap_or(None));
            }
            12 => {
                let want = self.model.begin_read(cell, from);
                assert_eq!(status(self.table.begin_read(cell, from)), want);
            }
            13 => self.end_read(cell, from),
            14 | 15 => {
                let lose = what == 15 && c % 3 == 0;
                let (got, want) = match lose {
                    true => (self.table.lose(cell, from), self.model.lose(cell, from)),
                    false => (self.table.begin_drop(cell, from), self.model.begin_drop(cell, from)),
                };
                let got = status(got);
                assert_eq!(got, want);
                if let Ok(Dropped::Freed(place)) = got {
                    self.freed(Some(place));
                }
            }
            _ => {
                let known = self.model.cell(cell).ok().and_then(|t| t[2].place);
                let at = match known {
                    Some(Location::Disk { spot, .. }) if b & 64 != 0 => spot,
                    _ => u64::from(c),
                };
                let new = u64::from(c) << 40 | self.model.places;
                let got = status(self.table.relocate(cell, at, new));
                assert_eq!(got, self.model.relocate(cell, at, new));
                if let (Ok(true), Some(Location::Disk { seal, coded, .. })) = (got, known) {
                    self.freed(known);
                    self.taken.push(Location::Disk { spot: new, seal, coded });
                }
            }
        }
    }

    pub fn end_read(&mut self, cell: Cell, tier: Tier) {
        let got = status(self.table.end_read(cell, tier));
        assert_eq!(got, self.model.end_read(cell, tier));
        self.freed(got.unwrap_or(None));
    }

    /// Compares all answers of the table and the model.
    pub fn compare(&self) {
        let Pair { table, model, taken, .. } = self;
        let counts = table.counts();
        let all = || model.live.values().flat_map(|known| &known.cells);
        assert_eq!(counts.chunks as usize, model.live.len());
        assert_eq!(
            table.slots().collect::<Vec<_>>(),
            model.live.keys().copied().collect::<Vec<_>>()
        );
        for tier in 0..TIERS {
            let there = all().filter(|tiers| tiers[tier].place.is_some()).count();
            assert_eq!(counts.cells[tier], there as u64);
        }
        // A remote hint is no place.
        let somewhere = all().filter(|tiers| tiers[..3].iter().any(|t| t.place.is_some())).count();
        assert_eq!(counts.cells_somewhere, somewhere as u64);
        let moving = |t: &In| u64::from(t.readers) + u64::from(t.way.is_some());
        assert_eq!(counts.moving, all().flatten().map(moving).sum::<u64>());
        assert_eq!((counts.lost, counts.failed), (model.lost, model.failed));
        let places = all().flatten().filter(|t| t.place.is_some() || t.leaving.is_some());
        assert_eq!(places.count(), taken.len());
        for slot in 0..LIMIT as Slot + 2 {
            self.compare_chunk(slot);
        }
        let keys: Vec<Key> = (0..16).map(key).collect();
        let (mut slots, mut found) = (vec![7; 16], vec![7; 16]);
        table.find_many(&keys, &mut slots);
        table.exists_many(&keys, &mut found);
        for (key, (slot, found)) in keys.iter().zip(slots.into_iter().zip(found)) {
            assert_eq!(model.find(key), table.find(key));
            assert_eq!(model.find(key).unwrap_or(NONE), slot);
            let cells = model.live.get(&slot).map(|known| &known.cells);
            let whole = |tiers: &dyn Fn(&[In; TIERS]) -> bool| {
                u8::from(cells.is_some_and(|cells| cells.iter().all(tiers)))
            };
            let some = whole(&|tiers| tiers[..3].iter().any(|t| t.place.is_some())) * WHOLE;
            let bits = (0..TIERS).map(|i| whole(&|tiers| tiers[i].place.is_some()) << i);
            assert_eq!(found, bits.fold(some, |all, bit| all | bit));
        }
    }

    pub fn compare_chunk(&self, slot: Slot) {
        let Pair { table, model, .. } = self;
        assert_eq!(table.is_removable(slot), model.is_removable(slot));
        assert_eq!(table.parent(slot), model.parent(slot));
        assert_eq!(table.parent_key(slot).copied(), model.parent_key(slot));
        let (Some(row), Some(known)) = (table.chunk(slot), model.live.get(&slot)) else {
            assert!(table.chunk(slot).is_none() && !model.live.contains_key(&slot));
            assert!(table.key(slot).is_none() && table.marks(slot).is_none());
            return;
        };
        assert_eq!(table.key(slot), Some(&known.new.key));
        assert_eq!(row.children() as usize, model.children(slot));
        assert_eq!((row.refs(), row.pin()), (known.refs, known.pin));
        assert_eq!(row.is_blocked(), model.is_blocked(slot));
        assert_eq!(row.is_moving(), model.is_moving(slot));
        assert_eq!(row.is_rejoined(), known.rejoined);
        assert_eq!(row.owner(), Some(known.new.owner).filter(|&owner| owner != NONE));
        let facts = (row.namespace(), row.position(), row.valid_tokens());
        assert_eq!(facts, (known.new.namespace, known.new.position, known.new.valid_tokens));
        for (layer, tiers) in known.cells.iter().enumerate() {
            let marks = table.marks(slot).expect("it is live")[layer];
            let cell = Cell { chunk: slot, layer };
            let bits = |is: &dyn Fn(&In) -> bool| {
                tiers.iter().enumerate().fold(0, |all, (i, t)| all | u8::from(is(t)) << i)
            };
            let places = bits(&|t| t.place.is_some());
            assert_eq!((marks.resident_tiers(), marks.is_remote()), (places & 7, places & 8 != 0));
            assert_eq!(marks.leaving(), bits(&|t| t.leaving.is_some()));
            assert_eq!(marks.loading(), bits(&|t| matches!(t.way, Some(Way::Copy(_)))));
            assert_eq!(marks.storing(), bits(&|t| t.way == Some(Way::Store)));
            for (tier, here) in ALL_TIERS.into_iter().zip(tiers) {
                assert_eq!(status(table.place(cell, tier)), Ok(here.place));
                assert_eq!(status(table.readers(cell, tier)), Ok(here.readers));
            }
        }
    }

    /// Ends all operations and evicts everything: no operation may be stuck, and no place may
    /// remain in use.
    pub fn tear_down(&mut self) {
        let slots: Vec<Slot> = self.model.live.keys().copied().collect();
        for &slot in &slots {
            for (layer, tier) in (0..LAYERS).flat_map(|l| (0..TIERS).map(move |t| (l, t))) {
                let cell = Cell { chunk: slot, layer };
                let here = self.model.live[&slot].cells[layer][tier].clone();
                let tier = ALL_TIERS[tier];
                match here.way {
                    Some(Way::Store) => {
                        self.model.end_store(cell, tier, None).expect("a store under way");
                        self.table.end_store(cell, tier, None).expect("a store under way");
                    }
                    Some(Way::Copy(_)) => {
                        let got = status(self.table.end_copy(cell, tier, Arrival::Failed));
                        assert_eq!(got, self.model.end_copy(cell, tier, Arrival::Failed));
                        self.freed(got.unwrap_or(None));
                    }
                    None => {}
                }
            }
        }
        for &slot in &slots {
            for (layer, tier) in (0..LAYERS).flat_map(|l| (0..TIERS).map(move |t| (l, t))) {
                for _ in 0..self.model.live[&slot].cells[layer][tier].readers {
                    self.end_read(Cell { chunk: slot, layer }, ALL_TIERS[tier]);
                }
            }
            while self.table.chunk(slot).is_some_and(|row| row.refs() > 0) {
                self.call_chunk((5, slot as u16, 0, 0));
            }
            self.call_chunk((7, slot as u16, 0, 0));
        }
        self.compare();
        // The last chunks of each path first, repeatedly.
        for _ in &slots {
            for &slot in
                slots.iter().filter(|slot| self.model.is_removable(**slot)).collect::<Vec<_>>()
            {
                self.call_chunk((3, slot as u16, 0, 0));
            }
        }
        self.compare();
        assert!(self.table.is_empty() && self.taken.is_empty());
    }
}
