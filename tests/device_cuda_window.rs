//! Addresses of a CUDA device that get memory and lose it again, over a driver without a device.

#![cfg(not(feature = "shuttle"))]

#[path = "support/fake_cuda.rs"]
mod fake_cuda;

use std::sync::Arc;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::{Cuda, CudaOpts, Window};
use kvtier::device::{Copy, Device, Memory, Stream, Way};

fn open() -> Result<Arc<Cuda>> {
    let opts = CudaOpts { library: Some(fake_cuda::library()), ..CudaOpts::default() };
    Cuda::open(Clock::real(), &opts).map(Arc::new)
}

/// Copies bytes of this process to or from an address. They stay where they are for ever.
fn copy(cuda: &Cuda, address: u64, bytes: &mut [u8], way: Way) -> Result<()> {
    let count = bytes.len() as u64;
    let mut copies = [Copy::bytes(bytes.as_mut_ptr(), address, count, way, Memory::Device)?];
    // SAFETY: memory that stays; the address is one of a window, or it is refused.
    let event = unsafe { cuda.submit(Stream(0), None, &mut copies)? };
    cuda.wait(event, 0)
}

fn noise(len: usize) -> &'static mut [u8] {
    Box::leak((0..len).map(|n| (n % 249) as u8).collect::<Box<[u8]>>())
}

/// Memory goes through a window of four pieces; whether what was written is found again.
fn pass(cuda: &Arc<Cuda>) -> Result<bool> {
    let grain = Window::new(cuda.clone(), 1)?.grain_bytes();
    let window = Window::new(cuda.clone(), 4 * grain)?;
    let there = noise(200);
    window.map(0, grain)?;
    window.map(grain, grain)?;
    // A copy that goes over both pieces.
    copy(cuda, window.address() + grain - 100, there, Way::Scatter)?;
    // SAFETY: the copy has ended.
    unsafe {
        window.shift(0, 2 * grain)?;
        window.shift(grain, 3 * grain)?;
    }
    let found = Box::leak(vec![0u8; 200].into_boxed_slice());
    copy(cuda, window.address() + 3 * grain - 100, found, Way::Gather)?;
    let right = found == there;
    // SAFETY: as above.
    unsafe { window.unmap(2 * grain)? };
    Ok(right && window.mapped_bytes() == grain)
}

#[test]
fn memory_moves_along_and_all_is_given_back() {
    let (_turn, fake) = alone(1);
    let before = fake.live();
    let cuda = open().expect("a device");
    assert!(pass(&cuda).expect("it works"));
    drop(cuda);
    assert_eq!(fake.live(), before);
    fake.check();
}

#[test]
fn what_cannot_be_is_refused() {
    let (_turn, fake) = alone(2);
    let cuda = open().expect("a device");
    assert_eq!(Window::new(cuda.clone(), 0).err().expect("none").status(), Status::Invalid);
    assert_eq!(Window::new(cuda.clone(), u64::MAX).err().expect("none").status(), Status::Limit);
    let window = Window::new(cuda.clone(), 1).expect("addresses");
    let grain = window.grain_bytes();
    assert_eq!(window.bytes(), grain);
    drop(window);
    let window = Window::new(cuda.clone(), 4 * grain).expect("addresses");
    window.map(grain, 2 * grain).expect("memory");
    for (at, bytes) in [
        (0, 0),
        (0, grain - 1),
        (1, grain),
        (grain, grain),
        (2 * grain, grain),
        (0, 2 * grain),
        (0, 4 * grain),
        (3 * grain, 2 * grain),
        (u64::MAX - grain + 1, grain),
    ] {
        let error = window.map(at, bytes).expect_err("refused");
        assert_eq!(error.status(), Status::Invalid, "{at}, {bytes}: {error}");
    }
    // SAFETY: nothing is under way.
    unsafe {
        for at in [0, 2 * grain, 3 * grain] {
            assert_eq!(window.unmap(at).expect_err("refused").status(), Status::Invalid);
            assert_eq!(window.shift(at, 0).expect_err("refused").status(), Status::Invalid);
        }
        assert_eq!(window.shift(grain, 3 * grain).expect_err("too far").status(), Status::Invalid);
        window.shift(grain, 0).expect("what it leaves is free");
    }
    // Addresses without memory are no memory.
    let some = noise(64);
    let none = copy(&cuda, window.address() + 2 * grain, some, Way::Scatter);
    assert_eq!(none.expect_err("refused").status(), Status::Invalid);
    let over = copy(&cuda, window.address() + 2 * grain - 32, some, Way::Scatter);
    assert_eq!(over.expect_err("refused").status(), Status::Invalid);
    fake.set(12_040, 1, 0, false);
    assert_eq!(window.map(3 * grain, grain).expect_err("no memory").status(), Status::NoMem);
    fake.check();
}

#[test]
fn any_call_may_fail() {
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
        let (mut met, mut told) = (0, 0);
        for (nth, code) in (1..8).flat_map(|nth| [1, 2].map(|code| (nth, code))) {
            let (_turn, fake) = alone(nth as u64);
            let before = fake.live();
            fake.fail(call, nth, code);
            let went = open().and_then(|cuda| pass(&cuda));
            met += u32::from(fake.has_failed());
            told += u32::from(went.is_err());
            assert!(went.unwrap_or(true), "{call}, {nth}, {code}: wrong bytes");
            let leaves = ["cuMemAddressFree", "cuMemRelease", "cuMemUnmap", "cuCtxPushCurrent"];
            if !leaves.contains(&call) {
                fake.check();
                assert_eq!(fake.live(), before, "{call}, {nth}, {code}: something is left");
            }
            let _ = Fake::begin(0);
        }
        let is_end = ["cuMemAddressFree", "cuMemRelease"].contains(&call);
        assert!(met > 0 && (told > 0 || is_end), "{call}: no failure was told");
    }
}
