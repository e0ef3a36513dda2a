//! A plan for people.

use std::fmt::Write;

use crate::stream::plan::runs::{Count, HOMES, Run, name_of};
use crate::stream::plan::{Binding, Forecast, Home, Inputs, Mode, Plan, Seat};
use crate::stream::units::Unit;

/// Runs that are listed.
const MAX_RUNS: usize = 256;
/// Where lines are broken.
const LINE_CHARS: usize = 92;

/// Bytes for people, to three figures or more.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut scaled = bytes as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < units.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{scaled:.2} {}", units[unit]) }
}

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

/// A name from a file, without what a terminal would act upon.
fn clean(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).take(64).collect()
}

/// `layer 3` as what counts and the count.
fn numbered(name: &str) -> Option<(&str, u32)> {
    let (stem, number) = name.rsplit_once(' ')?;
    Some((stem, number.parse().ok()?))
}

impl Plan {
    /// A table that a human reads.
    pub fn text(&self, inputs: &Inputs) -> String {
        let mut out = String::new();
        self.head_text(&mut out, inputs);
        self.figures_text(&mut out);
        self.homes_text(&mut out, inputs);
        self.runs_text(&mut out, inputs);
        self.slots_text(&mut out);
        self.hints_text(&mut out, inputs);
        match &self.forecast {
            None => out.push_str("forecast: none, as the links' rates are not known\n"),
            Some(forecast) => out.push_str(&forecast.text(self.seat)),
        }
        out
    }

    fn head_text(&self, out: &mut String, inputs: &Inputs) {
        let units = &inputs.units.units;
        let bytes: u64 = units.iter().fold(0, |sum, unit| sum.saturating_add(unit.image_bytes));
        let seat = if self.seat == Seat::Device { "a device" } else { "the processor" };
        let mode = if self.mode == Mode::Ring { "a ring of slots" } else { "tiers" };
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(out, "{} units, {}, for {seat}, {mode}\n", units.len(), size(bytes));
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

    fn homes_text(&self, out: &mut String, inputs: &Inputs) {
        let _ = writeln!(out, "\n{:<8}{:>7}{:>14}{:>9}{:>14}", "home", "units", "", "experts", "");
        for (home, name) in HOMES {
            let (dense, experts): (Count, Count) =
                (self.count(inputs, home, false), self.count(inputs, home, true));
            if home == Home::Device && self.seat == Seat::Host {
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
        let Some(one) = hints.first() else { return };
        let _ = writeln!(
            out,
            "processor: {better} of {} layers of host memory are done sooner where they are \
             (the first: {} against {} to send it)",
            hints.len(),
            time(one.in_place_ns),
            time(one.send_ns)
        );
    }
}

impl Run {
    /// `layer 3-5 host;`, or only `3-5 host;` where the last one named layers too.
    fn words(&self, units: &[Unit], last_stem: &str) -> String {
        let name = |i: usize| units.get(i).map_or("", |unit| unit.name.as_str());
        let home = name_of(self.home);
        let place = if self.on_processor { ", in place" } else { "" };
        let range = match (numbered(name(self.first)), numbered(name(self.last))) {
            (Some((a, from)), Some((b, to))) if a == b => {
                let stem = if a == last_stem { String::new() } else { format!("{} ", clean(a)) };
                if from == to { format!("{stem}{from}") } else { format!("{stem}{from}-{to}") }
            }
            _ if self.first == self.last => clean(name(self.first)),
            _ => format!("{} to {}", clean(name(self.first)), clean(name(self.last))),
        };
        format!("{range} {home}{place};")
    }
}

impl Forecast {
    /// A few lines that a human reads.
    pub fn text(&self, seat: Seat) -> String {
        let mut out = String::new();
        if self.pass_ns == 0 {
            return "forecast: nothing moves; what computing takes is not known\n".to_string();
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
        if seat == Seat::Device {
            let bytes = size(self.device_bytes);
            let _ = writeln!(out, "  device link {:>16}  {bytes}", time(self.device_ns));
        }
        let bytes = size(self.disk_bytes);
        let _ = writeln!(out, "  disk {:>23}  {bytes}", time(self.disk_ns));
        out
    }
}
