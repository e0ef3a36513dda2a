//! Plans, compared with `store/plan` where that is exact, and checked for their guarantees
//! elsewhere.

use kvtier::base::budget::Tier;
use kvtier::base::status::Status;
use kvtier::meta::cost::Cost;
use kvtier::meta::layout::Rule;
use kvtier::meta::reuse::State;
use kvtier::store::plan::{Need, Part, Plan, SOURCES, StepKind, Terms};
use kvtier::store::state::plans::{PlanTerms, SessionPlan};
use kvtier::store::state::{StoreState, Wanted};

use crate::look::naive::{Chosen, Rows};

use crate::look::world::{Namespace, World};

const HOST: usize = Tier::Host as usize;
const DISK: usize = Tier::Disk as usize;

fn part_of(rows: &Rows, chunk: usize, one: &Chosen) -> Part {
    let copied = one.bytes[HOST] + one.bytes[DISK] + one.pending_bytes;
    let need = match one.state {
        State::Miss => Need::Compute,
        _ if copied == 0 => Need::Nothing,
        _ => Need::Load([copied, one.bytes[DISK], 0, 0]),
    };
    Part { tokens: rows.tokens[chunk] as u32, need }
}

fn terms_of(core: &StoreState, namespace: &Namespace, terms: &PlanTerms) -> Terms {
    Terms {
        cost: terms.cost.unwrap_or(core.prefill(namespace.number).cost()),
        routes: core.routes(namespace.number, terms.lane).unwrap(),
        holes: namespace.holes,
        overlap: terms.overlap,
        layers: namespace.layout.layers() as u32,
    }
}

/// Time of a choice that loads every chunk that can be loaded.
fn honest(rows: &Rows, chosen: &[Chosen], terms: &Terms) -> f64 {
    let (mut compute, mut loads) = (0.0, [0.0; SOURCES]);
    for (chunk, one) in chosen.iter().enumerate() {
        match part_of(rows, chunk, one).need {
            Need::Compute => compute += terms.cost.of(rows.start(chunk), rows.tokens[chunk]),
            Need::Nothing => {}
            Need::Load(bytes) => {
                for ((sum, bytes), route) in loads.iter_mut().zip(bytes).zip(&terms.routes) {
                    *sum += if bytes > 0 { route.speed.ns(bytes, 1) } else { 0.0 };
                }
            }
        }
    }
    let waits = loads.iter().zip(&terms.routes);
    let load = waits.map(|(&ns, r)| if ns > 0.0 { ns + r.queued_ns } else { 0.0 });
    let load = load.fold(0.0, f64::max);
    match terms.overlap {
        true => f64::max(load, compute + load / f64::from(terms.layers)),
        false => load + compute,
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * b.abs() + 2.0
}

/// The step kind of each chunk. The steps of the plan cover the chunks exactly.
fn steps_of(rows: &Rows, plan: &SessionPlan) -> Vec<StepKind> {
    let (mut steps, mut at) = (Vec::new(), 0);
    for (i, step) in plan.steps.iter().enumerate() {
        assert_eq!(step.first_token, at);
        assert!(i == 0 || plan.steps[i - 1].kind != step.kind, "adjacent steps of the same kind");
        at += step.tokens;
        while steps.len() < rows.tokens.len() && rows.start(steps.len() + 1) <= at {
            steps.push(step.kind);
        }
        assert_eq!(rows.start(steps.len()), at, "a step ends inside a chunk");
    }
    assert_eq!(at, rows.tokens.iter().sum::<u64>());
    steps
}

/// Checks that the steps suffice, match the reported times and bytes, and contain nothing unneeded.
fn check_sound(rows: &Rows, plan: &SessionPlan, wait: bool, terms: &Terms) {
    let steps = steps_of(rows, plan);
    let is_computed = |chunk: usize| steps[chunk] == StepKind::Recompute;
    let starts = (0..steps.len()).filter(|&chunk| is_computed(chunk)).map(|c| rows.start(c));
    let points: Vec<u64> = starts.chain([rows.start(steps.len())]).collect();
    if !terms.holes {
        assert!(steps.windows(2).all(|pair| pair[0] != StepKind::Recompute || pair[1] == pair[0]));
    }
    let (mut runs, mut sums) = (plan.steps.iter(), [0; SOURCES]);
    let mut run = runs.next();
    for (chunk, step) in steps.iter().enumerate() {
        let layers = 0..rows.layout.layers();
        let needed = layers.filter(|&l| points.iter().any(|&p| rows.needs(l, p, chunk)));
        let needed: Vec<usize> = needed.collect();
        match step {
            StepKind::Recompute => {}
            StepKind::Resident => assert!(needed.is_empty(), "chunk {chunk} is needed"),
            StepKind::Load => {
                assert!(needed.iter().all(|&layer| rows.has(chunk, layer, wait)));
                let (bytes, pending) = rows.load(chunk, &points);
                sums[0] += bytes[HOST] + pending;
                sums[1] += bytes[DISK];
            }
        }
        if let Some(one) = run.filter(|one| rows.start(chunk + 1) == one.first_token + one.tokens) {
            assert_eq!(one.bytes, sums);
            if one.kind == StepKind::Recompute {
                assert!(close(one.ns, terms.cost.of(one.first_token, one.tokens)));
            }
            (run, sums) = (runs.next(), [0; SOURCES]);
        }
    }
    let computed = plan.steps.iter().filter(|step| step.kind == StepKind::Recompute);
    let compute_ns: f64 = computed.map(|step| step.ns).sum();
    assert!(close(plan.compute_ns, compute_ns));
    assert!(close(plan.without_ns, terms.cost.of(0, points[points.len() - 1])));
    assert!(plan.total_ns <= plan.without_ns * 1.000001 + 1.0);
}

fn check(
    core: &mut StoreState,
    namespace: &Namespace,
    session: u32,
    rows: &Rows,
    asked: &PlanTerms,
) -> bool {
    let terms = terms_of(core, namespace, asked);
    let plan = core.plan(session, asked).unwrap();
    check_sound(rows, plan, asked.wait, &terms);
    let reached = rows.reach(asked.wait);
    let until = if namespace.holes { rows.tokens.len() } else { reached };
    let chosen = rows.choose(until, asked.wait, |_| false);
    let all = honest(rows, &chosen, &terms);
    assert!(plan.total_ns <= all * 1.000001 + 1.0, "{} for {all}", plan.total_ns);
    if namespace.layout.groups().iter().all(|group| group.rule == Rule::Full) {
        let parts = chosen.iter().enumerate().map(|(chunk, one)| part_of(rows, chunk, one));
        let parts: Vec<Part> = parts.collect();
        let mut same = Plan::default();
        same.make(&parts, &terms).unwrap();
        let want: Vec<_> = same.steps.iter().map(|s| (s.kind, s.tokens)).collect();
        assert_eq!(
            plan.steps.iter().map(|step| (step.kind, step.tokens)).collect::<Vec<_>>(),
            want
        );
        assert!(close(plan.total_ns, same.total_ns) && close(plan.load_ns, same.load_ns));
    } else if !namespace.holes {
        // No other point of continuation is much better.
        let rows_of = |n: usize| honest(rows, &rows.choose(n, asked.wait, |_| false), &terms);
        let sound = |&n: &usize| {
            let chosen = rows.choose(n, asked.wait, |_| false);
            chosen[..n].iter().all(|one| one.state != State::Miss)
        };
        let best = (0..=reached).filter(sound).map(rows_of).fold(f64::INFINITY, f64::min);
        assert!(plan.total_ns <= best * 1.25 + 1.0, "{} for {best}", plan.total_ns);
    }
    plan.steps.len() > 1
}

#[test]
fn plans_cover_the_session_at_minimal_cost() {
    let (mut mixed, mut steps) = (0, [0; 3]);
    for seed in 0..12 {
        let mut world = World::new(seed, (4 + seed) << 16, (10 + seed) * 131_072 + 400_000);
        for step in 0..400 {
            world.step();
            if step % 6 != 0 {
                continue;
            }
            let asked = PlanTerms {
                overlap: world.random.coin(),
                wait: world.random.coin(),
                lane: world.random.below(3) as usize,
                // The cost ranges from always loading to always recomputing.
                cost: Some(Cost { alpha: 0.5, beta: 10f64.powi(world.random.below(5) as i32 + 1) }),
            };
            let mut core = world.core.0.lock();
            let before = core.report();
            for session in &world.sessions {
                let namespace = &world.namespaces[session.namespace];
                let tail = core.session(session.number).unwrap().path().tail();
                let rows = Rows::of(&core, namespace, &session.tokens, tail);
                mixed += u32::from(check(&mut core, namespace, session.number, &rows, &asked));
                let plan = core.plan(session.number, &asked).unwrap();
                plan.steps.iter().for_each(|step| steps[step.kind as usize] += 1);
            }
            assert_eq!(core.report(), before, "a plan counted as a use");
        }
    }
    assert!(mixed > 100 && steps.iter().all(|&n| n > 50), "{mixed} {steps:?}");
}

/// Segments that a plan loads can be loaded as planned, also where only the end of a window or
/// state is stored.
#[test]
fn planned_segments_can_be_loaded() {
    let mut world = World::new(5, 8 << 20, 0);
    let cost = Some(Cost { alpha: 0.0, beta: 1e9 });
    let terms = PlanTerms { cost, ..PlanTerms::default() };
    for namespace in 0..world.namespaces.len() {
        let layout = world.namespaces[namespace].layout.clone();
        let each = layout.chunk_tokens() as usize;
        let all = 10 * each;
        let at = world.open(namespace, 0);
        world.grow(at, namespace as u32, all);
        let mut partial = false;
        for layer in 0..layout.layers() {
            let reach = layout.group(layer).unwrap().rule.reach_tokens().min(all as u64);
            let first = (all - reach as usize) / each * each;
            partial |= first > 0;
            let put = kvtier::store::state::TransferKind::Put;
            assert!(world.submit_part(at, put, 0, first, all - first, layer..layer + 1));
            world.rest(0);
        }
        let plan = world.core.0.lock().plan(world.sessions[at].number, &terms).unwrap().clone();
        let loads = plan.steps.iter().filter(|step| step.kind == StepKind::Load);
        let loads: Vec<_> = loads.map(|step| (step.first_token, step.tokens)).collect();
        assert!(plan.steps.iter().all(|step| step.kind != StepKind::Recompute));
        let (mut missed, get) = ([0; 2], kvtier::store::state::TransferKind::Get);
        for (first, tokens) in loads {
            for (i, wanted) in [Wanted::All, Wanted::Needed].into_iter().enumerate() {
                (world.wanted, world.missed) = (wanted, 0);
                let (first, tokens) = (first as usize, tokens as usize);
                assert!(world.submit_part(at, get, 0, first, tokens, 0..layout.layers()));
                world.rest(0);
                missed[i] += world.missed;
            }
            world.wanted = Wanted::All;
        }
        let has_full = layout.groups().iter().any(|group| group.rule == Rule::Full);
        assert_eq!(missed, [u32::from(partial && has_full), 0], "{layout:?}");
    }
}

#[test]
fn observed_prefill_speed_decides_the_plan() {
    let mut world = World::new(3, 4 << 20, 0);
    let at = world.open(0, 0);
    world.grow(at, 1, 64);
    assert!(world.submit_part(at, kvtier::store::state::TransferKind::Put, 0, 0, 64, 0..3));
    world.rest(0);
    let (number, namespace) = (world.sessions[at].number, world.namespaces[0].number);
    let mut core = world.core.0.lock();
    let terms = PlanTerms { overlap: false, ..PlanTerms::default() };
    let steps = |core: &mut StoreState| {
        core.plan(number, &terms).unwrap().steps.iter().map(|step| step.kind).collect::<Vec<_>>()
    };
    for _ in 0..50 {
        core.observe_prefill(namespace, 0, 1000, 1_000_000_000).unwrap();
    }
    assert_eq!(steps(&mut core), [StepKind::Load], "a millisecond a token");
    for _ in 0..400 {
        core.observe_prefill(namespace, 0, 1000, 10_000).unwrap();
    }
    assert_eq!(steps(&mut core), [StepKind::Recompute], "ten nanoseconds a token");
    core.fix_prefill(namespace, Some(Cost { alpha: 0.0, beta: 1e6 })).unwrap();
    assert_eq!(steps(&mut core), [StepKind::Load]);
    assert_eq!(core.prefill(world.namespaces[1].number).observed(), 0, "estimates per namespace");
    let none = core.observe_prefill(99, 0, 1, 1).unwrap_err();
    assert_eq!(none.status(), Status::NotFound);
    assert!(core.observe_prefill(namespace, 0, 0, 1).is_err());
    assert_eq!(core.plan(77, &terms).unwrap_err().status(), Status::NotFound);
}
