//! A client of a Redis server or cluster. A batch is split by node, and all nodes are served at
//! once until every item has its result or the deadline has passed.

use std::collections::HashMap;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::io::link::{Pieces, Watch};
use crate::tier::remote::fault::Fault;
use crate::tier::remote::redis::connection::{Answer, Expect, Task};
use crate::tier::remote::redis::errors::{self, ErrorReply};
use crate::tier::remote::redis::node::Node;
use crate::tier::remote::redis::operation::{
    Dialect, Operation, Outcome, Payload, Special, StreamEntry, write_command,
};
use crate::tier::remote::redis::resp::Value;
use crate::tier::remote::redis::slots::{self, MAX_NODES, SlotMap};
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::redis::{MAX_BYTES, Shared, add, info};
use crate::tier::remote::{Arrived, Client, Gets, Prepare, Puts, Queries, RemoteError, Server};

/// A batch that waited less than this does not show whether a node is late.
const LEAST_WAIT_NS: u64 = 20_000_000;
/// Nodes that are queried for the slots at once.
const SLOTS_NODES: usize = 2;
/// Age at which known replicas are queried again, where replicas are read: no server reports
/// changes.
const REPLICAS_NS: u64 = 30_000_000_000;
/// The same while no replica is known: a replica is listed only after it has replicated something.
const NO_REPLICAS_NS: u64 = 1_000_000_000;
/// Commands that are encoded before they are sent: the server begins with the first ones meanwhile.
const FEED_COMMANDS: usize = 128;
/// Most redirections of an item.
const MAX_MOVES: u8 = 5;
/// Connections to a node that may be lost in a batch; after them its remaining items fail.
const MAX_FAULTS: u32 = 3;
/// Delay before an item is sent again that a server could not serve at the moment.
const DELAY_NS: u64 = 20_000_000;
/// Longest time that a server is requested to wait for its replicas.
const MAX_CONFIRM_MS: u64 = 60_000;
/// Interval at which an idle server checks the time, with a margin.
const CONFIRM_SPARE_MS: u64 = 150;
/// Warning about TLS without verification.
const INSECURE: &str = "the server's certificate is not verified (insecure=true): anyone who controls the network \
                        can read and change all data, including the password";

/// Called for each item of a batch: of gets when it arrived, of puts before it is sent.
type Each<'a> = &'a mut dyn FnMut(&Operation<'_>, usize);

/// A client of a server or a cluster.
pub struct RedisClient {
    shared: Arc<Shared>,
    nodes: Vec<Node>,
    indices: HashMap<Address, usize>,
    slots: Option<Arc<SlotMap>>,
    /// Index in `nodes` of each node of `slots`.
    routes: Vec<usize>,
    /// Index of the only server; None = a cluster.
    server: Option<usize>,
    /// The node to begin with when nodes are queried in turn.
    cursor: usize,
    dialect: Dialect,
    /// Reason of the last failure, for people.
    last_error: String,
    watch: Watch,
    watched: Vec<usize>,
    pieces: Pieces,
    answers: Vec<Answer>,
    key: Vec<u8>,
    batch: Batch,
}

/// The batch in flight.
#[derive(Default)]
struct Batch {
    began_ns: u64,
    deadline_ns: u64,
    /// Number of items without a result.
    left: usize,
    /// Items whose node is not known.
    unrouted: Vec<Task>,
    /// Items that are sent again later: the time, the node, the item.
    delayed: Vec<(u64, usize, Task)>,
    has_asked: bool,
    /// The result of unrouted items if no node reports the slots.
    error: Option<RemoteError>,
}

// SAFETY: the pieces are filled and used within one call; between calls no one reads them.
unsafe impl Send for RedisClient {}

impl RedisClient {
    /// A client without connections.
    pub fn new(shared: Arc<Shared>) -> RedisClient {
        let dialect = Dialect { ttl_s: shared.settings.ttl_s, is_old: false };
        RedisClient {
            shared,
            nodes: Vec::new(),
            indices: HashMap::new(),
            slots: None,
            routes: Vec::new(),
            server: None,
            cursor: 0,
            dialect,
            last_error: String::new(),
            watch: Watch::default(),
            watched: Vec::new(),
            pieces: Pieces::default(),
            answers: Vec::new(),
            key: Vec::new(),
            batch: Batch::default(),
        }
    }

    /// Appends an entry to the stream of events. An entry whose reply was lost may be there twice.
    pub fn publish(
        &mut self,
        fields: &[(&str, &[u8])],
        most: u64,
        deadline_ns: u64,
    ) -> std::result::Result<(), RemoteError> {
        let mut result = Err(RemoteError::Busy);
        let entry = StreamEntry { fields, most, result: &mut result };
        self.drive(&mut Operation::Control(Special::Publish(entry)), &mut |_, _| (), deadline_ns);
        result
    }

    fn drive(&mut self, operation: &mut Operation, each: Each<'_>, deadline_ns: u64) {
        self.begin(operation, deadline_ns);
        while self.batch.left > 0 {
            let now = self.shared.clock.now_ns();
            if now >= deadline_ns {
                self.expire(operation, now);
                break;
            }
            self.release(now);
            self.refresh_slots(operation, now);
            let mut has_moved = false;
            for node in 0..self.nodes.len() {
                has_moved |= self.serve(node, operation, each, now);
            }
            if !has_moved && self.batch.left > 0 {
                self.wait(now);
            }
        }
        // If a server replied before it had read all commands, the rest of them would hold values
        // whose memory belongs to the caller again.
        for node in &mut self.nodes {
            if node.connection.as_ref().is_some_and(|c| c.is_ready() && !c.out.is_empty()) {
                node.reset();
            }
        }
    }

    fn begin(&mut self, operation: &mut Operation, deadline_ns: u64) {
        if self.nodes.len() >= MAX_NODES {
            (self.nodes, self.indices) = (Vec::new(), HashMap::new());
            (self.slots, self.routes) = (None, Vec::new());
        }
        let now = self.shared.clock.now_ns();
        for node in &mut self.nodes {
            node.faults = 0;
            // The connection did not become ready between batches: this batch connects anew.
            if node
                .connection
                .as_ref()
                .is_some_and(|c| !c.is_ready() && c.transport.ready_by_ns <= now)
            {
                node.reset();
            }
            if let Some(connection) = &mut node.connection {
                connection.is_checked = false;
            }
        }
        if !self.shared.settings.is_cluster {
            self.server = self.number(&self.shared.settings.seeds[0].clone());
        }
        self.batch =
            Batch { began_ns: now, deadline_ns, left: operation.item_count(), ..Batch::default() };
        let known = self.shared.map.get();
        if let Some(known) = known
            && !self.slots.as_ref().is_some_and(|slots| Arc::ptr_eq(slots, &known))
        {
            self.adopt(known);
        }
        let none = Task {
            item: 0,
            moves: 0,
            is_resent: false,
            is_delayed: false,
            is_asking: false,
            is_replica_read: self.shared.settings.reads_replicas && operation.is_read(),
        };
        for item in 0..operation.item_count() {
            operation.fail(item, RemoteError::Busy);
            if operation.is_too_long(item, MAX_BYTES) {
                self.fail(operation, item, RemoteError::TooLong);
            } else {
                self.route(operation, Task { item, ..none }, now);
            }
        }
    }

    /// Queues an item at the node that has its slot, as far as is known.
    fn route(&mut self, operation: &mut Operation, mut task: Task, now: u64) {
        let node = if !self.shared.settings.is_cluster {
            self.server
        } else {
            let Some(slots) = &self.slots else { return self.batch.unrouted.push(task) };
            let slot = match operation.key(task.item, &self.shared.settings.prefix, &mut self.key) {
                true => slots::slot_of(&self.key),
                false => 0,
            };
            let master = slots.node_of(slot);
            let follower = match master {
                Some(master) if task.is_replica_read => self.follower(slots, master, slot, now),
                _ => None,
            };
            task.is_replica_read = follower.is_some();
            follower.or(master).map(|node| self.routes[node])
        };
        match node {
            Some(node) => self.nodes[node].queue.push_back(task),
            None => {
                // No node has the slot: the cluster is being set up, or has lost a part.
                self.shared.map.doubt();
                self.fail(operation, task.item, RemoteError::Busy);
            }
        }
    }

    /// A replica of a node that is worth a try. Clients and slots begin with different replicas.
    fn follower(&self, slots: &SlotMap, master: usize, slot: usize, now: u64) -> Option<usize> {
        let all = slots.followers_of(master);
        let from = slot.wrapping_add(self.cursor);
        let mut rotated = (0..all.len()).map(|at| all[from.wrapping_add(at) % all.len()]);
        rotated
            .find(|&node| self.nodes[self.routes[usize::from(node)]].is_preferred(now))
            .map(usize::from)
    }

    /// Age at which the slots are read again although no reply contradicted them.
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

    /// The index of a node; None = there are too many nodes.
    fn number(&mut self, address: &Address) -> Option<usize> {
        if let Some(&node) = self.indices.get(address) {
            return Some(node);
        }
        if self.nodes.len() >= MAX_NODES {
            return None;
        }
        self.nodes.push(Node::new(address.clone()));
        self.indices.insert(address.clone(), self.nodes.len() - 1);
        Some(self.nodes.len() - 1)
    }

    /// Uses another slot map from now on.
    fn adopt(&mut self, slots: Arc<SlotMap>) {
        // If there is no room for a node, another node redirects its items.
        self.routes = slots.nodes.iter().map(|node| self.number(node).unwrap_or(0)).collect();
        for (number, node) in self.nodes.iter_mut().enumerate() {
            let is_idle = node.connection.as_ref().is_some_and(|c| c.due().is_none());
            if is_idle && !node.is_wanted() && !self.routes.contains(&number) {
                node.connection = None;
            }
        }
        self.slots = Some(slots);
    }

    /// Requests the slots where they are needed, and routes items that waited for them.
    fn refresh_slots(&mut self, operation: &mut Operation, now: u64) {
        if !self.shared.settings.is_cluster {
            return;
        }
        if self.slots.is_some() {
            for task in std::mem::take(&mut self.batch.unrouted) {
                self.route(operation, task, now);
            }
            if self.shared.map.claim(now, self.most_age_ns()) {
                self.request_slots();
            }
        } else if !self.batch.has_asked {
            self.batch.has_asked = true;
            for seed in self.shared.settings.seeds.clone() {
                if let Some(node) = self.number(&seed) {
                    self.nodes[node].wants_slots = true;
                }
            }
        } else if !self.nodes.iter().any(|node| node.wants_slots) {
            let error = self.batch.error.unwrap_or(RemoteError::Unreachable);
            for task in std::mem::take(&mut self.batch.unrouted) {
                self.fail(operation, task.item, error);
            }
        }
    }

    /// Asks some nodes for the slots: connected nodes that work first, then others in turn.
    fn request_slots(&mut self) {
        let count = self.nodes.len();
        let from = self.cursor;
        self.cursor = self.cursor.wrapping_add(1);
        let rotated = (0..count).map(|at| from.wrapping_add(at) % count);
        let (well, other): (Vec<usize>, Vec<usize>) = rotated
            .partition(|&node| self.nodes[node].connection.is_some() && self.nodes[node].is_well());
        for node in well.into_iter().chain(other).take(SLOTS_NODES) {
            self.nodes[node].wants_slots = true;
        }
    }

    /// Queues items again whose delay is over.
    fn release(&mut self, now: u64) {
        let nodes = &mut self.nodes;
        self.batch.delayed.retain(|&(from, node, task)| {
            if from <= now {
                nodes[node].queue.push_back(task);
            }
            from > now
        });
    }

    /// Waits until a connection is ready or a time has passed.
    fn wait(&mut self, now: u64) {
        let deadline = self.batch.deadline_ns;
        let mut until = self.batch.delayed.iter().map(|delayed| delayed.0).fold(deadline, u64::min);
        self.watch.clear();
        self.watched.clear();
        for (number, node) in self.nodes.iter().enumerate() {
            match &node.connection {
                Some(connection) => {
                    if connection.watch(&mut self.watch) {
                        self.watched.push(number);
                    }
                    if !connection.is_ready() && node.is_wanted() {
                        until = until.min(connection.transport.ready_by_ns);
                    }
                }
                None if node.is_wanted() => {
                    until = until.min(node.open_from(now, deadline).unwrap_or(now));
                }
                None => {}
            }
        }
        // An error means that a time has passed: the caller reads the clock again.
        if self.watch.wait(&self.shared.clock, until).is_ok() {
            for (at, &number) in self.watched.iter().enumerate() {
                if let Some(connection) = &mut self.nodes[number].connection {
                    connection.transport.woke(self.watch.ready(at));
                }
            }
        }
    }

    /// Fails all items at the deadline. A connection that may still deliver a reply cannot serve
    /// another batch.
    fn expire(&mut self, operation: &mut Operation, now: u64) {
        for number in 0..self.nodes.len() {
            let node = &mut self.nodes[number];
            let mut late: Vec<Task> = node.queue.drain(..).collect();
            if let Some(mut connection) = node.connection.take_if(|c| c.has_tasks()) {
                (node.wants_slots, node.is_slots_sent) = (false, false);
                node.failed(now);
                late.extend(connection.drain());
            }
            if !late.is_empty() {
                self.last_error = format!("{}: no answer in time", self.nodes[number].address);
                self.shared.map.doubt();
                let waited_ns = now.saturating_sub(self.batch.began_ns);
                if self.shared.settings.is_cluster && waited_ns >= LEAST_WAIT_NS {
                    self.nodes[number].timed_out(now);
                }
            }
            late.iter().for_each(|task| self.fail(operation, task.item, RemoteError::Timeout));
        }
        let batch = std::mem::take(&mut self.batch);
        for task in batch.unrouted.iter().chain(batch.delayed.iter().map(|delayed| &delayed.2)) {
            operation.fail(task.item, RemoteError::Timeout);
        }
    }

    /// The server's reply to HELLO.
    fn hello(&self) -> Option<&Value> {
        let mut ready = self.nodes.iter().filter_map(|node| node.connection.as_ref());
        ready.find(|c| c.is_ready()).map(|c| &c.hello)
    }

    fn fail(&mut self, operation: &mut Operation, item: usize, error: RemoteError) {
        operation.fail(item, error);
        self.batch.left = self.batch.left.saturating_sub(1);
    }
}

/// Serving one node.
impl RedisClient {
    /// Does what can be done with a node now; whether anything was done.
    fn serve(
        &mut self,
        number: usize,
        operation: &mut Operation,
        each: Each<'_>,
        now: u64,
    ) -> bool {
        let node = &self.nodes[number];
        if node.connection.is_none() {
            return node.is_wanted() && self.connect(number, operation, now);
        }
        let exchanged = self.exchange(number, operation, each, now);
        let settled = self.settle(number, operation, each, now);
        match exchanged.and_then(|has_moved| settled.map(|()| has_moved)) {
            Ok(has_moved) => has_moved,
            Err(fault) => {
                self.drop_connection(number, operation, fault, now);
                true
            }
        }
    }

    fn connect(&mut self, number: usize, operation: &mut Operation, now: u64) -> bool {
        let node = &mut self.nodes[number];
        match node.open_from(now, self.batch.deadline_ns) {
            Some(from) if from > now => return false,
            Some(_) => {
                if let Err(fault) = node.connect(now, &self.shared.settings) {
                    self.drop_connection(number, operation, fault, now);
                }
            }
            None => {
                // A replica may have taken over.
                self.shared.map.doubt();
                let fault = node.refusal();
                self.fail_node(number, operation, &fault, now);
            }
        }
        true
    }

    /// Sends commands and receives replies; whether any bytes moved. [`RedisClient::settle`]
    /// handles the replies.
    fn exchange(
        &mut self,
        number: usize,
        operation: &Operation,
        each: Each<'_>,
        now: u64,
    ) -> std::result::Result<bool, Fault> {
        let shared = self.shared.clone();
        let node = &mut self.nodes[number];
        let is_wanted = node.is_wanted();
        let Some(connection) = &mut node.connection else { return Ok(false) };
        let was_ready = connection.is_ready();
        if !was_ready && now >= connection.transport.ready_by_ns {
            return Err(Fault::new(RemoteError::Timeout, connection.timeout_message()));
        }
        if was_ready && is_wanted {
            if !connection.is_checked {
                connection.check(
                    operation,
                    &shared.settings,
                    &mut self.answers,
                    &mut self.pieces,
                )?;
            }
            self.send_commands(number, operation, each, now);
        }
        let node = &mut self.nodes[number];
        let Some(connection) = &mut node.connection else { return Ok(false) };
        let has_moved = connection.exchange(
            operation,
            &shared.settings,
            &mut self.answers,
            &mut self.pieces,
        )?;
        if !was_ready && connection.is_ready() {
            node.connected();
            let tally = &shared.tally;
            add(&tally.connections);
            if std::mem::replace(&mut node.was_connected, true) {
                add(&tally.reconnects);
            }
        }
        Ok(has_moved)
    }

    /// Encodes as many commands as the window allows.
    fn send_commands(&mut self, number: usize, operation: &Operation, each: Each<'_>, now: u64) {
        let (settings, node) = (&self.shared.settings, &mut self.nodes[number]);
        let Some(connection) = &mut node.connection else { return };
        if node.wants_slots && !node.is_slots_sent {
            node.is_slots_sent = true;
            write_command(&mut connection.out, &[b"CLUSTER", b"SLOTS"]);
            connection.expects(Expect::Slots);
        }
        for _ in 0..FEED_COMMANDS {
            let next = node.queue.front().filter(|task| {
                operation.fits(task.item, (connection.items, connection.bytes), connection.window)
            });
            let Some(task) = next.copied() else { break };
            node.queue.pop_front();
            operation.key(task.item, &settings.prefix, &mut self.key);
            if task.is_asking {
                write_command(&mut connection.out, &[b"ASKING"]);
                connection.expects(Expect::Asking);
            }
            if matches!(operation, Operation::Put(_)) {
                each(operation, task.item);
            }
            operation.encode(task.item, &self.key, self.dialect, &mut connection.out);
            connection.expects(Expect::Item(task));
            connection.items += 1;
            connection.bytes += operation.weight(task.item);
            connection.is_to_confirm = settings.wait > 0 && matches!(operation, Operation::Put(_));
        }
        if connection.is_to_confirm && node.queue.is_empty() {
            connection.is_to_confirm = false;
            // The server replies before the deadline, so that the connection survives a slow
            // replica.
            let left_ms = self.batch.deadline_ns.saturating_sub(now) / 1_000_000;
            let spare_ms = (left_ms / 8).max(CONFIRM_SPARE_MS).min(left_ms / 2);
            let most_ms = (left_ms - spare_ms).clamp(1, MAX_CONFIRM_MS);
            connection.out.command(3);
            connection.out.word(b"WAIT");
            connection.out.number(u64::from(settings.wait));
            connection.out.number(most_ms);
            connection.expects(Expect::Wait);
        }
    }

    /// Handles the replies of a node.
    fn settle(
        &mut self,
        number: usize,
        operation: &mut Operation,
        each: Each<'_>,
        now: u64,
    ) -> std::result::Result<(), Fault> {
        let mut answers = std::mem::take(&mut self.answers);
        let mut done = Ok(());
        for Answer { to, payload } in answers.drain(..) {
            let of_this = match to {
                Expect::Item(task) => {
                    let outcome = operation.complete(task.item, payload);
                    if matches!((&outcome, &*operation), (Outcome::Done, Operation::Get(_))) {
                        each(operation, task.item);
                    }
                    self.settle_item(number, operation, task, outcome, now)
                }
                Expect::Slots => {
                    self.settle_slots(number, payload);
                    Ok(())
                }
                Expect::Wait => {
                    self.settle_wait(number, operation, payload);
                    Ok(())
                }
                _ => Ok(()),
            };
            done = done.and(of_this);
        }
        self.answers = answers;
        done
    }

    fn settle_item(
        &mut self,
        number: usize,
        operation: &mut Operation,
        task: Task,
        outcome: Outcome,
        now: u64,
    ) -> std::result::Result<(), Fault> {
        let node = &mut self.nodes[number];
        if let Some(connection) = &mut node.connection {
            connection.items = connection.items.saturating_sub(1);
            connection.bytes = connection.bytes.saturating_sub(operation.weight(task.item));
        }
        match outcome {
            Outcome::Done if task.is_replica_read && operation.is_absent(task.item) => {
                node.succeeded();
                self.ask_master(operation, task, now);
            }
            Outcome::Done => {
                node.succeeded();
                match &mut node.connection {
                    Some(connection)
                        if self.shared.settings.wait > 0
                            && matches!(operation, Operation::Put(_)) =>
                    {
                        connection.unconfirmed.push(task);
                    }
                    _ => self.batch.left = self.batch.left.saturating_sub(1),
                }
            }
            Outcome::Malformed => {
                self.fail(operation, task.item, RemoteError::Malformed);
                return Err(Fault::unreachable("an answer to another request"));
            }
            Outcome::Error(reply) => self.settle_error(number, operation, task, reply, now),
        }
        Ok(())
    }

    /// Handles an error reply.
    fn settle_error(
        &mut self,
        number: usize,
        operation: &mut Operation,
        task: Task,
        reply: Vec<u8>,
        now: u64,
    ) {
        let node = &mut self.nodes[number];
        let shown = errors::shown(&reply, self.shared.settings.secret());
        self.last_error = format!("{}: {shown}", node.address);
        if matches!(operation, Operation::Remove(_))
            && !self.dialect.is_old
            && errors::is_unknown_command(&reply)
        {
            self.dialect.is_old = true;
            return node.queue.push_back(task);
        }
        match errors::meaning(&reply, &node.address) {
            reply if task.is_replica_read => {
                if matches!(reply, ErrorReply::Moved(_)) {
                    self.shared.map.doubt();
                }
                self.ask_master(operation, task, now);
            }
            ErrorReply::Error(error) => self.fail(operation, task.item, error),
            ErrorReply::Retry => {
                self.shared.map.doubt();
                if task.is_delayed {
                    self.fail(operation, task.item, RemoteError::Busy);
                } else {
                    add(&self.shared.tally.retries);
                    let from = now.saturating_add(DELAY_NS);
                    self.batch.delayed.push((from, number, Task { is_delayed: true, ..task }));
                }
            }
            ErrorReply::Moved(to) => {
                self.shared.map.doubt();
                self.send_elsewhere(operation, to, Task { is_asking: false, ..task });
            }
            ErrorReply::Ask(to) => {
                self.send_elsewhere(operation, to, Task { is_asking: true, ..task })
            }
        }
    }

    fn send_elsewhere(&mut self, operation: &mut Operation, to: Option<Address>, task: Task) {
        if !self.shared.settings.is_cluster || task.moves >= MAX_MOVES {
            return self.fail(operation, task.item, RemoteError::Busy);
        }
        match to.and_then(|to| self.number(&to)) {
            Some(node) => {
                add(&self.shared.tally.redirects);
                let task = Task { moves: task.moves + 1, ..task };
                self.nodes[node].queue.push_back(task);
            }
            None => self.fail(operation, task.item, RemoteError::Malformed),
        }
    }

    /// Asks the master for an item that a replica did not deliver.
    fn ask_master(&mut self, operation: &mut Operation, task: Task, now: u64) {
        add(&self.shared.tally.retries);
        operation.fail(task.item, RemoteError::Busy);
        self.route(operation, Task { is_replica_read: false, ..task }, now);
    }

    fn settle_slots(&mut self, number: usize, payload: Payload) {
        let node = &mut self.nodes[number];
        (node.wants_slots, node.is_slots_sent) = (false, false);
        let Payload::Value(value) = payload else { return };
        if let Some(slots) = SlotMap::read(&value, &node.address) {
            let slots = Arc::new(slots);
            add(&self.shared.tally.refreshes);
            self.shared.map.put(slots.clone());
            return self.adopt(slots);
        }
        let (error, message) = match &value {
            Value::Error(reply) => {
                let error = match errors::meaning(reply, &node.address) {
                    ErrorReply::Error(error) => error,
                    _ => RemoteError::Busy,
                };
                (error, errors::shown(reply, self.shared.settings.secret()))
            }
            Value::List(none) if none.is_empty() => {
                (RemoteError::Busy, "no node has any slot".to_string())
            }
            _ => (RemoteError::Malformed, "its reply about cluster slots is malformed".to_string()),
        };
        self.last_error = format!("{}: {message}", node.address);
        self.batch.error = Some(error);
    }

    fn settle_wait(&mut self, number: usize, operation: &mut Operation, payload: Payload) {
        let node = &mut self.nodes[number];
        let tasks = node.connection.as_mut().map(|c| std::mem::take(&mut c.unconfirmed));
        let wait = i64::from(self.shared.settings.wait);
        let is_enough = matches!(payload, Payload::Value(Value::Number(count)) if count >= wait);
        for task in tasks.unwrap_or_default() {
            if is_enough {
                self.batch.left = self.batch.left.saturating_sub(1);
            } else {
                self.last_error =
                    format!("{}: too few replicas have it", self.nodes[number].address);
                self.fail(operation, task.item, RemoteError::Busy);
            }
        }
    }

    /// Gives up a connection.
    fn drop_connection(
        &mut self,
        number: usize,
        operation: &mut Operation,
        fault: Fault,
        now: u64,
    ) {
        let node = &mut self.nodes[number];
        let connection = node.connection.take();
        let was_ready = connection.as_ref().is_some_and(|c| c.is_ready());
        let was_old = connection.as_ref().is_some_and(|c| c.is_reused);
        let has_other =
            connection.as_ref().is_none_or(|c| c.transport.is_connecting()) && node.has_other();
        node.is_slots_sent = false;
        node.faults += 1;
        let is_gone = fault.error == RemoteError::Unreachable;
        if has_other && is_gone {
            // The next address of the same host is tried.
            node.faults -= 1;
            return;
        }
        // A server that restarted, or closes idle connections, had ended the connection before this
        // batch. It executed nothing, or a repetition does no harm.
        let is_stale = was_old && is_gone;
        let mut first = true;
        let unanswered = connection.map(|mut c| c.drain()).unwrap_or_default();
        if !is_stale {
            self.last_error = format!("{}: {}", node.address, fault.message);
            match self.shared.settings.is_cluster && fault.error == RemoteError::Timeout {
                true => node.timed_out(now),
                false => node.failed(now),
            }
            node.record(&fault);
            self.shared.map.doubt();
        }
        for task in unanswered.into_iter().rev() {
            if is_stale && !task.is_resent {
                add(&self.shared.tally.retries);
                let again = Task { is_resent: true, ..task };
                self.nodes[number].queue.push_front(again);
                continue;
            }
            if task.is_replica_read {
                self.ask_master(operation, task, now);
                continue;
            }
            self.fail(
                operation,
                task.item,
                if first { fault.error } else { RemoteError::Unreachable },
            );
            first = false;
        }
        let node = &mut self.nodes[number];
        if !is_stale && (!was_ready || node.faults >= MAX_FAULTS) {
            self.fail_node(number, operation, &fault, now);
        }
    }

    /// Fails all that is queued at a node.
    fn fail_node(&mut self, number: usize, operation: &mut Operation, fault: &Fault, now: u64) {
        let node = &mut self.nodes[number];
        if node.wants_slots {
            (node.wants_slots, node.is_slots_sent) = (false, false);
            self.batch.error = Some(fault.error);
        }
        if self.last_error.is_empty() {
            self.last_error = format!("{}: {}", node.address, fault.message);
        }
        for task in std::mem::take(&mut self.nodes[number].queue) {
            match task.is_replica_read {
                true => self.ask_master(operation, task, now),
                false => self.fail(operation, task.item, fault.error),
            }
        }
    }
}

impl Client for RedisClient {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        let mut reply = Err(RemoteError::Busy);
        self.last_error.clear();
        self.drive(&mut Operation::Control(Special::Info(&mut reply)), &mut |_, _| (), deadline_ns);
        let settings = &self.shared.settings;
        let mut server = match reply {
            Ok(info) => info::server(&info, settings.is_cluster, settings.secret())
                .ok_or_else(|| Error::from(RemoteError::Malformed)),
            Err(RemoteError::Denied) if self.hello().is_some() => {
                let hello = self.hello().unwrap_or(&Value::Nil);
                Ok(info::of_hello(hello, settings.secret()))
            }
            Err(error) => {
                let general = Error::from(error);
                let message = match self.last_error.is_empty() {
                    true => general.message().to_string(),
                    false => format!("{}: {}", general.message(), self.last_error),
                };
                // The server replied: waiting does not help.
                let is_final = matches!(error, RemoteError::Denied | RemoteError::Untrusted);
                let status = if is_final { Status::Invalid } else { error.status() };
                Err(Error::new(status, message))
            }
        }?;
        if settings.is_insecure {
            server.warnings.push(INSECURE.to_string());
        }
        Ok(server)
    }

    unsafe fn get_each(&mut self, gets: &mut Gets, deadline_ns: u64, arrived: Arrived<'_>) {
        let mut each = |operation: &Operation, item: usize| {
            if let Operation::Get(gets) = operation
                && gets.items[item].result.is_ok()
            {
                arrived(gets, item);
            }
        };
        self.drive(&mut Operation::Get(gets), &mut each, deadline_ns);
    }

    unsafe fn put_each(&mut self, puts: &mut Puts, deadline_ns: u64, prepare: Prepare<'_>) {
        self.drive(&mut Operation::Put(puts), &mut |_, item| prepare(item), deadline_ns);
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        // SAFETY: the caller's guarantee.
        unsafe { self.get_each(gets, deadline_ns, &mut |_, _| ()) };
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        // SAFETY: the caller's guarantee.
        unsafe { self.put_each(puts, deadline_ns, &mut |_| ()) };
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.drive(&mut Operation::Lookup(queries), &mut |_, _| (), deadline_ns);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.drive(&mut Operation::Remove(queries), &mut |_, _| (), deadline_ns);
    }
}
