//! Room in memory: who leaves, and where to.

use crate::base::budget::{ALL_TIERS, Tier};
use crate::meta::chunks::{Cell, Gone};
use crate::store::admission::Candidate;
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::{Granularity, Leave, Part};
use crate::store::state::work::WorkerKind;
use crate::store::state::{At, StoreState, Write};

/// Most chunks that leave at once: then it is looked again how much is free.
pub(super) const MOST_VICTIMS: usize = 64;
/// So many chunks in a row that could neither stay on disk nor be dropped: whoever
/// waits for memory is told that there is none.
const MOST_REFUSALS: u32 = 16;
/// After that, no room is made ahead of need for so long.
const PAUSE_NS: u64 = 1_000_000_000;
const HOST: usize = Tier::Host as usize;
const DISK: usize = Tier::Disk as usize;
const DEVICE: u8 = 1 << Tier::Device as u8;

impl StoreState {
    /// Bytes that should come free now.
    fn wanted_bytes(&self) -> u64 {
        let share = |part: f64| (self.config.host_bytes as f64 * part) as u64;
        let used = self.host.live_bytes();
        let ahead = match used > share(self.config.high) && !self.is_vain() {
            true => used - share(self.config.low),
            false => 0,
        };
        ahead.max(self.memory_waiter_bytes).saturating_sub(self.leaving_bytes)
    }

    /// What could not be written down a moment ago cannot now.
    pub(super) fn is_vain(&self) -> bool {
        self.refusals >= MOST_REFUSALS && self.now_ns < self.refused_ns + PAUSE_NS
    }

    /// Has chunks leave memory if that is needed; whether something came of it.
    pub(super) fn make_room(&mut self) -> bool {
        let wanted = self.wanted_bytes();
        if wanted == 0 {
            return false;
        }
        // What has to stay and cannot be written down would be chosen again for ever.
        if self.refusals >= MOST_REFUSALS && !self.memory_waiters.is_empty() {
            self.refusals = 0;
            return self.serve_from_reserve().unwrap_or_else(|| self.fail_memory_waiter());
        }
        let mut victims = Vec::new();
        self.host_cache.choose(self.now_ns, wanted, MOST_VICTIMS, &mut victims);
        if victims.is_empty() {
            return self.is_stuck() && self.help_one();
        }
        let mut came = false;
        for victim in victims {
            if let Some((at, part)) = self.chosen(victim) {
                // One whose cells are still to come has nothing to give, nor one that others
                // continue: others have.
                came |= self.leave_host(at, part)
                    || !self.is_in_host(at, part)
                    || self.note_continued(at, Tier::Host);
            }
        }
        // When all that was chosen had to stay, others are asked for, so many times.
        let tries = came || self.is_stuck();
        self.refusals += u32::from(tries && !came);
        tries
    }

    /// Whether nothing that is under way can free memory.
    fn is_stuck(&self) -> bool {
        let busy = [
            WorkerKind::Copy,
            WorkerKind::Read,
            WorkerKind::Write,
            WorkerKind::Fetch,
            WorkerKind::Send,
        ];
        !self.memory_waiters.is_empty()
            && self.leaving_bytes == 0
            && busy.iter().all(|&workers| self.under_way[workers as usize] == self.hung(workers))
            && (0..3).all(|lane| self.copies.waiting(lane).0 + self.reads.waiting(lane).0 == 0)
            && !self.replicas.as_ref().is_some_and(|replicas| replicas.waiting())
            && self
                .remote
                .as_ref()
                .is_none_or(|remote| remote.is_quiet_to_fetch() && remote.outs.is_empty())
            && !self.is_ending_behind()
    }

    /// The first job that waits for memory gets the reserve, or a pin's memory, or none at all.
    fn help_one(&mut self) -> bool {
        let served = self.serve_from_reserve();
        served.unwrap_or_else(|| self.drop_weakest_pin() || self.fail_memory_waiter())
    }

    fn fail_memory_waiter(&mut self) -> bool {
        self.fail_memory_waiters();
        true
    }

    /// A part of a chunk leaves memory: at once what is on disk too, else by way of it. Whether
    /// memory came or comes free.
    pub(super) fn leave_host(&mut self, at: At, part: Part) -> bool {
        let rows = &mut self.tables[at.table as usize];
        if part == Part::All {
            rows.clear(at.slot, note::IN_HOST);
            if self.disk_cache.is_none() {
                rows.clear(at.slot, note::HELD);
            }
        }
        let left = self.only_in_host(at, part);
        if let Some(leave) = self.leaving.get_mut(&at) {
            // Chosen before. As a whole: and others have asked for it since.
            if !leave.is_whole() {
                leave.add(part, left);
                self.leaving_bytes += left;
            }
            return true;
        }
        self.send_leaving(at);
        let freed = self.drop_copies(at, |layer| part.has(layer));
        if left == 0 {
            self.counters.demoted += u64::from(freed > 0 && !self.is_in_host(at, Part::All));
            return freed > 0;
        }
        let rows = &self.tables[at.table as usize];
        let is_blocked = rows.chunks.chunk(at.slot).is_some_and(|row| row.is_blocked());
        if self.may_go_down(at, self.only_in_host(at, Part::All), is_blocked) {
            self.tables[at.table as usize].set(at.slot, note::LEAVES);
            let mut leave = Leave::default();
            leave.add(part, left);
            self.leaving_bytes += left;
            self.leaving.insert(at, leave);
            // All of it is written, so that the rest can leave at once when it is chosen.
            self.queue_down(at);
            return true;
        }
        self.drop_for_good(at, part) || freed > 0
    }

    /// Whether anything of a part of a chunk is in memory.
    pub(super) fn is_in_host(&self, at: At, part: Part) -> bool {
        let rows = &self.tables[at.table as usize].chunks;
        match part {
            Part::All => rows.chunk(at.slot).is_some_and(|row| row.cells()[HOST] > 0),
            Part::Layer(layer) => {
                let marks = rows.marks(at.slot).and_then(|marks| marks.get(layer));
                marks.is_some_and(|marks| marks.there() & 1 << HOST != 0)
            }
        }
    }

    /// Bytes of a part of a chunk that are in memory and nowhere else.
    pub(super) fn only_in_host(&self, at: At, part: Part) -> u64 {
        let rows = &self.tables[at.table as usize];
        let Some(marks) = rows.chunks.marks(at.slot) else { return 0 };
        let only =
            |(layer, marks): (usize, &crate::meta::chunks::Marks)| match marks.there() & !DEVICE {
                there if there == 1 << HOST && part.has(layer) => {
                    rows.planes(Cell { chunk: at.slot, layer }).bytes()
                }
                _ => 0,
            };
        marks.iter().enumerate().map(only).sum()
    }

    pub(super) fn may_go_down(&mut self, at: At, bytes: u64, is_blocked: bool) -> bool {
        let Some(disk) = &self.disk else { return false };
        if is_blocked {
            return true;
        }
        if self.config.write == Write::Never {
            return false;
        }
        let rows = &self.tables[at.table as usize];
        let stats = disk.stats();
        let free = 1.0 - stats.used_bytes as f64 / stats.budget_bytes.max(1) as f64;
        let one = Candidate {
            bytes,
            hits: u32::from(rows.uses[at.slot as usize]),
            priority: rows.classes[at.slot as usize],
        };
        self.admission.admit(&one, free, self.now_ns).is_ok()
    }

    /// Gives back the memory of cells that are on disk too, in the layers that `of` names;
    /// how much.
    pub(super) fn drop_copies(&mut self, at: At, of: impl Fn(usize) -> bool) -> u64 {
        self.drop_where(at, HOST, |layer, there| there & 1 << DISK != 0 && of(layer))
    }

    /// Drops the cells of a chunk in a tier where `may` says so of the layer and the tiers
    /// that it is in, but for the device's; the bytes that are free or will be. What is on
    /// the device does not stay there alone.
    pub(super) fn drop_where(
        &mut self,
        at: At,
        tier: usize,
        may: impl Fn(usize, u8) -> bool,
    ) -> u64 {
        let kind = ALL_TIERS[tier];
        let layers = self.tables[at.table as usize].layout.layers();
        let mut freed = 0;
        for layer in 0..layers {
            let cell = Cell { chunk: at.slot, layer };
            let rows = &mut self.tables[at.table as usize];
            let Some(marks) = rows.chunks.marks(at.slot).and_then(|all| all.get(layer)) else {
                return freed;
            };
            let there = marks.there();
            if there & 1 << tier == 0 || !may(layer, there & !DEVICE) {
                continue;
            }
            if there == DEVICE | 1 << tier {
                if rows.chunks.chunk(at.slot).is_some_and(|row| row.is_blocked()) {
                    continue;
                }
                self.forget_replica(at.table, cell);
            }
            let rows = &mut self.tables[at.table as usize];
            let bytes = rows.planes(cell).bytes();
            match rows.chunks.begin_drop(cell, kind) {
                Ok(Gone::Now(place)) => {
                    self.free_place(at.table, cell, place);
                    freed += bytes;
                }
                Ok(Gone::Later) => freed += bytes,
                Ok(Gone::Not) | Err(_) => continue,
            }
            self.departed(at.table, cell, kind);
        }
        freed
    }

    /// What is in memory only is gone, unless it must stay: then the policy gets it back. A
    /// chunk goes as a whole, since it is of no use without one layer, but where parts are
    /// to be dropped alone. Whether memory came free.
    pub(super) fn drop_for_good(&mut self, at: At, part: Part) -> bool {
        let part = if self.config.drop_cells { part } else { Part::All };
        let freed = self.drop_where(at, HOST, |layer, there| there == 1 << HOST && part.has(layer));
        if self.host_cache.granularity == Granularity::Cell && part == Part::All {
            // What is left of it are copies.
            self.drop_copies(at, |_| true);
        }
        if self.is_in_host(at, part) {
            self.enter_cache(at, Tier::Host, part);
        }
        self.counters.dropped += u64::from(freed > 0 && !self.is_in_host(at, Part::All));
        self.tidy(at.table, at.slot);
        freed > 0
    }

    /// A chunk is not on its way out any more; what of it was.
    pub(super) fn stop_leaving(&mut self, at: At) -> Option<Leave> {
        let leave = self.leaving.remove(&at)?;
        self.leaving_bytes -= leave.bytes;
        self.tables[at.table as usize].clear(at.slot, note::LEAVES);
        Some(leave)
    }
}
