//! Commands to a server, in the order in which they are sent. Values stay in the caller's memory
//! until the kernel takes them.

use std::collections::VecDeque;

use crate::io::link::Pieces;
use crate::tier::remote::Part;
use crate::tier::remote::secret::wipe;

/// Commands that have not been sent.
#[derive(Default)]
pub struct CommandBuffer {
    /// All bytes but the values.
    heads: Vec<u8>,
    pieces: VecDeque<Piece>,
}

enum Piece {
    Head { start: usize, end: usize },
    Value(Part),
}

impl CommandBuffer {
    /// Begins a command of `words` words.
    pub fn command(&mut self, words: usize) {
        let start = self.heads.len();
        self.head(b'*', words as u64);
        self.added(start);
    }

    /// Adds a word.
    pub fn word(&mut self, word: &[u8]) {
        let start = self.heads.len();
        self.head(b'$', word.len() as u64);
        self.heads.extend_from_slice(word);
        self.heads.extend_from_slice(b"\r\n");
        self.added(start);
    }

    /// Adds a number.
    pub fn number(&mut self, number: u64) {
        self.word(number.to_string().as_bytes());
    }

    /// Adds a word whose bytes stay where they are until they are sent.
    pub fn value(&mut self, parts: &[Part], bytes: u64) {
        let start = self.heads.len();
        self.head(b'$', bytes);
        self.added(start);
        let values = parts.iter().filter(|part| part.bytes > 0);
        self.pieces.extend(values.map(|part| Piece::Value(*part)));
        let start = self.heads.len();
        self.heads.extend_from_slice(b"\r\n");
        self.added(start);
    }

    /// Whether all has been sent.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Fills `into` with the next pieces to send, as many as fit.
    pub fn fill(&mut self, into: &mut Pieces) {
        into.clear();
        for piece in &self.pieces {
            let (address, bytes) = match piece {
                Piece::Head { start, end } => {
                    (self.heads[*start..*end].as_ptr().cast_mut(), end - start)
                }
                Piece::Value(part) => (part.address, part.bytes as usize),
            };
            if !into.push(address, bytes) {
                return;
            }
        }
    }

    /// Removes `bytes` bytes that were sent.
    pub fn sent(&mut self, mut bytes: usize) {
        while let Some(first) = self.pieces.front_mut() {
            let available = match first {
                Piece::Head { start, end } => *end - *start,
                Piece::Value(part) => part.bytes as usize,
            };
            if bytes < available {
                match first {
                    Piece::Head { start, .. } => *start += bytes,
                    Piece::Value(part) => {
                        part.address = part.address.wrapping_add(bytes);
                        part.bytes -= bytes as u64;
                    }
                }
                return;
            }
            bytes -= available;
            self.pieces.pop_front();
        }
        self.heads.clear();
    }

    /// Overwrites secrets. Allowed only after all has been sent.
    pub fn wipe(&mut self) {
        let whole = self.heads.capacity();
        self.heads.clear();
        self.heads.resize(whole, 0);
        wipe(&mut self.heads);
        self.heads.clear();
    }

    /// Writes a type byte and a count. Written by hand, because a batch may have thousands.
    fn head(&mut self, kind: u8, mut count: u64) {
        let (mut digits, mut at) = ([0; 20], 20);
        loop {
            at -= 1;
            digits[at] = b'0' + (count % 10) as u8;
            count /= 10;
            if count == 0 {
                break;
            }
        }
        self.heads.push(kind);
        self.heads.extend_from_slice(&digits[at..]);
        self.heads.extend_from_slice(b"\r\n");
    }

    fn added(&mut self, start: usize) {
        let now = self.heads.len();
        match self.pieces.back_mut() {
            Some(Piece::Head { end, .. }) if *end == start => *end = now,
            _ => self.pieces.push_back(Piece::Head { start, end: now }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_survive_partial_sends() {
        for step in [1, 3, 7, 1000] {
            let mut out = CommandBuffer::default();
            let mut value = *b"0123456789";
            out.command(3);
            out.word(b"SET");
            out.word(b"k");
            let at = value.as_mut_ptr();
            let part = |from: usize, bytes| Part { address: at.wrapping_add(from), bytes };
            out.value(&[part(0, 4), part(4, 0), part(4, 6)], 10);
            out.command(1);
            out.word(b"PING");
            assert_eq!(out.pieces.len(), 4);
            let mut sent = Vec::new();
            while !out.is_empty() {
                let available: Vec<u8> = out
                    .pieces
                    .iter()
                    .flat_map(|piece| match piece {
                        Piece::Head { start, end } => out.heads[*start..*end].to_vec(),
                        Piece::Value(part) => {
                            let from = part.address as usize - at as usize;
                            b"0123456789"[from..from + part.bytes as usize].to_vec()
                        }
                    })
                    .collect();
                let bytes = step.min(available.len());
                sent.extend_from_slice(&available[..bytes]);
                out.sent(bytes);
            }
            let want = "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$10\r\n0123456789\r\n*1\r\n$4\r\nPING\r\n";
            assert_eq!(String::from_utf8_lossy(&sent), want);
            assert!(out.heads.is_empty());
        }
    }
}
