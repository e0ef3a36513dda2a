//! A connection to a server: it is opened, greets the server, then sends commands and receives
//! replies in order. Nothing here blocks.

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::io::link::{Pieces, Watch};
use crate::tier::remote::RemoteError;
use crate::tier::remote::fault::{Fault, Malformed};
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::command::CommandBuffer;
use crate::tier::remote::redis::errors::{self, ErrorReply};
use crate::tier::remote::redis::operation::{Operation, Payload, window_of, write_command};
use crate::tier::remote::redis::resp::{Reader, Reply, Value, Want};
use crate::tier::remote::redis::slots;
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::transport::{TURNS, Transport};

/// Longest reply to the greeting, in bytes.
const MAX_HELLO_BYTES: usize = 64 << 10;

/// Message for a greeting whose reply is no RESP.
const NO_SERVER: &str = "the server does not speak the Redis protocol: check the port, and use rediss:// \
                         for a port that speaks TLS";

/// An item in flight.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// Index in the batch.
    pub item: usize,
    /// Redirections so far.
    pub moves: u8,
    /// It was sent before, on a connection that the server had closed.
    pub is_resent: bool,
    /// It was delayed once because the server was busy.
    pub is_delayed: bool,
    /// The node serves it only after ASKING.
    pub is_asking: bool,
    /// It is sent to a replica, which may not have it yet.
    pub is_replica_read: bool,
}

/// The command that the next reply belongs to.
#[derive(Debug)]
pub enum Expect {
    /// HELLO.
    Hello,
    /// AUTH, where HELLO is unknown.
    Auth,
    /// CLIENT SETNAME; its reply is ignored.
    Name,
    /// SELECT.
    Select,
    /// READONLY; its reply is ignored.
    Follower,
    /// ASKING.
    Asking,
    /// CLUSTER SLOTS.
    Slots,
    /// The command of an item.
    Item(Task),
    /// WAIT: how many replicas have the objects.
    Wait,
}

/// A reply.
pub struct Answer {
    /// The command that it belongs to.
    pub to: Expect,
    /// Its content.
    pub payload: Payload,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// TCP and TLS are being set up.
    Opening,
    Greeting,
    Ready,
}

/// A connection to a server.
pub struct Connection {
    /// The connection below the protocol.
    pub transport: Transport,
    state: State,
    reader: Reader,
    /// Commands to send.
    pub out: CommandBuffer,
    expect: VecDeque<Expect>,
    /// The object being received: bytes received, and its length.
    body: Option<(u64, u64)>,
    /// Items without a reply.
    pub items: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Most bytes of theirs.
    pub window: u64,
    /// Stored items that the replicas have not confirmed.
    pub unconfirmed: Vec<Task>,
    /// Items were stored since the last WAIT.
    pub is_to_confirm: bool,
    /// The connection is from an earlier batch and has delivered nothing in this one.
    pub is_reused: bool,
    /// It was checked in this batch.
    pub is_checked: bool,
    /// The server's reply to HELLO.
    pub hello: Value,
}

impl Connection {
    /// Begins to connect; the connection must be ready at `ready_by_ns`.
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
            out: CommandBuffer::default(),
            expect: VecDeque::new(),
            body: None,
            items: 0,
            bytes: 0,
            window: window_of(None),
            unconfirmed: Vec::new(),
            is_to_confirm: false,
            is_reused: false,
            is_checked: true,
            hello: Value::Nil,
        })
    }

    /// Whether commands can be sent.
    pub fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    /// Records that a reply to the last command will follow.
    pub fn expects(&mut self, what: Expect) {
        self.expect.push_back(what);
    }

    /// The command whose reply is next.
    pub fn due(&self) -> Option<&Expect> {
        self.expect.front()
    }

    /// Adds the connection to `watch`; false = it waits for nothing.
    pub fn watch(&self, watch: &mut Watch) -> bool {
        self.transport.watch(watch, self.due().is_some(), !self.out.is_empty())
    }

    /// Whether an item has no reply yet.
    pub fn has_tasks(&self) -> bool {
        let is_task = |expect: &Expect| matches!(expect, Expect::Item(_));
        !self.unconfirmed.is_empty() || self.expect.iter().any(is_task)
    }

    /// Removes and returns all items without a reply, when the connection is given up.
    pub fn drain(&mut self) -> Vec<Task> {
        let in_flight = self.expect.drain(..).filter_map(|expect| match expect {
            Expect::Item(task) => Some(task),
            _ => None,
        });
        self.unconfirmed.drain(..).chain(in_flight).collect()
    }

    /// Before the connection is used again: fails if the server has closed it or sent an
    /// unrequested reply.
    pub fn check(
        &mut self,
        operation: &Operation,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<(), Fault> {
        self.is_checked = true;
        self.is_reused = true;
        if self.expect.is_empty() {
            self.transport.can_read = true;
            self.receive(operation, settings, answers, pieces)?;
            if !self.reader.is_idle() {
                return Err(Malformed("an incomplete reply without a request").into());
            }
        }
        Ok(())
    }

    /// Sends and receives what it can; whether any bytes moved. Replies are added to `answers`.
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
        // Replies are received while commands are sent: a server whose send buffer is full reads no
        // more commands.
        let payload = self
            .receive(operation, settings, answers, pieces)
            .map_err(|lost| self.closed_in_reply(lost))?;
        Ok(sent || payload)
    }

    fn send(&mut self, pieces: &mut Pieces) -> Result<bool, Fault> {
        let mut has_moved = false;
        for _ in 0..TURNS {
            if (self.out.is_empty() && !self.transport.wants_write()) || !self.transport.can_write {
                break;
            }
            self.out.fill(pieces);
            // SAFETY: heads are the connection's own. Values are valid until the batch ends; unsent
            // ones are dropped then.
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
            // SAFETY: the parts of the item are valid, as the caller of the batch guarantees; the
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

    /// Decodes all bytes that have arrived.
    fn read(
        &mut self,
        operation: &Operation,
        settings: &Settings,
        answers: &mut Vec<Answer>,
    ) -> Result<(), Fault> {
        loop {
            self.take_body(operation);
            let reply =
                self.reader.next(self.want(operation)).map_err(|answer| self.malformed(answer))?;
            let Some(reply) = reply else { return Ok(()) };
            let payload = match reply {
                Reply::Body(bytes) => {
                    self.body = Some((0, bytes));
                    continue;
                }
                Reply::End => Payload::Body(self.body.take().map_or(0, |(_, whole)| whole)),
                Reply::Value(value) => Payload::Value(value),
            };
            self.is_reused = false;
            let Some(to) = self.expect.pop_front() else {
                let message = match &payload {
                    Payload::Value(Value::Error(message)) => {
                        errors::shown(message, settings.secret())
                    }
                    _ => "a reply without a request".to_string(),
                };
                return Err(Fault::new(RemoteError::Malformed, message));
            };
            match (to, payload) {
                (
                    to @ (Expect::Hello
                    | Expect::Auth
                    | Expect::Name
                    | Expect::Select
                    | Expect::Follower),
                    payload,
                ) => {
                    let Payload::Value(value) = payload else { continue };
                    self.greeted(&to, value, settings)?;
                }
                (Expect::Asking, _) => {}
                (to, payload) => answers.push(Answer { to, payload }),
            }
        }
    }

    /// The fault of a reply that could not be decoded.
    fn malformed(&self, answer: Malformed) -> Fault {
        match self.state {
            State::Ready => answer.into(),
            _ => Fault::new(RemoteError::Malformed, NO_SERVER),
        }
    }

    /// Adds to the message of a connection that ended during the greeting.
    fn closed_in_reply(&self, fault: Fault) -> Fault {
        match (self.state, fault.error) {
            (State::Greeting, RemoteError::Unreachable) => {
                let message = format!("{}, instead of an answer to the greeting", fault.message);
                Fault { message, ..fault }
            }
            _ => fault,
        }
    }

    /// The message for a connection that was not ready by its deadline.
    pub fn timeout_message(&self) -> &'static str {
        match self.transport.is_open() {
            false => self.transport.timeout_message(),
            true => "no answer to the greeting in time: is it a server?",
        }
    }

    /// Copies received bytes of an object to the item's parts.
    fn take_body(&mut self, operation: &Operation) {
        let item = self.item();
        let Some((from, whole)) = &mut self.body else { return };
        let bytes = self.reader.take(*whole - *from);
        // SAFETY: as the caller of the batch guarantees.
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
            Some(Expect::Slots) => Want::Value(slots::MAX_REPLY_BYTES),
            Some(Expect::Hello) => Want::Value(MAX_HELLO_BYTES),
            _ => Want::Word,
        }
    }
}

impl Connection {
    /// Sends the greeting.
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

    /// Handles a reply to the greeting.
    fn greeted(&mut self, to: &Expect, value: Value, settings: &Settings) -> Result<(), Fault> {
        match (to, &value) {
            (Expect::Hello, Value::Error(answer)) if is_refused(answer) => {
                match (&settings.password, &settings.user) {
                    (Some(password), Some(user)) => {
                        write_command(&mut self.out, &[b"AUTH", user.as_bytes(), password.bytes()]);
                    }
                    (Some(password), None) => {
                        write_command(&mut self.out, &[b"AUTH", password.bytes()])
                    }
                    (None, _) => {}
                }
                if settings.password.is_some() {
                    self.expect.push_back(Expect::Auth);
                }
                write_command(&mut self.out, &[b"CLIENT", b"SETNAME", b"kvtier"]);
                self.expect.push_back(Expect::Name);
                self.select(settings);
            }
            // The server's message may repeat the password.
            (Expect::Auth, Value::Error(answer)) => {
                let message =
                    format!("the user or the password is refused: {}", errors::code(answer));
                return Err(Fault::new(RemoteError::Denied, message));
            }
            (Expect::Hello | Expect::Select, Value::Error(answer)) => {
                let peer = Address { host: "".into(), port: 0 };
                let error = match errors::meaning(answer, &peer) {
                    ErrorReply::Error(error) => error,
                    _ => RemoteError::Busy,
                };
                let message = format!("the greeting is refused: {}", errors::code(answer));
                return Err(Fault::new(error, message));
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
            // A node that refuses READONLY redirects each read to its master.
            write_command(&mut self.out, &[b"READONLY"]);
            self.expect.push_back(Expect::Follower);
        }
        if settings.db > 0 {
            write_command(&mut self.out, &[b"SELECT", settings.db.to_string().as_bytes()]);
            self.expect.push_back(Expect::Select);
        }
    }
}

/// Whether a server refuses HELLO in a way that calls for the older commands.
fn is_refused(answer: &[u8]) -> bool {
    errors::is_unknown_command(answer)
        || answer.starts_with(b"NOPROTO")
        || answer.starts_with(b"NOPERM")
}
