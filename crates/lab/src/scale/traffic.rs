//! Traffic between an engine and the remote: lookups, fetches, uploads.

use std::cmp::Reverse;

use crate::scale::fleet::{Fleet, SECOND};
use crate::scale::remote::Put;
use crate::scale::{LookupUnit, WINDOW};
use kvtier::base::status::Result;
use kvtier::trace::requests::Request;

/// Largest upload queue, as a share of the host tier.
const OUT_PART: f64 = 1.0 / 8.0;

/// Result of a lookup.
struct Found {
    /// Leading chunks found.
    chunks: usize,
    /// Batches, one after the other.
    trips: i64,
}

impl Fleet<'_> {
    /// Loads chunks of the remote after the first `from` chunks, if that is faster than computing
    /// them. Adds the time to `wait_ns`; returns the number of loaded chunks.
    pub(super) fn load(
        &mut self,
        number: usize,
        request: &Request,
        from: usize,
        whole: usize,
        wait_ns: &mut f64,
    ) -> usize {
        if from >= whole || self.remote.is_none() {
            return 0;
        }
        let path = &self.trace.dense(request)[from..whole];
        let Found { chunks, trips } = self.lookup(number, path);
        let allowed = self.allowed(&path[..chunks]);
        let each = self.trace.block_tokens();
        let tokens = |chunks: usize| request.tokens_of(from + chunks, each);
        self.counts.capped_tokens += tokens(chunks) - tokens(allowed);
        if allowed == 0 {
            return 0;
        }
        let latency_ns = self.opts.remote.as_ref().map_or(0, |remote| remote.latency_ns);
        let asked_ns = latency_ns.saturating_mul(trips) as f64;
        let fetch_ns = asked_ns + self.fetch_ns(number, &path[..allowed], latency_ns, false);
        let rest_ns = self.compute_ns(request, from + allowed);
        if fetch_ns + rest_ns > self.compute_ns(request, from) {
            self.counts.declined_tokens += tokens(allowed) - tokens(0);
            return 0;
        }
        *wait_ns += asked_ns + self.fetch_ns(number, &path[..allowed], latency_ns, true);
        self.fetch(number, request, from, &path[..allowed])
    }

    /// Looks up chunks from the front, window by window, until a window without any hit.
    fn lookup(&mut self, number: usize, path: &[u32]) -> Found {
        let (Some(remote), Some(opts)) = (&mut self.remote, &self.opts.remote) else {
            return Found { chunks: 0, trips: 0 };
        };
        let (engine, counts, now_ns) = (&mut self.engines[number], &mut self.counts, self.now_ns);
        let each =
            if opts.lookup_unit == LookupUnit::Object { remote.cutting.objects() } else { 1 };
        let total = path.len() * each;
        let (mut trips, mut first_absent) = (0, total);
        for start in (0..total).step_by(WINDOW) {
            let (mut present, mut looked_up) = (0, 0);
            for at in start..(start + WINDOW).min(total) {
                let chunk = path[at / each];
                let object = remote.object(chunk, at % each);
                if remote.has_failed(chunk) {
                    counts.masked += 1;
                    first_absent = first_absent.min(at);
                } else if engine.hints.is_fresh(chunk, now_ns, opts.fresh_ns) {
                    counts.hinted_present += 1;
                    present += 1;
                } else if engine.absent.is_fresh(object, now_ns, opts.absent_ns) {
                    counts.hinted_absent += 1;
                    first_absent = first_absent.min(at);
                } else {
                    looked_up += 1;
                    if remote.lookup(object, now_ns) {
                        present += 1;
                    } else {
                        counts.absent_lookups += 1;
                        engine.absent.insert(object, now_ns);
                        engine.hints.remove(chunk);
                        first_absent = first_absent.min(at);
                    }
                }
            }
            counts.lookups += looked_up;
            engine.share.lookups += looked_up;
            counts.lookup_batches += u64::from(looked_up > 0);
            trips += i64::from(looked_up > 0);
            if present == 0 {
                break;
            }
        }
        let chunks = first_absent / each;
        for &chunk in &path[..chunks] {
            if !engine.hints.is_fresh(chunk, now_ns, opts.fresh_ns) {
                engine.hints.insert(chunk, now_ns);
            }
        }
        Found { chunks, trips }
    }

    /// Number of leading chunks that may be fetched in this second.
    fn allowed(&mut self, path: &[u32]) -> usize {
        let second = self.now_ns / SECOND;
        if second != self.hot_second {
            self.hot_second = second;
            self.hot.clear();
        }
        let cap = self.opts.remote.as_ref().map_or(0, |remote| remote.cap);
        let is_free = |chunk: &&u32| {
            let gets = self.hot.get(&u64::from(**chunk)).copied().unwrap_or(0);
            cap == 0 || gets < cap
        };
        path.iter().take_while(is_free).count()
    }

    /// Time to fetch chunks. With `taken` the transfers are queued.
    fn fetch_ns(&mut self, number: usize, path: &[u32], latency_ns: i64, taken: bool) -> f64 {
        let Some(remote) = &mut self.remote else { return 0.0 };
        let (each, now_ns) = (remote.cutting.objects(), self.now_ns);
        let bytes = remote.cutting.chunk_bytes.saturating_mul(path.len() as u64);
        let into = &mut self.engines[number].into;
        let own = if taken { into.enqueue(now_ns, bytes) } else { into.estimate(now_ns, bytes) };
        let objects = path.iter().flat_map(|&chunk| {
            let first = chunk * each as u32;
            first..first + each as u32
        });
        let server_ns = remote.wait(objects, now_ns, taken);
        latency_ns.saturating_add(own.max(server_ns)) as f64
    }

    /// Fetches chunks; returns the number of complete leading ones.
    fn fetch(&mut self, number: usize, request: &Request, from: usize, path: &[u32]) -> usize {
        let Some(remote) = &mut self.remote else { return 0 };
        let (engine, counts, now_ns) = (&mut self.engines[number], &mut self.counts, self.now_ns);
        let each = self.trace.block_tokens();
        let mut whole = path.len();
        for (at, &chunk) in path.iter().enumerate() {
            let gets = self.hot.entry(u64::from(chunk)).or_default();
            *gets += 1;
            self.chunk_peak = self.chunk_peak.max(u64::from(*gets));
            let mut chunk_bytes = 0;
            for run in 0..remote.cutting.objects() {
                let object = remote.object(chunk, run);
                counts.gets += 1;
                if remote.get(object, now_ns) {
                    chunk_bytes += remote.cutting.bytes[run];
                    continue;
                }
                counts.stale += 1;
                engine.hints.remove(chunk);
                engine.absent.insert(object, now_ns);
                whole = whole.min(at);
            }
            counts.get_bytes += chunk_bytes;
            engine.share.get_bytes += chunk_bytes;
            if whole <= at {
                counts.wasted_bytes += chunk_bytes;
                continue;
            }
            let tokens =
                request.tokens_of(from + at + 1, each) - request.tokens_of(from + at, each);
            match remote.writer(remote.object(chunk, 0)) == number {
                true => counts.own_tokens += tokens,
                false => counts.other_tokens += tokens,
            }
        }
        whole
    }

    /// Uploads a chunk, unless it is known to be in the remote.
    pub(super) fn upload(&mut self, number: usize, chunk: u32, now_ns: i64) {
        let (Some(remote), Some(opts)) = (&mut self.remote, &self.opts.remote) else { return };
        let (engine, counts) = (&mut self.engines[number], &mut self.counts);
        counts.sends += 1;
        if engine.hints.contains(chunk) {
            counts.spared_sends += 1;
            return;
        }
        if opts.lookup_before_put && !remote.has_failed(chunk) {
            let objects = remote.cutting.objects();
            let is_there = |run: &usize| remote.lookup(remote.object(chunk, *run), now_ns);
            let present = (0..objects).filter(is_there).count();
            counts.lookups += objects as u64;
            counts.put_lookups += objects as u64;
            counts.lookup_batches += 1;
            engine.share.lookups += objects as u64;
            if present == objects {
                engine.hints.insert(chunk, now_ns);
                counts.spared_sends += 1;
                return;
            }
        }
        let host_bytes = self.opts.host.blocks as f64 * remote.cutting.chunk_bytes as f64;
        if engine.out.waiting(now_ns) > host_bytes * OUT_PART {
            counts.dropped_sends += 1;
            return;
        }
        let sent_ns = engine.out.enqueue(now_ns, remote.cutting.chunk_bytes);
        let at_ns = now_ns.saturating_add(sent_ns).saturating_add(opts.latency_ns);
        self.sent += 1;
        self.pending.push(Reverse((at_ns, self.sent, number as u32, chunk, true)));
    }

    /// An upload has arrived at the shards.
    pub(super) fn store(&mut self, number: usize, chunk: u32, now_ns: i64) -> Result<()> {
        let Some(remote) = &mut self.remote else { return Ok(()) };
        let (engine, counts) = (&mut self.engines[number], &mut self.counts);
        let mut away = 0;
        for run in 0..remote.cutting.objects() {
            let object = remote.object(chunk, run);
            let bytes = remote.cutting.bytes[run];
            match remote.put(object, number, now_ns)? {
                Put::Failed => {
                    away += 1;
                    continue;
                }
                Put::Stored => counts.stored += 1,
                Put::Exists => {
                    counts.duplicates += 1;
                    counts.duplicate_bytes += bytes;
                }
            }
            counts.puts += 1;
            counts.put_bytes += bytes;
            engine.share.put_bytes += bytes;
            engine.absent.remove(object);
        }
        counts.away_puts += away;
        if away == 0 {
            engine.hints.insert(chunk, now_ns);
        }
        Ok(())
    }
}
