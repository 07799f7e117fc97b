//! Instructions chosen for the CPU when the program runs: AVX-512, AVX2 with FMA, NEON, or what
//! every CPU of the architecture has.
//!
//! The same loops are compiled once for each set of instructions. They work element by element, in the order of the
//! source, without fusing a product with a sum, so all kernels give the same bits; the tests of the crate `optimizer`
//! compare them.

use pulp::Arch;

pub use pulp::{Simd, WithSimd};

/// A set of instructions that this CPU has.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(Arch);

impl Kernel {
    /// Returns the widest set of instructions that this CPU has.
    pub fn best() -> Self {
        Self(Arch::new())
    }

    /// Returns all sets that this CPU has, from the baseline on.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::baseline()];
        #[cfg(target_arch = "x86_64")]
        all.extend(pulp::x86::V3::try_new().map(|v3| Self(Arch::V3(v3))));
        if all
            .iter()
            .all(|kernel| kernel.name() != Self::best().name())
        {
            all.push(Self::best());
        }
        all
    }

    /// Returns the set that every CPU of the architecture has.
    pub fn baseline() -> Self {
        Self(Arch::Scalar)
    }

    /// Returns the name of the set.
    pub fn name(self) -> &'static str {
        match self.0 {
            Arch::Scalar => "baseline",
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Arch::Neon(_) => "neon",
            _ => "other",
        }
    }

    /// Runs `work` with these instructions.
    ///
    /// A closure must be a single short loop: the compiler inlines a short closure into the function with the
    /// instructions, and compiles a long closure for the baseline. Larger work implements [`WithSimd`], with
    /// `#[inline(always)]`.
    #[inline(always)]
    pub fn run<W: WithSimd>(self, work: W) -> W::Output {
        self.0.dispatch(work)
    }
}
