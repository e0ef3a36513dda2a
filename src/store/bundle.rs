//! The spec of a store that has a runtime and a budget of its own: `store(...)`, or
//!
//! `kvtier(workers=4, name="kvt", budget=budget(host=8GiB), store=store(...))`
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `workers` | 0 | worker threads, at most 256; 0 = the number of cores, at most 4 |
//! | `max_ops` | 65536 | most ops that are not freed, at most 524288 |
//! | `name` | `kvt` | prefix of thread names, at most 10 bytes |
//! | `budget` | the machine's | limits of all tiers, see below |
//! | `store` | `store()` | the store |
//!
//! | parameter of `budget` | default | meaning |
//! |---|---|---|
//! | `host` | half of what the process may still use | limit of the host tier |
//! | `device`, `remote` | 0 | limits of the device tier and of the remote tier |
//! | `disk` | none | limit of the disk tier |
//! | `pinned` | what the process may still lock | limit of locked memory |
//! | `reserve` | an eighth of the available memory, at most 512 MiB | memory left to the rest of the process |
//! | `strict` | false | fail if a limit exceeds what the machine has, instead of lowering it |

use crate::base::budget::{BudgetOpts, TIERS, Tier};
use crate::base::runtime::RuntimeOpts;
use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;
use crate::store::spec::StoreSpec;

/// A store with its runtime and its budget.
pub struct Bundle {
    /// The runtime.
    pub runtime: RuntimeOpts,
    /// The budget; `None` = the store's private one.
    pub budget: Option<BudgetOpts>,
    /// The store.
    pub store: StoreSpec,
}

impl Bundle {
    /// Parses a spec; an empty one has all defaults.
    pub fn parse(text: &str) -> Result<Bundle> {
        let text = if text.trim().is_empty() { "store()" } else { text };
        let spec = Spec::parse(text)?;
        match spec.name.as_str() {
            "store" => Ok(Bundle {
                runtime: RuntimeOpts::default(),
                budget: None,
                store: StoreSpec::read(&spec)?,
            }),
            "kvtier" => Bundle::read(&spec),
            _ => Err(spec.unknown_name(&["store", "kvtier"])),
        }
    }

    fn read(spec: &Spec) -> Result<Bundle> {
        let mut reader = Reader::new(spec);
        let runtime = RuntimeOpts {
            workers: reader.u64("workers", 0, 0..=256)? as u32,
            max_ops: reader.u64("max_ops", 0, 0..=524_288)? as u32,
            name: reader.text("name")?.unwrap_or_default().to_string(),
            ..RuntimeOpts::default()
        };
        let budget = reader.spec("budget")?.map(read_budget).transpose()?;
        let store = match reader.spec("store")? {
            Some(store) => StoreSpec::read(store)?,
            None => StoreSpec::parse("")?,
        };
        reader.finish()?;
        Ok(Bundle { runtime, budget, store })
    }
}

fn read_budget(spec: &Spec) -> Result<BudgetOpts> {
    if spec.name != "budget" {
        return Err(spec.unknown_name(&["budget"]));
    }
    let mut reader = Reader::new(spec);
    // No parameter reaches this value: it stands for an absent one.
    let absent = u64::MAX;
    let mut limits = [None; TIERS];
    for (tier, key, otherwise) in [
        (Tier::Device, "device", Some(0)),
        (Tier::Host, "host", None),
        (Tier::Disk, "disk", Some(0)),
        (Tier::Remote, "remote", Some(0)),
        (Tier::Pinned, "pinned", None),
    ] {
        let bytes = reader.bytes(key, absent)?;
        limits[tier as usize] = if bytes == absent { otherwise } else { Some(bytes) };
    }
    let reserve = reader.bytes("reserve", absent)?;
    let strict = reader.bool("strict", false)?;
    reader.finish()?;
    Ok(BudgetOpts { limits, reserve_bytes: (reserve != absent).then_some(reserve), strict })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_alone_has_the_defaults_of_runtime_and_budget() {
        for text in ["", "store()", "store(host=2MiB)"] {
            let bundle = Bundle::parse(text).unwrap();
            assert_eq!((bundle.runtime.workers, bundle.budget.is_none()), (0, true), "{text}");
        }
    }

    #[test]
    fn every_parameter_is_read() {
        let text = "kvtier(workers=3,max_ops=99,name=\"abc\",store=store(host=2MiB),\
                    budget=budget(host=0,disk=5KiB,reserve=7,strict=true))";
        let bundle = Bundle::parse(text).unwrap();
        let runtime = &bundle.runtime;
        assert_eq!((runtime.workers, runtime.max_ops, runtime.name.as_str()), (3, 99, "abc"));
        let budget = bundle.budget.unwrap();
        assert_eq!(budget.limits, [Some(0), Some(0), Some(5120), Some(0), None]);
        assert_eq!((budget.reserve_bytes, budget.strict), (Some(7), true));
        assert_eq!(bundle.store.config.host_bytes, 2 << 20);
    }

    #[test]
    fn unknown_names_and_parameters_are_refused() {
        for text in ["stor()", "kvtier(worker=3)", "kvtier(budget=store())", "kvtier(workers=257)"]
        {
            assert!(Bundle::parse(text).is_err(), "{text}");
        }
    }
}
