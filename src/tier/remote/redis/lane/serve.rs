//! What a lane does with one node in its turn: it connects, feeds it, hears it, and gives up.

use crate::base::sync::Arc;
use crate::tier::remote::Trouble;
use crate::tier::remote::redis::add;
use crate::tier::remote::redis::errors::{self, Said};
use crate::tier::remote::redis::lane::RedisLane;
use crate::tier::remote::redis::resp::Value;
use crate::tier::remote::redis::slots::Slots;
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::redis::wire::{Answer, Expect, Fault, Task};
use crate::tier::remote::redis::work::{Came, Outcome, Work, words};

/// How many commands are said before those are sent: a server begins with the first ones while
/// others are worded.
const FED: usize = 128;
/// How often an item is sent elsewhere.
const MAX_MOVES: u8 = 5;
/// How often a connection to a node is lost in a batch until the rest of it is.
const MAX_FAULTS: u32 = 3;
/// After this an item is sent again that a server could not take at the moment.
const HELD_NS: u64 = 20_000_000;
/// Longest time that a server is told to wait for its replicas.
const MAX_CONFIRM_MS: u64 = 60_000;
/// Servers look at the clock that often while nothing else happens, and a little more.
const CONFIRM_SPARE_MS: u64 = 150;

impl RedisLane {
    /// Does what can be done with a node now; whether anything went on.
    pub(super) fn serve(&mut self, number: usize, work: &mut Work, now: u64) -> bool {
        let node = &self.nodes[number];
        if node.wire.is_none() {
            return node.is_wanted() && self.connect(number, work, now);
        }
        let talked = self.talk(number, work, now);
        let settled = self.settle(number, work, now);
        match talked.and_then(|has_moved| settled.map(|()| has_moved)) {
            Ok(has_moved) => has_moved,
            Err(fault) => {
                self.lose(number, work, fault, now);
                true
            }
        }
    }

    fn connect(&mut self, number: usize, work: &mut Work, now: u64) -> bool {
        let node = &mut self.nodes[number];
        match node.open_from(now, self.batch.deadline_ns) {
            Some(from) if from > now => return false,
            Some(_) => {
                if let Err(fault) = node.connect(now, &self.shared.settings) {
                    self.lose(number, work, fault, now);
                }
            }
            None => {
                // Others may have taken over.
                self.shared.map.doubt();
                let fault = node.why_closed();
                self.abandon(number, work, &fault, now);
            }
        }
        true
    }

    /// Commands out, answers in; whether anything went. Answers are left to be settled.
    fn talk(&mut self, number: usize, work: &Work, now: u64) -> Result<bool, Fault> {
        let shared = self.shared.clone();
        let node = &mut self.nodes[number];
        let is_wanted = node.is_wanted();
        let Some(wire) = &mut node.wire else { return Ok(false) };
        let was_ready = wire.is_ready();
        if !was_ready && now >= wire.by_ns {
            let words = wire.stage().to_string();
            return Err(Fault { trouble: Trouble::Late, words });
        }
        if was_ready && is_wanted {
            if !wire.is_checked {
                wire.check(work, &shared.settings, &mut self.answers, &mut self.pieces)?;
            }
            self.feed(number, work, now);
        }
        let node = &mut self.nodes[number];
        let Some(wire) = &mut node.wire else { return Ok(false) };
        let has_moved =
            wire.exchange(work, &shared.settings, &mut self.answers, &mut self.pieces)?;
        if !was_ready && wire.is_ready() {
            node.connected();
            let tally = &shared.tally;
            add(&tally.connections);
            if std::mem::replace(&mut node.was_connected, true) {
                add(&tally.reconnects);
            }
        }
        Ok(has_moved)
    }

    /// Says as many commands as may be on the way.
    fn feed(&mut self, number: usize, work: &Work, now: u64) {
        let (settings, node) = (&self.shared.settings, &mut self.nodes[number]);
        let Some(wire) = &mut node.wire else { return };
        if node.is_asked_for_slots && !node.has_heard {
            node.has_heard = true;
            words(&mut wire.out, &[b"CLUSTER", b"SLOTS"]);
            wire.expects(Expect::Slots);
        }
        for _ in 0..FED {
            let next = node
                .queue
                .front()
                .filter(|task| work.fits(task.item, (wire.items, wire.bytes), wire.window));
            let Some(task) = next.copied() else { break };
            node.queue.pop_front();
            work.key(task.item, &settings.prefix, &mut self.key);
            if task.is_asking {
                words(&mut wire.out, &[b"ASKING"]);
                wire.expects(Expect::Asking);
            }
            work.say(task.item, &self.key, self.wording, &mut wire.out);
            wire.expects(Expect::Item(task));
            wire.items += 1;
            wire.bytes += work.weight(task.item);
            wire.is_to_confirm = settings.wait > 0 && matches!(work, Work::Put(_));
        }
        if wire.is_to_confirm && node.queue.is_empty() {
            wire.is_to_confirm = false;
            // It answers before the deadline, so that the connection outlives a slow replica.
            let left_ms = self.batch.deadline_ns.saturating_sub(now) / 1_000_000;
            let spare_ms = (left_ms / 8).max(CONFIRM_SPARE_MS).min(left_ms / 2);
            let most_ms = (left_ms - spare_ms).clamp(1, MAX_CONFIRM_MS);
            wire.out.command(3);
            wire.out.word(b"WAIT");
            wire.out.number(u64::from(settings.wait));
            wire.out.number(most_ms);
            wire.expects(Expect::Wait);
        }
    }

    /// Notes what came from a node.
    fn settle(&mut self, number: usize, work: &mut Work, now: u64) -> Result<(), Fault> {
        let mut answers = std::mem::take(&mut self.answers);
        let mut done = Ok(());
        for Answer { to, came } in answers.drain(..) {
            let of_this = match to {
                Expect::Item(task) => self.settle_item(number, work, task, came, now),
                Expect::Slots => {
                    self.settle_slots(number, came);
                    Ok(())
                }
                Expect::Wait => {
                    self.settle_wait(number, work, came);
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
        work: &mut Work,
        task: Task,
        came: Came,
        now: u64,
    ) -> Result<(), Fault> {
        let node = &mut self.nodes[number];
        if let Some(wire) = &mut node.wire {
            wire.items = wire.items.saturating_sub(1);
            wire.bytes = wire.bytes.saturating_sub(work.weight(task.item));
        }
        match work.came(task.item, came) {
            Outcome::Done if task.is_aside && work.is_absent(task.item) => {
                node.did_well();
                self.go_home(work, task, now);
            }
            Outcome::Done => {
                node.did_well();
                match &mut node.wire {
                    Some(wire) if self.shared.settings.wait > 0 && matches!(work, Work::Put(_)) => {
                        wire.unconfirmed.push(task);
                    }
                    _ => self.batch.left = self.batch.left.saturating_sub(1),
                }
            }
            Outcome::Nonsense => {
                self.fail(work, task.item, Trouble::Nonsense);
                let words = "an answer to another question".to_string();
                return Err(Fault { trouble: Trouble::Gone, words });
            }
            Outcome::Error(said) => self.settle_error(number, work, task, said, now),
        }
        Ok(())
    }

    /// Notes that a node gave an error, and does what that asks for.
    fn settle_error(
        &mut self,
        number: usize,
        work: &mut Work,
        task: Task,
        said: Vec<u8>,
        now: u64,
    ) {
        let node = &mut self.nodes[number];
        let shown = errors::shown(&said, self.shared.settings.secret());
        self.words = format!("{}: {shown}", node.address);
        if matches!(work, Work::Remove(_))
            && !self.wording.is_old
            && errors::is_unknown_command(&said)
        {
            self.wording.is_old = true;
            return node.queue.push_back(task);
        }
        match errors::meaning(&said, &node.address) {
            said if task.is_aside => {
                if matches!(said, Said::Moved(_)) {
                    self.shared.map.doubt();
                }
                self.go_home(work, task, now);
            }
            Said::Trouble(trouble) => self.fail(work, task.item, trouble),
            Said::Again => {
                self.shared.map.doubt();
                if task.is_held {
                    self.fail(work, task.item, Trouble::Later);
                } else {
                    add(&self.shared.tally.retries);
                    let from = now.saturating_add(HELD_NS);
                    self.batch.held.push((from, number, Task { is_held: true, ..task }));
                }
            }
            Said::Moved(to) => {
                self.shared.map.doubt();
                self.send_elsewhere(work, to, Task { is_asking: false, ..task });
            }
            Said::Ask(to) => self.send_elsewhere(work, to, Task { is_asking: true, ..task }),
        }
    }

    fn send_elsewhere(&mut self, work: &mut Work, to: Option<Address>, task: Task) {
        if !self.shared.settings.is_cluster || task.moves >= MAX_MOVES {
            return self.fail(work, task.item, Trouble::Later);
        }
        match to.and_then(|to| self.number(&to)) {
            Some(node) => {
                add(&self.shared.tally.redirects);
                let task = Task { moves: task.moves + 1, ..task };
                self.nodes[node].queue.push_back(task);
            }
            None => self.fail(work, task.item, Trouble::Nonsense),
        }
    }

    /// What a node that only follows another one did not give is asked of that other one.
    fn go_home(&mut self, work: &mut Work, task: Task, now: u64) {
        add(&self.shared.tally.retries);
        work.fail(task.item, Trouble::Later);
        self.route(work, Task { is_aside: false, ..task }, now);
    }

    fn settle_slots(&mut self, number: usize, came: Came) {
        let node = &mut self.nodes[number];
        (node.is_asked_for_slots, node.has_heard) = (false, false);
        let Came::Value(value) = came else { return };
        if let Some(slots) = Slots::read(&value, &node.address) {
            let slots = Arc::new(slots);
            add(&self.shared.tally.refreshes);
            self.shared.map.put(slots.clone());
            return self.adopt(slots);
        }
        let (trouble, words) = match &value {
            Value::Error(said) => {
                let trouble = match errors::meaning(said, &node.address) {
                    Said::Trouble(trouble) => trouble,
                    _ => Trouble::Later,
                };
                (trouble, errors::shown(said, self.shared.settings.secret()))
            }
            Value::List(none) if none.is_empty() => {
                (Trouble::Later, "no node has any slot".to_string())
            }
            _ => (Trouble::Nonsense, "what it says of slots means nothing".to_string()),
        };
        self.words = format!("{}: {words}", node.address);
        self.batch.trouble = Some(trouble);
    }

    fn settle_wait(&mut self, number: usize, work: &mut Work, came: Came) {
        let node = &mut self.nodes[number];
        let tasks = node.wire.as_mut().map(|wire| std::mem::take(&mut wire.unconfirmed));
        let wait = i64::from(self.shared.settings.wait);
        let is_enough = matches!(came, Came::Value(Value::Number(count)) if count >= wait);
        for task in tasks.unwrap_or_default() {
            if is_enough {
                self.batch.left = self.batch.left.saturating_sub(1);
            } else {
                self.words = format!("{}: too few replicas have it", self.nodes[number].address);
                self.fail(work, task.item, Trouble::Later);
            }
        }
    }

    /// A connection is of no use any more.
    fn lose(&mut self, number: usize, work: &mut Work, fault: Fault, now: u64) {
        let node = &mut self.nodes[number];
        let wire = node.wire.take();
        let was_ready = wire.as_ref().is_some_and(|wire| wire.is_ready());
        let was_old = wire.as_ref().is_some_and(|wire| wire.is_old);
        let has_other = wire.as_ref().is_none_or(|wire| wire.is_connecting()) && node.has_other();
        node.has_heard = false;
        node.faults += 1;
        let is_gone = fault.trouble == Trouble::Gone;
        if has_other && is_gone {
            // The next address of the same name is tried.
            node.faults -= 1;
            return;
        }
        // A server that was started again, or tires of connections nobody uses, has ended it
        // long ago: nothing was heard by anybody, or it does no harm to say it again.
        let is_stale = was_old && is_gone;
        let mut first = true;
        let unanswered = wire.map(|mut wire| wire.drain()).unwrap_or_default();
        if !is_stale {
            self.words = format!("{}: {}", node.address, fault.words);
            match self.shared.settings.is_cluster && fault.trouble == Trouble::Late {
                true => node.late(now),
                false => node.failed(now),
            }
            node.keep(&fault);
            self.shared.map.doubt();
        }
        for task in unanswered.into_iter().rev() {
            if is_stale && !task.is_repeated {
                add(&self.shared.tally.retries);
                let again = Task { is_repeated: true, ..task };
                self.nodes[number].queue.push_front(again);
                continue;
            }
            if task.is_aside {
                self.go_home(work, task, now);
                continue;
            }
            self.fail(work, task.item, if first { fault.trouble } else { Trouble::Gone });
            first = false;
        }
        let node = &mut self.nodes[number];
        if !is_stale && (!was_ready || node.faults >= MAX_FAULTS) {
            self.abandon(number, work, &fault, now);
        }
    }

    /// Nobody will do what a node has to do.
    fn abandon(&mut self, number: usize, work: &mut Work, fault: &Fault, now: u64) {
        let node = &mut self.nodes[number];
        if node.is_asked_for_slots {
            (node.is_asked_for_slots, node.has_heard) = (false, false);
            self.batch.trouble = Some(fault.trouble);
        }
        if self.words.is_empty() {
            self.words = format!("{}: {}", node.address, fault.words);
        }
        for task in std::mem::take(&mut self.nodes[number].queue) {
            match task.is_aside {
                true => self.go_home(work, task, now),
                false => self.fail(work, task.item, fault.trouble),
            }
        }
    }
}
