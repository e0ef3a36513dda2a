//! Which tokens of a layer are left: what a policy said last, and all that came after.

use std::ops::Range;

use crate::sparse::lists::Lists;

/// What is left of a layer from which tokens were evicted. What came later is no list: a put
/// costs nothing here, however long the sequence is.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// What the policy left, for each head or for all of them.
    pub lists: Lists,
    /// From this position on all tokens are left.
    pub since: u32,
}

impl Kept {
    /// Positions from `tokens` on are no more. Takes no memory.
    pub fn cut(&mut self, tokens: u32) {
        if tokens >= self.since {
            return;
        }
        self.since = tokens;
        let Lists { starts, items } = &mut self.lists;
        let (mut from, mut to) = (0, 0);
        for start in starts.iter_mut().skip(1) {
            let end = *start as usize;
            let list = items.get(from..end).unwrap_or_default();
            let left = list.partition_point(|&at| at < tokens);
            items.copy_within(from..from + left, to);
            (from, to) = (end, to + left);
            *start = to as u32;
        }
        items.truncate(to);
    }

    /// Whether any list has a token of a range, which is there.
    pub fn has_any(&self, range: &Range<u32>) -> bool {
        let has = |list: &[u32]| {
            let from = list.partition_point(|&at| at < range.start);
            list.get(from).is_some_and(|&at| at < range.end)
        };
        range.end > self.since || (0..self.lists.len()).any(|at| has(self.lists.get(at)))
    }

    /// A copy; none if there is no memory for one.
    pub fn try_clone(&self) -> Option<Kept> {
        let mut lists = Lists::default();
        lists.starts.try_reserve_exact(self.lists.starts.len()).ok()?;
        lists.items.try_reserve_exact(self.lists.items.len()).ok()?;
        lists.starts.extend_from_slice(&self.lists.starts);
        lists.items.extend_from_slice(&self.lists.items);
        Some(Kept { lists, since: self.since })
    }
}

/// Which tokens of a layer are left.
#[derive(Clone, Debug)]
pub struct Left<'a> {
    lists: &'a Lists,
    new: Range<u32>,
}

impl<'a> Left<'a> {
    pub(super) fn new(kept: &'a Kept, tokens: u32) -> Left<'a> {
        Left { lists: &kept.lists, new: kept.since..tokens.max(kept.since) }
    }

    /// How many lists there are: one for each head of keys, or of queries, or one for all.
    pub fn lists(&self) -> usize {
        self.lists.len()
    }

    /// A list: what a policy left, ascending, and behind it the positions that came later.
    pub fn list(&self, at: usize) -> (&'a [u32], Range<u32>) {
        (self.lists.get(at), self.new.clone())
    }

    /// How many tokens a list has.
    pub fn count(&self, at: usize) -> usize {
        self.lists.get(at).len() + self.new.len()
    }

    /// The positions of a list, ascending.
    pub fn positions(&self, at: usize) -> impl Iterator<Item = u32> + 'a {
        let (old, new) = self.list(at);
        old.iter().copied().chain(new)
    }

    /// Whether a list has a position.
    pub fn has(&self, at: usize, position: u32) -> bool {
        self.new.contains(&position) || self.lists.get(at).binary_search(&position).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(lists: &[&[u32]], since: u32) -> Kept {
        let mut kept = Kept { since, ..Kept::default() };
        lists.iter().for_each(|list| kept.lists.push(list.iter().copied()));
        kept
    }

    #[test]
    fn cuts_are_those_of_lists_that_were_written_out() {
        let lists: [&[u32]; 3] = [&[0, 4, 5, 9], &[], &[1, 2, 3, 8]];
        for tokens in 0..16 {
            let mut some = kept(&lists, 10);
            some.cut(tokens);
            let left = Left::new(&some, tokens.min(14));
            assert_eq!(left.lists(), 3);
            for (at, list) in lists.iter().enumerate() {
                let all = list.iter().copied().chain(10..14);
                let right: Vec<u32> = all.filter(|&position| position < tokens).collect();
                assert_eq!(left.positions(at).collect::<Vec<u32>>(), right, "{at} of {tokens}");
                assert_eq!(left.count(at), right.len());
                assert!((0..16).all(|p| left.has(at, p) == right.contains(&p)));
            }
            for (from, to) in [(0, 1), (4, 6), (6, 8), (8, 12), (12, 14)] {
                let has = (from..to).any(|p| lists.iter().any(|l| l.contains(&p) && p < tokens));
                let is_new = tokens > 10 && to > 10;
                if to <= tokens.min(14) {
                    assert_eq!(some.has_any(&(from..to)), has || is_new, "{from}..{to}");
                }
            }
        }
    }
}
