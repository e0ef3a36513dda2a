//! A plan as text and as JSON.

use std::fmt::Write;

use crate::base::json_out::Json;
use crate::stream::plan::{
    Binding, ComputeLocation, Forecast, Inputs, Mode, Plan, Residency, UnitCount, size,
};
use crate::stream::units::{Role, Unit};

/// Most runs of units that are listed.
const MAX_RUNS: usize = 256;
/// Width of a line, in characters.
const LINE_CHARS: usize = 92;

fn time(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

impl Binding {
    fn words(self) -> &'static str {
        match self {
            Binding::Compute => "computing",
            Binding::Device => "the device link",
            Binding::Disk => "the disk",
        }
    }
}

/// A name from a file, without control characters.
fn clean(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).take(64).collect()
}

/// Splits `layer 3` into name and number.
fn numbered(name: &str) -> Option<(&str, u32)> {
    let (stem, number) = name.rsplit_once(' ')?;
    Some((stem, number.parse().ok()?))
}

impl Plan {
    /// The plan as a table.
    pub fn text(&self, inputs: &Inputs) -> String {
        let mut out = String::new();
        self.head_text(&mut out, inputs);
        self.figures_text(&mut out);
        self.residencies_text(&mut out, inputs);
        self.runs_text(&mut out, inputs);
        self.slots_text(&mut out);
        self.hints_text(&mut out, inputs);
        match &self.forecast {
            None => out.push_str("forecast: none, since link rates are not known\n"),
            Some(forecast) => out.push_str(&forecast.text(self.compute)),
        }
        out
    }

    fn head_text(&self, out: &mut String, inputs: &Inputs) {
        let units = &inputs.units.units;
        let bytes: u64 = units.iter().fold(0, |sum, unit| sum.saturating_add(unit.image_bytes));
        let compute =
            if self.compute == ComputeLocation::Device { "a device" } else { "the processor" };
        let mode = if self.mode == Mode::Ring { "a ring of slots" } else { "tiers" };
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "{} units, {}, for {compute}, {mode}\n", units.len(), size(bytes));
    }

    fn figures_text(&self, out: &mut String) {
        for figure in &self.figures {
            let sign = match (figure.total, figure.takes) {
                (true, _) => '=',
                (_, true) => '-',
                _ if figure.name.ends_with("free") => '+',
                _ => ' ',
            };
            let size = size(figure.bytes);
            let _ = writeln!(out, "{sign} {:<17}{size:>12}  {}", figure.name, figure.why);
            if figure.total {
                out.push('\n');
            }
        }
    }

    fn residencies_text(&self, out: &mut String, inputs: &Inputs) {
        let _ =
            writeln!(out, "\n{:<8}{:>7}{:>14}{:>9}{:>14}", "resident", "units", "", "experts", "");
        for (residency, name) in RESIDENCIES {
            let (dense, experts): (UnitCount, UnitCount) =
                (self.count(inputs, residency, false), self.count(inputs, residency, true));
            if residency == Residency::Device && self.compute == ComputeLocation::Host {
                continue;
            }
            let (bytes, expert_bytes) = (size(dense.bytes), size(experts.bytes));
            let (units, experts) = (dense.units, experts.units);
            let _ = writeln!(out, "{name:<8}{units:>7}{bytes:>14}{experts:>9}{expert_bytes:>14}");
        }
        let pinned = size(self.pinned_bytes);
        let (device, host) = (size(self.device_bytes), size(self.host_bytes));
        let _ =
            writeln!(out, "takes {device} of the device, {host} of the host ({pinned} pinned)\n");
    }

    fn runs_text(&self, out: &mut String, inputs: &Inputs) {
        let runs = self.runs(inputs);
        let units = &inputs.units.units;
        let (mut line, mut last_stem) = (0, "");
        for run in runs.iter().take(MAX_RUNS) {
            let mut words = run.words(units, last_stem);
            last_stem = units.get(run.last).and_then(|u| numbered(&u.name)).map_or("", |n| n.0);
            if line + words.len() > LINE_CHARS {
                out.push('\n');
                line = 0;
            } else if line > 0 {
                words.insert(0, ' ');
            }
            line += words.len();
            out.push_str(&words);
        }
        if runs.len() > MAX_RUNS {
            let _ = write!(out, " and {} more", runs.len() - MAX_RUNS);
        }
        out.push('\n');
    }

    fn slots_text(&self, out: &mut String) {
        let slots = [
            ("slots", self.slots, self.slot_bytes),
            ("expert slots", self.expert_slots, self.expert_slot_bytes),
        ];
        out.push('\n');
        for (name, count, bytes) in slots {
            if count > 0 {
                let _ = writeln!(out, "{name}: {count} x {}", size(bytes));
            }
        }
        if self.staging_bytes > 0 {
            let (staging, chunk) = (size(self.staging_bytes), size(self.chunk_bytes));
            let _ = writeln!(out, "staging: {staging} in chunks of {chunk}");
        }
    }

    fn hints_text(&self, out: &mut String, inputs: &Inputs) {
        let hints = self.processor_hint(inputs);
        let better = hints.iter().filter(|hint| hint.in_place).count();
        let Some(first) = hints.first() else { return };
        let _ = writeln!(
            out,
            "processor: {better} of {} layers in host memory are computed sooner by the processor \
             (the first: {} against {} to copy it)",
            hints.len(),
            time(first.in_place_ns),
            time(first.send_ns)
        );
    }
}

impl UnitRun {
    /// `layer 3-5 host;`, or `3-5 host;` if the run before was of layers, too.
    fn words(&self, units: &[Unit], last_stem: &str) -> String {
        let name = |i: usize| units.get(i).map_or("", |unit| unit.name.as_str());
        let residency = name_of(self.residency);
        let place = if self.on_processor { ", in place" } else { "" };
        let range = match (numbered(name(self.first)), numbered(name(self.last))) {
            (Some((a, from)), Some((b, to))) if a == b => {
                let stem = if a == last_stem { String::new() } else { format!("{} ", clean(a)) };
                if from == to { format!("{stem}{from}") } else { format!("{stem}{from}-{to}") }
            }
            _ if self.first == self.last => clean(name(self.first)),
            _ => format!("{} to {}", clean(name(self.first)), clean(name(self.last))),
        };
        format!("{range} {residency}{place};")
    }
}

impl Forecast {
    /// The forecast as text.
    pub fn text(&self, compute: ComputeLocation) -> String {
        let mut out = String::new();
        if self.pass_ns == 0 {
            return "forecast: no bytes move, and compute times are not known\n".to_string();
        }
        let _ = writeln!(
            out,
            "forecast: {} a pass, {:.3} tokens/s; the first pass {}; at least {}, bound by {}",
            time(self.pass_ns),
            self.tokens_per_s(),
            time(self.first_ns),
            time(self.bound_ns),
            self.binding.words()
        );
        let _ = writeln!(out, "  compute {:>20}", time(self.compute_ns));
        if compute == ComputeLocation::Device {
            let bytes = size(self.device_bytes);
            let _ = writeln!(out, "  device link {:>16}  {bytes}", time(self.device_ns));
        }
        let bytes = size(self.disk_bytes);
        let _ = writeln!(out, "  disk {:>23}  {bytes}", time(self.disk_ns));
        out
    }
}

// JSON.

impl Plan {
    /// The plan as one JSON object.
    pub fn json(&self, inputs: &Inputs) -> String {
        let mut json = Json::default();
        json.object(|json| {
            json.key("compute").text(if self.compute == ComputeLocation::Device {
                "device"
            } else {
                "host"
            });
            json.key("mode").text(if self.mode == Mode::Ring { "ring" } else { "tiered" });
            json.key("residency").object(|json| self.residencies_json(json, inputs));
            json.key("runs").list(|json| self.runs_json(json, inputs));
            for (name, count, bytes) in [
                ("slots", self.slots, self.slot_bytes),
                ("expert_slots", self.expert_slots, self.expert_slot_bytes),
            ] {
                json.key(name).object(|json| {
                    json.key("count").whole(count);
                    json.key("slot_bytes").whole(bytes);
                });
            }
            json.key("staging_bytes").whole(self.staging_bytes);
            json.key("chunk_bytes").whole(self.chunk_bytes);
            json.key("device_bytes").whole(self.device_bytes);
            json.key("host_bytes").whole(self.host_bytes);
            json.key("pinned_bytes").whole(self.pinned_bytes);
            json.key("figures").list(|json| self.figures_json(json));
            json.key("hints").list(|json| self.hints_json(json, inputs));
            json.key("forecast");
            match &self.forecast {
                None => json.null(),
                Some(forecast) => forecast.json(json),
            }
        });
        json.into_text()
    }

    fn residencies_json(&self, json: &mut Json, inputs: &Inputs) {
        for (residency, name) in RESIDENCIES {
            json.key(name).object(|json| {
                let (dense, experts) =
                    (self.count(inputs, residency, false), self.count(inputs, residency, true));
                json.key("units").whole(dense.units);
                json.key("bytes").whole(dense.bytes);
                json.key("experts").whole(experts.units);
                json.key("expert_bytes").whole(experts.bytes);
            });
        }
    }

    fn runs_json(&self, json: &mut Json, inputs: &Inputs) {
        for run in self.runs(inputs) {
            json.object(|json| {
                json.key("first").whole(run.first as u64);
                json.key("last").whole(run.last as u64);
                json.key("residency").text(name_of(run.residency));
                json.key("on_processor").flag(run.on_processor);
            });
        }
    }

    fn figures_json(&self, json: &mut Json) {
        for figure in &self.figures {
            json.object(|json| {
                json.key("name").text(figure.name);
                json.key("bytes").whole(figure.bytes);
                json.key("takes").flag(figure.takes);
                json.key("total").flag(figure.total);
                json.key("why").text(&figure.why);
            });
        }
    }

    fn hints_json(&self, json: &mut Json, inputs: &Inputs) {
        for hint in self.processor_hint(inputs) {
            json.object(|json| {
                json.key("unit").whole(hint.unit);
                json.key("in_place_ns").whole(hint.in_place_ns);
                json.key("send_ns").whole(hint.send_ns);
                json.key("in_place").flag(hint.in_place);
            });
        }
    }
}

impl Binding {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Binding::Compute => "compute",
            Binding::Device => "device",
            Binding::Disk => "disk",
        }
    }
}

impl Forecast {
    /// Writes the forecast as an object.
    pub fn json(&self, json: &mut Json) {
        json.object(|json| {
            json.key("pass_ns").whole(self.pass_ns);
            json.key("first_ns").whole(self.first_ns);
            json.key("bound_ns").whole(self.bound_ns);
            json.key("compute_ns").whole(self.compute_ns);
            json.key("device_ns").whole(self.device_ns);
            json.key("disk_ns").whole(self.disk_ns);
            json.key("device_bytes").whole(self.device_bytes);
            json.key("disk_bytes").whole(self.disk_bytes);
            json.key("binding").text(self.binding.name());
            json.key("tokens_per_s").real(self.tokens_per_s());
        });
    }
}

// Runs: consecutive units of the same residency.

/// A run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitRun {
    /// The first unit.
    pub first: usize,
    /// The last unit.
    pub last: usize,
    /// Their residency.
    pub residency: Residency,
    /// They are used in host memory.
    pub on_processor: bool,
}

pub(super) const RESIDENCIES: [(Residency, &str); 3] =
    [(Residency::Device, "device"), (Residency::Host, "host"), (Residency::File, "file")];

pub(super) fn name_of(residency: Residency) -> &'static str {
    RESIDENCIES.iter().find(|(one, _)| *one == residency).map_or("", |(_, name)| name)
}

impl Plan {
    /// The runs, without experts: those would be most of the list.
    pub(super) fn runs(&self, inputs: &Inputs) -> Vec<UnitRun> {
        let mut runs: Vec<UnitRun> = Vec::new();
        let units = inputs.units.units.iter().zip(&self.residencies).zip(&self.on_processor);
        for (i, ((unit, &residency), &on_processor)) in units.enumerate() {
            if unit.role == Role::Expert {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.residency == residency && run.on_processor == on_processor => {
                    run.last = i
                }
                _ => runs.push(UnitRun { first: i, last: i, residency, on_processor }),
            }
        }
        runs
    }
}
