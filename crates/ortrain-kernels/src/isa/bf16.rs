//! Units that multiply pairs of bfloat16 and add the products up in f32.

use std::fmt;

use super::Isa;

/// A unit that multiplies bfloat16 numbers and sums in f32, which this machine has.
///
/// Units give results that differ in the last bits: they add in different orders, and those of processors take
/// numbers below the normal range (2⁻¹²⁶) for zero.
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
    /// Multiply-adds in f32 of the instruction-set level, which every machine has: what bfloat16 changes in results, and
    /// none of its speed.
    pub const EMULATED: Bf16Unit = Bf16Unit(Unit::Emulated);

    /// The best unit of this machine that goes with an instruction-set level: those of processors with AVX-512, the
    /// emulated one with the levels below. Decided once per process.
    ///
    /// As [`Bf16Unit::available`] it asks the operating system for the use of AMX.
    #[must_use]
    pub fn detect(isa: Isa) -> Bf16Unit {
        #[cfg(target_arch = "x86_64")]
        if isa.kind() == super::Kind::Avx512 {
            return Bf16Unit::available().last().copied().unwrap_or(Bf16Unit::EMULATED);
        }
        let _ = isa;
        Bf16Unit::EMULATED
    }

    /// Every unit of this machine, from the least to the best.
    ///
    /// Where the processor has AMX, the first call asks Linux for its use, which the process keeps: the state of a thread
    /// that has used it grows by 8 KiB. Nothing else asks.
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

    /// The name: `emulated`, `avx512_bf16` or `amx`.
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

/// Whether there is AMX, and leave to use it.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    /// Bits of leaf 7, register edx: products of bfloat16, and tiles.
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    /// Bit of leaf 1, register ecx: the operating system says what it saves.
    const OSXSAVE: u32 = 1 << 27;
    /// States that it must save: the configuration of tiles, and tiles.
    const TILE_STATES: u64 = 0b11 << 17;
    /// The number of the system call, of its function that asks for a state, and of the state: tiles.
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;

    /// Asks once.
    pub(super) fn is_granted() -> bool {
        static GRANTED: OnceLock<bool> = OnceLock::new();
        *GRANTED.get_or_init(|| is_there() && ask())
    }

    fn is_there() -> bool {
        // Tiles of leaf 0x1d: eight of sixteen rows of 64 bytes, as the kernels have them.
        if __cpuid(0).eax < 0x1d || __cpuid(1).ecx & OSXSAVE == 0 {
            return false;
        }
        let has = __cpuid_count(7, 0).edx;
        if has & AMX_BF16 == 0 || has & AMX_TILE == 0 {
            return false;
        }
        let palette = __cpuid_count(0x1d, 1);
        let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
        if (row_bytes, tiles, rows) != (64, 8, 16) {
            return false;
        }
        let (low, high): (u32, u32);
        // SAFETY: the processor has the instruction (OSXSAVE), which reads a register.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
        }
        (u64::from(high) << 32 | u64::from(low)) & TILE_STATES == TILE_STATES
    }

    /// Asks Linux (5.16 and later), which refuses where a thread's stack for signals is too small for the state.
    fn ask() -> bool {
        let answer: isize;
        // SAFETY: a system call that touches no memory of ours; it overwrites two registers.
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
