//! The header of a GGUF file: metadata, then the names and places of tensors.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::cursor::{Cursor, Stop, corrupt};
use crate::stream::model::dtype::{self, Ggml};
use crate::stream::model::gguf_value::{self, Value};
use crate::stream::model::window::Which;
use crate::stream::model::{Facts, MAX_NAME_BYTES, MAX_TENSORS, Tensor};

/// How a GGUF file starts.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Longest header. Those of large vocabularies have about ten MiB.
pub const MAX_HEAD_BYTES: u64 = 256 << 20;
/// Most dimensions of a tensor in this format.
const MAX_GGUF_DIMS: u32 = 4;
/// What is read first: most headers need more, few need much more.
const FIRST_BYTES: u64 = 1 << 20;

/// Which file of a split model a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Its number, from 0.
    pub no: u64,
    /// How many files there are.
    pub count: u64,
    /// Tensors of all files, if it says.
    pub tensors: Option<u64>,
}

/// What is in one GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gguf {
    /// Its tensors, in the order in which it names them; they are of file 0.
    pub tensors: Vec<Tensor>,
    /// What it says of the model.
    pub facts: Facts,
    /// Which file of a split model it is.
    pub split: Option<Split>,
    /// Where the names of tensors end.
    pub head_bytes: u64,
}

/// Metadata with values that are of use.
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

/// Reads the header of an open file; and its bytes.
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
                fail!(Limit, "its header is longer than {MAX_HEAD_BYTES} bytes")
            }
            // Doubling keeps what is read again below what is read once.
            Err(Stop::More(needed)) => bytes = needed.max(bytes.saturating_mul(2)).min(most),
        }
    }
}

/// Reads a header of which `head` is the start, in a file of a length.
pub fn parse(head: &[u8], file_bytes: u64) -> std::result::Result<Gguf, Stop> {
    let mut cursor = Cursor::new(head, file_bytes);
    let version = version(&mut cursor)?;
    let (tensors, pairs) = (cursor.u64()?, cursor.u64()?);
    // A tensor takes 24 bytes at least, a pair 13: counts that lie are told at once.
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

fn version(cursor: &mut Cursor<'_>) -> std::result::Result<u32, Stop> {
    if cursor.take(4)? != MAGIC {
        return Err(corrupt(0, "not a GGUF file"));
    }
    let version = cursor.u32()?;
    let why = match version {
        2 | 3 => return Ok(version),
        // The low half of a small number is its high half when bytes are turned round.
        n if n & 0xFFFF == 0 && n != 0 => "is big-endian: convert it with gguf_convert_endian.py",
        1 => "is of version 1, which nothing reads any more: convert the model again",
        0 => return Err(corrupt(4, "version 0")),
        _ => "is of a version that is not known: 2 and 3 are",
    };
    let text = format!("the GGUF file {why} (version word {version:#x})");
    Err(Stop::Bad(Error::new(Status::Unsupported, text)))
}

fn metadata<'a>(cursor: &mut Cursor<'a>, pairs: u64) -> std::result::Result<Meta<'a>, Stop> {
    let mut all = Vec::new();
    all.try_reserve(pairs as usize).map_err(|_| Error::from(Status::NoMem))?;
    for _ in 0..pairs {
        let at = cursor.at();
        let key = cursor.text()?;
        let kind = cursor.u32()?;
        if key.is_empty() {
            return Err(corrupt(at, "metadata without a name"));
        }
        all.push((key, gguf_value::read(cursor, kind)?));
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

fn tensor(cursor: &mut Cursor<'_>, alignment: u64) -> std::result::Result<Tensor, Stop> {
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

/// Dimensions as people write them.
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
    // Where keys are compressed, a head's own sizes stand under other names.
    if number("attention.key_length_mla")? > 0 {
        let rank = number("attention.kv_lora_rank")?;
        facts.kv_heads = 1;
        facts.key_dim = rank.saturating_add(number("rope.dimension_count")?);
        facts.value_dim = 0;
    }
    let window = number("attention.sliding_window")?;
    let which = match meta.get(&format!("{architecture}.attention.sliding_window_pattern")) {
        None => Which::Unsaid,
        Some(Value::Number(period)) => Which::AllBut(period),
        Some(Value::Flags(of, windowed)) => Which::Listed { windowed, of },
        Some(_) => Which::Else,
    };
    facts.set_window(window, which);
    Ok(facts)
}
