//! Tests of the device tier against a plain list of the allocated pieces.

use super::*;
use crate::base::budget::{Budget, BudgetOpts, Tier};
use crate::base::clock::Clock;
use crate::base::random::Random;
use crate::base::runtime::{Runtime, RuntimeOpts};
use crate::device::Device;
use crate::device::host::Host;
use crate::device::simulated::{Simulated, SimulatedOpts};

fn device(memory_bytes: u64) -> Arc<Simulated> {
    let opts = SimulatedOpts { memory_bytes, ..SimulatedOpts::default() };
    Arc::new(Simulated::new(Clock::manual(1), opts).expect("sound"))
}

fn fill(tier: &mut DeviceTier, device: &Arc<dyn Device>) {
    while tier.missing_slabs() > 0 {
        tier.add(Slab::take(device, None, tier.bytes_per_slab()).expect("memory"));
    }
}

#[test]
fn pieces_do_not_overlap_and_slabs_change_sizes() {
    let device: Arc<dyn Device> = device(0);
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut tier = DeviceTier::new(None, 512 << 10).expect("sound");
        fill(&mut tier, &device);
        assert_eq!(tier.stats().slabs, 8);
        let mut live: Vec<(Piece, u64, u64, u64)> = Vec::new();
        for owner in 0..4000 {
            if random.below(100) < 55 {
                // Each phase of the run has other sizes, so that slabs must change theirs.
                let bytes = (1 + random.below(3) + owner / 1000 * 3) * 1000;
                if let Some(piece) = tier.alloc(bytes, owner) {
                    let address = tier.address(piece).expect("live");
                    live.push((piece, address, bytes, owner));
                }
            } else if !live.is_empty() {
                let (piece, ..) = live.swap_remove(random.below(live.len() as u64) as usize);
                tier.free(piece).expect("live");
            }
            if owner % 100 == 0 {
                let mut spans: Vec<_> = live.iter().map(|&(_, at, bytes, _)| (at, bytes)).collect();
                spans.sort_unstable();
                assert!(spans.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
                let mut owners: Vec<u64> = tier.owners().collect();
                let mut ours: Vec<u64> = live.iter().map(|one| one.3).collect();
                owners.sort_unstable();
                ours.sort_unstable();
                assert_eq!((owners, tier.stats().live_pieces), (ours, live.len() as u64));
            }
        }
        live.into_iter().for_each(|(piece, ..)| tier.free(piece).expect("live"));
        assert_eq!((tier.stats().live_bytes, tier.stats().slabs), (0, 8));
    }
}

#[test]
fn a_smaller_limit_returns_slabs_when_empty() {
    let simulated = device(0);
    let device: Arc<dyn Device> = simulated.clone();
    let mut tier = DeviceTier::new(None, 256 << 10).expect("sound");
    fill(&mut tier, &device);
    let pieces: Vec<Piece> = std::iter::from_fn(|| tier.alloc(32 << 10, 7)).collect();
    assert_eq!(pieces.len(), 8);
    tier.free(pieces[0]).expect("live");
    let owners = tier.set_limit(192 << 10).expect("sound");
    assert_eq!((owners, tier.has_returning()), (vec![7], false), "the slab has a piece in use");
    assert!(tier.alloc(32 << 10, 8).is_none(), "a draining slab allocates nothing");
    tier.free(pieces[1]).expect("live");
    assert_eq!((tier.stats().slabs, simulated.allocated_bytes()), (3, 256 << 10));
    drop(tier.take_returning());
    assert_eq!(simulated.allocated_bytes(), 192 << 10);
    assert_eq!(tier.set_limit(0).expect("none at all").len(), 6);
    pieces[2..].iter().for_each(|&piece| tier.free(piece).expect("live"));
    drop(tier.take_returning());
    assert_eq!((simulated.allocated_bytes(), tier.missing_slabs()), (0, 0));
    tier.set_limit(64 << 10).expect("again");
    assert_eq!(tier.missing_slabs(), 1);
}

#[test]
fn a_slab_is_charged_and_needs_device_memory() {
    let runtime =
        Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).expect("open");
    let mut limits = [None; 5];
    limits[Tier::Device as usize] = Some(100_000);
    let opts = BudgetOpts { limits, ..BudgetOpts::default() };
    let budget = Budget::open(runtime.core(), &opts).expect("open");
    let account = budget.account("tier", 0, None).expect("room");
    let simulated = device(90_000);
    let any: Arc<dyn Device> = simulated.clone();
    let slab = Slab::take(&any, Some(&account), 64 << 10).expect("there is room");
    let more = Slab::take(&any, Some(&account), 64 << 10).map(|_| ()).unwrap_err();
    assert_eq!(more.status(), Status::Budget);
    let unpaid = Slab::take(&any, None, 64 << 10).map(|_| ()).unwrap_err();
    assert_eq!(unpaid.status(), Status::NoMem);
    let too_long = Slab::take(&any, Some(&account), 30_000).map(|_| ()).unwrap_err();
    assert_eq!(too_long.status(), Status::NoMem);
    assert_eq!(account.held(Tier::Device).committed_bytes, 64 << 10);
    drop(slab);
    assert_eq!((account.held(Tier::Device).committed_bytes, simulated.allocated_bytes()), (0, 0));
    let host: Arc<dyn Device> = Arc::new(Host::default());
    let none = Slab::take(&host, Some(&account), 64 << 10).map(|_| ()).unwrap_err();
    assert_eq!(none.status(), Status::Unsupported);
    assert!(DeviceTier::new(None, 1).is_err());
}
