//! The remote, as the core sees it: what is believed of it, what waits for it, what is counted.
//! Nothing here is certain: a hint says that an object was there when it was last heard of.

use std::collections::{BTreeMap, VecDeque};

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::object::ObjectKeys;
use crate::format::record;
use crate::meta::chunks::Cell;
use crate::store::admission::Admission;
use crate::store::events::Kind;
use crate::store::job_queues::{LANES, Queues};
use crate::store::state::remote_blocks::Located;
use crate::store::state::remote_fetch::Wanted;
use crate::store::state::remote_index::Known;
use crate::store::state::remote_lookup::Asking;
use crate::store::state::remote_prefetch::RemotePrefetch;
use crate::store::state::remote_timeouts::Watch;
use crate::store::state::{At, Config, StoreState, Write};
use crate::tier::remote::breaker::{Breaker, Heard, Way};
use crate::tier::remote::name::Names;
use crate::tier::remote::secret::Secret;
use crate::tier::remote::shape::Shape;
use crate::tier::remote::{Name, Trouble};

/// Names that are to be taken away at the remote, at most: more are forgotten.
const MOST_REMOVALS: usize = 1024;

/// A batch has more time than a request, by its bytes: what a share of a line of 1 Gbit/s carries.
const BYTES_PER_MS: u64 = 16 << 10;

/// How much longer a batch of so many bytes may take.
pub(super) fn time_of(bytes: u64) -> u64 {
    bytes.saturating_mul(1_000_000) / BYTES_PER_MS
}

/// What a store has of a remote.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// Bytes up to which layers are put together to an object.
    pub object_bytes: u64,
    /// Most bytes of an object that the remote takes.
    pub max_bytes: u64,
    /// Most objects of a batch.
    pub batch: usize,
    /// How many fetch at once; 0 = that is not known.
    pub fetchers: u32,
    /// When chunks are sent there.
    pub write: Write,
    /// Which.
    pub admission: String,
    /// How long a request may take, beside the time for its bytes.
    pub timeout_ns: u64,
    /// What was heard of a name counts for so long, if it was there.
    pub fresh_ns: u64,
    /// The same, if it was not.
    pub absent_ns: u64,
    /// How many names are remembered.
    pub known: usize,
    /// Sessions ask as soon as they have tokens.
    pub asks: bool,
    /// What is there then is fetched before anybody asks for it.
    pub fetches: bool,
    /// What names are keyed by, where objects are sealed.
    pub secret: Option<Secret>,
    /// What the breaker's chance begins with.
    pub seed: u64,
    /// Memory of those who fetch, send and ask, which is paid for with the tables.
    pub beside_bytes: u64,
}

impl Default for RemoteConfig {
    fn default() -> RemoteConfig {
        RemoteConfig {
            object_bytes: 1 << 20,
            max_bytes: 128 << 20,
            batch: 32,
            fetchers: 0,
            write: Write::Through,
            admission: "all".into(),
            timeout_ns: 250_000_000,
            fresh_ns: 60_000_000_000,
            absent_ns: 5_000_000_000,
            known: 1 << 16,
            asks: true,
            fetches: false,
            secret: None,
            seed: 0,
            beside_bytes: 0,
        }
    }
}

/// What is counted of a remote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteCounters {
    /// Names that were asked for.
    pub asked: u64,
    /// Of those, names that were there.
    pub found: u64,
    /// Names that were known without asking.
    pub remembered: u64,
    /// Objects that came.
    pub fetched: u64,
    /// Cells that came and were right.
    pub cells: u64,
    /// Bytes of those.
    pub fetched_bytes: u64,
    /// Bytes that came and were not wanted.
    pub wasted_bytes: u64,
    /// Objects that were said to be there and were not.
    pub absent: u64,
    /// Objects, or cells of them, that were not what they should be.
    pub corrupt: u64,
    /// Requests that were not answered in time, or not at all.
    pub late: u64,
    /// Of those, requests that took twice their time, and had not ended.
    pub hung: u64,
    /// Objects that were not fetched because the remote is left alone.
    pub avoided: u64,
    /// Objects that were sent.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Objects that somebody else had sent before.
    pub known_there: u64,
    /// Objects that could not be sent.
    pub failed_sends: u64,
    /// Chunks that were not sent: not admitted, or too many waited.
    pub refused: u64,
    /// Objects that were taken away because they were not what they should be, or were dropped.
    pub removed: u64,
}

impl RemoteCounters {
    /// Adds those of another life.
    pub fn add(&mut self, other: &RemoteCounters) {
        let RemoteCounters { asked, found, remembered, fetched, cells, fetched_bytes, .. } = *other;
        self.asked += asked;
        self.found += found;
        self.remembered += remembered;
        self.fetched += fetched;
        self.cells += cells;
        self.fetched_bytes += fetched_bytes;
        let RemoteCounters { wasted_bytes, absent, corrupt, late, hung, avoided, sent, .. } =
            *other;
        self.wasted_bytes += wasted_bytes;
        self.absent += absent;
        self.corrupt += corrupt;
        self.late += late;
        self.hung += hung;
        self.avoided += avoided;
        self.sent += sent;
        let RemoteCounters { sent_bytes, known_there, failed_sends, refused, removed, .. } = *other;
        self.sent_bytes += sent_bytes;
        self.known_there += known_there;
        self.failed_sends += failed_sends;
        self.refused += refused;
        self.removed += removed;
    }
}

/// A remote of a store.
pub(super) struct RemoteTier {
    pub config: RemoteConfig,
    pub breaker: Breaker,
    /// The first job of each object that is to be fetched.
    pub fetches: Queues,
    /// All objects that jobs wait for.
    pub wanted: BTreeMap<(At, u32), Wanted>,
    /// The jobs that wait for cells which are under way.
    pub awaited: BTreeMap<(At, u32), u32>,
    /// Objects that are to be sent, whose cells are held.
    pub outs: VecDeque<(At, u32)>,
    /// Bytes of those and of those that are under way.
    pub out_bytes: u64,
    /// Puts that wait for a chunk to be there.
    pub waits: BTreeMap<At, Vec<(u32, u32)>>,
    pub asking: Asking,
    pub remote_prefetch: RemotePrefetch,
    pub located: Located,
    pub known: Known,
    pub watch: Watch,
    pub removals: VecDeque<Name>,
    /// Batches under way that take names away: nothing is sent beside them.
    pub removing: u32,
    pub admission: Admission,
    pub counters: RemoteCounters,
    shapes: Vec<Option<Arc<Shape>>>,
    names: BTreeMap<u32, Arc<Names>>,
}

impl RemoteTier {
    /// That of a store, if it has one.
    pub fn open(config: &Config) -> Result<Option<Box<RemoteTier>>> {
        let Some(remote) = &config.remote else { return Ok(None) };
        Ok(Some(Box::new(RemoteTier {
            breaker: Breaker::new(remote.seed),
            fetches: Queues::new(config.max_jobs, config.max_sessions + 1)?,
            wanted: BTreeMap::new(),
            awaited: BTreeMap::new(),
            outs: VecDeque::new(),
            out_bytes: 0,
            waits: BTreeMap::new(),
            asking: Asking::default(),
            remote_prefetch: RemotePrefetch::default(),
            located: Located::default(),
            known: Known::new(remote.known)?,
            watch: Watch::default(),
            removals: VecDeque::new(),
            removing: 0,
            admission: Admission::open(&remote.admission, 0)?,
            counters: RemoteCounters::default(),
            shapes: Vec::new(),
            names: BTreeMap::new(),
            config: remote.clone(),
        })))
    }

    /// Whether nothing waits for it.
    pub fn is_quiet(&self) -> bool {
        self.is_quiet_to_fetch()
            && self.outs.is_empty()
            && !self.asking.waits()
            && self.removals.is_empty()
    }

    /// Whether no fetch waits.
    pub fn is_quiet_to_fetch(&self) -> bool {
        (0..LANES).all(|lane| self.fetches.waiting(lane).0 == 0)
    }

    /// Whether there is anything to be sent, or taken away, that may go now.
    pub fn has_to_send(&self) -> bool {
        self.removing == 0 && (!self.outs.is_empty() || !self.removals.is_empty())
    }

    /// Whether nothing is kept for anybody, as where nothing is under way.
    pub fn is_bare(&self) -> bool {
        self.is_quiet()
            && self.wanted.is_empty()
            && self.awaited.is_empty()
            && self.waits.is_empty()
            && self.out_bytes == 0
            && self.removing == 0
            && !self.asking.has_blocks()
    }

    /// What is not at rest, in words.
    pub fn words(&self) -> String {
        format!(
            "{} objects wanted, {} to be sent, {} bytes on their way, {} chunks waited for there",
            self.wanted.len(),
            self.outs.len(),
            self.out_bytes,
            self.waits.len(),
        )
    }

    /// Whether it is believed to be well enough to be fetched from.
    pub fn is_well(&self) -> bool {
        self.breaker.is_closed(Way::Read)
    }

    /// What became of a request, and whether it was to see if the remote is well again.
    pub fn heard<T>(
        &mut self,
        way: Way,
        result: &std::result::Result<T, Trouble>,
        probes: bool,
        now_ns: u64,
    ) {
        self.breaker.record(way, Heard::of(way, result), probes, now_ns);
        match result.as_ref().err() {
            Some(Trouble::Late | Trouble::Gone | Trouble::Later) => self.counters.late += 1,
            Some(Trouble::Nonsense | Trouble::Damaged) => self.counters.corrupt += 1,
            _ => {}
        }
    }

    /// An object is of no use to anybody.
    pub fn take_away(&mut self, name: Name) {
        if self.removals.len() < MOST_REMOVALS {
            self.removals.push_back(name);
        }
    }
}

impl StoreState {
    /// What is counted of the remote, if there is one.
    pub fn remote_counters(&self) -> Option<RemoteCounters> {
        self.remote.as_ref().map(|remote| remote.counters)
    }

    /// How the ways to the remote are, and how often they were given up.
    pub fn remote_breaker(&self) -> Option<&Breaker> {
        self.remote.as_ref().map(|remote| &remote.breaker)
    }

    /// How chunks of a board are cut into objects; none where the remote takes none so long.
    pub(super) fn remote_shape(&mut self, table: u32) -> Option<Arc<Shape>> {
        let remote = self.remote.as_mut()?;
        let at = table as usize;
        if remote.shapes.len() <= at {
            remote.shapes.resize(at + 1, None);
        }
        if remote.shapes[at].is_none() {
            let shape = Shape::new(&self.tables[at].layout, remote.config.object_bytes).ok()?;
            let (bytes, most) = (shape.most_bytes(), remote.config.max_bytes);
            if bytes > most {
                log::warn!("the remote takes {most} bytes at most: layers of {bytes} stay here");
            }
            remote.shapes[at] = Some(Arc::new(shape));
        }
        remote.shapes[at].clone().filter(|shape| shape.most_bytes() <= remote.config.max_bytes)
    }

    /// What objects of a namespace are called.
    pub(super) fn remote_names(&mut self, space: u32) -> Option<Arc<Names>> {
        let home = *self.spaces.get(space as usize)?;
        let fingerprint = self.tables[home.table as usize].fingerprint;
        let remote = self.remote.as_mut()?;
        if let Some(names) = remote.names.get(&space) {
            return Some(names.clone());
        }
        let secret = remote.config.secret.as_ref();
        let keys = ObjectKeys::new(&home.key, &fingerprint, secret.map(Secret::bytes));
        let names = Arc::new(Names::new(keys, home.tenant, Codec::None, secret.is_some()));
        remote.names.insert(space, names.clone());
        Some(names)
    }

    /// Whose a namespace's objects are at the remote; 0 = everybody's. INVALID = others have it
    /// open, and have said something else.
    pub fn set_tenant(&mut self, space: u32, tenant: u64) -> Result<()> {
        let Some(one) = self.spaces.get_mut(space as usize) else { return Ok(()) };
        if one.tenant == tenant {
            return Ok(());
        }
        if one.handles > 1 {
            fail!(Invalid, "that namespace is open for the remote's tenant {}", one.tenant);
        }
        one.tenant = tenant;
        if let Some(remote) = &mut self.remote {
            remote.names.remove(&space);
        }
        Ok(())
    }

    /// A namespace is forgotten: its number will be another's.
    pub(super) fn forget_remote_names(&mut self, space: u32) {
        if let Some(remote) = &mut self.remote {
            remote.names.remove(&space);
        }
    }

    /// A board will be another layout's.
    pub(super) fn forget_remote_shape(&mut self, table: u32) {
        let shapes = self.remote.as_mut().map(|remote| &mut remote.shapes);
        if let Some(shape) = shapes.and_then(|all| all.get_mut(table as usize)) {
            *shape = None;
        }
    }

    /// What a chunk is called in an object. What is before it is not said: its key commits to
    /// that, and where chunks leave in any order nobody may know it any more.
    pub(super) fn remote_record(&self, at: At) -> record::Chunk {
        let chunk = self.record_of(at);
        record::Chunk { parent: chunk.namespace, ..chunk }
    }

    /// The name of an object of a chunk.
    pub(super) fn remote_name(&mut self, at: At, shape: &Shape, object: u32) -> Option<Name> {
        let rows = &self.tables[at.table as usize].chunks;
        let (space, key) = (rows.chunk(at.slot)?.namespace(), *rows.key(at.slot)?);
        let names = self.remote_names(space)?;
        Some(names.name(&key, &shape.cut(object as usize)))
    }

    /// Lookups believe hints as long as the remote is well.
    pub(super) fn follow_breaker(&mut self) {
        let Some(remote) = &self.remote else { return };
        let is_well = remote.is_well();
        self.tables.iter_mut().for_each(|table| table.chunks.count_remote(is_well));
    }

    /// The remote has not got an object, or nothing sound under its name. Who calls this says so
    /// with [`StoreState::note_remote_index`].
    pub(super) fn unhint(&mut self, at: At, layers: std::ops::Range<u32>) {
        for layer in layers {
            let cell = Cell { chunk: at.slot, layer: layer as usize };
            if let Err(error) = self.tables[at.table as usize].chunks.begin_drop(cell, Tier::Remote)
            {
                log::error!("a hint could not be forgotten: {error}");
            }
        }
    }

    /// A chunk is not wanted any more: what the remote is known to have of it is taken away there,
    /// as far as that goes.
    pub(super) fn drop_remote(&mut self, at: At) {
        let before = self.remote_cells(at);
        let Some(shape) = self.remote_shape(at.table).filter(|_| before > 0) else { return };
        for object in 0..shape.objects() as u32 {
            let layers = shape.layers(object as usize);
            let name = self.remote_name(at, &shape, object);
            if let (Some(name), Some(remote)) = (name, &mut self.remote) {
                remote.known.put(&name, false, self.now_ns);
                remote.take_away(name);
            }
            self.unhint(at, layers);
        }
        self.note_remote_index(at, before);
    }

    /// How many cells of a chunk the remote has, as far as is known.
    pub(super) fn remote_cells(&self, at: At) -> usize {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        row.map_or(0, |row| usize::from(row.cells()[Tier::Remote as usize]))
    }

    /// A chunk that is whole at the remote, or is not any more, is an event.
    pub(super) fn note_remote_index(&mut self, at: At, before: usize) {
        let layers = self.tables[at.table as usize].layout.layers();
        let after = self.remote_cells(at);
        if before < layers && after == layers {
            self.say(Kind::Stored, Tier::Remote, at);
        } else if before == layers && after < layers {
            self.say(Kind::Removed, Tier::Remote, at);
        }
    }
}
