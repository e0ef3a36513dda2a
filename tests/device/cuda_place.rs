//! Weights in place on CUDA, over the fake driver. Every call that maps memory fails once, early
//! and late: only the caller of that unit sees the failure, addresses never change, and nothing
//! leaks.

use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::stream_rig as rig;

use std::sync::Arc;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::Device;
use kvtier::device::cuda::{Cuda, CudaOpts};
use kvtier::stream::plan::PlanOptions;
use kvtier::stream::streamer::{AcquireOpts, Opts};
use rig::{Files, MIB, Rig, patiently, status};

/// Granularity of the fake's memory mappings.
const GRANULARITY: u64 = 64 << 10;
/// The driver's words for "no memory" and for an argument that it does not like.
const CODES: [i32; 2] = [2, 1];
const LAYERS: u32 = 6;

fn open() -> Result<Arc<Cuda>> {
    let opts = CudaOpts { library: Some(fake_cuda::library()), ..CudaOpts::default() };
    Cuda::open(Clock::real(), &opts).map(Arc::new)
}

/// Six layers of two pieces each, of which `residencies` have a home beside two slots.
fn stream(name: &str, device: &Arc<Cuda>, residencies: u64) -> Result<Rig> {
    let files = Files::even(name, LAYERS, 2 * GRANULARITY - 4096);
    let plan_options = PlanOptions {
        host_ceiling_bytes: Some(2 * MIB),
        device_ceiling_bytes: Some((2 + residencies) * 2 * GRANULARITY),
        staging_bytes: 2 * MIB,
        shrinks: true,
        ..rig::plan_options()
    };
    let shared: Arc<dyn Device> = device.clone();
    Rig::open(files, Opts { plan_options, in_place: true, device: Some(shared), ..Opts::default() })
}

fn addresses(rig: &Rig) -> Vec<u64> {
    (0..LAYERS).map(|unit| rig.streamer.fixed(unit).expect("in place").0).collect()
}

/// Two passes, between them all homes leave and come back. What went wrong.
fn passes(rig: &Rig) -> Vec<Status> {
    let mut statuses = Vec::new();
    let full = rig.streamer.plan().device_bytes;
    for bytes in [full, 4 * GRANULARITY, full] {
        let moved = status(rig.streamer.rebalance(None, Some(bytes), None));
        assert_eq!(moved, Status::Ok);
        for unit in 0..LAYERS {
            let at = rig.streamer.fixed(unit).expect("in place").0;
            let how = AcquireOpts { when_issued: unit % 2 == 0, ..patiently() };
            let computed = rig.compute(unit, how).and_then(|computing| computing.end());
            statuses.push(status(computed));
            assert_eq!(rig.streamer.fixed(unit).expect("in place").0, at);
        }
    }
    statuses
}

#[test]
fn in_place_weights_keep_their_addresses() {
    for residencies in [0, 2, 4] {
        let (_turn, fake) = alone(residencies + 5);
        let before = fake.live();
        let device = open().expect("a device");
        let rig = stream(&format!("place-{residencies}"), &device, residencies).expect("opened");
        let at = addresses(&rig);
        assert!(at.windows(2).all(|pair| pair[0] + 2 * GRANULARITY == pair[1]), "{at:?}");
        for _ in 0..3 {
            assert!(passes(&rig).iter().all(|status| *status == Status::Ok));
        }
        assert_eq!(addresses(&rig), at);
        rig.closed();
        drop(rig);
        assert_eq!(device.close(0), Ok(()));
        drop(device);
        assert_eq!(fake.live(), before, "{residencies} homes");
        fake.check();
    }
}

#[test]
fn every_mapping_call_may_fail_once() {
    for call in [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
    ] {
        let (mut met, mut failed) = (0, 0);
        for (nth, code) in [1, 2, 3, 5, 8, 13, 21].into_iter().flat_map(|n| CODES.map(|c| (n, c))) {
            let (_turn, fake) = alone(nth as u64);
            let before = fake.live();
            let device = open().expect("a device");
            fake.fail(call, nth, code);
            let opened = stream("place-fails", &device, 3);
            if let Ok(rig) = &opened {
                let at = addresses(rig);
                let went = passes(rig);
                let fine = [Status::Ok, Status::NoMem, Status::Invalid, Status::Io];
                assert!(went.iter().all(|status| fine.contains(status)), "{call}, {nth}: {went:?}");
                failed += went.iter().filter(|status| **status != Status::Ok).count();
                // Failures end here: every failed unit is retried and succeeds.
                if call != "cuMemAddressFree" {
                    fake.no_more_failures();
                }
                for unit in 0..LAYERS {
                    rig.insist(unit, patiently(), &fine);
                }
                assert_eq!(addresses(rig), at, "{call}, {nth}");
                rig.closed();
            } else {
                failed += 1;
            }
            met += u32::from(fake.has_failed());
            fake.no_more_failures();
            drop(opened);
            assert_eq!(device.close(0), Ok(()));
            drop(device);
            // Only memory that the driver failed to free may remain.
            if !["cuMemAddressFree", "cuMemRelease", "cuMemUnmap"].contains(&call) {
                fake.check();
                assert_eq!(fake.live(), before, "{call}, {nth}, {code}: something is left");
            }
            let _ = Fake::begin(0);
        }
        assert!(met > 0, "{call} was never called so often");
        let is_quiet = ["cuMemAddressFree", "cuMemRelease"].contains(&call);
        assert!(failed > 0 || is_quiet, "{call}: no failure was reported");
    }
}

/// After an invalid address CUDA fails every call of the process: all callers get the error, and
/// all work ends.
#[test]
fn lost_device_ends_all_in_place_work() {
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyHtoDAsync"] {
        let mut failed = 0;
        for nth in [2, 6, 9] {
            let (_turn, fake) = alone(nth as u64);
            let device = open().expect("a device");
            fake.fail(call, nth, 700);
            match stream("place-lost", &device, 3) {
                Ok(rig) => {
                    let at = addresses(&rig);
                    let mut went = Vec::new();
                    for unit in (0..LAYERS).chain(0..LAYERS) {
                        let computed = rig.compute(unit, patiently());
                        went.push(status(computed.and_then(|computing| computing.end())));
                    }
                    // Only the first caller of a failed unit gets the cause, later ones `Io`.
                    let fine = [Status::Ok, Status::Unavailable, Status::Io];
                    assert!(went.iter().all(|one| fine.contains(one)), "{call}, {nth}: {went:?}");
                    failed += u32::from(went.contains(&Status::Unavailable));
                    assert_eq!(addresses(&rig), at);
                    rig.closed();
                }
                Err(error) => {
                    assert_eq!(error.status(), Status::Unavailable, "{call}, {nth}: {error}");
                    failed += 1;
                }
            }
            drop(device.close(0));
        }
        assert!(failed > 0, "{call}: no loss was reported");
    }
}

#[test]
fn driver_without_virtual_memory_is_unsupported() {
    let (_turn, fake) = alone(3);
    let device = open().expect("a device");
    // It fails whenever it is asked.
    fake.fail("cuMemGetAllocationGranularity", -1, 801);
    let error = stream("place-old", &device, 0).err().expect("refused");
    assert!(error.message().contains("units in place"), "{error}");
    fake.no_more_failures();
    assert_eq!(device.close(0), Ok(()));
}
