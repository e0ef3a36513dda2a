//! Memory that a device is told of, so that copies of it are as fast as they can be: the device
//! has to pin it, which takes its time. So whoever maps a segment, under its owner's lock, only
//! notes it; it is told by whoever has no lock.

use crate::base::sync::{Arc, Mutex};
use crate::device::Device;
use crate::tier::host::HostTier;

/// A segment's memory, and the device that is to know of it.
pub struct Registration {
    device: Arc<dyn Device>,
    address: usize,
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Fresh,
    Known,
    Gone,
}

impl Registration {
    /// Tells the device, unless the memory has gone meanwhile. What it cannot pin is copied all
    /// the same.
    pub fn register(&self) {
        let mut state = self.state.lock();
        if *state != State::Fresh {
            return;
        }
        let place: *mut u8 = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: a segment's memory, which stays until it is taken back here.
        match unsafe { self.device.register_host(place, self.bytes) } {
            Ok(()) => *state = State::Known,
            Err(error) => log::warn!("{} bytes of memory are not pinned: {error}", self.bytes),
        }
    }
}

/// Kept by the segment: its memory is taken back before it goes.
pub struct Registrar(pub Arc<Registration>);

impl Registrar {
    pub fn new(device: &Arc<dyn Device>, address: *mut u8, bytes: u64) -> Registrar {
        let (device, address) = (device.clone(), address.expose_provenance());
        Registrar(Arc::new(Registration {
            device,
            address,
            bytes,
            state: Mutex::new(State::Fresh),
        }))
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        let registration = &self.0;
        let mut state = registration.state.lock();
        if std::mem::replace(&mut *state, State::Gone) != State::Known {
            return;
        }
        let place: *mut u8 = std::ptr::with_exposed_provenance_mut(registration.address);
        // SAFETY: none of the segment's pieces is in use, so no copy of them is under way.
        if let Err(error) = unsafe { registration.device.unregister_host(place) } {
            log::warn!("the memory of a slab stays pinned: {error}");
        }
    }
}

impl HostTier {
    /// All memory that is mapped from now on is made known to a device; by whom, see
    /// [`HostTier::take_unregistered`].
    pub fn make_known_to(&mut self, device: Arc<dyn Device>) {
        self.device = Some(device);
    }

    /// Whether there is something for [`HostTier::take_unregistered`].
    pub fn has_unregistered(&self) -> bool {
        !self.unregistered.is_empty()
    }

    /// Memory that the device was not told of: to be told of without the owner's lock.
    pub fn take_unregistered(&mut self) -> Vec<Arc<Registration>> {
        std::mem::take(&mut self.unregistered)
    }
}
