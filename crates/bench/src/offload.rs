//! Layer-wise offload: how much of the copies is hidden behind computing, and how little a
//! policy that selects has to move.

use std::time::{Duration, Instant};

use kvtier::attention::{Rows, Scales};
use kvtier::base::clock::Clock;
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::meta::view::{Place, View};
use kvtier::offload::{BlockSelection, Offload, Opts, Policies, RingPlacement};
use kvtier::sparse::{Context, Kind, Shape, registry};
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView};
use kvtier::store::state::{Level, SessionOpts, SpaceOpts};

use super::home::say;
use super::{Bar, Better, median};

const BLOCK: u32 = 256;
const TOKENS: u32 = 16 * BLOCK;
/// What the simulated device moves in a second.
const RATE: u64 = 4_000_000_000;

fn shape(layers: u32) -> Shape {
    Shape {
        layers,
        query_heads: 16,
        key_heads: 8,
        key_dim: 128,
        value_dim: 128,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens: BLOCK,
        max_tokens: 1 << 16,
    }
}

/// A session whose KV is in a store, on a device of a known rate.
struct World {
    offload: Offload,
    shape: Shape,
    _store: Arc<Store>,
    _runtime: Runtime,
}

impl World {
    fn open(layers: u32, buffers: u32, decode: &str) -> Result<World> {
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let spec = StoreSpec::parse("store(host=1GiB,copiers=1)")?;
        let opts = SimulatedOpts {
            latency_ns: 0,
            bytes_per_second: RATE,
            jitter_percent: 0,
            ..SimulatedOpts::default()
        };
        let device = Arc::new(Simulated::new(Clock::real(), opts)?);
        let store = Arc::new(Store::open_with(runtime.core(), None, &spec, device)?);
        let shape = shape(layers);
        let group = Group::gqa(0..layers as u16, shape.key_heads, shape.key_dim, Dtype::Bf16)?;
        let layout = Layout::new(BLOCK, vec![group])?;
        let tokens: Vec<u32> = (0..TOKENS + 1).collect();
        let session = store.with(|core| {
            let space = core.open_space(&SpaceOpts { key: Key([5; 32]), layout, holes: false })?;
            let session = core.open_session(space, &SessionOpts::default())?;
            core.append(session, &tokens)?;
            Ok(session)
        })?;
        let decode = match decode {
            "" => None,
            text => Some(registry::make(&kvtier::base::spec::Spec::parse(text)?, &shape)?),
        };
        let opts = Opts {
            session,
            shape,
            dtype: Dtype::Bf16,
            buffers,
            buffer_tokens: TOKENS,
            placement: RingPlacement::Host,
            level: Level::Ram,
            policies: Policies { prefill: None, decode },
            recipe: String::new(),
            clock: Clock::real(),
        };
        let offload = Offload::open(&store, opts)?;
        let mut world = World { offload, shape, _store: store, _runtime: runtime };
        world.fill()?;
        Ok(world)
    }

    /// Puts all layers.
    fn fill(&mut self) -> Result<()> {
        let row = (self.shape.key_heads * self.shape.key_dim) as usize;
        // Sizes of some bf16 numbers: keys that differ.
        let number = |i: usize| 0x3C00 | (i.wrapping_mul(2_654_435_761) >> 13) as u16 & 0x83FF;
        let numbers: Vec<u16> = (0..TOKENS as usize * row).map(number).collect();
        let plane = PlaneView {
            heads: self.shape.key_heads,
            run_bytes: u64::from(self.shape.key_dim) * 2,
            head_stride_bytes: u64::from(self.shape.key_dim) * 2,
            ..PlaneView::canonical(numbers.as_ptr() as u64, TOKENS, row as u64 * 2)
        };
        let views = LayerViews { k: plane.clone(), v: Some(plane) };
        for layer in 0..self.shape.layers {
            // SAFETY: `numbers` stay until the op has ended.
            let op = unsafe { self.offload.put(layer, 0, TOKENS, &views, &OpOpts::default())? };
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

    /// Seconds until all layers were computed, each for so long; and until the first was
    /// there.
    fn pass(&mut self, each: Duration) -> Result<(f64, f64)> {
        let begun = Instant::now();
        self.offload.begin(&self.context())?;
        let (mut computed, mut first) = (begun, 0.0);
        for layer in 0..self.shape.layers {
            let asked = Instant::now();
            self.offload.take(layer, None)?;
            if layer == 0 {
                first = begun.elapsed().as_secs_f64();
            }
            // One that is there begins as soon as the one before it has ended, as on a
            // stream of a device: that this thread wakes late is no part of it.
            let waited = asked.elapsed() > Duration::from_micros(20);
            computed = if waited { computed.max(Instant::now()) } else { computed } + each;
            std::thread::sleep(computed.saturating_duration_since(Instant::now()));
            self.offload.give_back(layer)?;
        }
        Ok((computed.duration_since(begun).as_secs_f64(), first))
    }
}

/// How much longer a pass takes than the first layer alone, and the longer of copying and
/// computing.
fn pipeline(name: &'static str, buffers: u32, part: f64, quick: bool) -> Bar {
    let mut bar = Bar {
        bar: name,
        value: None,
        unit: "of ideal",
        baseline: "the first layer alone, and the longer of copying and computing",
        baseline_value: Some(1.0),
        goal: Some(1.05),
        better: Better::Lower,
        note: String::new(),
    };
    let measure = || -> Result<f64> {
        let mut world = World::open(16, buffers, "")?;
        let mut ratios = Vec::new();
        for _ in 0..if quick { 5 } else { 15 } {
            let (before, first) = world.pass(Duration::ZERO)?;
            let each = before * part / f64::from(world.shape.layers);
            let (took, _) = world.pass(Duration::from_secs_f64(each))?;
            let (after, _) = world.pass(Duration::ZERO)?;
            let copy = (before + after) / 2.0;
            ratios.push(took / (first + copy.max(before * part)));
        }
        Ok(median(&mut ratios))
    };
    match measure() {
        Ok(ratio) => bar.value = Some(ratio),
        Err(error) => bar.note = say(error),
    }
    bar
}

/// What a step of Quest moves, of what all blocks would be; beside what it chooses, and its
/// boxes.
fn quest() -> Bar {
    let mut bar = Bar {
        bar: "quest_moved",
        value: None,
        unit: "of all",
        baseline: "blocks of what is chosen, and boxes of pages",
        baseline_value: None,
        goal: None,
        better: Better::Lower,
        note: String::new(),
    };
    let spec = "quest(budget=64,page=16,dense=0,share=bound)";
    let measure = || -> Result<(f64, f64)> {
        let mut world = World::open(4, 2, spec)?;
        let dim = (world.shape.query_heads * world.shape.key_dim) as usize;
        let query: Vec<f32> = (0..dim).map(|i| ((i * 7919) % 211) as f32 / 105.0 - 1.0).collect();
        let head_bytes = u64::from(world.shape.key_dim) * 4;
        let view = View {
            place: Place::At(query.as_ptr() as u64),
            tokens: 1,
            heads: world.shape.query_heads,
            run_bytes: head_bytes,
            token_stride_bytes: head_bytes * u64::from(world.shape.query_heads),
            head_stride_bytes: head_bytes,
        };
        // SAFETY: `query`, which stays.
        let rows = unsafe { Rows::new(view, Dtype::F32, Scales::None)? };
        let context = world.context();
        let mut union = 0;
        for layer in 0..world.shape.layers {
            union += world.offload.load(0, layer, BlockSelection::All, Some(&rows), &context)?;
            world.offload.wait(0)?;
            world.offload.done(0)?;
        }
        let stats = world.offload.stats();
        let all = (stats.loaded_bytes + stats.saved_bytes) as f64;
        let blocks = f64::from(union) / f64::from(world.shape.layers * TOKENS / BLOCK);
        // Two corners of K a page, of K and V of its tokens.
        Ok((stats.loaded_bytes as f64 / all, blocks + 1.0 / 16.0))
    };
    match measure() {
        Ok((moved, bound)) => {
            (bar.value, bar.baseline_value) = (Some(moved), Some(bound));
            bar.goal = Some(bound + 0.02);
        }
        Err(error) => bar.note = say(error),
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
