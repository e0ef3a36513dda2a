//! The calls of a client: what it asks of the state of the server's store.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::Digest;
use crate::format::keys::media::Medium;
use crate::meta::chunks::Pin;
use crate::meta::cost::Cost;
use crate::meta::key::Key;
use crate::meta::layout::Layout;
use crate::meta::reuse::State as ReuseState;
use crate::meta::sessions::Stop;
use crate::policy::Hint;
use crate::policy::log::Entry;
use crate::store::events::Event;
use crate::store::job_queues::LANES;
use crate::store::plan::StepKind;
use crate::store::pool::wire::{
    Bytes, NamespaceId, Opened, Raw, SessionId, Wire, wire_enum, wire_struct,
};
use crate::store::state::disk_gc::Cleared;
use crate::store::state::plans::{LookupRange, LookupResult, PlanStep, PlanTerms, SessionPlan};
use crate::store::state::snapshot::MOST_EVICTIONS;
use crate::store::state::writeback::Demoted;
use crate::store::state::{NamespaceOpts, RemoteStats, SessionOpts, StoreState, StoreStats};

/// A call.
pub trait Call: Wire {
    /// Its number among the calls.
    const KIND: u8;
    /// What it returns.
    type Out: Wire;
    /// Executes it in the server, and notes what the client opens and closes.
    fn run(self, core: &mut StoreState, opened: &mut Opened) -> Result<Self::Out>;
    /// Its number.
    fn kind(&self) -> u8 {
        Self::KIND
    }
}

macro_rules! calls {
    ($($(#[$about:meta])* $kind:literal $name:ident {
        $($field:ident: $type:ty),* $(,)?
    } -> $out:ty, $self:ident, $core:ident, $opened:ident => $body:expr;)*) => {
        $(
            $(#[$about])*
            #[allow(missing_docs)]
            pub struct $name { $(pub $field: $type),* }
            wire_struct!($name { $($field: $type),* });
            impl Call for $name {
                const KIND: u8 = $kind;
                type Out = $out;
                #[allow(unused_variables)]
                fn run($self, $core: &mut StoreState, $opened: &mut Opened) -> Result<$out> {
                    $body
                }
            }
        )*

        /// Any call.
        #[allow(missing_docs)]
        pub enum AnyCall { $($name($name)),* }

        impl AnyCall {
            /// Reads a call of a client.
            pub fn take(kind: u8, from: &mut Bytes<'_>) -> Result<AnyCall> {
                let call = match kind {
                    $($kind => AnyCall::$name(Wire::take(from)?),)*
                    other => fail!(Unsupported, "there is no call {other}"),
                };
                from.end()?;
                Ok(call)
            }

            /// Executes it, and writes the result.
            pub fn run(self, core: &mut StoreState, opened: &mut Opened, out: &mut Vec<u8>) {
                match self {
                    $(AnyCall::$name(call) => call.run(core, opened).put(out),)*
                }
            }
        }
    };
}

calls! {
    /// Opens a namespace.
    1 OpenNamespace { key: Key, layout: Vec<u8>, holes: bool, codec: Option<Codec>, tenant: u64 }
        -> u32, self, core, opened => {
            let layout = Layout::decode(&self.layout)?;
            let opts = NamespaceOpts { key: self.key, layout, holes: self.holes };
            let number = core.open_namespace(&opts)?;
            core.set_codec(number, self.codec);
            if let Err(error) = core.set_tenant(number, self.tenant) {
                core.close_namespace(number);
                return Err(error);
            }
            *opened.namespaces.entry(number).or_default() += 1;
            Ok(number)
        };
    /// Closes a namespace.
    2 CloseNamespace { namespace: NamespaceId } -> (), self, core, opened => {
        core.close_namespace(self.namespace.0);
        if let Some(count) = opened.namespaces.get_mut(&self.namespace.0) {
            *count -= 1;
            if *count == 0 {
                opened.namespaces.remove(&self.namespace.0);
            }
        }
        Ok(())
    };
    /// Opens a session.
    3 OpenSession { namespace: NamespaceId, opts: OwnedSessionOpts } -> u32, self, core, opened => {
        let number = core.open_session(self.namespace.0, &self.opts.borrow())?;
        opened.sessions.insert(number);
        Ok(number)
    };
    /// Opens a session with the tokens of another one.
    4 ForkSession { session: SessionId, opts: OwnedSessionOpts } -> u32, self, core, opened => {
        let number = core.fork(self.session.0, &self.opts.borrow())?;
        opened.sessions.insert(number);
        Ok(number)
    };
    /// Closes a session.
    5 CloseSession { session: SessionId } -> (), self, core, opened => {
        opened.sessions.remove(&self.session.0);
        core.close_session(self.session.0)
    };
    /// Number of tokens of a session.
    6 SessionTokens { session: SessionId } -> u64, self, core, opened => {
        Ok(core.session(self.session.0)?.path().tokens().len() as u64)
    };
    /// Appends tokens, and media whose positions count from the first of these.
    7 Append { session: SessionId, tokens: Vec<u32>, media: Vec<Medium> }
        -> (), self, core, opened => core.append_after(self.session.0, &self.tokens, self.media);
    /// Truncates a session.
    8 Truncate { session: SessionId, tokens: u64 } -> (), self, core, opened => {
        core.truncate(self.session.0, self.tokens).map(|_| ())
    };
    /// Which keys are resident somewhere.
    9 Exists { namespace: NamespaceId, keys: Vec<Key> } -> Vec<u8>, self, core, opened => {
        let mut found = vec![0; self.keys.len()];
        core.exists(self.namespace.0, &self.keys, &mut found).map(|()| found)
    };
    /// Looks up a sequence by the keys of its chunks.
    10 LookupKeys { namespace: NamespaceId, keys: Vec<Key>, tokens: u64 }
        -> LookupResult, self, core, opened => {
            core.lookup_keys(self.namespace.0, &self.keys, self.tokens).cloned()
        };
    /// Looks up a session.
    11 LookupSession { session: SessionId } -> LookupResult, self, core, opened => {
        core.lookup_session(self.session.0).cloned()
    };
    /// Plans a session.
    12 Plan { session: SessionId, terms: PlanTerms } -> SessionPlan, self, core, opened => {
        core.plan(self.session.0, &self.terms).cloned()
    };
    /// Pins a range of tokens.
    13 PinRange { session: SessionId, first: u64, tokens: u64, pin: Pin }
        -> (), self, core, opened => {
            let tokens = core.range_tokens(self.session.0, self.first, self.tokens)?;
            core.pin(self.session.0, self.first, tokens, self.pin)
        };
    /// Ends pins of a range of tokens.
    14 UnpinRange { session: SessionId, first: u64, tokens: u64 } -> (), self, core, opened => {
        let tokens = core.range_tokens(self.session.0, self.first, self.tokens)?;
        core.unpin_range(self.session.0, self.first, tokens)
    };
    /// Passes a hint to the policies.
    15 HintSession { session: SessionId, hint: Hint } -> (), self, core, opened => {
        core.hint(self.session.0, &self.hint)
    };
    /// Removes chunks of a range of tokens.
    16 DropRange { session: SessionId, first: u64, tokens: u64 }
        -> Cleared, self, core, opened => {
            let tokens = core.range_tokens(self.session.0, self.first, self.tokens)?;
            core.drop_range(self.session.0, self.first, tokens)
        };
    /// Moves chunks of a range of tokens to disk.
    17 DemoteRange { session: SessionId, first: u64, tokens: u64 }
        -> Demoted, self, core, opened => {
            let tokens = core.range_tokens(self.session.0, self.first, self.tokens)?;
            core.demote_range(self.session.0, self.first, tokens)
        };
    /// Pins blocks.
    18 PinBlocks { session: SessionId, keys: Vec<Key>, pin: Pin } -> (), self, core, opened => {
        core.pin_blocks(self.session.0, &self.keys, self.pin)
    };
    /// Passes a hint about blocks to the policies.
    19 HintBlocks { session: SessionId, keys: Vec<Key>, hint: Hint }
        -> (), self, core, opened => core.hint_blocks(self.session.0, &self.keys, &self.hint);
    /// Removes blocks.
    20 DropBlocks { session: SessionId, keys: Vec<Key> } -> Cleared, self, core, opened => {
        core.drop_blocks(self.session.0, &self.keys)
    };
    /// Holds blocks by name.
    21 HoldNames { session: SessionId, keys: Vec<Key> } -> Vec<u8>, self, core, opened => {
        let mut found = vec![0; self.keys.len()];
        core.hold_names(self.session.0, &self.keys, &mut found).map(|()| found)
    };
    /// Releases held blocks.
    22 ReleaseNames { session: SessionId, keys: Vec<Key> } -> (), self, core, opened => {
        core.release_names(self.session.0, &self.keys)
    };
    /// The statistics.
    23 Stats {} -> Raw<StoreStats>, self, core, opened => Ok(Raw(core.stats_now()));
    /// The statistics as Prometheus text.
    24 MetricsText {} -> String, self, core, opened => Ok(core.metrics_text());
    /// Statistics of the remote.
    25 RemoteStatsNow {} -> Option<Raw<RemoteStats>>, self, core, opened => {
        Ok(core.remote_stats().map(Raw))
    };
    /// Events from a number on: the events, how many were missed, the number of the next one.
    26 ReadEvents { from: u64, most: u32 }
        -> (Vec<Raw<Event>>, u64, u64), self, core, opened => {
            let mut all = vec![Event::default(); (self.most as usize).min(MOST_EVENTS)];
            let (count, missed) = core.events.read(self.from, &mut all);
            let events = all[..count].iter().copied().map(Raw).collect();
            Ok((events, missed, core.events.next_number()))
        };
    /// Resident chunks from a position on, and the next position.
    27 Residents { from: u64, most: u32 } -> (Vec<Raw<Event>>, u64), self, core, opened => {
        let mut all = vec![Event::default(); (self.most as usize).min(MOST_EVENTS)];
        let (count, next) = core.residents(self.from, &mut all);
        Ok((all[..count].iter().copied().map(Raw).collect(), next))
    };
    /// Reports the time of a prefill.
    28 ObservePrefill { namespace: NamespaceId, context: u64, tokens: u64, ns: u64 }
        -> (), self, core, opened => {
            core.observe_prefill(self.namespace.0, self.context, self.tokens, self.ns)
        };
    /// Sets the cost of prefill.
    29 FixPrefill { namespace: NamespaceId, cost: Option<Cost> } -> (), self, core, opened => {
        core.fix_prefill(self.namespace.0, self.cost)
    };
    /// The cost of prefill, and how many observations it is from.
    30 PrefillCost { namespace: NamespaceId } -> (Cost, u64, bool), self, core, opened => {
        let prefill = core.prefill(self.namespace.0);
        Ok((prefill.cost(), prefill.observed(), prefill.is_fixed()))
    };
    /// Changes the eviction policy of a tier.
    31 SetPolicy { tier: Tier, spec: String } -> (), self, core, opened => {
        core.set_policy(self.tier, &self.spec)
    };
    /// Changes the limit of a tier.
    32 SetLimit { tier: Tier, bytes: u64 } -> (), self, core, opened => {
        core.set_limit(self.tier, self.bytes)
    };
    /// Sets the quota of a tenant.
    33 SetQuota { tenant: u32, tier: Tier, bytes: u64 } -> (), self, core, opened => {
        core.set_quota(self.tenant, self.tier, self.bytes)
    };
    /// The last evictions of a tier.
    34 Evictions { tier: Tier, most: u32 } -> Vec<Raw<Entry>>, self, core, opened => {
        let most = (self.most as usize).min(MOST_EVICTIONS);
        Ok(core.evictions(self.tier, most)?.into_iter().map(Raw).collect())
    };
}

/// Most events of one call.
const MOST_EVENTS: usize = 4096;

/// Options of a session, as they pass between processes.
pub struct OwnedSessionOpts {
    name: Vec<u8>,
    tenant: u32,
    priority: Option<u8>,
    max_tokens: u32,
    ttl_ns: u64,
}

impl OwnedSessionOpts {
    /// A copy of options.
    pub fn of(opts: &SessionOpts<'_>) -> OwnedSessionOpts {
        let &SessionOpts { name, tenant, priority, max_tokens, ttl_ns } = opts;
        OwnedSessionOpts { name: name.to_vec(), tenant, priority, max_tokens, ttl_ns }
    }

    fn borrow(&self) -> SessionOpts<'_> {
        let &OwnedSessionOpts { tenant, priority, max_tokens, ttl_ns, .. } = self;
        SessionOpts { name: &self.name, tenant, priority, max_tokens, ttl_ns }
    }
}

wire_struct!(OwnedSessionOpts {
    name: Vec<u8>, tenant: u32, priority: Option<u8>, max_tokens: u32, ttl_ns: u64,
});
wire_struct!(Medium { token: u64, digest: Digest });
wire_struct!(Pin { priority: u8, until_ns: u64 });
wire_struct!(Hint { stop: Option<Stop>, next_use: Option<(i64, f32)>, done: bool });
wire_struct!(Cost { alpha: f64, beta: f64 });
wire_struct!(Cleared { removed: u64, held: u64, moving: u64 });
wire_struct!(Demoted { freed: u64, pending: u64, staying: u64 });
wire_struct!(LookupRange {
    first_token: u64, tokens: u64, state: ReuseState, farthest: Option<usize>, bytes: [u64; 4],
    pending_bytes: u64, load_ns: u64,
});
wire_struct!(LookupResult {
    tokens: u64, now_tokens: u64, reusable_soon_tokens: u64, ranges: Vec<LookupRange>,
    bytes: [u64; 4], pending_bytes: u64, load_ns: u64,
});
wire_struct!(PlanStep { kind: StepKind, first_token: u64, tokens: u64, bytes: [u64; 4], ns: f64 });
wire_struct!(SessionPlan {
    steps: Vec<PlanStep>, total_ns: f64, load_ns: f64, compute_ns: f64, without_ns: f64,
});
wire_enum!(Tier: Tier::Device, Tier::Host, Tier::Disk, Tier::Remote, Tier::Pinned);
wire_enum!(Codec: Codec::None, Codec::Lz4, Codec::Int8);
wire_enum!(Stop: Stop::Unknown, Stop::ToolUse, Stop::EndTurn, Stop::Length, Stop::Cancelled);
wire_enum!(ReuseState:
    ReuseState::Miss, ReuseState::Hit, ReuseState::Pending, ReuseState::Unneeded);
wire_enum!(StepKind: StepKind::Resident, StepKind::Load, StepKind::Recompute);

impl Wire for PlanTerms {
    const LEAST_BYTES: usize = 11;
    fn put(&self, out: &mut Vec<u8>) {
        (self.overlap, self.wait, Lane(self.lane), self.cost).put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<PlanTerms> {
        let (overlap, wait, Lane(lane), cost) = Wire::take(from)?;
        Ok(PlanTerms { overlap, wait, lane, cost })
    }
}

/// Urgency of a transfer.
#[derive(Clone, Copy)]
pub struct Lane(pub usize);

impl Wire for Lane {
    const LEAST_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        (self.0 as u8).put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<Lane> {
        match u8::take(from)? as usize {
            lane if lane < LANES => Ok(Lane(lane)),
            other => fail!(Corrupt, "priority {other}: 0 to {} are possible", LANES - 1),
        }
    }
}
