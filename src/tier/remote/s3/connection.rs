//! A connection to a server: one request, one reply, then the next request. Nothing here blocks.
//!
//! Bytes of objects move between the socket and the memory of their parts. A reply is received
//! while its request is still being sent: a server that rejects an object need not read all of it.

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

/// Most interim replies (1xx) before a reply.
const MAX_INTERIM: u32 = 8;

/// The body of a request, and the destination of the reply's body.
#[derive(Clone, Copy)]
pub struct Transfer<'a> {
    /// Parts of the object to send.
    pub source: &'a [Part],
    /// Parts that an object is received into.
    pub sink: &'a [Part],
    /// The expected body.
    pub want: Want,
}

/// The expected body of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None, whatever the head says.
    Head,
    /// A short text.
    Words,
    /// An object from byte `offset` on, at most `room` bytes.
    Object { offset: u64, room: u64 },
}

/// A reply.
#[derive(Clone, Debug)]
pub struct Reply {
    pub head: Head,
    /// Bytes of the object that were received into its parts.
    pub bytes: u64,
    /// The body, where it is no object.
    pub text: Vec<u8>,
}

/// A connection to a server.
pub struct Connection {
    /// The connection below the protocol.
    pub transport: Transport,
    out: Vec<u8>,
    /// Bytes of the head and the body that were sent, and the total.
    sent: u64,
    to_send: u64,
    /// The server accepts no more bytes.
    is_write_closed: bool,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    interims: u32,
    /// It has had a reply, and can be used again.
    is_kept: bool,
    has_reply: bool,
}

/// A reply that is being received.
struct Incoming {
    reply: Reply,
    left: Left,
    /// Length of the object that is being received.
    object: Option<u64>,
}

enum Left {
    Bytes(u64),
    Chunks(Chunks),
    End,
}

impl Connection {
    /// Begins to connect; the connection must be open at `ready_by_ns`. `tls`: the accepted
    /// certificates, and the expected host.
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
            has_reply: false,
        })
    }

    /// Whether another request can be sent: not if the server has closed the connection or sent an
    /// unrequested reply.
    pub fn is_fit(&mut self, pieces: &mut Pieces) -> bool {
        pieces.clear();
        pieces.push(self.buffer.as_mut_ptr(), self.buffer.len());
        // SAFETY: the buffer is the connection's own.
        self.start == self.end
            && matches!(unsafe { self.transport.receive(pieces) }, Ok(None | Some(0)))
    }

    /// The buffer for the head of the next request; [`Connection::begin_request`] sends it.
    pub fn head(&mut self) -> &mut Vec<u8> {
        wipe(&mut self.out);
        self.out.clear();
        &mut self.out
    }

    /// Begins to send the request whose head was written, with the body of `transfer`.
    pub fn begin_request(&mut self, transfer: &Transfer) {
        let body: u64 = transfer.source.iter().map(|part| part.bytes).sum();
        (self.sent, self.to_send) = (0, self.out.len() as u64 + body);
        (self.incoming, self.interims) = (None, 0);
        (self.has_reply, self.is_write_closed) = (false, false);
        self.transport.can_write = self.transport.is_open();
    }

    /// Adds the connection to `watch`.
    pub fn watch(&self, watch: &mut Watch) {
        self.transport.watch(watch, true, self.has_to_send());
    }

    /// Whether it can proceed without a wait, as far as is known.
    pub fn is_reusable(&self) -> bool {
        let has_to_send = self.has_to_send() || self.transport.wants_write();
        let can_send = self.transport.can_write && has_to_send && !self.is_write_closed;
        self.transport.is_open() && (self.transport.can_read || can_send)
    }

    fn has_to_send(&self) -> bool {
        self.sent < self.to_send && !self.is_write_closed
    }

    /// Sends and receives what it can; returns the complete reply. After a reply or a fault,
    /// [`Connection::is_kept`] says whether the connection can be used again.
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
            is_stale: self.is_kept && !self.has_reply && fault.is_transient,
            ..fault
        })?;
        let Some(incoming) = reply else { return Ok(None) };
        // Further bytes would be taken for the next reply.
        self.is_kept = incoming.reply.head.keeps
            && incoming.has_ended()
            && self.sent == self.to_send
            && !self.transport.wants_write()
            && self.start == self.end;
        wipe(&mut self.out);
        self.transport.wipe();
        Ok(Some(incoming.reply))
    }

    /// Whether the connection can be used again after a reply.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    fn send(&mut self, source: &[Part], pieces: &mut Pieces) {
        for _ in 0..TURNS {
            let has_to_send = self.has_to_send() || self.transport.wants_write();
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
            // SAFETY: the head is the connection's own; the parts are valid, as the caller of the
            // batch guarantees.
            match unsafe { self.transport.send(pieces) } {
                Ok(bytes) => self.sent += bytes.unwrap_or(0) as u64,
                // A reply with the reason may have arrived.
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
            // SAFETY: the parts are valid and unused by others, as the caller of the batch
            // guarantees; the buffer is the connection's own.
            let count = match unsafe { self.transport.receive(pieces) } {
                Ok(Some(count)) => count,
                Ok(None) => break,
                Err(Lost::Gone(0)) => return self.ended(),
                Err(lost) => return Err(lost.into()),
            };
            self.has_reply |= count > 0;
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

    /// The server closed the connection: that ends a body without a length.
    fn ended(&mut self) -> Result<Option<Incoming>, Fault> {
        match self.incoming.take() {
            Some(incoming) if matches!(incoming.left, Left::End) => {
                let is_short = incoming.object.is_some_and(|bytes| bytes != incoming.reply.bytes);
                if is_short { Err(truncated()) } else { Ok(Some(incoming)) }
            }
            Some(_) => Err(truncated()),
            None if self.has_reply => Err(truncated()),
            None => Err(Lost::Gone(0).into()),
        }
    }

    /// Decodes what has arrived; whether the reply is complete.
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

    /// Whether no more of it is needed: an error text is read up to a limit.
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

    /// Takes bytes of the body; returns how many.
    fn take(&mut self, bytes: &[u8], transfer: &Transfer) -> Result<usize, Fault> {
        let Incoming { reply, left, object } = self;
        let mut add = |piece: &[u8]| match object {
            None => {
                let room = xml::MAX_BYTES - reply.text.len();
                reply.text.extend_from_slice(&piece[..piece.len().min(room)]);
                Ok(())
            }
            Some(object) if reply.bytes + piece.len() as u64 > *object => {
                Err(Malformed("a body longer than requested"))
            }
            Some(_) => {
                // SAFETY: as the caller of the batch guarantees.
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

/// Length of the object in the reply, by its head; fails if it is not the part that was requested.
fn object_bytes(head: &Head, offset: u64, room: u64) -> Result<u64, Malformed> {
    if head.is_coded {
        return Err(Malformed("an object that is coded"));
    }
    let length = match (head.status, &head.range) {
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
        // The whole object, although a part was requested.
        (200, _) if offset == 0 => head.length,
        _ => return Err(Malformed("another part of the object")),
    };
    let bytes = length.ok_or(Malformed("an object without a length"))?;
    if head.length.is_some_and(|length| length != bytes) || bytes > room {
        return Err(Malformed("a length other than requested"));
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
