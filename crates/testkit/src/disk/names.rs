//! The names of a simulated directory, and which of them would survive.

use std::collections::{BTreeMap, BTreeSet};

use kvtier::base::random::Random;
use kvtier::base::status::{Result, Status};
use kvtier::fail;

/// Names and the files they lead to.
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
    /// Since the last sync, in order.
    changes: Vec<Change>,
}

impl Names {
    /// What a caller sees.
    pub fn now(&self) -> &Map {
        &self.now
    }

    /// What a power failure cannot take.
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

    /// Whether any name, now or after a power failure, may lead to a file.
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

    /// Adds a name that must be new.
    pub fn create(&mut self, name: &str, inode: u64) -> Result<()> {
        if self.now.contains_key(name) {
            fail!(State, "{name} is there already");
        }
        self.change(Change::Create(name.to_string(), inode))
    }

    /// Gives a file another name, in place of what had that.
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

    /// Makes all durable.
    pub fn sync(&mut self) {
        self.changes.clear();
        self.durable = self.now.clone();
    }

    /// The power failed: any changes survive, but none without those before it
    /// that were about the same name.
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
