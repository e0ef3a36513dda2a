//! What the numbers of the operating system mean for files.

use crate::base::status::{Error, Status};

/// An error of the system call that failed last.
pub fn last(what: &str) -> Error {
    error(last_number(), what)
}

/// The number the system call that failed last left behind.
pub fn last_number() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// An error of a number, in the terms of [`crate::io::files::Files`].
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
        let text =
            format!("{what}: {os}: the process may have no more (ulimit -n): raise that limit");
        return Error::new(status, text);
    }
    Error::new(status, format!("{what}: {os}"))
}

/// Whether a device said so, and not a kernel that cannot do a call: another way
/// to make the call would end the same.
pub fn is_of_device(number: i32) -> bool {
    use libc::{EDQUOT, EILSEQ, EIO, ENODATA, ENODEV, ENOSPC, EROFS, ESTALE, ETIMEDOUT};
    [EDQUOT, EILSEQ, EIO, ENODATA, ENODEV, ENOSPC, EROFS, ESTALE, ETIMEDOUT].contains(&number)
}

/// Whether the same call may go through at once.
pub fn is_passing(number: i32) -> bool {
    matches!(number, libc::EINTR | libc::EAGAIN)
}

/// Repeats a call that returns -1 on failure for as long as signals interrupt it;
/// the number of the error that is left.
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
