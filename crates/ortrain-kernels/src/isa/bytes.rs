//! Detection of the units of this machine that multiply bytes: AVX512-VNNI, AVX-VNNI, AVX2, and plain code.

use super::{Isa, Kind};

/// Unit that multiplies bytes and sums in `i32`. All units give the same results, because the sums are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteUnit {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

impl ByteUnit {
    /// Returns the units of this machine for an instruction-set level, from the worst to the best.
    pub(crate) fn available(isa: Isa) -> Vec<ByteUnit> {
        #[allow(unused_mut, reason = "not every target has a second unit")]
        let mut units = vec![ByteUnit::Portable];
        #[cfg(target_arch = "x86_64")]
        if isa.kind() != Kind::Portable {
            units.push(ByteUnit::Avx2);
            if is_x86_feature_detected!("avxvnni") {
                units.push(ByteUnit::AvxVnni);
            }
            if isa.kind() == Kind::Avx512 && is_x86_feature_detected!("avx512vnni") {
                units.push(ByteUnit::Avx512Vnni);
            }
        }
        let _ = (isa, Kind::Portable);
        units
    }

    /// Returns the best unit of this machine for an instruction-set level.
    pub(crate) fn detect(isa: Isa) -> ByteUnit {
        ByteUnit::available(isa).last().copied().unwrap_or(ByteUnit::Portable)
    }
}
