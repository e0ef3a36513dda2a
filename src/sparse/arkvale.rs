//! `arkvale`: selects pages by boxes that are shrunk to the mean distance of keys (Chen et al.,
//! NeurIPS'24). All heads share one list of pages. Pages that were left out can be selected again.
//!
//! The centre of a box lies midway between the least and the greatest value of each dimension. The
//! box reaches as far as the mean distance of keys from the centre. A page's score is that of
//! `quest`, averaged over query heads. The score is no upper bound; in exchange one outlier key
//! weighs less than a page of close ones.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::eviction::{conflict, count};
use crate::sparse::pages::Bound;
use crate::sparse::quest::{PageSharing, Quest, Rule};

/// Parameters of `arkvale`.
pub const PARAMS: &[Param] = &[
    Param::new("budget", "tokens that are seen, in whole pages, `sinks` and `window` included"),
    Param::new("page", "tokens of a page; blocks are whole pages"),
    Param::new("sinks", "first pages that are always seen"),
    Param::new("window", "last pages that are always seen"),
    Param::new("dense", "number of first layers that see all pages"),
];

/// Reads the parameters of `arkvale`.
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
