//! The server's side of a shared store: a thread that accepts clients, and for each client one that
//! executes its messages and one that watches whether it is there.
//!
//! A client's copies are its own work: the state machine hands it batches, as to any worker, and hears
//! of their end. A client that dies has not made them, so cells of its puts never become visible, and
//! its reads end. Its sessions and namespaces are closed.

use std::collections::BTreeMap;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, JoinHandle, Mutex, spawn};
use crate::base::{panic, runtime::Role};
use crate::fail;
use crate::io::ring::{Reader, Writer};
use crate::io::shared_memory::SharedMemory;
use crate::io::socket::{Listener, Stream, Waker, wait};
use crate::store::handle::{Inner, RemoteOp, finish};
use crate::store::pool::calls::AnyCall;
use crate::store::pool::link::{CHANNEL_BYTES, Link, ServerEnds, lost};
use crate::store::pool::messages::{
    CANCEL, Copies, DONE, DONE_NOW, Ended, LAST_CALL, SUBMIT, Submission, What,
};
use crate::store::pool::wire::{Bytes, Opened, Wire, version};
use crate::store::state::batches::{Origin, Views};
use crate::store::state::blocks::BlockTransfer;
use crate::store::state::work::{CopyBatch, Work};
use crate::store::state::{CellRange, StoreState};
use crate::tier::host::Piece;

/// Most clients at once.
const MAX_CLIENTS: usize = 256;
/// Time for a new client to say its version.
const HELLO_MS: i32 = 5000;
/// Longest version.
const HELLO_BYTES: usize = 512;
/// The thread that watches a client looks so often for overdue copies.
const LOOK_MS: i32 = 1000;
/// A client's thread looks after the connection so often, if nothing wakes it.
const LOOK_NS: u64 = 100_000_000;
/// The same while notices wait for room.
const FLUSH_NS: u64 = 1_000_000;
/// Time for a client to make copies that it was handed; then the others wait for it no longer.
const COPY_NS: u64 = 30_000_000_000;
/// Time for a client to read an answer that is longer than its ring.
const ANSWER_NS: u64 = 30_000_000_000;

impl Inner {
    /// Accepts clients until the store ends.
    pub(in crate::store) fn serve_clients(self: Arc<Inner>, listener: Listener, waker: Arc<Waker>) {
        let mut threads = BTreeMap::new();
        let ended = Arc::new(Mutex::new(Vec::new()));
        let mut number = 0;
        loop {
            let mut watched = [listener.watched(), waker.watched()];
            if let Err(error) = wait(&mut watched, -1) {
                log::error!("the store accepts no more clients: {error}");
                break;
            }
            if watched[1].ready {
                break;
            }
            let stream = match listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => continue,
                Err(error) => {
                    log::warn!("a client could not connect: {error}");
                    // Out of descriptors, most likely: some will be free later.
                    let _ = wait(&mut [waker.watched()], 100);
                    continue;
                }
            };
            number += 1;
            let (inner, waker, client) = (self.clone(), waker.clone(), number);
            let note = ended.clone();
            let body = move || {
                inner.serve_client(client, &stream, &waker);
                note.lock().push(client);
            };
            match spawn(format!("kvt-client-{number}"), body) {
                Ok(thread) => drop(threads.insert(number, thread)),
                Err(error) => log::warn!("no thread for client {number}: {error}"),
            }
            let over = std::mem::take(&mut *ended.lock());
            over.iter().filter_map(|client| threads.remove(client)).for_each(join);
        }
        drop(listener);
        threads.into_values().for_each(join);
    }

    /// Serves one client: this thread watches it.
    fn serve_client(self: Arc<Inner>, number: u64, stream: &Stream, waker: &Waker) {
        let (link, calls, answers) = match self.welcome(number, stream) {
            Ok(welcomed) => welcomed,
            Err(error) => {
                let mut refusal = vec![0];
                error.put(&mut refusal);
                let _ = stream.pass(&refusal, &[]);
                return log::warn!("client {number} was refused: {error}");
            }
        };
        log::info!("client {number} has opened the store (process {})", stream.peer().0);
        let (inner, served) = (self.clone(), link.clone());
        let opened = Arc::new(Mutex::new(Opened::default()));
        let note = opened.clone();
        let thread = spawn(format!("kvt-calls-{number}"), move || {
            inner.runtime.thread_started(Role::Store, 0);
            let mut opened = Opened::default();
            let mut all = Serving { inner: &inner, link: &served, opened: &mut opened, answers };
            let done = panic::catch(|| all.serve(calls));
            *note.lock() = opened;
            if let Err(text) = done {
                inner.runtime.poison(&text);
                inner.state.lock().broken = true;
                inner.abort_all();
            }
        });
        let held = self.watch(&link, stream, waker);
        link.end();
        match thread.map(|thread| thread.join()) {
            Ok(Ok(())) => {}
            _ => log::error!("internal: the thread of client {number} has failed"),
        }
        let opened = std::mem::take(&mut *opened.lock());
        self.clean_up(&link, &opened, &held);
        log::info!("client {number} is gone");
    }

    /// Waits until a client or the store ends. Copies that the client does not make in time end as
    /// lost; their memory, which this returns, stays as it is as long as the client is there.
    fn watch(&self, link: &Link, stream: &Stream, waker: &Waker) -> Vec<Piece> {
        let (process, mut held) = (stream.peer_process(), Vec::new());
        loop {
            let mut watched = vec![stream.watched(false), waker.watched()];
            watched.extend(process.as_ref().map(Stream::watched_fd));
            let ended = wait(&mut watched, LOOK_MS);
            if ended.is_err() || watched.iter().any(|one| one.ready) {
                return held;
            }
            let until_ns = self.runtime.clock().now_ns().saturating_sub(COPY_NS);
            let overdue = link.take_overdue(until_ns);
            if overdue.is_empty() {
                continue;
            }
            log::warn!(
                "client {} has not made its copies for {} s, and is served no longer",
                link.number,
                COPY_NS / 1_000_000_000
            );
            link.end();
            for (batch, began_ns) in overdue {
                held.extend(self.state.lock().core.hold_for(&batch));
                drop(self.work_ends(Work::Copies(batch), Err(lost()), began_ns, None));
            }
        }
    }

    /// Checks a new client and gives it the memory.
    fn welcome(&self, number: u64, stream: &Stream) -> Result<(Arc<Link>, Reader, Writer)> {
        wait(&mut [stream.watched(false)], HELLO_MS)?;
        let mut hello = [0; HELLO_BYTES];
        let Some(bytes) = stream.read(&mut hello)? else {
            fail!(Timeout, "the client has not said its version within {HELLO_MS} ms");
        };
        let (own, theirs) = (version(), String::from_utf8_lossy(&hello[..bytes]));
        if own != theirs {
            fail!(
                Abi,
                "the store is served by version {own}, this process has {theirs}: use the same \
                 library in both"
            );
        }
        let Some(slabs) = &self.shared else { fail!(State, "this store is not shared") };
        let memory = Arc::new(SharedMemory::create(CHANNEL_BYTES)?);
        // SAFETY: the link keeps the memory, and so does the thread that has the link.
        let ServerEnds { calls, answers, notices } = unsafe { ServerEnds::of(&memory)? };
        let link = Arc::new(Link::new(number, notices, calls.waker(), memory.clone()));
        let mut links = self.links.lock();
        if links.len() >= MAX_CLIENTS {
            fail!(Again, "{MAX_CLIENTS} processes share the store, the limit: close one");
        }
        links.insert(number, link.clone());
        drop(links);
        if let Err(error) = stream.pass(&[1], &[memory.fd(), slabs.memory().fd()]) {
            self.links.lock().remove(&number);
            return Err(error);
        }
        Ok((link, calls, answers))
    }

    /// Ends what a client has left.
    fn clean_up(&self, link: &Arc<Link>, opened: &Opened, held: &[Piece]) {
        self.links.lock().remove(&link.number);
        for (batch, began_ns) in link.close() {
            drop(self.work_ends(Work::Copies(batch), Err(lost()), began_ns, None));
        }
        let mut state = self.state.lock();
        if state.stop || state.broken {
            return;
        }
        state.core.tick(self.runtime.clock().now_ns());
        state.core.let_go(held);
        let numbers: Vec<u32> = state
            .remote_ops
            .iter()
            .filter(|(_, op)| Arc::ptr_eq(&op.link, link))
            .map(|(number, _)| *number)
            .collect();
        numbers.iter().for_each(|&number| state.core.cancel(number, Status::Lost));
        for &session in &opened.sessions {
            if let Err(error) = state.core.close_session(session) {
                log::error!("internal: a session of a client could not be closed: {error}");
            }
        }
        for (&namespace, &count) in &opened.namespaces {
            (0..count).for_each(|_| state.core.close_namespace(namespace));
        }
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
    }

    /// Hands copies to the client that must make them. Returns work for this process.
    pub(in crate::store) fn for_this_process(&self, work: Work, began_ns: u64) -> Option<Work> {
        let Work::Copies(batch) = work else { return Some(work) };
        let Some(client) = batch.client() else { return Some(Work::Copies(batch)) };
        let link = self.links.lock().get(&client).cloned();
        let handed_over = match (link, &self.shared) {
            (Some(link), Some(slabs)) => link.hand_over(batch, began_ns, slabs),
            _ => Err(batch),
        };
        if let Err(batch) = handed_over {
            drop(self.work_ends(Work::Copies(batch), Err(lost()), began_ns, None));
        }
        None
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        log::error!("a client's thread panicked");
    }
}

/// One client's messages.
struct Serving<'a> {
    inner: &'a Inner,
    link: &'a Arc<Link>,
    opened: &'a mut Opened,
    answers: Writer,
}

impl Serving<'_> {
    /// Executes messages until the connection ends.
    fn serve(&mut self, mut calls: Reader) {
        let (mut message, mut answer) = (Vec::new(), Vec::new());
        loop {
            message.clear();
            loop {
                match calls.try_read(&mut message) {
                    Ok(true) => break,
                    Ok(false) if self.link.is_over() => return,
                    Ok(false) => {
                        let most_ns = if self.link.flush() { FLUSH_NS } else { LOOK_NS };
                        if let Err(error) = calls.wait(most_ns) {
                            return self.give_up(&error);
                        }
                    }
                    Err(error) => return self.give_up(&error),
                }
            }
            answer.clear();
            if let Err(error) = self.execute(&message, &mut answer) {
                return self.give_up(&error);
            }
            if !answer.is_empty()
                && let Err(error) = self.send(&answer)
            {
                return self.give_up(&error);
            }
        }
    }

    /// A client that breaks the rules is served no longer. What its copies touch stays as it is until
    /// the process is gone.
    fn give_up(&self, error: &Error) {
        log::warn!("client {} is served no longer: {error}", self.link.number);
        self.link.end();
    }

    fn send(&mut self, answer: &[u8]) -> Result<()> {
        let clock = self.inner.runtime.clock();
        let until_ns = clock.now_ns().saturating_add(ANSWER_NS);
        let link = self.link;
        self.answers.write(answer, &mut |writer| {
            if link.is_over() {
                fail!(Lost, "the client is gone");
            }
            if clock.now_ns() >= until_ns {
                fail!(Timeout, "the client does not read its answer");
            }
            writer.sleep(FLUSH_NS)
        })
    }

    /// Executes one message. An error is one of the protocol; those of calls are in the answer.
    fn execute(&mut self, message: &[u8], answer: &mut Vec<u8>) -> Result<()> {
        let Some((&kind, body)) = message.split_first() else { fail!(Corrupt, "an empty message") };
        match kind {
            SUBMIT => {
                let mut bytes = Bytes::of_client(body, self.opened);
                let submission = Submission::take(&mut bytes);
                let submission = submission.and_then(|one| bytes.end().map(|()| one));
                submission.and_then(|one| self.submit(one)).put(answer);
                Ok(())
            }
            DONE | DONE_NOW => {
                let mut bytes = Bytes::of_client(body, self.opened);
                let (batch, outcome) = <(u64, Result<()>)>::take(&mut bytes)?;
                bytes.end()?;
                if kind == DONE_NOW {
                    self.link.collect();
                }
                let reported = self.reported(batch, outcome);
                if kind == DONE_NOW {
                    Ok::<_, Error>(self.link.collected()).put(answer);
                }
                reported
            }
            CANCEL => {
                let mut bytes = Bytes::of_client(body, self.opened);
                let (transfer, status) = <(u64, Status)>::take(&mut bytes)?;
                bytes.end()?;
                self.cancel(transfer, status);
                Ok(())
            }
            kind if kind <= LAST_CALL => {
                let call = AnyCall::take(kind, &mut Bytes::of_client(body, self.opened));
                match call {
                    Ok(call) => self.call(call, answer),
                    Err(error) => Err::<(), Error>(error).put(answer),
                }
                Ok(())
            }
            other => fail!(Corrupt, "there is no message {other}"),
        }
    }

    fn call(&mut self, call: AnyCall, answer: &mut Vec<u8>) {
        let ran = self.with_state(|core, opened| {
            call.run(core, opened, answer);
            Ok(())
        });
        if let Err(error) = ran {
            Err::<(), Error>(error).put(answer);
        }
    }

    fn with_state<R>(
        &mut self,
        act: impl FnOnce(&mut StoreState, &mut Opened) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.inner.state.lock();
        state.check_open()?;
        state.core.tick(self.inner.runtime.clock().now_ns());
        let result = act(&mut state.core, self.opened);
        let completions = self.inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        result
    }

    /// Begins a transfer. Returns copies that the client makes now, and outcomes that are known now.
    fn submit(&mut self, submission: Submission) -> Result<(Option<Copies>, Vec<Ended>)> {
        let Submission { transfer, .. } = submission;
        let inner = self.inner;
        let mut state = inner.state.lock();
        state.check_open()?;
        state.core.tick(inner.runtime.clock().now_ns());
        // As in `handle::Store::begin`: numbers are reused only after their ops were collected.
        let mut completions = state.ended();
        let origin = Origin { client: self.link.number, transfer };
        let begun = begin(&mut state.core, submission, origin);
        let (mut own, mut direct) = (None, false);
        if let Ok(number) = begun {
            let op = RemoteOp { link: self.link.clone(), transfer };
            state.remote_ops.insert(number, op);
            own = state.core.take_own(number, u64::MAX);
            self.link.collect();
            direct = true;
        }
        completions.extend(inner.collect_completions(&mut state));
        drop(state);
        finish(completions);
        let ended = if direct { self.link.collected() } else { Vec::new() };
        begun?;
        let copies = own.map(|work| self.keep(work)).transpose()?;
        Ok((copies, ended))
    }

    fn keep(&self, work: Work) -> Result<Copies> {
        let began_ns = self.inner.runtime.clock().now_ns();
        let (Work::Copies(batch), Some(slabs)) = (work, &self.inner.shared) else {
            fail!(State, "this store is not shared");
        };
        self.link.keep(batch, began_ns, slabs).map_err(|batch| {
            self.end_copies(batch, Err(lost()), began_ns);
            lost()
        })
    }

    /// The client has made a batch of copies, or could not.
    fn reported(&self, number: u64, outcome: Result<()>) -> Result<()> {
        let (batch, began_ns) = self.link.take(number)?;
        // A client cannot lose the server's device.
        let outcome = outcome.map_err(|error| match error.status() {
            Status::Unavailable | Status::Panic => Error::new(Status::Io, error.message()),
            _ => error,
        });
        self.end_copies(batch, outcome, began_ns);
        Ok(())
    }

    fn end_copies(&self, batch: Box<CopyBatch>, outcome: Result<()>, began_ns: u64) {
        drop(self.inner.work_ends(Work::Copies(batch), outcome, began_ns, None));
    }

    fn cancel(&self, transfer: u64, status: Status) {
        let mut state = self.inner.state.lock();
        let is_it = |op: &RemoteOp| Arc::ptr_eq(&op.link, self.link) && op.transfer == transfer;
        let number = state.remote_ops.iter().find(|(_, op)| is_it(op)).map(|(number, _)| *number);
        let Some(number) = number else { return };
        state.core.cancel(number, status);
        let completions = self.inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
    }
}

/// Begins a transfer of a client.
fn begin(core: &mut StoreState, submission: Submission, origin: Origin) -> Result<u32> {
    let Submission { session, kind, level, lane, what, .. } = submission;
    let views = Arc::new(Views { layers: Vec::new(), origin: Some(origin) });
    match what {
        What::Cells { tokens, layers, by_layer, wanted } => {
            core.check_layers(session.0, layers)?;
            let cells = CellRange {
                first_token: tokens.0,
                tokens: tokens.1,
                first_layer: layers.0,
                layers: layers.1,
                by_layer,
                wanted,
                views,
                after: None,
            };
            core.submit_cell_range(session.0, kind, level, lane.0, cells)
        }
        What::Blocks { keys, layers } => {
            core.check_layers(session.0, layers)?;
            let (first_layer, layers) = layers;
            let blocks = BlockTransfer { keys, first_layer, layers, views, after: None };
            core.submit_blocks(session.0, (kind, level, lane.0), blocks)
        }
        What::Locate => core.locate(session.0),
        What::LocateBlocks(keys) => core.locate_blocks(session.0, keys),
    }
}
