//! Copies between strided tensors and canonical planes, by the calling thread.
//!
//! Work proceeds in blocks that fit the L1 cache: gather or read a block, sum it, write it. Larger
//! blocks are slower, because the processor finishes one step before it starts to fetch for the
//! next.

use std::mem::MaybeUninit;

use crate::base::checksum::{BLOCK_BYTES, Summer};
use crate::meta::view::{Span, Strip};

/// Copies a tensor to a plane; returns the plane's checksum if `sum`.
///
/// # Safety
/// The span is valid for reads, and the plane for writes of as many bytes. They do not overlap, and
/// nothing else accesses them meanwhile.
pub unsafe fn gather(span: &Span<'_>, plane: *mut u8, sum: bool) -> Option<u64> {
    let mut strips = span.strips();
    let mut summer = sum.then(Summer::default);
    let mut gathered = Block(MaybeUninit::uninit());
    let gathered = gathered.0.as_mut_ptr().cast::<u8>();
    let bytes = span.bytes();
    let mut at = 0;
    while at < bytes {
        let block = (bytes - at).min(BLOCK_BYTES as u64);
        let Some(first) = strips.up_to(block) else { break };
        // SAFETY: the caller's promise: strips stay inside the span, `at` inside the plane, and the
        // strips taken have the length of the block.
        unsafe {
            let mut from = pointer_at(first.address).cast_const();
            if first.count > 1 || first.run_bytes < block {
                from = gathered.cast_const();
                copy_strip::<true>(&first, gathered);
                let mut have = first.bytes();
                while let Some(strip) = strips.up_to(block - have) {
                    copy_strip::<true>(&strip, gathered.add(have as usize));
                    have += strip.bytes();
                }
            }
            if let Some(summer) = &mut summer {
                summer.block(std::slice::from_raw_parts(from, block as usize));
            }
            write_past_caches(from, plane.add(at as usize), block as usize);
        }
        at += block;
    }
    fence_writes();
    summer.map(Summer::finish)
}

/// Copies a plane to a tensor, past the caches if `past_caches`; returns the plane's checksum if
/// `sum`.
///
/// # Safety
/// As for [`gather`], with the plane read and the span written.
pub unsafe fn scatter(
    span: &Span<'_>,
    plane: *const u8,
    past_caches: bool,
    sum: bool,
) -> Option<u64> {
    let plane = plane.cast_mut(); // only read on this way
    let mut strips = span.strips();
    // SAFETY: the caller's promise; strips stay inside the span and the plane.
    let copy = |strip: &Strip| unsafe {
        let plane = plane.add(strip.at as usize);
        match past_caches && strip.run_bytes >= LEAST_PAST_BYTES {
            true => copy_runs(strip, plane, |tensor, part, run| {
                write_past_caches(part, tensor, run);
            }),
            false => copy_strip::<false>(strip, plane),
        }
    };
    if !sum {
        strips.for_each(|strip| copy(&strip));
        fence_writes();
        return None;
    }
    let mut summer = Summer::default();
    let bytes = span.bytes();
    let mut at = 0;
    while at < bytes {
        let mut left = (bytes - at).min(BLOCK_BYTES as u64);
        // SAFETY: as above.
        unsafe {
            let block = std::slice::from_raw_parts(plane.add(at as usize), left as usize);
            summer.block(block);
            at += left;
            while let Some(strip) = strips.up_to(left) {
                copy(&strip);
                left -= strip.bytes();
            }
        }
    }
    fence_writes();
    Some(summer.finish())
}

/// Shorter runs are copied through the caches.
const LEAST_PAST_BYTES: u64 = 1024;

#[repr(align(64))]
struct Block(MaybeUninit<[u8; BLOCK_BYTES]>);

/// Copies one strip to (`IN`) or from its position in the plane.
///
/// # Safety
/// The runs of the strip are valid for reads (`IN`) or writes, the plane's bytes for the other.
/// They do not overlap.
#[inline]
pub unsafe fn copy_strip<const IN: bool>(strip: &Strip, plane: *mut u8) {
    // Runs of a constant length compile to a few instructions, others to a call each. SAFETY: the
    // caller's promise.
    unsafe {
        match strip.run_bytes {
            1 => copy_fixed::<IN, 1>(strip, plane),
            2 => copy_fixed::<IN, 2>(strip, plane),
            4 => copy_fixed::<IN, 4>(strip, plane),
            8 => copy_fixed::<IN, 8>(strip, plane),
            16 => copy_fixed::<IN, 16>(strip, plane),
            32 => copy_fixed::<IN, 32>(strip, plane),
            64 => copy_fixed::<IN, 64>(strip, plane),
            128 => copy_fixed::<IN, 128>(strip, plane),
            256 => copy_fixed::<IN, 256>(strip, plane),
            _ => copy_runs(strip, plane, |tensor, part, run| {
                let (from, to) = if IN { (tensor, part) } else { (part, tensor) };
                std::ptr::copy_nonoverlapping(from, to, run);
            }),
        }
    }
}

/// Calls `copy` for each run: with its address in the tensor and in the plane, and its length.
///
/// # Safety
/// As for [`copy_strip`].
#[inline]
unsafe fn copy_runs(strip: &Strip, plane: *mut u8, copy: impl Fn(*mut u8, *mut u8, usize)) {
    let run = strip.run_bytes as usize;
    let mut address = strip.address;
    for at in (0..strip.bytes() as usize).step_by(run) {
        // SAFETY: the caller's promise.
        copy(pointer_at(address), unsafe { plane.add(at) }, run);
        address = address.wrapping_add(strip.stride_bytes);
    }
}

/// # Safety
/// As for [`copy_strip`]; runs have `N` bytes.
unsafe fn copy_fixed<const IN: bool, const N: usize>(strip: &Strip, plane: *mut u8) {
    let mut plane_part = plane.cast::<[u8; N]>();
    let mut address = strip.address;
    for _ in 0..strip.count {
        let tensor = pointer_at(address).cast::<[u8; N]>();
        // SAFETY: the caller's promise; an array of bytes has no alignment.
        unsafe {
            let (from, to) = if IN { (tensor, plane_part) } else { (plane_part, tensor) };
            std::ptr::copy_nonoverlapping(from, to, 1);
            plane_part = plane_part.add(1);
        }
        address = address.wrapping_add(strip.stride_bytes);
    }
}

/// Pointer to an address that an engine gave.
pub fn pointer_at(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Copies with non-temporal stores, which do not fetch the target's cache lines: stored KV is
/// rarely read soon. A third faster than `memcpy` when both sides exceed the caches.
/// [`fence_writes`] must follow before other threads learn of the bytes.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(target_arch = "x86_64")]
unsafe fn write_past_caches(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    // Bytes before the target's first whole cache line, and the end of the last one.
    let start = to.align_offset(64).min(bytes);
    let end = start + (bytes - start) / 64 * 64;
    // SAFETY: the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, start);
        std::ptr::copy_nonoverlapping(from.add(end), to.add(end), bytes - end);
    }
    for at in (start..end).step_by(64) {
        // SAFETY: one cache line of both ranges; the target is aligned for these stores.
        unsafe {
            let from = from.add(at).cast::<__m128i>();
            let to = to.add(at).cast::<__m128i>();
            // Not a closure: builds without LTO would call it.
            let first = _mm_loadu_si128(from);
            let second = _mm_loadu_si128(from.add(1));
            let third = _mm_loadu_si128(from.add(2));
            let fourth = _mm_loadu_si128(from.add(3));
            _mm_stream_si128(to, first);
            _mm_stream_si128(to.add(1), second);
            _mm_stream_si128(to.add(2), third);
            _mm_stream_si128(to.add(3), fourth);
        }
    }
}

/// Orders the stores of [`write_past_caches`] before later ones.
#[cfg(target_arch = "x86_64")]
fn fence_writes() {
    // SAFETY: part of x86-64; it accesses no memory.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn write_past_caches(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

#[cfg(not(target_arch = "x86_64"))]
fn fence_writes() {}
