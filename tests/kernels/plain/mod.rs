//! The kernels of the CUDA device, run by the CPU and compared with what the library computes
//! itself.

use crate::gpu;
use kvtier_testkit::fixtures::emulated;

mod convert;
mod moves;
mod numbers;
mod pages;
mod probe;
mod refused;
mod sum;
mod top;

use std::mem::offset_of;

use kvtier::device::call::Call;
use kvtier::device::cuda::kernels::MODULES;

/// Runs a call that nothing is wrong with.
pub fn run(call: &Call) {
    // SAFETY: tests give what they own, and look at it when this has ended.
    unsafe { gpu::run(call) }.unwrap_or_else(|error| panic!("{call:?}: {error}"));
}

/// Address of a slice, as kernels receive it.
pub fn at<T>(slice: &[T]) -> u64 {
    slice.as_ptr().expose_provenance() as u64
}

/// The same of what is written.
pub fn to<T>(slice: &mut [T]) -> u64 {
    slice.as_mut_ptr().expose_provenance() as u64
}

/// Numbers of some seed.
pub struct Chance(u64);

impl Chance {
    /// Others of another seed.
    pub fn new(seed: u64) -> Chance {
        Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// 48 bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// From -1 to 1.
    pub fn number(&mut self) -> f32 {
        (self.word() % 65_536) as f32 / 32_768.0 - 1.0
    }

    /// Some of them.
    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }

    /// Any bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.word() as u8).collect()
    }
}

#[test]
fn kernel_header_matches_rust_layout() {
    macro_rules! same {
        ($($field:ident)*) => {$(
            assert_eq!(
                emulated::offset(stringify!($field)),
                Some(offset_of!(Call, $field)),
                stringify!($field)
            );
        )*};
    }
    same!(kind dtype other_dtype scaling queries keys values out index counts table numbers more
        scales scratch scratch_bytes query_stride query_head_stride key_stride key_head_stride
        value_stride value_head_stride out_stride out_head_stride query_count query_heads key_heads
        key_dim value_dim page_tokens tokens first count keep recent sinks scale flags reserved);
    assert_eq!(emulated::offset("nothing"), None);
}

/// The user documentation has the text of the kernels' header.
#[test]
fn documentation_matches_the_kernel_header() {
    let header = include_str!("../../../src/device/cuda/kernels/call.h");
    let (comment, _) = header.split_once("*/").expect("a comment");
    let said = |line: &str| {
        let line = line.trim_start_matches("/*").trim_start_matches(" *");
        line.strip_prefix(' ').unwrap_or(line).trim_end().to_string()
    };
    let text: Vec<String> = comment.lines().map(said).collect();
    let page = include_str!("../../../docs/internals/kernels.md");
    assert!(page.contains(text.join("\n").trim()), "the page differs from call.h");
}

/// `build.py` wrote all modules: each has code for both architectures, and none is stale.
#[test]
fn embedded_modules_match_the_built_ones() {
    for module in &MODULES {
        let (ptx, cubin) = (module.ptx().expect("whole"), module.cubin_90().expect("whole"));
        let text = std::str::from_utf8(&ptx).expect("text");
        assert!(text.ends_with('\0') && text.matches('\0').count() == 1, "{}", module.name);
        assert!(text.contains(".target sm_80") && text.contains(".version 8.0"), "{}", module.name);
        assert!(!text.contains('/'), "a path or a word of the compiler's in {}", module.name);
        assert_eq!(cubin.get(..4), Some(&b"\x7FELF"[..]), "{}", module.name);
    }
}
