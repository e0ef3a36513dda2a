//! Switching policies while objects stay resident.
//!
//! The next policy adopts all objects in the order of their last use, each with its number of uses
//! since the insert, up to 65,535. A policy takes as many uses as make a difference to it. `lfu`
//! and `gdsf` take all, `horizon` 255, `wtinylfu` as many as its counters hold (15), the others
//! three: `lru-k` considers at most four, and for queues by uses (`arc`, `2q`, `slru`, `s3fifo`,
//! `sieve`) the first few decide. Only the time of the last use is known, so all uses count as of
//! that time.
//!
//! Learned state goes to a policy of the same kind (see [`Policy::lessons`]): that of `horizon`,
//! `predictive` and the sketch of `wtinylfu`, also inside `qos`. The ghosts of `arc`, `2q`,
//! `s3fifo` and `lru-k` are not handed over: each policy keeps them in queues by its own
//! parameters, and they expire soon.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::Policy;

/// Objects by their last use, each with its time: strictly increasing and at most `now`.
pub fn by_last_use(
    objects: &Objects,
    now: i64,
    of: impl Fn(u64) -> bool,
) -> Result<Vec<(i64, Slot)>> {
    let slots = || objects.slots().filter(|&slot| of(objects.node(slot).id));
    let (mut order, count) = (Vec::new(), slots().count());
    if order.try_reserve_exact(count).is_err() {
        fail!(NoMem, "no memory to sort {count} objects");
    }
    order.extend(slots().map(|slot| (objects.node(slot).stamp, slot)));
    order.sort_unstable();
    // Queues that move objects while they search give out stamps ahead of the time.
    let mut most = now;
    for (stamp, _) in order.iter_mut().rev() {
        *stamp = (*stamp).min(most);
        most = *stamp - 1;
    }
    Ok(order)
}

/// Hands all objects to `next`, and what `teacher` learned. With `leaving`, the teacher is the
/// policy before and is not used again; otherwise it continues elsewhere. Nothing changes if the
/// call fails.
pub fn hand_over(
    objects: &mut Objects,
    teacher: &mut dyn Policy,
    leaving: bool,
    next: &mut dyn Policy,
    now: i64,
) -> Result<()> {
    let order = by_last_use(objects, now, |_| true)?;
    if let Some(lessons) = teacher.lessons(leaving) {
        next.learn(lessons);
    }
    for (stamp, slot) in order {
        let node = objects.node_mut(slot);
        let uses = node.hits;
        node.tag = 0;
        node.set_freq(0);
        node.set_held(false);
        next.adopt(objects, slot, uses, stamp);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::policy::evictor::{Evictor, Options, RequestContext};
    use crate::policy::testing::{evict, gauge, insert};
    use crate::policy::{Hint, Rank};

    fn open(spec: &str) -> Evictor {
        let options = Options { max_objects: 256, capacity_units: 64, ..Options::default() };
        Evictor::open(spec, &Options { holes: true, ..options }).expect("a known policy")
    }

    #[test]
    fn a_switch_passes_on_the_uses_that_the_next_policy_counts() {
        for (spec, expected) in [
            ("lfu", [4, 3, 2, 1]),
            ("gdsf", [4, 3, 2, 1]),
            ("lfu(aged=false)", [4, 3, 2, 1]),
            // Adopted with three uses; and with two, whose third last use is unknown.
            ("lru-k(k=4)", [4, 1, 2, 3]),
        ] {
            let mut e = open("lru");
            let context = RequestContext::default();
            // The more uses, the longer ago the last one.
            for (id, uses) in [(1, 40), (2, 12), (3, 5), (4, 1)] {
                insert(&mut e, id as i64 * 1000, &context, id);
                (0..uses).for_each(|n| {
                    e.touch(id as i64 * 1000 + n, &context, &[id]).expect("a time");
                });
            }
            e.switch(spec).expect("a known policy");
            e.check().expect("sound");
            assert_eq!(evict(&mut e, 1 << 40, u64::MAX), expected, "{spec}");
        }
    }

    #[test]
    fn the_sketch_is_handed_over_and_receives_uses() {
        let mut e = open("lru");
        let context = RequestContext::default();
        for id in 0..40u64 {
            insert(&mut e, id as i64 + 1, &context, id);
        }
        (0..9).for_each(|n| assert_eq!(e.touch(100 + n, &context, &[7]).expect("a time"), 1));
        let seen = |e: &Evictor, id| {
            e.policy().score(e.objects(), e.objects().find(id).expect("found"), 1 << 30)
        };
        e.switch("wtinylfu").expect("known");
        assert_eq!((seen(&e, 7), seen(&e, 8)), (10.0, 1.0));
        for now in 200..203 {
            assert_eq!(e.lookup(now, &context, &[8], &mut []).expect("a time"), 1);
        }
        for now in 210..215 {
            assert_eq!(e.lookup(now, &context, &[500], &mut []).expect("a time"), 0);
        }
        e.switch("wtinylfu(window=20%)").expect("known");
        e.check().expect("sound");
        // This id was looked up before and missed.
        insert(&mut e, 220, &context, 500);
        assert_eq!(seen(&e, 500), 5.0);
        assert_eq!((seen(&e, 7), seen(&e, 8), seen(&e, 9)), (10.0, 4.0, 1.0));
    }

    /// Some ids return after a minute, most never.
    fn taught(spec: &str) -> (Evictor, i64) {
        let (mut e, mut now) = (open(spec), 1_000_000_000);
        for round in 0..20_000u64 {
            now += 500_000_000;
            let id = if round % 2 == 0 { round / 2 % 50 } else { 1_000 + round };
            let context = RequestContext { session: Some(id % 9), ..RequestContext::default() };
            if e.lookup(now, &context, &[id], &mut []).expect("a time") == 0 {
                let over = (e.objects().len() as u64 + 1).saturating_sub(64);
                e.evict(now, over, &mut Vec::new()).expect("a time");
                insert(&mut e, now, &context, id);
            }
            if id % 7 == 0 {
                let stop = crate::meta::sessions::Stop::from_code(id % 5);
                let hint = Hint { stop, ..Hint::default() };
                e.hint(now, &context, &[id], &hint).expect("a time");
            }
        }
        (e, now)
    }

    fn ranks(e: &Evictor, now: i64) -> Vec<(u64, Rank)> {
        let rank = |slot| (e.objects().node(slot).id, e.policy().rank(e.objects(), slot, now));
        e.objects().slots().map(rank).collect()
    }

    #[test]
    fn horizon_continues_from_its_learned_state() {
        let (mut e, now) = taught("horizon");
        let before = ranks(&e, now + 1);
        for same in ["horizon(history=4)", "horizon(history=2)"] {
            e.switch(same).expect("known");
            e.check().expect("sound");
            assert_eq!(ranks(&e, now + 1), before, "{same}");
        }
        // Waits in progress are not counted twice when the watch restarts. Some classes may be
        // fitted again during the switch.
        e.switch("horizon(watch=1000)").expect("known");
        e.check().expect("sound");
        let after = ranks(&e, now + 1);
        let order = |mut ranks: Vec<(u64, Rank)>| {
            ranks.sort_by_key(|&(_, rank)| rank);
            ranks.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
        };
        let retained = |order: &[u64]| order[32..].iter().filter(|id| **id < 1000).count();
        let (first, then) = (order(before), order(after));
        assert!(
            retained(&first) > 28 && retained(&then) + 2 > retained(&first),
            "{first:?} {then:?}"
        );
    }

    #[test]
    fn learned_state_is_handed_over_inside_of_qos() {
        let (mut e, _) = taught("predictive");
        let pace = gauge(&e, "gap_s");
        assert!(pace > 0.0);
        e.switch("predictive(confidence=0.5)").expect("known");
        assert_eq!(gauge(&e, "gap_s"), pace);
        e.switch("lru").expect("known");
        e.switch("predictive").expect("known");
        assert_eq!(gauge(&e, "gap_s"), 0.0, "no more than the handed-over state");
        let (mut e, now) = taught("qos(inner=horizon)");
        let score = |e: &Evictor| {
            let log = |slot| e.policy().score(e.objects(), slot, now + 60_000_000_000).log2();
            e.objects()
                .slots()
                .map(log)
                .fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)))
        };
        let before = score(&e);
        e.switch("qos(inner=horizon,ageing=9s)").expect("known");
        e.check().expect("sound");
        let after = score(&e);
        assert!(before.1 - before.0 > 3.0 && after.1 - after.0 > 2.0, "{before:?} {after:?}");
    }
}
