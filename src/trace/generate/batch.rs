//! Batch jobs: one common prompt, every item requested once.

use crate::base::status::Result;
use crate::meta::sessions::Stop;
use crate::trace::generate::{Maker, SECOND};
use crate::trace::requests::Request;

pub(super) fn make(maker: &mut Maker) -> Result<()> {
    let mut rng = maker.rng.part(0);
    let mut start_ns = 0;
    while start_ns <= maker.duration_ns {
        let mut own = rng.part(maker.next_session);
        let prompt = own.size(3_000, 0.7, 20_000);
        let prompt = maker.fresh(prompt);
        let items = own.size(150, 0.9, 5_000);
        let gap_ns = own.between(SECOND as u64 / 10, 3 * SECOND as u64) as i64;
        let mut at_ns = start_ns;
        for _ in 0..items {
            let mut context = prompt.clone();
            let item = own.size(500, 0.8, 8_000);
            maker.grow(&mut context, item);
            let request = Request {
                at_ns,
                session: Some(maker.session()),
                stop: Stop::EndTurn,
                output_tokens: own.size(40, 0.7, 1_000) as u32,
                ..Request::default()
            };
            maker.request(request, &context)?;
            at_ns = at_ns.saturating_add(own.wait_ns(gap_ns));
            if at_ns > maker.duration_ns {
                break;
            }
        }
        start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns));
    }
    Ok(())
}
