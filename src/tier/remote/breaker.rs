//! The circuit breaker. It stops requests to a remote that fails or sends malformed replies for a
//! while, then admits one probe. Reads and writes have one circuit each: a remote that is full or
//! read-only is still read.
//!
//! It has no clock and no lock: callers pass the time.

use crate::tier::remote::RemoteError;

/// Failures in a row that open a circuit.
pub const FAILURES: u32 = 5;
/// Malformed replies in a row that open a circuit.
pub const MALFORMED: u32 = 8;
/// Number of last results whose failure rate counts.
pub const WINDOW: u32 = 32;
/// Least number of results for a failure rate.
pub const MIN_RESULTS: u32 = 8;
/// Time that a circuit is open at first; it doubles each time.
pub const FIRST_OPEN_NS: u64 = 1_000_000_000;
/// Longest time that a circuit is open, before jitter.
pub const LONGEST_OPEN_NS: u64 = 30_000_000_000;
/// Time without writes after a refusal.
pub const REFUSED_NS: u64 = 5_000_000_000;
/// Time after which a probe without a result is lost, and another one is admitted.
pub const PROBE_NS: u64 = 10_000_000_000;

/// Direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A get or a lookup.
    Read = 0,
    /// A put or a removal.
    Write = 1,
}

/// The result of a request, as the breaker counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The remote works: it executed the request, or replied why not.
    Success,
    /// No reply, or none in time.
    Failure,
    /// A malformed reply or a damaged object.
    Malformed,
    /// The remote is full, read-only, or forbids writing.
    Refusal,
}

impl Outcome {
    /// The outcome of a result.
    pub fn of<T>(direction: Direction, result: &Result<T, RemoteError>) -> Outcome {
        match result.as_ref().err() {
            None => Outcome::Success,
            Some(RemoteError::Malformed | RemoteError::Damaged) => Outcome::Malformed,
            Some(RemoteError::Full | RemoteError::ReadOnly | RemoteError::Denied)
                if direction == Direction::Write =>
            {
                Outcome::Refusal
            }
            Some(error) if error.is_answer() => Outcome::Success,
            Some(_) => Outcome::Failure,
        }
    }
}

/// State of a circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Requests are admitted.
    Closed = 1,
    /// No request is admitted.
    Open = 2,
    /// One probe is in flight.
    HalfOpen = 3,
}

/// Whether a request is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permit {
    /// It is.
    Allow,
    /// It is, as a probe: all others wait for its result.
    Probe,
    /// It is not.
    Deny,
}

/// One circuit and its last results.
#[derive(Clone, Copy, Debug)]
struct Circuit {
    state: State,
    /// When a probe is admitted; half open: when the probe is lost.
    until_ns: u64,
    /// Times that it opened since it was last closed.
    opened: u32,
    failures: u32,
    malformed: u32,
    /// The last results, the latest in the lowest bit: 1 = a failure.
    window: u32,
    outcome: u32,
}

impl Circuit {
    const NEW: Circuit = Circuit {
        state: State::Closed,
        until_ns: 0,
        opened: 0,
        failures: 0,
        malformed: 0,
        window: 0,
        outcome: 0,
    };

    fn count(&mut self, outcome: Outcome) {
        let failed = outcome == Outcome::Failure;
        self.window = self.window << 1 | u32::from(failed);
        self.outcome = (self.outcome + 1).min(WINDOW);
        match outcome {
            Outcome::Failure => self.failures += 1,
            Outcome::Malformed => (self.failures, self.malformed) = (0, self.malformed + 1),
            Outcome::Success | Outcome::Refusal => (self.failures, self.malformed) = (0, 0),
        }
    }

    fn should_open(&self) -> bool {
        let bad = self.window.count_ones();
        self.failures >= FAILURES
            || self.malformed >= MALFORMED
            || self.outcome >= MIN_RESULTS && 2 * bad >= self.outcome
    }
}

/// The circuits of a remote.
#[derive(Clone, Debug)]
pub struct Breaker {
    circuits: [Circuit; 2],
    /// State of the random numbers for jitter.
    random: u64,
    opened: u64,
}

impl Breaker {
    /// A breaker with closed circuits. Stores that share a remote have different seeds, so that
    /// they do not retry at the same moment.
    pub fn new(seed: u64) -> Breaker {
        Breaker { circuits: [Circuit::NEW; 2], random: seed, opened: 0 }
    }

    /// State of a circuit.
    pub fn state(&self, direction: Direction) -> State {
        self.circuits[direction as usize].state
    }

    /// Times that circuits opened.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// Whether requests are admitted, and not only as probes. Changes nothing.
    pub fn is_closed(&self, direction: Direction) -> bool {
        self.state(direction) == State::Closed
    }

    /// Whether a request would be admitted, perhaps as a probe. Changes nothing.
    pub fn allows(&self, direction: Direction, now_ns: u64) -> bool {
        let circuit = &self.circuits[direction as usize];
        circuit.state == State::Closed || now_ns >= circuit.until_ns
    }

    /// Admits a request, or not. The result of an admitted request must be recorded.
    pub fn admit(&mut self, direction: Direction, now_ns: u64) -> Permit {
        let circuit = &mut self.circuits[direction as usize];
        match circuit.state {
            State::Closed => Permit::Allow,
            State::Open | State::HalfOpen if now_ns >= circuit.until_ns => {
                circuit.state = State::HalfOpen;
                circuit.until_ns = now_ns.saturating_add(PROBE_NS);
                Permit::Probe
            }
            State::Open | State::HalfOpen => Permit::Deny,
        }
    }

    /// Records the outcome of a request, and whether it was a probe. Outcomes of requests from
    /// before the circuit opened are ignored.
    pub fn record(&mut self, direction: Direction, outcome: Outcome, probes: bool, now_ns: u64) {
        let circuit = &mut self.circuits[direction as usize];
        match (circuit.state, outcome) {
            (State::Open, _) => {}
            (State::HalfOpen, _) if !probes => {}
            (_, Outcome::Refusal) if direction == Direction::Write => {
                *circuit = Circuit { state: State::Open, opened: circuit.opened, ..Circuit::NEW };
                circuit.until_ns = now_ns.saturating_add(REFUSED_NS);
                self.opened += 1;
            }
            (State::HalfOpen, Outcome::Success | Outcome::Refusal) => *circuit = Circuit::NEW,
            (State::HalfOpen, Outcome::Failure | Outcome::Malformed) => {
                self.open(direction, now_ns)
            }
            (State::Closed, _) => {
                circuit.count(outcome);
                if circuit.should_open() {
                    self.open(direction, now_ns);
                }
            }
        }
    }

    fn open(&mut self, direction: Direction, now_ns: u64) {
        let opened = self.circuits[direction as usize].opened;
        let doubled = FIRST_OPEN_NS.saturating_mul(1 << opened.min(32));
        let open_ns = self.jittered(doubled.min(LONGEST_OPEN_NS));
        self.circuits[direction as usize] = Circuit {
            state: State::Open,
            until_ns: now_ns.saturating_add(open_ns),
            opened: opened.saturating_add(1),
            ..Circuit::NEW
        };
        self.opened += 1;
    }

    /// A random time from three to five quarters of `ns`, by SplitMix64.
    fn jittered(&mut self, ns: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
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

    fn record(breaker: &mut Breaker, outcome: Outcome, times: u32) {
        (0..times).for_each(|_| breaker.record(Direction::Read, outcome, false, 0));
    }

    #[test]
    fn consecutive_failures_open_the_circuit_and_one_probe_closes_it() {
        let mut breaker = Breaker::new(1);
        record(&mut breaker, Outcome::Success, 10);
        record(&mut breaker, Outcome::Failure, 4);
        record(&mut breaker, Outcome::Success, 6);
        record(&mut breaker, Outcome::Failure, 4);
        assert_eq!(breaker.admit(Direction::Read, 0), Permit::Allow);
        record(&mut breaker, Outcome::Failure, 1);
        assert_eq!(breaker.state(Direction::Read), State::Open);
        assert_eq!(breaker.state(Direction::Write), State::Closed);
        assert_eq!(breaker.admit(Direction::Read, SECOND / 2), Permit::Deny);
        // Results of earlier requests change nothing.
        record(&mut breaker, Outcome::Success, 50);
        assert_eq!(breaker.admit(Direction::Read, 2 * SECOND), Permit::Probe);
        assert_eq!(breaker.admit(Direction::Read, 2 * SECOND), Permit::Deny);
        // Nor do they while the probe is in flight.
        for late in [Outcome::Success, Outcome::Failure, Outcome::Malformed] {
            breaker.record(Direction::Read, late, false, 2 * SECOND);
            assert_eq!((breaker.state(Direction::Read), breaker.opened()), (State::HalfOpen, 1));
        }
        breaker.record(Direction::Read, Outcome::Success, true, 2 * SECOND);
        assert_eq!(
            (breaker.admit(Direction::Read, 2 * SECOND), breaker.opened()),
            (Permit::Allow, 1)
        );
        // All counts were reset.
        record(&mut breaker, Outcome::Failure, 4);
        assert!(breaker.is_closed(Direction::Read));
    }

    #[test]
    fn a_failure_rate_or_consecutive_malformed_replies_open_the_circuit() {
        let mut breaker = Breaker::new(2);
        for _ in 0..3 {
            record(&mut breaker, Outcome::Failure, 1);
            record(&mut breaker, Outcome::Success, 1);
        }
        record(&mut breaker, Outcome::Success, 1);
        assert!(breaker.is_closed(Direction::Read), "seven are too few");
        record(&mut breaker, Outcome::Failure, 1);
        assert_eq!(breaker.state(Direction::Read), State::Open, "four of eight");

        let mut breaker = Breaker::new(3);
        record(&mut breaker, Outcome::Malformed, 7);
        record(&mut breaker, Outcome::Success, 1);
        record(&mut breaker, Outcome::Malformed, 7);
        assert!(breaker.is_closed(Direction::Read));
        record(&mut breaker, Outcome::Malformed, 1);
        assert_eq!(breaker.state(Direction::Read), State::Open);
    }

    #[test]
    fn a_refusal_pauses_writes_only() {
        let mut breaker = Breaker::new(4);
        breaker.record(Direction::Write, Outcome::Refusal, false, 7);
        assert_eq!(breaker.admit(Direction::Write, 7 + REFUSED_NS - 1), Permit::Deny);
        assert_eq!(breaker.admit(Direction::Read, 7), Permit::Allow);
        assert_eq!(breaker.admit(Direction::Write, 7 + REFUSED_NS), Permit::Probe);
        // Still full: the same pause again, not a longer one.
        breaker.record(Direction::Write, Outcome::Refusal, true, 10 * SECOND);
        assert_eq!(breaker.admit(Direction::Write, 10 * SECOND + REFUSED_NS), Permit::Probe);
        breaker.record(Direction::Write, Outcome::Success, true, 16 * SECOND);
        assert!(breaker.is_closed(Direction::Write));
    }

    #[test]
    fn a_lost_probe_is_replaced() {
        let mut breaker = Breaker::new(5);
        record(&mut breaker, Outcome::Failure, 5);
        assert_eq!(breaker.admit(Direction::Read, 2 * SECOND), Permit::Probe);
        assert_eq!(breaker.admit(Direction::Read, 2 * SECOND + PROBE_NS - 1), Permit::Deny);
        assert_eq!(breaker.admit(Direction::Read, 2 * SECOND + PROBE_NS), Permit::Probe);
    }

    #[test]
    fn open_times_double_up_to_a_limit_with_jitter_by_seed() {
        let times = |seed: u64| -> Vec<u64> {
            let mut breaker = Breaker::new(seed);
            record(&mut breaker, Outcome::Failure, 5);
            let mut now = 0;
            (0..10)
                .map(|_| {
                    let open_ns = breaker.circuits[0].until_ns - now;
                    now = breaker.circuits[0].until_ns;
                    assert_eq!(breaker.admit(Direction::Read, now), Permit::Probe);
                    breaker.record(Direction::Read, Outcome::Failure, true, now);
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
    fn results_map_to_outcomes() {
        let outcome = |direction, error| Outcome::of(direction, &Err::<(), _>(error));
        assert_eq!(Outcome::of(Direction::Read, &Ok::<_, RemoteError>(1)), Outcome::Success);
        assert_eq!(outcome(Direction::Read, RemoteError::Absent), Outcome::Success);
        assert_eq!(outcome(Direction::Read, RemoteError::Malformed), Outcome::Malformed);
        assert_eq!(outcome(Direction::Read, RemoteError::Damaged), Outcome::Malformed);
        assert_eq!(outcome(Direction::Write, RemoteError::TooLong), Outcome::Success);
        for error in [RemoteError::Full, RemoteError::ReadOnly, RemoteError::Denied] {
            assert_eq!(outcome(Direction::Write, error), Outcome::Refusal);
        }
        assert_eq!(outcome(Direction::Read, RemoteError::Denied), Outcome::Failure);
        for error in [RemoteError::Busy, RemoteError::Timeout, RemoteError::Unreachable] {
            assert_eq!(outcome(Direction::Read, error), Outcome::Failure);
        }
    }

    /// A reference model of one circuit: all outcomes since it was last closed.
    #[derive(Default)]
    struct Model {
        outcome: Vec<Outcome>,
        open: bool,
        probing: bool,
    }

    impl Model {
        fn record(&mut self, direction: Direction, outcome: Outcome) {
            if self.open && !self.probing {
                return;
            }
            let refused = direction == Direction::Write && outcome == Outcome::Refusal;
            self.outcome.push(outcome);
            if self.probing {
                let bad = matches!(outcome, Outcome::Failure | Outcome::Malformed);
                (self.open, self.probing) = (refused || bad, false);
                self.outcome.clear();
            } else if refused || self.should_open() {
                self.open = true;
                self.outcome.clear();
            }
        }

        fn should_open(&self) -> bool {
            let in_a_row = |which: Outcome, over: &[Outcome]| {
                let latest = self.outcome.iter().rev();
                latest
                    .filter(|outcome| !over.contains(outcome))
                    .take_while(|&&h| h == which)
                    .count()
            };
            let last: Vec<_> = self.outcome.iter().rev().take(32).collect();
            let failed = last.iter().filter(|&&&outcome| outcome == Outcome::Failure).count();
            in_a_row(Outcome::Failure, &[]) >= 5
                || in_a_row(Outcome::Malformed, &[Outcome::Failure]) >= 8
                || last.len() >= 8 && failed * 2 >= last.len()
        }
    }

    fn outcome() -> impl Strategy<Value = Outcome> {
        prop_oneof![
            8 => Just(Outcome::Success),
            3 => Just(Outcome::Failure),
            6 => Just(Outcome::Malformed),
            1 => Just(Outcome::Refusal),
        ]
    }

    proptest! {
        #[test]
        fn the_breaker_agrees_with_the_model(
            seed in any::<u64>(),
            steps in prop::collection::vec((outcome(), any::<bool>(), 0u64..4 * SECOND), 1..300),
        ) {
            let mut breaker = Breaker::new(seed);
            let mut models = [Model::default(), Model::default()];
            let mut now = 0;
            for (outcome, write, later) in steps {
                let direction = if write { Direction::Write } else { Direction::Read };
                // A read is never refused.
                let outcome = if write || outcome != Outcome::Refusal { outcome } else { Outcome::Success };
                let model = &mut models[direction as usize];
                now += later;
                let until = breaker.circuits[direction as usize].until_ns;
                let leave = breaker.admit(direction, now);
                match leave {
                    Permit::Allow => prop_assert!(!model.open),
                    Permit::Probe => {
                        prop_assert!(model.open && now >= until);
                        model.probing = true;
                    }
                    Permit::Deny => prop_assert!(model.open && now < until),
                }
                model.record(direction, outcome);
                breaker.record(direction, outcome, leave == Permit::Probe, now);
                prop_assert_eq!(breaker.is_closed(direction), !model.open);
                if model.open {
                    let left = breaker.circuits[direction as usize].until_ns - now;
                    prop_assert!(left <= LONGEST_OPEN_NS / 4 * 5);
                }
            }
        }
    }
}
