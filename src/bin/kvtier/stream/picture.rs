//! What happened to each unit when, as a picture.

use std::fmt::Write;

use kvtier::stream::core::{Mark, Stage};
use kvtier::stream::plan::Home;
use kvtier::stream::streamer::Streamer;

use crate::lab::html::head;
use crate::lab::plot::escape;

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 150.0;
const TOP: f64 = 44.0;
const ROW: f64 = 12.0;
/// Units that are drawn; of more, those that come first.
const MAX_ROWS: usize = 400;
/// Marks of one kind that are closer than this, in points, are drawn as one.
const GAP: f64 = 0.15;

/// What each stage is called, its colour, and where in a row it is.
const STAGES: [(Stage, &str, &str, f64, f64); 4] = [
    (Stage::Read, "read", "#0072b2", 1.0, 3.0),
    (Stage::Copy, "copy to the device", "#009e73", 4.0, 3.0),
    (Stage::Use, "compute", "#e69f00", 7.0, 4.0),
    (Stage::Wait, "wait", "#d55e00", 7.0, 4.0),
];

/// Own colours, so that it can be looked at alone.
const STYLE: &str = "<style>
.k { font: 10px system-ui, sans-serif; fill: #1d1d1f } .back { fill: #fff } .line { stroke: #d8d8dc }
@media (prefers-color-scheme: dark) {
  .k { fill: #e8e8ea } .back { fill: #1b1b1e } .line { stroke: #3c3c42 }
}
</style>";

/// From when to when.
struct Span {
    from_ns: u64,
    to_ns: u64,
}

impl Span {
    fn x(&self, at_ns: u64) -> f64 {
        let whole = (self.to_ns - self.from_ns).max(1) as f64;
        let part = at_ns.clamp(self.from_ns, self.to_ns) - self.from_ns;
        LEFT + part as f64 / whole * (WIDTH - LEFT - 10.0)
    }
}

/// The marks of a unit in a stage as stretches of the picture.
fn stretches(marks: &[Mark], span: &Span, unit: u32, stage: Stage) -> Vec<(f64, f64)> {
    let mine = marks.iter().filter(|mark| mark.unit == unit && mark.stage == stage);
    let mut all: Vec<(f64, f64)> =
        mine.map(|mark| (span.x(mark.begin_ns), span.x(mark.end_ns))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out: Vec<(f64, f64)> = Vec::new();
    for (from, to) in all {
        match out.last_mut() {
            Some(last) if from <= last.1 + GAP => last.1 = last.1.max(to),
            _ => out.push((from, to)),
        }
    }
    out
}

fn legend(out: &mut String) {
    for (i, (_, name, colour, ..)) in STAGES.iter().enumerate() {
        let x = LEFT + 160.0 * i as f64;
        // Writing to a string cannot fail, here and below.
        let _ = write!(
            out,
            "<rect x=\"{x}\" y=\"6\" width=\"14\" height=\"8\" fill=\"{colour}\"/>\
             <text class=\"k\" x=\"{}\" y=\"14\">{name}</text>",
            x + 19.0
        );
    }
}

fn axis(out: &mut String, span: &Span, bottom: f64) {
    let whole_ms = (span.to_ns - span.from_ns).max(1) as f64 / 1e6;
    let rough = whole_ms / 10.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * unit).into_iter().find(|s| *s >= rough);
    let step = step.unwrap_or(unit);
    for tick in 0..=(whole_ms / step) as u32 {
        let at_ms = f64::from(tick) * step;
        let x = span.x(span.from_ns + (at_ms * 1e6) as u64);
        let _ = write!(
            out,
            "<line class=\"line\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{bottom}\"/>\
             <text class=\"k\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{} ms</text>",
            TOP - 4.0,
            TOP - 8.0,
            (at_ms * 1000.0).round() / 1000.0
        );
    }
}

fn home(home: Home) -> &'static str {
    match home {
        Home::Device => "device",
        Home::Host => "host",
        Home::File => "file",
    }
}

/// A row for each unit, from a moment on; the units that something happened to.
pub fn svg(streamer: &Streamer, from_ns: u64) -> String {
    let mut marks = streamer.marks();
    marks.retain(|mark| mark.end_ns >= from_ns);
    let to_ns = marks.iter().map(|mark| mark.end_ns).max().unwrap_or(from_ns + 1);
    // Where older marks have been dropped, the picture begins later.
    let first = marks.iter().map(|mark| mark.begin_ns).min().unwrap_or(from_ns);
    let span = Span { from_ns: first.max(from_ns).min(to_ns - 1), to_ns };
    let (units, plan) = (&streamer.units().units, streamer.plan());
    let mut rows: Vec<u32> = marks.iter().map(|mark| mark.unit).collect();
    rows.sort_unstable();
    rows.dedup();
    let left_out = rows.len().saturating_sub(MAX_ROWS);
    rows.truncate(MAX_ROWS);
    let bottom = TOP + ROW * rows.len() as f64;
    let height = bottom + if left_out > 0 { 24.0 } else { 6.0 };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\
         {STYLE}<rect class=\"back\" width=\"{WIDTH}\" height=\"{height}\"/>"
    );
    legend(&mut out);
    axis(&mut out, &span, bottom);
    for (row, &unit) in rows.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let name = units.get(unit as usize).map_or("", |unit| unit.name.as_str());
        let place = plan.homes.get(unit as usize).map_or("", |&at| home(at));
        let short: String = name.chars().take(20).collect();
        let _ = write!(
            out,
            "<text class=\"k\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{} ({place})</text>",
            LEFT - 6.0,
            y + 9.5,
            escape(&short)
        );
        for (stage, what, colour, down, height) in STAGES {
            for (from, to) in stretches(&marks, &span, unit, stage) {
                let _ = write!(
                    out,
                    "<rect x=\"{from:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{height}\" \
                     fill=\"{colour}\"><title>{}: {what}</title></rect>",
                    y + down,
                    (to - from).max(0.3),
                    escape(name)
                );
            }
        }
    }
    if left_out > 0 {
        let _ = write!(
            out,
            "<text class=\"k\" x=\"{LEFT}\" y=\"{:.1}\">and {left_out} units more</text>",
            bottom + 16.0
        );
    }
    out + "</svg>\n"
}

/// The picture with what it comes to in words.
pub fn page(title: &str, streamer: &Streamer, from_ns: u64, words: &str) -> String {
    let about = "A row for each unit that something happened to: what was read, copied, computed \
                 with and waited for. In brackets its home.";
    format!(
        "{}<style>main svg {{ max-width: none }} pre {{ overflow-x: auto }}</style>\
         <main>{}</main><h2>Passes</h2><pre>{}</pre><h2>Plan</h2><pre>{}</pre></html>\n",
        head(&escape(title), about),
        svg(streamer, from_ns),
        escape(words),
        escape(&streamer.plan_text())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_that_touch_are_one_stretch() {
        let span = Span { from_ns: 100, to_ns: 1100 };
        let mark = |unit, begin_ns, end_ns| Mark { stage: Stage::Read, unit, begin_ns, end_ns };
        let marks = [
            mark(1, 300, 400),
            mark(1, 0, 200),
            mark(1, 200, 300),
            mark(2, 0, 9),
            mark(1, 900, 2000),
        ];
        let found = stretches(&marks, &span, 1, Stage::Read);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0, found[1].1), (LEFT, WIDTH - 10.0));
        assert!(stretches(&marks, &span, 1, Stage::Copy).is_empty());
    }
}
