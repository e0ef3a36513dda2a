//! The spec of a store with its own runtime and budget: `store(...)`, or
//! `kvtier(workers=4, name="kvt", budget=budget(host=8GiB), store=store(...))`.

use crate::base::budget::{Budget, BudgetOpts, TIERS, Tier};
use crate::base::runtime::{Runtime, RuntimeOpts};
use crate::base::spec::describe::{Description, Param};
use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;
use crate::store::handle::Store;
use crate::store::spec::StoreSpec;

/// Parameters of `kvtier`.
const PARAMS: &[Param] = &[
    Param::new("workers", "worker threads; 0 = the number of cores, at most 4"),
    Param::new("max_ops", "most ops that are not freed; 0 = 65536"),
    Param::new("name", "prefix of thread names, at most 10 bytes").default_is("`kvt`"),
    Param::new("budget", "limits of all tiers: `budget(...)`")
        .default_is("one limited to the available memory, less a reserve"),
    Param::new("store", "the store: `store(...)`").default_is("`store`"),
];

/// Parameters of `budget`.
const BUDGET_PARAMS: &[Param] = &[
    Param::new("device", "limit of the device tier; 0 = no bytes").default_is("0"),
    Param::new("host", "limit of the host tier")
        .default_is("half of the memory that the process may still use"),
    Param::new("disk", "limit of the disk tier; 0 = no limit besides that of `disk(...)`")
        .default_is("0"),
    Param::new("remote", "limit of the remote tier; 0 = no bytes").default_is("0"),
    Param::new("pinned", "limit of locked memory")
        .default_is("the bytes that the process may still lock"),
    Param::new("reserve", "memory left to the rest of the process")
        .default_is("an eighth of the available memory, at most 512MiB"),
    Param::new(
        "strict",
        "`true`: fail if a limit exceeds the available memory. `false`: lower the limit to it",
    ),
];

/// Describes `kvtier(...)` and `budget(...)` by what their parsers read.
pub fn describe() -> Result<[Description; 2]> {
    let none = Spec::parse("none")?;
    let mut reader = Reader::recording(&none);
    Bundle::read_params(&mut reader)?;
    let all = reader.recorded();
    let mut reader = Reader::recording(&none);
    read_budget_params(&mut reader)?;
    Ok([
        Description::new("kvtier", "a store with its runtime and budget", PARAMS, all)?,
        Description::new("budget", "limits of the tiers", BUDGET_PARAMS, reader.recorded())?,
    ])
}

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

    /// Opens the runtime, the budget and the store.
    pub fn open(self) -> Result<(Runtime, Store)> {
        let runtime = Runtime::open(self.runtime)?;
        let core = runtime.core();
        let budget = self.budget.map(|budget| Budget::open(core, &budget)).transpose()?;
        let store = Store::open(core, budget.as_ref(), &self.store)?;
        Ok((runtime, store))
    }

    /// Reads `kvtier(...)`.
    pub fn read(spec: &Spec) -> Result<Bundle> {
        let mut reader = Reader::new(spec);
        let bundle = Bundle::read_params(&mut reader)?;
        reader.finish()?;
        Ok(bundle)
    }

    fn read_params(reader: &mut Reader) -> Result<Bundle> {
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
        Ok(Bundle { runtime, budget, store })
    }
}

fn read_budget(spec: &Spec) -> Result<BudgetOpts> {
    if spec.name != "budget" {
        return Err(spec.unknown_name(&["budget"]));
    }
    let mut reader = Reader::new(spec);
    let budget = read_budget_params(&mut reader)?;
    reader.finish()?;
    Ok(budget)
}

fn read_budget_params(reader: &mut Reader) -> Result<BudgetOpts> {
    // Stands for an absent parameter: no spec can give this value.
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
