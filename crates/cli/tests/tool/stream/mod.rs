//! `kvtier stream`, with models in files.

use kvtier_testkit::fixtures::model_files;

mod page;
mod plan;
mod run;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvtier_testkit::fixtures::scratch::Scratch;
use model_files::{Made, Sizes, write_gguf, write_safetensors};
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
        // Messages of clap end with a blank line.
        assert!(!self.error.contains("panicked"), "{}", self.error);
    }
}

fn tool() -> Command {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    tool.env_remove("RUST_LOG").arg("stream");
    tool
}

fn stream(command: &str, files: &[&Path], args: &[&str]) -> ToolOutput {
    let mut tool = tool();
    tool.arg(command).args(files).args(args);
    ToolOutput::of(tool.output().expect("the tool starts"))
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn number(value: &Value, at: &str) -> u64 {
    value.pointer(at).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {at} in {value}"))
}

/// Layers of about 1.4 MiB.
fn dense() -> Sizes {
    Sizes { layers: 12, hidden: 256, ffn: 640, vocabulary: 500, ..Sizes::default() }
}

/// Eight experts of 192 KiB in each of four layers.
fn experts() -> Sizes {
    Sizes { layers: 4, experts: 8, hidden: 256, ffn: 128, ..Sizes::default() }
}

fn gguf(dir: &Scratch, sizes: &Sizes) -> PathBuf {
    write_gguf(&dir.0, "model", &sizes.gguf(), &sizes.metadata(), 1).remove(0)
}
