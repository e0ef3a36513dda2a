//! Defects of policies that were found once, each by the smallest call that
//! showed it.

#![allow(missing_docs)]

use kvtier::base::status::Status;
use kvtier::policy::batch::{SelectOptions, Selection};
use kvtier::policy::columns::Columns;
use kvtier::policy::evict::Victim;
use kvtier::policy::evictor::{Evictor, New, Options, Who};

const WHO: Who =
    Who { session: None, tenant: 0, priority: None, length: 0, max_length: 0, tokens_each: 0 };

fn open(spec: &str, max_objects: usize, capacity_units: u64) -> Evictor {
    let options = Options { max_objects, capacity_units, holes: true, ..Options::default() };
    Evictor::open(spec, &options).expect("a known policy")
}

fn put(e: &mut Evictor, now: i64, who: &Who, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        e.insert(now, who, &[New { id, units: 1, ..New::default() }]).expect("room");
    }
}

fn evict(e: &mut Evictor, now: i64, required: u64) -> Vec<Victim> {
    let mut out = Vec::new();
    e.evict(now, required, &mut out).expect("a time");
    e.check().expect("sound");
    out
}

/// The search of the small queue promoted all that could leave into the main
/// queue, which had been searched before.
#[test]
fn s3fifo_finds_what_it_has_just_promoted() {
    let mut e = open("s3fifo", 100, 10);
    put(&mut e, 1, &WHO, 0..10);
    for now in [20, 21] {
        e.touch(now, &WHO, &[0]).expect("a time");
    }
    e.acquire(&(1..10).collect::<Vec<_>>()).expect("there");
    e.set_capacity(5);
    assert_eq!(evict(&mut e, 30, 1).len(), 1);
}

/// Queues that move objects in a search stamp them ahead of the time; the policy
/// that took over then took the one used last for the oldest.
#[test]
fn stamps_do_not_lie_in_the_future_after_a_switch() {
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

/// One that a floor kept back and that was then referenced was taken out of
/// qos's books, but not put back into those of the policy within.
#[test]
fn qos_gives_back_what_became_blocked_while_it_was_passed_over() {
    for inner in ["arc", "slru", "2q", "wtinylfu", "s3fifo", "sieve", "lru", "horizon"] {
        let mut e = open(&format!("qos(inner={inner})"), 64, 20);
        let who = |session, tenant| Who { session: Some(session), tenant, ..WHO };
        put(&mut e, 1, &who(1, 1), [1]);
        put(&mut e, 2, &who(2, 2), 10..20);
        evict(&mut e, 30, 1);
        e.acquire(&[1]).expect("there");
        assert_eq!(evict(&mut e, 40, 100).len(), 9, "{inner}");
        e.touch(50, &WHO, &[1]).expect("a time");
        e.release(&[1]).expect("held");
        assert_eq!(evict(&mut e, 60, 100).len(), 1, "{inner}");
    }
}

/// A winner inside of auto is told of all objects, whatever class they are in.
#[test]
fn auto_is_not_taken_into_qos() {
    for spec in ["qos(inner=auto)", "auto(of=any(qos(inner=auto),lru))", "qos(inner=qos)"] {
        let error = Evictor::open(spec, &Options::default()).err().expect("refused");
        assert_eq!(error.status(), Status::Spec, "{spec}");
    }
}

/// Numbers of the caller's at the ends of their types.
#[test]
fn columns_may_hold_any_numbers() {
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
fn a_sequence_that_is_one_object_keeps_its_session() {
    let mut e = open("qos", 1000, 0);
    for id in 0..5_000u64 {
        let now = 1 + id as i64;
        if e.objects().len() == 1000 {
            evict(&mut e, now, 1);
        }
        put(&mut e, now, &Who { session: Some(id), ..WHO }, [id]);
        assert!(e.objects().sessions.find(id).is_some(), "{id}");
    }
}

#[test]
fn an_unknown_id_recorded_twice_needs_room_for_one() {
    let mut e = Evictor::open("lru", &Options { max_objects: 2, ..Options::default() }).unwrap();
    assert_eq!(e.record(1, &Who::default(), &[5, 5, 6], &[]).unwrap(), 2);
    assert!(e.record(2, &Who::default(), &[7], &[]).is_err());
}

#[test]
fn more_to_remember_than_can_be_is_an_error() {
    let options = Options { max_objects: 8, remember: (1 << 28) + 1, ..Options::default() };
    assert!(Evictor::open("lru", &options).is_err());
}

#[test]
fn tlru_moves_an_object_whose_facts_change() {
    let options = Options { max_objects: 8, ..Options::default() };
    let mut e = Evictor::open("tlru(threshold=100,turn=10)", &options).unwrap();
    let who = Who { session: Some(1), length: 200, ..Who::default() };
    e.lookup(1, &who, &[1, 2], &mut []).unwrap();
    let new = [1, 2].map(|id| New { id, units: 1, ..New::default() });
    e.insert(2, &who, &new).unwrap();
    let columns = Columns { ids: &[1, 2], context: &[150, 0], ..Columns::default() };
    let mut out = Selection::default();
    e.select(3, &columns, 1, &SelectOptions::default(), &mut out).unwrap();
    e.check().unwrap();
    let mut gone = Vec::new();
    e.evict(4, 1, &mut gone).unwrap();
    assert_eq!(gone[0].id, 1, "it lies beyond what the threshold leaves");
}

#[test]
fn an_insert_hears_of_the_class_of_a_known_session() {
    let mut e = open("qos(ageing=0,floor=0)", 8, 8);
    let who = |id, priority| Who { session: Some(id), priority, ..WHO };
    e.lookup(1, &who(5, None), &[1], &mut []).unwrap();
    put(&mut e, 2, &who(5, Some(2)), [1]);
    put(&mut e, 3, &who(6, Some(1)), [2]);
    assert_eq!(evict(&mut e, 4, 1)[0].id, 2);
}

#[test]
fn rows_that_list_their_blocks_have_that_size() {
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
        let told = Columns { blocks: &[10, 1, 1], block_offsets: &[], block_ids: &[], ..listed };
        let mut order = |columns: &Columns| {
            let mut out = Selection::default();
            e.select(5, columns, 12, &SelectOptions::default(), &mut out).unwrap();
            out.victims.iter().map(|v| v.id).collect::<Vec<_>>()
        };
        assert_eq!(order(&listed), order(&told), "{spec}");
    }
}

#[test]
fn tenants_count_even_where_sessions_have_no_room() {
    let mut e = open("lru", 2, 2);
    let who = |session, tenant| Who { session: Some(session), tenant, ..WHO };
    put(&mut e, 1, &who(1, 1), [1]);
    put(&mut e, 2, &who(2, 2), [2]);
    for session in 1..8 {
        let tenant = session as u32;
        e.lookup(2 + session as i64, &who(session, tenant), &[session], &mut []).unwrap();
    }
    assert_eq!(e.metrics.tenants(), 7);
}

/// An engine with tables of its own: what it freed was not known as evicted, and the
/// advice was to run more.
#[test]
fn what_a_selection_named_counts_as_evicted() {
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
    // All or none; what the table does not know is remembered.
    assert!(e.evicted(401, &[resident[0], resident[0]]).is_err());
    assert_eq!(e.objects().len(), 10);
    e.evicted(402, &[999]).unwrap();
    let before = e.metrics.counts.evicted_references;
    e.lookup(403, &WHO, &[999], &mut []).unwrap();
    assert_eq!(e.metrics.counts.evicted_references, before + 1);
}

/// What moves by a change of its facts was never out of the way: it is looked for
/// from the hot end too.
#[test]
fn a_young_object_whose_facts_change_stays_young() {
    for spec in ["tlru(threshold=100,turn=10)", "pensieve"] {
        let mut e = open(spec, 2000, 2000);
        let who = Who { session: Some(1), length: 5000, ..WHO };
        put(&mut e, 1, &who, 0..1000);
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
