//! Values of the metadata of GGUF files. Only whole numbers and the name of the
//! architecture are of use here; the rest, such as the words of a vocabulary, is passed over.

use crate::stream::model::cursor::{Cursor, Stop, corrupt};

/// Deepest nesting of arrays.
pub const MAX_DEPTH: u32 = 4;

/// What of a value is of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A whole number that is not negative.
    Number(u64),
    /// Text.
    Text(&'a str),
    /// An array: how many elements, and the largest of whole numbers among them.
    Array(u64, Option<u64>),
    /// An array of flags: how many, and how many are set.
    Flags(u64, u64),
    /// Anything else.
    Else,
}

const FLAG: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// What a value of a kind takes, if that is always the same.
fn size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// A number of a kind that is whole and not negative.
fn number(kind: u32, bytes: &[u8]) -> Option<u64> {
    let mut wide = [0; 8];
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    let value = u64::from_le_bytes(wide);
    let negative = bytes.last().is_some_and(|last| *last >= 128);
    match kind {
        0 | 2 | 4 | 10 => Some(value),
        1 | 3 | 5 | 11 if !negative => Some(value),
        _ => None,
    }
}

/// Reads the value of a kind.
pub fn read<'a>(cursor: &mut Cursor<'a>, kind: u32) -> Result<Value<'a>, Stop> {
    match (kind, size(kind)) {
        (_, Some(size)) => {
            let bytes = cursor.take(size)?;
            Ok(number(kind, bytes).map_or(Value::Else, Value::Number))
        }
        (STRING, _) => {
            let bytes = cursor.bytes()?;
            Ok(std::str::from_utf8(bytes).map_or(Value::Else, Value::Text))
        }
        (ARRAY, _) => array(cursor, 1),
        _ => Err(corrupt(cursor.at(), format_args!("a value of the unknown kind {kind}"))),
    }
}

fn array<'a>(cursor: &mut Cursor<'a>, depth: u32) -> Result<Value<'a>, Stop> {
    let at = cursor.at();
    if depth > MAX_DEPTH {
        return Err(corrupt(at, format_args!("arrays nested deeper than {MAX_DEPTH}")));
    }
    let (kind, count) = (cursor.u32()?, cursor.u64()?);
    // The least that an element takes: a count that lies ends here and not in a long loop.
    let least = match kind {
        STRING => 8,
        ARRAY => 12,
        kind => match size(kind) {
            Some(size) => size,
            None => return Err(corrupt(at, format_args!("an array of the unknown kind {kind}"))),
        },
    };
    if count.checked_mul(least).is_none_or(|bytes| bytes > cursor.left()) {
        return Err(corrupt(at, format_args!("an array of {count} elements that the file lacks")));
    }
    let mut largest = None;
    match kind {
        FLAG => {
            let set = cursor.take(count)?.iter().filter(|flag| **flag != 0).count();
            return Ok(Value::Flags(count, set as u64));
        }
        STRING => {
            for _ in 0..count {
                cursor.bytes()?;
            }
        }
        ARRAY => {
            for _ in 0..count {
                array(cursor, depth + 1)?;
            }
        }
        kind => {
            let bytes = cursor.take(count * least)?;
            let all = bytes.chunks_exact(least as usize);
            largest = all.filter_map(|bytes| number(kind, bytes)).max();
        }
    }
    Ok(Value::Array(count, largest))
}
