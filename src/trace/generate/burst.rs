//! Quiet times, and bursts in which all sessions ask about the same text.

use crate::base::status::Result;
use crate::trace::generate::{Maker, SECOND, chat};
use crate::trace::requests::Request;

/// Factor of the session rate in a burst.
const MORE: i64 = 20;

pub(super) fn make(maker: &mut Maker) -> Result<()> {
    let prompts = maker.prompts(6, 600, 4_000);
    let mut rng = maker.rng.part(0);
    let mut start_ns = rng.wait_ns(maker.gap_ns);
    let mut burst_ns = 30 * SECOND + rng.wait_ns(300 * SECOND);
    while start_ns <= maker.duration_ns {
        let end_ns = burst_ns + 20 * SECOND + rng.wait_ns(60 * SECOND);
        while start_ns < burst_ns && start_ns <= maker.duration_ns {
            let mut own = rng.part(maker.next_session);
            let prompt = prompts[own.zipf(prompts.len() as u64) as usize].clone();
            let request = Request { at_ns: start_ns, priority: 1, ..Request::default() };
            chat::talk(maker, &mut own, prompt, request)?;
            start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns));
        }
        let mut topic = prompts[0].clone();
        let text = rng.size(9_000, 0.6, 40_000);
        maker.grow(&mut topic, text);
        while start_ns < end_ns && start_ns <= maker.duration_ns {
            let mut own = rng.part(maker.next_session);
            let request = Request { at_ns: start_ns, priority: 1, ..Request::default() };
            chat::talk(maker, &mut own, topic.clone(), request)?;
            start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns / MORE).max(1));
        }
        burst_ns = end_ns + 60 * SECOND + rng.wait_ns(400 * SECOND);
    }
    Ok(())
}
