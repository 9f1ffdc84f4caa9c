//! Code generation for x86-64: register allocation, the loop over indices, and the last, incomplete indices.
//!
//! A function processes the indices of a tile 16 at a time, as one vector at AVX-512 and as two vectors at AVX2. The
//! last, incomplete 16 indices are computed in full, but callers' memory is accessed through a mask. Folds have 16
//! partial sums, and 32 if there are enough indices, in the order of `ops::fold`.
//!
//! Callers' memory may consist of separate contiguous pieces, such as the rows of a strided tensor. A function then
//! prefetches the next piece while it computes one. Hardware prefetchers detect a row only after a part of it is read,
//! and a row of a few hundred numbers is over by then.
//!
//! Elementary functions are long dependency chains, and out-of-order execution has a limited window. So vectors are
//! interleaved: each value is computed for all of them before the next value. Two rounds of vectors are interleaved, or
//! fewer vectors if that needs too many registers. Values without a register are spilled to the stack.

use std::cell::Cell;
use std::ops::Range;

use ortrain_expr::ReduceOp;

use super::assembler::{
    Assembled, Assembler, Condition, Extra, Gpr, Length, Opcode, PrefetchKind, RAX, RBP, RBX, RCX, RDX, RSI,
    Rm, opcode,
};
use super::ir::{Effect, Fold, Logic, SumSet, Value, VectorBinaryOp, VectorInst, VectorProgram};
use crate::isa::CACHE_LINE_BYTES;
use crate::scratch::ALIGN;
use crate::tile::op::Slot;

/// Number of indices of a round.
pub(super) const ROUND: usize = 16;
/// Maximum number of pointers to callers' memory.
pub(super) const MAX_POINTERS: usize = 24;
/// Maximum number of values on the stack. As vectors, they take less than a page.
const MAX_STACK_SLOTS: usize = 60;

/// Registers of the arguments after the frame (`extern "sysv64"`), and further registers.
const TABLE: Gpr = RSI;
const COUNT: Gpr = RDX;
/// Pointer to sixteen 32-bit words, each all ones or all zeros: the mask of the incomplete end.
const MASK_WORDS: Gpr = RCX;
const LIMIT: Gpr = 10;
const SCRATCH: Gpr = 11;
const STACK: Gpr = 4;
/// Interleaved vectors may spill at most one in this many values.
const MIN_VALUES_PER_SPILL: usize = 8;
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
const ROUND_DOWN: Opcode = opcode(1, 3, 0x08);
const TO_FLOAT: Opcode = opcode(0, 1, 0x5b);
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
/// Direction of a shift: a part of the opcode, encoded in the field of a register.
const LEFT: u8 = 6;
const RIGHT: u8 = 4;
const MASK_OF_WORDS: Opcode = opcode(2, 2, 0x39);
const ABSOLUTE_BYTES: Opcode = opcode(1, 2, 0x1c);

fn opcode_of(two: VectorBinaryOp) -> Opcode {
    match two {
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

fn commutes(two: VectorBinaryOp) -> bool {
    matches!(
        two,
        VectorBinaryOp::Add
            | VectorBinaryOp::Mul
            | VectorBinaryOp::And
            | VectorBinaryOp::Or
            | VectorBinaryOp::Xor
            | VectorBinaryOp::AddInteger
    )
}

/// Generates the code of a function for `lanes`, with the largest possible number of interleaved vectors. Returns
/// `None` if every number needs too many registers.
pub(super) fn emit(lanes: &VectorProgram) -> Option<Assembled> {
    let wide = lanes.is_avx512;
    let order = ValueOrder::new(lanes);
    let max_steps = 2 * ROUND / lanes_of_vector(wide);
    let fits = |&abreast: &usize| abreast <= max_steps;
    [4, 2, 1].into_iter().filter(fits).find_map(|abreast| emit_interleaved(&order, wide, abreast))
}

fn lanes_of_vector(wide: bool) -> usize {
    if wide { 16 } else { 8 }
}

/// Generates the code with `abreast` interleaved vectors.
pub(super) fn emit_interleaved(order: &ValueOrder<'_>, wide: bool, abreast: usize) -> Option<Assembled> {
    let lanes = order.lanes;
    let plan = RegisterPlan::new(order, &lanes.folds, wide, abreast)?;
    let mut asm = Assembler::new(wide);
    for (pointer, &register) in POINTER_REGISTERS.iter().enumerate().take(order.num_pointers()) {
        asm.load(register, TABLE, 8 * pointer as i32);
    }
    for &(value, register) in &plan.hoisted {
        let from = plan.uniform_operand(&mut asm, lanes.insts[usize::from(value)]);
        asm.vector(BROADCAST, register, 0, from, Extra::default());
    }
    for (fold, registers) in lanes.folds.iter().zip(&plan.sums) {
        let neutral: f32 = match fold.op {
            ReduceOp::Sum => 0.0,
            ReduceOp::Prod => 1.0,
            ReduceOp::Max => f32::NEG_INFINITY,
            ReduceOp::Min => f32::INFINITY,
        };
        let neutral = asm.constant(neutral.to_bits());
        for &register in registers {
            asm.vector(BROADCAST, register, 0, neutral, Extra::default());
        }
    }
    asm.clear(RAX);
    if !lanes.folds.is_empty() || abreast > plan.vectors {
        // Two rounds at a time. With folds, only if there are at least four rounds.
        const TWO: i8 = 2 * ROUND as i8;
        asm.compare_immediate(COUNT, if lanes.folds.is_empty() { TWO } else { 2 * TWO });
        let skip = asm.jump(Condition::Below);
        asm.copy(LIMIT, COUNT);
        asm.and_immediate(LIMIT, -TWO);
        let loop_start = asm.position();
        plan.emit_rounds(&mut asm, order, 2, false)?;
        asm.add_immediate(RAX, TWO);
        asm.compare(RAX, LIMIT);
        asm.jump_back(Condition::Below, loop_start);
        if !lanes.folds.is_empty() {
            let lanes = VectorProgram::join(&lanes.folds, wide);
            plan.emit_rounds(&mut asm, &ValueOrder::new(&lanes), 1, false)?;
        }
        asm.bind_jump(skip);
    }
    asm.copy(LIMIT, COUNT);
    asm.and_immediate(LIMIT, -(ROUND as i8));
    asm.compare(RAX, LIMIT);
    let skip = asm.jump(Condition::AboveOrEqual);
    let loop_start = asm.position();
    plan.emit_rounds(&mut asm, order, 1, false)?;
    asm.add_immediate(RAX, ROUND as i8);
    asm.compare(RAX, LIMIT);
    asm.jump_back(Condition::Below, loop_start);
    asm.bind_jump(skip);
    asm.compare(RAX, COUNT);
    let skip = asm.jump(Condition::AboveOrEqual);
    plan.emit_rounds(&mut asm, order, 1, true)?;
    asm.bind_jump(skip);
    for (fold, registers) in lanes.folds.iter().zip(&plan.sums) {
        for (k, &register) in registers[..plan.vectors].iter().enumerate() {
            let to = Rm::Frame { slot: fold.slot, scale: None, displacement: (k * plan.bytes()) as i32 };
            asm.vector(STORE, register, 0, to, Extra::default());
        }
    }
    asm.clear_upper();
    // The number of values on the stack is known only now.
    let slots = plan.slots.get();
    let mut front = Assembler::new(wide);
    for register in CALLEE_SAVED {
        front.push(register);
    }
    if slots > 0 {
        // The slots are aligned, and the caller's stack pointer is stored in front of them.
        front.copy(LIMIT, STACK);
        front.add_immediate32(STACK, -(((slots + 1) * plan.bytes()) as i32));
        front.and_immediate(STACK, -(ALIGN as i8));
        front.store(LIMIT, STACK, 0);
        asm.load(STACK, STACK, 0);
    }
    for register in CALLEE_SAVED.into_iter().rev() {
        asm.pop(register);
    }
    asm.prepend(front);
    Some(asm.finish())
}

/// Values in the order of their computation: each before its users, and not long before.
pub(super) struct ValueOrder<'a> {
    lanes: &'a VectorProgram,
    values: Vec<Value>,
    /// Positions of users, grouped by value and sorted. Positions of effects follow the positions of values.
    users: Vec<u32>,
    /// Start of the users of each value, and the end of the last ones.
    starts: Vec<u32>,
}

impl<'a> ValueOrder<'a> {
    pub(super) fn new(lanes: &'a VectorProgram) -> ValueOrder<'a> {
        let count = lanes.insts.len();
        let mut order =
            ValueOrder { lanes, values: Vec::with_capacity(count), users: Vec::new(), starts: Vec::new() };
        let mut computed = vec![false; count];
        for effect in &lanes.effects {
            order.visit(effect.value(), &mut computed);
        }
        let values = order.values.iter().enumerate();
        let operands =
            values.flat_map(|(k, &value)| lanes.insts[usize::from(value)].operands().map(move |a| (k, a)));
        let effects = lanes.effects.iter().enumerate();
        let stored = effects.map(|(k, effect)| (order.values.len() + k, effect.value()));
        let mut uses: Vec<(Value, u32)> =
            operands.chain(stored).map(|(position, value)| (value, position as u32)).collect();
        uses.sort_unstable();
        order.starts = vec![0; count + 1];
        for &(value, _) in &uses {
            order.starts[usize::from(value) + 1] += 1;
        }
        for value in 0..count {
            order.starts[value + 1] += order.starts[value];
        }
        order.users = uses.into_iter().map(|(_, position)| position).collect();
        order
    }

    fn lane(&self, value: Value) -> VectorInst {
        self.lanes.insts[usize::from(value)]
    }

    /// Returns the positions of the users of a value.
    fn users(&self, value: Value) -> &[u32] {
        let value = usize::from(value);
        &self.users[self.starts[value] as usize..self.starts[value + 1] as usize]
    }

    /// Returns the number of uses of a value.
    fn num_uses(&self, value: Value) -> usize {
        self.users(value).len()
    }

    /// Returns true if a value needs no register before it is used.
    fn is_read_at_use(&self, value: Value) -> bool {
        match self.lane(value) {
            VectorInst::Constant(_)
            | VectorInst::FrameBroadcast(_)
            | VectorInst::MemoryBroadcast(_)
            | VectorInst::Sum(..) => true,
            VectorInst::Tile(_) => self.num_uses(value) == 1,
            _ => false,
        }
    }

    /// Appends a value to the order, after its operands.
    fn visit(&mut self, value: Value, computed: &mut [bool]) {
        // Without recursion: dependency chains may be as long as a program.
        let mut stack = vec![(value, false)];
        while let Some((value, ready)) = stack.pop() {
            if computed[usize::from(value)] {
                continue;
            }
            if ready {
                computed[usize::from(value)] = true;
                self.values.push(value);
                continue;
            }
            stack.push((value, true));
            let first = stack.len();
            stack.extend(self.lane(value).operands().map(|operand| (operand, false)));
            stack[first..].reverse();
            if matches!(self.lane(value), VectorInst::Select(..)) {
                // The condition is computed last: some functions have many truth values, and AVX-512 has few mask
                // registers.
                stack[first..].rotate_right(1);
            }
        }
    }

    /// Returns the number of pointers to callers' memory.
    fn num_pointers(&self) -> usize {
        let of_lanes = self.values.iter().filter_map(|&value| match self.lane(value) {
            VectorInst::Memory(pointer) | VectorInst::MemoryBroadcast(pointer) => Some(pointer),
            _ => None,
        });
        let of_effects = self.lanes.effects.iter().filter_map(|effect| match *effect {
            Effect::Memory(pointer, _) => Some(pointer),
            _ => None,
        });
        of_lanes.chain(of_effects).map(|pointer| usize::from(pointer) + 1).max().unwrap_or(0)
    }
}

/// Register assignment of a function, before code is generated.
struct RegisterPlan {
    wide: bool,
    /// Number of vectors of a round.
    vectors: usize,
    /// Maximum number of interleaved vectors.
    interleaved: usize,
    /// Registers of each fold: for one round, then for the other round.
    sums: Vec<Vec<u8>>,
    /// Uniform values, and the registers that hold them throughout the function.
    hoisted: Vec<(Value, u8)>,
    /// Free registers for values, as a bit set.
    free: u32,
    /// Maximum number of values on the stack, in the code so far.
    slots: Cell<usize>,
}

/// Reserves a register for the whole function.
fn reserve(free: &mut u32) -> Option<u8> {
    let register = free.checked_ilog2()?;
    *free &= !(1 << register);
    Some(register as u8)
}

impl RegisterPlan {
    fn new(order: &ValueOrder<'_>, folds: &[Fold], wide: bool, abreast: usize) -> Option<RegisterPlan> {
        if order.num_pointers() > MAX_POINTERS {
            return None;
        }
        let vectors = ROUND / lanes_of_vector(wide);
        let mut free = if wide { u32::MAX } else { 0xffff };
        let mut registers = || (0..2 * vectors).map(|_| reserve(&mut free)).collect::<Option<Vec<u8>>>();
        let sums = folds.iter().map(|_| registers()).collect::<Option<Vec<_>>>()?;
        let slots = Cell::new(0);
        let mut plan =
            RegisterPlan { wide, vectors, interleaved: abreast, sums, hoisted: Vec::new(), free, slots };

        let mut trial = BodyEmitter::new(&plan, order, 0..abreast, false);
        trial.shares_uniform = false;
        trial.run(&mut Assembler::new(wide))?;
        // Interleaving is not worth many spills and reloads.
        if abreast > 1 && trial.spilled > abreast * (order.values.len() / MIN_VALUES_PER_SPILL) {
            return None;
        }
        // Registers that the trial did not use hold the uniform values with the most uses.
        let mut unused = plan.free & !trial.touched;
        let mut singles: Vec<Value> =
            order.values.iter().copied().filter(|&value| is_uniform(order.lane(value))).collect();
        singles.sort_by_key(|&value| {
            // At AVX2 constants come last: they are stored as whole vectors, which instructions read from memory.
            let is_vector = !wide && matches!(order.lane(value), VectorInst::Constant(_));
            (is_vector, std::cmp::Reverse(order.num_uses(value)))
        });
        for value in singles {
            let Some(register) = reserve(&mut unused) else { break };
            plan.free &= !(1 << register);
            plan.hoisted.push((value, register));
        }
        Some(plan)
    }

    /// Returns the number of bytes of a vector.
    fn bytes(&self) -> usize {
        4 * lanes_of_vector(self.wide)
    }

    /// Returns the memory operand of a uniform value.
    fn uniform_operand(&self, asm: &mut Assembler, lane: VectorInst) -> Rm {
        match lane {
            VectorInst::Constant(bits) => asm.constant(bits),
            VectorInst::FrameBroadcast(slot) => Rm::Frame { slot, scale: None, displacement: 0 },
            VectorInst::MemoryBroadcast(pointer) => {
                Rm::Memory { base: pointer_register(asm, pointer), scale: None, displacement: 0 }
            }
            other => unreachable!("{other:?} changes along the tile"),
        }
    }

    /// Generates `rounds` rounds.
    fn emit_rounds(
        &self,
        asm: &mut Assembler,
        order: &ValueOrder<'_>,
        rounds: usize,
        end: bool,
    ) -> Option<()> {
        let vectors = rounds * self.vectors;
        for first in (0..vectors).step_by(self.interleaved) {
            let mut body = BodyEmitter::new(self, order, first..vectors.min(first + self.interleaved), end);
            body.run(asm)?;
        }
        Some(())
    }
}

/// Returns a register with a pointer to callers' memory. The register is valid until the next call.
fn pointer_register(asm: &mut Assembler, pointer: u8) -> Gpr {
    POINTER_REGISTERS.get(usize::from(pointer)).copied().unwrap_or_else(|| {
        asm.load(SCRATCH, TABLE, 8 * i32::from(pointer));
        SCRATCH
    })
}

/// Returns true if a value is uniform: the same for all indices.
fn is_uniform(lane: VectorInst) -> bool {
    matches!(lane, VectorInst::Constant(_) | VectorInst::FrameBroadcast(_) | VectorInst::MemoryBroadcast(_))
}

/// Code generation for some interleaved vectors.
struct BodyEmitter<'a> {
    plan: &'a RegisterPlan,
    order: &'a ValueOrder<'a>,
    /// True for the incomplete end.
    end: bool,
    streams: Vec<VectorState>,
    /// Index of the current stream.
    current_stream: usize,
    /// Position of the current value in the order.
    position: usize,
    /// True if uniform operands are loaded once for all vectors, as long as registers are free.
    shares_uniform: bool,
    free: u32,
    free_masks: u32,
    free_slots: u64,
    /// Stack slots that the current instruction may still read. They are free after that instruction.
    pending_slots: u64,
    /// Registers that were used, as a bit set.
    touched: u32,
    /// Number of spilled values.
    spilled: usize,
}

/// State of one interleaved vector.
struct VectorState {
    /// Index of the vector, counted from the first of these rounds.
    vector: usize,
    at: Vec<Location>,
    /// Number of remaining uses of each value.
    uses: Vec<usize>,
}

/// Location of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// Not computed yet, or read directly by its users.
    Unassigned,
    /// A vector register, or a mask register for truth values at AVX-512.
    Register(u8),
    /// A slot of the stack.
    Slot(u8),
}

impl<'a> BodyEmitter<'a> {
    fn new(
        plan: &'a RegisterPlan,
        order: &'a ValueOrder<'a>,
        vectors: Range<usize>,
        end: bool,
    ) -> BodyEmitter<'a> {
        let mut at = vec![Location::Unassigned; order.lanes.insts.len()];
        for &(value, register) in &plan.hoisted {
            // The program that joins sums has no uniform values: its values only share indices with the hoisted ones.
            if at.len() > usize::from(value) && is_uniform(order.lane(value)) {
                at[usize::from(value)] = Location::Register(register);
            }
        }
        let uses: Vec<usize> = order.starts.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect();
        let stream = |vector| VectorState { vector, at: at.clone(), uses: uses.clone() };
        BodyEmitter {
            plan,
            order,
            end,
            streams: vectors.map(stream).collect(),
            current_stream: 0,
            position: 0,
            shares_uniform: true,
            free: plan.free,
            // Mask 0 means no mask, and mask 1 is `END_MASK`.
            free_masks: 0b1111_1100,
            free_slots: (1 << MAX_STACK_SLOTS) - 1,
            pending_slots: 0,
            touched: 0,
            spilled: 0,
        }
    }

    fn run(&mut self, asm: &mut Assembler) -> Option<()> {
        if self.end && self.plan.wide {
            // At AVX-512 the mask is loaded once, because a round is only one vector.
            let register = self.load_end(asm)?;
            asm.vector(MASK_OF_WORDS, END_MASK, 0, Rm::Register(register), Extra::default());
            self.free_registers([Some(register)]);
        }
        let order = self.order;
        for (position, &value) in order.values.iter().enumerate() {
            // Such values are read directly by their users.
            if order.is_read_at_use(value) {
                continue;
            }
            self.position = position;
            let shared = self.load_shared_operands(asm, value)?;
            for stream in 0..self.streams.len() {
                self.select_stream(stream);
                self.emit_value(asm, value)?;
            }
            for (value, register) in shared {
                self.set_locations(value, Location::Unassigned);
                self.free_registers([Some(register)]);
            }
        }
        // Stores come after all loads, because a store may overwrite an element that is loaded.
        for (k, &effect) in order.lanes.effects.iter().enumerate() {
            self.position = order.values.len() + k;
            for stream in 0..self.streams.len() {
                self.select_stream(stream);
                self.emit_effect(asm, effect)?;
            }
        }
        Some(())
    }

    /// Makes another stream the current one.
    fn select_stream(&mut self, stream: usize) {
        self.current_stream = stream;
        self.free_slots |= std::mem::take(&mut self.pending_slots);
    }

    /// Loads uniform operands into registers for all streams, if enough registers are free.
    fn load_shared_operands(&mut self, asm: &mut Assembler, value: Value) -> Option<Vec<(Value, u8)>> {
        const OTHERS: usize = 4;
        let mut shared = Vec::new();
        // At AVX-512 an instruction broadcasts its memory operand.
        if !self.shares_uniform || self.plan.wide || self.streams.len() == 1 {
            return Some(shared);
        }
        for operand in self.order.lane(value).operands() {
            let lane = self.order.lane(operand);
            let enough = self.free.count_ones() as usize >= self.streams.len() + OTHERS;
            if enough && is_uniform(lane) && self.location(operand) == Location::Unassigned {
                let register = self.allocate(asm)?;
                let from = self.plan.uniform_operand(asm, lane);
                asm.vector(BROADCAST, register, 0, from, Extra::default());
                self.set_locations(operand, Location::Register(register));
                shared.push((operand, register));
            }
        }
        Some(shared)
    }

    fn set_locations(&mut self, value: Value, at: Location) {
        for stream in &mut self.streams {
            stream.at[usize::from(value)] = at;
        }
    }

    fn location(&self, value: Value) -> Location {
        self.streams[self.current_stream].at[usize::from(value)]
    }

    /// Returns the register of a value, if the value is in a register.
    fn register_of(&self, value: Value) -> Option<u8> {
        match self.location(value) {
            Location::Register(register) => Some(register),
            _ => None,
        }
    }

    fn allocate(&mut self, asm: &mut Assembler) -> Option<u8> {
        if self.free == 0 {
            self.spill(asm)?;
        }
        let register = self.free.trailing_zeros() as u8;
        self.free &= !(1 << register);
        self.touched |= 1 << register;
        Some(register)
    }

    /// Spills the value with the furthest next use. Never spills operands of the current instruction.
    fn spill(&mut self, asm: &mut Assembler) -> Option<()> {
        let mut last = (self.position, None);
        for (k, stream) in self.streams.iter().enumerate() {
            for &value in &self.order.values {
                let users = self.order.users(value);
                let left = stream.uses[usize::from(value)];
                let Location::Register(register) = stream.at[usize::from(value)] else { continue };
                if left == 0 || is_uniform(self.order.lane(value)) || self.is_mask(value) {
                    continue;
                }
                let next = users[users.len() - left] as usize;
                if next > last.0 {
                    last = (next, Some((k, value, register)));
                }
            }
        }
        let (stream, value, register) = last.1?;
        if self.free_slots == 0 {
            return None;
        }
        let slot = self.free_slots.trailing_zeros() as u8;
        self.free_slots &= !(1 << slot);
        self.plan.slots.set(self.plan.slots.get().max(usize::from(slot) + 1));
        asm.vector(STORE, register, 0, self.stack_operand(slot), Extra::default());
        self.streams[stream].at[usize::from(value)] = Location::Slot(slot);
        self.free |= 1 << register;
        self.spilled += 1;
        Some(())
    }

    fn stack_operand(&self, slot: u8) -> Rm {
        let displacement = ((usize::from(slot) + 1) * self.plan.bytes()) as i32;
        Rm::Memory { base: STACK, scale: None, displacement }
    }

    fn allocate_mask(&mut self) -> Option<u8> {
        let register = self.free_masks.trailing_zeros() as u8;
        if self.free_masks == 0 {
            return None;
        }
        self.free_masks &= !(1 << register);
        Some(register)
    }

    fn is_mask(&self, value: Value) -> bool {
        self.plan.wide && self.order.lane(value).is_truth()
    }

    /// Ends one use of a value. After the last use its location is free.
    fn release(&mut self, value: Value) {
        let uses = &mut self.streams[self.current_stream].uses[usize::from(value)];
        *uses -= 1;
        if *uses > 0 || self.order.is_read_at_use(value) {
            return;
        }
        match self.location(value) {
            Location::Register(register) if self.is_mask(value) => self.free_masks |= 1 << register,
            Location::Register(register) => self.free |= 1 << register,
            Location::Slot(slot) => self.pending_slots |= 1 << slot,
            Location::Unassigned => {}
        }
    }

    /// Returns the frame operand at this vector's indices, for values of `1 << power` bytes.
    fn frame_operand(&self, slot: Slot, power: u8) -> Rm {
        Rm::Frame { slot, scale: Some(power), displacement: self.first_byte(power) }
    }

    /// Returns the byte at which this vector begins, for values of `1 << power` bytes.
    fn first_byte(&self, power: u8) -> i32 {
        let lanes = self.streams[self.current_stream].vector * lanes_of_vector(self.plan.wide);
        (lanes << power) as i32
    }

    /// Loads the mask of the incomplete end into a new register.
    fn load_end(&mut self, asm: &mut Assembler) -> Option<u8> {
        let register = self.allocate(asm)?;
        let displacement = (self.streams[self.current_stream].vector * self.plan.bytes()) as i32;
        let words = Rm::Memory { base: MASK_WORDS, scale: None, displacement };
        asm.vector(LOAD, register, 0, words, Extra::default());
        Some(register)
    }

    /// Returns the memory operand of a pointer at this vector's indices.
    fn memory_operand(&self, asm: &mut Assembler, pointer: u8) -> Rm {
        let base = pointer_register(asm, pointer);
        Rm::Memory { base, scale: Some(2), displacement: self.first_byte(2) }
    }

    /// Prefetches the same elements of the next piece, once for each cache line.
    fn prefetch_next_piece(&self, asm: &mut Assembler, pointer: u8, address: Rm, what_for: PrefetchKind) {
        let starts_line =
            (self.streams[self.current_stream].vector * self.plan.bytes()).is_multiple_of(CACHE_LINE_BYTES);
        let step = self.order.lanes.prefetch_steps.get(usize::from(pointer)).copied().flatten();
        if let (Some(step), Rm::Memory { base, displacement, .. }, true, false) =
            (step, address, starts_line, self.end)
        {
            asm.prefetch(what_for, base, displacement.wrapping_add(step));
        }
    }

    /// Returns the register of a value. A value without a register is loaded into a new one, which is also the second
    /// result.
    fn load_register(&mut self, asm: &mut Assembler, value: Value) -> Option<(u8, Option<u8>)> {
        if let Some(register) = self.register_of(value) {
            return Some((register, None));
        }
        let lane = self.order.lane(value);
        if let VectorInst::Sum(fold, set) = lane {
            return Some((self.sum_register(fold, set), None));
        }
        let register = self.allocate(asm)?;
        match (self.location(value), lane) {
            (Location::Slot(slot), _) => {
                asm.vector(LOAD, register, 0, self.stack_operand(slot), Extra::default());
            }
            (_, VectorInst::Tile(slot)) => {
                asm.vector(LOAD, register, 0, self.frame_operand(slot, 2), Extra::default());
            }
            _ => {
                let from = self.plan.uniform_operand(asm, lane);
                asm.vector(BROADCAST, register, 0, from, Extra::default());
            }
        }
        Some((register, Some(register)))
    }

    fn sum_register(&self, fold: u8, set: SumSet) -> u8 {
        let registers = &self.plan.sums[usize::from(fold)];
        let other = if set == SumSet::Second { self.plan.vectors } else { 0 };
        registers[other + self.streams[self.current_stream].vector]
    }

    /// Returns the last operand of an instruction, from memory if possible, and true if the instruction broadcasts it.
    /// The third result is a new register, if one was needed.
    fn last_operand(&mut self, asm: &mut Assembler, value: Value) -> Option<(Rm, bool, Option<u8>)> {
        match (self.location(value), self.order.lane(value)) {
            (Location::Register(_), _) => {}
            (Location::Slot(slot), _) => return Some((self.stack_operand(slot), false, None)),
            (_, VectorInst::Tile(slot)) => return Some((self.frame_operand(slot, 2), false, None)),
            (_, lane) if is_uniform(lane) && self.plan.wide => {
                return Some((self.plan.uniform_operand(asm, lane), true, None));
            }
            // At AVX2 constants are stored as whole vectors.
            (_, VectorInst::Constant(bits)) => return Some((asm.constant(bits), false, None)),
            _ => {}
        }
        let (register, new) = self.load_register(asm, value)?;
        Some((Rm::Register(register), false, new))
    }

    fn free_registers(&mut self, registers: impl IntoIterator<Item = Option<u8>>) {
        for register in registers.into_iter().flatten() {
            self.free |= 1 << register;
        }
    }

    /// Returns the register of a value if this is its last use and the register is free afterwards.
    fn last_use_register(&self, value: Value) -> Option<u8> {
        let last = self.streams[self.current_stream].uses[usize::from(value)] == 1
            && !self.order.is_read_at_use(value);
        self.register_of(value).filter(|_| last)
    }

    /// Transfers the register of a value to a result.
    fn transfer_register(&mut self, value: Value) {
        self.streams[self.current_stream].uses[usize::from(value)] -= 1;
    }

    /// `result = opcode(a, b)`.
    fn emit_binary(
        &mut self,
        asm: &mut Assembler,
        opcode: Opcode,
        a: Value,
        b: Value,
        extra: Extra,
    ) -> Option<u8> {
        let (first, new_first) = self.load_register(asm, a)?;
        let (second, broadcast, new_second) = self.last_operand(asm, b)?;
        self.release(a);
        self.release(b);
        self.free_registers([new_first, new_second]);
        let result = self.allocate(asm)?;
        asm.vector(opcode, result, first, second, Extra { broadcast, ..extra });
        Some(result)
    }

    fn emit_value(&mut self, asm: &mut Assembler, value: Value) -> Option<()> {
        let lane = self.order.lane(value);
        let wide = self.plan.wide;
        let plain = Extra::default();
        let register = match lane {
            VectorInst::Constant(_)
            | VectorInst::FrameBroadcast(_)
            | VectorInst::MemoryBroadcast(_)
            | VectorInst::Sum(..) => unreachable!("it stays"),
            VectorInst::Tile(slot) => {
                let register = self.allocate(asm)?;
                asm.vector(LOAD, register, 0, self.frame_operand(slot, 2), plain);
                register
            }
            VectorInst::Memory(pointer) => {
                let register = self.allocate(asm)?;
                let from = self.memory_operand(asm, pointer);
                self.prefetch_next_piece(asm, pointer, from, PrefetchKind::Read);
                match (self.end, wide) {
                    (false, _) => asm.vector(LOAD, register, 0, from, plain),
                    (true, true) => {
                        asm.vector(LOAD, register, 0, from, Extra { mask: END_MASK, zero: true, ..plain });
                    }
                    (true, false) => {
                        let end = self.load_end(asm)?;
                        asm.vector(MASKED_LOAD, register, end, from, plain);
                        self.free_registers([Some(end)]);
                    }
                }
                register
            }
            VectorInst::Truths(slot) => {
                let from = self.frame_operand(slot, 0);
                if wide {
                    let (register, spare) = (self.allocate_mask()?, self.allocate(asm)?);
                    asm.vector_of(Length::Bits128, LOAD, spare, 0, from, plain);
                    let not_zero = opcode(1, 2, 0x26);
                    asm.vector_of(Length::Bits128, not_zero, register, spare, Rm::Register(spare), plain);
                    self.free_registers([Some(spare)]);
                    register
                } else {
                    let register = self.allocate(asm)?;
                    asm.vector(opcode(1, 2, 0x31), register, 0, from, plain);
                    // Copies the lowest bit to all bits of the lane: a shift left by 31 bits, then an arithmetic shift
                    // right.
                    for code in [LEFT, RIGHT] {
                        let by = Extra { immediate: Some(31), ..plain };
                        asm.vector(SHIFT, code, register, Rm::Register(register), by);
                    }
                    register
                }
            }
            VectorInst::Binary(two, mut a, mut b) => {
                // The operand in memory must be the last.
                if commutes(two) && self.register_of(a).is_none() {
                    std::mem::swap(&mut a, &mut b);
                }
                self.emit_binary(asm, opcode_of(two), a, b, plain)?
            }
            VectorInst::Sqrt(a) | VectorInst::Floor(a) | VectorInst::FromInteger(a) => {
                let (opcode, immediate) = match lane {
                    VectorInst::Sqrt(_) => (ROOT, None),
                    // Rounds down, and raises no exception.
                    VectorInst::Floor(_) => (ROUND_DOWN, Some(9)),
                    _ => (TO_FLOAT, None),
                };
                let (from, broadcast, new) = self.last_operand(asm, a)?;
                self.release(a);
                self.free_registers([new]);
                let register = self.allocate(asm)?;
                asm.vector(opcode, register, 0, from, Extra { broadcast, immediate, ..plain });
                register
            }
            VectorInst::ShiftLeft(a, count) | VectorInst::ShiftRight(a, count) => {
                let code = if matches!(lane, VectorInst::ShiftLeft(..)) { LEFT } else { RIGHT };
                let (from, new) = self.load_register(asm, a)?;
                self.release(a);
                self.free_registers([new]);
                let register = self.allocate(asm)?;
                asm.vector(
                    SHIFT,
                    code,
                    register,
                    Rm::Register(from),
                    Extra { immediate: Some(count), ..plain },
                );
                register
            }
            VectorInst::MulAdd(a, b, c) => self.emit_mul_add(asm, [a, b, c])?,
            VectorInst::Compare(test, a, b) => {
                let immediate = Some(test as u8);
                if wide {
                    let (first, new_first) = self.load_register(asm, a)?;
                    let (second, broadcast, new_second) = self.last_operand(asm, b)?;
                    let register = self.allocate_mask()?;
                    asm.vector(TEST, register, first, second, Extra { broadcast, immediate, ..plain });
                    self.release(a);
                    self.release(b);
                    self.free_registers([new_first, new_second]);
                    register
                } else {
                    self.emit_binary(asm, TEST, a, b, Extra { immediate, ..plain })?
                }
            }
            VectorInst::Logic(logic, a, b) if wide => {
                let (first, second) = (self.register_of(a)?, self.register_of(b)?);
                self.release(a);
                self.release(b);
                let register = self.allocate_mask()?;
                let code = match logic {
                    Logic::And => 0x41,
                    Logic::Or => 0x45,
                    Logic::Xor => 0x47,
                };
                asm.mask_op(Length::Bits256, opcode(0, 1, code), register, first, second);
                register
            }
            VectorInst::Logic(logic, a, b) => {
                let opcode = match logic {
                    Logic::And => AND,
                    Logic::Or => OR,
                    Logic::Xor => XOR,
                };
                self.emit_binary(asm, opcode, a, b, plain)?
            }
            VectorInst::Select(truth, a, b) => {
                let (test, new_test) = self.load_register(asm, truth)?;
                let (otherwise, new_otherwise) = self.load_register(asm, b)?;
                let (chosen, broadcast, new_chosen) = self.last_operand(asm, a)?;
                for operand in [truth, a, b] {
                    self.release(operand);
                }
                self.free_registers([new_test, new_otherwise, new_chosen]);
                let register = self.allocate(asm)?;
                if wide {
                    let by = Extra { mask: test, broadcast, ..plain };
                    asm.vector(BLEND_BY_MASK, register, otherwise, chosen, by);
                } else {
                    let by = Extra { immediate: Some(test << 4), ..plain };
                    asm.vector(BLEND_BY_VECTOR, register, otherwise, chosen, by);
                }
                register
            }
        };
        self.streams[self.current_stream].at[usize::from(value)] = Location::Register(register);
        Some(())
    }

    /// Computes `a * b + c`. The instruction overwrites an operand: one that is not needed any more, or a copy.
    fn emit_mul_add(&mut self, asm: &mut Assembler, [mut a, mut b, c]: [Value; 3]) -> Option<u8> {
        let plain = Extra::default();
        if self.last_use_register(a).is_none() && self.last_use_register(b).is_some() {
            std::mem::swap(&mut a, &mut b);
        }
        if let Some(result) = self.last_use_register(a) {
            let (second, new_second) = self.load_register(asm, b)?;
            let (third, broadcast, new_third) = self.last_operand(asm, c)?;
            asm.vector(MUL_ADD_213, result, second, third, Extra { broadcast, ..plain });
            self.release(b);
            self.release(c);
            self.free_registers([new_second, new_third]);
            self.transfer_register(a);
            return Some(result);
        }
        if self.register_of(a).is_none() {
            std::mem::swap(&mut a, &mut b);
        }
        let (first, new_first) = self.load_register(asm, a)?;
        let (second, broadcast, new_second) = self.last_operand(asm, b)?;
        let result = match (self.last_use_register(c), self.register_of(c)) {
            (Some(result), _) => {
                self.transfer_register(c);
                result
            }
            (None, Some(register)) => {
                let result = self.allocate(asm)?;
                asm.vector(MOVE, result, 0, Rm::Register(register), plain);
                self.release(c);
                result
            }
            // Loads the operand into a register of its own.
            (None, None) => {
                let result = match self.load_register(asm, c)? {
                    (_, Some(new)) => new,
                    (register, None) => {
                        let result = self.allocate(asm)?;
                        asm.vector(MOVE, result, 0, Rm::Register(register), plain);
                        result
                    }
                };
                self.release(c);
                result
            }
        };
        asm.vector(MUL_ADD_231, result, first, second, Extra { broadcast, ..plain });
        self.release(a);
        self.release(b);
        self.free_registers([new_first, new_second]);
        Some(result)
    }

    fn emit_effect(&mut self, asm: &mut Assembler, effect: Effect) -> Option<()> {
        let (wide, plain) = (self.plan.wide, Extra::default());
        let value = effect.value();
        if let Effect::Truths(slot, _) = effect {
            let (register, new) = self.load_register(asm, value)?;
            let spare = self.allocate(asm)?;
            self.store_truths(asm, self.frame_operand(slot, 0), register, spare);
            self.release(value);
            self.free_registers([new, Some(spare)]);
            return Some(());
        }
        let (register, new) = self.load_register(asm, value)?;
        match effect {
            Effect::Tile(slot, _) => asm.vector(STORE, register, 0, self.frame_operand(slot, 2), plain),
            Effect::FrameScalar(slot, _) => {
                let to = Rm::Frame { slot, scale: None, displacement: 0 };
                asm.vector_of(Length::Bits128, STORE_ONE, register, 0, to, plain);
            }
            Effect::Memory(pointer, _) => {
                let to = self.memory_operand(asm, pointer);
                self.prefetch_next_piece(asm, pointer, to, PrefetchKind::Write);
                match (self.end, wide) {
                    (false, _) => asm.vector(STORE, register, 0, to, plain),
                    (true, true) => asm.vector(STORE, register, 0, to, Extra { mask: END_MASK, ..plain }),
                    (true, false) => {
                        let end = self.load_end(asm)?;
                        asm.vector(MASKED_STORE, register, end, to, plain);
                        self.free_registers([Some(end)]);
                    }
                }
            }
            Effect::Sum(fold, _) => {
                let to = self.sum_register(fold, SumSet::This);
                match (self.end, wide) {
                    (false, _) => asm.vector(MOVE, to, 0, Rm::Register(register), plain),
                    (true, true) => {
                        asm.vector(MOVE, to, 0, Rm::Register(register), Extra { mask: END_MASK, ..plain });
                    }
                    (true, false) => {
                        let end = self.load_end(asm)?;
                        let by = Extra { immediate: Some(end << 4), ..plain };
                        asm.vector(BLEND_BY_VECTOR, to, to, Rm::Register(register), by);
                        self.free_registers([Some(end)]);
                    }
                }
            }
            Effect::Truths(..) => unreachable!("stored above"),
        }
        self.release(value);
        self.free_registers([new]);
        Some(())
    }

    /// Stores truth values as bytes 0 and 1. May write past the last index: the register has capacity for whole rounds.
    fn store_truths(&self, asm: &mut Assembler, to: Rm, register: u8, spare: u8) {
        let plain = Extra::default();
        let target = Rm::Register(spare);
        if self.plan.wide {
            asm.vector_of(Length::Bits128, opcode(2, 2, 0x28), spare, 0, Rm::Register(register), plain);
            asm.vector_of(Length::Bits128, ABSOLUTE_BYTES, spare, 0, target, plain);
            asm.vector_of(Length::Bits128, STORE, spare, 0, to, plain);
        } else {
            // Packs the lower and the upper half to 16-bit words, then to bytes.
            asm.vector(opcode(1, 3, 0x39), register, 0, target, Extra { immediate: Some(1), ..plain });
            asm.vector_of(Length::Bits128, opcode(1, 1, 0x6b), spare, register, target, plain);
            asm.vector_of(Length::Bits128, opcode(1, 1, 0x63), spare, spare, target, plain);
            asm.vector_of(Length::Bits128, ABSOLUTE_BYTES, spare, 0, target, plain);
            asm.vector_of(Length::Bits128, opcode(1, 1, 0xd6), spare, 0, to, plain);
        }
    }
}
