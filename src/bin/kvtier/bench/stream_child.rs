//! Processes that pass over a model, each in a memory cgroup of its own if one can be made.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use serde_json::Value;

use super::disk::Outcome;

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A memory cgroup that goes when it is done with.
pub struct Group {
    dir: PathBuf,
    peak: &'static str,
}

/// Where a hierarchy with memory limits is mounted; of the second version with `true`.
fn mounts() -> Vec<(PathBuf, bool)> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let point = PathBuf::from(left.split(' ').nth(4)?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1).unwrap_or(""));
        match kind {
            "cgroup" if options.split(',').any(|o| o == "memory") => Some((point, false)),
            "cgroup2" => Some((point, true)),
            _ => None,
        }
    };
    text.lines().filter_map(mount).collect()
}

impl Group {
    /// One of so many bytes; the words say why there can be none.
    pub fn new(name: &str, limit_bytes: u64) -> Outcome<Group> {
        let mut why = "no memory cgroups are mounted".to_string();
        for (mount, second) in mounts() {
            let dir = mount.join(format!("kvtier-bench-{}-{name}", std::process::id()));
            if let Err(error) = std::fs::create_dir(&dir) {
                why = format!("no memory cgroup: {error}");
                continue;
            }
            let (limit, peak) = match second {
                true => ("memory.max", "memory.peak"),
                false => ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
            };
            let group = Group { dir, peak };
            match std::fs::write(group.dir.join(limit), limit_bytes.to_string()) {
                Ok(()) => {
                    // Where there is none, there is nothing to switch off.
                    drop(std::fs::write(group.dir.join("memory.swap.max"), "0"));
                    return Ok(group);
                }
                Err(error) => why = format!("no limit for a memory cgroup: {error}"),
            }
        }
        Err(why)
    }

    /// The most that was charged to it.
    pub fn peak_bytes(&self) -> Outcome<u64> {
        let text = std::fs::read_to_string(self.dir.join(self.peak)).map_err(say)?;
        text.trim().parse().map_err(say)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What has ended is gone from it a moment later.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("{} could not be removed", self.dir.display());
    }
}

/// A setting of the disk that is put back.
pub struct Readahead {
    place: PathBuf,
    before: String,
}

impl Readahead {
    fn place(file: &Path) -> Outcome<PathBuf> {
        use std::os::unix::fs::MetadataExt;
        let device = std::fs::metadata(file).map_err(say)?.dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let disk = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let own = disk.join("queue/read_ahead_kb");
        // A partition has it one floor up.
        let place = if own.exists() { own } else { disk.join("../queue/read_ahead_kb") };
        if place.exists() { Ok(place) } else { Err("the disk has no readahead to set".into()) }
    }

    /// What it is, in KiB.
    pub fn kib(file: &Path) -> Outcome<u64> {
        let text = std::fs::read_to_string(Readahead::place(file)?).map_err(say)?;
        text.trim().parse().map_err(say)
    }

    /// Sets it, for files that are opened from now on.
    pub fn set(file: &Path, kib: u64) -> Outcome<Readahead> {
        let place = Readahead::place(file)?;
        let before = std::fs::read_to_string(&place).map_err(say)?.trim().to_string();
        std::fs::write(&place, kib.to_string())
            .map_err(|error| format!("readahead cannot be set: {error}"))?;
        Ok(Readahead { place, before })
    }
}

impl Drop for Readahead {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(&self.place, &self.before) {
            eprintln!(
                "{} was {} and could not be put back: {error}",
                self.place.display(),
                self.before
            );
        }
    }
}

/// A process that passes over a model.
pub struct Child {
    process: Process,
    asks: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// What it said when it was ready.
    pub ready: Value,
    group: Option<Rc<Group>>,
}

/// How one is started.
pub struct Start<'a> {
    /// As the tool calls it.
    pub how: &'a str,
    /// The model.
    pub files: &'a [PathBuf],
    /// Its memory for weights; none = what it finds.
    pub host_bytes: Option<u64>,
    /// Where it runs.
    pub group: Option<Rc<Group>>,
}

impl Child {
    /// Starts one, and waits until it is ready.
    pub fn start(start: Start) -> Outcome<Child> {
        let mut command = Command::new(std::env::current_exe().map_err(say)?);
        command.args(["stream", "child", "--how", start.how]);
        if let Some(group) = &start.group {
            command.arg("--cgroup").arg(&group.dir);
        }
        if let Some(bytes) = start.host_bytes {
            command.arg("--host").arg(bytes.to_string());
        }
        command.args(start.files).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(say)?;
        let asks = process.stdin.take();
        let answers = process.stdout.take().ok_or("no way to hear of a process")?;
        let answers = BufReader::new(answers);
        let mut child = Child { process, asks, answers, ready: Value::Null, group: start.group };
        child.ready = child.answer()?;
        Ok(child)
    }

    fn answer(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line).map_err(say)? == 0 {
            let ended = self.process.wait().map_err(say)?;
            return Err(format!("the process ended: {ended}"));
        }
        serde_json::from_str(&line).map_err(say)
    }

    /// Seconds of one pass, of so many after one that does not count; and what it saw.
    pub fn passes(&mut self, count: u32) -> Outcome<(f64, u64)> {
        let asks = self.asks.as_mut().ok_or("no way to ask a process")?;
        writeln!(asks, "{count}").and_then(|()| asks.flush()).map_err(say)?;
        let answer = self.answer()?;
        match (answer["pass_ns"].as_f64(), answer["sum"].as_u64()) {
            (Some(ns), Some(sum)) => Ok((ns / 1e9, sum)),
            _ => Err("a process said something else".into()),
        }
    }

    /// The most memory that it ever had.
    pub fn peak_bytes(&self) -> Outcome<u64> {
        self.group.as_ref().map_or(Err("no memory cgroup".into()), |group| group.peak_bytes())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Without input it ends by itself; it is not waited for that it does so in time.
        drop(self.asks.take());
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
