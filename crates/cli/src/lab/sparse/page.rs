//! What a budget costs as one page with plots, whole in itself.

use std::fmt::Write;

use super::super::html::{head, legend};
use super::super::plot::{Axis, Line, escape, lines};
use super::row::Row;

/// What a plot shows of a row: where it stands, and how high.
type Spot = fn(&Row) -> (f64, f64);

/// The page.
pub fn page(about: &str, rows: &[Row]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.point.policy.as_str()) {
            names.push(&row.point.policy);
        }
    }
    let mut out = head("What a budget of tokens costs", about);
    let _ = write!(
        out,
        "<p>Bytes: keys and values that stay, or that are loaded for a step, of all. Where tokens \
         go only behind the prompt, those written since count. <b>full</b> has everything, \
         <b>random</b> keeps tokens by chance: what does no better is worth nothing.</p>"
    );
    legend(&mut out, &names);
    for of in rows.chunk_by(|a, b| a.model == b.model) {
        let model = of.first().map_or("", |row| row.model);
        let plots = Plots { names: &names, rows: of };
        let _ = write!(out, "<h2>{model}: questions that are answered, by bytes</h2>");
        let restricted = |row: &Row| row.bytes() < 1.0;
        let y = ("right answers, %", false, Some(0.0));
        plots.draw(&mut out, "bytes, %", y, restricted, |row| {
            (100.0 * row.bytes(), 100.0 * row.recall())
        });
        let _ = write!(out, "<h2>{model}: perplexity of text behind a prompt, by bytes</h2>");
        let restricted = |row: &Row| row.text_bytes() < 1.0;
        plots.draw(&mut out, "bytes, %", ("perplexity", true, None), restricted, |row| {
            (100.0 * row.text_bytes(), row.perplexity())
        });
        if of.iter().any(|row| row.prompt_seen() < 1.0) {
            let _ = write!(
                out,
                "<h2>{model}: perplexity in the prompt, by the keys it is computed with</h2>"
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
    /// All policies: their places are their colours.
    names: &'a [&'a str],
    rows: &'a [Row],
}

impl Plots<'_> {
    /// Lines of those that are restricted, and of `full` all along them.
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
            all.push(Line { series, name: name.to_string(), points });
        }
        let places = all.iter().flat_map(|line| &line.points).map(|point| point.0);
        let x = Axis::around(x, true, None, places.chain([100.0]));
        if let Some(full) = self.rows.iter().find(|row| row.point.policy == "full") {
            let height = spot(full).1;
            let ends = vec![(x.ends.0, height), (100.0, height)];
            all.insert(0, Line { series: 0, name: "full".to_string(), points: ends });
        }
        let heights = || all.iter().flat_map(|line| &line.points).map(|point| point.1);
        let (low, high) =
            heights().fold((f64::INFINITY, 0.0_f64), |(a, b), x| (a.min(x), b.max(x)));
        // Between neighbours a scale of factors has hardly a mark.
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
