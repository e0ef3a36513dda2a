//! Traces of requests, read from files or generated, and their replay on the policies of
//! production.
//!
//! A [`requests::Trace`] holds the requests; [`replay`] runs one policy on it, and
//! [`report::Report`] holds the result.

pub mod format;
pub mod generate;
pub mod reader;
pub mod replay;
pub mod report;
pub mod requests;
pub mod study;
