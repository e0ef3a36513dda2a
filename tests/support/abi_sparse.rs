//! The machine's instructions for sparse policies: by name and by callbacks that answer
//! anything. What built-in policies answer is given to the kernels, which have to take it. One
//! account pays for some of them, and has everything back in the end.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicU64;

use kvtier::ffi::account::*;
use kvtier::ffi::attention::*;
use kvtier::ffi::budget::*;
use kvtier::ffi::error::{kvt_error_free, kvt_error_t};
use kvtier::ffi::job::*;
use kvtier::ffi::kernel::*;
use kvtier::ffi::kernel_pages::*;
use kvtier::ffi::sparse::*;
use kvtier::ffi::sparse_ask::*;
use kvtier::ffi::sparse_custom::*;
use kvtier::ffi::sparse_tell::*;
use kvtier::ffi::status::*;

use super::kernel::{Dice, Plane, Told};
use super::{ANSWERED, Machine, Ordering, Padded, Shelf, Tape, USER, check, destroy, out};

const SPECS: [&str; 31] = [
    "quest(budget=16,page=4,dense=0)",
    "quest(budget=16,page=2,dense=0,share=bound)",
    "quest(budget=16,page=4,dense=1,last=always)",
    "quest(page=4,compat=fork,topk=3,threshold=1)",
    "arkvale(budget=24,page=4,dense=0,sinks=1,window=1)",
    "predict(of=quest(budget=16,page=4,dense=0))",
    "predict(of=arkvale(budget=24,page=4,dense=0,sinks=1,window=1),audit=true)",
    "external(topk=2)",
    "external(topk=2,last=1,threshold=3)",
    "dsa(topk=4,heads=2,dim=4,load=true)",
    "dsa(topk=9,heads=3,dim=8,state=f32)",
    "h2o(sink=1,recent=4,budget=2)",
    "h2o(sink=1,recent=4,budget=2,heads=all,evict_every=3)",
    "h2o(sink=1,recent=4,budget=4,form=block)",
    "tova(budget=6)",
    "tova(ratio=0.5,newest=free)",
    "snapkv(budget=9,window=4,kernel=3)",
    "snapkv(ratio=0.5,window=4,kernel=3,form=original)",
    "pyramidkv(budget=9,window=4,kernel=3)",
    "adakv(budget=9,window=4,kernel=3)",
    "keydiff(budget=8,sink=1,recent=2)",
    "knorm(ratio=0.5)",
    "streaming(sinks=2,recent=6)",
    "streaming(sinks=2,recent=6,rotate=true)",
    "duo(alpha=\"1 0 0.5 1\",sink=2,recent=4)",
    "minference(vertical=4,slash=6,sinks=1,recent=2,last_q=8)",
    "minference(type=block_sparse,blocks=2,last_q=4)",
    "xattention(block=8,stride=4)",
    "flexprefill(block=8,gamma=0.7)",
    "full",
    "quest(budget=0)",
];
const MOST: u32 = 200;

static SEED: AtomicU64 = AtomicU64::new(1);
/// Copies of user data that the machine's policies have handed out.
pub static FORKED: AtomicU64 = AtomicU64::new(0);

/// A number for a callback.
fn roll(below: u32) -> u32 {
    let seed = SEED.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::SeqCst);
    let mixed = (seed ^ seed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed >> 33) as u32 % below.max(1)
}

/// Mostly KVT_OK, now and then some status or no status at all; never the one of a defect.
fn answer() -> kvt_status_t {
    match roll(40) {
        0 => KVT_E_INVALID,
        1 => KVT_E_BUSY,
        2 => 5,
        3 => i32::MIN,
        _ => KVT_OK,
    }
}

fn is_ours(user_data: *mut c_void) {
    assert_eq!(user_data, USER);
}

/// Every number of some rows.
unsafe fn touch(rows: *const kvt_rows_t) {
    assert!(!rows.is_null());
    let mut error = null_mut();
    // SAFETY: rows that were handed over can be read.
    unsafe {
        let status = kvt_rows_check(rows, &mut error);
        assert!(status == KVT_OK || status == KVT_E_INVALID, "{status}");
        kvt_error_free(&mut error);
    }
}

unsafe extern "C" fn on_prefill_offload(
    user_data: *mut c_void,
    _: u32,
    _: u32,
    _: u32,
    keys: *const kvt_rows_t,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise.
    unsafe { touch(keys) };
    answer()
}

unsafe extern "C" fn on_decode_offload(
    user_data: *mut c_void,
    _: u32,
    _: u32,
    keys: *const kvt_rows_t,
    layers: u32,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise.
    (0..layers as usize).for_each(|layer| unsafe { touch(keys.add(layer)) });
    answer()
}

unsafe extern "C" fn select_blocks(
    user_data: *mut c_void,
    _: u32,
    query: *const kvt_rows_t,
    candidates: *const u32,
    count: u64,
    _: *const kvt_sparse_context_t,
    ids: *mut u32,
    count_out: *mut u64,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about the arrays.
    unsafe {
        if !query.is_null() {
            touch(query);
        }
        let n = u64::from(roll(count as u32 + 1));
        for i in 0..n as usize {
            let id = *candidates.add(count as usize - 1 - i);
            ids.add(i).write(if roll(30) == 0 { roll(u32::MAX) } else { id });
        }
        count_out.write(if roll(30) == 0 { u64::MAX - 3 } else { n });
    }
    answer()
}

/// What a callback's answer leads to: it stays until the next, on this thread.
struct Kept {
    told: Told,
    lists: Vec<u32>,
}

thread_local! {
    static KEPT: std::cell::RefCell<Kept> =
        std::cell::RefCell::new(Kept { told: Told::default(), lists: Vec::new() });
}

unsafe extern "C" fn index(
    user_data: *mut c_void,
    _: u32,
    queries: *const kvt_rows_t,
    keys: *const kvt_rows_t,
    context: *const kvt_sparse_context_t,
    answer_out: *mut kvt_index_t,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about what it hands over.
    unsafe {
        touch(queries);
        if !keys.is_null() {
            touch(keys);
        }
        let context = &*context;
        let dice = &mut Dice::seeded(u64::from(roll(u32::MAX)));
        let queries = (context.first_query, (*queries).view.tokens);
        KEPT.with_borrow_mut(|kept| {
            kept.told = Told::new(dice, queries, context.tokens, &[0, 1, 1, 2, 4]);
            let told = kept.told.for_c();
            let size = if roll(30) == 0 { roll(200).into() } else { told.struct_size };
            *answer_out = kvt_index_t { struct_size: size, ..told };
        });
    }
    answer()
}

unsafe extern "C" fn attend(
    user_data: *mut c_void,
    _: u32,
    queries: *const kvt_rows_t,
    keys: *const kvt_rows_t,
    values: *const kvt_rows_t,
    _: *const kvt_sparse_context_t,
    out: *mut f32,
    lse: *mut f32,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about what it hands over.
    unsafe {
        [queries, keys, values].into_iter().for_each(|rows| touch(rows));
        let rows = ((*queries).view.tokens * (*queries).view.heads) as usize;
        let bytes = [4, 2, 2, 0, 0, 1][(*values).dtype as usize - 1];
        let dim = (*values).view.run_bytes as usize / bytes;
        (0..rows * dim).for_each(|i| out.add(i).write(1.0));
        if !lse.is_null() {
            (0..rows).for_each(|i| lse.add(i).write(2.0));
        }
    }
    answer()
}

unsafe extern "C" fn observe(
    user_data: *mut c_void,
    _: u32,
    _: u32,
    sums: *const f32,
    count: u64,
    _: u32,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about the sums.
    std::hint::black_box((0..count as usize).map(|i| unsafe { *sums.add(i) }).sum::<f32>());
    answer()
}

unsafe extern "C" fn evict(
    user_data: *mut c_void,
    _: u32,
    context: *const kvt_sparse_context_t,
    keep: *mut kvt_keep_t,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about what it hands over.
    let tokens = unsafe { (*context).tokens };
    KEPT.with_borrow_mut(|kept| {
        let n = roll(tokens.min(20) + 1);
        kept.lists = [0, n].into_iter().chain((0..n).map(|i| i * (tokens / n))).collect();
        if roll(8) == 0 {
            let at = roll(n + 2) as usize;
            kept.lists[at] = roll(u32::MAX);
        }
        let at = kept.lists.as_mut_ptr();
        // SAFETY: as above.
        unsafe {
            (*keep).starts = at;
            (*keep).start_count = if roll(8) == 0 { u64::from(roll(3)) } else { 2 };
            (*keep).items = at.add(2);
            (*keep).item_count = n.into();
        }
    });
    answer()
}

unsafe extern "C" fn evicted(
    user_data: *mut c_void,
    _: u32,
    kept: *const kvt_keep_t,
) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about the lists.
    unsafe {
        let kept = &*kept;
        let sum =
            (0..kept.item_count as usize).fold(0u64, |sum, i| sum + u64::from(*kept.items.add(i)));
        std::hint::black_box(sum);
    }
    answer()
}

unsafe extern "C" fn truncate(user_data: *mut c_void, _: u32) -> kvt_status_t {
    is_ours(user_data);
    answer()
}

unsafe extern "C" fn fork(user_data: *mut c_void, copy: *mut *mut c_void) -> kvt_status_t {
    is_ours(user_data);
    // SAFETY: the library's promise about the output.
    unsafe { copy.write(USER) };
    let status = answer();
    FORKED.fetch_add(u64::from(status == KVT_OK), Ordering::SeqCst);
    status
}

#[derive(Clone, Copy)]
struct Model {
    layers: u32,
    heads: u32,
    key_heads: u32,
    dim: u32,
    value_dim: u32,
    block: u32,
}

const MODEL: Model = Model { layers: 2, heads: 4, key_heads: 2, dim: 8, value_dim: 8, block: 4 };

/// A policy of the machine's, and about what it was told.
#[derive(Clone, Copy)]
struct Known {
    handle: *mut kvt_sparse_t,
    model: Model,
    tokens: [u32; 2],
    is_ours: bool,
}

/// Who pays.
struct Money {
    budget: *mut kvt_budget_t,
    account: *mut kvt_account_t,
}

pub struct Sparses {
    pub shelf: Shelf<kvt_sparse_t>,
    known: Vec<Known>,
    money: Option<Money>,
}

impl Sparses {
    pub fn new() -> Sparses {
        Sparses { shelf: Shelf::new(), known: Vec::new(), money: None }
    }

    pub fn take_down(&mut self) {
        // SAFETY: handles of the machine's.
        unsafe {
            for policy in &mut self.shelf.live {
                assert_eq!(kvt_sparse_close(policy), KVT_OK);
            }
            let Some(mut money) = self.money.take() else { return };
            let (mut reserved, mut used) = (7, 7);
            assert_eq!(
                kvt_account_held(money.account, KVT_TIER_HOST, &mut reserved, &mut used),
                KVT_OK
            );
            assert_eq!((reserved, used), (0, 0), "policies have left something unpaid back");
            assert_eq!(kvt_account_close(&mut money.account, null_mut()), KVT_OK);
            assert_eq!(kvt_budget_close(&mut money.budget, null_mut()), KVT_OK);
        }
    }

    fn of(&self, handle: *mut kvt_sparse_t) -> Known {
        let one = self.known.iter().find(|one| one.handle == handle);
        one.copied().unwrap_or(Known { handle, model: MODEL, tokens: [9; 2], is_ours: true })
    }

    fn tokens(&mut self, handle: *mut kvt_sparse_t, tokens: impl Fn(u32) -> u32, layer: u32) {
        let one = self.known.iter_mut().find(|one| one.handle == handle);
        if let Some(told) = one.and_then(|one| one.tokens.get_mut(layer as usize)) {
            *told = tokens(*told);
        }
    }
}

fn context(
    tape: &mut Tape,
    is_prefill: u32,
    first: u32,
    tokens: u32,
) -> Padded<kvt_sparse_context_t> {
    Padded::<kvt_sparse_context_t>::new(tape, |c, t| {
        (c.is_prefill, c.first_query, c.tokens) = (is_prefill, first, tokens);
        match t.byte() {
            250 => c.is_prefill = u32::from(t.byte()),
            251 => c.part = 1,
            252 => c.tokens = t.number() as u32,
            253 => c.first_query = t.number() as u32,
            254 => c.reserved = 1,
            255 => (c.part, c.parts) = (1, 3),
            _ => {}
        }
    })
}

/// Mostly the right one.
fn or_other(tape: &mut Tape, right: u32) -> u32 {
    if tape.byte() > 248 { tape.number() as u32 } else { right }
}

fn dtype(dice: &mut Dice) -> u32 {
    dice.of(&[1, 1, 1, 2, 3, 6])
}

/// Keys or queries of a model, now and then of another.
fn plane(tape: &mut Tape, dice: &mut Dice, (tokens, heads, dim): (u32, u32, u32)) -> Plane {
    let size = match tape.byte() {
        250 => (tokens, heads + 1, dim),
        251 => (tokens, 1, dim),
        252 => (tokens, heads, dim + 1),
        253 => (1, heads, dim),
        254 => (tokens + 300, heads, dim),
        _ => (tokens, heads, dim),
    };
    let dtype = dtype(dice);
    Plane::new(dice, size, dtype)
}

impl Machine {
    pub(super) fn use_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 16 {
            0 => self.open_sparse(tape, err),
            1..=3 => self.append_sparse(tape, err),
            4 => self.seal_sparse(tape, err),
            5 => self.observe_sparse(tape, err),
            6 | 7 => self.select_sparse(tape, err),
            8..=10 => self.index_sparse(tape, err),
            11 | 12 => self.evict_sparse(tape, err),
            13 => self.save_sparse(tape, err),
            14 => self.attend_sparse(tape, err),
            _ => self.end_sparse(tape, err),
        }
    }

    fn open_money(&mut self) -> *mut kvt_account_t {
        if let Some(money) = &self.sparse.money {
            return money.account;
        }
        let Some(&runtime) = self.runtimes.live.first() else { return null_mut() };
        let mut opts = out::<kvt_budget_opts_t>();
        // SAFETY: valid pointers.
        unsafe {
            let opts = opts.ptr();
            let mut value = opts.read_unaligned();
            (value.host_bytes, value.reserve_bytes) = (1 << 15, 1);
            opts.write_unaligned(value);
            let (mut budget, mut account) = (null_mut(), null_mut());
            if kvt_budget_open(runtime, opts, &mut budget, null_mut()) != KVT_OK {
                return null_mut();
            }
            assert_eq!(kvt_account_open(budget, null(), &mut account, null_mut()), KVT_OK);
            self.sparse.money = Some(Money { budget, account });
            account
        }
    }

    pub(super) fn open_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.sparse.shelf.live.len() >= 6 {
            return;
        }
        let dice = &mut Dice::new(tape);
        let is_latent = tape.byte() > 200;
        let model = if is_latent { Model { key_heads: 1, value_dim: 4, ..MODEL } } else { MODEL };
        let mut shape = Padded::<kvt_attention_t>::new(tape, |a, t| {
            (a.layers, a.query_heads, a.key_heads) = (model.layers, model.heads, model.key_heads);
            (a.key_dim, a.value_dim, a.block_tokens) = (model.dim, model.value_dim, model.block);
            (a.max_tokens, a.kind) = (MOST, u32::from(is_latent));
            match t.byte() {
                249 => a.layers = t.number() as u32,
                250 => a.key_heads = t.number() as u32,
                251 => a.block_tokens = t.number() as u32,
                252 => a.max_tokens = t.number() as u32,
                253 => a.kind = u32::from(t.byte()),
                254 => a.scale = f32::INFINITY,
                255 => a.reserved = 1,
                _ => {}
            }
        });
        let mut traits = Padded::<kvt_sparse_traits_t>::new(tape, |o, t| {
            (o.caps, o.needs) = (u32::from(t.byte() % 64), u32::from(t.byte()));
            (o.scope, o.granularity) = (dice.below(3), dice.below(2));
            o.flags = u64::from(t.byte() % 8);
            if t.byte() > 245 {
                (o.own_query_heads, o.own_key_heads, o.own_dim) = (t.number() as u32, 1, 4);
                o.dense_layers = t.number() as u32;
            }
        });
        let is_custom = tape.byte() > 170;
        let spec = dice.of(&SPECS);
        let attention = if tape.byte() > 252 { null_mut() } else { shape.ptr() };
        let mut custom = Padded::<kvt_sparse_custom_t>::new(tape, |c, t| {
            c.traits = traits.ptr();
            c.on_prefill_offload = Some(on_prefill_offload);
            c.on_decode_offload = if t.byte() % 2 == 0 { Some(on_decode_offload) } else { None };
            c.select_blocks = Some(select_blocks);
            c.index = if t.byte() < 240 { Some(index) } else { None };
            c.sparse_prefill_attention = if t.byte() % 2 == 0 { Some(attend) } else { None };
            c.observe = Some(observe);
            c.evict = Some(evict);
            c.evicted = Some(evicted);
            c.truncate = Some(truncate);
            c.fork = if t.byte() < 200 { Some(fork) } else { None };
            c.user_data = USER;
            c.destroy = Some(destroy);
        });
        // A shorter struct ends before the user data.
        custom.0[..8].copy_from_slice(&(size_of::<kvt_sparse_custom_t>() as u64).to_le_bytes());
        let account = if tape.byte() > 128 { self.open_money() } else { null_mut() };
        let account = if tape.byte() > 250 { self.accounts.pick(tape) } else { account };
        let mut opts = Padded::<kvt_sparse_opts_t>::new(tape, |o, t| {
            (o.attention, o.account) = (attention, account);
            if is_custom {
                o.custom = custom.ptr();
            }
            if !is_custom || t.byte() > 250 {
                (o.spec, o.spec_bytes) = (spec.as_ptr().cast(), spec.len() as u64);
            }
        });
        let mut handle = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_sparse_open(opts.ptr(), &mut handle, err) });
        assert_eq!(status == KVT_OK, !handle.is_null());
        if status == KVT_OK {
            self.taken += u64::from(is_custom);
            self.sparse.shelf.live.push(handle);
            self.sparse.known.push(Known { handle, model, tokens: [0; 2], is_ours: !is_custom });
        }
    }

    /// What a policy's own rows are.
    fn own(&self, policy: *mut kvt_sparse_t) -> (Known, kvt_sparse_traits_t) {
        let known = self.sparse.of(policy);
        let mut traits = out::<kvt_sparse_traits_t>();
        // SAFETY: a valid output.
        let traits = unsafe {
            check(kvt_sparse_traits(policy, traits.ptr()));
            traits.ptr().read_unaligned()
        };
        (known, traits)
    }

    fn append_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let (known, traits) = self.own(policy);
        let tokens = 1 + u32::from(tape.byte() % 30);
        let size = match traits.own_key_heads.min(9) {
            0 => (tokens, known.model.key_heads, known.model.dim),
            heads => (tokens, heads, traits.own_dim.min(99)),
        };
        let keys = plane(tape, dice, size);
        // Some are given to each layer, as a model does.
        let only = or_other(tape, 2);
        for layer in 0..2 {
            let told = known.tokens[layer as usize];
            if only < 2 && only != layer {
                continue;
            }
            let (layer, first) = (or_other(tape, layer), or_other(tape, told));
            // SAFETY: valid pointers.
            let status = unsafe { kvt_sparse_append(policy, layer, first, keys.ptr(), err) };
            if check(status) == KVT_OK {
                self.sparse.tokens(policy, |told| told.max(first + keys.tokens()), layer);
            }
        }
    }

    fn seal_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let known = self.sparse.of(policy);
        let id = u32::from(tape.byte() % 20);
        let id = or_other(tape, id);
        let first = or_other(tape, id.wrapping_mul(known.model.block));
        let size = (4 - u32::from(tape.byte() > 230), known.model.key_heads, known.model.dim);
        let [a, b] = [plane(tape, dice, size), plane(tape, dice, size)];
        let rows = [*a.rows, *b.rows];
        let count = if tape.byte() > 250 { 1 } else { 2 };
        let stride =
            if tape.byte() > 250 { tape.number() % 4096 } else { size_of::<kvt_rows_t>() as u64 };
        let layer = or_other(tape, dice.below(2));
        // SAFETY: valid pointers; a stride is of two entries at most, or refused.
        unsafe {
            if tape.byte() % 2 == 0 {
                check(kvt_sparse_seal(policy, layer, id, first, a.ptr(), err));
            } else if stride as usize <= size_of::<kvt_rows_t>() {
                check(kvt_sparse_seal_all(policy, id, first, rows.as_ptr(), count, stride, err));
            }
        }
    }

    fn observe_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let known = self.sparse.of(policy);
        let layer = or_other(tape, dice.below(2));
        let told = known.tokens[layer as usize % 2].max(1);
        let tokens = or_other(tape, told);
        let rows = if tape.byte() % 3 == 0 { 1 } else { known.model.heads };
        let mut sums: Vec<f32> = (0..told * rows).map(|_| dice.below(9) as f32 / 4.0).collect();
        if tape.byte() > 245 {
            sums[0] = dice.of(&[f32::NAN, -1.0, f32::INFINITY, f32::MAX]);
        }
        let queries = or_other(tape, 1 + dice.below(told));
        let (at, count) = (sums.as_ptr(), sums.len() as u64);
        // SAFETY: so many numbers.
        unsafe {
            check(kvt_sparse_observe(policy, layer, queries, at, count, tokens, err));
            check(kvt_sparse_score(
                policy,
                layer,
                at,
                u64::from(dice.below(count as u32 + 1)),
                err,
            ));
        }
    }

    fn select_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let (known, traits) = self.own(policy);
        let layer = or_other(tape, dice.below(2));
        let told = known.tokens[layer as usize % 2].max(1);
        let size = match traits.own_query_heads.min(9) {
            0 => (1, known.model.heads, known.model.dim),
            heads => (1, heads, traits.own_dim.min(99)),
        };
        let query = plane(tape, dice, size);
        let blocks = told.div_ceil(known.model.block);
        let mut candidates: Vec<u32> = (0..blocks).filter(|_| !dice.once_in(4)).collect();
        if dice.once_in(3) {
            candidates.reverse();
        }
        if dice.once_in(9) {
            candidates.push(dice.any());
        }
        let is_prefill = u32::from(tape.byte() % 4 == 0);
        let mut at = context(tape, is_prefill, told - 1, told);
        let weights = vec![0.5f32; candidates.len().max(traits.own_query_heads.min(9) as usize)];
        let mut count = 77;
        let room = candidates.len() as u64 - u64::from(tape.byte() > 245 && !candidates.is_empty());
        let mut ids = vec![9u32; room as usize];
        let asked = if tape.byte() > 230 { null() } else { query.ptr() };
        // SAFETY: pointers with their lengths.
        unsafe {
            let scores = if traits.needs & KVT_NEEDS_WEIGHTS != 0 {
                u64::from(traits.own_query_heads.min(9))
            } else {
                candidates.len() as u64
            };
            if traits.needs & (KVT_NEEDS_SCORES | KVT_NEEDS_WEIGHTS) != 0 && tape.byte() < 240 {
                check(kvt_sparse_score(policy, layer, weights.as_ptr(), scores, err));
            }
            let (from, many) = (candidates.as_ptr(), candidates.len() as u64);
            let status = kvt_sparse_select(
                policy,
                layer,
                asked,
                from,
                many,
                at.ptr(),
                ids.as_mut_ptr(),
                room,
                &mut count,
                err,
            );
            match check(status) {
                KVT_OK => {
                    ANSWERED.fetch_add(1, Ordering::SeqCst);
                    let (chosen, rest) = ids.split_at(count as usize);
                    assert!(chosen.is_sorted_by(|a, b| a < b));
                    assert!(chosen.iter().all(|id| candidates.contains(id)));
                    assert!(rest.iter().all(|&id| id == KVT_SPARSE_NO_ID));
                }
                KVT_E_TOO_SMALL => assert!(count == many && ids.iter().all(|&id| id == 9)),
                _ => assert!(count == 77 && ids.iter().all(|&id| id == 9)),
            }
        }
    }

    fn index_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let (known, traits) = self.own(policy);
        let layer = or_other(tape, dice.below(2));
        let told = known.tokens[layer as usize % 2].max(1);
        let is_prefill = tape.byte() % 2;
        let count = if is_prefill == 1 { 1 + dice.below(told) } else { 1 };
        let size = match traits.own_query_heads.min(9) {
            0 => (count, known.model.heads, known.model.dim),
            heads => (count, heads, traits.own_dim.min(99)),
        };
        let own = plane(tape, dice, size);
        let keys = plane(tape, dice, (told, known.model.key_heads, known.model.dim));
        let all = if traits.needs & KVT_NEEDS_ALL_KEYS != 0 || dice.once_in(9) {
            keys.ptr()
        } else {
            null()
        };
        let mut at = context(tape, is_prefill.into(), told - count, told);
        let mut told_out = Told::default();
        let mut answer = told_out.for_c();
        let weights = vec![0.5f32; (size.0 * size.1) as usize];
        // SAFETY: pointers with their lengths.
        unsafe {
            if traits.needs & KVT_NEEDS_WEIGHTS != 0 && tape.byte() < 240 {
                check(kvt_sparse_score(policy, layer, weights.as_ptr(), weights.len() as u64, err));
            }
            let answer = &raw mut answer;
            let mut status =
                check(kvt_sparse_index(policy, layer, own.ptr(), all, at.ptr(), answer, err));
            if status == KVT_E_TOO_SMALL {
                status = fetch(policy, tape, &mut told_out, answer, err);
            }
            if status != KVT_OK || !known.is_ours {
                return;
            }
            ANSWERED.fetch_add(1, Ordering::SeqCst);
            // The kernels take what our own policies say.
            let context = at.ptr().read_unaligned();
            if context.tokens != told || context.first_query != told - count {
                return;
            }
            let queries = Plane::new(dice, (count, known.model.heads, known.model.dim), 1);
            let values = Plane::new(dice, (told, known.model.key_heads, known.model.value_dim), 1);
            let keys = Plane::new(dice, (told, known.model.key_heads, known.model.dim), 1);
            let mut problem = out::<kvt_problem_t>();
            let mut value = problem.ptr().read_unaligned();
            (value.queries, value.keys, value.values) = (queries.ptr(), keys.ptr(), values.ptr());
            (value.select, value.first_query) = (answer, told - count);
            problem.ptr().write_unaligned(value);
            let numbers = count * known.model.heads * known.model.value_dim;
            let (mut to, mut job) = (vec![f32::NAN; numbers as usize], null_mut());
            let to_at = to.as_mut_ptr();
            let status = kvt_prefill_open(
                problem.ptr(),
                to_at,
                numbers.into(),
                null_mut(),
                0,
                &mut job,
                err,
            );
            assert_eq!(status, KVT_OK, "a policy's index was refused: {:?}", told_out.starts);
            let mut info = out::<kvt_job_info_t>();
            assert_eq!(kvt_job_info(job, info.ptr()), KVT_OK);
            let info = info.ptr().read_unaligned();
            let mut scratch = vec![0f32; info.scratch_count as usize];
            let status =
                kvt_job_run(job, 0, 0, info.items, scratch.as_mut_ptr(), info.scratch_count, err);
            assert_eq!((status, kvt_job_close(&mut job)), (KVT_OK, KVT_OK));
            assert!(to.iter().all(|x| x.is_finite()));
        }
    }

    fn evict_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let known = self.sparse.of(policy);
        let layer = or_other(tape, dice.below(2));
        let told = known.tokens[layer as usize % 2].max(1);
        let rows = if tape.byte() % 4 == 0 { 1 } else { known.model.heads };
        let sums = vec![0.25f32; (told * rows) as usize];
        let is_prefill = u32::from(tape.byte() % 2);
        let mut at = context(tape, is_prefill, told - 1, told);
        let (mut starts, mut items) = ([8u32; 6], [8u32; 4 * MOST as usize]);
        let mut keep = kvt_keep_t {
            struct_size: size_of::<kvt_keep_t>() as u64,
            starts: starts.as_mut_ptr(),
            start_room: u64::from(tape.byte() % 8).min(6),
            start_count: 0,
            items: items.as_mut_ptr(),
            item_room: if tape.byte() > 200 { 3 } else { items.len() as u64 },
            item_count: 0,
        };
        let mut went = 7;
        // SAFETY: pointers with their lengths.
        unsafe {
            check(kvt_sparse_observe(
                policy,
                layer,
                1,
                sums.as_ptr(),
                sums.len() as u64,
                told,
                err,
            ));
            let status =
                check(kvt_sparse_evict(policy, layer, at.ptr(), &raw mut keep, &mut went, err));
            if status != KVT_OK {
                assert!(went == 7 && starts == [8; 6] && items.iter().all(|&item| item == 8));
                return;
            }
            ANSWERED.fetch_add(1, Ordering::SeqCst);
            assert!(went < 2 && (went == 0) == (keep.start_count == 0));
            let (starts, items) =
                (&starts[..keep.start_count as usize], &mut items[..keep.item_count as usize]);
            for list in starts.windows(2) {
                let list = &items[list[0] as usize..list[1] as usize];
                assert!(list.is_sorted_by(|a, b| a < b), "{list:?}");
            }
            if tape.byte() > 245 && !items.is_empty() {
                let at = dice.below(items.len() as u32) as usize;
                items[at] = dice.any();
            }
            check(kvt_sparse_evicted(policy, layer, &raw const keep, err));
        }
    }

    fn save_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let (policy, other) = (self.sparse.shelf.pick(tape), self.sparse.shelf.pick(tape));
        let dice = &mut Dice::new(tape);
        let layer = or_other(tape, dice.below(2));
        let id = or_other(tape, dice.below(12));
        let mut data = [0u8; 4096];
        let room = if tape.byte() > 245 { 5 } else { 4096 };
        let mut count = 0;
        // SAFETY: pointers with their lengths.
        unsafe {
            let status =
                check(kvt_sparse_save(policy, layer, id, data.as_mut_ptr(), room, &mut count, err));
            if status != KVT_OK || count > 4096 {
                return;
            }
            if tape.byte() > 150 && count > 0 {
                data[dice.below(count as u32) as usize] ^= 1 << dice.below(8);
            }
            let count = if tape.byte() > 245 { count / 2 } else { count };
            let (id, first) = (or_other(tape, id), or_other(tape, id.wrapping_mul(4)));
            check(kvt_sparse_load(other, layer, id, first, data.as_ptr(), count, err));
        }
    }

    fn attend_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.sparse.shelf.pick(tape);
        let dice = &mut Dice::new(tape);
        let known = self.sparse.of(policy);
        let Model { heads, key_heads, dim, value_dim, .. } = known.model;
        let told = 1 + dice.below(40);
        let count = 1 + dice.below(told);
        let [q, k] =
            [plane(tape, dice, (count, heads, dim)), plane(tape, dice, (told, key_heads, dim))];
        let v = plane(tape, dice, (told, key_heads, value_dim));
        let mut at = context(tape, 1, told - count, told);
        let numbers = (count * heads * value_dim) as usize;
        let mut to = vec![f32::NAN; numbers];
        let mut lse = vec![f32::NAN; (count * heads) as usize];
        let logs = if tape.byte() % 2 == 0 { null_mut() } else { lse.as_mut_ptr() };
        let log_count = if logs.is_null() { 0 } else { lse.len() as u64 };
        let layer = or_other(tape, dice.below(2));
        // SAFETY: pointers with their lengths.
        let status = unsafe {
            kvt_sparse_prefill_attention(
                policy,
                layer,
                q.ptr(),
                k.ptr(),
                v.ptr(),
                at.ptr(),
                to.as_mut_ptr(),
                numbers as u64,
                logs,
                log_count,
                err,
            )
        };
        if check(status) == KVT_OK {
            ANSWERED.fetch_add(1, Ordering::SeqCst);
            assert!(to.iter().all(|x| x.is_finite()));
            assert!(logs.is_null() || lse.iter().all(|x| !x.is_nan()));
        } else if known.is_ours {
            assert!(to.iter().chain(&lse).all(|x| x.is_nan()), "written on failure");
        }
    }

    fn end_sparse(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let before = self.sparse.shelf.pick(tape);
        let is_live = self.sparse.shelf.is_live(before);
        let mut stats = out::<kvt_sparse_stats_t>();
        let tokens = u32::from(tape.byte() % 60);
        SEED.fetch_xor(tape.number(), Ordering::SeqCst);
        // SAFETY: valid pointers; local handle variables.
        unsafe {
            assert_eq!(check(kvt_sparse_stats(before, stats.ptr())) == KVT_OK, is_live);
            let mut index = Told::default().for_c();
            check(kvt_sparse_last_index(before, &raw mut index, err));
            match tape.byte() % 6 {
                0 | 1 => {
                    if check(kvt_sparse_truncate(before, tokens, err)) == KVT_OK {
                        (0..2).for_each(|layer| {
                            self.sparse.tokens(before, |told| told.min(tokens), layer)
                        });
                    }
                }
                2 => {
                    if check(kvt_sparse_reset(before)) == KVT_OK {
                        (0..2).for_each(|layer| self.sparse.tokens(before, |_| 0, layer));
                    }
                }
                3 | 4 if self.sparse.shelf.live.len() < 6 => {
                    let mut copy = null_mut();
                    let status = check(kvt_sparse_fork(before, &mut copy, err));
                    assert_eq!(status == KVT_OK, !copy.is_null());
                    if status == KVT_OK {
                        let known = self.sparse.of(before);
                        self.sparse.shelf.live.push(copy);
                        self.sparse.known.push(Known { handle: copy, ..known });
                    }
                }
                _ => {
                    let mut policy = before;
                    let status = check(kvt_sparse_close(&mut policy));
                    self.sparse.shelf.freed(before, policy, status);
                    if status == KVT_OK {
                        self.sparse.known.retain(|one| one.handle != before);
                    }
                }
            }
        }
    }
}

/// The answer that was kept, with enough room.
///
/// # Safety
/// `answer` is an index with the counts that are needed.
unsafe fn fetch(
    policy: *mut kvt_sparse_t,
    tape: &mut Tape,
    told: &mut Told,
    answer: *mut kvt_index_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    // SAFETY: the caller's promise; arrays are as long as is said.
    unsafe {
        let counts = ((*answer).head_count, (*answer).start_count, (*answer).item_count);
        told.heads = vec![std::mem::zeroed(); counts.0 as usize];
        told.starts = vec![8; counts.1 as usize];
        told.items = vec![8; counts.2 as usize];
        let mut with_room = told.for_c();
        let is_short = tape.byte() > 200 && counts.2 > 0;
        (with_room.head_room, with_room.start_room) = (counts.0, counts.1);
        with_room.item_room = counts.2 - u64::from(is_short);
        *answer = with_room;
        let status = check(kvt_sparse_last_index(policy, answer, err));
        if is_short && status == KVT_E_TOO_SMALL {
            assert!(told.starts.iter().chain(&told.items).all(|&n| n == 8), "written on failure");
        }
        assert_eq!(counts, ((*answer).head_count, (*answer).start_count, (*answer).item_count));
        status
    }
}
