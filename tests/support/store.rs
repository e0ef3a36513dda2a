//! Engines for tests of the store: tensors of several shapes, filled with bytes that
//! follow from all tokens before them, so that any mistake about whose KV is whose
//! shows; and what waits for ops.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::{Result, Status};
use kvtier::device::Memory;
use kvtier::kv::core::moves::{Deed, Level};
use kvtier::kv::core::views::{LayerViews, PlaneView, Tokens, Views};
use kvtier::kv::core::{Counters, Rectangle, SessionOpts, SpaceOpts, Wanted};
use kvtier::kv::spec::StoreSpec;
use kvtier::kv::store::Store;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};

/// What a byte is that nobody has written.
pub const POISON: u8 = 0xA5;
/// Tokens of a page.
pub const PAGE: usize = 8;
/// Longer than anything may take, so that a store that hangs fails a test.
pub const LONG_NS: u64 = 60_000_000_000;

/// A directory that goes with the test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvt-store-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        drop(std::fs::remove_dir_all(&path));
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// Numbers that look like chance, and are the same again.
pub fn mix(mut state: u64) -> u64 {
    state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

/// A mark of every prefix of a sequence, by its length less one.
pub fn marks_of(space: u32, tokens: &[u32]) -> Vec<u64> {
    let mut mark = mix(u64::from(space));
    let next = |&token: &u32| {
        mark = mix(mark ^ u64::from(token) << 20);
        mark
    };
    tokens.iter().map(next).collect()
}

/// Tokens of a document from its start on.
pub fn document(number: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| number.wrapping_mul(1 << 16) + i).collect()
}

/// What all tests here keep: so many layers of so many heads.
#[derive(Clone, Copy)]
pub struct Model {
    pub layers: usize,
    pub heads: usize,
    /// Bytes of a head of a token.
    pub run: usize,
    pub chunk: usize,
}

impl Model {
    pub fn layout(&self) -> Layout {
        let (heads, dim) = (self.heads as u32, self.run as u32 / 2);
        let group = Group::gqa(0..self.layers as u16, heads, dim, Dtype::F16).expect("sound");
        Layout::new(self.chunk as u32, vec![group]).expect("sound")
    }

    pub fn token_bytes(&self) -> usize {
        self.heads * self.run
    }

    /// K and V of a chunk, all layers.
    pub fn chunk_bytes(&self) -> u64 {
        (2 * self.token_bytes() * self.chunk * self.layers) as u64
    }
}

/// How an engine keeps a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// [tokens, heads, dim].
    Tokens,
    /// The same, with rows that are longer than what they hold.
    Padded,
    /// [heads, tokens, dim].
    Heads,
    /// [tokens, K and V, heads, dim].
    Interleaved,
    /// Pages of all layers: [layers, K and V, tokens of a page, heads, dim], in no
    /// order, one table for all.
    Paged,
}

pub const SHAPES: [Shape; 5] =
    [Shape::Tokens, Shape::Padded, Shape::Heads, Shape::Interleaved, Shape::Paged];

/// The tensors of an engine for some tokens, all layers.
pub struct Engine {
    pub model: Model,
    pub shape: Shape,
    pub tokens: usize,
    memory: Vec<u8>,
}

impl Engine {
    pub fn new(model: Model, shape: Shape, tokens: usize) -> Engine {
        let mut engine = Engine { model, shape, tokens, memory: Vec::new() };
        engine.memory = vec![POISON; engine.plane_bytes() * 2 * model.layers];
        engine
    }

    fn row(&self) -> usize {
        let padding = if self.shape == Shape::Padded { 24 } else { 0 };
        self.model.token_bytes() + padding
    }

    fn plane_bytes(&self) -> usize {
        self.tokens.next_multiple_of(PAGE) * self.row()
    }

    fn pages(&self) -> usize {
        self.tokens.div_ceil(PAGE)
    }

    /// Where a page is: neighbours lie apart, some the other way round.
    fn page(&self, page: usize) -> usize {
        let swapped = (page ^ 1).min(self.pages() - 1);
        let at = if page ^ 1 < self.pages() { swapped } else { page };
        at * PAGE * self.row() * 2 * self.model.layers
    }

    /// Where a head of a token is.
    fn at(&self, layer: usize, is_v: bool, token: usize, head: usize) -> usize {
        let (row, run, v) = (self.row(), self.model.run, usize::from(is_v));
        let plane = (layer * 2 + v) * self.plane_bytes();
        match self.shape {
            Shape::Tokens | Shape::Padded => plane + token * row + head * run,
            Shape::Heads => plane + (head * self.tokens + token) * run,
            Shape::Interleaved => {
                layer * 2 * self.plane_bytes() + (token * 2 + v) * row + head * run
            }
            Shape::Paged => {
                let in_page = ((layer * 2 + v) * PAGE + token % PAGE) * row;
                self.page(token / PAGE) + in_page + head * run
            }
        }
    }

    fn plane(&self, layer: usize, is_v: bool, first: usize, pages: &Arc<Vec<u64>>) -> PlaneView {
        let base = self.memory.as_ptr().expose_provenance() as u64;
        let (row, run) = (self.row() as u64, self.model.run as u64);
        let (token_stride_bytes, head_stride_bytes) = match self.shape {
            Shape::Heads => (run, run * self.tokens as u64),
            Shape::Interleaved => (row * 2, run),
            _ => (row, run),
        };
        let place = match self.shape {
            Shape::Paged => Tokens::Pages {
                addresses: pages.clone(),
                page_tokens: PAGE as u32,
                shift_bytes: ((layer * 2 + usize::from(is_v)) * PAGE * self.row()) as i64,
            },
            _ => Tokens::At(base + self.at(layer, is_v, first, 0) as u64),
        };
        PlaneView {
            place,
            tokens: (self.tokens - first) as u32,
            heads: self.model.heads as u32,
            run_bytes: run,
            token_stride_bytes,
            head_stride_bytes,
            memory: Memory::Host,
        }
    }

    /// A rectangle of tokens and layers; in pages, `first` begins one.
    pub fn rectangle(
        &self,
        first: usize,
        tokens: usize,
        layers: std::ops::Range<usize>,
        by_layer: bool,
    ) -> Rectangle {
        let base = self.memory.as_ptr().expose_provenance() as u64;
        let pages = (first / PAGE..self.pages()).map(|page| base + self.page(page) as u64);
        let pages = Arc::new(pages.collect::<Vec<u64>>());
        let of = |layer| LayerViews {
            k: self.plane(layer, false, first, &pages),
            v: Some(self.plane(layer, true, first, &pages)),
        };
        Rectangle {
            first_token: first as u64,
            tokens: tokens as u64,
            first_layer: layers.start,
            layers: layers.len(),
            by_layer,
            wanted: Wanted::All,
            views: Arc::new(Views(layers.map(of).collect())),
            after: None,
        }
    }

    /// All of it.
    pub fn whole(&self) -> Rectangle {
        self.rectangle(0, self.tokens, 0..self.model.layers, false)
    }

    fn right(mark: u64, layer: usize, is_v: bool, head: usize, out: &mut [u8]) {
        let mut state = mix(mark ^ (layer as u64) << 17 ^ u64::from(is_v) << 16 ^ head as u64);
        for part in out.chunks_mut(8) {
            state = mix(state);
            part.copy_from_slice(&state.to_le_bytes()[..part.len()]);
        }
    }

    /// Computes the KV of tokens, as a model would.
    pub fn compute(&mut self, marks: &[u64]) {
        self.visit(0..marks.len(), 0..self.model.layers, |engine, at, token, layer, v, head| {
            let run = engine.model.run;
            Engine::right(marks[token], layer, v, head, &mut engine.memory[at..at + run]);
        });
    }

    /// Goes through the heads of some tokens and layers.
    fn visit(
        &mut self,
        tokens: std::ops::Range<usize>,
        layers: std::ops::Range<usize>,
        mut each: impl FnMut(&mut Engine, usize, usize, usize, bool, usize),
    ) {
        for layer in layers {
            for token in tokens.clone() {
                for v in [false, true] {
                    for head in 0..self.model.heads {
                        let at = self.at(layer, v, token, head);
                        each(self, at, token, layer, v, head);
                    }
                }
            }
        }
    }

    /// Compares some tokens and layers with what they must be, and poisons them again.
    pub fn check(
        &mut self,
        marks: &[u64],
        tokens: std::ops::Range<usize>,
        layers: std::ops::Range<usize>,
    ) {
        let mut right = vec![0; self.model.run];
        self.visit(tokens, layers, |engine, at, token, layer, v, head| {
            Engine::right(marks[token], layer, v, head, &mut right);
            let got = &mut engine.memory[at..at + right.len()];
            let poison = got.iter().all(|&b| b == POISON);
            assert!(
                got == right,
                "{:?}: wrong bytes in token {token}, layer {layer}, v {v}, head {head}{}",
                engine.shape,
                if poison { ": untouched" } else { "" }
            );
            got.fill(POISON);
        });
    }

    /// Whether some tokens and layers are there, without a word where they are not.
    pub fn is_right(&mut self, marks: &[u64]) -> bool {
        let (tokens, layers) = (0..self.tokens.min(marks.len()), 0..self.model.layers);
        let (mut right, mut is_right) = (vec![0; self.model.run], true);
        self.visit(tokens, layers, |engine, at, token, layer, v, head| {
            Engine::right(marks[token], layer, v, head, &mut right);
            is_right &= engine.memory[at..at + right.len()] == right;
        });
        is_right
    }

    /// How many bytes of so many tokens are not what they must be, and how many of those behind
    /// them are neither that nor untouched.
    pub fn wrong_bytes(&mut self, marks: &[u64], tokens: usize) -> u64 {
        let (all, layers) = (0..self.tokens.min(marks.len()), 0..self.model.layers);
        let (mut right, mut wrong) = (vec![0; self.model.run], 0);
        self.visit(all, layers, |engine, at, token, layer, v, head| {
            Engine::right(marks[token], layer, v, head, &mut right);
            let differ = engine.memory[at..].iter().zip(&right).filter(|(got, right)| got != right);
            wrong += differ.filter(|(got, _)| token < tokens || **got != POISON).count() as u64;
        });
        wrong
    }

    /// Where each head of some tokens and layers is either untouched or right.
    pub fn check_if_there(&mut self, marks: &[u64]) {
        let (tokens, layers) = (0..self.tokens.min(marks.len()), 0..self.model.layers);
        let mut right = vec![0; self.model.run];
        self.visit(tokens, layers, |engine, at, token, layer, v, head| {
            Engine::right(marks[token], layer, v, head, &mut right);
            let got = &mut engine.memory[at..at + right.len()];
            let poison = got.iter().all(|&b| b == POISON);
            assert!(poison || got == right, "wrong bytes in token {token}, layer {layer}");
            got.fill(POISON);
        });
    }

    /// Nobody has written anything that was not compared.
    pub fn is_untouched(&self) -> bool {
        self.memory.iter().all(|&b| b == POISON)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory
    }
}

/// A store on a runtime of its own.
pub struct Home {
    pub store: Store,
    pub runtime: Runtime,
}

pub fn runtime() -> Runtime {
    Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).expect("opened")
}

pub fn spec_of(text: &str) -> StoreSpec {
    StoreSpec::parse(text).expect("a sound spec")
}

/// A spec with a disk in a directory.
pub fn with_disk(dir: &Path, disk: &str, rest: &str) -> StoreSpec {
    spec_of(&format!("store(disk=disk(path=\"{}\",{disk}),{rest})", dir.display()))
}

impl Home {
    pub fn open(spec: &StoreSpec) -> Home {
        let runtime = runtime();
        let store = Store::open(runtime.core(), None, spec).expect("opened");
        Home { store, runtime }
    }

    pub fn now_ns(&self) -> u64 {
        self.runtime.core().clock().now_ns()
    }

    /// A namespace for a model.
    pub fn space(&self, number: u8, model: &Model) -> u32 {
        let opts = SpaceOpts { key: Key([number; 32]), layout: model.layout(), holes: false };
        self.store.with(|core| core.open_space(&opts)).expect("opened")
    }

    pub fn session(&self, space: u32, tokens: &[u32]) -> u32 {
        self.store
            .with(|core| {
                let number = core.open_session(space, &SessionOpts::default())?;
                core.append(number, tokens)?;
                Ok(number)
            })
            .expect("a session")
    }

    pub fn end(&self, session: u32) {
        self.store.with(|core| core.close_session(session)).expect("closed");
    }

    pub fn counters(&self) -> Counters {
        self.store.with(|core| Ok(core.counters)).expect("open")
    }

    /// Nothing is under way, and the tables agree.
    pub fn rest(&self) {
        self.store.settle(self.now_ns() + LONG_NS).expect("it rests");
        self.store.with(|core| core.check()).expect("the tables agree");
    }

    pub fn submit(
        &self,
        session: u32,
        deed: Deed,
        level: Level,
        what: Rectangle,
    ) -> Result<Vec<OpRef>> {
        self.store.submit(session, deed, level, what, &OpOpts::default())
    }

    /// Stores all of an engine's tokens.
    pub fn put(&self, session: u32, level: Level, engine: &Engine) -> Done {
        let ops = self.submit(session, Deed::Put, level, engine.whole()).expect("submitted");
        wait(&ops[0])
    }

    /// Loads all of an engine's tokens.
    pub fn get(&self, session: u32, engine: &Engine) -> Done {
        let ops = self.submit(session, Deed::Get, Level::Ram, engine.whole()).expect("submitted");
        wait(&ops[0])
    }

    pub fn close(self) {
        self.store.close(self.now_ns() + LONG_NS).expect("closed");
    }
}

/// How an op ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub status: Status,
    pub tokens: usize,
}

/// Waits for the release of an op.
pub fn wait(op: &OpRef) -> Done {
    let clock = kvtier::base::clock::Clock::real();
    op.wait(RELEASED, clock.now_ns() + LONG_NS).expect("every op ends");
    let code = op.info().status.expect("a released op is resolved");
    let done = Done {
        status: Status::from_code(code).expect("a known status"),
        tokens: op.value() as usize,
    };
    op.remove();
    done
}
