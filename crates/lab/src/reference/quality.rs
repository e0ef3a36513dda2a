//! Quality of a model under a sparse policy: questions about pairs far back in a text, and the
//! prediction of the text itself. Every policy continues the same prompts. Policies without
//! influence on the prompt's computation share it.
//!
//! A prompt ends with questions for all of its pairs, shuffled. During decoding they are asked in
//! another order, token by token. Answers are not part of the text, so an answer must attend to the
//! pair.

use std::time::Instant;

use kvtier::base::spec::{Reader, Spec};
use kvtier::base::status::Result;
use kvtier::sparse::{Shape, Sparse, caps, registry};

use super::cache::InMemory;
use super::chance::RandomEviction;
use super::engine::Engine;
use super::model::{Form, Model};
use super::numbers::{Random, greatest, loss};
use super::policies::{Active, DECODE, PREFILL, Policies};
use super::text::{Text, is_plain, questions};

type Memory<'m> = Engine<'m, InMemory>;

/// Tokens of a block.
pub const BLOCK: u32 = 16;
/// Last symbols of a prompt whose prediction is measured.
pub const ROWS: usize = 96;

/// Creates the policy of a spec: one of the registry, or `random(budget=192,recent=32,seed=5)`,
/// which evicts at random.
pub fn make(spec: &str, shape: &Shape) -> Result<Box<dyn Sparse>> {
    let parsed = Spec::parse(spec)?;
    if parsed.name != "random" {
        return registry::make(&parsed, shape);
    }
    let mut reader = Reader::new(&parsed);
    let budget = reader.u64("budget", 192, 1..=u64::from(u32::MAX))? as usize;
    let recent = reader.u64("recent", 32.min(budget as u64 / 2), 0..=budget as u64)? as usize;
    let seed = reader.u64("seed", 5, 0..=u64::from(u32::MAX))?;
    reader.finish()?;
    Ok(Box::new(RandomEviction::new(shape, budget, recent, seed)))
}

/// A model and the form of its keys.
#[derive(Clone, Copy)]
pub struct Subject<'m> {
    /// The model.
    pub model: &'m Model,
    /// The form of its keys.
    pub form: Form,
}

/// Tokens kept and used by a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens per head at the end, in the layer with the most.
    pub most: f64,
    /// Tokens loaded per step and layer, if a policy selects blocks; else the tokens per head at
    /// the end, averaged over layers.
    pub moved: f64,
    /// `moved` as a share of all tokens: a share of the bytes.
    pub bytes: f64,
    /// Share of the earlier keys used during decoding.
    pub looked: f64,
    /// Share of the earlier keys used in the prompt.
    pub prompt: f64,
}

/// Result of the questions.
#[derive(Clone, Debug)]
pub struct Answers {
    /// Whether each answer was right, in the order of the questions.
    pub right: Vec<bool>,
    /// Tokens kept and used.
    pub used: Usage,
    /// Time of the policy's own steps, in seconds.
    pub seconds: f64,
}

/// Loss on plain symbols in nats, and the number of symbols.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TextLoss {
    /// Sum in nats.
    pub nats: f64,
    /// Number of symbols.
    pub count: usize,
}

impl TextLoss {
    fn add(&mut self, logits: &[f32], symbol: u8) {
        if is_plain(symbol) {
            self.nats += loss(logits, symbol);
            self.count += 1;
        }
    }

    /// The sum of two losses.
    pub fn and(self, other: TextLoss) -> TextLoss {
        TextLoss { nats: self.nats + other.nats, count: self.count + other.count }
    }

    /// The perplexity.
    pub fn perplexity(self) -> f64 {
        (self.nats / self.count as f64).exp()
    }
}

/// Result of the prediction of a text.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// Loss on the last symbols of the prompt.
    pub prompt: TextLoss,
    /// Loss on the decoded symbols.
    pub behind: TextLoss,
    /// Tokens kept and used.
    pub used: Usage,
    /// Time of the policy's own steps, in seconds.
    pub seconds: f64,
}

/// Size of a text.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Symbols, without questions.
    pub symbols: usize,
    /// Number of pairs.
    pub pairs: usize,
}

/// Asks all policies the same questions about one text.
pub fn answer_questions(
    of: Subject<'_>,
    seed: u64,
    size: Size,
    choices: &[String],
) -> Result<Vec<Answers>> {
    let mut random = Random::new(seed);
    let text = Text::new(&mut random, size.symbols, size.pairs);
    let before = text.some(&mut random, size.pairs);
    let again = text.some(&mut random, size.pairs);
    let prompt = [text.symbols.as_slice(), &questions(&before)].concat();
    of.each(&prompt, 1, choices, |engine, _| {
        let mut right = Vec::new();
        for &(key, value) in &again {
            let mut last = Vec::new();
            for symbol in questions(&[(key, value)]) {
                last = engine.next(symbol)?;
            }
            right.push(greatest(&last) == usize::from(value));
        }
        Ok(right)
    })
    .map(|all| {
        let of = |PolicyResult { got, used, seconds }| Answers { right: got, used, seconds };
        all.into_iter().map(of).collect()
    })
}

/// Measures the prediction of one text with all policies; the last `written` symbols are decoded.
pub fn predict(
    of: Subject<'_>,
    seed: u64,
    (size, written): (Size, usize),
    choices: &[String],
) -> Result<Vec<Prediction>> {
    let symbols = Text::new(&mut Random::new(seed), size.symbols, size.pairs).symbols;
    let (prompt, rest) = symbols.split_at(symbols.len() - written);
    let vocab = of.model.sizes.vocab;
    let all = of.each(prompt, ROWS, choices, |engine, logits| {
        let (mut within, mut behind) = (TextLoss::default(), TextLoss::default());
        let from = prompt.len() + 1 - ROWS;
        for (row, &symbol) in logits.chunks_exact(vocab).zip(&prompt[from..]) {
            within.add(row, symbol);
        }
        let mut last = logits[logits.len() - vocab..].to_vec();
        for &symbol in rest {
            behind.add(&last, symbol);
            last = engine.next(symbol)?;
        }
        Ok((within, behind))
    })?;
    let of = |PolicyResult { got: (prompt, behind), used, seconds }| Prediction {
        prompt,
        behind,
        used,
        seconds,
    };
    Ok(all.into_iter().map(of).collect())
}

/// Result of one policy.
struct PolicyResult<T> {
    got: T,
    used: Usage,
    seconds: f64,
}

impl<'m> Subject<'m> {
    /// The model's shape for policies.
    pub fn shape(&self) -> Shape {
        self.model.shape(self.form, BLOCK)
    }

    /// Fails if this engine does not support a policy.
    pub fn check(&self, spec: &str) -> Result<()> {
        let shape = self.shape();
        Policies::single(make(spec, &shape)?).check(&shape)
    }

    fn engine(&self, policies: Policies) -> Result<Memory<'m>> {
        Engine::in_memory(self.model, self.form, BLOCK, policies)
    }

    /// Continues a prompt with each policy; `f` receives the logits of the last `rows` tokens.
    fn each<T>(
        &self,
        prompt: &[u8],
        rows: usize,
        choices: &[String],
        f: impl Fn(&mut Memory<'m>, &[f32]) -> Result<T>,
    ) -> Result<Vec<PolicyResult<T>>> {
        let shape = self.shape();
        let mut shared = Policies::default();
        for spec in choices {
            let policy = make(spec, &shape)?;
            if !computes_prompts(spec, &*policy) {
                shared = shared.with(policy, 0);
            }
        }
        let mut base = self.engine(shared)?;
        let logits = base.compute(prompt, prompt.len(), rows)?;
        let mut prepared = base.policies.all.iter();
        let mut all = Vec::new();
        for spec in choices {
            let begun = Instant::now();
            let fresh = make(spec, &shape)?;
            let run = || -> Result<(T, Usage)> {
                let (mut engine, own) = if computes_prompts(spec, &*fresh) {
                    let mut engine = self.engine(Policies::single(fresh))?;
                    let own = engine.compute(prompt, prompt.len(), rows)?;
                    (engine, Some(own))
                } else {
                    let policy =
                        prepared.next().map_or(Ok(fresh), |active| active.policy.fork())?;
                    let policies = Policies::default().with(policy, PREFILL | DECODE);
                    (base.fork(policies), None)
                };
                engine.settle(prompt.len() as u32)?;
                let got = f(&mut engine, own.as_deref().unwrap_or(&logits))?;
                Ok((got, used(&engine, prompt.len())))
            };
            let (got, used) = run().map_err(|error| error.within(spec))?;
            all.push(PolicyResult { got, used, seconds: begun.elapsed().as_secs_f64() });
        }
        Ok(all)
    }
}

/// Whether the prompt must be computed for this policy alone: it selects the prompt's keys, and is
/// not `full`, which computes what the others share.
fn computes_prompts(spec: &str, policy: &dyn Sparse) -> bool {
    spec != "full" && policy.traits().caps & (caps::INDEX_PREFILL | caps::LOAD_PREFILL) != 0
}

fn used(engine: &Memory<'_>, prompt: usize) -> Usage {
    let (layers, heads) = (engine.shape.layers, f64::from(engine.shape.query_heads));
    let steps = f64::from((engine.tokens - prompt as u32) * layers).max(1.0);
    let before = engine.before.max(1) as f64;
    let retained_share = || (0..layers).map(|layer| engine.cache.retained_share(layer));
    let mean = retained_share().sum::<f64>() / f64::from(layers);
    let is_selected = |active: &Active| {
        active.traits.requires_block_selection && active.used_caps & caps::LOAD_DECODE != 0
    };
    let (moved, bytes) = match engine.policies.all.iter().any(is_selected) {
        true => (engine.read as f64 / steps, engine.read as f64 / before),
        false => (mean, mean / f64::from(engine.tokens)),
    };
    Usage {
        most: retained_share().fold(0.0, f64::max),
        moved,
        bytes,
        looked: engine.looked as f64 / heads / before,
        prompt: engine.paired.0 as f64 / engine.paired.1.max(1) as f64,
    }
}

/// The 95 % confidence interval of a ratio (Wilson).
pub fn interval(right: usize, of: usize) -> (f64, f64) {
    let (n, p, z) = (of as f64, right as f64 / of as f64, 1.96);
    let middle = p + z * z / (2.0 * n);
    let half = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    let by = 1.0 + z * z / n;
    (((middle - half) / by).max(0.0), ((middle + half) / by).min(1.0))
}
