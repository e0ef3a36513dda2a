//! The quality under budgets as one self-contained page with plots.

use std::fmt::Write;

use super::super::html::{head, legend};
use super::super::plot::{Axis, Series, escape, lines};
use super::row::Row;

/// The coordinates of a row in a plot.
type Spot = fn(&Row) -> (f64, f64);

/// The page.
pub fn page(about: &str, rows: &[Row]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.point.policy.as_str()) {
            names.push(&row.point.policy);
        }
    }
    let mut out = head("Quality of sparse policies by token budget", about);
    let _ = write!(
        out,
        "<p>Bytes: the share of keys and values that are kept, or loaded for a step. If tokens are \
         evicted only after the prompt, tokens written since count, too. <b>full</b> uses all \
         tokens, <b>random</b> keeps random ones: a policy must be better than that.</p>"
    );
    legend(&mut out, &names);
    for of in rows.chunk_by(|a, b| a.model == b.model) {
        let model = of.first().map_or("", |row| row.model);
        let plots = Plots { names: &names, rows: of };
        let _ = write!(out, "<h2>{model}: right answers, by bytes</h2>");
        let restricted = |row: &Row| row.bytes() < 1.0;
        let y = ("right answers, %", false, Some(0.0));
        plots.draw(&mut out, "bytes, %", y, restricted, |row| {
            (100.0 * row.bytes(), 100.0 * row.recall())
        });
        let _ = write!(out, "<h2>{model}: perplexity of text after a prompt, by bytes</h2>");
        let restricted = |row: &Row| row.text_bytes() < 1.0;
        plots.draw(&mut out, "bytes, %", ("perplexity", true, None), restricted, |row| {
            (100.0 * row.text_bytes(), row.perplexity())
        });
        if of.iter().any(|row| row.prompt_seen() < 1.0) {
            let _ = write!(
                out,
                "<h2>{model}: perplexity in the prompt, by keys used to compute it</h2>"
            );
            let restricted = |row: &Row| row.prompt_seen() < 1.0;
            plots.draw(&mut out, "keys, %", ("perplexity", true, None), restricted, |row| {
                (100.0 * row.prompt_seen(), row.prompt_perplexity())
            });
        }
        table(&mut out, of);
    }
    out + "</html>\n"
}

/// The rows of a model.
struct Plots<'a> {
    /// All policies; their indices determine the colours.
    names: &'a [&'a str],
    rows: &'a [Row],
}

impl Plots<'_> {
    /// Draws the restricted policies as lines, and `full` as a horizontal line.
    fn draw(
        &self,
        out: &mut String,
        x: &'static str,
        (title, is_log, from): (&'static str, bool, Option<f64>),
        is_restricted: impl Fn(&Row) -> bool,
        spot: Spot,
    ) {
        let mut all = Vec::new();
        for (series, name) in self.names.iter().enumerate() {
            let of = self.rows.iter().filter(|row| row.point.policy == *name);
            let mut points: Vec<(f64, f64)> =
                of.filter(|row| is_restricted(row)).map(spot).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            all.push(Series { series, name: name.to_string(), points });
        }
        let places = all.iter().flat_map(|line| &line.points).map(|point| point.0);
        let x = Axis::around(x, true, None, places.chain([100.0]));
        if let Some(full) = self.rows.iter().find(|row| row.point.policy == "full") {
            let height = spot(full).1;
            let ends = vec![(x.ends.0, height), (100.0, height)];
            all.insert(0, Series { series: 0, name: "full".to_string(), points: ends });
        }
        let heights = || all.iter().flat_map(|line| &line.points).map(|point| point.1);
        let (low, high) =
            heights().fold((f64::INFINITY, 0.0_f64), |(a, b), x| (a.min(x), b.max(x)));
        // A logarithmic scale over a small range would have hardly any ticks.
        let y = Axis::around(title, is_log && high > 8.0 * low, from, heights());
        out.push_str(&lines(&x, &y, &all));
    }
}

fn table(out: &mut String, rows: &[Row]) {
    out.push_str(
        "<div class=\"wide\"><table><tr><th>policy<th>budget<th>right answers<th>95 % between\
         <th>bytes<th>perplexity<th>bytes<th>in prompts<th>keys of prompts</tr>",
    );
    for row in rows {
        let (low, high) = row.interval();
        let _ = write!(
            out,
            "<tr><td title=\"{}\">{}<td>{}<td>{:.1}%<td>{:.1}% and {:.1}%<td>{:.1}%<td>{:.3}\
             <td>{:.1}%<td>{:.3}<td>{:.1}%</tr>",
            escape(&row.point.spec),
            escape(&row.point.policy),
            row.budget(),
            100.0 * row.recall(),
            100.0 * low,
            100.0 * high,
            100.0 * row.bytes(),
            row.perplexity(),
            100.0 * row.text_bytes(),
            row.prompt_perplexity(),
            100.0 * row.prompt_seen(),
        );
    }
    out.push_str("</table></div>");
}
