//! The kernel that copies runs of bytes.

use kvtier::device::call::{Call, Kind};
use proptest::prelude::*;

use super::{Chance, at, run, to};

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: u64,
    to: u64,
    from_stride: i64,
    to_stride: i64,
    run_bytes: u32,
    runs: u32,
}

/// Form of a piece: runs are multiples of `grain`, `gap` bytes lie between them.
#[derive(Clone, Debug)]
struct Like {
    grain: usize,
    run: usize,
    runs: usize,
    gap: usize,
    is_backward: bool,
}

fn like() -> impl Strategy<Value = Like> {
    let grain = prop::sample::select(vec![1_usize, 2, 4, 8, 16]);
    let run = prop_oneof![1_usize..20, 1_usize..300, 500_usize..2500];
    let runs = prop_oneof![Just(0_usize), Just(1_usize), 1_usize..40];
    let gap = (grain.clone(), 0_usize..5);
    (grain, run, runs, gap, any::<bool>()).prop_map(
        |(grain, run, runs, (unit, gaps), is_backward)| Like {
            grain,
            run,
            runs,
            gap: gaps * unit,
            is_backward,
        },
    )
}

/// Places for pieces, one behind the other in both memories.
fn lay(likes: &[Like], from: u64, to: u64) -> (Vec<Piece>, usize) {
    let (mut pieces, mut end) = (Vec::new(), 0_usize);
    for like in likes {
        // The piece is aligned to its grain only.
        end = end.next_multiple_of(16) + like.grain % 16;
        let run = like.run * like.grain;
        let stride = run + like.gap;
        let reach = stride * like.runs;
        let (last, stride) = (reach.saturating_sub(stride) as u64, stride as i64);
        let mut piece = Piece {
            from: from + end as u64,
            to: to + end as u64,
            from_stride: stride,
            to_stride: stride,
            run_bytes: run as u32,
            runs: like.runs as u32,
        };
        if like.is_backward {
            (piece.from, piece.from_stride) = (piece.from + last, -stride);
        }
        pieces.push(piece);
        end += reach;
    }
    (pieces, end + 16)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn moves_write_exactly_their_bytes(
        likes in prop::collection::vec(like(), 1..60),
        keep in prop::sample::select(vec![0_u32, 1, 3, 100]),
        seed in any::<u64>(),
    ) {
        let (_, bytes) = lay(&likes, 0, 0);
        let source = Chance::new(seed).bytes(bytes + 16);
        let mut target = vec![0xEE_u8; bytes + 16];
        // Both begin at a multiple of 16.
        let start = |address: u64| (address.next_multiple_of(16) - address) as usize;
        let (from, into) = (start(at(&source)), start(to(&mut target)));
        let mut expected = target.clone();
        let (pieces, _) = lay(&likes, 0, 0);
        for piece in &pieces {
            for run in 0..i64::from(piece.runs) {
                let run_from = from + (piece.from as i64 + run * piece.from_stride) as usize;
                let run_to = into + (piece.to as i64 + run * piece.to_stride) as usize;
                let bytes = piece.run_bytes as usize;
                expected[run_to..run_to + bytes].copy_from_slice(&source[run_from..][..bytes]);
            }
        }
        let (pieces, _) = lay(&likes, at(&source) + from as u64, to(&mut target) + into as u64);
        let mut scratch = vec![u64::MAX; pieces.len() + 1];
        run(&Call {
            kind: Kind::Move as u32,
            table: at(&pieces),
            count: pieces.len() as u32,
            keep,
            scratch: to(&mut scratch),
            scratch_bytes: 8 * scratch.len() as u64,
            ..Call::default()
        });
        prop_assert!(target == expected);
    }
}

/// More pieces than a block plans at once, some of them empty. Threads run in another order each
/// time.
#[test]
fn moves_plan_thousands_of_pieces() {
    let mut chance = Chance::new(7);
    let likes: Vec<Like> = (0..9000)
        .map(|_| chance.word() as usize % 3)
        .map(|runs| Like { grain: 4, run: 5, runs, gap: 0, is_backward: false })
        .collect();
    let (_, bytes) = lay(&likes, 0, 0);
    let source = chance.bytes(bytes);
    for _ in 0..4 {
        let mut target = vec![0; bytes];
        let (pieces, _) = lay(&likes, at(&source), to(&mut target));
        let mut scratch = vec![0_u64; pieces.len() + 1];
        run(&Call {
            kind: Kind::Move as u32,
            table: at(&pieces),
            count: pieces.len() as u32,
            scratch: to(&mut scratch),
            scratch_bytes: 8 * scratch.len() as u64,
            ..Call::default()
        });
        for piece in &pieces {
            let (from, bytes) = ((piece.from - at(&source)) as usize, 20 * piece.runs as usize);
            assert_eq!(source[from..from + bytes], target[from..from + bytes]);
        }
    }
}
