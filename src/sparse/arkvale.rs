//! `arkvale`: pages by boxes that are shrunk to what keys are like in the mean, one list for
//! all heads, and what was left out can come back (Chen et al., NeurIPS'24).
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `budget` | 4096 | tokens that are seen, in whole pages, those below included |
//! | `page` | 32 | tokens of a page; blocks are whole pages |
//! | `sinks`, `window` | 2, 2 | first and last pages that always are seen |
//! | `dense` | 2 | so many first layers see all |
//!
//! A box has its centre in the middle of the least and the greatest of each number, and
//! reaches as far as keys are from there in the mean. A page's score is that of `quest`,
//! averaged over query heads. It is no bound: in exchange one far key does not count as much
//! as a page of near ones.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::eviction::{conflict, count};
use crate::sparse::pages::Bound;
use crate::sparse::quest::{PageSharing, Quest, Rule};

/// Reads `arkvale` with its parameters.
pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Quest> {
    let page = reader.u64("page", 32, 1..=1 << 20)? as u32;
    let rule = Rule {
        page,
        count: count(reader, "budget", 4096, 1)? / page,
        threshold: 0,
        sinks: reader.u64("sinks", 2, 0..=1 << 20)? as u32,
        window: reader.u64("window", 2, 0..=1 << 20)? as u32,
        dense: reader.u64("dense", 2, 0..=2048)? as u32,
        bound: Bound::Centre,
        share: PageSharing::Bound,
    };
    if rule.count <= rule.sinks + rule.window {
        return Err(conflict(format!(
            "budget is {} pages, it must exceed sinks + window ({} pages)",
            rule.count,
            rule.sinks + rule.window
        )));
    }
    Quest::new(rule, shape)
}
