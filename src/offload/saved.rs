//! What policies know of blocks, kept in the store beside them: it moves, is paid for and
//! comes back as everything there.
//!
//! It has a namespace of its own, whose name follows from that of the blocks and from what the
//! policies are called: the state of a layer in a chunk is what they know of that block. It
//! may leave before the block does, or not come: a policy takes what it does not know for
//! wanted. So nothing here is an error of the offload's.
//!
//! A row, little-endian, padded with zeros: `KVTS` (4), then for each policy how many bytes
//! (4) and the bytes.

use crate::base::op::{OpOpts, OpRef, RELEASED};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Memory;
use crate::format::keys::{Key, sparse_key};
use crate::meta::dtype::Dtype;
use crate::meta::layout::{Group, Layout};
use crate::offload::end;
use crate::offload::opts::{Geometry, Policies};
use crate::offload::source::{canonical, rows_of};
use crate::sparse::{Sparse, needs};
use crate::store::handle::Store;
use crate::store::state::session::{LayerViews, PlaneView, Tokens, Views};
use crate::store::state::{
    CellRange, Level, SessionOpts, SpaceOpts, StoreState, TransferKind, Wanted,
};

const MAGIC: [u8; 4] = *b"KVTS";
const WORD: usize = 4;
/// Puts under way at once; the oldest is waited for then.
const MOST_PUTS: usize = 256;

/// Where it is kept.
pub(super) struct Saved {
    space: u32,
    session: u32,
    /// Tokens of the session.
    tokens: usize,
    /// Bytes of a row.
    row_bytes: usize,
    puts: Vec<(OpRef, Vec<u8>)>,
}

impl Saved {
    /// A place for what policies know; none if they keep nothing with blocks.
    pub fn open(
        store: &Arc<Store>,
        session: u32,
        recipe: &str,
        geometry: &Geometry,
        policies: &Policies,
    ) -> Result<Option<Saved>> {
        if recipe.is_empty() {
            return Ok(None);
        }
        let row_bytes = longest(geometry, policies)?;
        if row_bytes == 0 {
            return Ok(None);
        }
        let layers = 0..geometry.shape.layers as u16;
        let group = Group::state(layers, row_bytes as u64, Dtype::Bytes);
        let layout = Layout::new(geometry.shape.block_tokens, vec![group])?;
        store.with(|core| {
            let space = core.session(session)?.space();
            let key = core.space(space).map_or(Key([0; 32]), |space| space.key);
            let opts = SpaceOpts { key: sparse_key(&key, recipe), layout, holes: true };
            Saved::open_in(core, &opts, row_bytes).map(Some)
        })
    }

    /// The same place, for a session that goes on from there: it is told the tokens when it
    /// keeps something.
    pub fn fork(&self, store: &Store) -> Result<Saved> {
        store.with(|core| {
            let Some(space) = core.space(self.space) else { return Err(Status::NotFound.into()) };
            let (key, holes) = (space.key, space.holes);
            let Some(table) = core.table_of(self.space) else {
                return Err(Status::NotFound.into());
            };
            let opts = SpaceOpts { key, layout: table.layout.clone(), holes };
            Saved::open_in(core, &opts, self.row_bytes)
        })
    }

    fn open_in(core: &mut StoreState, opts: &SpaceOpts, row_bytes: usize) -> Result<Saved> {
        let space = core.open_space(opts)?;
        let session = match core.open_session(space, &SessionOpts::default()) {
            Ok(session) => session,
            Err(error) => {
                core.close_space(space);
                return Err(error);
            }
        };
        Ok(Saved { space, session, tokens: 0, row_bytes, puts: Vec::new() })
    }

    /// Keeps what policies know of blocks of a layer that begin at a token.
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
                // Longer than any was said to be: it is not kept.
                rows.truncate(start);
            }
            rows.resize(start + self.row_bytes, 0);
        }
        self.follow(store, of, first + tokens)?;
        let op = self.submit(store, TransferKind::Put, (layer, first, tokens), count, &mut rows)?;
        self.reap(MOST_PUTS);
        self.puts.push((op, rows));
        Ok(())
    }

    /// Tells policies of blocks of a layer what was kept of them, up to a token; the blocks of
    /// which that was not there for all of them.
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
        self.follow(store, of, tokens)?;
        let op = self.submit(store, TransferKind::Get, (layer, 0, tokens), count, &mut rows)?;
        // What does not come stays zero.
        let _ = end(&op);
        let mut unknown = Vec::new();
        unknown.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        for (id, row) in (0u32..).zip(rows.chunks_exact(self.row_bytes)) {
            // It was never there, or has left before the block: that is normal.
            if tell(policies, row, |policy, bytes| policy.load(layer, id, id * block, bytes))
                .is_err()
            {
                unknown.push(id);
            }
        }
        Ok(unknown)
    }

    /// The session is cut.
    pub fn truncate(&mut self, store: &Store, tokens: u32) -> Result<()> {
        self.reap(0);
        let tokens = self.tokens.min(tokens as usize);
        store.with(|core| core.truncate(self.session, tokens as u64))?;
        self.tokens = tokens;
        Ok(())
    }

    /// Ends it: waits for puts under way.
    pub fn close(&mut self, store: &Store) {
        self.reap(0);
        let closed = store.let_go(|core| {
            core.close_space(self.space);
            core.close_session(self.session)
        });
        if let Err(error) = closed {
            log::error!("where policies keep what they know was not closed: {error}");
        }
    }

    /// Has the tokens of another session, up to one.
    fn follow(&mut self, store: &Store, of: u32, tokens: u32) -> Result<()> {
        let (has, wanted) = (self.tokens, tokens as usize);
        if has < wanted {
            store.with(|core| {
                let path = core.session(of)?.path();
                let more = path.tokens().get(has..wanted).ok_or(Status::Invalid)?.to_vec();
                core.append(self.session, &more)
            })?;
            self.tokens = wanted;
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
        let what = CellRange {
            first_token: first.into(),
            tokens: tokens.into(),
            first_layer: layer as usize,
            layers: 1,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views(vec![LayerViews { k, v: None }])),
            after: None,
        };
        let ops = store.submit(self.session, kind, Level::Ram, what, &OpOpts::default())?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Lets puts go that have ended, and waits for the oldest of more than `most`.
    fn reap(&mut self, most: usize) {
        let mut wait = self.puts.len().saturating_sub(most);
        self.puts.retain(|(op, _)| {
            // Asked once: one that ends between two looks would be dropped and never ended.
            let goes = wait > 0 || op.info().state & RELEASED != 0;
            wait = wait.saturating_sub(1);
            if goes {
                // Where it failed a policy will not know that block.
                let _ = end(op);
            }
            !goes
        });
    }
}

/// Has each policy take its bytes of a row.
fn tell(
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

/// The bytes of a policy, and what is behind them.
fn split(row: &[u8]) -> Option<(&[u8], &[u8])> {
    let (bytes, rest) = row.split_first_chunk::<WORD>()?;
    rest.split_at_checked(u32::from_le_bytes(*bytes) as usize)
}

/// Whether a policy wants to see the keys of blocks.
pub(super) fn wants_keys(policy: &dyn Sparse) -> bool {
    let traits = policy.traits();
    traits.rows.is_none() && traits.needs & needs::KEYS != 0
}

/// The longest row that policies can make, by what they make of a block of numbers of all
/// bits; 0 if they keep nothing, or one of them keeps nothing of what it wants to see.
fn longest(geometry: &Geometry, policies: &Policies) -> Result<usize> {
    let block = geometry.shape.block_tokens;
    let mut keys: Vec<u64> = Vec::new();
    let words = (u64::from(block) * geometry.k_bytes).div_ceil(8) as usize;
    keys.try_reserve_exact(words).map_err(|_| Status::NoMem)?;
    // A sound number of any type, none of whose bytes is zero.
    keys.resize(words, 0x3D3D_3D3D_3D3D_3D3D);
    let heads = geometry.shape.key_heads;
    let address = keys.as_mut_ptr().expose_provenance() as u64;
    let plane = canonical((address, Memory::Host), block, heads, geometry.k_bytes);
    let (mut longest, mut kept) = (0, 0);
    let both: [&Option<Box<dyn Sparse>>; 2] = [&policies.prefill, &policies.decode];
    for policy in both.into_iter().flatten() {
        let mut trial = policy.fork()?;
        let mut most = 0;
        for layer in 0..geometry.shape.layers {
            // SAFETY: `keys`, which nobody writes.
            let rows = unsafe { rows_of(geometry, &plane)? };
            let mut bytes = Vec::new();
            // One that wants rows of its own keeps nothing of these.
            if trial.seal(layer, 0, 0, &rows).is_ok() && trial.save(layer, 0, &mut bytes).is_ok() {
                most = most.max(bytes.len());
            }
        }
        if most == 0 && wants_keys(&**policy) {
            return Ok(0);
        }
        (longest, kept) = (longest + WORD + most, kept + most);
    }
    Ok(if kept > 0 { (MAGIC.len() + longest).next_multiple_of(8) } else { 0 })
}
