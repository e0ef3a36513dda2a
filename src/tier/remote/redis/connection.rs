//! A connection to a server: made, greeted, and then commands in their order out and answers in
//! the same order in. Nothing here waits.

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::io::link::{Pieces, Watch};
use crate::tier::remote::RemoteError;
use crate::tier::remote::fault::{Fault, Malformed};
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::command::Out;
use crate::tier::remote::redis::errors::{self, ErrorReply};
use crate::tier::remote::redis::operation::{Operation, Payload, window_of, words};
use crate::tier::remote::redis::resp::{Reader, Reply, Value, Want};
use crate::tier::remote::redis::slots;
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::transport::{TURNS, Transport};

/// Most bytes of what a server says when it is greeted.
const MAX_HELLO_BYTES: usize = 64 << 10;

/// What answers a greeting in no language that is known here.
const NO_SERVER: &str = "what answers there is no Redis: is the port right, and is it rediss:// \
                         for a port that speaks TLS?";

/// An item on its way.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// Which of the batch.
    pub item: usize,
    /// How often it was sent elsewhere.
    pub moves: u8,
    /// It was sent already, on a connection that had ended before.
    pub is_resent: bool,
    /// The server said that it may go well a moment later.
    pub is_delayed: bool,
    /// The node has it only for whoever asks.
    pub is_asking: bool,
    /// It goes to a node that only follows another one, and may not have it yet.
    pub is_replica_read: bool,
}

/// What the next answer is about.
#[derive(Debug)]
pub enum Expect {
    /// The greeting.
    Hello,
    /// The password, where the greeting is not known.
    Auth,
    /// What we are called: of no consequence.
    Name,
    /// The database.
    Select,
    /// That objects are read from a node that only follows another one: of no consequence.
    Follower,
    /// That the next is asked for.
    Asking,
    /// Who has which slot.
    SlotMap,
    /// An item.
    Item(Task),
    /// How many replicas have what was stored.
    Wait,
}

/// An answer.
pub struct Answer {
    /// What it is about.
    pub to: Expect,
    /// What came.
    pub came: Payload,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// TCP and TLS are being set up.
    Opening,
    Greeting,
    Ready,
}

/// A connection.
pub struct Connection {
    /// The connection below the protocol.
    pub transport: Transport,
    state: State,
    reader: Reader,
    /// What is to be sent.
    pub out: Out,
    expect: VecDeque<Expect>,
    /// Bytes that have come of the object that is coming, and how long it is.
    body: Option<(u64, u64)>,
    /// Items on the way, and their bytes.
    pub items: usize,
    /// Bytes that these items have.
    pub bytes: u64,
    /// Bytes that they may have.
    pub window: u64,
    /// Stored, but not known to be with replicas.
    pub unconfirmed: Vec<Task>,
    /// Something was stored since replicas were asked about last.
    pub is_to_confirm: bool,
    /// It was there before this batch, and nothing has come since.
    pub is_old: bool,
    /// It was looked at in this batch.
    pub is_checked: bool,
    /// What the server said when it was greeted.
    pub hello: Value,
}

impl Connection {
    /// Begins one, that must be ready at a time.
    pub fn begin(
        to: &SocketAddr,
        host: &str,
        ready_by_ns: u64,
        settings: &Settings,
    ) -> Result<Connection, Fault> {
        let tls = settings.trust.as_ref().map(|trust| (trust, host));
        Ok(Connection {
            transport: Transport::begin(to, tls, ready_by_ns)?,
            state: State::Opening,
            reader: Reader::default(),
            out: Out::default(),
            expect: VecDeque::new(),
            body: None,
            items: 0,
            bytes: 0,
            window: window_of(None),
            unconfirmed: Vec::new(),
            is_to_confirm: false,
            is_old: false,
            is_checked: true,
            hello: Value::Nil,
        })
    }

    /// Whether commands can be said.
    pub fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    /// Notes that what was said last will be answered.
    pub fn expects(&mut self, what: Expect) {
        self.expect.push_back(what);
    }

    /// The first answer that is due.
    pub fn due(&self) -> Option<&Expect> {
        self.expect.front()
    }

    /// Adds it to what is waited for; false = there is nothing to wait for.
    pub fn watch(&self, watch: &mut Watch) -> bool {
        self.transport.watch(watch, self.due().is_some(), !self.out.is_empty())
    }

    /// Whether an item has no answer.
    pub fn has_tasks(&self) -> bool {
        let is_task = |expect: &Expect| matches!(expect, Expect::Item(_));
        !self.unconfirmed.is_empty() || self.expect.iter().any(is_task)
    }

    /// All items that have no answer, of a connection that is given up.
    pub fn drain(&mut self) -> Vec<Task> {
        let on_way = self.expect.drain(..).filter_map(|expect| match expect {
            Expect::Item(task) => Some(task),
            _ => None,
        });
        self.unconfirmed.drain(..).chain(on_way).collect()
    }

    /// Before it is used again: whether it has ended meanwhile, or says what nobody asked for.
    pub fn check(
        &mut self,
        operation: &Operation,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<(), Fault> {
        self.is_checked = true;
        self.is_old = true;
        if self.expect.is_empty() {
            self.transport.can_read = true;
            self.receive(operation, settings, answers, pieces)?;
            if !self.reader.is_idle() {
                return Err(Malformed("half an answer that nobody asked for").into());
            }
        }
        Ok(())
    }

    /// Sends and takes what can be now; whether anything went. Answers are added to `answers`.
    pub fn exchange(
        &mut self,
        operation: &Operation,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<bool, Fault> {
        if self.state == State::Opening {
            if !self.transport.establish()? {
                return Ok(false);
            }
            self.greet(settings);
        }
        let sent = self.send(pieces)?;
        // Answers are taken while commands are sent: a server that has no room for more of its
        // own takes no more of ours.
        let came =
            self.receive(operation, settings, answers, pieces).map_err(|lost| self.early(lost))?;
        Ok(sent || came)
    }

    fn send(&mut self, pieces: &mut Pieces) -> Result<bool, Fault> {
        let mut has_moved = false;
        for _ in 0..TURNS {
            if (self.out.is_empty() && !self.transport.owes()) || !self.transport.can_write {
                break;
            }
            self.out.fill(pieces);
            // SAFETY: heads are the wire's own; values are valid until the batch ends, and with
            // that what is not sent of them is dropped.
            if let Some(bytes) = unsafe { self.transport.send(pieces) }? {
                self.out.sent(bytes);
            }
            has_moved = true;
            if self.out.is_empty() && self.state == State::Greeting {
                self.out.wipe();
                self.transport.wipe();
            }
        }
        Ok(has_moved)
    }

    fn receive(
        &mut self,
        operation: &Operation,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<bool, Fault> {
        let mut has_moved = false;
        for _ in 0..TURNS {
            if !self.transport.can_read {
                break;
            }
            let (item, (from, whole)) = (self.item(), self.body.unwrap_or((0, 0)));
            pieces.clear();
            let direct = operation.pieces(item, from, whole - from, pieces);
            let spare = self.reader.spare();
            pieces.push(spare.as_mut_ptr(), spare.len());
            // SAFETY: the parts of the item are valid, as whoever began the batch promises; the
            // spare bytes are the reader's own.
            let Some(bytes) = (unsafe { self.transport.receive(pieces) })? else { break };
            has_moved = true;
            let placed = direct.min(bytes as u64);
            self.reader.passed(placed);
            self.reader.filled(bytes - placed as usize);
            self.body = self.body.map(|(from, whole)| (from + placed, whole));
            self.read(operation, settings, answers)?;
        }
        Ok(has_moved)
    }

    /// Reads all that is here.
    fn read(
        &mut self,
        operation: &Operation,
        settings: &Settings,
        answers: &mut Vec<Answer>,
    ) -> Result<(), Fault> {
        loop {
            self.take_body(operation);
            let reply =
                self.reader.next(self.want(operation)).map_err(|said| self.malformed(said))?;
            let Some(reply) = reply else { return Ok(()) };
            let came = match reply {
                Reply::Body(bytes) => {
                    self.body = Some((0, bytes));
                    continue;
                }
                Reply::End => Payload::Body(self.body.take().map_or(0, |(_, whole)| whole)),
                Reply::Value(value) => Payload::Value(value),
            };
            self.is_old = false;
            let Some(to) = self.expect.pop_front() else {
                let words = match &came {
                    Payload::Value(Value::Error(words)) => errors::shown(words, settings.secret()),
                    _ => "an answer that nobody asked for".to_string(),
                };
                return Err(Fault::new(RemoteError::Malformed, words));
            };
            match (to, came) {
                (
                    to @ (Expect::Hello
                    | Expect::Auth
                    | Expect::Name
                    | Expect::Select
                    | Expect::Follower),
                    came,
                ) => {
                    let Payload::Value(value) = came else { continue };
                    self.greeted(&to, value, settings)?;
                }
                (Expect::Asking, _) => {}
                (to, came) => answers.push(Answer { to, came }),
            }
        }
    }

    /// What it means that something means nothing.
    fn malformed(&self, said: Malformed) -> Fault {
        match self.state {
            State::Ready => said.into(),
            _ => Fault::new(RemoteError::Malformed, NO_SERVER),
        }
    }

    /// Why it ended, where it ended before it was ready.
    fn early(&self, fault: Fault) -> Fault {
        match (self.state, fault.error) {
            (State::Greeting, RemoteError::Unreachable) => {
                let message = format!("{}, instead of an answer to the greeting", fault.message);
                Fault { message, ..fault }
            }
            _ => fault,
        }
    }

    /// What it is that has not ended in time, of a connection that is not ready.
    pub fn timeout_message(&self) -> &'static str {
        match self.transport.is_open() {
            false => self.transport.timeout_message(),
            true => "no answer to the greeting in time: is it a server?",
        }
    }

    /// Puts what is here of an object where it belongs.
    fn take_body(&mut self, operation: &Operation) {
        let item = self.item();
        let Some((from, whole)) = &mut self.body else { return };
        let bytes = self.reader.take(*whole - *from);
        // SAFETY: as whoever began the batch promises.
        unsafe { operation.copy(item, *from, bytes) };
        *from += bytes.len() as u64;
    }

    fn item(&self) -> usize {
        match self.due() {
            Some(Expect::Item(task)) => task.item,
            _ => 0,
        }
    }

    fn want(&self, operation: &Operation) -> Want {
        match self.due() {
            Some(Expect::Item(task)) => operation.want(task.item),
            Some(Expect::SlotMap) => Want::Value(slots::MAX_REPLY_BYTES),
            Some(Expect::Hello) => Want::Value(MAX_HELLO_BYTES),
            _ => Want::Word,
        }
    }
}

impl Connection {
    /// Says who we are.
    fn greet(&mut self, settings: &Settings) {
        self.state = State::Greeting;
        self.out.command(if settings.password.is_some() { 7 } else { 4 });
        self.out.word(b"HELLO");
        self.out.word(b"3");
        if let Some(password) = &settings.password {
            self.out.word(b"AUTH");
            self.out.word(settings.user.as_deref().unwrap_or("default").as_bytes());
            self.out.word(password.bytes());
        }
        self.out.word(b"SETNAME");
        self.out.word(b"kvtier");
        self.expect.push_back(Expect::Hello);
    }

    /// Goes on after an answer to the greeting.
    fn greeted(&mut self, to: &Expect, value: Value, settings: &Settings) -> Result<(), Fault> {
        match (to, &value) {
            (Expect::Hello, Value::Error(said)) if is_refused(said) => {
                match (&settings.password, &settings.user) {
                    (Some(password), Some(user)) => {
                        words(&mut self.out, &[b"AUTH", user.as_bytes(), password.bytes()]);
                    }
                    (Some(password), None) => words(&mut self.out, &[b"AUTH", password.bytes()]),
                    (None, _) => {}
                }
                if settings.password.is_some() {
                    self.expect.push_back(Expect::Auth);
                }
                words(&mut self.out, &[b"CLIENT", b"SETNAME", b"kvtier"]);
                self.expect.push_back(Expect::Name);
                self.select(settings);
            }
            // What a server says of a password may repeat it.
            (Expect::Auth, Value::Error(said)) => {
                let words = format!("the user or the password is refused: {}", errors::code(said));
                return Err(Fault::new(RemoteError::Denied, words));
            }
            (Expect::Hello | Expect::Select, Value::Error(said)) => {
                let here = Address { host: "".into(), port: 0 };
                let error = match errors::meaning(said, &here) {
                    ErrorReply::Error(error) => error,
                    _ => RemoteError::Busy,
                };
                let words = format!("the greeting is refused: {}", errors::code(said));
                return Err(Fault::new(error, words));
            }
            (Expect::Hello, Value::List(_)) => {
                self.hello = value;
                self.select(settings);
            }
            (Expect::Hello, _) => {
                return Err(self.malformed(Malformed("no answer to a greeting")));
            }
            _ => {}
        }
        if self.expect.is_empty() {
            self.state = State::Ready;
            self.window = window_of(self.transport.round_trip_ns());
        }
        Ok(())
    }

    fn select(&mut self, settings: &Settings) {
        if settings.reads_replicas {
            // One that refuses sends us to its master each time.
            words(&mut self.out, &[b"READONLY"]);
            self.expect.push_back(Expect::Follower);
        }
        if settings.db > 0 {
            words(&mut self.out, &[b"SELECT", settings.db.to_string().as_bytes()]);
            self.expect.push_back(Expect::Select);
        }
    }
}

/// Whether a server cannot be greeted in this way, but maybe in the old one.
fn is_refused(said: &[u8]) -> bool {
    errors::is_unknown_command(said) || said.starts_with(b"NOPROTO") || said.starts_with(b"NOPERM")
}
