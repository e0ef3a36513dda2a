//! Status codes, and errors that carry one with a message.

use std::fmt;

/// The result of a fallible function of the library.
pub type Result<T> = std::result::Result<T, Error>;

/// The status codes of the C API. Append only: a published number keeps its meaning, a retired
/// one stays reserved.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // each is described by `describe`
pub enum Status {
    Ok = 0,
    Invalid = -1,
    Handle = -2,
    TooNew = -3,
    TooSmall = -4,
    NoMem = -5,
    Budget = -6,
    Again = -7,
    Busy = -8,
    Closed = -9,
    Cancelled = -10,
    Timeout = -11,
    Reentrant = -12,
    Forked = -13,
    Panic = -14,
    Abi = -15,
    Unsupported = -16,
    Unavailable = -17,
    NotFound = -18,
    Corrupt = -19,
    Io = -20,
    Spec = -21,
    Limit = -22,
    PinQuota = -23,
    State = -24,
    Lost = -25,
}

impl Status {
    /// Every status, in the order of the numbers.
    pub const ALL: [Status; 26] = [
        Status::Ok,
        Status::Invalid,
        Status::Handle,
        Status::TooNew,
        Status::TooSmall,
        Status::NoMem,
        Status::Budget,
        Status::Again,
        Status::Busy,
        Status::Closed,
        Status::Cancelled,
        Status::Timeout,
        Status::Reentrant,
        Status::Forked,
        Status::Panic,
        Status::Abi,
        Status::Unsupported,
        Status::Unavailable,
        Status::NotFound,
        Status::Corrupt,
        Status::Io,
        Status::Spec,
        Status::Limit,
        Status::PinQuota,
        Status::State,
        Status::Lost,
    ];

    /// The number that crosses the C boundary.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// The status of a number; `None` if it is unknown.
    pub fn from_code(code: i32) -> Option<Status> {
        let index = usize::try_from(code.checked_neg()?).ok()?;
        Self::ALL.get(index).copied()
    }

    /// The C constant and its description, both NUL-terminated.
    const fn texts(self) -> (&'static str, &'static str) {
        match self {
            Status::Ok => ("KVT_OK\0", "success\0"),
            Status::Invalid => (
                "KVT_E_INVALID\0",
                "an argument is null, out of range or has unknown flags: correct the call\0",
            ),
            Status::Handle => (
                "KVT_E_HANDLE\0",
                "the handle is stale, of another type or not from this library\0",
            ),
            Status::TooNew => (
                "KVT_E_TOO_NEW\0",
                "the struct sets fields this library does not know: update the library or clear them\0",
            ),
            Status::TooSmall => (
                "KVT_E_TOO_SMALL\0",
                "the output buffer is too small: call again with the size reported\0",
            ),
            Status::NoMem => ("KVT_E_NOMEM\0", "the system has no memory for this\0"),
            Status::Budget => (
                "KVT_E_BUDGET\0",
                "the budget of that tier has no room: release, resize or reserve asynchronously\0",
            ),
            Status::Again => (
                "KVT_E_AGAIN\0",
                "not yet, or a bounded queue or table is full: drain completions, free ops, then retry\0",
            ),
            Status::Busy => (
                "KVT_E_BUSY\0",
                "still in use by work in flight: wait for its release, then retry\0",
            ),
            Status::Closed => ("KVT_E_CLOSED\0", "the object is closed or closing\0"),
            Status::Cancelled => ("KVT_E_CANCELLED\0", "cancelled before it was done\0"),
            Status::Timeout => ("KVT_E_TIMEOUT\0", "the deadline passed first\0"),
            Status::Reentrant => (
                "KVT_E_REENTRANT\0",
                "not allowed from inside a callback: call it from a thread of your own\0",
            ),
            Status::Forked => (
                "KVT_E_FORKED\0",
                "this process is a fork of the one that opened the library: exec, or open after fork\0",
            ),
            Status::Panic => (
                "KVT_E_PANIC\0",
                "a defect inside the library was caught: the object is poisoned, close it\0",
            ),
            Status::Abi => (
                "KVT_E_ABI\0",
                "header and library do not fit together: rebuild against the installed header\0",
            ),
            Status::Unsupported => {
                ("KVT_E_UNSUPPORTED\0", "this library, object or policy has no such function\0")
            }
            Status::Unavailable => {
                ("KVT_E_UNAVAILABLE\0", "this machine or store does not have it now\0")
            }
            Status::NotFound => ("KVT_E_NOT_FOUND\0", "no such thing\0"),
            Status::Corrupt => {
                ("KVT_E_CORRUPT\0", "the bytes do not match their checksum: treat them as absent\0")
            }
            Status::Io => ("KVT_E_IO\0", "the operating system reported an error\0"),
            Status::Spec => ("KVT_E_SPEC\0", "the spec string is malformed\0"),
            Status::Limit => ("KVT_E_LIMIT\0", "a documented limit was exceeded\0"),
            Status::PinQuota => (
                "KVT_E_PIN_QUOTA\0",
                "the locked-memory quota is too small: raise RLIMIT_MEMLOCK or do not pin\0",
            ),
            Status::State => ("KVT_E_STATE\0", "the object is not in a state that allows this\0"),
            Status::Lost => (
                "KVT_E_LOST\0",
                "the process that serves a shared store is gone: open the store again\0",
            ),
        }
    }

    /// The name of the C constant.
    pub fn name(self) -> &'static str {
        self.texts().0.trim_end_matches('\0')
    }

    /// The meaning, and what the caller can do.
    pub fn describe(self) -> &'static str {
        self.texts().1.trim_end_matches('\0')
    }

    /// [`Status::name`] as a NUL-terminated string that lives as long as the library.
    pub fn name_c(self) -> *const std::ffi::c_char {
        self.texts().0.as_ptr().cast()
    }

    /// [`Status::describe`] as a NUL-terminated string that lives as long as the library.
    pub fn describe_c(self) -> *const std::ffi::c_char {
        self.texts().1.as_ptr().cast()
    }
}

/// The details of an error. Boxed, since most errors have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detail {
    /// Description of the error, with names and numbers.
    pub message: String,
    /// The byte offset in an input string, for spec errors.
    pub offset: Option<u64>,
    /// `errno` of a failed system call; 0 = none.
    pub os_errno: i32,
}

/// A status with optional details. 16 bytes, so that a failure on a hot path allocates nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: Status,
    detail: Option<Box<Detail>>,
}

impl Error {
    /// An error with a message.
    pub fn new(status: Status, message: impl Into<String>) -> Error {
        let detail = Detail { message: message.into(), ..Detail::default() };
        Error { status, detail: Some(Box::new(detail)) }
    }

    /// An error at a byte offset of an input string.
    pub fn at(status: Status, offset: usize, message: impl Into<String>) -> Error {
        let mut error = Error::new(status, message);
        if let Some(detail) = &mut error.detail {
            detail.offset = Some(offset as u64);
        }
        error
    }

    /// An error of a system call, from the current `errno`.
    pub fn os(what: &str) -> Error {
        let os = std::io::Error::last_os_error();
        let errno = os.raw_os_error().unwrap_or(0);
        let status = match errno {
            libc::ENOMEM => Status::NoMem,
            libc::ENOSYS | libc::EOPNOTSUPP => Status::Unavailable,
            _ => Status::Io,
        };
        Error::new(status, format!("{what}: {os}")).with_errno(errno)
    }

    /// The same error with the `errno` of a failed system call; 0 = none.
    pub fn with_errno(mut self, errno: i32) -> Error {
        if let Some(detail) = &mut self.detail {
            detail.os_errno = errno;
        }
        self
    }

    /// The same error with a context before its message.
    pub fn within(mut self, context: &str) -> Error {
        let message = format!("{context}: {}", self.message());
        self.detail.get_or_insert_default().message = message;
        self
    }

    /// The status.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The details, if any were recorded.
    pub fn detail(&self) -> Option<&Detail> {
        self.detail.as_deref()
    }

    /// The message, or the description of the status.
    pub fn message(&self) -> &str {
        self.detail.as_ref().map_or(self.status.describe(), |d| &d.message)
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Error {
        Error { status, detail: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status.name(), self.message())
    }
}

impl std::error::Error for Error {}

/// Returns early with a status and a formatted message.
#[macro_export]
macro_rules! fail {
    ($status:ident, $($text:tt)+) => {
        return Err($crate::base::status::Error::new(
            $crate::base::status::Status::$status, format!($($text)+)))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_are_dense() {
        for (i, s) in Status::ALL.iter().enumerate() {
            assert_eq!(s.code(), -(i as i32));
            assert_eq!(Status::from_code(s.code()), Some(*s));
            assert!(s.name().starts_with("KVT_"));
            assert!(!s.describe().is_empty());
        }
        assert_eq!(Status::from_code(1), None);
        assert_eq!(Status::from_code(-1000), None);
        assert_eq!(Status::from_code(i32::MIN), None);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Status::ALL.iter().map(|s| s.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Status::ALL.len());
    }

    #[test]
    fn an_error_without_details_has_the_status_description() {
        let error = Error::from(Status::Busy);
        assert_eq!(error.message(), Status::Busy.describe());
        assert_eq!(std::mem::size_of::<Error>(), 16);
    }
}
