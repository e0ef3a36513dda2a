//! `kvtier stream run`: passes over a model, as an engine runs them.

use std::fs::File;
use std::hint::black_box;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::clock::Clock;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::io::model_files::real::ModelFilesOpts;
use kvtier::stream::plan::{Links, Mode, PlanOptions};
use kvtier::stream::streamer::{AcquireOpts, Opts, Streamer, Verify};
use kvtier::stream::units::Role;

use super::picture::{Picture, page};
use super::report::{Pass, Report};
use super::sizes::{bytes, rate, time};
use super::sum;
use super::{Files, Outcome, Place, print};

/// Most marks recorded for a picture.
const MARKS: usize = 1 << 18;
/// Default number of experts of a layer that a token uses.
const EXPERTS_USED: u32 = 2;
/// Interval of progress updates while resident units are loaded.
const TICK_NS: u64 = 50_000_000;

/// When checksums are verified.
#[derive(Clone, Copy, ValueEnum)]
pub enum VerifyWhen {
    /// On the first read of a unit
    First,
    /// On every read
    Always,
}

/// Options of the passes.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: Files,
    /// Most host memory for weights, such as 8G; by default that of this machine, less a reserve
    #[arg(long, value_parser = bytes)]
    host: Option<u64>,
    /// Memory of a simulated device; its compute time is that of --compute
    #[arg(long, value_parser = bytes)]
    device: Option<u64>,
    /// Bandwidth to the simulated device in bytes a second
    #[arg(long, value_parser = rate, default_value = "12G", requires = "device")]
    device_link: u64,
    /// Tokens of KV to reserve memory for; 0 = none
    #[arg(long, default_value_t = 0)]
    context: u32,
    /// Slots of the ring; 0 = 2
    #[arg(long, default_value_t = 0)]
    slots: u32,
    /// Choice of resident units
    #[arg(long, value_enum, default_value = "interleaved")]
    placement: Place,
    /// Keep slots even if everything fits, so that memory can be released later
    #[arg(long)]
    shrinks: bool,
    /// No resident units: all memory is a ring of slots
    #[arg(long, conflicts_with = "placement")]
    ring: bool,
    /// Number of passes; a token of text is one pass
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    passes: u32,
    /// Compute time of a layer on another processor, such as 5ms; by default bytes are summed
    #[arg(long, value_parser = time)]
    compute: Option<u64>,
    /// Units have fixed addresses, of which only a window is backed by memory
    #[arg(long)]
    in_place: bool,
    /// Read through the page cache
    #[arg(long, conflicts_with = "mapped")]
    buffered: bool,
    /// Copy from a memory map: slow, for comparison
    #[arg(long)]
    mapped: bool,
    /// Reader threads; 0 = 8
    #[arg(long, default_value_t = 0)]
    readers: u32,
    /// Verify the checksums beside the model; missing ones are recorded
    #[arg(long, value_enum)]
    verify: Option<VerifyWhen>,
    /// Write a picture of the last two passes, with a row for each unit
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the picture and the report as a page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    fn opts(&self) -> Outcome<Opts> {
        let plan_options = PlanOptions {
            mode: if self.ring { Mode::Ring } else { Mode::Tiered },
            placement: self.placement.into(),
            host_ceiling_bytes: self.host,
            host_reserve_bytes: self.host.map(|_| 0),
            // A simulated device has no driver that needs memory.
            device_safety_bytes: Some(0),
            context: self.context,
            kv_bytes: (self.context == 0).then_some(0),
            slots: self.slots,
            shrinks: self.shrinks,
            layer_compute_ns: self.compute.unwrap_or(0),
            ..PlanOptions::default()
        };
        let verify = match self.verify {
            None => Verify::Never,
            Some(VerifyWhen::First) => Verify::First,
            Some(VerifyWhen::Always) => Verify::Always,
        };
        let device = |memory_bytes: u64| -> Outcome<Arc<dyn kvtier::device::Device>> {
            let opts = SimulatedOpts {
                latency_ns: 0,
                bytes_per_second: self.device_link,
                jitter_percent: 0,
                memory_bytes,
                ..SimulatedOpts::default()
            };
            Ok(Arc::new(Simulated::new(Clock::real(), opts)?))
        };
        let pictures = self.svg.is_some() || self.html.is_some();
        Ok(Opts {
            plan_options,
            links: Links {
                device: self.device.map_or(0, |_| self.device_link),
                ..Links::default()
            },
            measure: true,
            in_place: self.in_place,
            readers: self.readers,
            files: ModelFilesOpts {
                buffered: self.buffered,
                mapped: self.mapped,
                ..ModelFilesOpts::default()
            },
            verify,
            sidecar: Some(PathBuf::new()),
            marks: if pictures { MARKS } else { 0 },
            device: self.device.map(device).transpose()?,
            ..Opts::default()
        })
    }
}

/// Loads the resident units, with a progress bar on a terminal.
fn load(streamer: &Streamer, clock: &Clock, quiet: bool) -> Outcome<f64> {
    let begun = Instant::now();
    let residents = streamer.progress().residents;
    let bar = match quiet || !std::io::stderr().is_terminal() {
        true => ProgressBar::hidden(),
        false => {
            let style = "loading [{bar:40}] {pos} of {len} units  {msg}, {eta} to go";
            let style = ProgressStyle::with_template(style)?.progress_chars("=> ");
            ProgressBar::new(residents).with_style(style)
        }
    };
    loop {
        let loaded = streamer.load(clock.now_ns() + TICK_NS);
        let progress = streamer.progress();
        bar.set_position(residents.saturating_sub(progress.missing));
        let rate = progress.read_bytes as f64 / begun.elapsed().as_secs_f64().max(1e-9);
        bar.set_message(format!("{}/s", crate::human(rate as u64)));
        match loaded {
            Ok(()) => break,
            Err(error) if error.status() == Status::Timeout => {}
            Err(error) => return Err(error.into()),
        }
    }
    bar.finish_and_clear();
    Ok(begun.elapsed().as_secs_f64())
}

/// A random choice of experts, some more likely than others.
struct Router {
    random: u64,
    used: u32,
}

impl Router {
    fn draw(&mut self, below: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (((self.random >> 32) * u64::from(below)) >> 32) as u32
    }

    /// Chooses the experts of a token among `count`; lower numbers are more likely.
    fn choose(&mut self, count: u32) -> Vec<u32> {
        let mut chosen = Vec::new();
        while chosen.len() < self.used.min(count) as usize {
            let expert = self.draw(count).min(self.draw(count));
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        chosen
    }
}

/// A simulated engine.
struct Engine<'a> {
    streamer: &'a Streamer,
    compute: Option<Duration>,
    reads: bool,
    router: Router,
    /// Compute time so far.
    computed: Duration,
}

impl Engine<'_> {
    fn unit(&mut self, number: u32) -> Outcome<()> {
        let unit = &self.streamer.units().units[number as usize];
        let held = self.streamer.acquire(number, AcquireOpts::default())?;
        let begun = Instant::now();
        match self.compute {
            Some(time) if unit.role == Role::Layer => std::thread::sleep(time),
            None if self.reads => {
                black_box(sum(unit, &held));
            }
            _ => {}
        }
        self.computed += begun.elapsed();
        Ok(self.streamer.release(&held, None)?)
    }

    fn pass(&mut self) -> Outcome<()> {
        self.streamer.pass_begin()?;
        let units = &self.streamer.units().units;
        let mut number = 0;
        while let Some(unit) = units.get(number) {
            if unit.role != Role::Expert {
                self.unit(number as u32)?;
                number += 1;
                continue;
            }
            // The experts of a layer are consecutive.
            let same = |other: &&kvtier::stream::units::Unit| {
                other.role == Role::Expert && other.layer == unit.layer
            };
            let count = units[number..].iter().take_while(same).count();
            let chosen = self.router.choose(count as u32);
            let chosen: Vec<u32> = chosen.into_iter().map(|e| number as u32 + e).collect();
            self.streamer.hint(&chosen)?;
            chosen.iter().try_for_each(|&expert| self.unit(expert))?;
            number += count;
        }
        Ok(self.streamer.pass_end()?)
    }
}

/// Creates the file of a picture. Called before the passes, which may take long.
fn create_file(path: &Option<PathBuf>) -> Outcome<Option<File>> {
    let Some(path) = path else { return Ok(None) };
    let file = File::create(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(Some(file))
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<()> {
    let (model, units) = args.files.open()?;
    let runtime = Runtime::open(RuntimeOpts::default())?;
    let clock = Clock::real();
    let used = if model.facts.experts_used == 0 { EXPERTS_USED } else { model.facts.experts_used };
    let streamer = Streamer::open(runtime.core(), model, units, args.opts()?)?;
    let (svg, html) = (create_file(&args.svg)?, create_file(&args.html)?);
    if !args.json {
        print(&format!("{}\n", streamer.plan_text()))?;
    }
    let load_s = load(&streamer, &clock, args.json)?;
    let mut report = Report::new(&streamer, load_s);
    let mut engine = Engine {
        streamer: &streamer,
        compute: args.compute.map(Duration::from_nanos),
        reads: args.device.is_none(),
        router: Router { random: 0x9E37_79B9_7F4A_7C15, used },
        computed: Duration::ZERO,
    };
    let mut begun_ns = Vec::new();
    for _ in 0..args.passes {
        begun_ns.push(clock.now_ns());
        let (before, begun) = (streamer.stats(), Instant::now());
        engine.computed = Duration::ZERO;
        engine.pass()?;
        let seconds = begun.elapsed().as_secs_f64();
        let compute_s = engine.computed.as_secs_f64();
        report.passes.push(Pass { seconds, compute_s, before, after: streamer.stats() });
    }
    let text = report.text(&streamer);
    let picture = Picture::of(&model_name(args), &streamer, &begun_ns);
    if let Some(mut file) = svg {
        file.write_all(picture.svg().as_bytes())?;
    }
    if let Some(mut file) = html {
        file.write_all(page(&picture, &text, &streamer.plan_text()).as_bytes())?;
    }
    match args.json {
        true => print(&format!("{}\n", report.json(&streamer)?))?,
        false => print(&text)?,
    }
    Ok(streamer.close(0)?)
}

fn model_name(args: &Args) -> String {
    let name = args.files.files.first().and_then(|path| path.file_name());
    name.map_or("a model".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_chooses_distinct_experts() {
        let mut router = Router { random: 7, used: 6 };
        let mut low = 0;
        for count in 1..64 {
            let mut chosen = router.choose(count);
            assert_eq!(chosen.len(), count.min(6) as usize);
            assert!(chosen.iter().all(|&expert| expert < count));
            low += chosen.iter().filter(|&&expert| expert < count / 2).count();
            chosen.sort_unstable();
            chosen.dedup();
            assert_eq!(chosen.len(), count.min(6) as usize);
        }
        assert!(low > 63 * 6 / 2, "{low}");
    }
}
