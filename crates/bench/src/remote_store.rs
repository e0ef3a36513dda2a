//! The cost of a remote for the callers of a store, in processor time of the calling thread, beside
//! the same store without a remote; and plans that recompute where that is faster.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier::base::clock::Clock;
use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::status::{Result, Status};
use kvtier::meta::cost::Cost;
use kvtier::store::plan::StepKind as Planned;
use kvtier::store::spec::{CustomRemote, MakeRemote, StoreSpec};
use kvtier::store::state::plans::PlanTerms;
use kvtier::store::state::{Level, TransferKind};
use kvtier::tier::remote::dir::{Dir, DirOpts};
use kvtier::tier::remote::name::Prefix;
use kvtier::tier::remote::{Caps, Client, Gets, Puts, Queries, Remote, Server as Said};

use super::fixtures::store::{StoreFixture, Tensors, layout};
use super::fixtures::{Outcome, Scratch, say, thread_ns};
use super::remote_server::Server;
use super::{Bar, median};

/// Layers, tokens of a chunk, and bytes of K or V for a token in a layer.
const LAYERS: usize = 8;
const CHUNK: u32 = 16;
const TOKEN_BYTES: u64 = 128;
/// Bytes of a document: 256 tokens.
const DOCUMENT_BYTES: u64 = 512 << 10;
/// Goal for the additional time of a call, in microseconds.
const GOAL_US: f64 = 5.0;
/// Bandwidth of the slow remote, in bytes a second.
const SLOW: f64 = 2e7;
/// Factor by which computing is faster or slower than the slow remote.
const FACTOR: f64 = 8.0;
/// Documents loaded to learn the bandwidth, and documents planned.
const LEARNED: u32 = 6;
const PLANNED: u32 = 12;

/// The bars of the calls.
const CALLS: [&str; 4] =
    ["remote_session", "remote_lookup", "remote_put_submit", "remote_get_submit"];

fn open(spec: &StoreSpec) -> Result<StoreFixture> {
    StoreFixture::from_spec(spec, layout(LAYERS, CHUNK, TOKEN_BYTES)?, None)
}

fn wait(op: &OpRef) -> Result<u64> {
    op.wait(RELEASED, 0)?;
    let (status, value) = (op.info().status.and_then(Status::from_code), op.value());
    op.remove();
    match status {
        Some(Status::Ok) => Ok(value),
        status => Err(status.unwrap_or(Status::Panic).into()),
    }
}

/// Processor microseconds of a call, and its result.
fn timed<R>(call: impl FnOnce() -> Result<R>) -> Result<(f64, R)> {
    let start = thread_ns();
    let result = call()?;
    Ok(((thread_ns() - start) / 1e3, result))
}

/// Microseconds of each call for one document.
fn round(fixture: &StoreFixture, document: u32, tensors: &Tensors) -> Result<[f64; 4]> {
    let opts = OpOpts::default();
    let submit = |session, kind| -> Result<f64> {
        let range = tensors.whole(false);
        let (took, ops) = timed(|| fixture.store.submit(session, kind, Level::Ram, range, &opts))?;
        ops.iter().try_for_each(|op| wait(op).map(drop))?;
        Ok(took)
    };
    let (opened, session) = timed(|| fixture.session(document, tensors.tokens))?;
    let (located, op) = timed(|| fixture.store.locate(session, &opts))?;
    wait(&op)?;
    let put = submit(session, TransferKind::Put)?;
    let got = submit(session, TransferKind::Get)?;
    fixture.end(session)?;
    Ok([opened, located, put, got])
}

fn overheads(server: &Server, quick: bool) -> Result<[Vec<(f64, f64)>; 4]> {
    let tensors = Tensors::with_token_bytes(DOCUMENT_BYTES, LAYERS, TOKEN_BYTES)?;
    // Memory is large enough for all documents. A server at --url receives no objects.
    let write = if server.is_own() { "back" } else { "never" };
    let common = "host=256MiB,policy=lru,copiers=1,chunks=16384";
    let remote =
        format!("redis(url=\"{}\",prefix=\"kvtbench\",write={write},timeout=5000)", server.url);
    let mut spec = StoreSpec::parse(&format!("store({common},remote={remote})"))?;
    if let Some(password) = &server.password {
        spec.secrets.add("password", password)?;
    }
    let with = open(&spec)?;
    let without = open(&StoreSpec::parse(&format!("store({common})"))?)?;
    let mut pairs: [Vec<(f64, f64)>; 4] = Default::default();
    for document in 0..if quick { 100 } else { 400 } {
        let order = match document % 2 {
            0 => (round(&with, document, &tensors)?, round(&without, document, &tensors)?),
            _ => {
                let without = round(&without, document, &tensors)?;
                (round(&with, document, &tensors)?, without)
            }
        };
        // The first documents grow the tables.
        if document >= 20 {
            let each = pairs.iter_mut().zip(order.0.into_iter().zip(order.1));
            each.for_each(|(pairs, one)| pairs.push(one));
        }
    }
    with.close()?;
    without.close()?;
    Ok(pairs)
}

fn overhead_bars(server: &Outcome<Server>, quick: bool) -> Vec<Bar> {
    let of = |bar| {
        Bar::lower(bar, "us more")
            .baseline("us of the calling thread, the same store without a remote")
            .goal(GOAL_US)
    };
    let mut bars = CALLS.map(of);
    let measured = server.as_ref().map_err(Clone::clone);
    match measured.and_then(|server| overheads(server, quick).map_err(say)) {
        Ok(pairs) => {
            for (bar, pairs) in bars.iter_mut().zip(pairs) {
                let (mut with, mut without): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
                let (with, without) = (median(&mut with), median(&mut without));
                (bar.value, bar.baseline_value) = (Some(with - without), Some(without));
                bar.note = "(256 tokens, 16 chunks of 8 layers)".to_string();
            }
        }
        Err(why) => bars.iter_mut().for_each(|bar| bar.note.clone_from(&why)),
    }
    bars.into()
}

/// A remote with slow gets.
struct Slow(Dir);

struct SlowClient(Box<dyn Client>);

impl Remote for Slow {
    fn caps(&self) -> Caps {
        self.0.caps()
    }

    fn client(&self) -> Box<dyn Client> {
        Box::new(SlowClient(self.0.client()))
    }
}

impl Client for SlowClient {
    fn greet(&mut self, deadline_ns: u64) -> Result<Said> {
        self.0.greet(deadline_ns)
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        let start = Instant::now();
        // SAFETY: the caller's promise.
        unsafe { self.0.get(gets, deadline_ns) };
        let bytes: u64 = gets.items.iter().filter_map(|get| get.result.ok()).sum();
        let takes = Duration::from_secs_f64(bytes as f64 / SLOW);
        std::thread::sleep(takes.saturating_sub(start.elapsed()));
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.0.put(puts, deadline_ns) };
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.0.lookup(queries, deadline_ns);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.0.remove(queries, deadline_ns);
    }
}

/// Tokens that a plan loads.
fn loads(fixture: &StoreFixture, session: u32, token_ns: f64) -> Result<u64> {
    let cost = Some(Cost { alpha: 0.0, beta: token_ns });
    let terms = PlanTerms { cost, ..PlanTerms::default() };
    fixture.store.with(|core| {
        let plan = core.plan(session, &terms)?;
        let loads = plan.steps.iter().filter(|step| step.kind == Planned::Load);
        Ok(loads.map(|step| step.tokens).sum())
    })
}

/// The share of tokens that plans load where computing is faster, and where it is slower.
fn plans() -> Outcome<(f64, f64)> {
    let scratch = Scratch::new("remote");
    std::fs::create_dir_all(&scratch.0).map_err(|error| error.to_string())?;
    let tensors = Tensors::with_token_bytes(DOCUMENT_BYTES, LAYERS, TOKEN_BYTES).map_err(say)?;
    let opts = || -> Result<DirOpts> {
        let (prefix, clock) = (Prefix::new("kvtbench")?, Clock::real());
        Ok(DirOpts { path: scratch.0.clone(), prefix, fsync: false, clock })
    };
    let store = |remote: Arc<MakeRemote>| -> Result<StoreFixture> {
        let remote_spec = "custom(prefix=\"kvtbench\",object=64KiB,timeout=60000,require=true)";
        let text = format!("store(host=64MiB,policy=lru,copiers=1,remote={remote_spec})");
        let mut spec = StoreSpec::parse(&text)?;
        spec.custom_remote = Some(CustomRemote(remote));
        open(&spec)
    };
    let measure = || -> Result<(f64, f64)> {
        let place = opts()?;
        let from = store(Arc::new(move |_: &Prefix| Box::new(Dir::new(place.clone()))))?;
        for document in 0..LEARNED + PLANNED {
            let session = from.session(document, tensors.tokens)?;
            from.transfer(session, TransferKind::Put, Level::Remote, tensors.whole(false))?;
            from.end(session)?;
        }
        from.close()?;
        let place = opts()?;
        let to = store(Arc::new(move |_: &Prefix| Box::new(Slow(Dir::new(place.clone())))))?;
        let token_ns = (2 * TOKEN_BYTES * LAYERS as u64) as f64 / SLOW * 1e9;
        let (mut sooner, mut later) = (0, 0);
        for document in 0..LEARNED + PLANNED {
            let session = to.session(document, tensors.tokens)?;
            let found = wait(&to.store.locate(session, &OpOpts::default())?)?;
            if found != tensors.tokens {
                return Err(Status::NotFound.into());
            }
            if document < LEARNED {
                to.transfer(session, TransferKind::Get, Level::Ram, tensors.whole(false))?;
            } else {
                sooner += loads(&to, session, token_ns / FACTOR)?;
                later += loads(&to, session, token_ns * FACTOR)?;
            }
            to.end(session)?;
        }
        to.close()?;
        let all = (u64::from(PLANNED) * tensors.tokens) as f64;
        Ok((sooner as f64 / all, later as f64 / all))
    };
    measure().map_err(say)
}

fn plan_bar() -> Bar {
    let mut bar = Bar::lower("remote_slow_loads", "of tokens")
        .baseline("loaded where computing takes 8 times as long as loading")
        .goal(0.0);
    match plans() {
        Ok((sooner, later)) => {
            (bar.value, bar.baseline_value) = (Some(sooner), Some(later));
            bar.note = "(20 MB/s, learned; computing is 8 times as fast)".to_string();
        }
        Err(why) => bar.note = why,
    }
    bar
}

/// Measures.
pub fn bars(server: &Outcome<Server>, quick: bool) -> Vec<Bar> {
    let mut bars = overhead_bars(server, quick);
    bars.push(plan_bar());
    bars
}
