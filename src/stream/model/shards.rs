//! The index of a model whose tensors are in several safetensors files.

use crate::base::json::Json;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::open::Part;
use crate::stream::model::safetensors::corrupt;
use crate::stream::model::{MAX_FILES, MAX_TENSORS};

/// How the names of such files end.
pub const SUFFIX: &str = ".safetensors.index.json";
/// Longest index.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Which file each tensor is in: names and numbers of files.
pub type Map = Vec<(String, u32)>;

/// Reads an open index: the names of files, sorted, and what is in which.
pub fn read(file: &Header) -> Result<(Vec<String>, Map)> {
    if file.bytes() > MAX_INDEX_BYTES {
        fail!(Limit, "{} bytes: more than {MAX_INDEX_BYTES}", file.bytes());
    }
    parse(&file.read(0, file.bytes())?)
}

/// Reads the text of an index.
pub fn parse(text: &[u8]) -> Result<(Vec<String>, Map)> {
    let (mut names, mut map) = (Vec::new(), None);
    let mut json = Json::new(text);
    let read = json.object(|json, key| match key {
        "weight_map" if map.is_some() => fail!(Corrupt, "\"weight_map\" twice"),
        "weight_map" => {
            map = Some(weight_map(json, &mut names)?);
            Ok(())
        }
        _ => json.skip(),
    });
    read.and_then(|()| json.end()).map_err(corrupt)?;
    let Some(mut map) = map else { fail!(Corrupt, "no \"weight_map\" is in it") };
    // Numbers of files in the order of their names, whichever tensor named them first.
    let mut order: Vec<u32> = (0..names.len() as u32).collect();
    order.sort_unstable_by_key(|&number| names.get(number as usize));
    let mut places = vec![0; order.len()];
    for (place, &number) in order.iter().enumerate() {
        places[number as usize] = place as u32;
    }
    for (_, file) in &mut map {
        *file = places[*file as usize];
    }
    names.sort_unstable();
    map.sort_unstable();
    if let Some(pair) = map.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        fail!(Corrupt, "tensor {:?} is named twice", pair[0].0);
    }
    Ok((names, map))
}

fn weight_map(json: &mut Json<'_>, names: &mut Vec<String>) -> Result<Map> {
    let mut map = Vec::new();
    // Tensors of a file follow each other, mostly.
    let mut last = 0;
    json.object(|json, tensor| {
        let name = json.string()?;
        if !is_plain(&name) {
            fail!(
                Corrupt,
                "tensor {tensor:?} is said to be in {name:?}: only names of files beside the \
                 index are followed"
            );
        }
        if map.len() == MAX_TENSORS {
            fail!(Limit, "more than {MAX_TENSORS} tensors");
        }
        if names.get(last).is_none_or(|known: &String| *known != *name) {
            last = match names.iter().position(|known| *known == *name) {
                Some(place) => place,
                None if names.len() == MAX_FILES => fail!(Limit, "more than {MAX_FILES} files"),
                None => {
                    names.push(name.into_owned());
                    names.len() - 1
                }
            };
        }
        map.try_reserve(1).map_err(|_| Status::NoMem)?;
        map.push((tensor.to_string(), last as u32));
        Ok(())
    })?;
    Ok(map)
}

/// Whether a name is that of a file in the same directory.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0', '\\'])
}

/// Checks that tensors are where the index says. What it does not name is no part of the
/// model: files may hold what nobody uses.
pub fn choose(map: &Map, names: &[String], parts: &mut [Part]) -> Result<()> {
    let mut there = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        there.try_reserve(part.tensors.len()).map_err(|_| Status::NoMem)?;
        there.extend(part.tensors.iter().map(|t| (t.name.as_str(), number as u32)));
    }
    there.sort_unstable();
    for (tensor, file) in map {
        if there.binary_search(&(tensor.as_str(), *file)).is_err() {
            let name = names.get(*file as usize).map_or("", String::as_str);
            fail!(Corrupt, "tensor {tensor:?} is not in {name:?}, where it should be");
        }
    }
    let mut left_out = 0;
    for (number, part) in parts.iter_mut().enumerate() {
        let before = part.tensors.len();
        part.tensors.retain(|tensor| {
            let named = |(known, file): &(String, u32)| {
                (known.as_str(), *file).cmp(&(tensor.name.as_str(), number as u32))
            };
            map.binary_search_by(named).is_ok()
        });
        left_out += before - part.tensors.len();
    }
    if left_out > 0 {
        log::warn!("{left_out} tensors of the files are not in the index and are left out");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_numbered_by_name() {
        let text = br#"{"metadata":{"total_size":1},"weight_map":
            {"b":"2.safetensors","a":"1.safetensors","c":"2.safetensors"}}"#;
        let (names, map) = parse(text).expect("sound");
        assert_eq!(names, ["1.safetensors", "2.safetensors"]);
        assert_eq!(map, [("a".into(), 0), ("b".into(), 1), ("c".into(), 1)]);
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\\\b", "x\\u0000"] {
            let text = format!("{{\"weight_map\":{{\"t\":\"{name}\"}}}}");
            let error = parse(text.as_bytes()).expect_err(name);
            assert_eq!(error.status(), Status::Corrupt, "{name}");
            assert!(error.message().contains("\"t\""), "{error}");
        }
        for text in ["{}", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}", "{\"weight_map\":{"]
        {
            assert_eq!(parse(text.as_bytes()).map_err(|e| e.status()), Err(Status::Corrupt));
        }
        let twice = br#"{"weight_map":{"a":"x","a":"y"}}"#;
        assert!(parse(twice).expect_err("twice").message().contains("twice"));
    }
}
