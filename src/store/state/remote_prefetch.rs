//! What is fetched before anybody asks for it: once it is known what the remote has of a session,
//! whatever comes from there sooner than it is computed.

use std::collections::VecDeque;

use crate::base::status::Status;
use crate::base::sync::Arc;
use crate::store::plan;
use crate::store::state::StoreState;
use crate::store::state::cell_range::{CellRange, Wanted};
use crate::store::state::plans::PlanTerms;
use crate::store::state::transfer::{Level, TransferKind};
use crate::store::state::views::Views;

/// The lane of what will be wanted soon.
const LANE: usize = 1;
/// Where plans have what comes from elsewhere.
const ELSEWHERE: usize = 2;

/// Fetches that the store begins itself.
#[derive(Default)]
pub(super) struct RemotePrefetch {
    /// Sessions of which it became known what the remote has.
    line: VecDeque<u32>,
    /// Moves under way, and whose they are.
    moves: Vec<(u32, u32)>,
    is_busy: bool,
    /// The next move that begins is for this session.
    begins: Option<u32>,
}

impl RemotePrefetch {
    /// It is known what the remote has of a session.
    pub fn add(&mut self, session: u32) {
        if !self.line.contains(&session) {
            self.line.push_back(session);
        }
    }
}

impl StoreState {
    /// Whether a move is one of these: nobody waits for its end.
    pub(super) fn is_prefetch(&self, number: u32) -> bool {
        let moves = self.remote.as_ref().map_or(&[][..], |remote| &remote.remote_prefetch.moves);
        moves.iter().any(|&(_, one)| one == number)
    }

    /// A move begins: it may be one of these.
    pub(super) fn prefetch_begins(&mut self, number: u32) {
        if let Some(remote_prefetch) =
            self.remote.as_mut().map(|remote| &mut remote.remote_prefetch)
            && let Some(at) = remote_prefetch.begins.take()
        {
            remote_prefetch.moves.push((at, number));
        }
    }

    /// A move has ended.
    pub(super) fn prefetch_ended(&mut self, number: u32) {
        if let Some(remote) = &mut self.remote {
            remote.remote_prefetch.moves.retain(|&(_, one)| one != number);
        }
    }

    /// Begins to fetch for the next session; false when there is none.
    pub(super) fn fetch_ahead(&mut self) -> bool {
        let Some(remote_prefetch) = self.remote.as_mut().map(|remote| &mut remote.remote_prefetch)
        else {
            return false;
        };
        if remote_prefetch.is_busy {
            return false;
        }
        let Some(at) = remote_prefetch.line.pop_front() else { return false };
        remote_prefetch.is_busy = true;
        self.fetch_for(at);
        if let Some(remote) = &mut self.remote {
            remote.remote_prefetch.is_busy = false;
        }
        true
    }

    fn fetch_for(&mut self, at: u32) {
        let terms = PlanTerms { lane: LANE, ..PlanTerms::default() };
        let Ok(plan) = self.plan(at, &terms) else { return };
        let mut loads = plan.legs.iter().filter(|leg| leg.kind == plan::StepKind::Load);
        let remote = loads.clone().filter(|leg| leg.bytes[ELSEWHERE] > 0);
        let mut legs: Vec<(u64, u64)> = remote.map(|leg| (leg.first_token, leg.tokens)).collect();
        let end = loads.next_back().map_or(0, |leg| leg.first_token + leg.tokens);
        let Ok(session) = self.session(at) else { return };
        let home = self.spaces[session.space as usize];
        let layers = self.tables[home.table as usize].layout.layers();
        // Without holes a session goes on from one point, and needs what is needed there.
        let wanted = if home.holes { Wanted::All } else { Wanted::Needed };
        if !home.holes && !legs.is_empty() {
            legs = vec![(0, end)];
        }
        for (first_token, tokens) in legs {
            let cell_range = CellRange {
                first_token,
                tokens,
                first_layer: 0,
                layers,
                by_layer: false,
                wanted: wanted.clone(),
                views: Arc::new(Views(Vec::new())),
                after: None,
            };
            // Where there is no room for it now, it comes when it is asked for.
            if let Some(remote) = &mut self.remote {
                remote.remote_prefetch.begins = Some(at);
            }
            if let Err(error) =
                self.submit_cell_range(at, TransferKind::Prefetch, Level::Ram, LANE, cell_range)
            {
                log::debug!("nothing is fetched early: {error}");
            }
            if let Some(remote) = &mut self.remote {
                remote.remote_prefetch.begins = None;
            }
        }
    }

    /// Nobody wants what is fetched for a session, or for all.
    pub fn cancel_prefetch(&mut self, session: Option<u32>) {
        let Some(remote) = &mut self.remote else { return };
        let is_meant = |at: u32| session.is_none_or(|session| session == at);
        remote.remote_prefetch.line.retain(|&at| !is_meant(at));
        let moves = remote.remote_prefetch.moves.iter().filter(|(at, _)| is_meant(*at));
        for number in moves.map(|&(_, number)| number).collect::<Vec<u32>>() {
            self.cancel(number, Status::Cancelled);
        }
    }
}
