//! The few instructions of x86-64 that groups of operations need, as bytes.
//!
//! Vector instructions are encoded as VEX at AVX2 and as EVEX at AVX-512; both take the same opcodes. Encodings are
//! those of Intel's manual (Software Developer's Manual, volume 2); memory operands have 32-bit displacements.

use crate::tile::Slot;

/// A general register, by number.
pub(super) type Gpr = u8;

pub(super) const RAX: Gpr = 0;
pub(super) const RCX: Gpr = 1;
pub(super) const RDX: Gpr = 2;
pub(super) const RBX: Gpr = 3;
pub(super) const RBP: Gpr = 5;
pub(super) const RSI: Gpr = 6;
/// Where a function finds the frame of its tape: its first argument (`extern "sysv64"`).
pub(super) const FRAME: Gpr = 7;

/// What an instruction reads or writes beside its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rm {
    /// A vector or mask register.
    Register(u8),
    /// Memory at `base + displacement`, and with a scale plus `rax` times 1, 2, 4 or 8 (as a power).
    Memory { base: Gpr, scale: Option<u8>, displacement: i32 },
    /// The same of a register of the tape, wherever in the frame that is going to lie.
    Frame { place: Slot, scale: Option<u8>, displacement: i32 },
    /// A constant behind the code.
    Constant(usize),
}

/// Prefix, opcode map and opcode of a vector instruction, all without REX.W.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opcode {
    /// 0: none, 1: 66, 2: F3, 3: F2.
    pub(super) prefix: u8,
    /// 1: 0F, 2: 0F 38, 3: 0F 3A.
    pub(super) map: u8,
    pub(super) code: u8,
}

pub(super) const fn opcode(prefix: u8, map: u8, code: u8) -> Opcode {
    Opcode { prefix, map, code }
}

/// Bits of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    Bits128,
    Bits256,
    Bits512,
}

/// What an instruction has beside opcode and operands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extra {
    /// The mask register that says which lanes are computed; 0: all.
    pub(super) mask: u8,
    /// Whether the other lanes become zero; else they stay.
    pub(super) zero: bool,
    /// Whether memory holds one value for all lanes.
    pub(super) broadcast: bool,
    pub(super) immediate: Option<u8>,
}

/// Where to jump, once it is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label(usize);

/// Conditions of jumps after a comparison of unsigned numbers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    Below = 2,
    AboveOrEqual = 3,
}

/// What a line of the cache is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
}

pub(super) struct Assembler {
    pub(super) bytes: Vec<u8>,
    /// Whether vectors have 512 bits.
    pub(super) wide: bool,
    constants: Vec<u32>,
    /// Displacements to constants: where they lie, where the instruction ends, and which constant.
    fixes: Vec<(usize, usize, usize)>,
    /// Displacements from the frame: where they lie, and from which of its registers on they count.
    places: Vec<(usize, Slot)>,
}

/// A whole function, which runs from anywhere.
#[derive(Debug)]
pub(super) struct Assembled {
    bytes: Vec<u8>,
    places: Vec<(usize, Slot)>,
}

impl Assembled {
    /// Appends it to other code, for a frame in which each register lies at the byte that `place` says.
    pub(super) fn append_to(&self, code: &mut Vec<u8>, place: impl Fn(Slot) -> Slot) {
        let start = code.len();
        code.extend_from_slice(&self.bytes);
        let displacements = &mut code[start..];
        for &(at, register) in &self.places {
            let Some(displacement) = displacements[at..].first_chunk_mut() else {
                unreachable!("four bytes")
            };
            *displacement = (i32::from_le_bytes(*displacement) + place(register) as i32).to_le_bytes();
        }
    }
}

impl Assembler {
    pub(super) fn new(wide: bool) -> Assembler {
        Assembler {
            bytes: Vec::with_capacity(1024),
            wide,
            constants: Vec::new(),
            fixes: Vec::new(),
            places: Vec::new(),
        }
    }

    /// Puts code in front that has no operands in memory but those of general registers.
    pub(super) fn prepend(&mut self, front: Assembler) {
        let by = front.bytes.len();
        self.bytes.splice(0..0, front.bytes);
        for (at, end, _) in &mut self.fixes {
            *at += by;
            *end += by;
        }
        for (at, _) in &mut self.places {
            *at += by;
        }
    }

    fn full(&self) -> Length {
        if self.wide { Length::Bits512 } else { Length::Bits256 }
    }

    /// The constant behind the code. At AVX2 it is there in every lane, as instructions do not broadcast what they read.
    pub(super) fn constant(&mut self, bits: u32) -> Rm {
        let known = self.constants.iter().position(|&other| other == bits);
        Rm::Constant(known.unwrap_or_else(|| {
            self.constants.push(bits);
            self.constants.len() - 1
        }))
    }

    /// A vector instruction of the full length.
    pub(super) fn vector(&mut self, opcode: Opcode, register: u8, second: u8, rm: Rm, extra: Extra) {
        self.vector_of(self.full(), opcode, register, second, rm, extra);
    }

    /// A vector instruction. `second` is 0 where it has no second operand.
    pub(super) fn vector_of(
        &mut self,
        length: Length,
        opcode: Opcode,
        register: u8,
        second: u8,
        rm: Rm,
        extra: Extra,
    ) {
        if self.wide {
            self.evex(length, opcode, register, second, rm, extra);
        } else {
            self.vex(length, opcode, register, second, rm);
        }
        self.operands(opcode, register, rm, extra.immediate);
    }

    /// Asks for the line at `base + 4 * rax + displacement`: a hint, for which no address is wrong.
    pub(super) fn prefetch(&mut self, what_for: Use, base: Gpr, displacement: i32) {
        // PREFETCHT0 and PREFETCHW, which is nothing on machines that do not have it.
        let code = match what_for {
            Use::Read => 0x18,
            Use::Write => 0x0d,
        };
        self.bytes.extend([0x40 | base >> 3, 0x0f, code, 0x80 | 1 << 3 | 4, 2 << 6 | RAX << 3 | base & 7]);
        self.bytes.extend(displacement.to_le_bytes());
    }

    /// An instruction on mask registers.
    pub(super) fn masks(&mut self, length: Length, opcode: Opcode, register: u8, second: u8, rm: u8) {
        self.vex(length, opcode, register, second, Rm::Register(rm));
        self.operands(opcode, register, Rm::Register(rm), None);
    }

    fn vex(&mut self, length: Length, opcode: Opcode, register: u8, second: u8, rm: Rm) {
        let not = |bit: u8| 1 ^ (bit & 1);
        let b = match rm {
            Rm::Register(rm) => not(rm >> 3),
            Rm::Memory { base, .. } => not(base >> 3),
            Rm::Frame { .. } | Rm::Constant(_) => 1,
        };
        let long = u8::from(length != Length::Bits128);
        self.bytes.extend([
            0xc4,
            not(register >> 3) << 7 | 1 << 6 | b << 5 | opcode.map,
            (!second & 15) << 3 | long << 2 | opcode.prefix,
        ]);
    }

    fn evex(&mut self, length: Length, opcode: Opcode, register: u8, second: u8, rm: Rm, extra: Extra) {
        let not = |bit: u8| 1 ^ (bit & 1);
        let (x, b) = match rm {
            Rm::Register(rm) => (not(rm >> 4), not(rm >> 3)),
            Rm::Memory { base, .. } => (1, not(base >> 3)),
            Rm::Frame { .. } | Rm::Constant(_) => (1, 1),
        };
        let bits = match length {
            Length::Bits128 => 0,
            Length::Bits256 => 1,
            Length::Bits512 => 2,
        };
        self.bytes.extend([
            0x62,
            not(register >> 3) << 7 | x << 6 | b << 5 | not(register >> 4) << 4 | opcode.map,
            (!second & 15) << 3 | 1 << 2 | opcode.prefix,
            u8::from(extra.zero) << 7
                | bits << 5
                | u8::from(extra.broadcast) << 4
                | not(second >> 4) << 3
                | extra.mask,
        ]);
    }

    /// Opcode, operands and immediate.
    fn operands(&mut self, opcode: Opcode, register: u8, rm: Rm, immediate: Option<u8>) {
        self.bytes.push(opcode.code);
        let field = (register & 7) << 3;
        let fix = match rm {
            Rm::Register(rm) => {
                self.bytes.push(0xc0 | field | rm & 7);
                None
            }
            Rm::Memory { base, scale, displacement } => {
                self.in_memory(field, base, scale, displacement);
                None
            }
            Rm::Frame { place, scale, displacement } => {
                self.in_memory(field, FRAME, scale, displacement);
                self.places.push((self.bytes.len() - 4, place));
                None
            }
            Rm::Constant(constant) => {
                self.bytes.push(field | 5);
                self.bytes.extend([0; 4]);
                Some((self.bytes.len() - 4, constant))
            }
        };
        self.bytes.extend(immediate);
        self.fixes.extend(fix.map(|(at, constant)| (at, self.bytes.len(), constant)));
    }

    /// An operand in memory.
    fn in_memory(&mut self, field: u8, base: Gpr, scale: Option<u8>, displacement: i32) {
        // With an index (rax), or with 4: no index.
        let (power, index) = scale.map_or((0, 4), |power| (power, RAX));
        self.bytes.extend([0x80 | field | 4, power << 6 | index << 3 | base & 7]);
        self.bytes.extend(displacement.to_le_bytes());
    }

    pub(super) fn push(&mut self, register: Gpr) {
        self.stack(0x50, register);
    }

    pub(super) fn pop(&mut self, register: Gpr) {
        self.stack(0x58, register);
    }

    fn stack(&mut self, code: u8, register: Gpr) {
        if register >= 8 {
            self.bytes.push(0x41);
        }
        self.bytes.push(code | register & 7);
    }

    /// An instruction on two general registers of 64 bits.
    fn general(&mut self, code: u8, register: Gpr, rm: Gpr) {
        self.bytes.extend([0x48 | (register >> 3) << 2 | rm >> 3, code, 0xc0 | (register & 7) << 3 | rm & 7]);
    }

    /// `to = memory at base + displacement`.
    pub(super) fn load(&mut self, to: Gpr, base: Gpr, displacement: i32) {
        self.memory(0x8b, to, base, displacement);
    }

    /// `memory at base + displacement = from`.
    pub(super) fn store(&mut self, from: Gpr, base: Gpr, displacement: i32) {
        self.memory(0x89, from, base, displacement);
    }

    fn memory(&mut self, code: u8, register: Gpr, base: Gpr, displacement: i32) {
        self.bytes.extend([
            0x48 | (register >> 3) << 2 | base >> 3,
            code,
            0x80 | (register & 7) << 3 | 4,
            0x20 | base & 7,
        ]);
        self.bytes.extend(displacement.to_le_bytes());
    }

    pub(super) fn copy(&mut self, to: Gpr, from: Gpr) {
        self.general(0x8b, to, from);
    }

    pub(super) fn clear(&mut self, register: Gpr) {
        self.general(0x33, register, register);
    }

    pub(super) fn compare(&mut self, a: Gpr, b: Gpr) {
        self.general(0x3b, a, b);
    }

    /// `register &= immediate`.
    pub(super) fn and_number(&mut self, register: Gpr, immediate: i8) {
        self.number(4, register, immediate);
    }

    /// `register += immediate`.
    pub(super) fn add_number(&mut self, register: Gpr, immediate: i8) {
        self.number(0, register, immediate);
    }

    pub(super) fn add_large(&mut self, register: Gpr, immediate: i32) {
        self.bytes.extend([0x48 | register >> 3, 0x81, 0xc0 | register & 7]);
        self.bytes.extend(immediate.to_le_bytes());
    }

    pub(super) fn compare_number(&mut self, register: Gpr, immediate: i8) {
        self.number(7, register, immediate);
    }

    fn number(&mut self, operation: u8, register: Gpr, immediate: i8) {
        let bytes = [0x48 | register >> 3, 0x83, 0xc0 | operation << 3 | register & 7, immediate as u8];
        self.bytes.extend(bytes);
    }

    /// A place to jump back to.
    pub(super) fn here(&self) -> Label {
        Label(self.bytes.len())
    }

    pub(super) fn jump_back(&mut self, condition: Condition, to: Label) {
        let label = self.jump(condition);
        let distance = to.0 as i32 - self.bytes.len() as i32;
        self.bytes[label.0..].copy_from_slice(&distance.to_le_bytes());
    }

    /// A jump to a later place, which [`Assembler::land`] sets.
    pub(super) fn jump(&mut self, condition: Condition) -> Label {
        self.bytes.extend([0x0f, 0x80 | condition as u8, 0, 0, 0, 0]);
        Label(self.bytes.len() - 4)
    }

    pub(super) fn land(&mut self, jump: Label) {
        let distance = (self.bytes.len() - jump.0 - 4) as i32;
        self.bytes[jump.0..jump.0 + 4].copy_from_slice(&distance.to_le_bytes());
    }

    /// Leaves vector registers as code without them likes them.
    pub(super) fn clear_upper(&mut self) {
        self.bytes.extend([0xc5, 0xf8, 0x77]);
    }

    /// Returns to the caller; the constants follow.
    pub(super) fn finish(mut self) -> Assembled {
        self.bytes.push(0xc3);
        let copies = if self.wide { 1 } else { 8 };
        self.bytes.resize(self.bytes.len().next_multiple_of(4 * copies), 0xcc);
        let pool = self.bytes.len();
        for (at, end, constant) in self.fixes {
            let distance = (pool + 4 * copies * constant - end) as i32;
            self.bytes[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
        for constant in self.constants {
            self.bytes.extend(constant.to_le_bytes().repeat(copies));
        }
        Assembled { bytes: self.bytes, places: self.places }
    }
}
