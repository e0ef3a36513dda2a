//! What a pass takes: units in their order, slots, links that serve one at a time, and
//! passes that follow each other.

use crate::base::status::Result;
use crate::stream::plan::room::filled;
use crate::stream::plan::staging::{self, Staging};
use crate::stream::plan::steps::{Pass, Step, Way};
use crate::stream::plan::{Binding, Forecast, Links, Seat};

/// Passes until a pass counts as steady.
const PASSES: usize = 12;
/// Units laid out at most: a large model has fewer passes.
const MAX_STEPS: usize = 1 << 20;

/// Times of a byte.
#[derive(Clone, Copy, Debug)]
struct Rates {
    disk_ns: f64,
    device_ns: f64,
    /// None where nobody knows.
    processor_ns: Option<f64>,
}

/// A pass that is being laid out in time.
struct Run<'a> {
    seat: Seat,
    way: staging::Way,
    /// What moves in a pass.
    moves: &'a [Step],
    slots: usize,
    /// When each slot is free, and when what is in it is there.
    freed_ns: Vec<f64>,
    there_ns: Vec<f64>,
    /// Moves that were laid out, and units that were computed, of all passes.
    sent: usize,
    used: usize,
    link_free_ns: f64,
    staging: Staging,
}

impl Run<'_> {
    /// When the next move can begin as far as its slot and its link say; none where its
    /// slot is in use.
    fn next_ns(&self) -> Option<f64> {
        if self.moves.is_empty() || self.sent >= self.used + self.slots {
            return None;
        }
        Some(self.link_free_ns.max(self.freed_ns[self.sent % self.slots]))
    }

    fn send(&mut self, start_ns: f64) {
        let step = self.moves[self.sent % self.moves.len()];
        let end_ns = match (self.seat, step.way) {
            (Seat::Host, _) => start_ns + step.bytes * self.way.disk_ns,
            (Seat::Device, Way::FromFile) => self.staging.pass(step.bytes, start_ns, &self.way),
            (Seat::Device, _) => start_ns + step.bytes * self.way.device_ns,
        };
        self.link_free_ns = end_ns;
        let slot = self.sent % self.slots;
        self.there_ns[slot] = end_ns;
        self.sent += 1;
    }

    /// Experts are known when their layer has been computed so far: what began before
    /// goes first, then they do. When they are there.
    fn experts(&mut self, step: &Step, now_ns: f64) -> f64 {
        while let Some(start_ns) = self.next_ns().filter(|&ns| ns < now_ns) {
            self.send(start_ns);
        }
        let start_ns = self.link_free_ns.max(now_ns);
        if self.seat == Seat::Host {
            self.link_free_ns = start_ns + step.asks_disk * self.way.disk_ns;
            return self.link_free_ns;
        }
        let mut end_ns = start_ns + step.asks_device * self.way.device_ns;
        if step.asks_disk > 0.0 {
            let read_ns = self.staging.disk_free_ns.max(now_ns) + step.asks_disk * self.way.disk_ns;
            self.staging.disk_free_ns = read_ns;
            let chunk = self.way.chunk_bytes.min(step.asks_disk);
            end_ns = end_ns.max(read_ns + chunk * self.way.device_ns);
        }
        self.link_free_ns = end_ns;
        end_ns
    }

    /// Lays out a pass that begins at `now_ns`; when it ends.
    fn pass(&mut self, steps: &[Step], rates: &Rates, mut now_ns: f64) -> f64 {
        for step in steps {
            let moves = step.way != Way::Stays && self.slots > 0;
            if moves {
                while self.sent <= self.used {
                    let Some(start_ns) = self.next_ns() else { break };
                    self.send(start_ns);
                }
                now_ns = now_ns.max(self.there_ns[self.used % self.slots]);
            }
            now_ns += step.takes_ns(rates);
            if moves {
                self.freed_ns[self.used % self.slots] = now_ns;
                self.used += 1;
            }
            if step.asks_device + step.asks_disk > 0.0 {
                now_ns = self.experts(step, now_ns);
            }
        }
        now_ns
    }
}

impl Step {
    fn takes_ns(&self, rates: &Rates) -> f64 {
        match rates.processor_ns {
            Some(ns) if self.processor_bytes > 0.0 => self.processor_bytes * ns,
            _ => self.compute_ns,
        }
    }
}

/// What is moved and computed in a pass, whoever waits for whom.
struct Sums {
    compute_ns: f64,
    device_bytes: f64,
    disk_bytes: f64,
}

impl Sums {
    fn of(pass: &Pass, rates: &Rates) -> Sums {
        let mut sums = Sums { compute_ns: 0.0, device_bytes: 0.0, disk_bytes: 0.0 };
        for step in &pass.steps {
            sums.compute_ns += step.takes_ns(rates);
            sums.device_bytes += step.asks_device;
            sums.disk_bytes += step.asks_disk;
            let moves = step.way != Way::Stays && !pass.ends_resident;
            if moves && pass.seat == Seat::Device {
                sums.device_bytes += step.bytes;
            }
            if moves && step.way == Way::FromFile {
                sums.disk_bytes += step.bytes;
            }
        }
        sums
    }
}

fn per_byte_ns(rate: u64) -> f64 {
    if rate == 0 { 0.0 } else { 1e9 / rate as f64 }
}

/// What a pass will take; none where a link that it needs is not known.
pub(super) fn forecast(pass: &Pass, links: &Links) -> Result<Option<Forecast>> {
    let rates = Rates {
        disk_ns: per_byte_ns(links.disk),
        device_ns: per_byte_ns(links.device),
        processor_ns: (links.processor > 0).then(|| per_byte_ns(links.processor)),
    };
    let sums = Sums::of(pass, &rates);
    let first = pass.steps.iter().any(|step| step.way == Way::FromFile);
    let device = pass.seat == Seat::Device && pass.steps.iter().any(|s| s.way != Way::Stays);
    let needs_disk = first || sums.disk_bytes > 0.0;
    let needs_device = device || sums.device_bytes > 0.0;
    if (needs_disk && links.disk == 0) || (needs_device && links.device == 0) {
        return Ok(None);
    }
    let (first_ns, mut steady_ns) = run(pass, &rates)?;
    if pass.ends_resident {
        steady_ns = run(&pass.clone().settled(), &rates)?.1;
    }
    let device_ns = sums.device_bytes * rates.device_ns;
    let disk_ns = sums.disk_bytes * rates.disk_ns;
    let bound_ns = sums.compute_ns.max(device_ns).max(disk_ns);
    let binding = match bound_ns {
        ns if ns <= sums.compute_ns => Binding::Compute,
        ns if ns <= device_ns => Binding::Device,
        _ => Binding::Disk,
    };
    // What the first passes fetched ahead may still be used up in the last one.
    let pass_ns = steady_ns.max(bound_ns);
    Ok(Some(Forecast {
        pass_ns: pass_ns as u64,
        first_ns: first_ns as u64,
        bound_ns: bound_ns as u64,
        compute_ns: sums.compute_ns as u64,
        device_ns: device_ns as u64,
        disk_ns: disk_ns as u64,
        device_bytes: sums.device_bytes as u64,
        disk_bytes: sums.disk_bytes as u64,
        binding,
    }))
}

/// The first pass, and a steady one.
fn run(pass: &Pass, rates: &Rates) -> Result<(f64, f64)> {
    let mut moves = filled(PLACEHOLDER, pass.steps.len())?;
    moves.clear();
    moves.extend(pass.steps.iter().filter(|step| step.way != Way::Stays));
    let slots = pass.slots as usize;
    let mut run = Run {
        seat: pass.seat,
        way: staging::Way {
            disk_ns: rates.disk_ns,
            device_ns: rates.device_ns,
            chunk_bytes: pass.chunk_bytes as f64,
            staging_bytes: pass.staging_bytes as f64,
        },
        moves: &moves,
        slots,
        freed_ns: filled(0.0, slots)?,
        there_ns: filled(0.0, slots)?,
        sent: 0,
        used: 0,
        link_free_ns: 0.0,
        staging: Staging::default(),
    };
    let most = (MAX_STEPS / pass.steps.len().max(1)).clamp(3, PASSES);
    let mut ends = vec![0.0];
    for i in 0..most {
        let end_ns = run.pass(&pass.steps, rates, ends[i]);
        ends.push(end_ns);
        let took = |n: usize| ends[n] - ends[n - 1];
        if i >= 3 && (2..4).all(|k| (took(i + 1) - took(i + 2 - k)).abs() <= took(i + 1) * 1e-6) {
            return Ok((ends[1], took(i + 1)));
        }
    }
    // It has not settled: the mean of the later half.
    let half = most / 2;
    Ok((ends[1], (ends[most] - ends[half]) / (most - half) as f64))
}

const PLACEHOLDER: Step = Step {
    way: Way::Stays,
    bytes: 0.0,
    compute_ns: 0.0,
    processor_bytes: 0.0,
    asks_device: 0.0,
    asks_disk: 0.0,
};

/// Bytes that cross the device link and the disk in a pass.
pub(super) fn moved(pass: &Pass) -> (u64, u64) {
    let rates = Rates { disk_ns: 0.0, device_ns: 0.0, processor_ns: None };
    let sums = Sums::of(pass, &rates);
    (sums.device_bytes as u64, sums.disk_bytes as u64)
}
