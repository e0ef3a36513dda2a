//! Watches remote requests that do not return: a directory on a dead mount, a callback of the
//! engine, a name resolver. Connections keep their deadlines, so most requests never get here. After
//! twice its timeout the core stops waiting for a request: gets miss, lookups end without an answer,
//! puts of level remote fail. The request keeps its memory until it returns.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::status::{Error, Status};
use crate::meta::chunks::Cell;
use crate::store::state::remote_lookup::Asker;
use crate::store::state::transfer::TransferKind;
use crate::store::state::wait_list::Of;
use crate::store::state::work::WorkerKind;
use crate::store::state::{At, StoreState};
use crate::tier::remote::Trouble;
use crate::tier::remote::breaker::Way;

/// The time at which the core stops waiting for a request, and the number of the request.
pub(super) type Ticket = (u64, u64);

/// What a request transfers or asks.
pub(super) enum What {
    /// These cells are fetched.
    Fetch(Vec<(At, u32)>),
    /// This is asked for somebody, of this serial.
    Ask(Asker, u64),
    /// Objects of these chunks are sent.
    Send(Vec<At>),
}

impl What {
    fn workers(&self) -> WorkerKind {
        match self {
            What::Fetch(_) => WorkerKind::Fetch,
            What::Ask(..) => WorkerKind::Ask,
            What::Send(_) => WorkerKind::Send,
        }
    }
}

struct Request {
    what: What,
    /// It is to see if the remote is well again.
    probes: bool,
}

/// The requests that are under way.
#[derive(Default)]
pub(super) struct Watch {
    begun: u64,
    open: BTreeMap<Ticket, Request>,
    /// Requests that the core no longer waits for.
    hung: BTreeMap<Ticket, What>,
    /// The cells that hung fetches would bring.
    cells: BTreeSet<(At, u32)>,
}

impl Watch {
    /// A request begins that has so long by itself.
    pub fn begin(&mut self, now_ns: u64, timeout_ns: u64, what: What, probes: bool) -> Ticket {
        self.begun += 1;
        let ticket = (now_ns.saturating_add(timeout_ns.saturating_mul(2)), self.begun);
        self.open.insert(ticket, Request { what, probes });
        ticket
    }

    /// Ends the watch of a request that has returned. Returns false if the core had stopped waiting:
    /// the breaker has counted such a request already.
    pub fn end(&mut self, ticket: Ticket) -> bool {
        let in_time = self.open.remove(&ticket).is_some();
        if let Some(What::Fetch(cells)) = self.hung.remove(&ticket) {
            self.cells.retain(|cell| !cells.contains(cell));
        }
        in_time
    }

    fn hung_of(&self, workers: WorkerKind) -> u32 {
        self.hung.values().filter(|what| what.workers() == workers).count() as u32
    }
}

impl StoreState {
    /// When the next request becomes overdue.
    pub fn watch_ns(&self) -> Option<u64> {
        let (ticket, _) = self.remote.as_ref()?.watch.open.first_key_value()?;
        Some(ticket.0)
    }

    /// How many requests of a worker kind hang.
    pub(super) fn hung(&self, workers: WorkerKind) -> u32 {
        self.remote.as_ref().map_or(0, |remote| remote.watch.hung_of(workers))
    }

    /// Whether all workers of a kind hang.
    pub(super) fn all_hang(&self, workers: WorkerKind) -> bool {
        let count = self.remote.as_ref().map_or(0, |remote| match workers {
            WorkerKind::Fetch => remote.config.fetchers,
            _ => 1,
        });
        count > 0 && self.hung(workers) >= count
    }

    /// Stops waiting for every request that is overdue.
    pub(super) fn leave_overdue(&mut self) {
        while let Some(remote) = &mut self.remote {
            let Some(first) = remote.watch.open.first_entry() else { break };
            let ticket = *first.key();
            if ticket.0 > self.now_ns {
                break;
            }
            let Request { what, probes } = first.remove();
            remote.counters.hung += 1;
            let way = if what.workers() == WorkerKind::Send { Way::Write } else { Way::Read };
            log::warn!(
                "a remote request ({:?}) has not returned after twice its timeout: the store no \
                 longer waits for it. Check the remote's mount, server or callback",
                what.workers()
            );
            remote.heard(way, &Err::<(), _>(Trouble::Late), probes, self.now_ns);
            if let What::Fetch(cells) = &what {
                remote.watch.cells.extend(cells.iter().copied());
            }
            self.follow_breaker();
            match &what {
                What::Fetch(cells) => cells.iter().for_each(|&(at, layer)| self.miss(at, layer)),
                What::Ask(asker, serial) => self.leave_question(*asker, *serial),
                What::Send(chunks) => chunks.iter().for_each(|&at| self.leave_send(at)),
            }
            if let Some(remote) = &mut self.remote {
                remote.watch.hung.insert(ticket, what);
            }
        }
        self.leave_queues();
    }

    /// Ends queued requests of a kind whose workers all hang.
    pub(super) fn leave_queues(&mut self) {
        if self.remote.as_ref().is_none_or(|remote| remote.watch.hung.is_empty()) {
            return;
        }
        if self.all_hang(WorkerKind::Fetch) {
            self.avoid_fetches();
        }
        if self.all_hang(WorkerKind::Ask) {
            self.avoid_questions();
        }
    }

    /// Ends a lookup without an answer.
    fn leave_question(&mut self, asker: Asker, serial: u64) {
        let Some(remote) = &mut self.remote else { return };
        if remote.asking.inquiries.get(&asker).is_some_and(|one| one.serial == serial) {
            self.end_inquiry(asker);
        }
    }

    /// Ends all queued lookups without an answer.
    fn avoid_questions(&mut self) {
        while let Some(asker) =
            self.remote.as_mut().and_then(|remote| remote.asking.line.pop_front())
        {
            self.end_inquiry(asker);
        }
    }

    /// Whether a hung fetch would bring a cell.
    pub(super) fn is_hung(&self, at: At, layer: usize) -> bool {
        let remote = self.remote.as_ref();
        remote.is_some_and(|remote| remote.watch.cells.contains(&(at, layer as u32)))
    }

    /// Ends a job that waits for a cell of a hung fetch.
    pub(super) fn end_hung(&mut self, id: u32) {
        let number = self.jobs[id].number;
        let error = match self.moves[number].spec.kind {
            TransferKind::Put => Error::new(
                Status::Unavailable,
                "the remote is fetching that cell, and does not answer: put it again later",
            ),
            TransferKind::Get | TransferKind::Prefetch => {
                self.counters.misses += u64::from(!self.is_prefetch(number));
                Status::NotFound.into()
            }
        };
        self.end_job(id, 0, Some(error));
    }

    /// Ends every job that waits for a cell of a hung fetch.
    fn miss(&mut self, at: At, layer: u32) {
        let own = self.remote.as_mut().and_then(|remote| remote.awaited.remove(&(at, layer)));
        if let Some(id) = own {
            self.jobs[id].piece = None;
            self.end_hung(id);
        }
        let cell = Cell { chunk: at.slot, layer: layer as usize };
        let Some(mut line) = self.waiting.remove(&(at, cell.layer)) else { return };
        while let Some(id) = line.pop_back(&mut self.jobs, Of::Wait) {
            self.end_hung(id);
        }
    }
}
