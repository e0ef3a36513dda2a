//! What it takes to run a session again, from what is where and how fast it comes.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::chunks::Chunks;
use crate::meta::cost::Cost;
use crate::meta::index::Slot;
use crate::meta::layout::{Layout, Rule};
use crate::meta::reuse::{self, Found, Reach, State};
use crate::store::plan::{Need, Part, Plan, SOURCES, StepKind, Terms};
use crate::store::state::StoreState;
use crate::store::state::lookup::{MOST_KEPT, pending_bytes};

/// Plans that are compared where what a chunk needs hangs on the plan.
const TURNS: usize = 16;
/// Nobody computes at this price what can be loaded: ns a token.
const FORBIDDEN: Cost = Cost { alpha: 0.0, beta: 1e12 };

/// What a caller says of how it will run.
#[derive(Clone, Copy, Debug)]
pub struct PlanTerms {
    /// It computes while loads go on, layer by layer.
    pub overlap: bool,
    /// What is on its way into the store is counted on.
    pub wait: bool,
    /// The urgency of the loads.
    pub lane: usize,
    /// What computing costs, in ns; else what was observed in the namespace.
    pub cost: Option<Cost>,
}

impl Default for PlanTerms {
    fn default() -> PlanTerms {
        PlanTerms { overlap: true, wait: true, lane: 0, cost: None }
    }
}

/// Tokens in a row with the same deed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leg {
    /// What to do. Resident: nothing is needed of them.
    pub kind: StepKind,
    /// The first one.
    pub first_token: u64,
    /// How many.
    pub tokens: u64,
    /// Bytes that are loaded from memory, from disk, from elsewhere, from the device.
    pub bytes: [u64; SOURCES],
    /// How long this takes by itself.
    pub ns: f64,
}

/// The plan of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionPlan {
    /// All its tokens, in their order.
    pub legs: Vec<Leg>,
    /// Until all is there.
    pub total_ns: f64,
    /// Of that, loading alone.
    pub load_ns: f64,
    /// Of that, computing alone.
    pub compute_ns: f64,
    /// What computing all of it would take, from the first token on.
    pub without_ns: f64,
}

/// Memory of plans, used again.
#[derive(Default)]
pub(super) struct Drafts {
    parts: Vec<Part>,
    plan: Plan,
    session: SessionPlan,
}

/// What plans of one path are made of.
struct Ground<'a> {
    layout: &'a Layout,
    chunks: &'a Chunks,
    slots: &'a [Slot],
    tokens: u64,
    wait: bool,
    terms: Terms,
}

impl StoreState {
    /// The cheapest way to have all tokens of a session. No use is counted.
    pub fn plan(&mut self, session: u32, terms: &PlanTerms) -> Result<&SessionPlan> {
        let (space, tokens, reach) = self.find_path(session)?;
        let home = self.spaces[space as usize];
        let rows = &self.tables[home.table as usize];
        let routes = self.routes(space, terms.lane)?;
        let ground = Ground {
            layout: &rows.layout,
            chunks: &rows.chunks,
            slots: &self.scratch.slots,
            tokens,
            wait: terms.wait,
            terms: Terms {
                cost: terms.cost.unwrap_or_else(|| self.prefill(space).cost()),
                routes,
                holes: home.holes,
                overlap: terms.overlap,
                layers: rows.layout.layers() as u32,
            },
        };
        self.drafts.make(&ground, &mut self.scratch.found, ground.reached(&reach))?;
        Ok(&self.drafts.session)
    }
}

impl Ground<'_> {
    fn reached(&self, reach: &Reach) -> usize {
        if self.wait { reach.soon_chunks } else { reach.chunks }
    }

    fn choose(&self, until: usize, found: &mut [Found]) -> Result<()> {
        let Ground { chunks, layout, slots, wait, .. } = *self;
        reuse::choose(chunks, layout, slots, until, wait, found).map(|_| ())
    }
}

impl Drafts {
    fn make(&mut self, ground: &Ground, found: &mut [Found], reached: usize) -> Result<()> {
        if self.parts.capacity() > found.len().max(MOST_KEPT) + 1 {
            *self = Drafts::default();
        }
        let until = if ground.terms.holes { found.len() } else { reached };
        ground.choose(until, found)?;
        self.fill(ground, found)?;
        if ground.layout.groups().iter().all(|group| group.rule == Rule::Full) {
            self.plan.make(&self.parts, &ground.terms)?;
            return self.notify(ground);
        }
        // What is computed reaches back over chunks that else nobody needs.
        self.session.total_ns = f64::INFINITY;
        self.offer(ground)?;
        match ground.terms.holes {
            true => self.give_up_more(ground, found),
            false => self.try_points(ground, found, reached),
        }
    }

    /// Loads less, step by step: after each, what is needed then has to be seen.
    fn give_up_more(&mut self, ground: &Ground, found: &mut [Found]) -> Result<()> {
        for _ in 0..TURNS {
            self.plan.make(&self.parts, &ground.terms)?;
            if !self.give_up(found) {
                break;
            }
            ground.choose(found.len(), found)?;
            self.fill(ground, found)?;
            self.offer(ground)?;
        }
        // Or everything is computed.
        found.iter_mut().for_each(|one| one.given_up = true);
        ground.choose(found.len(), found)?;
        self.fill(ground, found)?;
        self.offer(ground)
    }

    /// Loads up to points that lie evenly before the farthest one.
    fn try_points(&mut self, ground: &Ground, found: &mut [Found], reached: usize) -> Result<()> {
        let mut last = reached;
        for turn in (0..TURNS).rev() {
            let end = reached * turn / TURNS;
            let (slots, before) = (&ground.slots[..end], &mut found[..end]);
            let reach = reuse::look(ground.chunks, ground.layout, slots, before)?;
            let until = ground.reached(&reach);
            if until < last {
                ground.choose(until, found)?;
                self.fill(ground, found)?;
                self.offer(ground)?;
            }
            last = until;
        }
        Ok(())
    }

    /// What each chunk needs, and what is left over behind the last one.
    fn fill(&mut self, ground: &Ground, found: &[Found]) -> Result<()> {
        self.parts.clear();
        if self.parts.try_reserve(found.len() + 1).is_err() {
            fail!(NoMem, "no memory for a plan of {} chunks", found.len());
        }
        self.parts.extend(found.iter().map(|one| part(ground.layout, one)));
        let known: u64 = found.iter().map(|one| u64::from(one.tokens)).sum();
        let rest = ground.tokens.saturating_sub(known) as u32;
        if rest > 0 {
            self.parts.push(Part { tokens: rest, need: Need::Compute });
        }
        Ok(())
    }

    /// Takes a plan that loads all that it can, if none was better.
    fn offer(&mut self, ground: &Ground) -> Result<()> {
        let forced = Terms { cost: FORBIDDEN, holes: true, ..ground.terms };
        self.plan.make(&self.parts, &forced)?;
        let each = self.parts.iter().scan(0, |at, part| {
            let tokens = u64::from(part.tokens);
            *at += tokens;
            Some((*at - tokens, tokens, part.need))
        });
        let computed = each.filter(|(.., need)| *need == Need::Compute);
        let compute_ns = computed.map(|(at, n, _)| ground.terms.cost.of(at, n)).sum();
        let load_ns = self.plan.load_ns;
        let total_ns = match ground.terms.overlap {
            true => load_ns.max(compute_ns + load_ns / f64::from(ground.terms.layers.max(1))),
            false => load_ns + compute_ns,
        };
        (self.plan.compute_ns, self.plan.total_ns) = (compute_ns, total_ns);
        if total_ns < self.session.total_ns { self.notify(ground) } else { Ok(()) }
    }

    /// Notes what the plan would rather compute than load; false when that was known.
    fn give_up(&self, found: &mut [Found]) -> bool {
        let mut news = false;
        for one in self.plan.segments.iter().filter(|one| one.kind == StepKind::Recompute) {
            for found in found.iter_mut().skip(one.first).take(one.chunks) {
                let is_new = matches!(found.state, State::Hit | State::Pending);
                news |= is_new;
                found.given_up |= is_new;
            }
        }
        news
    }

    /// Writes the plan down in tokens.
    fn notify(&mut self, ground: &Ground) -> Result<()> {
        let (plan, session, cost) = (&self.plan, &mut self.session, ground.terms.cost);
        (session.total_ns, session.load_ns) = (plan.total_ns, plan.load_ns);
        (session.compute_ns, session.without_ns) = (plan.compute_ns, cost.of(0, ground.tokens));
        session.legs.clear();
        if session.legs.try_reserve(plan.segments.len()).is_err() {
            fail!(NoMem, "no memory for {} legs of a plan", plan.segments.len());
        }
        let mut at = 0;
        session.legs.extend(plan.segments.iter().map(|one| {
            let [all, disk, remote, replicas] = one.bytes;
            let bytes = [all.saturating_sub(disk).saturating_sub(remote), disk, remote, replicas];
            let (kind, tokens, first_token) = (one.kind, one.tokens, at);
            at += tokens;
            let ns =
                if kind == StepKind::Recompute { cost.of(first_token, tokens) } else { one.ns };
            Leg { kind, first_token, tokens, bytes, ns }
        }));
        Ok(())
    }
}

/// What a chunk needs: all of it is copied, and what is below memory is read first.
fn part(layout: &Layout, one: &Found) -> Part {
    let bytes = |tier: Tier| one.bytes[tier as usize];
    let (disk, remote, replicas) = (bytes(Tier::Disk), bytes(Tier::Remote), bytes(Tier::Device));
    let copied = bytes(Tier::Host) + disk + remote + pending_bytes(layout, one);
    let need = match one.state {
        State::Miss => Need::Compute,
        _ if copied + replicas == 0 => Need::Nothing,
        _ => Need::Load([copied, disk, remote, replicas]),
    };
    Part { tokens: one.tokens, need }
}
