//! Group `abi`: the cost of a call, an op and a round trip through the C boundary.

use std::ffi::c_void;
use std::hint::black_box;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::ffi::base::{KVT_E_AGAIN, KVT_OK};
use kvtier::ffi::memory::*;
use kvtier::ffi::runtime::*;

use super::{Bar, allocations, pairs, per_call};

const BATCH: usize = 64;

/// A runtime with a queue and a buffer, through the C functions.
struct Bench {
    runtime: *mut kvt_runtime_t,
    queue: *mut kvt_queue_t,
    buffer: *mut kvt_buffer_t,
}

// SAFETY: handles are values; the nouns behind them are internally locked.
unsafe impl Sync for Bench {}
// SAFETY: as above.
unsafe impl Send for Bench {}

fn zeroed<T>() -> T {
    // SAFETY: used with plain C structs of the header only.
    unsafe { std::mem::zeroed() }
}

fn sized<T>(size: impl Fn(&mut T) -> &mut u64) -> T {
    let mut value: T = zeroed();
    *size(&mut value) = size_of::<T>() as u64;
    value
}

impl Bench {
    fn open(workers: u32) -> Bench {
        Bench::open_with(workers, None)
    }

    fn open_with(workers: u32, on_thread: kvt_thread_fn) -> Bench {
        let mut bench = Bench { runtime: null_mut(), queue: null_mut(), buffer: null_mut() };
        let mut opts: kvt_runtime_opts_t = sized(|o: &mut kvt_runtime_opts_t| &mut o.struct_size);
        opts.workers = workers;
        opts.on_thread = on_thread;
        let mut size: kvt_buffer_opts_t = sized(|o: &mut kvt_buffer_opts_t| &mut o.struct_size);
        size.bytes = 1 << 20;
        // SAFETY: valid pointers throughout.
        unsafe {
            assert_eq!(kvt_runtime_open(&opts, &mut bench.runtime, null_mut()), KVT_OK);
            assert_eq!(kvt_queue_open(bench.runtime, null(), &mut bench.queue, null_mut()), KVT_OK);
            let made = kvt_buffer_alloc(bench.runtime, &size, &mut bench.buffer, null_mut());
            assert_eq!(made, KVT_OK);
        }
        bench
    }

    fn opts(&self) -> kvt_submit_opts_t {
        let mut opts: kvt_submit_opts_t = sized(|o: &mut kvt_submit_opts_t| &mut o.struct_size);
        opts.queue = self.queue;
        opts.flags = KVT_SUBMIT_EACH;
        opts
    }

    fn item(&self, tag: u64) -> kvt_buffer_item_t {
        let mut item: kvt_buffer_item_t = zeroed();
        item.kind = KVT_ITEM_COPY;
        item.dst = self.buffer;
        item.src = self.buffer;
        item.src_offset = 4096;
        item.bytes = 64;
        item.tag = tag;
        item
    }

    fn submit(&self, opts: &kvt_submit_opts_t, items: &[kvt_buffer_item_t]) -> i32 {
        let (n, stride) = (items.len() as u64, size_of::<kvt_buffer_item_t>() as u64);
        // SAFETY: the array is as long as stated; no handles are wanted.
        unsafe {
            kvt_buffer_submit(self.runtime, opts, items.as_ptr(), n, stride, null_mut(), null_mut())
        }
    }

    fn wait(&self, out: &mut [kvt_completion_t]) -> usize {
        let (cap, stride) = (out.len() as u64, size_of::<kvt_completion_t>() as u64);
        let mut n = 0;
        // SAFETY: the array is as long as stated.
        let rc = unsafe { kvt_queue_wait(self.queue, 0, out.as_mut_ptr(), cap, stride, &mut n) };
        assert_eq!(rc, KVT_OK);
        n as usize
    }

    fn batch(
        &self,
        opts: &kvt_submit_opts_t,
        items: &[kvt_buffer_item_t],
        out: &mut [kvt_completion_t],
    ) {
        assert_eq!(self.submit(opts, items), KVT_OK);
        let mut seen = 0;
        while seen < items.len() {
            seen += self.wait(out);
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: handles made by `open`.
        unsafe {
            kvt_queue_close(&mut self.queue, 0, null_mut());
            kvt_buffer_free(&mut self.buffer);
            kvt_runtime_close(&mut self.runtime, 0, null_mut(), null_mut());
        }
    }
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let rounds = if quick { 15 } else { 101 };
    vec![
        call(rounds),
        batch(rounds),
        round_trip(rounds, "round_trip_one_core", 0),
        round_trip(rounds, "round_trip_two_cores", 1),
        steady_allocations(),
        million(if quick { 250_000 } else { 1_000_000 }),
    ]
}

fn call(rounds: u32) -> Bar {
    let bench = Bench::open(1);
    let request = AllocationRequest { bytes: 1 << 20, ..AllocationRequest::default() };
    let direct = Buffer::map(&request, None).expect("a buffer");
    #[inline(never)]
    fn plain(buffer: &Buffer, address: &mut *mut c_void, bytes: &mut u64) -> i32 {
        *address = buffer.address().cast();
        *bytes = buffer.bytes();
        0
    }
    type Address = unsafe extern "C" fn(*const kvt_buffer_t, *mut *mut c_void, *mut u64) -> i32;
    let through: Address = black_box(kvt_buffer_address as Address);
    let inside = black_box(plain as fn(&Buffer, &mut *mut c_void, &mut u64) -> i32);
    let (mut address, mut bytes) = (null_mut(), 0u64);
    let (abi, rust) = pairs(
        rounds,
        || {
            per_call(100_000, || {
                // SAFETY: a live handle and valid outputs.
                black_box(unsafe { through(bench.buffer, &mut address, &mut bytes) });
            })
        },
        || {
            let (mut address, mut bytes) = (null_mut(), 0u64);
            per_call(100_000, || {
                black_box(inside(&direct, &mut address, &mut bytes));
            })
        },
    );
    Bar::lower("call_overhead", "ns")
        .baseline("direct Rust call")
        .baseline_value(rust)
        .goal(15.0)
        .value(abi - rust)
}

fn batch(rounds: u32) -> Bar {
    let bench = Bench::open(1);
    let opts = bench.opts();
    let items: Vec<_> = (0..BATCH as u64).map(|i| bench.item(i)).collect();
    let mut out = vec![zeroed(); BATCH];
    let (ours, futex) = pairs(
        rounds,
        || per_call(200, || bench.batch(&opts, &items, &mut out)) / BATCH as f64,
        || ping_pong(200, None) / BATCH as f64,
    );
    Bar::lower("op_in_batch_of_64", "ns/op")
        .baseline("futex ping-pong / 64")
        .baseline_value(futex)
        .goal(1000.0)
        .value(ours)
}

/// A round trip between two threads that are pinned to one core or to two. The kernel would place
/// an unpinned pair at random, and waking an idle core costs several times as much.
fn round_trip(rounds: u32, bar: &'static str, core: usize) -> Bar {
    let mut bar =
        Bar::lower(bar, "x").baseline("futex ping-pong, same cores").baseline_value(1.0).goal(1.5);
    if !pin_to(0) || !pin_to(core) {
        bar.note = "this machine has no second core to pin to".to_string();
        return bar;
    }
    WORKER_CORE.store(core as u32, Ordering::SeqCst);
    pin_to(0);
    let bench = Bench::open_with(1, Some(on_thread));
    let opts = bench.opts();
    let items = [bench.item(0)];
    let mut out = [zeroed(); 1];
    let (ours, futex) = pairs(
        rounds,
        || per_call(500, || bench.batch(&opts, &items, &mut out)),
        || ping_pong(500, Some(core)),
    );
    drop(bench);
    unpin();
    bar.value = Some(ours / futex);
    bar.note = format!("({ours:.0} ns against {futex:.0} ns)");
    bar
}

static WORKER_CORE: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn on_thread(_: *mut c_void, role: u32, _: u32) {
    if role == KVT_THREAD_WORKER {
        pin_to(WORKER_CORE.load(Ordering::SeqCst) as usize);
    }
}

fn set_affinity(set: &libc::cpu_set_t) -> bool {
    // SAFETY: a valid set of its own size, for this thread.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) == 0 }
}

fn pin_to(core: usize) -> bool {
    let mut set: libc::cpu_set_t = zeroed();
    // SAFETY: `core` is far below the set's size.
    unsafe { libc::CPU_SET(core, &mut set) };
    set_affinity(&set)
}

fn unpin() {
    let mut set: libc::cpu_set_t = zeroed();
    for core in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: below the set's size.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    set_affinity(&set);
}

fn steady_allocations() -> Bar {
    let bench = Bench::open(2);
    let mut opts = bench.opts();
    let items: Vec<_> = (0..BATCH as u64).map(|i| bench.item(i)).collect();
    let mut out = vec![zeroed(); BATCH];
    let turn = |opts: &mut kvt_submit_opts_t, out: &mut [kvt_completion_t]| {
        opts.flags = KVT_SUBMIT_EACH;
        bench.batch(opts, &items, out);
        opts.flags = 0;
        assert_eq!(bench.submit(opts, &items), KVT_OK);
        assert_eq!(bench.wait(out), 1);
    };
    (0..200).for_each(|_| turn(&mut opts, &mut out));
    let before = allocations();
    (0..2000).for_each(|_| turn(&mut opts, &mut out));
    Bar::lower("allocations_steady", "count")
        .baseline("none wanted")
        .baseline_value(0.0)
        .goal(0.0)
        .value((allocations() - before) as f64)
        .note(format!("(in {} ops)", 2000 * (BATCH + 1)))
}

fn million(total: u64) -> Bar {
    const PRODUCERS: u64 = 4;
    let bench = Bench::open(2);
    let each = total / PRODUCERS;
    let start = std::time::Instant::now();
    let wrong = std::thread::scope(|scope| {
        for p in 0..PRODUCERS {
            let bench = &bench;
            scope.spawn(move || produce(bench, p * each, each));
        }
        consume(&bench, total)
    });
    let seconds = start.elapsed().as_secs_f64();
    Bar::lower("lost_or_duplicated", "ops")
        .baseline("none wanted")
        .baseline_value(0.0)
        .goal(0.0)
        .value(wrong as f64)
        .note(format!("({total} ops, 4 producers, {:.2} M ops/s)", total as f64 / seconds / 1e6))
}

fn produce(bench: &Bench, first: u64, count: u64) {
    let opts = bench.opts();
    let mut at = first;
    while at < first + count {
        let n = (first + count - at).min(BATCH as u64);
        let items: Vec<_> = (at..at + n).map(|tag| bench.item(tag)).collect();
        match bench.submit(&opts, &items) {
            KVT_OK => at += n,
            KVT_E_AGAIN => std::thread::yield_now(),
            status => panic!("submit gave {status}"),
        }
    }
}

fn consume(bench: &Bench, total: u64) -> u64 {
    let mut seen = vec![0u8; total as usize];
    let mut out = vec![zeroed(); 256];
    let mut got = 0;
    let mut wrong = 0;
    while got < total {
        let n = bench.wait(&mut out);
        got += n as u64;
        for entry in &out[..n] {
            wrong += u64::from(entry.status != KVT_OK);
            match seen.get_mut(entry.tag as usize) {
                Some(mark) => *mark = mark.saturating_add(1),
                None => wrong += 1,
            }
        }
    }
    wrong + seen.iter().filter(|mark| **mark != 1).count() as u64
}

/// A round trip between two threads that sleep on a futex; nanoseconds.
fn ping_pong(turns: u32, other_core: Option<usize>) -> f64 {
    static WORD: AtomicU32 = AtomicU32::new(0);
    WORD.store(0, Ordering::SeqCst);
    let wait_for = |target: u32| loop {
        let now = WORD.load(Ordering::Acquire);
        if now == target {
            return;
        }
        // SAFETY: a valid futex word; a spurious return is looked at again.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                WORD.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                now,
                null::<libc::timespec>(),
            );
        }
    };
    let set_and_wake = |value: u32| {
        WORD.store(value, Ordering::Release);
        // SAFETY: a valid futex word.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                WORD.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                1,
            );
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Some(core) = other_core {
                pin_to(core);
            }
            for i in 0..turns {
                wait_for(2 * i + 1);
                set_and_wake(2 * i + 2);
            }
        });
        let mut i = 0;
        per_call(turns, || {
            set_and_wake(2 * i + 1);
            wait_for(2 * i + 2);
            i += 1;
        })
    })
}
