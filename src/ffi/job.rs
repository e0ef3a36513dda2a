//! Jobs: work that is cut into items, which the engine's threads run.

use crate::attention::{ColumnSums, Decode, Prefill};
use crate::base::status::{Result, Status};
use crate::base::sync::{Condvar, Mutex};
use crate::fail;
use crate::ffi::abi::{Plain, capi, check_out, enter, free, insert, noun, write};
use crate::ffi::attention::GivenRows;
use crate::ffi::error::kvt_error_t;
use crate::ffi::kernel::numbers_mut;
use crate::ffi::status::kvt_status_t;

/// Attention that is to be computed. Pieces of it are *items*, which the engine's threads run,
/// each once and in any order; items of a step once all of the step before have ended. What
/// comes out has the same bits whoever runs what. All that a job was opened with stays as it
/// is until it is closed.
pub struct kvt_job_t(());

/// How a job is cut.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_job_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How many steps it has.
    pub steps: u32,
    /// Items of the first step.
    pub items: u32,
    /// Items of the second step, where there is one.
    pub last_items: u32,
    /// Always 0.
    pub reserved: u32,
    /// Numbers of scratch that each thread needs.
    pub scratch_count: u64,
    /// Of a decode that keeps scores: keys that kvt_decode_sums has sums of, for each head.
    pub sum_keys: u64,
}

/// What is computed; it borrows from [`Planes`], and from the caller.
pub(crate) enum Kernel {
    Prefill(Prefill<'static>),
    Decode(Decode<'static>),
    Sums(ColumnSums<'static>),
}

impl Kernel {
    /// Items of each step.
    fn steps(&self) -> (u32, Option<u32>) {
        match self {
            Kernel::Prefill(job) => (job.items(), None),
            Kernel::Sums(job) => (job.items(), None),
            Kernel::Decode(job) => (job.parts(), Some(job.ends())),
        }
    }

    fn sum_keys(&self) -> usize {
        match self {
            Kernel::Decode(job) => job.sum_keys(),
            _ => 0,
        }
    }

    fn scratch(&self) -> usize {
        match self {
            Kernel::Prefill(job) => job.scratch(),
            Kernel::Sums(job) => job.scratch(),
            Kernel::Decode(job) => job.scratch(),
        }
    }
}

/// What views of a kernel lead through: it stays in its place until it is dropped.
pub(crate) struct Planes(*mut [GivenRows<'static>; 3]);

// SAFETY: it owns what it points to, which any thread may have and read.
unsafe impl Send for Planes {}
// SAFETY: as above.
unsafe impl Sync for Planes {}

impl Planes {
    pub(crate) fn new(planes: [GivenRows<'static>; 3]) -> Planes {
        Planes(Box::into_raw(Box::new(planes)))
    }

    /// All of them.
    ///
    /// # Safety
    /// The answer is not used when this has been dropped.
    pub(crate) unsafe fn all(&self) -> &'static [GivenRows<'static>; 3] {
        // SAFETY: it came from a box, and nobody writes it.
        unsafe { &*self.0 }
    }
}

impl Drop for Planes {
    fn drop(&mut self) {
        // SAFETY: it came from a box, once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Who is inside of a job.
#[derive(Default)]
struct Inside {
    running: u32,
    is_closed: bool,
}

pub(crate) struct JobNoun {
    pub(crate) kernel: Kernel,
    inside: Mutex<Inside>,
    left: Condvar,
    /// Behind the kernel, so that it goes after it.
    _planes: Planes,
}

noun!(JobNoun, kvt_job_t, 16, "job");

/// Leaves a job when it is dropped.
struct Entered<'a>(&'a JobNoun);

impl JobNoun {
    /// Enters it, unless it is being closed: then what it was opened with is no longer there.
    fn enter(&self) -> Result<Entered<'_>> {
        let mut inside = self.inside.lock();
        if inside.is_closed {
            return Err(Status::Closed.into());
        }
        inside.running += 1;
        Ok(Entered(self))
    }

    /// Waits until nobody is inside, and lets nobody in any more.
    fn close(&self) {
        let mut inside = self.inside.lock();
        inside.is_closed = true;
        while inside.running > 0 {
            self.left.wait(&mut inside);
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut inside = self.0.inside.lock();
        inside.running -= 1;
        if inside.is_closed && inside.running == 0 {
            self.0.left.notify_all();
        }
    }
}

/// Calls `body` with the kernel of a job, which nobody closes meanwhile.
pub(crate) fn with_kernel<R>(
    job: *const kvt_job_t,
    body: impl FnOnce(&Kernel) -> Result<R>,
) -> Result<R> {
    let job = enter(job)?;
    let _entered = job.enter()?;
    body(&job.kernel)
}

/// Puts a job into its table.
///
/// # Safety
/// `job_out` is valid for a write; planes are those of the kernel.
pub(crate) unsafe fn open(
    kernel: Kernel,
    planes: Planes,
    job_out: *mut *mut kvt_job_t,
) -> Result<()> {
    crate::base::fork::check()?;
    crate::base::fork::arm()?;
    let (inside, left) = (Mutex::new(Inside::default()), Condvar::new());
    let handle = insert(JobNoun { kernel, inside, left, _planes: planes })?;
    // SAFETY: the caller's promise.
    unsafe { job_out.write(handle) };
    Ok(())
}

/// How a job is cut.
///
/// @param job  The job.
/// @param out  Filled in; start it with KVT_JOB_INFO_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_job_info(
    job: *const kvt_job_t,
    out: *mut kvt_job_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let ((items, last), scratch, sum_keys) =
        with_kernel(job, |kernel| Ok((kernel.steps(), kernel.scratch(), kernel.sum_keys())))?;
    write(
        out,
        &kvt_job_info_t {
            struct_size: 0,
            steps: 1 + u32::from(last.is_some()),
            items,
            last_items: last.unwrap_or(0),
            reserved: 0,
            scratch_count: scratch as u64,
            sum_keys: sum_keys as u64,
        },
    );
    Ok(())
}

/// Runs items of a job, on this thread.
///
/// @param job            The job.
/// @param step           Which step.
/// @param first          Its first item.
/// @param items          How many; all to the last of the step, if it has fewer.
/// @param scratch        Memory that no other thread uses meanwhile.
/// @param scratch_count  How many numbers: kvt_job_info.
/// @param err            Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any threads at a time, with other items each. Since 0.1.
///
/// # Safety
/// `scratch` is valid for reads and writes of `scratch_count` numbers; no two threads run the
/// same item at a time, or an item of a step before all of the step before have ended.
#[capi]
pub unsafe extern "C" fn kvt_job_run(
    job: *const kvt_job_t,
    step: u32,
    first: u32,
    items: u32,
    scratch: *mut f32,
    scratch_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let memory = numbers_mut(scratch, scratch_count)?;
    with_kernel(job, |kernel| {
        let has = match (step, kernel.steps()) {
            (0, (items, _)) | (1, (_, Some(items))) => items,
            _ => fail!(Invalid, "there is no step {step}"),
        };
        if first > has {
            fail!(Invalid, "items from {first} on, step {step} has {has}");
        }
        (first..first.saturating_add(items).min(has)).try_for_each(|item| match kernel {
            Kernel::Prefill(job) => job.run(item, memory),
            Kernel::Sums(job) => job.run(item, memory),
            Kernel::Decode(job) if step == 0 => job.run(item, memory),
            Kernel::Decode(job) => job.end(item),
        })
    })
}

/// Closes a job and clears the handle. Waits for items that run; all that it was opened with
/// is the caller's again.
///
/// @param job  The handle; null, or a handle that is null, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `job` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_job_close(job: *mut *mut kvt_job_t) -> kvt_status_t {
    free(job, |job| {
        job.close();
        Ok(())
    })
}
