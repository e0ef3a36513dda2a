//! The conversations: who speaks next, what is asked of the store, what is computed.

use std::time::{Duration, Instant};

use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::store::handle::Store;
use kvtier::store::state::{Counters, Level, SessionOpts, TransferKind};

use super::model::{Model, SYSTEM_TOKENS, TURN_TOKENS, TURNS};
use super::show::Screen;
use super::tensors::Tensors;
use super::{Damage, Outcome};

/// Between two that come back.
const PAUSE: Duration = Duration::from_millis(100);

/// What came of it.
#[derive(Clone, Default)]
pub struct Tally {
    /// Turns.
    pub turns: u64,
    /// Tokens that conversations came back with.
    pub asked: u64,
    /// Of those, tokens that the store had.
    pub loaded: u64,
    /// Of those, tokens that had to be computed again.
    pub recomputed: u64,
    /// Bytes that were brought back, and compared.
    pub bytes: u64,
    /// How long bringing them back took.
    pub load_time: Duration,
    /// Chunks that came back wrong.
    pub wrong: u64,
    /// How long all of it took.
    pub took: Duration,
    /// What the store counted.
    pub counters: Counters,
    /// After a restart.
    pub damage: Damage,
}

/// What was said, and what follows from it.
#[derive(Default)]
pub(super) struct Conversation {
    turns: u64,
    /// What the KV of each token follows from: all tokens up to it.
    pub(super) marks: Vec<u64>,
    pub(super) tokens: Vec<u32>,
}

/// All conversations.
pub struct Talk<'a> {
    store: &'a Store,
    space: u32,
    model: &'a Model,
    all: Vec<Conversation>,
    random: u64,
    tensors: Tensors,
    /// What happened.
    pub tally: Tally,
    /// Who spoke last.
    pub last: usize,
}

impl<'a> Talk<'a> {
    /// Conversations that have not begun.
    pub fn new(store: &'a Store, space: u32, model: &'a Model, sessions: u32) -> Talk<'a> {
        let most = SYSTEM_TOKENS + TURNS * TURN_TOKENS;
        let begin = |at: u32| {
            let mut one = Conversation::default();
            one.say((0..SYSTEM_TOKENS).map(|i| i as u32));
            let _ = at;
            one
        };
        Talk {
            store,
            space,
            model,
            all: (0..sessions).map(begin).collect(),
            random: 7,
            tensors: Tensors::new(model, most),
            tally: Tally::default(),
            last: 0,
        }
    }

    fn draw(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % end
    }

    /// The tokens of a conversation that speaks next.
    pub fn tokens(&self, at: usize) -> &[u32] {
        &self.all[at].tokens
    }

    /// Somebody speaks: those who spoke lately are likelier to.
    pub fn turn(&mut self, _screen: &Screen) -> Outcome<()> {
        let count = self.all.len() as u64;
        let near = self.draw(3) > 0;
        let from = if near { self.last as u64 } else { self.draw(count) };
        let step = if near { self.draw(4) } else { 0 };
        let open = |at: &usize| self.all[*at].turns < TURNS;
        let order = (0..count).map(|i| ((from + step + i) % count) as usize);
        let Some(at) = order.clone().find(open) else { return Ok(()) };
        self.last = at;
        self.speak(at)
    }

    /// One turn: what is there is loaded, the rest computed, and what is new kept.
    fn speak(&mut self, at: usize) -> Outcome<()> {
        let before = self.all[at].tokens.len() as u64;
        let session = self.open(at)?;
        let loaded = self.load(session, at)?;
        if self.all[at].turns > 0 {
            self.tally.asked += before;
            self.tally.loaded += loaded;
            self.tally.recomputed += before - loaded;
        }
        let turn = self.all[at].turns;
        let words = (0..TURN_TOKENS).map(|i| (at as u64 * 100_000 + turn * 1000 + i + 1000) as u32);
        let words: Vec<u32> = words.collect();
        self.all[at].say(words.iter().copied());
        self.store.with(|core| core.append(session, &words))?;
        self.compute(at, loaded);
        self.keep(session, at)?;
        self.store.with(|core| core.close_session(session))?;
        self.all[at].turns += 1;
        self.tally.turns += 1;
        Ok(())
    }

    /// Conversations come back and are read again for so long, one at a time; the one
    /// that came last stays open until the next does, for those who look.
    pub fn linger(&mut self, time: Duration) -> Outcome<()> {
        let start = Instant::now();
        // What is counted is what came before.
        let tally = self.tally.clone();
        while start.elapsed() < time {
            let at = self.draw(self.all.len() as u64) as usize;
            let session = self.open(at)?;
            let loaded = self.load(session, at)?;
            self.compute(at, loaded);
            // A budget that was made too small meanwhile refuses what it must.
            let _ = self.keep(session, at);
            std::thread::sleep(PAUSE.min(time.saturating_sub(start.elapsed())));
            self.store.with(|core| core.close_session(session))?;
        }
        let wrong = self.tally.wrong;
        self.tally = Tally { wrong, ..tally };
        Ok(())
    }

    fn open(&self, at: usize) -> Outcome<u32> {
        let (space, tokens) = (self.space, &self.all[at].tokens);
        Ok(self.store.with(|core| {
            let session = core.open_session(space, &SessionOpts::default())?;
            core.append(session, tokens).map(|()| session)
        })?)
    }

    /// Brings back what the store has of a conversation, layer by layer; how many
    /// tokens from the start on.
    fn load(&mut self, session: u32, at: usize) -> Outcome<u64> {
        let all = self.all[at].tokens.len() as u64;
        let each = u64::from(self.model.layout.chunk_tokens());
        let full = all / each * each;
        if full == 0 {
            return Ok(0);
        }
        let start = Instant::now();
        let cell_range = self.tensors.cell_range(self.model, full, true);
        let opts = OpOpts::default();
        let ops = self.store.submit(session, TransferKind::Get, Level::Ram, cell_range, &opts)?;
        let mut tokens = full;
        for op in ops {
            op.wait(RELEASED, 0)?;
            tokens = tokens.min(op.value());
            op.remove();
        }
        self.tally.load_time += start.elapsed();
        self.check(at, tokens);
        Ok(tokens)
    }

    /// Compares what came with what it must be.
    fn check(&mut self, at: usize, tokens: u64) {
        let marks = &self.all[at].marks[..tokens as usize];
        self.tally.wrong += self.tensors.wrong(self.model, marks);
        self.tally.bytes += tokens * self.model.all_token_bytes();
    }

    /// The forward pass: the KV of tokens from one on.
    fn compute(&mut self, at: usize, from: u64) {
        self.tensors.compute(self.model, &self.all[at].marks, from as usize);
    }

    /// Keeps all full chunks; those that are there are not stored again.
    fn keep(&mut self, session: u32, at: usize) -> Outcome<()> {
        let each = u64::from(self.model.layout.chunk_tokens());
        let full = self.all[at].tokens.len() as u64 / each * each;
        let cell_range = self.tensors.cell_range(self.model, full, false);
        let opts = OpOpts::default();
        for op in self.store.submit(session, TransferKind::Put, Level::Ram, cell_range, &opts)? {
            op.wait(RELEASED, 0)?;
            if let Some(status) = op.info().status.filter(|&status| status != 0) {
                return Err(format!("a put ended with {status}").into());
            }
            op.remove();
        }
        Ok(())
    }

    /// After a restart: brings back what can be had of all conversations as they were
    /// at their end; how many chunks that was.
    pub fn read_all(&mut self) -> Outcome<u64> {
        let mut chunks = 0;
        for at in 0..self.all.len() {
            for turn in 0..TURNS {
                let words = (0..TURN_TOKENS)
                    .map(|i| (at as u64 * 100_000 + turn * 1000 + i + 1000) as u32)
                    .collect::<Vec<_>>();
                self.all[at].say(words.into_iter());
            }
            let session = self.open(at)?;
            let tokens = self.load(session, at)?;
            chunks += tokens / u64::from(self.model.layout.chunk_tokens());
            self.store.with(|core| core.close_session(session))?;
        }
        Ok(chunks)
    }
}

impl Conversation {
    /// Goes on.
    pub(super) fn say(&mut self, words: impl Iterator<Item = u32>) {
        for word in words {
            let before = self.marks.last().copied().unwrap_or(1);
            let mark = (before ^ u64::from(word)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            self.marks.push(mark ^ mark >> 32);
            self.tokens.push(word);
        }
    }
}
