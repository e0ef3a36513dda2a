//! Layers whose tokens see no further back than a window: they keep no more KV than that.

use crate::stream::model::Facts;

/// Families in which one layer of so many sees everything, where the files do not say it;
/// 0 = none does.
const FAMILIES: [(&str, u64); 10] = [
    ("cohere2", 4),
    ("gemma2", 2),
    ("gemma3", 6),
    ("gemma3_text", 6),
    ("gpt-oss", 2),
    ("gpt_oss", 2),
    ("ministral", 0),
    ("mistral", 0),
    ("mistral3", 0),
    ("mixtral", 0),
];

/// What files say of which layers have a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Which {
    /// Nothing: the family may.
    #[default]
    Unsaid,
    /// One layer of so many has none: the last of them; 0 = all have one.
    AllBut(u64),
    /// So many have one, of a list for so many layers.
    Listed { windowed: u64, of: u64 },
    /// All behind so many.
    Behind(u64),
    /// Something that is not understood.
    Else,
}

impl Which {
    /// How many layers have a window, if that is known.
    fn count(self, layers: u64, architecture: &str) -> Option<u64> {
        let of_period = |period: u64| match period {
            0 => layers,
            _ => layers - layers / period,
        };
        match self {
            Which::AllBut(period) => Some(of_period(period)),
            Which::Listed { windowed, of } if of == layers => Some(windowed.min(layers)),
            Which::Behind(first) => Some(layers.saturating_sub(first)),
            Which::Listed { .. } | Which::Else => None,
            Which::Unsaid => {
                let known = FAMILIES.iter().find(|(name, _)| *name == architecture);
                known.map(|(_, period)| of_period(*period))
            }
        }
    }
}

impl Facts {
    /// Notes a window of so many tokens; 0 = none.
    pub(super) fn set_window(&mut self, tokens: u32, which: Which) {
        let count = which.count(self.layers.into(), &self.architecture);
        (self.window, self.windowed_layers) = match count {
            _ if tokens == 0 => (0, 0),
            Some(0) => (0, 0),
            // No more than there are.
            Some(count) => (tokens, count as u32),
            None => (tokens, 0),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_layers_have_a_window_as_their_patterns_say() {
        let of = |architecture: &str, layers: u32, which| {
            let architecture = architecture.to_string();
            let mut facts = Facts { architecture, layers, ..Facts::default() };
            facts.set_window(512, which);
            (facts.window, facts.windowed_layers)
        };
        // Layer i has one where i % 6 < 5: of 26, all but 5, 11, 17 and 23.
        assert_eq!(of("gemma3", 26, Which::Unsaid), (512, 22));
        for (period, layers) in (1..9u32).flat_map(|p| (0..40u32).map(move |n| (p, n))) {
            let counted = (0..layers).filter(|i| i % period < period - 1).count() as u32;
            let expected = if counted == 0 { (0, 0) } else { (512, counted) };
            assert_eq!(of("x", layers, Which::AllBut(period.into())), expected);
        }
        assert_eq!(of("gpt-oss", 24, Which::Unsaid), (512, 12));
        assert_eq!(of("cohere2", 32, Which::Unsaid), (512, 24));
        assert_eq!(of("gemma2", 42, Which::Unsaid), (512, 21));
        assert_eq!(of("mistral", 32, Which::Unsaid), (512, 32));
        assert_eq!(of("qwen2", 28, Which::Behind(21)), (512, 7));
        assert_eq!(of("qwen2", 28, Which::Behind(28)), (0, 0));
        assert_eq!(of("x", 4, Which::Listed { windowed: 3, of: 4 }), (512, 3));
        // Not known: a window, and no layers that surely have it.
        assert_eq!(of("x", 4, Which::Listed { windowed: 3, of: 5 }), (512, 0));
        assert_eq!(of("gemma3", 26, Which::Else), (512, 0));
        assert_eq!(of("llama", 32, Which::Unsaid), (512, 0));
        assert_eq!(of("x", u32::MAX, Which::AllBut(0)), (512, u32::MAX));
        assert_eq!(of("x", u32::MAX, Which::AllBut(u64::MAX)), (512, u32::MAX));
    }
}
