//! Kernels of tests on a GPU, if `KVTIER_GPU` is set. The memory of tests is memory of this
//! process; here it is one range that is registered with the GPU, so that kernels reach it.
#![allow(dead_code)] // not every test binary uses all of it

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use kvtier::base::clock::Clock;
use kvtier::base::status::Result;
use kvtier::device::call::Call;
use kvtier::device::cuda::kernels::MOST_SHARED;
use kvtier::device::cuda::{Cuda, CudaOpts};
use kvtier::device::{Device, Stream};

/// Size of the address range.
const STRETCH_BYTES: usize = 8 << 30;
/// Sizes of pieces: powers of two from 64 bytes on.
const LEAST_BITS: u32 = 6;
const SIZES: usize = 28;

/// Whether there is a GPU to run on.
pub fn is_there() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| std::env::var_os("KVTIER_GPU").is_some())
}

/// The one of this process.
pub fn device() -> &'static Cuda {
    static DEVICE: OnceLock<Cuda> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let opts = CudaOpts::default();
        let device = Cuda::open(Clock::real(), &opts).expect("a GPU, as KVTIER_GPU says");
        if let Some(start) = STRETCH.start() {
            // SAFETY: the stretch stays as long as the process.
            unsafe { device.register_host(start, STRETCH_BYTES as u64) }.expect("pinned memory");
        }
        device
    })
}

/// Runs a kernel, to its end: there, or on the processor where there is no GPU.
///
/// # Safety
/// As for [`Device::launch`].
pub unsafe fn run(call: &Call) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { run_within(call, MOST_SHARED) }
}

/// The same as where a block of threads can have so much shared memory; a GPU has its own.
///
/// # Safety
/// As for [`Device::launch`].
pub unsafe fn run_within(call: &Call, shared_bytes: u32) -> Result<()> {
    if !is_there() {
        // SAFETY: the caller's promise.
        return unsafe { kvtier_testkit::fixtures::emulated::run_within(call, shared_bytes) };
    }
    // One kernel at a time uses the tests' memory.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(|broken| broken.into_inner());
    let device = device();
    // SAFETY: the caller's promise.
    let event = unsafe { device.launch(Stream(0), None, std::slice::from_ref(call))? };
    device.wait(event, Clock::real().now_ns() + 300_000_000_000)?;
    device.release(event)
}

/// Memory of a process that a GPU reaches, or the system's where there is none: an allocator for
/// whole test programs.
pub struct LookupRange {
    busy: AtomicBool,
    /// 0 = not asked for yet, 1 = the system's.
    start: AtomicUsize,
    used: UnsafeCell<usize>,
    /// The first free piece of each size; its first word leads to the next.
    free: UnsafeCell<[usize; SIZES]>,
}

// SAFETY: only the thread that holds `busy` touches fields that are not atomic.
unsafe impl Sync for LookupRange {}

/// The one of this process.
#[global_allocator]
pub static STRETCH: LookupRange = LookupRange {
    busy: AtomicBool::new(false),
    start: AtomicUsize::new(0),
    used: UnsafeCell::new(0),
    free: UnsafeCell::new([0; SIZES]),
};

impl LookupRange {
    /// Where it starts; none without a GPU.
    fn start(&self) -> Option<*mut u8> {
        let start = self.start.load(Ordering::Acquire);
        (start > 1).then(|| std::ptr::with_exposed_provenance_mut(start))
    }

    fn enter(&self) {
        while self.busy.swap(true, Ordering::Acquire) {
            std::hint::spin_loop();
        }
    }

    fn leave(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// The environment is asked without allocating.
    fn begin(&self) -> usize {
        // SAFETY: the name ends with a zero; the mapping is new and overlaps no other memory.
        let start = unsafe {
            if libc::getenv(c"KVTIER_GPU".as_ptr()).is_null() {
                return 1;
            }
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), STRETCH_BYTES, access, flags, -1, 0)
        };
        if start == libc::MAP_FAILED { 1 } else { start.expose_provenance() }
    }

    fn size_of(layout: Layout) -> usize {
        let bytes = layout.size().max(layout.align()).max(1 << LEAST_BITS);
        (bytes.next_power_of_two().trailing_zeros() - LEAST_BITS) as usize
    }

    /// A piece, with `busy` had; null = no more.
    unsafe fn take(&self, layout: Layout) -> *mut u8 {
        let size = LookupRange::size_of(layout);
        if size >= SIZES {
            return std::ptr::null_mut();
        }
        // SAFETY: the holder of `busy` has exclusive access; a free piece has room for one word.
        unsafe {
            let first = &mut (*self.free.get())[size];
            if *first != 0 {
                let piece: *mut usize = std::ptr::with_exposed_provenance_mut(*first);
                *first = piece.read();
                return piece.cast();
            }
            let bytes = 1usize << (size as u32 + LEAST_BITS);
            // Each lies at a multiple of its size, up to a page.
            let align = bytes.min(4096);
            let used = &mut *self.used.get();
            let at = used.next_multiple_of(align);
            if at + bytes > STRETCH_BYTES {
                return std::ptr::null_mut();
            }
            *used = at + bytes;
            std::ptr::with_exposed_provenance_mut(self.start.load(Ordering::Relaxed) + at)
        }
    }
}

// SAFETY: pieces are apart, as large and as aligned as was asked, and stay until they are given
// back.
unsafe impl GlobalAlloc for LookupRange {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if self.start.load(Ordering::Acquire) == 1 {
            // SAFETY: the caller's promise.
            return unsafe { System.alloc(layout) };
        }
        self.enter();
        if self.start.load(Ordering::Relaxed) == 0 {
            self.start.store(self.begin(), Ordering::Release);
        }
        // SAFETY: `busy` is had, or it is the system's business.
        let piece = unsafe {
            match self.start.load(Ordering::Relaxed) {
                1 => System.alloc(layout),
                _ if layout.align() > 4096 => std::ptr::null_mut(),
                _ => self.take(layout),
            }
        };
        self.leave();
        piece
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if self.start.load(Ordering::Acquire) == 1 {
            // SAFETY: the caller's promise.
            return unsafe { System.dealloc(ptr, layout) };
        }
        self.enter();
        // SAFETY: a piece of that size, which no other code uses any more.
        unsafe {
            let first = &mut (*self.free.get())[LookupRange::size_of(layout)];
            ptr.cast::<usize>().write(*first);
            *first = ptr.expose_provenance();
        }
        self.leave();
    }
}
