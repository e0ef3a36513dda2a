//! The cost of a budget in text prediction: perplexity beside that of `full`, as a table.

use kvtier::sparse::caps;

use crate::reference::model::{Form, Model};
use crate::reference::recall::count;
use kvtier_lab::reference::quality::{Size, Subject, TextLoss, make, predict};
use kvtier_lab::reference::specs::{NAMES, with_budget};

const BUDGETS: [usize; 4] = [64, 128, 256, 512];

/// Policies with a share to reach instead of a budget.
const SHARES: [&str; 4] = [
    "xattention(block=64, tau=0.9)",
    "xattention(block=64, tau=0.5)",
    "flexprefill(block=64, gamma=0.9)",
    "flexprefill(block=64, gamma=0.5)",
];

fn table(name: &str, form: Form) {
    let model = Model::trained(name).expect("a model");
    let of = Subject { model: &model, form };
    let (texts, symbols, written) = (count(1, 6), count(256, 1024), count(24, 200));
    let mut specs = vec!["full".to_string()];
    specs.extend(SHARES.map(String::from));
    for &budget in &BUDGETS[..count(1, 4)] {
        let spec = |name: &&str| with_budget(name, &of.shape(), symbols, budget).expect("known");
        specs.extend(NAMES.iter().map(spec));
    }
    let mut all = vec![(TextLoss::default(), TextLoss::default()); specs.len()];
    for text in 0..texts as u64 {
        let size = Size { symbols, pairs: 12 };
        let lost = predict(of, 70 + text, (size, written), &specs).expect("what was lost");
        for (sum, lost) in all.iter_mut().zip(lost) {
            *sum = (sum.0.and(lost.prompt), sum.1.and(lost.behind));
        }
    }
    let full = (all[0].0.perplexity(), all[0].1.perplexity());
    println!(
        "{name} {form:?}: perplexity {:.3} in prompts of {}, {:.3} behind, {} symbols; ratios:",
        full.0,
        symbols - written,
        full.1,
        all[0].1.count,
    );
    for (spec, lost) in specs.iter().zip(&all).skip(1) {
        let prompt = lost.0.perplexity() / full.0;
        let behind = lost.1.perplexity() / full.1;
        println!("{spec:64} prompt {prompt:6.3}  behind {behind:6.3}");
        assert!(prompt.is_finite() && behind.is_finite(), "{spec}");
        let traits = make(spec, &of.shape()).expect("as before").traits();
        if traits.caps & (caps::INDEX_PREFILL | caps::LOAD_PREFILL) == 0 {
            assert_eq!(prompt, 1.0, "{spec} is not for prompts");
        }
    }
}

#[test]
fn perplexity_against_budget() {
    table("gqa", Form::Split);
}

#[test]
fn perplexity_against_budget_of_latent_rows() {
    table("mla", Form::Latent);
}
