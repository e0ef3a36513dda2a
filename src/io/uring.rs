//! Transfers by io_uring: pieces are submitted as their source supplies them, and the source
//! gets results as they arrive. All threads share a few rings; a call takes a free one exclusively.
//!
//! When a call returns, none of the caller's memory is in flight. A `Flight` counts the entries
//! that the kernel has taken from the ring and not returned. Its drop waits until there are none,
//! also after a failure of the ring or a panic. Entries that the kernel has not taken never start,
//! since a failed ring is not entered again but dropped.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;

use io_uring::{IoUring, opcode, types};

use crate::base::fork;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::io::engine::Open;
use crate::io::errno;
use crate::io::files::{Access, MAX_PARTS, Next, Piece, Source};
use crate::io::open_file::OpenFile;
use crate::io::span::Span;

/// Limit: transfers in flight on a ring.
pub const MAX_DEPTH: u32 = 64;
/// Limit: rings of a directory; further callers work without.
pub const MAX_RINGS: usize = 16;
/// Limit: submissions of a transfer that the kernel defers.
const MAX_TRIES: u32 = 16;

/// Bytes that wait in a ring before they are submitted while the source prepares more: enough that
/// small pieces share a system call, and that large ones do not wait.
const SUBMIT_BYTES: u64 = 256 << 10;

/// Limit: bytes in flight on a ring, at which no further piece is begun. Disks reach their rate with
/// less, and other transfers wait for what is queued. More threads read at once than write.
fn max_bytes_in_flight(access: Access) -> u64 {
    match access {
        Access::Read => 8 << 20,
        Access::Write => 16 << 20,
    }
}

/// Bytes of pieces that are prepared while there is no room for them: the disk gets its next work as
/// soon as it has ended some. Preparing a write computes its checksums.
const MAX_BYTES_AHEAD: u64 = 4 << 20;

/// Pieces that were not executed, with their keys.
pub type Left = Vec<(usize, Piece)>;

/// Outcome of a stream.
#[derive(Default)]
pub struct Outcome {
    /// The ring failed.
    pub failed: Option<Error>,
    /// The number of an error that is no device error, if there was any.
    pub refused: Option<i32>,
}

/// The rings of a directory.
pub struct Rings {
    idle: Mutex<Idle>,
    depth: u32,
}

struct Idle {
    rings: Vec<Ring>,
    /// Number of rings that may still be created.
    more: usize,
}

impl Rings {
    /// Creates the first ring; an error if the kernel does not allow it.
    pub fn new(depth: u32) -> Result<Rings> {
        let depth = depth.clamp(1, MAX_DEPTH);
        let mut rings = Vec::new();
        rings.try_reserve_exact(MAX_RINGS).map_err(|_| Status::NoMem)?;
        rings.push(Ring::new(depth)?);
        Ok(Rings { idle: Mutex::new(Idle { rings, more: MAX_RINGS - 1 }), depth })
    }

    fn take(&self) -> Option<Ring> {
        let mut idle = self.idle.lock();
        if let Some(ring) = idle.rings.pop() {
            return Some(ring);
        }
        if idle.more == 0 {
            return None;
        }
        idle.more -= 1;
        drop(idle);
        match Ring::new(self.depth) {
            Ok(ring) => Some(ring),
            Err(error) => {
                // Too many descriptors, or too much locked memory: use the existing rings.
                self.idle.lock().more = 0;
                log::warn!("creating another ring of io_uring failed: {error}");
                None
            }
        }
    }

    /// Executes the pieces of a source as far as possible; none if all rings are taken. Pieces that
    /// it could not execute are added to `left`.
    ///
    /// # Safety
    /// As for [`crate::io::files::Files::stream`].
    pub unsafe fn stream(
        &self,
        source: &mut dyn Source,
        align: u64,
        open: Open<'_>,
        left: &mut Left,
    ) -> Outcome {
        let Some(mut ring) = self.take() else { return Outcome::default() };
        // SAFETY: the caller's promise.
        match unsafe { ring.stream(source, align, open, left) } {
            Ok(refused) => {
                self.idle.lock().rings.push(ring);
                Outcome { failed: None, refused }
            }
            Err(error) => {
                left.extend(ring.slots.iter_mut().filter_map(Slot::take));
                drop(ring);
                self.idle.lock().more += 1;
                Outcome { failed: Some(error), refused: None }
            }
        }
    }
}

/// A ring with the state of its transfers.
struct Ring {
    ring: ManuallyDrop<IoUring>,
    /// Boxed: the kernel reads from these addresses.
    slots: Box<[Slot]>,
    free: Vec<u32>,
}

struct Slot {
    /// The piece in flight, with its key.
    piece: Option<(usize, Piece)>,
    file: Option<Arc<OpenFile>>,
    span: Span,
    tries: u32,
}

impl Slot {
    const FREE: Slot = Slot { piece: None, file: None, span: Span::NONE, tries: 0 };

    fn take(&mut self) -> Option<(usize, Piece)> {
        std::mem::replace(self, Slot::FREE).piece
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // A forked child does not inherit the mapping (MADV_DONTFORK): other memory may be there
        // now.
        if fork::check().is_ok() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

impl Ring {
    fn new(depth: u32) -> Result<Ring> {
        let ring = IoUring::builder().dontfork().build(depth.next_power_of_two());
        let ring =
            ring.map_err(|e| errno::error(e.raw_os_error().unwrap_or(0), "io_uring_setup"))?;
        let mut slots = Vec::new();
        slots.try_reserve_exact(depth as usize).map_err(|_| Status::NoMem)?;
        slots.extend((0..depth).map(|_| Slot::FREE));
        let mut free = Vec::new();
        free.try_reserve_exact(depth as usize).map_err(|_| Status::NoMem)?;
        free.extend(0..depth);
        Ok(Ring { ring: ManuallyDrop::new(ring), slots: slots.into(), free })
    }

    /// An error means that the ring is unusable; else the first refused number.
    ///
    /// # Safety
    /// As for [`crate::io::files::Files::stream`].
    unsafe fn stream(
        &mut self,
        source: &mut dyn Source,
        align: u64,
        open: Open<'_>,
        left: &mut Left,
    ) -> Result<Option<i32>> {
        let mut flight = Flight::new(self, align, open);
        // SAFETY: the caller's promise.
        let result = unsafe { flight.run(source, left) };
        // A ring that failed leaves what was prepared to plain calls.
        flight.done.drain(..).for_each(|(key, result)| source.ended(key, result));
        left.extend(flight.ahead.drain(..));
        result
    }
}

/// Transfers in flight on a ring.
struct Flight<'a> {
    ring: &'a mut Ring,
    align: u64,
    open: Open<'a>,
    /// Entries submitted so far.
    submitted: u64,
    /// Entries returned so far.
    returned: u64,
    /// The first error that is no device error.
    refused: Option<i32>,
    /// Bytes of the pieces in flight.
    bytes: u64,
    /// Bytes of the pieces that are in the ring and were not submitted yet.
    waiting_bytes: u64,
    /// Results that the source has to handle.
    done: VecDeque<(usize, Result<()>)>,
    /// Pieces that are prepared while there is no room for them.
    ahead: VecDeque<(usize, Piece)>,
    ahead_bytes: u64,
}

impl<'a> Flight<'a> {
    fn new(ring: &'a mut Ring, align: u64, open: Open<'a>) -> Flight<'a> {
        Flight {
            ring,
            align,
            open,
            submitted: 0,
            returned: 0,
            refused: None,
            bytes: 0,
            waiting_bytes: 0,
            done: VecDeque::new(),
            ahead: VecDeque::new(),
            ahead_bytes: 0,
        }
    }

    /// Executes the pieces of a source until it has ended and nothing is in flight. An error means
    /// that the ring is unusable; else the first refused number.
    ///
    /// # Safety
    /// As for [`crate::io::files::Files::stream`].
    unsafe fn run(&mut self, source: &mut dyn Source, left: &mut Left) -> Result<Option<i32>> {
        let mut has_ended = false;
        loop {
            self.collect(left)?;
            self.start_ahead(source)?;
            let has_begun = self.prepare(source, &mut has_ended);
            self.start_ahead(source)?;
            let is_idle = !self.done.is_empty() && self.in_kernel() == 0;
            if self.waiting_bytes >= SUBMIT_BYTES || (self.waiting_bytes > 0 && is_idle) {
                self.enter(0)?;
            }
            // The disk has its next pieces; now the source handles a result.
            if let Some((key, result)) = self.done.pop_front() {
                source.ended(key, result);
            } else if !has_begun {
                let in_flight = self.submitted - self.returned;
                if in_flight == 0 {
                    return Ok(self.refused);
                }
                // If pieces remain, refill slots as soon as one is free.
                let is_over = has_ended && self.ahead.is_empty();
                self.enter(if is_over { in_flight as usize } else { 1 })?;
            }
        }
    }

    /// Requests a piece from the source if few are prepared. Whether there was one.
    fn prepare(&mut self, source: &mut dyn Source, has_ended: &mut bool) -> bool {
        let most = self.ring.slots.len();
        if *has_ended || self.ahead_bytes >= MAX_BYTES_AHEAD || self.ahead.len() >= most {
            return false;
        }
        match source.next() {
            Next::Piece(key, piece) => {
                self.ahead_bytes += piece.bytes();
                self.ahead.push_back((key, piece));
                true
            }
            Next::Wait => false,
            Next::End => {
                *has_ended = true;
                false
            }
        }
    }

    /// Begins prepared pieces while there is room.
    fn start_ahead(&mut self, source: &mut dyn Source) -> Result<()> {
        while let Some((_, piece)) = self.ahead.front()
            && !self.ring.free.is_empty()
            && self.bytes < max_bytes_in_flight(piece.access)
            && let Some((key, piece)) = self.ahead.pop_front()
        {
            self.ahead_bytes -= piece.bytes();
            match (self.open)(piece.file) {
                Ok(file) => self.start(source, key, piece, file)?,
                Err(error) => source.ended(key, Err(error)),
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        source: &mut dyn Source,
        key: usize,
        piece: Piece,
        file: Arc<OpenFile>,
    ) -> Result<()> {
        let span = Span::new(&piece, &*file).until(file.end());
        if span.is_done() {
            source.ended(key, Ok(()));
            return Ok(());
        }
        self.bytes += piece.bytes();
        self.waiting_bytes += piece.bytes();
        let Some(place) = self.ring.free.pop() else { return Err(Status::State.into()) };
        if let Some(slot) = self.ring.slots.get_mut(place as usize) {
            *slot = Slot { piece: Some((key, piece)), file: Some(file), span, tries: 0 };
        }
        self.push_entry(place)
    }

    fn push_entry(&mut self, place: u32) -> Result<()> {
        let Some(slot) = self.ring.slots.get(place as usize) else {
            return Err(Status::State.into());
        };
        let (fd, access, offset, parts) = slot.span.rest();
        let (fd, count) = (types::Fd(fd), MAX_PARTS as u32);
        let entry = match access {
            Access::Read => opcode::Readv::new(fd, parts.as_ptr(), count).offset(offset).build(),
            Access::Write => opcode::Writev::new(fd, parts.as_ptr(), count).offset(offset).build(),
        };
        let entry = entry.user_data(u64::from(place));
        // SAFETY: the ranges are in the slot, which neither moves nor changes until the kernel has
        // returned the entry. The caller guarantees the memory they name until `transfer` returns,
        // which is not before this is dropped.
        let pushed = unsafe { self.ring.ring.submission().push(&entry) };
        pushed.map_err(|_| Error::new(Status::State, "the ring is full"))?;
        self.submitted += 1;
        Ok(())
    }

    /// Entries that the kernel has taken and not returned. It has not seen entries that wait in the
    /// ring: it moves the queue's head only in `enter`.
    fn in_kernel(&mut self) -> u64 {
        let waiting = self.ring.ring.submission().len() as u64;
        self.submitted.saturating_sub(self.returned).saturating_sub(waiting)
    }

    /// Submits waiting entries, and waits for returns.
    fn enter(&mut self, want: usize) -> Result<()> {
        self.waiting_bytes = 0;
        let Err(error) = self.ring.ring.submit_and_wait(want) else { return Ok(()) };
        let number = error.raw_os_error().unwrap_or(0);
        // EAGAIN and EBUSY: the kernel lacks a resource that returns will free.
        let passing = errno::is_passing(number) || number == libc::EBUSY;
        let interrupted = number == libc::EINTR;
        if interrupted || (passing && self.in_kernel() > 0) {
            if !interrupted {
                pause();
            }
            return Ok(());
        }
        Err(errno::error(number, "io_uring_enter"))
    }

    fn next_return(&mut self) -> Option<(u32, i32)> {
        let entry = self.ring.ring.completion().next()?;
        self.returned += 1;
        Some((entry.user_data() as u32, entry.result()))
    }

    /// Takes all returned entries; the source handles their results later.
    fn collect(&mut self, left: &mut Left) -> Result<()> {
        while let Some((place, result)) = self.next_return() {
            match self.settle(place, result)? {
                Settled::Not => {}
                Settled::Refused(number, key, piece) => {
                    self.refused = self.refused.or(Some(number));
                    left.push((key, piece));
                }
                Settled::Done(key, result) => self.done.push_back((key, result)),
            }
        }
        Ok(())
    }

    /// Handles a returned entry, and resubmits the rest if there is any.
    fn settle(&mut self, place: u32, result: i32) -> Result<Settled> {
        let align = self.align;
        let unknown = || Error::new(Status::State, "the ring returned an unknown entry");
        let slot = self.ring.slots.get_mut(place as usize).ok_or_else(unknown)?;
        slot.tries += 1;
        let ended = match u32::try_from(result).map_err(|_| result.saturating_neg()) {
            Ok(bytes) => match slot.span.moved(u64::from(bytes), align) {
                Ok(()) if !slot.span.is_done() => None,
                result => Some(Ok(result)),
            },
            Err(number) if errno::is_passing(number) && slot.tries < MAX_TRIES => None,
            Err(number) if errno::is_of_device(number) => Some(Ok(Err(slot.span.failed(number)))),
            Err(number) => Some(Err(number)),
        };
        let Some(ended) = ended else {
            self.push_entry(place)?;
            return Ok(Settled::Not);
        };
        let file = slot.file.take();
        let (key, piece) = slot.take().ok_or_else(unknown)?;
        self.bytes = self.bytes.saturating_sub(piece.bytes());
        self.ring.free.push(place);
        let name = file.as_ref().map_or("", |file| file.name());
        Ok(match ended {
            Ok(result) => Settled::Done(key, result.map_err(|error| error.within(name))),
            Err(number) => Settled::Refused(number, key, piece),
        })
    }
}

/// State of a transfer after a return.
enum Settled {
    /// It continues.
    Not,
    /// A piece has its result.
    Done(usize, Result<()>),
    /// An error that another transfer method may not have.
    Refused(i32, usize, Piece),
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        // Entries are left here only if the ring failed. It is not entered again: the kernel posts
        // returns during any system call of this thread.
        while self.in_kernel() > 0 {
            if self.next_return().is_none() {
                pause();
            }
        }
    }
}

/// Sleeps for a millisecond.
fn pause() {
    // SAFETY: no descriptors, no memory.
    unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
}

/// Ways in which tests break rings.
#[cfg(all(test, not(feature = "shuttle")))]
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    /// Entering them fails.
    Cut,
    /// They reject every operation.
    Restricted,
}

#[cfg(all(test, not(feature = "shuttle")))]
impl Rings {
    /// Breaks every idle ring.
    pub fn damage(&self, how: Damage) {
        for ring in &mut self.idle.lock().rings {
            match how {
                Damage::Cut => ring.cut(),
                Damage::Restricted => {
                    let kernel = IoUring::builder().dontfork().setup_r_disabled().build(64);
                    let kernel = kernel.expect("a ring");
                    let mut none = [io_uring::register::Restriction::sqe_op(opcode::Nop::CODE)];
                    kernel.submitter().register_restrictions(&mut none).expect("restricted");
                    kernel.submitter().register_enable_rings().expect("enabled");
                    *ring.ring = kernel;
                }
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
impl Ring {
    /// Redirects its descriptor; transfers in the kernel continue.
    fn cut(&mut self) {
        use std::os::fd::AsRawFd;
        let null = std::fs::File::open("/dev/null").expect("the null device");
        // SAFETY: two open descriptors.
        let rc = unsafe { libc::dup2(null.as_raw_fd(), self.ring.as_raw_fd()) };
        assert!(rc >= 0);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::io::files::FileId;
    use crate::io::scratch::{Scratch, bytes_of, memory};
    use std::os::unix::fs::OpenOptionsExt;

    /// A ring, unless this machine has none.
    fn ring(depth: u32) -> Option<Ring> {
        Ring::new(depth).inspect_err(|error| println!("skipped: {error}")).ok()
    }

    /// A file of 16 MiB; each MiB is filled with its number plus one.
    fn file(scratch: &Scratch) -> Arc<OpenFile> {
        std::fs::create_dir(&scratch.0).expect("made");
        let path = scratch.0.join("x");
        let all: Vec<u8> = (0..16 << 20).map(|i| (i >> 20) as u8 + 1).collect();
        std::fs::write(&path, all).expect("written");
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        let file = direct.or_else(|_| options.open(&path)).expect("opened");
        Arc::new(OpenFile::new(file.into(), "x"))
    }

    #[test]
    fn no_memory_is_in_flight_after_a_ring_failed() {
        let Some(mut ring) = ring(16) else { return };
        let scratch = Scratch::new();
        let file = file(&scratch);
        for _ in 0..4 {
            let stock = memory(16 << 20);
            let mut flight = Flight::new(&mut ring, 4096, &NO_FILE);
            for i in 0..16 {
                let address = stock.range(i << 20, 1 << 20).expect("inside");
                let piece = Piece::one(FileId(0), Access::Read, i << 20, address, 1 << 20);
                flight.start(&mut Nothing, i as usize, piece, file.clone()).expect("room");
                if i == 11 {
                    flight.ring.ring.submit().expect("taken by the kernel");
                }
            }
            flight.ring.cut();
            assert!(flight.enter(1).is_err());
            drop(flight);
            let whole = bytes_of(&stock).chunks(1 << 20).enumerate();
            let completed = whole.filter(|(i, mib)| mib.iter().all(|b| *b == *i as u8 + 1)).count();
            assert_eq!(completed, 12, "submitted transfers complete, others never start");
            ring = Ring::new(16).expect("another");
        }
    }

    #[test]
    fn returned_results_are_classified() {
        let Some(mut ring) = ring(4) else { return };
        let scratch = Scratch::new();
        let file = file(&scratch);
        let stock = memory(8192);
        let mut flight = Flight::new(&mut ring, 4096, &NO_FILE);
        let judged = |flight: &mut Flight, results: &[i32]| {
            let piece = Piece::one(FileId(0), Access::Read, 0, stock.address(), 8192);
            flight.start(&mut Nothing, 7, piece, file.clone()).expect("room");
            let mut last = Settled::Not;
            for result in results {
                assert!(matches!(last, Settled::Not), "it continues");
                // Never submitted to the kernel: the results are made up here.
                let place = (0..4).find(|place| !flight.ring.free.contains(place)).expect("one");
                *flight.ring.ring = IoUring::new(4).expect("an empty ring");
                last = flight.settle(place, *result).expect("sound");
                flight.submitted = flight.ring.ring.submission().len() as u64;
            }
            match last {
                Settled::Not => "continues".to_string(),
                Settled::Refused(number, 7, _) => format!("refused {number}"),
                Settled::Done(7, Ok(())) => "done".to_string(),
                Settled::Done(7, Err(error)) => error.status().name().to_string(),
                Settled::Done(..) | Settled::Refused(..) => "another piece".to_string(),
            }
        };
        assert_eq!(judged(&mut flight, &[8192]), "done");
        assert_eq!(judged(&mut flight, &[4096, 4096]), "done");
        assert_eq!(judged(&mut flight, &[-libc::EAGAIN, 4096, -libc::EINTR, 4096]), "done");
        assert_eq!(judged(&mut flight, &[4096, 0]), "KVT_E_IO");
        assert_eq!(judged(&mut flight, &[100]), "KVT_E_IO");
        assert_eq!(judged(&mut flight, &[-libc::EIO]), "KVT_E_IO");
        assert_eq!(judged(&mut flight, &[-libc::ENOSPC]), "KVT_E_BUDGET");
        let number = libc::EINVAL;
        assert_eq!(judged(&mut flight, &[-number]), format!("refused {number}"));
        let often = [-libc::EAGAIN; MAX_TRIES as usize];
        assert_eq!(judged(&mut flight, &often), format!("refused {}", libc::EAGAIN));
        assert_eq!(flight.ring.free.len(), 4, "every place is free again");
        assert!(flight.settle(99, 0).is_err());
    }

    #[test]
    fn the_number_of_rings_is_limited() {
        let Ok(rings) = Rings::new(2) else { return };
        let taken: Vec<Ring> = std::iter::from_fn(|| rings.take()).collect();
        assert!(taken.len() <= MAX_RINGS && !taken.is_empty());
        let mut left = Left::new();
        // SAFETY: there is no memory in it.
        let outcome = unsafe { rings.stream(&mut Nothing, 1, &NO_FILE, &mut left) };
        assert!(outcome.failed.is_none() && outcome.refused.is_none() && left.is_empty());
    }

    /// These tests start pieces with a file.
    const NO_FILE: fn(FileId) -> Result<Arc<OpenFile>> = |_| Err(Status::Closed.into());

    /// A source that is not used.
    struct Nothing;

    impl Source for Nothing {
        fn next(&mut self) -> Next {
            panic!("no piece is requested")
        }

        fn ended(&mut self, _: usize, _: Result<()>) {
            panic!("nothing has ended")
        }
    }
}
