//! A simulated engine: its tiers, its knowledge of the remote, and its connections.

use crate::scale::remote::Link;
use crate::scale::report::EngineShare;
use crate::scale::router::Load;
use crate::scale::timed_set::TimedSet;
use crate::scale::{RemoteOpts, ScaleOpts};
use kvtier::base::status::Result;
use kvtier::trace::replay::Replay;
use kvtier::trace::requests::{IdMap, Trace};
use kvtier::trace::study::Study;

/// An engine.
pub(super) struct Engine<'a> {
    /// Replay of the host tier.
    pub(super) host: Replay<'a>,
    /// Replay of host and disk together.
    pub(super) host_and_disk: Option<Replay<'a>>,
    /// Objects known to be absent from the remote.
    pub(super) absent: TimedSet,
    /// Remote hints: chunks known to be in the remote.
    pub(super) hints: TimedSet,
    /// Uses of the host's chunks, if they are counted.
    pub(super) uses: IdMap<u16>,
    pub(super) into: Link,
    pub(super) out: Link,
    pub(super) load: Load,
    pub(super) share: EngineShare,
}

impl<'a> Engine<'a> {
    pub(super) fn new(trace: &'a Trace, study: &'a Study, opts: &ScaleOpts) -> Result<Engine<'a>> {
        // More blocks than the trace has are never used.
        let open = |blocks: u64| {
            let blocks = blocks.min(trace.uniques().max(1) as u64);
            Replay::open_shared(trace, study, &opts.policy, blocks, &opts.replay)
        };
        let disk = opts.disk.as_ref();
        let host_and_disk = disk.map(|disk| open(opts.host.blocks.saturating_add(disk.blocks)));
        let remote = opts.remote.as_ref();
        let of = |number: fn(&RemoteOpts) -> usize| remote.map_or(0, number);
        let speed = remote.map_or(0.0, |remote| remote.engine_bytes_per_second);
        Ok(Engine {
            host: open(opts.host.blocks)?,
            host_and_disk: host_and_disk.transpose()?,
            absent: TimedSet::new(of(|remote| remote.known))?,
            hints: TimedSet::new(of(|remote| remote.hints))?,
            uses: IdMap::default(),
            into: Link::new(speed),
            out: Link::new(speed),
            load: Load::default(),
            share: EngineShare::default(),
        })
    }

    /// Number of leading blocks of a path in its tiers.
    pub(super) fn leading(&self, path: &[u64]) -> usize {
        // Every resident block has a resident parent, so the resident part is a prefix.
        let objects = self.host_and_disk.as_ref().unwrap_or(&self.host).evictor().objects();
        path.partition_point(|&id| objects.find(id).is_some())
    }
}
