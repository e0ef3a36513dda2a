//! Plots as SVG text: line plots and bar plots.

use std::fmt::Write;

/// Colours that are distinct for the colour-blind; reused with dashes.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b"];
const DASHES: [&str; 3] = ["", "6 3", "2 3"];

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;

/// The colour of a series.
pub fn colour(series: usize) -> &'static str {
    COLOURS[series % COLOURS.len()]
}

/// The dash pattern of a series.
pub fn dash(series: usize) -> &'static str {
    DASHES[series / COLOURS.len() % DASHES.len()]
}

/// Text escaped for markup.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// An axis of a plot.
pub struct Axis {
    /// The title.
    pub title: &'static str,
    /// Whether the scale is logarithmic.
    pub log: bool,
    /// The lowest and the highest value.
    pub ends: (f64, f64),
}

impl Axis {
    /// An axis that covers values, and `from` if given.
    pub fn around(
        title: &'static str,
        log: bool,
        from: Option<f64>,
        values: impl Iterator<Item = f64>,
    ) -> Axis {
        let floor = if log { 1e-9 } else { f64::NEG_INFINITY };
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|v| v.is_finite()) {
            low = low.min(value.max(floor));
            high = high.max(value.max(floor));
        }
        if low > high {
            (low, high) = (1.0, 2.0);
        }
        if let Some(from) = from {
            low = low.min(from);
        }
        if low == high {
            high = if log { low * 2.0 } else { low + 1.0 };
        }
        Axis { title, log, ends: (low, high) }
    }

    /// The position of a value, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let (low, high) = self.ends;
        let share = match self.log {
            true => (value.max(low) / low).ln() / (high / low).ln(),
            false => (value - low) / (high - low),
        };
        share.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        let (low, high) = self.ends;
        if self.log {
            let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
            let steps: &[f64] = if high / low > 1e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let all = decades.flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)));
            return all.filter(|t| (low * 0.999..=high * 1.001).contains(t)).collect();
        }
        let step = step((high - low) / 5.0);
        let first = (low / step).ceil() as i64;
        (first..).map(|n| n as f64 * step).take_while(|t| *t <= high * 1.0001).take(20).collect()
    }
}

/// The smallest round step of an axis that is at least `rough`.
pub fn step(rough: f64) -> f64 {
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * unit).into_iter().find(|s| *s >= rough);
    step.unwrap_or(10.0 * unit)
}

fn label(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => {
            format!("{:.4}", value / 1e6).trim_end_matches('0').trim_end_matches('.').to_string()
                + "M"
        }
        v if v >= 1e4 => {
            format!("{:.2}", value / 1e3).trim_end_matches('0').trim_end_matches('.').to_string()
                + "k"
        }
        v if v >= 100.0 || v.fract() == 0.0 => format!("{value:.0}"),
        _ => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_string(),
    }
}

fn x_of(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)
}

fn y_of(axis: &Axis, value: f64) -> f64 {
    HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)
}

fn frame(out: &mut String, x: Option<&Axis>, y: &Axis) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let _ = write!(out, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
    for tick in y.ticks() {
        let at = y_of(y, tick);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            label(tick)
        );
    }
    let middle = (TOP + bottom) / 2.0;
    let _ = write!(
        out,
        "<text class=\"title\" transform=\"translate(14 {middle}) rotate(-90)\" \
         text-anchor=\"middle\">{}</text>",
        escape(y.title)
    );
    let Some(x) = x else { return };
    for tick in x.ticks() {
        let at = x_of(x, tick);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 16.0,
            label(tick)
        );
    }
    let _ = write!(
        out,
        "<text class=\"title\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 8.0,
        escape(x.title)
    );
}

/// A series of a line plot.
pub struct Series {
    /// Number of the series, which determines the colour.
    pub series: usize,
    /// The name.
    pub name: String,
    /// The points.
    pub points: Vec<(f64, f64)>,
}

/// A line plot.
pub fn lines(x: &Axis, y: &Axis, lines: &[Series]) -> String {
    let mut out = String::new();
    frame(&mut out, Some(x), y);
    for line in lines {
        let at = |&(a, b): &(f64, f64)| format!("{:.1},{:.1}", x_of(x, a), y_of(y, b));
        let points: Vec<String> = line.points.iter().map(at).collect();
        let (colour, dash) = (colour(line.series), dash(line.series));
        let _ = write!(
            out,
            "<polyline points=\"{}\" stroke=\"{colour}\" stroke-dasharray=\"{dash}\">\
             <title>{}</title></polyline>",
            points.join(" "),
            escape(&line.name)
        );
        for (point, (a, b)) in points.iter().zip(&line.points).filter(|_| points.len() <= 30) {
            let (cx, cy) = point.split_once(',').unwrap_or(("0", "0"));
            let _ = write!(
                out,
                "<circle cx=\"{cx}\" cy=\"{cy}\" r=\"3\" fill=\"{colour}\">\
                 <title>{}: {} at {}</title></circle>",
                escape(&line.name),
                label(*b),
                label(*a)
            );
        }
    }
    out + "</svg>"
}

/// A bar: number of the series (for the colour), value, tooltip.
pub type Bar = (usize, f64, String);

/// A bar plot with groups of bars.
pub fn bars(y: &Axis, groups: &[(String, Vec<Bar>)]) -> String {
    let mut out = String::new();
    frame(&mut out, None, y);
    let room = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let bottom = HEIGHT - BOTTOM;
    for (g, (name, bars)) in groups.iter().enumerate() {
        let start = LEFT + room * g as f64;
        let each = room * 0.86 / bars.len().max(1) as f64;
        for (i, (series, value, what)) in bars.iter().enumerate() {
            let (at, top) = (start + room * 0.07 + each * i as f64, y_of(y, *value));
            let _ = write!(
                out,
                "<rect x=\"{at:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
                 fill=\"{}\"><title>{}</title></rect>",
                (each - 1.0).max(0.5),
                (bottom - top).max(0.5),
                colour(*series),
                escape(what)
            );
        }
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            start + room / 2.0,
            bottom + 16.0,
            escape(name)
        );
    }
    out + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_numbers() {
        for (rough, expected) in [(0.7, 1.0), (1.0, 1.0), (13.0, 20.0), (410.0, 500.0)] {
            assert_eq!(step(rough), expected, "{rough}");
        }
    }
}
