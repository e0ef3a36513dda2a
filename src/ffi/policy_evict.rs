//! Eviction from a policy's own table.

use std::ffi::c_char;

use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, check_out, enter, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy::{PolicyNoun, State, kvt_policy_t};
use crate::ffi::policy_select::columns_for_c;
use crate::ffi::status::{KVT_OK, kvt_status_t};
use crate::policy::columns::Columns;
use crate::policy::custom::{self, ScoredEviction, Scorer};
use crate::policy::evict::{Outcome, Victim};
use crate::policy::evictor::MAX_OBJECTS;

/// One that leaves. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_victim_t {
    /// Who.
    pub id: u64,
    /// What it frees.
    pub units: u64,
}

/// What an eviction came to. The text lives as long as the library.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_policy_outcome_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How many leave.
    pub victims: u64,
    /// What they free.
    pub freed_units: u64,
    /// What is missing to what was asked.
    pub shortfall_units: u64,
    /// How long it took to choose; 0 = not timed (one in 16 is).
    pub decision_ns: u64,
    /// The policy that decided, which may be another than the one that was opened.
    pub decided_by: *const c_char,
    /// Length of that name.
    pub decided_by_bytes: u64,
}

/// The caller's score function as a scorer.
struct Foreign<'a>(&'a PolicyNoun);

impl Scorer for Foreign<'_> {
    fn score(&mut self, view: &Columns, now: i64, out: &mut [f64]) -> Result<()> {
        let Some(score) = &self.0.score else {
            fail!(Invalid, "the policy 'custom' needs a score function");
        };
        let columns = columns_for_c(view);
        let status = score.call(|function, user_data| {
            // SAFETY: function and data came together from the caller; columns and
            // scores have as many entries as the columns say.
            unsafe { function(user_data, &columns, now, out.as_mut_ptr()) }
        });
        match status {
            KVT_OK => Ok(()),
            code => {
                let status = Status::from_code(code).unwrap_or(Status::Invalid);
                Err(Error::new(status, format!("the score function gave status {code}")))
            }
        }
    }
}

impl PolicyNoun {
    /// Scores candidates by the caller's function. No lock is held.
    pub(crate) fn score_rows(&self, view: &Columns, now_ns: i64) -> Result<Vec<f64>> {
        let now = match now_ns {
            0 => i64::try_from(Clock::real().now_ns()).unwrap_or(i64::MAX),
            now => now,
        };
        custom::score(&mut Foreign(self), view, now)
    }
}

/// How often a custom policy is asked again because objects changed meanwhile.
const ROUNDS: u32 = 4;

/// Leaves the victims in `state.victims`.
fn evict_now(state: &mut State, now_ns: i64, ask: &ScoredEviction) -> Result<Outcome> {
    let State { evictor, victims, .. } = state;
    make_room(victims, ask.most.min(evictor.objects().len()))?;
    match ask.keep {
        true => evictor.preview_most(now_ns, ask.required, ask.most, victims),
        false => evictor.evict_most(now_ns, ask.required, ask.most, victims),
    }
}

fn make_room(victims: &mut Vec<Victim>, most: usize) -> Result<()> {
    victims.clear();
    if victims.try_reserve(most).is_err() {
        fail!(NoMem, "no memory to note {most} victims");
    }
    Ok(())
}

/// Snapshot, unlock, score, lock, look again, evict; and once more for what
/// changed meanwhile.
fn evict_custom(
    noun: &PolicyNoun,
    now_ns: i64,
    ask: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
) -> Result<(Outcome, usize)> {
    noun.state.lock().evictor.check_time(now_ns)?;
    let (mut whole, mut count) = (Outcome::default(), 0);
    for _ in 0..ROUNDS {
        let required = ask.required - whole.freed_units;
        let left = ScoredEviction { required, most: ask.most - count, ..*ask };
        let (one, found) = match evict_round(noun, now_ns, &left, out, count) {
            // What earlier rounds evicted is gone: it must be told.
            Err(_) if count > 0 => break,
            round => round?,
        };
        count += found;
        let freed_units = whole.freed_units + one.freed_units;
        let decision_ns = whole.decision_ns + one.decision_ns;
        whole = Outcome { freed_units, decision_ns, ..one };
        if one.shortfall_units == 0 || ask.keep || count == ask.most || found == 0 {
            break;
        }
    }
    Ok((whole, count))
}

/// One round; its victims are put behind `from` others.
fn evict_round(
    noun: &PolicyNoun,
    now_ns: i64,
    ask: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
    from: usize,
) -> Result<(Outcome, usize)> {
    let snapshot = noun.state.lock().evictor.snapshot()?;
    // A scorer is never asked about nobody.
    let scores = match snapshot.len() {
        0 => Vec::new(),
        _ => noun.score_rows(&snapshot.view(), now_ns)?,
    };
    let mut state = noun.state.lock();
    let State { evictor, victims, .. } = &mut *state;
    make_room(victims, ask.most.min(snapshot.len()))?;
    let one = evictor.evict_by_scores(now_ns, &snapshot, &scores, ask, victims)?;
    give_victims(victims, out, from);
    Ok((one, victims.len()))
}

fn give_victims(victims: &[Victim], out: &Strided<kvt_policy_victim_t>, from: usize) {
    for (i, victim) in victims.iter().enumerate() {
        out.put(from + i, &kvt_policy_victim_t { id: victim.id, units: victim.units });
    }
}

fn evict(
    noun: &PolicyNoun,
    now_ns: i64,
    ask: &ScoredEviction,
    out: &Strided<kvt_policy_victim_t>,
) -> Result<kvt_policy_outcome_t> {
    let mut state = noun.state.lock();
    let (outcome, count) = if state.evictor.name() == custom::NAME {
        drop(state);
        evict_custom(noun, now_ns, ask, out)?
    } else {
        let outcome = evict_now(&mut state, now_ns, ask)?;
        give_victims(&state.victims, out, 0);
        (outcome, state.victims.len())
    };
    Ok(kvt_policy_outcome_t {
        struct_size: 0,
        victims: count as u64,
        freed_units: outcome.freed_units,
        shortfall_units: outcome.shortfall_units,
        decision_ns: outcome.decision_ns,
        decided_by: outcome.decided_by.as_ptr().cast(),
        decided_by_bytes: outcome.decided_by.len() as u64,
    })
}

/// Evicts until enough is free: the victims are gone from the table, and what
/// they held is the caller's to free. None leaves without which it would be
/// enough. Too few that may leave, or too little room for them, is a shortfall
/// and no error.
///
/// @param policy          The policy.
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  What must be free; 0 frees nothing.
/// @param victims         Receives who leaves, in the order of leaving.
/// @param capacity        Room there: the most that leave, at most 2^28.
/// @param stride_bytes    sizeof(kvt_policy_victim_t).
/// @param out             What it came to; start it with KVT_POLICY_OUTCOME_INIT.
/// @param err             Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also a clock that went back, a score that is no
///         number), KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC; what a custom policy's score function gives.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_policy_evict(
    policy: *const kvt_policy_t,
    now_ns: i64,
    required_units: u64,
    victims: *mut kvt_policy_victim_t,
    capacity: u64,
    stride_bytes: u64,
    out: *mut kvt_policy_outcome_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let victims = Strided::new(victims, capacity, stride_bytes, MAX_OBJECTS as u64)?;
    let ask = ScoredEviction { required: required_units, most: victims.len(), keep: false };
    write(out, &evict(&*enter(policy)?, now_ns, &ask, &victims)?);
    Ok(())
}

/// Says who would leave now, without anything leaving. A policy that moves objects
/// while it searches (arc's kin, queues with a hand), or that learns, may choose others
/// when it is asked again.
///
/// @param policy          The policy.
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  What must be free.
/// @param victims         Receives who would leave, in the order of leaving.
/// @param capacity        Room there.
/// @param stride_bytes    sizeof(kvt_policy_victim_t).
/// @param out             What it came to; start it with KVT_POLICY_OUTCOME_INIT.
/// @param err             Explains a failure; may be null.
/// @return As kvt_policy_evict.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_policy_preview(
    policy: *const kvt_policy_t,
    now_ns: i64,
    required_units: u64,
    victims: *mut kvt_policy_victim_t,
    capacity: u64,
    stride_bytes: u64,
    out: *mut kvt_policy_outcome_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let victims = Strided::new(victims, capacity, stride_bytes, MAX_OBJECTS as u64)?;
    let ask = ScoredEviction { required: required_units, most: victims.len(), keep: true };
    write(out, &evict(&*enter(policy)?, now_ns, &ask, &victims)?);
    Ok(())
}
