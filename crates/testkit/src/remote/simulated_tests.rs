use super::*;
use crate::remote::conformance::{Opts, conform};
use kvtier::format::codec::Codec;
use kvtier::format::keys::object::ObjectKeys;
use kvtier::format::keys::{Fingerprint, Key};
use kvtier::format::record::Chunk;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};
use kvtier::tier::remote::name::Names;
use kvtier::tier::remote::object::{CellSource, Object, Place, PlaneSource, Sink, Verdict};
use kvtier::tier::remote::shape::Shape;

const SECOND: u64 = 1_000_000_000;

#[test]
fn a_remote_without_faults_conforms() {
    for (first_wins, ranges) in [(true, true), (true, false), (false, true)] {
        let mut plan = Plan::default();
        plan.caps = Caps { first_wins, ranges, max_bytes: 4 << 20, ..plan.caps };
        let clock = Clock::manual(1);
        let remote = Simulated::new(7, plan, clock.clone());
        let patience_ns = 3600 * SECOND;
        let opts = Opts { clock, patience_ns, ..Opts::default() };
        let passed = conform(&remote, &opts).unwrap();
        assert_eq!((passed.len(), remote.names().len()), (12, 0));
    }
}

#[test]
fn the_suite_detects_faults() {
    for fault in [Fault::Reorder, Fault::Flip, Fault::Truncate, Fault::Stale, Fault::Forget] {
        let clock = Clock::manual(1);
        let remote = Simulated::new(3, Plan::default().often(fault, 500_000), clock.clone());
        let opts = Opts { clock, patience_ns: 3600 * SECOND, ..Opts::default() };
        assert!(conform(&remote, &opts).is_err(), "{fault:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed: u64| {
        let clock = Clock::manual(0);
        let remote = Simulated::new(seed, Plan::default().hostile(50_000), clock.clone());
        let mut driver = Driver::new(&remote, clock.clone(), seed);
        let results: Vec<String> = (0..30).map(|_| driver.step()).collect();
        (results, remote.names(), clock.now_ns())
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5).0, run(6).0);
}

#[test]
fn a_failover_reports_the_lost_objects() {
    let clock = Clock::manual(0);
    let plan = Plan { lag: 2, ..Plan::default() };
    let remote = Simulated::new(1, plan, clock);
    let mut client = remote.client();
    let mut puts = Puts::default();
    for i in 0..4 {
        puts.object(Name { tenant: 0, hash: [i; 20] });
        puts.part([i; 1].as_ptr(), 0);
    }
    // SAFETY: no part has bytes.
    unsafe { client.put(&mut puts, SECOND) };
    remote.set_plan(plan.often(Fault::Failover, 1_000_000));
    let mut queries = Queries::default();
    queries.name(Name { tenant: 0, hash: [0; 20] });
    client.lookup(&mut queries, SECOND);
    assert_eq!(queries.items[0].result, Err(RemoteError::Unreachable));
    let lost = remote.take_lost();
    assert_eq!(lost.iter().map(|name| name.hash[0]).collect::<Vec<_>>(), [2, 3]);
    assert_eq!((remote.names().len(), remote.take_lost().len()), (2, 0));
}

/// Memory of an object: header, planes, and their places.
type Memory = (Vec<u8>, Vec<Vec<u8>>, Vec<Place>);

/// Stores and fetches objects of chunks whose content follows from their number.
struct Driver {
    client: Box<dyn Client>,
    clock: Clock,
    random: Random,
    shape: Shape,
    names: Names,
}

impl Driver {
    fn new(remote: &dyn Remote, clock: Clock, seed: u64) -> Driver {
        let gqa = Group::gqa([0, 2], 2, 16, Dtype::F32).unwrap();
        let latent = Group::mla_latent([1], 700, Dtype::Bytes).unwrap();
        let state = Group::state([3], 5000, Dtype::Bytes);
        let layout = Layout::new(16, vec![gqa, latent, state]).unwrap();
        let shape = Shape::new(&layout, 16 << 10).unwrap();
        let keys = ObjectKeys::new(&Key([1; 32]), &Fingerprint([2; 32]), None);
        let names = Names::new(keys, 0, Codec::None, false);
        let random = Random::new(seed ^ 0x5EED);
        Driver { client: remote.client(), clock, random, shape, names }
    }

    fn chunk(number: u8) -> Chunk {
        Chunk {
            namespace: Key([1; 32]),
            parent: Key([number.wrapping_sub(1); 32]),
            key: Key([number; 32]),
            fingerprint: Fingerprint([2; 32]),
            position: u32::from(number),
            valid_tokens: 16,
        }
    }

    fn content(number: u8, layer: u32, plane: usize, bytes: u64) -> Vec<u8> {
        let seed = u64::from(number) << 32 | u64::from(layer) << 8 | plane as u64;
        let mut random = Random::new(seed);
        let mut content: Vec<u8> = Vec::new();
        (0..bytes.div_ceil(8)).for_each(|_| content.extend(random.draw().to_le_bytes()));
        content.truncate(bytes as usize);
        content
    }

    /// Puts some objects, or gets some and compares every byte.
    fn step(&mut self) -> String {
        let count = 1 + self.random.below(5) as usize;
        let which: Vec<(u8, usize)> = (0..count)
            .map(|_| {
                let object = self.random.below(self.shape.objects() as u64) as usize;
                (self.random.below(6) as u8, object)
            })
            .collect();
        let deadline_ns = self.clock.now_ns() + 10_000_000;
        let outcome = match self.random.below(8) {
            0 => self.lookup(&which, deadline_ns),
            1..4 => self.put(&which, deadline_ns),
            _ => self.get(&which, deadline_ns),
        };
        // At most a moment of virtual time.
        assert!(self.clock.now_ns() <= deadline_ns + 1_000_000);
        outcome
    }

    fn object(&self, number: u8, object: usize) -> (Object<'_>, Name) {
        let chunk = Driver::chunk(number);
        let name = self.names.name(&chunk.key, &self.shape.cut(object));
        (Object::new(&self.shape, object, chunk, Codec::None).unwrap(), name)
    }

    fn lookup(&mut self, which: &[(u8, usize)], deadline_ns: u64) -> String {
        let mut queries = Queries::default();
        for &(number, object) in which {
            queries.name(self.object(number, object).1);
        }
        self.client.lookup(&mut queries, deadline_ns);
        format!("{:?}", queries.items.iter().map(|item| item.result).collect::<Vec<_>>())
    }

    fn put(&mut self, which: &[(u8, usize)], deadline_ns: u64) -> String {
        let mut puts = Puts::default();
        let mut contents: Vec<Vec<Vec<u8>>> = Vec::new();
        let mut headers: Vec<Vec<u8>> = Vec::new();
        for &(number, object) in which {
            let layers = self.shape.layers(object);
            let cells = self.shape.cells(object);
            let mut planes = Vec::new();
            for (layer, cell) in layers.zip(cells) {
                for (plane, &(_, bytes)) in cell.planes().iter().enumerate() {
                    planes.push(Driver::content(number, layer, plane, bytes));
                }
            }
            contents.push(planes);
            headers.push(vec![0; self.object(number, object).0.header_bytes()]);
        }
        for ((&(number, object), planes), header) in which.iter().zip(&contents).zip(&mut headers) {
            let (it, name) = self.object(number, object);
            let from: Vec<PlaneSource> = planes
                .iter()
                .map(|p| PlaneSource { address: p.as_ptr(), bytes: p.len() as u64, sum: None })
                .collect();
            let mut rest = &from[..];
            let mut cells = Vec::new();
            for cell in self.shape.cells(object) {
                let (planes, after) = rest.split_at(cell.planes().len());
                cells.push(CellSource { codec: Codec::None, planes });
                rest = after;
            }
            // SAFETY: planes and headers live until the put is done.
            unsafe { it.put(name, &cells, header, &mut puts) }.unwrap();
        }
        // SAFETY: as above.
        unsafe { self.client.put(&mut puts, deadline_ns) };
        format!("{:?}", puts.items.iter().map(|item| item.result).collect::<Vec<_>>())
    }

    fn get(&mut self, which: &[(u8, usize)], deadline_ns: u64) -> String {
        let mut gets = Gets::default();
        let mut sink = vec![0u8; 4096];
        let sink = Sink { address: sink.as_mut_ptr(), bytes: 4096 };
        let mut memory: Vec<Memory> = Vec::new();
        for &(number, object) in which {
            let (it, name) = self.object(number, object);
            let mut header = vec![0u8; it.header_bytes()];
            let (mut planes, mut places) = (Vec::new(), Vec::new());
            for cell in self.shape.cells(object) {
                let mut place = Place::NOWHERE;
                for (&(_, bytes), address) in cell.planes().iter().zip(&mut place.planes) {
                    let mut plane = vec![0u8; bytes as usize];
                    *address = plane.as_mut_ptr();
                    planes.push(plane);
                }
                places.push(place);
            }
            it.get(name, header.as_mut_ptr(), &places, sink, &mut gets).unwrap();
            memory.push((header, planes, places));
        }
        // SAFETY: all the memory stays allocated, and is only read afterwards.
        unsafe { self.client.get(&mut gets, deadline_ns) };
        let mut outcome = String::new();
        for ((&(number, object), item), memory) in which.iter().zip(&gets.items).zip(&memory) {
            let (header, planes, places) = memory;
            let Ok(length) = item.result else {
                outcome += &format!("{:?} ", item.result);
                continue;
            };
            let mut verdicts = Vec::new();
            let (it, _) = self.object(number, object);
            // SAFETY: the places are in the planes, which nothing writes any more.
            let judged = unsafe { it.verify(header, length, places, &mut verdicts) };
            outcome += &format!("{judged:?} {verdicts:?} ");
            if judged.is_err() {
                assert!(verdicts.is_empty());
                continue;
            }
            let mut planes = planes.iter();
            let cells = self.shape.cells(object);
            for ((layer, cell), verdict) in self.shape.layers(object).zip(cells).zip(verdicts) {
                for (plane, &(_, bytes)) in cell.planes().iter().enumerate() {
                    let found = planes.next().unwrap();
                    let expected = Driver::content(number, layer, plane, bytes);
                    // Bytes with a sound verdict are right, whatever the remote did.
                    assert!(verdict != Verdict::Sound || *found == expected);
                }
            }
        }
        outcome
    }
}

#[test]
fn no_seed_yields_wrong_bytes_and_every_item_has_a_result() {
    let (mut sound, mut bad) = (0, 0);
    let mut struck = [0; FAULTS];
    for seed in 0..3000u64 {
        let clock = Clock::manual(seed);
        let often = [0, 2_000, 30_000, 200_000][seed as usize % 4];
        let mut plan = Plan { down: 3, ..Plan::default().hostile(often) };
        plan.caps.first_wins = seed % 3 != 0;
        plan.most_bytes = if seed % 5 == 0 { 100_000 } else { u64::MAX };
        let remote = Simulated::new(seed, plan, clock.clone());
        // Two engines share it.
        let mut drivers = [
            Driver::new(&remote, clock.clone(), seed * 2),
            Driver::new(&remote, clock.clone(), seed * 2 + 1),
        ];
        for step in 0..16 {
            let outcome = drivers[step % 2].step();
            assert!(!outcome.is_empty());
            sound += outcome.matches("Sound").count();
            bad += outcome.matches("Damaged").count() + outcome.matches("Malformed").count();
        }
        struck.iter_mut().zip(remote.world.lock().struck).for_each(|(all, more)| *all += more);
    }
    assert!(sound > 10_000 && bad > 300, "{sound} sound, {bad} not");
    assert!(struck.iter().all(|&times| times > 100), "{struck:?}");
}
