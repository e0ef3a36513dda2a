//! TLS client sessions by rustls. They have no threads and never wait, so deadlines are up to the
//! caller.

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

/// Receive buffer: more than the longest handshake message, which must be complete before it is
/// processed.
const INCOMING_BYTES: usize = 80 << 10;
/// Minimum free room of a buffer: a whole TLS record.
const RECORD_ROOM: usize = 18 << 10;
/// Plaintext bytes of a record.
const RECORD_BYTES: usize = 16 << 10;
/// Limit: plaintext bytes encrypted at a time.
const SEND_BYTES: usize = 64 << 10;
/// Limit: attempts to receive before other connections have their turn.
const TURNS: usize = 8;

/// A TLS session of a connection.
pub struct Session {
    conn: UnbufferedClientConnection,
    /// Expected host, for messages.
    host: String,
    /// Received bytes that are not processed yet.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// Encrypted bytes to send; `sent` of them are sent.
    outgoing: Vec<u8>,
    sent: usize,
    /// Decrypted bytes that were not requested yet; `delivered` of them are delivered.
    rest: Vec<u8>,
    delivered: usize,
    /// Small pieces, gathered into one record.
    gathered: Vec<u8>,
    is_open: bool,
    has_ended: bool,
    /// First failure; every later call fails with it.
    failed: Option<String>,
}

/// Destination of decrypted bytes: pieces of memory, and a buffer for the rest.
struct Sink<'a> {
    pieces: &'a mut dyn Iterator<Item = (*mut u8, usize)>,
    at: (*mut u8, usize),
    placed: usize,
    rest: &'a mut Vec<u8>,
}

impl Sink<'_> {
    /// Delivers bytes.
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
            // SAFETY: `count` bytes of a piece, which the caller guarantees; received bytes are in
            // other memory.
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
            delivered: 0,
            gathered: Vec::new(),
            is_open: false,
            has_ended: false,
            failed: None,
        }
    }

    /// Whether encrypted bytes are to be sent.
    pub fn wants_write(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Continues the handshake as far as possible; true once it is complete.
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

    /// Encrypts some bytes of the pieces, after all earlier bytes were sent; returns their number.
    /// None = no room.
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
            // SAFETY: the caller guarantees the pieces.
            let mut piece = unsafe { std::slice::from_raw_parts(address.cast_const(), bytes) };
            // A record for each small piece would cost more than a copy.
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

    /// Receives what has arrived, as far as the pieces have room; None = nothing has.
    ///
    /// # Safety
    /// Every piece can be written, and nothing else accesses it meanwhile.
    pub unsafe fn receive(&mut self, link: &Link, pieces: &Pieces) -> Result<Option<usize>, Lost> {
        let mut rest = take(&mut self.rest);
        let each = &mut pieces.each();
        let mut over = Vec::new();
        let mut sink =
            Sink { pieces: each, at: (std::ptr::null_mut(), 0), placed: 0, rest: &mut over };
        if self.delivered < rest.len() {
            // SAFETY: the caller guarantees the pieces.
            unsafe { sink.put(&rest[self.delivered..]) };
            self.delivered += sink.placed;
            self.rest = rest;
            return Ok(Some(sink.placed));
        }
        rest.clear();
        self.delivered = 0;
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
                // Records without data must not delay other connections.
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
        // Bytes before the end still count.
        if placed > 0 { Ok(Some(placed)) } else { done }
    }

    /// Overwrites the copies of small pieces.
    pub fn wipe(&mut self) {
        let whole = self.gathered.capacity();
        self.gathered.clear();
        self.gathered.resize(whole, 0);
        for byte in &mut self.gathered {
            // SAFETY: a byte of this buffer.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
        self.gathered.clear();
    }

    /// Receives bytes from the connection; whether any arrived.
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
        // SAFETY: the piece is the unused part of this session's buffer.
        match unsafe { link.receive(&mut pieces) }? {
            Some(bytes) => {
                self.end += bytes.min(self.incoming.len() - self.end);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Sends encrypted bytes; whether all are sent.
    fn flush(&mut self, link: &Link) -> Result<bool, Lost> {
        while self.wants_write() {
            let mut pieces = Pieces::default();
            let left = &mut self.outgoing[self.sent..];
            pieces.push(left.as_mut_ptr(), left.len());
            // SAFETY: the piece is a part of this session's buffer.
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
        // Bytes that are decrypted meanwhile are kept until they are requested.
        let done = self.process(link, &mut sink, text);
        self.rest = rest;
        done
    }

    /// Processes received records until more are needed, then encrypts `text`.
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
                        // SAFETY: the creator of the sink guarantees it.
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
                // It is sent in order with everything else.
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

    /// Sends an alert, so that the server's log has the reason, as far as there is room now.
    fn say_why(&mut self, link: &Link) {
        let incoming = &mut self.incoming[self.start..self.end];
        let UnbufferedStatus { state, .. } = self.conn.process_tls_records(incoming);
        if let Ok(ConnectionState::EncodeTlsData(mut data)) = state {
            let encoded = grow(&mut self.outgoing, |room| data.encode(room).map_err(|_| None));
            if encoded.is_ok() {
                // The caller gets the reason; a failure to send it does not matter.
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

/// Appends to a buffer, which grows if the writer needs more room.
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
