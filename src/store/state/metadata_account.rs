//! What the store's tables take, and who pays: the account that pays for cells, too. Tables
//! grow as chunks come, and never shrink; they are paid for in steps, ahead of their growth.
//! Where the account has nothing left cells have to give way.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::sync::Arc;
use crate::meta::chunks::{CELL_BYTES, CHUNK_BYTES};
use crate::store::state::tier_cache::TierCache;
use crate::store::state::{ChunkTable, StoreState};

const STEP_BYTES: u64 = 1 << 20;
/// Of a chunk, beside its row and cells: indexes, notes, and what policies keep.
pub const BESIDE_BYTES: u64 = 512;

/// What is paid.
pub(super) struct MetadataAccount {
    account: Option<Arc<Account>>,
    paid_bytes: u64,
    /// What is missing, and cells were asked to make room for; how much had been given back
    /// when that was last looked at.
    missing: Option<(u64, u64)>,
    /// Rows that may come before it is looked again.
    ahead: usize,
}

impl MetadataAccount {
    pub(super) fn new(account: Option<Arc<Account>>) -> MetadataAccount {
        MetadataAccount { account, paid_bytes: 0, missing: None, ahead: 0 }
    }
}

impl Drop for MetadataAccount {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.paid_bytes);
        }
    }
}

impl StoreState {
    /// Bytes of tables so far: chunks, cells, what policies know, and of a remote's.
    pub fn table_bytes(&self) -> u64 {
        let tables = self.tables.iter().map(ChunkTable::used_bytes);
        let replicas = self.replicas.as_ref().map(|replicas| &replicas.cache);
        let caches = [Some(&self.host_cache), self.disk_cache.as_ref(), replicas];
        let caches = caches.into_iter().flatten().map(TierCache::used_bytes);
        let remote =
            self.remote.as_ref().map(|remote| remote.known.bytes() + remote.config.beside_bytes);
        tables.sum::<u64>() + caches.sum::<u64>() + remote.unwrap_or(0)
    }

    /// So many chunks are about to come: their rows are paid for.
    pub(super) fn pay_for_rows(&mut self, chunks: usize) {
        if self.metadata.account.is_none() {
            return;
        }
        if chunks <= self.metadata.ahead {
            self.metadata.ahead -= chunks;
            return;
        }
        self.metadata.ahead = 0;
        let layers = self.tables.iter().map(|table| table.layout.layers()).max().unwrap_or(0);
        let piece = if self.replicas.is_some() { size_of::<u32>() } else { 0 };
        let each = (CHUNK_BYTES + layers * (CELL_BYTES + piece)) as u64 + BESIDE_BYTES;
        let needed = self.table_bytes() + chunks as u64 * each;
        let asked = self.metadata.missing.map_or(0, |(bytes, _)| bytes);
        let missing = needed.saturating_sub(self.metadata.paid_bytes);
        if missing > asked {
            let bytes = missing.next_multiple_of(STEP_BYTES);
            if !self.pay_tables(bytes) {
                return self.owe(bytes - asked);
            }
        }
        self.metadata.ahead = (self.metadata.paid_bytes.saturating_sub(needed) / each) as usize;
    }

    /// What has come free pays for what is missing. This is before anyone who waits for
    /// memory gets it.
    pub(super) fn pay_again(&mut self) {
        let Some((missing, since_bytes)) = self.metadata.missing else { return };
        let now_bytes = self.host.given_back_bytes();
        let part = missing.min(now_bytes - since_bytes);
        if part == 0 {
            return;
        }
        if self.take_for_tables(part) {
            let left = missing - part;
            self.metadata.missing = (left > 0).then_some((left, now_bytes));
        } else {
            // Others were faster.
            self.metadata.missing = Some((missing, now_bytes));
            self.owe(part);
        }
    }

    /// Bytes of tables that are paid for.
    pub fn paid_table_bytes(&self) -> u64 {
        self.metadata.paid_bytes
    }

    fn pay_tables(&mut self, bytes: u64) -> bool {
        let since_bytes = self.host.given_back_bytes();
        let is_paid =
            self.take_for_tables(bytes) || self.host.trim() > 0 && self.take_for_tables(bytes);
        // What was trimmed and is too little pays for a part.
        self.metadata.missing = (!is_paid).then_some((bytes, since_bytes));
        is_paid
    }

    fn take_for_tables(&mut self, bytes: u64) -> bool {
        let Some(account) = &self.metadata.account else { return true };
        let is_paid = account.take(Tier::Host, bytes).is_ok();
        if is_paid {
            self.metadata.paid_bytes += bytes;
        }
        is_paid
    }
}
