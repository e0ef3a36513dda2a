//! Resident tokens of each layer by position, each with a score: the state that eviction policies
//! share.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::sparse::RetainedTokens;
use crate::sparse::lists::Lists;
use crate::sparse::numbers::{grow, reserve};
use crate::sparse::ranks::Ranks;
use crate::sparse::shape::{Shape, check_layer, check_tokens};

/// Tokens of one head, or of all.
#[derive(Clone, Debug, Default)]
pub struct TokenList {
    /// Positions in the sequence, ascending.
    pub positions: Vec<u32>,
    /// Scores; the lowest are evicted first.
    pub scores: Vec<f32>,
}

/// Tokens of one layer.
#[derive(Clone, Debug, Default)]
pub struct LayerTokens {
    /// Position of the next token.
    pub next: u32,
    /// One list for each head, or one.
    pub lists: Vec<TokenList>,
}

impl LayerTokens {
    /// Tokens of all lists together.
    pub fn tokens(&self) -> usize {
        self.lists.iter().map(|list| list.positions.len()).sum()
    }
}

/// Tokens of all layers.
#[derive(Clone, Debug)]
pub struct TokenScores {
    layers: Vec<LayerTokens>,
    max_tokens: u32,
    ranks: Ranks,
    victims: Vec<u32>,
    spare: Lists,
}

/// Fails with `Invalid` if a sum is negative or not finite.
fn check_sums(sums: &[f32]) -> Result<()> {
    let is_bad = |sum: &f32| !(0.0..=f32::MAX).contains(sum);
    if sums.iter().fold(false, |bad, sum| bad | is_bad(sum)) {
        fail!(Invalid, "sums of attention must be finite and at least 0");
    }
    Ok(())
}

/// The number of rows in sums of attention to `tokens` tokens: one for each query head, or one for
/// all heads where `allows_one`. Fails with `Invalid` for any other number of sums.
pub fn sum_rows(shape: &Shape, sums: &[f32], tokens: u32, allows_one: bool) -> Result<usize> {
    let (count, heads) = (tokens as usize, shape.query_heads as usize);
    let rows = if allows_one && sums.len() == count { 1 } else { heads };
    if count == 0 || sums.len() != rows * count {
        fail!(Invalid, "{} sums of attention to {tokens} tokens by {heads} heads", sums.len());
    }
    Ok(rows)
}

impl TokenScores {
    /// Empty lists: `lists` in each of `layers` layers.
    pub fn new(layers: u32, lists: u32, max_tokens: u32) -> Result<TokenScores> {
        let mut layer = LayerTokens::default();
        grow(&mut layer.lists, lists as usize, TokenList::default())?;
        let mut all = Vec::new();
        grow(&mut all, layers as usize, layer)?;
        let (ranks, spare) = (Ranks::default(), Lists::default());
        Ok(TokenScores { layers: all, max_tokens, ranks, victims: Vec::new(), spare })
    }

    /// A layer.
    pub fn layer(&self, layer: u32) -> Result<&LayerTokens> {
        check_layer(layer, self.layers.len())?;
        Ok(self.layers.get(layer as usize).ok_or(Status::Invalid)?)
    }

    /// The lists of a layer, to be scored.
    pub fn lists(&mut self, layer: u32) -> &mut [TokenList] {
        self.layers.get_mut(layer as usize).map_or(&mut [], |layer| &mut layer.lists)
    }

    /// Fails with `Invalid` unless keys from `first` on continue the tokens of a layer.
    pub fn check_next(&self, layer: u32, first: u32) -> Result<()> {
        let next = self.layer(layer)?.next;
        if first != next {
            fail!(Invalid, "keys start at position {first}, the layer continues at {next}");
        }
        Ok(())
    }

    /// Adds new tokens of a layer up to position `to`, with this score.
    pub fn extend(&mut self, layer: u32, to: u32, score: f32) -> Result<()> {
        let next = self.layer(layer)?.next;
        check_tokens(to.into(), self.max_tokens)?;
        let more = to.saturating_sub(next) as usize;
        for list in self.lists(layer) {
            reserve(&mut list.positions, more)?;
            reserve(&mut list.scores, more)?;
        }
        for list in self.lists(layer) {
            list.positions.extend(next..to);
            list.scores.resize(list.positions.len(), score);
        }
        if let Some(layer) = self.layers.get_mut(layer as usize) {
            layer.next = next.max(to);
        }
        Ok(())
    }

    /// The position behind the last token if each list of a layer has `tokens` tokens, new ones
    /// included. Fails if that is impossible.
    pub fn next_of(&self, layer: u32, tokens: u32) -> Result<u32> {
        let layer = self.layer(layer)?;
        let mut new = None;
        for list in &layer.lists {
            let more = (tokens as usize).checked_sub(list.positions.len());
            if more.is_none() || new.is_some_and(|new| Some(new) != more) {
                let resident = list.positions.len();
                fail!(Invalid, "sums of {tokens} tokens, the layer has at least {resident}");
            }
            new = more;
        }
        let next = u64::from(layer.next) + new.unwrap_or(0) as u64;
        check_tokens(next, self.max_tokens)?;
        Ok(next as u32)
    }

    /// Adds sums of attention to the scores of a layer's tokens: `rows` rows of `tokens` numbers,
    /// one for each query head or one for all. The rows of a group of query heads go to the list of
    /// their head of keys. With `forget`, earlier scores are dropped.
    pub fn add_sums(
        &mut self,
        layer: u32,
        (rows, tokens): (usize, u32),
        sums: &[f32],
        forget: bool,
    ) -> Result<()> {
        let next = self.next_of(layer, tokens)?;
        check_sums(sums)?;
        self.extend(layer, next, 0.0)?;
        let lists = self.lists(layer);
        let each = rows / lists.len().clamp(1, rows);
        for (list, rows) in lists.iter_mut().zip(sums.chunks(each * tokens as usize)) {
            if forget {
                list.scores.fill(0.0);
            }
            for row in rows.chunks_exact(tokens as usize) {
                list.scores.iter_mut().zip(row).for_each(|(score, sum)| *score += sum);
            }
        }
        Ok(())
    }

    /// Puts into `out` the tokens that stay if the lowest scores of each list are evicted, except
    /// its `first` first and `last` last tokens. `leave` returns the number of victims, from the
    /// length of the list and the number of unprotected tokens. Returns false, and leaves `out` as
    /// it is, if there is no victim.
    pub fn plan(
        &mut self,
        layer: u32,
        (first, last): (usize, usize),
        leave: impl Fn(usize, usize) -> usize,
        out: &mut RetainedTokens,
    ) -> Result<bool> {
        self.layer(layer)?;
        let TokenScores { layers, ranks, victims, .. } = self;
        let Some(layer) = layers.get(layer as usize) else { return Ok(false) };
        let ends = |list: &TokenList| {
            let count = list.positions.len();
            let to = count.saturating_sub(last);
            (first.min(to), to)
        };
        let count_of = |list: &TokenList| {
            let (from, to) = ends(list);
            leave(list.positions.len(), to - from).min(to - from)
        };
        if !layer.lists.iter().any(|list| count_of(list) > 0) {
            return Ok(false);
        }
        out.begin(layer.lists.len(), layer.tokens())?;
        for list in &layer.lists {
            let (from, to) = ends(list);
            victims.clear();
            let scores = list.scores.get(from..to).unwrap_or_default();
            ranks.bottom(scores, count_of(list), victims)?;
            victims.iter_mut().for_each(|at| *at += from as u32);
            out.push_without(&list.positions, victims)?;
        }
        Ok(true)
    }

    /// Puts into `out`, for each list of a layer, the ascending indices of the tokens that
    /// `retained` does not name. Fails if `retained` names a token that is not resident.
    pub fn victims(&self, layer: u32, retained: &RetainedTokens, out: &mut Lists) -> Result<()> {
        let layer = self.layer(layer)?;
        let (named, lists) = (retained.heads.len(), layer.lists.len());
        if named != lists && named != 1 {
            fail!(Invalid, "{named} lists of retained tokens, the layer has {lists}");
        }
        out.clear();
        reserve(&mut out.starts, lists + 1)?;
        out.starts.push(0);
        for (head, list) in (0..).zip(&layer.lists) {
            let (mut positions_left, mut stays) = (list.positions.as_slice(), retained.of(head));
            reserve(&mut out.items, positions_left.len().saturating_sub(stays.len()))?;
            loop {
                let same = common_prefix(positions_left, stays);
                positions_left = positions_left.get(same..).unwrap_or_default();
                stays = stays.get(same..).unwrap_or_default();
                match (positions_left.split_first(), stays.first()) {
                    (None, None) => break,
                    (Some((position, rest)), stay) if stay.is_none_or(|stay| position < stay) => {
                        // More tokens may be evicted than the lengths differ by if `retained` names
                        // unknown tokens.
                        reserve(&mut out.items, 1)?;
                        out.items.push((list.positions.len() - positions_left.len()) as u32);
                        positions_left = rest;
                    }
                    (_, stay) => {
                        let position = stay.copied().unwrap_or_default();
                        fail!(Invalid, "retained token {position} is not resident or named twice");
                    }
                }
            }
            out.starts.push(out.items.len() as u32);
        }
        Ok(())
    }

    /// Removes the tokens at these indices of the lists of a layer.
    pub fn remove(&mut self, layer: u32, victims: &Lists) {
        for (at, list) in self.lists(layer).iter_mut().enumerate() {
            compact(&mut list.positions, victims.get(at), 1);
            compact(&mut list.scores, victims.get(at), 1);
        }
    }

    /// Implements [`Sparse::evicted`](crate::sparse::Sparse::evicted).
    pub fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        let mut spare = std::mem::take(&mut self.spare);
        let result = self.victims(layer, retained, &mut spare);
        if result.is_ok() {
            self.remove(layer, &spare);
        }
        self.spare = spare;
        result
    }

    /// Drops tokens from position `tokens` on.
    pub fn truncate(&mut self, tokens: u32) {
        for layer in self.layers.iter_mut().filter(|layer| layer.next > tokens) {
            layer.next = tokens;
            for list in &mut layer.lists {
                let left = list.positions.partition_point(|&position| position < tokens);
                list.positions.truncate(left);
                list.scores.truncate(left);
            }
        }
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let of = |list: &TokenList| 4 * (list.positions.capacity() + list.scores.capacity()) as u64;
        self.layers.iter().flat_map(|layer| &layer.lists).map(of).sum()
    }
}

/// Length of the common prefix of two lists.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    const STEP: usize = 64;
    let steps = a.chunks_exact(STEP).zip(b.chunks_exact(STEP));
    let whole = steps.take_while(|(a, b)| a == b).count() * STEP;
    let rest = a.iter().skip(whole).zip(b.iter().skip(whole));
    whole + rest.take_while(|(a, b)| a == b).count()
}

/// Removes rows of `each` numbers from a table, at ascending indices inside it.
pub fn compact<T: Copy>(table: &mut Vec<T>, victims: &[u32], each: usize) {
    let Some(&first) = victims.first() else { return };
    let mut to = first as usize * each;
    let next = victims.iter().skip(1).map(|&place| place as usize * each).chain([table.len()]);
    for (&spare, end) in victims.iter().zip(next) {
        let from = (spare as usize + 1) * each;
        table.copy_within(from..end, to);
        to += end - from;
    }
    table.truncate(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retained_lists(lists: &[&[u32]]) -> RetainedTokens {
        let mut retained_lists = RetainedTokens::default();
        lists.iter().for_each(|list| retained_lists.heads.push(list.iter().copied()));
        retained_lists
    }

    #[test]
    fn retained_tokens_must_be_resident() {
        let mut scores = TokenScores::new(2, 2, 10).expect("memory");
        scores.extend(1, 6, 0.0).expect("room");
        assert!(scores.extend(1, 11, 0.0).is_err() && scores.extend(2, 1, 0.0).is_err());
        for bad in [&[&[1u32, 1][..], &[0]][..], &[&[6], &[0]], &[&[2, 1], &[0]], &[]] {
            assert!(scores.evicted(1, &retained_lists(bad)).is_err(), "{bad:?}");
        }
        scores.evicted(1, &retained_lists(&[&[0, 2, 5], &[1, 2, 3]])).expect("a part");
        assert_eq!(scores.next_of(1, 5).expect("two more"), 8);
        assert!(scores.next_of(1, 2).is_err());
        scores.extend(1, 8, 1.0).expect("room");
        assert_eq!(scores.lists(1)[1].positions, [1, 2, 3, 6, 7]);
        assert!(scores.evicted(1, &retained_lists(&[&[2, 5]])).is_err());
        scores.evicted(1, &retained_lists(&[&[2, 6, 7]])).expect("one for all");
        scores.truncate(7);
        assert_eq!(scores.lists(1)[0].positions, [2, 6]);
        assert_eq!(scores.lists(1)[0].scores, [0.0, 1.0]);
        assert_eq!(
            (scores.layer(1).expect("one").next, scores.layer(0).expect("one").next),
            (7, 0)
        );
    }
}
