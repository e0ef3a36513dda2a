//! The cost of a budget in recall: questions about pairs far back in a text. All policies get the
//! same ones (`reference::quality`).

use crate::reference::model::{Form, Model};
use kvtier_lab::reference::quality::{Size, Subject, Usage, answer_questions, interval};

/// Tokens that a head may have, of about 1,100.
const BUDGET: usize = 192;
const SIZE: Size = Size { symbols: 1024, pairs: 24 };

/// Prompts of a test: all of them where it is asked for, and where code is optimised.
pub fn count(few: usize, all: usize) -> usize {
    let is_all = std::env::var_os("KVTIER_REFERENCE_ALL").is_some() || !cfg!(debug_assertions);
    if is_all { all } else { few }
}

/// One policy of the comparison.
struct Case {
    spec: String,
    /// Whether each question was answered, the same ones for all.
    right: Vec<bool>,
    /// Keys of a head that were kept, or read, in a step and layer: the most of all prompts.
    most: f64,
}

fn specs() -> Vec<String> {
    let specs = [
        "full",
        // It evicts once and keeps all tokens written since.
        "snapkv(budget=144, window=48)",
        "quest(budget=176, dense=0, share=bound)",
        "quest(budget=64, dense=0)",
        "h2o(sink=4, recent=32, budget=156)",
        "streaming(sinks=4, recent=188)",
        "random(budget=192, recent=32, seed=5)",
    ];
    specs.map(String::from).to_vec()
}

/// Prompts, each computed once: every policy gets its inputs, and continues from
/// there with a separate cache.
fn recall(model: &Model, form: Form, prompts: usize) -> Vec<Case> {
    let specs = specs();
    let case = |spec: &String| Case { spec: spec.clone(), right: Vec::new(), most: 0.0 };
    let mut cases: Vec<Case> = specs.iter().map(case).collect();
    for prompt in 0..prompts as u64 {
        let answers = answer_questions(Subject { model, form }, 1000 + prompt, SIZE, &specs)
            .expect("answers");
        for (case, answers) in cases.iter_mut().zip(answers) {
            let Usage { most, moved, .. } = answers.used;
            case.right.extend(answers.right);
            case.most = case.most.max(if case.spec.starts_with("quest") { moved } else { most });
        }
    }
    cases
}

fn compare(name: &str, form: Form, few: usize) -> Vec<Case> {
    let model = Model::trained(name).expect("a model");
    let cases = recall(&model, form, count(few, 12));
    let Size { symbols, pairs } = SIZE;
    println!("{name} {form:?}: {symbols} symbols, {pairs} pairs, {BUDGET} tokens a head");
    for case in &cases {
        let (low, high) = interval(case.count(), case.right.len());
        println!(
            "{:45} {:5.1} % of {} right ({:.1} to {:.1}), {:.0} keys",
            case.spec,
            100.0 * case.count() as f64 / case.right.len() as f64,
            case.right.len(),
            100.0 * low,
            100.0 * high,
            case.most,
        );
    }
    let full = &cases[0];
    assert!(full.count() * 100 >= full.right.len() * 95, "with all keys it knows too little");
    for case in &cases[1..] {
        assert!(case.most <= BUDGET as f64 + 0.5, "{} has {} keys", case.spec, case.most);
    }
    beats(&cases, "quest(budget=176", "streaming");
    beats(&cases, "quest(budget=176", "random");
    beats(&cases, "quest(budget=64", "streaming");
    beats(&cases, "quest(budget=64", "random");
    beats(&cases, "snapkv", "streaming");
    beats(&cases, "snapkv", "random");
    cases
}

impl Case {
    fn count(&self) -> usize {
        self.right.iter().filter(|right| **right).count()
    }
}

/// Whether one policy answers significantly more of the questions that only one of two answers:
/// chance does so in fewer than 2.5 of 100 cases (the sign test, by the normal distribution).
fn beats(cases: &[Case], a: &str, b: &str) {
    let of = |name: &str| cases.iter().find(|case| case.spec.starts_with(name)).expect("known");
    let both = of(a).right.iter().zip(&of(b).right);
    let (mut more, mut fewer) = (0.0_f64, 0.0_f64);
    both.for_each(|(a, b)| match (a, b) {
        (true, false) => more += 1.0,
        (false, true) => fewer += 1.0,
        _ => {}
    });
    println!("{a} beats {b} {more} to {fewer}");
    assert!(more - fewer > 1.96 * (more + fewer).sqrt(), "{a} and {b}: {more} to {fewer}");
}

#[test]
fn key_aware_policies_beat_random() {
    let cases = compare("gqa", Form::Split, 4);
    beats(&cases, "h2o", "random");
}

#[test]
fn key_aware_policies_beat_random_on_latent_rows() {
    // `h2o` is no better than chance here, in either form of keys: a question counts once, and is
    // little beside what all queries of the prompt have looked at.
    compare("mla", Form::Latent, 2);
}
