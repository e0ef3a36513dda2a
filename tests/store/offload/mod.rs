//! Layer-wise offload, compared with a copy of everything that was put.

use kvtier::attention::{Decode, Keys, Prefill, Problem, Rows, Scales, merge};
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::random::Random;
use kvtier::base::runtime::Runtime;
use kvtier::base::spec::Spec;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::host::Host;
use kvtier::device::{Device, Event, Memory};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::meta::view::{Place, View};
use kvtier::offload::{BlockSelection, Offload, Opts, Policies, RingPlacement};
use kvtier::sparse::{Context, Index, Kind, Shape, Sparse, registry};
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView, Tokens};
use kvtier::store::state::{NamespaceOpts, SessionOpts, StoreState};

mod audit;
mod cut;
mod device;
use kvtier_testkit::fixtures::offload;
use kvtier_testkit::fixtures::scratch::Scratch;
use kvtier_testkit::fixtures::{fake_cuda, store as support};
mod faulty;
mod fork;
mod lent;
mod on_device;

const BLOCK: u32 = 16;

/// A number from -1 to 1.
fn number(random: &mut Random) -> f32 {
    random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0
}

fn shape(kind: Kind) -> Shape {
    let (key_heads, key_dim, value_dim) = match kind {
        Kind::Split => (2, 8, 6),
        Kind::Latent => (1, 8, 6),
    };
    Shape {
        layers: 3,
        query_heads: 4,
        key_heads,
        key_dim,
        value_dim,
        scale: 0.0,
        kind,
        block_tokens: BLOCK,
        max_tokens: 4096,
    }
}

/// K and V rows computed for a layer, tokens outermost.
#[derive(Default)]
struct LayerRows {
    k: Vec<f32>,
    v: Vec<f32>,
}

struct World {
    random: Random,
    shape: Shape,
    layers: Vec<LayerRows>,
    /// The device whose memory holds the ring and the tensors of the engine, if any.
    device: Option<Arc<dyn Device>>,
    offload: Offload,
    session: u32,
    next_token: u32,
    store: Arc<Store>,
    // Dropped last.
    runtime: Arc<Runtime>,
}

/// Memory layout of an engine's plane.
#[derive(Clone, Copy, Debug)]
enum PlaneShape {
    Plain,
    Padded,
    Heads,
    Flat,
    Pages(u32),
}

const PLANE_SHAPES: [PlaneShape; 7] = [
    PlaneShape::Plain,
    PlaneShape::Padded,
    PlaneShape::Heads,
    PlaneShape::Flat,
    PlaneShape::Pages(BLOCK),
    PlaneShape::Pages(8),
    PlaneShape::Pages(3),
];

/// A plane of the engine, and its view.
struct Plane {
    memory: Vec<f32>,
    view: PlaneView,
    buffer: Option<on_device::DeviceBuffer>,
}

impl Plane {
    /// Copies the plane to memory of a device. Returns the event after which the copy is complete.
    fn send(&mut self, device: &Arc<dyn Device>) -> Event {
        let buffer = on_device::DeviceBuffer::new(device, self.memory.len() as u64 * 4);
        let event = buffer.fill(&self.memory);
        self.view = on_device::moved(&self.view, self.memory.as_ptr() as u64, buffer.address());
        self.buffer = Some(buffer);
        event
    }
}

fn plane(rows: &[f32], tokens: usize, heads: usize, dim: usize, how: PlaneShape) -> Plane {
    let (token, head, size) = match how {
        PlaneShape::Plain | PlaneShape::Flat | PlaneShape::Pages(_) => {
            (heads * dim, dim, tokens * heads * dim)
        }
        PlaneShape::Padded => (heads * dim + 5, dim, tokens * (heads * dim + 5)),
        PlaneShape::Heads => (dim, tokens * dim, tokens * heads * dim),
    };
    let page_tokens = if let PlaneShape::Pages(n) = how { n as usize } else { tokens };
    let pages = tokens.div_ceil(page_tokens);
    // Pages lie in the opposite order.
    let start = |page: usize| (pages - 1 - page) * page_tokens * token;
    let mut memory = vec![f32::NAN; size + page_tokens * token];
    let at = |t: usize, h: usize| match how {
        PlaneShape::Pages(_) => start(t / page_tokens) + t % page_tokens * token + h * head,
        _ => t * token + h * head,
    };
    for t in 0..tokens {
        for h in 0..heads {
            let from = (t * heads + h) * dim;
            memory[at(t, h)..at(t, h) + dim].copy_from_slice(&rows[from..from + dim]);
        }
    }
    let base = memory.as_ptr() as u64;
    let place = match how {
        PlaneShape::Pages(_) => Tokens::Pages {
            addresses: Arc::new((0..pages).map(|page| base + 4 * start(page) as u64).collect()),
            page_tokens: page_tokens as u32,
            shift_bytes: 0,
        },
        _ => Tokens::At(base),
    };
    let is_flat = matches!(how, PlaneShape::Flat);
    let view = PlaneView {
        place,
        tokens: tokens as u32,
        heads: if is_flat { 1 } else { heads as u32 },
        run_bytes: if is_flat { heads * dim * 4 } else { dim * 4 } as u64,
        token_stride_bytes: token as u64 * 4,
        head_stride_bytes: head as u64 * 4,
        memory: Memory::Host,
    };
    Plane { memory, view, buffer: None }
}

fn rows(numbers: &[f32], tokens: u32, heads: u32, dim: u32) -> Rows<'_> {
    let view = View {
        place: Place::At(numbers.as_ptr() as u64),
        tokens,
        heads,
        run_bytes: u64::from(dim) * 4,
        token_stride_bytes: u64::from(heads * dim) * 4,
        head_stride_bytes: u64::from(dim) * 4,
    };
    assert!(numbers.len() >= (tokens * heads * dim) as usize);
    // SAFETY: the rows are `numbers`, which are borrowed for as long.
    unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
}

fn numbers_of(rows: &Rows<'_>) -> Vec<f32> {
    let mut all = Vec::new();
    for token in 0..rows.tokens() {
        for head in 0..rows.heads() {
            let row = rows.row(token, head).cast::<f32>();
            // SAFETY: the address is in a row of the offload's memory.
            all.extend((0..rows.dim() as usize).map(|i| unsafe { row.add(i).read() }));
        }
    }
    all
}

fn policy(spec: &str, shape: &Shape) -> Option<Box<dyn Sparse>> {
    (!spec.is_empty()).then(|| {
        registry::make(&Spec::parse(spec).expect("a sound spec"), shape).expect("a sound spec")
    })
}

fn open(
    store: &Arc<Store>,
    session: u32,
    shape: &Shape,
    [prefill, decode]: [&str; 2],
    (buffers, buffer_tokens): (u32, u32),
) -> Offload {
    let opts = Opts {
        buffers,
        placement: on_device::ring_home(),
        policies: Policies { prefill: policy(prefill, shape), decode: policy(decode, shape) },
        recipe: format!("{prefill} {decode}").trim().to_string(),
        ..offload::opts(session, shape, buffer_tokens)
    };
    Offload::open(store, opts).expect("it fits")
}

impl World {
    fn open(seed: u64, kind: Kind, spec: &str, decode: &str) -> World {
        World::with(seed, shape(kind), spec, ["", decode], (3, 256))
    }

    fn with(seed: u64, shape: Shape, spec: &str, policies: [&str; 2], ring: (u32, u32)) -> World {
        let device = on_device::current().unwrap_or_else(|| Arc::new(Host::default()));
        World::on(device, seed, shape, spec, policies, ring)
    }

    /// Same as `with`, with copies made by the caller's device.
    fn on(
        device: Arc<dyn Device>,
        seed: u64,
        shape: Shape,
        spec: &str,
        [prefill, decode]: [&str; 2],
        (buffers, buffer_tokens): (u32, u32),
    ) -> World {
        let runtime = Arc::new(support::runtime());
        let spec = StoreSpec::parse(spec).expect("a sound spec");
        let on = on_device::current().map(|_| device.clone());
        let store = Store::open_with(runtime.core(), None, &spec, device);
        let store = Arc::new(store.expect("opened"));
        let session = offload::open_session(&store, &shape, 9);
        let offload = open(&store, session, &shape, [prefill, decode], (buffers, buffer_tokens));
        let layers = (0..shape.layers).map(|_| LayerRows::default()).collect();
        let random = Random::new(seed);
        World { random, shape, layers, device: on, offload, session, next_token: 0, store, runtime }
    }

    fn tokens(&self, layer: usize) -> u32 {
        self.layers[layer].k.len() as u32 / (self.shape.key_heads * self.shape.key_dim)
    }

    /// Appends tokens to the session.
    fn append(&mut self, tokens: u32) {
        // Each token id once: equal tokens would have equal KV.
        let new: Vec<u32> = (self.next_token..self.next_token + tokens).collect();
        self.next_token += tokens;
        self.store.with(|core| core.append(self.session, &new)).expect("room");
    }

    fn put_as(&mut self, layer: usize, tokens: u32, how: PlaneShape) -> Result<(), Status> {
        let (heads, k_dim) = (self.shape.key_heads as usize, self.shape.key_dim as usize);
        let (v_dim, n, first) =
            (self.shape.value_dim as usize, tokens as usize, self.tokens(layer));
        let mut numbers =
            |count: usize| -> Vec<f32> { (0..count).map(|_| number(&mut self.random)).collect() };
        let (k, v) = (numbers(n * heads * k_dim), numbers(n * heads * v_dim));
        let mut k_plane = plane(&k, n, heads, k_dim, how);
        let mut v_plane = (self.shape.kind == Kind::Split).then(|| plane(&v, n, heads, v_dim, how));
        // On a device, planes are still being computed when they are put. Some planes are in host
        // memory.
        let mut computed = Vec::new();
        if let Some(device) = self.device.as_ref().filter(|_| (first + layer as u32) % 5 > 0) {
            computed.push(k_plane.send(device));
            computed.extend(v_plane.as_mut().map(|plane| plane.send(device)));
            // Both copies are on one stream, so the last event covers the others.
            self.offload.after(computed.last().copied()).expect("an event");
        }
        let views =
            LayerViews { k: k_plane.view.clone(), v: v_plane.as_ref().map(|v| v.view.clone()) };
        // SAFETY: the planes live until the op has ended.
        let op =
            unsafe { self.offload.put(layer as u32, first, tokens, &views, &OpOpts::default()) };
        let status = op.as_ref().ok().and_then(|op| op.as_ref()).map(|op| {
            op.wait(RELEASED, 0).expect("the op ends");
            let status = op.info().status.expect("resolved");
            op.remove();
            status
        });
        if let Some(device) = &self.device {
            self.offload.after(None).expect("none");
            computed.into_iter().for_each(|event| on_device::end(&**device, event));
        }
        op.map_err(|error| error.status())?;
        assert_eq!(status.unwrap_or(0), 0, "{:?}", status.map(Status::from_code));
        self.layers[layer].k.extend(k);
        self.layers[layer].v.extend(v);
        Ok(())
    }

    /// Puts tokens in all layers.
    fn put(&mut self, tokens: u32) {
        self.append(tokens);
        for layer in 0..self.layers.len() {
            let how = PLANE_SHAPES[self.random.below(PLANE_SHAPES.len() as u64) as usize];
            self.put_as(layer, tokens, how).expect("room");
        }
    }

    fn query(&mut self, count: u32) -> Vec<f32> {
        let n = count * self.shape.query_heads * self.shape.key_dim;
        (0..n).map(|_| number(&mut self.random)).collect()
    }

    /// Expected K and V of some tokens.
    fn right(&self, layer: usize, positions: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let heads = self.shape.key_heads as usize;
        let row = |all: &[f32], at: u32, len: usize| {
            all[at as usize * len..(at as usize + 1) * len].to_vec()
        };
        let (k_row, v_row) =
            (heads * self.shape.key_dim as usize, heads * self.shape.value_dim as usize);
        let k: Vec<f32> =
            positions.iter().flat_map(|&at| row(&self.layers[layer].k, at, k_row)).collect();
        let v = match self.shape.kind {
            Kind::Split => {
                positions.iter().flat_map(|&at| row(&self.layers[layer].v, at, v_row)).collect()
            }
            // Values are the first numbers of the keys.
            Kind::Latent => k.chunks(k_row).flat_map(|row| row[..v_row].to_vec()).collect(),
        };
        (k, v)
    }

    /// The numbers of a buffer's rows.
    fn kv(&self, buffer: u32) -> (Vec<f32>, Vec<f32>) {
        if self.device.is_none() || on_device::ring_home() == RingPlacement::Host {
            let kv = self.offload.kv(buffer).expect("there");
            return (numbers_of(&kv.keys), numbers_of(&kv.values));
        }
        let status = self.offload.kv(buffer).map(|_| ()).map_err(|error| error.status());
        assert_eq!(status, Err(Status::Unsupported), "the processor cannot read device memory");
        let views = self.offload.views(buffer).expect("there");
        let [k, v] = on_device::numbers(self.device.as_ref(), &views);
        let (k_row, v_row) = (self.shape.key_dim as usize, self.shape.value_dim as usize);
        let of_keys = || k.chunks(k_row).flat_map(|row| row[..v_row].to_vec()).collect();
        let v = if self.shape.kind == Kind::Latent { of_keys() } else { v };
        (k, v)
    }

    /// Loads all tokens of each layer, and compares them.
    fn check_all(&mut self) {
        for layer in 0..self.layers.len() {
            let tokens = self.tokens(layer);
            let (stored, tail) = self.offload.tokens(layer as u32).expect("a layer");
            assert_eq!(stored + tail, tokens, "layer {layer}");
            let context = decode_context(tokens.max(1));
            self.offload.load(0, layer as u32, BlockSelection::All, None, &context).expect("room");
            self.check(0, layer, stored..tokens);
            self.offload.done(0).expect("a buffer");
        }
    }

    /// Truncates the session and the copy as the offload was truncated.
    fn was_cut(&mut self, tokens: u32) {
        let session = self.session;
        self.store.with(|core| core.truncate(session, tokens.into())).expect("cut");
        let (heads, k, v) = (self.shape.key_heads, self.shape.key_dim, self.shape.value_dim);
        for numbers in &mut self.layers {
            numbers.k.truncate((tokens * heads * k) as usize);
            numbers.v.truncate((tokens * heads * v) as usize);
        }
    }

    /// Waits for a buffer, and compares its rows.
    fn check(&mut self, buffer: u32, layer: usize, tail: std::ops::Range<u32>) {
        let loaded = self.offload.wait(buffer).expect("loaded");
        assert_eq!(loaded.tail_tokens, tail.len() as u32);
        assert_eq!(loaded.tokens, loaded.blocks * BLOCK + loaded.tail_tokens);
        let blocks = self.offload.blocks(buffer).expect("a buffer").to_vec();
        let of = |&id: &u32| id * BLOCK..(id + 1) * BLOCK;
        let positions: Vec<u32> = blocks.iter().flat_map(of).chain(tail).collect();
        let (k, v) = self.right(layer, &positions);
        let (keys, values) = self.kv(buffer);
        assert!(keys == k, "keys of blocks {blocks:?}");
        assert!(values == v, "values of blocks {blocks:?}");
        // The row of each token.
        let asked: Vec<u32> = (0..self.tokens(layer)).step_by(3).collect();
        let mut rows = Vec::new();
        self.offload.rows_of(buffer, &asked, &mut rows).expect("a buffer");
        let there = asked.iter().filter_map(|at| positions.iter().position(|p| p == at));
        assert_eq!(rows, there.map(|at| at as u32).collect::<Vec<u32>>());
    }
}

fn decode_context(tokens: u32) -> Context {
    Context { is_prefill: false, part: 0, parts: 1, first_query: tokens - 1, tokens }
}

#[test]
fn loaded_rows_equal_put_rows() {
    for seed in 0..24 {
        let kind = if seed % 2 == 0 { Kind::Split } else { Kind::Latent };
        let mut world = World::open(seed + 1, kind, "store(host=1MiB)", "");
        for _ in 0..30 {
            match world.random.below(8) {
                0 => {
                    let tokens = 1 + world.random.below(70) as u32;
                    if world.tokens(0) + tokens <= 256 {
                        world.put(tokens);
                    }
                }
                1..=3 if world.tokens(0) < 256 => world.put(1),
                4 => {
                    let tokens = world.random.below(u64::from(world.tokens(0)) + 1) as u32;
                    world.offload.truncate(tokens).expect("the tokens are stored");
                    world.was_cut(tokens);
                }
                _ if world.tokens(0) > 0 => {
                    let layer = world.random.below(3) as usize;
                    let buffer = world.random.below(3) as u32;
                    let tokens = world.tokens(layer);
                    let (stored, tail) = world.offload.tokens(layer as u32).expect("a layer");
                    assert_eq!(stored + tail, tokens);
                    let context = decode_context(tokens);
                    let which = if world.random.below(2) == 0 {
                        Vec::new()
                    } else {
                        (0..stored / BLOCK).filter(|_| world.random.below(2) == 0).collect()
                    };
                    let (wanted, tail) = match which.is_empty() {
                        true => (BlockSelection::All, stored..tokens),
                        false => (BlockSelection::Blocks(&which), 0..0),
                    };
                    let blocks = world.offload.load(buffer, layer as u32, wanted, None, &context);
                    blocks.expect("room");
                    world.check(buffer, layer, tail);
                    world.offload.done(buffer).expect("a buffer");
                }
                _ => {}
            }
        }
    }
}

/// A session larger than memory is loaded from the disk.
#[test]
fn blocks_on_disk_are_loaded() {
    let scratch = Scratch::created("offload-disk");
    let shape = Shape { key_dim: 512, value_dim: 512, ..shape(Kind::Split) };
    let spec = format!(
        "store(host=2MiB,write=back,disk=disk(path=\"{}\",bytes=64MiB,segment=4MiB))",
        scratch.0.display()
    );
    let mut world = World::with(5, shape, &spec, ["", ""], (2, 512));
    for _ in 0..16 {
        world.put(31);
    }
    let bytes = world.offload.stats().put_bytes;
    assert!(bytes > 4 << 20, "{bytes} bytes, more than memory has");
    for layer in 0..3 {
        let tokens = world.tokens(layer);
        let (stored, _) = world.offload.tokens(layer as u32).expect("a layer");
        let context = decode_context(tokens);
        world.offload.load(1, layer as u32, BlockSelection::All, None, &context).expect("room");
        world.check(1, layer, stored..tokens);
        world.offload.done(1).expect("a buffer");
    }
    let stats = world.offload.stats();
    assert_eq!((stats.loads, stats.failed_loads, stats.saved_bytes), (3, 0, 0));
    assert!(stats.load_waits.count > 0);
    drop(world);
}

/// Attention of one query over all rows in memory, with an index of positions.
fn attend(query: &Rows<'_>, keys: Rows<'_>, values: Rows<'_>, select: Keys<'_>) -> Vec<f32> {
    let problem = Problem {
        queries: *query,
        keys,
        values,
        first_key: 0,
        first_query: keys.tokens() - 1,
        scale: 0.0,
        select,
    };
    let heads = query.heads() as usize;
    let (mut out, mut lse) = (vec![0.0; heads * values.dim() as usize], vec![0.0; heads]);
    let mut memory = vec![0.0; Decode::memory(&problem, false).expect("sound")];
    let mut decode = Decode::new(problem, &mut out, &mut lse, &mut memory, false).expect("sound");
    let mut scratch = vec![0.0; decode.scratch()];
    decode.all(&mut scratch).expect("computed");
    out
}

/// Quest loads the blocks of selected pages. Results are bit-identical to those with all rows in
/// memory.
#[test]
fn quest_is_bit_identical_when_offloaded() {
    let spec = "quest(budget=64,page=8,dense=1)";
    let mut world = World::open(3, Kind::Split, "store(host=4MiB)", spec);
    let mut beside = registry::make(&Spec::parse(spec).expect("a sound spec"), &world.shape)
        .expect("a sound spec");
    world.put(200);
    for layer in 0..3u32 {
        let shape = world.shape;
        let all = rows(&world.layers[layer as usize].k, 200, shape.key_heads, shape.key_dim);
        beside.append(layer, 0, &all).expect("sound");
    }
    for layer in 0..3 {
        let shape = world.shape;
        let numbers = world.query(1);
        let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
        let context = decode_context(200);
        let at = layer as u32;
        let blocks =
            world.offload.load(0, at, BlockSelection::All, Some(&query), &context).expect("room");
        if layer == 0 {
            assert_eq!(blocks, 200 / BLOCK, "a dense layer");
        }
        world.check(0, layer, 192..200);
        let (k, v) = (&world.layers[layer].k, &world.layers[layer].v);
        let keys = rows(k, 200, shape.key_heads, shape.key_dim);
        let values = rows(v, 200, shape.key_heads, shape.value_dim);
        let mut index = Index::default();
        beside.index(at, &query, Some(&keys), &context, &mut index).expect("sound");
        let (k, v) = world.kv(0);
        let here_tokens = (k.len() / 16) as u32;
        let here_keys = rows(&k, here_tokens, shape.key_heads, shape.key_dim);
        let here_values = rows(&v, here_tokens, shape.key_heads, shape.value_dim);
        // Page lists with the rows of the pages in the buffer.
        let mut here = index.clone();
        here.lists.clear();
        for at in 0..index.lists.len() {
            let page = index.heads[0].key_block;
            let firsts: Vec<u32> = index.lists.get(at).iter().map(|id| id * page).collect();
            let mut found = Vec::new();
            world.offload.rows_of(0, &firsts, &mut found).expect("a buffer");
            assert_eq!(found.len(), firsts.len(), "what is chosen is loaded");
            here.lists.push(found.iter().map(|row| row / page));
        }
        assert_eq!(index.is_dense(), layer == 0);
        let right = attend(&query, keys, values, index.keys());
        let got = attend(&query, here_keys, here_values, here.keys());
        assert!(right == got, "the same bits");
        world.offload.done(0).expect("a buffer");
    }
    let stats = world.offload.stats();
    assert_eq!(stats.selections, 3);
    assert!(stats.saved_bytes > 0 && stats.policy_bytes > 0, "{stats:?}");
    let moved = stats.loaded_bytes + stats.saved_bytes;
    assert_eq!(moved, 36 * u64::from(BLOCK) * 4 * 2 * 14, "all blocks of three layers");
}

/// Earlier blocks are loaded two at a time; the result is that of the whole prompt.
#[test]
fn prompt_larger_than_the_ring_is_computed_in_parts() {
    let shape = shape(Kind::Split);
    let mut world = World::with(11, shape, "store(host=4MiB)", ["", ""], (2, 2 * BLOCK));
    let (parts, each) = (5u32, 2 * BLOCK);
    let queries = world.query(parts * each);
    let row = (shape.query_heads * shape.key_dim) as usize;
    let width = (shape.query_heads * shape.value_dim) as usize;
    let mut got = Vec::new();
    for part in 0..parts {
        world.append(each);
        world.put_as(1, each, PlaneShape::Plain).expect("room");
        world.put_as(0, each, PlaneShape::Plain).expect("room");
        world.put_as(2, each, PlaneShape::Plain).expect("room");
        let first = part * each;
        let mine = &queries[first as usize * row..(first + each) as usize * row];
        let query = rows(mine, each, shape.query_heads, shape.key_dim);
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        // Groups of two blocks: earlier groups are fully visible, the last one is causal.
        for group in 0..=part {
            let ids = [2 * group, 2 * group + 1];
            let context =
                Context { is_prefill: true, part, parts, first_query: first, tokens: first + each };
            let buffer = group % 2;
            let which = BlockSelection::Blocks(&ids);
            world.offload.load(buffer, 1, which, None, &context).expect("room");
            world.check(buffer, 1, 0..0);
            let (k, v) = world.kv(buffer);
            let problem = Problem {
                queries: query,
                keys: rows(&k, 2 * BLOCK, shape.key_heads, shape.key_dim),
                values: rows(&v, 2 * BLOCK, shape.key_heads, shape.value_dim),
                first_key: 0,
                first_query: first - group * each,
                scale: 0.0,
                select: Keys::DENSE,
            };
            let heads = (each * shape.query_heads) as usize;
            let (mut out, mut lse) = (vec![0.0; each as usize * width], vec![0.0; heads]);
            let mut prefill = Prefill::new(problem, &mut out, Some(&mut lse)).expect("sound");
            let mut scratch = vec![0.0; prefill.scratch()];
            prefill.all(&mut scratch).expect("computed");
            outs.push(out);
            lses.push(lse);
            world.offload.done(buffer).expect("a buffer");
        }
        let (mut out, mut lse) = (outs.remove(0), lses.remove(0));
        for (other, other_lse) in outs.iter().zip(&lses) {
            merge(&mut out, &mut lse, other, other_lse).expect("alike");
        }
        got.extend(out);
    }
    let all = parts * each;
    let problem = Problem {
        queries: rows(&queries, all, shape.query_heads, shape.key_dim),
        keys: rows(&world.layers[1].k, all, shape.key_heads, shape.key_dim),
        values: rows(&world.layers[1].v, all, shape.key_heads, shape.value_dim),
        first_key: 0,
        first_query: 0,
        scale: 0.0,
        select: Keys::DENSE,
    };
    let mut right = vec![0.0; all as usize * width];
    let mut prefill = Prefill::new(problem, &mut right, None).expect("sound");
    let mut scratch = vec![0.0; prefill.scratch()];
    prefill.all(&mut scratch).expect("computed");
    for (a, b) in got.iter().zip(&right) {
        assert!((a - b).abs() < 2e-6, "{a} and {b}");
    }
}

/// Token by token through passes over all layers, with the largest number of buffers: each layer
/// has all rows that were put, and the newest token.
#[test]
fn passes_load_every_layer_with_its_newest_token() {
    for (buffers, decode) in [(1, ""), (2, ""), (3, ""), (4, ""), (2, "quest(budget=32,page=16)")] {
        let shape = Shape { layers: 5, ..shape(Kind::Split) };
        let policies = ["", decode];
        let mut world = World::with(7, shape, "store(host=4MiB)", policies, (buffers, 256));
        world.put(100);
        for _ in 0..40 {
            let tokens = world.tokens(0) + 1;
            world.append(1);
            let context = decode_context(tokens);
            world.offload.begin(&context).expect("room");
            for layer in 0..5u32 {
                world.put_as(layer as usize, 1, PlaneShape::Plain).expect("room");
                let numbers = world.query(1);
                let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
                let (buffer, loaded) = world.offload.take(layer, Some(&query)).expect("there");
                let blocks = world.offload.blocks(buffer).expect("a buffer");
                let first = tokens - loaded.tail_tokens;
                if decode.is_empty() || layer < 2 {
                    assert!(blocks.iter().copied().eq(0..first / BLOCK), "{blocks:?}");
                } else {
                    assert!(blocks.len() <= 4 * 3, "a few for each head");
                }
                world.check(buffer, layer as usize, first..tokens);
                let again = world.offload.take(layer, None).map_err(|error| error.status());
                assert_eq!(again, Err(Status::State));
                world.offload.give_back(layer).expect("it was taken");
            }
        }
        let stats = world.offload.stats();
        // One load more for each layer whose block was filled while other loads were under way.
        assert!((200..=240).contains(&stats.loads), "{stats:?}");
    }
}

/// Loads cover the kept heavy hitters and all later tokens.
#[test]
fn fully_evicted_blocks_are_not_loaded() {
    let spec = "h2o(sink=4,recent=20,budget=8,heads=all)";
    let mut world = World::open(13, Kind::Split, "store(host=4MiB)", spec);
    world.put(150);
    let tokens = 150;
    for layer in 0..3u32 {
        // Tokens 40 to 47 got most of the attention.
        let sums: Vec<f32> =
            (0..tokens).map(|at| if (40..48).contains(&at) { 9.0 } else { 0.01 }).collect();
        world.offload.observe(layer, tokens, &sums, tokens).expect("sound");
        let context = Context { is_prefill: true, part: 0, parts: 1, first_query: 0, tokens };
        assert!(world.offload.evict(layer, &context).expect("sound"));
        let kept = world.offload.retained(layer).expect("a layer").expect("a list");
        let right: Vec<u32> = (0..4).chain(40..48).chain(130..150).collect();
        assert!(kept.lists() == 1 && kept.positions(0).eq(right));
    }
    world.put(3);
    for layer in 0..3 {
        let context = decode_context(153);
        world.offload.load(0, layer as u32, BlockSelection::All, None, &context).expect("room");
        assert_eq!(world.offload.blocks(0).expect("a buffer"), [0, 2, 8]);
        world.check(0, layer, 144..153);
        let kept = world.offload.retained(layer as u32).expect("a layer").expect("a list");
        let positions: Vec<u32> = kept.positions(0).collect();
        assert_eq!(positions[positions.len() - 3..], [150, 151, 152]);
        let mut rows = Vec::new();
        world.offload.rows_of(0, &positions, &mut rows).expect("a buffer");
        assert_eq!(rows.len(), positions.len(), "kept tokens are loaded");
        world.offload.done(0).expect("a buffer");
    }
    assert_eq!(world.offload.stats().evicted_tokens, 3 * (150 - 32));
}

#[test]
fn invalid_offload_calls_change_nothing() {
    let mut world = World::open(17, Kind::Split, "store(host=1MiB)", "quest(budget=48)");
    world.put(40);
    let before = world.offload.tokens(0).expect("a layer");
    let numbers = world.query(1);
    let shape = world.shape;
    let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
    let context = decode_context(40);
    let mut refused = |act: &mut dyn FnMut(&mut Offload) -> Status, wanted: Status| {
        assert_eq!(act(&mut world.offload), wanted);
    };
    let status = |result: Result<u32, kvtier::base::status::Error>| {
        result.map_or_else(|error| error.status(), |_| Status::Ok)
    };
    let load = |offload: &mut Offload, buffer, layer, which: BlockSelection<'_>| {
        status(offload.load(buffer, layer, which, None, &context))
    };
    refused(&mut |o| load(o, 3, 0, BlockSelection::All), Status::Invalid);
    refused(&mut |o| load(o, 0, 3, BlockSelection::All), Status::Invalid);
    refused(&mut |o| load(o, 0, 0, BlockSelection::Blocks(&[1, 0])), Status::Invalid);
    refused(&mut |o| load(o, 0, 0, BlockSelection::Blocks(&[0, 0])), Status::Invalid);
    refused(&mut |o| load(o, 0, 0, BlockSelection::Blocks(&[2])), Status::Invalid);
    let few = rows(&numbers, 1, 2, shape.key_dim * 2);
    let wrong_heads =
        |o: &mut Offload| status(o.load(0, 2, BlockSelection::All, Some(&few), &context));
    refused(&mut { wrong_heads }, Status::Invalid);
    let nan = vec![f32::NAN; numbers.len()];
    let nan = rows(&nan, 1, shape.query_heads, shape.key_dim);
    let not_finite =
        |o: &mut Offload| status(o.load(0, 2, BlockSelection::All, Some(&nan), &context));
    refused(&mut { not_finite }, Status::Invalid);
    refused(&mut |o| status(o.kv(0).map(|_| 0)), Status::State);
    refused(&mut |o| status(o.wait(0).map(|_| 0)), Status::State);
    refused(&mut |o| status(o.take(0, Some(&query)).map(|_| 0)), Status::State);
    refused(&mut |o| load(o, 0, 0, BlockSelection::All), Status::Ok);
    refused(&mut |o| load(o, 0, 0, BlockSelection::All), Status::Busy);
    world.offload.done(0).expect("a buffer");
    // Tokens that the session does not have, tokens that do not continue it, and keys that are not
    // numbers.
    assert_eq!(world.put_as(0, 1, PlaneShape::Plain), Err(Status::Invalid));
    world.append(4);
    let bad = vec![f32::INFINITY; 4 * 16];
    let k = plane(&bad, 4, 2, 8, PlaneShape::Plain);
    let v = plane(&bad[..48], 4, 2, 6, PlaneShape::Plain);
    let views = LayerViews { k: k.view.clone(), v: Some(v.view.clone()) };
    for (layer, first, tokens) in [(0, 40, 4), (0, 39, 4), (0, 41, 3), (0, 40, 0), (3, 40, 4)] {
        let opts = OpOpts::default();
        // SAFETY: the planes outlive the call.
        let put = unsafe { world.offload.put(layer, first, tokens, &views, &opts) };
        assert_eq!(put.map(|_| ()).map_err(|error| error.status()), Err(Status::Invalid));
    }
    assert_eq!(world.offload.tokens(0).expect("a layer"), before);
    world.put_as(0, 4, PlaneShape::Plain).expect("as before");
}

/// The wait fails, and the buffer can be used again.
#[test]
fn missing_block_is_not_found() {
    let shape = Shape { key_dim: 512, value_dim: 512, ..shape(Kind::Split) };
    let mut world = World::with(19, shape, "store(host=8MiB)", ["", ""], (2, 256));
    world.put(64);
    let session = world.session;
    world.store.with(|core| core.truncate(session, 16)).expect("cut");
    world.store.with(|core| core.append(session, &[1 << 30; 48])).expect("room");
    let context = decode_context(64);
    world.offload.load(0, 1, BlockSelection::All, None, &context).expect("begun");
    assert_eq!(world.offload.wait(0).map_err(|error| error.status()), Err(Status::NotFound));
    assert_eq!(world.offload.stats().failed_loads, 1);
    world.offload.load(0, 1, BlockSelection::Blocks(&[0]), None, &context).expect("begun");
    world.check(0, 1, 0..0);
}

/// Summaries of a policy are loaded with the blocks, also after the store was closed: the policy
/// selects as before.
#[test]
fn block_summaries_are_stored_with_blocks() {
    let scratch = Scratch::created("offload-saved");
    let disk = format!("disk=disk(path=\"{}\",bytes=64MiB,segment=4MiB)", scratch.0.display());
    let (spec, decode) = (format!("store(host=2MiB,{disk})"), "quest(budget=48,page=8,dense=1)");
    let shape = shape(Kind::Split);
    let mut world = World::with(23, shape, &spec, ["", decode], (2, 256));
    world.put(192);
    let numbers = world.query(1);
    let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
    let context = decode_context(192);
    let mut chosen = |offload: &mut Offload| -> Vec<Vec<u32>> {
        let mut all = Vec::new();
        for layer in 0..3 {
            offload.load(0, layer, BlockSelection::All, Some(&query), &context).expect("begun");
            offload.wait(0).expect("loaded");
            all.push(offload.blocks(0).expect("a buffer").to_vec());
            offload.done(0).expect("a buffer");
        }
        all
    };
    let right = chosen(&mut world.offload);
    assert!(right[0].len() == 12 && right[1].len() < 12 && right[2].len() < 12, "{right:?}");
    // Another session with the same tokens, before and after the store was closed and reopened.
    let tokens: Vec<u32> = (0..192).collect();
    let again = |store: &Arc<Store>, chosen: &mut dyn FnMut(&mut Offload) -> Vec<Vec<u32>>| {
        let session = store.with(|core| {
            let group = Group::mla_expanded(0..3, 2, 8, 6, Dtype::F32)?;
            let layout = Layout::new(BLOCK, vec![group])?;
            let namespace =
                core.open_namespace(&NamespaceOpts { key: Key([9; 32]), layout, holes: false })?;
            let session = core.open_session(namespace, &SessionOpts::default())?;
            core.append(session, &tokens)?;
            Ok(session)
        });
        let session = session.expect("a session");
        let mut offload = open(store, session, &shape, ["", decode], (2, 256));
        assert_eq!(offload.stats().policy_bytes, 0);
        offload.resume(192).expect("whole blocks");
        assert!(offload.stats().policy_bytes > 0);
        let chosen = chosen(&mut offload);
        // Summaries of another policy are not used: the policy gets all keys.
        let mut other = open(store, session, &shape, ["", "quest(budget=48,page=16)"], (2, 80));
        other.resume(192).expect("whole blocks");
        assert_eq!(other.stats().loaded_blocks, 3 * 12);
        assert_eq!(offload.stats().loaded_blocks, right.iter().map(Vec::len).sum::<usize>() as u64);
        chosen
    };
    assert_eq!(again(&world.store, &mut chosen), right);
    world.store.close(0).expect("closed");
    drop(world);
    let runtime = support::runtime();
    let spec = StoreSpec::parse(&spec).expect("a sound spec");
    let device = on_device::current().unwrap_or_else(|| Arc::new(Host::default()));
    let store = Store::open_with(runtime.core(), None, &spec, device).expect("opened");
    let store = Arc::new(store);
    assert_eq!(again(&store, &mut chosen), right);
    drop(store);
}

/// No keys need to be read again.
#[test]
fn key_norms_are_stored_with_blocks() {
    let shape = shape(Kind::Split);
    for policy in ["knorm(budget=40)", "keydiff(budget=40)"] {
        let mut world = World::with(29, shape, "store(host=4MiB)", ["", policy], (2, 256));
        world.put(90);
        world.put(38);
        let session = world.session;
        let fork = |core: &mut StoreState| core.fork(session, &SessionOpts::default());
        let other = world.store.with(fork).expect("a session");
        let mut again = open(&world.store, other, &shape, ["", policy], (2, 256));
        again.resume(128).expect("whole blocks");
        let loaded = again.stats().loaded_blocks;
        assert_eq!(loaded, if policy.starts_with("knorm") { 0 } else { 3 * 8 });
        let context = Context { is_prefill: true, tokens: 128, ..Context::default() };
        for layer in 0..3 {
            for offload in [&mut world.offload, &mut again] {
                assert!(offload.evict(layer, &context).expect("sound"));
            }
            let (right, got) = (world.offload.retained(layer), again.retained(layer));
            let (right, got) = (right.expect("a layer"), got.expect("a layer"));
            let (right, got) = (right.expect("a list"), got.expect("a list"));
            assert_eq!((right.lists(), got.lists()), (2, 2));
            assert!((0..2).all(|at| right.positions(at).eq(got.positions(at))));
        }
    }
}
