//! Workloads generated from a seed, identical on every machine.
//!
//! They follow known properties of real workloads (many turns on a growing context, pauses with
//! long tails, tool calls in quick succession, common prompts), but are not fitted to any of them.

mod agent;
mod batch;
mod burst;
mod chat;
mod multitenant;
pub mod rng;
mod sequence;

use crate::base::spec::unknown;
use crate::base::status::Result;
use crate::fail;
use crate::trace::generate::rng::Rng;
use crate::trace::generate::sequence::Sequence;
use crate::trace::requests::{Builder, Request, Trace};

/// Longest workload: 90 days.
pub const MAX_DURATION_NS: i64 = 90 * 86_400 * SECOND;
/// Most sessions (jobs, for batch work) of one workload.
pub const MAX_SESSIONS: f64 = 16_000_000.0;

const SECOND: i64 = 1_000_000_000;
/// Time per output token.
const OUTPUT_TOKEN_NS: i64 = 20_000_000;

/// Kinds of workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Chat: turns on a growing context, pauses of seconds to hours.
    Chat,
    /// Coding agents: long common prompts, tool loops, sub-agents.
    Agent,
    /// Jobs of many items with one common prompt.
    Batch,
    /// Tenants of very different load and class, one of them scanning.
    Multitenant,
    /// Quiet times, and bursts in which all sessions ask about the same text.
    Burst,
}

/// Every kind with its name and its default rate of sessions per second.
pub const KINDS: [(&str, Kind, f64); 5] = [
    ("chat", Kind::Chat, 0.5),
    ("agent", Kind::Agent, 0.02),
    ("batch", Kind::Batch, 0.005),
    ("multitenant", Kind::Multitenant, 0.5),
    ("burst", Kind::Burst, 0.2),
];

/// Options of a generated workload.
#[derive(Clone, Copy, Debug)]
pub struct GenOpts {
    /// The kind.
    pub kind: Kind,
    /// Duration of the workload.
    pub duration_ns: i64,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Sessions started per second; 0 = the default of the kind.
    pub rate: f64,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// The kind of a name.
pub fn kind_of(name: &str) -> Result<Kind> {
    match KINDS.iter().find(|(known, ..)| *known == name) {
        Some((_, kind, _)) => Ok(*kind),
        None => Err(unknown("workload", name, 0, &KINDS.map(|(name, ..)| name))),
    }
}

/// Generates a workload.
pub fn make(opts: &GenOpts) -> Result<Trace> {
    if opts.duration_ns <= 0 || opts.duration_ns > MAX_DURATION_NS {
        let (ns, days) = (opts.duration_ns, MAX_DURATION_NS / (86_400 * SECOND));
        fail!(Limit, "a duration of {ns} ns, allowed is 1 ns to {days} days");
    }
    let usual = KINDS.iter().find(|(_, kind, _)| *kind == opts.kind).map_or(1.0, |k| k.2);
    let rate = if opts.rate == 0.0 { usual } else { opts.rate };
    let sessions = rate * (opts.duration_ns as f64 / SECOND as f64);
    if !(rate > 0.0 && sessions <= MAX_SESSIONS) {
        fail!(
            Limit,
            "{rate} sessions per second are {sessions} in all, the limit is {MAX_SESSIONS}"
        );
    }
    let mut maker = Maker {
        builder: Builder::new(opts.block_tokens)?,
        rng: Rng::new(opts.seed),
        duration_ns: opts.duration_ns,
        gap_ns: ((SECOND as f64 / rate) as i64).max(1),
        next_id: 1,
        next_session: 1,
    };
    match opts.kind {
        Kind::Chat => chat::make(&mut maker)?,
        Kind::Agent => agent::make(&mut maker)?,
        Kind::Batch => batch::make(&mut maker)?,
        Kind::Multitenant => multitenant::make(&mut maker)?,
        Kind::Burst => burst::make(&mut maker)?,
    }
    maker.builder.finish()
}

/// State shared by all kinds.
struct Maker {
    builder: Builder,
    rng: Rng,
    duration_ns: i64,
    /// Mean time between session starts.
    gap_ns: i64,
    next_id: u64,
    next_session: u64,
}

impl Maker {
    /// The id of a new session.
    fn session(&mut self) -> u64 {
        self.next_session += 1;
        self.next_session - 1
    }

    /// A new context of this many tokens.
    fn fresh(&mut self, tokens: u64) -> Sequence {
        let mut sequence = Sequence::new(self.builder.block_tokens());
        sequence.grow(tokens, &mut self.next_id);
        sequence
    }

    /// Common contexts that others begin with.
    fn prompts(&mut self, count: u64, median: u64, most: u64) -> Vec<Sequence> {
        let mut rng = self.rng.part(!self.next_id);
        (0..count).map(|_| self.fresh(rng.size(median, 0.6, most))).collect()
    }

    /// Extends a context.
    fn grow(&mut self, sequence: &mut Sequence, tokens: u64) {
        sequence.grow(tokens, &mut self.next_id);
    }

    /// Adds a request for a context; ignored after the end of the workload.
    fn request(&mut self, request: Request, sequence: &Sequence) -> Result<()> {
        if request.at_ns > self.duration_ns {
            return Ok(());
        }
        let input_tokens = sequence.tokens() as u32;
        self.builder.push(Request { input_tokens, ..request }, &sequence.path())
    }
}
