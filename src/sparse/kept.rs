//! Which tokens of each layer are there, by their positions, each with a score: what policies
//! that evict have in common.

use crate::base::spec::Reader;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::sparse::Keep;
use crate::sparse::lists::Lists;
use crate::sparse::numbers::{grow, room};
use crate::sparse::ranks::{Ranks, without};

/// Tokens of one head, or of all.
#[derive(Clone, Debug, Default)]
pub struct List {
    /// Where they are in the sequence, ascending.
    pub positions: Vec<u32>,
    /// What they are worth.
    pub scores: Vec<f32>,
}

/// Tokens of one layer.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    /// The position that comes next.
    pub next: u32,
    /// A list a head, or one.
    pub lists: Vec<List>,
}

/// Tokens of all layers.
#[derive(Clone, Debug)]
pub struct Kept {
    layers: Vec<Layer>,
    max_tokens: u32,
    ranks: Ranks,
    leaving: Vec<u32>,
    gone: Lists,
}

/// How many tokens may stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cap {
    /// So many.
    Tokens(u32),
    /// All but this share, once, when the prompt has been computed.
    Ratio(f64),
}

impl Cap {
    /// Reads `budget` or, if it is there, `ratio`.
    pub fn read(reader: &mut Reader, default: u64) -> Result<Cap> {
        let tokens = reader.u64("budget", default, 1..=u64::from(u32::MAX))? as u32;
        let ratio = reader.f64("ratio", -1.0, 0.0..=1.0)?;
        Ok(if ratio >= 0.0 { Cap::Ratio(ratio) } else { Cap::Tokens(tokens) })
    }

    /// How many of so many stay.
    pub fn of(&self, tokens: usize) -> usize {
        match *self {
            Cap::Tokens(most) => (most as usize).min(tokens),
            // A share of less than all leaves one, however few there are.
            Cap::Ratio(ratio) => {
                let least = usize::from(ratio < 1.0).min(tokens);
                (self.exact(tokens, ratio) as usize).max(least)
            }
        }
    }

    /// The same before it is rounded down.
    pub fn unrounded(&self, tokens: usize) -> f64 {
        match *self {
            Cap::Tokens(most) => f64::from(most),
            Cap::Ratio(ratio) => self.exact(tokens, ratio),
        }
    }

    fn exact(&self, tokens: usize, ratio: f64) -> f64 {
        tokens as f64 * (1.0 - ratio)
    }

    /// Whether tokens may go while text is written.
    pub fn is_for_decode(&self) -> bool {
        matches!(self, Cap::Tokens(_))
    }
}

/// An error for parameters that do not go together.
pub fn misfit(text: impl Into<String>) -> Error {
    Error::new(Status::Spec, text)
}

/// An error if attention that was summed up can be none.
pub fn check_sums(sums: &[f32]) -> Result<()> {
    let is_bad = |sum: &f32| !(0.0..=f32::MAX).contains(sum);
    if sums.iter().fold(false, |bad, sum| bad | is_bad(sum)) {
        fail!(Invalid, "sums of attention that are negative or not finite");
    }
    Ok(())
}

impl Kept {
    /// No tokens in so many layers, of each so many lists.
    pub fn new(layers: u32, lists: u32, max_tokens: u32) -> Result<Kept> {
        let mut layer = Layer::default();
        grow(&mut layer.lists, lists as usize, List::default())?;
        let mut all = Vec::new();
        grow(&mut all, layers as usize, layer)?;
        let (ranks, gone) = (Ranks::default(), Lists::default());
        Ok(Kept { layers: all, max_tokens, ranks, leaving: Vec::new(), gone })
    }

    /// A layer.
    pub fn layer(&self, layer: u32) -> Result<&Layer> {
        match self.layers.get(layer as usize) {
            Some(found) => Ok(found),
            None => fail!(Invalid, "layer {layer} of a model with {}", self.layers.len()),
        }
    }

    /// The lists of a layer, to be scored.
    pub fn lists(&mut self, layer: u32) -> &mut [List] {
        self.layers.get_mut(layer as usize).map_or(&mut [], |layer| &mut layer.lists)
    }

    /// New tokens of a layer, up to a position, have a score of their own.
    pub fn extend(&mut self, layer: u32, to: u32, score: f32) -> Result<()> {
        let next = self.layer(layer)?.next;
        if to > self.max_tokens {
            fail!(Limit, "{to} tokens, the limit is {}", self.max_tokens);
        }
        let more = to.saturating_sub(next) as usize;
        for list in self.lists(layer) {
            room(&mut list.positions, more)?;
            room(&mut list.scores, more)?;
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

    /// The position that comes next if each list of a layer has so many tokens, those that
    /// are new included; an error if it cannot.
    pub fn next_of(&self, layer: u32, tokens: u32) -> Result<u32> {
        let layer = self.layer(layer)?;
        let mut new = None;
        for list in &layer.lists {
            let more = (tokens as usize).checked_sub(list.positions.len());
            if more.is_none() || new.is_some_and(|new| Some(new) != more) {
                let kept = list.positions.len();
                fail!(Invalid, "attention to {tokens} tokens, there are {kept} and new ones");
            }
            new = more;
        }
        let next = u64::from(layer.next) + new.unwrap_or(0) as u64;
        if next > u64::from(self.max_tokens) {
            fail!(Limit, "{next} tokens, the limit is {}", self.max_tokens);
        }
        Ok(next as u32)
    }

    /// Says in `out` what stays if of each list, without so many `first` and `last` ones,
    /// those of the lowest scores go: `leave` says how many, of how many in the list and
    /// between. False, and nothing in `out`, if none goes.
    pub fn plan(
        &mut self,
        layer: u32,
        (first, last): (usize, usize),
        leave: impl Fn(usize, usize) -> usize,
        out: &mut Keep,
    ) -> Result<bool> {
        self.layer(layer)?;
        let Kept { layers, ranks, leaving, .. } = self;
        let Some(layer) = layers.get(layer as usize) else { return Ok(false) };
        let ends = |list: &List| {
            let count = list.positions.len();
            let to = count.saturating_sub(last);
            (first.min(to), to)
        };
        let count_of = |list: &List| {
            let (from, to) = ends(list);
            leave(list.positions.len(), to - from).min(to - from)
        };
        if !layer.lists.iter().any(|list| count_of(list) > 0) {
            return Ok(false);
        }
        out.clear();
        let all = layer.lists.iter().map(|list| list.positions.len()).sum();
        room(&mut out.heads.items, all)?;
        room(&mut out.heads.starts, layer.lists.len() + 1)?;
        out.heads.starts.push(0);
        for list in &layer.lists {
            let (from, to) = ends(list);
            leaving.clear();
            let scores = list.scores.get(from..to).unwrap_or_default();
            ranks.bottom(scores, count_of(list), leaving)?;
            leaving.iter_mut().for_each(|at| *at += from as u32);
            without(&list.positions, leaving, &mut out.heads.items)?;
            out.heads.starts.push(out.heads.items.len() as u32);
        }
        Ok(true)
    }

    /// Puts in `out`, for each list of a layer, which of its places go if only what `keep` names
    /// stays, ascending; an error if it names what is not there.
    pub fn leaving(&self, layer: u32, keep: &Keep, out: &mut Lists) -> Result<()> {
        let layer = self.layer(layer)?;
        let (named, lists) = (keep.heads.len(), layer.lists.len());
        if named != lists && named != 1 {
            fail!(Invalid, "{named} lists of tokens that stay, there are {lists}");
        }
        out.clear();
        room(&mut out.starts, lists + 1)?;
        out.starts.push(0);
        for (head, list) in (0..).zip(&layer.lists) {
            let (mut there, mut stays) = (list.positions.as_slice(), keep.of(head));
            room(&mut out.items, there.len().saturating_sub(stays.len()))?;
            loop {
                let same = same_start(there, stays);
                there = there.get(same..).unwrap_or_default();
                stays = stays.get(same..).unwrap_or_default();
                match (there.split_first(), stays.first()) {
                    (None, None) => break,
                    (Some((position, rest)), stay) if stay.is_none_or(|stay| position < stay) => {
                        // More may go than the lists differ by, if it names what is not there.
                        room(&mut out.items, 1)?;
                        out.items.push((list.positions.len() - there.len()) as u32);
                        there = rest;
                    }
                    (_, stay) => {
                        let position = stay.copied().unwrap_or_default();
                        fail!(Invalid, "token {position} stays, it is not there or named twice");
                    }
                }
            }
            out.starts.push(out.items.len() as u32);
        }
        Ok(())
    }

    /// What stands at these places of the lists of a layer is no more.
    pub fn remove(&mut self, layer: u32, leaving: &Lists) {
        for (at, list) in self.lists(layer).iter_mut().enumerate() {
            compact(&mut list.positions, leaving.get(at), 1);
            compact(&mut list.scores, leaving.get(at), 1);
        }
    }

    /// What [`Sparse::evicted`](crate::sparse::Sparse::evicted) does.
    pub fn evicted(&mut self, layer: u32, keep: &Keep) -> Result<()> {
        let mut gone = std::mem::take(&mut self.gone);
        let told = self.leaving(layer, keep, &mut gone);
        if told.is_ok() {
            self.remove(layer, &gone);
        }
        self.gone = gone;
        told
    }

    /// Tokens from a position on are no more.
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

    /// What this takes.
    pub fn bytes(&self) -> u64 {
        let of = |list: &List| 4 * (list.positions.capacity() + list.scores.capacity()) as u64;
        self.layers.iter().flat_map(|layer| &layer.lists).map(of).sum()
    }
}

/// How many numbers are the same at the start of two lists.
fn same_start(a: &[u32], b: &[u32]) -> usize {
    const STEP: usize = 64;
    let steps = a.chunks_exact(STEP).zip(b.chunks_exact(STEP));
    let whole = steps.take_while(|(a, b)| a == b).count() * STEP;
    let rest = a.iter().skip(whole).zip(b.iter().skip(whole));
    whole + rest.take_while(|(a, b)| a == b).count()
}

/// Takes places, `each` numbers to one, out of a table; they ascend and are there.
pub fn compact<T: Copy>(table: &mut Vec<T>, leaving: &[u32], each: usize) {
    let Some(&first) = leaving.first() else { return };
    let mut to = first as usize * each;
    let next = leaving.iter().skip(1).map(|&place| place as usize * each).chain([table.len()]);
    for (&gone, end) in leaving.iter().zip(next) {
        let from = (gone as usize + 1) * each;
        table.copy_within(from..end, to);
        to += end - from;
    }
    table.truncate(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(lists: &[&[u32]]) -> Keep {
        let mut keep = Keep::default();
        lists.iter().for_each(|list| keep.heads.push(list.iter().copied()));
        keep
    }

    #[test]
    fn what_stays_is_a_part_of_what_is_there() {
        let mut kept = Kept::new(2, 2, 10).expect("memory");
        kept.extend(1, 6, 0.0).expect("room");
        assert!(kept.extend(1, 11, 0.0).is_err() && kept.extend(2, 1, 0.0).is_err());
        for bad in [&[&[1u32, 1][..], &[0]][..], &[&[6], &[0]], &[&[2, 1], &[0]], &[]] {
            assert!(kept.evicted(1, &keep(bad)).is_err(), "{bad:?}");
        }
        kept.evicted(1, &keep(&[&[0, 2, 5], &[1, 2, 3]])).expect("a part");
        assert_eq!(kept.next_of(1, 5).expect("two more"), 8);
        assert!(kept.next_of(1, 2).is_err());
        kept.extend(1, 8, 1.0).expect("room");
        assert_eq!(kept.lists(1)[1].positions, [1, 2, 3, 6, 7]);
        assert!(kept.evicted(1, &keep(&[&[2, 5]])).is_err());
        kept.evicted(1, &keep(&[&[2, 6, 7]])).expect("one for all");
        kept.truncate(7);
        assert_eq!(kept.lists(1)[0].positions, [2, 6]);
        assert_eq!(kept.lists(1)[0].scores, [0.0, 1.0]);
        assert_eq!((kept.layer(1).expect("one").next, kept.layer(0).expect("one").next), (7, 0));
    }
}
