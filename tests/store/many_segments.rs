//! As many segments as a disk of 4 TiB has, in simulated files that keep few of their bytes. The
//! number of open files stays that of a small disk, and no operation gets slower.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kvtier::base::status::{Error, Result, Status};
use kvtier::io::files::{Access, Entry, FileId, Files, MAX_PARTS, Piece};
use kvtier::tier::disk::{DiskTier, Options, Spot};

use kvtier_testkit::fixtures::disk::{put, read};

/// 4 TiB in segments of 64 MiB.
const SEGMENTS: u64 = 1 << 16;
/// Space for one chunk: the segment's head, the record's head, and two blocks of a cell.
const SEGMENT: u64 = 4 * BLOCK;
const BLOCK: u64 = 4096;
/// Limit of open files.
const MOST_OPEN: usize = 64;
/// One file in `KEPT` keeps all its blocks; the others keep the two heads.
const KEPT: u32 = 1 << 10;
const HEADS: u64 = 2;

#[derive(Default)]
struct File {
    bytes: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
}

#[derive(Default)]
struct Disk {
    files: BTreeMap<String, (u32, File)>,
    open: BTreeMap<FileId, String>,
    made: u32,
    opened: u32,
}

#[derive(Clone, Default)]
struct ThinFiles(Arc<Mutex<Disk>>);

impl Disk {
    fn open(&mut self, name: &str) -> Result<FileId> {
        assert!(self.open.len() < MOST_OPEN, "more than {MOST_OPEN} files are open");
        self.opened += 1;
        self.open.insert(FileId(self.opened), name.into());
        Ok(FileId(self.opened))
    }

    fn file(&mut self, file: FileId) -> Result<&mut (u32, File)> {
        let name = self.open.get(&file).ok_or(Status::Closed)?;
        self.files.get_mut(name).ok_or_else(|| Status::NotFound.into())
    }

    /// # Safety
    /// As for [`Files::transfer`].
    unsafe fn carry_out(&mut self, piece: &Piece) -> Result<()> {
        let (number, file) = self.file(piece.file)?;
        let mut at = piece.offset;
        for part in &piece.parts[..MAX_PARTS] {
            for from in (0..part.bytes).step_by(BLOCK as usize) {
                let len = (part.bytes - from).min(BLOCK) as usize;
                // SAFETY: the caller upholds the contract.
                let memory =
                    unsafe { std::slice::from_raw_parts_mut(part.address.add(from as usize), len) };
                let block = at / BLOCK;
                assert_eq!(at % BLOCK, 0);
                match piece.access {
                    Access::Write if block < HEADS || number.is_multiple_of(KEPT) => {
                        let end = memory.iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1);
                        file.blocks.insert(block, memory[..end].to_vec());
                    }
                    Access::Write => {}
                    Access::Read => {
                        let kept = file.blocks.get(&block).map_or(&[][..], |bytes| &bytes[..]);
                        let kept = &kept[..kept.len().min(len)];
                        memory.fill(0);
                        memory[..kept.len()].copy_from_slice(kept);
                    }
                }
                at += len as u64;
            }
        }
        if piece.access == Access::Read && at > file.bytes {
            return Err(Error::new(Status::Io, "past the end"));
        }
        file.bytes = file.bytes.max(at);
        Ok(())
    }
}

impl Files for ThinFiles {
    fn align_bytes(&self) -> u64 {
        BLOCK
    }

    fn engine(&self) -> &str {
        "thin"
    }

    fn fallback(&self) -> Option<&str> {
        None
    }

    fn list(&self) -> Result<Vec<Entry>> {
        let disk = self.0.lock().expect("a lock");
        let entry = |(name, (_, file)): (&String, &(u32, File))| Entry {
            name: name.clone(),
            bytes: file.bytes,
        };
        Ok(disk.files.iter().map(entry).collect())
    }

    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        let mut disk = self.0.lock().expect("a lock");
        disk.made += 1;
        let made = (disk.made, File { bytes, ..File::default() });
        assert!(disk.files.insert(name.into(), made).is_none(), "{name} exists");
        disk.open(name)
    }

    fn open(&self, name: &str) -> Result<FileId> {
        let mut disk = self.0.lock().expect("a lock");
        if disk.files.contains_key(name) { disk.open(name) } else { Err(Status::NotFound.into()) }
    }

    fn len(&self, file: FileId) -> Result<u64> {
        self.0.lock().expect("a lock").file(file).map(|(_, file)| file.bytes)
    }

    fn close(&self, file: FileId) {
        self.0.lock().expect("a lock").open.remove(&file);
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let mut disk = self.0.lock().expect("a lock");
        let moved = disk.files.remove(from).ok_or(Status::NotFound)?;
        disk.files.insert(to.into(), moved);
        disk.open.values_mut().filter(|name| *name == from).for_each(|name| *name = to.into());
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let gone = self.0.lock().expect("a lock").files.remove(name);
        gone.map(drop).ok_or_else(|| Status::NotFound.into())
    }

    fn sync_names(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self, file: FileId) -> Result<()> {
        self.0.lock().expect("a lock").file(file).map(drop)
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        let mut disk = self.0.lock().expect("a lock");
        for piece in pieces {
            // SAFETY: the caller upholds the contract.
            piece.result = unsafe { disk.carry_out(piece) };
        }
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }
}

fn open(files: &ThinFiles) -> (DiskTier, u64) {
    let options = Options {
        segment_bytes: SEGMENT,
        ..Options::new((SEGMENTS + 8) * SEGMENT + (1 << 20), [4; 16])
    };
    let (tier, found, _) = DiskTier::open(Arc::new(files.clone()), options).expect("sound");
    (tier, found.cells())
}

#[test]
fn segments_of_4_tib_need_few_descriptors() {
    let files = ThinFiles::default();
    let (tier, _) = open(&files);
    let mut cells: Vec<(u16, u32, Spot, u64)> = Vec::new();
    for n in 0..=u16::MAX {
        let (_, at) = put(&tier, n, &[0], false).expect("room");
        cells.push((n, 0, at[0].0, at[0].1));
    }
    tier.commit_all().expect("synced");
    assert!(tier.segments().len() as u64 >= SEGMENTS, "{}", tier.segments().len());
    // Cells of files that keep all their blocks.
    let right =
        |tier: &DiskTier| read(tier, &cells, false).iter().filter(|result| result.is_ok()).count();
    let found = right(&tier);
    assert!(found as u64 >= SEGMENTS / u64::from(KEPT), "{found}");
    tier.close().expect("synced");
    drop(tier);
    files.0.lock().expect("a lock").open.clear(); // as at the end of a process
    let (tier, recovered) = open(&files);
    assert_eq!((recovered, right(&tier)), (SEGMENTS, found));
}
