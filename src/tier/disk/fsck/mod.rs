//! Checking a directory without opening the store: every meaningful block is read, nothing is
//! written. Live cells are found as an opening finds them.

mod damage;
mod reader;
mod report;
mod segments;

use std::collections::BTreeMap;

use crate::base::status::Result;
use crate::fail;
use crate::format::checkpoint::{FRAME_BYTES, Header, SegmentEntry};
use crate::format::record::blocks_of;
use crate::format::segment::{BLOCK_BYTES, HeaderError, StoreHeader};
use crate::io::files::Files;
use crate::tier::disk::checkpoint::take_frame;
use crate::tier::disk::duplicates;
use crate::tier::disk::files::{
    Name, STORE, checkpoint as checkpoint_name, parse, segment as segment_name,
};
use crate::tier::disk::fsck::reader::FileReader;
use crate::tier::disk::fsck::segments::{Seen, Sighting};
use crate::tier::disk::name::{copies, unnamed};
use crate::tier::disk::recovered::{Finder, Recovered};
use crate::tier::disk::{Spot, offset_of};

pub use crate::tier::disk::fsck::damage::{Damage, DamageKind};
pub use crate::tier::disk::fsck::report::{CellTotals, CheckpointFound, NamespaceFound, Report};

/// Default for the number of listed damaged places.
const DEFAULT_MOST_DAMAGE: usize = 1000;

/// Options of a check.
#[derive(Clone, Copy, Debug)]
pub struct FsckOptions {
    /// Most damaged places that are listed; all are counted.
    pub most_damage: usize,
}

impl Default for FsckOptions {
    fn default() -> Self {
        FsckOptions { most_damage: DEFAULT_MOST_DAMAGE }
    }
}

/// Reads every segment and checkpoint of a directory, verifies every header and cell, and reports.
/// It writes nothing. The store must not be open: [`crate::io::real::RealFiles`] ensures that by
/// the directory's lock. [`crate::io::read_only::ReadOnlyFiles`] takes no lock: with it, blocks
/// being written may look damaged. NOT_FOUND = there is no store; CORRUPT, UNSUPPORTED = the store
/// cannot be opened: the file that names it is damaged, or of another version.
pub fn fsck(files: &dyn Files, options: &FsckOptions) -> Result<Report> {
    let names = files.list()?;
    let mut check = Check {
        files: FileReader::new(files),
        most: options.most_damage,
        report: Report::default(),
        finder: Finder::default(),
        covered: BTreeMap::new(),
        seen: Seen::default(),
        sizes: BTreeMap::new(),
    };
    if names.iter().all(|entry| entry.name != STORE) {
        fail!(NotFound, "there is no store: {STORE} is missing");
    }
    check.store()?;
    let mut checkpoints = Vec::new();
    let mut segments = Vec::new();
    for entry in names {
        check.report.bytes = check.report.bytes.saturating_add(entry.bytes);
        match parse(&entry.name) {
            Name::Segment(number) => segments.push((number, entry)),
            Name::Checkpoint(number) => checkpoints.push((number, entry.bytes)),
            Name::Unfinished => check.report.unfinished += 1,
            Name::Other => {}
        }
    }
    checkpoints.sort_unstable_by(|a, b| b.cmp(a));
    for (number, bytes) in checkpoints {
        check.checkpoint(number, bytes)?;
    }
    // Cells are read while a window of headers is in use.
    let mut windows = FileReader::new(files);
    for (number, entry) in segments {
        check.segment(&mut windows, number, &entry)?;
    }
    check.finish()
}

/// A check in flight.
struct Check<'a> {
    files: FileReader<'a>,
    most: usize,
    report: Report,
    finder: Finder,
    /// Segments that the checkpoint in use covers.
    covered: BTreeMap<u64, SegmentEntry>,
    /// Every cell that has a header.
    seen: Seen,
    /// Blocks of each segment.
    sizes: BTreeMap<u64, u32>,
}

impl Check<'_> {
    fn note(&mut self, file: &str, at: [u64; 2], what: DamageKind) {
        self.report.note(self.most, file, at, what);
    }

    /// Checks both copies of the store's name.
    fn store(&mut self) -> Result<()> {
        let block = BLOCK_BYTES as u64;
        let mut found = None;
        let mut error = HeaderError::Damaged;
        let file = self.files.open(STORE)?;
        let mut bad = Vec::new();
        for at in copies() {
            let decoded = match self.files.read(file, at, block) {
                Ok(bytes) => StoreHeader::decode(bytes),
                Err(_) => Err(HeaderError::Damaged),
            };
            match decoded {
                Ok(header) => found = found.or(Some(header)),
                Err(HeaderError::Damaged) => bad.push(at),
                Err(version) => error = version,
            }
        }
        self.files.close(file);
        bad.into_iter().for_each(|at| self.note(STORE, [at, block], DamageKind::StoreName));
        let Some(header) = found else { return Err(unnamed(error)) };
        self.report.store = header.store;
        Ok(())
    }

    /// Checks all frames of a checkpoint; the newest sound one counts.
    fn checkpoint(&mut self, number: u64, bytes: u64) -> Result<()> {
        let name = checkpoint_name(number);
        let block = BLOCK_BYTES as u64;
        let mut found = CheckpointFound { number, bytes, ..CheckpointFound::default() };
        let file = match self.files.open(&name) {
            Ok(file) => file,
            Err(_) => {
                self.note(&name, [0, bytes], DamageKind::Unreadable);
                self.report.checkpoints.push(found);
                return Ok(());
            }
        };
        let store = self.report.store;
        let header = self.files.read(file, 0, block).ok().and_then(Header::decode);
        let header = header.filter(|header| {
            header.store == store && header.number == number && header.file_bytes() <= bytes
        });
        let Some(header) = header else {
            self.files.close(file);
            self.note(&name, [0, block], DamageKind::CheckpointHeader);
            self.report.checkpoints.push(found);
            return Ok(());
        };
        let mut finder = Finder::default();
        finder.covered = Some(header.next_record);
        let (mut segments, mut bad) = (Vec::new(), Vec::new());
        for index in 0..header.frames {
            let at = block + u64::from(index) * FRAME_BYTES as u64;
            let sound = match self.files.read(file, at, FRAME_BYTES as u64) {
                Ok(frame) => take_frame(frame, &header, index, &mut finder, &mut segments)?,
                Err(_) => false,
            };
            if !sound {
                bad.push(at);
            }
        }
        self.files.close(file);
        found.sound = bad.is_empty();
        found.used = found.sound && self.report.checkpoints.iter().all(|other| !other.used);
        found.cells = finder.cells();
        found.next_record = header.next_record;
        bad.into_iter()
            .for_each(|at| self.note(&name, [at, FRAME_BYTES as u64], DamageKind::Frame));
        if found.used {
            self.finder = finder;
            self.covered = segments.into_iter().map(|covered| (covered.number, covered)).collect();
        }
        self.report.checkpoints.push(found);
        Ok(())
    }

    /// Separates live cells from dead ones.
    fn finish(mut self) -> Result<Report> {
        let finder = std::mem::take(&mut self.finder);
        let covered = finder.covered.unwrap_or(0);
        let sizes = std::mem::take(&mut self.sizes);
        let (mut recovered, noted) = finder.finish(|spot, bytes| {
            let end = u64::from(spot.block()) + blocks_of(bytes);
            spot.block() > 0 && sizes.get(&spot.segment()).is_some_and(|&n| end <= u64::from(n))
        });
        self.seen.close();
        let (duplicates, dropped) = duplicates::find(&mut recovered, covered)?;
        self.report.duplicates += dropped.len() as u64;
        for copies in duplicates.into_iter().map(|duplicates| duplicates.copies) {
            let right = |&at: &usize| {
                let place = recovered.places.get(at);
                place.is_some_and(|p| self.seen.get(p).is_some_and(|seen| seen.sound))
            };
            let counts = copies.iter().position(right).unwrap_or(0);
            for (_, &at) in copies.iter().enumerate().filter(|&(i, _)| i != counts) {
                self.report.duplicates += 1;
                if let Some(place) = recovered.places.get_mut(at) {
                    place.spot = Spot::NONE.0;
                }
            }
        }
        recovered.close();
        self.live(&recovered);
        self.rest();
        let live = noted.sessions.values().filter(|note| !note.payload.is_empty());
        for note in live {
            self.report.sessions += 1;
            self.report.session_bytes += note.payload.len() as u64;
        }
        Ok(self.report)
    }

    /// Counts what an opening would find.
    fn live(&mut self, recovered: &Recovered) {
        let mut namespaces: BTreeMap<[u8; 32], (NamespaceFound, Vec<[u8; 32]>)> = BTreeMap::new();
        for (chunk, places) in recovered.chunks() {
            let fresh =
                NamespaceFound { key: chunk.namespace, chunks: 0, live: CellTotals::default() };
            let entry = namespaces.entry(chunk.namespace.0).or_insert((fresh, Vec::new()));
            entry.1.push(chunk.key.0);
            for place in places {
                let bytes = u64::from(place.stored_bytes);
                match self.seen.get_mut(place) {
                    Some(seen) => {
                        seen.live = true;
                        if seen.sound {
                            // A checkpoint counts encoded cells in whole blocks.
                            let bytes = u64::from(seen.bytes);
                            self.report.live.add(bytes);
                            entry.0.live.add(bytes);
                        }
                    }
                    None => {
                        self.report.unchecked.add(bytes);
                        let what = DamageKind::Unknown { key: chunk.key, layer: place.layer };
                        let spot = Spot(place.spot);
                        let at = [offset_of(spot.block()), bytes];
                        self.report.note(self.most, &segment_name(spot.segment()), at, what);
                    }
                }
            }
        }
        for (mut found, mut keys) in namespaces.into_values() {
            keys.sort_unstable();
            keys.dedup();
            found.chunks = keys.len() as u64;
            self.report.namespaces.push(found);
        }
    }

    /// Counts cells that are damaged or dead.
    fn rest(&mut self) {
        for Sighting { bytes, sound, live, .. } in self.seen.iter() {
            match (sound, live) {
                (true, true) => {}
                (true, false) => self.report.dead.add(u64::from(bytes)),
                (false, _) => self.report.damaged.add(u64::from(bytes)),
            }
        }
        for damage in &mut self.report.damage {
            let number = match parse(&damage.file) {
                Name::Segment(number) => number,
                _ => continue,
            };
            if let DamageKind::Cell { live, .. } = &mut damage.what {
                let block = damage.offset / BLOCK_BYTES as u64;
                *live = self.seen.is_live(number, block);
            }
        }
    }
}
