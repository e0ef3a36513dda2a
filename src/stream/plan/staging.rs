//! The buffer between the disk and the device link, in time: how far reads may be ahead
//! of copies.

use std::collections::VecDeque;

/// A copy that has been laid out: which bytes of all that pass through, and when.
#[derive(Clone, Copy, Debug)]
struct Copied {
    from: f64,
    to: f64,
    start_ns: f64,
    end_ns: f64,
}

/// Rates and sizes of the way from the disk to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// Time of a byte.
    pub disk_ns: f64,
    /// Time of a byte.
    pub device_ns: f64,
    /// One read or copy.
    pub chunk_bytes: f64,
    /// All of the buffer.
    pub staging_bytes: f64,
}

/// The buffer.
#[derive(Clone, Debug, Default)]
pub(super) struct Staging {
    copies: VecDeque<Copied>,
    /// Bytes that were read so far.
    read: f64,
    /// When the last of what is no longer listed was copied.
    gone_ns: f64,
    /// When the disk has ended what it was told.
    pub disk_free_ns: f64,
}

impl Staging {
    /// Reads so many bytes and copies them, a copy not before `link_ns`; when the copy
    /// ends. A copy follows its read a chunk behind; a read may be as far ahead of the
    /// copies as the buffer is large.
    pub fn pass(&mut self, bytes: f64, link_ns: f64, way: &Way) -> f64 {
        let chunk = way.chunk_bytes.min(bytes);
        let chunk_read_ns = chunk * way.disk_ns;
        let chunk_copy_ns = chunk * way.device_ns;
        let behind = self.read - way.staging_bytes;
        let begin_ns = self.disk_free_ns.max(self.copied_ns(behind + chunk));
        let start_ns = link_ns.max(begin_ns + chunk_read_ns);
        let mut read_ns = begin_ns + bytes * way.disk_ns;
        let over = bytes - way.staging_bytes;
        if over <= 0.0 {
            read_ns = read_ns.max(self.copied_ns(behind + bytes) + chunk_read_ns);
        } else {
            // It is larger than the buffer: its own copy makes room for its end.
            let room_ns = start_ns + chunk_copy_ns;
            read_ns = read_ns.max(room_ns + over * way.disk_ns);
            read_ns = read_ns.max(start_ns + over * way.device_ns + chunk_read_ns);
        }
        let end_ns = (start_ns + bytes * way.device_ns).max(read_ns + chunk_copy_ns);
        let copied = Copied { from: self.read, to: self.read + bytes, start_ns, end_ns };
        self.copies.push_back(copied);
        self.read += bytes;
        self.disk_free_ns = read_ns;
        end_ns
    }

    /// When the first `upto` bytes had been copied. It is asked for more each time.
    fn copied_ns(&mut self, upto: f64) -> f64 {
        while let Some(first) = self.copies.front() {
            if first.to > upto {
                let part = ((upto - first.from) / (first.to - first.from)).max(0.0);
                let within = first.start_ns + part * (first.end_ns - first.start_ns);
                return if upto > first.from { within } else { self.gone_ns };
            }
            self.gone_ns = first.end_ns;
            self.copies.pop_front();
        }
        self.gone_ns
    }
}
