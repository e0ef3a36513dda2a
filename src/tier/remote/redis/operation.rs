//! The commands of an operation, and the effect of their replies.

use crate::io::link::Pieces;
use crate::tier::remote::batch::{self, add_pieces, copy_to_parts};
use crate::tier::remote::name::Prefix;
use crate::tier::remote::redis::MAX_BYTES;
use crate::tier::remote::redis::command::CommandBuffer;
use crate::tier::remote::redis::resp::{Value, Want};
use crate::tier::remote::{Control, RemoteError};

/// Up to this length a get uses GETRANGE, even from offset 0. Longer ones use GET: servers that
/// send values without a copy do so for GET only. An object longer than the room is rare and costs
/// bandwidth only.
const RANGE_BYTES: u64 = 64 << 10;
/// Most objects in flight on a connection, and least and most bytes of theirs. Servers keep unread
/// replies in memory that they do not limit; where that memory is fresh, each object costs a third
/// more (measured).
const WINDOW_ITEMS: usize = 64;
const LEAST_WINDOW_BYTES: u64 = 256 << 10;
const MOST_WINDOW_BYTES: u64 = 8 << 20;
/// Bytes that a link of 100 Gbit/s carries in a microsecond.
const LINE_BYTES_PER_US: u64 = 12_500;
/// Most lookups and removals in flight: their replies are a few bytes.
const WINDOW_REQUESTS: usize = 8192;
/// Longest reply to INFO.
const MAX_INFO_BYTES: usize = 256 << 10;
/// Longest id of a stream entry.
const MAX_ID_BYTES: usize = 256;

/// Bytes of objects that may be in flight on a connection: as many as keep a fast link busy for one
/// round trip.
pub fn window_of(round_trip_ns: Option<u64>) -> u64 {
    let bytes = round_trip_ns.map(|ns| (ns / 1000).saturating_mul(LINE_BYTES_PER_US));
    bytes.unwrap_or(MOST_WINDOW_BYTES).clamp(LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES)
}

/// An operation on a batch, or one of [`Special`].
pub type Operation<'a> = batch::Operation<'a, Special<'a>>;

/// An operation that concerns no object.
pub enum Special<'a> {
    /// INFO.
    Info(&'a mut Result<Vec<u8>, RemoteError>),
    /// XADD to the stream of events.
    Publish(StreamEntry<'a>),
}

impl Control for Special<'_> {
    fn fail(&mut self, error: RemoteError) {
        match self {
            Special::Info(info) => **info = Err(error),
            Special::Publish(entry) => *entry.result = Err(error),
        }
    }
}

/// An entry of the stream of events.
pub struct StreamEntry<'a> {
    /// Field names and values.
    pub fields: &'a [(&'a str, &'a [u8])],
    /// Approximate number of entries that the stream keeps.
    pub most: u64,
    pub result: &'a mut Result<(), RemoteError>,
}

/// Variants of commands.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dialect {
    /// Time to live of objects, in seconds; 0 = unlimited.
    pub ttl_s: u64,
    /// The server does not know UNLINK.
    pub is_old: bool,
}

/// The content of a reply.
pub enum Payload {
    /// A decoded value.
    Value(Value),
    /// The length of an object that is in the item's parts.
    Body(u64),
}

/// The effect of a reply on its item.
pub enum Outcome {
    /// The item has its result.
    Done,
    /// An error reply.
    Error(Vec<u8>),
    /// A reply that no such command has.
    Malformed,
}

impl Operation<'_> {
    /// Writes the key of an item; false = the command has no key, and any node can execute it.
    pub fn key(&self, item: usize, prefix: &Prefix, out: &mut Vec<u8>) -> bool {
        out.clear();
        if let Operation::Control(Special::Publish(_)) = self {
            prefix.write_stream(out);
            return true;
        }
        self.name(item).inspect(|name| prefix.write(name, out)).is_some()
    }

    /// Whether a replica can execute the operation.
    pub fn is_read(&self) -> bool {
        matches!(self, Operation::Get(_) | Operation::Lookup(_))
    }

    /// Whether an item was reported absent.
    pub fn is_absent(&self, item: usize) -> bool {
        match self {
            Operation::Get(gets) => gets.items[item].result == Err(RemoteError::Absent),
            Operation::Lookup(queries) => queries.items[item].result == Err(RemoteError::Absent),
            _ => false,
        }
    }

    /// Bytes that an item occupies in the window.
    pub fn weight(&self, item: usize) -> u64 {
        match self {
            Operation::Get(gets) => gets.room_of(item).min(MAX_BYTES),
            Operation::Put(puts) => puts.bytes_of(item),
            Operation::Lookup(_) | Operation::Remove(_) | Operation::Control(_) => 0,
        }
    }

    /// Whether an item may be sent beside the `items` in flight with their `bytes`.
    pub fn fits(&self, item: usize, (items, bytes): (usize, u64), window: u64) -> bool {
        match self {
            Operation::Get(_) | Operation::Put(_) => {
                let sum = bytes.saturating_add(self.weight(item));
                // A server prepares the next object while it sends one, even if one object alone
                // exceeds a short window. A server receives an object without a copy only if no other
                // command follows.
                let has_second = items == 1 && matches!(self, Operation::Get(_));
                let most = if has_second { MOST_WINDOW_BYTES } else { window };
                items == 0 || (items < WINDOW_ITEMS && sum <= most)
            }
            Operation::Lookup(_) | Operation::Remove(_) | Operation::Control(_) => {
                items < WINDOW_REQUESTS
            }
        }
    }

    /// Encodes the command of an item.
    pub fn encode(&self, item: usize, key: &[u8], dialect: Dialect, out: &mut CommandBuffer) {
        match self {
            Operation::Get(gets) => {
                let (offset, room) = (gets.items[item].offset, gets.room_of(item).min(MAX_BYTES));
                match read_command(offset, room) {
                    ReadCommand::StrLen => write_command(out, &[b"STRLEN", key]),
                    ReadCommand::Get => write_command(out, &[b"GET", key]),
                    ReadCommand::GetRange => {
                        out.command(4);
                        out.word(b"GETRANGE");
                        out.word(key);
                        // Servers use signed offsets.
                        out.number(offset.min(i64::MAX as u64));
                        out.number(offset.saturating_add(room - 1).min(i64::MAX as u64));
                    }
                }
            }
            // Servers do not copy a long value that ends its command.
            Operation::Put(puts) if dialect.ttl_s == 0 => {
                out.command(3);
                out.word(b"SETNX");
                out.word(key);
                out.value(puts.parts_of(item), puts.bytes_of(item));
            }
            Operation::Put(puts) => {
                out.command(6);
                out.word(b"SET");
                out.word(key);
                out.value(puts.parts_of(item), puts.bytes_of(item));
                out.word(b"NX");
                out.word(b"EX");
                out.number(dialect.ttl_s);
            }
            Operation::Lookup(_) => write_command(out, &[b"STRLEN", key]),
            Operation::Remove(_) if dialect.is_old => write_command(out, &[b"DEL", key]),
            Operation::Remove(_) => write_command(out, &[b"UNLINK", key]),
            Operation::Control(Special::Info(_)) => write_command(out, &[b"INFO"]),
            Operation::Control(Special::Publish(entry)) => {
                out.command(6 + 2 * entry.fields.len());
                [b"XADD", key, b"MAXLEN", b"~"].iter().for_each(|word| out.word(word));
                out.number(entry.most);
                out.word(b"*");
                for (name, value) in entry.fields {
                    out.word(name.as_bytes());
                    out.word(value);
                }
            }
        }
    }

    /// The reply that an item expects.
    pub fn want(&self, item: usize) -> Want {
        match self {
            Operation::Get(gets) => {
                let room = gets.room_of(item).min(MAX_BYTES);
                match read_command(gets.items[item].offset, room) {
                    ReadCommand::StrLen => Want::Word,
                    ReadCommand::Get => Want::Body(MAX_BYTES),
                    ReadCommand::GetRange => Want::Body(room),
                }
            }
            Operation::Put(_) | Operation::Lookup(_) | Operation::Remove(_) => Want::Word,
            Operation::Control(Special::Publish(_)) => Want::Value(MAX_ID_BYTES),
            Operation::Control(Special::Info(_)) => Want::Value(MAX_INFO_BYTES),
        }
    }

    /// Adds the memory for bytes of an object from `from` on, at most `most`; returns how many
    /// bytes it covers.
    pub fn pieces(&self, item: usize, from: u64, most: u64, into: &mut Pieces) -> u64 {
        let Operation::Get(gets) = self else { return 0 };
        add_pieces(gets.parts_of(item), from, most, into)
    }

    /// Copies bytes of an object to the item's parts, from byte `from` of the object on.
    ///
    /// # Safety
    /// The memory of the item's parts is valid, and no other thread uses it during the call.
    pub unsafe fn copy(&self, item: usize, from: u64, bytes: &[u8]) {
        let Operation::Get(gets) = self else { return };
        // SAFETY: the caller's guarantee.
        unsafe { copy_to_parts(gets.parts_of(item), from, bytes) };
    }

    /// Records the reply of an item.
    pub fn complete(&mut self, item: usize, payload: Payload) -> Outcome {
        match (self, payload) {
            (_, Payload::Value(Value::Error(message))) => return Outcome::Error(message),
            // GETRANGE and STRLEN do not distinguish an empty object from an absent one: an empty object
            // counts as absent everywhere.
            (Operation::Get(gets), Payload::Value(Value::Nil) | Payload::Body(0)) => {
                gets.items[item].result = Err(RemoteError::Absent);
            }
            (Operation::Get(gets), Payload::Body(bytes)) => {
                gets.items[item].result = Ok(bytes.min(gets.room_of(item)));
            }
            (Operation::Get(gets), Payload::Value(Value::Number(bytes @ 0..)))
                if gets.room_of(item) == 0 =>
            {
                let result = if bytes > 0 { Ok(0) } else { Err(RemoteError::Absent) };
                gets.items[item].result = result;
            }
            (Operation::Put(puts), Payload::Value(Value::Nil)) => {
                puts.items[item].result = Ok(true)
            }
            (Operation::Put(puts), Payload::Value(Value::Text(text))) if text == b"OK" => {
                puts.items[item].result = Ok(false);
            }
            (Operation::Put(puts), Payload::Value(Value::Number(stored @ 0..=1))) => {
                puts.items[item].result = Ok(stored == 0);
            }
            (Operation::Lookup(queries), Payload::Value(Value::Number(bytes @ 0..))) => {
                let result = if bytes > 0 { Ok(bytes as u64) } else { Err(RemoteError::Absent) };
                queries.items[item].result = result;
            }
            (Operation::Remove(queries), Payload::Value(Value::Number(0..=1))) => {
                queries.items[item].result = Ok(0);
            }
            (Operation::Control(Special::Info(info)), Payload::Value(Value::Text(text))) => {
                **info = Ok(text)
            }
            (Operation::Control(Special::Publish(entry)), Payload::Value(Value::Text(_))) => {
                *entry.result = Ok(())
            }
            _ => return Outcome::Malformed,
        }
        Outcome::Done
    }
}

/// The command that reads an object or a part of it.
enum ReadCommand {
    StrLen,
    Get,
    GetRange,
}

fn read_command(offset: u64, room: u64) -> ReadCommand {
    match (offset, room) {
        // There is no empty range: from 0 to -1 is the whole object.
        (_, 0) => ReadCommand::StrLen,
        (0, room) if room > RANGE_BYTES => ReadCommand::Get,
        _ => ReadCommand::GetRange,
    }
}

/// Encodes a command.
pub fn write_command(out: &mut CommandBuffer, words: &[&[u8]]) {
    out.command(words.len());
    words.iter().for_each(|word| out.word(word));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::remote::name::{HASH_BYTES, Name};
    use crate::tier::remote::{Gets, Puts};

    #[test]
    fn windows_grow_with_the_round_trip() {
        let of = |us: u64| window_of(Some(us * 1000)) >> 10;
        assert_eq!(
            [0, 40, 83, 168, 335, 700, 90_000].map(of),
            [256, 488, 1013, 2050, 4089, 8192, 8192]
        );
        assert_eq!((window_of(None), window_of(Some(u64::MAX))), (8 << 20, 8 << 20));
    }

    #[test]
    fn the_window_always_admits_one_object_and_a_second_get_of_limited_length() {
        let mut gets = Gets::default();
        for _ in 0..3 {
            gets.object(Name { tenant: 0, hash: [0; HASH_BYTES] }, 0);
            gets.part(std::ptr::null_mut(), 3 << 20);
        }
        let operation = Operation::Get(&mut gets);
        assert!(operation.fits(0, (0, 0), 1 << 20) && !operation.fits(1, (2, 0), 1 << 20));
        assert!(
            operation.fits(1, (1, 3 << 20), 1 << 20) && !operation.fits(1, (1, 6 << 20), 8 << 20)
        );
        assert!(
            operation.fits(1, (2, 3 << 20), 8 << 20) && !operation.fits(2, (2, 6 << 20), 8 << 20)
        );
        assert!(!operation.fits(1, (WINDOW_ITEMS, 0), 8 << 20));
        let mut puts = Puts::default();
        puts.object(Name { tenant: 0, hash: [0; HASH_BYTES] });
        puts.part(std::ptr::null(), 3 << 20);
        let operation = Operation::Put(&mut puts);
        assert!(operation.fits(0, (0, 0), 1 << 20) && !operation.fits(0, (1, 3 << 20), 1 << 20));
    }
}
