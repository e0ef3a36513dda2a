//! The machine's instructions for stores: small ones in memory, all of one layout, so
//! that every view that is accepted leads into memory of the machine's.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use kvtier::ffi::blocks::*;
use kvtier::ffi::blocks_hold::*;
use kvtier::ffi::clear::*;
use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::event::*;
use kvtier::ffi::media::*;
use kvtier::ffi::namespace::*;
use kvtier::ffi::namespace_look::*;
use kvtier::ffi::offload::{kvt_offload_close, kvt_offload_t};
use kvtier::ffi::op::kvt_submit_opts_t;
use kvtier::ffi::policy_stats::kvt_policy_log_entry_t;
use kvtier::ffi::policy_use::kvt_policy_hint_t;
use kvtier::ffi::prefill::*;
use kvtier::ffi::session::*;
use kvtier::ffi::session_move::*;
use kvtier::ffi::session_plan::*;
use kvtier::ffi::status::*;
use kvtier::ffi::store::*;
use kvtier::ffi::store_change::*;
use kvtier::ffi::store_events::*;
use kvtier::ffi::store_rows::*;
use kvtier::ffi::store_stats::*;
use kvtier::ffi::view::*;

use super::{MOVED, Machine, Ordering, Padded, Shelf, Tape, check, out, size_field};

const SPECS: [&str; 9] = [
    "store(host=1MiB, chunks=64, sessions=6, moves=8, cells=64, events=16, copiers=1)",
    "store(host=128KiB, chunks=64, sessions=6, moves=8, cells=8, events=0, copiers=1)",
    "store(host=1MiB, chunks=8, sessions=2, moves=1, cells=1, events=1, copiers=1)",
    "store(host=1MiB, policy=lru, chunks=64, sessions=6, copiers=1)",
    // Nobody is there.
    "store(host=1MiB, chunks=64, sessions=6, copiers=1, remote=redis(url=\"redis://127.0.0.1:1\", \
     timeout=5, connect=5, ask=fetch, known=8, events=\"a\"))",
    "store(hots=1MiB)",
    "store(",
    "shop",
    "store(host=1MiB, copiers=65537)",
];
pub(super) const LAYERS: usize = 2;
pub(super) const K: u64 = 16;
pub(super) const V: u64 = 8;
/// Sessions stay below this.
pub(super) const MAX_TOKENS: u64 = 256;
const PLANE: usize = (MAX_TOKENS * K) as usize;

/// What the machine has of stores.
pub(super) struct Stores {
    pub(super) stores: Shelf<kvt_store_t>,
    pub(super) spaces: Shelf<kvt_namespace_t>,
    pub(super) sessions: Shelf<kvt_session_t>,
    pub(super) events: Shelf<kvt_event_t>,
    pub(super) offloads: Shelf<kvt_offload_t>,
    /// Tensors of moves, kept until the end.
    pub(super) tensors: Vec<Box<[u8]>>,
}

impl Stores {
    pub(super) fn new() -> Stores {
        Stores {
            stores: Shelf::new(),
            spaces: Shelf::new(),
            sessions: Shelf::new(),
            events: Shelf::new(),
            offloads: Shelf::new(),
            tensors: Vec::new(),
        }
    }

    /// Nothing may resist.
    pub(super) fn take_down(&mut self) {
        // SAFETY: handles this machine made, each in a variable of its own.
        unsafe {
            for event in &mut self.events.live {
                assert_eq!(kvt_event_close(event), KVT_OK);
            }
            for store in &mut self.stores.live {
                assert_eq!(kvt_store_close(store, 0, null_mut()), KVT_OK);
            }
            for offload in &mut self.offloads.live {
                assert_eq!(kvt_offload_close(offload), KVT_OK);
            }
            for session in &mut self.sessions.live {
                assert_eq!(kvt_session_close(session), KVT_OK);
            }
            for space in &mut self.spaces.live {
                assert_eq!(kvt_namespace_close(space), KVT_OK);
            }
        }
        self.tensors.clear();
    }
}

/// Images in tokens, in order or not.
pub(super) fn media(tape: &mut Tape) -> Vec<kvt_media_t> {
    let one = |tape: &mut Tape| kvt_media_t {
        token: u64::from(tape.byte() % 40),
        digest: [tape.byte() % 2; 32],
    };
    (0..tape.byte() % 3).map(|_| one(tape)).collect()
}

/// Tokens with images for a call.
pub(super) fn sequence(
    tape: &mut Tape,
    tokens: &[u32],
    media: &[kvt_media_t],
) -> Padded<kvt_sequence_t> {
    Padded::<kvt_sequence_t>::new(tape, |s, t| {
        (s.tokens, s.token_count) = (tokens.as_ptr(), tokens.len() as u64);
        (s.media, s.media_count) = (media.as_ptr(), media.len() as u64);
        s.media_stride_bytes = if t.byte() > 250 { 12 } else { size_of::<kvt_media_t>() as u64 };
    })
}

/// # Safety
/// `session` and `err` are good for calls.
unsafe fn append_media(
    session: *const kvt_session_t,
    tape: &mut Tape,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let (tokens, media) = (tokens(tape), media(tape));
    let mut given = sequence(tape, &tokens, &media);
    // SAFETY: valid pointers with their lengths.
    unsafe { kvt_session_append_media(session, given.ptr(), err) }
}

/// A few tokens that sessions have in common.
pub(super) fn tokens(tape: &mut Tape) -> Vec<u32> {
    let (document, count) = (u32::from(tape.byte() % 3), u32::from(tape.byte() % 40));
    (0..count).map(|i| document * 1000 + i).collect()
}

/// Chunks of a get: in order as a rule.
fn chunks(tape: &mut Tape) -> Vec<u32> {
    let (mut chunks, mut next) = (Vec::new(), u32::from(tape.byte() % 3));
    for _ in 0..tape.byte() % 6 {
        chunks.push(next);
        next = next.wrapping_add(match tape.byte() {
            0..=2 => 0,
            3 => u32::MAX,
            other => 1 + u32::from(other) % 3,
        });
    }
    chunks
}

impl Machine {
    pub(super) fn open_in_store(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 4 {
            0 => self.open_store(tape, err),
            1 => self.open_namespace(tape, err),
            2 => self.open_session(tape, err),
            _ => self.open_event(tape, err),
        }
    }

    pub(super) fn open_store(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.stores.live.len() >= 2 {
            return;
        }
        let runtime = self.runtimes.pick(tape);
        let budget = if tape.byte() > 200 { self.budgets.pick(tape) } else { null_mut() };
        let spec = SPECS[usize::from(tape.byte()) % SPECS.len()];
        let device = self.some_device(tape);
        let mut opts = Padded::<kvt_store_opts_t>::new(tape, |o, t| {
            o.device = device;
            o.flags = u64::from(t.byte() > 250);
            (o.spec, o.spec_bytes) = (spec.as_ptr().cast(), spec.len() as u64);
            let fields = t.byte();
            if fields > 128 {
                let policy = if fields % 3 == 0 { "slru(segments=3)" } else { "lru" };
                o.host_bytes = u64::from(fields % 8) << 17;
                (o.policy, o.policy_bytes) = (policy.as_ptr().cast(), policy.len() as u64);
                o.write = u32::from(fields % 5);
                o.disk_bytes = u64::from(fields > 250);
            }
        });
        // A short struct would mean a store of a million chunks.
        let size = u64::from_le_bytes(opts.0[..8].try_into().expect("eight bytes"));
        if size < size_of::<kvt_store_opts_t>() as u64 {
            return;
        }
        let mut handle = null_mut();
        // SAFETY: valid pointers.
        let status =
            check(unsafe { kvt_store_open(runtime, budget, opts.ptr(), &mut handle, err) });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.kv.stores.live.extend((status == KVT_OK).then_some(handle));
    }

    pub(super) fn open_namespace(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.spaces.live.len() >= 4 {
            return;
        }
        let store = self.kv.stores.pick(tape);
        let salt = [tape.byte() % 2];
        let layers: [u16; LAYERS] = [0, 1];
        // SAFETY: zero is a valid value.
        let mut group: kvt_group_t = unsafe { std::mem::zeroed() };
        (group.k_bytes, group.v_bytes) = (K, V);
        (group.layers, group.layer_count) = (layers.as_ptr(), LAYERS as u64);
        group.rule = if tape.byte() > 250 { tape.number() as u32 | 4 } else { 0 };
        let mut layout = Padded::<kvt_layout_t>::new(tape, |l, t| {
            l.chunk_tokens = if t.byte() > 250 { t.number() as u32 } else { 4 };
            l.reserved = u32::from(t.byte() > 252);
            (l.groups, l.group_count) = (&group, 1);
            l.stride_bytes = size_of::<kvt_group_t>() as u64;
        });
        let mut identity = Padded::<kvt_identity_t>::new(tape, |i, _| {
            (i.salt, i.salt_bytes) = (salt.as_ptr().cast(), 1);
        });
        let flags = u64::from(tape.byte() > 200) | u64::from(tape.byte() > 252) << 7;
        let mut handle = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe {
            kvt_namespace_open(store, identity.ptr(), layout.ptr(), flags, &mut handle, err)
        });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.kv.spaces.live.extend((status == KVT_OK).then_some(handle));
    }

    pub(super) fn open_session(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.sessions.live.len() >= 6 {
            return;
        }
        let mut handle = null_mut();
        let mut opts = Padded::<kvt_session_opts_t>::new(tape, |o, t| {
            o.flags = u64::from(t.byte() % 2);
            o.priority = u32::from(t.byte()) * o.flags as u32;
            o.tenant = u32::from(t.byte());
        });
        let forks = tape.byte() > 200;
        let (space, session) = (self.kv.spaces.pick(tape), self.kv.sessions.pick(tape));
        // SAFETY: valid pointers.
        let status = check(unsafe {
            match forks {
                true => kvt_session_fork(session, opts.ptr(), &mut handle, err),
                false => kvt_session_open(space, opts.ptr(), &mut handle, err),
            }
        });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.kv.sessions.live.extend((status == KVT_OK).then_some(handle));
    }

    fn open_event(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.events.live.len() >= 4 {
            return;
        }
        let mut handle = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_event_open(tape.number() >> 7, &mut handle, err) });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.kv.events.live.extend((status == KVT_OK).then_some(handle));
    }

    pub(super) fn use_session(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let session = self.kv.sessions.pick(tape);
        let mut info = out::<kvt_session_info_t>();
        let (first, count) = (tape.number(), tape.number());
        // SAFETY: valid pointers.
        unsafe {
            let known = check(kvt_session_info(session, info.ptr())) == KVT_OK;
            let all = info.ptr().read_unaligned().tokens;
            assert!(!known || all <= MAX_TOKENS);
            check(match tape.byte() % 10 {
                0..=2 if all < MAX_TOKENS - 40 => {
                    let tokens = tokens(tape);
                    kvt_session_append(session, tokens.as_ptr(), tokens.len() as u64, err)
                }
                3 => kvt_session_truncate(session, first, err),
                4 => kvt_session_pin(session, first, count, u32::from(tape.byte()), first, err),
                5 => kvt_session_unpin(session, first, count, err),
                6 => {
                    let mut hint = Padded::<kvt_policy_hint_t>::new(tape, |h, t| {
                        h.stop = u32::from(t.byte() % 7);
                        h.next_use_ns = t.number() as i64;
                    });
                    kvt_session_hint(session, hint.ptr(), err)
                }
                7 if all < MAX_TOKENS - 40 => append_media(session, tape, err),
                8 => {
                    let mut report = out::<kvt_demote_report_t>();
                    let status = kvt_session_demote(session, first, count, report.ptr(), err);
                    let report = report.ptr().read_unaligned();
                    assert_eq!(report.freed_chunks + report.leaving_chunks, 0, "there is no disk");
                    assert!(report.staying_chunks <= MAX_TOKENS);
                    status
                }
                _ => {
                    let mut report = out::<kvt_clear_report_t>();
                    let status = kvt_session_drop(session, first, count, report.ptr(), err);
                    let report = report.ptr().read_unaligned();
                    assert!(report.gone_chunks + report.held_chunks <= MAX_TOKENS);
                    status
                }
            });
        }
    }

    pub(super) fn move_session(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.tensors.len() >= 200 {
            return;
        }
        if tape.byte() > 190 {
            return self.move_blocks(tape, err);
        }
        let session = self.kv.sessions.pick(tape);
        let queue = if tape.byte() > 128 { self.queues.pick(tape) } else { null_mut() };
        let (now, right) = (self.now(), size_of::<kvt_view_t>());
        let mut memory = vec![0xA5u8; LAYERS * PLANE * 2].into_boxed_slice();
        // SAFETY: zero is a valid value.
        let mut views: [kvt_view_t; 2 * LAYERS] = unsafe { std::mem::zeroed() };
        for (i, view) in views.iter_mut().enumerate() {
            view.address = memory[i * PLANE..].as_mut_ptr().cast::<c_void>();
            view.run_bytes = if i < LAYERS { K } else { V };
            view.memory = u32::from(tape.byte() > 252);
            view.heads = u32::from(tape.byte() > 250) * 2;
        }
        let what = tape.byte() % 3;
        let ready = if tape.byte() > 160 { self.kv.events.pick(tape) } else { null_mut() };
        let (_, after) = if tape.byte() > 220 { self.pick_event(tape) } else { (null_mut(), 0) };
        let chunks = chunks(tape);
        let mut given = Padded::<kvt_move_t>::new(tape, |m, t| {
            m.flags = u64::from(t.byte() & 3) | u64::from(t.byte() > 252) << 3;
            m.first_token = if t.byte() > 200 { t.number() } else { 0 };
            m.tokens = if t.byte() > 200 { t.number() } else { 0 };
            m.first_layer = u32::from(t.byte() > 220) * u32::from(t.byte());
            m.layers = u32::from(t.byte() > 220) * u32::from(t.byte() % 4);
            if what != 2 || t.byte() > 250 {
                (m.k, m.v) = (views.as_ptr(), views[LAYERS..].as_ptr());
            }
            m.stride_bytes = if t.byte() > 250 { 7 } else { right as u64 };
            m.level = u32::from(t.byte() > 250) * u32::from(t.byte());
            m.ready = ready;
            m.after = after;
            let rarely = if what == 0 { 250 } else { 180 };
            if t.byte() > rarely {
                (m.chunks, m.chunk_count) = (chunks.as_ptr(), chunks.len() as u64);
                m.flags &= if t.byte() > 240 { u64::MAX } else { !KVT_MOVE_REUSE };
            }
            match t.byte() {
                254 => m.chunks = null(),
                255 => m.chunk_count = 1 << 40,
                _ => {}
            }
        });
        let mut opts = Padded::<kvt_submit_opts_t>::new(tape, |o, t| {
            o.queue = queue;
            o.tag = t.number();
            o.deadline_ns = if t.byte() > 200 { now + u64::from(t.byte()) * 1000 } else { 0 };
            o.priority = u32::from(t.byte() % 3) + u32::from(t.byte() > 250);
            o.flags = u64::from(t.byte() > 250);
        });
        let mut ops = [null_mut(); LAYERS];
        let to = if tape.byte() > 220 { null_mut() } else { ops.as_mut_ptr() };
        let call = [kvt_session_put, kvt_session_get, kvt_session_prefetch][usize::from(what)];
        // SAFETY: what views lead to is kept to the end; there is room for an op a layer.
        let status = check(unsafe { call(session, given.ptr(), opts.ptr(), to, err) });
        assert!(status == KVT_OK || ops.iter().all(|op| op.is_null()));
        self.ops.live.extend(ops.into_iter().filter(|op| !op.is_null()));
        self.kv.tensors.push(memory);
        MOVED.fetch_add(u64::from(status == KVT_OK), Ordering::SeqCst);
    }

    /// Names that are often the same, and sometimes lead nowhere.
    pub(super) fn names(
        tape: &mut Tape,
        room: &[u8; 64],
        ends: &mut [u64; 8],
    ) -> Padded<kvt_names_t> {
        let mut end = 0;
        for at in ends.iter_mut() {
            end += u64::from(tape.byte() % 6) + u64::from(tape.byte() < 250);
            *at = end;
        }
        Padded::<kvt_names_t>::new(tape, |n, t| {
            n.count = u64::from(t.byte() % 9);
            n.bytes = if t.byte() > 252 { null() } else { room.as_ptr() };
            match t.byte() {
                0..=180 => n.each_bytes = 1 + u64::from(t.byte() % 7),
                181..=240 => n.ends = ends.as_ptr(),
                241..=248 => n.each_bytes = u64::MAX / 2,
                _ => {}
            }
        })
    }

    fn move_blocks(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.kv.tensors.len() >= 200 {
            return;
        }
        let session = self.kv.sessions.pick(tape);
        let (mut room, mut ends) = ([0; 64], [0; 8]);
        room.iter_mut().for_each(|byte| *byte = tape.byte() % 2);
        let mut names = Self::names(tape, &room, &mut ends);
        let what = tape.byte() % 6;
        if what == 5 {
            let mut found = [9u8; 8];
            let out = if tape.byte() > 128 { null_mut() } else { found.as_mut_ptr() };
            let mut told = Padded::<kvt_policy_hint_t>::new(tape, |h, t| {
                h.flags = u64::from(t.byte() % 4);
                h.next_use_ns = t.number() as i64;
                h.confidence = f64::from(t.byte() > 250) * 2.0;
                h.stop = u32::from(t.byte() % 6);
            });
            let (hold, release) = (tape.byte() > 60, tape.byte() > 90);
            // SAFETY: valid pointers, with room for a byte of as many names as there can be.
            unsafe {
                if hold {
                    check(kvt_session_hold_blocks(session, names.ptr(), out, err));
                }
                if release {
                    check(kvt_session_release_blocks(session, names.ptr(), err));
                }
                check(kvt_session_hint_blocks(session, names.ptr(), told.ptr(), err));
            }
            // 9: was not written; else nothing, or all of it in some tier.
            let whole = |one: &u8| [0, 9].contains(one) || u32::from(*one) & KVT_EXISTS_WHOLE != 0;
            assert!(found.iter().all(whole), "{found:?}");
            return;
        }
        if what == 3 {
            let mut report = out::<kvt_clear_report_t>();
            // SAFETY: valid pointers.
            check(unsafe { kvt_session_drop_blocks(session, names.ptr(), report.ptr(), err) });
            return;
        }
        if what == 4 {
            let space = self.kv.spaces.pick(tape);
            let mut found = [0u8; 8 * 32];
            // SAFETY: room for the keys of as many names as there can be.
            unsafe {
                check(kvt_namespace_find_blocks(space, names.ptr(), found.as_mut_ptr(), err));
                check(kvt_namespace_block_keys(space, names.ptr(), found.as_mut_ptr(), err));
            }
            return;
        }
        let mut memory = vec![0xA5u8; LAYERS * PLANE * 2].into_boxed_slice();
        // SAFETY: zero is a valid value.
        let mut views: [kvt_view_t; 2 * LAYERS] = unsafe { std::mem::zeroed() };
        for (i, view) in views.iter_mut().enumerate() {
            view.address = memory[i * PLANE..].as_mut_ptr().cast::<c_void>();
            view.run_bytes = if i < LAYERS { K } else { V };
            view.tokens = MAX_TOKENS as u32; // chunks may be longer than any session
        }
        let ready = if tape.byte() > 160 { self.kv.events.pick(tape) } else { null_mut() };
        let (_, after) = if tape.byte() > 220 { self.pick_event(tape) } else { (null_mut(), 0) };
        let called = if tape.byte() > 252 { null() } else { names.ptr() };
        let mut given = Padded::<kvt_blocks_t>::new(tape, |b, t| {
            b.flags = u64::from(t.byte() > 252);
            b.names = called;
            b.first_layer = u32::from(t.byte() > 220) * u32::from(t.byte());
            b.layers = u32::from(t.byte() > 220) * u32::from(t.byte() % 4);
            if what != 2 || t.byte() > 250 {
                (b.k, b.v) = (views.as_ptr(), views[LAYERS..].as_ptr());
            }
            b.stride_bytes = if t.byte() > 250 { 7 } else { size_of::<kvt_view_t>() as u64 };
            b.level = u32::from(t.byte() > 250) * u32::from(t.byte());
            b.ready = ready;
            b.after = after;
        });
        let mut op = null_mut();
        let to = if tape.byte() > 220 { null_mut() } else { &mut op };
        let calls = [kvt_session_put_blocks, kvt_session_get_blocks, kvt_session_prefetch_blocks];
        let call = calls[usize::from(what)];
        // SAFETY: what views lead to is kept to the end, and they say how much that is.
        let status = check(unsafe { call(session, given.ptr(), null(), to, err) });
        assert!(status == KVT_OK || op.is_null());
        self.ops.live.extend((!op.is_null()).then_some(op));
        self.kv.tensors.push(memory);
        MOVED.fetch_add(u64::from(status == KVT_OK), Ordering::SeqCst);
    }

    pub(super) fn look_at_store(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 9 {
            0 => self.lookup(tape, err),
            1 => self.plan(tape, err),
            2 => self.read_events(tape),
            3 => self.prefill(tape, err),
            4 => {
                let (event, mut state) = (self.kv.events.pick(tape), 9);
                // SAFETY: a valid pointer.
                unsafe {
                    check(kvt_event_signal(event));
                    let known = check(kvt_event_query(event, &mut state)) == KVT_OK;
                    assert!(!known || state == KVT_EVENT_SIGNALLED);
                }
            }
            5 => self.change_store(tape, err),
            6 => self.list_rows(tape),
            7 => self.ask_store(tape, err),
            _ => {
                let store = self.kv.stores.pick(tape);
                let mut stats = out::<kvt_store_stats_t>();
                let (mut room, mut bytes) = ([0u8; 64], 0);
                let space = self.kv.spaces.pick(tape);
                // SAFETY: valid pointers with their lengths.
                unsafe {
                    check(kvt_store_stats(store, stats.ptr()));
                    check(kvt_store_metrics(store, room.as_mut_ptr().cast(), 64, &mut bytes));
                    check(kvt_namespace_key(space, room.as_mut_ptr()));
                }
            }
        }
    }

    fn change_store(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let store = self.kv.stores.pick(tape);
        let tier = u32::from(tape.byte() % 5);
        let spec = ["lru", "s3fifo", "slru(segments=3)", "horizon", "lrv", ""]
            [usize::from(tape.byte() % 6)];
        let bytes = if tape.byte() > 200 { tape.number() } else { 1 << (16 + tape.byte() % 6) };
        // SAFETY: valid pointers with their lengths.
        unsafe {
            let (text, len) = (spec.as_ptr().cast(), spec.len() as u64);
            let set = check(kvt_store_set_policy(store, tier, text, len, err));
            assert!(set != KVT_OK || tier == 1 && spec.len() > 1 && spec != "lrv");
            let set = check(kvt_store_set_budget(store, tier, bytes, err));
            assert!(set != KVT_OK || tier == 1 && bytes >= 1 << 16);
        }
    }

    fn list_rows(&mut self, tape: &mut Tape) {
        let store = self.kv.stores.pick(tape);
        // SAFETY: zero is a valid value.
        let (mut entries, mut tenants): ([kvt_policy_log_entry_t; 4], [kvt_tenant_t; 4]) =
            unsafe { std::mem::zeroed() };
        let (tier, room) = (u32::from(tape.byte() % 5), u64::from(tape.byte() % 5));
        let strides = (size_of_val(&entries[0]) as u64, size_of_val(&tenants[0]) as u64);
        let (mut evicted, mut count) = (9, 99);
        // SAFETY: pointers with their lengths.
        unsafe {
            let to = entries.as_mut_ptr();
            let status = kvt_store_evictions(store, tier, to, room, strides.0, &mut evicted);
            assert_eq!(check(status) == KVT_OK, evicted <= room);
            let to = tenants.as_mut_ptr();
            let status = check(kvt_store_tenants(store, to, room, strides.1, &mut count));
            assert!(status != KVT_OK || count <= room);
            assert!(status != KVT_E_TOO_SMALL || count > room);
            let mut times: [kvt_latency_t; 4] = std::mem::zeroed();
            let (to, stride) = (times.as_mut_ptr(), size_of::<kvt_latency_t>() as u64);
            let status = check(kvt_store_latencies(store, to, room, stride, &mut count));
            assert!(status != KVT_OK && (status != KVT_E_TOO_SMALL || count > room));
        }
    }

    fn lookup(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let space = self.kv.spaces.pick(tape);
        let tokens = tokens(tape);
        // SAFETY: zero is a valid value.
        let mut ranges: [kvt_range_t; 4] = unsafe { std::mem::zeroed() };
        let right = size_of::<kvt_range_t>();
        let stride = size_field(tape, right).min(right as u64);
        let rows = if tape.byte() > 200 { null_mut() } else { ranges.as_mut_ptr() };
        let (capacity, mut count) = (if rows.is_null() { 0 } else { 4 }, 0);
        let mut sum = out::<kvt_lookup_t>();
        let mut keys = [0u8; 64];
        keys[..].fill(tape.byte());
        let mut there = [9u8; 2];
        // SAFETY: pointers with their lengths.
        unsafe {
            let (at, len) = (tokens.as_ptr(), tokens.len() as u64);
            let status = check(kvt_namespace_lookup(
                space,
                at,
                len,
                rows,
                capacity,
                stride,
                &mut count,
                sum.ptr(),
                err,
            ));
            let sum = sum.ptr().read_unaligned();
            if status == KVT_OK {
                assert!(self.kv.spaces.is_live(space));
                assert!(sum.reusable_tokens <= sum.soon_tokens && sum.soon_tokens <= len);
                if !rows.is_null() && stride as usize == right {
                    let part = &ranges[..count as usize];
                    assert_eq!(part.iter().map(|r| r.tokens).sum::<u64>(), len);
                }
            }
            let media = media(tape);
            let mut given = sequence(tape, &tokens, &media);
            let (given, none) = (given.ptr(), null_mut());
            check(kvt_namespace_lookup_media(
                space,
                given,
                none,
                0,
                0,
                &mut count,
                none.cast(),
                err,
            ));
            let exists = check(kvt_namespace_exists(space, keys.as_ptr(), 2, there.as_mut_ptr()));
            assert!(if exists == KVT_OK { there == [0, 0] } else { there == [9, 9] });
            let count = tape.number();
            let of = count.min(2);
            check(kvt_namespace_lookup_keys(
                space,
                keys.as_ptr(),
                of,
                count,
                null_mut(),
                0,
                0,
                null_mut(),
                null_mut(),
                err,
            ));
        }
    }

    fn plan(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let session = self.kv.sessions.pick(tape);
        let mut terms = Padded::<kvt_plan_terms_t>::new(tape, |t, tape| {
            t.flags = tape.flags() & 15;
            t.alpha_ns = if tape.byte() > 250 { f64::NAN } else { f64::from(tape.byte() % 2) };
            t.beta_ns = if tape.byte() > 250 { -1.0 } else { tape.number() as f64 };
            t.priority = u32::from(tape.byte() % 4);
        });
        // SAFETY: zero is a valid value.
        let mut rows: [kvt_plan_segment_t; 8] = unsafe { std::mem::zeroed() };
        let (mut count, stride) = (0, size_of::<kvt_plan_segment_t>() as u64);
        let mut sum = out::<kvt_plan_t>();
        let room = u64::from(tape.byte() % 9);
        // SAFETY: pointers with their lengths.
        unsafe {
            let to = rows.as_mut_ptr();
            let (terms, sum) = (terms.ptr(), sum.ptr());
            let status = kvt_session_plan(session, terms, to, room, stride, &mut count, sum, err);
            if check(status) == KVT_OK {
                let sum = sum.read_unaligned();
                let parts = sum.resident_tokens + sum.load_tokens + sum.recompute_tokens;
                assert_eq!(parts, sum.tokens);
                let tokens = rows[..count as usize].iter().map(|row| row.tokens).sum::<u64>();
                assert_eq!(tokens, sum.tokens);
            }
        }
    }

    fn read_events(&mut self, tape: &mut Tape) {
        let store = self.kv.stores.pick(tape);
        // SAFETY: zero is a valid value.
        let mut rows: [kvt_store_event_t; 8] = unsafe { std::mem::zeroed() };
        let stride = size_of::<kvt_store_event_t>() as u64;
        let first = tape.number();
        let (mut cursor, mut count, mut missed) = (first, 0, 0);
        let room = u64::from(tape.byte() % 9);
        // SAFETY: pointers with their lengths.
        let status = check(unsafe {
            let to = rows.as_mut_ptr();
            kvt_store_events(store, &mut cursor, to, room, stride, &mut count, &mut missed)
        });
        if status != KVT_OK {
            assert_eq!((cursor, count), (first, 0));
        } else if first <= cursor {
            assert_eq!(cursor, first + missed + count);
        } else {
            assert_eq!((count, missed), (0, 0), "from the future");
        }
    }

    fn prefill(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let space = self.kv.spaces.pick(tape);
        let mut cost = Padded::<kvt_prefill_t>::new(tape, |c, t| {
            c.alpha_ns = if t.byte() > 250 { f64::INFINITY } else { f64::from(t.byte()) };
            c.beta_ns = f64::from(t.byte());
        });
        let given = if tape.byte() > 128 { cost.ptr().cast_const() } else { null() };
        let mut told = out::<kvt_prefill_t>();
        // SAFETY: valid pointers.
        unsafe {
            let (context, tokens) = (tape.number(), tape.number());
            check(kvt_namespace_observe_prefill(space, context, tokens, tape.number(), err));
            let fixed = check(kvt_namespace_fix_prefill(space, given, err)) == KVT_OK;
            if check(kvt_namespace_prefill(space, told.ptr())) == KVT_OK && fixed {
                let told = told.ptr().read_unaligned();
                assert_eq!(told.fixed == 1, !given.is_null());
            }
        }
    }

    pub(super) fn close_in_store(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let deadline = self.now() + 50_000;
        // SAFETY: local handle variables throughout.
        unsafe {
            match tape.byte() % 16 {
                0 => {
                    let before = self.kv.stores.pick(tape);
                    let mut store = before;
                    let status = check(kvt_store_close(&mut store, deadline, err));
                    self.kv.stores.freed(before, store, status);
                }
                1..=2 => {
                    let before = self.kv.spaces.pick(tape);
                    let mut space = before;
                    let status = check(kvt_namespace_close(&mut space));
                    self.kv.spaces.freed(before, space, status);
                }
                3..=6 => {
                    let before = self.kv.sessions.pick(tape);
                    let mut session = before;
                    let status = check(kvt_session_close(&mut session));
                    self.kv.sessions.freed(before, session, status);
                }
                7..=10 => {
                    let before = self.kv.events.pick(tape);
                    let mut event = before;
                    let status = check(kvt_event_close(&mut event));
                    self.kv.events.freed(before, event, status);
                }
                _ => {
                    let space = self.kv.spaces.pick(tape);
                    let mut report = out::<kvt_clear_report_t>();
                    check(kvt_namespace_clear(space, deadline, report.ptr(), err));
                }
            }
        }
    }
}
