//! Reading a file from its start to its end, plain or packed with zstd (windows
//! up to 128 MiB), in lines or in pieces, with limits.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, ErrorKind, Read};
use std::path::Path;

use ruzstd::decoding::FrameDecoder;

use crate::base::status::{Error, Result, Status};
use crate::fail;

/// Longest accepted line.
pub const MAX_LINE_BYTES: usize = 256 << 20;
/// Most bytes that come out of one source, unpacked.
pub const MAX_SOURCE_BYTES: u64 = 64 << 30;
/// Largest window of a packed file: what unpacking holds in memory.
pub const MAX_WINDOW_BYTES: u64 = 128 << 20;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
const BUFFER_BYTES: usize = 256 << 10;
/// The most that is unpacked at a time; blocks of a frame have up to 128 KiB.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes in order.
pub struct Source {
    reader: BufReader<Box<dyn Read>>,
    left: u64,
}

impl Source {
    /// Opens a file; what it holds decides whether it is unpacked.
    pub fn open(path: &Path) -> Result<Source> {
        let file =
            File::open(path).map_err(|e| io_error(&e).within(&path.display().to_string()))?;
        Source::new(Box::new(file))
    }

    /// Reads from memory.
    pub fn bytes(bytes: Vec<u8>) -> Result<Source> {
        Source::new(Box::new(Cursor::new(bytes)))
    }

    fn new(raw: Box<dyn Read>) -> Result<Source> {
        let mut packed = BufReader::with_capacity(BUFFER_BYTES, raw);
        let start = buffered(&mut packed)?;
        let inner: Box<dyn Read> = match start.starts_with(&ZSTD_MAGIC) {
            true => Box::new(Unpacked::new(packed)),
            false => Box::new(packed),
        };
        let reader = BufReader::with_capacity(BUFFER_BYTES, inner);
        Ok(Source { reader, left: MAX_SOURCE_BYTES })
    }

    /// The bytes that come next, at most what is buffered; none at the end.
    pub fn peek(&mut self) -> Result<&[u8]> {
        buffered(&mut self.reader)
    }

    fn used(&mut self, bytes: usize) -> Result<()> {
        match self.left.checked_sub(bytes as u64) {
            Some(left) => self.left = left,
            None => fail!(Limit, "more than {MAX_SOURCE_BYTES} bytes"),
        }
        Ok(())
    }

    /// Reads a line into `line`, without its end. False when there is none.
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
                fail!(Limit, "a line of more than {MAX_LINE_BYTES} bytes");
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

    /// Fills `out` as far as there are bytes; how many there were.
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

    /// Everything that is left, if that is not more than `limit` bytes.
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

/// What is buffered, after reading if that is nothing. A signal is no end.
fn buffered(reader: &mut BufReader<Box<dyn Read>>) -> Result<&[u8]> {
    loop {
        match reader.fill_buf() {
            Ok(_) => return Ok(reader.buffer()),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(io_error(&e)),
        }
    }
}

fn io_error(error: &std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData => Error::new(Status::Corrupt, error.to_string()),
        ErrorKind::NotFound => Error::new(Status::NotFound, error.to_string()),
        _ => Error::new(Status::Io, error.to_string()),
    }
}

/// The content of zstd frames, one after another.
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
}

impl<R: BufRead> Read for Unpacked<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        use ruzstd::decoding::BlockDecodingStrategy::UptoBytes;
        loop {
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(out);
            }
            if self.open && self.decoder.is_finished() {
                if let Some(told) = self.decoder.get_checksum_from_data() {
                    if self.decoder.get_calculated_checksum() != Some(told) {
                        return Err(damaged("the checksum differs"));
                    }
                }
                self.open = false;
            }
            if !self.open {
                if self.packed.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.decoder.init(&mut self.packed).map_err(damaged)?;
                self.open = true;
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
    fn a_signal_ends_nothing() {
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
    fn lines_come_out_of_plain_and_packed_bytes() {
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
            let mut source = Source::bytes(packed[..cut].to_vec()).expect("the magic is there");
            assert_eq!(source.rest(1 << 20).expect_err("cut").status(), Status::Corrupt);
        }
        assert!(Source::bytes(text).expect("readable").rest(100).is_err());
    }

    #[test]
    fn damaged_packs_are_refused_and_nothing_panics() {
        let text: Vec<u8> = (0..9_000u32).flat_map(|n| (n * n % 977).to_le_bytes()).collect();
        let packed = compress_to_vec(&text[..], CompressionLevel::Fastest);
        let step = (packed.len() * 8 / 1500).max(1);
        for bit in (32..packed.len() * 8).step_by(step) {
            let mut damaged = packed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let mut source = Source::bytes(damaged).expect("the magic is there");
            if let Ok(bytes) = source.rest(16 << 20) {
                assert!(bytes == text, "bit {bit} changed what came out");
            }
        }
    }

    #[test]
    fn pieces_are_filled() {
        let mut source = Source::bytes((0..100).collect()).expect("readable");
        assert_eq!(source.peek().expect("bytes").len(), 100);
        let mut out = [0; 64];
        assert_eq!((source.fill(&mut out), out[63]), (Ok(64), 63));
        assert_eq!(source.fill(&mut out), Ok(36));
        assert_eq!(source.fill(&mut out), Ok(0));
        assert!(Source::open(Path::new("/nonexistent/file")).is_err());
    }
}
