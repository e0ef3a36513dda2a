//! Weights: models in files, and streamers that bring their units.

use std::ffi::{OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::base::callback::refuse_reentry;
use crate::base::core::Core;
use crate::base::slab::Pin;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory as DeviceMemory};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, Strided, capi, check_out, enter, free, give, give_text, insert, inspect,
    known_flags, no_reserved, noun, numbers, pin, put, read, require, text, text_bytes, write,
};
use crate::ffi::base::{kvt_error_t, kvt_status_t};
use crate::ffi::device::{device_of, kvt_device_t};
use crate::ffi::memory::{KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_budget_t, memory_of};
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::io::model_files::real::ModelFilesOpts;
use crate::stream::model::{Format, MAX_FILES, MAX_NAME_BYTES, MAX_TENSORS, Model};
use crate::stream::plan::{
    Binding, ComputeLocation, Forecast, Inputs, Links, Memory, Mode, Placement, Plan, PlanOptions,
    Residency,
};
use crate::stream::scheduler::{Lease, Target};
use crate::stream::streamer::{AcquireOpts, Opts, Streamer, UnitLease, Verify};
use crate::stream::units::{Entry, Index, MAX_PARTS, MAX_UNITS, NONE, Part, Range, Role, Units};

// Models.

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

// Contents of models.

/// kvt_unit_t.role: something else.
pub const KVT_ROLE_OTHER: u32 = 0;
/// kvt_unit_t.role: a layer, without its experts.
pub const KVT_ROLE_LAYER: u32 = 1;
/// kvt_unit_t.role: an expert of a layer.
pub const KVT_ROLE_EXPERT: u32 = 2;
/// kvt_unit_t.role: what symbols are looked up in.
pub const KVT_ROLE_EMBEDDING: u32 = 3;
/// kvt_unit_t.role: what comes between the last layer and the head.
pub const KVT_ROLE_NORM: u32 = 4;
/// kvt_unit_t.role: what makes symbols of a hidden state.
pub const KVT_ROLE_HEAD: u32 = 5;

/// A unit: bytes that are needed together, and move together. Units are numbered in the order
/// in which a pass needs them: the embedding, what has no role, each layer followed by its
/// experts, the norm, the head.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// What it is called, such as "layer 3 expert 7"; not NUL-terminated, lives until the
    /// model is closed.
    pub name: *const c_char,
    /// Length of that.
    pub name_bytes: u64,
    /// KVT_ROLE_*.
    pub role: u32,
    /// Its layer, or KVT_NONE.
    pub layer: u32,
    /// Its expert, or KVT_NONE.
    pub expert: u32,
    /// Parts of tensors that it has.
    pub parts: u32,
    /// What its tensors have.
    pub bytes: u64,
    /// What it takes in memory.
    pub image_bytes: u64,
}

/// A tensor as it is in its file.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_tensor_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its name; not NUL-terminated, lives until the model is closed.
    pub name: *const c_char,
    /// Length of that.
    pub name_bytes: u64,
    /// What its numbers are, as the format calls it, such as "Q6_K" or "BF16"; lives as long
    /// as the library.
    pub dtype: *const c_char,
    /// Length of that.
    pub dtype_bytes: u64,
    /// Its dimensions, the innermost first; they live until the model is closed.
    pub dims: *const u64,
    /// How many.
    pub dim_count: u32,
    /// Which file of the model.
    pub file: u32,
    /// Where in that file, from its start.
    pub offset: u64,
    /// How long it is there.
    pub bytes: u64,
    /// Parts that it is divided into: one, or one for each expert; none if it has no bytes.
    pub parts: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Where a tensor, or an expert's part of one, is in its unit. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_part_t {
    /// Which tensor of the model.
    pub tensor: u32,
    /// Which unit.
    pub unit: u32,
    /// Where in the unit: kvt_unit_lease_t.address + at is its first byte.
    pub at: u64,
    /// Where in the tensor: 0 unless it is divided between experts.
    pub from: u64,
    /// How long.
    pub bytes: u64,
}

pub(crate) fn role_of(code: u32) -> Result<Role> {
    Ok(match code {
        KVT_ROLE_OTHER => Role::Other,
        KVT_ROLE_LAYER => Role::Layer,
        KVT_ROLE_EXPERT => Role::Expert,
        KVT_ROLE_EMBEDDING => Role::Embedding,
        KVT_ROLE_NORM => Role::Norm,
        KVT_ROLE_HEAD => Role::Head,
        other => fail!(Invalid, "role {other} is none of KVT_ROLE_*"),
    })
}

fn role_code(role: Role) -> u32 {
    match role {
        Role::Other => KVT_ROLE_OTHER,
        Role::Layer => KVT_ROLE_LAYER,
        Role::Expert => KVT_ROLE_EXPERT,
        Role::Embedding => KVT_ROLE_EMBEDDING,
        Role::Norm => KVT_ROLE_NORM,
        Role::Head => KVT_ROLE_HEAD,
    }
}

fn unit_parts(parts: &Parts, unit: u32) -> &[Part] {
    let all = &parts.units.parts;
    let from = all.partition_point(|part| part.unit < unit);
    let to = all.partition_point(|part| part.unit <= unit);
    all.get(from..to).unwrap_or(&[])
}

fn row_of(part: &Part) -> kvt_part_t {
    let Part { tensor, unit, at, from, bytes } = *part;
    kvt_part_t { tensor, unit, at, from, bytes }
}

/// A unit of a model.
///
/// @param model  The model.
/// @param unit   Which, below kvt_model_info_t.units.
/// @param out    Filled in; start it with KVT_UNIT_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the name is borrowed until the model is closed. Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_model_unit(
    model: *const kvt_model_t,
    unit: u32,
    out: *mut kvt_unit_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |parts| {
        let Some(found) = parts.units.units.get(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", parts.units.units.len());
        };
        let row = kvt_unit_t {
            struct_size: 0,
            name: found.name.as_ptr().cast(),
            name_bytes: found.name.len() as u64,
            role: role_code(found.role),
            layer: found.layer,
            expert: found.expert,
            parts: unit_parts(parts, unit).len() as u32,
            bytes: found.bytes,
            image_bytes: found.image_bytes,
        };
        write(out, &row);
        Ok(())
    })
}

/// A tensor of a model.
///
/// @param model   The model.
/// @param tensor  Which, below kvt_model_info_t.tensors: they are in the order of files and
///                offsets.
/// @param out     Filled in; start it with KVT_TENSOR_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: name and dims are borrowed until the model is closed. Threading: any thread.
/// Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_model_tensor(
    model: *const kvt_model_t,
    tensor: u32,
    out: *mut kvt_tensor_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |parts| {
        let Some(found) = parts.model.tensors.get(tensor as usize) else {
            fail!(Invalid, "tensor {tensor} of {}", parts.model.tensors.len());
        };
        let row = kvt_tensor_t {
            struct_size: 0,
            name: found.name.as_ptr().cast(),
            name_bytes: found.name.len() as u64,
            dtype: found.dtype.as_ptr().cast(),
            dtype_bytes: found.dtype.len() as u64,
            dims: found.dims.as_ptr(),
            dim_count: found.dims.len() as u32,
            file: found.file,
            offset: found.offset,
            bytes: found.bytes,
            parts: parts.index.parts(tensor).len() as u32,
            reserved: 0,
        };
        write(out, &row);
        Ok(())
    })
}

/// # Safety
/// As the exported functions below.
unsafe fn give_parts(
    model: *const kvt_model_t,
    rows: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
    of: impl FnOnce(&Parts) -> Result<&[Part]>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let array = unsafe { Strided::new(rows, capacity, stride_bytes, MAX_PARTS as u64)? };
    with_model(model, |parts| {
        let found = of(parts)?;
        // SAFETY: the caller's promise.
        unsafe { give(&array, rows.is_null(), found.iter().map(row_of), out_count) }
    })
}

/// What is in a unit, in the order of places.
///
/// @param model         The model.
/// @param unit          The unit.
/// @param parts         Receives its parts; null with room for 0 asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_part_t).
/// @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `parts` is null or valid for writes of its entries, `out_count` for a write.
#[capi]
pub unsafe extern "C" fn kvt_model_unit_parts(
    model: *const kvt_model_t,
    unit: u32,
    parts: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    give_parts(model, parts, capacity, stride_bytes, out_count, |all| {
        if unit as usize >= all.units.units.len() {
            fail!(Invalid, "unit {unit} of {}", all.units.units.len());
        }
        Ok(unit_parts(all, unit))
    })
}

/// Where a tensor is: one part, or one for each expert, in the order of places in it.
///
/// @param model         The model.
/// @param tensor        The tensor.
/// @param parts         Receives its parts; null with room for 0 asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_part_t).
/// @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return As kvt_model_unit_parts.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `parts` is null or valid for writes of its entries, `out_count` for a write.
#[capi]
pub unsafe extern "C" fn kvt_model_tensor_parts(
    model: *const kvt_model_t,
    tensor: u32,
    parts: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    give_parts(model, parts, capacity, stride_bytes, out_count, |all| {
        if tensor as usize >= all.model.tensors.len() {
            fail!(Invalid, "tensor {tensor} of {}", all.model.tensors.len());
        }
        Ok(all.index.parts(tensor))
    })
}

/// The tensor of a name.
///
/// @param model       The model.
/// @param name        The name.
/// @param name_bytes  Its length.
/// @param out         Receives its number.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `name` is null or valid for its length, `out` for a write.
#[capi]
pub unsafe extern "C" fn kvt_model_find_tensor(
    model: *const kvt_model_t,
    name: *const c_char,
    name_bytes: u64,
    out: *mut u32,
) -> kvt_status_t {
    require(out)?;
    let name = text("name", name, name_bytes)?;
    let found = with_model(model, |parts| {
        let called = |&tensor: &u32| parts.model.tensors.get(tensor as usize).map(|t| &*t.name);
        let at = parts.names.partition_point(|tensor| called(tensor) < Some(name));
        let found = parts.names.get(at).copied().filter(|tensor| called(tensor) == Some(name));
        found.ok_or(Status::NotFound.into())
    })?;
    out.write(found);
    Ok(())
}

/// The unit of a layer, or of an expert of a layer.
///
/// @param model   The model.
/// @param layer   The layer.
/// @param expert  The expert; KVT_NONE = the layer itself.
/// @param out     Receives the unit.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_model_find_unit(
    model: *const kvt_model_t,
    layer: u32,
    expert: u32,
    out: *mut u32,
) -> kvt_status_t {
    const { assert!(KVT_NONE == NONE, "the header has the number in figures") };
    require(out)?;
    out.write(with_model(model, |parts| {
        parts.index.expert(layer, expert).ok_or(Status::NotFound.into())
    })?);
    Ok(())
}

// Tables of models.

/// A stretch of a file. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_file_range_t {
    /// Which of the files.
    pub file: u32,
    /// Always 0.
    pub reserved: u32,
    /// Where in it.
    pub offset: u64,
    /// How long, at least 1.
    pub bytes: u64,
}

/// A unit as the engine names it. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_entry_t {
    /// What it is called.
    pub name: *const c_char,
    /// Length of that, 1 to 504.
    pub name_bytes: u64,
    /// KVT_ROLE_*.
    pub role: u32,
    /// The layer, of KVT_ROLE_LAYER and KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    pub layer: u32,
    /// The expert, of KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    pub expert: u32,
    /// Always 0.
    pub reserved: u32,
    /// Its bytes; each range becomes a tensor.
    pub ranges: *const kvt_file_range_t,
    /// How many ranges.
    pub range_count: u64,
}

/// A model as a table of byte ranges.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_model_table_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// None are defined yet: 0.
    pub flags: u64,
    /// The files.
    pub paths: *const kvt_str_t,
    /// How many.
    pub path_count: u64,
    /// sizeof(kvt_str_t).
    pub path_stride_bytes: u64,
    /// The units, in the order in which a pass needs them.
    pub units: *const kvt_unit_entry_t,
    /// How many.
    pub unit_count: u64,
    /// sizeof(kvt_unit_entry_t).
    pub unit_stride_bytes: u64,
    /// sizeof(kvt_file_range_t).
    pub range_stride_bytes: u64,
}

/// # Safety
/// Its pointers are null or valid for their lengths.
unsafe fn entry_of(given: &kvt_unit_entry_t, stride_bytes: u64) -> Result<Entry> {
    // Its tensors are called by its name and a number.
    let most = MAX_NAME_BYTES as u64 - 8;
    if given.name_bytes == 0 || given.name_bytes > most {
        fail!(Invalid, "a unit's name has 1 to {most} bytes, not {}", given.name_bytes);
    }
    // SAFETY: the caller's promise.
    let name = unsafe { text("name", given.name, given.name_bytes)? };
    if given.reserved != 0 {
        fail!(Invalid, "{name:?}: reserved is {}", given.reserved);
    }
    let role = role_of(given.role)?;
    let number = |number: u32, has_one: bool| match number {
        0 | KVT_NONE if !has_one => NONE,
        number => number,
    };
    // SAFETY: the caller's promise; entries are only read.
    let rows = unsafe {
        let ranges = given.ranges.cast_mut();
        Strided::new(ranges, given.range_count, stride_bytes, MAX_TENSORS as u64)?
    };
    let mut ranges = Vec::new();
    ranges.try_reserve_exact(rows.len()).map_err(|_| Status::NoMem)?;
    for row in 0..rows.len() {
        let kvt_file_range_t { file, reserved, offset, bytes } = rows.get(row)?;
        if reserved != 0 {
            fail!(Invalid, "{name:?}: reserved of range {row} is {reserved}");
        }
        ranges.push(Range { file, offset, bytes });
    }
    Ok(Entry {
        name: name.to_string(),
        role,
        layer: number(given.layer, matches!(role, Role::Layer | Role::Expert)),
        expert: number(given.expert, role == Role::Expert),
        ranges,
    })
}

/// A model whose units the engine names, for files of a format that is not known here. The
/// ranges are its tensors, named after their units: "layer 3#0". Numbers of the model that a
/// plan reckons KV from are not known: say kvt_stream_terms_t.kv_bytes.
///
/// @param table  Files and units. The library takes copies.
/// @param out    The model; close it with kvt_model_close.
/// @param err    Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (units without bytes, two of the same layer and expert, ranges
///         that overlap or lie outside of their file), KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT,
///         KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the model. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `table` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_model_table(
    table: *const kvt_model_table_t,
    out: *mut *mut kvt_model_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    crate::base::fork::check()?;
    require(out)?;
    let given = read(table)?;
    let paths = paths(given.paths, given.path_count, given.path_stride_bytes)?;
    let (units, stride) = (given.units.cast_mut(), given.unit_stride_bytes);
    let (given, paths, rows) =
        (given, paths, Strided::new(units, given.unit_count, stride, MAX_UNITS as u64)?);
    known_flags(given.flags, 0)?;
    let mut entries = Vec::new();
    entries.try_reserve_exact(rows.len()).map_err(|_| Status::NoMem)?;
    for row in 0..rows.len() {
        entries.push(entry_of(&rows.get(row)?, given.range_stride_bytes)?);
    }
    let (model, units) = Units::table(&paths, entries)?;
    out.write(insert(ModelNoun(Arc::new(Parts::new(model, units)?)))?);
    Ok(())
}

// Options of streamers.

/// kvt_stream_terms_t.seat: the engine computes on the processor, with weights in host memory.
pub const KVT_COMPUTE_HOST: u32 = 1;
/// kvt_stream_terms_t.seat: the engine computes on a device: kvt_stream_opts_t.device.
pub const KVT_COMPUTE_DEVICE: u32 = 2;

/// kvt_stream_terms_t.mode: residents stay, the others pass through a few slots.
pub const KVT_STREAM_TIERED: u32 = 0;
/// kvt_stream_terms_t.mode: nothing stays, all memory is slots, and a policy says who leaves.
/// For orders that nobody knows; slower where the order is known.
pub const KVT_STREAM_RING: u32 = 1;

/// kvt_stream_terms_t.placement: residents at equal distances.
pub const KVT_PLACE_INTERLEAVED: u32 = 0;
/// kvt_stream_terms_t.placement: the first units.
pub const KVT_PLACE_FIRST: u32 = 1;
/// kvt_stream_terms_t.placement: the last units.
pub const KVT_PLACE_LAST: u32 = 2;

/// device_ceiling_bytes is meant as it is, also when it is 0.
pub const KVT_TERMS_DEVICE_CEILING: u64 = 1;
/// host_ceiling_bytes is meant as it is, also when it is 0.
pub const KVT_TERMS_HOST_CEILING: u64 = 2;
/// device_safety_bytes is meant as it is, also when it is 0.
pub const KVT_TERMS_DEVICE_SAFETY: u64 = 4;
/// host_reserve_bytes is meant as it is, also when it is 0.
pub const KVT_TERMS_HOST_RESERVE: u64 = 8;
/// kv_bytes is meant as it is, also when it is 0.
pub const KVT_TERMS_KV: u64 = 16;
/// expert_slots is meant as it is, also when it is 0.
pub const KVT_TERMS_EXPERT_SLOTS: u64 = 32;
/// kvt_stream_terms_t.flags: weights are to be given back while the streamer is used, by
/// kvt_stream_rebalance or as the budget asks. Slots are there also where everything fits, as
/// large as lets it shrink most, and no more for experts than a layer needs, unless
/// expert_slots says so; the streamer gives those beyond that need back, too. A streamer with a budget is opened like this in any case. Not the bit
/// of any flag of kvt_stream_opts_t.
pub const KVT_TERMS_SHRINKS: u64 = 256;

/// kvt_stream_opts_t.flags: the disk is measured first, if its speed is not said: that reads
/// up to 256 MiB.
pub const KVT_STREAM_MEASURE: u64 = 1;
/// No pass follows a pass: nothing is fetched ahead across its end.
pub const KVT_STREAM_ONCE: u64 = 2;
/// Every unit has an address of its own, which never changes, and memory only while it is
/// there: see kvt_stream_unit_address. On a device it takes whole pieces of what the device maps by
/// (2 MiB on CUDA), and the plan counts them.
pub const KVT_STREAM_IN_PLACE: u64 = 4;
/// Files are read through the page cache, which is told to forget what was read.
pub const KVT_STREAM_BUFFERED: u64 = 8;
/// Without io_uring.
pub const KVT_STREAM_NO_URING: u64 = 16;
/// By copies out of a memory map: slow, and there to be compared with. A file that is cut
/// short while it is read ends the process (SIGBUS).
pub const KVT_STREAM_MAPPED: u64 = 32;
/// Checksums are kept: in the file `sidecar`, beside the model if that is empty.
pub const KVT_STREAM_SIDECAR: u64 = 64;
/// pinned_percent is meant as it is, also when it is 0.
pub const KVT_STREAM_SET_PINNED_PERCENT: u64 = 128;
/// The device reads units into its slots by itself, past host memory (CUDA: cuFile, loaded now,
/// with its silent way by host memory switched off for the whole process). KVT_E_UNAVAILABLE and
/// why, where it cannot: no library, no kernel module, another file system than ext4 and XFS. What
/// does not lie in the file as it needs that goes by host memory as ever, and so does what fails:
/// kvt_stream_stats counts both. Not with KVT_VERIFY_ALWAYS, and not in place.
pub const KVT_STREAM_DIRECT: u64 = 512;

/// kvt_stream_opts_t.verify: bytes are not compared with checksums.
pub const KVT_VERIFY_NEVER: u32 = 0;
/// When a unit is read for the first time; checksums that nobody knows are noted.
pub const KVT_VERIFY_FIRST: u32 = 1;
/// Whenever it is read.
pub const KVT_VERIFY_ALWAYS: u32 = 2;

/// What you decide about memory, and know of links. 0 is the default everywhere; where 0 has
/// a meaning of its own a flag says that it is meant.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_terms_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_TERMS_*, KVT_TERMS_SHRINKS.
    pub flags: u64,
    /// KVT_COMPUTE_*; 0 = on the device, if it has memory.
    pub compute: u32,
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    pub mode: u32,
    /// KVT_PLACE_*: which units stay.
    pub placement: u32,
    /// Slots that units pass through; 0 = 2. In a ring, the least there may be.
    pub slots: u32,
    /// Most device memory for weights; 0 = what is free.
    pub device_ceiling_bytes: u64,
    /// Most host memory for weights, slots and staging; 0 = what is free.
    pub host_ceiling_bytes: u64,
    /// Kept free on the device; 0 = 256 MiB.
    pub device_safety_bytes: u64,
    /// Kept free of host memory; 0 = 6 GiB, less on small machines.
    pub host_reserve_bytes: u64,
    /// Tokens of context, for the KV that is held where the engine computes; 0 = the
    /// model's, at most 4096.
    pub context: u32,
    /// Sequences at once; 0 = 1.
    pub sequences: u32,
    /// Bytes of a number of KV; 0 = 2.
    pub kv_element_bytes: u32,
    /// So many of the last layers are computed by the processor; for a device seat.
    pub processor_layers: u32,
    /// KV; 0 = computed from the context.
    pub kv_bytes: u64,
    /// Memory that the engine computes in.
    pub workspace_bytes: u64,
    /// Buffers for hidden states.
    pub hidden_bytes: u64,
    /// Slots for experts; 0 = as many as there is room for, with KVT_TERMS_SHRINKS as few as a
    /// layer needs.
    pub expert_slots: u32,
    /// Always 0.
    pub reserved: u32,
    /// Host memory that reads go to on their way to a device; 0 = chosen.
    pub staging_bytes: u64,
    /// How much one read or copy moves; 0 = 4 MiB.
    pub chunk_bytes: u64,
    /// What computing a layer takes, for forecasts.
    pub layer_compute_ns: u64,
    /// From the file into host memory, in bytes a second; 0 = not known.
    pub disk_bytes_per_s: u64,
    /// From host memory to the device; 0 = not known.
    pub device_bytes_per_s: u64,
    /// How fast the processor computes with weights in host memory; 0 = not known.
    pub processor_bytes_per_s: u64,
}

/// What memory there is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_memory_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Free on the device.
    pub device_free_bytes: u64,
    /// What this process may still take of host memory.
    pub host_free_bytes: u64,
    /// RAM of the machine, or of the cgroup if that is less.
    pub host_total_bytes: u64,
    /// What may be locked; UINT64_MAX = as much as there is.
    pub lockable_bytes: u64,
}

/// How to open a streamer.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_STREAM_MEASURE and the like.
    pub flags: u64,
    /// The model. It may be closed afterwards.
    pub model: *const kvt_model_t,
    /// What you decide about memory; null for defaults.
    pub terms: *const kvt_stream_terms_t,
    /// Who pays for memory, a budget of the same runtime; null = nobody. When the budget needs
    /// host memory for others, residents go back to the file: with a budget the terms have
    /// KVT_TERMS_SHRINKS.
    pub budget: *const kvt_budget_t,
    /// Its rank there: owners of low priority are asked first to give back.
    pub priority: i64,
    /// The order of units in a pass, without experts; null = as they are numbered.
    pub order: *const u32,
    /// How many.
    pub order_count: u64,
    /// Spec of who leaves slots, for KVT_STREAM_RING; empty = "fifo".
    pub policy: *const c_char,
    /// Length of that.
    pub policy_bytes: u64,
    /// Spec of who leaves the slots for experts; empty = "lru".
    pub expert_policy: *const c_char,
    /// Length of that.
    pub expert_policy_bytes: u64,
    /// Path of the file that checksums are kept in; not empty means KVT_STREAM_SIDECAR.
    pub sidecar: *const c_char,
    /// Length of that.
    pub sidecar_bytes: u64,
    /// KVT_VERIFY_*.
    pub verify: u32,
    /// Threads that read; 0 = 4, at most 64.
    pub readers: u32,
    /// Reads that one thread has in flight; 0 = as many as can be.
    pub depth: u32,
    /// Marks of what happened that are kept, for kvt_stream_marks; at most 2^20. With any,
    /// units at home are noted too, and had under a lock.
    pub marks: u32,
    /// Of a hundred slots for experts, those that the most used have for themselves; 0 = 50.
    pub pinned_percent: u32,
    /// Always 0.
    pub reserved: u32,
    /// Where the engine computes, a device of the same runtime with memory of its own; null = on
    /// the processor.
    pub device: *const kvt_device_t,
}

fn terms_of(given: &kvt_stream_terms_t) -> Result<(PlanOptions, Links)> {
    known_flags(given.flags, (2 * KVT_TERMS_EXPERT_SLOTS - 1) | KVT_TERMS_SHRINKS)?;
    no_reserved(given.reserved)?;
    let said = |bytes: u64, flag: u64| (bytes != 0 || given.flags & flag != 0).then_some(bytes);
    let expert_slots = said(given.expert_slots.into(), KVT_TERMS_EXPERT_SLOTS);
    let plan_options = PlanOptions {
        compute: match given.compute {
            0 => None,
            KVT_COMPUTE_HOST => Some(ComputeLocation::Host),
            KVT_COMPUTE_DEVICE => Some(ComputeLocation::Device),
            other => fail!(Invalid, "seat {other} is none of KVT_COMPUTE_*"),
        },
        mode: match given.mode {
            KVT_STREAM_TIERED => Mode::Tiered,
            KVT_STREAM_RING => Mode::Ring,
            other => fail!(Invalid, "mode {other} is neither KVT_STREAM_TIERED nor _RING"),
        },
        placement: match given.placement {
            KVT_PLACE_INTERLEAVED => Placement::Interleaved,
            KVT_PLACE_FIRST => Placement::First,
            KVT_PLACE_LAST => Placement::Last,
            other => fail!(Invalid, "placement {other} is none of KVT_PLACE_*"),
        },
        device_ceiling_bytes: said(given.device_ceiling_bytes, KVT_TERMS_DEVICE_CEILING),
        host_ceiling_bytes: said(given.host_ceiling_bytes, KVT_TERMS_HOST_CEILING),
        device_safety_bytes: said(given.device_safety_bytes, KVT_TERMS_DEVICE_SAFETY),
        host_reserve_bytes: said(given.host_reserve_bytes, KVT_TERMS_HOST_RESERVE),
        context: given.context,
        sequences: given.sequences,
        kv_element_bytes: given.kv_element_bytes,
        kv_bytes: said(given.kv_bytes, KVT_TERMS_KV),
        workspace_bytes: given.workspace_bytes,
        hidden_bytes: given.hidden_bytes,
        slots: given.slots,
        expert_slots: expert_slots.map(|_| given.expert_slots),
        shrinks: given.flags & KVT_TERMS_SHRINKS != 0,
        staging_bytes: given.staging_bytes,
        chunk_bytes: given.chunk_bytes,
        device_granularity_bytes: 0, // as the device says, where units are in place
        layer_compute_ns: given.layer_compute_ns,
        processor_layers: given.processor_layers,
    };
    let links = Links {
        disk: given.disk_bytes_per_s,
        device: given.device_bytes_per_s,
        processor: given.processor_bytes_per_s,
    };
    Ok((plan_options, links))
}

/// What a plan is made from, but for the model.
///
/// # Safety
/// Pointers are null or valid for the size they state.
pub(crate) unsafe fn inputs_of(
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
) -> Result<(PlanOptions, Links, Memory)> {
    // SAFETY: the caller's promise.
    let (plan_options, links) = terms_of(&unsafe { read(terms)? })?;
    let memory = match memory.is_null() {
        true => crate::stream::streamer::memory_of(&Opts::default()),
        false => {
            // SAFETY: the caller's promise.
            let given = unsafe { read(memory)? };
            Memory {
                device_free_bytes: given.device_free_bytes,
                host_free_bytes: given.host_free_bytes,
                host_total_bytes: given.host_total_bytes,
                lockable_bytes: given.lockable_bytes,
            }
        }
    };
    Ok((plan_options, links, memory))
}

/// All but the budget.
///
/// # Safety
/// Its pointers are null or valid for their lengths.
pub(crate) unsafe fn options(given: &kvt_stream_opts_t) -> Result<Opts> {
    known_flags(given.flags, (2 * KVT_STREAM_SET_PINNED_PERCENT - 1) | KVT_STREAM_DIRECT)?;
    no_reserved(given.reserved)?;
    let has = |flag: u64| given.flags & flag != 0;
    let Ok(priority) = i32::try_from(given.priority) else {
        fail!(Invalid, "priority {} does not fit in 32 bits", given.priority);
    };
    // SAFETY: the caller's promise, of all that follows.
    unsafe {
        let (plan_options, links) = terms_of(&read(given.terms)?)?;
        if plan_options.compute == Some(ComputeLocation::Device) && given.device.is_null() {
            fail!(Unsupported, "the terms have a seat on a device, and there is no device");
        }
        let order = match given.order.is_null() && given.order_count == 0 {
            true => None,
            false => Some(numbers(given.order, given.order_count, MAX_UNITS)?.to_vec()),
        };
        let sidecar = match given.sidecar.is_null() && given.sidecar_bytes == 0 {
            true => has(KVT_STREAM_SIDECAR).then(std::path::PathBuf::new),
            false => Some(path(given.sidecar, given.sidecar_bytes)?),
        };
        Ok(Opts {
            plan_options,
            links,
            measure: has(KVT_STREAM_MEASURE),
            order,
            once: has(KVT_STREAM_ONCE),
            in_place: has(KVT_STREAM_IN_PLACE),
            policy: text("policy", given.policy, given.policy_bytes)?.to_string(),
            expert_policy: text("expert_policy", given.expert_policy, given.expert_policy_bytes)?
                .to_string(),
            readers: given.readers,
            files: ModelFilesOpts {
                buffered: has(KVT_STREAM_BUFFERED),
                no_uring: has(KVT_STREAM_NO_URING),
                depth: given.depth,
                mapped: has(KVT_STREAM_MAPPED),
            },
            direct: has(KVT_STREAM_DIRECT),
            verify: match given.verify {
                KVT_VERIFY_NEVER => Verify::Never,
                KVT_VERIFY_FIRST => Verify::First,
                KVT_VERIFY_ALWAYS => Verify::Always,
                other => fail!(Invalid, "verify {other} is none of KVT_VERIFY_*"),
            },
            sidecar,
            marks: given.marks as usize,
            pinned_percent: match given.pinned_percent {
                0 if !has(KVT_STREAM_SET_PINNED_PERCENT) => Opts::default().pinned_percent,
                said => said,
            },
            device: None,
            budget: None,
            priority,
        })
    }
}

// Plans of streamers.

/// kvt_unit_residency_t.home: the file alone.
pub const KVT_RESIDENT_FILE: u32 = 1;
/// kvt_unit_residency_t.home: host memory.
pub const KVT_RESIDENT_HOST: u32 = 2;
/// kvt_unit_residency_t.home: memory of the device.
pub const KVT_RESIDENT_DEVICE: u32 = 3;

/// kvt_forecast_t.binding: computing.
pub const KVT_BINDING_COMPUTE: u32 = 1;
/// kvt_forecast_t.binding: the way to the device.
pub const KVT_BINDING_DEVICE: u32 = 2;
/// kvt_forecast_t.binding: the disk.
pub const KVT_BINDING_DISK: u32 = 3;

/// A plan as text for people.
pub const KVT_PLAN_TEXT: u32 = 0;
/// A plan as one JSON object.
pub const KVT_PLAN_JSON: u32 = 1;

/// Who lives where, in numbers.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_plan_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_COMPUTE_*: where the engine computes.
    pub compute: u32,
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    pub mode: u32,
    /// Units at home in memory of the device.
    pub device_units: u32,
    /// Units at home in host memory.
    pub host_units: u32,
    /// Units at home in the file alone.
    pub file_units: u32,
    /// Slots that units without a home where they are used pass through.
    pub slots: u32,
    /// The size of one.
    pub slot_bytes: u64,
    /// Slots for experts.
    pub expert_slots: u32,
    /// Always 0.
    pub reserved: u32,
    /// The size of one.
    pub expert_slot_bytes: u64,
    /// Host memory that reads go to on their way to a device.
    pub staging_bytes: u64,
    /// How much one read or copy moves.
    pub chunk_bytes: u64,
    /// What it takes of the device.
    pub device_bytes: u64,
    /// What it takes of host memory.
    pub host_bytes: u64,
    /// How much of that is locked.
    pub pinned_bytes: u64,
}

/// What a pass will take; all 0 where the speed of a link that it needs is not known.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_forecast_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// A pass in the steady state.
    pub pass_ns: u64,
    /// The first one: nothing was fetched ahead.
    pub first_ns: u64,
    /// No pass can take less.
    pub bound_ns: u64,
    /// Computing alone.
    pub compute_ns: u64,
    /// The device link alone.
    pub device_ns: u64,
    /// The disk alone.
    pub disk_ns: u64,
    /// Bytes that cross the device link in a pass.
    pub device_bytes: u64,
    /// Bytes that are read in a pass.
    pub disk_bytes: u64,
    /// Passes a second, which are tokens where a pass makes one; 0 = pass_ns is 0.
    pub tokens_per_s: f64,
    /// KVT_BINDING_*: what limits it; 0 = nothing is known.
    pub binding: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Where a unit lives. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_residency_t {
    /// KVT_RESIDENT_*.
    pub residency: u32,
    /// 1: it is used in host memory though the engine computes on a device, else 0.
    pub on_processor: u32,
}

/// Where the answer to a question for a plan goes.
#[derive(Clone, Copy)]
pub(crate) struct PlanOut {
    pub plan: *mut kvt_stream_plan_t,
    pub forecast: *mut kvt_forecast_t,
    pub residency: *mut kvt_unit_residency_t,
    pub capacity: u64,
    pub stride_bytes: u64,
}

impl PlanOut {
    pub(crate) fn nowhere() -> PlanOut {
        use std::ptr::null_mut;
        let (plan, forecast, residency) = (null_mut(), null_mut(), null_mut());
        PlanOut { plan, forecast, residency, capacity: 0, stride_bytes: 0 }
    }

    /// # Safety
    /// Its pointers are null or valid for what they state.
    pub(crate) unsafe fn check(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            if !self.plan.is_null() {
                check_out(self.plan)?;
            }
            if !self.forecast.is_null() {
                check_out(self.forecast)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// They passed the check.
    pub(crate) unsafe fn give(&self, plan: &Plan) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            let (capacity, stride) = (self.capacity, self.stride_bytes);
            let rows = Strided::new(self.residency, capacity, stride, MAX_UNITS as u64)?;
            let residency =
                plan.residencies.iter().zip(&plan.on_processor).map(|(home, on_processor)| {
                    let home = match home {
                        Residency::File => KVT_RESIDENT_FILE,
                        Residency::Host => KVT_RESIDENT_HOST,
                        Residency::Device => KVT_RESIDENT_DEVICE,
                    };
                    kvt_unit_residency_t { residency: home, on_processor: u32::from(*on_processor) }
                });
            give(&rows, self.residency.is_null(), residency, std::ptr::null_mut())?;
            if !self.plan.is_null() {
                write(self.plan, &plan_of(plan));
            }
            if !self.forecast.is_null() {
                write(self.forecast, &forecast_of(plan.forecast.as_ref()));
            }
        }
        Ok(())
    }
}

fn plan_of(plan: &Plan) -> kvt_stream_plan_t {
    let count =
        |home: Residency| plan.residencies.iter().filter(|&&other| other == home).count() as u32;
    kvt_stream_plan_t {
        struct_size: 0,
        compute: match plan.compute {
            ComputeLocation::Host => KVT_COMPUTE_HOST,
            ComputeLocation::Device => KVT_COMPUTE_DEVICE,
        },
        mode: match plan.mode {
            Mode::Tiered => KVT_STREAM_TIERED,
            Mode::Ring => KVT_STREAM_RING,
        },
        device_units: count(Residency::Device),
        host_units: count(Residency::Host),
        file_units: count(Residency::File),
        slots: plan.slots,
        slot_bytes: plan.slot_bytes,
        expert_slots: plan.expert_slots,
        reserved: 0,
        expert_slot_bytes: plan.expert_slot_bytes,
        staging_bytes: plan.staging_bytes,
        chunk_bytes: plan.chunk_bytes,
        device_bytes: plan.device_bytes,
        host_bytes: plan.host_bytes,
        pinned_bytes: plan.pinned_bytes,
    }
}

pub(crate) fn forecast_of(forecast: Option<&Forecast>) -> kvt_forecast_t {
    let Some(forecast) = forecast else { return kvt_forecast_t::zeroed() };
    kvt_forecast_t {
        struct_size: 0,
        pass_ns: forecast.pass_ns,
        first_ns: forecast.first_ns,
        bound_ns: forecast.bound_ns,
        compute_ns: forecast.compute_ns,
        device_ns: forecast.device_ns,
        disk_ns: forecast.disk_ns,
        device_bytes: forecast.device_bytes,
        disk_bytes: forecast.disk_bytes,
        tokens_per_s: if forecast.pass_ns == 0 { 0.0 } else { forecast.tokens_per_s() },
        binding: match forecast.binding {
            Binding::Compute => KVT_BINDING_COMPUTE,
            Binding::Device => KVT_BINDING_DEVICE,
            Binding::Disk => KVT_BINDING_DISK,
        },
        reserved: 0,
    }
}

/// A plan in words of a kind.
pub(crate) fn words_of(
    kind: u32,
    in_text: impl FnOnce() -> String,
    in_json: impl FnOnce() -> String,
) -> Result<String> {
    match kind {
        KVT_PLAN_TEXT => Ok(in_text()),
        KVT_PLAN_JSON => Ok(in_json()),
        other => fail!(Invalid, "{other} is neither KVT_PLAN_TEXT nor KVT_PLAN_JSON"),
    }
}

/// Calls `body` with the plan of a model, and what it is made from.
///
/// # Safety
/// Pointers are null or valid for the size they state.
unsafe fn planned<R>(
    model: *const kvt_model_t,
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
    body: impl FnOnce(&Plan, &Inputs<'_>) -> Result<R>,
) -> Result<R> {
    // SAFETY: the caller's promise.
    let (plan_options, links, memory) = unsafe { inputs_of(terms, memory)? };
    with_model(model, |parts: &std::sync::Arc<Parts>| {
        let (units, facts) = (&parts.units, &parts.model.facts);
        let inputs = Inputs { units, facts, memory, links, plan_options: &plan_options };
        body(&Plan::make(&inputs)?, &inputs)
    })
}

/// Who would live where, and what a pass would take. Opens nothing and takes no memory;
/// kvt_stream_open makes the same plan from the same terms and what memory there is then.
///
/// @param model         The model.
/// @param terms         What you decide; null for defaults. The seat may be a device, of which
///                      `memory` says what is free.
/// @param memory        What memory there is; null = looked up, and no device.
/// @param out           Receives it in numbers; start it with KVT_STREAM_PLAN_INIT. May be null.
/// @param forecast      Receives what a pass takes; start it with KVT_FORECAST_INIT. May be
///                      null.
/// @param residency         Receives the home of each unit; may be null with room for 0.
/// @param capacity     How many it has room for: kvt_model_info_t.units.
/// @param stride_bytes  sizeof(kvt_unit_residency_t).
/// @param err           Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET when the model cannot run in that memory (the message says what
///         it takes at least), KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_NOMEM,
///         KVT_E_TOO_NEW, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_model_plan(
    model: *const kvt_model_t,
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
    out: *mut kvt_stream_plan_t,
    forecast: *mut kvt_forecast_t,
    residency: *mut kvt_unit_residency_t,
    capacity: u64,
    stride_bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = PlanOut { plan: out, forecast, residency, capacity, stride_bytes };
    to.check()?;
    planned(model, terms, memory, |plan, _| to.give(plan))
}

/// The same in words, with every figure explained.
///
/// @param model         The model.
/// @param terms         See kvt_model_plan.
/// @param memory        See kvt_model_plan.
/// @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
/// @param out           Receives the words, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`. Free memory changes meanwhile: leave some to spare.
/// @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
/// @param err           Explains a failure; may be null.
/// @return As kvt_model_plan.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_model_plan_describe(
    model: *const kvt_model_t,
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
    kind: u32,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let words = planned(model, terms, memory, |plan, inputs| {
        words_of(kind, || plan.text(inputs), || plan.json(inputs))
    })?;
    give_text(&words, out, out_capacity, out_bytes)
}

/// What a pass would take over other links, with the homes of the plan for these terms.
///
/// @param model        The model.
/// @param terms        See kvt_model_plan.
/// @param memory       See kvt_model_plan.
/// @param links        The other links, such as "h2d=13,disk=3.3" in gigabytes (1e9) a second;
///                     those not named are as the terms say.
/// @param links_bytes  Its length.
/// @param out          Receives it; start it with KVT_FORECAST_INIT.
/// @param err          Explains a failure, with the offset in `links`; may be null.
/// @return As kvt_model_plan; KVT_E_SPEC, KVT_E_INVALID when a link that is needed is not known.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_model_forecast(
    model: *const kvt_model_t,
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
    links: *const c_char,
    links_bytes: u64,
    out: *mut kvt_forecast_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let links = Links::parse(text("links", links, links_bytes)?)?;
    let forecast = planned(model, terms, memory, |plan, inputs| plan.what_if(inputs, links))?;
    write(out, &forecast_of(Some(&forecast)));
    Ok(())
}

// Streamers.

/// Weights that come as the engine computes: units whose home is in memory are at hand, the
/// others pass through a few slots, fetched ahead in the order of a pass. Internally locked:
/// any thread may use it, and different threads may have different units.
pub struct kvt_stream_t(());

/// kvt_stream_acquire: does not wait; KVT_E_AGAIN when the unit is not there.
pub const KVT_ACQUIRE_POLL: u64 = 1;
/// kvt_stream_acquire, on a device: does not wait for copies that are on their way:
/// kvt_unit_lease_t.event says when the bytes are there. kvt_device_stream_wait has a stream wait for it.
pub const KVT_ACQUIRE_SUBMITTED: u64 = 2;

/// A unit that the engine has until it gives it back. Nobody but the library writes
/// into it; copies of it are not given back on their own.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_lease_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its bytes, to be read alone: a part of a tensor is at address + kvt_part_t.at. A
    /// multiple of 4096.
    pub address: *const c_void,
    /// How many bytes there are: kvt_unit_t.image_bytes.
    pub bytes: u64,
    /// Which unit.
    pub unit: u32,
    /// KVT_MEMORY_*: where the address is valid.
    pub memory: u32,
    /// The library's own: where it is. 0 = it was given back.
    pub place: u64,
    /// The device's event from which on the bytes are complete; 0 = they are. It is the
    /// streamer's, and known until the unit is given back.
    pub event: u64,
    /// When it was had, where that is noted; else 0.
    pub since_ns: u64,
}

/// A streamer, and the runtime it belongs to.
pub(crate) struct StreamNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) streamer: Streamer,
}

noun!(StreamNoun, kvt_stream_t, 18, "streamer");

/// A place as a number that is not 0.
fn place_code(place: Target) -> u64 {
    match place {
        Target::Resident => 1,
        Target::Slot(slot) => u64::from(slot) << 2 | 2,
        Target::ExpertSlot(slot) => u64::from(slot) << 2 | 3,
    }
}

fn place_of(code: u64) -> Result<Target> {
    match (code & 3, u32::try_from(code >> 2)) {
        (1, Ok(0)) => Ok(Target::Resident),
        (2, Ok(slot)) => Ok(Target::Slot(slot)),
        (3, Ok(slot)) => Ok(Target::ExpertSlot(slot)),
        _ if code == 0 => fail!(State, "the unit is not in use: it was given back"),
        _ => fail!(Invalid, "place {code:#x} was not made by kvt_stream_acquire"),
    }
}

/// Opens the files of a model, makes a plan and takes the memory that it says. Units are on
/// their way home when this returns. With a device the engine computes there, and units come to
/// its memory; without one it computes in host memory.
///
/// @param runtime  Where it belongs.
/// @param opts     What it streams, and how.
/// @param out      The streamer; close it with kvt_stream_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET when the model cannot run in that memory (the message says what
///         it takes at least), KVT_E_CORRUPT when a file is not what it was when the model was
///         opened, KVT_E_IO, KVT_E_NOT_FOUND, KVT_E_SPEC, KVT_E_UNSUPPORTED (a device seat without
///         a device, a host seat with one, units in place on a device that has no addresses
///         which stay while memory moves: the host device and custom ones), KVT_E_INVALID,
///         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: the caller owns the streamer. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_stream_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_stream_opts_t,
    out: *mut *mut kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let (given, mut opts) = (given, options(&given)?);
    if !given.budget.is_null() {
        opts.budget = Some(pin(given.budget, Access::Use)?.0.clone());
    }
    let parts = with_model(given.model, |parts| Ok(parts.clone()))?;
    let noun = on_runtime(runtime, |core| {
        if opts.budget.as_ref().is_some_and(|budget| !Arc::ptr_eq(budget.core(), core)) {
            fail!(Invalid, "the budget belongs to another runtime");
        }
        opts.device = device_of(core, given.device)?;
        let (model, units) = (parts.model.clone(), parts.units.clone());
        let streamer = Streamer::open(core, model, units, opts)?;
        Ok(StreamNoun { core: core.clone(), streamer })
    })?;
    out.write(insert(noun)?);
    Ok(())
}

/// Closes a streamer: ends calls that wait for units, and waits for reads that are under way.
/// Checksums that are new are written to the sidecar.
///
/// @param stream       Pointer to the handle, cleared on success; null, or a null handle, is
///                     fine.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY while units are in use (it stays open: give them back first), or
///         when reads have not ended at the deadline (it stays closing and valid: call again);
///         KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_stream_close(
    stream: *mut *mut kvt_stream_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let close = |noun: &Pin<'static, StreamNoun>| {
        refuse_reentry()?;
        noun.streamer.close(deadline_ns)
    };
    free(stream, close)
}

/// Asks for a unit, and waits until it is there. It stays where it is until it was given back
/// as often as it was had. A unit at home where it is used costs one atomic operation.
///
/// @param stream       The streamer.
/// @param unit         The unit.
/// @param flags        KVT_ACQUIRE_POLL or 0.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param out          Receives where it is; start it with KVT_UNIT_LEASE_INIT.
/// @param err          Explains a failure; may be null, which costs less where KVT_E_AGAIN is
///                     expected.
/// @return KVT_OK; KVT_E_AGAIN (poll: it is on its way), KVT_E_TIMEOUT, KVT_E_BUSY when all
///         slots are in use by the engine, KVT_E_CORRUPT (bytes that are not what their
///         checksums say, a file that has changed), KVT_E_IO, KVT_E_INVALID (no such unit),
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. A failed read is tried again
///         when the unit is asked for again.
///
/// Ownership: the bytes are borrowed until kvt_stream_release, and are to be read alone.
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_acquire(
    stream: *const kvt_stream_t,
    unit: u32,
    flags: u64,
    deadline_ns: u64,
    out: *mut kvt_unit_lease_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    known_flags(flags, KVT_ACQUIRE_POLL | KVT_ACQUIRE_SUBMITTED)?;
    let has = |flag: u64| flags & flag != 0;
    let (poll, early) = (has(KVT_ACQUIRE_POLL), has(KVT_ACQUIRE_SUBMITTED));
    let how = AcquireOpts { poll, when_issued: early, deadline_ns };
    let lease = enter(stream)?.streamer.acquire(unit, how)?;
    let given = kvt_unit_lease_t {
        struct_size: 0,
        address: lease.address as *const c_void,
        bytes: lease.bytes,
        unit,
        memory: match lease.memory {
            DeviceMemory::Host => KVT_MEMORY_HOST,
            DeviceMemory::Device => KVT_MEMORY_DEVICE,
        },
        place: place_code(lease.lease.location),
        event: lease.lease.event.map_or(0, |event| event.0),
        since_ns: lease.since_ns,
    };
    write(out, &given);
    Ok(())
}

/// Gives a unit back, and clears what it was held by. Allowed while a streamer closes.
///
/// @param stream  The streamer.
/// @param lease    What kvt_stream_acquire wrote.
/// @param after   The device's event after which its memory may be used for another; 0 = now.
///                The streamer takes it over, and releases it. kvt_device_import_event makes one of an
///                event of the engine's.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_STATE when it was given back before, KVT_E_INVALID,
///         KVT_E_UNSUPPORTED (an event, without a device), KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC: it was not given back. What a copy failed with that was on its way when
///         the unit was had: it was given back, `held` is cleared, and what was computed with
///         it is wrong.
///
/// Threading: any thread, also another one than had it. Since 0.1.
///
/// # Safety
/// `held` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_release(
    stream: *const kvt_stream_t,
    lease: *mut kvt_unit_lease_t,
    after: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(lease)?;
    let given = read(lease.cast_const())?;
    let after = (after != 0).then_some(Event(after));
    let location = place_of(given.place)?;
    let back = UnitLease {
        lease: Lease { unit: given.unit, location, event: None },
        address: given.address.addr() as u64,
        bytes: given.bytes,
        memory: memory_of(given.memory)?,
        since_ns: given.since_ns,
    };
    let stream = inspect(stream)?;
    if after.is_some() && !stream.streamer.has_device() {
        fail!(Unsupported, "an event, and the engine computes in host memory");
    }
    let right = stream.streamer.give_back(&back, after)?;
    write(lease, &kvt_unit_lease_t { unit: given.unit, ..kvt_unit_lease_t::zeroed() });
    right
}

// Passes.

/// host_bytes is meant as it is, also when it is 0.
pub const KVT_LIMIT_HOST: u64 = 1;
/// device_bytes is meant as it is, also when it is 0.
pub const KVT_LIMIT_DEVICE: u64 = 2;

/// What weights may have from now on.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_limits_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_LIMIT_*.
    pub flags: u64,
    /// Most host memory; 0 = as it is.
    pub host_bytes: u64,
    /// Most device memory; 0 = as it is.
    pub device_bytes: u64,
    /// Tokens of context that KV is kept for; 0 = as it is.
    pub context: u32,
    /// Always 0.
    pub reserved: u32,
}

/// How far the residents are.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_progress_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Units that have to come home and have not.
    pub missing: u64,
    /// Units whose home is in memory.
    pub resident_units: u64,
    /// Bytes read so far, for whatever.
    pub read_bytes: u64,
}

/// Waits until all residents are at home. Not needed: units that are asked for come first.
///
/// @param stream       The streamer.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TIMEOUT, KVT_E_REENTRANT inside a callback; KVT_E_IO, KVT_E_CORRUPT,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_stream_wait_resident(
    stream: *const kvt_stream_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    refuse_reentry()?;
    enter(stream)?.streamer.load(deadline_ns)
}

/// How far that is.
///
/// @param stream  The streamer.
/// @param out     Filled in; start it with KVT_STREAM_PROGRESS_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_progress(
    stream: *const kvt_stream_t,
    out: *mut kvt_stream_progress_t,
) -> kvt_status_t {
    check_out(out)?;
    let progress = inspect(stream)?.streamer.progress();
    write(
        out,
        &kvt_stream_progress_t {
            struct_size: 0,
            missing: progress.missing,
            resident_units: progress.residents,
            read_bytes: progress.read_bytes,
        },
    );
    Ok(())
}

/// A pass begins: units come in the order that was given. Files are looked at: a model that was
/// changed meanwhile is not used any more.
///
/// @param stream  The streamer.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CORRUPT when a file is not what it was, KVT_E_IO, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_stream_pass_begin(
    stream: *const kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(stream)?.streamer.pass_begin()
}

/// A pass has ended. Unless KVT_STREAM_ONCE was said, the first units of the next are on
/// their way already.
///
/// @param stream  The streamer.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_stream_pass_end(
    stream: *const kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(stream)?.streamer.pass_end()
}

/// The engine will use these units, such as the experts that a router has named: they are
/// fetched as far as there are slots that nobody needs. What was hinted before and has not
/// been used may leave.
///
/// @param stream  The streamer.
/// @param units   The units.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (no such unit), KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `units` is null or valid for reads of `count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_stream_hint(
    stream: *const kvt_stream_t,
    units: *const u32,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let units = numbers(units, count, MAX_UNITS)?;
    enter(stream)?.streamer.hint(units)
}

/// Gives weights more memory, or less, while passes go on: the context grows, KV needs room.
/// Returns at once: units in use move when they are given back, the others are brought
/// meanwhile (kvt_stream_progress says how far). Slots stay as they are, except those for
/// experts: with less memory there may be fewer, with more as many as at opening.
///
/// @param stream  The streamer.
/// @param limits    What there is from now on.
/// @param out     Receives the new plan; start it with KVT_STREAM_PLAN_INIT. May be null.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET when the slots do not fit any more (nothing was changed),
///         KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_stream_rebalance(
    stream: *const kvt_stream_t,
    limits: *const kvt_stream_limits_t,
    out: *mut kvt_stream_plan_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = PlanOut { plan: out, ..PlanOut::nowhere() };
    to.check()?;
    let given = read(limits)?;
    known_flags(given.flags, KVT_LIMIT_HOST | KVT_LIMIT_DEVICE)?;
    if given.reserved != 0 {
        crate::fail!(Invalid, "reserved is {}", given.reserved);
    }
    let said = |bytes: u64, flag: u64| (bytes != 0 || given.flags & flag != 0).then_some(bytes);
    let host = said(given.host_bytes, KVT_LIMIT_HOST);
    let device = said(given.device_bytes, KVT_LIMIT_DEVICE);
    let context = (given.context != 0).then_some(given.context);
    let plan = enter(stream)?.streamer.rebalance(host, device, context)?;
    to.give(&plan)
}

// Statistics of streamers.

/// kvt_stream_span_t.stage: a chunk was read.
pub const KVT_STAGE_READ: u32 = 1;
/// kvt_stream_span_t.stage: a chunk was copied to the device.
pub const KVT_STAGE_COPY: u32 = 2;
/// kvt_stream_span_t.stage: the engine had a unit.
pub const KVT_STAGE_USE: u32 = 3;
/// kvt_stream_span_t.stage: the engine waited for a unit.
pub const KVT_STAGE_WAIT: u32 = 4;

/// What a streamer has done.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Passes that have ended.
    pub passes: u64,
    /// How long the last one took.
    pub pass_ns: u64,
    /// Units that were had.
    pub acquires: u64,
    /// Calls that had to wait.
    pub waited: u64,
    /// How long calls waited for reads.
    pub wait_read_ns: u64,
    /// For copies to the device.
    pub wait_copy_ns: u64,
    /// For slots.
    pub wait_slot_ns: u64,
    /// How long the engine had units; of those at home only where marks are kept.
    pub use_ns: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// How long reads took, added up: more than the time that passed where several were under
    /// way.
    pub read_ns: u64,
    /// What the disk was measured or said to do, in bytes a second; 0 = not known.
    pub read_ceiling_bytes_per_s: u64,
    /// Bytes that were copied to the device.
    pub copied_bytes: u64,
    /// How long copies took, added up.
    pub copy_ns: u64,
    /// What the link to the device was said to do; 0 = not known.
    pub copy_ceiling_bytes_per_s: u64,
    /// Bytes that were brought and never used.
    pub wasted_bytes: u64,
    /// Reads and copies that failed.
    pub failed: u64,
    /// Experts that were asked for and there.
    pub expert_hits: u64,
    /// Experts that had to be brought.
    pub expert_misses: u64,
    /// Of the bytes that were read, those that the device read by itself (KVT_STREAM_DIRECT).
    pub direct_bytes: u64,
    /// Reads of the device's that failed: those bytes came by way of host memory. After three in a
    /// row no more are tried.
    pub direct_failed: u64,
}

/// What became of the experts of a layer. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_expert_stats_t {
    /// The layer.
    pub layer: u32,
    /// Always 0.
    pub reserved: u32,
    /// Experts that were asked for and there.
    pub hits: u64,
    /// Those that had to be brought.
    pub misses: u64,
    /// Bytes that were brought.
    pub bytes: u64,
}

/// Something that took time. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_span_t {
    /// KVT_STAGE_*.
    pub stage: u32,
    /// Which unit.
    pub unit: u32,
    /// From when, CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// Until when.
    pub end_ns: u64,
}

/// Who lives where now.
///
/// @param stream        The streamer.
/// @param out           Receives it in numbers; start it with KVT_STREAM_PLAN_INIT. May be null.
/// @param forecast      Receives what a pass takes; start it with KVT_FORECAST_INIT. May be
///                      null.
/// @param residency         Receives the home of each unit; may be null with room for 0.
/// @param capacity     How many it has room for.
/// @param stride_bytes  sizeof(kvt_unit_residency_t).
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_stream_plan(
    stream: *const kvt_stream_t,
    out: *mut kvt_stream_plan_t,
    forecast: *mut kvt_forecast_t,
    residency: *mut kvt_unit_residency_t,
    capacity: u64,
    stride_bytes: u64,
) -> kvt_status_t {
    let to = PlanOut { plan: out, forecast, residency, capacity, stride_bytes };
    to.check()?;
    to.give(&inspect(stream)?.streamer.plan())
}

/// The same in words, with every figure explained.
///
/// @param stream        The streamer.
/// @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
/// @param out           Receives the words, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`.
/// @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_stream_plan_describe(
    stream: *const kvt_stream_t,
    kind: u32,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let streamer = &inspect(stream)?.streamer;
    let words = words_of(kind, || streamer.plan_text(), || streamer.plan_json())?;
    give_text(&words, out, out_capacity, out_bytes)
}

/// What a pass would take over other links.
///
/// @param stream       The streamer.
/// @param links        The other links, such as "disk=3.3" in gigabytes (1e9) a second; those
///                     not named are as they are.
/// @param links_bytes  Its length.
/// @param out          Receives it; start it with KVT_FORECAST_INIT.
/// @param err          Explains a failure, with the offset in `links`; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_INVALID when a link that is needed is not
///         known; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_forecast(
    stream: *const kvt_stream_t,
    links: *const c_char,
    links_bytes: u64,
    out: *mut kvt_forecast_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let links = Links::parse(text("links", links, links_bytes)?)?;
    let forecast = inspect(stream)?.streamer.what_if(links)?;
    write(out, &forecast_of(Some(&forecast)));
    Ok(())
}

/// What a streamer has done since it was opened; also of a poisoned one.
///
/// @param stream  The streamer.
/// @param out     Filled in; start it with KVT_STREAM_STATS_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_stats(
    stream: *const kvt_stream_t,
    out: *mut kvt_stream_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let streamer = &inspect(stream)?.streamer;
    let (stats, [disk, device]) = (streamer.stats(), streamer.links());
    write(
        out,
        &kvt_stream_stats_t {
            struct_size: 0,
            passes: stats.passes,
            pass_ns: stats.pass_ns,
            acquires: stats.acquires,
            waited: stats.waited,
            wait_read_ns: stats.wait_read_ns,
            wait_copy_ns: stats.wait_copy_ns,
            wait_slot_ns: stats.wait_slot_ns,
            use_ns: stats.use_ns,
            read_bytes: stats.read_bytes,
            read_ns: stats.read_ns,
            read_ceiling_bytes_per_s: disk.ceiling,
            copied_bytes: stats.copied_bytes,
            copy_ns: stats.copy_ns,
            copy_ceiling_bytes_per_s: device.ceiling,
            wasted_bytes: stats.wasted_bytes,
            failed: stats.failed,
            expert_hits: stats.expert_hits,
            expert_misses: stats.expert_misses,
            direct_bytes: stats.direct_bytes,
            direct_failed: stats.direct_failed,
        },
    );
    Ok(())
}

/// Most rows that a caller has room for.
const MAX_ROWS: u64 = 1 << 24;

/// # Safety
/// `rows` is null or valid for writes of its entries, `out_count` for a write.
unsafe fn give_rows<T: Plain, F>(
    rows: *mut T,
    (capacity, stride_bytes): (u64, u64),
    out_count: *mut u64,
    all: Result<Vec<F>>,
    row_of: impl Fn(F) -> T,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let array = Strided::new(rows, capacity, stride_bytes, MAX_ROWS)?;
        give(&array, rows.is_null(), all?.into_iter().map(row_of), out_count)
    }
}

/// What became of experts, by layer.
///
/// @param stream        The streamer.
/// @param rows          Receives a row for each layer that has experts; null with room for 0
///                      asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_expert_stats_t).
/// @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `rows` is null or valid for writes of its entries, `out_count` for a write.
#[capi]
pub unsafe extern "C" fn kvt_stream_layers(
    stream: *const kvt_stream_t,
    rows: *mut kvt_expert_stats_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    let all = inspect(stream).map(|stream| stream.streamer.layers());
    give_rows(rows, (capacity, stride_bytes), out_count, all, |count| kvt_expert_stats_t {
        layer: count.layer,
        reserved: 0,
        hits: count.hits,
        misses: count.misses,
        bytes: count.bytes,
    })
}

/// What happened last, for a picture of it: as many marks as kvt_stream_opts_t.marks says, the
/// oldest first.
///
/// @param stream        The streamer.
/// @param rows          Receives them; null with room for 0 asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_stream_span_t).
/// @param out_count     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return As kvt_stream_layers.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `rows` is null or valid for writes of its entries, `out_count` for a write.
#[capi]
pub unsafe extern "C" fn kvt_stream_marks(
    stream: *const kvt_stream_t,
    rows: *mut kvt_stream_span_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    let all = inspect(stream).map(|stream| stream.streamer.marks());
    give_rows(rows, (capacity, stride_bytes), out_count, all, |mark| kvt_stream_span_t {
        stage: mark.stage as u32,
        unit: mark.unit,
        begin_ns: mark.begin_ns,
        end_ns: mark.end_ns,
    })
}

/// How files are read, for people, and why not better.
///
/// @param stream        The streamer.
/// @param out           Receives a line of text, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`.
/// @param out_bytes     Length of the text; also written with KVT_E_TOO_SMALL. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_stream_describe_io(
    stream: *const kvt_stream_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let (engine, why) = inspect(stream)?.streamer.engine();
    let line = match why {
        Some(why) => format!("{engine}: {why}"),
        None => engine,
    };
    give_text(&line, out, out_capacity, out_bytes)
}

/// Reads a unit from its files, past whatever is in memory, and compares it with its
/// checksums; what nobody knows yet is noted. The calling thread reads, and waits.
///
/// @param stream   The streamer.
/// @param unit     The unit.
/// @param out_sum  Receives its checksum; may be null.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CORRUPT when it is not what it was, KVT_E_IO, KVT_E_INVALID, KVT_E_BUDGET,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_stream_verify(
    stream: *const kvt_stream_t,
    unit: u32,
    out_sum: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let sum = enter(stream)?.streamer.verify(unit)?;
    put(out_sum, sum);
    Ok(())
}

/// The checksum of a unit, if all of it has been looked at (KVT_VERIFY_*, or a sidecar).
///
/// @param stream  The streamer.
/// @param unit    The unit.
/// @param out     Receives it.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_stream_checksum(
    stream: *const kvt_stream_t,
    unit: u32,
    out: *mut u64,
) -> kvt_status_t {
    require(out)?;
    let sum = inspect(stream)?.streamer.sum_of(unit)?;
    out.write(sum);
    Ok(())
}

/// The address that a unit has in place (KVT_STREAM_IN_PLACE), from the opening to the close:
/// an engine can set its pointers to weights once. There is memory only while the unit is had:
/// reading there at another time reads zeros, or what is being brought; on a device it may be an
/// error after which the device is lost. With a device the address is the device's, but for
/// units that the processor uses (kvt_unit_lease_t.memory says so): theirs are outside of the range.
///
/// @param stream       The streamer.
/// @param unit         The unit; KVT_NONE = the whole range of addresses.
/// @param out_address  Receives the address.
/// @param out_bytes    Receives how many bytes it has; may be null.
/// @return KVT_OK; KVT_E_STATE when units are not in place, KVT_E_INVALID, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the range is the streamer's, and goes with its close. Threading: any thread.
/// Since 0.1.
///
/// # Safety
/// `out_address` is null or valid for a write, and so is `out_bytes`.
#[capi]
pub unsafe extern "C" fn kvt_stream_unit_address(
    stream: *const kvt_stream_t,
    unit: u32,
    out_address: *mut *const c_void,
    out_bytes: *mut u64,
) -> kvt_status_t {
    require(out_address)?;
    let streamer = &inspect(stream)?.streamer;
    let (address, bytes) = match unit {
        KVT_NONE => streamer.range().ok_or(Status::State)?,
        unit => streamer.fixed(unit)?,
    };
    out_address.write(address as *const c_void);
    put(out_bytes, bytes);
    Ok(())
}
