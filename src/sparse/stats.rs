//! Counters of selections.

/// Counters since a policy was made; a fork begins at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stats {
    /// Answered selections.
    pub selections: u64,
    /// Candidates in them.
    pub candidates: u64,
    /// Selected blocks.
    pub chosen: u64,
    /// Blocks that need not be loaded.
    pub spared: u64,
    /// Selections that were compared with that of the layer's own query.
    pub audited: u64,
    /// Blocks that own queries would have selected.
    pub wanted: u64,
    /// Blocks of `wanted` that were selected.
    pub found: u64,
}

impl Stats {
    /// Counts a selection.
    pub fn count(&mut self, candidates: usize, chosen: usize) {
        self.selections += 1;
        self.candidates += candidates as u64;
        self.chosen += chosen as u64;
        self.spared += candidates.saturating_sub(chosen) as u64;
    }

    /// Counts a comparison.
    pub fn audit(&mut self, wanted: usize, found: usize) {
        self.audited += 1;
        self.wanted += wanted as u64;
        self.found += found as u64;
    }

    /// `found / wanted`, if anything was compared.
    pub fn recall(&self) -> Option<f64> {
        (self.wanted > 0).then(|| self.found as f64 / self.wanted as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_that_are_not_chosen_are_spared() {
        let mut stats = Stats::default();
        assert_eq!(stats.recall(), None);
        stats.count(10, 4);
        stats.count(0, 0);
        stats.audit(8, 6);
        assert_eq!((stats.selections, stats.candidates), (2, 10));
        assert_eq!((stats.chosen, stats.spared, stats.audited), (4, 6, 1));
        assert_eq!(stats.recall(), Some(0.75));
    }
}
