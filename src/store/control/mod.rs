//! The control socket: people and programs inspect and change a running store.
//!
//! A request is one line, a spec string such as `residency(session=3)`. An answer is `ok BYTES` or
//! `error STATUS BYTES` on a line, followed by so many bytes. Input is untrusted, and a slow client
//! delays no other client.

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
