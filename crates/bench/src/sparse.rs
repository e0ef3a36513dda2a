//! Group `sparse`: decisions of sparse policies on one core in processor time, beside reading their
//! inputs, and the state of policies.

use std::hint::black_box;

use kvtier::base::spec::Spec;
use kvtier::base::status::{Result, Status};
use kvtier::meta::dtype::Dtype;
use kvtier::sparse::pages::{Bound, Pages};
use kvtier::sparse::quest::{PageScoring, PageSelector};
use kvtier::sparse::quest::{PageSharing, Rule};
use kvtier::sparse::ranks::Ranks;
use kvtier::sparse::{Context, Index, RetainedTokens, Shape, Sparse, needs, registry};

use super::attention::{numbers, pairs, reading, rows, seconds};
use super::fixtures::{gqa_shape, say};
use super::{Bar, allocations, median};

const DIM: usize = 128;
const PAGE: u32 = 16;
const PAGES: u32 = 4096;
const HEADS: u32 = 32;

fn shape(key_heads: u32) -> Shape {
    gqa_shape(1, HEADS, key_heads, PAGE, 1 << 20)
}

fn make(spec: &str, shape: &Shape) -> Result<Box<dyn Sparse>> {
    registry::make(&Spec::parse(spec)?, shape)
}

/// The context of a step that writes the last of `tokens` tokens.
fn step(tokens: u32) -> Context {
    Context { parts: 1, first_query: tokens - 1, tokens, ..Context::default() }
}

fn bar(bar: &'static str, value: Result<f64>, unit: &'static str) -> Bar {
    let note = value.as_ref().err().map_or_else(String::new, |error| say(error.clone()));
    Bar::lower(bar, unit).value(value.ok()).note(note)
}

/// Microseconds of a decision, beside reading its inputs.
fn beside<T>(name: &'static str, memory: &[T], goal: f64, run: impl FnMut() -> f64) -> Bar {
    let plain = || Some(size_of_val(memory) as f64 / reading(memory) * 1e6);
    let (value, baseline_value) = pairs(101, run, plain);
    Bar {
        baseline: "reading the same numbers",
        baseline_value,
        goal: Some(goal),
        ..bar(name, Ok(value), "us")
    }
}

/// The choice of 8 of 4,096 scored pages for each of 32 heads, with usual scores and with rising
/// ones, which are the worst case.
fn choosing() -> Result<Vec<Bar>> {
    let shape = shape(8);
    let rule = Rule {
        page: PAGE,
        count: 8,
        threshold: 0,
        sinks: 0,
        window: 0,
        dense: 0,
        bound: Bound::Range,
        share: PageSharing::None,
    };
    let row = shape.key_heads as usize * DIM;
    let each = PAGE as usize * row;
    // Pages from different offsets of one noise, so that all differ.
    let noise = numbers(each + 37 * PAGES as usize);
    let mut boxes = Pages::new(PAGE, shape.key_heads, shape.key_dim, Bound::Range);
    for page in 0..PAGES {
        let keys = &noise[37 * page as usize..][..each];
        boxes.put(page * PAGE, &rows(keys, shape.key_heads as usize, DIM, Dtype::F32), false)?;
    }
    let query = numbers(HEADS as usize * DIM);
    let query = rows(&query, HEADS as usize, DIM, Dtype::F32);
    let mut work = PageSelector::default();
    work.pages.extend(0..PAGES);
    let count = work.mark(&rule, PAGES)?;
    work.score(PageScoring { rule: &rule, shape: &shape, boxes: &boxes }, &query)?;
    let mut marks = vec![false; PAGES as usize];
    let mut choose = || {
        seconds(|| {
            marks.fill(false);
            for list in 0..HEADS as usize {
                work.list(list, count).expect("memory");
                work.chosen.iter().for_each(|&page| marks[page as usize] = true);
            }
            black_box(&marks);
        }) * 1e6
    };
    choose();
    let scores = vec![0.0_f32; (HEADS * PAGES) as usize];
    let usual = beside("quest_select", &scores, 100.0, choose);
    let rising: Vec<f32> = (0..PAGES).map(|at| at as f32).collect();
    let (mut ranks, mut chosen) = (Ranks::default(), Vec::new());
    let worst = || {
        seconds(|| {
            chosen.clear();
            (0..HEADS).for_each(|_| ranks.top(&rising, 8, &mut chosen).expect("memory"));
        }) * 1e6
    };
    let worst = beside("quest_select_rising", &scores, f64::NAN, worst);
    Ok(vec![usual, Bar { goal: None, ..worst }])
}

/// A whole selection among 4,096 blocks, scores included.
fn selecting(quick: bool) -> Result<Vec<Bar>> {
    let shape = shape(8);
    let mut quest = make("quest(budget=128,dense=0)", &shape)?;
    let each = PAGE as usize * shape.key_heads as usize * DIM;
    let noise = numbers(each + 37 * PAGES as usize);
    for page in 0..PAGES {
        let keys = &noise[37 * page as usize..][..each];
        let keys = rows(keys, shape.key_heads as usize, DIM, Dtype::F32);
        quest.seal(0, page, page * PAGE, &keys)?;
    }
    let query = numbers(HEADS as usize * DIM);
    let query = rows(&query, HEADS as usize, DIM, Dtype::F32);
    let (ids, mut out): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), Vec::new());
    let context = step(PAGES * PAGE);
    let mut run = || {
        seconds(|| quest.select(0, Some(&query), &ids, &context, &mut out).expect("a selection"))
            * 1e6
    };
    run();
    let boxes = numbers(2 * DIM * (shape.key_heads * PAGES) as usize);
    let plain = || Some(size_of_val(&boxes[..]) as f64 / reading(&boxes) * 1e6);
    let (value, baseline_value) = pairs(if quick { 11 } else { 41 }, run, plain);
    let before = allocations();
    (0..10)
        .for_each(|_| quest.select(0, Some(&query), &ids, &context, &mut out).expect("as before"));
    let allocated = allocations() - before;
    Ok(vec![
        Bar {
            baseline: "reading the boxes",
            baseline_value,
            ..bar("quest_select_scored", Ok(value), "us")
        },
        Bar { goal: Some(0.0), ..bar("quest_allocations", Ok(allocated as f64 / 10.0), "a call") },
    ])
}

/// Medians of the parts of a step of `h2o`, in microseconds.
struct Steps {
    all: f64,
    parts: [f64; 3],
    allocations: f64,
    reading: f64,
}

/// A step of `h2o` over 8,192 tokens of 32 heads: adds attention, finds the smallest sum, and
/// compacts the lists.
fn steps(spec: &str, quick: bool) -> Result<Steps> {
    const TOKENS: u32 = 8192;
    let mut h2o = make(spec, &shape(HEADS))?;
    let got: Vec<f32> = numbers((HEADS * (TOKENS + 1)) as usize).iter().map(|x| x * x).collect();
    h2o.observe(0, TOKENS, &got[..(HEADS * TOKENS) as usize], TOKENS)?;
    let (rounds, mut before) = (if quick { 61 } else { 301 }, 0);
    // Allocated before the steps, whose allocations are counted.
    let mut times = Vec::with_capacity(rounds as usize);
    let mut reads = Vec::with_capacity(rounds as usize);
    let mut retained = RetainedTokens::default();
    for round in 1..=rounds {
        // The first step allocates the state.
        before = if round == 2 { allocations() } else { before };
        let context = step(TOKENS + round);
        let observe = seconds(|| h2o.observe(0, 1, &got, TOKENS + 1).expect("as many"));
        let mut is_any = false;
        let evict = seconds(|| is_any = h2o.evict(0, &context, &mut retained).expect("a choice"));
        assert!(is_any, "one is too many");
        let evicted = seconds(|| h2o.evicted(0, &retained).expect("its own word"));
        times.push([observe, evict, evicted].map(|time| time * 1e6));
        reads.push(size_of_val(&got[..]) as f64 / reading(&got) * 1e6);
    }
    let allocated = allocations() - before;
    let middle =
        |of: &dyn Fn(&[f64; 3]) -> f64| median(&mut times.iter().map(of).collect::<Vec<f64>>());
    Ok(Steps {
        all: middle(&|parts| parts.iter().sum()),
        parts: [0, 1, 2].map(|part| middle(&|parts| parts[part])),
        allocations: allocated as f64 / f64::from(rounds - 1),
        reading: median(&mut reads),
    })
}

fn heavy(quick: bool) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (name, spec) in [
        ("h2o_step", "h2o(sink=4,recent=256,budget=7932)"),
        ("h2o_step_one_list", "h2o(sink=4,recent=256,budget=7932,heads=all)"),
    ] {
        let steps = match steps(spec, quick) {
            Ok(steps) => steps,
            Err(error) => {
                bars.push(bar(name, Err(error), "us"));
                continue;
            }
        };
        let [observe, evict, evicted] = steps.parts;
        bars.push(Bar {
            baseline: "reading the sums",
            baseline_value: Some(steps.reading),
            goal: Some(200.0),
            note: format!("sums {observe:.0}, choice {evict:.0}, lists {evicted:.0} us"),
            ..bar(name, Ok(steps.all), "us")
        });
        if name == "h2o_step" {
            let value = Ok(steps.allocations);
            bars.push(Bar { goal: Some(0.0), ..bar("h2o_allocations", value, "a step") });
        }
    }
    bars
}

/// A spec of every policy of the registry, by its name.
fn spec_of(name: &str, shape: &Shape) -> String {
    match name {
        "duo" => {
            let alpha = vec!["0.5"; (shape.layers * shape.key_heads) as usize];
            format!("duo(alpha=\"{}\")", alpha.join(" "))
        }
        "dsa" => "dsa(heads=8,dim=128)".to_string(),
        "arkvale" => format!("arkvale(page={PAGE})"),
        name => name.to_string(),
    }
}

/// Passes the inputs that a policy needs for `tokens` tokens.
fn observe_all(policy: &mut dyn Sparse, shape: &Shape, tokens: u32) -> Result<()> {
    let traits = policy.traits();
    if traits.needs & needs::KEYS != 0 {
        let (heads, dim) = traits.key_rows(shape);
        let keys = numbers((tokens * heads * dim) as usize);
        policy.append(0, 0, &rows(&keys, heads as usize, dim as usize, Dtype::F32))?;
    }
    if traits.sum_queries > 0 {
        let sums = vec![0.25; (HEADS * tokens) as usize];
        policy.observe(0, traits.sum_queries.min(tokens), &sums, tokens)?;
    }
    Ok(())
}

/// Nanoseconds of a call of a policy that has nothing to do.
type Idle = fn(&mut dyn Sparse, &Shape) -> Result<f64>;

/// The best of several rounds of many calls.
fn call(mut body: impl FnMut() -> Result<()>) -> Result<f64> {
    const CALLS: u32 = 2000;
    let mut best = f64::INFINITY;
    for _ in 0..15 {
        let mut result = Ok(());
        let time = seconds(|| {
            for _ in 0..CALLS {
                result = body();
            }
        });
        result?;
        best = best.min(time / f64::from(CALLS) * 1e9);
    }
    Ok(best)
}

/// Tokens of a sequence that is too short for any decision.
const SHORT: u32 = 128;

fn idle_select(policy: &mut dyn Sparse, _shape: &Shape) -> Result<f64> {
    let (ids, mut out) = ([0, 1, 2, 3, 4, 5, 6, 7], Vec::new());
    call(|| policy.select(0, None, &ids, &step(SHORT), &mut out))
}

fn idle_index(policy: &mut dyn Sparse, shape: &Shape) -> Result<f64> {
    let traits = policy.traits();
    let mut index = Index::default();
    let query = |heads: u32, dim: u32| numbers((heads * dim) as usize);
    let (heads, dim) = traits.query_rows(shape);
    let query = query(heads, dim);
    let query = rows(&query, heads as usize, dim as usize, Dtype::F32);
    let scores = vec![1.0; traits.scores(shape, 1, 0)];
    call(|| {
        if !scores.is_empty() {
            policy.score(0, &scores)?;
        }
        policy.index(0, &query, None, &step(SHORT), &mut index)?;
        match index.is_dense() {
            true => Ok(()),
            false => Err(Status::Invalid.into()),
        }
    })
}

fn idle_evict(policy: &mut dyn Sparse, _shape: &Shape) -> Result<f64> {
    let mut retained = RetainedTokens::default();
    call(|| match policy.evict(0, &step(SHORT), &mut retained)? {
        false => Ok(()),
        true => Err(Status::Invalid.into()),
    })
}

/// The slowest of all policies, beside `full`.
fn idle(name: &'static str, of: Idle) -> Bar {
    let shape = shape(8);
    let one = |policy: &str| -> Result<f64> {
        let mut policy = make(&spec_of(policy, &shape), &shape)?;
        observe_all(&mut *policy, &shape, SHORT)?;
        of(&mut *policy, &shape)
    };
    let (mut slowest, mut notes) = (("", 0.0), Vec::new());
    for entry in registry::ENTRIES {
        match one(entry.name) {
            Ok(time) if time > slowest.1 => slowest = (entry.name, time),
            Ok(_) => {}
            // The policy does not support the call.
            Err(error) if error.status() == Status::Unsupported => {}
            Err(error) => notes.push(format!("{}: {}", entry.name, error.message())),
        }
    }
    notes.insert(0, format!("the slowest of all: {}", slowest.0));
    Bar {
        baseline: "full",
        baseline_value: one("full").ok(),
        goal: Some(1000.0),
        note: notes.join("; "),
        ..bar(name, Ok(slowest.1), "ns")
    }
}

/// State of policies in bytes for a token and layer, beside its keys and values in bf16.
fn state() -> Vec<Bar> {
    const TOKENS: u32 = 8192;
    let shape = shape(8);
    let all = [
        ("state_quest", "quest(dense=0)"),
        ("state_arkvale", "arkvale(dense=0,page=16)"),
        ("state_dsa", "dsa"),
        ("state_h2o", "h2o"),
        ("state_h2o_one_list", "h2o(heads=all)"),
        ("state_tova", "tova"),
        ("state_snapkv", "snapkv"),
        ("state_keydiff", "keydiff"),
        ("state_knorm", "knorm"),
    ];
    let of = |spec: &str| -> Result<f64> {
        let mut policy = make(spec, &shape)?;
        observe_all(&mut *policy, &shape, TOKENS)?;
        Ok(policy.state_bytes() as f64 / f64::from(TOKENS))
    };
    let plain = f64::from(2 * 2 * shape.key_heads * shape.key_dim);
    let bars = all.into_iter().map(|(name, spec)| Bar {
        baseline: "bytes of its keys and values of bf16",
        baseline_value: Some(plain),
        ..bar(name, of(spec), "B/token")
    });
    bars.collect()
}

/// Measures the bars.
pub fn run(quick: bool) -> Vec<Bar> {
    let bars_or_note =
        |name, bars: Result<Vec<Bar>>| bars.unwrap_or_else(|e| vec![bar(name, Err(e), "us")]);
    let mut bars = bars_or_note("quest_select", choosing());
    bars.extend(bars_or_note("quest_select_scored", selecting(quick)));
    bars.extend(heavy(quick));
    bars.push(idle("idle_select", idle_select));
    bars.push(idle("idle_index", idle_index));
    bars.push(idle("idle_evict", idle_evict));
    bars.extend(state());
    bars
}
