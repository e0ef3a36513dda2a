//! Scores are learned, so the model cannot know them. The victim must have the lowest score, within
//! the tolerance of bins of age and weight.

use std::collections::BTreeMap;

use kvtier::base::random::Random;
use kvtier::meta::objects::Facts;
use kvtier::policy::Hint;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};

/// Tolerances. The score of a cohort is computed from its oldest object, up to a fiftieth of the
/// object's age ago. A cohort spans a twentieth of that age, which matters where a score is steep
/// in age. Weights are quantized in steps of a tenth. An object that was held for long returns to
/// cohorts that have merged meanwhile.
const USUAL: f64 = 1.10;
const BEYOND_USUAL: f64 = 0.10;
const RARE: f64 = 1.20;
const BEYOND_RARE: f64 = 0.03;
const WORST: f64 = 3.0;

/// The lowest score among the other candidates. The object that only this eviction unblocked is
/// excluded.
fn least_other(e: &Evictor, now: i64, freed: Option<u64>) -> f64 {
    let objects = e.objects();
    let could = |slot: &u32| !objects.is_blocked(*slot) && Some(objects.node(*slot).id) != freed;
    let free = objects.slots().filter(could);
    free.map(|slot| e.policy().score(objects, slot, now)).fold(f64::INFINITY, f64::min)
}

fn run(spec: &str, holes: bool, seed: u64) {
    let options = Options {
        max_objects: 600,
        capacity_units: 500,
        holes,
        log_entries: 1,
        ..Options::default()
    };
    let mut e = Evictor::open(spec, &options).expect("a known policy");
    let (mut random, mut now, mut judged) = (Random::new(seed), 1_000_000_000i64, 0u32);
    let (mut beyond, mut parents) = ([0.0; 2], BTreeMap::new());
    let request = RequestContext { tokens_each: 512, ..RequestContext::default() };
    for step in 0..12_000u64 {
        now += 1_000_000 << random.below(10);
        // Low ids return soon, high ids hardly ever.
        let id = random.below(if step % 3 == 0 { 4000 } else { 200 });
        let there = e.lookup(now, &request, &[id], &mut []).expect("a time") == 1;
        if there {
            if random.below(9) == 0 {
                let next = now + (random.below(1000) * 100_000_000) as i64;
                let hint = Hint { next_use: Some((next, 1.0)), ..Hint::default() };
                e.hint(now, &request, &[id], &hint).expect("a time");
            }
            if random.below(20) == 0 {
                e.pin(&[id], random.below(2) == 0).expect("there");
            }
            continue;
        }
        if e.objects().units() >= 500 {
            let mut out = Vec::new();
            e.evict(now, 1, &mut out).expect("a time");
            let entry = *e.log.since(0).last().expect("one left");
            let least = least_other(&e, now, parents.remove(&entry.id).flatten());
            assert!(entry.score <= least * WORST, "{spec}: {} of {least}", entry.score);
            judged += 1;
            beyond[0] += f64::from(entry.score > least * USUAL);
            beyond[1] += f64::from(entry.score > least * RARE);
        }
        let context = random.below(300) as u32 * 512;
        let facts = Facts { context, tokens: 512, ..Facts::default() };
        let parent = Some(random.below(4000)).filter(|p| *p != id);
        e.insert(now, &request, &[NewObject { id, parent, units: 1, facts }]).expect("room");
        parents.insert(id, parent);
        e.check().expect("sound");
    }
    assert!(judged > 1000, "{judged}");
    let limits = [BEYOND_USUAL, BEYOND_RARE].map(|part| part * f64::from(judged));
    assert!(beyond[0] <= limits[0] && beyond[1] <= limits[1], "{spec}: {beyond:?} of {judged}");
}

#[test]
fn victim_has_the_lowest_score() {
    for (seed, holes) in [(1, false), (2, true), (3, false)] {
        run("horizon", holes, seed);
        run("horizon(objective=cost)", holes, seed + 10);
    }
}

/// Half of the objects return after a minute, the others never. Only the use count distinguishes
/// them.
#[test]
fn horizon_learns_which_objects_return() {
    let options = Options { max_objects: 2000, capacity_units: 300, ..Options::default() };
    let mut hits = Vec::new();
    for spec in ["lru", "horizon"] {
        let mut e = Evictor::open(spec, &options).expect("a known policy");
        let (mut found, mut out) = (0, Vec::new());
        for second in 1..4000i64 {
            let now = second * 1_000_000_000;
            let regular = (second % 100) as u64;
            for id in (0..10).map(|n| 10_000 + 10 * second as u64 + n).chain([regular]) {
                if e.lookup(now, &RequestContext::default(), &[id], &mut []).expect("a time") == 1 {
                    found += 1;
                    continue;
                }
                out.clear();
                let over = (e.objects().units() + 1).saturating_sub(300);
                e.evict(now, over, &mut out).expect("a time");
                let new = NewObject { id, units: 1, ..NewObject::default() };
                e.insert(now, &RequestContext::default(), &[new]).expect("room");
            }
        }
        hits.push(found);
    }
    assert_eq!(hits[0], 0, "lru keeps 30 seconds");
    assert!(hits[1] > 3000, "{hits:?}: expected hits for most of the 3900 returns");
}
