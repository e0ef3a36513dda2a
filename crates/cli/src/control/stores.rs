//! Several stores of a machine, each with a name.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use super::client::{Client, Refusal, broken};

/// Most stores of one process.
pub const MAX_STORES: usize = 64;
/// Longest name of a store.
const MAX_NAME_BYTES: usize = 128;

/// A `[NAME=]PATH` of the command line: a socket, or a directory of sockets.
#[derive(Clone, Debug)]
pub struct Source {
    /// The given name.
    pub name: Option<String>,
    /// The socket, or the directory.
    pub path: PathBuf,
}

impl Source {
    /// Parses `[NAME=]PATH`.
    pub fn parse(text: &str) -> Result<Source, String> {
        let named = text.split_once('=').filter(|(name, _)| !name.contains('/'));
        let (name, path) = named.map_or((None, text), |(name, path)| (Some(name), path));
        let is_name = |name: &str| {
            (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.contains(char::is_control)
        };
        if path.is_empty() || name.is_some_and(|name| !is_name(name)) {
            return Err(format!(
                "[NAME=]PATH is a control socket, or a directory of control sockets; a name has 1 to \
                 {MAX_NAME_BYTES} bytes without control characters"
            ));
        }
        Ok(Source { name: name.map(Into::into), path: path.into() })
    }
}

/// A store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Store {
    /// Its name: the given one, or the file name of its socket without `.sock`.
    pub name: String,
    /// Its control socket.
    pub path: PathBuf,
}

/// All stores now: sockets in directories come and go with engines. At most [`MAX_STORES`]. Directories
/// that cannot be read, and stores beyond the limit, are reported on stderr, unless `faults` has them
/// from an earlier call.
pub fn list(sources: &[Source], faults: &mut BTreeSet<String>) -> Vec<Store> {
    let (mut all, mut found) = (Vec::new(), BTreeSet::new());
    for Source { name, path } in sources {
        let below = if path.is_dir() { sockets_in(path) } else { Ok(vec![path.clone()]) };
        let below = below.unwrap_or_else(|error| {
            found.insert(format!("cannot read the directory {}: {error}", path.display()));
            Vec::new()
        });
        all.extend(below.into_iter().map(|socket| {
            let own = socket.file_name().unwrap_or_default().to_string_lossy();
            let own = own.strip_suffix(".sock").unwrap_or(&own);
            let name = match name {
                Some(name) if path == &socket => name.clone(),
                Some(name) => format!("{name}/{own}"),
                None => own.to_string(),
            };
            Store { name, path: socket }
        }));
    }
    let mut names = BTreeSet::new();
    for one in &mut all {
        if !names.insert(one.name.clone()) {
            one.name = one.path.display().to_string();
            names.insert(one.name.clone());
        }
    }
    if all.len() > MAX_STORES {
        found.insert(format!(
            "there are more than {MAX_STORES} stores, the limit of one process: the others are left \
             out, start another process for them"
        ));
    }
    found.difference(faults).for_each(|words| eprintln!("kvtier: {words}"));
    *faults = found;
    all.truncate(MAX_STORES);
    all
}

fn sockets_in(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let is_socket =
        |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_socket());
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        all.extend(Some(entry?).filter(is_socket).map(|entry| entry.path()));
    }
    all.sort();
    Ok(all)
}

/// Sends a request to each store at once. The answers are those of `stores`, in their order. Takes at
/// most twice `timeout`: a store that is stuck delays no other.
pub fn ask_all(
    stores: &[Store],
    request: impl Fn(usize) -> String,
    timeout: Duration,
) -> Vec<Result<String, Refusal>> {
    let ask = |path: &Path, request: &str| Client::connect_within(path, timeout)?.request(request);
    thread::scope(|scope| {
        let begin = |(at, store): (usize, &'_ Store)| {
            let (path, request) = (store.path.clone(), request(at));
            thread::Builder::new().spawn_scoped(scope, move || ask(&path, &request))
        };
        let threads: Vec<_> = stores.iter().enumerate().map(begin).collect();
        let end = |thread: std::io::Result<ScopedJoinHandle<'_, _>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(broken("internal: a panic"))),
            Err(error) => Err(broken(format!("no thread can be started: {error}"))),
        };
        threads.into_iter().map(end).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_before_a_path() {
        let parse = |text| Source::parse(text).map(|one| (one.name, one.path));
        assert_eq!(parse("/run/a=b.sock"), Ok((None, "/run/a=b.sock".into())));
        assert_eq!(parse("a=/run/b.sock"), Ok((Some("a".into()), "/run/b.sock".into())));
        for wrong in ["", "a=", "=/run/b", "a\n=/run/b", &format!("{}=/b", "a".repeat(129))] {
            assert!(parse(wrong).is_err_and(|words| words.contains("1 to 128")), "{wrong:?}");
        }
    }

    #[test]
    fn stores_beyond_the_limit_are_reported() {
        let mut faults = BTreeSet::from(["gone".to_string()]);
        let source = |at| Source { name: None, path: format!("/x/{at}.sock").into() };
        let sources: Vec<_> = (0..=MAX_STORES).map(source).collect();
        assert_eq!(list(&sources, &mut faults).len(), MAX_STORES);
        assert!(faults.len() == 1 && faults.iter().all(|words| words.contains("64 stores")));
        assert_eq!(list(&sources[1..], &mut faults).len(), MAX_STORES);
        assert!(faults.is_empty());
    }

    #[test]
    fn names_are_unique() {
        let sources = ["/x/kv.sock", "/y/kv.sock", "/z/other", "kv=/w/kv.sock"];
        let sources: Vec<_> = sources.map(|text| Source::parse(text).expect("valid")).into();
        let names: Vec<String> =
            list(&sources, &mut BTreeSet::new()).into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["kv", "/y/kv.sock", "other", "/w/kv.sock"]);
    }
}
