//! A connection to a server: made, greeted, and then commands in their order out and answers in
//! the same order in. Nothing here waits.

mod greet;

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::io::channel::Channel;
use crate::io::link::{Lost, Pieces, Watch};
use crate::tier::remote::Trouble;
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::command::Out;
use crate::tier::remote::redis::errors;
use crate::tier::remote::redis::resp::{Nonsense, Reader, Reply, Value, Want};
use crate::tier::remote::redis::slots;
use crate::tier::remote::redis::work::{Came, Work, window_of};

/// How often a connection is read from, at most, before others have their turn.
const TURNS: usize = 16;
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
    pub is_repeated: bool,
    /// The server said that it may go well a moment later.
    pub is_held: bool,
    /// The node has it only for whoever asks.
    pub is_asking: bool,
    /// It goes to a node that only follows another one, and may not have it yet.
    pub is_aside: bool,
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
    Slots,
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
    pub came: Came,
}

/// Why a connection is of no use.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What it means for items.
    pub trouble: Trouble,
    /// What it is, for people.
    pub words: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Connecting,
    Securing,
    Greeting,
    Ready,
}

/// A connection.
pub struct Wire {
    link: Channel,
    state: State,
    reader: Reader,
    /// What is to be sent.
    pub out: Out,
    expect: VecDeque<Expect>,
    /// Bytes that have come of the object that is coming, and how long it is.
    body: Option<(u64, u64)>,
    can_read: bool,
    can_write: bool,
    /// When it must be ready.
    pub by_ns: u64,
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

impl Wire {
    /// Begins one, that must be ready at a time.
    pub fn begin(
        to: &SocketAddr,
        host: &str,
        by_ns: u64,
        settings: &Settings,
    ) -> Result<Wire, Fault> {
        let tls = settings.trust.as_ref().map(|trust| (trust, host));
        Ok(Wire {
            link: Channel::begin(to, tls)?,
            state: State::Connecting,
            reader: Reader::default(),
            out: Out::default(),
            expect: VecDeque::new(),
            body: None,
            can_read: false,
            can_write: false,
            by_ns,
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

    /// Whether there is no connection yet.
    pub fn is_connecting(&self) -> bool {
        self.state == State::Connecting
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
        let (to_read, to_write) = match self.state {
            State::Connecting => (false, true),
            State::Securing => (true, self.link.owes()),
            _ => (self.due().is_some(), !self.out.is_empty() || self.link.owes()),
        };
        if to_read || to_write {
            self.link.watch(watch, to_read, to_write);
        }
        to_read || to_write
    }

    /// Notes what a wait has told.
    pub fn woke(&mut self, (can_read, can_write): (bool, bool)) {
        self.can_read |= can_read;
        self.can_write |= can_write;
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
        work: &Work,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<(), Fault> {
        self.is_checked = true;
        self.is_old = true;
        if self.expect.is_empty() {
            self.can_read = true;
            self.receive(work, settings, answers, pieces)?;
            if !self.reader.is_idle() {
                return Err(Nonsense("half an answer that nobody asked for").into());
            }
        }
        Ok(())
    }

    /// Sends and takes what can be now; whether anything went. Answers are added to `answers`.
    pub fn exchange(
        &mut self,
        work: &Work,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<bool, Fault> {
        if self.state == State::Connecting {
            if !self.can_write {
                return Ok(false);
            }
            self.link.made()?;
            self.state = State::Securing;
        }
        if self.state == State::Securing {
            if !self.link.secure()? {
                return Ok(false);
            }
            self.greet(settings);
        }
        let sent = self.send(pieces)?;
        // Answers are taken while commands are sent: a server that has no room for more of its
        // own takes no more of ours.
        let came =
            self.receive(work, settings, answers, pieces).map_err(|lost| self.early(lost))?;
        Ok(sent || came)
    }

    fn send(&mut self, pieces: &mut Pieces) -> Result<bool, Fault> {
        let mut has_moved = false;
        for _ in 0..TURNS {
            if (self.out.is_empty() && !self.link.owes()) || !self.can_write {
                break;
            }
            self.out.fill(pieces);
            // SAFETY: heads are the wire's own; values are valid until the batch ends, and with
            // that what is not sent of them is dropped.
            match unsafe { self.link.send(pieces) }? {
                Some(bytes) => self.out.sent(bytes),
                None => self.can_write = false,
            }
            has_moved = true;
            if self.out.is_empty() && self.state == State::Greeting {
                self.out.wipe();
                self.link.wipe();
            }
        }
        Ok(has_moved)
    }

    fn receive(
        &mut self,
        work: &Work,
        settings: &Settings,
        answers: &mut Vec<Answer>,
        pieces: &mut Pieces,
    ) -> Result<bool, Fault> {
        let mut has_moved = false;
        for _ in 0..TURNS {
            if !self.can_read {
                break;
            }
            let (item, (from, whole)) = (self.item(), self.body.unwrap_or((0, 0)));
            pieces.clear();
            let direct = work.pieces(item, from, whole - from, pieces);
            let spare = self.reader.spare();
            pieces.push(spare.as_mut_ptr(), spare.len());
            // SAFETY: the parts of the item are valid, as whoever began the batch promises; the
            // spare bytes are the reader's own.
            let Some(bytes) = (unsafe { self.link.receive(pieces) })? else {
                self.can_read = false;
                break;
            };
            has_moved = true;
            let placed = direct.min(bytes as u64);
            self.reader.passed(placed);
            self.reader.filled(bytes - placed as usize);
            self.body = self.body.map(|(from, whole)| (from + placed, whole));
            self.read(work, settings, answers)?;
        }
        Ok(has_moved)
    }

    /// Reads all that is here.
    fn read(
        &mut self,
        work: &Work,
        settings: &Settings,
        answers: &mut Vec<Answer>,
    ) -> Result<(), Fault> {
        loop {
            self.take_body(work);
            let reply = self.reader.next(self.want(work)).map_err(|said| self.nonsense(said))?;
            let Some(reply) = reply else { return Ok(()) };
            let came = match reply {
                Reply::Body(bytes) => {
                    self.body = Some((0, bytes));
                    continue;
                }
                Reply::End => Came::Body(self.body.take().map_or(0, |(_, whole)| whole)),
                Reply::Value(value) => Came::Value(value),
            };
            self.is_old = false;
            let Some(to) = self.expect.pop_front() else {
                let words = match &came {
                    Came::Value(Value::Error(words)) => errors::shown(words, settings.secret()),
                    _ => "an answer that nobody asked for".to_string(),
                };
                return Err(Fault { trouble: Trouble::Nonsense, words });
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
                    let Came::Value(value) = came else { continue };
                    self.greeted(&to, value, settings)?;
                }
                (Expect::Asking, _) => {}
                (to, came) => answers.push(Answer { to, came }),
            }
        }
    }

    /// What it means that something means nothing.
    fn nonsense(&self, said: Nonsense) -> Fault {
        match self.state {
            State::Ready => said.into(),
            _ => Fault { trouble: Trouble::Nonsense, words: NO_SERVER.to_string() },
        }
    }

    /// Why it ended, where it ended before it was ready.
    fn early(&self, fault: Fault) -> Fault {
        match (self.state, fault.trouble) {
            (State::Greeting, Trouble::Gone) => {
                let words = format!("{}, instead of an answer to the greeting", fault.words);
                Fault { words, ..fault }
            }
            _ => fault,
        }
    }

    /// What it is that has not ended in time, of a connection that is not ready.
    pub fn stage(&self) -> &'static str {
        match self.state {
            State::Connecting => "no connection in time",
            State::Securing => "TLS was not agreed on in time: is this the server's port for TLS?",
            State::Greeting | State::Ready => "no answer to the greeting in time: is it a server?",
        }
    }

    /// Puts what is here of an object where it belongs.
    fn take_body(&mut self, work: &Work) {
        let item = self.item();
        let Some((from, whole)) = &mut self.body else { return };
        let bytes = self.reader.take(*whole - *from);
        // SAFETY: as whoever began the batch promises.
        unsafe { work.copy(item, *from, bytes) };
        *from += bytes.len() as u64;
    }

    fn item(&self) -> usize {
        match self.due() {
            Some(Expect::Item(task)) => task.item,
            _ => 0,
        }
    }

    fn want(&self, work: &Work) -> Want {
        match self.due() {
            Some(Expect::Item(task)) => work.want(task.item),
            Some(Expect::Slots) => Want::Value(slots::MAX_REPLY_BYTES),
            Some(Expect::Hello) => Want::Value(MAX_HELLO_BYTES),
            _ => Want::Word,
        }
    }
}

impl From<Lost> for Fault {
    fn from(lost: Lost) -> Fault {
        let trouble = match lost {
            Lost::Late => Trouble::Late,
            Lost::Gone(_) => Trouble::Gone,
            Lost::Unsafe(_) => Trouble::Untrusted,
        };
        Fault { trouble, words: lost.to_string() }
    }
}

impl From<Nonsense> for Fault {
    fn from(nonsense: Nonsense) -> Fault {
        Fault { trouble: Trouble::Nonsense, words: format!("the server gave {}", nonsense.0) }
    }
}
