//! The text of a header.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use super::items::{Field, Item, Kind, Signature, Type};
use super::{Header, closure};

const WIDTH: usize = 100;

/// The headers' texts, by file name.
pub fn all(headers: &[Header]) -> Vec<(String, String)> {
    let homes: BTreeMap<&str, &str> = headers
        .iter()
        .flat_map(|header| header.items.iter().map(|(_, item)| (item.name(), header.name)))
        .collect();
    headers.iter().map(|header| (format!("{}.h", header.name), text(header, &homes))).collect()
}

fn text(header: &Header, homes: &BTreeMap<&str, &str>) -> String {
    let mut visible: BTreeSet<&str> = closure(header.name).into_iter().collect();
    visible.insert(header.name);
    let guard = format!("KVTIER_{}_H", header.name.to_uppercase());
    let mut out = String::new();
    out += &opening(&header.source.opening);
    out += &format!("\n#ifndef {guard}\n#define {guard}\n\n");
    if header.includes.is_empty() {
        out += "#include <stdint.h>\n";
    }
    for include in header.includes {
        out += &format!("#include <kvtier/{include}.h>\n");
    }
    if header.name == "base" {
        out += INITIALISER;
    }
    out += "\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n";
    out += &forward(header, homes, &visible);
    let places = header.items.iter().enumerate().map(|(at, (_, item))| (item.name(), at));
    let writer =
        Writer { header, homes, visible: &visible, places: places.collect(), at: Cell::new(0) };
    let mut heading = 0;
    let mut at = 0;
    while at < header.items.len() {
        writer.at.set(at);
        let (under, item) = &header.items[at];
        if *under != heading {
            heading = *under;
            let title = header.source.headings[heading].trim_end_matches('.');
            out += &format!("\n/* ---- {title} {} */\n", "-".repeat(WIDTH - 12 - title.len()));
        }
        let family = writer.family(at);
        // The constants of a family stand right below its type.
        let is_below = family > 0 && writer.is_type_of(at);
        out += if is_below { "" } else { "\n" };
        out += &match family {
            0 => writer.item(item),
            count => writer.constants(at, count),
        };
        at += family.max(1);
    }
    out += "\n#ifdef __cplusplus\n}\n#endif\n\n";
    out += &format!("#endif /* {guard} */\n");
    out
}

const INITIALISER: &str = r"
#ifdef __cplusplus
/* C++ has no designated initialisers before C++20. */
template <typename T> inline T kvt_sized_() {
    T value = T();
    value.struct_size = sizeof(T);
    return value;
}
#define KVT_INIT_(T) (kvt_sized_<T>())
#else
#define KVT_INIT_(T) { .struct_size = sizeof(T) }
#endif
";

/// The comment at the head of a header, with its code indented.
fn opening(lines: &[String]) -> String {
    let mut out = String::from("/// @file\n");
    let mut in_code = false;
    for line in lines {
        if line.starts_with("```") {
            in_code = !in_code;
            continue;
        }
        let indent = if in_code && !line.is_empty() { "    " } else { "" };
        out += format!("/// {indent}{line}").trim_end();
        out += "\n";
    }
    out + "///\n/// Generated from the sources of the library; a test compares. Do not edit.\n"
}

/// Declares the structs to which this header points before it declares them, or without declaring
/// them.
fn forward(header: &Header, homes: &BTreeMap<&str, &str>, visible: &BTreeSet<&str>) -> String {
    let mut foreign: BTreeMap<&str, &str> = BTreeMap::new();
    for used in header.items.iter().flat_map(|(_, item)| item.uses()) {
        if let Some(home) = homes.get(used.base.as_str())
            && !visible.contains(home)
        {
            assert!(
                !used.pointers.is_empty(),
                "{}.h uses {} by value and does not include {home}.h",
                header.name,
                used.base
            );
            foreign.insert(&used.base, home);
        }
    }
    let lines =
        foreign.iter().map(|(name, home)| format!("struct {name}; /* kvtier/{home}.h */\n"));
    let mut lines: String = lines.collect();
    let mut below = BTreeSet::new();
    for (at, (_, item)) in header.items.iter().enumerate() {
        let is_below =
            |used: &str| header.items[at + 1..].iter().any(|(_, one)| one.name() == used);
        let used = item.uses().into_iter().map(|used| used.base.as_str());
        below.extend(used.filter(|used| is_below(used)));
    }
    lines.extend(below.iter().map(|name| format!("struct {name};\n")));
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

struct Writer<'a> {
    header: &'a Header,
    homes: &'a BTreeMap<&'a str, &'a str>,
    visible: &'a BTreeSet<&'a str>,
    places: BTreeMap<&'a str, usize>,
    /// Place of the declaration that is being written.
    at: Cell<usize>,
}

impl Writer<'_> {
    /// Number of constants of one family from `at` on; 0 = the declaration is no constant.
    fn family(&self, at: usize) -> usize {
        let family = |at: usize| {
            let (heading, item) = self.header.items.get(at)?;
            let Kind::Constant(name, _) = &item.kind else { return None };
            Some((heading, self.header.source.families.get(name), item.doc.is_empty()))
        };
        let Some((heading, name, _)) = family(at) else { return 0 };
        // A constant without a type and without a comment belongs to the constant before it.
        let same = |next: &(&usize, Option<&String>, bool)| {
            next.0 == heading && next.1 == name && (name.is_some() || next.2)
        };
        1 + (at + 1..).map_while(family).take_while(same).count()
    }

    /// Whether the declaration before is the type of this constant.
    fn is_type_of(&self, at: usize) -> bool {
        let family = self.header.source.families.get(self.header.items[at].1.name());
        at > 0 && family.is_some_and(|family| self.header.items[at - 1].1.name() == family)
    }

    fn constants(&self, at: usize, count: usize) -> String {
        let items = self.header.items[at..at + count].iter().map(|(_, item)| item);
        let all: Vec<(&Item, &str, &str)> = items
            .map(|item| match &item.kind {
                Kind::Constant(name, value) => (item, name.as_str(), value.as_str()),
                _ => unreachable!("a constant"),
            })
            .collect();
        let mut out = String::new();
        if !self.header.source.families.contains_key(all[0].1) {
            for (item, name, value) in all {
                out += &doc(&item.doc, "");
                out += &match value.starts_with('-') {
                    true => format!("#define {name} ({value})\n"),
                    false => format!("#define {name} {value}\n"),
                };
            }
            return out;
        }
        out += "enum {\n";
        for (item, name, value) in all {
            out += &doc(&item.doc, "    ");
            out += &format!("    {name} = {value},\n");
        }
        out + "};\n"
    }

    fn item(&self, item: &Item) -> String {
        let mut out = doc(&item.doc, "");
        match &item.kind {
            Kind::Constant(..) => unreachable!("constants are written in families"),
            Kind::Alias(name, ty) => out += &format!("typedef {ty} {name};\n"),
            Kind::Opaque(name) => out += &format!("typedef struct {name} {name};\n"),
            Kind::Struct(name, fields) => {
                out += &format!("typedef struct {name} {{\n");
                for field in fields {
                    out += &doc(&field.doc, "    ");
                    out += &format!("    {};\n", self.declaration(field));
                }
                out += &format!("}} {name};\n");
                if item.is_sized() {
                    out += &format!("#define {} KVT_INIT_({name})\n", initialiser(name));
                }
            }
            Kind::Callback(signature) => {
                let returns = self.ty(&signature.returns);
                let head = format!("typedef {}(*{})(", spaced(&returns), signature.name);
                out += &self.params(head, signature);
            }
            Kind::Function(signature) => {
                let returns = self.ty(&signature.returns);
                let head = format!("{}{}(", spaced(&returns), signature.name);
                out += &self.params(head, signature);
            }
        }
        out
    }

    /// As many parameters in a line as fit.
    fn params(&self, head: String, signature: &Signature) -> String {
        let params: Vec<String> = signature.params.iter().map(|p| self.declaration(p)).collect();
        if params.is_empty() {
            return format!("{head}void);\n");
        }
        let indent = if head.len() < 60 { " ".repeat(head.len()) } else { " ".repeat(8) };
        let mut out = head.clone();
        let mut column = head.len();
        for (at, param) in params.iter().enumerate() {
            let end = if at + 1 == params.len() { ");" } else { "," };
            let space = usize::from(at > 0);
            if at > 0 && column + space + param.len() + end.len() > WIDTH {
                out += &format!("\n{indent}");
                column = indent.len();
            } else if at > 0 {
                out += " ";
                column += 1;
            }
            out += &format!("{param}{end}");
            column += param.len() + end.len();
        }
        out + "\n"
    }

    fn declaration(&self, field: &Field) -> String {
        let length = field.ty.length.as_ref().map_or(String::new(), |length| format!("[{length}]"));
        format!("{}{}{length}", spaced(&self.ty(&field.ty)), field.name)
    }

    /// A type; one that is not declared yet needs its tag.
    fn ty(&self, ty: &Type) -> String {
        let name = ty.base.as_str();
        let is_foreign = self.homes.get(name).is_some_and(|home| !self.visible.contains(home));
        let is_below = self.places.get(name).is_some_and(|place| *place > self.at.get());
        let tag = if is_foreign || is_below { "struct " } else { "" };
        let constant = if ty.is_const { "const " } else { "" };
        let mut out = format!("{constant}{tag}{}", ty.base);
        for (at, is_const) in ty.pointers.iter().enumerate() {
            let space = if at == 0 || ty.pointers[at - 1] { " " } else { "" };
            out += &format!("{space}*{}", if *is_const { "const" } else { "" });
        }
        out
    }
}

/// A type before a name.
fn spaced(ty: &str) -> String {
    if ty.ends_with('*') { ty.to_string() } else { format!("{ty} ") }
}

fn doc(lines: &[String], indent: &str) -> String {
    lines.iter().map(|line| format!("{indent}{}\n", format!("/// {line}").trim_end())).collect()
}

/// The name of a struct's initialiser.
pub fn initialiser(name: &str) -> String {
    let stem = name.trim_start_matches("kvt_").trim_end_matches("_t").to_uppercase();
    format!("KVT_{stem}_INIT")
}
