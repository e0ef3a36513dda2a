//! Processes with a store each, and their orders. No process outlives the test, even if the test
//! fails.

use kvtier_testkit::fixtures::redis::{PATIENCE, wait_until};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use crate::stores_redis::worker::{MARK, PLACE};

/// Counters of a process, by name.
pub type Told = BTreeMap<String, u64>;

struct Member {
    child: Child,
    orders: ChildStdin,
    lines: Receiver<String>,
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All processes.
pub struct Crew(Vec<Member>);

impl Crew {
    /// Starts `count` processes, each on its own host or all on this one.
    pub fn start(count: usize, has_hosts: bool) -> Crew {
        Crew((0..count).map(|number| Member::start(number, count, has_hosts)).collect())
    }

    /// Process ids.
    pub fn ids(&self) -> Vec<u32> {
        self.0.iter().map(|member| member.child.id()).collect()
    }

    /// Each process opens a store on a remote, and puts its part of `documents` documents there.
    pub fn open(&mut self, documents: u32, remote: impl Fn(usize) -> String) {
        for (at, member) in self.0.iter_mut().enumerate() {
            let spec = format!("store(host=1MiB, remote={})", remote(at));
            member.say(&format!("open {documents} {spec}"));
        }
        self.0.iter_mut().for_each(|member| drop(member.hear("open")));
        self.all("fill");
        self.all("work");
    }

    /// Sends an order to all processes, and waits until all have carried it out.
    pub fn all(&mut self, order: &str) -> Vec<Told> {
        self.0.iter_mut().for_each(|member| member.say(order));
        self.0.iter_mut().map(|member| member.hear(order)).collect()
    }

    /// Current counters of all processes, which continue to work.
    pub fn counts(&mut self) -> Vec<Told> {
        self.all("work")
    }

    /// Waits until each process has completed `count` more turns, successful or not.
    pub fn turns(&mut self, count: u64) {
        let before = self.counts();
        wait_until("all processes continue", || {
            let now = self.counts();
            now.iter().zip(&before).all(|(now, before)| now["turns"] >= before["turns"] + count)
        });
    }

    /// After recovery: the others find KV that one process puts. Checks the counters of all.
    pub fn end(mut self) {
        self.all("rest");
        let (first, others) = self.0.split_first_mut().expect("a process");
        first.say("put 900");
        first.hear("put 900");
        others.iter_mut().for_each(|member| member.say("find 900"));
        others.iter_mut().for_each(|member| drop(member.hear("find 900")));
        let other = &mut others[0];
        other.say("put 901");
        other.hear("put 901");
        first.say("find 901");
        first.hear("find 901");
        let all = self.all("end");
        for (number, told) in all.iter().enumerate() {
            println!("{number}: {told:?}");
        }
        for told in all {
            let none = ["wrong", "over", "corrupt"].map(|what| told[what]);
            assert_eq!(none, [0; 3], "wrong bytes, ops that were late, objects damaged: {told:?}");
            let some = ["put", "located", "got", "compared", "fetched", "sent"];
            assert!(some.iter().all(|what| told[*what] > 0), "a counter is 0: {told:?}");
        }
        for member in &mut self.0 {
            assert!(member.child.wait().expect("it ended").success(), "it did not end well");
        }
    }
}

impl Member {
    fn start(number: usize, of: usize, has_host: bool) -> Member {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command
            .args(["--exact", "stores_redis::worker::child", "--nocapture", "--test-threads=1"])
            .env(PLACE, format!("{number}/{of}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if has_host {
            // SAFETY: the function makes one system call and nothing else.
            unsafe { command.pre_exec(crate::stores_redis::line::own_network) };
        }
        let mut child = command.spawn().expect("started");
        let orders = child.stdin.take().expect("piped");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            let said = out.lines().map_while(Result::ok);
            let ours = said.filter_map(|line| line.strip_prefix(MARK).map(str::to_string));
            ours.map_while(|line| tell.send(line).ok()).for_each(drop);
        });
        Member { child, orders, lines }
    }

    fn say(&mut self, order: &str) {
        writeln!(self.orders, "{order}").expect("it listens");
    }

    fn hear(&mut self, order: &str) -> Told {
        let line = self.lines.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|why| panic!("no word of {order:?}: {why}"));
        let counts = line.split_whitespace().filter_map(|word| word.split_once('='));
        counts.map(|(name, count)| (name.to_string(), count.parse().expect("a count"))).collect()
    }
}
