//! Memory of offloads on devices: where it is allocated, which account pays, and which options are
//! rejected.

use kvtier::base::budget::Tier;
use kvtier::base::clock::Clock;
use kvtier::base::op::OpOpts;
use kvtier::base::runtime::Runtime;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Device, Memory};
use kvtier::offload::{LentMemory, Offload, Opts, Policies, RingPlacement};
use kvtier::sparse::Kind;
use kvtier::store::handle::Store;
use kvtier::store::state::session::LayerViews;

use kvtier_testkit::fixtures::{offload, store as support};

use super::on_device::{self, DeviceBuffer};
use super::{PlaneShape, plane, policy, shape};

/// A store with a session, and the arguments to open an offload of it.
struct Base {
    session: u32,
    store: Arc<Store>,
    _runtime: Runtime,
}

impl Base {
    fn open(device: Arc<dyn Device>) -> Base {
        let runtime = support::runtime();
        let budget = support::budget(&runtime, &[(Tier::Device, 1 << 20)]);
        let spec = support::spec_of("store(host=4MiB)");
        let store = Store::open_with(runtime.core(), Some(&budget), &spec, device);
        let store = Arc::new(store.expect("opened"));
        let session = offload::open_session(&store, &shape(Kind::Split), 9);
        let tokens: Vec<u32> = (0..64).collect();
        store.with(|core| core.append(session, &tokens)).expect("room");
        Base { session, store, _runtime: runtime }
    }

    fn opts(&self, placement: RingPlacement) -> Opts {
        let shape = shape(Kind::Split);
        let decode = policy("quest(budget=32)", &shape);
        let policies = Policies { prefill: None, decode };
        Opts { placement, policies, ..offload::opts(self.session, &shape, 64) }
    }

    fn status(&self, placement: RingPlacement) -> Status {
        match Offload::open(&self.store, self.opts(placement)) {
            Ok(_) => Status::Ok,
            Err(error) => {
                assert!(error.to_string().len() > 20, "{error}");
                error.status()
            }
        }
    }

    fn held(&self, tier: Tier) -> u64 {
        self.store.account().expect("one").held(tier).committed_bytes
    }
}

/// The account is charged in the tier of the memory, but not for memory that the engine lends.
#[test]
fn ring_memory_is_charged_to_its_tier_unless_lent() {
    for device in [on_device::simulated(1) as Arc<dyn Device>, on_device::cuda()] {
        let base = Base::open(device.clone());
        let bytes =
            Offload::memory_bytes(&base.store, &base.opts(RingPlacement::Device)).expect("sound");
        // Two buffers of 80 rows, and two tails of 16 for each of three layers, of 112 bytes.
        assert_eq!(bytes, (2 * 80 + 6 * 16) * 112);
        let before = (base.held(Tier::Host), base.held(Tier::Device));
        let there = Offload::open(&base.store, base.opts(RingPlacement::Device)).expect("room");
        assert_eq!(base.held(Tier::Device), before.1 + bytes);
        assert_eq!(base.held(Tier::Host), before.0);
        drop(there);
        let here = Offload::open(&base.store, base.opts(RingPlacement::Host)).expect("room");
        assert!(base.held(Tier::Host) >= before.0 + bytes);
        drop(here);
        let lent = DeviceBuffer::new(&device, bytes + 256);
        let lend = |address: u64, bytes: u64| {
            // SAFETY: the memory belongs to the device, or is rejected before it is touched.
            RingPlacement::Lent(unsafe { LentMemory::new(address, bytes) })
        };
        let own = Offload::open(&base.store, base.opts(lend(lent.address(), bytes)));
        assert_eq!(base.held(Tier::Device), before.1);
        drop(own.expect("enough"));
        assert_eq!(base.status(lend(lent.address(), bytes - 1)), Status::TooSmall);
        assert_eq!(base.status(lend(lent.address() + 64, bytes)), Status::Invalid);
        assert_eq!(base.status(lend(lent.address() + 256, u64::MAX - 512)), Status::Invalid);
        assert_eq!((base.held(Tier::Host), base.held(Tier::Device)), before);
        drop(lent);
    }
    // A driver knows whose memory an address belongs to.
    let base = Base::open(on_device::cuda());
    let mut host = vec![0u64; 1 << 13];
    let address = (host.as_mut_ptr() as u64).next_multiple_of(256);
    // SAFETY: the memory is rejected before it is touched.
    let wrong = RingPlacement::Lent(unsafe { LentMemory::new(address, 60_000) });
    assert_eq!(base.status(wrong), Status::Invalid);
    // More memory than the account may have.
    let mut opts = base.opts(RingPlacement::Device);
    opts.buffers = 256;
    let refused = Offload::open(&base.store, opts).map(|_| ()).map_err(|error| error.status());
    assert_eq!(refused, Err(Status::Budget));
}

#[test]
fn unsupported_device_is_rejected_at_open_or_put() {
    let base = Base::open(Arc::new(kvtier::device::host::Host::default()));
    assert_eq!(base.status(RingPlacement::Device), Status::Unavailable);
    // SAFETY: the memory is rejected before it is touched.
    let lent = RingPlacement::Lent(unsafe { LentMemory::new(1 << 20, 1 << 20) });
    assert_eq!(base.status(lent), Status::Unavailable);
    let mut offload = Offload::open(&base.store, base.opts(RingPlacement::Host)).expect("room");
    let numbers = [1.0; 256];
    let (k, v) = (
        plane(&numbers, 16, 2, 8, PlaneShape::Plain),
        plane(&numbers, 16, 2, 6, PlaneShape::Plain),
    );
    for (k_far, v_far) in [(true, false), (false, true)] {
        let mut views = LayerViews { k: k.view.clone(), v: Some(v.view.clone()) };
        if k_far {
            views.k.memory = Memory::Device;
        }
        if let Some(v) = views.v.as_mut().filter(|_| v_far) {
            v.memory = Memory::Device;
        }
        // SAFETY: the put is rejected before it reads the planes.
        let put = unsafe { offload.put(0, 0, 16, &views, &OpOpts::default()) };
        assert_eq!(put.map(|_| ()).map_err(|error| error.status()), Err(Status::Unavailable));
    }
    assert_eq!(offload.tokens(0).expect("a layer"), (0, 0));
    // The device has too little memory.
    let small = SimulatedOpts { memory_bytes: 20_000, ..SimulatedOpts::default() };
    let small = Arc::new(Simulated::new(Clock::real(), small).expect("sound"));
    let base = Base::open(small.clone());
    assert_eq!(base.status(RingPlacement::Device), Status::NoMem);
    assert_eq!((base.held(Tier::Device), small.allocated_bytes()), (0, 0));
    small.lose();
    assert_eq!(base.status(RingPlacement::Device), Status::Unavailable);
    drop(base);
    small.close(0).expect("it is idle");
}
