//! The ring between two processes: no frame is lost, torn or reordered, and no side sleeps while the
//! other one waits for it.

use kvtier::base::sync::{Arc, spawn};
use kvtier::io::ring::{Reader, Words, Writer};

/// Less than the longest frame, so that it passes in parts.
const CAPACITY: u64 = 64;
const LENGTHS: [usize; 6] = [0, 1, 40, 100, 8, 63];

/// The memory of a ring; each byte belongs to one side at a time.
struct Memory {
    words: Words,
    data: Vec<u8>,
}

fn frame(number: usize) -> Vec<u8> {
    (0..LENGTHS[number]).map(|at| (at * 7 + number) as u8).collect()
}

fn frames_pass() {
    let mut data = vec![0; CAPACITY as usize];
    let start = data.as_mut_ptr();
    let memory = Arc::new(Memory { words: Words::default(), data });
    // SAFETY: both ends are dropped before the memory: each thread keeps it.
    let (mut writer, mut reader) = unsafe {
        let words = &raw const memory.words;
        (Writer::new(words, start, CAPACITY), Reader::new(words, start, CAPACITY))
    };
    let kept = memory.clone();
    let thread = spawn("writer".into(), move || {
        for number in 0..LENGTHS.len() {
            let mut wait = |writer: &mut Writer| writer.sleep(u64::MAX);
            writer.write(&frame(number), &mut wait).expect("the reader keeps the rules");
        }
        drop(kept);
    });
    let mut got = Vec::new();
    for number in 0..LENGTHS.len() {
        got.clear();
        while !reader.try_read(&mut got).expect("the writer keeps the rules") {
            reader.wait(u64::MAX).expect("the writer keeps the rules");
        }
        assert_eq!(got, frame(number));
    }
    thread.expect("spawned").join().expect("ended");
    assert_eq!(memory.data.len() as u64, CAPACITY);
}

#[test]
fn frames_pass_in_every_interleaving() {
    shuttle::check_random(frames_pass, 2000);
    shuttle::check_pct(frames_pass, 1000, 3);
}
