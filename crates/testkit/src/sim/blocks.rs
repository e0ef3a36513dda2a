//! Callers that also store named blocks. The content of a block follows from its name, and each
//! block reports its own status.

use std::collections::{BTreeMap, BTreeSet};

use crate::sim::callers::views_of;
use crate::sim::content::{Planes, is_right, prefixes};
use crate::sim::world::{Outcome, POISON, SPACES, World, evictions, wrong};
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::Memory;
use kvtier::format::keys::Key;
use kvtier::format::keys::block::BlockKeys;
use kvtier::meta::chunks::WHOLE;
use kvtier::policy::Hint;
use kvtier::store::state::blocks::BlockTransfer;
use kvtier::store::state::session::Views;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{Finished, SessionOpts};

/// Few names, so that they repeat.
const NAMES: u64 = 40;
const MOST: u64 = 12;

/// A block transfer in flight.
pub(super) struct SubmittedBlocks {
    kind: TransferKind,
    level: Level,
    namespace: u32,
    names: Vec<u32>,
    planes: Vec<Planes>,
    /// All of its blocks were durable.
    must_exist: bool,
    /// A lookup of residency, without a transfer.
    is_lookup: bool,
}

/// State of blocks.
pub(super) struct Blocks {
    random: Random,
    submitted: BTreeMap<u32, SubmittedBlocks>,
    /// Namespace and name of durable blocks.
    durable_blocks: BTreeSet<(u32, u32)>,
    /// Namespace and name of every block that was ever put.
    begun: BTreeSet<(u32, u32)>,
    /// For each namespace the session that holds blocks.
    holders: BTreeMap<u32, Holder>,
}

/// A session with its references by name.
struct Holder {
    session: u32,
    held: BTreeMap<u32, u32>,
}

impl Blocks {
    /// For a seed: one in four. The other seeds run as without.
    pub(super) fn of(seed: u64) -> Option<Blocks> {
        let random = Random::new(seed ^ 0xB10C5);
        let (submitted, holders) = (BTreeMap::new(), BTreeMap::new());
        let (durable_blocks, begun) = (BTreeSet::new(), BTreeSet::new());
        (seed % 4 == 1).then_some(Blocks { random, submitted, durable_blocks, begun, holders })
    }

    /// Whether no transfer is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.submitted.is_empty()
    }

    /// Drops transfers in flight and references.
    pub(super) fn forget(&mut self) {
        self.submitted.clear();
        self.holders.clear();
    }
}

/// Distinct held names among some.
fn names_held(holder: &Holder, names: &[u32]) -> usize {
    let names: BTreeSet<&u32> = names.iter().collect();
    names.iter().filter(|name| holder.held.contains_key(name)).count()
}

fn marks_of(namespace: u32, name: u32, each: usize) -> Vec<u64> {
    let tokens: Vec<u32> = (0..each as u32).map(|i| name * 1000 + i).collect();
    prefixes(namespace + 100, &tokens)
}

impl World {
    /// One random step.
    pub(super) fn block_step(&mut self) -> Outcome<()> {
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        let choice = blocks.random.below(100);
        let count = 1 + blocks.random.below(MOST);
        let namespace = blocks.random.below(u64::from(SPACES)) as u32;
        let names: Vec<u32> = (0..count).map(|_| blocks.random.below(NAMES) as u32).collect();
        let level = [Level::Ram, Level::Ram, Level::Disk, Level::Durable];
        let level = level[blocks.random.below(4) as usize];
        match choice {
            0..=6 => self.move_blocks(TransferKind::Put, level, namespace, names, false),
            7..=12 => self.move_blocks(TransferKind::Get, Level::Ram, namespace, names, false),
            13..=14 => {
                self.move_blocks(TransferKind::Prefetch, Level::Ram, namespace, names, false)
            }
            15 => self.drop_blocks(namespace, &names),
            16 => {
                if let Some(&number) = blocks.submitted.keys().next() {
                    self.core.0.lock().cancel(number, Status::Cancelled);
                }
                Ok(())
            }
            17..=18 => self.hold_blocks(namespace, &names),
            19..=20 => self.release_blocks(namespace, &names),
            21 => self.hint_blocks(namespace, &names),
            22 => self.end_holder(namespace),
            _ => Ok(()),
        }?;
        self.check_held_blocks()
    }

    fn keys_of(namespace: u32, names: &[u32]) -> Outcome<Vec<Key>> {
        let keys = BlockKeys::new(&Key([namespace as u8 + 1; 32]));
        let all: Vec<[u8; 4]> = names.iter().map(|name| name.to_le_bytes()).collect();
        Ok(keys.all(all.iter().map(|name| &name[..]))?)
    }

    /// Opens a session for one call; none at the limit of sessions.
    fn asker(&mut self, namespace: u32) -> Outcome<Option<u32>> {
        let opened = self
            .core
            .0
            .lock()
            .open_session(self.namespaces[namespace as usize], &SessionOpts::default());
        match opened {
            Ok(number) => Ok(Some(number)),
            Err(error) if error.status() == Status::Again => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn move_blocks(
        &mut self,
        kind: TransferKind,
        level: Level,
        namespace: u32,
        names: Vec<u32>,
        must_exist: bool,
    ) -> Outcome<()> {
        // Numbers of ended transfers are reused.
        self.collect()?;
        let layout = self.layouts[namespace as usize].clone();
        let each = layout.chunk_tokens() as usize;
        let marks: Vec<u64> =
            names.iter().flat_map(|&name| marks_of(namespace, name, each)).collect();
        let (mut planes, mut views) = (Vec::new(), Vec::new());
        for layer in 0..layout.layers() {
            let Some(group) = layout.group(layer) else { continue };
            planes.push(match kind {
                TransferKind::Put => Planes::of(group, layer, &marks, each),
                _ => {
                    let (k, v) = Planes::lengths(group, marks.len(), each);
                    Planes { k: vec![POISON; k], v: vec![POISON; v] }
                }
            });
        }
        if kind != TransferKind::Prefetch {
            for (layer, planes) in planes.iter_mut().enumerate() {
                let Some(group) = layout.group(layer) else { continue };
                views.push(views_of(group, planes, marks.len(), each, Memory::Host));
            }
        }
        let moved = BlockTransfer {
            keys: World::keys_of(namespace, &names)?,
            first_layer: 0,
            layers: layout.layers(),
            views: Arc::new(Views::from(views)),
            after: None,
        };
        let Some(asker) = self.asker(namespace)? else { return Ok(()) };
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        let request = (kind, level, blocks.random.below(3) as usize);
        let mut core = self.core.0.lock();
        let begun = core.submit_blocks(asker, request, moved);
        core.close_session(asker)?;
        drop(core);
        match begun {
            Ok(number) => {
                if kind == TransferKind::Put {
                    blocks.begun.extend(names.iter().map(|&name| (namespace, name)));
                }
                let is_lookup = false;
                let submitted = SubmittedBlocks {
                    kind,
                    level,
                    namespace,
                    names,
                    planes,
                    must_exist,
                    is_lookup,
                };
                blocks.submitted.insert(number, submitted);
                Ok(())
            }
            Err(error) if self.is_limit(error.status()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Looks up some blocks, locally and at the remote. The session closes before the answer.
    pub(super) fn locate_blocks(&mut self) -> Outcome<()> {
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        let (count, namespace) =
            (1 + blocks.random.below(4 * MOST), blocks.random.below(SPACES.into()));
        let names: Vec<u32> = (0..count).map(|_| blocks.random.below(NAMES) as u32).collect();
        let (namespace, level) = (namespace as u32, Level::Ram);
        let keys = World::keys_of(namespace, &names)?;
        let Some(asker) = self.asker(namespace)? else { return Ok(()) };
        let mut core = self.core.0.lock();
        let begun = core.locate_blocks(asker, keys);
        core.close_session(asker)?;
        drop(core);
        match (begun, &mut self.blocks) {
            (Ok(number), Some(blocks)) => {
                let (kind, planes, must_exist, is_lookup) =
                    (TransferKind::Prefetch, Vec::new(), false, true);
                let submitted = SubmittedBlocks {
                    kind,
                    level,
                    namespace,
                    names,
                    planes,
                    must_exist,
                    is_lookup,
                };
                blocks.submitted.insert(number, submitted);
                Ok(())
            }
            (Err(error), _) if error.status() != Status::Again => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn drop_blocks(&mut self, namespace: u32, names: &[u32]) -> Outcome<()> {
        // Puts that became durable must be recorded before they are dropped.
        self.collect()?;
        let keys = World::keys_of(namespace, names)?;
        let Some(asker) = self.asker(namespace)? else { return Ok(()) };
        let mut core = self.core.0.lock();
        let cleared = core.drop_blocks(asker, &keys)?;
        core.close_session(asker)?;
        drop(core);
        let held = self.blocks.iter().flat_map(|all| all.holders.get(&namespace));
        let held: usize = held.map(|one| names_held(one, names)).sum();
        if cleared.held + cleared.moving < held as u64 {
            return Err(wrong(format!("{held} of {names:?} are held: {cleared:?}")));
        }
        if let Some(blocks) = &mut self.blocks {
            blocks.durable_blocks.retain(|(of, name)| *of != namespace || !names.contains(name));
        }
        Ok(())
    }

    /// A few at a time: holding everything would block the store.
    fn hold_blocks(&mut self, namespace: u32, names: &[u32]) -> Outcome<()> {
        let names = &names[..names.len().min(4)];
        let known = self.blocks.iter().find_map(|all| Some(all.holders.get(&namespace)?.session));
        let session = match known {
            Some(session) => session,
            None => match self.asker(namespace)? {
                Some(session) => session,
                None => return Ok(()),
            },
        };
        let keys = World::keys_of(namespace, names)?;
        let (mut found, mut present) = (vec![0; names.len()], vec![0; names.len()]);
        let mut core = self.core.0.lock();
        core.exists(self.namespaces[namespace as usize], &keys, &mut present)?;
        core.hold_names(session, &keys, &mut found)?;
        drop(core);
        let whole: Vec<u8> =
            present.iter().map(|&one| if one & WHOLE != 0 { one } else { 0 }).collect();
        if found != whole {
            return Err(wrong(format!("held {found:?} of {names:?}, there were {present:?}")));
        }
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        let none = Holder { session, held: BTreeMap::new() };
        let held = &mut blocks.holders.entry(namespace).or_insert(none).held;
        for (&name, _) in names.iter().zip(&found).filter(|(_, found)| **found != 0) {
            *held.entry(name).or_default() += 1;
        }
        Ok(())
    }

    /// Releases held blocks; releasing others, or too many, must be rejected.
    fn release_blocks(&mut self, namespace: u32, names: &[u32]) -> Outcome<()> {
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        let Some(holder) = blocks.holders.get_mut(&namespace) else { return Ok(()) };
        let mut rest = holder.held.clone();
        let mut take = |name: &u32| match rest.get_mut(name).filter(|times| **times > 0) {
            Some(times) => {
                *times -= 1;
                true
            }
            None => false,
        };
        let (held, others): (Vec<u32>, Vec<u32>) = names.iter().partition(|name| take(name));
        let (session, mut core) = (holder.session, self.core.0.lock());
        if !others.is_empty() {
            let refused = core.release_names(session, &World::keys_of(namespace, names)?);
            if refused.map_err(|error| error.status()) != Err(Status::Invalid) {
                return Err(wrong(format!(
                    "{others:?} of {names:?} were released without being held"
                )));
            }
        }
        core.release_names(session, &World::keys_of(namespace, &held)?)?;
        rest.retain(|_, times| *times > 0);
        holder.held = rest;
        Ok(())
    }

    fn hint_blocks(&mut self, namespace: u32, names: &[u32]) -> Outcome<()> {
        let keys = World::keys_of(namespace, names)?;
        let now_ns = self.clock.now_ns() as i64;
        let Some(asker) = self.asker(namespace)? else { return Ok(()) };
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        let later = blocks.random.below(2_000_000_000) as i64;
        let done = blocks.random.below(4) == 0;
        let hint = Hint { next_use: Some((now_ns + later, 1.0)), done, ..Hint::default() };
        let mut core = self.core.0.lock();
        core.hint_blocks(asker, &keys, &hint)?;
        core.close_session(asker)?;
        Ok(())
    }

    /// Closes the holder's session, which releases its references.
    fn end_holder(&mut self, namespace: u32) -> Outcome<()> {
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        if let Some(holder) = blocks.holders.remove(&namespace) {
            self.core.0.lock().close_session(holder.session)?;
        }
        Ok(())
    }

    /// Held blocks must be complete in some tier, unless the disk damaged them.
    fn check_held_blocks(&mut self) -> Outcome<()> {
        let Some(blocks) = &self.blocks else { return Ok(()) };
        let core = self.core.0.lock();
        if self.is_rotten || self.may_damage() || core.counters.corrupt_cells > 0 {
            return Ok(());
        }
        for (&namespace, holder) in &blocks.holders {
            let names: Vec<u32> = holder.held.keys().copied().collect();
            let mut found = vec![0; names.len()];
            let keys = World::keys_of(namespace, &names)?;
            core.exists(self.namespaces[namespace as usize], &keys, &mut found)?;
            if let Some((name, _)) = names.iter().zip(&found).find(|(_, one)| **one & WHOLE == 0) {
                return Err(wrong(format!(
                    "block {name} of namespace {namespace} is held but missing"
                )));
            }
        }
        Ok(())
    }

    /// Checks the end of a block transfer; false if it is none.
    pub(super) fn end_blocks(&mut self, finished: &Finished) -> Outcome<bool> {
        let Some(blocks) = &mut self.blocks else { return Ok(false) };
        let Some(submitted) = blocks.submitted.remove(&finished.number) else { return Ok(false) };
        let layout = self.layouts[submitted.namespace as usize].clone();
        let each = layout.chunk_tokens() as usize;
        let ended = |words: &str| {
            Err(wrong(format!("blocks {:?}: {words}: {finished:?}", submitted.names)))
        };
        let well = finished.outcomes.iter().take_while(|&&status| status == Status::Ok).count();
        if finished.outcomes.len() != submitted.names.len() || !finished.last {
            return ended("each block must have a status");
        }
        if finished.error.is_none() != (well == submitted.names.len())
            || finished.tokens != (well * each) as u64
        {
            return ended("the total must match the parts");
        }
        let tolerated =
            [Status::Ok, Status::NotFound, Status::Cancelled, Status::Budget, Status::Io];
        let hears_wrong = self.may_hear_wrong();
        for (at, (&name, status)) in submitted.names.iter().zip(&finished.outcomes).enumerate() {
            let was_begun = |all: &Blocks| all.begun.contains(&(submitted.namespace, name));
            if submitted.is_lookup
                && *status == Status::Ok
                && !hears_wrong
                && !self.blocks.as_ref().is_some_and(was_begun)
            {
                return ended("a block was found that was never stored");
            }
            if submitted.is_lookup && !tolerated[..3].contains(status) {
                return ended("a failed lookup");
            }
            let what = (submitted.kind, submitted.level);
            let is_known = tolerated.contains(status)
                || *status == Status::Unavailable
                    && (self.may_lose_device() || self.may_fail_remote(what, *status))
                || *status == Status::Corrupt && self.may_damage();
            if !is_known {
                return ended("an unexpected status");
            }
            match (submitted.kind, *status) {
                (TransferKind::Put, Status::Ok) if submitted.level == Level::Durable => {
                    if let Some(blocks) = &mut self.blocks {
                        blocks.durable_blocks.insert((submitted.namespace, name));
                    }
                }
                (TransferKind::Get, Status::Ok) => {
                    self.check_block(&submitted, at, &marks_of(submitted.namespace, name, each))?
                }
                (TransferKind::Get, _) if submitted.must_exist => {
                    let counters = self.core.0.lock().counters;
                    if evictions(&counters) == 0 {
                        return ended("a durable block is missing");
                    }
                    self.forgets = true;
                }
                _ => {}
            }
        }
        self.report.moves += 1;
        Ok(true)
    }

    fn check_block(
        &mut self,
        submitted: &SubmittedBlocks,
        at: usize,
        marks: &[u64],
    ) -> Outcome<()> {
        let layout = self.layouts[submitted.namespace as usize].clone();
        let each = layout.chunk_tokens() as usize;
        for (layer, got) in submitted.planes.iter().enumerate() {
            let Some(group) = layout.group(layer) else { continue };
            let right = Planes::of(group, layer, marks, each);
            let (k, v) = (right.k.len(), right.v.len());
            let ([k_shape, v_shape], codec) = self.coding_of(submitted.namespace, layer);
            self.report.checked_bytes += (k + v) as u64;
            if !is_right(codec, &k_shape, k, &right.k, &got.k[at * k..][..k])
                || !is_right(codec, &v_shape, v, &right.v, &got.v[at * v..][..v])
            {
                let name = submitted.names[at];
                return Err(wrong(format!("wrong bytes in block {name}, layer {layer}")));
            }
        }
        Ok(())
    }

    /// Reads durable blocks, before the same is done for sessions.
    pub(super) fn check_durable_blocks(&mut self) -> Outcome<()> {
        let Some(blocks) = &mut self.blocks else { return Ok(()) };
        if self.forgets {
            blocks.durable_blocks.clear();
            return Ok(());
        }
        for (namespace, name) in blocks.durable_blocks.clone() {
            self.move_blocks(TransferKind::Get, Level::Ram, namespace, vec![name], true)?;
            self.drain()?;
            if self.forgets {
                // The disk is nearly full: evicted blocks may be missing.
                self.blocks.iter_mut().for_each(|all| all.durable_blocks.clear());
                return Ok(());
            }
            self.report.kept_blocks += 1;
        }
        Ok(())
    }
}
