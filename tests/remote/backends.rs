//! The suite that every backend with a network protocol passes. Each backend supplies a
//! [`Backend`]; the macro at the end instantiates every test for it.

use kvtier::tier::remote::{Remote, RemoteError};
use kvtier_testkit::fixtures::ports::Refusing;
use kvtier_testkit::fixtures::redis::wait_until;
use kvtier_testkit::remote::conformance::{self, conform};

use crate::clients::*;

/// A server of one backend, and what distinguishes the backend.
pub trait Backend: Sized {
    /// A server with a fault; it ends when this is dropped.
    type Fake;
    /// Longest object.
    const MAX_BYTES: usize;
    /// Scheme of URLs without TLS.
    const SCHEME: &'static str;

    /// Starts a server; None = its program is not installed.
    fn start() -> Option<Self>;
    fn url(&self) -> String;
    /// Number of objects that the server has.
    fn objects(&self) -> usize;
    fn open(url: &str) -> Box<dyn Remote>;
    /// The result of a get that begins at the end of an object, or after it.
    fn past_end() -> Result<Vec<u8>, RemoteError>;
    /// Stops the server. No other program takes its port.
    fn stop(&mut self);
    fn start_again(&mut self);
    /// Replies that break the protocol or do not fit a get of 100 bytes.
    fn malformed() -> Vec<&'static [u8]>;
    /// Whether a greeting may accept such a malformed reply.
    fn may_greet(_reply: &[u8]) -> bool {
        false
    }
    /// A server that answers every request with `reply`, and its URL.
    fn fake(reply: &'static [u8]) -> (Self::Fake, String);
    /// Servers that never complete a reply in time.
    fn slow() -> Vec<(Self::Fake, String)>;
    /// Whether a get from a slow server may end with `error`.
    fn is_slow_error(error: RemoteError) -> bool;
}

/// Runs the conformance suite, all of it.
pub fn passes(remote: &dyn Remote) {
    let opts = conformance::Opts { patience_ns: LONG, ..conformance::Opts::default() };
    let passed = conform(remote, &opts).unwrap();
    assert_eq!(passed.len(), 12, "{passed:?}");
}

fn it_conforms_and_leaves_nothing<B: Backend>() {
    let Some(server) = B::start() else { return };
    passes(&*B::open(&server.url()));
    assert_eq!(server.objects(), 0);
}

fn objects_come_back_as_they_were_stored<B: Backend>() {
    let Some(server) = B::start() else { return };
    let mut client = B::open(&server.url()).client();
    let mut sizes = vec![1, 2, 4095, 4096, 4097, 16383, 16384, 16385, 65535, 65536, 65537, 262144];
    sizes.extend([1_000_003, B::MAX_BYTES - 1, B::MAX_BYTES]);
    let items: Vec<(u64, Vec<u8>)> =
        sizes.iter().zip(10..).map(|(&size, number)| (number, bytes_of(number, size))).collect();
    assert!(put_in(&mut *client, &items, LONG).iter().all(|put| *put == Ok(false)));
    let wanted: Vec<_> = items.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
    for (got, (n, bytes)) in get_at(&mut *client, &wanted, LONG).into_iter().zip(&items) {
        assert!(got.as_ref() == Ok(bytes), "{n}: {} bytes", bytes.len());
    }
    let numbers: Vec<u64> = items.iter().map(|item| item.0).collect();
    let lengths = lookup(&mut *client, &numbers, LONG);
    assert!(lengths.iter().zip(&sizes).all(|(length, &size)| *length == Ok(size as u64)));
    // The first writer wins.
    let other: Vec<_> = numbers.iter().map(|&n| (n, bytes_of(n + 1000, 5000))).collect();
    assert!(put_in(&mut *client, &other, LONG).iter().all(|put| *put == Ok(true)));
    assert_eq!(get_one(&mut *client, 12, 4095).unwrap(), items[2].1);
    // An object that was never there, and objects that were removed.
    assert_eq!(get_one(&mut *client, 5, 100), Err(RemoteError::Absent));
    assert_eq!(get_one(&mut *client, 5, 100_000), Err(RemoteError::Absent));
    assert_eq!(lookup(&mut *client, &[5], LONG), [Err(RemoteError::Absent)]);
    let numbers: Vec<u64> = (5..14).collect();
    assert!(remove(&mut *client, &numbers, LONG).iter().all(Result::is_ok));
    assert_eq!(get_one(&mut *client, 13, 4096), Err(RemoteError::Absent));
    assert_eq!(get_one(&mut *client, 14, 4097).unwrap(), items[4].1);
    // An object that is too long fails alone.
    let both = [(50, bytes_of(50, B::MAX_BYTES + 1)), (51, bytes_of(51, 10))];
    assert_eq!(put_in(&mut *client, &both, LONG), [Err(RemoteError::TooLong), Ok(false)]);
    assert!(lookup(&mut *client, &[], LONG).is_empty());
}

fn a_get_returns_the_part_that_its_room_covers<B: Backend>() {
    let Some(server) = B::start() else { return };
    let mut client = B::open(&server.url()).client();
    let whole = bytes_of(3, 300_000);
    assert_eq!(put_one(&mut *client, 3, 300_000), Ok(false));
    for (from, room, want) in [
        (0, 10, &whole[..10]),
        (0, 4096, &whole[..4096]),
        (0, 299_999, &whole[..299_999]),
        (0, 100_000, &whole[..100_000]),
        (0, 500_000, &whole[..]),
        (0, 0, &whole[..0]),
        (1, 0, &whole[..0]),
        (1, 1, &whole[1..2]),
        (4096, 70_000, &whole[4096..74_096]),
        (299_999, 9, &whole[299_999..]),
        (100_000, 9 << 20, &whole[100_000..]),
    ] {
        let got = get_at(&mut *client, &[(3, from, room)], LONG).remove(0);
        assert!(got.as_deref() == Ok(want), "{from} + {room}: {:?}", got.map(|got| got.len()));
    }
    let past = get_at(&mut *client, &[(3, 300_000, 9), (3, u64::MAX >> 1, 9)], LONG);
    assert_eq!(past, [B::past_end(), B::past_end()]);
}

fn concurrent_puts_of_a_name_have_one_winner<B: Backend>() {
    const THREADS: u64 = 6;
    const ROUNDS: u64 = 8;
    let Some(server) = B::start() else { return };
    let remote = B::open(&server.url());
    let size = |n: u64| 1 + (n as usize * 7919) % 150_000;
    // Each thread has its own content for every name.
    let content = move |n: u64, own: u64| bytes_of(n * 100 + own, size(n));
    let run = |own: u64| {
        let mut client = remote.client();
        let mut first = 0;
        for round in 0..ROUNDS {
            // Every thread has its own order.
            let numbers: Vec<u64> = (0..24).map(|n| round * 24 + (n + own * 6) % 24).collect();
            let items: Vec<_> = numbers.iter().map(|&n| (n, content(n, own))).collect();
            let put = put_in(&mut *client, &items, LONG);
            let is_first: Vec<bool> = put.iter().map(|put| !put.expect("stored")).collect();
            let wanted: Vec<_> = numbers.iter().map(|&n| (n, 0, size(n))).collect();
            let got = get_at(&mut *client, &wanted, LONG);
            for ((got, (n, bytes)), is_first) in got.iter().zip(&items).zip(is_first) {
                let got = got.as_ref().expect("an object");
                assert!(got == bytes || !is_first, "{n}: not the first content");
                first += usize::from(is_first);
            }
        }
        first
    };
    let firsts: usize = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..THREADS).map(|own| scope.spawn(move || run(own))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(firsts as u64, ROUNDS * 24, "each name has one first writer");
    let mut client = remote.client();
    for n in 0..ROUNDS * 24 {
        let got = get_one(&mut *client, n, size(n)).unwrap();
        assert!((0..THREADS).any(|own| got == content(n, own)), "{n}");
    }
}

fn a_malformed_reply_fails_its_request<B: Backend>() {
    for bytes in B::malformed() {
        let (_fake, url) = B::fake(bytes);
        let mut client = B::open(&url).client();
        let got = ends(|| get_at(&mut *client, &[(1, 0, 100)], LONG));
        assert_eq!(got, [Err(RemoteError::Malformed)], "{:?}", String::from_utf8_lossy(bytes));
        let greeted = ends(|| client.greet(at(2000 * MS)));
        assert!(greeted.is_err() || B::may_greet(bytes), "{:?}", String::from_utf8_lossy(bytes));
    }
}

fn a_slow_server_costs_no_more_than_the_deadline<B: Backend>() {
    for (number, (_fake, url)) in B::slow().into_iter().enumerate() {
        let mut client = B::open(&url).client();
        for _ in 0..2 {
            let got = ends(|| get_at(&mut *client, &[(1, 0, 100), (2, 0, 100)], 300 * MS));
            let is_slow = |got: &Result<_, _>| matches!(got, Err(e) if B::is_slow_error(*e));
            assert!(got.iter().all(is_slow), "{number}: {got:?}");
        }
        let many: Vec<_> = (0..20).map(|n| (n, bytes_of(n, 1 << 20))).collect();
        ends(|| put_in(&mut *client, &many, 300 * MS));
    }
}

fn an_unreachable_server_is_reported_before_the_deadline<B: Backend>() {
    let refusing = Refusing::new();
    let mut client = B::open(&format!("{}://{}", B::SCHEME, refusing.address())).client();
    let error = ends(|| client.greet(at(LONG))).unwrap_err();
    assert!(error.message().contains("refused"), "{error}");
    let mut client = B::open(&format!("{}://no-such-host.invalid", B::SCHEME)).client();
    let error = client.greet(at(LONG)).unwrap_err();
    assert!(error.message().contains("no-such-host.invalid"), "{error}");
    assert_eq!(get_one(&mut *client, 1, 10), Err(RemoteError::Unreachable));
}

fn a_client_recovers_when_its_server_comes_back<B: Backend>() {
    let Some(mut server) = B::start() else { return };
    let url = server.url();
    let mut client = B::open(&url).client();
    assert_eq!(put_one(&mut *client, 1, 1000), Ok(false));
    server.stop();
    for _ in 0..3 {
        let got = ends(|| get_at(&mut *client, &[(1, 0, 1000); 20], LONG));
        assert!(got.iter().all(|got| *got == Err(RemoteError::Unreachable)), "{url}: {got:?}");
    }
    server.start_again();
    wait_until("the client has recovered", || {
        put_in(&mut *client, &[(1, bytes_of(1, 1000))], LONG)[0].is_ok()
    });
    assert_eq!(get_one(&mut *client, 1, 1000).unwrap(), bytes_of(1, 1000));
}

/// Instantiates every test for one backend.
macro_rules! suite {
    ($module:ident, $feature:literal, $backend:ty) => {
        #[cfg(feature = $feature)]
        mod $module {
            suite!(@ $backend:
                it_conforms_and_leaves_nothing
                objects_come_back_as_they_were_stored
                a_get_returns_the_part_that_its_room_covers
                concurrent_puts_of_a_name_have_one_winner
                a_malformed_reply_fails_its_request
                a_slow_server_costs_no_more_than_the_deadline
                an_unreachable_server_is_reported_before_the_deadline
                a_client_recovers_when_its_server_comes_back
            );
        }
    };
    (@ $backend:ty: $($test:ident)*) => {
        $(#[test]
        fn $test() {
            super::$test::<$backend>();
        })*
    };
}

suite!(redis, "redis", crate::redis::OneServer);
suite!(s3, "s3", crate::s3::OneBucket);
