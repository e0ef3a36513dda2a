//! All policies by name. A new policy is one file and one entry here.

use crate::base::spec::describe::{self, Description, Param};
use crate::base::spec::{Reader, Spec};
use crate::base::status::{Error, Result, Status};
use crate::meta::cost::Cost;
use crate::policy::Policy;
use crate::policy::horizon::Horizon;
use crate::policy::shadow::Auto;
use crate::policy::{arc::Arc, belady::Belady, s3fifo::S3Fifo, sieve::Sieve, slru::Slru};
use crate::policy::{fifo::Fifo, gdsf::Gdsf, lfu::Lfu, lru::Lru, lru_k::LruK, tlru::Tlru};
use crate::policy::{
    horizon, lfu, lru_k, pensieve, predictive, qos, s3fifo, shadow, slru, tlru, two_q, wtinylfu,
};
use crate::policy::{pensieve::Pensieve, predictive::Predictive, qos::Qos};
use crate::policy::{two_q::TwoQ, wtinylfu::WTinyLfu};

/// Parameters of a table, for the policies that need them at creation.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Most objects at once.
    pub max_objects: usize,
    /// Capacity in units; 0 = unknown.
    pub capacity_units: u64,
    /// The engine can use KV behind a hole.
    pub holes: bool,
}

type Make = fn(&mut Reader, &Setting) -> Result<Box<dyn Policy>>;

/// A policy.
pub struct Entry {
    /// Name in specs.
    pub name: &'static str,
    /// Further names.
    pub aliases: &'static [&'static str],
    /// Description of one line.
    pub about: &'static str,
    /// Tables of its parameters.
    pub params: &'static [&'static [Param]],
    make: Make,
}

fn boxed<P: Policy + 'static>(made: Result<P>) -> Result<Box<dyn Policy>> {
    made.map(|policy| Box::new(policy) as Box<dyn Policy>)
}

/// All policies, ordered by name.
pub const ENTRIES: &[Entry] = &[
    Entry {
        name: "2q",
        aliases: &[],
        about: "FIFO queue for new objects, LRU for those that return",
        params: &[two_q::PARAMS],
        make: |r, s| boxed(TwoQ::read(r, s)),
    },
    Entry {
        name: "arc",
        aliases: &[],
        about: "recency and frequency, balanced by misses on ghosts",
        params: &[],
        make: |r, s| boxed(Arc::read(r, s)),
    },
    Entry {
        name: "auto",
        aliases: &[],
        about: "shadow evaluation of several policies; the best one is live",
        params: &[shadow::PARAMS],
        make: |r, s| boxed(Auto::read(r, s)),
    },
    Entry {
        name: "belady",
        aliases: &[],
        about: "evicts the farthest next use; needs to know the future",
        params: &[],
        make: |r, s| boxed(Belady::read(r, s)),
    },
    Entry {
        name: "custom",
        aliases: &[],
        about: "the caller's scores decide; the lowest is evicted first",
        params: &[],
        make: |r, _| boxed(Lru::read_custom(r)),
    },
    Entry {
        name: "fifo",
        aliases: &[],
        about: "evicts in the order of insertion",
        params: &[],
        make: |r, _| boxed(Fifo::read(r)),
    },
    Entry {
        name: "gdsf",
        aliases: &[],
        about: "evicts the lowest uses times cost by size, with ageing",
        params: &[Cost::PARAMS],
        make: |r, s| boxed(Gdsf::read(r, s)),
    },
    Entry {
        name: "horizon",
        aliases: &[],
        about: "evicts what earns least for the memory it takes; learns online",
        params: &[horizon::PARAMS, Cost::PARAMS],
        make: |r, s| boxed(Horizon::read(r, s)),
    },
    Entry {
        name: "lfu",
        aliases: &[],
        about: "evicts the least frequently used, with ageing",
        params: &[lfu::PARAMS],
        make: |r, s| boxed(Lfu::read(r, s)),
    },
    Entry {
        name: "lru",
        aliases: &[],
        about: "evicts the least recently used",
        params: &[],
        make: |r, _| boxed(Lru::read(r)),
    },
    Entry {
        name: "lru-k",
        aliases: &[],
        about: "evicts the oldest k-th last use",
        params: &[lru_k::PARAMS],
        make: |r, s| boxed(LruK::read(r, s)),
    },
    Entry {
        name: "pensieve",
        aliases: &[],
        about: "evicts the lowest recompute cost by time since the last use",
        params: &[pensieve::PARAMS],
        make: |r, s| boxed(Pensieve::read(r, s)),
    },
    Entry {
        name: "predictive",
        aliases: &[],
        about: "evicts the farthest expected next use",
        params: &[predictive::PARAMS],
        make: |r, s| boxed(Predictive::read(r, s)),
    },
    Entry {
        name: "qos",
        aliases: &["qos_aware"],
        about: "evicts low classes first, with ageing and floors for tenants",
        params: &[qos::PARAMS],
        make: |r, s| boxed(Qos::read(r, s)),
    },
    Entry {
        name: "s3fifo",
        aliases: &[],
        about: "small queue for new objects, main queue for used ones",
        params: &[s3fifo::PARAMS],
        make: |r, s| boxed(S3Fifo::read(r, s)),
    },
    Entry {
        name: "sieve",
        aliases: &[],
        about: "a hand skips objects used since its last pass",
        params: &[],
        make: |r, _| boxed(Sieve::read(r)),
    },
    Entry {
        name: "slru",
        aliases: &[],
        about: "segments by use, each by last use",
        params: &[slru::PARAMS],
        make: |r, s| boxed(Slru::read(r, s)),
    },
    Entry {
        name: "tlru",
        aliases: &[],
        about: "evicts first what a session's next turn can do without",
        params: &[tlru::PARAMS],
        make: |r, _| boxed(Tlru::read(r)),
    },
    Entry {
        name: "wtinylfu",
        aliases: &[],
        about: "window for new objects, then admission by frequency",
        params: &[wtinylfu::PARAMS],
        make: |r, s| boxed(WTinyLfu::read(r, s)),
    },
];

/// The entry with a name or alias.
pub fn find(name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|e| e.name == name || e.aliases.contains(&name))
}

/// Creates the policy that a spec describes.
pub fn make(spec: &Spec, setting: &Setting) -> Result<Box<dyn Policy>> {
    let Some(entry) = find(&spec.name) else {
        let known: Vec<&str> = ENTRIES.iter().map(|e| e.name).collect();
        return Err(spec.unknown_name(&known));
    };
    let mut reader = Reader::new(spec);
    let mut policy = (entry.make)(&mut reader, setting).map_err(|e| placed(e, spec))?;
    reader.finish()?;
    policy.set_capacity(setting.capacity_units);
    Ok(policy)
}

/// Adds the position of a spec to an error about the whole of it.
fn placed(error: Error, spec: &Spec) -> Error {
    let has_offset = error.detail().is_some_and(|detail| detail.offset.is_some());
    if has_offset || error.status() != Status::Spec {
        return error;
    }
    let text = format!("{}, in '{}' at offset {}", error.message(), spec.name, spec.offset);
    Error::at(Status::Spec, spec.offset, text)
}

/// All policies with their parameters, for the manual.
pub fn describe() -> Result<Vec<Description>> {
    // What varies with the setting needs words.
    let settings = [(8, 8), (9, 90)].map(|(max_objects, capacity_units)| Setting {
        max_objects,
        capacity_units,
        holes: false,
    });
    let mut out = Vec::new();
    for entry in ENTRIES {
        let spec = Spec::parse(entry.name)?;
        let mut recordings = Vec::new();
        for setting in &settings {
            let mut reader = Reader::recording(&spec);
            (entry.make)(&mut reader, setting)?;
            recordings.push(reader.recorded());
        }
        let rows = describe::rows(entry.name, entry.params, &recordings)?;
        let Entry { name, aliases, about, .. } = *entry;
        out.push(Description { name, aliases, about, rows });
    }
    Ok(out)
}

/// The number of a policy in logs: its index in the registry; u32::MAX = unknown.
pub fn number(name: &str) -> u32 {
    ENTRIES.iter().position(|e| e.name == name).map_or(u32::MAX, |at| at as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_is_described() {
        let all = describe().expect("complete tables");
        assert_eq!(all.len(), ENTRIES.len());
        assert!(all.iter().any(|one| one.rows.iter().any(|row| row.key == "history")));
    }

    #[test]
    fn spec_errors_name_the_offset() {
        let setting = Setting { max_objects: 8, capacity_units: 8, holes: false };
        for (text, offset) in [
            ("lur", 0),
            ("lru(k=1)", 4),
            ("slru(protected=1,segments=3)", 0),
            ("qos(inner=slru(protected=1,segments=3))", 10),
            ("qos(inner=qos)", 0),
            ("qos(inner=lru(x=1))", 14),
            ("auto(of=3)", 5),
            ("auto(of=any(lru))", 0),
            ("auto(of=any(lru,s3fif))", 16),
            ("auto(of=any(lru,custom))", 0),
            ("gdsf(alpha=x)", 5),
        ] {
            let error = make(&Spec::parse(text).expect("a spec"), &setting).err().expect(text);
            assert_eq!(error.detail().and_then(|d| d.offset), Some(offset), "{text}: {error}");
            assert!(error.message().contains(&format!("at offset {offset}")), "{text}: {error}");
        }
    }
}
