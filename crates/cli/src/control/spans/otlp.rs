//! Spans in the JSON encoding of OTLP, and an OTLP/HTTP client without TLS.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::control::show::{number, text};
use crate::control::timed::{Timed, left};

/// Time for a connection, for a request, and for its answer, together.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer that is read.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// The path of traces below an endpoint.
const TRACES: &str = "/v1/traces";
/// `SPAN_KIND_INTERNAL`, and `STATUS_CODE_ERROR`.
const INTERNAL: u32 = 1;
const ERROR: u32 = 2;

/// Encodes ended transfers of one opening of a store as the request of an export. `offset_ns` is the
/// wall clock less the store's clock.
pub fn encode(service: &str, store: &str, run: &str, offset_ns: i128, all: &[Value]) -> Value {
    let spans: Vec<Value> = all.iter().map(|one| span(one, run, offset_ns)).collect();
    let version = env!("CARGO_PKG_VERSION");
    json!({"resourceSpans": [{
        "resource": {"attributes": [
            attribute("service.name", json!({"stringValue": service})),
            attribute("service.instance.id", json!({"stringValue": store})),
            attribute("service.version", json!({"stringValue": version})),
        ]},
        "scopeSpans": [{"scope": {"name": "kvtier", "version": version}, "spans": spans}],
    }]})
}

fn attribute(key: &str, value: Value) -> Value {
    json!({"key": key, "value": value})
}

/// The transfers of a session are one trace. Ids follow from the run and from numbers, so that spans
/// that are exported again replace themselves.
fn span(one: &Value, run: &str, offset_ns: i128) -> Value {
    let count = number(one, "number");
    let session = one.get("session_serial").and_then(Value::as_u64);
    let trace = format!("{run}{:016x}", session.unwrap_or(count | 1 << 63));
    let at = |key| (i128::from(number(one, key)) + offset_ns).max(0).to_string();
    let mut attributes = vec![
        attribute("kvtier.status", json!({"stringValue": text(one, "status")})),
        attribute("kvtier.read_disk", json!({"boolValue": one["read_disk"] == true})),
    ];
    if one["level"].is_string() {
        attributes.push(attribute("kvtier.level", json!({"stringValue": text(one, "level")})));
    }
    for key in ["tenant", "chunks", "layers", "tokens", "bytes", "missed_cells", "session_serial"] {
        if let Some(value) = one.get(key).and_then(Value::as_u64) {
            let key = format!("kvtier.{}", key.trim_end_matches("_serial"));
            attributes.push(attribute(&key, json!({"intValue": value.to_string()})));
        }
    }
    let status = match text(one, "status") {
        // A miss, and a request that the engine has cancelled, are no failures.
        "KVT_OK" | "KVT_E_NOT_FOUND" | "KVT_E_CANCELLED" => json!({}),
        failed => json!({"code": ERROR, "message": failed}),
    };
    json!({
        "traceId": trace,
        "spanId": format!("{:016x}", count.wrapping_add(1)),
        "name": format!("kvtier.{}", text(one, "kind")),
        "kind": INTERNAL,
        "startTimeUnixNano": at("began_ns"),
        "endTimeUnixNano": at("ended_ns"),
        "attributes": attributes,
        "status": status,
    })
}

/// A failed export.
#[derive(Debug)]
pub struct Failure {
    /// The same request may succeed later.
    pub is_temporary: bool,
    /// Why.
    pub words: String,
}

/// A collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `HOST:PORT`.
    authority: String,
    path: String,
}

impl Endpoint {
    /// Parses `http://HOST[:PORT][/PATH]`.
    pub fn parse(text: &str) -> Result<Endpoint, String> {
        let shape = "use http://HOST[:PORT][/PATH], such as http://127.0.0.1:4318";
        if text.starts_with("https://") {
            return Err(format!(
                "there is no TLS: {shape}, and let an OpenTelemetry Collector there send further"
            ));
        }
        let rest = text.strip_prefix("http://").ok_or(shape)?;
        let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let is_plain = |c: char| c.is_ascii_graphic() && c != '@';
        let path = path.trim_end_matches('/');
        if host.is_empty() || host.starts_with(':') || !rest.chars().all(is_plain) {
            return Err(shape.into());
        }
        let port = if host.ends_with(']') || !host.contains(':') { ":4318" } else { "" };
        let path = if path.ends_with(TRACES) { path.into() } else { format!("{path}{TRACES}") };
        Ok(Endpoint { authority: format!("{host}{port}"), path })
    }

    /// Exports a request; returns what the collector says about spans that it rejected.
    pub fn post(&self, body: &str) -> Result<Option<String>, Failure> {
        let answer = self.exchange(body).map_err(|error| {
            let words = match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                    format!("no answer within {} s", TIMEOUT.as_secs())
                }
                _ => error.to_string(),
            };
            Failure { is_temporary: true, words: format!("{}: {words}", self.authority) }
        })?;
        self.read(&answer)
    }

    fn read(&self, answer: &[u8]) -> Result<Option<String>, Failure> {
        let fail = |is_temporary, words: String| {
            Err(Failure { is_temporary, words: format!("{}: {words}", self.authority) })
        };
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut headers);
        let Ok(httparse::Status::Complete(end)) = head.parse(answer) else {
            return fail(true, "the answer is not HTTP/1.1".into());
        };
        let body = body_of(head.headers, &answer[end..]);
        let body = String::from_utf8_lossy(&body);
        match head.code.unwrap_or(0) {
            200..=299 => {
                let body: Value = serde_json::from_str(&body).unwrap_or_default();
                let partial = &body["partialSuccess"];
                let words = text(partial, "errorMessage");
                let rejected = &partial["rejectedSpans"];
                Ok((!rejected.is_null() || !words.is_empty())
                    .then(|| format!("{rejected} spans were rejected: {words:.200}")))
            }
            status => {
                let words: String = body.chars().filter(|c| !c.is_control()).take(200).collect();
                fail(matches!(status, 429 | 502 | 503 | 504), format!("status {status}: {words}"))
            }
        }
    }

    fn exchange(&self, body: &str) -> io::Result<Vec<u8>> {
        let until = Instant::now() + TIMEOUT;
        let mut connected = Err(ErrorKind::AddrNotAvailable.into());
        for address in self.authority.to_socket_addrs()? {
            connected = TcpStream::connect_timeout(&address, left(until)?);
            if connected.is_ok() {
                break;
            }
        }
        let mut stream = Timed { stream: connected?, until };
        let Endpoint { authority, path } = self;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nUser-Agent: kvtier/{}\r\nConnection: close\r\n\r\n",
            body.len(),
            env!("CARGO_PKG_VERSION")
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let (mut answer, mut bytes) = (Vec::new(), [0; 4096]);
        while answer.len() < MAX_ANSWER_BYTES && !is_whole(&answer) {
            match stream.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => answer.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The status says whether the spans were taken.
                Err(_) if has_head(&answer) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(answer)
    }
}

fn has_head(answer: &[u8]) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let parsed = httparse::Response::new(&mut headers).parse(answer);
    parsed.is_ok_and(|status| status.is_complete())
}

/// Whether an answer is complete although the connection stays open.
fn is_whole(answer: &[u8]) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Response::new(&mut headers);
    let Ok(httparse::Status::Complete(end)) = head.parse(answer) else { return false };
    let body = &answer[end..];
    if head.code == Some(204) {
        return true;
    }
    match header(head.headers, "transfer-encoding") {
        Some(_) => chunks(body).1,
        None => header(head.headers, "content-length")
            .and_then(|text| text.parse().ok())
            .is_some_and(|bytes: usize| body.len() >= bytes),
    }
}

fn header<'a>(headers: &[httparse::Header<'a>], name: &str) -> Option<&'a str> {
    let found = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(found.value).ok().map(str::trim)
}

fn body_of<'a>(headers: &[httparse::Header<'_>], body: &'a [u8]) -> Cow<'a, [u8]> {
    match header(headers, "transfer-encoding") {
        Some(_) => Cow::Owned(chunks(body).0),
        None => Cow::Borrowed(body),
    }
}

/// The content of a chunked body so far, and whether its last chunk is there.
fn chunks(mut body: &[u8]) -> (Vec<u8>, bool) {
    let mut content = Vec::new();
    while let Ok(httparse::Status::Complete((start, bytes))) = httparse::parse_chunk_size(body) {
        if bytes == 0 {
            return (content, true);
        }
        let rest = &body[start..];
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).min(rest.len());
        content.extend_from_slice(&rest[..bytes]);
        // A line break follows each chunk.
        body = rest.get(bytes + 2..).unwrap_or_default();
    }
    (content, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed() {
        for (text, authority, path) in [
            ("http://a", "a:4318", "/v1/traces"),
            ("http://a:1/", "a:1", "/v1/traces"),
            ("http://[::1]/x", "[::1]:4318", "/x/v1/traces"),
            ("http://[::1]:2/x/v1/traces", "[::1]:2", "/x/v1/traces"),
        ] {
            let (authority, path) = (authority.into(), path.into());
            assert_eq!(Endpoint::parse(text), Ok(Endpoint { authority, path }), "{text}");
        }
        for text in
            ["a", "ftp://a", "http://", "http://:1", "http://a b", "http://u@a", "http://a\r\nb"]
        {
            assert!(
                Endpoint::parse(text).is_err_and(|words| words.contains("use http://")),
                "{text}"
            );
        }
        assert!(Endpoint::parse("https://a").is_err_and(|words| words.contains("no TLS")));
    }

    #[test]
    fn the_end_of_an_answer_is_found_on_an_open_connection() {
        for whole in [
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
            "HTTP/1.1 503 Busy\r\ncontent-length:0\r\n\r\n",
            "HTTP/1.1 204 No Content\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n",
        ] {
            assert!(is_whole(whole.as_bytes()), "{whole}");
            let short = &whole[..whole.len() - 3];
            assert!(!is_whole(short.as_bytes()), "{short}");
        }
        assert!(!is_whole(b"HTTP/1.1 200 OK\r\n\r\n{}"), "it ends with the connection");
        let (content, is_whole) = chunks(b"2\r\nab\r\nffffffffffffffff\r\ncd");
        assert_eq!((content.as_slice(), is_whole), (&b"abcd"[..], false));
    }

    #[test]
    fn answers_of_collectors_are_understood() {
        let endpoint = Endpoint::parse("http://a").expect("valid");
        let read = |answer: &str| match endpoint.read(answer.as_bytes()) {
            Ok(said) => (true, false, said.unwrap_or_default()),
            Err(failure) => (false, failure.is_temporary, failure.words),
        };
        assert_eq!(read("HTTP/1.1 200 OK\r\n\r\n{}"), (true, false, String::new()));
        let partial = "{\"partialSuccess\":{\"rejectedSpans\":\"3\",\"errorMessage\":\"full\"}}";
        let (well, _, said) = read(&format!("HTTP/1.1 200 OK\r\n\r\n{partial}"));
        assert!(well && said.contains("\"3\" spans were rejected: full"), "{said}");
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let chunked = format!("{chunked}{:x}\r\n{partial}\r\n0\r\n\r\n", partial.len());
        assert!(read(&chunked).2.contains("\"3\" spans were rejected: full"));
        for (answer, is_temporary, word) in [
            ("HTTP/1.1 503 Busy\r\n\r\nlater", true, "status 503: later"),
            ("HTTP/1.1 429 Slow\r\n\r\n", true, "429"),
            ("HTTP/1.1 400 Bad\r\n\r\nno\u{7} spans", false, "status 400: no spans"),
            ("HTTP/1.1 404 Not Found\r\n\r\n", false, "404"),
            ("rubbish", true, "not HTTP/1.1"),
            ("", true, "not HTTP/1.1"),
        ] {
            let (well, temporary, words) = read(answer);
            assert!(
                !well && temporary == is_temporary && words.contains(word),
                "{answer}: {words}"
            );
        }
    }
}
