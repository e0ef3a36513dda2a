//! The simulation: requests in the order of time, each at one engine, and uploads that complete in
//! between.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::scale::engine::Engine;
use crate::scale::remote::Remote;
use crate::scale::report::{Counts, EngineShare, ScaleReport};
use crate::scale::{MAX_DURATION_NS, MAX_LOCAL_BLOCKS, ScaleOpts, Write, router};
use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::trace::replay::Step;
use kvtier::trace::requests::{IdMap, Request, Trace};
use kvtier::trace::study::{Study, zeros};

const WATCH_EVERY: usize = 256;
pub(super) const SECOND: i64 = 1_000_000_000;

/// Runs a trace. `watch` is called regularly with the number of finished requests; the run stops if
/// it returns false.
pub fn run(
    trace: &Trace,
    study: &Study,
    opts: &ScaleOpts,
    watch: &mut dyn FnMut(usize) -> bool,
) -> Result<ScaleReport> {
    opts.check()?;
    if trace.duration_ns() > MAX_DURATION_NS {
        fail!(Limit, "a trace of {} ns, the limit is {MAX_DURATION_NS}", trace.duration_ns());
    }
    let mut fleet = Fleet::new(trace, study, opts)?;
    for at in 0..trace.requests().len() {
        if at == opts.replay.warm_up {
            fleet.reset_counts();
        }
        fleet.serve(at)?;
        if at % WATCH_EVERY == 0 && !watch(at) {
            fail!(Cancelled, "stopped after {at} requests");
        }
    }
    watch(trace.requests().len());
    fleet.finish()
}

/// An upload: time of its next event, sequence number, engine, chunk, and whether it was sent.
type Sent = Reverse<(i64, u64, u32, u32, bool)>;

pub(super) struct Fleet<'a> {
    pub(super) trace: &'a Trace,
    pub(super) study: &'a Study,
    pub(super) opts: &'a ScaleOpts,
    pub(super) engines: Vec<Engine<'a>>,
    pub(super) remote: Option<Remote>,
    /// Chunk number of each block id.
    pub(super) numbers: IdMap<u32>,
    /// Full chunks: only these are uploaded.
    pub(super) full: Vec<u8>,
    pub(super) pending: BinaryHeap<Sent>,
    pub(super) sent: u64,
    pub(super) counts: Counts,
    pub(super) floor_tokens: u64,
    pub(super) first_ns: i64,
    pub(super) start_ns: i64,
    pub(super) now_ns: i64,
    pub(super) byte_seconds: f64,
    /// Wait of each request, and its wait without a remote.
    pub(super) waits: [Vec<u64>; 2],
    pub(super) saved_ns: u64,
    pub(super) slower: u64,
    /// Gets of each chunk in this second.
    pub(super) hot: IdMap<u32>,
    pub(super) hot_second: i64,
    pub(super) chunk_peak: u64,
    pub(super) dead: bool,
}

impl<'a> Fleet<'a> {
    fn new(trace: &'a Trace, study: &'a Study, opts: &'a ScaleOpts) -> Result<Fleet<'a>> {
        let disk = opts.disk.as_ref().map_or(0, |disk| disk.blocks);
        let blocks = opts.host.blocks.saturating_add(disk).min(trace.uniques() as u64);
        if blocks.saturating_mul(opts.engines as u64) > MAX_LOCAL_BLOCKS {
            fail!(
                Limit,
                "{} engines with {blocks} blocks each; the limit is {MAX_LOCAL_BLOCKS} in all",
                opts.engines
            );
        }
        let engines: Result<Vec<Engine>> =
            (0..opts.engines).map(|_| Engine::new(trace, study, opts)).collect();
        let token_bytes = opts.machine.token_bytes;
        let remote = opts.remote.as_ref();
        let remote = remote.map(|remote| Remote::new(remote, trace, token_bytes, opts.seed));
        let mut numbers: IdMap<u32> = IdMap::default();
        if numbers.try_reserve(trace.uniques()).is_err() {
            fail!(NoMem, "no memory to number {} blocks", trace.uniques());
        }
        for request in trace.requests() {
            let path = trace.blocks(request).iter().zip(trace.dense(request));
            numbers.extend(path.map(|(&id, &number)| (id, number)));
        }
        Ok(Fleet {
            trace,
            study,
            opts,
            engines: engines?,
            remote: remote.transpose()?,
            numbers,
            full: zeros(trace.uniques())?,
            pending: BinaryHeap::new(),
            sent: 0,
            counts: Counts::default(),
            floor_tokens: 0,
            first_ns: trace.requests().first().map_or(0, |request| request.at_ns),
            start_ns: 0,
            now_ns: 0,
            byte_seconds: 0.0,
            waits: [Vec::new(), Vec::new()],
            saved_ns: 0,
            slower: 0,
            hot: IdMap::default(),
            hot_second: 0,
            chunk_peak: 0,
            dead: false,
        })
    }

    /// Resets the counters.
    fn reset_counts(&mut self) {
        self.counts = Counts::default();
        self.start_ns = self.now_ns;
        (self.floor_tokens, self.byte_seconds, self.chunk_peak) = (0, 0.0, 0);
        (self.saved_ns, self.slower) = (0, 0);
        self.waits.iter_mut().for_each(Vec::clear);
        self.engines.iter_mut().for_each(|engine| engine.share = EngineShare::default());
        if let Some(remote) = &mut self.remote {
            remote.reset_counts();
        }
    }

    /// Advances the clock: shards fail, and uploads complete.
    fn advance(&mut self, now_ns: i64) -> Result<()> {
        let dead = self.opts.remote.as_ref().and_then(|remote| remote.dead);
        if let Some(dead) = dead.filter(|dead| !self.dead && dead.at_ns <= now_ns) {
            self.arrive(dead.at_ns)?;
            self.remote.as_mut().into_iter().for_each(|remote| remote.fail_shards(dead.shards));
            self.dead = true;
        }
        self.arrive(now_ns)?;
        self.pass(now_ns);
        Ok(())
    }

    /// Adds up the bytes stored over time.
    fn pass(&mut self, now_ns: i64) {
        let bytes = self.remote.as_ref().map_or(0, |remote| remote.life.resident.1);
        let seconds = (now_ns - self.now_ns).max(0) as f64 / SECOND as f64;
        self.byte_seconds += bytes as f64 * seconds;
        self.now_ns = self.now_ns.max(now_ns);
    }

    fn arrive(&mut self, now_ns: i64) -> Result<()> {
        while let Some(&Reverse((at_ns, _, engine, chunk, is_sent))) = self.pending.peek() {
            if at_ns > now_ns {
                break;
            }
            self.pending.pop();
            self.pass(at_ns);
            match is_sent {
                true => self.store(engine as usize, chunk, at_ns)?,
                false => self.upload(engine as usize, chunk, at_ns),
            }
        }
        Ok(())
    }

    fn serve(&mut self, at: usize) -> Result<()> {
        let (trace, study) = (self.trace, self.study);
        let request = &trace.requests()[at];
        let now_ns = request.at_ns - self.first_ns;
        self.advance(now_ns)?;
        let ScaleOpts { router, load_bound, .. } = *self.opts;
        let session = study.sessions[at];
        let number =
            router::pick(router, &mut self.engines, trace, at, session, load_bound, now_ns);
        let engine = &mut self.engines[number];
        let host = engine.host.serve(at)?.unwrap_or_default();
        let host_and_disk =
            engine.host_and_disk.as_mut().map(|replay| replay.serve(at)).transpose()?.flatten();
        // A policy may keep less in a larger cache.
        let local = host_and_disk.filter(|step| step.hits > host.hits).unwrap_or(host);
        let path = trace.dense(request);
        let whole = (request.input_tokens / trace.block_tokens()) as usize;
        for &chunk in &path[..whole.min(path.len())] {
            self.full[chunk as usize] = 1;
        }
        let mut wait_ns = self.local_ns(&host, &local);
        let least_ns = wait_ns + self.compute_ns(request, local.hits);
        let loaded = self.load(number, request, local.hits, whole.min(path.len()), &mut wait_ns);
        wait_ns += self.compute_ns(request, local.hits + loaded);
        self.count(number, request, &host, &local, loaded, [wait_ns as u64, least_ns as u64]);
        let found = study.reusable_blocks[at] as usize;
        self.floor_tokens += request.tokens_of(found, trace.block_tokens());
        self.engines[number].load.add(now_ns, wait_ns as u64);
        self.schedule_uploads(number, request, &host, wait_ns as i64)
    }

    /// Time to load the engine's own hits.
    fn local_ns(&self, host: &Step, local: &Step) -> f64 {
        let disk = self.opts.disk.as_ref().map_or(0.0, |disk| disk.bytes_per_second);
        let of = |tokens: u64, speed: f64| {
            let bytes = tokens.saturating_mul(self.opts.machine.token_bytes);
            if speed > 0.0 { bytes as f64 * 1e9 / speed } else { 0.0 }
        };
        of(host.hit_tokens, self.opts.host.bytes_per_second)
            + of(local.hit_tokens - host.hit_tokens, disk)
    }

    /// Time to compute what follows this many chunks.
    pub(super) fn compute_ns(&self, request: &Request, chunks: usize) -> f64 {
        let cost = &self.opts.replay.cost;
        let found = request.tokens_of(chunks, self.trace.block_tokens());
        let rest = cost.of(0, u64::from(request.input_tokens)) - cost.of(0, found);
        rest.max(0.0) * self.opts.machine.unit_ns
    }

    fn count(
        &mut self,
        number: usize,
        request: &Request,
        host: &Step,
        local: &Step,
        loaded: usize,
        [wait_ns, least_ns]: [u64; 2],
    ) {
        let counts = &mut self.counts;
        counts.requests += 1;
        counts.remote_requests += u64::from(loaded > 0);
        counts.tokens += u64::from(request.input_tokens);
        counts.host_tokens += host.hit_tokens;
        counts.disk_tokens += local.hit_tokens - host.hit_tokens;
        let share = &mut self.engines[number].share;
        share.requests += 1;
        share.work_ns = share.work_ns.saturating_add(wait_ns);
        self.saved_ns = self.saved_ns.saturating_add(least_ns.saturating_sub(wait_ns));
        // Sums of the same terms in another order may differ in the last digits.
        self.slower += u64::from(wait_ns > least_ns.saturating_add(1));
        let [waits, local_waits] = &mut self.waits;
        waits.push(wait_ns);
        local_waits.push(least_ns);
    }

    /// Schedules the uploads of this request, by the write mode: its new chunks, or its victims.
    fn schedule_uploads(
        &mut self,
        number: usize,
        request: &Request,
        host: &Step,
        wait_ns: i64,
    ) -> Result<()> {
        let Some(opts) = &self.opts.remote else { return Ok(()) };
        let path = self.trace.dense(request);
        let mut chunks: Vec<u32> = Vec::new();
        let engine = &mut self.engines[number];
        let (inserted, evicted) = engine.host.moved();
        let through = opts.write == Write::Through;
        for &chunk in path.iter().take(if opts.hits > 0 { host.hits } else { 0 }) {
            let uses = engine.uses.entry(u64::from(chunk)).or_default();
            *uses = uses.saturating_add(1);
            if through && *uses == opts.hits {
                chunks.push(chunk);
            }
        }
        for victim in evicted {
            let Some(&chunk) = self.numbers.get(&victim.id) else { continue };
            let uses = engine.uses.remove(&u64::from(chunk)).unwrap_or(0);
            if opts.write == Write::Back && uses >= opts.hits {
                chunks.push(chunk);
            }
        }
        if through && opts.hits == 0 {
            let made = inserted.iter().filter_map(|new| path.get(new.facts.chunk as usize));
            chunks.extend(made);
        }
        chunks.retain(|&chunk| self.full[chunk as usize] != 0);
        // A victim is available at once, a computed chunk after its computation.
        let ready_ns = self.now_ns.saturating_add(if through { wait_ns } else { 0 });
        for chunk in chunks {
            self.sent += 1;
            self.pending.push(Reverse((ready_ns, self.sent, number as u32, chunk, false)));
        }
        Ok(())
    }

    fn finish(mut self) -> Result<ScaleReport> {
        let end_ns = self.trace.duration_ns();
        self.pass(end_ns);
        let byte_seconds = self.byte_seconds;
        self.arrive(i64::MAX)?;
        let mut report = ScaleReport {
            policy: self.engines.first().map_or("", |e| e.host.evictor().spec()).to_string(),
            engines: self.engines.len(),
            router: self.opts.router.name(),
            seconds: (end_ns - self.start_ns).max(0) as f64 / SECOND as f64,
            counts: self.counts,
            floor_tokens: self.floor_tokens,
            shares: self.engines.iter().map(|engine| engine.share).collect(),
            byte_seconds,
            chunk_peak: self.chunk_peak,
            saved_ns: self.saved_ns,
            slower: self.slower,
            ..ScaleReport::default()
        };
        let [waits, local] = &mut self.waits;
        (report.ttft_ns, report.local_ttft_ns) = (spread(waits), spread(local));
        if let Some(remote) = &self.remote {
            report.chunk_objects = remote.cutting.objects();
            report.chunk_bytes = remote.cutting.chunk_bytes;
            report.life = remote.life;
            (report.peak, report.shard_peak) = remote.peaks();
            let (first, top, all) = remote.hottest()?;
            report.hottest_share = first as f64 / all.max(1) as f64;
            report.hot_share = top as f64 / all.max(1) as f64;
        }
        Ok(report)
    }
}

/// Mean, median and 99th percentile.
fn spread(waits: &mut [u64]) -> [u64; 3] {
    let total: u128 = waits.iter().map(|&ns| u128::from(ns)).sum();
    waits.sort_unstable();
    let at = |part: usize| waits.get(waits.len() * part / 100).copied().unwrap_or(0);
    [(total / waits.len().max(1) as u128) as u64, at(50), at(99)]
}
