//! What a device takes of the driver, and gives back.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::{Condvar, Mutex};
use crate::device::MAX_STREAMS;
use crate::device::cuda::driver::{Driver, Handle, MAX_PITCH};
use crate::device::cuda::inside::Inside;
use crate::device::cuda::{Cuda, CudaOpts, Inner};
use crate::device::slots::Slots;
use crate::fail;

/// Most events that are known at once.
const MAX_EVENTS: usize = 65_536;
/// Streams where nobody names any: two for each way.
const STREAMS: u32 = 4;

impl Cuda {
    /// Opens a device. [`Status::Unavailable`] and why, where there is none or no driver.
    pub fn open(clock: Clock, opts: &CudaOpts) -> Result<Cuda> {
        if opts.streams.len() > MAX_STREAMS as usize {
            fail!(Invalid, "{} streams, up to {MAX_STREAMS} can be", opts.streams.len());
        }
        let driver = Driver::load(opts.library.as_deref())?;
        let count = driver.devices()?;
        let ordinal = c_int::try_from(opts.ordinal).ok().filter(|ordinal| *ordinal < count);
        let Some(ordinal) = ordinal else {
            fail!(Unavailable, "device {}, the driver has {count}", opts.ordinal);
        };
        let mut cuda = Cuda {
            driver,
            clock,
            ordinal,
            context: opts.context as usize,
            owns_context: opts.context == 0,
            streams: opts.streams.iter().map(|stream| *stream as usize).collect(),
            owns_streams: opts.streams.is_empty(),
            max_pitch: 0,
            inner: Mutex::new(Inner {
                known: Slots::new(MAX_EVENTS),
                ended: VecDeque::new(),
                spare: Vec::new(),
                given: BTreeMap::new(),
                last: 0,
                lost: None,
                closed: false,
            }),
            nap: Condvar::new(),
        };
        cuda.begin()?;
        Ok(cuda)
    }

    /// Takes what it needs of the driver; what was taken is given back when it is dropped.
    fn begin(&mut self) -> Result<()> {
        if self.owns_context {
            self.context = self.driver.retain(self.ordinal)?;
        }
        let inside = Inside::enter(&self.driver, self.context)?;
        self.ordinal = inside.ordinal()?;
        self.max_pitch = self.driver.attribute(MAX_PITCH, self.ordinal)?.max(0) as u64;
        let mut own = Vec::new();
        if self.owns_streams {
            for _ in 0..STREAMS {
                let made = self.driver.make_stream();
                let is_over = made.is_err();
                own.push(made);
                if is_over {
                    break;
                }
            }
        }
        drop(inside);
        for stream in own {
            self.streams.push(stream?);
        }
        Ok(())
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.context == 0 {
            return;
        }
        let driver = &self.driver;
        if let Ok(_inside) = Inside::enter(driver, self.context) {
            let inner = self.inner.lock();
            // SAFETY: what this device made and still has; its own streams have ended what they
            // were given before memory goes, those of others were waited for by `close`.
            unsafe {
                if self.owns_streams {
                    for &stream in &self.streams {
                        (driver.sync_stream)(stream as Handle);
                        (driver.destroy_stream)(stream as Handle);
                    }
                }
                for &address in inner.given.values() {
                    (driver.free)(address);
                }
            }
            drop(inner);
            let mut inner = self.inner.lock();
            let open = inner.known.iter_mut().map(|(_, known)| known.event).collect::<Vec<_>>();
            for event in open.into_iter().chain(inner.spare.iter().map(|known| known.event)) {
                // SAFETY: as above.
                unsafe { (driver.destroy_event)(event as Handle) };
            }
        }
        if self.owns_context {
            // SAFETY: retained once.
            unsafe { (driver.release_primary)(self.ordinal) };
        }
    }
}
