//! The token path of a session: its tokens, the keys of its chunks, and their rows in the chunk
//! table. A path references each chunk that it has found or made, so that none is dropped while the
//! session is open.

use std::ops::Range;

use crate::base::status::Result;
use crate::fail;
use crate::format::keys::chain::Chain;
use crate::format::keys::media::{self, Medium};
use crate::format::keys::private::private_key;
use crate::meta::chunks::{Chunks, NewChunk};
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;

/// Most tokens of a session.
pub const MAX_TOKENS: usize = 1 << 27;

/// Namespace and session of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathOwner {
    /// Key of the namespace.
    pub key: Key,
    /// Number of the namespace in the table.
    pub namespace: u32,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// The engine can compute holes.
    pub holes: bool,
    /// Number of the session.
    pub session: u32,
}

/// The partial chunk at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tail {
    slot: Slot,
    /// Tokens of the session when it was made. A longer session cannot use it.
    end: usize,
}

/// A token path.
pub struct Path {
    owner: PathOwner,
    /// Name of the session in keys of private chunks.
    name: Vec<u8>,
    tokens: Vec<u32>,
    /// Media in the sequence, by position.
    media: Vec<Medium>,
    keys: Vec<Key>,
    /// Row of each full chunk, NONE without one. Each row is referenced.
    slots: Vec<Slot>,
    /// No row before this one is NONE, so that long paths are not scanned each time.
    known: usize,
    tail: Option<Tail>,
    /// Keys that were looked up.
    #[cfg(test)]
    looked_up: usize,
}

impl Path {
    /// An empty path. The name must differ from those of all other sessions of the namespace.
    pub fn new(owner: PathOwner, name: &[u8]) -> Result<Path> {
        Chain::new(owner.key, owner.chunk_tokens)?;
        let mut own = Vec::new();
        if own.try_reserve_exact(name.len()).is_err() {
            fail!(NoMem, "no memory for a name of {} bytes", name.len());
        }
        own.extend_from_slice(name);
        Ok(Path {
            owner,
            name: own,
            tokens: Vec::new(),
            media: Vec::new(),
            keys: Vec::new(),
            slots: Vec::new(),
            known: 0,
            tail: None,
            #[cfg(test)]
            looked_up: 0,
        })
    }

    /// Its tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Its media, by position.
    pub fn media(&self) -> &[Medium] {
        &self.media
    }

    /// Keys of its full chunks.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Rows of its full chunks, NONE for those without one.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Row of the partial chunk, if it was made since the path grew last.
    pub fn tail(&self) -> Option<Slot> {
        self.tail.filter(|tail| tail.end == self.tokens.len()).map(|tail| tail.slot)
    }

    fn key_before(&self, chunk: usize) -> Key {
        chunk.checked_sub(1).and_then(|i| self.keys.get(i)).copied().unwrap_or(self.owner.key)
    }

    /// Appends tokens and finds the chunks that they complete. On failure nothing changes.
    pub fn append(&mut self, chunks: &mut Chunks, tokens: &[u32]) -> Result<()> {
        self.append_media(chunks, tokens, &[])
    }

    /// The same with media that start in these tokens, by their positions in the path.
    pub fn append_media(
        &mut self,
        chunks: &mut Chunks,
        tokens: &[u32],
        media: &[Medium],
    ) -> Result<()> {
        let each = self.owner.chunk_tokens as usize;
        let (before, all) = (self.tokens.len(), self.tokens.len().saturating_add(tokens.len()));
        if all > MAX_TOKENS {
            fail!(Limit, "a session of {all} tokens, the limit is {MAX_TOKENS}");
        }
        media::check(media, before as u64..all as u64)?;
        let more = all / each - self.keys.len();
        if self.tokens.try_reserve(tokens.len()).is_err()
            || self.media.try_reserve(media.len()).is_err()
            || self.keys.try_reserve(more).is_err()
            || self.slots.try_reserve(more).is_err()
        {
            fail!(NoMem, "no memory for {} more tokens", tokens.len());
        }
        let (known, media_before) = (self.keys.len(), self.media.len());
        let mut chain =
            Chain::after(self.key_before(known), known as u64, self.owner.chunk_tokens)?;
        self.tokens.extend_from_slice(tokens);
        self.media.extend_from_slice(media);
        let added = media::extras(self.media_from(known), self.owner.chunk_tokens)
            .and_then(|all| chain.extend(&self.tokens[known * each..], &all, &mut self.keys));
        if let Err(error) = added {
            self.tokens.truncate(before);
            self.media.truncate(media_before);
            return Err(error);
        }
        self.slots.resize(self.keys.len(), NONE);
        self.find(chunks, known..self.keys.len())
    }

    /// Media that start in a chunk or after it.
    fn media_from(&self, chunk: usize) -> &[Medium] {
        let first = (chunk * self.owner.chunk_tokens as usize) as u64;
        &self.media[self.media.partition_point(|one| one.token < first)..]
    }

    /// Looks up those of some chunks again that had no row: another session may have stored them.
    pub fn refresh(&mut self, chunks: &mut Chunks, range: Range<usize>) -> Result<()> {
        let first = self.known().max(range.start);
        let end = range.end.min(self.slots.len());
        if first < end { self.find(chunks, first..end) } else { Ok(()) }
    }

    /// Number of leading chunks with rows.
    pub fn known(&mut self) -> usize {
        let more = self.slots[self.known..].iter().take_while(|&&slot| slot != NONE);
        self.known += more.count();
        self.known
    }

    /// Finds and references some of its chunks.
    fn find(&mut self, chunks: &mut Chunks, range: Range<usize>) -> Result<()> {
        const GROUP: usize = 64;
        let mut found = [NONE; GROUP];
        let (keys, slots) = (&self.keys[range.clone()], &mut self.slots[range]);
        #[cfg(test)]
        (self.looked_up += keys.len());
        let parts = keys.chunks(GROUP).zip(slots.chunks_mut(GROUP));
        for (keys, slots) in parts {
            let found = &mut found[..keys.len()];
            chunks.find_many(keys, found);
            for (slot, &found) in slots.iter_mut().zip(&*found) {
                if *slot == NONE && found != NONE {
                    chunks.retain(found)?;
                    *slot = found;
                }
            }
        }
        Ok(())
    }

    /// Adds rows for the full chunks before `until` that have none.
    pub fn make(&mut self, chunks: &mut Chunks, until: usize) -> Result<()> {
        for at in self.known()..until.min(self.slots.len()) {
            let parent = at.checked_sub(1).map_or(NONE, |above| self.slots[above]);
            if self.slots[at] != NONE {
                // It may have been found without its parent.
                chunks.join(self.slots[at], parent);
                continue;
            }
            let new = NewChunk {
                key: self.keys[at],
                namespace: self.owner.namespace,
                parent,
                position: at as u32,
                valid_tokens: self.owner.chunk_tokens,
                owner: NONE,
                holes: self.owner.holes,
            };
            let slot = chunks.add(&new)?.slot();
            chunks.retain(slot)?;
            self.slots[at] = slot;
        }
        Ok(())
    }

    /// Adds a row for the partial chunk, after rows for all chunks before it; none if the last
    /// chunk is full. `freed` is called for an earlier one that is not referenced any more.
    pub fn make_tail(
        &mut self,
        chunks: &mut Chunks,
        freed: &mut dyn FnMut(Slot),
    ) -> Result<Option<Slot>> {
        let (full, each) = (self.keys.len(), self.owner.chunk_tokens as usize);
        let rest = &self.tokens[full * each..];
        let tokens = rest.len() as u32;
        if tokens == 0 {
            return Ok(None);
        }
        if let Some(slot) = self.tail() {
            return Ok(Some(slot));
        }
        let extra = media::extra(self.media_from(full), (full * each) as u64);
        let key = private_key(&self.key_before(full), &self.name, rest, extra.as_ref())?;
        self.make(chunks, full)?;
        let new = NewChunk {
            key,
            namespace: self.owner.namespace,
            parent: full.checked_sub(1).map_or(NONE, |above| self.slots[above]),
            position: full as u32,
            valid_tokens: tokens,
            owner: self.owner.session,
            holes: self.owner.holes,
        };
        let slot = chunks.add(&new)?.slot();
        chunks.retain(slot)?;
        self.drop_tail(chunks, freed)?;
        self.tail = Some(Tail { slot, end: self.tokens.len() });
        Ok(Some(slot))
    }

    fn drop_tail(&mut self, chunks: &mut Chunks, freed: &mut dyn FnMut(Slot)) -> Result<()> {
        if let Some(tail) = self.tail.take()
            && chunks.release(tail.slot)?
        {
            freed(tail.slot);
        }
        Ok(())
    }

    /// Releases some of its chunks, and the partial one if `tail` says so. They count as without
    /// rows then.
    pub fn release_range(
        &mut self,
        chunks: &mut Chunks,
        range: Range<usize>,
        tail: bool,
    ) -> Result<()> {
        if tail && self.tail().is_some() {
            self.drop_tail(chunks, &mut |_| ())?;
        }
        self.known = self.known.min(range.start);
        for slot in self.slots[range].iter_mut().rev() {
            if *slot != NONE {
                chunks.release(std::mem::replace(slot, NONE))?;
            }
        }
        Ok(())
    }

    /// Chunks that a truncation to so many tokens would release.
    pub fn held_after_event(&self, tokens: usize) -> Vec<Slot> {
        let full = (tokens / self.owner.chunk_tokens as usize).min(self.slots.len());
        let tail = self.tail().filter(|_| tokens < self.tokens.len());
        self.slots[full..].iter().copied().filter(|&slot| slot != NONE).chain(tail).collect()
    }

    /// Truncates the path to so many tokens. `freed` is called for chunks without references.
    pub fn truncate(
        &mut self,
        chunks: &mut Chunks,
        tokens: usize,
        freed: &mut dyn FnMut(Slot),
    ) -> Result<()> {
        if tokens > self.tokens.len() {
            fail!(Invalid, "{} tokens cannot be truncated to {tokens}", self.tokens.len());
        }
        let full = tokens / self.owner.chunk_tokens as usize;
        if tokens < self.tokens.len() {
            self.drop_tail(chunks, freed)?;
        }
        self.known = self.known.min(full);
        // From the end, so that children are released before their parents.
        for slot in self.slots.drain(full..).rev() {
            if slot != NONE && chunks.release(slot)? {
                freed(slot);
            }
        }
        self.keys.truncate(full);
        self.tokens.truncate(tokens);
        self.media.truncate(self.media.partition_point(|one| one.token < tokens as u64));
        Ok(())
    }

    /// A path with the same tokens for another session: it references the same full chunks. The
    /// partial chunk is private.
    pub fn fork(&self, chunks: &mut Chunks, session: u32, name: &[u8]) -> Result<Path> {
        let mut fork = Path::new(PathOwner { session, ..self.owner }, name)?;
        if fork.tokens.try_reserve_exact(self.tokens.len()).is_err()
            || fork.media.try_reserve_exact(self.media.len()).is_err()
            || fork.keys.try_reserve_exact(self.keys.len()).is_err()
            || fork.slots.try_reserve_exact(self.slots.len()).is_err()
        {
            fail!(NoMem, "no memory to fork {} tokens", self.tokens.len());
        }
        for &slot in &self.slots {
            if slot != NONE
                && let Err(error) = chunks.retain(slot)
            {
                fork.truncate(chunks, 0, &mut |_| ())?;
                return Err(error);
            }
            fork.slots.push(slot);
        }
        fork.tokens.extend_from_slice(&self.tokens);
        fork.media.extend_from_slice(&self.media);
        fork.keys.extend_from_slice(&self.keys);
        Ok(fork)
    }

    /// Releases all chunks. `freed` is called for those without references.
    pub fn close(mut self, chunks: &mut Chunks, freed: &mut dyn FnMut(Slot)) -> Result<()> {
        self.truncate(chunks, 0, freed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::chunks::Shape;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const EACH: u32 = 4;

    fn table() -> Chunks {
        Chunks::new(Shape { layers: 2, chunk_tokens: EACH, max_chunks: 4096 }).expect("small")
    }

    fn owner(session: u32) -> PathOwner {
        let key = Key([7; 32]);
        PathOwner { key, namespace: 0, chunk_tokens: EACH, holes: false, session }
    }

    fn path(session: u32) -> Path {
        Path::new(owner(session), &session.to_le_bytes()).expect("a name")
    }

    fn held(chunks: &Chunks) -> BTreeMap<Slot, u32> {
        let refs = |slot| chunks.chunk(slot).map_or(0, |row| row.refs());
        chunks.slots().map(|slot| (slot, refs(slot))).filter(|&(_, refs)| refs > 0).collect()
    }

    #[test]
    fn sessions_with_equal_tokens_share_chunks_but_not_tails() {
        let mut chunks = table();
        let (mut a, mut b) = (path(1), path(2));
        a.append(&mut chunks, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).expect("few");
        assert_eq!((a.keys().len(), a.slots()), (2, &[NONE, NONE][..]));
        let tail = a.make_tail(&mut chunks, &mut |_| ()).expect("room");
        assert_eq!((tail, a.tail()), (Some(2), Some(2)));
        b.append(&mut chunks, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).expect("few");
        assert_eq!((b.slots(), b.tail()), (&[0, 1][..], None));
        assert_ne!(b.make_tail(&mut chunks, &mut |_| ()).expect("room"), tail);
        a.append(&mut chunks, &[11]).expect("few");
        assert_eq!(a.tail(), None, "it grew");
        let mut freed = Vec::new();
        let grown = a.make_tail(&mut chunks, &mut |slot| freed.push(slot)).expect("room");
        assert!(grown.is_some() && grown != tail);
        assert_eq!(freed, [2]);
        freed.clear();
        a.close(&mut chunks, &mut |slot| freed.push(slot)).expect("sound");
        assert_eq!(held(&chunks).into_values().collect::<Vec<_>>(), [1, 1, 1]);
        b.close(&mut chunks, &mut |slot| freed.push(slot)).expect("sound");
        assert!(held(&chunks).is_empty());
    }

    #[test]
    fn refresh_finds_chunks_that_other_sessions_added() {
        let mut chunks = table();
        let (mut a, mut b) = (path(1), path(2));
        let tokens: Vec<u32> = (0..40).collect();
        a.append(&mut chunks, &tokens).expect("few");
        b.append(&mut chunks, &tokens).expect("few");
        b.make(&mut chunks, 7).expect("room");
        assert_eq!(a.slots().iter().filter(|&&slot| slot != NONE).count(), 0);
        a.refresh(&mut chunks, 2..4).expect("sound");
        assert_eq!(a.slots()[..4], [NONE, NONE, b.slots()[2], b.slots()[3]]);
        a.refresh(&mut chunks, 0..10).expect("sound");
        assert_eq!(a.slots()[..7], b.slots()[..7]);
        assert_eq!(a.slots()[7..], [NONE; 3]);
    }

    #[test]
    fn lookups_per_chunk_do_not_grow_with_the_path() {
        let each_of = |count: usize| {
            let (mut chunks, mut path) = (table(), path(1));
            let tokens: Vec<u32> = (0..count as u32 * EACH).collect();
            path.append(&mut chunks, &tokens).expect("few");
            path.looked_up = 0;
            for at in 0..count {
                path.refresh(&mut chunks, at..at + 1).expect("sound");
                path.make(&mut chunks, at + 1).expect("room");
            }
            assert_eq!(path.known(), count);
            path.looked_up / count
        };
        assert_eq!((each_of(8), each_of(4096)), (1, 1));
    }

    proptest! {
        /// However tokens are appended, keys equal those of all tokens at once, and references
        /// equal those of the paths.
        #[test]
        fn keys_follow_tokens_and_references_follow_paths(
            calls in proptest::collection::vec((0u8..6, 0usize..3, 0u32..3, 0usize..20), 1..60),
        ) {
            let mut chunks = table();
            let mut paths: Vec<Path> = (0..3).map(path).collect();
            let mut names = 3;
            for (what, at, token, count) in calls {
                let tokens = vec![token; count];
                match what {
                    0 => paths[at].append(&mut chunks, &tokens).expect("few"),
                    1 => {
                        // With another digest the same tokens are other chunks.
                        let place = (paths[at].tokens().len() + count / 2) as u64;
                        let media: Vec<Medium> = (0..u64::from(token).min(count as u64 / 3))
                            .map(|i| Medium { token: place + i, digest: [count as u8; 32] })
                            .collect();
                        paths[at].append_media(&mut chunks, &tokens, &media).expect("few");
                    }
                    2 => paths[at].make(&mut chunks, count).expect("room"),
                    3 => drop(paths[at].make_tail(&mut chunks, &mut |_| ()).expect("room")),
                    4 => {
                        let remaining = count.min(paths[at].tokens().len());
                        paths[at].truncate(&mut chunks, remaining, &mut |_| ()).expect("shorter");
                    }
                    _ => {
                        names += 1;
                        let name = u32::to_le_bytes(names);
                        let fork = paths[at].fork(&mut chunks, names, &name).expect("room");
                        let old = std::mem::replace(&mut paths[(at + 1) % 3], fork);
                        old.close(&mut chunks, &mut |_| ()).expect("sound");
                    }
                }
                let mut expected = BTreeMap::new();
                for path in &paths {
                    let mut chain = Chain::new(owner(0).key, EACH).expect("a size");
                    let mut keys = Vec::new();
                    let media = media::extras(path.media(), EACH).expect("few");
                    chain.extend(path.tokens(), &media, &mut keys).expect("few");
                    prop_assert!(path.media().iter().all(|m| m.token < path.tokens().len() as u64));
                    prop_assert_eq!(path.keys(), &keys[..]);
                    let tail = path.tail.map(|tail| tail.slot);
                    let slots = path.slots().iter().copied().filter(|&slot| slot != NONE);
                    slots.chain(tail).for_each(|slot| *expected.entry(slot).or_insert(0) += 1);
                    for (&slot, key) in path.slots().iter().zip(path.keys()) {
                        prop_assert!(slot == NONE || chunks.key(slot) == Some(key));
                    }
                }
                prop_assert_eq!(held(&chunks), expected);
            }
        }
    }

    #[test]
    fn a_tail_of_equal_length_after_growth_is_a_new_chunk() {
        let mut chunks = table();
        let mut path = path(1);
        path.append(&mut chunks, &[1, 2, 3, 4, 5]).unwrap();
        let first = path.make_tail(&mut chunks, &mut |_| ()).unwrap();
        path.append(&mut chunks, &[6, 7, 8, 9]).unwrap();
        assert_eq!(path.tail(), None);
        let mut freed = Vec::new();
        let second = path.make_tail(&mut chunks, &mut |slot| freed.push(slot)).unwrap();
        assert!(first != second && freed == [first.unwrap()]);
    }
}
