//! How long moves and batches take, in histograms. A move is counted once, however many
//! cells it has.

use crate::policy::metrics::Histogram;
use crate::store::state::StoreState;
use crate::store::state::transfer::{Level, Move, TransferKind};
use crate::store::state::work::KINDS;

/// What is timed: what each is called in views, and what it is. The first two are gets, the
/// next three puts by [`Level`](crate::store::state::Level), the rest batches by
/// [`WorkerKind`](crate::store::state::work::Hands).
pub const TIMED: [(&str, &str); GETS + PUTS + KINDS] = [
    ("get_host", "Gets of which all was in memory."),
    ("get_disk", "Gets of which something had to be read from disk."),
    ("put_ram", "Puts until they are in memory."),
    ("put_disk", "Puts until they are on disk."),
    ("put_durable", "Puts until they are durable."),
    ("copy_batch", "Batches of copies between tensors and memory."),
    ("read_batch", "Batches of reads of the disk."),
    ("write_batch", "Batches of writes to it."),
    ("sync_batch", "Syncs."),
    ("upkeep_batch", "Cleanings, sweeps, checkpoints and notes."),
    ("fetch_batch", "Batches of objects that come from the remote."),
    ("send_batch", "Batches of objects that go there."),
    ("ask_batch", "Questions what it has."),
];

/// Gets: from memory, and from disk.
pub const GETS: usize = 2;
/// Puts: in memory, on disk, durable.
pub const PUTS: usize = 3;

/// Times of one kind, in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// How many were timed.
    pub count: u64,
    /// The mean.
    pub mean_ns: u64,
    /// What half of them did not exceed, a fourth more at most.
    pub p50_ns: u64,
    /// The same of 99 in 100.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl Latency {
    /// A histogram in short.
    pub fn of(times: &Histogram) -> Latency {
        Latency {
            count: times.total(),
            mean_ns: times.mean_ns(),
            p50_ns: times.quantile_ns(0.5),
            p99_ns: times.quantile_ns(0.99),
            max_ns: times.max_ns(),
        }
    }
}

/// All times.
pub(super) struct Times([Histogram; TIMED.len()]);

impl Default for Times {
    fn default() -> Times {
        Times(std::array::from_fn(|_| Histogram::default()))
    }
}

impl Times {
    /// A batch of this kind took so long; 0 = nobody knows.
    pub(super) fn batch(&mut self, workers: usize, elapsed_ns: u64) {
        if elapsed_ns > 0 {
            self.0[GETS + PUTS + workers].add(elapsed_ns);
        }
    }

    /// A move has ended. One that did not bring all says nothing: it may have ended early.
    pub(super) fn moved(&mut self, one: &Move, now_ns: u64) {
        // One that was behind an event took as long as that.
        if !one.is_sound() || one.spec.slots.is_empty() || one.spec.after.is_some() {
            return;
        }
        let at = match one.spec.kind {
            TransferKind::Get => usize::from(one.was_below),
            // The remote's own times are counted with it.
            TransferKind::Put if one.spec.level == Level::Remote => return,
            TransferKind::Put => GETS + one.spec.level as usize,
            TransferKind::Prefetch => return,
        };
        self.0[at].add(now_ns.saturating_sub(one.began_ns));
    }
}

impl StoreState {
    /// What was timed, in the order of [`TIMED`].
    pub fn times(&self) -> &[Histogram; TIMED.len()] {
        &self.times.0
    }
}
