//! Opening a store: the newest sound checkpoint, then the records after it.

use std::collections::BTreeMap;

use crate::base::status::Result;
use crate::base::sync::atomic::AtomicBool;
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::fail;
use crate::format::checkpoint::SegmentEntry;
use crate::format::record::{Kind, Record, blocks_of};
use crate::format::segment::BLOCK_BYTES;
use crate::io::files::{Entry, Files};
use crate::tier::disk::budget::Paid;
use crate::tier::disk::files::{Name, STORE, parse};
use crate::tier::disk::name::{self, STORE_BYTES};
use crate::tier::disk::recovered::{Finder, Recovered};
use crate::tier::disk::scan::Found;
use crate::tier::disk::spot::{MAX_SEGMENT, MAX_SEGMENT_BLOCKS};
use crate::tier::disk::staging::Staging;
use crate::tier::disk::state::{Front, Segment, State};
use crate::tier::disk::stats::OpenReport;
use crate::tier::disk::{DiskTier, Options, Spot, least_bytes, usual_segment_bytes};

const DEFAULT_MAX_OPEN: usize = 32;

impl DiskTier {
    /// Opens the store of a directory, or creates one. Returns the tier, the cells that were found,
    /// and a report. Nothing on disk is trusted: cells are verified when they are read. After
    /// [`DiskTier::commit_all`] the cells found are durable, unless a sync had failed before the
    /// process ended. CORRUPT = both copies in the file that names the store are damaged (one
    /// damaged copy is rewritten from the other), or the file is missing and there are segments;
    /// UNSUPPORTED = the store has another version.
    pub fn open(
        files: Arc<dyn Files>,
        options: Options,
    ) -> Result<(DiskTier, Recovered, OpenReport)> {
        let options = checked(options)?;
        let align = files.align_bytes();
        if align == 0 || BLOCK_BYTES as u64 % align != 0 {
            fail!(
                Unsupported,
                "files of this file system are read and written in multiples of {align} bytes: open \
                 the disk with buffered=true, or elsewhere"
            );
        }
        let begun_ns = options.clock.now_ns();
        let mut report = OpenReport::default();
        // The account is charged before any file is created, so a failure leaves no file.
        let paid = Paid::new(options.account.clone());
        paid.set(options.budget_bytes)?;
        let staging = Staging::open(options.account.clone())?;
        let mut names = clear_unfinished(&*files)?;
        let named = names.iter_mut().find(|entry| entry.name == STORE);
        let is_new = named.is_none();
        report.is_new = is_new;
        let store = match named {
            None => {
                check_new(&names)?;
                name::make(&*files, &staging, &options)?
            }
            Some(entry) => {
                let found = name::read(&*files, &staging)?;
                (report.damaged_names, entry.bytes) = (found.damaged, found.bytes);
                found.store
            }
        };
        let clock = options.clock.clone();
        let budget_bytes = options.budget_bytes;
        let tier = DiskTier {
            files,
            options,
            store,
            align,
            state: Mutex::new(State {
                next_record: 1,
                next_segment: 1,
                budget_bytes,
                ..State::default()
            }),
            changed: Condvar::new(),
            growth: Mutex::new(()),
            wants_prepare: AtomicBool::new(false),
            staging,
            paid,
        };
        tier.note_files(&names, is_new, &mut report);
        let recovered = tier.recover(&mut report)?;
        tier.sweep();
        tier.state.lock().begin_over(tier.options.segment_bytes);
        report.cells = recovered.cells();
        report.elapsed_ns = clock.now_ns().saturating_sub(begun_ns);
        Ok((tier, recovered, report))
    }

    /// Removes what opening created, if there was no store before. Other files stay.
    pub fn undo_open(&self) {
        let names = self.files.list().unwrap_or_default();
        let is_ours = |entry: &Entry| entry.name == STORE || parse(&entry.name) != Name::Other;
        for entry in names.into_iter().filter(is_ours) {
            if let Err(error) = self.files.remove(&entry.name) {
                log::debug!("{} stays: {error}", entry.name);
            }
        }
    }

    /// Ends the segments that are written to, and makes all writes durable. Optional: it makes the
    /// next opening faster.
    pub fn close(&self) -> Result<()> {
        let growth = self.growth.lock();
        self.end(Front::Callers);
        self.end(Front::Compaction);
        self.discard(|_| true);
        drop(growth);
        self.commit_all()
    }

    /// Records the directory's files by their names and lengths.
    fn note_files(&self, names: &[Entry], is_new: bool, report: &mut OpenReport) {
        let mut state = self.state.lock();
        state.used_bytes = if is_new { STORE_BYTES } else { 0 };
        for entry in names {
            state.used_bytes = state.used_bytes.saturating_add(entry.bytes);
            match parse(&entry.name) {
                Name::Segment(number) => {
                    let blocks = entry.bytes / BLOCK_BYTES as u64;
                    state.next_segment = state.next_segment.max(number.saturating_add(1));
                    if number == 0 || number > MAX_SEGMENT || blocks > MAX_SEGMENT_BLOCKS.into() {
                        report.foreign_segments += 1;
                        continue;
                    }
                    let blocks = blocks as u32;
                    let (old, oldest) = (true, u64::MAX);
                    let segment =
                        Segment { blocks, next: blocks, old, oldest, ..Segment::default() };
                    state.add_segment(number, segment);
                }
                Name::Checkpoint(number) => {
                    state.checkpoints.insert(number, entry.bytes);
                    state.next_checkpoint = state.next_checkpoint.max(number.saturating_add(1));
                }
                Name::Unfinished | Name::Other => {}
            }
        }
        state.next_checkpoint = state.next_checkpoint.max(1);
        state.stats.most_used_bytes = state.used_bytes;
    }

    fn recover(&self, report: &mut OpenReport) -> Result<Recovered> {
        let mut finder = Finder::default();
        let covered = self.newest_checkpoint(&mut finder, report)?;
        let starts: Vec<(u64, u32)> = {
            let state = self.state.lock();
            let from = |(&number, segment): (&u64, &Segment)| {
                let from = covered.get(&number).map_or(0, |covered| covered.blocks);
                report.torn_tails += u32::from(from > segment.blocks);
                (from < segment.blocks || from == 0).then_some((number, from))
            };
            state.segments.iter().filter_map(from).collect()
        };
        let mut notes: BTreeMap<u64, SegmentEntry> = covered;
        let found = self.scan(&starts, &mut |record| {
            note(&mut notes, record);
            finder.record(record)
        })?;
        self.note_segments(&notes, &found, report);
        let covered = finder.covered.unwrap_or(0);
        let (mut recovered, noted) = {
            let state = self.state.lock();
            finder.finish(|spot, bytes| {
                let end = u64::from(spot.block()) + blocks_of(bytes);
                let segment = state.segments.get(&spot.segment());
                spot.block() > 0 && segment.is_some_and(|s| end <= u64::from(s.blocks))
            })
        };
        let mut state = self.state.lock();
        for place in recovered.chunks().flat_map(|(_, places)| places) {
            if let Some(segment) = state.segments.get_mut(&Spot(place.spot).segment()) {
                segment.live =
                    segment.live.saturating_add(blocks_of(place.stored_bytes.into()) as u32);
            }
        }
        for note in noted.sessions.values() {
            if let Some(segment) = state.segments.get_mut(&note.segment) {
                segment.sessions += 1;
            }
        }
        state.sessions = noted.sessions;
        for segment in noted.outdated {
            if let Some(segment) = state.segments.get_mut(&segment) {
                segment.held = true;
            }
        }
        drop(state);
        self.settle(&mut recovered, covered)?;
        recovered.close();
        self.cut(&found);
        Ok(recovered)
    }

    /// Loads the newest sound checkpoint, and removes all others. A checkpoint that is readable
    /// only sometimes would later name segments with other content.
    fn newest_checkpoint(
        &self,
        finder: &mut Finder,
        report: &mut OpenReport,
    ) -> Result<BTreeMap<u64, SegmentEntry>> {
        let all: Vec<(u64, u64)> = {
            let state = self.state.lock();
            state.checkpoints.iter().rev().map(|(&number, &bytes)| (number, bytes)).collect()
        };
        let mut covered = BTreeMap::new();
        for (number, bytes) in all {
            let Some((header, segments)) = self.load(number, bytes, finder)? else {
                report.unsound_checkpoints += 1;
                finder.clear();
                continue;
            };
            let mut state = self.state.lock();
            state.next_record = state.next_record.max(header.next_record);
            state.next_segment = state.next_segment.max(header.next_segment);
            drop(state);
            report.checkpoint = number;
            covered = segments.into_iter().map(|segment| (segment.number, segment)).collect();
            break;
        }
        let kept = report.checkpoint;
        self.remove_checkpoints(|number| number != kept);
        let mut state = self.state.lock();
        if let Some(&bytes) = state.checkpoints.get(&kept) {
            state.checkpoint_bytes = self.next_checkpoint_bytes(bytes, state.budget_bytes);
        }
        Ok(covered)
    }

    fn note_segments(
        &self,
        notes: &BTreeMap<u64, SegmentEntry>,
        found: &[Found],
        report: &mut OpenReport,
    ) {
        let mut state = self.state.lock();
        for found in found {
            report.scanned_records += found.records;
            report.damaged_headers += found.damaged;
            report.torn_tails += u32::from(found.torn || found.cut);
            report.failed_reads += found.errors;
            report.damaged_segments += u32::from(found.damaged_header);
            let nothing = !notes.contains_key(&found.segment);
            if found.foreign || (nothing && found.errors > 0) {
                // The segment is another store's or cannot be identified: it stays, and counts.
                state.segments.remove(&found.segment);
                report.foreign_segments += u32::from(found.foreign);
                continue;
            }
            if let Some(segment) = state.segments.get_mut(&found.segment) {
                segment.damaged = found.damaged + u32::from(found.damaged_header);
                segment.unread = found.errors > 0;
                // The process that wrote it may have died before the sync.
                segment.dirty = u64::from(found.records > 0);
            }
        }
        for (number, covered) in notes {
            state.next_record = state.next_record.max(covered.newest.saturating_add(1));
            if let Some(segment) = state.segments.get_mut(number) {
                segment.oldest = covered.oldest;
                segment.newest = covered.newest;
                segment.forgets = covered.forgets;
            }
        }
        report.segments = state.segments.len() as u32;
    }

    /// Marks the space after the last record of each segment as void, so that the next opening
    /// skips it. Best effort.
    fn cut(&self, found: &[Found]) {
        for found in found.iter().filter(|found| found.errors == 0 && !found.foreign) {
            let Ok(pinned) = self.pin(found.segment) else { continue };
            let rest = pinned.blocks.saturating_sub(found.end);
            if rest == 0 || found.records == 0 {
                continue;
            }
            let number = {
                let mut state = self.state.lock();
                state.next_record += 1;
                state.next_record - 1
            };
            let grant =
                crate::tier::disk::state::Grant { segment: found.segment, at: found.end, number };
            let _ = self.write_void(pinned.file, &grant, rest);
        }
    }
}

fn checked(mut options: Options) -> Result<Options> {
    let block = BLOCK_BYTES as u64;
    if options.segment_bytes == 0 {
        options.segment_bytes = usual_segment_bytes(options.budget_bytes);
    }
    if options.max_open == 0 {
        options.max_open = DEFAULT_MAX_OPEN;
    }
    let most = u64::from(MAX_SEGMENT_BLOCKS) * block;
    let bytes = options.segment_bytes;
    if bytes % block != 0 || bytes < 4 * block || bytes > most {
        fail!(
            Invalid,
            "segments of {bytes} bytes: give segment= a multiple of the block, of 4 to {MAX_SEGMENT_BLOCKS} blocks"
        );
    }
    let least = least_bytes(&options);
    if options.budget_bytes < least {
        fail!(
            Invalid,
            "a disk of {} bytes is too small for segments of {bytes} bytes: {least} bytes are \
             needed, or a smaller segment=",
            options.budget_bytes
        );
    }
    Ok(options)
}

/// Rejects segments without the file that names their store: a new store beside them would count
/// them and read none.
fn check_new(names: &[Entry]) -> Result<()> {
    let is_left =
        |entry: &&Entry| matches!(parse(&entry.name), Name::Segment(_) | Name::Checkpoint(_));
    let left = names.iter().filter(is_left).count();
    if left > 0 {
        fail!(
            Corrupt,
            "there are {left} files of a store (seg-*, index-*) but no {STORE}, which identifies the store: \
             restore it from a backup, or remove the files to begin with an empty store"
        );
    }
    Ok(())
}

/// Removes unfinished files of the last use; returns the others.
fn clear_unfinished(files: &dyn Files) -> Result<Vec<Entry>> {
    let mut names = files.list()?;
    let mut removed = false;
    names.retain(|entry| {
        let is_removed =
            parse(&entry.name) == Name::Unfinished && files.remove(&entry.name).is_ok();
        removed |= is_removed;
        !is_removed
    });
    if removed {
        files.sync_names()?;
    }
    names.sort();
    Ok(names)
}

/// Records what checkpoints keep of a segment's records.
fn note(notes: &mut BTreeMap<u64, SegmentEntry>, record: &Record<'_>) {
    let head = &record.head;
    let fresh = SegmentEntry { number: head.segment, oldest: u64::MAX, ..SegmentEntry::default() };
    let segment = notes.entry(head.segment).or_insert(fresh);
    segment.oldest = segment.oldest.min(head.born);
    segment.newest = segment.newest.max(head.number);
    segment.forgets += u32::from(head.kind == Kind::Forget as u16);
}
