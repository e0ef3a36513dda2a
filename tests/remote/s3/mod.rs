//! The S3 backend over a bucket in this process, with faults, and over moto's server, an
//! independent implementation. The suite of all backends is [`crate::backends`].

mod failures;
mod measure;
mod moto;
mod service;
mod single;
mod tls;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::tier::remote::name::Prefix;
use kvtier::tier::remote::s3::{S3, S3Opts, Style, TlsOpts};
use kvtier::tier::remote::{Client, Gets, Puts, Remote, RemoteError};
use kvtier_testkit::fixtures::moto::{KEY, SECRET};
use kvtier_testkit::fixtures::ports::port;
use kvtier_testkit::fixtures::s3::{Bucket, Quirks, Req, Server};

use crate::backends::Backend;
use crate::clients::*;

fn opts(url: &str) -> S3Opts {
    S3Opts {
        url: url.to_string(),
        bucket: "kv-test".to_string(),
        region: "us-east-1".to_string(),
        style: Style::Path,
        prefix: Prefix::new("test").unwrap(),
        key: secret(KEY),
        secret: secret(SECRET),
        token: None,
        connect_ns: LONG,
        connections: 4,
        tls: TlsOpts::default(),
    }
}

fn open(opts: &S3Opts) -> S3 {
    S3::open(opts, Clock::real()).expect("opened")
}

fn client(url: &str) -> Box<dyn Client> {
    open(&opts(url)).client()
}

/// A client with one connection.
fn narrow(url: &str) -> Box<dyn Client> {
    open(&S3Opts { connections: 1, ..opts(url) }).client()
}

/// A bucket in this process.
pub struct OneBucket {
    bucket: Arc<Bucket>,
    server: Option<Server>,
    /// Reserved: no other program takes it while the server is stopped.
    port: u16,
}

impl Backend for OneBucket {
    type Fake = Server;
    const MAX_BYTES: usize = 64 << 20;
    const SCHEME: &'static str = "http";

    fn start() -> Option<OneBucket> {
        let bucket = Bucket::new(Quirks::default());
        let mut started = OneBucket { bucket, server: None, port: port() };
        started.start_again();
        Some(started)
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn objects(&self) -> usize {
        self.bucket.objects.lock().unwrap().len()
    }

    fn open(url: &str) -> Box<dyn Remote> {
        Box::new(open(&opts(url)))
    }

    fn past_end() -> Result<Vec<u8>, RemoteError> {
        Ok(Vec::new())
    }

    fn stop(&mut self) {
        self.server = None;
    }

    fn start_again(&mut self) {
        let bucket = self.bucket.clone();
        let server = Server::start_at(self.port, move |req, stream| bucket.answer(req, stream));
        self.server = Some(server);
    }

    fn malformed() -> Vec<&'static [u8]> {
        vec![
            &b"hello\r\n\r\n"[..],
            b"+OK\r\n\r\n",
            b"HTTP/2 200 OK\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
            b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n",
            // Too long, another range, two lengths, no length, an unknown encoding.
            b"HTTP/1.1 200 OK\r\nContent-Length: 2000000000\r\n\r\nxxx",
            b"HTTP/1.1 206 P\r\nContent-Length: 101\r\nContent-Range: bytes 0-100/101\r\n\r\nxxx",
            b"HTTP/1.1 206 P\r\nContent-Length: 3\r\nContent-Range: bytes 1-3/100\r\n\r\nxxx",
            b"HTTP/1.1 206 P\r\nContent-Length: 3\r\nContent-Range: bytes 0-2/100\r\n\r\nxxx",
            b"HTTP/1.1 206 P\r\nContent-Length: 4\r\nContent-Range: bytes 0-2/3\r\n\r\nxxxx",
            b"HTTP/1.1 206 P\r\nContent-Length: 3\r\n\r\nxxx",
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nxxxx",
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nxxx\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\nxxx",
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Encoding: gzip\r\n\r\nxxx",
            b"HTTP/1.1 206 P\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-2/3\r\n\r\n\
              4\r\nxxxx\r\n0\r\n\r\n",
            b"HTTP/1.1 206 P\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-2/3\r\n\r\nffffffffffffffff\r\n",
        ]
    }

    fn may_greet(reply: &[u8]) -> bool {
        reply[9] == b'2'
    }

    fn fake(reply: &'static [u8]) -> (Server, String) {
        let server = says(reply);
        let url = server.url();
        (server, url)
    }

    fn slow() -> Vec<(Server, String)> {
        let servers = [
            // A body that is never complete.
            drip(
                b"HTTP/1.1 206 P\r\nContent-Length: 90\r\nContent-Range: bytes 0-89/90\r\n\r\n",
                b"x",
                20,
                60,
            ),
            drip(b"HTTP/1.1 200 OK\r\nA: ", b"x", 1, usize::MAX),
            drip(b"HTTP/1.1 500 No\r\n\r\n", b"x", 20, usize::MAX),
            drip(b"", b"", 0, 0),
            // A chunked body that is never complete.
            drip(
                b"HTTP/1.1 206 P\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-89/90\r\n\r\n",
                b"1\r\nx\r\n",
                30,
                60,
            ),
        ];
        servers.into_iter().map(|server| (server.url(), server)).map(|(u, s)| (s, u)).collect()
    }

    fn is_slow_error(error: RemoteError) -> bool {
        // A head without an end exceeds its limit before the deadline.
        matches!(error, RemoteError::Timeout | RemoteError::Malformed)
    }
}

/// A server that answers every request with `say`.
fn always(say: impl Fn(&Req, &mut TcpStream) -> bool + Send + Sync + 'static) -> Server {
    Server::start(say)
}

fn says(bytes: &'static [u8]) -> Server {
    always(move |_, stream| stream.write_all(bytes).is_ok())
}

/// Answers with `bytes`, then `count` times with `again`, then with nothing.
fn drip(bytes: &'static [u8], again: &'static [u8], each: u64, count: usize) -> Server {
    always(move |_, stream| {
        stream.write_all(bytes).unwrap();
        for _ in 0..count {
            if stream.write_all(again).is_err() {
                return false;
            }
            std::thread::sleep(std::time::Duration::from_millis(each));
        }
        while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
        false
    })
}
