//! What cells hold in a simulation: bytes that follow from all tokens before and in
//! a chunk, so that any mistake about which KV is whose shows.

use crate::io::simulated::random::Random;
use crate::meta::layout::{Group, Rule};

/// A mark of every prefix of a sequence, by its length less one.
pub fn prefixes(space: u32, tokens: &[u32]) -> Vec<u64> {
    let mut mark = u64::from(space) + 1;
    let next = |&token: &u32| {
        mark = Random::new(mark ^ u64::from(token) << 32).draw();
        mark
    };
    tokens.iter().map(next).collect()
}

/// The planes of one layer for some tokens: K (or states), and V.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planes {
    /// K, or the states.
    pub k: Vec<u8>,
    /// V.
    pub v: Vec<u8>,
}

impl Planes {
    /// Bytes of the first `tokens` tokens, K and V.
    pub fn lengths(group: &Group, tokens: usize, each: usize) -> (usize, usize) {
        match group.rule {
            Rule::State => (group.state_bytes as usize * tokens.div_ceil(each), 0),
            _ => (group.k_bytes as usize * tokens, group.v_bytes as usize * tokens),
        }
    }

    /// What a layer has of the tokens whose marks these are.
    pub fn of(group: &Group, layer: usize, marks: &[u64], each: usize) -> Planes {
        let fill = |out: &mut Vec<u8>, mark: u64, plane: u64, bytes: u64| {
            let mut random = Random::new(mark ^ (layer as u64) << 8 ^ plane);
            let end = out.len() + bytes as usize;
            while out.len() < end {
                let word = random.draw().to_le_bytes();
                out.extend_from_slice(&word[..(end - out.len()).min(8)]);
            }
        };
        let mut planes = Planes::default();
        if group.rule == Rule::State {
            for marks in marks.chunks(each) {
                fill(&mut planes.k, marks[marks.len() - 1], 3, group.state_bytes);
            }
            return planes;
        }
        for &mark in marks {
            fill(&mut planes.k, mark, 1, group.k_bytes);
            fill(&mut planes.v, mark, 2, group.v_bytes);
        }
        planes
    }
}
