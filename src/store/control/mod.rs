//! What people ask a running store, and tell it: requests and answers over a local
//! socket. A request is one line, a spec such as `table(session=3)`; an answer is
//! `ok BYTES` or `error STATUS BYTES` on a line, then so many bytes. What comes from
//! the socket is trusted in nothing, and nobody there is waited for.

mod answer;
mod connection;
mod request;
mod serve;
mod views;

pub use answer::{Subject, answer};
pub use request::Request;
pub use serve::{MAX_CONNECTIONS, serve};

/// Longest request, the end of its line included.
pub const MAX_LINE_BYTES: usize = 4096;
