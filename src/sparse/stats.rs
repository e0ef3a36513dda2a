//! What a policy has chosen so far.

/// Counts since a policy was made; a copy for another sequence begins at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stats {
    /// Selections that were asked for and answered.
    pub selections: u64,
    /// Candidates that they named.
    pub candidates: u64,
    /// Of those, blocks that are to be loaded.
    pub chosen: u64,
    /// Of those, blocks that need not be.
    pub spared: u64,
    /// Selections that were compared with what the layer's own query would have chosen.
    pub audited: u64,
    /// Blocks that own queries would have chosen.
    pub wanted: u64,
    /// Of those, blocks that were chosen.
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

    /// The part of what was wanted that was chosen, if anything was compared.
    pub fn recall(&self) -> Option<f64> {
        (self.wanted > 0).then(|| self.found as f64 / self.wanted as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_chosen_is_spared() {
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
