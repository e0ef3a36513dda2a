//! A remote in memory that does what real ones do on bad days, by plan and seed: requests get
//! lost, answers come late, damaged or mixed up, objects vanish, and a failover forgets what was
//! acknowledged. Its lanes share one map, so several engines can meet in it. Time is a manual clock
//! that requests move forward.

use std::collections::BTreeMap;

use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status;
use kvtier::base::sync::{Arc, Mutex};
use kvtier::tier::remote::{
    Caps, Client, Gets, Name, Part, Puts, Queries, Remote, RemoteError, Server,
};

/// A thing that can go wrong with an item of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request does not arrive; nobody answers.
    Lost = 0,
    /// It is done, and the answer comes after the deadline.
    Late = 1,
    /// A put arrives once more, later.
    Duplicate = 2,
    /// The answer is another item's.
    Reorder = 3,
    /// A bit of an answer is wrong; every other time for good.
    Flip = 4,
    /// An answer ends too early; every other time for good.
    Truncate = 5,
    /// An answer is longer than it should be.
    Extend = 6,
    /// What is there is said not to be.
    Stale = 7,
    /// The object is gone for good.
    Forget = 8,
    /// A put finds no room.
    Full = 9,
    /// A put is not taken.
    ReadOnly = 10,
    /// The remote forbids it.
    Denied = 11,
    /// Nobody is there, for [`Plan::down`] items.
    Down = 12,
    /// The last [`Plan::lag`] objects that were acknowledged are gone, and nobody is there once.
    Failover = 13,
}

/// How many kinds of faults there are.
pub const FAULTS: usize = 14;

/// Puts that arrive later, at most.
const MAX_LATER: usize = 64;

/// How often faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Times in a million items, of each [`Fault`].
    pub per_million: [u32; FAULTS],
    /// Items for which it stays away.
    pub down: u32,
    /// Acknowledged objects that a failover loses.
    pub lag: usize,
    /// What a batch takes.
    pub batch_ns: u64,
    /// What a KiB takes.
    pub kib_ns: u64,
    /// What it likes and can.
    pub caps: Caps,
    /// The most that it holds; what is more is refused as [`RemoteError::Full`].
    pub most_bytes: u64,
}

impl Default for Plan {
    fn default() -> Plan {
        let caps = Caps {
            preferred_bytes: 1 << 20,
            max_bytes: 64 << 20,
            batch: 64,
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
    /// With a fault so many times in a million.
    #[must_use]
    pub fn often(mut self, fault: Fault, per_million: u32) -> Plan {
        self.per_million[fault as usize] = per_million;
        self
    }

    /// With every fault so many times in a million.
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
    /// The last that were acknowledged, the latest last.
    acknowledged: Vec<Name>,
    /// Acknowledged objects that it lost.
    lost: Vec<Name>,
    /// Puts that come once more.
    later: Vec<(Name, Vec<u8>)>,
    /// Items for which nobody is there any more.
    away: u32,
    struck: [u64; FAULTS],
}

/// The simulated remote. Clones share what is in it.
#[derive(Clone)]
pub struct Simulated {
    world: Arc<Mutex<World>>,
    clock: Clock,
}

impl Simulated {
    /// An empty one. All that happens follows from the seed and the order of the requests.
    pub fn new(seed: u64, plan: Plan, clock: Clock) -> Simulated {
        let world = World {
            plan,
            random: Random::new(seed),
            objects: BTreeMap::new(),
            bytes: 0,
            acknowledged: Vec::new(),
            lost: Vec::new(),
            later: Vec::new(),
            away: 0,
            struck: [0; FAULTS],
        };
        Simulated { world: Arc::new(Mutex::new(world)), clock }
    }

    /// Goes on by another plan.
    pub fn set_plan(&self, plan: Plan) {
        self.world.lock().plan = plan;
    }

    /// What is under a name, whatever would be said of it.
    pub fn object(&self, name: &Name) -> Option<Vec<u8>> {
        self.world.lock().objects.get(name).cloned()
    }

    /// The names of all objects.
    pub fn names(&self) -> Vec<Name> {
        self.world.lock().objects.keys().copied().collect()
    }

    /// Puts something under a name, whatever is there.
    pub fn plant(&self, name: Name, bytes: Vec<u8>) {
        self.world.lock().store(name, bytes);
    }

    /// The acknowledged objects that were lost since this was last asked.
    pub fn take_lost(&self) -> Vec<Name> {
        std::mem::take(&mut self.world.lock().lost)
    }

    /// How often a fault struck.
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

    /// What befalls any request before it is done. Late is not for this: it is done then.
    fn before(&mut self, name: &Name) -> Result<(), RemoteError> {
        if self.strikes(Fault::Down) {
            self.away = self.plan.down;
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
        if self.away > 0 {
            self.away -= 1;
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

    /// Puts that come once more do so between others.
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

    /// What is answered when an object is asked for.
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
    /// Does a batch item by item, for as long as there is time; each says what it moved. What is
    /// answered too late has come too late.
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

    /// Answers that go to items that did not ask for them.
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
        let nobody = [Name { tenant: 0, hash: [0; 20] }];
        let done = self.each(&nobody, deadline_ns, |world, _, name| (world.before(name), 0));
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
                Err(trouble) => {
                    // Some of an answer that did not come in time may have come.
                    // SAFETY: as above.
                    unsafe { scatter(&[0xEE; 64], gets.parts_of(at)) };
                    Err(trouble)
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

/// Writes bytes to parts, as much as there is room for; how much that is.
///
/// # Safety
/// The memory of the parts is valid, and nobody else's.
unsafe fn scatter(bytes: &[u8], parts: &[Part]) -> u64 {
    let mut rest = bytes;
    for part in parts {
        let (now, after) = rest.split_at((part.bytes as usize).min(rest.len()));
        // SAFETY: the caller's promise; no more than the part has.
        unsafe { part.address.copy_from(now.as_ptr(), now.len()) };
        rest = after;
    }
    (bytes.len() - rest.len()) as u64
}

/// The bytes of parts, one after the other.
///
/// # Safety
/// The memory of the parts is valid, and nobody writes it.
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
