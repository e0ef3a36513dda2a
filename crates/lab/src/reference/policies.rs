//! The sparse policies of a sequence, driven by their traits alone.

use kvtier::attention::Rows;
use kvtier::base::spec::Spec;
use kvtier::base::status::{Error, Result, Status};
use kvtier::sparse::{
    Context, Index, OwnRows, RetainedTokens, Scope, Shape, Sparse, Traits, caps, needs, registry,
};

/// Capabilities used for the prompt only.
pub const PREFILL: u32 = caps::LOAD_PREFILL | caps::INDEX_PREFILL | caps::EVICT_PREFILL;
/// Capabilities used for decoding only.
pub const DECODE: u32 = caps::LOAD_DECODE | caps::INDEX_DECODE | caps::EVICT_DECODE;

/// A policy and the [`caps`] that are used of it.
pub struct Active {
    /// The policy.
    pub policy: Box<dyn Sparse>,
    /// Its traits.
    pub traits: Traits,
    /// The capabilities that are used.
    pub used_caps: u32,
}

/// The policies of one sequence. Every policy is notified of everything that it needs; `used_caps`
/// limits the decisions that it makes.
#[derive(Default)]
pub struct Policies {
    /// The policies.
    pub all: Vec<Active>,
}

/// Creates the policy of a spec.
pub fn make(spec: &str, shape: &Shape) -> Result<Box<dyn Sparse>> {
    registry::make(&Spec::parse(spec)?, shape)
}

/// The error for something that this engine does not support.
pub fn unsupported(text: impl Into<String>) -> Error {
    Error::new(Status::Unsupported, text)
}

impl Policies {
    /// One policy, for everything that it can do.
    pub fn single(policy: Box<dyn Sparse>) -> Policies {
        Policies::default().with(policy, PREFILL | DECODE)
    }

    /// Adds a policy for some of its capabilities.
    pub fn with(mut self, policy: Box<dyn Sparse>, used_caps: u32) -> Policies {
        let traits = policy.traits();
        self.all.push(Active { policy, traits, used_caps: used_caps & traits.caps });
        self
    }

    /// Checks that this engine supports the policies.
    pub fn check(&self, shape: &Shape) -> Result<()> {
        for Active { traits, used_caps, .. } in &self.all {
            let evicts = used_caps & (caps::EVICT_PREFILL | caps::EVICT_DECODE) != 0;
            if evicts && traits.scope == Scope::QueryHead && shape.query_heads != shape.key_heads {
                return Err(unsupported(
                    "query heads share keys here, so a policy cannot evict by query head",
                ));
            }
            if traits.needs & needs::VALUES != 0 {
                return Err(unsupported("policies that need values are not supported"));
            }
            if traits.rotates {
                return Err(unsupported("policies that rotate keys again are not supported"));
            }
            let indexer = (shape.query_heads, 1, shape.key_heads * shape.key_dim);
            let is_ours = |own: OwnRows| (own.query_heads, own.key_heads, own.dim) == indexer;
            if !traits.rows.is_none_or(is_ours) {
                return Err(unsupported("the indexer has rows of another shape"));
            }
        }
        Ok(())
    }

    /// The policy used for a capability.
    pub fn active_for(&mut self, cap: u32) -> Option<&mut Active> {
        self.all.iter_mut().find(|active| active.used_caps & cap != 0)
    }

    /// The policies that need a notification.
    pub fn needing(&mut self, need: u32) -> impl Iterator<Item = &mut Active> {
        self.all.iter_mut().filter(move |active| active.traits.needs & need != 0)
    }

    /// Numbers of last queries whose sums of attention weights are needed, each once.
    pub fn sum_queries(&self, is_prefill: bool) -> Vec<u32> {
        let all = self.all.iter().map(|active| active.sum_queries(is_prefill));
        let mut all: Vec<u32> = all.filter(|&queries| queries > 0).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The tokens to keep of a layer, if a policy evicts.
    pub fn evict(&mut self, layer: u32, context: &Context) -> Result<Option<RetainedTokens>> {
        let cap = if context.is_prefill { caps::EVICT_PREFILL } else { caps::EVICT_DECODE };
        let mut retained = RetainedTokens::default();
        let Some(active) = self.active_for(cap) else { return Ok(None) };
        if !active.policy.evict(layer, context, &mut retained)? {
            return Ok(None);
        }
        // A policy used for the prompt only is not notified of later tokens.
        let later = if context.is_prefill { u32::MAX } else { DECODE };
        for active in self.all.iter_mut().filter(|active| active.used_caps & later != 0) {
            active.policy.evicted(layer, &retained)?;
        }
        Ok(Some(retained))
    }
}

impl Active {
    /// Number of last queries whose sums the policy needs; 0 = none.
    pub fn sum_queries(&self, is_prefill: bool) -> u32 {
        let traits = &self.traits;
        if is_prefill || traits.caps & caps::EVICT_DECODE != 0 { traits.sum_queries } else { 0 }
    }

    /// Requests an index from the policy.
    pub fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
    ) -> Result<Index> {
        let mut index = Index::default();
        self.policy.index(layer, queries, keys, context, &mut index)?;
        Ok(index)
    }
}
