//! The machine's instructions for what a store has of others: its remote, and who watches it.

use std::ptr::{null, null_mut};

use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::media::kvt_namespace_chunk_keys;
use kvtier::ffi::op::kvt_submit_opts_t;
use kvtier::ffi::remote::*;
use kvtier::ffi::status::*;
use kvtier::ffi::store_events::kvt_store_watch;

use super::store::{media, sequence, tokens};
use super::{Machine, Padded, Tape, check, out};

impl Machine {
    pub(super) fn ask_store(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let what = tape.byte() % 5;
        if what == 3 {
            return self.name_chunks(tape, err);
        }
        if what == 4 {
            let mut stats = out::<kvt_remote_stats_t>();
            // SAFETY: a valid pointer.
            check(unsafe { kvt_store_remote(self.kv.stores.pick(tape), stats.ptr()) });
            return;
        }
        let queue = if tape.byte() > 128 { self.queues.pick(tape) } else { null_mut() };
        let now = self.now();
        let mut opts = Padded::<kvt_submit_opts_t>::new(tape, |o, t| {
            o.queue = queue;
            o.tag = t.number();
            o.deadline_ns = if t.byte() > 128 { now + u64::from(t.byte()) * 1000 } else { 0 };
            o.flags = u64::from(t.byte() > 250);
        });
        let opts = if tape.byte() > 250 { null() } else { opts.ptr().cast_const() };
        let (mut room, mut ends) = ([0; 64], [0; 8]);
        room.iter_mut().for_each(|byte| *byte = tape.byte() % 2);
        let mut names = Machine::names(tape, &room, &mut ends);
        let mut op = null_mut();
        let to = if tape.byte() > 220 { null_mut() } else { &mut op };
        let (store, session) = (self.kv.stores.pick(tape), self.kv.sessions.pick(tape));
        let from = if tape.byte() > 200 { u64::MAX } else { tape.number() % 64 };
        // SAFETY: valid pointers.
        let status = check(unsafe {
            match what {
                0 => kvt_session_locate(session, opts, to, err),
                1 => kvt_session_locate_blocks(session, names.ptr(), opts, to, err),
                _ => kvt_store_watch(store, from, opts, to, err),
            }
        });
        assert!(status == KVT_OK || op.is_null());
        self.ops.live.extend((!op.is_null()).then_some(op));
    }

    fn name_chunks(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let (space, tokens, media) = (self.kv.spaces.pick(tape), tokens(tape), media(tape));
        let mut given = sequence(tape, &tokens, &media);
        let (mut keys, mut count) = ([9u8; 32 * 8], 0);
        let capacity = u64::from(tape.byte() % 9);
        let to = if tape.byte() > 220 { null_mut() } else { keys.as_mut_ptr() };
        // SAFETY: room for as many keys as are said.
        let status = check(unsafe {
            kvt_namespace_chunk_keys(space, given.ptr(), to, capacity, &mut count, err)
        });
        let written = if status == KVT_OK && !to.is_null() { count as usize * 32 } else { 0 };
        assert!(keys[written..].iter().all(|&byte| byte == 9), "{status}, {count}");
    }
}
