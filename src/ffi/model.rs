//! Models in files: what is opened, and what it is as a whole.

use std::ffi::{OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, capi, check_out, enter, free, insert, noun, require, text_bytes, write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;
use crate::stream::model::{Format, MAX_FILES, Model};
use crate::stream::units::{Index, Units};

/// What is in the files of a model: tensors, and the units that they move in. It never
/// changes, so any thread may use it, and it needs no runtime. The files are not kept open.
pub struct kvt_model_t(());

/// Of no layer, or no expert.
pub const KVT_NONE: u32 = 0xFFFF_FFFF;

/// kvt_model_info_t.format: GGUF, one file or split.
pub const KVT_FORMAT_GGUF: u32 = 1;
/// kvt_model_info_t.format: safetensors, one file or sharded.
pub const KVT_FORMAT_SAFETENSORS: u32 = 2;
/// kvt_model_info_t.format: byte ranges that the engine has named.
pub const KVT_FORMAT_TABLE: u32 = 3;

/// A text, or a path. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_str_t {
    /// It.
    pub text: *const c_char,
    /// Its length.
    pub bytes: u64,
}

/// What a model is; numbers that its files do not say are 0.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_model_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// KVT_FORMAT_*.
    pub format: u32,
    /// Files.
    pub files: u32,
    /// Units: see kvt_model_unit.
    pub units: u32,
    /// Tensors: see kvt_model_tensor.
    pub tensors: u32,
    /// Its architecture, such as "llama"; not NUL-terminated, lives until the model is closed.
    pub architecture: *const c_char,
    /// Length of that.
    pub architecture_bytes: u64,
    /// Layers.
    pub layers: u32,
    /// Numbers of a hidden state.
    pub hidden: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values of one layer; the most where layers differ.
    pub kv_heads: u32,
    /// Numbers of a key, as it is kept.
    pub key_dim: u32,
    /// Numbers of a value; 0 beside a key_dim where values are made of what is kept of keys.
    pub value_dim: u32,
    /// The longest context.
    pub context: u32,
    /// Symbols.
    pub vocabulary: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Of them, those that a token uses.
    pub experts_used: u32,
    /// What tells it from other models: a hash of headers, lengths of files, names, types,
    /// sizes and places of tensors. Models that differ in weights alone may have the same.
    pub fingerprint: [u8; 32],
}

/// A file of a model.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_model_file_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its path; not NUL-terminated, lives until the model is closed.
    pub path: *const c_char,
    /// Length of that.
    pub path_bytes: u64,
    /// How long the file is.
    pub bytes: u64,
}

/// A model, its units, and what finds things in them. Texts that callers borrow are in it.
pub(crate) struct Parts {
    pub(crate) model: Model,
    pub(crate) units: Units,
    pub(crate) index: Index,
    /// Numbers of tensors, by their names.
    pub(crate) names: Vec<u32>,
    fingerprint: [u8; 32],
}

impl Parts {
    pub(crate) fn new(model: Model, units: Units) -> Result<Parts> {
        let index = Index::new(&units)?;
        let mut names = Vec::new();
        names.try_reserve_exact(model.tensors.len()).map_err(|_| Status::NoMem)?;
        names.extend(0..model.tensors.len() as u32);
        let name = |&tensor: &u32| model.tensors.get(tensor as usize).map(|t| t.name.as_str());
        names.sort_by(|a, b| name(a).cmp(&name(b)));
        let fingerprint = model.fingerprint();
        Ok(Parts { model, units, index, names, fingerprint })
    }
}

pub(crate) struct ModelNoun(pub(crate) Arc<Parts>);

noun!(ModelNoun, kvt_model_t, 17, "model");

/// Calls `body` with a model.
pub(crate) fn with_model<R>(
    handle: *const kvt_model_t,
    body: impl FnOnce(&Arc<Parts>) -> Result<R>,
) -> Result<R> {
    body(&enter(handle)?.0)
}

/// # Safety
/// `text` is null with a length of 0, or valid for reads of its length.
pub(crate) unsafe fn path(text: *const c_char, length: u64) -> Result<PathBuf> {
    const MAX_PATH_BYTES: usize = 4096;
    // SAFETY: the caller's promise.
    let text = unsafe { text_bytes("path", text, length)? };
    if text.is_empty() || text.len() > MAX_PATH_BYTES {
        fail!(Invalid, "a path of {} bytes: 1 to {MAX_PATH_BYTES} can be", text.len());
    }
    if text.contains(&0) {
        fail!(Invalid, "a path with a NUL in it");
    }
    Ok(PathBuf::from(OsStr::from_bytes(text)))
}

/// # Safety
/// `texts` is null with a count of 0, or valid for its entries, and they for their lengths.
pub(crate) unsafe fn paths(
    texts: *const kvt_str_t,
    count: u64,
    stride_bytes: u64,
) -> Result<Vec<PathBuf>> {
    // SAFETY: the caller's promise; entries are only read.
    let rows = unsafe { Strided::new(texts.cast_mut(), count, stride_bytes, MAX_FILES as u64)? };
    let mut all = Vec::new();
    all.try_reserve_exact(rows.len()).map_err(|_| Status::NoMem)?;
    for row in 0..rows.len() {
        let text = rows.get(row)?;
        // SAFETY: the caller's promise.
        all.push(unsafe { path(text.text, text.bytes)? });
    }
    Ok(all)
}

/// Opens a model and groups its tensors into units by their names. Reads headers, not
/// weights.
///
/// @param paths         One path: a GGUF or safetensors file, the index of a sharded model,
///                      the directory of a model, any one file of a split GGUF model. Or
///                      all its files.
/// @param path_count    How many.
/// @param stride_bytes  sizeof(kvt_str_t).
/// @param out           The model; close it with kvt_model_close.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CORRUPT (files that are not what they say, with the reason),
///         KVT_E_UNSUPPORTED, KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT, KVT_E_INVALID,
///         KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the model. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; texts are valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_model_open(
    paths: *const kvt_str_t,
    path_count: u64,
    stride_bytes: u64,
    out: *mut *mut kvt_model_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    crate::base::fork::check()?;
    require(out)?;
    let paths = self::paths(paths, path_count, stride_bytes)?;
    let model = Model::open(&paths)?;
    let units = Units::of(&model)?;
    out.write(insert(ModelNoun(Arc::new(Parts::new(model, units)?)))?);
    Ok(())
}

/// Closes a model and clears the handle. Streamers that were opened with it stay; texts that
/// were borrowed from it go.
///
/// @param model  Pointer to the handle; null, or a null handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `model` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_model_close(model: *mut *mut kvt_model_t) -> kvt_status_t {
    free(model, |_| Ok(()))
}

/// What a model is.
///
/// @param model  The model.
/// @param out    Filled in; start it with KVT_MODEL_INFO_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: texts are borrowed until the model is closed. Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_model_info(
    model: *const kvt_model_t,
    out: *mut kvt_model_info_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |parts| {
        let (model, facts) = (&parts.model, &parts.model.facts);
        let info = kvt_model_info_t {
            struct_size: 0,
            bytes: model.bytes(),
            format: match model.format {
                Format::Gguf => KVT_FORMAT_GGUF,
                Format::Safetensors => KVT_FORMAT_SAFETENSORS,
                Format::Table => KVT_FORMAT_TABLE,
            },
            files: model.files.len() as u32,
            units: parts.units.units.len() as u32,
            tensors: model.tensors.len() as u32,
            architecture: facts.architecture.as_ptr().cast(),
            architecture_bytes: facts.architecture.len() as u64,
            layers: facts.layers,
            hidden: facts.hidden,
            heads: facts.heads,
            kv_heads: facts.kv_heads,
            key_dim: facts.key_dim,
            value_dim: facts.value_dim,
            context: facts.context,
            vocabulary: facts.vocabulary,
            experts: facts.experts,
            experts_used: facts.experts_used,
            fingerprint: parts.fingerprint,
        };
        write(out, &info);
        Ok(())
    })
}

/// A file of a model.
///
/// @param model  The model.
/// @param file   Which, below kvt_model_info_t.files.
/// @param out    Filled in; start it with KVT_MODEL_FILE_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the path is borrowed until the model is closed. Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_model_file(
    model: *const kvt_model_t,
    file: u32,
    out: *mut kvt_model_file_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |parts| {
        let Some(found) = parts.model.files.get(file as usize) else {
            fail!(Invalid, "file {file} of {}", parts.model.files.len());
        };
        let path = found.path.as_os_str().as_bytes();
        let row = kvt_model_file_t {
            struct_size: 0,
            path: path.as_ptr().cast(),
            path_bytes: path.len() as u64,
            bytes: found.bytes,
        };
        write(out, &row);
        Ok(())
    })
}
