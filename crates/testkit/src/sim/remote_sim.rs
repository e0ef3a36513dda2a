//! Stores with a faulty remote, which outlives them.

use crate::remote::simulated::{Fault, Plan, Simulated};
use crate::sim::world::{Outcome, Submitted, World};
use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::store::executor::remote::RemoteExecutor;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{RemoteConfig, SessionOpts, Write};

/// Remote of a run.
pub(super) struct RemoteSim {
    random: Random,
    remote: Simulated,
    config: RemoteConfig,
}

impl RemoteSim {
    /// For a seed: every third. The other seeds run as without.
    pub(super) fn of(seed: u64, clock: &Clock) -> Option<RemoteSim> {
        let mut random = Random::new(seed ^ 0xFA27);
        (seed % 3 == 1).then(|| {
            let config = RemoteConfig {
                object_bytes: 4096 << random.below(5),
                max_bytes: 64 << 20,
                batch: 1 + random.below(8) as usize,
                write: [Write::Through, Write::Back, Write::Never][random.below(3) as usize],
                admission: ["all", "all", "select(hits=1)"][random.below(3) as usize].into(),
                timeout_ns: 1_000_000 + random.below(100_000_000),
                fresh_ns: random.below(10_000_000_000),
                absent_ns: random.below(1_000_000_000),
                known: 4 + random.below(200) as usize,
                lookup_on_append: random.below(4) > 0,
                prefetch_found: random.below(3) == 0,
                seed,
                ..RemoteConfig::default()
            };
            let remote = Simulated::new(seed, plan(&mut random), clock.clone());
            RemoteSim { random, remote, config }
        })
    }

    pub(super) fn config(&self) -> RemoteConfig {
        self.config.clone()
    }

    /// The remote executor of a life.
    pub(super) fn executor(&self, clock: &Clock) -> RemoteExecutor {
        RemoteExecutor::new(Arc::new(self.remote.clone()), clock.clone())
    }
}

/// Faults for a while.
fn plan(random: &mut Random) -> Plan {
    let plan = Plan { down: 1 + random.below(40) as u32, ..Plan::default() };
    match random.below(8) {
        0 | 1 => plan,
        2 => plan.often(Fault::Lost, 30_000).often(Fault::Late, 30_000),
        3 => plan.often(Fault::Flip, 50_000).often(Fault::Truncate, 20_000),
        4 => plan.often(Fault::Reorder, 50_000).often(Fault::Stale, 50_000),
        5 => plan.often(Fault::Full, 100_000).often(Fault::ReadOnly, 20_000),
        6 => plan.often(Fault::Down, 20_000).often(Fault::Failover, 10_000),
        _ => plan.hostile(10_000),
    }
}

impl World {
    /// One random step of the remote.
    pub(super) fn remote_step(&mut self) -> Outcome<()> {
        // Numbers of ended transfers are reused.
        self.collect()?;
        let Some(remote_sim) = &mut self.remote_sim else { return Ok(()) };
        match remote_sim.random.below(40) {
            0 => {
                let plan = plan(&mut remote_sim.random);
                remote_sim.remote.set_plan(plan);
                Ok(())
            }
            1..=4 => self.locate(),
            5..=7 => match self.any_session() {
                Some(at) => self.submit(at, TransferKind::Put, Level::Remote),
                None => Ok(()),
            },
            8..=10 => self.reopen_sessions(),
            11..=13 => match self.any_session() {
                Some(at) => self.submit(at, TransferKind::Get, Level::Ram),
                None => Ok(()),
            },
            14..=17 => self.locate_blocks(),
            _ => Ok(()),
        }
    }

    /// Closes all sessions of a namespace, reclaims memory, and reopens them.
    fn reopen_sessions(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let namespace = self.sessions[at].namespace;
        let mut core = self.core.0.lock();
        for session in self.sessions.iter().filter(|session| session.namespace == namespace) {
            core.close_session(session.number)?;
        }
        core.shrink(self.config.host_bytes);
        for session in self.sessions.iter_mut().filter(|session| session.namespace == namespace) {
            let opts = SessionOpts::default();
            session.number = core.open_session(self.namespaces[namespace as usize], &opts)?;
            core.append(session.number, &session.tokens)?;
        }
        Ok(())
    }

    fn locate(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let (number, tokens) = (self.sessions[at].number, self.sessions[at].tokens.clone());
        let begun = self.core.0.lock().locate(number);
        let Ok(number) = begun else { return Ok(()) };
        let submitted = Submitted {
            kind: TransferKind::Prefetch,
            level: Level::Ram,
            namespace: self.sessions[at].namespace,
            tokens,
            marks: self.sessions[at].marks.clone(),
            first: 0,
            first_layer: 0,
            layers: 1,
            by_layer: false,
            planes: Vec::new(),
            parts_left: 1,
            after: None,
            hidden: Vec::new(),
        };
        self.submitted.insert(number, submitted);
        Ok(())
    }

    /// Whether a lookup may report an object that never existed, because answers were swapped.
    pub(super) fn may_hear_wrong(&self) -> bool {
        self.remote_sim
            .as_ref()
            .is_none_or(|remote_sim| remote_sim.remote.struck(Fault::Reorder) > 0)
    }

    /// Whether faults of the remote may fail a transfer with this status: a put that waits for it, or
    /// a put of a cell that a fetch without an answer would load.
    pub(super) fn may_fail_remote(
        &self,
        (kind, level): (TransferKind, Level),
        status: Status,
    ) -> bool {
        let is_put = kind == TransferKind::Put && self.remote_sim.is_some();
        level == Level::Remote || is_put && status == Status::Unavailable
    }
}
