//! What a lane has to do: a batch of one kind, its requests, and what replies mean for it.

use crate::tier::remote::s3::MAX_BYTES;
use crate::tier::remote::s3::conn::{Reply, Transfer, Want};
use crate::tier::remote::s3::errors::{self, Meaning};
use crate::tier::remote::s3::request::Request;
use crate::tier::remote::s3::xml::Said;
use crate::tier::remote::{Asks, Gets, Puts, Trouble};

/// A batch.
pub enum Work<'a> {
    /// To be fetched.
    Get(&'a mut Gets),
    /// To be stored.
    Put(&'a mut Puts),
    /// To be asked for.
    Ask(&'a mut Asks),
    /// To be taken away.
    Remove(&'a mut Asks),
    /// The bucket itself is asked for something.
    Bucket(&'a mut Bucket),
}

/// A question about the bucket.
pub struct Bucket {
    /// How it is asked.
    pub method: &'static str,
    /// What follows after a `?`.
    pub query: String,
    /// What came.
    pub result: Result<Reply, Trouble>,
}

/// How far an item that is stored has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Step {
    /// It goes only if there is none of that name; or, where the server does not know how to do
    /// that, is looked for.
    #[default]
    First,
    /// It was looked for, and is not there.
    Missing,
}

/// What became of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has its result.
    Done,
    /// It is not there: it goes.
    Missing,
    /// The server does not know how to store what is new only.
    Unknown,
    /// What an error means.
    Error(Meaning),
}

impl Work<'_> {
    /// How many items there are.
    pub fn len(&self) -> usize {
        match self {
            Work::Get(gets) => gets.items.len(),
            Work::Put(puts) => puts.items.len(),
            Work::Ask(asks) | Work::Remove(asks) => asks.items.len(),
            Work::Bucket(_) => 1,
        }
    }

    /// Whether it is too long for any server.
    pub fn is_too_long(&self, item: usize) -> bool {
        matches!(self, Work::Put(puts) if puts.bytes_of(item) > MAX_BYTES)
    }

    /// What is asked for an item; `is_plain` = the server cannot store what is new only.
    pub fn request(&self, item: usize, step: Step, is_plain: bool) -> Request<'_> {
        let of = |method, name| Request {
            method,
            name: Some(name),
            query: "",
            range: None,
            is_new: false,
            length: None,
        };
        match self {
            Work::Get(gets) => {
                let (get, room) = (&gets.items[item], gets.room_of(item));
                match room {
                    // No range is of no bytes.
                    0 => of("HEAD", &get.name),
                    _ => Request { range: Some((get.offset, room)), ..of("GET", &get.name) },
                }
            }
            Work::Put(puts) => {
                let name = &puts.items[item].name;
                if is_plain && step == Step::First {
                    return of("HEAD", name);
                }
                let length = Some(puts.bytes_of(item));
                Request { length, is_new: !is_plain, ..of("PUT", name) }
            }
            Work::Ask(asks) => of("HEAD", &asks.items[item].name),
            Work::Remove(asks) => of("DELETE", &asks.items[item].name),
            Work::Bucket(bucket) => Request {
                method: bucket.method,
                name: None,
                query: &bucket.query,
                range: None,
                is_new: false,
                length: None,
            },
        }
    }

    /// What goes and comes with a request.
    pub fn transfer(&self, item: usize, request: &Request) -> Transfer<'_> {
        let (mut source, mut sink): (&[_], &[_]) = (&[], &[]);
        let mut want = if request.method == "HEAD" { Want::Head } else { Want::Words };
        match self {
            Work::Put(puts) if request.method == "PUT" => source = puts.parts_of(item),
            Work::Get(gets) if request.method == "GET" => {
                sink = gets.parts_of(item);
                want = Want::Object { offset: gets.items[item].offset, room: gets.room_of(item) };
            }
            _ => {}
        }
        Transfer { source, sink, want }
    }

    /// Notes what came for an item.
    pub fn came(&mut self, item: usize, step: Step, is_plain: bool, reply: &Reply) -> Outcome {
        let status = reply.head.status;
        match self {
            Work::Bucket(_) if status >= 500 || status == 429 => {}
            Work::Bucket(bucket) => {
                bucket.result = Ok(reply.clone());
                return Outcome::Done;
            }
            Work::Get(gets) => match status {
                200 | 206 => {
                    gets.items[item].result = Ok(reply.bytes);
                    return Outcome::Done;
                }
                // It ends before the first byte that was asked for.
                416 => {
                    gets.items[item].result = Ok(0);
                    return Outcome::Done;
                }
                _ => {}
            },
            Work::Put(puts) => {
                let result = &mut puts.items[item].result;
                // Some say in a body that it went wrong after they had begun to say that it went
                // well.
                let is_error = Said::read(&reply.text).is_some();
                let is_look = is_plain && step == Step::First;
                match (status, is_look, is_error) {
                    (200, true, _) | (412, _, _) => *result = Ok(true),
                    (404, true, _) => return Outcome::Missing,
                    (200 | 201 | 204, false, false) => *result = Ok(false),
                    _ => return put_error(reply, !is_plain),
                }
                return Outcome::Done;
            }
            Work::Ask(asks) => {
                if status == 200 {
                    asks.items[item].result = reply.head.length.ok_or(Trouble::Nonsense);
                    return Outcome::Done;
                }
            }
            Work::Remove(asks) => {
                let is_gone = matches!(status, 200 | 202 | 204)
                    || (status == 404
                        && errors::meaning(reply) == Meaning::Trouble(Trouble::Absent));
                if is_gone {
                    asks.items[item].result = Ok(0);
                    return Outcome::Done;
                }
            }
        }
        Outcome::Error(meaning(reply))
    }

    /// Notes that an item came to nothing.
    pub fn fail(&mut self, item: usize, trouble: Trouble) {
        match self {
            Work::Get(gets) => gets.items[item].result = Err(trouble),
            Work::Put(puts) => puts.items[item].result = Err(trouble),
            Work::Ask(asks) | Work::Remove(asks) => asks.items[item].result = Err(trouble),
            Work::Bucket(bucket) => bucket.result = Err(trouble),
        }
    }
}

fn put_error(reply: &Reply, is_new: bool) -> Outcome {
    match errors::meaning(reply) {
        Meaning::Unknown if is_new => Outcome::Unknown,
        // Of what is stored none can be missing: the bucket is.
        Meaning::Trouble(Trouble::Absent) => Outcome::Error(Meaning::Trouble(Trouble::Gone)),
        _ => Outcome::Error(meaning(reply)),
    }
}

fn meaning(reply: &Reply) -> Meaning {
    match errors::meaning(reply) {
        Meaning::Unknown => Meaning::Trouble(Trouble::Nonsense),
        known => known,
    }
}
