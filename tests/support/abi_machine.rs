//! A machine whose program is bytes and whose instructions are the whole C
//! ABI, with good, stale, foreign and absurd arguments. Shared by the property
//! test and the fuzz target. It keeps a small model: which handles live, and
//! how often `destroy` must have run in the end.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::ffi::account::*;
use kvtier::ffi::budget::*;
use kvtier::ffi::buffer::*;
use kvtier::ffi::error::*;
use kvtier::ffi::feature::*;
use kvtier::ffi::logging::*;
use kvtier::ffi::op::*;
use kvtier::ffi::policy::*;
use kvtier::ffi::queue::*;
use kvtier::ffi::runtime::*;
use kvtier::ffi::spec::*;
use kvtier::ffi::status::*;
use kvtier::ffi::trace::*;
use kvtier::ffi::version::*;
use kvtier::ffi::work::*;

#[path = "abi_device.rs"]
mod device;
#[path = "abi_kernel.rs"]
mod kernel;
#[path = "abi_offload.rs"]
mod offload;
#[path = "abi_policy.rs"]
mod policy;
#[path = "abi_remote.rs"]
mod remote;
#[path = "abi_sparse.rs"]
mod sparse;
#[path = "abi_store.rs"]
mod store;
#[path = "abi_stream.rs"]
mod stream;
#[path = "abi_trace.rs"]
mod trace;

static DESTROYED: AtomicU64 = AtomicU64::new(0);
static CALLED: AtomicU64 = AtomicU64::new(0);
static SUBMITTED: AtomicU64 = AtomicU64::new(0);
static REPLAYED: AtomicU64 = AtomicU64::new(0);
static MOVED: AtomicU64 = AtomicU64::new(0);
static LOADED: AtomicU64 = AtomicU64::new(0);
static COMPUTED: AtomicU64 = AtomicU64::new(0);
static ANSWERED: AtomicU64 = AtomicU64::new(0);
static STREAMED: AtomicU64 = AtomicU64::new(0);
static COPIED: AtomicU64 = AtomicU64::new(0);

/// Submissions that were accepted, completions that were called back, replays that
/// came to their end, moves that were accepted, layers that came into a buffer, attention that
/// was compared with a model, answers of sparse policies, units of weights, and copies of
/// devices, so far: a test of what never gets that far would prove little.
pub fn reached() -> [u64; 9] {
    [&SUBMITTED, &CALLED, &REPLAYED, &MOVED, &LOADED, &COMPUTED, &ANSWERED, &STREAMED, &COPIED]
        .map(|count| count.load(Ordering::SeqCst))
}

unsafe extern "C" fn destroy(user_data: *mut c_void) {
    assert_eq!(user_data as usize, 0x7777, "foreign data reached a destroy");
    DESTROYED.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn on_batch(
    user_data: *mut c_void,
    batch: *const kvt_completion_t,
    count: u64,
    stride: u64,
) {
    // A short options struct may end before the user data.
    assert!(user_data.is_null() || user_data == USER);
    assert_eq!(stride as usize, size_of::<kvt_completion_t>());
    for i in 0..count as usize {
        // SAFETY: the library's promise about the batch.
        let mut op = unsafe { (*batch.add(i)).op };
        CALLED.fetch_add(1, Ordering::SeqCst);
        // Freeing here may be early (a RESOLVED moment) or late (the machine
        // freed it): both are statuses.
        // SAFETY: a local handle variable.
        unsafe { kvt_op_free(&mut op) };
    }
}

unsafe extern "C" fn on_log(
    _: *mut c_void,
    level: u32,
    _: *const c_char,
    _: u64,
    text: *const c_char,
    bytes: u64,
) {
    assert!((1..=5).contains(&level) && !text.is_null() && bytes < 1 << 20);
}

unsafe extern "C" fn on_reclaim(_: *mut c_void, _: u32, bytes: u64, _: u64) -> u64 {
    bytes / 2
}

const USER: *mut c_void = 0x7777 as *mut c_void;

/// The program: bytes, zero when they run out.
struct Tape<'a>(&'a [u8]);

impl Tape<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Mostly small numbers, now and then an absurd one.
    fn number(&mut self) -> u64 {
        let byte = self.byte();
        match byte {
            255 => u64::MAX,
            254 => u64::MAX - u64::from(self.byte()),
            253 => 1 << (self.byte() % 64),
            252 => i64::MAX as u64,
            _ => u64::from(byte) * (1 << (self.byte() % 9)),
        }
    }

    fn flags(&mut self) -> u64 {
        if self.byte() < 230 { u64::from(self.byte() & 31) } else { self.number() }
    }
}

/// Handles of one type: live ones first, then ones that were freed.
struct Shelf<T> {
    live: Vec<*mut T>,
    dead: Vec<*mut T>,
}

impl<T> Shelf<T> {
    fn new() -> Shelf<T> {
        Shelf { live: Vec::new(), dead: Vec::new() }
    }

    /// Usually a live handle; else a stale one, null or nonsense.
    fn pick(&self, tape: &mut Tape) -> *mut T {
        let n = tape.byte();
        if n < 220 && !self.live.is_empty() {
            return self.live[n as usize % self.live.len()];
        }
        match n % 4 {
            0 if !self.dead.is_empty() => self.dead[n as usize % self.dead.len()],
            1 => tape.number() as usize as *mut T,
            2 => self.live.first().map_or(null_mut(), |h| h.wrapping_byte_add(1 << 20)),
            _ => null_mut(),
        }
    }

    fn is_live(&self, handle: *mut T) -> bool {
        self.live.contains(&handle)
    }

    /// Checks a status against the model, then books a free.
    fn freed(&mut self, before: *mut T, after: *mut T, status: i32) {
        assert_eq!(status == KVT_OK, after.is_null(), "a free clears exactly when it frees");
        if status == KVT_OK && self.is_live(before) {
            self.live.retain(|h| *h != before);
            self.dead.push(before);
        } else if status == KVT_OK {
            assert!(before.is_null(), "freed a handle that was not live: {before:p}");
        }
    }
}

/// The state of a run.
struct Machine {
    runtimes: Shelf<kvt_runtime_t>,
    queues: Shelf<kvt_queue_t>,
    ops: Shelf<kvt_op_t>,
    budgets: Shelf<kvt_budget_t>,
    accounts: Shelf<kvt_account_t>,
    buffers: Shelf<kvt_buffer_t>,
    policies: Shelf<kvt_policy_t>,
    traces: Shelf<kvt_trace_t>,
    kv: store::Stores,
    sparse: sparse::Sparses,
    jobs: kernel::Jobs,
    streams: stream::Streams,
    devices: device::Devices,
    err: *mut kvt_error_t,
    memory: Vec<Box<[u8]>>,
    taken: u64,
}

fn size_field(tape: &mut Tape, right: usize) -> u64 {
    match tape.byte() {
        0..=235 => right as u64,
        236..=245 => u64::from(tape.byte()),
        _ => tape.number(),
    }
}

/// A struct behind which nothing readable is promised beyond a page.
struct Padded<T>(Box<[u8; 8192]>, std::marker::PhantomData<T>);

impl<T> Padded<T> {
    fn new(tape: &mut Tape, fill: impl FnOnce(&mut T, &mut Tape)) -> Padded<T> {
        let mut bytes = Box::new([0u8; 8192]);
        // SAFETY: large enough, zero is a valid value of every struct used, and
        // the unaligned write below is followed by unaligned reads only.
        let mut value: T = unsafe { std::mem::zeroed() };
        fill(&mut value, tape);
        // SAFETY: as above.
        unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(value) };
        let size = size_field(tape, size_of::<T>());
        bytes[..8].copy_from_slice(&size.to_le_bytes());
        if tape.byte() > 250 {
            bytes[size_of::<T>()] = 1; // beyond what the library knows
        }
        Padded(bytes, std::marker::PhantomData)
    }

    fn ptr(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

fn out<T>() -> Padded<T> {
    Padded::new(&mut Tape(&[]), |_, _| ())
}

fn check(status: i32) -> i32 {
    assert!((KVT_E_STATE..=KVT_OK).contains(&status), "status {status}");
    assert_ne!(status, KVT_E_PANIC, "a defect was caught");
    status
}

/// Runs a program, then takes everything down again and looks at what is left.
pub fn run(program: &[u8]) {
    let before = DESTROYED.load(Ordering::SeqCst);
    let forked = sparse::FORKED.load(Ordering::SeqCst);
    let mut machine = Machine {
        runtimes: Shelf::new(),
        queues: Shelf::new(),
        ops: Shelf::new(),
        budgets: Shelf::new(),
        accounts: Shelf::new(),
        buffers: Shelf::new(),
        policies: Shelf::new(),
        traces: Shelf::new(),
        kv: store::Stores::new(),
        sparse: sparse::Sparses::new(),
        jobs: kernel::Jobs::new(),
        streams: stream::Streams::new(),
        devices: device::Devices::new(),
        err: null_mut(),
        memory: Vec::new(),
        taken: 0,
    };
    let mut tape = Tape(program);
    let mut steps = 0;
    while !tape.0.is_empty() && steps < 3000 {
        steps += 1;
        machine.step(&mut tape);
    }
    machine.take_down();
    let destroyed = DESTROYED.load(Ordering::SeqCst) - before;
    let forked = sparse::FORKED.load(Ordering::SeqCst) - forked;
    assert_eq!(
        destroyed,
        machine.taken + forked,
        "destroy runs once for what was taken, else never"
    );
}

impl Machine {
    fn step(&mut self, tape: &mut Tape) {
        let err: *mut *mut kvt_error_t =
            if tape.byte() & 1 == 0 { null_mut() } else { &mut self.err };
        match tape.byte() % 64 {
            0 => self.open_runtime(tape, err),
            1 | 2 => self.open_queue(tape, err),
            3 => self.open_budget(tape, err),
            4 => self.open_account(tape, err),
            5 | 6 => self.alloc(tape, err),
            7 => self.wrap(tape, err),
            8..=12 => self.submit(tape, err),
            13 => self.reserve_later(tape, err),
            14 => self.account_calls(tape, err),
            15 => self.drain(tape),
            16 | 17 => self.look_at_op(tape),
            18 => self.free_op(tape),
            19 => self.free_buffer(tape),
            20 => self.close_something(tape, err),
            21 => self.statistics(tape),
            22 => self.texts(tape, err),
            24 => self.open_policy(tape, err),
            25..=27 => self.use_policy(tape, err),
            28 => self.make_trace(tape, err),
            29 => self.use_trace(tape, err),
            30 => self.open_store(tape, err),
            31 => self.open_namespace(tape, err),
            32 => self.open_session(tape, err),
            33 => self.open_in_store(tape, err),
            34 => self.use_session(tape, err),
            35 | 36 => self.move_session(tape, err),
            37 | 38 => self.look_at_store(tape, err),
            39 => self.close_in_store(tape, err),
            40..=47 => self.use_offload(tape, err),
            48..=53 => self.use_sparse(tape, err),
            54 | 55 => self.use_kernels(tape, err),
            56..=59 => self.use_streams(tape, err),
            60..=63 => self.use_devices(tape, err),
            _ => self.budget_calls(tape, err),
        }
    }

    fn now(&self) -> u64 {
        let mut now = 0;
        for runtime in &self.runtimes.live {
            // SAFETY: a live handle and a valid output.
            check(unsafe { kvt_runtime_now(*runtime, &mut now) });
        }
        now
    }

    fn open_runtime(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.runtimes.live.len() >= 2 {
            return;
        }
        let mut handle = null_mut();
        let mut opts = Padded::<kvt_runtime_opts_t>::new(tape, |o, t| {
            o.workers = u32::from(t.byte() % 3);
            o.max_ops = u32::from(t.byte());
            if t.byte() > 240 {
                o.workers = t.number() as u32 | 1 << 20;
            }
            o.user_data = USER;
            // Without a callback it belongs to, this is refused.
            o.destroy = if t.byte() > 250 { Some(destroy) } else { None };
        });
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_runtime_open(opts.ptr(), &mut handle, err) });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.runtimes.live.extend((status == KVT_OK).then_some(handle));
    }

    fn open_queue(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.queues.live.len() >= 6 {
            return;
        }
        let runtime = self.runtimes.pick(tape);
        let calls = tape.byte() & 3 == 0;
        let mut handle = null_mut();
        let mut opts = Padded::<kvt_queue_opts_t>::new(tape, |o, t| {
            o.capacity = t.number().min(1 << 21);
            o.flags = u64::from(t.byte() > 250);
            o.callback = if calls { Some(on_batch) } else { None };
            o.user_data = USER;
            o.destroy = if calls { Some(destroy) } else { None };
        });
        let size = u64::from_le_bytes(opts.0[..8].try_into().expect("eight bytes"));
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_queue_open(runtime, opts.ptr(), &mut handle, err) });
        if status == KVT_OK {
            self.queues.live.push(handle);
            // A short struct may end before what it says about destroying.
            let destroy_end = std::mem::offset_of!(kvt_queue_opts_t, destroy) as u64 + 8;
            self.taken += u64::from(calls && size >= destroy_end);
        } else if !self.runtimes.is_live(runtime) {
            assert!(status == KVT_E_HANDLE || status == KVT_E_INVALID || status == KVT_E_TOO_NEW);
        }
    }

    fn open_budget(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.budgets.live.len() >= 3 {
            return;
        }
        let runtime = self.runtimes.pick(tape);
        let mut handle = null_mut();
        let mut opts = Padded::<kvt_budget_opts_t>::new(tape, |o, t| {
            o.flags = t.flags();
            o.host_bytes = t.number();
            o.device_bytes = t.number();
            o.disk_bytes = t.number();
            o.pinned_bytes = t.number();
            o.reserve_bytes = t.number();
        });
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_budget_open(runtime, opts.ptr(), &mut handle, err) });
        self.budgets.live.extend((status == KVT_OK).then_some(handle));
    }

    fn open_account(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.accounts.live.len() >= 6 {
            return;
        }
        let budget = self.budgets.pick(tape);
        let reclaims = tape.byte() & 1 == 0;
        let mut handle = null_mut();
        let name = b"account";
        let mut opts = Padded::<kvt_account_opts_t>::new(&mut Tape(&[]), |o, _| {
            o.priority = i64::from(tape.byte());
            o.name = name.as_ptr().cast();
            o.name_bytes = name.len() as u64;
            o.reclaim = if reclaims { Some(on_reclaim) } else { None };
            o.user_data = USER;
            o.destroy = if reclaims { Some(destroy) } else { None };
        });
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_account_open(budget, opts.ptr(), &mut handle, err) });
        if status == KVT_OK {
            self.accounts.live.push(handle);
            self.taken += u64::from(reclaims);
        }
    }

    fn alloc(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.buffers.live.len() >= 8 {
            return;
        }
        let (runtime, account) = (self.runtimes.pick(tape), self.accounts.pick(tape));
        let mut handle = null_mut();
        let mut opts = Padded::<kvt_buffer_opts_t>::new(tape, |o, t| {
            // Reserved huge pages are the machine's, not this test's.
            o.flags = t.flags() & !KVT_BUFFER_HUGETLB;
            o.bytes = t.number();
            if (1 << 22..1 << 46).contains(&o.bytes) {
                o.bytes = 1 << 22; // large ones may be had on a large machine
            }
            o.align_bytes = if t.byte() > 200 { t.number() } else { 0 };
            o.account = if t.byte() > 128 { account } else { null() };
        });
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_buffer_alloc(runtime, opts.ptr(), &mut handle, err) });
        if status == KVT_OK {
            self.buffers.live.push(handle);
            let (mut address, mut bytes) = (null_mut(), 0);
            // SAFETY: a live handle; the whole buffer is this test's.
            unsafe {
                check(kvt_buffer_address(handle, &mut address, &mut bytes));
                address.cast::<u8>().write(1);
                address.cast::<u8>().add(bytes as usize - 1).write(2);
            }
        }
    }

    fn wrap(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.memory.len() >= 8 {
            return;
        }
        let runtime = self.runtimes.pick(tape);
        let mut memory = vec![0u8; 4096].into_boxed_slice();
        let address = memory.as_mut_ptr().cast::<c_void>();
        let address = if tape.byte() > 240 { null_mut() } else { address };
        let size = if tape.byte() > 240 { 0 } else { memory.len() as u64 };
        let mut handle = null_mut();
        // SAFETY: the memory lives until the machine has freed every buffer.
        let status = check(unsafe {
            kvt_buffer_wrap(runtime, address, size, USER, Some(destroy), &mut handle, err)
        });
        if status == KVT_OK {
            self.buffers.live.push(handle);
            self.taken += 1;
        }
        self.memory.push(memory);
    }

    fn submit(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let runtime = self.runtimes.pick(tape);
        let queue = if tape.byte() > 60 { self.queues.pick(tape) } else { null_mut() };
        let now = self.now();
        let mut opts = Padded::<kvt_submit_opts_t>::new(tape, |o, t| {
            o.flags = t.flags() & if t.byte() > 250 { u64::MAX } else { 1 };
            o.queue = queue;
            o.tag = t.number();
            o.deadline_ns = if t.byte() > 200 { now + t.number() % 100_000 } else { 0 };
            o.notify = if t.byte() > 128 { u32::from(t.byte() & 7) } else { t.number() as u32 & 7 };
            o.priority = if t.byte() > 250 { 3 } else { u32::from(t.byte() % 3) };
        });
        let count = match tape.byte() {
            250.. => usize::from(tape.byte()),
            byte => 1 + byte as usize % 3,
        };
        let items: Vec<kvt_buffer_item_t> = (0..count).map(|_| self.item(tape)).collect();
        let right = size_of::<kvt_buffer_item_t>();
        let stride = size_field(tape, right).min(right as u64);
        let wants = tape.byte() > 60;
        let mut handles = vec![null_mut(); count.max(1)];
        let to = if wants { handles.as_mut_ptr() } else { null_mut() };
        // SAFETY: the array is at least as long as stated, handles have room.
        let status = check(unsafe {
            kvt_buffer_submit(runtime, opts.ptr(), items.as_ptr(), count as u64, stride, to, err)
        });
        let made = handles.into_iter().filter(|h: &*mut kvt_op_t| !h.is_null());
        let made: Vec<_> = made.collect();
        assert!(status == KVT_OK || made.is_empty(), "an output was written on failure");
        assert!(status != KVT_OK || wants != made.is_empty());
        self.ops.live.extend(made);
        if status == KVT_OK {
            SUBMITTED.fetch_add(1, Ordering::SeqCst);
            assert!(self.runtimes.is_live(runtime), "a dead runtime took work");
        }
    }

    fn item(&self, tape: &mut Tape) -> kvt_buffer_item_t {
        // SAFETY: zero is a valid value.
        let mut item: kvt_buffer_item_t = unsafe { std::mem::zeroed() };
        let kinds = [1, 2, 3, 4, 5, 6, 7, 8];
        item.kind = match tape.byte() {
            250.. => tape.number() as u32,
            byte => kinds[byte as usize % kinds.len()],
        };
        if item.kind & KVT_DO_COPY != 0 || item.kind == KVT_DO_PREFAULT {
            item.dst = self.buffers.pick(tape);
        }
        if item.kind != KVT_DO_PREFAULT {
            item.src = self.buffers.pick(tape);
        }
        item.bytes = tape.number() % if tape.byte() > 230 { u64::MAX } else { 64 };
        item.dst_offset = if tape.byte() > 230 { tape.number() } else { 0 };
        item.src_offset = if tape.byte() > 230 { tape.number() } else { 0 };
        item.flags = u32::from(tape.byte() > 252);
        item
    }

    fn reserve_later(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let account = self.accounts.pick(tape);
        let queue = if tape.byte() > 100 { self.queues.pick(tape) } else { null_mut() };
        let deadline = self.now() + 100_000;
        let mut opts = Padded::<kvt_submit_opts_t>::new(tape, |o, t| {
            o.queue = queue;
            o.deadline_ns = if t.byte() > 128 { deadline } else { 0 };
        });
        let mut op = null_mut();
        let to = if tape.byte() > 60 { &raw mut op } else { null_mut() };
        let (tier, bytes) = (u32::from(tape.byte() % 6), tape.number());
        // SAFETY: valid pointers.
        let status =
            check(unsafe { kvt_account_reserve_later(account, tier, bytes, opts.ptr(), to, err) });
        assert!(status == KVT_OK || op.is_null());
        self.ops.live.extend((!op.is_null()).then_some(op));
    }

    fn account_calls(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let account = self.accounts.pick(tape);
        let tier = u32::from(tape.byte() % 6);
        let (a, b) = (tape.number(), tape.number());
        let (mut reserved, mut used) = (0, 0);
        // SAFETY: valid pointers.
        unsafe {
            check(match tape.byte() % 4 {
                0 => kvt_account_reserve(account, tier, a, err),
                1 => kvt_account_commit(account, tier, a, b, err),
                2 => kvt_account_release(account, tier, a, err),
                _ => kvt_account_held(account, tier, &mut reserved, &mut used),
            });
        }
    }

    fn budget_calls(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let budget = self.budgets.pick(tape);
        let tier = u32::from(tape.byte() % 6);
        let bytes = tape.number();
        let mut report = out::<kvt_tier_report_t>();
        let mut machine = out::<kvt_budget_report_t>();
        // SAFETY: valid pointers.
        unsafe {
            check(kvt_budget_resize(budget, tier, bytes, err));
            check(kvt_budget_report(budget, machine.ptr()));
            if check(kvt_budget_tier(budget, tier, report.ptr())) == KVT_OK {
                let r = report.ptr().read_unaligned();
                assert!(r.peak_bytes >= r.reserved_bytes.saturating_add(r.committed_bytes));
            }
        }
    }

    fn drain(&mut self, tape: &mut Tape) {
        let queue = self.queues.pick(tape);
        let deadline = self.now() + 50_000;
        // SAFETY: zero is a valid value.
        let mut entries: [kvt_completion_t; 16] = unsafe { std::mem::zeroed() };
        let right = size_of::<kvt_completion_t>();
        let stride = size_field(tape, right).min(right as u64);
        let (mut n, mut fd) = (u64::MAX, -1);
        // SAFETY: the array is at least as long as stated.
        let status = check(unsafe {
            match tape.byte() % 3 {
                0 => kvt_queue_wait(queue, deadline, entries.as_mut_ptr(), 16, stride, &mut n),
                1 => kvt_queue_poll(queue, entries.as_mut_ptr(), 16, stride, &mut n),
                _ => kvt_queue_fd(queue, &mut fd),
            }
        });
        if status == KVT_OK && fd < 0 {
            assert!(n <= 16, "{n} entries in room for 16");
            assert!(self.queues.is_live(queue));
        }
    }

    fn look_at_op(&mut self, tape: &mut Tape) {
        let op = self.ops.pick(tape);
        let deadline = self.now() + 20_000;
        let mut info = out::<kvt_op_info_t>();
        // SAFETY: zero is a valid value.
        let mut items: [kvt_op_item_t; 8] = unsafe { std::mem::zeroed() };
        let (mut n, mut error) = (0, null_mut());
        // SAFETY: valid pointers.
        unsafe {
            let status = check(kvt_op_info(op, info.ptr()));
            if self.ops.is_live(op) && status == KVT_OK {
                let info = info.ptr().read_unaligned();
                assert!(info.items_failed <= info.items_done && info.items_done <= info.items);
                assert!(info.state & KVT_OP_RELEASED == 0 || info.state & KVT_OP_RESOLVED != 0);
            }
            match tape.byte() % 4 {
                0 => check(kvt_op_wait(op, tape.number() as u32 & 15, deadline)),
                1 => check(kvt_op_cancel(op)),
                2 => check(kvt_op_items(op, tape.number() & 63, items.as_mut_ptr(), 8, 16, &mut n)),
                _ => check(kvt_op_error(op, &mut error)),
            };
            check(kvt_error_free(&mut error));
        }
    }

    fn free_op(&mut self, tape: &mut Tape) {
        let before = self.ops.pick(tape);
        let mut op = before;
        // SAFETY: a local handle variable.
        let status = check(unsafe { kvt_op_free(&mut op) });
        if status == KVT_E_HANDLE && self.ops.is_live(before) {
            // The callback of its queue freed it.
            self.ops.live.retain(|h| *h != before);
            self.ops.dead.push(before);
            return;
        }
        self.ops.freed(before, op, status);
    }

    fn free_buffer(&mut self, tape: &mut Tape) {
        let before = self.buffers.pick(tape);
        let mut buffer = before;
        // SAFETY: a local handle variable.
        let status = check(unsafe { kvt_buffer_free(&mut buffer) });
        self.buffers.freed(before, buffer, status);
    }

    fn close_something(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let deadline = self.now() + 50_000;
        // SAFETY: local handle variables throughout.
        unsafe {
            match tape.byte() % 16 {
                0 => {
                    let before = self.runtimes.pick(tape);
                    let mut runtime = before;
                    let status = check(kvt_runtime_close(&mut runtime, 0, null_mut(), err));
                    self.runtimes.freed(before, runtime, status);
                }
                1..=4 => {
                    let before = self.queues.pick(tape);
                    let mut queue = before;
                    let status = check(kvt_queue_close(&mut queue, deadline, err));
                    self.queues.freed(before, queue, status);
                }
                5..=7 => {
                    let before = self.budgets.pick(tape);
                    let mut budget = before;
                    let status = check(kvt_budget_close(&mut budget, err));
                    self.budgets.freed(before, budget, status);
                }
                _ => {
                    let before = self.accounts.pick(tape);
                    let mut account = before;
                    let status = check(kvt_account_close(&mut account, err));
                    self.accounts.freed(before, account, status);
                }
            }
        }
    }

    fn statistics(&mut self, tape: &mut Tape) {
        let (mut a, mut b) = (out::<kvt_runtime_stats_t>(), out::<kvt_queue_stats_t>());
        let (mut c, mut d) = (out::<kvt_buffer_info_t>(), out::<kvt_feature_t>());
        let queue = self.queues.pick(tape);
        // SAFETY: valid pointers.
        unsafe {
            check(kvt_runtime_stats(self.runtimes.pick(tape), a.ptr()));
            if check(kvt_queue_stats(queue, b.ptr())) == KVT_OK {
                let stats = b.ptr().read_unaligned();
                assert!(stats.pending + stats.reserved <= stats.capacity);
            }
            check(kvt_buffer_info(self.buffers.pick(tape), c.ptr()));
            check(kvt_feature_at(3, d.ptr()));
            assert!(!kvt_status_name(tape.number() as i32).is_null());
            assert!(!kvt_status_str(tape.number() as i32).is_null());
        }
    }

    fn texts(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let n = (tape.byte() as usize % 64).min(tape.0.len());
        let (text, rest) = tape.0.split_at(n);
        tape.0 = rest;
        let mut room = [0u8; 32];
        let (mut bytes, mut value) = (0, 0);
        // SAFETY: pointers with their lengths; the log callback is this test's.
        unsafe {
            let (at, len) = (text.as_ptr().cast::<c_char>(), text.len() as u64);
            check(kvt_spec_check(at, len, room.as_mut_ptr().cast(), 32, &mut bytes, err));
            check(kvt_feature_find(at, len, out::<kvt_feature_t>().ptr(), err));
            check(kvt_checksum(at.cast(), len, &mut value));
            check(kvt_checksum(null(), len, &mut value));
            check(kvt_version(&mut value));
            check(kvt_abi_check(tape.number(), err));
            let sink: kvt_log_fn = if tape.byte() & 1 == 0 { None } else { Some(on_log) };
            check(kvt_log_set(u32::from(tape.byte() % 8), sink, null_mut(), None, err));
            assert!(!kvt_error_message(self.err).is_null());
        }
    }

    /// Frees everything in the order the manual gives; nothing may resist.
    fn take_down(&mut self) {
        // SAFETY: handles this machine made, each in a variable of its own.
        unsafe {
            // All of them first: a move by layers ends once all of its ops were cancelled.
            let freed = |op: &*mut kvt_op_t| kvt_op_cancel(*op) == KVT_E_HANDLE;
            let gone: Vec<bool> = self.ops.live.iter().map(freed).collect();
            for (op, gone) in self.ops.live.iter_mut().zip(gone) {
                if gone {
                    continue; // freed by its queue's callback
                }
                let waited = kvt_op_wait(*op, KVT_OP_RELEASED, 0);
                assert!(waited == KVT_OK || waited == KVT_E_HANDLE);
                let freed = kvt_op_free(op);
                assert!(freed == KVT_OK || freed == KVT_E_HANDLE, "{freed}");
            }
            self.kv.take_down();
            self.streams.take_down();
            self.devices.take_down();
            self.sparse.take_down();
            self.jobs.take_down();
            for policy in &mut self.policies.live {
                assert_eq!(kvt_policy_close(policy), KVT_OK);
            }
            for trace in &mut self.traces.live {
                assert_eq!(kvt_trace_free(trace), KVT_OK);
            }
            for queue in &mut self.queues.live {
                assert_eq!(kvt_queue_close(queue, 0, null_mut()), KVT_OK);
            }
            for budget in &mut self.budgets.live {
                assert_eq!(kvt_budget_close(budget, null_mut()), KVT_OK);
            }
            for runtime in &mut self.runtimes.live {
                assert_eq!(kvt_runtime_close(runtime, 0, null_mut(), null_mut()), KVT_OK);
            }
            for buffer in &mut self.buffers.live {
                assert_eq!(kvt_buffer_free(buffer), KVT_OK);
            }
            for account in &mut self.accounts.live {
                for tier in 0..5 {
                    let (mut reserved, mut used) = (0, 0);
                    check(kvt_account_held(*account, tier, &mut reserved, &mut used));
                    check(kvt_account_commit(*account, tier, reserved, 0, null_mut()));
                    check(kvt_account_release(*account, tier, used, null_mut()));
                }
                assert_eq!(kvt_account_close(account, null_mut()), KVT_OK);
            }
            check(kvt_log_set(0, None, null_mut(), None, null_mut()));
            check(kvt_error_free(&mut self.err));
        }
        self.memory.clear();
    }
}
