//! Sequential reads of a file, plain or compressed with zstd (windows up to 128 MiB), in lines or
//! pieces, with limits.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Cursor, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use ruzstd::decoding::FrameDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};

use crate::base::status::{Error, Result, Status};
use crate::fail;

/// Limit: bytes of a line.
pub const MAX_LINE_BYTES: usize = 256 << 20;
/// Limit: bytes of a source, both compressed and decompressed.
pub const MAX_SOURCE_BYTES: u64 = 64 << 30;
/// Limit: window of a compressed file, which decompression holds in memory.
pub const MAX_WINDOW_BYTES: u64 = 128 << 20;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
/// Start of a skippable frame; the low digit of the first byte varies.
const SKIPPED_MAGIC: [u8; 4] = [0x50, 0x2A, 0x4D, 0x18];
const BUFFER_BYTES: usize = 256 << 10;
/// Bytes to decompress at a time; blocks of a frame have up to 128 KiB.
const PIECE_BYTES: usize = 256 << 10;

/// A sequence of bytes.
pub struct Source {
    reader: BufReader<Box<dyn Read>>,
    left: u64,
}

impl Source {
    /// Opens a file, and decompresses it if its content says so. Directories, devices and pipes are
    /// rejected: some never end, some never begin.
    pub fn open(path: &Path) -> Result<Source> {
        let place = |e: Error| e.within(&path.display().to_string());
        // Non-blocking: a pipe may have no writer.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| place(io_error(&e)))?;
        let kind = file.metadata().map_err(|e| place(io_error(&e)))?.file_type();
        if !kind.is_file() {
            let what = if kind.is_dir() { "a directory" } else { "a device, pipe or socket" };
            return Err(place(Error::new(
                Status::Invalid,
                format!("{what}, a regular file is needed"),
            )));
        }
        Source::new(Box::new(file)).map_err(place)
    }

    /// Reads standard input.
    pub fn stdin() -> Result<Source> {
        Source::new(Box::new(std::io::stdin()))
    }

    /// Reads from memory.
    pub fn bytes(bytes: Vec<u8>) -> Result<Source> {
        Source::new(Box::new(Cursor::new(bytes)))
    }

    fn new(raw: Box<dyn Read>) -> Result<Source> {
        let raw: Box<dyn Read> = Box::new(Bounded { raw, left: MAX_SOURCE_BYTES });
        let mut packed = BufReader::with_capacity(BUFFER_BYTES, raw);
        let inner: Box<dyn Read> = match is_packed(start(&mut packed, ZSTD_MAGIC.len())?) {
            true => Box::new(Unpacked::new(packed)),
            false => Box::new(packed),
        };
        let reader = BufReader::with_capacity(BUFFER_BYTES, inner);
        Ok(Source { reader, left: MAX_SOURCE_BYTES })
    }

    /// The next bytes, at most the buffered ones; none at the end.
    pub fn peek(&mut self) -> Result<&[u8]> {
        buffered(&mut self.reader)
    }

    /// The first bytes, as many as the buffer holds, even if reads return few at a time.
    pub fn start(&mut self) -> Result<&[u8]> {
        start(&mut self.reader, BUFFER_BYTES)
    }

    fn used(&mut self, bytes: usize) -> Result<()> {
        match self.left.checked_sub(bytes as u64) {
            Some(left) => self.left = left,
            None => fail!(Limit, "the source exceeds the limit of {MAX_SOURCE_BYTES} bytes"),
        }
        Ok(())
    }

    /// Reads a line into `line`, without its end. False at the end of the source.
    pub fn line(&mut self, line: &mut Vec<u8>) -> Result<bool> {
        line.clear();
        let mut any = false;
        loop {
            let buffer = self.peek()?;
            if buffer.is_empty() {
                return Ok(any);
            }
            any = true;
            let end = buffer.iter().position(|&b| b == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            if line.len() + part.len() > MAX_LINE_BYTES {
                fail!(Limit, "a line exceeds the limit of {MAX_LINE_BYTES} bytes");
            }
            if line.try_reserve(part.len()).is_err() {
                fail!(NoMem, "no memory for a line of {} bytes", line.len() + part.len());
            }
            line.extend_from_slice(part);
            let used = part.len() + usize::from(end.is_some());
            self.reader.consume(used);
            self.used(used)?;
            if end.is_some() {
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
                return Ok(true);
            }
        }
    }

    /// Fills `out` as far as there are bytes; returns their number.
    pub fn fill(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            match self.reader.read(&mut out[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(io_error(&e)),
            }
        }
        self.used(filled)?;
        Ok(filled)
    }

    /// Everything that is left; an error if it is more than `limit` bytes.
    pub fn rest(&mut self, limit: usize) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        loop {
            let buffer = self.peek()?;
            let len = buffer.len();
            if len == 0 {
                return Ok(out);
            }
            if out.len() + len > limit {
                fail!(Limit, "more than {limit} bytes");
            }
            if out.try_reserve(len).is_err() {
                fail!(NoMem, "no memory for {} bytes", out.len() + len);
            }
            out.extend_from_slice(buffer);
            self.reader.consume(len);
            self.used(len)?;
        }
    }
}

/// The buffered bytes, after a read if there are none. A signal does not end the source.
fn buffered(reader: &mut BufReader<Box<dyn Read>>) -> Result<&[u8]> {
    loop {
        match reader.fill_buf() {
            Ok(_) => return Ok(reader.buffer()),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(io_error(&e)),
        }
    }
}

/// The next bytes, at least `least` of them unless the source ends before.
fn start(reader: &mut BufReader<Box<dyn Read>>, least: usize) -> Result<&[u8]> {
    if buffered(reader)?.len() >= least {
        return Ok(reader.buffer());
    }
    let mut start = Vec::new();
    if start.try_reserve_exact(least).is_err() {
        fail!(NoMem, "no memory for {least} bytes");
    }
    while start.len() < least {
        let buffer = buffered(reader)?;
        let part = buffer.len().min(least - start.len());
        if part == 0 {
            break;
        }
        start.extend_from_slice(&buffer[..part]);
        reader.consume(part);
    }
    // The bytes that were peeked at are read again.
    let nothing: Box<dyn Read> = Box::new(std::io::empty());
    let rest = std::mem::replace(reader, BufReader::with_capacity(0, nothing));
    let again: Box<dyn Read> = Box::new(Cursor::new(start).chain(rest));
    *reader = BufReader::with_capacity(BUFFER_BYTES, again);
    buffered(reader)
}

fn is_packed(start: &[u8]) -> bool {
    let skipped = |s: &[u8]| s[0] & 0xF0 == SKIPPED_MAGIC[0] && s[1..] == SKIPPED_MAGIC[1..];
    start.starts_with(&ZSTD_MAGIC) || start.get(..4).is_some_and(skipped)
}

/// Limits the bytes read: compressed bytes that decompress to nothing count, too.
struct Bounded {
    raw: Box<dyn Read>,
    left: u64,
}

impl Read for Bounded {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.raw.read(out)?;
        match self.left.checked_sub(bytes as u64) {
            Some(left) => self.left = left,
            None => {
                let text = format!("the source exceeds the limit of {MAX_SOURCE_BYTES} bytes");
                return Err(std::io::Error::new(ErrorKind::FileTooLarge, text));
            }
        }
        Ok(bytes)
    }
}

fn io_error(error: &std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::FileTooLarge => Error::new(Status::Limit, error.to_string()),
        ErrorKind::InvalidData => Error::new(Status::Corrupt, error.to_string()),
        ErrorKind::NotFound => Error::new(Status::NotFound, error.to_string()),
        _ => Error::new(Status::Io, error.to_string()),
    }
}

/// The content of consecutive zstd frames.
struct Unpacked<R> {
    packed: R,
    decoder: FrameDecoder,
    open: bool,
}

fn damaged(what: impl std::fmt::Display) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, format!("damaged zstd data: {what}"))
}

impl<R: BufRead> Unpacked<R> {
    fn new(packed: R) -> Unpacked<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW_BYTES);
        Unpacked { packed, decoder, open: false }
    }

    /// Begins the next frame; false at the end. Skippable frames are skipped.
    fn next_frame(&mut self) -> std::io::Result<bool> {
        use FrameDecoderError::ReadFrameHeaderError as Header;
        loop {
            if self.packed.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.init(&mut self.packed) {
                Ok(()) => return Ok(true),
                Err(Header(ReadFrameHeaderError::SkipFrame { length, .. })) => self.skip(length)?,
                Err(error) => return Err(damaged(error)),
            }
        }
    }

    fn skip(&mut self, length: u32) -> std::io::Result<()> {
        let mut left = length as usize;
        while left > 0 {
            let part = self.packed.fill_buf()?.len().min(left);
            if part == 0 {
                return Err(damaged("cut off in a skippable frame"));
            }
            self.packed.consume(part);
            left -= part;
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Unpacked<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        use ruzstd::decoding::BlockDecodingStrategy::UptoBytes;
        loop {
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(out);
            }
            if self.open && self.decoder.is_finished() {
                if let Some(stored) = self.decoder.get_checksum_from_data()
                    && self.decoder.get_calculated_checksum() != Some(stored)
                {
                    return Err(damaged("the checksum differs"));
                }
                self.open = false;
            }
            if !self.open {
                self.open = self.next_frame()?;
                if !self.open {
                    return Ok(0);
                }
            }
            self.decoder
                .decode_blocks(&mut self.packed, UptoBytes(PIECE_BYTES))
                .map_err(damaged)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    /// Every other read is interrupted by a signal.
    struct Signalled(Cursor<Vec<u8>>, bool);

    impl Read for Signalled {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            self.1 = !self.1;
            if self.1 { Err(ErrorKind::Interrupted.into()) } else { self.0.read(out) }
        }
    }

    #[test]
    fn a_signal_does_not_end_a_source() {
        let bytes = b"one\ntwo\n".repeat(100_000);
        let open = || Source::new(Box::new(Signalled(Cursor::new(bytes.clone()), false)));
        assert_eq!(open().expect("readable").rest(1 << 20).expect("all"), bytes);
        let (mut source, mut line, mut lines) = (open().expect("readable"), Vec::new(), 0);
        while source.line(&mut line).expect("sound") {
            lines += 1;
        }
        assert_eq!(lines, 200_000);
    }

    #[test]
    fn lines_are_read_from_plain_and_compressed_bytes() {
        let text = b"one\r\ntwo\n\nlast".repeat(3000);
        let mut packed = compress_to_vec(&text[..], CompressionLevel::Fastest);
        packed.extend(compress_to_vec(&b"\nanother frame"[..], CompressionLevel::Fastest));
        let mut plain = text.clone();
        plain.extend_from_slice(b"\nanother frame");
        let lines = |bytes: Vec<u8>| {
            let mut source = Source::bytes(bytes).expect("readable");
            let (mut out, mut line) = (Vec::new(), Vec::new());
            while source.line(&mut line).expect("sound") {
                out.push(line.clone());
            }
            out
        };
        let expected = lines(plain);
        assert_eq!(expected[..3], [b"one".to_vec(), b"two".to_vec(), Vec::new()]);
        assert_eq!(lines(packed.clone()), expected);
        for cut in [5, packed.len() / 2, packed.len() - 1] {
            let mut source = Source::bytes(packed[..cut].to_vec()).expect("the magic is valid");
            assert_eq!(source.rest(1 << 20).expect_err("cut").status(), Status::Corrupt);
        }
        assert!(Source::bytes(text).expect("readable").rest(100).is_err());
    }

    /// One byte at a time.
    struct Slow(Cursor<Vec<u8>>);

    impl Read for Slow {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let most = out.len().min(1);
            self.0.read(&mut out[..most])
        }
    }

    /// A skippable frame.
    fn skippable(digit: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = SKIPPED_MAGIC.to_vec();
        out[0] |= digit;
        out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        out.extend_from_slice(bytes);
        out
    }

    #[test]
    fn skippable_frames_are_skipped() {
        let frame = |text: &[u8]| compress_to_vec(text, CompressionLevel::Fastest);
        let large = vec![0xA5; 2 * BUFFER_BYTES + 3];
        for digit in 0..16 {
            let file = [
                skippable(digit, b""),
                skippable(15 - digit, &large),
                frame(b"one "),
                skippable(digit, b"between"),
                frame(b"two"),
                skippable(digit, b"behind"),
            ]
            .concat();
            let mut source = Source::bytes(file.clone()).expect("readable");
            assert_eq!(source.rest(100).expect("sound"), b"one two");
            let slow = Source::new(Box::new(Slow(Cursor::new(file.clone()))));
            assert_eq!(slow.expect("readable").rest(100).expect("sound"), b"one two");
            for cut in [1, 4, 10] {
                let cut = file[..file.len() - cut].to_vec();
                let error = Source::bytes(cut).expect("readable").rest(100).expect_err("cut");
                assert_eq!(error.status(), Status::Corrupt);
            }
        }
        assert_eq!(Source::bytes(skippable(3, b"x")).expect("readable").rest(9), Ok(Vec::new()));
    }

    #[test]
    fn the_start_is_complete_even_with_short_reads() {
        let text: Vec<u8> = (0..2 * BUFFER_BYTES as u32).map(|n| (n % 251) as u8).collect();
        for len in [0, 1, 3, 100, BUFFER_BYTES, text.len()] {
            let bytes = text[..len].to_vec();
            for packed in [false, true] {
                let file = match packed {
                    true => compress_to_vec(&bytes[..], CompressionLevel::Fastest),
                    false => bytes.clone(),
                };
                let mut slow = Source::new(Box::new(Slow(Cursor::new(file)))).expect("readable");
                for _ in 0..2 {
                    let start = slow.start().expect("sound");
                    assert!(*start == bytes[..len.min(BUFFER_BYTES)], "{len} {packed}");
                }
                assert!(slow.rest(1 << 20).expect("sound") == bytes, "{len} {packed}");
            }
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        for (path, word) in [("/dev/zero", "device"), ("/", "directory"), ("/nowhere", "No such")] {
            let error = Source::open(Path::new(path)).err().expect("no file");
            assert!(error.message().starts_with(&format!("{path}: ")), "{error}");
            assert!(error.message().contains(word), "{error}");
        }
        // A pipe without a writer.
        let pipe = std::env::temp_dir().join(format!("kvtier-pipe-{}", std::process::id()));
        let name = std::ffi::CString::new(pipe.to_string_lossy().as_bytes()).expect("a name");
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let error = Source::open(&pipe).err().expect("a pipe");
        std::fs::remove_file(&pipe).expect("ours");
        assert_eq!(error.status(), Status::Invalid);
        // An endless source is cut by the limit.
        let mut endless = Bounded { raw: Box::new(std::io::repeat(0)), left: 10 };
        let error = endless.read_to_end(&mut Vec::new()).expect_err("endless");
        assert_eq!(io_error(&error).status(), Status::Limit);
    }

    #[test]
    fn damaged_compressed_data_is_an_error_and_never_panics() {
        let text: Vec<u8> = (0..9_000u32).flat_map(|n| (n * n % 977).to_le_bytes()).collect();
        let packed = compress_to_vec(&text[..], CompressionLevel::Fastest);
        let step = (packed.len() * 8 / 1500).max(1);
        for bit in (32..packed.len() * 8).step_by(step) {
            let mut damaged = packed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let mut source = Source::bytes(damaged).expect("the magic is valid");
            if let Ok(bytes) = source.rest(16 << 20) {
                assert!(bytes == text, "bit {bit} changed the output");
            }
        }
    }

    #[test]
    fn fill_returns_the_available_bytes() {
        let mut source = Source::bytes((0..100).collect()).expect("readable");
        assert_eq!(source.peek().expect("bytes").len(), 100);
        let mut out = [0; 64];
        assert_eq!((source.fill(&mut out), out[63]), (Ok(64), 63));
        assert_eq!(source.fill(&mut out), Ok(36));
        assert_eq!(source.fill(&mut out), Ok(0));
        assert!(Source::open(Path::new("/nonexistent/file")).is_err());
    }
}
