//! The page of spec strings.

use kvtier::base::fault::Faults;
use kvtier::base::spec::describe::{Description, Row};
use kvtier::base::spec::{MAX_SPEC_ARGS, MAX_SPEC_BYTES, MAX_SPEC_DEPTH};
use kvtier::base::status::Result;
use kvtier::format::codec::Codec;
use kvtier::store::spec::Secrets;
use kvtier::{policy, sparse, store};

use super::{Table, code, head};

const INTRODUCTION: &str = "\
Every spec string of the library with its parameters, for users and operators. A spec string describes a store, a policy \
or a fault in one text.

```spec
store(host=8GiB, disk=disk(path=\"/var/cache/kv\", bytes=200GiB))
store(host=8GiB, policy=qos(inner=lru), remote=redis(url=\"redis://cache:6379\"))
minference(budget=0.3)
```

| spec | where it is given | section |
|---|---|---|
| `kvtier(...)` | `kvt_open` | [A store with its runtime](#a-store-with-its-runtime) |
| `store(...)` | `kvt_open`, `kvt_store_open`, `kvtier config` | [Store](#store) |
| eviction policy | in `store(...)`, `kvt_policy_open`, `kvtier lab` | [Eviction policies](#eviction-policies) |
| sparse policy | `kvt_sparse_open`, `kvt_offload_open`, `kvtier lab sparse` | [Sparse policies](#sparse-policies) |
| `recipe(...)` | the identity of a namespace | [Recipe](#recipe) |
| `faults(...)` | `kvt_runtime_open`, in tests | [Faults](#faults) |

`kvtier spec 'TEXT'` checks a spec and prints its canonical form. A [configuration file](configuration.md) has the \
parameters of `store(...)` as TOML.

## Grammar

```text
spec  := name [ '(' [ arg { ',' arg } ] ')' ]
arg   := [ key '=' ] value
value := number [ unit ] | '\"' text '\"' | spec
```

- Names and keys consist of letters, digits, `_` and `-`, and begin with a letter or a digit: `2q`, `lru-k`.
- Spaces are ignored, letters are case-sensitive, and a key may be given once.
- In a quoted text, `\\\"` and `\\\\` are the only escapes.
- A name without arguments needs no brackets: `lru` is `lru()`.
";

const TYPES: &str = "\
| type | examples | meaning |
|---|---|---|
| number | `0.9`, `90%`, `1e-3` | decimal, with `.` in every locale; `%` divides by 100 |
| whole number | `4096` | without a unit |
| bytes | `8GiB`, `512MB`, `1024` | units `B`, `KiB` `MiB` `GiB` `TiB` (powers of 1024), `KB` `MB` `GB` `TB` (powers of 1000) |
| duration | `250ms`, `60s` | units `ns`, `us`, `ms`, `s`, `m`, `h`, `d`; without a unit nanoseconds |
| text | `\"/var/cache/kv\"`, `word` | quoted, or a bare word |
| spec | `lru`, `disk(...)` | a nested spec |

An error names the offset in the text, what is accepted, and the nearest known word. Bytes have no limits but those of \
whole numbers: 0 to 2^53.
";

/// The page.
pub fn page() -> Result<String> {
    let store = store::spec::describe()?;
    let mut out = head("Spec strings") + INTRODUCTION;
    out += &format!(
        "- A spec has at most {MAX_SPEC_BYTES} bytes, {MAX_SPEC_ARGS} arguments, and {MAX_SPEC_DEPTH} levels of \
         nesting.\n\n{TYPES}\n"
    );
    let [bundle, budget] = store::bundle::describe()?;
    out += "## A store with its runtime\n\n`kvt_open` takes `store(...)`, or `kvtier(...)` with parameters of the \
            runtime and of the budget.\n\n```spec\nkvtier(workers=4, budget=budget(host=8GiB), \
            store=store(host=4GiB))\n```\n\n";
    out += &table(&bundle.rows);
    out += "### Budget\n\n`budget(...)`, a value of `budget`.\n\n";
    out += &table(&budget.rows);
    out += "## Store\n\nAll parameters are optional: `store` is a store with its defaults.\n\n";
    out += &table(&store.store.rows);
    out += "### Write modes\n\nValues of `write`.\n\n";
    out += &list(&store.writes, "####");
    out += "### Disk\n\n`disk(path=\"...\", bytes=...)`, a value of `disk`.\n\n";
    out += &table(&store.disk.rows);
    out += "### Quota\n\n`quota(...)`, a value of `quota`: limits each tenant for which kvt_store_set_quota set no quota.\n\n";
    out += &table(&store.quota.rows);
    out += "### Device\n\n`device(capacity=...)`, a value of `device`.\n\n";
    out += &table(&store.device.rows);
    out += "### Remotes\n\nValues of `remote`. Each has the parameters of its kind and those of all remotes.\n\n";
    out += &names(&store.remotes);
    for remote in store.remotes.iter().filter(|remote| !remote.rows.is_empty()) {
        out += &format!("#### Remote {}\n\n{}", remote.name, table(&remote.rows));
    }
    out += "#### All remotes\n\n";
    out += &table(&store.every_remote);
    let secrets = Secrets::NAMES.map(code).join(", ");
    out += &format!(
        "Passwords are not part of a spec. They are given beside it, as secrets with the names {secrets} \
         ([Remotes](remote.md)).\n\n"
    );
    out += "### Admission\n\nValues of `admission`: which chunks may enter a slower tier.\n\n";
    out += &list(&store::admission::describe()?, "####");
    out += "## Eviction policies\n\n[Eviction policies](policies.md) says how they work and which to choose.\n\n";
    out += &list(&policy::registry::describe()?, "###");
    out += "## Sparse policies\n\n[Sparse policies](sparse.md) says how they work and which to choose.\n\n";
    out += &list(&sparse::registry::describe()?, "###");
    let codecs = Codec::ALL.map(|codec| code(codec.name())).join(", ");
    out += &format!(
        "## Recipe\n\nThe recipe of an identity is a text of the engine. Where it is a spec, the library reads one \
         parameter:\n\n| parameter | value | meaning |\n|---|---|---|\n| `codec` | {codecs} | encoding of the \
         namespace's cells in slower tiers; `int8` loses precision |\n\n```spec\nrecipe(codec=int8)\n```\n\n"
    );
    out += "## Faults\n\n`faults(SITE=at(...), ...)` in the options of a runtime makes calls fail, to test how an \
            engine handles errors.\n\n```spec\nfaults(worker=at(panic=3), pin=at(fail=1))\n```\n\n";
    for one in Faults::describe()? {
        out += &format!("`{}`: {}.\n\n{}", one.name, one.about, table(&one.rows));
    }
    Ok(out.trim_end().to_string() + "\n")
}

/// A table of names, and a section for each spec with parameters.
fn list(all: &[Description], level: &str) -> String {
    let mut out = names(all);
    for one in all.iter().filter(|one| !one.rows.is_empty()) {
        out += &format!("{level} {}\n\n{}", one.name, table(&one.rows));
    }
    out
}

fn names(all: &[Description]) -> String {
    let mut names = Table::new(&["name", "meaning"]);
    for one in all {
        let aliases: String = one.aliases.iter().map(|alias| format!(", `{alias}`")).collect();
        names.row(&[format!("`{}`{aliases}", one.name), one.about.to_string()]);
    }
    names.into_text()
}

fn table(rows: &[Row]) -> String {
    let mut out = Table::new(&["parameter", "value", "default", "meaning"]);
    for row in rows {
        let value = match (row.kind, row.limits.as_str()) {
            (kind, "") => kind.to_string(),
            ("word", words) => words.to_string(),
            (kind, limits) => format!("{kind}, {limits}"),
        };
        let default = match row.default.as_str() {
            "" => "none".to_string(),
            default if row.kind == "word" && !default.contains(' ') => code(default),
            default => default.to_string(),
        };
        out.row(&[code(row.key), value, default, row.about.to_string()]);
    }
    out.into_text()
}
