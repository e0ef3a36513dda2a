//! A timeline of reads, copies and use of each unit, as a picture.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

use kvtier::stream::plan::Residency;
use kvtier::stream::scheduler::{Mark, Stage};
use kvtier::stream::streamer::Streamer;

use super::draw::{band, blocks, label, line};
use crate::lab::html::head;
use crate::lab::plot::{escape, step};

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 178.0;
const RIGHT: f64 = 34.0;
/// Vertical positions of the axis, of the lanes of all units, and of the rows of units.
const AXIS: f64 = 64.0;
const LANES: f64 = 84.0;
const LANE: f64 = 17.0;
const ROWS: f64 = LANES + 4.0 * LANE + 14.0;
/// Target height of all rows.
const ALL_ROWS: f64 = 420.0;
/// Smallest and largest height of a row.
const ROW: (f64, f64) = (12.0, 26.0);
/// Most units drawn; the first ones.
const MAX_ROWS: usize = 400;
/// Most passes drawn; the last ones. Marks of more passes would be too narrow.
const MAX_PASSES: usize = 2;
/// With more rows than this, the axis is repeated at the bottom.
const REPEAT_AXIS_ROWS: usize = 40;
/// Marks of one kind that are closer than this, in points, are merged.
const GAP: f64 = 0.15;
/// Most characters of a unit's name.
const MAX_NAME: usize = 24;

/// The style of a stage.
struct StageStyle {
    stage: Stage,
    name: &'static str,
    colour: &'static str,
    /// Position and height in a row, as shares of the row.
    top: f64,
    height: f64,
}

/// Styles with colours that the colour-blind can distinguish, above all compute and stall, which
/// are adjacent.
const STYLES: [StageStyle; 4] = [
    StageStyle { stage: Stage::Read, name: "read", colour: "#0072b2", top: 0.08, height: 0.26 },
    StageStyle {
        stage: Stage::Copy,
        name: "copy to the device",
        colour: "#009e73",
        top: 0.36,
        height: 0.24,
    },
    StageStyle { stage: Stage::Use, name: "compute", colour: "#e69f00", top: 0.62, height: 0.32 },
    StageStyle { stage: Stage::Wait, name: "stall", colour: "#9a1b00", top: 0.62, height: 0.32 },
];

/// The style sheet, so that the picture can be shown alone.
const STYLE: &str = "<style>
.k { font: 10px system-ui, 'DejaVu Sans', sans-serif; fill: #1d1d1f } .t { font-size: 14px }
.back { fill: #fff } .line { stroke: #d8d8dc } .pass { stroke: #77777c; stroke-dasharray: 4 3 }
.band { fill: #f4f4f6 }
@media (prefers-color-scheme: dark) {
  .k { fill: #e8e8ea } .back { fill: #1b1b1e } .line { stroke: #3c3c42 } .band { fill: #26262a }
}
</style>";

/// An interval of time.
struct Span {
    from_ns: u64,
    to_ns: u64,
}

impl Span {
    fn whole_ns(&self) -> u64 {
        (self.to_ns - self.from_ns).max(1)
    }

    fn x(&self, at_ns: u64) -> f64 {
        let part = at_ns.clamp(self.from_ns, self.to_ns) - self.from_ns;
        LEFT + part as f64 / self.whole_ns() as f64 * (WIDTH - LEFT - RIGHT)
    }
}

/// Merges intervals that overlap or are closer than `gap`.
fn joined(mut all: Vec<(f64, f64)>, gap: f64) -> Vec<(f64, f64)> {
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out: Vec<(f64, f64)> = Vec::new();
    for (from, to) in all {
        match out.last_mut() {
            Some(last) if from <= last.1 + gap => last.1 = last.1.max(to),
            _ => out.push((from, to)),
        }
    }
    out
}

fn residency_name(residency: Residency) -> &'static str {
    match residency {
        Residency::Device => "device",
        Residency::Host => "host",
        Residency::File => "file",
    }
}

/// Names and residency of units.
type Names = Vec<(String, &'static str)>;

/// A picture of the last passes.
pub struct Picture {
    title: String,
    names: Names,
    /// Numbers and begins of the drawn passes.
    begun: Vec<(usize, u64)>,
    span: Span,
    /// Intervals of each unit and stage, in points.
    stretches: BTreeMap<(u32, u32), Vec<(f64, f64)>>,
}

impl Picture {
    /// A picture of a model; `begun` has the begin of every pass.
    pub fn of(model: &str, streamer: &Streamer, begun: &[u64]) -> Picture {
        let (units, plan) = (&streamer.units().units, streamer.plan());
        let residencies = units.iter().zip(&plan.residencies);
        let names =
            residencies.map(|(unit, &at)| (unit.name.clone(), residency_name(at))).collect();
        Picture::new(model, names, streamer.marks(), begun)
    }

    fn new(model: &str, names: Names, mut marks: Vec<Mark>, all_begun: &[u64]) -> Picture {
        let drawn = all_begun.len().saturating_sub(MAX_PASSES);
        let mut begun: Vec<(usize, u64)> = (1..).zip(all_begun.iter().copied()).collect();
        begun.drain(..drawn);
        let from_ns = begun.first().map_or(0, |first| first.1);
        marks.retain(|mark| mark.end_ns >= from_ns && (mark.unit as usize) < names.len());
        let to_ns = marks.iter().map(|mark| mark.end_ns).max().unwrap_or(from_ns);
        // If older marks were dropped, the picture begins later.
        let first = marks.iter().map(|mark| mark.begin_ns).min().unwrap_or(from_ns);
        let span = Span { from_ns: first.clamp(from_ns, to_ns), to_ns };
        let mut stretches: BTreeMap<(u32, u32), Vec<(f64, f64)>> = BTreeMap::new();
        for mark in &marks {
            let of = stretches.entry((mark.unit, mark.stage as u32)).or_default();
            of.push((span.x(mark.begin_ns), span.x(mark.end_ns)));
        }
        for of in stretches.values_mut() {
            *of = joined(std::mem::take(of), GAP);
        }
        let which = match &begun[..] {
            [] => "no pass".to_string(),
            [(one, _)] => format!("pass {one} of {}", all_begun.len()),
            [(first, _), .., (last, _)] => {
                format!("passes {first} and {last} of {}", all_begun.len())
            }
        };
        let title = format!("{model}: where the time of {which} went");
        Picture { title, names, begun, span, stretches }
    }

    /// The intervals in which any unit was in a stage: the use of a link or of the engine.
    fn lane(&self, stage: Stage) -> Vec<(f64, f64)> {
        let of = self.stretches.iter().filter(|((_, of), _)| *of == stage as u32);
        joined(of.flat_map(|(_, all)| all.iter().copied()).collect(), 0.0)
    }

    /// The picture as SVG: lanes for links and engine, and a row for each unit with marks.
    pub fn svg(&self) -> String {
        let mut rows: Vec<u32> = self.stretches.keys().map(|(unit, _)| *unit).collect();
        rows.dedup();
        let left_out = rows.len().saturating_sub(MAX_ROWS);
        rows.truncate(MAX_ROWS);
        let row = (ALL_ROWS / rows.len().max(1) as f64).clamp(ROW.0, ROW.1);
        let bottom = ROWS + row * rows.len() as f64;
        let again = rows.len() > REPEAT_AXIS_ROWS;
        let height = bottom + if again { 34.0 } else { 10.0 };
        // Writing to a string cannot fail, here and below.
        let mut out = String::new();
        let title = escape(&self.title);
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             role=\"img\"><title>{title}</title>{STYLE}\
             <rect class=\"back\" width=\"{WIDTH}\" height=\"{height}\"/>\
             <text class=\"k t\" x=\"10\" y=\"19\">{title}</text>"
        );
        legend(&mut out);
        band(&mut out, WIDTH, LANES..LANES + 4.0 * LANE);
        let places = (0..rows.len()).map(|at| ROWS + row * at as f64);
        places.clone().step_by(2).for_each(|y| band(&mut out, WIDTH, y..y + row));
        self.axis(&mut out, bottom, again);
        self.lanes(&mut out);
        for (y, &unit) in places.zip(&rows) {
            self.row(&mut out, unit, y..y + row);
        }
        if left_out > 0 {
            let words = format!("and {left_out} more units");
            label(&mut out, (LEFT, bottom + 28.0), "start", &words);
        }
        out + "</svg>\n"
    }

    fn axis(&self, out: &mut String, bottom: f64, again: bool) {
        let whole_ms = self.span.whole_ns() as f64 / 1e6;
        let step = step(whole_ms / 10.0);
        label(out, (LEFT - 26.0, AXIS), "end", "time");
        for tick in 0..=(whole_ms / step) as u32 {
            let at_ms = f64::from(tick) * step;
            let x = self.span.x(self.span.from_ns + (at_ms * 1e6) as u64);
            let words = format!("{} ms", (at_ms * 1e6).round() / 1e6);
            line(out, "line", x, AXIS + 4.0..bottom);
            label(out, (x, AXIS), "middle", &words);
            if again {
                label(out, (x, bottom + 12.0), "middle", &words);
            }
        }
        let mut last = f64::NEG_INFINITY;
        for (number, at_ns) in &self.begun {
            let x = self.span.x(*at_ns);
            line(out, "pass", x, AXIS + 6.0..bottom);
            if x > last + 50.0 {
                label(out, (x + 3.0, AXIS + 15.0), "start", &format!("pass {number}"));
                last = x;
            }
        }
    }

    fn lanes(&self, out: &mut String) {
        let names = ["disk", "device link", "compute", "stall"];
        for (i, (style, name)) in STYLES.iter().zip(names).enumerate() {
            let y = LANES + LANE * i as f64;
            let lane = self.lane(style.stage);
            let busy = lane.iter().fold(0.0, |sum, (from, to)| sum + (to - from));
            let percent = busy / (WIDTH - LEFT - RIGHT) * 100.0;
            let name = format!("{name}: {percent:.0} % of the time");
            label(out, (LEFT - 6.0, y + 12.0), "end", &name);
            blocks(out, &lane, y + 2.0..y + LANE - 2.0, style.colour, &name);
        }
    }

    fn row(&self, out: &mut String, unit: u32, y: Range<f64>) {
        let Some((name, at)) = self.names.get(unit as usize) else { return };
        let row = y.end - y.start;
        let cut = if name.chars().count() > MAX_NAME { "…" } else { "" };
        let short: String = name.chars().take(MAX_NAME).collect();
        let words = format!("{short}{cut} ({at})");
        label(out, (LEFT - 6.0, y.start + row / 2.0 + 3.5), "end", &words);
        for style in &STYLES {
            let Some(all) = self.stretches.get(&(unit, style.stage as u32)) else { continue };
            let top = y.start + style.top * row;
            let words = format!("{name}: {}", style.name);
            blocks(out, all, top..top + style.height * row, style.colour, &words);
        }
    }
}

fn legend(out: &mut String) {
    let mut x = LEFT;
    for style in &STYLES {
        let _ = write!(
            out,
            "<rect x=\"{x}\" y=\"32\" width=\"16\" height=\"9\" fill=\"{}\"/>",
            style.colour
        );
        label(out, (x + 21.0, 40.0), "start", style.name);
        x += 60.0 + 6.0 * style.name.len() as f64;
    }
}

/// A page with the picture, the report and the plan.
pub fn page(picture: &Picture, report: &str, plan: &str) -> String {
    let about = "The lanes at the top show when each link and the engine were busy; a pass is \
                 bound by a lane that is always busy. Below there is a row for each unit, with its \
                 residency in brackets: when it was read from disk, copied to the device, used, \
                 and when the engine waited for it.";
    format!(
        "{}<style>main svg {{ max-width: none }} pre {{ overflow-x: auto }}</style>\
         <main>{}</main><h2>Passes</h2><pre>{}</pre><h2>Plan</h2><pre>{}</pre></html>\n",
        head(&escape(&picture.title), about),
        picture.svg(),
        escape(report),
        escape(plan)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: f64 = WIDTH - RIGHT;

    fn mark(stage: Stage, unit: u32, begin_ns: u64, end_ns: u64) -> Mark {
        Mark { stage, unit, begin_ns, end_ns }
    }

    fn drawn(units: usize, marks: Vec<Mark>, begun: &[u64]) -> Picture {
        let names = (0..units).map(|n| (format!("layer {n}"), "file")).collect();
        Picture::new("a & b", names, marks, begun)
    }

    /// All texts between `before` and `after`.
    fn between<'a>(text: &'a str, before: &str, after: &str) -> Vec<&'a str> {
        let found = text.split(before).skip(1);
        found.map(|rest| rest.split(after).next().expect("one")).collect()
    }

    #[test]
    fn adjacent_marks_are_merged() {
        let marks = vec![
            mark(Stage::Read, 1, 300, 400),
            mark(Stage::Read, 1, 0, 200),
            mark(Stage::Read, 1, 200, 300),
            mark(Stage::Read, 2, 0, 9),
            mark(Stage::Read, 1, 900, 1100),
        ];
        let picture = drawn(3, marks, &[100]);
        let found = &picture.stretches[&(1, Stage::Read as u32)];
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0, found[1].1), (LEFT, END));
        assert!(!picture.stretches.contains_key(&(1, Stage::Copy as u32)));
        // Marks that ended before the first drawn pass are left out.
        assert!(!picture.stretches.contains_key(&(2, Stage::Read as u32)));
    }

    #[test]
    fn lanes_count_overlapping_marks_once() {
        let marks = vec![
            mark(Stage::Read, 0, 0, 500),
            mark(Stage::Read, 1, 250, 750),
            mark(Stage::Use, 0, 500, 600),
            mark(Stage::Wait, 1, 600, 1000),
        ];
        let svg = drawn(2, marks, &[0]).svg();
        for words in ["disk: 75 %", "link: 0 %", "compute: 10 %", "stall: 40 %"] {
            assert!(svg.contains(words), "{words}: {svg}");
        }
    }

    #[test]
    fn the_last_passes_are_drawn_and_named() {
        let marks: Vec<Mark> = (0..8).map(|n| mark(Stage::Use, 0, n * 100, n * 100 + 50)).collect();
        let begun: Vec<u64> = (0..8).map(|n| n * 100).collect();
        let picture = drawn(1, marks.clone(), &begun);
        assert_eq!((picture.span.from_ns, picture.span.to_ns), (600, 750));
        let svg = picture.svg();
        assert!(svg.contains("a &amp; b: where the time of passes 7 and 8 of 8 went"), "{svg}");
        assert_eq!(between(&svg, ">pass ", "<"), ["7", "8"]);
        assert!(drawn(1, marks, &begun[..1]).title.contains("pass 1 of 1"));
        assert!(drawn(1, Vec::new(), &[]).svg().contains("no pass"));
    }

    #[test]
    fn labels_do_not_overlap() {
        for units in [1, 5, 200, 700u32] {
            let marks = (0..units).map(|n| mark(Stage::Read, n, 0, u64::from(n) + 1)).collect();
            let svg = drawn(units as usize, marks, &[0]).svg();
            let rows: Vec<f64> = between(&svg, "<text class=\"k\" x=\"172.0\" y=\"", "</text>")
                .into_iter()
                .filter(|text| text.contains("layer "))
                .map(|text| text.split('"').next().expect("one").parse().expect("a number"))
                .collect();
            assert_eq!(rows.len(), (units as usize).min(MAX_ROWS));
            assert!(rows.windows(2).all(|pair| pair[1] - pair[0] >= 12.0), "{units}");
            assert_eq!(svg.contains("and 300 more units"), units == 700);
        }
    }
}
