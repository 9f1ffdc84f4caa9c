//! Code generation: register allocation, the loop over indices, and the last, incomplete indices.
//!
//! A function processes the indices of a tile 16 at a time, as one or more vectors. The
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

use super::encoder::{Encoder, Operand, Place, PrefetchKind, Resources};
use super::ir::{Effect, Fold, SumSet, Value, VectorBinaryOp, VectorInst, VectorProgram};
use super::order::ValueOrder;
use crate::isa::CACHE_LINE_BYTES;
use crate::tile::op::Slot;

/// Number of indices of a round.
pub(super) const ROUND: usize = 16;
/// Maximum number of pointers to callers' memory.
pub(super) const MAX_POINTERS: usize = 24;
/// Maximum number of values on the stack. As vectors, they take less than a page.
const MAX_STACK_SLOTS: usize = 60;

/// Interleaved vectors may spill at most one in this many values.
const MIN_VALUES_PER_SPILL: usize = 8;
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
pub(super) fn emit<E: Encoder>(lanes: &VectorProgram) -> Option<E::Code> {
    let order = ValueOrder::new(lanes);
    let max_vectors = 2 * ROUND / E::resources(lanes.level).lanes;
    let fits = |&abreast: &usize| abreast <= max_vectors;
    [4, 2, 1].into_iter().filter(fits).find_map(|abreast| emit_interleaved::<E>(&order, abreast))
}

/// Generates the code with `abreast` interleaved vectors.
pub(super) fn emit_interleaved<E: Encoder>(order: &ValueOrder<'_>, abreast: usize) -> Option<E::Code> {
    let lanes = order.lanes;
    let plan = RegisterPlan::new::<E>(order, &lanes.folds, abreast)?;
    let mut code = E::new(lanes.level);
    code.begin(order.num_pointers());
    for &(value, register) in &plan.hoisted {
        code.broadcast(register, uniform_place(order.lane(value)));
    }
    for (fold, registers) in lanes.folds.iter().zip(&plan.sums) {
        let neutral: f32 = match fold.op {
            ReduceOp::Sum => 0.0,
            ReduceOp::Prod => 1.0,
            ReduceOp::Max => f32::NEG_INFINITY,
            ReduceOp::Min => f32::INFINITY,
        };
        for &register in registers {
            code.broadcast(register, Place::Constant { bits: neutral.to_bits() });
        }
    }
    code.clear_index();
    if !lanes.folds.is_empty() || abreast > plan.vectors {
        // Two rounds at a time. With folds, only if there are at least four rounds.
        const TWO: usize = 2 * ROUND;
        let skip = code.skip_if_fewer_than(if lanes.folds.is_empty() { TWO } else { 2 * TWO });
        code.limit_to_multiple_of(TWO);
        let loop_start = code.position();
        plan.emit_rounds(&mut code, order, 2, false)?;
        code.repeat(TWO, loop_start);
        if !lanes.folds.is_empty() {
            let lanes = lanes.join_folds();
            plan.emit_rounds(&mut code, &ValueOrder::new(&lanes), 1, false)?;
        }
        code.bind(skip);
    }
    code.limit_to_multiple_of(ROUND);
    let skip = code.skip_at_limit();
    let loop_start = code.position();
    plan.emit_rounds(&mut code, order, 1, false)?;
    code.repeat(ROUND, loop_start);
    code.bind(skip);
    let skip = code.skip_at_end();
    plan.emit_rounds(&mut code, order, 1, true)?;
    code.bind(skip);
    for (fold, registers) in lanes.folds.iter().zip(&plan.sums) {
        for (k, &register) in registers[..plan.vectors].iter().enumerate() {
            let displacement = (k * plan.vector_bytes()) as i32;
            code.store(register, Place::Frame { slot: fold.slot, displacement });
        }
    }
    Some(code.finish(plan.slots.get()))
}

/// Register assignment of a function, before code is generated.
struct RegisterPlan {
    resources: Resources,
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
    fn new<E: Encoder>(order: &ValueOrder<'_>, folds: &[Fold], abreast: usize) -> Option<RegisterPlan> {
        if order.num_pointers() > MAX_POINTERS {
            return None;
        }
        let resources = E::resources(order.lanes.level);
        let vectors = ROUND / resources.lanes;
        let mut free = resources.vectors;
        let mut registers = || (0..2 * vectors).map(|_| reserve(&mut free)).collect::<Option<Vec<u8>>>();
        let sums = folds.iter().map(|_| registers()).collect::<Option<Vec<_>>>()?;
        let slots = Cell::new(0);
        let mut plan =
            RegisterPlan { resources, vectors, interleaved: abreast, sums, hoisted: Vec::new(), free, slots };

        let mut code = E::new(order.lanes.level);
        let mut trial = BodyEmitter::new(&plan, order, &mut code, 0..abreast, false);
        trial.shares_uniform = false;
        trial.run()?;
        // Interleaving is not worth many spills and reloads.
        if abreast > 1 && trial.spilled > abreast * (order.values.len() / MIN_VALUES_PER_SPILL) {
            return None;
        }
        // Registers that the trial did not use hold the uniform values with the most uses.
        let mut unused = plan.free & !trial.touched;
        let mut singles: Vec<Value> =
            order.values.iter().copied().filter(|&value| is_uniform(order.lane(value))).collect();
        singles.sort_by_key(|&value| {
            // Constants come last if they are stored as whole vectors, which instructions read from memory.
            let is_vector =
                !resources.broadcasts_operands && matches!(order.lane(value), VectorInst::Constant(_));
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
    fn vector_bytes(&self) -> usize {
        4 * self.resources.lanes
    }

    /// Generates `rounds` rounds.
    fn emit_rounds<E: Encoder>(
        &self,
        code: &mut E,
        order: &ValueOrder<'_>,
        rounds: usize,
        end: bool,
    ) -> Option<()> {
        let vectors = rounds * self.vectors;
        for first in (0..vectors).step_by(self.interleaved) {
            let range = first..vectors.min(first + self.interleaved);
            BodyEmitter::new(self, order, code, range, end).run()?;
        }
        Some(())
    }
}

/// Returns the place of a uniform value.
fn uniform_place(lane: VectorInst) -> Place {
    match lane {
        VectorInst::Constant(bits) => Place::Constant { bits },
        VectorInst::FrameBroadcast(slot) => Place::Frame { slot, displacement: 0 },
        VectorInst::MemoryBroadcast(pointer) => Place::Element { pointer },
        other => unreachable!("{other:?} changes along the tile"),
    }
}

/// Returns true if a value is uniform: the same for all indices.
fn is_uniform(lane: VectorInst) -> bool {
    matches!(lane, VectorInst::Constant(_) | VectorInst::FrameBroadcast(_) | VectorInst::MemoryBroadcast(_))
}

/// Code generation for some interleaved vectors.
struct BodyEmitter<'a, E> {
    plan: &'a RegisterPlan,
    order: &'a ValueOrder<'a>,
    code: &'a mut E,
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
    free_truths: u32,
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
    /// A vector register, or a truth register.
    Register(u8),
    /// A slot of the stack.
    Slot(u8),
}

impl<'a, E: Encoder> BodyEmitter<'a, E> {
    fn new(
        plan: &'a RegisterPlan,
        order: &'a ValueOrder<'a>,
        code: &'a mut E,
        vectors: Range<usize>,
        end: bool,
    ) -> BodyEmitter<'a, E> {
        let mut at = vec![Location::Unassigned; order.lanes.insts.len()];
        for &(value, register) in &plan.hoisted {
            // The program that joins sums has no uniform values: its values only share indices with the hoisted ones.
            if at.len() > usize::from(value) && is_uniform(order.lane(value)) {
                at[usize::from(value)] = Location::Register(register);
            }
        }
        let uses: Vec<usize> =
            (0..order.lanes.insts.len()).map(|value| order.num_uses(value as Value)).collect();
        let stream = |vector| VectorState { vector, at: at.clone(), uses: uses.clone() };
        BodyEmitter {
            plan,
            order,
            code,
            end,
            streams: vectors.map(stream).collect(),
            current_stream: 0,
            position: 0,
            shares_uniform: true,
            free: plan.free,
            free_truths: plan.resources.truths.map_or(0, |truths| truths.free),
            free_slots: (1 << MAX_STACK_SLOTS) - 1,
            pending_slots: 0,
            touched: 0,
            spilled: 0,
        }
    }

    fn run(&mut self) -> Option<()> {
        if let (true, Some(truths)) = (self.end, self.plan.resources.truths) {
            // A truth register holds the mask throughout the round, which is only one vector.
            let words = self.load_end()?;
            self.code.truth_of_words(truths.end, words);
            self.free_registers([Some(words)]);
        }
        let order = self.order;
        for (position, &value) in order.values.iter().enumerate() {
            // Such values are read directly by their users.
            if order.is_read_at_use(value) {
                continue;
            }
            self.position = position;
            let shared = self.load_shared_operands(value)?;
            for stream in 0..self.streams.len() {
                self.select_stream(stream);
                self.emit_value(value)?;
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
                self.emit_effect(effect)?;
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
    fn load_shared_operands(&mut self, value: Value) -> Option<Vec<(Value, u8)>> {
        const OTHERS: usize = 4;
        let mut shared = Vec::new();
        if !self.shares_uniform || self.plan.resources.broadcasts_operands || self.streams.len() == 1 {
            return Some(shared);
        }
        for operand in self.order.lane(value).operands() {
            let lane = self.order.lane(operand);
            let enough = self.free.count_ones() as usize >= self.streams.len() + OTHERS;
            if enough && is_uniform(lane) && self.location(operand) == Location::Unassigned {
                let register = self.allocate()?;
                self.code.broadcast(register, uniform_place(lane));
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

    fn allocate(&mut self) -> Option<u8> {
        if self.free == 0 {
            self.spill()?;
        }
        let register = self.free.trailing_zeros() as u8;
        self.free &= !(1 << register);
        self.touched |= 1 << register;
        Some(register)
    }

    /// Spills the value with the furthest next use. Never spills operands of the current instruction.
    fn spill(&mut self) -> Option<()> {
        let mut last = (self.position, None);
        for (k, stream) in self.streams.iter().enumerate() {
            for &value in &self.order.values {
                let users = self.order.users(value);
                let left = stream.uses[usize::from(value)];
                let Location::Register(register) = stream.at[usize::from(value)] else { continue };
                if left == 0 || is_uniform(self.order.lane(value)) || self.is_in_truth_register(value) {
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
        self.code.store(register, Place::Stack { slot });
        self.streams[stream].at[usize::from(value)] = Location::Slot(slot);
        self.free |= 1 << register;
        self.spilled += 1;
        Some(())
    }

    /// Allocates a register for a truth value: a truth register if the machine has them.
    fn allocate_truth(&mut self) -> Option<u8> {
        if self.plan.resources.truths.is_none() {
            return self.allocate();
        }
        if self.free_truths == 0 {
            return None;
        }
        let register = self.free_truths.trailing_zeros() as u8;
        self.free_truths &= !(1 << register);
        Some(register)
    }

    /// Returns true if a value has a truth register.
    fn is_in_truth_register(&self, value: Value) -> bool {
        self.plan.resources.truths.is_some() && self.order.lane(value).is_truth()
    }

    /// Ends one use of a value. After the last use its location is free.
    fn release(&mut self, value: Value) {
        let uses = &mut self.streams[self.current_stream].uses[usize::from(value)];
        *uses -= 1;
        if *uses > 0 || self.order.is_read_at_use(value) {
            return;
        }
        match self.location(value) {
            Location::Register(register) if self.is_in_truth_register(value) => {
                self.free_truths |= 1 << register;
            }
            Location::Register(register) => self.free |= 1 << register,
            Location::Slot(slot) => self.pending_slots |= 1 << slot,
            Location::Unassigned => {}
        }
    }

    /// Returns the place of a register of the tile program at this vector's indices, for values of `1 << power` bytes.
    fn tile_place(&self, slot: Slot, power: u8) -> Place {
        Place::Tile { slot, power, displacement: self.first_byte(power) }
    }

    /// Returns the place of callers' memory at this vector's indices, for elements of `1 << power` bytes.
    fn elements_place(&self, pointer: u8, power: u8) -> Place {
        Place::Elements { pointer, power, displacement: self.first_byte(power) }
    }

    /// Returns the byte at which this vector begins, for values of `1 << power` bytes.
    fn first_byte(&self, power: u8) -> i32 {
        let lanes = self.streams[self.current_stream].vector * self.plan.resources.lanes;
        (lanes << power) as i32
    }

    /// Loads the words of the incomplete end into a new register.
    fn load_end(&mut self) -> Option<u8> {
        let register = self.allocate()?;
        self.code.load(register, Place::End { displacement: self.first_byte(2) });
        Some(register)
    }

    /// Returns the mask of the incomplete end, and the new register that holds it, if one was needed.
    fn end_mask(&mut self) -> Option<(u8, Option<u8>)> {
        if let Some(truths) = self.plan.resources.truths {
            return Some((truths.end, None));
        }
        let words = self.load_end()?;
        Some((words, Some(words)))
    }

    /// Prefetches the same elements of the next piece, once for each cache line.
    fn prefetch_next_piece(&mut self, pointer: u8, kind: PrefetchKind) {
        let first = self.first_byte(2);
        let step = self.order.lanes.prefetch_steps.get(usize::from(pointer)).copied().flatten();
        if let (Some(step), true, false) = (step, (first as usize).is_multiple_of(CACHE_LINE_BYTES), self.end)
        {
            self.code.prefetch(kind, pointer, first.wrapping_add(step));
        }
    }

    /// Returns the register of a value. A value without a register is loaded into a new one, which is also the second
    /// result.
    fn load_register(&mut self, value: Value) -> Option<(u8, Option<u8>)> {
        if let Some(register) = self.register_of(value) {
            return Some((register, None));
        }
        let lane = self.order.lane(value);
        if let VectorInst::Sum(fold, set) = lane {
            return Some((self.sum_register(fold, set), None));
        }
        let register = self.allocate()?;
        match (self.location(value), lane) {
            (Location::Slot(slot), _) => self.code.load(register, Place::Stack { slot }),
            (_, VectorInst::Tile(slot)) => {
                let from = self.tile_place(slot, 2);
                self.code.load(register, from);
            }
            _ => self.code.broadcast(register, uniform_place(lane)),
        }
        Some((register, Some(register)))
    }

    fn sum_register(&self, fold: u8, set: SumSet) -> u8 {
        let registers = &self.plan.sums[usize::from(fold)];
        let other = if set == SumSet::Second { self.plan.vectors } else { 0 };
        registers[other + self.streams[self.current_stream].vector]
    }

    /// Returns the last operand of an instruction, from memory if possible. The second result is a new register, if one
    /// was needed.
    fn last_operand(&mut self, value: Value) -> Option<(Operand, Option<u8>)> {
        match (self.location(value), self.order.lane(value)) {
            (Location::Register(_), _) => {}
            (Location::Slot(slot), _) => return Some((Operand::Vector(Place::Stack { slot }), None)),
            (_, VectorInst::Tile(slot)) => return Some((Operand::Vector(self.tile_place(slot, 2)), None)),
            (_, lane) if is_uniform(lane) && self.plan.resources.broadcasts_operands => {
                return Some((Operand::Broadcast(uniform_place(lane)), None));
            }
            // Constants are stored as whole vectors if instructions do not broadcast operands.
            (_, VectorInst::Constant(bits)) => {
                return Some((Operand::Vector(Place::Constant { bits }), None));
            }
            _ => {}
        }
        let (register, new) = self.load_register(value)?;
        Some((Operand::Register(register), new))
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

    /// Emits an instruction with the operand `a`.
    fn emit_unary(&mut self, a: Value, emit: fn(&mut E, u8, Operand)) -> Option<u8> {
        let (from, new) = self.last_operand(a)?;
        self.release(a);
        self.free_registers([new]);
        let result = self.allocate()?;
        emit(self.code, result, from);
        Some(result)
    }

    /// Emits an instruction with the operands `a` and `b`: `emit(code, result, a, b)`. `allocate` is
    /// [`BodyEmitter::allocate`], or [`BodyEmitter::allocate_truth`] if the result is a truth value.
    fn emit_binary(
        &mut self,
        [a, b]: [Value; 2],
        allocate: fn(&mut Self) -> Option<u8>,
        emit: impl FnOnce(&mut E, u8, u8, Operand),
    ) -> Option<u8> {
        let (first, new_first) = self.load_register(a)?;
        let (second, new_second) = self.last_operand(b)?;
        self.release(a);
        self.release(b);
        self.free_registers([new_first, new_second]);
        let result = allocate(self)?;
        emit(self.code, result, first, second);
        Some(result)
    }

    fn emit_shift(&mut self, a: Value, count: u8, emit: fn(&mut E, u8, u8, u8)) -> Option<u8> {
        let (from, new) = self.load_register(a)?;
        self.release(a);
        self.free_registers([new]);
        let result = self.allocate()?;
        emit(self.code, result, from, count);
        Some(result)
    }

    fn emit_select(&mut self, [truth, a, b]: [Value; 3]) -> Option<u8> {
        let (test, new_test) = self.load_register(truth)?;
        let (otherwise, new_otherwise) = self.load_register(b)?;
        let (chosen, new_chosen) = self.last_operand(a)?;
        for operand in [truth, a, b] {
            self.release(operand);
        }
        self.free_registers([new_test, new_otherwise, new_chosen]);
        let result = self.allocate()?;
        self.code.select(result, test, chosen, otherwise);
        Some(result)
    }

    fn emit_memory_load(&mut self, pointer: u8) -> Option<u8> {
        let register = self.allocate()?;
        let from = self.elements_place(pointer, 2);
        self.prefetch_next_piece(pointer, PrefetchKind::Read);
        if self.end {
            let (mask, new) = self.end_mask()?;
            self.code.load_masked(register, from, mask);
            self.free_registers([new]);
        } else {
            self.code.load(register, from);
        }
        Some(register)
    }

    /// Returns the mask of the incomplete end for an access to bytes, if this is the end.
    fn mask_of_bytes(&self) -> Option<u8> {
        self.plan.resources.truths.filter(|_| self.end).map(|truths| truths.end)
    }

    fn emit_bytes_load(&mut self, pointer: u8, is_signed: bool) -> Option<u8> {
        let register = self.allocate()?;
        let (from, mask) = (self.elements_place(pointer, 0), self.mask_of_bytes());
        self.code.load_bytes(register, from, is_signed, mask);
        Some(register)
    }

    fn emit_truths_load(&mut self, slot: Slot) -> Option<u8> {
        let register = self.allocate_truth()?;
        let spare = if self.plan.resources.truths.is_some() { Some(self.allocate()?) } else { None };
        let from = self.tile_place(slot, 0);
        self.code.load_truths(register, from, spare.unwrap_or(register));
        self.free_registers([spare]);
        Some(register)
    }

    fn emit_value(&mut self, value: Value) -> Option<()> {
        let register = match self.order.lane(value) {
            VectorInst::Constant(_)
            | VectorInst::FrameBroadcast(_)
            | VectorInst::MemoryBroadcast(_)
            | VectorInst::Sum(..) => unreachable!("it stays"),
            VectorInst::Tile(slot) => {
                let (register, from) = (self.allocate()?, self.tile_place(slot, 2));
                self.code.load(register, from);
                register
            }
            VectorInst::Memory(pointer) => self.emit_memory_load(pointer)?,
            VectorInst::Bytes(pointer, is_signed) => self.emit_bytes_load(pointer, is_signed)?,
            VectorInst::Truths(slot) => self.emit_truths_load(slot)?,
            VectorInst::Binary(op, mut a, mut b) => {
                // The operand in memory must be the last.
                if commutes(op) && self.register_of(a).is_none() {
                    std::mem::swap(&mut a, &mut b);
                }
                self.emit_binary([a, b], Self::allocate, |code, to, a, b| code.binary(op, to, a, b))?
            }
            VectorInst::Sqrt(a) => self.emit_unary(a, E::sqrt)?,
            VectorInst::Floor(a) => self.emit_unary(a, E::floor)?,
            VectorInst::Round(a) => self.emit_unary(a, E::round)?,
            VectorInst::FromInteger(a) => self.emit_unary(a, E::convert_integer)?,
            VectorInst::ToInteger(a) => self.emit_unary(a, E::truncate_to_integer)?,
            VectorInst::ShiftLeft(a, count) => self.emit_shift(a, count, E::shift_left)?,
            VectorInst::ShiftRight(a, count) => self.emit_shift(a, count, E::shift_right)?,
            VectorInst::MulAdd(a, b, c) => self.emit_mul_add([a, b, c])?,
            VectorInst::Compare(comparison, a, b) => {
                self.emit_binary([a, b], Self::allocate_truth, |code, to, a, b| {
                    code.compare(comparison, to, a, b);
                })?
            }
            VectorInst::Logic(logic, a, b) => {
                self.emit_binary([a, b], Self::allocate_truth, |code, to, a, b| code.logic(logic, to, a, b))?
            }
            VectorInst::Select(truth, a, b) => self.emit_select([truth, a, b])?,
        };
        self.streams[self.current_stream].at[usize::from(value)] = Location::Register(register);
        Some(())
    }

    /// Computes `a * b + c`. The instruction overwrites an operand: one that is not needed any more, or a copy.
    fn emit_mul_add(&mut self, [mut a, mut b, c]: [Value; 3]) -> Option<u8> {
        if self.last_use_register(a).is_none() && self.last_use_register(b).is_some() {
            std::mem::swap(&mut a, &mut b);
        }
        if let Some(result) = self.last_use_register(a) {
            let (second, new_second) = self.load_register(b)?;
            let (third, new_third) = self.last_operand(c)?;
            self.code.mul_add_to_factor(result, second, third);
            self.release(b);
            self.release(c);
            self.free_registers([new_second, new_third]);
            self.transfer_register(a);
            return Some(result);
        }
        if self.register_of(a).is_none() {
            std::mem::swap(&mut a, &mut b);
        }
        let (first, new_first) = self.load_register(a)?;
        let (second, new_second) = self.last_operand(b)?;
        let result = match (self.last_use_register(c), self.register_of(c)) {
            (Some(result), _) => {
                self.transfer_register(c);
                result
            }
            (None, Some(register)) => {
                let result = self.allocate()?;
                self.code.copy(result, register);
                self.release(c);
                result
            }
            // Loads the operand into a register of its own.
            (None, None) => {
                let result = match self.load_register(c)? {
                    (_, Some(new)) => new,
                    (register, None) => {
                        let result = self.allocate()?;
                        self.code.copy(result, register);
                        result
                    }
                };
                self.release(c);
                result
            }
        };
        self.code.mul_add_to_sum(result, first, second);
        self.release(a);
        self.release(b);
        self.free_registers([new_first, new_second]);
        Some(result)
    }

    fn emit_effect(&mut self, effect: Effect) -> Option<()> {
        let value = effect.value();
        let (register, new) = self.load_register(value)?;
        match effect {
            Effect::Truths(slot, _) => {
                let (spare, to) = (self.allocate()?, self.tile_place(slot, 0));
                self.code.store_truths(register, to, spare);
                self.free_registers([Some(spare)]);
            }
            Effect::Tile(slot, _) => {
                let to = self.tile_place(slot, 2);
                self.code.store(register, to);
            }
            Effect::FrameScalar(slot, _) => {
                self.code.store_first(register, Place::Frame { slot, displacement: 0 });
            }
            Effect::Memory(pointer, _) => {
                let to = self.elements_place(pointer, 2);
                self.prefetch_next_piece(pointer, PrefetchKind::Write);
                if self.end {
                    let (mask, new) = self.end_mask()?;
                    self.code.store_masked(register, to, mask);
                    self.free_registers([new]);
                } else {
                    self.code.store(register, to);
                }
            }
            Effect::Bytes(pointer, _) => {
                let (to, mask) = (self.elements_place(pointer, 0), self.mask_of_bytes());
                self.code.store_bytes(register, to, mask);
            }
            Effect::Sum(fold, _) => {
                let to = self.sum_register(fold, SumSet::This);
                if self.end {
                    let (mask, new) = self.end_mask()?;
                    self.code.copy_masked(to, register, mask);
                    self.free_registers([new]);
                } else {
                    self.code.copy(to, register);
                }
            }
        }
        self.release(value);
        self.free_registers([new]);
        Some(())
    }
}
