//! `kvtier serve`.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvtier::api::{Dtype, Group, Identity, Layer, Layout, Level, Store};
use kvtier_testkit::fixtures::scratch::Scratch;

const TOKENS: usize = 64;
const TOKEN_BYTES: usize = 16;

fn serve(folder: &Path, more: &[&str]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .arg("serve")
        .args(["--host", "16MiB", "--disk-size", "64MiB", "--disk"])
        .arg(folder.join("disk"))
        .arg("--socket")
        .arg(folder.join("run/pool"))
        .args(more)
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let line = BufReader::new(child.stderr.as_mut().expect("piped")).lines().next();
    let line = line.expect("a line").expect("text");
    assert!(line.contains("store(shared=\"unix:"), "{line}");
    child
}

fn end(mut child: Child) {
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    assert!(child.wait().expect("it ended").success());
}

/// Opens the store as an engine does; returns how many tokens it finds, which are compared.
fn found_in(folder: &Path, puts: bool) -> usize {
    let socket = folder.join("run/pool");
    let store =
        Store::open(&format!("store(shared=\"unix:{}\")", socket.display())).expect("opened");
    let group = Group::gqa(0..1, 1, 8, Dtype::F16).expect("valid");
    let layout = Layout::new(16, vec![group]).expect("valid");
    let model = Identity { weights: Some(b"weights"), ..Identity::default() };
    let mut session =
        store.namespace(&model, &layout).expect("a namespace").session().expect("a session");
    session.append(&(0..TOKENS as u32).collect::<Vec<_>>()).expect("appended");
    let right: Vec<u8> = (0..TOKENS * TOKEN_BYTES).map(|at| at as u8).collect();
    if puts {
        let planes = [Layer::kv(&right[..], &right[..])];
        session.put(0..TOKENS as u64, 0, planes, Level::Ram).expect("stored");
    }
    let (mut k, mut v) = (vec![0; right.len()], vec![0; right.len()]);
    let planes = [Layer::kv(&mut k[..], &mut v[..])];
    let found = session.get(0..TOKENS as u64, 0, planes).expect("read").tokens as usize;
    assert_eq!(k[..found * TOKEN_BYTES], right[..found * TOKEN_BYTES]);
    assert_eq!(v[..found * TOKEN_BYTES], right[..found * TOKEN_BYTES]);
    drop(session);
    store.close().expect("closed");
    found
}

#[test]
fn a_served_store_keeps_what_engines_put() {
    let scratch = Scratch::created("serve");
    let control = scratch.0.join("run/control");
    let server = serve(&scratch.0, &["--control", control.to_str().expect("text")]);
    assert_eq!(found_in(&scratch.0, false), 0);
    assert_eq!(found_in(&scratch.0, true), TOKENS);
    assert_eq!(found_in(&scratch.0, false), TOKENS, "another process has put it");
    let stats = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .args(["stats", "--socket"])
        .arg(&control)
        .output()
        .expect("it ran");
    assert!(stats.status.success(), "{}", String::from_utf8_lossy(&stats.stderr));
    end(server);
    let server = serve(&scratch.0, &[]);
    assert_eq!(found_in(&scratch.0, false), TOKENS, "the server has written it when it ended");
    let second = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .args(["serve", "--host", "16MiB", "--socket"])
        .arg(scratch.0.join("run/pool"))
        .output()
        .expect("it ran");
    let words = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && words.contains("another process listens"), "{words}");
    end(server);
}
