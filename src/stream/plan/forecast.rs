//! Forecast of a pass: simulates units in order, slots, links that carry one transfer at a time,
//! and passes that follow each other.

use std::collections::{BTreeMap, VecDeque};

use crate::base::status::Result;
use crate::fail;
use crate::stream::plan::{
    Binding, ComputeLocation, Forecast, Inputs, Links, Mode, Plan, Residency, filled,
    footprint_bytes, reserved,
};
use crate::stream::units::{Role, Unit};

/// Most passes that are simulated to reach a steady state.
const PASSES: usize = 12;
/// Most steps that are simulated: a large model gets fewer passes.
const MAX_STEPS: usize = 1 << 20;

/// Nanoseconds a byte.
#[derive(Clone, Copy, Debug)]
struct ByteTimes {
    disk_ns: f64,
    device_ns: f64,
    /// None: the rate is not known.
    processor_ns: Option<f64>,
}

/// A simulation in progress.
struct Simulation<'a> {
    compute: ComputeLocation,
    rates: LinkRates,
    /// The steps of a pass that move bytes.
    moves: &'a [Step],
    slots: usize,
    /// When each slot is free, and when its unit is loaded.
    freed_ns: Vec<f64>,
    there_ns: Vec<f64>,
    /// Transfers begun and units computed, over all passes.
    sent: usize,
    used: usize,
    link_free_ns: f64,
    staging: Staging,
}

impl Simulation<'_> {
    /// When the next transfer can begin, as far as its slot and its link allow; none while the
    /// slot is in use.
    fn next_ns(&self) -> Option<f64> {
        if self.moves.is_empty() || self.sent >= self.used + self.slots {
            return None;
        }
        Some(self.link_free_ns.max(self.freed_ns[self.sent % self.slots]))
    }

    fn send(&mut self, start_ns: f64) {
        let step = self.moves[self.sent % self.moves.len()];
        let end_ns = match (self.compute, step.source) {
            (ComputeLocation::Host, _) => start_ns + step.bytes * self.rates.disk_ns,
            (ComputeLocation::Device, StepSource::File) => {
                self.staging.pass(step.bytes, start_ns, &self.rates)
            }
            (ComputeLocation::Device, _) => start_ns + step.bytes * self.rates.device_ns,
        };
        self.link_free_ns = end_ns;
        let slot = self.sent % self.slots;
        self.there_ns[slot] = end_ns;
        self.sent += 1;
    }

    /// Loads experts. They are known once their layer was computed so far; transfers that began
    /// before go first. Returns when the experts are loaded.
    fn experts(&mut self, step: &Step, now_ns: f64) -> f64 {
        while let Some(start_ns) = self.next_ns().filter(|&ns| ns < now_ns) {
            self.send(start_ns);
        }
        let start_ns = self.link_free_ns.max(now_ns);
        if self.compute == ComputeLocation::Host {
            self.link_free_ns = start_ns + step.expert_disk_bytes * self.rates.disk_ns;
            return self.link_free_ns;
        }
        let mut end_ns = start_ns + step.expert_device_bytes * self.rates.device_ns;
        if step.expert_disk_bytes > 0.0 {
            let read_ns =
                self.staging.disk_free_ns.max(now_ns) + step.expert_disk_bytes * self.rates.disk_ns;
            self.staging.disk_free_ns = read_ns;
            let chunk = self.rates.chunk_bytes.min(step.expert_disk_bytes);
            end_ns = end_ns.max(read_ns + chunk * self.rates.device_ns);
        }
        self.link_free_ns = end_ns;
        end_ns
    }

    /// Simulates a pass that begins at `now_ns`. Returns its end.
    fn pass(&mut self, steps: &[Step], rates: &ByteTimes, mut now_ns: f64) -> f64 {
        for step in steps {
            let moves = step.source != StepSource::Resident && self.slots > 0;
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
            if step.expert_device_bytes + step.expert_disk_bytes > 0.0 {
                now_ns = self.experts(step, now_ns);
            }
        }
        now_ns
    }
}

impl Step {
    fn takes_ns(&self, rates: &ByteTimes) -> f64 {
        match rates.processor_ns {
            Some(ns) if self.processor_bytes > 0.0 => self.processor_bytes * ns,
            _ => self.compute_ns,
        }
    }
}

/// Bytes moved and time computed in a pass, without waiting.
struct Totals {
    compute_ns: f64,
    device_bytes: f64,
    disk_bytes: f64,
}

impl Totals {
    fn of(pass: &Pass, rates: &ByteTimes) -> Totals {
        let mut totals = Totals { compute_ns: 0.0, device_bytes: 0.0, disk_bytes: 0.0 };
        for step in &pass.steps {
            totals.compute_ns += step.takes_ns(rates);
            totals.device_bytes += step.expert_device_bytes;
            totals.disk_bytes += step.expert_disk_bytes;
            let moves = step.source != StepSource::Resident && !pass.ends_resident;
            if moves && pass.compute == ComputeLocation::Device {
                totals.device_bytes += step.bytes;
            }
            if moves && step.source == StepSource::File {
                totals.disk_bytes += step.bytes;
            }
        }
        totals
    }
}

fn per_byte_ns(rate: u64) -> f64 {
    if rate == 0 { 0.0 } else { 1e9 / rate as f64 }
}

/// The forecast; none if the rate of a needed link is not known.
pub(super) fn forecast(pass: &Pass, links: &Links) -> Result<Option<Forecast>> {
    let rates = ByteTimes {
        disk_ns: per_byte_ns(links.disk),
        device_ns: per_byte_ns(links.device),
        processor_ns: (links.processor > 0).then(|| per_byte_ns(links.processor)),
    };
    let totals = Totals::of(pass, &rates);
    let first = pass.steps.iter().any(|step| step.source == StepSource::File);
    let device = pass.compute == ComputeLocation::Device
        && pass.steps.iter().any(|s| s.source != StepSource::Resident);
    let needs_disk = first || totals.disk_bytes > 0.0;
    let needs_device = device || totals.device_bytes > 0.0;
    if (needs_disk && links.disk == 0) || (needs_device && links.device == 0) {
        return Ok(None);
    }
    let (first_ns, mut steady_ns) = run(pass, &rates)?;
    if pass.ends_resident {
        steady_ns = run(&pass.clone().settled(), &rates)?.1;
    }
    let device_ns = totals.device_bytes * rates.device_ns;
    let disk_ns = totals.disk_bytes * rates.disk_ns;
    let bound_ns = totals.compute_ns.max(device_ns).max(disk_ns);
    let binding = match bound_ns {
        ns if ns <= totals.compute_ns => Binding::Compute,
        ns if ns <= device_ns => Binding::Device,
        _ => Binding::Disk,
    };
    // The last simulated pass may still profit from what the first ones prefetched.
    let pass_ns = steady_ns.max(bound_ns);
    Ok(Some(Forecast {
        pass_ns: pass_ns as u64,
        first_ns: first_ns as u64,
        bound_ns: bound_ns as u64,
        compute_ns: totals.compute_ns as u64,
        device_ns: device_ns as u64,
        disk_ns: disk_ns as u64,
        device_bytes: totals.device_bytes as u64,
        disk_bytes: totals.disk_bytes as u64,
        binding,
    }))
}

/// Durations of the first and of a steady pass.
fn run(pass: &Pass, rates: &ByteTimes) -> Result<(f64, f64)> {
    let mut moves = filled(PLACEHOLDER, pass.steps.len())?;
    moves.clear();
    moves.extend(pass.steps.iter().filter(|step| step.source != StepSource::Resident));
    let slots = pass.slots as usize;
    let mut run = Simulation {
        compute: pass.compute,
        rates: LinkRates {
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
    // No steady state was reached: the mean of the later half.
    let half = most / 2;
    Ok((ends[1], (ends[most] - ends[half]) / (most - half) as f64))
}

const PLACEHOLDER: Step = Step {
    source: StepSource::Resident,
    bytes: 0.0,
    compute_ns: 0.0,
    processor_bytes: 0.0,
    expert_device_bytes: 0.0,
    expert_disk_bytes: 0.0,
};

/// Bytes that cross the device link and the disk in a pass.
pub(super) fn moved(pass: &Pass) -> (u64, u64) {
    let rates = ByteTimes { disk_ns: 0.0, device_ns: 0.0, processor_ns: None };
    let totals = Totals::of(pass, &rates);
    (totals.device_bytes as u64, totals.disk_bytes as u64)
}

// Input of the simulation: what each unit needs before it can be computed.

/// Source of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepSource {
    /// Resident where it is used.
    Resident,
    /// Copied from host memory to the device.
    Host,
    /// Read from the file.
    File,
}

/// A step of a pass: one unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Source of the unit.
    pub source: StepSource,
    /// Bytes of the unit.
    pub bytes: f64,
    /// Compute time, if the processor's rate does not determine it.
    pub compute_ns: f64,
    /// Bytes that the processor computes with in host memory.
    pub processor_bytes: f64,
    /// Expected bytes of the unit's experts that cross the device link.
    pub expert_device_bytes: f64,
    /// Expected bytes of the unit's experts that are read.
    pub expert_disk_bytes: f64,
}

/// A pass, with its slots and buffers.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    pub steps: Vec<Step>,
    pub compute: ComputeLocation,
    pub slots: u32,
    pub staging_bytes: u64,
    pub chunk_bytes: u64,
    /// The ring has a slot for each unit: only the first pass moves bytes.
    pub ends_resident: bool,
}

impl Pass {
    /// The pass of a plan.
    pub fn of(plan: &Plan, inputs: &Inputs, experts: &Experts) -> Result<Pass> {
        let units = &inputs.units.units;
        let mut steps: Vec<Step> = reserved(units.len())?;
        let miss = plan.expert_miss(inputs, experts);
        for (i, unit) in units.iter().enumerate() {
            if unit.role != Role::Expert {
                steps.push(step(plan, inputs, i, unit));
                continue;
            }
            // Experts belong to the layer before them.
            let Some(last) = steps.last_mut() else { continue };
            if plan.on_processor.get(i) == Some(&true) {
                last.processor_bytes += experts.use_of(unit) * unit.image_bytes as f64;
                continue;
            }
            let bytes = experts.use_of(unit) * miss * unit.image_bytes as f64;
            match (plan.compute, plan.residencies.get(i)) {
                (ComputeLocation::Device, Some(Residency::Device))
                | (ComputeLocation::Host, Some(Residency::Host)) => {}
                (ComputeLocation::Device, Some(Residency::Host)) => {
                    last.expert_device_bytes += bytes
                }
                (ComputeLocation::Device, _) => {
                    last.expert_device_bytes += bytes;
                    last.expert_disk_bytes += bytes;
                }
                (ComputeLocation::Host, _) => last.expert_disk_bytes += bytes,
            }
        }
        let streamed = steps.iter().filter(|step| step.source != StepSource::Resident).count();
        Ok(Pass {
            steps,
            compute: plan.compute,
            slots: plan.slots,
            staging_bytes: plan.staging_bytes,
            chunk_bytes: plan.chunk_bytes,
            ends_resident: plan.mode == Mode::Ring && plan.slots as usize >= streamed,
        })
    }

    /// Sets the compute time to a little less than the transfer time, where the spread of
    /// transfers matters most.
    pub fn compute_nearly_hides(&mut self, links: &Links) {
        let moved: f64 =
            self.steps.iter().filter(|s| s.source != StepSource::Resident).map(|s| s.bytes).sum();
        let rate = if self.compute == ComputeLocation::Device { links.device } else { links.disk };
        let each_ns = 0.9 * moved * 1e9 / rate as f64 / self.steps.len().max(1) as f64;
        for step in &mut self.steps {
            step.compute_ns = each_ns;
            step.processor_bytes = 0.0;
        }
    }

    /// The pass after all units became resident.
    pub fn settled(mut self) -> Pass {
        self.steps.iter_mut().for_each(|step| step.source = StepSource::Resident);
        self
    }
}

fn step(plan: &Plan, inputs: &Inputs, i: usize, unit: &Unit) -> Step {
    let on_processor = plan.on_processor.get(i) == Some(&true);
    let source = match (plan.compute, plan.residencies.get(i)) {
        _ if on_processor => StepSource::Resident,
        (ComputeLocation::Device, Some(Residency::Device))
        | (ComputeLocation::Host, Some(Residency::Host)) => StepSource::Resident,
        (ComputeLocation::Device, Some(Residency::Host)) => StepSource::Host,
        _ => StepSource::File,
    };
    let is_layer = unit.role == Role::Layer;
    let bytes = unit.image_bytes as f64;
    Step {
        source,
        bytes,
        compute_ns: if is_layer { inputs.plan_options.layer_compute_ns as f64 } else { 0.0 },
        processor_bytes: if on_processor && is_layer { bytes } else { 0.0 },
        expert_device_bytes: 0.0,
        expert_disk_bytes: 0.0,
    }
}

// Staging buffer of the simulation: limits how far reads may be ahead of copies.

/// A copy: its range of all bytes that pass through, and its time.
#[derive(Clone, Copy, Debug)]
struct Copied {
    from: f64,
    to: f64,
    start_ns: f64,
    end_ns: f64,
}

/// Rates and sizes of the path from the disk to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkRates {
    /// Nanoseconds a byte.
    pub disk_ns: f64,
    /// Nanoseconds a byte.
    pub device_ns: f64,
    /// Bytes of one read or copy.
    pub chunk_bytes: f64,
    /// Bytes of the buffer.
    pub staging_bytes: f64,
}

/// The staging buffer.
#[derive(Clone, Debug, Default)]
pub(super) struct Staging {
    copies: VecDeque<Copied>,
    /// Bytes read so far.
    read: f64,
    /// When the last copy that is no longer listed ended.
    gone_ns: f64,
    /// When the disk has ended all reads.
    pub disk_free_ns: f64,
}

impl Staging {
    /// Reads bytes and copies them, the copy not before `link_ns`. Returns the end of the copy. A
    /// copy follows its read by one chunk; reads are ahead of copies by at most the size of the
    /// buffer.
    pub fn pass(&mut self, bytes: f64, link_ns: f64, rates: &LinkRates) -> f64 {
        let chunk = rates.chunk_bytes.min(bytes);
        let chunk_read_ns = chunk * rates.disk_ns;
        let chunk_copy_ns = chunk * rates.device_ns;
        let behind = self.read - rates.staging_bytes;
        let begin_ns = self.disk_free_ns.max(self.copied_ns(behind + chunk));
        let start_ns = link_ns.max(begin_ns + chunk_read_ns);
        let mut read_ns = begin_ns + bytes * rates.disk_ns;
        let over = bytes - rates.staging_bytes;
        if over <= 0.0 {
            read_ns = read_ns.max(self.copied_ns(behind + bytes) + chunk_read_ns);
        } else {
            // The unit is larger than the buffer: its own copy makes room for its end.
            let room_ns = start_ns + chunk_copy_ns;
            read_ns = read_ns.max(room_ns + over * rates.disk_ns);
            read_ns = read_ns.max(start_ns + over * rates.device_ns + chunk_read_ns);
        }
        let end_ns = (start_ns + bytes * rates.device_ns).max(read_ns + chunk_copy_ns);
        let copied = Copied { from: self.read, to: self.read + bytes, start_ns, end_ns };
        self.copies.push_back(copied);
        self.read += bytes;
        self.disk_free_ns = read_ns;
        end_ns
    }

    /// When the first `upto` bytes were copied. `upto` must not decrease between calls.
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

// Forecasts for other links.

impl Forecast {
    /// Tokens a second, if a pass makes one token; infinite if the pass takes no known time.
    pub fn tokens_per_s(&self) -> f64 {
        1e9 / self.pass_ns as f64
    }
}

impl Plan {
    /// The forecast for `links`; rates of 0 are replaced by those of `inputs`.
    pub fn what_if(&self, inputs: &Inputs, links: Links) -> Result<Forecast> {
        self.fits(inputs)?;
        let experts = Experts::of(inputs, self.compute, &self.on_processor);
        let pass = Pass::of(self, inputs, &experts)?;
        let links = links.or(inputs.links);
        match forecast(&pass, &links)? {
            Some(forecast) => Ok(forecast),
            None => fail!(
                Invalid,
                "the rate of a link that the plan needs is not known (device {}, disk {}): set \
                 it, as in h2d=13,disk=3.3",
                links.device,
                links.disk
            ),
        }
    }

    /// Fails if the plan was made for other units.
    pub(super) fn fits(&self, inputs: &Inputs) -> Result<()> {
        let (has, len) = (inputs.units.units.len(), self.residencies.len());
        if has != len || self.on_processor.len() != len {
            fail!(
                Invalid,
                "the plan is for {len} units, the model has {has}: make a plan for this model"
            );
        }
        Ok(())
    }
}

// Comparison: compute a layer on the processor, or copy it to the device.

/// Times of a layer in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorHint {
    /// The unit.
    pub unit: u32,
    /// Time to compute it on the processor, in nanoseconds.
    pub in_place_ns: u64,
    /// Time to copy it to the device, in nanoseconds.
    pub send_ns: u64,
    /// Whether the processor is faster.
    pub in_place: bool,
}

fn takes_ns(bytes: u64, rate: u64) -> u64 {
    (bytes as f64 * 1e9 / rate.max(1) as f64) as u64
}

impl Plan {
    /// For each layer that crosses from host memory to the device: whether the processor would
    /// compute it sooner. Empty if a rate is not known. The alternative counts the copy alone,
    /// since a pass waits for that.
    pub fn processor_hint(&self, inputs: &Inputs) -> Vec<ProcessorHint> {
        let Links { device, processor, .. } = inputs.links;
        if self.compute == ComputeLocation::Host || device == 0 || processor == 0 {
            return Vec::new();
        }
        let crosses = |i: usize| {
            self.residencies.get(i) == Some(&Residency::Host)
                && self.on_processor.get(i) == Some(&false)
        };
        let units = inputs.units.units.iter().enumerate();
        units
            .filter(|(i, unit)| unit.role == Role::Layer && crosses(*i))
            .map(|(i, unit)| {
                let in_place_ns = takes_ns(unit.image_bytes, processor);
                let send_ns = takes_ns(unit.image_bytes, device);
                let in_place = in_place_ns < send_ns;
                ProcessorHint { unit: i as u32, in_place_ns, send_ns, in_place }
            })
            .collect()
    }
}

// Experts: how many share the slots, and how often one is expected to be read.

/// Expert slots are freed in blocks of this many bytes, or of 1/[`STEPS`] of all slots.
const STEP_BYTES: u64 = 64 << 20;
const STEPS: u32 = 16;

/// Experts of a model. Before any use, all are assumed to be equally likely.
#[derive(Clone, Debug, Default)]
pub(super) struct Experts {
    /// Experts that share slots.
    pub count: u64,
    /// Bytes of the largest of them.
    pub slot_bytes: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Experts of a layer that a token uses.
    pub used: u32,
    /// Number of experts of each layer.
    layers: BTreeMap<u32, u32>,
}

impl Experts {
    /// The experts of a model; units in `processor_units` are not streamed.
    pub fn of(inputs: &Inputs, compute: ComputeLocation, processor_units: &[bool]) -> Experts {
        let granularity_bytes = inputs.plan_options.device_granularity_bytes;
        let mut all = Experts { used: inputs.facts.experts_used.max(1), ..Experts::default() };
        for (unit, processor_units) in inputs.units.units.iter().zip(processor_units) {
            if unit.role != Role::Expert {
                continue;
            }
            *all.layers.entry(unit.layer).or_default() += 1;
            if !processor_units {
                all.count += 1;
                let bytes =
                    footprint_bytes(unit.image_bytes, compute.residency(), granularity_bytes);
                all.bytes += bytes;
                all.slot_bytes = all.slot_bytes.max(bytes);
            }
        }
        all
    }

    /// Share of passes in which an expert is used.
    pub fn use_of(&self, unit: &Unit) -> f64 {
        let of = self.layers.get(&unit.layer).copied().unwrap_or(1).max(1);
        f64::from(self.used.min(of)) / f64::from(of)
    }

    /// Number of `slots` expert slots that are never freed, and number that are added and freed
    /// together. Slots share allocations, because a device rounds each one up and a process has a
    /// limited number of mappings.
    pub fn least_and_step(&self, slots: u32, granularity_bytes: u64) -> (u32, u32) {
        let at_once = STEP_BYTES / self.slot_bytes.max(1);
        let step = match granularity_bytes {
            0 => (at_once as u32).min(slots / STEPS).max(1),
            _ => 1, // each slot has memory of its own
        };
        let least = self.least_slots().next_multiple_of(step.into()).min(slots.into());
        (least as u32, step)
    }

    /// Slots that a layer needs at least, so that it can be computed while the next expert is
    /// loaded.
    pub fn least_slots(&self) -> u64 {
        (u64::from(self.used) + 1).min(self.count)
    }
}

impl Plan {
    /// Probability that a used expert is neither resident where it is used nor in a slot.
    pub(super) fn expert_miss(&self, inputs: &Inputs, experts: &Experts) -> f64 {
        let target = if self.compute == ComputeLocation::Device {
            Residency::Device
        } else {
            Residency::Host
        };
        let units = inputs.units.units.iter().zip(&self.residencies);
        let residents =
            units.filter(|(unit, residency)| unit.role == Role::Expert && **residency == target);
        let away = experts.count.saturating_sub(residents.count() as u64);
        1.0 - (f64::from(self.expert_slots) / away.max(1) as f64).min(1.0)
    }
}
