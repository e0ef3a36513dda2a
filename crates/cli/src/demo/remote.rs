//! `kvtier demo --remote`: one process computes some documents, puts them to the remote, and ends.
//! A second process with empty memory locates and loads them. Every byte is compared, and the
//! demo removes its objects again.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use kvtier::base::exposition::{Kind, Value as Statistic};
use kvtier::base::machine::random_bytes;
use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Status;
use kvtier::meta::key::Key;
use kvtier::store::handle::Store;
use kvtier::store::state::{Level, NamespaceOpts, RemoteStats, SessionOpts, TransferKind};
use serde_json::{Value, json};

use super::Outcome;
use super::model::{Model, SYSTEM_TOKENS, TOKENS_PER_SECOND};
use super::tensors::Tensors;
use super::workload::Conversation;
use crate::human;
use crate::remote::{RemoteTarget, explain, number};

/// Number of documents.
const DOCUMENTS: u32 = 4;
/// Tokens of a document after the common prefix.
const OWN_TOKENS: u64 = 768;
/// Default timeout of a request in milliseconds: the machine of a demo may be busy.
const TIMEOUT_MS: f64 = 5000.0;
/// Timeout of removing the objects.
const CLEAN: Duration = Duration::from_secs(30);

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Computes and puts
    Put,
    /// Locates, gets, compares and removes
    Get,
}

/// The arguments of a process.
#[derive(clap::Args)]
pub struct Args {
    /// The role
    role: Role,
    /// Key of the namespace of both processes, 64 hexadecimal digits
    key: String,
    /// The remote
    remote: String,
}

/// Runs both processes, one after the other, and prints the results.
pub fn run(remote: &str, json: bool) -> Outcome<()> {
    let target = target(remote)?;
    let key: String = random_bytes::<32>()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let put = run_role(Role::Put, &key, remote)?;
    let got = run_role(Role::Get, &key, remote)?;
    let report = json!({ "remote": target.words(), "put": put, "get": got });
    match json {
        true => println!("{report}"),
        false => show(&report),
    }
    judge(&report)
}

/// Fails if a result is wrong.
fn judge(report: &Value) -> Outcome<()> {
    let of = |at: &str| report.pointer(at).and_then(Value::as_u64).unwrap_or(u64::MAX);
    let (wrong, put, loaded) = (of("/get/wrong"), of("/put/tokens"), of("/get/loaded_tokens"));
    if wrong > 0 {
        return Err(format!("{wrong} chunks were loaded with wrong bytes").into());
    }
    if loaded != put {
        return Err(format!("{put} tokens were put, but {loaded} were loaded").into());
    }
    if of("/get/counters/corrupt_objects") > 0 {
        return Err("the remote returned corrupt objects".into());
    }
    match of("/get/left_chunks") {
        0 => Ok(()),
        left => Err(format!("{left} chunks may be left in the remote").into()),
    }
}

fn target(remote: &str) -> Outcome<RemoteTarget> {
    Ok(RemoteTarget::read(remote).map_err(explain)?.or("timeout", number(TIMEOUT_MS)))
}

/// Runs a process of this program in a role; returns its report.
fn run_role(role: Role, key: &str, remote: &str) -> Outcome<Value> {
    let name = role.to_possible_value().map(|value| value.get_name().to_string());
    let output = Command::new(std::env::current_exe()?)
        .arg("demo-part")
        .args([&name.unwrap_or_default(), key, remote])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let report: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    match report {
        Some(report) if output.status.success() => match report["error"].as_str() {
            Some(error) => Err(error.to_string().into()),
            None => Ok(report),
        },
        _ => Err(format!("the process of role {role:?} ended with {}", output.status).into()),
    }
}

/// Runs a role and prints its report as a line of JSON. Failures are part of the report, and the
/// parent process prints them.
pub fn role_main(args: &Args) -> Outcome<()> {
    let report = execute(args).unwrap_or_else(|error| json!({ "error": error.to_string() }));
    println!("{report}");
    Ok(())
}

fn execute(args: &Args) -> Outcome<Value> {
    let mut peer = Peer::open(args)?;
    let report = match args.role {
        Role::Put => peer.put_all(),
        Role::Get => peer.get_all(),
    };
    // Objects are removed even after a failure.
    let left = match args.role {
        Role::Put => 0,
        Role::Get => peer.clean()?,
    };
    let mut report = report?;
    report["counters"] = counters(&peer.store)?;
    report["server"] = peer.store.server.as_ref().map(|server| server.words.clone()).into();
    let warnings = peer.store.server.as_ref().map(|server| server.warnings.clone());
    report["warnings"] = warnings.unwrap_or_default().into();
    report["left_chunks"] = left.into();
    peer.store.close(0)?;
    Ok(report)
}

/// A process that shares the remote.
struct Peer {
    store: Store,
    _runtime: Runtime,
    namespace: u32,
    model: Model,
    documents: Vec<Conversation>,
    tensors: Tensors,
}

impl Peer {
    fn open(args: &Args) -> Outcome<Peer> {
        let model = Model::small()?;
        let most = SYSTEM_TOKENS + OWN_TOKENS;
        let bytes = 2 * u64::from(DOCUMENTS) * most * model.all_token_bytes();
        let target = target(&args.remote)?;
        let spec = target.store(&format!("store(host={bytes}B, policy=lru)"))?;
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let store = Store::open(runtime.core(), None, &spec).map_err(explain)?;
        let opts =
            NamespaceOpts { key: key(&args.key)?, layout: model.layout.clone(), holes: false };
        let namespace = store.with(|core| core.open_namespace(&opts))?;
        let document = |number: u32| {
            let mut one = Conversation::default();
            one.append(0..SYSTEM_TOKENS as u32);
            one.append((0..OWN_TOKENS as u32).map(|i| 100_000 * (number + 1) + i));
            one
        };
        let tensors = Tensors::new(&model, most);
        let documents = (0..DOCUMENTS).map(document).collect();
        Ok(Peer { store, _runtime: runtime, namespace, model, documents, tensors })
    }

    fn session(&self, document: usize) -> Outcome<u32> {
        Ok(self.store.with(|core| {
            let session = core.open_session(self.namespace, &SessionOpts::default())?;
            core.append(session, &self.documents[document].tokens).map(|()| session)
        })?)
    }

    fn close(&self, session: u32) -> Outcome<()> {
        Ok(self.store.with(|core| core.close_session(session))?)
    }

    fn move_all(
        &mut self,
        session: u32,
        kind: TransferKind,
        level: Level,
        tokens: u64,
    ) -> Outcome<u64> {
        let range = self.tensors.cell_range(&self.model, tokens, false);
        let mut least = tokens;
        for op in self.store.submit(session, kind, level, range, &OpOpts::default())? {
            least = least.min(value(&op, kind)?);
        }
        Ok(least)
    }

    /// Computes each document and puts it to the remote.
    fn put_all(&mut self) -> Outcome<Value> {
        let (mut took, mut tokens) = (Duration::ZERO, 0);
        for at in 0..self.documents.len() {
            let session = self.session(at)?;
            let marks = &self.documents[at].marks;
            let all = marks.len() as u64;
            self.tensors.compute(&self.model, marks, 0);
            let start = Instant::now();
            self.move_all(session, TransferKind::Put, Level::Remote, all)?;
            took += start.elapsed();
            tokens += all;
            self.close(session)?;
        }
        self.store.settle(0)?;
        Ok(json!({
            "documents": self.documents.len(),
            "tokens": tokens,
            "bytes": tokens * self.model.all_token_bytes(),
            "put_s": took.as_secs_f64(),
        }))
    }

    /// Locates each document, loads it and compares it.
    fn get_all(&mut self) -> Outcome<Value> {
        let (mut locating, mut loading) = (Duration::ZERO, Duration::ZERO);
        let (mut requested, mut located, mut loaded, mut wrong) = (0, 0, 0, 0);
        for at in 0..self.documents.len() {
            let start = Instant::now();
            let session = self.session(at)?;
            let found =
                value(&self.store.locate(session, &OpOpts::default())?, TransferKind::Prefetch)?;
            locating += start.elapsed();
            let start = Instant::now();
            let count = match found {
                0 => 0,
                found => self.move_all(session, TransferKind::Get, Level::Ram, found)?,
            };
            loading += start.elapsed();
            let marks = &self.documents[at].marks;
            wrong += self.tensors.wrong(&self.model, &marks[..count as usize]);
            requested += marks.len();
            located += found;
            loaded += count;
            self.close(session)?;
        }
        Ok(json!({
            "asked_tokens": requested,
            "located_tokens": located,
            "loaded_tokens": loaded,
            "bytes": loaded * self.model.all_token_bytes(),
            "wrong": wrong,
            "locate_s": locating.as_secs_f64(),
            "load_s": loading.as_secs_f64(),
            "recompute_s": loaded as f64 / TOKENS_PER_SECOND,
        }))
    }

    /// Removes the objects of the demo; returns how many chunks may be left.
    fn clean(&self) -> Outcome<u64> {
        let before = remote_stats(&self.store)?.removed_objects;
        let cleared = self.store.clear(self.namespace, 0)?;
        self.store.settle(kvtier::base::clock::Clock::real().now_ns() + CLEAN.as_nanos() as u64)?;
        let all = SYSTEM_TOKENS + u64::from(DOCUMENTS) * OWN_TOKENS;
        let chunks = all / u64::from(self.model.layout.chunk_tokens());
        // An object contains at most one chunk here.
        let removed =
            (remote_stats(&self.store)?.removed_objects - before).min(cleared.removed).min(chunks);
        Ok(chunks - removed)
    }
}

/// Waits for an op; returns its number of tokens.
fn value(op: &OpRef, kind: TransferKind) -> Outcome<u64> {
    op.wait(RELEASED, 0)?;
    let (tokens, status) = (op.value(), op.info().status.and_then(Status::from_code));
    op.remove();
    match status {
        Some(Status::Ok) => Ok(tokens),
        // The value is the number of tokens that were found.
        Some(Status::NotFound) if kind == TransferKind::Get => Ok(tokens),
        status => {
            let status = status.map_or("nothing".to_string(), |status| format!("{status:?}"));
            Err(format!("a {kind:?} ended with {status}").into())
        }
    }
}

fn key(hex: &str) -> Outcome<Key> {
    let mut key = [0; 32];
    for (at, byte) in key.iter_mut().enumerate() {
        let digits = hex.get(2 * at..2 * at + 2).ok_or("a key has 64 digits")?;
        *byte = u8::from_str_radix(digits, 16)?;
    }
    Ok(Key(key))
}

fn remote_stats(store: &Store) -> Outcome<RemoteStats> {
    Ok(store.with(|core| Ok(core.remote_stats()))?.unwrap_or_default())
}

fn counters(store: &Store) -> Outcome<Value> {
    let stats = remote_stats(store)?;
    let counters = RemoteStats::ROWS.iter().filter(|row| row.kind == Kind::Counter);
    let entries = counters.map(|row| match (row.get)(&stats) {
        Statistic::Whole(whole) => (row.name.to_string(), json!(whole)),
        Statistic::Real(real) => (row.name.to_string(), json!(real)),
    });
    Ok(Value::Object(entries.collect()))
}

/// Prints the report as text.
fn show(report: &Value) {
    let (put, got) = (&report["put"], &report["get"]);
    let whole = |value: &Value| value.as_u64().unwrap_or(0);
    let real = |value: &Value| value.as_f64().unwrap_or(0.0);
    let text = |value: &Value| value.as_str().unwrap_or("").to_string();
    println!("{}: {}", text(&report["remote"]), text(&put["server"]));
    for warning in put["warnings"].as_array().into_iter().flatten() {
        println!("  warning: {}", text(warning));
    }
    println!(
        "\nfirst process   {} documents, {} tokens computed, {} put to the remote in {:.2} s",
        whole(&put["documents"]),
        whole(&put["tokens"]),
        human(whole(&put["bytes"])),
        real(&put["put_s"]),
    );
    println!(
        "                {} objects uploaded ({}); the common prefix was uploaded once",
        whole(&put["counters"]["uploaded_objects"]),
        human(whole(&put["counters"]["uploaded_bytes"])),
    );
    let (load, recompute) =
        (real(&got["load_s"]) + real(&got["locate_s"]), real(&got["recompute_s"]));
    println!(
        "second process  {} of {} tokens located in {:.1} ms, {} loaded in {:.2} s ({} tokens, {} wrong)",
        whole(&got["located_tokens"]),
        whole(&got["asked_tokens"]),
        real(&got["locate_s"]) * 1e3,
        human(whole(&got["bytes"])),
        real(&got["load_s"]),
        whole(&got["loaded_tokens"]),
        whole(&got["wrong"]),
    );
    println!(
        "                {} from the remote, the rest from memory, where earlier gets had put it",
        human(whole(&got["counters"]["fetched_bytes"])),
    );
    println!(
        "                computing at {TOKENS_PER_SECOND:.0} tokens a second takes {recompute:.2} s, \
         loading {load:.2} s: {:.1} times as fast",
        recompute / load.max(1e-9),
    );
    for (which, counters) in [("first", &put["counters"]), ("second", &got["counters"])] {
        let all = counters.as_object().into_iter().flatten();
        let counted = all.filter(|(_, count)| whole(count) > 0);
        let words: Vec<String> = counted.map(|(name, count)| format!("{name} {count}")).collect();
        println!("{which:<6} counters {}", words.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_results_are_failures() {
        let report = |wrong: u64, loaded: u64, corrupt: u64, left: u64| {
            json!({
                "put": { "tokens": 100 },
                "get": {
                    "wrong": wrong,
                    "loaded_tokens": loaded,
                    "counters": { "corrupt_objects": corrupt },
                    "left_chunks": left,
                },
            })
        };
        assert!(judge(&report(0, 100, 0, 0)).is_ok());
        for (bad, word) in [
            (report(1, 100, 0, 0), "wrong"),
            (report(0, 99, 0, 0), "99 were loaded"),
            (report(0, 100, 1, 0), "corrupt"),
            (report(0, 100, 0, 2), "2 chunks may be left"),
            (json!({}), "wrong"),
        ] {
            let error = judge(&bad).expect_err("something is wrong");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
