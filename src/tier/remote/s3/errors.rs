//! Meaning of replies.

use crate::tier::remote::RemoteError;
use crate::tier::remote::s3::connection::Reply;
use crate::tier::remote::s3::xml::ErrorBody;

/// Bytes of a secret that are searched for in a message that may have been cut.
const SEEN_OF_SECRETS: usize = 16;

/// An error, and what is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The item fails.
    Error(RemoteError),
    /// The item may succeed a moment later.
    Retry(RemoteError),
    /// As [`Meaning::Retry`]; nothing else is sent meanwhile either.
    SlowDown,
    /// The server does not support a header.
    NotImplemented,
}

/// The meaning of a reply that reports a failure.
pub fn meaning(reply: &Reply) -> Meaning {
    use Meaning::{Error as Is, NotImplemented, Retry, SlowDown};
    let body = ErrorBody::read(&reply.text).unwrap_or_default();
    match body.code.as_str() {
        "NoSuchKey" | "NoSuchVersion" => return Is(RemoteError::Absent),
        "NoSuchBucket" => return Is(RemoteError::Unreachable),
        "SlowDown"
        | "SlowDownRead"
        | "SlowDownWrite"
        | "RequestLimitExceeded"
        | "TooManyRequests"
        | "Throttling"
        | "ThrottlingException" => return SlowDown,
        "RequestTimeout"
        | "InternalError"
        | "ServiceUnavailable"
        | "ServerBusy"
        | "ConditionalRequestConflict"
        | "OperationAborted"
        | "IncompleteBody"
        | "XMinioServerNotInitialized" => {
            return Retry(RemoteError::Busy);
        }
        "EntityTooLarge" => return Is(RemoteError::TooLong),
        "QuotaExceeded"
        | "XMinioStorageFull"
        | "XMinioAdminBucketQuotaExceeded"
        | "InsufficientStorage" => return Is(RemoteError::Full),
        "ReadOnlyMode" | "XMinioReadOnly" => return Is(RemoteError::ReadOnly),
        "NotImplemented" | "InvalidArgument" | "InvalidRequest" => return NotImplemented,
        "ExpiredToken"
        | "InvalidToken"
        | "TokenRefreshRequired"
        | "AccessDenied"
        | "AuthorizationHeaderMalformed"
        | "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "RequestTimeTooSkewed"
        | "IllegalLocationConstraintException" => {
            return Is(RemoteError::Denied);
        }
        _ => {}
    }
    match reply.head.status {
        404 => Is(RemoteError::Absent),
        401 | 403 | 405 => Is(RemoteError::Denied),
        // Another server has the bucket; it must not see the keys.
        301 | 302 | 303 | 308 => Is(RemoteError::Denied),
        // The bucket moved a moment ago.
        307 => Is(RemoteError::Busy),
        400 | 501 if body.code.is_empty() => NotImplemented,
        413 => Is(RemoteError::TooLong),
        429 => SlowDown,
        503 => SlowDown,
        507 => Is(RemoteError::Full),
        408 | 409 | 425 => Retry(RemoteError::Busy),
        500.. => Retry(RemoteError::Busy),
        _ => Is(RemoteError::Malformed),
    }
}

/// Message for a reply, with the server's text. A text that contains a secret, or the beginning of
/// one, is left out.
pub fn words(reply: &Reply, wall_s: u64, secrets: &[&[u8]]) -> String {
    let body = ErrorBody::read(&reply.text).unwrap_or_default();
    let mut words = format!("the server says {}", reply.head.status);
    if !body.code.is_empty() {
        words.push_str(&format!(" {}", body.code));
    }
    let message = body.message.as_bytes();
    let is_secret = secrets.iter().any(|secret| {
        let start = &secret[..secret.len().min(SEEN_OF_SECRETS)];
        !start.is_empty() && message.windows(start.len()).any(|part| part == start)
    });
    if !body.message.is_empty() && !is_secret {
        words.push_str(&format!(" ({})", body.message.trim_end_matches('.')));
    }
    let region = if body.region.is_empty() { &reply.head.region } else { &body.region };
    match (body.code.as_str(), reply.head.status) {
        ("RequestTimeTooSkewed", _) => {
            words.push_str(&format!(": {}", skew_words(reply.head.date_s, wall_s)));
        }
        ("ExpiredToken", _) => words.push_str(": provide a new session token and its keys"),
        ("SignatureDoesNotMatch", _) => {
            words.push_str(": the secret key is not the one of this access key");
        }
        ("AuthorizationHeaderMalformed" | "PermanentRedirect" | "TemporaryRedirect", _)
        | (_, 301 | 302 | 303 | 307 | 308 | 400)
            if !region.is_empty() || !body.endpoint.is_empty() =>
        {
            words.push_str(": ");
            if !region.is_empty() {
                words.push_str(&format!("the bucket is in the region {region}"));
            }
            if !body.endpoint.is_empty() {
                let comma = if region.is_empty() { "" } else { ", " };
                words.push_str(&format!("{comma}use the endpoint {}", body.endpoint));
            }
        }
        (_, 301 | 302 | 303 | 307 | 308) => {
            words.push_str(": the bucket is at another endpoint or in another region");
        }
        _ => {}
    }
    words
}

/// Difference between the local clock and the server's.
pub fn skew_words(server_s: Option<u64>, wall_s: u64) -> String {
    match server_s {
        Some(server_s) if wall_s > server_s => {
            format!("the clock here is {} s ahead of the server's", wall_s - server_s)
        }
        Some(server_s) if wall_s < server_s => {
            format!("the clock here is {} s behind the server's", server_s - wall_s)
        }
        _ => "the clock here is not the server's".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::remote::s3::http::Head;

    fn reply(head: &str, body: &str) -> Reply {
        let head = Head::read(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes()).unwrap().unwrap().0;
        Reply { head, bytes: 0, text: body.as_bytes().to_vec() }
    }

    fn error(status: u16, code: &str) -> Meaning {
        let body = format!("<Error><Code>{code}</Code></Error>");
        meaning(&reply(&status.to_string(), &body))
    }

    #[test]
    fn error_codes_take_precedence_over_the_status() {
        use Meaning::{Error as Is, NotImplemented, Retry, SlowDown};
        assert_eq!(error(404, "NoSuchKey"), Is(RemoteError::Absent));
        assert_eq!(error(404, "NoSuchBucket"), Is(RemoteError::Unreachable));
        assert_eq!(error(200, "InternalError"), Retry(RemoteError::Busy));
        assert_eq!(error(200, "SlowDown"), SlowDown);
        assert_eq!(error(400, "RequestTimeout"), Retry(RemoteError::Busy));
        assert_eq!(error(400, "ExpiredToken"), Is(RemoteError::Denied));
        assert_eq!(error(409, "ConditionalRequestConflict"), Retry(RemoteError::Busy));
        assert_eq!(error(403, "SomethingNew"), Is(RemoteError::Denied));
        assert_eq!(error(501, "NotImplemented"), NotImplemented);
        assert_eq!(error(400, "BadDigest"), Is(RemoteError::Malformed));
        for (status, wanted) in [
            (404, Is(RemoteError::Absent)),
            (403, Is(RemoteError::Denied)),
            (301, Is(RemoteError::Denied)),
            (307, Is(RemoteError::Busy)),
            (400, NotImplemented),
            (501, NotImplemented),
            (408, Retry(RemoteError::Busy)),
            (429, SlowDown),
            (500, Retry(RemoteError::Busy)),
            (503, SlowDown),
            (504, Retry(RemoteError::Busy)),
            (507, Is(RemoteError::Full)),
            (418, Is(RemoteError::Malformed)),
            (201, Is(RemoteError::Malformed)),
        ] {
            assert_eq!(meaning(&reply(&status.to_string(), "<html>")), wanted, "{status}");
        }
    }

    #[test]
    fn messages_say_what_to_do() {
        let secrets: [&[u8]; 3] = [b"tok", b"AKIDEXAMPLE", &[b'x'; 1000]];
        let of = |head: &str, body: &str| words(&reply(head, body), 1_369_353_600, &secrets);
        let skewed = "<Error><Code>RequestTimeTooSkewed</Code><Message>a.</Message></Error>";
        let body = of("403 No\r\nDate: Thu, 23 May 2013 23:00:00 GMT", skewed);
        assert!(body.contains("RequestTimeTooSkewed (a)"), "{body}");
        assert!(body.contains("3600 s ahead"), "{body}");
        let body = of("403 No\r\nDate: Fri, 24 May 2013 00:20:00 GMT", skewed);
        assert!(body.contains("1200 s behind"), "{body}");
        let body = of("301 Moved\r\nx-amz-bucket-region: eu-west-1", "");
        assert!(body.contains("in the region eu-west-1"), "{body}");
        let body =
            "<Error><Code>PermanentRedirect</Code><Endpoint>b.s3.amazonaws.com</Endpoint></Error>";
        assert!(of("301", body).contains("use the endpoint b.s3.amazonaws.com"));
        assert!(of("302", "").contains("another endpoint"));
        let body = "<Error><Code>InvalidToken</Code><Message>what is tok?</Message></Error>";
        assert!(!of("400", body).contains("tok?"));
        let body = "<Error><Code>InvalidAccessKeyId</Code><Message>AKIDEXAMPLE?</Message></Error>";
        assert!(!of("403", body).contains("AKID"));
        // A secret that is longer than the kept part of a message.
        let body = format!("<Error><Code>E</Code><Message>{}</Message></Error>", "x".repeat(1000));
        assert_eq!(of("400", &body), "the server says 400 E");
    }
}
