//! One server without faults.

use super::*;
use kvtier_testkit::fixtures::redis::wait_until;

#[test]
fn empty_oversized_and_foreign_values_affect_no_other_object() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let mut client = client(&server.url());
    // An empty object is stored, but counts as absent.
    assert_eq!(put_one(&mut *client, 4, 0), Ok(false));
    assert_eq!(get_one(&mut *client, 4, 0), Err(RemoteError::Absent));
    assert_eq!(get_one(&mut *client, 4, 100_000), Err(RemoteError::Absent));
    assert_eq!(lookup(&mut *client, &[4], LONG), [Err(RemoteError::Absent)]);
    let both = [(5, bytes_of(5, (8 << 20) + 1)), (6, bytes_of(6, 10))];
    assert_eq!(put_in(&mut *client, &both, LONG), [Err(RemoteError::TooLong), Ok(false)]);
    // The key holds a list, which is not an object.
    server.cli(&["lpush", &key(7), "x"]);
    assert_eq!(get_one(&mut *client, 7, 10), Err(RemoteError::Malformed));
    assert_eq!(get_one(&mut *client, 6, 10).unwrap(), bytes_of(6, 10));
    // An empty batch, and a batch that exceeds the pipeline window.
    assert!(lookup(&mut *client, &[], LONG).is_empty());
    let many: Vec<_> = (1000..1300).map(|n| (n, bytes_of(n, 100_000))).collect();
    assert!(put_in(&mut *client, &many, LONG).iter().all(|put| *put == Ok(false)));
    let wanted: Vec<_> = many.iter().map(|(n, _)| (*n, 0, 100_000)).collect();
    let got = get_at(&mut *client, &wanted, LONG);
    assert!(got.iter().zip(&many).all(|(got, (_, bytes))| got.as_ref() == Ok(bytes)));
    let numbers: Vec<u64> = (0..20_000).collect();
    let there = lookup(&mut *client, &numbers, LONG).iter().filter(|ask| ask.is_ok()).count();
    assert_eq!(there, 301);
}

#[test]
fn wrong_password_or_missing_permission_is_denied() {
    if !is_there() {
        return;
    }
    let server = Server::start(&["--requirepass", "hunter2"]);
    let with = |url: &str, password: Option<&str>| {
        let password = password.and_then(secret);
        open(&RedisOpts { password, ..opts(url) }).client()
    };
    let url = server.url();
    for password in [None, Some("Geheim123")] {
        let mut client = with(&url, password);
        let error = client.greet(at(LONG)).unwrap_err();
        assert_eq!(error.status(), kvtier::base::status::Status::Invalid);
        assert!(error.message().contains("denies"), "{error}");
        assert!(!error.to_string().contains("Geheim123"), "{error}");
        assert_eq!(put_one(&mut *client, 1, 10), Err(RemoteError::Denied));
        assert_eq!(get_one(&mut *client, 1, 10), Err(RemoteError::Denied));
    }
    let mut client = with(&url, Some("hunter2"));
    let said = client.greet(at(LONG)).unwrap();
    let is_named = |words: &str| words.starts_with("redis ") || words.starts_with("valkey ");
    assert!(is_named(&said.words) && said.words.ends_with("standalone"), "{said:?}");
    assert_eq!(said.warnings.len(), 1, "{said:?}");
    assert_eq!(put_one(&mut *client, 1, 10), Ok(false));
    // A user with read permission for our prefix only.
    let cli = |args: &[&str]| server.cli(&[&["-a", "hunter2", "--no-auth-warning"], args].concat());
    let rule = ["acl", "setuser", "kv", "on", ">pw", "%R~test/*", "+get", "+strlen", "+setnx"];
    assert_eq!(cli(&rule), "OK");
    let mut reader = with(&format!("redis://kv@127.0.0.1:{}", server.port), Some("pw"));
    assert_eq!(get_one(&mut *reader, 1, 100_000).unwrap(), bytes_of(1, 10));
    assert_eq!(put_one(&mut *reader, 2, 10), Err(RemoteError::Denied));
    assert_eq!(get_one(&mut *reader, 1, 10), Err(RemoteError::Denied));
    assert_eq!(lookup(&mut *reader, &[1], LONG), [Ok(10)]);
    let said = reader.greet(at(LONG)).unwrap();
    assert!(is_named(&said.words) && said.warnings.len() == 1, "{said:?}");
    // Databases are separate.
    let mut other = with(&format!("{url}/3"), Some("hunter2"));
    assert_eq!(get_one(&mut *other, 1, 10), Err(RemoteError::Absent));
    let mut none = with(&format!("{url}/999"), Some("hunter2"));
    assert!(put_one(&mut *none, 1, 10).is_err());
}

#[test]
fn server_without_hello_and_unlink_is_supported() {
    if !is_there() {
        return;
    }
    let old = ["--rename-command", "HELLO", "", "--rename-command", "UNLINK", ""];
    let server = Server::start(&[&old[..], &["--requirepass", "hunter2"]].concat());
    let wrong = RedisOpts { password: secret("wrong"), ..opts(&server.url()) };
    let error = open(&wrong).client().greet(at(LONG)).unwrap_err();
    assert!(error.message().contains("refused") && !error.message().contains("wrong"), "{error}");
    let good = RedisOpts { password: secret("hunter2"), ..opts(&format!("{}/2", server.url())) };
    let mut client = open(&good).client();
    client.greet(at(LONG)).unwrap();
    assert_eq!(put_one(&mut *client, 1, 100_000), Ok(false));
    assert_eq!(put_one(&mut *client, 1, 100_000), Ok(true));
    assert_eq!(get_one(&mut *client, 1, 100_000).unwrap(), bytes_of(1, 100_000));
    assert_eq!(get_one(&mut *client, 2, 100_000), Err(RemoteError::Absent));
    let mut queries = Queries::default();
    queries.name(name(1));
    client.remove(&mut queries, at(LONG));
    assert!(queries.items[0].result.is_ok());
    assert_eq!(lookup(&mut *client, &[1], LONG), [Err(RemoteError::Absent)]);
}

#[test]
fn full_read_only_or_unreplicated_server_rejects_puts() {
    if !is_there() {
        return;
    }
    let server = Server::start(&["--maxmemory", "6mb", "--maxmemory-policy", "noeviction"]);
    let living = |ttl_s: u64| open(&RedisOpts { ttl_s, ..opts(&server.url()) }).client();
    let mut long = living(3600);
    assert_eq!(put_one(&mut *long, 1, 10), Ok(false));
    assert_eq!(lookup(&mut *long, &[1], LONG), [Ok(10)]);
    let left_s: u64 = server.cli(&["ttl", &key(1)]).parse().expect("a time");
    assert!((1..=3600).contains(&left_s), "{left_s}");
    let mut short = living(1);
    assert_eq!(put_one(&mut *short, 2, 10), Ok(false));
    wait_until("it expired", || lookup(&mut *short, &[2], LONG) == [Err(RemoteError::Absent)]);
    let mut client = client(&server.url());
    assert!(client.greet(at(LONG)).unwrap().warnings[0].contains("evicts nothing"));
    let items: Vec<_> = (10..30).map(|n| (n, bytes_of(n, 1 << 20))).collect();
    let put = put_in(&mut *client, &items, LONG);
    assert!(put.contains(&Err(RemoteError::Full)) && put.contains(&Ok(false)), "{put:?}");
    for (put, (n, bytes)) in put.iter().zip(&items) {
        let want = if put.is_ok() { Ok(bytes.clone()) } else { Err(RemoteError::Absent) };
        assert!(get_one(&mut *client, *n, 1 << 20) == want, "{n}");
    }
    server.cli(&["config", "set", "maxmemory", "0"]);
    server.cli(&["replicaof", "127.0.0.1", "1"]);
    assert_eq!(put_one(&mut *client, 2, 10), Err(RemoteError::ReadOnly));
    assert!(client.greet(at(LONG)).unwrap().warnings[0].contains("replica"));
    server.cli(&["replicaof", "no", "one"]);
    // The server has no replica: no put counts as stored.
    let waiting = RedisOpts { wait: 1, ..opts(&server.url()) };
    // The clock stands still: the timeout of `WAIT` at the server ends, the client's deadline does
    // not.
    let clock = Clock::manual(1);
    let mut waiting = Redis::open(&waiting, clock.clone()).expect("opened").client();
    let items = [(3, bytes_of(3, 10)), (4, bytes_of(4, 10))];
    let put = put_by(&mut *waiting, &items, || clock.now_ns() + 4000 * MS);
    assert_eq!(put, [Err(RemoteError::Busy); 2]);
    assert_eq!(get_one(&mut *client, 3, 10).unwrap(), bytes_of(3, 10));
    let got = get_by(&mut *waiting, &[(3, 0, 10)], || clock.now_ns() + LONG);
    assert_eq!(got, [Ok(bytes_of(3, 10))]);
}
