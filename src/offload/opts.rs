//! Options of an offload, and the check that they match the namespace.

use crate::base::clock::Clock;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::meta::dtype::Dtype;
use crate::meta::layout::Rule;
use crate::offload::memory::RingPlacement;
use crate::sparse::{Kind, Shape, Sparse, caps, needs};
use crate::store::handle::Store;
use crate::store::state::Level;

/// Most buffers of a ring.
pub const MAX_BUFFERS: u32 = 256;
/// Alignment of planes, in bytes.
const ALIGN: u64 = 64;

/// Sparse policies that decide what is loaded and retained: one for prefill, one for decode.
#[derive(Default)]
pub struct Policies {
    /// For prefill; none = all blocks are loaded.
    pub prefill: Option<Box<dyn Sparse>>,
    /// For decode; none = all blocks are loaded.
    pub decode: Option<Box<dyn Sparse>>,
}

impl Policies {
    /// The policy for a phase.
    pub(super) fn of(&mut self, is_prefill: bool) -> Option<&mut Box<dyn Sparse>> {
        if is_prefill { self.prefill.as_mut() } else { self.decode.as_mut() }
    }

    /// Both policies.
    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Sparse>> {
        [&mut self.prefill, &mut self.decode].into_iter().flatten()
    }

    /// Whether a policy needs keys.
    pub(super) fn need_keys(&self) -> bool {
        let policies_in_use = [&self.prefill, &self.decode].into_iter().flatten();
        policies_in_use.into_iter().any(|policy| policy.traits().needs & needs::KEYS != 0)
    }
}

/// Options of an offload.
pub struct Opts {
    /// The session whose KV is kept.
    pub session: u32,
    /// Shape of the model's attention; a block is a chunk of the namespace.
    pub shape: Shape,
    /// Data type of keys and values.
    pub dtype: Dtype,
    /// Buffers of the ring, 1 to 256.
    pub buffers: u32,
    /// Tokens of a buffer, rounded up to whole blocks. The tail has room in addition.
    pub buffer_tokens: u32,
    /// Memory of buffers and tails.
    pub placement: RingPlacement,
    /// The level at which a put is complete.
    pub level: Level,
    /// Sparse policies.
    pub policies: Policies,
    /// Name of the policies with their parameters. Policy state of blocks is stored with the
    /// blocks, and shared by all offloads of the same name. Empty = not stored.
    pub recipe: String,
    /// The clock that measures waits.
    pub clock: Clock,
}

/// Sizes derived from the options.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub shape: Shape,
    pub dtype: Dtype,
    /// Tokens of a buffer, without its tail.
    pub buffer_tokens: u32,
    /// Bytes of a token's K and V; V is 0 if it is a part of K.
    pub k_bytes: u64,
    pub v_bytes: u64,
}

impl Geometry {
    /// Bytes of a token's K and V.
    pub fn token_bytes(&self) -> u64 {
        self.k_bytes + self.v_bytes
    }

    /// Tokens of a buffer with its tail.
    pub fn slot_tokens(&self) -> u32 {
        self.buffer_tokens + self.shape.block_tokens
    }

    /// Offset of V behind K, for `tokens` tokens.
    pub fn v_at(&self, tokens: u32) -> u64 {
        (u64::from(tokens) * self.k_bytes).next_multiple_of(ALIGN)
    }

    /// Bytes of both planes, for `tokens` tokens.
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

    /// Bytes of the ring and of two tails for each layer.
    pub fn all_bytes(&self, buffers: u32) -> Result<u64> {
        let ring = u64::from(buffers).checked_mul(self.slot_bytes());
        let tails = u64::from(self.shape.layers).checked_mul(2 * self.tail_bytes());
        let all = ring.zip(tails).and_then(|(ring, tails)| ring.checked_add(tails));
        all.ok_or_else(|| Status::Limit.into())
    }
}

/// The sizes, if the options match the session's namespace.
pub(super) fn geometry_of(store: &Arc<Store>, opts: &Opts) -> Result<Geometry> {
    let shape = opts.shape;
    shape.check()?;
    if opts.buffers == 0 || opts.buffers > MAX_BUFFERS {
        fail!(Invalid, "{} buffers: accepted are 1 to {MAX_BUFFERS}", opts.buffers);
    }
    if opts.buffer_tokens == 0 || opts.buffer_tokens > shape.max_tokens {
        let (n, most) = (opts.buffer_tokens, shape.max_tokens);
        fail!(Invalid, "buffer_tokens is {n}: accepted are 1 to max_tokens ({most})");
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
        let namespace = core.session(opts.session)?.namespace();
        let Some(table) = core.table_of(namespace) else { return Err(Status::NotFound.into()) };
        let layout = &table.layout;
        if layout.chunk_tokens() != shape.block_tokens || layout.layers() != shape.layers as usize {
            fail!(
                Invalid,
                "{} layers in blocks of {} tokens: the namespace has {} layers in chunks of {}",
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
                    "layer {layer} has {} and {} bytes of {} a token, and the shape {k_bytes} and \
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
    // Longer buffers than the sequence were rejected above, since they would never be filled.
    let buffer_tokens = opts.buffer_tokens.next_multiple_of(shape.block_tokens);
    Ok(Geometry { shape, dtype: opts.dtype, buffer_tokens, k_bytes, v_bytes })
}

/// Checks that a policy can do something in its phase.
fn check_policies(policies: &Policies) -> Result<()> {
    let prefill = caps::LOAD_PREFILL | caps::INDEX_PREFILL | caps::EVICT_PREFILL;
    let decode = caps::LOAD_DECODE | caps::INDEX_DECODE | caps::EVICT_DECODE | caps::EVICT_PREFILL;
    let all = [("prefill", &policies.prefill, prefill), ("decode", &policies.decode, decode)];
    for (when, policy, phase_caps) in all {
        let Some(policy) = policy else { continue };
        let caps = policy.traits().caps;
        if caps != 0 && caps & phase_caps == 0 {
            fail!(Unsupported, "the policy for {when} has no function in {when}");
        }
    }
    Ok(())
}
