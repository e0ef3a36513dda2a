//! The Redis backend over servers and clusters that the tests start. The suite of all backends is
//! [`crate::backends`].

mod cluster;
mod conform;
mod failures;
mod measure;
mod replicas;
mod single;
#[cfg(feature = "tls")]
mod tls;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use kvtier::base::clock::Clock;
use kvtier::tier::remote::name::Prefix;
use kvtier::tier::remote::redis::{Redis, RedisOpts};
use kvtier::tier::remote::{Client, Gets, Puts, Queries, Remote, RemoteError};
use kvtier_testkit::fixtures::redis::{Server, is_there};

use crate::backends::Backend;
use crate::clients::*;

fn opts(url: &str) -> RedisOpts {
    RedisOpts { connect_ns: LONG, ..RedisOpts::new(url, Prefix::new("test").unwrap()) }
}

fn open(opts: &RedisOpts) -> Redis {
    Redis::open(opts, Clock::real()).expect("opened")
}

fn client(url: &str) -> Box<dyn Client> {
    open(&opts(url)).client()
}

/// One server.
pub struct OneServer(Server);

impl Backend for OneServer {
    type Fake = String;
    const MAX_BYTES: usize = 8 << 20;
    const SCHEME: &'static str = "redis";

    fn start() -> Option<OneServer> {
        is_there().then(|| OneServer(Server::start(&[])))
    }

    fn url(&self) -> String {
        self.0.url()
    }

    fn objects(&self) -> usize {
        self.0.cli(&["dbsize"]).parse().expect("a number")
    }

    fn open(url: &str) -> Box<dyn Remote> {
        Box::new(open(&opts(url)))
    }

    fn past_end() -> Result<Vec<u8>, RemoteError> {
        Err(RemoteError::Absent)
    }

    fn stop(&mut self) {
        self.0.kill();
    }

    fn start_again(&mut self) {
        self.0.restart();
    }

    fn malformed() -> Vec<&'static [u8]> {
        vec![
            &b"hello\r\n"[..],
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"\0\0\0\0\r\n",
            b":12\r\n",
            b"+OK\r\n",
            b"*1\r\n$1\r\nx\r\n",
            b"$2000000000\r\nxxxxxxxxxxxxxxx",
            b"$101\r\n",
            b"$-5\r\n",
            b"$3\r\nabcdef",
            b"%1\r\n+a\r\n+b\r\n",
            b"-WHATEVER it means\r\n",
        ]
    }

    fn fake(reply: &'static [u8]) -> (String, String) {
        let url = lies(reply);
        (url.clone(), url)
    }

    fn slow() -> Vec<(String, String)> {
        // Sends `count` bytes, one by one, then nothing.
        let drip = |bytes: &'static [u8], each: u64, count: usize| {
            liar(move |stream, _| {
                for byte in bytes.iter().cycle().take(count) {
                    if stream.write_all(&[*byte]).is_err() {
                        return;
                    }
                    std::thread::sleep(std::time::Duration::from_millis(each));
                }
            })
        };
        let urls = [
            // A value that is never complete.
            drip(b"$90\r\n0123456789", 20, 60),
            drip(b">1\r\n+x\r\n", 1, usize::MAX),
            // A line that never ends.
            drip(b"+xxxxxxxx", 3, 1000),
            liar(|_, _| {}),
            // Unsolicited messages, as fast as possible.
            liar(|stream, _| while stream.write_all(&b">1\r\n+x\r\n".repeat(1000)).is_ok() {}),
        ];
        urls.into_iter().map(|url| (url.clone(), url)).collect()
    }

    fn is_slow_error(error: RemoteError) -> bool {
        matches!(error, RemoteError::Timeout | RemoteError::Unreachable)
    }
}

/// A server that answers the greeting as it should, and every other request with `say`.
fn liar(say: impl Fn(&mut TcpStream, usize) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let say = std::sync::Arc::new(say);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, say) = (stream.unwrap(), say.clone());
            std::thread::spawn(move || {
                let mut bytes = vec![0; 65536];
                let mut turn = 0;
                while let Ok(count) = stream.read(&mut bytes) {
                    if count == 0 {
                        return;
                    }
                    if bytes[..count].windows(5).any(|word| word == b"HELLO") {
                        stream.write_all(b"%1\r\n+server\r\n+redis\r\n").unwrap();
                    } else {
                        say(&mut stream, turn);
                        turn += 1;
                    }
                }
            });
        }
    });
    url
}

fn lies(bytes: &'static [u8]) -> String {
    liar(move |stream, _| drop(stream.write_all(bytes)))
}

/// Decides about bytes that pass a relay: whether they are a reply, how many passed in that
/// direction before, and the bytes. False = the relay cuts the connection.
type Fate = std::sync::Arc<dyn Fn(bool, u64, &mut Vec<u8>) -> bool + Send + Sync>;

/// Starts a relay to a port of this machine; returns the port to connect to.
fn between(to: u16, fate: Fate) -> u16 {
    use std::net::Shutdown;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let pass = |mut from: TcpStream, mut into: TcpStream, back: bool, fate: Fate| {
        std::thread::spawn(move || {
            let (mut gone, mut bytes) = (0, vec![0; 4096]);
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                let mut some = bytes[..count].to_vec();
                if !fate(back, gone, &mut some) || into.write_all(&some).is_err() {
                    break;
                }
                gone += count as u64;
            }
            let _ = from.shutdown(Shutdown::Both);
            let _ = into.shutdown(Shutdown::Both);
        });
    };
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let near = near.unwrap();
            // Without a server the relay closes the connection.
            let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else { continue };
            let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            pass(near, far, false, fate.clone());
            pass(far2, near2, true, fate.clone());
        }
    });
    port
}
