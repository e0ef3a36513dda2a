//! Threads that make random calls to a streamer, and check every byte of each leased unit.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::base::budget::Tier;
use kvtier::base::random::Random;
use kvtier::base::status::{Error, Status};
use kvtier::device::Memory;
use kvtier::stream::plan::Links;
use kvtier::stream::streamer::{AcquireOpts, UnitLease};
use kvtier::stream::units::Role;

use crate::cases::{Case, Ending, Payer, Trouble, one};
use kvtier_testkit::fixtures::stream_rig::{MIB, soon, within};

const GRAIN: u64 = 4096;
/// Deadlines before this may pass.
const HASTY_NS: u64 = 1_000_000_000;
/// Steps of each thread.
const STEPS: u64 = 60;

/// A case under way.
pub struct Run {
    pub case: Case,
    /// Current step of each thread, as text.
    pub doing: Vec<Mutex<String>>,
    /// Units that were had.
    pub had: AtomicU64,
    /// Set once the fault of the files was injected.
    struck: AtomicU64,
}

/// State of a thread.
struct Caller<'a> {
    run: &'a Run,
    number: usize,
    random: Random,
    held: Vec<UnitLease>,
    most: usize,
    /// Its place in the order.
    turn: usize,
}

/// How a thread ended early: the streamer was closed, as it was to be.
struct Closed;

type Step = Result<(), Closed>;

impl Run {
    pub fn new(case: Case) -> Run {
        let doing = (0..case.threads).map(|_| Mutex::default()).collect();
        Run { case, doing, had: AtomicU64::new(0), struck: AtomicU64::new(0) }
    }

    /// Whether a unit has bytes in the grains of a stretch of a file.
    fn touches(&self, unit: u32, file: u32, from: u64, to: u64) -> bool {
        let of = &self.case.rig.files.units.units[unit as usize];
        of.extents.iter().any(|extent| {
            let end = (extent.offset + extent.bytes).next_multiple_of(GRAIN);
            extent.file == file && extent.offset / GRAIN * GRAIN < to && end > from
        })
    }

    /// Whether something may go wrong in a way: with a unit, or with whichever.
    fn may(&self, unit: Option<u32>, status: Status) -> bool {
        let overlaps = |file, from, to| unit.is_none_or(|unit| self.touches(unit, file, from, to));
        match (&self.case.trouble, status) {
            (_, Status::Closed) => self.case.ending != Ending::Quiet,
            (Trouble::Reads | Trouble::Copies, Status::Io) => true,
            (Trouble::LookupRange(file, span), Status::Io) => overlaps(*file, span.start, span.end),
            (Trouble::Cut(file, at), Status::Io | Status::Corrupt) => {
                overlaps(*file, *at, u64::MAX)
            }
            (Trouble::Written(file, at) | Trouble::Lie(file, at), Status::Corrupt) => {
                overlaps(*file, *at, at + 1)
            }
            (Trouble::Lost, Status::Unavailable) => true,
            _ => false,
        }
    }

    /// Whether files are not what they were, by what they say of themselves.
    pub fn is_changed(&self) -> bool {
        self.struck.load(Ordering::Acquire) > 0
            && matches!(
                self.case.trouble,
                Trouble::Cut(..) | Trouble::Longer(..) | Trouble::Written(..)
            )
    }

    /// Injects the fault of the files now.
    pub fn strike(&self) {
        let (sim, files) = (&self.case.sim, &self.case.rig.files);
        match self.case.trouble {
            Trouble::Cut(file, at) => sim.truncate(file, at),
            Trouble::Longer(file) => {
                sim.truncate(file, files.bytes[file as usize].len() as u64 + 1);
            }
            Trouble::Written(file, at) => sim.write(file, at),
            Trouble::Lie(file, at) => sim.flip(file, at),
            Trouble::Replaced(file) => sim.replace(file),
            _ => return,
        }
        self.struck.store(1, Ordering::Release);
    }

    /// The whole run of one thread.
    pub fn work(&self, number: usize) {
        let mut random = Random::new(self.case.seed.wrapping_mul(31) + number as u64);
        let most = 1 + random.below(3) as usize;
        let mut caller = Caller { run: self, number, random, held: Vec::new(), most, turn: 0 };
        for step in 0..STEPS {
            if number == 0 && step == STEPS / 2 {
                self.strike();
            }
            if caller.step(step).is_err() {
                break;
            }
        }
        caller.let_go_all();
        caller.says("nothing any more");
    }
}

impl Caller<'_> {
    fn says(&self, text: impl Into<String>) {
        *self.run.doing[self.number].lock().expect("a lock") = text.into();
    }

    /// Judges the result of a call. `fine`: statuses that are allowed in any case.
    fn judge<T>(
        &self,
        unit: Option<u32>,
        result: Result<T, Error>,
        fine: &[Status],
    ) -> Result<Option<T>, Closed> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                let doing = self.run.doing[self.number].lock().expect("a lock").clone();
                let status = error.status();
                // Others may take what a unit, too large for slots, was to move to.
                let homeless = self.run.case.budget.is_some()
                    && status == Status::Budget
                    && error.message().contains("is not resident any more");
                let may = fine.contains(&status) || homeless || self.run.may(unit, status);
                assert!(may, "{doing}: {error} ({status:?})");
                if status == Status::Closed { Err(Closed) } else { Ok(None) }
            }
        }
    }

    fn step(&mut self, step: u64) -> Step {
        match self.random.below(100) {
            0..45 => self.acquire(),
            45..62 => {
                self.let_go();
                Ok(())
            }
            62..68 => {
                self.held.iter().for_each(|held| self.looks_right(held));
                Ok(())
            }
            68..74 => self.stretch(),
            74..78 => self.hint(),
            78..82 => self.passes(),
            82..86 => self.rebalance(),
            86..90 => self.load(),
            90..93 => self.verify(),
            93..97 => self.compute(),
            97 => self.look(),
            _ => self.end(step),
        }
    }

    fn any_unit(&mut self) -> u32 {
        self.random.below(self.run.case.rig.files.units.units.len() as u64) as u32
    }

    /// The next unit of the order, or any.
    fn wish(&mut self) -> u32 {
        let order = &self.run.case.order;
        if order.is_empty() || self.random.below(3) == 0 {
            return self.any_unit();
        }
        self.turn += 1;
        order[self.turn % order.len()]
    }

    fn how(&mut self) -> AcquireOpts {
        let deadline_ns = match self.random.below(4) {
            0 => 0,
            1 => within(self.random.below(300_000)),
            _ => soon(),
        };
        AcquireOpts {
            poll: self.random.below(5) == 0,
            when_issued: self.random.coin(),
            deadline_ns,
        }
    }

    fn acquire(&mut self) -> Step {
        if self.held.len() >= self.most {
            self.let_go();
        }
        let (unit, how) = (self.wish(), self.how());
        self.ask(unit, how)
    }

    fn ask(&mut self, unit: u32, how: AcquireOpts) -> Step {
        let rig = &self.run.case.rig;
        self.says(format!("acquire {unit}, {how:?}, with {} held", self.held.len()));
        let is_hasty = how.deadline_ns > 0 && how.deadline_ns < within(HASTY_NS);
        let result = rig.streamer.acquire(unit, how);
        let mut fine = vec![Status::Busy];
        if how.poll {
            fine.push(Status::Again);
        }
        if is_hasty {
            fine.push(Status::Timeout);
        }
        if let Err(error) = &result
            && error.status() == Status::Busy
        {
            self.may_be_busy(unit);
        }
        let Some(held) = self.judge(Some(unit), result, &fine)? else { return Ok(()) };
        self.run.had.fetch_add(1, Ordering::Relaxed);
        if let Ok((address, bytes)) = rig.streamer.fixed(unit) {
            assert_eq!((address, bytes), (held.address, held.bytes), "unit {unit} is in place");
        }
        assert_eq!(held.lease.unit, unit);
        self.looks_right(&held);
        self.held.push(held);
        Ok(())
    }

    /// All slots have to be in use, or the unit spoiled, where one is refused.
    fn may_be_busy(&self, unit: u32) {
        let case = &self.run.case;
        let plan = case.rig.streamer.plan();
        let is_expert = case.rig.files.units.units[unit as usize].role == Role::Expert;
        let slots = if is_expert { plan.expert_slots } else { plan.slots };
        let others = 4 * (case.threads as usize - 1);
        let spoils = matches!(case.trouble, Trouble::Copies | Trouble::Lost);
        let held = self.held.len() + others;
        assert!(spoils || slots as usize <= held, "unit {unit}: {slots} slots, {held} in use");
    }

    /// A unit that was leased before its event may turn out to have failed.
    fn looks_right(&self, held: &UnitLease) {
        let unit = held.lease.unit;
        match self.run.case.rig.is_right(held) {
            Ok(right) => assert!(right, "unit {unit} has wrong bytes at {:?}", held.lease),
            Err(error) => assert!(self.run.may(Some(unit), error.status()), "unit {unit}: {error}"),
        }
    }

    fn let_go(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.random.below(self.held.len() as u64) as usize;
        let held = self.held.swap_remove(at);
        self.looks_right(&held);
        self.says(format!("release {:?}", held.lease));
        let result = self.run.case.rig.streamer.release(&held, None);
        let unit = held.lease.unit;
        // Only the first caller of a failed unit gets the cause, later ones `Io`.
        let spoilt = |error: &Error| {
            let lost = self.run.case.trouble == Trouble::Lost && error.status() == Status::Io;
            let when_issued = held.lease.event.is_some() && error.status() != Status::Closed;
            when_issued && (lost || self.run.may(Some(unit), error.status()))
        };
        if let Err(error) = &result {
            assert!(spoilt(error), "release of {:?}: {error}", held.lease);
        }
    }

    fn let_go_all(&mut self) {
        while !self.held.is_empty() {
            self.let_go();
        }
    }

    /// Some units of the order, one behind the other, as a pass has them.
    fn stretch(&mut self) -> Step {
        self.let_go_all();
        for _ in 0..self.random.below(12) {
            let (unit, how) = (self.wish(), self.how());
            self.ask(unit, how)?;
            self.let_go();
        }
        Ok(())
    }

    fn hint(&mut self) -> Step {
        let units: Vec<u32> = (0..self.random.below(5)).map(|_| self.any_unit()).collect();
        self.says(format!("hint {units:?}"));
        self.judge(None, self.run.case.rig.streamer.hint(&units), &[]).map(drop)
    }

    fn passes(&mut self) -> Step {
        let streamer = &self.run.case.rig.streamer;
        if self.random.coin() {
            self.says("pass_end");
            return self.judge(None, streamer.pass_end(), &[]).map(drop);
        }
        self.says("pass_begin");
        let (before, result) = (self.run.is_changed(), streamer.pass_begin());
        assert!(!(before && result.is_ok()), "a file has changed, and a pass begins");
        let changed = self.run.case.trouble.clone();
        let fine = match changed {
            Trouble::Cut(..) | Trouble::Longer(..) | Trouble::Written(..) => &[Status::Corrupt][..],
            _ => &[],
        };
        self.judge(None, result, fine).map(drop)
    }

    fn rebalance(&mut self) -> Step {
        let case = &self.run.case;
        let all = case.rig.files.all_bytes();
        let mut some = || self.random.coin().then(|| all * self.random.below(130) / 100);
        let (host, on_device) = (some(), some());
        let host = if case.device.is_some() { host.map(|host| host + 3 * MIB) } else { host };
        self.says(format!("rebalance {host:?} {on_device:?}"));
        let result = case.rig.streamer.rebalance(host, on_device, None);
        if let Ok(plan) = &result {
            assert!(plan.host_bytes <= host.unwrap_or(u64::MAX), "{host:?}: {plan:?}");
            assert!(plan.device_bytes <= on_device.unwrap_or(u64::MAX), "{on_device:?}: {plan:?}");
        }
        // Units that the CPU uses cannot move where units are in place on a device.
        let moves = case.device.is_some() && case.rig.streamer.fixed(0).is_ok();
        let fine = [Status::Budget, Status::Unsupported];
        self.judge(None, result, &fine[..1 + usize::from(moves)])?;
        if let (Payer::Cut, Some(budget), true) = (case.payer, &case.budget, self.random.coin()) {
            let tier = one(&mut self.random, &[Tier::Host, Tier::Device]);
            let bytes = 1 + all * self.random.below(150) / 100;
            self.says(format!("resize {tier:?} {bytes}"));
            budget.resize(tier, bytes).expect("resized");
        }
        Ok(())
    }

    fn load(&mut self) -> Step {
        self.let_go_all();
        let wait_ns = self.random.below(3_000_000);
        self.says("load");
        let result = self.run.case.rig.streamer.load(within(wait_ns));
        self.judge(None, result, &[Status::Timeout]).map(drop)
    }

    /// Reads the file into separate memory, past all units in memory.
    fn verify(&mut self) -> Step {
        let case = &self.run.case;
        let unit = self.any_unit();
        self.says(format!("verify {unit}"));
        let result = case.rig.streamer.verify(unit);
        let poor = [Status::Budget, Status::NoMem];
        let fine = if matches!(case.payer, Payer::Cut | Payer::Exact) { &poor[..] } else { &[] };
        self.judge(Some(unit), result, fine).map(drop)
    }

    /// The device computes with some units behind the back of the streamer, which has them back.
    fn compute(&mut self) -> Step {
        let case = &self.run.case;
        self.let_go_all();
        if case.device.is_none() {
            return Ok(());
        }
        let mut under_way = Vec::new();
        for _ in 0..1 + self.random.below(6) {
            let unit = self.wish();
            self.says(format!("compute with {unit}"));
            let how = AcquireOpts { when_issued: true, poll: false, deadline_ns: soon() };
            let held =
                self.judge(Some(unit), case.rig.streamer.acquire(unit, how), &[Status::Busy]);
            let Some(held) = held? else { continue };
            self.run.had.fetch_add(1, Ordering::Relaxed);
            if held.memory == Memory::Host {
                self.held.push(held);
                self.let_go();
                continue;
            }
            let begun = case.rig.compute_with(&held);
            under_way.extend(self.judge(Some(unit), begun, &[])?.map(|one| (unit, one)));
        }
        for (unit, computing) in &under_way {
            self.judge(Some(*unit), computing.end(), &[])?;
        }
        Ok(())
    }

    /// Everything that can be looked at, while others work.
    fn look(&mut self) -> Step {
        let case = &self.run.case;
        let streamer = &case.rig.streamer;
        self.says("look");
        let plan = streamer.plan();
        assert_eq!(plan.residencies.len(), case.rig.files.units.units.len());
        let stats = streamer.stats();
        assert!(stats.acquires >= self.held.len() as u64);
        assert!(streamer.progress().residents <= plan.residencies.len() as u64 * 2);
        let texts = [streamer.plan_text(), streamer.plan_json(), streamer.engine().0];
        assert!(texts.iter().all(|text| !text.is_empty()));
        assert!(streamer.marks().len() <= 500);
        assert!(streamer.layers().is_sorted_by(|a, b| a.layer < b.layer), "each layer once");
        drop((streamer.links(), streamer.range(), streamer.sum_of(self.any_unit())));
        drop(streamer.what_if(Links { disk: 1_000_000_000, device: 9_000_000_000, processor: 0 }));
        for (lane, tier) in [Tier::Host, Tier::Device].map(|tier| (case.usage(tier), tier)) {
            let over = lane.is_some_and(|lane| lane.peak_bytes > lane.limit_bytes);
            assert!(!over || case.payer == Payer::Cut, "{tier:?}: {lane:?}");
        }
        Ok(())
    }

    /// Closes the streamer or its runtime, where that is how it ends.
    fn end(&mut self, step: u64) -> Step {
        let case = &self.run.case;
        if case.ending == Ending::Quiet || step < STEPS / 3 {
            return Ok(());
        }
        let until = within(self.random.below(1_000_000));
        self.says("close");
        let result = match case.ending {
            Ending::Shut => case.rig.runtime.close(until),
            _ => case.rig.streamer.close(until),
        };
        let is_closed = case.ending == Ending::Closed && result.is_ok();
        assert!(!is_closed || self.held.is_empty(), "closed, and units are in use");
        self.judge(None, result, &[Status::Busy]).map(drop)
    }
}
