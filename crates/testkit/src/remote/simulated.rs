//! An in-memory remote with faults by plan and seed: requests are lost, answers are late, damaged
//! or swapped, objects vanish, and a failover loses acknowledged objects. Clients share one map,
//! so that several engines can share it. Requests advance a manual clock.

use std::collections::BTreeMap;

use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status;
use kvtier::base::sync::{Arc, Mutex};
use kvtier::tier::remote::{
    Caps, Client, Gets, Name, Part, Puts, Queries, Remote, RemoteError, Server,
};

/// A kind of fault of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is lost, without an answer.
    Lost = 0,
    /// It is executed, and the answer arrives after the deadline.
    Late = 1,
    /// A put is executed a second time, later.
    Duplicate = 2,
    /// The answer belongs to another item.
    Reorder = 3,
    /// A bit of an answer flips; every other time permanently.
    Flip = 4,
    /// An answer is truncated; every other time permanently.
    Truncate = 5,
    /// An answer is too long.
    Extend = 6,
    /// An existing object is reported as absent.
    Stale = 7,
    /// The object is lost.
    Forget = 8,
    /// A put finds no space.
    Full = 9,
    /// A put is rejected as read-only.
    ReadOnly = 10,
    /// Access is denied.
    Denied = 11,
    /// The remote is unreachable for [`Plan::down`] items.
    Down = 12,
    /// The last [`Plan::lag`] acknowledged objects are lost, and one request fails.
    Failover = 13,
}

/// Number of kinds.
pub const FAULTS: usize = 14;

/// Limit: duplicated puts that are outstanding.
const MAX_LATER: usize = 64;

/// How often faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Probability of each [`Fault`] for an item, in millionths.
    pub per_million: [u32; FAULTS],
    /// Items of an outage.
    pub down: u32,
    /// Acknowledged objects that a failover loses.
    pub lag: usize,
    /// Duration of a batch.
    pub batch_ns: u64,
    /// Duration of a KiB.
    pub kib_ns: u64,
    /// Capabilities.
    pub caps: Caps,
    /// Capacity; puts beyond it fail with [`RemoteError::Full`].
    pub most_bytes: u64,
}

impl Default for Plan {
    fn default() -> Plan {
        let caps = Caps {
            preferred_bytes: 1 << 20,
            max_bytes: 64 << 20,
            batch: 64,
            names: 256,
            ranges: true,
            first_wins: true,
            client_bytes: 0,
        };
        Plan {
            per_million: [0; FAULTS],
            down: 20,
            lag: 4,
            batch_ns: 200_000,
            kib_ns: 1_000,
            caps,
            most_bytes: u64::MAX,
        }
    }
}

impl Plan {
    /// Sets the probability of a fault.
    #[must_use]
    pub fn often(mut self, fault: Fault, per_million: u32) -> Plan {
        self.per_million[fault as usize] = per_million;
        self
    }

    /// Sets the probability of every fault.
    #[must_use]
    pub fn hostile(mut self, per_million: u32) -> Plan {
        self.per_million = [per_million; FAULTS];
        self
    }
}

struct World {
    plan: Plan,
    random: Random,
    objects: BTreeMap<Name, Vec<u8>>,
    bytes: u64,
    /// The last acknowledged objects, newest last.
    acknowledged: Vec<Name>,
    /// Acknowledged objects that were lost.
    lost: Vec<Name>,
    /// Puts that will be repeated.
    later: Vec<(Name, Vec<u8>)>,
    /// Remaining items of an outage.
    outage_items: u32,
    struck: [u64; FAULTS],
}

/// The simulated remote. Clones share the content.
#[derive(Clone)]
pub struct Simulated {
    world: Arc<Mutex<World>>,
    clock: Clock,
}

impl Simulated {
    /// An empty remote. The seed and the order of requests determine everything.
    pub fn new(seed: u64, plan: Plan, clock: Clock) -> Simulated {
        let world = World {
            plan,
            random: Random::new(seed),
            objects: BTreeMap::new(),
            bytes: 0,
            acknowledged: Vec::new(),
            lost: Vec::new(),
            later: Vec::new(),
            outage_items: 0,
            struck: [0; FAULTS],
        };
        Simulated { world: Arc::new(Mutex::new(world)), clock }
    }

    /// Replaces the plan.
    pub fn set_plan(&self, plan: Plan) {
        self.world.lock().plan = plan;
    }

    /// Content of an object, without faults.
    pub fn object(&self, name: &Name) -> Option<Vec<u8>> {
        self.world.lock().objects.get(name).cloned()
    }

    /// Names of all objects.
    pub fn names(&self) -> Vec<Name> {
        self.world.lock().objects.keys().copied().collect()
    }

    /// Stores an object, without faults.
    pub fn plant(&self, name: Name, bytes: Vec<u8>) {
        self.world.lock().store(name, bytes);
    }

    /// Returns and resets the list of lost acknowledged objects.
    pub fn take_lost(&self) -> Vec<Name> {
        std::mem::take(&mut self.world.lock().lost)
    }

    /// How often a fault happened.
    pub fn struck(&self, fault: Fault) -> u64 {
        self.world.lock().struck[fault as usize]
    }
}

impl Remote for Simulated {
    fn caps(&self) -> Caps {
        self.world.lock().plan.caps
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(SimulatedLane { remote: self.clone() })
    }
}

impl World {
    fn strikes(&mut self, fault: Fault) -> bool {
        let often = self.plan.per_million[fault as usize];
        let strikes = often > 0 && self.random.chance(often);
        self.struck[fault as usize] += u64::from(strikes);
        strikes
    }

    fn store(&mut self, name: Name, bytes: Vec<u8>) {
        self.bytes += bytes.len() as u64;
        if let Some(old) = self.objects.insert(name, bytes) {
            self.bytes -= old.len() as u64;
        }
    }

    fn drop_object(&mut self, name: &Name) {
        if let Some(old) = self.objects.remove(name) {
            self.bytes -= old.len() as u64;
        }
    }

    /// Faults before a request is executed. Late is not among them: the request is executed then.
    fn before(&mut self, name: &Name) -> Result<(), RemoteError> {
        if self.strikes(Fault::Down) {
            self.outage_items = self.plan.down;
        }
        if self.strikes(Fault::Failover) {
            let keep = self.acknowledged.len().saturating_sub(self.plan.lag);
            for name in self.acknowledged.split_off(keep) {
                if self.objects.contains_key(&name) {
                    self.drop_object(&name);
                    self.lost.push(name);
                }
            }
            return Err(RemoteError::Unreachable);
        }
        if self.outage_items > 0 {
            self.outage_items -= 1;
            return Err(RemoteError::Unreachable);
        }
        if self.strikes(Fault::Lost) {
            return Err(RemoteError::Timeout);
        }
        if self.strikes(Fault::Denied) {
            return Err(RemoteError::Denied);
        }
        if self.strikes(Fault::Forget) {
            self.drop_object(name);
        }
        Ok(())
    }

    /// Repeats duplicated puts between other requests.
    fn deliver_later(&mut self) {
        while !self.later.is_empty() && self.random.coin() {
            let at = self.random.below(self.later.len() as u64) as usize;
            let (name, bytes) = self.later.swap_remove(at);
            if !self.plan.caps.first_wins || !self.objects.contains_key(&name) {
                self.store(name, bytes);
            }
        }
    }

    fn put(&mut self, name: &Name, bytes: Vec<u8>) -> Result<bool, RemoteError> {
        self.before(name)?;
        let room = self.plan.most_bytes.saturating_sub(self.bytes);
        if bytes.len() as u64 > self.plan.caps.max_bytes {
            return Err(RemoteError::TooLong);
        }
        if self.strikes(Fault::Full) || bytes.len() as u64 > room {
            return Err(RemoteError::Full);
        }
        if self.strikes(Fault::ReadOnly) {
            return Err(RemoteError::ReadOnly);
        }
        let is_there = self.plan.caps.first_wins && self.objects.contains_key(name);
        if self.strikes(Fault::Duplicate) && self.later.len() < MAX_LATER {
            self.later.push((*name, bytes.clone()));
        }
        if !is_there {
            self.store(*name, bytes);
        }
        if self.strikes(Fault::Late) {
            return Err(RemoteError::Timeout);
        }
        if !is_there {
            self.acknowledged.push(*name);
            let old = self.acknowledged.len().saturating_sub(self.plan.lag.max(1) * 4);
            self.acknowledged.drain(..old);
        }
        Ok(is_there)
    }

    /// The answer to a request for an object.
    fn answer(&mut self, name: &Name) -> Result<Vec<u8>, RemoteError> {
        self.before(name)?;
        if self.strikes(Fault::Late) {
            return Err(RemoteError::Timeout);
        }
        if self.strikes(Fault::Stale) {
            return Err(RemoteError::Absent);
        }
        let mut bytes = self.objects.get(name).ok_or(RemoteError::Absent)?.clone();
        let mut for_good = false;
        if !bytes.is_empty() && self.strikes(Fault::Flip) {
            let bit = self.random.below(bytes.len() as u64 * 8);
            bytes[bit as usize / 8] ^= 1 << (bit % 8);
            for_good |= self.random.coin();
        }
        if self.strikes(Fault::Truncate) {
            bytes.truncate(self.random.below(bytes.len() as u64) as usize);
            for_good |= self.random.coin();
        }
        if for_good {
            self.store(*name, bytes.clone());
        }
        if self.strikes(Fault::Extend) {
            let more = 1 + self.random.below(5000) as usize;
            let from = self.random.draw() as u8;
            bytes.extend(std::iter::repeat_n(from, more));
        }
        Ok(bytes)
    }
}

struct SimulatedLane {
    remote: Simulated,
}

impl SimulatedLane {
    /// Executes a batch item by item until its deadline; each item reports its bytes. Late answers
    /// fail.
    fn each<T>(
        &self,
        names: &[Name],
        deadline_ns: u64,
        mut item: impl FnMut(&mut World, usize, &Name) -> (Result<T, RemoteError>, u64),
    ) -> Vec<Result<T, RemoteError>> {
        let mut world = self.remote.world.lock();
        let clock = &self.remote.clock;
        if clock.now_ns() < deadline_ns && !names.is_empty() {
            clock.advance(world.plan.batch_ns);
        }
        let mut results = Vec::with_capacity(names.len());
        for (at, name) in names.iter().enumerate() {
            if clock.now_ns() >= deadline_ns {
                results.push(Err(RemoteError::Timeout));
                continue;
            }
            world.deliver_later();
            let (result, bytes) = item(&mut world, at, name);
            clock.advance(bytes.div_ceil(1024).saturating_mul(world.plan.kib_ns));
            let now = clock.now_ns();
            let late = matches!(result, Err(RemoteError::Timeout)) || now > deadline_ns;
            if late {
                clock.advance(deadline_ns.saturating_sub(now));
            }
            results.push(if late { Err(RemoteError::Timeout) } else { result });
        }
        results
    }

    /// Swaps answers between items.
    fn mix_up<T>(&self, results: &mut [Result<T, RemoteError>]) {
        let mut world = self.remote.world.lock();
        for at in 1..results.len() {
            if world.strikes(Fault::Reorder) {
                let other = world.random.below(at as u64) as usize;
                results.swap(at, other);
            }
        }
    }
}

impl Client for SimulatedLane {
    fn greet(&mut self, deadline_ns: u64) -> status::Result<Server> {
        let dummy = [Name { tenant: 0, hash: [0; 20] }];
        let done = self.each(&dummy, deadline_ns, |world, _, name| (world.before(name), 0));
        done.into_iter().collect::<Result<Vec<()>, RemoteError>>()?;
        Ok(Server { words: "simulated".to_string(), warnings: Vec::new() })
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        let names: Vec<Name> = gets.items.iter().map(|item| item.name).collect();
        let mut answers = self.each(&names, deadline_ns, |world, at, name| {
            let answer = world.answer(name);
            let bytes = gets.room_of(at).min(answer.as_ref().map_or(0, |b| b.len() as u64));
            (answer, bytes)
        });
        self.mix_up(&mut answers);
        for (at, answer) in answers.into_iter().enumerate() {
            let offset = usize::try_from(gets.items[at].offset).unwrap_or(usize::MAX);
            let result = match answer {
                Ok(bytes) => {
                    let bytes = bytes.get(offset..).unwrap_or(&[]);
                    // SAFETY: the caller's promise: the memory of every part is valid.
                    Ok(unsafe { scatter(bytes, gets.parts_of(at)) })
                }
                Err(error) => {
                    // A part of a late answer may have arrived. SAFETY: as above.
                    unsafe { scatter(&[0xEE; 64], gets.parts_of(at)) };
                    Err(error)
                }
            };
            gets.items[at].result = result;
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        let names: Vec<Name> = puts.items.iter().map(|item| item.name).collect();
        let results = self.each(&names, deadline_ns, |world, at, name| {
            // SAFETY: the caller's promise: the memory of every part is valid.
            let bytes = unsafe { gathered(puts.parts_of(at)) };
            let moved = bytes.len() as u64;
            (world.put(name, bytes), moved)
        });
        puts.items.iter_mut().zip(results).for_each(|(item, result)| item.result = result);
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        let names: Vec<Name> = queries.items.iter().map(|item| item.name).collect();
        let mut results = self.each(&names, deadline_ns, |world, _, name| {
            (world.answer(name).map(|bytes| bytes.len() as u64), 0)
        });
        self.mix_up(&mut results);
        queries.items.iter_mut().zip(results).for_each(|(item, result)| item.result = result);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        let names: Vec<Name> = queries.items.iter().map(|item| item.name).collect();
        let results = self.each(&names, deadline_ns, |world, _, name| {
            let done = world.before(name);
            if done.is_ok() {
                world.drop_object(name);
            }
            (done.map(|()| 0), 0)
        });
        queries.items.iter_mut().zip(results).for_each(|(item, result)| item.result = result);
    }
}

/// Writes bytes to parts as far as they have room; returns the number.
///
/// # Safety
/// The memory of the parts is valid, and nothing else accesses it.
unsafe fn scatter(bytes: &[u8], parts: &[Part]) -> u64 {
    let mut rest = bytes;
    for part in parts {
        let (now, after) = rest.split_at((part.bytes as usize).min(rest.len()));
        // SAFETY: the caller's promise; no more than the part holds.
        unsafe { part.address.copy_from(now.as_ptr(), now.len()) };
        rest = after;
    }
    (bytes.len() - rest.len()) as u64
}

/// The concatenated bytes of parts.
///
/// # Safety
/// The memory of the parts is valid, and nothing writes it.
unsafe fn gathered(parts: &[Part]) -> Vec<u8> {
    let mut all = Vec::new();
    for part in parts.iter().filter(|part| part.bytes > 0) {
        // SAFETY: the caller's promise.
        all.extend_from_slice(unsafe {
            std::slice::from_raw_parts(part.address, part.bytes as usize)
        });
    }
    all
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "simulated_tests.rs"]
mod tests;
