//! The declarations of all headers as JSON, from which bindings are generated.

use serde_json::{Value, json};

use super::Header;
use super::items::{Field, Item, Kind, Signature, Type};

/// One declaration a line, so that changes can be read.
pub fn json(headers: &[Header]) -> String {
    let mut out = String::from("{\"headers\": [\n");
    for (at, header) in headers.iter().enumerate() {
        let items = header.items.iter().map(|(_, one)| item(header, one).to_string());
        let items = items.collect::<Vec<_>>().join(",\n");
        let (name, includes) = (json!(header.name), json!(header.includes));
        let end = if at + 1 == headers.len() { "" } else { "," };
        out += &format!(
            "{{\"name\": {name}, \"includes\": {includes}, \"items\": [\n{items}\n]}}{end}\n"
        );
    }
    out + "]}\n"
}

fn item(header: &Header, item: &Item) -> Value {
    let doc = item.doc.join("\n");
    match &item.kind {
        Kind::Constant(name, value) => {
            let family = header.source.families.get(name);
            json!({ "kind": "constant", "name": name, "value": value, "type": family, "doc": doc })
        }
        Kind::Alias(name, ty) => json!({ "kind": "alias", "name": name, "type": ty, "doc": doc }),
        Kind::Opaque(name) => json!({ "kind": "handle", "name": name, "doc": doc }),
        Kind::Struct(name, fields) => json!({
            "kind": "struct", "name": name, "sized": item.is_sized(), "fields": list(fields),
            "doc": doc,
        }),
        Kind::Callback(signature) => function("callback", signature, &doc),
        Kind::Function(signature) => function("function", signature, &doc),
    }
}

fn function(kind: &str, signature: &Signature, doc: &str) -> Value {
    json!({
        "kind": kind, "name": signature.name, "returns": ty(&signature.returns),
        "params": list(&signature.params), "doc": doc,
    })
}

fn list(fields: &[Field]) -> Vec<Value> {
    let field = |field: &Field| {
        let mut value = json!({ "name": field.name });
        value
            .as_object_mut()
            .expect("object")
            .extend(ty(&field.ty).as_object().expect("object").clone());
        if !field.doc.is_empty() {
            value["doc"] = json!(field.doc.join("\n"));
        }
        value
    };
    fields.iter().map(field).collect()
}

fn ty(ty: &Type) -> Value {
    let mut value = json!({ "type": ty.base });
    if !ty.pointers.is_empty() {
        value["pointers"] = json!(ty.pointers.len());
    }
    if ty.is_const {
        value["const"] = json!(true);
    }
    if let Some(length) = &ty.length {
        value["length"] = json!(length.parse::<u64>().expect("a number"));
    }
    value
}
