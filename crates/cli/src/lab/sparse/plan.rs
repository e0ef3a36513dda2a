//! The specs to measure: each policy with every budget.

use super::Outcome;
use kvtier_lab::reference::model::MAX_TOKENS;
use kvtier_lab::reference::quality::Subject;
use kvtier_lab::reference::specs::{NAMES, share, with_budget};

/// Smallest budget that all named policies accept.
const LEAST: usize = 48;
/// Most specs of a model, since each has a sequence of its own.
const MOST: usize = 1000;

/// A spec to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The policy, which is one line in a plot.
    pub policy: String,
    /// The budget; `None` for a policy without one, or with its own.
    pub budget: Option<usize>,
    /// The spec.
    pub spec: String,
}

/// Budgets, separated by commas.
pub fn budgets(text: &str) -> Outcome<Vec<usize>> {
    let one = |text: &str| -> Outcome<usize> {
        match text.parse() {
            Ok(tokens) if (LEAST..=MAX_TOKENS as usize).contains(&tokens) => Ok(tokens),
            _ => Err(format!("'{text}' is not a budget of {LEAST} to {MAX_TOKENS} tokens").into()),
        }
    };
    let all = text.split(',').map(str::trim).filter(|text| !text.is_empty()).map(one);
    let mut all: Vec<usize> = all.collect::<Outcome<_>>()?;
    all.sort_unstable();
    all.dedup();
    if all.is_empty() { Err("nothing to measure: no budgets".into()) } else { Ok(all) }
}

/// The points of a model: all keys, the policies, and random keys.
pub fn points(
    policies: &[String],
    budgets: &[usize],
    of: Subject<'_>,
    symbols: usize,
) -> Outcome<Vec<Point>> {
    let mut names: Vec<&str> = vec!["full"];
    for name in policies.iter().map(String::as_str).chain(["random"]) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let mut points = Vec::new();
    for name in names {
        let has_budget =
            NAMES.contains(&name) || name.contains("{budget}") || name.contains("{share}");
        let budgets: Vec<Option<usize>> =
            if has_budget { budgets.iter().copied().map(Some).collect() } else { vec![None] };
        for budget in budgets {
            let spec = spec(name, budget, of, symbols);
            of.check(&spec).map_err(|e| format!("'{name}': {}", e.message()))?;
            points.push(Point { policy: name.to_string(), budget, spec });
        }
    }
    if points.len() > MOST {
        return Err(format!("a model has at most {MOST} specs, not {}", points.len()).into());
    }
    Ok(points)
}

fn spec(name: &str, budget: Option<usize>, of: Subject<'_>, symbols: usize) -> String {
    let Some(budget) = budget else { return name.to_string() };
    with_budget(name, &of.shape(), symbols, budget).unwrap_or_else(|| {
        let share = share(symbols, budget).to_string();
        name.replace("{budget}", &budget.to_string()).replace("{share}", &share)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_lab::reference::model::{Form, Model};

    fn all(policies: &str, budgets: &[usize]) -> Outcome<Vec<Point>> {
        let model = Model::trained("gqa").expect("a model");
        let policies = super::super::super::parse::specs(policies);
        points(&policies, budgets, Subject { model: &model, form: Form::Split }, 1000)
    }

    #[test]
    fn budgets_are_tokens() {
        assert_eq!(budgets("128, 64,,128").expect("budgets"), [64, 128]);
        let beyond = (MAX_TOKENS + 1).to_string();
        for wrong in ["", ",", "47", beyond.as_str(), "-1", "1e3", "many", "64;128", "0"] {
            let error = budgets(wrong).expect_err(wrong).to_string();
            assert!(error.contains("budget"), "{error}");
        }
    }

    #[test]
    fn names_and_specs_are_filled_with_each_budget() {
        let text = "tova,knorm(budget={budget},sink=2),minference(budget={share}),xattention";
        let points = all(text, &[64, 250]).expect("points");
        let got: Vec<(Option<usize>, &str)> =
            points.iter().map(|point| (point.budget, point.spec.as_str())).collect();
        let expected = [
            (None, "full"),
            (Some(64), "tova(budget=64)"),
            (Some(250), "tova(budget=250)"),
            (Some(64), "knorm(budget=64,sink=2)"),
            (Some(250), "knorm(budget=250,sink=2)"),
            (Some(64), "minference(budget=0.064)"),
            (Some(250), "minference(budget=0.25)"),
            (None, "xattention"),
            (Some(64), "random(budget=64)"),
            (Some(250), "random(budget=250)"),
        ];
        assert_eq!(got, expected);
        assert_eq!(points[3].policy, "knorm(budget={budget},sink=2)");
        // Duplicates are measured once.
        assert_eq!(all("random,full,tova,tova", &[64]).expect("points").len(), 3);
        assert!(NAMES.iter().all(|name| all(name, &[LEAST, 4096]).is_ok()));
    }

    #[test]
    fn invalid_policies_are_refused() {
        for (text, words) in [
            ("qest", "did you mean 'quest'"),
            ("quest(budgt={budget})", "did you mean 'budget'"),
            ("tova(budget={buget})", "tova(budget={buget})"),
            ("snapkv(form=original)", "cannot evict by query head"),
            ("streaming(rotate=true)", "rotate keys again"),
            ("quest(", "quest("),
        ] {
            let error = all(text, &[64]).expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
