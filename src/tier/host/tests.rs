//! Tests of the host tier against a plain model.

use super::*;
use crate::base::budget::{Budget, BudgetOpts, Tier};
use crate::base::machine::MemoryFacts;
use crate::base::runtime::{Runtime, RuntimeOpts};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn runtime(faults: &str) -> Runtime {
    let faults = crate::base::fault::Faults::parse(faults).expect("sound");
    let opts = RuntimeOpts { workers: 1, faults: Some(faults), ..RuntimeOpts::default() };
    Runtime::open(opts).expect("a runtime")
}

fn budget(runtime: &Runtime, bytes: u64) -> Arc<Budget> {
    let mut opts = BudgetOpts { reserve_bytes: Some(0), ..BudgetOpts::default() };
    opts.limits[Tier::Host as usize] = Some(bytes);
    let facts =
        MemoryFacts { available_bytes: 1 << 40, total_bytes: 1 << 40, ..MemoryFacts::default() };
    Budget::open_on(runtime.core(), &opts, &facts).expect("a budget")
}

fn small(slab_bytes: u64, max_bytes: u64) -> HostOpts {
    HostOpts { slab_bytes, max_bytes, ..HostOpts::default() }
}

fn held(account: &Account) -> u64 {
    account.held(Tier::Host).committed_bytes
}

/// The tier, and a model of its live pieces. `check` compares both.
struct Model {
    tier: HostTier,
    account: Arc<Account>,
    limit: u64,
    /// Address, size and mark of each live piece.
    live: BTreeMap<Piece, (usize, u64, u64)>,
    marks: u64,
}

impl Model {
    fn mark(&mut self, piece: Piece, requested: u64) {
        let address = self.tier.address(piece).expect("live");
        let bytes = self.tier.bytes(piece).expect("live");
        assert!(bytes >= requested && bytes % PIECE_ALIGN_BYTES == 0);
        assert_eq!(address as u64 % PIECE_ALIGN_BYTES, 0);
        self.marks += 1;
        // SAFETY: the piece is allocated, and only this test uses it.
        unsafe {
            address.cast::<u64>().write(self.marks);
            address.add(bytes as usize - 8).cast::<u64>().write(!self.marks);
        }
        let entry = (address as usize, bytes, self.marks);
        assert!(self.live.insert(piece, entry).is_none(), "a piece in use was allocated again");
    }

    fn free(&mut self, piece: Piece) {
        let (address, bytes, mark) = self.live.remove(&piece).expect("live");
        assert_eq!(self.tier.address(piece).expect("live") as usize, address, "the piece moved");
        let start = address as *const u8;
        // SAFETY: as above.
        let found = unsafe {
            (start.cast::<u64>().read(), start.add(bytes as usize - 8).cast::<u64>().read())
        };
        assert_eq!(found, (mark, !mark), "the contents were overwritten");
        self.tier.free(piece).expect("live");
    }

    fn check(&self) {
        let mut ranges: Vec<(usize, u64)> = self.live.values().map(|l| (l.0, l.1)).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 as usize <= w[1].0), "pieces overlap");
        let stats = self.tier.stats();
        assert_eq!(stats.live_pieces, self.live.len() as u64);
        assert_eq!(stats.live_bytes, self.live.values().map(|l| l.1).sum::<u64>());
        assert_eq!(stats.cost_bytes, held(&self.account));
        assert!(stats.cost_bytes <= self.limit);
        let all: Vec<Piece> = self
            .tier
            .slabs()
            .flat_map(|s| self.tier.live_pieces(s.number))
            .map(|(p, _)| p)
            .collect();
        assert!(all.iter().eq(self.live.keys()), "live pieces, in order of number");
        let mut cost = 0;
        for class in self.tier.classes() {
            let of_class = |s: &SlabInfo| s.piece_bytes == class.piece_bytes;
            let slabs: Vec<_> = self.tier.slabs().filter(of_class).collect();
            let spares = slabs.iter().filter(|s| s.live_pieces == 0).count();
            assert!(spares <= (slabs.len() / 2).max(1), "at most half are spares");
            assert!(class.live_pieces <= class.pieces && class.slabs as usize == slabs.len());
            assert!(slabs.iter().all(|s| !(s.drains && s.live_pieces == 0)));
            cost += class.wasted_bytes + class.live_pieces * class.piece_bytes;
        }
        assert_eq!(cost, stats.cost_bytes);
        let least = self.tier.slabs().filter(|s| !s.drains);
        let least = least.map(|s| u64::from(s.live_pieces) * s.piece_bytes).min();
        let found = self.tier.emptiest().map(|s| u64::from(s.live_pieces) * s.piece_bytes);
        assert_eq!(found, least);
    }

    /// Whether a slab that does not drain has a free piece of that size.
    fn has_room(&self, piece_bytes: u64) -> bool {
        self.tier
            .slabs()
            .any(|s| s.piece_bytes == piece_bytes && !s.drains && s.live_pieces < s.pieces)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_a_model(
        steps in proptest::collection::vec((0u8..20, any::<u32>()), 1..300),
        slab_kib in prop_oneof![Just(16u64), Just(100), Just(256), Just(4096)],
        limit_kib in 300u64..12_000, max_kib in 64u64..12_000,
    ) {
        let runtime = runtime("faults()");
        let limit = limit_kib << 10;
        let budget = budget(&runtime, limit);
        let account = budget.account("cells", 0, None).expect("an account");
        let tier = HostTier::new(Some(account.clone()), &small(slab_kib << 10, max_kib << 10));
        let mut model = Model {
            tier: tier.expect("sound"), account, limit, live: BTreeMap::new(), marks: 0,
        };
        for (kind, pick) in steps {
            let nth = |n: usize| pick as usize % n.max(1);
            match kind {
                0..=9 => {
                    let sizes = [1u64, 4096, 5000, 20_000, 65_536, 200_000, 300_000];
                    let bytes = sizes[nth(sizes.len())];
                    let before = model.tier.stats();
                    let with_free = model.has_room(bytes.next_multiple_of(PIECE_ALIGN_BYTES));
                    match model.tier.alloc(bytes) {
                        Ok(piece) => model.mark(piece, bytes),
                        Err(error) => {
                            prop_assert!(!with_free, "a piece was free: {error}");
                            let after = model.tier.stats();
                            prop_assert_eq!(after.live_pieces, before.live_pieces);
                            prop_assert_eq!(after.empty_slabs, 0, "spares are freed first");
                            let slab = (slab_kib << 10).max(bytes) + 20_000;
                            let mapped: u64 =
                                model.tier.slabs().map(|s| s.mapped_bytes).sum();
                            prop_assert!(mapped + slab > max_kib << 10
                                || after.cost_bytes + slab > limit);
                        }
                    }
                }
                10..=16 => {
                    let piece = model.live.keys().nth(nth(model.live.len())).copied();
                    piece.into_iter().for_each(|piece| model.free(piece));
                }
                17 => {
                    let before = held(&model.account);
                    let given = model.tier.trim();
                    prop_assert_eq!(held(&model.account), before - given);
                    prop_assert_eq!(model.tier.stats().empty_slabs, 0);
                }
                _ => {
                    let facts: Vec<SlabInfo> = model.tier.slabs().collect();
                    if let Some(slab) = facts.get(nth(facts.len())) {
                        model.tier.drain(slab.number, kind == 18).expect("mapped");
                    }
                }
            }
            model.check();
        }
        for piece in model.live.keys().copied().collect::<Vec<_>>() {
            model.free(piece);
        }
        model.check();
        model.tier.trim();
        prop_assert_eq!((held(&model.account), model.tier.classes().count()), (0, 0));
    }
}

#[test]
fn an_emptied_slab_serves_another_size() {
    let runtime = runtime("faults()");
    let budget = budget(&runtime, 3 * 300_000);
    let account = budget.account("cells", 0, None).expect("an account");
    let mut tier = HostTier::new(Some(account.clone()), &small(256 << 10, 0)).expect("sound");
    let mut pieces = Vec::new();
    while let Ok(piece) = tier.alloc(8192) {
        pieces.push(piece);
    }
    assert_eq!((pieces.len(), tier.stats().slabs), (96, 3));
    assert_eq!(tier.alloc(4096).expect_err("full").status(), Status::Budget);
    assert_eq!(tier.classes().count(), 1, "a class without slabs is unused");
    // As the store does: drain the emptiest slab, free its pieces, allocate the other size.
    tier.free(pieces[40]).expect("live");
    let emptiest = tier.emptiest().expect("some");
    assert_eq!((emptiest.number, emptiest.live_pieces, emptiest.pieces), (1, 31, 32));
    tier.drain(emptiest.number, true).expect("mapped");
    assert_eq!(tier.alloc(8192).expect_err("it drains").status(), Status::Budget);
    for (piece, _) in tier.live_pieces(emptiest.number).collect::<Vec<_>>() {
        tier.free(piece).expect("live");
    }
    assert_eq!(tier.stats().slabs, 2);
    let other = tier.alloc(4096).expect("room");
    assert_eq!(tier.bytes(other).expect("live"), 4096);
    assert_eq!(other.slab(), emptiest.number, "the number is reused");
}

#[test]
fn a_spare_slab_serves_another_size_without_new_memory() {
    let mut tier = HostTier::new(None, &small(1 << 20, 1 << 20)).expect("sound");
    let large = tier.alloc(65_536).expect("room");
    let address = tier.address(large).expect("live");
    tier.free(large).expect("live");
    assert_eq!((tier.stats().slabs, tier.stats().empty_slabs), (1, 1));
    let tiny = tier.alloc(100).expect("room");
    assert_eq!(tier.address(tiny).expect("live"), address);
    assert_eq!(tier.alloc(65_536).expect_err("one slab").status(), Status::Limit);
    assert_eq!(tier.trim(), 0);
}

#[test]
fn a_piece_that_is_not_in_use_is_rejected() {
    let mut tier = HostTier::new(None, &small(64 << 10, 256 << 10)).expect("sound");
    let (held, freed) = (tier.alloc(4096).expect("room"), tier.alloc(4096).expect("room"));
    tier.free(freed).expect("live");
    let before = tier.stats();
    let past_the_last = Piece(held.0 + 16);
    for stale in [freed, past_the_last, Piece(NONE), Piece(7 << INDEX_BITS)] {
        let mut caught = |call: &mut dyn FnMut(&mut HostTier) -> Option<Status>| {
            let call = std::panic::AssertUnwindSafe(|| call(&mut tier));
            let found = std::panic::catch_unwind(call);
            // Debug builds panic, others return an error.
            assert_eq!(found.is_err(), cfg!(debug_assertions));
            assert_eq!(found.ok().flatten(), (!cfg!(debug_assertions)).then_some(Status::Invalid));
        };
        caught(&mut |tier| tier.free(stale).err().map(|e| e.status()));
        caught(&mut |tier| tier.address(stale).err().map(|e| e.status()));
        caught(&mut |tier| tier.bytes(stale).err().map(|e| e.status()));
    }
    assert_eq!(tier.stats(), before);
    assert_eq!(tier.drain(9, true).expect_err("none").status(), Status::NotFound);
    tier.free(held).expect("live");
}

#[test]
fn slabs_are_cut_with_little_loss() {
    let mut tier = HostTier::new(None, &small(0, 0)).expect("sound");
    // 32 pieces of 1 MiB fill a slab. Three of 9 MiB would lose 5 of 32 MiB, so their slab has 27
    // MiB, rounded up to 28 MiB of huge pages. A piece longer than a slab has its own slab.
    for (bytes, pieces, mapped) in
        [(1 << 20, 32, 32 << 20), (9 << 20, 3, 28 << 20), (40 << 20, 1, 40 << 20)]
    {
        let piece = tier.alloc(bytes).expect("room");
        let slab = tier.slabs().find(|s| s.number == piece.slab()).expect("mapped");
        assert_eq!(slab.pieces, pieces);
        let tables = slab.cost_bytes.checked_sub(mapped).expect("all memory is charged");
        // A bit and a word for each piece of the smallest size.
        let most = mapped / PIECE_ALIGN_BYTES * 9 + 8192;
        assert!((1..most).contains(&tables), "{slab:?}");
    }
    assert!(tier.alloc(0).is_err());
    assert!(tier.alloc(u64::MAX).is_err());
    assert!(HostTier::new(None, &small(u64::MAX, 0)).is_err());
}

#[test]
fn every_piece_of_a_slab_is_allocated_once() {
    for pieces in [1u64, 63, 64, 65, 128, 1000, 4096, 5000] {
        let mut tier =
            HostTier::new(None, &small(pieces * PIECE_ALIGN_BYTES, pieces * PIECE_ALIGN_BYTES))
                .expect("sound");
        let mut live: Vec<Piece> =
            (0..pieces).map(|_| tier.alloc(PIECE_ALIGN_BYTES).expect("room")).collect();
        for round in 1..6 {
            let mut places: Vec<usize> =
                live.iter().map(|&piece| tier.address(piece).expect("live") as usize).collect();
            places.sort_unstable();
            assert!(places.windows(2).all(|w| w[1] - w[0] == PIECE_ALIGN_BYTES as usize));
            assert_eq!(tier.alloc(PIECE_ALIGN_BYTES).expect_err("full").status(), Status::Limit);
            // Some are freed and allocated again.
            for at in (0..live.len()).step_by(round) {
                tier.free(live[at]).expect("live");
            }
            for at in (0..live.len()).step_by(round) {
                live[at] = tier.alloc(PIECE_ALIGN_BYTES).expect("room");
            }
        }
        assert_eq!(tier.live_pieces(0).count() as u64, pieces);
    }
}

#[test]
fn more_sizes_than_classes_share_larger_pieces() {
    let mut tier = HostTier::new(None, &small(64 << 10, 0)).expect("sound");
    let size = |i: usize| (i as u64 + 1) * 2 * PIECE_ALIGN_BYTES;
    let pieces: Vec<Piece> = (0..MAX_CLASSES).map(|i| tier.alloc(size(i)).expect("room")).collect();
    let shared = tier.alloc(PIECE_ALIGN_BYTES * 3).expect("room");
    assert_eq!(tier.bytes(shared).expect("live"), PIECE_ALIGN_BYTES * 4);
    let most = tier.alloc(size(MAX_CLASSES)).expect_err("no larger class");
    assert_eq!(most.status(), Status::Limit);
    tier.free(pieces[9]).expect("live");
    tier.alloc(size(MAX_CLASSES)).expect("the class of a spare is freed");
}

#[test]
fn a_mapping_that_fails_leaves_no_trace() {
    let runtime = runtime("faults(map=at(fail=2))");
    let budget = budget(&runtime, 1 << 30);
    let account = budget.account("cells", 0, None).expect("an account");
    let mut tier = HostTier::new(Some(account.clone()), &small(1 << 20, 0)).expect("sound");
    let piece = tier.alloc(1 << 20).expect("room");
    let (stats, paid) = (tier.stats(), held(&account));
    assert_eq!(tier.alloc(1 << 19).expect_err("planted").status(), Status::Io);
    assert_eq!((tier.stats(), held(&account)), (stats, paid));
    assert_eq!(tier.classes().count(), 1);
    tier.alloc(1 << 19).expect("the next time");
    tier.free(piece).expect("live");
    drop(tier);
    assert_eq!(held(&account), 0);
    account.close().expect("it holds nothing");
}

#[test]
fn the_tier_is_send() {
    fn is_send<T: Send>() {}
    is_send::<HostTier>();
    assert!(size_of::<Option<Piece>>() <= 8 && Piece::new(MAX_SLABS - 1, MAX_PIECES - 1).0 != NONE);
}
