//! Code generation: register allocation, the loop over indices, and its incomplete end.
//!
//! A function processes the indices of a tile 16 at a time, as one vector at AVX-512 and as two vectors at AVX2. The
//! last, incomplete 16 indices are computed in full, but callers' memory is accessed through a mask. Folds have 16
//! partial sums, and 32 if there are enough indices, in the order of `ops::fold`.
//!
//! If pieces of callers' memory are not adjacent, a function prefetches the next piece while it computes one. Hardware
//! prefetchers detect a row only after a part of it is read, and a row of a few hundred numbers is over by then.
//!
//! Elementary functions are long dependency chains, and out-of-order execution has a limited window. So vectors are
//! interleaved: each value is computed for all of them before the next value. Two rounds of vectors are interleaved, or
//! fewer vectors if that needs too many registers. Values without a register are spilled to the stack.

use std::cell::Cell;
use std::ops::Range;

use ortrain_expr::ReduceOp;

use super::assembler::{
    Assembled, Assembler, Condition, Extra, Gpr, Length, Opcode, RAX, RBP, RBX, RCX, RDX, RSI, Rm, Use,
    opcode,
};
use super::ir::{Effect, Fold, Lane, Lanes, Logic, Set, Two, Value};
use crate::isa::CACHE_LINE;
use crate::tile::{ALIGN, Slot};

/// Number of indices of a round.
pub(super) const ROUND: usize = 16;
/// Maximum number of pointers to callers' memory.
pub(super) const POINTERS: usize = 24;
/// Maximum number of values on the stack. As vectors, they take less than a page.
const SLOTS: usize = 60;

/// Registers of the arguments after the frame (`extern "sysv64"`), and further registers.
const TABLE: Gpr = RSI;
const COUNT: Gpr = RDX;
/// Pointer to sixteen 32-bit words, each all ones or all zeros: the mask of the incomplete end.
const MASKS: Gpr = RCX;
const LIMIT: Gpr = 10;
const SPARE: Gpr = 11;
const STACK: Gpr = 4;
/// Interleaved vectors may spill one of this number of values.
const SPILLED_OF: usize = 8;
/// Registers that hold pointers.
const HELD: [Gpr; 8] = [8, 9, RBX, RBP, 12, 13, 14, 15];
/// Callee-saved registers.
const SAVED: [Gpr; 6] = [RBX, RBP, 12, 13, 14, 15];

/// The mask register of the incomplete end.
const END: u8 = 1;

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

fn opcode_of(two: Two) -> Opcode {
    match two {
        Two::Add => opcode(0, 1, 0x58),
        Two::Mul => opcode(0, 1, 0x59),
        Two::Sub => opcode(0, 1, 0x5c),
        Two::Min => opcode(0, 1, 0x5d),
        Two::Div => opcode(0, 1, 0x5e),
        Two::Max => opcode(0, 1, 0x5f),
        Two::And => AND,
        Two::Or => OR,
        Two::Xor => XOR,
        Two::AddInteger => opcode(1, 1, 0xfe),
        Two::SubInteger => opcode(1, 1, 0xfa),
        Two::Scale => opcode(1, 2, 0x2c),
    }
}

fn commutes(two: Two) -> bool {
    matches!(two, Two::Add | Two::Mul | Two::And | Two::Or | Two::Xor | Two::AddInteger)
}

/// Generates the code of a function for `lanes`, with the largest possible number of interleaved vectors. Returns
/// `None` if every number needs too many registers.
pub(super) fn emit(lanes: &Lanes) -> Option<Assembled> {
    let wide = lanes.wide;
    let order = Order::new(lanes);
    let most = 2 * ROUND / lanes_of_vector(wide);
    let fits = |&abreast: &usize| abreast <= most;
    [4, 2, 1].into_iter().filter(fits).find_map(|abreast| emit_abreast(&order, wide, abreast))
}

fn lanes_of_vector(wide: bool) -> usize {
    if wide { 16 } else { 8 }
}

/// Generates the code with `abreast` interleaved vectors.
pub(super) fn emit_abreast(order: &Order<'_>, wide: bool, abreast: usize) -> Option<Assembled> {
    let lanes = order.lanes;
    let plan = Plan::new(order, &lanes.folds, wide, abreast)?;
    let mut asm = Assembler::new(wide);
    for (pointer, &register) in HELD.iter().enumerate().take(order.pointers()) {
        asm.load(register, TABLE, 8 * pointer as i32);
    }
    for &(value, register) in &plan.hoisted {
        let from = plan.single(&mut asm, lanes.all[usize::from(value)]);
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
        asm.compare_number(COUNT, if lanes.folds.is_empty() { TWO } else { 2 * TWO });
        let skip = asm.jump(Condition::Below);
        asm.copy(LIMIT, COUNT);
        asm.and_number(LIMIT, -TWO);
        let again = asm.here();
        plan.rounds(&mut asm, order, 2, false)?;
        asm.add_number(RAX, TWO);
        asm.compare(RAX, LIMIT);
        asm.jump_back(Condition::Below, again);
        if !lanes.folds.is_empty() {
            let lanes = Lanes::join(&lanes.folds, wide);
            plan.rounds(&mut asm, &Order::new(&lanes), 1, false)?;
        }
        asm.land(skip);
    }
    asm.copy(LIMIT, COUNT);
    asm.and_number(LIMIT, -(ROUND as i8));
    asm.compare(RAX, LIMIT);
    let skip = asm.jump(Condition::AboveOrEqual);
    let again = asm.here();
    plan.rounds(&mut asm, order, 1, false)?;
    asm.add_number(RAX, ROUND as i8);
    asm.compare(RAX, LIMIT);
    asm.jump_back(Condition::Below, again);
    asm.land(skip);
    asm.compare(RAX, COUNT);
    let skip = asm.jump(Condition::AboveOrEqual);
    plan.rounds(&mut asm, order, 1, true)?;
    asm.land(skip);
    for (fold, registers) in lanes.folds.iter().zip(&plan.sums) {
        for (k, &register) in registers[..plan.vectors].iter().enumerate() {
            let to = Rm::Frame { place: fold.place, scale: None, displacement: (k * plan.bytes()) as i32 };
            asm.vector(STORE, register, 0, to, Extra::default());
        }
    }
    asm.clear_upper();
    // The number of values on the stack is known only now.
    let slots = plan.slots.get();
    let mut front = Assembler::new(wide);
    for register in SAVED {
        front.push(register);
    }
    if slots > 0 {
        // The slots are aligned, and the caller's stack pointer is stored in front of them.
        front.copy(LIMIT, STACK);
        front.add_large(STACK, -(((slots + 1) * plan.bytes()) as i32));
        front.and_number(STACK, -(ALIGN as i8));
        front.store(LIMIT, STACK, 0);
        asm.load(STACK, STACK, 0);
    }
    for register in SAVED.into_iter().rev() {
        asm.pop(register);
    }
    asm.prepend(front);
    Some(asm.finish())
}

/// Values in the order of their computation: each before its users, and not long before.
pub(super) struct Order<'a> {
    lanes: &'a Lanes,
    values: Vec<Value>,
    /// Positions of users, grouped by value and sorted. Positions of effects follow the positions of values.
    users: Vec<u32>,
    /// Start of the users of each value, and the end of the last ones.
    starts: Vec<u32>,
}

impl<'a> Order<'a> {
    pub(super) fn new(lanes: &'a Lanes) -> Order<'a> {
        let count = lanes.all.len();
        let mut order =
            Order { lanes, values: Vec::with_capacity(count), users: Vec::new(), starts: Vec::new() };
        let mut made = vec![false; count];
        for effect in &lanes.effects {
            order.visit(effect.value(), &mut made);
        }
        let values = order.values.iter().enumerate();
        let operands =
            values.flat_map(|(k, &value)| lanes.all[usize::from(value)].operands().map(move |a| (k, a)));
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

    fn lane(&self, value: Value) -> Lane {
        self.lanes.all[usize::from(value)]
    }

    /// Returns the positions of the users of a value.
    fn users(&self, value: Value) -> &[u32] {
        let value = usize::from(value);
        &self.users[self.starts[value] as usize..self.starts[value + 1] as usize]
    }

    /// Returns the number of uses of a value.
    fn count(&self, value: Value) -> usize {
        self.users(value).len()
    }

    /// Returns true if a value needs no register before it is used.
    fn stays(&self, value: Value) -> bool {
        match self.lane(value) {
            Lane::Constant(_) | Lane::One(_) | Lane::Single(_) | Lane::Sum(..) => true,
            Lane::Tile(_) => self.count(value) == 1,
            _ => false,
        }
    }

    /// Appends a value to the order, after its operands.
    fn visit(&mut self, value: Value, made: &mut [bool]) {
        // Without recursion: dependency chains may be as long as a program.
        let mut stack = vec![(value, false)];
        while let Some((value, ready)) = stack.pop() {
            if made[usize::from(value)] {
                continue;
            }
            if ready {
                made[usize::from(value)] = true;
                self.values.push(value);
                continue;
            }
            stack.push((value, true));
            let first = stack.len();
            stack.extend(self.lane(value).operands().map(|operand| (operand, false)));
            stack[first..].reverse();
            if matches!(self.lane(value), Lane::Select(..)) {
                // The condition is computed last: some functions have many truth values, and AVX-512 has few mask
                // registers.
                stack[first..].rotate_right(1);
            }
        }
    }

    /// Returns the number of pointers to callers' memory.
    fn pointers(&self) -> usize {
        let of_lanes = self.values.iter().filter_map(|&value| match self.lane(value) {
            Lane::There(pointer) | Lane::Single(pointer) => Some(pointer),
            _ => None,
        });
        let of_effects = self.lanes.effects.iter().filter_map(|effect| match *effect {
            Effect::There(pointer, _) => Some(pointer),
            _ => None,
        });
        of_lanes.chain(of_effects).map(|pointer| usize::from(pointer) + 1).max().unwrap_or(0)
    }
}

/// Register assignment of a function, before code is generated.
struct Plan {
    wide: bool,
    /// Number of vectors of a round.
    vectors: usize,
    /// Maximum number of interleaved vectors.
    abreast: usize,
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

impl Plan {
    fn new(order: &Order<'_>, folds: &[Fold], wide: bool, abreast: usize) -> Option<Plan> {
        if order.pointers() > POINTERS {
            return None;
        }
        let vectors = ROUND / lanes_of_vector(wide);
        let mut free = if wide { u32::MAX } else { 0xffff };
        let mut registers = || (0..2 * vectors).map(|_| reserve(&mut free)).collect::<Option<Vec<u8>>>();
        let sums = folds.iter().map(|_| registers()).collect::<Option<Vec<_>>>()?;
        let slots = Cell::new(0);
        let mut plan = Plan { wide, vectors, abreast, sums, hoisted: Vec::new(), free, slots };

        let mut trial = Body::new(&plan, order, 0..abreast, false);
        trial.shares = false;
        trial.run(&mut Assembler::new(wide))?;
        // Interleaving is not worth many spills and reloads.
        if abreast > 1 && trial.spilled > abreast * (order.values.len() / SPILLED_OF) {
            return None;
        }
        // Registers that are unused without hoisted values hold the uniform values with the most uses.
        let mut unused = plan.free & !trial.touched;
        let mut singles: Vec<Value> =
            order.values.iter().copied().filter(|&value| is_single(order.lane(value))).collect();
        singles.sort_by_key(|&value| {
            // At AVX2 an instruction reads whole vectors, and constants are stored as whole vectors.
            let is_vector = !wide && matches!(order.lane(value), Lane::Constant(_));
            (is_vector, std::cmp::Reverse(order.count(value)))
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
    fn single(&self, asm: &mut Assembler, lane: Lane) -> Rm {
        match lane {
            Lane::Constant(bits) => asm.constant(bits),
            Lane::One(place) => Rm::Frame { place, scale: None, displacement: 0 },
            Lane::Single(pointer) => {
                Rm::Memory { base: pointer_register(asm, pointer), scale: None, displacement: 0 }
            }
            other => unreachable!("{other:?} changes along the tile"),
        }
    }

    /// Generates the next rounds.
    fn rounds(&self, asm: &mut Assembler, order: &Order<'_>, rounds: usize, end: bool) -> Option<()> {
        let vectors = rounds * self.vectors;
        for first in (0..vectors).step_by(self.abreast) {
            let mut body = Body::new(self, order, first..vectors.min(first + self.abreast), end);
            body.run(asm)?;
        }
        Some(())
    }
}

/// Returns a register with a pointer to callers' memory. The register is valid until the next call.
fn pointer_register(asm: &mut Assembler, pointer: u8) -> Gpr {
    HELD.get(usize::from(pointer)).copied().unwrap_or_else(|| {
        asm.load(SPARE, TABLE, 8 * i32::from(pointer));
        SPARE
    })
}

/// Returns true if a value is uniform: the same for all indices.
fn is_single(lane: Lane) -> bool {
    matches!(lane, Lane::Constant(_) | Lane::One(_) | Lane::Single(_))
}

/// Code generation for some interleaved vectors.
struct Body<'a> {
    plan: &'a Plan,
    order: &'a Order<'a>,
    /// True for the incomplete end.
    end: bool,
    streams: Vec<Stream>,
    /// Index of the current stream.
    now: usize,
    /// Position of the current value in the order.
    position: usize,
    /// True if uniform operands are loaded once for all vectors, as long as registers are free.
    shares: bool,
    free: u32,
    free_masks: u32,
    free_slots: u64,
    /// Stack slots that the current instruction may still read. They are free after that instruction.
    left_slots: u64,
    /// Registers that were used at all.
    touched: u32,
    /// Number of spilled values.
    spilled: usize,
}

/// State of one interleaved vector.
struct Stream {
    /// Index of the vector, counted from the first of these rounds.
    vector: usize,
    at: Vec<At>,
    /// Number of remaining uses of each value.
    uses: Vec<usize>,
}

/// Location of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Not computed yet, or read directly by its users.
    Elsewhere,
    /// A vector register, or a mask register for truth values at AVX-512.
    Register(u8),
    /// A slot of the stack.
    Slot(u8),
}

impl<'a> Body<'a> {
    fn new(plan: &'a Plan, order: &'a Order<'a>, vectors: Range<usize>, end: bool) -> Body<'a> {
        let mut at = vec![At::Elsewhere; order.lanes.all.len()];
        for &(value, register) in &plan.hoisted {
            // The program that joins sums has different values at these indices, without uniform ones.
            if at.len() > usize::from(value) && is_single(order.lane(value)) {
                at[usize::from(value)] = At::Register(register);
            }
        }
        let uses: Vec<usize> = order.starts.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect();
        let stream = |vector| Stream { vector, at: at.clone(), uses: uses.clone() };
        Body {
            plan,
            order,
            end,
            streams: vectors.map(stream).collect(),
            now: 0,
            position: 0,
            shares: true,
            free: plan.free,
            // Mask 0 means no mask, and mask 1 is `END`.
            free_masks: 0b1111_1100,
            free_slots: (1 << SLOTS) - 1,
            left_slots: 0,
            touched: 0,
            spilled: 0,
        }
    }

    fn run(&mut self, asm: &mut Assembler) -> Option<()> {
        if self.end && self.plan.wide {
            // At AVX-512 there is only one vector.
            let register = self.load_end(asm)?;
            asm.vector(MASK_OF_WORDS, END, 0, Rm::Register(register), Extra::default());
            self.give_back([Some(register)]);
        }
        let order = self.order;
        for (position, &value) in order.values.iter().enumerate() {
            // Such values are read directly by their users.
            if order.stays(value) {
                continue;
            }
            self.position = position;
            let shared = self.share(asm, value)?;
            for stream in 0..self.streams.len() {
                self.begin(stream);
                self.compute(asm, value)?;
            }
            for (value, register) in shared {
                self.place_all(value, At::Elsewhere);
                self.give_back([Some(register)]);
            }
        }
        // Stores come after all loads, because a store may overwrite an element that is loaded.
        for (k, &effect) in order.lanes.effects.iter().enumerate() {
            self.position = order.values.len() + k;
            for stream in 0..self.streams.len() {
                self.begin(stream);
                self.effect(asm, effect)?;
            }
        }
        Some(())
    }

    /// Makes another stream the current one.
    fn begin(&mut self, stream: usize) {
        self.now = stream;
        self.free_slots |= std::mem::take(&mut self.left_slots);
    }

    /// Loads uniform operands into registers for all streams, if enough registers are free.
    fn share(&mut self, asm: &mut Assembler, value: Value) -> Option<Vec<(Value, u8)>> {
        const OTHERS: usize = 4;
        let mut shared = Vec::new();
        // At AVX-512 an instruction broadcasts its memory operand.
        if !self.shares || self.plan.wide || self.streams.len() == 1 {
            return Some(shared);
        }
        for operand in self.order.lane(value).operands() {
            let lane = self.order.lane(operand);
            let enough = self.free.count_ones() as usize >= self.streams.len() + OTHERS;
            if enough && is_single(lane) && self.at(operand) == At::Elsewhere {
                let register = self.allocate(asm)?;
                let from = self.plan.single(asm, lane);
                asm.vector(BROADCAST, register, 0, from, Extra::default());
                self.place_all(operand, At::Register(register));
                shared.push((operand, register));
            }
        }
        Some(shared)
    }

    fn place_all(&mut self, value: Value, at: At) {
        for stream in &mut self.streams {
            stream.at[usize::from(value)] = at;
        }
    }

    fn at(&self, value: Value) -> At {
        self.streams[self.now].at[usize::from(value)]
    }

    /// Returns the register of a value, if the value is in a register.
    fn held(&self, value: Value) -> Option<u8> {
        match self.at(value) {
            At::Register(register) => Some(register),
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
                let At::Register(register) = stream.at[usize::from(value)] else { continue };
                if left == 0 || is_single(self.order.lane(value)) || self.is_mask(value) {
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
        asm.vector(STORE, register, 0, self.on_stack(slot), Extra::default());
        self.streams[stream].at[usize::from(value)] = At::Slot(slot);
        self.free |= 1 << register;
        self.spilled += 1;
        Some(())
    }

    fn on_stack(&self, slot: u8) -> Rm {
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
        let uses = &mut self.streams[self.now].uses[usize::from(value)];
        *uses -= 1;
        if *uses > 0 || self.order.stays(value) {
            return;
        }
        match self.at(value) {
            At::Register(register) if self.is_mask(value) => self.free_masks |= 1 << register,
            At::Register(register) => self.free |= 1 << register,
            At::Slot(slot) => self.left_slots |= 1 << slot,
            At::Elsewhere => {}
        }
    }

    /// Returns the frame operand at this vector's indices, for values of `1 << power` bytes.
    fn in_frame(&self, place: Slot, power: u8) -> Rm {
        Rm::Frame { place, scale: Some(power), displacement: self.first_byte(power) }
    }

    /// Returns the byte at which this vector begins, for values of `1 << power` bytes.
    fn first_byte(&self, power: u8) -> i32 {
        let lanes = self.streams[self.now].vector * lanes_of_vector(self.plan.wide);
        (lanes << power) as i32
    }

    /// Loads the mask of the incomplete end into a new register.
    fn load_end(&mut self, asm: &mut Assembler) -> Option<u8> {
        let register = self.allocate(asm)?;
        let displacement = (self.streams[self.now].vector * self.plan.bytes()) as i32;
        let words = Rm::Memory { base: MASKS, scale: None, displacement };
        asm.vector(LOAD, register, 0, words, Extra::default());
        Some(register)
    }

    /// Returns the memory operand of a pointer at this vector's indices.
    fn there(&self, asm: &mut Assembler, pointer: u8) -> Rm {
        let base = pointer_register(asm, pointer);
        Rm::Memory { base, scale: Some(2), displacement: self.first_byte(2) }
    }

    /// Prefetches the same elements of the next piece, once for each cache line.
    fn ask_ahead(&self, asm: &mut Assembler, pointer: u8, here: Rm, what_for: Use) {
        let starts_line = (self.streams[self.now].vector * self.plan.bytes()).is_multiple_of(CACHE_LINE);
        let step = self.order.lanes.steps.get(usize::from(pointer)).copied().flatten();
        if let (Some(step), Rm::Memory { base, displacement, .. }, true, false) =
            (step, here, starts_line, self.end)
        {
            asm.prefetch(what_for, base, displacement.wrapping_add(step));
        }
    }

    /// Returns the register of a value. A value without a register is loaded into a new one, which is also the second
    /// result.
    fn register(&mut self, asm: &mut Assembler, value: Value) -> Option<(u8, Option<u8>)> {
        if let Some(register) = self.held(value) {
            return Some((register, None));
        }
        let lane = self.order.lane(value);
        if let Lane::Sum(fold, set) = lane {
            return Some((self.sum(fold, set), None));
        }
        let register = self.allocate(asm)?;
        match (self.at(value), lane) {
            (At::Slot(slot), _) => asm.vector(LOAD, register, 0, self.on_stack(slot), Extra::default()),
            (_, Lane::Tile(place)) => {
                asm.vector(LOAD, register, 0, self.in_frame(place, 2), Extra::default());
            }
            _ => {
                let from = self.plan.single(asm, lane);
                asm.vector(BROADCAST, register, 0, from, Extra::default());
            }
        }
        Some((register, Some(register)))
    }

    fn sum(&self, fold: u8, set: Set) -> u8 {
        let registers = &self.plan.sums[usize::from(fold)];
        let other = if set == Set::Other { self.plan.vectors } else { 0 };
        registers[other + self.streams[self.now].vector]
    }

    /// Returns the last operand of an instruction, from memory if possible, and true if the instruction broadcasts it.
    /// The third result is a new register, if one was needed.
    fn operand(&mut self, asm: &mut Assembler, value: Value) -> Option<(Rm, bool, Option<u8>)> {
        match (self.at(value), self.order.lane(value)) {
            (At::Register(_), _) => {}
            (At::Slot(slot), _) => return Some((self.on_stack(slot), false, None)),
            (_, Lane::Tile(place)) => return Some((self.in_frame(place, 2), false, None)),
            (_, lane) if is_single(lane) && self.plan.wide => {
                return Some((self.plan.single(asm, lane), true, None));
            }
            // At AVX2 constants are stored as whole vectors.
            (_, Lane::Constant(bits)) => return Some((asm.constant(bits), false, None)),
            _ => {}
        }
        let (register, new) = self.register(asm, value)?;
        Some((Rm::Register(register), false, new))
    }

    fn give_back(&mut self, registers: impl IntoIterator<Item = Option<u8>>) {
        for register in registers.into_iter().flatten() {
            self.free |= 1 << register;
        }
    }

    /// Returns the register of a value if this is its last use and the register is free afterwards.
    fn ends(&self, value: Value) -> Option<u8> {
        let last = self.streams[self.now].uses[usize::from(value)] == 1 && !self.order.stays(value);
        self.held(value).filter(|_| last)
    }

    /// Transfers the register of a value to a result.
    fn hand_on(&mut self, value: Value) {
        self.streams[self.now].uses[usize::from(value)] -= 1;
    }

    /// `result = opcode(a, b)`.
    fn two(&mut self, asm: &mut Assembler, opcode: Opcode, a: Value, b: Value, extra: Extra) -> Option<u8> {
        let (first, new_first) = self.register(asm, a)?;
        let (second, broadcast, new_second) = self.operand(asm, b)?;
        self.release(a);
        self.release(b);
        self.give_back([new_first, new_second]);
        let result = self.allocate(asm)?;
        asm.vector(opcode, result, first, second, Extra { broadcast, ..extra });
        Some(result)
    }

    fn compute(&mut self, asm: &mut Assembler, value: Value) -> Option<()> {
        let lane = self.order.lane(value);
        let wide = self.plan.wide;
        let plain = Extra::default();
        let register = match lane {
            Lane::Constant(_) | Lane::One(_) | Lane::Single(_) | Lane::Sum(..) => unreachable!("it stays"),
            Lane::Tile(place) => {
                let register = self.allocate(asm)?;
                asm.vector(LOAD, register, 0, self.in_frame(place, 2), plain);
                register
            }
            Lane::There(pointer) => {
                let register = self.allocate(asm)?;
                let from = self.there(asm, pointer);
                self.ask_ahead(asm, pointer, from, Use::Read);
                match (self.end, wide) {
                    (false, _) => asm.vector(LOAD, register, 0, from, plain),
                    (true, true) => {
                        asm.vector(LOAD, register, 0, from, Extra { mask: END, zero: true, ..plain });
                    }
                    (true, false) => {
                        let end = self.load_end(asm)?;
                        asm.vector(MASKED_LOAD, register, end, from, plain);
                        self.give_back([Some(end)]);
                    }
                }
                register
            }
            Lane::Truths(place) => {
                let from = self.in_frame(place, 0);
                if wide {
                    let (register, spare) = (self.allocate_mask()?, self.allocate(asm)?);
                    asm.vector_of(Length::Bits128, LOAD, spare, 0, from, plain);
                    let not_zero = opcode(1, 2, 0x26);
                    asm.vector_of(Length::Bits128, not_zero, register, spare, Rm::Register(spare), plain);
                    self.give_back([Some(spare)]);
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
            Lane::Two(two, mut a, mut b) => {
                // The operand in memory must be the last.
                if commutes(two) && self.held(a).is_none() {
                    std::mem::swap(&mut a, &mut b);
                }
                self.two(asm, opcode_of(two), a, b, plain)?
            }
            Lane::Root(a) | Lane::Floor(a) | Lane::Float(a) => {
                let (opcode, immediate) = match lane {
                    Lane::Root(_) => (ROOT, None),
                    // Rounds down, and raises no exception.
                    Lane::Floor(_) => (ROUND_DOWN, Some(9)),
                    _ => (TO_FLOAT, None),
                };
                let (from, broadcast, new) = self.operand(asm, a)?;
                self.release(a);
                self.give_back([new]);
                let register = self.allocate(asm)?;
                asm.vector(opcode, register, 0, from, Extra { broadcast, immediate, ..plain });
                register
            }
            Lane::Left(a, count) | Lane::Right(a, count) => {
                let code = if matches!(lane, Lane::Left(..)) { LEFT } else { RIGHT };
                let (from, new) = self.register(asm, a)?;
                self.release(a);
                self.give_back([new]);
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
            Lane::MulAdd(a, b, c) => self.mul_add(asm, [a, b, c])?,
            Lane::Test(test, a, b) => {
                let immediate = Some(test as u8);
                if wide {
                    let (first, new_first) = self.register(asm, a)?;
                    let (second, broadcast, new_second) = self.operand(asm, b)?;
                    let register = self.allocate_mask()?;
                    asm.vector(TEST, register, first, second, Extra { broadcast, immediate, ..plain });
                    self.release(a);
                    self.release(b);
                    self.give_back([new_first, new_second]);
                    register
                } else {
                    self.two(asm, TEST, a, b, Extra { immediate, ..plain })?
                }
            }
            Lane::Logic(logic, a, b) if wide => {
                let (first, second) = (self.held(a)?, self.held(b)?);
                self.release(a);
                self.release(b);
                let register = self.allocate_mask()?;
                let code = match logic {
                    Logic::And => 0x41,
                    Logic::Or => 0x45,
                    Logic::Xor => 0x47,
                };
                asm.masks(Length::Bits256, opcode(0, 1, code), register, first, second);
                register
            }
            Lane::Logic(logic, a, b) => {
                let opcode = match logic {
                    Logic::And => AND,
                    Logic::Or => OR,
                    Logic::Xor => XOR,
                };
                self.two(asm, opcode, a, b, plain)?
            }
            Lane::Select(truth, a, b) => {
                let (test, new_test) = self.register(asm, truth)?;
                let (otherwise, new_otherwise) = self.register(asm, b)?;
                let (chosen, broadcast, new_chosen) = self.operand(asm, a)?;
                for operand in [truth, a, b] {
                    self.release(operand);
                }
                self.give_back([new_test, new_otherwise, new_chosen]);
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
        self.streams[self.now].at[usize::from(value)] = At::Register(register);
        Some(())
    }

    /// Computes `a * b + c`. The instruction overwrites an operand: one that is not needed any more, or a copy.
    fn mul_add(&mut self, asm: &mut Assembler, [mut a, mut b, c]: [Value; 3]) -> Option<u8> {
        let plain = Extra::default();
        if self.ends(a).is_none() && self.ends(b).is_some() {
            std::mem::swap(&mut a, &mut b);
        }
        if let Some(result) = self.ends(a) {
            let (second, new_second) = self.register(asm, b)?;
            let (third, broadcast, new_third) = self.operand(asm, c)?;
            asm.vector(MUL_ADD_213, result, second, third, Extra { broadcast, ..plain });
            self.release(b);
            self.release(c);
            self.give_back([new_second, new_third]);
            self.hand_on(a);
            return Some(result);
        }
        if self.held(a).is_none() {
            std::mem::swap(&mut a, &mut b);
        }
        let (first, new_first) = self.register(asm, a)?;
        let (second, broadcast, new_second) = self.operand(asm, b)?;
        let result = match (self.ends(c), self.held(c)) {
            (Some(result), _) => {
                self.hand_on(c);
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
                let result = match self.register(asm, c)? {
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
        self.give_back([new_first, new_second]);
        Some(result)
    }

    fn effect(&mut self, asm: &mut Assembler, effect: Effect) -> Option<()> {
        let (wide, plain) = (self.plan.wide, Extra::default());
        let value = effect.value();
        if let Effect::Truths(place, _) = effect {
            let (register, new) = self.register(asm, value)?;
            let spare = self.allocate(asm)?;
            self.store_truths(asm, self.in_frame(place, 0), register, spare);
            self.release(value);
            self.give_back([new, Some(spare)]);
            return Some(());
        }
        let (register, new) = self.register(asm, value)?;
        match effect {
            Effect::Tile(place, _) => asm.vector(STORE, register, 0, self.in_frame(place, 2), plain),
            Effect::One(place, _) => {
                let to = Rm::Frame { place, scale: None, displacement: 0 };
                asm.vector_of(Length::Bits128, STORE_ONE, register, 0, to, plain);
            }
            Effect::There(pointer, _) => {
                let to = self.there(asm, pointer);
                self.ask_ahead(asm, pointer, to, Use::Write);
                match (self.end, wide) {
                    (false, _) => asm.vector(STORE, register, 0, to, plain),
                    (true, true) => asm.vector(STORE, register, 0, to, Extra { mask: END, ..plain }),
                    (true, false) => {
                        let end = self.load_end(asm)?;
                        asm.vector(MASKED_STORE, register, end, to, plain);
                        self.give_back([Some(end)]);
                    }
                }
            }
            Effect::Sum(fold, _) => {
                let to = self.sum(fold, Set::This);
                match (self.end, wide) {
                    (false, _) => asm.vector(MOVE, to, 0, Rm::Register(register), plain),
                    (true, true) => {
                        asm.vector(MOVE, to, 0, Rm::Register(register), Extra { mask: END, ..plain });
                    }
                    (true, false) => {
                        let end = self.load_end(asm)?;
                        let by = Extra { immediate: Some(end << 4), ..plain };
                        asm.vector(BLEND_BY_VECTOR, to, to, Rm::Register(register), by);
                        self.give_back([Some(end)]);
                    }
                }
            }
            Effect::Truths(..) => unreachable!("stored above"),
        }
        self.release(value);
        self.give_back([new]);
        Some(())
    }

    /// Stores truth values as bytes 0 and 1. May write past the last index: the register has capacity for whole rounds.
    fn store_truths(&self, asm: &mut Assembler, to: Rm, register: u8, spare: u8) {
        let plain = Extra::default();
        let there = Rm::Register(spare);
        if self.plan.wide {
            asm.vector_of(Length::Bits128, opcode(2, 2, 0x28), spare, 0, Rm::Register(register), plain);
            asm.vector_of(Length::Bits128, ABSOLUTE_BYTES, spare, 0, there, plain);
            asm.vector_of(Length::Bits128, STORE, spare, 0, to, plain);
        } else {
            // Packs the lower and the upper half to 16-bit words, then to bytes.
            asm.vector(opcode(1, 3, 0x39), register, 0, there, Extra { immediate: Some(1), ..plain });
            asm.vector_of(Length::Bits128, opcode(1, 1, 0x6b), spare, register, there, plain);
            asm.vector_of(Length::Bits128, opcode(1, 1, 0x63), spare, spare, there, plain);
            asm.vector_of(Length::Bits128, ABSOLUTE_BYTES, spare, 0, there, plain);
            asm.vector_of(Length::Bits128, opcode(1, 1, 0xd6), spare, 0, to, plain);
        }
    }
}
