//! Fair queues of cell jobs: by urgency (lane), and by session within a lane.
//!
//! A lane is served before the next one, but a less urgent lane is not starved. Within a lane,
//! sessions take turns by bytes (deficit round robin): each turn allows a number of bytes, and a
//! session keeps what it did not use as long as it has jobs. A session that joins is served in its
//! turn, not a round later.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;

/// A job: a number chosen by the caller, below the limit.
pub type Job = u32;

/// Lanes by urgency: demand, prefetch, demotion.
pub const LANES: usize = 3;
/// Default bytes of a turn.
const TURN_BYTES: u64 = 1 << 20;
/// Default limit of the bytes that one job is charged, so that no session waits for many turns.
const MOST_BYTES: u64 = 64 << 20;
/// After so many jobs of an urgent lane, one of a less urgent lane is taken first.
const PATIENCE: u32 = 16;

/// Links are numbers plus one, so that zeroed tables are empty.
#[derive(Clone, Copy)]
#[repr(C)]
struct Waiting {
    next: u32,
    prev: u32,
    session: u32,
    /// Its lane plus one; 0 = not queued.
    lane: u16,
    /// Its cells.
    cells: u16,
    bytes: u64,
}

// SAFETY: integers only.
unsafe impl Zeroable for Waiting {}

/// Jobs of one session in one lane.
#[derive(Clone, Copy)]
#[repr(C)]
struct Flow {
    head: u32,
    tail: u32,
    /// Neighbours among the sessions with jobs in this lane.
    next: u32,
    prev: u32,
    allowed_bytes: u64,
}

// SAFETY: integers only.
unsafe impl Zeroable for Flow {}

struct Lane {
    flows: Zeroed<Flow>,
    /// Session whose turn it is, plus one.
    turn: u32,
    last: u32,
    jobs: u32,
    cells: u32,
    bytes: u64,
}

/// The queues.
pub struct Queues {
    jobs: Zeroed<Waiting>,
    lanes: [Lane; LANES],
    passed_over: u32,
    turn_bytes: u64,
    /// Most bytes that one job is charged.
    most_bytes: u64,
}

impl Queues {
    /// Queues for jobs and sessions with numbers below these.
    pub fn new(max_jobs: u32, max_sessions: u32) -> Result<Queues> {
        if max_jobs == u32::MAX || max_sessions == u32::MAX {
            fail!(
                Limit,
                "{max_jobs} jobs and {max_sessions} sessions: the tables of the queues hold fewer"
            );
        }
        let lane = || -> Result<Lane> {
            let flows = Zeroed::new(max_sessions as usize)?;
            Ok(Lane { flows, turn: 0, last: 0, jobs: 0, cells: 0, bytes: 0 })
        };
        Ok(Queues {
            jobs: Zeroed::new(max_jobs as usize)?,
            lanes: [lane()?, lane()?, lane()?],
            passed_over: 0,
            turn_bytes: TURN_BYTES,
            most_bytes: MOST_BYTES,
        })
    }

    /// Sets the length of a turn and the most bytes that one job is charged. A caller that does
    /// long jobs in parts of this length returns the rest by [`Queues::put_back`].
    pub fn in_parts_of(&mut self, bytes: u64) {
        (self.turn_bytes, self.most_bytes) = (bytes.max(1), bytes.max(1));
    }

    /// Cells and bytes of the jobs in a lane.
    pub fn waiting(&self, lane: usize) -> (u32, u64) {
        (self.lanes[lane].cells, self.lanes[lane].bytes)
    }

    /// Whether a job is queued.
    pub fn is_queued(&self, job: Job) -> bool {
        self.jobs[job as usize].lane != 0
    }

    /// Queues a job of one cell that is not queued.
    pub fn push(&mut self, lane: usize, session: u32, job: Job, bytes: u64) {
        self.push_run(lane, session, job, (1, bytes));
    }

    /// Queues a job of several cells that is not queued.
    pub fn push_run(&mut self, lane: usize, session: u32, job: Job, (cells, bytes): (u16, u64)) {
        let last = self.lanes[lane].flows[session as usize].tail;
        self.insert(lane, Waiting { next: 0, prev: last, session, lane: 0, cells, bytes }, job);
    }

    /// Queues the rest of a job that was popped: its cells and bytes. The rest is the next job of its
    /// session.
    pub fn put_back(&mut self, lane: usize, session: u32, job: Job, (cells, bytes): (u16, u64)) {
        let first = self.lanes[lane].flows[session as usize].head;
        let waiting = Waiting { next: first, prev: 0, session, lane: 0, cells, bytes };
        self.insert(lane, waiting, job);
    }

    /// Links a job at one end of its session's jobs.
    fn insert(&mut self, lane: usize, waiting: Waiting, job: Job) {
        assert!(!self.is_queued(job), "job {job} waits already");
        let Waiting { next, prev, session, cells, bytes, .. } = waiting;
        let (row, number) = (&mut self.lanes[lane], job + 1);
        let flow = &mut row.flows[session as usize];
        if flow.head == 0 {
            flow.allowed_bytes = self.turn_bytes;
            row.join(session);
        }
        let flow = &mut row.flows[session as usize];
        match prev {
            0 => flow.head = number,
            prev => self.jobs[prev as usize - 1].next = number,
        }
        match next {
            0 => flow.tail = number,
            next => self.jobs[next as usize - 1].prev = number,
        }
        row.jobs += 1;
        row.cells += u32::from(cells);
        row.bytes += bytes;
        self.jobs[job as usize] = Waiting { lane: lane as u16 + 1, ..waiting };
    }

    /// Removes a job. Returns false if it was not queued.
    pub fn remove(&mut self, job: Job) -> bool {
        let Waiting { next, prev, session, lane, cells, bytes } = self.jobs[job as usize];
        let Some(lane) = (lane as usize).checked_sub(1) else { return false };
        let row = &mut self.lanes[lane];
        let flow = &mut row.flows[session as usize];
        match prev {
            0 => flow.head = next,
            prev => self.jobs[prev as usize - 1].next = next,
        }
        match next {
            0 => flow.tail = prev,
            next => self.jobs[next as usize - 1].prev = prev,
        }
        if flow.head == 0 {
            row.leave(session);
        }
        row.jobs -= 1;
        row.cells -= u32::from(cells);
        row.bytes -= bytes;
        self.jobs[job as usize].lane = 0;
        true
    }

    /// Takes the next job, with its lane.
    pub fn pop(&mut self) -> Option<(usize, Job)> {
        let first = (0..LANES).find(|&i| self.lanes[i].jobs > 0)?;
        let less_urgent = (first + 1..LANES).rfind(|&i| self.lanes[i].jobs > 0);
        let lane = match less_urgent {
            Some(lower) if self.passed_over >= PATIENCE => {
                self.passed_over = 0;
                lower
            }
            Some(_) => {
                self.passed_over += 1;
                first
            }
            None => first,
        };
        self.pop_from(lane).map(|job| (lane, job))
    }

    /// Takes the next job of one lane.
    pub fn pop_from(&mut self, lane: usize) -> Option<Job> {
        let row = &mut self.lanes[lane];
        loop {
            let session = row.turn.checked_sub(1)?;
            let flow = &mut row.flows[session as usize];
            let job = flow.head - 1;
            let bytes = self.jobs[job as usize].bytes.min(self.most_bytes);
            if bytes <= flow.allowed_bytes || row.turn == row.last {
                flow.allowed_bytes = flow.allowed_bytes.saturating_sub(bytes);
                self.remove(job);
                return Some(job);
            }
            flow.allowed_bytes += self.turn_bytes;
            row.rotate(session);
        }
    }
}

impl Lane {
    /// A session has its first job in a lane: it is served last.
    fn join(&mut self, session: u32) {
        let (last, number) = (self.last, session + 1);
        self.flows[session as usize].prev = last;
        self.flows[session as usize].next = 0;
        match last {
            0 => self.turn = number,
            last => self.flows[last as usize - 1].next = number,
        }
        self.last = number;
    }

    /// A session has no job in a lane any more.
    fn leave(&mut self, session: u32) {
        self.unlink(session);
        self.flows[session as usize].allowed_bytes = 0;
    }

    fn unlink(&mut self, session: u32) {
        let Flow { next, prev, .. } = self.flows[session as usize];
        match prev {
            0 => self.turn = next,
            prev => self.flows[prev as usize - 1].next = next,
        }
        match next {
            0 => self.last = prev,
            next => self.flows[next as usize - 1].prev = prev,
        }
    }

    /// Ends a turn and begins the next session's.
    fn rotate(&mut self, session: u32) {
        self.unlink(session);
        self.join(session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Each job is popped once, and jobs of a session in a lane in their order.
        #[test]
        fn agrees_with_plain_queues(
            calls in proptest::collection::vec((0u8..5, 0usize..LANES, 0u32..5, 0u32..40, 0u64..4 << 20), 1..400),
        ) {
            let mut queues = Queues::new(40, 5).unwrap();
            let mut model = vec![VecDeque::new(); LANES * 5];
            for (operation, lane, session, job, bytes) in calls {
                match operation {
                    0 | 1 if !queues.is_queued(job) => {
                        queues.push(lane, session, job, bytes);
                        model[lane * 5 + session as usize].push_back(job);
                    }
                    3 if !queues.is_queued(job) => {
                        queues.put_back(lane, session, job, (1, bytes));
                        model[lane * 5 + session as usize].push_front(job);
                    }
                    2 => {
                        let known = model.iter_mut().find(|q| q.contains(&job));
                        prop_assert_eq!(queues.remove(job), known.is_some());
                        known.into_iter().for_each(|q| q.retain(|&j| j != job));
                    }
                    _ => {
                        let waiting: usize = model.iter().map(VecDeque::len).sum();
                        let popped = queues.pop();
                        prop_assert_eq!(popped.is_some(), waiting > 0);
                        if let Some((lane, job)) = popped {
                            let fronts = model[lane * 5..lane * 5 + 5].iter_mut();
                            let mut from = fronts.filter(|q| q.front() == Some(&job));
                            prop_assert!(from.next().map(|q| q.pop_front()).is_some());
                        }
                    }
                }
                for lane in 0..LANES {
                    let jobs: usize = model[lane * 5..lane * 5 + 5].iter().map(VecDeque::len).sum();
                    prop_assert_eq!(queues.waiting(lane).0 as usize, jobs);
                }
            }
        }
    }

    #[test]
    fn sessions_get_equal_bytes_regardless_of_request_sizes() {
        let mut queues = Queues::new(10_000, 4).unwrap();
        let sizes = [64 << 10, 1 << 20, 3 << 20, 200 << 10];
        let mut owner = Vec::new();
        for (session, bytes) in sizes.into_iter().enumerate() {
            for _ in 0..2000 {
                queues.push(0, session as u32, owner.len() as u32, bytes);
                owner.push(session);
            }
        }
        let mut got = [0u64; 4];
        while got.iter().sum::<u64>() < 400 << 20 {
            let (_, job) = queues.pop().unwrap();
            got[owner[job as usize]] += sizes[owner[job as usize]];
        }
        let (least, most) = (got.iter().min().unwrap(), got.iter().max().unwrap());
        assert!(most - least <= 2 * (4 << 20), "{got:?}");
    }

    #[test]
    fn demotion_is_not_starved() {
        let mut queues = Queues::new(1000, 1).unwrap();
        (0..100).for_each(|job| queues.push(2, 0, job, 4096));
        (100..900).for_each(|job| queues.push(0, 0, job, 4096));
        let first: Vec<usize> = (0..170).map(|_| queues.pop().unwrap().0).collect();
        assert_eq!(first.iter().filter(|&&lane| lane == 2).count(), 10);
    }
}
