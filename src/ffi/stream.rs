//! Weights: models in files, and streamers that load their units.
//!
//! A model is a GGUF or safetensors file, or a table of byte ranges; its units are layers, experts
//! and embeddings. A streamer keeps as many units resident as the memory allows, and loads the
//! others ahead of their use, pass after pass. A lease keeps a unit in place while it is used.
//!
//! Life cycle: kvt_model_open, kvt_stream_open, for each pass kvt_stream_acquire and _release of
//! each unit, kvt_stream_close, kvt_model_close.
//!
//! ```c
//! kvt_str_t path = {"model.gguf", KVT_NUL_TERMINATED};
//! if (kvt_model_open(&path, 1, sizeof path, &model, &err) != KVT_OK) return fail(err);
//! kvt_model_info_t facts = KVT_MODEL_INFO_INIT;
//! if (kvt_model_info(model, &facts) != KVT_OK) return fail(NULL);
//! kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
//! terms.host_ceiling_bytes = 4ull << 30; /* weights get at most 4 GiB */
//! kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
//! opts.model = model, opts.terms = &terms;
//! if (kvt_stream_open(runtime, &opts, &streamer, &err) != KVT_OK) return fail(err);
//! for (uint32_t unit = 0; unit < facts.units; unit++) { /* a pass */
//!     kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
//!     if (kvt_stream_acquire(streamer, unit, 0, 0, &lease, &err) != KVT_OK) return fail(err);
//!     use(lease.address); /* lease.bytes bytes, as in the file */
//!     if (kvt_stream_release(streamer, &lease, 0, &err) != KVT_OK) return fail(err);
//! }
//! ```

use std::ffi::{OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::base::callback::refuse_reentry;
use crate::base::core::Core;
use crate::base::slab::Pin;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::{Event, Memory as DeviceMemory};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, Strided, capi, check_out, enter, free, give, give_text, insert, inspect,
    known_flags, length_of, no_reserved, noun, numbers, pin, put, read, require, text, text_bytes,
    write,
};
use crate::ffi::base::{kvt_error_t, kvt_status_t};
use crate::ffi::device::{device_of, kvt_device_t};
use crate::ffi::memory::{
    KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_budget_t, kvt_memory_t, memory_of,
};
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::io::model_files::real::ModelFilesOpts;
use crate::stream::model::{Format, MAX_FILES, MAX_NAME_BYTES, MAX_TENSORS, Model};
use crate::stream::plan::{
    Binding, ComputeLocation, Forecast, Inputs, Links, Memory, Mode, Placement, Plan, PlanOptions,
    Residency,
};
use crate::stream::scheduler::{Lease, Target};
use crate::stream::streamer::{AcquireOpts, Opts, Streamer, UnitLease, Verify};
use crate::stream::units::{
    Entry, Index, MAX_PARTS, MAX_UNITS, NONE, Part, Range, Role, Units, unknown_unit,
};

// Models.

/// The files of a model: tensors, and the units that they are loaded in. Immutable; belongs to no
/// runtime and keeps no file open. Texts of its structs are not NUL-terminated; they and other
/// arrays are valid until the model is closed. At most 4096 files, 2^20 tensors, 2^18 units and
/// 2^22 parts of tensors.
pub struct kvt_model_t(());

/// No layer, no expert; for kvt_stream_unit_address: all units.
pub const KVT_NONE: u32 = 0xFFFF_FFFF;

/// Formats of models.
pub type kvt_format_t = u32;

/// GGUF, one file or split.
pub const KVT_FORMAT_GGUF: kvt_format_t = 1;
/// Safetensors, one file or sharded.
pub const KVT_FORMAT_SAFETENSORS: kvt_format_t = 2;
/// Byte ranges that the engine names: kvt_model_table.
pub const KVT_FORMAT_TABLE: kvt_format_t = 3;

/// A text or a path. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_str_t {
    pub text: *const c_char,
    /// Length of the text, or KVT_NUL_TERMINATED.
    pub bytes: u64,
}

/// Properties of a model; 0 where its files do not state them.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_model_info_t {
    pub struct_size: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    pub format: kvt_format_t,
    /// Numbers of files, units and tensors.
    pub files: u32,
    pub units: u32,
    pub tensors: u32,
    /// Such as "llama".
    pub architecture: *const c_char,
    pub architecture_bytes: u64,
    pub layers: u32,
    /// Elements of a hidden state.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads of a layer, the most where layers differ; 1 where keys are a latent
    /// vector.
    pub kv_heads: u32,
    /// Elements of a stored key.
    pub key_dim: u32,
    /// Elements of a value; 0 beside a key_dim: values are computed from the stored keys.
    pub value_dim: u32,
    /// Longest context in tokens.
    pub context: u32,
    pub vocabulary: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a layer that a token uses.
    pub experts_used: u32,
    /// BLAKE3 of the headers, of the lengths of the files, and of the names, types, sizes and
    /// offsets of the tensors. Models that differ only in weights may have the same.
    pub fingerprint: [u8; 32],
}

/// A file of a model.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_model_file_t {
    pub struct_size: u64,
    pub path: *const c_char,
    pub path_bytes: u64,
    /// Length of the file.
    pub bytes: u64,
}

/// An open model: its tensors, its units, and indexes of both. It owns the texts that callers
/// borrow.
pub(crate) struct OpenModel {
    pub(crate) model: Model,
    pub(crate) units: Units,
    pub(crate) index: Index,
    /// Tensors, sorted by name.
    pub(crate) names: Vec<u32>,
    fingerprint: [u8; 32],
}

impl OpenModel {
    pub(crate) fn new(model: Model, units: Units) -> Result<OpenModel> {
        let index = Index::new(&units)?;
        let mut names = Vec::new();
        names.try_reserve_exact(model.tensors.len()).map_err(|_| Status::NoMem)?;
        names.extend(0..model.tensors.len() as u32);
        let name_of = |&tensor: &u32| model.tensors.get(tensor as usize).map(|t| t.name.as_str());
        names.sort_by(|a, b| name_of(a).cmp(&name_of(b)));
        let fingerprint = model.fingerprint();
        Ok(OpenModel { model, units, index, names, fingerprint })
    }
}

pub(crate) struct ModelNoun(pub(crate) Arc<OpenModel>);

noun!(ModelNoun, kvt_model_t, 17, "model");

/// Calls `body` with the model of a handle.
pub(crate) fn with_model<R>(
    handle: *const kvt_model_t,
    body: impl FnOnce(&Arc<OpenModel>) -> Result<R>,
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
        fail!(
            Invalid,
            "the path has {} bytes, accepted are 1 to {MAX_PATH_BYTES}: pass a shorter path that is \
             not empty",
            text.len()
        );
    }
    if text.contains(&0) {
        fail!(
            Invalid,
            "the path contains a NUL byte: pass its length without the terminator, or \
             KVT_NUL_TERMINATED"
        );
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

/// Opens a model and groups its tensors into units by their names. Reads headers, not weights.
///
/// @param paths  All files of the model, or one path: a GGUF or safetensors file, the index of a
///               sharded model, the directory of a model, any file of a split GGUF model.
/// @return KVT_E_CORRUPT (a damaged file, files that contradict each other), KVT_E_UNSUPPORTED
///         (version or data type), KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT.
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
    out.write(insert(ModelNoun(Arc::new(OpenModel::new(model, units)?)))?);
    Ok(())
}

/// Closes a model. Streamers that were opened with it stay open.
#[capi]
pub unsafe extern "C" fn kvt_model_close(model: *mut *mut kvt_model_t) -> kvt_status_t {
    free(model, |_| Ok(()))
}

/// Reads the properties of a model.
#[capi]
pub unsafe extern "C" fn kvt_model_info(
    model: *const kvt_model_t,
    out: *mut kvt_model_info_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |opened| {
        let (model, facts) = (&opened.model, &opened.model.facts);
        let info = kvt_model_info_t {
            struct_size: 0,
            bytes: model.bytes(),
            format: match model.format {
                Format::Gguf => KVT_FORMAT_GGUF,
                Format::Safetensors => KVT_FORMAT_SAFETENSORS,
                Format::Table => KVT_FORMAT_TABLE,
            },
            files: model.files.len() as u32,
            units: opened.units.units.len() as u32,
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
            fingerprint: opened.fingerprint,
        };
        write(out, &info);
        Ok(())
    })
}

/// Describes a file of a model.
///
/// @param file  Below kvt_model_info_t.files.
#[capi]
pub unsafe extern "C" fn kvt_model_file(
    model: *const kvt_model_t,
    file: u32,
    out: *mut kvt_model_file_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |opened| {
        let Some(found) = opened.model.files.get(file as usize) else {
            let count = opened.model.files.len();
            fail!(Invalid, "file {file} does not exist: the model has {count} files");
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

/// Roles of a unit.
pub type kvt_role_t = u32;

/// Other tensors.
pub const KVT_ROLE_OTHER: kvt_role_t = 0;
/// A layer, without its experts.
pub const KVT_ROLE_LAYER: kvt_role_t = 1;
/// An expert of a layer.
pub const KVT_ROLE_EXPERT: kvt_role_t = 2;
/// The table of token embeddings.
pub const KVT_ROLE_EMBEDDING: kvt_role_t = 3;
/// The norm between the last layer and the head.
pub const KVT_ROLE_NORM: kvt_role_t = 4;
/// The output projection (LM head).
pub const KVT_ROLE_HEAD: kvt_role_t = 5;

/// A unit of weights: bytes that are needed together and loaded together. Units have the order in
/// which a pass needs them: the embedding, tensors without a role, each layer followed by its
/// experts, the norm, the head. Units of kvt_model_table have the order of the table.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_t {
    pub struct_size: u64,
    /// Such as "layer 3 expert 7".
    pub name: *const c_char,
    pub name_bytes: u64,
    pub role: kvt_role_t,
    /// Layer and expert; KVT_NONE where the role has none.
    pub layer: u32,
    pub expert: u32,
    /// Parts of tensors in the unit: see kvt_model_unit_parts.
    pub parts: u32,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Bytes in memory: tensors with their alignment, a multiple of 4096.
    pub image_bytes: u64,
}

/// A tensor in its file.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_tensor_t {
    pub struct_size: u64,
    pub name: *const c_char,
    pub name_bytes: u64,
    /// Data type as the format names it, such as "Q6_K" or "BF16".
    pub dtype: *const c_char,
    pub dtype_bytes: u64,
    /// Dimensions, the innermost first.
    pub dims: *const u64,
    pub dim_count: u32,
    /// Index of the file; offset and bytes are those in the file.
    pub file: u32,
    pub offset: u64,
    pub bytes: u64,
    /// Parts: 1, or one for each expert; 0 if the tensor has no bytes.
    pub parts: u32,
    pub reserved: u32,
}

/// A tensor in its unit, or one expert's share of a tensor. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_part_t {
    pub tensor: u32,
    pub unit: u32,
    /// Offset in the unit: the first byte is at kvt_unit_lease_t.address + at.
    pub at: u64,
    /// Offset in the tensor; 0 unless the tensor is divided between experts.
    pub from: u64,
    /// Length of the part.
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
        other => fail!(Invalid, "role is {other}, which is unknown: set one of KVT_ROLE_*, 0 to 5"),
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

fn unit_parts(opened: &OpenModel, unit: u32) -> &[Part] {
    let all = &opened.units.parts;
    let from = all.partition_point(|part| part.unit < unit);
    let to = all.partition_point(|part| part.unit <= unit);
    all.get(from..to).unwrap_or(&[])
}

/// The error of a tensor index that no tensor of the model has.
fn unknown_tensor(tensor: u32, count: usize) -> Error {
    let text = format!("tensor {tensor} does not exist: the model has {count} tensors");
    Error::new(Status::Invalid, text)
}

fn row_of(part: &Part) -> kvt_part_t {
    let Part { tensor, unit, at, from, bytes } = *part;
    kvt_part_t { tensor, unit, at, from, bytes }
}

/// Describes a unit of a model.
///
/// @param unit  Below kvt_model_info_t.units.
#[capi]
pub unsafe extern "C" fn kvt_model_unit(
    model: *const kvt_model_t,
    unit: u32,
    out: *mut kvt_unit_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |opened| {
        let Some(found) = opened.units.units.get(unit as usize) else {
            return Err(unknown_unit(unit, opened.units.units.len()));
        };
        let row = kvt_unit_t {
            struct_size: 0,
            name: found.name.as_ptr().cast(),
            name_bytes: found.name.len() as u64,
            role: role_code(found.role),
            layer: found.layer,
            expert: found.expert,
            parts: unit_parts(opened, unit).len() as u32,
            bytes: found.bytes,
            image_bytes: found.image_bytes,
        };
        write(out, &row);
        Ok(())
    })
}

/// Describes a tensor of a model. Tensors have the order of files and offsets.
///
/// @param tensor  Below kvt_model_info_t.tensors.
#[capi]
pub unsafe extern "C" fn kvt_model_tensor(
    model: *const kvt_model_t,
    tensor: u32,
    out: *mut kvt_tensor_t,
) -> kvt_status_t {
    check_out(out)?;
    with_model(model, |opened| {
        let Some(found) = opened.model.tensors.get(tensor as usize) else {
            return Err(unknown_tensor(tensor, opened.model.tensors.len()));
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
            parts: opened.index.parts(tensor).len() as u32,
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
    of: impl FnOnce(&OpenModel) -> Result<&[Part]>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let array = unsafe { Strided::new(rows, capacity, stride_bytes, MAX_PARTS as u64)? };
    with_model(model, |opened| {
        let found = of(opened)?;
        // SAFETY: the caller's promise.
        unsafe { give(&array, rows.is_null(), found.iter().map(row_of), out_count) }
    })
}

/// Lists the parts of tensors in a unit, by offset in the unit.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^22).
#[capi]
pub unsafe extern "C" fn kvt_model_unit_parts(
    model: *const kvt_model_t,
    unit: u32,
    parts: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    give_parts(model, parts, capacity, stride_bytes, out_count, |opened| {
        if unit as usize >= opened.units.units.len() {
            return Err(unknown_unit(unit, opened.units.units.len()));
        }
        Ok(unit_parts(opened, unit))
    })
}

/// Lists the parts of a tensor, by offset in the tensor: one, or one for each expert.
///
/// @return As kvt_model_unit_parts.
#[capi]
pub unsafe extern "C" fn kvt_model_tensor_parts(
    model: *const kvt_model_t,
    tensor: u32,
    parts: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    give_parts(model, parts, capacity, stride_bytes, out_count, |opened| {
        if tensor as usize >= opened.model.tensors.len() {
            return Err(unknown_tensor(tensor, opened.model.tensors.len()));
        }
        Ok(opened.index.parts(tensor))
    })
}

/// Finds a tensor by its name, and writes its index.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT (a name over 1 MiB).
#[capi]
pub unsafe extern "C" fn kvt_model_find_tensor(
    model: *const kvt_model_t,
    name: *const c_char,
    name_bytes: u64,
    out: *mut u32,
) -> kvt_status_t {
    require(out)?;
    let name = text("name", name, name_bytes)?;
    let found = with_model(model, |opened| {
        let name_of = |&tensor: &u32| opened.model.tensors.get(tensor as usize).map(|t| &*t.name);
        let at = opened.names.partition_point(|tensor| name_of(tensor) < Some(name));
        let found = opened.names.get(at).copied().filter(|tensor| name_of(tensor) == Some(name));
        found.ok_or(Status::NotFound.into())
    })?;
    out.write(found);
    Ok(())
}

/// Finds the unit of a layer, or of an expert of a layer.
///
/// @param expert  KVT_NONE = the layer itself.
/// @return KVT_E_NOT_FOUND.
#[capi]
pub unsafe extern "C" fn kvt_model_find_unit(
    model: *const kvt_model_t,
    layer: u32,
    expert: u32,
    out: *mut u32,
) -> kvt_status_t {
    const { assert!(KVT_NONE == NONE, "the header states the number") };
    require(out)?;
    out.write(with_model(model, |opened| {
        opened.index.expert(layer, expert).ok_or(Status::NotFound.into())
    })?);
    Ok(())
}

// Models from tables of byte ranges.

/// A byte range of a file. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_file_range_t {
    /// Index in kvt_model_table_t.paths.
    pub file: u32,
    pub reserved: u32,
    pub offset: u64,
    /// At least 1.
    pub bytes: u64,
}

/// A unit that the engine names. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_entry_t {
    pub name: *const c_char,
    /// 1 to 504, or KVT_NUL_TERMINATED.
    pub name_bytes: u64,
    pub role: kvt_role_t,
    /// Below 65536 with KVT_ROLE_LAYER and KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    pub layer: u32,
    /// Below 65536 with KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    pub expert: u32,
    pub reserved: u32,
    /// Bytes of the unit, at least one range; each range becomes a tensor.
    pub ranges: *const kvt_file_range_t,
    pub range_count: u64,
}

/// A model as a table of byte ranges.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_model_table_t {
    pub struct_size: u64,
    /// 0: none are defined.
    pub flags: u64,
    pub paths: *const kvt_str_t,
    pub path_count: u64,
    pub path_stride_bytes: u64,
    /// In the order in which a pass needs them.
    pub units: *const kvt_unit_entry_t,
    pub unit_count: u64,
    pub unit_stride_bytes: u64,
    pub range_stride_bytes: u64,
}

/// # Safety
/// The pointers of `given` are null or valid for their lengths.
unsafe fn entry_of(given: &kvt_unit_entry_t, stride_bytes: u64) -> Result<Entry> {
    // The names of tensors are the name of the unit and a number.
    let max_bytes = MAX_NAME_BYTES as u64 - 8;
    // SAFETY: the caller's promise.
    let name_bytes = unsafe { length_of("name", given.name, given.name_bytes)? };
    if name_bytes == 0 || name_bytes > max_bytes {
        fail!(
            Invalid,
            "the name of a unit has {name_bytes} bytes, accepted are 1 to {max_bytes}: set name_bytes"
        );
    }
    // SAFETY: the caller's promise.
    let name = unsafe { text("name", given.name, given.name_bytes)? };
    if given.reserved != 0 {
        fail!(Invalid, "unit {name:?}: reserved is {}, and must be 0", given.reserved);
    }
    let role = role_of(given.role)?;
    let number_of = |number: u32, has_number: bool| match number {
        0 | KVT_NONE if !has_number => NONE,
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
            fail!(Invalid, "unit {name:?}: reserved of range {row} is {reserved}, and must be 0");
        }
        ranges.push(Range { file, offset, bytes });
    }
    Ok(Entry {
        name: name.to_string(),
        role,
        layer: number_of(given.layer, matches!(role, Role::Layer | Role::Expert)),
        expert: number_of(given.expert, role == Role::Expert),
        ranges,
    })
}

/// Makes a model from units that the engine names, for files of other formats. Each range becomes a
/// tensor, named after its unit: "layer 3#0". Ranges lie in their files and do not overlap; no two
/// units are the same layer or expert. Plans reserve no KV, unless kvt_stream_terms_t.kv_bytes is
/// set.
///
/// @return KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT.
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
    out.write(insert(ModelNoun(Arc::new(OpenModel::new(model, units)?)))?);
    Ok(())
}

// Options of streamers.

/// Where the engine computes.
pub type kvt_compute_t = u32;

/// The engine computes on the processor, with weights in host memory.
pub const KVT_COMPUTE_HOST: kvt_compute_t = 1;
/// The engine computes on kvt_stream_opts_t.device.
pub const KVT_COMPUTE_DEVICE: kvt_compute_t = 2;

/// How memory is divided among units.
pub type kvt_stream_mode_t = u32;

/// Some units are resident, the others pass through a few slots.
pub const KVT_STREAM_TIERED: kvt_stream_mode_t = 0;
/// No unit is resident: all memory is slots, and a policy chooses the victim. For unknown orders;
/// slower than KVT_STREAM_TIERED where the order is known.
pub const KVT_STREAM_RING: kvt_stream_mode_t = 1;

/// Which units are resident: units at equal distances, the first, or the last ones.
pub type kvt_place_t = u32;

pub const KVT_PLACE_INTERLEAVED: kvt_place_t = 0;
pub const KVT_PLACE_FIRST: kvt_place_t = 1;
pub const KVT_PLACE_LAST: kvt_place_t = 2;

/// Flags of kvt_stream_terms_t.
pub type kvt_terms_flags_t = u64;

/// Take 0 in the field of that name as 0, not as the default.
pub const KVT_TERMS_DEVICE_CEILING: kvt_terms_flags_t = 1;
pub const KVT_TERMS_HOST_CEILING: kvt_terms_flags_t = 2;
pub const KVT_TERMS_DEVICE_SAFETY: kvt_terms_flags_t = 4;
pub const KVT_TERMS_HOST_RESERVE: kvt_terms_flags_t = 8;
pub const KVT_TERMS_KV: kvt_terms_flags_t = 16;
pub const KVT_TERMS_EXPERT_SLOTS: kvt_terms_flags_t = 32;
/// Weights must be able to give memory back later, by kvt_stream_rebalance or to the budget. Slots
/// exist even where all units fit, of the size that lets most memory be given back. Experts get no
/// more slots than a layer needs, unless expert_slots is set; slots beyond that need are given
/// back, too. Always set with a budget; no effect with KVT_STREAM_RING.
pub const KVT_TERMS_SHRINKS: kvt_terms_flags_t = 256;

/// Flags of a streamer.
pub type kvt_stream_flags_t = u64;

/// Measure the disk first if its rate is not set; reads up to 256 MiB.
pub const KVT_STREAM_MEASURE: kvt_stream_flags_t = 1;
/// Passes do not follow each other: nothing is prefetched across the end of a pass.
pub const KVT_STREAM_ONCE: kvt_stream_flags_t = 2;
/// Each unit has a fixed address, and memory only while it is loaded: see kvt_stream_unit_address.
/// On a device, a unit takes a multiple of the mapping granularity (2 MiB on CUDA), which the plan
/// counts.
pub const KVT_STREAM_IN_PLACE: kvt_stream_flags_t = 4;
/// Read through the page cache, and drop the pages afterwards.
pub const KVT_STREAM_BUFFERED: kvt_stream_flags_t = 8;
/// Do not use io_uring.
pub const KVT_STREAM_NO_URING: kvt_stream_flags_t = 16;
/// Copy from a memory map: slow, for comparison. A file that is truncated meanwhile ends the
/// process (SIGBUS).
pub const KVT_STREAM_MAPPED: kvt_stream_flags_t = 32;
/// Keep checksums in the file `sidecar`, or beside the model (.kvtsum) if that is empty.
pub const KVT_STREAM_SIDECAR: kvt_stream_flags_t = 64;
/// Use pinned_percent even if it is 0, not its default.
pub const KVT_STREAM_SET_PINNED_PERCENT: kvt_stream_flags_t = 128;
/// The device reads files into its slots, bypassing host memory (CUDA: cuFile, whose compatibility
/// mode is disabled in the whole process). Opening returns KVT_E_UNAVAILABLE and the reason where
/// it cannot: no library, no kernel module, a file system other than ext4 and XFS. Unaligned
/// chunks, resident units and failed reads go through host memory: kvt_stream_stats_t.direct_bytes,
/// direct_failed. The number of slots is fixed. Not with KVT_VERIFY_ALWAYS or KVT_STREAM_IN_PLACE.
pub const KVT_STREAM_DIRECT: kvt_stream_flags_t = 512;

/// When bytes are compared with their checksums.
pub type kvt_verify_t = u32;

/// Do not compare bytes with checksums.
pub const KVT_VERIFY_NEVER: kvt_verify_t = 0;
/// When a unit is read for the first time; unknown checksums are stored.
pub const KVT_VERIFY_FIRST: kvt_verify_t = 1;
/// At each read.
pub const KVT_VERIFY_ALWAYS: kvt_verify_t = 2;

/// Memory limits and link rates of a plan. 0 is the default of every field; where 0 is also a
/// value, a KVT_TERMS_* flag selects it.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_terms_t {
    pub struct_size: u64,
    pub flags: kvt_terms_flags_t,
    /// 0 = on the device if there is one.
    pub compute: kvt_compute_t,
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    pub mode: kvt_stream_mode_t,
    pub placement: kvt_place_t,
    /// At most 65536; 0 = 2. Slots for units that are not resident; in a ring the least number.
    pub slots: u32,
    /// Most device memory for weights; 0 = as much as is free.
    pub device_ceiling_bytes: u64,
    /// Most host memory for weights, slots and staging; 0 = as much as is free.
    pub host_ceiling_bytes: u64,
    /// Device memory that stays free; 0 = 256 MiB.
    pub device_safety_bytes: u64,
    /// Host memory that stays free; 0 = 6 GiB, a quarter of a machine with less than 24 GiB, or a
    /// sixteenth (64 MiB to 6 GiB) of a cgroup's limit.
    pub host_reserve_bytes: u64,
    /// Tokens that KV is reserved for, where the engine computes; 0 = the model's, at most 4096.
    pub context: u32,
    /// Concurrent sequences; 0 = 1.
    pub sequences: u32,
    /// Bytes of a KV element; 0 = 2.
    pub kv_element_bytes: u32,
    /// Number of last layers that the processor computes; only if the engine computes on a device.
    pub processor_layers: u32,
    /// Bytes of KV; 0 = computed from context, sequences and kv_element_bytes.
    pub kv_bytes: u64,
    /// Workspace of the engine.
    pub workspace_bytes: u64,
    /// Buffers for hidden states.
    pub hidden_bytes: u64,
    /// 0 = as many as fit; with KVT_TERMS_SHRINKS as few as a layer needs.
    pub expert_slots: u32,
    pub reserved: u32,
    /// Host memory for reads on their way to a device; 0 = chosen, usually 16 chunks.
    pub staging_bytes: u64,
    /// Bytes of one read or copy, at most 1 GiB; 0 = 4 MiB.
    pub chunk_bytes: u64,
    /// Time to compute a layer, for forecasts.
    pub layer_compute_ns: u64,
    /// Rate from the file to host memory; 0 = not known.
    pub disk_bytes_per_s: u64,
    /// Rate from host memory to the device; 0 = not known.
    pub device_bytes_per_s: u64,
    /// Rate at which the processor computes with weights in host memory; 0 = not known.
    pub processor_bytes_per_s: u64,
}

/// Memory that a plan is made for.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_memory_t {
    pub struct_size: u64,
    /// Free on the device; 0 = no device.
    pub device_free_bytes: u64,
    /// Host memory that the process may still use.
    pub host_free_bytes: u64,
    /// RAM of the machine, or the limit of its cgroup if that is less; 0 = host_free_bytes.
    pub host_total_bytes: u64,
    /// Memory that may be locked; UINT64_MAX = no limit.
    pub lockable_bytes: u64,
}

/// Options of kvt_stream_open.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_opts_t {
    pub struct_size: u64,
    /// KVT_STREAM_MEASURE, _ONCE, _IN_PLACE, _BUFFERED, _NO_URING, _MAPPED, _SIDECAR,
    /// _SET_PINNED_PERCENT, _DIRECT.
    pub flags: kvt_stream_flags_t,
    /// Required. May be closed afterwards.
    pub model: *const kvt_model_t,
    /// Null = defaults.
    pub terms: *const kvt_stream_terms_t,
    /// Charged for all memory, of the same runtime; null = none. Implies KVT_TERMS_SHRINKS: the
    /// budget can reclaim resident units and expert slots.
    pub budget: *const kvt_budget_t,
    /// 32 bits; the budget reclaims from owners of low priority first.
    pub priority: i64,
    /// Units in the order of a pass, without experts; null = the order of their numbers.
    pub order: *const u32,
    pub order_count: u64,
    /// Policy spec that chooses victims in KVT_STREAM_RING; empty = "fifo".
    pub policy: *const c_char,
    pub policy_bytes: u64,
    /// Policy spec of the expert slots; empty = "lru".
    pub expert_policy: *const c_char,
    pub expert_policy_bytes: u64,
    /// Path of the checksum file; implies KVT_STREAM_SIDECAR. Ignored with KVT_VERIFY_NEVER.
    pub sidecar: *const c_char,
    pub sidecar_bytes: u64,
    pub verify: kvt_verify_t,
    /// Reader threads, at most 64; 0 = 8.
    pub readers: u32,
    /// Reads in flight of one thread, at most 64; 0 = 64.
    pub depth: u32,
    /// Spans kept for kvt_stream_marks, at most 2^20; with any, each acquire takes a lock.
    pub marks: u32,
    /// Percent of the expert slots that the most used experts keep; 0 = 50.
    pub pinned_percent: u32,
    pub reserved: u32,
    /// Device of the same runtime, with memory of its own, that the engine computes on; null = the
    /// processor.
    pub device: *const kvt_device_t,
}

fn terms_of(given: &kvt_stream_terms_t) -> Result<(PlanOptions, Links)> {
    known_flags(given.flags, (2 * KVT_TERMS_EXPERT_SLOTS - 1) | KVT_TERMS_SHRINKS)?;
    no_reserved(given.reserved)?;
    let set = |value: u64, flag: u64| (value != 0 || given.flags & flag != 0).then_some(value);
    let expert_slots = set(given.expert_slots.into(), KVT_TERMS_EXPERT_SLOTS);
    let plan_options = PlanOptions {
        compute: match given.compute {
            0 => None,
            KVT_COMPUTE_HOST => Some(ComputeLocation::Host),
            KVT_COMPUTE_DEVICE => Some(ComputeLocation::Device),
            other => fail!(
                Invalid,
                "compute is {other}, which is unknown: set KVT_COMPUTE_HOST (1), KVT_COMPUTE_DEVICE \
                 (2), or 0 for the default"
            ),
        },
        mode: match given.mode {
            KVT_STREAM_TIERED => Mode::Tiered,
            KVT_STREAM_RING => Mode::Ring,
            other => fail!(
                Invalid,
                "mode is {other}, which is unknown: set KVT_STREAM_TIERED (0) or KVT_STREAM_RING (1)"
            ),
        },
        placement: match given.placement {
            KVT_PLACE_INTERLEAVED => Placement::Interleaved,
            KVT_PLACE_FIRST => Placement::First,
            KVT_PLACE_LAST => Placement::Last,
            other => fail!(
                Invalid,
                "placement is {other}, which is unknown: set one of KVT_PLACE_*, 0 to 2"
            ),
        },
        device_ceiling_bytes: set(given.device_ceiling_bytes, KVT_TERMS_DEVICE_CEILING),
        host_ceiling_bytes: set(given.host_ceiling_bytes, KVT_TERMS_HOST_CEILING),
        device_safety_bytes: set(given.device_safety_bytes, KVT_TERMS_DEVICE_SAFETY),
        host_reserve_bytes: set(given.host_reserve_bytes, KVT_TERMS_HOST_RESERVE),
        context: given.context,
        sequences: given.sequences,
        kv_element_bytes: given.kv_element_bytes,
        kv_bytes: set(given.kv_bytes, KVT_TERMS_KV),
        workspace_bytes: given.workspace_bytes,
        hidden_bytes: given.hidden_bytes,
        slots: given.slots,
        expert_slots: expert_slots.map(|_| given.expert_slots),
        shrinks: given.flags & KVT_TERMS_SHRINKS != 0,
        staging_bytes: given.staging_bytes,
        chunk_bytes: given.chunk_bytes,
        device_granularity_bytes: 0, // set from the device if units are in place
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

/// The inputs of a plan, except the model.
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
                host_is_limited: false,
                lockable_bytes: given.lockable_bytes,
            }
        }
    };
    Ok((plan_options, links, memory))
}

/// The options of a streamer, except device and budget.
///
/// # Safety
/// The pointers of `given` are null or valid for their lengths.
pub(crate) unsafe fn options(given: &kvt_stream_opts_t) -> Result<Opts> {
    known_flags(given.flags, (2 * KVT_STREAM_SET_PINNED_PERCENT - 1) | KVT_STREAM_DIRECT)?;
    no_reserved(given.reserved)?;
    let has = |flag: u64| given.flags & flag != 0;
    let Ok(priority) = i32::try_from(given.priority) else {
        fail!(
            Invalid,
            "priority is {}, accepted are {} to {}: set one in this range",
            given.priority,
            i32::MIN,
            i32::MAX
        );
    };
    // SAFETY: the caller's promise, for the whole block.
    unsafe {
        let (plan_options, links) = terms_of(&read(given.terms)?)?;
        if plan_options.compute == Some(ComputeLocation::Device) && given.device.is_null() {
            fail!(
                Unsupported,
                "compute of the terms is KVT_COMPUTE_DEVICE, and device is null: set device, or \
                 compute to KVT_COMPUTE_HOST"
            );
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
                other => fail!(
                    Invalid,
                    "verify is {other}, which is unknown: set one of KVT_VERIFY_*, 0 to 2"
                ),
            },
            sidecar,
            marks: given.marks as usize,
            pinned_percent: match given.pinned_percent {
                0 if !has(KVT_STREAM_SET_PINNED_PERCENT) => Opts::default().pinned_percent,
                percent => percent,
            },
            device: None,
            budget: None,
            priority,
        })
    }
}

// Plans of streamers.

/// Where a unit stays between uses: only in the file, in host memory, or in device memory.
pub type kvt_unit_resident_t = u32;

pub const KVT_RESIDENT_FILE: kvt_unit_resident_t = 1;
pub const KVT_RESIDENT_HOST: kvt_unit_resident_t = 2;
pub const KVT_RESIDENT_DEVICE: kvt_unit_resident_t = 3;

/// What limits a pass: computing, the link to the device, or the disk.
pub type kvt_binding_t = u32;

pub const KVT_BINDING_COMPUTE: kvt_binding_t = 1;
pub const KVT_BINDING_DEVICE: kvt_binding_t = 2;
pub const KVT_BINDING_DISK: kvt_binding_t = 3;

/// Formats of the description of a plan.
pub type kvt_plan_format_t = u32;

/// A plan as text for people.
pub const KVT_PLAN_TEXT: kvt_plan_format_t = 0;
/// A plan as one JSON object.
pub const KVT_PLAN_JSON: kvt_plan_format_t = 1;

/// A plan: the residency of units, the slots, and the memory that they need.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_plan_t {
    pub struct_size: u64,
    pub compute: kvt_compute_t,
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    pub mode: kvt_stream_mode_t,
    /// Number of units resident in device memory, in host memory, and in the file alone.
    pub device_units: u32,
    pub host_units: u32,
    pub file_units: u32,
    /// Slots for units that are not resident where they are used.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    pub expert_slots: u32,
    pub reserved: u32,
    /// Bytes of one expert slot.
    pub expert_slot_bytes: u64,
    /// Host memory for reads on their way to a device.
    pub staging_bytes: u64,
    /// Bytes of one read or copy.
    pub chunk_bytes: u64,
    /// Device memory of the plan.
    pub device_bytes: u64,
    /// Host memory of the plan.
    pub host_bytes: u64,
    /// Part of host_bytes that is locked.
    pub pinned_bytes: u64,
}

/// Forecast of a pass; all 0 if the rate of a link that the plan needs is not known.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_forecast_t {
    pub struct_size: u64,
    /// A pass in the steady state.
    pub pass_ns: u64,
    /// The first pass, without prefetched units.
    pub first_ns: u64,
    /// Lower bound of a pass: the longest of the three below.
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
    /// Passes a second: tokens, if a pass makes one. 0 if pass_ns is 0.
    pub tokens_per_s: f64,
    /// The resource that limits a pass; 0 = not known.
    pub binding: kvt_binding_t,
    pub reserved: u32,
}

/// Residency of a unit. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_residency_t {
    pub residency: kvt_unit_resident_t,
    /// 1: used in host memory, although the engine computes on a device; else 0.
    pub on_processor: u32,
}

/// The outputs that a plan is written to.
#[derive(Clone, Copy)]
pub(crate) struct PlanOut {
    pub plan: *mut kvt_stream_plan_t,
    pub forecast: *mut kvt_forecast_t,
    pub residency: *mut kvt_unit_residency_t,
    pub capacity: u64,
    pub stride_bytes: u64,
}

impl PlanOut {
    pub(crate) fn none() -> PlanOut {
        use std::ptr::null_mut;
        let (plan, forecast, residency) = (null_mut(), null_mut(), null_mut());
        PlanOut { plan, forecast, residency, capacity: 0, stride_bytes: 0 }
    }

    /// # Safety
    /// The pointers are null or valid for the sizes that their structs state.
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
    /// The pointers passed [`PlanOut::check`].
    pub(crate) unsafe fn give(&self, plan: &Plan) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            let (capacity, stride) = (self.capacity, self.stride_bytes);
            let rows = Strided::new(self.residency, capacity, stride, MAX_UNITS as u64)?;
            let units = plan.residencies.iter().zip(&plan.on_processor);
            let values = units.map(|(residency, on_processor)| kvt_unit_residency_t {
                residency: match residency {
                    Residency::File => KVT_RESIDENT_FILE,
                    Residency::Host => KVT_RESIDENT_HOST,
                    Residency::Device => KVT_RESIDENT_DEVICE,
                },
                on_processor: u32::from(*on_processor),
            });
            give(&rows, self.residency.is_null(), values, std::ptr::null_mut())?;
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
    let count = |residency: Residency| {
        plan.residencies.iter().filter(|&&other| other == residency).count() as u32
    };
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

/// A plan in the format `kind`.
pub(crate) fn format_plan(
    kind: u32,
    text: impl FnOnce() -> String,
    json: impl FnOnce() -> String,
) -> Result<String> {
    match kind {
        KVT_PLAN_TEXT => Ok(text()),
        KVT_PLAN_JSON => Ok(json()),
        other => fail!(
            Invalid,
            "kind is {other}, which is unknown: pass KVT_PLAN_TEXT (0) or KVT_PLAN_JSON (1)"
        ),
    }
}

/// Calls `body` with a plan for a model, and with the inputs of the plan.
///
/// # Safety
/// Pointers are null or valid for the size they state.
unsafe fn with_plan<R>(
    model: *const kvt_model_t,
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
    body: impl FnOnce(&Plan, &Inputs<'_>) -> Result<R>,
) -> Result<R> {
    // SAFETY: the caller's promise.
    let (plan_options, links, memory) = unsafe { inputs_of(terms, memory)? };
    with_model(model, |opened| {
        let (units, facts) = (&opened.units, &opened.model.facts);
        let inputs = Inputs { units, facts, memory, links, plan_options: &plan_options };
        body(&Plan::make(&inputs)?, &inputs)
    })
}

/// Plans where units are resident, and forecasts a pass. Opens no files and takes no memory.
/// kvt_stream_open makes the same plan from the same terms and the memory that is free then.
///
/// @param memory     Null = this machine, without a device.
/// @param out        May be null, as may forecast.
/// @param residency  One entry for each unit; may be null with capacity 0.
/// @return KVT_E_BUDGET (too little memory: the message names the least), KVT_E_TOO_SMALL,
///         KVT_E_LIMIT.
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
    with_plan(model, terms, memory, |plan, _| to.give(plan))
}

/// Describes the plan of kvt_model_plan as text, with the reason for each figure.
///
/// @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
/// @param out           Receives the text, not NUL-terminated.
/// @param out_capacity  Free memory changes between calls: add some room to the size.
/// @return As kvt_model_plan.
#[capi]
pub unsafe extern "C" fn kvt_model_plan_describe(
    model: *const kvt_model_t,
    terms: *const kvt_stream_terms_t,
    memory: *const kvt_stream_memory_t,
    kind: kvt_plan_format_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let description = with_plan(model, terms, memory, |plan, inputs| {
        format_plan(kind, || plan.text(inputs), || plan.json(inputs))
    })?;
    give_text(&description, out, out_capacity, out_bytes)
}

/// Forecasts a pass of the plan of kvt_model_plan with other link rates. Every link that the plan
/// needs must have a rate, in links or in terms.
///
/// @param links  GB/s (1e9 bytes) of h2d, disk and cpu, such as "h2d=13,disk=3.3"; others as in
///               terms.
/// @return As kvt_model_plan; KVT_E_SPEC.
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
    let forecast = with_plan(model, terms, memory, |plan, inputs| plan.what_if(inputs, links))?;
    write(out, &forecast_of(Some(&forecast)));
    Ok(())
}

// Streamers.

/// A streamer: loads the units of a model ahead of their use, under a budget of memory. Resident
/// units stay in memory; the others pass through slots and are prefetched in the order of a pass.
/// Threads may lease units at the same time.
pub struct kvt_stream_t(());

/// Flags of kvt_stream_acquire.
pub type kvt_acquire_flags_t = u64;

/// Do not wait: KVT_E_AGAIN if the unit is not loaded.
pub const KVT_ACQUIRE_POLL: kvt_acquire_flags_t = 1;
/// Do not wait for copies that were submitted to the device: the bytes are complete after
/// kvt_unit_lease_t.event. See kvt_device_stream_wait.
pub const KVT_ACQUIRE_SUBMITTED: kvt_acquire_flags_t = 2;

/// A lease of a unit: the right to read its bytes until kvt_stream_release. A copy of the struct is
/// the same lease, and is not released on its own.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_lease_t {
    pub struct_size: u64,
    /// Read-only, a multiple of 4096. A part of a tensor is at address + kvt_part_t.at.
    pub address: *const c_void,
    /// kvt_unit_t.image_bytes.
    pub bytes: u64,
    pub unit: u32,
    /// Where the address is valid.
    pub memory: kvt_memory_t,
    /// Opaque; 0 = released.
    pub place: u64,
    /// Device event that completes the bytes; 0 = complete. Valid until the release.
    pub event: u64,
    /// When the lease was granted; 0 = not recorded.
    pub since_ns: u64,
}

/// A streamer, and the runtime that it belongs to.
pub(crate) struct StreamNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) streamer: Streamer,
}

noun!(StreamNoun, kvt_stream_t, 18, "streamer");

/// The code of the memory that a lease refers to; never 0.
fn place_code(location: Target) -> u64 {
    match location {
        Target::Resident => 1,
        Target::Slot(slot) => u64::from(slot) << 2 | 2,
        Target::ExpertSlot(slot) => u64::from(slot) << 2 | 3,
    }
}

/// The inverse of [`place_code`].
fn place_of(code: u64) -> Result<Target> {
    match (code & 3, u32::try_from(code >> 2)) {
        (1, Ok(0)) => Ok(Target::Resident),
        (2, Ok(slot)) => Ok(Target::Slot(slot)),
        (3, Ok(slot)) => Ok(Target::ExpertSlot(slot)),
        _ if code == 0 => fail!(
            State,
            "place of the lease is 0: the lease was released before, or kvt_stream_acquire did not \
             write it"
        ),
        _ => fail!(
            Invalid,
            "place of the lease is {code:#x}, which kvt_stream_acquire did not write: pass the lease \
             unchanged"
        ),
    }
}

/// Opens a streamer: opens the files, makes a plan, takes its memory, and begins to load resident
/// units. With a device, the engine computes there and units are loaded to device memory.
///
/// @return KVT_E_BUDGET (too little memory: the message names the least), KVT_E_CORRUPT (a file
///         changed since the model was opened), KVT_E_UNSUPPORTED (KVT_COMPUTE_DEVICE without a
///         device; KVT_STREAM_IN_PLACE on a host or custom device; flags that exclude each other),
///         KVT_E_UNAVAILABLE (KVT_STREAM_DIRECT), KVT_E_SPEC, KVT_E_NOT_FOUND, KVT_E_IO,
///         KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_stream_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_stream_opts_t,
    out: *mut *mut kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let mut opts = options(&given)?;
    if !given.budget.is_null() {
        opts.budget = Some(pin(given.budget, Access::Use)?.0.clone());
    }
    let opened = with_model(given.model, |opened| Ok(opened.clone()))?;
    let noun = on_runtime(runtime, |core| {
        if opts.budget.as_ref().is_some_and(|budget| !Arc::ptr_eq(budget.core(), core)) {
            fail!(
                Invalid,
                "the budget belongs to another runtime: pass a budget of the streamer's runtime"
            );
        }
        opts.device = device_of(core, given.device)?;
        let (model, units) = (opened.model.clone(), opened.units.clone());
        let streamer = Streamer::open(core, model, units, opts)?;
        Ok(StreamNoun { core: core.clone(), streamer })
    })?;
    out.write(insert(noun)?);
    Ok(())
}

/// Closes a streamer: ends calls that wait for units, waits for reads and copies in flight, and
/// saves new checksums to the sidecar.
///
/// @return KVT_E_BUSY (units are leased: the streamer stays open; or a read, a copy or an event of
///         kvt_stream_release did not end before the deadline: it stays closing, close again).
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

/// Leases a unit, and waits until it is loaded. The unit stays where it is until it was released as
/// often as it was acquired. If it is resident where it is used, this costs one atomic operation.
/// To retry a failed read, acquire the unit again.
///
/// @param flags  KVT_ACQUIRE_*, or 0.
/// @return KVT_E_AGAIN (KVT_ACQUIRE_POLL), KVT_E_TIMEOUT, KVT_E_BUSY (leases hold all slots, or the
///         unit itself after a failed copy), KVT_E_CORRUPT (wrong checksum, changed file),
///         KVT_E_IO, KVT_E_BUDGET (a unit larger than slots lost its memory: see
///         kvt_stream_rebalance).
#[capi]
pub unsafe extern "C" fn kvt_stream_acquire(
    stream: *const kvt_stream_t,
    unit: u32,
    flags: kvt_acquire_flags_t,
    deadline_ns: u64,
    out: *mut kvt_unit_lease_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    known_flags(flags, KVT_ACQUIRE_POLL | KVT_ACQUIRE_SUBMITTED)?;
    let has = |flag: u64| flags & flag != 0;
    let (poll, when_submitted) = (has(KVT_ACQUIRE_POLL), has(KVT_ACQUIRE_SUBMITTED));
    let opts = AcquireOpts { poll, when_issued: when_submitted, deadline_ns };
    let lease = enter(stream)?.streamer.acquire(unit, opts)?;
    let row = kvt_unit_lease_t {
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
    write(out, &row);
    Ok(())
}

/// Releases a lease, and clears the struct. Allowed while the streamer closes. If a copy failed
/// after KVT_ACQUIRE_SUBMITTED, the lease is released and the copy's error is returned: results
/// computed with the unit are wrong. After another error the lease is not released.
///
/// @param after  Device event after which the memory may be reused; 0 = now. The streamer takes the
///               event over, except with KVT_E_UNSUPPORTED, _INVALID, _HANDLE and _STATE. See
///               kvt_device_import_event.
/// @return KVT_E_STATE (released before), KVT_E_UNSUPPORTED (an event, without a device).
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
    let unit_lease = UnitLease {
        lease: Lease { unit: given.unit, location, event: None },
        address: given.address.addr() as u64,
        bytes: given.bytes,
        memory: memory_of(given.memory)?,
        since_ns: given.since_ns,
    };
    let stream = inspect(stream)?;
    if after.is_some() && !stream.streamer.has_device() {
        fail!(
            Unsupported,
            "`after` is an event of a device, and the streamer has no device: pass 0"
        );
    }
    let copied = stream.streamer.give_back(&unit_lease, after)?;
    write(lease, &kvt_unit_lease_t { unit: given.unit, ..kvt_unit_lease_t::zeroed() });
    copied
}

// Passes.

/// Flags of kvt_stream_limits_t: use host_bytes or device_bytes even if it is 0.
pub type kvt_limit_flags_t = u64;

pub const KVT_LIMIT_HOST: kvt_limit_flags_t = 1;
pub const KVT_LIMIT_DEVICE: kvt_limit_flags_t = 2;

/// Memory for weights from now on; 0 = unchanged.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_limits_t {
    pub struct_size: u64,
    pub flags: kvt_limit_flags_t,
    /// Most host memory.
    pub host_bytes: u64,
    /// Most device memory.
    pub device_bytes: u64,
    /// Tokens that KV is reserved for.
    pub context: u32,
    pub reserved: u32,
}

/// Progress of loading the resident units.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_progress_t {
    pub struct_size: u64,
    /// Units that are not yet where the plan puts them.
    pub missing: u64,
    /// Units that are resident in memory by the plan.
    pub resident_units: u64,
    /// Bytes read so far, for any purpose.
    pub read_bytes: u64,
}

/// Waits until all resident units are loaded. Optional: acquired units are loaded first.
///
/// @return KVT_E_TIMEOUT, KVT_E_IO, KVT_E_CORRUPT.
#[capi]
pub unsafe extern "C" fn kvt_stream_wait_resident(
    stream: *const kvt_stream_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    refuse_reentry()?;
    enter(stream)?.streamer.load(deadline_ns)
}

/// Reads the progress of loading the resident units.
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

/// Begins a pass, in which units are prefetched in their order. Fails if a file was changed.
///
/// @return KVT_E_CORRUPT (a changed file), KVT_E_IO.
#[capi]
pub unsafe extern "C" fn kvt_stream_pass_begin(
    stream: *const kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(stream)?.streamer.pass_begin()
}

/// Ends a pass. Without KVT_STREAM_ONCE, the first units of the next pass are being prefetched.
#[capi]
pub unsafe extern "C" fn kvt_stream_pass_end(
    stream: *const kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(stream)?.streamer.pass_end()
}

/// Prefetches units that the engine will use, such as the experts that a router chose, into slots
/// that are free or whose unit may be evicted. Experts of earlier hints that were not used may be
/// evicted.
///
/// @return KVT_E_LIMIT (more than 2^18 units).
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

/// Gives weights more or less memory while passes go on, and makes a new plan. Returns at once:
/// leased units move after their release, the others are loaded meanwhile (kvt_stream_progress).
/// Slots stay, except expert slots: their number may fall, and rise up to the number at opening.
///
/// @param out  Receives the new plan; may be null.
/// @return KVT_E_BUDGET (slots do not fit: nothing was changed), KVT_E_UNSUPPORTED (in place, a
///         unit would move between processor and device).
#[capi]
pub unsafe extern "C" fn kvt_stream_rebalance(
    stream: *const kvt_stream_t,
    limits: *const kvt_stream_limits_t,
    out: *mut kvt_stream_plan_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = PlanOut { plan: out, ..PlanOut::none() };
    to.check()?;
    let given = read(limits)?;
    known_flags(given.flags, KVT_LIMIT_HOST | KVT_LIMIT_DEVICE)?;
    no_reserved(given.reserved)?;
    let set = |bytes: u64, flag: u64| (bytes != 0 || given.flags & flag != 0).then_some(bytes);
    let host = set(given.host_bytes, KVT_LIMIT_HOST);
    let device = set(given.device_bytes, KVT_LIMIT_DEVICE);
    let context = (given.context != 0).then_some(given.context);
    let plan = enter(stream)?.streamer.rebalance(host, device, context)?;
    to.give(&plan)
}

// Statistics of streamers.

/// Stages of a unit's load and use.
pub type kvt_stage_t = u32;

/// A chunk was read.
pub const KVT_STAGE_READ: kvt_stage_t = 1;
/// A chunk was copied to the device.
pub const KVT_STAGE_COPY: kvt_stage_t = 2;
/// The engine leased a unit.
pub const KVT_STAGE_USE: kvt_stage_t = 3;
/// The engine waited for a unit.
pub const KVT_STAGE_WAIT: kvt_stage_t = 4;

/// Counters of a streamer since it was opened.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_stats_t {
    pub struct_size: u64,
    /// Passes that ended.
    pub passes: u64,
    /// Duration of the last pass.
    pub pass_ns: u64,
    /// Leases that were granted.
    pub acquires: u64,
    /// Acquires that waited.
    pub waited: u64,
    /// Time that acquires waited: for reads, for copies to the device, and for slots.
    pub wait_read_ns: u64,
    pub wait_copy_ns: u64,
    pub wait_slot_ns: u64,
    /// Time that units were leased; of resident ones only with kvt_stream_opts_t.marks.
    pub use_ns: u64,
    pub read_bytes: u64,
    /// Sum of the durations of reads: more than the elapsed time where reads overlapped.
    pub read_ns: u64,
    /// Bytes a second of the disk, as measured or set; 0 = not known.
    pub read_ceiling_bytes_per_s: u64,
    /// Bytes copied to the device.
    pub copied_bytes: u64,
    /// Sum of the durations of copies.
    pub copy_ns: u64,
    /// Bytes a second of the device link, as set; 0 = not known.
    pub copy_ceiling_bytes_per_s: u64,
    /// Bytes that were loaded and never used.
    pub wasted_bytes: u64,
    /// Reads and copies that failed.
    pub failed: u64,
    /// Acquired experts that were in a slot.
    pub expert_hits: u64,
    /// Acquired experts that had to be loaded.
    pub expert_misses: u64,
    /// Part of read_bytes that the device read itself (KVT_STREAM_DIRECT).
    pub direct_bytes: u64,
    /// Direct reads that failed, and went through host memory; three in a row end direct reads.
    pub direct_failed: u64,
}

/// Expert counters of a layer. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_expert_stats_t {
    pub layer: u32,
    pub reserved: u32,
    /// Acquired experts that were in a slot.
    pub hits: u64,
    /// Acquired experts that had to be loaded.
    pub misses: u64,
    /// Bytes that were loaded.
    pub bytes: u64,
}

/// A span of time. Stands in arrays.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_span_t {
    pub stage: kvt_stage_t,
    pub unit: u32,
    /// CLOCK_MONOTONIC, as end_ns.
    pub begin_ns: u64,
    pub end_ns: u64,
}

/// Reads the current plan, its forecast, and the residency of each unit: see kvt_model_plan.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^18).
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

/// Describes the current plan as text: see kvt_model_plan_describe.
///
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_stream_plan_describe(
    stream: *const kvt_stream_t,
    kind: kvt_plan_format_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let streamer = &inspect(stream)?.streamer;
    let description = format_plan(kind, || streamer.plan_text(), || streamer.plan_json())?;
    give_text(&description, out, out_capacity, out_bytes)
}

/// Forecasts a pass of the current plan with other link rates.
///
/// @param links  See kvt_model_forecast; others keep their current rate.
/// @return KVT_E_SPEC, KVT_E_LIMIT (links over 256 bytes).
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

/// Reads the counters of a streamer.
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

/// Highest accepted capacity of an array of rows.
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

/// Reads expert counters, one row for each layer that has experts.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^24).
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

/// Reads the last kvt_stream_opts_t.marks spans of time, the oldest first.
///
/// @return As kvt_stream_layers.
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

/// Describes in one line how files are read, and why no faster method is used.
///
/// @param out  Receives the text, not NUL-terminated.
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_stream_describe_io(
    stream: *const kvt_stream_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let (method, reason) = inspect(stream)?.streamer.engine();
    let line = match reason {
        Some(reason) => format!("{method}: {reason}"),
        None => method,
    };
    give_text(&line, out, out_capacity, out_bytes)
}

/// Reads a unit from its files, not from memory, on the calling thread, and compares it with its
/// checksums. Unknown checksums are stored.
///
/// @param out_sum  Receives the checksum of the unit; may be null.
/// @return KVT_E_CORRUPT (wrong checksum), KVT_E_IO, KVT_E_BUDGET.
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

/// Reads the checksum of a unit.
///
/// @return KVT_E_NOT_FOUND (no sidecar has it, and not all of the unit was read with checksums).
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

/// Reads the address that a unit has from open to close (KVT_STREAM_IN_PLACE). The address has
/// memory only while the unit is leased: other reads see zeros or incomplete data, and may be an
/// error that ends the device's context. With a device it is a device address, except for units
/// that the processor uses (kvt_unit_lease_t.memory): they are outside the range.
///
/// @param unit       KVT_NONE = the range of all units.
/// @param out_bytes  May be null.
/// @return KVT_E_STATE (units are not in place).
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
