//! Copies over a device's bus, held against what the device says that it has: a byte that changes
//! on the way would else be stored, and summed as if it were right.

use crate::base::checksum::checksum;
use crate::base::status::{Result, Status};
use crate::device::{Copy, Device, Event, Memory, Stream, Way};
use crate::fail;
use crate::kv::core::work::{CopyBatch, Damage};
use crate::kv::hands::{Tools, copy_of};

/// Carries copies out. Where the device sums, what comes damaged is copied once more; jobs that
/// are no better then are noted.
///
/// # Safety
/// As [`Tools::work`].
pub unsafe fn copy(tools: &Tools, batch: &mut CopyBatch, stream: Stream) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let bad = copy_some(tools, batch, stream, None)?;
        again(tools, batch, stream, bad)
    }
}

/// Makes those copies again that came damaged, once.
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
    log::warn!("{seen} copies came damaged over the device's bus, and are made again");
    sort(&mut bad);
    // SAFETY: the caller's promise.
    let mut worse = unsafe { copy_some(tools, batch, stream, Some(&bad))? };
    seen += worse.len() as u64;
    if !worse.is_empty() {
        log::error!("{} copies came damaged over the device's bus twice", worse.len());
    }
    sort(&mut worse);
    batch.damage = Damage { seen, jobs: worse };
    Ok(())
}

fn sort(jobs: &mut Vec<usize>) {
    jobs.sort_unstable();
    jobs.dedup();
}

/// The copies of a batch, and the job that each is of.
#[derive(Default)]
pub struct Made<'a> {
    /// Those into the device tier.
    pub fills: Vec<Copy<'static>>,
    /// Those that may read them there.
    pub copies: Vec<Copy<'a>>,
    of_fills: Vec<usize>,
    of_copies: Vec<usize>,
}

/// A plane that the device sums.
pub struct Summed {
    job: usize,
    plane: u64,
    bytes: u64,
}

impl<'a> Made<'a> {
    /// The copies of all jobs of a batch, or of these.
    pub fn of(tools: &Tools, batch: &'a CopyBatch, only: Option<&[usize]>) -> Result<Made<'a>> {
        let facts = tools.device.facts();
        let verifies = facts.sums && facts.asynchronous;
        let is_due = |job| only.is_none_or(|jobs| jobs.binary_search(&job).is_ok());
        let mut made = Made::default();
        made.copies.reserve(if only.is_none() { batch.items.len() } else { 0 });
        for item in batch.items.iter().filter(|item| is_due(item.job)) {
            made.copies.push(copy_of(batch, item)?);
            made.of_copies.push(item.job);
        }
        for fill in batch.fills.iter().filter(|fill| is_due(fill.job)) {
            let (host, way) = (fill.host as *mut u8, Way::Scatter);
            made.fills.push(Copy::bytes(host, fill.device, fill.bytes, way, Memory::Device)?);
            made.of_fills.push(fill.job);
        }
        made.copies.iter_mut().for_each(|copy| copy.wants_sum = verifies && crosses(copy));
        made.fills.iter_mut().for_each(|copy| copy.wants_sum = verifies && crosses(copy));
        Ok(made)
    }

    /// What the device sums, in the order in which it is told.
    pub fn summed(&self) -> Vec<Summed> {
        let fills = self.fills.iter().zip(&self.of_fills);
        let all = fills.chain(self.copies.iter().zip(&self.of_copies));
        let wanted = all.filter(|(copy, _)| copy.wants_sum);
        let of = |(copy, &job): (&Copy<'_>, &usize)| {
            let plane = copy.plane.expose_provenance() as u64;
            Summed { job, plane, bytes: copy.tensor.bytes() }
        };
        wanted.map(of).collect()
    }

    fn sums(&self) -> impl Iterator<Item = u64> {
        self.fills.iter().chain(&self.copies).filter(|copy| copy.wants_sum).map(|copy| copy.sum)
    }
}

impl Summed {
    /// The job, if its bytes here are not those that the device summed.
    ///
    /// # Safety
    /// The plane is in host memory, and nobody changes it.
    pub unsafe fn damaged(&self, sum: u64) -> Option<usize> {
        let plane = std::ptr::with_exposed_provenance(self.plane as usize);
        // SAFETY: the caller's promise: a plane is as long as its tensor's tokens.
        let plane: &[u8] = unsafe { std::slice::from_raw_parts(plane, self.bytes as usize) };
        (checksum(plane) != sum).then_some(self.job)
    }
}

/// Copies all jobs of a batch, or these. Of which came damaged, each as often as it did.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_some(
    tools: &Tools,
    batch: &CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> Result<Vec<usize>> {
    let mut made = Made::of(tools, batch, only)?;
    // SAFETY: the caller's promise; planes are pieces that are kept for this.
    unsafe { tools.submit_all(stream, &mut made.fills, &mut made.copies)? };
    let summed = made.summed();
    // SAFETY: as above; nothing is under way any more.
    let bad = summed.iter().zip(made.sums()).filter_map(|(one, sum)| unsafe { one.damaged(sum) });
    Ok(bad.collect())
}

/// Whether a copy goes between a plane in host memory and a tensor in the device's. The store's
/// planes are on the other side only where both are there.
fn crosses(copy: &Copy<'_>) -> bool {
    copy.memory == Memory::Device && copy.plane_memory == Memory::Host
}

/// Takes the sums of a batch that has ended over into its copies.
pub fn take_sums(device: &dyn Device, event: Event, copies: &mut [Copy<'_>]) -> Result<()> {
    let wanted = copies.iter().filter(|copy| copy.wants_sum).count();
    if wanted == 0 {
        return Ok(());
    }
    let sums = sums_of(device, event, wanted)?;
    let wants = copies.iter_mut().filter(|copy| copy.wants_sum);
    wants.zip(sums).for_each(|(copy, sum)| copy.sum = sum);
    Ok(())
}

/// The sums of a batch that has ended, so many.
pub fn sums_of(device: &dyn Device, event: Event, wanted: usize) -> Result<Vec<u64>> {
    let mut sums = Vec::new();
    sums.try_reserve_exact(wanted).map_err(|_| Status::NoMem)?;
    sums.resize(wanted, 0);
    let told = if wanted == 0 { 0 } else { device.sums(event, &mut sums)? };
    if told != wanted {
        fail!(Io, "the device told {told} sums of {wanted}");
    }
    Ok(sums)
}
