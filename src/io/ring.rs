//! Rings of bytes in shared memory: one process writes frames, another one reads them, without a system
//! call while neither sleeps.
//!
//! The other process is untrusted. Each side keeps its own position in private memory, checks the peer's
//! position when it reads it, and copies a frame out of the ring before it looks at its content. The
//! worst that a peer can do is to send rubbish, or nothing.
//!
//! ```text
//!            head (the reader's)          tail (the writer's)
//!              v                            v
//!   [ free ]  [ length | frame | padding | length | frame ]  [ free ]
//! ```
//!
//! Crates with such rings (iceoryx2, shmem-ipc, rtrb) trust the positions that they find in memory.

use crate::base::status::{Result, Status};
use crate::base::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::fail;

/// Longest frame. A frame may be longer than its ring: it passes in parts.
pub const MAX_FRAME_BYTES: usize = 64 << 20;
/// A frame begins with its length, and is padded to a multiple of this.
const UNIT: u64 = 8;
/// Looks at the peer's position before a side sleeps.
const SPINS: u32 = 64;

/// A word on a cache line of its own.
#[derive(Default)]
#[repr(C, align(128))]
struct Line<T>(T);

/// The shared words of a ring. Zeros are an empty ring.
#[derive(Default)]
#[repr(C)]
pub struct Words {
    /// Bytes read so far.
    head: Line<AtomicU64>,
    /// Bytes written so far.
    tail: Line<AtomicU64>,
    /// 1 = the reader sleeps on this word.
    reader_sleeps: Line<AtomicU32>,
    /// 1 = the writer sleeps on this word.
    writer_sleeps: Line<AtomicU32>,
}

/// Length of [`Words`] in shared memory.
pub const WORDS_BYTES: u64 = size_of::<Words>() as u64;

/// Where a ring lies.
#[derive(Clone, Copy)]
struct Place {
    words: *const Words,
    data: *mut u8,
    capacity: u64,
}

/// The side that writes.
pub struct Writer {
    place: Place,
    tail: u64,
    /// The reader's position, as last seen.
    head: u64,
}

/// The side that reads.
pub struct Reader {
    place: Place,
    head: u64,
    /// The writer's position, as last seen.
    tail: u64,
    /// Bytes that are still to come of the frame that is being read, with its padding.
    left: u64,
    /// Length of that frame.
    length: usize,
}

// SAFETY: one side of a ring, whose memory outlives it; the words are atomics, and bytes of the data
// belong to one side at a time.
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Send for Reader {}

impl Place {
    fn new(words: *const Words, data: *mut u8, capacity: u64) -> Place {
        debug_assert!(capacity.is_power_of_two() && capacity >= 64, "{capacity}");
        Place { words, data, capacity }
    }

    fn words(&self) -> &Words {
        // SAFETY: mapped as long as this side exists, by the promise to `new` of either side.
        unsafe { &*self.words }
    }

    /// The parts of the data from a position on: `bytes` wrap at the end at most once.
    fn parts(&self, at: u64, bytes: u64) -> [(*mut u8, usize); 2] {
        let start = at & (self.capacity - 1);
        let first = bytes.min(self.capacity - start);
        // SAFETY: `start` < `capacity`, which the data has.
        let address = unsafe { self.data.add(start as usize) };
        [(address, first as usize), (self.data, (bytes - first) as usize)]
    }
}

/// A position of the peer that cannot be.
#[cold]
fn broken(what: &str, own: u64, peer: u64) -> crate::base::status::Error {
    crate::base::status::Error::new(
        Status::Corrupt,
        format!("a ring in shared memory is broken: the {what} is at {peer}, this side at {own}"),
    )
}

impl Writer {
    /// The writing side of an empty ring.
    ///
    /// # Safety
    /// `words` and `capacity` bytes of `data` stay mapped and writable as long as it exists.
    /// No other writer in this process writes to them.
    pub unsafe fn new(words: *const Words, data: *mut u8, capacity: u64) -> Writer {
        Writer { place: Place::new(words, data, capacity), tail: 0, head: 0 }
    }

    /// Bytes that can be written now.
    fn room(&mut self) -> Result<u64> {
        let head = self.place.words().head.0.load(Ordering::Acquire);
        let used = self.tail.wrapping_sub(head);
        if used > self.place.capacity || head.wrapping_sub(self.head) > self.place.capacity {
            return Err(broken("reader", self.tail, head));
        }
        self.head = head;
        Ok(self.place.capacity - used)
    }

    /// Writes a frame that has room now, and returns whether it had.
    pub fn try_write(&mut self, frame: &[u8]) -> Result<bool> {
        let bytes = framed_bytes(frame)?;
        if bytes > self.place.capacity - self.tail.wrapping_sub(self.head) && bytes > self.room()? {
            return Ok(false);
        }
        self.put(&(frame.len() as u64).to_le_bytes());
        self.put(frame);
        self.tail += bytes - UNIT - frame.len() as u64;
        self.publish();
        Ok(true)
    }

    /// Writes a frame. Where the ring is full, `wait` is called with this side: it sleeps with
    /// [`Writer::sleep`], or fails.
    pub fn write(
        &mut self,
        frame: &[u8],
        wait: &mut dyn FnMut(&mut Writer) -> Result<()>,
    ) -> Result<()> {
        if self.try_write(frame)? {
            return Ok(());
        }
        let padding = (framed_bytes(frame)? - UNIT) as usize - frame.len();
        let length = (frame.len() as u64).to_le_bytes();
        for mut part in [&length[..], frame, &[0; UNIT as usize][..padding]] {
            while !part.is_empty() {
                let room = self.room()? as usize;
                let (now, rest) = part.split_at(part.len().min(room));
                self.put(now);
                self.publish();
                part = rest;
                if room == 0 {
                    wait(self)?;
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) {
        let mut from = bytes;
        for (to, count) in self.place.parts(self.tail, bytes.len() as u64) {
            let (now, rest) = from.split_at(count);
            // SAFETY: free bytes of the ring: the reader does not look at them before they are
            // published. A peer that breaks the rules changes bytes, nothing else.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), to, count) };
            from = rest;
        }
        self.tail += bytes.len() as u64;
    }

    fn publish(&mut self) {
        let words = self.place.words();
        words.tail.0.store(self.tail, Ordering::SeqCst);
        wake_if(&words.reader_sleeps.0);
    }

    /// Sleeps until there is room, at most so long. May return early.
    pub fn sleep(&mut self, most_ns: u64) -> Result<()> {
        let place = self.place;
        let word = &place.words().writer_sleeps.0;
        word.store(1, Ordering::SeqCst);
        let room = self.room();
        if room == Ok(0) {
            pause(word, most_ns);
        }
        word.store(0, Ordering::SeqCst);
        room.map(|_| ())
    }
}

impl Reader {
    /// The reading side of an empty ring.
    ///
    /// # Safety
    /// As [`Writer::new`], for readers.
    pub unsafe fn new(words: *const Words, data: *mut u8, capacity: u64) -> Reader {
        let place = Place::new(words, data, capacity);
        Reader { place, head: 0, tail: 0, left: 0, length: 0 }
    }

    /// Bytes that can be read now.
    fn available(&mut self) -> Result<u64> {
        let tail = self.place.words().tail.0.load(Ordering::SeqCst);
        let bytes = tail.wrapping_sub(self.head);
        if bytes > self.place.capacity || tail.wrapping_sub(self.tail) > self.place.capacity {
            return Err(broken("writer", self.head, tail));
        }
        self.tail = tail;
        Ok(bytes)
    }

    /// Reads as much of the next frame as there is, at the end of `frame`, which the caller empties
    /// before each frame. Returns whether the frame is complete.
    pub fn try_read(&mut self, frame: &mut Vec<u8>) -> Result<bool> {
        loop {
            let available = match self.tail.wrapping_sub(self.head) {
                0 => self.available()?,
                known => known,
            };
            if self.left == 0 {
                // Lengths are never split: both are multiples of the unit.
                if available < UNIT {
                    return Ok(false);
                }
                let mut length = [0; UNIT as usize];
                self.take(&mut length);
                let length = u64::from_le_bytes(length);
                if length > MAX_FRAME_BYTES as u64 {
                    fail!(
                        Corrupt,
                        "a frame of {length} bytes: at most {MAX_FRAME_BYTES} are possible"
                    );
                }
                (self.length, self.left) = (length as usize, length.next_multiple_of(UNIT));
            } else {
                let now = available.min(self.left);
                if now == 0 {
                    return Ok(false);
                }
                self.take_frame(now, frame)?;
            }
            if self.left == 0 {
                self.publish();
                return Ok(true);
            }
        }
    }

    fn take_frame(&mut self, bytes: u64, frame: &mut Vec<u8>) -> Result<()> {
        let wanted = (bytes as usize).min(self.length - frame.len().min(self.length));
        let before = frame.len();
        frame.try_reserve(wanted).map_err(|_| Status::NoMem)?;
        frame.resize(before + wanted, 0);
        self.take(&mut frame[before..]);
        self.head += bytes - wanted as u64; // padding
        self.left -= bytes;
        if self.left > 0 {
            self.publish();
        }
        Ok(())
    }

    fn take(&mut self, into: &mut [u8]) {
        let mut rest = &mut *into;
        for (from, count) in self.place.parts(self.head, rest.len() as u64) {
            let (now, more) = rest.split_at_mut(count);
            // SAFETY: published bytes of the ring, which the writer leaves alone until they are
            // read. A peer that breaks the rules changes the bytes of its own frames.
            unsafe { std::ptr::copy_nonoverlapping(from, now.as_mut_ptr(), count) };
            rest = more;
        }
        self.head += into.len() as u64;
    }

    fn publish(&mut self) {
        let words = self.place.words();
        words.head.0.store(self.head, Ordering::SeqCst);
        wake_if(&words.writer_sleeps.0);
    }

    /// Waits until there is something to read, at most so long. May return early.
    pub fn wait(&mut self, most_ns: u64) -> Result<()> {
        for _ in 0..SPINS {
            if self.available()? > 0 {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let place = self.place;
        let word = &place.words().reader_sleeps.0;
        word.store(1, Ordering::SeqCst);
        let available = self.available();
        if available == Ok(0) {
            pause(word, most_ns);
        }
        word.store(0, Ordering::SeqCst);
        available.map(|_| ())
    }

    /// Ends waits of this side from other threads.
    pub fn waker(&self) -> Waker {
        Waker(self.place)
    }
}

/// Ends waits of a [`Reader`], whose memory must still be mapped.
pub struct Waker(Place);

// SAFETY: it reads and writes an atomic word.
unsafe impl Send for Waker {}
// SAFETY: as above.
unsafe impl Sync for Waker {}

impl Waker {
    /// Ends a wait, if there is one now.
    pub fn wake(&self) {
        let word = &self.0.words().reader_sleeps.0;
        word.store(0, Ordering::SeqCst);
        wake_all(word);
    }
}

fn framed_bytes(frame: &[u8]) -> Result<u64> {
    if frame.len() > MAX_FRAME_BYTES {
        fail!(
            Limit,
            "a call of {} bytes to a shared store: the limit is {MAX_FRAME_BYTES}",
            frame.len()
        );
    }
    Ok(UNIT + (frame.len() as u64).next_multiple_of(UNIT))
}

fn wake_if(word: &AtomicU32) {
    if word.load(Ordering::SeqCst) != 0 && word.swap(0, Ordering::SeqCst) != 0 {
        wake_all(word);
    }
}

#[cfg(not(feature = "shuttle"))]
use crate::io::shared_memory::{sleep_on, wake_all};

#[cfg(not(feature = "shuttle"))]
fn pause(word: &AtomicU32, most_ns: u64) {
    sleep_on(word, 1, most_ns);
}

#[cfg(feature = "shuttle")]
fn pause(word: &AtomicU32, _most_ns: u64) {
    while word.load(Ordering::SeqCst) == 1 {
        shuttle::thread::yield_now();
    }
}

#[cfg(feature = "shuttle")]
fn wake_all(word: &AtomicU32) {
    // A sleeper of the model looks at the word again and again.
    let _ = word;
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::sync::spawn;
    use crate::io::shared_memory::SharedMemory;

    const CAPACITY: u64 = 256;

    fn pair(memory: &SharedMemory) -> (Writer, Reader) {
        let words = memory.address().cast::<Words>();
        let data = memory.range(WORDS_BYTES, CAPACITY).expect("room");
        // SAFETY: the memory outlives both, in each test.
        unsafe { (Writer::new(words, data, CAPACITY), Reader::new(words, data, CAPACITY)) }
    }

    fn memory() -> SharedMemory {
        SharedMemory::create(WORDS_BYTES + CAPACITY).expect("memory")
    }

    #[test]
    fn frames_arrive_in_order_and_whole() {
        let memory = memory();
        let (mut writer, mut reader) = pair(&memory);
        let mut frame = Vec::new();
        assert_eq!(reader.try_read(&mut frame), Ok(false));
        for round in 0..1000usize {
            let sent: Vec<u8> = (0..round % 240).map(|at| (at + round) as u8).collect();
            assert_eq!(writer.try_write(&sent), Ok(true), "{round}");
            frame.clear();
            assert_eq!(reader.try_read(&mut frame), Ok(true));
            assert_eq!(frame, sent);
        }
        assert_eq!(writer.try_write(&[1; 249]), Ok(false), "it is longer than the ring");
        assert_eq!(writer.try_write(&[1; 100]), Ok(true));
        assert_eq!(writer.try_write(&[2; 140]), Ok(false), "there is no room");
        assert_eq!(reader.available(), Ok(112));
    }

    #[test]
    fn long_frames_pass_in_parts_between_threads() {
        let memory = crate::base::sync::Arc::new(memory());
        let (mut writer, mut reader) = pair(&memory);
        let kept = memory.clone();
        let thread = spawn("writer".into(), move || {
            for round in 0..200usize {
                let frame: Vec<u8> = (0..round * 37).map(|at| (at ^ round) as u8).collect();
                let mut wait = |writer: &mut Writer| writer.sleep(60_000_000_000);
                writer.write(&frame, &mut wait).expect("written");
            }
            drop(kept);
        });
        let mut frame = Vec::new();
        for round in 0..200usize {
            frame.clear();
            while !reader.try_read(&mut frame).expect("sound") {
                reader.wait(60_000_000_000).expect("sound");
            }
            assert_eq!(frame.len(), round * 37);
            assert!(frame.iter().enumerate().all(|(at, &byte)| byte == (at ^ round) as u8));
        }
        thread.expect("spawned").join().expect("ended");
    }

    #[test]
    fn impossible_positions_and_lengths_are_errors() {
        for (head, tail) in [(u64::MAX, 0), (CAPACITY + 1, 0), (0, CAPACITY + 1), (0, u64::MAX)] {
            let memory = memory();
            let (mut writer, mut reader) = pair(&memory);
            let words = writer.place.words();
            words.head.0.store(head, Ordering::SeqCst);
            words.tail.0.store(tail, Ordering::SeqCst);
            let wrong = match head {
                0 => reader.try_read(&mut Vec::new()),
                _ => writer.room().map(|_| true),
            };
            assert_eq!(wrong.map_err(|e| e.status()), Err(Status::Corrupt), "{head} {tail}");
        }
        let memory = memory();
        let (mut writer, mut reader) = pair(&memory);
        writer.put(&(MAX_FRAME_BYTES as u64 + 1).to_le_bytes());
        writer.publish();
        let read = reader.try_read(&mut Vec::new()).map_err(|e| e.status());
        assert_eq!(read, Err(Status::Corrupt));
    }
}
