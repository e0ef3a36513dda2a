//! The lowest of many changing keys: a tree of winners. A change costs at most the height of the
//! tree; the lowest key is read in O(1).

#[derive(Clone, Copy)]
struct Winner<K> {
    key: K,
    at: u32,
}

/// Keys by index, and the index of the lowest one.
pub struct Tournament<K> {
    /// Winners: of all keys at 1, of the halves at 2 and 3, and so on; in the last half the keys
    /// themselves. Behind the last key they are the highest.
    tree: Vec<Winner<K>>,
    len: usize,
    highest: K,
}

impl<K: Copy + PartialOrd> Tournament<K> {
    /// No keys; `highest` loses against all others.
    pub fn new(highest: K) -> Tournament<K> {
        Tournament { tree: vec![Winner { key: highest, at: 0 }; 2], len: 1, highest }
    }

    /// Adds one key, the highest.
    pub fn grow(&mut self) {
        let places = self.tree.len() / 2;
        self.len += 1;
        if self.len <= places {
            return;
        }
        let keys = self.tree.split_off(places);
        self.tree.resize(places * 2, keys[0]);
        self.tree.extend(keys);
        let more = (places as u32..2 * places as u32).map(|at| Winner { key: self.highest, at });
        self.tree.extend(more);
        for at in (1..2 * places).rev() {
            self.tree[at] = Self::better(self.tree[2 * at], self.tree[2 * at + 1]);
        }
    }

    #[inline]
    fn better(a: Winner<K>, b: Winner<K>) -> Winner<K> {
        if b.key < a.key { b } else { a }
    }

    /// The key at an index.
    #[inline]
    pub fn get(&self, at: u32) -> K {
        self.tree[self.tree.len() / 2 + at as usize].key
    }

    /// Changes the key at an index.
    #[inline]
    pub fn set(&mut self, at: u32, key: K) {
        let mut place = self.tree.len() / 2 + at as usize;
        self.tree[place].key = key;
        while place > 1 {
            let winner = Self::better(self.tree[place & !1], self.tree[place | 1]);
            place /= 2;
            let before = std::mem::replace(&mut self.tree[place], winner);
            if before.at == winner.at && winner.at != at {
                // Another key wins as before, so nothing changes above.
                return;
            }
        }
    }

    /// The index of the lowest key; the lowest index of equals.
    #[inline]
    pub fn least(&self) -> u32 {
        self.tree[1].at
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
