//! A client of a bucket. It has a few connections with one request each, until every item of a
//! batch has its result or the deadline has passed.

use std::collections::VecDeque;

use crate::base::clock::wall_s;
use crate::base::machine::random_bytes;
use crate::base::random::Random;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::base::sync::atomic::Ordering;
use crate::io::link::{Pieces, Watch};
use crate::tier::remote::fault::Fault;
use crate::tier::remote::reconnect::{Addresses, Backoff};
use crate::tier::remote::s3::connection::{Connection, Reply};
use crate::tier::remote::s3::errors::Meaning;
use crate::tier::remote::s3::operation::{BucketRequest, Operation, Outcome, Step};
use crate::tier::remote::s3::sign::Signer;
use crate::tier::remote::s3::url::Endpoint;
use crate::tier::remote::s3::{MAX_BYTES, Shared, probe};
use crate::tier::remote::{Client, Gets, Puts, Queries, RemoteError, Server};

/// Most repetitions of an item that failed for a passing reason.
const RETRIES: u8 = 2;
/// Least pause before a repetition, and the upper bound of each pause.
const PAUSE_NS: u64 = 50_000_000;
const MOST_NS: [u64; RETRIES as usize] = [400_000_000, 2_000_000_000];
/// Time for a check of idle connections while another one can proceed.
const GLANCE_NS: u64 = 20_000;

/// A client of a bucket.
pub struct S3Client {
    shared: Arc<Shared>,
    signer: Option<Signer>,
    addresses: Addresses,
    backoff: Backoff,
    pool: Vec<PooledConnection>,
    /// End of the pause that the server requested.
    not_before_ns: u64,
    random: Random,
    /// Reason of the last failure, for people.
    last_error: String,
    watch: Watch,
    pieces: Pieces,
    batch: Batch,
}

/// A connection, and the item that uses it.
struct PooledConnection {
    connection: Connection,
    task: Option<Task>,
}

/// An item without a result.
#[derive(Clone, Copy, Debug, Default)]
struct Task {
    item: usize,
    step: Step,
    /// The server cannot store conditionally; see `Shared::is_unconditional`.
    is_unconditional: bool,
    /// Repetitions so far.
    tries: u8,
    /// It was sent before, on a connection that the server had closed.
    is_resent: bool,
    not_before_ns: u64,
}

/// The batch in flight.
#[derive(Default)]
struct Batch {
    deadline_ns: u64,
    queue: VecDeque<Task>,
    /// Items that are sent again later.
    delayed: Vec<Task>,
}

// SAFETY: the pieces are filled and used within one call; between calls no one reads them.
unsafe impl Send for S3Client {}

impl S3Client {
    /// A client without connections.
    pub fn new(shared: Arc<Shared>) -> S3Client {
        // A random pause keeps clients from coming back at the same time.
        let seed = random_bytes().map_or(0, u64::from_le_bytes);
        S3Client {
            signer: shared.settings.signer(),
            shared,
            addresses: Addresses::default(),
            backoff: Backoff::default(),
            pool: Vec::new(),
            not_before_ns: 0,
            random: Random::new(seed),
            last_error: String::new(),
            watch: Watch::default(),
            pieces: Pieces::default(),
            batch: Batch::default(),
        }
    }

    fn drive(&mut self, operation: &mut Operation, deadline_ns: u64) {
        self.begin(operation, deadline_ns);
        while self.is_in_flight() {
            let now = self.shared.clock.now_ns();
            if now >= deadline_ns {
                break;
            }
            self.release(now);
            self.start(operation, now);
            if self.is_in_flight() {
                self.wait(now);
                self.serve(operation);
            }
        }
        self.expire(operation);
    }

    fn begin(&mut self, operation: &mut Operation, deadline_ns: u64) {
        self.batch = Batch { deadline_ns, ..Batch::default() };
        for item in 0..operation.item_count() {
            if operation.is_too_long(item, MAX_BYTES) {
                operation.fail(item, RemoteError::TooLong);
            } else {
                self.batch.queue.push_back(Task { item, ..Task::default() });
            }
        }
    }

    fn is_in_flight(&self) -> bool {
        !self.batch.queue.is_empty()
            || !self.batch.delayed.is_empty()
            || self.pool.iter().any(|pooled| pooled.task.is_some())
    }

    /// Queues items again whose pause is over.
    fn release(&mut self, now: u64) {
        let queue = &mut self.batch.queue;
        self.batch.delayed.retain(|task| {
            if task.not_before_ns <= now {
                queue.push_back(*task);
            }
            task.not_before_ns > now
        });
    }

    /// Assigns queued items to idle or new connections.
    fn start(&mut self, operation: &mut Operation, now: u64) {
        if self.not_before_ns >= self.batch.deadline_ns {
            return self.give_up(operation, RemoteError::Busy);
        }
        if self.not_before_ns > now {
            return;
        }
        while let Some(&task) = self.batch.queue.front() {
            let Some(number) = self.idle().or_else(|| self.connect(operation, now)) else { return };
            self.batch.queue.pop_front();
            self.begin_request(number, task, operation);
        }
    }

    /// An idle connection that can be used.
    fn idle(&mut self) -> Option<usize> {
        while let Some(number) = self.pool.iter().position(|pooled| pooled.task.is_none()) {
            if self.pool[number].connection.is_fit(&mut self.pieces) {
                return Some(number);
            }
            self.pool.swap_remove(number);
        }
        None
    }

    /// Begins another connection; None = the limit is reached, or connecting is not possible now.
    fn connect(&mut self, operation: &mut Operation, now: u64) -> Option<usize> {
        // After a failure only one connection is tried.
        let most = if self.backoff.is_well() { self.shared.settings.connections } else { 1 };
        if self.pool.len() >= most {
            return None;
        }
        match self.backoff.open_from(now, self.batch.deadline_ns) {
            None => {
                self.give_up(operation, RemoteError::Unreachable);
                return None;
            }
            Some(from) if from > now => return None,
            Some(_) => {}
        }
        match self.begin_connection(now) {
            Ok(connection) => {
                self.pool.push(PooledConnection { connection, task: None });
                Some(self.pool.len() - 1)
            }
            Err(fault) => {
                self.last_error = fault.message;
                self.connect_failed(now);
                if !fault.is_transient {
                    self.give_up(operation, fault.error);
                }
                None
            }
        }
    }

    fn begin_connection(&mut self, now: u64) -> std::result::Result<Connection, Fault> {
        let settings = &self.shared.settings;
        let ready_by_ns = now.saturating_add(settings.connect_ns).min(self.batch.deadline_ns);
        let Endpoint { host, port, .. } = &settings.endpoint;
        let to = self.addresses.current(host, *port, now)?;
        let tls = settings.trust.as_ref().map(|trust| (trust, host.as_str()));
        Connection::begin(&to, tls, ready_by_ns)
    }

    /// Records a failed attempt: the next address is tried next; a pause follows the last one.
    fn connect_failed(&mut self, now: u64) {
        if self.addresses.advance() {
            return;
        }
        self.addresses.restart();
        // Connections that were begun together fail together: they count as one failure.
        if !self.backoff.is_pausing(now) {
            self.backoff.failed(now);
        }
    }

    /// Sends the request of an item.
    fn begin_request(&mut self, number: usize, mut task: Task, operation: &mut Operation) {
        task.is_unconditional = self.shared.is_unconditional.load(Ordering::Relaxed);
        let request = operation.request(task.item, task.step, task.is_unconditional);
        let pooled = &mut self.pool[number];
        let settings = &self.shared.settings;
        settings.write(&request, self.signer.as_mut(), wall_s(), pooled.connection.head());
        pooled.connection.begin_request(&operation.transfer(task.item, &request));
        pooled.task = Some(task);
        self.continue_batch(number, operation);
    }

    /// Waits until a connection is ready or a time has passed.
    fn wait(&mut self, now: u64) {
        let batch = &self.batch;
        let mut until =
            batch.delayed.iter().map(|task| task.not_before_ns).fold(batch.deadline_ns, u64::min);
        if !batch.queue.is_empty() && self.not_before_ns > now {
            until = until.min(self.not_before_ns);
        }
        self.watch.clear();
        for pooled in self.pool.iter().filter(|pooled| pooled.task.is_some()) {
            pooled.connection.watch(&mut self.watch);
            if !pooled.connection.transport.is_open() {
                until = until.min(pooled.connection.transport.ready_by_ns);
            }
        }
        let is_pausing = self.not_before_ns <= now && !batch.queue.is_empty();
        if is_pausing && self.pool.iter().all(|pooled| pooled.task.is_none()) {
            // There is no connection, and a pause is in flight.
            until = until.min(self.backoff.open_from(now, batch.deadline_ns).unwrap_or(now));
        }
        if self.pool.iter().any(|pooled| pooled.task.is_some() && pooled.connection.is_reusable()) {
            // One connection can proceed: the others are only polled.
            until = self.shared.clock.now_ns().saturating_add(GLANCE_NS);
        }
        // An error means that a time has passed: the caller reads the clock again.
        if self.watch.wait(&self.shared.clock, until).is_ok() {
            let busy = self.pool.iter_mut().filter(|pooled| pooled.task.is_some());
            busy.enumerate()
                .for_each(|(at, pooled)| pooled.connection.transport.woke(self.watch.ready(at)));
        }
    }

    /// Lets all busy connections proceed.
    fn serve(&mut self, operation: &mut Operation) {
        let now = self.shared.clock.now_ns();
        for number in (0..self.pool.len()).rev() {
            let pooled = &self.pool[number];
            if pooled.task.is_some() {
                self.continue_batch(number, operation);
            }
            let is_late = self.pool.get(number).is_some_and(|pooled| {
                pooled.task.is_some()
                    && !pooled.connection.transport.is_open()
                    && pooled.connection.transport.ready_by_ns <= now
            });
            if is_late {
                let message = self.pool[number].connection.transport.timeout_message();
                self.drop_connection(number, operation, Fault::unreachable(message));
            }
        }
    }

    fn continue_batch(&mut self, number: usize, operation: &mut Operation) {
        let pooled = &mut self.pool[number];
        let Some(task) = pooled.task else { return };
        let request = operation.request(task.item, task.step, task.is_unconditional);
        let transfer = operation.transfer(task.item, &request);
        let was_made = pooled.connection.transport.is_open();
        let complete = pooled.connection.exchange(&transfer, &mut self.pieces);
        if !was_made && pooled.connection.transport.is_open() {
            self.backoff.succeeded();
        }
        match complete {
            Ok(None) => {}
            Ok(Some(reply)) => {
                pooled.task = None;
                if !pooled.connection.is_kept() {
                    self.pool.swap_remove(number);
                }
                self.complete(task, operation, &reply);
            }
            Err(fault) => self.drop_connection(number, operation, fault),
        }
    }

    /// Handles the reply for an item.
    fn complete(&mut self, task: Task, operation: &mut Operation, reply: &Reply) {
        let meaning = match operation.complete(task.item, task.step, task.is_unconditional, reply) {
            Outcome::Done => return,
            Outcome::Missing => {
                return self.batch.queue.push_front(Task { step: Step::Missing, ..task });
            }
            Outcome::NotImplemented => {
                self.shared.is_unconditional.store(true, Ordering::Relaxed);
                return self.batch.queue.push_front(task);
            }
            Outcome::Error(meaning) => meaning,
        };
        self.last_error = self.shared.words(reply);
        match meaning {
            Meaning::Error(error) => operation.fail(task.item, error),
            Meaning::Retry(error) => drop(self.retry(task, operation, error)),
            Meaning::SlowDown => {
                self.not_before_ns = self.retry(task, operation, RemoteError::Busy)
            }
            Meaning::NotImplemented => operation.fail(task.item, RemoteError::Malformed),
        }
    }

    /// Queues an item for a repetition if the deadline allows one; returns the time of the
    /// repetition.
    fn retry(&mut self, task: Task, operation: &mut Operation, error: RemoteError) -> u64 {
        let most = MOST_NS[usize::from(task.tries.min(RETRIES - 1))];
        let pause = PAUSE_NS + self.random.below(most - PAUSE_NS);
        let not_before_ns = self.shared.clock.now_ns().saturating_add(pause);
        if task.tries >= RETRIES || not_before_ns >= self.batch.deadline_ns {
            operation.fail(task.item, error);
        } else {
            let tries = task.tries + 1;
            self.batch.delayed.push(Task { tries, not_before_ns, is_resent: false, ..task });
        }
        not_before_ns
    }

    /// Gives up a connection.
    fn drop_connection(&mut self, number: usize, operation: &mut Operation, fault: Fault) {
        let pooled = self.pool.swap_remove(number);
        let Some(task) = pooled.task else { return };
        self.last_error = fault.message;
        if !pooled.connection.transport.is_open() {
            self.connect_failed(self.shared.clock.now_ns());
            self.batch.queue.push_front(task);
            if !fault.is_transient {
                self.give_up(operation, fault.error);
            }
        } else if fault.is_stale && !task.is_resent {
            self.batch.queue.push_front(Task { is_resent: true, ..task });
        } else if fault.is_transient {
            self.retry(task, operation, fault.error);
        } else {
            operation.fail(task.item, fault.error);
        }
    }

    /// Fails all queued items.
    fn give_up(&mut self, operation: &mut Operation, error: RemoteError) {
        self.batch.queue.drain(..).for_each(|task| operation.fail(task.item, error));
    }

    /// Fails all items that are left at the deadline. A connection that may still deliver a reply
    /// cannot serve another batch.
    fn expire(&mut self, operation: &mut Operation) {
        let batch = std::mem::take(&mut self.batch);
        let mut is_late = false;
        for task in batch.queue.iter().chain(&batch.delayed) {
            operation.fail(task.item, RemoteError::Timeout);
            is_late = true;
        }
        self.pool.retain(|pooled| {
            if let Some(task) = pooled.task {
                operation.fail(task.item, RemoteError::Timeout);
                is_late = true;
            }
            pooled.task.is_none()
        });
        if is_late {
            self.last_error = "no answer in time".to_string();
        }
    }

    /// Sends a request about the bucket itself.
    fn bucket(&mut self, method: &'static str, query: String, deadline_ns: u64) -> Result<Reply> {
        let mut bucket = BucketRequest { method, query, result: Err(RemoteError::Busy) };
        self.last_error.clear();
        self.drive(&mut Operation::Control(&mut bucket), deadline_ns);
        bucket.result.map_err(|error| {
            let authority = &self.shared.settings.endpoint.authority;
            let words = match self.last_error.as_str() {
                "" => Error::from(error).message().to_string(),
                words => words.to_string(),
            };
            let status = match error {
                // The server replied: waiting does not help.
                RemoteError::Untrusted => Status::Invalid,
                error => error.status(),
            };
            Error::new(status, format!("{authority}: {words}"))
        })
    }
}

impl Client for S3Client {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        let mut reply = self.bucket("HEAD", String::new(), deadline_ns)?;
        if reply.head.status != 200 {
            // Listing the whole bucket may be forbidden, and a reply to HEAD has no reason.
            let query = probe::query(&self.shared.settings);
            reply = self.bucket("GET", query, deadline_ns)?;
        }
        probe::server(&self.shared, &reply)
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.drive(&mut Operation::Get(gets), deadline_ns);
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.drive(&mut Operation::Put(puts), deadline_ns);
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.drive(&mut Operation::Lookup(queries), deadline_ns);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.drive(&mut Operation::Remove(queries), deadline_ns);
    }
}
