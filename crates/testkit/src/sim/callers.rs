//! Callers of a simulated store: sessions, transfers, and checks of their results.

use std::ops::Range;

use crate::sim::content::{Planes, is_right, prefixes};
use crate::sim::world::{MAX_SESSIONS, Outcome, POISON, SPACES, Session, Submitted, World, wrong};
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::Memory;
use kvtier::format::codec::int8::Scales;
use kvtier::format::codec::{Codec, Shape};
use kvtier::meta::chunks::Pin;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout, Rule};
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{CellRange, Finished, SessionOpts, Wanted};

impl World {
    pub(super) fn any_session(&mut self) -> Option<usize> {
        let count = self.sessions.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    /// Whether a request may be rejected with a status although nothing is wrong.
    pub(super) fn is_limit(&self, status: Status) -> bool {
        let is_quota = status == Status::Budget && self.config.quota != [0; 2];
        is_quota || matches!(status, Status::Again | Status::Limit)
    }

    pub(super) fn open_session(&mut self) -> Outcome<()> {
        if self.sessions.len() as u64 >= MAX_SESSIONS {
            return self.close_session();
        }
        let namespace = self.random.below(u64::from(SPACES)) as u32;
        let opts = SessionOpts {
            tenant: namespace,
            priority: Some(self.random.below(3) as u8),
            // Some end soon, some late; in most simulations none does.
            ttl_ns: match (self.config.quota[0] > 0, self.sessions.len() % 3) {
                (true, 1) => 20_000_000,
                (true, 2) => 3_000_000_000,
                _ => 0,
            },
            ..Default::default()
        };
        let number = self.core.0.lock().open_session(self.namespaces[namespace as usize], &opts)?;
        self.sessions.push(Session { number, namespace, tokens: Vec::new(), marks: Vec::new() });
        self.append()
    }

    pub(super) fn append(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let count = 1 + self.random.below(24);
        // Few different documents, so that sessions share prefixes.
        let document = self.random.below(4) as u32;
        let session = &mut self.sessions[at];
        let from = session.tokens.len() as u64;
        let document = session.tokens.first().map_or(document, |&first| first / 1000);
        let tokens: Vec<u32> = (from..from + count).map(|i| document * 1000 + i as u32).collect();
        self.core.0.lock().append(session.number, &tokens)?;
        session.tokens.extend(tokens);
        session.marks = prefixes(session.namespace, &session.tokens);
        Ok(())
    }

    /// A cell range of a session, with the engine's memory for it.
    pub(super) fn cell_range(
        &mut self,
        at: usize,
        kind: TransferKind,
    ) -> Option<(CellRange, Submitted)> {
        let (memory, after) = (self.memory(), self.next_event(kind));
        let session = &self.sessions[at];
        let layout = &self.layouts[session.namespace as usize];
        let each = layout.chunk_tokens() as usize;
        let all = session.tokens.len();
        let first = self.random.below((all / each + 1) as u64) as usize / 2 * each;
        if first >= all {
            return None;
        }
        let rest = all - first;
        let tokens = match self.random.below(3) {
            0 if rest >= each => rest / each * each,
            1 if rest >= each => (1 + self.random.below((rest / each) as u64) as usize) * each,
            _ => rest,
        };
        let (first_layer, layers) = match self.random.below(4) {
            0 => {
                let first = self.random.below(layout.layers() as u64) as usize;
                (first, 1 + self.random.below((layout.layers() - first) as u64) as usize)
            }
            _ => (0, layout.layers()),
        };
        let (marks, request) = match kind {
            TransferKind::Put => (session.marks[first..first + tokens].to_vec(), Wanted::All),
            _ => picked(&mut self.picks, &session.marks[first..first + tokens], each),
        };
        let count = marks.len();
        let mut planes = planes_of(layout, first_layer..first_layer + layers, kind, &marks)?;
        let views = planes.iter_mut().enumerate().map(|(i, planes)| {
            let group = layout.group(first_layer + i)?;
            Some(views_of(group, planes, count, each, memory))
        });
        let views = Arc::new(Views::from(views.collect::<Option<Vec<_>>>()?));
        let by_layer = self.random.coin();
        let cell_range = CellRange {
            first_token: first as u64,
            tokens: tokens as u64,
            first_layer,
            layers,
            by_layer,
            wanted: request,
            views,
            after,
        };
        // Fetched chunks are contiguous.
        let (marks, first) = match kind {
            TransferKind::Put => (session.marks.clone(), first),
            _ => (marks, 0),
        };
        let mut submitted = Submitted {
            kind,
            level: Level::Ram,
            namespace: session.namespace,
            tokens: session.tokens.clone(),
            marks,
            first,
            first_layer,
            layers,
            by_layer,
            planes,
            parts_left: if by_layer { layers } else { 1 },
            after: cell_range.after,
            hidden: Vec::new(),
        };
        self.hide_put(&mut submitted);
        Some((cell_range, submitted))
    }

    pub(super) fn submit(&mut self, at: usize, kind: TransferKind, level: Level) -> Outcome<()> {
        let Some((cell_range, submitted)) = self.cell_range(at, kind) else { return Ok(()) };
        let lane = self.random.below(3) as usize;
        let number = self.sessions[at].number;
        let waits = self.waits_for_caller();
        let mut core = self.core.0.lock();
        let begun = match waits {
            true => core.submit_waiting(number, kind, level, lane, cell_range),
            false => core.submit_cell_range(number, kind, level, lane, cell_range).map(|n| (n, 0)),
        };
        drop(core);
        match begun {
            Ok((number, ticket)) => {
                if waits {
                    self.waits(ticket);
                }
                if kind == TransferKind::Put {
                    self.note_put(&submitted);
                }
                self.submitted.insert(number, Submitted { level, ..submitted });
                Ok(())
            }
            // At the limit of transfers, chunks or a quota: no defect.
            Err(error) if self.is_limit(error.status()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn put(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let level = [Level::Ram, Level::Ram, Level::Disk, Level::Durable];
        let level = level[self.random.below(4) as usize];
        self.submit(at, TransferKind::Put, level)
    }

    pub(super) fn get(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let kind =
            if self.random.below(5) == 0 { TransferKind::Prefetch } else { TransferKind::Get };
        self.submit(at, kind, Level::Ram)
    }

    pub(super) fn close_session(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let session = self.sessions.swap_remove(at);
        self.core.0.lock().close_session(session.number)?;
        Ok(())
    }

    pub(super) fn truncate(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let tokens = self.random.below(self.sessions[at].tokens.len() as u64 + 1);
        let session = &mut self.sessions[at];
        self.core.0.lock().truncate(session.number, tokens)?;
        session.tokens.truncate(tokens as usize);
        session.marks.truncate(tokens as usize);
        Ok(())
    }

    pub(super) fn fork(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        if self.sessions.len() as u64 >= MAX_SESSIONS {
            return Ok(());
        }
        let session = &self.sessions[at];
        let number = self.core.0.lock().fork(session.number, &SessionOpts::default())?;
        let (namespace, tokens, marks) =
            (session.namespace, session.tokens.clone(), session.marks.clone());
        self.sessions.push(Session { number, namespace, tokens, marks });
        Ok(())
    }

    pub(super) fn pin(&mut self) -> Outcome<()> {
        let Some(at) = self.any_session() else { return Ok(()) };
        let session = &self.sessions[at];
        let tokens = session.tokens.len() as u64;
        if tokens > 0 {
            let until_ns = self.clock.now_ns() + self.random.below(5_000_000_000);
            let pin = Pin { priority: self.random.below(3) as u8, until_ns };
            match self.core.0.lock().pin(session.number, 0, tokens, pin) {
                Ok(()) => {}
                Err(error) if matches!(error.status(), Status::Limit | Status::Budget) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(super) fn cancel(&mut self) {
        let count = self.submitted.len() as u64;
        if count > 0 {
            let at = self.random.below(count) as usize;
            if let Some(&number) = self.submitted.keys().nth(at) {
                self.core.0.lock().cancel(number, Status::Cancelled);
            }
        }
    }

    /// Compares ended transfers with the expected results.
    pub(super) fn collect(&mut self) -> Outcome<()> {
        let mut finished = Vec::new();
        self.core.0.lock().finished(&mut finished);
        for transfer in finished {
            if self.end_blocks(&transfer)? {
                continue;
            }
            let Some(mut submitted) = self.submitted.remove(&transfer.number) else {
                return Err(wrong(format!("transfer {} ended twice", transfer.number)));
            };
            submitted.parts_left -= 1;
            self.check_event(&submitted, transfer.bytes)?;
            self.compare(&submitted, &transfer)?;
            if transfer.last != (submitted.parts_left == 0) {
                return Err(wrong(format!(
                    "{} parts are left: {transfer:?}",
                    submitted.parts_left
                )));
            }
            if !transfer.last {
                self.submitted.insert(transfer.number, submitted);
            } else {
                self.report.moves += 1;
            }
        }
        Ok(())
    }

    pub(super) fn compare(&mut self, submitted: &Submitted, finished: &Finished) -> Outcome<()> {
        let layout = &self.layouts[submitted.namespace as usize];
        let each = layout.chunk_tokens() as usize;
        let tokens = finished.tokens as usize;
        let layers = match submitted.by_layer {
            true => finished.part as usize..finished.part as usize + 1,
            false => 0..submitted.layers,
        };
        let tolerated =
            [Status::NotFound, Status::Cancelled, Status::Budget, Status::Io, Status::Closed];
        // Tensors on a lost device are lost, too.
        let is_known = |status| {
            tolerated.contains(&status)
                || status == Status::Unavailable && self.may_lose_device()
                || status == Status::Corrupt && self.may_damage()
                || self.may_fail_remote((submitted.kind, submitted.level), status)
        };
        if let Some(error) = finished.error.as_ref().filter(|e| !is_known(e.status())) {
            return Err(wrong(format!("{:?} ended with {error}", submitted.kind)));
        }
        if submitted.kind == TransferKind::Put {
            if finished.error.is_none() && submitted.level == Level::Durable {
                for layer in layers {
                    self.note_durable(submitted, submitted.first_layer + layer, each);
                }
            }
            return Ok(());
        }
        if submitted.kind == TransferKind::Prefetch {
            return Ok(());
        }
        let marks = &submitted.marks[submitted.first..submitted.first + tokens];
        for layer in layers {
            let at = submitted.first_layer + layer;
            let Some(group) = layout.group(at) else { continue };
            let right = Planes::of(group, at, marks, each);
            let got = &submitted.planes[layer];
            self.report.checked_bytes += (right.k.len() + right.v.len()) as u64;
            let (k, v) = Planes::lengths(group, each, each);
            let ([k_shape, v_shape], codec) = self.coding_of(submitted.namespace, at);
            if !is_right(codec, &k_shape, k, &right.k, &got.k[..right.k.len()])
                || !is_right(codec, &v_shape, v, &right.v, &got.v[..right.v.len()])
            {
                let bad = got.k.iter().zip(&right.k).position(|(a, b)| a != b);
                let poison = got.k.iter().filter(|&&b| b == POISON).count();
                return Err(wrong(format!(
                    "wrong bytes in layer {at} of {}: {finished:?}, K from {bad:?} on, {poison} of {} untouched",
                    submitted.namespace,
                    got.k.len()
                )));
            }
        }
        Ok(())
    }

    /// Shapes and codec of a layer's planes.
    pub(super) fn coding_of(&self, namespace: u32, layer: usize) -> ([Shape; 2], Codec) {
        let core = self.core.0.lock();
        let shapes =
            core.table_of(self.namespaces[namespace as usize]).map(|table| table.shapes(layer));
        let plain = Shape { dtype: Dtype::Bytes, row_bytes: 1, scales: Scales::Token };
        let codec = self.codecs[namespace as usize].unwrap_or(self.config.codec);
        (shapes.unwrap_or([plain; 2]), codec)
    }

    /// Records full chunks of a put as durable.
    pub(super) fn note_durable(&mut self, submitted: &Submitted, layer: usize, each: usize) {
        let tokens = submitted.planes.first().map_or(0, |_| submitted.marks.len());
        let end = submitted.first + self.tokens_of(submitted, tokens);
        let mut at = submitted.first + each;
        while at <= end {
            let key = (submitted.namespace, submitted.marks[at - 1], layer);
            self.durable_cells.insert(key, submitted.tokens[..at].to_vec());
            at += each;
        }
    }

    /// Tokens of a transfer, from the length of its planes.
    pub(super) fn tokens_of(&self, submitted: &Submitted, most: usize) -> usize {
        let layout = &self.layouts[submitted.namespace as usize];
        let each = layout.chunk_tokens() as usize;
        let Some(group) = layout.group(submitted.first_layer) else { return 0 };
        let k = submitted.planes[0].k.len() as u64;
        let tokens = match group.rule {
            Rule::State => k / group.state_bytes * each as u64,
            _ => k / group.k_bytes,
        };
        (tokens as usize).min(most - submitted.first)
    }
}

/// Some chunks of a range, or all.
fn picked(random: &mut Random, marks: &[u64], each: usize) -> (Vec<u64>, Wanted) {
    let chunks = marks.len().div_ceil(each) as u32;
    let picked: Vec<u32> = (0..chunks).filter(|_| random.coin()).collect();
    if picked.is_empty() || random.coin() {
        return (marks.to_vec(), Wanted::All);
    }
    let of = |&at: &u32| marks.chunks(each).nth(at as usize).unwrap_or_default();
    (picked.iter().flat_map(of).copied().collect(), Wanted::Chunks(picked))
}

pub(super) fn views_of(
    group: &Group,
    planes: &mut Planes,
    tokens: usize,
    each: usize,
    memory: Memory,
) -> LayerViews {
    let view = |bytes: &mut Vec<u8>, count: usize, token_bytes: u64| {
        let address = bytes.as_mut_ptr() as u64;
        PlaneView { memory, ..PlaneView::canonical(address, count as u32, token_bytes) }
    };
    if group.rule == Rule::State {
        return LayerViews {
            k: view(&mut planes.k, tokens.div_ceil(each), group.state_bytes),
            v: None,
        };
    }
    let k = view(&mut planes.k, tokens, group.k_bytes);
    let v = (group.v_bytes > 0).then(|| view(&mut planes.v, tokens, group.v_bytes));
    LayerViews { k, v }
}

/// The engine's memory of some layers: with the KV of a put, and poisoned for others.
fn planes_of(
    layout: &Layout,
    layers: Range<usize>,
    kind: TransferKind,
    marks: &[u64],
) -> Option<Vec<Planes>> {
    let each = layout.chunk_tokens() as usize;
    let plane = |layer| {
        let group = layout.group(layer)?;
        if kind == TransferKind::Put {
            return Some(Planes::of(group, layer, marks, each));
        }
        let (k, v) = Planes::lengths(group, marks.len(), each);
        Some(Planes { k: vec![POISON; k], v: vec![POISON; v] })
    };
    layers.map(plane).collect()
}
