//! The seal of a cell: 64 bits that bind its planes to its identity. The cell table keeps the seal,
//! so that a cell that is read is verified against its full identity without its header.

use crate::base::checksum::{Xxh3, xxh3};

use crate::format::keys::{Fingerprint, Key};

/// Plane of keys.
pub const PLANE_K: u16 = 1;
/// Plane of values.
pub const PLANE_V: u16 = 2;
/// Plane of a sparse policy; its id names the policy.
pub const PLANE_META: u16 = 3;
/// Plane of a recurrent state.
pub const PLANE_STATE: u16 = 4;

/// Most planes of one cell.
pub const MAX_PLANES: usize = 16;

/// A stored plane: kind, length, and checksum of its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plane {
    /// [`PLANE_K`] and so on; unknown kinds are stored unchanged.
    pub kind: u16,
    /// Number among planes of its kind.
    pub id: u16,
    /// Version of its content.
    pub version: u32,
    /// Stored bytes.
    pub bytes: u64,
    /// Checksum of the stored bytes, as `base/checksum` defines it.
    pub sum: u64,
}

/// Identity of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Key of its chunk.
    pub key: Key,
    /// Fingerprint of the layout it was stored under.
    pub fingerprint: Fingerprint,
    /// Its layer.
    pub layer: u32,
    /// Valid tokens.
    pub valid_tokens: u32,
    /// Codec of its bytes; 0 = plain.
    pub codec: u16,
}

const FIXED_BYTES: usize = 80;
const PLANE_BYTES: usize = 24;

/// The seal of a cell: XXH3-64 of 80 bytes of identity and 24 bytes for each plane.
/// `docs/internals/formats.md` defines the bytes.
pub fn seal(identity: &Identity, planes: impl ExactSizeIterator<Item = Plane>) -> u64 {
    let mut bytes = [0u8; FIXED_BYTES + 4 * PLANE_BYTES];
    bytes[..4].copy_from_slice(b"KVTC");
    bytes[4..6].copy_from_slice(&identity.codec.to_le_bytes());
    bytes[6..8].copy_from_slice(&(planes.len() as u16).to_le_bytes());
    bytes[8..40].copy_from_slice(&identity.key.0);
    bytes[40..72].copy_from_slice(&identity.fingerprint.0);
    bytes[72..76].copy_from_slice(&identity.layer.to_le_bytes());
    bytes[76..80].copy_from_slice(&identity.valid_tokens.to_le_bytes());
    // Most cells have two planes and take one call. More planes use the streaming form, which gives
    // the same sum.
    let mut used = FIXED_BYTES;
    let mut long: Option<Xxh3> = None;
    for plane in planes {
        if used == bytes.len() {
            long.get_or_insert_default().update(&bytes);
            used = 0;
        }
        let at = &mut bytes[used..used + PLANE_BYTES];
        at[..2].copy_from_slice(&plane.kind.to_le_bytes());
        at[2..4].copy_from_slice(&plane.id.to_le_bytes());
        at[4..8].copy_from_slice(&plane.version.to_le_bytes());
        at[8..16].copy_from_slice(&plane.bytes.to_le_bytes());
        at[16..].copy_from_slice(&plane.sum.to_le_bytes());
        used += PLANE_BYTES;
        if used < bytes.len() && used + PLANE_BYTES > bytes.len() {
            long.get_or_insert_default().update(&bytes[..used]);
            used = 0;
        }
    }
    match long {
        None => xxh3(&bytes[..used]),
        Some(mut long) => {
            long.update(&bytes[..used]);
            long.finish()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            key: Key([7; 32]),
            fingerprint: Fingerprint([9; 32]),
            layer: 3,
            valid_tokens: 256,
            codec: 0,
        }
    }

    fn plane(i: u64) -> Plane {
        Plane { kind: i as u16 + 1, id: 5, version: 6, bytes: 4096 + i, sum: 77 * i }
    }

    /// Field after field, as `docs/internals/formats.md` defines it.
    fn plain(identity: &Identity, planes: &[Plane]) -> u64 {
        let mut all = b"KVTC".to_vec();
        all.extend(identity.codec.to_le_bytes());
        all.extend((planes.len() as u16).to_le_bytes());
        all.extend(identity.key.0);
        all.extend(identity.fingerprint.0);
        all.extend(identity.layer.to_le_bytes());
        all.extend(identity.valid_tokens.to_le_bytes());
        for p in planes {
            all.extend(p.kind.to_le_bytes());
            all.extend(p.id.to_le_bytes());
            all.extend(p.version.to_le_bytes());
            all.extend(p.bytes.to_le_bytes());
            all.extend(p.sum.to_le_bytes());
        }
        xxhash_rust::xxh3::xxh3_64(&all)
    }

    #[test]
    fn seal_agrees_with_its_definition_for_any_number_of_planes() {
        for n in 0..=MAX_PLANES as u64 {
            let planes: Vec<Plane> = (0..n).map(plane).collect();
            assert_eq!(
                seal(&identity(), planes.iter().copied()),
                plain(&identity(), &planes),
                "{n}"
            );
        }
    }

    #[test]
    fn every_field_changes_the_seal() {
        let planes = [plane(0), plane(1)];
        let of = |w: Identity, p: [Plane; 2]| seal(&w, p.into_iter());
        let mut key = identity();
        key.key.0[31] ^= 1;
        let mut seals = vec![
            of(identity(), planes),
            of(key, planes),
            of(Identity { fingerprint: Fingerprint([8; 32]), ..identity() }, planes),
            of(Identity { layer: 4, ..identity() }, planes),
            of(Identity { valid_tokens: 255, ..identity() }, planes),
            of(Identity { codec: 1, ..identity() }, planes),
            of(identity(), [planes[1], planes[0]]),
            of(identity(), [planes[0], Plane { kind: 9, ..planes[1] }]),
            of(identity(), [planes[0], Plane { id: 9, ..planes[1] }]),
            of(identity(), [planes[0], Plane { version: 9, ..planes[1] }]),
            of(identity(), [planes[0], Plane { bytes: 9, ..planes[1] }]),
            of(identity(), [planes[0], Plane { sum: 9, ..planes[1] }]),
            seal(&identity(), [planes[0]].into_iter()),
        ];
        let n = seals.len();
        seals.sort_unstable();
        seals.dedup();
        assert_eq!(seals.len(), n);
    }
}
