//! One engine: its tiers, what it knows of the remote, and its connections to it.

use crate::scale::known::Known;
use crate::scale::remote::Link;
use crate::scale::report::EngineShare;
use crate::scale::router::Load;
use crate::scale::{RemoteOpts, ScaleOpts};
use kvtier::base::status::Result;
use kvtier::trace::replay::Replay;
use kvtier::trace::requests::{IdMap, Trace};
use kvtier::trace::study::Study;

/// An engine.
pub(super) struct Engine<'a> {
    /// What its host keeps.
    pub(super) host: Replay<'a>,
    /// What host and disk keep together.
    pub(super) both: Option<Replay<'a>>,
    /// Objects that are absent.
    pub(super) absent: Known,
    /// Chunks that are there.
    pub(super) hints: Known,
    /// Uses of the chunks of the host, where they count.
    pub(super) uses: IdMap<u16>,
    pub(super) into: Link,
    pub(super) out: Link,
    pub(super) load: Load,
    pub(super) share: EngineShare,
}

impl<'a> Engine<'a> {
    pub(super) fn new(trace: &'a Trace, study: &'a Study, opts: &ScaleOpts) -> Result<Engine<'a>> {
        // More room than there are different blocks is never used.
        let open = |blocks: u64| {
            let blocks = blocks.min(trace.uniques().max(1) as u64);
            Replay::open_among(trace, study, &opts.policy, blocks, &opts.replay)
        };
        let disk = opts.disk.as_ref();
        let both = disk.map(|disk| open(opts.host.blocks.saturating_add(disk.blocks)));
        let remote = opts.remote.as_ref();
        let of = |number: fn(&RemoteOpts) -> usize| remote.map_or(0, number);
        let speed = remote.map_or(0.0, |remote| remote.engine_bytes_per_second);
        Ok(Engine {
            host: open(opts.host.blocks)?,
            both: both.transpose()?,
            absent: Known::new(of(|remote| remote.known))?,
            hints: Known::new(of(|remote| remote.hints))?,
            uses: IdMap::default(),
            into: Link::new(speed),
            out: Link::new(speed),
            load: Load::default(),
            share: EngineShare::default(),
        })
    }

    /// How many leading blocks of a path it has.
    pub(super) fn leading(&self, path: &[u64]) -> usize {
        // What is there continues what is there, so the middle tells of all before it.
        let objects = self.both.as_ref().unwrap_or(&self.host).evictor().objects();
        path.partition_point(|&id| objects.find(id).is_some())
    }
}
