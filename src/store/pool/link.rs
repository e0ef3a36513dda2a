//! The server's end of a connection, and the memory that both ends share.
//!
//! A connection has three rings: the client's messages, the server's answers to those that have one, and
//! the server's notices. The socket carries the descriptors at the beginning; later it only shows
//! whether the other process is there.

use std::collections::{BTreeMap, VecDeque};

use crate::base::status::{Result, Status};
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::base::sync::{Arc, Mutex};
use crate::device::Direction;
use crate::fail;
use crate::io::ring::{Reader, WORDS_BYTES, Waker, Words, Writer};
use crate::io::shared_memory::SharedMemory;
use crate::store::pool::messages::{COPIES, Copies, CopyOrder, ENDED, Ended};
use crate::store::pool::wire::Wire;
use crate::store::state::work::CopyBatch;
use crate::tier::host::shared::SharedSlabs;

/// Bytes of each ring.
const RING_BYTES: u64 = 1 << 20;
/// Bytes of one ring with its words.
const PART_BYTES: u64 = WORDS_BYTES + RING_BYTES;
/// Bytes of the memory of a connection.
pub const CHANNEL_BYTES: u64 = 3 * PART_BYTES;
/// Bytes of notices that wait for a client that does not read; then it is given up.
const MOST_WAITING_BYTES: usize = 64 << 20;

/// The ends of the rings that the server has.
pub struct ServerEnds {
    /// Messages of the client.
    pub calls: Reader,
    /// Answers.
    pub answers: Writer,
    /// Notices.
    pub notices: Writer,
}

/// The ends of the rings that the client has.
pub struct ClientEnds {
    /// Messages.
    pub calls: Writer,
    /// Answers.
    pub answers: Reader,
    /// Notices.
    pub notices: Reader,
}

fn part(memory: &SharedMemory, at: u64) -> Result<(*const Words, *mut u8)> {
    let Some(start) = memory.range(at * PART_BYTES, PART_BYTES) else {
        fail!(Corrupt, "the memory of a connection has {} bytes", memory.bytes());
    };
    // SAFETY: a part begins with the words; the data follows them.
    Ok((start.cast(), unsafe { start.add(WORDS_BYTES as usize) }))
}

impl ServerEnds {
    /// # Safety
    /// The memory outlives the ends, and has no other ends of the server.
    pub unsafe fn of(memory: &SharedMemory) -> Result<ServerEnds> {
        let [calls, answers, notices] = [part(memory, 0)?, part(memory, 1)?, part(memory, 2)?];
        // SAFETY: three parts, each with the stated length; the caller's promise.
        unsafe {
            Ok(ServerEnds {
                calls: Reader::new(calls.0, calls.1, RING_BYTES),
                answers: Writer::new(answers.0, answers.1, RING_BYTES),
                notices: Writer::new(notices.0, notices.1, RING_BYTES),
            })
        }
    }
}

impl ClientEnds {
    /// # Safety
    /// As [`ServerEnds::of`], of the client.
    pub unsafe fn of(memory: &SharedMemory) -> Result<ClientEnds> {
        let [calls, answers, notices] = [part(memory, 0)?, part(memory, 1)?, part(memory, 2)?];
        // SAFETY: as above.
        unsafe {
            Ok(ClientEnds {
                calls: Writer::new(calls.0, calls.1, RING_BYTES),
                answers: Reader::new(answers.0, answers.1, RING_BYTES),
                notices: Reader::new(notices.0, notices.1, RING_BYTES),
            })
        }
    }
}

/// A client, as all threads of the server see it.
pub struct Link {
    /// Its number.
    pub number: u64,
    out: Mutex<Out>,
    copies: Mutex<Open>,
    is_over: AtomicBool,
    waker: Waker,
    /// Kept mapped until the last thread is done with the link.
    _memory: Arc<SharedMemory>,
}

/// Notices on their way to the client.
struct Out {
    notices: Writer,
    /// Those that found no room.
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// Outcomes for the answer that is being prepared.
    direct: Option<Vec<Ended>>,
}

/// Batches of copies that the client makes.
#[derive(Default)]
struct Open {
    next: u64,
    batches: BTreeMap<u64, (Box<CopyBatch>, u64)>,
    /// The client is gone, or is not trusted any more.
    is_closed: bool,
}

impl Link {
    /// A link, whose notices go to `notices`. `waker` wakes the thread that reads the client's
    /// messages.
    pub fn new(number: u64, notices: Writer, waker: Waker, memory: Arc<SharedMemory>) -> Link {
        let (waiting, waiting_bytes, direct) = (VecDeque::new(), 0, None);
        Link {
            number,
            out: Mutex::new(Out { notices, waiting, waiting_bytes, direct }),
            copies: Mutex::new(Open::default()),
            is_over: AtomicBool::new(false),
            waker,
            _memory: memory,
        }
    }

    /// Whether the client is gone or given up.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Ends the connection: the thread that reads the client's messages ends it.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Hands a batch of copies to the client. Returns the batch if the client is gone.
    pub fn hand_over(
        &self,
        batch: Box<CopyBatch>,
        began_ns: u64,
        slabs: &SharedSlabs,
    ) -> std::result::Result<(), Box<CopyBatch>> {
        let copies = self.keep(batch, began_ns, slabs)?;
        let mut notice = vec![COPIES];
        copies.put(&mut notice);
        self.send(notice);
        Ok(())
    }

    /// Keeps a batch until the client reports it. Returns the copies to make.
    pub fn keep(
        &self,
        batch: Box<CopyBatch>,
        began_ns: u64,
        slabs: &SharedSlabs,
    ) -> std::result::Result<Copies, Box<CopyBatch>> {
        let mut open = self.copies.lock();
        let Some(items) = orders(&batch, slabs).filter(|_| !open.is_closed) else {
            return Err(batch);
        };
        open.next += 1;
        let number = open.next;
        open.batches.insert(number, (batch, began_ns));
        Ok(Copies { batch: number, items })
    }

    /// Takes a batch that the client reports.
    pub fn take(&self, number: u64) -> Result<(Box<CopyBatch>, u64)> {
        match self.copies.lock().batches.remove(&number) {
            Some(batch) => Ok(batch),
            None => fail!(NotFound, "there is no batch of copies {number}"),
        }
    }

    /// Takes all batches if one was begun before `until_ns`, and hands out no more: the client is not
    /// waited for any longer.
    pub fn take_overdue(&self, until_ns: u64) -> Vec<(Box<CopyBatch>, u64)> {
        let mut open = self.copies.lock();
        if open.batches.values().all(|(_, began_ns)| *began_ns >= until_ns) {
            return Vec::new();
        }
        open.is_closed = true;
        std::mem::take(&mut open.batches).into_values().collect()
    }

    /// Takes all batches: the client makes no copies any more.
    pub fn close(&self) -> Vec<(Box<CopyBatch>, u64)> {
        let mut open = self.copies.lock();
        open.is_closed = true;
        std::mem::take(&mut open.batches).into_values().collect()
    }

    /// Reports an outcome to the client: in the answer that is being prepared, or by a notice.
    pub fn report(&self, ended: Ended) {
        let mut out = self.out.lock();
        if let Some(direct) = &mut out.direct {
            return direct.push(ended);
        }
        drop(out);
        let mut notice = vec![ENDED];
        ended.put(&mut notice);
        self.send(notice);
    }

    /// Collects outcomes from now on for an answer.
    pub fn collect(&self) {
        self.out.lock().direct = Some(Vec::new());
    }

    /// Ends [`Link::collect`].
    pub fn collected(&self) -> Vec<Ended> {
        self.out.lock().direct.take().unwrap_or_default()
    }

    fn send(&self, notice: Vec<u8>) {
        let mut out = self.out.lock();
        out.waiting_bytes += notice.len();
        out.waiting.push_back(notice);
        self.pass_on(&mut out);
    }

    /// Sends notices that wait. Returns whether some still do.
    pub fn flush(&self) -> bool {
        let mut out = self.out.lock();
        self.pass_on(&mut out);
        !out.waiting.is_empty()
    }

    fn pass_on(&self, out: &mut Out) {
        while let Some(first) = out.waiting.front() {
            match out.notices.try_write(first) {
                Ok(true) => {
                    out.waiting_bytes -= first.len();
                    out.waiting.pop_front();
                }
                Ok(false) if out.waiting_bytes > MOST_WAITING_BYTES => {
                    log::warn!(
                        "client {} does not read: {} bytes of notices wait, it is given up",
                        self.number,
                        out.waiting_bytes
                    );
                    out.waiting.clear();
                    out.waiting_bytes = 0;
                    return self.end();
                }
                Ok(false) => return,
                Err(error) => {
                    log::warn!("client {} is given up: {error}", self.number);
                    out.waiting.clear();
                    out.waiting_bytes = 0;
                    return self.end();
                }
            }
        }
    }
}

/// The copies of a batch, as the client needs them. None if one is not in shared memory.
fn orders(batch: &CopyBatch, slabs: &SharedSlabs) -> Option<Vec<CopyOrder>> {
    let order = |item: &crate::store::state::work::CopyItem| {
        Some(CopyOrder {
            transfer: batch.views.get(item.views)?.origin?.transfer,
            layer: item.layer as u32,
            is_v: item.is_v,
            to_client: item.direction == Direction::Scatter,
            past_caches: item.past_caches,
            first: item.first,
            tokens: item.tokens,
            offset: slabs.offset_of(item.address)?,
        })
    };
    batch.items.iter().map(order).collect()
}

/// The status of copies that a client that is gone has not made.
pub fn lost() -> crate::base::status::Error {
    crate::base::status::Error::new(Status::Lost, "the process that made these copies is gone")
}
