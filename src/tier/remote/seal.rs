//! Objects that are encrypted and authenticated by the client. A server can neither read nor
//! replace them. It can lose them, and see their lengths and access times.
//!
//! A sealed object is an envelope, then frames of 256 KiB with a tag each: AES-256-GCM. Every
//! object has a key of its own, derived from the secret, random bytes of the envelope, and the
//! name. The nonce is the number of the frame and whether it is the last. All frames are bound to
//! envelope and name. No byte of an object is returned before all of it was verified.

mod client;

use std::ops::Range;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::tier::remote::name::HASH_BYTES;
use crate::tier::remote::seal::client::{ROUND_BYTES, SealedClient};
use crate::tier::remote::secret::{Secret, wipe};
use crate::tier::remote::{Caps, Client, Name, Remote, Tally};

/// Bytes before the first frame.
pub const ENVELOPE_BYTES: usize = 64;
/// Plain bytes of a frame; the last one may be shorter.
pub const FRAME_BYTES: usize = 256 << 10;
/// Bytes of the tag at the end of each frame.
pub const TAG_BYTES: usize = 16;
/// Random bytes of an envelope.
pub const RANDOM_BYTES: usize = 16;
/// Shortest secret.
pub const MIN_SECRET_BYTES: usize = 32;
/// Most plain bytes of an object: the whole object is in memory while it is verified.
pub const MAX_BYTES: u64 = 64 << 20;

const MAGIC: &[u8; 4] = b"KVTO";
const VERSION: u16 = 1;
const AES_256: u16 = 1;
const CONTEXT: &str = "kvtier 2026-11-23 v1 object seal";
/// Bytes of the associated data of a frame: the envelope, then the name.
const BOUND_BYTES: usize = ENVELOPE_BYTES + 8 + HASH_BYTES;

/// Length of the sealed object with `plain` plain bytes.
pub fn sealed_bytes(plain: u64) -> u64 {
    let frames = plain.div_ceil(FRAME_BYTES as u64).max(1);
    plain.saturating_add(ENVELOPE_BYTES as u64).saturating_add(frames * TAG_BYTES as u64)
}

/// Plain bytes of a sealed object of that length; None = no sealed object has it.
pub fn plain_bytes(sealed: u64) -> Option<u64> {
    let body = sealed.checked_sub(ENVELOPE_BYTES as u64)?;
    let frames = body.div_ceil((FRAME_BYTES + TAG_BYTES) as u64);
    let plain = body.checked_sub(frames * TAG_BYTES as u64)?;
    (sealed_bytes(plain) == sealed).then_some(plain)
}

/// Range in the sealed object of plain bytes from `plain` on, at most `max_bytes` and within one frame.
pub fn place_of(plain: u64, max_bytes: u64) -> Range<usize> {
    let (frame, within) = (plain / FRAME_BYTES as u64, plain % FRAME_BYTES as u64);
    let from = ENVELOPE_BYTES as u64 + frame * (FRAME_BYTES + TAG_BYTES) as u64 + within;
    let count = max_bytes.min(FRAME_BYTES as u64 - within);
    from as usize..(from + count) as usize
}

/// Encrypts objects, and decrypts them.
pub struct Sealer(Secret);

impl Sealer {
    /// Uses a secret. SPEC = it is too short.
    pub fn new(secret: &Secret) -> Result<Sealer> {
        if secret.bytes().len() < MIN_SECRET_BYTES {
            fail!(
                Spec,
                "the secret \"seal\" has {} bytes: at least {MIN_SECRET_BYTES} random bytes are needed",
                secret.bytes().len()
            );
        }
        Ok(Sealer(secret.clone()))
    }

    /// Encrypts an object in place. Its plain bytes are at their places in memory as long as the
    /// sealed object. The random bytes must be new for every object. False = no object has that
    /// length.
    pub fn seal(&self, name: &Name, random: [u8; RANDOM_BYTES], object: &mut [u8]) -> bool {
        let Some(plain) = plain_bytes(object.len() as u64) else { return false };
        let (envelope, body) = object.split_at_mut(ENVELOPE_BYTES);
        envelope.copy_from_slice(&envelope_of(plain, random));
        let bound = bound_to(envelope, name);
        let Some(key) = self.key(name, &random) else { return false };
        let frames = body.chunks_mut(FRAME_BYTES + TAG_BYTES);
        let last = frames.len().saturating_sub(1);
        frames.enumerate().all(|(number, frame)| {
            let (text, tag) = frame.split_at_mut(frame.len() - TAG_BYTES);
            let nonce = nonce_of(number, number == last);
            let sealed = key.seal_in_place_separate_tag(nonce, Aad::from(bound), text);
            sealed.map(|made| tag.copy_from_slice(made.as_ref())).is_ok()
        })
    }

    /// Decrypts an object in place; returns the number of plain bytes, which are at their places
    /// then. None = it was not sealed under that name; the memory has no valid content then.
    pub fn open(&self, name: &Name, object: &mut [u8]) -> Option<u64> {
        let plain = plain_bytes(object.len() as u64)?;
        let (envelope, body) = object.split_at_mut(ENVELOPE_BYTES);
        let random = random_of(envelope, plain)?;
        let bound = bound_to(envelope, name);
        let key = self.key(name, &random)?;
        let frames = body.chunks_mut(FRAME_BYTES + TAG_BYTES);
        let last = frames.len().saturating_sub(1);
        for (number, frame) in frames.enumerate() {
            let (text, tag) = frame.split_at_mut(frame.len() - TAG_BYTES);
            let tag = Tag::try_from(&*tag).ok()?;
            let nonce = nonce_of(number, number == last);
            key.open_in_place_separate_tag(nonce, Aad::from(bound), tag, text, 0..).ok()?;
        }
        Some(plain)
    }

    fn key(&self, name: &Name, random: &[u8; RANDOM_BYTES]) -> Option<LessSafeKey> {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&(self.0.bytes().len() as u64).to_le_bytes());
        hasher.update(self.0.bytes());
        hasher.update(random);
        hasher.update(&name.tenant.to_le_bytes());
        hasher.update(&name.hash);
        let mut key = *hasher.finalize().as_bytes();
        let made = UnboundKey::new(&AES_256_GCM, &key);
        wipe(&mut key);
        made.ok().map(LessSafeKey::new)
    }
}

/// Length of the whole object that begins with an envelope; None = it is no envelope.
pub fn whole_bytes(envelope: &[u8]) -> Option<u64> {
    let plain = u64::from_le_bytes(envelope.get(24..32)?.try_into().ok()?);
    random_of(envelope.get(..ENVELOPE_BYTES)?, plain)?;
    (plain <= MAX_BYTES).then(|| sealed_bytes(plain))
}

fn envelope_of(plain: u64, random: [u8; RANDOM_BYTES]) -> [u8; ENVELOPE_BYTES] {
    let mut envelope = [0; ENVELOPE_BYTES];
    envelope[..4].copy_from_slice(MAGIC);
    envelope[4..6].copy_from_slice(&VERSION.to_le_bytes());
    envelope[6..8].copy_from_slice(&AES_256.to_le_bytes());
    envelope[8..24].copy_from_slice(&random);
    envelope[24..32].copy_from_slice(&plain.to_le_bytes());
    envelope
}

/// The random bytes of the envelope of an object with `plain` plain bytes; None = it is another
/// object's.
fn random_of(envelope: &[u8], plain: u64) -> Option<[u8; RANDOM_BYTES]> {
    let random = envelope.get(8..24)?.try_into().ok()?;
    (envelope == envelope_of(plain, random)).then_some(random)
}

fn bound_to(envelope: &[u8], name: &Name) -> [u8; BOUND_BYTES] {
    let mut bound = [0; BOUND_BYTES];
    bound[..ENVELOPE_BYTES].copy_from_slice(envelope);
    bound[ENVELOPE_BYTES..][..8].copy_from_slice(&name.tenant.to_le_bytes());
    bound[ENVELOPE_BYTES + 8..].copy_from_slice(&name.hash);
    bound
}

/// The number of the frame suffices: each object has its own key.
fn nonce_of(number: usize, is_last: bool) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&(number as u64).to_le_bytes());
    nonce[8] = u8::from(is_last);
    Nonce::assume_unique_for_key(nonce)
}

/// A remote whose objects are encrypted.
pub struct Sealed {
    inner: Box<dyn Remote>,
    sealer: Arc<Sealer>,
}

impl Sealed {
    /// Encrypts the objects of another remote. Derive names with the same secret
    /// ([`crate::format::keys::object::ObjectKeys`]), so that they reveal nothing either.
    pub fn new(inner: Box<dyn Remote>, secret: &Secret) -> Result<Sealed> {
        Ok(Sealed { inner, sealer: Arc::new(Sealer::new(secret)?) })
    }
}

impl Remote for Sealed {
    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        // Most plain bytes that fit once they are encrypted.
        let fitting = |max_bytes: u64| {
            let frames = max_bytes.div_ceil((FRAME_BYTES + TAG_BYTES) as u64);
            max_bytes.saturating_sub(ENVELOPE_BYTES as u64 + frames * TAG_BYTES as u64)
        };
        Caps {
            preferred_bytes: fitting(caps.preferred_bytes).min(MAX_BYTES),
            max_bytes: fitting(caps.max_bytes).min(MAX_BYTES),
            ranges: true,
            client_bytes: caps.client_bytes + ROUND_BYTES,
            ..caps
        }
    }

    fn client(&self) -> Box<dyn Client> {
        let max_bytes = self.caps().max_bytes;
        Box::new(SealedClient::new(self.inner.client(), self.sealer.clone(), max_bytes))
    }

    fn tally(&self) -> Tally {
        self.inner.tally()
    }
}
