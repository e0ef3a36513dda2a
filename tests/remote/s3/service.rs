//! A service that runs already, such as that of `ffi-tests/swift.sh`. `KVTIER_S3` is its URL, a
//! bucket, a key and the secret, with spaces between; without it there is nothing to test.

use crate::backends::passes;

use super::*;

#[test]
fn running_service_conforms() {
    let Ok(given) = std::env::var("KVTIER_S3") else { return println!("SKIP: no KVTIER_S3") };
    let words: Vec<&str> = given.split(' ').collect();
    let &[url, bucket, key, text] = &words[..] else { panic!("KVTIER_S3 has four words") };
    // One request at a time: Swift stores both of two puts of one name that it receives at once.
    let opts = S3Opts {
        bucket: bucket.into(),
        key: secret(key),
        secret: secret(text),
        connections: 1,
        ..opts(url)
    };
    let remote = open(&opts);
    let said = remote.client().greet(at(LONG)).unwrap();
    println!("{}, {:?}", said.words, said.warnings);
    passes(&remote);
    let mut forger = open(&S3Opts { secret: secret(SECRET), ..opts }).client();
    let error = forger.greet(at(LONG)).unwrap_err().to_string();
    assert!(error.contains("SignatureDoesNotMatch") && !error.contains(SECRET), "{error}");
    assert_eq!(get_one(&mut *forger, 1, 10), Err(RemoteError::Denied));
}
