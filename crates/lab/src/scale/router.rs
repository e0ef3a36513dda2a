//! Routing of requests to engines.

use crate::scale::engine::Engine;
use kvtier::base::spec::unknown;
use kvtier::base::status::Result;
use kvtier::meta::index;
use kvtier::trace::requests::{Request, Trace};

/// Load is measured over two intervals of this length.
const STRETCH_NS: i64 = 30_000_000_000;

/// Routing rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    /// Round robin.
    Round,
    /// By session: all requests of one to the same engine.
    Session,
    /// To the engine with the longest prefix match, unless it is overloaded.
    Prefix,
}

/// Every router with its name.
pub const ROUTERS: [(&str, Router); 3] =
    [("round", Router::Round), ("session", Router::Session), ("prefix", Router::Prefix)];

impl Router {
    /// The router with a name.
    pub fn of(name: &str) -> Result<Router> {
        match ROUTERS.iter().find(|(known, _)| *known == name) {
            Some((_, router)) => Ok(*router),
            None => Err(unknown("router", name, 0, &ROUTERS.map(|(name, _)| name))),
        }
    }

    /// The router's name.
    pub fn name(self) -> &'static str {
        ROUTERS.iter().find(|(_, router)| *router == self).map_or("", |(name, _)| *name)
    }
}

/// Recent load of an engine.
#[derive(Clone, Copy, Default)]
pub(super) struct Load {
    stretch: i64,
    now_ns: u64,
    before_ns: u64,
}

impl Load {
    /// Advances the clock.
    fn advance(&mut self, at_ns: i64) {
        let stretch = at_ns / STRETCH_NS;
        match stretch - self.stretch {
            0 => {}
            1 => (self.before_ns, self.now_ns) = (self.now_ns, 0),
            _ => (self.before_ns, self.now_ns) = (0, 0),
        }
        self.stretch = stretch;
    }

    /// Adds work; returns the recent load.
    pub(super) fn add(&mut self, at_ns: i64, work_ns: u64) -> u64 {
        self.advance(at_ns);
        self.now_ns = self.now_ns.saturating_add(work_ns);
        self.now_ns.saturating_add(self.before_ns)
    }
}

/// The engine for a request.
pub(super) fn pick(
    router: Router,
    engines: &mut [Engine],
    trace: &Trace,
    at: usize,
    session: u32,
    load_bound: f64,
    now_ns: i64,
) -> usize {
    let count = engines.len() as u128;
    match router {
        Router::Round => at % engines.len(),
        Router::Session => {
            ((u128::from(index::hash(u64::from(session) ^ 0x5E55)) * count) >> 64) as usize
        }
        Router::Prefix => {
            let request = &trace.requests()[at];
            let loads: Vec<u64> = engines.iter_mut().map(|e| e.load.add(now_ns, 0)).collect();
            longest(engines, &loads, trace, request, load_bound)
        }
    }
}

/// The engine with the longest match that is not overloaded; among equals the one with the lowest
/// load, then the first.
fn longest(
    engines: &[Engine],
    loads: &[u64],
    trace: &Trace,
    request: &Request,
    load_bound: f64,
) -> usize {
    let total: u128 = loads.iter().map(|&ns| u128::from(ns)).sum();
    let most = total as f64 / engines.len() as f64 * load_bound;
    let path = trace.blocks(request);
    let mut best = (0, 0, u64::MAX);
    for (number, (engine, &load)) in engines.iter().zip(loads).enumerate() {
        if load as f64 > most {
            continue;
        }
        let found = engine.leading(path);
        let (_, longest, least) = best;
        if found > longest || (found == longest && load < least) {
            best = (number, found, load);
        }
    }
    best.0
}
