//! The planner: makes a plan from memory, links and options.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::plan::budgets::{Budgets, align_up, budgets, check, chunk_bytes};
use crate::stream::plan::forecast::{Experts, Pass, forecast, moved};
use crate::stream::plan::placement::{
    Candidate, Candidates, Item, Spread, candidates, leanest, place, sum,
};
use crate::stream::plan::{
    ComputeLocation, Figure, Inputs, Links, Mode, Plan, PlanOptions, Residency, UnitCount, filled,
    footprint_bytes, reserved, size,
};
use crate::stream::units::{Role, Unit, Units};

/// Default number of slots: one unit is computed while the next is loaded.
const SLOTS: u32 = 2;

/// Assumed rates for comparing placements where the real rates do not matter.
const ASSUMED_LINKS: Links = Links { disk: 4_000_000_000, device: 12_000_000_000, processor: 0 };

/// Inputs of a plan, sorted by the decisions that they allow.
pub(super) struct Planner<'a> {
    pub inputs: &'a Inputs<'a>,
    pub compute: ComputeLocation,
    pub budgets: Budgets,
    pub experts: Experts,
    pub chunk_bytes: u64,
    /// Units that are used in host memory, though the engine computes on a device.
    pub processor_units: Vec<bool>,
    /// Embeddings that only rows are looked up in, and that fit in host memory.
    pub looked_up: Vec<bool>,
    /// Host memory of these two kinds of units.
    pub fixed_bytes: u64,
    /// Units that are resident or pass through slots.
    pub items: Vec<Item>,
    /// Experts that share slots.
    pub expert_items: Vec<Item>,
    /// Default bytes of staging.
    pub staging_bytes: u64,
    /// The current plan, if there is one: units keep their residency if possible.
    pub before: Option<&'a Plan>,
}

impl Plan {
    /// Makes a plan.
    pub fn make(inputs: &Inputs) -> Result<Plan> {
        let planner = Planner::new(inputs)?;
        let mut plan = planner.best()?;
        planner.add_figures(&mut plan);
        Ok(plan)
    }
}

/// Where the engine computes: as set, else on the device if it has memory.
pub(super) fn compute_location(inputs: &Inputs) -> ComputeLocation {
    let has_device = inputs.memory.device_free_bytes > 0;
    inputs.plan_options.compute.unwrap_or(if has_device {
        ComputeLocation::Device
    } else {
        ComputeLocation::Host
    })
}

impl PlanOptions {
    pub(super) fn least_slots(&self) -> u32 {
        if self.slots == 0 { SLOTS } else { self.slots }
    }

    /// Slots exist so that memory can be given back.
    pub(super) fn can_shrink(&self) -> bool {
        self.shrinks && self.mode == Mode::Tiered
    }
}

/// Plans whose passes differ by less than 1/256 are equally good.
pub(super) const EQUAL_PART: u64 = 256;

/// Quality of a plan: less is better.
#[derive(Clone, Copy, Debug)]
pub(super) struct Score {
    /// Duration of a pass, or the bytes moved if link rates are not known.
    pub pass: u64,
    /// Duration of a pass if computing nearly hid transfers: measures their spread.
    spread_ns: u64,
    /// Bytes moved in a pass.
    bytes: u64,
}

/// The best plan: among those with nearly the shortest pass, the one with the best spread of
/// transfers, since compute times are uncertain.
fn choose(all: &[(Score, Plan)]) -> Option<usize> {
    let least = all.iter().map(|(key, _)| key.pass).min()?;
    let is_close = |key: &Score| key.pass <= least.saturating_add(least / EQUAL_PART);
    let order = |i: &usize| {
        let key = &all[*i].0;
        (key.spread_ns, key.pass, key.bytes)
    };
    (0..all.len()).filter(|i| is_close(&all[*i].0)).min_by_key(order)
}

impl<'a> Planner<'a> {
    pub fn new(inputs: &'a Inputs<'a>) -> Result<Planner<'a>> {
        let compute = compute_location(inputs);
        check(inputs, compute)?;
        let budgets = budgets(inputs, compute)?;
        let processor_units = processor_units(inputs)?;
        let len = inputs.units.units.len();
        let mut planner = Planner {
            inputs,
            compute,
            budgets,
            experts: Experts::of(inputs, compute, &processor_units),
            chunk_bytes: chunk_bytes(inputs),
            processor_units,
            looked_up: filled(false, len)?,
            fixed_bytes: 0,
            items: reserved(len)?,
            expert_items: Vec::new(),
            staging_bytes: 0,
            before: None,
        };
        let (chosen, least) = (planner.least_expert_slots(), planner.experts.least_slots());
        if chosen < least {
            fail!(Budget, "{chosen} expert slots, and a layer needs at least {least}: set more");
        }
        planner.fix_processor()?;
        planner.fix_embedding()?;
        planner.sort()?;
        Ok(planner)
    }

    /// Reserves host memory for units that the processor computes.
    fn fix_processor(&mut self) -> Result<()> {
        let units = self.inputs.units.units.iter().zip(&self.processor_units);
        self.fixed_bytes =
            units.filter(|(_, is_fixed)| **is_fixed).map(|(u, _)| u.image_bytes).sum();
        let (has, needs) = (self.budgets.host_bytes, self.fixed_bytes);
        if needs > has {
            fail!(
                Budget,
                "layers of the processor need {needs} bytes of host memory, and {has} are \
                 available: set fewer processor_layers, raise the ceiling or lower the reserve"
            );
        }
        let room = has - needs;
        self.staging_bytes = staging(self.inputs, self.compute, self.chunk_bytes, room)?;
        Ok(())
    }

    /// Reserves host memory for the embedding. A pass does not read all of it, unless it is also
    /// the head, so host memory is sufficient. It is placed before layers.
    fn fix_embedding(&mut self) -> Result<()> {
        let units = &self.inputs.units.units;
        if self.inputs.plan_options.mode == Mode::Ring && self.compute == ComputeLocation::Host
            || !units.iter().any(|unit| unit.role == Role::Head)
        {
            return Ok(());
        }
        for (i, unit) in units.iter().enumerate() {
            let taken = self.fixed_bytes + self.staging_bytes;
            let room = self.budgets.host_bytes.saturating_sub(taken);
            if unit.role != Role::Embedding || unit.image_bytes > room {
                continue;
            }
            self.looked_up[i] = true;
            self.fixed_bytes += unit.image_bytes;
            // Where all units share one memory, the slots come first.
            if self.compute == ComputeLocation::Host {
                self.sort()?;
                if let Candidates::TooSmall { .. } = self.candidates()? {
                    self.looked_up[i] = false;
                    self.fixed_bytes -= unit.image_bytes;
                }
            }
        }
        Ok(())
    }

    fn sort(&mut self) -> Result<()> {
        self.items.clear();
        self.expert_items.clear();
        let units = &self.inputs.units.units;
        if self.expert_items.try_reserve(self.experts.count as usize).is_err() {
            fail!(NoMem, "no memory for {} experts", self.experts.count);
        }
        for (unit, description) in units.iter().enumerate() {
            let item = Item {
                unit,
                bytes: self.footprint_bytes(description.image_bytes, self.compute.residency()),
            };
            match description.role {
                _ if self.processor_units[unit] || self.looked_up[unit] => {}
                Role::Expert => self.expert_items.push(item),
                _ => self.items.push(item),
            }
        }
        Ok(())
    }

    /// Memory that a unit needs for a residency.
    pub fn footprint_bytes(&self, image_bytes: u64, residency: Residency) -> u64 {
        footprint_bytes(image_bytes, residency, self.inputs.plan_options.device_granularity_bytes)
    }

    /// Bytes for weights where the engine computes.
    pub fn compute_bytes(&self) -> u64 {
        match self.compute {
            ComputeLocation::Device => self.budgets.device_bytes,
            ComputeLocation::Host => self.budgets.host_bytes.saturating_sub(self.fixed_bytes),
        }
    }

    /// Whether all experts are resident: they fit together with all other units. If memory is to
    /// be given back, only if slots for experts would need no less.
    fn all_experts_resident(&self) -> bool {
        let plan_options = self.inputs.plan_options;
        if plan_options.can_shrink() {
            let slots = self.experts.least_slots().saturating_mul(self.experts.slot_bytes);
            return plan_options.expert_slots.is_none() && self.experts.bytes <= slots;
        }
        let all = sum(&self.items) + self.experts.bytes;
        plan_options.mode == Mode::Tiered
            && plan_options.expert_slots.is_none()
            && all <= self.compute_bytes()
    }

    /// Expert slots that are reserved before other units are placed.
    pub fn least_expert_slots(&self) -> u64 {
        let least = self.experts.least_slots();
        self.inputs
            .plan_options
            .expert_slots
            .map_or(least, |chosen| u64::from(chosen).min(self.experts.count))
    }

    /// Bytes of experts that are reserved before other units are placed.
    fn expert_bytes(&self) -> u64 {
        match self.all_experts_resident() {
            true => self.experts.bytes,
            false => self.least_expert_slots().saturating_mul(self.experts.slot_bytes),
        }
    }

    /// Bytes for all other units; none if experts need more than the budget.
    pub fn dense_room(&self) -> Option<u64> {
        self.compute_bytes().checked_sub(self.expert_bytes())
    }

    /// The candidates for the memory where the engine computes.
    fn candidates(&self) -> Result<Candidates> {
        let plan_options = self.inputs.plan_options;
        let expert_bytes = self.expert_bytes();
        let room = self.dense_room();
        let (slots, only) = (plan_options.least_slots(), self.shrinkable_slot_bytes()?);
        let (room_bytes, placement) = (room.unwrap_or(0), plan_options.placement);
        let candidates =
            candidates(&self.items, room_bytes, slots, plan_options.mode, placement, only)?;
        Ok(match candidates {
            Candidates::Found(these) if room.is_some() => Candidates::Found(these),
            Candidates::Found(_) => Candidates::TooSmall { needs_bytes: expert_bytes },
            Candidates::TooSmall { needs_bytes } => {
                Candidates::TooSmall { needs_bytes: needs_bytes.saturating_add(expert_bytes) }
            }
        })
    }

    /// The best plan of all candidates.
    pub fn best(&self) -> Result<Plan> {
        let candidates = match self.candidates()? {
            Candidates::Found(candidates) => candidates,
            Candidates::TooSmall { needs_bytes } => return self.too_small(needs_bytes),
        };
        let mut all: Vec<(Score, Plan)> = reserved(candidates.len())?;
        for candidate in &candidates {
            all.push(self.finish(candidate, self.staging_bytes)?);
        }
        let Some(first) = choose(&all) else { fail!(Invalid, "the units cannot be placed") };
        // Without link rates, the value of staging is not known.
        let open =
            self.inputs.plan_options.staging_bytes == 0 && self.compute == ComputeLocation::Device;
        if open && all[first].1.forecast.is_some() {
            let room = self.budgets.host_bytes - self.fixed_bytes;
            let (slot, usual) = (candidates[first].slot_bytes, self.staging_bytes);
            // Only if clearly better: the default size absorbs stalls of the disk.
            let mut least = all[first].0.pass - all[first].0.pass / EQUAL_PART;
            for staging in others(slot, self.chunk_bytes, usual, room) {
                let other = self.finish(&candidates[first], staging)?;
                if other.0.pass < least {
                    least = other.0.pass;
                    all[first] = other;
                }
            }
        }
        Ok(all.swap_remove(first).1)
    }

    fn too_small<T>(&self, needs: u64) -> Result<T> {
        let place =
            if self.compute == ComputeLocation::Device { "the device" } else { "host memory" };
        let (has, free) = (self.compute_bytes(), self.budgets.compute_free_bytes);
        let slots = self.inputs.plan_options.least_slots();
        let more = needs.saturating_sub(has).saturating_add(self.budgets.compute_short_bytes);
        fail!(
            Budget,
            "{place} has {has} bytes for weights (of {free} free) and needs at least {needs} for \
             {slots} slots and units that fit in no slot: free {more} more, raise the ceiling, \
             lower the context (KV), workspace, safety or reserve, or set fewer slots"
        )
    }

    /// The plan of a candidate, with its score.
    pub fn finish(&self, candidate: &Candidate, staging_bytes: u64) -> Result<(Score, Plan)> {
        let mut residencies = filled(Residency::File, self.inputs.units.units.len())?;
        let compute_residency = self.compute.residency();
        let mut used = u64::from(candidate.slots) * candidate.slot_bytes;
        for (item, stays) in self.items.iter().zip(&candidate.stays) {
            if *stays {
                residencies[item.unit] = compute_residency;
                used += item.bytes;
            }
        }
        for (unit, residency) in residencies.iter_mut().enumerate() {
            if self.processor_units[unit] || self.looked_up[unit] {
                *residency = Residency::Host;
            }
        }
        let (expert_slots, expert_bytes) = self.place_experts(used, &mut residencies)?;
        used += expert_bytes;
        let mut host_bytes = self.fixed_bytes;
        match self.compute {
            ComputeLocation::Host => host_bytes += used,
            ComputeLocation::Device => {
                let room = self.budgets.host_bytes - self.fixed_bytes - staging_bytes;
                host_bytes += staging_bytes + self.assign_host_residency(&mut residencies, room)?;
            }
        }
        let on_device = self.compute == ComputeLocation::Device;
        let mut on_processor = filled(false, residencies.len())?;
        for (i, is_on_processor) in on_processor.iter_mut().enumerate() {
            *is_on_processor = on_device && (self.processor_units[i] || self.looked_up[i]);
        }
        let lockable = self.inputs.memory.lockable_bytes;
        let (expert_slots_least, expert_slots_step) = self.least_and_step(expert_slots);
        let mut plan = Plan {
            compute: self.compute,
            mode: self.inputs.plan_options.mode,
            residencies,
            on_processor,
            slots: candidate.slots,
            slot_bytes: candidate.slot_bytes,
            expert_slots,
            expert_slots_least,
            expert_slots_step,
            expert_slot_bytes: if expert_slots > 0 { self.experts.slot_bytes } else { 0 },
            staging_bytes,
            chunk_bytes: self.chunk_bytes,
            device_granularity_bytes: self.inputs.plan_options.device_granularity_bytes,
            device_bytes: if on_device { used } else { 0 },
            host_bytes,
            pinned_bytes: if on_device { host_bytes.min(lockable) } else { 0 },
            figures: Vec::new(),
            forecast: None,
        };
        let key = self.score(&mut plan)?;
        Ok((key, plan))
    }

    /// Places experts: slots, residency, or both, in the memory that others left. Returns the
    /// number of slots, and the bytes of all.
    fn place_experts(&self, used: u64, residencies: &mut [Residency]) -> Result<(u32, u64)> {
        let compute_residency = self.compute.residency();
        if self.all_experts_resident() {
            self.expert_items.iter().for_each(|item| residencies[item.unit] = compute_residency);
            return Ok((0, self.experts.bytes));
        }
        if self.experts.count == 0 {
            return Ok((0, 0));
        }
        let plan_options = self.inputs.plan_options;
        let room = self.compute_bytes() - used;
        let fit = room / self.experts.slot_bytes.max(1);
        let most = if plan_options.can_shrink() { self.experts.least_slots() } else { fit };
        let wished = plan_options.expert_slots.map_or(most, u64::from);
        let slots = wished.min(fit).min(self.experts.count);
        let mut bytes = slots * self.experts.slot_bytes;
        if plan_options.can_shrink() {
            // Resident experts can be given back one by one: they get the rest.
            bytes += self.assign_residency(
                &self.expert_items,
                compute_residency,
                room - bytes,
                residencies,
            )?;
        }
        Ok((slots as u32, bytes))
    }

    /// Number of expert slots that are never freed, and number that are added and freed together. A
    /// current plan keeps its numbers, since its memory is allocated that way.
    fn least_and_step(&self, slots: u32) -> (u32, u32) {
        match self.before {
            Some(before) if before.expert_slots > 0 => {
                (before.expert_slots_least, before.expert_slots_step)
            }
            _ => self
                .experts
                .least_and_step(slots, self.inputs.plan_options.device_granularity_bytes),
        }
    }

    /// Forecasts a plan.
    fn score(&self, plan: &mut Plan) -> Result<Score> {
        let mut pass = Pass::of(plan, self.inputs, &self.experts)?;
        plan.forecast = forecast(&pass, &self.inputs.links)?;
        let (device, disk) = moved(&pass);
        let bytes = device.saturating_add(disk);
        pass.compute_nearly_hides(&ASSUMED_LINKS);
        let spread = forecast(&pass, &ASSUMED_LINKS)?;
        Ok(Score {
            pass: plan.forecast.map_or(bytes, |forecast| forecast.pass_ns),
            spread_ns: spread.map_or(0, |forecast| forecast.pass_ns),
            bytes,
        })
    }
}

/// The last layers, which the processor computes, with their experts.
fn processor_units(inputs: &Inputs) -> Result<Vec<bool>> {
    let units = &inputs.units.units;
    let mut on_processor = filled(false, units.len())?;
    let mut left = inputs.plan_options.processor_layers;
    for (i, unit) in units.iter().enumerate().rev() {
        // Experts follow their layer, so backwards they come first.
        match unit.role {
            Role::Layer if left > 0 => {
                left -= 1;
                on_processor[i] = true;
            }
            Role::Expert if left > 0 => on_processor[i] = true,
            _ => {}
        }
    }
    Ok(on_processor)
}

// Host memory of an engine that computes on a device: staging, and units that are resident there.

/// Default number of chunks of staging.
const CHUNKS: u64 = 16;
/// With fewer chunks, no read would overlap a copy.
const LEAST_CHUNKS: u64 = 2;

/// The default size of staging. `room`: the host memory available for it.
pub(super) fn staging(
    inputs: &Inputs,
    compute: ComputeLocation,
    chunk_bytes: u64,
    room: u64,
) -> Result<u64> {
    if compute == ComputeLocation::Host {
        return Ok(0);
    }
    let least = LEAST_CHUNKS * chunk_bytes;
    let to_whole_chunks =
        |bytes: u64| bytes.div_ceil(chunk_bytes).saturating_mul(chunk_bytes).max(least);
    let requested = inputs.plan_options.staging_bytes;
    let needs = if requested == 0 { least } else { to_whole_chunks(requested) };
    if needs > room {
        fail!(
            Budget,
            "{room} bytes of host memory are available for staging, and it needs at least \
             {needs}: raise the ceiling, lower the reserve, or set less staging or smaller chunks"
        );
    }
    if requested > 0 {
        return Ok(needs);
    }
    let all: u64 = inputs.units.units.iter().map(|unit| unit.image_bytes).sum();
    let usual = (CHUNKS * chunk_bytes).min(to_whole_chunks(align_up(all)));
    Ok(usual.min(room / chunk_bytes * chunk_bytes))
}

/// Other sizes to try: larger ones let the disk read while units of host memory are copied,
/// smaller ones leave more room for resident units.
pub(super) fn others(slot_bytes: u64, chunk_bytes: u64, usual: u64, room: u64) -> Vec<u64> {
    let unit = slot_bytes.div_ceil(chunk_bytes);
    let chunks = [unit, 2 * unit, CHUNKS / 2, LEAST_CHUNKS];
    let sizes = chunks.map(|n| n.max(LEAST_CHUNKS) * chunk_bytes);
    sizes.into_iter().filter(|&bytes| bytes != usual && bytes <= room).collect()
}

impl Planner<'_> {
    /// Makes units resident in host memory that are not resident on the device, layers before
    /// experts. Returns their bytes.
    pub fn assign_host_residency(&self, residencies: &mut [Residency], room: u64) -> Result<u64> {
        let used = self.assign_residency(&self.items, Residency::Host, room, residencies)?;
        Ok(used
            + self.assign_residency(
                &self.expert_items,
                Residency::Host,
                room - used,
                residencies,
            )?)
    }

    /// Makes units resident within `room` bytes, if they are not resident yet. Units that have
    /// this residency in the current plan come first. Returns their bytes.
    pub fn assign_residency(
        &self,
        items: &[Item],
        residency: Residency,
        room: u64,
        residencies: &mut [Residency],
    ) -> Result<u64> {
        let had = |unit: usize| {
            self.before.is_some_and(|plan| plan.residencies.get(unit) == Some(&residency))
        };
        let mut used = 0;
        for was in [true, false] {
            let mut rest: Vec<Item> = reserved(items.len())?;
            let open =
                |item: &&Item| residencies[item.unit] == Residency::File && had(item.unit) == was;
            rest.extend(items.iter().filter(open).map(|item| {
                let image_bytes = self.inputs.units.units[item.unit].image_bytes;
                Item { bytes: self.footprint_bytes(image_bytes, residency), ..*item }
            }));
            let placement = self.inputs.plan_options.placement;
            let stays = place(&rest, room - used, placement, Spread::Full)?;
            for (item, _) in rest.iter().zip(stays).filter(|(_, stays)| *stays) {
                residencies[item.unit] = residency;
                used += item.bytes;
            }
        }
        Ok(used)
    }
}

// Plans that can shrink: slots exist even if all units fit, of the size that lets most memory be
// given back.

/// The least memory of a plan, after all units that may have moved back to the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Floor {
    /// Device memory.
    pub device_bytes: u64,
    /// Host memory.
    pub host_bytes: u64,
}

impl Plan {
    /// Bytes of the slots that are never freed.
    fn least_slots_bytes(&self) -> u64 {
        let experts = self.expert_slots_least.min(self.expert_slots);
        u64::from(self.slots) * self.slot_bytes + u64::from(experts) * self.expert_slot_bytes
    }

    /// The memory that the plan can shrink to with its slots. Larger units stay, and units that
    /// the processor uses beside a device.
    pub fn floor(&self, units: &Units) -> Floor {
        let (mut main_bytes, mut host_bytes) = (self.least_slots_bytes(), self.staging_bytes);
        for (i, unit) in units.units.iter().enumerate() {
            if self.on_processor.get(i) == Some(&true) {
                host_bytes = host_bytes.saturating_add(unit.image_bytes);
            } else if unit.image_bytes > self.slot_for(unit) {
                main_bytes = main_bytes.saturating_add(
                    self.footprint_bytes(unit.image_bytes, self.compute.residency()),
                );
            }
        }
        match self.compute {
            ComputeLocation::Device => Floor { device_bytes: main_bytes, host_bytes },
            ComputeLocation::Host => {
                Floor { device_bytes: 0, host_bytes: main_bytes.saturating_add(host_bytes) }
            }
        }
    }

    /// Bytes of the slots that a unit passes through.
    fn slot_for(&self, unit: &Unit) -> u64 {
        if unit.role == Role::Expert { self.expert_slot_bytes } else { self.slot_bytes }
    }
}

impl Planner<'_> {
    /// The slot size of a plan that can shrink. It depends on no budget, so that a later plan for
    /// another budget has the same.
    pub fn shrinkable_slot_bytes(&self) -> Result<Option<u64>> {
        let plan_options = self.inputs.plan_options;
        if !plan_options.can_shrink() {
            return Ok(None);
        }
        let units = &self.inputs.units.units;
        let mut passing: Vec<Item> = reserved(units.len())?;
        for (unit, description) in units.iter().enumerate() {
            // If all units share one memory, the embedding is also moved out of it, if nothing else
            // can be.
            let is_on_processor = self.processor_units[unit]
                || self.looked_up[unit] && self.compute == ComputeLocation::Device;
            if description.role != Role::Expert && !is_on_processor {
                let bytes = self.footprint_bytes(description.image_bytes, self.compute.residency());
                passing.push(Item { unit, bytes });
            }
        }
        leanest(&passing, plan_options.least_slots()).map(Some)
    }
}

// Rebalancing: a plan for other budgets that moves as few units as possible.

/// Numbers of expert slots to try, beside the least one.
const TRIED: u32 = 8;

impl Plan {
    /// The plan for the memory that is available now. Units keep their residency where possible.
    /// Slots stay, except expert slots: their number is the one with the shortest pass, up to
    /// [`PlanOptions::expert_slots`]. If that is impossible, it is a new plan.
    pub fn rebalance(&self, inputs_now: &Inputs) -> Result<Plan> {
        self.fits(inputs_now)?;
        let mut best: Option<(Score, Plan)> = None;
        for slots in self.slot_counts(inputs_now.plan_options) {
            let plan_options =
                PlanOptions { expert_slots: slots, ..inputs_now.plan_options.clone() };
            let inputs = Inputs { plan_options: &plan_options, ..*inputs_now };
            let Some(scored) = self.with_slots_kept(&inputs)? else { continue };
            // The largest number is tried first. Slots adapt to the experts in use, so a smaller
            // number must be clearly better.
            let is_better =
                |(key, _): &(Score, Plan)| scored.0.pass < key.pass - key.pass / EQUAL_PART;
            if best.as_ref().is_none_or(is_better) {
                best = Some(scored);
            }
        }
        if let Some((_, plan)) = best {
            return Ok(plan);
        }
        let mut planner = Planner::new(inputs_now)?;
        planner.before = Some(self);
        let mut plan = planner.best()?;
        planner.add_figures(&mut plan);
        Ok(plan)
    }

    /// Numbers of expert slots to try, the largest first; only the set one if it cannot change.
    fn slot_counts(&self, plan_options: &PlanOptions) -> Vec<Option<u32>> {
        let (least, step) = (self.expert_slots_least, self.expert_slots_step.max(1));
        let may_change = |most: &u32| self.expert_slots > 0 && *most > least;
        let Some(most) = plan_options.expert_slots.filter(may_change) else {
            return vec![plan_options.expert_slots];
        };
        let part_of = |part: u32| {
            let more = u64::from(most - least) * u64::from(part) / u64::from(TRIED);
            (least + more as u32).next_multiple_of(step).min(most)
        };
        (0..=TRIED).rev().map(part_of).map(Some).collect()
    }

    /// The plan with the same slots; none if they must change.
    fn with_slots_kept(&self, inputs: &Inputs) -> Result<Option<(Score, Plan)>> {
        let mut planner = match Planner::new(inputs) {
            Err(error) if error.status() == Status::Budget => return Ok(None),
            planner => planner?,
        };
        planner.before = Some(self);
        let Some(candidate) = planner.keep_slots(self)? else { return Ok(None) };
        let room = planner.budgets.host_bytes.saturating_sub(planner.fixed_bytes);
        let same = self.chunk_bytes == planner.chunk_bytes && self.staging_bytes <= room;
        let staging = if same { self.staging_bytes } else { planner.staging_bytes };
        let (key, mut plan) = planner.finish(&candidate, staging)?;
        planner.add_figures(&mut plan);
        Ok(Some((key, plan)))
    }
}

impl Planner<'_> {
    /// The candidate with the same slots: resident units that still fit, then others. None if
    /// slots must change.
    fn keep_slots(&self, before: &Plan) -> Result<Option<Candidate>> {
        if before.compute != self.compute || before.mode != Mode::Tiered {
            return Ok(None);
        }
        if self.inputs.plan_options.mode != Mode::Tiered {
            return Ok(None);
        }
        if before.slots == 0 && self.shrinkable_slot_bytes()? != Some(0) {
            return Ok(None);
        }
        let slots_bytes = u64::from(before.slots).saturating_mul(before.slot_bytes);
        let room = self.dense_room().and_then(|room| room.checked_sub(slots_bytes));
        let Some(mut left) = room else { return Ok(None) };
        let compute_residency = self.compute.residency();
        let mut stays = filled(false, self.items.len())?;
        for (item, stays) in self.items.iter().zip(&mut stays) {
            if item.bytes > before.slot_bytes {
                let Some(less) = left.checked_sub(item.bytes) else { return Ok(None) };
                left = less;
                *stays = true;
            }
        }
        for was in [true, false] {
            let mut these: Vec<Item> = reserved(self.items.len())?;
            let open = self.items.iter().enumerate().filter(|(i, item)| {
                !stays[*i] && (before.residencies[item.unit] == compute_residency) == was
            });
            these.extend(open.map(|(i, item)| Item { unit: i, bytes: item.bytes }));
            let chosen = place(&these, left, self.inputs.plan_options.placement, Spread::Full)?;
            for (item, _) in these.iter().zip(chosen).filter(|(_, chosen)| *chosen) {
                left -= item.bytes;
                stays[item.unit] = true;
            }
        }
        Ok(Some(Candidate { stays, slots: before.slots, slot_bytes: before.slot_bytes }))
    }
}

// Figures: how the plan uses its budgets.

/// Figures that are subtracted from a budget.
struct BudgetUse {
    figures: Vec<Figure>,
    left: u64,
}

impl BudgetUse {
    fn take(&mut self, name: &'static str, bytes: u64, why: String) {
        if bytes > 0 {
            self.figures.push(Figure { name, bytes, takes: true, total: false, why });
            self.left = self.left.saturating_sub(bytes);
        }
    }

    fn end(mut self, name: &'static str) -> Vec<Figure> {
        let why = "no unit fits in the rest".to_string();
        self.figures.push(Figure { name, bytes: self.left, takes: false, total: true, why });
        self.figures
    }
}

impl Planner<'_> {
    /// Adds the figures of the plan, those of the device after its budget, then those of the host.
    pub(super) fn add_figures(&self, plan: &mut Plan) {
        let all = &self.budgets.figures;
        let host = all.iter().position(|figure| figure.name == "host free").unwrap_or(0);
        let mut figures = all[..host].to_vec();
        let floor = plan.floor(self.inputs.units);
        if plan.compute == ComputeLocation::Device {
            figures.append(&mut self.device_figures(plan));
            figures.extend(self.floor("device floor", floor.device_bytes, plan));
        }
        figures.extend_from_slice(&all[host..]);
        figures.append(&mut self.host_figures(plan));
        figures.extend(self.floor("host floor", floor.host_bytes, plan));
        let pageable = plan.host_bytes.saturating_sub(plan.pinned_bytes);
        if plan.compute == ComputeLocation::Device && pageable > 0 {
            let why = "of these, beyond the quota for locked memory: copies from there are slower";
            let (name, why) = ("pageable", why.to_string());
            figures.push(Figure { name, bytes: pageable, takes: false, total: false, why });
        }
        plan.figures = figures;
    }

    fn device_figures(&self, plan: &Plan) -> Vec<Figure> {
        let mut taken = BudgetUse { figures: Vec::new(), left: self.budgets.device_bytes };
        let UnitCount { units, bytes } = self.residencies(plan, Residency::Device, false);
        taken.take("device residents", bytes, format!("{units} units stay on the device"));
        let UnitCount { units, bytes } = self.residencies(plan, Residency::Device, true);
        let all = if units == self.experts.count { "all " } else { "" };
        taken.take("device experts", bytes, format!("{all}{units} experts stay on the device"));
        self.slots(plan, &mut taken);
        let mut figures = taken.end("device left");
        figures.extend(self.granularity_loss(plan));
        figures
    }

    /// Device memory lost to the granularity of units in place.
    fn granularity_loss(&self, plan: &Plan) -> Option<Figure> {
        let granularity = plan.device_granularity_bytes;
        let units = self.inputs.units.units.iter().zip(&plan.residencies);
        let residencies =
            units.filter(|(_, residency)| **residency == Residency::Device).map(|(unit, _)| {
                plan.footprint_bytes(unit.image_bytes, Residency::Device) - unit.image_bytes
            });
        let bytes = residencies.sum();
        let why = format!(
            "lost of the resident units: in place each takes whole pieces of {}, and no two share \
             one",
            size(granularity)
        );
        (granularity > 0).then_some(Figure {
            name: "device granules",
            bytes,
            takes: false,
            total: false,
            why,
        })
    }

    fn host_figures(&self, plan: &Plan) -> Vec<Figure> {
        let mut taken = BudgetUse { figures: Vec::new(), left: self.budgets.host_bytes };
        let why = "units of the layers that the processor computes";
        taken.take("processor", self.fixed(&self.processor_units), why.to_string());
        let why = "only rows are looked up in it: host memory is sufficient";
        taken.take("embedding", self.fixed(&self.looked_up), why.to_string());
        let UnitCount { units, bytes } = self.residencies(plan, Residency::Host, false);
        taken.take("host residents", bytes, format!("{units} units are resident here"));
        let UnitCount { units, bytes } = self.residencies(plan, Residency::Host, true);
        taken.take("host experts", bytes, format!("{units} experts are resident here"));
        if plan.compute == ComputeLocation::Host {
            self.slots(plan, &mut taken);
        }
        let chunk = size(plan.chunk_bytes);
        let why = format!("for reads to the device, in chunks of {chunk}");
        taken.take("staging", plan.staging_bytes, why);
        taken.end("host left")
    }

    /// Units of that residency, except units with reserved memory.
    fn residencies(&self, plan: &Plan, residency: Residency, experts: bool) -> UnitCount {
        let units = self.inputs.units.units.iter().enumerate();
        let these = units.filter(|(i, unit)| {
            let fixed = self.processor_units[*i] || self.looked_up[*i];
            !fixed && plan.residencies[*i] == residency && (unit.role == Role::Expert) == experts
        });
        these.fold(UnitCount::default(), |count, (_, unit)| UnitCount {
            units: count.units + 1,
            bytes: count.bytes + plan.footprint_bytes(unit.image_bytes, residency),
        })
    }

    fn fixed(&self, which: &[bool]) -> u64 {
        let units = self.inputs.units.units.iter().zip(which);
        units.filter(|(_, yes)| **yes).map(|(unit, _)| unit.image_bytes).sum()
    }
    fn slots(&self, plan: &Plan, taken: &mut BudgetUse) {
        let can_shrink = self.inputs.plan_options.can_shrink();
        for (is_expert, name, largest) in [
            (false, "slots", "the largest unit that passes through"),
            (true, "expert slots", "the largest expert"),
        ] {
            let (count, bytes) = match is_expert {
                false => (plan.slots, plan.slot_bytes),
                true => (plan.expert_slots, plan.expert_slot_bytes),
            };
            let why = match can_shrink {
                false => largest,
                true if self.all_resident(plan, is_expert) => {
                    "kept though all have room, so that memory can be given back"
                }
                true if is_expert => largest,
                true => "the size that lets most memory be given back",
            };
            let why = format!("{count} x {}, {why}", size(bytes));
            taken.take(name, u64::from(count) * bytes, why);
        }
    }

    /// Whether all of these units are resident where they are used.
    fn all_resident(&self, plan: &Plan, experts: bool) -> bool {
        let compute_residency = if plan.compute == ComputeLocation::Device {
            Residency::Device
        } else {
            Residency::Host
        };
        let items = if experts { &self.expert_items } else { &self.items };
        items.iter().all(|item| plan.residencies[item.unit] == compute_residency)
    }

    /// The least memory that the plan can shrink to, if it can shrink.
    fn floor(&self, name: &'static str, bytes: u64, plan: &Plan) -> Option<Figure> {
        let why = match name {
            _ if !self.inputs.plan_options.can_shrink() => return None,
            "host floor" if plan.compute == ComputeLocation::Device => {
                "what it can shrink to: staging, and units that are used there"
            }
            _ if plan.slots + plan.expert_slots == 0 => {
                "all of it: slots would need no less than the units"
            }
            _ => "what it can shrink to: slots, and units that fit in none",
        };
        let why = why.to_string();
        Some(Figure { name, bytes, takes: false, total: false, why })
    }
}
