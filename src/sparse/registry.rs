//! Every sparse policy by name. A new policy is a file and a line here.

use crate::base::spec::describe::{self, Description, Param};
use crate::base::spec::{Reader, Spec};
use crate::base::status::{Error, Result, Status};
use crate::sparse::dsa::Dsa;
use crate::sparse::flexprefill::FlexPrefill;
use crate::sparse::full::Full;
use crate::sparse::minference::MInference;
use crate::sparse::streaming::Streaming;
use crate::sparse::xattention::XAttention;
use crate::sparse::{Kind, Shape, Sparse};
use crate::sparse::{adakv, arkvale, pyramidkv};
use crate::sparse::{dsa, duo, external, flexprefill, h2o, infinigen, keydiff, knorm, minference};
use crate::sparse::{duo::Duo, external::External, h2o::H2o, infinigen::Predict};
use crate::sparse::{keydiff::Keydiff, knorm::Knorm, quest::Quest, snapkv::Snapkv, tova::Tova};
use crate::sparse::{quest, snapkv, streaming, tova, xattention};

type Constructor = fn(&mut Reader, &Shape) -> Result<Box<dyn Sparse>>;

/// A policy in the registry.
pub struct Entry {
    /// Name in specs.
    pub name: &'static str,
    /// Other names of it.
    pub aliases: &'static [&'static str],
    /// Description in one line.
    pub about: &'static str,
    /// Tables of its parameters.
    pub params: &'static [&'static [Param]],
    make: Constructor,
}

fn boxed<S: Sparse + 'static>(made: Result<S>) -> Result<Box<dyn Sparse>> {
    made.map(|policy| Box::new(policy) as Box<dyn Sparse>)
}

const fn entry(
    name: &'static str,
    aliases: &'static [&'static str],
    about: &'static str,
    params: &'static [&'static [Param]],
    make: Constructor,
) -> Entry {
    Entry { name, aliases, about, params, make }
}

/// All policies, sorted by name, one a line.
#[rustfmt::skip]
pub const ENTRIES: &[Entry] = &[
    entry("adakv", &[], "keeps tokens with most attention of the last queries; heads share a budget", &[snapkv::PARAMS, adakv::PARAMS], |r, s| boxed(adakv::read(r, s))),
    entry("arkvale", &[], "selects pages by boxes shrunk to the mean, one list for all heads", &[arkvale::PARAMS], |r, s| boxed(arkvale::read(r, s))),
    entry("dsa", &[], "selects the tokens that an indexer finds for each query", &[dsa::PARAMS], |r, s| boxed(Dsa::read(r, s))),
    entry("duo", &["duoattention"], "some heads keep all tokens, the others the first and last", &[duo::PARAMS], |r, s| boxed(Duo::read(r, s))),
    entry("external", &[], "the engine scores blocks, the best are loaded", &[external::PARAMS], |r, s| boxed(External::read(r, s))),
    entry("flexprefill", &[], "columns and diagonals, or blocks, as many as each head needs", &[flexprefill::PARAMS], |r, s| boxed(FlexPrefill::read(r, s))),
    entry("full", &[], "loads and computes with everything", &[], |_, s| boxed(Full::new(s))),
    entry("h2o", &[], "keeps the tokens with the most attention so far", &[h2o::PARAMS], |r, s| boxed(H2o::read(r, s))),
    entry("keydiff", &[], "evicts tokens whose keys are most similar to the others", &[keydiff::PARAMS], |r, s| boxed(Keydiff::read(r, s))),
    entry("knorm", &[], "evicts tokens with the longest keys", &[knorm::PARAMS], |r, s| boxed(Knorm::read(r, s))),
    entry("minference", &[], "computes with columns and diagonals that the last queries attend to", &[minference::PARAMS], |r, s| boxed(MInference::read(r, s))),
    entry("predict", &["infinigen"], "selects blocks by the query of an earlier layer", &[infinigen::PARAMS], |r, s| boxed(Predict::read(r, s))),
    entry("pyramidkv", &[], "keeps tokens with most attention of the last queries, fewer in deep layers", &[snapkv::PARAMS, pyramidkv::PARAMS], |r, s| boxed(pyramidkv::read(r, s))),
    entry("quest", &[], "selects pages whose keys could matter most to the query", &[quest::PARAMS], |r, s| boxed(Quest::read(r, s))),
    entry("snapkv", &[], "keeps tokens with most attention of the last queries of a prompt", &[snapkv::PARAMS], |r, s| boxed(Snapkv::read(r, s))),
    entry("streaming", &["streaming_llm"], "keeps and computes with the first and the last tokens", &[streaming::PARAMS], |r, s| boxed(Streaming::read(r, s))),
    entry("tova", &[], "evicts the token with the least attention of the newest query", &[tova::PARAMS], |r, s| boxed(Tova::read(r, s))),
    entry("xattention", &[], "computes with blocks that reach a share of attention, by antidiagonals", &[xattention::PARAMS], |r, s| boxed(XAttention::read(r, s))),
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

/// Specs that read every parameter, where the name alone does not.
const COMPLETE: [(&str, &str); 2] =
    [("duo", "duo(alpha=\"0 0 0 0\")"), ("quest", "quest(compat=fork)")];

/// All policies with their parameters, for the manual.
pub fn describe() -> Result<Vec<Description>> {
    let split = Shape {
        layers: 2,
        query_heads: 4,
        key_heads: 2,
        key_dim: 128,
        value_dim: 128,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens: 128,
        max_tokens: 1 << 16,
    };
    // What varies with the model needs words.
    let other = Shape { max_tokens: 1 << 15, key_dim: 64, value_dim: 64, ..split };
    let mut out = Vec::new();
    for entry in ENTRIES {
        let complete = COMPLETE.iter().find(|(name, _)| *name == entry.name);
        let mut recordings = Vec::new();
        // Defaults are those of the name alone, if it is complete.
        for text in
            [Some(entry.name).filter(|name| *name != "duo"), complete.map(|(_, text)| *text)]
        {
            let Some(text) = text else { continue };
            let spec = Spec::parse(text)?;
            for shape in [&split, &other] {
                let mut reader = Reader::recording(&spec);
                (entry.make)(&mut reader, shape)?;
                recordings.push(reader.recorded());
            }
        }
        let rows = describe::rows(entry.name, entry.params, &recordings)?;
        let Entry { name, aliases, about, .. } = *entry;
        out.push(Description { name, aliases, about, rows });
    }
    Ok(out)
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
    fn every_parameter_is_described() {
        let all = describe().expect("complete tables");
        assert_eq!(all.len(), ENTRIES.len());
        assert!(all.iter().any(|one| one.rows.iter().any(|row| row.key == "alpha")));
    }

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
