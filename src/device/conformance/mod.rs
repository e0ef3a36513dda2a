//! The conformance suite of devices. The library's own devices and custom ones of engines run the
//! same checks.
//!
//! A check uses only what [`Device`] guarantees, obeys its rules, and compares all bytes. Every
//! wait has a time limit.

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

/// Options of the suite.
#[derive(Clone)]
pub struct ConformanceOpts {
    /// Seed of all random choices.
    pub seed: u64,
    /// Random trials; 0 = 40.
    pub rounds: u32,
    /// The device's clock.
    pub clock: Clock,
    /// Time limit of an event; 0 = 30 s.
    pub patience_ns: u64,
    /// Close the device at the end, and test that.
    pub closes: bool,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The device conforms.
    Passed,
    /// Not applicable, and why.
    Skipped(String),
    /// The device does not conform.
    Failed(String),
}

/// Numbers of results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Passed checks.
    pub passed: u32,
    /// Skipped checks.
    pub skipped: u32,
    /// Failed checks.
    pub failed: u32,
}

/// Why a check did not pass.
enum NotPassed {
    /// Not applicable.
    Skipped(&'static str),
    /// Failed.
    Failed(String),
}

impl From<String> for NotPassed {
    fn from(text: String) -> NotPassed {
        NotPassed::Failed(text)
    }
}

type Outcome<T = ()> = std::result::Result<T, NotPassed>;

/// A check.
struct Check {
    name: &'static str,
    run: fn(&Bench<'_>) -> Outcome,
    closes: bool,
    /// The check passes addresses through copies: wrong bytes would crash the process.
    trusts: bool,
}

const fn check(name: &'static str, run: fn(&Bench<'_>) -> Outcome) -> Check {
    Check { name, run, closes: false, trusts: false }
}

/// All checks; later ones rely on earlier ones.
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

/// Runs all checks; `report` receives each result. After a failure with work in flight no further
/// check runs. After any other failure the checks that trust copies are skipped.
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
                Verdict::Skipped("work of an earlier check is still in flight".into())
            }
            () if check.trusts && is_wrong => Verdict::Skipped(
                "an earlier check failed: wrong copies would crash the process".into(),
            ),
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

/// Fails with a text unless a condition holds.
fn need(is_so: bool, words: impl FnOnce() -> String) -> Outcome {
    if is_so { Ok(()) } else { Err(NotPassed::Failed(words())) }
}

/// Requires that a call was rejected with a status.
fn refused<T>(what: &str, result: crate::base::status::Result<T>, status: Status) -> Outcome {
    match result {
        Err(error) if error.status() == status => Ok(()),
        Err(error) => {
            Err(format!("{what}: rejected with \"{error}\" instead of {status:?}").into())
        }
        Ok(_) => Err(format!("{what}: accepted, expected {status:?}").into()),
    }
}
