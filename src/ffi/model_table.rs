//! Models of a format that is not known here: the engine names the bytes of each unit.

use std::ffi::c_char;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, insert, known_flags, read, require, text};
use crate::ffi::error::kvt_error_t;
use crate::ffi::model::{KVT_NONE, ModelNoun, Parts, kvt_model_t, kvt_str_t, paths};
use crate::ffi::model_look::role_of;
use crate::ffi::status::kvt_status_t;
use crate::stream::model::{MAX_NAME_BYTES, MAX_TENSORS};
use crate::stream::units::{Entry, MAX_UNITS, NONE, Range, Role, Units};

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
