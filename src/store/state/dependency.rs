//! Transfers that wait for a ready event or a device event. They reference their chunks and hold no
//! memory.

use std::collections::BTreeMap;

use crate::base::status::{Result, Status};
use crate::device::Event;
use crate::fail;
use crate::store::state::batches::CopyBatch;
use crate::store::state::transfer::{Level, Of, Step, TransferKind, TransferSpec, WaitList};
use crate::store::state::{CellRange, Job, StoreState};

// ---------- ready waits

/// What transfers wait for.
#[derive(Default)]
pub(super) struct Dependencies {
    pub(super) tickets: Tickets,
    pub(super) events: DeviceEvents,
}

impl Dependencies {
    /// Checks that nothing waits, for [`StoreState::check`] of an idle store.
    pub(super) fn check_nothing_after(&self) -> Result<()> {
        let DeviceEvents { events, jobs, bytes, .. } = &self.events;
        if !events.is_empty() || *jobs + *bytes != 0 {
            fail!(State, "{} events without transfers, {jobs} jobs, {bytes} bytes", events.len());
        }
        Ok(())
    }

    pub(super) fn first_after_event(&self, event: u64) -> Option<u32> {
        self.events.events.get(&event)?.waiting.first()
    }

    /// A transfer with an event has ended.
    pub(super) fn release_event(&mut self, event: Option<Event>) {
        let Some(event) = event else { return };
        if let Some(dependents) = self.events.events.get_mut(&event.0) {
            dependents.transfers -= 1;
            if dependents.transfers == 0 {
                self.events.events.remove(&event.0);
            }
        }
    }

    /// A transfer depends on an event.
    pub(super) fn join_event(&mut self, event: Option<Event>) {
        if let Some(event) = event {
            self.events.events.entry(event.0).or_default().transfers += 1;
        }
    }

    /// Whether memory will be freed by copies whose event has completed. A pending event may fire
    /// after the very transfers that wait for memory, so none waits for copies that depend on it.
    pub(super) fn is_ending_after_event(&self) -> bool {
        self.events.events.values().any(|dependents| dependents.has_ended && dependents.taken > 0)
    }

    /// A transfer waits no more, or has ended.
    pub(super) fn stop_waiting(&mut self, ticket: Option<u64>) {
        if let Some(ticket) = ticket {
            self.tickets.transfers.remove(&ticket);
        }
    }

    /// Makes a transfer wait for its ticket.
    pub(super) fn add_ticket(&mut self, number: u32, ticket: u64) {
        self.tickets.transfers.insert(ticket, number);
    }

    pub(super) fn next_ticket(&mut self) -> u64 {
        self.tickets.tickets += 1;
        self.tickets.tickets
    }
}

/// Transfers that wait for a ready event, by ticket. Numbers of transfers are reused, tickets are
/// not.
#[derive(Default)]
pub(super) struct Tickets {
    tickets: u64,
    transfers: BTreeMap<u64, u32>,
}

impl StoreState {
    /// As [`StoreState::submit_cell_range`], but no cell begins before
    /// [`StoreState::begin_waiting`]. Returns the number of the transfer and its ticket.
    pub fn submit_waiting(
        &mut self,
        at: u32,
        kind: TransferKind,
        level: Level,
        lane: usize,
        cell_range: CellRange,
    ) -> Result<(u32, u64)> {
        let ticket = self.dependencies.next_ticket();
        let number = self.begin_cell_range(at, (kind, level, lane), cell_range, Some(ticket))?;
        Ok((number, ticket))
    }

    /// The ready event is signalled: the transfer begins, unless it has ended.
    pub fn begin_waiting(&mut self, ticket: u64) {
        if let Some(number) = self.dependencies.tickets.transfers.remove(&ticket) {
            self.transfers.table[number].began_ns = self.now_ns;
            self.transfers.start_later(number);
            self.settle();
        }
    }

    /// The ready event will never be signalled: the transfer ends with this status.
    pub fn give_up_waiting(&mut self, ticket: u64, status: Status) {
        if let Some(&number) = self.dependencies.tickets.transfers.get(&ticket) {
            self.cancel(number, status);
        }
    }

    /// Whether the transfer of a ticket still waits.
    pub fn is_waiting(&self, ticket: u64) -> bool {
        self.dependencies.tickets.transfers.contains_key(&ticket)
    }

    /// Number of transfers that wait.
    pub fn waiting_transfers(&self) -> usize {
        self.dependencies.tickets.transfers.len()
    }
}

// ---------- device events
//
// Transfers that depend on a device event: none of their copies between the engine's tensors and the store run
// before the event fires. Reads from disk continue meanwhile. Their copies are queued by event, apart from
// all others, so that they can be submitted behind it; once the event has fired they are ordinary.
//
// These transfers hold memory while they wait. They get a limited part of it, so that an event that
// fires only after other transfers does not block those.

/// Cells that wait for device events may take 1 / 4 of host memory and of the job table.
const SHARE: u64 = 4;

/// Transfers and jobs that depend on one event.
#[derive(Default)]
pub(super) struct EventDependents {
    /// Transfers that name it.
    transfers: u32,
    /// Jobs that wait to be submitted.
    pub(super) waiting: WaitList,
    has_fired: bool,
    /// Jobs in submitted batches.
    taken: usize,
    /// It has completed, or failed.
    has_ended: bool,
}

/// All device events that transfers depend on.
#[derive(Default)]
pub(super) struct DeviceEvents {
    events: BTreeMap<u64, EventDependents>,
    /// Jobs whose event was pending when they began, and their bytes.
    jobs: u64,
    bytes: u64,
    /// Transfers that begin no more cells until such jobs have ended.
    parked: Vec<u32>,
}

impl DeviceEvents {
    /// The lists of jobs that wait, one for each event.
    pub(super) fn wait_lists(&self) -> impl Iterator<Item = &WaitList> {
        self.events.values().map(|dependents| &dependents.waiting)
    }

    fn is_open(&self, event: u64) -> bool {
        self.events.get(&event).is_some_and(|dependents| !dependents.has_fired)
    }
}

impl StoreState {
    /// Adds the pending events to `out`, each with whether jobs wait to be submitted behind it.
    pub fn events_ahead(&self, out: &mut Vec<(Event, bool)>) {
        let open =
            self.dependencies.events.events.iter().filter(|(_, dependents)| !dependents.has_fired);
        out.extend(open.map(|(&event, dependents)| (Event(event), !dependents.waiting.is_empty())));
    }

    /// Whether events are pending.
    pub fn has_events_ahead(&self) -> bool {
        self.dependencies.events.events.values().any(|dependents| !dependents.has_fired)
    }

    /// An event has completed, or never will: then its transfers fail.
    pub fn event_ended(&mut self, event: Event, outcome: std::result::Result<(), Status>) {
        if let Some(dependents) = self.dependencies.events.events.get_mut(&event.0) {
            dependents.has_ended = true;
        }
        match outcome {
            Ok(()) => self.event_fired(event.0),
            Err(status) => {
                let is_its = |spec: &TransferSpec| spec.after == Some(event);
                let all = self.transfers.table.iter().filter(|(_, one)| is_its(&one.spec));
                let numbers: Vec<u32> = all.map(|(number, _)| number).collect();
                numbers.into_iter().for_each(|number| self.cancel(number, status));
            }
        }
        self.settle();
    }

    fn event_fired(&mut self, event: u64) {
        let Some(dependents) = self.dependencies.events.events.get_mut(&event) else { return };
        dependents.has_fired = true;
        while let Some(id) = self.dependencies.first_after_event(event) {
            self.unqueue_after_event(event, id);
            self.count_after_event(id, 0);
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            self.queue_copy(id, table, cell);
        }
        self.retry_parked();
    }

    /// Takes copies to be submitted behind an event, up to a batch.
    pub fn take_after_event(&mut self, event: Event) -> Option<CopyBatch> {
        let (mut batch, mut bytes) = (CopyBatch::default(), 0);
        while batch.jobs.len() < self.config.batch_cells && bytes < self.config.batch_bytes {
            let Some(id) = self.dependencies.first_after_event(event.0) else { break };
            self.unqueue_after_event(event.0, id);
            if !self.reroute_lost(id) {
                bytes += self.take_copy(id, u64::MAX, &mut batch);
            }
        }
        if let Some(dependents) = self.dependencies.events.events.get_mut(&event.0) {
            dependents.taken += batch.jobs.len();
        }
        // A job that was routed again may need a read, or may be a miss.
        self.settle();
        (!batch.jobs.is_empty()).then_some(batch)
    }

    /// Ends such a batch. `is_spent`: it failed because its event will never complete.
    pub fn done_after_event(&mut self, mut batch: CopyBatch, outcome: &Result<()>, is_spent: bool) {
        batch.is_spent = is_spent;
        let event = batch
            .jobs
            .first()
            .and_then(|&id| self.transfers.table[self.transfers.jobs[id].number].spec.after);
        if let Some(dependents) =
            event.and_then(|event| self.dependencies.events.events.get_mut(&event.0))
        {
            dependents.taken -= batch.jobs.len();
        }
        self.done_copies(&batch, outcome);
        self.settle();
    }

    /// Checks what a transfer with an event must fulfil.
    pub(super) fn check_after_event(&self, spec: &TransferSpec) -> Result<()> {
        if spec.after.is_some() && spec.kind == TransferKind::Prefetch {
            fail!(Invalid, "a prefetch has no tensors, so it takes no device event");
        }
        Ok(())
    }

    /// The event that copies of a transfer still depend on.
    pub(super) fn event_of(&self, number: u32) -> Option<u64> {
        let event = self.transfers.table[number].spec.after?.0;
        self.dependencies.events.is_open(event).then_some(event)
    }

    /// Whether a transfer must not begin more cells for now. It is woken when it may.
    pub(super) fn is_parked(&mut self, number: u32) -> bool {
        let most_jobs = u64::from(self.config.max_jobs) / SHARE;
        let most_bytes = self.config.host_bytes / SHARE;
        let DeviceEvents { jobs, bytes, .. } = self.dependencies.events;
        let is_full = jobs > 0 && (jobs >= most_jobs || bytes >= most_bytes);
        let parks = is_full && self.event_of(number).is_some();
        if parks {
            self.dependencies.events.parked.push(number);
        }
        parks
    }

    /// Counts a job that begins while its event is pending.
    pub(super) fn begin_after_event(&mut self, id: u32) {
        if self.event_of(self.transfers.jobs[id].number).is_some() {
            let (table, cell) = self.transfers.cell_of(&self.transfers.jobs[id]);
            self.count_after_event(id, self.tables[table as usize].planes(cell).bytes());
        }
    }

    /// Sets the bytes with which a job counts; 0 = not any more.
    fn count_after_event(&mut self, id: u32, bytes: u64) {
        let before = std::mem::replace(&mut self.transfers.jobs[id].event_bytes, bytes);
        let count = |bytes: u64| u64::from(bytes > 0);
        self.dependencies.events.jobs =
            self.dependencies.events.jobs + count(bytes) - count(before);
        self.dependencies.events.bytes = self.dependencies.events.bytes + bytes - before;
    }

    /// Ends the count of a job.
    pub(super) fn end_after_event(&mut self, job: &Job) {
        if job.event_bytes > 0 {
            self.dependencies.events.jobs -= 1;
            self.dependencies.events.bytes -= job.event_bytes;
            self.retry_parked();
        }
    }

    fn retry_parked(&mut self) {
        for number in std::mem::take(&mut self.dependencies.events.parked) {
            // The transfer may have ended, and its number may be another one's. Then this does
            // nothing.
            if self.transfers.table.get(number).is_some() {
                self.transfers.start_later(number);
            }
        }
    }

    /// Makes a job wait for its transfer's event, if that is pending. Returns whether it waits.
    pub(super) fn queue_after_event(&mut self, id: u32) -> bool {
        let Some(event) = self.event_of(self.transfers.jobs[id].number) else { return false };
        let Some(dependents) = self.dependencies.events.events.get_mut(&event) else {
            return false;
        };
        self.transfers.jobs[id].step = Step::AfterEvent;
        dependents.waiting.push_back(&mut self.transfers.jobs, Of::Wait, id);
        true
    }

    /// Removes a job from the waiters for its event.
    pub(super) fn withdraw_after_event(&mut self, job: &Job, id: u32) {
        if let Some(event) = self.transfers.table[job.number].spec.after {
            self.unqueue_after_event(event.0, id);
        }
    }

    fn unqueue_after_event(&mut self, event: u64, id: u32) {
        if let Some(dependents) = self.dependencies.events.events.get_mut(&event) {
            dependents.waiting.remove(&mut self.transfers.jobs, Of::Wait, id);
            self.transfers.jobs[id].step = Step::Fresh;
        }
    }

    /// Cells that wait to be submitted behind an event.
    pub fn cells_after_event(&self) -> usize {
        self.dependencies.events.wait_lists().map(WaitList::len).sum()
    }
}
