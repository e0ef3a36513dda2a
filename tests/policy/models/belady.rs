//! The farthest next use, as given with the insert or by a later hint.

use std::collections::BTreeMap;

use kvtier::policy::Hint;
use kvtier::policy::evictor::{Evictor, NewObject, Options};
use proptest::prelude::*;

use crate::models::WHO;

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u64, i64),
    Publish(u64, i64),
    Hold(u64),
    Free(u64),
    Evict,
}

fn step() -> impl Strategy<Value = Step> {
    let next = prop_oneof![3 => 10..1_000_000i64, 1 => Just(i64::MAX)];
    prop_oneof![
        3 => (0..30u64, next.clone()).prop_map(|(id, at)| Step::Insert(id, at)),
        3 => (0..30u64, next).prop_map(|(id, at)| Step::Publish(id, at)),
        1 => (0..30u64).prop_map(Step::Hold),
        1 => (0..30u64).prop_map(Step::Free),
        3 => Just(Step::Evict),
    ]
}

/// Next use, tokens before the object, references.
type Known = BTreeMap<u64, (i64, u32, u32)>;

fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let options = Options { max_objects: 32, holes: true, remember: 0, ..Options::default() };
    let mut evictor = Evictor::open("belady", &options).expect("a known policy");
    let mut known = Known::new();
    for (now, step) in (1i64..).zip(steps) {
        match step {
            Step::Insert(id, at) if !known.contains_key(&id) => {
                let mut new = NewObject { id, units: 1, ..NewObject::default() };
                (new.facts.next_use_ns, new.facts.context) = (at, id as u32);
                evictor.insert(now, &WHO, &[new]).expect("room");
                known.insert(id, (at, id as u32, 0));
            }
            Step::Publish(id, at) => {
                let hint = Hint { next_use: Some((at, 1.0)), ..Hint::default() };
                evictor.hint(now, &WHO, &[id], &hint).expect("a time");
                known.entry(id).and_modify(|k| k.0 = at);
            }
            Step::Hold(id) if known.contains_key(&id) => {
                evictor.acquire(&[id]).expect("there");
                known.entry(id).and_modify(|k| k.2 += 1);
            }
            Step::Free(id) if known.get(&id).is_some_and(|k| k.2 > 0) => {
                evictor.release(&[id]).expect("held");
                known.entry(id).and_modify(|k| k.2 -= 1);
            }
            Step::Evict => {
                let mut out = Vec::new();
                evictor.evict(now, 1, &mut out).expect("a time");
                let free = known.iter().filter(|(_, k)| k.2 == 0);
                let want = free.max_by_key(|(_, k)| (k.0, k.1)).map(|(id, _)| *id);
                prop_assert_eq!(out.first().map(|v| v.id), want);
                known.retain(|id, _| Some(*id) != want);
            }
            _ => {}
        }
        let sound = evictor.check();
        prop_assert!(sound.is_ok(), "{:?}", sound.err());
    }
    Ok(())
}

#[test]
fn belady_matches_its_model() {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in prop::collection::vec(step(), 1..300))| run(steps)?);
}
