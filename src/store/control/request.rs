//! Requests of the control socket, parsed by the grammar of spec strings.

use crate::base::budget::Tier;
use crate::base::spec::{Reader, Spec, Value};
use crate::base::status::Result;
use crate::fail;
use crate::store::state::shadow::{MAX_POLICIES, MAX_SECONDS};
use crate::store::state::snapshot::{MOST_CHUNKS, MOST_EVICTIONS, MOST_SESSIONS};
use crate::store::state::transfer::MOST_ENDED;

/// Names of requests.
const NAMES: [&str; 11] = [
    "stats",
    "metrics",
    "sessions",
    "residency",
    "evictions",
    "transfers",
    "set-policy",
    "budget",
    "ab",
    "ab-read",
    "ab-end",
];

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Statistics of the store.
    Stats,
    /// The same as Prometheus text.
    Metrics,
    /// Open sessions.
    Sessions {
        /// Most sessions.
        most: usize,
    },
    /// Residency of a session's cells.
    ChunkTable {
        /// Its number; None = the latest session.
        session: Option<u32>,
        /// First chunk.
        first: u64,
        /// Most chunks.
        chunks: usize,
    },
    /// Recent evictions.
    Evictions {
        /// Only evictions from this tier; None = all.
        tier: Option<Tier>,
        /// Most evictions.
        tail: usize,
    },
    /// Ended transfers.
    Transfers {
        /// Number of the first.
        from: u64,
        /// Most transfers.
        most: usize,
    },
    /// Switches a policy.
    SetPolicy {
        /// Tier.
        tier: Tier,
        /// Spec of the policy.
        policy: String,
    },
    /// Limits of the tiers, after changing those that are given.
    Budget {
        /// Limit of cells in host memory, in bytes.
        host: Option<u64>,
        /// Limit of the disk, in bytes.
        disk: Option<u64>,
    },
    /// Begins a shadow evaluation.
    Ab {
        /// Tier.
        tier: Tier,
        /// Policies.
        policies: Vec<Spec>,
        /// Duration.
        seconds: u64,
    },
    /// Reads the scores of a shadow evaluation.
    AbRead {
        /// Tier.
        tier: Tier,
    },
    /// Ends a shadow evaluation.
    AbEnd {
        /// Tier.
        tier: Tier,
    },
}

impl Request {
    /// Parses a request.
    pub fn parse(line: &str) -> Result<Request> {
        let spec = Spec::parse(line)?;
        let mut reader = Reader::new(&spec);
        let request = match spec.name.as_str() {
            "stats" => Request::Stats,
            "metrics" => Request::Metrics,
            "sessions" => {
                Request::Sessions { most: count(&mut reader, "most", 64, MOST_SESSIONS)? }
            }
            "residency" => Request::ChunkTable {
                session: if_present(
                    &spec,
                    "session",
                    reader.u64("session", 0, 0..=u32::MAX.into())?,
                )
                .map(|number| number as u32),
                first: reader.u64("first", 0, 0..=1 << 40)?,
                chunks: count(&mut reader, "chunks", 64, MOST_CHUNKS)?,
            },
            "evictions" => Request::Evictions {
                tier: tier(&mut reader)?,
                tail: count(&mut reader, "tail", 20, MOST_EVICTIONS)?,
            },
            "transfers" => Request::Transfers {
                from: reader.u64("from", 0, 0..=u64::MAX)?,
                most: count(&mut reader, "most", 1000, MOST_ENDED)?,
            },
            "set-policy" => {
                let Some(policy) = reader.spec("policy")? else {
                    fail!(Spec, "set-policy needs policy=...");
                };
                let tier = tier(&mut reader)?.unwrap_or(Tier::Host);
                Request::SetPolicy { tier, policy: policy.to_string() }
            }
            "budget" => Request::Budget {
                host: if_present(&spec, "host", reader.bytes("host", 0)?),
                disk: if_present(&spec, "disk", reader.bytes("disk", 0)?),
            },
            "ab" => {
                let policies = policies(&mut reader)?;
                let tier = tier(&mut reader)?.unwrap_or(Tier::Host);
                Request::Ab { tier, policies, seconds: reader.u64("seconds", 60, 1..=MAX_SECONDS)? }
            }
            "ab-read" => Request::AbRead { tier: tier(&mut reader)?.unwrap_or(Tier::Host) },
            "ab-end" => Request::AbEnd { tier: tier(&mut reader)?.unwrap_or(Tier::Host) },
            _ => return Err(spec.unknown_name(&NAMES)),
        };
        reader.finish()?;
        Ok(request)
    }
}

/// `value` if its parameter was given.
fn if_present<T>(spec: &Spec, key: &str, value: T) -> Option<T> {
    spec.args.iter().any(|arg| arg.key == key).then_some(value)
}

fn count(reader: &mut Reader, key: &'static str, usual: u64, most: usize) -> Result<usize> {
    Ok(reader.u64(key, usual, 1..=most as u64)? as usize)
}

fn tier(reader: &mut Reader) -> Result<Option<Tier>> {
    Ok(match reader.choice("tier", &["host", "disk", "device"])? {
        Some(0) => Some(Tier::Host),
        Some(1) => Some(Tier::Disk),
        Some(_) => Some(Tier::Device),
        None => None,
    })
}

fn policies(reader: &mut Reader) -> Result<Vec<Spec>> {
    const SHAPE: &str = "policies=any(...): a list of policies, such as any(lru,arc)";
    let Some(list) = reader.spec("policies")?.filter(|list| list.name == "any") else {
        fail!(Spec, "ab needs {SHAPE}");
    };
    let mut specs = Vec::new();
    for arg in &list.args {
        match &arg.value {
            Value::Spec(spec) if arg.key.is_empty() => specs.push(spec.clone()),
            _ => fail!(Spec, "'policies' at offset {} takes {SHAPE}", arg.offset),
        }
    }
    if specs.is_empty() || specs.len() > MAX_POLICIES {
        fail!(Limit, "{} policies: compare 1 to {MAX_POLICIES}", specs.len());
    }
    Ok(specs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_are_parsed() {
        for (line, expected) in [
            ("stats", Request::Stats),
            (" stats ( ) ", Request::Stats),
            ("sessions(most=3)", Request::Sessions { most: 3 }),
            ("residency", Request::ChunkTable { session: None, first: 0, chunks: 64 }),
            (
                "residency(session=0,first=9)",
                Request::ChunkTable { session: Some(0), first: 9, chunks: 64 },
            ),
            ("evictions(tail=7)", Request::Evictions { tier: None, tail: 7 }),
            ("transfers(from=9)", Request::Transfers { from: 9, most: 1000 }),
            (
                "set-policy(policy=qos(inner=lru),tier=disk)",
                Request::SetPolicy { tier: Tier::Disk, policy: "qos(inner=lru)".into() },
            ),
            ("budget", Request::Budget { host: None, disk: None }),
            ("budget(host=2GiB)", Request::Budget { host: Some(2 << 30), disk: None }),
            ("ab-end(tier=disk)", Request::AbEnd { tier: Tier::Disk }),
        ] {
            assert_eq!(Request::parse(line), Ok(expected), "{line}");
        }
        let ab = Request::parse("ab(policies=any(lru,slru(segments=3)),seconds=5)").expect("one");
        let Request::Ab { tier: Tier::Host, policies, seconds: 5 } = ab else { panic!("{ab:?}") };
        let message: Vec<String> = policies.iter().map(Spec::to_string).collect();
        assert_eq!(message, ["lru", "slru(segments=3)"]);
    }

    #[test]
    fn errors_name_the_nearest_name_and_the_accepted_range() {
        for (line, expected) in [
            ("", "a name"),
            ("stat", "stats"),
            ("residency(sesion=1)", "session"),
            ("residency(session=5000000000)", "0 to 4294967295"),
            ("residency(chunks=0)", "1 to 1024"),
            ("evictions(tail=1000000)", "4096"),
            ("evictions(tier=hots)", "host"),
            ("transfers(from=-1)", "from"),
            ("transfers(most=5000)", "4096"),
            ("set-policy", "policy="),
            ("budget(host=2Gib)", "GiB"),
            ("ab(policies=lru)", "any(lru,arc)"),
            ("ab(policies=any(3))", "any(lru,arc)"),
            ("ab(policies=any(lru),seconds=0)", "1 to 86400"),
            ("ab", "policies="),
            ("stats()x", "offset 7"),
        ] {
            let error = Request::parse(line).expect_err(line);
            assert!(error.message().contains(expected), "{line}: {error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(line in "[ -~]{0,80}") {
            let _ = Request::parse(&line);
        }
    }
}
