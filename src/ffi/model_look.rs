//! What is where in a model: units, tensors, and the parts that both meet in.

use std::ffi::c_char;

use crate::base::status::{Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, check_out, give, require, text, write};
use crate::ffi::model::{KVT_NONE, Parts, kvt_model_t, with_model};
use crate::ffi::status::kvt_status_t;
use crate::stream::units::{MAX_PARTS, NONE, Part, Role};

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
    count_out: *mut u64,
    of: impl FnOnce(&Parts) -> Result<&[Part]>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let array = unsafe { Strided::new(rows, capacity, stride_bytes, MAX_PARTS as u64)? };
    with_model(model, |parts| {
        let found = of(parts)?;
        // SAFETY: the caller's promise.
        unsafe { give(&array, rows.is_null(), found.iter().map(row_of), count_out) }
    })
}

/// What is in a unit, in the order of places.
///
/// @param model         The model.
/// @param unit          The unit.
/// @param parts         Receives its parts; null with room for 0 asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_part_t).
/// @param count_out     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `parts` is null or valid for writes of its entries, `count_out` for a write.
#[capi]
pub unsafe extern "C" fn kvt_model_unit_parts(
    model: *const kvt_model_t,
    unit: u32,
    parts: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    count_out: *mut u64,
) -> kvt_status_t {
    give_parts(model, parts, capacity, stride_bytes, count_out, |all| {
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
/// @param count_out     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return As kvt_model_unit_parts.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `parts` is null or valid for writes of its entries, `count_out` for a write.
#[capi]
pub unsafe extern "C" fn kvt_model_tensor_parts(
    model: *const kvt_model_t,
    tensor: u32,
    parts: *mut kvt_part_t,
    capacity: u64,
    stride_bytes: u64,
    count_out: *mut u64,
) -> kvt_status_t {
    give_parts(model, parts, capacity, stride_bytes, count_out, |all| {
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
pub unsafe extern "C" fn kvt_model_find(
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
pub unsafe extern "C" fn kvt_model_layer(
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
