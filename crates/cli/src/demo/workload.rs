//! The conversations: the order of turns, the transfers of each turn, and the computed KV.

use std::time::{Duration, Instant};

use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::store::handle::Store;
use kvtier::store::state::{Level, SessionOpts, StoreStats, TransferKind};

use super::model::{Model, SYSTEM_TOKENS, TURN_TOKENS, TURNS};

use super::tensors::Tensors;
use super::{Damage, Outcome};

/// Pause between loads of `linger`.
const PAUSE: Duration = Duration::from_millis(100);

/// The totals of a run.
#[derive(Clone, Default)]
pub struct Totals {
    /// Turns.
    pub turns: u64,
    /// Tokens of history in all turns but first ones.
    pub requested: u64,
    /// Tokens among those that the store had.
    pub loaded: u64,
    /// Tokens among those that were computed again.
    pub recomputed: u64,
    /// Bytes loaded and compared.
    pub bytes: u64,
    /// Time of all loads.
    pub load_time: Duration,
    /// Chunks loaded with wrong bytes.
    pub wrong: u64,
    /// Time of the run.
    pub took: Duration,
    /// The counters of the store.
    pub counters: StoreStats,
    /// The result of the restart.
    pub damage: Damage,
}

/// The tokens of a conversation.
#[derive(Default)]
pub(super) struct Conversation {
    turns: u64,
    /// A hash of each prefix, which determines the KV of its last token.
    pub(super) marks: Vec<u64>,
    pub(super) tokens: Vec<u32>,
}

/// All conversations.
pub struct Workload<'a> {
    store: &'a Store,
    namespace: u32,
    model: &'a Model,
    all: Vec<Conversation>,
    random: u64,
    tensors: Tensors,
    /// The totals so far.
    pub totals: Totals,
    /// The conversation of the last turn.
    pub last: usize,
}

impl<'a> Workload<'a> {
    /// Conversations without a turn.
    pub fn new(store: &'a Store, namespace: u32, model: &'a Model, sessions: u32) -> Workload<'a> {
        let most = SYSTEM_TOKENS + TURNS * TURN_TOKENS;
        let begin = |_| {
            let mut one = Conversation::default();
            one.append((0..SYSTEM_TOKENS).map(|i| i as u32));
            one
        };
        Workload {
            store,
            namespace,
            model,
            all: (0..sessions).map(begin).collect(),
            random: 7,
            tensors: Tensors::new(model, most),
            totals: Totals::default(),
            last: 0,
        }
    }

    fn draw(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % end
    }

    /// The tokens of a conversation.
    pub fn tokens(&self, at: usize) -> &[u32] {
        &self.all[at].tokens
    }

    /// Runs a turn of a random conversation; recent ones are more likely.
    pub fn turn(&mut self) -> Outcome<()> {
        let count = self.all.len() as u64;
        let recent = self.draw(3) > 0;
        let from = if recent { self.last as u64 } else { self.draw(count) };
        let step = if recent { self.draw(4) } else { 0 };
        let open = |at: &usize| self.all[*at].turns < TURNS;
        let order = (0..count).map(|i| ((from + step + i) % count) as usize);
        let Some(at) = order.clone().find(open) else { return Ok(()) };
        self.last = at;
        self.take_turn(at)
    }

    /// Runs a turn: loads what the store has, computes the rest, and puts new chunks.
    fn take_turn(&mut self, at: usize) -> Outcome<()> {
        let before = self.all[at].tokens.len() as u64;
        let session = self.open(at)?;
        let loaded = self.load(session, at)?;
        if self.all[at].turns > 0 {
            self.totals.requested += before;
            self.totals.loaded += loaded;
            self.totals.recomputed += before - loaded;
        }
        let turn = self.all[at].turns;
        let words = (0..TURN_TOKENS).map(|i| (at as u64 * 100_000 + turn * 1000 + i + 1000) as u32);
        let words: Vec<u32> = words.collect();
        self.all[at].append(words.iter().copied());
        self.store.with(|core| core.append(session, &words))?;
        self.compute(at, loaded);
        self.put_full_chunks(session, at)?;
        self.store.with(|core| core.close_session(session))?;
        self.all[at].turns += 1;
        self.totals.turns += 1;
        Ok(())
    }

    /// Loads random conversations for `time`, one at a time. Each session stays open until the
    /// next load, so that tools can show it.
    pub fn linger(&mut self, time: Duration) -> Outcome<()> {
        let start = Instant::now();
        // The totals of the run itself are restored below.
        let totals = self.totals.clone();
        while start.elapsed() < time {
            let at = self.draw(self.all.len() as u64) as usize;
            let session = self.open(at)?;
            let loaded = self.load(session, at)?;
            self.compute(at, loaded);
            // A budget that was lowered meanwhile may refuse the put.
            let _ = self.put_full_chunks(session, at);
            std::thread::sleep(PAUSE.min(time.saturating_sub(start.elapsed())));
            self.store.with(|core| core.close_session(session))?;
        }
        let wrong = self.totals.wrong;
        self.totals = Totals { wrong, ..totals };
        Ok(())
    }

    fn open(&self, at: usize) -> Outcome<u32> {
        let (namespace, tokens) = (self.namespace, &self.all[at].tokens);
        Ok(self.store.with(|core| {
            let session = core.open_session(namespace, &SessionOpts::default())?;
            core.append(session, tokens).map(|()| session)
        })?)
    }

    /// Loads what the store has of a conversation, layer by layer; returns the number of tokens
    /// from the start.
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
        self.totals.load_time += start.elapsed();
        self.check(at, tokens);
        Ok(tokens)
    }

    /// Compares loaded KV with the model's.
    fn check(&mut self, at: usize, tokens: u64) {
        let marks = &self.all[at].marks[..tokens as usize];
        self.totals.wrong += self.tensors.wrong(self.model, marks);
        self.totals.bytes += tokens * self.model.all_token_bytes();
    }

    /// The forward pass: computes the KV of the tokens from index `from`.
    fn compute(&mut self, at: usize, from: u64) {
        self.tensors.compute(self.model, &self.all[at].marks, from as usize);
    }

    /// Puts all full chunks; the store skips those that it has.
    fn put_full_chunks(&mut self, session: u32, at: usize) -> Outcome<()> {
        let each = u64::from(self.model.layout.chunk_tokens());
        let full = self.all[at].tokens.len() as u64 / each * each;
        let cell_range = self.tensors.cell_range(self.model, full, false);
        let opts = OpOpts::default();
        for op in self.store.submit(session, TransferKind::Put, Level::Ram, cell_range, &opts)? {
            op.wait(RELEASED, 0)?;
            if let Some(status) = op.info().status.filter(|&status| status != 0) {
                return Err(format!("a put ended with status {status}").into());
            }
            op.remove();
        }
        Ok(())
    }

    /// After a restart: loads what the store has of all whole conversations; returns the number
    /// of chunks.
    pub fn read_all(&mut self) -> Outcome<u64> {
        let mut chunks = 0;
        for at in 0..self.all.len() {
            for turn in 0..TURNS {
                let words = (0..TURN_TOKENS)
                    .map(|i| (at as u64 * 100_000 + turn * 1000 + i + 1000) as u32)
                    .collect::<Vec<_>>();
                self.all[at].append(words.into_iter());
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
    /// Appends tokens.
    pub(super) fn append(&mut self, words: impl Iterator<Item = u32>) {
        for word in words {
            let before = self.marks.last().copied().unwrap_or(1);
            let mark = (before ^ u64::from(word)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            self.marks.push(mark ^ mark >> 32);
            self.tokens.push(word);
        }
    }
}
