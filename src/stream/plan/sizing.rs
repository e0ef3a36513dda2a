//! How much memory a plan may use, and why as much as that.

use crate::base::status::Result;
use crate::fail;
use crate::stream::model::Facts;
use crate::stream::plan::show::size;
use crate::stream::plan::{Figure, Inputs, Seat, Wishes};

/// Kept free on a device: what drivers and kernels take without asking.
pub const DEVICE_SAFETY_BYTES: u64 = 256 << 20;
/// Kept free of host memory.
pub const HOST_RESERVE_BYTES: u64 = 6 << 30;
/// Machines with less keep a quarter free instead.
const SMALL_HOST_BYTES: u64 = 4 * HOST_RESERVE_BYTES;
/// The context that KV is reserved for where the caller names none, if the model's own
/// is not shorter.
pub const DEFAULT_CONTEXT: u32 = 4096;
/// Bytes of a number of KV where the caller does not say.
const KV_NUMBER_BYTES: u32 = 2;

/// What may be used where, and how that came about.
#[derive(Clone, Debug, Default)]
pub(super) struct Budgets {
    /// Of the device; 0 where nothing is computed there.
    pub device_bytes: u64,
    /// Of host memory.
    pub host_bytes: u64,
    /// Free where the engine computes, and what was taken from that before weights: for
    /// the words of errors.
    pub seat_free_bytes: u64,
    /// What that takes beyond what is free.
    pub seat_short_bytes: u64,
    /// How it was computed.
    pub figures: Vec<Figure>,
}

/// A sum that is written down as it goes.
struct Sum<'a> {
    figures: &'a mut Vec<Figure>,
    left: u64,
    /// What was taken that was not there.
    short: u64,
}

impl Sum<'_> {
    fn begin<'a>(
        figures: &'a mut Vec<Figure>,
        name: &'static str,
        bytes: u64,
        why: &str,
    ) -> Sum<'a> {
        figures.push(Figure { name, bytes, takes: false, total: false, why: why.to_string() });
        Sum { figures, left: bytes, short: 0 }
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
                true => format!("your ceiling, less than the {} that are left", size(left)),
                false => {
                    format!("what is left for weights; your ceiling of {} is more", size(ceiling))
                }
            };
            left = left.min(ceiling);
        }
        self.figures.push(Figure { name, bytes: left, takes: false, total: true, why });
        left
    }
}

/// What KV of so many layers takes, and why; all of it, where the caller says how much. Which
/// of them have a window is not noted: as few as can be.
fn kv(facts: &Facts, wishes: &Wishes, layers: u32) -> Result<(u64, String)> {
    if let Some(bytes) = wishes.kv_bytes {
        return Ok((bytes, "as you say".to_string()));
    }
    let usual = if facts.context == 0 { DEFAULT_CONTEXT } else { facts.context };
    let context = match wishes.context {
        0 => usual.min(DEFAULT_CONTEXT),
        said => said,
    };
    let sequences = wishes.sequences.max(1);
    let number = if wishes.kv_number_bytes == 0 { KV_NUMBER_BYTES } else { wishes.kv_number_bytes };
    let whole = layers.min(facts.layers.saturating_sub(facts.windowed_layers));
    let (windowed, window) = (layers - whole, context.min(facts.window));
    let tokens = |layers: u32, tokens: u32| u128::from(layers) * u128::from(tokens);
    let tokens = tokens(whole, context) + tokens(windowed, window);
    let dims = u128::from(facts.key_dim) + u128::from(facts.value_dim);
    let factors = [dims, facts.kv_heads.into(), number.into(), sequences.into()];
    let product = factors.iter().try_fold(tokens, |a, &b| a.checked_mul(b));
    let Some(bytes) = product.and_then(|all| u64::try_from(all).ok()) else {
        fail!(Limit, "KV of {context} tokens and {sequences} sequences overflows: ask for less");
    };
    let each = format!(
        "{} heads x ({} + {}) numbers x {number} bytes",
        facts.kv_heads, facts.key_dim, facts.value_dim
    );
    let why = match windowed {
        0 => format!("{layers} layers x {each} x {context} tokens x {sequences} sequences"),
        _ => format!(
            "{each} x {sequences} sequences x ({whole} layers x {context} tokens + {windowed} \
             layers x {window} tokens, no more than their window of {})",
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

/// What stays free of host memory, and why.
fn reserve(inputs: &Inputs) -> (u64, String) {
    if let Some(bytes) = inputs.wishes.host_reserve_bytes {
        return (bytes, "kept free, as you say".to_string());
    }
    let total = match inputs.memory.host_total_bytes {
        0 => inputs.memory.host_free_bytes,
        total => total,
    };
    if total < SMALL_HOST_BYTES {
        return (total / 4, format!("kept free: a quarter of {}, a small machine", size(total)));
    }
    (HOST_RESERVE_BYTES, "kept free for everybody else".to_string())
}

/// The budgets. KV of layers that the processor computes is in host memory.
pub(super) fn budgets(inputs: &Inputs, seat: Seat) -> Result<Budgets> {
    let (wishes, memory) = (inputs.wishes, &inputs.memory);
    let facts = inputs.facts;
    let (kv_bytes, kv_why) = kv(facts, wishes, facts.layers)?;
    let mut all = Budgets::default();
    let reserves = [
        ("workspace", wishes.workspace_bytes, "what the engine computes in"),
        ("hidden", wishes.hidden_bytes, "hidden states"),
    ];
    let away = wishes.processor_layers.min(facts.layers);
    let (on_host, on_device) = match (seat, wishes.kv_bytes) {
        (Seat::Host, _) => (kv_bytes, 0),
        (Seat::Device, None) => {
            (kv(facts, wishes, away)?.0, kv(facts, wishes, facts.layers - away)?.0)
        }
        (Seat::Device, Some(said)) => {
            let on_host = part(said, away, facts.layers);
            (on_host, said - on_host)
        }
    };
    if seat == Seat::Device {
        let safety = wishes.device_safety_bytes.unwrap_or(DEVICE_SAFETY_BYTES);
        let free = memory.device_free_bytes;
        let mut sum = Sum::begin(&mut all.figures, "device free", free, "as the device says");
        sum.take("device safety", safety, "kept free for driver and kernels".to_string());
        sum.take("device kv", on_device, kv_why.clone());
        for (name, bytes, why) in reserves {
            sum.take(name, bytes, why.to_string());
        }
        (all.seat_free_bytes, all.seat_short_bytes) = (free, sum.short);
        all.device_bytes = sum.end("device budget", wishes.device_ceiling_bytes);
    }
    let free = memory.host_free_bytes;
    let why = "headroom of the cgroup or what is available, whichever is less";
    let mut sum = Sum::begin(&mut all.figures, "host free", free, why);
    let (kept, why) = reserve(inputs);
    sum.take("host reserve", kept, why);
    match seat {
        Seat::Host => sum.take("host kv", on_host, kv_why),
        Seat::Device => {
            let why = format!("of {} layers that the processor computes", wishes.processor_layers);
            sum.take("host kv", on_host, why);
        }
    }
    if seat == Seat::Host {
        for (name, bytes, why) in reserves {
            sum.take(name, bytes, why.to_string());
        }
        (all.seat_free_bytes, all.seat_short_bytes) = (free, sum.short);
    }
    all.host_bytes = sum.end("host budget", wishes.host_ceiling_bytes);
    Ok(all)
}

/// `some` of `all` parts of it.
fn part(bytes: u64, some: u32, all: u32) -> u64 {
    if all == 0 {
        return 0;
    }
    let part = u128::from(bytes) * u128::from(some.min(all)) / u128::from(all);
    u64::try_from(part).unwrap_or(bytes)
}
