//! The page of the tool, from its own command line.

use clap::{Arg, ArgAction, Command, CommandFactory};

use super::{Table, code, head};

const INTRODUCTION: &str = "\
Every command of `kvtier` with its options, for users and operators. `kvtier COMMAND --help` and the man page \
`kvtier-COMMAND` say the same.

```sh
kvtier doctor
kvtier plan --layers 32 --kv-heads 8 --head-dim 128 --dtype bf16 --tokens 100000 --host 8GiB
kvtier spec 'store(host=8GiB, policy=lru)'
```

- The exit status is 0 for success, 1 for a failure and 2 for a wrong command line, unless a command says otherwise.
- `--json` prints one JSON object, or one a line.
- `RUST_LOG=kvtier=info` in the environment prints messages of the library to the standard error.

";

/// The page.
pub fn page() -> String {
    let mut tool = crate::Cli::command();
    tool.build();
    let mut commands = Vec::new();
    visible(&tool, "kvtier", &mut commands);
    let mut out = head("The tool") + INTRODUCTION;
    let mut list = Table::new(&["command", "purpose"]);
    for (name, command) in &commands {
        list.row(&[format!("[`{name}`](#{})", name.replace(' ', "-")), about(command)]);
    }
    out += &list.into_text();
    for (name, command) in &commands {
        out += &section(name, command);
    }
    out.trim_end().to_string() + "\n"
}

/// Commands that do something themselves, in the order of the help.
fn visible<'a>(command: &'a Command, name: &str, out: &mut Vec<(String, &'a Command)>) {
    for one in command.get_subcommands() {
        if one.is_hide_set() || one.get_name() == "help" {
            continue;
        }
        let name = format!("{name} {}", one.get_name());
        match one.get_subcommands().next() {
            Some(_) => visible(one, &name, out),
            None => out.push((name, one)),
        }
    }
}

fn section(name: &str, command: &Command) -> String {
    let usage = command.clone().bin_name(name).render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).trim().to_string();
    let mut out = format!(
        "## {name}\n\n{}.\n\n```text\n{usage}\n```\n\n",
        about(command).trim_end_matches('.')
    );
    let is_shown =
        |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    let args: Vec<&Arg> = command.get_arguments().filter(is_shown).collect();
    if !args.is_empty() {
        let mut table = Table::new(&["option", "default", "meaning"]);
        for arg in args {
            table.row(&[code(&spelling(arg)), default(arg), meaning(arg)]);
        }
        out += &table.into_text();
    }
    out
}

fn about(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

/// An option with its value, or the name of a positional argument.
fn spelling(arg: &Arg) -> String {
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let names: Vec<&str> =
        arg.get_value_names().unwrap_or_default().iter().map(|n| n.as_str()).collect();
    let id = arg.get_id().as_str().to_uppercase();
    let value = if names.is_empty() {
        format!("<{id}>")
    } else {
        names.iter().map(|n| format!("<{n}>")).collect::<Vec<_>>().join(" ")
    };
    match (arg.get_short(), arg.get_long()) {
        (_, Some(long)) if takes_value => format!("--{long} {value}"),
        (_, Some(long)) => format!("--{long}"),
        (Some(short), None) => format!("-{short}"),
        (None, None) => value,
    }
}

fn default(arg: &Arg) -> String {
    let values: Vec<String> =
        arg.get_default_values().iter().map(|value| code(&value.to_string_lossy())).collect();
    match (values.is_empty(), arg.is_required_set()) {
        (true, true) => "required".into(),
        (true, false) => "none".into(),
        (false, _) if !matches!(arg.get_action(), ArgAction::Set | ArgAction::Append) => {
            "off".into()
        }
        (false, _) => values.join(", "),
    }
}

fn meaning(arg: &Arg) -> String {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let values = arg.get_possible_values();
    let is_flag = !matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    if values.is_empty() || is_flag {
        return help;
    }
    let values: Vec<String> = values
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| code(value.get_name()))
        .collect();
    format!("{help}: {}", values.join(", "))
}
