//! What a streamer is opened with, and a plan made from.

use std::ffi::c_char;

use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, known_flags, read, text};
use crate::ffi::budget::kvt_budget_t;
use crate::ffi::device::kvt_device_t;
use crate::ffi::model::{kvt_model_t, path};
use crate::ffi::policy_use::numbers;
use crate::io::model_files::real::ModelFilesOpts;
use crate::stream::plan::{ComputeLocation, Links, Memory, Mode, Placement, PlanOptions};
use crate::stream::streamer::{Opts, Verify, memory_of};
use crate::stream::units::MAX_UNITS;

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
pub const KVT_STREAM_SHRINKS: u64 = 256;

/// kvt_stream_opts_t.flags: the disk is measured first, if its speed is not said: that reads
/// up to 256 MiB.
pub const KVT_STREAM_MEASURE: u64 = 1;
/// No pass follows a pass: nothing is fetched ahead across its end.
pub const KVT_STREAM_ONCE: u64 = 2;
/// Every unit has an address of its own, which never changes, and memory only while it is
/// there: see kvt_stream_fixed. On a device it takes whole pieces of what the device maps by
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
pub const KVT_STREAM_PINNED: u64 = 128;
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
    /// KVT_TERMS_*, KVT_STREAM_SHRINKS.
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
    pub kv_number_bytes: u32,
    /// So many of the last layers are computed by the processor; for a device seat.
    pub processor_layers: u32,
    /// KV; 0 = computed from the context.
    pub kv_bytes: u64,
    /// Memory that the engine computes in.
    pub workspace_bytes: u64,
    /// Buffers for hidden states.
    pub hidden_bytes: u64,
    /// Slots for experts; 0 = as many as there is room for, with KVT_STREAM_SHRINKS as few as a
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
    /// KVT_STREAM_SHRINKS.
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
    known_flags(given.flags, (2 * KVT_TERMS_EXPERT_SLOTS - 1) | KVT_STREAM_SHRINKS)?;
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
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
        kv_number_bytes: given.kv_number_bytes,
        kv_bytes: said(given.kv_bytes, KVT_TERMS_KV),
        workspace_bytes: given.workspace_bytes,
        hidden_bytes: given.hidden_bytes,
        slots: given.slots,
        expert_slots: expert_slots.map(|_| given.expert_slots),
        shrinks: given.flags & KVT_STREAM_SHRINKS != 0,
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
        true => memory_of(&Opts::default()),
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
    known_flags(given.flags, (2 * KVT_STREAM_PINNED - 1) | KVT_STREAM_DIRECT)?;
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
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
                0 if !has(KVT_STREAM_PINNED) => Opts::default().pinned_percent,
                said => said,
            },
            device: None,
            budget: None,
            priority,
        })
    }
}
