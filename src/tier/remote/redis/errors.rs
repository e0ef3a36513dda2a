//! Meaning of error replies.

use crate::tier::remote::RemoteError;
use crate::tier::remote::redis::url::Address;

/// Most characters of a server's message that are shown.
const MAX_WORDS: usize = 160;

/// The reaction that an error reply requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorReply {
    /// The item fails.
    Error(RemoteError),
    /// The item may succeed a moment later.
    Retry,
    /// Another node has the slot from now on; a missing host is the host of the node that replied.
    Moved(Option<Address>),
    /// Another node serves this one request.
    Ask(Option<Address>),
}

/// The meaning of an error reply of the node `peer`.
pub fn meaning(words: &[u8], peer: &Address) -> ErrorReply {
    let mut each = words.split(|&byte| byte == b' ');
    let first = each.next().unwrap_or_default();
    let error = match first {
        b"MOVED" => {
            return ErrorReply::Moved(each.nth(1).and_then(|at| Address::of_node(at, peer)));
        }
        b"ASK" => return ErrorReply::Ask(each.nth(1).and_then(|at| Address::of_node(at, peer))),
        b"TRYAGAIN" | b"CLUSTERDOWN" => return ErrorReply::Retry,
        b"LOADING" | b"MASTERDOWN" | b"BUSY" | b"NOREPLICAS" => RemoteError::Busy,
        b"OOM" => RemoteError::Full,
        b"READONLY" | b"MISCONF" => RemoteError::ReadOnly,
        b"NOAUTH" | b"WRONGPASS" | b"NOPERM" | b"DENIED" => RemoteError::Denied,
        _ if words.starts_with(b"ERR max number of clients") => RemoteError::Busy,
        _ => RemoteError::Malformed,
    };
    ErrorReply::Error(error)
}

/// Whether the server does not know the command.
pub fn is_unknown_command(words: &[u8]) -> bool {
    words.starts_with(b"ERR unknown command") || words.starts_with(b"ERR unknown subcommand")
}

/// A server's message for people: printable, short, and without the secret.
pub fn shown(words: &[u8], secret: Option<&[u8]>) -> String {
    let has =
        |secret: &[u8]| !secret.is_empty() && words.windows(secret.len()).any(|w| w == secret);
    if secret.is_some_and(has) {
        return code(words);
    }
    let plain = |byte: &u8| if byte.is_ascii_graphic() { char::from(*byte) } else { ' ' };
    words.iter().take(MAX_WORDS).map(plain).collect()
}

/// The first word of an error. No server builds it from its input.
pub fn code(words: &[u8]) -> String {
    let is_upper = |byte: &&u8| byte.is_ascii_uppercase();
    let code: String = words.iter().take_while(is_upper).take(16).map(|&b| char::from(b)).collect();
    if code.is_empty() { "an error".to_string() } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_replies_are_classified() {
        let peer = Address { host: "me".into(), port: 7000 };
        let of = |words: &str| meaning(words.as_bytes(), &peer);
        let at = |host: &str, port| Some(Address { host: host.into(), port });
        assert_eq!(of("MOVED 3999 127.0.0.1:6381"), ErrorReply::Moved(at("127.0.0.1", 6381)));
        assert_eq!(of("MOVED 3999 :6381"), ErrorReply::Moved(at("me", 6381)));
        assert_eq!(of("ASK 1 ::1:6381"), ErrorReply::Ask(at("::1", 6381)));
        assert_eq!(of("ASK 1 there"), ErrorReply::Ask(None));
        assert_eq!(of("MOVED"), ErrorReply::Moved(None));
        assert_eq!(of("TRYAGAIN x"), ErrorReply::Retry);
        for (words, error) in [
            ("OOM command not allowed", RemoteError::Full),
            ("READONLY You can't write", RemoteError::ReadOnly),
            ("MISCONF Redis is configured", RemoteError::ReadOnly),
            ("NOAUTH Authentication required.", RemoteError::Denied),
            ("NOPERM no", RemoteError::Denied),
            ("LOADING", RemoteError::Busy),
            ("ERR max number of clients reached", RemoteError::Busy),
            ("WRONGTYPE Operation", RemoteError::Malformed),
            ("", RemoteError::Malformed),
        ] {
            assert_eq!(of(words), ErrorReply::Error(error), "{words}");
        }
    }

    #[test]
    fn messages_never_contain_the_secret() {
        let words = b"ERR unknown command `HELLO`, with args beginning with: `hunter2`";
        assert_eq!(shown(words, Some(b"hunter2")), "ERR");
        assert!(shown(words, Some(b"another")).contains("HELLO"));
        assert!(shown(words, Some(b"")).contains("HELLO"));
        assert_eq!(shown(b"a\x1b[31mb\n", None), "a [31mb ");
        assert_eq!(shown(&[b'x'; 1000], None).len(), MAX_WORDS);
        assert_eq!(code(b"hunter2"), "an error");
    }
}
