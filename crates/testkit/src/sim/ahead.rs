//! Moves behind events of the device. What a put is to store is there only when its event comes,
//! and what a get brings must not be there before: whoever touches tensors too early is found.

use crate::sim::content::Planes;
use crate::sim::world::{Asked, Outcome, POISON, Shared, World, wrong};
use kvtier::base::random::Random;
use kvtier::base::sync::Arc;
use kvtier::device::{Device, Event, State, Stream};
use kvtier::store::executor::Tools;
use kvtier::store::executor::device_batches::{Crew, Desk};
use kvtier::store::state::StoreState;
use kvtier::store::state::transfer::TransferKind;

/// Most events that are open at once: more than there are streams to lend.
const MOST_OPEN: usize = 24;
/// The engine's kernels are on a stream of their own: hands of the store wait for theirs.
const KERNELS: Stream = Stream(3);

/// What is drawn of that.
pub(super) struct Behind {
    random: Random,
    crew: Crew,
    /// What the engine has promised and did not keep: the promise, and the event behind it
    /// that moves name, which may be the same.
    open: Vec<(Event, Event)>,
    /// All that were ever named in this life.
    named: Vec<Event>,
}

impl Desk for Shared {
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState)) {
        act(&mut self.0.lock());
    }
}

impl Behind {
    /// That of a seed: all that have a device which takes its time.
    pub(super) fn of(seed: u64, tools: &Tools) -> Option<Behind> {
        tools.device.facts().asynchronous.then(|| Behind {
            random: Random::new(seed ^ 0xAF7E6),
            crew: Crew::new(tools.clone()),
            open: Vec::new(),
            named: Vec::new(),
        })
    }

    /// An event for the next move to be behind, or none.
    fn name(&mut self, device: &Arc<dyn Device>) -> Option<Event> {
        if self.random.below(3) > 0 {
            return None;
        }
        let known = self.named.len() as u64;
        if self.open.len() == MOST_OPEN || known > 0 && self.random.coin() {
            return Some(self.named[self.random.below(known) as usize]);
        }
        // One that is lost makes none.
        let promise = device.create_user_event().ok()?;
        let mut event = promise;
        if self.random.coin() {
            // SAFETY: without copies there is no memory.
            event = unsafe { device.submit(KERNELS, Some(promise), &mut []) }.ok()?;
        }
        self.open.push((promise, event));
        self.named.push(event);
        Some(event)
    }
}

impl World {
    /// The event that the next move is to be behind.
    pub(super) fn name_event(&mut self, kind: TransferKind) -> Option<Event> {
        let behind = self.behind.as_mut().filter(|_| kind != TransferKind::Prefetch)?;
        behind.name(&self.tools.device)
    }

    /// What a put that is behind an event stores is not there yet.
    pub(super) fn hide(&self, asked: &mut Asked) {
        if asked.kind != TransferKind::Put || !asked.after.is_some_and(|event| self.is_open(event))
        {
            return;
        }
        for planes in &mut asked.planes {
            let hidden = Planes { k: planes.k.clone(), v: planes.v.clone() };
            planes.k.fill(POISON);
            planes.v.fill(POISON);
            asked.hidden.push(hidden);
        }
    }

    /// Whether the engine has not kept what an event is behind.
    fn is_open(&self, event: Event) -> bool {
        let open = self.behind.as_ref().map(|behind| &behind.open[..]).unwrap_or_default();
        open.iter().any(|(_, named)| *named == event)
    }

    /// One of these things happens, or none.
    pub(super) fn look_behind(&mut self) -> Outcome<()> {
        let Some(behind) = &mut self.behind else { return Ok(()) };
        let what = behind.random.below(12);
        let count = behind.open.len() as u64;
        match what {
            0..=3 => {
                self.crew_turn();
            }
            4 if count > 0 => {
                let at = behind.random.below(count) as usize;
                self.keep(at)?;
            }
            5 => self.clock.advance(behind.random.below(100_000)),
            _ => {}
        }
        Ok(())
    }

    fn crew_turn(&mut self) -> bool {
        let Some(behind) = &mut self.behind else { return false };
        // SAFETY: as for all other work: `asked` keeps the memory until a move's end is told.
        unsafe { behind.crew.turn(&mut self.core.clone()) }
    }

    /// An event comes: what kernels write is there, and what they read was not changed before.
    fn keep(&mut self, at: usize) -> Outcome<()> {
        let Some(behind) = &mut self.behind else { return Ok(()) };
        let (promise, event) = behind.open.swap_remove(at);
        for asked in self.asked.values_mut().filter(|asked| asked.after == Some(event)) {
            asked.show()?;
        }
        match self.tools.device.signal_event(promise) {
            Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// All events come.
    pub(super) fn keep_all(&mut self) -> Outcome<()> {
        while self.behind.as_ref().is_some_and(|behind| !behind.open.is_empty()) {
            self.keep(0)?;
        }
        Ok(())
    }

    /// Goes on with what is behind events; whether anything of that is left.
    pub(super) fn rest_behind(&mut self) -> bool {
        let did = self.crew_turn();
        let Some(behind) = &self.behind else { return false };
        // Time passes for what was begun.
        behind.crew.rest(self.clock.now_ns() + 1_000_000);
        did || !behind.crew.is_idle() || self.core.0.lock().has_events_ahead()
    }

    /// The life of the store ends: nothing touches its memory any more. Events that are open have
    /// come, or who looked after them would wait for ever.
    pub(super) fn end_behind(&mut self) -> Outcome<()> {
        self.keep_all()?;
        if let Some(mut behind) = self.behind.take() {
            behind.crew.finish();
            self.forget(&behind)?;
        }
        Ok(())
    }

    /// Events go when nothing is behind them any more.
    pub(super) fn forget_events(&mut self) -> Outcome<()> {
        let Some(mut behind) = self.behind.take() else { return Ok(()) };
        let done = self.forget(&behind);
        behind.named.clear();
        self.behind = Some(behind);
        done
    }

    fn forget(&self, behind: &Behind) -> Outcome<()> {
        for &event in &behind.named {
            let device = &self.tools.device;
            let _ = device.wait(event, 0); // well or not
            if let Err(error) = device.release(event) {
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// A part of a move has ended: not before its event.
    pub(super) fn check_event(&mut self, asked: &Asked, bytes: u64) -> Outcome<()> {
        let Some(event) = asked.after.filter(|_| bytes > 0) else { return Ok(()) };
        match self.tools.device.state(event) {
            Ok(State::Pending) => Err(wrong(format!("{bytes} bytes came before {event:?}"))),
            _ => {
                self.report.behind += 1;
                Ok(())
            }
        }
    }
}

impl Asked {
    /// What is to be put is there from now on; what a get brings was not.
    fn show(&mut self) -> Outcome<()> {
        if self.kind == TransferKind::Get {
            let mut planes = self.planes.iter().flat_map(|planes| [&planes.k, &planes.v]);
            if planes.any(|plane| plane.iter().any(|&byte| byte != POISON)) {
                return Err(wrong("a get wrote before its event came".into()));
            }
        }
        for (planes, hidden) in self.planes.iter_mut().zip(self.hidden.drain(..)) {
            planes.k.copy_from_slice(&hidden.k);
            planes.v.copy_from_slice(&hidden.v);
        }
        Ok(())
    }
}
