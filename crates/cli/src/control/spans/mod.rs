//! `kvtier spans`: ended transfers of running stores as spans of OpenTelemetry.

mod otlp;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::Outcome;
use super::show::{number, text};
use super::stores::{Source, Store, ask_all, list};
pub use otlp::Endpoint;

/// Most spans of one export.
const MOST_SPANS: usize = 1000;
/// Longest pause after failed exports.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// A larger difference of the two clocks is a jump of the wall clock, a smaller one a delay of an answer.
const JUMP_NS: i128 = 1_000_000_000;

/// Options of the exporter.
pub struct Opts {
    /// Control sockets of stores, or directories of them.
    pub sources: Vec<Source>,
    /// Where spans are sent; None = print each export as a line.
    pub endpoint: Option<Endpoint>,
    /// The resource attribute `service.name` of all spans.
    pub service: String,
    /// Time between two exports.
    pub every: Duration,
    /// Longest wait for the answer of a store.
    pub timeout: Duration,
}

/// Exports until the process ends.
pub fn run(opts: &Opts) -> Outcome<()> {
    super::exit_on_signals()?;
    let mut readers: BTreeMap<PathBuf, Reader> = BTreeMap::new();
    let (mut pause, mut faults) = (opts.every, BTreeSet::new());
    loop {
        let mut stores = list(&opts.sources, &mut faults);
        readers.retain(|path, _| stores.iter().any(|store| store.path == *path));
        stores.retain(|store| readers.get(&store.path).is_none_or(Reader::is_due));
        let from = |at: usize| readers.get(&stores[at].path).map_or(0, |reader| reader.next);
        let request = |at| format!("transfers(from={},most={MOST_SPANS})", from(at));
        let answers = ask_all(&stores, request, opts.timeout);
        let (mut has_more, mut failed) = (false, false);
        for (store, answer) in stores.iter().zip(answers) {
            let reader = readers.entry(store.path.clone()).or_default();
            let answer = answer.map_err(|refusal| refusal.to_string()).and_then(|text| {
                serde_json::from_str(&text).map_err(|error| format!("malformed answer: {error}"))
            });
            match answer.map_err(Fault::Store).and_then(|one| reader.export(&one, store, opts)) {
                Ok(more) => {
                    has_more |= more;
                    reader.wait = None;
                    reader.say(store, String::new());
                }
                Err(Fault::Store(words)) => {
                    reader.wait_longer(opts.every);
                    reader.say(store, words);
                }
                Err(Fault::Collector(words)) => {
                    failed = true;
                    reader.wait = None;
                    reader.say(store, words);
                }
            }
        }
        pause = if failed { longer(pause, opts.every) } else { opts.every };
        if failed || !has_more {
            std::thread::sleep(pause);
        }
    }
}

/// The pause after one more failure.
fn longer(pause: Duration, every: Duration) -> Duration {
    (pause * 2).min(MAX_PAUSE.max(every))
}

/// Whose failure it is that nothing was exported.
enum Fault {
    /// The store does not answer, or not as expected: only its own export pauses.
    Store(String),
    /// The collector accepts nothing for now: all exports pause.
    Collector(String),
}

/// The position in the log of one store.
#[derive(Default)]
struct Reader {
    /// Identifies the opening of the store: numbers of transfers begin at 0 with each one.
    run: String,
    /// Number of the next transfer to be exported.
    next: u64,
    /// The wall clock less the store's clock.
    offset_ns: Option<i128>,
    /// The last message about the store, which is not repeated; empty = all is well.
    said: String,
    /// After failures of the store: when it is asked again, and the length of that pause.
    wait: Option<(Instant, Duration)>,
}

impl Reader {
    fn is_due(&self) -> bool {
        self.wait.is_none_or(|(until, _)| Instant::now() >= until)
    }

    fn wait_longer(&mut self, every: Duration) {
        let pause = longer(self.wait.map_or(every, |(_, pause)| pause), every);
        self.wait = Some((Instant::now() + pause, pause));
    }

    /// Prints a message unless it is the last one again; empty = all is well.
    fn say(&mut self, store: &Store, words: String) {
        if self.said != words {
            let name = &store.name;
            match words.as_str() {
                "" => eprintln!("kvtier: store {name}: spans are exported again"),
                words => eprintln!("kvtier: store {name}: {words}"),
            }
            self.said = words;
        }
    }

    /// Exports the transfers of an answer. Returns whether the store has more of them. If the collector
    /// accepts nothing for now, the transfers are read again later.
    fn export(&mut self, answer: &Value, store: &Store, opts: &Opts) -> Result<bool, Fault> {
        let (run, all) = (text(answer, "run"), &answer["transfers"]);
        let is_run = run.len() == 16 && run.bytes().all(|byte| byte.is_ascii_hexdigit());
        let Some(all) = all.as_array().filter(|_| is_run) else {
            return Err(Fault::Store("malformed answer: it has no transfers".into()));
        };
        if self.run != run {
            let is_whole = self.next == 0;
            *self = Reader {
                run: run.into(),
                said: std::mem::take(&mut self.said),
                ..Reader::default()
            };
            if !is_whole {
                return Ok(true);
            }
        }
        let offset_ns = self.offset_ns(number(answer, "now_ns"));
        let name = &store.name;
        let missed = number(answer, "missed");
        if missed > 0 {
            eprintln!(
                "kvtier: store {name}: {missed} transfers were dropped from the log before they were exported: \
                 lower --every"
            );
            self.next += missed;
        }
        let Some(last) = all.last() else { return Ok(false) };
        let spans = otlp::encode(&opts.service, name, run, offset_ns, all).to_string();
        match opts.endpoint.as_ref().map(|endpoint| endpoint.post(&spans)) {
            None => println!("{spans}"),
            Some(Ok(None)) => {}
            Some(Ok(Some(words))) => eprintln!("kvtier: store {name}: {words}"),
            Some(Err(failure)) if failure.is_temporary => {
                return Err(Fault::Collector(failure.words));
            }
            Some(Err(failure)) => {
                eprintln!("kvtier: store {name}: {} spans are lost: {}", all.len(), failure.words);
            }
        }
        self.next = number(last, "number") + 1;
        Ok(all.len() == MOST_SPANS)
    }

    /// What to add to the store's clock for the wall clock: the least difference seen, since an answer
    /// takes time to arrive.
    fn offset_ns(&mut self, now_ns: u64) -> i128 {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seen = wall.as_nanos() as i128 - i128::from(now_ns);
        let known = self.offset_ns.filter(|known| (seen - known).abs() < JUMP_NS);
        let offset = known.map_or(seen, |known| known.min(seen));
        self.offset_ns = Some(offset);
        offset
    }
}
