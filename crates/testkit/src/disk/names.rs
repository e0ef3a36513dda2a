//! Names of a simulated directory, and which changes survive.

use std::collections::{BTreeMap, BTreeSet};

use kvtier::base::random::Random;
use kvtier::base::status::{Result, Status};
use kvtier::fail;

/// Files by name.
pub type Map = BTreeMap<String, u64>;

enum Change {
    Create(String, u64),
    Rename(String, String),
    Remove(String),
}

impl Change {
    fn apply(&self, map: &mut Map) {
        match self {
            Change::Create(name, inode) => {
                map.insert(name.clone(), *inode);
            }
            Change::Rename(from, to) => {
                if let Some(inode) = map.remove(from) {
                    map.insert(to.clone(), inode);
                }
            }
            Change::Remove(name) => {
                map.remove(name);
            }
        }
    }

    fn names(&self) -> [&String; 2] {
        match self {
            Change::Create(name, _) | Change::Remove(name) => [name, name],
            Change::Rename(from, to) => [from, to],
        }
    }
}

/// A directory.
#[derive(Default)]
pub struct Names {
    now: Map,
    durable: Map,
    /// Changes since the last sync, in order.
    changes: Vec<Change>,
}

impl Names {
    /// Names that a caller sees.
    pub fn now(&self) -> &Map {
        &self.now
    }

    /// Names that survive a power failure.
    pub fn durable(&self) -> &Map {
        &self.durable
    }

    /// The file of a name.
    pub fn find(&self, name: &str) -> Result<u64> {
        match self.now.get(name) {
            Some(inode) => Ok(*inode),
            None => fail!(NotFound, "{name}: no such file"),
        }
    }

    /// Whether a name, now or after a power failure, may refer to a file.
    pub fn may_lead_to(&self, inode: u64) -> bool {
        let created = |c: &Change| matches!(c, Change::Create(_, made) if *made == inode);
        self.now.values().chain(self.durable.values()).any(|known| *known == inode)
            || self.changes.iter().any(created)
    }

    fn change(&mut self, change: Change) -> Result<()> {
        self.changes.try_reserve(1).map_err(|_| Status::NoMem)?;
        change.apply(&mut self.now);
        self.changes.push(change);
        Ok(())
    }

    /// Adds a new name.
    pub fn create(&mut self, name: &str, inode: u64) -> Result<()> {
        if self.now.contains_key(name) {
            fail!(State, "{name} exists already");
        }
        self.change(Change::Create(name.to_string(), inode))
    }

    /// Renames a file, and replaces an existing name.
    pub fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.find(from)?;
        if from == to {
            return Ok(());
        }
        self.change(Change::Rename(from.to_string(), to.to_string()))
    }

    /// Removes a name.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        self.find(name)?;
        self.change(Change::Remove(name.to_string()))
    }

    /// Makes all changes durable.
    pub fn sync(&mut self) {
        self.changes.clear();
        self.durable = self.now.clone();
    }

    /// A power failure: any changes survive, but none without the earlier changes of the same name.
    pub fn crash(&mut self, random: &mut Random) {
        let mut undone: BTreeSet<String> = BTreeSet::new();
        let often = match random.below(8) {
            0 => 0,
            1 => 1_000_000,
            _ => random.below(1_000_001) as u32,
        };
        for change in self.changes.drain(..) {
            let held = change.names().into_iter().any(|name| undone.contains(name));
            if !held && random.chance(often) {
                change.apply(&mut self.durable);
            } else {
                undone.extend(change.names().map(String::clone));
            }
        }
        self.now = self.durable.clone();
    }
}
