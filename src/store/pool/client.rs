//! The client's side of a shared store: calls, transfers whose bytes this process copies itself, and
//! what happens when the server is gone.
//!
//! A call is one message and one answer. A transfer is a call, too; its answer, or a notice, names the
//! copies to make between the engine's tensors and the shared memory. Where the server's memory for
//! them is known at once and the transfer is small, the calling thread makes them; else threads of
//! their own do.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::base::core::Core as RuntimeCore;
use crate::base::memory::MAX_BUFFER_BYTES;
use crate::base::op::{Op, OpOpts, OpRef, Owner, RELEASED};
use crate::base::panic;
use crate::base::runtime::Role;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex, Weak, cores, spawn};
use crate::device::{Direction, Memory};
use crate::fail;
use crate::io::ring::{Reader, Waker, Writer};
use crate::io::shared_memory::SharedMemory;
use crate::io::socket::{self, Stream, wait};
use crate::meta::key::Key;
use crate::store::executor::copy_inline;
use crate::store::pool::calls::{Call, Lane};
use crate::store::pool::link::{CHANNEL_BYTES, ClientEnds};
use crate::store::pool::messages::{
    CANCEL, COPIES, Copies, CopyOrder, DONE, DONE_NOW, ENDED, Ended, SUBMIT, Submission, What,
};
use crate::store::pool::wire::{Bytes, SessionId, Wire, version};
use crate::store::state::batches::Views;
use crate::store::state::work::{CopyBatch, CopyItem};
use crate::store::state::{Level, TransferKind};

/// Time for the server to accept a new client.
const WELCOME_MS: i32 = 10_000;
/// Time for an answer, after which the server counts as gone.
const ANSWER_NS: u64 = 30_000_000_000;
/// A waiting thread looks at the connection so often.
const LOOK_NS: u64 = 50_000_000;
/// Copies of at most so many bytes are one task of a copying thread.
const TASK_BYTES: u64 = 1 << 20;

/// A store of another process.
pub struct Client {
    runtime: Arc<RuntimeCore>,
    stream: Stream,
    /// Memory of the store's cells.
    slabs: SharedMemory,
    calls: Mutex<Calls>,
    transfers: Mutex<Transfers>,
    tasks: Mutex<Tasks>,
    has_tasks: Condvar,
    is_idle: Condvar,
    is_lost: AtomicBool,
    closing: AtomicBool,
    /// Wake this process's readers.
    wakers: [Waker; 2],
    stop: socket::Waker,
    /// Copies of at most so many bytes are made by the calling thread.
    inline_bytes: u64,
    next: AtomicU32,
    /// Key and chunk length of the namespaces that were opened.
    namespaces: Mutex<BTreeMap<u32, (Key, u32)>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    this: Weak<Client>,
    /// Kept mapped until the last end is dropped.
    _channel: Arc<SharedMemory>,
}

/// The ends for calls.
struct Calls {
    writer: Writer,
    answers: Reader,
    message: Vec<u8>,
    answer: Vec<u8>,
}

/// Transfers that have not ended.
#[derive(Default)]
struct Transfers {
    open: BTreeMap<u64, Transfer>,
}

struct Transfer {
    /// One, or one for each part.
    ops: Vec<OpRef>,
    views: Arc<Views>,
}

/// Copies for the copying threads.
#[derive(Default)]
struct Tasks {
    queue: VecDeque<Task>,
    /// Tasks that are being executed.
    running: u32,
    stop: bool,
}

struct Task {
    batch: CopyBatch,
    report: Arc<Report>,
}

/// The report of a batch: sent when its last task has ended.
struct Report {
    number: u64,
    left: AtomicU64,
    failed: Mutex<Option<Error>>,
}

/// Ops of a transfer.
pub enum Ops {
    /// One, or one for each layer.
    Each(usize),
    /// One with so many items.
    Items(usize),
}

impl Client {
    /// Opens the store that a process serves at a path.
    pub fn open(
        runtime: &Arc<RuntimeCore>,
        path: &Path,
        copiers: u32,
        inline_bytes: u64,
    ) -> Result<Arc<Client>> {
        let place = format!("the shared store at {}", path.display());
        let (stream, fds) = greet(path).map_err(|error| error.within(&place))?;
        let Ok([channel, slabs]) = <[OwnedFd; 2]>::try_from(fds) else {
            fail!(Corrupt, "{place}: the server has passed other descriptors than two");
        };
        let channel = Arc::new(SharedMemory::open(channel, CHANNEL_BYTES)?);
        let slabs = SharedMemory::open(slabs, MAX_BUFFER_BYTES)?;
        // SAFETY: the client keeps the memory; its threads end before it is dropped.
        let ClientEnds { calls, answers, notices } = unsafe { ClientEnds::of(&channel)? };
        let wakers = [answers.waker(), notices.waker()];
        let (message, answer) = (Vec::new(), Vec::new());
        let stop = socket::Waker::new()?;
        let client = Arc::new_cyclic(|this| Client {
            runtime: runtime.clone(),
            stream,
            slabs,
            calls: Mutex::new(Calls { writer: calls, answers, message, answer }),
            transfers: Mutex::new(Transfers::default()),
            tasks: Mutex::new(Tasks::default()),
            has_tasks: Condvar::new(),
            is_idle: Condvar::new(),
            is_lost: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            wakers,
            stop,
            inline_bytes,
            next: AtomicU32::new(0),
            namespaces: Mutex::new(BTreeMap::new()),
            threads: Mutex::new(Vec::new()),
            this: this.clone(),
            _channel: channel,
        });
        runtime.add_owner(client.this.clone());
        let started = client.start(notices, copiers);
        if let Err(error) = started {
            client.close();
            return Err(error);
        }
        Ok(client)
    }

    fn start(self: &Arc<Client>, notices: Reader, copiers: u32) -> Result<()> {
        let copiers = if copiers == 0 { cores().min(4) as u32 } else { copiers };
        let mut threads = self.threads.lock();
        let mut add = |name: &str, body: Box<dyn FnOnce(&Client) + Send>| -> Result<()> {
            let (client, number) = (self.clone(), threads.len() as u32);
            threads.push(spawn(name.into(), move || {
                client.runtime.thread_started(Role::Store, number);
                if let Err(text) = panic::catch(|| body(&client)) {
                    client.runtime.poison(&text);
                    client.lose();
                }
            })?);
            Ok(())
        };
        add("kvt-notices", Box::new(move |client| client.read_notices(notices)))?;
        add("kvt-watch", Box::new(|client| client.watch()))?;
        for _ in 0..copiers {
            add("kvt-copy", Box::new(|client| client.copy_tasks()))?;
        }
        Ok(())
    }

    // ---------- calls

    /// Executes a call in the server.
    pub fn call<C: Call>(&self, call: &C) -> Result<C::Out> {
        self.check()?;
        self.ask(call.kind(), &mut |out| call.put(out))
    }

    /// The same for the end of a handle: a server that is gone has ended it already.
    pub fn release<C: Call<Out = ()>>(&self, call: &C) -> Result<()> {
        match self.call(call) {
            Err(error) if matches!(error.status(), Status::Lost | Status::Closed) => Ok(()),
            result => result,
        }
    }

    /// Notes the key and chunk length of a namespace.
    pub fn note_namespace(&self, number: u32, facts: (Key, u32)) {
        self.namespaces.lock().insert(number, facts);
    }

    /// Key and chunk length of a namespace.
    pub fn namespace(&self, number: u32) -> Option<(Key, u32)> {
        self.namespaces.lock().get(&number).copied()
    }

    /// Whether the server is there.
    fn check(&self) -> Result<()> {
        self.runtime.check_open()?;
        if self.closing.load(Ordering::SeqCst) {
            return Err(Status::Closed.into());
        }
        if self.is_lost.load(Ordering::SeqCst) {
            return Err(lost());
        }
        Ok(())
    }

    fn ask<T: Wire>(&self, kind: u8, body: &mut dyn FnMut(&mut Vec<u8>)) -> Result<T> {
        let mut calls = self.calls.lock();
        let Calls { writer, answers, message, answer } = &mut *calls;
        message.clear();
        message.push(kind);
        body(message);
        let passed = self.write(writer, message).and_then(|()| self.read(answers, answer));
        if let Err(error) = passed {
            // An answer that comes later would be taken for that of the next call.
            if error.status() != Status::Limit {
                self.lose_with(&error);
            }
            return Err(error);
        }
        let mut bytes = Bytes::trusted(answer);
        let result = Result::<T>::take(&mut bytes)?;
        bytes.end()?;
        result
    }

    fn write(&self, writer: &mut Writer, message: &[u8]) -> Result<()> {
        let until_ns = self.runtime.clock().now_ns().saturating_add(ANSWER_NS);
        writer.write(message, &mut |writer| {
            self.still_there(until_ns)?;
            writer.sleep(LOOK_NS)
        })
    }

    fn read(&self, answers: &mut Reader, answer: &mut Vec<u8>) -> Result<()> {
        let until_ns = self.runtime.clock().now_ns().saturating_add(ANSWER_NS);
        answer.clear();
        while !answers.try_read(answer)? {
            answers.wait(LOOK_NS)?;
            self.still_there(until_ns)?;
        }
        Ok(())
    }

    fn still_there(&self, until_ns: u64) -> Result<()> {
        if self.is_lost.load(Ordering::SeqCst) {
            return Err(lost());
        }
        if self.runtime.clock().now_ns() >= until_ns {
            let seconds = ANSWER_NS / 1_000_000_000;
            fail!(Timeout, "the server of the shared store has not answered for {seconds} s");
        }
        Ok(())
    }

    /// A message without an answer.
    fn post(&self, kind: u8, body: &dyn Fn(&mut Vec<u8>)) {
        let mut calls = self.calls.lock();
        let Calls { writer, message, .. } = &mut *calls;
        message.clear();
        message.push(kind);
        body(message);
        if let Err(error) = self.write(writer, message) {
            drop(calls);
            self.lose_with(&error);
        }
    }

    // ---------- transfers

    /// Begins a transfer. `views` are of this process.
    pub fn submit(
        self: &Arc<Client>,
        (session, kind, level): (u32, TransferKind, Level),
        (ops, opts): (Ops, &OpOpts),
        what: What,
        views: Arc<Views>,
    ) -> Result<Vec<OpRef>> {
        self.check()?;
        let ops = self.promise(ops, opts)?;
        // A passed deadline may have ended some ops.
        let begun: Vec<bool> = ops.iter().map(|op| op.begin()).collect();
        if begun.contains(&false) {
            let rest = ops.iter().zip(&begun).filter(|(_, begun)| **begun);
            rest.for_each(|(op, _)| op.finish(Status::Timeout, None, None));
            return Ok(ops);
        }
        let number = u64::from(self.next.fetch_add(1, Ordering::Relaxed));
        let transfer = Transfer { ops: ops.clone(), views };
        self.transfers.lock().open.insert(number, transfer);
        ops.iter().for_each(|op| op.set_owner_slot(number as u32));
        let submission = Submission {
            transfer: number,
            session: SessionId(session),
            kind,
            level,
            lane: Lane(opts.priority),
            what,
        };
        type Answer = (Option<Copies>, Vec<Ended>);
        match self.ask::<Answer>(SUBMIT, &mut |out| submission.put(out)) {
            Ok((copies, ended)) => {
                ops.iter().for_each(|op| op.notify_issued());
                // A cancel before this found no transfer in the server.
                ops.iter().for_each(|op| self.cancel_if_abandoned(op));
                ended.into_iter().for_each(|one| self.end(one));
                copies.into_iter().for_each(|copies| self.copy(copies, true));
                Ok(ops)
            }
            Err(error) => {
                // Where the server is lost meanwhile, its loss has ended the ops.
                if self.transfers.lock().open.remove(&number).is_none() {
                    return Ok(ops);
                }
                for op in ops {
                    op.retract();
                    op.remove();
                }
                Err(error)
            }
        }
    }

    /// Begins a remote lookup.
    pub fn locate(
        self: &Arc<Client>,
        session: u32,
        ops: Ops,
        opts: &OpOpts,
        what: What,
    ) -> Result<OpRef> {
        let kind = (session, TransferKind::Prefetch, Level::Ram);
        let ops = self.submit(kind, (ops, opts), what, Arc::default())?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    fn promise(self: &Arc<Client>, ops: Ops, opts: &OpOpts) -> Result<Vec<OpRef>> {
        let runtime = &self.runtime;
        let count = match ops {
            Ops::Items(items) => {
                return Ok(vec![runtime.promise_each(opts, items, self.clone())?]);
            }
            Ops::Each(count) => count,
        };
        let mut ops: Vec<OpRef> = Vec::new();
        ops.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        for layer in 0..count as u64 {
            let opts = OpOpts { tag: opts.tag.wrapping_add(layer), ..opts.clone() };
            match runtime.promise(&opts, self.clone()) {
                Ok(op) => ops.push(op),
                Err(error) => {
                    for op in ops {
                        op.discard();
                        op.remove();
                    }
                    return Err(error);
                }
            }
        }
        Ok(ops)
    }

    fn cancel_if_abandoned(&self, op: &Op) {
        let (Some(status), Some(number)) = (op.abandon_status(), op.owner_slot()) else { return };
        let number = u64::from(number);
        let transfers = self.transfers.lock();
        let Some(transfer) = transfers.open.get(&number) else { return };
        let is_wanted = |op: &OpRef| op.state() & RELEASED == 0 && op.abandon_status().is_none();
        if transfer.ops.iter().any(is_wanted) {
            return;
        }
        drop(transfers);
        self.post(CANCEL, &|out| (number, status).put(out));
    }

    /// A transfer, or a part of it, has ended in the server.
    fn end(&self, ended: Ended) {
        let mut transfers = self.transfers.lock();
        let Some(transfer) = transfers.open.get(&ended.transfer) else { return };
        let op = transfer.ops.get(ended.part as usize).cloned();
        if ended.last {
            transfers.open.remove(&ended.transfer);
        }
        drop(transfers);
        let Some(op) = op else { return };
        op.report(ended.tokens, ended.bytes);
        op.report_items(&ended.outcomes);
        let status = ended.error.as_ref().map_or(Status::Ok, Error::status);
        op.finish(status, ended.error, None);
    }

    // ---------- copies

    /// Makes copies: at once in a calling thread if they are small, else in threads of their own.
    fn copy(&self, copies: Copies, is_caller: bool) {
        let number = copies.batch;
        let (parts, bytes) = match self.batches(copies) {
            Ok(parts) => parts,
            Err(error) => return self.report(number, Err(error)),
        };
        if is_caller && bytes <= self.inline_bytes {
            let outcome = parts.iter().try_for_each(copy_batch);
            let answer =
                self.ask::<Vec<Ended>>(DONE_NOW, &mut |out| (number, outcome.clone()).put(out));
            return match answer {
                Ok(ended) => ended.into_iter().for_each(|one| self.end(one)),
                Err(error) => log::warn!("copies of a shared store were not reported: {error}"),
            };
        }
        let left = AtomicU64::new(parts.len() as u64);
        let report = Arc::new(Report { number, left, failed: Mutex::new(None) });
        let mut tasks = self.tasks.lock();
        tasks.queue.extend(parts.into_iter().map(|batch| Task { batch, report: report.clone() }));
        drop(tasks);
        self.has_tasks.notify_all();
    }

    /// Batches of copies, each for one thread, and their bytes. The server's places are checked.
    fn batches(&self, copies: Copies) -> Result<(Vec<CopyBatch>, u64)> {
        let (mut parts, mut part, mut bytes, mut all) = (Vec::new(), CopyBatch::default(), 0, 0);
        let transfers = self.transfers.lock();
        let mut found: Option<(u64, &Transfer)> = None;
        for one in &copies.items {
            if bytes >= TASK_BYTES {
                parts.push(std::mem::take(&mut part));
                bytes = 0;
            }
            let transfer = match found {
                Some((number, transfer)) if number == one.transfer => transfer,
                _ => match transfers.open.get(&one.transfer) {
                    Some(transfer) => transfer,
                    None => fail!(NotFound, "there is no transfer {}", one.transfer),
                },
            };
            found = Some((one.transfer, transfer));
            let (item, item_bytes) = self.item(one, transfer, &mut part)?;
            part.items.push(item);
            (bytes, all) = (bytes + item_bytes, all + item_bytes);
        }
        parts.push(part);
        Ok((parts, all))
    }

    fn item(
        &self,
        one: &CopyOrder,
        transfer: &Transfer,
        part: &mut CopyBatch,
    ) -> Result<(CopyItem, u64)> {
        let layer = transfer.views.layers.get(one.layer as usize);
        let plane =
            layer.and_then(|layer| if one.is_v { layer.v.as_ref() } else { Some(&layer.k) });
        let Some(plane) = plane else { fail!(Corrupt, "the server names layer {}", one.layer) };
        let bytes = u64::from(one.tokens).saturating_mul(plane.view().token_bytes());
        let Some(address) = self.slabs.range(one.offset, bytes) else {
            fail!(Corrupt, "the server names {bytes} bytes at {}", one.offset);
        };
        let item = CopyItem {
            views: part.view_index(&transfer.views),
            layer: one.layer as usize,
            is_v: one.is_v,
            first: one.first,
            tokens: one.tokens,
            address: address.expose_provenance(),
            memory: Memory::Host,
            job: 0,
            direction: if one.to_client { Direction::Scatter } else { Direction::Gather },
            past_caches: one.past_caches,
            sum: None,
        };
        Ok((item, bytes))
    }

    fn report(&self, batch: u64, outcome: Result<()>) {
        self.post(DONE, &|out| (batch, outcome.clone()).put(out));
    }

    /// Main function of a copying thread.
    fn copy_tasks(&self) {
        let mut tasks = self.tasks.lock();
        loop {
            let Some(Task { batch, report }) = tasks.queue.pop_front() else {
                if tasks.stop {
                    return;
                }
                self.has_tasks.wait(&mut tasks);
                continue;
            };
            tasks.running += 1;
            drop(tasks);
            if let Err(error) = copy_batch(&batch) {
                report.failed.lock().get_or_insert(error);
            }
            drop(batch);
            if report.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let failed = report.failed.lock().take();
                self.report(report.number, failed.map_or(Ok(()), Err));
            }
            tasks = self.tasks.lock();
            tasks.running -= 1;
            if tasks.running == 0 {
                self.is_idle.notify_all();
            }
        }
    }

    // ---------- connection

    /// Main function of the thread that reads the server's notices.
    fn read_notices(&self, mut notices: Reader) {
        let mut notice = Vec::new();
        loop {
            notice.clear();
            loop {
                match notices.try_read(&mut notice) {
                    Ok(true) => break,
                    Ok(false) if self.is_over() => return,
                    Ok(false) => match notices.wait(LOOK_NS) {
                        Ok(()) => {}
                        Err(error) => return self.lose_with(&error),
                    },
                    Err(error) => return self.lose_with(&error),
                }
            }
            if let Err(error) = self.obey(&notice) {
                return self.lose_with(&error);
            }
        }
    }

    fn obey(&self, notice: &[u8]) -> Result<()> {
        let Some((&kind, body)) = notice.split_first() else { fail!(Corrupt, "an empty notice") };
        let mut bytes = Bytes::trusted(body);
        match kind {
            COPIES => self.copy(Copies::take(&mut bytes)?, false),
            ENDED => self.end(Ended::take(&mut bytes)?),
            other => fail!(Corrupt, "there is no notice {other}"),
        }
        bytes.end()
    }

    fn is_over(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst) || self.closing.load(Ordering::SeqCst)
    }

    /// Main function of the thread that watches the server.
    fn watch(&self) {
        let process = self.stream.peer_process();
        while !self.is_over() {
            let mut watched = vec![self.stop.watched(), self.stream.watched(false)];
            watched.extend(process.as_ref().map(Stream::watched_fd));
            if wait(&mut watched, -1).is_err() || watched[1..].iter().any(|one| one.ready) {
                return self.lose();
            }
        }
    }

    fn lose_with(&self, error: &Error) {
        if !self.is_over() {
            log::warn!("the connection to the shared store is given up: {error}");
        }
        self.lose();
    }

    /// The server is gone: ends all transfers, once no thread copies for them.
    fn lose(&self) {
        if self.is_lost.swap(true, Ordering::SeqCst) {
            return;
        }
        if !self.closing.load(Ordering::SeqCst) {
            log::warn!("the process that serves the shared store is gone");
        }
        self.wake();
        self.end_all(Status::Lost);
    }

    fn wake(&self) {
        self.wakers.iter().for_each(Waker::wake);
        self.stop.wake();
    }

    fn end_all(&self, status: Status) {
        let mut tasks = self.tasks.lock();
        tasks.queue.clear();
        while tasks.running > 0 {
            self.is_idle.wait_for(&mut tasks, LOOK_NS);
        }
        drop(tasks);
        let open = std::mem::take(&mut self.transfers.lock().open);
        for op in open.into_values().flat_map(|transfer| transfer.ops) {
            if op.state() & RELEASED == 0 {
                op.finish(status, Some(Error::new(status, lost().message())), None);
            }
        }
    }

    /// Closes the connection: the server ends what is open. Transfers in flight end as cancelled.
    pub fn close(&self) {
        if self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.end_all(Status::Cancelled);
        self.wake();
        self.tasks.lock().stop = true;
        self.has_tasks.notify_all();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                log::error!("a thread of a shared store panicked");
            }
        }
        self.stream.shut();
    }
}

impl Owner for Client {
    fn abandoned(&self, op: &Op) {
        self.cancel_if_abandoned(op);
    }

    fn shut(&self, _status: Status) {
        self.lose();
    }

    fn serve(&self) {}
}

/// Makes the copies of a batch.
fn copy_batch(batch: &CopyBatch) -> Result<()> {
    // SAFETY: places in shared memory that the server keeps for these copies until they are reported,
    // and the engine's memory, which it keeps until the op is released, which follows that.
    unsafe { copy_inline(batch) }
}

/// Connects, and gets the descriptors.
fn greet(path: &Path) -> Result<(Stream, Vec<OwnedFd>)> {
    let stream = Stream::connect(path)?;
    stream.pass(version().as_bytes(), &[])?;
    wait(&mut [stream.watched(false)], WELCOME_MS)?;
    let mut answer = [0; 4096];
    let Some((bytes, fds)) = stream.take_passed(&mut answer)? else {
        fail!(Timeout, "the server has not answered within {WELCOME_MS} ms");
    };
    match answer[..bytes].split_first() {
        Some((1, _)) => Ok((stream, fds)),
        Some((0, refusal)) => Err(Error::take(&mut Bytes::trusted(refusal))?),
        _ => fail!(Lost, "the server has closed the connection"),
    }
}

fn lost() -> Error {
    Error::new(
        Status::Lost,
        "the process that serves the shared store is gone: open the store again",
    )
}
