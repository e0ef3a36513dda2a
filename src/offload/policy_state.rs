//! Policy state of blocks, kept in the store beside the blocks: it is demoted, charged and loaded
//! as other KV.
//!
//! The state has a namespace of its own, whose key derives from that of the blocks and from the
//! name of the policies. The state plane of a layer in a chunk is the policy state of that block.
//! It may be evicted before the block, or fail to load: policies treat unknown blocks as wanted.
//! So no failure here is an error of the offload.
//!
//! A row, little endian, padded with zeros: `KVTS` (4 bytes), then for each policy the length of
//! its state (4 bytes) and the state.

use crate::base::op::{OpOpts, OpRef, RELEASED};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::format::keys::{Key, sparse_key};
use crate::meta::dtype::Dtype;
use crate::meta::layout::{Group, Layout};
use crate::offload::end;
use crate::offload::opts::{Geometry, Policies};
use crate::offload::views::{canonical, rows_of};
use crate::sparse::{Sparse, needs};
use crate::store::handle::Store;
use crate::store::state::session::{LayerViews, PlaneView, Tokens, Views};
use crate::store::state::{
    CellRange, Level, NamespaceOpts, SessionOpts, StoreState, TransferKind, Wanted,
};

const MAGIC: [u8; 4] = *b"KVTS";
const WORD: usize = 4;
/// Most puts in flight; beyond, the oldest is waited for.
const MOST_PUTS: usize = 256;

/// The namespace and session of the state.
pub(super) struct PolicyState {
    namespace: u32,
    session: u32,
    /// Tokens of the session.
    tokens: usize,
    /// Bytes of a row.
    row_bytes: usize,
    puts: Vec<(OpRef, Vec<u8>)>,
}

impl PolicyState {
    /// Opens the namespace; none if the policies store nothing with blocks.
    pub fn open(
        store: &Arc<Store>,
        session: u32,
        recipe: &str,
        geometry: &Geometry,
        policies: &Policies,
    ) -> Result<Option<PolicyState>> {
        if recipe.is_empty() {
            return Ok(None);
        }
        let row_bytes = max_row_bytes(geometry, policies)?;
        if row_bytes == 0 {
            return Ok(None);
        }
        let layers = 0..geometry.shape.layers as u16;
        let group = Group::state(layers, row_bytes as u64, Dtype::Bytes);
        let layout = Layout::new(geometry.shape.block_tokens, vec![group])?;
        store.with(|core| {
            let namespace = core.session(session)?.namespace();
            let key = core.namespace(namespace).map_or(Key([0; 32]), |namespace| namespace.key);
            let opts = NamespaceOpts { key: sparse_key(&key, recipe), layout, holes: true };
            PolicyState::open_in(core, &opts, row_bytes).map(Some)
        })
    }

    /// The same namespace for a forked session. Its tokens are appended with the first put.
    pub fn fork(&self, store: &Store) -> Result<PolicyState> {
        store.with(|core| {
            let Some(namespace) = core.namespace(self.namespace) else {
                return Err(Status::NotFound.into());
            };
            let (key, holes) = (namespace.key, namespace.holes);
            let Some(table) = core.table_of(self.namespace) else {
                return Err(Status::NotFound.into());
            };
            let opts = NamespaceOpts { key, layout: table.layout.clone(), holes };
            PolicyState::open_in(core, &opts, self.row_bytes)
        })
    }

    fn open_in(
        core: &mut StoreState,
        opts: &NamespaceOpts,
        row_bytes: usize,
    ) -> Result<PolicyState> {
        let namespace = core.open_namespace(opts)?;
        let session = match core.open_session(namespace, &SessionOpts::default()) {
            Ok(session) => session,
            Err(error) => {
                core.close_namespace(namespace);
                return Err(error);
            }
        };
        Ok(PolicyState { namespace, session, tokens: 0, row_bytes, puts: Vec::new() })
    }

    /// Stores the policy state of blocks of a layer; `first`: token of the first block.
    pub fn put(
        &mut self,
        store: &Store,
        of: u32,
        policies: &mut Policies,
        (layer, first, tokens, block): (u32, u32, u32, u32),
    ) -> Result<()> {
        let mut rows = Vec::new();
        let count = (tokens / block) as usize;
        rows.try_reserve_exact(count * self.row_bytes).map_err(|_| Status::NoMem)?;
        for at in 0..count as u32 {
            let start = rows.len();
            rows.extend_from_slice(&MAGIC);
            for policy in policies.all() {
                let head = rows.len();
                rows.extend_from_slice(&[0; WORD]);
                if policy.save(layer, first / block + at, &mut rows).is_err() {
                    rows.truncate(head + WORD);
                }
                let bytes = (rows.len() - head - WORD) as u32;
                rows[head..head + WORD].copy_from_slice(&bytes.to_le_bytes());
            }
            if rows.len() > start + self.row_bytes {
                // A row longer than the maximum is not stored.
                rows.truncate(start);
            }
            rows.resize(start + self.row_bytes, 0);
        }
        self.append_tokens_from(store, of, first + tokens)?;
        let op = self.submit(store, TransferKind::Put, (layer, first, tokens), count, &mut rows)?;
        self.reap(MOST_PUTS);
        self.puts.push((op, rows));
        Ok(())
    }

    /// Loads the policy state of a layer's blocks, up to a token. Returns the blocks whose state
    /// is unknown to some policy.
    pub fn load(
        &mut self,
        store: &Store,
        of: u32,
        policies: &mut Policies,
        (layer, tokens, block): (u32, u32, u32),
    ) -> Result<Vec<u32>> {
        let count = (tokens / block) as usize;
        let mut rows: Vec<u8> = Vec::new();
        rows.try_reserve_exact(count * self.row_bytes).map_err(|_| Status::NoMem)?;
        rows.resize(count * self.row_bytes, 0);
        self.append_tokens_from(store, of, tokens)?;
        let op = self.submit(store, TransferKind::Get, (layer, 0, tokens), count, &mut rows)?;
        // Rows that could not be loaded stay zero.
        let _ = end(&op);
        let mut unknown = Vec::new();
        unknown.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        for (id, row) in (0u32..).zip(rows.chunks_exact(self.row_bytes)) {
            // The row was never stored, or was evicted before the block: that is normal.
            if apply_row(policies, row, |policy, bytes| policy.load(layer, id, id * block, bytes))
                .is_err()
            {
                unknown.push(id);
            }
        }
        Ok(unknown)
    }

    /// Truncates the session.
    pub fn truncate(&mut self, store: &Store, tokens: u32) -> Result<()> {
        self.reap(0);
        let tokens = self.tokens.min(tokens as usize);
        store.with(|core| core.truncate(self.session, tokens as u64))?;
        self.tokens = tokens;
        Ok(())
    }

    /// Waits for puts, and closes session and namespace.
    pub fn close(&mut self, store: &Store) {
        self.reap(0);
        let closed = store.release_with(|core| {
            core.close_namespace(self.namespace);
            core.close_session(self.session)
        });
        if let Err(error) = closed {
            log::error!("internal: the session of policy state could not be closed: {error}");
        }
    }

    /// Appends the tokens of another session, up to one.
    fn append_tokens_from(&mut self, store: &Store, of: u32, tokens: u32) -> Result<()> {
        let (has, target) = (self.tokens, tokens as usize);
        if has < target {
            store.with(|core| {
                let path = core.session(of)?.path();
                let more = path.tokens().get(has..target).ok_or(Status::Invalid)?.to_vec();
                core.append(self.session, &more)
            })?;
            self.tokens = target;
        }
        Ok(())
    }

    fn submit(
        &self,
        store: &Store,
        kind: TransferKind,
        (layer, first, tokens): (u32, u32, u32),
        count: usize,
        rows: &mut [u8],
    ) -> Result<OpRef> {
        let bytes = self.row_bytes as u64;
        let k = PlaneView {
            place: Tokens::At(rows.as_mut_ptr() as u64),
            tokens: count as u32,
            heads: 1,
            run_bytes: bytes,
            token_stride_bytes: bytes,
            head_stride_bytes: bytes,
            memory: Memory::Host,
        };
        let range = CellRange {
            first_token: first.into(),
            tokens: tokens.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views::from(vec![LayerViews { k, v: None }])),
            after: None,
        };
        let ops = store.submit(self.session, kind, Level::Ram, range, &OpOpts::default())?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Drops puts that have ended, and waits for the oldest beyond `most`.
    fn reap(&mut self, most: usize) {
        let mut wait = self.puts.len().saturating_sub(most);
        self.puts.retain(|(op, _)| {
            // The state is read once: an op that ends between two reads would be dropped without
            // its end.
            let is_done = wait > 0 || op.info().state & RELEASED != 0;
            wait = wait.saturating_sub(1);
            if is_done {
                // After a failed put, policies do not know the block.
                let _ = end(op);
            }
            !is_done
        });
    }
}

/// Passes the state in a row to each policy.
fn apply_row(
    policies: &mut Policies,
    row: &[u8],
    take: impl Fn(&mut Box<dyn Sparse>, &[u8]) -> Result<()>,
) -> Result<()> {
    let Some(mut rest) = row.strip_prefix(&MAGIC) else { return Err(Status::NotFound.into()) };
    for policy in policies.all() {
        let Some((bytes, after)) = split(rest) else { return Err(Status::Corrupt.into()) };
        rest = after;
        take(policy, bytes)?;
    }
    Ok(())
}

/// The state of one policy, and the rest of the row.
fn split(row: &[u8]) -> Option<(&[u8], &[u8])> {
    let (bytes, rest) = row.split_first_chunk::<WORD>()?;
    rest.split_at_checked(u32::from_le_bytes(*bytes) as usize)
}

/// Whether a policy needs the keys of blocks.
pub(super) fn needs_block_keys(policy: &dyn Sparse) -> bool {
    let traits = policy.traits();
    traits.rows.is_none() && traits.needs & needs::KEYS != 0
}

/// The longest row, measured with a block in which all bytes of keys are set. 0 if the policies
/// store nothing, or if one that needs keys does not.
fn max_row_bytes(geometry: &Geometry, policies: &Policies) -> Result<usize> {
    let block = geometry.shape.block_tokens;
    let mut keys: Vec<u64> = Vec::new();
    let words = (u64::from(block) * geometry.k_bytes).div_ceil(8) as usize;
    keys.try_reserve_exact(words).map_err(|_| Status::NoMem)?;
    // A finite number in any data type, without a zero byte.
    keys.resize(words, 0x3D3D_3D3D_3D3D_3D3D);
    let heads = geometry.shape.key_heads;
    let address = keys.as_mut_ptr().expose_provenance() as u64;
    let plane = canonical((address, Memory::Host), block, heads, geometry.k_bytes);
    let (mut max_row_bytes, mut kept_bytes) = (0, 0);
    let both_policies: [&Option<Box<dyn Sparse>>; 2] = [&policies.prefill, &policies.decode];
    for policy in both_policies.into_iter().flatten() {
        let mut probe = policy.fork()?;
        let mut most = 0;
        for layer in 0..geometry.shape.layers {
            // SAFETY: `keys`, which nothing writes.
            let rows = unsafe { rows_of(geometry, &plane)? };
            let mut bytes = Vec::new();
            // A policy with rows of its own stores nothing for these.
            if probe.seal(layer, 0, 0, &rows).is_ok() && probe.save(layer, 0, &mut bytes).is_ok() {
                most = most.max(bytes.len());
            }
        }
        if most == 0 && needs_block_keys(&**policy) {
            return Ok(0);
        }
        (max_row_bytes, kept_bytes) = (max_row_bytes + WORD + most, kept_bytes + most);
    }
    Ok(if kept_bytes > 0 { (MAGIC.len() + max_row_bytes).next_multiple_of(8) } else { 0 })
}
