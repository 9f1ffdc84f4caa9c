//! Instructions of x86-64 for groups of operations, at AVX2 and at AVX-512.
//!
//! At AVX-512 truth values are in mask registers, and instructions broadcast operands in memory. At AVX2 truth values
//! are vectors, and constants are stored as whole vectors.

mod assembler;

use super::encoder::{Encoder, Operand, Place, PrefetchKind, Resources, TruthRegisters};
use super::ir::{Comparison, Logic, VectorBinaryOp};
use crate::isa::Kind as Level;
use crate::scratch::ALIGN;
pub(super) use assembler::Assembled as Code;
use assembler::{
    Assembler, Condition, Extra, Gpr, Label, Length, Opcode, RAX, RBP, RBX, RCX, RDX, RSI, Rm, opcode,
};

/// Signature of a function: (frame, pointers, number of indices, words of the incomplete end).
pub(super) type EntryPoint = unsafe extern "sysv64" fn(*mut u8, *const *const u8, usize, *const i32);

/// Registers of the arguments after the frame (`extern "sysv64"`), and further registers. `rax` is the index.
const TABLE: Gpr = RSI;
const COUNT: Gpr = RDX;
/// Pointer to sixteen 32-bit words, each all ones or all zeros: the mask of the incomplete end.
const MASK_WORDS: Gpr = RCX;
const LIMIT: Gpr = 10;
const SCRATCH: Gpr = 11;
const STACK: Gpr = 4;
/// Registers that hold pointers.
const POINTER_REGISTERS: [Gpr; 8] = [8, 9, RBX, RBP, 12, 13, 14, 15];
/// Callee-saved registers.
const CALLEE_SAVED: [Gpr; 6] = [RBX, RBP, 12, 13, 14, 15];

/// The mask register of the incomplete end.
const END_MASK: u8 = 1;

const MOVE: Opcode = opcode(0, 1, 0x28);
const LOAD: Opcode = opcode(0, 1, 0x10);
const STORE: Opcode = opcode(0, 1, 0x11);
const STORE_ONE: Opcode = opcode(2, 1, 0x11);
const MASKED_LOAD: Opcode = opcode(1, 2, 0x2c);
const MASKED_STORE: Opcode = opcode(1, 2, 0x2e);
const BROADCAST: Opcode = opcode(1, 2, 0x18);
const ROOT: Opcode = opcode(0, 1, 0x51);
const ROUND: Opcode = opcode(1, 3, 0x08);
const TO_FLOAT: Opcode = opcode(0, 1, 0x5b);
const TO_INTEGER: Opcode = opcode(2, 1, 0x5b);
const SHIFT: Opcode = opcode(1, 1, 0x72);
const TEST: Opcode = opcode(0, 1, 0xc2);
const AND: Opcode = opcode(1, 1, 0xdb);
const OR: Opcode = opcode(1, 1, 0xeb);
const XOR: Opcode = opcode(1, 1, 0xef);
/// `first = first * second + third`.
const MUL_ADD_213: Opcode = opcode(1, 2, 0xa8);
/// `first = second * third + first`.
const MUL_ADD_231: Opcode = opcode(1, 2, 0xb8);
const BLEND_BY_MASK: Opcode = opcode(1, 2, 0x65);
const BLEND_BY_VECTOR: Opcode = opcode(1, 3, 0x4a);
const EXTEND_BYTES: Opcode = opcode(1, 2, 0x31);
const EXTEND_SIGNED_BYTES: Opcode = opcode(1, 2, 0x21);
const LOWEST_BYTES: Opcode = opcode(2, 2, 0x31);
const TEST_BYTES: Opcode = opcode(1, 2, 0x26);
const MASK_OF_WORDS: Opcode = opcode(2, 2, 0x39);
const BYTES_OF_MASK: Opcode = opcode(2, 2, 0x28);
const UPPER_HALF: Opcode = opcode(1, 3, 0x39);
const PACK_WORDS: Opcode = opcode(1, 1, 0x6b);
const PACK_BYTES: Opcode = opcode(1, 1, 0x63);
const STORE_HALF: Opcode = opcode(1, 1, 0xd6);
const ABSOLUTE_BYTES: Opcode = opcode(1, 2, 0x1c);

/// Direction of a shift: a part of the opcode, encoded in the field of a register.
const LEFT: u8 = 6;
const RIGHT: u8 = 4;
/// Immediate of [`ROUND`]: rounds down, and raises no exception.
const DOWN: u8 = 9;
/// Immediate of [`ROUND`]: rounds to the nearest, of two to the even one, and raises no exception.
const TO_NEAREST: u8 = 8;

fn opcode_of(op: VectorBinaryOp) -> Opcode {
    match op {
        VectorBinaryOp::Add => opcode(0, 1, 0x58),
        VectorBinaryOp::Mul => opcode(0, 1, 0x59),
        VectorBinaryOp::Sub => opcode(0, 1, 0x5c),
        VectorBinaryOp::Min => opcode(0, 1, 0x5d),
        VectorBinaryOp::Div => opcode(0, 1, 0x5e),
        VectorBinaryOp::Max => opcode(0, 1, 0x5f),
        VectorBinaryOp::And => AND,
        VectorBinaryOp::Or => OR,
        VectorBinaryOp::Xor => XOR,
        VectorBinaryOp::AddInteger => opcode(1, 1, 0xfe),
        VectorBinaryOp::SubInteger => opcode(1, 1, 0xfa),
        VectorBinaryOp::Scale => opcode(1, 2, 0x2c),
    }
}

/// Returns the predicate of a comparison: the immediate of [`TEST`].
fn predicate(comparison: Comparison) -> u8 {
    match comparison {
        Comparison::Equal => 0,
        Comparison::Unordered => 3,
        Comparison::NotEqual => 4,
        Comparison::Less => 17,
        Comparison::LessOrEqual => 18,
    }
}

/// Encoder of a function.
pub(super) struct Target {
    level: Level,
    assembler: Assembler,
}

impl Target {
    fn vector_bytes(&self) -> usize {
        4 * Target::resources(self.level).lanes
    }

    /// Returns a register with a pointer to callers' memory. The register is valid until the next call.
    fn pointer(&mut self, pointer: u8) -> Gpr {
        POINTER_REGISTERS.get(usize::from(pointer)).copied().unwrap_or_else(|| {
            self.assembler.load(SCRATCH, TABLE, 8 * i32::from(pointer));
            SCRATCH
        })
    }

    fn memory(&mut self, place: Place) -> Rm {
        match place {
            Place::Frame { slot, displacement } => Rm::Frame { slot, scale: None, displacement },
            Place::Tile { slot, power, displacement } => Rm::Frame { slot, scale: Some(power), displacement },
            Place::Element { pointer } => {
                Rm::Memory { base: self.pointer(pointer), scale: None, displacement: 0 }
            }
            Place::Elements { pointer, power, displacement } => {
                Rm::Memory { base: self.pointer(pointer), scale: Some(power), displacement }
            }
            Place::Stack { slot } => {
                // The caller's stack pointer comes first.
                let displacement = ((usize::from(slot) + 1) * self.vector_bytes()) as i32;
                Rm::Memory { base: STACK, scale: None, displacement }
            }
            Place::Constant { bits } => self.assembler.constant(bits),
            Place::End { displacement } => Rm::Memory { base: MASK_WORDS, scale: None, displacement },
        }
    }

    /// Emits an instruction of the full length, with the last operand `last`.
    fn emit(&mut self, opcode: Opcode, register: u8, second: u8, last: Operand, extra: Extra) {
        let (rm, broadcast) = match last {
            Operand::Register(register) => (Rm::Register(register), false),
            Operand::Vector(place) => (self.memory(place), false),
            Operand::Broadcast(place) => (self.memory(place), true),
        };
        self.assembler.vector(opcode, register, second, rm, Extra { broadcast, ..extra });
    }

    fn emit_plain(&mut self, opcode: Opcode, register: u8, second: u8, last: Operand) {
        self.emit(opcode, register, second, last, Extra::default());
    }

    /// Emits an instruction on a vector of 128 bits.
    fn emit_short(&mut self, opcode: Opcode, register: u8, second: u8, rm: Rm) {
        self.assembler.vector_of(Length::Bits128, opcode, register, second, rm, Extra::default());
    }

    fn shift(&mut self, direction: u8, to: u8, a: u8, count: u8) {
        let by = Extra { immediate: Some(count), ..Extra::default() };
        self.emit(SHIFT, direction, to, Operand::Register(a), by);
    }
}

impl Encoder for Target {
    type Code = Code;
    type Label = Label;

    fn resources(level: Level) -> Resources {
        match level {
            Level::Portable | Level::Avx2 => Resources {
                lanes: 8,
                vectors: 0xffff,
                truths: None,
                broadcasts_operands: false,
                has_scale: false,
                has_bytes: false,
            },
            Level::Avx512 => Resources {
                lanes: 16,
                vectors: u32::MAX,
                // Mask 0 means no mask.
                truths: Some(TruthRegisters { free: 0b1111_1100, end: END_MASK }),
                broadcasts_operands: true,
                has_scale: true,
                has_bytes: true,
            },
        }
    }

    fn new(level: Level) -> Target {
        Target { level, assembler: Assembler::new(level == Level::Avx512) }
    }

    fn begin(&mut self, pointers: usize) {
        for (pointer, &register) in POINTER_REGISTERS.iter().enumerate().take(pointers) {
            self.assembler.load(register, TABLE, 8 * pointer as i32);
        }
    }

    fn finish(self, stack_slots: usize) -> Code {
        let bytes = self.vector_bytes();
        let Target { level, mut assembler } = self;
        assembler.clear_upper();
        // The number of values on the stack is known only now.
        let mut front = Assembler::new(level == Level::Avx512);
        for register in CALLEE_SAVED {
            front.push(register);
        }
        if stack_slots > 0 {
            // The slots are aligned, and the caller's stack pointer is stored in front of them.
            front.copy(LIMIT, STACK);
            front.add_immediate32(STACK, -(((stack_slots + 1) * bytes) as i32));
            front.and_immediate(STACK, -(ALIGN as i8));
            front.store(LIMIT, STACK, 0);
            assembler.load(STACK, STACK, 0);
        }
        for register in CALLEE_SAVED.into_iter().rev() {
            assembler.pop(register);
        }
        assembler.prepend(front);
        assembler.finish()
    }

    fn clear_index(&mut self) {
        self.assembler.clear(RAX);
    }

    fn skip_if_fewer_than(&mut self, count: usize) -> Label {
        self.assembler.compare_immediate(COUNT, count as i8);
        self.assembler.jump(Condition::Below)
    }

    fn limit_to_multiple_of(&mut self, power_of_two: usize) {
        self.assembler.copy(LIMIT, COUNT);
        self.assembler.and_immediate(LIMIT, -(power_of_two as i8));
    }

    fn skip_at_limit(&mut self) -> Label {
        self.assembler.compare(RAX, LIMIT);
        self.assembler.jump(Condition::AboveOrEqual)
    }

    fn skip_at_end(&mut self) -> Label {
        self.assembler.compare(RAX, COUNT);
        self.assembler.jump(Condition::AboveOrEqual)
    }

    fn position(&self) -> Label {
        self.assembler.position()
    }

    fn repeat(&mut self, count: usize, start: Label) {
        self.assembler.add_immediate(RAX, count as i8);
        self.assembler.compare(RAX, LIMIT);
        self.assembler.jump_back(Condition::Below, start);
    }

    fn bind(&mut self, jump: Label) {
        self.assembler.bind_jump(jump);
    }

    fn load(&mut self, to: u8, from: Place) {
        self.emit_plain(LOAD, to, 0, Operand::Vector(from));
    }

    fn load_masked(&mut self, to: u8, from: Place, mask: u8) {
        match self.level {
            Level::Portable | Level::Avx2 => self.emit_plain(MASKED_LOAD, to, mask, Operand::Vector(from)),
            Level::Avx512 => {
                self.emit(LOAD, to, 0, Operand::Vector(from), Extra { mask, zero: true, ..Extra::default() });
            }
        }
    }

    fn broadcast(&mut self, to: u8, from: Place) {
        self.emit_plain(BROADCAST, to, 0, Operand::Vector(from));
    }

    fn load_truths(&mut self, to: u8, from: Place, spare: u8) {
        match self.level {
            Level::Portable | Level::Avx2 => {
                self.emit_plain(EXTEND_BYTES, to, 0, Operand::Vector(from));
                // Copies the lowest bit to all bits of the lane.
                self.shift(LEFT, to, to, 31);
                self.shift(RIGHT, to, to, 31);
            }
            Level::Avx512 => {
                let from = self.memory(from);
                self.emit_short(LOAD, spare, 0, from);
                self.emit_short(TEST_BYTES, to, spare, Rm::Register(spare));
            }
        }
    }

    fn truth_of_words(&mut self, to: u8, words: u8) {
        self.emit_plain(MASK_OF_WORDS, to, 0, Operand::Register(words));
    }

    fn store(&mut self, from: u8, to: Place) {
        self.emit_plain(STORE, from, 0, Operand::Vector(to));
    }

    fn store_masked(&mut self, from: u8, to: Place, mask: u8) {
        match self.level {
            Level::Portable | Level::Avx2 => self.emit_plain(MASKED_STORE, from, mask, Operand::Vector(to)),
            Level::Avx512 => {
                self.emit(STORE, from, 0, Operand::Vector(to), Extra { mask, ..Extra::default() });
            }
        }
    }

    fn load_bytes(&mut self, to: u8, from: Place, is_signed: bool, mask: Option<u8>) {
        let opcode = if is_signed { EXTEND_SIGNED_BYTES } else { EXTEND_BYTES };
        let extra = Extra { mask: mask.unwrap_or(0), zero: mask.is_some(), ..Extra::default() };
        self.emit(opcode, to, 0, Operand::Vector(from), extra);
    }

    fn store_bytes(&mut self, from: u8, to: Place, mask: Option<u8>) {
        let extra = Extra { mask: mask.unwrap_or(0), ..Extra::default() };
        self.emit(LOWEST_BYTES, from, 0, Operand::Vector(to), extra);
    }

    fn store_first(&mut self, from: u8, to: Place) {
        let to = self.memory(to);
        self.emit_short(STORE_ONE, from, 0, to);
    }

    fn store_truths(&mut self, from: u8, to: Place, spare: u8) {
        let to = self.memory(to);
        let target = Rm::Register(spare);
        match self.level {
            Level::Portable | Level::Avx2 => {
                // Packs the lower and the upper half to 16-bit words, then to bytes.
                let upper = Extra { immediate: Some(1), ..Extra::default() };
                self.emit(UPPER_HALF, from, 0, Operand::Register(spare), upper);
                self.emit_short(PACK_WORDS, spare, from, target);
                self.emit_short(PACK_BYTES, spare, spare, target);
                self.emit_short(ABSOLUTE_BYTES, spare, 0, target);
                self.emit_short(STORE_HALF, spare, 0, to);
            }
            Level::Avx512 => {
                self.emit_short(BYTES_OF_MASK, spare, 0, Rm::Register(from));
                self.emit_short(ABSOLUTE_BYTES, spare, 0, target);
                self.emit_short(STORE, spare, 0, to);
            }
        }
    }

    fn prefetch(&mut self, kind: PrefetchKind, pointer: u8, displacement: i32) {
        let base = self.pointer(pointer);
        self.assembler.prefetch(kind, base, displacement);
    }

    fn copy(&mut self, to: u8, from: u8) {
        self.emit_plain(MOVE, to, 0, Operand::Register(from));
    }

    fn copy_masked(&mut self, to: u8, from: u8, mask: u8) {
        let from = Operand::Register(from);
        match self.level {
            Level::Portable | Level::Avx2 => {
                let by = Extra { immediate: Some(mask << 4), ..Extra::default() };
                self.emit(BLEND_BY_VECTOR, to, to, from, by);
            }
            Level::Avx512 => self.emit(MOVE, to, 0, from, Extra { mask, ..Extra::default() }),
        }
    }

    fn binary(&mut self, op: VectorBinaryOp, to: u8, a: u8, b: Operand) {
        self.emit_plain(opcode_of(op), to, a, b);
    }

    fn sqrt(&mut self, to: u8, a: Operand) {
        self.emit_plain(ROOT, to, 0, a);
    }

    fn floor(&mut self, to: u8, a: Operand) {
        self.emit(ROUND, to, 0, a, Extra { immediate: Some(DOWN), ..Extra::default() });
    }

    fn round(&mut self, to: u8, a: Operand) {
        self.emit(ROUND, to, 0, a, Extra { immediate: Some(TO_NEAREST), ..Extra::default() });
    }

    fn convert_integer(&mut self, to: u8, a: Operand) {
        self.emit_plain(TO_FLOAT, to, 0, a);
    }

    fn truncate_to_integer(&mut self, to: u8, a: Operand) {
        self.emit_plain(TO_INTEGER, to, 0, a);
    }

    fn shift_left(&mut self, to: u8, a: u8, count: u8) {
        self.shift(LEFT, to, a, count);
    }

    fn shift_right(&mut self, to: u8, a: u8, count: u8) {
        self.shift(RIGHT, to, a, count);
    }

    fn mul_add_to_factor(&mut self, factor: u8, b: u8, c: Operand) {
        self.emit_plain(MUL_ADD_213, factor, b, c);
    }

    fn mul_add_to_sum(&mut self, sum: u8, a: u8, b: Operand) {
        self.emit_plain(MUL_ADD_231, sum, a, b);
    }

    fn compare(&mut self, comparison: Comparison, to: u8, a: u8, b: Operand) {
        let by = Extra { immediate: Some(predicate(comparison)), ..Extra::default() };
        self.emit(TEST, to, a, b, by);
    }

    fn logic(&mut self, logic: Logic, to: u8, a: u8, b: Operand) {
        let (vector, mask) = match logic {
            Logic::And => (AND, 0x41),
            Logic::Or => (OR, 0x45),
            Logic::Xor => (XOR, 0x47),
        };
        match (self.level, b) {
            (Level::Avx512, Operand::Register(b)) => {
                self.assembler.mask_op(Length::Bits256, opcode(0, 1, mask), to, a, b);
            }
            _ => self.emit_plain(vector, to, a, b),
        }
    }

    fn select(&mut self, to: u8, truth: u8, yes: Operand, no: u8) {
        match self.level {
            Level::Portable | Level::Avx2 => {
                let by = Extra { immediate: Some(truth << 4), ..Extra::default() };
                self.emit(BLEND_BY_VECTOR, to, no, yes, by);
            }
            Level::Avx512 => {
                self.emit(BLEND_BY_MASK, to, no, yes, Extra { mask: truth, ..Extra::default() });
            }
        }
    }
}
