//! Declarations in the text that cbindgen writes.

/// A declaration with the lines of its comment.
pub struct Item {
    pub doc: Vec<String>,
    pub kind: Kind,
}

pub enum Kind {
    /// A `#define`: name, value.
    Constant(String, String),
    /// A typedef of a number: name, type.
    Alias(String, String),
    /// A handle.
    Opaque(String),
    Struct(String, Vec<Field>),
    /// A type of functions.
    Callback(Signature),
    Function(Signature),
}

/// A field of a struct, or a parameter.
#[derive(Clone)]
pub struct Field {
    pub doc: Vec<String>,
    pub name: String,
    pub ty: Type,
}

pub struct Signature {
    pub name: String,
    pub returns: Type,
    pub params: Vec<Field>,
}

/// A type of C: `const kvt_view_t *const *`.
#[derive(Clone, PartialEq, Eq)]
pub struct Type {
    pub base: String,
    /// The base is constant.
    pub is_const: bool,
    /// For each pointer whether it is constant itself.
    pub pointers: Vec<bool>,
    /// Length of an array.
    pub length: Option<String>,
}

impl Item {
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Constant(name, _) | Kind::Alias(name, _) => name,
            Kind::Opaque(name) | Kind::Struct(name, _) => name,
            Kind::Callback(signature) | Kind::Function(signature) => &signature.name,
        }
    }

    /// The types that it uses.
    pub fn uses(&self) -> Vec<&Type> {
        match &self.kind {
            Kind::Constant(..) | Kind::Alias(..) | Kind::Opaque(_) => Vec::new(),
            Kind::Struct(_, fields) => fields.iter().map(|field| &field.ty).collect(),
            Kind::Callback(signature) | Kind::Function(signature) => {
                let params = signature.params.iter().map(|param| &param.ty);
                params.chain([&signature.returns]).collect()
            }
        }
    }

    /// Whether it is a struct that begins with its size.
    pub fn is_sized(&self) -> bool {
        let Kind::Struct(_, fields) = &self.kind else { return false };
        fields[0].name == "struct_size"
    }
}

/// All declarations of a text.
pub fn parse(text: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let mut doc = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(comment) = line.strip_prefix("///") {
            doc.push(comment.strip_prefix(' ').unwrap_or(comment).to_string());
            continue;
        }
        if let Some((name, value)) = line.strip_prefix("#define ").and_then(|l| l.split_once(' ')) {
            let kind = Kind::Constant(name.to_string(), value.to_string());
            items.push(Item { doc: std::mem::take(&mut doc), kind });
            continue;
        }
        if !line.starts_with(|c: char| c.is_alphabetic()) || line.starts_with("extern") {
            continue;
        }
        let mut body = vec![line];
        let in_braces = line.ends_with('{');
        while !body.last().is_some_and(|last| match in_braces {
            true => last.starts_with('}'),
            false => last.ends_with(';'),
        }) {
            body.push(lines.next().expect("the end of a declaration"));
        }
        items.push(Item { doc: std::mem::take(&mut doc), kind: kind_of(&body) });
    }
    items
}

fn kind_of(lines: &[&str]) -> Kind {
    let words: Vec<&str> = lines[0].split_whitespace().collect();
    if lines[0].ends_with('{') {
        return Kind::Struct(words[2].to_string(), fields_of(&lines[1..lines.len() - 1]));
    }
    let text = lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let text = text.trim_end_matches(';');
    let Some(rest) = text.strip_prefix("typedef ") else {
        return Kind::Function(signature_of(text));
    };
    if let Some(rest) = rest.strip_prefix("struct ") {
        return Kind::Opaque(rest.split(' ').next().expect("a name").to_string());
    }
    if rest.contains("(*") {
        return Kind::Callback(signature_of(&rest.replacen("(*", "", 1).replacen(')', "", 1)));
    }
    let (ty, name) = rest.rsplit_once(' ').expect("a typedef");
    Kind::Alias(name.to_string(), ty.to_string())
}

fn fields_of(lines: &[&str]) -> Vec<Field> {
    let mut fields = Vec::new();
    let mut doc = Vec::new();
    for line in lines.iter().map(|line| line.trim()) {
        match line.strip_prefix("///") {
            Some(comment) => doc.push(comment.strip_prefix(' ').unwrap_or(comment).to_string()),
            None => {
                let (name, ty) = declarator(line.trim_end_matches(';'));
                fields.push(Field { doc: std::mem::take(&mut doc), name, ty });
            }
        }
    }
    fields
}

/// `kvt_status_t name(type one, type *two)`.
fn signature_of(text: &str) -> Signature {
    let (head, params) = text.split_once('(').expect("parameters");
    let (name, returns) = declarator(head);
    let params = params.trim_end_matches(')').split(',');
    let params = params.filter(|param| param.trim() != "void" && !param.trim().is_empty());
    let params = params.map(|param| {
        let (name, ty) = declarator(param.trim());
        Field { doc: Vec::new(), name, ty }
    });
    Signature { name, returns, params: params.collect() }
}

/// `const struct kvt_view_t *const *name[2]`: the name and its type.
fn declarator(text: &str) -> (String, Type) {
    let (text, length) = match text.split_once('[') {
        Some((text, length)) => (text, Some(length.trim_end_matches(']').to_string())),
        None => (text, None),
    };
    let spaced = text.replace('*', " * ");
    let mut words: Vec<&str> = spaced.split_whitespace().filter(|word| *word != "struct").collect();
    let name = words.pop().expect("a name").to_string();
    let is_const = words.first() == Some(&"const");
    let mut words = words.into_iter().skip(usize::from(is_const));
    let base = words.next().expect("a type").to_string();
    let mut pointers = Vec::new();
    for word in words {
        match word {
            "*" => pointers.push(false),
            "const" => *pointers.last_mut().expect("a pointer") = true,
            other => panic!("{other} in the type of {name}"),
        }
    }
    (name, Type { base, is_const, pointers, length })
}
