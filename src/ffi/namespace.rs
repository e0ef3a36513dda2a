//! Namespaces: who may share, and what their KV is made of.

use std::ffi::c_void;

use crate::base::status::{Error, Result};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, bytes, capi, enter, free, insert, inspect, known_flags, length_of, noun, read,
    require,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;
use crate::ffi::store::kvt_store_t;
use crate::format::codec::Codec;
use crate::format::keys::identity::{Extra, Identity, MAX_EXTRA, Shard};
use crate::format::keys::{Fingerprint, Key, recipe};
use crate::meta::dtype::Dtype;
use crate::meta::layout::{Group, Layout, MAX_GROUPS, MAX_LAYERS, Rule};
use crate::store::handle::Store;
use crate::store::state::SpaceOpts;

/// A namespace of a store: sessions in it share what they have in common.
/// Internally locked: any thread may use it.
pub struct kvt_namespace_t(());

/// The engine can compute what lies behind a hole: chunks leave in any order.
/// Without it those that continue a chunk leave before it.
pub const KVT_NAMESPACE_HOLES: u64 = 1;

/// Bytes of a namespace's key.
pub const KVT_KEY_BYTES: u32 = 32;

/// A layer needs every earlier token.
pub const KVT_RULE_FULL: u32 = 0;
/// A layer needs the last window_tokens tokens.
pub const KVT_RULE_WINDOW: u32 = 1;
/// A layer needs its state at the very point; it is kept at the ends of chunks.
pub const KVT_RULE_STATE: u32 = 2;

/// Bytes that only the engine understands.
pub const KVT_DTYPE_BYTES: u32 = 0;
/// IEEE 754 binary32.
pub const KVT_DTYPE_F32: u32 = 1;
/// IEEE 754 binary16.
pub const KVT_DTYPE_F16: u32 = 2;
/// The upper half of a binary32.
pub const KVT_DTYPE_BF16: u32 = 3;
/// 8 bits, 4 of exponent and 3 of mantissa.
pub const KVT_DTYPE_F8_E4M3: u32 = 4;
/// 8 bits, 5 of exponent and 2 of mantissa.
pub const KVT_DTYPE_F8_E5M2: u32 = 5;
/// Signed 8-bit integers.
pub const KVT_DTYPE_I8: u32 = 6;
/// 4 bits each, two to a byte.
pub const KVT_DTYPE_I4: u32 = 7;

const _: () = assert!(KVT_DTYPE_F32 == Dtype::F32.code() && KVT_DTYPE_BF16 == Dtype::Bf16.code());
const _: () = assert!(KVT_DTYPE_F8_E4M3 == Dtype::F8E4m3.code());
const _: () = assert!(KVT_DTYPE_F8_E5M2 == Dtype::F8E5m2.code());
const _: () = assert!(KVT_DTYPE_I8 == Dtype::I8.code() && KVT_DTYPE_I4 == Dtype::I4.code());

/// A field of an identity that is the engine's own. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_identity_extra_t {
    /// Its tag, 0x80000000 at least; each once.
    pub tag: u32,
    /// Always 0.
    pub reserved: u32,
    /// Its bytes.
    pub value: *const c_void,
    /// How many, at most 65536.
    pub value_bytes: u64,
}

/// Everything that makes KV other KV. Fields are bytes, hashed as they are, at
/// most 65536 each. A null field is absent; that differs from an empty one, which
/// has a pointer and no length. docs/keys.md says how the key is made of them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_identity_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Name of the model.
    pub model: *const c_void,
    /// Its length.
    pub model_bytes: u64,
    /// Fingerprint of its weights.
    pub weights: *const c_void,
    /// Its length.
    pub weights_bytes: u64,
    /// Adapters that change the KV.
    pub lora: *const c_void,
    /// Their length.
    pub lora_bytes: u64,
    /// Digest of media that all sequences share.
    pub media: *const c_void,
    /// Its length.
    pub media_bytes: u64,
    /// What keeps a tenant's KV from others.
    pub salt: *const c_void,
    /// Its length.
    pub salt_bytes: u64,
    /// Canonical spec of how the KV is computed and stored, if not exactly. Its
    /// parameter codec (none, lz4, int8) says how cells are coded on disk.
    pub recipe: *const c_void,
    /// Its length.
    pub recipe_bytes: u64,
    /// Which part of the KV this rank holds, from 0.
    pub shard_index: u32,
    /// How many parts there are; 0 = all ranks hold the same.
    pub shard_count: u32,
    /// Fields of the engine's own, in any order.
    pub extra: *const kvt_identity_extra_t,
    /// How many, at most 64.
    pub extra_count: u64,
    /// sizeof(kvt_identity_extra_t).
    pub extra_stride_bytes: u64,
    /// Whose names its objects have at a remote, which rules of access there may tell apart;
    /// 0 = everybody's. No part of the identity: all that open a namespace say the same.
    pub remote_tenant: u64,
}

/// Layers that keep the same, and need the same. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_group_t {
    /// KVT_RULE_*: how much of the past its layers need.
    pub rule: u32,
    /// KVT_DTYPE_*.
    pub dtype: u32,
    /// Heads that K and V are divided into; 0 = not said.
    pub kv_heads: u32,
    /// With KVT_RULE_WINDOW: how many tokens.
    pub window_tokens: u32,
    /// Bytes of K a token and layer; of the latent, where there is one.
    pub k_bytes: u64,
    /// Bytes of V a token and layer; 0 = it is in K.
    pub v_bytes: u64,
    /// With KVT_RULE_STATE: bytes of a layer's state; then no K, V or heads.
    pub state_bytes: u64,
    /// Its layers, in any order. Every layer from 0 on is in one group.
    pub layers: *const u16,
    /// How many.
    pub layer_count: u64,
}

/// What the KV of a model is made of. It is part of the namespace's key.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_layout_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Tokens of a chunk, the unit that is shared, 1 to 32768. A cell, a layer of
    /// a chunk, has at most 32 MiB.
    pub chunk_tokens: u32,
    /// Always 0.
    pub reserved: u32,
    /// Groups of layers, in any order.
    pub groups: *const kvt_group_t,
    /// How many, 1 to 64.
    pub group_count: u64,
    /// sizeof(kvt_group_t).
    pub stride_bytes: u64,
}

/// A namespace that somebody has open. Its sessions keep it.
pub(crate) struct Space {
    pub(crate) core: Arc<crate::base::core::Core>,
    pub(crate) store: Arc<Store>,
    pub(crate) number: u32,
    pub(crate) layers: usize,
    pub(crate) chunk_tokens: u32,
    pub(crate) key: Key,
}

impl Drop for Space {
    fn drop(&mut self) {
        let ended = self.store.let_go(|core| {
            core.close_space(self.number);
            Ok(())
        });
        if let Err(error) = ended {
            log::error!("a namespace was not closed in its store: {error}");
        }
    }
}

pub(crate) struct NamespaceNoun(pub(crate) Arc<Space>);

noun!(NamespaceNoun, kvt_namespace_t, 11, "namespace");

/// A field of an identity; null = absent, which is not the same as empty.
///
/// # Safety
/// `data` is null or valid for reads of `len` bytes, or up to a NUL.
unsafe fn field<'a>(data: *const c_void, len: u64, name: &str) -> Result<Option<&'a [u8]>> {
    // SAFETY: the caller's promise.
    let len = unsafe { length_of(name, data.cast(), len)? };
    match data.is_null() {
        true if len > 0 => fail!(Invalid, "{name} is null and has {len} bytes"),
        true => Ok(None),
        // SAFETY: the caller's promise.
        false => Ok(Some(unsafe { bytes(data.cast(), len)? })),
    }
}

/// The key of an identity with a layout.
///
/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn key_of(given: &kvt_identity_t, layout: &Layout) -> Result<Key> {
    let shard = match (given.shard_index, given.shard_count) {
        (0, 0) => None,
        (index, count) => Some(Shard { index, count }),
    };
    let mut extra = Vec::new();
    // SAFETY: the caller's promise.
    let rows = unsafe {
        let (count, stride) = (given.extra_count, given.extra_stride_bytes);
        Strided::new(given.extra.cast_mut(), count, stride, MAX_EXTRA as u64)?
    };
    for i in 0..rows.len() {
        let row: kvt_identity_extra_t = rows.get(i)?;
        if row.reserved != 0 {
            fail!(Invalid, "reserved of extra field {i} is {}", row.reserved);
        }
        // SAFETY: the caller's promise.
        let value = unsafe { bytes(row.value.cast(), row.value_bytes)? };
        extra.push(Extra { tag: row.tag, value });
    }
    // SAFETY: the caller's promise.
    let identity = unsafe {
        Identity {
            model: field(given.model, given.model_bytes, "model")?,
            weights: field(given.weights, given.weights_bytes, "weights")?,
            layout: Some(Fingerprint::of(&layout.encode())),
            lora: field(given.lora, given.lora_bytes, "lora")?,
            media: field(given.media, given.media_bytes, "media")?,
            salt: field(given.salt, given.salt_bytes, "salt")?,
            shard,
            recipe: field(given.recipe, given.recipe_bytes, "recipe")?,
            extra: &extra,
        }
    };
    identity.key()
}

/// The codec that the recipe of an identity names.
///
/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn codec_of(given: &kvt_identity_t) -> Result<Option<Codec>> {
    // SAFETY: the caller's promise.
    let recipe = unsafe { field(given.recipe, given.recipe_bytes, "recipe")? };
    recipe::codec_of(recipe.unwrap_or(&[])).map_err(|e| e.within("recipe"))
}

/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn layout_of(given: &kvt_layout_t) -> Result<Layout> {
    if given.reserved != 0 {
        fail!(Invalid, "reserved of the layout is {}", given.reserved);
    }
    // SAFETY: the caller's promise.
    let rows = unsafe {
        let (count, stride) = (given.group_count, given.stride_bytes);
        Strided::new(given.groups.cast_mut(), count, stride, MAX_GROUPS as u64)?
    };
    let mut groups = Vec::new();
    for i in 0..rows.len() {
        let row: kvt_group_t = rows.get(i)?;
        // SAFETY: the caller's promise.
        let group = unsafe { group_of(&row) };
        groups.push(group.map_err(|e: Error| e.within(&format!("group {i}")))?);
    }
    Layout::new(given.chunk_tokens, groups)
}

/// # Safety
/// Its layers are valid for reads.
unsafe fn group_of(row: &kvt_group_t) -> Result<Group> {
    let rule = match row.rule {
        KVT_RULE_FULL => Rule::Full,
        KVT_RULE_WINDOW => Rule::Window(row.window_tokens),
        KVT_RULE_STATE => Rule::State,
        other => fail!(Invalid, "rule {other} is none of KVT_RULE_*"),
    };
    if row.window_tokens != 0 && row.rule != KVT_RULE_WINDOW {
        fail!(Invalid, "window_tokens without KVT_RULE_WINDOW");
    }
    let Some(dtype) = Dtype::from_code(row.dtype) else {
        fail!(Invalid, "dtype {} is none of KVT_DTYPE_*", row.dtype);
    };
    Ok(Group {
        // SAFETY: the caller's promise.
        layers: unsafe { numbers(row.layers, row.layer_count, MAX_LAYERS)? }.to_vec(),
        dtype,
        kv_heads: row.kv_heads,
        k_bytes: row.k_bytes,
        v_bytes: row.v_bytes,
        state_bytes: row.state_bytes,
        rule,
    })
}

/// Opens a namespace of a store, or finds it: equal identities and layouts are
/// the same one. What a store found on disk is there again under its key.
///
/// @param store     The store.
/// @param identity  Who may share; null = all fields absent.
/// @param layout    What the KV is made of.
/// @param flags     KVT_NAMESPACE_*.
/// @param out       The namespace; close it with kvt_namespace_close.
/// @param err       Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also when it is open with other flags),
///         KVT_E_SPEC (the recipe names an unknown codec), KVT_E_LIMIT (65,536
///         namespaces, or those of 64 layouts, are open or have chunks that are
///         held or pinned; what nobody has open gives way), KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the namespace; structs and arrays are copied.
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state, arrays
/// for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_namespace_open(
    store: *const kvt_store_t,
    identity: *const kvt_identity_t,
    layout: *const kvt_layout_t,
    flags: u64,
    out: *mut *mut kvt_namespace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_NAMESPACE_HOLES)?;
    if layout.is_null() {
        fail!(Invalid, "the layout is null");
    }
    require(out)?;
    let (layout, identity) = (layout_of(&read(layout)?)?, read(identity)?);
    let (key, layout, codec, tenant) =
        (key_of(&identity, &layout)?, layout, codec_of(&identity)?, identity.remote_tenant);
    let (layers, chunk_tokens) = (layout.layers(), layout.chunk_tokens());
    let opts = SpaceOpts { key, layout, holes: flags & KVT_NAMESPACE_HOLES != 0 };
    let noun = enter(store)?;
    let number = noun.store.with(|core| {
        let number = core.open_space(&opts)?;
        core.set_codec(number, codec);
        if let Err(error) = core.set_tenant(number, tenant) {
            core.close_space(number);
            return Err(error);
        }
        Ok(number)
    })?;
    let (core, store) = (noun.core.clone(), noun.store.clone());
    let ns = Space { core, store, number, layers, chunk_tokens, key };
    out.write(insert(NamespaceNoun(Arc::new(ns)))?);
    Ok(())
}

/// The key of a namespace: what its identity and layout come to.
///
/// @param ns    The namespace.
/// @param out_key  Receives KVT_KEY_BYTES bytes.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_key` is null or valid for writes of 32 bytes.
#[capi]
pub unsafe extern "C" fn kvt_namespace_key(
    ns: *const kvt_namespace_t,
    out_key: *mut u8,
) -> kvt_status_t {
    require(out_key)?;
    let ns = inspect(ns)?;
    let key = ns.0.key.0;
    // SAFETY: room for the whole key, by the caller's promise.
    std::ptr::copy_nonoverlapping(key.as_ptr(), out_key, key.len());
    Ok(())
}

/// Closes a namespace. Its chunks stay in the store, its sessions stay open.
///
/// @param ns  Pointer to the handle, cleared on success; null, or a null
///               handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `space` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_namespace_close(ns: *mut *mut kvt_namespace_t) -> kvt_status_t {
    free(ns, |_| Ok(()))
}
