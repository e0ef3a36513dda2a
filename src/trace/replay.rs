//! Replay of a trace on one policy, with the evictor of production, driven as by an engine.
//!
//! For a request, the replay looks up the path, references the hits, evicts what the misses need,
//! inserts the misses and releases the references. A path longer than the capacity is inserted as
//! far as it fits.
//!
//! In a replay by layers the path consists of cells: all layers of a block, then those of the next
//! block. Without holes a path is evicted from its end, so the late layers of the last block are
//! evicted first. A block is a hit if all of its cells are resident.

use crate::base::clock::Clock;
use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;
use crate::meta::index;
use crate::meta::objects::Facts;
use crate::meta::sessions::Stop;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, MAX_BATCH, MAX_OBJECTS, NewObject, Options, RequestContext};
use crate::policy::{Hint, custom};
use crate::trace::report::{Point, Report, Shares};
use crate::trace::requests::{Request, Trace};
use crate::trace::study::{self, NEVER, Study, zeros};

/// Most layers of a replay by cells.
pub const MAX_LAYERS: u32 = 1024;
/// Most points of a timeline.
pub const MAX_POINTS: usize = 10_000;
/// Tenants counted separately in the fairness; those beyond share the last row.
const MAX_TENANTS: usize = 1 << 16;
/// The policy's time of the first request; 0 would mean the machine's clock.
const START_NS: i64 = 1_000_000_000;
/// Requests between two calls of `watch`.
const WATCH_EVERY: usize = 256;

/// Hints given to the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hints {
    /// Nothing.
    None,
    /// The stop reason of each request, where the trace has it: an engine knows it.
    #[default]
    Stop,
    /// Also the time of the session's next request, as if clients announced it.
    Think,
}

/// Options of a replay.
#[derive(Clone, Copy, Debug)]
pub struct ReplayOpts {
    /// The engine can use KV behind a hole.
    pub holes: bool,
    /// Objects are cells of this many layers; 1 = whole blocks.
    pub layers: u32,
    /// Hints given to the policy.
    pub hints: Hints,
    /// Model of the recompute cost.
    pub cost: Cost,
    /// Requests replayed before counting starts.
    pub warm_up: usize,
    /// Points of the timeline.
    pub points: usize,
    /// Measure every decision; costs two clock reads.
    pub timed: bool,
}

impl Default for ReplayOpts {
    fn default() -> ReplayOpts {
        let cost = Cost::default();
        ReplayOpts {
            holes: false,
            layers: 1,
            hints: Hints::Stop,
            cost,
            warm_up: 0,
            points: 60,
            timed: true,
        }
    }
}

/// The result of one request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Blocks found and usable.
    pub hits: usize,
    /// Tokens in these blocks.
    pub hit_tokens: u64,
    /// Recompute cost of these blocks.
    pub hit_cost: f64,
    /// Objects inserted.
    pub inserted: usize,
    /// Objects evicted.
    pub evicted: usize,
}

/// A replay in progress.
pub struct Replay<'a> {
    trace: &'a Trace,
    study: &'a Study,
    opts: ReplayOpts,
    capacity: usize,
    evictor: Evictor,
    clock: Clock,
    /// For `belady`: the next request of every reference.
    next: Vec<u32>,
    now: i64,
    at: usize,
    ids: Vec<u64>,
    found: Vec<u8>,
    held: Vec<u64>,
    new: Vec<NewObject>,
    victims: Vec<Victim>,
    sessions: Shares,
    tenants: Shares,
    /// Whether any session has more than one request.
    has_sessions: bool,
    used: (f64, u64),
    window: Point,
    report: Report,
}

/// Replays the whole trace. `watch` is called regularly with the number of finished requests; the
/// replay stops if it returns false.
pub fn run(
    trace: &Trace,
    study: &Study,
    spec: &str,
    capacity_blocks: u64,
    opts: &ReplayOpts,
    watch: &mut dyn FnMut(usize) -> bool,
) -> Result<Report> {
    let mut replay = Replay::open(trace, study, spec, capacity_blocks, opts)?;
    let clock = Clock::real();
    let start = clock.now_ns();
    while replay.step()?.is_some() {
        if replay.at % WATCH_EVERY == 0 && !watch(replay.at) {
            fail!(Cancelled, "stopped after {} requests", replay.at);
        }
    }
    watch(replay.at);
    let mut report = replay.finish();
    report.run_ns = clock.now_ns().saturating_sub(start);
    Ok(report)
}

impl<'a> Replay<'a> {
    /// Prepares a replay from the first request on.
    pub fn open(
        trace: &'a Trace,
        study: &'a Study,
        spec: &str,
        capacity_blocks: u64,
        opts: &ReplayOpts,
    ) -> Result<Replay<'a>> {
        let mut replay = Replay::open_shared(trace, study, spec, capacity_blocks, opts)?;
        let tenants = trace.requests().iter().map(|r| r.tenant as usize + 1).max().unwrap_or(0);
        replay.sessions = Shares::of(zeros(study.session_count)?);
        replay.tenants = Shares::of(zeros(tenants.min(MAX_TENANTS))?);
        Ok(replay)
    }

    /// As `open`, for one of many replays of a trace: fairness is not computed, so that the memory
    /// of each depends on its capacity only.
    pub fn open_shared(
        trace: &'a Trace,
        study: &'a Study,
        spec: &str,
        capacity_blocks: u64,
        opts: &ReplayOpts,
    ) -> Result<Replay<'a>> {
        if opts.layers == 0 || opts.layers > MAX_LAYERS || opts.points > MAX_POINTS {
            fail!(
                Limit,
                "{} layers and {} points; allowed are 1 to {MAX_LAYERS} and up to {MAX_POINTS}",
                opts.layers,
                opts.points
            );
        }
        let capacity = capacity_blocks.saturating_mul(u64::from(opts.layers));
        if capacity == 0 || capacity > MAX_OBJECTS as u64 {
            fail!(Limit, "a capacity of {capacity} objects, allowed is 1 to {MAX_OBJECTS}");
        }
        let parsed = Spec::parse(spec)?;
        custom::refuse(&parsed, "a replay")?;
        let optimal = parsed.name == "belady";
        let most = trace.requests().iter().map(Request::len).max().unwrap_or(0);
        // The optimal policy sees all new objects before it chooses, so that it can evict these as
        // well.
        let extra = if optimal { most * opts.layers as usize } else { 0 };
        let options = Options {
            max_objects: (capacity as usize + extra).min(MAX_OBJECTS),
            capacity_units: capacity,
            holes: opts.holes,
            log_entries: 0,
            // Recomputed objects follow from the study.
            remember: 0,
            cost: opts.cost,
        };
        let evictor = Evictor::open(spec, &options)?;
        let report =
            Report { spec: evictor.spec().to_string(), capacity_blocks, ..Report::default() };
        Ok(Replay {
            trace,
            study,
            opts: *opts,
            capacity: capacity as usize,
            evictor,
            clock: Clock::real(),
            next: if optimal { study::next_uses(trace)? } else { Vec::new() },
            now: START_NS,
            at: 0,
            ids: Vec::new(),
            found: Vec::new(),
            held: Vec::new(),
            new: Vec::new(),
            victims: Vec::new(),
            sessions: Shares::of(Vec::new()),
            tenants: Shares::of(Vec::new()),
            has_sessions: study.session_count < trace.requests().len(),
            used: (0.0, 0),
            window: Point::default(),
            report,
        })
    }

    /// The policy and its table.
    pub fn evictor(&self) -> &Evictor {
        &self.evictor
    }

    /// Number of finished requests.
    pub fn done(&self) -> usize {
        self.at
    }

    /// The last time passed to the policy.
    pub fn now(&self) -> i64 {
        self.now
    }

    /// Reports the next victims, without evicting them.
    pub fn preview(&mut self, required: u64) -> Result<Vec<Victim>> {
        let mut out = Vec::new();
        self.evictor.preview(self.now, required, &mut out)?;
        Ok(out)
    }

    /// Serves request `at`; requests before it that were not served belong to other replays.
    pub fn serve(&mut self, at: usize) -> Result<Option<Step>> {
        self.at = at.max(self.at);
        self.step()
    }

    /// The objects that the last step inserted and evicted.
    pub fn moved(&self) -> (&[NewObject], &[Victim]) {
        (&self.new, &self.victims)
    }

    /// Serves the next request; None at the end of the trace.
    pub fn step(&mut self) -> Result<Option<Step>> {
        let trace = self.trace;
        self.new.clear();
        self.victims.clear();
        let Some(&request) = trace.requests().get(self.at) else { return Ok(None) };
        let first = trace.requests()[0].at_ns;
        self.now = (request.at_ns - first).saturating_add(START_NS).max(self.now + 1);
        let request_context = RequestContext {
            session: self.has_sessions.then(|| u64::from(self.study.sessions[self.at])),
            tenant: request.tenant,
            priority: Some(request.priority),
            length: request.input_tokens,
            max_length: 0,
            tokens_each: self.trace.block_tokens()
                / self.opts.layers.min(self.trace.block_tokens()),
        };
        let mut step = self.look_up(&request, &request_context)?;
        match self.next.is_empty() {
            true => self.store(&request, &request_context, &mut step)?,
            false => self.store_optimally(&request, &request_context, &mut step)?,
        }
        self.hint(&request, &request_context)?;
        self.count(&request, &step);
        self.at += 1;
        Ok(Some(step))
    }

    fn look_up(&mut self, request: &Request, request_context: &RequestContext) -> Result<Step> {
        let path = self.trace.blocks(request);
        let layers = self.opts.layers;
        let cells = path.len().saturating_mul(layers as usize);
        if cells > MAX_BATCH {
            fail!(Limit, "a path of {} blocks in {layers} layers is too long", path.len());
        }
        let mut ids = std::mem::take(&mut self.ids);
        ids.clear();
        if ids.try_reserve(cells).is_err() {
            fail!(NoMem, "no memory for a path of {cells} cells");
        }
        if layers == 1 {
            ids.extend_from_slice(path);
        } else {
            ids.extend(path.iter().flat_map(|&b| (0..layers).map(move |layer| cell(b, layer))));
        }
        let layers = layers as usize;
        self.found.clear();
        self.found.resize(ids.len(), 0);
        let leading = self.evictor.lookup(self.now, request_context, &ids, &mut self.found)?;
        self.ids = ids;
        let each = self.trace.block_tokens();
        let mut step = Step::default();
        if !self.opts.holes {
            step.hits = leading / layers;
            step.hit_tokens = request.tokens_of(step.hits, each);
            step.hit_cost = self.opts.cost.of(0, step.hit_tokens);
            return Ok(step);
        }
        for (i, cells) in self.found.chunks_exact(layers).enumerate() {
            if cells.iter().all(|&f| f != 0) {
                let context = request.tokens_of(i, each);
                let tokens = request.tokens_of(i + 1, each) - context;
                step.hits += 1;
                step.hit_tokens += tokens;
                step.hit_cost += self.opts.cost.of(context, tokens);
            }
        }
        Ok(step)
    }

    /// Inserts the misses, after an eviction that spares the request's own hits.
    fn store(
        &mut self,
        request: &Request,
        request_context: &RequestContext,
        step: &mut Step,
    ) -> Result<()> {
        let hits = self.found.iter().filter(|&&f| f != 0).count();
        let misses = self.ids.len() - hits;
        let mut fits = misses.min(self.capacity.saturating_sub(hits));
        if fits > 0 {
            let need = (self.evictor.objects().len() + fits).saturating_sub(self.capacity);
            if need > 0 {
                self.held.clear();
                let held = self.ids.iter().zip(&self.found).filter(|(_, f)| **f != 0);
                self.held.extend(held.map(|(id, _)| *id));
                self.evictor.acquire(&self.held)?;
                let freed = self.evict(need)?;
                step.evicted = freed;
                self.evictor.release(&self.held)?;
                fits -= need.saturating_sub(freed).min(fits);
            }
            self.describe(request, fits);
            self.evictor.insert(self.now, request_context, &self.new)?;
        }
        step.inserted = fits;
        self.report.refused += (misses - fits) as u64;
        Ok(())
    }

    fn evict(&mut self, need: usize) -> Result<usize> {
        self.victims.clear();
        let start = if self.opts.timed { self.clock.now_ns() } else { 0 };
        self.evictor.evict(self.now, need as u64, &mut self.victims)?;
        if self.opts.timed {
            self.report.decision.add(self.clock.now_ns().saturating_sub(start));
        }
        self.report.victims += self.victims.len() as u64;
        Ok(self.victims.len())
    }

    /// Fills `new` with the first `fits` missing objects of the path.
    fn describe(&mut self, request: &Request, fits: usize) {
        let layers = self.opts.layers as usize;
        let each = self.trace.block_tokens();
        self.new.clear();
        for (i, &id) in self.ids.iter().enumerate() {
            if self.new.len() == fits {
                break;
            }
            if self.found[i] != 0 {
                continue;
            }
            let chunk = i / layers;
            let context = request.tokens_of(chunk, each);
            let facts = Facts {
                context: context as u32,
                tokens: (request.tokens_of(chunk + 1, each) - context) as u32,
                layer: (i % layers) as u16,
                layers: if layers == 1 { 0 } else { layers as u16 },
                chunk: chunk as u32,
                chunks: request.len() as u32,
                cost: 0.0,
                next_use_ns: self.next_use_ns(request, chunk).unwrap_or(0),
            };
            let parent = i.checked_sub(1).map(|above| self.ids[above]);
            self.new.push(NewObject { id, parent, units: 1, facts });
        }
    }

    /// Time of the next use of a request's block, on the policy's clock; only for the optimal
    /// policy.
    fn next_use_ns(&self, request: &Request, chunk: usize) -> Option<i64> {
        let next = *self.next.get(request.range().start + chunk)?;
        // The index of a request has the order of its time, without ties.
        Some(if next == NEVER { i64::MAX } else { i64::from(next) + START_NS })
    }

    /// Inserts everything, then evicts what exceeds the capacity: the farthest next use, also if it
    /// is new.
    fn store_optimally(
        &mut self,
        request: &Request,
        request_context: &RequestContext,
        step: &mut Step,
    ) -> Result<()> {
        let layers = self.opts.layers as usize;
        for i in 0..self.ids.len() {
            if self.found[i] != 0 {
                let ns = self.next_use_ns(request, i / layers).unwrap_or(i64::MAX);
                let hint = Hint { next_use: Some((ns, 1.0)), ..Hint::default() };
                self.evictor.hint(self.now, request_context, &self.ids[i..=i], &hint)?;
            }
        }
        let missing = self.found.iter().filter(|&&f| f == 0).count();
        self.describe(request, missing);
        self.evictor.insert(self.now, request_context, &self.new)?;
        step.inserted = missing;
        let over = self.evictor.objects().len().saturating_sub(self.capacity);
        if over > 0 {
            step.evicted = self.evict(over)?;
        }
        Ok(())
    }

    fn hint(&mut self, request: &Request, request_context: &RequestContext) -> Result<()> {
        if self.opts.hints == Hints::None || !self.next.is_empty() {
            return Ok(());
        }
        let think = self.opts.hints == Hints::Think && request.think_ns > 0;
        let hint = Hint {
            stop: (request.stop != Stop::Unknown).then_some(request.stop),
            next_use: think.then(|| (self.now.saturating_add(request.think_ns), 1.0)),
            done: false,
        };
        if hint != Hint::default() {
            self.evictor.hint(self.now, request_context, &self.ids, &hint)?;
        }
        Ok(())
    }

    fn count(&mut self, request: &Request, step: &Step) {
        self.report.evictions += step.evicted as u64;
        self.report.inserts += step.inserted as u64;
        if self.at < self.opts.warm_up {
            return;
        }
        let all = u64::from(request.input_tokens);
        let (leading, each) =
            (self.study.reusable_blocks[self.at] as usize, self.trace.block_tokens());
        self.report.requests += 1;
        self.report.floor.add(request, leading, each, &self.opts.cost);
        let done = &mut self.report.done;
        done.references += request.len() as u64;
        done.hits += step.hits as u64;
        done.tokens += all;
        done.hit_tokens += step.hit_tokens;
        done.cost = self.report.floor.cost;
        done.hit_cost += step.hit_cost;
        let reusable = request.tokens_of(leading, each);
        self.sessions.add(self.study.sessions[self.at] as usize, step.hit_tokens, reusable);
        let tenant = (request.tenant as usize).min(MAX_TENANTS - 1);
        self.tenants.add(tenant, step.hit_tokens, reusable);
        let resident = self.evictor.objects().len() as f64;
        if self.report.evictions > 0 {
            self.used.0 += resident / self.capacity as f64;
            self.used.1 += 1;
        }
        self.window.requests += 1;
        self.window.tokens += all;
        self.window.hit_tokens += step.hit_tokens;
        let (at, total) = (self.at + 1, self.trace.requests().len());
        if at * self.opts.points / total > self.at * self.opts.points / total {
            self.window.at_ns = self.now - START_NS;
            self.window.resident = resident / f64::from(self.opts.layers);
            self.report.timeline.push(std::mem::take(&mut self.window));
        }
    }

    /// The result so far.
    pub fn finish(mut self) -> Report {
        let resident = self.evictor.objects().len() as f64 / self.capacity as f64;
        self.report.utilisation =
            if self.used.1 > 0 { self.used.0 / self.used.1 as f64 } else { resident };
        let again = self.report.floor.hits.saturating_sub(self.report.done.hits);
        self.report.re_prefill_rate =
            if again > 0 { again as f64 / self.report.done.references as f64 } else { 0.0 };
        self.report.session_fairness = self.sessions.fairness();
        self.report.tenant_fairness = self.tenants.fairness();
        self.report
    }
}

/// The id of a block's cell in a layer.
fn cell(block: u64, layer: u32) -> u64 {
    index::hash(block ^ (u64::from(layer) + 1).rotate_left(40))
}
