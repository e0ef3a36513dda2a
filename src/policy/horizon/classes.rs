//! Classes of objects with different futures. Each class belongs to coarser ones, so that rare
//! classes borrow from common ones.

use crate::meta::sessions::Stop;

/// Earlier uses: 0, 1, 2, 3 to 5, 6 and more.
const USES: usize = 5;
/// The last wait: none yet, up to 10 s, 1 min, 5 min, 30 min, more. Or the wait that the engine
/// expects: up to 1 s, 10 s, 1 min, 5 min, 30 min, 4 h, more. Or done.
const WAITS: usize = 6 + 7 + 1;
const STOPS: usize = Stop::ALL.len();
const ENDS: usize = 2;
/// Tokens before the object: none to 4k, to 16k, to 64k, more.
const DEPTHS: usize = 4;
const DEPTH_TOKENS: [u32; DEPTHS - 1] = [4 << 10, 16 << 10, 64 << 10];

const SECOND_NS: i64 = 1_000_000_000;
const SEEN_NS: [i64; 4] = [10 * SECOND_NS, 60 * SECOND_NS, 300 * SECOND_NS, 1800 * SECOND_NS];
const EXPECTED_NS: [i64; 6] = [
    SECOND_NS,
    10 * SECOND_NS,
    60 * SECOND_NS,
    300 * SECOND_NS,
    1800 * SECOND_NS,
    14_400 * SECOND_NS,
];

/// Properties of an object that predict its future. 4 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Traits {
    /// Uses since the first insert, evictions included.
    uses: u8,
    /// Bucket of the last or expected wait.
    wait: u8,
    /// Stop reason of the last request that used the object.
    stop: u8,
    /// Bit 0: the unfilled end of a prompt; other bits: bucket of depth.
    place: u8,
}

// SAFETY: integers only.
unsafe impl crate::base::zeroed::Zeroable for Traits {}

impl Traits {
    /// Traits of a new object with so many tokens before it.
    pub fn new(is_end: bool, context: u32) -> Traits {
        let depth = DEPTH_TOKENS.partition_point(|&limit| limit <= context) as u8;
        Traits { place: u8::from(is_end) | depth << 1, ..Traits::default() }
    }

    /// The traits with a number of uses.
    pub fn with_uses(self, uses: u64) -> Traits {
        Traits { uses: uses.min(255) as u8, ..self }
    }

    /// Uses since the first insert.
    pub fn uses(self) -> u8 {
        self.uses
    }

    /// The traits after one more use, `gap_ns` after the last one.
    pub fn used(self, gap_ns: i64) -> Traits {
        let wait = 1 + SEEN_NS.partition_point(|&limit| limit < gap_ns) as u8;
        Traits { uses: self.uses.saturating_add(1), wait, stop: 0, ..self }
    }

    /// The traits after the request stopped.
    pub fn stopped(self, stop: Stop) -> Traits {
        Traits { stop: stop as u8, ..self }
    }

    /// The traits when the engine expects the next use in `in_ns`.
    pub fn expected(self, in_ns: i64) -> Traits {
        let wait = 6 + EXPECTED_NS.partition_point(|&limit| limit < in_ns) as u8;
        Traits { wait, ..self }
    }

    /// The traits when the engine says that there is no further use.
    pub fn done(self) -> Traits {
        Traits { wait: (WAITS - 1) as u8, ..self }
    }
}

/// Rows of the tables: all classes, and the coarser ones.
pub const ROWS: usize = 1 + COARSE + MIDDLE + FINE + CLASSES;
/// Number of classes.
pub const CLASSES: usize = FINE * WAITS;
/// Levels from a class up to the row of all objects.
pub const LEVELS: usize = 5;

const COARSE: usize = ENDS * USES;
const MIDDLE: usize = COARSE * STOPS;
const FINE: usize = MIDDLE * DEPTHS;

/// The class of an object.
#[inline]
pub fn class(traits: Traits) -> u16 {
    let uses = match traits.uses {
        n @ 0..=2 => usize::from(n),
        3..=5 => 3,
        _ => 4,
    };
    let coarse = usize::from(traits.place & 1) * USES + uses;
    let middle = coarse * STOPS + usize::from(traits.stop).min(STOPS - 1);
    let fine = middle * DEPTHS + usize::from(traits.place >> 1).min(DEPTHS - 1);
    (fine * WAITS + usize::from(traits.wait).min(WAITS - 1)) as u16
}

/// The rows in which a class counts, the coarsest first.
#[inline]
pub fn rows(class: u16) -> [usize; LEVELS] {
    let class = usize::from(class);
    let fine = class / WAITS;
    let middle = fine / DEPTHS;
    let (coarse, above) = (middle / STOPS, 1 + COARSE);
    [0, 1 + coarse, above + middle, above + MIDDLE + fine, above + MIDDLE + FINE + class]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_dense_and_rows_nest() {
        let mut seen = vec![false; CLASSES];
        for end in [false, true] {
            for uses in 0..8 {
                for stop in Stop::ALL {
                    let gaps = [0, SECOND_NS, 50 * SECOND_NS, 100 * SECOND_NS, 1 << 60];
                    let mut t = Traits { uses, ..Traits::new(end, u32::from(uses) << 13) };
                    seen[usize::from(class(t.stopped(stop)))] = true;
                    for gap in gaps {
                        t = Traits { uses: uses.wrapping_sub(1), ..t }.used(gap).stopped(stop);
                        seen[usize::from(class(t))] = true;
                        seen[usize::from(class(t.expected(gap)))] = true;
                    }
                    seen[usize::from(class(t.done()))] = true;
                }
            }
        }
        assert!(seen.iter().filter(|s| **s).count() > CLASSES / 8);
        for c in 0..CLASSES as u16 {
            let rows = rows(c);
            assert!(rows[LEVELS - 1] < ROWS && rows.is_sorted());
        }
    }
}
