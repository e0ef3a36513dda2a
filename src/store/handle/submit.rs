//! Submitting transfers: reserve the ops, then hand the transfer to the state machine. A transfer
//! with a ready event or a device event waits for it without a thread.

use crate::base::op::{OpOpts, OpRef};
use crate::base::panic;
use crate::base::status::{Error, Result, Status};
use crate::device::{Event, State};
use crate::fail;
use crate::format::keys::Key;
use crate::store::executor::Tools;
use crate::store::executor::device_batches::{EventCopies, StateAccess};
use crate::store::handle::{Inner, Store, abandoned_status, finish};
use crate::store::ready_event::{EventState, Listener, Ready};
use crate::store::state::blocks::BlockTransfer;
use crate::store::state::transfer::Level;
use crate::store::state::{CellRange, StoreState, TransferKind};

/// Ops of a transfer.
enum Ops {
    /// One, or one for each layer.
    Each(usize),
    /// One with so many items.
    Items(usize),
}

impl Store {
    /// Begins a put, get or prefetch of a cell range: one op, or one for each layer with
    /// consecutive tags.
    pub fn submit(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        cell_range: CellRange,
        opts: &OpOpts,
    ) -> Result<Vec<OpRef>> {
        self.submit_after(session, kind, level, cell_range, opts, None)
    }

    /// The same; with a ready event nothing begins before that is signalled.
    pub fn submit_after(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        mut cell_range: CellRange,
        opts: &OpOpts,
        ready: Option<&Ready>,
    ) -> Result<Vec<OpRef>> {
        cell_range.after = self.check_after(kind, cell_range.after)?;
        let ops = Ops::Each(if cell_range.by_layer { cell_range.layers } else { 1 });
        let lane = opts.priority;
        self.begin(ops, opts, ready, |core| match ready {
            Some(_) => core.submit_waiting(session, kind, level, lane, cell_range),
            None => {
                let number = core.submit_cell_range(session, kind, level, lane, cell_range)?;
                Ok((number, 0))
            }
        })
    }

    /// Begins a remote lookup of a session: one op, whose result is the number of tokens the
    /// session can continue from, here or at the remote.
    pub fn locate(&self, session: u32, opts: &OpOpts) -> Result<OpRef> {
        let ops = self.begin(Ops::Each(1), opts, None, |core| Ok((core.locate(session)?, 0)))?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Begins a remote lookup of blocks: one op with an item for each block.
    pub fn locate_blocks(&self, session: u32, keys: Vec<Key>, opts: &OpOpts) -> Result<OpRef> {
        let ops = Ops::Items(keys.len());
        let submit = |core: &mut StoreState| Ok((core.locate_blocks(session, keys)?, 0));
        let ops = self.begin(ops, opts, None, submit)?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Begins a put, get or prefetch of blocks: one op with an item for each block.
    pub fn submit_blocks(
        &self,
        session: u32,
        (kind, level): (TransferKind, Level),
        mut blocks: BlockTransfer,
        opts: &OpOpts,
        ready: Option<&Ready>,
    ) -> Result<Vec<OpRef>> {
        blocks.after = self.check_after(kind, blocks.after)?;
        let (ops, how) = (Ops::Items(blocks.keys.len()), (kind, level, opts.priority));
        self.begin(ops, opts, ready, |core| match ready {
            Some(_) => core.submit_blocks_waiting(session, how, blocks),
            None => Ok((core.submit_blocks(session, how, blocks)?, 0)),
        })
    }

    /// Begins a transfer. `submit` returns its number, and the ticket if it waits.
    fn begin(
        &self,
        ops: Ops,
        opts: &OpOpts,
        ready: Option<&Ready>,
        submit: impl FnOnce(&mut StoreState) -> Result<(u32, u64)>,
    ) -> Result<Vec<OpRef>> {
        ready.map_or(Ok(()), Ready::check_room)?;
        let ops = self.promise_ops(ops, opts)?;
        // A passed deadline, or a concurrent close, may have ended some ops.
        let begun: Vec<bool> = ops.iter().map(|op| op.begin()).collect();
        if begun.contains(&false) {
            let rest = ops.iter().zip(&begun).filter(|(_, begun)| **begun);
            let late = opts.deadline_ns != 0 && !self.inner.runtime.is_closing();
            let status = if late { Status::Timeout } else { Status::Cancelled };
            rest.for_each(|(op, _)| op.finish(status, None, None));
            return Ok(ops);
        }
        let retained = ops.clone();
        let mut state = self.inner.state.lock();
        if let Err(error) = state.check_open() {
            drop(state);
            return Err(undo(ops, error));
        }
        state.core.tick(self.inner.runtime.clock().now_ns());
        // Completed transfers have freed their numbers. Their ops must be collected before a number
        // is reused.
        let mut completions = state.ended();
        if !completions.is_empty() {
            self.inner.ended.notify_all();
        }
        match submit(&mut state.core) {
            Ok((number, ticket)) => {
                // A cancel from here on finds the transfer once it has the lock.
                retained.iter().for_each(|op| op.set_owner_slot(number));
                let number = number as usize;
                if state.ops.len() <= number {
                    state.ops.resize_with(number + 1, Vec::new);
                }
                debug_assert!(state.ops[number].is_empty(), "a number that is in use");
                state.ops[number] = retained;
                // A cancel or deadline before this found no transfer.
                if let Some(status) = abandoned_status(&ops) {
                    state.core.cancel(number as u32, status);
                }
                completions.extend(self.inner.collect_completions(&mut state));
                drop(state);
                ops.iter().for_each(|op| op.notify_issued());
                finish(completions);
                if let Some(ready) = ready {
                    ready.join(self.inner.this.clone(), ticket);
                }
                Ok(ops)
            }
            Err(error) => {
                // The clock has advanced, which may have created work.
                completions.extend(self.inner.collect_completions(&mut state));
                drop(state);
                finish(completions);
                Err(undo(ops, error))
            }
        }
    }

    /// Ops of a transfer, with consecutive tags.
    fn promise_ops(&self, ops: Ops, opts: &OpOpts) -> Result<Vec<OpRef>> {
        let (runtime, owner) = (&self.inner.runtime, self.inner.clone());
        let count = match ops {
            Ops::Items(items) => return Ok(vec![runtime.promise_each(opts, items, owner)?]),
            Ops::Each(count) => count,
        };
        let mut ops: Vec<OpRef> = Vec::new();
        ops.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        for layer in 0..count as u64 {
            let opts = OpOpts { tag: opts.tag.wrapping_add(layer), ..opts.clone() };
            match runtime.promise(&opts, owner.clone()) {
                Ok(op) => ops.push(op),
                Err(error) => {
                    for op in ops {
                        op.discard();
                        op.remove();
                    }
                    return Err(error);
                }
            }
        }
        Ok(ops)
    }
}

/// Abandons ops of a refused call. They are never reported.
pub(super) fn undo(ops: Vec<OpRef>, error: Error) -> Error {
    for op in ops {
        op.retract();
        op.remove();
    }
    error
}

// ---------- ready transfers
//
// Transfers that wait for a ready event of the engine.

impl Listener for Inner {
    fn signalled(&self, ticket: u64, word: EventState) {
        let mut state = self.state.lock();
        if state.stop || state.broken {
            return;
        }
        state.core.tick(self.runtime.clock().now_ns());
        match word {
            EventState::Signalled => state.core.begin_waiting(ticket),
            EventState::Cancelled => state.core.give_up_waiting(ticket, Status::Cancelled),
        }
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
    }

    fn waits(&self, ticket: u64) -> bool {
        self.state.lock().core.is_waiting(ticket)
    }
}

// ---------- device events
//
// The thread that polls copies that depend on device events.

/// Interval at which device events are polled while nothing happens.
const POLL_NS: u64 = 250_000;

impl StateAccess for &Inner {
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState)) {
        let mut state = self.state.lock();
        state.core.tick(self.runtime.clock().now_ns());
        act(&mut state.core);
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
    }
}

impl Inner {
    /// Main function of the thread for copies that depend on device events.
    pub(super) fn serve_event_copies(&self, tools: Tools) {
        let mut event_copies = EventCopies::new(tools);
        while self.wait_for_events(&event_copies) {
            // SAFETY: the core hears of the end of what is begun from here; views are of memory
            // that the caller promised to keep until the op is released, which follows that.
            let did = panic::catch(|| unsafe { event_copies.advance(&mut &*self) });
            match did {
                Ok(true) => {}
                Ok(false) => self.rest_event_copies(&event_copies),
                Err(text) => {
                    self.runtime.poison(&text);
                    self.state.lock().broken = true;
                    self.abort_all();
                }
            }
        }
    }

    /// Sleeps until there are events to poll. Returns false when there never will be.
    fn wait_for_events(&self, event_copies: &EventCopies) -> bool {
        let mut state = self.state.lock();
        while !state.broken && event_copies.is_idle() && !state.core.has_events_ahead() {
            if state.stop {
                return false;
            }
            state.event_thread_sleeps = true;
            self.events_pending.wait(&mut state);
            state.event_thread_sleeps = false;
        }
        !state.broken
    }

    fn rest_event_copies(&self, event_copies: &EventCopies) {
        let until_ns = self.runtime.clock().now_ns().saturating_add(POLL_NS);
        match event_copies.is_idle() {
            false => event_copies.rest(until_ns),
            true => {
                let mut state = self.state.lock();
                if !state.stop {
                    self.events_pending.wait_for(&mut state, POLL_NS);
                }
            }
        }
    }
}

impl Store {
    /// The device event of a transfer, or none if it has completed. Reports invalid events where
    /// they can be recognised.
    pub(super) fn check_after(
        &self,
        kind: TransferKind,
        after: Option<Event>,
    ) -> Result<Option<Event>> {
        let Some(event) = after else { return Ok(None) };
        if !self.has_device {
            fail!(
                Unavailable,
                "the store was opened without a device, and knows no event {:#x}: wait for it, or \
                 name a ready event",
                event.0
            );
        }
        if kind == TransferKind::Prefetch {
            fail!(Invalid, "a prefetch has no tensors, so it takes no device event");
        }
        let device = self.inner.tools.lock().device.clone();
        match device.state(event) {
            Ok(State::Done) => Ok(None),
            Err(error) if error.status() == Status::Handle => Err(error.within("after")),
            _ => Ok(Some(event)),
        }
    }
}
