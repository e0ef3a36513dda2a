//! Units held by each tenant, and the tenants below their floor.

/// Most tenants with a floor; the others share a row without.
pub const MAX_TENANTS: usize = 64;

/// The row of objects without a tenant, and of tenants without a row.
pub const OTHERS: u8 = 0;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Row {
    tenant: u32,
    objects: u32,
    units: u64,
}

/// Units by tenant.
pub struct Tenants {
    rows: [Row; MAX_TENANTS + 1],
    /// Rows used so far.
    high: usize,
    active: u32,
    total: u64,
    /// Share below which a tenant is protected; None: half of an equal share.
    floor: Option<f64>,
}

impl Tenants {
    /// No units yet.
    pub fn new(floor: Option<f64>) -> Tenants {
        let rows = [Row::default(); MAX_TENANTS + 1];
        Tenants { rows, high: 1, active: 0, total: 0, floor }
    }

    /// The row of a tenant with resident objects, else `OTHERS`.
    pub fn row(&self, tenant: u32) -> u8 {
        let is = |row: &Row| row.objects > 0 && row.tenant == tenant;
        self.rows[1..self.high].iter().position(is).map_or(OTHERS, |at| at as u8 + 1)
    }

    fn row_or_new(&mut self, tenant: u32) -> u8 {
        let row = self.row(tenant);
        if row != OTHERS {
            return row;
        }
        let free = match self.rows[1..self.high].iter().position(|row| row.objects == 0) {
            Some(at) => at + 1,
            None if self.high <= MAX_TENANTS => {
                self.high += 1;
                self.high - 1
            }
            None => return OTHERS,
        };
        self.rows[free].tenant = tenant;
        free as u8
    }

    /// Adds an object of a tenant; returns the row.
    pub fn join(&mut self, tenant: Option<u32>, units: u32) -> u8 {
        let row = tenant.map_or(OTHERS, |tenant| self.row_or_new(tenant));
        let into = &mut self.rows[usize::from(row)];
        self.active += u32::from(row != OTHERS && into.objects == 0);
        into.objects += 1;
        into.units += u64::from(units);
        self.total += u64::from(units);
        row
    }

    /// An object in a row changes its size.
    pub fn resize(&mut self, row: u8, from: u32, to: u32) {
        let units = &mut self.rows[usize::from(row)].units;
        *units = *units - u64::from(from) + u64::from(to);
        self.total = self.total - u64::from(from) + u64::from(to);
    }

    /// Removes an object from a row.
    pub fn leave(&mut self, row: u8, units: u32) {
        let from = &mut self.rows[usize::from(row)];
        from.objects -= 1;
        from.units -= u64::from(units);
        self.total -= u64::from(units);
        self.active -= u32::from(row != OTHERS && from.objects == 0);
    }

    /// The tenant of a row in use.
    pub fn tenant(&self, row: u8) -> Option<u32> {
        let at = &self.rows[usize::from(row)];
        (row != OTHERS && at.objects > 0).then_some(at.tenant)
    }

    /// Number of tenants with resident objects.
    pub fn active(&self) -> u32 {
        self.active
    }

    /// Bit set of the protected rows: those below the floor while another is not.
    #[inline]
    pub fn protected(&self) -> u128 {
        if self.active == 0 || self.floor == Some(0.0) {
            return 0;
        }
        let share = self.floor.unwrap_or(0.5 / f64::from(self.active));
        let least = share * self.total as f64;
        let (mut below, mut above) = (0u128, self.rows[0].objects > 0);
        for (at, row) in self.rows[..self.high].iter().enumerate().skip(1) {
            if row.objects > 0 {
                let short = (row.units as f64) < least;
                below |= u128::from(short) << at;
                above |= !short;
            }
        }
        if above { below } else { 0 }
    }

    /// Units in each row; for tests.
    pub fn units(&self) -> impl Iterator<Item = u64> + '_ {
        self.rows.iter().map(|row| row.units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_below_half_an_equal_share_is_protected() {
        let mut tenants = Tenants::new(None);
        let a = tenants.join(Some(7), 90);
        assert_eq!(tenants.protected(), 0);
        let b = tenants.join(Some(8), 10);
        assert_eq!((a, b, tenants.active()), (1, 2, 2));
        assert_eq!(tenants.protected(), 1 << b);
        tenants.leave(a, 90);
        assert_eq!(tenants.tenant(a), None);
        assert_eq!(tenants.protected(), 0);
        assert_eq!(tenants.join(Some(9), 4), a, "a row is used again");
    }

    #[test]
    fn no_tenant_is_protected_if_all_are_below_the_floor() {
        let mut tenants = Tenants::new(Some(0.9));
        tenants.join(Some(1), 5);
        tenants.join(Some(2), 6);
        assert_eq!(tenants.protected(), 0);
        tenants.join(None, 1);
        assert_eq!(tenants.protected(), 0b110);
    }

    #[test]
    fn more_tenants_than_rows_share_one() {
        let mut tenants = Tenants::new(None);
        for tenant in 0..MAX_TENANTS as u32 {
            assert_ne!(tenants.join(Some(tenant), 1), OTHERS);
        }
        assert_eq!(tenants.join(Some(5000), 1), OTHERS);
        assert_ne!(tenants.join(Some(3), 1), OTHERS);
        assert_eq!(tenants.units().sum::<u64>(), MAX_TENANTS as u64 + 2);
    }
}
