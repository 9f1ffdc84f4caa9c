//! Encoder of the x86-64 instructions that groups of operations need.
//!
//! Vector instructions are encoded as VEX at AVX2 and as EVEX at AVX-512; both use the same opcodes. Encodings follow
//! Intel's manual (Software Developer's Manual, volume 2). Memory operands have 32-bit displacements.

use crate::tile::jit::encoder::PrefetchKind;
use crate::tile::op::Slot;

/// Index of a general register.
pub(super) type Gpr = u8;

pub(super) const RAX: Gpr = 0;
pub(super) const RCX: Gpr = 1;
pub(super) const RDX: Gpr = 2;
pub(super) const RBX: Gpr = 3;
pub(super) const RBP: Gpr = 5;
pub(super) const RSI: Gpr = 6;
/// Pointer to the frame of the tile program: the first argument of a function (`extern "sysv64"`).
pub(super) const FRAME: Gpr = 7;

/// Register or memory operand of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rm {
    /// A vector or mask register.
    Register(u8),
    /// Memory at `base + displacement`. With a scale (0 to 3), `rax` times 1, 2, 4 or 8 is added.
    Memory { base: Gpr, scale: Option<u8>, displacement: i32 },
    /// Memory of a register of the tile program, before that register has its offset in the frame.
    Frame { slot: Slot, scale: Option<u8>, displacement: i32 },
    /// A constant after the code, by index.
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

/// Vector length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    Bits128,
    Bits256,
    Bits512,
}

/// Optional parts of a vector instruction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extra {
    /// Mask register that selects the computed lanes. 0 selects all lanes.
    pub(super) mask: u8,
    /// True if the other lanes become zero. Otherwise they keep their values.
    pub(super) zero: bool,
    /// True if the memory operand is one value for all lanes.
    pub(super) broadcast: bool,
    pub(super) immediate: Option<u8>,
}

/// Position in the code: the target of a jump, or the displacement of a jump without a target.
#[derive(Clone, Copy, Debug)]
pub(in crate::tile::jit) struct Label(usize);

/// Conditions of jumps after a comparison of unsigned numbers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    Below = 2,
    AboveOrEqual = 3,
}

pub(super) struct Assembler {
    pub(super) bytes: Vec<u8>,
    /// True for vectors of 512 bits.
    pub(super) is_avx512: bool,
    constants: Vec<u32>,
    /// Displacements to constants: offset of the displacement, end of the instruction, index of the constant.
    constant_fixups: Vec<(usize, usize, usize)>,
    /// Displacements in the frame: offset of the displacement, and the register of the tile program to which it is
    /// relative.
    slots: Vec<(usize, Slot)>,
}

/// Complete, position-independent code of a function.
#[derive(Debug)]
pub(in crate::tile::jit) struct Assembled {
    bytes: Vec<u8>,
    slots: Vec<(usize, Slot)>,
}

impl Assembled {
    /// Appends the function to other code. `resolve` returns the offset of each register in the frame.
    pub(in crate::tile::jit) fn append_to(&self, code: &mut Vec<u8>, resolve: impl Fn(Slot) -> Slot) {
        let start = code.len();
        code.extend_from_slice(&self.bytes);
        let displacements = &mut code[start..];
        for &(at, register) in &self.slots {
            let Some(displacement) = displacements[at..].first_chunk_mut() else {
                unreachable!("four bytes")
            };
            *displacement = (i32::from_le_bytes(*displacement) + resolve(register) as i32).to_le_bytes();
        }
    }
}

impl Assembler {
    pub(super) fn new(wide: bool) -> Assembler {
        Assembler {
            bytes: Vec::with_capacity(1024),
            is_avx512: wide,
            constants: Vec::new(),
            constant_fixups: Vec::new(),
            slots: Vec::new(),
        }
    }

    /// Inserts code at the front. `front` must have no operands in the frame and no constants.
    pub(super) fn prepend(&mut self, front: Assembler) {
        let by = front.bytes.len();
        self.bytes.splice(0..0, front.bytes);
        for (at, end, _) in &mut self.constant_fixups {
            *at += by;
            *end += by;
        }
        for (at, _) in &mut self.slots {
            *at += by;
        }
    }

    fn vector_length(&self) -> Length {
        if self.is_avx512 { Length::Bits512 } else { Length::Bits256 }
    }

    /// Returns the operand of a constant, which is stored after the code. At AVX2 the constant is stored for every
    /// lane, because instructions do not broadcast memory operands.
    pub(super) fn constant(&mut self, bits: u32) -> Rm {
        let known = self.constants.iter().position(|&other| other == bits);
        Rm::Constant(known.unwrap_or_else(|| {
            self.constants.push(bits);
            self.constants.len() - 1
        }))
    }

    /// Emits a vector instruction of the full length.
    pub(super) fn vector(&mut self, opcode: Opcode, register: u8, second: u8, rm: Rm, extra: Extra) {
        self.vector_of(self.vector_length(), opcode, register, second, rm, extra);
    }

    /// Emits a vector instruction. `second` is 0 if the instruction has no second operand.
    pub(super) fn vector_of(
        &mut self,
        length: Length,
        opcode: Opcode,
        register: u8,
        second: u8,
        rm: Rm,
        extra: Extra,
    ) {
        if self.is_avx512 {
            self.evex(length, opcode, register, second, rm, extra);
        } else {
            self.vex(length, opcode, register, second, rm);
        }
        self.emit_operands(opcode, register, rm, extra.immediate);
    }

    /// Emits a prefetch of the cache line at `base + 4 * rax + displacement`. A prefetch is a hint, so any address is
    /// valid.
    pub(super) fn prefetch(&mut self, what_for: PrefetchKind, base: Gpr, displacement: i32) {
        // PREFETCHT0 and PREFETCHW. Machines without PREFETCHW execute it as a no-op.
        let code = match what_for {
            PrefetchKind::Read => 0x18,
            PrefetchKind::Write => 0x0d,
        };
        self.bytes.extend([0x40 | base >> 3, 0x0f, code, 0x80 | 1 << 3 | 4, 2 << 6 | RAX << 3 | base & 7]);
        self.bytes.extend(displacement.to_le_bytes());
    }

    /// Emits an instruction on mask registers.
    pub(super) fn mask_op(&mut self, length: Length, opcode: Opcode, register: u8, second: u8, rm: u8) {
        self.vex(length, opcode, register, second, Rm::Register(rm));
        self.emit_operands(opcode, register, Rm::Register(rm), None);
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

    /// Emits opcode, operands and immediate.
    fn emit_operands(&mut self, opcode: Opcode, register: u8, rm: Rm, immediate: Option<u8>) {
        self.bytes.push(opcode.code);
        let field = (register & 7) << 3;
        let fix = match rm {
            Rm::Register(rm) => {
                self.bytes.push(0xc0 | field | rm & 7);
                None
            }
            Rm::Memory { base, scale, displacement } => {
                self.emit_memory_operand(field, base, scale, displacement);
                None
            }
            Rm::Frame { slot, scale, displacement } => {
                self.emit_memory_operand(field, FRAME, scale, displacement);
                self.slots.push((self.bytes.len() - 4, slot));
                None
            }
            Rm::Constant(constant) => {
                self.bytes.push(field | 5);
                self.bytes.extend([0; 4]);
                Some((self.bytes.len() - 4, constant))
            }
        };
        self.bytes.extend(immediate);
        self.constant_fixups.extend(fix.map(|(at, constant)| (at, self.bytes.len(), constant)));
    }

    /// Emits an operand in memory.
    fn emit_memory_operand(&mut self, field: u8, base: Gpr, scale: Option<u8>, displacement: i32) {
        // The index register is rax; 4 means no index register.
        let (power, index) = scale.map_or((0, 4), |power| (power, RAX));
        self.bytes.extend([0x80 | field | 4, power << 6 | index << 3 | base & 7]);
        self.bytes.extend(displacement.to_le_bytes());
    }

    pub(super) fn push(&mut self, register: Gpr) {
        self.emit_push_pop(0x50, register);
    }

    pub(super) fn pop(&mut self, register: Gpr) {
        self.emit_push_pop(0x58, register);
    }

    fn emit_push_pop(&mut self, code: u8, register: Gpr) {
        if register >= 8 {
            self.bytes.push(0x41);
        }
        self.bytes.push(code | register & 7);
    }

    /// Emits an instruction on two general registers of 64 bits.
    fn emit_general(&mut self, code: u8, register: Gpr, rm: Gpr) {
        self.bytes.extend([0x48 | (register >> 3) << 2 | rm >> 3, code, 0xc0 | (register & 7) << 3 | rm & 7]);
    }

    /// `to = memory at base + displacement`.
    pub(super) fn load(&mut self, to: Gpr, base: Gpr, displacement: i32) {
        self.emit_memory(0x8b, to, base, displacement);
    }

    /// `memory at base + displacement = from`.
    pub(super) fn store(&mut self, from: Gpr, base: Gpr, displacement: i32) {
        self.emit_memory(0x89, from, base, displacement);
    }

    fn emit_memory(&mut self, code: u8, register: Gpr, base: Gpr, displacement: i32) {
        self.bytes.extend([
            0x48 | (register >> 3) << 2 | base >> 3,
            code,
            0x80 | (register & 7) << 3 | 4,
            0x20 | base & 7,
        ]);
        self.bytes.extend(displacement.to_le_bytes());
    }

    pub(super) fn copy(&mut self, to: Gpr, from: Gpr) {
        self.emit_general(0x8b, to, from);
    }

    pub(super) fn clear(&mut self, register: Gpr) {
        self.emit_general(0x33, register, register);
    }

    pub(super) fn compare(&mut self, a: Gpr, b: Gpr) {
        self.emit_general(0x3b, a, b);
    }

    /// `register &= immediate`.
    pub(super) fn and_immediate(&mut self, register: Gpr, immediate: i8) {
        self.emit_immediate(4, register, immediate);
    }

    /// `register += immediate`.
    pub(super) fn add_immediate(&mut self, register: Gpr, immediate: i8) {
        self.emit_immediate(0, register, immediate);
    }

    pub(super) fn add_immediate32(&mut self, register: Gpr, immediate: i32) {
        self.bytes.extend([0x48 | register >> 3, 0x81, 0xc0 | register & 7]);
        self.bytes.extend(immediate.to_le_bytes());
    }

    pub(super) fn compare_immediate(&mut self, register: Gpr, immediate: i8) {
        self.emit_immediate(7, register, immediate);
    }

    fn emit_immediate(&mut self, operation: u8, register: Gpr, immediate: i8) {
        let bytes = [0x48 | register >> 3, 0x83, 0xc0 | operation << 3 | register & 7, immediate as u8];
        self.bytes.extend(bytes);
    }

    /// Returns the current position, as the target of a jump back.
    pub(super) fn position(&self) -> Label {
        Label(self.bytes.len())
    }

    pub(super) fn jump_back(&mut self, condition: Condition, to: Label) {
        let label = self.jump(condition);
        let distance = to.0 as i32 - self.bytes.len() as i32;
        self.bytes[label.0..].copy_from_slice(&distance.to_le_bytes());
    }

    /// Emits a jump to a later position, which [`Assembler::bind_jump`] sets.
    pub(super) fn jump(&mut self, condition: Condition) -> Label {
        self.bytes.extend([0x0f, 0x80 | condition as u8, 0, 0, 0, 0]);
        Label(self.bytes.len() - 4)
    }

    pub(super) fn bind_jump(&mut self, jump: Label) {
        let distance = (self.bytes.len() - jump.0 - 4) as i32;
        self.bytes[jump.0..jump.0 + 4].copy_from_slice(&distance.to_le_bytes());
    }

    /// Emits VZEROUPPER, which avoids slow transitions to code without AVX.
    pub(super) fn clear_upper(&mut self) {
        self.bytes.extend([0xc5, 0xf8, 0x77]);
    }

    /// Emits the return to the caller, and appends the constants.
    pub(super) fn finish(mut self) -> Assembled {
        self.bytes.push(0xc3);
        let copies = if self.is_avx512 { 1 } else { 8 };
        self.bytes.resize(self.bytes.len().next_multiple_of(4 * copies), 0xcc);
        let pool = self.bytes.len();
        for (at, end, constant) in self.constant_fixups {
            let distance = (pool + 4 * copies * constant - end) as i32;
            self.bytes[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
        for constant in self.constants {
            self.bytes.extend(constant.to_le_bytes().repeat(copies));
        }
        Assembled { bytes: self.bytes, slots: self.slots }
    }
}
