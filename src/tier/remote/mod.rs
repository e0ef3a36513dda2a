//! The remote tier: objects under names, on engines that people already run. A [`Remote`] is one
//! of those; whoever moves objects has a [`Client`] of it to himself.
//!
//! A remote is trusted with nothing. What it says of being there is a hint, what it gives is
//! checked by whoever asked, and what it does not answer by the deadline
//! has not come.
//!
//! Lanes block until their deadline, have no threads, and take no locks of the store's.

pub mod batch;
pub mod breaker;
#[cfg(feature = "dir")]
pub mod dir;
#[cfg(any(feature = "redis", feature = "s3"))]
pub mod fault;
pub mod name;
pub mod object;
#[cfg(any(feature = "redis", feature = "s3"))]
pub mod reconnect;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "s3")]
pub mod s3;
#[cfg(feature = "seal")]
pub mod seal;
pub mod secret;
pub mod shape;
#[cfg(feature = "dir")]
mod sweep;
#[cfg(any(feature = "redis", feature = "s3"))]
pub mod transport;
#[cfg(any(feature = "redis", feature = "s3"))]
pub mod url;

use crate::base::status::{Error, Result, Status};
use crate::fail;

pub use crate::tier::remote::batch::{
    Control, Get, Gets, Operation, Part, Put, Puts, Queries, Query,
};
pub use crate::tier::remote::name::Name;

/// What a remote likes, and what it cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Bytes of an object that it is quick with.
    pub preferred_bytes: u64,
    /// Most bytes of an object.
    pub max_bytes: u64,
    /// Most objects of a batch that are worth while; more are taken, in several turns.
    pub batch: usize,
    /// Parts of an object can be read.
    pub ranges: bool,
    /// A put does nothing where there is one of that name; else the last writer may win.
    pub first_wins: bool,
    /// Memory that a lane keeps for itself, about, once it was used.
    pub client_bytes: u64,
}

/// What answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Server {
    /// What it is, and its version, as it says itself.
    pub words: String,
    /// What there is to be said against it, a sentence each.
    pub warnings: Vec<String>,
}

/// Why an object did not come, or did not go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteError {
    /// There is none of that name.
    Absent,
    /// A reply that means nothing, or ended too early: it says nothing of the object.
    Malformed,
    /// What has that name came whole, and is not what it should be.
    Damaged,
    /// It may go well at another time: busy, loading, moving, without a leader.
    Busy,
    /// Nobody answered by the deadline.
    Timeout,
    /// It has no room.
    Full,
    /// It takes nothing.
    ReadOnly,
    /// It knows us not, or forbids this.
    Denied,
    /// It cannot be reached.
    Unreachable,
    /// It takes no object that long.
    TooLong,
    /// It is not who it should be, or others read along.
    Untrusted,
}

impl RemoteError {
    /// What a caller is told.
    pub fn status(self) -> Status {
        match self {
            RemoteError::Absent => Status::NotFound,
            RemoteError::Malformed | RemoteError::Damaged => Status::Corrupt,
            RemoteError::Busy => Status::Again,
            RemoteError::Timeout => Status::Timeout,
            RemoteError::Full => Status::Budget,
            RemoteError::ReadOnly
            | RemoteError::Denied
            | RemoteError::Unreachable
            | RemoteError::Untrusted => Status::Unavailable,
            RemoteError::TooLong => Status::Limit,
        }
    }

    /// Whether it says that the remote is well, whatever became of the object.
    pub fn is_answer(self) -> bool {
        matches!(
            self,
            RemoteError::Absent | RemoteError::TooLong | RemoteError::Full | RemoteError::ReadOnly
        )
    }
}

impl From<RemoteError> for Error {
    fn from(trouble: RemoteError) -> Error {
        let words = match trouble {
            RemoteError::Absent => "the remote has none of that name",
            RemoteError::Malformed => "the remote gave what was not asked for",
            RemoteError::Damaged => "what the remote has of that name is damaged",
            RemoteError::Busy => "the remote cannot now",
            RemoteError::Timeout => "the remote did not answer in time",
            RemoteError::Full => "the remote is full",
            RemoteError::ReadOnly => "the remote takes nothing",
            RemoteError::Denied => "the remote forbids it",
            RemoteError::Unreachable => "the remote cannot be reached",
            RemoteError::TooLong => "the remote takes no object that long",
            RemoteError::Untrusted => "there is no safe connection to the remote",
        };
        Error::new(trouble.status(), words)
    }
}

/// Appends an entry, names and values, to a stream that others read, by a deadline.
pub type Publish =
    Box<dyn FnMut(&[(&str, &[u8])], u64) -> std::result::Result<(), RemoteError> + Send>;

/// What the lanes of a remote did, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Connections that were made.
    pub connections: u64,
    /// Those of them that went where there had been one.
    pub reconnects: u64,
    /// Objects that were sent for to where a server said that they are.
    pub redirects: u64,
    /// How often it was learnt which server has what.
    pub refreshes: u64,
    /// Objects that were sent for once more.
    pub retries: u64,
}

/// What a build may leave out, and whether this one has it.
const BUILT: [(&str, bool); 5] = [
    ("redis", cfg!(feature = "redis")),
    ("dir", cfg!(feature = "dir")),
    ("tls", cfg!(feature = "tls")),
    ("seal", cfg!(feature = "seal")),
    ("s3", cfg!(feature = "s3")),
];

/// Whether something that a build may leave out is in this one: `redis`, `dir`, `s3`, `tls`, `seal`.
/// UNSUPPORTED, and how to come by it, if it is not.
pub fn need(feature: &str) -> Result<()> {
    if !BUILT.contains(&(feature, true)) {
        fail!(
            Unsupported,
            "built without {feature}: use a library that is built with the feature \"{feature}\""
        );
    }
    Ok(())
}

/// An engine that keeps objects under names.
pub trait Remote: Send + Sync {
    /// What it likes.
    fn caps(&self) -> Caps;

    /// A way to it, for one thread. Connections are made when they are needed.
    fn client(&self) -> Box<dyn Client>;

    /// What its lanes did. Counts nothing where there are no connections.
    fn tally(&self) -> Tally {
        Tally::default()
    }
}

/// A way to a remote. All deadlines are those of [`crate::base::clock::Clock`]; none is
/// exceeded by more than a moment. Every item of a batch has its own result afterwards, and no
/// memory is touched any more.
pub trait Client: Send {
    /// Asks who is there: within a deadline, with credentials and all. UNAVAILABLE, TIMEOUT, AGAIN
    /// = it may be there later. INVALID = it was reached, and refuses us or is not who it should be;
    /// CORRUPT = what was reached is none of its kind: nothing comes of waiting.
    fn greet(&mut self, deadline_ns: u64) -> Result<Server>;

    /// Fetches objects, or parts of them.
    ///
    /// # Safety
    /// The memory of every part is valid, and nobody else's meanwhile.
    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64);

    /// Stores objects.
    ///
    /// # Safety
    /// The memory of every part is valid, and written by nobody meanwhile.
    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64);

    /// Asks which objects are there, and how long they are.
    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64);

    /// Takes objects away; one that is not there is gone, too. The length in a result means nothing.
    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_built_is_told() {
        for (feature, is_built) in [
            ("redis", cfg!(feature = "redis")),
            ("dir", cfg!(feature = "dir")),
            ("tls", cfg!(feature = "tls")),
            ("seal", cfg!(feature = "seal")),
            ("other", false),
        ] {
            let status = need(feature).map_err(|error| error.status());
            assert_eq!(status, if is_built { Ok(()) } else { Err(Status::Unsupported) });
        }
        assert!(need("other").unwrap_err().message().starts_with("built without other"));
    }
}
