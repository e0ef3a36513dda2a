//! What an opening finds on disk becomes rows again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::checkpoint::Place;
use crate::format::codec::Codec;
use crate::format::record::{self, blocks_of};
use crate::meta::chunks::{Begin, Cell, Coded, NewChunk, Place as Where};
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;
use crate::meta::layout::Layout;
use crate::store::state::chunk_table::note;
use crate::store::state::namespace_notes::Noted;
use crate::store::state::{At, SpaceOpts, StoreState};
use crate::tier::disk::{Mark, Recovered, Spot};

/// What the name of a namespace's note starts with.
pub(super) const NOTE: &[u8] = b"namespace ";
const VERSION: u8 = 1;

/// What became of what was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Namespaces.
    pub spaces: u64,
    /// Chunks.
    pub chunks: u64,
    /// Cells.
    pub cells: u64,
    /// Cells that were of no use: of unknown namespaces, parts of chunks that are not
    /// full, there twice, or too many.
    pub dropped: u64,
}

impl StoreState {
    /// Takes over what the disk tier has found. Before anything else is done.
    pub fn adopt(&mut self, recovered: &Recovered) -> Result<Adopted> {
        self.check_limits(recovered)?;
        let spaces = self.adopt_spaces(recovered)?;
        let mut adopted = Adopted { spaces: spaces.len() as u64, ..Adopted::default() };
        let mut unwanted: Vec<(Spot, u64)> = Vec::new();
        for (chunk, cells) in oldest_first(recovered, self.free_rows()) {
            let added = self.adopt_chunk(chunk);
            for place in cells {
                let layer = place.layer as usize;
                let came = added.is_some_and(|(table, slot)| {
                    let cell = Cell { chunk: slot, layer };
                    let bytes = self.tables[table as usize].planes(cell).bytes();
                    let (spot, seal) = (place.spot, place.seal);
                    form_of(place, bytes).is_some_and(|coded| {
                        self.adopt_cell(table, cell, Where::Disk { spot, seal, coded })
                    })
                });
                match came {
                    true => adopted.cells += 1,
                    false => unwanted.push((Spot(place.spot), u64::from(place.stored_bytes))),
                }
            }
            if let Some((table, slot)) = added {
                adopted.chunks += 1;
                self.note_below(At { table, slot });
                self.tidy(table, slot);
            }
        }
        adopted.dropped = unwanted.len() as u64;
        // Those of which nothing was of use.
        self.look_at_spaces(&spaces);
        self.pay_for_rows(0);
        if let Some(disk) = &self.disk {
            disk.drop_cells(unwanted);
            self.upkeep.recovered(&disk.segments());
        }
        // The disk may be smaller than it was.
        self.look_at_disk();
        Ok(adopted)
    }

    /// Takes over the namespaces of what was found; their numbers, those first that were written
    /// to last. What is noted of others goes.
    fn adopt_spaces(&mut self, recovered: &Recovered) -> Result<Vec<u32>> {
        let (mut unknown, mut first) = (0, None);
        let (mut fit, mut layouts) = (Vec::new(), BTreeSet::new());
        for (newest, at, key) in newest_first(recovered) {
            let session = &recovered.sessions[at];
            if newest == 0 {
                self.drop_found_note(&session.name);
                continue;
            }
            let opts = match read_note(key, &session.payload) {
                Ok(opts) => opts,
                Err(error) => {
                    (unknown, first) = (unknown + 1, first.or(Some(error)));
                    continue;
                }
            };
            // What was given up for others may be there again.
            let layout = opts.layout.encode();
            let is_new = !layouts.contains(&layout);
            if fit.len() >= self.config.max_spaces
                || is_new && layouts.len() >= self.config.max_layouts
            {
                self.drop_found_note(&session.name);
                continue;
            }
            layouts.insert(layout);
            fit.push((at, fit.len(), opts));
        }
        // In the order of their names: what is there decides their numbers, not when it came.
        fit.sort_unstable_by_key(|&(at, ..)| at);
        let mut numbers = vec![0; fit.len()];
        for (at, age, opts) in &fit {
            let number = self.add_space(opts)?;
            numbers[*age] = number;
            let disk = self.disk.as_ref();
            let name = &recovered.sessions[*at].name;
            let mark = disk.and_then(|disk| disk.segment_of_session(name)).map(Mark::found);
            self.spaces[number as usize].below.noted = mark.map_or(Noted::No, Noted::Written);
        }
        if let Some(error) = first {
            log::warn!("{unknown} namespaces on disk are not understood: {error}");
        }
        Ok(numbers)
    }

    fn drop_found_note(&mut self, name: &[u8]) {
        if let Some(disk) = &self.disk {
            disk.drop_session(name);
            self.upkeep.sweep_soon();
        }
    }

    fn adopt_chunk(&mut self, chunk: &record::Chunk) -> Option<(u32, Slot)> {
        let number = self.find_space(&chunk.namespace)?;
        let space = self.spaces[number as usize];
        let is_known = self.tables[space.table as usize].chunks.find(&chunk.key).is_some();
        if !is_known && self.free_rows() == 0 {
            return None;
        }
        let rows = &mut self.tables[space.table as usize];
        // A partial chunk is a session's own, and that session is gone.
        if rows.fingerprint != chunk.fingerprint || chunk.valid_tokens != rows.layout.chunk_tokens()
        {
            return None;
        }
        let new = NewChunk {
            key: chunk.key,
            namespace: number,
            parent: NONE,
            position: chunk.position,
            valid_tokens: chunk.valid_tokens,
            owner: NONE,
            holes: space.holes,
        };
        // What was before it may have been in memory only, and come again.
        let added = rows.chunks.add_behind(&new, &chunk.parent).ok()?;
        self.row_came(number, added);
        Some((space.table, added.slot()))
    }

    fn adopt_cell(&mut self, table: u32, cell: Cell, place: Where) -> bool {
        let chunks = &mut self.tables[table as usize].chunks;
        if !matches!(chunks.begin_store(cell, Tier::Disk), Ok(Begin::Begun)) {
            return false;
        }
        let came = chunks.end_store(cell, Tier::Disk, Some(place)).is_ok();
        if came {
            self.tables[table as usize].set(cell.chunk, note::UNREAD);
            self.arrived(table, cell, Tier::Disk);
        }
        came
    }

    /// What is noted on disk of a namespace.
    pub(super) fn space_note(&self, at: u32) -> (Vec<u8>, Vec<u8>) {
        let space = &self.spaces[at as usize];
        let name = [NOTE, &space.key.0].concat();
        let layout = self.tables[space.table as usize].layout.encode();
        (name, [&[VERSION, u8::from(space.holes)], layout.as_slice()].concat())
    }
}

/// The notes of namespaces that were found, by their places, and the keys in their names: those of
/// which something was written last first, should there be too many; 0 = nothing is there of them.
fn newest_first(recovered: &Recovered) -> Vec<(u64, usize, &[u8])> {
    let mut newest: BTreeMap<Key, u64> = BTreeMap::new();
    for (chunk, cells) in recovered.chunks() {
        // Places in the log grow, by segments and then by blocks.
        let spots = cells.iter().map(|place| place.spot.saturating_add(1));
        let last = newest.entry(chunk.namespace).or_default();
        *last = spots.fold(*last, u64::max);
    }
    let of = |key| <[u8; 32]>::try_from(key).ok().and_then(|key| newest.get(&Key(key)).copied());
    let notes = recovered.sessions.iter().enumerate().filter_map(|(at, session)| {
        let key = session.name.strip_prefix(NOTE)?;
        Some((of(key).unwrap_or(0), at, key))
    });
    let mut notes: Vec<(u64, usize, &[u8])> = notes.collect();
    notes.sort_by_key(|&(newest, ..)| Reverse(newest));
    notes
}

/// The chunks that were found, each after those before it: as they were written, so that policies
/// know who came last. Where there are too many the newest come before the others.
fn oldest_first(recovered: &Recovered, rows: usize) -> Vec<(&record::Chunk, &[Place])> {
    let mut all: Vec<(&record::Chunk, &[Place])> = recovered.chunks().collect();
    // They come by position, of one the newest first.
    let fit = all.len().min(rows);
    all[..fit].chunk_by_mut(|a, b| a.0.position == b.0.position).for_each(<[_]>::reverse);
    all
}

/// How a cell of `raw_bytes` was stored, if that can be.
fn form_of(place: &Place, raw_bytes: u64) -> Option<Coded> {
    let (stored, codec) = (u64::from(place.stored_bytes), place.codec);
    if codec == 0 {
        return (stored == raw_bytes).then_some(Coded::PLAIN);
    }
    let is_known = u8::try_from(codec).ok().and_then(Codec::from_code).is_some();
    let is_shorter = blocks_of(stored) < blocks_of(raw_bytes);
    Coded::new(codec, blocks_of(stored)).filter(|_| is_known && is_shorter)
}

fn read_note(key: &[u8], content: &[u8]) -> Result<SpaceOpts> {
    let (Ok(key), [VERSION, holes, layout @ ..]) = (<[u8; 32]>::try_from(key), content) else {
        fail!(Unsupported, "a note of {} bytes", content.len());
    };
    if *holes > 1 {
        return Err(Status::Corrupt.into());
    }
    Ok(SpaceOpts { key: Key(key), layout: Layout::decode(layout)?, holes: *holes == 1 })
}
