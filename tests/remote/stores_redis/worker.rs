//! A process with its own store. It carries out orders that it reads line by line, compares every
//! byte of a get with its expected value, and counts.

use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use kvtier::base::op::OpOpts;
use kvtier::base::status::Status;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::{Level, TransferKind};

use kvtier_testkit::fixtures::store::{Engine, Model, Shape, TestStore, document, marks_of, wait};

/// Cells of 16 KiB.
const MODEL: Model = Model { layers: 4, heads: 2, run: 256, chunk: 16 };
const DEADLINE: Duration = Duration::from_secs(5);
/// Time after the deadline within which an op must end. Only an op that hangs exceeds it.
const SLACK: Duration = Duration::from_secs(240);
/// Environment variable that marks a worker process: its number, and the number of processes.
pub const PLACE: &str = "KVTIER_CREW_PLACE";
/// Prefix of the lines that a worker process prints.
pub const MARK: &str = "crew:";

/// Counters of a worker process.
#[derive(Default)]
struct Done {
    turns: u64,
    put: u64,
    located: u64,
    got: u64,
    compared: u64,
    wrong: u64,
    over: u64,
    slowest_ms: u64,
}

struct Worker {
    store: TestStore,
    namespace: u32,
    done: Done,
    /// State of the random number generator.
    step: u32,
}

/// The process of [`crate::stores_redis::crew`]. Does nothing in an ordinary run.
#[test]
fn child() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let (number, of) = place.split_once('/').expect("which of how many");
    let place: (u32, u32) = (number.parse().expect("a number"), of.parse().expect("a number"));
    let orders = orders();
    let mut worker = None;
    let mut documents = 0;
    let mut is_working = false;
    loop {
        let order = match is_working {
            true => match orders.try_recv() {
                Err(TryRecvError::Empty) => None,
                order => Some(order.expect("orders until the end")),
            },
            false => Some(orders.recv().expect("orders until the end")),
        };
        let Some(order) = order else {
            let worker: &mut Worker = worker.as_mut().expect("it was opened");
            worker.chance(documents);
            continue;
        };
        let (word, rest) = order.split_once(' ').unwrap_or((&order, ""));
        is_working = word == "work";
        if word == "open" {
            let (count, spec) = rest.split_once(' ').expect("documents and a spec");
            documents = count.parse().expect("a number");
            worker = Some(Worker::open(spec, place.0));
        } else if word == "end" {
            let ended = worker.take().expect("it was opened");
            return say(&ended.end());
        } else {
            worker.as_mut().expect("it was opened").obey(word, rest, documents, place);
        }
        say(&worker.as_ref().expect("it was opened").told());
    }
}

/// Channel of the orders from standard input. Exits the process at the end of the input.
fn orders() -> Receiver<String> {
    let (tell, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
        std::process::exit(1);
    });
    orders
}

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK} {words}").and_then(|()| out.flush()).expect("a reader");
}

impl Worker {
    fn open(spec: &str, number: u32) -> Worker {
        let store = TestStore::open(&StoreSpec::parse(spec).expect("a sound spec"));
        let namespace = store.namespace(3, &MODEL);
        Worker { store, namespace, done: Done::default(), step: number * 7 }
    }

    fn obey(&mut self, word: &str, rest: &str, documents: u32, (number, of): (u32, u32)) {
        let mut whole = |document| while !self.is_whole(document) {};
        match word {
            "work" | "rest" => {}
            // Puts the process's own part of the documents, each until it is acknowledged.
            "fill" => (number..documents).step_by(of as usize).for_each(|it| self.put(it)),
            "all" => (0..documents).for_each(whole),
            "put" => self.put(rest.parse().expect("a document")),
            "find" => whole(rest.parse().expect("a document")),
            _ => panic!("{word}: unknown order"),
        }
    }

    fn put(&mut self, document: u32) {
        while self.turn(document, true).0 != Status::Ok {
            self.turn(document, false);
            breathe();
        }
    }

    /// Gets a document. Returns whether it is complete; pauses if it is not.
    fn is_whole(&mut self, document: u32) -> bool {
        let is_whole = self.turn(document, false) == (Status::Ok, tokens_of(document).len());
        if !is_whole {
            breathe();
        }
        is_whole
    }

    /// Puts or gets a random document.
    fn chance(&mut self, documents: u32) {
        self.step = self.step.wrapping_mul(1_103_515_245).wrapping_add(12345);
        self.turn((self.step >> 16) % documents, (self.step >> 8) % 3 == 0);
    }

    /// Puts a document, or locates and gets it. Returns its status, and the tokens of a get.
    fn turn(&mut self, number: u32, is_put: bool) -> (Status, usize) {
        let tokens = tokens_of(number);
        let session = self.store.session(self.namespace, &tokens);
        let went = match is_put {
            true => self.put_in(session, &tokens),
            false => self.get_from(session, &tokens),
        };
        self.store.close_session(session);
        self.done.turns += 1;
        went
    }

    fn put_in(&mut self, session: u32, tokens: &[u32]) -> (Status, usize) {
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(3, tokens));
        let began = Instant::now();
        let (store, opts) = (&self.store.handle, self.opts());
        let ops = store.submit(session, TransferKind::Put, Level::Remote, engine.whole(), &opts);
        let status = wait(&ops.expect("begun")[0]).status;
        self.took(began);
        self.done.put += u64::from(status == Status::Ok);
        (status, 0)
    }

    fn get_from(&mut self, session: u32, tokens: &[u32]) -> (Status, usize) {
        let began = Instant::now();
        let located = self.store.handle.locate(session, &self.opts()).expect("begun");
        let located = wait(&located);
        self.took(began);
        if located.status != Status::Ok || located.tokens == 0 {
            return (located.status, 0);
        }
        self.done.located += 1;
        let mut engine = Engine::new(MODEL, Shape::Heads, located.tokens);
        let began = Instant::now();
        let (store, opts) = (&self.store.handle, self.opts());
        let ops = store.submit(session, TransferKind::Get, Level::Ram, engine.whole(), &opts);
        let came = wait(&ops.expect("begun")[0]);
        self.took(began);
        self.done.wrong += engine.wrong_bytes(&marks_of(3, tokens), came.tokens);
        self.done.compared += came.tokens as u64;
        self.done.got += u64::from(came.status == Status::Ok);
        (came.status, came.tokens)
    }

    fn opts(&self) -> OpOpts {
        let deadline_ns = self.store.now_ns() + DEADLINE.as_nanos() as u64;
        OpOpts { deadline_ns, ..OpOpts::default() }
    }

    fn took(&mut self, since: Instant) {
        let took = since.elapsed();
        self.done.over += u64::from(took > DEADLINE + SLACK);
        self.done.slowest_ms = self.done.slowest_ms.max(took.as_millis() as u64);
    }

    /// All counters as text.
    fn told(&self) -> String {
        let Done { turns, put, located, got, compared, wrong, over, slowest_ms } = self.done;
        let far = self.store.handle.with(|core| Ok(core.remote_stats())).expect("open");
        let far = far.expect("a remote");
        let (fetched, corrupt, late) =
            (far.fetched_objects, far.corrupt_objects, far.late_requests);
        let (sent, failed, avoided) =
            (far.uploaded_objects, far.failed_uploads, far.skipped_objects);
        format!(
            "turns={turns} put={put} located={located} got={got} compared={compared} wrong={wrong} over={over} \
             slowest_ms={slowest_ms} fetched={fetched} corrupt={corrupt} late={late} sent={sent} \
             failed={failed} avoided={avoided}"
        )
    }

    fn end(self) -> String {
        self.store.settle();
        let told = self.told();
        self.store.close();
        told
    }
}

/// Tokens of the document with this number.
fn tokens_of(number: u32) -> Vec<u32> {
    document(number, 16 * (2 + number as usize % 5))
}

/// Pauses before a retry.
fn breathe() {
    std::thread::sleep(Duration::from_millis(20));
}
