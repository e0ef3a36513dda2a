//! What a lane has to do: a batch of one kind, its commands, and what answers mean for it.

use crate::io::link::Pieces;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::redis::MAX_BYTES;
use crate::tier::remote::redis::command::Out;
use crate::tier::remote::redis::resp::{Value, Want};
use crate::tier::remote::{Asks, Gets, Part, Puts, Trouble};

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

/// A batch.
pub enum Work<'a> {
    /// To be fetched.
    Get(&'a mut Gets),
    /// To be stored.
    Put(&'a mut Puts),
    /// To be asked for.
    Ask(&'a mut Asks),
    /// To be taken away.
    Remove(&'a mut Asks),
    /// What the server says of itself.
    Greet(&'a mut Result<Vec<u8>, Trouble>),
    /// To be appended to the stream of events.
    Publish(Entry<'a>),
}

/// An entry of a stream.
pub struct Entry<'a> {
    /// Names and values, in turn.
    pub fields: &'a [(&'a str, &'a [u8])],
    /// About so many entries are kept.
    pub most: u64,
    /// How it went.
    pub result: &'a mut Result<(), Trouble>,
}

/// How commands are worded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wording {
    /// Seconds after which objects go; 0 = never.
    pub ttl_s: u64,
    /// The server does not know UNLINK.
    pub is_old: bool,
}

/// What came for an item.
pub enum Came {
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
    Nonsense,
}

impl Work<'_> {
    /// How many items there are.
    pub fn len(&self) -> usize {
        match self {
            Work::Get(gets) => gets.items.len(),
            Work::Put(puts) => puts.items.len(),
            Work::Ask(asks) | Work::Remove(asks) => asks.items.len(),
            Work::Greet(_) | Work::Publish(_) => 1,
        }
    }

    /// Writes what an item is called; false = any server may have it.
    pub fn key(&self, item: usize, prefix: &Prefix, out: &mut Vec<u8>) -> bool {
        out.clear();
        let name = match self {
            Work::Get(gets) => gets.items.get(item).map(|get| &get.name),
            Work::Put(puts) => puts.items.get(item).map(|put| &put.name),
            Work::Ask(asks) | Work::Remove(asks) => asks.items.get(item).map(|ask| &ask.name),
            Work::Greet(_) => None,
            Work::Publish(_) => {
                prefix.write_stream(out);
                return true;
            }
        };
        name.inspect(|name| prefix.write(name, out)).is_some()
    }

    /// Whether objects are read, or asked for.
    pub fn is_read(&self) -> bool {
        matches!(self, Work::Get(_) | Work::Ask(_))
    }

    /// Whether an item is known not to be there.
    pub fn is_absent(&self, item: usize) -> bool {
        match self {
            Work::Get(gets) => gets.items[item].result == Err(Trouble::Absent),
            Work::Ask(asks) => asks.items[item].result == Err(Trouble::Absent),
            _ => false,
        }
    }

    /// Whether it is too long for any server.
    pub fn is_too_long(&self, item: usize) -> bool {
        matches!(self, Work::Put(puts) if puts.bytes_of(item) > MAX_BYTES)
    }

    /// Bytes that an item has on the way.
    pub fn weight(&self, item: usize) -> u64 {
        match self {
            Work::Get(gets) => gets.room_of(item).min(MAX_BYTES),
            Work::Put(puts) => puts.bytes_of(item),
            Work::Ask(_) | Work::Remove(_) | Work::Greet(_) | Work::Publish(_) => 0,
        }
    }

    /// Whether an item may go beside others that are on the way, with so many bytes at most.
    pub fn fits(&self, item: usize, (items, bytes): (usize, u64), window: u64) -> bool {
        match self {
            Work::Get(_) | Work::Put(_) => {
                let sum = bytes.saturating_add(self.weight(item));
                // A server has the next one ready while one is on its way, also where one alone
                // is longer than a short window.
                let most = if items == 1 { MOST_WINDOW_BYTES } else { window };
                items == 0 || (items < WINDOW_ITEMS && sum <= most)
            }
            Work::Ask(_) | Work::Remove(_) | Work::Greet(_) | Work::Publish(_) => {
                items < WINDOW_ASKS
            }
        }
    }

    /// Says the command of an item.
    pub fn say(&self, item: usize, key: &[u8], wording: Wording, out: &mut Out) {
        match self {
            Work::Get(gets) => {
                let (offset, room) = (gets.items[item].offset, gets.room_of(item).min(MAX_BYTES));
                match way(offset, room) {
                    Way::Length => words(out, &[b"STRLEN", key]),
                    Way::Whole => words(out, &[b"GET", key]),
                    Way::Range => {
                        out.command(4);
                        out.word(b"GETRANGE");
                        out.word(key);
                        // Servers count with a sign.
                        out.number(offset.min(i64::MAX as u64));
                        out.number(offset.saturating_add(room - 1).min(i64::MAX as u64));
                    }
                }
            }
            Work::Put(puts) => {
                out.command(if wording.ttl_s > 0 { 6 } else { 4 });
                out.word(b"SET");
                out.word(key);
                out.value(puts.parts_of(item), puts.bytes_of(item));
                out.word(b"NX");
                if wording.ttl_s > 0 {
                    out.word(b"EX");
                    out.number(wording.ttl_s);
                }
            }
            Work::Ask(_) => words(out, &[b"STRLEN", key]),
            Work::Remove(_) if wording.is_old => words(out, &[b"DEL", key]),
            Work::Remove(_) => words(out, &[b"UNLINK", key]),
            Work::Greet(_) => words(out, &[b"INFO"]),
            Work::Publish(entry) => {
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
            Work::Get(gets) => {
                let room = gets.room_of(item).min(MAX_BYTES);
                match way(gets.items[item].offset, room) {
                    Way::Length => Want::Word,
                    Way::Whole => Want::Body(MAX_BYTES),
                    Way::Range => Want::Body(room),
                }
            }
            Work::Put(_) | Work::Ask(_) | Work::Remove(_) => Want::Word,
            Work::Publish(_) => Want::Value(MAX_ID_BYTES),
            Work::Greet(_) => Want::Value(MAX_INFO_BYTES),
        }
    }

    /// Where the bytes of an object go from one on, at most so many; how many there is room for.
    pub fn pieces(&self, item: usize, from: u64, most: u64, into: &mut Pieces) -> u64 {
        let Work::Get(gets) = self else { return 0 };
        let (mut skip, mut added) = (from, 0);
        for part in gets.parts_of(item) {
            let bytes = part.bytes.saturating_sub(skip).min(most - added);
            if bytes > 0 {
                if !into.push(part.address.wrapping_add(skip as usize), bytes as usize) {
                    break;
                }
                added += bytes;
            }
            skip = skip.saturating_sub(part.bytes);
        }
        added
    }

    /// Copies bytes of an object to where they go from one on. What there is no room for is left.
    ///
    /// # Safety
    /// The memory of the item's parts is valid, and nobody else's meanwhile.
    pub unsafe fn copy(&self, item: usize, from: u64, mut bytes: &[u8]) {
        let Work::Get(gets) = self else { return };
        let mut skip = from;
        for Part { address, bytes: room } in gets.parts_of(item) {
            let count = (room.saturating_sub(skip) as usize).min(bytes.len());
            if count > 0 {
                let to = address.wrapping_add(skip as usize);
                // SAFETY: `count` bytes from `skip` on are within the part, which the caller
                // vouches for; the buffer is another memory.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count) };
                bytes = &bytes[count..];
            }
            skip = skip.saturating_sub(*room);
        }
    }

    /// Notes what came for an item.
    pub fn came(&mut self, item: usize, came: Came) -> Outcome {
        match (self, came) {
            (_, Came::Value(Value::Error(words))) => return Outcome::Error(words),
            // An object without bytes cannot be told from none by a server's answers to
            // questions for parts and lengths: it counts as none everywhere.
            (Work::Get(gets), Came::Value(Value::Nil) | Came::Body(0)) => {
                gets.items[item].result = Err(Trouble::Absent);
            }
            (Work::Get(gets), Came::Body(bytes)) => {
                gets.items[item].result = Ok(bytes.min(gets.room_of(item)));
            }
            (Work::Get(gets), Came::Value(Value::Number(bytes @ 0..)))
                if gets.room_of(item) == 0 =>
            {
                let there = if bytes > 0 { Ok(0) } else { Err(Trouble::Absent) };
                gets.items[item].result = there;
            }
            (Work::Put(puts), Came::Value(Value::Nil)) => puts.items[item].result = Ok(true),
            (Work::Put(puts), Came::Value(Value::Text(text))) if text == b"OK" => {
                puts.items[item].result = Ok(false);
            }
            (Work::Ask(asks), Came::Value(Value::Number(bytes @ 0..))) => {
                let there = if bytes > 0 { Ok(bytes as u64) } else { Err(Trouble::Absent) };
                asks.items[item].result = there;
            }
            (Work::Remove(asks), Came::Value(Value::Number(0..=1))) => {
                asks.items[item].result = Ok(0);
            }
            (Work::Greet(said), Came::Value(Value::Text(text))) => **said = Ok(text),
            (Work::Publish(entry), Came::Value(Value::Text(_))) => *entry.result = Ok(()),
            _ => return Outcome::Nonsense,
        }
        Outcome::Done
    }

    /// Notes that an item came to nothing.
    pub fn fail(&mut self, item: usize, trouble: Trouble) {
        match self {
            Work::Get(gets) => gets.items[item].result = Err(trouble),
            Work::Put(puts) => puts.items[item].result = Err(trouble),
            Work::Ask(asks) | Work::Remove(asks) => asks.items[item].result = Err(trouble),
            Work::Greet(said) => **said = Err(trouble),
            Work::Publish(entry) => *entry.result = Err(trouble),
        }
    }
}

/// How an object, or a part of one, is asked for.
enum Way {
    Length,
    Whole,
    Range,
}

fn way(offset: u64, room: u64) -> Way {
    match (offset, room) {
        // No range is of no bytes: from 0 to -1 is all of it.
        (_, 0) => Way::Length,
        (0, room) if room > RANGE_BYTES => Way::Whole,
        _ => Way::Range,
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
        let work = Work::Get(&mut gets);
        assert!(work.fits(0, (0, 0), 1 << 20) && !work.fits(1, (2, 0), 1 << 20));
        assert!(work.fits(1, (1, 3 << 20), 1 << 20) && !work.fits(1, (1, 6 << 20), 8 << 20));
        assert!(work.fits(1, (2, 3 << 20), 8 << 20) && !work.fits(2, (2, 6 << 20), 8 << 20));
        assert!(!work.fits(1, (WINDOW_ITEMS, 0), 8 << 20));
    }
}
