//! Streams of the simulated device: when batches begin, and which streams are leased.

use crate::base::status::Result;
use crate::device::simulated::{Inner, NEVER, Phase, Step};
use crate::device::{Event, MAX_LEASED_STREAMS, Stream};
use crate::fail;

impl Inner {
    /// Plans a batch; false if the time of the event that it waits for is unknown.
    pub(super) fn begin(&mut self, event: Event, now: u64) -> bool {
        let Ok(Phase::Pending(batch)) = self.known.get(event) else { return true };
        let (stream, length_ns) = (batch.stream, batch.length_ns);
        let copies = batch.copies.len();
        let mut start = now.max(self.free_ns[stream]);
        if let Some(Ok(Phase::Pending(before))) = batch.after.map(|event| self.known.get(event)) {
            if before.finish_ns == NEVER {
                return false;
            }
            start = start.max(before.finish_ns);
        }
        let finish_ns = start.saturating_add(length_ns).min(NEVER - 1);
        if let Ok(Phase::Pending(batch)) = self.known.get_mut(event) {
            batch.finish_ns = finish_ns;
        }
        self.plan(start, event, Step::Start);
        for copy in 0..copies {
            let time = start + self.up_to(finish_ns - start);
            self.plan(time, event, Step::Read(copy));
        }
        self.plan(finish_ns, event, Step::Finish);
        self.free_ns[stream] = finish_ns;
        true
    }

    /// Plans parked batches whose start is known now.
    pub(super) fn unpark(&mut self, now: u64) {
        let mut goes_on = true;
        while std::mem::take(&mut goes_on) {
            for stream in 0..self.parked.len() {
                while let Some(&event) = self.parked[stream].front()
                    && self.begin(event, now)
                {
                    self.parked[stream].pop_front();
                    goes_on = true;
                }
            }
        }
    }

    /// Implements [`crate::device::Device::lease_stream`]; leased streams are numbered from
    /// `first`.
    pub(super) fn lease_stream(&mut self, first: u32) -> Result<Stream> {
        let Some(at) = self.leased.iter().position(|leased| !leased) else {
            fail!(Again, "all {MAX_LEASED_STREAMS} streams are leased: return one first");
        };
        self.leased[at] = true;
        Ok(Stream(first + at as u32))
    }

    /// Whether the stream is leased now.
    pub(super) fn is_leased(&self, at: u32) -> bool {
        self.leased.get(at as usize) == Some(&true)
    }

    pub(super) fn return_stream(&mut self, at: u32) {
        if let Some(leased) = self.leased.get_mut(at as usize) {
            *leased = false;
        }
    }
}
