//! The sparse policies of a sequence, as an engine drives them: by their traits alone.

use kvtier::attention::Rows;
use kvtier::base::spec::Spec;
use kvtier::base::status::{Error, Result, Status};
use kvtier::sparse::{
    Context, Index, Keep, OwnRows, Scope, Shape, Sparse, Traits, caps, needs, registry,
};

/// What only the prompt asks of a policy.
pub const IN_PROMPT: u32 = caps::LOAD_PREFILL | caps::INDEX_PREFILL | caps::EVICT_PREFILL;
/// What only the text behind it does.
pub const BEHIND: u32 = caps::LOAD_DECODE | caps::INDEX_DECODE | caps::EVICT_DECODE;

/// A policy and which of its [`caps`] it is asked for.
pub struct Active {
    /// The policy.
    pub policy: Box<dyn Sparse>,
    /// What it is like.
    pub traits: Traits,
    /// What it is asked for.
    pub asked: u32,
}

/// The policies of one sequence. All are told all they need; who is asked, `asked` says.
#[derive(Default)]
pub struct Policies {
    /// All of them.
    pub all: Vec<Active>,
}

/// The policy of a spec.
pub fn make(spec: &str, shape: &Shape) -> Result<Box<dyn Sparse>> {
    registry::make(&Spec::parse(spec)?, shape)
}

/// An error for what this engine cannot do.
pub fn unsupported(text: impl Into<String>) -> Error {
    Error::new(Status::Unsupported, text)
}

impl Policies {
    /// One for all it can do.
    pub fn one(policy: Box<dyn Sparse>) -> Policies {
        Policies::default().with(policy, IN_PROMPT | BEHIND)
    }

    /// One more, asked for some of what it can do.
    pub fn with(mut self, policy: Box<dyn Sparse>, asked: u32) -> Policies {
        let traits = policy.traits();
        self.all.push(Active { policy, traits, asked: asked & traits.caps });
        self
    }

    /// Whether this engine can do what they ask for.
    pub fn check(&self, shape: &Shape) -> Result<()> {
        for Active { traits, asked, .. } in &self.all {
            let evicts = asked & (caps::EVICT_PREFILL | caps::EVICT_DECODE) != 0;
            if evicts && traits.scope == Scope::QueryHead && shape.query_heads != shape.key_heads {
                return Err(unsupported("query heads share keys here: they cannot keep their own"));
            }
            if traits.needs & needs::VALUES != 0 {
                return Err(unsupported("policies cannot be told of values"));
            }
            if traits.rotates {
                return Err(unsupported("keys stay as their positions in the text turned them"));
            }
            let indexer = (shape.query_heads, 1, shape.key_heads * shape.key_dim);
            let is_ours = |own: OwnRows| (own.query_heads, own.key_heads, own.dim) == indexer;
            if !traits.rows.is_none_or(is_ours) {
                return Err(unsupported("the indexer here has other rows"));
            }
        }
        Ok(())
    }

    /// The one that is asked for something.
    pub fn asked(&mut self, cap: u32) -> Option<&mut Active> {
        self.all.iter_mut().find(|active| active.asked & cap != 0)
    }

    /// Those that have to be told something.
    pub fn told(&mut self, need: u32) -> impl Iterator<Item = &mut Active> {
        self.all.iter_mut().filter(move |active| active.traits.needs & need != 0)
    }

    /// Of how many last queries sums of attention are waited for; each number once.
    pub fn sum_queries(&self, is_prefill: bool) -> Vec<u32> {
        let all = self.all.iter().map(|active| active.sum_queries(is_prefill));
        let mut all: Vec<u32> = all.filter(|&queries| queries > 0).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What stays of a layer, if one that is asked says so.
    pub fn evict(&mut self, layer: u32, context: &Context) -> Result<Option<Keep>> {
        let cap = if context.is_prefill { caps::EVICT_PREFILL } else { caps::EVICT_DECODE };
        let mut keep = Keep::default();
        let Some(active) = self.asked(cap) else { return Ok(None) };
        if !active.policy.evict(layer, context, &mut keep)? {
            return Ok(None);
        }
        // Who is only asked in the prompt knows nothing of what came since.
        let later = if context.is_prefill { u32::MAX } else { BEHIND };
        for active in self.all.iter_mut().filter(|active| active.asked & later != 0) {
            active.policy.evicted(layer, &keep)?;
        }
        Ok(Some(keep))
    }
}

impl Active {
    /// Of how many last queries it waits for sums; 0 = it does not.
    pub fn sum_queries(&self, is_prefill: bool) -> u32 {
        let traits = &self.traits;
        if is_prefill || traits.caps & caps::EVICT_DECODE != 0 { traits.sum_queries } else { 0 }
    }

    /// Asks for an index.
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
