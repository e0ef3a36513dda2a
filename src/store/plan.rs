//! Plans: for each chunk of a path whether it is resident, loaded, or computed again; the cheapest
//! mix.
//!
//! Without holes, the plan chooses where loading ends and computing begins. With holes, it chooses
//! for each chunk: leading chunks are cheap to compute (little context), so they are the first that
//! are not loaded from a tier that is the bottleneck.

use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;
use crate::store::token_path::MAX_TOKENS;

/// Sources that chunks are loaded from: host, disk, remote, device.
pub const SOURCES: usize = 4;
/// Most chunks of one plan.
pub const MAX_CHUNKS: usize = 1 << 22;

/// Requirements of a chunk before it can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: it is where the engine computes.
    Nothing,
    /// Load this number of bytes from each source.
    Load([u64; SOURCES]),
    /// It is in no tier, or not all of it.
    Compute,
}

/// A chunk of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its tokens.
    pub tokens: u32,
    /// Requirements of the chunk.
    pub need: Need,
}

/// Kind of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Use it as it is.
    Resident,
    /// Load it.
    Load,
    /// Compute it.
    Recompute,
}

/// A source: its bandwidth, and its queue.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Bandwidth.
    pub speed: Speed,
    /// Time until its queue is empty.
    pub queued_ns: f64,
}

/// Input of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Cost of prefill, in ns.
    pub cost: Cost,
    /// The sources.
    pub routes: [Route; SOURCES],
    /// The engine can compute holes.
    pub holes: bool,
    /// Loads run while the engine computes, layer by layer; else before it.
    pub overlap: bool,
    /// Layers of the model. The first one must be loaded before computing begins.
    pub layers: u32,
}

/// A run of chunks with the same step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Kind of the step.
    pub kind: StepKind,
    /// First chunk.
    pub first: usize,
    /// Number of chunks.
    pub chunks: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Bytes from each source.
    pub bytes: [u64; SOURCES],
    /// Time of this step alone.
    pub ns: f64,
}

/// A plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Its steps, in the order of the path.
    pub steps: Vec<Step>,
    /// Total time.
    pub total_ns: f64,
    /// Time of the loads alone.
    pub load_ns: f64,
    /// Time of the computation alone.
    pub compute_ns: f64,
    /// Time to compute all that is not resident.
    pub without_ns: f64,
    /// Scratch: the step of each chunk.
    kinds: Vec<StepKind>,
    /// Scratch: chunks that are computed although they could be loaded, in this order.
    order: Vec<u32>,
    /// Scratch: loads of each source, the cheapest to compute last.
    loads: [Vec<LoadCandidate>; SOURCES],
}

/// A chunk that can be loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LoadCandidate {
    chunk: u32,
    compute_ns: f64,
    load_ns: [f64; SOURCES],
}

/// Sums of times of a plan.
#[derive(Clone, Copy, Default)]
struct Load {
    ns: [f64; SOURCES],
    compute_ns: f64,
}

impl Load {
    fn loading(&self, terms: &Terms) -> f64 {
        let loads = self.ns.iter().zip(&terms.routes);
        loads
            .map(|(&ns, route)| if ns > 0.0 { ns + route.queued_ns } else { 0.0 })
            .fold(0.0, f64::max)
    }

    fn total(&self, terms: &Terms) -> f64 {
        let (load, compute) = (self.loading(terms), self.compute_ns);
        match terms.overlap {
            // Computing begins once the first layer is loaded.
            true => load.max(compute + load / f64::from(terms.layers.max(1))),
            false => load + compute,
        }
    }

    fn add(&mut self, ns: &[f64; SOURCES], sign: f64) {
        for (sum, ns) in self.ns.iter_mut().zip(ns) {
            let new = *sum + sign * ns;
            // Rounding can leave a rest where all that was added is removed again. It must not
            // count as a load.
            *sum = if new < 0.5 { 0.0 } else { new };
        }
    }
}

fn load_ns(terms: &Terms, bytes: &[u64; SOURCES]) -> [f64; SOURCES] {
    std::array::from_fn(|i| {
        let speed = &terms.routes[i].speed;
        if bytes[i] > 0 { speed.ns(bytes[i], 1) } else { 0.0 }
    })
}

impl Plan {
    /// Makes the plan of a path.
    pub fn make(&mut self, parts: &[Part], terms: &Terms) -> Result<()> {
        if parts.len() > MAX_CHUNKS {
            fail!(Limit, "a path of {} chunks, the limit is {MAX_CHUNKS}", parts.len());
        }
        let full = self.kinds.try_reserve(parts.len()).is_err()
            || self.order.try_reserve(parts.len()).is_err()
            || self.loads.iter_mut().any(|loads| loads.try_reserve(parts.len()).is_err());
        if full {
            fail!(NoMem, "no memory for a plan of {} chunks", parts.len());
        }
        self.kinds.clear();
        self.kinds.extend(parts.iter().map(|part| match part.need {
            Need::Nothing => StepKind::Resident,
            Need::Load(_) => StepKind::Load,
            Need::Compute => StepKind::Recompute,
        }));
        let load = if terms.holes { self.free(parts, terms) } else { self.prefix(parts, terms) };
        self.load_ns = load.loading(terms);
        self.compute_ns = load.compute_ns;
        self.total_ns = load.total(terms);
        self.join_chunks(parts, terms)
    }

    /// Finds the best point at which loading ends and computing begins.
    fn prefix(&mut self, parts: &[Part], terms: &Terms) -> Load {
        let mut compute_ns: f64 = each(parts).map(|(at, n)| terms.cost.of(at, n)).sum();
        let mut load = Load { compute_ns, ..Load::default() };
        let (mut best, mut ends) = (load, 0);
        for (i, ((at, n), part)) in each(parts).zip(parts).enumerate() {
            match part.need {
                Need::Compute => break,
                Need::Nothing => {}
                Need::Load(bytes) => load.add(&load_ns(terms, &bytes), 1.0),
            }
            compute_ns = (compute_ns - terms.cost.of(at, n)).max(0.0);
            load.compute_ns = compute_ns;
            // Among equal plans choose the one that loads more, so that the engine computes less.
            if load.total(terms) <= best.total(terms) {
                (best, ends) = (load, i + 1);
            }
        }
        self.kinds[ends..].fill(StepKind::Recompute);
        best
    }

    /// Finds the best step for each chunk. Begins with loading all chunks. Then repeatedly moves
    /// one chunk of the slowest source to computing: the one that is cheapest to compute. Takes the
    /// best of these mixes.
    fn free(&mut self, parts: &[Part], terms: &Terms) -> Load {
        let mut load = Load::default();
        self.gather(parts, terms, &mut load);
        for (source, loads) in self.loads.iter_mut().enumerate() {
            // Cost of computing for each unit of loading that it saves.
            let worth = |one: &LoadCandidate| one.compute_ns / one.load_ns[source].max(1.0);
            loads.sort_by(|a, b| worth(b).total_cmp(&worth(a)).then(b.chunk.cmp(&a.chunk)));
        }
        let (mut best, mut taken) = (load, 0);
        self.order.clear();
        while let Some(one) = self.next(&load, terms) {
            load.add(&one.load_ns, -1.0);
            load.compute_ns += one.compute_ns;
            self.kinds[one.chunk as usize] = StepKind::Recompute;
            self.order.push(one.chunk);
            if load.total(terms) < best.total(terms) {
                (best, taken) = (load, self.order.len());
            }
        }
        for &chunk in &self.order[taken..] {
            self.kinds[chunk as usize] = StepKind::Load;
        }
        best
    }

    /// Fills `loads` with the loads of each source, and sums the times.
    fn gather(&mut self, parts: &[Part], terms: &Terms, load: &mut Load) {
        self.loads.iter_mut().for_each(Vec::clear);
        for (i, ((at, n), part)) in each(parts).zip(parts).enumerate() {
            let compute_ns = terms.cost.of(at, n);
            match part.need {
                Need::Nothing => {}
                Need::Compute => load.compute_ns += compute_ns,
                Need::Load(bytes) => {
                    let one = LoadCandidate {
                        chunk: i as u32,
                        compute_ns,
                        load_ns: load_ns(terms, &bytes),
                    };
                    load.add(&one.load_ns, 1.0);
                    let sources = self.loads.iter_mut().zip(bytes).filter(|(_, bytes)| *bytes > 0);
                    sources.for_each(|(loads, _)| loads.push(one));
                }
            }
        }
    }

    /// The cheapest chunk of the slowest source.
    fn next(&mut self, load: &Load, terms: &Terms) -> Option<LoadCandidate> {
        let ends =
            |i: usize| if load.ns[i] > 0.0 { load.ns[i] + terms.routes[i].queued_ns } else { 0.0 };
        let slowest = (0..SOURCES).max_by(|&a, &b| ends(a).total_cmp(&ends(b)))?;
        // A chunk with several sources stands in each one's list.
        while let Some(one) = self.loads[slowest].pop() {
            if self.kinds[one.chunk as usize] == StepKind::Load {
                return Some(one);
            }
        }
        None
    }

    /// Joins neighbouring chunks of the same kind to steps.
    fn join_chunks(&mut self, parts: &[Part], terms: &Terms) -> Result<()> {
        self.steps.clear();
        self.without_ns = 0.0;
        for (i, ((at, n), part)) in each(parts).zip(parts).enumerate() {
            let (kind, compute_ns) = (self.kinds[i], terms.cost.of(at, n));
            if part.need != Need::Nothing {
                self.without_ns += compute_ns;
            }
            let (bytes, ns) = match (kind, part.need) {
                (StepKind::Load, Need::Load(bytes)) => {
                    (bytes, load_ns(terms, &bytes).iter().fold(0.0, |a, &b| f64::max(a, b)))
                }
                (StepKind::Recompute, _) => ([0; SOURCES], compute_ns),
                _ => ([0; SOURCES], 0.0),
            };
            if self.steps.last().is_none_or(|last| last.kind != kind) {
                if self.steps.try_reserve(1).is_err() {
                    fail!(NoMem, "no memory for another step of a plan");
                }
                let empty =
                    Step { kind, first: i, chunks: 0, tokens: 0, bytes: [0; SOURCES], ns: 0.0 };
                self.steps.push(empty);
            }
            if let Some(last) = self.steps.last_mut() {
                last.chunks += 1;
                last.tokens += n;
                last.ns += ns;
                last.bytes.iter_mut().zip(bytes).for_each(|(sum, b)| *sum += b);
            }
        }
        Ok(())
    }
}

/// Start and tokens of each chunk.
fn each(parts: &[Part]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let mut at = 0;
    parts.iter().map(move |part| {
        let start = at;
        at += u64::from(part.tokens);
        (start, u64::from(part.tokens))
    })
}

// ---------- prefill
//
// The cost of computing a token, fitted to what the engine reports of its prefills.
//
// Reports are not checked: a clock that stood still, or a machine that slept, yields figures that are
// off by orders of magnitude. The fit therefore uses most of the last observations, with equal
// weight, and ignores outliers.

/// Assumed cost of a token before any observation: 100,000 ns, or 10,000 tokens a second.
pub const GUESSED_TOKEN_NS: f64 = 100_000.0;
/// Observations kept.
const OBSERVATIONS: usize = 20;
/// Least cost of a token that is accepted, in ns: no machine computes 100 million tokens a second.
const LEAST_TOKEN_NS: u64 = 10;
/// Longest time that is accepted: an hour.
const MAX_NS: u64 = 3_600_000_000_000;
/// Weight of the assumed cost, in observations. It decides where equal observations leave a
/// parameter open.
const PRIOR: f64 = 1e-6;
/// A relative error from here on is no noise: the observation is ignored.
const OUTLIER: f64 = 0.3;

/// An observation: `ns` for `alpha * x + beta * y`.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    x: f64,
    y: f64,
    ns: f64,
}

/// Cost of the engine's prefill: `alpha * context + beta` ns a token.
#[derive(Clone, Copy, Debug)]
pub struct Prefill {
    /// The last observations, in a ring.
    samples: [Sample; OBSERVATIONS],
    observed: u64,
    fitted: Cost,
    fixed: Option<Cost>,
}

fn guess() -> Cost {
    let shape = Cost::default();
    Cost { alpha: shape.alpha * GUESSED_TOKEN_NS, beta: shape.beta * GUESSED_TOKEN_NS }
}

impl Default for Prefill {
    fn default() -> Prefill {
        Prefill {
            samples: [Sample::default(); OBSERVATIONS],
            observed: 0,
            fitted: guess(),
            fixed: None,
        }
    }
}

impl Prefill {
    /// Fixes the cost, in ns; `None` = use observations again.
    pub fn fix(&mut self, cost: Option<Cost>) -> Result<()> {
        if let Some(Cost { alpha, beta }) = cost {
            let sound = |x: f64| x.is_finite() && (0.0..=1e15).contains(&x);
            if !sound(alpha) || !sound(beta) {
                fail!(Invalid, "a prefill cost of {alpha} and {beta} ns is not 0 to 1e15");
            }
        }
        self.fixed = cost;
        Ok(())
    }

    /// Records that the engine computed `tokens` after `context` tokens in `ns`.
    pub fn observe(&mut self, context: u64, tokens: u64, ns: u64) -> Result<()> {
        let most = MAX_TOKENS as u64;
        if tokens == 0 || tokens > most || context > most {
            fail!(
                Invalid,
                "{tokens} tokens after a context of {context}: 1 to {most} tokens after 0 to {most} are accepted"
            );
        }
        let least_ns = tokens * LEAST_TOKEN_NS;
        if ns < least_ns || ns > MAX_NS {
            fail!(
                Invalid,
                "{tokens} tokens in {ns} ns: {least_ns} ns (100 million tokens a second) to an hour \
                 are accepted"
            );
        }
        let (l, n) = (context as f64, tokens as f64);
        let at = (self.observed % OBSERVATIONS as u64) as usize;
        self.samples[at] = Sample { x: n * l + n * n / 2.0, y: n, ns: ns as f64 };
        self.observed += 1;
        let count = self.observed.min(OBSERVATIONS as u64) as usize;
        self.fitted = fit(&self.samples[..count]);
        Ok(())
    }

    /// Cost of a token, in ns.
    pub fn cost(&self) -> Cost {
        self.fixed.unwrap_or(self.fitted)
    }

    /// Whether the cost is fixed.
    pub fn is_fixed(&self) -> bool {
        self.fixed.is_some()
    }

    /// Number of observations.
    pub fn observed(&self) -> u64 {
        self.observed
    }
}

impl Sample {
    /// Relative error of a cost, by the larger of prediction and observation.
    fn off(&self, of: Cost) -> f64 {
        let expected = of.alpha * self.x + of.beta * self.y;
        (expected - self.ns).abs() / expected.max(self.ns)
    }
}

/// The assumed cost, scaled by the median of the observations.
fn scaled_guess(observed: &[Sample]) -> Cost {
    let of = guess();
    let mut ratios = [0.0; OBSERVATIONS];
    for (ratio, one) in ratios.iter_mut().zip(observed) {
        *ratio = one.ns / (of.alpha * one.x + of.beta * one.y);
    }
    let ratios = &mut ratios[..observed.len()];
    ratios.sort_by(f64::total_cmp);
    let median = ratios[observed.len() / 2];
    Cost { alpha: of.alpha * median, beta: of.beta * median }
}

/// The cost that explains two observations, if they determine both parameters.
fn common(one: &Sample, other: &Sample) -> Option<Cost> {
    let det = one.x * other.y - other.x * one.y;
    if det.abs() < 0.05 * (one.x * other.y).max(other.x * one.y) {
        return None;
    }
    let alpha = (one.ns * other.y - other.ns * one.y) / det;
    let beta = (one.x * other.ns - other.x * one.ns) / det;
    Some(Cost { alpha: alpha.max(0.0), beta: beta.max(0.0) })
}

/// Takes the pair of observations whose cost has the least error over all, then the least squares
/// of the observations that are close to it.
fn fit(observed: &[Sample]) -> Cost {
    let start = scaled_guess(observed);
    let all_off = |cost: Cost| observed.iter().map(|one| one.off(cost)).sum::<f64>();
    let (mut best, mut least) = (start, all_off(start));
    for (at, one) in observed.iter().enumerate() {
        for cost in observed[..at].iter().filter_map(|other| common(one, other)) {
            let off = all_off(cost);
            if off < least {
                (best, least) = (cost, off);
            }
        }
    }
    least_squares(observed.iter().filter(|one| one.off(best) < OUTLIER), start)
}

/// Least squares of relative errors; neither parameter is below zero.
fn least_squares<'a>(observed: impl Iterator<Item = &'a Sample>, guess: Cost) -> Cost {
    // As if each parameter had been observed alone, with its assumed value.
    let (mut xx, mut x_sum) = (PRIOR / guess.alpha.powi(2), PRIOR / guess.alpha);
    let (mut yy, mut y_sum, mut xy) = (PRIOR / guess.beta.powi(2), PRIOR / guess.beta, 0.0);
    for &Sample { x, y, ns } in observed {
        let (x, y) = (x / ns, y / ns);
        xx += x * x;
        xy += x * y;
        yy += y * y;
        x_sum += x;
        y_sum += y;
    }
    let det = xx * yy - xy * xy;
    // The assumed cost keeps it above zero, but not against endless equal observations.
    if det <= 1e-9 * xx * yy {
        let times = x_sum / (guess.alpha * xx + guess.beta * xy);
        return Cost { alpha: guess.alpha * times, beta: guess.beta * times };
    }
    let (alpha, beta) = ((x_sum * yy - y_sum * xy) / det, (y_sum * xx - x_sum * xy) / det);
    if alpha < 0.0 {
        Cost { alpha: 0.0, beta: y_sum / yy }
    } else if beta < 0.0 {
        Cost { alpha: x_sum / xx, beta: 0.0 }
    } else {
        Cost { alpha, beta }
    }
}

// ---------- calibration
//
// The measured time to bring bytes from a tier.

/// Weight of earlier observations at each new one.
const KEEP: f64 = 0.95;
/// An observation that is off by a larger factor describes the moment and not the machine:
/// it counts as if it were off by this factor.
const MOST_OFF: f64 = 4.0;
/// Observations before any is judged by the others.
const WARM: u64 = 4;

/// Fits `t = a * x + b * y` with `a` and `b` not below zero, by least squares of relative errors;
/// older observations count less.
#[derive(Clone, Copy, Debug)]
struct Fit {
    xx: f64,
    xy: f64,
    yy: f64,
    x: f64,
    y: f64,
    a: f64,
    b: f64,
    observed: u64,
}

impl Fit {
    /// Both initial values must be above zero.
    fn new(a: f64, b: f64) -> Fit {
        // As if each had been observed alone.
        let (xx, x, yy, y) = (PRIOR / (a * a), PRIOR / a, PRIOR / (b * b), PRIOR / b);
        Fit { xx, xy: 0.0, yy, x, y, a, b, observed: 0 }
    }

    fn at(&self, x: f64, y: f64) -> f64 {
        self.a * x + self.b * y
    }

    fn observe(&mut self, x: f64, y: f64, t: f64) {
        let expected = self.at(x, y);
        let t = match self.observed >= WARM && expected > 0.0 {
            true => t.clamp(expected / MOST_OFF, expected * MOST_OFF),
            false => t,
        };
        let (x, y) = (x / t, y / t);
        for sum in [&mut self.xx, &mut self.xy, &mut self.yy, &mut self.x, &mut self.y] {
            *sum *= KEEP;
        }
        self.xx += x * x;
        self.xy += x * y;
        self.yy += y * y;
        self.x += x;
        self.y += y;
        self.observed += 1;
        self.solve();
    }

    fn solve(&mut self) {
        let det = self.xx * self.yy - self.xy * self.xy;
        // The initial values keep it above zero, but not against endless equal observations.
        if det > 1e-9 * self.xx * self.yy {
            self.a = (self.x * self.yy - self.y * self.xy) / det;
            self.b = (self.y * self.xx - self.x * self.xy) / det;
        } else {
            let (before, now) = (self.a * self.xx + self.b * self.xy, self.x);
            let scale = if before > 0.0 { now / before } else { 1.0 };
            (self.a, self.b) = (self.a * scale, self.b * scale);
        }
        if self.a < 0.0 {
            (self.a, self.b) = (0.0, self.y / self.yy);
        } else if self.b < 0.0 {
            (self.a, self.b) = (self.x / self.xx, 0.0);
        }
    }
}

/// Bandwidth of a link: a delay for each transfer, then a rate.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    fit: Fit,
}

impl Speed {
    /// With initial values for delay and rate, both above zero.
    pub fn guess(delay_ns: f64, bytes_per_second: f64) -> Speed {
        Speed { fit: Fit::new(1e9 / bytes_per_second.max(1.0), delay_ns.max(1.0)) }
    }

    /// Records that `bytes` in `transfers` one after the other took `ns`.
    pub fn observe(&mut self, bytes: u64, transfers: u64, ns: u64) {
        if bytes > 0 && transfers > 0 && ns > 0 && ns <= MAX_NS {
            self.fit.observe(bytes as f64, transfers as f64, ns as f64);
        }
    }

    /// Time of `bytes` in `transfers`.
    pub fn ns(&self, bytes: u64, transfers: u64) -> f64 {
        self.fit.at(bytes as f64, transfers as f64)
    }

    /// Bytes that are moved in the time of so many delays.
    pub fn bytes_in(&self, delays: f64) -> u64 {
        (self.bytes_per_second() * self.fit.at(0.0, 1.0) * delays / 1e9) as u64
    }

    /// The rate alone.
    pub fn bytes_per_second(&self) -> f64 {
        if self.fit.a > 0.0 { 1e9 / self.fit.a } else { f64::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn terms(holes: bool, overlap: bool, rates: [f64; SOURCES]) -> Terms {
        let route = |rate| Route { speed: Speed::guess(1_000.0, rate), queued_ns: 0.0 };
        let cost = Cost { alpha: 2.0, beta: 100_000.0 };
        Terms { cost, routes: rates.map(route), holes, overlap, layers: 32 }
    }

    fn part(kind: u8, source: usize) -> Part {
        let mut bytes = [0; SOURCES];
        bytes[source % SOURCES] = 32 << 20;
        let need = match kind % 4 {
            0 => Need::Compute,
            1 => Need::Nothing,
            _ => Need::Load(bytes),
        };
        Part { tokens: 256, need }
    }

    /// Tries all combinations of steps.
    fn brute_force(parts: &[Part], terms: &Terms) -> f64 {
        let n = parts.len();
        let mut least = f64::INFINITY;
        for choice in 0u32..1 << n {
            let (mut load, mut broken, mut sound) = (Load::default(), false, true);
            for (i, ((at, tokens), part)) in each(parts).zip(parts).enumerate() {
                let compute = choice >> i & 1 == 1;
                match part.need {
                    _ if compute => load.compute_ns += terms.cost.of(at, tokens),
                    Need::Compute => sound = false,
                    Need::Nothing => {}
                    Need::Load(bytes) => load.add(&load_ns(terms, &bytes), 1.0),
                }
                // Nothing after a gap can be used. With holes, resident chunks are not computed
                // again.
                sound &= terms.holes || compute || !broken;
                sound &= !(terms.holes && compute && part.need == Need::Nothing);
                broken |= compute;
            }
            if sound {
                least = least.min(load.total(terms));
            }
        }
        least
    }

    proptest! {
        #[test]
        fn no_other_plan_is_faster(
            kinds in proptest::collection::vec((any::<u8>(), 0usize..4), 0..11),
            holes in any::<bool>(), overlap in any::<bool>(),
            rates in proptest::array::uniform4(1e8f64..1e11),
        ) {
            let parts: Vec<Part> = kinds.iter().map(|&(kind, source)| part(kind, source)).collect();
            let terms = terms(holes, overlap, rates);
            let mut plan = Plan::default();
            plan.make(&parts, &terms).unwrap();
            let best = brute_force(&parts, &terms);
            // Free choice among several sources is a knapsack problem; the plan may be 5 % above
            // the optimum.
            let within = if holes { 1.05 } else { 1.0 + 1e-9 };
            prop_assert!(plan.total_ns <= best * within + 1.0, "{} for {best}", plan.total_ns);
            prop_assert!(plan.total_ns >= best - 1.0 - best * 1e-9, "{} for {best}", plan.total_ns);
            let chunks: usize = plan.steps.iter().map(|s| s.chunks).sum();
            prop_assert_eq!(chunks, parts.len());
            let tokens: u64 = plan.steps.iter().map(|s| s.tokens).sum();
            prop_assert_eq!(tokens, 256 * parts.len() as u64);
        }
    }

    fn kinds(plan: &Plan) -> Vec<(StepKind, usize)> {
        plan.steps.iter().map(|s| (s.kind, s.chunks)).collect()
    }

    #[test]
    fn a_leading_hole_is_recomputed_and_the_rest_loaded() {
        let mut parts = vec![part(2, 0); 8];
        parts[0].need = Need::Compute;
        parts[1].need = Need::Compute;
        let mut plan = Plan::default();
        plan.make(&parts, &terms(true, false, [1e11; 4])).unwrap();
        assert_eq!(kinds(&plan), [(StepKind::Recompute, 2), (StepKind::Load, 6)]);
        assert_eq!(plan.steps[1].bytes, [6 * (32 << 20), 0, 0, 0]);
        plan.make(&parts, &terms(false, false, [1e11; 4])).unwrap();
        assert_eq!(kinds(&plan), [(StepKind::Recompute, 8)]);
        assert_eq!(plan.total_ns, plan.without_ns);
    }

    #[test]
    fn chunks_on_a_slow_tier_are_recomputed_cheapest_first() {
        // Loading 8 chunks takes longer than computing a few of them meanwhile.
        let parts = vec![part(2, 1); 8];
        let slow = terms(true, true, [1e11, 1e9, 1e9, 1e11]);
        let mut plan = Plan::default();
        plan.make(&parts, &slow).unwrap();
        let (kind, leading) = kinds(&plan)[0];
        assert!(kind == StepKind::Recompute && (1..8).contains(&leading), "{plan:?}");
        assert!(plan.total_ns < plan.without_ns);
        let mut jammed = slow;
        jammed.routes[1].queued_ns = 1e12;
        plan.make(&parts, &jammed).unwrap();
        assert_eq!(kinds(&plan), [(StepKind::Recompute, 8)]);
    }

    #[test]
    fn a_source_with_a_long_queue_is_not_used_despite_rounding() {
        for n in 2..40u64 {
            let part =
                |i| Part { tokens: 16, need: Need::Load([0, 1000 + 37 * (i * i % n), 0, 0]) };
            let parts: Vec<Part> = (0..n).map(part).collect();
            let mut terms = terms(true, false, [1e11, 3e9, 1e9, 1e11]);
            terms.routes[1].queued_ns = 1e12;
            let mut plan = Plan::default();
            plan.make(&parts, &terms).unwrap();
            assert_eq!(
                (kinds(&plan), plan.load_ns),
                (vec![(StepKind::Recompute, n as usize)], 0.0)
            );
        }
    }

    #[test]
    fn resident_chunks_cost_nothing() {
        let mut plan = Plan::default();
        plan.make(&[part(1, 0); 5], &terms(false, true, [1e9; 4])).unwrap();
        assert_eq!((kinds(&plan), plan.total_ns), (vec![(StepKind::Resident, 5)], 0.0));
        plan.make(&[], &terms(false, true, [1e9; 4])).unwrap();
        assert_eq!((plan.steps.len(), plan.total_ns), (0, 0.0));
    }
}

#[cfg(test)]
mod prefill_tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() <= by * b.abs()
    }

    /// Observations of a machine: any context and count, with an error of up to 10 %.
    fn observed(truth: Cost, state: &mut u64) -> (u64, u64, u64) {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(99);
        let (l, n) = ((*state >> 40) % 100_000, 1 + (*state >> 20) % 4096);
        let l = if *state >> 63 == 0 { 0 } else { l };
        let off = 0.9 + 0.2 * ((*state >> 33) % 1000) as f64 / 1000.0;
        (l, n, (truth.of(l, n) * off).max(n as f64 * 10.0) as u64)
    }

    proptest! {
        #[test]
        fn prefill_cost_is_fitted_to_noisy_observations(
            alpha in 0.0f64..50.0, beta in 1e3f64..1e6, seed in 1u64..1 << 40,
        ) {
            let (mut prefill, truth, mut state) = (Prefill::default(), Cost { alpha, beta }, seed);
            for _ in 0..200 {
                let (l, n, ns) = observed(truth, &mut state);
                prefill.observe(l, n, ns).unwrap();
            }
            for (l, n) in [(0, 512), (5_000, 512), (50_000, 2048), (90_000, 16)] {
                let (got, expected) = (prefill.cost().of(l, n), truth.of(l, n));
                prop_assert!(close(got, expected, 0.2), "{l} {n}: {got} for {expected}");
            }
        }

        /// At any time, and with any error.
        #[test]
        fn one_outlier_does_not_change_a_fit_of_ten(
            alpha in 0.0f64..50.0, beta in 1e3f64..1e6, seed in 1u64..1 << 40,
            when in 0usize..11, is_fast: bool, wrong in 1u64..1 << 20,
        ) {
            let (mut prefill, truth, mut state) = (Prefill::default(), Cost { alpha, beta }, seed);
            for i in 0..11 {
                if i == when {
                    let ns = if is_fast { 10 * wrong } else { MAX_NS };
                    prefill.observe(0, wrong, ns).unwrap();
                    continue;
                }
                // The shape is known: at the start, and after a long context.
                let (_, n, _) = observed(truth, &mut state);
                let l = if i % 2 == 0 { 0 } else { 50_000 };
                prefill.observe(l, n + 64, truth.of(l, n + 64) as u64).unwrap();
            }
            for (l, n) in [(0, 512), (50_000, 512)] {
                let (got, expected) = (prefill.cost().of(l, n), truth.of(l, n));
                prop_assert!(close(got, expected, 0.3), "{l} {n}: {got} for {expected}");
            }
        }
    }

    #[test]
    fn a_changed_machine_changes_the_fit() {
        let mut prefill = Prefill::default();
        (0..100).for_each(|_| prefill.observe(0, 512, 512 * 50_000).unwrap());
        (0..32).for_each(|_| prefill.observe(0, 512, 512 * 500_000).unwrap());
        assert!(close(prefill.cost().of(0, 512), 512.0 * 500_000.0, 0.01));
    }

    #[test]
    fn implausible_observations_are_rejected_and_a_fixed_cost_stays() {
        let mut prefill = Prefill::default();
        let most = MAX_TOKENS as u64;
        for (context, tokens, ns) in [
            (0, 0, 1000),
            (0, 5, 0),
            (0, 5, 49),
            (0, 5, u64::MAX),
            (0, u64::MAX, 5),
            (0, most + 1, MAX_NS),
            (most + 1, 1, 1_000_000),
        ] {
            assert!(prefill.observe(context, tokens, ns).is_err(), "{context} {tokens} {ns}");
        }
        assert!(prefill.fix(Some(Cost { alpha: f64::NAN, beta: 1.0 })).is_err());
        prefill.fix(Some(Cost { alpha: 0.5, beta: 7.0 })).unwrap();
        prefill.observe(0, 512, 1_000_000).unwrap();
        assert_eq!((prefill.cost().beta, prefill.observed()), (7.0, 1));
        prefill.fix(None).unwrap();
        assert!(close(prefill.cost().of(0, 512), 1e6, 0.01));
    }
}

#[cfg(test)]
mod calibration_tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() <= by * b.abs()
    }

    proptest! {
        #[test]
        fn bandwidth_and_latency_are_fitted(delay in 1e3f64..1e6, rate in 1e7f64..1e11) {
            let mut speed = Speed::guess(50_000.0, 1e9);
            let truth = |bytes: u64| delay + bytes as f64 * 1e9 / rate;
            for i in 0..100u64 {
                let bytes = 4096 << (i % 12);
                speed.observe(bytes, 1, truth(bytes).max(1.0) as u64);
            }
            for bytes in [4096, 65_536, 4 << 20] {
                prop_assert!(close(speed.ns(bytes, 1), truth(bytes), 0.1));
            }
        }
    }

    #[test]
    fn one_stall_is_damped_and_a_lasting_change_is_followed() {
        let mut speed = Speed::guess(10_000.0, 1e9);
        (0..50).for_each(|_| speed.observe(1 << 20, 1, 1 << 20));
        let before = speed.ns(1 << 20, 1);
        speed.observe(1 << 20, 1, 1 << 32);
        assert!(speed.ns(1 << 20, 1) < 1.2 * before);
        (0..200).for_each(|_| speed.observe(1 << 20, 1, 10 << 20));
        assert!(close(speed.ns(1 << 20, 1), 10.0 * (1 << 20) as f64, 0.05));
        assert!(speed.bytes_per_second() > 0.0);
    }
}
