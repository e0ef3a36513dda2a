//! Who has a sparse policy: one call at a time, and one account that pays.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::ffi::abi::{enter, inspect, noun};
use crate::ffi::sparse::kvt_sparse_t;
use crate::sparse::{CheckedPolicy, Index, RetainedTokens, Traits};

/// A policy with its last answers, and who pays for it.
pub(crate) struct Seat {
    pub(crate) served: CheckedPolicy,
    pub(crate) index: Index,
    pub(crate) keep: RetainedTokens,
    pub(crate) ids: Vec<u32>,
    account: Option<Arc<Account>>,
    paid_bytes: u64,
}

impl Seat {
    pub(crate) fn new(served: CheckedPolicy, account: Option<Arc<Account>>) -> Result<Box<Seat>> {
        let (index, keep) = (Index::default(), RetainedTokens::default());
        let seat = Seat { served, index, keep, ids: Vec::new(), account, paid_bytes: 0 };
        let mut seat = Box::new(seat);
        seat.pay()?;
        Ok(seat)
    }

    /// Pays for what the policy keeps now. Asked before it is told more: what it was told
    /// last is known, and may have been more than there was room for.
    pub(crate) fn pay(&mut self) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        let now = self.served.state_bytes();
        if now < self.paid_bytes {
            account.give_back(Tier::Host, self.paid_bytes - now);
        } else if let Err(error) = account.take(Tier::Host, now - self.paid_bytes) {
            return Err(error.within("what the policy knows of the sequence"));
        }
        self.paid_bytes = now;
        Ok(())
    }

    /// A copy, for which the same account pays.
    pub(crate) fn fork(&mut self) -> Result<Box<Seat>> {
        Seat::new(self.served.fork()?, self.account.clone())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.give_back(Tier::Host, self.paid_bytes);
        }
    }
}

/// Taken out while a call uses it: a policy by callbacks is called under no lock.
pub(crate) struct SparseNoun {
    seat: Mutex<Option<Box<Seat>>>,
    /// What it is like, which callbacks of its own may ask.
    pub(crate) traits: Traits,
}

impl SparseNoun {
    pub(crate) fn new(seat: Box<Seat>) -> SparseNoun {
        let traits = *seat.served.traits();
        SparseNoun { seat: Mutex::new(Some(seat)), traits }
    }

    /// Calls `body` with the policy, which nobody else has meanwhile.
    fn take<R>(&self, body: impl FnOnce(&mut Seat) -> Result<R>) -> Result<R> {
        let Some(seat) = self.seat.lock().take() else {
            fail!(Busy, "another call is inside of the policy");
        };
        let mut taken = Taken { noun: self, seat: Some(seat) };
        match &mut taken.seat {
            Some(seat) => body(seat),
            None => Err(Status::State.into()),
        }
    }
}

/// Puts a policy back when it is dropped: after a panic, too, so that it can be looked at, and
/// is closed as usual.
struct Taken<'a> {
    noun: &'a SparseNoun,
    seat: Option<Box<Seat>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.noun.seat.lock() = self.seat.take();
    }
}

noun!(SparseNoun, kvt_sparse_t, 15, "sparse policy");

/// Calls `body` with a policy that nobody else uses meanwhile.
pub(crate) fn with_seat<R>(
    handle: *const kvt_sparse_t,
    body: impl FnOnce(&mut Seat) -> Result<R>,
) -> Result<R> {
    enter(handle)?.take(body)
}

/// The same for what only looks: allowed of a policy in which a defect was caught, too.
pub(crate) fn look_at_seat<R>(
    handle: *const kvt_sparse_t,
    body: impl FnOnce(&mut Seat) -> Result<R>,
) -> Result<R> {
    inspect(handle)?.take(body)
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic)]
mod tests {
    use std::ptr::null_mut;

    use super::*;
    use crate::base::panic::catch;
    use crate::ffi::abi::Plain;
    use crate::ffi::abi::insert;
    use crate::ffi::sparse::{
        kvt_sparse_close, kvt_sparse_fork, kvt_sparse_stats, kvt_sparse_stats_t,
    };
    use crate::ffi::sparse_tell::kvt_sparse_reset;
    use crate::sparse::{Kind, Shape};

    const SHAPE: Shape = Shape {
        layers: 1,
        query_heads: 1,
        key_heads: 1,
        key_dim: 4,
        value_dim: 4,
        scale: 0.0,
        kind: Kind::Split,
        block_tokens: 16,
        max_tokens: 64,
    };

    #[test]
    fn a_policy_in_which_a_defect_was_caught_is_looked_at_and_closed() {
        let seat =
            Seat::new(CheckedPolicy::open("full", &SHAPE).expect("sound"), None).expect("free");
        let mut handle = insert(SparseNoun::new(seat)).expect("room");
        let caught = catch(|| with_seat(handle, |_| -> Result<()> { panic!("on purpose") }));
        assert!(caught.is_err());
        let mut stats = kvt_sparse_stats_t::zeroed();
        stats.struct_size = size_of::<kvt_sparse_stats_t>() as u64;
        let mut copy = null_mut();
        // SAFETY: valid pointers.
        unsafe {
            assert_eq!(kvt_sparse_stats(handle, &raw mut stats), Status::Ok.code());
            assert_eq!(kvt_sparse_fork(handle, &raw mut copy, null_mut()), Status::Panic.code());
            assert_eq!(kvt_sparse_reset(handle), Status::Panic.code());
            assert_eq!(kvt_sparse_close(&raw mut handle), Status::Ok.code());
        }
        assert!(handle.is_null() && copy.is_null());
    }

    #[test]
    fn a_call_inside_of_another_is_refused_and_the_policy_is_there_afterwards() {
        let seat =
            Seat::new(CheckedPolicy::open("full", &SHAPE).expect("sound"), None).expect("free");
        let mut handle = insert(SparseNoun::new(seat)).expect("room");
        let inner = with_seat(handle, |_| Ok(with_seat(handle, |_| Ok(())))).expect("alone");
        assert_eq!(inner.expect_err("inside").status(), Status::Busy);
        with_seat(handle, |_| Ok(())).expect("alone again");
        // SAFETY: a valid pointer.
        assert_eq!(unsafe { kvt_sparse_close(&raw mut handle) }, Status::Ok.code());
    }
}
