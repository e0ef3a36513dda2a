//! KV of a session, layer by layer: a ring of buffers that kernels read, a store behind.
//!
//! An [`Offload`] has one session of a store. What the engine computes of a layer goes in by
//! [`Offload::put`]: whole blocks into the store, the last tokens into a *tail* that stays.
//! [`Offload::load`] brings blocks of a layer into a buffer of the ring, those that a sparse
//! policy selects where it has to be asked, and puts the tail behind them. Copies go on
//! while the engine computes: with N buffers, layer l+N-1 comes while l is computed on.
//!
//! A block is a chunk of the session's namespace. Policies see keys before they are moved away.
//! Nothing that other sessions share is changed: a token that a policy evicts is not loaded any
//! more, its block goes on lying in the store for whoever wants it.
//!
//! - [`home`]: in which memory the ring and the tails are.
//! - [`opts`]: what is said when one is opened, and whether that fits the namespace.
//! - [`ring`]: buffers, and what is in them.
//! - [`tail`]: the last tokens of each layer.
//! - [`put`], [`load`], [`evict`], [`cut`], [`resume`], [`fork`]: what is done.
//! - [`kept`]: which tokens of a layer are left.
//! - [`pass`]: all layers in their order, loaded ahead as far as that can be.
//! - [`source`]: the engine's tensors, cut to blocks.
//! - [`carry`]: copies beside those of the store, to tails and of keys.
//! - [`audit`]: how good selections are.
//! - [`saved`]: what policies know of blocks, kept beside them.
//! - [`stats`]: what was saved, and who waited for what.

pub mod audit;
pub mod carry;
pub mod cut;
pub mod evict;
pub mod fork;
pub mod home;
pub mod kept;
pub mod load;
pub mod opts;
pub mod pass;
pub mod put;
pub mod resume;
pub mod ring;
pub mod saved;
pub mod source;
pub mod stats;
pub mod tail;

pub use home::{Home, Lent};
pub use kept::Left;
pub use load::{Loaded, Which};
pub use opts::{Opts, Policies};
pub use stats::Stats;

use crate::base::budget::Tier;
use crate::base::clock::Clock;
use crate::base::op::{OpRef, RELEASED};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory};
use crate::offload::audit::Audit;
use crate::offload::carry::{Carrier, Staging, bytes_to};
use crate::offload::home::Own;
use crate::offload::kept::Kept;
use crate::offload::opts::Geometry;
use crate::offload::pass::Pass;
use crate::offload::ring::Ring;
use crate::offload::saved::Saved;
use crate::offload::tail::Tail;
use crate::sparse::RetainedTokens;
use crate::store::handle::Store;
use crate::store::state::Level;

/// What is known of a layer.
#[derive(Default)]
struct Layer {
    /// Tokens that the store has, in whole blocks.
    stored: u32,
    /// The last tokens.
    tail: Tail,
    /// Which tokens a policy has left; none = all.
    kept: Option<Kept>,
}

impl Layer {
    fn tokens(&self) -> u32 {
        self.stored + self.tail.tokens
    }
}

/// A session's KV, layer by layer. Calls come one at a time.
pub struct Offload {
    store: Arc<Store>,
    session: u32,
    geometry: Geometry,
    level: Level,
    policies: Policies,
    saved: Option<Saved>,
    /// What the account pays for what policies know.
    paid_bytes: u64,
    layers: Vec<Layer>,
    ring: Ring,
    pass: Option<Pass>,
    memory: Own,
    carrier: Carrier,
    /// Keys of what is put, and of blocks that leave, where policies see them.
    put_keys: Staging,
    seal_keys: Staging,
    clock: Clock,
    stats: Stats,
    audit: Option<Audit>,
    /// Tokens up to which policies that want blocks of all layers together were told them.
    together: u32,
    /// What went wrong, and stopped no call: [`Offload::take_note`].
    note: Option<Error>,
    /// An answer of a policy that evicts; its memory serves the next one.
    spare: RetainedTokens,
}

impl Offload {
    /// Opens one for a session whose tokens are all still to come, or are in the store.
    /// INVALID = the shape is not that of the session's namespace. The store's account pays
    /// for the ring and the tails.
    pub fn open(store: &Arc<Store>, opts: Opts) -> Result<Offload> {
        let geometry = opts::geometry_of(store, &opts)?;
        let (session, buffers) = (opts.session, opts.buffers);
        let mut opened = Offload::empty(store, session, geometry, buffers, opts.home)?;
        (opened.level, opened.policies, opened.clock) = (opts.level, opts.policies, opts.clock);
        let (session, all) = (opened.session, &opened.policies);
        opened.saved = Saved::open(store, session, &opts.recipe, &opened.geometry, all)?;
        Ok(opened)
    }

    /// One that has nothing, and nobody to ask.
    fn empty(
        store: &Arc<Store>,
        session: u32,
        geometry: Geometry,
        buffers: u32,
        home: Home,
    ) -> Result<Offload> {
        let memory = Own::take(store, home, geometry.all_bytes(buffers)?)?;
        let carrier = Carrier { device: store.device(), after: None };
        check_reach(&carrier, &memory)?;
        let count = geometry.shape.layers as usize;
        let mut layers: Vec<Layer> = Vec::new();
        layers.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        layers.resize_with(count, Layer::default);
        Ok(Offload {
            store: store.clone(),
            session,
            level: Level::Ram,
            policies: Policies::default(),
            saved: None,
            paid_bytes: 0,
            ring: Ring::new(buffers, geometry.slot_bytes()),
            pass: None,
            layers,
            memory,
            carrier,
            put_keys: Staging::default(),
            seal_keys: Staging::default(),
            geometry,
            clock: Clock::real(),
            stats: Stats::default(),
            audit: None,
            together: 0,
            note: None,
            spare: RetainedTokens::default(),
        })
    }

    /// How many bytes the ring and the tails of one take that is opened so.
    pub fn memory_bytes(store: &Arc<Store>, opts: &Opts) -> Result<u64> {
        opts::geometry_of(store, opts)?.all_bytes(opts.buffers)
    }

    /// What is copied from now on waits for an event of the store's device: that buffers which
    /// were given back are not read any more, and that what is put was computed. None = for
    /// nothing. It stays known to the device until the next one is given, or this is dropped,
    /// and what was begun before that has ended.
    pub fn after(&mut self, event: Option<Event>) -> Result<()> {
        if let Some(event) = event {
            self.carrier.device.state(event)?;
        }
        self.carrier.after = event;
        Ok(())
    }

    /// What attention it is for.
    pub fn shape(&self) -> &crate::sparse::Shape {
        &self.geometry.shape
    }

    /// What went wrong last and stopped no call: what policies know was not kept with blocks, or
    /// a selection not audited. Whoever calls logs it, when no lock is held any more.
    pub fn take_note(&mut self) -> Option<Error> {
        self.note.take()
    }

    /// Tokens of a layer that are in the store, and in its tail.
    pub fn tokens(&self, layer: u32) -> Result<(u32, u32)> {
        let layer = self.layer(layer)?;
        Ok((layer.stored, layer.tail.tokens))
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let policies = [&self.policies.prefill, &self.policies.decode];
        let state = policies.into_iter().flatten().map(|policy| policy.state_bytes()).sum();
        Stats { policy_bytes: state, ..self.stats }
    }

    /// The account pays for what policies know; whether it could.
    fn pay(&mut self) -> bool {
        let policies = [&self.policies.prefill, &self.policies.decode];
        let now = policies.into_iter().flatten().map(|policy| policy.state_bytes()).sum();
        let Some(account) = self.store.account() else { return true };
        if now < self.paid_bytes {
            account.give_back(Tier::Host, self.paid_bytes - now);
        } else if account.take(Tier::Host, now - self.paid_bytes).is_err() {
            return false;
        }
        self.paid_bytes = now;
        true
    }

    /// Whether the session has so many tokens.
    fn check_known(&self, tokens: u32) -> Result<()> {
        let known =
            self.store.with(|core| Ok(core.session(self.session)?.path().tokens().len()))?;
        if (known as u64) < u64::from(tokens) {
            crate::fail!(
                Invalid,
                "tokens up to {tokens}, of a session with {known}: append them first"
            );
        }
        Ok(())
    }

    fn layer(&self, layer: u32) -> Result<&Layer> {
        match self.layers.get(layer as usize) {
            Some(layer) => Ok(layer),
            None => crate::fail!(Invalid, "layer {layer} of a model with {}", self.layers.len()),
        }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        // Hands may still write to the ring and read the tails.
        let tails = self.layers.iter_mut().filter_map(|layer| layer.tail.leaving.take());
        let ops: Vec<OpRef> = self.ring.ops().chain(tails).collect();
        ops.iter().for_each(|op| op.cancel());
        for op in ops {
            // What it came to matters to nobody now.
            let _ = end(&op);
        }
        if let Some(saved) = &mut self.saved {
            saved.close(&self.store);
        }
        if let Some(account) = self.store.account() {
            account.give_back(Tier::Host, self.paid_bytes);
        }
    }
}

/// Whether a device reaches the memory from its first byte to its last: an address that an
/// engine got wrong is found now, and not by the first load.
fn check_reach(carrier: &Carrier, memory: &Own) -> Result<()> {
    const PROBE_BYTES: u64 = 16;
    let ((address, bytes), is) = (memory.whole(), memory.memory());
    if is == Memory::Host || bytes < 2 * PROBE_BYTES {
        return Ok(());
    }
    let last = address + bytes - PROBE_BYTES;
    let mut probe = [bytes_to((address, is), (last, is), PROBE_BYTES)?];
    // SAFETY: memory of the offload's own, in which nothing is yet.
    let probed = unsafe { carrier.carry(&mut probe) };
    probed.map_err(|error| error.within("the memory of the ring and the tails"))
}

/// Waits for the end of an op; what it came to.
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
