//! The state of the streamer against a simulated machine: the time of passes; no order of calls and
//! no fault leads to wrong bytes or a missing answer.

use crate::world;

use kvtier::base::status::{Error, Status};
use kvtier::device::Event;
use kvtier::stream::plan::{ComputeLocation, Mode, Residency};
use kvtier::stream::scheduler::{Acquired, Lease, Scheduler, Setup};
use kvtier::stream::units::Role;
use proptest::prelude::*;
use world::{MIB, World, plan, setup, units};

const LAYERS: usize = 80;
const LAYER_BYTES: u64 = 640 * MIB;
const CHUNK: u64 = 8 * MIB;
const MS: u64 = 1_000_000;

/// Bytes a second at which a layer takes so long.
fn speed(ms: f64) -> f64 {
    LAYER_BYTES as f64 / (ms / 1e3)
}

/// So many of a home, at equal distances among those that have none yet.
fn spread(residencies: &mut [Residency], count: usize, home: Residency) {
    let open: Vec<usize> =
        (0..residencies.len()).filter(|&i| residencies[i] == Residency::File).collect();
    for i in 0..count {
        residencies[open[i * open.len() / count]] = home;
    }
}

/// Duration of a steady pass, in milliseconds.
fn steady(
    residencies: Vec<Residency>,
    mode: Mode,
    slots: u32,
    staging_bytes: u64,
    compute_us: u64,
) -> f64 {
    let units = units(&[(Role::Layer, LAYER_BYTES); LAYERS]);
    let mut plan = plan(&units, ComputeLocation::Device, residencies, slots, staging_bytes);
    plan.mode = mode;
    let core = Scheduler::new(&setup(&units, &plan)).expect("a core");
    let mut world = World::new(core, &units, speed(200.0), speed(103.0));
    world.settle();
    let order: Vec<u32> = (0..LAYERS as u32).collect();
    world.run(&order, compute_us * 1000);
    world.run(&order, compute_us * 1000);
    world.run(&order, compute_us * 1000) as f64 / 1e6
}

fn assert_close(value: f64, goal: f64, percent: f64) {
    assert!((value / goal - 1.0).abs() * 100.0 <= percent, "{value} instead of {goal}");
}

#[test]
fn pass_time_matches_the_model() {
    let tier = |a: usize, b: usize| {
        let mut residencies = vec![Residency::File; LAYERS];
        spread(&mut residencies, a, Residency::Device);
        spread(&mut residencies, b, Residency::Host);
        residencies
    };
    let first = |a: usize, b: usize| {
        let home = |i: usize| {
            if i < a {
                Residency::Device
            } else if i < a + b {
                Residency::Host
            } else {
                Residency::File
            }
        };
        (0..LAYERS).map(home).collect::<Vec<_>>()
    };
    // 29 on the device, 51 in host memory: the link is what counts until computing is.
    for (compute_us, goal) in [(700, 5253.0), (20_000, 5253.0), (40_000, 5253.0), (90_000, 7200.0)]
    {
        assert_close(steady(tier(29, 51), Mode::Tiered, 2, 8 * CHUNK, compute_us), goal, 5.0);
    }
    assert_close(steady(tier(29, 51), Mode::Tiered, 2, 8 * CHUNK, 65_000), 5365.0, 5.0);
    // Contiguous residents hide no more transfers than there are slots.
    assert_close(steady(first(29, 51), Mode::Tiered, 2, 8 * CHUNK, 40_000), 6287.0, 3.0);
    // Some in files: the disk reads while the others are copied.
    let staging = 2 * LAYER_BYTES;
    assert_close(steady(tier(20, 30), Mode::Tiered, 2, staging, 700), 6180.0, 5.0);
    assert_close(steady(first(20, 30), Mode::Tiered, 2, staging, 700), 8896.0, 5.0);
    // Nothing but slots: all is copied in every pass.
    assert_close(
        steady(vec![Residency::Host; LAYERS], Mode::Ring, 31, 8 * CHUNK, 700),
        8240.0,
        3.0,
    );
}

#[test]
fn resident_units_are_read_once() {
    let units = units(&[(Role::Layer, 20 * MIB); 10]);
    let plan = plan(&units, ComputeLocation::Host, vec![Residency::Host; 10], 0, 0);
    let core = Scheduler::new(&setup(&units, &plan)).expect("a core");
    let mut world = World::new(core, &units, 1e9, 1e9);
    let order: Vec<u32> = (0..10).collect();
    for _ in 0..3 {
        world.run(&order, MS);
    }
    assert_eq!(world.core.stats().read_bytes, 200 * MIB);
    assert_eq!(world.core.missing_residents(), 0);
}

#[test]
fn fault_is_reported_once_and_retried() {
    let units = units(&[(Role::Layer, 20 * MIB); 6]);
    for home in [Residency::File, Residency::Host] {
        let plan = plan(&units, ComputeLocation::Host, vec![home; 6], 2, 0);
        let core = Scheduler::new(&setup(&units, &plan)).expect("a core");
        let mut world = World::new(core, &units, 1e9, 1e9);
        let mut left = 1;
        world.fate = Box::new(move || {
            left -= 1;
            if left == 0 { Err(Error::new(Status::Io, "a bad sector")) } else { Ok(()) }
        });
        assert_eq!(world.acquire(0).expect_err("a fault").status(), Status::Io);
        let lease = world.acquire(0).expect("read again");
        world.release(&lease);
        let order: Vec<u32> = (0..6).collect();
        world.run(&order, MS);
        world.run(&order, MS);
    }
}

#[test]
fn acquire_with_all_slots_leased_fails_at_once() {
    let units = units(&[(Role::Layer, 9 * MIB); 6]);
    let plan = plan(&units, ComputeLocation::Host, vec![Residency::File; 6], 2, 0);
    let core = Scheduler::new(&setup(&units, &plan)).expect("a core");
    let mut world = World::new(core, &units, 1e9, 1e9);
    let (a, b) = (world.acquire(0).expect("there"), world.acquire(1).expect("there"));
    let error = world.acquire(2).expect_err("no slot");
    assert!(error.status() == Status::Busy && error.message().contains("2 slots"), "{error}");
    let again = world.acquire(0).expect("unit 0 is in memory");
    world.release(&again);
    world.release(&a);
    assert_eq!(
        world.core.release(&a, None, 0).expect_err("given back before").status(),
        Status::State
    );
    let c = world.acquire(2).expect("a slot is free");
    world.release(&b);
    world.release(&c);
    assert_eq!(
        world.core.acquire(6, false, 0).expect_err("no such unit").status(),
        Status::Invalid
    );
}

#[test]
fn reused_slot_waits_for_its_last_user() {
    let units = units(&[(Role::Layer, 9 * MIB); 6]);
    let plan = plan(&units, ComputeLocation::Device, vec![Residency::Host; 6], 1, 8 * CHUNK);
    let core = Scheduler::new(&setup(&units, &plan)).expect("a core");
    let mut world = World::new(core, &units, 1e9, 1e9);
    world.settle();
    let lease = world.acquire(0).expect("there");
    world.settle();
    let after = Event(u64::MAX);
    // The next unit gets the slot, and before anything of it is copied another is asked for.
    world.release_after(&lease, Some(after));
    assert!(matches!(world.core.acquire(3, false, world.now_ns), Ok(Acquired::Wait(_))));
    let copy = world.core.take_copy(world.now_ns).expect("it is at home");
    assert_eq!((copy.unit, copy.after), (3, Some(after)));
}

/// Hit rate of the requested experts: 16 layers of 64 experts of which a
/// token uses 6, as often as their rank says, in slots for a fourth.
fn expert_hits(policy: &str, pinned_percent: u32) -> f64 {
    const EXPERTS: usize = 64;
    let mut sizes = Vec::new();
    for _ in 0..16 {
        sizes.push((Role::Layer, 4096));
        sizes.extend([(Role::Expert, 4096); EXPERTS]);
    }
    let units = units(&sizes);
    let mut plan = plan(&units, ComputeLocation::Host, vec![Residency::File; sizes.len()], 2, 0);
    plan.expert_slots = 16 * EXPERTS as u32 / 4;
    let setup = Setup { expert_policy: policy, pinned_percent, ..setup(&units, &plan) };
    let mut world = World::new(Scheduler::new(&setup).expect("a core"), &units, 1e9, 1e9);
    let weights: Vec<f64> = (1..=EXPERTS).map(|rank| (rank as f64).powf(-0.6)).collect();
    let total: f64 = weights.iter().sum();
    let mut random = 1u64;
    let mut draw = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mut left = (random >> 11) as f64 / (1u64 << 53) as f64 * total;
        weights
            .iter()
            .position(|w| {
                left -= w;
                left < 0.0
            })
            .unwrap_or(EXPERTS - 1)
    };
    for _ in 0..250 {
        world.core.pass_begin(world.now_ns).expect("sound");
        for layer in 0..16u32 {
            let mut chosen = Vec::new();
            while chosen.len() < 6 {
                // Each layer prefers other experts.
                let expert = (draw() as u32 * 7 + layer * 13) % EXPERTS as u32;
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            for expert in chosen {
                let unit = layer * (EXPERTS as u32 + 1) + 1 + expert;
                let lease = world.acquire(unit).expect("an expert");
                world.release(&lease);
            }
        }
        world.core.pass_end(world.now_ns).expect("sound");
    }
    let stats = *world.core.stats();
    let by_layer = world.core.layers().iter();
    let (hits, misses) = by_layer.fold((0, 0), |(h, m), of| (h + of.hits, m + of.misses));
    assert!((hits, misses) == (stats.expert_hits, stats.expert_misses) && hits + misses == 24_000);
    // And the first two layers, ahead.
    assert_eq!(stats.read_bytes, (misses + 2) * 4096, "resident experts are not read again");
    hits as f64 / (hits + misses) as f64
}

#[test]
fn frequently_used_experts_stay_resident() {
    let (lru, lfu) = (expert_hits("lru", 0), expert_hits("lfu", 0));
    let (half, most) = (expert_hits("lru", 50), expert_hits("lru", 95));
    // Without repetition the skew is all there is: the more is kept for it the better.
    assert!(lru + 0.05 < half && half + 0.01 < most, "lru {lru}, half {half}, most {most}");
    assert!(lru < lfu && (0.25..0.45).contains(&lru), "lru {lru}, lfu {lfu}");
}

/// Random action of an engine.
#[derive(Clone, Debug)]
enum Act {
    Acquire(u32),
    Next,
    Release(usize),
    Hint(u32),
    Pass(u64),
    Begin,
    End,
    Move(u32, bool),
    /// So many slots for experts.
    Slots(u32),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..40u32).prop_map(Act::Acquire),
        8 => Just(Act::Next),
        9 => (0..4usize).prop_map(Act::Release),
        2 => (0..40u32).prop_map(Act::Hint),
        4 => (0..60u64).prop_map(Act::Pass),
        1 => Just(Act::Begin),
        1 => Just(Act::End),
        1 => (0..40u32, any::<bool>()).prop_map(|(u, m)| Act::Move(u, m)),
        2 => (1..5u32).prop_map(Act::Slots),
    ]
}

#[derive(Clone, Debug)]
struct Case {
    sizes: Vec<(Role, u64)>,
    residencies: Vec<u8>,
    compute: ComputeLocation,
    ring: bool,
    wrap: bool,
    in_place: bool,
    slots: u32,
    expert_slots: u32,
    staging: u64,
    fail_every: u32,
    acts: Vec<Act>,
}

fn case() -> impl Strategy<Value = Case> {
    let size = prop_oneof![1u64..4 * MIB, 1u64..40 * MIB, Just(8 * MIB), Just(16 * MIB)];
    let role = prop_oneof![3 => Just(Role::Layer), 2 => Just(Role::Expert)];
    let unit = (role, size);
    (
        prop::collection::vec(unit, 1..24),
        prop::collection::vec(0u8..3, 24),
        any::<(bool, bool, bool, bool)>(),
        (1u32..5, 1u32..5, 0u64..6),
        prop_oneof![Just(0u32), 3u32..40],
        prop::collection::vec(act(), 1..120),
    )
        .prop_map(
            |(mut sizes, residencies, flags, (slots, expert_slots, staging), fail_every, acts)| {
                sizes[0].0 = Role::Layer;
                let compute = if flags.0 { ComputeLocation::Host } else { ComputeLocation::Device };
                let (ring, wrap, in_place) = (flags.1, flags.2, flags.3);
                let staging =
                    if compute == ComputeLocation::Device { (staging + 1) * 8 * MIB } else { 0 };
                Case {
                    sizes,
                    residencies,
                    compute,
                    ring,
                    wrap,
                    in_place,
                    slots,
                    expert_slots,
                    staging,
                    fail_every,
                    acts,
                }
            },
        )
}

fn live(case: &Case) {
    let units = units(&case.sizes);
    let home = |code: u8| match (code, case.compute) {
        (0, _) => Residency::File,
        (1, _) | (_, ComputeLocation::Host) => Residency::Host,
        _ => Residency::Device,
    };
    let residencies = case.residencies.iter().take(units.units.len()).map(|&c| home(c)).collect();
    let mut plan = plan(&units, case.compute, residencies, case.slots, case.staging);
    plan.expert_slots = case.expert_slots;
    plan.mode = if case.ring { Mode::Ring } else { Mode::Tiered };
    let setup =
        Setup { wrap: case.wrap, in_place: case.in_place, policy: "lru", ..setup(&units, &plan) };
    let mut world = World::new(Scheduler::new(&setup).expect("a core"), &units, 2e9, 3e9);
    if case.in_place && case.compute == ComputeLocation::Device {
        world = world.in_place();
        let mut times = 0u32;
        world.put_off = Box::new(move || {
            times += 1;
            times % 3 != 0
        });
    }
    let (mut count, every) = (0u32, case.fail_every);
    world.fate = Box::new(move || {
        count += 1;
        let fails = every > 0 && count % every == 0;
        if fails { Err(Error::new(Status::Io, "planted")) } else { Ok(()) }
    });
    if case.acts.len() % 2 == 1 {
        // Two of three chunks are read to their slot if it has memory; no other waits.
        let mut chunk = 0;
        world.core.set_direct_reads(true);
        world.lands = Box::new(move || {
            chunk += 1;
            chunk % 3 != 0
        });
    }
    let total = units.units.len() as u32;
    let (mut leases, mut next): (Vec<Lease>, u32) = (Vec::new(), 0);
    for act in &case.acts {
        match *act {
            Act::Acquire(unit) if unit < total => leases.extend(acquire(&mut world, unit)),
            Act::Next => {
                leases.extend(acquire(&mut world, next % total));
                next += 1;
            }
            Act::Release(at) if at < leases.len() => {
                let lease = leases.remove(at);
                world.release(&lease);
            }
            Act::Hint(unit) => {
                let units: Vec<u32> = (unit..unit + 3).filter(|&u| u < total).collect();
                world.core.hint(&units, world.now_ns).expect("sound");
            }
            Act::Pass(ms) => world.pass(ms * MS),
            Act::Begin => world.core.pass_begin(world.now_ns).expect("sound"),
            Act::End => world.core.pass_end(world.now_ns).expect("sound"),
            Act::Move(unit, to_memory)
                if unit < total && !leases.iter().any(|lease| lease.unit == unit) =>
            {
                let home = if to_memory { Residency::Host } else { Residency::File };
                let now = world.now_ns;
                if world.core.set_residency(unit, home, now).expect("sound") {
                    world.forget_home(unit);
                }
            }
            Act::Slots(count) => world.set_expert_slots(count.min(case.expert_slots)),
            _ => {}
        }
        world.empty_expert_slots();
    }
    for lease in leases.drain(..) {
        world.release(&lease);
    }
    // Whatever was, from here on everything can be had.
    world.fate = Box::new(|| Ok(()));
    world.settle();
    for unit in 0..total {
        let mut got = world.acquire(unit);
        for _ in 0..2 {
            // An earlier failure is reported once, and a dropped job has to end.
            if got.is_err() {
                world.settle();
                got = world.acquire(unit);
            }
        }
        let lease = got.expect("every unit can be had in the end");
        world.release(&lease);
    }
    world.settle();
    let open = world.core.expert_slots();
    assert!(world.empty_expert_slots() == open, "slots that are not wanted are in use");
    let staging = world.core.free_staging() + world.core.staged();
    assert_eq!(staging, world.core.staging_count(), "staging was lost");
}

fn acquire(world: &mut World, unit: u32) -> Option<Lease> {
    match world.acquire(unit) {
        Ok(lease) => Some(lease),
        Err(error) => {
            let known = [Status::Io, Status::Busy].contains(&error.status());
            assert!(known, "unit {unit}: {error}");
            None
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_acquire_ends_with_exact_bytes_or_an_error(case in case()) {
        live(&case);
    }
}
