//! Reasons why a connection to a server can no longer be used.

use crate::io::link::Lost;
use crate::tier::remote::RemoteError;

/// A reply that breaks the protocol or exceeds a limit; the text completes "the server gave ...".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Why a connection can no longer be used.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The result of the items on the connection.
    pub error: RemoteError,
    /// The reason, for people.
    pub message: String,
    /// The server had closed a connection that served an earlier request, before this request.
    pub is_stale: bool,
    /// Another connection may succeed at once.
    pub is_transient: bool,
}

impl Fault {
    /// A fault; transient if the connection was lost.
    pub fn new(error: RemoteError, message: impl Into<String>) -> Fault {
        let is_transient = error == RemoteError::Unreachable;
        Fault { error, message: message.into(), is_stale: false, is_transient }
    }

    /// The connection was lost, or could not be established.
    pub fn unreachable(message: impl Into<String>) -> Fault {
        Fault::new(RemoteError::Unreachable, message)
    }
}

impl From<Lost> for Fault {
    fn from(lost: Lost) -> Fault {
        let error = match lost {
            Lost::Late => RemoteError::Timeout,
            Lost::Gone(_) => RemoteError::Unreachable,
            Lost::Unsafe(_) => RemoteError::Untrusted,
        };
        Fault::new(error, lost.to_string())
    }
}

impl From<Malformed> for Fault {
    fn from(malformed: Malformed) -> Fault {
        Fault::new(RemoteError::Malformed, format!("the server gave {}", malformed.0))
    }
}
