//! Passes over one model by many ways, each in a memory cgroup that holds a part of it,
//! in turn: so all of them see the same disk.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use kvtier::base::memory::{AllocationRequest, Buffer, prefault};
use kvtier::stream::model::Model;

use super::disk::{DEPTH, Outcome, PIECE, memory, raw};
use super::median;
use super::stream_child::{Child, Group, Readahead, Start};

/// What Linux reads ahead where nobody has set anything.
const USUAL_READAHEAD_KIB: u64 = 128;
/// Of a cgroup, what is no memory for weights: code, stacks, rings, tables of pages.
const LEAST_SPARE_BYTES: u64 = 16 << 20;

/// A memory map, with the readahead that there is, and with the usual one.
pub const MAP: usize = 0;
/// See [`MAP`].
pub const MAP_USUAL: usize = 1;
/// Direct reads into two slots, nothing stays.
pub const NOTHING_STAYS: usize = 2;
/// The first units stay.
pub const FIRST_STAY: usize = 3;
/// Units at equal distances stay.
pub const SPREAD_STAY: usize = 4;
/// The same, where nobody says how much memory there is.
pub const FOUND: usize = 5;
const WAYS: usize = 6;

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// How to measure.
pub struct Setting {
    /// Memory of each way; the memory cgroup's limit.
    pub limit_bytes: u64,
    /// Rounds.
    pub rounds: u32,
    /// Passes of each way in a round.
    pub passes: u32,
}

/// What was measured.
pub struct Measured {
    /// Bytes of the files.
    pub bytes: u64,
    /// Seconds in which plain direct reads have all of them, just before and after each way's
    /// passes in each round: what a disk gives changes.
    pub raw: [Vec<f64>; WAYS],
    /// Seconds of a pass, in each round; or why there are none.
    pub took: [Outcome<Vec<f64>>; WAYS],
    /// What the ways said when they were ready.
    pub ready: [serde_json::Value; WAYS],
    /// The most memory of each.
    pub peak: [Outcome<u64>; WAYS],
    /// The readahead that there is, in KiB.
    pub readahead_kib: Option<u64>,
}

/// A safetensors file of layers of one tensor.
pub fn make(path: &Path, layers: u64, layer_bytes: u64) -> Outcome<()> {
    let mut head = String::from("{");
    for i in 0..layers {
        let (from, to, count) = (i * layer_bytes, (i + 1) * layer_bytes, layer_bytes / 2);
        let comma = if i == 0 { "" } else { "," };
        head += &format!(
            "{comma}\"model.layers.{i}.mlp.up_proj.weight\":{{\"dtype\":\"F16\",\
             \"shape\":[{count}],\"data_offsets\":[{from},{to}]}}"
        );
    }
    head.push('}');
    // As most writers do: tensors begin at a page.
    let padded = (head.len() + 8).next_multiple_of(4096) - 8;
    head.extend(std::iter::repeat_n(' ', padded - head.len()));
    let mut file = File::create(path).map_err(say)?;
    file.write_all(&(head.len() as u64).to_le_bytes()).map_err(say)?;
    file.write_all(head.as_bytes()).map_err(say)?;
    let stock = memory(PIECE)?;
    // SAFETY: all of the stock, which was filled, and which nobody else has.
    let stock = unsafe { std::slice::from_raw_parts_mut(stock.address(), PIECE as usize) };
    for piece in 0..layers * layer_bytes / PIECE {
        // No two pieces are the same.
        stock[..8].copy_from_slice(&piece.to_le_bytes());
        file.write_all(stock).map_err(say)?;
    }
    file.sync_all().map_err(say)
}

/// Memory that plain reads go to: as good as that of weights, or they are no bound.
pub fn stock() -> Outcome<Buffer> {
    let wish = AllocationRequest {
        bytes: DEPTH * PIECE,
        prefer_huge: true,
        ..AllocationRequest::default()
    };
    let stock = Buffer::map(&wish, None).map_err(say)?;
    // SAFETY: the stock is this call's alone.
    unsafe { prefault(stock.address(), stock.bytes()) };
    Ok(stock)
}

/// Has the page cache forget files.
fn forget(files: &[PathBuf]) -> Outcome<()> {
    for path in files {
        let file = File::open(path).map_err(say)?;
        // SAFETY: integers, and a file that is open.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
    Ok(())
}

/// Starts a way. Maps need a cgroup: nothing else keeps the page cache small.
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
    let (how, host_bytes) = match access {
        MAP | MAP_USUAL => ("map", None),
        NOTHING_STAYS => ("interleaved", Some(slots_bytes)),
        FIRST_STAY => ("first", Some(host)),
        SPREAD_STAY => ("interleaved", Some(host)),
        _ => ("interleaved", None),
    };
    // Files keep what it was when they were opened.
    let _set = match (access, files.first()) {
        (MAP_USUAL, Some(first)) => Some(Readahead::set(first, USUAL_READAHEAD_KIB)?),
        _ => None,
    };
    Child::start(Start { how, files, host_bytes, group })
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
                return Err(format!("way {access} saw other bytes than the others"));
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

/// Measures all ways.
pub fn measure(paths: &[PathBuf], setting: &Setting) -> Outcome<Measured> {
    let model = Model::open(paths).map_err(say)?;
    let units = kvtier::stream::units::Units::of(&model).map_err(say)?;
    let files: Vec<PathBuf> = model.files.iter().map(|file| file.path.clone()).collect();
    let bytes = model.files.iter().map(|file| file.bytes).sum();
    let slots_bytes = 2 * units.units.iter().map(|unit| unit.image_bytes).max().unwrap_or(0);
    forget(&files)?;
    // One for both maps: pages that one has are there for the other.
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
    let stock = stock()?;
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
    /// The median over rounds of one time over another, or why there is none.
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

    /// Seconds in which plain reads have what a way has to read, in each round.
    pub fn bounds(&self, access: usize) -> Outcome<Vec<f64>> {
        let moved = self.ready[access]["moved_bytes"].as_u64().ok_or("it reads nothing")?;
        let part = moved as f64 / self.bytes.max(1) as f64;
        Ok(self.raw[access].iter().map(|raw| raw * part).collect())
    }

    /// The median over rounds of a pass over its bound.
    pub fn over_bound(&self, access: usize) -> Outcome<f64> {
        let took = self.took[access].as_ref().map_err(Clone::clone)?;
        let bounds = self.bounds(access)?;
        Ok(median(&mut took.iter().zip(&bounds).map(|(a, b)| a / b).collect::<Vec<_>>()))
    }
}
