//! Generated pages of the manual, `kvtier man` and `kvtier spec`.

use std::path::Path;
use std::process::Command;

fn kvtier(args: &[&str]) -> (i32, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_kvtier")).args(args).output().expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (out.status.code().expect("it ends"), text(out.stdout), text(out.stderr))
}

/// The committed pages equal the generated ones; KVTIER_BLESS=1 writes them.
#[test]
fn generated_pages_are_committed() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let is_blessed = std::env::var_os("KVTIER_BLESS").is_some();
    let mut outdated = Vec::new();
    for (name, text) in kvtier_cli::manual::pages().expect("complete tables") {
        let path = docs.join(name);
        if is_blessed {
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            std::fs::write(&path, &text).expect("writable");
        } else if std::fs::read_to_string(&path).unwrap_or_default() != text {
            outdated.push(name);
        }
    }
    assert!(
        outdated.is_empty(),
        "{outdated:?} differ from the code: run this test with KVTIER_BLESS=1 and commit them"
    );
}

#[test]
fn every_command_has_a_man_page() {
    let dir = std::env::temp_dir().join(format!("kvtier-man-{}", std::process::id()));
    let (code, _, error) = kvtier(&["man", dir.to_str().expect("text")]);
    assert_eq!((code, error.as_str()), (0, ""));
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).expect(name);
    assert!(read("kvtier.1").contains("doctor") && !read("kvtier.1").contains("demo-part"));
    assert!(read("kvtier-fsck.1").contains("read\\-only"));
    assert!(read("kvtier-lab-compare.1").contains("policies"));
    for absent in ["kvtier-demo-part.1", "kvtier-help.1", "kvtier-lab-help.1"] {
        assert!(!dir.join(absent).exists(), "{absent}");
    }
    std::fs::remove_dir_all(&dir).expect("removable");
}

#[test]
fn specs_are_checked() {
    let (code, out, _) = kvtier(&["spec", "store( host = 1GiB )", "qos(inner=lru)"]);
    assert_eq!((code, out.as_str()), (0, "store(host=1GiB)\nqos(inner=lru)\n"));
    let (code, out, error) = kvtier(&["spec", "lru", "store(hots=1GiB)"]);
    assert!(code == 1 && out.contains("did you mean 'host'"), "{out}");
    assert!(error.contains("1 of 2 specs"), "{error}");
    let (code, out, _) = kvtier(&["spec", "--json", "slruu"]);
    let line: serde_json::Value = serde_json::from_str(out.trim()).expect("JSON");
    assert!(
        code == 1 && line["error"].as_str().is_some_and(|text| text.contains("'slru'")),
        "{out}"
    );
}
