//! A thread's way to a bucket: a few connections, each with one request at a time, until every
//! item of a batch has its result, or the deadline has come.

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

/// How often an item that may go well a moment later is tried retry.
const RETRIES: u8 = 2;
/// What is waited before that: at least, and at most before each.
const PAUSE_NS: u64 = 50_000_000;
const MOST_NS: [u64; RETRIES as usize] = [400_000_000, 2_000_000_000];
/// How long a look at connections may take that is no wait.
const GLANCE_NS: u64 = 20_000;

/// A way to a bucket.
pub struct S3Client {
    shared: Arc<Shared>,
    signer: Option<Signer>,
    addresses: Addresses,
    backoff: Backoff,
    pool: Vec<PooledConnection>,
    /// The server asked for a pause until then.
    not_before_ns: u64,
    random: Random,
    /// What became of the last request that came to nothing.
    last_error: String,
    watch: Watch,
    pieces: Pieces,
    batch: Batch,
}

/// A connection, and the item that it is used for.
struct PooledConnection {
    connection: Connection,
    task: Option<Task>,
}

/// An item that has no result.
#[derive(Clone, Copy, Debug, Default)]
struct Task {
    item: usize,
    step: Step,
    /// It was sent to a server that does not know how to store what is new only.
    is_unconditional: bool,
    /// How often it was tried retry.
    tries: u8,
    /// It was sent on a connection that had ended.
    is_resent: bool,
    not_before_ns: u64,
}

/// A batch that is under way.
#[derive(Default)]
struct Batch {
    deadline_ns: u64,
    queue: VecDeque<Task>,
    /// Items that are sent retry at a time.
    delayed: Vec<Task>,
}

// SAFETY: the pieces are filled and used within a call; between calls they are memory that
// nobody looks at.
unsafe impl Send for S3Client {}

impl S3Client {
    /// One without connections.
    pub fn new(shared: Arc<Shared>) -> S3Client {
        // Lanes that wait equally long come retry together.
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
        while self.is_under_way() {
            let now = self.shared.clock.now_ns();
            if now >= deadline_ns {
                break;
            }
            self.release(now);
            self.start(operation, now);
            if self.is_under_way() {
                self.wait(now);
                self.serve(operation);
            }
        }
        self.expire(operation);
    }

    fn begin(&mut self, operation: &mut Operation, deadline_ns: u64) {
        self.batch = Batch { deadline_ns, ..Batch::default() };
        for item in 0..operation.len() {
            if operation.is_too_long(item, MAX_BYTES) {
                operation.fail(item, RemoteError::TooLong);
            } else {
                self.batch.queue.push_back(Task { item, ..Task::default() });
            }
        }
    }

    fn is_under_way(&self) -> bool {
        !self.batch.queue.is_empty()
            || !self.batch.delayed.is_empty()
            || self.pool.iter().any(|pooled| pooled.task.is_some())
    }

    /// Items whose time has come are sent retry.
    fn release(&mut self, now: u64) {
        let queue = &mut self.batch.queue;
        self.batch.delayed.retain(|task| {
            if task.not_before_ns <= now {
                queue.push_back(*task);
            }
            task.not_before_ns > now
        });
    }

    /// Gives items to connections, as many as there are, or can be.
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
            self.ask(number, task, operation);
        }
    }

    /// A connection that waits for a request.
    fn idle(&mut self) -> Option<usize> {
        while let Some(number) = self.pool.iter().position(|pooled| pooled.task.is_none()) {
            if self.pool[number].connection.is_fit(&mut self.pieces) {
                return Some(number);
            }
            self.pool.swap_remove(number);
        }
        None
    }

    /// Begins another connection; None = there is no room for one, or it cannot be made.
    fn connect(&mut self, operation: &mut Operation, now: u64) -> Option<usize> {
        // A server that nobody could connect to is tried by one.
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

    /// Records a failed attempt: the next address has its turn; after the last one comes a pause.
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
    fn ask(&mut self, number: usize, mut task: Task, operation: &mut Operation) {
        task.is_unconditional = self.shared.is_unconditional.load(Ordering::Relaxed);
        let request = operation.request(task.item, task.step, task.is_unconditional);
        let pooled = &mut self.pool[number];
        let settings = &self.shared.settings;
        settings.write(&request, self.signer.as_mut(), wall_s(), pooled.connection.head());
        pooled.connection.ask(&operation.transfer(task.item, &request));
        pooled.task = Some(task);
        self.go_on(number, operation);
    }

    /// Waits until something can go on, or a time has come.
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
            // Nobody is connected to, and may not be for a moment.
            until = until.min(self.backoff.open_from(now, batch.deadline_ns).unwrap_or(now));
        }
        if self.pool.iter().any(|pooled| pooled.task.is_some() && pooled.connection.can_go_on()) {
            // The others are only looked at.
            until = self.shared.clock.now_ns().saturating_add(GLANCE_NS);
        }
        // It is late when a time has come: whoever waits looks at the clock retry.
        if self.watch.wait(&self.shared.clock, until).is_ok() {
            let busy = self.pool.iter_mut().filter(|pooled| pooled.task.is_some());
            busy.enumerate()
                .for_each(|(at, pooled)| pooled.connection.transport.woke(self.watch.ready(at)));
        }
    }

    /// Lets all connections go on that have something to do.
    fn serve(&mut self, operation: &mut Operation) {
        let now = self.shared.clock.now_ns();
        for number in (0..self.pool.len()).rev() {
            let pooled = &self.pool[number];
            if pooled.task.is_some() {
                self.go_on(number, operation);
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

    fn go_on(&mut self, number: usize, operation: &mut Operation) {
        let pooled = &mut self.pool[number];
        let Some(task) = pooled.task else { return };
        let request = operation.request(task.item, task.step, task.is_unconditional);
        let transfer = operation.transfer(task.item, &request);
        let was_made = pooled.connection.transport.is_open();
        let came = pooled.connection.exchange(&transfer, &mut self.pieces);
        if !was_made && pooled.connection.transport.is_open() {
            self.backoff.succeeded();
        }
        match came {
            Ok(None) => {}
            Ok(Some(reply)) => {
                pooled.task = None;
                if !pooled.connection.is_kept() {
                    self.pool.swap_remove(number);
                }
                self.came(task, operation, &reply);
            }
            Err(fault) => self.drop_connection(number, operation, fault),
        }
    }

    /// A reply has come for an item.
    fn came(&mut self, task: Task, operation: &mut Operation, reply: &Reply) {
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

    /// Tries an item retry a moment later, if that is worth while; when that is, or would be.
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

    /// A connection is of no use any more.
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

    /// What is not under way comes to nothing.
    fn give_up(&mut self, operation: &mut Operation, error: RemoteError) {
        self.batch.queue.drain(..).for_each(|task| operation.fail(task.item, error));
    }

    /// What is left when the deadline has come, has come to nothing; a connection on which a reply
    /// may still come is of no use for another batch.
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

    /// Asks the bucket itself for something.
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
                // It answered, and is not who it should be: waiting does not help.
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
            // It may be forbidden to look at all of the bucket; and replies to HEAD say nothing of
            // why.
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
