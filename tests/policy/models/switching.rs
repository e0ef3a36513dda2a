//! A preview has no effect on the next search. A policy that takes over from another one is sound,
//! also with odd capacities and sizes.

use std::collections::BTreeMap;

use kvtier::policy::evictor::{Evictor, NewObject, Options};
use proptest::prelude::*;

use super::{Model, WHO, World, call};

/// Accepts every victim.
struct Any;

impl Model for Any {
    fn insert(&mut self, _id: u64, _units: u64, _now: i64) {}
    fn touch(&mut self, _id: u64, _now: i64) {}
    fn remove(&mut self, _id: u64, _evicted: bool) {}
    fn victim(&mut self, _blocked: &dyn Fn(u64) -> bool, _now: i64) -> Option<u64> {
        None
    }
    fn judge(
        &mut self,
        _got: Option<u64>,
        _blocked: &dyn Fn(u64) -> bool,
        _now: i64,
    ) -> Result<(), String> {
        Ok(())
    }
}

fn open(spec: &str, leaf_first: bool) -> Evictor {
    let options = Options {
        max_objects: 64,
        capacity_units: 20,
        holes: !leaf_first,
        remember: 64,
        ..Options::default()
    };
    Evictor::open(spec, &options).expect("a known policy")
}

fn chosen(world: &mut World, evict: bool) -> Vec<u64> {
    let (mut out, now) = (Vec::new(), world.now + 1);
    match evict {
        true => world.evictor.evict(now, 9, &mut out).expect("a time"),
        false => world.evictor.preview(now, 9, &mut out).expect("a time"),
    };
    world.evictor.check().expect("sound");
    out.iter().map(|victim| victim.id).collect()
}

/// Policies whose search moves nothing but victims.
const STILL: [&str; 7] = ["fifo", "lru", "arc", "2q", "slru", "slru(segments=4)", "belady"];
/// Policies whose search promotes objects or moves a hand.
const MOVING: [&str; 3] = ["s3fifo", "sieve", "wtinylfu(window=10%)"];

#[test]
fn preview_has_no_side_effects() {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let calls = prop::collection::vec(call(), 1..200);
    proptest!(config, |(calls in calls, leaf_first in any::<bool>())| {
        for spec in STILL.into_iter().chain(MOVING) {
            let (evictor, facts) = (open(spec, leaf_first), BTreeMap::new());
            let mut world = World { evictor, model: &mut Any, facts, now: 1_000, leaf_first };
            calls.iter().try_for_each(|&call| world.step(call))?;
            let (first, second) = (chosen(&mut world, false), chosen(&mut world, false));
            let third = chosen(&mut world, true);
            if STILL.contains(&spec) {
                prop_assert!(first == second && second == third, "{spec} {first:?} {third:?}");
            }
        }
    });
}

#[test]
fn policy_switch_keeps_the_evictor_sound() {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let part = || prop::collection::vec(call(), 1..60);
    let parts = prop::collection::vec((0..10usize, 0..40u64, part()), 1..6);
    proptest!(config, |(parts in parts, leaf_first in any::<bool>())| {
        let (evictor, facts) = (open("lru", leaf_first), BTreeMap::new());
        let mut world = World { evictor, model: &mut Any, facts, now: 1_000, leaf_first };
        for (which, capacity, calls) in parts {
            let spec = STILL.into_iter().chain(MOVING).nth(which).expect("ten");
            world.evictor.switch(spec).expect("a known policy");
            world.evictor.check().expect("sound");
            let (first, rest) = calls.split_at(calls.len() / 2);
            first.iter().try_for_each(|&call| world.step(call))?;
            world.evictor.set_capacity(capacity);
            world.evictor.check().expect("sound");
            rest.iter().try_for_each(|&call| world.step(call))?;
        }
        let free = world.facts.keys().filter(|id| !world.blocked(**id)).count();
        let mut out = Vec::new();
        world.evictor.evict(world.now + 1, u64::MAX, &mut out).expect("a time");
        prop_assert!(out.len() >= free, "{} of {free}", out.len());
        world.evictor.check().expect("sound");
    });
}

#[test]
fn policies_stay_sound_with_capacities_from_zero_to_huge() {
    let each = |spec| [20u64, 0, 1, 1 << 40].map(|capacity| (spec, capacity));
    for (spec, capacity) in STILL.into_iter().chain(MOVING).flat_map(each) {
        let options = Options { max_objects: 64, capacity_units: capacity, ..Options::default() };
        let mut evictor = Evictor::open(spec, &options).expect("a known policy");
        let (mut state, mut out) = (5u64, Vec::new());
        for now in 1..3_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let id = (state >> 33) % 90;
            let there = evictor.lookup(now, &WHO, &[id], &mut []).expect("a time") == 1;
            let units = [0, 1, u64::from(u32::MAX)][(state >> 60) as usize % 3];
            if there {
                evictor.resize(&[id], &[units]).expect("a size");
            } else {
                if evictor.objects().len() == 64 {
                    evictor.evict_most(now, u64::MAX, 1, &mut out).expect("a time");
                }
                evictor
                    .insert(now, &WHO, &[NewObject { id, units, ..NewObject::default() }])
                    .expect("room");
            }
            evictor.check().expect("sound");
        }
        evictor.evict(3_000, u64::MAX, &mut out).expect("a time");
        assert!(evictor.objects().is_empty(), "{spec}");
    }
}
