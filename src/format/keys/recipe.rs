//! The part of a namespace's recipe that the library reads: its codec. The rest belongs to the
//! engine.

use crate::base::spec::{Spec, Value, unknown};
use crate::base::status::{Error, Result, Status};
use crate::format::codec::Codec;

/// The codec of cells in slow tiers that a recipe names: the parameter `codec` of its spec, as in
/// `recipe(codec=int8)`. None if the parameter is missing, or the recipe is not a spec: engines may
/// write anything. Text that begins as a spec must be one.
pub fn codec_of(recipe: &[u8]) -> Result<Option<Codec>> {
    let spec = match std::str::from_utf8(recipe).map(|text| (text, Spec::parse(text))) {
        Ok((_, Ok(spec))) => Some(spec),
        Ok((text, Err(error))) if begins_as_spec(text) => return Err(error),
        _ => None,
    };
    let arg = spec.iter().flat_map(|spec| &spec.args).find(|arg| arg.key == "codec");
    let Some(arg) = arg else { return Ok(None) };
    let names = Codec::ALL.map(Codec::name);
    let (name, offset) = match &arg.value {
        Value::Spec(spec) if spec.args.is_empty() => (&spec.name, spec.offset),
        Value::Text(text) => (text, arg.offset),
        _ => {
            let text = format!("'codec' at offset {} is one of {}", arg.offset, names.join(", "));
            return Err(Error::at(Status::Spec, arg.offset, text));
        }
    };
    match Codec::ALL.into_iter().find(|codec| codec.name() == name) {
        Some(codec) => Ok(Some(codec)),
        None => Err(unknown("codec", name, offset, &names)),
    }
}

/// Whether the text begins with a name and an opening bracket.
fn begins_as_spec(text: &str) -> bool {
    let rest = text
        .trim_start()
        .trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    rest.len() < text.trim_start().len() && rest.trim_start().starts_with('(')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codec_is_found_and_all_else_is_ignored() {
        for (recipe, codec) in [
            ("recipe(codec=int8)", Some(Codec::Int8)),
            ("recipe(prefill=minference(budget=4096),codec=lz4)", Some(Codec::Lz4)),
            ("recipe( codec = none )", Some(Codec::None)),
            ("recipe(codec=\"int8\")", Some(Codec::Int8)),
            ("", None),
            ("exact", None),
            ("recipe(prefill=xattention(codec=mp3))", None),
            ("recipe(codecs=mp3)", None),
            ("codec=mp3", None),
            ("{\"codec\": \"mp3\"}", None),
        ] {
            assert_eq!(codec_of(recipe.as_bytes()).unwrap(), codec, "{recipe}");
        }
        assert_eq!(codec_of(&[0xFF, 0, 0x80]).unwrap(), None);
    }

    #[test]
    fn an_unknown_codec_names_the_nearest() {
        for (recipe, word) in [
            ("recipe(codec=int7)", "int8"),
            ("recipe(codec=lz)", "lz4"),
            ("recipe(codec=zstd)", "accepted are 'none', 'lz4', 'int8'"),
            ("kv(codec=int8", "')'"),
            (" kv (codec=int8))", "offset"),
            ("recipe(codec=INT8)", "int8"),
            ("recipe(codec=8)", "none, lz4, int8"),
            ("recipe(codec=int8(bits=4))", "none, lz4, int8"),
        ] {
            let error = codec_of(recipe.as_bytes()).unwrap_err();
            assert_eq!(error.status(), Status::Spec);
            assert!(error.message().contains(word), "{recipe}: {error}");
        }
    }
}
