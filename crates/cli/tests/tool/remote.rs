//! `kvtier demo --remote` and `kvtier doctor --remote`, with a directory and with a server.

use kvtier_testkit::fixtures::redis;

use std::path::{Path, PathBuf};
use std::process::Command;

use redis::{Server, is_there};
use serde_json::Value;

/// Secrets that no line may contain.
const SECRET: &str = "hunter2-hunter2";

/// A directory that is removed after the test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = format!("kvt-remote-tool-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(path);
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir_all(&path).expect("made");
        Place(path)
    }

    fn short(&self) -> String {
        format!("dir:{}", self.0.display())
    }

    /// With a long timeout, for a busy machine.
    fn patient(&self) -> String {
        format!("dir(path=\"{}\",timeout=60000)", self.0.display())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("found").flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found
}

/// Output and exit status of the tool.
struct ToolOutput {
    well: bool,
    out: String,
    error: String,
}

impl ToolOutput {
    fn fine(self) -> String {
        assert!(self.well, "{} {}", self.out, self.error);
        self.out
    }

    fn json(self) -> Value {
        let out = self.fine();
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// Lines of JSON, by their check.
    fn finding(&self, check: &str) -> Value {
        let lines = self.out.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let found = lines.into_iter().find(|line| line["check"] == check);
        found.unwrap_or_else(|| panic!("no {check} in {} {}", self.out, self.error))
    }
}

fn tool_with(password: &str, args: &[&str]) -> ToolOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.env_remove("RUST_LOG").env("KVTIER_REMOTE_PASSWORD", password).args(args);
    let output = command.output().expect("started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(!out.contains(SECRET) && !error.contains(SECRET), "{out} {error}");
    assert!(!error.contains("panicked"), "{error}");
    ToolOutput { well: output.status.success(), out, error }
}

fn tool(args: &[&str]) -> ToolOutput {
    tool_with("", args)
}

fn number(value: &Value, at: &str) -> u64 {
    value.pointer(at).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {at} in {value}"))
}

#[test]
fn a_second_process_loads_the_kv_of_the_first() {
    let place = Place::new("demo");
    let report = tool(&["demo", "--json", "--remote", &place.patient()]).json();
    let (put, loaded) = (number(&report, "/put/tokens"), number(&report, "/get/loaded_tokens"));
    assert!(put > 1000 && loaded == put, "{report}");
    assert_eq!(number(&report, "/get/wrong"), 0);
    let objects = number(&report, "/put/counters/uploaded_objects");
    // The second process had nothing in memory; the common prefix was loaded once.
    assert_eq!(number(&report, "/get/counters/fetched_objects"), objects, "{report}");
    assert_eq!(number(&report, "/get/counters/removed_objects"), objects, "{report}");
    assert_eq!(files(&place.0), Vec::<PathBuf>::new());
    let page = tool(&["demo", "--remote", &place.patient()]).fine();
    assert!(page.contains("0 wrong") && page.contains("times as fast"), "{page}");
    assert!(page.lines().count() <= 24, "{page}");
}

#[test]
fn damaged_objects_are_detected() {
    let place = Place::new("damaged");
    let key = "5a".repeat(32);
    let remote = place.patient();
    let put = tool(&["demo-part", "put", &key, &remote]).json();
    let all = files(&place.0);
    assert_eq!(all.len() as u64, number(&put, "/counters/uploaded_objects"));
    let spoiled = all.iter().step_by(5).inspect(|path| {
        let mut bytes = std::fs::read(path).expect("found");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).expect("written");
    });
    let spoiled = spoiled.count() as u64;
    let got = tool(&["demo-part", "get", &key, &remote]).json();
    assert_eq!(number(&got, "/located_tokens"), number(&put, "/tokens"), "{got}");
    assert!(number(&got, "/loaded_tokens") < number(&put, "/tokens"), "{got}");
    let corrupt = number(&got, "/counters/corrupt_objects");
    assert!(corrupt > 0 && corrupt <= 2 * spoiled, "{spoiled}: {got}");
    assert_eq!(number(&got, "/wrong"), 0, "a damaged object was loaded: {got}");
}

#[test]
fn doctor_leaves_a_directory_unchanged() {
    let place = Place::new("doctor");
    std::fs::write(place.0.join("somebodys"), b"own").expect("written");
    let output = tool(&["doctor", "--json", "--remote", &place.short()]);
    assert_eq!(output.finding("permissions")["mark"], "good", "{}", output.out);
    let words = output.finding("get of 256 KiB")["value"].to_string();
    assert!(words.contains("p99"), "{words}");
    assert!(output.finding("1 MiB, batched")["value"].to_string().contains("get"));
    assert!(output.finding("defaults")["value"].to_string().contains("timeout=250"));
    output.fine();
    assert_eq!(files(&place.0), [place.0.join("somebodys")]);
}

#[test]
fn unusable_remotes_are_reported() {
    let none = format!("kvt-remote-tool-none-{}", std::process::id());
    let none = std::env::temp_dir().join(none);
    let none = format!("dir:{}", none.display());
    let tls = if cfg!(feature = "tls") { "cannot be reached" } else { "without tls" };
    for (remote, words) in [
        ("localhost", "redis://HOST"),
        ("redis://127.0.0.1:1", "cannot be reached"),
        ("redis://a:99999", "65535"),
        ("rediss://127.0.0.1:1", tls),
        (&format!("redis://u:{SECRET}@a"), "as a secret"),
        ("redis://u@a", "KVTIER_REMOTE_PASSWORD"),
        (&none, "No such file"),
        ("dir(path=\"x\",timout=1)", "timeout"),
        ("custom()", "redis"),
    ] {
        for command in [["doctor", "--remote", remote], ["demo", "--remote", remote]] {
            let output = tool(&command);
            let text = format!("{}{}", output.out, output.error);
            assert!(!output.well && text.contains(words), "{command:?}: {text}");
        }
    }
}

#[test]
fn demo_and_doctor_leave_a_server_unchanged() {
    if !is_there() {
        return;
    }
    let server = Server::start(&["--requirepass", SECRET]);
    let cli = |args: &[&str]| server.cli(&[&["-a", SECRET, "--no-auth-warning"], args].concat());
    let url = server.url();
    let spec = format!("redis(url=\"{url}\",timeout=60000,connect=20000)");
    let report = tool_with(SECRET, &["demo", "--json", "--remote", &spec]).json();
    assert_eq!(number(&report, "/get/loaded_tokens"), number(&report, "/put/tokens"), "{report}");
    assert!(report["put"]["server"].to_string().contains("redis"), "{report}");
    assert_eq!(cli(&["dbsize"]), "0");
    let output = tool_with(SECRET, &["doctor", "--json", "--remote", &spec]);
    assert_eq!(output.finding("permissions")["mark"], "good");
    assert!(output.finding("remote")["means"].to_string().contains("maxmemory"));
    output.fine();
    assert_eq!(cli(&["dbsize"]), "0");
    for password in ["", "wrong"] {
        let output = tool_with(password, &["doctor", "--json", "--remote", &spec]);
        assert!(!output.well);
        assert!(
            output.finding("remote")["means"].to_string().contains("credentials"),
            "{}",
            output.out
        );
        assert!(!tool_with(password, &["demo", "--remote", &spec]).well);
    }
    let user = url.replace("redis://", "redis://limited@");
    let spec = format!("redis(url=\"{user}\",timeout=60000,connect=20000)");
    for (rule, forbidden) in [("-setnx", "put"), ("-unlink", "remove"), ("-strlen", "lookup")] {
        let password = format!(">{SECRET}");
        cli(&["acl", "setuser", "limited", "reset", "on", &password, "~*", "+@all", "-del", rule]);
        let output = tool_with(SECRET, &["doctor", "--json", "--remote", &spec]);
        let (found, words) = (output.finding("permissions"), format!("{forbidden}: no"));
        assert!(found["value"].to_string().contains(&words), "{rule}: {}", output.out);
        assert_eq!(found["value"].to_string().matches(": no").count(), 1, "{rule}: {}", output.out);
        // Objects that cannot be removed are reported, and the command fails.
        assert_eq!(output.well, forbidden != "remove", "{rule}: {}", output.error);
        assert_eq!(cli(&["dbsize"]), if forbidden == "remove" { "1" } else { "0" }, "{rule}");
        cli(&["flushall"]);
    }
}
