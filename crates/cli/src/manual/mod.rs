//! Pages of the manual that are generated from tables in the code: specs, the configuration file,
//! metrics, and the tool itself, also as man pages. `tests/tool/manual.rs` compares them with the
//! committed pages in `docs/reference`.

mod configuration;
mod metrics;
mod specs;
mod tool;

use std::path::Path;

use clap::CommandFactory;
use kvtier::base::status::Result;

/// The generated pages: path below `docs`, and text.
pub fn pages() -> Result<Vec<(&'static str, String)>> {
    let pages = [
        ("reference/specs.md", specs::page()?),
        ("reference/configuration.md", configuration::page()?),
        ("reference/metrics.md", metrics::page()?),
        ("reference/tool.md", tool::page()),
    ];
    Ok(pages.map(|(name, text)| (name, wrapped(&text))).into())
}

/// Writes a man page for the tool and for each command into a directory, which is created.
pub fn write_man(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    // Not built, so that the command `help` gets no pages.
    clap_mangen::generate_to(crate::Cli::command(), dir)
}

/// The first lines of a generated page.
fn head(title: &str) -> String {
    format!(
        "<!-- Generated from the code. To write it again: \
         KVTIER_BLESS=1 cargo test -p kvtier-cli --test tool manual -->\n\n# {title}\n\n"
    )
}

/// A page with its paragraphs and lists in lines of at most 120 characters.
fn wrapped(text: &str) -> String {
    const WIDTH: usize = 120;
    let (mut out, mut is_code) = (String::new(), false);
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        if is_code || line.len() <= WIDTH || line.starts_with(['|', '#', '<']) {
            out += line;
            out.push('\n');
            continue;
        }
        let indent = if line.starts_with("- ") { "  " } else { "" };
        let (mut length, mut in_code) = (0, false);
        for (at, word) in line.split(' ').enumerate() {
            // A span of code is not broken.
            let is_broken = length + 1 + word.len() > WIDTH && !in_code;
            out += match at {
                0 => "",
                _ if is_broken => "\n",
                _ => " ",
            };
            length += 1;
            if is_broken {
                out += indent;
                length = indent.len();
            }
            out += word;
            length += word.len();
            in_code ^= word.matches('`').count() % 2 == 1;
        }
        out.push('\n');
    }
    out
}

/// A table of Markdown.
struct Table {
    text: String,
    columns: usize,
}

impl Table {
    fn new(columns: &[&str]) -> Table {
        let mut table = Table { text: String::new(), columns: columns.len() };
        table.row(columns);
        table.text.push_str(&format!("|{}\n", "---|".repeat(columns.len())));
        table
    }

    fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        assert_eq!(cells.len(), self.columns, "cells of a row");
        for cell in cells {
            let cell = escaped(cell.as_ref()).replace('|', "\\|").replace('\n', " ");
            self.text.push_str(&format!("| {cell} "));
        }
        self.text.push_str("|\n");
    }

    fn into_text(self) -> String {
        self.text + "\n"
    }
}

/// Text in which `<` outside of code begins no HTML.
fn escaped(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(at, part)| match at % 2 {
        0 => part.replace('<', "\\<"),
        _ => part.to_string(),
    });
    parts.collect::<Vec<_>>().join("`")
}

/// Text as code; an empty text stays empty.
fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}
