//! Kernels of a GPU: moves and page scores beside copies on the device, sparse attention beside
//! attention over all keys.

use std::sync::Arc;
use std::time::Instant;

use kvtier::attention::keys::{Head, Kind as KeyKind};
use kvtier::base::status::Result;
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::Cuda;
use kvtier::device::{Device, Stream};
use kvtier::meta::dtype::Dtype;

use super::fixtures::device::{DeviceBuffer, finish, upload};
use super::{Bar, Better, median};

/// Query heads, key heads, and their dimension.
const QUERY_HEADS: u32 = 32;
const KEY_HEADS: u32 = 8;
const DIM: u32 = 128;
/// Tokens of a block of keys and of a row of queries.
const BLOCK: u32 = 64;
/// Percent of blocks that sparse attention keeps.
const KEPT_PERCENT: u32 = 30;

/// A device, and memory of it.
struct Lab<'a> {
    device: &'a Arc<Cuda>,
    rounds: usize,
    buffers: std::cell::RefCell<Vec<DeviceBuffer>>,
}

impl Lab<'_> {
    /// Allocates device memory for the life of the lab.
    fn allocate(&self, bytes: u64) -> Result<u64> {
        let buffer = DeviceBuffer::new(self.device, bytes)?;
        let address = buffer.memory.address;
        self.buffers.borrow_mut().push(buffer);
        Ok(address)
    }

    /// Copies content to new device memory.
    fn put<T: PlainData>(&self, content: &[T]) -> Result<u64> {
        let bytes = size_of_val(content) as u64;
        let address = self.allocate(bytes)?;
        // SAFETY: the content and new memory of the lab, which no other work uses.
        unsafe { upload(self.device, content.as_ptr().cast(), address, bytes)? };
        Ok(address)
    }

    /// Seconds of a call.
    fn time(&self, call: &Call) -> Result<f64> {
        let mut times = Vec::new();
        for round in 0..=self.rounds {
            let began = Instant::now();
            // SAFETY: memory of the lab, which no other work uses.
            let event = unsafe { self.device.launch(Stream(0), None, std::slice::from_ref(call))? };
            finish(self.device, event)?;
            if round > 0 {
                times.push(began.elapsed().as_secs_f64());
            }
        }
        Ok(median(&mut times))
    }
}

/// Types that can be copied to a device as bytes.
trait PlainData: std::marker::Copy {}
impl PlainData for u32 {}
impl PlainData for [u64; 5] {}
impl PlainData for Head {}

/// Moves pieces of 64 KiB on the device; GB/s.
fn moving(lab: &Lab<'_>, bytes: u64) -> Result<f64> {
    let (from, to, piece) = (lab.allocate(bytes)?, lab.allocate(bytes)?, 64 << 10);
    let count = bytes / piece;
    // from, to, two distances that one run does not need, and its length with how many there are.
    let row = |at: u64| {
        let target = at.wrapping_mul(2_654_435_761) % count;
        [from + at * piece, to + target * piece, 0, 0, piece | 1 << 32]
    };
    let table: Vec<[u64; 5]> = (0..count).map(row).collect();
    let call = Call {
        kind: Kind::Move as u32,
        table: lab.put(&table)?,
        count: count as u32,
        scratch: lab.allocate(8 * (count + 1))?,
        scratch_bytes: 8 * (count + 1),
        ..Call::default()
    };
    Ok(bytes as f64 / lab.time(&call)? / 1e9)
}

/// Scores pages from their bounding boxes; GB/s.
fn scoring(lab: &Lab<'_>, bytes: u64) -> Result<f64> {
    let row = u64::from(2 * DIM) * 4;
    let pages = bytes / (row * u64::from(KEY_HEADS));
    let call = Call {
        kind: Kind::PageScores as u32,
        dtype: Dtype::F32.code(),
        other_dtype: Dtype::Bf16.code(),
        queries: lab.allocate(u64::from(QUERY_HEADS * DIM) * 2)?,
        query_count: 1,
        query_heads: QUERY_HEADS,
        query_head_stride: i64::from(DIM) * 2,
        key_heads: KEY_HEADS,
        key_dim: DIM,
        numbers: lab.allocate(bytes)?,
        key_stride: row as i64 * i64::from(KEY_HEADS),
        key_head_stride: row as i64,
        count: pages as u32,
        out: lab.allocate(pages * u64::from(QUERY_HEADS) * 4)?,
        ..Call::default()
    };
    Ok(bytes as f64 / lab.time(&call)? / 1e9)
}

/// Attention over uninitialised memory: the values do not matter.
fn problem(lab: &Lab<'_>, (kind, dtype): (Kind, Dtype), queries: u32, tokens: u32) -> Result<Call> {
    let row = |heads: u32| i64::from(heads * DIM) * 2;
    let room = |tokens: u32, heads: u32| lab.allocate(u64::from(tokens) * row(heads) as u64);
    Ok(Call {
        kind: kind as u32,
        dtype: dtype.code(),
        other_dtype: dtype.code(),
        queries: room(queries, QUERY_HEADS)?,
        keys: room(tokens, KEY_HEADS)?,
        values: room(tokens, KEY_HEADS)?,
        out: room(queries, QUERY_HEADS)?,
        query_stride: row(QUERY_HEADS),
        query_head_stride: row(1),
        key_stride: row(KEY_HEADS),
        key_head_stride: row(1),
        value_stride: row(KEY_HEADS),
        value_head_stride: row(1),
        out_stride: row(QUERY_HEADS),
        out_head_stride: row(1),
        query_count: queries,
        query_heads: QUERY_HEADS,
        key_heads: KEY_HEADS,
        key_dim: DIM,
        value_dim: DIM,
        tokens,
        first: tokens - queries,
        ..Call::default()
    })
}

/// Prefill over some blocks: the speed-up over all keys, and TFLOP/s over all keys.
fn prefill(lab: &Lab<'_>, dtype: Dtype, tokens: u32) -> Result<(f64, f64)> {
    let dense = problem(lab, (Kind::Prefill, dtype), tokens, tokens)?;
    let rows = tokens / BLOCK;
    let (mut starts, mut items) = (vec![0u32], Vec::new());
    for row in 0..rows {
        // Spread evenly, the last with the diagonal.
        let blocks = row + 1;
        let retained = (blocks * KEPT_PERCENT / 100).max(1);
        items.extend((1..=retained).map(|at| at * blocks / retained - 1));
        starts.push(items.len() as u32);
    }
    let head = Head {
        kind: KeyKind::Blocks,
        first: 0,
        lists: rows,
        query_block: BLOCK,
        key_block: BLOCK,
        ..Head::DENSE
    };
    let scratch_bytes = 12 * u64::from(tokens / 32 + 8);
    let sparse = Call {
        count: 1,
        numbers: lab.put(&[head])?,
        counts: lab.put(&starts)?,
        index: lab.put(&items)?,
        scratch: lab.allocate(scratch_bytes)?,
        scratch_bytes,
        ..dense
    };
    let all = lab.time(&dense)?;
    let work = 2.0 * f64::from(tokens).powi(2) * f64::from(QUERY_HEADS * DIM);
    Ok((all / lab.time(&sparse)?, work / all / 1e12))
}

/// Decode over a sixteenth of pages: the speed-up over all keys, and GB/s over all keys.
fn decode(lab: &Lab<'_>, dtype: Dtype, tokens: u32) -> Result<(f64, f64)> {
    let page = 16;
    let parts = tokens.div_ceil(128).max(1);
    let scratch_bytes = 4 * u64::from(QUERY_HEADS) * (u64::from(parts) * u64::from(DIM + 2) + 1);
    let dense = Call {
        scratch: lab.allocate(scratch_bytes)?,
        scratch_bytes,
        ..problem(lab, (Kind::Decode, dtype), 1, tokens)?
    };
    let keep = tokens / page / 16;
    let lists: Vec<u32> = (0..KEY_HEADS).flat_map(|_| (0..keep).map(|at| at * 16)).collect();
    let chosen = Call {
        count: KEY_HEADS,
        keep,
        recent: page,
        index: lab.put(&lists)?,
        counts: lab.put(&[keep; KEY_HEADS as usize])?,
        ..dense
    };
    let all = lab.time(&dense)?;
    let read = f64::from(tokens) * f64::from(KEY_HEADS * DIM) * 4.0;
    Ok((all / lab.time(&chosen)?, read / all / 1e9))
}

fn bar(
    name: &'static str,
    goal: Option<f64>,
    baseline: &'static str,
    result: Result<(f64, f64, String)>,
) -> Bar {
    let (value, baseline_value, note) = match result {
        Ok((value, of, note)) => (Some(value), Some(of), note),
        Err(error) => (None, None, error.to_string()),
    };
    let (bar, unit, better) = (name, "x", Better::Higher);
    Bar::new(bar, unit, better)
        .baseline(baseline)
        .baseline_value(baseline_value)
        .goal(goal)
        .value(value)
        .note(note)
}

/// Measures the bars. `copied` is the measured GB/s of copies on the device.
pub fn run(device: &Arc<Cuda>, copied: Option<f64>, small: bool, rounds: usize) -> Vec<Bar> {
    let lab = || Lab { device, rounds, buffers: Default::default() };
    let bytes: u64 = if small { 4 << 20 } else { 256 << 20 };
    let tokens = if small { 256 } else { 65_536 };
    let beside =
        |rate: Result<f64>, of: f64| rate.map(|rate| (rate / of, of, format!("{rate:.1} GB/s")));
    let copied = copied.unwrap_or(f64::NAN);
    // `ffi-tests/gpu/torch_beside.py` reads the note.
    let speed = |result: Result<(f64, f64)>, tokens: u32, unit: &str| {
        let note = |speed| format!("{tokens} tokens, all keys at {speed:.1} {unit}");
        result.map(|(times, speed)| (times, 1.0, note(speed)))
    };
    let prefill = |name, dtype| {
        let result = speed(prefill(&lab(), dtype, tokens), tokens, "TFLOP/s");
        bar(name, Some(2.0), "the same over all keys", result)
    };
    let decode = |name, dtype| {
        let result = speed(decode(&lab(), dtype, 2 * tokens), 2 * tokens, "GB/s");
        bar(name, None, "the same over all keys", result)
    };
    vec![
        bar(
            "move_kernel",
            Some(0.75),
            "a copy on the device",
            beside(moving(&lab(), bytes), copied),
        ),
        bar(
            "page_scores",
            Some(0.75),
            "what a copy on the device reads and writes",
            beside(scoring(&lab(), bytes), 2.0 * copied),
        ),
        prefill("prefill_sparse_30", Dtype::Bf16),
        prefill("prefill_sparse_30_f16", Dtype::F16),
        decode("decode_chosen_16th", Dtype::Bf16),
        decode("decode_chosen_16th_f16", Dtype::F16),
    ]
}
