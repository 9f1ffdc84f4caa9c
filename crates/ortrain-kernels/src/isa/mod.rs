//! Instruction-set levels: one source, compiled once per level; the level is selected at run time.
//!
//! A piece of work is a struct with its arguments that implements [`Work`], generic over a [`Level`]. [`Isa::run`]
//! enters it through a small `#[target_feature]` shim, so that everything inlined into it is compiled for that level.
//! An [`Isa`] can only be created for a level that this machine has: the value is the proof.
//!
//! A new level needs a file beside this one (`neon.rs`) with its [`Level`] and its shim, and a line in each `match`
//! below.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod bf16;
pub(crate) mod bytes;
mod level;
pub(crate) mod portable;

use std::fmt;

pub use bf16::Bf16Unit;
pub(crate) use level::{CHAINS, Level, PackedBlocks, Work};

/// Instruction-set level that this machine has.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// Names of all levels, from the lowest to the highest: the values of `ORTRAIN_ISA`.
    pub const NAMES: [&'static str; 3] = ["portable", "avx2", "avx512"];
    /// Level that every machine of the target has.
    pub const PORTABLE: Isa = Isa(Kind::Portable);

    /// Returns the best level of this machine, independent of the environment.
    #[must_use]
    pub fn best() -> Isa {
        *Isa::available().last().unwrap_or(&Isa::PORTABLE)
    }

    /// Returns the best level of this machine that is at most the named level; `None` if no level has the name.
    #[must_use]
    pub fn capped(cap: &str) -> Option<Isa> {
        let levels = Isa::available();
        let end = Isa::NAMES.iter().position(|name| *name == cap)?;
        levels.get(end).or(levels.last()).copied()
    }

    /// Returns all levels of this machine, from the lowest to the highest, independent of the environment.
    #[must_use]
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "not every target has a second level")]
        let mut levels = vec![Isa::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            levels.push(Isa(Kind::Avx2));
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                levels.push(Isa(Kind::Avx512));
            }
        }
        levels
    }

    /// Returns the name, as in `ORTRAIN_ISA`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
        }
    }

    pub(crate) fn kind(self) -> Kind {
        self.0
    }

    /// Runs work compiled for this level.
    #[inline]
    pub(crate) fn run<W: Work>(self, work: W) -> W::Out {
        match self.0 {
            Kind::Portable => portable::enter(work),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token exists, so the machine has the features (see `available`).
            Kind::Avx2 => unsafe { avx2::enter(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512 => unsafe { avx512::enter(work) },
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Size of a cache line in bytes.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// Prefetches the cache line at an address, which may be invalid, into the first-level cache.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    prefetch_into::<1, T>(at);
}

/// Prefetches into the second-level cache, for data that is used later.
#[inline(always)]
pub(crate) fn prefetch_l2<T>(at: *const T) {
    prefetch_into::<2, T>(at);
}

#[inline(always)]
fn prefetch_into<const CACHE_LEVEL: u8, T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; no address is an error.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        match CACHE_LEVEL {
            1 => _mm_prefetch::<_MM_HINT_T0>(at.cast()),
            _ => _mm_prefetch::<_MM_HINT_T1>(at.cast()),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_variable_only_lowers_the_level() {
        assert_eq!(Isa::capped("portable"), Some(Isa::PORTABLE));
        let best = Isa::best();
        for isa in Isa::available() {
            assert_eq!(Isa::capped(isa.name()), Some(isa));
            assert!(Isa::NAMES.contains(&isa.name()));
        }
        assert_eq!(Isa::capped("avx512"), Some(best), "what the machine does not have caps nothing");
        for unknown in ["nonsense", "AVX2", " avx2", "sse2"] {
            assert_eq!(Isa::capped(unknown), None);
        }
    }
}
