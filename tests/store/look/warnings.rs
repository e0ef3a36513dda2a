//! Warnings in the log, and events that log none.

use kvtier::base::status::{Error, Status};
use kvtier::base::sync::Mutex;
use kvtier::store::state::work::{Upkeep, Work, WorkerKind};

use crate::look::world::World;

/// Keeps log messages about compaction; other tests of this program log, too.
struct Heard(Mutex<Vec<String>>);

static HEARD: Heard = Heard(Mutex::new(Vec::new()));

impl log::Log for Heard {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        let text = record.args().to_string();
        if text.contains("could not be compacted") {
            self.0.lock().push(text);
        }
    }

    fn flush(&self) {}
}

/// Runs a store until it compacts a segment, and completes the compaction with `ended`. Returns the
/// number of the segment.
fn clean(seed: u64, ended: &Error) -> u64 {
    let mut world = World::new(seed, 600 << 10, 20 * 131_072);
    for _ in 0..100_000 {
        world.step();
        let work = world.core.0.lock().take(WorkerKind::Upkeep);
        match work {
            Some(Work::Upkeep(Upkeep::Compact(number))) => {
                let work = Work::Upkeep(Upkeep::Compact(number));
                world.core.0.lock().done(work, Err(ended.clone()), 0);
                world.rest(0);
                return number;
            }
            Some(work) => world.carry_out(work, 0),
            None => {}
        }
    }
    panic!("no segment was compacted");
}

#[test]
fn missing_segment_logs_no_warning() {
    log::set_logger(&HEARD).expect("no other logger");
    log::set_max_level(log::LevelFilter::Warn);
    let number = clean(1, &Error::new(Status::NotFound, "segment 7 is not there"));
    let gone: Vec<String> = HEARD.0.lock().clone();
    assert!(!gone.iter().any(|text| text.contains("is not there")), "{number}: {gone:?}");
    let number = clean(1, &Error::new(Status::Io, "the disk is on fire"));
    let words = format!("segment {number} could not be compacted: ");
    let broken: Vec<String> = HEARD.0.lock().clone();
    assert!(broken.iter().any(|text| text.starts_with(&words)), "{number}: {broken:?}");
}
