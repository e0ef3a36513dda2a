//! What is fetched before anybody asks for it: once it is known what the remote has of a session,
//! whatever comes from there sooner than it is computed.

use std::collections::VecDeque;

use crate::base::status::Status;
use crate::base::sync::Arc;
use crate::kv::core::Core;
use crate::kv::core::moves::{Deed, Level};
use crate::kv::core::plans::PlanTerms;
use crate::kv::core::rectangle::{Rectangle, Wanted};
use crate::kv::core::views::Views;
use crate::kv::plan;

/// The lane of what will be wanted soon.
const LANE: usize = 1;
/// Where plans have what comes from elsewhere.
const ELSEWHERE: usize = 2;

/// Fetches that the store begins itself.
#[derive(Default)]
pub(super) struct Early {
    /// Sessions of which it became known what the remote has.
    line: VecDeque<u32>,
    /// Moves under way, and whose they are.
    moves: Vec<(u32, u32)>,
    is_busy: bool,
    /// The next move that begins is for this session.
    begins: Option<u32>,
}

impl Early {
    /// It is known what the remote has of a session.
    pub fn add(&mut self, session: u32) {
        if !self.line.contains(&session) {
            self.line.push_back(session);
        }
    }
}

impl Core {
    /// Whether a move is one of these: nobody waits for its end.
    pub(super) fn is_early(&self, number: u32) -> bool {
        let moves = self.far.as_ref().map_or(&[][..], |far| &far.early.moves);
        moves.iter().any(|&(_, one)| one == number)
    }

    /// A move begins: it may be one of these.
    pub(super) fn early_begins(&mut self, number: u32) {
        if let Some(early) = self.far.as_mut().map(|far| &mut far.early)
            && let Some(at) = early.begins.take()
        {
            early.moves.push((at, number));
        }
    }

    /// A move has ended.
    pub(super) fn early_ended(&mut self, number: u32) {
        if let Some(far) = &mut self.far {
            far.early.moves.retain(|&(_, one)| one != number);
        }
    }

    /// Begins to fetch for the next session; false when there is none.
    pub(super) fn fetch_early(&mut self) -> bool {
        let Some(early) = self.far.as_mut().map(|far| &mut far.early) else { return false };
        if early.is_busy {
            return false;
        }
        let Some(at) = early.line.pop_front() else { return false };
        early.is_busy = true;
        self.fetch_for(at);
        if let Some(far) = &mut self.far {
            far.early.is_busy = false;
        }
        true
    }

    fn fetch_for(&mut self, at: u32) {
        let terms = PlanTerms { lane: LANE, ..PlanTerms::default() };
        let Ok(plan) = self.plan(at, &terms) else { return };
        let mut loads = plan.legs.iter().filter(|leg| leg.deed == plan::Deed::Load);
        let far = loads.clone().filter(|leg| leg.bytes[ELSEWHERE] > 0);
        let mut legs: Vec<(u64, u64)> = far.map(|leg| (leg.first_token, leg.tokens)).collect();
        let end = loads.next_back().map_or(0, |leg| leg.first_token + leg.tokens);
        let Ok(session) = self.session(at) else { return };
        let home = self.spaces[session.space as usize];
        let layers = self.boards[home.board as usize].layout.layers();
        // Without holes a session goes on from one point, and needs what is needed there.
        let wanted = if home.holes { Wanted::All } else { Wanted::Needed };
        if !home.holes && !legs.is_empty() {
            legs = vec![(0, end)];
        }
        for (first_token, tokens) in legs {
            let rectangle = Rectangle {
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
            if let Some(far) = &mut self.far {
                far.early.begins = Some(at);
            }
            if let Err(error) =
                self.submit_rectangle(at, Deed::Prefetch, Level::Ram, LANE, rectangle)
            {
                log::debug!("nothing is fetched early: {error}");
            }
            if let Some(far) = &mut self.far {
                far.early.begins = None;
            }
        }
    }

    /// Nobody wants what is fetched for a session, or for all.
    pub fn cancel_early(&mut self, session: Option<u32>) {
        let Some(far) = &mut self.far else { return };
        let is_meant = |at: u32| session.is_none_or(|session| session == at);
        far.early.line.retain(|&at| !is_meant(at));
        let moves = far.early.moves.iter().filter(|(at, _)| is_meant(*at));
        for number in moves.map(|&(_, number)| number).collect::<Vec<u32>>() {
            self.cancel(number, Status::Cancelled);
        }
    }
}
