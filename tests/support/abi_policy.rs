//! The machine's instructions for policies.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::policy::*;
use kvtier::ffi::policy_advice::*;
use kvtier::ffi::policy_evict::*;
use kvtier::ffi::policy_keep::*;
use kvtier::ffi::policy_select::*;
use kvtier::ffi::policy_stats::*;
use kvtier::ffi::policy_use::*;
use kvtier::ffi::status::*;

use super::{Machine, Padded, Tape, USER, check, destroy, out, size_field};

const SPECS: [&str; 8] =
    ["lru", "fifo", "custom", "lru(", "lrv", "nothing", "arc", "qos(inner=lru)"];

unsafe extern "C" fn score(
    user_data: *mut c_void,
    columns: *const kvt_policy_columns_t,
    _: i64,
    scores: *mut f64,
) -> kvt_status_t {
    assert!(user_data.is_null() || user_data == USER);
    // SAFETY: the library's promise about columns and scores.
    unsafe {
        let columns = &*columns;
        for row in 0..columns.rows as usize {
            let id = *columns.ids.add(row);
            *scores.add(row) = if id == 13 { f64::NAN } else { (id % 7) as f64 };
        }
    }
    KVT_OK
}

unsafe extern "C" fn predict(
    _: *mut c_void,
    sequence: u64,
    _: u64,
    _: u64,
    seconds: *mut f64,
    confidence: *mut f64,
) -> u32 {
    // SAFETY: the library's promise about the outputs.
    unsafe {
        *seconds = sequence as f64 - 3.0;
        *confidence = sequence as f64 / 10.0;
    }
    1
}

/// Ids: mostly few, so that they are met again.
fn ids(tape: &mut Tape) -> Vec<u64> {
    let n = usize::from(tape.byte() % 8);
    (0..n).map(|_| if tape.byte() > 240 { tape.number() } else { tape.byte().into() }).collect()
}

/// The length of an array, seldom a wrong one that is refused.
fn length(tape: &mut Tape, right: usize) -> u64 {
    if tape.byte() > 250 { u64::MAX - 7 } else { right as u64 }
}

fn who(tape: &mut Tape) -> Padded<kvt_policy_who_t> {
    Padded::new(tape, |w: &mut kvt_policy_who_t, t| {
        w.flags = t.flags() & if t.byte() > 240 { u64::MAX } else { 3 };
        w.session = t.number();
        w.tenant = t.number() as u32;
        w.priority = u32::from(t.byte() % 4);
        w.length = t.number() as u32;
        w.max_length = t.number() as u32;
        w.tokens_each = u32::from(t.byte());
        // What is kept with a session is refused without one: not every time.
        if w.flags & KVT_WHO_SESSION == 0 && w.session % 8 != 0 {
            w.tenant = 0;
            w.flags &= !KVT_WHO_PRIORITY;
        }
    })
}

impl Machine {
    pub(super) fn open_policy(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.policies.live.len() >= 4 {
            return;
        }
        let spec = SPECS[usize::from(tape.byte()) % SPECS.len()];
        let wants = tape.byte() & 1 == 0;
        let mut custom = Padded::<kvt_policy_custom_t>::new(tape, |c, _| {
            c.score = Some(score);
            c.user_data = USER;
            c.destroy = Some(destroy);
        });
        let mut predictor = Padded::<kvt_policy_predictor_t>::new(tape, |p, _| {
            p.predict = Some(predict);
        });
        let (custom, predictor) = (custom.ptr(), predictor.ptr());
        let mut opts = Padded::<kvt_policy_opts_t>::new(tape, |o, t| {
            o.flags = t.flags() & if t.byte() > 240 { u64::MAX } else { 7 };
            (o.spec, o.spec_bytes) = (spec.as_ptr().cast::<c_char>(), spec.len() as u64);
            o.max_objects = 1 + u64::from(t.byte() % 64);
            o.remember = u64::from(t.byte() % 64);
            o.log_entries = u64::from(t.byte() % 8);
            o.alpha = if t.byte() > 250 { f64::NAN } else { 0.5 };
            o.custom = if wants { custom } else { null_mut() };
            o.predictor = if t.byte() & 1 == 0 { predictor } else { null_mut() };
        });
        let mut handle = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_policy_open(opts.ptr(), &mut handle, err) });
        assert_eq!(status == KVT_OK, !handle.is_null());
        if status == KVT_OK {
            self.policies.live.push(handle);
            // A short options struct may end before the table, and that before destroy.
            // SAFETY: the structs are readable for a page each.
            let sizes = unsafe {
                (opts.ptr().cast::<u64>().read_unaligned(), custom.cast::<u64>().read_unaligned())
            };
            let whole = sizes.0 >= 88 && sizes.1 >= size_of::<kvt_policy_custom_t>() as u64;
            self.taken += u64::from(wants && whole);
        }
    }

    pub(super) fn use_policy(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let policy = self.policies.pick(tape);
        let now = if tape.byte() > 200 { tape.number() as i64 } else { 0 };
        match tape.byte() % 12 {
            0 | 1 => self.policy_insert(policy, now, tape, err),
            2..=4 => self.policy_ids(policy, now, tape, err),
            5 | 6 => self.policy_evict(policy, now, tape, err),
            7 | 8 => self.policy_select(policy, now, tape, err),
            9 => self.policy_look(policy, tape, err),
            10 => self.policy_change(policy, tape, err),
            _ if tape.byte() > 150 => {
                let mut handle = policy;
                // SAFETY: a local handle variable.
                let status = check(unsafe { kvt_policy_close(&mut handle) });
                self.policies.freed(policy, handle, status);
            }
            _ => {}
        }
    }

    fn policy_insert(
        &mut self,
        policy: *mut kvt_policy_t,
        now: i64,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
    ) {
        let rows: Vec<kvt_policy_row_t> = ids(tape)
            .into_iter()
            .map(|id| {
                // SAFETY: zero is a valid value.
                let mut row: kvt_policy_row_t = unsafe { std::mem::zeroed() };
                row.id = id;
                row.units = tape.number() % 9;
                row.parent = id.wrapping_sub(1);
                row.flags = u64::from(tape.byte() & 1);
                row.cost = if tape.byte() > 250 { f64::NAN } else { 1.0 };
                row
            })
            .collect();
        let stride = size_field(tape, size_of::<kvt_policy_row_t>());
        let stride = stride.min(size_of::<kvt_policy_row_t>() as u64);
        let (mut who, n) = (who(tape), rows.len() as u64);
        // SAFETY: the array is as long as stated.
        check(unsafe { kvt_policy_insert(policy, now, who.ptr(), rows.as_ptr(), n, stride, err) });
    }

    fn policy_ids(
        &mut self,
        policy: *mut kvt_policy_t,
        now: i64,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
    ) {
        let (ids, mut who) = (ids(tape), who(tape));
        let (n, units) = (length(tape, ids.len()), vec![2u64; ids.len()]);
        let (at, units) = (ids.as_ptr(), units.as_ptr());
        let (mut found, mut count) = ([9u8; 8], 0);
        let mut hint = Padded::<kvt_policy_hint_t>::new(tape, |h, t| {
            h.flags = t.flags() & 3;
            h.next_use_ns = t.number() as i64;
            h.confidence = f64::from(t.byte()) / 250.0;
            h.stop = u32::from(t.byte() % 6);
        });
        let who = who.ptr();
        // SAFETY: the arrays are as long as stated, or the length is refused.
        unsafe {
            check(match tape.byte() % 10 {
                0 | 1 => {
                    let found = found.as_mut_ptr();
                    kvt_policy_lookup(policy, now, who, at, n, found, &mut count, err)
                }
                2 => kvt_policy_touch(policy, now, who, at, n, &mut count, err),
                3 => kvt_policy_record(policy, now, who, at, units, n, &mut count, err),
                4 if tape.byte() & 1 == 0 => kvt_policy_remove(policy, now, at, n, err),
                4 => kvt_policy_evicted(policy, now, at, n, err),
                5 => kvt_policy_resize(policy, at, units, n, err),
                6 => kvt_policy_acquire(policy, at, n, err),
                7 => kvt_policy_release(policy, at, n, err),
                8 if tape.byte() & 1 == 0 => kvt_policy_pin(policy, at, n, err),
                8 => kvt_policy_unpin(policy, at, n, err),
                _ => kvt_policy_hint(policy, now, who, at, n, hint.ptr(), &mut count, err),
            });
        }
        assert!(count <= ids.len() as u64);
    }

    fn policy_evict(
        &mut self,
        policy: *mut kvt_policy_t,
        now: i64,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
    ) {
        // SAFETY: zero is a valid value.
        let mut victims: [kvt_policy_victim_t; 8] = unsafe { std::mem::zeroed() };
        let (required, stride) = (tape.number(), size_of::<kvt_policy_victim_t>() as u64);
        let cap = u64::from(tape.byte() % 9);
        let mut told = out::<kvt_policy_outcome_t>();
        let at = victims.as_mut_ptr();
        // SAFETY: the array is as long as stated.
        let status = check(unsafe {
            match tape.byte() & 1 {
                0 => kvt_policy_evict(policy, now, required, at, cap, stride, told.ptr(), err),
                _ => kvt_policy_preview(policy, now, required, at, cap, stride, told.ptr(), err),
            }
        });
        if status == KVT_OK {
            // SAFETY: written by the call.
            let told = unsafe { told.ptr().read_unaligned() };
            let freed: u64 = victims[..told.victims as usize].iter().map(|v| v.units).sum();
            assert_eq!(freed, told.freed_units);
            assert_eq!(told.shortfall_units, required.saturating_sub(freed));
        }
    }

    fn policy_select(
        &mut self,
        policy: *mut kvt_policy_t,
        now: i64,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
    ) {
        let ids = ids(tape);
        let blocks: Vec<u64> = ids.iter().map(|_| tape.number()).collect();
        let block_ids: Vec<u64> = (0..16).map(|_| u64::from(tape.byte())).collect();
        let offsets: Vec<u64> = (0..=ids.len() as u64).map(|i| i * 2).collect();
        let (rows, lists) = (length(tape, ids.len()), tape.byte() > 128);
        let mut columns = Padded::<kvt_policy_columns_t>::new(tape, |c, t| {
            c.rows = rows;
            c.ids = ids.as_ptr();
            c.blocks = if t.byte() > 128 && !lists { blocks.as_ptr() } else { null_mut() };
            if lists {
                c.block_offsets = offsets.as_ptr();
                c.block_ids = block_ids.as_ptr();
                c.block_entries = if t.byte() > 240 { 16 } else { ids.len() as u64 * 2 };
            }
        });
        // SAFETY: zero is a valid value.
        let mut picks: [kvt_policy_pick_t; 8] = unsafe { std::mem::zeroed() };
        let mut freed = [0u64; 16];
        let mut told = Padded::<kvt_policy_selection_t>::new(&mut Tape(&[]), |s, _| {
            s.victims = picks.as_mut_ptr();
            s.victim_capacity = 8;
            s.stride_bytes = size_of::<kvt_policy_pick_t>() as u64;
            s.block_ids = freed.as_mut_ptr();
            s.block_capacity = 16;
        });
        let (required, flags) = (tape.number(), u64::from(tape.byte() & 1));
        // SAFETY: arrays as long as stated, or the length is refused.
        let status = check(unsafe {
            kvt_policy_select(policy, now, columns.ptr(), required, flags, told.ptr(), err)
        });
        if status == KVT_OK {
            // SAFETY: written by the call.
            let told = unsafe { told.ptr().read_unaligned() };
            let sum: u64 = picks[..told.victim_count as usize].iter().map(|p| p.freed_blocks).sum();
            assert_eq!(sum, told.freed_blocks);
            assert_eq!(told.shortfall_blocks, required.saturating_sub(sum));
        }
    }

    fn policy_look(
        &mut self,
        policy: *mut kvt_policy_t,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
    ) {
        let mut stats = out::<kvt_policy_stats_t>();
        let mut info = out::<kvt_policy_info_t>();
        let mut advice = out::<kvt_policy_advice_t>();
        // SAFETY: zero is a valid value.
        let mut log: [kvt_policy_log_entry_t; 4] = unsafe { std::mem::zeroed() };
        let stride = size_of::<kvt_policy_log_entry_t>() as u64;
        let (mut n, mut value, mut text) = (0, 0.0, [0 as c_char; 16]);
        // SAFETY: valid pointers with their lengths.
        unsafe {
            if check(kvt_policy_stats(policy, stats.ptr())) == KVT_OK {
                let stats = stats.ptr().read_unaligned();
                assert!(stats.objects <= stats.max_objects && stats.hits <= stats.references);
                assert!((0.0..=1.0).contains(&stats.re_prefill_rate));
            }
            check(kvt_policy_log(policy, tape.number(), log.as_mut_ptr(), 4, stride, &mut n));
            check(kvt_policy_gauge(policy, c"arc_p".as_ptr(), 5, &mut value, err));
            let (index, mut name) = (tape.number(), null());
            if check(kvt_policy_gauge_at(policy, index, &mut name, &mut n, &mut value)) == KVT_OK {
                assert!(!name.is_null() && n > 0 && index < 64);
            }
            check(kvt_policy_spec(policy, text.as_mut_ptr(), 16, &mut n));
            check(kvt_policy_info(tape.number(), info.ptr()));
            check(kvt_policy_count(&mut n));
            check(kvt_policy_advise(policy, tape.number(), advice.ptr()));
        }
    }

    fn policy_change(
        &mut self,
        policy: *mut kvt_policy_t,
        tape: &mut Tape,
        err: *mut *mut kvt_error_t,
    ) {
        let spec = SPECS[usize::from(tape.byte()) % SPECS.len()];
        let mut rules = Padded::<kvt_policy_rules_t>::new(tape, |r, t| {
            r.flags = u64::from(t.byte() & 3);
            r.window = t.number();
            r.min_batch = t.number();
            r.max_batch = t.number();
            r.patience = t.number();
        });
        // SAFETY: pointers with their lengths.
        unsafe {
            check(kvt_policy_switch(policy, spec.as_ptr().cast(), spec.len() as u64, err));
            check(kvt_policy_set_capacity(policy, tape.number()));
            check(kvt_policy_set_advice(policy, rules.ptr(), err));
        }
    }
}
