//! Objects that are encrypted before they leave, and checked by that when they come back: whoever
//! keeps them can neither read them nor put others in their place. What remains to him: to lose
//! objects, to see how long they are and when they are asked for.
//!
//! A sealed object is an envelope, then frames of 256 KiB with a tag each: AES-256-GCM. Every
//! object has a key of its own, derived from the secret, random bytes of the envelope, and the name;
//! the nonce is the number of the frame and whether it is the last one; all frames are bound to
//! envelope and name. Nothing of an object is given out before all of it was checked.

mod client;

use std::ops::Range;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::tier::remote::name::HASH_BYTES;
use crate::tier::remote::seal::client::{SealedClient, TURN_BYTES};
use crate::tier::remote::secret::{Secret, wipe};
use crate::tier::remote::{Caps, Client, Name, Remote, Tally};

/// Bytes before the first frame.
pub const ENVELOPE_BYTES: usize = 64;
/// Plain bytes of a frame; the last one may have fewer.
pub const FRAME_BYTES: usize = 256 << 10;
/// Bytes of a tag, which every frame ends with.
pub const TAG_BYTES: usize = 16;
/// Random bytes of an envelope.
pub const RANDOM_BYTES: usize = 16;
/// Fewest bytes of a secret.
pub const MIN_SECRET_BYTES: usize = 32;
/// Most plain bytes of an object: it is held as a whole while it is checked.
pub const MAX_BYTES: u64 = 64 << 20;

const MAGIC: &[u8; 4] = b"KVTO";
const VERSION: u16 = 1;
const AES_256: u16 = 1;
const CONTEXT: &str = "kvtier 2026-11-23 v1 object seal";
/// What frames are bound to: the envelope, then the name.
const BOUND_BYTES: usize = ENVELOPE_BYTES + 8 + HASH_BYTES;

/// How long an object of so many plain bytes is when it is sealed.
pub fn sealed_bytes(plain: u64) -> u64 {
    let frames = plain.div_ceil(FRAME_BYTES as u64).max(1);
    plain.saturating_add(ENVELOPE_BYTES as u64).saturating_add(frames * TAG_BYTES as u64)
}

/// How many plain bytes a sealed object has that is so long; None = none is.
pub fn plain_bytes(sealed: u64) -> Option<u64> {
    let body = sealed.checked_sub(ENVELOPE_BYTES as u64)?;
    let frames = body.div_ceil((FRAME_BYTES + TAG_BYTES) as u64);
    let plain = body.checked_sub(frames * TAG_BYTES as u64)?;
    (sealed_bytes(plain) == sealed).then_some(plain)
}

/// Where plain bytes from one on, at most so many, stand in a sealed object: those of a frame.
pub fn place_of(plain: u64, most: u64) -> Range<usize> {
    let (frame, within) = (plain / FRAME_BYTES as u64, plain % FRAME_BYTES as u64);
    let from = ENVELOPE_BYTES as u64 + frame * (FRAME_BYTES + TAG_BYTES) as u64 + within;
    let count = most.min(FRAME_BYTES as u64 - within);
    from as usize..(from + count) as usize
}

/// Seals objects, and opens them.
pub struct Sealer(Secret);

impl Sealer {
    /// By a secret. SPEC = it is too short to be one.
    pub fn new(secret: &Secret) -> Result<Sealer> {
        if secret.bytes().len() < MIN_SECRET_BYTES {
            fail!(
                Spec,
                "the secret \"seal\" has {} bytes: give it {MIN_SECRET_BYTES} random ones at least",
                secret.bytes().len()
            );
        }
        Ok(Sealer(secret.clone()))
    }

    /// Seals an object where it is: its plain bytes are at their places in memory that is as long
    /// as the sealed object. The random bytes must be new for every object. False = there is no
    /// object of that length.
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

    /// Opens an object where it is: how many plain bytes it has, which are at their places then.
    /// None = it is not what was sealed under that name; what the memory has is of no use then.
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

/// How long the whole object is of which an envelope is the first part; None = it is no envelope.
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

/// The random bytes of an envelope of an object with so many plain bytes; None = it is another's.
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

/// The key is this object's alone: numbers are enough.
fn nonce_of(number: usize, is_last: bool) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&(number as u64).to_le_bytes());
    nonce[8] = u8::from(is_last);
    Nonce::assume_unique_for_key(nonce)
}

/// A remote with objects that are sealed.
pub struct Sealed {
    inner: Box<dyn Remote>,
    sealer: Arc<Sealer>,
}

impl Sealed {
    /// Seals what goes to another remote. Names should be made with the same secret
    /// ([`crate::format::keys::object::ObjectKeys`]), so that they tell nothing, too.
    pub fn new(inner: Box<dyn Remote>, secret: &Secret) -> Result<Sealed> {
        Ok(Sealed { inner, sealer: Arc::new(Sealer::new(secret)?) })
    }
}

impl Remote for Sealed {
    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        // As many plain bytes as still fit when they are sealed.
        let fitting = |most: u64| {
            let frames = most.div_ceil((FRAME_BYTES + TAG_BYTES) as u64);
            most.saturating_sub(ENVELOPE_BYTES as u64 + frames * TAG_BYTES as u64)
        };
        Caps {
            preferred_bytes: fitting(caps.preferred_bytes).min(MAX_BYTES),
            max_bytes: fitting(caps.max_bytes).min(MAX_BYTES),
            ranges: true,
            client_bytes: caps.client_bytes + TURN_BYTES,
            ..caps
        }
    }

    fn client(&self) -> Box<dyn Client> {
        let most = self.caps().max_bytes;
        Box::new(SealedClient::new(self.inner.client(), self.sealer.clone(), most))
    }

    fn tally(&self) -> Tally {
        self.inner.tally()
    }
}
