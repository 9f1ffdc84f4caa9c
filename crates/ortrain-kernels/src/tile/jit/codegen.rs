//! From values to machine code: registers, the loop over indices, its end.
//!
//! A function goes through the indices of a tile 16 at a time, as one vector at AVX-512 and as two at AVX2. The last,
//! incomplete 16 are computed whole, but callers' memory is touched through a mask. Folds keep 16 sums, and twice as
//! many where there are enough indices, in the order of `ops::fold`.
//!
//! Where callers' memory is read or written in pieces that lie apart, a function asks for the next piece while it computes
//! one: machines see a row coming only when some of it was read, and a row of a few hundred numbers is over by then.
//!
//! Elementary functions are long chains, and a processor looks only so far ahead. So vectors go side by side, each value
//! for all of them before the next value: as many vectors as two rounds have, or fewer where that takes too many
//! registers. Values that find none wait on the stack.

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

/// Indices of a round.
pub(super) const ROUND: usize = 16;
/// Pointers to callers' memory, at most.
pub(super) const POINTERS: usize = 24;
/// Values on the stack, at most; as vectors they fill less than a page.
const SLOTS: usize = 60;

/// Registers: of the arguments behind the frame (`extern "sysv64"`), and others.
const TABLE: Gpr = RSI;
const COUNT: Gpr = RDX;
/// Sixteen words of all ones or all zeros: the lanes of the incomplete end that are there.
const MASKS: Gpr = RCX;
const LIMIT: Gpr = 10;
const SPARE: Gpr = 11;
const STACK: Gpr = 4;
/// Of so many values one may go to the stack.
const SPILLED_OF: usize = 8;
/// Registers that hold pointers, and those among them that callers want back.
const HELD: [Gpr; 8] = [8, 9, RBX, RBP, 12, 13, 14, 15];
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
/// `first = first * second + third`, and `first = second * third + first`.
const MUL_ADD_213: Opcode = opcode(1, 2, 0xa8);
const MUL_ADD_231: Opcode = opcode(1, 2, 0xb8);
const BLEND_BY_MASK: Opcode = opcode(1, 2, 0x65);
const BLEND_BY_VECTOR: Opcode = opcode(1, 3, 0x4a);
/// Which shift: beside the opcode, in place of a register.
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

/// The code of a function for `lanes`, with the most vectors side by side. `None` if any takes more registers than there
/// are.
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

/// The same with so many vectors side by side.
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
        // Two rounds at a time; with folds, if there are four.
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
    // How many values wait on the stack is known by now.
    let slots = plan.slots.get();
    let mut front = Assembler::new(wide);
    for register in SAVED {
        front.push(register);
    }
    if slots > 0 {
        // Aligned, with the way back in front.
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

/// Values in the order in which they are made: each before what uses it, and not long before.
pub(super) struct Order<'a> {
    lanes: &'a Lanes,
    values: Vec<Value>,
    /// The positions of values, and of effects behind them, that use a value; those of one value side by side, in order.
    users: Vec<u32>,
    /// Where those of each value begin, and where the last ones end.
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

    /// Where a value is used.
    fn users(&self, value: Value) -> &[u32] {
        let value = usize::from(value);
        &self.users[self.starts[value] as usize..self.starts[value + 1] as usize]
    }

    /// How often a value is used.
    fn count(&self, value: Value) -> usize {
        self.users(value).len()
    }

    /// Whether a value stays where it is until it is used.
    fn stays(&self, value: Value) -> bool {
        match self.lane(value) {
            Lane::Constant(_) | Lane::One(_) | Lane::Single(_) | Lane::Sum(..) => true,
            Lane::Tile(_) => self.count(value) == 1,
            _ => false,
        }
    }

    /// Puts a value into the order behind what it is made of.
    fn visit(&mut self, value: Value, made: &mut [bool]) {
        // Not by recursion: chains may be as long as a program.
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
                // What is chosen by goes last: truths are many in some functions, and AVX-512 has few registers of them.
                stack[first..].rotate_right(1);
            }
        }
    }

    /// How many pointers to callers' memory there are.
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

/// What is decided before code is made.
struct Plan {
    wide: bool,
    /// Vectors of a round.
    vectors: usize,
    /// Vectors side by side, at most.
    abreast: usize,
    /// Registers of each fold: those of one round, then those of another.
    sums: Vec<Vec<u8>>,
    /// Values that are the same for all indices, and the registers that hold them throughout.
    hoisted: Vec<(Value, u8)>,
    /// Registers of values, as bits.
    free: u32,
    /// Values on the stack, at most, in the code so far.
    slots: Cell<usize>,
}

/// Takes a register away for good.
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
        // Vectors side by side are not worth many ways to the stack and back.
        if abreast > 1 && trial.spilled > abreast * (order.values.len() / SPILLED_OF) {
            return None;
        }
        // Registers that are left over when nothing is held throughout are for what is used most.
        let mut unused = plan.free & !trial.touched;
        let mut singles: Vec<Value> =
            order.values.iter().copied().filter(|&value| is_single(order.lane(value))).collect();
        singles.sort_by_key(|&value| {
            // At AVX2 an instruction reads whole vectors, which constants are.
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

    /// Bytes of a vector.
    fn bytes(&self) -> usize {
        4 * lanes_of_vector(self.wide)
    }

    /// Where a value lies that is the same for all indices.
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

    /// Computes the next rounds.
    fn rounds(&self, asm: &mut Assembler, order: &Order<'_>, rounds: usize, end: bool) -> Option<()> {
        let vectors = rounds * self.vectors;
        for first in (0..vectors).step_by(self.abreast) {
            let mut body = Body::new(self, order, first..vectors.min(first + self.abreast), end);
            body.run(asm)?;
        }
        Some(())
    }
}

/// A register that holds a pointer to callers' memory, until the next one is asked for.
fn pointer_register(asm: &mut Assembler, pointer: u8) -> Gpr {
    HELD.get(usize::from(pointer)).copied().unwrap_or_else(|| {
        asm.load(SPARE, TABLE, 8 * i32::from(pointer));
        SPARE
    })
}

/// Whether a value is the same for all indices.
fn is_single(lane: Lane) -> bool {
    matches!(lane, Lane::Constant(_) | Lane::One(_) | Lane::Single(_))
}

/// Code for some vectors side by side.
struct Body<'a> {
    plan: &'a Plan,
    order: &'a Order<'a>,
    /// Whether it is of the incomplete end.
    end: bool,
    streams: Vec<Stream>,
    /// Which of them code is made for, and for which position in the order.
    now: usize,
    position: usize,
    /// Whether what is the same for all indices is read once for all vectors, if there are registers for it.
    shares: bool,
    free: u32,
    free_masks: u32,
    free_slots: u64,
    /// Slots that the instruction being made may still read: they are free behind it.
    left_slots: u64,
    /// Registers that were used at all.
    touched: u32,
    /// How many values went to the stack.
    spilled: usize,
}

/// One of the vectors.
struct Stream {
    /// Its number, from the first of these rounds on.
    vector: usize,
    at: Vec<At>,
    /// Uses that are left, of each value.
    uses: Vec<usize>,
}

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Not made yet, or where it stays.
    Elsewhere,
    /// A vector, or for truths at AVX-512 a mask.
    Register(u8),
    /// On the stack.
    Slot(u8),
}

impl<'a> Body<'a> {
    fn new(plan: &'a Plan, order: &'a Order<'a>, vectors: Range<usize>, end: bool) -> Body<'a> {
        let mut at = vec![At::Elsewhere; order.lanes.all.len()];
        for &(value, register) in &plan.hoisted {
            // Values of sums that are joined have nothing in common with these.
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
            // 0 means no mask, and 1 is the end's.
            free_masks: 0b1111_1100,
            free_slots: (1 << SLOTS) - 1,
            left_slots: 0,
            touched: 0,
            spilled: 0,
        }
    }

    fn run(&mut self, asm: &mut Assembler) -> Option<()> {
        if self.end && self.plan.wide {
            // There is one vector only.
            let register = self.load_end(asm)?;
            asm.vector(MASK_OF_WORDS, END, 0, Rm::Register(register), Extra::default());
            self.give_back([Some(register)]);
        }
        let order = self.order;
        for (position, &value) in order.values.iter().enumerate() {
            // Others are read where they are used.
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
        // Only when everything is read: a store may overwrite what is loaded.
        for (k, &effect) in order.lanes.effects.iter().enumerate() {
            self.position = order.values.len() + k;
            for stream in 0..self.streams.len() {
                self.begin(stream);
                self.effect(asm, effect)?;
            }
        }
        Some(())
    }

    /// Goes on with a vector.
    fn begin(&mut self, stream: usize) {
        self.now = stream;
        self.free_slots |= std::mem::take(&mut self.left_slots);
    }

    /// Brings operands that are the same for all indices into registers, if more are free than the value takes.
    fn share(&mut self, asm: &mut Assembler, value: Value) -> Option<Vec<(Value, u8)>> {
        const OTHERS: usize = 4;
        let mut shared = Vec::new();
        // At AVX-512 an instruction broadcasts what it reads.
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

    /// The register of a value that has one.
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

    /// Brings the value that is not used for longest to the stack. Operands of what is being computed stay.
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

    /// One use of a value is over.
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

    /// Memory of the frame at this vector's indices, of values of so many bytes (as a power of two).
    fn in_frame(&self, place: Slot, power: u8) -> Rm {
        Rm::Frame { place, scale: Some(power), displacement: self.first_byte(power) }
    }

    /// Where this vector begins, in bytes of values of so many bytes (as a power of two).
    fn first_byte(&self, power: u8) -> i32 {
        let lanes = self.streams[self.now].vector * lanes_of_vector(self.plan.wide);
        (lanes << power) as i32
    }

    /// The lanes of the incomplete end that are there, in a new register.
    fn load_end(&mut self, asm: &mut Assembler) -> Option<u8> {
        let register = self.allocate(asm)?;
        let displacement = (self.streams[self.now].vector * self.plan.bytes()) as i32;
        let words = Rm::Memory { base: MASKS, scale: None, displacement };
        asm.vector(LOAD, register, 0, words, Extra::default());
        Some(register)
    }

    /// The memory of a pointer at this vector's indices.
    fn there(&self, asm: &mut Assembler, pointer: u8) -> Rm {
        let base = pointer_register(asm, pointer);
        Rm::Memory { base, scale: Some(2), displacement: self.first_byte(2) }
    }

    /// Asks for what lies there in the next piece, once for each line of the cache.
    fn ask_ahead(&self, asm: &mut Assembler, pointer: u8, here: Rm, what_for: Use) {
        let starts_line = (self.streams[self.now].vector * self.plan.bytes()).is_multiple_of(CACHE_LINE);
        let step = self.order.lanes.steps.get(usize::from(pointer)).copied().flatten();
        if let (Some(step), Rm::Memory { base, displacement, .. }, true, false) =
            (step, here, starts_line, self.end)
        {
            asm.prefetch(what_for, base, displacement.wrapping_add(step));
        }
    }

    /// The register of a value; one that stays elsewhere is brought into a new one, which comes second.
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

    /// A last operand: from memory where the instruction can read it there. Comes with a new register if it took one.
    fn operand(&mut self, asm: &mut Assembler, value: Value) -> Option<(Rm, bool, Option<u8>)> {
        match (self.at(value), self.order.lane(value)) {
            (At::Register(_), _) => {}
            (At::Slot(slot), _) => return Some((self.on_stack(slot), false, None)),
            (_, Lane::Tile(place)) => return Some((self.in_frame(place, 2), false, None)),
            (_, lane) if is_single(lane) && self.plan.wide => {
                return Some((self.plan.single(asm, lane), true, None));
            }
            // At AVX2 there is a whole vector of it.
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

    /// Whether this is the last use of a value that has a register of its own.
    fn ends(&self, value: Value) -> Option<u8> {
        let last = self.streams[self.now].uses[usize::from(value)] == 1 && !self.order.stays(value);
        self.held(value).filter(|_| last)
    }

    /// Its register goes on to a result.
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
                    // The lowest bit goes everywhere.
                    for code in [LEFT, RIGHT] {
                        let by = Extra { immediate: Some(31), ..plain };
                        asm.vector(SHIFT, code, register, Rm::Register(register), by);
                    }
                    register
                }
            }
            Lane::Two(two, mut a, mut b) => {
                // What stays in memory goes last.
                if commutes(two) && self.held(a).is_none() {
                    std::mem::swap(&mut a, &mut b);
                }
                self.two(asm, opcode_of(two), a, b, plain)?
            }
            Lane::Root(a) | Lane::Floor(a) | Lane::Float(a) => {
                let (opcode, immediate) = match lane {
                    Lane::Root(_) => (ROOT, None),
                    // Down, and no exception.
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

    /// The instruction overwrites an operand: one that is not needed any more, or a copy.
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
            // A copy of its own.
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

    /// Stores truths as bytes of 0 and 1. Behind the last one the register has room.
    fn store_truths(&self, asm: &mut Assembler, to: Rm, register: u8, spare: u8) {
        let plain = Extra::default();
        let there = Rm::Register(spare);
        if self.plan.wide {
            asm.vector_of(Length::Bits128, opcode(2, 2, 0x28), spare, 0, Rm::Register(register), plain);
            asm.vector_of(Length::Bits128, ABSOLUTE_BYTES, spare, 0, there, plain);
            asm.vector_of(Length::Bits128, STORE, spare, 0, to, plain);
        } else {
            // The upper half beside the lower one, as words, then as bytes.
            asm.vector(opcode(1, 3, 0x39), register, 0, there, Extra { immediate: Some(1), ..plain });
            asm.vector_of(Length::Bits128, opcode(1, 1, 0x6b), spare, register, there, plain);
            asm.vector_of(Length::Bits128, opcode(1, 1, 0x63), spare, spare, there, plain);
            asm.vector_of(Length::Bits128, ABSOLUTE_BYTES, spare, 0, there, plain);
            asm.vector_of(Length::Bits128, opcode(1, 1, 0xd6), spare, 0, to, plain);
        }
    }
}
