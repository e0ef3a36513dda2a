//! Group `offload`: the share of copies hidden behind computing, and the bytes moved with a policy
//! that selects blocks.

use std::time::{Duration, Instant};

use kvtier::attention::{Rows, Scales};
use kvtier::base::clock::Clock;
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::offload::{BlockSelection, RingPlacement};
use kvtier::sparse::Context;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView};

use super::fixtures::gqa_shape;
use super::fixtures::store::OffloadFixture;
use super::{Bar, median};

const BLOCK: u32 = 256;
const TOKENS: u32 = 16 * BLOCK;
/// Bandwidth of the simulated device, in bytes a second.
const RATE: u64 = 4_000_000_000;

/// A session whose KV is in a store, on a simulated device of a known rate.
struct Sequence(OffloadFixture);

impl Sequence {
    fn open(layers: u32, buffers: u32, decode: Option<&str>) -> Result<Sequence> {
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let spec = StoreSpec::parse("store(host=1GiB,copiers=1)")?;
        let opts = SimulatedOpts {
            latency_ns: 0,
            bytes_per_second: RATE,
            jitter_percent: 0,
            ..SimulatedOpts::default()
        };
        let device = Arc::new(Simulated::new(Clock::real(), opts)?);
        let store = Store::open_with(runtime.core(), None, &spec, device)?;
        let shape = gqa_shape(layers, 16, 8, BLOCK, 1 << 16);
        let (tokens, ring) = ((TOKENS, TOKENS + 1), (RingPlacement::Host, buffers));
        let fixture = OffloadFixture::open((store, runtime), shape, tokens, ring, decode)?;
        let mut sequence = Sequence(fixture);
        sequence.fill()?;
        Ok(sequence)
    }

    /// Puts all layers.
    fn fill(&mut self) -> Result<()> {
        let row = (self.0.shape.key_heads * self.0.shape.key_dim) as usize;
        // Sizes of some bf16 numbers: keys that differ.
        let number = |i: usize| 0x3C00 | (i.wrapping_mul(2_654_435_761) >> 13) as u16 & 0x83FF;
        let numbers: Vec<u16> = (0..TOKENS as usize * row).map(number).collect();
        let plane = PlaneView {
            heads: self.0.shape.key_heads,
            run_bytes: u64::from(self.0.shape.key_dim) * 2,
            head_stride_bytes: u64::from(self.0.shape.key_dim) * 2,
            ..PlaneView::canonical(numbers.as_ptr() as u64, TOKENS, row as u64 * 2)
        };
        let views = LayerViews { k: plane.clone(), v: Some(plane) };
        for layer in 0..self.0.shape.layers {
            // SAFETY: `numbers` stay until the op has ended.
            let op = unsafe { self.0.offload.put(layer, 0, TOKENS, &views, &OpOpts::default())? };
            if let Some(op) = op {
                op.wait(RELEASED, 0)?;
                op.remove();
            }
        }
        Ok(())
    }

    fn context(&self) -> Context {
        Context { parts: 1, first_query: TOKENS - 1, tokens: TOKENS, ..Context::default() }
    }

    /// Seconds until all layers are computed, each for `each`, and until the first is loaded.
    fn pass(&mut self, each: Duration) -> Result<(f64, f64)> {
        let begun = Instant::now();
        self.0.offload.begin(&self.context())?;
        let (mut computed, mut first) = (begun, 0.0);
        for layer in 0..self.0.shape.layers {
            let start = Instant::now();
            self.0.offload.take(layer, None)?;
            if layer == 0 {
                first = begun.elapsed().as_secs_f64();
            }
            // A loaded layer begins when the previous one ends, as on a stream of a device: a
            // late wake-up of this thread does not count.
            let waited = start.elapsed() > Duration::from_micros(20);
            computed = if waited { computed.max(Instant::now()) } else { computed } + each;
            std::thread::sleep(computed.saturating_duration_since(Instant::now()));
            self.0.offload.give_back(layer)?;
        }
        Ok((computed.duration_since(begun).as_secs_f64(), first))
    }
}

/// The time of a pass over the ideal: the first layer, then the longer of copying and computing.
fn pipeline(name: &'static str, buffers: u32, part: f64, quick: bool) -> Bar {
    let bar = Bar::lower(name, "of ideal")
        .baseline("the first layer alone, and the longer of copying and computing")
        .baseline_value(1.0)
        .goal(1.05);
    let measure = || -> Result<f64> {
        let mut sequence = Sequence::open(16, buffers, None)?;
        let mut ratios = Vec::new();
        for _ in 0..if quick { 5 } else { 15 } {
            let (before, first) = sequence.pass(Duration::ZERO)?;
            let each = before * part / f64::from(sequence.0.shape.layers);
            let (took, _) = sequence.pass(Duration::from_secs_f64(each))?;
            let (after, _) = sequence.pass(Duration::ZERO)?;
            let copy = (before + after) / 2.0;
            ratios.push(took / (first + copy.max(before * part)));
        }
        Ok(median(&mut ratios))
    };
    bar.measured(measure())
}

/// The share of bytes that a step of Quest moves, beside the share of chosen blocks and pages.
fn quest() -> Bar {
    let mut bar = Bar::lower("quest_moved", "of all")
        .baseline("blocks of what is chosen, and boxes of pages");
    let spec = "quest(budget=64,page=16,dense=0,share=bound)";
    let measure = || -> Result<(f64, f64)> {
        let mut sequence = Sequence::open(4, 2, Some(spec))?;
        let dim = (sequence.0.shape.query_heads * sequence.0.shape.key_dim) as usize;
        let query: Vec<f32> = (0..dim).map(|i| ((i * 7919) % 211) as f32 / 105.0 - 1.0).collect();
        let head_bytes = u64::from(sequence.0.shape.key_dim) * 4;
        let view = View {
            place: Place::At(query.as_ptr() as u64),
            tokens: 1,
            heads: sequence.0.shape.query_heads,
            run_bytes: head_bytes,
            token_stride_bytes: head_bytes * u64::from(sequence.0.shape.query_heads),
            head_stride_bytes: head_bytes,
        };
        // SAFETY: `query`, which stays.
        let rows = unsafe { Rows::new(view, Dtype::F32, Scales::None)? };
        let context = sequence.context();
        let mut union = 0;
        for layer in 0..sequence.0.shape.layers {
            union +=
                sequence.0.offload.load(0, layer, BlockSelection::All, Some(&rows), &context)?;
            sequence.0.offload.wait(0)?;
            sequence.0.offload.done(0)?;
        }
        let stats = sequence.0.offload.stats();
        let all = (stats.loaded_bytes + stats.saved_bytes) as f64;
        let blocks = f64::from(union) / f64::from(sequence.0.shape.layers * TOKENS / BLOCK);
        // Two corners of K a page, of K and V of its tokens.
        Ok((stats.loaded_bytes as f64 / all, blocks + 1.0 / 16.0))
    };
    match measure() {
        Ok((moved, bound)) => {
            (bar.value, bar.baseline_value) = (Some(moved), Some(bound));
            bar.goal = Some(bound + 0.02);
        }
        Err(error) => bar.note = error.to_string(),
    }
    bar
}

/// Measures the bars.
pub fn run(quick: bool) -> Vec<Bar> {
    let all = [
        ("pipeline_2_buffers_half", 2, 0.5),
        ("pipeline_2_buffers_same", 2, 1.0),
        ("pipeline_2_buffers_double", 2, 2.0),
        ("pipeline_3_buffers_same", 3, 1.0),
        ("pipeline_4_buffers_same", 4, 1.0),
    ];
    let mut bars: Vec<Bar> =
        all.into_iter().map(|(name, buffers, part)| pipeline(name, buffers, part, quick)).collect();
    bars.push(quest());
    bars
}
