//! The page of metrics, from the metrics of a store with every tier.

use std::path::PathBuf;
use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::fail;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;

use super::{Table, code, head};

/// Labels whose values are not listed: they are numbers, names of policies, or texts.
const OPEN_LABELS: [(&str, &str); 5] = [
    ("tenant", "number of a tenant, or `others`"),
    ("policy", "name of the policy"),
    ("engine", "name of the I/O engine"),
    ("reason", "why no faster one is used; may be empty"),
    ("le", "upper bound of a bucket"),
];

const INTRODUCTION: &str = "\
Every metric of a store, for operators. `kvt_store_metrics` and `kvtier metrics` return them in the text \
format of Prometheus 0.0.4. [What to watch](../operations/watch.md) says which of them matter.

```promql
rate(kvtier_missed_cells_total[5m]) / rate(kvtier_gets_total[5m])
```

- Counters begin at 0 when the store is opened. Gauges are values at the time of the call.
- Metrics with the prefix `kvtier_remote_` exist if the store has a remote, `kvtier_disk_engine_info` if it has a disk.
- Labels are listed with all of their values, except where the last table says what they are.
- A histogram has the samples `_bucket`, `_sum` and `_count`; its buckets are powers of two.
- `kvtier metrics` with a name, a directory or several stores adds the label `store` to each sample, and the gauge \
`kvtier_up`: 1 = the control socket of the store answers ([collect the \
metrics](../operations/watch.md#collect-the-metrics)).

";

/// A family of the text format.
struct Family {
    name: String,
    kind: String,
    help: String,
    /// Names of labels, with the values that occur.
    labels: Vec<(String, Vec<String>)>,
}

/// The page.
pub fn page() -> Result<String> {
    let all = families(&text()?)?;
    let mut out = head("Metrics") + INTRODUCTION;
    let groups = [("Store", false), ("Remote", true)];
    for (title, is_remote) in groups {
        let of_group = |one: &&Family| one.name.starts_with("kvtier_remote_") == is_remote;
        let rows: Vec<&Family> = all.iter().filter(of_group).collect();
        let plain = rows.iter().copied().filter(|one| one.labels.is_empty());
        out += &format!("## {title}\n\n{}", table(plain));
        let labelled: Vec<&Family> =
            rows.into_iter().filter(|one| !one.labels.is_empty()).collect();
        if !labelled.is_empty() {
            out += &format!("## {title}, with labels\n\n");
            out += &labelled_table(&labelled);
            let mut labels = Table::new(&["label", "value"]);
            for (name, meaning) in OPEN_LABELS {
                labels.row(&[code(name), meaning.to_string()]);
            }
            out += &labels.into_text();
        }
    }
    Ok(out.trim_end().to_string() + "\n")
}

/// A directory that is removed with this value.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that stays behind does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The metrics of a store with every tier.
fn text() -> Result<String> {
    let scratch =
        Scratch(std::env::temp_dir().join(format!("kvtier-manual-{}", std::process::id())));
    let shared = scratch.0.join("remote");
    if let Err(error) = std::fs::create_dir_all(&shared) {
        fail!(Io, "{}: {error}", shared.display());
    }
    let spec = StoreSpec::parse(&format!(
        "store(host=64MiB,disk=disk(path=\"{}\",bytes=256MiB),device=device(capacity=64MiB),\
         remote=dir(path=\"{}\"))",
        scratch.0.join("disk").display(),
        shared.display()
    ))?;
    let runtime = Runtime::open(RuntimeOpts::default())?;
    let device = Arc::new(Simulated::new(Clock::real(), SimulatedOpts::default())?);
    let store = Store::open_with(runtime.core(), None, &spec, device)?;
    let text = store.inspect(|core| core.metrics_text())?;
    store.close(0)?;
    Ok(text)
}

/// Reads the text format.
fn families(text: &str) -> Result<Vec<Family>> {
    let mut all: Vec<Family> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap_or((rest, ""));
            let (name, help) = (name.to_string(), help.to_string());
            all.push(Family { name, kind: String::new(), help, labels: Vec::new() });
            continue;
        }
        let Some(family) = all.last_mut() else { fail!(State, "a sample before a family: {line}") };
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            family.kind = rest.rsplit(' ').next().unwrap_or_default().to_string();
        } else if let Some((_, rest)) = line.split_once('{') {
            let end = rest.rfind('}').unwrap_or_default();
            family.add_all(&rest[..end]);
        }
    }
    Ok(all)
}

impl Family {
    /// Adds labels as the format has them; no value of this store has a quote.
    fn add_all(&mut self, labels: &str) {
        let mut rest = labels;
        while let Some((name, after)) = rest.split_once("=\"") {
            let (value, next) = after.split_once('"').unwrap_or((after, ""));
            self.add(name.trim_start_matches(','), value);
            rest = next;
        }
    }

    fn add(&mut self, name: &str, value: &str) {
        let at = self.labels.iter().position(|(known, _)| known == name);
        let at = at.unwrap_or_else(|| {
            self.labels.push((name.to_string(), Vec::new()));
            self.labels.len() - 1
        });
        let values = &mut self.labels[at].1;
        if values.iter().all(|known| known != value) {
            values.push(value.to_string());
        }
    }

    /// The unit that the name and the help text say.
    fn unit(&self) -> &'static str {
        let name = self.name.trim_end_matches("_total");
        match () {
            () if name.ends_with("bytes_per_second") => "bytes per second",
            () if name.ends_with("_bytes") => "bytes",
            () if name.ends_with("_seconds") => "seconds",
            () if name.ends_with("_ns") => "nanoseconds",
            () if name.ends_with("_info") => "always 1",
            () if name.ends_with("_relative") => "ratio",
            () if name.contains("_error_") => "as the numbers of the cells",
            () if self.help.starts_with("KVT_") => "code",
            () if self.help.starts_with("1 =") => "0 or 1",
            () => "count",
        }
    }

    /// The help text, with names of the code as such.
    fn meaning(&self) -> String {
        let words = self.help.split(' ').map(|word| {
            let name = word.trim_end_matches(['.', ',', ':']);
            match name.contains('_') && !name.contains(['(', '=']) {
                true => format!("`{name}`{}", &word[name.len()..]),
                false => word.to_string(),
            }
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn labels(&self) -> String {
        let words = |(name, values): &(String, Vec<String>)| {
            let is_open = OPEN_LABELS.iter().any(|(open, _)| open == name);
            let values: Vec<String> = values.iter().map(|value| code(value)).collect();
            if is_open { code(name) } else { format!("{}: {}", code(name), values.join(", ")) }
        };
        let shown = self.labels.iter().filter(|(name, _)| name != "le");
        shown.map(words).collect::<Vec<_>>().join("; ")
    }
}

fn table<'a>(families: impl Iterator<Item = &'a Family>) -> String {
    let mut out = Table::new(&["name", "meaning", "type", "unit"]);
    for one in families {
        out.row(&[&code(&one.name), &one.meaning(), &one.kind, one.unit()]);
    }
    out.into_text()
}

fn labelled_table(families: &[&Family]) -> String {
    let mut out = Table::new(&["name", "meaning", "type", "unit", "labels"]);
    for one in families {
        out.row(&[&code(&one.name), &one.meaning(), &one.kind, one.unit(), &one.labels()]);
    }
    out.into_text()
}
