//! A JSON writer without a tree, for answers of a fixed shape.

use std::fmt::Write;

/// A JSON document under construction.
#[derive(Default)]
pub struct Json(String);

impl Json {
    /// The finished document.
    pub fn into_text(self) -> String {
        self.0
    }

    /// Writes a comma after a previous value.
    fn next(&mut self) {
        if !matches!(self.0.as_bytes().last(), None | Some(b'{' | b'[' | b':')) {
            self.0.push(',');
        }
    }

    fn plain(&mut self, value: std::fmt::Arguments) {
        self.next();
        // Writing to a string cannot fail.
        let _ = self.0.write_fmt(value);
    }

    /// Writes the key of the next value.
    pub fn key(&mut self, key: &str) -> &mut Json {
        self.text(key);
        self.0.push(':');
        self
    }

    /// Writes an object, filled by `fill`.
    pub fn object(&mut self, fill: impl FnOnce(&mut Json)) {
        self.next();
        self.0.push('{');
        fill(self);
        self.0.push('}');
    }

    /// Writes a list, filled by `fill`.
    pub fn list(&mut self, fill: impl FnOnce(&mut Json)) {
        self.next();
        self.0.push('[');
        fill(self);
        self.0.push(']');
    }

    /// Writes a whole number of 0 or more.
    pub fn whole(&mut self, value: impl Into<u64>) {
        let value: u64 = value.into();
        self.plain(format_args!("{value}"));
    }

    /// Writes a whole number that may be negative.
    pub fn signed(&mut self, value: i64) {
        self.plain(format_args!("{value}"));
    }

    /// Writes a number; null if it is not finite.
    pub fn real(&mut self, value: f64) {
        match value.is_finite() {
            true => self.plain(format_args!("{value}")),
            false => self.null(),
        }
    }

    /// Writes `true` or `false`.
    pub fn flag(&mut self, value: bool) {
        self.plain(format_args!("{value}"));
    }

    /// Writes `null`.
    pub fn null(&mut self) {
        self.plain(format_args!("null"));
    }

    /// Writes a string.
    pub fn text(&mut self, value: &str) {
        self.next();
        self.0.push('"');
        for c in value.chars() {
            match c {
                '"' | '\\' => self.0.extend(['\\', c]),
                c if c < ' ' => {
                    let _ = write!(self.0, "\\u{:04x}", u32::from(c));
                }
                c => self.0.push(c),
            }
        }
        self.0.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_valid_json() {
        let mut json = Json::default();
        json.object(|json| {
            json.key("a").whole(1u32);
            json.key("b:").list(|json| {
                json.text("x,{[:");
                json.text("\"\\\n\u{1}é");
                json.object(|_| ());
                json.list(|_| ());
                json.signed(-3);
            });
            json.key("c").real(0.5);
            json.key("d").real(f64::NAN);
            json.key("e").flag(true);
            json.key("f").real(1e300);
        });
        let text = json.into_text();
        let start =
            r#"{"a":1,"b:":["x,{[:","\"\\\u000a\u0001é",{},[],-3],"c":0.5,"d":null,"e":true,"f":1"#;
        assert!(text.starts_with(start), "{text}");
        assert!(text.ends_with("00}") && text.len() > 300, "{text}");
    }
}
