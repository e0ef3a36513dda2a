//! The committed headers equal the generated ones. Update: `KVTIER_BLESS=1 cargo test --test abi
//! header`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use crate::headers::items::Kind;
use crate::headers::{HEADERS, closure, describe, headers, root, write};

/// All generated files of `include/kvtier`: name, text.
fn generated() -> Vec<(String, String)> {
    let headers = headers();
    let mut files = write::all(&headers);
    files.push(("kvtier.json".to_string(), describe::json(&headers)));
    files
}

#[test]
fn the_committed_headers_are_current() {
    for (name, fresh) in generated() {
        let path = root().join("include/kvtier").join(&name);
        if std::env::var_os("KVTIER_BLESS").is_some() {
            std::fs::write(&path, &fresh).expect("writing the header");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = fresh.lines().zip(committed.lines()).position(|(a, b)| a != b);
        assert!(
            fresh == committed,
            "include/kvtier/{name} is stale from line {}; run KVTIER_BLESS=1 cargo test --test abi \
             header",
            differs.map_or(committed.lines().count(), |i| i) + 1
        );
    }
}

/// The umbrella is written by hand.
#[test]
fn the_umbrella_includes_every_header_and_names_functions_that_exist() {
    let text = std::fs::read_to_string(root().join("include/kvtier/kvtier.h")).expect("kvtier.h");
    let includes = text.lines().filter_map(|line| line.strip_prefix("#include <kvtier/"));
    let includes: Vec<&str> = includes.map(|name| name.trim_end_matches(".h>")).collect();
    assert_eq!(includes, HEADERS.map(|(name, _)| name));
    let headers = headers();
    let known: BTreeSet<&str> = headers
        .iter()
        .flat_map(|header| header.items.iter().map(|(_, item)| item.name()))
        .collect();
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    let unknown: Vec<&str> =
        words.filter(|word| word.starts_with("kvt_") && !known.contains(word)).collect();
    assert!(unknown.is_empty(), "kvtier.h names what no header declares: {unknown:?}");
}

/// The generator silently takes one of two constants of the same name.
#[test]
fn names_are_unique_and_have_the_prefix() {
    let mut names = BTreeSet::new();
    for header in headers() {
        for (_, name) in &header.source.order {
            assert!(names.insert(name.clone()), "{name} is declared twice");
            assert!(name.starts_with("kvt_") || name.starts_with("KVT_"), "{name}");
        }
    }
    assert!(names.len() > 600);
}

/// A reader meets each type before the functions that take it, near them.
#[test]
fn types_stand_before_the_functions_that_take_them() {
    let headers = headers();
    let mut declared: BTreeMap<&str, &str> = BTreeMap::new();
    let all: BTreeMap<&str, &str> = headers
        .iter()
        .flat_map(|header| header.items.iter().map(|(_, item)| (item.name(), header.name)))
        .collect();
    for header in &headers {
        let visible = closure(header.name);
        for (_, item) in &header.items {
            // Structs and callbacks may point to types that are declared below them.
            let is_function = matches!(item.kind, Kind::Function(_));
            for used in item.uses().into_iter().filter(|_| is_function) {
                let Some(home) = all.get(used.base.as_str()) else { continue };
                let is_before = declared.contains_key(used.base.as_str());
                let is_foreign = *home != header.name && !visible.contains(home);
                assert!(
                    is_before || is_foreign,
                    "{}.h: {} stands before {}, which it uses",
                    header.name,
                    item.name(),
                    used.base
                );
            }
            declared.insert(item.name(), header.name);
        }
    }
}

#[test]
fn every_function_is_documented_and_no_common_rule_is_repeated() {
    let mut functions = 0;
    for item in headers().into_iter().flat_map(|header| header.items).map(|(_, item)| item) {
        let Kind::Function(signature) = &item.kind else { continue };
        functions += 1;
        let comment = item.doc.join("\n");
        assert!(!comment.is_empty(), "no comment: {}", signature.name);
        for common in ["@param err ", "KVT_E_FORKED", "KVT_E_PANIC", "# Safety", "Since 0.1"] {
            assert!(
                !comment.contains(common),
                "{}: its comment repeats {common:?}, which base.h says for all functions",
                signature.name
            );
        }
    }
    assert!(functions > 200, "only {functions} functions were found");
}

/// Retired words; docs/glossary.md lists their replacements.
const RETIRED: [&str; 28] = [
    "told",
    "tells",
    "whoever",
    "nobody",
    "somebody",
    "shelf",
    "deed",
    "errand",
    "errands",
    "hungry",
    "starve",
    "ledger",
    "books",
    "debt",
    "owe",
    "owed",
    "seat",
    "home",
    "homes",
    "board",
    "trial",
    "grain",
    "wish",
    "wishes",
    "hands",
    "vacancies",
    "sight",
    "downs",
];

#[test]
fn comments_use_the_vocabulary() {
    let mut wrong = Vec::new();
    for (name, header) in generated().iter().filter(|(name, _)| name.ends_with(".h")) {
        for (at, line) in header.lines().enumerate() {
            let Some((_, comment)) = line.split_once("///") else { continue };
            let words = comment.split(|c: char| !c.is_alphanumeric() && c != '_');
            let retired = words.filter(|word| RETIRED.contains(&word.to_lowercase().as_str()));
            wrong.extend(retired.map(|word| format!("{name}:{}: {word}: {line}", at + 1)));
        }
    }
    assert!(wrong.is_empty(), "retired words, see docs/glossary.md:\n{}", wrong.join("\n"));
}

/// The examples at the heads of the headers compile, with all warnings as errors.
#[test]
fn opening_examples_compile() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("examples");
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut texts = generated();
    let umbrella = std::fs::read_to_string(root().join("include/kvtier/kvtier.h"));
    texts.push(("kvtier.h".to_string(), umbrella.expect("kvtier.h")));
    let (mut found, mut sources) = (0, Vec::new());
    for (name, text) in texts.iter().filter(|(name, _)| name.ends_with(".h")) {
        let opening = text.lines().take_while(|line| line.starts_with("///"));
        let code: Vec<&str> = opening.filter_map(|line| line.strip_prefix("///     ")).collect();
        assert!(!code.is_empty(), "{name} opens without an example");
        assert!(code.len() <= 20, "the example of {name} has {} lines; 20 are allowed", code.len());
        let source = folder.join(format!("{name}.c"));
        let body = code.join("\n");
        let text = format!("#include <kvtier/{name}>\n{EXAMPLE_PRELUDE}{body}\nreturn 0;\n}}\n");
        std::fs::write(&source, text).expect("an example");
        sources.push(source);
        found += 1;
    }
    assert_eq!(found, HEADERS.len() + 1);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let mut cc = Command::new(compiler);
    cc.args(["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]);
    cc.arg("-I").arg(root().join("include")).args(sources);
    let out = cc.output().expect("a C compiler, as the linker of the tests");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Each example is the body of a function, with these variables.
const EXAMPLE_PRELUDE: &str = "
#include <kvtier/kvtier.h>
#include <stdio.h>
extern kvt_runtime_t *runtime;
extern kvt_queue_t *queue;
extern kvt_op_t *op;
extern kvt_budget_t *budget;
extern kvt_account_t *account;
extern kvt_buffer_t *buffer;
extern kvt_store_t *store;
extern kvt_namespace_t *ns;
extern kvt_session_t *session;
extern kvt_policy_t *policy;
extern kvt_sparse_t *sparse;
extern kvt_offload_t *offload;
extern kvt_model_t *model;
extern kvt_stream_t *streamer;
extern kvt_device_t *device;
extern kvt_trace_t *trace;
extern kvt_error_t *err;
extern kvt_status_t status;
extern kvt_attention_t shape;
extern kvt_rows_t rows;
extern kvt_transfer_t transfer;
extern kvt_view_t k_views[32], v_views[32];
extern void *const *pages;
extern uint64_t page_count;
extern float query[1024];
extern uint16_t keys[1], values[1];
extern uint8_t digest[32];
extern uint32_t tokens[4096];
extern uint64_t count;
extern int64_t now_ns;
void compute_next_layer(void);
void use(const void *value);
int fail(kvt_error_t *error);
int example(void);
int example(void) {
";

#[test]
fn readme_has_the_least_program() {
    let text = |path: &str| std::fs::read_to_string(root().join(path)).expect(path);
    let (readme, program) = (text("README.md"), text("examples/c/hello_kv.c"));
    let shown = readme.split("```c\n").nth(1).and_then(|rest| rest.split("```").next());
    assert_eq!(shown, Some(program.as_str()), "README.md shows another hello_kv.c");
    assert!(program.lines().count() <= 40);
}
