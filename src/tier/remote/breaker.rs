//! The breaker: a remote that does not answer, or answers nonsense, is left alone for a while,
//! and then asked by one request whether it is well again. Reads and writes have one each: a
//! remote that is full, or takes nothing, is read from.
//!
//! It has no clock and no lock: whoever asks says what time it is.

use crate::tier::remote::Trouble;

/// Failures in a row that open it.
pub const FAILURES: u32 = 5;
/// Answers that are nonsense, in a row, that open it.
pub const LIES: u32 = 8;
/// The last results that are looked at together.
pub const WINDOW: u32 = 32;
/// How many of them there must be.
pub const FEWEST: u32 = 8;
/// How long it is open the first time; each time after that twice as long.
pub const FIRST_OPEN_NS: u64 = 1_000_000_000;
/// The longest it is open, before chance is added or taken.
pub const LONGEST_OPEN_NS: u64 = 30_000_000_000;
/// How long a remote that refused is not written to.
pub const REFUSED_NS: u64 = 5_000_000_000;
/// After this a probe that nothing was heard of is lost, and another may go.
pub const PROBE_NS: u64 = 10_000_000_000;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Fetches, or asks.
    Read = 0,
    /// Stores, or removes.
    Write = 1,
}

/// What a request came to, for the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The remote did what it should, or said why not, as one that is well does.
    Well,
    /// It did not answer, or could not.
    Failure,
    /// It answered nonsense.
    Lie,
    /// It is full, takes nothing, or forbids it.
    Refusal,
}

impl Heard {
    /// What a result tells.
    pub fn of<T>(way: Way, result: &Result<T, Trouble>) -> Heard {
        match result.as_ref().err() {
            None => Heard::Well,
            Some(Trouble::Nonsense | Trouble::Damaged) => Heard::Lie,
            Some(Trouble::Full | Trouble::ReadOnly | Trouble::Denied) if way == Way::Write => {
                Heard::Refusal
            }
            Some(trouble) if trouble.is_answer() => Heard::Well,
            Some(_) => Heard::Failure,
        }
    }
}

/// How a way to the remote is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Requests go.
    Closed,
    /// None goes.
    Open,
    /// One goes, to see.
    Half,
}

/// Whether a request may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// It may.
    Go,
    /// It may, and all others wait for what becomes of it.
    Probe,
    /// It may not.
    Stay,
}

/// One way, and what was heard on it.
#[derive(Clone, Copy, Debug)]
struct Line {
    state: State,
    /// When it may be asked again; of a probe, when that is lost.
    until_ns: u64,
    /// How often it was opened since it was last closed.
    opened: u32,
    failures: u32,
    lies: u32,
    /// The last results, the latest lowest: 1 = a failure.
    window: u32,
    heard: u32,
}

impl Line {
    const NEW: Line = Line {
        state: State::Closed,
        until_ns: 0,
        opened: 0,
        failures: 0,
        lies: 0,
        window: 0,
        heard: 0,
    };

    fn count(&mut self, heard: Heard) {
        let failed = heard == Heard::Failure;
        self.window = self.window << 1 | u32::from(failed);
        self.heard = (self.heard + 1).min(WINDOW);
        match heard {
            Heard::Failure => self.failures += 1,
            Heard::Lie => (self.failures, self.lies) = (0, self.lies + 1),
            Heard::Well | Heard::Refusal => (self.failures, self.lies) = (0, 0),
        }
    }

    fn is_too_much(&self) -> bool {
        let bad = self.window.count_ones();
        self.failures >= FAILURES
            || self.lies >= LIES
            || self.heard >= FEWEST && 2 * bad >= self.heard
    }
}

/// The breaker of a remote.
#[derive(Clone, Debug)]
pub struct Breaker {
    lines: [Line; 2],
    /// Where the numbers of its chance have come to.
    chance: u64,
    opened: u64,
}

impl Breaker {
    /// A closed one. Those of engines that share a remote have seeds of their own, so that they do
    /// not all come back at the same moment.
    pub fn new(seed: u64) -> Breaker {
        Breaker { lines: [Line::NEW; 2], chance: seed, opened: 0 }
    }

    /// How a way is.
    pub fn state(&self, way: Way) -> State {
        self.lines[way as usize].state
    }

    /// How often ways were opened.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// Whether a request would go: nothing is changed by this, and it may not be a probe.
    pub fn is_closed(&self, way: Way) -> bool {
        self.state(way) == State::Closed
    }

    /// Whether a request would go, if only to see.
    pub fn may_go(&self, way: Way, now_ns: u64) -> bool {
        let line = &self.lines[way as usize];
        line.state == State::Closed || now_ns >= line.until_ns
    }

    /// Asks for leave for a request. What comes of one that goes must be told.
    pub fn leave(&mut self, way: Way, now_ns: u64) -> Leave {
        let line = &mut self.lines[way as usize];
        match line.state {
            State::Closed => Leave::Go,
            State::Open | State::Half if now_ns >= line.until_ns => {
                line.state = State::Half;
                line.until_ns = now_ns.saturating_add(PROBE_NS);
                Leave::Probe
            }
            State::Open | State::Half => Leave::Stay,
        }
    }

    /// Tells what came of a request, and whether that was a probe. Of those that went before it
    /// was opened nothing more is believed.
    pub fn record(&mut self, way: Way, heard: Heard, probes: bool, now_ns: u64) {
        let line = &mut self.lines[way as usize];
        match (line.state, heard) {
            (State::Open, _) => {}
            (State::Half, _) if !probes => {}
            (_, Heard::Refusal) if way == Way::Write => {
                *line = Line { state: State::Open, opened: line.opened, ..Line::NEW };
                line.until_ns = now_ns.saturating_add(REFUSED_NS);
                self.opened += 1;
            }
            (State::Half, Heard::Well | Heard::Refusal) => *line = Line::NEW,
            (State::Half, Heard::Failure | Heard::Lie) => self.open(way, now_ns),
            (State::Closed, _) => {
                line.count(heard);
                if line.is_too_much() {
                    self.open(way, now_ns);
                }
            }
        }
    }

    fn open(&mut self, way: Way, now_ns: u64) {
        let opened = self.lines[way as usize].opened;
        let doubled = FIRST_OPEN_NS.saturating_mul(1 << opened.min(32));
        let open_ns = self.about(doubled.min(LONGEST_OPEN_NS));
        self.lines[way as usize] = Line {
            state: State::Open,
            until_ns: now_ns.saturating_add(open_ns),
            opened: opened.saturating_add(1),
            ..Line::NEW
        };
        self.opened += 1;
    }

    /// A time of three quarters to five quarters of `ns`, by SplitMix64.
    fn about(&mut self, ns: u64) -> u64 {
        self.chance = self.chance.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.chance;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        let quarter = ns / 4;
        ns - quarter + mixed % (2 * quarter + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn record(breaker: &mut Breaker, heard: Heard, times: u32) {
        (0..times).for_each(|_| breaker.record(Way::Read, heard, false, 0));
    }

    #[test]
    fn failures_in_a_row_open_it_and_one_probe_closes_it() {
        let mut breaker = Breaker::new(1);
        record(&mut breaker, Heard::Well, 10);
        record(&mut breaker, Heard::Failure, 4);
        record(&mut breaker, Heard::Well, 6);
        record(&mut breaker, Heard::Failure, 4);
        assert_eq!(breaker.leave(Way::Read, 0), Leave::Go);
        record(&mut breaker, Heard::Failure, 1);
        assert_eq!(breaker.state(Way::Read), State::Open);
        assert_eq!(breaker.state(Way::Write), State::Closed);
        assert_eq!(breaker.leave(Way::Read, SECOND / 2), Leave::Stay);
        // Late answers change nothing.
        record(&mut breaker, Heard::Well, 50);
        assert_eq!(breaker.leave(Way::Read, 2 * SECOND), Leave::Probe);
        assert_eq!(breaker.leave(Way::Read, 2 * SECOND), Leave::Stay);
        // Nor do they while it is asked whether it is well.
        for late in [Heard::Well, Heard::Failure, Heard::Lie] {
            breaker.record(Way::Read, late, false, 2 * SECOND);
            assert_eq!((breaker.state(Way::Read), breaker.opened()), (State::Half, 1));
        }
        breaker.record(Way::Read, Heard::Well, true, 2 * SECOND);
        assert_eq!((breaker.leave(Way::Read, 2 * SECOND), breaker.opened()), (Leave::Go, 1));
        // All is forgotten.
        record(&mut breaker, Heard::Failure, 4);
        assert!(breaker.is_closed(Way::Read));
    }

    #[test]
    fn half_of_the_last_results_or_lies_in_a_row_open_it() {
        let mut breaker = Breaker::new(2);
        for _ in 0..3 {
            record(&mut breaker, Heard::Failure, 1);
            record(&mut breaker, Heard::Well, 1);
        }
        record(&mut breaker, Heard::Well, 1);
        assert!(breaker.is_closed(Way::Read), "seven are too few");
        record(&mut breaker, Heard::Failure, 1);
        assert_eq!(breaker.state(Way::Read), State::Open, "four of eight");

        let mut breaker = Breaker::new(3);
        record(&mut breaker, Heard::Lie, 7);
        record(&mut breaker, Heard::Well, 1);
        record(&mut breaker, Heard::Lie, 7);
        assert!(breaker.is_closed(Way::Read));
        record(&mut breaker, Heard::Lie, 1);
        assert_eq!(breaker.state(Way::Read), State::Open);
    }

    #[test]
    fn refusals_stop_writing_for_a_while() {
        let mut breaker = Breaker::new(4);
        breaker.record(Way::Write, Heard::Refusal, false, 7);
        assert_eq!(breaker.leave(Way::Write, 7 + REFUSED_NS - 1), Leave::Stay);
        assert_eq!(breaker.leave(Way::Read, 7), Leave::Go);
        assert_eq!(breaker.leave(Way::Write, 7 + REFUSED_NS), Leave::Probe);
        // Still full: as long again, not longer.
        breaker.record(Way::Write, Heard::Refusal, true, 10 * SECOND);
        assert_eq!(breaker.leave(Way::Write, 10 * SECOND + REFUSED_NS), Leave::Probe);
        breaker.record(Way::Write, Heard::Well, true, 16 * SECOND);
        assert!(breaker.is_closed(Way::Write));
    }

    #[test]
    fn a_lost_probe_is_followed_by_another() {
        let mut breaker = Breaker::new(5);
        record(&mut breaker, Heard::Failure, 5);
        assert_eq!(breaker.leave(Way::Read, 2 * SECOND), Leave::Probe);
        assert_eq!(breaker.leave(Way::Read, 2 * SECOND + PROBE_NS - 1), Leave::Stay);
        assert_eq!(breaker.leave(Way::Read, 2 * SECOND + PROBE_NS), Leave::Probe);
    }

    #[test]
    fn times_grow_to_a_limit_and_differ_by_seed() {
        let times = |seed: u64| -> Vec<u64> {
            let mut breaker = Breaker::new(seed);
            record(&mut breaker, Heard::Failure, 5);
            let mut now = 0;
            (0..10)
                .map(|_| {
                    let open_ns = breaker.lines[0].until_ns - now;
                    now = breaker.lines[0].until_ns;
                    assert_eq!(breaker.leave(Way::Read, now), Leave::Probe);
                    breaker.record(Way::Read, Heard::Failure, true, now);
                    open_ns
                })
                .collect()
        };
        for (i, ns) in times(6).into_iter().enumerate() {
            let middle = LONGEST_OPEN_NS.min(SECOND << i);
            assert!((middle - middle / 4..=middle + middle / 4).contains(&ns), "{i}: {ns}");
        }
        assert_eq!(times(6), times(6));
        assert_ne!(times(6), times(7));
    }

    #[test]
    fn results_tell_what_they_should() {
        let heard = |way, trouble| Heard::of(way, &Err::<(), _>(trouble));
        assert_eq!(Heard::of(Way::Read, &Ok::<_, Trouble>(1)), Heard::Well);
        assert_eq!(heard(Way::Read, Trouble::Absent), Heard::Well);
        assert_eq!(heard(Way::Read, Trouble::Nonsense), Heard::Lie);
        assert_eq!(heard(Way::Read, Trouble::Damaged), Heard::Lie);
        assert_eq!(heard(Way::Write, Trouble::TooLong), Heard::Well);
        for trouble in [Trouble::Full, Trouble::ReadOnly, Trouble::Denied] {
            assert_eq!(heard(Way::Write, trouble), Heard::Refusal);
        }
        assert_eq!(heard(Way::Read, Trouble::Denied), Heard::Failure);
        for trouble in [Trouble::Later, Trouble::Late, Trouble::Gone] {
            assert_eq!(heard(Way::Read, trouble), Heard::Failure);
        }
    }

    /// A way as its description has it: all that was heard since it was last closed.
    #[derive(Default)]
    struct Model {
        heard: Vec<Heard>,
        open: bool,
        probing: bool,
    }

    impl Model {
        fn record(&mut self, way: Way, heard: Heard) {
            if self.open && !self.probing {
                return;
            }
            let refused = way == Way::Write && heard == Heard::Refusal;
            self.heard.push(heard);
            if self.probing {
                let bad = matches!(heard, Heard::Failure | Heard::Lie);
                (self.open, self.probing) = (refused || bad, false);
                self.heard.clear();
            } else if refused || self.is_too_much() {
                self.open = true;
                self.heard.clear();
            }
        }

        fn is_too_much(&self) -> bool {
            let in_a_row = |which: Heard, over: &[Heard]| {
                let latest = self.heard.iter().rev();
                latest.filter(|heard| !over.contains(heard)).take_while(|&&h| h == which).count()
            };
            let last: Vec<_> = self.heard.iter().rev().take(32).collect();
            let failed = last.iter().filter(|&&&heard| heard == Heard::Failure).count();
            in_a_row(Heard::Failure, &[]) >= 5
                || in_a_row(Heard::Lie, &[Heard::Failure]) >= 8
                || last.len() >= 8 && failed * 2 >= last.len()
        }
    }

    fn heard() -> impl Strategy<Value = Heard> {
        prop_oneof![
            8 => Just(Heard::Well),
            3 => Just(Heard::Failure),
            6 => Just(Heard::Lie),
            1 => Just(Heard::Refusal),
        ]
    }

    proptest! {
        #[test]
        fn it_does_what_the_description_says(
            seed in any::<u64>(),
            steps in prop::collection::vec((heard(), any::<bool>(), 0u64..4 * SECOND), 1..300),
        ) {
            let mut breaker = Breaker::new(seed);
            let mut models = [Model::default(), Model::default()];
            let mut now = 0;
            for (heard, write, later) in steps {
                let way = if write { Way::Write } else { Way::Read };
                // A read is never refused.
                let heard = if write || heard != Heard::Refusal { heard } else { Heard::Well };
                let model = &mut models[way as usize];
                now += later;
                let until = breaker.lines[way as usize].until_ns;
                let leave = breaker.leave(way, now);
                match leave {
                    Leave::Go => prop_assert!(!model.open),
                    Leave::Probe => {
                        prop_assert!(model.open && now >= until);
                        model.probing = true;
                    }
                    Leave::Stay => prop_assert!(model.open && now < until),
                }
                model.record(way, heard);
                breaker.record(way, heard, leave == Leave::Probe, now);
                prop_assert_eq!(breaker.is_closed(way), !model.open);
                if model.open {
                    let left = breaker.lines[way as usize].until_ns - now;
                    prop_assert!(left <= LONGEST_OPEN_NS / 4 * 5);
                }
            }
        }
    }
}
