//! Reads a source of the C boundary: the opening text of its header, the headings, the order of
//! declarations, and the type of each constant.

use std::collections::BTreeMap;
use std::path::Path;

use super::FOREIGN;

pub struct Source {
    /// The comment of the module.
    pub opening: Vec<String>,
    /// Headings; the first one is empty.
    pub headings: Vec<String>,
    /// Names of the declarations, each with the index of its heading.
    pub order: Vec<(usize, String)>,
    /// Types of the constants that have one of their own.
    pub families: BTreeMap<String, String>,
}

impl Source {
    pub fn read(path: &Path, header: &str) -> Self {
        let text = std::fs::read_to_string(path).expect("source");
        let mut source = Source {
            opening: Vec::new(),
            headings: vec![String::new()],
            order: Vec::new(),
            families: BTreeMap::new(),
        };
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            if let Some(comment) = line.strip_prefix("//!") {
                source.opening.push(comment.strip_prefix(' ').unwrap_or(comment).to_string());
            }
            let is_alone = |at: usize| lines.get(at).is_none_or(|line| line.is_empty());
            if let Some(heading) = line.strip_prefix("// ")
                && is_alone(at + 1)
                && at.checked_sub(1).is_some_and(is_alone)
            {
                source.headings.push(heading.to_string());
            }
            if line.starts_with("pub use ") {
                let here = FOREIGN.iter().filter(|one| one.0 == header);
                let used: String =
                    lines[at..].iter().take_while(|l| !l.is_empty()).copied().collect();
                let here = here.filter(|one| used.contains(&format!("as {}", one.3)));
                for name in here.map(|one| one.3.to_string()).collect::<Vec<_>>() {
                    source.order.push((source.headings.len() - 1, name));
                }
            }
            if let Some((name, ty)) = declared(line) {
                if let Some(ty) = ty {
                    source.families.insert(name.clone(), ty);
                }
                source.order.push((source.headings.len() - 1, name));
            }
        }
        source
    }
}

/// The name that a line declares for C, and the type of a constant of a family.
fn declared(line: &str) -> Option<(String, Option<String>)> {
    let name = |rest: &str| {
        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_string()
    };
    if let Some(rest) = line.strip_prefix("pub const KVT_") {
        let (_, ty) = rest.split_once(": ")?;
        let ty = name(ty);
        return Some((format!("KVT_{}", name(rest)), ty.starts_with("kvt_").then_some(ty)));
    }
    let starts = [
        "pub type kvt_",
        "pub struct kvt_",
        "pub unsafe extern \"C\" fn kvt_",
        "pub extern \"C\" fn kvt_",
    ];
    let rest = starts.iter().find_map(|start| line.strip_prefix(start))?;
    Some((format!("kvt_{}", name(rest)), None))
}
