//! Chat sessions.

use crate::base::status::Result;
use crate::meta::sessions::Stop;
use crate::trace::generate::rng::Rng;
use crate::trace::generate::sequence::Sequence;
use crate::trace::generate::{Maker, OUTPUT_TOKEN_NS, SECOND};
use crate::trace::requests::Request;

/// Context length in tokens at which a conversation ends.
const MAX_CONTEXT: u64 = 64_000;

pub(super) fn make(maker: &mut Maker) -> Result<()> {
    let prompts = maker.prompts(6, 600, 4_000);
    let mut rng = maker.rng.part(0);
    let mut start_ns = rng.wait_ns(maker.gap_ns);
    while start_ns <= maker.duration_ns {
        let mut own = rng.part(maker.next_session);
        let prompt = prompts[own.zipf(prompts.len() as u64) as usize].clone();
        let request = Request { at_ns: start_ns, priority: 1, ..Request::default() };
        talk(maker, &mut own, prompt, request)?;
        start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns));
    }
    Ok(())
}

/// A conversation that begins with `context`, with the time, tenant and class of `request`.
pub(super) fn talk(
    maker: &mut Maker,
    rng: &mut Rng,
    mut context: Sequence,
    request: Request,
) -> Result<()> {
    let session = Some(maker.session());
    let mut at_ns = request.at_ns;
    // Many sessions have one turn; those with more tend to continue.
    let on = if rng.chance(0.35) { 0.15 } else { 0.8 };
    loop {
        let pasted = rng.chance(0.12);
        let question_tokens =
            if pasted { rng.size(2_500, 0.9, 30_000) } else { rng.size(50, 1.0, 2_000) };
        maker.grow(&mut context, question_tokens);
        let output = rng.size(220, 0.9, 4_000);
        let stop = match rng.below(50) {
            0 => Stop::Cancelled,
            1 => Stop::Length,
            _ => Stop::EndTurn,
        };
        let goes_on = rng.chance(on) && context.tokens() + output < MAX_CONTEXT;
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
            think_ns: if goes_on { think_ns } else { 0 },
            ..request
        };
        maker.request(turn, &context)?;
        if !goes_on {
            return Ok(());
        }
        maker.grow(&mut context, output);
        at_ns = at_ns.saturating_add(think_ns);
    }
}
