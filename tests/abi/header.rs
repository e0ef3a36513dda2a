//! The committed header equals the generated one. Update: `KVTIER_BLESS=1 cargo test --test abi
//! header`.

use std::path::{Path, PathBuf};

fn generated() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    let sources = ["src/ffi"];
    let mut builder = cbindgen::Builder::new().with_config(config);
    let mut files: Vec<_> = sources
        .iter()
        .flat_map(|dir| std::fs::read_dir(root.join(dir)).expect(dir))
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        // `mod` lines would lead to every file a second time; `abi` declares nothing.
        .filter(|path| path.file_name().is_some_and(|name| name != "mod.rs" && name != "abi.rs"))
        .collect();
    // In the order a reader meets the nouns.
    let order = [
        "base",
        "runtime",
        "memory",
        "store",
        "session",
        "policy",
        "sparse",
        "attention",
        "offload",
        "stream",
        "device",
        "trace",
    ];
    let rank = |path: &Path| {
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or("");
        order.iter().position(|name| *name == stem).unwrap_or(order.len())
    };
    files.sort_by_key(|path| (rank(path), path.clone()));
    // Structs that other modules declare, for C as well; they stand before the calls that take them.
    for (source, before) in [("store/counters.rs", "store.rs"), ("device/call.rs", "device.rs")] {
        let at = files.iter().position(|path| path.ends_with(before)).expect(before);
        files.insert(at, root.join("src").join(source));
    }
    for file in files {
        builder = builder.with_src(expanded(&file));
    }
    let mut out = Vec::new();
    builder.generate().expect("cbindgen").write(&mut out);
    let text = String::from_utf8(out).expect("UTF-8");
    grouped(&text)
}

/// The text without empty lines inside groups of constants. A constant belongs to the group of the
/// one before if it has no comment, or a comment of one line and a name of the same family
/// (`KVT_OP_`).
fn grouped(text: &str) -> String {
    let family =
        |line: &str| line.strip_prefix("#define KVT_")?.split('_').next().map(String::from);
    let lines: Vec<String> = text.lines().map(in_parentheses).collect();
    let mut out = String::new();
    for (at, line) in lines.iter().enumerate() {
        let next = |n: usize| lines.get(at + n).map_or("", String::as_str);
        let before = at.checked_sub(1).and_then(|at| family(&lines[at]));
        let follows = match next(1).starts_with("///") {
            true => before.is_some() && family(next(2)) == before,
            false => next(1).starts_with("#define KVT_"),
        };
        if !line.is_empty() || !follows && !next(1).is_empty() {
            out += line;
            out += "\n";
        }
    }
    out
}

/// A copy of a source in which each `#[capi]` is replaced by its expansion before a signature. The
/// generator reads the sources without expanding macros.
fn expanded(source: &Path) -> PathBuf {
    let text = std::fs::read_to_string(source).expect("source");
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.file_name().expect("name"));
    // Several tests write this copy concurrently, possibly in separate processes.
    let mine =
        copy.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    let text = text
        .replace("#[capi]", "#[unsafe(no_mangle)]")
        .replace("pub struct Call", "pub struct kvt_kernel_t")
        .replace("pub struct StoreStats", "pub struct kvt_store_stats_t")
        .replace("pub struct RemoteStats", "pub struct kvt_remote_stats_t");
    std::fs::write(&mine, text).expect("copy");
    std::fs::rename(&mine, &copy).expect("rename");
    copy
}

/// A negative constant must survive `-KVT_E_BUSY`.
fn in_parentheses(line: &str) -> String {
    match line.strip_prefix("#define ").and_then(|rest| rest.split_once(' ')) {
        Some((name, value)) if value.starts_with('-') => format!("#define {name} ({value})"),
        _ => line.to_string(),
    }
}

/// The generator silently takes one of two constants of the same name.
#[test]
fn constant_names_are_unique() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ffi");
    let mut names = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(folder).expect("src/ffi") {
        let text = std::fs::read_to_string(entry.expect("entry").path()).expect("source");
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("pub const ") else { continue };
            let name = rest.split(':').next().unwrap_or(rest).to_string();
            assert!(names.insert(name.clone()), "{name} is declared twice");
        }
    }
    assert!(names.len() > 200);
}

#[test]
fn the_committed_header_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/kvtier/kvtier.h");
    let fresh = generated();
    if std::env::var_os("KVTIER_BLESS").is_some() {
        std::fs::write(&path, &fresh).expect("writing the header");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = fresh.lines().zip(committed.lines()).position(|(a, b)| a != b);
    assert!(
        fresh == committed,
        "include/kvtier/kvtier.h is stale from line {}; run KVTIER_BLESS=1 cargo test --test abi header",
        differs.map_or(committed.lines().count(), |i| i) + 1
    );
}

#[test]
fn every_sized_struct_has_an_initialiser() {
    let header = generated();
    for name in sized_structs(&header) {
        let stem = name.trim_start_matches("kvt_").trim_end_matches("_t").to_uppercase();
        let define = format!("#define KVT_{stem}_INIT KVT_INIT_({name})");
        assert!(header.contains(&define), "{name} has no KVT_{stem}_INIT");
    }
}

#[test]
fn every_function_is_documented_and_no_common_rule_is_repeated() {
    let header = generated();
    let mut functions = 0;
    for (comment, declaration) in documented(&header) {
        if !declaration.contains(" kvt_") || declaration.starts_with('t') {
            continue;
        }
        functions += 1;
        assert!(!comment.is_empty(), "no comment: {declaration}");
        for common in ["@param err ", "KVT_E_FORKED", "KVT_E_PANIC", "# Safety", "Since 0.1"] {
            assert!(
                !comment.contains(common),
                "{declaration}: its comment repeats {common:?}, which the head of the header says \
                 for all functions"
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
    let header = generated();
    let mut wrong = Vec::new();
    for (at, line) in header.lines().enumerate() {
        let Some((_, comment)) = line.split_once("///") else { continue };
        let words = comment.split(|c: char| !c.is_alphanumeric() && c != '_');
        let retired = words.filter(|word| RETIRED.contains(&word.to_lowercase().as_str()));
        wrong.extend(retired.map(|word| format!("line {}: {word}: {line}", at + 1)));
    }
    assert!(wrong.is_empty(), "retired words, see docs/glossary.md:\n{}", wrong.join("\n"));
}

fn sized_structs(header: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut current = None;
    for line in header.lines() {
        if let Some(rest) = line.strip_prefix("typedef struct ") {
            current = rest.strip_suffix(" {").map(str::to_string);
        } else if line.trim() == "uint64_t struct_size;" {
            names.extend(current.take());
        }
    }
    assert!(names.len() > 10, "only {} sized structs were found", names.len());
    names
}

/// The comment and the first line of each declaration.
fn documented(header: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut comment = String::new();
    for line in header.lines() {
        match line.strip_prefix("///") {
            Some(text) => comment += text,
            None if line.starts_with(|c: char| c.is_alphabetic()) => {
                found.push((std::mem::take(&mut comment), line.to_string()));
            }
            None => comment.clear(),
        }
    }
    found
}

#[test]
fn readme_excerpts_match_hello_kv() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let (readme, program) = (text("README.md"), text("examples/c/hello_kv.c"));
    let shown = readme.split("```c\n").nth(1).and_then(|rest| rest.split("```").next());
    let (mut lines, mut count) = (program.lines(), 0);
    let shown = shown.expect("a C program in README.md").lines();
    for line in shown.filter(|line| !matches!(line.trim(), "" | "...")) {
        assert!(lines.any(|one| one == line), "not in hello_kv.c, or out of order: {line}");
        count += 1;
    }
    assert!(count > 15);
}
