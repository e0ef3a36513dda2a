//! Instruction sets of kernels: detected on the processor when a job is made.

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Baseline of any processor.
    Portable,
    /// NEON.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AVX-512 BF16, whose products decode and page scores use.
    Avx512Bf16,
}

impl Level {
    /// Every level, the best last.
    pub const ALL: [Level; 5] =
        [Level::Portable, Level::Neon, Level::Avx2, Level::Avx512, Level::Avx512Bf16];

    /// Whether this processor supports it.
    pub fn is_supported(self) -> bool {
        match self {
            Level::Portable => true,
            Level::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => {
                Level::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 | Level::Avx512Bf16 => false,
        }
    }

    /// The best level that this processor supports.
    pub fn best() -> Level {
        Level::ALL.into_iter().rev().find(|level| level.is_supported()).unwrap_or(Level::Portable)
    }
}

/// Compiles a generic function for every level. `fn name(level, arguments)` calls
/// `generic::<vector, rows>(arguments)`, where `rows` is the number of rows of two vectors that fit
/// into registers.
///
/// The generic function and all its callees must be `#[inline(always)]`, so that they are compiled
/// with the features of their caller.
macro_rules! levels {
    ($(#[$doc:meta])* $name:ident = $generic:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// That of the generic function; the level is supported.
        pub unsafe fn $name(level: $crate::attention::level::Level, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::attention::lanes::avx2::Avx2, 6>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::attention::lanes::avx512::Avx512, 8>($($arg),*) }
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                $crate::attention::level::Level::Avx512
                | $crate::attention::level::Level::Avx512Bf16 => {
                    // SAFETY: guaranteed by the caller, and the level is supported.
                    unsafe { avx512($($arg),*) }
                }
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::attention::level::Level::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above; every aarch64 processor has NEON.
                #[cfg(target_arch = "aarch64")]
                $crate::attention::level::Level::Neon => unsafe {
                    $generic::<$crate::attention::lanes::neon::Neon, 8>($($arg),*)
                },
                // SAFETY: as above.
                _ => unsafe {
                    $generic::<$crate::attention::lanes::portable::Portable, 2>($($arg),*)
                },
            }
        }
    };
}
pub(crate) use levels;
