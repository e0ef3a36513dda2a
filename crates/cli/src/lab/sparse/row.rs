//! The results of a spec, as a table and as CSV.

use super::plan::Point;
use kvtier_lab::reference::quality::{Answers, Prediction, TextLoss, Usage, interval};

/// A policy with a budget, for a model.
#[derive(Clone, Debug)]
pub struct Row {
    /// The model.
    pub model: &'static str,
    /// The spec.
    pub point: Point,
    /// Questions, and right answers.
    questions: usize,
    right: usize,
    answer_usage: Sum,
    prompt: TextLoss,
    behind: TextLoss,
    prediction_usage: Sum,
    seconds: f64,
}

/// Sums of shares over texts, and the number of texts.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: f64,
    looked: f64,
    prompt: f64,
    texts: f64,
}

impl Sum {
    fn add(&mut self, used: &Usage) {
        self.bytes += used.bytes;
        self.looked += used.looked;
        self.prompt += used.prompt;
        self.texts += 1.0;
    }
}

/// A column: its name and its value.
type Column = (&'static str, fn(&Row) -> f64);

/// The columns of CSV besides model, policy, budget and spec.
const COLUMNS: [Column; 13] = [
    ("recall", Row::recall),
    ("recall_low", |row| row.interval().0),
    ("recall_high", |row| row.interval().1),
    ("questions", |row| row.questions as f64),
    ("bytes", Row::bytes),
    ("keys_seen", |row| row.answer_usage.looked / row.answer_usage.texts),
    ("perplexity", Row::perplexity),
    ("prompt_perplexity", Row::prompt_perplexity),
    ("symbols", |row| row.behind.count as f64),
    ("text_bytes", Row::text_bytes),
    ("text_keys_seen", |row| row.prediction_usage.looked / row.prediction_usage.texts),
    ("prompt_keys_seen", Row::prompt_seen),
    ("seconds", |row| row.seconds),
];

impl Row {
    /// A row without results.
    pub fn new(model: &'static str, point: &Point) -> Row {
        Row {
            model,
            point: point.clone(),
            questions: 0,
            right: 0,
            answer_usage: Sum::default(),
            prompt: TextLoss::default(),
            behind: TextLoss::default(),
            prediction_usage: Sum::default(),
            seconds: 0.0,
        }
    }

    /// Adds the answers about a text.
    pub fn add_answers(&mut self, answers: &Answers) {
        self.questions += answers.right.len();
        self.right += answers.right.iter().filter(|right| **right).count();
        self.answer_usage.add(&answers.used);
        self.seconds += answers.seconds;
    }

    /// Adds the prediction of a text.
    pub fn add_prediction(&mut self, prediction: &Prediction) {
        self.prompt = self.prompt.and(prediction.prompt);
        self.behind = self.behind.and(prediction.behind);
        self.prediction_usage.add(&prediction.used);
        self.seconds += prediction.seconds;
    }

    /// The share of questions with right answers.
    pub fn recall(&self) -> f64 {
        self.right as f64 / self.questions as f64
    }

    /// The 95 % confidence interval of the recall.
    pub fn interval(&self) -> (f64, f64) {
        interval(self.right, self.questions)
    }

    /// The share of bytes of keys and values that were kept, or moved for a step, with questions.
    pub fn bytes(&self) -> f64 {
        self.answer_usage.bytes / self.answer_usage.texts
    }

    /// The share of bytes with predicted texts.
    pub fn text_bytes(&self) -> f64 {
        self.prediction_usage.bytes / self.prediction_usage.texts
    }

    /// The share of keys that prompts were computed with.
    pub fn prompt_seen(&self) -> f64 {
        self.prediction_usage.prompt / self.prediction_usage.texts
    }

    /// The perplexity of the symbols after a prompt.
    pub fn perplexity(&self) -> f64 {
        self.behind.perplexity()
    }

    /// The perplexity of the last symbols of a prompt.
    pub fn prompt_perplexity(&self) -> f64 {
        self.prompt.perplexity()
    }

    /// The budget as text.
    pub fn budget(&self) -> String {
        self.point.budget.map_or("-".to_string(), |budget| budget.to_string())
    }
}

/// The rows as CSV.
pub fn csv(rows: &[Row]) -> String {
    let names: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
    let mut out = format!("model,policy,budget,spec,{}\n", names.join(","));
    for row in rows {
        let text = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
        let values: Vec<String> = COLUMNS.iter().map(|(_, of)| of(row).to_string()).collect();
        let Point { policy, budget, spec } = &row.point;
        let budget = budget.map_or(String::new(), |budget| budget.to_string());
        let (policy, spec) = (text(policy), text(spec));
        out += &format!("{},{policy},{budget},{spec},{}\n", row.model, values.join(","));
    }
    out
}

/// Prints a table.
pub fn print(about: &str, rows: &[Row]) {
    println!("{about}.");
    let width = rows.iter().map(|row| row.point.policy.len()).max().unwrap_or(0).max(6);
    for (at, row) in rows.iter().enumerate() {
        if at == 0 || rows[at - 1].model != row.model {
            println!(
                "\n{:<width$} {:>6} {:>7}  {:>17} {:>7}  {:>10} {:>7}  {:>10} {:>7}",
                row.model,
                "budget",
                "recall",
                "95 % between",
                "bytes",
                "perplexity",
                "bytes",
                "in prompts",
                "seen"
            );
        }
        let (low, high) = row.interval();
        println!(
            "{:<width$} {:>6} {:>6.1}%  {:>7.1}% and {:>4.1}% {:>6.1}%  {:>10.3} {:>6.1}%  {:>10.3} \
             {:>6.1}%",
            row.point.policy,
            row.budget(),
            100.0 * row.recall(),
            100.0 * low,
            100.0 * high,
            100.0 * row.bytes(),
            row.perplexity(),
            100.0 * row.text_bytes(),
            row.prompt_perplexity(),
            100.0 * row.prompt_seen(),
        );
    }
}
