//! A device whose copies fail when a test says so.

use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::base::status::{Result, Status};
use kvtier::base::sync::Arc;
use kvtier::device::{Copy, Device, Direction, Memory};
use kvtier_testkit::fixtures::device_hooks::{Hooked, Hooks};

/// Counters of copies in each direction: the number of the copy that fails, counted from 1. 0 =
/// none, [`ALL`] = all.
#[derive(Default)]
pub struct Faulty {
    pub scatter: AtomicU64,
    pub gather: AtomicU64,
    /// The plane whose scatter failed. Its copies fail until this is set to 0.
    pub stuck: AtomicU64,
}

/// Every copy fails.
pub const ALL: u64 = u64::MAX;

/// A device with faults.
pub fn faulty(inner: Arc<dyn Device>) -> Arc<Hooked<Faulty>> {
    Arc::new(Hooked { inner, hooks: Faulty::default() })
}

impl Faulty {
    fn pass(count: &AtomicU64) -> Result<()> {
        let next = |left: u64| match left {
            0 => None,
            ALL => Some(ALL),
            left => Some(left - 1),
        };
        match count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(1 | ALL) => Err(Status::Io.into()),
            _ => Ok(()),
        }
    }
}

/// Single failures count only copies with device memory: summaries of blocks are put in the store
/// from host memory, by a background thread.
fn counts(copy: &Copy<'_>, gather: u64) -> bool {
    let is_remote = copy.memory == Memory::Device || copy.plane_memory == Memory::Device;
    is_remote || gather == ALL
}

impl Hooks for Faulty {
    fn before_submit(&self, copies: &[Copy<'_>]) -> Result<()> {
        for copy in copies {
            let plane = copy.plane.expose_provenance() as u64;
            if copy.direction == Direction::Gather {
                if counts(copy, self.gather.load(Ordering::SeqCst)) {
                    Faulty::pass(&self.gather)?;
                }
            } else if self.stuck.load(Ordering::SeqCst) == plane {
                return Err(Status::Io.into());
            } else {
                let passed = Faulty::pass(&self.scatter);
                passed.inspect_err(|_| self.stuck.store(plane, Ordering::SeqCst))?;
            }
        }
        Ok(())
    }
}
