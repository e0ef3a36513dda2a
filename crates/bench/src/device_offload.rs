//! Text over a long context whose KV is in host memory: what comes to a ring on the device, by
//! Quest and all of it, and the attention over that.

use std::sync::Arc;
use std::time::Instant;

use kvtier::attention::{Rows, Scales};
use kvtier::base::clock::Clock;
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::spec::Spec;
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::call::{Call, Kind as Kernel};
use kvtier::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Memory, Stream};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::meta::view::{Place, View};
use kvtier::offload::{BlockSelection, Offload, Opts, Policies, RingPlacement};
use kvtier::sparse::{Context, Kind, Shape, registry};
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView, Tokens};
use kvtier::store::state::{Level, SessionOpts, SpaceOpts};

use super::{Bar, Better, median};

const BLOCK: u32 = 128;
/// One part in so many of the context is what Quest may choose.
const SHARE: u32 = 32;
const LAYERS: u32 = 2;
/// Tokens of a put: a part of a prompt.
const PART: u32 = 4096;
const ROW_BYTES: u64 = 8 * 128 * 2;

fn shape(tokens: u32) -> Shape {
    Shape {
        layers: LAYERS,
        query_heads: 32,
        key_heads: 8,
        key_dim: 128,
        value_dim: 128,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens: BLOCK,
        max_tokens: tokens,
    }
}

/// Memory of the device that goes back when this does.
struct Room {
    device: Arc<Cuda>,
    memory: DeviceMemory,
}

impl Room {
    fn take(device: &Arc<Cuda>, bytes: u64) -> Result<Room> {
        Ok(Room { device: device.clone(), memory: device.allocate(bytes)? })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: what used it has ended.
        if let Err(error) = unsafe { self.device.free(&self.memory) } {
            log::warn!("memory of a bench stays: {error}");
        }
    }
}

/// A sequence whose KV is in a store, and a ring on the device.
struct World {
    offload: Offload,
    shape: Shape,
    tokens: u32,
    /// Queries, the output and what the kernel needs, on the device.
    room: Room,
    device: Arc<Cuda>,
    _store: Arc<Store>,
    _runtime: Runtime,
}

impl World {
    fn open(library: Option<std::path::PathBuf>, tokens: u32) -> Result<World> {
        let opts = CudaOpts { library, choice: CopyMethodChoice::Measured, ..CudaOpts::default() };
        let device = Arc::new(Cuda::open(Clock::real(), &opts)?);
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let all = u64::from(LAYERS) * u64::from(tokens) * 2 * ROW_BYTES;
        let spec = StoreSpec::parse(&format!("store(host={}MiB)", ((all * 5 / 4) >> 20) + 64))?;
        let store = Store::open_with(runtime.core(), None, &spec, device.clone())?;
        let (store, shape) = (Arc::new(store), shape(tokens));
        let group = Group::gqa(0..LAYERS as u16, shape.key_heads, shape.key_dim, Dtype::Bf16)?;
        let layout = Layout::new(BLOCK, vec![group])?;
        let ids: Vec<u32> = (0..tokens).collect();
        let session = store.with(|core| {
            let space = core.open_space(&SpaceOpts { key: Key([6; 32]), layout, holes: false })?;
            let session = core.open_session(space, &SessionOpts::default())?;
            core.append(session, &ids)?;
            Ok(session)
        })?;
        let spec = format!("quest(budget={},page={BLOCK},dense=0,share=bound)", tokens / SHARE);
        let decode = Some(registry::make(&Spec::parse(&spec)?, &shape)?);
        let opts = Opts {
            session,
            shape,
            dtype: Dtype::Bf16,
            buffers: 1,
            buffer_tokens: tokens,
            placement: RingPlacement::Device,
            level: Level::Ram,
            policies: Policies { prefill: None, decode },
            recipe: String::new(),
            clock: Clock::real(),
        };
        let offload = Offload::open(&store, opts)?;
        let room = Room::take(&device, (64 << 10) + scratch_bytes(tokens))?;
        let (_store, _runtime) = (store, runtime);
        let mut world = World { offload, shape, tokens, room, device, _store, _runtime };
        world.fill()?;
        Ok(world)
    }

    /// Puts all layers from device memory, part by part.
    fn fill(&mut self) -> Result<()> {
        let far = Room::take(&self.device, u64::from(PART) * ROW_BYTES)?;
        let plane = PlaneView {
            place: Tokens::At(far.memory.address),
            tokens: PART,
            heads: self.shape.key_heads,
            run_bytes: u64::from(self.shape.key_dim) * 2,
            token_stride_bytes: ROW_BYTES,
            head_stride_bytes: u64::from(self.shape.key_dim) * 2,
            memory: Memory::Device,
        };
        let views = LayerViews { k: plane.clone(), v: Some(plane) };
        for layer in 0..LAYERS {
            for first in (0..self.tokens).step_by(PART as usize) {
                // Sizes of some bf16 numbers: keys that differ.
                let number =
                    |at: u32| 0x3C00 | (at.wrapping_mul(2_654_435_761) >> 13) as u16 & 0x83FF;
                let from = first.wrapping_mul(977) + layer;
                let count = PART * (ROW_BYTES as u32 / 2);
                let numbers: Vec<u16> =
                    (0..count).map(|at| number(at.wrapping_add(from))).collect();
                self.send(numbers.as_ptr().cast(), far.memory.address, far.memory.bytes)?;
                // SAFETY: `far` stays until the op has ended.
                let op =
                    unsafe { self.offload.put(layer, first, PART, &views, &OpOpts::default())? };
                if let Some(op) = op {
                    op.wait(RELEASED, 0)?;
                    let status = op.info().status.and_then(Status::from_code);
                    op.remove();
                    if status != Some(Status::Ok) {
                        return Err(Error::from(status.unwrap_or(Status::Io)));
                    }
                }
            }
        }
        Ok(())
    }

    fn send(&self, from: *const u8, address: u64, bytes: u64) -> Result<()> {
        let copy =
            Copy::bytes(from.cast_mut(), address, bytes, Direction::Scatter, Memory::Device)?;
        // SAFETY: memory of the caller's and of this world's, until the event.
        let event = unsafe { self.device.submit(Stream(0), None, &mut [copy])? };
        self.device.wait(event, 0)?;
        self.device.release(event)
    }

    /// Attention of one query over rows of a layer.
    fn attend(&self, keys: u64, values: u64, tokens: u32) -> Result<()> {
        let at = self.room.memory.address;
        let call = Call {
            kind: Kernel::Decode as u32,
            dtype: Dtype::Bf16.code(),
            other_dtype: Dtype::Bf16.code(),
            queries: at,
            keys,
            values,
            out: at + (32 << 10),
            scratch: at + (64 << 10),
            scratch_bytes: scratch_bytes(tokens),
            query_stride: 32 * 256,
            query_head_stride: 256,
            key_stride: ROW_BYTES as i64,
            key_head_stride: 256,
            value_stride: ROW_BYTES as i64,
            value_head_stride: 256,
            out_stride: 32 * 256,
            out_head_stride: 256,
            query_count: 1,
            query_heads: 32,
            key_heads: 8,
            key_dim: 128,
            value_dim: 128,
            tokens,
            first: tokens - 1,
            ..Call::default()
        };
        // SAFETY: memory of the world's, which nobody else uses until the event.
        let event = unsafe { self.device.launch(Stream(0), None, &[call])? };
        self.device.wait(event, 0)?;
        self.device.release(event)
    }

    /// Seconds of a step through all layers.
    fn step(&mut self, which: BlockSelection<'_>, query: Option<&Rows<'_>>) -> Result<f64> {
        let (tokens, began) = (self.tokens, Instant::now());
        let context = Context { parts: 1, first_query: tokens - 1, tokens, ..Context::default() };
        for layer in 0..LAYERS {
            self.offload.load(0, layer, which, query, &context)?;
            let loaded = self.offload.wait(0)?;
            let views = self.offload.views(0)?;
            let at = |plane: &PlaneView| match plane.place {
                Tokens::At(address) => address,
                Tokens::Pages { .. } => 0,
            };
            self.attend(at(&views.k), views.v.as_ref().map_or(0, at), loaded.tokens)?;
            self.offload.done(0)?;
        }
        Ok(began.elapsed().as_secs_f64())
    }
}

/// What the kernel needs beside.
fn scratch_bytes(tokens: u32) -> u64 {
    4 * 32 * (u64::from(tokens.div_ceil(128).max(1)) * 130 + 1)
}

/// Seconds of a step over all, by Quest, and over what Quest has chosen; and the part that came.
struct Times {
    all: f64,
    quest: f64,
    chosen: f64,
    part: f64,
}

fn measure(library: Option<std::path::PathBuf>, tokens: u32, rounds: usize) -> Result<Times> {
    let mut world = World::open(library, tokens)?;
    let numbers: Vec<f32> =
        (0..32 * 128).map(|i| ((i * 7919) % 211) as f32 / 105.0 - 1.0).collect();
    let view = View {
        place: Place::At(numbers.as_ptr().expose_provenance() as u64),
        tokens: 1,
        heads: 32,
        run_bytes: 512,
        token_stride_bytes: 32 * 512,
        head_stride_bytes: 512,
    };
    // SAFETY: `numbers`, which stay.
    let query = unsafe { Rows::new(view, Dtype::F32, Scales::None)? };
    let before = world.offload.stats();
    world.step(BlockSelection::All, Some(&query))?;
    let blocks = world.offload.blocks(0)?.to_vec();
    let after = world.offload.stats();
    let came = (after.loaded_bytes - before.loaded_bytes) as f64;
    let part = came / (came + (after.saved_bytes - before.saved_bytes) as f64);
    let mut of = |which: BlockSelection<'_>, query: Option<&Rows<'_>>| -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..rounds {
            times.push(world.step(which, query)?);
        }
        Ok(median(&mut times))
    };
    let all = of(BlockSelection::All, None)?;
    let quest = of(BlockSelection::All, Some(&query))?;
    Ok(Times { all, quest, chosen: of(BlockSelection::Chosen(&blocks), None)?, part })
}

/// The bars. With a library the driver is none of a GPU, and it shows only that this runs.
pub fn run(library: Option<std::path::PathBuf>, rounds: usize) -> Vec<Bar> {
    let is_small = library.is_some();
    let tokens = if is_small { 2 * PART } else { 128 << 10 };
    bars(measure(library, tokens, rounds), tokens)
}

/// The bars, and why they are not measured.
pub fn none(why: Error) -> Vec<Bar> {
    bars(Err(why), 0)
}

fn bars(measured: Result<Times>, tokens: u32) -> Vec<Bar> {
    let bar = |bar: &'static str, goal: Option<f64>, of: fn(&Times) -> f64| Bar {
        bar,
        value: measured.as_ref().ok().map(|times| times.all / of(times)),
        unit: "x",
        baseline: "all blocks of the context",
        baseline_value: measured.as_ref().ok().map(|_| 1.0),
        goal,
        better: Better::Higher,
        note: match &measured {
            Ok(times) => format!(
                "{tokens} tokens, {:.1} % of them come: {:.3} ms of {:.3} ms a layer",
                100.0 * times.part,
                1e3 * of(times) / f64::from(LAYERS),
                1e3 * times.all / f64::from(LAYERS)
            ),
            Err(error) => error.to_string(),
        },
    };
    vec![
        bar("offload_quest_128k", Some(5.0), |times| times.quest),
        // What an engine gets that chooses on the device, and says so.
        bar("offload_chosen_128k", None, |times| times.chosen),
    ]
}
