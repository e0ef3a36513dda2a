//! Detects the format of a file from its first bytes. A wrong guess would produce a meaningless
//! trace, so an unknown file is rejected with the names of the formats.

use crate::base::json::Json;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::trace::format;
use crate::trace::reader::{KINDS, Kind, oracle};

/// The byte order mark that some programs put before UTF-8.
pub const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Bytes examined to tell text from binary data.
const TEXT_BYTES: usize = 256;

/// Containers that are not read: first bytes, name, program that unpacks them.
const PACKED: [(&[u8], &str, &str); 6] = [
    (b"\x1F\x8B", "gzip", "gzip -dc"),
    (b"\xFD7zXZ\0", "xz", "xz -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
    (b"PK", "zip", "unzip -p"),
    (b"\x04\x22\x4D\x18", "lz4", "lz4 -dc"),
    (b"7z\xBC\xAF\x27\x1C", "7z", "7z x -so"),
];

/// Names in JSON that distinguish the formats.
const WORDS: [&str; 7] = [
    "timestamp",
    "hash_ids",
    "hash_id_scope",
    "requests",
    "conversations",
    "conversation",
    "messages",
];

/// Detects the format from the first bytes.
pub fn detect(start: &[u8]) -> Result<Kind> {
    if start.is_empty() {
        fail!(Invalid, "the file is empty");
    }
    if start.starts_with(&format::MAGIC) {
        return Ok(Kind::Kvtier);
    }
    let start = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start);
    if !is_text(start) {
        refuse_packed(start)?;
        return match oracle::is_plausible(start) {
            true => Ok(Kind::Oracle),
            false => Err(unknown("no text, and of no kind of trace that is known")),
        };
    }
    match start.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'{' | b'[') => json(start),
        _ if contains(start, b"ContextTokens") => Ok(Kind::Azure),
        _ if contains(start, b",") => Ok(Kind::Csv),
        _ => Err(unknown("text, but of no kind of trace that is known")),
    }
}

/// Fails for files that must be unpacked or converted before they can be read.
pub fn refuse_packed(start: &[u8]) -> Result<()> {
    if is_text(start) {
        return Ok(());
    }
    if let Some((_, name, tool)) = PACKED.iter().find(|(magic, ..)| start.starts_with(magic)) {
        fail!(
            Unsupported,
            "packed with {name}; plain files and zstd are read: unpack it first, such as by \
             `{tool} FILE > TRACE`"
        );
    }
    if start.starts_with(b"PAR1") {
        fail!(Unsupported, "a Parquet file: write it as one of {}", names());
    }
    if start.starts_with(b"\xFF\xFE") || start.starts_with(b"\xFE\xFF") {
        fail!(
            Unsupported,
            "text in UTF-16: write it as UTF-8, such as by `iconv -f UTF-16 -t UTF-8`"
        );
    }
    Ok(())
}

fn names() -> String {
    KINDS.map(|(name, _)| name).join(", ")
}

fn unknown(what: &str) -> Error {
    let text =
        format!("{what} ({}); if it is one of these, name it (--format, or `kind`)", names());
    Error::new(Status::Invalid, text)
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|part| part == word)
}

fn is_text(start: &[u8]) -> bool {
    let head = &start[..start.len().min(TEXT_BYTES)];
    // The last character may be cut.
    let letters = std::str::from_utf8(head).map_or_else(|e| e.error_len().is_none(), |_| true);
    letters && head.iter().all(|b| !b.is_ascii_control() || b.is_ascii_whitespace())
}

/// Detects JSON formats by the names at the top level of the first object: the text of a
/// conversation may contain any of them.
fn json(start: &[u8]) -> Result<Kind> {
    let names = top_names(start);
    let has = |words: &[&str]| words.iter().any(|word| names.contains(word));
    let talk = has(&["conversations", "conversation", "messages"]);
    let list = start.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[');
    match () {
        () if list && talk => Ok(Kind::ShareGpt),
        () if list => Err(unknown("JSON, but of no kind of trace that is known")),
        () if has(&["hash_ids"]) => Ok(Kind::Mooncake),
        () if talk => Ok(Kind::ShareGpt),
        () if has(&["hash_id_scope", "requests"]) => Ok(Kind::Weka),
        () if has(&["timestamp"]) => Ok(Kind::Mooncake),
        () => Err(unknown("JSON, but of no kind of trace that is known")),
    }
}

/// The [`WORDS`] among the names of the first object, as far as it is complete.
fn top_names(start: &[u8]) -> Vec<&'static str> {
    let mut names = Vec::new();
    let mut object = |json: &mut Json| {
        json.object(|json, key| {
            let word = WORDS.into_iter().find(|word| *word == key);
            names.extend(word.filter(|word| !names.contains(word)));
            json.skip()
        })
    };
    let mut json = Json::new(start);
    // The first bytes end anywhere: names seen until then count.
    let _ = match start.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'[') => json.array(|json| {
            object(json)?;
            fail!(Invalid, "the first is enough")
        }),
        _ => object(&mut json),
    };
    names
}
