//! Verification of device copies. A device may compute checksums of what it copies; they are
//! compared with checksums of the same bytes in host memory, so that a byte that changes on the
//! link is neither stored nor delivered.

use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::device::{Copy, Device, Direction, Event, Memory, Stream};
use crate::fail;
use crate::store::executor::{Failed, Tools, copy_of};
use crate::store::state::work::CopyBatch;

/// Job and plane of a copy, and the expected checksum if it is known.
#[derive(Clone, Copy)]
struct Of {
    job: usize,
    is_v: bool,
    sum: Option<u64>,
}

/// Executes copies. If the device computes checksums, damaged copies are repeated once, and jobs
/// that are damaged again are noted. A batch that fails is executed job by job, since its jobs may
/// belong to different callers; each outcome is noted.
///
/// # Safety
/// As [`Tools::work`].
pub unsafe fn copy(tools: &Tools, batch: &mut CopyBatch, stream: Stream) -> Result<()> {
    // SAFETY: the caller's promise.
    let Err(failed) = (unsafe { copy_jobs(tools, batch, stream, None) }) else { return Ok(()) };
    let jobs = batch.jobs().count();
    if failed.is_lost() {
        return Err(failed.error);
    }
    if jobs <= 1 {
        batch.refused.extend(failed.is_refused.then_some(0));
        return Err(failed.error);
    }
    log::warn!("a batch of {jobs} copies failed and is retried one by one: {}", failed.error);
    let mut alone = Vec::new();
    alone.try_reserve_exact(jobs).map_err(|_| Status::NoMem)?;
    for at in 0..jobs {
        // SAFETY: the caller's promise.
        let copied = unsafe { copy_jobs(tools, batch, stream, Some(&[at])) };
        alone.push(match copied {
            Err(failed) if failed.is_lost() => return Err(failed.error),
            Err(failed) => {
                batch.refused.extend(failed.is_refused.then_some(at));
                Err(failed.error)
            }
            Ok(()) => Ok(()),
        });
    }
    batch.alone = alone;
    Ok(())
}

/// Copies all jobs of a batch, or some, and repeats damaged copies once.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_jobs(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> std::result::Result<(), Failed> {
    // SAFETY: the caller's promise.
    unsafe {
        let bad = copy_some(tools, batch, stream, only)?;
        again(tools, batch, stream, bad).map_err(Failed::from)
    }
}

/// Repeats the copies that arrived damaged, once.
///
/// # Safety
/// As [`Tools::work`].
pub unsafe fn again(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    mut bad: Vec<usize>,
) -> Result<()> {
    if bad.is_empty() {
        return Ok(());
    }
    let mut seen = bad.len() as u64;
    log::warn!("{seen} copies over a device's bus arrived damaged and are repeated");
    sort(&mut bad);
    // SAFETY: the caller's promise.
    let worse = unsafe { copy_some(tools, batch, stream, Some(&bad)) };
    let mut worse = worse.map_err(|failed| failed.error)?;
    seen += worse.len() as u64;
    if !worse.is_empty() {
        log::error!(
            "{} copies over a device's bus arrived damaged twice; their transfers fail",
            worse.len()
        );
    }
    sort(&mut worse);
    batch.damage.seen += seen;
    batch.damage.jobs.append(&mut worse);
    Ok(())
}

fn sort(jobs: &mut Vec<usize>) {
    jobs.sort_unstable();
    jobs.dedup();
}

/// The copies of a batch.
#[derive(Default)]
pub struct Made<'a> {
    /// Copies into the device tier.
    pub fills: Vec<Copy<'static>>,
    /// Copies that may read what those wrote.
    pub copies: Vec<Copy<'a>>,
    of_fills: Vec<Of>,
    of_copies: Vec<Of>,
}

/// A plane whose checksum the device computes.
pub struct Summed {
    of: Of,
    plane: u64,
    bytes: u64,
}

/// Result for one plane.
pub struct Held {
    of: Of,
    right: u64,
    is_damaged: bool,
}

impl<'a> Made<'a> {
    /// The copies of all jobs of a batch, or of some.
    pub fn of(tools: &Tools, batch: &'a CopyBatch, only: Option<&[usize]>) -> Result<Made<'a>> {
        let facts = tools.device.facts();
        let verifies = facts.sums && facts.asynchronous;
        let is_due = |job| only.is_none_or(|jobs| jobs.binary_search(&job).is_ok());
        let mut made = Made::default();
        made.copies.reserve(if only.is_none() { batch.items.len() } else { 0 });
        for item in batch.items.iter().filter(|item| is_due(item.job)) {
            let mut copy = copy_of(batch, item)?;
            copy.wants_sum = verifies && (crosses(&copy) || item.sum.is_some());
            made.copies.push(copy);
            made.of_copies.push(Of { job: item.job, is_v: item.is_v, sum: item.sum });
        }
        for fill in batch.fills.iter().filter(|fill| is_due(fill.job)) {
            // A checksum is of a plane. Without checksums a cell is one copy.
            let k_bytes = if verifies { fill.k_bytes } else { fill.bytes };
            let parts = [(false, 0, k_bytes), (true, k_bytes, fill.bytes - k_bytes)];
            for (is_v, at, bytes) in parts.into_iter().filter(|(.., bytes)| *bytes > 0) {
                let (host, to) = ((fill.host + at as usize) as *mut u8, fill.device + at);
                let copy = Copy::bytes(host, to, bytes, Direction::Scatter, Memory::Device)?;
                made.fills.push(Copy { wants_sum: verifies && crosses(&copy), ..copy });
                made.of_fills.push(Of { job: fill.job, is_v, sum: None });
            }
        }
        Ok(made)
    }

    /// Planes whose checksum the device computes, in the order of submission.
    pub fn summed(&self) -> Vec<Summed> {
        let fills = self.fills.iter().zip(&self.of_fills);
        let all = fills.chain(self.copies.iter().zip(&self.of_copies));
        let count = all.filter(|(copy, _)| copy.wants_sum);
        count.map(|(copy, of)| Summed::of(copy, *of)).collect()
    }

    fn sums(&self) -> impl Iterator<Item = u64> {
        self.fills.iter().chain(&self.copies).filter(|copy| copy.wants_sum).map(|copy| copy.sum)
    }
}

impl Summed {
    fn of(copy: &Copy<'_>, of: Of) -> Summed {
        let plane = copy.plane.expose_provenance() as u64;
        Summed { of, plane, bytes: copy.tensor.bytes() }
    }

    /// Compares a reported checksum with the known one, or with the plane in host memory.
    ///
    /// # Safety
    /// Unless its checksum is known, the plane is in host memory and does not change.
    pub unsafe fn hold(&self, reported: u64) -> Held {
        let right = self.of.sum.unwrap_or_else(|| {
            let plane = std::ptr::with_exposed_provenance(self.plane as usize);
            // SAFETY: the caller's promise: a plane is as long as its tensor's tokens.
            let plane: &[u8] = unsafe { std::slice::from_raw_parts(plane, self.bytes as usize) };
            checksum(plane)
        });
        Held { of: self.of, right, is_damaged: right != reported }
    }
}

/// Copies all jobs of a batch, or some. Returns the damaged ones, once for each damaged copy.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_some(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> std::result::Result<Vec<usize>, Failed> {
    let mut made = Made::of(tools, batch, only).map_err(Failed::refused)?;
    // SAFETY: the caller's promise; planes are pieces that are kept for this.
    unsafe { tools.submit_all(stream, &mut made.fills, &mut made.copies)? };
    let summed = made.summed();
    // SAFETY: as above; nothing is in flight any more.
    let hold = |(one, sum): (&Summed, u64)| unsafe { one.hold(sum) };
    let held: Vec<Held> = summed.iter().zip(made.sums()).map(hold).collect();
    drop(made);
    Ok(note(batch, &held))
}

/// Copies a tensor in device memory to a plane in host memory. Returns whether it arrived
/// undamaged, as far as the device reports.
///
/// # Safety
/// As [`Device::submit`].
pub unsafe fn copy_one(
    tools: &Tools,
    copy: Copy<'_>,
    stream: Stream,
) -> std::result::Result<bool, Failed> {
    let facts = tools.device.facts();
    let mut copies = [Copy { wants_sum: facts.sums && facts.asynchronous, ..copy }];
    // SAFETY: the caller's promise; nothing is in flight any more then.
    unsafe {
        tools.submit_parts(stream, None, &mut copies)?;
        let [copy] = &copies;
        let of = Of { job: 0, is_v: false, sum: None };
        Ok(!copy.wants_sum || !Summed::of(copy, of).hold(copy.sum).is_damaged)
    }
}

/// Records the checksums of planes that get a replica. Returns the damaged jobs, once for each
/// damaged copy.
pub fn note(batch: &mut CopyBatch, held: &[Held]) -> Vec<usize> {
    if !held.is_empty() && batch.rescued.is_some() {
        let jobs = batch.jobs().count();
        batch.sums.resize(jobs, [0; 2]);
        for one in held {
            batch.sums[one.of.job][usize::from(one.of.is_v)] = one.right;
        }
    }
    held.iter().filter(|one| one.is_damaged).map(|one| one.of.job).collect()
}

/// Whether a copy crosses the bus, between a plane in host memory and a tensor in device memory.
fn crosses(copy: &Copy<'_>) -> bool {
    copy.memory == Memory::Device && copy.plane_memory == Memory::Host
}

/// Takes the checksums of an ended batch into its copies.
pub fn take_sums(device: &dyn Device, event: Event, copies: &mut [Copy<'_>]) -> Result<()> {
    let count = copies.iter().filter(|copy| copy.wants_sum).count();
    if count == 0 {
        return Ok(());
    }
    let sums = sums_of(device, event, count)?;
    let wants = copies.iter_mut().filter(|copy| copy.wants_sum);
    wants.zip(sums).for_each(|(copy, sum)| copy.sum = sum);
    Ok(())
}

/// `count` checksums of an ended batch.
pub fn sums_of(device: &dyn Device, event: Event, count: usize) -> Result<Vec<u64>> {
    let mut sums = Vec::new();
    sums.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
    sums.resize(count, 0);
    let reported = if count == 0 { 0 } else { device.sums(event, &mut sums)? };
    if reported != count {
        fail!(Io, "the device reported {reported} of {count} checksums");
    }
    Ok(sums)
}
