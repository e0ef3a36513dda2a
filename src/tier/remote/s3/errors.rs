//! What replies mean.

use crate::tier::remote::Trouble;
use crate::tier::remote::s3::conn::Reply;
use crate::tier::remote::s3::xml::Said;

/// As much of a secret as may be looked for in a message that was cut.
const SEEN_OF_SECRETS: usize = 16;

/// A trouble, and what is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// It is what it is.
    Trouble(Trouble),
    /// It may go well a moment later.
    Again(Trouble),
    /// As [`Meaning::Again`]; and nothing else is asked for meanwhile.
    Slower,
    /// The server does not know a header.
    Unknown,
}

/// What a reply means that says of something that it went wrong.
pub fn meaning(reply: &Reply) -> Meaning {
    use Meaning::{Again, Slower, Trouble as Is, Unknown};
    let said = Said::read(&reply.text).unwrap_or_default();
    match said.code.as_str() {
        "NoSuchKey" | "NoSuchVersion" => return Is(Trouble::Absent),
        "NoSuchBucket" => return Is(Trouble::Gone),
        "SlowDown"
        | "SlowDownRead"
        | "SlowDownWrite"
        | "RequestLimitExceeded"
        | "TooManyRequests"
        | "Throttling"
        | "ThrottlingException" => return Slower,
        "RequestTimeout"
        | "InternalError"
        | "ServiceUnavailable"
        | "ServerBusy"
        | "ConditionalRequestConflict"
        | "OperationAborted"
        | "IncompleteBody"
        | "XMinioServerNotInitialized" => {
            return Again(Trouble::Later);
        }
        "EntityTooLarge" => return Is(Trouble::TooLong),
        "QuotaExceeded"
        | "XMinioStorageFull"
        | "XMinioAdminBucketQuotaExceeded"
        | "InsufficientStorage" => return Is(Trouble::Full),
        "ReadOnlyMode" | "XMinioReadOnly" => return Is(Trouble::ReadOnly),
        "NotImplemented" | "InvalidArgument" | "InvalidRequest" => return Unknown,
        "ExpiredToken"
        | "InvalidToken"
        | "TokenRefreshRequired"
        | "AccessDenied"
        | "AuthorizationHeaderMalformed"
        | "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "RequestTimeTooSkewed"
        | "IllegalLocationConstraintException" => {
            return Is(Trouble::Denied);
        }
        _ => {}
    }
    match reply.head.status {
        404 => Is(Trouble::Absent),
        401 | 403 | 405 => Is(Trouble::Denied),
        // Somebody else has it, who is not to be shown our keys.
        301 | 302 | 303 | 308 => Is(Trouble::Denied),
        // The bucket has moved a moment ago.
        307 => Is(Trouble::Later),
        400 | 501 if said.code.is_empty() => Unknown,
        413 => Is(Trouble::TooLong),
        429 => Slower,
        503 => Slower,
        507 => Is(Trouble::Full),
        408 | 409 | 425 => Again(Trouble::Later),
        500.. => Again(Trouble::Later),
        _ => Is(Trouble::Nonsense),
    }
}

/// What there is to be told of a reply, in the server's words and ours. Words that have a secret
/// in them, or the beginning of one where they were cut, are not shown.
pub fn words(reply: &Reply, wall_s: u64, secrets: &[&[u8]]) -> String {
    let said = Said::read(&reply.text).unwrap_or_default();
    let mut words = format!("the server says {}", reply.head.status);
    if !said.code.is_empty() {
        words.push_str(&format!(" {}", said.code));
    }
    let message = said.message.as_bytes();
    let is_secret = secrets.iter().any(|secret| {
        let start = &secret[..secret.len().min(SEEN_OF_SECRETS)];
        !start.is_empty() && message.windows(start.len()).any(|part| part == start)
    });
    if !said.message.is_empty() && !is_secret {
        words.push_str(&format!(" ({})", said.message.trim_end_matches('.')));
    }
    let region = if said.region.is_empty() { &reply.head.region } else { &said.region };
    match (said.code.as_str(), reply.head.status) {
        ("RequestTimeTooSkewed", _) => {
            words.push_str(&format!(": {}", skew_words(reply.head.date_s, wall_s)));
        }
        ("ExpiredToken", _) => words.push_str(": give a new token, and the keys that go with it"),
        ("SignatureDoesNotMatch", _) => {
            words.push_str(": the secret key is not the one of this access key");
        }
        ("AuthorizationHeaderMalformed" | "PermanentRedirect" | "TemporaryRedirect", _)
        | (_, 301 | 302 | 303 | 307 | 308 | 400)
            if !region.is_empty() || !said.endpoint.is_empty() =>
        {
            words.push_str(": ");
            if !region.is_empty() {
                words.push_str(&format!("the bucket is in the region {region}"));
            }
            if !said.endpoint.is_empty() {
                let comma = if region.is_empty() { "" } else { ", " };
                words.push_str(&format!("{comma}ask at {}", said.endpoint));
            }
        }
        (_, 301 | 302 | 303 | 307 | 308) => {
            words.push_str(": another endpoint or region has the bucket");
        }
        _ => {}
    }
    words
}

/// How far the clock here is off.
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
    fn codes_count_before_statuses() {
        use Meaning::{Again, Slower, Trouble as Is, Unknown};
        assert_eq!(error(404, "NoSuchKey"), Is(Trouble::Absent));
        assert_eq!(error(404, "NoSuchBucket"), Is(Trouble::Gone));
        assert_eq!(error(200, "InternalError"), Again(Trouble::Later));
        assert_eq!(error(200, "SlowDown"), Slower);
        assert_eq!(error(400, "RequestTimeout"), Again(Trouble::Later));
        assert_eq!(error(400, "ExpiredToken"), Is(Trouble::Denied));
        assert_eq!(error(409, "ConditionalRequestConflict"), Again(Trouble::Later));
        assert_eq!(error(403, "SomethingNew"), Is(Trouble::Denied));
        assert_eq!(error(501, "NotImplemented"), Unknown);
        assert_eq!(error(400, "BadDigest"), Is(Trouble::Nonsense));
        for (status, wanted) in [
            (404, Is(Trouble::Absent)),
            (403, Is(Trouble::Denied)),
            (301, Is(Trouble::Denied)),
            (307, Is(Trouble::Later)),
            (400, Unknown),
            (501, Unknown),
            (408, Again(Trouble::Later)),
            (429, Slower),
            (500, Again(Trouble::Later)),
            (503, Slower),
            (504, Again(Trouble::Later)),
            (507, Is(Trouble::Full)),
            (418, Is(Trouble::Nonsense)),
            (201, Is(Trouble::Nonsense)),
        ] {
            assert_eq!(meaning(&reply(&status.to_string(), "<html>")), wanted, "{status}");
        }
    }

    #[test]
    fn words_say_what_to_do() {
        let secrets: [&[u8]; 3] = [b"tok", b"AKIDEXAMPLE", &[b'x'; 1000]];
        let of = |head: &str, body: &str| words(&reply(head, body), 1_369_353_600, &secrets);
        let skewed = "<Error><Code>RequestTimeTooSkewed</Code><Message>a.</Message></Error>";
        let said = of("403 No\r\nDate: Thu, 23 May 2013 23:00:00 GMT", skewed);
        assert!(said.contains("RequestTimeTooSkewed (a)"), "{said}");
        assert!(said.contains("3600 s ahead"), "{said}");
        let said = of("403 No\r\nDate: Fri, 24 May 2013 00:20:00 GMT", skewed);
        assert!(said.contains("1200 s behind"), "{said}");
        let said = of("301 Moved\r\nx-amz-bucket-region: eu-west-1", "");
        assert!(said.contains("in the region eu-west-1"), "{said}");
        let body =
            "<Error><Code>PermanentRedirect</Code><Endpoint>b.s3.amazonaws.com</Endpoint></Error>";
        assert!(of("301", body).contains("ask at b.s3.amazonaws.com"));
        assert!(of("302", "").contains("another endpoint"));
        let body = "<Error><Code>InvalidToken</Code><Message>what is tok?</Message></Error>";
        assert!(!of("400", body).contains("tok?"));
        let body = "<Error><Code>InvalidAccessKeyId</Code><Message>AKIDEXAMPLE?</Message></Error>";
        assert!(!of("403", body).contains("AKID"));
        // One that is longer than what is kept of a message.
        let body = format!("<Error><Code>E</Code><Message>{}</Message></Error>", "x".repeat(1000));
        assert_eq!(of("400", &body), "the server says 400 E");
    }
}
