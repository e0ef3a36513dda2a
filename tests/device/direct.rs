//! Direct reads of files into device memory, over the fake driver and a fake cuFile that count
//! wrong calls.

use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::fake_cufile;
use kvtier_testkit::fixtures::stream_rig as rig;

use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::status::{Error, Status};
use kvtier::device::cuda::{Cuda, CudaOpts};
use kvtier::device::simulated::SimulatedOpts;
use kvtier::device::{Device, Memory};
use kvtier::ffi::base::*;
use kvtier::ffi::device::*;
use kvtier::ffi::runtime::*;
use kvtier::ffi::stream::*;
use kvtier::stream::plan::PlanOptions;
use kvtier::stream::streamer::{AcquireOpts, Opts, Verify};

use fake_cuda::{Fake, alone};
use fake_cufile::{FakeFile, library, library_without};
use rig::{Files, MIB, Rig};

const SHORT: i32 = -7;
const ALLOW: i32 = 1;
const FORCE: i32 = 2;
/// Module version and features of a new fake.
const MODULE: (u32, u32) = (2, 24);
const FEATURES: u32 = 15;

/// The kernel's number of the file system that tests have their files on, if they can be read past
/// the page cache there.
fn file_system(files: &Files) -> Option<u64> {
    let found = files.real().descriptor(0);
    if let Err(error) = &found {
        eprintln!("SKIP: {error}");
    }
    found.ok().map(|of| of.file_system)
}

fn device(cufile: PathBuf, file_systems: Vec<u64>) -> Arc<Cuda> {
    let (library, cufile) = (Some(fake_cuda::library()), Some(cufile));
    let opts = CudaOpts { library, cufile, file_systems, ..CudaOpts::default() };
    Arc::new(Cuda::open(Clock::real(), &opts).expect("a device"))
}

/// A streamer that brings most units anew in each pass.
fn opts(files: &Files, device: Arc<dyn Device>) -> Opts {
    let bytes = files.all_bytes();
    let plan_options = PlanOptions {
        host_ceiling_bytes: Some(2 * MIB),
        device_ceiling_bytes: Some(bytes * 3 / 5),
        staging_bytes: 2 * MIB,
        ..rig::plan_options()
    };
    Opts { plan_options, device: Some(device), direct: true, ..Opts::default() }
}

fn pass(rig: &Rig, when_issued: bool) {
    rig.streamer.pass_begin().expect("open");
    let mut under_way = Vec::new();
    for unit in rig.files.order() {
        let held = rig
            .streamer
            .acquire(unit, AcquireOpts { when_issued, ..rig::patiently() })
            .expect("a unit");
        if held.memory == Memory::Host {
            assert!(rig.is_right(&held).expect("no event"), "unit {unit}");
            rig.streamer.release(&held, None).expect("had");
            continue;
        }
        under_way.push(rig.compute_with(&held).expect("begun"));
        if under_way.len() > 1 {
            under_way.remove(0).end().expect("right bytes");
        }
    }
    under_way.iter().for_each(|computing| computing.end().expect("right bytes"));
    drop(under_way);
    rig.streamer.pass_end().expect("open");
}

/// The same without anything that the device does meanwhile: what can be is read directly.
fn quiet_pass(rig: &Rig) {
    rig.pass(rig::patiently()).expect("right bytes");
    for layer in 0..8 {
        for expert in rig.files.experts_of(layer) {
            rig.use_unit(expert, rig::patiently()).expect("right bytes");
        }
    }
}

fn all_is_well(fake: &Fake, file: &FakeFile) {
    file.check();
    assert_eq!(file.live(), 0, "cuFile knows of something still");
    fake.check();
    assert_eq!(fake.live(), 0, "the driver knows of something still");
}

/// Two fifths of a model are read into slots by the device itself while the device computes with
/// earlier units. Bytes are exact.
#[test]
fn direct_reads_fill_device_slots() {
    for (seed, name, sizes) in [
        (1, "whole", rig::dense(6)),
        (2, "large", rig::large(6)),
        (3, "experts", rig::experts(4, 6)),
    ] {
        let (_turn, fake) = alone(seed);
        let file = FakeFile::begin(&fake, &library());
        let files = Files::new(&format!("direct-{name}"), &sizes);
        let Some(system) = file_system(&files) else { return };
        let device = device(library(), vec![system]);
        let how = opts(&files, device.clone());
        let rig = Rig::open(files, how).expect("opened");
        for when_issued in [true, false, true] {
            pass(&rig, when_issued);
            // Without delays all reads are direct, except the end of the file and residents.
            let before = rig.streamer.stats();
            quiet_pass(&rig);
            let stats = rig.streamer.stats();
            assert!(stats.direct_bytes > before.direct_bytes, "{name}: {stats:?}");
            assert_eq!(stats.direct_failed, 0, "{name}");
            assert!(stats.direct_bytes <= stats.read_bytes, "{name}: {stats:?}");
        }
        assert!(file.reads() > 0);
        rig.closed();
        drop((rig, device));
        all_is_well(&fake, &file);
    }
}

/// The device could not read a block that reaches beyond the end of its file.
#[test]
fn unaligned_file_end_is_read_through_host_memory() {
    let (_turn, fake) = alone(10);
    let file = FakeFile::begin(&fake, &library());
    let files = Files::even("direct-end", 4, 300_001);
    let Some(system) = file_system(&files) else { return };
    let device = device(library(), vec![system]);
    let mut how = opts(&files, device.clone());
    let most = files.units.units.iter().map(|unit| unit.image_bytes).max().expect("some");
    how.plan_options.device_ceiling_bytes = Some(2 * most); // two slots, and no homes
    let rig = Rig::open(files, how).expect("opened");
    (0..3).for_each(|_| quiet_pass(&rig));
    let stats = rig.streamer.stats();
    assert!(stats.direct_bytes > 0 && stats.copied_bytes > 0, "{stats:?}");
    assert_eq!(stats.direct_failed, 0, "{stats:?}");
    rig.closed();
    drop((rig, device));
    all_is_well(&fake, &file);
}

/// A streamer that is dropped without close releases everything.
#[test]
fn dropped_streamer_releases_cufile() {
    let (_turn, fake) = alone(4);
    let file = FakeFile::begin(&fake, &library());
    let files = Files::new("direct-dropped", &rig::large(5));
    let Some(system) = file_system(&files) else { return };
    let device = device(library(), vec![system]);
    let how = opts(&files, device.clone());
    let rig = Rig::open(files, how).expect("opened");
    pass(&rig, false);
    drop((rig, device));
    all_is_well(&fake, &file);
}

/// Opens a streamer and says why it could not; what it leaves is nothing.
fn refused(cufile: PathBuf, prepare: impl FnOnce(&Fake, &FakeFile)) -> Error {
    let (_turn, fake) = alone(5);
    let file = FakeFile::begin(&fake, &library());
    prepare(&fake, &file);
    let files = Files::new("direct-refused", &rig::large(5));
    let device = device(cufile, file_system(&files).into_iter().collect());
    let how = opts(&files, device.clone());
    let error = Rig::open(files, how).err().expect("refused");
    drop(device);
    all_is_well(&fake, &file);
    assert_eq!(error.status(), Status::Unavailable, "{error}");
    error
}

#[test]
fn missing_or_old_cufile_is_unavailable_with_reason() {
    let error = refused(PathBuf::from("/nowhere/libcufile.so"), |_, _| {});
    assert!(error.to_string().contains("no cuFile"), "{error}");
    let error = refused(library_without("LESS"), |_, _| {});
    assert!(error.to_string().contains("lacks cuFileRead"), "{error}");
}

/// Settings that allow reads through host memory are rejected, and are left unchanged.
#[test]
fn cufile_compatibility_mode_is_rejected() {
    type Case = (&'static str, fn(&FakeFile));
    let cases: [Case; 10] = [
        ("nvidia-fs is not loaded", |file| file.set((0, 0), FEATURES, 0, 0)),
        ("silent", |file| file.switches(14, true)),
        ("silent", |file| file.switch(FORCE, true)),
        ("POSIX reads", |file| file.switch(12, true)),
        ("POSIX reads", |file| file.switch(13, true)),
        ("unknown mode 0x4", |file| file.set(MODULE, FEATURES, 4, 0)),
        ("unknown mode 0x10", |file| file.set(MODULE, FEATURES, 16, 0)),
        ("cuFileGetParameterBool", |file| file.fail("cuFileGetParameterBool", -1, 5022)),
        ("cuFileDriverGetProperties", |file| file.fail("cuFileDriverGetProperties", 1, 5002)),
        ("permission denied", |file| file.fail("cuFileDriverOpen", 1, 5025)),
    ];
    for (words, prepare) in cases {
        let error = refused(library(), |_, file| prepare(file));
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
}

/// A failed open restores the settings, which other users share.
#[test]
fn failed_open_restores_the_cufile_mode() {
    let (_turn, fake) = alone(6);
    let file = FakeFile::begin(&fake, &library());
    file.set((0, 0), FEATURES, 0, 0);
    let device = device(library(), Vec::new());
    assert_eq!(rig::status(device.direct().map(drop)), Status::Unavailable);
    assert!(file.staged(ALLOW));
    // Without the module an engine has it its own way, and then it is not for reading directly.
    let context = fake.context();
    assert_eq!(file.open_as_engine(&fake, context), 0);
    let error = device.direct().err().expect("the engine allowed it");
    assert!(error.to_string().contains("silent"), "{error}");
    drop(device);
    file.close_as_engine();
    fake.give_context_back();
    all_is_well(&fake, &file);
}

/// A version without switches is used only if its configuration forbids compatibility mode.
#[test]
fn old_cufile_is_used_if_its_settings_forbid_compatibility() {
    let old = library_without("OLD");
    for is_allowed in [true, false] {
        let (_turn, fake) = alone(7);
        let file = FakeFile::begin(&fake, &old);
        file.switch(ALLOW, is_allowed);
        let device = device(old.clone(), Vec::new());
        let said = device.direct().map(|direct| direct.describe());
        match is_allowed {
            true => assert!(said.is_err_and(|error| error.to_string().contains("silent"))),
            false => assert_eq!(
                said.expect("used"),
                "cuFile with nvidia-fs 2.24, compatibility mode off"
            ),
        }
        drop(device);
        all_is_well(&fake, &file);
    }
}

/// A kernel with native support, and a library that fills a larger struct than is known here.
#[test]
fn newer_cufile_versions_are_used() {
    let (_turn, fake) = alone(8);
    let file = FakeFile::begin(&fake, &library());
    file.set((0, 0), FEATURES | 16, 1, 600);
    let device = device(library(), Vec::new());
    let words = device.direct().expect("a way").describe();
    assert_eq!(words, "cuFile 1.13 by PCI P2PDMA, compatibility mode off");
    drop(device);
    all_is_well(&fake, &file);
}

#[test]
fn unregistrable_files_and_memory_are_rejected() {
    let error = refused(library(), |_, file| file.fail("cuFileHandleRegister", 1, 5008));
    assert!(error.to_string().contains("is not supported"), "{error}");
    let error = refused(library(), |_, file| file.fail("cuFileBufRegister", 1, 5016));
    assert!(error.to_string().contains("pinned"), "{error}");
}

#[test]
fn conflicting_direct_options_are_rejected() {
    let files = || Files::new("direct-words", &rig::dense(5));
    let (_turn, fake) = alone(9);
    let file = FakeFile::begin(&fake, &library());
    let Some(system) = file_system(&files()) else { return };
    let device = device(library(), vec![system]);
    let shared: Arc<dyn Device> = device.clone();
    let usual = opts(&files(), shared);
    let buffered =
        kvtier::io::model_files::real::ModelFilesOpts { buffered: true, ..Default::default() };
    let through_cache = {
        let files = files();
        let real = kvtier::io::model_files::real::RealModelFiles::open(&files.paths, &buffered)
            .expect("files");
        Rig::open_on(rig::runtime(""), Arc::new(real), files, usual.clone())
    };
    let simulated: Arc<dyn Device> = rig::device(SimulatedOpts::default());
    let cases = [
        (Rig::open(files(), Opts { verify: Verify::Always, ..usual.clone() }), "host memory"),
        (Rig::open(files(), Opts { direct: true, ..rig::with_host(64 * MIB) }), "need a device"),
        (
            Rig::open(files(), Opts { device: Some(simulated), ..usual.clone() }),
            "has no direct file reads",
        ),
        (through_cache, "page cache"),
    ];
    for (opened, words) in cases {
        let error = opened.err().expect("refused");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    drop((device, usual));
    all_is_well(&fake, &file);
}

/// Every kind of failure of a read.
#[test]
fn failed_direct_reads_are_repeated_through_host_memory() {
    for (seed, (nth, code)) in
        [(1, SHORT), (2, 5), (3, 5011), (5, 5044), (7, SHORT)].into_iter().enumerate()
    {
        let (_turn, fake) = alone(20 + seed as u64);
        let file = FakeFile::begin(&fake, &library());
        let files = Files::new("direct-failing", &rig::large(6));
        let Some(system) = file_system(&files) else { return };
        let device = device(library(), vec![system]);
        file.fail("cuFileRead", nth, code);
        let how = opts(&files, device.clone());
        let rig = Rig::open(files, how).expect("opened");
        (0..3).for_each(|number| pass(&rig, number != 1));
        let stats = rig.streamer.stats();
        assert_eq!(stats.direct_failed, 1, "{nth}, {code}: {stats:?}");
        assert!(stats.direct_bytes > 0, "{nth}, {code}: {stats:?}");
        assert_eq!(stats.failed, 0, "{nth}, {code}: it was not reported");
        rig.closed();
        drop((rig, device));
        all_is_well(&fake, &file);
    }
}

/// After three failures in a row there are no more direct reads, and units are read ahead as
/// without them.
#[test]
fn three_failures_disable_direct_reads() {
    let (_turn, fake) = alone(30);
    let file = FakeFile::begin(&fake, &library());
    let files = Files::new("direct-off", &rig::large(6));
    let Some(system) = file_system(&files) else { return };
    let device = device(library(), vec![system]);
    file.fail("cuFileRead", -1, 5044);
    let how = Opts { readers: 1, ..opts(&files, device.clone()) };
    let rig = Rig::open(files, how).expect("opened");
    (0..3).for_each(|_| pass(&rig, false));
    let stats = rig.streamer.stats();
    assert_eq!((stats.direct_failed, stats.direct_bytes, stats.failed), (3, 0, 0));
    assert_eq!(file.reads(), 0);
    rig.closed();
    drop((rig, device));
    all_is_well(&fake, &file);
}

/// First reads pass through host memory, where checksums are made or compared. Verified units are
/// read directly.
#[test]
fn first_reads_verify_sums_through_host_memory() {
    let (_turn, fake) = alone(31);
    let file = FakeFile::begin(&fake, &library());
    let files = Files::new("direct-sums", &rig::large(6));
    let Some(system) = file_system(&files) else { return };
    let paths = files.paths.clone();
    let sidecar = Some(files.scratch.0.join("sums"));
    let device = device(library(), vec![system]);
    let how = Opts { verify: Verify::First, sidecar, ..opts(&files, device.clone()) };
    let rig = Rig::open(files, how.clone()).expect("opened");
    (0..2).for_each(|_| quiet_pass(&rig));
    assert!(rig.streamer.stats().direct_bytes > 0);
    rig.closed();
    let Rig { streamer, device: again, files, runtime } = rig;
    drop((streamer, again, runtime));
    // One byte of each unit is another, as a disk does it: without a new time, and not at the ends
    // of the file, by which it is known.
    let before = std::fs::metadata(&paths[0]).and_then(|facts| facts.modified()).expect("a time");
    let mut bytes = std::fs::read(&paths[0]).expect("bytes");
    let middle = MIB / 2..bytes.len() as u64 - MIB / 2;
    let spot = |unit: u32| {
        let extent = files.units.units[unit as usize].extents[0];
        Some(extent.offset + extent.bytes / 2).filter(|spot| middle.contains(spot))
    };
    let is_other: Vec<bool> = files.order().into_iter().map(|unit| spot(unit).is_some()).collect();
    files.order().into_iter().filter_map(spot).for_each(|spot| bytes[spot as usize] ^= 1);
    assert!(is_other.iter().filter(|other| **other).count() >= 4, "{is_other:?}");
    std::fs::write(&paths[0], &bytes).expect("written");
    let opened = std::fs::File::options().write(true).open(&paths[0]).expect("a file");
    opened.set_modified(before).expect("its time");
    let rig = Rig::open(files, how).expect("opened");
    rig.streamer.pass_begin().expect("open");
    for (unit, is_other) in rig.files.order().into_iter().zip(is_other) {
        match rig.streamer.acquire(unit, rig::patiently()) {
            Ok(held) if !is_other => rig.streamer.release(&held, None).expect("had"),
            Err(error) if is_other => assert_eq!(error.status(), Status::Corrupt, "{error}"),
            said => panic!("unit {unit}, {is_other}: {said:?}"),
        }
    }
    assert_eq!(rig.streamer.stats().direct_bytes, 0);
    rig.closed();
    drop((rig, device));
    all_is_well(&fake, &file);
}

/// Each cuFile call fails once, early and late: weights are exact, or the open fails with a
/// reason; nothing leaks.
#[test]
fn every_cufile_call_may_fail_once() {
    let calls = [
        "cuFileDriverOpen",
        "cuFileDriverGetProperties",
        "cuFileGetParameterBool",
        "cuFileSetParameterBool",
        "cuFileGetVersion",
        "cuFileHandleRegister",
        "cuFileBufRegister",
        "cuFileBufDeregister",
        "cuFileDriverClose",
    ];
    let (mut went, mut was_refused) = (0, 0);
    for (seed, call) in (40..).zip(calls) {
        for nth in 1..=5 {
            let (_turn, fake) = alone(seed);
            let file = FakeFile::begin(&fake, &library());
            let files = Files::split("direct-any", &rig::large(5), 2);
            let Some(system) = file_system(&files) else { return };
            let device = device(library(), vec![system]);
            file.fail(call, nth, 5030);
            let how = opts(&files, device.clone());
            match Rig::open(files, how) {
                Ok(rig) => {
                    pass(&rig, false);
                    rig.closed();
                    went += 1;
                }
                Err(error) => {
                    assert_eq!(error.status(), Status::Unavailable, "{call} {nth}: {error}");
                    was_refused += 1;
                }
            }
            drop(device);
            all_is_well(&fake, &file);
        }
    }
    assert!(went > 10 && was_refused >= 5, "{went} went, {was_refused} were refused");
}

/// A lost device is an error of the device, not of the read.
#[test]
fn lost_device_is_reported_as_a_device_error() {
    let (_turn, fake) = alone(60);
    let _file = FakeFile::begin(&fake, &library());
    let files = Files::new("direct-lost", &rig::large(4));
    let Some(system) = file_system(&files) else { return };
    let device = device(library(), vec![system]);
    let how = opts(&files, device.clone());
    let rig = Rig::open(files, how).expect("opened");
    pass(&rig, false);
    fake.fail("cuEventQuery", -1, 719);
    fake.fail("cuMemcpyHtoDAsync", -1, 719);
    rig.streamer.pass_begin().expect("open");
    let order = rig.files.order();
    let failed = order.iter().find_map(|&unit| {
        let held = match rig.streamer.acquire(unit, rig::patiently()) {
            Ok(held) => held,
            Err(error) => return Some(error),
        };
        let begun = rig.compute_with(&held);
        begun.and_then(|computing| computing.end()).err()
    });
    assert_eq!(failed.expect("it is lost").status(), Status::Unavailable);
    fake.no_more_failures();
}

/// Calls of the device's own interface.
#[test]
fn invalid_direct_reads_fail_one_call() {
    let (_turn, fake) = alone(70);
    let file = FakeFile::begin(&fake, &library());
    let files = Files::new("direct-alone", &rig::large(5));
    let Some(system) = file_system(&files) else { return };
    let real = files.real();
    let descriptor = real.descriptor(0).expect("direct").number;
    let device = device(library(), vec![system]);
    let direct = device.direct().expect("a way");
    // SAFETY: rejected. How tmpfs and other file systems would be read is unknown.
    let error =
        unsafe { direct.add_file(descriptor, 0x0102_1994) }.expect_err("an unknown file system");
    assert!(error.to_string().contains("neither ext4 nor XFS"), "{error}");
    let memory = device.allocate(2 * MIB).expect("room");
    let from = memory.address;
    let invalid = |said: kvtier::base::status::Result<()>| {
        assert_eq!(rig::status(said), Status::Invalid);
    };
    // SAFETY: the file stays open; no other code uses the device memory.
    unsafe {
        let of = direct.add_file(descriptor, system).expect("known");
        assert_eq!(rig::status(direct.add_file(descriptor, system)), Status::Unavailable);
        invalid(direct.add_memory(from + 256, MIB));
        invalid(direct.add_memory(from, 0));
        invalid(direct.read(of, 0, from, 4096));
        direct.add_memory(from, MIB).expect("known");
        invalid(direct.add_memory(from, MIB));
        for (offset, address, bytes) in [
            (1, from, 4096),
            (0, from + 512, 4096),
            (0, from, 100),
            (0, from + MIB, 4096),
            (0, from + MIB - 4096, 8192),
            (0, from - 4096, 4096),
            (0, from, u64::MAX - 4095),
        ] {
            invalid(direct.read(of, offset, address, bytes));
        }
        direct.read(of, 4096, from + 8192, 8192).expect("right");
        let there = std::slice::from_raw_parts((from + 8192) as *const u8, 8192);
        assert_eq!(there, &files.bytes[0][4096..12288]);
        let end = files.bytes[0].len() as u64 / 4096 * 4096;
        let error = direct.read(of, end, from, 4096).expect_err("the file ends before");
        assert_eq!(error.status(), Status::Io, "{error}");
        direct.remove_memory(from).expect("known");
        assert_eq!(rig::status(direct.remove_memory(from)), Status::Handle);
        invalid(direct.read(of, 0, from, 4096));
        direct.remove_file(of).expect("known");
        assert_eq!(rig::status(direct.remove_file(of)), Status::Handle);
        assert_eq!(rig::status(direct.read(of, 0, from, 4096)), Status::Handle);
        // The remaining files and memory are released with the device.
        direct.add_file(descriptor, system).expect("known");
        direct.add_memory(from, MIB).expect("known");
        device.close(0).expect("idle");
        assert_eq!(rig::status(direct.read(of, 0, from, 4096)), Status::Closed);
    }
    drop(device);
    all_is_well(&fake, &file);
}

/// The C ABI: rejected with a reason, then counted.
#[test]
fn c_abi_supports_direct_reads() {
    let (_turn, fake) = alone(80);
    let file = FakeFile::begin(&fake, &library());
    let files = Files::new("direct-c", &rig::large(5));
    let Some(system) = file_system(&files) else { return };
    let path = files.paths[0].to_str().expect("a name").as_bytes();
    let (driver, cufile) = (fake_cuda::library(), library());
    let name = |path: &PathBuf| {
        let name = path.as_os_str().as_encoded_bytes();
        (name.as_ptr().cast::<std::ffi::c_char>(), name.len() as u64)
    };
    // SAFETY: zero is a value of all that is made so; sizes are said; pointers are to what lives.
    unsafe {
        let (mut runtime, mut model) = (null_mut(), null_mut());
        assert_eq!(kvt_runtime_open(null(), &mut runtime, null_mut()), KVT_OK);
        let text = kvt_str_t { text: path.as_ptr().cast(), bytes: path.len() as u64 };
        let each = size_of::<kvt_str_t>() as u64;
        assert_eq!(kvt_model_open(&text, 1, each, &mut model, null_mut()), KVT_OK);
        let mut how: kvt_device_opts_t = std::mem::zeroed();
        (how.struct_size, how.kind) = (size_of_val(&how) as u64, KVT_DEVICE_KIND_CUDA);
        (how.library, how.library_bytes) = name(&driver);
        (how.cufile, how.cufile_bytes) = name(&cufile);
        let (mut device, mut stream, mut error) = (null_mut(), null_mut(), null_mut());
        assert_eq!(kvt_device_open(runtime, &how, &mut device, null_mut()), KVT_OK);
        let mut terms: kvt_stream_terms_t = std::mem::zeroed();
        terms.struct_size = size_of_val(&terms) as u64;
        terms.flags = KVT_TERMS_KV | KVT_TERMS_DEVICE_SAFETY | KVT_TERMS_HOST_RESERVE;
        terms.device_ceiling_bytes = files.all_bytes() * 3 / 5;
        (terms.host_ceiling_bytes, terms.staging_bytes) = (2 * MIB, 2 * MIB);
        terms.chunk_bytes = MIB;
        let mut opts: kvt_stream_opts_t = std::mem::zeroed();
        (opts.struct_size, opts.flags) = (size_of_val(&opts) as u64, KVT_STREAM_DIRECT);
        (opts.model, opts.terms, opts.device) = (model, &terms, device);
        file.set((0, 0), FEATURES, 0, 0);
        let said = kvt_stream_open(runtime, &opts, &mut stream, &mut error);
        assert_eq!(said, KVT_E_UNAVAILABLE);
        let words = std::ffi::CStr::from_ptr(kvt_error_message(error)).to_string_lossy();
        assert!(words.contains("nvidia-fs is not loaded"), "{words}");
        assert_eq!(kvt_error_free(&mut error), KVT_OK);
        file.set(MODULE, FEATURES, 0, 0);
        let said = kvt_stream_open(runtime, &opts, &mut stream, null_mut());
        if [0xef53, 0x5846_5342].contains(&system) {
            assert_eq!(said, KVT_OK);
            for unit in files.order().into_iter().chain(files.order()) {
                let mut held: kvt_unit_lease_t = std::mem::zeroed();
                held.struct_size = size_of_val(&held) as u64;
                let soon = rig::soon();
                let had = kvt_stream_acquire(stream, unit, 0, soon, &mut held, null_mut());
                assert_eq!(had, KVT_OK);
                assert_eq!(kvt_stream_release(stream, &mut held, 0, null_mut()), KVT_OK);
            }
            let mut stats: kvt_stream_stats_t = std::mem::zeroed();
            stats.struct_size = size_of_val(&stats) as u64;
            assert_eq!(kvt_stream_stats(stream, &mut stats), KVT_OK);
            assert!(stats.direct_bytes > 0 && stats.direct_failed == 0);
            assert_eq!(kvt_stream_close(&mut stream, rig::soon(), null_mut()), KVT_OK);
        } else {
            assert_eq!(said, KVT_E_UNAVAILABLE); // unknown file system
        }
        assert_eq!(kvt_device_close(&mut device, rig::soon(), null_mut()), KVT_OK);
        assert_eq!(kvt_model_close(&mut model), KVT_OK);
        assert_eq!(kvt_runtime_close(&mut runtime, rig::soon(), null_mut(), null_mut()), KVT_OK);
    }
    all_is_well(&fake, &file);
}
