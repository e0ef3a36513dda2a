//! The machine's instructions for offloads: of sessions of the machine's small stores, so that
//! every view that is accepted leads into memory of the machine's.

use std::ptr::{null, null_mut};

use kvtier::ffi::attention::*;
use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::offload::*;
use kvtier::ffi::offload_device::*;
use kvtier::ffi::offload_fork::*;
use kvtier::ffi::offload_keep::*;
use kvtier::ffi::offload_move::*;
use kvtier::ffi::offload_stats::*;
use kvtier::ffi::op::kvt_submit_opts_t;
use kvtier::ffi::session::{kvt_session_close, kvt_session_fork};
use kvtier::ffi::status::*;
use kvtier::ffi::view::kvt_view_t;

use super::store::{K, LAYERS, MAX_TOKENS, V};
use super::{LOADED, Machine, Ordering, Padded, Tape, check, out};

const SPECS: [&str; 10] = [
    "quest(budget=16,page=4,dense=0)",
    "predict(of=quest(budget=16,page=4,dense=0))",
    "h2o(sink=1,recent=4,budget=2)",
    "external(topk=2)",
    "dsa(topk=4,heads=2,dim=4,load=true)",
    "knorm(budget=8)",
    "streaming(sinks=2,recent=6)",
    "minference",
    "quest(",
    "quest(budget=0)",
];
const BLOCK: u32 = 4;
const QUERY_HEADS: u32 = 2;
const DIM: u32 = 4;

/// Mostly small, so that it often fits.
fn small(tape: &mut Tape, most: u8) -> u32 {
    match tape.byte() {
        255 => tape.number() as u32,
        other => u32::from(other % most),
    }
}

fn context(tape: &mut Tape) -> Padded<kvt_sparse_context_t> {
    Padded::<kvt_sparse_context_t>::new(tape, |c, t| {
        c.is_prefill = u32::from(t.byte() % 2) + u32::from(t.byte() > 250);
        c.tokens = small(t, 64);
        c.first_query = small(t, 64).min(c.tokens.saturating_sub(1));
        c.part = u32::from(t.byte() > 250);
        c.reserved = u32::from(t.byte() > 252);
    })
}

/// Rows of the machine's numbers: as a rule one query.
fn rows(tape: &mut Tape, numbers: &mut [f32; 64]) -> Padded<kvt_rows_t> {
    numbers.fill_with(|| f32::from(tape.byte()));
    if tape.byte() > 250 {
        numbers[0] = f32::NAN;
    }
    let at = numbers.as_mut_ptr().cast();
    Padded::<kvt_rows_t>::new(tape, |r, t| {
        r.view.address = if t.byte() > 250 { null_mut() } else { at };
        r.view.tokens = u32::from(t.byte() % 4);
        r.view.heads = if t.byte() > 240 { u32::from(t.byte() % 5) } else { QUERY_HEADS };
        r.view.run_bytes = if t.byte() > 240 { u64::from(t.byte() % 17) } else { 16 };
        r.dtype = if t.byte() > 240 { u32::from(t.byte()) } else { 1 };
        r.scaling = u32::from(t.byte() > 250) * u32::from(t.byte());
    })
}

impl Machine {
    pub(super) fn open_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.offloads.live.len() >= 3 {
            return;
        }
        let session = self.kv.sessions.pick(tape);
        let mut shape = Padded::<kvt_attention_t>::new(tape, |a, t| {
            (a.layers, a.query_heads, a.key_heads) = (LAYERS as u32, QUERY_HEADS, 1);
            (a.key_dim, a.value_dim, a.block_tokens) = (DIM, (V / 4) as u32, BLOCK);
            a.max_tokens = MAX_TOKENS as u32;
            match t.byte() {
                248 => a.layers = t.number() as u32,
                249 => a.key_heads = t.number() as u32,
                250 => a.key_dim = t.number() as u32,
                251 => a.block_tokens = t.number() as u32,
                252 => a.max_tokens = t.number() as u32,
                253 => a.kind = u32::from(t.byte()),
                254 => a.scale = f32::NAN,
                255 => a.reserved = 1,
                _ => {}
            }
        });
        let attention = if tape.byte() > 250 { null_mut() } else { shape.ptr() };
        let mut spec = || match tape.byte() {
            other if other % 3 == 0 => None,
            other => Some(SPECS[usize::from(other) % SPECS.len()]),
        };
        let (prefill, decode) = (spec(), spec());
        let text = |spec: Option<&str>| {
            spec.map_or((null(), 0), |spec| (spec.as_ptr().cast(), spec.len() as u64))
        };
        let mut opts = Padded::<kvt_offload_opts_t>::new(tape, |o, t| {
            (o.session, o.attention, o.dtype) = (session, attention, 1);
            o.buffers = small(t, 3).wrapping_add(1);
            o.buffer_tokens = small(t, 80).wrapping_add(1);
            o.level = u32::from(t.byte() > 240) * u32::from(t.byte() % 4);
            (o.prefill, o.prefill_bytes) = text(prefill);
            (o.decode, o.decode_bytes) = text(decode);
            let last = t.byte();
            o.flags = u64::from(last > 200) + u64::from(last > 250);
            // Refused: nothing of the machine's is device memory of that length.
            o.memory = u64::from(last > 240) * 4096;
            o.memory_bytes = u64::from(last % 7 == 0) * u64::from(last % 2);
            o.audit_every = u32::from(last % 3);
            o.reserved = u32::from(last == 200);
        });
        let (mut handle, mut bytes) = (null_mut(), 0);
        // SAFETY: valid pointers.
        check(unsafe { kvt_offload_memory_bytes(opts.ptr(), &mut bytes, err) });
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_offload_open(opts.ptr(), &mut handle, err) });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.kv.offloads.live.extend((status == KVT_OK).then_some(handle));
    }

    /// Of a session that was forked for it, as a rule.
    fn fork_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.offloads.live.len() >= 4 {
            return;
        }
        let (offload, mut session) = (self.kv.offloads.pick(tape), self.kv.sessions.pick(tape));
        let mut own = null_mut();
        let mut at = null_mut();
        // SAFETY: valid pointers.
        unsafe {
            if tape.byte() > 40 && check(kvt_session_fork(session, null(), &mut own, err)) == KVT_OK
            {
                session = own;
            }
            let status = check(kvt_offload_fork(offload, session, &mut at, err));
            assert_eq!(status == KVT_OK, !at.is_null());
            if status == KVT_OK {
                let (mut stored, mut tail) = (0, 0);
                assert_eq!(check(kvt_offload_tokens(at, 0, &mut stored, &mut tail)), KVT_OK);
                let there = stored + tail;
                assert_eq!(check(kvt_offload_tokens(offload, 0, &mut stored, &mut tail)), KVT_OK);
                assert_eq!(there, stored + tail);
            }
            // The offload keeps it, as long as it is there.
            if !own.is_null() {
                check(kvt_session_close(&mut own));
            }
        }
        self.kv.offloads.live.extend((!at.is_null()).then_some(at));
    }

    pub(super) fn use_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 9 {
            0 => self.open_offload(tape, err),
            8 => self.fork_offload(tape, err),
            1 | 2 => self.put_offload(tape, err),
            3 | 4 => {
                self.put_offload(tape, err);
                self.load_offload(tape, err);
            }
            5 => self.pass_offload(tape, err),
            6 => self.keep_offload(tape, err),
            _ => self.end_offload(tape, err),
        }
    }

    fn put_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.tensors.len() >= 200 {
            return;
        }
        let offload = self.kv.offloads.pick(tape);
        let queue = if tape.byte() > 160 { self.queues.pick(tape) } else { null_mut() };
        let mut memory = vec![0u8; ((K + V) * 64) as usize].into_boxed_slice();
        // SAFETY: zero is a valid value.
        let mut views: [kvt_view_t; 2] = unsafe { std::mem::zeroed() };
        for (view, (at, run)) in views.iter_mut().zip([(0, K), (K * 64, V)]) {
            view.address = memory[at as usize..].as_mut_ptr().cast();
            view.run_bytes = if tape.byte() > 250 { tape.number() } else { run };
            view.tokens = if tape.byte() > 240 { u32::from(tape.byte() % 64) } else { 0 };
            view.memory = u32::from(tape.byte() > 252);
        }
        let layer = small(tape, LAYERS as u8);
        let (mut stored, mut tail) = (0, 0);
        let mut opts = Padded::<kvt_submit_opts_t>::new(tape, |o, t| {
            (o.queue, o.tag) = (queue, t.number());
            o.priority = u32::from(t.byte() % 3);
        });
        let v = if tape.byte() > 250 { null() } else { &views[1] };
        let mut op = null_mut();
        // SAFETY: what views lead to has 64 tokens, more than are put, and is kept to the end.
        unsafe {
            check(kvt_offload_tokens(offload, layer, &mut stored, &mut tail));
            let first = if tape.byte() > 240 { small(tape, 64) } else { stored + tail };
            let tokens = u32::from(tape.byte() % 20);
            let k = views.as_ptr();
            let opts = opts.ptr();
            let status = kvt_offload_put(offload, layer, first, tokens, k, v, opts, &mut op, err);
            assert!(check(status) == KVT_OK || op.is_null());
            let (mut now, mut behind) = (0, 0);
            let known = check(kvt_offload_tokens(offload, layer, &mut now, &mut behind)) == KVT_OK;
            if known && status == KVT_OK {
                assert_eq!(now + behind, stored + tail + tokens);
            }
        }
        self.ops.live.extend((!op.is_null()).then_some(op));
        self.kv.tensors.push(memory);
    }

    fn load_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let offload = self.kv.offloads.pick(tape);
        let (buffer, layer) = (small(tape, 2), small(tape, LAYERS as u8));
        let blocks = [0, u32::from(tape.byte() % 3), u32::from(tape.byte() % 8)];
        let ids = if tape.byte() > 128 { null() } else { blocks.as_ptr() };
        let ids_count = if ids.is_null() { 0 } else { u64::from(tape.byte() % 4) };
        let mut numbers = [0.0; 64];
        let mut query = rows(tape, &mut numbers);
        let query = if tape.byte() > 128 { query.ptr() } else { null_mut() };
        let (mut at, mut count) = (context(tape), 0);
        let flags = match tape.byte() {
            0..=100 => KVT_OFFLOAD_CHOSEN,
            255 => tape.number(),
            _ => 0,
        };
        let mut kv = out::<kvt_offload_kv_t>();
        let (mut found, mut many) = ([0u32; 80], 0);
        // SAFETY: pointers with their lengths.
        unsafe {
            let at = at.ptr();
            check(kvt_offload_load(
                offload, buffer, layer, ids, ids_count, flags, query, at, &mut count, err,
            ));
            if check(kvt_offload_wait(offload, buffer, kv.ptr(), err)) == KVT_OK {
                let kv = kv.ptr().read_unaligned();
                assert_eq!(kv.tokens, kv.blocks * BLOCK + kv.tail_tokens);
                assert_eq!(kv.tokens > 0, !kv.k.is_null());
                // Every row can be read.
                let k = kv.k.cast::<u8>();
                let sum = (0..kv.tokens as usize * K as usize)
                    .fold(0u8, |sum, i| sum.wrapping_add(k.add(i).read()));
                std::hint::black_box(sum);
                LOADED.fetch_add(u64::from(kv.tokens > 0), Ordering::SeqCst);
                let to = found.as_mut_ptr();
                check(kvt_offload_blocks(offload, buffer, to, 80, &mut many));
                let positions: Vec<u32> = (0..80).collect();
                let of = positions.as_ptr();
                let status = check(kvt_offload_rows(offload, buffer, of, 80, to, &mut many));
                assert!(status != KVT_OK || found[..many as usize].iter().all(|&r| r < kv.tokens));
            }
            if tape.byte() > 60 {
                check(kvt_offload_done(offload, buffer, err));
            }
        }
    }

    fn pass_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let offload = self.kv.offloads.pick(tape);
        let (mut at, mut numbers) = (context(tape), [0.0; 64]);
        let mut query = rows(tape, &mut numbers);
        let query = if tape.byte() > 128 { query.ptr() } else { null_mut() };
        let mut kv = out::<kvt_offload_kv_t>();
        // SAFETY: valid pointers.
        unsafe {
            if tape.byte() > 60 {
                check(kvt_offload_begin(offload, at.ptr(), err));
            }
            for layer in 0..=LAYERS as u32 {
                if tape.byte() > 20 {
                    check(kvt_offload_take(offload, layer, query, kv.ptr(), err));
                }
                if tape.byte() > 20 {
                    check(kvt_offload_give_back(offload, layer, err));
                }
            }
        }
    }

    fn keep_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let offload = self.kv.offloads.pick(tape);
        let layer = small(tape, LAYERS as u8);
        let (mut stored, mut tail, mut went) = (0, 0, 9);
        let (mut list, mut many, mut heads) = ([0u32; 256], 0, 0);
        let mut numbers = [0.0; 64];
        let mut keys = rows(tape, &mut numbers);
        let mut at = context(tape);
        // SAFETY: pointers with their lengths.
        unsafe {
            check(kvt_offload_tokens(offload, layer, &mut stored, &mut tail));
            let tokens = match tape.byte() {
                0..=40 => small(tape, 64),
                _ => (stored + tail).min(256),
            };
            let mut sums = vec![0.5f32; 256 * QUERY_HEADS as usize];
            sums[0] = if tape.byte() > 250 { -1.0 } else { f32::from(tape.byte()) };
            let count = (u64::from(tokens) * u64::from(1 + tape.byte() % 2)).min(512);
            let (sums, queries) = (sums.as_ptr(), 1 + u32::from(tape.byte() % 3));
            check(kvt_offload_observe(offload, layer, queries, sums, count, tokens, err));
            check(kvt_offload_tell_keys(offload, layer, stored + tail, keys.ptr(), err));
            let prefill = u32::from(tape.byte() % 3);
            check(kvt_offload_score(offload, layer, prefill, sums, count, err));
            check(kvt_offload_evict(offload, layer, at.ptr(), &mut went, err));
            let head = u32::from(tape.byte() % 3);
            let to = list.as_mut_ptr();
            let room = u64::from(tape.byte());
            let status = kvt_offload_kept(offload, layer, head, to, room, &mut many, &mut heads);
            if check(status) == KVT_OK {
                let list = &list[..many as usize];
                assert!(list.is_sorted_by(|a, b| a < b));
                assert!(list.iter().all(|&at| at < stored + tail));
            }
        }
    }

    fn end_offload(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let before = self.kv.offloads.pick(tape);
        let tokens = small(tape, 64);
        let mut stats = out::<kvt_offload_stats_t>();
        let mut offload = before;
        // SAFETY: valid pointers; a local handle variable.
        unsafe {
            check(kvt_offload_stats(before, stats.ptr()));
            // No event of anybody's, or none at all.
            let event = u64::from(tape.byte() % 2) << 60;
            check(kvt_offload_after(before, event, err));
            match tape.byte() % 4 {
                0 => {
                    check(kvt_offload_resume(before, tokens, err));
                }
                1 | 2 => {
                    check(kvt_offload_truncate(before, tokens, err));
                }
                _ => {
                    let status = check(kvt_offload_close(&mut offload));
                    self.kv.offloads.freed(before, offload, status);
                }
            }
        }
    }
}
