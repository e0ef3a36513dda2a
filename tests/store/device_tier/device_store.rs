//! A store that copies with a simulated device.

use std::ops::Deref;
use std::sync::Arc;

use kvtier::base::budget::{Budget, Tier};
use kvtier::base::runtime::Runtime;
use kvtier::device::Memory;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::device_tier::Audited;
use kvtier::store::state::stats::Report;
use kvtier::store::state::transfer::{Level, TransferKind};

use kvtier_testkit::fixtures::store::{
    Done, Engine, Model, Shape, TestStore, budget, document, in_memory, marks_of, runtime,
    simulated,
};

/// Chunks of 32 KiB, cells of 8 KiB.
pub const MODEL: Model = Model { layers: 4, heads: 4, run: 64, chunk: 16 };
pub const KIB: u64 = 1 << 10;
/// Tokens and cells of each document.
pub const TOKENS: usize = 4 * MODEL.chunk;
pub const CELLS: u64 = 4 * MODEL.layers as u64;
pub const RIGHT: Done = Done::ok(TOKENS);

/// A store, its device, and a namespace of [`MODEL`].
pub struct DeviceStore {
    pub store: TestStore,
    pub device: Arc<Simulated>,
    pub namespace: u32,
}

/// A device whose copies take a microsecond.
pub fn quick() -> Arc<Simulated> {
    simulated(SimulatedOpts { latency_ns: 1000, ..SimulatedOpts::default() })
}

impl Deref for DeviceStore {
    type Target = TestStore;

    fn deref(&self) -> &TestStore {
        &self.store
    }
}

impl DeviceStore {
    pub fn open(spec: &StoreSpec) -> DeviceStore {
        DeviceStore::on(spec, quick(), None)
    }

    pub fn on(
        spec: &StoreSpec,
        device: Arc<Simulated>,
        budget: Option<&Arc<Budget>>,
    ) -> DeviceStore {
        let store = TestStore::open_with(runtime(), spec, budget, Some(device.clone()));
        let namespace = store.namespace(1, &MODEL);
        DeviceStore { store, device, namespace }
    }

    pub fn report(&self) -> Report {
        self.handle.with(|core| Ok(core.report())).expect("open")
    }

    pub fn audit(&self) -> Audited {
        self.handle.audit_device().expect("open")
    }

    /// Stores or loads a document whose tensors are in `memory`; what was loaded is compared.
    pub fn transfer_document(
        &self,
        kind: TransferKind,
        level: Level,
        number: u32,
        (shape, memory): (Shape, Memory),
    ) -> Done {
        let tokens = document(number, TOKENS);
        let session = self.session(self.namespace, &tokens);
        let mut engine = Engine::new(MODEL, shape, tokens.len());
        if kind == TransferKind::Put {
            engine.compute(&marks_of(0, &tokens));
        }
        let done = self.transfer(session, kind, level, in_memory(engine.whole(), memory));
        if kind == TransferKind::Get {
            engine.check(&marks_of(0, &tokens), 0..done.tokens, 0..MODEL.layers);
        }
        self.close_session(session);
        done
    }

    pub fn put_document(&self, number: u32, memory: Memory) {
        assert_eq!(
            self.transfer_document(TransferKind::Put, Level::Ram, number, (Shape::Tokens, memory)),
            RIGHT
        );
    }

    pub fn get_document(&self, number: u32, memory: Memory) {
        assert_eq!(
            self.transfer_document(TransferKind::Get, Level::Ram, number, (Shape::Tokens, memory)),
            RIGHT
        );
    }

    /// Number of chunks of a document that are on the device with all layers.
    pub fn device_chunks(&self, number: u32) -> usize {
        let tokens = document(number, TOKENS);
        let session = self.session(self.namespace, &tokens);
        let found = self.handle.with(|core| {
            let keys = core.session(session)?.path().keys().to_vec();
            let mut found = vec![0; keys.len()];
            core.exists(self.namespace, &keys, &mut found)?;
            Ok(found)
        });
        self.close_session(session);
        found.expect("open").iter().filter(|&&bits| bits & 1 != 0).count()
    }

    /// Closes the store; then no device memory is allocated.
    pub fn close(self) {
        self.settle();
        self.store.close();
        assert_eq!(self.device.allocated_bytes(), 0);
    }
}

/// A budget of 64 MiB of host memory and `device_bytes` of device memory.
pub fn device_budget(runtime: &Runtime, device_bytes: u64) -> Arc<Budget> {
    budget(runtime, &[(Tier::Host, 64 << 20), (Tier::Device, device_bytes)])
}
