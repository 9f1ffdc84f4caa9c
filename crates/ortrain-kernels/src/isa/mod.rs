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
pub(crate) mod portable;

use std::fmt;
use std::sync::OnceLock;

pub use bf16::Bf16Unit;

/// Instruction-set level that this machine has.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(Kind);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Number of sums in the `multiply_add` loops of the levels: more than the latency of a multiply-add times the number
/// of units.
pub(crate) const CHAINS: usize = 12;

impl Isa {
    /// Names of all levels, from the lowest to the highest: the values of `ORTRAIN_ISA`.
    pub const NAMES: [&'static str; 3] = ["portable", "avx2", "avx512"];
    /// Level that every machine of the target has.
    pub const PORTABLE: Isa = Isa(Kind::Portable);

    /// Returns the best level of this machine, capped by the environment variable `ORTRAIN_ISA` (one of
    /// [`Isa::NAMES`]). A level that the machine does not have, or an empty value, has no effect. Decided once per
    /// process.
    ///
    /// # Errors
    /// Returns an error if the variable has another value.
    pub fn detect() -> Result<Isa, UnknownIsa> {
        static BEST: OnceLock<Result<Isa, UnknownIsa>> = OnceLock::new();
        let best = BEST.get_or_init(|| {
            let cap = std::env::var_os("ORTRAIN_ISA").map(|cap| cap.to_string_lossy().into_owned());
            Isa::capped(cap.as_deref().filter(|cap| !cap.is_empty()))
        });
        best.clone()
    }

    fn capped(cap: Option<&str>) -> Result<Isa, UnknownIsa> {
        let levels = Isa::available();
        let last = levels.len() - 1;
        let end = match cap {
            None => last,
            Some(cap) => {
                let known = Isa::NAMES.iter().position(|name| *name == cap);
                known.ok_or_else(|| UnknownIsa(cap.to_owned()))?.min(last)
            }
        };
        Ok(levels[end])
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

/// Error: the value of the environment variable `ORTRAIN_ISA` is not the name of a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownIsa(pub String);

impl fmt::Display for UnknownIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [lowest, middle, best] = Isa::NAMES;
        write!(
            f,
            "the environment variable ORTRAIN_ISA is {:?}, which is not an instruction-set level; set it to {lowest:?}, \
             {middle:?} or {best:?}, or unset it to use the best level of the machine",
            self.0
        )
    }
}

impl std::error::Error for UnknownIsa {}

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

/// Operations that differ between levels in otherwise equal code. Every method must be `#[inline(always)]`, as must
/// every function that is generic over a level: only code inlined into the shim is compiled for the level.
pub(crate) trait Level: Copy {
    /// Computes `a * b + c`, with one rounding if the level has this instruction, else with two. Never calls a library
    /// function.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
    /// Computes `a * b + c`, as [`Level::mul_add`].
    fn mul_add64(a: f64, b: f64, c: f64) -> f64;
    /// Returns the largest integer that is not greater.
    fn floor(a: f32) -> f32;
    /// Returns the largest integer that is not greater.
    fn floor64(a: f64) -> f64;
    /// Transposes a square of 8×8. `from_step` and `to_step` are the distances between lines.
    ///
    /// # Safety
    /// The elements of `from` are valid for reads, and the elements of `to` for writes.
    unsafe fn transpose_8x8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize);
    /// Transposes `lines` lines of 16 elements, 1 to 16 lines. `from_step` and `to_step` are the distances between
    /// lines. Only the first `lines` elements of each line of `to` are written.
    ///
    /// # Safety
    /// As [`Level::transpose_8x8`].
    #[inline(always)]
    unsafe fn transpose_16(from: *const f32, from_step: isize, to: *mut f32, to_step: usize, lines: usize) {
        let line = |i: usize| from.wrapping_offset(i as isize * from_step);
        // SAFETY: the caller's contract; the last squares may overlap.
        unsafe {
            if lines >= 8 {
                for p in [0, 8] {
                    for i in [0, lines - 8] {
                        Self::transpose_8x8(
                            line(i).wrapping_add(p),
                            from_step,
                            to.add(p * to_step + i),
                            to_step,
                        );
                    }
                }
            } else {
                for i in 0..lines {
                    (0..16).for_each(|p| to.add(p * to_step + i).write(line(i).add(p).read_unaligned()));
                }
            }
        }
    }

    /// Transposes six lines of 8 elements into adjacent lines of six. `from_step` is the distance between lines.
    ///
    /// # Safety
    /// As [`Level::transpose_8x8`].
    #[inline(always)]
    unsafe fn transpose_6(from: *const f32, from_step: isize, to: *mut f32) {
        for i in 0..6 {
            let line = from.wrapping_offset(i as isize * from_step);
            // SAFETY: the caller's contract.
            (0..8).for_each(|p| unsafe { to.add(6 * p + i).write(line.add(p).read_unaligned()) });
        }
    }

    /// True if [`Level::pick`] is faster than copies piece by piece.
    const HAS_FAST_SELECT: bool = false;
    /// Copies sixteen of the thirty-two elements at `from`.
    ///
    /// # Safety
    /// The thirty-two elements are valid for reads, indices are less than thirty-two, and sixteen elements at `to` are
    /// valid for writes.
    #[inline(always)]
    unsafe fn select_16_of_32(from: *const f32, index: &[u32; 16], to: *mut f32) {
        for (i, &index) in index.iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { to.add(i).write_unaligned(from.add(index as usize).read_unaligned()) };
        }
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

/// Work that is compiled for each level. `work` must be `#[inline(always)]`.
pub(crate) trait Work {
    type Out;
    fn work<L: Level>(self) -> Self::Out;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_variable_only_lowers_the_level() {
        assert_eq!(Isa::capped(Some("portable")), Ok(Isa::PORTABLE));
        let best = *Isa::available().last().expect("there is always the portable level");
        for isa in Isa::available() {
            assert_eq!(Isa::capped(Some(isa.name())), Ok(isa));
            assert!(Isa::NAMES.contains(&isa.name()));
        }
        assert_eq!(Isa::capped(Some("avx512")), Ok(best), "what the machine does not have caps nothing");
        assert_eq!(Isa::capped(None), Ok(best));
        for unknown in ["nonsense", "AVX2", " avx2", "sse2"] {
            let error = Isa::capped(Some(unknown)).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "the environment variable ORTRAIN_ISA is {unknown:?}, which is not an instruction-set level; set \
                     it to \
                     \"portable\", \"avx2\" or \"avx512\", or unset it to use the best level of the machine"
                )
            );
        }
    }
}
