//! Rules that a reader of the sources relies on, checked by reading them: imports inside the
//! library point down, inside the store and the streamer too; system facilities are reached through
//! `base` and `io`; functions stay readable; identifiers use the glossary's words. The
//! dependencies between packages are cargo's.

use std::path::{Path, PathBuf};

/// The layers from the top down; a module may use modules of lower layers only.
const LAYERS: [&[&str]; 6] = [
    &["api", "ffi"],
    &["store", "offload", "stream", "trace"],
    &["policy", "sparse", "tier"],
    &["attention", "device", "format", "io"],
    &["meta"],
    &["base"],
];

/// Same-layer imports that the design allows.
const BESIDE: [(&str, &str); 2] = [("offload", "store"), ("stream", "store")];

/// Names that only `base` and `io` may use.
const SYSTEM: [&str; 6] =
    ["std::sync::Mutex", "std::thread", "parking_lot", "std::fs", "Instant", "SystemTime"];

/// The store's modules from the top down. A module may use modules of the same and of lower levels.
const STORE: [&[&str]; 5] = [
    &["bundle", "control", "guards", "handle", "server"],
    &["capacity", "pool", "spec"],
    &["executor"],
    &["state"],
    &[
        "admission",
        "counters",
        "events",
        "job_queues",
        "plan",
        "ready_event",
        "token_path",
        "transfer_log",
    ],
];

/// The modules of the store's state machine from the top down. All of them extend `StoreState`;
/// the rule is about the types that they share.
const STATE: [&[&str]; 9] = [
    &["work", "snapshot", "check", "stats"],
    &["remote", "remote_fetch", "remote_lookup", "remote_upload"],
    &["plans", "session", "writeback"],
    &["blocks", "eviction", "quotas", "retention"],
    &["disk_gc", "device_tier", "runs"],
    &["namespaces", "transfer"],
    &["config", "tier_cache"],
    &["batches", "chunk_table"],
    &["shadow"],
];

/// The streamer's modules from the top down, with the same rule.
const STREAM: [&[&str]; 7] =
    [&["streamer"], &["memory"], &["scheduler"], &["plan"], &["checksums"], &["units"], &["model"]];

/// Words that the glossary replaces. They must not occur in identifiers.
const RETIRED: [&str; 35] = [
    "along",
    "board",
    "boards",
    "books",
    "debt",
    "debts",
    "deed",
    "deeds",
    "downs",
    "early",
    "ears",
    "errand",
    "errands",
    "far",
    "grain",
    "grains",
    "hands",
    "heard",
    "homes",
    "hungry",
    "ledger",
    "near",
    "rectangle",
    "shelf",
    "shelves",
    "sight",
    "starve",
    "tell",
    "told",
    "trial",
    "trouble",
    "vacancies",
    "whoever",
    "wish",
    "wishes",
];

const MAX_FUNCTION_LINES: usize = 70;

/// The sources of the library.
fn sources() -> Vec<(PathBuf, String)> {
    sources_below("src")
}

fn sources_below(folder: &str) -> Vec<(PathBuf, String)> {
    fn walk(dir: &Path, out: &mut Vec<(PathBuf, String)>) {
        let mut entries: Vec<_> =
            std::fs::read_dir(dir).expect("src").map(|e| e.expect("entry").path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).expect("source");
                out.push((path, text));
            }
        }
    }
    let mut out = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut out);
    assert!(!out.is_empty(), "no sources below {folder}");
    out
}

fn module(path: &Path) -> String {
    let inside = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let first = inside.expect("in src").components().next().expect("a name");
    first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_string()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// Code without its unit tests, which may import any module.
fn production(text: &str) -> &str {
    text.split("\n#[cfg(all(test")
        .next()
        .and_then(|t| t.split("\n#[cfg(test)]").next())
        .unwrap_or(text)
}

fn allowed(from: &str, to: &str) -> bool {
    let (Some(above), Some(below)) = (layer(from), layer(to)) else { return false };
    from == to || above < below || BESIDE.contains(&(from, to))
}

/// Modules named by `crate::module` in a line.
fn named(line: &str) -> Vec<String> {
    line.split("crate::")
        .skip(1)
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        .filter(|name: &String| !name.is_empty() && name != "fail")
        .collect()
}

#[test]
fn imports_point_down() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let here = module(&path);
        if here == "lib" {
            continue;
        }
        assert!(layer(&here).is_some(), "{here} is on no layer: {}", path.display());
        for (i, line) in text.lines().enumerate() {
            for there in named(line.split("//").next().unwrap_or("")) {
                if !allowed(&here, &there) {
                    wrong.push(format!("{}:{}: {here} -> {there}", path.display(), i + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "imports that point up or sideways:\n{}", wrong.join("\n"));
}

#[test]
fn the_check_sees_an_arrow_that_points_up() {
    assert_eq!(named("use crate::store::handle;"), ["store"]);
    assert!(!allowed("base", "store") && !allowed("tier", "policy") && !allowed("meta", "io"));
    assert!(allowed("ffi", "base") && allowed("offload", "store") && !allowed("store", "offload"));
}

/// The level of a module.
fn level_of(module: &str, levels: &[&[&str]]) -> Option<usize> {
    levels.iter().position(|modules| modules.contains(&module))
}

/// Modules that a text names by a prefix such as `crate::store::`.
fn named_in(code: &str, prefix: &str) -> Vec<String> {
    let name = |rest: &str| -> String {
        rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let names = code.split(prefix).skip(1).map(name);
    // Types that a folder's `mod.rs` declares or re-exports belong to the folder.
    names.filter(|name| name.starts_with(char::is_lowercase)).collect()
}

/// Imports between modules of a folder that point to a higher level.
fn upward_imports(folder: &str, levels: &[&[&str]]) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
    let prefix = format!("crate::{}::", folder.replace('/', "::"));
    let mut wrong = Vec::new();
    for (path, text) in sources_below(&format!("src/{folder}")) {
        let below = path.strip_prefix(&root).expect("in the folder");
        let first = below.components().next().expect("a name");
        let here = first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_string();
        if here == "mod" {
            continue;
        }
        let Some(level) = level_of(&here, levels) else {
            panic!("{here} is on no level of {folder}")
        };
        for (i, line) in production(&text).lines().enumerate() {
            for there in named_in(line.split("//").next().unwrap_or(""), &prefix) {
                if level_of(&there, levels).is_none_or(|below| below < level) {
                    wrong.push(format!("{}:{}: {here} -> {there}", path.display(), i + 1));
                }
            }
        }
    }
    wrong
}

#[test]
fn imports_inside_the_store_point_down() {
    let wrong = [upward_imports("store", &STORE), upward_imports("store/state", &STATE)].concat();
    assert!(wrong.is_empty(), "imports that point up:\n{}", wrong.join("\n"));
}

#[test]
fn imports_inside_the_streamer_point_down() {
    let wrong = upward_imports("stream", &STREAM);
    assert!(wrong.is_empty(), "imports that point up:\n{}", wrong.join("\n"));
}

#[test]
fn the_level_check_sees_an_import_that_points_up() {
    assert_eq!(named_in("use crate::stream::plan::{Plan};", "crate::stream::"), ["plan"]);
    assert!(level_of("streamer", &STREAM) < level_of("model", &STREAM));
    assert_eq!(level_of("places", &STREAM), None);
}

/// The words of an identifier: both `told_far` and `ToldFar` contain *told* and *far*.
fn words_of(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in identifier.chars() {
        if c == '_' || c.is_uppercase() && was_lower {
            words.push(String::new());
        }
        was_lower = c.is_lowercase() || c.is_numeric();
        if c != '_' {
            words.last_mut().expect("one").extend(c.to_lowercase());
        }
    }
    words
}

#[test]
fn identifiers_use_the_words_of_the_glossary() {
    let mut wrong = Vec::new();
    for (path, text) in [sources(), sources_below("crates")].concat() {
        for (i, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            // String literals are skipped: names that a program reads there are not ours.
            let code: String = code.split('"').step_by(2).collect();
            let names = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            for name in names.filter(|name| !name.ends_with("so_far")) {
                if words_of(name).iter().any(|word| RETIRED.contains(&word.as_str())) {
                    wrong.push(format!("{}:{}: {name}", path.display(), i + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "retired words, see docs/glossary.md:\n{}", wrong.join("\n"));
}

#[test]
fn retired_words_are_found_inside_names() {
    assert_eq!(words_of("told_far"), ["told", "far"]);
    assert_eq!(words_of("ToldFar"), ["told", "far"]);
    assert_eq!(words_of("threshold"), ["threshold"]);
}

#[test]
fn system_facilities_are_reached_through_base_and_io() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        if matches!(module(&path).as_str(), "base" | "io") {
            continue;
        }
        for (i, line) in production(&text).lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            wrong.extend(
                SYSTEM
                    .iter()
                    .filter(|name| code.contains(**name))
                    .map(|name| format!("{}:{}: {name}", path.display(), i + 1)),
            );
        }
    }
    assert!(wrong.is_empty(), "reach these through base:\n{}", wrong.join("\n"));
}

#[test]
fn functions_stay_readable() {
    let mut wrong = Vec::new();
    let mut all = sources();
    for package in ["testkit", "lab", "cli", "bench"] {
        all.extend(sources_below(&format!("crates/{package}/src")));
    }
    // Fixtures are test code, which may be longer.
    all.retain(|(path, _)| !path.to_string_lossy().contains("/fixtures/"));
    for (path, text) in all {
        wrong.extend(long_functions(&text).map(|f| format!("{}: {f}", path.display())));
    }
    assert!(wrong.is_empty(), "too long:\n{}", wrong.join("\n"));
}

fn long_functions(text: &str) -> impl Iterator<Item = String> + '_ {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let is_fn = ["fn ", "pub fn ", "pub(crate) fn ", "unsafe fn ", "pub unsafe extern "]
            .iter()
            .any(|head| trimmed.starts_with(head));
        if !is_fn {
            continue;
        }
        let indent = line.len() - trimmed.len();
        let close = format!("{}}}", " ".repeat(indent));
        let end = lines[start..].iter().position(|l| *l == close).unwrap_or(0);
        if end > MAX_FUNCTION_LINES {
            found.push(format!("{} lines: {trimmed}", end));
        }
    }
    found.into_iter()
}
