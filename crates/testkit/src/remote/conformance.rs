//! The conformance suite of remotes. Object names are random, and objects are removed at the end,
//! so that a server in use can be tested.

use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status::{self, Error, Status};
use kvtier::tier::remote::name::HASH_BYTES;
use kvtier::tier::remote::{Caps, Client, Gets, Name, Puts, Queries, Remote, RemoteError};

/// Options of the suite.
#[derive(Clone)]
pub struct Opts {
    /// Seed of names and content.
    pub seed: u64,
    /// Clock of the remote.
    pub clock: Clock,
    /// Time limit of a batch.
    pub patience_ns: u64,
    /// Limit of object sizes to test.
    pub largest_bytes: u64,
}

impl Default for Opts {
    fn default() -> Opts {
        Opts {
            seed: 1,
            clock: Clock::real(),
            patience_ns: 300_000_000_000,
            largest_bytes: 16 << 20,
        }
    }
}

/// Time limit of batches whose deadline has passed, on a manual clock.
const PROMPT_NS: u64 = 1_000_000_000;
/// The same on a real clock: a slow machine needs less, a hanging batch more.
const PROMPT_REAL_NS: u64 = 120_000_000_000;
/// Guard bytes around the memory of parts.
const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 7;

type Check = fn(&mut Bench<'_>) -> Result<(), String>;

const CHECKS: [(&str, Check); 12] = [
    ("greeting", greeting),
    ("sizes", sizes),
    ("room", room),
    ("ranges", ranges),
    ("first wins", first_wins),
    ("absent", absent),
    ("removed", removed),
    ("empty", empty),
    ("large", large),
    ("past", past),
    ("too long", too_long),
    ("tenants", tenants),
];

/// Runs all checks on a remote; returns the names of the passed ones, or the first failure.
pub fn conform(remote: &dyn Remote, opts: &Opts) -> status::Result<Vec<&'static str>> {
    let mut bench = Bench {
        opts,
        caps: remote.caps(),
        clients: [remote.client(), remote.client()],
        random: Random::new(opts.seed),
        names: Vec::new(),
    };
    let mut passed = Vec::new();
    let mut outcome = Ok(());
    for (name, check) in CHECKS {
        match check(&mut bench) {
            Ok(()) => passed.push(name),
            Err(why) => {
                outcome = Err(Error::new(Status::State, format!("{name}: {why}")));
                break;
            }
        }
    }
    let names = std::mem::take(&mut bench.names);
    names.chunks(64).for_each(|names| drop(bench.remove(names)));
    outcome.map(|()| passed)
}

/// An object: name and content.
type Object = (Name, Vec<u8>);

struct Bench<'a> {
    opts: &'a Opts,
    caps: Caps,
    clients: [Box<dyn Client>; 2],
    random: Random,
    names: Vec<Name>,
}

/// Memory of an object in parts, with guards between them.
struct GuardedParts {
    memory: Vec<u8>,
    parts: Vec<(usize, usize)>,
}

impl GuardedParts {
    fn new(lengths: &[usize]) -> GuardedParts {
        let all: usize = lengths.iter().map(|length| length + GUARD_BYTES).sum();
        let mut parts = Vec::new();
        let mut at = GUARD_BYTES;
        for &length in lengths {
            parts.push((at, length));
            at += length + GUARD_BYTES;
        }
        GuardedParts { memory: vec![GUARD; all + GUARD_BYTES], parts }
    }

    fn add_to(&mut self, gets: &mut Gets) {
        let start = self.memory.as_mut_ptr();
        self.parts.iter().for_each(|&(at, bytes)| gets.part(start.wrapping_add(at), bytes as u64));
    }

    /// The content; none if a guard was overwritten.
    fn bytes(&self) -> Option<Vec<u8>> {
        let (mut bytes, mut at) = (Vec::new(), 0);
        for &(start, length) in &self.parts {
            if self.memory[at..start].iter().any(|&byte| byte != GUARD) {
                return None;
            }
            bytes.extend_from_slice(&self.memory[start..start + length]);
            at = start + length;
        }
        self.memory[at..].iter().all(|&byte| byte == GUARD).then_some(bytes)
    }
}

impl Bench<'_> {
    fn deadline_ns(&self) -> u64 {
        self.opts.clock.now_ns().saturating_add(self.opts.patience_ns)
    }

    fn name(&mut self) -> Name {
        let mut hash = [0; HASH_BYTES];
        hash.iter_mut().for_each(|byte| *byte = self.random.draw() as u8);
        let name = Name { tenant: 0, hash };
        self.names.push(name);
        name
    }

    fn content(&mut self, bytes: usize) -> Vec<u8> {
        let mut content = Vec::with_capacity(bytes + 8);
        while content.len() < bytes {
            content.extend(self.random.draw().to_le_bytes());
        }
        content.truncate(bytes);
        content
    }

    fn object(&mut self, bytes: usize) -> Object {
        (self.name(), self.content(bytes))
    }

    /// Splits a length into pieces, some of them empty.
    fn pieces(&mut self, bytes: usize) -> Vec<usize> {
        let mut pieces = vec![0];
        let mut left = bytes;
        while left > 0 {
            let most = if self.random.coin() { left } else { left.min(5000) };
            let piece = 1 + self.random.below(most as u64) as usize;
            pieces.push(piece);
            if self.random.below(4) == 0 {
                pieces.push(0);
            }
            left -= piece;
        }
        pieces
    }

    fn put(&mut self, client: usize, objects: &[Object]) -> Vec<Result<bool, RemoteError>> {
        let deadline_ns = self.deadline_ns();
        self.put_by(client, objects, deadline_ns)
    }

    fn put_by(
        &mut self,
        client: usize,
        objects: &[Object],
        deadline_ns: u64,
    ) -> Vec<Result<bool, RemoteError>> {
        let mut puts = Puts::default();
        for (name, content) in objects {
            puts.object(*name);
            let mut at = 0;
            for piece in self.pieces(content.len()) {
                puts.part(content[at..].as_ptr(), piece as u64);
                at += piece;
            }
        }
        // SAFETY: the parts are those of the objects, which are borrowed until the batch is done.
        unsafe { self.clients[client].put(&mut puts, deadline_ns) };
        puts.items.iter().map(|item| item.result).collect()
    }

    /// Fetches objects into memory of given sizes, from given offsets.
    fn get(
        &mut self,
        client: usize,
        ranges: &[(Name, u64, usize)],
        deadline_ns: u64,
    ) -> Result<Vec<Result<Vec<u8>, RemoteError>>, String> {
        let mut gets = Gets::default();
        let mut guarded: Vec<GuardedParts> = Vec::new();
        for &(_, _, bytes) in ranges {
            let pieces = self.pieces(bytes);
            guarded.push(GuardedParts::new(&pieces));
        }
        for (&(name, offset, _), guarded) in ranges.iter().zip(&mut guarded) {
            gets.object(name, offset);
            guarded.add_to(&mut gets);
        }
        // SAFETY: the parts are in memory that nothing else accesses until the batch is done.
        unsafe { self.clients[client].get(&mut gets, deadline_ns) };
        let mut results = Vec::new();
        for ((item, guarded), &(_, _, room)) in gets.items.iter().zip(&guarded).zip(ranges) {
            let Some(mut bytes) = guarded.bytes() else {
                return Err(format!("{room} bytes: memory beside the parts was written"));
            };
            results.push(match item.result {
                Ok(length) if length as usize > room => {
                    return Err(format!("{length} bytes were read into room for {room}"));
                }
                Ok(length) => {
                    bytes.truncate(length as usize);
                    Ok(bytes)
                }
                Err(error) => Err(error),
            });
        }
        Ok(results)
    }

    fn get_one(&mut self, client: usize, name: Name, room: usize) -> Result<Vec<u8>, String> {
        let deadline_ns = self.deadline_ns();
        let mut results = self.get(client, &[(name, 0, room)], deadline_ns)?;
        let result = results.pop().unwrap_or(Err(RemoteError::Absent));
        result.map_err(|error| format!("an object of up to {room} bytes: {error:?}"))
    }

    fn lookup(&mut self, names: &[Name]) -> Vec<Result<u64, RemoteError>> {
        let mut queries = queries_of(names);
        let deadline_ns = self.deadline_ns();
        self.clients[1].lookup(&mut queries, deadline_ns);
        queries.items.iter().map(|item| item.result).collect()
    }

    fn remove(&mut self, names: &[Name]) -> Vec<Result<u64, RemoteError>> {
        let mut queries = queries_of(names);
        let deadline_ns = self.deadline_ns();
        self.clients[0].remove(&mut queries, deadline_ns);
        queries.items.iter().map(|item| item.result).collect()
    }
}

fn queries_of(names: &[Name]) -> Queries {
    let mut queries = Queries::default();
    names.iter().for_each(|&name| queries.name(name));
    queries
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:.200?} instead of {expected:.200?}"))
}

fn same_bytes(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    same(&format!("{what}: length"), found.len(), expected.len())?;
    match found.iter().zip(expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(format!("{what}: byte {at} of {} is wrong", expected.len())),
    }
}

fn greeting(bench: &mut Bench<'_>) -> Result<(), String> {
    let deadline_ns = bench.deadline_ns();
    let server = bench.clients[0].greet(deadline_ns).map_err(|error| error.to_string())?;
    same("the server has no description", server.words.is_empty(), false)
}

fn sizes(bench: &mut Bench<'_>) -> Result<(), String> {
    let most = bench.opts.largest_bytes.min(bench.caps.max_bytes);
    let preferred = bench.caps.preferred_bytes.min(most);
    let few = [1, 2, 4095, 4096, 4097, 12_345, 65_536, 65_537, 262_144, preferred, most];
    for bytes in few.into_iter().filter(|&bytes| bytes <= most) {
        let object = bench.object(bytes as usize);
        let put = bench.put(0, std::slice::from_ref(&object));
        same(&format!("a put of {bytes} bytes"), put, vec![Ok(false)])?;
        same("its length", bench.lookup(&[object.0]), vec![Ok(bytes)])?;
        let read = bench.get_one(1, object.0, bytes as usize)?;
        same_bytes("an object that was put", &read, &object.1)?;
    }
    Ok(())
}

fn room(bench: &mut Bench<'_>) -> Result<(), String> {
    let object = bench.object(10_000);
    same("a put", bench.put(0, std::slice::from_ref(&object)), vec![Ok(false)])?;
    for room in [10_001, 70_000, 9_999, 4096, 1] {
        let read = bench.get_one(0, object.0, room)?;
        same_bytes(&format!("room for {room}"), &read, &object.1[..room.min(10_000)])?;
    }
    // Two destinations of one object in a batch.
    let deadline_ns = bench.deadline_ns();
    let twice = bench.get(0, &[(object.0, 0, 10_000), (object.0, 0, 10_000)], deadline_ns)?;
    same("the same twice", twice, vec![Ok(object.1.clone()), Ok(object.1)])
}

fn ranges(bench: &mut Bench<'_>) -> Result<(), String> {
    if !bench.caps.ranges {
        return Ok(());
    }
    let object = bench.object(100_000);
    same("a put", bench.put(0, std::slice::from_ref(&object)), vec![Ok(false)])?;
    let ranges = [(0, 1), (1, 4096), (4096, 8192), (50_001, 49_999), (99_999, 1), (99_990, 500)];
    let requests = ranges.map(|(offset, bytes)| (object.0, offset as u64, bytes));
    let deadline_ns = bench.deadline_ns();
    let read = bench.get(1, &requests, deadline_ns)?;
    for ((offset, bytes), read) in ranges.into_iter().zip(read) {
        let what = format!("{bytes} bytes from {offset} on");
        let read = read.map_err(|error| format!("{what}: {error:?}"))?;
        same_bytes(&what, &read, &object.1[offset..(offset + bytes).min(100_000)])?;
    }
    Ok(())
}

fn first_wins(bench: &mut Bench<'_>) -> Result<(), String> {
    let (name, first) = bench.object(5000);
    let second = bench.content(7000);
    same("the first put", bench.put(0, &[(name, first.clone())]), vec![Ok(false)])?;
    if bench.caps.first_wins {
        for client in [0, 1] {
            same("a second put", bench.put(client, &[(name, second.clone())]), vec![Ok(true)])?;
        }
        same_bytes("after a second put", &bench.get_one(1, name, 9000)?, &first)?;
        let name = bench.name();
        let both = [(name, second.clone()), (name, first)];
        let mut results = bench.put(0, &both);
        results.sort_unstable_by_key(|result| result.ok());
        same("two of one name in a batch", results, vec![Ok(false), Ok(true)])?;
        let read = bench.get_one(0, name, 9000)?;
        return same(
            "one of the two objects is stored",
            both.iter().any(|(_, bytes)| *bytes == read),
            true,
        );
    }
    let puts = bench.put(1, &[(name, second.clone())]);
    same("a second put", puts.iter().all(|result| result.is_ok()), true)?;
    // Remotes that check for existence keep the first object, unless two check at once.
    let read = bench.get_one(0, name, 9000)?;
    same("one of the two objects is stored", read == first || read == second, true)
}

fn absent(bench: &mut Bench<'_>) -> Result<(), String> {
    let object = bench.object(3000);
    same("a put", bench.put(0, std::slice::from_ref(&object)), vec![Ok(false)])?;
    let names = [bench.name(), object.0, bench.name()];
    let lengths = vec![Err(RemoteError::Absent), Ok(3000), Err(RemoteError::Absent)];
    same("lengths of stored objects", bench.lookup(&names), lengths)?;
    let deadline_ns = bench.deadline_ns();
    let read = bench.get(0, &names.map(|name| (name, 0, 4000)), deadline_ns)?;
    same(
        "the objects read",
        read,
        vec![Err(RemoteError::Absent), Ok(object.1), Err(RemoteError::Absent)],
    )
}

fn removed(bench: &mut Bench<'_>) -> Result<(), String> {
    let objects = [bench.object(100), bench.object(9000)];
    let never = bench.name();
    same("puts", bench.put(0, &objects), vec![Ok(false); 2])?;
    let names = [objects[1].0, never];
    same("a removal", bench.remove(&names).iter().all(Result::is_ok), true)?;
    same("another one", bench.remove(&names).iter().all(Result::is_ok), true)?;
    let absent = Err(RemoteError::Absent);
    same(
        "lengths after the removal",
        bench.lookup(&[objects[0].0, names[0], never]),
        vec![Ok(100), absent, absent],
    )?;
    same("a put of a removed object", bench.put(1, &objects[1..]), vec![Ok(false)])?;
    same_bytes(
        "an object that was put again",
        &bench.get_one(0, objects[1].0, 9000)?,
        &objects[1].1,
    )
}

fn empty(bench: &mut Bench<'_>) -> Result<(), String> {
    let deadline_ns = bench.deadline_ns();
    bench.get(0, &[], deadline_ns)?;
    same("puts", bench.put(0, &[]).len(), 0)?;
    same("lookups", bench.lookup(&[]).len(), 0)?;
    same("removals", bench.remove(&[]).len(), 0)
}

fn large(bench: &mut Bench<'_>) -> Result<(), String> {
    let count = bench.caps.batch.saturating_mul(3).clamp(10, 2000) + 1;
    let objects: Vec<Object> = (0..count).map(|i| bench.object(1 + i * 37 % 9000)).collect();
    same("puts", bench.put(0, &objects), vec![Ok(false); count])?;
    let mut requests: Vec<_> =
        objects.iter().map(|(name, content)| (*name, 0, content.len())).collect();
    for at in (0..count).step_by(7) {
        requests[at].0 = bench.name();
    }
    let names: Vec<Name> = requests.iter().map(|request| request.0).collect();
    let lengths = bench.lookup(&names);
    let deadline_ns = bench.deadline_ns();
    let read = bench.get(1, &requests, deadline_ns)?;
    for (at, ((read, length), object)) in read.into_iter().zip(lengths).zip(&objects).enumerate() {
        if at % 7 == 0 {
            same("an absent one of many", (read, length), (Err(RemoteError::Absent), length))?;
            same("its length", length, Err(RemoteError::Absent))?;
            continue;
        }
        let read = read.map_err(|error| format!("object {at} of {count}: {error:?}"))?;
        same_bytes(&format!("object {at} of {count}"), &read, &object.1)?;
        same("the length of one of many", length, Ok(object.1.len() as u64))?;
    }
    let names: Vec<Name> = objects.iter().map(|object| object.0).collect();
    same("removals", bench.remove(&names).iter().all(Result::is_ok), true)
}

fn past(bench: &mut Bench<'_>) -> Result<(), String> {
    let objects = [bench.object(5000), bench.object(50)];
    same("puts", bench.put(0, &objects), vec![Ok(false); 2])?;
    let begun = bench.opts.clock.now_ns();
    let late = vec![Err(RemoteError::Timeout); 2];
    let other = [bench.object(5000), bench.object(50)];
    same("puts", bench.put_by(0, &other, begun), vec![Err(RemoteError::Timeout); 2])?;
    let names = [objects[0].0, objects[1].0];
    let read = bench.get(0, &names.map(|name| (name, 0, 5000)), begun)?;
    same("gets", read, vec![Err(RemoteError::Timeout); 2])?;
    let mut queries = queries_of(&names);
    bench.clients[0].lookup(&mut queries, begun);
    same("lookups", queries.items.iter().map(|item| item.result).collect(), late.clone())?;
    bench.clients[0].remove(&mut queries, begun);
    same("removals", queries.items.iter().map(|item| item.result).collect(), late)?;
    let took = bench.opts.clock.now_ns() - begun;
    let most = if bench.opts.clock.is_manual() { PROMPT_NS } else { PROMPT_REAL_NS };
    same(&format!("five batches without time took {took} ns: prompt"), took < most, true)?;
    // The connection works as before.
    same_bytes("afterwards", &bench.get_one(0, objects[0].0, 5000)?, &objects[0].1)
}

fn too_long(bench: &mut Bench<'_>) -> Result<(), String> {
    if bench.caps.max_bytes >= bench.opts.largest_bytes {
        return Ok(());
    }
    let objects =
        [bench.object(10), bench.object(bench.caps.max_bytes as usize + 1), bench.object(20)];
    let results = bench.put(0, &objects);
    same("puts", results, vec![Ok(false), Err(RemoteError::TooLong), Ok(false)])?;
    same(
        "the object that is too long",
        bench.lookup(&[objects[1].0]),
        vec![Err(RemoteError::Absent)],
    )
}

fn tenants(bench: &mut Bench<'_>) -> Result<(), String> {
    let (name, everybodys) = bench.object(500);
    let own = Name { tenant: 42, ..name };
    bench.names.push(own);
    let content = bench.content(600);
    same(
        "the object without a tenant",
        bench.put(0, &[(name, everybodys.clone())]),
        vec![Ok(false)],
    )?;
    same("before a tenant's own", bench.lookup(&[own]), vec![Err(RemoteError::Absent)])?;
    same("a tenant's own", bench.put(0, &[(own, content.clone())]), vec![Ok(false)])?;
    same_bytes("the object without a tenant", &bench.get_one(1, name, 1000)?, &everybodys)?;
    same_bytes("a tenant's own", &bench.get_one(1, own, 1000)?, &content)
}
