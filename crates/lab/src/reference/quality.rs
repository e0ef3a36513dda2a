//! What a policy costs a model: questions about pairs far back in a text, and how well the text
//! itself is foreseen. Every policy continues the same prompts; those that say nothing about how
//! a prompt is computed share its computation.
//!
//! A prompt of questions ends with ones for all of its pairs, in disorder; then, behind it, they
//! are asked in another order, one token after the other. Answers are no part of the text, so
//! whoever answers has to look back at the pair.

use std::time::Instant;

use kvtier::base::spec::{Reader, Spec};
use kvtier::base::status::Result;
use kvtier::sparse::{Shape, Sparse, caps, registry};

use super::cache::InMemory;
use super::chance::Chance;
use super::engine::Engine;
use super::model::{Form, Model};
use super::numbers::{Random, greatest, loss};
use super::policies::{Active, BEHIND, IN_PROMPT, Policies};
use super::text::{Text, is_plain, questions};

type Memory<'m> = Engine<'m, InMemory>;

/// Tokens of a block.
pub const BLOCK: u32 = 16;
/// The last symbols of a prompt of which it is said how well they are foreseen.
pub const ROWS: usize = 96;

/// The policy of a spec: one of the registry, or `random(budget=192,recent=32,seed=5)`, where
/// tokens go by chance.
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
    Ok(Box::new(Chance::new(shape, budget, recent, seed)))
}

/// A model, and how its keys are kept.
#[derive(Clone, Copy)]
pub struct Subject<'m> {
    /// The model.
    pub model: &'m Model,
    /// The form of its keys.
    pub form: Form,
}

/// What a policy had and looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Used {
    /// Tokens that a head of the layer with the most has in the end.
    pub most: f64,
    /// Tokens that were loaded for a step and layer, where that is restricted; else those that a
    /// head has in the end, in the mean of layers.
    pub moved: f64,
    /// These, of all there were: a share of the bytes.
    pub bytes: f64,
    /// Keys that steps were computed with, of all before them.
    pub looked: f64,
    /// The same of the prompt.
    pub prompt: f64,
}

/// What came of questions.
#[derive(Clone, Debug)]
pub struct Answers {
    /// Whether each was answered, in the order they were asked.
    pub right: Vec<bool>,
    /// What it took.
    pub used: Used,
    /// Seconds of the policy's own steps.
    pub seconds: f64,
}

/// Nats lost on plain symbols, and how many there were.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lost {
    /// The nats.
    pub nats: f64,
    /// The symbols.
    pub count: usize,
}

impl Lost {
    fn add(&mut self, logits: &[f32], symbol: u8) {
        if is_plain(symbol) {
            self.nats += loss(logits, symbol);
            self.count += 1;
        }
    }

    /// The same of more symbols.
    pub fn and(self, other: Lost) -> Lost {
        Lost { nats: self.nats + other.nats, count: self.count + other.count }
    }

    /// Out of how many symbols one would have to guess.
    pub fn perplexity(self) -> f64 {
        (self.nats / self.count as f64).exp()
    }
}

/// How well a text was foreseen.
#[derive(Clone, Debug)]
pub struct Foreseen {
    /// In the last symbols of the prompt.
    pub prompt: Lost,
    /// Behind it.
    pub behind: Lost,
    /// What it took.
    pub used: Used,
    /// Seconds of the policy's own steps.
    pub seconds: f64,
}

/// How long a text is, and what is in it.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Its symbols, without questions.
    pub symbols: usize,
    /// Its pairs.
    pub pairs: usize,
}

/// Asks all choices the same questions about one text: for each, what came of it.
pub fn ask(of: Subject<'_>, seed: u64, size: Size, choices: &[String]) -> Result<Vec<Answers>> {
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
        let of = |Each { got, used, seconds }| Answers { right: got, used, seconds };
        all.into_iter().map(of).collect()
    })
}

/// Lets all choices foresee one text, `written` symbols of it behind the prompt.
pub fn foresee(
    of: Subject<'_>,
    seed: u64,
    (size, written): (Size, usize),
    choices: &[String],
) -> Result<Vec<Foreseen>> {
    let symbols = Text::new(&mut Random::new(seed), size.symbols, size.pairs).symbols;
    let (prompt, rest) = symbols.split_at(symbols.len() - written);
    let vocab = of.model.sizes.vocab;
    let all = of.each(prompt, ROWS, choices, |engine, logits| {
        let (mut within, mut behind) = (Lost::default(), Lost::default());
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
    let of =
        |Each { got: (prompt, behind), used, seconds }| Foreseen { prompt, behind, used, seconds };
    Ok(all.into_iter().map(of).collect())
}

/// What came of one policy.
struct Each<T> {
    got: T,
    used: Used,
    seconds: f64,
}

impl<'m> Subject<'m> {
    /// What policies are told of it.
    pub fn shape(&self) -> Shape {
        self.model.shape(self.form, BLOCK)
    }

    /// An error if this engine cannot do what a spec asks for.
    pub fn check(&self, spec: &str) -> Result<()> {
        let shape = self.shape();
        Policies::one(make(spec, &shape)?).check(&shape)
    }

    fn engine(&self, policies: Policies) -> Result<Memory<'m>> {
        Engine::in_memory(self.model, self.form, BLOCK, policies)
    }

    /// Goes on behind a prompt with each policy; `f` gets the logits behind the last `rows`.
    fn each<T>(
        &self,
        prompt: &[u8],
        rows: usize,
        choices: &[String],
        f: impl Fn(&mut Memory<'m>, &[f32]) -> Result<T>,
    ) -> Result<Vec<Each<T>>> {
        let shape = self.shape();
        let mut told = Policies::default();
        for spec in choices {
            let policy = make(spec, &shape)?;
            if !computes_prompts(spec, &*policy) {
                told = told.with(policy, 0);
            }
        }
        let mut base = self.engine(told)?;
        let logits = base.compute(prompt, prompt.len(), rows)?;
        let mut told = base.policies.all.iter();
        let mut all = Vec::new();
        for spec in choices {
            let begun = Instant::now();
            let fresh = make(spec, &shape)?;
            let run = || -> Result<(T, Used)> {
                let (mut engine, own) = if computes_prompts(spec, &*fresh) {
                    let mut engine = self.engine(Policies::one(fresh))?;
                    let own = engine.compute(prompt, prompt.len(), rows)?;
                    (engine, Some(own))
                } else {
                    let told = told.next().map_or(Ok(fresh), |active| active.policy.fork())?;
                    let policies = Policies::default().with(told, IN_PROMPT | BEHIND);
                    (base.fork(policies), None)
                };
                engine.settle(prompt.len() as u32)?;
                let got = f(&mut engine, own.as_deref().unwrap_or(&logits))?;
                Ok((got, used(&engine, prompt.len())))
            };
            let (got, used) = run().map_err(|error| error.within(spec))?;
            all.push(Each { got, used, seconds: begun.elapsed().as_secs_f64() });
        }
        Ok(all)
    }
}

/// Whether a prompt has to be computed for a policy alone: it says what that is computed with, and
/// is not `full`, which would compute what others share.
fn computes_prompts(spec: &str, policy: &dyn Sparse) -> bool {
    spec != "full" && policy.traits().caps & (caps::INDEX_PREFILL | caps::LOAD_PREFILL) != 0
}

fn used(engine: &Memory<'_>, prompt: usize) -> Used {
    let (layers, heads) = (engine.shape.layers, f64::from(engine.shape.query_heads));
    let steps = f64::from((engine.tokens - prompt as u32) * layers).max(1.0);
    let before = engine.before.max(1) as f64;
    let kept = || (0..layers).map(|layer| engine.cache.kept(layer));
    let mean = kept().sum::<f64>() / f64::from(layers);
    let is_selected = |active: &Active| {
        active.traits.requires_block_selection && active.asked & caps::LOAD_DECODE != 0
    };
    let (moved, bytes) = match engine.policies.all.iter().any(is_selected) {
        true => (engine.read as f64 / steps, engine.read as f64 / before),
        false => (mean, mean / f64::from(engine.tokens)),
    };
    Used {
        most: kept().fold(0.0, f64::max),
        moved,
        bytes,
        looked: engine.looked as f64 / heads / before,
        prompt: engine.paired.0 as f64 / engine.paired.1.max(1) as f64,
    }
}

/// The 95 % confidence interval of a share (Wilson).
pub fn interval(right: usize, of: usize) -> (f64, f64) {
    let (n, p, z) = (of as f64, right as f64 / of as f64, 1.96);
    let middle = p + z * z / (2.0 * n);
    let half = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    let by = 1.0 + z * z / n;
    (((middle - half) / by).max(0.0), ((middle + half) / by).min(1.0))
}
