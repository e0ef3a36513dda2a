//! What it takes to run a session again: for every chunk of its path whether it is
//! there, is loaded, or is computed again; the cheapest mix.
//!
//! Where an engine can only go on from a prefix, the choice is where loading ends
//! and computing begins. Where it can compute holes it is free for each chunk:
//! the leading ones are cheap to compute (little context), so they are the first
//! to be given up by a tier that is the bottleneck.

use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;
use crate::store::calibration::Speed;

/// Tiers that chunks are loaded from: host, disk, remote, device.
pub const SOURCES: usize = 4;
/// Most chunks of one plan.
pub const MAX_CHUNKS: usize = 1 << 22;

/// What a chunk needs before it can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: it is where the engine computes.
    Nothing,
    /// So many bytes from each source.
    Load([u64; SOURCES]),
    /// It is nowhere, or not whole.
    Compute,
}

/// A chunk of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its tokens.
    pub tokens: u32,
    /// What it needs.
    pub need: Need,
}

/// What to do with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Use it.
    Resident,
    /// Load it.
    Load,
    /// Compute it.
    Recompute,
}

/// A way from a source: its speed, and what waits there already.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// How fast.
    pub speed: Speed,
    /// Time until what is queued there has gone through.
    pub queued_ns: f64,
}

/// What a plan goes by.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// What computing costs, in ns.
    pub cost: Cost,
    /// The sources.
    pub routes: [Route; SOURCES],
    /// The engine can compute holes.
    pub holes: bool,
    /// Loads run while the engine computes, layer by layer; else one after the
    /// other.
    pub overlap: bool,
    /// Layers of the model: the first one must be there before anything begins.
    pub layers: u32,
}

/// Chunks in a row with the same deed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// What to do.
    pub kind: StepKind,
    /// The first chunk.
    pub first: usize,
    /// How many.
    pub chunks: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Bytes from each source.
    pub bytes: [u64; SOURCES],
    /// How long this takes by itself.
    pub ns: f64,
}

/// A plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// In the order of the path.
    pub segments: Vec<Segment>,
    /// Until all is there.
    pub total_ns: f64,
    /// Of that, loading alone.
    pub load_ns: f64,
    /// Of that, computing alone.
    pub compute_ns: f64,
    /// What computing everything that is not resident would take.
    pub without_ns: f64,
    /// Scratch: a deed a chunk.
    kinds: Vec<StepKind>,
    /// Scratch: chunks that were given up, in this order.
    order: Vec<u32>,
    /// Scratch: what each source has to bring, the cheapest to compute last.
    waits: [Vec<Wait>; SOURCES],
}

/// A chunk that can be loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Wait {
    chunk: u32,
    compute_ns: f64,
    load_ns: [f64; SOURCES],
}

/// Times that add up while a plan is made.
#[derive(Clone, Copy, Default)]
struct Load {
    ns: [f64; SOURCES],
    compute_ns: f64,
}

impl Load {
    fn loading(&self, terms: &Terms) -> f64 {
        let waits = self.ns.iter().zip(&terms.routes);
        waits
            .map(|(&ns, route)| if ns > 0.0 { ns + route.queued_ns } else { 0.0 })
            .fold(0.0, f64::max)
    }

    fn total(&self, terms: &Terms) -> f64 {
        let (load, compute) = (self.loading(terms), self.compute_ns);
        match terms.overlap {
            // Nothing is computed before the first layer has come.
            true => load.max(compute + load / f64::from(terms.layers.max(1))),
            false => load + compute,
        }
    }

    fn add(&mut self, ns: &[f64; SOURCES], sign: f64) {
        for (sum, ns) in self.ns.iter_mut().zip(ns) {
            let new = *sum + sign * ns;
            // What was added comes out again, but for rounding: what is left of that is
            // nothing, or it would be waited for.
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
            || self.waits.iter_mut().any(|waits| waits.try_reserve(parts.len()).is_err());
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
        self.notify(parts, terms)
    }

    /// The best place where loading ends: behind it all is computed.
    fn prefix(&mut self, parts: &[Part], terms: &Terms) -> Load {
        let mut behind: f64 = each(parts).map(|(at, n)| terms.cost.of(at, n)).sum();
        let mut load = Load { compute_ns: behind, ..Load::default() };
        let (mut best, mut ends) = (load, 0);
        for (i, ((at, n), part)) in each(parts).zip(parts).enumerate() {
            match part.need {
                Need::Compute => break,
                Need::Nothing => {}
                Need::Load(bytes) => load.add(&load_ns(terms, &bytes), 1.0),
            }
            behind = (behind - terms.cost.of(at, n)).max(0.0);
            load.compute_ns = behind;
            // Of equals the longer prefix: the engine then does less.
            if load.total(terms) <= best.total(terms) {
                (best, ends) = (load, i + 1);
            }
        }
        self.kinds[ends..].fill(StepKind::Recompute);
        best
    }

    /// The best deed for each: from loading all that can be, the tier that takes
    /// longest gives up a chunk that is cheap to compute, again and again; the
    /// best of these mixes is taken.
    fn free(&mut self, parts: &[Part], terms: &Terms) -> Load {
        let mut load = Load::default();
        self.gather(parts, terms, &mut load);
        for (source, waits) in self.waits.iter_mut().enumerate() {
            // What computing costs in parts of the loading that it saves.
            let worth = |one: &Wait| one.compute_ns / one.load_ns[source].max(1.0);
            waits.sort_by(|a, b| worth(b).total_cmp(&worth(a)).then(b.chunk.cmp(&a.chunk)));
        }
        let (mut best, mut given) = (load, 0);
        self.order.clear();
        while let Some(one) = self.next(&load, terms) {
            load.add(&one.load_ns, -1.0);
            load.compute_ns += one.compute_ns;
            self.kinds[one.chunk as usize] = StepKind::Recompute;
            self.order.push(one.chunk);
            if load.total(terms) < best.total(terms) {
                (best, given) = (load, self.order.len());
            }
        }
        for &chunk in &self.order[given..] {
            self.kinds[chunk as usize] = StepKind::Load;
        }
        best
    }

    /// Fills `waits` with what each source has to bring; the times in all.
    fn gather(&mut self, parts: &[Part], terms: &Terms, load: &mut Load) {
        self.waits.iter_mut().for_each(Vec::clear);
        for (i, ((at, n), part)) in each(parts).zip(parts).enumerate() {
            let compute_ns = terms.cost.of(at, n);
            match part.need {
                Need::Nothing => {}
                Need::Compute => load.compute_ns += compute_ns,
                Need::Load(bytes) => {
                    let one = Wait { chunk: i as u32, compute_ns, load_ns: load_ns(terms, &bytes) };
                    load.add(&one.load_ns, 1.0);
                    let sources = self.waits.iter_mut().zip(bytes).filter(|(_, bytes)| *bytes > 0);
                    sources.for_each(|(waits, _)| waits.push(one));
                }
            }
        }
    }

    /// The cheapest chunk of the source that takes longest.
    fn next(&mut self, load: &Load, terms: &Terms) -> Option<Wait> {
        let ends =
            |i: usize| if load.ns[i] > 0.0 { load.ns[i] + terms.routes[i].queued_ns } else { 0.0 };
        let slowest = (0..SOURCES).max_by(|&a, &b| ends(a).total_cmp(&ends(b)))?;
        // A chunk that comes from several sources waits in each.
        while let Some(one) = self.waits[slowest].pop() {
            if self.kinds[one.chunk as usize] == StepKind::Load {
                return Some(one);
            }
        }
        None
    }

    /// Joins chunks with the same deed.
    fn notify(&mut self, parts: &[Part], terms: &Terms) -> Result<()> {
        self.segments.clear();
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
            if self.segments.last().is_none_or(|last| last.kind != kind) {
                if self.segments.try_reserve(1).is_err() {
                    fail!(NoMem, "no memory for another segment of a plan");
                }
                let empty =
                    Segment { kind, first: i, chunks: 0, tokens: 0, bytes: [0; SOURCES], ns: 0.0 };
                self.segments.push(empty);
            }
            if let Some(last) = self.segments.last_mut() {
                last.chunks += 1;
                last.tokens += n;
                last.ns += ns;
                last.bytes.iter_mut().zip(bytes).for_each(|(sum, b)| *sum += b);
            }
        }
        Ok(())
    }
}

/// Where each chunk starts, and its tokens.
fn each(parts: &[Part]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let mut at = 0;
    parts.iter().map(move |part| {
        let start = at;
        at += u64::from(part.tokens);
        (start, u64::from(part.tokens))
    })
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

    /// Every way to do it.
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
                // Behind a gap nothing can be used; what is there is not computed again
                // where holes are possible.
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
        fn none_is_better(
            kinds in proptest::collection::vec((any::<u8>(), 0usize..4), 0..11),
            holes in any::<bool>(), overlap in any::<bool>(),
            rates in proptest::array::uniform4(1e8f64..1e11),
        ) {
            let parts: Vec<Part> = kinds.iter().map(|&(kind, source)| part(kind, source)).collect();
            let terms = terms(holes, overlap, rates);
            let mut plan = Plan::default();
            plan.make(&parts, &terms).unwrap();
            let best = brute_force(&parts, &terms);
            // Free choice from several tiers is a knapsack: near is enough.
            let within = if holes { 1.05 } else { 1.0 + 1e-9 };
            prop_assert!(plan.total_ns <= best * within + 1.0, "{} for {best}", plan.total_ns);
            prop_assert!(plan.total_ns >= best - 1.0 - best * 1e-9, "{} for {best}", plan.total_ns);
            let chunks: usize = plan.segments.iter().map(|s| s.chunks).sum();
            prop_assert_eq!(chunks, parts.len());
            let tokens: u64 = plan.segments.iter().map(|s| s.tokens).sum();
            prop_assert_eq!(tokens, 256 * parts.len() as u64);
        }
    }

    fn kinds(plan: &Plan) -> Vec<(StepKind, usize)> {
        plan.segments.iter().map(|s| (s.kind, s.chunks)).collect()
    }

    #[test]
    fn a_hole_at_the_front_is_computed_and_the_tail_is_kept() {
        let mut parts = vec![part(2, 0); 8];
        parts[0].need = Need::Compute;
        parts[1].need = Need::Compute;
        let mut plan = Plan::default();
        plan.make(&parts, &terms(true, false, [1e11; 4])).unwrap();
        assert_eq!(kinds(&plan), [(StepKind::Recompute, 2), (StepKind::Load, 6)]);
        assert_eq!(plan.segments[1].bytes, [6 * (32 << 20), 0, 0, 0]);
        plan.make(&parts, &terms(false, false, [1e11; 4])).unwrap();
        assert_eq!(kinds(&plan), [(StepKind::Recompute, 8)]);
        assert_eq!(plan.total_ns, plan.without_ns);
    }

    #[test]
    fn a_slow_tier_gives_up_what_is_cheap_to_compute() {
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
    fn what_is_jammed_is_given_up_whole_though_sums_are_rounded() {
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
    fn what_is_there_costs_nothing() {
        let mut plan = Plan::default();
        plan.make(&[part(1, 0); 5], &terms(false, true, [1e9; 4])).unwrap();
        assert_eq!((kinds(&plan), plan.total_ns), (vec![(StepKind::Resident, 5)], 0.0));
        plan.make(&[], &terms(false, true, [1e9; 4])).unwrap();
        assert_eq!((plan.segments.len(), plan.total_ns), (0, 0.0));
    }
}
