//! Every policy by name. A new one is a file and a line here.

use crate::base::spec::{Reader, Spec};
use crate::base::status::Result;
use crate::policy::Policy;
use crate::policy::{fifo::Fifo, lru::Lru};

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
        name: "fifo",
        aliases: &[],
        about: "the one that came first leaves first",
        make: |r, _| boxed(Fifo::read(r)),
    },
    Entry {
        name: "lru",
        aliases: &[],
        about: "the one used longest ago leaves first",
        make: |r, _| boxed(Lru::read(r)),
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
    let mut policy = (entry.make)(&mut reader, setting)?;
    reader.finish()?;
    policy.set_capacity(setting.capacity_units);
    Ok(policy)
}

/// The number of a policy in logs: its place in the registry; u32::MAX of none.
pub fn number(name: &str) -> u32 {
    ENTRIES.iter().position(|e| e.name == name).map_or(u32::MAX, |at| at as u32)
}
