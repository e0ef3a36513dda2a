//! Processes that run passes over a model, each in its own memory cgroup where possible.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;

use serde_json::Value;

use super::fixtures::{Outcome, say};
pub use super::stream_group::Group;

/// The readahead of a disk; the drop restores it.
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
        // A partition has the setting in its parent folder.
        let place = if own.exists() { own } else { disk.join("../queue/read_ahead_kb") };
        if place.exists() { Ok(place) } else { Err("the disk has no readahead to set".into()) }
    }

    /// The current readahead in KiB.
    pub fn kib(file: &Path) -> Outcome<u64> {
        let text = std::fs::read_to_string(Readahead::place(file)?).map_err(say)?;
        text.trim().parse().map_err(say)
    }

    /// Sets the readahead of files that are opened from now on.
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
            eprintln!("cannot restore {} to {}: {error}", self.place.display(), self.before);
        }
    }
}

/// A process that runs passes over a model.
pub struct Child {
    process: Process,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// Its first answer.
    pub ready: Value,
    group: Option<Rc<Group>>,
}

/// The arguments of a process.
pub struct Start<'a> {
    /// The method, as on the command line.
    pub method: &'a str,
    /// The model.
    pub files: &'a [PathBuf],
    /// Memory for weights; `None` = as much as the process finds.
    pub host_bytes: Option<u64>,
    /// The cgroup.
    pub group: Option<Rc<Group>>,
}

impl Child {
    /// Starts a process and waits until it is ready.
    pub fn start(start: Start) -> Outcome<Child> {
        let mut command = Command::new(std::env::current_exe().map_err(say)?);
        command.args(["child", "--how", start.method]);
        if let Some(group) = &start.group {
            command.arg("--cgroup").arg(group.dir());
        }
        if let Some(bytes) = start.host_bytes {
            command.arg("--host").arg(bytes.to_string());
        }
        command.args(start.files).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(say)?;
        let requests = process.stdin.take();
        let answers = process.stdout.take().ok_or("the process has no standard output")?;
        let answers = BufReader::new(answers);
        let mut child =
            Child { process, requests, answers, ready: Value::Null, group: start.group };
        child.ready = child.answer()?;
        Ok(child)
    }

    fn answer(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line).map_err(say)? == 0 {
            let ended = self.process.wait().map_err(say)?;
            return Err(match ended.signal() {
                Some(libc::SIGKILL) => "killed: it needs more memory than its cgroup has".into(),
                _ => format!("the process ended: {ended}"),
            });
        }
        let answer: Value = serde_json::from_str(&line).map_err(say)?;
        match answer["error"].as_str() {
            Some(words) => Err(words.into()),
            None => Ok(answer),
        }
    }

    /// Seconds of one of `count` passes after a warm-up pass, and the checksum of the bytes.
    pub fn passes(&mut self, count: u32) -> Outcome<(f64, u64)> {
        let requests = self.requests.as_mut().ok_or("the process has no standard input")?;
        writeln!(requests, "{count}").and_then(|()| requests.flush()).map_err(say)?;
        let answer = self.answer()?;
        match (answer["pass_ns"].as_f64(), answer["sum"].as_u64()) {
            (Some(ns), Some(sum)) => Ok((ns / 1e9, sum)),
            _ => Err("the process sent an unexpected answer".into()),
        }
    }

    /// The peak memory of its cgroup.
    pub fn peak_bytes(&self) -> Outcome<u64> {
        self.group.as_ref().map_or(Err("no memory cgroup".into()), |group| group.peak_bytes())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The process ends when its input closes; the kill does not wait for that.
        drop(self.requests.take());
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
