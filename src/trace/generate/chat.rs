//! Generator of chat traces: conversations of several turns that share system prompts. The
//! distributions are constants below; times between conversations follow the options of the trace.

use crate::base::status::Result;
use crate::meta::sessions::Stop;
use crate::trace::generate::rng::Rng;
use crate::trace::generate::sequence::Sequence;
use crate::trace::generate::{Maker, OUTPUT_TOKEN_NS, SECOND};
use crate::trace::requests::Request;

/// Context length in tokens at which a conversation ends.
const MAX_CONTEXT: u64 = 64_000;

pub(super) fn make(maker: &mut Maker) -> Result<()> {
    let system_prompts = maker.prompts(6, 600, 4_000);
    let mut rng = maker.rng.part(0);
    let mut start_ns = rng.wait_ns(maker.gap_ns);
    while start_ns <= maker.duration_ns {
        let mut session_rng = rng.part(maker.next_session);
        let at = session_rng.zipf(system_prompts.len() as u64) as usize;
        let prompt = system_prompts[at].clone();
        let request = Request { at_ns: start_ns, priority: 1, ..Request::default() };
        talk(maker, &mut session_rng, prompt, request)?;
        start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns));
    }
    Ok(())
}

/// Generates one conversation that begins with `context`. Time of the first turn, tenant and
/// priority are those of `request`.
pub(super) fn talk(
    maker: &mut Maker,
    rng: &mut Rng,
    mut context: Sequence,
    request: Request,
) -> Result<()> {
    let session = Some(maker.session());
    let mut at_ns = request.at_ns;
    // Many sessions have one turn; those with more tend to continue.
    let turn_probability = if rng.chance(0.35) { 0.15 } else { 0.8 };
    loop {
        // Most user messages are short; some contain pasted text.
        let is_pasted = rng.chance(0.12);
        let input = if is_pasted { rng.size(2_500, 0.9, 30_000) } else { rng.size(50, 1.0, 2_000) };
        maker.grow(&mut context, input);
        let output = rng.size(220, 0.9, 4_000);
        let stop = match rng.below(50) {
            0 => Stop::Cancelled,
            1 => Stop::Length,
            _ => Stop::EndTurn,
        };
        let fits = context.tokens() + output < MAX_CONTEXT;
        let has_next_turn = rng.chance(turn_probability) && fits;
        // Time that the user needs to read and to type.
        let pause_ns = match rng.below(20) {
            0 => rng.wait_ns(3_000 * SECOND),
            1..=4 => rng.wait_ns(300 * SECOND),
            _ => 2 * SECOND + rng.wait_ns(30 * SECOND),
        };
        let think_ns = output as i64 * OUTPUT_TOKEN_NS + pause_ns;
        let turn = Request {
            at_ns,
            session,
            stop,
            output_tokens: output as u32,
            think_ns: if has_next_turn { think_ns } else { 0 },
            ..request
        };
        maker.request(turn, &context)?;
        if !has_next_turn {
            return Ok(());
        }
        maker.grow(&mut context, output);
        at_ns = at_ns.saturating_add(think_ns);
    }
}
