//! The laboratory: traces of requests, read or made up, and their replay on the
//! same policies that run in production.
//!
//! A [`requests::Trace`] is what came in; [`replay`] runs one policy on it and
//! [`report::Report`] says how it did.

pub mod format;
pub mod generate;
pub mod reader;
pub mod replay;
pub mod report;
pub mod requests;
pub mod study;
