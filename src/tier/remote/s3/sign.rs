//! Signatures of requests (AWS signature version 4). Bodies are not covered: readers verify stored
//! objects.

use sha2::{Digest, Sha256};

use crate::tier::remote::secret::{Secret, wipe};

const BLOCK_BYTES: usize = 64;
/// The hash of an empty body.
pub const NO_BODY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
/// Stands for the hash of a body that is not covered.
pub const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

/// The signed parts of a request.
pub struct Signed<'a> {
    pub method: &'a str,
    /// Escaped.
    pub path: &'a str,
    /// Escaped and sorted.
    pub query: &'a str,
    /// Names in lower case, with values, sorted by name.
    pub headers: &'a [(&'a str, &'a str)],
    /// The hash of the body, or its substitute.
    pub payload: &'a str,
}

/// Signs with one key.
pub struct Signer {
    key: String,
    secret: Secret,
    region: String,
    /// The key of a day, and the day.
    daily: Option<(String, Key)>,
}

/// A key that is wiped when it is dropped.
struct Key([u8; 32]);

impl Drop for Key {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}

impl Signer {
    /// `key`: the access key id; `region`: where it is valid.
    pub fn new(key: &str, secret: &Secret, region: &str) -> Signer {
        let (key, region) = (key.to_string(), region.to_string());
        Signer { key, secret: secret.clone(), region, daily: None }
    }

    /// The value of `Authorization:`; `stamp` is the [`stamp`](super::date::stamp) in `x-amz-date`.
    pub fn authorization(&mut self, request: &Signed, stamp: &str) -> String {
        let day = &stamp[..8];
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let names: Vec<&str> = request.headers.iter().map(|header| header.0).collect();
        let names = names.join(";");
        // It may contain a token.
        let mut text = canonical(request, &names).into_bytes();
        let hash = hex(&Sha256::digest(&text));
        wipe(&mut text);
        let text = format!("AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hash}");
        let signature = hex(&hmac(self.daily(day), text.as_bytes()).0);
        format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
            self.key
        )
    }

    fn daily(&mut self, day: &str) -> &[u8] {
        let known = self.daily.take().filter(|(of, _)| of == day);
        let (region, secret) = (self.region.as_bytes(), &self.secret);
        let daily = known.unwrap_or_else(|| {
            let mut first = [b"AWS4", secret.bytes()].concat();
            let of_day = hmac(&first, day.as_bytes());
            wipe(&mut first);
            let of_region = hmac(&of_day.0, region);
            let of_service = hmac(&of_region.0, b"s3");
            (day.to_string(), hmac(&of_service.0, b"aws4_request"))
        });
        &self.daily.insert(daily).1.0
    }
}

/// The canonical form of a request.
fn canonical(request: &Signed, names: &str) -> String {
    let Signed { method, path, query, headers, payload } = request;
    let mut text = format!("{method}\n{path}\n{query}\n");
    for (name, value) in *headers {
        text.push_str(&format!("{name}:{}\n", value.trim()));
    }
    text.push_str(&format!("\n{names}\n{payload}"));
    text
}

/// HMAC with SHA-256 (RFC 2104).
fn hmac(key: &[u8], text: &[u8]) -> Key {
    let mut block = [0; BLOCK_BYTES];
    if key.len() > BLOCK_BYTES {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    block.iter_mut().for_each(|byte| *byte ^= 0x36);
    let inner = Sha256::new().chain_update(block).chain_update(text).finalize();
    block.iter_mut().for_each(|byte| *byte ^= 0x36 ^ 0x5c);
    let outer = Sha256::new().chain_update(block).chain_update(inner).finalize();
    wipe(&mut block);
    Key(outer.into())
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::remote::s3::date::stamp;

    /// RFC 4231, cases 1, 2, 3 and 6.
    #[test]
    fn hmac_matches_published_vectors() {
        let of = |key: &[u8], text: &[u8]| hex(&hmac(key, text).0);
        let wanted = "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7";
        assert_eq!(of(&[0x0b; 20], b"Hi There"), wanted);
        let wanted = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(of(b"Jefe", b"what do ya want for nothing?"), wanted);
        let wanted = "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe";
        assert_eq!(of(&[0xaa; 20], &[0xdd; 50]), wanted);
        let wanted = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54";
        let text = b"Test Using Larger Than Block-Size Key - Hash Key First";
        assert_eq!(of(&[0xaa; 131], text), wanted);
        assert_eq!(hex(&Sha256::digest(b"")), NO_BODY);
    }

    fn example(request: &Signed) -> String {
        let secret = Secret::new(b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY").unwrap();
        let mut signer = Signer::new("AKIAIOSFODNN7EXAMPLE", &secret, "us-east-1");
        let first = signer.authorization(request, &stamp(1_369_353_600));
        // A cached key signs as a fresh one; the key of another day does not.
        assert_ne!(signer.authorization(request, &stamp(1_369_353_600 + 86400)), first);
        assert_eq!(signer.authorization(request, &stamp(1_369_353_600)), first);
        first
    }

    /// The examples in Amazon's documentation of signatures in headers.
    #[test]
    fn signatures_match_published_examples() {
        let request = Signed {
            method: "GET",
            path: "/test.txt",
            query: "",
            headers: &[
                ("host", "examplebucket.s3.amazonaws.com"),
                ("range", "bytes=0-9"),
                ("x-amz-content-sha256", NO_BODY),
                ("x-amz-date", "20130524T000000Z"),
            ],
            payload: NO_BODY,
        };
        assert_eq!(
            example(&request),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
        let request = Signed {
            method: "GET",
            path: "/",
            query: "max-keys=2&prefix=J",
            headers: &[
                ("host", "examplebucket.s3.amazonaws.com"),
                ("x-amz-content-sha256", NO_BODY),
                ("x-amz-date", "20130524T000000Z"),
            ],
            payload: NO_BODY,
        };
        let signed = example(&request);
        let wanted = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7";
        assert!(signed.ends_with(wanted), "{signed}");
    }
}
