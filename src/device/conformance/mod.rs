//! What every device has to do, as checks that any device can be put to: those of this library
//! are, and engines that bring their own run the same.
//!
//! A check does nothing but what a [`Device`] promises, waits as the promise says it must, and
//! looks whether all bytes are right. Nothing in it waits without an end.

mod bench;
mod checks;
mod copies;
mod kernels;
mod layouts;
mod random_walk;
mod user_events;

use crate::base::clock::Clock;
use crate::base::status::Status;
use crate::base::sync::Arc;
use crate::device::Device;

use bench::Bench;

/// How a device is put to the test.
#[derive(Clone)]
pub struct ConformanceOpts {
    /// Chooses all that is left to chance.
    pub seed: u64,
    /// How often what is left to chance is tried; 0 = 40.
    pub rounds: u32,
    /// The clock of the device.
    pub clock: Clock,
    /// How long an event may take before that is a failure; 0 = 30 s.
    pub patience_ns: u64,
    /// The device is closed at the end, which is tested as well.
    pub closes: bool,
}

/// What became of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The device does what it should.
    Passed,
    /// It has nothing that could be tested, and why.
    Skipped(String),
    /// It does not.
    Failed(String),
}

/// How many checks ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// As they should.
    pub passed: u32,
    /// Without a test.
    pub skipped: u32,
    /// With a failure.
    pub failed: u32,
}

/// Why a check did not pass.
enum NotPassed {
    /// There is nothing to test.
    Skipped(&'static str),
    /// Something is wrong.
    Failed(String),
}

impl From<String> for NotPassed {
    fn from(text: String) -> NotPassed {
        NotPassed::Failed(text)
    }
}

type Outcome<T = ()> = std::result::Result<T, NotPassed>;

/// One check.
struct Check {
    name: &'static str,
    run: fn(&Bench<'_>) -> Outcome,
    closes: bool,
    /// It hands over addresses by way of copies: wrong ones would end the process.
    trusts: bool,
}

const fn check(name: &'static str, run: fn(&Bench<'_>) -> Outcome) -> Check {
    Check { name, run, closes: false, trusts: false }
}

/// All of them, in the order in which they make sense: later ones rely on earlier ones.
const CHECKS: [Check; 19] = [
    check("facts", checks::facts),
    check("memory", checks::memory),
    check("bytes", copies::bytes),
    check("sizes", copies::sizes),
    check("layouts", layouts::layouts),
    check("sums", copies::sums),
    check("large-batch", copies::large_batch),
    check("empty-batch", copies::empty_batch),
    check("stream-order", copies::stream_order),
    check("event-order", copies::event_order),
    check("promises", user_events::user_events),
    check("refusals", checks::refusals),
    check("events", checks::events),
    check("polling", checks::polling),
    check("deadlines", checks::deadlines),
    check("known-host-memory", checks::registered_host),
    check("anything", random_walk::anything),
    check("threads", random_walk::threads),
    Check { name: "close", run: checks::close, closes: true, trusts: false },
];

/// Puts a device to all checks; `report` hears of each. After a failure in which work did not end
/// no more is begun, and after any other none that trusts it.
pub fn run(
    device: &Arc<dyn Device>,
    opts: &ConformanceOpts,
    report: &mut dyn FnMut(&'static str, &Verdict),
) -> Count {
    let (mut count, mut is_wrong) = (Count::default(), false);
    let bench = Bench::new(device, opts);
    let closing = CHECKS.iter().filter(|check| opts.closes && check.closes);
    let all = CHECKS.iter().filter(|check| !check.closes).chain(&kernels::CHECKS).chain(closing);
    for check in all {
        let verdict = match () {
            () if bench.is_stuck() => {
                Verdict::Skipped("work of an earlier check has not ended".into())
            }
            () if check.trusts && is_wrong => {
                Verdict::Skipped("an earlier check failed: it might go anywhere".into())
            }
            () => match (check.run)(&bench) {
                Ok(()) => Verdict::Passed,
                Err(NotPassed::Skipped(why)) => Verdict::Skipped(why.into()),
                Err(NotPassed::Failed(why)) => Verdict::Failed(why),
            },
        };
        is_wrong |= !check.trusts && matches!(verdict, Verdict::Failed(_));
        match verdict {
            Verdict::Passed => count.passed += 1,
            Verdict::Skipped(_) => count.skipped += 1,
            Verdict::Failed(_) => count.failed += 1,
        }
        bench.settle();
        report(check.name, &verdict);
    }
    count
}

/// Fails with words unless something is so.
fn need(is_so: bool, words: impl FnOnce() -> String) -> Outcome {
    if is_so { Ok(()) } else { Err(NotPassed::Failed(words())) }
}

/// A call must be refused with a status.
fn refused<T>(what: &str, said: crate::base::status::Result<T>, status: Status) -> Outcome {
    match said {
        Err(error) if error.status() == status => Ok(()),
        Err(error) => Err(format!("{what}: refused with \"{error}\", not {status:?}").into()),
        Ok(_) => Err(format!("{what}: taken, and should be refused with {status:?}").into()),
    }
}
