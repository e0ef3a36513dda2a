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
use crate::tier::remote::s3::conn::{Conn, Reply};
use crate::tier::remote::s3::errors::Meaning;
use crate::tier::remote::s3::fault::Fault;
use crate::tier::remote::s3::place::Place;
use crate::tier::remote::s3::sign::Signer;
use crate::tier::remote::s3::work::{Bucket, Outcome, Step, Work};
use crate::tier::remote::s3::{Shared, greeting};
use crate::tier::remote::{Asks, Gets, Lane, Puts, Server, Trouble};

/// How often an item that may go well a moment later is tried again.
const RETRIES: u8 = 2;
/// What is waited before that: at least, and at most before each.
const PAUSE_NS: u64 = 50_000_000;
const MOST_NS: [u64; RETRIES as usize] = [400_000_000, 2_000_000_000];
/// How long a look at connections may take that is no wait.
const GLANCE_NS: u64 = 20_000;

/// A way to a bucket.
pub struct S3Lane {
    shared: Arc<Shared>,
    signer: Option<Signer>,
    place: Place,
    ways: Vec<Way>,
    /// The server asked for a pause until then.
    not_before_ns: u64,
    random: Random,
    /// What became of the last request that came to nothing.
    words: String,
    watch: Watch,
    pieces: Pieces,
    batch: Batch,
}

/// A connection, and the item that it is used for.
struct Way {
    conn: Conn,
    task: Option<Task>,
}

/// An item that has no result.
#[derive(Clone, Copy, Debug, Default)]
struct Task {
    item: usize,
    step: Step,
    /// It was sent to a server that does not know how to store what is new only.
    is_plain: bool,
    /// How often it was tried again.
    tries: u8,
    /// It was sent on a connection that had ended.
    is_repeated: bool,
    not_before_ns: u64,
}

/// A batch that is under way.
#[derive(Default)]
struct Batch {
    deadline_ns: u64,
    queue: VecDeque<Task>,
    /// Items that are sent again at a time.
    held: Vec<Task>,
}

// SAFETY: the pieces are filled and used within a call; between calls they are memory that
// nobody looks at.
unsafe impl Send for S3Lane {}

impl S3Lane {
    /// One without connections.
    pub fn new(shared: Arc<Shared>) -> S3Lane {
        // Lanes that wait equally long come again together.
        let seed = random_bytes().map_or(0, u64::from_le_bytes);
        S3Lane {
            signer: shared.settings.signer(),
            shared,
            place: Place::default(),
            ways: Vec::new(),
            not_before_ns: 0,
            random: Random::new(seed),
            words: String::new(),
            watch: Watch::default(),
            pieces: Pieces::default(),
            batch: Batch::default(),
        }
    }

    fn drive(&mut self, work: &mut Work, deadline_ns: u64) {
        self.begin(work, deadline_ns);
        while self.is_under_way() {
            let now = self.shared.clock.now_ns();
            if now >= deadline_ns {
                break;
            }
            self.release(now);
            self.start(work, now);
            if self.is_under_way() {
                self.wait(now);
                self.serve(work);
            }
        }
        self.be_late(work);
    }

    fn begin(&mut self, work: &mut Work, deadline_ns: u64) {
        self.batch = Batch { deadline_ns, ..Batch::default() };
        for item in 0..work.len() {
            if work.is_too_long(item) {
                work.fail(item, Trouble::TooLong);
            } else {
                self.batch.queue.push_back(Task { item, ..Task::default() });
            }
        }
    }

    fn is_under_way(&self) -> bool {
        !self.batch.queue.is_empty()
            || !self.batch.held.is_empty()
            || self.ways.iter().any(|way| way.task.is_some())
    }

    /// Items whose time has come are sent again.
    fn release(&mut self, now: u64) {
        let queue = &mut self.batch.queue;
        self.batch.held.retain(|task| {
            if task.not_before_ns <= now {
                queue.push_back(*task);
            }
            task.not_before_ns > now
        });
    }

    /// Gives items to connections, as many as there are, or can be.
    fn start(&mut self, work: &mut Work, now: u64) {
        if self.not_before_ns >= self.batch.deadline_ns {
            return self.give_up(work, Trouble::Later);
        }
        if self.not_before_ns > now {
            return;
        }
        while let Some(&task) = self.batch.queue.front() {
            let Some(number) = self.idle().or_else(|| self.connect(work, now)) else { return };
            self.batch.queue.pop_front();
            self.ask(number, task, work);
        }
    }

    /// A connection that waits for a request.
    fn idle(&mut self) -> Option<usize> {
        while let Some(number) = self.ways.iter().position(|way| way.task.is_none()) {
            if self.ways[number].conn.is_fit(&mut self.pieces) {
                return Some(number);
            }
            self.ways.swap_remove(number);
        }
        None
    }

    /// Begins another connection; None = there is no room for one, or it cannot be made.
    fn connect(&mut self, work: &mut Work, now: u64) -> Option<usize> {
        // A server that nobody could connect to is tried by one.
        let most = if self.place.is_well() { self.shared.settings.connections } else { 1 };
        if self.ways.len() >= most {
            return None;
        }
        match self.place.open_from(now, self.batch.deadline_ns) {
            None => {
                self.give_up(work, Trouble::Gone);
                return None;
            }
            Some(from) if from > now => return None,
            Some(_) => {}
        }
        let settings = &self.shared.settings;
        let by_ns = now.saturating_add(settings.connect_ns).min(self.batch.deadline_ns);
        match self.place.connect(settings, now, by_ns) {
            Ok(conn) => {
                self.ways.push(Way { conn, task: None });
                Some(self.ways.len() - 1)
            }
            Err(fault) => {
                self.words = fault.words;
                self.place.failed(now);
                if !fault.can_pass {
                    self.give_up(work, fault.trouble);
                }
                None
            }
        }
    }

    /// Sends the request of an item.
    fn ask(&mut self, number: usize, mut task: Task, work: &mut Work) {
        task.is_plain = self.shared.is_plain.load(Ordering::Relaxed);
        let request = work.request(task.item, task.step, task.is_plain);
        let way = &mut self.ways[number];
        let settings = &self.shared.settings;
        settings.write(&request, self.signer.as_mut(), wall_s(), way.conn.head());
        way.conn.ask(&work.transfer(task.item, &request));
        way.task = Some(task);
        self.go_on(number, work);
    }

    /// Waits until something can go on, or a time has come.
    fn wait(&mut self, now: u64) {
        let batch = &self.batch;
        let mut until =
            batch.held.iter().map(|task| task.not_before_ns).fold(batch.deadline_ns, u64::min);
        if !batch.queue.is_empty() && self.not_before_ns > now {
            until = until.min(self.not_before_ns);
        }
        self.watch.clear();
        for way in self.ways.iter().filter(|way| way.task.is_some()) {
            way.conn.watch(&mut self.watch);
            if !way.conn.is_made() {
                until = until.min(way.conn.by_ns);
            }
        }
        let is_pausing = self.not_before_ns <= now && !batch.queue.is_empty();
        if is_pausing && self.ways.iter().all(|way| way.task.is_none()) {
            // Nobody is connected to, and may not be for a moment.
            until = until.min(self.place.open_from(now, batch.deadline_ns).unwrap_or(now));
        }
        if self.ways.iter().any(|way| way.task.is_some() && way.conn.can_go_on()) {
            // The others are only looked at.
            until = self.shared.clock.now_ns().saturating_add(GLANCE_NS);
        }
        // It is late when a time has come: whoever waits looks at the clock again.
        if self.watch.wait(&self.shared.clock, until).is_ok() {
            let busy = self.ways.iter_mut().filter(|way| way.task.is_some());
            busy.enumerate().for_each(|(at, way)| way.conn.woke(self.watch.ready(at)));
        }
    }

    /// Lets all connections go on that have something to do.
    fn serve(&mut self, work: &mut Work) {
        let now = self.shared.clock.now_ns();
        for number in (0..self.ways.len()).rev() {
            let way = &self.ways[number];
            if way.task.is_some() {
                self.go_on(number, work);
            }
            let is_late = self.ways.get(number).is_some_and(|way| {
                way.task.is_some() && !way.conn.is_made() && way.conn.by_ns <= now
            });
            if is_late {
                let words = self.ways[number].conn.stage().to_string();
                let trouble = Trouble::Gone;
                self.lose(number, work, Fault { trouble, words, is_stale: false, can_pass: true });
            }
        }
    }

    fn go_on(&mut self, number: usize, work: &mut Work) {
        let way = &mut self.ways[number];
        let Some(task) = way.task else { return };
        let request = work.request(task.item, task.step, task.is_plain);
        let transfer = work.transfer(task.item, &request);
        let was_made = way.conn.is_made();
        let came = way.conn.exchange(&transfer, &mut self.pieces);
        if !was_made && way.conn.is_made() {
            self.place.did_well();
        }
        match came {
            Ok(None) => {}
            Ok(Some(reply)) => {
                way.task = None;
                if !way.conn.is_kept() {
                    self.ways.swap_remove(number);
                }
                self.came(task, work, &reply);
            }
            Err(fault) => self.lose(number, work, fault),
        }
    }

    /// A reply has come for an item.
    fn came(&mut self, task: Task, work: &mut Work, reply: &Reply) {
        let meaning = match work.came(task.item, task.step, task.is_plain, reply) {
            Outcome::Done => return,
            Outcome::Missing => {
                return self.batch.queue.push_front(Task { step: Step::Missing, ..task });
            }
            Outcome::Unknown => {
                self.shared.is_plain.store(true, Ordering::Relaxed);
                return self.batch.queue.push_front(task);
            }
            Outcome::Error(meaning) => meaning,
        };
        self.words = self.shared.words(reply);
        match meaning {
            Meaning::Trouble(trouble) => work.fail(task.item, trouble),
            Meaning::Again(trouble) => drop(self.again(task, work, trouble)),
            Meaning::Slower => self.not_before_ns = self.again(task, work, Trouble::Later),
            Meaning::Unknown => work.fail(task.item, Trouble::Nonsense),
        }
    }

    /// Tries an item again a moment later, if that is worth while; when that is, or would be.
    fn again(&mut self, task: Task, work: &mut Work, trouble: Trouble) -> u64 {
        let most = MOST_NS[usize::from(task.tries.min(RETRIES - 1))];
        let pause = PAUSE_NS + self.random.below(most - PAUSE_NS);
        let not_before_ns = self.shared.clock.now_ns().saturating_add(pause);
        if task.tries >= RETRIES || not_before_ns >= self.batch.deadline_ns {
            work.fail(task.item, trouble);
        } else {
            let tries = task.tries + 1;
            self.batch.held.push(Task { tries, not_before_ns, is_repeated: false, ..task });
        }
        not_before_ns
    }

    /// A connection is of no use any more.
    fn lose(&mut self, number: usize, work: &mut Work, fault: Fault) {
        let way = self.ways.swap_remove(number);
        let Some(task) = way.task else { return };
        self.words = fault.words;
        if !way.conn.is_made() {
            self.place.failed(self.shared.clock.now_ns());
            self.batch.queue.push_front(task);
            if !fault.can_pass {
                self.give_up(work, fault.trouble);
            }
        } else if fault.is_stale && !task.is_repeated {
            self.batch.queue.push_front(Task { is_repeated: true, ..task });
        } else if fault.can_pass {
            self.again(task, work, fault.trouble);
        } else {
            work.fail(task.item, fault.trouble);
        }
    }

    /// What is not under way comes to nothing.
    fn give_up(&mut self, work: &mut Work, trouble: Trouble) {
        self.batch.queue.drain(..).for_each(|task| work.fail(task.item, trouble));
    }

    /// What is left when the deadline has come, has come to nothing; a connection on which a reply
    /// may still come is of no use for another batch.
    fn be_late(&mut self, work: &mut Work) {
        let batch = std::mem::take(&mut self.batch);
        let mut is_late = false;
        for task in batch.queue.iter().chain(&batch.held) {
            work.fail(task.item, Trouble::Late);
            is_late = true;
        }
        self.ways.retain(|way| {
            if let Some(task) = way.task {
                work.fail(task.item, Trouble::Late);
                is_late = true;
            }
            way.task.is_none()
        });
        if is_late {
            self.words = "no answer in time".to_string();
        }
    }

    /// Asks the bucket itself for something.
    fn bucket(&mut self, method: &'static str, query: String, deadline_ns: u64) -> Result<Reply> {
        let mut bucket = Bucket { method, query, result: Err(Trouble::Later) };
        self.words.clear();
        self.drive(&mut Work::Bucket(&mut bucket), deadline_ns);
        bucket.result.map_err(|trouble| {
            let authority = &self.shared.settings.endpoint.authority;
            let words = match self.words.as_str() {
                "" => Error::from(trouble).message().to_string(),
                words => words.to_string(),
            };
            let status = match trouble {
                // It answered, and is not who it should be: waiting does not help.
                Trouble::Untrusted => Status::Invalid,
                trouble => trouble.status(),
            };
            Error::new(status, format!("{authority}: {words}"))
        })
    }
}

impl Lane for S3Lane {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        let mut reply = self.bucket("HEAD", String::new(), deadline_ns)?;
        if reply.head.status != 200 {
            // It may be forbidden to look at all of the bucket; and replies to HEAD say nothing of
            // why.
            let query = greeting::query(&self.shared.settings);
            reply = self.bucket("GET", query, deadline_ns)?;
        }
        greeting::server(&self.shared, &reply)
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.drive(&mut Work::Get(gets), deadline_ns);
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.drive(&mut Work::Put(puts), deadline_ns);
    }

    fn ask(&mut self, asks: &mut Asks, deadline_ns: u64) {
        self.drive(&mut Work::Ask(asks), deadline_ns);
    }

    fn remove(&mut self, asks: &mut Asks, deadline_ns: u64) {
        self.drive(&mut Work::Remove(asks), deadline_ns);
    }
}
