//! TLS on connections to other machines, by rustls: who is trusted, and what goes over a
//! connection then. It has no threads and waits for nothing, so that deadlines are the caller's.

mod client_cert;
mod messages;
mod trust;

use std::mem::take;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
    WriteTraffic,
};

use crate::io::link::{Link, Lost, Pieces};

pub use crate::io::tls::trust::Trust;

/// Bytes that are taken from a connection at once, at most. More than the longest message of a
/// handshake, which is not understood before all of it is here.
const INCOMING_BYTES: usize = 80 << 10;
/// Room that there is for what comes next, at least: a whole record, the largest unit of TLS.
const RECORD_ROOM: usize = 18 << 10;
/// Plain bytes of a record.
const RECORD_BYTES: usize = 16 << 10;
/// Most plain bytes that are made ready to be sent at once.
const SEND_BYTES: usize = 64 << 10;
/// How often it is looked whether something has come, until others have their turn.
const TURNS: usize = 8;

/// What is on a connection.
pub struct Session {
    conn: UnbufferedClientConnection,
    /// Who is expected, for people.
    host: String,
    /// What has come and is not understood yet.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// What is to be sent, from a byte on.
    outgoing: Vec<u8>,
    sent: usize,
    /// What has come and was not asked for yet, from a byte on.
    rest: Vec<u8>,
    given: usize,
    /// Pieces that are too small for a record of their own.
    gathered: Vec<u8>,
    is_open: bool,
    has_ended: bool,
    /// What went wrong; nothing is done any more then.
    failed: Option<String>,
}

/// Where plain bytes go: pieces of memory, and what does not fit into them to the rest.
struct Sink<'a> {
    pieces: &'a mut dyn Iterator<Item = (*mut u8, usize)>,
    at: (*mut u8, usize),
    placed: usize,
    rest: &'a mut Vec<u8>,
}

impl Sink<'_> {
    /// Puts bytes where they belong.
    ///
    /// # Safety
    /// Every piece can be written.
    unsafe fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (address, room) = self.at;
            let count = room.min(bytes.len());
            if count == 0 {
                match self.pieces.next() {
                    Some(next) => self.at = next,
                    None => return self.rest.extend_from_slice(bytes),
                }
                continue;
            }
            // SAFETY: `count` bytes of a piece, which the caller vouches for; what has come is
            // in other memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address, count) };
            self.at = (address.wrapping_add(count), room - count);
            self.placed += count;
            bytes = &bytes[count..];
        }
    }
}

impl Session {
    fn new(conn: UnbufferedClientConnection, host: &str) -> Session {
        Session {
            conn,
            host: host.to_string(),
            incoming: vec![0; INCOMING_BYTES],
            start: 0,
            end: 0,
            outgoing: Vec::new(),
            sent: 0,
            rest: Vec::new(),
            given: 0,
            gathered: Vec::new(),
            is_open: false,
            has_ended: false,
            failed: None,
        }
    }

    /// Whether something waits to be sent.
    pub fn owes(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Goes on with the handshake as far as it can; whether it has ended.
    pub fn handshake(&mut self, link: &Link) -> Result<bool, Lost> {
        while !self.is_open {
            let mut rest = take(&mut self.rest);
            let none = &mut std::iter::empty();
            let mut sink =
                Sink { pieces: none, at: (std::ptr::null_mut(), 0), placed: 0, rest: &mut rest };
            let done = self.process(link, &mut sink, &[]);
            self.rest = rest;
            done?;
            self.flush(link)?;
            if self.has_ended {
                return Err(Lost::Unsafe(messages::ENDED.to_string()));
            }
            if !self.is_open {
                match self.fill(link) {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    Err(Lost::Gone(0)) => return Err(Lost::Unsafe(messages::ENDED.to_string())),
                    Err(lost) => return Err(lost),
                }
            }
        }
        Ok(true)
    }

    /// Encrypts some of what the pieces have, once all that was encrypted has been sent; how much.
    /// None = there is no room.
    ///
    /// # Safety
    /// Every piece can be read.
    pub unsafe fn send(&mut self, link: &Link, pieces: &Pieces) -> Result<Option<usize>, Lost> {
        if !self.flush(link)? {
            return Ok(None);
        }
        let mut taken = 0;
        let mut gathered = take(&mut self.gathered);
        gathered.clear();
        for (address, bytes) in pieces.each().filter(|piece| piece.1 > 0) {
            // SAFETY: the caller vouches for the pieces.
            let mut piece = unsafe { std::slice::from_raw_parts(address.cast_const(), bytes) };
            // Records of their own cost small pieces more than a copy does.
            if !gathered.is_empty() || piece.len() < RECORD_BYTES {
                let count = piece.len().min(RECORD_BYTES - gathered.len());
                gathered.extend_from_slice(&piece[..count]);
                taken += count;
                piece = &piece[count..];
                if gathered.len() == RECORD_BYTES {
                    self.encrypt(link, &gathered)?;
                    gathered.clear();
                }
            }
            if !piece.is_empty() {
                let count = piece.len().min(SEND_BYTES.saturating_sub(taken));
                self.encrypt(link, &piece[..count])?;
                taken += count;
                if count < piece.len() {
                    break;
                }
            }
            if taken >= SEND_BYTES {
                break;
            }
        }
        if !gathered.is_empty() {
            self.encrypt(link, &gathered)?;
        }
        self.gathered = gathered;
        self.flush(link)?;
        Ok(Some(taken))
    }

    /// Takes what has come, as far as the pieces have room for it; None = nothing has.
    ///
    /// # Safety
    /// Every piece can be written, by nobody else meanwhile.
    pub unsafe fn receive(&mut self, link: &Link, pieces: &Pieces) -> Result<Option<usize>, Lost> {
        let mut rest = take(&mut self.rest);
        let each = &mut pieces.each();
        let mut over = Vec::new();
        let mut sink =
            Sink { pieces: each, at: (std::ptr::null_mut(), 0), placed: 0, rest: &mut over };
        if self.given < rest.len() {
            // SAFETY: the caller vouches for the pieces.
            unsafe { sink.put(&rest[self.given..]) };
            self.given += sink.placed;
            self.rest = rest;
            return Ok(Some(sink.placed));
        }
        rest.clear();
        self.given = 0;
        sink.rest = &mut rest;
        let mut done = Ok(None);
        for _ in 0..TURNS {
            done = self.process(link, &mut sink, &[]).map(|()| None);
            if sink.placed > 0 || done.is_err() {
                break;
            }
            if self.has_ended {
                done = Err(Lost::Gone(0));
                break;
            }
            match self.fill(link) {
                // What comes and is nothing to us does not keep others waiting.
                Ok(true) => done = Ok(Some(0)),
                Ok(false) => break,
                Err(lost) => {
                    done = Err(lost);
                    break;
                }
            }
        }
        let placed = sink.placed;
        self.rest = rest;
        self.flush(link)?;
        // What came before the end still counts.
        if placed > 0 { Ok(Some(placed)) } else { done }
    }

    /// Overwrites what small pieces had, and what came of them.
    pub fn wipe(&mut self) {
        let whole = self.gathered.capacity();
        self.gathered.clear();
        self.gathered.resize(whole, 0);
        for byte in &mut self.gathered {
            // SAFETY: a byte that is ours.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
        self.gathered.clear();
    }

    /// Takes bytes from the connection; whether any came.
    fn fill(&mut self, link: &Link) -> Result<bool, Lost> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.incoming.len() - self.end < RECORD_ROOM {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.incoming[self.end..];
        if room.is_empty() {
            return Err(Lost::Unsafe(messages::TOO_LONG.to_string()));
        }
        let mut pieces = Pieces::default();
        pieces.push(room.as_mut_ptr(), room.len());
        // SAFETY: the piece is what nobody uses of a buffer of ours.
        match unsafe { link.receive(&mut pieces) }? {
            Some(bytes) => {
                self.end += bytes.min(self.incoming.len() - self.end);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Sends what waits; whether all of it is gone.
    fn flush(&mut self, link: &Link) -> Result<bool, Lost> {
        while self.owes() {
            let mut pieces = Pieces::default();
            let left = &mut self.outgoing[self.sent..];
            pieces.push(left.as_mut_ptr(), left.len());
            // SAFETY: the piece is a part of a buffer of ours.
            match unsafe { link.send(&mut pieces) }? {
                Some(bytes) => self.sent += bytes,
                None => return Ok(false),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(true)
    }

    fn encrypt(&mut self, link: &Link, text: &[u8]) -> Result<(), Lost> {
        let mut rest = take(&mut self.rest);
        let none = &mut std::iter::empty();
        let mut sink =
            Sink { pieces: none, at: (std::ptr::null_mut(), 0), placed: 0, rest: &mut rest };
        // What came meanwhile is kept until it is asked for.
        let done = self.process(link, &mut sink, text);
        self.rest = rest;
        done
    }

    /// Goes through what has come until more must come, and encrypts a text then.
    fn process(&mut self, link: &Link, sink: &mut Sink<'_>, text: &[u8]) -> Result<(), Lost> {
        if let Some(why) = &self.failed {
            return Err(Lost::Unsafe(why.clone()));
        }
        loop {
            let incoming = &mut self.incoming[self.start..self.end];
            let UnbufferedStatus { mut discard, state } = self.conn.process_tls_records(incoming);
            let mut is_done = false;
            match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(Ok(record)) = traffic.next_record() {
                        discard += record.discard;
                        // SAFETY: as whoever made the sink promises.
                        unsafe { sink.put(record.payload) };
                    }
                }
                Ok(ConnectionState::EncodeTlsData(mut data)) => {
                    grow(&mut self.outgoing, |room| {
                        data.encode(room).map_err(|error| match error {
                            EncodeError::InsufficientSize(size) => Some(size),
                            _ => None,
                        })
                    })?;
                }
                // It is sent in its order with all else.
                Ok(ConnectionState::TransmitTlsData(data)) => data.done(),
                Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                    self.is_open = true;
                    is_done = true;
                    if !text.is_empty() {
                        encrypt(&mut traffic, text, &mut self.outgoing)?;
                    }
                }
                Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
                    self.has_ended = true;
                    is_done = true;
                }
                Ok(_) => is_done = true,
                Err(error) => {
                    let why = messages::of(&error, &self.host);
                    self.start += discard;
                    self.failed = Some(why.clone());
                    self.say_why(link);
                    return Err(Lost::Unsafe(why));
                }
            }
            self.start += discard;
            if is_done {
                return Ok(());
            }
        }
    }

    /// Tells the other side why it is given up, so that its log has it, too. As far as there is
    /// room for it now.
    fn say_why(&mut self, link: &Link) {
        let incoming = &mut self.incoming[self.start..self.end];
        let UnbufferedStatus { state, .. } = self.conn.process_tls_records(incoming);
        if let Ok(ConnectionState::EncodeTlsData(mut data)) = state {
            let said = grow(&mut self.outgoing, |room| data.encode(room).map_err(|_| None));
            if said.is_ok() {
                // The reason is told to the caller; that this fails, too, is of no interest.
                let _ = self.flush(link);
            }
        }
    }
}

fn encrypt(
    traffic: &mut WriteTraffic<'_, ClientConnectionData>,
    text: &[u8],
    outgoing: &mut Vec<u8>,
) -> Result<(), Lost> {
    grow(outgoing, |room| {
        traffic.encrypt(text, room).map_err(|error| match error {
            EncryptError::InsufficientSize(size) => Some(size),
            EncryptError::EncryptExhausted => None,
        })
    })
}

/// Has something written at the end of a buffer, which is made longer if that is all it takes.
fn grow(
    buffer: &mut Vec<u8>,
    mut write: impl FnMut(&mut [u8]) -> Result<usize, Option<InsufficientSizeError>>,
) -> Result<(), Lost> {
    let end = buffer.len();
    buffer.resize(end + RECORD_ROOM, 0);
    let mut wrote = write(&mut buffer[end..]);
    if let Err(Some(InsufficientSizeError { required_size })) = wrote {
        buffer.resize(end + required_size, 0);
        wrote = write(&mut buffer[end..]);
    }
    buffer.truncate(end + wrote.as_ref().copied().unwrap_or(0));
    wrote.map(drop).map_err(|_| Lost::Unsafe(messages::EXHAUSTED.to_string()))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
