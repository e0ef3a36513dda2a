//! Routing traces of experts, and their replay.

use kvtier::base::status::Status;
use kvtier_lab::experts::{Counts, Routing, optimum, replay};

const HEAD: &str = "kvtier-routing 1\nlayer 1 0 4 100\nlayer 1 1 4 200\n";

fn read(lines: &str) -> Routing {
    Routing::read(&format!("{HEAD}{lines}")).expect("a trace")
}

#[test]
fn a_trace_has_layers_uses_and_guesses() {
    let routing = read("use 1 0 1 3,1\nuse 1 1 1 0,2 2,1\n");
    assert_eq!((routing.experts(), routing.bytes()), (8, 1200));
    assert_eq!(routing.uses[0].used, [3, 1]);
    // Experts of the second layer follow those of the first.
    assert_eq!(
        (&routing.uses[1].used[..], &routing.uses[1].guessed[..]),
        (&[4, 6][..], &[6, 5][..])
    );
}

#[test]
fn damaged_traces_are_refused_with_their_line() {
    for (text, line) in [
        ("kvtier-routing 2\n".to_string(), "first line"),
        (format!("{HEAD}use 1 2 1 0\n"), "line 4"),
        (format!("{HEAD}use 1 0 1 0\nuse 1 0 1 4\n"), "line 5"),
        (format!("{HEAD}use 1 0 1 -1\n"), "line 4"),
        (format!("{HEAD}use 1 0 1 0 9\n"), "line 4"),
        (format!("{HEAD}layer 1 2 4\n"), "line 4"),
        (format!("{HEAD}rest\n"), "line 4"),
    ] {
        let error = Routing::read(&text).expect_err("damaged");
        assert_eq!(error.status(), Status::Corrupt, "{text}");
        assert!(error.message().contains(line), "{text}: {}", error.message());
    }
    let error = Routing::read(&format!("{HEAD}layer 1 2 99999999999 1\n")).expect_err("too many");
    assert_eq!(error.status(), Status::Limit);
}

#[test]
fn lru_and_the_optimum_count_as_by_hand() {
    let routing = read("use 1 0 1 0\nuse 1 0 1 1\nuse 1 0 1 2\nuse 1 0 1 0\nuse 1 0 1 1\n");
    let lru = replay(&routing, "lru", 2, false).expect("a replay");
    assert_eq!(lru, Counts { uses: 5, ..Counts::default() });
    // Expert 2 replaces 1, which is used later than 0.
    assert_eq!(optimum(&routing, 2), Counts { uses: 5, hits: 1, ..Counts::default() });
    assert_eq!(replay(&routing, "lru", 3, false).expect("a replay").hits, 2);
}

#[test]
fn an_expert_is_read_once_for_a_use_that_does_not_fit() {
    let routing = read("use 1 0 64 0,1,2,3\nuse 1 0 64 0,1,2,3\n");
    let counts = replay(&routing, "lru", 2, false).expect("a replay");
    // The two that the first use left are hits of the second one: they are computed first.
    assert_eq!((counts.uses, counts.hits), (8, 2));
}

#[test]
fn guesses_cover_misses_or_waste_reads() {
    let routing = read("use 1 0 1 0,1\nuse 1 1 1 0,2 2,1\nuse 1 1 1 2 2\n");
    let counts = replay(&routing, "lru", 8, true).expect("a replay");
    // Expert 2 of the second layer was guessed; expert 1 was too, but not used.
    assert_eq!(counts, Counts { uses: 5, hits: 1, covered: 1, wasted: 1 });
    assert_eq!((counts.coverage(), counts.waste()), (0.25, 1.0));
}

#[test]
fn no_policy_beats_the_optimum() {
    let mut seed = 1u32;
    let mut lines = String::new();
    for _ in 0..400 {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (layer, a) = (seed >> 31, (seed >> 8) % 4);
        lines += &format!("use 1 {layer} 1 {a}\n");
    }
    let routing = read(&lines);
    for capacity in 1..8 {
        let most = optimum(&routing, capacity).hits;
        for spec in ["lru", "lfu", "wtinylfu", "s3fifo", "arc", "auto"] {
            let hits = replay(&routing, spec, capacity, false).expect("a replay").hits;
            assert!(hits <= most, "{spec} hits {hits} of {most} in {capacity}");
        }
    }
}
