//! Staging memory: for transfers that are not possible in place, and for encoding and moving cells.
//! The account of the tier pays for it.
//!
//! Writing cells back frees memory, so it must not depend on free memory. A *reserve* is taken when
//! the tier is opened; a thread that finds nothing else waits for a part of it. Further memory is
//! taken while the account has room.
//!
//! A thread with *scratch* memory may request a *buffer*, and then a *block*; never in another
//! order, and never two of one kind. So every wait ends: the thread that has the memory can
//! proceed.

use std::collections::VecDeque;

use crate::base::account::Account;
use crate::base::budget::{Tier, TierUsage};
use crate::base::fork::page_bytes;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::op::{OpOpts, RELEASED};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::fail;
use crate::format::segment::BLOCK_BYTES;

/// Bytes of a staging buffer; it is several times the largest header of a record.
pub(super) const STAGING_BYTES: u64 = 1 << 20;
const MAX_IDLE: usize = 4;
/// Longer memory is not kept for reuse.
const MAX_IDLE_BYTES: u64 = 16 << 20;
/// Divisor of the budget: the most memory kept for reuse beyond the reserve. Cells need the rest
/// more.
const IDLE_PART: u64 = 16;
/// Time in which other owners must free memory for a cell longer than the reserve.
const PATIENCE_NS: u64 = 10_000_000_000;

/// Use of the memory.
#[derive(Clone, Copy)]
enum Kind {
    /// A header without cells.
    Block,
    /// Headers of a batch, and unaligned bytes.
    Buffer,
    /// Cells being encoded or moved.
    Scratch,
}

const KINDS: usize = 3;
/// For each kind: number of parts of the reserve, and bytes of a part.
const RESERVE: [(usize, u64); KINDS] =
    [(4, BLOCK_BYTES as u64), (2, STAGING_BYTES), (1, 3 * STAGING_BYTES)];

/// Bytes that an account pays while the tier is open.
pub const RESERVE_BYTES: u64 = reserve_bytes();

const fn reserve_bytes() -> u64 {
    let (mut bytes, mut kind) = (0, 0);
    while kind < KINDS {
        bytes += RESERVE[kind].0 as u64 * RESERVE[kind].1;
        kind += 1;
    }
    bytes
}

/// Memory of one kind.
#[derive(Default)]
struct Pool {
    /// Free parts of the reserve.
    reserve: Vec<Buffer>,
    /// Threads that wait for a part, in order.
    line: VecDeque<u64>,
    /// Free memory beyond the reserve.
    idle: Vec<Buffer>,
    /// All bytes of this kind.
    bytes: u64,
}

#[derive(Default)]
struct Stock {
    pools: [Pool; KINDS],
    idle_bytes: u64,
    tickets: u64,
}

/// Staging memory of a tier.
pub(super) struct Staging {
    stock: Mutex<Stock>,
    /// Signals the return of a part of the reserve.
    returned: Condvar,
    account: Option<Arc<Account>>,
}

/// Staging memory in use; dropping it returns it.
pub struct StagingGuard<'a> {
    staging: &'a Staging,
    kind: Kind,
    is_reserve: bool,
    buffer: Option<Buffer>,
    /// Dropped last: the charge ends when the memory is unmapped.
    paid: Option<Paid>,
}

/// Bytes charged apart from their buffer.
struct Paid {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Paid {
    fn drop(&mut self) {
        self.account.give_back(Tier::Host, self.bytes);
    }
}

impl StagingGuard<'_> {
    /// The address of `offset`, if `bytes` bytes from there are inside.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        self.buffer.as_ref()?.range(offset, bytes)
    }

    /// First address.
    pub fn address(&self) -> *mut u8 {
        self.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::address)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.buffer.as_ref().map_or(0, Buffer::bytes)
    }
}

impl Drop for StagingGuard<'_> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let may_retain = self.paid.is_none() && buffer.bytes() <= MAX_IDLE_BYTES;
        self.staging.take_back(self.kind, buffer, self.is_reserve, may_retain);
    }
}

impl Staging {
    /// Staging memory without a reserve.
    pub fn new(account: Option<Arc<Account>>) -> Staging {
        Staging { stock: Mutex::new(Stock::default()), returned: Condvar::new(), account }
    }

    /// Staging memory with a reserve, if there is an account. BUDGET = the account cannot pay.
    pub fn open(account: Option<Arc<Account>>) -> Result<Staging> {
        let staging = Staging::new(account);
        let Some(account) = &staging.account else { return Ok(staging) };
        let mut stock = Stock::default();
        for (pool, (parts, bytes)) in stock.pools.iter_mut().zip(RESERVE) {
            for _ in 0..parts {
                let part = staging.map(bytes).map_err(|error| too_little(error, account))?;
                pool.bytes += part.charged_bytes();
                pool.reserve.push(part);
            }
        }
        *staging.stock.lock() = stock;
        Ok(staging)
    }

    /// Page-aligned memory of `bytes` bytes, for the caller only.
    pub fn map(&self, bytes: u64) -> Result<Buffer> {
        let request = AllocationRequest {
            bytes,
            account: self.account.clone(),
            ..AllocationRequest::default()
        };
        Buffer::map(&request, None)
    }

    /// A block. A thread that has one requests nothing else.
    pub fn block(&self) -> Result<StagingGuard<'_>> {
        self.acquire(Kind::Block, BLOCK_BYTES as u64, BLOCK_BYTES as u64)
    }

    /// A buffer of [`STAGING_BYTES`].
    pub fn take(&self) -> Result<StagingGuard<'_>> {
        self.acquire(Kind::Buffer, STAGING_BYTES, STAGING_BYTES)
    }

    /// Memory of `most` bytes, or fewer if less is free, but at least `least`.
    pub fn scratch(&self, least: u64, most: u64) -> Result<StagingGuard<'_>> {
        self.acquire(Kind::Scratch, least.min(most), most)
    }

    /// Bytes of scratch memory, in use or kept.
    pub fn scratch_bytes(&self) -> u64 {
        self.stock.lock().pools[Kind::Scratch as usize].bytes
    }

    /// Bytes of all memory, in use or kept.
    pub fn bytes(&self) -> u64 {
        self.stock.lock().pools.iter().map(|pool| pool.bytes).sum()
    }

    /// Returns memory kept beyond the reserve; how many bytes that was.
    pub fn trim(&self) -> u64 {
        let mut freed = Vec::new();
        let mut stock = self.stock.lock();
        for pool in &mut stock.pools {
            pool.bytes -= pool.idle.iter().map(Buffer::charged_bytes).sum::<u64>();
            freed.append(&mut pool.idle);
        }
        stock.idle_bytes = 0;
        drop(stock);
        freed.iter().map(Buffer::charged_bytes).sum()
    }

    fn acquire(&self, kind: Kind, least: u64, most: u64) -> Result<StagingGuard<'_>> {
        if let Some(guard) = self.pick(kind, most) {
            return Ok(guard);
        }
        let error = match self.map_more(kind, most) {
            Ok(guard) => return Ok(guard),
            Err(error) => error,
        };
        if self.account.is_some() && least <= RESERVE[kind as usize].1 {
            return Ok(self.await_reserve(kind));
        }
        if least == 0 {
            return Err(error);
        }
        match (self.map_more(kind, least), &self.account) {
            (Err(error), Some(account)) if error.status() == Status::Budget => {
                self.await_memory(account, kind, least)
            }
            (result, _) => result,
        }
    }

    fn guard(&self, kind: Kind, buffer: Buffer, is_reserve: bool) -> StagingGuard<'_> {
        StagingGuard { staging: self, kind, is_reserve, buffer: Some(buffer), paid: None }
    }

    /// Free memory that is long enough. Drops one kept buffer that is too short.
    fn pick(&self, kind: Kind, bytes: u64) -> Option<StagingGuard<'_>> {
        let mut guard = self.stock.lock();
        let stock = &mut *guard;
        let pool = &mut stock.pools[kind as usize];
        let may_have = bytes <= RESERVE[kind as usize].1 && pool.line.is_empty();
        if let Some(part) = if may_have { pool.reserve.pop() } else { None } {
            return Some(self.guard(kind, part, true));
        }
        let long = pool.idle.iter().position(|buffer| buffer.bytes() >= bytes);
        let buffer = match long {
            Some(at) => pool.idle.swap_remove(at),
            None => pool.idle.pop()?,
        };
        stock.idle_bytes -= buffer.charged_bytes();
        if long.is_some() {
            return Some(self.guard(kind, buffer, false));
        }
        pool.bytes -= buffer.charged_bytes();
        drop(guard);
        drop(buffer);
        None
    }

    /// Takes memory beyond the reserve.
    fn map_more(&self, kind: Kind, bytes: u64) -> Result<StagingGuard<'_>> {
        let buffer = self.map(bytes)?;
        self.stock.lock().pools[kind as usize].bytes += buffer.charged_bytes();
        Ok(self.guard(kind, buffer, false))
    }

    /// Waits for a part of the reserve.
    fn await_reserve(&self, kind: Kind) -> StagingGuard<'_> {
        let mut stock = self.stock.lock();
        stock.tickets += 1;
        let ticket = stock.tickets;
        stock.pools[kind as usize].line.push_back(ticket);
        loop {
            let pool = &mut stock.pools[kind as usize];
            let is_next = pool.line.front() == Some(&ticket);
            if let Some(part) = if is_next { pool.reserve.pop() } else { None } {
                pool.line.pop_front();
                if !pool.line.is_empty() && !pool.reserve.is_empty() {
                    self.returned.notify_all();
                }
                return self.guard(kind, part, true);
            }
            self.returned.wait(&mut stock);
        }
    }

    /// Waits for memory longer than the parts of the reserve: other owners must free some.
    fn await_memory(
        &self,
        account: &Arc<Account>,
        kind: Kind,
        bytes: u64,
    ) -> Result<StagingGuard<'_>> {
        let core = account.budget().core();
        let bytes = bytes.next_multiple_of(page_bytes() as u64);
        let deadline_ns = core.clock().now_ns().saturating_add(PATIENCE_NS);
        let opts = OpOpts { deadline_ns, ..OpOpts::default() };
        let op = account.reserve_later(Tier::Host, bytes, &opts)?;
        let waited = op.wait(RELEASED, 0);
        let status = op.info().status;
        op.remove();
        waited?;
        if status != Some(Status::Ok.code()) {
            fail!(
                Budget,
                "no memory for a cell that needs {bytes} bytes at once: raise the host budget"
            );
        }
        account.commit(Tier::Host, bytes, bytes)?;
        let paid = Paid { account: account.clone(), bytes };
        let buffer =
            Buffer::map(&AllocationRequest { bytes, ..AllocationRequest::default() }, None)?;
        self.stock.lock().pools[kind as usize].bytes += bytes;
        let mut guard = self.guard(kind, buffer, false);
        guard.paid = Some(paid);
        Ok(guard)
    }

    fn take_back(&self, kind: Kind, buffer: Buffer, is_reserve: bool, may_retain: bool) {
        let most_idle = if is_reserve || !may_retain { 0 } else { self.most_idle() };
        let mut guard = self.stock.lock();
        let stock = &mut *guard;
        let pool = &mut stock.pools[kind as usize];
        let bytes = buffer.charged_bytes();
        if is_reserve {
            pool.reserve.push(buffer);
            self.returned.notify_all();
        } else if pool.idle.len() < MAX_IDLE && stock.idle_bytes.saturating_add(bytes) <= most_idle
        {
            stock.idle_bytes += bytes;
            pool.idle.push(buffer);
        } else {
            pool.bytes -= bytes;
            drop(guard);
            drop(buffer);
        }
    }

    /// Bytes that may be kept beyond the reserve now.
    fn most_idle(&self) -> u64 {
        let all = KINDS as u64 * MAX_IDLE as u64 * MAX_IDLE_BYTES;
        let Some(account) = &self.account else { return all };
        match account.budget().usage(Tier::Host) {
            TierUsage { waiting: 0, limit_bytes, .. } => all.min(limit_bytes / IDLE_PART),
            _ => 0,
        }
    }
}

fn too_little(error: Error, account: &Account) -> Error {
    if error.status() != Status::Budget {
        return error;
    }
    let usage = account.budget().usage(Tier::Host);
    let text = format!(
        "{RESERVE_BYTES} bytes of memory are needed for disk transfers, and too few of the \
         budget's {} bytes of tier host are free{}: raise its limit, release memory of other \
         owners, or open the store without a disk",
        usage.limit_bytes,
        account.budget().reserve_note(Tier::Host)
    );
    Error::new(Status::Budget, text)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::base::budget::{Budget, BudgetOpts};
    use crate::base::runtime::{Runtime, RuntimeOpts};
    use crate::base::sync::atomic::{AtomicU64, Ordering};
    use crate::base::sync::spawn;

    const ROOM: u64 = 8 << 20;

    fn budget(host_bytes: u64) -> (Runtime, Arc<Budget>, Arc<Account>) {
        let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
        let mut opts = BudgetOpts { reserve_bytes: Some(0), ..BudgetOpts::default() };
        opts.limits[Tier::Host as usize] = Some(host_bytes);
        let budget = Budget::open(runtime.core(), &opts).unwrap();
        let account = budget.account("disk", 0, None).unwrap();
        (runtime, budget, account)
    }

    fn held(account: &Account) -> u64 {
        account.held(Tier::Host).committed_bytes
    }

    #[test]
    fn the_account_pays_for_the_whole_reserve_or_opening_fails() {
        let (_runtime, budget, account) = budget(RESERVE_BYTES);
        let staging = Staging::open(Some(account.clone())).unwrap();
        assert_eq!((held(&account), staging.bytes()), (RESERVE_BYTES, RESERVE_BYTES));
        let other = budget.account("other", 0, None).unwrap();
        let error = Staging::open(Some(other.clone())).err().unwrap();
        assert_eq!(error.status(), Status::Budget);
        for words in [&RESERVE_BYTES.to_string()[..], "raise", "without a disk"] {
            assert!(error.message().contains(words), "{error}");
        }
        assert_eq!(held(&other), 0);
        // Every kind is available, even with nothing beside the reserve.
        let (scratch, buffer) = (staging.scratch(0, 12 << 20).unwrap(), staging.take().unwrap());
        let block = staging.block().unwrap();
        let bytes = [&scratch, &buffer, &block].map(|guard| guard.bytes());
        assert_eq!(bytes, [3 << 20, STAGING_BYTES, BLOCK_BYTES as u64]);
        assert!(scratch.range(3 << 20, 1).is_none());
        drop((scratch, buffer, block));
        drop(staging);
        assert_eq!(held(&account), 0);
    }

    #[test]
    fn memory_beyond_the_reserve_is_kept_up_to_a_limit() {
        let (_runtime, _budget, account) = budget(RESERVE_BYTES + 64 * ROOM);
        let staging = Staging::open(Some(account.clone())).unwrap();
        let all: Vec<_> = (0..6).map(|_| staging.scratch(1, ROOM).unwrap()).collect();
        assert!(all.iter().all(|guard| guard.bytes() == ROOM));
        assert_eq!(staging.scratch_bytes(), 6 * ROOM + (3 << 20));
        drop(all);
        // Kept memory is limited to 1/16 of the budget and to a fixed length.
        assert_eq!(staging.bytes(), held(&account));
        assert_eq!(staging.bytes(), RESERVE_BYTES + 4 * ROOM);
        let idle = staging.scratch(1, ROOM).unwrap();
        assert_eq!(staging.bytes(), RESERVE_BYTES + 4 * ROOM);
        drop(idle);
        assert_eq!(staging.trim(), 4 * ROOM);
        assert_eq!((staging.bytes(), held(&account)), (RESERVE_BYTES, RESERVE_BYTES));
        assert_eq!(staging.trim(), 0);
        // Where little memory is free nothing is kept.
        account.budget().resize(Tier::Host, RESERVE_BYTES + ROOM).unwrap();
        drop(staging.scratch(1, ROOM).unwrap());
        assert_eq!(held(&account), RESERVE_BYTES);
    }

    #[test]
    fn a_request_longer_than_the_reserve_waits_for_memory() {
        let (_runtime, budget, account) = budget(RESERVE_BYTES + ROOM);
        let staging = Arc::new(Staging::open(Some(account.clone())).unwrap());
        let others = budget.account("others", 0, None).unwrap();
        others.take(Tier::Host, ROOM).unwrap();
        let requester = staging.clone();
        let thread = spawn("requester".into(), move || {
            let guard = requester.scratch(5 << 20, 6 << 20).unwrap();
            assert_eq!((guard.bytes(), requester.bytes()), (5 << 20, RESERVE_BYTES + (5 << 20)));
        });
        while budget.usage(Tier::Host).waiting == 0 {
            std::thread::yield_now();
        }
        others.give_back(Tier::Host, ROOM);
        thread.unwrap().join().unwrap();
        assert_eq!(held(&account), RESERVE_BYTES);
        // A request that can never be met does not wait.
        let error = staging.scratch(ROOM * 2, ROOM * 2).err().unwrap();
        assert_eq!(error.status(), Status::Budget);
    }

    #[test]
    fn threads_that_share_the_reserve_all_proceed() {
        const THREADS: u64 = 6;
        const TURNS: u64 = 400;
        let (_runtime, budget, account) = budget(RESERVE_BYTES);
        let staging = Arc::new(Staging::open(Some(account.clone())).unwrap());
        let ended = Arc::new(AtomicU64::new(0));
        let turn = |staging: &Staging, number: u64, turn: u64| {
            let scratch = (turn % 3 > 0).then(|| staging.scratch(1, 12 << 20).unwrap());
            let buffer = (turn % 4 > 0).then(|| staging.take().unwrap());
            let block = staging.block().unwrap();
            for guard in [&scratch, &buffer].into_iter().flatten().chain([&block]) {
                // SAFETY: memory in use by this thread only, and longer than that.
                unsafe {
                    guard.address().cast::<u64>().write_volatile(number);
                    std::thread::yield_now();
                    assert_eq!(guard.address().cast::<u64>().read_volatile(), number);
                }
            }
        };
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let (staging, ended) = (staging.clone(), ended.clone());
                spawn(format!("t{number}"), move || {
                    (0..TURNS).for_each(|at| turn(&staging, number, at + number));
                    ended.fetch_add(1, Ordering::Relaxed);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.unwrap().join().unwrap());
        assert_eq!(ended.load(Ordering::Relaxed), THREADS);
        assert_eq!((staging.bytes(), held(&account)), (RESERVE_BYTES, RESERVE_BYTES));
        assert_eq!(budget.usage(Tier::Host).peak_bytes, RESERVE_BYTES);
    }
}
