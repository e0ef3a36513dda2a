//! Lines of jobs: those of a move, and those that wait for the same. A job stands in one
//! of each kind at most, and leaves it in one step, wherever it stands.

use crate::base::status::Result;
use crate::fail;
use crate::store::state::jobs::Step;
use crate::store::state::slot_table::Table;
use crate::store::state::{Job, StoreState};

/// Nobody.
const NONE: u32 = u32::MAX;

/// What a line is of.
#[derive(Clone, Copy)]
pub(super) enum Of {
    /// All jobs of a move, in the order in which they were begun.
    Move = 0,
    /// Those that wait for memory, or for one cell.
    Wait = 1,
}

/// The neighbours of a job in a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    before: u32,
    after: u32,
}

/// A line.
#[derive(Debug)]
pub(super) struct Line {
    first: u32,
    last: u32,
    count: usize,
}

impl Link {
    /// Of a job that stands in no line.
    pub const NONE: Link = Link { before: NONE, after: NONE };
}

impl Default for Line {
    fn default() -> Line {
        Line { first: NONE, last: NONE, count: 0 }
    }
}

impl Line {
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn first(&self) -> Option<u32> {
        Some(self.first).filter(|&id| id != NONE)
    }

    /// Those in it, the first one first.
    pub fn all(&self, jobs: &Table<Job>, of: Of) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(), move |&id| Line::after(jobs, of, id))
    }

    /// The one behind a job.
    pub fn after(jobs: &Table<Job>, of: Of, id: u32) -> Option<u32> {
        Some(jobs[id].links[of as usize].after).filter(|&id| id != NONE)
    }

    pub fn push_back(&mut self, jobs: &mut Table<Job>, of: Of, id: u32) {
        self.put(jobs, of, id, Link { before: self.last, after: NONE });
    }

    pub fn push_front(&mut self, jobs: &mut Table<Job>, of: Of, id: u32) {
        self.put(jobs, of, id, Link { before: NONE, after: self.first });
    }

    fn put(&mut self, jobs: &mut Table<Job>, of: Of, id: u32, link: Link) {
        jobs[id].links[of as usize] = link;
        self.join(jobs, of, link, Link { before: id, after: id });
        self.count += 1;
    }

    /// Takes a job out that stands in it.
    pub fn remove(&mut self, jobs: &mut Table<Job>, of: Of, id: u32) {
        let link = std::mem::replace(&mut jobs[id].links[of as usize], Link::NONE);
        self.join(jobs, of, link, Link { before: link.before, after: link.after });
        self.count -= 1;
    }

    pub fn pop_back(&mut self, jobs: &mut Table<Job>, of: Of) -> Option<u32> {
        let id = Some(self.last).filter(|&id| id != NONE)?;
        self.remove(jobs, of, id);
        Some(id)
    }

    /// Has the neighbours of a place name others: the one before it `to.after` as the
    /// next, the one after it `to.before` as the one before.
    fn join(&mut self, jobs: &mut Table<Job>, of: Of, at: Link, to: Link) {
        match at.before {
            NONE => self.first = to.after,
            before => jobs[before].links[of as usize].after = to.after,
        }
        match at.after {
            NONE => self.last = to.before,
            after => jobs[after].links[of as usize].before = to.before,
        }
    }
}

impl StoreState {
    /// That every job stands in the lines it should, and in no other.
    pub(super) fn check_lines(&self) -> Result<()> {
        let (mut found, mut waiting) = (0, 0);
        for (number, one) in self.moves.iter() {
            let is_its = |id: &u32| self.jobs.get(*id).is_some_and(|job| job.number == number);
            let count = one.jobs.all(&self.jobs, Of::Move).filter(is_its).count();
            if count != one.jobs.len() || count != one.under_way as usize {
                fail!(State, "move {number} has {} cells under way, {count} jobs", one.under_way);
            }
            found += count;
        }
        let behind = self.behind.lines().map(|line| (line, Step::Behind));
        let lines = self.waiting.values().map(|line| (line, Step::Waiting));
        for (line, step) in
            lines.chain([(&self.memory_waiters, Step::WaitsForMemory)]).chain(behind)
        {
            let is_so = |id: &u32| self.jobs.get(*id).is_some_and(|job| job.step == step);
            let count = line.all(&self.jobs, Of::Wait).filter(is_so).count();
            if count != line.len() {
                fail!(State, "{} jobs are {step:?}, {count} of them in line", line.len());
            }
            waiting += count;
        }
        let waits =
            |job: &Job| matches!(job.step, Step::Waiting | Step::WaitsForMemory | Step::Behind);
        let wait = self.jobs.iter().filter(|(_, job)| waits(job)).count();
        if (found, waiting) != (self.jobs.len(), wait) {
            fail!(
                State,
                "{found} of {} jobs have a move, {waiting} of {wait} a line",
                self.jobs.len()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::chunks::Cell;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Two kinds of lines over the same jobs, beside plain queues.
        #[test]
        fn lines_are_queues_that_can_be_left_anywhere(
            steps in prop::collection::vec((0..4u8, 0..3usize, any::<u16>()), 1..400),
        ) {
            const OF: [Of; 3] = [Of::Wait, Of::Wait, Of::Move];
            let mut jobs = Table::new(64);
            for number in 0..64 {
                jobs.add(Job::new(0, number, Cell { chunk: 0, layer: 0 })).unwrap();
            }
            let mut lines: [Line; 3] = Default::default();
            let mut queues: [VecDeque<u32>; 3] = Default::default();
            for (what, at, choice) in steps {
                let (of, line) = (OF[at], &mut lines[at]);
                let id = u32::from(choice) % 64;
                let others = if at == 2 { 2..3 } else { 0..2 };
                let is_free = queues[others].iter().all(|queue| !queue.contains(&id));
                let queue = &mut queues[at];
                match what {
                    0 if is_free => {
                        line.push_back(&mut jobs, of, id);
                        queue.push_back(id);
                    }
                    1 if is_free => {
                        line.push_front(&mut jobs, of, id);
                        queue.push_front(id);
                    }
                    2 if !queue.is_empty() => {
                        let id = queue.remove(usize::from(choice) % queue.len()).unwrap();
                        line.remove(&mut jobs, of, id);
                    }
                    _ => prop_assert_eq!(line.pop_back(&mut jobs, of), queue.pop_back()),
                }
                for ((line, queue), of) in lines.iter().zip(&queues).zip(OF) {
                    let all: Vec<u32> = line.all(&jobs, of).collect();
                    prop_assert_eq!(queue, &all);
                    prop_assert_eq!((line.len(), line.is_empty()), (queue.len(), queue.is_empty()));
                }
            }
        }
    }
}
