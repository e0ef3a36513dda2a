//! Tenants: few heavy ones, many light ones, three classes, and one that scans documents that are
//! never requested again.

use crate::base::status::Result;
use crate::meta::sessions::Stop;
use crate::trace::generate::sequence::Sequence;
use crate::trace::generate::{Maker, SECOND, chat};
use crate::trace::requests::Request;

const TENANTS: u64 = 24;
/// The tenant that scans.
const SCANNER: u32 = TENANTS as u32;

pub(super) fn make(maker: &mut Maker) -> Result<()> {
    let prompts: Vec<Vec<Sequence>> = (0..TENANTS)
        .map(|tenant| {
            let median = 300 + 150 * tenant;
            maker.prompts(3, median, 8_000)
        })
        .collect();
    let mut rng = maker.rng.part(0);
    let mut start_ns = rng.wait_ns(maker.gap_ns);
    while start_ns <= maker.duration_ns {
        let mut own = rng.part(maker.next_session);
        let tenant = own.zipf(TENANTS);
        let of = &prompts[tenant as usize];
        let prompt = of[own.zipf(of.len() as u64) as usize].clone();
        let request = Request {
            at_ns: start_ns,
            tenant: tenant as u32,
            priority: (tenant % 3) as u8,
            ..Request::default()
        };
        chat::talk(maker, &mut own, prompt, request)?;
        start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns));
    }
    scan(maker)
}

/// Long documents, each once, throughout the workload.
fn scan(maker: &mut Maker) -> Result<()> {
    let mut rng = maker.rng.part(1);
    let mut at_ns = 0;
    while at_ns <= maker.duration_ns {
        let document = rng.size(6_000, 0.7, 40_000);
        let document = maker.fresh(document);
        let request = Request {
            at_ns,
            session: Some(maker.session()),
            tenant: SCANNER,
            stop: Stop::EndTurn,
            output_tokens: rng.size(100, 0.5, 1_000) as u32,
            ..Request::default()
        };
        maker.request(request, &document)?;
        let gap_ns = (maker.gap_ns.saturating_mul(2)).max(SECOND / 2);
        at_ns = at_ns.saturating_add(rng.wait_ns(gap_ns).max(1));
    }
    Ok(())
}
