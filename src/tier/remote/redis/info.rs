//! Description of a server, and warnings about its configuration.

use crate::tier::remote::Server;
use crate::tier::remote::redis::errors;
use crate::tier::remote::redis::resp::Value;

/// Reads the reply to `INFO`; None = it is none.
pub fn server(info: &[u8], is_cluster: bool, secret: Option<&[u8]>) -> Option<Server> {
    let of = |name: &str| {
        let value = |line: &[u8]| {
            let value = line.strip_prefix(name.as_bytes())?.strip_prefix(b":")?;
            Some(errors::shown(value.trim_ascii(), secret))
        };
        info.split(|&byte| byte == b'\n').find_map(value)
    };
    let (kind, version) = match (of("server_name"), of("valkey_version")) {
        (Some(name), Some(version)) => (name, Some(version)),
        _ => ("redis".to_string(), of("redis_version")),
    };
    let version = version?;
    let mode = of("redis_mode").or_else(|| of("server_mode")).unwrap_or_default();
    let words = format!("{kind} {version} {mode}").trim_end().to_string();
    let mut warnings = Vec::new();
    let mut warn = |is_so: bool, text: &str| {
        if is_so {
            warnings.push(text.to_string());
        }
    };
    let is = |name: &str, value: &str| of(name).is_some_and(|is| is == value);
    warn(
        mode == "sentinel",
        "it is a sentinel, which stores nothing: connect to the server itself",
    );
    warn(
        mode == "cluster" && !is_cluster,
        "it is a node of a cluster: without cluster=true it has a part of the objects only",
    );
    warn(is("role", "slave") && !is_cluster, "it is a replica, which accepts no writes");
    warn(is("loading", "1"), "it is still loading");
    let has_no_limit = is("maxmemory", "0");
    warn(
        has_no_limit,
        "it has no maxmemory: it stores objects until its machine has no memory left",
    );
    warn(
        !has_no_limit && is("maxmemory_policy", "noeviction"),
        "it evicts nothing: once it is full it accepts no more objects (maxmemory-policy)",
    );
    Some(Server { words, warnings })
}

/// The description where `INFO` is forbidden, from the reply to HELLO.
pub fn of_hello(hello: &Value, secret: Option<&[u8]>) -> Server {
    let of = |name: &[u8]| {
        let text = hello.under(name).and_then(Value::text);
        text.map(|text| errors::shown(text, secret)).unwrap_or_default()
    };
    let words = format!("{} {} {}", of(b"server"), of(b"version"), of(b"mode"));
    let warning = "INFO is forbidden: whether it has a maxmemory is not known".to_string();
    Server { words: words.trim().to_string(), warnings: vec![warning] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_info_is_parsed_with_warnings() {
        let info = b"# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\nrole:master\r\n\
                     maxmemory:0\r\nmaxmemory_policy:noeviction\r\nloading:0\r\n";
        let found = server(info, false, None).unwrap();
        assert_eq!(found.words, "redis 7.0.15 standalone");
        assert_eq!(found.warnings.len(), 1, "{found:?}");
        let info = b"redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.0\r\n\
                     redis_mode:cluster\r\nrole:slave\r\nmaxmemory:1\r\nmaxmemory_policy:allkeys-lru\r\n";
        let found = server(info, true, None).unwrap();
        assert_eq!((found.words.as_str(), found.warnings.len()), ("valkey 8.1.0 cluster", 0));
        assert_eq!(server(info, false, None).unwrap().warnings.len(), 2);
        let info = b"maxmemory:1\r\nmaxmemory_policy:noeviction\nredis_mode:sentinel\nloading:1";
        assert_eq!(server(info, false, None), None);
        let info = [&b"redis_version:1\n"[..], info].concat();
        assert_eq!(server(&info, false, None).unwrap().warnings.len(), 3);
    }
}
