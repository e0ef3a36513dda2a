//! Many small copies and registered host memory on the CUDA device, over the fake driver: every
//! copy method is exact, a failed call falls back or is reported, and everything is freed.

use kvtier_testkit::fixtures::emulated;
use kvtier_testkit::fixtures::fake_cuda;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Event, Memory, Stream};
use kvtier::meta::view::{Place, View};

const NEW: i32 = 12_080;
const OLD: i32 = 12_040;

fn opts(choice: CopyMethodChoice) -> CudaOpts {
    CudaOpts { library: Some(fake_cuda::library()), choice, ..CudaOpts::default() }
}

fn open(choice: CopyMethodChoice) -> Result<Cuda> {
    Cuda::open(Clock::real(), &opts(choice))
}

/// Pages of bytes that stay where they are, for as long as the process does.
fn pages(count: usize) -> &'static mut [u8] {
    let layout = std::alloc::Layout::from_size_align(count * 4096, 4096).expect("sound");
    // SAFETY: memory that only this test uses, zeroed on allocation.
    unsafe {
        let at = std::alloc::alloc_zeroed(layout);
        assert!(!at.is_null());
        std::slice::from_raw_parts_mut(at, layout.size())
    }
}

const CELLS: usize = 24;
const CELL: usize = 6 << 10;
const PAGES: usize = CELLS * CELL / 4096;

/// Cells go to the device in another order, rows of them come back; whether all is right. Where a
/// call fails work may be under way: host memory then stays for ever.
fn shuffle(cuda: &Cuda, registered: bool) -> Result<bool> {
    let (there, back) = (pages(PAGES), pages(PAGES));
    there.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n * 7 % 253) as u8);
    let memory = cuda.allocate((CELLS * CELL) as u64)?;
    let place = |cell: usize| memory.address + ((cell * 7 + 3) % CELLS * CELL) as u64;
    let (from, to) = (there.as_mut_ptr(), back.as_mut_ptr());
    let moved = (|| {
        if registered {
            // SAFETY: memory that stays.
            unsafe {
                cuda.register_host(from, (PAGES * 4096) as u64)?;
                cuda.register_host(to, (PAGES * 4096) as u64)?;
            }
        }
        let mut up = Vec::new();
        for cell in 0..CELLS {
            let host = from.wrapping_add(cell * CELL);
            up.push(Copy::bytes(
                host,
                place(cell),
                CELL as u64,
                Direction::Scatter,
                Memory::Device,
            )?);
        }
        let mut down = Vec::new();
        for cell in 0..CELLS {
            let mut view = View::canonical(place(cell), 12, 256);
            view.token_stride_bytes = 512;
            let plane = to.wrapping_add(cell * CELL);
            let copy = Copy::new(&view, 0, 12, plane, Direction::Gather)?;
            down.push(Copy { memory: Memory::Device, ..copy });
        }
        // SAFETY: memory that stays.
        unsafe {
            let first = cuda.submit(Stream(0), None, &mut up)?;
            let second = cuda.submit(Stream(1), Some(first), &mut down);
            let ended = second.and_then(|event| cuda.wait(event, 0));
            cuda.wait(first, 0).and(ended)
        }
    })();
    let mut gone = Ok(());
    if registered {
        for address in [from, to] {
            // SAFETY: nothing uses it any more, or the device is lost.
            let one = unsafe { cuda.unregister_host(address) };
            let unknown = one.as_ref().is_err_and(|error| error.status() == Status::Handle);
            gone = gone.and(if unknown { Ok(()) } else { one });
        }
    }
    // SAFETY: as above.
    let freed = unsafe { cuda.free(&memory) };
    moved.and(gone).and(freed)?;
    let rows = |cell: usize| {
        (0..12).flat_map(move |row| (0..256).map(move |n| cell * CELL + row * 512 + n))
    };
    let right = (0..CELLS)
        .all(|cell| rows(cell).enumerate().all(|(n, at)| back[cell * CELL + n] == there[at]));
    // SAFETY: taken by `pages`, and all that used it has ended.
    unsafe {
        for memory in [there, back] {
            let layout = std::alloc::Layout::from_size_align(PAGES * 4096, 4096).expect("sound");
            std::alloc::dealloc(memory.as_mut_ptr(), layout);
        }
    }
    Ok(right)
}

const ALL: [CopyMethodChoice; 4] = [
    CopyMethodChoice::Fixed(CopyMethod::Plain),
    CopyMethodChoice::Fixed(CopyMethod::Batch),
    CopyMethodChoice::Fixed(CopyMethod::Kernel),
    CopyMethodChoice::Measured,
];

#[test]
fn every_copy_method_is_exact_with_every_driver() {
    for (seed, choice) in (0..12).flat_map(|seed| ALL.map(|choice| (seed, choice))) {
        let (_turn, fake) = alone(seed);
        let before = fake.live();
        fake.set(if seed % 2 == 0 { NEW } else { OLD }, 1, 1 << 30, false);
        fake.emulate(emulated::launches());
        let cuda = open(choice).expect("a device");
        let launches = fake.calls("cuLaunchKernel");
        let registered = seed % 3 != 0;
        assert!(shuffle(&cuda, registered).expect("it works"), "{choice:?}, seed {seed}");
        if choice != CopyMethodChoice::Measured {
            // A kernel cannot reach memory that is not registered with the device.
            let by_kernel = choice == CopyMethodChoice::Fixed(CopyMethod::Kernel)
                && registered
                && kernels(&cuda);
            assert_eq!(fake.calls("cuLaunchKernel") > launches, by_kernel, "{choice:?}");
        }
        drop(cuda);
        assert_eq!(fake.live(), before, "{choice:?}: something is left");
        fake.check();
    }
}

/// Copies of many pieces each need more lists than their pieces would. Copies without a list use
/// another method, and none fails.
#[test]
fn partly_filled_copy_lists_count_as_used() {
    const COPIES: usize = 40;
    const PIECES: usize = 600;
    const RUN: usize = 64;
    let (_turn, fake) = alone(3);
    fake.set(NEW, 1, 1 << 30, false);
    fake.emulate(emulated::launches());
    let cuda = open(CopyMethodChoice::Fixed(CopyMethod::Kernel)).expect("a device");
    let bytes = COPIES * PIECES * 2 * RUN;
    let (there, back) = (pages(bytes / 4096), pages(bytes / 2 / 4096));
    there.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n / RUN * 7 % 251) as u8);
    let memory = cuda.allocate(bytes as u64).expect("memory");
    let addresses: Vec<u64> =
        (0..COPIES * PIECES).map(|n| memory.address + (n * 2 * RUN) as u64).collect();
    // SAFETY: memory that stays, and is the device's until its events.
    unsafe {
        cuda.register_host(back.as_mut_ptr(), back.len() as u64).expect("registered");
        let (from, to) = (there.as_mut_ptr(), memory.address);
        let up = Copy::bytes(from, to, bytes as u64, Direction::Scatter, Memory::Device);
        let up = cuda.submit(Stream(0), None, &mut [up.expect("sound")]).expect("begun");
        let mut down = Vec::new();
        for (n, addresses) in addresses.chunks(PIECES).enumerate() {
            let place = Place::Pages { addresses, page_tokens: 1, shift_bytes: 0 };
            let view = View { place, ..View::canonical(0, PIECES as u32, RUN as u64) };
            let plane = back.as_mut_ptr().wrapping_add(n * PIECES * RUN);
            let copy = Copy::new(&view, 0, PIECES as u32, plane, Direction::Gather).expect("sound");
            down.push(Copy { memory: Memory::Device, ..copy });
        }
        let down = cuda.submit(Stream(1), Some(up), &mut down).expect("begun");
        cuda.wait(down, 0).expect("completes");
        cuda.unregister_host(back.as_mut_ptr()).expect("registered");
        cuda.free(&memory).expect("its own");
    }
    let right = |(n, run): (usize, &[u8])| run.iter().all(|&byte| byte == (n * 14 % 251) as u8);
    assert!(back.chunks(RUN).enumerate().all(right));
    drop(cuda);
    fake.check();
}

#[test]
fn batched_driver_copies_are_used_if_available() {
    let (_turn, fake) = alone(1);
    fake.set(NEW, 1, 1 << 30, false);
    let cuda = open(CopyMethodChoice::Fixed(CopyMethod::Batch)).expect("a device");
    let (single, batches) = (fake.calls("cuMemcpyHtoDAsync"), fake.calls("cuMemcpyBatchAsync"));
    assert!(shuffle(&cuda, true).expect("it works"));
    assert_eq!(fake.calls("cuMemcpyHtoDAsync"), single, "none went alone");
    assert_eq!(fake.calls("cuMemcpyBatchAsync"), batches + 1);
    // A driver that has it and does not take it: one by one, and right all the same.
    fake.fail("cuMemcpyBatchAsync", 1, 801);
    assert!(shuffle(&cuda, true).expect("it works"));
    assert_eq!(fake.calls("cuMemcpyHtoDAsync"), single + CELLS as i64);
    assert!(shuffle(&cuda, true).expect("it works"));
    assert_eq!(fake.calls("cuMemcpyBatchAsync"), batches + 2, "it is not asked again");
    drop(cuda);
    // Unregistered host memory is not copied in a batch. If the device has other addresses for host
    // memory, no copy is.
    let strange = open(CopyMethodChoice::Fixed(CopyMethod::Batch)).expect("a device");
    assert!(shuffle(&strange, false).expect("it works"));
    drop(strange);
    fake.same_addresses(false);
    let strange = open(CopyMethodChoice::Fixed(CopyMethod::Batch)).expect("a device");
    assert!(shuffle(&strange, true).expect("it works"));
    drop(strange);
    fake.same_addresses(true);
    fake.set(OLD, 1, 1 << 30, false);
    let old = open(CopyMethodChoice::Fixed(CopyMethod::Batch)).expect("a device");
    assert!(shuffle(&old, true).expect("it works"));
    assert_eq!(fake.calls("cuMemcpyBatchAsync"), batches + 2);
    fake.check();
}

#[test]
fn description_has_measured_and_unmeasured_methods() {
    let (_turn, fake) = alone(2);
    fake.set(NEW, 1, 1 << 30, false);
    let cuda = open(CopyMethodChoice::Measured).expect("a device");
    let description = cuda.describe();
    assert_eq!(
        (description.name.as_str(), description.capability, description.version),
        ("fake 0", 80, 12_080)
    );
    if description.not_measured.is_none() {
        let has_kernel = cuda.facts().kernels & Kind::Move.bit() != 0;
        assert_eq!(description.rates.len(), if has_kernel { 12 } else { 8 });
        assert!(description.rates.iter().all(|rate| rate.bytes_per_s > 0));
        for (to_device, chosen) in
            [(true, description.chosen.to_device), (false, description.chosen.from_device)]
        {
            for (cell_bytes, means) in [16 << 10, 64 << 10].into_iter().zip(chosen) {
                let of = description.rates.iter();
                let of =
                    of.filter(|rate| rate.to_device == to_device && rate.cell_bytes == cell_bytes);
                let best = of.max_by_key(|rate| rate.bytes_per_s).expect("measured");
                let rate = description.rates.iter().find(|rate| {
                    rate.method == means
                        && rate.to_device == to_device
                        && rate.cell_bytes == cell_bytes
                });
                assert_eq!(rate.expect("measured").bytes_per_s, best.bytes_per_s);
            }
        }
    }
    assert!(description.to_string().starts_with("fake 0 (8.0, CUDA 12.8)"), "{description}");
    drop(cuda);
    // The device is lost during the measurement: it opens, and later calls report the loss.
    fake.fail("cuMemcpyHtoDAsync", 3, 700);
    let lost = open(CopyMethodChoice::Measured).expect("opened");
    let description = lost.describe();
    assert!(description.to_string().contains("not measured"), "{description}");
    // On a machine that is too busy nothing may have been tried.
    if fake.has_failed() {
        assert_eq!(lost.allocate(1).expect_err("lost").status(), Status::Unavailable);
    }
    drop(lost);
    let _ = Fake::begin(0);
}

#[test]
fn host_memory_is_registered_once_and_unregistered() {
    let (_turn, fake) = alone(3);
    let before = fake.live();
    let cuda = open(CopyMethodChoice::default()).expect("a device");
    let memory = pages(8);
    let at = memory.as_mut_ptr();
    let know = |from: usize, bytes: u64| {
        // SAFETY: memory that stays, or what is refused.
        unsafe { cuda.register_host(at.wrapping_add(from * 4096), bytes) }
    };
    // SAFETY: nothing uses it.
    let forget = |from: usize| unsafe { cuda.unregister_host(at.wrapping_add(from * 4096)) };
    know(2, 2 * 4096).expect("memory");
    for (from, count) in [(2, 2), (1, 2), (3, 1), (3, 4), (0, 8), (2, 1)] {
        let error = know(from, count * 4096).expect_err("it overlaps");
        assert_eq!(error.status(), Status::Invalid, "{error}");
    }
    know(0, 2 * 4096).expect("beside it");
    know(4, 4096).expect("beside it");
    assert_eq!(know(6, 0).expect_err("none").status(), Status::Invalid);
    assert_eq!(know(6, u64::MAX).expect_err("too much").status(), Status::Invalid);
    // SAFETY: it is refused.
    let null = unsafe { cuda.register_host(std::ptr::null_mut(), 4096) };
    assert_eq!(null.expect_err("none").status(), Status::Invalid);
    for unknown in [1, 3, 5] {
        assert_eq!(forget(unknown).expect_err("not its start").status(), Status::Handle);
    }
    forget(2).expect("it was registered");
    assert_eq!(forget(2).expect_err("it was taken back").status(), Status::Handle);
    // A registration by the engine survives the unregistration here.
    let context = fake.own_context(0);
    fake.register(context, at.wrapping_add(5 * 4096), 2 * 4096);
    know(5, 2 * 4096).expect("registered by another");
    assert_eq!(cuda.describe().pageable_bytes, 0);
    forget(5).expect("it was registered");
    fake.unregister(context, at.wrapping_add(5 * 4096));
    // Part of it is the engine's: the rest cannot be had, and that is said.
    fake.register(context, at.wrapping_add(6 * 4096), 4096);
    know(6, 2 * 4096).expect("slow");
    assert_eq!(cuda.describe().pageable_bytes, 2 * 4096);
    forget(6).expect("it was registered");
    fake.unregister(context, at.wrapping_add(6 * 4096));
    drop(cuda); // two ranges are still registered
    assert_eq!(fake.live(), before);
    fake.check();
}

#[test]
fn unregistered_memory_is_counted_and_copied_exactly() {
    for choice in ALL {
        let (_turn, fake) = alone(4);
        fake.set(NEW, 1, 1 << 30, false);
        let before = fake.live();
        let cuda = open(choice).expect("a device");
        fake.lockable(0);
        assert!(shuffle(&cuda, true).expect("it works"), "{choice:?}");
        let memory = pages(3);
        // SAFETY: memory that stays.
        unsafe { cuda.register_host(memory.as_mut_ptr(), 3 * 4096) }.expect("it is no failure");
        let description = cuda.describe();
        assert_eq!(description.pageable_bytes, 3 * 4096);
        assert!(
            description.to_string().contains("12288 bytes of host memory are not registered"),
            "{description}"
        );
        drop(cuda);
        assert_eq!(fake.live(), before);
        fake.check();
    }
}

/// Several threads touch large memory before it is registered.
#[test]
fn large_pools_are_faulted_in_before_registration() {
    let (_turn, fake) = alone(5);
    let cuda = open(CopyMethodChoice::default()).expect("a device");
    let bytes = 200 << 20;
    // SAFETY: a mapping that only this test uses, inspected and unmapped below.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        assert!(at != libc::MAP_FAILED);
        cuda.register_host(at.cast(), bytes as u64).expect("memory");
        let mut there = vec![0u8; bytes / 4096];
        assert_eq!(libc::mincore(at, bytes, there.as_mut_ptr()), 0);
        assert!(there.iter().all(|page| page & 1 == 1), "some pages are not there");
        cuda.unregister_host(at.cast()).expect("it was registered");
        libc::munmap(at, bytes);
    }
    fake.check();
}

/// Every call of the copy methods fails once, early and late: nothing hangs or leaks, and what is
/// reported as done is done.
#[test]
fn every_copy_call_may_fail_once() {
    let calls = [
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuMemHostGetDevicePointer",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemcpyBatchAsync",
        "cuMemcpy2DAsync",
        "cuGetProcAddress",
        "cuModuleLoadDataEx",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuEventRecord",
        "cuEventQuery",
        "cuMemAlloc",
        "cuMemcpyHtoDAsync",
        "cuCtxPushCurrent",
    ];
    for call in calls {
        let (mut met, mut seen) = (0, 0);
        let cases = ALL.into_iter().flat_map(|choice| {
            // A measurement takes its time.
            let all = choice != CopyMethodChoice::Measured;
            let nths: &[i64] = if all { &[1, 2, 3, 20] } else { &[1, 7] };
            let codes: &[i32] = if all { &[1, 2, 700] } else { &[2, 700] };
            nths.iter().flat_map(move |nth| codes.iter().map(move |code| (choice, *nth, *code)))
        });
        for (choice, nth, code) in cases {
            let (_turn, fake) = alone(nth as u64);
            fake.set(NEW, 1, 1 << 30, false);
            let before = fake.live();
            fake.fail(call, nth, code);
            let went = open(choice).and_then(|cuda| shuffle(&cuda, true));
            met += u32::from(fake.has_failed());
            seen += u32::from(fake.has_failed() && went.is_err());
            assert!(
                went.as_ref().map_or(true, |right| *right),
                "{call}, {nth}, {code}: wrong bytes"
            );
            fake.check();
            let gives_back = ["cuMemFreeHost", "cuMemHostUnregister", "cuCtxPushCurrent"];
            assert!(
                code == 700 || gives_back.contains(&call) || fake.live() == before,
                "{call}, {nth}, {code}, {choice:?}: {} are left: {went:?}",
                fake.live() - before
            );
            let _ = Fake::begin(0);
        }
        let is_kernel = call.starts_with("cuModule") || call == "cuLaunchKernel";
        assert!(met > 0 || is_kernel, "{call} was never made");
        assert!(
            seen > 0 || is_kernel || call == "cuGetProcAddress" || call == "cuMemFreeHost",
            "{call}: no failure was reported"
        );
    }
}

fn kernels(cuda: &Cuda) -> bool {
    cuda.facts().kernels & Kind::Move.bit() != 0
}

/// A call that moves one piece, and the piece as it is to lie in its table.
fn piece(memory: &DeviceMemory) -> (Call, Vec<u8>) {
    let from = memory.address;
    let words: [u64; 5] = [from, from + 2048, 0, 0, 64 | 1 << 32];
    let call = Call {
        kind: Kind::Move as u32,
        table: from + 8192,
        count: 1,
        scratch: from + 4096,
        scratch_bytes: 16,
        ..Call::default()
    };
    (call, words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// A call that sums a page.
fn sum(memory: &DeviceMemory) -> Call {
    Call {
        kind: Kind::Sum as u32,
        table: memory.address,
        count: 1,
        out: memory.address + 64,
        scratch: memory.address + 128,
        scratch_bytes: 24,
        ..Call::default()
    }
}

/// A report loads all modules; each has its source and purpose.
#[test]
fn kernel_modules_are_reported_one_by_one() {
    let all = Kind::ALL.iter().fold(0, |set, kind| set | kind.bit());
    // Each source in turn, and all of them.
    for nth in [1, 4, 7, 10, -1] {
        let (_turn, fake) = alone(9);
        let cuda = open(CopyMethodChoice::default()).expect("a device");
        if !kernels(&cuda) {
            continue;
        }
        cuda.load_kernels().expect("a context");
        assert!(cuda.describe().no_kernels.is_empty() && cuda.facts().kernels == all);
        let loads = fake.calls("cuModuleLoadDataEx");
        cuda.load_kernels().expect("a context");
        assert_eq!(fake.calls("cuModuleLoadDataEx"), loads, "once each");
        drop(cuda);
        let cuda = open(CopyMethodChoice::default()).expect("a device");
        // A module may have been loaded already when the device was opened.
        fake.fail("cuModuleLoadDataEx", nth, 218);
        cuda.load_kernels().expect("a context");
        let (said, has) = (cuda.describe().no_kernels, cuda.facts().kernels);
        match nth {
            -1 => assert!(said.len() > 8 && has & !Kind::Move.bit() == 0, "{said:?}"),
            _ => {
                assert_eq!(said.len(), 1, "{said:?}");
                for kind in Kind::ALL {
                    let is_named = said[0].contains(&format!("{kind:?}"));
                    assert_eq!(is_named, has & kind.bit() == 0, "{kind:?}: {said:?}");
                }
            }
        }
        drop(cuda);
        fake.check();
        let _ = Fake::begin(0);
    }
}

/// Kernels for latent rows use 161 KB of shared memory, or 83 KB where the device has less.
#[test]
fn kernels_stay_within_shared_memory() {
    for (kilobytes, sees) in [(227, true), (163, true), (99, true), (48, false)] {
        let (_turn, fake) = alone(10);
        fake.block_shared(kilobytes << 10);
        let cuda = open(CopyMethodChoice::default()).expect("a device");
        if !kernels(&cuda) {
            continue;
        }
        let memory = cuda.allocate(1 << 20).expect("memory");
        let at = memory.address;
        let call = Call {
            kind: Kind::Prefill as u32,
            dtype: 3,
            other_dtype: 3,
            queries: at,
            query_stride: 1152,
            query_head_stride: 1152,
            keys: at,
            values: at,
            key_stride: 1152,
            value_stride: 1152,
            out: at + (1 << 19),
            out_stride: 1024,
            out_head_stride: 1024,
            query_count: 40,
            query_heads: 1,
            key_heads: 1,
            key_dim: 576,
            value_dim: 512,
            tokens: 40,
            ..Call::default()
        };
        // The driver looks at what is asked for: more than there is, it refuses.
        match launch(&cuda, None, &[call]) {
            Ok(event) => {
                assert!(sees, "{kilobytes}");
                cuda.wait(event, 0).expect("completes");
            }
            Err(error) => {
                assert!(!sees && error.status() == Status::Unsupported, "{kilobytes}: {error}");
                assert!(
                    error.to_string().contains("bytes of shared memory, the device has 49152"),
                    "{error}"
                );
            }
        }
        drop(cuda);
        fake.check();
        let _ = Fake::begin(0);
    }
}

fn launch(cuda: &Cuda, after: Option<Event>, calls: &[Call]) -> Result<Event> {
    // SAFETY: device memory that lives until the test ends, or calls that are rejected.
    unsafe { cuda.launch(Stream(0), after, calls) }
}

#[test]
fn kernels_launch_in_order_and_reject_invalid_calls() {
    let (_turn, fake) = alone(6);
    fake.emulate(emulated::launches());
    fake.set(NEW, 2, 1 << 30, false);
    let before = fake.live();
    let cuda = open(CopyMethodChoice::default()).expect("a device");
    let strange = Call { kind: 999, ..Call::default() };
    assert_eq!(launch(&cuda, None, &[strange]).expect_err("none").status(), Status::Unsupported);
    // SAFETY: it is refused.
    let refused = unsafe { cuda.launch(Stream(64), None, &[]) };
    assert_eq!(refused.expect_err("no stream").status(), Status::Invalid);
    let memory = cuda.allocate(1 << 16).expect("memory");
    let other = fake.memory(fake.own_context(1), 4096);
    if kernels(&cuda) {
        let host = pages(1);
        let address = host.as_mut_ptr().expose_provenance() as u64;
        let refuse = |call: Call, word: &str| {
            let error = launch(&cuda, None, &[call]).expect_err("refused");
            assert!(
                error.status() == Status::Invalid && error.to_string().contains(word),
                "{error}"
            );
        };
        let (good, list) = piece(&memory);
        refuse(Call { table: other, ..good }, "is on device 1");
        refuse(Call { scratch: address, ..good }, "knows no memory");
        // A piece, written by the processor, read by the kernel when the copy has come.
        host[..40].copy_from_slice(&list);
        let mut seen = [0u8; 64];
        let content = pages(1);
        content.iter_mut().enumerate().for_each(|(n, byte)| *byte = n as u8);
        let bytes = |host: *mut u8, at: u64, count: u64, direction| {
            Copy::bytes(host, at, count, direction, Memory::Device).expect("sound")
        };
        let mut up = [
            bytes(host.as_mut_ptr(), good.table, 40, Direction::Scatter),
            bytes(content.as_mut_ptr(), memory.address, 64, Direction::Scatter),
        ];
        // SAFETY: the memory lives until all batches have ended.
        unsafe {
            let up = cuda.submit(Stream(1), None, &mut up).expect("taken");
            let moved = launch(&cuda, Some(up), &[good]).expect("taken");
            let mut down = [bytes(seen.as_mut_ptr(), memory.address + 2048, 64, Direction::Gather)];
            let down = cuda.submit(Stream(2), Some(moved), &mut down).expect("taken");
            cuda.wait(down, 0).expect("completes");
        }
        assert_eq!(&seen[..], &content[..64]);
    }
    fake.end_memory(fake.own_context(1), other);
    drop(cuda);
    assert_eq!(fake.live(), before);
    fake.check();
}

#[test]
fn other_architectures_compile_from_ptx() {
    for (capability, fails, images) in [(9, false, 1), (9, true, 2), (8, false, 1), (10, false, 1)]
    {
        let (_turn, fake) = alone(8);
        fake.capability(capability);
        let cuda = open(CopyMethodChoice::default()).expect("a device");
        if !kernels(&cuda) {
            continue;
        }
        let memory = cuda.allocate(1 << 16).expect("memory");
        let (list, loads) = (pages(1), fake.calls("cuModuleLoadDataEx"));
        if fails {
            fake.fail("cuModuleLoadDataEx", 1, 209);
        }
        let (call, words) = piece(&memory);
        list[..40].copy_from_slice(&words);
        let mut up =
            [Copy::bytes(list.as_mut_ptr(), call.table, 40, Direction::Scatter, Memory::Device)
                .expect("sound")];
        // SAFETY: the memory lives until all batches have ended.
        let mut last = Some(unsafe { cuda.submit(Stream(1), None, &mut up) }.expect("taken"));
        for _ in 0..2 {
            last = Some(launch(&cuda, last, &[call]).expect("taken"));
        }
        cuda.wait(last.expect("some"), 0).expect("completes");
        assert_eq!(fake.calls("cuModuleLoadDataEx") - loads, images, "once each");
        drop(cuda);
        fake.check();
        let _ = Fake::begin(0);
    }
}

#[test]
fn failed_kernel_load_has_a_reason_and_copies_continue() {
    let (_turn, fake) = alone(7);
    fake.set(NEW, 1, 1 << 30, false);
    let cuda = open(CopyMethodChoice::default()).expect("a device");
    if kernels(&cuda) {
        let memory = cuda.allocate(1 << 16).expect("memory");
        let (call, _) = piece(&memory);
        fake.fail("cuModuleLoadDataEx", 1, 218);
        for _ in 0..2 {
            let error = launch(&cuda, None, &[call]).expect_err("it does not load");
            assert_eq!(error.status(), Status::Unavailable);
            assert!(error.to_string().contains("the fake compiler does not like it"), "{error}");
        }
        let words = cuda.describe().to_string();
        assert!(words.contains("; no kernels of move ([Move]): cuModuleLoadDataEx"), "{words}");
        // The others of the device are as they were.
        let all = Kind::ALL.iter().fold(0, |set, kind| set | kind.bit());
        assert_eq!(cuda.facts().kernels, all & !Kind::Move.bit());
        let event = launch(&cuda, None, &[sum(&memory)]).expect("it loads");
        cuda.wait(event, 0).expect("completes");
    }
    assert!(shuffle(&cuda, true).expect("copies go on"));
    drop(cuda);
    fake.check();
    let _ = Fake::begin(0);
}
