//! The index of a model in several safetensors files.

use crate::base::json::Json;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::open::Part;
use crate::stream::model::safetensors::corrupt;
use crate::stream::model::{MAX_FILES, MAX_TENSORS};

/// End of the name of an index file.
pub const SUFFIX: &str = ".safetensors.index.json";
/// Longest accepted index: 256 MiB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The file of each tensor: tensor name and file number.
pub type Map = Vec<(String, u32)>;

/// Reads an open index: sorted names of files, and the file of each tensor.
pub fn read(file: &Header) -> Result<(Vec<String>, Map)> {
    if file.bytes() > MAX_INDEX_BYTES {
        fail!(Limit, "{} bytes: more than {MAX_INDEX_BYTES}", file.bytes());
    }
    parse(&file.read(0, file.bytes())?)
}

/// Parses the text of an index.
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
    let Some(mut map) = map else { fail!(Corrupt, "\"weight_map\" is missing") };
    // Files are numbered in the order of their names.
    let mut order: Vec<u32> = (0..names.len() as u32).collect();
    order.sort_unstable_by_key(|&number| names.get(number as usize));
    let mut sorted_numbers = vec![0; order.len()];
    for (place, &number) in order.iter().enumerate() {
        sorted_numbers[number as usize] = place as u32;
    }
    for (_, file) in &mut map {
        *file = sorted_numbers[*file as usize];
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
    // Consecutive tensors are mostly in the same file.
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

/// Checks that tensors are in the files that the index names. Tensors that the index does not name
/// are dropped: they are no part of the model.
pub fn choose(map: &Map, names: &[String], parts: &mut [Part]) -> Result<()> {
    let mut tensors = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        tensors.try_reserve(part.tensors.len()).map_err(|_| Status::NoMem)?;
        tensors.extend(part.tensors.iter().map(|t| (t.name.as_str(), number as u32)));
    }
    tensors.sort_unstable();
    for (tensor, file) in map {
        if tensors.binary_search(&(tensor.as_str(), *file)).is_err() {
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
        log::warn!("{left_out} tensors of the files are not in the index and are ignored");
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
    fn paths_outside_the_directory_are_rejected() {
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
