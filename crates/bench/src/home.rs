//! A store to measure, and an engine's tensors beside it.

use std::sync::Arc;
use std::time::Instant;

use kvtier::base::budget::{Budget, BudgetOpts};
use kvtier::base::memory::Buffer;
use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::{Result, Status};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{CellRange, SessionOpts, SpaceOpts, Wanted};

use super::disk::{Outcome, memory};

/// K, or V, of a token in one layer.
pub const TOKEN_BYTES: u64 = 2048;

/// An error in words.
pub fn say(error: kvtier::base::status::Error) -> String {
    error.to_string()
}

/// An engine's tensors: K and V of each layer, tokens in canonical order.
pub struct Tensors {
    /// All of them.
    pub memory: Buffer,
    /// Tokens that they are for.
    pub tokens: u64,
    layers: usize,
    token_bytes: u64,
}

impl Tensors {
    /// So many bytes for all layers, with 2 KiB of K and of V a token.
    pub fn new(bytes: u64, layers: usize) -> Outcome<Tensors> {
        Tensors::of(bytes, layers, TOKEN_BYTES)
    }

    /// The same, with another length of K and of V.
    pub fn of(bytes: u64, layers: usize, token_bytes: u64) -> Outcome<Tensors> {
        let tokens = bytes / (2 * token_bytes * layers as u64);
        Ok(Tensors { memory: memory(bytes)?, tokens, layers, token_bytes })
    }

    /// All of it.
    pub fn whole(&self, by_layer: bool) -> CellRange {
        let plane = |number: usize| {
            let offset = number as u64 * self.tokens * self.token_bytes;
            let address = self.memory.address().expose_provenance() as u64 + offset;
            PlaneView::canonical(address, self.tokens as u32, self.token_bytes)
        };
        let layer = |l: usize| LayerViews { k: plane(2 * l), v: Some(plane(2 * l + 1)) };
        let views = Arc::new(Views((0..self.layers).map(layer).collect()));
        let (first_layer, layers) = (0, self.layers);
        CellRange {
            first_token: 0,
            tokens: self.tokens,
            first_layer,
            layers,
            by_layer,
            wanted: Wanted::All,
            views,
            after: None,
        }
    }
}

/// One group of layers.
pub fn layout(layers: usize, chunk_tokens: u32, token_bytes: u64) -> Result<Layout> {
    let dim = token_bytes as u32 / 2;
    Layout::new(chunk_tokens, vec![Group::gqa(0..layers as u16, 1, dim, Dtype::F16)?])
}

/// A store, its runtime, and a namespace.
pub struct Home {
    /// The store.
    pub store: Store,
    runtime: Runtime,
    space: u32,
}

impl Home {
    /// With a budget of its own for host memory, if one is given.
    pub fn open(spec: &str, layout: Layout, host: Option<u64>) -> Result<Home> {
        Home::of(&StoreSpec::parse(spec)?, layout, host)
    }

    /// The same of a spec that has more than words.
    pub fn of(spec: &StoreSpec, layout: Layout, host: Option<u64>) -> Result<Home> {
        let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() })?;
        let budget = match host {
            Some(_) => {
                let limits = [None, host, None, None, None];
                let opts = BudgetOpts { limits, ..BudgetOpts::default() };
                Some(Budget::open(runtime.core(), &opts)?)
            }
            None => None,
        };
        let store = Store::open(runtime.core(), budget.as_ref(), spec)?;
        let opts = SpaceOpts { key: Key([9; 32]), layout, holes: false };
        let space = store.with(|core| core.open_space(&opts))?;
        Ok(Home { store, runtime, space })
    }

    /// A session of a document.
    pub fn session(&self, document: u32, tokens: u64) -> Result<u32> {
        self.session_in(self.space, document, tokens)
    }

    /// The same in another namespace.
    pub fn session_in(&self, space: u32, document: u32, tokens: u64) -> Result<u32> {
        let tokens: Vec<u32> = (0..tokens as u32).map(|i| document << 18 | i).collect();
        self.begin(space, &tokens)
    }

    /// A session of these tokens.
    pub fn session_of(&self, tokens: &[u32]) -> Result<u32> {
        self.begin(self.space, tokens)
    }

    fn begin(&self, space: u32, tokens: &[u32]) -> Result<u32> {
        self.store.with(|core| {
            let number = core.open_session(space, &SessionOpts::default())?;
            core.append(number, tokens)?;
            Ok(number)
        })
    }

    /// What time it is for the store.
    pub fn now_ns(&self) -> u64 {
        self.runtime.core().clock().now_ns()
    }

    /// Seconds until all parts of a move are there, each by itself.
    pub fn carry(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        what: CellRange,
    ) -> Result<Vec<f64>> {
        self.carry_and(session, kind, level, what, |_| ())
    }

    /// The same, and does something with each part when it is there; it is told whether
    /// that had to be waited for.
    pub fn carry_and(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        what: CellRange,
        mut then: impl FnMut(bool),
    ) -> Result<Vec<f64>> {
        let start = Instant::now();
        let ops = self.store.submit(session, kind, level, what, &OpOpts::default())?;
        let wait = |op: OpRef| {
            let waits = op.state() & RELEASED == 0;
            op.wait(RELEASED, 0)?;
            let (took, status) = (start.elapsed().as_secs_f64(), op.info().status);
            op.remove();
            then(waits);
            match status.and_then(Status::from_code) {
                Some(Status::Ok) => Ok(took),
                status => Err(status.unwrap_or(Status::Panic).into()),
            }
        };
        ops.into_iter().map(wait).collect()
    }

    /// Ends a session.
    pub fn end(&self, session: u32) -> Result<()> {
        self.store.with(|core| core.close_session(session))
    }

    /// Closes all of it.
    pub fn close(self) -> Result<()> {
        self.store.close(0)?;
        drop(self.runtime);
        Ok(())
    }
}
