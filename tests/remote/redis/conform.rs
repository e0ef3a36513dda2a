//! The conformance suite of remotes, run on Redis servers.

use kvtier_testkit::remote::conformance::{self, conform};

use super::*;
use crate::backends::passes;
use kvtier_testkit::fixtures::redis::cluster;

#[test]
fn a_put_that_waits_for_missing_replicas_is_not_stored() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    // The server has no replicas to wait for: no put counts as stored.
    let waiting = open(&RedisOpts { wait: 1, ..opts(&server.url()) });
    let opts = conformance::Opts { patience_ns: 500 * MS, ..conformance::Opts::default() };
    assert!(conform(&waiting, &opts).is_err());
}

#[test]
fn a_cluster_conforms() {
    if !is_there() {
        return;
    }
    let nodes = cluster();
    let url = nodes[4].url();
    passes(&open(&RedisOpts { cluster: true, ..opts(&url) }));
    // Reads from replicas miss no stored object and return no removed object.
    let replicas = open(&RedisOpts { cluster: true, replicas: true, wait: 1, ..opts(&url) });
    passes(&replicas);
    assert!(nodes.iter().all(|node| node.cli(&["dbsize"]) == "0"));
}

#[cfg(feature = "seal")]
#[test]
fn sealed_objects_conform() {
    use kvtier::tier::remote::seal::{Sealed, sealed_bytes};

    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let secret = kvtier::tier::remote::secret::Secret::new(&[7; 32]).unwrap();
    let sealed = |url: &str| Sealed::new(Box::new(open(&opts(url))), &secret).unwrap();
    passes(&sealed(&server.url()));
    // The server stores ciphertext. An object that it modified is never returned.
    let mut client = sealed(&server.url()).client();
    assert_eq!(put_one(&mut *client, 1, 300_000), Ok(false));
    assert_eq!(server.cli(&["strlen", &key(1)]), sealed_bytes(300_000).to_string());
    assert_eq!(server.cli(&["getrange", &key(1), "0", "3"]), "KVTO");
    assert_eq!(get_one(&mut *client, 1, 300_000).unwrap(), bytes_of(1, 300_000));
    assert_eq!(
        get_at(&mut *client, &[(1, 270_000, 100)], LONG)[0],
        Ok(bytes_of(1, 300_000)[270_000..270_100].to_vec())
    );
    // 16 bytes: the ciphertext there differs with certainty.
    server.cli(&["setrange", &key(1), "290000", "xxxxxxxxxxxxxxxx"]);
    assert_eq!(get_one(&mut *client, 1, 300_000), Err(RemoteError::Damaged));
    assert_eq!(get_at(&mut *client, &[(1, 0, 10)], LONG), [Err(RemoteError::Damaged)]);
    // A sealed object under the name of another object.
    assert_eq!(put_one(&mut *client, 2, 5000), Ok(false));
    server.cli(&["rename", &key(2), &key(3)]);
    assert_eq!(get_one(&mut *client, 3, 5000), Err(RemoteError::Damaged));
}
