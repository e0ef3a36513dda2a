//! Number types of KV planes.

/// A number type. The library moves bytes of any type; codecs and kernels interpret them. Append
/// only: codes cross the C boundary and are hashed into layout fingerprints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Dtype {
    /// Bytes that only the engine understands.
    #[default]
    Bytes = 0,
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper half of a binary32.
    Bf16 = 3,
    /// 8 bits, 4 of exponent and 3 of mantissa.
    F8E4m3 = 4,
    /// 8 bits, 5 of exponent and 2 of mantissa.
    F8E5m2 = 5,
    /// Signed 8-bit integers.
    I8 = 6,
    /// 4 bits each, two to a byte.
    I4 = 7,
}

impl Dtype {
    /// Every type, by code.
    pub const ALL: [Dtype; 8] = [
        Dtype::Bytes,
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::F8E4m3,
        Dtype::F8E5m2,
        Dtype::I8,
        Dtype::I4,
    ];

    /// The code that crosses the C boundary.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The type of a code, if known.
    pub fn from_code(code: u32) -> Option<Dtype> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// Bits of a number.
    pub const fn bits(self) -> u32 {
        match self {
            Dtype::F32 => 32,
            Dtype::F16 | Dtype::Bf16 => 16,
            Dtype::Bytes | Dtype::F8E4m3 | Dtype::F8E5m2 | Dtype::I8 => 8,
            Dtype::I4 => 4,
        }
    }

    /// Name in specs and in the tool.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Bytes => "bytes",
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::F8E4m3 => "fp8_e4m3",
            Dtype::F8E5m2 => "fp8_e5m2",
            Dtype::I8 => "int8",
            Dtype::I4 => "int4",
        }
    }

    /// The type with a name.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of `count` numbers, if they fill whole bytes.
    pub fn bytes_of(self, count: u64) -> Option<u64> {
        let bits = count.checked_mul(u64::from(self.bits()))?;
        (bits % 8 == 0).then_some(bits / 8)
    }

    /// Whether `bytes` bytes hold a whole count of numbers.
    pub fn fills(self, bytes: u64) -> bool {
        bytes % u64::from(self.bits().div_ceil(8)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for (code, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype.code() as usize, code);
            assert_eq!(Dtype::from_code(code as u32), Some(dtype));
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!((Dtype::from_code(8), Dtype::from_code(u32::MAX)), (None, None));
        assert_eq!(Dtype::from_name("f64"), None);
        assert_eq!(Dtype::default(), Dtype::Bytes);
    }

    #[test]
    fn sizes_are_whole_bytes_or_none() {
        assert_eq!(Dtype::Bf16.bytes_of(128), Some(256));
        assert_eq!((Dtype::I4.bytes_of(128), Dtype::I4.bytes_of(3)), (Some(64), None));
        assert_eq!(Dtype::F32.bytes_of(u64::MAX / 8), None);
        assert!(Dtype::F32.fills(8) && !Dtype::F32.fills(6) && Dtype::I4.fills(7));
    }
}
