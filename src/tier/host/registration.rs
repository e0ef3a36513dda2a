//! Registration of slabs of the host tier with a device. The device pins registered memory, which
//! makes copies faster. Pinning is slow, so it does not happen under the store's lock: mapping a
//! slab only queues its registration, and a copy worker executes it later without the lock.

use crate::base::sync::{Arc, Mutex};
use crate::device::Device;
use crate::tier::host::HostTier;

/// The memory of a slab, and the device to register it with.
pub struct Registration {
    device: Arc<dyn Device>,
    address: usize,
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not registered yet, or the device rejected the memory.
    Unregistered,
    Registered,
    /// The slab is being unmapped.
    Unmapped,
}

impl Registration {
    /// Registers the memory, unless the slab was unmapped meanwhile. Memory that the device cannot
    /// pin is used without registration.
    pub fn register(&self) {
        let mut state = self.state.lock();
        if *state != State::Unregistered {
            return;
        }
        let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the memory of a slab, which stays mapped until its `Registrar` has unregistered
        // it.
        match unsafe { self.device.register_host(pointer, self.bytes) } {
            Ok(()) => *state = State::Registered,
            Err(error) => log::warn!("{} bytes of host memory are not pinned: {error}", self.bytes),
        }
    }
}

/// Owned by the slab. Dropping it unregisters the memory, before the slab unmaps it.
pub struct Registrar(pub Arc<Registration>);

impl Registrar {
    pub fn new(device: &Arc<dyn Device>, address: *mut u8, bytes: u64) -> Registrar {
        let (device, address) = (device.clone(), address.expose_provenance());
        Registrar(Arc::new(Registration {
            device,
            address,
            bytes,
            state: Mutex::new(State::Unregistered),
        }))
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        let registration = &self.0;
        let mut state = registration.state.lock();
        if std::mem::replace(&mut *state, State::Unmapped) != State::Registered {
            return;
        }
        let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(registration.address);
        // SAFETY: no piece of the slab is in use, so no copy accesses its memory.
        if let Err(error) = unsafe { registration.device.unregister_host(pointer) } {
            log::warn!("the memory of a slab stays pinned: {error}");
        }
    }
}

impl HostTier {
    /// Queues all slabs that are mapped from now on for registration with a device. See
    /// [`HostTier::take_unregistered`].
    pub fn make_known_to(&mut self, device: Arc<dyn Device>) {
        self.device = Some(device);
    }

    /// Whether slabs wait for registration.
    pub fn has_unregistered(&self) -> bool {
        !self.unregistered.is_empty()
    }

    /// Takes the queued registrations. The caller executes them with [`Registration::register`],
    /// without the lock of the store.
    pub fn take_unregistered(&mut self) -> Vec<Arc<Registration>> {
        std::mem::take(&mut self.unregistered)
    }
}
