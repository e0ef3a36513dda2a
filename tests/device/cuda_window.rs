//! Windows of the CUDA device, to which memory is mapped and unmapped, over the fake driver.

use kvtier_testkit::fixtures::fake_cuda;

use std::sync::Arc;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::{Cuda, CudaOpts, CudaWindow};
use kvtier::device::window::{Piece, Window};
use kvtier::device::{Copy, Device, Direction, Memory, Stream};

fn open() -> Result<Arc<Cuda>> {
    let opts = CudaOpts { library: Some(fake_cuda::library()), ..CudaOpts::default() };
    Cuda::open(Clock::real(), &opts).map(Arc::new)
}

/// Copies bytes of this process to or from an address. They stay where they are for ever.
fn copy(cuda: &Cuda, address: u64, bytes: &mut [u8], direction: Direction) -> Result<()> {
    let count = bytes.len() as u64;
    let mut copies = [Copy::bytes(bytes.as_mut_ptr(), address, count, direction, Memory::Device)?];
    // SAFETY: memory that stays; the address is one of a window, or it is refused.
    let event = unsafe { cuda.submit(Stream(0), None, &mut copies)? };
    cuda.wait(event, 0)
}

fn noise(len: usize) -> &'static mut [u8] {
    Box::leak((0..len).map(|n| (n % 249) as u8).collect::<Box<[u8]>>())
}

/// A window of so many grains, and how long one is.
fn window(cuda: &Arc<Cuda>, grains: u64) -> Result<(CudaWindow, u64)> {
    let granularity = cuda.window_granularity()?;
    Ok((CudaWindow::new(cuda.clone(), grains * granularity)?, granularity))
}

/// Memory that is put somewhere at once.
fn map(window: &CudaWindow, at: u64, bytes: u64) -> Result<Piece> {
    let piece = window.create(bytes)?;
    // SAFETY: no copy uses the piece yet.
    unsafe { window.put(piece, at)? };
    Ok(piece)
}

/// Moves memory through a window of four pieces. Returns whether the written bytes are read back.
fn pass(cuda: &Arc<Cuda>) -> Result<bool> {
    let (window, granularity) = window(cuda, 4)?;
    let there = noise(200);
    let (first, second) = (map(&window, 0, granularity)?, map(&window, granularity, granularity)?);
    // A copy that spans both pieces.
    copy(cuda, window.address() + granularity - 100, there, Direction::Scatter)?;
    // SAFETY: the copy has ended.
    unsafe {
        window.put(first, 2 * granularity)?;
        window.put(first, 2 * granularity)?; // no move
        window.put(second, 3 * granularity)?;
    }
    let found = Box::leak(vec![0u8; 200].into_boxed_slice());
    copy(cuda, window.address() + 3 * granularity - 100, found, Direction::Gather)?;
    let right = found == there;
    // SAFETY: as above.
    unsafe {
        window.take(first)?;
        window.take(first)?; // it is nowhere
        window.put(first, granularity)?;
        window.destroy(first)?;
    }
    Ok(right && window.mapped_bytes() == granularity)
}

#[test]
fn window_memory_moves_and_is_freed() {
    let (_turn, fake) = alone(1);
    let before = fake.live();
    let cuda = open().expect("a device");
    assert!(pass(&cuda).expect("it works"));
    drop(cuda);
    assert_eq!(fake.live(), before);
    fake.check();
}

#[test]
fn invalid_window_calls_are_rejected() {
    let (_turn, fake) = alone(2);
    let cuda = open().expect("a device");
    let status = |bytes| CudaWindow::new(cuda.clone(), bytes).err().map(|error| error.status());
    assert_eq!(status(0), Some(Status::Invalid));
    assert_eq!(status(u64::MAX), Some(Status::Limit));
    let (window, granularity) = window(&cuda, 4).expect("addresses");
    assert_eq!((window.bytes(), window.granularity_bytes()), (4 * granularity, granularity));
    let small = CudaWindow::new(cuda.clone(), 1).expect("addresses");
    assert_eq!(small.bytes(), granularity);
    drop(small);
    for bytes in [0, granularity - 1, granularity + 1] {
        assert_eq!(window.create(bytes).expect_err("refused").status(), Status::Invalid);
    }
    let two = map(&window, granularity, 2 * granularity).expect("memory");
    let one = window.create(granularity).expect("memory");
    // SAFETY: nothing is under way.
    unsafe {
        for at in [1, granularity, 2 * granularity, 4 * granularity, u64::MAX - granularity + 1] {
            assert_eq!(window.put(one, at).expect_err("refused").status(), Status::Invalid);
        }
        assert_eq!(
            window.put(two, 3 * granularity).expect_err("too far").status(),
            Status::Invalid
        );
        window.put(two, 0).expect("a part of what it leaves");
        assert_eq!(window.put(one, granularity).expect_err("refused").status(), Status::Invalid);
        window.put(one, 2 * granularity).expect("free");
        window.destroy(one).expect("its own");
        for gone in [one, Piece(77)] {
            assert_eq!(
                window.put(gone, 2 * granularity).expect_err("destroyed").status(),
                Status::Handle
            );
            assert_eq!(window.take(gone).expect_err("destroyed").status(), Status::Handle);
            assert_eq!(window.destroy(gone).expect_err("destroyed").status(), Status::Handle);
        }
    }
    // Addresses without memory are no memory.
    let some = noise(64);
    let none = copy(&cuda, window.address() + 2 * granularity, some, Direction::Scatter);
    assert_eq!(none.expect_err("refused").status(), Status::Invalid);
    let over = copy(&cuda, window.address() + 2 * granularity - 32, some, Direction::Scatter);
    assert_eq!(over.expect_err("refused").status(), Status::Invalid);
    fake.set(12_040, 1, 0, false);
    assert_eq!(window.create(granularity).expect_err("no memory").status(), Status::NoMem);
    fake.check();
}

#[test]
fn every_window_call_may_fail_once() {
    let calls = [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMemCreate",
        "cuMemRelease",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuCtxPushCurrent",
    ];
    for call in calls {
        let (mut met, mut failed) = (0, 0);
        for (nth, code) in (1..8).flat_map(|nth| [1, 2].map(|code| (nth, code))) {
            let (_turn, fake) = alone(nth as u64);
            let before = fake.live();
            fake.fail(call, nth, code);
            let went = open().and_then(|cuda| pass(&cuda));
            met += u32::from(fake.has_failed());
            failed += u32::from(went.is_err());
            assert!(went.unwrap_or(true), "{call}, {nth}, {code}: wrong bytes");
            let leaves = ["cuMemAddressFree", "cuMemRelease", "cuMemUnmap", "cuCtxPushCurrent"];
            if !leaves.contains(&call) {
                fake.check();
                assert_eq!(fake.live(), before, "{call}, {nth}, {code}: something is left");
            }
            let _ = Fake::begin(0);
        }
        let is_end = ["cuMemAddressFree", "cuMemRelease"].contains(&call);
        assert!(met > 0 && (failed > 0 || is_end), "{call}: no failure was reported");
    }
}
