//! A connection to a server: one request out, one reply in, then the next. Nothing here waits.
//!
//! Bytes of objects go from and to the memory of their parts. A reply is taken while its request
//! is still being sent: a server that refuses an object need not hear all of it.

use std::net::SocketAddr;

use crate::io::channel::Channel;
use crate::io::link::{Lost, Pieces, Watch};
use crate::io::tls::Trust;
use crate::tier::remote::Part;
use crate::tier::remote::s3::fault::{Fault, short};
use crate::tier::remote::s3::http::{Body, Chunks, Head, MAX_HEAD_BYTES, Nonsense};
use crate::tier::remote::s3::xml;
use crate::tier::remote::secret::wipe;

/// How often a connection is used before others have their turn.
const TURNS: usize = 16;
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
pub struct Conn {
    link: Channel,
    is_linked: bool,
    is_made: bool,
    out: Vec<u8>,
    /// Bytes that went of the head and what follows it, and how many there are.
    sent: u64,
    to_send: u64,
    /// The other side takes no more.
    is_shut: bool,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    interims: u32,
    /// It had a reply before.
    is_kept: bool,
    has_heard: bool,
    can_read: bool,
    can_write: bool,
    /// When it must be made.
    pub by_ns: u64,
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

impl Conn {
    /// Begins one, that must be made at a time; with TLS, if it is told whom to trust and whom to
    /// expect.
    pub fn begin(to: &SocketAddr, tls: Option<(&Trust, &str)>, by_ns: u64) -> Result<Conn, Fault> {
        Ok(Conn {
            link: Channel::begin(to, tls)?,
            is_linked: false,
            is_made: false,
            out: Vec::new(),
            sent: 0,
            to_send: 0,
            is_shut: false,
            buffer: vec![0; MAX_HEAD_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            incoming: None,
            interims: 0,
            is_kept: false,
            has_heard: false,
            can_read: false,
            can_write: false,
            by_ns,
        })
    }

    /// Whether it has been made.
    pub fn is_made(&self) -> bool {
        self.is_made
    }

    /// What it is that has not ended in time, of a connection that is not made.
    pub fn stage(&self) -> &'static str {
        match self.is_linked {
            false => "no connection in time",
            true => "TLS was not agreed on in time: is this the server's port for TLS?",
        }
    }

    /// Whether another request can be sent on it: not if it has ended meanwhile, or says what
    /// nobody asked for.
    pub fn is_fit(&mut self, pieces: &mut Pieces) -> bool {
        pieces.clear();
        pieces.push(self.buffer.as_mut_ptr(), self.buffer.len());
        // SAFETY: the buffer is the connection's own.
        self.start == self.end && matches!(unsafe { self.link.receive(pieces) }, Ok(None | Some(0)))
    }

    /// Where the head of the next request is written to; [`Conn::ask`] sends it.
    pub fn head(&mut self) -> &mut Vec<u8> {
        wipe(&mut self.out);
        self.out.clear();
        &mut self.out
    }

    /// Begins to send the request whose head was written.
    pub fn ask(&mut self, way: &Transfer) {
        let body: u64 = way.source.iter().map(|part| part.bytes).sum();
        (self.sent, self.to_send) = (0, self.out.len() as u64 + body);
        (self.incoming, self.interims) = (None, 0);
        (self.has_heard, self.is_shut) = (false, false);
        self.can_write = self.is_made;
    }

    /// Adds it to what is waited for.
    pub fn watch(&self, watch: &mut Watch) {
        let to_write = !self.is_linked || self.link.owes() || (self.is_made && self.has_to_send());
        self.link.watch(watch, self.is_linked, to_write);
    }

    /// Whether something can be done without a wait, as far as is known.
    pub fn can_go_on(&self) -> bool {
        let has_to_send = self.has_to_send() || self.link.owes();
        self.is_made && (self.can_read || (self.can_write && has_to_send && !self.is_shut))
    }

    fn has_to_send(&self) -> bool {
        self.sent < self.to_send && !self.is_shut
    }

    /// Notes what a wait has told.
    pub fn woke(&mut self, (can_read, can_write): (bool, bool)) {
        self.can_read |= can_read;
        self.can_write |= can_write;
    }

    /// Sends and takes what can be now; the reply, when all of it is here. After a reply, or a
    /// fault, [`Conn::is_kept`] says whether it can be used again.
    pub fn exchange(
        &mut self,
        way: &Transfer,
        pieces: &mut Pieces,
    ) -> Result<Option<Reply>, Fault> {
        if !self.is_made {
            if !self.is_linked && !self.can_write {
                return Ok(None);
            }
            if !self.is_linked {
                self.link.made()?;
                self.is_linked = true;
            }
            if !self.link.secure()? {
                return Ok(None);
            }
            (self.is_made, self.can_read, self.can_write) = (true, true, true);
        }
        self.send(way.source, pieces);
        let reply = self.receive(way, pieces).map_err(|fault| Fault {
            is_stale: self.is_kept && !self.has_heard && fault.can_pass,
            ..fault
        })?;
        let Some(incoming) = reply else { return Ok(None) };
        // Whatever follows would be taken for the next reply.
        self.is_kept = incoming.reply.head.keeps
            && incoming.has_ended()
            && self.sent == self.to_send
            && !self.link.owes()
            && self.start == self.end;
        wipe(&mut self.out);
        self.link.wipe();
        Ok(Some(incoming.reply))
    }

    /// Whether it can be used again after a reply.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    fn send(&mut self, source: &[Part], pieces: &mut Pieces) {
        for _ in 0..TURNS {
            if !(self.has_to_send() || self.link.owes()) || !self.can_write || self.is_shut {
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
            push_parts(source, skip, u64::MAX, pieces);
            // SAFETY: the head is the connection's own; the parts are valid, as whoever began the
            // batch promises.
            match unsafe { self.link.send(pieces) } {
                Ok(Some(bytes)) => self.sent += bytes as u64,
                Ok(None) => self.can_write = false,
                // It may have said why.
                Err(_) => (self.is_shut, self.can_read) = (true, true),
            }
        }
    }

    fn receive(&mut self, way: &Transfer, pieces: &mut Pieces) -> Result<Option<Incoming>, Fault> {
        for _ in 0..TURNS {
            if !self.can_read {
                break;
            }
            let left = match &self.incoming {
                Some(Incoming { left: Left::Bytes(left), object: Some(_), .. }) => *left,
                _ => 0,
            };
            pieces.clear();
            if left > 0 {
                let from = self.incoming.as_ref().map_or(0, |incoming| incoming.reply.bytes);
                push_parts(way.sink, from, left, pieces);
            } else {
                if self.start == self.end {
                    (self.start, self.end) = (0, 0);
                }
                let spare = &mut self.buffer[self.end..];
                pieces.push(spare.as_mut_ptr(), spare.len());
            }
            // SAFETY: the parts are valid and nobody else's, as whoever began the batch promises;
            // the buffer is the connection's own.
            let count = match unsafe { self.link.receive(pieces) } {
                Ok(Some(count)) => count,
                Ok(None) => {
                    self.can_read = false;
                    break;
                }
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
            if self.read(way)? {
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
                if is_short { Err(short()) } else { Ok(Some(incoming)) }
            }
            Some(_) => Err(short()),
            None if self.has_heard => Err(short()),
            None => Err(Lost::Gone(0).into()),
        }
    }

    /// Reads what is here; whether that is all of a reply.
    fn read(&mut self, way: &Transfer) -> Result<bool, Fault> {
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
                self.incoming = Some(Incoming::new(head, way)?);
            } else {
                self.interims += 1;
                if self.interims > MAX_INTERIM || head.status == 101 {
                    return Err(Nonsense("replies that say nothing").into());
                }
            }
        }
        let Some(incoming) = &mut self.incoming else { return Ok(false) };
        let taken = incoming.take(&self.buffer[self.start..self.end], way)?;
        self.start += taken;
        Ok(incoming.is_whole())
    }
}

impl Incoming {
    fn new(head: Head, way: &Transfer) -> Result<Incoming, Fault> {
        let mut object = None;
        let left = match (way.want, head.body) {
            (Want::Head, _) => Left::Bytes(0),
            _ if matches!(head.status, 204 | 304) => Left::Bytes(0),
            (_, Body::Bytes(bytes)) => Left::Bytes(bytes),
            (_, Body::Chunks) => Left::Chunks(Chunks::default()),
            (_, Body::End) => Left::End,
        };
        if let Want::Object { offset, room } = way.want
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
    fn take(&mut self, bytes: &[u8], way: &Transfer) -> Result<usize, Fault> {
        let Incoming { reply, left, object } = self;
        let mut add = |piece: &[u8]| match object {
            None => {
                let room = xml::MAX_BYTES - reply.text.len();
                reply.text.extend_from_slice(&piece[..piece.len().min(room)]);
                Ok(())
            }
            Some(object) if reply.bytes + piece.len() as u64 > *object => {
                Err(Nonsense("more than was asked for"))
            }
            Some(_) => {
                // SAFETY: as whoever began the batch promises.
                unsafe { copy(way.sink, reply.bytes, piece) };
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
        if is_short { Err(short()) } else { Ok(taken) }
    }
}

/// How many bytes of an object come, by what the head says: none that were not asked for.
fn object_bytes(head: &Head, offset: u64, room: u64) -> Result<u64, Nonsense> {
    if head.is_coded {
        return Err(Nonsense("an object that is coded"));
    }
    let said = match (head.status, &head.range) {
        (206, Some(range)) => match range.part {
            Some((first, bytes)) if first == offset => {
                let wanted = range.whole.map(|whole| whole.saturating_sub(offset).min(room));
                if wanted.is_some_and(|wanted| wanted != bytes) {
                    return Err(Nonsense("another part of the object"));
                }
                Some(bytes)
            }
            _ => return Err(Nonsense("another part of the object")),
        },
        // All of it, although a part was asked for.
        (200, _) if offset == 0 => head.length,
        _ => return Err(Nonsense("another part of the object")),
    };
    let bytes = said.ok_or(Nonsense("an object without a length"))?;
    if head.length.is_some_and(|length| length != bytes) || bytes > room {
        return Err(Nonsense("another length than was asked for"));
    }
    Ok(bytes)
}

/// Adds the pieces of parts from a byte on, at most so many bytes.
fn push_parts(parts: &[Part], mut skip: u64, mut most: u64, into: &mut Pieces) {
    for part in parts {
        let bytes = part.bytes.saturating_sub(skip).min(most);
        if bytes > 0 {
            if !into.push(part.address.wrapping_add(skip as usize), bytes as usize) {
                break;
            }
            most -= bytes;
        }
        skip = skip.saturating_sub(part.bytes);
    }
}

/// Copies bytes to where they belong, from one on.
///
/// # Safety
/// The memory of the parts is valid, and nobody else's meanwhile.
unsafe fn copy(parts: &[Part], mut skip: u64, mut bytes: &[u8]) {
    for part in parts {
        let count = (part.bytes.saturating_sub(skip) as usize).min(bytes.len());
        if count > 0 {
            let to = part.address.wrapping_add(skip as usize);
            // SAFETY: `count` bytes from `skip` on are within the part, which the caller vouches
            // for; the buffer is another memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count) };
            bytes = &bytes[count..];
        }
        skip = skip.saturating_sub(part.bytes);
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        wipe(&mut self.out);
    }
}
