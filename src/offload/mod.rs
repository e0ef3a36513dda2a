//! Offload: KV of one session, layer by layer, through a ring of buffers that kernels read, with a
//! store behind.
//!
//! An [`Offload`] belongs to one session of a store. [`Offload::put`] takes the KV that the engine
//! computed for a layer: whole blocks go to the store, the last tokens to a *tail* that stays.
//! [`Offload::load`] loads blocks of a layer into a buffer of the ring, selected by a sparse policy
//! if there is one, followed by the tail. Loads overlap with computing: with N buffers, layer l+N-1
//! is loaded while layer l is used.
//!
//! A block is a chunk of the session's namespace. Policies see keys before blocks are put. Data
//! that other sessions share does not change: a token that a policy evicts is not loaded any more,
//! but its block stays in the store.
//!
//! | module | content |
//! |---|---|
//! | [`opts`] | options, and the check that they match the namespace |
//! | [`memory`], [`ring`] | memory of the ring; buffers and tails |
//! | [`put`], [`load`], [`evict`] | operations on one layer |
//! | [`pass`] | all layers in order, with prefetch |
//! | [`sequence`] | resume, fork, truncate |
//! | [`views`], [`copies`] | the engine's tensors; copies beside those of the store |
//! | [`policy_state`] | policy state of blocks, kept in the store |
//! | [`audit`] | quality of selections |

pub mod audit;
pub mod copies;
pub mod evict;
pub mod load;
pub mod memory;
pub mod opts;
pub mod pass;
pub mod policy_state;
pub mod put;
pub mod ring;
pub mod sequence;
pub mod views;

use crate::base::budget::Tier;
use crate::base::clock::Clock;
use crate::base::op::{OpRef, RELEASED};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory};
use crate::offload::audit::Audit;
use crate::offload::copies::{Copier, KeyStaging, byte_copy};
use crate::offload::evict::Retained;
use crate::offload::memory::OwnedMemory;
use crate::offload::opts::Geometry;
use crate::offload::pass::Pass;
use crate::offload::policy_state::PolicyState;
use crate::offload::ring::{Ring, Tail};
use crate::sparse::RetainedTokens;
use crate::store::handle::Store;
use crate::store::state::Level;
pub use evict::TokensLeft;
pub use load::{BlockSelection, Loaded};
pub use memory::{LentMemory, RingPlacement};
pub use opts::{Opts, Policies};

/// State of a layer.
#[derive(Default)]
struct Layer {
    /// Tokens that the store has, in whole blocks.
    stored: u32,
    /// The last tokens.
    tail: Tail,
    /// Retained tokens; none = all.
    retained: Option<Retained>,
}

impl Layer {
    fn tokens(&self) -> u32 {
        self.stored + self.tail.tokens
    }
}

/// KV of one session, layer by layer. Calls must not overlap.
pub struct Offload {
    store: Arc<Store>,
    session: u32,
    geometry: Geometry,
    level: Level,
    policies: Policies,
    policy_state: Option<PolicyState>,
    /// Bytes of policy state that are charged to the account.
    charged_bytes: u64,
    layers: Vec<Layer>,
    ring: Ring,
    pass: Option<Pass>,
    memory: OwnedMemory,
    copier: Copier,
    /// Keys in host memory, of puts and of blocks that are put into the store, for policies.
    put_keys: KeyStaging,
    seal_keys: KeyStaging,
    clock: Clock,
    stats: Stats,
    audit: Option<Audit>,
    /// Tokens up to which blocks of all layers were reported to policies that need these together.
    sealed_together: u32,
    /// The last error that failed no call; see [`Offload::take_error`].
    last_error: Option<Error>,
    /// Memory of an eviction policy's answer, reused.
    spare: RetainedTokens,
}

impl Offload {
    /// Opens an offload for a session without tokens, or whose tokens are in the store. INVALID =
    /// the shape does not match the session's namespace. The store's account is charged for the
    /// ring and the tails.
    pub fn open(store: &Arc<Store>, opts: Opts) -> Result<Offload> {
        let geometry = opts::geometry_of(store, &opts)?;
        let (session, buffers) = (opts.session, opts.buffers);
        let mut opened = Offload::empty(store, session, geometry, buffers, opts.placement)?;
        (opened.level, opened.policies, opened.clock) = (opts.level, opts.policies, opts.clock);
        let (session, all) = (opened.session, &opened.policies);
        opened.policy_state =
            PolicyState::open(store, session, &opts.recipe, &opened.geometry, all)?;
        Ok(opened)
    }

    /// An offload without tokens and policies.
    fn empty(
        store: &Arc<Store>,
        session: u32,
        geometry: Geometry,
        buffers: u32,
        placement: RingPlacement,
    ) -> Result<Offload> {
        let memory = OwnedMemory::take(store, placement, geometry.all_bytes(buffers)?)?;
        let copier = Copier { device: store.device(), after: None };
        check_reach(&copier, &memory)?;
        let count = geometry.shape.layers as usize;
        let mut layers: Vec<Layer> = Vec::new();
        layers.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        layers.resize_with(count, Layer::default);
        Ok(Offload {
            store: store.clone(),
            session,
            level: Level::Ram,
            policies: Policies::default(),
            policy_state: None,
            charged_bytes: 0,
            ring: Ring::new(buffers, geometry.slot_bytes()),
            pass: None,
            layers,
            memory,
            copier,
            put_keys: KeyStaging::default(),
            seal_keys: KeyStaging::default(),
            geometry,
            clock: Clock::real(),
            stats: Stats::default(),
            audit: None,
            sealed_together: 0,
            last_error: None,
            spare: RetainedTokens::default(),
        })
    }

    /// Bytes of the ring and the tails of an offload with these options.
    pub fn memory_bytes(store: &Arc<Store>, opts: &Opts) -> Result<u64> {
        opts::geometry_of(store, opts)?.all_bytes(opts.buffers)
    }

    /// Sets the ready event of later copies, an event of the store's device: the engine does not
    /// read released buffers any more, and has computed what it puts. None = no event. The event
    /// must stay known to the device until the next one is set or the offload is dropped, and
    /// copies that began before have ended.
    pub fn after(&mut self, event: Option<Event>) -> Result<()> {
        if let Some(event) = event {
            self.copier.device.state(event)?;
        }
        self.copier.after = event;
        Ok(())
    }

    /// The shape of the attention.
    pub fn shape(&self) -> &crate::sparse::Shape {
        &self.geometry.shape
    }

    /// The last error that failed no call: policy state was not stored with blocks, or a selection
    /// was not audited. The caller logs it when it holds no lock.
    pub fn take_error(&mut self) -> Option<Error> {
        self.last_error.take()
    }

    /// Tokens of a layer in the store, and in its tail.
    pub fn tokens(&self, layer: u32) -> Result<(u32, u32)> {
        let layer = self.layer(layer)?;
        Ok((layer.stored, layer.tail.tokens))
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        let policies = [&self.policies.prefill, &self.policies.decode];
        let state = policies.into_iter().flatten().map(|policy| policy.state_bytes()).sum();
        Stats { policy_bytes: state, ..self.stats }
    }

    /// Charges the account for policy state. Returns whether the budget allowed it.
    fn charge_account(&mut self) -> bool {
        let policies = [&self.policies.prefill, &self.policies.decode];
        let now = policies.into_iter().flatten().map(|policy| policy.state_bytes()).sum();
        let Some(account) = self.store.account() else { return true };
        if now < self.charged_bytes {
            account.give_back(Tier::Host, self.charged_bytes - now);
        } else if account.take(Tier::Host, now - self.charged_bytes).is_err() {
            return false;
        }
        self.charged_bytes = now;
        true
    }

    /// Fails if the session has fewer tokens.
    fn check_known(&self, tokens: u32) -> Result<()> {
        let known =
            self.store.with(|core| Ok(core.session(self.session)?.path().tokens().len()))?;
        if (known as u64) < u64::from(tokens) {
            crate::fail!(
                Invalid,
                "tokens up to {tokens} are used, and the session has {known}: append them first"
            );
        }
        Ok(())
    }

    fn layer(&self, layer: u32) -> Result<&Layer> {
        match self.layers.get(layer as usize) {
            Some(layer) => Ok(layer),
            None => crate::fail!(
                Invalid,
                "layer {layer} does not exist: the model has {} layers",
                self.layers.len()
            ),
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        // Workers may still write to the ring and read the tails.
        let tails = self.layers.iter_mut().filter_map(|layer| layer.tail.leaving.take());
        let ops: Vec<OpRef> = self.ring.ops().chain(tails).collect();
        ops.iter().for_each(|op| op.cancel());
        for op in ops {
            // The results do not matter any more.
            let _ = end(&op);
        }
        if let Some(policy_state) = &mut self.policy_state {
            policy_state.close(&self.store);
        }
        if let Some(account) = self.store.account() {
            account.give_back(Tier::Host, self.charged_bytes);
        }
    }
}

/// Checks that the device can access the memory from the first byte to the last, so that a wrong
/// address of the engine is found now and not by the first load.
fn check_reach(copier: &Copier, memory: &OwnedMemory) -> Result<()> {
    const PROBE_BYTES: u64 = 16;
    let ((address, bytes), is) = (memory.whole(), memory.memory());
    if is == Memory::Host || bytes < 2 * PROBE_BYTES {
        return Ok(());
    }
    let last = address + bytes - PROBE_BYTES;
    let mut probe = [byte_copy((address, is), (last, is), PROBE_BYTES)?];
    // SAFETY: memory of the offload, which holds no data yet.
    let probed = unsafe { copier.copy(&mut probe) };
    probed.map_err(|error| error.within("the memory of the ring and the tails"))
}

/// Waits for the end of an op. Returns its result.
fn end(op: &OpRef) -> Result<u64> {
    op.wait(RELEASED, 0)?;
    let (status, value, error) = (op.info().status, op.value(), op.error());
    op.remove();
    match status.and_then(Status::from_code) {
        Some(Status::Ok) => Ok(value),
        Some(status) => Err(error.unwrap_or_else(|| Error::from(status))),
        None => Err(Status::Invalid.into()),
    }
}

// Counters of an offload.

/// Waits for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Number of waits that took time.
    pub count: u64,
    /// Their duration, in nanoseconds.
    pub ns: u64,
}

impl Waits {
    fn add(&mut self, ns: u64) {
        self.count += u64::from(ns > 0);
        self.ns = self.ns.saturating_add(ns);
    }
}

/// Counters since the offload was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Loads of a layer.
    pub loads: u64,
    /// Loads that a policy selected blocks for.
    pub selections: u64,
    /// Candidate blocks of loads.
    pub candidates: u64,
    /// Blocks that were loaded.
    pub loaded_blocks: u64,
    /// Bytes that were loaded.
    pub loaded_bytes: u64,
    /// Bytes that were not loaded, because a policy did not select them.
    pub saved_bytes: u64,
    /// Loads that failed: a block was not in the store any more, or could not be read.
    pub failed_loads: u64,
    /// Blocks that were put into the store.
    pub put_blocks: u64,
    /// Bytes that were put into the store.
    pub put_bytes: u64,
    /// Bytes that were copied to or from tails.
    pub tail_bytes: u64,
    /// Bytes of keys that were copied from device to host memory for policies.
    pub key_bytes: u64,
    /// Tokens that policies evicted; counted for each head where heads have lists of their own.
    pub evicted_tokens: u64,
    /// Bytes of policy state.
    pub policy_bytes: u64,
    /// Waits for loads.
    pub load_waits: Waits,
    /// Waits for puts of full tails.
    pub tail_waits: Waits,
    /// Waits for blocks that a truncation divides.
    pub cut_waits: Waits,
    /// Time that policies took to select blocks.
    pub select_waits: Waits,
    /// Selections that were audited ([`crate::offload::audit`]).
    pub audited: u64,
    /// Wanted blocks of audits: those with the most attention, as many as were chosen.
    pub wanted: u64,
    /// Wanted blocks that were chosen.
    pub found: u64,
    /// Sum over audits of the share of attention that the chosen blocks got, in millionths.
    pub found_ppm: u64,
}

impl Stats {
    /// Share of the wanted blocks that were chosen, if selections were audited.
    pub fn recall(&self) -> Option<f64> {
        (self.wanted > 0).then(|| self.found as f64 / self.wanted as f64)
    }
}
