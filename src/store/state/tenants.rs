//! What each tenant has moved. So many tenants are told apart; the rest are one.

use crate::base::status::{Error, Status};
use crate::store::state::transfer::TransferKind;

/// Most tenants that are told apart.
pub const MAX_TENANTS: usize = 1024;

/// What a tenant has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// Its number; of no meaning for the rest.
    pub id: u32,
    /// Bytes it has stored.
    pub put_bytes: u64,
    /// Bytes it was given back.
    pub got_bytes: u64,
    /// Cells it has asked for, and got.
    pub hits: u64,
    /// Cells it has asked for that were nowhere.
    pub misses: u64,
}

/// All of them.
#[derive(Default)]
pub(super) struct Tenants {
    /// By number.
    rows: Vec<Tenant>,
    others: Tenant,
}

impl Tenants {
    /// A cell of a tenant's move has ended.
    pub(super) fn count(&mut self, id: u32, kind: TransferKind, bytes: u64, error: Option<&Error>) {
        let status = error.map_or(Status::Ok, Error::status);
        if kind == TransferKind::Prefetch || !matches!(status, Status::Ok | Status::NotFound) {
            return;
        }
        let row = self.row(id);
        match kind {
            TransferKind::Put => row.put_bytes += bytes,
            _ if status == Status::Ok => {
                row.hits += 1;
                row.got_bytes += bytes;
            }
            _ => row.misses += 1,
        }
    }

    fn row(&mut self, id: u32) -> &mut Tenant {
        match self.rows.binary_search_by_key(&id, |row| row.id) {
            Ok(at) => &mut self.rows[at],
            Err(at) if self.rows.len() < MAX_TENANTS && self.rows.try_reserve(1).is_ok() => {
                self.rows.insert(at, Tenant { id, ..Tenant::default() });
                &mut self.rows[at]
            }
            Err(_) => &mut self.others,
        }
    }

    /// Those that are told apart, by number.
    pub(super) fn rows(&self) -> &[Tenant] {
        &self.rows
    }

    /// The rest.
    pub(super) fn others(&self) -> Tenant {
        self.others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_are_told_apart_and_the_rest_are_one() {
        let mut tenants = Tenants::default();
        let most = MAX_TENANTS as u32;
        let miss: Error = Status::NotFound.into();
        let failed: Error = Status::Io.into();
        for round in 0..2 {
            for id in (0..most + 3).rev() {
                tenants.count(id, TransferKind::Put, u64::from(id), None);
                tenants.count(id, TransferKind::Get, 10, None);
                tenants.count(id, TransferKind::Get, 0, Some(&miss));
                tenants.count(id, TransferKind::Get, 0, Some(&failed));
                tenants.count(id, TransferKind::Prefetch, 5, None);
            }
            let rows = tenants.rows();
            assert_eq!(rows.len(), MAX_TENANTS);
            assert!(rows.is_sorted_by(|a, b| a.id < b.id));
            let (n, put_bytes) = (round + 1, u64::from(rows[7].id) * (round + 1));
            let want = Tenant { id: 10, put_bytes, got_bytes: 10 * n, hits: n, misses: n };
            assert_eq!(rows[7], want, "the first three came last");
            let rest =
                Tenant { id: 0, put_bytes: 3 * n, got_bytes: 30 * n, hits: 3 * n, misses: 3 * n };
            assert_eq!(tenants.others(), rest);
        }
    }
}
