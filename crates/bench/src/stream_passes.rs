//! Passes over one model with several methods in turn, so that all see the same disk. Each runs in a
//! memory cgroup that holds a part of the model.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::rc::Rc;

use kvtier::stream::model::Model;

use super::disk::{DEPTH, raw};
use super::fixtures::stream::stock;
use super::fixtures::{Outcome, say};
use super::median;
use super::stream_child::{Child, Group, Readahead, Start};

/// Default readahead of Linux.
const DEFAULT_READAHEAD_KIB: u64 = 128;
/// Memory of a cgroup that is not for weights: code, stacks, rings, page tables.
const LEAST_SPARE_BYTES: u64 = 16 << 20;

/// A memory map with the readahead of the machine.
pub const MAP: usize = 0;
/// A memory map with the default readahead.
pub const MAP_USUAL: usize = 1;
/// Direct reads into two slots, without resident units.
pub const NOTHING_STAYS: usize = 2;
/// The first units are resident.
pub const FIRST_STAY: usize = 3;
/// Units at equal distances are resident.
pub const SPREAD_STAY: usize = 4;
/// Units at equal distances are resident, in memory that the process finds itself.
pub const FOUND: usize = 5;
const WAYS: usize = 6;

/// The setting of a measurement.
pub struct Setting {
    /// Limit of the memory cgroups.
    pub limit_bytes: u64,
    /// Rounds.
    pub rounds: u32,
    /// Passes of each method in a round.
    pub passes: u32,
}

/// The measurements.
pub struct Measured {
    /// Bytes of the files.
    pub bytes: u64,
    /// Seconds of plain direct reads of all bytes, before and after the passes of each method in
    /// each round, since the speed of a disk varies.
    pub raw: [Vec<f64>; WAYS],
    /// Seconds of a pass in each round, or the reason why there are none.
    pub took: [Outcome<Vec<f64>>; WAYS],
    /// The first answers of the processes.
    pub ready: [serde_json::Value; WAYS],
    /// The peak memory of each method.
    pub peak: [Outcome<u64>; WAYS],
    /// The readahead of the machine in KiB.
    pub readahead_kib: Option<u64>,
}

/// Drops files from the page cache.
fn forget(files: &[PathBuf]) -> Outcome<()> {
    for path in files {
        let file = File::open(path).map_err(say)?;
        // SAFETY: an open file and integers.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
    Ok(())
}

/// Starts the process of a method. Maps need a cgroup, which alone keeps the page cache small.
fn start(
    access: usize,
    files: &[PathBuf],
    limit: u64,
    slots_bytes: u64,
    maps: &Outcome<Rc<Group>>,
) -> Outcome<Child> {
    let own = |name| Group::new(name, limit).map(Rc::new);
    let group = match access {
        MAP | MAP_USUAL => Some(maps.clone()?),
        FOUND => Some(own("found")?),
        NOTHING_STAYS => own("nothing").ok(),
        FIRST_STAY => own("first").ok(),
        _ => own("spread").ok(),
    };
    let host = limit.saturating_sub(LEAST_SPARE_BYTES.max(limit / 50));
    let (method, host_bytes) = match access {
        MAP | MAP_USUAL => ("map", None),
        NOTHING_STAYS => ("interleaved", Some(slots_bytes)),
        FIRST_STAY => ("first", Some(host)),
        SPREAD_STAY => ("interleaved", Some(host)),
        _ => ("interleaved", None),
    };
    // Files keep the readahead of the time of their opening.
    let _set = match (access, files.first()) {
        (MAP_USUAL, Some(first)) => Some(Readahead::set(first, DEFAULT_READAHEAD_KIB)?),
        _ => None,
    };
    Child::start(Start { method, files, host_bytes, group })
}

fn round(
    measured: &mut Measured,
    children: &mut [Outcome<Child>],
    turn: u32,
    passes: u32,
    mut raw: impl FnMut() -> Outcome<f64>,
) -> Outcome<()> {
    let mut before = raw()?;
    let mut seen = None;
    let mut order: Vec<usize> = (0..WAYS).collect();
    if turn % 2 == 1 {
        order.reverse();
    }
    for access in order {
        let (Ok(child), Ok(all)) = (&mut children[access], &mut measured.took[access]) else {
            continue;
        };
        match child.passes(passes) {
            Ok((_, sum)) if seen.is_some_and(|seen| seen != sum) => {
                return Err(format!("method {access} read other bytes than the others"));
            }
            Ok((seconds, sum)) => {
                seen = Some(sum);
                all.push(seconds);
            }
            Err(why) => measured.took[access] = Err(why),
        }
        let after = raw()?;
        measured.raw[access].push((before + after) / 2.0);
        before = after;
    }
    Ok(())
}

/// Measures all methods.
pub fn measure(paths: &[PathBuf], setting: &Setting) -> Outcome<Measured> {
    let model = Model::open(paths).map_err(say)?;
    let units = kvtier::stream::units::Units::of(&model).map_err(say)?;
    let files: Vec<PathBuf> = model.files.iter().map(|file| file.path.clone()).collect();
    let bytes = model.files.iter().map(|file| file.bytes).sum();
    let slots_bytes = 2 * units.units.iter().map(|unit| unit.image_bytes).max().unwrap_or(0);
    forget(&files)?;
    // One cgroup for both maps, which share pages.
    let maps = Group::new("maps", setting.limit_bytes).map(Rc::new);
    let mut children: Vec<Outcome<Child>> = (0..WAYS)
        .map(|access| start(access, paths, setting.limit_bytes, slots_bytes, &maps))
        .collect();
    let mut measured = Measured {
        bytes,
        raw: Default::default(),
        took: std::array::from_fn(|access| match &children[access] {
            Ok(_) => Ok(Vec::new()),
            Err(why) => Err(why.clone()),
        }),
        ready: std::array::from_fn(|access| {
            children[access].as_ref().map_or(serde_json::Value::Null, |child| child.ready.clone())
        }),
        peak: std::array::from_fn(|_| Err(String::new())),
        readahead_kib: files.first().and_then(|file| Readahead::kib(file).ok()),
    };
    // As a pass does, plain reads fill two slots in turn.
    let stock = stock(slots_bytes)?;
    for turn in 0..setting.rounds {
        let plain = || raw(&files, kvtier::io::files::Access::Read, bytes, &stock, DEPTH as usize);
        round(&mut measured, &mut children, turn, setting.passes, plain)?;
    }
    for (peak, child) in measured.peak.iter_mut().zip(&children) {
        *peak = child.as_ref().map_err(Clone::clone).and_then(Child::peak_bytes);
    }
    Ok(measured)
}

impl Measured {
    /// The median over rounds of the ratio of two times.
    pub fn ratio(&self, a: usize, b: usize) -> Outcome<f64> {
        let a = self.took[a].as_ref().map_err(Clone::clone)?;
        let b = self.took[b].as_ref().map_err(Clone::clone)?;
        Ok(median(&mut a.iter().zip(b).map(|(a, b)| a / b).collect::<Vec<_>>()))
    }

    /// Seconds of a pass.
    pub fn seconds(&self, access: usize) -> Outcome<f64> {
        let took = self.took[access].as_ref().map_err(Clone::clone)?;
        Ok(median(&mut took.clone()))
    }

    /// Seconds of plain reads of the bytes that a method reads, in each round.
    pub fn bounds(&self, access: usize) -> Outcome<Vec<f64>> {
        let moved = self.ready[access]["moved_bytes"].as_u64().ok_or("it reads nothing")?;
        let part = moved as f64 / self.bytes.max(1) as f64;
        Ok(self.raw[access].iter().map(|raw| raw * part).collect())
    }

    /// The median over rounds of the ratio of a pass and its bound.
    pub fn over_bound(&self, access: usize) -> Outcome<f64> {
        let took = self.took[access].as_ref().map_err(Clone::clone)?;
        let bounds = self.bounds(access)?;
        Ok(median(&mut took.iter().zip(&bounds).map(|(a, b)| a / b).collect::<Vec<_>>()))
    }
}
