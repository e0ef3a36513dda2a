//! A larger trace from copies of one, each with ids and start times of its own. Copies stand for
//! tenants; they share a part of their prefixes.

use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::meta::cost::Cost;
use kvtier::meta::index;
use kvtier::trace::generate::rng::Rng;
use kvtier::trace::requests::{Builder, Request, Trace};
use kvtier::trace::study::{Study, zeros};

/// Most copies.
pub const MAX_COPIES: u32 = 4096;
/// Fewest children of a stem block: stems are common prompts.
pub const STEM: u32 = 64;

/// Options of the copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyOpts {
    /// Number of copies; 1 = the trace itself.
    pub copies: u32,
    /// Share of the branches behind stems that all copies have in common, with their stems; 0 =
    /// nothing is shared.
    pub shared: f64,
    /// Each copy starts at a random time before this.
    pub shift_ns: i64,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Creates a trace of copies.
pub fn make(trace: &Trace, opts: &CopyOpts) -> Result<Trace> {
    let CopyOpts { copies, shared, shift_ns, seed } = *opts;
    if copies == 0 || copies > MAX_COPIES {
        fail!(Limit, "{copies} copies, allowed are 1 to {MAX_COPIES}");
    }
    if !(0.0..=1.0).contains(&shared) || shift_ns < 0 {
        fail!(
            Limit,
            "a shared part of {shared}, allowed is 0 to 1, and shifts up to {shift_ns} ns, allowed from 0"
        );
    }
    if copies == 1 {
        return trace.head(trace.requests().len());
    }
    let study = Study::of(trace, &Cost::default())?;
    let common = common(trace, shared, seed)?;
    let tenants = trace.requests().iter().map(|r| r.tenant).max().unwrap_or(0).saturating_add(1);
    if u64::from(tenants) * u64::from(copies) > u64::from(u32::MAX) {
        fail!(Limit, "{copies} copies of {tenants} tenants, the limit is 2^32 - 1 tenants in all");
    }
    let mut builder = Builder::new(trace.block_tokens())?;
    let mut rng = Rng::new(seed);
    let mut path: Vec<u64> = Vec::new();
    for copy in 0..copies {
        let start_ns = rng.below(shift_ns.unsigned_abs().saturating_add(1)) as i64;
        let salt = index::hash(seed ^ (u64::from(copy) + 1).rotate_left(32));
        for (at, request) in trace.requests().iter().enumerate() {
            path.clear();
            let ids = trace.blocks(request).iter().zip(trace.dense(request));
            path.extend(ids.map(|(&id, &number)| match common[number as usize] {
                0 => index::hash(id ^ salt),
                _ => id,
            }));
            let session = u64::from(copy) << 32 | u64::from(study.sessions[at]);
            builder.push(
                Request {
                    at_ns: request.at_ns.saturating_add(start_ns),
                    session: Some(session),
                    tenant: copy * tenants + request.tenant,
                    ..*request
                },
                &path,
            )?;
        }
    }
    builder.finish()
}

/// The blocks that all copies share: stems from the root on, and whole chosen branches behind them.
fn common(trace: &Trace, shared: f64, seed: u64) -> Result<Vec<u8>> {
    let mut common: Vec<u8> = zeros(trace.uniques())?;
    if shared == 0.0 {
        return Ok(common);
    }
    let mut seen: Vec<u8> = zeros(trace.uniques())?;
    let mut branches: Vec<u32> = zeros(trace.uniques())?;
    for request in trace.requests() {
        let path = trace.dense(request);
        for (at, &block) in path.iter().enumerate() {
            let is_new = std::mem::replace(&mut seen[block as usize], 1) == 0;
            if let Some(&parent) = at.checked_sub(1).and_then(|above| path.get(above)) {
                branches[parent as usize] += u32::from(is_new);
            }
        }
    }
    for request in trace.requests() {
        let path = trace.dense(request);
        let stem = path.iter().take_while(|&&block| branches[block as usize] >= STEM).count();
        path[..stem].iter().for_each(|&block| common[block as usize] = 1);
        // The first block of a branch decides, so alike for all paths through it.
        let Some(&first) = path.get(stem) else { continue };
        let chance = index::hash(u64::from(first) ^ index::hash(seed)) >> 11;
        if (chance as f64 / (1u64 << 53) as f64) < shared {
            path[stem..].iter().for_each(|&block| common[block as usize] = 1);
        }
    }
    Ok(common)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_requested_part() {
        let mut builder = Builder::new(16).expect("tokens");
        for branch in 0..1000u64 {
            let path = [1, 10 + branch, 5000 + branch];
            let request = Request { at_ns: branch as i64, input_tokens: 48, ..Request::default() };
            builder.push(request, &path).expect("room");
        }
        let trace = builder.finish().expect("a forest");
        let with = |copies: u32, shared: f64| {
            let opts = CopyOpts { copies, shared, shift_ns: 100, seed: 3 };
            make(&trace, &opts).expect("a trace")
        };
        assert!(with(1, 0.5) == trace);
        assert_eq!(with(4, 0.0).uniques(), 4 * 2001);
        assert_eq!(with(4, 1.0).uniques(), 2001);
        let half = with(4, 0.5);
        assert_eq!((half.requests().len(), half.uniques() % 2), (4000, 1));
        // A shared branch exists once, another one four times.
        let common = (4 * 2000 - (half.uniques() - 1)) / 3;
        assert!((900..1100).contains(&common), "{common} of 2000");
        assert!(half == with(4, 0.5));
        for wrong in [
            CopyOpts { copies: 0, shared: 0.0, shift_ns: 0, seed: 0 },
            CopyOpts { copies: 2, shared: 1.1, shift_ns: 0, seed: 0 },
            CopyOpts { copies: 2, shared: f64::NAN, shift_ns: 0, seed: 0 },
            CopyOpts { copies: MAX_COPIES + 1, shared: 0.0, shift_ns: 0, seed: 0 },
        ] {
            assert!(make(&trace, &wrong).is_err(), "{wrong:?}");
        }
    }
}
