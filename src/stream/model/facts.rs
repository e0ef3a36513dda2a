//! Properties of a model, and the rule that decides which layers have an attention window. Such
//! layers keep KV of the window alone.

/// Properties of a model; 0 or empty where the files do not state them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Its architecture: `llama`.
    pub architecture: String,
    /// Number of layers.
    pub layers: u32,
    /// Elements of a hidden state.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads of a layer; the maximum where layers differ. One, if keys are
    /// compressed to a latent vector.
    pub kv_heads: u32,
    /// Elements of a stored key.
    pub key_dim: u32,
    /// Elements of a value; 0 with `key_dim` > 0 if values are computed from the stored keys.
    pub value_dim: u32,
    /// Longest context, in tokens.
    pub context: u32,
    /// Size of the vocabulary.
    pub vocabulary: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a layer that a token uses.
    pub experts_used: u32,
    /// Window of some layers, in tokens; 0 = no layer has a window.
    pub window: u32,
    /// Number of layers with a window; 0 with a window = not known which.
    pub windowed_layers: u32,
}

/// Families in which one layer of a period has full attention, for files that do not state it; 0 =
/// no layer has.
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

/// The rule in the files for layers with a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WindowRule {
    /// Nothing: the family decides.
    #[default]
    Unsaid,
    /// The last layer of each period has none; 0 = all layers have one.
    AllBut(u64),
    /// Number of layers that have one, from a list for so many layers.
    Listed { windowed: u64, of: u64 },
    /// All layers from this one on.
    Behind(u64),
    /// An unknown rule.
    Unknown,
}

impl WindowRule {
    /// The number of layers with a window, if known.
    fn count(self, layers: u64, architecture: &str) -> Option<u64> {
        let of_period = |period: u64| match period {
            0 => layers,
            _ => layers - layers / period,
        };
        match self {
            WindowRule::AllBut(period) => Some(of_period(period)),
            WindowRule::Listed { windowed, of } if of == layers => Some(windowed.min(layers)),
            WindowRule::Behind(first) => Some(layers.saturating_sub(first)),
            WindowRule::Listed { .. } | WindowRule::Unknown => None,
            WindowRule::Unsaid => {
                let known = FAMILIES.iter().find(|(name, _)| *name == architecture);
                known.map(|(_, period)| of_period(*period))
            }
        }
    }
}

impl Facts {
    /// Sets the window, in tokens; 0 = none.
    pub(super) fn set_window(&mut self, tokens: u32, window_rule: WindowRule) {
        let count = window_rule.count(self.layers.into(), &self.architecture);
        (self.window, self.windowed_layers) = match count {
            _ if tokens == 0 => (0, 0),
            Some(0) => (0, 0),
            // At most the number of layers.
            Some(count) => (tokens, count as u32),
            None => (tokens, 0),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_rules_count_layers() {
        let of = |architecture: &str, layers: u32, window_rule| {
            let architecture = architecture.to_string();
            let mut facts = Facts { architecture, layers, ..Facts::default() };
            facts.set_window(512, window_rule);
            (facts.window, facts.windowed_layers)
        };
        // Layer i has one where i % 6 < 5: of 26, all but 5, 11, 17 and 23.
        assert_eq!(of("gemma3", 26, WindowRule::Unsaid), (512, 22));
        for (period, layers) in (1..9u32).flat_map(|p| (0..40u32).map(move |n| (p, n))) {
            let counted = (0..layers).filter(|i| i % period < period - 1).count() as u32;
            let expected = if counted == 0 { (0, 0) } else { (512, counted) };
            assert_eq!(of("x", layers, WindowRule::AllBut(period.into())), expected);
        }
        assert_eq!(of("gpt-oss", 24, WindowRule::Unsaid), (512, 12));
        assert_eq!(of("cohere2", 32, WindowRule::Unsaid), (512, 24));
        assert_eq!(of("gemma2", 42, WindowRule::Unsaid), (512, 21));
        assert_eq!(of("mistral", 32, WindowRule::Unsaid), (512, 32));
        assert_eq!(of("qwen2", 28, WindowRule::Behind(21)), (512, 7));
        assert_eq!(of("qwen2", 28, WindowRule::Behind(28)), (0, 0));
        assert_eq!(of("x", 4, WindowRule::Listed { windowed: 3, of: 4 }), (512, 3));
        // Not known: a window, and no layers that surely have it.
        assert_eq!(of("x", 4, WindowRule::Listed { windowed: 3, of: 5 }), (512, 0));
        assert_eq!(of("gemma3", 26, WindowRule::Unknown), (512, 0));
        assert_eq!(of("llama", 32, WindowRule::Unsaid), (512, 0));
        assert_eq!(of("x", u32::MAX, WindowRule::AllBut(0)), (512, u32::MAX));
        assert_eq!(of("x", u32::MAX, WindowRule::AllBut(u64::MAX)), (512, u32::MAX));
    }
}
