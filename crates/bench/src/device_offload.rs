//! Decoding over a long context whose KV is in host memory: loads into a ring on the device, of all
//! blocks and of those that Quest chooses, and attention over them.

use std::sync::Arc;
use std::time::Instant;

use kvtier::attention::{Rows, Scales};
use kvtier::base::clock::Clock;
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::call::{Call, Kind as Kernel};
use kvtier::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Device, Memory, Stream};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::offload::{BlockSelection, RingPlacement};
use kvtier::sparse::Context;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView, Tokens};

use super::fixtures::device::{DeviceBuffer, finish, upload};
use super::fixtures::gqa_shape;
use super::fixtures::store::OffloadFixture;
use super::{Bar, median};

const BLOCK: u32 = 128;
/// Quest chooses 1/`SHARE` of the context.
const SHARE: u32 = 32;
const LAYERS: u32 = 2;
/// Tokens of a put: a part of a prompt.
const PART: u32 = 4096;
const ROW_BYTES: u64 = 8 * 128 * 2;

/// A sequence whose KV is in a store, with a ring on the device.
struct Sequence {
    fixture: OffloadFixture,
    tokens: u32,
    /// Queries, the output and the scratch memory of the kernel, on the device.
    buffer: DeviceBuffer,
    device: Arc<Cuda>,
}

impl Sequence {
    fn open(library: Option<std::path::PathBuf>, tokens: u32) -> Result<Sequence> {
        let opts = CudaOpts { library, choice: CopyMethodChoice::Measured, ..CudaOpts::default() };
        let device = Arc::new(Cuda::open(Clock::real(), &opts)?);
        let runtime = Runtime::open(RuntimeOpts::default())?;
        let all = u64::from(LAYERS) * u64::from(tokens) * 2 * ROW_BYTES;
        let spec = StoreSpec::parse(&format!("store(host={}MiB)", ((all * 5 / 4) >> 20) + 64))?;
        let store = Store::open_with(runtime.core(), None, &spec, device.clone())?;
        let shape = gqa_shape(LAYERS, 32, 8, BLOCK, tokens);
        let decode = format!("quest(budget={},page={BLOCK},dense=0,share=bound)", tokens / SHARE);
        let (length, ring) = ((tokens, tokens), (RingPlacement::Device, 1));
        let fixture = OffloadFixture::open((store, runtime), shape, length, ring, Some(&decode))?;
        let buffer = DeviceBuffer::new(&device, (64 << 10) + scratch_bytes(tokens))?;
        let mut sequence = Sequence { fixture, tokens, buffer, device };
        sequence.fill()?;
        Ok(sequence)
    }

    /// Puts all layers from device memory, part by part.
    fn fill(&mut self) -> Result<()> {
        let staging = DeviceBuffer::new(&self.device, u64::from(PART) * ROW_BYTES)?;
        let plane = PlaneView {
            place: Tokens::At(staging.memory.address),
            tokens: PART,
            heads: self.fixture.shape.key_heads,
            run_bytes: u64::from(self.fixture.shape.key_dim) * 2,
            token_stride_bytes: ROW_BYTES,
            head_stride_bytes: u64::from(self.fixture.shape.key_dim) * 2,
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
                self.send(numbers.as_ptr().cast(), staging.memory.address, staging.memory.bytes)?;
                // SAFETY: `staging` stays until the op has ended.
                let op = unsafe {
                    self.fixture.offload.put(layer, first, PART, &views, &OpOpts::default())?
                };
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

    /// Copies the queries or keys of a bench to the device.
    fn send(&self, from: *const u8, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: memory of the caller and of this sequence, which no other work uses.
        unsafe { upload(&self.device, from, address, bytes) }
    }

    /// Attention of one query over rows of a layer.
    fn attend(&self, keys: u64, values: u64, tokens: u32) -> Result<()> {
        let at = self.buffer.memory.address;
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
        // SAFETY: memory of the world's, which nothing else uses until the event.
        let event = unsafe { self.device.launch(Stream(0), None, &[call])? };
        finish(&self.device, event)
    }

    /// Seconds of a step through all layers.
    fn step(&mut self, which: BlockSelection<'_>, query: Option<&Rows<'_>>) -> Result<f64> {
        let (tokens, began) = (self.tokens, Instant::now());
        let context = Context { parts: 1, first_query: tokens - 1, tokens, ..Context::default() };
        for layer in 0..LAYERS {
            self.fixture.offload.load(0, layer, which, query, &context)?;
            let loaded = self.fixture.offload.wait(0)?;
            let views = self.fixture.offload.views(0)?;
            let at = |plane: &PlaneView| match plane.place {
                Tokens::At(address) => address,
                Tokens::Pages { .. } => 0,
            };
            self.attend(at(&views.k), views.v.as_ref().map_or(0, at), loaded.tokens)?;
            self.fixture.offload.done(0)?;
        }
        Ok(began.elapsed().as_secs_f64())
    }
}

/// Scratch memory of the kernel.
fn scratch_bytes(tokens: u32) -> u64 {
    4 * 32 * (u64::from(tokens.div_ceil(128).max(1)) * 130 + 1)
}

/// Seconds of a step over all blocks, with Quest, and over blocks chosen before; and the share of
/// bytes loaded.
struct Times {
    all: f64,
    quest: f64,
    chosen: f64,
    part: f64,
}

fn measure(library: Option<std::path::PathBuf>, tokens: u32, rounds: usize) -> Result<Times> {
    let mut sequence = Sequence::open(library, tokens)?;
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
    let before = sequence.fixture.offload.stats();
    sequence.step(BlockSelection::All, Some(&query))?;
    let blocks = sequence.fixture.offload.blocks(0)?.to_vec();
    let after = sequence.fixture.offload.stats();
    let loaded = (after.loaded_bytes - before.loaded_bytes) as f64;
    let part = loaded / (loaded + (after.saved_bytes - before.saved_bytes) as f64);
    let mut of = |which: BlockSelection<'_>, query: Option<&Rows<'_>>| -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..rounds {
            times.push(sequence.step(which, query)?);
        }
        Ok(median(&mut times))
    };
    let all = of(BlockSelection::All, None)?;
    let quest = of(BlockSelection::All, Some(&query))?;
    Ok(Times { all, quest, chosen: of(BlockSelection::Chosen(&blocks), None)?, part })
}

/// Measures the bars. A `library` is a fake driver, which only shows that the bench runs.
pub fn run(library: Option<std::path::PathBuf>, rounds: usize) -> Vec<Bar> {
    let is_small = library.is_some();
    let tokens = if is_small { 2 * PART } else { 128 << 10 };
    bars(measure(library, tokens, rounds), tokens)
}

/// The bars with the reason why they are not measured.
pub fn none(why: Error) -> Vec<Bar> {
    bars(Err(why), 0)
}

fn bars(measured: Result<Times>, tokens: u32) -> Vec<Bar> {
    let bar = |bar: &'static str, goal: Option<f64>, of: fn(&Times) -> f64| {
        Bar::higher(bar, "x")
            .baseline("all blocks of the context")
            .baseline_value(measured.as_ref().ok().map(|_| 1.0))
            .goal(goal)
            .value(measured.as_ref().ok().map(|times| times.all / of(times)))
            .note(match &measured {
                Ok(times) => format!(
                    "{tokens} tokens, {:.1} % of them loaded: {:.3} ms of {:.3} ms a layer",
                    100.0 * times.part,
                    1e3 * of(times) / f64::from(LAYERS),
                    1e3 * times.all / f64::from(LAYERS)
                ),
                Err(error) => error.to_string(),
            })
    };
    vec![
        bar("offload_quest_128k", Some(5.0), |times| times.quest),
        // For an engine that chooses the blocks on the device.
        bar("offload_chosen_128k", None, |times| times.chosen),
    ]
}
