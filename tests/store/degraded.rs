//! Failing surroundings: a full disk, a device with errors, a removed or forbidden directory,
//! memory pressure. The store reports the error, continues with what is left, never returns a wrong
//! byte, and recovers.

use kvtier_testkit::fixtures::apart;
use kvtier_testkit::fixtures::store as support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use apart::{Group, Loop, apart, become_nobody, fill, longest_file, tmpfs};
use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::op::RELEASED;
use kvtier::base::status::{Error, Status};
use kvtier::store::handle::Store;
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{
    Done, Engine, LONG_NS, Model, POISON, Shape, TestStore, document, marks_of, mix, runtime,
    spec_of, wait, with_disk,
};

/// Chunks of 96 KiB.
const MODEL: Model = Model { layers: 6, heads: 4, run: 64, chunk: 16 };
const MIB: u64 = 1 << 20;
/// Failures in a row after which a disk counts as full.
const ENOUGH: u32 = 6;

/// A store, and the documents that it has acknowledged on disk.
struct Keep {
    store: TestStore,
    namespace: u32,
    kept: Vec<u32>,
    next: u32,
}

impl Keep {
    fn open(dir: &Path, more: &str, rest: &str) -> Keep {
        let disk = format!("bytes=1GiB,segment=1MiB{more}");
        let store = TestStore::open(&with_disk(dir, &disk, rest));
        let namespace = store.namespace(1, &MODEL);
        Keep { store, namespace, kept: Vec::new(), next: 0 }
    }

    /// Reopens the store, with the documents that were kept.
    fn again(self, dir: &Path, more: &str, rest: &str) -> Keep {
        let Keep { store, kept, next, .. } = self;
        store.close();
        Keep { kept, next, ..Keep::open(dir, more, rest) }
    }

    /// Stores the next document, or returns the error.
    fn put(&mut self, level: Level) -> Result<(), Error> {
        let (number, tokens) = (self.next, document(self.next, MODEL.chunk));
        self.next += 1;
        let session = self.store.session(self.namespace, &tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
        let what = engine.whole();
        let op = match self.store.submit(session, TransferKind::Put, level, what) {
            Ok(mut ops) => ops.remove(0),
            Err(error) => {
                self.store.close_session(session);
                return Err(error);
            }
        };
        op.wait(RELEASED, self.store.now_ns() + LONG_NS).expect("every op ends");
        let error = op.error();
        let done = wait(&op);
        self.store.close_session(session);
        match done.status {
            Status::Ok => {
                assert_eq!(done.tokens, MODEL.chunk);
                if level > Level::Ram {
                    self.kept.push(number);
                }
                Ok(())
            }
            status => Err(error.unwrap_or(Error::new(status, "no words"))),
        }
    }

    /// Stores until `ENOUGH` puts in a row have failed, and returns the last error. Returns None
    /// after `most` puts.
    fn put_until_refused(&mut self, most: u32) -> Option<Error> {
        let (mut last, mut in_a_row) = (None, 0);
        for _ in 0..most {
            match self.put(Level::Disk) {
                Ok(()) => in_a_row = 0,
                Err(error) => {
                    in_a_row += 1;
                    last = Some(error);
                }
            }
            if in_a_row >= ENOUGH {
                return last;
            }
        }
        None
    }

    /// Stores `count` documents. Every put must succeed.
    fn put_all(&mut self, count: u32) {
        for _ in 0..count {
            let level = if self.next % 2 == 0 { Level::Durable } else { Level::Disk };
            self.put(level).expect("the disk has space again");
        }
    }

    /// Reads a document. Found tokens are compared.
    fn get(&self, number: u32) -> Done {
        let tokens = document(number, MODEL.chunk);
        let marks = marks_of(0, &tokens);
        let session = self.store.session(self.namespace, &tokens);
        let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
        let done = self.store.get(session, &engine);
        engine.check(&marks, 0..done.tokens, 0..MODEL.layers);
        engine.check_written(&marks);
        assert!(engine.bytes().iter().all(|&b| b == POISON));
        self.store.close_session(session);
        done
    }

    /// Puts and gets in host memory succeed, whatever the state of the disk.
    fn is_alive(&mut self) {
        for _ in 0..10 {
            self.put(Level::Ram).expect("a put in host memory");
            assert_eq!(self.get(self.next - 1).status, Status::Ok);
        }
    }

    /// All kept documents are found, except evicted ones.
    fn audit(&self) {
        let is_gone = |&&number: &&u32| self.get(number).status != Status::Ok;
        let gone = self.kept.iter().filter(is_gone).count() as u64;
        let counters = self.store.counters();
        assert!(
            gone <= counters.evicted_chunks,
            "{gone} of {} missing: {counters:?}",
            self.kept.len()
        );
        assert_eq!(counters.corrupt_cells, 0, "{counters:?}");
    }

    /// Removes documents from the list that an earlier process evicted.
    fn forget_gone(&mut self) {
        let kept = std::mem::take(&mut self.kept);
        self.kept = kept.into_iter().filter(|&n| self.get(n).status == Status::Ok).collect();
        assert_eq!(self.store.counters().corrupt_cells, 0);
    }

    fn rest(&self) {
        self.store.settle();
    }
}

/// Removes a store's directory. The store may be creating a segment in it meanwhile.
fn remove(dir: &Path) {
    while let Err(error) = std::fs::remove_dir_all(dir) {
        assert_eq!(error.kind(), std::io::ErrorKind::DirectoryNotEmpty, "{error}");
    }
}

fn is_said(error: &Error, status: Status, words: &str) {
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(words), "{error}");
}

const REST: &str = "host=4MiB,chunks=4096,readers=2";

/// Another file fills the file system of a store, and is removed later.
fn full(disk: &Path, name: &str, more: &str) {
    let (dir, others) = (disk.join(name), disk.join("others"));
    fill(&others, 16 * MIB).expect("room");
    let mut keep = Keep::open(&dir, more, REST);
    // The store works with the remaining space: older chunks are evicted, as with a full budget.
    assert_eq!(keep.put_until_refused(1500), None);
    assert!(keep.kept.len() > 1400, "{} were kept", keep.kept.len());
    assert!(keep.store.counters().evicted_chunks > 500, "{:?}", keep.store.counters());
    keep.is_alive();
    keep.audit();
    // A reopened store finds what is on the disk. The number of documents depends on the progress
    // of compaction; it is at least half of what fits.
    let mut keep = keep.again(&dir, more, REST);
    keep.forget_gone();
    assert!(keep.kept.len() > 180, "{} were kept", keep.kept.len());
    keep.is_alive();
    keep.audit();
    assert_eq!(keep.put_until_refused(200), None);
    std::fs::remove_file(&others).expect("removed");
    keep.put_all(60);
    keep.audit();
    keep.rest();
    let mut keep = keep.again(&dir, more, REST);
    keep.forget_gone();
    assert!(keep.kept.len() > 180, "{} were kept", keep.kept.len());
    let damaged = keep.store.handle.opened.disk.expect("a disk");
    assert_eq!((damaged.damaged_segments, damaged.damaged_headers), (0, 0), "{damaged:?}");
    keep.rest();
    keep.store.close();
}

#[test]
fn full_tmpfs_fails_puts_and_recovers() {
    apart(kvtier_testkit::test_name!("full_tmpfs_fails_puts_and_recovers"), |dir| {
        let disk = dir.join("disk");
        tmpfs(&disk, 40 * MIB)?;
        full(&disk, "kv", "");
        Ok(())
    });
}

#[test]
fn full_ext4_fails_puts_and_recovers() {
    apart(kvtier_testkit::test_name!("full_ext4_fails_puts_and_recovers"), |dir| {
        let disk = dir.join("disk");
        let _device = Loop::mounted(dir, &disk, 44 * MIB)?;
        full(&disk, "kv", "");
        std::fs::remove_dir_all(disk.join("kv")).expect("removed");
        full(&disk, "plain", ",uring=false,buffered=true");
        Ok(())
    });
}

#[test]
fn file_size_limit_fails_puts_and_recovers() {
    apart(kvtier_testkit::test_name!("file_size_limit_fails_puts_and_recovers"), |dir| {
        let dir = dir.join("kv");
        let mut keep = Keep::open(&dir, "", REST);
        keep.put_all(40);
        longest_file(Some(MIB / 2));
        let error = keep.put_until_refused(200).expect("a limit");
        is_said(&error, Status::Io, "File too large");
        keep.is_alive();
        keep.audit();
        longest_file(None);
        keep.put_all(40);
        keep.audit();
        let keep = keep.again(&dir, "", REST);
        keep.audit();
        keep.rest();
        keep.store.close();
        Ok(())
    });
}

/// A device fails behind its first MiB for a while.
#[test]
fn temporary_device_errors_are_survived() {
    apart(kvtier_testkit::test_name!("temporary_device_errors_are_survived"), |dir| {
        let disk = dir.join("disk");
        let mut device = Loop::mounted(dir, &disk, 64 * MIB)?;
        let dir = disk.join("kv");
        // Chunks that are read are not in memory.
        let mut keep = Keep::open(&dir, "", REST);
        keep.put_all(120);
        keep.audit();
        keep.rest();
        device.ends_at(MIB)?;
        let error = keep.put_until_refused(200).expect("nothing can be written");
        assert_eq!(error.status(), Status::Io, "{error}");
        keep.is_alive();
        let mut failed = 0;
        for &number in &keep.kept {
            let done = keep.get(number);
            assert!(matches!(done.status, Status::Ok | Status::Io), "{number}: {done:?}");
            failed += u32::from(done.status == Status::Io);
        }
        let counters = keep.store.counters();
        assert!(failed > 30 && counters.failed_reads > 0, "{failed} failed: {counters:?}");
        assert_eq!(counters.corrupt_cells, 0, "a failed read is not corruption: {counters:?}");
        // A disk that failed a sync is not synced again: the chunks that are durable now were
        // durable before.
        let durable = keep.put(Level::Durable).expect_err("a durable put on a failed disk");
        assert_eq!(durable.status(), Status::Io);
        device.ends_at(0)?;
        keep.audit();
        keep.put_all(60);
        keep.audit();
        keep.rest();
        let keep = keep.again(&dir, "", REST);
        keep.audit();
        keep.rest();
        keep.store.close();
        Ok(())
    });
}

#[test]
fn removed_directory_keeps_the_store_alive() {
    apart(kvtier_testkit::test_name!("removed_directory_keeps_the_store_alive"), |dir| {
        let dir = dir.join("kv");
        let mut keep = Keep::open(&dir, "", REST);
        keep.put_all(60);
        remove(&dir);
        let error = keep.put_until_refused(400).expect("no segment can be made");
        is_said(&error, Status::NotFound, "No such file or directory");
        keep.is_alive();
        // Open files stay usable.
        keep.audit();
        keep.rest();
        // The close cannot write to the disk. It reports an error, and does not hang.
        let Keep { store, .. } = keep;
        drop(store.handle.close(store.now_ns() + LONG_NS));
        drop(store);
        let mut keep = Keep::open(&dir, "", REST);
        assert!(keep.store.handle.opened.disk.expect("a disk").is_new);
        keep.put_all(60);
        keep.audit();
        keep.store.close();
        Ok(())
    });
}

#[test]
fn removed_directory_fails_durable_puts() {
    apart(kvtier_testkit::test_name!("removed_directory_fails_durable_puts"), |dir| {
        let dir = dir.join("kv");
        let mut keep = Keep::open(&dir, "", REST);
        keep.put_all(2);
        remove(&dir);
        let error = keep.put(Level::Durable).expect_err("a durable put without a directory");
        assert_eq!(error.status(), Status::Io, "{error}");
        keep.is_alive();
        Ok(())
    });
}

#[test]
fn lost_permission_fails_puts_and_recovers() {
    apart(kvtier_testkit::test_name!("lost_permission_fails_puts_and_recovers"), |dir| {
        become_nobody(dir)?;
        let dir = dir.join("kv");
        let mode = |mode| {
            let wanted = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&dir, wanted).expect("ours");
        };
        let mut keep = Keep::open(&dir, "", REST);
        keep.put_all(60);
        mode(0o000);
        let error = keep.put_until_refused(400).expect("no segment can be made");
        is_said(&error, Status::Io, "Permission denied");
        keep.is_alive();
        keep.audit();
        mode(0o700);
        keep.put_all(60);
        keep.audit();
        keep.rest();
        keep.store.close();
        mode(0o000);
        let runtime = runtime();
        let spec = with_disk(&dir, "bytes=1GiB,segment=1MiB", REST);
        let error = Store::open(runtime.core(), None, &spec).err().expect("it cannot be read");
        is_said(&error, Status::Io, "Permission denied");
        is_said(&error, Status::Io, &dir.display().to_string());
        mode(0o700);
        Ok(())
    });
}

/// A store limited by a budget, and that budget.
fn on_budget(dir: &Path, limit: Option<u64>, reserve: u64) -> (Keep, std::sync::Arc<Budget>) {
    let runtime = runtime();
    let mut limits = [None; 5];
    limits[Tier::Host as usize] = limit;
    let opts = BudgetOpts { limits, reserve_bytes: Some(reserve), strict: false };
    let budget = Budget::open(runtime.core(), &opts).expect("a budget");
    let spec = with_disk(dir, "bytes=1GiB,segment=4MiB", "host=96MiB,chunks=16384");
    let store = TestStore::on_budget(runtime, &budget, &spec);

    let namespace = store.namespace(1, &MODEL);
    (Keep { store, namespace, kept: Vec::new(), next: 0 }, budget)
}

/// Resident bytes of this process that belong to no file.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Puts and gets `bytes` bytes in total. Demoted chunks are found.
fn storm(keep: &mut Keep, bytes: u64) {
    let first = keep.next;
    for turn in 0..(bytes / MODEL.chunk_bytes()) as u32 {
        keep.put(Level::Ram).expect("others are evicted");
        let back = first + (mix(u64::from(turn)) % u64::from(turn + 1)) as u32;
        assert_eq!(keep.get(back).status, Status::Ok, "{back} of {turn}");
    }
}

#[test]
fn shrinking_budget_is_obeyed_under_load() {
    apart(kvtier_testkit::test_name!("shrinking_budget_is_obeyed_under_load"), |dir| {
        let (mut keep, budget) = on_budget(&dir.join("kv"), Some(96 * MIB), 0);
        storm(&mut keep, 120 * MIB);
        let stop = AtomicBool::new(false);
        let before = resident();
        std::thread::scope(|scope| {
            let (stop, budget) = (&stop, &budget);
            scope.spawn(move || {
                let used = || {
                    let lane = budget.usage(Tier::Host);
                    lane.reserved_bytes + lane.committed_bytes
                };
                // At least a segment of 6 MiB, staging memory and tables.
                for (turn, mib) in [24, 64, 15, 80, 18].into_iter().enumerate() {
                    budget.resize(Tier::Host, mib * MIB).expect("a budget");
                    // Memory granted before the resize may still be in use.
                    let had = used();
                    while used() > mib * MIB && !stop.load(Ordering::Relaxed) {
                        assert!(used() <= had.max(mib * MIB), "turn {turn}: more was granted");
                        std::thread::yield_now();
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
            for _ in 0..40 {
                storm(&mut keep, 8 * MIB);
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
            stop.store(true, Ordering::Relaxed);
            panic!("the requested memory was not returned: {:?}", budget.usage(Tier::Host));
        });
        storm(&mut keep, 40 * MIB);
        keep.rest();
        let lane = budget.usage(Tier::Host);
        let used = lane.reserved_bytes + lane.committed_bytes;
        assert!(used <= 18 * MIB && lane.limit_bytes == 18 * MIB, "{lane:?}");
        let given = before.saturating_sub(resident());
        assert!(given > 40 * MIB, "{} MiB less are resident", given / MIB);
        let counters = keep.store.counters();
        assert_eq!(
            (counters.dropped_chunks, counters.corrupt_cells, counters.no_room_cells),
            (0, 0, 0)
        );
        budget.resize(Tier::Host, 96 * MIB).expect("a budget");
        storm(&mut keep, 120 * MIB);
        assert!(budget.usage(Tier::Host).committed_bytes > 64 * MIB);
        keep.rest();
        keep.store.close();
        Ok(())
    });
}

#[test]
fn store_stays_within_a_cgroup() {
    apart(kvtier_testkit::test_name!("store_stays_within_a_cgroup"), |dir| {
        const LIMIT: u64 = 160 * MIB;
        let group = Group::joined(LIMIT)?;
        // The budget exceeds the limit of the group and the memory of the machine.
        let (mut keep, budget) = on_budget(&dir.join("kv"), Some(64 << 30), 48 * MIB);
        let lane = budget.usage(Tier::Host);
        assert!(lane.limit_bytes <= LIMIT - 48 * MIB, "{lane:?}");
        storm(&mut keep, 3 * LIMIT / 2);
        assert!(resident() < LIMIT, "{} MiB", resident() / MIB);
        assert!(budget.usage(Tier::Host).peak_bytes > LIMIT / 4, "too little memory was used");
        keep.rest();
        let counters = keep.store.counters();
        assert_eq!(
            (counters.dropped_chunks, counters.corrupt_cells, counters.no_room_cells),
            (0, 0, 0)
        );
        let peak = group.peak_bytes();
        assert!(peak.is_none_or(|peak| peak <= LIMIT), "{peak:?}");
        assert_eq!(group.hits(), 0, "the group reached its limit");
        keep.store.close();
        Ok(())
    });
}

#[test]
fn store_yields_memory_inside_a_cgroup() {
    apart(kvtier_testkit::test_name!("store_yields_memory_inside_a_cgroup"), |dir| {
        const LIMIT: u64 = 160 * MIB;
        let group = Group::joined(LIMIT)?;
        let (mut keep, budget) = on_budget(&dir.join("kv"), Some(64 << 30), 48 * MIB);
        storm(&mut keep, LIMIT / 2);
        budget.resize(Tier::Host, 40 * MIB).expect("a budget");
        for _ in 0..6 {
            storm(&mut keep, 8 * MIB);
        }
        assert!(budget.usage(Tier::Host).committed_bytes <= 40 * MIB);
        let others = vec![1u8; 48 << 20];
        storm(&mut keep, LIMIT / 2);
        assert!(others.iter().all(|&byte| byte == 1));
        // The limit of the store follows the free memory of the group.
        budget.resize(Tier::Host, 64 << 30).expect("a budget");
        assert!(budget.usage(Tier::Host).limit_bytes <= LIMIT - 96 * MIB);
        storm(&mut keep, LIMIT / 2);
        keep.rest();
        let peak = group.peak_bytes();
        assert!(peak.is_none_or(|peak| peak <= LIMIT), "{peak:?}");
        keep.store.close();
        Ok(())
    });
}

/// A store without a budget uses its configured memory, and no more.
#[test]
fn without_a_disk_evicted_chunks_are_dropped_and_counted() {
    let store = TestStore::open(&spec_of("store(host=8MiB,policy=lru,chunks=4096)"));
    let namespace = store.namespace(1, &MODEL);
    let mut keep = Keep { store, namespace, kept: Vec::new(), next: 0 };
    for _ in 0..400 {
        keep.put(Level::Ram).expect("others are evicted");
    }
    let there = (0..400).filter(|&number| keep.get(number).status == Status::Ok).count() as u64;
    let counters = keep.store.counters();
    assert!(there > 60 && there + counters.dropped_chunks == 400, "{there}: {counters:?}");
    let error = keep.put(Level::Disk).expect_err("there is no disk");
    assert_eq!(error.status(), Status::Unavailable, "{error}");
    keep.rest();
    keep.store.close();
}
