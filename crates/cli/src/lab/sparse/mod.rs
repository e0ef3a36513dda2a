//! `kvtier lab sparse`: the quality of sparse policies under token budgets. The reference engine
//! answers questions and predicts texts with several policies and budgets, with all keys, and with
//! random keys.

mod page;
mod plan;
mod row;

use std::path::PathBuf;

use super::{Outcome, progress_bar, run_parallel};
use kvtier_lab::reference::model::{Form, Model};
use kvtier_lab::reference::quality::{self, Answers, Prediction, Size, Subject};
use plan::Point;
use row::Row;

/// Key-value pairs of a text with questions.
const QUESTION_PAIRS: usize = 24;
/// Key-value pairs of a text that is predicted.
const TEXT_PAIRS: usize = 12;
/// Names of models, their files, and the form of their keys.
const MODELS: [(&str, &str, Form); 3] = [
    ("gqa", "gqa", Form::Split),
    ("mla", "mla", Form::Latent),
    ("mla_expanded", "mla", Form::Expanded),
];
/// Default policies.
const POLICIES: &str = "quest,quest_shared,arkvale,h2o,tova,snapkv,pyramidkv,adakv,keydiff,knorm,\
                        streaming,minference";

/// The policies, budgets and models.
#[derive(clap::Args)]
pub struct Args {
    /// Separated by commas: names that take a budget (docs/reference/lab.md), or specs with
    /// {budget} or {share}
    #[arg(long, default_value = POLICIES)]
    policies: String,
    /// Budgets in tokens of a head, separated by commas [default: 64,128,192,256,512]
    #[arg(long)]
    budgets: Option<String>,
    /// gqa, mla (latent rows) or mla_expanded, separated by commas
    #[arg(long, default_value = "gqa,mla")]
    models: String,
    /// Least number of questions; each text has 24 [default: 288]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    questions: Option<u32>,
    /// Number of predicted texts [default: 6]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    texts: Option<u32>,
    /// Symbols in a text
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(400..=4000))]
    length: u32,
    /// Seed of the texts
    #[arg(long, default_value_t = 0)]
    seed: u32,
    /// Texts in parallel; 0 = the number of cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Measure two budgets, few questions and one text
    #[arg(long)]
    quick: bool,
    /// Directory for sparse.csv and sparse.html
    #[arg(long, short)]
    out: PathBuf,
}

/// A text for a model, by its index, and a seed.
enum Job {
    Questions(usize, u64),
    Prediction(usize, u64),
}

/// The results of a job, one for each point.
enum Done {
    Answers(Vec<Answers>),
    Prediction(Vec<Prediction>),
}

/// A model and its points.
struct Case {
    name: &'static str,
    form: Form,
    model: Model,
    points: Vec<Point>,
    specs: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<()> {
    let default = if args.quick { "64,192" } else { "64,128,192,256,512" };
    let budgets = plan::budgets(args.budgets.as_deref().unwrap_or(default))?;
    let cases = cases(args, &budgets)?;
    let prompts = args.questions.unwrap_or(if args.quick { 24 } else { 288 });
    let prompts = u64::from(prompts).div_ceil(QUESTION_PAIRS as u64);
    let texts = u64::from(args.texts.unwrap_or(if args.quick { 1 } else { 6 }));
    // Seed 0 generates the texts of `tests/sparse/reference`.
    let first = u64::from(args.seed) * 1_000_000;
    let questions = |at| (0..prompts).map(move |n| Job::Questions(at, first + 1000 + n));
    let predictions = |at| (0..texts).map(move |n| Job::Prediction(at, first + 70 + n));
    let jobs: Vec<Job> =
        (0..cases.len()).flat_map(|at| questions(at).chain(predictions(at))).collect();
    std::fs::create_dir_all(&args.out).map_err(|e| format!("{}: {e}", args.out.display()))?;
    let style = "reading [{bar:40}] {pos} of {len} texts  {elapsed_precise}, {eta} to go";
    let bar = progress_bar(jobs.len(), style, false)?;
    let done = run_parallel(jobs.len(), args.threads, |at, _| {
        let done = run_job(&cases, &jobs[at], args.length)?;
        bar.inc(1);
        Ok(done)
    });
    bar.finish_and_clear();
    let done = done?;
    let mut rows: Vec<Vec<Row>> = cases.iter().map(rows_of).collect();
    for (job, done) in jobs.iter().zip(done) {
        let (Job::Questions(at, _) | Job::Prediction(at, _)) = job;
        match done {
            Done::Answers(all) => {
                rows[*at].iter_mut().zip(&all).for_each(|(row, a)| row.add_answers(a))
            }
            Done::Prediction(all) => {
                rows[*at].iter_mut().zip(&all).for_each(|(row, f)| row.add_prediction(f));
            }
        }
    }
    let rows: Vec<Row> = rows.into_iter().flatten().collect();
    let about = format!(
        "Texts of {} symbols: {} questions about pairs, {texts} predicted texts, for each model",
        args.length,
        prompts * QUESTION_PAIRS as u64,
    );
    row::print(&about, &rows);
    save(args, "sparse.csv", row::csv(&rows))?;
    save(args, "sparse.html", page::page(&about, &rows))
}

fn save(args: &Args, name: &str, text: String) -> Outcome<()> {
    let path = args.out.join(name);
    std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// The models with their points. Errors in arguments are reported before anything is measured.
fn cases(args: &Args, budgets: &[usize]) -> Outcome<Vec<Case>> {
    let policies = super::parse::specs(&args.policies);
    let mut cases: Vec<Case> = Vec::new();
    for name in args.models.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let Some((name, file, form)) = MODELS.into_iter().find(|(known, ..)| *known == name) else {
            let known = MODELS.map(|(name, ..)| name).join(", ");
            return Err(format!("unknown model '{name}': one of {known}").into());
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

fn run_job(cases: &[Case], job: &Job, length: u32) -> Outcome<Done> {
    let subject = |at: usize| Subject { model: &cases[at].model, form: cases[at].form };
    let symbols = length as usize;
    Ok(match *job {
        Job::Questions(at, seed) => {
            let size = Size { symbols, pairs: QUESTION_PAIRS };
            Done::Answers(quality::answer_questions(subject(at), seed, size, &cases[at].specs)?)
        }
        Job::Prediction(at, seed) => {
            let size = (Size { symbols, pairs: TEXT_PAIRS }, 200);
            Done::Prediction(quality::predict(subject(at), seed, size, &cases[at].specs)?)
        }
    })
}
