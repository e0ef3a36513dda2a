//! Error bodies: a flat `<Error>` with a code and a message.

/// Most bytes of a body that are searched for an error.
pub const MAX_BYTES: usize = 64 << 10;
const MAX_CODE_BYTES: usize = 64;
const MAX_WORDS_BYTES: usize = 300;

/// An error body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorBody {
    /// Empty = missing.
    pub code: String,
    /// The message, for people.
    pub message: String,
    /// Region of the bucket.
    pub region: String,
    /// The endpoint that has the bucket.
    pub endpoint: String,
}

impl ErrorBody {
    /// Reads a body; None = it is no error.
    pub fn read(body: &[u8]) -> Option<ErrorBody> {
        let body = &body[..body.len().min(MAX_BYTES)];
        let inside = root(body, b"Error")?;
        let of = |name: &[u8]| element(inside, name).unwrap_or_default();
        let is_plain = |text: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
            text.len() <= MAX_CODE_BYTES && text.bytes().all(plain)
        };
        let plain = |name: &[u8]| Some(shown(of(name))).filter(|text| is_plain(text));
        Some(ErrorBody {
            code: plain(b"Code").unwrap_or_default(),
            message: shown(of(b"Message")),
            region: plain(b"Region").unwrap_or_default(),
            endpoint: plain(b"Endpoint").unwrap_or_default(),
        })
    }
}

/// Text of a server for people: short, without control characters.
pub fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * MAX_WORDS_BYTES)]);
    let mut out = String::new();
    for c in text.trim().chars() {
        if out.len() >= MAX_WORDS_BYTES {
            out.push_str("...");
            break;
        }
        out.push(if c.is_control() { ' ' } else { c });
    }
    for (coded, plain) in [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'")] {
        out = out.replace(coded, plain);
    }
    out.replace("&amp;", "&")
}

/// The content of the first element, if it has that name.
fn root<'a>(mut body: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body).trim_ascii_start();
    while let Some(rest) = body.strip_prefix(b"<?") {
        body = after(rest, b"?>")?.trim_ascii_start();
    }
    let rest = body.strip_prefix(b"<")?.strip_prefix(name)?;
    match rest.first()? {
        b'>' => Some(&rest[1..]),
        byte if byte.is_ascii_whitespace() => after(rest, b">"),
        _ => None,
    }
}

/// The text of an element without attributes.
fn element<'a>(inside: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let text = after(inside, &[b"<", name, b">"].concat())?;
    let end = text.iter().position(|&byte| byte == b'<')?;
    Some(&text[..end])
}

fn after<'a>(text: &'a [u8], word: &[u8]) -> Option<&'a [u8]> {
    let at = text.windows(word.len()).position(|window| window == word)?;
    Some(&text[at + word.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_read() {
        let body = b"\xef\xbb\xbf<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>SlowDown\
                     </Code><Message>Please reduce your &quot;rate&quot; &amp;lt; now</Message>\
                     <RequestId>4442587FB7D0A2F9</RequestId></Error>";
        let error = ErrorBody::read(body).unwrap();
        assert_eq!(error.code, "SlowDown");
        assert_eq!(error.message, "Please reduce your \"rate\" &lt; now");
        assert_eq!((error.region.as_str(), error.endpoint.as_str()), ("", ""));
        let error = ErrorBody::read(
            b"<Error xmlns=\"x\"><Message/><Code> PermanentRedirect </Code><Region>eu-west-1\
              </Region><Endpoint>b.s3.eu-west-1.amazonaws.com</Endpoint></Error>",
        );
        let error = error.unwrap();
        assert_eq!(error.code, "PermanentRedirect");
        assert_eq!(error.region, "eu-west-1");
        assert_eq!(error.endpoint, "b.s3.eu-west-1.amazonaws.com");
        assert_eq!(error.message, "");
    }

    #[test]
    fn other_bodies_are_no_errors() {
        for body in [
            &b""[..],
            b"<",
            b"<Error",
            b"<ErrorX><Code>a</Code></ErrorX>",
            b"<ListBucketResult><Error><Code>a</Code></Error></ListBucketResult>",
            b"<html><body>Error</body></html>",
            b"<?xml <Error><Code>a</Code></Error>",
            b"Error",
        ] {
            assert_eq!(ErrorBody::read(body), None, "{:?}", String::from_utf8_lossy(body));
        }
    }

    #[test]
    fn messages_are_truncated_and_printable() {
        let long = format!(
            "<Error><Code>{}</Code><Message>{}</Message>",
            "a".repeat(65),
            "b\n\u{7}\u{e4}".repeat(9999)
        );
        let error = ErrorBody::read(long.as_bytes()).unwrap();
        assert_eq!(error.code, "");
        assert!(error.message.len() < MAX_WORDS_BYTES + 10, "{}", error.message.len());
        assert!(!error.message.contains(char::is_control));
        assert_eq!(ErrorBody::read(b"<Error><Code>a b</Code>").unwrap().code, "");
        assert_eq!(ErrorBody::read(b"<Error><Code>a").unwrap(), ErrorBody::default());
    }
}
