//! The identity of a namespace: everything that KV depends on, beside its tokens.

use super::{Fingerprint, Key, MAX_FIELD_BYTES, fields};
use crate::base::status::Result;
use crate::fail;

/// Most extra fields.
pub const MAX_EXTRA: usize = 64;
/// The lowest tag of an extra field.
pub const FIRST_EXTRA_TAG: u32 = 0x8000_0000;

const MODEL: u32 = 1;
const WEIGHTS: u32 = 2;
const LAYOUT: u32 = 3;
const LORA: u32 = 4;
const MEDIA: u32 = 5;
const SALT: u32 = 6;
const SHARD: u32 = 7;
const RECIPE: u32 = 8;

/// Part of the KV that this rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index, from 0.
    pub index: u32,
    /// Number of parts.
    pub count: u32,
}

/// A field of the engine's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extra<'a> {
    /// Tag, from [`FIRST_EXTRA_TAG`].
    pub tag: u32,
    /// Value, up to [`MAX_FIELD_BYTES`].
    pub value: &'a [u8],
}

/// The fields that are hashed into a namespace's key. An absent field differs from an empty one.
/// Values have up to [`MAX_FIELD_BYTES`] and are hashed unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Identity<'a> {
    /// Name of the model.
    pub model: Option<&'a [u8]>,
    /// Fingerprint of its weights.
    pub weights: Option<&'a [u8]>,
    /// The layout of its KV.
    pub layout: Option<Fingerprint>,
    /// Adapters that change the KV.
    pub lora: Option<&'a [u8]>,
    /// Digest of media that all sequences share.
    pub media: Option<&'a [u8]>,
    /// Separates a tenant's KV from that of others.
    pub salt: Option<&'a [u8]>,
    /// Absent if all ranks hold the same.
    pub shard: Option<Shard>,
    /// Canonical spec of how KV is computed and stored, if not exactly.
    pub recipe: Option<&'a [u8]>,
    /// Fields of the engine, in any order.
    pub extra: &'a [Extra<'a>],
}

impl Identity<'_> {
    /// The key of the namespace.
    pub fn key(&self) -> Result<Key> {
        self.check()?;
        let shard = self.shard.map(|shard| {
            let [a, b, c, d] = shard.index.to_le_bytes();
            let [e, f, g, h] = shard.count.to_le_bytes();
            [a, b, c, d, e, f, g, h]
        });
        let own = [
            (MODEL, self.model),
            (WEIGHTS, self.weights),
            (LAYOUT, self.layout.as_ref().map(|layout| layout.0.as_slice())),
            (LORA, self.lora),
            (MEDIA, self.media),
            (SALT, self.salt),
            (SHARD, shard.as_ref().map(|shard| shard.as_slice())),
            (RECIPE, self.recipe),
        ];
        let mut room = [Extra { tag: 0, value: &[] }; MAX_EXTRA];
        let extra = self.sorted(&mut room)?;
        let fields = own
            .iter()
            .filter_map(|&(tag, value)| Some((tag, value?)))
            .chain(extra.iter().map(|field| (field.tag, field.value)));
        for (tag, value) in fields.clone() {
            if value.len() > MAX_FIELD_BYTES {
                let bytes = value.len();
                fail!(Limit, "field {tag:#x} has {bytes} bytes; the limit is {MAX_FIELD_BYTES}");
            }
        }
        Ok(Key(fields::derive(fields::NAMESPACE, fields)))
    }

    fn check(&self) -> Result<()> {
        if let Some(Shard { index, count }) = self.shard.filter(|s| s.index >= s.count) {
            fail!(Invalid, "shard {index} of {count}: the index must be below the count");
        }
        if let Some(extra) = self.extra.iter().find(|e| e.tag < FIRST_EXTRA_TAG) {
            fail!(Invalid, "extra field {:#x}: tags start at {FIRST_EXTRA_TAG:#x}", extra.tag);
        }
        Ok(())
    }
}

impl<'a> Identity<'a> {
    /// The extra fields by tag.
    fn sorted<'b>(&self, room: &'b mut [Extra<'a>; MAX_EXTRA]) -> Result<&'b [Extra<'a>]> {
        let count = self.extra.len();
        let Some(sorted) = room.get_mut(..count) else {
            fail!(Limit, "{count} extra fields; the limit is {MAX_EXTRA}");
        };
        sorted.copy_from_slice(self.extra);
        sorted.sort_unstable_by_key(|field| field.tag);
        for (field, next) in sorted.iter().zip(sorted.iter().skip(1)) {
            if field.tag == next.tag {
                fail!(Invalid, "extra field {:#x} is given twice", field.tag);
            }
        }
        Ok(sorted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    type Value = Option<Vec<u8>>;

    /// An identity that owns its fields, by tag.
    fn key(values: &[Value; 6], shard: Option<(u32, u32)>, extra: &BTreeMap<u32, Vec<u8>>) -> Key {
        let extra: Vec<Extra> = extra.iter().map(|(&tag, value)| Extra { tag, value }).collect();
        let [model, weights, lora, media, salt, recipe] = values.each_ref().map(Option::as_deref);
        let shard = shard.map(|(index, count)| Shard { index, count });
        let layout = None;
        let identity =
            Identity { model, weights, layout, lora, media, salt, shard, recipe, extra: &extra };
        identity.key().expect("within limits")
    }

    fn value() -> impl Strategy<Value = Value> {
        proptest::option::of(proptest::collection::vec(0u8..2, 0..4))
    }

    fn extra() -> impl Strategy<Value = BTreeMap<u32, Vec<u8>>> {
        let value = proptest::collection::vec(0u8..2, 0..3);
        proptest::collection::btree_map(FIRST_EXTRA_TAG..FIRST_EXTRA_TAG + 4, value, 0..3)
    }

    fn shard() -> impl Strategy<Value = Option<(u32, u32)>> {
        proptest::option::of((0u32..2, 2u32..4))
    }

    proptest! {
        #[test]
        fn any_change_of_a_field_changes_the_key(
            mut values in proptest::array::uniform6(value()),
            other in value(),
            at in 0usize..6,
            shards in (shard(), shard()),
            extras in (extra(), extra()),
        ) {
            let before = key(&values, shards.0, &extras.0);
            prop_assert_eq!(before, key(&values, shards.0, &extras.0));
            let same = key(&values, shards.1, &extras.1) == before;
            prop_assert_eq!(same, shards.0 == shards.1 && extras.0 == extras.1);
            let same = values[at] == other;
            values[at] = other;
            prop_assert_eq!(key(&values, shards.0, &extras.0) == before, same);
        }

        #[test]
        fn bytes_that_move_to_the_next_field_change_the_key(
            bytes in proptest::collection::vec(any::<u8>(), 1..40),
            at in 0usize..5,
            cuts in (any::<usize>(), any::<usize>()),
        ) {
            let cut = |cut: usize| {
                let (left, right) = bytes.split_at(cut % (bytes.len() + 1));
                let mut values = [const { None }; 6];
                values[at] = Some(left.to_vec());
                values[at + 1] = Some(right.to_vec());
                key(&values, None, &BTreeMap::new())
            };
            let alike = cuts.0 % (bytes.len() + 1) == cuts.1 % (bytes.len() + 1);
            prop_assert_eq!(cut(cuts.0) == cut(cuts.1), alike);
        }

        #[test]
        fn the_order_of_extra_fields_means_nothing(extra in extra(), turn in 0usize..3) {
            let mut list: Vec<Extra> =
                extra.iter().map(|(&tag, value)| Extra { tag, value }).collect();
            let turn = turn % list.len().max(1);
            list.rotate_left(turn);
            let turned = Identity { extra: &list, ..Identity::default() }.key().expect("valid");
            prop_assert_eq!(turned, key(&[const { None }; 6], None, &extra));
        }
    }

    #[test]
    fn equal_bytes_in_different_fields_are_different_keys() {
        let mut keys: Vec<Key> = (0..6)
            .map(|at| {
                let mut values = [const { None }; 6];
                values[at] = Some(vec![0; 8]);
                key(&values, None, &BTreeMap::new())
            })
            .collect();
        keys.push(key(&[const { None }; 6], Some((0, 1)), &BTreeMap::new()));
        keys.push(key(
            &[const { None }; 6],
            None,
            &BTreeMap::from([(FIRST_EXTRA_TAG, vec![0; 8])]),
        ));
        keys.push(key(&[const { None }; 6], None, &BTreeMap::from([(u32::MAX, vec![0; 8])])));
        let layout = Some(Fingerprint([0; 32]));
        keys.push(Identity { layout, ..Identity::default() }.key().expect("valid"));
        keys.push(Identity::default().key().expect("valid"));
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }

    #[test]
    fn fields_beyond_the_limits_are_rejected() {
        let status = |identity: Identity| identity.key().err().map(|e| e.status());
        let long = vec![0; MAX_FIELD_BYTES + 1];
        let none = Identity::default();
        assert_eq!(status(Identity { salt: Some(&long), ..none }), Some(Status::Limit));
        assert_eq!(status(Identity { salt: Some(&long[1..]), ..none }), None);
        for (index, count, wanted) in
            [(0, 0, Some(Status::Invalid)), (3, 3, Some(Status::Invalid)), (2, 3, None)]
        {
            assert_eq!(status(Identity { shard: Some(Shard { index, count }), ..none }), wanted);
        }
        let extra = |tag| Extra { tag, value: b"x" };
        let many: Vec<Extra> = (0..65).map(|i| extra(u32::MAX - i)).collect();
        assert_eq!(status(Identity { extra: &many, ..none }), Some(Status::Limit));
        assert_eq!(status(Identity { extra: &many[1..], ..none }), None);
        let twice = [extra(u32::MAX), extra(FIRST_EXTRA_TAG), extra(u32::MAX)];
        assert_eq!(status(Identity { extra: &twice, ..none }), Some(Status::Invalid));
        for tag in [0, 1, 8, 9, FIRST_EXTRA_TAG - 1] {
            assert_eq!(status(Identity { extra: &[extra(tag)], ..none }), Some(Status::Invalid));
        }
        let value: &[u8] = &long;
        let extra = [Extra { tag: u32::MAX, value }];
        assert_eq!(status(Identity { extra: &extra, ..none }), Some(Status::Limit));
    }
}
