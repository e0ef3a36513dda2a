//! A lane of a remote whose objects are sealed: they go and come by way of memory of its own, a
//! batch in turns of so many bytes.

use std::ops::Range;

use crate::base::machine::random_bytes;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::tier::remote::seal::{
    ENVELOPE_BYTES, Sealer, place_of, plain_bytes, sealed_bytes, whole_bytes,
};
use crate::tier::remote::{Client, Gets, Part, Puts, Queries, RemoteError, Server};

/// Most bytes of a turn; an object that is longer has one for itself.
pub(super) const TURN_BYTES: u64 = 16 << 20;

/// A lane.
pub struct SealedClient {
    inner: Box<dyn Client>,
    sealer: Arc<Sealer>,
    /// Most plain bytes of an object.
    most: u64,
    /// Sealed objects of a turn, one after the other.
    staging: Vec<u8>,
}

/// An object of a turn: which of the batch, and where it is in the staging.
struct Staged {
    item: usize,
    at: Range<usize>,
}

impl SealedClient {
    /// One over another.
    pub fn new(inner: Box<dyn Client>, sealer: Arc<Sealer>, most: u64) -> SealedClient {
        SealedClient { inner, sealer, most, staging: Vec::new() }
    }

    /// The items of a turn: the first of those that are left, and as many more as fit. `length` is
    /// how much room each takes.
    fn stage(
        &mut self,
        left: &mut std::iter::Peekable<impl Iterator<Item = usize>>,
        length: impl Fn(usize) -> u64,
    ) -> Vec<Staged> {
        let (mut staged, mut end) = (Vec::new(), 0);
        while let Some(&item) = left.peek() {
            let bytes = length(item);
            if end > 0 && end + bytes > TURN_BYTES {
                break;
            }
            left.next();
            staged.push(Staged { item, at: end as usize..(end + bytes) as usize });
            end += bytes;
        }
        if self.staging.len() as u64 > TURN_BYTES {
            self.staging = Vec::new();
        }
        if (self.staging.len() as u64) < end {
            self.staging.resize(end as usize, 0);
        }
        staged
    }

    /// Copies the parts of an object to their places, and seals it; false = it cannot be.
    ///
    /// # Safety
    /// The memory of the parts is valid, and written by nobody.
    unsafe fn seal(&mut self, puts: &Puts, staged: &Staged) -> bool {
        let Ok(random) = random_bytes() else { return false };
        let object = &mut self.staging[staged.at.clone()];
        let mut plain = 0;
        for part in puts.parts_of(staged.item) {
            let mut done = 0;
            while done < part.bytes {
                let place = place_of(plain, part.bytes - done);
                let (from, count) = (part.address.wrapping_add(done as usize), place.len());
                // SAFETY: within the part, which the caller vouches for, and as many bytes of
                // the staging.
                unsafe { object[place].as_mut_ptr().copy_from_nonoverlapping(from, count) };
                done += count as u64;
                plain += count as u64;
            }
        }
        self.sealer.seal(&puts.items[staged.item].name, random, object)
    }

    /// Fetches sealed objects to the staging; how much came of each.
    fn fetch(
        &mut self,
        gets: &Gets,
        all: &[Staged],
        deadline_ns: u64,
    ) -> Vec<std::result::Result<u64, RemoteError>> {
        let mut inner = Gets::default();
        let start = self.staging.as_mut_ptr();
        for staged in all {
            inner.object(gets.items[staged.item].name, 0);
            inner.part(start.wrapping_add(staged.at.start), staged.at.len() as u64);
        }
        // SAFETY: the parts are in the staging, apart from one another, and nobody else has it.
        unsafe { self.inner.get(&mut inner, deadline_ns) };
        inner.items.iter().map(|item| item.result).collect()
    }

    /// How long an object is as a whole, of which so many bytes came.
    fn whole(&self, staged: &Staged, came: u64) -> Option<u64> {
        whole_bytes(self.staging[staged.at.clone()].get(..(came as usize).min(ENVELOPE_BYTES))?)
    }

    /// Opens an object, and copies what was asked for of it.
    ///
    /// # Safety
    /// The memory of the item's parts is valid, and nobody else's meanwhile.
    unsafe fn open(
        &mut self,
        gets: &Gets,
        staged: &Staged,
        came: u64,
    ) -> std::result::Result<u64, RemoteError> {
        let object = self.staging[staged.at.clone()].get_mut(..came as usize);
        let object = object.ok_or(RemoteError::Malformed)?;
        let item = &gets.items[staged.item];
        let plain = self.sealer.open(&item.name, object).ok_or(RemoteError::Damaged)?;
        let mut at = item.offset.min(plain);
        for Part { address, bytes } in gets.parts_of(staged.item) {
            let (end, first) = (plain.min(at.saturating_add(*bytes)), at);
            while at < end {
                let place = place_of(at, end - at);
                let (to, count) = (address.wrapping_add((at - first) as usize), place.len());
                // SAFETY: within the part, which the caller vouches for; the staging is ours.
                unsafe { to.copy_from_nonoverlapping(object[place].as_ptr(), count) };
                at += count as u64;
            }
        }
        Ok(at - item.offset.min(plain))
    }

    /// A turn of a batch of gets. Items that are longer than there was room for here, and how long
    /// they say that they are.
    ///
    /// # Safety
    /// As for [`Client::get`].
    unsafe fn get_turn(
        &mut self,
        gets: &mut Gets,
        all: &[Staged],
        deadline_ns: u64,
    ) -> Vec<(usize, u64)> {
        let most = sealed_bytes(self.most);
        let mut longer = Vec::new();
        let came = self.fetch(gets, all, deadline_ns);
        for (staged, came) in all.iter().zip(came) {
            gets.items[staged.item].result = match came {
                Err(trouble) => Err(trouble),
                Ok(came) => match self.whole(staged, came) {
                    // There is more of it than was expected.
                    Some(whole)
                        if (came + 1..=most).contains(&whole) && came == staged.at.len() as u64 =>
                    {
                        longer.push((staged.item, whole));
                        Err(RemoteError::Busy)
                    }
                    // SAFETY: as the caller promises.
                    Some(whole) if whole == came => unsafe { self.open(gets, staged, came) },
                    _ => Err(RemoteError::Damaged),
                },
            };
        }
        longer
    }
}

impl Client for SealedClient {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        let mut server = self.inner.greet(deadline_ns)?;
        server.words.push_str(", objects are sealed");
        Ok(server)
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        let rooms: Vec<u64> = (0..gets.items.len())
            .map(|item| gets.items[item].offset.saturating_add(gets.room_of(item)).min(self.most))
            .collect();
        let mut left = (0..rooms.len()).peekable();
        let mut longer = Vec::new();
        while left.peek().is_some() {
            // Mostly there is room for exactly the object.
            let turn = self.stage(&mut left, |item| sealed_bytes(rooms[item]));
            // SAFETY: the caller's promise.
            longer.extend(unsafe { self.get_turn(gets, &turn, deadline_ns) });
            if turn.iter().all(|staged| is_late(&gets.items[staged.item].result)) {
                left.by_ref().for_each(|item| gets.items[item].result = Err(RemoteError::Timeout));
            }
        }
        // Where a part is wanted all has to come, because all of it is checked.
        let mut left = (0..longer.len()).peekable();
        while left.peek().is_some() {
            let mut turn = self.stage(&mut left, |at| longer[at].1);
            turn.iter_mut().for_each(|staged| staged.item = longer[staged.item].0);
            // SAFETY: the caller's promise.
            for (item, _) in unsafe { self.get_turn(gets, &turn, deadline_ns) } {
                gets.items[item].result = Err(RemoteError::Damaged);
            }
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        let lengths: Vec<u64> = (0..puts.items.len()).map(|item| puts.bytes_of(item)).collect();
        let (some, too_long): (Vec<usize>, Vec<usize>) =
            (0..lengths.len()).partition(|&item| lengths[item] <= self.most);
        too_long.into_iter().for_each(|item| puts.items[item].result = Err(RemoteError::TooLong));
        let mut left = some.into_iter().peekable();
        while left.peek().is_some() {
            let turn = self.stage(&mut left, |item| sealed_bytes(lengths[item]));
            let mut inner = Puts::default();
            let mut sent = Vec::new();
            for staged in &turn {
                // SAFETY: the caller's promise.
                if unsafe { self.seal(puts, staged) } {
                    inner.object(puts.items[staged.item].name);
                    let object = &self.staging[staged.at.clone()];
                    inner.part(object.as_ptr(), object.len() as u64);
                    sent.push(staged.item);
                } else {
                    puts.items[staged.item].result = Err(RemoteError::Busy);
                }
            }
            // SAFETY: the parts are in the staging, which nobody touches meanwhile.
            unsafe { self.inner.put(&mut inner, deadline_ns) };
            let results = sent.iter().zip(&inner.items);
            results.for_each(|(&item, put)| puts.items[item].result = put.result);
            let is_over = !sent.is_empty() && inner.items.iter().all(|put| is_late(&put.result));
            if is_over {
                left.by_ref().for_each(|item| puts.items[item].result = Err(RemoteError::Timeout));
            }
        }
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.inner.lookup(queries, deadline_ns);
        for item in &mut queries.items {
            item.result =
                item.result.and_then(|sealed| plain_bytes(sealed).ok_or(RemoteError::Malformed));
        }
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.inner.remove(queries, deadline_ns);
    }
}

fn is_late<T>(result: &std::result::Result<T, RemoteError>) -> bool {
    matches!(result, Err(RemoteError::Timeout))
}
