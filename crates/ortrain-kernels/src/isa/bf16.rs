//! Detection of the bfloat16 units of this machine: AMX, AVX512-BF16, and the emulation in f32.

use std::fmt;

use super::Isa;

/// Unit of this machine that multiplies bfloat16 numbers and sums in f32.
///
/// The results of units differ in the last bits, because they add in different orders. Hardware units treat numbers
/// below the normal range (2⁻¹²⁶) as zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bf16Unit(Unit);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    Emulated,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx,
}

impl Bf16Unit {
    /// Emulation by f32 multiply-adds of the instruction-set level, available on every machine. It has the precision of
    /// bfloat16, but not the speed.
    pub const EMULATED: Bf16Unit = Bf16Unit(Unit::Emulated);

    /// Returns the unit for an instruction-set level: the best unit of this machine for AVX-512, and the emulation for
    /// lower levels.
    ///
    /// For AVX-512, the first call asks the operating system for the use of AMX, like [`Bf16Unit::available`].
    #[must_use]
    pub fn detect(isa: Isa) -> Bf16Unit {
        #[cfg(target_arch = "x86_64")]
        if isa.kind() == super::Kind::Avx512 {
            return Bf16Unit::available().last().copied().unwrap_or(Bf16Unit::EMULATED);
        }
        let _ = isa;
        Bf16Unit::EMULATED
    }

    /// Returns all units of this machine, from the worst to the best.
    ///
    /// If the processor has AMX, the first call asks Linux for the permission to use it. The process keeps the
    /// permission. The saved state of each thread that uses AMX grows by 8 KiB.
    #[must_use]
    pub fn available() -> Vec<Bf16Unit> {
        #[allow(unused_mut, reason = "not every target has a second unit")]
        let mut units = vec![Bf16Unit::EMULATED];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
            units.push(Bf16Unit(Unit::Avx512));
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if amx::is_granted() {
            units.push(Bf16Unit(Unit::Amx));
        }
        units
    }

    /// Returns the name: `emulated`, `avx512_bf16` or `amx`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Unit::Emulated => "emulated",
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => "avx512_bf16",
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Unit::Amx => "amx",
        }
    }

    pub(crate) fn unit(self) -> Unit {
        self.0
    }
}

impl fmt::Debug for Bf16Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Bf16Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Detection of AMX, and permission to use it.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    /// Bits of CPUID leaf 7, register edx: bfloat16 products, and tiles.
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    /// Bit of CPUID leaf 1, register ecx: `xgetbv` reports the states that the operating system saves.
    const OSXSAVE: u32 = 1 << 27;
    /// States that the operating system must save: the tile configuration, and the tile data.
    const TILE_STATES: u64 = 0b11 << 17;
    /// Arguments of the request: the system call, its function that requests a state, and the state (tile data).
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;

    /// Returns true if AMX exists and Linux permits its use. Asks once per process.
    pub(super) fn is_granted() -> bool {
        static GRANTED: OnceLock<bool> = OnceLock::new();
        *GRANTED.get_or_init(|| has_amx() && request_permission())
    }

    fn has_amx() -> bool {
        if __cpuid(0).eax < 0x1d || __cpuid(1).ecx & OSXSAVE == 0 {
            return false;
        }
        let has = __cpuid_count(7, 0).edx;
        if has & AMX_BF16 == 0 || has & AMX_TILE == 0 {
            return false;
        }
        // CPUID leaf 0x1d describes the tiles. The kernels need eight tiles of sixteen rows of 64 bytes.
        let palette = __cpuid_count(0x1d, 1);
        let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
        if (row_bytes, tiles, rows) != (64, 8, 16) {
            return false;
        }
        let (low, high): (u32, u32);
        // SAFETY: the processor has the instruction (OSXSAVE), and the instruction only reads a control register.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
        }
        (u64::from(high) << 32 | u64::from(low)) & TILE_STATES == TILE_STATES
    }

    /// Asks Linux (5.16 and later) for the permission. Linux refuses if a thread's signal stack is too small for the
    /// state.
    fn request_permission() -> bool {
        let answer: isize;
        // SAFETY: a system call that accesses no memory of this process; it overwrites two registers.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => answer,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        answer == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_named_and_ordered() {
        let units = Bf16Unit::available();
        assert_eq!(units[0], Bf16Unit::EMULATED);
        assert_eq!(units, Bf16Unit::available(), "asking again changes nothing");
        let names: Vec<&str> = units.iter().map(|unit| unit.name()).collect();
        assert!(names.iter().all(|name| ["emulated", "avx512_bf16", "amx"].contains(name)), "{names:?}");
        assert_eq!(Bf16Unit::detect(Isa::PORTABLE), Bf16Unit::EMULATED);
        assert!(units.contains(&Bf16Unit::detect(Isa::detect().unwrap())));
    }
}
