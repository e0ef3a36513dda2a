//! Result of opening: the live cells, from a checkpoint and from headers.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::status::{Error, Result, Status};
use crate::format::checkpoint::{CellEntry, Session};
use crate::format::keys::Key;
use crate::format::record::{Chunk, Kind, Record};
use crate::format::seal::{Identity, seal};
use crate::tier::disk::duplicates::{CellCopy, counting_copy};
use crate::tier::disk::spot::Spot;
use crate::tier::disk::state::Note;

/// A session and its newest state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredSession {
    /// Name of the session.
    pub name: Box<[u8]>,
    /// Its state.
    pub payload: Box<[u8]>,
}

/// Newest records of sessions, by name.
pub(super) type Sessions = BTreeMap<Box<[u8]>, Note>;

/// Sessions that were found.
pub(super) struct Noted {
    pub sessions: Sessions,
    /// Segments with records of sessions that no longer count.
    pub outdated: BTreeSet<u64>,
}

/// Some cells of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub chunk: Chunk,
    /// Their record; 0 = listed by a checkpoint.
    pub number: u64,
    pub born: u64,
    /// Segment that the record was copied from.
    pub from: u64,
    pub first: usize,
    pub cells: usize,
}

impl Row {
    /// Its cells among all places.
    pub fn of<'a>(&self, places: &'a [CellEntry]) -> &'a [CellEntry] {
        places.get(self.first..self.first + self.cells).unwrap_or(&[])
    }
}

/// A session's record, or its entry in a checkpoint (number 0).
struct Written {
    number: u64,
    from: u64,
    note: Note,
}

/// Cells of a chunk that were forgotten.
struct Forgotten {
    until: u64,
    layers: Vec<u32>,
}

/// Cells and sessions that were found. No cell was read yet.
#[derive(Default)]
pub struct Recovered {
    pub(super) rows: Vec<Row>,
    pub(super) places: Vec<CellEntry>,
    /// By name.
    pub sessions: Vec<RecoveredSession>,
}

impl Recovered {
    /// Chunks with their cells, by position: a chunk follows its predecessor. A chunk may occur more
    /// than once, with other cells; no cell occurs twice.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = (&Chunk, &[CellEntry])> {
        self.rows.iter().map(|row| (&row.chunk, row.of(&self.places)))
    }

    /// Number of cells.
    pub fn cells(&self) -> u64 {
        self.rows.iter().map(|row| row.cells as u64).sum()
    }

    /// Keeps the places for which `selects` is true; it gets each place with its row. Rows must be in
    /// the order in which they were found.
    fn retain(&mut self, selects: impl Fn(usize, &Row, &CellEntry) -> bool) {
        let mut retained = 0;
        for (index, row) in self.rows.iter_mut().enumerate() {
            let first = std::mem::replace(&mut row.first, retained);
            let cells = std::mem::replace(&mut row.cells, 0);
            for at in first..first + cells {
                let Some(&place) = self.places.get(at) else { continue };
                if !selects(index, row, &place) {
                    continue;
                }
                if let Some(to) = self.places.get_mut(retained) {
                    *to = place;
                }
                retained += 1;
                row.cells += 1;
            }
        }
        self.places.truncate(retained);
    }

    /// Removes invalid places, and sorts the chunks.
    pub(super) fn close(&mut self) {
        self.retain(|_, _, place| Spot(place.spot) != Spot::NONE);
        self.rows.retain(|row| row.cells > 0);
        self.rows.sort_unstable_by_key(|row| {
            (row.chunk.position, std::cmp::Reverse(row.born), row.number, row.first)
        });
    }
}

/// Collects what is found.
#[derive(Default)]
pub(super) struct Finder {
    all: Recovered,
    forgotten: BTreeMap<Key, Vec<Forgotten>>,
    sessions: BTreeMap<Box<[u8]>, Vec<Written>>,
    /// Segments with records of sessions that no longer count.
    outdated: BTreeSet<u64>,
    /// The checkpoint may lack records from this number on.
    pub covered: Option<u64>,
}

fn no_memory<E: std::fmt::Display>(error: E) -> Error {
    Error::new(Status::NoMem, format!("no memory for the index of the disk: {error}"))
}

impl Finder {
    /// Adds a record of a segment.
    pub fn record(&mut self, record: &Record<'_>) -> Result<()> {
        let head = &record.head;
        if head.kind == Kind::Forget as u16 {
            let layers = record.layers().collect();
            let forgotten = Forgotten { until: head.until, layers };
            self.forgotten.entry(head.chunk.key).or_default().push(forgotten);
        }
        if let Some((name, payload)) = record.session() {
            let (born, segment, blocks) = (head.born, head.segment, head.blocks);
            let session = Session { name, payload, born, segment, blocks };
            self.session(&session, head.number, head.from);
        }
        if head.kind != Kind::Cells as u16 {
            return Ok(());
        }
        let first = self.all.places.len();
        self.all.places.try_reserve(head.items as usize).map_err(no_memory)?;
        for cell in record.cells() {
            let identity = Identity {
                key: head.chunk.key,
                fingerprint: head.chunk.fingerprint,
                layer: cell.layer,
                valid_tokens: head.chunk.valid_tokens,
                codec: cell.codec,
            };
            let planes = cell.planes();
            self.all.places.push(CellEntry {
                spot: Spot::new(head.segment, head.at + cell.block, cell.block).0,
                planes: planes.len() as u16,
                seal: seal(&identity, planes),
                // A record is shorter than 2^28 bytes.
                stored_bytes: cell.stored_bytes as u32,
                layer: cell.layer,
                codec: cell.codec,
            });
        }
        self.row(head.chunk, [head.number, head.born, head.from], first)
    }

    /// Adds an entry of the checkpoint.
    pub fn listed(&mut self, chunk: &Chunk, places: impl Iterator<Item = CellEntry>) -> Result<()> {
        let first = self.all.places.len();
        for place in places {
            self.all.places.try_reserve(1).map_err(no_memory)?;
            self.all.places.push(place);
        }
        // The checkpoint has no cells that were forgotten before it.
        let born = self.covered.unwrap_or(0).saturating_sub(1);
        self.row(*chunk, [0, born, 0], first)
    }

    fn row(&mut self, chunk: Chunk, [number, born, from]: [u64; 3], first: usize) -> Result<()> {
        self.all.rows.try_reserve(1).map_err(no_memory)?;
        let cells = self.all.places.len() - first;
        self.all.rows.push(Row { chunk, number, born, from, first, cells });
        Ok(())
    }

    /// Adds the state of a session from a record, or from a checkpoint (number 0). The one first
    /// written last counts.
    pub fn session(&mut self, session: &Session<'_>, number: u64, from: u64) {
        let Session { name, payload, born, segment, blocks } = *session;
        let all = self.sessions.entry(name.into()).or_default();
        let newest = all.first().map_or(0, |written| written.note.born);
        if newest > born {
            self.outdated.insert(segment);
            return;
        }
        if newest < born {
            self.outdated.extend(all.drain(..).map(|written| written.note.segment));
        }
        let note = Note { payload: payload.into(), born, segment, blocks };
        all.push(Written { number, from, note });
    }

    /// Number of cells added, copies included.
    pub fn cells(&self) -> u64 {
        self.all.cells()
    }

    /// Removes everything: the checkpoint is not sound.
    pub fn clear(&mut self) {
        *self = Finder::default();
    }

    /// The live cells, all copies included. `exists`: whether a cell can be at its place.
    pub fn finish(mut self, exists: impl Fn(Spot, u64) -> bool) -> (Recovered, Noted) {
        let confirmed = self.confirmed();
        let (covered, all_forgotten) = (self.covered, self.forgotten);
        self.all.retain(|index, row, place| {
            let forgotten = all_forgotten.get(&row.chunk.key).map_or(&[][..], |all| all);
            let is_forgotten = forgotten.iter().any(|forgotten| {
                forgotten.until > row.born
                    && (forgotten.layers.is_empty() || forgotten.layers.contains(&place.layer))
            });
            let moved = covered.is_some_and(|n| is_moved(row, n));
            let dropped = moved && !confirmed.contains(&(index, place.layer));
            !is_forgotten && !dropped && exists(Spot(place.spot), place.stored_bytes.into())
        });
        let mut sessions = Sessions::new();
        for (name, mut all) in self.sessions {
            all.retain(|written| exists(Spot::new(written.note.segment, 1, 0), 1));
            let copies = all.iter().map(|w| CellCopy {
                number: w.number,
                segment: w.note.segment,
                from: w.from,
            });
            if let Some(counts) = counting_copy(copies) {
                sessions.insert(name, all.swap_remove(counts).note);
            }
            self.outdated.extend(all.into_iter().map(|written| written.note.segment));
        }
        let live = sessions.iter().filter(|(_, note)| !note.payload.is_empty());
        self.all.sessions = live
            .map(|(name, note)| RecoveredSession {
                name: name.clone(),
                payload: note.payload[..].into(),
            })
            .collect();
        (self.all, Noted { sessions, outdated: self.outdated })
    }

    /// Cells that compaction moved after the checkpoint and that the checkpoint lists. Others were
    /// dropped before and must not reappear.
    fn confirmed(&self) -> BTreeSet<(usize, u32)> {
        let mut confirmed = BTreeSet::new();
        let Some(covered) = self.covered else { return confirmed };
        let rows = || self.all.rows.iter().enumerate();
        let mut moved: Vec<(Key, usize)> = rows()
            .filter(|(_, row)| is_moved(row, covered))
            .map(|(index, row)| (row.chunk.key, index))
            .collect();
        moved.sort_unstable();
        if moved.is_empty() {
            return confirmed;
        }
        for (_, row) in rows().filter(|(_, row)| row.number == 0) {
            let from = moved.partition_point(|(key, _)| *key < row.chunk.key);
            let same = moved.iter().skip(from).take_while(|(key, _)| *key == row.chunk.key);
            for &(_, index) in same {
                let cells = self.all.places.iter().skip(row.first).take(row.cells);
                confirmed.extend(cells.map(|place| (index, place.layer)));
            }
        }
        confirmed
    }
}

/// Whether compaction wrote the record, from cells older than the checkpoint.
fn is_moved(row: &Row, covered: u64) -> bool {
    row.number != 0 && row.born != row.number && row.born < covered
}
