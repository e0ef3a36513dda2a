//! Lookups and touches of paths of objects.
//!
//! In a path with gaps the processor cannot predict which ids are present. So hits and misses are
//! partitioned once, without a branch, and each part is then processed in a row.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::policy::evictor::{Evictor, RequestContext};

/// Ids whose memory is prefetched at a time.
pub(super) const AHEAD: usize = 64;

/// The ids of a call, partitioned into hits and misses. Kept from call to call; only the leading
/// entries are valid.
#[derive(Default)]
pub(super) struct Partition {
    present: Vec<Slot>,
    missing: Vec<u64>,
    missing_at: Vec<u32>,
}

impl Partition {
    /// Reserves memory; false if there is none.
    pub(super) fn reserve(&mut self, ids: usize) -> bool {
        let Partition { present, missing, missing_at } = self;
        let more = ids.saturating_sub(present.len());
        if more == 0 {
            return true;
        }
        if present.try_reserve(more).is_err()
            || missing.try_reserve(more).is_err()
            || missing_at.try_reserve(more).is_err()
        {
            return false;
        }
        present.resize(ids, NONE);
        missing.resize(ids, 0);
        missing_at.resize(ids, 0);
        true
    }

    /// Partitions the ids; returns the number of hits and of misses.
    fn fill(&mut self, ids: &[u64], slots: &[Slot]) -> (usize, usize) {
        let (mut hits, mut misses) = (0, 0);
        for (at, (&id, &slot)) in ids.iter().zip(slots).enumerate() {
            let is_resident = slot != NONE;
            self.present[hits] = slot;
            self.missing[misses] = id;
            self.missing_at[misses] = at as u32;
            hits += usize::from(is_resident);
            misses += usize::from(!is_resident);
        }
        (hits, misses)
    }
}

/// A lookup to be counted.
struct CountedLookup<'a> {
    context: &'a RequestContext,
    session: Slot,
    ids: usize,
    /// Leading ids that are present.
    leading: usize,
    /// Ids that are missing.
    misses: usize,
}

impl Evictor {
    /// Looks up a path of objects, first to last, and counts the lookup. Hits are touched, the last
    /// one first, so that no object is older than its children. Returns the number of leading hits.
    /// `found`, if not empty, receives 0 or 1 for each id. Where holes are allowed, objects behind
    /// a hole are hits, too.
    #[inline]
    pub fn lookup(
        &mut self,
        now: i64,
        context: &RequestContext,
        ids: &[u64],
        found: &mut [u8],
    ) -> Result<usize> {
        if ids.len() != 1 || found.len() > 1 || context.session.is_some() {
            return self.lookup_path(now, context, ids, found);
        }
        let now = self.tick(now, 1)?;
        let is_resident = self.lookup_one(now, context, ids[0]);
        if let Some(found) = found.first_mut() {
            *found = u8::from(is_resident);
        }
        Ok(usize::from(is_resident))
    }

    /// As `lookup`, for any number of ids.
    fn lookup_path(
        &mut self,
        now: i64,
        context: &RequestContext,
        ids: &[u64],
        found: &mut [u8],
    ) -> Result<usize> {
        if !found.is_empty() && found.len() != ids.len() {
            fail!(Invalid, "found has {} entries for {} ids", found.len(), ids.len());
        }
        let now = self.begin(now, ids.len())?;
        let leading = self.find_all(ids);
        let session = self.note_session(now, context);
        let (hits, misses) = self.partition.fill(ids, &self.slots);
        let (usable, used) =
            if self.options.holes { (ids.len(), hits) } else { (leading, leading) };
        for (i, out) in found.iter_mut().enumerate() {
            *out = u8::from((i < usable) & (self.slots[i] != NONE));
        }
        self.count_lookup(&CountedLookup { context, session, ids: ids.len(), leading, misses });
        let slots = &self.partition.present[..used];
        let mut stamp = self.policy.touch_all(&mut self.objects, slots, session, now);
        for ids in self.partition.missing[..misses].chunks(AHEAD) {
            self.policy.prefetch(ids);
            for &id in ids {
                self.policy.miss(&self.objects, id, stamp);
                stamp += 1;
            }
        }
        self.advice.observe(&self.metrics.counts);
        Ok(leading)
    }

    /// As `lookup`, for a single id without a session. It has so few steps that the processor
    /// overlaps the memory accesses of consecutive calls.
    fn lookup_one(&mut self, now: i64, context: &RequestContext, id: u64) -> bool {
        let each = context.tokens_each.max(1);
        let all = if context.length > 0 { context.length } else { each };
        let cost = self.options.cost.of_start(all);
        let counts = &mut self.metrics.counts;
        counts.requests += 1;
        counts.references += 1;
        counts.tokens += u64::from(all);
        counts.cost += cost;
        let slot = self.objects.find(id);
        match slot {
            Some(slot) => {
                counts.hits += 1;
                counts.hit_tokens += u64::from(all.min(each));
                counts.hit_cost +=
                    if all <= each { cost } else { self.options.cost.of_start(each) };
                self.use_slot(slot, NONE, now);
            }
            None => {
                counts.evicted_references += u64::from(self.history.get(id).is_some());
                self.policy.miss(&self.objects, id, now);
            }
        }
        self.advice.observe(&self.metrics.counts);
        slot.is_some()
    }

    /// Touches objects, the last one first, without counting a lookup. Returns the number that were
    /// present.
    pub fn touch(&mut self, now: i64, context: &RequestContext, ids: &[u64]) -> Result<usize> {
        let now = self.begin(now, ids.len())?;
        self.find_all(ids);
        let session = self.note_session(now, context);
        let (hits, _) = self.partition.fill(ids, &self.slots);
        let slots = &self.partition.present[..hits];
        let end = self.policy.touch_all(&mut self.objects, slots, session, now);
        Ok((end - now) as usize)
    }

    /// Counts the requested objects, and those that were present and usable.
    fn count_lookup(&mut self, lookup: &CountedLookup) {
        let &CountedLookup { context, session, ids, leading, misses } = lookup;
        let each = u64::from(context.tokens_each.max(1));
        let all = if context.length > 0 { u64::from(context.length) } else { each * ids as u64 };
        let until = |i: usize| (each * i as u64).min(all);
        let counts = &mut self.metrics.counts;
        counts.requests += 1;
        counts.references += ids as u64;
        counts.tokens += all;
        counts.cost += self.options.cost.of(0, all);
        let (mut hits, mut hit_tokens, mut missed_tokens) = (leading as u64, until(leading), 0);
        let mut hit_cost = self.options.cost.of(0, hit_tokens);
        // Objects behind a gap: hits, or recomputed because of the gap.
        let behind = self.slots.iter().enumerate().skip(leading);
        let resident = behind.map(|(i, &slot)| (i, u64::from(slot != NONE)));
        let tokens = |(i, is_resident)| (until(i + 1) - until(i)) * is_resident;
        if self.options.holes {
            hits = (ids - misses) as u64;
            for one in resident {
                hit_tokens += tokens(one);
                hit_cost += self.options.cost.of(until(one.0), tokens(one));
            }
        } else {
            missed_tokens = resident.map(tokens).sum();
        }
        if !self.history.is_empty() {
            let missing = self.partition.missing[..misses].chunks(AHEAD);
            for (ids, at) in missing.zip(self.partition.missing_at[..misses].chunks(AHEAD)) {
                self.history.prefetch(ids);
                for (&id, &i) in ids.iter().zip(at) {
                    let known = u64::from(self.history.get(id).is_some());
                    counts.evicted_references += known;
                    missed_tokens += known * (until(i as usize + 1) - until(i as usize));
                }
            }
        }
        counts.hits += hits;
        counts.hit_tokens += hit_tokens;
        counts.hit_cost += hit_cost;
        if let Some(row) = self.objects.sessions.of_mut(session) {
            row.hit_tokens += hit_tokens;
            row.requested_tokens += hit_tokens + missed_tokens;
        }
        // A session without a row still counts for its tenant.
        if context.session.is_some() {
            self.metrics.tenant(context.tenant, hit_tokens, hit_tokens + missed_tokens);
        }
    }
}
