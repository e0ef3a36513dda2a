//! Quotas: most bytes of a tenant's chunks in host memory and on disk.
//!
//! A chunk belongs to the tenant that stored it first, and counts with all its layers. A put of new
//! chunks counts them at once: it evicts the tenant's least recently used chunks, and is rejected if
//! that does not suffice. Chunks that a get brings into memory, and chunks that are written to disk,
//! evict others of their tenant afterwards.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::store::state::chunk_table::{Part, note};
use crate::store::state::transfer::TransferKind;
use crate::store::state::{At, DISK, HOST, StoreState};

/// Most tenants that have a quota of their own.
pub const MAX_QUOTAS: usize = 1 << 16;

/// Most chunks that one call tries to evict. Pinned and referenced ones are tried in vain, and count as
/// used: the next call tries others.
const MOST_TRIES: usize = 1 << 12;

/// The tiers, as they are indexed here, with the flags of chunks that count there.
const TIERS: [(usize, u16); 2] = [(HOST, note::CHARGED_HOST), (DISK, note::CHARGED_DISK)];

/// Index of a tier here.
fn index_of(tier: usize) -> Option<usize> {
    TIERS.iter().position(|&(one, _)| one == tier)
}

/// Chunks of a tenant, by tier.
#[derive(Default)]
struct Usage {
    bytes: [u64; 2],
    /// The least recently used first.
    order: [BTreeSet<(u64, At)>; 2],
}

/// The use of a tenant that has a quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUse {
    /// Bytes in host memory and on disk.
    pub bytes: [u64; 2],
    /// The quota; 0 = none.
    pub quota: [u64; 2],
}

/// Quotas, and the use of tenants that have one.
pub(super) struct Quotas {
    /// Quota of each tenant that has none of its own.
    usual: [u64; 2],
    /// 0 = none of their own.
    own: BTreeMap<u32, [u64; 2]>,
    usage: BTreeMap<u32, Usage>,
    /// Tenants that may have more than their quota.
    over: BTreeSet<u32>,
    /// Tenants for which one call has evicted as much as it may: the next tick evicts more.
    over_later: BTreeSet<u32>,
    /// Uses so far.
    turn: u64,
}

impl Quotas {
    pub(super) fn new(usual: [u64; 2]) -> Quotas {
        let (own, usage) = (BTreeMap::new(), BTreeMap::new());
        let (over, over_later) = (BTreeSet::new(), BTreeSet::new());
        Quotas { usual, own, usage, over, over_later, turn: 0 }
    }

    /// Whether any tenant has one.
    pub(super) fn is_used(&self) -> bool {
        self.usual != [0; 2] || !self.own.is_empty()
    }

    /// The quota of a tenant. Tenant 0 stands for none.
    fn of(&self, tenant: u32) -> [u64; 2] {
        let own = self.own.get(&tenant).copied().unwrap_or_default();
        let of = |index| if own[index] == 0 { self.usual[index] } else { own[index] };
        if tenant == 0 { [0; 2] } else { [of(0), of(1)] }
    }
}

impl StoreState {
    /// Sets a tenant's own quota of host memory or of the disk; 0 = the store's quota.
    pub fn set_quota(&mut self, tenant: u32, tier: Tier, bytes: u64) -> Result<()> {
        let Some(index) = index_of(tier as usize) else {
            fail!(Unsupported, "a quota of {}: set a quota of HOST or DISK", tier.name());
        };
        if tier == Tier::Disk && self.disk.is_none() {
            fail!(
                Unsupported,
                "a quota of DISK: the store has no disk. Open it with disk=, or set a quota of HOST"
            );
        }
        if tenant == 0 {
            fail!(
                Invalid,
                "a quota of tenant 0, which stands for no tenant: give a tenant's number"
            );
        }
        if bytes > 0
            && self.quotas.own.len() >= MAX_QUOTAS
            && !self.quotas.own.contains_key(&tenant)
        {
            fail!(
                Limit,
                "{MAX_QUOTAS} tenants have quotas of their own, the limit: use quota= of the \
                 store's spec for all others"
            );
        }
        let own = self.quotas.own.entry(tenant).or_default();
        own[index] = bytes;
        if *own == [0; 2] {
            self.quotas.own.remove(&tenant);
        }
        let quota = self.quotas.of(tenant)[index];
        let mut all = Vec::new();
        for (table, rows) in (0u32..).zip(&self.tables) {
            let slots = rows.chunks.slots().filter(|&slot| rows.owners[slot as usize] == tenant);
            all.extend(slots.map(|slot| At { table, slot }));
        }
        for at in all {
            let row = self.tables[at.table as usize].chunks.chunk(at.slot);
            let is_resident = row.is_some_and(|row| row.cells()[tier as usize] > 0);
            match quota {
                0 => self.discharge_quota(at, tier as usize),
                _ if is_resident => self.charge_quota(at, tier as usize),
                _ => {}
            }
        }
        self.quotas.over.insert(tenant);
        self.settle();
        Ok(())
    }

    /// Tenants with a quota that have chunks, or a quota of their own.
    pub fn tenant_uses(&self) -> BTreeMap<u32, TenantUse> {
        let ids = self.quotas.own.keys().chain(self.quotas.usage.keys());
        let of = |&id: &u32| {
            let bytes = self.quotas.usage.get(&id).map_or([0; 2], |usage| usage.bytes);
            (id, TenantUse { bytes, quota: self.quotas.of(id) })
        };
        ids.map(of).collect()
    }

    /// Counts the new chunks of a put against its tenant's quota, or rejects the put.
    pub(super) fn admit_put(&mut self, number: u32, slots: &[Slot]) -> Result<()> {
        let spec = &self.transfers.table[number].spec;
        let (table, tenant) = (spec.table, spec.context.tenant);
        if spec.kind != TransferKind::Put || tenant == 0 {
            return Ok(());
        }
        let rows = &mut self.tables[table as usize];
        let mut new: Vec<Slot> = Vec::new();
        for &slot in slots.iter().filter(|&&slot| slot != NONE) {
            let row = rows.chunks.chunk(slot);
            if !rows.has(slot, note::STORED) && row.is_some_and(|row| row.cells_somewhere() == 0) {
                rows.owners[slot as usize] = tenant;
                new.push(slot);
            }
        }
        let quota = self.quotas.of(tenant)[0];
        if quota == 0 || new.is_empty() {
            return Ok(());
        }
        new.sort_unstable();
        new.dedup();
        let rows = &self.tables[table as usize];
        let more: u64 = new.iter().map(|&slot| rows.chunk_bytes(slot)).sum();
        let has = match more <= quota {
            true => self.evict_of_tenant(tenant, 0, quota - more),
            false => self.quotas.usage.get(&tenant).map_or(0, |usage| usage.bytes[0]),
        };
        if has.saturating_add(more) > quota {
            self.counters.quota_rejected_puts += 1;
            self.stats.tenants.rejected_put(tenant);
            fail!(
                Budget,
                "a put of {more} bytes: tenant {tenant} has {has} bytes in host memory and would \
                 exceed its quota of {quota}. Put less at once, close sessions, end pins, or raise \
                 the quota"
            );
        }
        for slot in new {
            self.charge_quota(At { table, slot }, HOST);
        }
        Ok(())
    }

    /// A put of a chunk has ended, well or not. Without KV it counts no more, and a later put stores it
    /// first.
    pub(super) fn put_ended(&mut self, at: At) {
        let rows = &mut self.tables[at.table as usize];
        let Some(row) = rows.chunks.chunk(at.slot) else { return };
        let is_in_host = row.cells()[HOST] > 0;
        if row.cells_somewhere() == 0 && !row.is_moving() {
            rows.clear(at.slot, note::STORED);
        }
        if !is_in_host {
            self.discharge_quota(at, HOST);
        }
    }

    /// Counts a chunk in a tier.
    pub(super) fn charge_quota(&mut self, at: At, tier: usize) {
        let Some(index) = index_of(tier).filter(|_| self.quotas.is_used()) else { return };
        let rows = &mut self.tables[at.table as usize];
        let owner = rows.owners[at.slot as usize];
        let quota = self.quotas.of(owner)[index];
        if quota == 0 || rows.has(at.slot, TIERS[index].1) {
            return;
        }
        rows.set(at.slot, TIERS[index].1);
        let bytes = rows.chunk_bytes(at.slot);
        let usage = self.quotas.usage.entry(owner).or_default();
        usage.bytes[index] += bytes;
        usage.order[index].insert((rows.turns[at.slot as usize], at));
        if usage.bytes[index] > quota {
            self.quotas.over.insert(owner);
        }
    }

    /// Ends the count of a chunk in a tier.
    pub(super) fn discharge_quota(&mut self, at: At, tier: usize) {
        let Some(index) = index_of(tier) else { return };
        let rows = &mut self.tables[at.table as usize];
        if !rows.has(at.slot, TIERS[index].1) {
            return;
        }
        rows.clear(at.slot, TIERS[index].1);
        let (owner, bytes) = (rows.owners[at.slot as usize], rows.chunk_bytes(at.slot));
        let Some(usage) = self.quotas.usage.get_mut(&owner) else { return };
        usage.bytes[index] = usage.bytes[index].saturating_sub(bytes);
        usage.order[index].remove(&(rows.turns[at.slot as usize], at));
        if usage.order.iter().all(BTreeSet::is_empty) {
            self.quotas.usage.remove(&owner);
        }
    }

    /// A transfer uses a chunk: it is evicted after its tenant's others.
    pub(super) fn used_by_tenant(&mut self, at: At) {
        if !self.quotas.is_used() {
            return;
        }
        let rows = &mut self.tables[at.table as usize];
        let owner = rows.owners[at.slot as usize];
        if self.quotas.of(owner) == [0; 2] {
            return;
        }
        self.quotas.turn += 1;
        let new = self.quotas.turn;
        let old = std::mem::replace(&mut rows.turns[at.slot as usize], new);
        let Some(usage) = self.quotas.usage.get_mut(&owner) else { return };
        for order in &mut usage.order {
            if order.remove(&(old, at)) {
                order.insert((new, at));
            }
        }
    }

    /// Forgets the tenant of a chunk whose row is removed.
    pub(super) fn forget_owner(&mut self, at: At) {
        if self.tables[at.table as usize].owners[at.slot as usize] == 0 {
            return;
        }
        TIERS.iter().for_each(|&(tier, _)| self.discharge_quota(at, tier));
        let rows = &mut self.tables[at.table as usize];
        (rows.owners[at.slot as usize], rows.turns[at.slot as usize]) = (0, 0);
    }

    /// Evicts chunks of a tenant that has more than its quota. Returns false if none is left.
    pub(super) fn enforce_quotas(&mut self) -> bool {
        let Some(tenant) = self.quotas.over.pop_first() else { return false };
        let before = self.counters.quota_evicted_chunks;
        let mut is_over = false;
        for (index, quota) in self.quotas.of(tenant).into_iter().enumerate() {
            is_over |= quota > 0 && self.evict_of_tenant(tenant, index, quota) > quota;
        }
        if is_over && self.counters.quota_evicted_chunks > before {
            self.quotas.over_later.insert(tenant);
        }
        true
    }

    /// Lets this tick continue with tenants for which an earlier one has evicted as much as it may.
    pub(super) fn resume_quotas(&mut self) {
        self.quotas.over.append(&mut self.quotas.over_later);
    }

    /// Evicts chunks of a tenant from a tier, the least recently used first, until it has at most
    /// `target` bytes there. Returns what it has then. Memory of chunks that are still to be written
    /// does not count any more.
    fn evict_of_tenant(&mut self, tenant: u32, index: usize, target: u64) -> u64 {
        let (tier, _) = TIERS[index];
        let all = self.quotas.usage.get(&tenant).map_or(0, |usage| usage.order[index].len());
        for _ in 0..all.min(MOST_TRIES) {
            let Some(usage) = self.quotas.usage.get(&tenant) else { return 0 };
            let next = usage.order[index].first().copied();
            let Some((_, at)) = next.filter(|_| usage.bytes[index] > target) else { break };
            if self.evict_charged(at, tier) {
                self.counters.quota_evicted_chunks += 1;
            }
            match self.must_charge(at, tier) {
                true => self.used_by_tenant(at),
                false => self.discharge_quota(at, tier),
            }
        }
        self.quotas.usage.get(&tenant).map_or(0, |usage| usage.bytes[index])
    }

    /// Whether a chunk counts in a tier: it is resident there and is not about to leave, or a put is to
    /// bring it there.
    fn must_charge(&self, at: At, tier: usize) -> bool {
        let rows = &self.tables[at.table as usize];
        let Some(row) = rows.chunks.chunk(at.slot) else { return false };
        let is_leaving = tier == HOST && self.writeback.demoting.contains_key(&at);
        !is_leaving && (row.cells()[tier] > 0 || row.refs() > 0)
    }

    /// Evicts a chunk from a tier, unless something uses it. Returns whether its bytes there are or
    /// will be free.
    fn evict_charged(&mut self, at: At, tier: usize) -> bool {
        let rows = &self.tables[at.table as usize];
        let Some(row) = rows.chunks.chunk(at.slot) else { return false };
        let is_queued = rows.has(at.slot, note::QUEUED);
        if row.is_moving() || row.pin().is_some() || row.refs() > u32::from(is_queued) {
            return false;
        }
        if tier == DISK || self.disk.is_none() {
            return self.drop_chunks_locally(at.table, &[at.slot]).removed > 0;
        }
        if row.cells()[HOST] == 0 {
            return false;
        }
        self.remove_from_policy(at, Tier::Host);
        self.evict_from_host(at, Part::All)
    }

    /// Checks the use of tenants against the rows.
    pub(super) fn check_quotas(&self) -> Result<()> {
        let mut found: BTreeMap<u32, ([u64; 2], [usize; 2])> = BTreeMap::new();
        for (table, rows) in (0u32..).zip(&self.tables) {
            for slot in rows.chunks.slots() {
                let quota = self.quotas.of(rows.owners[slot as usize]);
                let row = rows.chunks.chunk(slot);
                for (index, &(tier, flag)) in TIERS.iter().enumerate() {
                    let at = At { table, slot };
                    let is_resident = row.is_some_and(|row| row.cells()[tier] > 0);
                    let must = is_resident && quota[index] > 0 && self.must_charge(at, tier);
                    if must && !rows.has(slot, flag) {
                        fail!(State, "{at:?} does not count against the quota of tier {tier}");
                    }
                    let is_held = row.is_some_and(|row| row.refs() > 0);
                    if rows.has(slot, flag) && !is_resident && !is_held {
                        fail!(State, "{at:?} counts in tier {tier}, where it has no KV");
                    }
                }
                for (index, &(_, flag)) in
                    TIERS.iter().enumerate().filter(|(_, t)| rows.has(slot, t.1))
                {
                    let owner = rows.owners[slot as usize];
                    let one = found.entry(owner).or_default();
                    one.0[index] += rows.chunk_bytes(slot);
                    one.1[index] += 1;
                    let usage = self.quotas.usage.get(&owner);
                    let key = (rows.turns[slot as usize], At { table, slot });
                    if usage.is_none_or(|usage| !usage.order[index].contains(&key)) {
                        fail!(State, "chunk {slot} of table {table} ({flag}) is not listed");
                    }
                }
            }
        }
        let sizes = |usage: &Usage| (usage.bytes, [usage.order[0].len(), usage.order[1].len()]);
        let counted = self.quotas.usage.iter().map(|(&id, usage)| (id, sizes(usage))).collect();
        if found != counted {
            fail!(State, "tenants have {found:?}, counted are {counted:?}");
        }
        Ok(())
    }
}
