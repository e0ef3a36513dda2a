//! Every sparse policy by name. A new one is a file and a line here.

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

/// One policy.
pub struct Entry {
    /// Its name in specs.
    pub name: &'static str,
    /// Other names that mean the same.
    pub aliases: &'static [&'static str],
    /// What it does, in a line.
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

/// All of them, by name, one a line.
#[rustfmt::skip]
pub const ENTRIES: &[Entry] = &[
    entry("adakv", &[], "what the last queries look at stays; heads share their budget", |r, s| boxed(adakv::read(r, s))),
    entry("arkvale", &[], "pages by boxes shrunk to the mean, one list for all heads", |r, s| boxed(arkvale::read(r, s))),
    entry("dsa", &[], "the tokens that an indexer beside the attention finds for each query", |r, s| boxed(Dsa::read(r, s))),
    entry("duo", &["duoattention"], "heads that need it keep all, the others the first and last tokens", |r, s| boxed(Duo::read(r, s))),
    entry("external", &[], "the engine scores blocks, the best are loaded", |r, s| boxed(External::read(r, s))),
    entry("flexprefill", &[], "columns and diagonals, or blocks, as many as each head needs", |r, s| boxed(FlexPrefill::read(r, s))),
    entry("full", &[], "everything is loaded and computed with", |_, s| boxed(Full::new(s))),
    entry("h2o", &[], "tokens that got the most attention so far stay", |r, s| boxed(H2o::read(r, s))),
    entry("keydiff", &[], "tokens whose keys are most like the others go", |r, s| boxed(Keydiff::read(r, s))),
    entry("knorm", &[], "tokens with the longest keys go", |r, s| boxed(Knorm::read(r, s))),
    entry("minference", &[], "columns and diagonals that the last queries of a prompt look at", |r, s| boxed(MInference::read(r, s))),
    entry("predict", &["infinigen"], "blocks are chosen by the query of an earlier layer", |r, s| boxed(Predict::read(r, s))),
    entry("pyramidkv", &[], "what the last queries look at stays, less of it in deep layers", |r, s| boxed(pyramidkv::read(r, s))),
    entry("quest", &[], "pages whose keys could matter most to the query", |r, s| boxed(Quest::read(r, s))),
    entry("snapkv", &[], "what the last queries of the prompt look at stays", |r, s| boxed(Snapkv::read(r, s))),
    entry("streaming", &["streaming_llm"], "the first tokens and the last", |r, s| boxed(Streaming::read(r, s))),
    entry("tova", &[], "the token that the newest query looks at least goes", |r, s| boxed(Tova::read(r, s))),
    entry("xattention", &[], "blocks that reach a share of the attention, by antidiagonals", |r, s| boxed(XAttention::read(r, s))),
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

/// An error about the whole of a spec says where that stands.
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
