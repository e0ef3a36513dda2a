//! The command line tool `kvtier`.

use std::any::Any;
use std::panic;
use std::process::ExitCode;

/// Exit code of programs that the signal SIGPIPE ends. Rust ignores the signal.
const CLOSED_PIPE: u8 = 128 + libc::SIGPIPE as u8;

fn main() -> ExitCode {
    // `println!` panics when the reader of a pipe has gone, as in `kvtier doctor | head`. Unwinding
    // removes temporary directories, which the signal would not.
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !is_closed_pipe(info.payload()) {
            usual(info);
        }
    }));
    panic::catch_unwind(kvtier_cli::main).unwrap_or_else(|payload| {
        if !is_closed_pipe(&*payload) {
            panic::resume_unwind(payload);
        }
        ExitCode::from(CLOSED_PIPE)
    })
}

/// Whether a panic is that of `println!` or `eprintln!` to a pipe without a reader.
fn is_closed_pipe(payload: &(dyn Any + Send)) -> bool {
    let error = format!("(os error {})", libc::EPIPE);
    payload
        .downcast_ref::<String>()
        .is_some_and(|text| text.starts_with("failed printing to std") && text.ends_with(&error))
}
