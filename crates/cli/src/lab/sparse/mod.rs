//! `kvtier lab sparse`: what a budget of tokens costs. The reference engine answers questions and
//! foresees texts under several sparse policies and budgets, beside all keys and keys by chance.

mod page;
mod plan;
mod row;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::sync::cores;

use super::Outcome;
use kvtier_lab::reference::model::{Form, Model};
use kvtier_lab::reference::quality::{self, Answers, Prediction, Size, Subject};
use plan::Point;
use row::Row;

/// Pairs of a text that is asked about, and of one that is foreseen.
const ASKED: usize = 24;
const TOLD: usize = 12;
/// Models, and how their keys are kept.
const MODELS: [(&str, &str, Form); 3] = [
    ("gqa", "gqa", Form::Split),
    ("mla", "mla", Form::Latent),
    ("mla_expanded", "mla", Form::Expanded),
];
/// What is measured where nothing else is asked for.
const POLICIES: &str = "quest,quest_shared,arkvale,h2o,tova,snapkv,pyramidkv,adakv,keydiff,knorm,\
                        streaming,minference";

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    /// Between commas: names that a budget is put into (docs/lab.md), or specs, in which {budget}
    /// and {share} stand for it
    #[arg(long, default_value = POLICIES)]
    policies: String,
    /// Tokens that a head may have, between commas [default: 64,128,192,256,512]
    #[arg(long)]
    budgets: Option<String>,
    /// gqa, mla (latent rows) or mla_expanded, between commas
    #[arg(long, default_value = "gqa,mla")]
    models: String,
    /// At least so many questions; 24 of each text [default: 288]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    questions: Option<u32>,
    /// Texts that are foreseen [default: 6]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    texts: Option<u32>,
    /// Symbols of a text
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(400..=4000))]
    length: u32,
    /// Another seed makes other texts
    #[arg(long, default_value_t = 0)]
    seed: u32,
    /// Texts at a time; 0 = one a core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Two budgets, few questions and one text
    #[arg(long)]
    quick: bool,
    /// The directory for sparse.csv and sparse.html
    #[arg(long, short)]
    out: PathBuf,
}

/// A text for one of the models, and what is done with it.
enum Job {
    Ask(usize, u64),
    Foresee(usize, u64),
}

/// What came of it, for each of the points.
enum Done {
    Asked(Vec<Answers>),
    Prediction(Vec<Prediction>),
}

/// A model and what is measured of it.
struct Case {
    name: &'static str,
    form: Form,
    model: Model,
    points: Vec<Point>,
    specs: Vec<String>,
}

/// Measures.
pub fn run(args: &Args) -> Outcome<()> {
    let default = if args.quick { "64,192" } else { "64,128,192,256,512" };
    let budgets = plan::budgets(args.budgets.as_deref().unwrap_or(default))?;
    let cases = cases(args, &budgets)?;
    let prompts = args.questions.unwrap_or(if args.quick { 24 } else { 288 });
    let prompts = u64::from(prompts).div_ceil(ASKED as u64);
    let texts = u64::from(args.texts.unwrap_or(if args.quick { 1 } else { 6 }));
    // With seed 0 the texts of `tests/sparse/reference`.
    let first = u64::from(args.seed) * 1_000_000;
    let asks = |at| (0..prompts).map(move |n| Job::Ask(at, first + 1000 + n));
    let foresees = |at| (0..texts).map(move |n| Job::Foresee(at, first + 70 + n));
    let jobs: Vec<Job> = (0..cases.len()).flat_map(|at| asks(at).chain(foresees(at))).collect();
    std::fs::create_dir_all(&args.out).map_err(|e| format!("{}: {e}", args.out.display()))?;
    let done = spread(jobs.len(), args.threads, |at| one(&cases, &jobs[at], args.length))?;
    let mut rows: Vec<Vec<Row>> = cases.iter().map(rows_of).collect();
    for (job, done) in jobs.iter().zip(done) {
        let (Job::Ask(at, _) | Job::Foresee(at, _)) = job;
        match done {
            Done::Asked(all) => rows[*at].iter_mut().zip(&all).for_each(|(row, a)| row.ask(a)),
            Done::Prediction(all) => {
                rows[*at].iter_mut().zip(&all).for_each(|(row, f)| row.foresee(f));
            }
        }
    }
    let rows: Vec<Row> = rows.into_iter().flatten().collect();
    let about = format!(
        "Texts of {} symbols: {} questions about pairs in them, {texts} foreseen, for each model",
        args.length,
        prompts * ASKED as u64,
    );
    row::print(&about, &rows);
    save(args, "sparse.csv", row::csv(&rows))?;
    save(args, "sparse.html", page::page(&about, &rows))
}

fn save(args: &Args, name: &str, text: String) -> Outcome<()> {
    let path = args.out.join(name);
    std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    eprintln!("{} is written", path.display());
    Ok(())
}

/// The models, each with what is measured of it; what cannot be is told before anything is.
fn cases(args: &Args, budgets: &[usize]) -> Outcome<Vec<Case>> {
    let policies = super::parse::specs(&args.policies);
    let mut cases: Vec<Case> = Vec::new();
    for name in args.models.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let Some((name, file, form)) = MODELS.into_iter().find(|(known, ..)| *known == name) else {
            let known = MODELS.map(|(name, ..)| name).join(", ");
            return Err(format!("no model '{name}'; there are {known}").into());
        };
        if cases.iter().any(|case| case.name == name) {
            return Err(format!("the model '{name}' is named twice").into());
        }
        let model = Model::trained(file)?;
        let points =
            plan::points(&policies, budgets, Subject { model: &model, form }, args.length as usize)
                .map_err(|e| format!("{name}: {e}"))?;
        let specs = points.iter().map(|point| point.spec.clone()).collect();
        cases.push(Case { name, form, model, points, specs });
    }
    if cases.is_empty() {
        return Err("nothing to measure: no models".into());
    }
    Ok(cases)
}

fn rows_of(case: &Case) -> Vec<Row> {
    case.points.iter().map(|point| Row::new(case.name, point)).collect()
}

fn one(cases: &[Case], job: &Job, length: u32) -> Outcome<Done> {
    let subject = |at: usize| Subject { model: &cases[at].model, form: cases[at].form };
    let symbols = length as usize;
    Ok(match *job {
        Job::Ask(at, seed) => {
            let size = Size { symbols, pairs: ASKED };
            Done::Asked(quality::ask(subject(at), seed, size, &cases[at].specs)?)
        }
        Job::Foresee(at, seed) => {
            let size = (Size { symbols, pairs: TOLD }, 200);
            Done::Prediction(quality::foresee(subject(at), seed, size, &cases[at].specs)?)
        }
    })
}

/// Does so many jobs, as many at a time as there are threads; results are in their order.
fn spread<T: Send>(
    count: usize,
    threads: usize,
    work: impl Fn(usize) -> Outcome<T> + Sync,
) -> Outcome<Vec<T>> {
    let threads = if threads == 0 { cores() } else { threads }.min(count).min(256);
    let bar = progress(count)?;
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
    let failed: Mutex<Option<String>> = Mutex::new(None);
    let body = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                break;
            }
            match work(at) {
                Ok(done) => {
                    results.lock().unwrap_or_else(|e| e.into_inner())[at] = Some(done);
                    bar.inc(1);
                }
                Err(error) => {
                    let mut first = failed.lock().unwrap_or_else(|e| e.into_inner());
                    first.get_or_insert(error.to_string());
                    // Nothing more is started.
                    next.store(count, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        (0..threads).for_each(|_| drop(scope.spawn(body)));
    });
    bar.finish_and_clear();
    if let Some(error) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        return Err(error.into());
    }
    Ok(results.into_inner().unwrap_or_else(|e| e.into_inner()).into_iter().flatten().collect())
}

fn progress(texts: usize) -> Outcome<ProgressBar> {
    if !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let style = "reading [{bar:40}] {pos} of {len} texts  {elapsed_precise}, {eta} to go";
    let style = ProgressStyle::with_template(style)?.progress_chars("=> ");
    Ok(ProgressBar::new(texts as u64).with_style(style))
}
