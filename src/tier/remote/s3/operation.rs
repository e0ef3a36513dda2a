//! The requests of an operation, and the effect of their replies.

use crate::tier::remote::batch;
use crate::tier::remote::s3::connection::{Reply, Transfer, Want};
use crate::tier::remote::s3::errors::{self, Meaning};
use crate::tier::remote::s3::request::Request;
use crate::tier::remote::s3::xml::ErrorBody;
use crate::tier::remote::{Control, RemoteError};

/// An operation on a batch, or a request about the bucket.
pub type Operation<'a> = batch::Operation<'a, &'a mut BucketRequest>;

impl Control for &mut BucketRequest {
    fn fail(&mut self, error: RemoteError) {
        self.result = Err(error);
    }
}

/// A request about the bucket.
pub struct BucketRequest {
    pub method: &'static str,
    /// Query of the URL.
    pub query: String,
    pub result: Result<Reply, RemoteError>,
}

/// Progress of a put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Step {
    /// A conditional put; or a lookup, where the server has no conditional puts.
    #[default]
    First,
    /// The lookup found nothing.
    Missing,
}

/// The effect of a reply on its item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has its result.
    Done,
    /// The object is absent: it is stored next.
    Missing,
    /// The server has no conditional puts.
    NotImplemented,
    /// An error reply.
    Error(Meaning),
}

impl Operation<'_> {
    /// The request of an item; `is_unconditional` = the server has no conditional puts.
    pub fn request(&self, item: usize, step: Step, is_unconditional: bool) -> Request<'_> {
        let of = |method, name| Request {
            method,
            name: Some(name),
            query: "",
            range: None,
            if_absent: false,
            length: None,
        };
        match self {
            Operation::Get(gets) => {
                let (get, room) = (&gets.items[item], gets.room_of(item));
                match room {
                    // There is no empty range.
                    0 => of("HEAD", &get.name),
                    _ => Request { range: Some((get.offset, room)), ..of("GET", &get.name) },
                }
            }
            Operation::Put(puts) => {
                let name = &puts.items[item].name;
                if is_unconditional && step == Step::First {
                    return of("HEAD", name);
                }
                let length = Some(puts.bytes_of(item));
                Request { length, if_absent: !is_unconditional, ..of("PUT", name) }
            }
            Operation::Lookup(queries) => of("HEAD", &queries.items[item].name),
            Operation::Remove(queries) => of("DELETE", &queries.items[item].name),
            Operation::Control(bucket) => Request {
                method: bucket.method,
                name: None,
                query: &bucket.query,
                range: None,
                if_absent: false,
                length: None,
            },
        }
    }

    /// The bodies of a request and of its reply.
    pub fn transfer(&self, item: usize, request: &Request) -> Transfer<'_> {
        let (mut source, mut sink): (&[_], &[_]) = (&[], &[]);
        let mut want = if request.method == "HEAD" { Want::Head } else { Want::Words };
        match self {
            Operation::Put(puts) if request.method == "PUT" => source = puts.parts_of(item),
            Operation::Get(gets) if request.method == "GET" => {
                sink = gets.parts_of(item);
                want = Want::Object { offset: gets.items[item].offset, room: gets.room_of(item) };
            }
            _ => {}
        }
        Transfer { source, sink, want }
    }

    /// Records the reply of an item.
    pub fn complete(
        &mut self,
        item: usize,
        step: Step,
        is_unconditional: bool,
        reply: &Reply,
    ) -> Outcome {
        let status = reply.head.status;
        match self {
            Operation::Control(_) if status >= 500 || status == 429 => {}
            Operation::Control(bucket) => {
                bucket.result = Ok(reply.clone());
                return Outcome::Done;
            }
            Operation::Get(gets) => match status {
                200 | 206 => {
                    gets.items[item].result = Ok(reply.bytes);
                    return Outcome::Done;
                }
                // The object ends before the requested offset.
                416 => {
                    gets.items[item].result = Ok(0);
                    return Outcome::Done;
                }
                _ => {}
            },
            Operation::Put(puts) => {
                let result = &mut puts.items[item].result;
                // Some servers report a failure in the body of a reply with status 200.
                let is_error = ErrorBody::read(&reply.text).is_some();
                let is_lookup = is_unconditional && step == Step::First;
                match (status, is_lookup, is_error) {
                    (200, true, _) | (412, _, _) => *result = Ok(true),
                    (404, true, _) => return Outcome::Missing,
                    (200 | 201 | 204, false, false) => *result = Ok(false),
                    _ => return put_error(reply, !is_unconditional),
                }
                return Outcome::Done;
            }
            Operation::Lookup(queries) => {
                if status == 200 {
                    queries.items[item].result = reply.head.length.ok_or(RemoteError::Malformed);
                    return Outcome::Done;
                }
            }
            Operation::Remove(queries) => {
                let is_absent = matches!(status, 200 | 202 | 204)
                    || (status == 404
                        && errors::meaning(reply) == Meaning::Error(RemoteError::Absent));
                if is_absent {
                    queries.items[item].result = Ok(0);
                    return Outcome::Done;
                }
            }
        }
        Outcome::Error(meaning(reply))
    }
}

fn put_error(reply: &Reply, if_absent: bool) -> Outcome {
    match errors::meaning(reply) {
        Meaning::NotImplemented if if_absent => Outcome::NotImplemented,
        // A put cannot miss its object: the bucket is missing.
        Meaning::Error(RemoteError::Absent) => {
            Outcome::Error(Meaning::Error(RemoteError::Unreachable))
        }
        _ => Outcome::Error(meaning(reply)),
    }
}

fn meaning(reply: &Reply) -> Meaning {
    match errors::meaning(reply) {
        Meaning::NotImplemented => Meaning::Error(RemoteError::Malformed),
        known => known,
    }
}
