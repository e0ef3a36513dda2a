//! Further requests of some callers: transfers that wait for the caller, dropped and demoted
//! ranges, cleared namespaces. Chunks that were cleared durably must not return after a crash,
//! unless the disk lies.

use std::collections::BTreeMap;

use crate::sim::world::{Outcome, SPACES, Submitted, World, wrong};
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::key::Key;

/// Full chunks by namespace and hash: the tokens up to their ends.
type Ends = BTreeMap<(u32, u64), Vec<u32>>;

/// State of further requests.
pub(super) struct ExtraRequests {
    random: Random,
    /// Tickets of waiting transfers.
    tickets: Vec<u64>,
    /// Chunks that were ever put.
    put: Ends,
    /// Chunks whose removal becomes durable with a numbered sync.
    clearing: Vec<(u64, Ends)>,
    /// Chunks that are cleared durably.
    cleared: Ends,
}

impl ExtraRequests {
    /// For a seed: one in four. The other seeds run as without.
    pub(super) fn of(seed: u64) -> Option<ExtraRequests> {
        let random = Random::new(seed ^ 0x5EED);
        (seed % 4 == 3).then(|| ExtraRequests {
            random,
            tickets: Vec::new(),
            put: Ends::new(),
            clearing: Vec::new(),
            cleared: Ends::new(),
        })
    }
}

impl World {
    /// One random step.
    pub(super) fn extra_request(&mut self) -> Outcome<()> {
        let Some(extra_requests) = &mut self.extra_requests else { return Ok(()) };
        let choice = extra_requests.random.below(100);
        match choice {
            0..=5 => self.begin_some_waiting(),
            6..=7 => self.drop_range()?,
            8 => self.clear()?,
            9..=11 => self.demote()?,
            _ => {}
        }
        self.note_cleared();
        Ok(())
    }

    /// Whether the next transfer waits for the caller.
    pub(super) fn waits_for_caller(&mut self) -> bool {
        self.extra_requests
            .as_mut()
            .is_some_and(|extra_requests| extra_requests.random.below(6) == 0)
    }

    pub(super) fn waits(&mut self, ticket: u64) {
        if let Some(extra_requests) = &mut self.extra_requests {
            extra_requests.tickets.push(ticket);
        }
    }

    fn begin_some_waiting(&mut self) {
        let Some(extra_requests) = &mut self.extra_requests else { return };
        let count = extra_requests.tickets.len() as u64;
        if count == 0 {
            return;
        }
        let ticket =
            extra_requests.tickets.swap_remove(extra_requests.random.below(count) as usize);
        match extra_requests.random.below(8) {
            0 => self.core.0.lock().give_up_waiting(ticket, Status::Cancelled),
            _ => self.core.0.lock().begin_waiting(ticket),
        }
    }

    /// Begins all waiting transfers.
    pub(super) fn begin_all_waiting(&mut self) {
        let tickets = self
            .extra_requests
            .as_mut()
            .map(|extra_requests| std::mem::take(&mut extra_requests.tickets));
        for ticket in tickets.unwrap_or_default() {
            self.core.0.lock().begin_waiting(ticket);
        }
    }

    /// Records put chunks: they may exist again.
    pub(super) fn note_put(&mut self, submitted: &Submitted) {
        let Some(extra_requests) = &mut self.extra_requests else { return };
        let each = self.layouts[submitted.namespace as usize].chunk_tokens() as usize;
        for end in (submitted.first + each..=submitted.tokens.len()).step_by(each) {
            let key = (submitted.namespace, submitted.marks[end - 1]);
            extra_requests.put.insert(key, submitted.tokens[..end].to_vec());
            extra_requests.cleared.remove(&key);
            extra_requests.clearing.iter_mut().for_each(|(_, ends)| drop(ends.remove(&key)));
        }
    }

    /// A range of a session: its number, start and end, and its index here.
    fn session_range(&mut self) -> Option<(u32, usize, usize, usize)> {
        let (extra_requests, count) = (self.extra_requests.as_mut()?, self.sessions.len() as u64);
        if count == 0 {
            return None;
        }
        let which = extra_requests.random.below(count) as usize;
        let session = &self.sessions[which];
        let each = self.layouts[session.namespace as usize].chunk_tokens() as usize;
        let all = session.tokens.len();
        let first = extra_requests.random.below((all / each + 1) as u64) as usize * each;
        if first >= all {
            return None;
        }
        let end = match extra_requests.random.coin() {
            true => all,
            false => (first + each).min(all),
        };
        Some((session.number, first, end, which))
    }

    fn drop_range(&mut self) -> Outcome<()> {
        let Some((number, first, end, which)) = self.session_range() else { return Ok(()) };
        self.core.0.lock().drop_range(number, first as u64, (end - first) as u64)?;
        let session = &self.sessions[which];
        let (namespace, marks) = (session.namespace, &session.marks[first..end]);
        self.durable_cells.retain(|&(s, mark, _), _| s != namespace || !marks.contains(&mark));
        Ok(())
    }

    fn demote(&mut self) -> Outcome<()> {
        let Some((number, first, end, _)) = self.session_range() else { return Ok(()) };
        self.core.0.lock().demote_range(number, first as u64, (end - first) as u64)?;
        Ok(())
    }

    fn clear(&mut self) -> Outcome<()> {
        let Some(extra_requests) = &mut self.extra_requests else { return Ok(()) };
        let namespace = extra_requests.random.below(u64::from(SPACES)) as u32;
        if extra_requests.random.coin() {
            let (old, recent): (Vec<_>, Vec<_>) =
                self.sessions.drain(..).partition(|session| session.namespace == namespace);
            self.sessions = recent;
            for session in old {
                self.core.0.lock().close_session(session.number)?;
            }
            self.drain()?;
            if self.files.is_closed() {
                return Ok(());
            }
        }
        let mut core = self.core.0.lock();
        let mut clearing = core.begin_clear(self.namespaces[namespace as usize])?;
        while core.clear_more(&mut clearing, 7) {}
        let turn = core.request_durability();
        core.check()?;
        drop(core);
        self.durable_cells.retain(|&(s, ..), _| s != namespace);
        let cleared = clearing.cleared;
        let Some(extra_requests) = &mut self.extra_requests else { return Ok(()) };
        if cleared.held + cleared.moving > 0 {
            return Ok(());
        }
        let ends = extra_requests.put.iter().filter(|((s, _), _)| *s == namespace);
        let ends: Ends = ends.map(|(&key, tokens)| (key, tokens.clone())).collect();
        self.check_absent(&ends)?;
        self.report.cleared += cleared.removed;
        if let Some(extra_requests) = &mut self.extra_requests {
            extra_requests.clearing.push((turn, ends));
        }
        Ok(())
    }

    /// Handles syncs that have completed.
    fn note_cleared(&mut self) {
        let Some(extra_requests) = &mut self.extra_requests else { return };
        for (turn, ends) in std::mem::take(&mut extra_requests.clearing) {
            match self.core.0.lock().durability(turn) {
                Some(Ok(())) => extra_requests.cleared.extend(ends),
                Some(Err(_)) => {}
                None => extra_requests.clearing.push((turn, ends)),
            }
        }
    }

    /// After a restart: cleared chunks must be absent.
    pub(super) fn check_cleared(&mut self) -> Outcome<()> {
        let is_rotten = self.is_rotten;
        let Some(extra_requests) = &mut self.extra_requests else { return Ok(()) };
        (extra_requests.tickets, extra_requests.clearing) = (Vec::new(), Vec::new());
        if is_rotten {
            extra_requests.cleared.clear();
        }
        let ends = extra_requests.cleared.clone();
        self.check_absent(&ends)
    }

    fn check_absent(&self, ends: &Ends) -> Outcome<()> {
        // Chunks that others uploaded return from the remote.
        if self.remote_sim.is_some() {
            return Ok(());
        }
        for (&(namespace, _), tokens) in ends {
            let each = self.layouts[namespace as usize].chunk_tokens();
            let mut keys = Vec::new();
            Chain::new(Key([namespace as u8 + 1; 32]), each)?.extend(tokens, &[], &mut keys)?;
            let (mut found, last) = ([0], keys.len() - 1);
            self.core.0.lock().exists(
                self.namespaces[namespace as usize],
                &keys[last..],
                &mut found,
            )?;
            if found != [0] {
                let end = tokens.len();
                return Err(wrong(format!(
                    "the chunk that ends with token {end} of namespace {namespace} was cleared but exists"
                )));
            }
        }
        Ok(())
    }
}
