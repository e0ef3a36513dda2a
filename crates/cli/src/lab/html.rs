//! The results of a comparison as one self-contained page with plots.

use std::fmt::Write;

use kvtier::trace::report::Report;
use kvtier::trace::requests::Trace;

use super::compare::Run;
use super::plot::{Axis, Series, bars, colour, dash, escape, lines};
use super::table::time;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1d1d1f; --back: #fff; --faint: #d8d8dc; --soft: #f4f4f6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --back: #1b1b1e; --faint: #3c3c42; --soft: #26262a }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
       max-width: 1080px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .3em }
p { margin: .3em 0 .8em }
svg { width: 100%; max-width: 860px; display: block }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) }
svg .title { font-size: 12px } svg .grid { stroke: var(--faint); stroke-width: 1 }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; margin: .4em 0 }
.legend svg { width: 28px; height: 10px; display: inline-block; margin-right: .4em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid var(--faint);
         white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { background: var(--soft) }
td.best { font-weight: 700 }
";

/// The head of a page.
pub fn head(title: &str, about: &str) -> String {
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}</style>\
         <h1>{title}</h1><p>{}</p>",
        escape(about)
    )
}

/// The legend of all plots.
pub fn legend(out: &mut String, names: &[&str]) {
    out.push_str("<div class=\"legend\">");
    for (i, name) in names.iter().enumerate() {
        let _ = write!(
            out,
            "<span><svg viewBox=\"0 0 28 10\"><line x1=\"0\" x2=\"28\" y1=\"5\" y2=\"5\" \
             stroke=\"{}\" stroke-dasharray=\"{}\" stroke-width=\"3\"/></svg>{}</span>",
            colour(i),
            dash(i),
            escape(name)
        );
    }
    out.push_str("</div>");
}

struct Page<'a> {
    runs: &'a [Run],
    specs: Vec<&'a str>,
    sizes: Vec<u64>,
    uniques: usize,
}

/// The page.
pub fn page(about: &str, runs: &[Run], trace: &Trace) -> String {
    let mut page =
        Page { runs, specs: Vec::new(), sizes: Vec::new(), uniques: trace.uniques().max(1) };
    for run in runs {
        let r = &run.estimate.report;
        if !page.specs.contains(&r.spec.as_str()) {
            page.specs.push(&r.spec);
        }
        if !page.sizes.contains(&r.capacity_blocks) {
            page.sizes.push(r.capacity_blocks);
        }
    }
    let mut out = head("Eviction policies compared", about);
    legend(&mut out, &page.specs);
    page.misses(&mut out);
    page.table(&mut out);
    page.tiers(&mut out);
    page.decisions(&mut out);
    page.fairness(&mut out);
    page.timelines(&mut out);
    out + "</html>\n"
}

impl<'a> Page<'a> {
    fn series(&self, report: &Report) -> usize {
        self.specs.iter().position(|s| *s == report.spec).unwrap_or(0)
    }

    fn reports(&self) -> impl Iterator<Item = &'a Report> + use<'a> {
        self.runs.iter().map(|run| &run.estimate.report)
    }

    fn size_name(&self, blocks: u64) -> String {
        format!("{blocks} blocks ({:.3}%)", 100.0 * blocks as f64 / self.uniques as f64)
    }

    fn misses(&self, out: &mut String) {
        let all = || self.reports();
        let line = |(series, spec): (usize, &&str)| {
            let of = all().filter(|r| r.spec == **spec);
            let mut points: Vec<(f64, f64)> =
                of.map(|r| (r.capacity_blocks as f64, 100.0 * r.token_miss_ratio())).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Series { series, name: spec.to_string(), points }
        };
        let curves: Vec<Series> = self.specs.iter().enumerate().map(line).collect();
        let floor = all().next().map_or(0.0, |r| 100.0 * r.token_floor());
        let x = Axis::around("blocks", true, None, self.sizes.iter().map(|&s| s as f64));
        let values = all().map(|r| 100.0 * r.token_miss_ratio());
        let y = Axis::around("tokens to compute, %", false, Some(floor), values);
        let _ = write!(
            out,
            "<h2>Tokens to compute, by size</h2><p>Lower is better. With an unbounded cache \
             {floor:.2} % remain, the bottom of the plot.</p>{}",
            lines(&x, &y, &curves)
        );
    }

    fn table(&self, out: &mut String) {
        out.push_str(
            "<h2>Numbers</h2><div class=\"wide\"><table><tr><th>policy<th>blocks<th>tokens \
             missed<th>cost missed<th>blocks missed<th>computed again<th>fair to \
             sessions<th>fair to tenants<th>in use<th>evictions<th>p50<th>p99<th>max</tr>",
        );
        for r in self.reports() {
            let same = self.reports().filter(|o| o.capacity_blocks == r.capacity_blocks);
            let best = same.map(Report::token_miss_ratio).fold(f64::INFINITY, f64::min);
            let class = if r.token_miss_ratio() == best { " class=\"best\"" } else { "" };
            let _ = write!(
                out,
                "<tr><td>{}<td>{}<td{class}>{:.2}%<td>{:.2}%<td>{:.2}%<td>{:.2}%<td>{:.3}<td>{:.3}\
                 <td>{:.1}%<td>{}<td>{}<td>{}<td>{}</tr>",
                escape(&r.spec),
                r.capacity_blocks,
                100.0 * r.token_miss_ratio(),
                100.0 * r.cost_miss_ratio(),
                100.0 * r.block_miss_ratio(),
                100.0 * r.re_prefill_rate,
                r.session_fairness,
                r.tenant_fairness,
                100.0 * r.utilisation,
                r.evictions,
                time(r.decision.quantile_ns(0.5)),
                time(r.decision.quantile_ns(0.99)),
                time(r.decision.max_ns()),
            );
        }
        out.push_str("</table></div>");
    }

    fn tiers(&self, out: &mut String) {
        if !self.runs.iter().any(|run| run.tiered) {
            return;
        }
        out.push_str(
            "<h2>Tiers</h2><p>Lost: additional work compared with a first tier of unbounded size. \
             For each tier: tokens served, bytes read and bytes written.</p>\
             <div class=\"wide\"><table><tr><th>policy<th>first token, \
             mean<th>p50<th>p99<th>lost<th>tiers</tr>",
        );
        for run in self.runs {
            let e = &run.estimate;
            let share = |tokens: u64| 100.0 * tokens as f64 / e.report.done.tokens.max(1) as f64;
            let tiers: Vec<String> = e
                .tiers
                .iter()
                .map(|t| {
                    let (read, written) =
                        (crate::human(t.read_bytes), crate::human(t.written_bytes));
                    format!("{} {:.1}%, {read}, {written}", t.name, share(t.hit_tokens))
                })
                .collect();
            let _ = write!(
                out,
                "<tr><td>{}<td>{}<td>{}<td>{}<td>{:.2}%<td>{}</tr>",
                escape(&e.report.spec),
                time(e.ttft_mean_ns),
                time(e.ttft_p50_ns),
                time(e.ttft_p99_ns),
                100.0 * e.loss(),
                escape(&tiers.join("; "))
            );
        }
        out.push_str("</table></div>");
    }

    /// A bar plot with a group for every size.
    fn grouped(&self, y: &Axis, of: impl Fn(&Report) -> Vec<(f64, String)>) -> String {
        let group = |&blocks: &u64| {
            let at = self.reports().filter(|r| r.capacity_blocks == blocks);
            let bars = at.flat_map(|r| {
                let series = self.series(r);
                of(r).into_iter().map(move |(value, what)| (series, value, what))
            });
            (self.size_name(blocks), bars.collect())
        };
        bars(y, &self.sizes.iter().map(group).collect::<Vec<_>>())
    }

    fn decisions(&self, out: &mut String) {
        let times = |r: &Report| [0.5, 0.99].map(|share| r.decision.quantile_ns(share) as f64);
        let values = self.reports().flat_map(times);
        let y = Axis::around("ns a decision", true, Some(10.0), values);
        let plot = self.grouped(&y, |r| {
            let name =
                |share: &str, ns: f64| (ns, format!("{}: {share} {}", r.spec, time(ns as u64)));
            let [p50, p99] = times(r);
            vec![name("p50", p50), name("p99", p99)]
        });
        let _ = write!(
            out,
            "<h2>Time of a decision</h2><p>Two bars for each policy: p50 and p99. One decision \
             chooses all victims of one request.</p>{plot}"
        );
    }

    fn fairness(&self, out: &mut String) {
        let y = Axis { title: "Jain's index", log: false, ends: (0.0, 1.0) };
        let plot = self.grouped(&y, |r| {
            let name = |subject: &str, v: f64| (v, format!("{}: {subject} {v:.3}", r.spec));
            vec![name("sessions", r.session_fairness), name("tenants", r.tenant_fairness)]
        });
        let _ = write!(
            out,
            "<h2>Fairness</h2><p>Two bars for each policy: over sessions and over tenants. Fairness \
             compares the hits of each with those of an unbounded cache; 1 = all have the same \
             share.</p>{plot}"
        );
    }

    fn timelines(&self, out: &mut String) {
        for &blocks in &self.sizes {
            let line = |r: &Report| {
                let share = |hit: u64, all: u64| 100.0 * hit as f64 / all.max(1) as f64;
                let point = |p: &kvtier::trace::report::Point| {
                    (p.at_ns as f64 / 6e10, share(p.hit_tokens, p.tokens))
                };
                let points = r.timeline.iter().map(point).collect();
                Series { series: self.series(r), name: r.spec.clone(), points }
            };
            let at: Vec<Series> =
                self.reports().filter(|r| r.capacity_blocks == blocks).map(line).collect();
            let points = || at.iter().flat_map(|l| l.points.iter());
            let x = Axis::around("minutes", false, Some(0.0), points().map(|p| p.0));
            let y = Axis::around("tokens hit, %", false, Some(0.0), points().map(|p| p.1));
            let _ = write!(
                out,
                "<h2>Hits over time, {}</h2>{}",
                self.size_name(blocks),
                lines(&x, &y, &at)
            );
        }
    }
}
