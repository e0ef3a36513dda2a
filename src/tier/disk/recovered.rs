//! What opening found: the cells that live, put together from a checkpoint and
//! from headers.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::format::checkpoint::{Place, Session};
use crate::format::keys::Key;
use crate::format::record::{Chunk, Kind, Record};
use crate::format::seal::{Identity, seal};
use crate::tier::disk::spot::Spot;
use crate::tier::disk::state::Note;

/// A session and what was noted of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredSession {
    /// Its name.
    pub name: Box<[u8]>,
    /// What was noted.
    pub payload: Box<[u8]>,
}

/// What is noted of sessions, by name.
pub(super) type Sessions = BTreeMap<Box<[u8]>, Note>;

/// Some cells of a chunk.
#[derive(Clone, Copy, Debug)]
struct Row {
    chunk: Chunk,
    /// The record that has them; 0 = a checkpoint says so.
    number: u64,
    born: u64,
    first: usize,
    cells: usize,
}

/// Cells of a chunk that are gone.
struct Forgotten {
    until: u64,
    layers: Vec<u32>,
}

/// Cells and sessions that were found. None of the cells' bytes was read yet.
#[derive(Default)]
pub struct Recovered {
    rows: Vec<Row>,
    places: Vec<Place>,
    /// Sessions, by name.
    pub sessions: Vec<RecoveredSession>,
}

impl Recovered {
    /// Chunks and cells of theirs: by position, so that a chunk comes after the
    /// one before it. A chunk may come more than once, with other cells. A cell that
    /// comes twice is there twice: the first counts, which is the one that callers
    /// were told of; the other must be dropped.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = (&Chunk, &[Place])> {
        self.rows.iter().map(|row| {
            let cells = self.places.get(row.first..row.first + row.cells);
            (&row.chunk, cells.unwrap_or(&[]))
        })
    }

    /// How many cells there are.
    pub fn cells(&self) -> u64 {
        self.rows.iter().map(|row| row.cells as u64).sum()
    }
}

/// Collects what is found.
#[derive(Default)]
pub(super) struct Finder {
    all: Recovered,
    forgotten: BTreeMap<Key, Vec<Forgotten>>,
    pub sessions: Sessions,
    /// Records from this number on may be missing in the checkpoint.
    pub covered: Option<u64>,
}

fn no_memory<E: std::fmt::Display>(error: E) -> Error {
    Error::new(Status::NoMem, format!("no memory for what the disk holds: {error}"))
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
            self.session(&Session { name, payload, born, segment, blocks });
        }
        if head.kind != Kind::Cells as u16 {
            return Ok(());
        }
        let first = self.all.places.len();
        self.all.places.try_reserve(head.items as usize).map_err(no_memory)?;
        for cell in record.cells() {
            let who = Identity {
                key: head.chunk.key,
                fingerprint: head.chunk.fingerprint,
                layer: cell.layer,
                valid_tokens: head.chunk.valid_tokens,
                codec: cell.codec,
            };
            let planes = cell.planes();
            self.all.places.push(Place {
                spot: Spot::new(head.segment, head.at + cell.block, cell.block).0,
                planes: planes.len() as u16,
                seal: seal(&who, planes),
                // A record is shorter than 2^28 bytes.
                stored_bytes: cell.stored_bytes as u32,
                layer: cell.layer,
                codec: cell.codec,
            });
        }
        self.row(head.chunk, head.number, head.born, first)
    }

    /// Adds an entry of the checkpoint.
    pub fn listed(&mut self, chunk: &Chunk, places: impl Iterator<Item = Place>) -> Result<()> {
        let first = self.all.places.len();
        for place in places {
            self.all.places.try_reserve(1).map_err(no_memory)?;
            self.all.places.push(place);
        }
        // All that was forgotten before is not in it.
        let born = self.covered.unwrap_or(0).saturating_sub(1);
        self.row(*chunk, 0, born, first)
    }

    fn row(&mut self, chunk: Chunk, number: u64, born: u64, first: usize) -> Result<()> {
        self.all.rows.try_reserve(1).map_err(no_memory)?;
        let cells = self.all.places.len() - first;
        self.all.rows.push(Row { chunk, number, born, first, cells });
        Ok(())
    }

    /// Adds what was noted of a session; the last counts.
    pub fn session(&mut self, session: &Session<'_>) {
        let note = || Note {
            payload: session.payload.into(),
            born: session.born,
            segment: session.segment,
            blocks: session.blocks,
        };
        match self.sessions.get_mut(session.name) {
            // Of the same, the one that was moved after the checkpoint: segments are
            // read after it.
            Some(old) if old.born <= session.born => *old = note(),
            Some(_) => {}
            None => {
                self.sessions.insert(session.name.into(), note());
            }
        }
    }

    /// Forgets everything: the checkpoint it came from is not sound.
    pub fn clear(&mut self) {
        *self = Finder::default();
    }

    /// What lives. `is_there` says whether a cell can be where it is said to be.
    pub fn finish(mut self, is_there: impl Fn(Spot, u64) -> bool) -> Result<(Recovered, Sessions)> {
        let confirmed = self.confirmed();
        let mut all = self.all;
        let mut kept = 0;
        for (index, row) in all.rows.iter_mut().enumerate() {
            let first = std::mem::replace(&mut row.first, kept);
            let cells = std::mem::replace(&mut row.cells, 0);
            let forgotten = self.forgotten.get(&row.chunk.key).map_or(&[][..], |all| all);
            let moved = self.covered.is_some_and(|n| is_moved(row, n));
            for at in first..first + cells {
                let Some(&place) = all.places.get(at) else { fail!(State, "a row too long") };
                let gone = forgotten.iter().any(|forgotten| {
                    forgotten.until > row.born
                        && (forgotten.layers.is_empty() || forgotten.layers.contains(&place.layer))
                });
                let dropped = moved && !confirmed.contains(&(index, place.layer));
                if gone || dropped || !is_there(Spot(place.spot), place.stored_bytes.into()) {
                    continue;
                }
                if let Some(to) = all.places.get_mut(kept) {
                    *to = place;
                }
                kept += 1;
                row.cells += 1;
            }
        }
        all.places.truncate(kept);
        all.rows.retain(|row| row.cells > 0);
        all.rows.sort_unstable_by_key(|row| {
            // What was stored last; of the same, what was not moved: it was durable first.
            (row.chunk.position, std::cmp::Reverse(row.born), row.number, row.first)
        });
        self.sessions.retain(|_, note| is_there(Spot::new(note.segment, 1, 0), 1));
        let live = self.sessions.iter().filter(|(_, note)| !note.payload.is_empty());
        all.sessions = live
            .map(|(name, note)| RecoveredSession {
                name: name.clone(),
                payload: note.payload.clone(),
            })
            .collect();
        Ok((all, self.sessions))
    }

    /// Cells that cleaning moved after the checkpoint, and that the checkpoint has:
    /// one that it does not have was dropped before, and must not come back.
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

/// A record that was written by cleaning, of cells older than the checkpoint.
fn is_moved(row: &Row, covered: u64) -> bool {
    row.number != 0 && row.born != row.number && row.born < covered
}
