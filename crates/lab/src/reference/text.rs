//! Texts like those of the models' training (`ffi-tests/models/train.py`).

use super::numbers::Random;

/// Follows a word.
pub const SPACE: u8 = 26;
/// Follows a sentence.
pub const STOP: u8 = 27;
/// Precedes a key and its value.
pub const PAIR: u8 = 28;
/// Precedes a key in a question.
pub const ASK: u8 = 29;
/// First symbol of a text.
pub const BEGIN: u8 = 30;
/// The first of 32 keys.
pub const KEYS: u8 = 32;
/// The first of 32 values.
pub const VALUES: u8 = 64;

const VERBS: &str = "sees takes finds makes holds sends wants gives calls loses opens keeps turns needs tells meets";
const LOOKS: &str = "old new red low big sad raw dry hot shy odd dim wet fat mad calm";
const THINGS: &str =
    "door lamp boat coin road tree song book wall ring rope field clock stone glass river";

/// A text that contains pairs of keys and values.
pub struct Text {
    /// Letters, marks, keys and values.
    pub symbols: Vec<u8>,
    /// The pairs, in the order of the text.
    pub pairs: Vec<(u8, u8)>,
}

fn letters(word: &str) -> Vec<u8> {
    word.bytes().map(|c| c - b'a').collect()
}

fn pick(random: &mut Random, words: &str) -> Vec<u8> {
    letters(words.split(' ').nth(random.below(16) as usize).expect("sixteen"))
}

/// Symbols of sentences about a few names, with the starts of words.
fn sentences(random: &mut Random, length: usize) -> (Vec<u8>, Vec<usize>) {
    let name = |random: &mut Random| (0..4).map(|_| random.below(26) as u8).collect::<Vec<u8>>();
    let names: Vec<Vec<u8>> = (0..6).map(|_| name(random)).collect();
    let (mut out, mut starts) = (Vec::new(), Vec::new());
    while out.len() < length {
        let words = [
            names[random.below(6) as usize].clone(),
            pick(random, VERBS),
            letters("the"),
            pick(random, LOOKS),
            pick(random, THINGS),
            letters("of"),
            names[random.below(6) as usize].clone(),
        ];
        for word in words {
            starts.push(out.len());
            out.extend(word);
            out.push(SPACE);
        }
        *out.last_mut().expect("a space") = STOP;
    }
    out.truncate(length);
    starts.retain(|&start| start < length);
    (out, starts)
}

impl Text {
    /// A text of this many symbols with this many pairs between its words.
    pub fn new(random: &mut Random, symbols: usize, pairs: usize) -> Text {
        let (chars, starts) = sentences(random, symbols - 1 - 3 * pairs);
        let mut keys: Vec<u32> = (0..32).collect();
        random.shuffle(&mut keys);
        let mut places: Vec<usize> =
            (0..pairs).map(|_| starts[random.below(starts.len() as u32) as usize]).collect();
        places.sort_unstable();
        let (mut symbols, mut last, mut placed) = (vec![BEGIN], 0, Vec::new());
        for (key, place) in keys.into_iter().zip(places) {
            let pair = (KEYS + key as u8, VALUES + random.below(32) as u8);
            symbols.extend_from_slice(&chars[last..place]);
            symbols.extend([PAIR, pair.0, pair.1]);
            placed.push(pair);
            last = place;
        }
        symbols.extend_from_slice(&chars[last..]);
        Text { symbols, pairs: placed }
    }

    /// A random selection of the pairs, each at most once.
    pub fn some(&self, random: &mut Random, count: usize) -> Vec<(u8, u8)> {
        let mut places: Vec<u32> = (0..self.pairs.len() as u32).collect();
        random.shuffle(&mut places);
        places.into_iter().take(count).map(|at| self.pairs[at as usize]).collect()
    }
}

/// Questions for keys. Answers are not part of the text: a question follows a question.
pub fn questions(pairs: &[(u8, u8)]) -> Vec<u8> {
    pairs.iter().flat_map(|&(key, _)| [ASK, key]).collect()
}

/// Whether a symbol belongs to a sentence, where the next one is predictable.
pub fn is_plain(symbol: u8) -> bool {
    symbol <= STOP
}
