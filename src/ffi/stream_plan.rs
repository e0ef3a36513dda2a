//! Plans: who lives where, what a pass will take, and what both are made from.

use std::ffi::c_char;

use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, check_out, give, give_text, text, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::model::{Parts, kvt_model_t, with_model};
use crate::ffi::status::kvt_status_t;
use crate::ffi::stream_opts::{inputs_of, kvt_stream_memory_t, kvt_stream_terms_t};
use crate::stream::plan::{
    Binding, ComputeLocation, Forecast, Inputs, Links, Mode, Plan, Residency,
};
use crate::stream::units::MAX_UNITS;

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
            ComputeLocation::Host => crate::ffi::stream_opts::KVT_COMPUTE_HOST,
            ComputeLocation::Device => crate::ffi::stream_opts::KVT_COMPUTE_DEVICE,
        },
        mode: match plan.mode {
            Mode::Tiered => crate::ffi::stream_opts::KVT_STREAM_TIERED,
            Mode::Ring => crate::ffi::stream_opts::KVT_STREAM_RING,
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
pub unsafe extern "C" fn kvt_model_what_if(
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
