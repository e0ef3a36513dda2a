//! Files, sockets, TLS, and probes of the kernel's I/O features.

pub mod channel;
pub mod directory;
pub mod engine;
pub mod errno;
pub mod files;
pub mod header;
pub mod link;
pub mod lock;
pub mod model_files;
pub mod open_file;
pub mod open_files;
pub mod probe;
pub mod read_only;
pub mod real;
pub mod ring;
pub mod shared_dir;
pub mod shared_memory;
pub mod sidecar;
pub mod socket;
pub mod source;
pub mod span;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls_none.rs"]
pub mod tls;
pub mod tls_opts;
pub mod uring;

#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) mod scratch;
