//! What a caller's struct says beside the spec of a store: fields that are set count instead
//! of the parameters of the same name, and are read by the same rules.

use crate::base::spec::{Arg, Spec, Value};
use crate::base::status::Result;
use crate::store::spec::StoreSpec;
use crate::store::state::Write;

/// The fields; empty, 0 or none = as the spec says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fields<'a> {
    /// Most bytes of cells in memory.
    pub host_bytes: u64,
    /// Most bytes of all files.
    pub disk_bytes: u64,
    /// The directory of the disk tier.
    pub disk_path: &'a str,
    /// Who leaves memory.
    pub policy: &'a str,
    /// Who leaves the disk.
    pub disk_policy: &'a str,
    /// When cells go to disk.
    pub write: Option<Write>,
}

impl Fields<'_> {
    /// Reads a spec with these fields in it.
    pub fn over(&self, text: &str) -> Result<StoreSpec> {
        let mut spec = Spec::parse(if text.trim().is_empty() { "store()" } else { text })?;
        if self.host_bytes > 0 {
            set(&mut spec, "host", bytes(self.host_bytes));
        }
        for (key, policy) in [("policy", self.policy), ("disk_policy", self.disk_policy)] {
            if !policy.is_empty() {
                let policy = Spec::parse(policy).map_err(|error| error.within(key))?;
                set(&mut spec, key, Value::Spec(policy));
            }
        }
        if let Some(write) = self.write {
            let word = match write {
                Write::Through => "through",
                Write::Behind => "behind",
                Write::Back => "back",
                Write::Never => "never",
            };
            let is_said = |arg: &Arg| matches!(&arg.value, Value::Spec(said) if said.name == word);
            // What the spec says of the same mode stays.
            if !spec.args.iter().any(|arg| arg.key == "write" && is_said(arg)) {
                set(&mut spec, "write", Value::Spec(word_of(word)));
            }
        }
        if self.disk_bytes > 0 || !self.disk_path.is_empty() {
            self.set_disk(&mut spec);
        }
        StoreSpec::read(&spec)
    }

    fn set_disk(&self, spec: &mut Spec) {
        let given = spec.args.iter().find(|arg| arg.key == "disk").map(|arg| arg.value.clone());
        let mut disk = match given {
            Some(Value::Spec(disk)) if disk.name != "none" => disk,
            None | Some(Value::Spec(_)) => word_of("disk"),
            // What is wrong there is said when it is read.
            Some(_) => return,
        };
        if self.disk_bytes > 0 {
            set(&mut disk, "bytes", bytes(self.disk_bytes));
        }
        if !self.disk_path.is_empty() {
            set(&mut disk, "path", Value::Text(self.disk_path.to_string()));
        }
        set(spec, "disk", Value::Spec(disk));
    }
}

fn word_of(name: &str) -> Spec {
    Spec { name: name.to_string(), args: Vec::new(), offset: 0 }
}

fn bytes(bytes: u64) -> Value {
    Value::Number(bytes as f64, "B".to_string())
}

/// Sets a parameter, in place of what is there.
fn set(spec: &mut Spec, key: &str, value: Value) {
    match spec.args.iter_mut().find(|arg| arg.key == key) {
        Some(arg) => arg.value = value,
        None => spec.args.push(Arg { key: key.to_string(), value, offset: spec.offset }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn fields_count_instead_of_parameters() {
        let none = Fields::default();
        let text = "store(host=1GiB,disk=disk(path=\"a\",bytes=1GiB,segment=1MiB),policy=lru)";
        let plain = none.over(text).expect("sound");
        assert_eq!((plain.config.host_bytes, plain.config.host_policy.as_str()), (1 << 30, "lru"));
        let fields = Fields {
            host_bytes: (5 << 20) + 1,
            disk_bytes: 7 << 20,
            disk_path: "b c\"(,",
            policy: "slru(segments=3)",
            disk_policy: "arc",
            write: Some(Write::Never),
        };
        for text in ["", "store", text, "store(disk=none)"] {
            let spec = fields.over(text).expect(text);
            let disk = spec.disk.expect("one");
            assert_eq!((spec.config.host_bytes, disk.bytes), ((5 << 20) + 1, 7 << 20));
            assert_eq!(disk.path, Path::new("b c\"(,"));
            assert_eq!(spec.config.host_policy, "slru(segments=3)");
            assert_eq!(
                (spec.config.disk_policy.as_str(), spec.config.write),
                ("arc", Write::Never)
            );
            assert_eq!(disk.segment_bytes == 1 << 20, text.contains("segment"));
        }
        let behind = Fields { write: Some(Write::Behind), ..none };
        let config = behind.over("store(write=behind(age=3s))").expect("sound").config;
        assert_eq!((config.write, config.write_age_ns), (Write::Behind, 3_000_000_000));
        let config = behind.over("store(write=never)").expect("sound").config;
        assert_eq!((config.write, config.write_age_ns), (Write::Behind, 1_000_000_000));
        let half = Fields { disk_bytes: 9, ..none }.over(text).expect("sound").disk.expect("one");
        assert_eq!((half.bytes, half.path.as_path()), (9, Path::new("a")));
    }

    #[test]
    fn what_is_wrong_is_said_as_for_parameters() {
        let none = Fields::default();
        for (fields, text, word) in [
            (Fields { disk_bytes: 1, ..none }, "", "path="),
            (Fields { disk_path: "a", ..none }, "store", "bytes="),
            (Fields { disk_path: "a", ..none }, "store(disk=disc(bytes=1GiB))", "'disk'"),
            (Fields { disk_path: "a", ..none }, "store(disk=3)", "'disk'"),
            (Fields { policy: "lru(", ..none }, "", "policy"),
            (Fields { host_bytes: 1, ..none }, "shop", "'store'"),
            (Fields { host_bytes: 1, ..none }, "store(hots=1)", "'host'"),
        ] {
            let error = fields.over(text).expect_err(text);
            assert!(error.message().contains(word), "{text}: {error}");
        }
    }
}
