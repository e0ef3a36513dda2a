//! Windows: addresses that stay while the memory behind them moves. All devices with windows obey
//! one contract; the simulated device detects moves of memory in use.

use kvtier_testkit::fixtures::fake_cuda;

use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::{Cuda, CudaOpts};
use kvtier::device::host::Host;
use kvtier::device::simulated::{POISON, Simulated, SimulatedOpts};
use kvtier::device::window::{Piece, Window};
use kvtier::device::{Copy, Device, Direction, Event, Memory, Stream};

fn simulated(opts: SimulatedOpts) -> Arc<Simulated> {
    Arc::new(Simulated::new(Clock::real(), opts).expect("sound"))
}

/// CUDA over a driver without a device; where there is a GPU, on that.
fn cuda() -> Arc<Cuda> {
    let has_gpu = std::env::var_os("KVTIER_GPU").is_some();
    let library = (!has_gpu).then(fake_cuda::library);
    let opts = CudaOpts { library, ..CudaOpts::default() };
    Arc::new(Cuda::open(Clock::real(), &opts).expect("a driver"))
}

/// Begins a copy of bytes of this process, which stay for ever.
fn begin(
    device: &dyn Device,
    address: u64,
    bytes: &mut [u8],
    direction: Direction,
) -> Result<Event> {
    let length = bytes.len() as u64;
    let copy = Copy::bytes(bytes.as_mut_ptr(), address, length, direction, Memory::Device)?;
    // SAFETY: memory that stays; the address is one of a window, or it is refused.
    unsafe { device.submit(Stream(0), None, &mut [copy]) }
}

fn copy(device: &dyn Device, address: u64, bytes: &mut [u8], direction: Direction) -> Result<()> {
    let event = begin(device, address, bytes, direction)?;
    device.wait(event, 0)?;
    device.release(event)
}

fn room(len: usize) -> &'static mut [u8] {
    Box::leak((0..len).map(|n| (n % 251) as u8).collect::<Box<[u8]>>())
}

fn status<T>(said: Result<T>) -> Status {
    said.err().map_or(Status::Ok, |error| error.status())
}

/// # Safety
/// Nothing is under way in the window.
unsafe fn put(window: &dyn Window, piece: Piece, at: u64) -> Status {
    // SAFETY: the caller's promise.
    status(unsafe { window.put(piece, at) })
}

fn keeps_the_contract(device: Arc<dyn Device>) {
    let granularity = device.window_granularity().expect("windows");
    let device_ref = &*device;
    assert_eq!(status(device.clone().window(0)), Status::Invalid);
    assert_eq!(status(device.clone().window(u64::MAX)), Status::Limit);
    let window = device.clone().window(3 * granularity + 1).expect("addresses");
    assert_eq!((window.bytes(), window.granularity_bytes()), (4 * granularity, granularity));
    let start = window.address();
    assert_eq!(start % 4096, 0);
    for bytes in [0, 1, granularity + 1] {
        assert_eq!(status(window.create(bytes)), Status::Invalid);
    }
    let (one, two) =
        (window.create(granularity).expect("room"), window.create(2 * granularity).expect("room"));
    let (bytes, back) = (room(300), room(300));
    // SAFETY: each copy has ended before anything is moved.
    unsafe {
        assert_eq!(put(&*window, one, 0), Status::Ok);
        assert_eq!(put(&*window, two, granularity), Status::Ok);
        // Over both, and there again.
        copy(device_ref, start + granularity - 150, bytes, Direction::Scatter)
            .expect("there is memory");
        copy(device_ref, start + granularity - 150, back, Direction::Gather)
            .expect("there is memory");
        assert_eq!(bytes, back);
        let last = start + 3 * granularity;
        for at in [last, last - 150] {
            assert_eq!(
                status(copy(device_ref, at, back, Direction::Gather)),
                Status::Invalid,
                "{at:#x}"
            );
        }
        for (piece, at) in [
            (one, granularity),
            (one, 2 * granularity),
            (one, 5),
            (one, 4 * granularity),
            (two, 3 * granularity),
        ] {
            assert_eq!(put(&*window, piece, at), Status::Invalid, "{piece:?} at {at}");
        }
        // Along, over a part of where it was; then another where that began.
        assert_eq!(put(&*window, two, 2 * granularity), Status::Ok);
        assert_eq!(put(&*window, one, granularity), Status::Ok);
        assert_eq!(status(copy(device_ref, start, back, Direction::Gather)), Status::Invalid);
        copy(device_ref, start + granularity, bytes, Direction::Scatter).expect("there is memory");
        assert_eq!(window.take(one), Ok(()));
        assert_eq!(window.take(one), Ok(()), "already taken");
        assert_eq!(
            status(copy(device_ref, start + granularity, back, Direction::Gather)),
            Status::Invalid
        );
        assert_eq!(window.destroy(one), Ok(()));
        for said in [window.put(one, 0), window.take(one), window.destroy(one)] {
            assert_eq!(status(said), Status::Handle);
        }
    }
    // The window frees the remaining pieces.
}

#[test]
fn devices_with_windows_conform() {
    for granularity_bytes in [4096, 65_536, 2 << 20] {
        let device = simulated(SimulatedOpts { granularity_bytes, ..SimulatedOpts::default() });
        keeps_the_contract(device.clone());
        assert_eq!((device.allocated_bytes(), device.windows()), (0, 0));
    }
    let device = cuda();
    keeps_the_contract(device.clone());
    assert_eq!(device.close(0), Ok(()));
}

#[test]
fn devices_without_windows_are_unsupported() {
    let host: Arc<dyn Device> = Arc::new(Host::default());
    let without: Arc<dyn Device> =
        simulated(SimulatedOpts { granularity_bytes: 0, ..SimulatedOpts::default() });
    for device in [host, without] {
        assert_eq!(status(device.window_granularity()), Status::Unsupported);
        assert_eq!(status(device.window(4096)), Status::Unsupported);
    }
}

#[test]
fn simulated_device_detects_moves_of_memory_in_use() {
    let clock = Clock::manual(1_000);
    let opts =
        SimulatedOpts { memory_bytes: 10_000, granularity_bytes: 4096, ..Default::default() };
    let device = Arc::new(Simulated::new(clock, opts).expect("sound"));
    let window = device.clone().window(4 * 4096).expect("addresses");
    let piece = window.create(8192).expect("room");
    assert_eq!((device.allocated_bytes(), device.free_bytes()), (8192, Some(1808)));
    assert_eq!(status(window.create(4096)), Status::NoMem);
    let (bytes, back) = (room(64), room(64));
    // SAFETY: what is in use is not moved, as this test wants to see.
    unsafe {
        assert_eq!(put(&*window, piece, 0), Status::Ok);
        // Unwritten memory is poison, also if another address was written.
        copy(&*device, window.address() + 8000, back, Direction::Gather).expect("there is memory");
        assert_eq!(back, [POISON; 64]);
        let event =
            begin(&*device, window.address() + 8000, bytes, Direction::Scatter).expect("taken");
        assert_eq!(put(&*window, piece, 8192), Status::Busy);
        assert_eq!(status(window.take(piece)), Status::Busy);
        assert_eq!(status(window.destroy(piece)), Status::Busy);
        device.wait(event, 0).expect("it ends");
        assert_eq!(put(&*window, piece, 8192), Status::Ok);
        copy(&*device, window.address() + 8192 + 8000, back, Direction::Gather).expect("memory");
        assert_eq!(back, [POISON; 64]);
        device.lose();
        assert_eq!(put(&*window, piece, 0), Status::Unavailable);
        assert_eq!(status(window.create(4096)), Status::Unavailable);
        assert_eq!(status(device.clone().window(4096)), Status::Unavailable);
        assert_eq!(window.destroy(piece), Ok(()), "it can be given back all the same");
    }
    drop(window);
    assert_eq!((device.allocated_bytes(), device.windows()), (0, 0));
}
