//! Every sparse policy by name. A new policy is a file and a line here.

use crate::base::spec::{Reader, Spec};
use crate::base::status::{Error, Result, Status};
use crate::sparse::dsa::Dsa;
use crate::sparse::flexprefill::FlexPrefill;
use crate::sparse::full::Full;
use crate::sparse::minference::MInference;
use crate::sparse::streaming::Streaming;
use crate::sparse::xattention::XAttention;
use crate::sparse::{Shape, Sparse};
use crate::sparse::{adakv, arkvale, pyramidkv};
use crate::sparse::{duo::Duo, external::External, h2o::H2o, infinigen::Predict};
use crate::sparse::{keydiff::Keydiff, knorm::Knorm, quest::Quest, snapkv::Snapkv, tova::Tova};

type Constructor = fn(&mut Reader, &Shape) -> Result<Box<dyn Sparse>>;

/// A policy in the registry.
pub struct Entry {
    /// Name in specs.
    pub name: &'static str,
    /// Other names of it.
    pub aliases: &'static [&'static str],
    /// Description in one line.
    pub about: &'static str,
    make: Constructor,
}

fn boxed<S: Sparse + 'static>(made: Result<S>) -> Result<Box<dyn Sparse>> {
    made.map(|policy| Box::new(policy) as Box<dyn Sparse>)
}

const fn entry(
    name: &'static str,
    aliases: &'static [&'static str],
    about: &'static str,
    make: Constructor,
) -> Entry {
    Entry { name, aliases, about, make }
}

/// All policies, sorted by name, one a line.
#[rustfmt::skip]
pub const ENTRIES: &[Entry] = &[
    entry("adakv", &[], "keeps tokens with most attention of the last queries; heads share a budget", |r, s| boxed(adakv::read(r, s))),
    entry("arkvale", &[], "selects pages by boxes shrunk to the mean, one list for all heads", |r, s| boxed(arkvale::read(r, s))),
    entry("dsa", &[], "selects the tokens that an indexer finds for each query", |r, s| boxed(Dsa::read(r, s))),
    entry("duo", &["duoattention"], "some heads keep all tokens, the others the first and last", |r, s| boxed(Duo::read(r, s))),
    entry("external", &[], "the engine scores blocks, the best are loaded", |r, s| boxed(External::read(r, s))),
    entry("flexprefill", &[], "columns and diagonals, or blocks, as many as each head needs", |r, s| boxed(FlexPrefill::read(r, s))),
    entry("full", &[], "loads and computes with everything", |_, s| boxed(Full::new(s))),
    entry("h2o", &[], "keeps the tokens with the most attention so far", |r, s| boxed(H2o::read(r, s))),
    entry("keydiff", &[], "evicts tokens whose keys are most similar to the others", |r, s| boxed(Keydiff::read(r, s))),
    entry("knorm", &[], "evicts tokens with the longest keys", |r, s| boxed(Knorm::read(r, s))),
    entry("minference", &[], "computes with columns and diagonals that the last queries attend to", |r, s| boxed(MInference::read(r, s))),
    entry("predict", &["infinigen"], "selects blocks by the query of an earlier layer", |r, s| boxed(Predict::read(r, s))),
    entry("pyramidkv", &[], "keeps tokens with most attention of the last queries, fewer in deep layers", |r, s| boxed(pyramidkv::read(r, s))),
    entry("quest", &[], "selects pages whose keys could matter most to the query", |r, s| boxed(Quest::read(r, s))),
    entry("snapkv", &[], "keeps tokens with most attention of the last queries of a prompt", |r, s| boxed(Snapkv::read(r, s))),
    entry("streaming", &["streaming_llm"], "keeps and computes with the first and the last tokens", |r, s| boxed(Streaming::read(r, s))),
    entry("tova", &[], "evicts the token with the least attention of the newest query", |r, s| boxed(Tova::read(r, s))),
    entry("xattention", &[], "computes with blocks that reach a share of attention, by antidiagonals", |r, s| boxed(XAttention::read(r, s))),
];

/// The entry of a name or alias.
pub fn find(name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|e| e.name == name || e.aliases.contains(&name))
}

/// Makes the policy that a spec describes, for a sequence of a model.
pub fn make(spec: &Spec, shape: &Shape) -> Result<Box<dyn Sparse>> {
    shape.check()?;
    let Some(entry) = find(&spec.name) else {
        let known: Vec<&str> = ENTRIES.iter().map(|e| e.name).collect();
        return Err(spec.unknown_name(&known));
    };
    let mut reader = Reader::new(spec);
    let policy = (entry.make)(&mut reader, shape).map_err(|e| with_offset(e, spec))?;
    reader.finish()?;
    Ok(policy)
}

/// Adds name and offset of the spec to an error about the spec as a whole.
fn with_offset(error: Error, spec: &Spec) -> Error {
    let has_offset = error.detail().is_some_and(|detail| detail.offset.is_some());
    if has_offset || error.status() != Status::Spec {
        return error;
    }
    let text = format!("{}, in '{}' at offset {}", error.message(), spec.name, spec.offset);
    Error::at(Status::Spec, spec.offset, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_in_order() {
        let mut names: Vec<&str> =
            ENTRIES.iter().flat_map(|e| e.aliases.iter().copied().chain([e.name])).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(ENTRIES.is_sorted_by_key(|e| e.name));
    }
}
