//! Memory budgets of a plan, with the reason for each figure; and limits of a plan's inputs.

use crate::base::status::Result;
use crate::fail;
use crate::stream::model::Facts;
use crate::stream::plan::{ComputeLocation, Figure, Inputs, PlanOptions, size};
use crate::stream::units::{ALIGN_BYTES, CHUNK_ALIGN_BYTES, MAX_CHUNK_BYTES, MAX_UNITS, Role};

/// Kept free on a device for drivers and kernels: 256 MiB.
pub const DEVICE_SAFETY_BYTES: u64 = 256 << 20;
/// Kept free of host memory: 6 GiB.
pub const HOST_RESERVE_BYTES: u64 = 6 << 30;
/// Machines with less memory than this keep a quarter free instead.
const SMALL_HOST_BYTES: u64 = 4 * HOST_RESERVE_BYTES;
/// Least memory kept free of a cgroup's limit, unless a quarter of the limit is less: 64 MiB.
const LEAST_LIMIT_RESERVE_BYTES: u64 = 64 << 20;
/// Default context that KV is reserved for, in tokens; the model's own context if that is shorter.
pub const DEFAULT_CONTEXT: u32 = 4096;
/// Default bytes of a KV element.
const KV_NUMBER_BYTES: u32 = 2;

/// The budgets for weights, and how they were computed.
#[derive(Clone, Debug, Default)]
pub(super) struct Budgets {
    /// Budget of the device; 0 if the engine computes on the processor.
    pub device_bytes: u64,
    /// Budget of host memory.
    pub host_bytes: u64,
    /// Free memory where the engine computes, for error messages.
    pub compute_free_bytes: u64,
    /// Bytes that KV, workspace and reserves need beyond that free memory.
    pub compute_short_bytes: u64,
    /// How the budgets were computed.
    pub figures: Vec<Figure>,
}

/// A difference that records each step as a figure.
struct BudgetSum<'a> {
    figures: &'a mut Vec<Figure>,
    left: u64,
    /// Bytes that were subtracted but not available.
    short: u64,
}

impl BudgetSum<'_> {
    fn begin<'a>(
        figures: &'a mut Vec<Figure>,
        name: &'static str,
        bytes: u64,
        why: &str,
    ) -> BudgetSum<'a> {
        figures.push(Figure { name, bytes, takes: false, total: false, why: why.to_string() });
        BudgetSum { figures, left: bytes, short: 0 }
    }

    fn take(&mut self, name: &'static str, bytes: u64, why: String) {
        if bytes > 0 {
            self.figures.push(Figure { name, bytes, takes: true, total: false, why });
        }
        self.short = self.short.saturating_add(bytes.saturating_sub(self.left));
        self.left = self.left.saturating_sub(bytes);
    }

    fn end(self, name: &'static str, ceiling: Option<u64>) -> u64 {
        let mut left = self.left;
        let mut why = "what is left for weights".to_string();
        if let Some(ceiling) = ceiling {
            why = match ceiling < left {
                true => format!("your ceiling; {} would be left", size(left)),
                false => {
                    format!("what is left for weights; your ceiling is {}", size(ceiling))
                }
            };
            left = left.min(ceiling);
        }
        self.figures.push(Figure { name, bytes: left, takes: false, total: true, why });
        left
    }
}

/// Bytes of the KV of `layers` layers, with the reason; all KV if the caller sets its size. It is
/// not known which layers have a window: full layers are counted first.
fn kv(facts: &Facts, plan_options: &PlanOptions, layers: u32) -> Result<(u64, String)> {
    if let Some(bytes) = plan_options.kv_bytes {
        return Ok((bytes, "as you set it".to_string()));
    }
    let usual = if facts.context == 0 { DEFAULT_CONTEXT } else { facts.context };
    let context = match plan_options.context {
        0 => usual.min(DEFAULT_CONTEXT),
        said => said,
    };
    let sequences = plan_options.sequences.max(1);
    let number = if plan_options.kv_element_bytes == 0 {
        KV_NUMBER_BYTES
    } else {
        plan_options.kv_element_bytes
    };
    let full_layers = layers.min(facts.layers.saturating_sub(facts.windowed_layers));
    let (windowed, window) = (layers - full_layers, context.min(facts.window));
    let tokens = |layers: u32, tokens: u32| u128::from(layers) * u128::from(tokens);
    let tokens = tokens(full_layers, context) + tokens(windowed, window);
    let dims = u128::from(facts.key_dim) + u128::from(facts.value_dim);
    let factors = [dims, facts.kv_heads.into(), number.into(), sequences.into()];
    let product = factors.iter().try_fold(tokens, |a, &b| a.checked_mul(b));
    let Some(bytes) = product.and_then(|all| u64::try_from(all).ok()) else {
        fail!(
            Limit,
            "KV of {context} tokens and {sequences} sequences overflows: lower the context or the \
             number of sequences"
        );
    };
    let each = format!(
        "{} heads x ({} + {}) numbers x {number} bytes",
        facts.kv_heads, facts.key_dim, facts.value_dim
    );
    let why = match windowed {
        0 => format!("{layers} layers x {each} x {context} tokens x {sequences} sequences"),
        _ => format!(
            "{each} x {sequences} sequences x ({full_layers} layers x {context} tokens + \
             {windowed} layers x {window} tokens, no more than their window of {})",
            facts.window
        ),
    };
    let unsure = facts.window > 0 && facts.windowed_layers == 0 && facts.window < context;
    let note = match unsure {
        false => String::new(),
        true => format!(
            "; some layers keep no more than {} tokens, but which is not known",
            facts.window
        ),
    };
    Ok((bytes, why + &note))
}

/// Bytes of host memory that stay free, with the reason.
fn reserve(inputs: &Inputs) -> (u64, String) {
    if let Some(bytes) = inputs.plan_options.host_reserve_bytes {
        return (bytes, "kept free, as you set it".to_string());
    }
    let total = match inputs.memory.host_total_bytes {
        0 => inputs.memory.host_free_bytes,
        total => total,
    };
    if inputs.memory.host_is_limited {
        let bytes = (total / 16).clamp(LEAST_LIMIT_RESERVE_BYTES, HOST_RESERVE_BYTES);
        let why =
            format!("kept free for this process: a sixteenth of its limit of {}", size(total));
        return (bytes.min(total / 4), why);
    }
    if total < SMALL_HOST_BYTES {
        return (
            total / 4,
            format!("kept free: a quarter of {}, since the machine is small", size(total)),
        );
    }
    (HOST_RESERVE_BYTES, "kept free for other programs".to_string())
}

/// Computes the budgets. KV of layers that the processor computes is in host memory.
pub(super) fn budgets(inputs: &Inputs, compute: ComputeLocation) -> Result<Budgets> {
    let (plan_options, memory) = (inputs.plan_options, &inputs.memory);
    let facts = inputs.facts;
    let (kv_bytes, kv_why) = kv(facts, plan_options, facts.layers)?;
    let mut all = Budgets::default();
    let reserves = [
        ("workspace", plan_options.workspace_bytes, "workspace of the engine"),
        ("hidden", plan_options.hidden_bytes, "hidden states"),
    ];
    let on_processor = plan_options.processor_layers.min(facts.layers);
    let (on_host, on_device) = match (compute, plan_options.kv_bytes) {
        (ComputeLocation::Host, _) => (kv_bytes, 0),
        (ComputeLocation::Device, None) => (
            kv(facts, plan_options, on_processor)?.0,
            kv(facts, plan_options, facts.layers - on_processor)?.0,
        ),
        (ComputeLocation::Device, Some(bytes)) => {
            let on_host = part(bytes, on_processor, facts.layers);
            (on_host, bytes - on_host)
        }
    };
    if compute == ComputeLocation::Device {
        let safety = plan_options.device_safety_bytes.unwrap_or(DEVICE_SAFETY_BYTES);
        let free = memory.device_free_bytes;
        let mut sum =
            BudgetSum::begin(&mut all.figures, "device free", free, "reported by the device");
        sum.take("device safety", safety, "kept free for driver and kernels".to_string());
        sum.take("device kv", on_device, kv_why.clone());
        for (name, bytes, why) in reserves {
            sum.take(name, bytes, why.to_string());
        }
        (all.compute_free_bytes, all.compute_short_bytes) = (free, sum.short);
        all.device_bytes = sum.end("device budget", plan_options.device_ceiling_bytes);
    }
    let free = memory.host_free_bytes;
    let why = "headroom of the cgroup or available memory, whichever is less";
    let mut sum = BudgetSum::begin(&mut all.figures, "host free", free, why);
    let (keep_slots, why) = reserve(inputs);
    sum.take("host reserve", keep_slots, why);
    match compute {
        ComputeLocation::Host => sum.take("host kv", on_host, kv_why),
        ComputeLocation::Device => {
            let why =
                format!("of {} layers that the processor computes", plan_options.processor_layers);
            sum.take("host kv", on_host, why);
        }
    }
    if compute == ComputeLocation::Host {
        for (name, bytes, why) in reserves {
            sum.take(name, bytes, why.to_string());
        }
        (all.compute_free_bytes, all.compute_short_bytes) = (free, sum.short);
    }
    all.host_bytes = sum.end("host budget", plan_options.host_ceiling_bytes);
    Ok(all)
}

/// `some` parts of `all` parts of `bytes`.
fn part(bytes: u64, some: u32, all: u32) -> u64 {
    if all == 0 {
        return 0;
    }
    let part = u128::from(bytes) * u128::from(some.min(all)) / u128::from(all);
    u64::try_from(part).unwrap_or(bytes)
}

// Limits of the inputs of a plan.

/// Most bytes of all units; sums cannot overflow.
const MAX_MODEL_BYTES: u64 = 1 << 60;
/// Most slots.
pub const MAX_SLOTS: u32 = 1 << 16;
/// Default bytes of one read or copy. A disk gives its full rate for a few reads of this size, and
/// a unit that is acquired out of order waits for no more than these.
const CHUNK_BYTES: u64 = 4 << 20;

/// Fails on inputs from which no plan can be made.
pub(super) fn check(inputs: &Inputs, compute: ComputeLocation) -> Result<()> {
    let units = &inputs.units.units;
    if units.is_empty() {
        fail!(Invalid, "the model has no units: there is nothing to place");
    }
    if units.len() > MAX_UNITS {
        fail!(Limit, "{} units, the limit is {MAX_UNITS}", units.len());
    }
    let mut sum = 0u64;
    for unit in units {
        sum = match sum.checked_add(unit.image_bytes) {
            Some(sum) if sum <= MAX_MODEL_BYTES => sum,
            _ => fail!(
                Limit,
                "the units have more than {MAX_MODEL_BYTES} bytes, the limit of a model"
            ),
        };
    }
    let plan_options = inputs.plan_options;
    if plan_options.slots > MAX_SLOTS {
        fail!(Limit, "{} slots, the limit is {MAX_SLOTS}", plan_options.slots);
    }
    if plan_options.chunk_bytes > MAX_CHUNK_BYTES {
        fail!(
            Limit,
            "chunks of {} bytes, the limit is {MAX_CHUNK_BYTES}",
            plan_options.chunk_bytes
        );
    }
    let layers = units.iter().filter(|unit| unit.role == Role::Layer).count();
    if plan_options.processor_layers as usize > layers {
        let requested = plan_options.processor_layers;
        fail!(Invalid, "processor_layers is {requested}, and the model has {layers} layers");
    }
    if plan_options.processor_layers > 0 && compute == ComputeLocation::Host {
        fail!(
            Invalid,
            "processor_layers needs an engine that computes on a device: the processor computes \
             all layers"
        );
    }
    Ok(())
}

/// Rounds up to [`ALIGN_BYTES`].
pub(super) fn align_up(bytes: u64) -> u64 {
    bytes.div_ceil(ALIGN_BYTES).saturating_mul(ALIGN_BYTES)
}

/// Rounds up to [`CHUNK_ALIGN_BYTES`].
fn chunk_align_up(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_ALIGN_BYTES).saturating_mul(CHUNK_ALIGN_BYTES)
}

/// Bytes of one read or copy: as set, else the default, but no more than the largest unit.
pub(super) fn chunk_bytes(inputs: &Inputs) -> u64 {
    let largest = inputs.units.units.iter().map(|unit| unit.image_bytes).max().unwrap_or(0);
    match inputs.plan_options.chunk_bytes {
        0 => CHUNK_BYTES.min(chunk_align_up(largest.max(1))),
        said => chunk_align_up(said),
    }
}
