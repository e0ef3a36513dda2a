//! Lookups and plans of sessions, from residency and measured bandwidth.

use std::collections::BTreeMap;

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::format::keys::chain::Chain;
use crate::meta::chunks::{Chunks, TIERS};
use crate::meta::cost::Cost;
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;
use crate::meta::layout::{Layout, Rule};
use crate::meta::reuse::{self, ChunkReuse, ReusablePrefix, State};
use crate::store::job_queues::LANES;
use crate::store::plan::{Need, Part, Plan, Prefill, Route, SOURCES, Speed, StepKind, Terms};
use crate::store::state::batches::Stage;
use crate::store::state::batches::WorkerKind;
use crate::store::state::{ChunkTable, DEVICE, DISK, HOST, REMOTE, StoreState};
use crate::store::token_path::MAX_TOKENS;

// ---------- lookup
//
// Lookups: how much of a sequence is reusable, and what loading it takes. A lookup counts no access,
// because a router queries several stores and uses one.

/// Capacity of the buffers, in chunks, that is kept between lookups.
pub(super) const MOST_KEPT: usize = 1 << 17;

/// A run of tokens of equal state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LookupRange {
    /// First token.
    pub first_token: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Whether they can be reused.
    pub state: State,
    /// Slowest tier that a cell of them must be loaded from.
    pub farthest: Option<usize>,
    /// Bytes to load from each tier.
    pub bytes: [u64; TIERS],
    /// Bytes in transfer into the store, in no tier yet.
    pub pending_bytes: u64,
    /// Time to load them alone.
    pub load_ns: u64,
}

/// Result of a lookup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LookupResult {
    /// Tokens looked up.
    pub tokens: u64,
    /// Longest prefix that can be reused now.
    pub now_tokens: u64,
    /// Longest prefix that can be reused once transfers in flight have arrived.
    pub reusable_soon_tokens: u64,
    /// All tokens in order: what must be loaded to continue after `reusable_soon_tokens`, or after all of
    /// them if the namespace allows holes. Tokens of partial chunks are misses, except a session's
    /// own.
    pub ranges: Vec<LookupRange>,
    /// Bytes to load from each tier.
    pub bytes: [u64; TIERS],
    /// Bytes in transfer into the store.
    pub pending_bytes: u64,
    /// Time to load all of it, including the queues.
    pub load_ns: u64,
}

/// Buffers of lookups.
#[derive(Default)]
pub(super) struct Scratch {
    keys: Vec<Key>,
    pub(super) slots: Vec<Slot>,
    pub(super) found: Vec<ChunkReuse>,
    result: LookupResult,
}

impl StoreState {
    /// Looks up a sequence in a namespace.
    pub fn lookup(&mut self, namespace: u32, tokens: &[u32]) -> Result<&LookupResult> {
        let (entry, _) = self.entry_of(namespace)?;
        let each = self.tables[entry.table as usize].layout.chunk_tokens();
        if tokens.len() > MAX_TOKENS {
            fail!(Limit, "a lookup of {} tokens, the limit is {MAX_TOKENS}", tokens.len());
        }
        let mut keys = std::mem::take(&mut self.plans.scratch.keys);
        room(&mut keys, tokens.len() / each as usize)?;
        let hashed = Chain::new(entry.key, each)?.extend(tokens, &[], &mut keys);
        let result = match hashed {
            Ok(_) => self.look_up(namespace, &keys, tokens.len() as u64),
            Err(error) => Err(error),
        };
        self.plans.scratch.keys = keys;
        result.map(|()| &self.plans.scratch.result)
    }

    /// Looks up the keys of a sequence's full chunks; `tokens` is its length. A caller that hashes
    /// them before the call holds the lock for a shorter time.
    pub fn lookup_keys(
        &mut self,
        namespace: u32,
        keys: &[Key],
        tokens: u64,
    ) -> Result<&LookupResult> {
        let (entry, _) = self.entry_of(namespace)?;
        let each = u64::from(self.tables[entry.table as usize].layout.chunk_tokens());
        if tokens > MAX_TOKENS as u64 || keys.len() as u64 != tokens / each {
            let many = keys.len();
            fail!(Invalid, "{many} keys do not fit {tokens} tokens in chunks of {each}");
        }
        self.look_up(namespace, keys, tokens)?;
        Ok(&self.plans.scratch.result)
    }

    /// For each key, a mask of the tiers that have every cell of the chunk (bit 0 is the device),
    /// with [`WHOLE`](crate::meta::chunks::WHOLE) if every cell is in some tier of this store. The
    /// bit of the remote is a hint.
    pub fn exists(&self, namespace: u32, keys: &[Key], found: &mut [u8]) -> Result<()> {
        const GROUP: usize = 64;
        let chunks = &self.entry_of(namespace)?.1.chunks;
        let mut slots = [NONE; GROUP];
        for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
            let slots = &mut slots[..keys.len()];
            chunks.find_many(keys, slots);
            for (found, &slot) in found.iter_mut().zip(&*slots) {
                // A caller may pass any key.
                let is_it = chunks
                    .chunk(slot)
                    .is_some_and(|row| row.namespace() == namespace && row.owner().is_none());
                *found = if is_it { chunks.trusted_tiers(slot) } else { 0 };
            }
        }
        Ok(())
    }

    /// Looks up the path of a session, chunks included that others have stored since.
    pub fn lookup_session(&mut self, session: u32) -> Result<&LookupResult> {
        let (namespace, tokens, reach) = self.find_path(session)?;
        self.describe(namespace, tokens, reach)?;
        Ok(&self.plans.scratch.result)
    }

    fn entry_of(&self, namespace: u32) -> Result<(super::Namespace, &super::ChunkTable)> {
        let Some(&entry) = self.namespaces.get(namespace as usize) else {
            fail!(NotFound, "there is no namespace {namespace}");
        };
        Ok((entry, &self.tables[entry.table as usize]))
    }

    fn look_up(&mut self, namespace: u32, keys: &[Key], tokens: u64) -> Result<()> {
        let table = self.entry_of(namespace)?.0.table as usize;
        let scratch = &mut self.plans.scratch;
        room(&mut scratch.slots, keys.len())?;
        scratch.slots.resize(keys.len(), NONE);
        let rows = &self.tables[table];
        rows.chunks.find_many(keys, &mut scratch.slots);
        // A caller may pass any key.
        let each = rows.layout.chunk_tokens();
        for (at, slot) in scratch.slots.iter_mut().enumerate() {
            let is_it = rows.chunks.chunk(*slot).is_some_and(|row| {
                (row.namespace(), row.position() as usize) == (namespace, at)
                    && row.valid_tokens() == each
            });
            *slot = if is_it { *slot } else { NONE };
        }
        let reach = scratch.find_reusable(&rows.chunks, &rows.layout)?;
        self.describe(namespace, tokens, reach)
    }

    /// Finds the chunks of a session. Returns its namespace, its tokens, and how far they reach.
    pub(super) fn find_path(&mut self, session: u32) -> Result<(u32, u64, ReusablePrefix)> {
        let namespace = self.session(session)?.namespace;
        let rows = &self.tables[self.entry_of(namespace)?.0.table as usize];
        let (path, scratch) = (&self.sessions[session].path, &mut self.plans.scratch);
        room(&mut scratch.slots, path.slots().len() + 1)?;
        scratch.slots.extend_from_slice(path.slots());
        if let Some(first) = path.slots().iter().position(|&slot| slot == NONE) {
            rows.chunks.find_many(&path.keys()[first..], &mut scratch.slots[first..]);
        }
        scratch.slots.extend(path.tail());
        let tokens = path.tokens().len() as u64;
        let reach = scratch.find_reusable(&rows.chunks, &rows.layout)?;
        Ok((namespace, tokens, reach))
    }

    /// Fills in the result.
    fn describe(&mut self, namespace: u32, tokens: u64, reach: ReusablePrefix) -> Result<()> {
        let entry = self.entry_of(namespace)?.0;
        let rows = &self.tables[entry.table as usize];
        let routes = self.routes(namespace, 0)?;
        let scratch = &mut self.plans.scratch;
        let (slots, found) = (&scratch.slots, &mut scratch.found);
        let until = if entry.holes { slots.len() } else { reach.soon_chunks };
        let reuse_plan = reuse::plan_reuse(&rows.chunks, &rows.layout, slots, until, true, found)?;
        let result = &mut scratch.result;
        (result.tokens, result.bytes, result.pending_bytes) = (tokens, reuse_plan.bytes, 0);
        (result.now_tokens, result.reusable_soon_tokens) =
            (reach.tokens, reach.reusable_soon_tokens);
        result.ranges.clear();
        let (mut counts, mut at) = ([0; SOURCES], 0);
        for range in reuse::ranges(found) {
            let parts = &found[range.first..range.first + range.chunks];
            let pending = parts.iter().map(|one| pending_bytes(&rows.layout, one)).sum();
            let of = |tier: usize| parts.iter().filter(|one| one.bytes[tier] > 0).count();
            let copies = parts.iter().filter(|one| loads(one)).count();
            let these = [copies, of(DISK), of(REMOTE), of(DEVICE)];
            let load_ns = time(&routes, &range.bytes, pending, these, false);
            result.pending_bytes += pending;
            counts.iter_mut().zip(these).for_each(|(sum, n)| *sum += n);
            let stretch = LookupRange {
                first_token: at,
                tokens: range.tokens,
                state: range.state,
                farthest: range.farthest,
                bytes: range.bytes,
                pending_bytes: pending,
                load_ns,
            };
            at += range.tokens;
            add(&mut result.ranges, stretch)?;
        }
        result.load_ns = time(&routes, &result.bytes, result.pending_bytes, counts, true);
        if tokens > at {
            let rest = LookupRange { first_token: at, tokens: tokens - at, ..MISS };
            add(&mut result.ranges, rest)?;
        }
        Ok(())
    }
}

const MISS: LookupRange = LookupRange {
    first_token: 0,
    tokens: 0,
    state: State::Miss,
    farthest: None,
    bytes: [0; TIERS],
    pending_bytes: 0,
    load_ns: 0,
};

impl Scratch {
    fn find_reusable(&mut self, chunks: &Chunks, layout: &Layout) -> Result<ReusablePrefix> {
        room(&mut self.found, self.slots.len())?;
        self.found.resize(self.slots.len(), ChunkReuse::default());
        reuse::find_reusable(chunks, layout, &self.slots, &mut self.found)
    }
}

/// Clears a list and reserves `count` entries. Capacity that only a very long sequence needed is
/// released.
fn room<T>(list: &mut Vec<T>, count: usize) -> Result<()> {
    list.clear();
    if list.capacity() > count.max(MOST_KEPT) {
        *list = Vec::new();
    }
    if list.try_reserve(count).is_err() {
        fail!(NoMem, "no memory for a lookup of {count} chunks");
    }
    Ok(())
}

/// Adds a range, or extends the last one if both are misses.
fn add(ranges: &mut Vec<LookupRange>, next: LookupRange) -> Result<()> {
    if let Some(last) =
        ranges.last_mut().filter(|last| (last.state, next.state) == (State::Miss, State::Miss))
    {
        last.tokens += next.tokens;
        return Ok(());
    }
    if ranges.try_reserve(1).is_err() {
        fail!(NoMem, "no memory for another range");
    }
    ranges.push(next);
    Ok(())
}

/// Whether a cell of a chunk must be copied that is not in device memory.
fn loads(one: &ChunkReuse) -> bool {
    let uses_device =
        one.bytes[DEVICE] > 0 && one.bytes[HOST] + one.bytes[DISK] + one.bytes[REMOTE] == 0;
    matches!(one.state, State::Hit | State::Pending) && !uses_device
}

/// Bytes that are needed of a chunk and are in no tier yet.
pub(super) fn pending_bytes(layout: &Layout, one: &ChunkReuse) -> u64 {
    if one.state != State::Pending {
        return 0;
    }
    let groups = layout.groups().iter().enumerate().filter(|(g, _)| one.needed >> g & 1 != 0);
    let bytes =
        groups.map(|(_, group)| group.planes(one.tokens).bytes() * group.layers.len() as u64);
    bytes.sum::<u64>().saturating_sub(one.bytes.iter().sum())
}

/// Time to copy so many chunks, while those on disk are read, those at the remote are fetched, and
/// those in device memory are copied there.
fn time(
    routes: &[Route; SOURCES],
    bytes: &[u64; TIERS],
    pending_bytes: u64,
    counts: [usize; SOURCES],
    queued: bool,
) -> u64 {
    let above = bytes[HOST] + bytes[DISK] + bytes[REMOTE] + pending_bytes;
    let source_bytes = [above, bytes[DISK], bytes[REMOTE], bytes[DEVICE]];
    let by_source = routes.iter().zip(source_bytes).zip(counts);
    let ns = by_source.filter(|((_, bytes), _)| *bytes > 0).map(|((route, bytes), chunks)| {
        let waits = if queued { route.queued_ns } else { 0.0 };
        route.speed.ns(bytes, chunks as u64) + waits
    });
    ns.fold(0.0, f64::max) as u64
}

/// Plans compared where the needs of a chunk depend on the plan.
const MAX_ROUNDS: usize = 16;
/// A price at which computing never beats loading, in ns a token.
const FORBIDDEN: Cost = Cost { alpha: 0.0, beta: 1e12 };

/// Terms of a plan, as the caller states them.
#[derive(Clone, Copy, Debug)]
pub struct PlanTerms {
    /// The engine computes while loads run, layer by layer.
    pub overlap: bool,
    /// Counts on transfers in flight into the store.
    pub wait: bool,
    /// Urgency of the loads.
    pub lane: usize,
    /// Cost of prefill in ns; `None` = as observed in the namespace.
    pub cost: Option<Cost>,
}

impl Default for PlanTerms {
    fn default() -> PlanTerms {
        PlanTerms { overlap: true, wait: true, lane: 0, cost: None }
    }
}

/// A run of tokens with the same step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanStep {
    /// Kind of the step.
    pub kind: StepKind,
    /// First token.
    pub first_token: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Bytes loaded from host memory, disk, remote and device.
    pub bytes: [u64; SOURCES],
    /// Time of this step alone.
    pub ns: f64,
}

/// Plan of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionPlan {
    /// Its steps, in the order of its tokens.
    pub steps: Vec<PlanStep>,
    /// Total time.
    pub total_ns: f64,
    /// Time of the loads alone.
    pub load_ns: f64,
    /// Time of the computation alone.
    pub compute_ns: f64,
    /// Time to compute all tokens.
    pub without_ns: f64,
}

/// Buffers of lookups and plans, and what prefill costs.
#[derive(Default)]
pub(super) struct Plans {
    pub(super) scratch: Scratch,
    drafts: Drafts,
    /// By namespace; one without an observation is absent.
    prefills: BTreeMap<u32, Prefill>,
}

impl Plans {
    /// Forgets a namespace: its number will be used again.
    pub(super) fn forget_namespace(&mut self, namespace: u32) {
        self.prefills.remove(&namespace);
    }
}

/// Buffers of plans.
#[derive(Default)]
struct Drafts {
    parts: Vec<Part>,
    plan: Plan,
    session: SessionPlan,
}

/// Input of the plans of one path.
struct Ground<'a> {
    layout: &'a Layout,
    chunks: &'a Chunks,
    slots: &'a [Slot],
    tokens: u64,
    wait: bool,
    terms: Terms,
}

impl StoreState {
    /// The cheapest plan for all tokens of a session. Counts no access.
    pub fn plan(&mut self, session: u32, terms: &PlanTerms) -> Result<&SessionPlan> {
        let (namespace, tokens, reach) = self.find_path(session)?;
        let entry = self.namespaces[namespace as usize];
        let rows = &self.tables[entry.table as usize];
        let routes = self.routes(namespace, terms.lane)?;
        let ground = Ground {
            layout: &rows.layout,
            chunks: &rows.chunks,
            slots: &self.plans.scratch.slots,
            tokens,
            wait: terms.wait,
            terms: Terms {
                cost: terms.cost.unwrap_or_else(|| self.prefill(namespace).cost()),
                routes,
                holes: entry.holes,
                overlap: terms.overlap,
                layers: rows.layout.layers() as u32,
            },
        };
        self.plans.drafts.make(&ground, &mut self.plans.scratch.found, ground.reached(&reach))?;
        Ok(&self.plans.drafts.session)
    }
}

impl Ground<'_> {
    fn reached(&self, reach: &ReusablePrefix) -> usize {
        if self.wait { reach.soon_chunks } else { reach.chunks }
    }

    fn choose(&self, until: usize, found: &mut [ChunkReuse]) -> Result<()> {
        let Ground { chunks, layout, slots, wait, .. } = *self;
        reuse::plan_reuse(chunks, layout, slots, until, wait, found).map(|_| ())
    }
}

impl Drafts {
    fn make(&mut self, ground: &Ground, found: &mut [ChunkReuse], reached: usize) -> Result<()> {
        if self.parts.capacity() > found.len().max(MOST_KEPT) + 1 {
            *self = Drafts::default();
        }
        let until = if ground.terms.holes { found.len() } else { reached };
        ground.choose(until, found)?;
        self.fill(ground, found)?;
        if ground.layout.groups().iter().all(|group| group.rule == Rule::Full) {
            self.plan.make(&self.parts, &ground.terms)?;
            return self.write_steps(ground);
        }
        // Computing reaches back to chunks that are needed for nothing else.
        self.session.total_ns = f64::INFINITY;
        self.offer(ground)?;
        match ground.terms.holes {
            true => self.give_up_more(ground, found),
            false => self.try_points(ground, found, reached),
        }
    }

    /// Loads less, step by step. After each step, what is needed must be determined again.
    fn give_up_more(&mut self, ground: &Ground, found: &mut [ChunkReuse]) -> Result<()> {
        for _ in 0..MAX_ROUNDS {
            self.plan.make(&self.parts, &ground.terms)?;
            if !self.give_up(found) {
                break;
            }
            ground.choose(found.len(), found)?;
            self.fill(ground, found)?;
            self.offer(ground)?;
        }
        // The last candidate computes everything.
        found.iter_mut().for_each(|one| one.given_up = true);
        ground.choose(found.len(), found)?;
        self.fill(ground, found)?;
        self.offer(ground)
    }

    /// Tries to load up to points that are spaced evenly before the farthest one.
    fn try_points(
        &mut self,
        ground: &Ground,
        found: &mut [ChunkReuse],
        reached: usize,
    ) -> Result<()> {
        let mut last = reached;
        for round in (0..MAX_ROUNDS).rev() {
            let end = reached * round / MAX_ROUNDS;
            let (slots, before) = (&ground.slots[..end], &mut found[..end]);
            let reach = reuse::find_reusable(ground.chunks, ground.layout, slots, before)?;
            let until = ground.reached(&reach);
            if until < last {
                ground.choose(until, found)?;
                self.fill(ground, found)?;
                self.offer(ground)?;
            }
            last = until;
        }
        Ok(())
    }

    /// Determines what each chunk needs, and the rest after the last chunk.
    fn fill(&mut self, ground: &Ground, found: &[ChunkReuse]) -> Result<()> {
        self.parts.clear();
        if self.parts.try_reserve(found.len() + 1).is_err() {
            fail!(NoMem, "no memory for a plan of {} chunks", found.len());
        }
        self.parts.extend(found.iter().map(|one| part(ground.layout, one)));
        let known: u64 = found.iter().map(|one| u64::from(one.tokens)).sum();
        let rest = ground.tokens.saturating_sub(known) as u32;
        if rest > 0 {
            self.parts.push(Part { tokens: rest, need: Need::Compute });
        }
        Ok(())
    }

    /// Takes a plan that loads all it can, if no better one was found.
    fn offer(&mut self, ground: &Ground) -> Result<()> {
        let forced = Terms { cost: FORBIDDEN, holes: true, ..ground.terms };
        self.plan.make(&self.parts, &forced)?;
        let each = self.parts.iter().scan(0, |at, part| {
            let tokens = u64::from(part.tokens);
            *at += tokens;
            Some((*at - tokens, tokens, part.need))
        });
        let computed = each.filter(|(.., need)| *need == Need::Compute);
        let compute_ns = computed.map(|(at, n, _)| ground.terms.cost.of(at, n)).sum();
        let load_ns = self.plan.load_ns;
        let total_ns = match ground.terms.overlap {
            true => load_ns.max(compute_ns + load_ns / f64::from(ground.terms.layers.max(1))),
            false => load_ns + compute_ns,
        };
        (self.plan.compute_ns, self.plan.total_ns) = (compute_ns, total_ns);
        if total_ns < self.session.total_ns { self.write_steps(ground) } else { Ok(()) }
    }

    /// Marks chunks that the plan computes although they could be loaded. Returns false if all were
    /// marked before.
    fn give_up(&self, found: &mut [ChunkReuse]) -> bool {
        let mut changed = false;
        for one in self.plan.steps.iter().filter(|one| one.kind == StepKind::Recompute) {
            for found in found.iter_mut().skip(one.first).take(one.chunks) {
                let is_new = matches!(found.state, State::Hit | State::Pending);
                changed |= is_new;
                found.given_up |= is_new;
            }
        }
        changed
    }

    /// Writes the plan as steps of tokens.
    fn write_steps(&mut self, ground: &Ground) -> Result<()> {
        let (plan, session, cost) = (&self.plan, &mut self.session, ground.terms.cost);
        (session.total_ns, session.load_ns) = (plan.total_ns, plan.load_ns);
        (session.compute_ns, session.without_ns) = (plan.compute_ns, cost.of(0, ground.tokens));
        session.steps.clear();
        if session.steps.try_reserve(plan.steps.len()).is_err() {
            fail!(NoMem, "no memory for {} steps of a plan", plan.steps.len());
        }
        let mut at = 0;
        session.steps.extend(plan.steps.iter().map(|one| {
            let [all, disk, remote, device] = one.bytes;
            let bytes = [all.saturating_sub(disk).saturating_sub(remote), disk, remote, device];
            let (kind, tokens, first_token) = (one.kind, one.tokens, at);
            at += tokens;
            let ns =
                if kind == StepKind::Recompute { cost.of(first_token, tokens) } else { one.ns };
            PlanStep { kind, first_token, tokens, bytes, ns }
        }));
        Ok(())
    }
}

/// Requirements of a chunk: all of its cells are copied, after those in slower tiers are read.
fn part(layout: &Layout, one: &ChunkReuse) -> Part {
    let bytes = |tier: Tier| one.bytes[tier as usize];
    let (disk, remote, device) = (bytes(Tier::Disk), bytes(Tier::Remote), bytes(Tier::Device));
    let copied = bytes(Tier::Host) + disk + remote + pending_bytes(layout, one);
    let need = match one.state {
        State::Miss => Need::Compute,
        _ if copied + device == 0 => Need::Nothing,
        _ => Need::Load([copied, disk, remote, device]),
    };
    Part { tokens: one.tokens, need }
}

// ---------- bandwidth
//
// Routes of chunks, and the measured cost of the engine's prefill.

impl StoreState {
    /// Records that the engine computed `tokens` after `context` tokens in `ns`.
    pub fn observe_prefill(
        &mut self,
        namespace: u32,
        context: u64,
        tokens: u64,
        ns: u64,
    ) -> Result<()> {
        self.prefill_mut(namespace)?.observe(context, tokens, ns)
    }

    /// Fixes the cost of prefill, in ns; `None` = use observations again.
    pub fn fix_prefill(&mut self, namespace: u32, cost: Option<Cost>) -> Result<()> {
        self.prefill_mut(namespace)?.fix(cost)
    }

    fn prefill_mut(&mut self, namespace: u32) -> Result<&mut Prefill> {
        if self.namespaces.get(namespace as usize).is_none() {
            fail!(NotFound, "there is no namespace {namespace}");
        }
        Ok(self.plans.prefills.entry(namespace).or_default())
    }

    /// Cost of prefill in a namespace.
    pub fn prefill(&self, namespace: u32) -> Prefill {
        self.plans.prefills.get(&namespace).copied().unwrap_or_default()
    }

    /// Routes of a namespace's chunks, by source: all are copied from memory, and those on disk are
    /// read before that. Times are for whole chunks. Queues of lanes less urgent than `lane` do not
    /// count.
    pub fn routes(&self, namespace: u32, lane: usize) -> Result<[Route; SOURCES]> {
        let Some(table) = self.table_of(namespace) else {
            fail!(NotFound, "there is no namespace {namespace}");
        };
        let stages = &self.stages;
        let [copying, reading, fetching] = [WorkerKind::Copy, WorkerKind::Read, WorkerKind::Fetch]
            .map(|kind| stages.in_flight(kind));
        let copies = self.route_of(&stages.copy, copying, table, lane);
        let reads = self.route_of(&stages.read, reading, table, lane);
        let replicas = self
            .replicas
            .as_ref()
            .map_or(copies, |replicas| self.route_of(&replicas.stage, copying, table, lane));
        let fetches = self
            .remote
            .as_ref()
            .map_or(reads, |remote| self.route_of(&remote.fetch, fetching, table, lane));
        Ok([copies, reads, fetches, replicas])
    }

    fn route_of(&self, stage: &Stage, begun: u32, table: &ChunkTable, lane: usize) -> Route {
        let (layout, known) = (&table.layout, &stage.bandwidth);
        let share = self.batches(layout.layers() as f64, layout.chunk_bytes(layout.chunk_tokens()));
        let speed = Speed::guess(known.ns(0, 1) * share, known.bytes_per_second());
        let (mut cells, mut bytes) = (0, stage.in_flight_bytes);
        for lane in 0..=lane.min(LANES - 1) {
            let waiting = stage.queue.waiting(lane);
            (cells, bytes) = (cells + u64::from(waiting.0), bytes + waiting.1);
        }
        let batches = self.batches(cells as f64, bytes).ceil() as u64 + u64::from(begun);
        let queued_ns = if bytes > 0 { known.ns(bytes, batches) } else { 0.0 };
        Route { speed, queued_ns }
    }

    /// Number of batches that cells take.
    fn batches(&self, cells: f64, bytes: u64) -> f64 {
        let by_cells = cells / self.config.batch_cells as f64;
        by_cells.max(bytes as f64 / self.config.batch_bytes.max(1) as f64)
    }
}
