//! From values to machine code: registers, the loop over indices, its end.
//!
//! A function goes through the indices of a tile 16 at a time, as one vector at AVX-512 and as two at AVX2. The last,
//! incomplete 16 are computed whole, but callers' memory is touched through a mask. Folds keep 16 sums, and twice as
//! many where there are enough indices, in the order of `ops::fold`.

use ortrain_expr::ReduceOp;

use super::assembler::{
    Assembler, Condition, Extra, Gpr, Length, Opcode, RAX, RBP, RBX, RCX, RDI, RDX, RSI, Rm, opcode,
};
use super::lanes::{Effect, Fold, Lane, Lanes, Logic, Set, Two, Value};
use crate::tape::Place;

/// Indices of a round.
pub(super) const ROUND: usize = 16;
/// Pointers to callers' memory, at most.
pub(super) const POINTERS: usize = 24;

/// Registers: of the first arguments (`extern "sysv64"`), and others.
const FRAME: Gpr = RDI;
const TABLE: Gpr = RSI;
const COUNT: Gpr = RDX;
/// Sixteen words of all ones or all zeros: the lanes of the incomplete end that are there.
const MASKS: Gpr = RCX;
const LIMIT: Gpr = 10;
const SPARE: Gpr = 11;
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

/// The code of a function for `lanes`, where `place` says at which byte of the frame a register lies. `None` if it
/// takes more registers than there are.
pub(super) fn emit(lanes: &Lanes, wide: bool, place: &dyn Fn(Place) -> Place) -> Option<Vec<u8>> {
    let order = Order::new(lanes);
    let plan = Plan::new(&order, &lanes.folds, wide, place)?;
    let mut asm = Assembler::new(wide);
    for register in SAVED {
        asm.push(register);
    }
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
    if !lanes.folds.is_empty() {
        // Two rounds at a time, if there are four.
        const TWO: i8 = 2 * ROUND as i8;
        asm.compare_number(COUNT, 2 * TWO);
        let skip = asm.jump(Condition::Below);
        asm.copy(LIMIT, COUNT);
        asm.and_number(LIMIT, -TWO);
        let again = asm.here();
        plan.round(&mut asm, &order, 0, false)?;
        plan.round(&mut asm, &order, 1, false)?;
        asm.add_number(RAX, TWO);
        asm.compare(RAX, LIMIT);
        asm.jump_back(Condition::Below, again);
        let lanes = Lanes::join(&lanes.folds, wide);
        plan.round(&mut asm, &Order::new(&lanes), 0, false)?;
        asm.land(skip);
    }
    asm.copy(LIMIT, COUNT);
    asm.and_number(LIMIT, -(ROUND as i8));
    asm.compare(RAX, LIMIT);
    let skip = asm.jump(Condition::AboveOrEqual);
    let again = asm.here();
    plan.round(&mut asm, &order, 0, false)?;
    asm.add_number(RAX, ROUND as i8);
    asm.compare(RAX, LIMIT);
    asm.jump_back(Condition::Below, again);
    asm.land(skip);
    asm.compare(RAX, COUNT);
    let skip = asm.jump(Condition::AboveOrEqual);
    plan.round(&mut asm, &order, 0, true)?;
    asm.land(skip);
    for (fold, registers) in lanes.folds.iter().zip(&plan.sums) {
        for (k, &register) in registers[..plan.vectors].iter().enumerate() {
            let displacement = place(fold.place) as i32 + (k * plan.bytes()) as i32;
            let to = Rm::Memory { base: FRAME, scale: None, displacement };
            asm.vector(STORE, register, 0, to, Extra::default());
        }
    }
    asm.clear_upper();
    for register in SAVED.into_iter().rev() {
        asm.pop(register);
    }
    Some(asm.finish())
}

/// Values in the order in which they are made: each before what uses it, and not long before.
struct Order<'a> {
    lanes: &'a Lanes,
    values: Vec<Value>,
    /// How often each is used.
    uses: Vec<u32>,
}

impl<'a> Order<'a> {
    fn new(lanes: &'a Lanes) -> Order<'a> {
        let count = lanes.all.len();
        let mut order = Order { lanes, values: Vec::with_capacity(count), uses: vec![0; count] };
        let mut made = vec![false; count];
        for effect in &lanes.effects {
            order.visit(effect.value(), &mut made);
            order.uses[usize::from(effect.value())] += 1;
        }
        order
    }

    fn lane(&self, value: Value) -> Lane {
        self.lanes.all[usize::from(value)]
    }

    /// Puts a value into the order behind what it is made of.
    fn visit(&mut self, value: Value, made: &mut [bool]) {
        // Not by recursion: chains may be as long as a program.
        let mut stack = vec![(value, false)];
        while let Some((value, ready)) = stack.pop() {
            if made[usize::from(value)] {
                continue;
            }
            let lane = self.lane(value);
            if ready {
                made[usize::from(value)] = true;
                self.values.push(value);
                lane.operands().for_each(|operand| self.uses[usize::from(operand)] += 1);
                continue;
            }
            stack.push((value, true));
            let first = stack.len();
            stack.extend(lane.operands().map(|operand| (operand, false)));
            stack[first..].reverse();
        }
    }

    /// How many pointers to callers' memory there are.
    fn pointers(&self) -> usize {
        let of_lanes = self.values.iter().filter_map(|&value| match self.lane(value) {
            Lane::There(pointer) => Some(pointer),
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
struct Plan<'a> {
    place: &'a dyn Fn(Place) -> Place,
    wide: bool,
    /// Vectors of a round.
    vectors: usize,
    /// Registers of each fold: those of one round, then those of another.
    sums: Vec<Vec<u8>>,
    /// Values that are the same for all indices, and the registers that hold them throughout.
    hoisted: Vec<(Value, u8)>,
    /// A register for short moments, and at AVX2 the lanes of the incomplete end.
    spare: u8,
    end: u8,
    /// Registers of values, as bits.
    free: u32,
}

/// Takes a register away for good.
fn reserve(free: &mut u32) -> Option<u8> {
    let register = free.checked_ilog2()?;
    *free &= !(1 << register);
    Some(register as u8)
}

impl<'a> Plan<'a> {
    fn new(
        order: &Order<'_>,
        folds: &[Fold],
        wide: bool,
        place: &'a dyn Fn(Place) -> Place,
    ) -> Option<Plan<'a>> {
        if order.pointers() > POINTERS {
            return None;
        }
        let vectors = if wide { 1 } else { 2 };
        let mut free = if wide { u32::MAX } else { 0xffff };
        let spare = reserve(&mut free)?;
        let end = if wide { spare } else { reserve(&mut free)? };
        let mut registers = || (0..2 * vectors).map(|_| reserve(&mut free)).collect::<Option<Vec<u8>>>();
        let sums = folds.iter().map(|_| registers()).collect::<Option<Vec<_>>>()?;
        let mut plan = Plan { place, wide, vectors, sums, hoisted: Vec::new(), spare, end, free };

        // Registers that are left over when nothing is held throughout are for what is used most.
        let mut trial = Body::new(&plan, order, 0, 0, true);
        trial.run(&mut Assembler::new(wide))?;
        let mut unused = plan.free & !trial.touched;
        let mut singles: Vec<Value> =
            order.values.iter().copied().filter(|&value| is_single(order.lane(value))).collect();
        singles.sort_by_key(|&value| std::cmp::Reverse(order.uses[usize::from(value)]));
        for value in singles {
            let Some(register) = reserve(&mut unused) else { break };
            plan.free &= !(1 << register);
            plan.hoisted.push((value, register));
        }
        Some(plan)
    }

    /// Bytes of a vector.
    fn bytes(&self) -> usize {
        4 * ROUND / self.vectors
    }

    /// Where a value lies that is the same for all indices.
    fn single(&self, asm: &mut Assembler, lane: Lane) -> Rm {
        match lane {
            Lane::Constant(bits) => asm.constant(bits),
            Lane::One(place) => {
                Rm::Memory { base: FRAME, scale: None, displacement: (self.place)(place) as i32 }
            }
            other => unreachable!("{other:?} changes along the tile"),
        }
    }

    /// Computes the next 16 indices after so many rounds.
    fn round(&self, asm: &mut Assembler, order: &Order<'_>, rounds: usize, end: bool) -> Option<()> {
        for vector in 0..self.vectors {
            Body::new(self, order, rounds, vector, end).run(asm)?;
        }
        Some(())
    }
}

/// Whether a value is the same for all indices.
fn is_single(lane: Lane) -> bool {
    matches!(lane, Lane::Constant(_) | Lane::One(_))
}

/// Code for one vector.
struct Body<'a> {
    plan: &'a Plan<'a>,
    order: &'a Order<'a>,
    /// Rounds before, and vectors of this one before.
    rounds: usize,
    vector: usize,
    /// Whether it is of the incomplete end.
    end: bool,
    /// Register of each value that is there: a vector, or for truths at AVX-512 a mask.
    at: Vec<Option<u8>>,
    /// Uses that are left.
    uses: Vec<u32>,
    free: u32,
    free_masks: u32,
    /// Registers that were used at all.
    touched: u32,
}

impl<'a> Body<'a> {
    fn new(plan: &'a Plan<'a>, order: &'a Order<'a>, rounds: usize, vector: usize, end: bool) -> Body<'a> {
        let mut at = vec![None; order.uses.len()];
        for &(value, register) in &plan.hoisted {
            // Values of sums that are joined have nothing in common with these.
            if at.len() > usize::from(value) && is_single(order.lane(value)) {
                at[usize::from(value)] = Some(register);
            }
        }
        Body {
            plan,
            order,
            rounds,
            vector,
            end,
            at,
            uses: order.uses.clone(),
            free: plan.free,
            // 0 means no mask, and 1 is the end's.
            free_masks: 0b1111_1100,
            touched: 0,
        }
    }

    fn run(&mut self, asm: &mut Assembler) -> Option<()> {
        if self.end {
            let displacement = (self.vector * self.plan.bytes()) as i32;
            let words = Rm::Memory { base: MASKS, scale: None, displacement };
            asm.vector(LOAD, self.plan.end, 0, words, Extra::default());
            if self.plan.wide {
                let words = Rm::Register(self.plan.end);
                asm.vector(MASK_OF_WORDS, END, 0, words, Extra::default());
            }
        }
        let order = self.order;
        for &value in &order.values {
            let lane = order.lane(value);
            // Others are read where they are used.
            if !self.stays(value) {
                self.compute(asm, value, lane)?;
            }
        }
        // Only when everything is read: a store may overwrite what is loaded.
        for &effect in &order.lanes.effects {
            self.effect(asm, effect)?;
        }
        Some(())
    }

    /// Whether a value stays where it is until it is used.
    fn stays(&self, value: Value) -> bool {
        match self.order.lane(value) {
            Lane::Constant(_) | Lane::One(_) | Lane::Sum(..) => true,
            Lane::Tile(_) => self.order.uses[usize::from(value)] == 1,
            _ => false,
        }
    }

    fn allocate(&mut self) -> Option<u8> {
        let register = self.free.trailing_zeros() as u8;
        if self.free == 0 {
            return None;
        }
        self.free &= !(1 << register);
        self.touched |= 1 << register;
        Some(register)
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
        let uses = &mut self.uses[usize::from(value)];
        *uses -= 1;
        if *uses > 0 || self.stays(value) {
            return;
        }
        if let Some(register) = self.at[usize::from(value)] {
            if self.is_mask(value) {
                self.free_masks |= 1 << register;
            } else {
                self.free |= 1 << register;
            }
        }
    }

    /// Memory of the frame at this vector's indices, of values of so many bytes (as a power of two).
    fn in_frame(&self, place: Place, power: u8) -> Rm {
        self.memory(FRAME, (self.plan.place)(place) as i32, power)
    }

    fn memory(&self, base: Gpr, displacement: i32, power: u8) -> Rm {
        let lanes = self.rounds * ROUND + self.vector * ROUND / self.plan.vectors;
        Rm::Memory { base, scale: Some(power), displacement: displacement + (lanes << power) as i32 }
    }

    /// The memory of a pointer at this vector's indices.
    fn there(&self, asm: &mut Assembler, pointer: u8) -> Rm {
        let base = HELD.get(usize::from(pointer)).copied().unwrap_or_else(|| {
            asm.load(SPARE, TABLE, 8 * i32::from(pointer));
            SPARE
        });
        self.memory(base, 0, 2)
    }

    /// The register of a value; one that stays elsewhere is brought into a new one, which comes second.
    fn register(&mut self, asm: &mut Assembler, value: Value) -> Option<(u8, Option<u8>)> {
        if let Some(register) = self.at[usize::from(value)] {
            return Some((register, None));
        }
        let lane = self.order.lane(value);
        if let Lane::Sum(fold, set) = lane {
            return Some((self.sum(fold, set), None));
        }
        let register = self.allocate()?;
        match lane {
            Lane::Tile(place) => {
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
        let other = set == Set::Other || self.rounds > 0;
        registers[if other { self.plan.vectors } else { 0 } + self.vector]
    }

    /// A last operand: from memory where the instruction can read it there. Comes with a new register if it took one.
    fn operand(&mut self, asm: &mut Assembler, value: Value) -> Option<(Rm, bool, Option<u8>)> {
        if self.at[usize::from(value)].is_none() {
            match self.order.lane(value) {
                Lane::Tile(place) => return Some((self.in_frame(place, 2), false, None)),
                lane if is_single(lane) && self.plan.wide => {
                    return Some((self.plan.single(asm, lane), true, None));
                }
                _ => {}
            }
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
        let index = usize::from(value);
        self.at[index].filter(|_| self.uses[index] == 1 && !self.stays(value))
    }

    /// `result = opcode(a, b)`.
    fn two(&mut self, asm: &mut Assembler, opcode: Opcode, a: Value, b: Value, extra: Extra) -> Option<u8> {
        let (first, new_first) = self.register(asm, a)?;
        let (second, broadcast, new_second) = self.operand(asm, b)?;
        self.release(a);
        self.release(b);
        self.give_back([new_first, new_second]);
        let result = self.allocate()?;
        asm.vector(opcode, result, first, second, Extra { broadcast, ..extra });
        Some(result)
    }

    fn compute(&mut self, asm: &mut Assembler, value: Value, lane: Lane) -> Option<()> {
        let wide = self.plan.wide;
        let plain = Extra::default();
        let register = match lane {
            Lane::Constant(_) | Lane::One(_) | Lane::Sum(..) => unreachable!("it stays"),
            Lane::Tile(place) => {
                let register = self.allocate()?;
                asm.vector(LOAD, register, 0, self.in_frame(place, 2), plain);
                register
            }
            Lane::There(pointer) => {
                let register = self.allocate()?;
                let from = self.there(asm, pointer);
                match (self.end, wide) {
                    (false, _) => asm.vector(LOAD, register, 0, from, plain),
                    (true, true) => {
                        asm.vector(LOAD, register, 0, from, Extra { mask: END, zero: true, ..plain });
                    }
                    (true, false) => asm.vector(MASKED_LOAD, register, self.plan.end, from, plain),
                }
                register
            }
            Lane::Truths(place) => {
                let from = self.in_frame(place, 0);
                if wide {
                    let (register, spare) = (self.allocate_mask()?, self.plan.spare);
                    asm.vector_of(Length::Bits128, LOAD, spare, 0, from, plain);
                    let not_zero = opcode(1, 2, 0x26);
                    asm.vector_of(Length::Bits128, not_zero, register, spare, Rm::Register(spare), plain);
                    register
                } else {
                    let register = self.allocate()?;
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
                if commutes(two) && self.stays(a) && self.at[usize::from(a)].is_none() {
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
                let register = self.allocate()?;
                asm.vector(opcode, register, 0, from, Extra { broadcast, immediate, ..plain });
                register
            }
            Lane::Left(a, count) | Lane::Right(a, count) => {
                let code = if matches!(lane, Lane::Left(..)) { LEFT } else { RIGHT };
                let (from, new) = self.register(asm, a)?;
                self.release(a);
                self.give_back([new]);
                let register = self.allocate()?;
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
                let (first, second) = (self.at[usize::from(a)]?, self.at[usize::from(b)]?);
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
                let test = self.at[usize::from(truth)]?;
                let (otherwise, new_otherwise) = self.register(asm, b)?;
                let (chosen, broadcast, new_chosen) = self.operand(asm, a)?;
                for operand in [truth, a, b] {
                    self.release(operand);
                }
                self.give_back([new_otherwise, new_chosen]);
                let register = self.allocate()?;
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
        self.at[usize::from(value)] = Some(register);
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
            // Its register goes on to the result.
            self.uses[usize::from(a)] -= 1;
            return Some(result);
        }
        if self.stays(a) && self.at[usize::from(a)].is_none() {
            std::mem::swap(&mut a, &mut b);
        }
        let (first, new_first) = self.register(asm, a)?;
        let (second, broadcast, new_second) = self.operand(asm, b)?;
        let result = match (self.ends(c), self.at[usize::from(c)]) {
            (Some(result), _) => {
                self.uses[usize::from(c)] -= 1;
                result
            }
            (None, Some(register)) => {
                let result = self.allocate()?;
                asm.vector(MOVE, result, 0, Rm::Register(register), plain);
                self.release(c);
                result
            }
            // A copy of its own.
            (None, None) => {
                let result = match self.register(asm, c)? {
                    (_, Some(new)) => new,
                    (register, None) => {
                        let result = self.allocate()?;
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
            let register = self.at[usize::from(value)]?;
            self.release(value);
            self.store_truths(asm, self.in_frame(place, 0), register);
            return Some(());
        }
        let (register, new) = self.register(asm, value)?;
        match effect {
            Effect::Tile(place, _) => asm.vector(STORE, register, 0, self.in_frame(place, 2), plain),
            Effect::One(place, _) => {
                let to =
                    Rm::Memory { base: FRAME, scale: None, displacement: (self.plan.place)(place) as i32 };
                asm.vector_of(Length::Bits128, STORE_ONE, register, 0, to, plain);
            }
            Effect::There(pointer, _) => {
                let to = self.there(asm, pointer);
                match (self.end, wide) {
                    (false, _) => asm.vector(STORE, register, 0, to, plain),
                    (true, true) => asm.vector(STORE, register, 0, to, Extra { mask: END, ..plain }),
                    (true, false) => asm.vector(MASKED_STORE, register, self.plan.end, to, plain),
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
                        let by = Extra { immediate: Some(self.plan.end << 4), ..plain };
                        asm.vector(BLEND_BY_VECTOR, to, to, Rm::Register(register), by);
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
    fn store_truths(&self, asm: &mut Assembler, to: Rm, register: u8) {
        let (spare, plain) = (self.plan.spare, Extra::default());
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
