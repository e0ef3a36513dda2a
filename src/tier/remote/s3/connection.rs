//! A connection to a server: one request out, one reply in, then the next. Nothing here waits.
//!
//! Bytes of objects go from and to the memory of their parts. A reply is taken while its request
//! is still being sent: a server that refuses an object need not hear all of it.

use std::net::SocketAddr;

use crate::io::link::{Lost, Pieces, Watch};
use crate::io::tls::Trust;
use crate::tier::remote::batch::{add_pieces, copy_to_parts};
use crate::tier::remote::fault::{Fault, Malformed};
use crate::tier::remote::s3::http::{Body, Chunks, Head, MAX_HEAD_BYTES};
use crate::tier::remote::s3::xml;
use crate::tier::remote::secret::wipe;
use crate::tier::remote::transport::{TURNS, Transport};
use crate::tier::remote::{Part, RemoteError};

/// Most replies that only say that another one follows.
const MAX_INTERIM: u32 = 8;

/// What goes out after a request's head, and what may come.
#[derive(Clone, Copy)]
pub struct Transfer<'a> {
    /// The object that is sent.
    pub source: &'a [Part],
    /// Where an object goes that comes.
    pub sink: &'a [Part],
    /// What comes.
    pub want: Want,
}

/// What comes after a reply's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Nothing, whatever the head says.
    Head,
    /// A few words.
    Words,
    /// An object from a byte on, as much as there is room for.
    Object { offset: u64, room: u64 },
}

/// A reply.
#[derive(Clone, Debug)]
pub struct Reply {
    /// What stands before its body.
    pub head: Head,
    /// Bytes of the object, where they belong.
    pub bytes: u64,
    /// What was said instead of an object.
    pub text: Vec<u8>,
}

/// A connection.
pub struct Connection {
    /// The connection below the protocol.
    pub transport: Transport,
    out: Vec<u8>,
    /// Bytes that went of the head and what follows it, and how many there are.
    sent: u64,
    to_send: u64,
    /// The other side takes no more.
    is_write_closed: bool,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    interims: u32,
    /// It had a reply before.
    is_kept: bool,
    has_heard: bool,
}

/// A reply that is coming.
struct Incoming {
    reply: Reply,
    left: Left,
    /// How long the object is that comes.
    object: Option<u64>,
}

enum Left {
    Bytes(u64),
    Chunks(Chunks),
    End,
}

impl Connection {
    /// Begins one, that must be made at a time; with TLS, if it is told whom to trust and whom to
    /// expect.
    pub fn begin(
        to: &SocketAddr,
        tls: Option<(&Trust, &str)>,
        ready_by_ns: u64,
    ) -> Result<Connection, Fault> {
        Ok(Connection {
            transport: Transport::begin(to, tls, ready_by_ns)?,
            out: Vec::new(),
            sent: 0,
            to_send: 0,
            is_write_closed: false,
            buffer: vec![0; MAX_HEAD_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            incoming: None,
            interims: 0,
            is_kept: false,
            has_heard: false,
        })
    }

    /// Whether another request can be sent on it: not if it has ended meanwhile, or says what
    /// nobody asked for.
    pub fn is_fit(&mut self, pieces: &mut Pieces) -> bool {
        pieces.clear();
        pieces.push(self.buffer.as_mut_ptr(), self.buffer.len());
        // SAFETY: the buffer is the connection's own.
        self.start == self.end
            && matches!(unsafe { self.transport.receive(pieces) }, Ok(None | Some(0)))
    }

    /// Where the head of the next request is written to; [`Connection::ask`] sends it.
    pub fn head(&mut self) -> &mut Vec<u8> {
        wipe(&mut self.out);
        self.out.clear();
        &mut self.out
    }

    /// Begins to send the request whose head was written.
    pub fn ask(&mut self, transfer: &Transfer) {
        let body: u64 = transfer.source.iter().map(|part| part.bytes).sum();
        (self.sent, self.to_send) = (0, self.out.len() as u64 + body);
        (self.incoming, self.interims) = (None, 0);
        (self.has_heard, self.is_write_closed) = (false, false);
        self.transport.can_write = self.transport.is_open();
    }

    /// Adds it to what is waited for.
    pub fn watch(&self, watch: &mut Watch) {
        self.transport.watch(watch, true, self.has_to_send());
    }

    /// Whether something can be done without a wait, as far as is known.
    pub fn can_go_on(&self) -> bool {
        let has_to_send = self.has_to_send() || self.transport.owes();
        let can_send = self.transport.can_write && has_to_send && !self.is_write_closed;
        self.transport.is_open() && (self.transport.can_read || can_send)
    }

    fn has_to_send(&self) -> bool {
        self.sent < self.to_send && !self.is_write_closed
    }

    /// Sends and takes what can be now; the reply, when all of it is here. After a reply, or a
    /// fault, [`Connection::is_kept`] says whether it can be used again.
    pub fn exchange(
        &mut self,
        transfer: &Transfer,
        pieces: &mut Pieces,
    ) -> Result<Option<Reply>, Fault> {
        if !self.transport.establish()? {
            return Ok(None);
        }
        self.send(transfer.source, pieces);
        let reply = self.receive(transfer, pieces).map_err(|fault| Fault {
            is_stale: self.is_kept && !self.has_heard && fault.is_transient,
            ..fault
        })?;
        let Some(incoming) = reply else { return Ok(None) };
        // Whatever follows would be taken for the next reply.
        self.is_kept = incoming.reply.head.keeps
            && incoming.has_ended()
            && self.sent == self.to_send
            && !self.transport.owes()
            && self.start == self.end;
        wipe(&mut self.out);
        self.transport.wipe();
        Ok(Some(incoming.reply))
    }

    /// Whether it can be used again after a reply.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    fn send(&mut self, source: &[Part], pieces: &mut Pieces) {
        for _ in 0..TURNS {
            let has_to_send = self.has_to_send() || self.transport.owes();
            if !has_to_send || !self.transport.can_write || self.is_write_closed {
                break;
            }
            pieces.clear();
            let head = self.out.len() as u64;
            let mut skip = self.sent;
            if skip < head {
                let rest = &mut self.out[skip as usize..];
                pieces.push(rest.as_mut_ptr(), rest.len());
            }
            skip = skip.saturating_sub(head);
            add_pieces(source, skip, u64::MAX, pieces);
            // SAFETY: the head is the connection's own; the parts are valid, as whoever began the
            // batch promises.
            match unsafe { self.transport.send(pieces) } {
                Ok(bytes) => self.sent += bytes.unwrap_or(0) as u64,
                // It may have said why.
                Err(_) => (self.is_write_closed, self.transport.can_read) = (true, true),
            }
        }
    }

    fn receive(
        &mut self,
        transfer: &Transfer,
        pieces: &mut Pieces,
    ) -> Result<Option<Incoming>, Fault> {
        for _ in 0..TURNS {
            if !self.transport.can_read {
                break;
            }
            let left = match &self.incoming {
                Some(Incoming { left: Left::Bytes(left), object: Some(_), .. }) => *left,
                _ => 0,
            };
            pieces.clear();
            if left > 0 {
                let from = self.incoming.as_ref().map_or(0, |incoming| incoming.reply.bytes);
                add_pieces(transfer.sink, from, left, pieces);
            } else {
                if self.start == self.end {
                    (self.start, self.end) = (0, 0);
                }
                let spare = &mut self.buffer[self.end..];
                pieces.push(spare.as_mut_ptr(), spare.len());
            }
            // SAFETY: the parts are valid and nobody else's, as whoever began the batch promises;
            // the buffer is the connection's own.
            let count = match unsafe { self.transport.receive(pieces) } {
                Ok(Some(count)) => count,
                Ok(None) => break,
                Err(Lost::Gone(0)) => return self.ended(),
                Err(lost) => return Err(lost.into()),
            };
            self.has_heard |= count > 0;
            if left > 0
                && let Some(incoming) = &mut self.incoming
            {
                incoming.reply.bytes += count as u64;
                incoming.left = Left::Bytes(left - count as u64);
            } else {
                self.end += count;
            }
            if self.read(transfer)? {
                return Ok(self.incoming.take());
            }
        }
        Ok(None)
    }

    /// The other side has ended it: that ends a body, too, if nothing else does.
    fn ended(&mut self) -> Result<Option<Incoming>, Fault> {
        match self.incoming.take() {
            Some(incoming) if matches!(incoming.left, Left::End) => {
                let is_short = incoming.object.is_some_and(|bytes| bytes != incoming.reply.bytes);
                if is_short { Err(truncated()) } else { Ok(Some(incoming)) }
            }
            Some(_) => Err(truncated()),
            None if self.has_heard => Err(truncated()),
            None => Err(Lost::Gone(0).into()),
        }
    }

    /// Reads what is here; whether that is all of a reply.
    fn read(&mut self, transfer: &Transfer) -> Result<bool, Fault> {
        while self.incoming.is_none() {
            let Some((head, bytes)) = Head::read(&self.buffer[self.start..self.end])? else {
                if self.start > 0 {
                    self.buffer.copy_within(self.start..self.end, 0);
                    (self.start, self.end) = (0, self.end - self.start);
                }
                return Ok(false);
            };
            self.start += bytes;
            if head.status >= 200 {
                self.incoming = Some(Incoming::new(head, transfer)?);
            } else {
                self.interims += 1;
                if self.interims > MAX_INTERIM || head.status == 101 {
                    return Err(Malformed("replies that say nothing").into());
                }
            }
        }
        let Some(incoming) = &mut self.incoming else { return Ok(false) };
        let taken = incoming.take(&self.buffer[self.start..self.end], transfer)?;
        self.start += taken;
        Ok(incoming.is_whole())
    }
}

impl Incoming {
    fn new(head: Head, transfer: &Transfer) -> Result<Incoming, Fault> {
        let mut object = None;
        let left = match (transfer.want, head.body) {
            (Want::Head, _) => Left::Bytes(0),
            _ if matches!(head.status, 204 | 304) => Left::Bytes(0),
            (_, Body::Bytes(bytes)) => Left::Bytes(bytes),
            (_, Body::Chunks) => Left::Chunks(Chunks::default()),
            (_, Body::End) => Left::End,
        };
        if let Want::Object { offset, room } = transfer.want
            && matches!(head.status, 200 | 206)
        {
            object = Some(object_bytes(&head, offset, room)?);
        }
        Ok(Incoming { reply: Reply { head, bytes: 0, text: Vec::new() }, left, object })
    }

    /// Whether no more of it is wanted: of what is said, nobody reads all.
    fn is_whole(&self) -> bool {
        self.has_ended() || (self.object.is_none() && self.reply.text.len() >= xml::MAX_BYTES)
    }

    fn has_ended(&self) -> bool {
        match &self.left {
            Left::Bytes(left) => *left == 0,
            Left::Chunks(chunks) => chunks.is_done(),
            Left::End => false,
        }
    }

    /// Takes what is here of a body; how many bytes of it.
    fn take(&mut self, bytes: &[u8], transfer: &Transfer) -> Result<usize, Fault> {
        let Incoming { reply, left, object } = self;
        let mut add = |piece: &[u8]| match object {
            None => {
                let room = xml::MAX_BYTES - reply.text.len();
                reply.text.extend_from_slice(&piece[..piece.len().min(room)]);
                Ok(())
            }
            Some(object) if reply.bytes + piece.len() as u64 > *object => {
                Err(Malformed("more than was asked for"))
            }
            Some(_) => {
                // SAFETY: as whoever began the batch promises.
                unsafe { copy_to_parts(transfer.sink, reply.bytes, piece) };
                reply.bytes += piece.len() as u64;
                Ok(())
            }
        };
        let taken = match left {
            Left::Bytes(left) => {
                let count = (*left).min(bytes.len() as u64);
                add(&bytes[..count as usize])?;
                *left -= count;
                count as usize
            }
            Left::Chunks(chunks) => chunks.take(bytes, add)?,
            Left::End => {
                add(bytes)?;
                bytes.len()
            }
        };
        let is_short = matches!(left, Left::Chunks(chunks) if chunks.is_done())
            && object.is_some_and(|object| object != reply.bytes);
        if is_short { Err(truncated()) } else { Ok(taken) }
    }
}

/// How many bytes of an object come, by what the head says: none that were not asked for.
fn object_bytes(head: &Head, offset: u64, room: u64) -> Result<u64, Malformed> {
    if head.is_coded {
        return Err(Malformed("an object that is coded"));
    }
    let said = match (head.status, &head.range) {
        (206, Some(range)) => match range.part {
            Some((first, bytes)) if first == offset => {
                let wanted = range.whole.map(|whole| whole.saturating_sub(offset).min(room));
                if wanted.is_some_and(|wanted| wanted != bytes) {
                    return Err(Malformed("another part of the object"));
                }
                Some(bytes)
            }
            _ => return Err(Malformed("another part of the object")),
        },
        // All of it, although a part was asked for.
        (200, _) if offset == 0 => head.length,
        _ => return Err(Malformed("another part of the object")),
    };
    let bytes = said.ok_or(Malformed("an object without a length"))?;
    if head.length.is_some_and(|length| length != bytes) || bytes > room {
        return Err(Malformed("another length than was asked for"));
    }
    Ok(bytes)
}

/// A reply that ended too early.
fn truncated() -> Fault {
    let fault = Fault::new(RemoteError::Malformed, "the reply ended before its time");
    Fault { is_transient: true, ..fault }
}

impl Drop for Connection {
    fn drop(&mut self) {
        wipe(&mut self.out);
    }
}
