//! A store over a simulated device, on the real clock.

use std::sync::Arc;

use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::clock::Clock;
use kvtier::base::status::Status;
use kvtier::device::Memory;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::CellRange;
use kvtier::store::state::device_tier::Audited;
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::stats::Report;
use kvtier::store::state::transfer::{Level, TransferKind};

use kvtier_testkit::fixtures::store::{
    Done, Engine, Home, LONG_NS, Model, Shape, document, marks_of, runtime, wait,
};

/// Chunks of 32 KiB, cells of 8 KiB.
pub const MODEL: Model = Model { layers: 4, heads: 4, run: 64, chunk: 16 };
pub const KIB: u64 = 1 << 10;
/// Tokens of the documents here, and their cells.
pub const TOKENS: usize = 4 * MODEL.chunk;
pub const CELLS: u64 = 4 * MODEL.layers as u64;
pub const RIGHT: Done = Done { status: Status::Ok, tokens: TOKENS };

/// A store over a simulated device, on the real clock.
pub struct Rig {
    pub home: Home,
    pub device: Arc<Simulated>,
    pub space: u32,
}

pub fn simulated(opts: SimulatedOpts) -> Arc<Simulated> {
    Arc::new(Simulated::new(Clock::real(), opts).expect("sound"))
}

pub fn quick() -> Arc<Simulated> {
    simulated(SimulatedOpts { latency_ns: 1000, ..SimulatedOpts::default() })
}

impl Rig {
    pub fn open(spec: &StoreSpec) -> Rig {
        Rig::on(spec, quick(), None)
    }

    pub fn on(spec: &StoreSpec, device: Arc<Simulated>, budget: Option<&Arc<Budget>>) -> Rig {
        let runtime = runtime();
        let store = Store::open_with(runtime.core(), budget, spec, device.clone()).expect("opened");
        let home = Home { store, runtime };
        let space = home.space(1, &MODEL);
        Rig { home, device, space }
    }

    pub fn report(&self) -> Report {
        self.home.store.with(|core| Ok(core.report())).expect("open")
    }

    pub fn audit(&self) -> Audited {
        self.home.store.audit_device().expect("open")
    }

    /// Stores or loads a document by tensors in a memory; what was loaded is compared.
    pub fn go(
        &self,
        kind: TransferKind,
        level: Level,
        number: u32,
        (shape, memory): (Shape, Memory),
    ) -> Done {
        let tokens = document(number, TOKENS);
        let session = self.home.session(self.space, &tokens);
        let mut engine = Engine::new(MODEL, shape, tokens.len());
        if kind == TransferKind::Put {
            engine.compute(&marks_of(0, &tokens));
        }
        let what = in_memory(engine.whole(), memory);
        let ops = self.home.submit(session, kind, level, what).expect("submitted");
        let done = wait(&ops[0]);
        if kind == TransferKind::Get {
            engine.check(&marks_of(0, &tokens), 0..done.tokens, 0..MODEL.layers);
        }
        self.home.end(session);
        done
    }

    pub fn put(&self, number: u32, memory: Memory) {
        assert_eq!(self.go(TransferKind::Put, Level::Ram, number, (Shape::Tokens, memory)), RIGHT);
    }

    pub fn get(&self, number: u32, memory: Memory) {
        assert_eq!(self.go(TransferKind::Get, Level::Ram, number, (Shape::Tokens, memory)), RIGHT);
    }

    /// How many chunks of a document are on the device with every layer.
    pub fn chunks_near(&self, number: u32) -> usize {
        let tokens = document(number, TOKENS);
        let session = self.home.session(self.space, &tokens);
        let found = self.home.store.with(|core| {
            let keys = core.session(session)?.path().keys().to_vec();
            let mut found = vec![0; keys.len()];
            core.exists(self.space, &keys, &mut found)?;
            Ok(found)
        });
        self.home.end(session);
        found.expect("open").iter().filter(|&&bits| bits & 1 != 0).count()
    }

    /// Nothing of the device is taken once it is closed.
    pub fn close(self) {
        self.home.rest();
        self.home.close();
        assert_eq!(self.device.allocated_bytes(), 0);
    }
}

/// The same tensors, in another memory.
pub fn in_memory(what: CellRange, memory: Memory) -> CellRange {
    let of = |plane: &PlaneView| PlaneView { memory, ..plane.clone() };
    let layer = |layer: &LayerViews| LayerViews { k: of(&layer.k), v: layer.v.as_ref().map(of) };
    let views = Arc::new(Views(what.views.0.iter().map(layer).collect()));
    CellRange { views, ..what }
}

/// Something that must come, sooner or later.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let clock = Clock::real();
    let late_ns = clock.now_ns() + LONG_NS;
    while !holds() {
        assert!(clock.now_ns() < late_ns, "it never came: {what}");
        std::thread::yield_now();
    }
}

pub fn limits(device: u64) -> BudgetOpts {
    let mut limits = [None; 5];
    (limits[Tier::Host as usize], limits[Tier::Device as usize]) = (Some(64 << 20), Some(device));
    BudgetOpts { limits, reserve_bytes: Some(0), strict: false }
}
