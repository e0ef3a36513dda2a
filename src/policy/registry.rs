//! Every policy by name. A new one is a file and a line here.

use crate::base::spec::{Reader, Spec};
use crate::base::status::{Error, Result, Status};
use crate::policy::Policy;
use crate::policy::horizon::Horizon;
use crate::policy::shadow::Auto;
use crate::policy::{arc::Arc, belady::Belady, s3fifo::S3Fifo, sieve::Sieve, slru::Slru};
use crate::policy::{fifo::Fifo, gdsf::Gdsf, lfu::Lfu, lru::Lru, lru_k::LruK, tlru::Tlru};
use crate::policy::{pensieve::Pensieve, predictive::Predictive, qos::Qos};
use crate::policy::{two_q::TwoQ, wtinylfu::WTinyLfu};

/// What a policy may need to know when it is made.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Most objects at once.
    pub max_objects: usize,
    /// What fits, in units; 0 = not known.
    pub capacity_units: u64,
    /// The engine can use what lies behind a hole.
    pub holes: bool,
}

type Make = fn(&mut Reader, &Setting) -> Result<Box<dyn Policy>>;

/// One policy.
pub struct Entry {
    /// Its name in specs.
    pub name: &'static str,
    /// Other names that mean the same.
    pub aliases: &'static [&'static str],
    /// What it does, in a line.
    pub about: &'static str,
    make: Make,
}

fn boxed<P: Policy + 'static>(made: Result<P>) -> Result<Box<dyn Policy>> {
    made.map(|policy| Box::new(policy) as Box<dyn Policy>)
}

/// All of them, by name.
pub const ENTRIES: &[Entry] = &[
    Entry {
        name: "2q",
        aliases: &[],
        about: "newcomers in a queue, those that came back by last use",
        make: |r, s| boxed(TwoQ::read(r, s)),
    },
    Entry {
        name: "arc",
        aliases: &[],
        about: "recency and frequency, balanced by what was wanted again",
        make: |r, s| boxed(Arc::read(r, s)),
    },
    Entry {
        name: "auto",
        aliases: &[],
        about: "copies of several run beside the live one on metadata; the best takes over",
        make: |r, s| boxed(Auto::read(r, s)),
    },
    Entry {
        name: "belady",
        aliases: &[],
        about: "the one used again last leaves first; needs to be told the future",
        make: |r, s| boxed(Belady::read(r, s)),
    },
    Entry {
        name: "custom",
        aliases: &[],
        about: "the caller's own scores decide: the least leaves first",
        make: |r, _| boxed(Lru::read_custom(r)),
    },
    Entry {
        name: "fifo",
        aliases: &[],
        about: "the one that came first leaves first",
        make: |r, _| boxed(Fifo::read(r)),
    },
    Entry {
        name: "gdsf",
        aliases: &[],
        about: "the one with the least uses times cost by size leaves first, aged",
        make: |r, s| boxed(Gdsf::read(r, s)),
    },
    Entry {
        name: "horizon",
        aliases: &[],
        about: "what earns least for the memory it takes leaves first; learns while it runs",
        make: |r, s| boxed(Horizon::read(r, s)),
    },
    Entry {
        name: "lfu",
        aliases: &[],
        about: "the one used least leaves first; what was used long ago counts less",
        make: |r, s| boxed(Lfu::read(r, s)),
    },
    Entry {
        name: "lru",
        aliases: &[],
        about: "the one used longest ago leaves first",
        make: |r, _| boxed(Lru::read(r)),
    },
    Entry {
        name: "lru-k",
        aliases: &[],
        about: "the one whose k-th last use lies longest ago leaves first",
        make: |r, s| boxed(LruK::read(r, s)),
    },
    Entry {
        name: "pensieve",
        aliases: &[],
        about: "the one with the least recompute cost by time since its use leaves first",
        make: |r, s| boxed(Pensieve::read(r, s)),
    },
    Entry {
        name: "predictive",
        aliases: &[],
        about: "the one whose next use is expected farthest away leaves first",
        make: |r, s| boxed(Predictive::read(r, s)),
    },
    Entry {
        name: "qos",
        aliases: &["qos_aware"],
        about: "low classes leave first, with ageing and floors for tenants",
        make: |r, s| boxed(Qos::read(r, s)),
    },
    Entry {
        name: "s3fifo",
        aliases: &[],
        about: "newcomers in a small queue, those used in a main one",
        make: |r, s| boxed(S3Fifo::read(r, s)),
    },
    Entry {
        name: "sieve",
        aliases: &[],
        about: "a hand passes those used since it came by",
        make: |r, _| boxed(Sieve::read(r)),
    },
    Entry {
        name: "slru",
        aliases: &[],
        about: "segments by use, each by last use",
        make: |r, s| boxed(Slru::read(r, s)),
    },
    Entry {
        name: "tlru",
        aliases: &[],
        about: "what a session's next turn can do without leaves first",
        make: |r, _| boxed(Tlru::read(r)),
    },
    Entry {
        name: "wtinylfu",
        aliases: &[],
        about: "a window for newcomers, then a contest by frequency",
        make: |r, s| boxed(WTinyLfu::read(r, s)),
    },
];

/// The entry of a name or alias.
pub fn find(name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|e| e.name == name || e.aliases.contains(&name))
}

/// Makes the policy that a spec describes.
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

/// An error about the whole of a spec says where that stands.
fn placed(error: Error, spec: &Spec) -> Error {
    let told = error.detail().is_some_and(|detail| detail.offset.is_some());
    if told || error.status() != Status::Spec {
        return error;
    }
    let text = format!("{}, in '{}' at offset {}", error.message(), spec.name, spec.offset);
    Error::at(Status::Spec, spec.offset, text)
}

/// The number of a policy in logs: its place in the registry; u32::MAX of none.
pub fn number(name: &str) -> u32 {
    ENTRIES.iter().position(|e| e.name == name).map_or(u32::MAX, |at| at as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_made_says_where() {
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
