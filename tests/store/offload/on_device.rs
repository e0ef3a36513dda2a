//! The offload tests with ring, tails and tensors in device memory: on a simulated device that
//! detects missing waits, and on CUDA over the fake driver.

use std::cell::RefCell;

use kvtier::base::clock::Clock;
use kvtier::base::sync::Arc;
use kvtier::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Event, Memory, Stream};
use kvtier::offload::RingPlacement;
use kvtier::store::state::session::{LayerViews, PlaneView, Tokens};

use super::fake_cuda;

thread_local! {
    /// The device of the worlds that a test opens, and whether their rings are in its memory. None
    /// = all memory is host memory.
    static CURRENT: RefCell<Option<(Arc<dyn Device>, bool)>> = const { RefCell::new(None) };
}

/// The device of a test's worlds.
pub fn current() -> Option<Arc<dyn Device>> {
    CURRENT.with(|current| current.borrow().as_ref().map(|(device, _)| device.clone()))
}

/// Placement of their rings.
pub fn ring_home() -> RingPlacement {
    let is_remote =
        CURRENT.with(|current| current.borrow().as_ref().is_some_and(|(_, is_remote)| *is_remote));
    if is_remote { RingPlacement::Device } else { RingPlacement::Host }
}

/// A device whose copies take time.
pub fn simulated(seed: u64) -> Arc<Simulated> {
    let opts = SimulatedOpts { seed, latency_ns: 2_000, ..SimulatedOpts::default() };
    // Manual clock: a thread that waits advances it.
    Arc::new(Simulated::new(Clock::manual(1), opts).expect("sound"))
}

/// The CUDA device: a GPU if `KVTIER_GPU` is set, else the fake driver.
pub fn cuda() -> Arc<Cuda> {
    let library = std::env::var_os("KVTIER_GPU").is_none().then(fake_cuda::library);
    let opts = CudaOpts { library, choice: CopyMethodChoice::Measured, ..CudaOpts::default() };
    Arc::new(Cuda::open(Clock::real(), &opts).expect("a device"))
}

/// Runs a test with worlds on a device.
pub fn on<R>(device: Arc<dyn Device>, test: impl FnOnce() -> R) -> R {
    with((device, true), test)
}

/// Same as `on`, with rings in host memory: only the engine's tensors are on the device.
pub fn beside<R>(device: Arc<dyn Device>, test: impl FnOnce() -> R) -> R {
    with((device, false), test)
}

fn with<R>(current: (Arc<dyn Device>, bool), test: impl FnOnce() -> R) -> R {
    CURRENT.with(|all| *all.borrow_mut() = Some(current));
    let done = test();
    CURRENT.with(|all| *all.borrow_mut() = None);
    done
}

/// Memory of a device.
pub struct DeviceBuffer {
    device: Arc<dyn Device>,
    memory: DeviceMemory,
}

impl DeviceBuffer {
    pub fn new(device: &Arc<dyn Device>, bytes: u64) -> DeviceBuffer {
        let memory = device.allocate(bytes).expect("room");
        DeviceBuffer { device: device.clone(), memory }
    }

    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// Copies numbers from host memory. Returns the event of the copy.
    pub fn fill(&self, from: &[f32]) -> Event {
        let (bytes, host) = (size_of_val(from) as u64, from.as_ptr().cast::<u8>().cast_mut());
        let address = self.memory.address;
        let copy = Copy::bytes(host, address, bytes, Direction::Scatter, Memory::Device);
        // SAFETY: both memories live until the event, for which the caller waits.
        unsafe { self.device.submit(Stream(0), None, &mut [copy.expect("sound")]) }.expect("taken")
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the owner has waited for all copies and kernels that use the memory.
        unsafe { self.device.free(&self.memory) }.expect("its own");
    }
}

/// Waits for an event and releases it.
pub fn end(device: &dyn Device, event: Event) {
    device.wait(event, 0).expect("the event ends");
    device.release(event).expect("the event has ended");
}

/// Begins to read numbers from device memory, as a kernel would.
pub fn read(device: &dyn Device, address: u64, to: &mut [f32]) -> Event {
    let (bytes, host) = (size_of_val(to) as u64, to.as_mut_ptr().cast::<u8>());
    let copy = Copy::bytes(host, address, bytes, Direction::Gather, Memory::Device).expect("sound");
    // SAFETY: both memories live until the event, for which the caller waits.
    unsafe { device.submit(Stream(1), None, &mut [copy]) }.expect("taken")
}

/// The view of a plane that was copied from `from` to `to`.
pub fn moved(view: &PlaneView, from: u64, to: u64) -> PlaneView {
    let there = |address: &u64| address - from + to;
    let place = match &view.place {
        Tokens::At(address) => Tokens::At(there(address)),
        Tokens::Pages { addresses, page_tokens, shift_bytes } => Tokens::Pages {
            addresses: Arc::new(addresses.iter().map(there).collect()),
            page_tokens: *page_tokens,
            shift_bytes: *shift_bytes,
        },
    };
    PlaneView { memory: Memory::Device, place, ..view.clone() }
}

/// K and V numbers of a buffer in any memory.
pub fn numbers(device: Option<&Arc<dyn Device>>, views: &LayerViews) -> [Vec<f32>; 2] {
    let get = |plane: &PlaneView| -> Vec<f32> {
        let count = plane.tokens as usize * (plane.token_stride_bytes / 4) as usize;
        let Tokens::At(address) = plane.place else { panic!("buffers have no pages") };
        let mut all = vec![0.0; count];
        match (plane.memory, device) {
            _ if count == 0 => {}
            (Memory::Device, Some(device)) => end(&**device, read(&**device, address, &mut all)),
            _ => {
                let here = std::ptr::with_exposed_provenance::<f32>(address as usize);
                // SAFETY: the rows belong to the buffer, whose load has ended.
                all.copy_from_slice(unsafe { std::slice::from_raw_parts(here, count) });
            }
        }
        all
    };
    [get(&views.k), views.v.as_ref().map(get).unwrap_or_default()]
}

/// Runs the tests of all modules that do not depend on the memory, on both devices.
macro_rules! on_devices {
    ($($test:path => $name:ident,)*) => {
        $(#[test]
        fn $name() {
            super::on_device::on(super::on_device::simulated(7), $test);
            super::on_device::on(super::on_device::cuda(), $test);
        })*
    };
}
pub(crate) use on_devices;
