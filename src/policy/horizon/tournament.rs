//! The lowest of many changing keys: a tree of winners. A change costs the height of the tree; the
//! lowest key is read in O(1).

/// Keys by index, and the index of the lowest one.
pub struct Tournament<K> {
    /// A power of two; behind the last key they are the highest.
    keys: Vec<K>,
    len: usize,
    /// Winners: of all keys at 1, of the halves at 2 and 3, and so on.
    winners: Vec<u32>,
    highest: K,
}

impl<K: Copy + PartialOrd> Tournament<K> {
    /// No keys; `highest` loses against all others.
    pub fn new(highest: K) -> Tournament<K> {
        Tournament { keys: vec![highest], len: 1, winners: vec![0; 2], highest }
    }

    /// Adds one key, the highest.
    pub fn grow(&mut self) {
        self.len += 1;
        if self.len > self.keys.len() {
            let places = self.keys.len() * 2;
            self.keys.resize(places, self.highest);
            self.winners = vec![0; places * 2];
            for i in 0..places {
                self.winners[places + i] = i as u32;
            }
            for at in (1..places).rev() {
                self.winners[at] = self.better(self.winners[2 * at], self.winners[2 * at + 1]);
            }
        }
    }

    #[inline]
    fn better(&self, a: u32, b: u32) -> u32 {
        if self.keys[b as usize] < self.keys[a as usize] { b } else { a }
    }

    /// The key at an index.
    #[inline]
    pub fn get(&self, at: u32) -> K {
        self.keys[at as usize]
    }

    /// Changes the key at an index.
    #[inline]
    pub fn set(&mut self, at: u32, key: K) {
        self.keys[at as usize] = key;
        let mut up = (self.keys.len() + at as usize) / 2;
        while up > 0 {
            let winner = self.better(self.winners[2 * up], self.winners[2 * up + 1]);
            let before = std::mem::replace(&mut self.winners[up], winner);
            if before == winner && winner != at {
                // Another key wins as before, so nothing changes above.
                return;
            }
            up /= 2;
        }
    }

    /// The index of the lowest key; the lowest index of equals.
    #[inline]
    pub fn least(&self) -> u32 {
        self.winners[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_key_is_found_after_every_change() {
        let mut tree = Tournament::new(f32::INFINITY);
        let mut model = vec![f32::INFINITY];
        let mut state = 3u64;
        for _ in 0..5_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if state >> 60 == 0 {
                tree.grow();
                model.push(f32::INFINITY);
            }
            let at = ((state >> 20) % model.len() as u64) as u32;
            let key = if state >> 61 == 1 { f32::INFINITY } else { (state >> 50) as f32 };
            tree.set(at, key);
            model[at as usize] = key;
            let least = model.iter().copied().fold(f32::INFINITY, f32::min);
            let expected = model.iter().position(|&k| k == least).expect("some");
            assert_eq!((tree.least() as usize, tree.get(tree.least())), (expected, least));
        }
    }
}
