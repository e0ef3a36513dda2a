//! Fault injection, to test failure paths of engines and of the library.
//!
//! `faults(worker=at(panic=3))` panics at the third pass of the site `worker`. Sites: `worker`
//! (an item is executed), `notifier` (a callback is about to run), `map` (memory is mapped),
//! `pin` (memory is locked), `thread` (a thread is started). Kinds: `panic` and `fail` with the
//! number of a pass, `stall` with a duration.

use crate::base::spec::describe::{Description, Param};
use crate::base::spec::{Reader, Spec};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicU64, Ordering};

/// Sites at which a fault can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// A worker executes an item.
    Worker = 0,
    /// The notifier is about to run a callback.
    Notifier = 1,
    /// Memory is mapped.
    Map = 2,
    /// Memory is locked.
    Pin = 3,
    /// A thread is started.
    Thread = 4,
}

/// The names of the sites, in the order of [`Site`].
pub const SITES: [&str; 5] = ["worker", "notifier", "map", "pin", "thread"];

/// The sites as parameters of `faults`; the value of each is `at(...)`.
const PARAMS: &[Param] = &[
    Param::new("worker", "a worker executes an item").default_is("none"),
    Param::new("notifier", "the notifier is about to run a callback").default_is("none"),
    Param::new("map", "memory is mapped").default_is("none"),
    Param::new("pin", "memory is locked").default_is("none"),
    Param::new("thread", "a thread is started").default_is("none"),
];

/// Parameters of `at`.
const AT_PARAMS: &[Param] = &[
    Param::new("panic", "number of the pass that panics, from 1; 0 = none"),
    Param::new("fail", "number of the pass that fails with `KVT_E_IO`, from 1; 0 = none"),
    Param::new("stall", "every pass waits this long first"),
];

#[derive(Default)]
struct Plan {
    panic_at: u64,
    fail_at: u64,
    stall_ns: u64,
    passes: AtomicU64,
}

impl Plan {
    fn read(reader: &mut Reader) -> Result<Plan> {
        Ok(Plan {
            panic_at: reader.u64("panic", 0, 0..=u64::MAX)?,
            fail_at: reader.u64("fail", 0, 0..=u64::MAX)?,
            stall_ns: reader.duration_ns("stall", 0)?,
            passes: AtomicU64::new(0),
        })
    }
}

/// The faults of one runtime.
#[derive(Default)]
pub struct Faults {
    plans: [Plan; SITES.len()],
}

impl Faults {
    /// Parses e.g. `faults(worker=at(panic=3), pin=at(fail=1))`.
    pub fn parse(text: &str) -> Result<Faults> {
        let spec = Spec::parse(text)?;
        if spec.name != "faults" {
            return Err(spec.unknown_name(&["faults"]));
        }
        let mut reader = Reader::new(&spec);
        let faults = Faults::read(&mut reader)?;
        reader.finish()?;
        Ok(faults)
    }

    fn read(reader: &mut Reader) -> Result<Faults> {
        let mut faults = Faults::default();
        for (plan, site) in faults.plans.iter_mut().zip(SITES) {
            let Some(at) = reader.spec(site)? else { continue };
            if at.name != "at" {
                return Err(at.unknown_name(&["at"]));
            }
            let mut inner = Reader::new(at);
            *plan = Plan::read(&mut inner)?;
            inner.finish()?;
        }
        Ok(faults)
    }

    /// The spec with its parameters, for the manual.
    pub fn describe() -> Result<Vec<Description>> {
        let (faults, at) = (Spec::parse("faults")?, Spec::parse("at")?);
        let (mut reader, mut inner) = (Reader::recording(&faults), Reader::recording(&at));
        Faults::read(&mut reader)?;
        Plan::read(&mut inner)?;
        Ok(vec![
            Description::new(
                "faults",
                "injects faults at sites of the library",
                PARAMS,
                reader.recorded(),
            )?,
            Description::new(
                "at",
                "a fault at one site; passes of the site are counted",
                AT_PARAMS,
                inner.recorded(),
            )?,
        ])
    }

    /// Passes a site: stalls, fails or panics as configured.
    pub fn pass(&self, site: Site) -> Result<()> {
        let plan = &self.plans[site as usize];
        let pass = plan.passes.fetch_add(1, Ordering::Relaxed) + 1;
        if plan.stall_ns > 0 {
            std::thread::sleep(std::time::Duration::from_nanos(plan.stall_ns));
        }
        assert!(pass != plan.panic_at, "injected panic at {}", SITES[site as usize]);
        if pass == plan.fail_at {
            return Err(Error::new(
                Status::Io,
                format!("injected failure at {}", SITES[site as usize]),
            ));
        }
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn only_the_nth_pass_fails() {
        let faults = Faults::parse("faults(pin=at(fail=2))").unwrap();
        assert!(faults.pass(Site::Pin).is_ok());
        assert_eq!(faults.pass(Site::Pin).unwrap_err().status(), Status::Io);
        assert!(faults.pass(Site::Pin).is_ok());
        assert!(faults.pass(Site::Worker).is_ok());
    }

    #[test]
    fn the_nth_pass_panics() {
        let faults = Faults::parse("faults(worker=at(panic=1))").unwrap();
        let caught = std::panic::catch_unwind(|| faults.pass(Site::Worker).is_ok());
        assert!(caught.is_err());
    }

    #[test]
    fn a_misspelt_site_gets_a_suggestion() {
        let error = Faults::parse("faults(wroker=at(panic=1))").err().unwrap();
        assert!(error.message().contains("worker"), "{error}");
    }
}
