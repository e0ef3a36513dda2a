//! The KV of a small model: its layout, and deterministic contents.

use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};

use super::Outcome;

const LAYERS: u16 = 16;
const HEADS: u32 = 4;
const HEAD_DIM: u32 = 64;
const CHUNK_TOKENS: u32 = 64;
/// Turns of a conversation.
pub const TURNS: u64 = 8;
/// Tokens of the common prefix of all conversations.
pub const SYSTEM_TOKENS: u64 = 512;
/// Tokens of a turn: a question and its answer.
pub const TURN_TOKENS: u64 = 192;
/// Assumed prefill speed of a small model on one accelerator, for the cost of recomputing.
pub const TOKENS_PER_SECOND: f64 = 10_000.0;

/// The model.
pub struct Model {
    /// The layout of its KV.
    pub layout: Layout,
}

impl Model {
    /// 16 layers of 4 KV heads of 64 values in 16 bits, chunks of 64 tokens.
    pub fn small() -> Outcome<Model> {
        let group = Group::gqa(0..LAYERS, HEADS, HEAD_DIM, Dtype::F16)?;
        Ok(Model { layout: Layout::new(CHUNK_TOKENS, vec![group])? })
    }

    /// Bytes of K, or of V, for a token in one layer.
    pub fn token_bytes(&self) -> u64 {
        u64::from(HEADS * HEAD_DIM) * 2
    }

    /// Bytes of KV for a token in all layers.
    pub fn all_token_bytes(&self) -> u64 {
        self.token_bytes() * 2 * u64::from(LAYERS)
    }

    /// Bytes of KV of a whole conversation.
    pub fn session_bytes(&self) -> u64 {
        (SYSTEM_TOKENS + TURNS * TURN_TOKENS) * self.all_token_bytes()
    }

    /// Fills K (plane 0) or V (plane 1) of a layer for the token that ends a prefix. The bytes
    /// depend on the whole prefix, as in a real model.
    pub fn fill(&self, mark: u64, layer: usize, plane: u64, out: &mut [u8]) {
        let mut word = mark ^ ((layer as u64) << 48) ^ (plane << 40);
        for eight in out.chunks_mut(8) {
            word = word.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) ^ 0x5851_F42D;
            eight.copy_from_slice(&word.to_le_bytes()[..eight.len()]);
        }
    }
}
