//! Transfers that wait for device events. The tensors of a put are filled only when its event
//! completes, and a get must not write before: tensors that are accessed too early are detected.

use crate::sim::content::Planes;
use crate::sim::world::{Outcome, POISON, Shared, Submitted, World, wrong};
use kvtier::base::random::Random;
use kvtier::base::sync::Arc;
use kvtier::device::{Device, Event, State, Stream};
use kvtier::store::executor::Tools;
use kvtier::store::executor::{EventCopies, StateAccess};
use kvtier::store::state::StoreState;
use kvtier::store::state::transfer::TransferKind;

/// Limit: pending events; more than there are streams to lease.
const MAX_OPEN_EVENTS: usize = 24;
/// Stream of the engine's kernels. The store's workers wait for them.
const KERNELS: Stream = Stream(3);

/// Engine events of a run.
pub(super) struct EngineEvents {
    random: Random,
    executor: EventCopies,
    /// Pending user events, each with the event behind it that transfers wait for; both may be the
    /// same.
    open: Vec<(Event, Event)>,
    /// All events of this life.
    named: Vec<Event>,
}

impl StateAccess for Shared {
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState)) {
        act(&mut self.0.lock());
    }
}

impl EngineEvents {
    /// For a seed: every run with an asynchronous device.
    pub(super) fn of(seed: u64, tools: &Tools) -> Option<EngineEvents> {
        tools.device.facts().asynchronous.then(|| EngineEvents {
            random: Random::new(seed ^ 0xAF7E6),
            executor: EventCopies::new(tools.clone()),
            open: Vec::new(),
            named: Vec::new(),
        })
    }

    /// An event for the next transfer to wait for, or none.
    fn name(&mut self, device: &Arc<dyn Device>) -> Option<Event> {
        if self.random.below(3) > 0 {
            return None;
        }
        let known = self.named.len() as u64;
        if self.open.len() == MAX_OPEN_EVENTS || known > 0 && self.random.coin() {
            return Some(self.named[self.random.below(known) as usize]);
        }
        // A lost device creates none.
        let user_event = device.create_user_event().ok()?;
        let mut event = user_event;
        if self.random.coin() {
            // SAFETY: without copies there is no memory.
            event = unsafe { device.submit(KERNELS, Some(user_event), &mut []) }.ok()?;
        }
        self.open.push((user_event, event));
        self.named.push(event);
        Some(event)
    }
}

impl World {
    /// The event for the next transfer to wait for.
    pub(super) fn next_event(&mut self, kind: TransferKind) -> Option<Event> {
        let engine_events =
            self.engine_events.as_mut().filter(|_| kind != TransferKind::Prefetch)?;
        engine_events.name(&self.tools.device)
    }

    /// Hides the content of a put that waits for an event.
    pub(super) fn hide_put(&self, submitted: &mut Submitted) {
        if submitted.kind != TransferKind::Put
            || !submitted.after.is_some_and(|event| self.is_open(event))
        {
            return;
        }
        for planes in &mut submitted.planes {
            let hidden = Planes { k: planes.k.clone(), v: planes.v.clone() };
            planes.k.fill(POISON);
            planes.v.fill(POISON);
            submitted.hidden.push(hidden);
        }
    }

    /// Whether an event is pending.
    fn is_open(&self, event: Event) -> bool {
        let open = self
            .engine_events
            .as_ref()
            .map(|engine_events| &engine_events.open[..])
            .unwrap_or_default();
        open.iter().any(|(_, named)| *named == event)
    }

    /// One random step.
    pub(super) fn step_engine_events(&mut self) -> Outcome<()> {
        let Some(engine_events) = &mut self.engine_events else { return Ok(()) };
        let choice = engine_events.random.below(12);
        let count = engine_events.open.len() as u64;
        match choice {
            0..=3 => {
                self.event_executor_step();
            }
            4 if count > 0 => {
                let at = engine_events.random.below(count) as usize;
                self.signal_event(at)?;
            }
            5 => self.clock.advance(engine_events.random.below(100_000)),
            _ => {}
        }
        Ok(())
    }

    fn event_executor_step(&mut self) -> bool {
        let Some(engine_events) = &mut self.engine_events else { return false };
        // SAFETY: as for all other work: `submitted` keeps the memory until the transfer's end is
        // reported.
        unsafe { engine_events.executor.advance(&mut self.core.clone()) }
    }

    /// Signals an event: kernels' outputs appear, and their inputs must be unchanged before.
    fn signal_event(&mut self, at: usize) -> Outcome<()> {
        let Some(engine_events) = &mut self.engine_events else { return Ok(()) };
        let (user_event, event) = engine_events.open.swap_remove(at);
        for submitted in
            self.submitted.values_mut().filter(|submitted| submitted.after == Some(event))
        {
            submitted.reveal()?;
        }
        match self.tools.device.signal_event(user_event) {
            Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Signals all events.
    pub(super) fn signal_all_events(&mut self) -> Outcome<()> {
        while self
            .engine_events
            .as_ref()
            .is_some_and(|engine_events| !engine_events.open.is_empty())
        {
            self.signal_event(0)?;
        }
        Ok(())
    }

    /// Continues work that waits for events; whether any is left.
    pub(super) fn drain_engine_events(&mut self) -> bool {
        let did = self.event_executor_step();
        let Some(engine_events) = &self.engine_events else { return false };
        // Lets time pass for work in flight.
        engine_events.executor.rest(self.clock.now_ns() + 1_000_000);
        did || !engine_events.executor.is_idle() || self.core.0.lock().has_events_ahead()
    }

    /// Ends a life of the store: nothing accesses its memory any more. Pending events are
    /// signalled, or the executor would wait forever.
    pub(super) fn end_engine_events(&mut self) -> Outcome<()> {
        self.signal_all_events()?;
        if let Some(mut engine_events) = self.engine_events.take() {
            engine_events.executor.finish();
            self.forget(&engine_events)?;
        }
        Ok(())
    }

    /// Releases the events, when nothing waits for them any more.
    pub(super) fn forget_events(&mut self) -> Outcome<()> {
        let Some(mut engine_events) = self.engine_events.take() else { return Ok(()) };
        let done = self.forget(&engine_events);
        engine_events.named.clear();
        self.engine_events = Some(engine_events);
        done
    }

    fn forget(&self, engine_events: &EngineEvents) -> Outcome<()> {
        for &event in &engine_events.named {
            let device = &self.tools.device;
            let _ = device.wait(event, 0); // success or failure
            if let Err(error) = device.release(event) {
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// A part of a transfer must not end before its event.
    pub(super) fn check_event(&mut self, submitted: &Submitted, bytes: u64) -> Outcome<()> {
        let Some(event) = submitted.after.filter(|_| bytes > 0) else { return Ok(()) };
        match self.tools.device.state(event) {
            Ok(State::Pending) => {
                Err(wrong(format!("{bytes} bytes were written before {event:?}")))
            }
            _ => {
                self.report.engine_events += 1;
                Ok(())
            }
        }
    }
}

impl Submitted {
    /// Shows the content of a put; a get must not have written yet.
    fn reveal(&mut self) -> Outcome<()> {
        if self.kind == TransferKind::Get {
            let mut planes = self.planes.iter().flat_map(|planes| [&planes.k, &planes.v]);
            if planes.any(|plane| plane.iter().any(|&byte| byte != POISON)) {
                return Err(wrong("a get wrote before its event completed".into()));
            }
        }
        for (planes, hidden) in self.planes.iter_mut().zip(self.hidden.drain(..)) {
            planes.k.copy_from_slice(&hidden.k);
            planes.v.copy_from_slice(&hidden.v);
        }
        Ok(())
    }
}
