//! Admission to a slower tier: which chunks may be written, and how much. Disks wear out, and KV
//! that is never requested again takes the space of KV that is. Every rejection is counted by its
//! reason.
//!
//! [`RULES`] lists the specs.

use crate::base::spec::describe::{Description, Param};
use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;

/// Names of the rules, with their meaning.
const RULES: [(&str, &str); 3] = [
    ("all", "admits every chunk"),
    ("none", "admits no chunk"),
    ("select", "admits the chunks that pass every rule"),
];

/// Parameters of `select`.
const PARAMS: &[Param] = &[
    Param::new("hits", "least number of uses since the chunk was inserted"),
    Param::new("priority", "least priority class of the session"),
    Param::new("min_bytes", "least size of the chunk"),
    Param::new("max_bytes", "greatest size of the chunk"),
    Param::new(
        "free",
        "`hits` is not required while this share of the tier is free: an empty disk is of no use",
    ),
    Param::new(
        "wear",
        "bytes a day that may be written; what is not used is saved up for a day. 0 = no limit",
    ),
];

/// Why a candidate was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The rule admits nothing.
    Never = 0,
    /// Too few uses.
    Hits = 1,
    /// Too low a priority class.
    Priority = 2,
    /// Too small or too large.
    Size = 3,
    /// The write budget of the day is used up.
    Wear = 4,
}

/// Names of the reasons, in the order of [`Refusal`].
pub const REFUSALS: [&str; 5] = ["never", "hits", "priority", "size", "wear"];

const DAY_NS: f64 = 86_400e9;

/// A candidate for a slower tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidate {
    /// Its bytes there.
    pub bytes: u64,
    /// Uses since it was added.
    pub hits: u32,
    /// Its priority class.
    pub priority: u8,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Rules {
    hits: u32,
    priority: u8,
    min_bytes: u64,
    max_bytes: u64,
    free: f64,
    wear_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    All,
    None,
    Select(Rules),
}

fn read_mode(spec: &Spec, reader: &mut Reader) -> Result<Mode> {
    Ok(match spec.name.as_str() {
        "all" => Mode::All,
        "none" => Mode::None,
        "select" => Mode::Select(Rules {
            hits: reader.u64("hits", 1, 0..=u64::from(u32::MAX))? as u32,
            priority: reader.u64("priority", 0, 0..=2)? as u8,
            min_bytes: reader.bytes("min_bytes", 0)?,
            max_bytes: reader.bytes("max_bytes", 1 << 40)?,
            free: reader.f64("free", 0.25, 0.0..=1.0)?,
            wear_bytes: reader.bytes("wear", 0)?,
        }),
        _ => return Err(spec.unknown_name(&RULES.map(|(name, _)| name))),
    })
}

/// All rules with their parameters, for the manual.
pub fn describe() -> Result<Vec<Description>> {
    let mut out = Vec::new();
    for (name, about) in RULES {
        let spec = Spec::parse(name)?;
        let mut reader = Reader::recording(&spec);
        let params = match read_mode(&spec, &mut reader)? {
            Mode::Select(_) => PARAMS,
            _ => &[],
        };
        out.push(Description::new(name, about, params, reader.recorded())?);
    }
    Ok(out)
}

/// An admission rule with its counters.
pub struct Admission {
    mode: Mode,
    /// Write budget left, as of a time.
    saved_bytes: f64,
    at_ns: u64,
    admitted: u64,
    admitted_bytes: u64,
    refused: [u64; REFUSALS.len()],
}

impl Admission {
    /// Parses a spec.
    pub fn open(text: &str, now_ns: u64) -> Result<Admission> {
        let spec = Spec::parse(text)?;
        let mut reader = Reader::new(&spec);
        let mode = read_mode(&spec, &mut reader)?;
        reader.finish()?;
        let saved_bytes =
            if let Mode::Select(rules) = mode { rules.wear_bytes as f64 } else { 0.0 };
        let (admitted, admitted_bytes, refused) = (0, 0, [0; REFUSALS.len()]);
        Ok(Admission { mode, saved_bytes, at_ns: now_ns, admitted, admitted_bytes, refused })
    }

    /// Admits or rejects a candidate; `free` is the share of the tier that is free. An admitted
    /// candidate is charged to the write budget.
    pub fn admit(
        &mut self,
        candidate: &Candidate,
        free: f64,
        now_ns: u64,
    ) -> std::result::Result<(), Refusal> {
        let decided = match self.mode {
            Mode::All => Ok(()),
            Mode::None => Err(Refusal::Never),
            Mode::Select(rules) => self.select(&rules, candidate, free, now_ns),
        };
        match decided {
            Ok(()) => {
                self.admitted += 1;
                self.admitted_bytes += candidate.bytes;
            }
            Err(refusal) => self.refused[refusal as usize] += 1,
        }
        decided
    }

    fn select(
        &mut self,
        rules: &Rules,
        candidate: &Candidate,
        free: f64,
        now_ns: u64,
    ) -> std::result::Result<(), Refusal> {
        if candidate.priority < rules.priority {
            return Err(Refusal::Priority);
        }
        if !(rules.min_bytes..=rules.max_bytes).contains(&candidate.bytes) {
            return Err(Refusal::Size);
        }
        if candidate.hits < rules.hits && free < rules.free {
            return Err(Refusal::Hits);
        }
        if rules.wear_bytes > 0 {
            let (most, past) = (rules.wear_bytes as f64, now_ns.saturating_sub(self.at_ns));
            self.saved_bytes = (self.saved_bytes + most * past as f64 / DAY_NS).min(most);
            self.at_ns = self.at_ns.max(now_ns);
            if candidate.bytes as f64 > self.saved_bytes {
                return Err(Refusal::Wear);
            }
            self.saved_bytes -= candidate.bytes as f64;
        }
        Ok(())
    }

    /// Number and bytes of admitted candidates.
    pub fn admitted(&self) -> (u64, u64) {
        (self.admitted, self.admitted_bytes)
    }

    /// Number of rejected candidates, in the order of [`REFUSALS`].
    pub fn refused(&self) -> [u64; REFUSALS.len()] {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_refuses_and_is_counted() {
        let spec = "select(hits=2, priority=1, min_bytes=4KiB, max_bytes=1MiB, free=10%)";
        let mut admission = Admission::open(spec, 0).unwrap();
        let good = Candidate { bytes: 8192, hits: 2, priority: 1 };
        let mut admit = |candidate: Candidate, free| admission.admit(&candidate, free, 5);
        assert_eq!(admit(good, 0.0), Ok(()));
        assert_eq!(admit(Candidate { hits: 1, ..good }, 0.0), Err(Refusal::Hits));
        assert_eq!(admit(Candidate { hits: 0, ..good }, 0.5), Ok(()), "there is room");
        assert_eq!(admit(Candidate { priority: 0, ..good }, 0.5), Err(Refusal::Priority));
        assert_eq!(admit(Candidate { bytes: 4095, ..good }, 0.5), Err(Refusal::Size));
        assert_eq!(admit(Candidate { bytes: (1 << 20) + 1, ..good }, 0.5), Err(Refusal::Size));
        assert_eq!(admission.admitted(), (2, 16_384));
        assert_eq!(admission.refused(), [0, 1, 1, 2, 0]);
    }

    #[test]
    fn the_write_budget_accumulates_for_one_day() {
        let mut admission = Admission::open("select(hits=0, wear=24MiB)", 0).unwrap();
        let candidate = Candidate { bytes: 1 << 20, ..Candidate::default() };
        let mut day = |now_ns: u64| {
            (0..100).filter(|_| admission.admit(&candidate, 0.0, now_ns).is_ok()).count()
        };
        let hour_ns = 3_600_000_000_000;
        assert_eq!(day(0), 24);
        assert_eq!(day(hour_ns), 1);
        assert_eq!(day(3 * hour_ns), 2);
        assert_eq!(day(1000 * hour_ns), 24, "not more than a day's");
        assert_eq!(day(5), 0, "a clock that runs backwards adds nothing");
    }

    #[test]
    fn all_and_none_decide_alike_and_invalid_specs_are_rejected() {
        let candidate = Candidate::default();
        assert!(Admission::open("all", 0).unwrap().admit(&candidate, 0.0, 0).is_ok());
        let never = Admission::open("none", 0).unwrap().admit(&candidate, 1.0, 0);
        assert_eq!(never, Err(Refusal::Never));
        assert!(Admission::open("selct", 0).err().unwrap().message().contains("select"));
        for bad in ["all(hits=1)", "select(hit=1)", "select(free=2)", "select(priority=3)"] {
            assert!(Admission::open(bad, 0).is_err(), "{bad}");
        }
    }
}
