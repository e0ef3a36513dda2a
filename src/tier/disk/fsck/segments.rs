//! Checking a segment: its headers in order, and the bytes of every cell that they list.

use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::format::checkpoint::CellEntry;
use crate::format::record::{Kind, Record, blocks_of};
use crate::format::seal::{Identity, seal};
use crate::format::segment::{BLOCK_BYTES, SegmentHeader};
use crate::io::files::{Entry, FileId};
use crate::tier::disk::fsck::Check;
use crate::tier::disk::fsck::damage::DamageKind;
use crate::tier::disk::fsck::reader::FileReader;
use crate::tier::disk::scan::Walk;
use crate::tier::disk::spot::{MAX_SEGMENT, MAX_SEGMENT_BLOCKS};
use crate::tier::disk::{Spot, offset_of};

/// A cell that a header lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sighting {
    spot: u64,
    seal: u64,
    pub bytes: u32,
    /// Whether its bytes match its header.
    pub sound: bool,
    /// Whether an opening would find it.
    pub live: bool,
}

/// All cells that headers list, by place.
#[derive(Default)]
pub(super) struct Seen(Vec<Sighting>);

impl Seen {
    /// Sorts them for lookups.
    pub fn close(&mut self) {
        self.0.sort_unstable();
    }

    fn place(&self, place: &CellEntry) -> Option<usize> {
        let at = self.0.binary_search_by_key(&place.spot, |seen| seen.spot).ok()?;
        self.0.get(at).filter(|seen| seen.seal == place.seal).map(|_| at)
    }

    pub fn get(&self, place: &CellEntry) -> Option<&Sighting> {
        self.0.get(self.place(place)?)
    }

    pub fn get_mut(&mut self, place: &CellEntry) -> Option<&mut Sighting> {
        let at = self.place(place)?;
        self.0.get_mut(at)
    }

    /// Whether the cell at a block of a segment is live.
    pub fn is_live(&self, segment: u64, block: u64) -> bool {
        let least = segment << 36 | block << 16;
        let from = self.0.partition_point(|seen| seen.spot < least);
        self.0.get(from).is_some_and(|seen| seen.live && seen.spot >> 16 == least >> 16)
    }

    pub fn iter(&self) -> impl Iterator<Item = Sighting> {
        self.0.iter().copied()
    }
}

impl Check<'_> {
    /// Checks a segment.
    pub(super) fn segment(
        &mut self,
        windows: &mut FileReader<'_>,
        number: u64,
        entry: &Entry,
    ) -> Result<()> {
        let blocks = entry.bytes / BLOCK_BYTES as u64;
        if number == 0 || number > MAX_SEGMENT || blocks > u64::from(MAX_SEGMENT_BLOCKS) {
            self.report.foreign_segments += 1;
            return Ok(());
        }
        let Ok(file) = self.files.open(&entry.name) else {
            self.note(&entry.name, [0, entry.bytes], DamageKind::Unreadable);
            return Ok(());
        };
        if blocks == 0 {
            self.note(&entry.name, [0, entry.bytes], DamageKind::SegmentLength);
        }
        let walk = Walk::new(self.report.store, number, blocks as u32, 0);
        let walked = self.walk(windows, walk, entry, file);
        self.files.close(file);
        walked
    }

    fn walk(
        &mut self,
        windows: &mut FileReader<'_>,
        mut walk: Walk,
        entry: &Entry,
        file: FileId,
    ) -> Result<()> {
        let name = &entry.name;
        let mut need = walk.need();
        let mut end = 1;
        while let Some((at, count)) = need {
            need = match windows.read(file, offset_of(at), offset_of(count)) {
                Ok(window) => walk.read(window, &mut |record| {
                    let at = record.head.at;
                    if at > end {
                        self.note(name, [offset_of(end), offset_of(at - end)], DamageKind::Header);
                    }
                    end = at + record.head.blocks;
                    self.record(name, file, record)
                })?,
                Err(error) if error.status() == Status::NoMem => return Err(error),
                Err(_) => {
                    if count == 1 {
                        self.note(
                            name,
                            [offset_of(at), BLOCK_BYTES as u64],
                            DamageKind::Unreadable,
                        );
                    }
                    walk.fail(count)
                }
            };
        }
        let found = walk.end();
        if found.foreign {
            self.report.foreign_segments += 1;
            return Ok(());
        }
        let blocks = (entry.bytes / BLOCK_BYTES as u64) as u32;
        self.report.segments += 1;
        self.sizes.insert(found.segment, blocks);
        if found.damaged_header {
            self.note(name, [0, BLOCK_BYTES as u64], DamageKind::SegmentHeader);
        }
        if found.torn {
            let rest = offset_of(blocks.saturating_sub(end));
            self.note(name, [offset_of(end), rest], DamageKind::Tail);
        }
        self.length(entry, file);
        Ok(())
    }

    /// Checks the length of the file.
    fn length(&mut self, entry: &Entry, file: FileId) {
        let first = self.files.read(file, 0, BLOCK_BYTES as u64).ok();
        let Some(Ok(header)) = first.map(SegmentHeader::decode) else { return };
        let made = offset_of(header.blocks);
        if header.store == self.report.store && made != entry.bytes {
            let missing = made.saturating_sub(entry.bytes);
            self.note(&entry.name, [entry.bytes, missing], DamageKind::SegmentLength);
        }
    }

    fn record(&mut self, name: &str, file: FileId, record: &Record<'_>) -> Result<()> {
        let head = &record.head;
        self.report.records += 1;
        self.report.forgets += u64::from(head.kind == Kind::Forget as u16);
        self.report.voids += u64::from(head.kind == Kind::Void as u16);
        let known = [Kind::Cells, Kind::Forget, Kind::Session, Kind::Void];
        self.report.unknown += u64::from(known.iter().all(|&kind| head.kind != kind as u16));
        let covered = self.covered.get(&head.segment).map_or(0, |covered| covered.blocks);
        if head.at >= covered {
            self.finder.record(record)?;
        }
        for cell in record.cells() {
            let identity = Identity {
                key: head.chunk.key,
                fingerprint: head.chunk.fingerprint,
                layer: cell.layer,
                valid_tokens: head.chunk.valid_tokens,
                codec: cell.codec,
            };
            let at = head.at + cell.block;
            let sums = cell.planes().map(|plane| (plane.bytes, plane.sum));
            let read = sound(&mut self.files, file, (at, cell.stored_bytes), sums);
            // Whether it is live is set once that is known.
            let what = match read {
                Ok(true) => None,
                Ok(false) => {
                    Some(DamageKind::Cell { key: head.chunk.key, layer: cell.layer, live: false })
                }
                Err(error) if error.status() == Status::NoMem => return Err(error),
                Err(_) => Some(DamageKind::Unreadable),
            };
            if let Some(what) = what {
                self.note(name, [offset_of(at), cell.stored_bytes], what);
            }
            self.seen.0.try_reserve(1).map_err(|_| Status::NoMem)?;
            self.seen.0.push(Sighting {
                spot: Spot::new(head.segment, at, cell.block).0,
                seal: seal(&identity, cell.planes()),
                bytes: u32::try_from(cell.stored_bytes).unwrap_or(u32::MAX),
                sound: read == Ok(true),
                live: false,
            });
        }
        Ok(())
    }
}

/// Whether the planes of a cell match their checksums.
fn sound(
    files: &mut FileReader<'_>,
    file: FileId,
    (at, stored): (u32, u64),
    planes: impl Iterator<Item = (u64, u64)>,
) -> Result<bool> {
    let bytes = files.read(file, offset_of(at), blocks_of(stored) * BLOCK_BYTES as u64)?;
    let mut rest = bytes;
    for (length, sum) in planes {
        let Some((plane, after)) = rest.split_at_checked(length as usize) else { return Ok(false) };
        if checksum(plane) != sum {
            return Ok(false);
        }
        rest = after;
    }
    Ok(true)
}
