//! The layout of cells: layers of a model in groups, the bytes that each layer keeps of a token,
//! and the tokens that it needs to continue.
//!
//! Canonical bytes, version 1, all numbers little-endian. Fingerprints hash them, so equal layouts
//! have equal bytes, and their meaning never changes:
//!
//! | bytes | contents |
//! |---|---|
//! | 4 | `KVTL` |
//! | 4 | version: 1 |
//! | 4 | chunk_tokens |
//! | 2 | layers |
//! | 2 | groups |
//! | 28 a group | dtype (1), rule (1: full 0, window 1, state 2), zero (2), window tokens, kv_heads, k_bytes, v_bytes, state_bytes, zero (4 each) |
//! | 1 a layer | its group |
//!
//! Groups are in the order of their first layers.

use crate::base::status::Result;
use crate::fail;
use crate::meta::dtype::Dtype;

/// Most layers of a model.
pub const MAX_LAYERS: usize = 4096;
/// Most groups of layers.
pub const MAX_GROUPS: usize = 64;
/// Most tokens of a chunk.
pub const MAX_CHUNK_TOKENS: u32 = 1 << 15;
/// Largest cell, in bytes: it fits in a slab of the host tier.
pub const MAX_CELL_BYTES: u64 = 32 << 20;
/// Largest window, in tokens.
pub const MAX_WINDOW_TOKENS: u32 = 1 << 30;
/// Most heads of keys.
pub const MAX_KV_HEADS: u32 = 1 << 16;

const MAGIC: [u8; 4] = *b"KVTL";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 16;
const GROUP_BYTES: usize = 28;

/// The earlier tokens that a group needs to continue from a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Every earlier token.
    Full,
    /// This many tokens before the point.
    Window(u32),
    /// The state at exactly that point. States are stored at the ends of chunks.
    State,
}

impl Rule {
    /// Tokens before a point that it needs. Every chunk with one of them must be resident. A state
    /// is that of the chunk with the last token.
    #[inline]
    pub fn reach_tokens(self) -> u64 {
        match self {
            Rule::Full => u64::MAX,
            Rule::Window(tokens) => u64::from(tokens),
            Rule::State => 1,
        }
    }
}

/// Layers with equal bytes and rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its layers.
    pub layers: Vec<u16>,
    /// Number type.
    pub dtype: Dtype,
    /// Heads of K and V; 0 = unspecified.
    pub kv_heads: u32,
    /// Bytes of K, or of the latent, for each token and layer.
    pub k_bytes: u64,
    /// Bytes of V for each token and layer; 0 = V is part of K.
    pub v_bytes: u64,
    /// Bytes of a layer's state.
    pub state_bytes: u64,
    /// The earlier tokens that it needs.
    pub rule: Rule,
}

/// Sizes of the planes of a cell, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planes {
    /// K, the latent, or the state.
    pub k_bytes: u64,
    /// V.
    pub v_bytes: u64,
}

impl Planes {
    /// Bytes of the whole cell.
    #[inline]
    pub fn bytes(self) -> u64 {
        self.k_bytes + self.v_bytes
    }
}

impl Group {
    /// Attention with `heads` heads of K and V: multi-head, grouped or multi-query.
    pub fn gqa(
        layers: impl IntoIterator<Item = u16>,
        heads: u32,
        dim: u32,
        dtype: Dtype,
    ) -> Result<Group> {
        Group::mla_expanded(layers, heads, dim, dim, dtype)
    }

    /// Multi-head latent attention, stored as the latent: one vector a token, and no V.
    pub fn mla_latent(
        layers: impl IntoIterator<Item = u16>,
        rank: u32,
        dtype: Dtype,
    ) -> Result<Group> {
        Group::mla_expanded(layers, 1, rank, 0, dtype)
    }

    /// Multi-head latent attention, stored as heads whose K and V differ in size.
    pub fn mla_expanded(
        layers: impl IntoIterator<Item = u16>,
        heads: u32,
        k_dim: u32,
        v_dim: u32,
        dtype: Dtype,
    ) -> Result<Group> {
        // Saturated numbers exceed every limit; `Layout::new` rejects them.
        let heads_of = |bytes: u64| bytes.saturating_mul(u64::from(heads));
        let of = |dim: u32| dtype.bytes_of(u64::from(dim)).map(heads_of);
        let (Some(k_bytes), Some(v_bytes)) = (of(k_dim), of(v_dim)) else {
            fail!(
                Invalid,
                "{k_dim} and {v_dim} numbers of {} do not fill whole bytes",
                dtype.name()
            );
        };
        let layers = layers.into_iter().collect();
        let rule = Rule::Full;
        Ok(Group { layers, dtype, kv_heads: heads, k_bytes, v_bytes, state_bytes: 0, rule })
    }

    /// Layers with a state of fixed size instead of bytes for each token.
    pub fn state(layers: impl IntoIterator<Item = u16>, bytes: u64, dtype: Dtype) -> Group {
        Group {
            layers: layers.into_iter().collect(),
            dtype,
            kv_heads: 0,
            k_bytes: 0,
            v_bytes: 0,
            state_bytes: bytes,
            rule: Rule::State,
        }
    }

    /// The same with a window: only the last `tokens` tokens are needed.
    pub fn window(self, tokens: u32) -> Group {
        Group { rule: Rule::Window(tokens), ..self }
    }

    /// The planes of a cell with `tokens` valid tokens.
    #[inline]
    pub fn planes(&self, tokens: u32) -> Planes {
        match self.rule {
            Rule::State => Planes { k_bytes: self.state_bytes, v_bytes: 0 },
            _ => Planes {
                k_bytes: self.k_bytes * u64::from(tokens),
                v_bytes: self.v_bytes * u64::from(tokens),
            },
        }
    }

    fn check(&self, at: usize, chunk_tokens: u32) -> Result<()> {
        let Group { dtype, kv_heads, k_bytes, v_bytes, state_bytes, .. } = *self;
        // Checked before any multiplication.
        if k_bytes.max(v_bytes).max(state_bytes) > MAX_CELL_BYTES {
            fail!(Limit, "group {at}: a cell has more than {MAX_CELL_BYTES} bytes");
        }
        match self.rule {
            Rule::State if k_bytes + v_bytes > 0 || kv_heads > 0 || state_bytes == 0 => {
                fail!(Invalid, "group {at}: with rule state it has state_bytes, and no K, V, heads")
            }
            Rule::Full | Rule::Window(_) if k_bytes == 0 || state_bytes > 0 => {
                fail!(Invalid, "group {at}: it has k_bytes; state_bytes only with rule state")
            }
            Rule::Window(w) if w == 0 || w > MAX_WINDOW_TOKENS => {
                fail!(Invalid, "group {at}: a window has 1 to {MAX_WINDOW_TOKENS} tokens, not {w}")
            }
            _ => {}
        }
        if kv_heads > MAX_KV_HEADS {
            fail!(Limit, "group {at}: {kv_heads} heads, the limit is {MAX_KV_HEADS}");
        }
        let heads = u64::from(kv_heads.max(1));
        for (what, bytes) in [("k_bytes", k_bytes), ("v_bytes", v_bytes), ("state", state_bytes)] {
            if bytes % heads != 0 || !dtype.fills(bytes / heads) {
                let name = dtype.name();
                fail!(
                    Invalid,
                    "group {at}: {what} is {bytes}, not a whole {name} in {heads} heads"
                );
            }
        }
        let bytes = self.planes(chunk_tokens).bytes();
        if bytes > MAX_CELL_BYTES {
            fail!(Limit, "group {at}: a cell has {bytes} bytes, the limit is {MAX_CELL_BYTES}");
        }
        Ok(())
    }
}

/// The layout of a model's KV, checked when it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    chunk_tokens: u32,
    groups: Vec<Group>,
    group_of: Vec<u8>,
}

impl Layout {
    /// A layout with chunks of `chunk_tokens` tokens. Each layer from 0 on must be in exactly one
    /// group. Groups are sorted by their first layer.
    pub fn new(chunk_tokens: u32, mut groups: Vec<Group>) -> Result<Layout> {
        if !(1..=MAX_CHUNK_TOKENS).contains(&chunk_tokens) {
            fail!(Invalid, "a chunk has 1 to {MAX_CHUNK_TOKENS} tokens, not {chunk_tokens}");
        }
        if groups.is_empty() || groups.len() > MAX_GROUPS {
            fail!(Invalid, "a layout has 1 to {MAX_GROUPS} groups, not {}", groups.len());
        }
        let layers = groups.iter().map(|group| group.layers.len()).sum();
        if layers > MAX_LAYERS {
            fail!(Limit, "a model has up to {MAX_LAYERS} layers, not {layers}");
        }
        for (at, group) in groups.iter_mut().enumerate() {
            group.check(at, chunk_tokens)?;
            group.layers.sort_unstable();
            if group.layers.is_empty() {
                fail!(Invalid, "group {at} has no layers");
            }
        }
        groups.sort_by_key(|group| group.layers.first().copied());
        let mut group_of = vec![u8::MAX; layers];
        for (at, group) in groups.iter().enumerate() {
            for &layer in &group.layers {
                // There are as many layers as places: a duplicate leaves another one out.
                match group_of.get_mut(usize::from(layer)) {
                    None => {
                        fail!(Invalid, "layer {layer} is in a group, but a layer before it is not")
                    }
                    Some(of) if *of != u8::MAX => {
                        fail!(Invalid, "layer {layer} is in two groups or named twice")
                    }
                    Some(of) => *of = at as u8,
                }
            }
        }
        Ok(Layout { chunk_tokens, groups, group_of })
    }

    /// Tokens of a full chunk.
    #[inline]
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// The number of layers.
    #[inline]
    pub fn layers(&self) -> usize {
        self.group_of.len()
    }

    /// The groups, sorted by their first layer.
    #[inline]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The group of each layer.
    #[inline]
    pub fn group_of(&self) -> &[u8] {
        &self.group_of
    }

    /// The group of a layer.
    #[inline]
    pub fn group(&self, layer: usize) -> Option<&Group> {
        self.groups.get(usize::from(*self.group_of.get(layer)?))
    }

    /// Bytes of a chunk with `tokens` valid tokens, all layers.
    pub fn chunk_bytes(&self, tokens: u32) -> u64 {
        let bytes = |group: &Group| group.planes(tokens).bytes() * group.layers.len() as u64;
        self.groups.iter().map(bytes).sum()
    }

    /// The canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let groups = self.groups.len();
        let mut out = Vec::with_capacity(HEAD_BYTES + groups * GROUP_BYTES + self.layers());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.chunk_tokens.to_le_bytes());
        out.extend((self.layers() as u16).to_le_bytes());
        out.extend((groups as u16).to_le_bytes());
        for group in &self.groups {
            let (rule, window) = match group.rule {
                Rule::Full => (0, 0),
                Rule::Window(tokens) => (1, tokens),
                Rule::State => (2, 0),
            };
            out.extend([group.dtype as u8, rule, 0, 0]);
            // No size exceeds a cell, which fits in 32 bits.
            let [k, v, state] =
                [group.k_bytes, group.v_bytes, group.state_bytes].map(|bytes| bytes as u32);
            for number in [window, group.kv_heads, k, v, state, 0] {
                out.extend(number.to_le_bytes());
            }
        }
        out.extend_from_slice(&self.group_of);
        out
    }

    /// Decodes canonical bytes, and rejects all others.
    pub fn decode(bytes: &[u8]) -> Result<Layout> {
        let layout = Layout::read(bytes)?;
        // Unused numbers and the order of groups must be canonical.
        if layout.encode() != bytes {
            fail!(Corrupt, "the layout is not in canonical form");
        }
        Ok(layout)
    }

    fn read(bytes: &[u8]) -> Result<Layout> {
        let short = || fail!(Corrupt, "a layout of {} bytes is truncated", bytes.len());
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() else { return short() };
        let [m0, m1, m2, m3, v0, v1, v2, v3, t0, t1, t2, t3, l0, l1, g0, g1] = *head;
        if [m0, m1, m2, m3] != MAGIC {
            fail!(Corrupt, "the bytes are not a layout");
        }
        let version = u32::from_le_bytes([v0, v1, v2, v3]);
        if version != VERSION {
            fail!(TooNew, "the layout has version {version}, this library reads {VERSION}");
        }
        let layers = usize::from(u16::from_le_bytes([l0, l1]));
        let count = usize::from(u16::from_le_bytes([g0, g1]));
        let Some((table, group_of)) = rest.split_at_checked(count * GROUP_BYTES) else {
            return short();
        };
        if group_of.len() != layers || layers > MAX_LAYERS || count > MAX_GROUPS {
            fail!(Corrupt, "the layout's length does not fit {layers} layers in {count} groups");
        }
        let mut groups: Vec<Group> =
            table.chunks_exact(GROUP_BYTES).map(read_group).collect::<Result<_>>()?;
        for (layer, &at) in group_of.iter().enumerate() {
            match groups.get_mut(usize::from(at)) {
                Some(group) => group.layers.push(layer as u16),
                None => {
                    fail!(Corrupt, "layer {layer} is in group {at}, but there are {count} groups")
                }
            }
        }
        Layout::new(u32::from_le_bytes([t0, t1, t2, t3]), groups)
    }
}

/// A group without its layers.
fn read_group(bytes: &[u8]) -> Result<Group> {
    let word = |at: usize| {
        bytes.get(4 * at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b))
    };
    let [dtype, rule, ..] = word(0).to_le_bytes();
    let rule = match rule {
        0 => Rule::Full,
        1 => Rule::Window(word(1)),
        2 => Rule::State,
        other => fail!(Corrupt, "rule {other} is unknown, 0 to 2 are accepted"),
    };
    let Some(dtype) = Dtype::from_code(u32::from(dtype)) else {
        fail!(Corrupt, "dtype {dtype} is unknown");
    };
    Ok(Group {
        layers: Vec::new(),
        dtype,
        kv_heads: word(2),
        k_bytes: u64::from(word(3)),
        v_bytes: u64::from(word(4)),
        state_bytes: u64::from(word(5)),
        rule,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;
    use proptest::prelude::*;

    fn refused(chunk_tokens: u32, groups: Vec<Group>, status: Status, words: &str) {
        let error = Layout::new(chunk_tokens, groups).expect_err(words);
        assert_eq!(error.status(), status, "{error}");
        assert!(error.message().contains(words), "{error}");
    }

    fn llama() -> Group {
        Group::gqa(0..32, 8, 128, Dtype::Bf16).expect("whole bytes")
    }

    fn gemma() -> Layout {
        let layer = |g: u16| (0..30u16).filter(move |l| (l % 6 == 5) == (g == 1));
        let local = Group::gqa(layer(0), 4, 256, Dtype::Bf16).expect("whole").window(1024);
        let global = Group::gqa(layer(1), 4, 256, Dtype::Bf16).expect("whole");
        Layout::new(64, vec![global, local]).expect("sound")
    }

    #[test]
    fn common_models_have_the_expected_sizes() {
        let layout = Layout::new(256, vec![llama()]).expect("sound");
        assert_eq!(layout.groups()[0].planes(256).bytes(), 1 << 20);
        assert_eq!(layout.chunk_bytes(1), 32 * 4096);
        let latent = Group::mla_latent(0..61, 576, Dtype::Bf16).expect("whole");
        assert_eq!(latent.planes(64), Planes { k_bytes: 576 * 2 * 64, v_bytes: 0 });
        let wide = Group::mla_expanded(0..61, 128, 192, 128, Dtype::Bf16).expect("whole");
        assert_eq!((wide.k_bytes, wide.v_bytes), (49_152, 32_768));
        let state = Group::state([0], 1000, Dtype::F32);
        assert_eq!((state.planes(1), state.planes(64)), (state.planes(0), state.planes(0)));
        assert!(Group::gqa([0], 8, 3, Dtype::I4).is_err());
        assert_eq!(Group::gqa([0], 8, 128, Dtype::I4).expect("whole").k_bytes, 512);
        assert!(Group::gqa([0], u32::MAX, u32::MAX, Dtype::F32).is_ok_and(|g| {
            Layout::new(1, vec![g]).is_err_and(|error| error.status() == Status::Limit)
        }));
    }

    #[test]
    fn groups_may_interleave_and_come_in_any_order() {
        let layout = gemma();
        assert_eq!(layout.groups()[0].rule, Rule::Window(1024));
        assert_eq!(layout.group(5).map(|g| g.rule), Some(Rule::Full));
        assert_eq!((layout.layers(), layout.group(30)), (30, None));
        let turned = layout.groups().iter().rev().cloned().collect();
        assert_eq!(Layout::new(64, turned).expect("sound"), layout);
    }

    #[test]
    fn invalid_layouts_are_rejected() {
        let one = |change: &dyn Fn(&mut Group)| {
            let mut group = llama();
            change(&mut group);
            vec![group]
        };
        use Status::{Invalid, Limit};
        refused(0, one(&|_| ()), Invalid, "tokens, not 0");
        refused(MAX_CHUNK_TOKENS + 1, one(&|_| ()), Invalid, "tokens");
        refused(16, vec![], Invalid, "groups, not 0");
        refused(16, vec![llama(); MAX_GROUPS + 1], Invalid, "groups, not 65");
        refused(16, vec![llama(), llama()], Invalid, "named twice");
        refused(16, one(&|g| g.layers.clear()), Invalid, "no layers");
        refused(16, one(&|g| g.layers = vec![0, 0]), Invalid, "named twice");
        refused(16, one(&|g| g.layers = vec![0, 2]), Invalid, "layer 2");
        refused(16, one(&|g| g.layers = (0..4097).collect()), Limit, "not 4097");
        refused(16, one(&|g| g.rule = Rule::Window(0)), Invalid, "not 0");
        refused(16, one(&|g| g.rule = Rule::Window(u32::MAX)), Invalid, "window");
        refused(16, one(&|g| g.rule = Rule::State), Invalid, "no K, V");
        refused(16, one(&|g| g.k_bytes = 0), Invalid, "k_bytes");
        refused(16, one(&|g| g.state_bytes = 4), Invalid, "only with rule state");
        refused(16, one(&|g| g.kv_heads = 7), Invalid, "7 heads");
        refused(16, one(&|g| g.v_bytes = 8), Invalid, "bf16 in 8 heads");
        refused(16, one(&|g| g.kv_heads = MAX_KV_HEADS + 1), Limit, "heads, the limit");
        refused(16, one(&|g| g.k_bytes = u64::MAX), Limit, "group 0");
        refused(MAX_CHUNK_TOKENS, one(&|_| ()), Limit, "134217728 bytes");
        refused(16, vec![Group::state([0], 0, Dtype::Bytes)], Invalid, "state_bytes");
        refused(16, vec![Group::state([0], 6, Dtype::F32)], Invalid, "whole f32");
    }

    #[test]
    fn canonical_bytes_match_the_table() {
        let groups = vec![
            Group::state([1], 12, Dtype::F32),
            Group::gqa([0], 2, 4, Dtype::I8).expect("whole").window(9),
        ];
        let bytes = Layout::new(16, groups).expect("sound").encode();
        let expected: [u8; 74] = [
            b'K', b'V', b'T', b'L', 1, 0, 0, 0, 16, 0, 0, 0, 2, 0, 2, 0, // head
            6, 1, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, //
            1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0,
            0, //
            0, 1,
        ];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn changed_bytes_decode_to_another_layout_or_fail() {
        let layout = gemma();
        let sound = layout.encode();
        assert_eq!(Layout::decode(&sound).expect("sound"), layout);
        for len in 0..sound.len() {
            assert!(Layout::decode(&sound[..len]).is_err(), "{len} bytes");
        }
        assert!(Layout::decode(&[&sound[..], &[0]].concat()).is_err());
        for at in 0..sound.len() {
            for value in 0..=u8::MAX {
                let mut bytes = sound.clone();
                bytes[at] = value;
                if let Ok(other) = Layout::decode(&bytes) {
                    assert_eq!(other.encode(), bytes, "byte {at} = {value}");
                    assert_eq!(other == layout, bytes == sound);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn layouts_round_trip(
            chunk_tokens in 1u32..300,
            group_of in prop::collection::vec(0usize..5, 1..40),
            kinds in prop::collection::vec((0u32..4, 1u32..9, 1u32..65, any::<bool>()), 5),
        ) {
            let groups = kinds.iter().enumerate().filter_map(|(at, &(kind, heads, dim, half))| {
                let layers = (0..group_of.len() as u16).filter(|&l| group_of[l as usize] == at);
                let dtype = if half { Dtype::F16 } else { Dtype::I8 };
                let group = match kind {
                    0 => Group::gqa(layers, heads, dim, dtype).expect("whole"),
                    1 => Group::mla_latent(layers, dim, dtype).expect("whole").window(heads),
                    2 => Group::mla_expanded(layers, heads, dim, 3, dtype).expect("whole"),
                    _ => Group::state(layers, u64::from(heads) * 4, dtype),
                };
                (!group.layers.is_empty()).then_some(group)
            });
            let layout = Layout::new(chunk_tokens, groups.collect()).expect("sound");
            let back = Layout::decode(&layout.encode()).expect("its own bytes");
            prop_assert_eq!(&back, &layout);
            for layer in 0..layout.layers() {
                let group = layout.group(layer).expect("every layer has one");
                prop_assert!(group.layers.contains(&(layer as u16)));
            }
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Some(head) = bytes.get_mut(..16) {
                head.copy_from_slice(b"KVTL\x01\0\0\0\x10\0\0\0\x08\0\x02\0");
            }
            if let Ok(layout) = Layout::decode(&bytes) {
                prop_assert_eq!(layout.encode(), bytes);
            }
        }
    }
}
