//! Data types of model files, and their sizes.

/// A data type. Elements are stored in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtype {
    /// Name in the file's format.
    pub name: &'static str,
    /// Elements of a block; a row is made of whole blocks.
    pub block: u64,
    /// Bits of a block.
    pub bits: u64,
}

impl Dtype {
    const fn new(name: &'static str, block: u64, bytes: u64) -> Dtype {
        Dtype { name, block, bits: bytes * 8 }
    }

    /// Bytes of a tensor. None if rows are not whole blocks, if the tensor does not end at a byte,
    /// or if the size overflows.
    pub fn bytes(&self, dims: &[u64]) -> Option<u64> {
        let row = dims.first().copied().unwrap_or(1);
        if row % self.block != 0 {
            return None;
        }
        let rows = dims.iter().skip(1).try_fold(1u64, |n, &dim| n.checked_mul(dim))?;
        let bits = (row / self.block).checked_mul(rows)?.checked_mul(self.bits)?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

/// Meaning of a type number in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ggml {
    /// A supported type.
    Known(Dtype),
    /// A type that ggml removed.
    Removed(&'static str),
    /// An unknown type.
    Unknown,
}

/// The type of a number in a GGUF file.
pub fn ggml(number: u32) -> Ggml {
    let (name, block, bytes) = match number {
        0 => ("F32", 1, 4),
        1 => ("F16", 1, 2),
        2 => ("Q4_0", 32, 18),
        3 => ("Q4_1", 32, 20),
        4 => return Ggml::Removed("Q4_2"),
        5 => return Ggml::Removed("Q4_3"),
        6 => ("Q5_0", 32, 22),
        7 => ("Q5_1", 32, 24),
        8 => ("Q8_0", 32, 34),
        9 => ("Q8_1", 32, 36),
        10 => ("Q2_K", 256, 84),
        11 => ("Q3_K", 256, 110),
        12 => ("Q4_K", 256, 144),
        13 => ("Q5_K", 256, 176),
        14 => ("Q6_K", 256, 210),
        15 => ("Q8_K", 256, 292),
        16 => ("IQ2_XXS", 256, 66),
        17 => ("IQ2_XS", 256, 74),
        18 => ("IQ3_XXS", 256, 98),
        19 => ("IQ1_S", 256, 50),
        20 => ("IQ4_NL", 32, 18),
        21 => ("IQ3_S", 256, 110),
        22 => ("IQ2_S", 256, 82),
        23 => ("IQ4_XS", 256, 136),
        24 => ("I8", 1, 1),
        25 => ("I16", 1, 2),
        26 => ("I32", 1, 4),
        27 => ("I64", 1, 8),
        28 => ("F64", 1, 8),
        29 => ("IQ1_M", 256, 56),
        30 => ("BF16", 1, 2),
        31 => return Ggml::Removed("Q4_0_4_4"),
        32 => return Ggml::Removed("Q4_0_4_8"),
        33 => return Ggml::Removed("Q4_0_8_8"),
        34 => ("TQ1_0", 256, 54),
        35 => ("TQ2_0", 256, 66),
        36 => return Ggml::Removed("IQ4_NL_4_4"),
        37 => return Ggml::Removed("IQ4_NL_4_8"),
        38 => return Ggml::Removed("IQ4_NL_8_8"),
        39 => ("MXFP4", 32, 17),
        40 => ("NVFP4", 64, 36),
        41 => ("Q1_0", 128, 18),
        42 => ("Q2_0", 64, 18),
        _ => return Ggml::Unknown,
    };
    Ggml::Known(Dtype::new(name, block, bytes))
}

/// Types of safetensors files, with their bits.
const SAFETENSORS: [(&str, u64); 22] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// The type of a name in a safetensors file.
pub fn safetensors(name: &str) -> Option<Dtype> {
    let (name, bits) = SAFETENSORS.iter().find(|(known, _)| *known == name)?;
    Some(Dtype { name, block: 1, bits: *bits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_blocks_and_overflow_have_no_size() {
        let Ggml::Known(q4_k) = ggml(12) else { panic!("known") };
        assert_eq!(q4_k.bytes(&[256, 3, 2]), Some(864));
        assert_eq!((q4_k.bytes(&[255, 256]), q4_k.bytes(&[])), (None, None));
        assert_eq!(q4_k.bytes(&[1 << 32, 1 << 32]), None);
        assert_eq!(q4_k.bytes(&[u64::MAX - 255]), None);
        let f4 = safetensors("F4").expect("known");
        assert_eq!((f4.bytes(&[3, 2]), f4.bytes(&[3])), (Some(3), None));
        let f32 = safetensors("F32").expect("known");
        assert_eq!((f32.bytes(&[]), f32.bytes(&[5, 0])), (Some(4), Some(0)));
        assert_eq!(safetensors("f32"), None);
        assert_eq!((ggml(4), ggml(43)), (Ggml::Removed("Q4_2"), Ggml::Unknown));
    }
}
