//! Inspection and control of a running store: where the cells of a session are, recent evictions,
//! the policies, and how much memory their tables take.

use crate::base::budget::{ALL_TIERS, Tier};
use crate::base::spec::Spec;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::meta::chunks::{self, Residency};
use crate::meta::index::{NONE, Slot};
use crate::policy::custom;
use crate::policy::log::Entry;
use crate::store::events::{Event, Kind};
use crate::store::state::config::LEAST_HOST_BYTES;
use crate::store::state::session::Session;
use crate::store::state::shadow::{Plan, Score, Shadow};
use crate::store::state::tier_cache::TierCache;
use crate::store::state::{At, Namespace, StoreState};
use crate::store::state::{DEVICE_MASK, DISK_MASK, HOST_MASK};

/// Most sessions in one list.
pub const MOST_SESSIONS: usize = 1024;
/// Most chunks in one table.
pub const MOST_CHUNKS: usize = 1024;
/// Most cells in one table.
pub const MOST_CELLS: usize = 1 << 18;
/// Most evictions in one list.
pub const MOST_EVICTIONS: usize = 4096;
/// Most chunks that one call of [`StoreState::residents`] visits.
const MOST_VISITED: u64 = 4096;
/// Cursor of [`StoreState::residents`] after the last chunk.
pub const ALL_READ: u64 = u64::MAX;
/// A cursor is a table, a slot in it, and one of the slot's tiers in the lowest bits.
const TIER_BITS: u32 = 2;
const ROW_BITS: u32 = Slot::BITS + TIER_BITS;
const _: () = assert!(chunks::TIERS == 1 << TIER_BITS);

/// An open session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionSnapshot {
    /// Its number.
    pub number: u32,
    /// Counts sessions: the latest has the largest.
    pub serial: u64,
    /// Number of its namespace.
    pub namespace: u32,
    /// Its tenant.
    pub tenant: u32,
    /// Its priority class, if it has one.
    pub priority: Option<u8>,
    /// Its tokens.
    pub tokens: u64,
    /// Its chunks, the partial one included.
    pub chunks: u64,
    /// Layers of its layout.
    pub layers: u64,
}

/// Residency of a session's cells, one letter each: `G` in device memory (and elsewhere), `M` in
/// host memory, `D` on disk, `B` in both, `~` in motion, `.` nowhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableSnapshot {
    /// The session.
    pub session: SessionSnapshot,
    /// First chunk shown.
    pub first_chunk: u64,
    /// A row for each layer, a letter for each chunk.
    pub rows: Vec<String>,
}

/// A shadow evaluation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShadowSnapshot {
    /// It is running.
    pub is_on: bool,
    /// Time since it began, or how long it ran.
    pub elapsed_ns: u64,
    /// Time until it ends.
    pub left_ns: u64,
    /// Score of each policy; a copy of the live one is first.
    pub scores: Vec<Score>,
}

/// Use of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSnapshot {
    /// Limit in bytes.
    pub limit_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes of cells among the bytes in use.
    pub live_bytes: u64,
    /// Watermarks in bytes: eviction begins at the first and ends at the second.
    pub marks_bytes: [u64; 2],
}

impl StoreState {
    /// The clock, as of the last tick.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn cache(&self, tier: Tier) -> Result<&TierCache> {
        match (tier, &self.eviction.disk) {
            (Tier::Host, _) => Ok(&self.eviction.host),
            (Tier::Disk, Some(cache)) => Ok(cache),
            (Tier::Disk, None) => fail!(NotFound, "this store has no disk"),
            (Tier::Device, _) => match &self.replicas {
                Some(replicas) => Ok(&replicas.cache),
                None => fail!(NotFound, "this store has no device tier"),
            },
            _ => fail!(Unsupported, "tier {} has no policy", tier.name()),
        }
    }

    fn cache_mut(&mut self, tier: Tier) -> Result<&mut TierCache> {
        self.cache(tier)?;
        Ok(match (tier, &mut self.eviction.disk, &mut self.replicas) {
            (Tier::Disk, Some(cache), _) => cache,
            (Tier::Device, _, Some(replicas)) => &mut replicas.cache,
            _ => &mut self.eviction.host,
        })
    }

    /// Open sessions, up to [`MOST_SESSIONS`], the latest first.
    pub fn sessions_seen(&self, most: usize) -> Result<Vec<SessionSnapshot>> {
        let mut all = Vec::new();
        all.try_reserve_exact(self.sessions.len()).map_err(|_| Status::NoMem)?;
        all.extend(self.sessions.iter().filter_map(|(at, one)| self.session_seen(at, one)));
        all.sort_unstable_by_key(|one: &SessionSnapshot| std::cmp::Reverse(one.serial));
        all.truncate(most.min(MOST_SESSIONS));
        Ok(all)
    }

    fn session_seen(&self, number: u32, one: &Session) -> Option<SessionSnapshot> {
        let Namespace { table, .. } = *self.namespaces.get(one.namespace as usize)?;
        let layout = &self.tables.get(table as usize)?.layout;
        let tokens = one.path().tokens().len() as u64;
        Some(SessionSnapshot {
            number,
            serial: one.context.session.unwrap_or(0),
            namespace: one.namespace,
            tenant: one.context.tenant,
            priority: one.context.priority,
            tokens,
            chunks: tokens.div_ceil(u64::from(layout.chunk_tokens().max(1))),
            layers: layout.layers() as u64,
        })
    }

    /// Residency of a session, or of the latest one: up to [`MOST_CHUNKS`] chunks and
    /// [`MOST_CELLS`] cells from one chunk on.
    pub fn table_snapshot(
        &self,
        session: Option<u32>,
        first: u64,
        most: usize,
    ) -> Result<TableSnapshot> {
        let newest = || {
            let serial = |(_, one): &(u32, &Session)| one.context.session;
            self.sessions.iter().max_by_key(serial).map(|(number, _)| number)
        };
        let Some(number) = session.or_else(newest) else {
            fail!(NotFound, "no session is open");
        };
        let one = self.session(number)?;
        let Some(snapshot) = self.session_seen(number, one) else {
            return Err(Status::State.into());
        };
        let layers = snapshot.layers as usize;
        let most = most.min(MOST_CHUNKS).min(MOST_CELLS / layers.max(1));
        let slots = self.slots_seen(one, usize::try_from(first).unwrap_or(usize::MAX), most)?;
        let Some(rows) = self.table_of(one.namespace) else { return Err(Status::State.into()) };
        let mut sheet = Vec::new();
        sheet.try_reserve_exact(layers).map_err(|_| Status::NoMem)?;
        for layer in 0..layers {
            let marks = |&slot: &Slot| rows.chunks.marks(slot).and_then(|all| all.get(layer));
            let mut row = String::new();
            row.try_reserve_exact(slots.len()).map_err(|_| Status::NoMem)?;
            row.extend(slots.iter().map(|slot| letter(marks(slot).copied())));
            sheet.push(row);
        }
        Ok(TableSnapshot { session: snapshot, first_chunk: first, rows: sheet })
    }

    /// Rows of a session's chunks from one on, those included that others have stored since.
    fn slots_seen(&self, one: &Session, first: usize, most: usize) -> Result<Vec<Slot>> {
        let path = one.path();
        let Some(rows) = self.table_of(one.namespace) else { return Err(Status::State.into()) };
        let end = first.saturating_add(most).min(path.slots().len());
        let mut slots: Vec<Slot> = Vec::new();
        slots.try_reserve_exact(most).map_err(|_| Status::NoMem)?;
        slots.extend_from_slice(path.slots().get(first..end).unwrap_or_default());
        for (slot, key) in slots.iter_mut().zip(path.keys().get(first..end).unwrap_or_default()) {
            if *slot == NONE {
                *slot = rows.chunks.find(key).unwrap_or(NONE);
            }
        }
        let each = rows.layout.chunk_tokens().max(1) as usize;
        let has_tail = path.tokens().len() % each != 0;
        if slots.len() < most && end == path.slots().len() && first <= end && has_tail {
            slots.push(path.tail().unwrap_or(NONE));
        }
        Ok(slots)
    }

    /// Reads what is resident from a cursor on: an event for each tier that has all of a chunk.
    /// Returns how many were written, and the next cursor: [`ALL_READ`] after the last one. It
    /// visits at most [`MOST_VISITED`] rows, so it may write none before the end.
    pub fn residents(&self, from: u64, out: &mut [Event]) -> (usize, u64) {
        let (table, first) = (from >> ROW_BITS, from & ((1 << ROW_BITS) - 1));
        let Some(rows) = self.tables.get(table as usize) else { return (0, ALL_READ) };
        let most = (rows.chunks.most() as u64) << TIER_BITS;
        let end = most.min(first.saturating_add(MOST_VISITED << TIER_BITS));
        let mut written = 0;
        for row in first..end {
            let tier = ALL_TIERS[row as usize % chunks::TIERS];
            let at = At { table: table as u32, slot: (row >> TIER_BITS) as Slot };
            if rows.chunks.tiers_of(at.slot) >> tier as u8 & 1 == 0 {
                continue;
            }
            let Some(place) = out.get_mut(written) else {
                return (written, table << ROW_BITS | row);
            };
            if let Some(event) = self.residency_event(Kind::Stored, tier, at) {
                (*place, written) = (event, written + 1);
            }
        }
        let next = if end < most { table << ROW_BITS | end } else { (table + 1) << ROW_BITS };
        (written, next)
    }

    /// The last evictions of a tier, up to [`MOST_EVICTIONS`], the oldest first.
    pub fn evictions(&self, tier: Tier, tail: usize) -> Result<Vec<Entry>> {
        let log = &self.cache(tier)?.evictor.log;
        let tail = tail.min(MOST_EVICTIONS);
        let mut entries = Vec::new();
        entries.try_reserve_exact(tail).map_err(|_| Status::NoMem)?;
        entries.extend(log.since(log.next_number().saturating_sub(tail as u64)).copied());
        Ok(entries)
    }

    /// Canonical spec of a tier's policy.
    pub fn policy(&self, tier: Tier) -> Result<&str> {
        Ok(self.cache(tier)?.evictor.spec())
    }

    /// Switches a tier to another policy. It gets every chunk with its last access and number of
    /// uses, and the learned state of a policy of the same kind. On failure nothing changes.
    pub fn set_policy(&mut self, tier: Tier, spec: &str) -> Result<()> {
        custom::refuse(&Spec::parse(spec)?, "a store")?;
        self.cache_mut(tier)?.evictor.switch(spec)
    }

    /// Limit and use of a tier.
    pub fn tier_seen(&self, tier: Tier) -> Result<TierSnapshot> {
        self.cache(tier)?;
        let stats = self.stats_now();
        let (limit_bytes, used_bytes, live_bytes) = match tier {
            Tier::Disk => (stats.disk_limit_bytes, stats.disk_used_bytes, stats.disk_live_bytes),
            Tier::Device => {
                (stats.device_limit_bytes, stats.device_used_bytes, stats.device_live_bytes)
            }
            _ => (stats.host_limit_bytes, stats.host_cost_bytes, stats.host_used_bytes),
        };
        let share = |part: f64| (limit_bytes as f64 * part) as u64;
        let marks_bytes = [share(self.config.high), share(self.config.low)];
        Ok(TierSnapshot { limit_bytes, used_bytes, live_bytes, marks_bytes })
    }

    /// Changes the limit of host memory or of the disk.
    pub fn set_limit(&mut self, tier: Tier, bytes: u64) -> Result<()> {
        match tier {
            Tier::Host => self.set_host_bytes(bytes),
            Tier::Disk => self.set_disk_bytes(bytes),
            _ => fail!(
                Unsupported,
                "the limit of tier {} cannot be changed: use KVT_TIER_HOST or KVT_TIER_DISK",
                tier.name()
            ),
        }
    }

    /// Sets the limit of cells in host memory, in bytes. Chunks beyond it are evicted in the usual
    /// way, over time; nothing waits for it.
    pub fn set_host_bytes(&mut self, bytes: u64) -> Result<()> {
        if bytes < LEAST_HOST_BYTES {
            fail!(Invalid, "host={bytes}: at least {LEAST_HOST_BYTES} bytes are needed");
        }
        self.host.set_max_bytes(bytes)?;
        let high = self.config.high;
        self.config.host_bytes = bytes;
        self.eviction.host.set_bytes(bytes, high);
        // Chunks that could not be evicted before may be evicted now, and cells in a draining slab
        // must be evicted.
        self.eviction.refusals = 0;
        self.eviction.reclaim_targets.begin();
        self.settle();
        Ok(())
    }

    /// Sets the limit of the disk, in bytes. Chunks beyond it are evicted; space is freed when
    /// segments are swept and compacted.
    pub fn set_disk_bytes(&mut self, bytes: u64) -> Result<()> {
        let (Some(disk), Some(cache)) = (self.disk.clone(), &mut self.eviction.disk) else {
            fail!(NotFound, "this store has no disk");
        };
        disk.set_budget(bytes)?;
        cache.set_bytes(bytes, self.config.high);
        self.balance_disk();
        self.settle();
        Ok(())
    }

    /// Input of a shadow evaluation for a tier.
    pub fn plan_shadow(&self, tier: Tier) -> Result<Plan> {
        Plan::of(&self.cache(tier)?.evictor, self.config.high)
    }

    /// Begins a shadow evaluation for a tier.
    pub fn begin_shadow(&mut self, tier: Tier, shadow: Shadow) -> Result<()> {
        let now_ns = self.now_ns;
        self.cache_mut(tier)?.begin_shadow(now_ns, shadow)
    }

    /// Scores of a shadow evaluation, so far or final.
    pub fn shadow_snapshot(&mut self, tier: Tier) -> Result<ShadowSnapshot> {
        let now_ns = self.now_ns;
        let cache = self.cache_mut(tier)?;
        cache.tick(now_ns);
        match cache.shadow() {
            Some(shadow) => Ok(shadow_snapshot(shadow, now_ns)),
            None => fail!(NotFound, "no shadow evaluation is running or ended in this tier"),
        }
    }

    /// Ends a shadow evaluation and returns its scores.
    pub fn end_shadow(&mut self, tier: Tier) -> Result<ShadowSnapshot> {
        let now_ns = self.now_ns;
        match self.cache_mut(tier)?.end_shadow(now_ns) {
            Some(shadow) => Ok(shadow_snapshot(&shadow, now_ns)),
            None => fail!(NotFound, "no shadow evaluation is running or ended in this tier"),
        }
    }
}

fn shadow_snapshot(shadow: &Shadow, now_ns: u64) -> ShadowSnapshot {
    let (began_ns, end_ns) = shadow.span_ns;
    ShadowSnapshot {
        is_on: shadow.is_on(),
        elapsed_ns: now_ns.min(end_ns).saturating_sub(began_ns),
        left_ns: if shadow.is_on() { end_ns.saturating_sub(now_ns) } else { 0 },
        scores: shadow.scores(),
    }
}

fn letter(marks: Option<Residency>) -> char {
    let Some(marks) = marks else { return '.' };
    match marks.resident_tiers() {
        tiers if tiers & DEVICE_MASK != 0 => 'G',
        tiers if tiers & (HOST_MASK | DISK_MASK) == HOST_MASK | DISK_MASK => 'B',
        tiers if tiers & HOST_MASK != 0 => 'M',
        tiers if tiers & DISK_MASK != 0 => 'D',
        _ if marks.arriving() != 0 => '~',
        _ => '.',
    }
}
