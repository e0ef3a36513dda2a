//! The machine's instructions for attention on the processor: problems of any sizes with
//! indexes that are sound, nearly sound or nonsense. Every array is exactly as long as is said,
//! so that a sanitizer sees whoever goes further. What comes out of a problem that was taken is
//! compared with a model in binary64, of keys as the index says them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

use kvtier::ffi::attention::*;
use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::job::*;
use kvtier::ffi::kernel::*;
use kvtier::ffi::kernel_pages::*;
use kvtier::ffi::sparse_ask::*;
use kvtier::ffi::status::*;

use super::{COMPUTED, Machine, Ordering, Padded, Shelf, Tape, check, out};

/// Random numbers of a seed.
pub struct Dice(u64);

impl Dice {
    pub fn new(tape: &mut Tape) -> Dice {
        Dice::seeded((0..4).fold(0, |seed, _| seed << 8 | u64::from(tape.byte())))
    }

    pub fn seeded(seed: u64) -> Dice {
        Dice((seed ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9) | 1)
    }

    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u32) -> u32 {
        ((self.roll() >> 33) % u64::from(n.max(1))) as u32
    }

    /// Once in `n` times.
    pub fn once_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u32) as usize]
    }

    /// Any number of 32 bits, as a rule one that is not far.
    pub fn any(&mut self) -> u32 {
        match self.below(6) {
            0 => u32::MAX - self.below(3),
            1 => 1 << self.below(32),
            2 => self.roll() as u32,
            _ => self.below(70),
        }
    }
}

/// Memory of exactly so many bytes.
pub struct Bytes(*mut u8, Layout);

impl Bytes {
    pub fn new(bytes: usize) -> Bytes {
        let layout = Layout::from_size_align(bytes.max(1), 8).expect("small");
        // SAFETY: not empty.
        Bytes(unsafe { alloc_zeroed(layout) }, layout)
    }

    pub fn ptr<T>(&self) -> *mut T {
        self.0.cast()
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: it came from there.
        unsafe { dealloc(self.0, self.1) };
    }
}

/// Rows in memory of their own, and as numbers.
pub struct Plane {
    pub rows: Box<kvt_rows_t>,
    tokens: u32,
    heads: u32,
    dim: u32,
    numbers: Vec<f64>,
    _memory: [Bytes; 3],
}

impl Plane {
    /// [tokens, heads, dim] of a type: f32, f16, bf16 or int8.
    pub fn new(dice: &mut Dice, (tokens, heads, dim): (u32, u32, u32), dtype: u32) -> Plane {
        let bytes = match dtype {
            1 => 4,
            6 => 1,
            _ => 2_usize,
        };
        let (t, h, d) = (tokens as usize, heads as usize, dim as usize);
        let memory = Bytes::new(t * h * d * bytes);
        let page_tokens = if dice.once_in(3) { 1 + dice.below(9) } else { 0 };
        let pages =
            t.checked_div(page_tokens as usize).map_or(0, |_| t.div_ceil(page_tokens as usize));
        let table = Bytes::new(pages * 8);
        // Heads outside of tokens, where there are no pages.
        let is_by_head = pages == 0 && dice.once_in(3);
        let scaling = if dtype == 6 { dice.below(3) } else { 0 };
        // Large products leave little of binary32 for what comes behind them.
        let byte = if scaling == 0 { 4.0 } else { 40.0 };
        let scale_count = [0, t * h, h * d][scaling as usize];
        let scales = Bytes::new(scale_count * 4);
        // SAFETY: zero is a valid value; all that is written is there.
        let (mut rows, scale_at): (Box<kvt_rows_t>, *mut f32) =
            (Box::new(unsafe { std::mem::zeroed() }), scales.ptr());
        for i in 0..scale_count {
            // SAFETY: there are so many.
            unsafe { scale_at.add(i).write(0.01 + dice.below(8) as f32 / 256.0) };
        }
        // The last page is the last in memory: it may be shorter. The others are in disorder.
        let place =
            |page: usize| if page + 1 == pages { page } else { pages.saturating_sub(2) - page };
        let mut numbers = Vec::with_capacity(t * h * d);
        for (token, head, at) in
            (0..t).flat_map(|t| (0..h).flat_map(move |h| (0..d).map(move |d| (t, h, d))))
        {
            let row = match (is_by_head, token.checked_div(page_tokens as usize)) {
                (true, _) => head * t + token,
                (_, None) => token * h + head,
                (_, Some(page)) => {
                    (place(page) * page_tokens as usize + token % page_tokens as usize) * h + head
                }
            };
            let x = dice.below(33) as f32 / 8.0 - 2.0;
            // SAFETY: inside of the memory, which is aligned.
            let x = unsafe {
                let to = memory.ptr::<u8>().add((row * d + at) * bytes);
                match dtype {
                    1 => to.cast::<f32>().write(x),
                    3 => to.cast::<u16>().write((x.to_bits() >> 16) as u16),
                    // Of eighths below 2 all bits fit: sign, exponent, the upper mantissa.
                    2 => to.cast::<u16>().write(half(x)),
                    _ => to.cast::<i8>().write((x * byte) as i8),
                }
                match scaling {
                    _ if dtype != 6 => f64::from(x),
                    1 => f64::from((x * byte) as i8) * f64::from(*scale_at.add(token * h + head)),
                    2 => f64::from((x * byte) as i8) * f64::from(*scale_at.add(head * d + at)),
                    _ => f64::from((x * byte) as i8),
                }
            };
            numbers.push(x);
        }
        rows.struct_size = size_of::<kvt_rows_t>() as u64;
        let view = &mut rows.view;
        (view.tokens, view.heads, view.run_bytes) = (tokens, heads, (d * bytes) as u64);
        if pages > 0 {
            let shift = i64::from(dice.below(3)) * 64 - 64;
            for page in 0..pages {
                let at = memory.0.wrapping_add(place(page) * page_tokens as usize * h * d * bytes);
                // SAFETY: the table has so many.
                unsafe {
                    table.ptr::<*mut u8>().add(page).write(at.wrapping_offset(-shift as isize))
                };
            }
            (view.pages, view.page_count) = (table.ptr::<*mut c_void>(), pages as u64);
            (view.page_tokens, view.shift_bytes) = (page_tokens, shift);
        } else {
            view.address = memory.ptr();
            if is_by_head {
                view.token_stride_bytes = (d * bytes) as u64;
                view.head_stride_bytes = (t * d * bytes) as u64;
            }
        }
        (rows.dtype, rows.scaling) = (dtype, scaling);
        if scale_count > 0 {
            (rows.scales, rows.scale_count) = (scale_at, scale_count as u64);
        }
        Plane { rows, tokens, heads, dim, numbers, _memory: [memory, table, scales] }
    }

    pub fn ptr(&self) -> *const kvt_rows_t {
        &raw const *self.rows
    }

    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    fn row(&self, token: u32, head: u32) -> &[f64] {
        let at = (token as usize * self.heads as usize + head as usize) * self.dim as usize;
        &self.numbers[at..at + self.dim as usize]
    }
}

/// A binary16 that is exactly this.
fn half(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 {
        return 0;
    }
    let exponent = ((bits >> 23) & 255) as u16 + 15 - 127;
    ((bits >> 16) as u16 & 0x8000) | exponent << 10 | ((bits >> 13) & 0x3FF) as u16
}

/// An index from outside.
#[derive(Default)]
pub struct Told {
    pub heads: Vec<kvt_index_head_t>,
    pub starts: Vec<u32>,
    pub items: Vec<u32>,
}

impl Told {
    fn push(&mut self, mut list: Vec<u32>, is_sound: bool) {
        if is_sound {
            list.sort_unstable();
            list.dedup();
        }
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        self.items.extend(list);
        self.starts.push(self.items.len() as u32);
    }

    /// One for queries that begin at a position, and keys that end somewhere.
    pub fn new(dice: &mut Dice, (first, queries): (u32, u32), end: u32, heads: &[u32]) -> Told {
        let mut told = Told::default();
        for _ in 0..dice.of(heads) {
            let kind = dice.below(4);
            let query_block = dice.of(&[0, 0, 1, 3, 8, 64, 1 << 20]);
            let key_block = dice.of(&[1, 1, 2, 4, 7, 64, u32::MAX]);
            let rows = queries.div_ceil(if query_block == 0 { queries } else { query_block });
            let lists = [0, 2, rows, rows + 1][kind as usize];
            let at = told.starts.len().saturating_sub(1) as u32;
            let dense = first.saturating_add(dice.below(queries + 2));
            let dense_from = if dice.once_in(3) { dense } else { u32::MAX };
            for list in 0..lists {
                let most = if kind == 2 { end / key_block.max(1) + 2 } else { end + 4 };
                let n = dice.below(dice_len(most));
                let mut list_of: Vec<u32> = (0..n).map(|_| dice.below(most)).collect();
                list_of.sort_unstable();
                list_of.dedup();
                if kind == 3 && list > 0 && list_of.len() % 2 == 1 {
                    list_of.pop();
                }
                told.push(list_of, true);
            }
            told.heads.push(kvt_index_head_t {
                kind,
                first: at,
                lists,
                query_block,
                key_block,
                dense_from,
            });
        }
        if dice.once_in(3) {
            told.break_it(dice);
        }
        told
    }

    /// Makes it wrong, or perhaps not.
    pub fn break_it(&mut self, dice: &mut Dice) {
        for _ in 0..1 + dice.below(2) {
            let any = dice.any();
            let at = dice.roll() as usize;
            match dice.below(5) {
                0 if !self.heads.is_empty() => {
                    let n = self.heads.len();
                    let head = &mut self.heads[at % n];
                    let fields = [
                        &mut head.kind,
                        &mut head.first,
                        &mut head.lists,
                        &mut head.query_block,
                        &mut head.key_block,
                        &mut head.dense_from,
                    ];
                    *fields.into_iter().nth(dice.below(6) as usize).expect("one of six") = any;
                }
                1 if !self.starts.is_empty() => {
                    let n = self.starts.len();
                    self.starts[at % n] = any;
                }
                2 if !self.items.is_empty() => {
                    let n = self.items.len();
                    self.items[at % n] = any;
                }
                3 => {
                    self.items.pop();
                }
                _ => {
                    self.starts.pop();
                }
            }
        }
        self.starts.shrink_to_fit();
    }

    /// As C has it; borrowed.
    pub fn for_c(&mut self) -> kvt_index_t {
        self.heads.shrink_to_fit();
        self.starts.shrink_to_fit();
        self.items.shrink_to_fit();
        // SAFETY: zero is a valid value.
        let mut index: kvt_index_t = unsafe { std::mem::zeroed() };
        index.struct_size = size_of::<kvt_index_t>() as u64;
        let ptr = |is_empty: bool, at: *mut u32| if is_empty { null_mut() } else { at };
        index.heads = if self.heads.is_empty() { null_mut() } else { self.heads.as_mut_ptr() };
        index.head_count = self.heads.len() as u64;
        index.starts = ptr(self.starts.is_empty(), self.starts.as_mut_ptr());
        index.start_count = self.starts.len() as u64;
        index.items = ptr(self.items.is_empty(), self.items.as_mut_ptr());
        index.item_count = self.items.len() as u64;
        index
    }

    fn list(&self, at: u32) -> &[u32] {
        let at = at as usize;
        match (self.starts.get(at), self.starts.get(at + 1)) {
            (Some(&from), Some(&to)) => &self.items[from as usize..to as usize],
            _ => &[],
        }
    }

    /// Whether a query sees a key, by what the header says.
    fn sees(&self, at: usize, (query, position): (u32, u32), key: u32) -> bool {
        let Some(head) = self.heads.get(at) else { return true };
        if position >= head.dense_from {
            return true;
        }
        let row = query.checked_div(head.query_block).unwrap_or(0);
        let has = |list: u32, item: u32| self.list(head.first + list).contains(&item);
        match head.kind {
            KVT_INDEX_DENSE => true,
            KVT_INDEX_LINES => has(0, key) || has(1, position - key),
            KVT_INDEX_BLOCKS => has(row, key / head.key_block),
            _ => {
                let ranges = self.list(head.first + 1 + row);
                has(0, key) || ranges.chunks(2).any(|range| range[0] <= key && key < range[1])
            }
        }
    }
}

fn dice_len(most: u32) -> u32 {
    most.min(24) + 1
}

/// A problem, and all that it leads to.
struct Work {
    planes: [Plane; 3],
    told: Told,
    index: Box<kvt_index_t>,
    first_query: u32,
    first_key: u32,
    scale: f32,
}

/// What a job was opened with, kept until it is closed.
struct Lent {
    job: *mut kvt_job_t,
    _work: Work,
    _outputs: Vec<Bytes>,
}

pub struct Jobs {
    pub shelf: Shelf<kvt_job_t>,
    lent: Vec<Lent>,
}

/// Numbers in exactly as much memory.
fn floats(count: usize) -> (Bytes, *mut f32, u64) {
    let memory = Bytes::new(count * 4);
    let at = memory.ptr();
    (memory, at, count as u64)
}

/// # Safety
/// So many are there.
unsafe fn all<'a>(at: *const f32, count: u64) -> &'a [f32] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at, count as usize) }
}

impl Work {
    fn new(tape: &mut Tape, dice: &mut Dice) -> Work {
        let is_long = dice.once_in(12);
        let queries = if is_long { 1 + dice.below(3) } else { 1 + dice.below(dice_of(tape)) };
        let keys = if is_long { 1000 + dice.below(1200) } else { 1 + dice.below(90) };
        let key_heads = 1 + dice.below(3);
        let heads = key_heads * (1 + dice.below(3));
        let (dim, value_dim) = (1 + dice.below(11), 1 + dice.below(11));
        let (first_key, first_query) = match dice.below(4) {
            0 => (dice.below(40), dice.below(120)),
            _ => (0, keys.saturating_sub(queries)),
        };
        let types = [1, 1, 1, 2, 3, 6];
        let of = dice.of(&types);
        let mut planes = [
            Plane::new(dice, (queries, heads, dim), dice_type(tape)),
            Plane::new(dice, (keys, key_heads, dim), of),
            Plane::new(dice, (keys, key_heads, value_dim), of),
        ];
        if dim >= value_dim && dice.once_in(4) && planes[1].rows.scaling == 0 {
            // Values are the first numbers of keys.
            let [_, keys, values] = &mut planes;
            let run = values.rows.view.run_bytes;
            *values.rows = *keys.rows;
            let view = &mut values.rows.view;
            if view.token_stride_bytes == 0 {
                view.token_stride_bytes = view.run_bytes * u64::from(view.heads);
                view.head_stride_bytes = view.run_bytes;
            }
            view.run_bytes = run;
            values.numbers = keys
                .numbers
                .chunks(dim as usize)
                .flat_map(|row| &row[..value_dim as usize])
                .copied()
                .collect();
        }
        let end = first_key + keys;
        let counts = [1, 1, key_heads, heads, heads];
        let told = match tape.byte() {
            0..=40 => Told::default(),
            _ => Told::new(dice, (first_query, queries), end, &counts),
        };
        let scale = if dice.once_in(3) { 0.5 } else { 0.0 };
        // SAFETY: zero is a valid value.
        let index = Box::new(unsafe { std::mem::zeroed() });
        Work { planes, told, index, first_query, first_key, scale }
    }

    fn problem(&mut self, tape: &mut Tape) -> (Padded<kvt_problem_t>, bool) {
        *self.index = self.told.for_c();
        let mut is_honest = true;
        let (first_query, first_key, scale) = (self.first_query, self.first_key, self.scale);
        let problem = Padded::<kvt_problem_t>::new(tape, |p, t| {
            let [q, k, v] = &self.planes;
            (p.queries, p.keys, p.values) = (q.ptr(), k.ptr(), v.ptr());
            p.select = if self.told.heads.is_empty() { null() } else { &raw const *self.index };
            (p.first_query, p.first_key, p.scale) = (first_query, first_key, scale);
            is_honest = t.byte() < 235;
            if !is_honest {
                match t.byte() % 9 {
                    0 => p.first_query = t.number() as u32,
                    1 => p.first_key = t.number() as u32,
                    2 => p.scale = f32::NAN,
                    3 => p.scale = f32::MAX,
                    4 => p.reserved = 1,
                    5 => p.keys = q.ptr(),
                    6 => p.values = null(),
                    7 => p.queries = v.ptr(),
                    _ => p.select = null(),
                }
            }
        });
        let size = u64::from_le_bytes(problem.0[..8].try_into().expect("eight bytes"));
        (problem, is_honest && size == size_of::<kvt_problem_t>() as u64)
    }

    fn at(&self, head: u32) -> usize {
        let (n, of) = (self.told.heads.len(), self.planes[1].heads);
        match n {
            1 => 0,
            n if n == of as usize => (head / (self.planes[0].heads / of)) as usize,
            _ => head as usize,
        }
    }

    /// Whether a query sees a key, both counted from the first.
    fn sees(&self, head: u32, query: u32, key: u32) -> bool {
        let (position, key) = (self.first_query + query, self.first_key + key);
        key <= position && self.told.sees(self.at(head), (query, position), key)
    }

    /// The attention of a query and head, and its log-sum-exp.
    fn model(&self, query: u32, head: u32) -> (Vec<f64>, f64) {
        let [q, k, v] = &self.planes;
        let of = head / (q.heads / k.heads);
        let scale = if self.scale > 0.0 { 0.5 } else { 1.0 / f64::from(q.dim).sqrt() };
        let (mut sum, mut out) = (0.0, vec![0.0; v.dim as usize]);
        let seen: Vec<(u32, f64)> = (0..k.tokens)
            .filter(|&key| self.sees(head, query, key))
            .map(|key| {
                let dot: f64 =
                    q.row(query, head).iter().zip(k.row(key, of)).map(|(a, b)| a * b).sum();
                (key, dot * scale)
            })
            .collect();
        let most = seen.iter().fold(f64::NEG_INFINITY, |most, s| most.max(s.1));
        for (key, score) in seen {
            let weight = (score - most).exp();
            sum += weight;
            out.iter_mut().zip(v.row(key, of)).for_each(|(x, y)| *x += weight * y);
        }
        if sum > 0.0 {
            out.iter_mut().for_each(|x| *x /= sum);
        }
        (out, if sum > 0.0 { most + sum.ln() } else { f64::NEG_INFINITY })
    }

    /// Compares what came out with the model.
    fn compare(&self, what: &str, dice: &mut Dice, out: &[f32], lse: &[f32]) {
        let (q, dim) = (&self.planes[0], self.planes[2].dim as usize);
        for query in 0..q.tokens {
            for head in 0..q.heads {
                // Not all of them: the model is slow.
                if q.tokens > 6 && !dice.once_in(4) {
                    continue;
                }
                let row = (query * q.heads + head) as usize;
                let (right, log) = self.model(query, head);
                let is_near = |a: f32, b: f64| (f64::from(a) - b).abs() <= 2e-3 * (1.0 + b.abs());
                let log_fits = if log.is_finite() {
                    is_near(lse[row], log)
                } else {
                    f64::from(lse[row]) == log
                };
                let fits = right.iter().zip(&out[row * dim..]).all(|(&b, &a)| is_near(a, b));
                assert!(
                    fits && log_fits,
                    "{what}: query {query} head {head}: {:?} {} but {right:?} {log}; keys from {} \
                     queries from {}, {:?} {:?} {:?}",
                    &out[row * dim..][..dim],
                    lse[row],
                    self.first_key,
                    self.first_query,
                    self.told
                        .heads
                        .iter()
                        .map(|h| (
                            h.kind,
                            h.first,
                            h.lists,
                            h.query_block,
                            h.key_block,
                            h.dense_from
                        ))
                        .collect::<Vec<_>>(),
                    self.told.starts,
                    self.told.items
                );
            }
        }
    }
}

fn dice_of(tape: &mut Tape) -> u32 {
    if tape.byte() > 200 { 140 } else { 24 }
}

fn dice_type(tape: &mut Tape) -> u32 {
    match tape.byte() {
        0..=150 => 1,
        151..=190 => 3,
        191..=230 => 2,
        _ => 6,
    }
}

/// Runs all items of a step, in some order and in groups.
///
/// # Safety
/// The job is the machine's, and nobody runs it meanwhile.
unsafe fn run_step(job: *mut kvt_job_t, step: u32, items: u32, scratch: u64, dice: &mut Dice) {
    let (_memory, at, count) = floats(scratch as usize);
    let by = 1 + dice.below(items);
    let from = dice.below(items.div_ceil(by));
    let groups = items.div_ceil(by);
    for group in 0..groups {
        let first = (group + from) % groups * by;
        // SAFETY: the caller's promise.
        let status = unsafe { kvt_job_run(job, step, first, by, at, count, null_mut()) };
        assert_eq!(status, KVT_OK);
    }
}

/// # Safety
/// As of [`run_step`].
unsafe fn run_all(job: *mut kvt_job_t, dice: &mut Dice) -> kvt_job_info_t {
    let mut info = out::<kvt_job_info_t>();
    // SAFETY: valid pointers; the caller's promise.
    unsafe {
        assert_eq!(kvt_job_info(job, info.ptr()), KVT_OK);
        let info = info.ptr().read_unaligned();
        run_step(job, 0, info.items, info.scratch_count, dice);
        if info.steps > 1 {
            run_step(job, 1, info.last_items, 0, dice);
        }
        info
    }
}

impl Jobs {
    pub fn new() -> Jobs {
        Jobs { shelf: Shelf::new(), lent: Vec::new() }
    }

    pub fn take_down(&mut self) {
        for job in &mut self.shelf.live {
            // SAFETY: a handle of the machine's.
            assert_eq!(unsafe { kvt_job_close(job) }, KVT_OK);
        }
        self.lent.clear();
    }
}

impl Machine {
    pub(super) fn use_kernels(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 8 {
            0..=2 => self.compute(tape, err),
            3 | 4 => self.decode(tape, err),
            5 => self.use_pages(tape, err),
            _ => self.use_job(tape, err),
        }
    }

    fn keep_job(&mut self, job: *mut kvt_job_t, work: Work, outputs: Vec<Bytes>) {
        self.jobs.shelf.live.push(job);
        self.jobs.lent.push(Lent { job, _work: work, _outputs: outputs });
        if self.jobs.shelf.live.len() > 6 {
            let mut old = self.jobs.shelf.live[0];
            self.close_job(&mut old);
        }
    }

    fn close_job(&mut self, job: &mut *mut kvt_job_t) {
        let before = *job;
        // SAFETY: a local handle variable.
        let status = check(unsafe { kvt_job_close(job) });
        self.jobs.shelf.freed(before, *job, status);
        if status == KVT_OK {
            self.jobs.lent.retain(|lent| lent.job != before);
        }
    }

    fn compute(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let dice = &mut Dice::new(tape);
        let mut work = Work::new(tape, dice);
        let (mut problem, is_honest) = work.problem(tape);
        let rows = (work.planes[0].tokens * work.planes[0].heads) as usize;
        let short = usize::from(tape.byte() > 250);
        let (out_memory, out, out_count) = floats(rows * work.planes[2].dim as usize - short);
        let (lse_memory, lse, lse_count) = floats(rows);
        let mut job = null_mut();
        let is_summed = tape.byte() < 150;
        // SAFETY: what is led to is there until the job is closed.
        unsafe {
            let status = check(kvt_prefill_open(
                problem.ptr(),
                out,
                out_count,
                lse,
                lse_count,
                &mut job,
                err,
            ));
            assert_eq!(status == KVT_OK, !job.is_null());
            if status != KVT_OK {
                return;
            }
            run_all(job, dice);
            if is_honest {
                COMPUTED.fetch_add(1, Ordering::SeqCst);
                work.compare("prefill", dice, all(out, out_count), all(lse, lse_count));
            }
            if is_summed {
                self.sums(tape, err, dice, &work, problem.ptr(), (lse, lse_count, is_honest));
            }
        }
        self.keep_job(job, work, vec![out_memory, lse_memory]);
    }

    /// # Safety
    /// The problem and its log-sum-exps are there.
    unsafe fn sums(
        &mut self,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
        dice: &mut Dice,
        work: &Work,
        problem: *mut kvt_problem_t,
        (lse, lse_count, is_honest): (*const f32, u64, bool),
    ) {
        let (heads, keys) = (work.planes[0].heads, work.planes[1].tokens as usize);
        let by_head = tape.byte() % 2;
        let first = dice.below(work.planes[0].tokens + 1 + u32::from(tape.byte() > 250));
        let count = if by_head == 1 { keys * heads as usize } else { keys };
        let (_memory, sums, sum_count) = floats(count);
        let mut job = null_mut();
        // SAFETY: the caller's promise.
        unsafe {
            let flags = u64::from(by_head);
            let status = kvt_sums_open(
                problem, lse, lse_count, first, flags, sums, sum_count, &mut job, err,
            );
            if check(status) != KVT_OK {
                return;
            }
            run_all(job, dice);
            assert_eq!(kvt_job_close(&mut job), KVT_OK);
            if !is_honest {
                return;
            }
            let (sums, logs) = (all(sums, sum_count), all(lse, lse_count));
            assert!(sums.iter().all(|&sum| sum >= 0.0));
            let standing =
                logs[(first * heads) as usize..].iter().filter(|log| log.is_finite()).count();
            let total: f64 = sums.iter().map(|&sum| f64::from(sum)).sum();
            assert!(
                (total - standing as f64).abs() < 2e-3 * (1.0 + standing as f64),
                "{total} of {standing}"
            );
        }
    }

    fn decode(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let dice = &mut Dice::new(tape);
        let mut work = Work::new(tape, dice);
        if tape.byte() < 200 {
            // What a decode follows.
            for head in &mut work.told.heads {
                head.query_block = 0;
                head.dense_from = u32::MAX;
            }
        }
        let (mut problem, is_honest) = work.problem(tape);
        let rows = (work.planes[0].tokens * work.planes[0].heads) as usize;
        let keeps = u64::from(tape.byte() % 2) | u64::from(tape.byte() > 252) << 40;
        let mut memory_count = 0;
        let mut job = null_mut();
        // SAFETY: what is led to is there until the job is closed.
        unsafe {
            let fits = check(kvt_decode_memory(problem.ptr(), keeps, &mut memory_count, err));
            let short = u64::from(tape.byte() > 250).min(memory_count);
            let (memory, at, count) = floats((memory_count - short) as usize);
            let (out_memory, out, out_count) = floats(rows * work.planes[2].dim as usize);
            let (lse_memory, lse, lse_count) = floats(rows);
            let status = check(kvt_decode_open(
                problem.ptr(),
                keeps,
                out,
                out_count,
                lse,
                lse_count,
                at,
                count,
                &mut job,
                err,
            ));
            let is_taken = fits == KVT_OK && short == 0;
            assert!(status != KVT_OK || is_taken, "{status} {fits}");
            assert!(!is_honest || (status == KVT_OK) == is_taken, "{status} {fits}");
            if status != KVT_OK {
                return;
            }
            run_all(job, dice);
            if is_honest {
                COMPUTED.fetch_add(1, Ordering::SeqCst);
                work.compare("decode", dice, all(out, out_count), all(lse, lse_count));
            }
            let keys =
                if work.told.heads.is_empty() { work.planes[1].tokens } else { dice.below(200) };
            let by_head = tape.byte() % 2;
            let many = if by_head == 1 {
                keys as usize * work.planes[0].heads as usize
            } else {
                keys as usize
            };
            let (_memory, sums, sum_count) = floats(many);
            check(kvt_decode_sums(job, by_head.into(), sums, sum_count, err));
            self.keep_job(job, work, vec![memory, out_memory, lse_memory]);
        }
    }

    /// Anything with a job that is there, or is not.
    fn use_job(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let mut job = self.jobs.shelf.pick(tape);
        let is_live = self.jobs.shelf.is_live(job);
        if tape.byte() > 200 {
            self.close_job(&mut job);
            return;
        }
        let mut info = out::<kvt_job_info_t>();
        let [step, first] = [u32::from(tape.byte() % 3), tape.number() as u32];
        let items = if tape.byte() > 128 { u32::MAX } else { u32::from(tape.byte()) };
        // SAFETY: valid pointers; steps end in order, on this thread.
        unsafe {
            let status = check(kvt_job_info(job, info.ptr()));
            assert_eq!(status == KVT_OK, is_live);
            let scratch = info.ptr().read_unaligned().scratch_count;
            let short = u64::from(tape.byte() > 200).min(scratch);
            let (_memory, at, count) = floats((scratch - short) as usize);
            check(kvt_job_run(job, step, first, items, at, count, err));
            let mut sums = [0.0f32; 8];
            check(kvt_decode_sums(job, tape.flags(), sums.as_mut_ptr(), 8, err));
        }
    }

    fn use_pages(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let dice = &mut Dice::new(tape);
        let (heads, dim, page) = (1 + dice.below(3), 1 + dice.below(9), 1 + dice.below(9));
        let (tokens, asked) = (1 + dice.below(40), 1 + dice.below(3));
        let keys = Plane::new(dice, (tokens, heads, dim), dice_type(tape));
        let (page, first) = match tape.byte() {
            251.. => (dice.any(), dice.any()),
            _ => (page, dice.below(20)),
        };
        let pages = (u64::from(first) + u64::from(keys.tokens)).div_ceil(u64::from(page.max(1)));
        let numbers = pages.min(60) * u64::from(heads * 2 * dim);
        let (boxes, at, count) = floats(numbers as usize);
        let queries = Plane::new(dice, (asked, heads * 2, dim), 1);
        let mut of_boxes = *keys.rows;
        of_boxes.view = queries.rows.view;
        of_boxes.view.address = at.cast();
        (of_boxes.view.pages, of_boxes.view.page_count) = (null(), 0);
        (of_boxes.view.page_tokens, of_boxes.view.shift_bytes) = (0, 0);
        (of_boxes.view.tokens, of_boxes.view.heads) = (pages.min(60) as u32, heads);
        of_boxes.view.run_bytes = u64::from(dim) * 8;
        (of_boxes.view.token_stride_bytes, of_boxes.view.head_stride_bytes) = (0, 0);
        (of_boxes.dtype, of_boxes.scaling) = (1, 0);
        (of_boxes.scales, of_boxes.scale_count) = (null(), 0);
        let [from, many] = [dice.below(4), dice.below(9)];
        let rows = queries.tokens * queries.heads;
        let (_scores, score_at, score_count) = floats((rows * many) as usize);
        let enough = rows * (2 * dim + 96) + 4096 - u32::from(tape.byte() > 250) * 4000;
        let (_scratch, scratch_at, scratch_count) = floats(enough as usize);
        // SAFETY: all is there.
        unsafe {
            check(kvt_pages_extend(at, count, page, first, keys.ptr(), err));
            let status = kvt_pages_score(
                &raw const of_boxes,
                queries.ptr(),
                from,
                many,
                score_at,
                score_count,
                scratch_at,
                scratch_count,
                err,
            );
            if check(status) == KVT_OK {
                assert!(all(score_at, score_count).iter().all(|score| !score.is_nan()));
            }
            check(kvt_rows_check(keys.ptr(), err));
            let rows = if tape.byte() > 250 { tape.number() } else { 3 };
            let [mut a, b] = [[1.0f32; 12], [2.0; 12]];
            let [mut log, other] = [[0.5f32, f32::NEG_INFINITY, 3.0], [f32::NEG_INFINITY; 3]];
            if rows <= 3 {
                let (to, logs) = (a.as_mut_ptr(), log.as_mut_ptr());
                check(kvt_attention_merge(to, logs, b.as_ptr(), other.as_ptr(), rows, 4, err));
            } else {
                check(kvt_attention_merge(null_mut(), null_mut(), null(), null(), rows, 4, err));
            }
        }
        drop(boxes);
    }
}
