//! The machine's instructions for devices: of the processor, simulated ones, and one of the
//! machine's own, which copies at once and has a batch fail now and then. Bytes that have come
//! are compared with what was sent.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use kvtier::ffi::device::*;
use kvtier::ffi::device_custom::*;
use kvtier::ffi::device_event::*;
use kvtier::ffi::device_kernel::*;
use kvtier::ffi::device_move::*;
use kvtier::ffi::device_test::*;
use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::runtime::kvt_runtime_t;
use kvtier::ffi::sparse_ask::*;
use kvtier::ffi::status::*;
use kvtier::ffi::stream::kvt_held_t;
use kvtier::ffi::view::*;

use super::{AtomicU64, COPIED, Machine, Ordering, Padded, Shelf, Tape, USER, check, destroy, out};

/// Tokens of a copy, and what one has and is apart.
const TOKENS: u32 = 12;
const RUN: usize = 40;
const STEP: usize = 56;
const PLANE: usize = TOKENS as usize * RUN;
/// Most that the machine's own device gives.
const MOST: u64 = 1 << 22;

/// Bytes on their way.
struct Move {
    device: *mut kvt_device_t,
    event: u64,
    from: Vec<u8>,
    to: Vec<u8>,
}

/// What the machine has of devices.
pub(super) struct Devices {
    pub(super) devices: Shelf<kvt_device_t>,
    memory: Vec<(*mut kvt_device_t, kvt_device_memory_t)>,
    events: Vec<(*mut kvt_device_t, u64)>,
    moves: Vec<Move>,
    known: Vec<u8>,
    sent: u8,
}

impl Devices {
    pub(super) fn new() -> Devices {
        Devices {
            devices: Shelf::new(),
            memory: Vec::new(),
            events: Vec::new(),
            moves: Vec::new(),
            known: vec![0; 8192],
            sent: 0,
        }
    }

    pub(super) fn take_down(&mut self) {
        for device in &mut self.devices.live {
            // SAFETY: handles this machine made.
            assert_eq!(unsafe { kvt_device_close(device, 0, null_mut()) }, KVT_OK);
        }
        self.moves.clear();
    }

    /// Compares what has come, and forgets it.
    fn settle(&mut self, device: *mut kvt_device_t, event: u64, status: i32) {
        if status != KVT_OK && status != KVT_E_IO {
            return; // the device may still use the memory
        }
        self.moves.retain(|moved| {
            if (moved.device, moved.event) != (device, event) {
                return true;
            }
            if status == KVT_OK {
                for (token, run) in moved.to.chunks_exact(RUN).enumerate() {
                    let sent = &moved.from[token * STEP..][..RUN];
                    assert_eq!(run, sent, "token {token} is not what was sent");
                }
                COPIED.fetch_add(1, Ordering::SeqCst);
            }
            false
        });
    }
}

static EVENTS: AtomicU64 = AtomicU64::new(0);

fn of_this_machine(user_data: *mut c_void) {
    // A short struct may end before the user data.
    assert!(user_data.is_null() || user_data == USER);
}

/// The next event: one of many has failed.
fn next_event() -> u64 {
    1 + EVENTS.fetch_add(1, Ordering::SeqCst)
}

unsafe extern "C" fn submit(
    user_data: *mut c_void,
    stream: u32,
    _after: u64,
    copies: *const kvt_copy_rows_t,
    count: u64,
    stride: u64,
    event: *mut u64,
) -> kvt_status_t {
    of_this_machine(user_data);
    assert!(stream < 3 && stride as usize == size_of::<kvt_copy_rows_t>());
    for i in 0..count as usize {
        // SAFETY: the library's promise about copies; sources and targets are apart.
        unsafe {
            let copy = copies.add(i).read();
            for run in 0..copy.runs {
                let from = copy.from + run * copy.from_stride_bytes;
                let to = copy.to + run * copy.to_stride_bytes;
                let (from, to) = (from as usize as *const u8, to as usize as *mut u8);
                from.copy_to_nonoverlapping(to, copy.run_bytes as usize);
            }
        }
    }
    // SAFETY: the library's promise.
    unsafe { event.write(next_event()) };
    KVT_OK
}

unsafe extern "C" fn launch(
    user_data: *mut c_void,
    _stream: u32,
    _after: u64,
    kernels: *const kvt_kernel_t,
    count: u64,
    _stride: u64,
    event: *mut u64,
) -> kvt_status_t {
    of_this_machine(user_data);
    for i in 0..count as usize {
        // SAFETY: the library's promise about kernels.
        assert_eq!(unsafe { (*kernels.add(i)).kind }, KVT_LAUNCH_TOP);
    }
    // SAFETY: the library's promise.
    unsafe { event.write(next_event()) };
    KVT_OK
}

unsafe extern "C" fn query(user_data: *mut c_void, event: u64) -> kvt_status_t {
    of_this_machine(user_data);
    if event % 61 == 0 { KVT_E_IO } else { KVT_OK }
}

unsafe extern "C" fn wait(user_data: *mut c_void, _event: u64, _deadline_ns: u64) -> kvt_status_t {
    of_this_machine(user_data);
    KVT_OK
}

unsafe extern "C" fn release(user_data: *mut c_void, event: u64) {
    of_this_machine(user_data);
    assert!((1..=EVENTS.load(Ordering::SeqCst)).contains(&event));
}

unsafe extern "C" fn allocate(user_data: *mut c_void, bytes: u64, at: *mut u64) -> kvt_status_t {
    of_this_machine(user_data);
    if bytes > MOST {
        return KVT_E_NOMEM;
    }
    let layout = Layout::from_size_align(bytes as usize, 256).expect("a small layout");
    // SAFETY: it is not empty, and the library's promise.
    unsafe { at.write(alloc(layout) as u64) };
    KVT_OK
}

unsafe extern "C" fn free(user_data: *mut c_void, address: u64, bytes: u64) {
    of_this_machine(user_data);
    let layout = Layout::from_size_align(bytes as usize, 256).expect("a small layout");
    // SAFETY: as it was given.
    unsafe { dealloc(address as usize as *mut u8, layout) };
}

unsafe extern "C" fn free_bytes(user_data: *mut c_void, bytes: *mut u64) -> kvt_status_t {
    of_this_machine(user_data);
    // SAFETY: the library's promise.
    unsafe { bytes.write(MOST) };
    KVT_OK
}

unsafe extern "C" fn adopt(user_data: *mut c_void, raw: u64, event: *mut u64) -> kvt_status_t {
    of_this_machine(user_data);
    // SAFETY: the library's promise.
    unsafe { event.write(next_event()) };
    if raw == 0 { KVT_E_HANDLE } else { KVT_OK }
}

unsafe extern "C" fn promise(user_data: *mut c_void, event: *mut u64) -> kvt_status_t {
    // SAFETY: the library's promise.
    unsafe { adopt(user_data, 1, event) }
}

unsafe extern "C" fn keep(user_data: *mut c_void, _event: u64) -> kvt_status_t {
    of_this_machine(user_data);
    KVT_OK
}

unsafe extern "C" fn hold(user_data: *mut c_void, raw: u64, _event: u64) -> kvt_status_t {
    of_this_machine(user_data);
    if raw == 0 { KVT_E_HANDLE } else { KVT_OK }
}

/// The machine's own device, mostly whole.
fn table(tape: &mut Tape) -> Padded<kvt_device_custom_t> {
    Padded::<kvt_device_custom_t>::new(tape, |c, t| {
        c.streams = if t.byte() > 250 { t.number() as u32 } else { 3 };
        c.flags = if t.byte() > 128 { KVT_DEVICE_HAS_MEMORY } else { 0 };
        if t.byte() > 250 {
            c.flags = t.flags();
        }
        c.reserved = u32::from(t.byte() > 253);
        c.submit = if t.byte() > 253 { None } else { Some(submit) };
        c.query = if t.byte() > 253 { None } else { Some(query) };
        c.wait = if t.byte() > 128 { None } else { Some(wait) };
        c.release = if t.byte() > 128 { None } else { Some(release) };
        c.allocate = if t.byte() > 250 { None } else { Some(allocate) };
        c.free = if t.byte() > 250 { None } else { Some(free) };
        if t.byte() > 128 {
            c.adopt = Some(adopt);
            c.hold = Some(hold);
        }
        if t.byte() > 128 {
            c.promise = Some(promise);
            c.keep = if t.byte() > 250 { None } else { Some(keep) };
        }
        c.free_bytes = if t.byte() > 128 { None } else { Some(free_bytes) };
        c.kernels = if t.byte() > 128 { 1 << KVT_LAUNCH_TOP } else { 0 };
        c.launch = if (c.kernels != 0) == (t.byte() <= 250) { Some(launch) } else { None };
        c.user_data = USER;
        c.destroy = Some(destroy);
    })
}

/// Tokens with gaps between them.
fn view_of(from: &mut [u8]) -> kvt_view_t {
    kvt_view_t {
        address: from.as_mut_ptr().cast(),
        pages: null(),
        page_count: 0,
        shift_bytes: 0,
        page_tokens: 0,
        tokens: TOKENS,
        heads: 1,
        memory: KVT_MEMORY_HOST,
        run_bytes: RUN as u64,
        token_stride_bytes: STEP as u64,
        head_stride_bytes: 0,
    }
}

fn copy_of(view: kvt_view_t, plane: *mut c_void, memory: u32, way: u32) -> kvt_copy_t {
    let (flags, sum) = (KVT_COPY_SUM, 0);
    kvt_copy_t { flags, view, plane, plane_memory: memory, way, first_token: 0, tokens: 0, sum }
}

const STRIDE: u64 = size_of::<kvt_copy_t>() as u64;

impl Machine {
    pub(super) fn use_devices(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 24 {
            0..=2 => self.open_device(tape, err),
            3 => self.look_at_device(tape),
            4 | 5 => self.allocate_there(tape, err),
            6 => self.free_there(tape, err),
            7 => self.know_host(tape, err),
            8..=12 => self.copy_there(tape, err),
            13 => self.copy_badly(tape, err),
            14..=17 => self.ask_of_events(tape, err),
            18 => self.release_events(tape, err),
            19 => self.own_events(tape, err),
            20 => self.launch_kernels(tape, err),
            21 => self.refused_tests(tape, err),
            22 => self.poll_events(tape),
            _ => self.close_device(tape, err),
        }
    }

    /// A device for a store or a streamer: mostly none.
    pub(super) fn some_device(&self, tape: &mut Tape) -> *const kvt_device_t {
        if tape.byte() < 180 { null() } else { self.devices.devices.pick(tape) }
    }

    /// An event of a device that a streamer has.
    pub(super) fn mark(&self, device: *const kvt_device_t) -> u64 {
        let mut event = 0;
        // SAFETY: there is nothing to copy.
        let status = check(unsafe {
            kvt_device_copy(device, 0, 0, null_mut(), 0, STRIDE, &mut event, null_mut())
        });
        assert_eq!(status, KVT_OK);
        event
    }

    /// Brings a unit from a device that a streamer has, when it is complete; whether it came.
    pub(super) fn bring(
        &self,
        device: *const kvt_device_t,
        held: &kvt_held_t,
        to: &mut [u8],
    ) -> bool {
        let mut view = view_of(&mut []);
        (view.address, view.memory) = (held.address.cast_mut().cast(), held.memory);
        (view.tokens, view.run_bytes, view.token_stride_bytes) = (1, held.bytes, 0);
        let mut copy = copy_of(view, to.as_mut_ptr().cast(), KVT_MEMORY_HOST, KVT_COPY_GATHER);
        let (mut event, after) = (0, held.event);
        // SAFETY: the unit is the machine's, and this waits until the copy has ended.
        unsafe {
            let status =
                kvt_device_copy(device, 1, after, &mut copy, 1, STRIDE, &mut event, null_mut());
            if check(status) == KVT_E_IO {
                return false; // the unit's own copies have failed
            }
            assert_eq!(status, KVT_OK);
            let came = check(kvt_device_wait(device, event, 0, null_mut()));
            assert!(came == KVT_OK || came == KVT_E_IO, "{came}");
            assert_eq!(check(kvt_device_release(device, &event, 1, null_mut())), KVT_OK);
            came == KVT_OK
        }
    }

    /// A device for a streamer, null where there is no room for one.
    pub(super) fn simulated_device(&mut self, runtime: *mut kvt_runtime_t) -> *const kvt_device_t {
        if self.devices.devices.live.len() >= 6 {
            return null();
        }
        let mut opts = Padded::<kvt_device_opts_t>::new(&mut Tape(&[]), |o, _| {
            (o.kind, o.memory_bytes) = (KVT_DEVICE_SIMULATED, MOST);
        });
        let mut device = null_mut();
        // SAFETY: valid pointers.
        let status = unsafe { kvt_device_open(runtime, opts.ptr(), &mut device, null_mut()) };
        self.devices.devices.live.extend((check(status) == KVT_OK).then_some(device));
        device
    }

    fn open_device(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.devices.devices.live.len() >= 4 {
            return;
        }
        let runtime = self.runtimes.pick(tape);
        let mut custom = table(tape);
        let custom_bytes = u64::from_le_bytes(custom.0[..8].try_into().expect("eight bytes"));
        let path = b"/nonexistent/libcuda.so.1";
        let mut opts = Padded::<kvt_device_opts_t>::new(tape, |o, t| {
            o.kind = [1, 3, 4][usize::from(t.byte() % 3)];
            match t.byte() {
                250 => o.kind = t.number() as u32 | 8,
                251 | 252 => o.kind = KVT_DEVICE_CUDA,
                253 => o.seed = t.number(),
                254 => o.flags = t.flags(),
                255 => o.ordinal = 1,
                249 => (o.arena, o.arena_bytes) = (t.number(), t.number()),
                _ => {}
            }
            if o.kind == KVT_DEVICE_CUDA {
                (o.library, o.library_bytes) = (path.as_ptr().cast::<c_char>(), path.len() as u64);
            }
            if o.kind == KVT_DEVICE_CUSTOM || t.byte() > 250 {
                o.custom = custom.ptr();
            }
            if o.kind == KVT_DEVICE_SIMULATED {
                o.flags |= [0, KVT_DEVICE_VERIFY][usize::from(t.byte() % 2)];
                (o.seed, o.latency_ns) = (t.number(), 1 + u64::from(t.byte()) * 500);
                o.memory_bytes = if t.byte() > 128 { 0 } else { 1 << 20 };
            }
        });
        let mut device = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_device_open(runtime, opts.ptr(), &mut device, err) });
        assert_eq!(status == KVT_OK, !device.is_null());
        if status != KVT_OK {
            return;
        }
        self.devices.devices.live.push(device);
        let mut info = out::<kvt_device_info_t>();
        // SAFETY: a live handle and a valid output.
        check(unsafe { kvt_device_info(device, info.ptr()) });
        // SAFETY: it was written.
        let own = unsafe { info.ptr().read_unaligned() }.kind == KVT_DEVICE_CUSTOM;
        let whole = std::mem::offset_of!(kvt_device_custom_t, destroy) as u64 + 8;
        self.taken += u64::from(own && custom_bytes >= whole);
    }

    fn look_at_device(&mut self, tape: &mut Tape) {
        let device = self.devices.devices.pick(tape);
        let mut info = out::<kvt_device_info_t>();
        let (mut words, mut bytes) = ([0; 64], 0);
        // SAFETY: outputs with their lengths.
        unsafe {
            if check(kvt_device_info(device, info.ptr())) == KVT_OK {
                let info = info.ptr().read_unaligned();
                assert!(info.streams >= 1 && info.streams <= 64 && info.kind <= 4);
            }
            let room = u64::from(tape.byte() % 65);
            check(kvt_device_words(device, words.as_mut_ptr(), room, &mut bytes));
            check(kvt_device_words(device, null_mut(), 0, null_mut()));
        }
    }

    fn allocate_there(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.devices.memory.len() >= 12 {
            return;
        }
        let device = self.devices.devices.pick(tape);
        let mut memory = out::<kvt_device_memory_t>();
        let bytes = match tape.byte() {
            230.. => tape.number() | 1 << 50,
            210..=229 => 0,
            byte => 4096 * (1 + u64::from(byte % 4)),
        };
        // SAFETY: valid pointers.
        unsafe {
            if check(kvt_device_alloc(device, bytes, memory.ptr(), err)) == KVT_OK {
                let memory = memory.ptr().read_unaligned();
                assert!(memory.address % 256 == 0 && memory.bytes == bytes && bytes > 0);
                self.devices.memory.push((device, memory));
            }
        }
    }

    /// Whether nothing is on its way on a device that was not waited for.
    fn is_quiet(&self, device: *mut kvt_device_t) -> bool {
        self.devices.moves.iter().all(|moved| moved.device != device)
    }

    fn free_there(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let wrong = self.devices.devices.pick(tape);
        let Some(&(device, memory)) = self.devices.memory.last() else { return };
        if !self.is_quiet(device) {
            return;
        }
        // SAFETY: nobody uses the memory.
        unsafe {
            if wrong != device && tape.byte() > 128 {
                assert_ne!(check(kvt_device_free(wrong, &memory, err)), KVT_OK);
            }
            let other = kvt_device_memory_t { address: memory.address + 256, ..memory };
            assert_ne!(check(kvt_device_free(device, &other, err)), KVT_OK);
            let status = check(kvt_device_free(device, &memory, err));
            if self.devices.devices.is_live(device) {
                assert_eq!(status, KVT_OK);
            }
            assert_ne!(check(kvt_device_free(device, &memory, err)), KVT_OK);
            check(kvt_device_free(device, null(), err));
        }
        self.devices.memory.pop();
    }

    fn know_host(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let device = self.devices.devices.pick(tape);
        let at: *mut c_void = self.devices.known.as_mut_ptr().cast();
        let bytes = if tape.byte() > 230 { 0 } else { 8192 };
        // SAFETY: the memory stays as long as the machine; nothing uses it.
        unsafe {
            check(kvt_device_know_host(device, at, bytes, err));
            check(kvt_device_know_host(device, null_mut(), 8192, err));
            check(kvt_device_know_host(device, at, u64::MAX, err));
            check(kvt_device_forget_host(device, at, err));
            check(kvt_device_forget_host(device, null_mut(), err));
        }
    }

    /// Tokens go to a plane, by way of the device's memory where it has some.
    fn copy_there(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let device = self.devices.devices.pick(tape);
        if self.devices.moves.len() >= 24 || self.devices.events.len() >= 200 {
            return;
        }
        self.devices.sent = self.devices.sent.wrapping_add(1);
        let sent = self.devices.sent;
        let mut from: Vec<u8> =
            (0..TOKENS as usize * STEP).map(|i| (i as u8).wrapping_mul(7) ^ sent).collect();
        let mut to = vec![0; PLANE];
        let stream = if tape.byte() > 250 { tape.number() as u32 } else { 0 };
        let view = view_of(&mut from);
        let mut first = copy_of(view, to.as_mut_ptr().cast(), KVT_MEMORY_HOST, KVT_COPY_GATHER);
        let there = self.devices.memory.iter().rfind(|(of, _)| *of == device);
        let by_way = there.copied().filter(|_| self.is_quiet(device) && tape.byte() > 100);
        if let Some((_, memory)) = by_way {
            (first.plane, first.plane_memory) =
                (memory.address as usize as *mut c_void, memory.memory);
        }
        // SAFETY: arrays with their lengths; nobody touches the memory before the event.
        let (status, event) = unsafe { self.submit_copy(device, stream, 0, &mut first, err) };
        if status != KVT_OK {
            return;
        }
        let mut last = event;
        if by_way.is_some() {
            // From one plane to another: heads of a view without gaps.
            let mut view = view_of(&mut to);
            view.token_stride_bytes = RUN as u64;
            let (plane, memory) = (first.plane, first.plane_memory);
            let mut back = copy_of(view, plane, memory, KVT_COPY_SCATTER);
            // SAFETY: as above.
            let (status, event) = unsafe { self.submit_copy(device, 0, last, &mut back, err) };
            if status != KVT_OK {
                // `after` has failed; the first copy still reads what it was given.
                let moved = Move { device, event: last, from, to: Vec::new() };
                self.devices.moves.push(moved);
                return;
            }
            last = event;
        }
        self.devices.moves.push(Move { device, event: last, from, to });
    }

    /// # Safety
    /// The copy's memory is right, and nobody touches it before the event.
    unsafe fn submit_copy(
        &mut self,
        device: *mut kvt_device_t,
        stream: u32,
        after: u64,
        copy: &mut kvt_copy_t,
        err: *mut *mut kvt_error_t,
    ) -> (i32, u64) {
        let mut event = 0;
        // SAFETY: the caller's promise.
        let status = check(unsafe {
            kvt_device_copy(device, stream, after, copy, 1, STRIDE, &mut event, err)
        });
        assert_eq!(status == KVT_OK, event != 0);
        if status == KVT_OK {
            assert!(self.devices.devices.is_live(device), "a dead device took work");
            self.devices.events.push((device, event));
        }
        (status, event)
    }

    /// What must be refused, or has nothing to copy.
    fn copy_badly(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let device = self.devices.devices.pick(tape);
        let (mut from, mut to) = (vec![1; TOKENS as usize * STEP], vec![2; PLANE]);
        let view = view_of(&mut from);
        let mut copy = copy_of(view, to.as_mut_ptr().cast(), KVT_MEMORY_HOST, KVT_COPY_GATHER);
        let (mut count, mut stride, mut event, mut after) = (1, STRIDE, 0, 0);
        match tape.byte() % 14 {
            0 => copy.way = 2 + u32::from(tape.byte()),
            1 => copy.flags = tape.number() | 2,
            2 => copy.plane = null_mut(),
            3 => copy.plane_memory = 2,
            4 => copy.view.memory = 7,
            5 => copy.view.run_bytes = 0,
            6 => copy.view.tokens = 0,
            7 => copy.first_token = TOKENS + 1 + u32::from(tape.byte()),
            8 => copy.tokens = TOKENS + 1,
            9 => copy.view.address = null_mut(),
            10 => count = (1 << 16) + 1,
            11 => stride = u64::from(tape.byte() % 8) + 1,
            12 => after = tape.number() | 1 << 60,
            _ => copy.view.page_tokens = 5,
        }
        // SAFETY: refused before anything is read or written.
        unsafe {
            let status =
                kvt_device_copy(device, 0, after, &mut copy, count, stride, &mut event, err);
            assert_ne!(check(status), KVT_OK);
            check(kvt_device_copy(device, 0, 0, null_mut(), 0, STRIDE, null_mut(), err));
            if check(kvt_device_copy(device, 0, 0, null_mut(), 0, STRIDE, &mut event, err))
                == KVT_OK
            {
                self.devices.events.push((device, event));
            }
        }
        assert!(to.iter().all(|byte| *byte == 2), "a copy that was refused was begun");
    }

    /// Mostly an event that there is, and its device.
    pub(super) fn pick_event(&self, tape: &mut Tape) -> (*mut kvt_device_t, u64) {
        let n = usize::from(tape.byte());
        match n {
            0..=220 if !self.devices.events.is_empty() => {
                self.devices.events[n % self.devices.events.len()]
            }
            _ => (self.devices.devices.pick(tape), tape.number()),
        }
    }

    fn ask_of_events(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let (device, event) = self.pick_event(tape);
        let deadline_ns = self.now() + 1 + u64::from(tape.byte()) * 10_000;
        // SAFETY: valid pointers.
        let status = check(unsafe {
            match tape.byte() % 3 {
                0 => kvt_device_query(device, event),
                _ => kvt_device_wait(device, event, deadline_ns, err),
            }
        });
        let (mut sums, mut count) = ([0; 3], u64::MAX);
        let room = u64::from(tape.byte() % 4);
        // SAFETY: room for as many.
        let told = check(unsafe {
            kvt_device_sums(device, event, sums.as_mut_ptr(), room, &mut count, err)
        });
        assert!(told != KVT_OK || count <= room, "{count} sums of {room}");
        let known = self.devices.events.contains(&(device, event));
        if known && self.devices.devices.is_live(device) {
            let told = [KVT_OK, KVT_E_AGAIN, KVT_E_TIMEOUT, KVT_E_IO];
            assert!(told.contains(&status), "an event that is there: {status}");
        }
        self.devices.settle(device, event, status);
    }

    fn poll_events(&mut self, tape: &mut Tape) {
        let device = self.devices.devices.pick(tape);
        let (mut events, mut count) = ([0; 80], u64::MAX);
        let room = if tape.byte() > 250 { 65_537 } else { u64::from(tape.byte() % 81) };
        // SAFETY: room for as many, or it is refused.
        unsafe {
            if check(kvt_device_poll(device, events.as_mut_ptr(), room, &mut count)) == KVT_OK {
                assert!(count <= room);
                let told = &events[..count as usize];
                // A store or a streamer may have it, too.
                assert!(told.iter().all(|event| *event != 0));
            }
            check(kvt_device_poll(device, null_mut(), 4, &mut count));
            check(kvt_device_poll(device, events.as_mut_ptr(), 4, null_mut()));
        }
    }

    fn release_events(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        for _ in 0..=tape.byte() % 8 {
            let (device, event) = self.pick_event(tape);
            // Those that were sent are compared first.
            // SAFETY: valid pointers.
            let state = check(unsafe { kvt_device_query(device, event) });
            self.devices.settle(device, event, state);
            // SAFETY: as above.
            let status = check(unsafe { kvt_device_release(device, &event, 1, err) });
            if status != KVT_OK {
                continue;
            }
            self.devices.events.retain(|one| *one != (device, event));
        }
        let device = self.devices.devices.pick(tape);
        // SAFETY: null, or refused by its length.
        unsafe {
            check(kvt_device_release(device, null(), 0, err));
            assert_ne!(check(kvt_device_release(device, null(), 1, err)), KVT_OK);
            assert_ne!(check(kvt_device_release(device, &0, 65_537, err)), KVT_OK);
        }
    }

    fn own_events(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let (device, event) = self.pick_event(tape);
        let (raw, mut made) = (u64::from(tape.byte() % 8), 0);
        // SAFETY: only the machine's own device knows any.
        unsafe {
            if check(kvt_device_adopt(device, raw, &mut made, err)) == KVT_OK {
                assert!(raw != 0 && made != 0);
                self.devices.events.push((device, made));
            }
            check(kvt_device_adopt(device, raw, null_mut(), err));
            check(kvt_device_hold(device, raw, event, err));
            check(kvt_device_keep(device, event, err));
            check(kvt_device_promise(device, null_mut(), err));
            if check(kvt_device_promise(device, &mut made, err)) == KVT_OK {
                // At once: what others put behind it must not stand still.
                check(kvt_device_keep(device, made, err));
                self.devices.events.push((device, made));
            }
            check(kvt_device_hold_op(device, raw, self.ops.pick(tape), err));
        }
    }

    fn launch_kernels(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        lay_out_index(tape, err);
        let device = self.devices.devices.pick(tape);
        // SAFETY: zero is a valid value.
        let mut kernels: [kvt_kernel_t; 2] = unsafe { std::mem::zeroed() };
        for kernel in &mut kernels {
            let known = tape.byte() < 200;
            kernel.kind = if known { KVT_LAUNCH_TOP } else { tape.number() as u32 };
        }
        let (rows, mut event) = (kernels.as_ptr(), 0);
        let stride = size_of::<kvt_kernel_t>() as u64;
        let after = if tape.byte() > 200 { tape.number() } else { 0 };
        // SAFETY: arrays with their lengths; no kernel of the machine's uses memory.
        unsafe {
            let stream = u32::from(tape.byte() % 5);
            let status = kvt_device_launch(device, stream, after, rows, 2, stride, &mut event, err);
            if check(status) == KVT_OK {
                self.devices.events.push((device, event));
            }
            let status = kvt_device_launch(device, 0, 0, rows, 4097, stride, &mut event, err);
            assert_ne!(check(status), KVT_OK);
            check(kvt_device_launch(device, 0, 0, rows, 2, stride, null_mut(), err));
        }
    }

    /// The suite itself takes its time and wants the device for itself: tests/devices.rs.
    fn refused_tests(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let device = self.devices.devices.pick(tape);
        let mut count = out::<kvt_conformance_t>();
        let mut given = kvt_conformance_opts_t {
            struct_size: size_of::<kvt_conformance_opts_t>() as u64,
            flags: 0,
            seed: 0,
            patience_ns: 0,
            rounds: 0,
            reserved: 0,
        };
        match tape.byte() % 3 {
            0 => given.rounds = 100_001,
            1 => given.flags = 2 | tape.number(),
            _ => given.reserved = 1,
        }
        // SAFETY: valid pointers.
        unsafe {
            let to = count.ptr();
            let status = kvt_device_conformance(device, &given, None, null_mut(), to, err);
            assert_ne!(check(status), KVT_OK);
            let status = kvt_device_conformance(device, null(), None, null_mut(), null_mut(), err);
            assert_ne!(check(status), KVT_OK);
        }
    }

    fn close_device(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let before = self.devices.devices.pick(tape);
        let deadline_ns = self.now() + 1 + u64::from(tape.byte()) * 4_000;
        let mut device = before;
        // SAFETY: a local handle variable.
        let status = check(unsafe { kvt_device_close(&mut device, deadline_ns, err) });
        if status == KVT_OK {
            // It has waited for all that was on its way.
            self.devices.moves.retain(|moved| moved.device != before);
            self.devices.memory.retain(|(of, _)| *of != before);
            self.devices.events.retain(|(of, _)| *of != before);
        }
        self.devices.devices.freed(before, device, status);
    }
}

/// Lists of one head or two, sound or not: arrays are as long as is said.
fn lay_out_index(tape: &mut Tape, err: *mut *mut kvt_error_t) {
    // SAFETY: zero is a valid value.
    let (mut kernel, mut heads): (kvt_kernel_t, [kvt_index_head_t; 2]) =
        unsafe { std::mem::zeroed() };
    for head in &mut heads {
        let [kind, first, lists, dense_from] =
            [5, 3, 4, 255].map(|n| tape.byte() % n).map(u32::from);
        let (query_block, key_block) = (u32::from(tape.byte() % 9), u32::from(tape.byte() % 3));
        *head = kvt_index_head_t { kind, first, lists, query_block, key_block, dense_from };
    }
    let mut items: Vec<u32> = (0..tape.byte() % 9).map(|_| tape.byte().into()).collect();
    let mut starts: Vec<u32> = (0..tape.byte() % 5).map(|_| (tape.byte() % 10).into()).collect();
    if tape.byte() > 40 {
        items.sort_unstable();
        items.dedup();
        starts.sort_unstable();
    }
    // SAFETY: zero is a valid value.
    let mut given: kvt_index_t = unsafe { std::mem::zeroed() };
    given.struct_size = size_of::<kvt_index_t>() as u64;
    (given.heads, given.head_count) = (heads.as_mut_ptr(), (tape.byte() % 3).into());
    (given.starts, given.start_count) = (starts.as_mut_ptr(), starts.len() as u64);
    (given.items, given.item_count) = (items.as_mut_ptr(), items.len() as u64);
    let is_any = given.head_count > 0;
    (kernel.query_heads, kernel.key_heads) = ((tape.byte() % 5).into(), (tape.byte() % 3).into());
    (kernel.query_count, kernel.tokens) = (tape.byte().into(), tape.number() as u32);
    let whole = 24 * given.head_count + 4 * (starts.len() + items.len()) as u64;
    let mut room = vec![0xEE_u8; (tape.byte() % 160).into()];
    let (mut need, address) = (0, u64::from(tape.byte()) * 4);
    // SAFETY: arrays with their lengths.
    let status = check(unsafe {
        let to = room.as_mut_ptr().cast();
        kvt_launch_index(&given, &mut kernel, address, to, room.len() as u64, &mut need, err)
    });
    if status == KVT_OK || status == KVT_E_TOO_SMALL {
        assert_eq!(need, if is_any { whole } else { 0 });
        assert_eq!(status == KVT_OK, need <= room.len() as u64);
    }
    if status == KVT_OK {
        let told = u64::from(is_any) * (address + 24 * given.head_count);
        assert_eq!((kernel.counts, u64::from(kernel.count)), (told, given.head_count));
        assert!(room[need as usize..].iter().all(|&byte| byte == 0xEE));
    }
}
