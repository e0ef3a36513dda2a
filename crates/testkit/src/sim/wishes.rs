//! What some callers do beside: they have moves wait for their word, drop parts of
//! sessions or send them down, clear namespaces. What was cleared for good must not be there again after
//! any crash, unless the disk lies.

use std::collections::BTreeMap;

use crate::sim::world::{Asked, Outcome, SPACES, World, wrong};
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::key::Key;

/// Full chunks: the tokens up to the end of each, by namespace and mark.
type Ends = BTreeMap<(u32, u64), Vec<u32>>;

/// What is known of all that.
pub(super) struct Wishes {
    random: Random,
    /// Of moves that wait.
    tickets: Vec<u64>,
    /// What was ever put.
    put: Ends,
    /// What of it is gone, once a turn has come.
    going: Vec<(u64, Ends)>,
    /// What is gone for good.
    gone: Ends,
}

impl Wishes {
    /// Those of a seed: one in four has some. All others do as they would without.
    pub(super) fn of(seed: u64) -> Option<Wishes> {
        let random = Random::new(seed ^ 0x5EED);
        (seed % 4 == 3).then(|| Wishes {
            random,
            tickets: Vec::new(),
            put: Ends::new(),
            going: Vec::new(),
            gone: Ends::new(),
        })
    }
}

impl World {
    /// One of these things happens, or none.
    pub(super) fn wish(&mut self) -> Outcome<()> {
        let Some(wishes) = &mut self.wishes else { return Ok(()) };
        let what = wishes.random.below(100);
        match what {
            0..=5 => self.give_word(),
            6..=7 => self.drop_range()?,
            8 => self.clear()?,
            9..=11 => self.demote()?,
            _ => {}
        }
        self.see_what_is_gone();
        Ok(())
    }

    /// Whether the next move is to wait.
    pub(super) fn wants_to_wait(&mut self) -> bool {
        self.wishes.as_mut().is_some_and(|wishes| wishes.random.below(6) == 0)
    }

    pub(super) fn waits(&mut self, ticket: u64) {
        if let Some(wishes) = &mut self.wishes {
            wishes.tickets.push(ticket);
        }
    }

    fn give_word(&mut self) {
        let Some(wishes) = &mut self.wishes else { return };
        let count = wishes.tickets.len() as u64;
        if count == 0 {
            return;
        }
        let ticket = wishes.tickets.swap_remove(wishes.random.below(count) as usize);
        match wishes.random.below(8) {
            0 => self.core.0.lock().give_up_waiting(ticket, Status::Cancelled),
            _ => self.core.0.lock().begin_waiting(ticket),
        }
    }

    /// All that waits may begin.
    pub(super) fn give_all_words(&mut self) {
        let tickets = self.wishes.as_mut().map(|wishes| std::mem::take(&mut wishes.tickets));
        for ticket in tickets.unwrap_or_default() {
            self.core.0.lock().begin_waiting(ticket);
        }
    }

    /// Full chunks are put: they may be there again.
    pub(super) fn note_put(&mut self, asked: &Asked) {
        let Some(wishes) = &mut self.wishes else { return };
        let each = self.layouts[asked.space as usize].chunk_tokens() as usize;
        for end in (asked.first + each..=asked.tokens.len()).step_by(each) {
            let key = (asked.space, asked.marks[end - 1]);
            wishes.put.insert(key, asked.tokens[..end].to_vec());
            wishes.gone.remove(&key);
            wishes.going.iter_mut().for_each(|(_, ends)| drop(ends.remove(&key)));
        }
    }

    /// A part of a session: its number, where the part begins and ends, and which of the
    /// sessions here that is.
    fn part_of_one(&mut self) -> Option<(u32, usize, usize, usize)> {
        let (wishes, count) = (self.wishes.as_mut()?, self.sessions.len() as u64);
        if count == 0 {
            return None;
        }
        let which = wishes.random.below(count) as usize;
        let session = &self.sessions[which];
        let each = self.layouts[session.space as usize].chunk_tokens() as usize;
        let all = session.tokens.len();
        let first = wishes.random.below((all / each + 1) as u64) as usize * each;
        if first >= all {
            return None;
        }
        let end = match wishes.random.coin() {
            true => all,
            false => (first + each).min(all),
        };
        Some((session.number, first, end, which))
    }

    fn drop_range(&mut self) -> Outcome<()> {
        let Some((number, first, end, which)) = self.part_of_one() else { return Ok(()) };
        self.core.0.lock().drop_range(number, first as u64, (end - first) as u64)?;
        let session = &self.sessions[which];
        let (space, marks) = (session.space, &session.marks[first..end]);
        self.lasting.retain(|&(s, mark, _), _| s != space || !marks.contains(&mark));
        Ok(())
    }

    fn demote(&mut self) -> Outcome<()> {
        let Some((number, first, end, _)) = self.part_of_one() else { return Ok(()) };
        self.core.0.lock().demote_range(number, first as u64, (end - first) as u64)?;
        Ok(())
    }

    fn clear(&mut self) -> Outcome<()> {
        let Some(wishes) = &mut self.wishes else { return Ok(()) };
        let space = wishes.random.below(u64::from(SPACES)) as u32;
        if wishes.random.coin() {
            let (old, kept): (Vec<_>, Vec<_>) =
                self.sessions.drain(..).partition(|session| session.space == space);
            self.sessions = kept;
            for session in old {
                self.core.0.lock().close_session(session.number)?;
            }
            self.rest()?;
            if self.files.is_closed() {
                return Ok(());
            }
        }
        let mut core = self.core.0.lock();
        let mut clearing = core.begin_clear(self.spaces[space as usize])?;
        while core.clear_more(&mut clearing, 7) {}
        let turn = core.ask_to_last();
        core.check()?;
        drop(core);
        self.lasting.retain(|&(s, ..), _| s != space);
        let cleared = clearing.cleared;
        let Some(wishes) = &mut self.wishes else { return Ok(()) };
        if cleared.held + cleared.moving > 0 {
            return Ok(());
        }
        let ends = wishes.put.iter().filter(|((s, _), _)| *s == space);
        let ends: Ends = ends.map(|(&key, tokens)| (key, tokens.clone())).collect();
        self.all_are_gone(&ends)?;
        self.report.cleared += cleared.gone;
        if let Some(wishes) = &mut self.wishes {
            wishes.going.push((turn, ends));
        }
        Ok(())
    }

    /// Turns that have come.
    fn see_what_is_gone(&mut self) {
        let Some(wishes) = &mut self.wishes else { return };
        for (turn, ends) in std::mem::take(&mut wishes.going) {
            match self.core.0.lock().lasts(turn) {
                Some(Ok(())) => wishes.gone.extend(ends),
                Some(Err(_)) => {}
                None => wishes.going.push((turn, ends)),
            }
        }
    }

    /// The store was opened again.
    pub(super) fn what_is_gone_stays_away(&mut self) -> Outcome<()> {
        let is_rotten = self.is_rotten;
        let Some(wishes) = &mut self.wishes else { return Ok(()) };
        (wishes.tickets, wishes.going) = (Vec::new(), Vec::new());
        if is_rotten {
            wishes.gone.clear();
        }
        let gone = wishes.gone.clone();
        self.all_are_gone(&gone)
    }

    fn all_are_gone(&self, ends: &Ends) -> Outcome<()> {
        // What others have sent to a remote comes back from there.
        if self.remote_sim.is_some() {
            return Ok(());
        }
        for (&(space, _), tokens) in ends {
            let each = self.layouts[space as usize].chunk_tokens();
            let mut keys = Vec::new();
            Chain::new(Key([space as u8 + 1; 32]), each)?.extend(tokens, &[], &mut keys)?;
            let (mut found, last) = ([0], keys.len() - 1);
            self.core.0.lock().exists(self.spaces[space as usize], &keys[last..], &mut found)?;
            if found != [0] {
                let end = tokens.len();
                return Err(wrong(format!(
                    "the chunk that ends with token {end} of namespace {space} was cleared and is there"
                )));
            }
        }
        Ok(())
    }
}
