//! Random copies between host and device memory on several streams, by every copy method and
//! several threads: callers that wait as documented find the expected bytes.

use kvtier_testkit::fixtures::emulated;
use kvtier_testkit::fixtures::fake_cuda;

use fake_cuda::alone;
use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Copy, Device, Direction, Event, Memory, Stream};
use kvtier::meta::view::View;

const ROOM: usize = 16 << 10;
const CELL: usize = 512;
const CELLS: usize = ROOM / CELL;

struct Room {
    address: u64,
    memory: Memory,
    /// Content once all copies have ended.
    content: Vec<u8>,
    writer: Option<Event>,
    readers: Vec<Event>,
}

fn pages() -> u64 {
    let layout = std::alloc::Layout::from_size_align(ROOM, 4096).expect("sound");
    // SAFETY: memory that only this room uses and that is never freed.
    let at = unsafe { std::alloc::alloc_zeroed(layout) };
    assert!(!at.is_null());
    at.expose_provenance() as u64
}

fn host(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// A copy of some cells: every second one, some in a row, or all of them.
fn copies(random: &mut Random, from: &Room, to: &mut Room, content: &[u8]) -> Vec<Copy<'static>> {
    let (step, first) = (1 + random.below(3) as usize, random.below(4) as usize);
    let mut made = Vec::new();
    let mut add = |at: usize, count: usize, stride: usize| {
        let (tensor, plane) = (from.address + at as u64, to.address + at as u64);
        let mut view = View::canonical(tensor, count as u32, CELL as u64);
        view.token_stride_bytes = stride as u64;
        let copy =
            Copy::new(&view, 0, count as u32, host(plane), Direction::Gather).expect("sound");
        made.push(Copy { memory: from.memory, plane_memory: to.memory, ..copy });
        for n in 0..count {
            let source = at + n * stride;
            let kept: Vec<u8> = content[source..source + CELL].to_vec();
            to.content[at + n * CELL..at + (n + 1) * CELL].copy_from_slice(&kept);
        }
    };
    match random.below(3) as usize {
        // Rows that come closer together.
        0 => add(first * CELL, 5, 2 * CELL),
        1 => (first..CELLS).step_by(step).for_each(|cell| add(cell * CELL, 1, CELL)),
        _ => add(0, CELLS, CELL),
    }
    made
}

fn wander(cuda: &Cuda, seed: u64, registered: bool) {
    let mut random = Random::new(seed);
    let mut rooms: Vec<Room> = (0..6)
        .map(|n| {
            let on_device = n % 2 == 0;
            let address = if on_device {
                cuda.allocate(ROOM as u64).expect("memory").address
            } else {
                pages()
            };
            let memory = if on_device { Memory::Device } else { Memory::Host };
            if registered && !on_device && n != 5 {
                // SAFETY: memory that stays.
                unsafe { cuda.register_host(host(address), ROOM as u64) }.expect("memory");
            }
            Room { address, memory, content: Vec::new(), writer: None, readers: Vec::new() }
        })
        .collect();
    for room in &mut rooms {
        room.content = (0..ROOM).map(|_| random.below(256) as u8).collect();
        let first = Box::leak(room.content.clone().into_boxed_slice());
        let at = first.as_mut_ptr().expose_provenance() as u64;
        let view = View::canonical(at, 1, ROOM as u64);
        let copy = Copy::new(&view, 0, 1, host(room.address), Direction::Gather).expect("sound");
        // SAFETY: memory that stays.
        let filled = unsafe {
            cuda.submit(Stream(0), None, &mut [Copy { plane_memory: room.memory, ..copy }])
        };
        room.writer = Some(filled.expect("taken"));
    }
    for _ in 0..60 {
        let from = random.below(6) as usize;
        let to = (from + 1 + random.below(5) as usize) % 6;
        let mut before: Vec<Event> = rooms[from].writer.into_iter().collect();
        before.extend(rooms[to].writer);
        before.append(&mut rooms[to].readers);
        let after = before.pop();
        before.into_iter().for_each(|event| cuda.wait(event, 0).expect("completes"));
        let content = rooms[from].content.clone();
        let mut target = std::mem::replace(
            &mut rooms[to],
            Room {
                address: 0,
                memory: Memory::Host,
                content: Vec::new(),
                writer: None,
                readers: Vec::new(),
            },
        );
        let mut all = copies(&mut random, &rooms[from], &mut target, &content);
        rooms[to] = target;
        let stream = Stream(random.below(4) as u32);
        // SAFETY: memory that stays; all that has to be waited for is.
        let event = unsafe { cuda.submit(stream, after, &mut all) }.expect("taken");
        rooms[from].readers.push(event);
        rooms[to].writer = Some(event);
    }
    for (n, room) in rooms.iter().enumerate() {
        let found = Box::leak(vec![0u8; ROOM].into_boxed_slice());
        let copy = View::canonical(room.address, 1, ROOM as u64);
        let copy = Copy::new(&copy, 0, 1, found.as_mut_ptr(), Direction::Gather).expect("sound");
        let mut copies = [Copy { memory: room.memory, ..copy }];
        // SAFETY: as above.
        let event = unsafe { cuda.submit(Stream(1), room.writer, &mut copies) }.expect("taken");
        cuda.wait(event, 0).expect("completes");
        assert!(found == room.content, "seed {seed}, room {n}");
    }
}

#[test]
fn documented_waits_order_random_copies() {
    // Each seed takes half a second: the soak has more of them.
    let seeds = std::env::var("KVTIER_WANDER_SEEDS").ok();
    let seeds = seeds.map_or(8, |seeds| seeds.parse().expect("KVTIER_WANDER_SEEDS is a number"));
    for means in [CopyMethod::Plain, CopyMethod::Batch, CopyMethod::Kernel] {
        for seed in 0..seeds {
            let (_turn, fake) = alone(seed);
            fake.set(12_080, 1, 1 << 30, false);
            fake.emulate(emulated::launches());
            let before = fake.live();
            let library = Some(fake_cuda::library());
            let choice = CopyMethodChoice::Fixed(means);
            let cuda =
                Cuda::open(Clock::real(), &CudaOpts { library, choice, ..CudaOpts::default() })
                    .expect("a device");
            wander(&cuda, seed, seed % 2 == 0);
            cuda.close(0).expect("all ends");
            drop(cuda);
            assert_eq!(fake.live(), before, "{means:?}, seed {seed}");
            fake.check();
        }
    }
}

#[test]
fn threads_copy_independently() {
    for means in [CopyMethod::Plain, CopyMethod::Batch, CopyMethod::Kernel] {
        let (_turn, fake) = alone(7);
        fake.set(12_080, 1, 1 << 30, false);
        let library = Some(fake_cuda::library());
        let choice = CopyMethodChoice::Fixed(means);
        let cuda = Cuda::open(Clock::real(), &CudaOpts { library, choice, ..CudaOpts::default() })
            .expect("a device");
        std::thread::scope(|scope| {
            let busy: Vec<_> = (0..4u64)
                .map(|seed| {
                    let cuda = &cuda;
                    scope.spawn(move || wander(cuda, seed + 100, seed % 2 == 0))
                })
                .collect();
            let mut ended = [Event(0); 16];
            let mut reported = std::collections::BTreeSet::new();
            while !busy.iter().all(|thread| thread.is_finished()) {
                let count = cuda.poll(&mut ended);
                ended[..count].iter().for_each(|event| assert!(reported.insert(event.0), "twice"));
                std::thread::yield_now();
            }
            busy.into_iter().for_each(|thread| thread.join().expect("right bytes"));
        });
        drop(cuda);
        fake.check();
    }
}
