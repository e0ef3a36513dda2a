//! A client of a remote with encrypted objects. Objects pass through a staging buffer of its own, a
//! batch in several rounds.

use std::ops::Range;

use crate::base::machine::random_bytes;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::tier::remote::seal::{
    ENVELOPE_BYTES, Sealer, place_of, plain_bytes, sealed_bytes, whole_bytes,
};
use crate::tier::remote::{Client, Gets, Part, Puts, Queries, RemoteError, Server};

/// Most bytes of a round; a longer object has a round for itself.
pub(super) const ROUND_BYTES: u64 = 16 << 20;

/// A client that encrypts and decrypts.
pub struct SealedClient {
    inner: Box<dyn Client>,
    sealer: Arc<Sealer>,
    /// Most plain bytes of an object.
    max_bytes: u64,
    /// The encrypted objects of a round, one after the other.
    staging: Vec<u8>,
}

/// An object of a round: its index in the batch, and its range of the staging buffer.
struct StagedObject {
    item: usize,
    at: Range<usize>,
}

impl SealedClient {
    /// Wraps another client.
    pub fn new(inner: Box<dyn Client>, sealer: Arc<Sealer>, max_bytes: u64) -> SealedClient {
        SealedClient { inner, sealer, max_bytes, staging: Vec::new() }
    }

    /// The items of the next round: the first that is left, and as many more as fit. `length`:
    /// bytes of each in the staging buffer.
    fn stage(
        &mut self,
        left: &mut std::iter::Peekable<impl Iterator<Item = usize>>,
        length: impl Fn(usize) -> u64,
    ) -> Vec<StagedObject> {
        let (mut staged, mut end) = (Vec::new(), 0);
        while let Some(&item) = left.peek() {
            let bytes = length(item);
            if end > 0 && end + bytes > ROUND_BYTES {
                break;
            }
            left.next();
            staged.push(StagedObject { item, at: end as usize..(end + bytes) as usize });
            end += bytes;
        }
        if self.staging.len() as u64 > ROUND_BYTES {
            self.staging = Vec::new();
        }
        if (self.staging.len() as u64) < end {
            self.staging.resize(end as usize, 0);
        }
        staged
    }

    /// Copies the parts of an object to their places, and encrypts it; false = encryption failed.
    ///
    /// # Safety
    /// The memory of the parts is valid, and no one writes it.
    unsafe fn seal(&mut self, puts: &Puts, staged: &StagedObject) -> bool {
        let Ok(random) = random_bytes() else { return false };
        let object = &mut self.staging[staged.at.clone()];
        let mut plain = 0;
        for part in puts.parts_of(staged.item) {
            let mut done = 0;
            while done < part.bytes {
                let place = place_of(plain, part.bytes - done);
                let (from, count) = (part.address.wrapping_add(done as usize), place.len());
                // SAFETY: within the part, which the caller guarantees, and as many bytes of the
                // staging buffer.
                unsafe { object[place].as_mut_ptr().copy_from_nonoverlapping(from, count) };
                done += count as u64;
                plain += count as u64;
            }
        }
        self.sealer.seal(&puts.items[staged.item].name, random, object)
    }

    /// Fetches encrypted objects into the staging buffer; returns the bytes of each.
    fn fetch(
        &mut self,
        gets: &Gets,
        all: &[StagedObject],
        deadline_ns: u64,
    ) -> Vec<std::result::Result<u64, RemoteError>> {
        let mut inner = Gets::default();
        let start = self.staging.as_mut_ptr();
        for staged in all {
            inner.object(gets.items[staged.item].name, 0);
            inner.part(start.wrapping_add(staged.at.start), staged.at.len() as u64);
        }
        // SAFETY: the parts are disjoint ranges of the staging buffer, and nothing else uses it.
        unsafe { self.inner.get(&mut inner, deadline_ns) };
        inner.items.iter().map(|item| item.result).collect()
    }

    /// Length of the whole object, of which `arrived_bytes` bytes arrived.
    fn whole(&self, staged: &StagedObject, arrived_bytes: u64) -> Option<u64> {
        whole_bytes(
            self.staging[staged.at.clone()].get(..(arrived_bytes as usize).min(ENVELOPE_BYTES))?,
        )
    }

    /// Decrypts an object, and copies the requested part.
    ///
    /// # Safety
    /// The memory of the item's parts is valid, and no other thread uses it during the call.
    unsafe fn open(
        &mut self,
        gets: &Gets,
        staged: &StagedObject,
        arrived_bytes: u64,
    ) -> std::result::Result<u64, RemoteError> {
        let object = self.staging[staged.at.clone()].get_mut(..arrived_bytes as usize);
        let object = object.ok_or(RemoteError::Malformed)?;
        let item = &gets.items[staged.item];
        let plain = self.sealer.open(&item.name, object).ok_or(RemoteError::Damaged)?;
        let mut at = item.offset.min(plain);
        for Part { address, bytes } in gets.parts_of(staged.item) {
            let (end, first) = (plain.min(at.saturating_add(*bytes)), at);
            while at < end {
                let place = place_of(at, end - at);
                let (to, count) = (address.wrapping_add((at - first) as usize), place.len());
                // SAFETY: within the part, which the caller guarantees; the staging buffer is our
                // own.
                unsafe { to.copy_from_nonoverlapping(object[place].as_ptr(), count) };
                at += count as u64;
            }
        }
        Ok(at - item.offset.min(plain))
    }

    /// One round of gets. Returns the items that are longer than their range, with the length by
    /// their envelope.
    ///
    /// # Safety
    /// As for [`Client::get`].
    unsafe fn get_round(
        &mut self,
        gets: &mut Gets,
        all: &[StagedObject],
        deadline_ns: u64,
    ) -> Vec<(usize, u64)> {
        let max_bytes = sealed_bytes(self.max_bytes);
        let mut longer = Vec::new();
        let arrived_bytes = self.fetch(gets, all, deadline_ns);
        for (staged, arrived_bytes) in all.iter().zip(arrived_bytes) {
            gets.items[staged.item].result = match arrived_bytes {
                Err(error) => Err(error),
                Ok(arrived_bytes) => match self.whole(staged, arrived_bytes) {
                    // The object is longer than expected.
                    Some(whole)
                        if (arrived_bytes + 1..=max_bytes).contains(&whole)
                            && arrived_bytes == staged.at.len() as u64 =>
                    {
                        longer.push((staged.item, whole));
                        Err(RemoteError::Busy)
                    }
                    // SAFETY: the caller's guarantee.
                    Some(whole) if whole == arrived_bytes => unsafe {
                        self.open(gets, staged, arrived_bytes)
                    },
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
            .map(|item| {
                gets.items[item].offset.saturating_add(gets.room_of(item)).min(self.max_bytes)
            })
            .collect();
        let mut left = (0..rooms.len()).peekable();
        let mut longer = Vec::new();
        while left.peek().is_some() {
            // The caller mostly has room for exactly the object.
            let round = self.stage(&mut left, |item| sealed_bytes(rooms[item]));
            // SAFETY: the caller's guarantee.
            longer.extend(unsafe { self.get_round(gets, &round, deadline_ns) });
            if round.iter().all(|staged| is_late(&gets.items[staged.item].result)) {
                left.by_ref().for_each(|item| gets.items[item].result = Err(RemoteError::Timeout));
            }
        }
        // Even for a part the whole object is fetched, because all of it is verified.
        let mut left = (0..longer.len()).peekable();
        while left.peek().is_some() {
            let mut round = self.stage(&mut left, |at| longer[at].1);
            round.iter_mut().for_each(|staged| staged.item = longer[staged.item].0);
            // SAFETY: the caller's guarantee.
            for (item, _) in unsafe { self.get_round(gets, &round, deadline_ns) } {
                gets.items[item].result = Err(RemoteError::Damaged);
            }
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        let lengths: Vec<u64> = (0..puts.items.len()).map(|item| puts.bytes_of(item)).collect();
        let (some, too_long): (Vec<usize>, Vec<usize>) =
            (0..lengths.len()).partition(|&item| lengths[item] <= self.max_bytes);
        too_long.into_iter().for_each(|item| puts.items[item].result = Err(RemoteError::TooLong));
        let mut left = some.into_iter().peekable();
        while left.peek().is_some() {
            let round = self.stage(&mut left, |item| sealed_bytes(lengths[item]));
            let mut inner = Puts::default();
            let mut sent = Vec::new();
            for staged in &round {
                // SAFETY: the caller's guarantee.
                if unsafe { self.seal(puts, staged) } {
                    inner.object(puts.items[staged.item].name);
                    let object = &self.staging[staged.at.clone()];
                    inner.part(object.as_ptr(), object.len() as u64);
                    sent.push(staged.item);
                } else {
                    puts.items[staged.item].result = Err(RemoteError::Busy);
                }
            }
            // SAFETY: the parts are in the staging buffer, which no one uses during the call.
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
