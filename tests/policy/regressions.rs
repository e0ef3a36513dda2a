//! Fixed defects of policies, each by the smallest calls that showed it.

use kvtier::base::status::Status;
use kvtier::policy::batch::{SelectOptions, Selection};
use kvtier::policy::columns::Columns;
use kvtier::policy::evict::Victim;
use kvtier::policy::evictor::{Evictor, NewObject, Options, RequestContext};

const WHO: RequestContext = RequestContext {
    session: None,
    tenant: 0,
    priority: None,
    length: 0,
    max_length: 0,
    tokens_each: 0,
};

fn open(spec: &str, max_objects: usize, capacity_units: u64) -> Evictor {
    let options = Options { max_objects, capacity_units, holes: true, ..Options::default() };
    Evictor::open(spec, &options).expect("a known policy")
}

fn put(e: &mut Evictor, now: i64, request: &RequestContext, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        e.insert(now, request, &[NewObject { id, units: 1, ..NewObject::default() }])
            .expect("room");
    }
}

fn evict(e: &mut Evictor, now: i64, required: u64) -> Vec<Victim> {
    let mut out = Vec::new();
    e.evict(now, required, &mut out).expect("a time");
    e.check().expect("sound");
    out
}

/// The search of the small queue promoted all candidates into the main queue, which had been
/// searched before.
#[test]
fn s3fifo_finds_victims_it_just_promoted() {
    let mut e = open("s3fifo", 100, 10);
    put(&mut e, 1, &WHO, 0..10);
    for now in [20, 21] {
        e.touch(now, &WHO, &[0]).expect("a time");
    }
    e.acquire(&(1..10).collect::<Vec<_>>()).expect("there");
    e.set_capacity(5);
    assert_eq!(evict(&mut e, 30, 1).len(), 1);
}

/// Queues that move objects in a search give them future timestamps. The next policy then took
/// the most recent object for the oldest.
#[test]
fn policy_switch_leaves_no_future_timestamps() {
    let mut e = open("s3fifo", 200, 100);
    put(&mut e, 1, &WHO, 0..100);
    for _ in 0..3 {
        e.touch(102, &WHO, &(0..99).collect::<Vec<_>>()).expect("a time");
    }
    evict(&mut e, 500, 1);
    e.switch("lru").expect("a known policy");
    e.touch(501, &WHO, &[7]).expect("a time");
    let columns = Columns { ids: &[7, 8, 9], ..Columns::default() };
    let mut chosen = Selection::default();
    e.select(502, &columns, 1, &SelectOptions::default(), &mut chosen).expect("valid");
    assert_ne!(chosen.victims[0].id, 7);
}

/// An object that a floor held back, and that was then referenced, was removed from the lists of
/// qos but not returned to the inner policy.
#[test]
fn qos_returns_candidates_blocked_during_the_search() {
    for inner in ["arc", "slru", "2q", "wtinylfu", "s3fifo", "sieve", "lru", "horizon"] {
        let mut e = open(&format!("qos(inner={inner})"), 64, 20);
        let request = |session, tenant| RequestContext { session: Some(session), tenant, ..WHO };
        put(&mut e, 1, &request(1, 1), [1]);
        put(&mut e, 2, &request(2, 2), 10..20);
        evict(&mut e, 30, 1);
        e.acquire(&[1]).expect("there");
        assert_eq!(evict(&mut e, 40, 100).len(), 9, "{inner}");
        e.touch(50, &WHO, &[1]).expect("a time");
        e.release(&[1]).expect("held");
        assert_eq!(evict(&mut e, 60, 100).len(), 1, "{inner}");
    }
}

/// A winner inside `auto` is notified of all objects, whatever their class.
#[test]
fn qos_rejects_auto() {
    for spec in ["qos(inner=auto)", "auto(of=any(qos(inner=auto),lru))", "qos(inner=qos)"] {
        let error = Evictor::open(spec, &Options::default()).err().expect("refused");
        assert_eq!(error.status(), Status::Spec, "{spec}");
    }
}

/// Values at the limits of their types.
#[test]
fn batch_columns_accept_extreme_values() {
    let ends = [i64::MIN, -1, 0, 1, i64::MAX];
    for entry in kvtier::policy::registry::ENTRIES {
        let mut e = open(entry.name, 16, 100);
        for (v, w) in ends.into_iter().flat_map(|v| ends.map(|w| (v, w))) {
            for n in [0, 1, 3, u64::MAX] {
                let columns = Columns {
                    ids: &[1, 2],
                    created_ns: &[v, w],
                    last_access_ns: &[w, v],
                    count: &[n, n],
                    lifetime_ns: &[v, w],
                    length: &[n, 5],
                    max_length: &[u64::MAX, n],
                    context: &[n, 7],
                    blocks: &[0, 4_000_000_000],
                    tenant: &[0, u32::MAX],
                    layer: &[u32::MAX, 1],
                    layers: &[1, u32::MAX],
                    cost: &[f64::MAX, 5e-324],
                    ..Columns::default()
                };
                let mut chosen = Selection::default();
                e.select(1, &columns, 1, &SelectOptions::default(), &mut chosen).expect("valid");
            }
        }
    }
}

/// In a full table a session found no row although one was free.
#[test]
fn single_object_sequence_keeps_its_session() {
    let mut e = open("qos", 1000, 0);
    for id in 0..5_000u64 {
        let now = 1 + id as i64;
        if e.objects().len() == 1000 {
            evict(&mut e, now, 1);
        }
        put(&mut e, now, &RequestContext { session: Some(id), ..WHO }, [id]);
        assert!(e.objects().sessions.find(id).is_some(), "{id}");
    }
}

#[test]
fn unknown_id_recorded_twice_takes_one_row() {
    let mut e = Evictor::open("lru", &Options { max_objects: 2, ..Options::default() }).unwrap();
    assert_eq!(e.record(1, &RequestContext::default(), &[5, 5, 6], &[]).unwrap(), 2);
    assert!(e.record(2, &RequestContext::default(), &[7], &[]).is_err());
}

#[test]
fn oversized_ghost_list_is_an_error() {
    let options = Options { max_objects: 8, remember: (1 << 28) + 1, ..Options::default() };
    assert!(Evictor::open("lru", &options).is_err());
}

#[test]
fn tlru_reorders_on_changed_facts() {
    let options = Options { max_objects: 8, ..Options::default() };
    let mut e = Evictor::open("tlru(threshold=100,turn=10)", &options).unwrap();
    let request = RequestContext { session: Some(1), length: 200, ..RequestContext::default() };
    e.lookup(1, &request, &[1, 2], &mut []).unwrap();
    let new = [1, 2].map(|id| NewObject { id, units: 1, ..NewObject::default() });
    e.insert(2, &request, &new).unwrap();
    let columns = Columns { ids: &[1, 2], context: &[150, 0], ..Columns::default() };
    let mut out = Selection::default();
    e.select(3, &columns, 1, &SelectOptions::default(), &mut out).unwrap();
    e.check().unwrap();
    let mut gone = Vec::new();
    e.evict(4, 1, &mut gone).unwrap();
    assert_eq!(gone[0].id, 1, "the next turn does not need object 1");
}

#[test]
fn insert_learns_the_class_of_a_known_session() {
    let mut e = open("qos(ageing=0,floor=0)", 8, 8);
    let request = |id, priority| RequestContext { session: Some(id), priority, ..WHO };
    e.lookup(1, &request(5, None), &[1], &mut []).unwrap();
    put(&mut e, 2, &request(5, Some(2)), [1]);
    put(&mut e, 3, &request(6, Some(1)), [2]);
    assert_eq!(evict(&mut e, 4, 1)[0].id, 2);
}

#[test]
fn rows_with_block_lists_have_their_size() {
    for spec in ["gdsf", "horizon"] {
        let mut e = open(spec, 8, 8);
        let blocks: Vec<u64> = (0..12).collect();
        let listed = Columns {
            ids: &[1, 2, 3],
            length: &[100; 3],
            block_offsets: &[0, 10, 11, 12],
            block_ids: &blocks,
            ..Columns::default()
        };
        let counted = Columns { blocks: &[10, 1, 1], block_offsets: &[], block_ids: &[], ..listed };
        let mut order = |columns: &Columns| {
            let mut out = Selection::default();
            e.select(5, columns, 12, &SelectOptions::default(), &mut out).unwrap();
            out.victims.iter().map(|v| v.id).collect::<Vec<_>>()
        };
        assert_eq!(order(&listed), order(&counted), "{spec}");
    }
}

#[test]
fn tenants_are_counted_when_the_session_table_is_full() {
    let mut e = open("lru", 2, 2);
    let request = |session, tenant| RequestContext { session: Some(session), tenant, ..WHO };
    put(&mut e, 1, &request(1, 1), [1]);
    put(&mut e, 2, &request(2, 2), [2]);
    for session in 1..8 {
        let tenant = session as u32;
        e.lookup(2 + session as i64, &request(session, tenant), &[session], &mut []).unwrap();
    }
    assert_eq!(e.metrics.tenants(), 7);
}

/// For an engine with its own tables: blocks freed by the engine were not counted as evicted, and
/// the advice was to run more requests.
#[test]
fn selected_victims_count_as_evicted() {
    let options = Options { log_entries: 16, ..Options::default() };
    let (mut e, mut resident) = (Evictor::open("arc", &options).unwrap(), Vec::new());
    for now in 1..=400i64 {
        let id = now as u64 % 20;
        if e.lookup(now, &WHO, &[id], &mut []).unwrap() == 0 {
            if resident.len() == 10 {
                let columns = Columns { ids: &resident, ..Columns::default() };
                let mut out = Selection::default();
                e.select(now, &columns, 1, &SelectOptions::default(), &mut out).unwrap();
                let gone: Vec<u64> = out.victims.iter().map(|v| v.id).collect();
                e.evicted(now, &gone).unwrap();
                resident.retain(|id| !gone.contains(id));
            }
            e.record(now, &WHO, &[id], &[]).unwrap();
            resident.push(id);
        }
    }
    let counts = e.metrics.counts;
    assert_eq!(counts.evictions, counts.inserts - 10);
    assert!(counts.re_prefill_rate() > 0.5, "{counts:?}");
    assert_eq!((e.log.since(0).count(), e.advice.advise(8).batch), (16, 4));
    e.check().unwrap();
    // `evicted` removes all objects or none. Unknown ids are remembered as ghosts.
    assert!(e.evicted(401, &[resident[0], resident[0]]).is_err());
    assert_eq!(e.objects().len(), 10);
    e.evicted(402, &[999]).unwrap();
    let before = e.metrics.counts.evicted_references;
    e.lookup(403, &WHO, &[999], &mut []).unwrap();
    assert_eq!(e.metrics.counts.evicted_references, before + 1);
}

/// An object that moves because its facts changed is also searched for from the hot end.
#[test]
fn changed_facts_keep_a_young_object_young() {
    for spec in ["tlru(threshold=100,turn=10)", "pensieve"] {
        let mut e = open(spec, 2000, 2000);
        let request = RequestContext { session: Some(1), length: 5000, ..WHO };
        put(&mut e, 1, &request, 0..1000);
        let columns = Columns { ids: &[999], tokens: &[7], context: &[60], ..Columns::default() };
        let mut out = Selection::default();
        e.select(2_000_000_000, &columns, 1, &SelectOptions::default(), &mut out).unwrap();
        e.check().unwrap();
        if spec.starts_with("tlru") {
            let order = evict(&mut e, 3_000_000_000, 1000);
            assert_eq!(order.last().map(|v| v.id), Some(999));
        }
    }
}

/// A fixed pseudo-random order.
fn shuffled(ids: impl IntoIterator<Item = u64>, seed: u64) -> Vec<u64> {
    let mut ids: Vec<u64> = ids.into_iter().collect();
    ids.sort_by_key(|id| {
        let mixed = (id ^ (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    });
    ids
}

/// Policies whose lists are ordered by stamp.
const BY_STAMP: [&str; 10] = [
    "lru",
    "fifo",
    "slru(protected=100%)",
    "2q",
    "arc",
    "s3fifo",
    "wtinylfu(window=100%)",
    "tlru",
    "pensieve",
    "predictive(confidence=1)",
];

/// An object that was returned into the middle of a list was placed too near its cold end.
#[test]
fn returned_objects_regain_their_list_position() {
    const MANY: u64 = 40_000;
    for spec in BY_STAMP.into_iter().chain(["wtinylfu"]) {
        let fill = || {
            let mut e = open(spec, MANY as usize, MANY);
            put(&mut e, 1, &WHO, 0..MANY);
            assert_eq!(evict(&mut e, 50_000, 1).len(), 1, "{spec}");
            e
        };
        let (mut e, mut never_held) = (fill(), fill());
        let all: Vec<u64> = (0..MANY).filter(|&id| e.objects().find(id).is_some()).collect();
        e.acquire(&all).expect("there");
        assert_eq!(evict(&mut e, 60_000, 1), [], "{spec}");
        e.release(&shuffled(all.iter().copied(), 7)).expect("held");
        e.check().expect("sound");
        let want = evict(&mut never_held, 70_000, MANY);
        assert!(evict(&mut e, 70_000, MANY) == want, "{spec}");
        assert_eq!(want.len(), all.len(), "{spec}");
    }
}

/// The same with uses, removals and inserts in between.
#[test]
fn returned_objects_keep_order_among_other_changes() {
    const MANY: u64 = 2_000;
    for spec in BY_STAMP {
        let mut both = [open(spec, 8_000, 100_000), open(spec, 8_000, 100_000)];
        both.iter_mut().for_each(|e| put(e, 1, &WHO, 0..MANY));
        let mut now = 10_000;
        for round in 0..4 {
            let live: Vec<u64> =
                (0..9_000).filter(|&id| both[0].objects().find(id).is_some()).collect();
            both[0].acquire(&live).expect("there");
            assert_eq!(evict(&mut both[0], now, 1), [], "{spec}");
            let used = shuffled(live.iter().copied(), round + 10);
            for (i, id) in shuffled(live, round).into_iter().enumerate() {
                both[0].release(&[id]).expect("held");
                now += 2;
                for e in &mut both {
                    match i % 16 {
                        3 => drop(e.touch(now, &WHO, &used[i..=i])),
                        5 => put(e, now, &WHO, [3_000 + round * 1_000 + i as u64]),
                        9 if i % 64 == 9 => e.remove(now, &[id]).expect("there"),
                        _ => {}
                    }
                }
            }
            both.iter().for_each(|e| e.check().expect("sound"));
            let few = both.each_mut().map(|e| evict(e, now, 300));
            assert!(few[0] == few[1], "{spec}, round {round}");
        }
        let rest = both.each_mut().map(|e| evict(e, now, 100_000));
        assert!(rest[0] == rest[1] && both[0].objects().is_empty(), "{spec}");
    }
}

/// Compared with sorting, with evictions while some objects are held and others were returned.
#[test]
fn oldest_evictable_object_is_the_victim() {
    for spec in ["lru", "fifo", "tlru", "pensieve", "predictive(confidence=1)"] {
        let mut e = open(spec, 4_000, 4_000);
        put(&mut e, 1, &WHO, 0..4_000);
        // Id to the time that decides the order.
        let mut model: std::collections::BTreeMap<u64, i64> =
            (0..4_000).map(|id| (id, 1 + id as i64)).collect();
        let all: Vec<u64> = model.keys().copied().collect();
        e.acquire(&all).expect("there");
        assert_eq!(evict(&mut e, 10_000, 1), []);
        let mut held: std::collections::BTreeSet<u64> = all.iter().copied().collect();
        let (order, others) = (shuffled(all.clone(), 1), shuffled(all, 2));
        for (i, (&id, &other)) in order.iter().zip(&others).enumerate() {
            let now = 20_000 + i as i64;
            if held.remove(&id) {
                e.release(&[id]).expect("held");
            }
            if i % 5 == 2 && model.contains_key(&other) {
                e.touch(now, &WHO, &[other]).expect("a time");
                if spec != "fifo" {
                    model.insert(other, now);
                }
            }
            if i % 7 == 3 && model.remove(&other).is_some() {
                held.remove(&other);
                e.remove(now, &[other]).expect("there");
            }
            if i >= 2_000 && i % 3 == 0 {
                let free = model.iter().filter(|(id, _)| !held.contains(id));
                let want = free.min_by_key(|(_, at)| **at).map(|(id, _)| *id);
                let mut out = Vec::new();
                e.evict(now, 1, &mut out).expect("a time");
                assert_eq!(out.first().map(|v| v.id), want, "{spec}, step {i}");
                want.and_then(|id| model.remove(&id));
            }
            if i % 500 == 0 {
                e.check().expect("sound");
            }
        }
    }
}

/// Objects whose facts change in any order: each part keeps the order of last use.
#[test]
fn objects_moved_by_facts_keep_last_use_order() {
    const MANY: u64 = 4_000;
    let mut e = open("tlru(threshold=100,turn=10)", MANY as usize, MANY);
    put(&mut e, 1, &RequestContext { session: Some(1), length: 5_000, ..WHO }, 0..MANY);
    let ids = shuffled((0..MANY).filter(|id| id % 3 > 0), 3);
    let context = vec![5_000; ids.len()];
    let columns = Columns { ids: &ids, context: &context, ..Columns::default() };
    let mut chosen = Selection::default();
    e.select(9_000, &columns, 1, &SelectOptions::default(), &mut chosen).expect("valid");
    let order: Vec<u64> = evict(&mut e, 9_001, MANY).iter().map(|v| v.id).collect();
    let mut want: Vec<u64> = (0..MANY).collect();
    want.sort_by_key(|id| (id % 3 == 0, *id));
    assert!(order == want);
}
