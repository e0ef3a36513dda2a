//! A bar: a measured number beside a baseline of the same run.

use std::fmt::Display;

/// Whether a lower or a higher value is better.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// A lower value is better.
    Lower,
    /// A higher value is better.
    Higher,
}

/// One measured bar.
pub struct Bar {
    /// The name.
    pub bar: &'static str,
    /// The measured value; `None` if something needed is absent.
    pub value: Option<f64>,
    /// The unit of both values.
    pub unit: &'static str,
    /// The baseline.
    pub baseline: &'static str,
    /// The value of the baseline.
    pub baseline_value: Option<f64>,
    /// The goal for `value`.
    pub goal: Option<f64>,
    /// Whether a lower or a higher value is better.
    pub better: Better,
    /// Details, or why there is no value.
    pub note: String,
}

impl Bar {
    /// A bar without values.
    pub fn new(bar: &'static str, unit: &'static str, better: Better) -> Bar {
        Bar {
            bar,
            value: None,
            unit,
            baseline: "",
            baseline_value: None,
            goal: None,
            better,
            note: String::new(),
        }
    }

    /// A bar whose lower values are better.
    pub fn lower(bar: &'static str, unit: &'static str) -> Bar {
        Bar::new(bar, unit, Better::Lower)
    }

    /// A bar whose higher values are better.
    pub fn higher(bar: &'static str, unit: &'static str) -> Bar {
        Bar::new(bar, unit, Better::Higher)
    }

    /// Sets the baseline.
    pub fn baseline(self, baseline: &'static str) -> Bar {
        Bar { baseline, ..self }
    }

    /// Sets the value of the baseline.
    pub fn baseline_value(self, value: impl Into<Option<f64>>) -> Bar {
        Bar { baseline_value: value.into(), ..self }
    }

    /// Sets the goal.
    pub fn goal(self, goal: impl Into<Option<f64>>) -> Bar {
        Bar { goal: goal.into(), ..self }
    }

    /// Sets the value.
    pub fn value(self, value: impl Into<Option<f64>>) -> Bar {
        Bar { value: value.into(), ..self }
    }

    /// Sets the note.
    pub fn note(self, note: impl Into<String>) -> Bar {
        Bar { note: note.into(), ..self }
    }

    /// Sets the value, or the error as the note.
    pub fn measured<E: Display>(self, value: Result<f64, E>) -> Bar {
        match value {
            Ok(value) => self.value(value),
            Err(error) => self.note(error.to_string()),
        }
    }

    /// Sets the value and that of the baseline, or the error as the note.
    pub fn measured_pair<E: Display>(self, values: Result<(f64, f64), E>) -> Bar {
        match values {
            Ok((value, baseline)) => self.value(value).baseline_value(baseline),
            Err(error) => self.note(error.to_string()),
        }
    }

    /// Whether the goal is met; `None` without a goal or a value.
    pub fn ok(&self) -> Option<bool> {
        let (value, goal) = (self.value?, self.goal?);
        Some(match self.better {
            Better::Lower => value <= goal,
            Better::Higher => value >= goal,
        })
    }

    /// The bar as JSON.
    pub fn json(&self, group: &str) -> serde_json::Value {
        let mut line = serde_json::json!({
            "group": group,
            "bar": self.bar,
            "value": self.value,
            "unit": self.unit,
            "baseline": self.baseline,
            "baseline_value": self.baseline_value,
            "goal": self.goal,
            "better": if self.better == Better::Lower { "lower" } else { "higher" },
            "ok": self.ok(),
            "profile": kvtier_cli::PROFILE,
        });
        if !self.note.is_empty() {
            line["note"] = self.note.clone().into();
        }
        line
    }

    /// The bar as a row of the table.
    pub fn row(&self) -> String {
        let number = |n: Option<f64>| n.map_or("-".to_string(), |n| format!("{n:.2}"));
        let verdict = match self.ok() {
            Some(true) => "ok",
            Some(false) => "MISSED",
            None => "-",
        };
        let goal = self.goal.map_or("-".to_string(), |goal| {
            format!("{} {goal}", if self.better == Better::Lower { "<=" } else { ">=" })
        });
        format!(
            "{:<24} {:>12} {:<10} {:>10}  {:<8} {:>12}  {} {}",
            self.bar,
            number(self.value),
            self.unit,
            goal,
            verdict,
            number(self.baseline_value),
            self.baseline,
            self.note
        )
    }
}
