//! Where the memory of offloads on devices is from, who pays for it, and what cannot be.

use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::clock::Clock;
use kvtier::base::op::OpOpts;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Device, Memory};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::offload::{LentMemory, Offload, Opts, Policies, RingPlacement};
use kvtier::sparse::Kind;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::LayerViews;
use kvtier::store::state::{Level, SessionOpts, SpaceOpts};

use super::far::{self, Far};
use super::{BLOCK, Kept, plane, policy, shape};

/// A store with a session, and what an offload of it is opened with.
struct Base {
    session: u32,
    store: Arc<Store>,
    _runtime: Runtime,
}

impl Base {
    fn open(device: Arc<dyn Device>) -> Base {
        let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() });
        let runtime = runtime.expect("opened");
        let mut limits = [None; 5];
        limits[Tier::Device as usize] = Some(1 << 20);
        let budget = BudgetOpts { limits, ..BudgetOpts::default() };
        let budget = Budget::open(runtime.core(), &budget).expect("opened");
        let spec = StoreSpec::parse("store(host=4MiB)").expect("sound");
        let store = Store::open_with(runtime.core(), Some(&budget), &spec, device);
        let store = Arc::new(store.expect("opened"));
        let group = Group::mla_expanded(0..3, 2, 8, 6, Dtype::F32).expect("a group");
        let layout = Layout::new(BLOCK, vec![group]).expect("a layout");
        let session = store.with(|core| {
            let space = core.open_space(&SpaceOpts { key: Key([9; 32]), layout, holes: false })?;
            let session = core.open_session(space, &SessionOpts::default())?;
            core.append(session, &(0..64).collect::<Vec<u32>>())?;
            Ok(session)
        });
        Base { session: session.expect("a session"), store, _runtime: runtime }
    }

    fn opts(&self, placement: RingPlacement) -> Opts {
        let shape = shape(Kind::Split);
        let decode = policy("quest(budget=32)", &shape);
        Opts {
            session: self.session,
            shape,
            dtype: Dtype::F32,
            buffers: 2,
            buffer_tokens: 64,
            placement,
            level: Level::Ram,
            policies: Policies { prefill: None, decode },
            recipe: String::new(),
            clock: Clock::real(),
        }
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

/// The account pays at the tier where the memory is, and not for what an engine lends.
#[test]
fn memory_is_paid_for_where_it_is_and_can_be_lent() {
    for device in [far::simulated(1) as Arc<dyn Device>, far::cuda()] {
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
        let lent = Far::new(&device, bytes + 256);
        let lend = |address: u64, bytes: u64| {
            // SAFETY: memory of the device, or refused before anything is done with it.
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
    // A driver says whose memory it is.
    let base = Base::open(far::cuda());
    let mut host = vec![0u64; 1 << 13];
    let address = (host.as_mut_ptr() as u64).next_multiple_of(256);
    // SAFETY: refused, as this test wants to see.
    let wrong = RingPlacement::Lent(unsafe { LentMemory::new(address, 60_000) });
    assert_eq!(base.status(wrong), Status::Invalid);
    // More than the account may have.
    let mut opts = base.opts(RingPlacement::Device);
    opts.buffers = 256;
    let refused = Offload::open(&base.store, opts).map(|_| ()).map_err(|error| error.status());
    assert_eq!(refused, Err(Status::Budget));
}

/// What a store's device cannot do is said when the offload is opened, or K and V are put.
#[test]
fn a_store_without_such_a_device_says_so() {
    let base = Base::open(Arc::new(kvtier::device::host::Host::default()));
    assert_eq!(base.status(RingPlacement::Device), Status::Unavailable);
    // SAFETY: refused before anything is done with it.
    let lent = RingPlacement::Lent(unsafe { LentMemory::new(1 << 20, 1 << 20) });
    assert_eq!(base.status(lent), Status::Unavailable);
    let mut offload = Offload::open(&base.store, base.opts(RingPlacement::Host)).expect("room");
    let numbers = [1.0; 256];
    let (k, v) = (plane(&numbers, 16, 2, 8, Kept::Plain), plane(&numbers, 16, 2, 6, Kept::Plain));
    for (k_far, v_far) in [(true, false), (false, true)] {
        let mut views = LayerViews { k: k.view.clone(), v: Some(v.view.clone()) };
        if k_far {
            views.k.memory = Memory::Device;
        }
        if let Some(v) = views.v.as_mut().filter(|_| v_far) {
            v.memory = Memory::Device;
        }
        // SAFETY: refused.
        let put = unsafe { offload.put(0, 0, 16, &views, &OpOpts::default()) };
        assert_eq!(put.map(|_| ()).map_err(|error| error.status()), Err(Status::Unavailable));
    }
    assert_eq!(offload.tokens(0).expect("a layer"), (0, 0));
    // A device that has no more.
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
