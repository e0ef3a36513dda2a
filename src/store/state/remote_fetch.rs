//! Remote fetches. Jobs for cells of one object share one request; other cells of the object are
//! kept where there is memory. Also prefetches KV that a session will need.

use std::collections::VecDeque;

use crate::base::budget::Tier;
use crate::base::status::Status;
use crate::base::sync::Arc;
use crate::format::record;
use crate::meta::chunks::{Arrival, Begin, Cell, Location};
use crate::store::plan;
use crate::store::state::chunk_table::note;
use crate::store::state::eviction::owner_of;
use crate::store::state::plans::PlanTerms;
use crate::store::state::remote::{RemoteTier, Ticket, What, time_of};
use crate::store::state::session::{CellRange, Views, Wanted};
use crate::store::state::stage::Load;
use crate::store::state::transfer::{Level, Step, TransferKind};
use crate::store::state::work::WorkerKind;
use crate::store::state::{At, StoreState};
use crate::tier::host::Piece;
use crate::tier::remote::breaker::{Direction, Permit};
use crate::tier::remote::object::{Place as Goal, Verdict};
use crate::tier::remote::shape::Shape;
use crate::tier::remote::{Name, RemoteError};

/// An object that jobs wait for. One of them is in the queue for all.
#[derive(Default)]
pub(super) struct WantedObject {
    pub jobs: Vec<u32>,
    /// Lane of the queued job.
    lane: usize,
    /// Most urgent waiter for a cell: its lane and session.
    hurry: Option<(usize, u32)>,
}

/// A cell of an object, with the memory that it will be copied to.
#[derive(Clone, Copy, Debug)]
struct Comer {
    layer: u32,
    piece: Piece,
}

/// An object to be fetched.
pub struct Fetch {
    at: At,
    object: u32,
    comers: Vec<Comer>,
    /// Name of the object.
    pub name: Name,
    /// How the chunk is cut into objects.
    pub shape: Arc<Shape>,
    /// Header of the chunk.
    pub chunk: record::Chunk,
    /// Destination of each cell.
    pub places: Vec<Goal>,
    /// Outcome of the request.
    pub result: Result<(), RemoteError>,
    /// Outcome of each cell.
    pub verdicts: Vec<Verdict>,
}

// SAFETY: memory of places is named, not owned; whoever carries a fetch out promises that it is
// valid then.
unsafe impl Send for Fetch {}

impl Fetch {
    /// Index of the object in its chunk.
    pub fn object(&self) -> usize {
        self.object as usize
    }

    /// Whether the object arrived whole with wrong content.
    fn is_damaged(&self) -> bool {
        self.result == Err(RemoteError::Damaged) || self.verdicts.contains(&Verdict::Damaged)
    }

    fn bytes(&self) -> u64 {
        self.shape.cells(self.object()).iter().map(|cell| cell.bytes()).sum()
    }
}

/// A batch of fetches.
#[derive(Default)]
pub struct FetchBatch {
    pub(super) load: Load,
    /// The fetches.
    pub fetches: Vec<Fetch>,
    /// It probes an open circuit.
    probes: bool,
    ticket: Ticket,
    /// Timeout of the batch.
    pub timeout_ns: u64,
}

impl FetchBatch {
    pub(super) fn bytes(&self) -> u64 {
        self.fetches.iter().map(Fetch::bytes).sum()
    }

    pub(super) fn all_came(&self) -> bool {
        self.fetches.iter().all(|one| matches!(one.result, Ok(()) | Err(RemoteError::Absent)))
    }
}

impl StoreState {
    /// Whether a cell that is in no tier may be fetched from the remote.
    pub(super) fn may_fetch(&self, table: u32, cell: Cell) -> bool {
        let chunks = &self.tables[table as usize].chunks;
        let marks = chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let hangs = self.all_hang(WorkerKind::Fetch);
        let goes =
            |remote: &RemoteTier| !hangs && remote.breaker.allows(Direction::Read, self.now_ns);
        self.remote.as_deref().is_some_and(goes) && marks.is_some_and(|marks| marks.is_remote())
    }

    /// Queues the fetch of a cell for a job.
    pub(super) fn fetch(&mut self, id: u32, table: u32, cell: Cell) {
        let Some(shape) = self.remote_shape(table) else {
            return self.end_job(id, 0, Some(Status::NotFound.into()));
        };
        let Some(object) = shape.object_of(cell.layer as u32) else { return };
        let Some(piece) = self.get_memory(id, table, cell) else { return };
        let begun = self.tables[table as usize].chunks.begin_copy(cell, Tier::Remote, Tier::Host);
        if !matches!(begun, Ok(Begin::Started)) {
            self.give_back(piece);
            return self.end_job(id, 0, Some(Status::NotFound.into()));
        }
        let job = &mut self.transfers.jobs[id];
        (job.piece, job.step) = (Some(piece), Step::Fetches);
        let at = At { table, slot: cell.chunk };
        self.want(at, object as u32, id, &shape);
    }

    /// Adds a job to the waiters for an object.
    fn want(&mut self, at: At, object: u32, id: u32, shape: &Shape) {
        let Some(remote) = &mut self.remote else { return };
        remote.wanted.entry((at, object)).or_default().jobs.push(id);
        self.line_up(at, object, shape);
    }

    /// Removes a job from the waiters for an object. Another one may have to be queued in its
    /// place.
    pub(super) fn unwant(&mut self, id: u32, table: u32, cell: Cell) {
        let Some(shape) = self.remote_shape(table) else { return };
        let Some(object) = shape.object_of(cell.layer as u32) else { return };
        let (at, object) = (At { table, slot: cell.chunk }, object as u32);
        let Some(remote) = &mut self.remote else { return };
        let Some(wanted) = remote.wanted.get_mut(&(at, object)) else { return };
        wanted.jobs.retain(|&job| job != id);
        remote.fetch.queue.remove(id);
        match wanted.jobs.is_empty() {
            true => drop(remote.wanted.remove(&(at, object))),
            false => self.line_up(at, object, &shape),
        }
    }

    /// A job waits for a cell that is being fetched or queued: the object gets the job's urgency if
    /// that is higher.
    pub(super) fn expedite_fetch(&mut self, id: u32, at: At, layer: usize) {
        if self.remote.as_ref().is_none_or(|remote| remote.wanted.is_empty()) {
            return;
        }
        let Some(shape) = self.remote_shape(at.table) else { return };
        let Some(object) = shape.object_of(layer as u32) else { return };
        let one = &self.transfers.table[self.transfers.jobs[id].number].spec;
        let (lane, flow, object) = (one.lane, one.flow, object as u32);
        let Some(remote) = &mut self.remote else { return };
        let Some(wanted) = remote.wanted.get_mut(&(at, object)) else { return };
        if wanted.lane > lane {
            wanted.hurry = Some((lane, flow));
            self.line_up(at, object, &shape);
        }
    }

    /// Queues one waiter for an object, at the urgency of the most urgent one.
    fn line_up(&mut self, at: At, object: u32, shape: &Shape) {
        let Some(remote) = &mut self.remote else { return };
        let Some(wanted) = remote.wanted.get_mut(&(at, object)) else { return };
        let of = |&id: &u32| &self.transfers.table[self.transfers.jobs[id].number].spec;
        let Some(&first) = wanted.jobs.iter().min_by_key(|&id| of(id).lane) else { return };
        let own = (of(&first).lane, of(&first).flow);
        let (lane, flow) = wanted.hurry.filter(|hurry| hurry.0 < own.0).unwrap_or(own);
        if wanted.lane == lane && wanted.jobs.iter().any(|&id| remote.fetch.queue.waits(id)) {
            return;
        }
        for &id in &wanted.jobs {
            remote.fetch.queue.remove(id);
        }
        wanted.lane = lane;
        let bytes = shape.cells(object as usize).iter().map(|cell| cell.bytes()).sum();
        remote.fetch.queue.push(lane, flow, first, bytes);
    }

    /// Takes the next fetches, up to a batch. None while the circuit is open.
    pub(super) fn take_fetches(&mut self) -> Option<FetchBatch> {
        let remote = self.remote.as_mut()?;
        let leave = match remote.is_quiet_to_fetch() {
            true => return None,
            false => remote.breaker.admit(Direction::Read, self.now_ns),
        };
        let most = if leave == Permit::Allow { remote.config.batch } else { 1 };
        let timeout_ns = remote.config.timeout_ns;
        let probes = leave == Permit::Probe;
        let (mut batch, mut bytes) =
            (FetchBatch { timeout_ns, probes, ..FetchBatch::default() }, 0);
        while batch.fetches.len() < most && (bytes < self.config.batch_bytes || bytes == 0) {
            let Some((_, id)) = self.remote.as_mut().and_then(|remote| remote.fetch.queue.pop())
            else {
                break;
            };
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            let Some(fetch) = self.begin_fetch(At { table, slot: cell.chunk }, cell.layer) else {
                log::error!("internal: an object to be fetched has no name");
                continue;
            };
            if leave == Permit::Deny {
                if let Some(remote) = &mut self.remote {
                    remote.counters.skipped_objects += 1;
                }
                self.end_fetch(&fetch);
                continue;
            }
            bytes += fetch.bytes();
            batch.fetches.push(fetch);
        }
        batch.timeout_ns += time_of(bytes);
        if batch.fetches.is_empty() {
            return None;
        }
        let cells = batch.fetches.iter().flat_map(|one| {
            one.comers.iter().map(|comer| (one.at, comer.layer)).collect::<Vec<_>>()
        });
        let what = What::Fetch(cells.collect());
        let watch = &mut self.remote.as_mut()?.watch;
        batch.ticket = watch.begin(self.now_ns, batch.timeout_ns, what, probes);
        Some(batch)
    }

    /// Ends all queued fetches as misses.
    pub(super) fn skip_fetches(&mut self) {
        while let Some(remote) = &mut self.remote {
            let Some((_, id)) = remote.fetch.queue.pop() else { break };
            remote.counters.skipped_objects += 1;
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            if let Some(fetch) = self.begin_fetch(At { table, slot: cell.chunk }, cell.layer) {
                self.end_fetch(&fetch);
            }
        }
    }

    /// Collects the jobs that wait for an object, and its other cells.
    fn begin_fetch(&mut self, at: At, layer: usize) -> Option<Fetch> {
        let shape = self.remote_shape(at.table)?;
        let object = shape.object_of(layer as u32)? as u32;
        let name = self.remote_name(at, &shape, object)?;
        let wanted = self.remote.as_mut()?.wanted.remove(&(at, object))?;
        let layers = shape.layers(object as usize);
        let mut comers: Vec<Comer> = Vec::with_capacity(layers.len());
        for &id in &wanted.jobs {
            let job = &mut self.transfers.jobs[id];
            job.step = Step::Fetching;
            if let Some(piece) = job.piece {
                let layer = job.cell.layer as u32;
                comers.push(Comer { layer, piece });
                self.remote.as_mut()?.awaited.insert((at, layer), id);
            }
        }
        for layer in layers.clone() {
            if comers.iter().all(|comer| comer.layer != layer)
                && let Some(piece) = self.promote_too(at, layer as usize)
            {
                comers.push(Comer { layer, piece });
            }
        }
        let mut places = vec![Goal::NOWHERE; layers.len()];
        for comer in &comers {
            let place = &mut places[(comer.layer - layers.start) as usize];
            let cell = Cell { chunk: at.slot, layer: comer.layer as usize };
            let planes = self.tables[at.table as usize].planes(cell);
            if let Ok(address) = self.host.address(comer.piece) {
                place.planes = [address, address.wrapping_add(planes.k_bytes as usize)];
            }
        }
        let (result, verdicts, chunk) =
            (Err(RemoteError::Busy), Vec::new(), self.remote_record(at));
        Some(Fetch { at, object, comers, name, shape, chunk, places, result, verdicts })
    }

    /// Allocates memory for a cell that no job waits for, if that evicts nothing.
    fn promote_too(&mut self, at: At, layer: usize) -> Option<Piece> {
        let cell = Cell { chunk: at.slot, layer };
        let rows = &mut self.tables[at.table as usize];
        let marks = *rows.chunks.marks(at.slot)?.get(layer)?;
        let host = 1 << Tier::Host as u8;
        let is_free = (marks.there() | marks.arriving() | marks.leaving()) & host == 0;
        let bytes = rows.planes(cell).bytes();
        let most = (self.config.host_bytes as f64 * self.config.low) as u64;
        if !is_free
            || !marks.is_remote()
            || !self.transfers.memory_waiters.is_empty()
            || self.host.live_bytes() + bytes > most
        {
            return None;
        }
        let piece = self.host.alloc_for(bytes, owner_of(at.table, cell)).ok()?;
        match self.tables[at.table as usize].chunks.begin_copy(cell, Tier::Remote, Tier::Host) {
            Ok(Begin::Started) => Some(piece),
            _ => {
                self.give_back(piece);
                None
            }
        }
    }

    pub(super) fn done_fetches(&mut self, batch: &FetchBatch) {
        let in_time = self.remote.as_mut().is_some_and(|remote| remote.watch.end(batch.ticket));
        for fetch in &batch.fetches {
            let heard = if fetch.is_damaged() { Err(RemoteError::Damaged) } else { fetch.result };
            if let Some(remote) = self.remote.as_mut().filter(|_| in_time) {
                remote.heard(Direction::Read, &heard, batch.probes, self.now_ns);
            }
            self.end_fetch(fetch);
        }
        self.follow_breaker();
    }

    /// Ends a fetch for all its waiters.
    fn end_fetch(&mut self, fetch: &Fetch) {
        let (at, now_ns) = (fetch.at, self.now_ns);
        let layers = fetch.shape.layers(fetch.object());
        // An object that arrived whole with wrong content is removed. A cut or malformed reply says
        // nothing about the object.
        let is_damaged = fetch.is_damaged();
        let is_gone =
            is_damaged || matches!(fetch.result, Err(RemoteError::Absent | RemoteError::TooLong));
        let (mut used, before) = (0, self.remote_cells(at));
        for comer in &fetch.comers {
            let verdict = fetch.verdicts.get((comer.layer - layers.start) as usize);
            let arrival = match (&fetch.result, verdict) {
                (Ok(()), Some(Verdict::Sound)) => Arrival::Arrived(Location::Host(comer.piece.0)),
                (Ok(()), _) => Arrival::BadSource,
                (Err(_), _) if is_gone => Arrival::BadSource,
                (Err(_), _) => Arrival::Failed,
            };
            used += self.end_comer(at, comer, arrival);
        }
        if let Some(remote) = &mut self.remote {
            match fetch.result {
                Ok(()) => {
                    remote.counters.fetched_objects += 1;
                    remote.counters.fetched_bytes += used;
                    remote.counters.wasted_bytes += fetch.bytes() - used;
                }
                Err(RemoteError::Absent) => remote.counters.absent_objects += 1,
                Err(_) => {}
            }
            if is_gone {
                remote.known.put(&fetch.name, false, now_ns);
            }
            if is_damaged {
                remote.take_away(fetch.name);
            }
        }
        if is_gone {
            self.forget_hint(at, layers);
            self.note_gap(at, &fetch.shape);
        }
        self.note_remote_index(at, before);
        if used > 0 && self.disk.is_some() && self.is_needed_on_disk(at) {
            // A child is on disk and needs this chunk there.
            self.tables[at.table as usize].set(at.slot, note::FORCED);
            self.queue_writeback(at);
        }
        self.tidy(at.table, at.slot);
    }

    /// An object of a chunk is missing. Lookups answer "absent" for a while, although they ask only
    /// for the last object, and the next put uploads all objects.
    fn note_gap(&mut self, at: At, shape: &Shape) {
        if shape.objects() == 1 {
            return; // it stands for itself
        }
        let last = self.remote_name(at, shape, shape.objects() as u32 - 1);
        if let (Some(name), Some(remote)) = (last, &mut self.remote) {
            remote.known.put(&name, false, self.now_ns);
            self.tables[at.table as usize].set(at.slot, note::GAPPED);
        }
    }

    /// A job that waits for a fetch is cancelled. Its cell may still arrive.
    pub(super) fn leave_fetch(&mut self, id: u32, at: At, layer: usize) {
        self.transfers.jobs[id].piece = None;
        if let Some(remote) = &mut self.remote {
            remote.awaited.remove(&(at, layer as u32));
        }
    }

    /// Ends one cell of a fetch. Returns its bytes if it arrived.
    fn end_comer(&mut self, at: At, comer: &Comer, arrival: Arrival) -> u64 {
        let cell = Cell { chunk: at.slot, layer: comer.layer as usize };
        let rows = &mut self.tables[at.table as usize];
        let bytes = rows.planes(cell).bytes();
        if let Err(error) = rows.chunks.end_copy(cell, Tier::Host, arrival) {
            log::error!("internal: the fetch of a cell could not be ended: {error}");
        }
        let came = matches!(arrival, Arrival::Arrived(_));
        match came {
            true => self.arrived(at.table, cell, Tier::Host),
            false => self.give_back(comer.piece),
        }
        let job = self.remote.as_mut().and_then(|remote| {
            remote.counters.fetched_cells += u64::from(came);
            remote.awaited.remove(&(at, comer.layer))
        });
        if let Some(id) = job {
            let job = &mut self.transfers.jobs[id];
            (job.piece, job.step) = (None, Step::Fresh);
            // A cell that did not arrive is a miss, and is not fetched twice.
            job.gave_up_remote |= !came;
            self.transfers.woken.push(id);
        }
        self.wake(at.table, cell);
        if came { bytes } else { 0 }
    }
}

// ---------- remote prefetch
//
// Prefetches from the remote: once a lookup says what the remote has of a session, everything that
// arrives sooner than it could be computed is fetched.

/// Lane of prefetches.
const LANE: usize = 1;
/// Index of the remote among the sources of a plan.
const ELSEWHERE: usize = 2;

/// Prefetches that the store begins by itself.
#[derive(Default)]
pub(super) struct RemotePrefetch {
    /// Sessions whose KV at the remote has become known.
    line: VecDeque<u32>,
    /// Prefetches in flight, with their sessions.
    moves: Vec<(u32, u32)>,
    is_busy: bool,
    /// Session of the next transfer, if that is a prefetch.
    begins: Option<u32>,
}

impl RemotePrefetch {
    /// Queues a session.
    pub fn add(&mut self, session: u32) {
        if !self.line.contains(&session) {
            self.line.push_back(session);
        }
    }
}

impl StoreState {
    /// Whether a transfer is such a prefetch, which no caller waits for.
    pub(super) fn is_prefetch(&self, number: u32) -> bool {
        let moves = self.remote.as_ref().map_or(&[][..], |remote| &remote.remote_prefetch.moves);
        moves.iter().any(|&(_, one)| one == number)
    }

    /// Records a transfer that begins, if it is a prefetch.
    pub(super) fn prefetch_begins(&mut self, number: u32) {
        if let Some(remote_prefetch) =
            self.remote.as_mut().map(|remote| &mut remote.remote_prefetch)
            && let Some(at) = remote_prefetch.begins.take()
        {
            remote_prefetch.moves.push((at, number));
        }
    }

    /// Forgets a prefetch that has ended.
    pub(super) fn prefetch_ended(&mut self, number: u32) {
        if let Some(remote) = &mut self.remote {
            remote.remote_prefetch.moves.retain(|&(_, one)| one != number);
        }
    }

    /// Begins the prefetch for the next session. Returns false if there is none.
    pub(super) fn fetch_ahead(&mut self) -> bool {
        let Some(remote_prefetch) = self.remote.as_mut().map(|remote| &mut remote.remote_prefetch)
        else {
            return false;
        };
        if remote_prefetch.is_busy {
            return false;
        }
        let Some(at) = remote_prefetch.line.pop_front() else { return false };
        remote_prefetch.is_busy = true;
        self.fetch_for(at);
        if let Some(remote) = &mut self.remote {
            remote.remote_prefetch.is_busy = false;
        }
        true
    }

    fn fetch_for(&mut self, at: u32) {
        let terms = PlanTerms { lane: LANE, ..PlanTerms::default() };
        let Ok(plan) = self.plan(at, &terms) else { return };
        let mut loads = plan.steps.iter().filter(|step| step.kind == plan::StepKind::Load);
        let remote = loads.clone().filter(|step| step.bytes[ELSEWHERE] > 0);
        let mut steps: Vec<(u64, u64)> =
            remote.map(|step| (step.first_token, step.tokens)).collect();
        let end = loads.next_back().map_or(0, |step| step.first_token + step.tokens);
        let Ok(session) = self.session(at) else { return };
        let entry = self.namespaces[session.namespace as usize];
        let layers = self.tables[entry.table as usize].layout.layers();
        // Without holes a session continues at one point, and needs only what that point needs.
        let wanted = if entry.holes { Wanted::All } else { Wanted::Needed };
        if !entry.holes && !steps.is_empty() {
            steps = vec![(0, end)];
        }
        for (first_token, tokens) in steps {
            let cell_range = CellRange {
                first_token,
                tokens,
                first_layer: 0,
                layers,
                by_layer: false,
                wanted: wanted.clone(),
                views: Arc::new(Views(Vec::new())),
                after: None,
            };
            // Without memory for it now, the cell is fetched when a get asks for it.
            if let Some(remote) = &mut self.remote {
                remote.remote_prefetch.begins = Some(at);
            }
            if let Err(error) =
                self.submit_cell_range(at, TransferKind::Prefetch, Level::Ram, LANE, cell_range)
            {
                log::debug!("no prefetch from the remote: {error}");
            }
            if let Some(remote) = &mut self.remote {
                remote.remote_prefetch.begins = None;
            }
        }
    }

    /// Cancels the prefetches of a session, or of all.
    pub fn cancel_prefetch(&mut self, session: Option<u32>) {
        let Some(remote) = &mut self.remote else { return };
        let is_meant = |at: u32| session.is_none_or(|session| session == at);
        remote.remote_prefetch.line.retain(|&at| !is_meant(at));
        let moves = remote.remote_prefetch.moves.iter().filter(|(at, _)| is_meant(*at));
        for number in moves.map(|&(_, number)| number).collect::<Vec<u32>>() {
            self.cancel(number, Status::Cancelled);
        }
    }
}
