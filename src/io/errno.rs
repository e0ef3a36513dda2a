//! Maps errors of the operating system to statuses for files.

use crate::base::status::{Error, Status};

/// Error of the system call that failed last.
pub fn last(what: &str) -> Error {
    error(last_number(), what)
}

/// Number of the system call that failed last.
pub fn last_number() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Error of a number, in the terms of [`crate::io::files::Files`].
pub fn error(number: i32, what: &str) -> Error {
    let status = match number {
        libc::ENOENT => Status::NotFound,
        libc::EEXIST => Status::State,
        libc::ENOSPC | libc::EDQUOT => Status::Budget,
        libc::ENOMEM => Status::NoMem,
        libc::EMFILE | libc::ENFILE => Status::Limit,
        _ => Status::Io,
    };
    let os = std::io::Error::from_raw_os_error(number);
    if number == libc::EMFILE {
        let text = format!(
            "{what}: {os}: the process has reached its limit of open files: raise it (ulimit -n)"
        );
        return Error::new(status, text).with_errno(number);
    }
    Error::new(status, format!("{what}: {os}")).with_errno(number)
}

/// An error of the standard library, in the same terms.
pub fn of_io(error: &std::io::Error, what: impl std::fmt::Display) -> Error {
    match error.raw_os_error() {
        Some(number) => self::error(number, &what.to_string()),
        None => Error::new(Status::Io, format!("{what}: {error}")),
    }
}

/// Whether the number is a device error, which another system call would meet as well, rather than
/// an unsupported call.
pub fn is_of_device(number: i32) -> bool {
    use libc::{EDQUOT, EILSEQ, EIO, ENODATA, ENODEV, ENOSPC, EROFS, ESTALE, ETIMEDOUT};
    [EDQUOT, EILSEQ, EIO, ENODATA, ENODEV, ENOSPC, EROFS, ESTALE, ETIMEDOUT].contains(&number)
}

/// Whether the same call may succeed when repeated.
pub fn is_passing(number: i32) -> bool {
    matches!(number, libc::EINTR | libc::EAGAIN)
}

/// Repeats a call that returns -1 for as long as signals interrupt it; returns the remaining error
/// number.
pub fn uninterrupted<T: From<i8> + PartialEq>(mut call: impl FnMut() -> T) -> Result<T, i32> {
    loop {
        let got = call();
        if got != T::from(-1) {
            return Ok(got);
        }
        let number = last_number();
        if number != libc::EINTR {
            return Err(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno_of(error: &Error) -> i32 {
        error.detail().map_or(0, |detail| detail.os_errno)
    }

    #[test]
    fn errors_of_files_keep_their_errno() {
        for (number, status) in [
            (libc::ENOENT, Status::NotFound),
            (libc::ENOSPC, Status::Budget),
            (libc::EMFILE, Status::Limit),
            (libc::EIO, Status::Io),
        ] {
            let found = error(number, "a file");
            assert_eq!((found.status(), errno_of(&found)), (status, number), "{found}");
        }
        let missing = std::fs::File::open("/nonexistent/file").expect_err("no such file");
        assert_eq!(errno_of(&of_io(&missing, "a file")), libc::ENOENT);
        let other = std::io::Error::other("no system call");
        assert_eq!(errno_of(&of_io(&other, "a file")), 0);
    }
}
