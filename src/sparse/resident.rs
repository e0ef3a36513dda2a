//! Resident tokens of a layer in the order in which policies count them. Sums of attention over
//! buffer rows are scattered to these tokens.

use crate::attention::keys::{Heads, Keys};
use crate::attention::panel::TILE;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::lists::RetainedTokens;
use crate::sparse::placement::BlockPlacement;

/// The resident tokens of a layer.
#[derive(Clone, Copy, Debug)]
pub struct ResidentTokens<'a> {
    /// Tokens that were retained by the last eviction: one list for all heads, for each head of
    /// keys or of queries. None = nothing was evicted.
    pub retained: Option<&'a RetainedTokens>,
    /// Tokens from this position on were appended after it: all are resident.
    pub from: u32,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Heads of the model.
    pub heads: Heads,
}

impl ResidentTokens<'_> {
    /// Resident tokens of a list, as [`Sparse::observe`](crate::sparse::Sparse::observe) takes
    /// them. Fails if lists have different lengths.
    pub fn count(&self) -> Result<u32> {
        let ResidentTokens { retained, from, tokens, heads } = *self;
        let Some(new) = tokens.checked_sub(from).filter(|_| retained.is_some() || from == 0) else {
            fail!(Invalid, "all tokens from {from} on are resident, but the sequence has {tokens}");
        };
        let Some(retained) = retained else { return Ok(new) };
        let lists = retained.heads.len();
        if ![1, heads.keys as usize, heads.queries as usize].contains(&lists) {
            let Heads { queries, keys } = heads;
            fail!(
                Invalid,
                "{lists} lists of retained tokens: pass 1, {keys} (heads of keys) or {queries} (query heads)"
            );
        }
        let first = retained.heads.get(0).len();
        for list in (0..lists).map(|at| retained.heads.get(at)) {
            let is_before = list.last().is_none_or(|&last| last < from);
            if list.len() != first || !is_before || !list.is_sorted_by(|a, b| a < b) {
                fail!(
                    Invalid,
                    "lists of retained tokens must ascend, have equal lengths and end before {from}"
                );
            }
        }
        match new.checked_add(first as u32) {
            Some(count) => Ok(count),
            None => fail!(Limit, "{first} and {new} tokens"),
        }
    }

    /// Adds sums over rows, whose tokens are at ascending `positions`: `[query heads, rows]` to
    /// `[query heads, count]`, or one row for all heads, where they share one list. Only resident
    /// tokens may have a sum above zero. After an error the contents of `out` are undefined.
    pub fn add(&self, sums: &[f32], positions: &[u32], out: &mut [f32]) -> Result<()> {
        let (lines, count) = self.lines(sums.len(), out.len())?;
        let rows = sums.len() / lines;
        if rows != positions.len() {
            fail!(Invalid, "{} sums of {lines} heads and {} rows", sums.len(), positions.len());
        }
        if rows == 0 || count == 0 {
            return Ok(());
        }
        let lines = sums.chunks_exact(rows).zip(out.chunks_exact_mut(count));
        for (head, (sums, out)) in (0..).zip(lines) {
            let mut head_sums = HeadSums::of(self, head, out);
            let mut all = positions.iter().zip(sums);
            all.try_for_each(|(&position, &sum)| head_sums.add(position, sum))?;
        }
        Ok(())
    }

    /// The same for sums that a decode has kept, over the placed rows that `select` names, in its
    /// order: `[query heads, most]`. `select` has the queries of that decode.
    pub fn add_selected(
        &self,
        sums: &[f32],
        (select, first_query, queries): (&Keys<'_>, u32, u32),
        placed: &BlockPlacement<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        placed.check()?;
        select.check(self.heads, first_query, queries)?;
        let (lines, count) = self.lines(sums.len(), out.len())?;
        let most = sums.len() / lines;
        if most == 0 || count == 0 {
            return Ok(());
        }
        let visible = first_query.saturating_add(queries).min(placed.rows());
        let lines = sums.chunks_exact(most).zip(out.chunks_exact_mut(count));
        for (head, (sums, out)) in (0..).zip(lines) {
            let mut head_sums = HeadSums::of(self, head, out);
            let head_keys = select.of(self.heads, head);
            let mut cursor = head_keys.cursor(0, (first_query, queries), (0, visible));
            let mut rest = sums;
            let mut tile = [0; TILE];
            loop {
                let n = cursor.take(&mut tile, TILE);
                let (Some((sums, behind)), Some(rows)) = (rest.split_at_checked(n), tile.get(..n))
                else {
                    fail!(Invalid, "{most} sums for each head, but a head selects more keys");
                };
                if n == 0 {
                    break;
                }
                for (&row, &sum) in rows.iter().zip(sums) {
                    head_sums.add(placed.position_of(row).unwrap_or(u32::MAX), sum)?;
                }
                rest = behind;
            }
        }
        Ok(())
    }

    /// Number of rows of the sums, and tokens of each row of `out`.
    fn lines(&self, sums: usize, out: usize) -> Result<(usize, usize)> {
        let count = self.count()? as usize;
        let is_one = self.retained.is_none_or(|retained| retained.heads.len() == 1);
        let lines = if is_one && out == count { 1 } else { self.heads.queries as usize };
        if lines == 0 || out != lines.saturating_mul(count) || sums % lines != 0 {
            fail!(
                Invalid,
                "{sums} sums and {out} results do not fit {lines} heads and {count} tokens"
            );
        }
        Ok((lines, count))
    }

    /// The retained tokens of a query head.
    fn of(&self, head: u32) -> &[u32] {
        let Some(retained) = self.retained else { return &[] };
        let group = match retained.heads.len() {
            n if n == self.heads.keys as usize => self.heads.queries / self.heads.keys.max(1),
            _ => 1,
        };
        retained.of(head / group.max(1))
    }
}

/// The sums of one head while they are scattered.
struct HeadSums<'a> {
    list: &'a [u32],
    /// Index of the next retained token.
    at: usize,
    from: u32,
    out: &'a mut [f32],
}

impl<'a> HeadSums<'a> {
    fn of(tokens_of_layer: &'a ResidentTokens<'_>, head: u32, out: &'a mut [f32]) -> HeadSums<'a> {
        HeadSums { list: tokens_of_layer.of(head), at: 0, from: tokens_of_layer.from, out }
    }

    /// Adds the sum of a token; positions ascend.
    fn add(&mut self, position: u32, sum: f32) -> Result<()> {
        let rest = self.list.get(self.at..).unwrap_or_default();
        let place = if let Some(new) = position.checked_sub(self.from) {
            self.list.len() + new as usize
        } else {
            self.at += rest.partition_point(|&has| has < position);
            match self.list.get(self.at) == Some(&position) {
                true => self.at,
                false => usize::MAX,
            }
        };
        match self.out.get_mut(place) {
            Some(to) => *to += sum,
            None if sum == 0.0 => {}
            None => fail!(Invalid, "token {position} has a sum but is not resident"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retained_lists(lists: &[&[u32]]) -> RetainedTokens {
        let mut retained_lists = RetainedTokens::default();
        lists.iter().for_each(|list| retained_lists.heads.push(list.iter().copied()));
        retained_lists
    }

    const HEADS: Heads = Heads { queries: 4, keys: 2 };

    #[test]
    fn sums_are_scattered_to_the_tokens_of_each_head() {
        let retained = retained_lists(&[&[0, 3], &[1, 2]]);
        let tokens_of_layer =
            ResidentTokens { retained: Some(&retained), from: 5, tokens: 7, heads: HEADS };
        assert_eq!(tokens_of_layer.count().expect("equal lists"), 4);
        // Rows of tokens 0, 1, 2, 3 and 6; heads 0 and 1 have evicted 1 and 2.
        let sums = [
            [1.0, 0.0, 0.0, 2.0, 3.0],
            [4.0, 0.0, 0.0, 5.0, 6.0],
            [0.0, 7.0, 8.0, 0.0, 9.0],
            [0.0, 1.0, 2.0, 0.0, 3.0],
        ];
        let mut out = vec![0.5; 16];
        tokens_of_layer.add(sums.as_flattened(), &[0, 1, 2, 3, 6], &mut out).expect("found");
        let expected = [
            [1.5, 2.5, 0.5, 3.5],
            [4.5, 5.5, 0.5, 6.5],
            [7.5, 8.5, 0.5, 9.5],
            [1.5, 2.5, 0.5, 3.5],
        ];
        assert_eq!(out, expected.as_flattened());
        // One list and one row for all heads.
        let retained = retained_lists(&[&[1, 4]]);
        let tokens_of_layer = ResidentTokens { retained: Some(&retained), ..tokens_of_layer };
        let mut out = [0.0; 4];
        tokens_of_layer.add(&[1.0, 2.0, 4.0], &[1, 4, 5], &mut out).expect("found");
        assert_eq!(out, [1.0, 2.0, 4.0, 0.0]);
        let tokens_of_layer = ResidentTokens { retained: None, from: 0, ..tokens_of_layer };
        let mut out = vec![0.0; 28];
        tokens_of_layer.add(&[1.0; 8], &[2, 6], &mut out).expect("found");
        assert!((0..28).all(|at| out[at] == f32::from(u8::from(at % 7 == 2 || at % 7 == 6))));
    }

    #[test]
    fn sums_that_do_not_fit_are_rejected() {
        let retained = retained_lists(&[&[0, 3], &[1, 2]]);
        let tokens_of_layer =
            ResidentTokens { retained: Some(&retained), from: 5, tokens: 7, heads: HEADS };
        let out = &mut [0.0; 16][..];
        assert!(tokens_of_layer.add(&[1.0; 4], &[1], out).is_err(), "evicted in the first head");
        assert!(tokens_of_layer.add(&[1.0; 4], &[7], out).is_err(), "not written yet");
        assert!(tokens_of_layer.add(&[0.0; 4], &[7], out).is_ok());
        assert!(tokens_of_layer.add(&[1.0; 3], &[5], out).is_err(), "three heads");
        assert!(tokens_of_layer.add(&[1.0; 4], &[5, 6], out).is_err(), "half of the sums");
        assert!(
            tokens_of_layer.add(&[1.0; 4], &[5], &mut out[..4]).is_err(),
            "heads have other lists"
        );
        for (lists, from, tokens) in [
            (&[&[0u32, 3][..], &[1]][..], 5, 7),
            (&[&[0, 5], &[1, 2]], 5, 7),
            (&[&[3, 0], &[1, 2]], 5, 7),
            (&[&[0, 3], &[1, 2]], 8, 7),
            (&[&[0], &[1], &[2]], 5, 7),
        ] {
            let retained = retained_lists(lists);
            let bad = ResidentTokens { retained: Some(&retained), from, tokens, heads: HEADS };
            assert!(bad.count().is_err(), "{lists:?}");
        }
        assert!(
            ResidentTokens { retained: None, ..tokens_of_layer }.count().is_err(),
            "without retained lists all tokens must be new"
        );
    }
}
