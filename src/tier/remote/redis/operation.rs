//! What a lane has to do: a batch of one kind, its commands, and what answers mean for it.

use crate::io::link::Pieces;
use crate::tier::remote::batch::{self, add_pieces, copy_to_parts};
use crate::tier::remote::name::Prefix;
use crate::tier::remote::redis::MAX_BYTES;
use crate::tier::remote::redis::command::Out;
use crate::tier::remote::redis::resp::{Value, Want};
use crate::tier::remote::{Control, RemoteError};

/// Up to here a part of an object is asked for, also where it begins with its first byte. Longer
/// ones come with GET: servers that can send a value without copying it do so for GET alone, and
/// what is longer than there is room for is rare, and costs the way only.
const RANGE_BYTES: u64 = 64 << 10;
/// Most objects on the way at once on a connection, and least and most bytes of theirs: servers
/// keep what nobody has read yet in memory that they do not limit, and where that is fresh memory
/// each object costs them a third more (measured).
const WINDOW_ITEMS: usize = 64;
const LEAST_WINDOW_BYTES: u64 = 1 << 20;
const MOST_WINDOW_BYTES: u64 = 8 << 20;
/// What a line carries in a microsecond: 100 Gbit/s.
const LINE_BYTES_PER_US: u64 = 12_500;
/// Most questions on the way at once: their answers are a few bytes.
const WINDOW_ASKS: usize = 8192;
/// Most bytes of what a server says of itself.
const MAX_INFO_BYTES: usize = 256 << 10;
/// Most bytes of what a server calls an entry of a stream.
const MAX_ID_BYTES: usize = 256;

/// Bytes of objects that may be on the way at once on a connection: what keeps a fast line busy
/// for as long as the way there and back takes, and no more.
pub fn window_of(round_trip_ns: Option<u64>) -> u64 {
    let bytes = round_trip_ns.map(|ns| (ns / 1000).saturating_mul(LINE_BYTES_PER_US));
    bytes.unwrap_or(MOST_WINDOW_BYTES).clamp(LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES)
}

/// An operation on a batch, or one of [`Special`].
pub type Operation<'a> = batch::Operation<'a, Special<'a>>;

/// An operation that concerns no object.
pub enum Special<'a> {
    /// Reads what the server says of itself.
    Info(&'a mut Result<Vec<u8>, RemoteError>),
    /// Appends to the stream of events.
    Publish(StreamEntry<'a>),
}

impl Control for Special<'_> {
    fn fail(&mut self, error: RemoteError) {
        match self {
            Special::Info(said) => **said = Err(error),
            Special::Publish(entry) => *entry.result = Err(error),
        }
    }
}

/// An entry of a stream.
pub struct StreamEntry<'a> {
    /// Names and values, in turn.
    pub fields: &'a [(&'a str, &'a [u8])],
    /// About so many entries are kept.
    pub most: u64,
    /// How it went.
    pub result: &'a mut Result<(), RemoteError>,
}

/// How commands are worded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dialect {
    /// Seconds after which objects go; 0 = never.
    pub ttl_s: u64,
    /// The server does not know UNLINK.
    pub is_old: bool,
}

/// What came for an item.
pub enum Payload {
    /// A value.
    Value(Value),
    /// An object of so many bytes, where it belongs.
    Body(u64),
}

/// What became of an item.
pub enum Outcome {
    /// It has its result.
    Done,
    /// An error, in the server's words.
    Error(Vec<u8>),
    /// Nothing that could be meant.
    Malformed,
}

impl Operation<'_> {
    /// Writes what an item is called; false = any server may have it.
    pub fn key(&self, item: usize, prefix: &Prefix, out: &mut Vec<u8>) -> bool {
        out.clear();
        if let Operation::Control(Special::Publish(_)) = self {
            prefix.write_stream(out);
            return true;
        }
        self.name(item).inspect(|name| prefix.write(name, out)).is_some()
    }

    /// Whether objects are read, or asked for.
    pub fn is_read(&self) -> bool {
        matches!(self, Operation::Get(_) | Operation::Lookup(_))
    }

    /// Whether an item is known not to be there.
    pub fn is_absent(&self, item: usize) -> bool {
        match self {
            Operation::Get(gets) => gets.items[item].result == Err(RemoteError::Absent),
            Operation::Lookup(queries) => queries.items[item].result == Err(RemoteError::Absent),
            _ => false,
        }
    }

    /// Bytes that an item has on the way.
    pub fn weight(&self, item: usize) -> u64 {
        match self {
            Operation::Get(gets) => gets.room_of(item).min(MAX_BYTES),
            Operation::Put(puts) => puts.bytes_of(item),
            Operation::Lookup(_) | Operation::Remove(_) | Operation::Control(_) => 0,
        }
    }

    /// Whether an item may go beside others that are on the way, with so many bytes at most.
    pub fn fits(&self, item: usize, (items, bytes): (usize, u64), window: u64) -> bool {
        match self {
            Operation::Get(_) | Operation::Put(_) => {
                let sum = bytes.saturating_add(self.weight(item));
                // A server has the next one ready while one is on its way, also where one alone
                // is longer than a short window.
                let most = if items == 1 { MOST_WINDOW_BYTES } else { window };
                items == 0 || (items < WINDOW_ITEMS && sum <= most)
            }
            Operation::Lookup(_) | Operation::Remove(_) | Operation::Control(_) => {
                items < WINDOW_ASKS
            }
        }
    }

    /// Says the command of an item.
    pub fn say(&self, item: usize, key: &[u8], dialect: Dialect, out: &mut Out) {
        match self {
            Operation::Get(gets) => {
                let (offset, room) = (gets.items[item].offset, gets.room_of(item).min(MAX_BYTES));
                match read_command(offset, room) {
                    ReadCommand::StrLen => words(out, &[b"STRLEN", key]),
                    ReadCommand::Get => words(out, &[b"GET", key]),
                    ReadCommand::GetRange => {
                        out.command(4);
                        out.word(b"GETRANGE");
                        out.word(key);
                        // Servers count with a sign.
                        out.number(offset.min(i64::MAX as u64));
                        out.number(offset.saturating_add(room - 1).min(i64::MAX as u64));
                    }
                }
            }
            Operation::Put(puts) => {
                out.command(if dialect.ttl_s > 0 { 6 } else { 4 });
                out.word(b"SET");
                out.word(key);
                out.value(puts.parts_of(item), puts.bytes_of(item));
                out.word(b"NX");
                if dialect.ttl_s > 0 {
                    out.word(b"EX");
                    out.number(dialect.ttl_s);
                }
            }
            Operation::Lookup(_) => words(out, &[b"STRLEN", key]),
            Operation::Remove(_) if dialect.is_old => words(out, &[b"DEL", key]),
            Operation::Remove(_) => words(out, &[b"UNLINK", key]),
            Operation::Control(Special::Info(_)) => words(out, &[b"INFO"]),
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

    /// What may come for an item.
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

    /// Where the bytes of an object go from one on, at most so many; how many there is room for.
    pub fn pieces(&self, item: usize, from: u64, most: u64, into: &mut Pieces) -> u64 {
        let Operation::Get(gets) = self else { return 0 };
        add_pieces(gets.parts_of(item), from, most, into)
    }

    /// Copies bytes of an object to where they go from one on. What there is no room for is left.
    ///
    /// # Safety
    /// The memory of the item's parts is valid, and nobody else's meanwhile.
    pub unsafe fn copy(&self, item: usize, from: u64, bytes: &[u8]) {
        let Operation::Get(gets) = self else { return };
        // SAFETY: the caller's guarantee.
        unsafe { copy_to_parts(gets.parts_of(item), from, bytes) };
    }

    /// Notes what came for an item.
    pub fn complete(&mut self, item: usize, payload: Payload) -> Outcome {
        match (self, payload) {
            (_, Payload::Value(Value::Error(words))) => return Outcome::Error(words),
            // An object without bytes cannot be told from none by a server's answers to
            // questions for parts and lengths: it counts as none everywhere.
            (Operation::Get(gets), Payload::Value(Value::Nil) | Payload::Body(0)) => {
                gets.items[item].result = Err(RemoteError::Absent);
            }
            (Operation::Get(gets), Payload::Body(bytes)) => {
                gets.items[item].result = Ok(bytes.min(gets.room_of(item)));
            }
            (Operation::Get(gets), Payload::Value(Value::Number(bytes @ 0..)))
                if gets.room_of(item) == 0 =>
            {
                let there = if bytes > 0 { Ok(0) } else { Err(RemoteError::Absent) };
                gets.items[item].result = there;
            }
            (Operation::Put(puts), Payload::Value(Value::Nil)) => {
                puts.items[item].result = Ok(true)
            }
            (Operation::Put(puts), Payload::Value(Value::Text(text))) if text == b"OK" => {
                puts.items[item].result = Ok(false);
            }
            (Operation::Lookup(queries), Payload::Value(Value::Number(bytes @ 0..))) => {
                let there = if bytes > 0 { Ok(bytes as u64) } else { Err(RemoteError::Absent) };
                queries.items[item].result = there;
            }
            (Operation::Remove(queries), Payload::Value(Value::Number(0..=1))) => {
                queries.items[item].result = Ok(0);
            }
            (Operation::Control(Special::Info(said)), Payload::Value(Value::Text(text))) => {
                **said = Ok(text)
            }
            (Operation::Control(Special::Publish(entry)), Payload::Value(Value::Text(_))) => {
                *entry.result = Ok(())
            }
            _ => return Outcome::Malformed,
        }
        Outcome::Done
    }
}

/// How an object, or a part of one, is asked for.
enum ReadCommand {
    StrLen,
    Get,
    GetRange,
}

fn read_command(offset: u64, room: u64) -> ReadCommand {
    match (offset, room) {
        // No range is of no bytes: from 0 to -1 is all of it.
        (_, 0) => ReadCommand::StrLen,
        (0, room) if room > RANGE_BYTES => ReadCommand::Get,
        _ => ReadCommand::GetRange,
    }
}

/// Says a command.
pub fn words(out: &mut Out, words: &[&[u8]]) {
    out.command(words.len());
    words.iter().for_each(|word| out.word(word));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::remote::Gets;
    use crate::tier::remote::name::{HASH_BYTES, Name};

    #[test]
    fn windows_are_as_long_as_the_way() {
        let of = |us: u64| window_of(Some(us * 1000)) >> 10;
        assert_eq!(
            [0, 40, 83, 168, 335, 700, 90_000].map(of),
            [1024, 1024, 1024, 2050, 4089, 8192, 8192]
        );
        assert_eq!((window_of(None), window_of(Some(u64::MAX))), (8 << 20, 8 << 20));
    }

    #[test]
    fn one_fits_always_and_a_second_where_it_is_not_too_long() {
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
    }
}
