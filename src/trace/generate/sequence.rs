//! A growing context.

/// Full blocks, and a partial one.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    block_tokens: u64,
    tokens: u64,
    full: Vec<u64>,
    /// The partial block; its id changes with its content.
    part: Option<u64>,
}

impl Sequence {
    pub(super) fn new(block_tokens: u32) -> Sequence {
        Sequence { block_tokens: block_tokens.into(), tokens: 0, full: Vec::new(), part: None }
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Appends tokens of this sequence alone.
    pub(super) fn grow(&mut self, tokens: u64, next_id: &mut u64) {
        if tokens == 0 {
            return;
        }
        let mut id = || {
            *next_id += 1;
            *next_id - 1
        };
        self.tokens += tokens;
        while (self.full.len() as u64 + 1) * self.block_tokens <= self.tokens {
            self.full.push(id());
        }
        self.part = (self.tokens % self.block_tokens != 0).then(id);
    }

    pub(super) fn path(&self) -> Vec<u64> {
        self.full.iter().copied().chain(self.part).collect()
    }
}
