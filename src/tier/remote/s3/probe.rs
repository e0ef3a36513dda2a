//! Description of a bucket's server, and warnings about it.

use crate::base::clock::wall_s;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::Ordering;
use crate::tier::remote::s3::Shared;
use crate::tier::remote::s3::connection::Reply;
use crate::tier::remote::s3::errors::{self, Meaning};
use crate::tier::remote::s3::request::Settings;
use crate::tier::remote::{Name, RemoteError, Server};

/// Difference of the clocks that is worth a warning, in seconds; at 900 s requests are rejected.
const SKEW_S: u64 = 300;

/// Query that lists the objects under the prefix. It may be allowed where listing the bucket is
/// not.
pub fn query(settings: &Settings) -> String {
    let mut name = Vec::new();
    settings.prefix.write(&Name { tenant: 0, hash: [0; 20] }, &mut name);
    let prefix = name.split(|&byte| byte == b'/').next().unwrap_or_default();
    format!("list-type=2&max-keys=1&prefix={}%2F", String::from_utf8_lossy(prefix))
}

/// The description after a reply, or why the bucket cannot be used.
pub fn server(shared: &Shared, reply: &Reply) -> Result<Server> {
    let settings = &shared.settings;
    let (authority, bucket) = (&settings.endpoint.authority, &settings.bucket);
    if reply.head.status != 200 {
        let message = shared.words(reply);
        // INVALID where the server rejected us: waiting does not help.
        let (status, words) = match errors::meaning(reply) {
            Meaning::Error(RemoteError::Absent | RemoteError::Unreachable) => {
                (Status::Invalid, format!("there is no bucket '{bucket}': {message}"))
            }
            Meaning::Error(RemoteError::Denied) => (Status::Invalid, message),
            Meaning::Error(error) | Meaning::Retry(error) => (error.status(), message),
            Meaning::SlowDown => (RemoteError::Busy.status(), message),
            Meaning::NotImplemented => (RemoteError::Malformed.status(), message),
        };
        return Err(Error::new(status, format!("{authority}: {words}")));
    }
    let kind = if reply.head.server.is_empty() { "s3" } else { &reply.head.server };
    let words = format!("{kind} at {authority}, bucket {bucket}");
    let mut warnings = Vec::new();
    if !settings.endpoint.is_tls {
        let warning =
            "its connections are not encrypted (http): anyone on the network path can read objects";
        warnings.push(warning.to_string());
    }
    if settings.is_insecure {
        let warning = "the server's certificate is not verified (insecure): anyone on the network path can read objects";
        warnings.push(warning.to_string());
    }
    if shared.is_unconditional.load(Ordering::Relaxed) {
        let warning = "it has no conditional writes: every object is looked up first, and if two stores \
                   write the same object at once, the last write wins";
        warnings.push(warning.to_string());
    }
    let now_s = wall_s();
    if reply.head.date_s.is_some_and(|date_s| date_s.abs_diff(now_s) > SKEW_S) {
        warnings.push(errors::skew_words(reply.head.date_s, now_s));
    }
    Ok(Server { words, warnings })
}
