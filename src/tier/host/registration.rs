//! Registration of host memory with a device, which pins it so that copies are fast. Pinning is
//! slow. Therefore the tier only records a new segment under its owner's lock; a worker registers
//! the segment later without the lock.

use crate::base::sync::{Arc, Mutex};
use crate::device::Device;
use crate::tier::host::HostTier;

/// A segment's memory, and the device to register it with.
pub struct Registration {
    device: Arc<dyn Device>,
    address: usize,
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    Registered,
    Unregistered,
}

impl Registration {
    /// Registers the memory, unless it was freed meanwhile. Memory that cannot be pinned is
    /// copied without it.
    pub fn register(&self) {
        let mut state = self.state.lock();
        if *state != State::New {
            return;
        }
        let place: *mut u8 = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: a segment's memory, which stays mapped until it is unregistered here.
        match unsafe { self.device.register_host(place, self.bytes) } {
            Ok(()) => *state = State::Registered,
            Err(error) => log::warn!("{} bytes of memory are not pinned: {error}", self.bytes),
        }
    }
}

/// Owned by the segment: unregisters its memory before it is unmapped.
pub struct Registrar(pub Arc<Registration>);

impl Registrar {
    pub fn new(device: &Arc<dyn Device>, address: *mut u8, bytes: u64) -> Registrar {
        let (device, address) = (device.clone(), address.expose_provenance());
        Registrar(Arc::new(Registration { device, address, bytes, state: Mutex::new(State::New) }))
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        let registration = &self.0;
        let mut state = registration.state.lock();
        if std::mem::replace(&mut *state, State::Unregistered) != State::Registered {
            return;
        }
        let place: *mut u8 = std::ptr::with_exposed_provenance_mut(registration.address);
        // SAFETY: none of the segment's pieces is in use, so no copy of them is in flight.
        if let Err(error) = unsafe { registration.device.unregister_host(place) } {
            log::warn!("the memory of a slab stays pinned: {error}");
        }
    }
}

impl HostTier {
    /// All memory that is mapped from now on will be registered with a device, by the caller of
    /// [`HostTier::take_unregistered`].
    pub fn make_known_to(&mut self, device: Arc<dyn Device>) {
        self.device = Some(device);
    }

    /// Whether there is something for [`HostTier::take_unregistered`].
    pub fn has_unregistered(&self) -> bool {
        !self.unregistered.is_empty()
    }

    /// Memory that is not registered yet: to be registered without the owner's lock.
    pub fn take_unregistered(&mut self) -> Vec<Arc<Registration>> {
        std::mem::take(&mut self.unregistered)
    }
}
