//! The remote tier: objects under names, in servers or directories that several stores share. A
//! [`Remote`] is one of them; each worker has a [`Client`] of its own.
//!
//! A remote is not trusted. A lookup's result is a hint, readers verify every object, and a reply
//! after the deadline counts as none.
//!
//! Clients block until their deadline, have no threads, and take no locks of the store.

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

/// Capabilities of a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Length of objects that it handles fast.
    pub preferred_bytes: u64,
    /// Longest object.
    pub max_bytes: u64,
    /// Objects of a batch that one round trip can carry; a larger batch takes several.
    pub batch: usize,
    /// Names of a lookup that one round trip can carry; a longer lookup takes several.
    pub names: usize,
    /// Parts of an object can be read.
    pub ranges: bool,
    /// A put of a name that exists does nothing; false = the last writer may win.
    pub first_wins: bool,
    /// Approximate memory of a client after its first use.
    pub client_bytes: u64,
}

/// Description of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Server {
    /// Its kind and version, in its own words.
    pub words: String,
    /// Warnings about its configuration, a sentence each.
    pub warnings: Vec<String>,
}

/// Why an object could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteError {
    /// There is no object of that name.
    Absent,
    /// The reply was malformed or ended early: it says nothing about the object.
    Malformed,
    /// The object arrived, but is not what was stored.
    Damaged,
    /// The request may succeed later: the server is busy, loading, moving data, or without a
    /// leader.
    Busy,
    /// No reply by the deadline.
    Timeout,
    /// The server has no room.
    Full,
    /// The server accepts no writes.
    ReadOnly,
    /// The server rejects the credentials or the request.
    Denied,
    /// The server cannot be reached.
    Unreachable,
    /// The object is too long for the server.
    TooLong,
    /// The server could not be authenticated, or the connection is not secure.
    Untrusted,
}

impl RemoteError {
    /// The status of the C interface.
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

    /// Whether the error shows that the remote works, whatever became of the object.
    pub fn is_answer(self) -> bool {
        matches!(
            self,
            RemoteError::Absent | RemoteError::TooLong | RemoteError::Full | RemoteError::ReadOnly
        )
    }
}

impl From<RemoteError> for Error {
    fn from(error: RemoteError) -> Error {
        let words = match error {
            RemoteError::Absent => "the remote has no object of that name",
            RemoteError::Malformed => "the remote sent a malformed reply",
            RemoteError::Damaged => "the remote's object of that name is damaged",
            RemoteError::Busy => "the remote is busy",
            RemoteError::Timeout => "the remote did not answer in time",
            RemoteError::Full => "the remote is full",
            RemoteError::ReadOnly => "the remote is read-only",
            RemoteError::Denied => {
                "the remote denies the request: check the permissions of the user"
            }
            RemoteError::Unreachable => "the remote cannot be reached",
            RemoteError::TooLong => "the remote accepts no object that long",
            RemoteError::Untrusted => "there is no safe connection to the remote",
        };
        Error::new(error.status(), words)
    }
}

/// Appends an entry of names and values to a stream that others read, by a deadline.
pub type Publish =
    Box<dyn FnMut(&[(&str, &[u8])], u64) -> std::result::Result<(), RemoteError> + Send>;

/// Counters of all clients of a remote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Connections that became ready.
    pub connections: u64,
    /// Connections to a server that had had one before.
    pub reconnects: u64,
    /// Objects that a server redirected to another one.
    pub redirects: u64,
    /// Times that the slots were read.
    pub refreshes: u64,
    /// Objects that were requested again.
    pub retries: u64,
}

/// Optional features, and whether this build has them.
const BUILT: [(&str, bool); 5] = [
    ("redis", cfg!(feature = "redis")),
    ("dir", cfg!(feature = "dir")),
    ("tls", cfg!(feature = "tls")),
    ("seal", cfg!(feature = "seal")),
    ("s3", cfg!(feature = "s3")),
];

/// Checks that this build has an optional feature: `redis`, `dir`, `s3`, `tls`, `seal`. UNSUPPORTED
/// = it has not; the message says how to get it.
pub fn need(feature: &str) -> Result<()> {
    if !BUILT.contains(&(feature, true)) {
        fail!(
            Unsupported,
            "built without {feature}: use a library that is built with the feature \"{feature}\""
        );
    }
    Ok(())
}

/// A server or directory that keeps objects under names.
pub trait Remote: Send + Sync {
    /// Its capabilities.
    fn caps(&self) -> Caps;

    /// A client for one worker thread. It connects when it is first used.
    fn client(&self) -> Box<dyn Client>;

    /// Counters of its clients; 0 where there are no connections.
    fn tally(&self) -> Tally {
        Tally::default()
    }
}

/// Is called with an index among gets when that object was received.
pub type Arrived<'a> = &'a mut dyn FnMut(&Gets, usize);

/// Is called with an index among puts before that object is read.
pub type Prepare<'a> = &'a mut dyn FnMut(usize);

/// One worker's access to a remote. All deadlines are those of [`crate::base::clock::Clock`]; a
/// call exceeds its deadline by a moment at most. Afterwards every item of a batch has its own
/// result, and no memory of the batch is used any more.
pub trait Client: Send {
    /// Connects by a deadline, with credentials. UNAVAILABLE, TIMEOUT, AGAIN = a later attempt may
    /// succeed. INVALID = the server rejects us or could not be authenticated; CORRUPT = it is a
    /// server of another kind: a later attempt will not help.
    fn greet(&mut self, deadline_ns: u64) -> Result<Server>;

    /// Fetches objects, or parts of them.
    ///
    /// # Safety
    /// The memory of every part is valid, and nothing else uses it during the call.
    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64);

    /// Stores objects.
    ///
    /// # Safety
    /// The memory of every part is valid, and no one writes it during the call.
    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64);

    /// Fetches objects as [`Client::get`], and calls `arrived` once for each object that was received.
    /// A client that can calls it soon after the object's last byte, while the object is in the
    /// processor's cache. The client does not use the object's parts any more.
    ///
    /// # Safety
    /// As [`Client::get`].
    unsafe fn get_each(&mut self, gets: &mut Gets, deadline_ns: u64, arrived: Arrived<'_>) {
        // SAFETY: the caller's guarantee.
        unsafe { self.get(gets, deadline_ns) };
        for item in (0..gets.items.len()).filter(|&item| gets.items[item].result.is_ok()) {
            arrived(gets, item);
        }
    }

    /// Stores objects as [`Client::put`], and calls `prepare` for each object before its parts are
    /// first read; a client that can calls it shortly before. A retry may call it again.
    ///
    /// # Safety
    /// As [`Client::put`], but `prepare` may write the parts of its item.
    unsafe fn put_each(&mut self, puts: &mut Puts, deadline_ns: u64, prepare: Prepare<'_>) {
        (0..puts.items.len()).for_each(prepare);
        // SAFETY: the caller's guarantee.
        unsafe { self.put(puts, deadline_ns) };
    }

    /// Looks up which objects exist, and how long they are.
    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64);

    /// Removes objects. Removing an absent object succeeds. The length in a result has no meaning.
    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_feature_is_unsupported() {
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
