//! Allowed and forbidden behaviour of a simulated disk.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::plan::{Fault, STUCK_NS};
use super::*;
use crate::disk::contract::{read, write};

const SECTOR: usize = 512;

fn opts(align_bytes: u64, plan: Plan) -> SimOpts {
    SimOpts { align_bytes, plan, ..SimOpts::default() }
}

fn disk(seed: u64, plan: Plan) -> SimFiles {
    SimFiles::new(seed, opts(512, plan))
}

fn status<T>(result: Result<T>) -> Status {
    result.map_or_else(|error| error.status(), |_| Status::Ok)
}

/// Possible contents of a file after a power failure.
#[derive(Clone, Default)]
struct Model {
    now: Vec<u8>,
    /// Contents of each sector since the last sync; zeros past the end.
    sectors: BTreeMap<usize, BTreeSet<Vec<u8>>>,
    lens: BTreeSet<usize>,
    durable: Vec<u8>,
}

impl Model {
    fn sector(bytes: &[u8], i: usize) -> Vec<u8> {
        let mut sector: Vec<u8> = bytes.iter().skip(i * SECTOR).take(SECTOR).copied().collect();
        sector.resize(SECTOR, 0);
        sector
    }

    fn write(&mut self, offset: usize, fill: u8, bytes: usize) {
        let end = offset + bytes;
        self.now.resize(self.now.len().max(end), 0);
        self.now[offset..end].fill(fill);
        self.lens.insert(self.now.len());
        for i in offset / SECTOR..end.div_ceil(SECTOR) {
            self.sectors.entry(i).or_default().insert(Model::sector(&self.now, i));
        }
    }

    fn settle(&mut self, durable: Vec<u8>) {
        self.durable = durable;
        self.sectors.clear();
        self.lens = BTreeSet::from([self.durable.len()]);
    }

    fn check(&self, found: &[u8]) {
        assert!(self.lens.contains(&found.len()), "{} is no length it had", found.len());
        for i in 0..found.len().div_ceil(SECTOR) {
            let end = found.len().min((i + 1) * SECTOR) - i * SECTOR;
            let got = &Model::sector(found, i)[..end];
            let old = Model::sector(&self.durable, i);
            let new = self.sectors.get(&i).into_iter().flatten();
            let known = new.chain([&old]).any(|sector| sector[..end] == *got);
            assert!(known, "sector {i} holds what was never written");
        }
    }
}

fn content(files: &SimFiles, file: FileId) -> Vec<u8> {
    let len = files.len(file).expect("open");
    if len == 0 { Vec::new() } else { read(files, file, 0, len).expect("read") }
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize, u64, u64, u8),
    Sync(usize),
    Crash,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    let write = (0..3usize, 0..6000u64, 1..3000u64, any::<u8>());
    prop_oneof![
        12 => write.prop_map(|(f, o, b, x)| Step::Write(f, o, b, x)),
        3 => (0..3usize).prop_map(Step::Sync),
        2 => Just(Step::Crash),
        1 => Just(Step::Kill),
    ]
}

proptest! {
    #[test]
    fn a_crash_keeps_synced_bytes_and_any_of_the_others(
        seed in any::<u64>(),
        align in prop_oneof![Just(1u64), Just(512)],
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        let mut files = SimFiles::new(seed, opts(align, Plan::default()));
        let mut models = vec![Model::default(); 3];
        let name = |i: usize| format!("f{i}");
        let mut ids: Vec<FileId> =
            (0..3).map(|i| files.create(&name(i), 0).expect("created")).collect();
        ids.iter().for_each(|file| files.sync(*file).expect("synced"));
        files.sync_names().expect("synced");
        models.iter_mut().for_each(|model| model.settle(Vec::new()));
        for step in steps {
            match step {
                Step::Write(f, offset, bytes, fill) => {
                    let (offset, bytes) = (offset / align * align, bytes.next_multiple_of(align));
                    write(&files, ids[f], offset, fill, bytes).expect("written");
                    models[f].write(offset as usize, fill, bytes as usize);
                }
                Step::Sync(f) => {
                    files.sync(ids[f]).expect("synced");
                    let now = models[f].now.clone();
                    models[f].settle(now);
                    prop_assert_eq!(&files.durable().expect("memory")[&name(f)], &models[f].durable);
                }
                Step::Crash => {
                    files.crash().expect("memory");
                    prop_assert_eq!(status(files.len(ids[0])), Status::Closed);
                    files = files.reopen();
                    for (i, model) in models.iter_mut().enumerate() {
                        ids[i] = files.open(&name(i)).expect("its name was synced");
                        let found = content(&files, ids[i]);
                        model.check(&found);
                        model.now = found.clone();
                        model.settle(found);
                    }
                }
                Step::Kill => {
                    files = files.reopen();
                    for (i, id) in ids.iter_mut().enumerate() {
                        *id = files.open(&name(i)).expect("still there");
                    }
                }
            }
            for (id, model) in ids.iter().zip(&models) {
                // With an alignment only whole sectors can be read.
                if files.len(*id).expect("open") % align == 0 {
                    prop_assert!(content(&files, *id) == model.now);
                }
            }
        }
    }

    #[test]
    fn the_same_seed_and_calls_give_the_same_result(
        seed in any::<u64>(),
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let plan = (0..11).fold(Plan::default(), |mut plan, kind| {
            plan.per_million[kind] = 60_000;
            plan
        });
        let run = |seed| {
            let mut files = disk(seed, Plan::default());
            let mut ids: Vec<FileId> =
                (0..3).map(|i| files.create(&format!("f{i}"), 4096).expect("created")).collect();
            files.sync_names().expect("synced");
            files.set_plan(plan);
            for step in &steps {
                match step {
                    Step::Write(f, offset, bytes, fill) => {
                        let (o, b) = (offset / 512 * 512, bytes.next_multiple_of(512));
                        let _ = write(&files, ids[*f], o, *fill, b);
                        let _ = read(&files, ids[*f], o, b);
                    }
                    Step::Sync(f) => drop(files.sync(ids[*f])),
                    Step::Crash | Step::Kill => {
                        if matches!(step, Step::Crash) {
                            files.crash().expect("memory");
                        }
                        files = files.reopen();
                        files.set_plan(Plan::default());
                        for (i, id) in ids.iter_mut().enumerate() {
                            *id = files.open(&format!("f{i}")).expect("named");
                        }
                        files.set_plan(plan);
                    }
                }
            }
            files.crash().expect("memory");
            (files.durable().expect("memory"), files.history(), files.take_cost_ns())
        };
        let (a, b) = (run(seed), run(seed));
        prop_assert!(a.0 == b.0 && a.1 == b.1 && a.2 == b.2);
    }

    #[test]
    fn changes_of_a_name_survive_in_order(
        seed in any::<u64>(),
        changes in proptest::collection::vec((0..4u8, 0..3u8, 0..3u8), 1..20),
    ) {
        let mut files = disk(seed, Plan::default());
        // Files that each name referred to since the last sync; the first bytes identify files.
        let mut seen: BTreeMap<String, BTreeSet<Option<u8>>> = BTreeMap::new();
        let mut now: BTreeMap<String, u8> = BTreeMap::new();
        let mut next = 1;
        for (kind, a, b) in changes {
            let (a, b) = (format!("n{a}"), format!("n{b}"));
            match kind {
                0 if !now.contains_key(&a) => {
                    let file = files.create(&a, 512).expect("created");
                    write(&files, file, 0, next, 512).and(files.sync(file)).expect("durable");
                    now.insert(a.clone(), next);
                    next += 1;
                }
                1 if now.contains_key(&a) => {
                    files.rename(&a, &b).expect("renamed");
                    now.remove(&a).map(|file| now.insert(b.clone(), file));
                }
                2 if now.contains_key(&a) => {
                    files.remove(&a).expect("removed");
                    now.remove(&a);
                }
                3 => {
                    files.sync_names().expect("synced");
                    seen.clear();
                }
                _ => {}
            }
            for i in 0..3 {
                let name = format!("n{i}");
                let leads_to = now.get(&name).copied();
                seen.entry(name).or_default().insert(leads_to);
            }
        }
        // Before the first change no name existed, unless there was a sync.
        let changed = files.durable().expect("memory");
        files.crash().expect("memory");
        files = files.reopen();
        let mut found = BTreeSet::new();
        for i in 0..3 {
            let name = format!("n{i}");
            let leads_to = files.open(&name).ok().map(|id| content(&files, id)[0]);
            let before = changed.get(&name).map(|bytes| bytes[0]);
            let states = &seen[&name];
            prop_assert!(leads_to == before || states.contains(&leads_to), "{name}: {leads_to:?}");
            prop_assert!(leads_to.is_none_or(|file| found.insert(file)), "two names for one file");
        }
    }
}

#[test]
fn a_replaced_name_always_refers_to_a_file() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..200 {
        let files = disk(seed, Plan::default());
        for (name, fill) in [("current", 1), ("next", 2)] {
            let file = files.create(name, 512).expect("created");
            write(&files, file, 0, fill, 512).and(files.sync(file)).expect("durable");
        }
        files.sync_names().expect("synced");
        files.rename("next", "current").expect("renamed");
        files.crash().expect("memory");
        let files = files.reopen();
        let current = files.open("current").expect("one of the two");
        let current = content(&files, current)[0];
        assert_eq!(files.open("next").is_ok(), current == 1);
        outcomes.insert(current);
    }
    assert_eq!(outcomes.len(), 2, "both happen");
}

#[test]
fn every_kind_of_crash_happens() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..3000 {
        let files = disk(seed, Plan::default());
        let file = files.create("x", 1536).expect("created");
        files.sync(file).and(files.sync_names()).expect("durable");
        for fill in 1..3 {
            write(&files, file, 0, fill, 1536).expect("written");
        }
        files.crash().expect("memory");
        let files = files.reopen();
        let file = files.open("x").expect("its name was synced");
        let bytes = content(&files, file);
        outcomes.insert([bytes[0], bytes[512], bytes[1024]]);
        files.crash().expect("memory");
        assert_eq!(files.durable().expect("memory")["x"], bytes, "synced bytes persist");
    }
    assert_eq!(outcomes.len(), 27, "each sector by itself: old, first or second");
}

#[test]
fn a_new_file_may_be_lost_empty_or_partial() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..300 {
        let files = disk(seed, Plan::default());
        let file = files.create("x", 1024).expect("created");
        write(&files, file, 1024, 1, 512).expect("written");
        files.crash().expect("memory");
        let files = files.reopen();
        outcomes.insert(files.list().expect("listed").first().map(|entry| entry.bytes));
    }
    assert_eq!(outcomes, BTreeSet::from([None, Some(0), Some(1024), Some(1536)]));
}

#[test]
fn a_planned_fault_happens_once() {
    let run = |fault: Fault, calls: &dyn Fn(&SimFiles, FileId) -> Status| {
        let files = disk(1, Plan::default());
        let file = files.create("x", 8192).expect("created");
        write(&files, file, 0, 1, 8192).expect("written");
        files.set_plan(Plan::default().once(fault, 2));
        let results = [0; 3].map(|_| calls(&files, file));
        assert_eq!((results[0], results[2]), (Status::Ok, Status::Ok), "{fault:?}");
        (results[1], content(&files, file))
    };
    let reads = |files: &SimFiles, file| status(read(files, file, 0, 8192));
    let writes = |files: &SimFiles, file| status(write(files, file, 0, 1, 8192));
    assert_eq!(run(Fault::ReadError, &reads), (Status::Io, vec![1; 8192]));
    assert_eq!(run(Fault::ShortRead, &reads), (Status::Io, vec![1; 8192]));
    assert_eq!(run(Fault::WriteError, &writes).0, Status::Io);
    assert_eq!(run(Fault::ShortWrite, &writes).0, Status::Io);
    assert_eq!(run(Fault::Full, &writes).0, Status::Budget);
    let (rotten, bytes) = run(Fault::BitRot, &reads);
    let wrong: Vec<u8> = bytes.into_iter().map(|b| b ^ 1).filter(|b| *b != 0).collect();
    assert_eq!((rotten, wrong.len()), (Status::Ok, 1));
    assert_eq!(wrong[0].count_ones(), 1, "one bit, for good");
    let lists = |files: &SimFiles, _| status(files.list());
    assert_eq!(run(Fault::NameError, &lists).0, Status::Io);
    let moves = |files: &SimFiles, file| status(write(files, file, 4096, 7, 512));
    let (_, bytes) = run(Fault::Misdirected, &moves);
    assert!(bytes.chunks(512).filter(|sector| sector[0] == 7).count() == 2, "one went astray");
}

#[test]
fn a_failed_write_is_partial_and_a_failed_read_returns_junk() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..50 {
        let plan = Plan::default().once(Fault::WriteError, 1).once(Fault::ReadError, 1);
        let files = disk(seed, plan);
        let file = files.create("x", 1024).expect("created");
        assert!(write(&files, file, 0, 9, 1024).is_err());
        let buffer = crate::disk::contract::memory(1024);
        let mut pieces = [crate::disk::contract::whole(file, Access::Read, 0, &buffer)];
        // SAFETY: the memory is this test's own.
        unsafe { files.transfer(&mut pieces) };
        assert!(pieces[0].result.is_err());
        let shown = crate::disk::contract::bytes_of(&buffer);
        assert!(shown.iter().all(|b| *b != 0 && *b != 9), "memory has bytes after a failed read");
        let bytes = content(&files, file);
        outcomes.insert((bytes[0], bytes[512]));
    }
    assert_eq!(outcomes.len(), 4);
}

#[test]
fn a_failed_sync_poisons_the_file() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..100 {
        let files = disk(seed, Plan::default().once(Fault::SyncError, 1));
        let file = files.create("x", 512).expect("created");
        files.sync_names().expect("synced");
        write(&files, file, 0, 1, 512).expect("written");
        assert_eq!(status(files.sync(file)), Status::Io);
        assert_eq!(status(files.sync(file)), Status::Io, "it is remembered");
        // A reopened file reports success, although data was lost.
        let again = files.open("x").expect("found");
        assert_eq!(files.sync(again), Ok(()));
        let seen = content(&files, again).first().copied();
        files.crash().expect("memory");
        let durable = files.durable().expect("memory")["x"].first().copied();
        outcomes.insert((seen, durable));
    }
    assert!(outcomes.contains(&(Some(1), Some(1))) && outcomes.contains(&(Some(1), None)));
    assert!(outcomes.contains(&(None, None)) && outcomes.contains(&(Some(1), Some(0))));
}

#[test]
fn a_lost_sync_loses_data() {
    let durable = |fault: Plan| {
        let survives = |seed| {
            let files = disk(seed, fault);
            let file = files.create("x", 512).expect("created");
            write(&files, file, 0, 1, 512).expect("written");
            assert_eq!((files.sync(file), files.sync_names()), (Ok(()), Ok(())));
            files.crash().expect("memory");
            files.durable().expect("memory").get("x").is_some_and(|bytes| bytes[..] == [1; 512])
        };
        (0..100).filter(|seed| survives(*seed)).count()
    };
    assert_eq!(durable(Plan::default()), 100);
    assert!(durable(Plan::default().often(Fault::LostSync, 1_000_000)) < 80);
}

#[test]
fn the_power_can_fail_at_any_call() {
    let run = |plan: Plan| {
        let files = disk(5, plan);
        let work = || -> Result<()> {
            let file = files.create("x", 1024)?;
            write(&files, file, 0, 1, 1024)?;
            files.sync(file)?;
            files.sync_names()?;
            files.rename("x", "y")?;
            files.list().map(drop)
        };
        (status(work()), files)
    };
    let (fine, files) = run(Plan::default());
    assert_eq!((fine, files.calls()), (Status::Ok, 6));
    for n in 1..=6 {
        let (broken, files) = run(Plan::default().crash(n));
        assert_eq!((broken, files.is_closed()), (Status::Closed, true));
        assert_eq!(files.calls(), n, "nothing gets through any more");
        assert_eq!(status(files.free_bytes()), Status::Closed);
        let again = files.reopen();
        assert!(again.list().is_ok() && files.list().is_err());
        if n > 5 {
            assert_eq!(again.list().expect("listed").len(), 1);
        }
    }
}

#[test]
fn capacity_is_limited() {
    let capacity_bytes = 10_240;
    let files = SimFiles::new(1, SimOpts { capacity_bytes, ..opts(512, Plan::default()) });
    let x = files.create("x", 8192).expect("room");
    assert_eq!(status(files.create("y", 4096)), Status::Budget);
    assert_eq!(status(write(&files, x, 8192, 1, 4096)), Status::Budget);
    assert_eq!((write(&files, x, 8192, 1, 2048), files.free_bytes()), (Ok(()), Ok(0)));
    // Repeated writes need no more memory: the system writes back on its own.
    (0..100).for_each(|fill| write(&files, x, 0, fill, 8192).expect("in place"));
    files.remove("x").expect("removed");
    assert_eq!(files.free_bytes(), Ok(0), "it is still open");
    files.close(x);
    assert_eq!(files.free_bytes(), Ok(capacity_bytes));
    files.set_capacity(512);
    assert_eq!(status(files.create("y", 4096)), Status::Budget);
}

#[test]
fn calls_cost_virtual_time() {
    let plan = Plan::default().once(Fault::Slow, 2).once(Fault::Stuck, 3);
    let files = disk(1, plan);
    let costs = Costs::default();
    let file = files.create("x", 1 << 20).expect("created");
    assert_eq!(files.take_cost_ns(), costs.call_ns);
    write(&files, file, 0, 1, 1 << 20).expect("written");
    assert_eq!(files.take_cost_ns(), costs.call_ns + costs.slow_ns + 1024 * costs.kib_ns);
    files.sync(file).expect("synced");
    assert_eq!(files.take_cost_ns(), costs.call_ns + costs.sync_ns + STUCK_NS);
    assert_eq!(files.take_cost_ns(), 0);
}

#[test]
fn bit_rot_is_permanent_and_calls_are_recorded() {
    let files = disk(1, Plan::default());
    let file = files.create("x", 512).expect("created");
    write(&files, file, 0, 0xF0, 512).and(files.sync(file)).expect("durable");
    assert_eq!(files.rot("x", 100 * 8 + 3), Ok(()));
    assert_eq!(content(&files, file)[100], 0xF8);
    files.sync_names().expect("synced");
    files.crash().expect("memory");
    assert_eq!(files.durable().expect("memory")["x"][100], 0xF8);
    assert_eq!(status(files.rot("x", 512 * 8)), Status::Invalid);
    assert_eq!(status(files.rot("y", 0)), Status::NotFound);
    let calls: Vec<String> = files.history().iter().map(|event| event.to_string()).collect();
    assert_eq!(calls[1].trim(), "2 write x 0+512: fine");
    let files = files.reopen();
    let _ = (0..2000).map(|_| files.list()).collect::<Vec<_>>();
    assert_eq!(files.history().len(), history::MAX_EVENTS);
}
