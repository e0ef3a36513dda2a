//! A policy behind checks: every call of an engine is validated against the shape and the traits
//! before the policy sees it, and answers are validated before the engine sees them.

use crate::attention::{Keys, Prefill, Problem, Rows};
use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::index::{Context, Index};
use crate::sparse::numbers::{reserve, zeros};
use crate::sparse::prefill_inputs::check_context;
use crate::sparse::ranks::ascending;
use crate::sparse::{RetainedTokens, Shape, Sparse, Stats, Traits, caps, registry};

/// A policy with the shape and traits that its calls are checked against.
pub struct CheckedPolicy {
    policy: Box<dyn Sparse>,
    shape: Shape,
    traits: Traits,
    /// Sorted candidates, to find duplicates.
    sorted: Vec<u32>,
}

/// Fails with `Unsupported` if the policy has none of the required capabilities.
fn check_cap(has: u32, phase_caps: u32, decision: &str) -> Result<()> {
    if has & phase_caps == 0 {
        fail!(Unsupported, "the policy does not decide {decision} in this phase: see its caps");
    }
    Ok(())
}

impl CheckedPolicy {
    /// Makes the policy that a spec describes.
    pub fn open(spec: &str, shape: &Shape) -> Result<CheckedPolicy> {
        let policy = registry::make(&Spec::parse(spec)?, shape)?;
        Ok(CheckedPolicy::of(policy, shape))
    }

    /// Wraps a policy that was made elsewhere.
    pub fn of(policy: Box<dyn Sparse>, shape: &Shape) -> CheckedPolicy {
        let traits = policy.traits();
        CheckedPolicy { policy, shape: *shape, traits, sorted: Vec::new() }
    }

    /// Capabilities and needs.
    pub fn traits(&self) -> &Traits {
        &self.traits
    }

    /// The model's attention shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Counters of selections.
    pub fn stats(&self) -> Stats {
        self.policy.stats()
    }

    /// Bytes of state of the sequence.
    pub fn state_bytes(&self) -> u64 {
        self.policy.state_bytes()
    }

    fn check_end(&self, first: u32, tokens: u32) -> Result<()> {
        self.shape.check_tokens(u64::from(first) + u64::from(tokens))
    }

    fn check_context(&self, layer: u32, context: &Context) -> Result<()> {
        self.shape.check_layer(layer)?;
        self.check_end(0, context.tokens)
    }

    /// As [`Sparse::append`].
    pub fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let (heads, dim) = self.traits.key_rows(&self.shape);
        self.shape.check_rows("keys", layer, keys, heads, dim)?;
        self.check_end(first, keys.tokens())?;
        self.policy.append(layer, first, keys)
    }

    fn check_block(&self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.shape.check_keys(layer, keys)?;
        let (tokens, block) = (keys.tokens(), self.shape.block_tokens);
        if tokens == 0 || tokens > block {
            fail!(Invalid, "a block has {tokens} tokens, it must have 1 to {block}");
        }
        self.check_end(first, tokens)
    }

    /// As [`Sparse::seal`].
    pub fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        self.check_block(layer, first, keys)?;
        self.policy.seal(layer, id, first, keys)
    }

    /// As [`Sparse::seal_all`].
    pub fn seal_all(&mut self, id: u32, first: u32, keys: &[Rows<'_>]) -> Result<()> {
        if keys.len() != self.shape.layers as usize {
            fail!(
                Invalid,
                "keys of {} layers were passed, the model has {}",
                keys.len(),
                self.shape.layers
            );
        }
        for (layer, keys) in (0..).zip(keys) {
            self.check_block(layer, first, keys)?;
        }
        self.policy.seal_all(id, first, keys)
    }

    /// As [`Sparse::observe`].
    pub fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        self.shape.check_layer(layer)?;
        self.policy.observe(layer, queries, sums, tokens)
    }

    /// As [`Sparse::score`].
    pub fn score(&mut self, layer: u32, scores: &[f32]) -> Result<()> {
        self.shape.check_layer(layer)?;
        self.policy.score(layer, scores)
    }

    /// As [`Sparse::select`]. Candidates come in any order, each once.
    pub fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        self.check_context(layer, context)?;
        let phase_caps = if context.is_prefill { caps::LOAD_PREFILL } else { caps::LOAD_DECODE };
        check_cap(self.traits.caps, phase_caps, "what to load")?;
        if let Some(query) = query {
            let (heads, dim) = self.traits.query_rows(&self.shape);
            self.shape.check_rows("queries", layer, query, heads, dim)?;
        }
        if !candidates.is_sorted_by(|a, b| a < b) {
            ascending(candidates, &mut self.sorted)?;
        }
        out.clear();
        reserve(out, candidates.len())?;
        self.policy.select(layer, query, candidates, context, out)?;
        if out.len() > candidates.len() {
            fail!(State, "the policy chose {} of {} candidates", out.len(), candidates.len());
        }
        Ok(())
    }

    /// As [`Sparse::index`].
    pub fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        self.check_context(layer, context)?;
        let phase_caps = if context.is_prefill { caps::INDEX_PREFILL } else { caps::INDEX_DECODE };
        check_cap(self.traits.caps, phase_caps, "what to compute with")?;
        let (heads, dim) = self.traits.query_rows(&self.shape);
        self.shape.check_rows("queries", layer, queries, heads, dim)?;
        self.policy.index(layer, queries, keys, context, out)
    }

    /// Attention of a prompt, on this thread: by the policy itself, or by its index and the kernel.
    /// `rows` are the queries, and all keys and values.
    pub fn attend(
        &mut self,
        layer: u32,
        rows: (&Rows<'_>, &Rows<'_>, &Rows<'_>),
        context: &Context,
        out: &mut [f32],
        lse: Option<&mut [f32]>,
        index: &mut Index,
    ) -> Result<()> {
        let (queries, keys, values) = rows;
        self.check_context(layer, context)?;
        if !context.is_prefill {
            fail!(Invalid, "attend computes prompts only: in decode, use index");
        }
        self.shape.check_queries(layer, queries)?;
        self.shape.check_keys(layer, keys)?;
        let shape = &self.shape;
        shape.check_rows("values", layer, values, shape.key_heads, shape.value_dim)?;
        check_context(shape, queries.tokens(), context)?;
        if (keys.tokens(), values.tokens()) != (context.tokens, context.tokens) {
            let (k, v) = (keys.tokens(), values.tokens());
            fail!(Invalid, "{k} keys and {v} values were passed for {} tokens", context.tokens);
        }
        let problem = Problem {
            queries: *queries,
            keys: *keys,
            values: *values,
            first_query: context.first_query,
            first_key: 0,
            scale: shape.scale,
            select: Keys::DENSE,
        };
        let mut lse = lse;
        // Checks the lengths of the outputs, also where the policy computes.
        Prefill::new(problem, out, lse.as_deref_mut())?;
        if self.traits.caps & caps::INDEX_PREFILL != 0 {
            if self.traits.rows.is_some() {
                fail!(Unsupported, "the policy has rows of its own and cannot attend: use index");
            }
            if self.policy.attend(layer, rows, context, out, lse.as_deref_mut())? {
                return Ok(());
            }
            self.policy.index(layer, queries, Some(keys), context, index)?;
        } else {
            index.set_dense();
        }
        let mut job = Prefill::new(Problem { select: index.keys(), ..problem }, out, lse)?;
        let mut scratch = Vec::new();
        zeros(&mut scratch, job.scratch())?;
        job.all(&mut scratch)
    }

    /// As [`Sparse::evict`].
    pub fn evict(
        &mut self,
        layer: u32,
        context: &Context,
        out: &mut RetainedTokens,
    ) -> Result<bool> {
        self.check_context(layer, context)?;
        let phase_caps = if context.is_prefill { caps::EVICT_PREFILL } else { caps::EVICT_DECODE };
        check_cap(self.traits.caps, phase_caps, "what to evict")?;
        let has_evicted = self.policy.evict(layer, context, out)?;
        if has_evicted {
            self.check_retained(out)?;
        }
        Ok(has_evicted)
    }

    /// Checks lists of retained tokens: their number, order and positions.
    fn check_retained(&self, retained: &RetainedTokens) -> Result<()> {
        let (lists, shape) = (retained.heads.len(), &self.shape);
        if ![1, shape.key_heads as usize, shape.query_heads as usize].contains(&lists) {
            fail!(Invalid, "{lists} lists of retained tokens: pass one, or one for each head");
        }
        for at in 0..lists {
            let list = retained.heads.get(at);
            if !list.is_sorted_by(|a, b| a < b) {
                fail!(Invalid, "list {at} of retained tokens does not ascend");
            }
            if list.last().is_some_and(|&last| last >= shape.max_tokens) {
                fail!(
                    Limit,
                    "list {at} has a position beyond the limit of {} tokens",
                    shape.max_tokens
                );
            }
        }
        Ok(())
    }

    /// As [`Sparse::evicted`].
    pub fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        self.shape.check_layer(layer)?;
        self.check_retained(retained)?;
        self.policy.evicted(layer, retained)
    }

    /// As [`Sparse::truncate`].
    pub fn truncate(&mut self, tokens: u32) -> Result<()> {
        self.policy.truncate(tokens)
    }

    /// As [`Sparse::reset`].
    pub fn reset(&mut self) {
        self.policy.reset();
    }

    /// As [`Sparse::fork`].
    pub fn fork(&self) -> Result<CheckedPolicy> {
        Ok(CheckedPolicy::of(self.policy.fork()?, &self.shape))
    }

    /// As [`Sparse::save`].
    pub fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        self.shape.check_layer(layer)?;
        self.policy.save(layer, id, out)
    }

    /// As [`Sparse::load`].
    pub fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        self.shape.check_layer(layer)?;
        self.check_end(first, self.shape.block_tokens)?;
        self.policy.load(layer, id, first, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Scales;
    use crate::base::status::Status;
    use crate::meta::dtype::Dtype;
    use crate::meta::view::{Place, View};
    use crate::sparse::Kind;

    const SHAPE: Shape = Shape {
        layers: 3,
        query_heads: 2,
        key_heads: 1,
        key_dim: 4,
        value_dim: 4,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens: 16,
        max_tokens: 64,
    };

    fn rows(numbers: &[f32], heads: u32) -> Rows<'_> {
        let tokens = numbers.len() as u32 / heads / 4;
        let place = Place::At(numbers.as_ptr() as u64);
        let (run_bytes, token_stride_bytes) = (16, u64::from(heads) * 16);
        let head_stride_bytes = 16;
        let view = View { place, tokens, heads, run_bytes, token_stride_bytes, head_stride_bytes };
        // SAFETY: the view covers `numbers`, which the rows borrow.
        unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
    }

    fn context(tokens: u32) -> Context {
        Context { is_prefill: false, part: 0, parts: 1, first_query: tokens - 1, tokens }
    }

    #[test]
    fn invalid_calls_are_rejected_before_the_policy_sees_them() {
        let mut served =
            CheckedPolicy::open("quest(page=16,budget=48,dense=0)", &SHAPE).expect("sound");
        let keys = [0.5; 64 * 4];
        let before = served.state_bytes();
        let of = |result: Result<()>| result.expect_err("refused").status();
        assert_eq!(of(served.seal(3, 0, 0, &rows(&keys[..64], 1))), Status::Invalid);
        assert_eq!(of(served.seal(0, 0, 0, &rows(&keys[..64], 2))), Status::Invalid);
        assert_eq!(of(served.seal(0, 0, 0, &rows(&keys[..128], 1))), Status::Invalid);
        assert_eq!(of(served.seal(0, 0, 60, &rows(&keys[..64], 1))), Status::Limit);
        assert_eq!(of(served.append(0, 60, &rows(&keys[..64], 1))), Status::Limit);
        assert_eq!(of(served.seal_all(0, 0, &[rows(&keys[..64], 1)])), Status::Invalid);
        assert_eq!(served.state_bytes(), before);
        let mut out = vec![7];
        let query = [1.0; 8];
        let query = rows(&query, 2);
        let mut select =
            |ids: &[u32], context: &Context| served.select(0, Some(&query), ids, context, &mut out);
        assert_eq!(of(select(&[1, 0, 1], &context(64))), Status::Invalid);
        assert_eq!(of(select(&[1, 0], &context(65))), Status::Limit);
        assert_eq!(of(served.evict(0, &context(9), &mut RetainedTokens::default()).map(|_| ())), {
            Status::Unsupported
        });
    }

    #[test]
    fn retained_lists_ascend_and_are_one_or_one_per_head() {
        let mut served = CheckedPolicy::open("streaming(sinks=1,recent=2)", &SHAPE).expect("sound");
        let mut retained_tokens = RetainedTokens::default();
        assert!(served.evicted(0, &retained_tokens).is_err(), "no list");
        retained_tokens.heads.push([0, 5, 4]);
        assert!(served.evicted(0, &retained_tokens).is_err(), "not in order");
        retained_tokens.clear();
        retained_tokens.heads.push([0, 64]);
        assert!(served.evicted(0, &retained_tokens).is_err(), "behind the last");
        let selected = served.select(0, None, &[1], &context(9), &mut Vec::new());
        assert_eq!(selected.expect_err("it loads all").status(), Status::Unsupported);
    }

    #[test]
    fn seal_all_seals_layer_by_layer() {
        let (mut all, mut each) = (
            CheckedPolicy::open("quest(page=16,budget=48,dense=0)", &SHAPE).expect("sound"),
            CheckedPolicy::open("quest(page=16,budget=48,dense=0)", &SHAPE).expect("sound"),
        );
        let keys: Vec<Vec<f32>> =
            (0..3).map(|layer| (0..64).map(|i| (i * 7 % 13 + layer) as f32).collect()).collect();
        let views: Vec<Rows<'_>> = keys.iter().map(|keys| rows(keys, 1)).collect();
        all.seal_all(5, 16, &views).expect("sound");
        for (layer, keys) in (0..).zip(&views) {
            each.seal(layer, 5, 16, keys).expect("sound");
            let (mut a, mut b) = (Vec::new(), Vec::new());
            all.save(layer, 5, &mut a).expect("known");
            each.save(layer, 5, &mut b).expect("known");
            assert!(a == b && !a.is_empty(), "layer {layer}");
        }
    }

    /// A policy that returns invalid answers.
    struct Wild(&'static [u32]);

    impl Sparse for Wild {
        fn traits(&self) -> Traits {
            Traits { caps: caps::LOAD_DECODE | caps::EVICT_DECODE, ..Traits::NONE }
        }

        fn select(
            &mut self,
            _: u32,
            _: Option<&Rows<'_>>,
            _: &[u32],
            _: &Context,
            out: &mut Vec<u32>,
        ) -> Result<()> {
            out.extend_from_slice(self.0);
            Ok(())
        }

        fn evict(&mut self, _: u32, _: &Context, out: &mut RetainedTokens) -> Result<bool> {
            out.heads.push(self.0.iter().copied());
            Ok(true)
        }

        fn fork(&self) -> Result<Box<dyn Sparse>> {
            Ok(Box::new(Wild(self.0)))
        }
    }

    #[test]
    fn invalid_answers_of_a_policy_are_errors() {
        let evict = |list| {
            let mut served = CheckedPolicy::of(Box::new(Wild(list)), &SHAPE);
            let answer = served.evict(0, &context(9), &mut RetainedTokens::default());
            answer.map_err(|error| error.status())
        };
        assert_eq!(evict(&[0, 3, 8]), Ok(true));
        assert_eq!(evict(&[0, 8, 3]), Err(Status::Invalid), "not in order");
        assert_eq!(evict(&[3, 3]), Err(Status::Invalid), "twice");
        assert_eq!(evict(&[64]), Err(Status::Limit), "behind the last");
        let mut served = CheckedPolicy::of(Box::new(Wild(&[1, 2, 3])), &SHAPE);
        let mut select = |ids: &[u32]| {
            let chosen = served.select(0, None, ids, &context(9), &mut Vec::new());
            chosen.map_err(|error| error.status())
        };
        assert_eq!(select(&[1, 2, 3]), Ok(()));
        assert_eq!(select(&[1, 2]), Err(Status::State), "more than there are");
    }
}
