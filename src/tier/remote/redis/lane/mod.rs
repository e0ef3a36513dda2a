//! A thread's way to a server or a cluster: a batch is split by node, and all nodes are talked to
//! at once until every item has its result, or the deadline has come.

mod serve;

use std::collections::HashMap;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::io::link::{Pieces, Watch};
use crate::tier::remote::redis::Shared;
use crate::tier::remote::redis::greeting;
use crate::tier::remote::redis::node::Node;
use crate::tier::remote::redis::resp::Value;
use crate::tier::remote::redis::slots::{self, MAX_NODES, Slots};
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::redis::wire::{Answer, Task};
use crate::tier::remote::redis::work::{Entry, Wording, Work};
use crate::tier::remote::{Asks, Gets, Lane, Puts, Server, Trouble};

/// Who waited less than this does not know whether a node is late.
const LEAST_WAIT_NS: u64 = 20_000_000;
/// Nodes that are asked about slots at once.
const ASKED: usize = 2;
/// Who follows whom is asked that often, where it is of interest: nobody says when it changes.
const REPLICAS_NS: u64 = 30_000_000_000;
/// The same where nobody was: nodes are not named before they have heard something.
const NO_REPLICAS_NS: u64 = 1_000_000_000;
/// What there is to be said against TLS that trusts everybody.
const INSECURE: &str = "nobody looks who it is (insecure=true): whoever is on the way can read and \
                        change everything, the password, too";

/// A way to a server or a cluster.
pub struct RedisLane {
    shared: Arc<Shared>,
    nodes: Vec<Node>,
    numbers: HashMap<Address, usize>,
    slots: Option<Arc<Slots>>,
    /// The numbers that nodes of `slots` have here.
    routes: Vec<usize>,
    /// Whom all goes to where there is no cluster.
    home: Option<usize>,
    /// Whom to begin with when somebody is to be asked.
    turn: usize,
    wording: Wording,
    /// What became of the last request that came to nothing.
    words: String,
    watch: Watch,
    watched: Vec<usize>,
    pieces: Pieces,
    answers: Vec<Answer>,
    key: Vec<u8>,
    batch: Batch,
}

/// A batch that is under way.
#[derive(Default)]
struct Batch {
    began_ns: u64,
    deadline_ns: u64,
    /// Items that have no result.
    left: usize,
    /// Items of which nobody knows where they belong.
    homeless: Vec<Task>,
    /// Items that are sent again at a time.
    held: Vec<(u64, usize, Task)>,
    has_asked: bool,
    /// What it means that nobody said where items belong.
    trouble: Option<Trouble>,
}

// SAFETY: the pieces are filled and used within a call; between calls they are memory that
// nobody looks at.
unsafe impl Send for RedisLane {}

impl RedisLane {
    /// One without connections.
    pub fn new(shared: Arc<Shared>) -> RedisLane {
        let wording = Wording { ttl_s: shared.settings.ttl_s, is_old: false };
        RedisLane {
            shared,
            nodes: Vec::new(),
            numbers: HashMap::new(),
            slots: None,
            routes: Vec::new(),
            home: None,
            turn: 0,
            wording,
            words: String::new(),
            watch: Watch::default(),
            watched: Vec::new(),
            pieces: Pieces::default(),
            answers: Vec::new(),
            key: Vec::new(),
            batch: Batch::default(),
        }
    }

    /// Appends an entry to the stream of events. One that an answer was lost to may be there twice.
    pub fn tell(
        &mut self,
        fields: &[(&str, &[u8])],
        most: u64,
        deadline_ns: u64,
    ) -> std::result::Result<(), Trouble> {
        let mut result = Err(Trouble::Later);
        self.drive(&mut Work::Publish(Entry { fields, most, result: &mut result }), deadline_ns);
        result
    }

    fn drive(&mut self, work: &mut Work, deadline_ns: u64) {
        self.begin(work, deadline_ns);
        while self.batch.left > 0 {
            let now = self.shared.clock.now_ns();
            if now >= deadline_ns {
                self.be_late(work, now);
                break;
            }
            self.release(now);
            self.look_for_slots(work, now);
            let mut has_moved = false;
            for node in 0..self.nodes.len() {
                has_moved |= self.serve(node, work, now);
            }
            if !has_moved && self.batch.left > 0 {
                self.wait(now);
            }
        }
        // A server that answers before it has heard all would leave values here that are
        // somebody else's from now on.
        for node in &mut self.nodes {
            if node.wire.as_ref().is_some_and(|wire| wire.is_ready() && !wire.out.is_empty()) {
                node.begin_anew();
            }
        }
    }

    fn begin(&mut self, work: &mut Work, deadline_ns: u64) {
        if self.nodes.len() >= MAX_NODES {
            (self.nodes, self.numbers) = (Vec::new(), HashMap::new());
            (self.slots, self.routes) = (None, Vec::new());
        }
        let now = self.shared.clock.now_ns();
        for node in &mut self.nodes {
            node.faults = 0;
            // One that did not become ready between batches: this one begins anew.
            if node.wire.as_ref().is_some_and(|wire| !wire.is_ready() && wire.by_ns <= now) {
                node.begin_anew();
            }
            if let Some(wire) = &mut node.wire {
                wire.is_checked = false;
            }
        }
        if !self.shared.settings.is_cluster {
            self.home = self.number(&self.shared.settings.seeds[0].clone());
        }
        self.batch = Batch { began_ns: now, deadline_ns, left: work.len(), ..Batch::default() };
        let known = self.shared.map.get();
        if let Some(known) = known
            && !self.slots.as_ref().is_some_and(|slots| Arc::ptr_eq(slots, &known))
        {
            self.adopt(known);
        }
        let none = Task {
            item: 0,
            moves: 0,
            is_repeated: false,
            is_held: false,
            is_asking: false,
            is_aside: self.shared.settings.reads_replicas && work.is_read(),
        };
        for item in 0..work.len() {
            work.fail(item, Trouble::Later);
            if work.is_too_long(item) {
                self.fail(work, item, Trouble::TooLong);
            } else {
                self.route(work, Task { item, ..none }, now);
            }
        }
    }

    /// Gives an item to the node that has it, as far as is known.
    pub(super) fn route(&mut self, work: &mut Work, mut task: Task, now: u64) {
        let node = if !self.shared.settings.is_cluster {
            self.home
        } else {
            let Some(slots) = &self.slots else { return self.batch.homeless.push(task) };
            let slot = match work.key(task.item, &self.shared.settings.prefix, &mut self.key) {
                true => slots::slot_of(&self.key),
                false => 0,
            };
            let master = slots.node_of(slot);
            let follower = match master {
                Some(master) if task.is_aside => self.follower(slots, master, slot, now),
                _ => None,
            };
            task.is_aside = follower.is_some();
            follower.or(master).map(|node| self.routes[node])
        };
        match node {
            Some(node) => self.nodes[node].queue.push_back(task),
            None => {
                // Nobody has the slot: the cluster is being put together, or has lost a part.
                self.shared.map.doubt();
                self.fail(work, task.item, Trouble::Later);
            }
        }
    }

    /// A node that follows one and is worth a try. Lanes and slots begin with different ones.
    fn follower(&self, slots: &Slots, master: usize, slot: usize, now: u64) -> Option<usize> {
        let all = slots.followers_of(master);
        let from = slot.wrapping_add(self.turn);
        let mut in_turn = (0..all.len()).map(|at| all[from.wrapping_add(at) % all.len()]);
        in_turn
            .find(|&node| self.nodes[self.routes[usize::from(node)]].is_inviting(now))
            .map(usize::from)
    }

    /// How old what is known of slots may be though nobody doubts it.
    fn most_age_ns(&self) -> u64 {
        match &self.slots {
            Some(slots) if self.shared.settings.reads_replicas => {
                if slots.has_followers() {
                    REPLICAS_NS
                } else {
                    NO_REPLICAS_NS
                }
            }
            _ => u64::MAX,
        }
    }

    /// The number of a node here; None = there are too many.
    fn number(&mut self, address: &Address) -> Option<usize> {
        if let Some(&node) = self.numbers.get(address) {
            return Some(node);
        }
        if self.nodes.len() >= MAX_NODES {
            return None;
        }
        self.nodes.push(Node::new(address.clone()));
        self.numbers.insert(address.clone(), self.nodes.len() - 1);
        Some(self.nodes.len() - 1)
    }

    /// Goes by another map from now on.
    fn adopt(&mut self, slots: Arc<Slots>) {
        // One that there is no room for has its items sent by another node.
        self.routes = slots.nodes.iter().map(|node| self.number(node).unwrap_or(0)).collect();
        for (number, node) in self.nodes.iter_mut().enumerate() {
            let is_idle = node.wire.as_ref().is_some_and(|wire| wire.due().is_none());
            if is_idle && !node.is_wanted() && !self.routes.contains(&number) {
                node.wire = None;
            }
        }
        self.slots = Some(slots);
    }

    /// Sees to it that somebody is asked who has which slot, where that is to be known.
    fn look_for_slots(&mut self, work: &mut Work, now: u64) {
        if !self.shared.settings.is_cluster {
            return;
        }
        if self.slots.is_some() {
            for task in std::mem::take(&mut self.batch.homeless) {
                self.route(work, task, now);
            }
            if self.shared.map.claim(now, self.most_age_ns()) {
                self.ask_some();
            }
        } else if !self.batch.has_asked {
            self.batch.has_asked = true;
            for seed in self.shared.settings.seeds.clone() {
                if let Some(node) = self.number(&seed) {
                    self.nodes[node].is_asked_for_slots = true;
                }
            }
        } else if !self.nodes.iter().any(|node| node.is_asked_for_slots) {
            let trouble = self.batch.trouble.unwrap_or(Trouble::Gone);
            for task in std::mem::take(&mut self.batch.homeless) {
                self.fail(work, task.item, trouble);
            }
        }
    }

    /// Asks some nodes about slots: those that do well, others in turn.
    fn ask_some(&mut self) {
        let count = self.nodes.len();
        let from = self.turn;
        self.turn = self.turn.wrapping_add(1);
        let in_turn = (0..count).map(|at| from.wrapping_add(at) % count);
        let (well, other): (Vec<usize>, Vec<usize>) = in_turn
            .partition(|&node| self.nodes[node].wire.is_some() && self.nodes[node].is_well());
        for node in well.into_iter().chain(other).take(ASKED) {
            self.nodes[node].is_asked_for_slots = true;
        }
    }

    /// Items whose time has come are sent again.
    fn release(&mut self, now: u64) {
        let nodes = &mut self.nodes;
        self.batch.held.retain(|&(from, node, task)| {
            if from <= now {
                nodes[node].queue.push_back(task);
            }
            from > now
        });
    }

    /// Waits until something can go on, or a time has come.
    fn wait(&mut self, now: u64) {
        let deadline = self.batch.deadline_ns;
        let mut until = self.batch.held.iter().map(|held| held.0).fold(deadline, u64::min);
        self.watch.clear();
        self.watched.clear();
        for (number, node) in self.nodes.iter().enumerate() {
            match &node.wire {
                Some(wire) => {
                    if wire.watch(&mut self.watch) {
                        self.watched.push(number);
                    }
                    if !wire.is_ready() && node.is_wanted() {
                        until = until.min(wire.by_ns);
                    }
                }
                None if node.is_wanted() => {
                    until = until.min(node.open_from(now, deadline).unwrap_or(now));
                }
                None => {}
            }
        }
        // It is late when a time has come: whoever waits looks at the clock again.
        if self.watch.wait(&self.shared.clock, until).is_ok() {
            for (at, &number) in self.watched.iter().enumerate() {
                if let Some(wire) = &mut self.nodes[number].wire {
                    wire.woke(self.watch.ready(at));
                }
            }
        }
    }

    /// The deadline has come: what has no answer has come to nothing, and a connection on which
    /// one may still come is of no use for another batch.
    fn be_late(&mut self, work: &mut Work, now: u64) {
        for number in 0..self.nodes.len() {
            let node = &mut self.nodes[number];
            let mut late: Vec<Task> = node.queue.drain(..).collect();
            if let Some(mut wire) = node.wire.take_if(|wire| wire.has_tasks()) {
                (node.is_asked_for_slots, node.has_heard) = (false, false);
                node.failed(now);
                late.extend(wire.drain());
            }
            if !late.is_empty() {
                self.words = format!("{}: no answer in time", self.nodes[number].address);
                self.shared.map.doubt();
                let waited_ns = now.saturating_sub(self.batch.began_ns);
                if self.shared.settings.is_cluster && waited_ns >= LEAST_WAIT_NS {
                    self.nodes[number].late(now);
                }
            }
            late.iter().for_each(|task| self.fail(work, task.item, Trouble::Late));
        }
        let batch = std::mem::take(&mut self.batch);
        for task in batch.homeless.iter().chain(batch.held.iter().map(|held| &held.2)) {
            work.fail(task.item, Trouble::Late);
        }
    }

    /// What a server said that let us in.
    fn hello(&self) -> Option<&Value> {
        let mut ready = self.nodes.iter().filter_map(|node| node.wire.as_ref());
        ready.find(|wire| wire.is_ready()).map(|wire| &wire.hello)
    }

    fn fail(&mut self, work: &mut Work, item: usize, trouble: Trouble) {
        work.fail(item, trouble);
        self.batch.left = self.batch.left.saturating_sub(1);
    }
}

impl Lane for RedisLane {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        let mut said = Err(Trouble::Later);
        self.words.clear();
        self.drive(&mut Work::Greet(&mut said), deadline_ns);
        let settings = &self.shared.settings;
        let mut server = match said {
            Ok(info) => greeting::server(&info, settings.is_cluster, settings.secret())
                .ok_or_else(|| Error::from(Trouble::Nonsense)),
            Err(Trouble::Denied) if self.hello().is_some() => {
                let hello = self.hello().unwrap_or(&Value::Nil);
                Ok(greeting::of_hello(hello, settings.secret()))
            }
            Err(trouble) => {
                let general = Error::from(trouble);
                let words = match self.words.is_empty() {
                    true => general.message().to_string(),
                    false => format!("{}: {}", general.message(), self.words),
                };
                // It has answered: nothing comes of waiting until it can be reached.
                let is_final = matches!(trouble, Trouble::Denied | Trouble::Untrusted);
                let status = if is_final { Status::Invalid } else { trouble.status() };
                Err(Error::new(status, words))
            }
        }?;
        if settings.is_insecure {
            server.warnings.push(INSECURE.to_string());
        }
        Ok(server)
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.drive(&mut Work::Get(gets), deadline_ns);
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.drive(&mut Work::Put(puts), deadline_ns);
    }

    fn ask(&mut self, asks: &mut Asks, deadline_ns: u64) {
        self.drive(&mut Work::Ask(asks), deadline_ns);
    }

    fn remove(&mut self, asks: &mut Asks, deadline_ns: u64) {
        self.drive(&mut Work::Remove(asks), deadline_ns);
    }
}
