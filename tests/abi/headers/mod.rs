//! The C headers, made from `src/ffi`: cbindgen translates the declarations, and each header has
//! those of one source file, in the order of that file.
//!
//! - `items`: the declarations in cbindgen's text.
//! - `source`: the order, the headings and the opening text of a source file.
//! - `write`: a header's text.
//! - `describe`: the same declarations as JSON, for bindings.

pub mod describe;
pub mod items;
pub mod source;
pub mod write;

use std::path::{Path, PathBuf};

use self::items::Item;
use self::source::Source;

/// The headers in the order of reading, and what each includes.
pub const HEADERS: [(&str, &[&str]); 12] = [
    ("base", &[]),
    ("runtime", &["base"]),
    ("memory", &["runtime"]),
    ("store", &["memory"]),
    ("session", &["store"]),
    ("policy", &["runtime"]),
    ("attention", &["memory"]),
    ("sparse", &["attention"]),
    ("offload", &["session", "sparse"]),
    ("stream", &["memory"]),
    ("device", &["memory"]),
    ("trace", &["runtime"]),
];

/// Structs that other modules declare: the header, the source, the name in Rust, the name in C.
const FOREIGN: [(&str, &str, &str, &str); 3] = [
    ("store", "src/store/counters.rs", "StoreStats", "kvt_store_stats_t"),
    ("store", "src/store/counters.rs", "RemoteStats", "kvt_remote_stats_t"),
    ("device", "src/device/call.rs", "Call", "kvt_kernel_t"),
];

/// A header: its declarations in order.
pub struct Header {
    pub name: &'static str,
    /// Headers that it includes itself.
    pub includes: &'static [&'static str],
    pub source: Source,
    /// Declarations, each with the index of its heading in `source`.
    pub items: Vec<(usize, Item)>,
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Includes of a header, and theirs.
pub fn closure(name: &str) -> Vec<&'static str> {
    let direct = HEADERS.iter().find(|header| header.0 == name).expect(name).1;
    let mut all: Vec<&str> = direct.to_vec();
    for one in direct {
        all.extend(closure(one));
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// All headers.
pub fn headers() -> Vec<Header> {
    let mut found = items::parse(&translated());
    let headers: Vec<Header> = HEADERS
        .iter()
        .map(|(name, includes)| {
            let source = Source::read(&root().join(format!("src/ffi/{name}.rs")), name);
            let mut items = Vec::new();
            for (heading, item) in &source.order {
                let at = found.iter().position(|one| one.name() == item);
                let at = at.unwrap_or_else(|| panic!("cbindgen did not translate {item}"));
                items.push((*heading, found.remove(at)));
            }
            Header { name, includes, source, items }
        })
        .collect();
    let left: Vec<&str> = found.iter().map(Item::name).collect();
    assert!(left.is_empty(), "not declared at the top level of a source of HEADERS: {left:?}");
    headers
}

/// The declarations of all sources, as cbindgen translates them.
fn translated() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml");
    let mut builder = cbindgen::Builder::new().with_config(config);
    let own = HEADERS.iter().map(|(name, _)| format!("src/ffi/{name}.rs"));
    let mut foreign: Vec<String> = FOREIGN.iter().map(|one| one.1.to_string()).collect();
    foreign.dedup();
    for source in own.chain(foreign) {
        builder = builder.with_src(expanded(&root().join(source)));
    }
    let mut out = Vec::new();
    builder.generate().expect("cbindgen").write(&mut out);
    String::from_utf8(out).expect("UTF-8")
}

/// A copy of a source in which each `#[capi]` is replaced by its expansion before a signature. The
/// generator reads the sources without expanding macros.
fn expanded(source: &Path) -> PathBuf {
    let mut text = std::fs::read_to_string(source).expect("source");
    text = text.replace("#[capi]", "#[unsafe(no_mangle)]");
    for (_, _, rust, c) in FOREIGN {
        text = text.replace(&format!("pub struct {rust} "), &format!("pub struct {c} "));
    }
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(source.file_name().expect("name"));
    // Several tests write this copy concurrently, possibly in separate processes.
    let mine =
        copy.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    std::fs::write(&mine, text).expect("copy");
    std::fs::rename(&mine, &copy).expect("rename");
    copy
}
