//! The header of a GGUF file: metadata, then names and offsets of tensors.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::dtype::Ggml;
use crate::stream::model::facts::WindowRule;
use crate::stream::model::{Facts, MAX_NAME_BYTES, MAX_TENSORS, Tensor, dtype};

/// Outcome of parsing part of a header.
type Parsed<T> = std::result::Result<T, Stop>;

/// First bytes of a GGUF file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Longest accepted header. Headers with a large vocabulary have about 10 MiB.
pub const MAX_HEAD_BYTES: u64 = 256 << 20;
/// Most dimensions of a tensor in GGUF.
const MAX_GGUF_DIMS: u32 = 4;
/// Bytes that are read first. Most headers need more, few need much more.
const FIRST_BYTES: u64 = 1 << 20;

/// The position of a file in a split model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Its number, from 0.
    pub no: u64,
    /// Number of files.
    pub count: u64,
    /// Number of tensors in all files, if stated.
    pub tensors: Option<u64>,
}

/// Contents of the header of a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gguf {
    /// Its tensors in the order of the header; their file number is 0.
    pub tensors: Vec<Tensor>,
    /// Properties of the model.
    pub facts: Facts,
    /// Position in a split model; none = the model has one file.
    pub split: Option<Split>,
    /// Length of the header.
    pub head_bytes: u64,
}

/// Metadata pairs, sorted by key.
struct Meta<'a>(Vec<(&'a str, Value<'a>)>);

impl Meta<'_> {
    fn get(&self, key: &str) -> Option<Value<'_>> {
        let found = self.0.binary_search_by(|(known, _)| (*known).cmp(key)).ok()?;
        self.0.get(found).map(|(_, value)| *value)
    }

    /// A number, or the largest of an array.
    fn number(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            Value::Number(n) | Value::Array(_, Some(n)) => Some(n),
            _ => None,
        }
    }
}

/// Reads the header of an open file. Returns its contents and its bytes.
pub fn read(file: &Header) -> Result<(Gguf, Vec<u8>)> {
    let most = file.bytes().min(MAX_HEAD_BYTES);
    let mut bytes = FIRST_BYTES.min(most);
    loop {
        let mut head = file.read(0, bytes)?;
        match parse(&head, file.bytes()) {
            Ok(found) => {
                head.truncate(usize::try_from(found.head_bytes).unwrap_or(usize::MAX));
                return Ok((found, head));
            }
            Err(Stop::Bad(error)) => return Err(error),
            Err(Stop::More(needed)) if needed > most => {
                fail!(Limit, "the header is longer than {MAX_HEAD_BYTES} bytes")
            }
            // Doubling bounds the bytes that are read again by those that are read once.
            Err(Stop::More(needed)) => bytes = needed.max(bytes.saturating_mul(2)).min(most),
        }
    }
}

/// Parses a header of which `head` is the start, in a file of `file_bytes` bytes.
pub fn parse(head: &[u8], file_bytes: u64) -> Parsed<Gguf> {
    let mut cursor = Cursor::new(head, file_bytes);
    let version = version(&mut cursor)?;
    let (tensors, pairs) = (cursor.u64()?, cursor.u64()?);
    // A tensor takes at least 24 bytes, a pair 13: wrong counts are detected before memory is
    // allocated.
    let least = tensors.checked_mul(24).zip(pairs.checked_mul(13));
    let least = least.and_then(|(tensors, pairs)| tensors.checked_add(pairs));
    if least.is_none_or(|least| least > cursor.left()) {
        let what = format!("{tensors} tensors and {pairs} pairs of metadata");
        return Err(corrupt(8, format_args!("{what}, for which the file is too short")));
    }
    if tensors > MAX_TENSORS as u64 || pairs > MAX_TENSORS as u64 {
        let text = format!("{tensors} tensors and {pairs} pairs: more than {MAX_TENSORS}");
        return Err(Stop::Bad(Error::new(Status::Limit, text)));
    }
    let meta = metadata(&mut cursor, pairs)?;
    let alignment = alignment(&meta)?;
    let mut found = Vec::new();
    found.try_reserve(tensors as usize).map_err(|_| Error::from(Status::NoMem))?;
    for _ in 0..tensors {
        found.push(tensor(&mut cursor, alignment)?);
    }
    let head_bytes = cursor.at();
    let data = head_bytes.checked_next_multiple_of(alignment);
    for tensor in &mut found {
        let offset = data.and_then(|data| data.checked_add(tensor.offset));
        tensor.offset = match offset {
            Some(offset) => offset,
            None => return Err(corrupt(head_bytes, format_args!("{:?} is too far", tensor.name))),
        };
    }
    log::debug!("GGUF {version}: {tensors} tensors, {pairs} pairs, {head_bytes} bytes of header");
    Ok(Gguf { tensors: found, facts: facts(&meta)?, split: split(&meta), head_bytes })
}

fn version(cursor: &mut Cursor<'_>) -> Parsed<u32> {
    if cursor.take(4)? != MAGIC {
        return Err(corrupt(0, "not a GGUF file"));
    }
    let version = cursor.u32()?;
    let why = match version {
        2 | 3 => return Ok(version),
        // A byte-swapped small version number has its value in the high half.
        n if n & 0xFFFF == 0 && n != 0 => "is big-endian: convert it with gguf_convert_endian.py",
        1 => "is of version 1, which nothing reads any more: convert the model again",
        0 => return Err(corrupt(4, "version 0")),
        _ => "is of a version that is not known: 2 and 3 are",
    };
    let text = format!("the GGUF file {why} (version word {version:#x})");
    Err(Stop::Bad(Error::new(Status::Unsupported, text)))
}

fn metadata<'a>(cursor: &mut Cursor<'a>, pairs: u64) -> Parsed<Meta<'a>> {
    let mut all = Vec::new();
    all.try_reserve(pairs as usize).map_err(|_| Error::from(Status::NoMem))?;
    for _ in 0..pairs {
        let at = cursor.at();
        let key = cursor.text()?;
        let kind = cursor.u32()?;
        if key.is_empty() {
            return Err(corrupt(at, "metadata without a name"));
        }
        all.push((key, read_value(cursor, kind)?));
    }
    all.sort_unstable_by_key(|(key, _)| *key);
    match all.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(corrupt(24, format_args!("metadata {:?} twice", pair[0].0))),
        None => Ok(Meta(all)),
    }
}

fn alignment(meta: &Meta<'_>) -> Result<u64> {
    match meta.get("general.alignment") {
        None => Ok(32),
        Some(Value::Number(n)) if n.is_power_of_two() && n <= u64::from(u32::MAX) => Ok(n),
        Some(found) => fail!(Corrupt, "general.alignment is no power of two: {found:?}"),
    }
}

fn tensor(cursor: &mut Cursor<'_>, alignment: u64) -> Parsed<Tensor> {
    let at = cursor.at();
    let name = cursor.text()?;
    if name.len() > MAX_NAME_BYTES {
        let text = format!("a tensor's name of {} bytes, at byte {at}", name.len());
        return Err(Stop::Bad(Error::new(Status::Limit, text)));
    }
    let count = cursor.u32()?;
    if count > MAX_GGUF_DIMS {
        let what = format!("tensor {name:?} with {count} dimensions");
        return Err(corrupt(at, format_args!("{what}: GGUF has {MAX_GGUF_DIMS} at most")));
    }
    let mut dims = Vec::with_capacity(count as usize);
    for _ in 0..count {
        dims.push(cursor.u64()?);
    }
    if dims.contains(&0) {
        return Err(corrupt(at, format_args!("tensor {name:?} with a dimension of 0")));
    }
    let (number, offset) = (cursor.u32()?, cursor.u64()?);
    let dtype = match dtype::ggml(number) {
        Ggml::Known(dtype) => dtype,
        Ggml::Removed(was) => {
            let text = format!("tensor {name:?} is of type {number}, {was}, which ggml removed");
            let text = format!("{text}: convert the model again");
            return Err(Stop::Bad(Error::new(Status::Unsupported, text)));
        }
        Ggml::Unknown => {
            let text = format!("tensor {name:?} is of the unknown type {number}");
            return Err(Stop::Bad(Error::new(Status::Unsupported, text)));
        }
    };
    let Some(bytes) = dtype.bytes(&dims) else {
        let what = format!("tensor {name:?} of {} numbers that are {}", Product(&dims), dtype.name);
        return Err(corrupt(at, format_args!("{what}: too large, or no whole blocks")));
    };
    if offset % alignment != 0 {
        let what = format!("tensor {name:?} at {offset} of the data");
        return Err(corrupt(at, format_args!("{what}, which is no multiple of {alignment}")));
    }
    Ok(Tensor { name: name.into(), dtype: dtype.name, dims, file: 0, offset, bytes })
}

/// Dimensions joined by `x`.
struct Product<'a>(&'a [u64]);

impl std::fmt::Display for Product<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, dim) in self.0.iter().enumerate() {
            write!(f, "{}{dim}", if i > 0 { "x" } else { "" })?;
        }
        Ok(())
    }
}

fn split(meta: &Meta<'_>) -> Option<Split> {
    let count = meta.number("split.count").filter(|count| *count > 1)?;
    let no = meta.number("split.no").unwrap_or(0);
    Some(Split { no, count, tensors: meta.number("split.tensors.count") })
}

fn facts(meta: &Meta<'_>) -> Result<Facts> {
    let Some(Value::Text(architecture)) = meta.get("general.architecture") else {
        return Ok(Facts::default());
    };
    let number = |key: &str| -> Result<u32> {
        let key = format!("{architecture}.{key}");
        let value = meta.number(&key).unwrap_or(0);
        match u32::try_from(value) {
            Ok(value) => Ok(value),
            Err(_) => fail!(Corrupt, "{key} is {value}, which nothing has"),
        }
    };
    let or = |value: u32, other: u32| if value > 0 { value } else { other };
    let (hidden, heads) = (number("embedding_length")?, number("attention.head_count")?);
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let words = match meta.get("tokenizer.ggml.tokens") {
        Some(Value::Array(count, _)) => u32::try_from(count).unwrap_or(u32::MAX),
        _ => 0,
    };
    let mut facts = Facts {
        architecture: architecture.into(),
        layers: number("block_count")?,
        hidden,
        heads,
        kv_heads: or(number("attention.head_count_kv")?, heads),
        key_dim: or(number("attention.key_length")?, head_dim),
        value_dim: or(number("attention.value_length")?, head_dim),
        context: number("context_length")?,
        vocabulary: or(words, number("vocab_size")?),
        experts: number("expert_count")?,
        experts_used: number("expert_used_count")?,
        ..Facts::default()
    };
    // With compressed keys, the sizes of a head have other names.
    if number("attention.key_length_mla")? > 0 {
        let rank = number("attention.kv_lora_rank")?;
        facts.kv_heads = 1;
        facts.key_dim = rank.saturating_add(number("rope.dimension_count")?);
        facts.value_dim = 0;
    }
    let window = number("attention.sliding_window")?;
    let window_rule = match meta.get(&format!("{architecture}.attention.sliding_window_pattern")) {
        None => WindowRule::Unsaid,
        Some(Value::Number(period)) => WindowRule::AllBut(period),
        Some(Value::Flags(of, windowed)) => WindowRule::Listed { windowed, of },
        Some(_) => WindowRule::Unknown,
    };
    facts.set_window(window, window_rule);
    Ok(facts)
}

// Values of GGUF metadata. Only whole numbers, flags and short text are used; other values, such
// as the vocabulary, are skipped.

/// Deepest accepted nesting of arrays.
pub const MAX_DEPTH: u32 = 4;

/// A metadata value, as far as it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A number that is whole and not negative.
    Number(u64),
    /// Text.
    Text(&'a str),
    /// An array: number of elements, and the largest whole number among them.
    Array(u64, Option<u64>),
    /// An array of flags: number of elements, and number of set ones.
    Flags(u64, u64),
    /// Any other value.
    Other,
}

const FLAG: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Bytes of a value of a kind with a fixed size.
fn value_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// A number that is whole and not negative.
fn value_number(kind: u32, bytes: &[u8]) -> Option<u64> {
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

/// Reads a value of the given kind.
pub fn read_value<'a>(cursor: &mut Cursor<'a>, kind: u32) -> Parsed<Value<'a>> {
    match (kind, value_bytes(kind)) {
        (_, Some(size)) => {
            let bytes = cursor.take(size)?;
            Ok(value_number(kind, bytes).map_or(Value::Other, Value::Number))
        }
        (STRING, _) => {
            let bytes = cursor.bytes()?;
            Ok(std::str::from_utf8(bytes).map_or(Value::Other, Value::Text))
        }
        (ARRAY, _) => value_array(cursor, 1),
        _ => Err(corrupt(cursor.at(), format_args!("a value of the unknown kind {kind}"))),
    }
}

fn value_array<'a>(cursor: &mut Cursor<'a>, depth: u32) -> Parsed<Value<'a>> {
    let at = cursor.at();
    if depth > MAX_DEPTH {
        return Err(corrupt(at, format_args!("arrays nested deeper than {MAX_DEPTH}")));
    }
    let (kind, count) = (cursor.u32()?, cursor.u64()?);
    // The least bytes of an element: a wrong count is detected here, not in a long loop.
    let least = match kind {
        STRING => 8,
        ARRAY => 12,
        kind => match value_bytes(kind) {
            Some(bytes) => bytes,
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
                value_array(cursor, depth + 1)?;
            }
        }
        kind => {
            let bytes = cursor.take(count * least)?;
            let all = bytes.chunks_exact(least as usize);
            largest = all.filter_map(|bytes| value_number(kind, bytes)).max();
        }
    }
    Ok(Value::Array(count, largest))
}

// A cursor in a GGUF header, of which only the start may have been read.

/// Why parsing stopped before the end of the header.
#[derive(Debug)]
pub enum Stop {
    /// The header is longer: at least so many bytes of the file are needed.
    More(u64),
    /// The header is invalid.
    Bad(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Bad(error)
    }
}

/// An error at an offset of the header.
pub fn corrupt(at: u64, what: impl std::fmt::Display) -> Stop {
    Stop::Bad(Error::new(Status::Corrupt, format!("{what}, at byte {at}")))
}

/// A cursor in a header.
pub struct Cursor<'a> {
    head: &'a [u8],
    file_bytes: u64,
    at: u64,
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of a file of `file_bytes` bytes, of which `head` was read.
    pub fn new(head: &'a [u8], file_bytes: u64) -> Cursor<'a> {
        Cursor { head, file_bytes, at: 0 }
    }

    /// Current offset.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes between the cursor and the end of the file.
    pub fn left(&self) -> u64 {
        self.file_bytes.saturating_sub(self.at)
    }

    /// Takes the next bytes.
    pub fn take(&mut self, bytes: u64) -> Parsed<&'a [u8]> {
        let end = self.at.checked_add(bytes).filter(|end| *end <= self.file_bytes);
        let Some(end) = end else {
            let what = format!("the file ends at {}, where its header needs", self.file_bytes);
            return Err(corrupt(self.at, format_args!("{what} {bytes} bytes more")));
        };
        let range = usize::try_from(self.at).ok().zip(usize::try_from(end).ok());
        match range.and_then(|(from, to)| self.head.get(from..to)) {
            Some(found) => {
                self.at = end;
                Ok(found)
            }
            None => Err(Stop::More(end)),
        }
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    /// Takes a 32-bit number.
    pub fn u32(&mut self) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Takes a 64-bit number.
    pub fn u64(&mut self) -> Parsed<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Takes a string, which has its length before it.
    pub fn bytes(&mut self) -> Parsed<&'a [u8]> {
        let bytes = self.u64()?;
        self.take(bytes)
    }

    /// Takes a string as text.
    pub fn text(&mut self) -> Parsed<&'a str> {
        let at = self.at;
        std::str::from_utf8(self.bytes()?).map_err(|_| corrupt(at, "a name that is not UTF-8"))
    }
}
