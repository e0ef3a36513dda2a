//! Little-endian fields at fixed offsets of a byte slice. Fields outside the slice read as zero and
//! are not written: callers check lengths, and nothing can panic.

/// The 16-bit number at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

/// The 32-bit number at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

/// The 64-bit number at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// The `N` bytes at `at`.
pub fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let end = at.saturating_add(N);
    bytes.get(at..end).and_then(|b| b.try_into().ok()).unwrap_or([0; N])
}

/// Writes bytes at `at`.
pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    let end = at.saturating_add(value.len());
    if let Some(place) = bytes.get_mut(at..end) {
        place.copy_from_slice(value);
    }
}

/// Writes a 16-bit number at `at`.
pub fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    put(bytes, at, &value.to_le_bytes());
}

/// Writes a 32-bit number at `at`.
pub fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    put(bytes, at, &value.to_le_bytes());
}

/// Writes a 64-bit number at `at`.
pub fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    put(bytes, at, &value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_round_trip_and_stay_inside() {
        let mut bytes = [0u8; 16];
        put_u64(&mut bytes, 3, 0x0102_0304_0506_0708);
        put_u16(&mut bytes, 0, 0xAABB);
        put_u32(&mut bytes, 12, 7);
        assert_eq!(bytes[3], 8);
        assert_eq!(u64_at(&bytes, 3), 0x0102_0304_0506_0708);
        assert_eq!((u16_at(&bytes, 0), u32_at(&bytes, 12)), (0xAABB, 7));
        put_u64(&mut bytes, 9, u64::MAX);
        put_u64(&mut bytes, usize::MAX, u64::MAX);
        assert_eq!((u64_at(&bytes, 9), u32_at(&bytes, usize::MAX), u32_at(&bytes, 12)), (0, 0, 7));
    }
}
