//! Remote fetches. Jobs for cells of one object share one request; other cells of the object are
//! kept where there is memory. Also prefetches KV that a session will need.

use std::collections::VecDeque;

use crate::base::budget::Tier;
use crate::base::status::Status;
use crate::base::sync::Arc;
use crate::format::record;
use crate::meta::chunks::{Arrival, Begin, Cell, Location};
use crate::store::job_queues::LANES;
use crate::store::plan;
use crate::store::state::batches::Load;
use crate::store::state::batches::WorkerKind;
use crate::store::state::chunk_table::note;
use crate::store::state::plans::PlanTerms;
use crate::store::state::remote::{RemoteTier, RequestKind, Ticket, time_of};
use crate::store::state::session::{CellRange, Views, Wanted};
use crate::store::state::tier_cache::owner_of;
use crate::store::state::transfer::{Level, Step, TransferKind};
use crate::store::state::{At, StoreState};
use crate::tier::host::Piece;
use crate::tier::remote::breaker::{Direction, Permit};
use crate::tier::remote::object::{Place as Destination, Verdict};
use crate::tier::remote::shape::Shape;
use crate::tier::remote::{Name, RemoteError};

/// A batch is as long as so many delays of the remote, and has at least so many bytes: longer ones
/// gain little, and their first cells wait for the last.
const BATCH_DELAYS: f64 = 8.0;
const LEAST_BATCH_BYTES: u64 = 1 << 20;
/// Batches that queued fetches are divided into: all workers have a part.
const FETCH_BATCHES: u64 = 8;

/// An object that jobs wait for. One of them is in the queue for all.
#[derive(Default)]
pub(super) struct RequestedObject {
    pub jobs: Vec<u32>,
    /// Lane of the queued job.
    lane: usize,
    /// Most urgent waiter for a cell: its lane and session.
    boost: Option<(usize, u32)>,
}

/// A cell of an object, with the memory that it will be copied to.
#[derive(Clone, Copy, Debug)]
struct FetchTarget {
    layer: u32,
    piece: Piece,
}

/// An object to be fetched.
pub struct Fetch {
    at: At,
    object: u32,
    targets: Vec<FetchTarget>,
    /// Name of the object.
    pub name: Name,
    /// How the chunk is cut into objects.
    pub shape: Arc<Shape>,
    /// Header of the chunk.
    pub chunk: record::Chunk,
    /// Destination of each cell.
    pub places: Vec<Destination>,
    /// Outcome of the request.
    pub result: Result<(), RemoteError>,
    /// Outcome of each cell.
    pub verdicts: Vec<Verdict>,
}

// SAFETY: memory of places is named, not owned; the executor of a fetch guarantees that it is
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

    pub(super) fn all_arrived(&self) -> bool {
        self.fetches.iter().all(|fetch| matches!(fetch.result, Ok(()) | Err(RemoteError::Absent)))
    }
}

impl StoreState {
    /// Whether a cell that is in no tier may be fetched from the remote.
    pub(super) fn may_fetch(&self, table: u32, cell: Cell) -> bool {
        let chunks = &self.tables[table as usize].chunks;
        let marks = chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let hangs = self.all_hang(WorkerKind::Fetch);
        let may_read =
            |remote: &RemoteTier| !hangs && remote.breaker.allows(Direction::Read, self.now_ns);
        self.remote.as_deref().is_some_and(may_read) && marks.is_some_and(|marks| marks.is_remote())
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
        self.request_object(at, object as u32, id, &shape);
    }

    /// Adds a job to the waiters for an object.
    fn request_object(&mut self, at: At, object: u32, id: u32, shape: &Shape) {
        let Some(remote) = &mut self.remote else { return };
        remote.requested.entry((at, object)).or_default().jobs.push(id);
        self.queue_object(at, object, shape);
    }

    /// Removes a job from the waiters for an object. Another one may have to be queued in its
    /// place.
    pub(super) fn withdraw_request(&mut self, id: u32, table: u32, cell: Cell) {
        let Some(shape) = self.remote_shape(table) else { return };
        let Some(object) = shape.object_of(cell.layer as u32) else { return };
        let (at, object) = (At { table, slot: cell.chunk }, object as u32);
        let Some(remote) = &mut self.remote else { return };
        let Some(requested) = remote.requested.get_mut(&(at, object)) else { return };
        requested.jobs.retain(|&job| job != id);
        remote.fetch.queue.remove(id);
        match requested.jobs.is_empty() {
            true => drop(remote.requested.remove(&(at, object))),
            false => self.queue_object(at, object, &shape),
        }
    }

    /// A job waits for a cell that is being fetched or queued: the object gets the job's urgency if
    /// that is higher.
    pub(super) fn expedite_fetch(&mut self, id: u32, at: At, layer: usize) {
        if self.remote.as_ref().is_none_or(|remote| remote.requested.is_empty()) {
            return;
        }
        let Some(shape) = self.remote_shape(at.table) else { return };
        let Some(object) = shape.object_of(layer as u32) else { return };
        let spec = &self.transfers.table[self.transfers.jobs[id].number].spec;
        let (lane, flow, object) = (spec.lane, spec.flow, object as u32);
        let Some(remote) = &mut self.remote else { return };
        let Some(requested) = remote.requested.get_mut(&(at, object)) else { return };
        if requested.lane > lane {
            requested.boost = Some((lane, flow));
            self.queue_object(at, object, &shape);
        }
    }

    /// Queues one waiter for an object, at the urgency of the most urgent one.
    fn queue_object(&mut self, at: At, object: u32, shape: &Shape) {
        let Some(remote) = &mut self.remote else { return };
        let Some(requested) = remote.requested.get_mut(&(at, object)) else { return };
        let of = |&id: &u32| &self.transfers.table[self.transfers.jobs[id].number].spec;
        let Some(&first) = requested.jobs.iter().min_by_key(|&id| of(id).lane) else { return };
        let own = (of(&first).lane, of(&first).flow);
        let (lane, flow) = requested.boost.filter(|boost| boost.0 < own.0).unwrap_or(own);
        if requested.lane == lane
            && requested.jobs.iter().any(|&id| remote.fetch.queue.is_queued(id))
        {
            return;
        }
        for &id in &requested.jobs {
            remote.fetch.queue.remove(id);
        }
        requested.lane = lane;
        let bytes = shape.cells(object as usize).iter().map(|cell| cell.bytes()).sum();
        remote.fetch.queue.push(lane, flow, first, bytes);
    }

    /// Takes the next fetches, up to a batch. None while the circuit is open.
    pub(super) fn take_fetches(&mut self) -> Option<FetchBatch> {
        let remote = self.remote.as_mut()?;
        let permit = match remote.is_quiet_to_fetch() {
            true => return None,
            false => remote.breaker.admit(Direction::Read, self.now_ns),
        };
        let most = if permit == Permit::Allow { remote.config.batch } else { 1 };
        let queued_bytes: u64 = (0..LANES).map(|lane| remote.fetch.queue.waiting(lane).1).sum();
        let most_bytes = remote.fetch.bandwidth.bytes_in(BATCH_DELAYS);
        let most_bytes = most_bytes.min(queued_bytes / FETCH_BATCHES);
        let most_bytes = most_bytes.max(LEAST_BATCH_BYTES).min(self.config.batch_bytes);
        let timeout_ns = remote.config.timeout_ns;
        let probes = permit == Permit::Probe;
        let (mut batch, mut bytes) =
            (FetchBatch { timeout_ns, probes, ..FetchBatch::default() }, 0);
        while batch.fetches.len() < most && (bytes < most_bytes || bytes == 0) {
            let Some((_, id)) = self.remote.as_mut().and_then(|remote| remote.fetch.queue.pop())
            else {
                break;
            };
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            let Some(fetch) = self.begin_fetch(At { table, slot: cell.chunk }, cell.layer) else {
                log::error!("internal: an object to be fetched has no name");
                continue;
            };
            if permit == Permit::Deny {
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
        let cells = batch.fetches.iter().flat_map(|fetch| {
            fetch.targets.iter().map(|target| (fetch.at, target.layer)).collect::<Vec<_>>()
        });
        let kind = RequestKind::Fetch(cells.collect());
        let watch = &mut self.remote.as_mut()?.watch;
        batch.ticket = watch.begin(self.now_ns, batch.timeout_ns, kind, probes);
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
        let requested = self.remote.as_mut()?.requested.remove(&(at, object))?;
        let layers = shape.layers(object as usize);
        let mut targets: Vec<FetchTarget> = Vec::with_capacity(layers.len());
        for &id in &requested.jobs {
            let job = &mut self.transfers.jobs[id];
            job.step = Step::Fetching;
            if let Some(piece) = job.piece {
                let layer = job.cell.layer as u32;
                targets.push(FetchTarget { layer, piece });
                self.remote.as_mut()?.awaited.insert((at, layer), id);
            }
        }
        for layer in layers.clone() {
            if targets.iter().all(|target| target.layer != layer)
                && let Some(piece) = self.allocate_extra(at, layer as usize)
            {
                targets.push(FetchTarget { layer, piece });
            }
        }
        let mut places = vec![Destination::NOWHERE; layers.len()];
        for target in &targets {
            let place = &mut places[(target.layer - layers.start) as usize];
            let cell = Cell { chunk: at.slot, layer: target.layer as usize };
            let planes = self.tables[at.table as usize].planes(cell);
            if let Ok(address) = self.host.address(target.piece) {
                place.planes = [address, address.wrapping_add(planes.k_bytes as usize)];
            }
        }
        let (result, verdicts, chunk) =
            (Err(RemoteError::Busy), Vec::new(), self.remote_record(at));
        Some(Fetch { at, object, targets, name, shape, chunk, places, result, verdicts })
    }

    /// Allocates memory for a cell that no job waits for, if that evicts nothing.
    fn allocate_extra(&mut self, at: At, layer: usize) -> Option<Piece> {
        let cell = Cell { chunk: at.slot, layer };
        let rows = &mut self.tables[at.table as usize];
        let marks = *rows.chunks.marks(at.slot)?.get(layer)?;
        let host = 1 << Tier::Host as u8;
        let is_free = (marks.resident_tiers() | marks.arriving() | marks.leaving()) & host == 0;
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
            let outcome = if fetch.is_damaged() { Err(RemoteError::Damaged) } else { fetch.result };
            if let Some(remote) = self.remote.as_mut().filter(|_| in_time) {
                remote.record_outcome(Direction::Read, &outcome, batch.probes, self.now_ns);
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
        let is_unusable =
            is_damaged || matches!(fetch.result, Err(RemoteError::Absent | RemoteError::TooLong));
        let (mut used, before) = (0, self.remote_cells(at));
        for target in &fetch.targets {
            let verdict = fetch.verdicts.get((target.layer - layers.start) as usize);
            let arrival = match (&fetch.result, verdict) {
                (Ok(()), Some(Verdict::Sound)) => Arrival::Arrived(Location::Host(target.piece.0)),
                (Ok(()), _) => Arrival::BadSource,
                (Err(_), _) if is_unusable => Arrival::BadSource,
                (Err(_), _) => Arrival::Failed,
            };
            used += self.end_target(at, target, arrival);
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
            if is_unusable {
                remote.known.put(&fetch.name, false, now_ns);
            }
            if is_damaged {
                remote.queue_removal(fetch.name);
            }
        }
        if is_unusable {
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

    /// An object of a chunk is missing. Lookups answer "absent" for a while, although they query only
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
    pub(super) fn abandon_fetch(&mut self, id: u32, at: At, layer: usize) {
        self.transfers.jobs[id].piece = None;
        if let Some(remote) = &mut self.remote {
            remote.awaited.remove(&(at, layer as u32));
        }
    }

    /// Ends one cell of a fetch. Returns its bytes if it arrived.
    fn end_target(&mut self, at: At, target: &FetchTarget, arrival: Arrival) -> u64 {
        let cell = Cell { chunk: at.slot, layer: target.layer as usize };
        let rows = &mut self.tables[at.table as usize];
        let bytes = rows.planes(cell).bytes();
        if let Err(error) = rows.chunks.end_copy(cell, Tier::Host, arrival) {
            log::error!("internal: the fetch of a cell could not be ended: {error}");
        }
        let has_arrived = matches!(arrival, Arrival::Arrived(_));
        match has_arrived {
            true => self.arrived(at.table, cell, Tier::Host),
            false => self.give_back(target.piece),
        }
        let job = self.remote.as_mut().and_then(|remote| {
            remote.counters.fetched_cells += u64::from(has_arrived);
            remote.awaited.remove(&(at, target.layer))
        });
        if let Some(id) = job {
            let job = &mut self.transfers.jobs[id];
            (job.piece, job.step) = (None, Step::Fresh);
            // A cell that did not arrive is a miss, and is not fetched twice.
            job.gave_up_remote |= !has_arrived;
            self.transfers.woken.push(id);
        }
        self.wake(at.table, cell);
        if has_arrived { bytes } else { 0 }
    }
}

// ---------- remote prefetch
//
// Prefetches from the remote. Once a lookup has found the chunks of a session, chunks that arrive
// sooner than they could be computed are fetched.

/// Lane of prefetches.
const LANE: usize = 1;
/// Index of the remote among the sources of a plan.
const ELSEWHERE: usize = 2;

/// Prefetches that the store begins by itself.
#[derive(Default)]
pub(super) struct RemotePrefetch {
    /// Sessions whose KV at the remote has become known.
    queue: VecDeque<u32>,
    /// Prefetches in flight, with their sessions.
    transfers: Vec<(u32, u32)>,
    is_busy: bool,
    /// Session of the next transfer, if that is a prefetch.
    begins: Option<u32>,
}

impl RemotePrefetch {
    /// Queues a session.
    pub fn add(&mut self, session: u32) {
        if !self.queue.contains(&session) {
            self.queue.push_back(session);
        }
    }
}

impl StoreState {
    /// Whether a transfer is such a prefetch, which no caller waits for.
    pub(super) fn is_prefetch(&self, number: u32) -> bool {
        let transfers =
            self.remote.as_ref().map_or(&[][..], |remote| &remote.remote_prefetch.transfers);
        transfers.iter().any(|&(_, one)| one == number)
    }

    /// Records a transfer that begins, if it is a prefetch.
    pub(super) fn prefetch_begins(&mut self, number: u32) {
        if let Some(remote_prefetch) =
            self.remote.as_mut().map(|remote| &mut remote.remote_prefetch)
            && let Some(at) = remote_prefetch.begins.take()
        {
            remote_prefetch.transfers.push((at, number));
        }
    }

    /// Forgets a prefetch that has ended.
    pub(super) fn prefetch_ended(&mut self, number: u32) {
        if let Some(remote) = &mut self.remote {
            remote.remote_prefetch.transfers.retain(|&(_, one)| one != number);
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
        let Some(at) = remote_prefetch.queue.pop_front() else { return false };
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
                views: Arc::new(Views::from(Vec::new())),
                after: None,
            };
            // Without memory for it now, the cell is fetched when a get requests it.
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
        let is_selected = |at: u32| session.is_none_or(|session| session == at);
        remote.remote_prefetch.queue.retain(|&at| !is_selected(at));
        let transfers = remote.remote_prefetch.transfers.iter().filter(|(at, _)| is_selected(*at));
        for number in transfers.map(|&(_, number)| number).collect::<Vec<u32>>() {
            self.cancel(number, Status::Cancelled);
        }
    }
}
