//! `kvtier-bench` as contributors call it.
#![allow(missing_docs)]

mod all;
mod groups;
mod model;

use std::process::{Command, Output};

use serde_json::Value;

/// Output and exit status of the tool.
struct ToolOutput {
    code: Option<i32>,
    out: String,
    error: String,
}

impl ToolOutput {
    fn of(output: Output) -> ToolOutput {
        let text = |bytes| String::from_utf8(bytes).expect("text");
        ToolOutput {
            code: output.status.code(),
            out: text(output.stdout),
            error: text(output.stderr),
        }
    }

    /// The standard output; fails unless the tool succeeded without errors.
    fn fine(self) -> String {
        assert_eq!((self.code, self.error.as_str()), (Some(0), ""), "{}", self.out);
        self.out
    }

    /// Checks that the tool failed with this message and printed nothing else.
    fn fails(&self, code: i32, words: &str) {
        assert_eq!((self.code, self.out.as_str()), (Some(code), ""), "{}", self.error);
        assert!(self.error.contains(words), "{words:?} is not in {}", self.error);
        assert!(!self.error.contains("panicked"), "{}", self.error);
    }
}

fn tool() -> Command {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_kvtier-bench"));
    tool.env_remove("RUST_LOG");
    tool
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}
