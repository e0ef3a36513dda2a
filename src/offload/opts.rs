//! What is said when an offload is opened, and whether it fits the namespace.

use crate::base::clock::Clock;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::meta::dtype::Dtype;
use crate::meta::layout::Rule;
use crate::offload::home::Home;
use crate::sparse::{Kind, Shape, Sparse, caps, needs};
use crate::store::handle::Store;
use crate::store::state::Level;

/// Most buffers of a ring.
pub const MAX_BUFFERS: u32 = 256;
/// Addresses of planes are multiples of this.
const ALIGN: u64 = 64;

/// Who says what is loaded and kept: one policy while the prompt is computed, one while text
/// is written.
#[derive(Default)]
pub struct Policies {
    /// For prompts; none = all is loaded.
    pub prefill: Option<Box<dyn Sparse>>,
    /// For text.
    pub decode: Option<Box<dyn Sparse>>,
}

impl Policies {
    /// The one that is asked.
    pub(super) fn of(&mut self, is_prefill: bool) -> Option<&mut Box<dyn Sparse>> {
        if is_prefill { self.prefill.as_mut() } else { self.decode.as_mut() }
    }

    /// Both.
    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Sparse>> {
        [&mut self.prefill, &mut self.decode].into_iter().flatten()
    }

    /// Whether one of them has to see keys.
    pub(super) fn need_keys(&self) -> bool {
        let both = [&self.prefill, &self.decode].into_iter().flatten();
        both.into_iter().any(|policy| policy.traits().needs & needs::KEYS != 0)
    }
}

/// What is said when one is opened.
pub struct Opts {
    /// The session whose KV it has.
    pub session: u32,
    /// The model's attention; a block is a chunk.
    pub shape: Shape,
    /// What the numbers of keys and values are.
    pub dtype: Dtype,
    /// Buffers of the ring.
    pub buffers: u32,
    /// Tokens of a buffer, rounded up to blocks; the tail has room beside them.
    pub buffer_tokens: u32,
    /// Where buffers and tails are.
    pub home: Home,
    /// When a put has ended.
    pub level: Level,
    /// Who says what is loaded and kept.
    pub policies: Policies,
    /// What the policies are called, with their parameters: what they know of a block is kept
    /// with it in the store, for all of the same name. Empty = it is not kept.
    pub recipe: String,
    /// By which time waits are measured.
    pub clock: Clock,
}

/// Sizes that follow from what was said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub shape: Shape,
    pub dtype: Dtype,
    /// Tokens of a buffer, without its tail.
    pub buffer_tokens: u32,
    /// Bytes of K, and of V, of a token; V is 0 where it is a part of K.
    pub k_bytes: u64,
    pub v_bytes: u64,
}

impl Geometry {
    /// Bytes of a token's K and V.
    pub fn token_bytes(&self) -> u64 {
        self.k_bytes + self.v_bytes
    }

    /// Tokens that a buffer has room for, the tail among them.
    pub fn slot_tokens(&self) -> u32 {
        self.buffer_tokens + self.shape.block_tokens
    }

    /// Where V begins, behind K, in room for so many tokens.
    pub fn v_at(&self, tokens: u32) -> u64 {
        (u64::from(tokens) * self.k_bytes).next_multiple_of(ALIGN)
    }

    /// Bytes of room for so many tokens.
    pub fn planes_bytes(&self, tokens: u32) -> u64 {
        self.v_at(tokens) + (u64::from(tokens) * self.v_bytes).next_multiple_of(ALIGN)
    }

    /// Bytes of a buffer.
    pub fn slot_bytes(&self) -> u64 {
        self.planes_bytes(self.slot_tokens())
    }

    /// Bytes of a tail.
    pub fn tail_bytes(&self) -> u64 {
        self.planes_bytes(self.shape.block_tokens)
    }

    /// Bytes of a ring, and of two tails for each layer.
    pub fn all_bytes(&self, buffers: u32) -> Result<u64> {
        let ring = u64::from(buffers).checked_mul(self.slot_bytes());
        let tails = u64::from(self.shape.layers).checked_mul(2 * self.tail_bytes());
        let all = ring.zip(tails).and_then(|(ring, tails)| ring.checked_add(tails));
        all.ok_or_else(|| Status::Limit.into())
    }
}

/// Sizes, if what is said fits the session's namespace.
pub(super) fn geometry_of(store: &Arc<Store>, opts: &Opts) -> Result<Geometry> {
    let shape = opts.shape;
    shape.check()?;
    if opts.buffers == 0 || opts.buffers > MAX_BUFFERS {
        fail!(Invalid, "{} buffers, it can be 1 to {MAX_BUFFERS}", opts.buffers);
    }
    if opts.buffer_tokens == 0 || opts.buffer_tokens > shape.max_tokens {
        let (n, most) = (opts.buffer_tokens, shape.max_tokens);
        fail!(Invalid, "buffer_tokens is {n}, it can be 1 to max_tokens ({most})");
    }
    let bytes = |heads: u32, dim: u32| {
        let of_head = opts.dtype.bytes_of(u64::from(dim));
        of_head.map(|bytes| bytes * u64::from(heads)).ok_or(Status::Invalid)
    };
    let k_bytes = bytes(shape.key_heads, shape.key_dim)?;
    let v_bytes = match shape.kind {
        Kind::Split => bytes(shape.key_heads, shape.value_dim)?,
        Kind::Latent => 0,
    };
    store.with(|core| {
        let space = core.session(opts.session)?.space();
        let Some(table) = core.table_of(space) else { return Err(Status::NotFound.into()) };
        let layout = &table.layout;
        if layout.chunk_tokens() != shape.block_tokens || layout.layers() != shape.layers as usize {
            fail!(
                Invalid,
                "{} layers in blocks of {} tokens; the namespace has {} in chunks of {}",
                shape.layers,
                shape.block_tokens,
                layout.layers(),
                layout.chunk_tokens()
            );
        }
        for layer in 0..layout.layers() {
            let Some(group) = layout.group(layer) else { return Err(Status::Invalid.into()) };
            let is = [group.k_bytes, group.v_bytes] == [k_bytes, v_bytes];
            if !is
                || group.rule == Rule::State
                || ![opts.dtype, Dtype::Bytes].contains(&group.dtype)
            {
                fail!(
                    Invalid,
                    "layer {layer} has {} and {} bytes of {} a token, the shape {k_bytes} and \
                     {v_bytes} of {}",
                    group.k_bytes,
                    group.v_bytes,
                    group.dtype.name(),
                    opts.dtype.name()
                );
            }
        }
        Ok(())
    })?;
    check_policies(&opts.policies)?;
    // More than there are tokens would never be filled.
    let buffer_tokens = opts.buffer_tokens.next_multiple_of(shape.block_tokens);
    Ok(Geometry { shape, dtype: opts.dtype, buffer_tokens, k_bytes, v_bytes })
}

/// A policy must be able to do something where it is asked.
fn check_policies(policies: &Policies) -> Result<()> {
    let prefill = caps::LOAD_PREFILL | caps::INDEX_PREFILL | caps::EVICT_PREFILL;
    let decode = caps::LOAD_DECODE | caps::INDEX_DECODE | caps::EVICT_DECODE | caps::EVICT_PREFILL;
    let all = [("prefill", &policies.prefill, prefill), ("decode", &policies.decode, decode)];
    for (when, policy, wanted) in all {
        let Some(policy) = policy else { continue };
        let caps = policy.traits().caps;
        if caps != 0 && caps & wanted == 0 {
            fail!(Unsupported, "the policy for {when} does nothing in {when}");
        }
    }
    Ok(())
}
