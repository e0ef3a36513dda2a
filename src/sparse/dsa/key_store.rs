//! Keys of one layer's indexer: 8 bits a number and one scale a token, or f32.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::dsa::fp8;
use crate::sparse::numbers::{all_finite, read, reserve, zeros};
use crate::sparse::prefill_inputs::not_finite;

/// The smallest magnitude that a scale is computed from, as in the published code.
const LEAST: f32 = 1e-4;
/// Bytes before the keys of a saved block: form, three zeros, tokens, numbers of a key.
const HEAD_BYTES: usize = 12;

/// Keys from the first token on.
#[derive(Debug, Default)]
pub struct KeyStore {
    dim: usize,
    is_small: bool,
    tokens: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    numbers: Vec<f32>,
}

impl KeyStore {
    /// An empty store of keys of `dim` numbers.
    pub fn new(dim: u32, is_small: bool) -> KeyStore {
        KeyStore { dim: dim as usize, is_small, ..KeyStore::default() }
    }

    /// Tokens with a key.
    pub fn tokens(&self) -> u32 {
        self.tokens as u32
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let floats = self.scales.capacity() + self.numbers.capacity();
        (self.codes.capacity() + floats * size_of::<f32>()) as u64
    }

    /// A copy.
    pub fn copy(&self) -> Result<KeyStore> {
        let mut copy = KeyStore { dim: self.dim, is_small: self.is_small, ..KeyStore::default() };
        copy.reserve(self.tokens)?;
        copy.codes.extend_from_slice(&self.codes);
        copy.scales.extend_from_slice(&self.scales);
        copy.numbers.extend_from_slice(&self.numbers);
        copy.tokens = self.tokens;
        Ok(copy)
    }

    fn reserve(&mut self, tokens: usize) -> Result<()> {
        if self.is_small {
            reserve(&mut self.codes, tokens * self.dim)?;
            return reserve(&mut self.scales, tokens);
        }
        reserve(&mut self.numbers, tokens * self.dim)
    }

    /// Appends the keys of tokens: all of them or none.
    pub fn append(&mut self, keys: &Rows<'_>) -> Result<()> {
        let mut row = Vec::new();
        zeros(&mut row, self.dim)?;
        self.reserve(keys.tokens() as usize)?;
        let before = self.tokens;
        for token in 0..keys.tokens() {
            if !read(keys, token, 0, &mut row) {
                self.truncate(before);
                return Err(not_finite("keys"));
            }
            self.push(&row);
        }
        Ok(())
    }

    fn push(&mut self, row: &[f32]) {
        if self.is_small {
            let most = row.iter().fold(LEAST, |most, x| most.max(x.abs()));
            let scale = most / fp8::MOST;
            self.codes.extend(row.iter().map(|x| fp8::encode(x / scale)));
            self.scales.push(scale);
        } else {
            self.numbers.extend_from_slice(row);
        }
        self.tokens += 1;
    }

    /// Drops the tokens from `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens = self.tokens.min(tokens);
        self.codes.truncate(self.tokens * self.dim);
        self.scales.truncate(self.tokens);
        self.numbers.truncate(self.tokens * self.dim);
    }

    /// Reads keys from token `first` on into rows. Rows beyond the last key stay unchanged.
    pub fn read(&self, first: usize, out: &mut [f32]) {
        let at = first * self.dim;
        if !self.is_small {
            let from = self.numbers.get(at..).unwrap_or_default();
            out.iter_mut().zip(from).for_each(|(to, x)| *to = *x);
            return;
        }
        let codes = self.codes.get(at..).unwrap_or_default().chunks_exact(self.dim);
        let scales = self.scales.get(first..).unwrap_or_default();
        for ((row, codes), scale) in out.chunks_exact_mut(self.dim).zip(codes).zip(scales) {
            row.iter_mut().zip(codes).for_each(|(to, &code)| *to = fp8::decode(code) * scale);
        }
    }

    /// Appends the keys of tokens to `out`, in the saved form.
    pub fn save(&self, first: usize, tokens: usize, out: &mut Vec<u8>) -> Result<()> {
        let numbers = first * self.dim..(first + tokens) * self.dim;
        let (codes, scales) =
            (self.codes.get(numbers.clone()), self.scales.get(first..first + tokens));
        let parts = match (self.is_small, codes, scales, self.numbers.get(numbers)) {
            (true, Some(codes), Some(scales), _) => (codes, scales),
            (false, _, _, Some(numbers)) => (&[][..], numbers),
            _ => fail!(NotFound, "keys of {tokens} tokens from {first} on"),
        };
        reserve(out, HEAD_BYTES + parts.0.len() + parts.1.len() * 4)?;
        out.extend_from_slice(&[u8::from(self.is_small), 0, 0, 0]);
        out.extend_from_slice(&(tokens as u32).to_le_bytes());
        out.extend_from_slice(&(self.dim as u32).to_le_bytes());
        parts.1.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        out.extend_from_slice(parts.0);
        Ok(())
    }

    /// The number of tokens in saved bytes. Fails with `Corrupt` if any byte is wrong.
    pub fn check_saved(&self, bytes: &[u8]) -> Result<u32> {
        let word = |at: usize| {
            let word = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes(word.try_into().ok()?))
        };
        let (form, dim) = (u32::from(self.is_small), self.dim as u32);
        let Some((tokens, body)) = word(4).zip(bytes.get(HEAD_BYTES..)) else {
            fail!(Corrupt, "{} bytes of saved keys", bytes.len());
        };
        if word(0) != Some(form) || word(8) != Some(dim) {
            fail!(Corrupt, "saved keys are of another form or size");
        }
        let each = if self.is_small { 4 + u64::from(dim) } else { 4 * u64::from(dim) };
        if tokens == 0 || u64::from(tokens) * each != body.len() as u64 {
            fail!(Corrupt, "{} bytes of saved keys of {tokens} tokens", body.len());
        }
        let floats = if self.is_small { tokens as usize * 4 } else { body.len() };
        let is_sound = body.get(..floats).unwrap_or_default().chunks_exact(4).all(|word| {
            let x = f32::from_le_bytes(word.try_into().unwrap_or([0xFF; 4]));
            all_finite(&[x]) && (!self.is_small || x > 0.0)
        });
        let mut codes = body.get(floats..).unwrap_or_default().iter();
        if !is_sound || codes.any(|code| code & 0x7F == fp8::NAN) {
            fail!(Corrupt, "saved keys are not all finite");
        }
        Ok(tokens)
    }

    /// Appends keys from saved bytes, which are checked.
    pub fn load(&mut self, bytes: &[u8]) -> Result<()> {
        let tokens = self.check_saved(bytes)? as usize;
        self.reserve(tokens)?;
        let body = bytes.get(HEAD_BYTES..).unwrap_or_default();
        let floats = if self.is_small { tokens * 4 } else { body.len() };
        let (floats, codes) = body.split_at(floats.min(body.len()));
        let floats = floats
            .chunks_exact(4)
            .filter_map(|word| Some(f32::from_le_bytes(word.try_into().ok()?)));
        if self.is_small { &mut self.scales } else { &mut self.numbers }.extend(floats);
        self.codes.extend_from_slice(codes);
        self.tokens += tokens;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::numbers::testing::rows;

    #[test]
    fn append_is_all_or_nothing_and_keys_round_trip() {
        for is_small in [true, false] {
            let numbers: Vec<f32> = (0..64).map(|n| (n as f32 - 30.0) * 1e-3).collect();
            let mut key_store = KeyStore::new(16, is_small);
            key_store.append(&rows(&numbers, 1, 16)).expect("finite");
            let mut bad = numbers.clone();
            bad[40] = f32::NAN;
            assert!(key_store.append(&rows(&bad, 1, 16)).is_err());
            assert_eq!(key_store.tokens(), 4);
            let mut back = vec![0.0; 64];
            key_store.read(0, &mut back);
            for (row, expected) in back.chunks(16).zip(numbers.chunks(16)) {
                let most = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
                for (x, expected) in row.iter().zip(expected) {
                    let step = if is_small { most / 28.0 + expected.abs() / 16.0 } else { 0.0 };
                    assert!((x - expected).abs() <= step, "{x} {expected}");
                }
            }
            let mut saved = Vec::new();
            key_store.save(1, 2, &mut saved).expect("found");
            assert_eq!(saved.len(), 12 + 2 * if is_small { 20 } else { 64 });
            let mut other = KeyStore::new(16, is_small);
            other.load(&saved).expect("sound");
            let mut again = vec![0.0; 32];
            other.read(0, &mut again);
            assert_eq!(again, back[16..48]);
            assert!(key_store.save(3, 2, &mut saved).is_err());
        }
    }

    #[test]
    fn damaged_saved_bytes_are_rejected() {
        for is_small in [true, false] {
            let numbers: Vec<f32> = (1..9).map(|n| n as f32).collect();
            let mut key_store = KeyStore::new(4, is_small);
            key_store.append(&rows(&numbers, 1, 4)).expect("finite");
            let mut saved = Vec::new();
            key_store.save(0, 2, &mut saved).expect("found");
            for len in 0..saved.len() {
                assert!(key_store.check_saved(&saved[..len]).is_err(), "{len}");
            }
            for (at, byte) in
                [(0, 2), (1, 1), (4, 3), (4, 0), (7, 255), (8, 5), (15, 0x7F), (15, 0xFF)]
            {
                let mut bad = saved.clone();
                bad[at] = byte;
                if at == 15 {
                    bad[14] = 0xFF;
                }
                assert!(key_store.load(&bad).is_err(), "{at}");
            }
            if is_small {
                let mut bad = saved.clone();
                bad[20] = 0xFF;
                assert!(key_store.load(&bad).is_err());
            }
            assert_eq!(key_store.tokens(), 2);
            assert!(KeyStore::new(4, !is_small).load(&saved).is_err());
        }
    }
}
