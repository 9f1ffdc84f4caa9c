//! Scalar expressions in SSA form.

use std::fmt;

use smallvec::SmallVec;

use crate::{BinaryOp, CompareOp, Mode, ReduceOp, Scalar, Type, UnaryOp};

/// Register: the result of one instruction of an [`Expr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u16);

/// Reduction of a nest over its inner axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reduction {
    /// Combination of the values.
    pub op: ReduceOp,
    /// Reduced value: a register of the nest's expression. It may depend on the results of earlier reductions.
    pub value: Reg,
}

/// Scalar that is constant during a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunScalar {
    /// Seed of random numbers (`U64`).
    Seed,
    /// Number of completed training steps (`U64`).
    TrainStep,
}

/// Instruction of an [`Expr`]. Operands are earlier registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inst {
    /// Constant.
    Const(Scalar),
    /// Element of load `slot` at the current index, converted to the register's type.
    Load(u16),
    /// Gathered load: element `index` (`I64`, relative to the load's offset) of load `slot`, or zero out of bounds.
    LoadAt(u16, Reg),
    /// Position along an axis of the iteration space (`I64`).
    Coordinate(u8),
    /// Scalar of the run.
    Run(RunScalar),
    /// Result of a reduction of the nest.
    Reduced(u8),
    /// Function of one scalar.
    Unary(UnaryOp, Reg),
    /// Function of two scalars.
    Binary(BinaryOp, Reg, Reg),
    /// Comparison (`Bool`).
    Compare(CompareOp, Reg, Reg),
    /// Second operand if the first (`Bool`) is true, else the third. NaN of the operand not selected does not
    /// propagate.
    Select(Reg, Reg, Reg),
    /// Conversion to the register's type. Floats to integers truncate and saturate (NaN gives 0); a conversion to
    /// `Bool` is the test "not zero".
    Convert(Reg),
    /// First operand (`I64`), after the check `0 <= first < second`. If the check fails, the run fails and commits
    /// nothing.
    Guard(Reg, Reg),
    /// Random `U32` from key, stream and index (all `U64`); see [`crate::random_bits`].
    Random(Reg, Reg, Reg),
}

impl Inst {
    /// Returns the operand registers.
    pub fn operands(&self) -> impl Iterator<Item = Reg> {
        let regs: [Option<Reg>; 3] = match *self {
            Inst::Const(_) | Inst::Load(_) | Inst::Coordinate(_) | Inst::Run(_) | Inst::Reduced(_) => {
                [None; 3]
            }
            Inst::LoadAt(_, a) | Inst::Unary(_, a) | Inst::Convert(a) => [Some(a), None, None],
            Inst::Binary(_, a, b) | Inst::Compare(_, a, b) | Inst::Guard(a, b) => [Some(a), Some(b), None],
            Inst::Select(a, b, c) | Inst::Random(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        regs.into_iter().flatten()
    }

    /// Hashes the instruction and the type of its register.
    fn hash_bits(self, ty: Type) -> u64 {
        let regs =
            |kind: u64, of: [Reg; 3]| of.into_iter().fold(kind, |word, reg| (word << 16) | u64::from(reg.0));
        let none = Reg(0);
        let (kind, rest) = match self {
            Inst::Const(value) => (0, value.bits() ^ ((value.ty() as u64) << 56)),
            Inst::Load(slot) => (1, u64::from(slot)),
            Inst::LoadAt(slot, a) => (2, regs(u64::from(slot), [none, none, a])),
            Inst::Coordinate(axis) => (3, u64::from(axis)),
            Inst::Run(scalar) => (4, scalar as u64),
            Inst::Reduced(k) => (5, u64::from(k)),
            Inst::Unary(op, a) => (6, regs(op as u64, [none, none, a])),
            Inst::Binary(op, a, b) => (7, regs(op as u64, [none, a, b])),
            Inst::Compare(op, a, b) => (8, regs(op as u64, [none, a, b])),
            Inst::Select(a, b, c) => (9, regs(0, [a, b, c])),
            Inst::Convert(a) => (10, regs(0, [none, none, a])),
            Inst::Guard(a, b) => (11, regs(0, [none, a, b])),
            Inst::Random(a, b, c) => (12, regs(0, [a, b, c])),
        };
        // Fibonacci hashing: an odd multiplier without a bit pattern. The upper bits of the product are mixed best, so
        // the lower bits are XORed with them.
        let mixed = (rest ^ ((kind << 8 | ty as u64) << 48)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 32)
    }

    /// Returns the same instruction with replaced operands.
    #[must_use]
    pub fn map_operands(self, mut f: impl FnMut(Reg) -> Reg) -> Inst {
        match self {
            Inst::Const(_) | Inst::Load(_) | Inst::Coordinate(_) | Inst::Run(_) | Inst::Reduced(_) => self,
            Inst::LoadAt(slot, a) => Inst::LoadAt(slot, f(a)),
            Inst::Unary(op, a) => Inst::Unary(op, f(a)),
            Inst::Convert(a) => Inst::Convert(f(a)),
            Inst::Binary(op, a, b) => Inst::Binary(op, f(a), f(b)),
            Inst::Compare(op, a, b) => Inst::Compare(op, f(a), f(b)),
            Inst::Guard(a, b) => Inst::Guard(f(a), f(b)),
            Inst::Select(a, b, c) => Inst::Select(f(a), f(b), f(c)),
            Inst::Random(a, b, c) => Inst::Random(f(a), f(b), f(c)),
        }
    }
}

/// Pure function of scalars: instructions in SSA form and the registers of its results.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Expr {
    insts: Vec<(Inst, Type)>,
    outputs: Vec<Reg>,
}

impl Expr {
    /// Returns the instructions with the types of their registers, operands before users.
    #[must_use]
    pub fn insts(&self) -> &[(Inst, Type)] {
        &self.insts
    }

    /// Returns the result registers.
    #[must_use]
    pub fn outputs(&self) -> &[Reg] {
        &self.outputs
    }

    /// Returns the type of a register.
    #[must_use]
    pub fn ty(&self, reg: Reg) -> Type {
        self.insts[usize::from(reg.0)].1
    }

    /// Returns the guards. They are side effects, which remain even if nothing uses their values.
    pub fn guards(&self) -> impl Iterator<Item = Reg> {
        let guards = self.insts.iter().enumerate().filter(|(_, (inst, _))| matches!(inst, Inst::Guard(..)));
        guards.map(|(k, _)| Reg(k as u16))
    }

    /// Returns true if evaluation can fail (the expression contains an [`Inst::Guard`]).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.insts.iter().any(|(inst, _)| matches!(inst, Inst::Guard(..)))
    }

    /// Returns the expression with renumbered loads. `renumber` must map distinct slots to distinct slots.
    #[must_use]
    pub fn with_slots(mut self, renumber: impl Fn(u16) -> u16) -> Expr {
        for (inst, _) in &mut self.insts {
            if let Inst::Load(slot) | Inst::LoadAt(slot, _) = inst {
                *slot = renumber(*slot);
            }
        }
        self
    }

    /// Returns for each register true if `roots` depend on it.
    #[must_use]
    pub fn dependencies_of(&self, roots: &[Reg]) -> SmallVec<[bool; 64]> {
        let mut needed = SmallVec::from_elem(false, self.insts.len());
        for root in roots {
            needed[usize::from(root.0)] = true;
        }
        for (i, (inst, _)) in self.insts.iter().enumerate().rev() {
            if needed[i] {
                for operand in inst.operands() {
                    needed[usize::from(operand.0)] = true;
                }
            }
        }
        needed
    }
}

/// Context of an evaluation: one point of a nest.
pub trait Evaluation {
    /// Returns the element of load `slot` at this point.
    fn load(&mut self, slot: usize) -> Scalar;
    /// Returns element `index` of load `slot`, or zero out of bounds.
    fn load_at(&mut self, slot: usize, index: i64) -> Scalar;
    /// Returns the position along an axis.
    fn coordinate(&mut self, axis: usize) -> i64;
    /// Returns a scalar of the run.
    fn run_scalar(&mut self, scalar: RunScalar) -> u64;
    /// Returns the result of a reduction.
    fn reduced(&mut self, k: usize) -> Scalar;
}

/// Error: a guard failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// Row-major index of the point in the nest; 0 if an expression is evaluated without a nest.
    pub point: usize,
    /// Checked index.
    pub index: i64,
    /// Exclusive upper bound.
    pub bound: i64,
}

impl Expr {
    /// Evaluates the results at one point, with the reference semantics.
    ///
    /// # Errors
    /// Returns the first guard that fails.
    pub fn evaluate(&self, mode: Mode, at: &mut impl Evaluation) -> Result<Vec<Scalar>, OutOfRange> {
        let mut regs = Vec::new();
        self.evaluate_into(mode, &vec![true; self.insts.len()], at, &mut regs)?;
        Ok(self.outputs.iter().map(|reg| regs[usize::from(reg.0)]).collect())
    }

    /// Evaluates the registers marked in `needed` into `regs`. The other registers get a placeholder.
    ///
    /// # Errors
    /// Returns the first guard that fails.
    pub fn evaluate_into(
        &self,
        mode: Mode,
        needed: &[bool],
        at: &mut impl Evaluation,
        regs: &mut Vec<Scalar>,
    ) -> Result<(), OutOfRange> {
        regs.clear();
        for (&(inst, ty), &needed) in self.insts.iter().zip(needed) {
            if !needed {
                regs.push(Scalar::Bool(false));
                continue;
            }
            // In widened mode, `F32` values are computed in f64.
            let ty = if ty == Type::F32 && mode == Mode::Widened { Type::F64 } else { ty };
            let reg = |r: Reg| regs[usize::from(r.0)];
            let value = match inst {
                Inst::Const(value) => value.convert(ty),
                Inst::Load(slot) => at.load(usize::from(slot)).convert(ty),
                Inst::LoadAt(slot, index) => at.load_at(usize::from(slot), reg(index).to_i64()).convert(ty),
                Inst::Coordinate(axis) => Scalar::I64(at.coordinate(usize::from(axis))),
                Inst::Run(scalar) => Scalar::U64(at.run_scalar(scalar)),
                Inst::Reduced(k) => at.reduced(usize::from(k)).convert(ty),
                Inst::Unary(op, a) => Scalar::unary(op, reg(a)),
                Inst::Binary(op, a, b) => Scalar::binary(op, reg(a), reg(b)),
                Inst::Compare(op, a, b) => Scalar::compare(op, reg(a), reg(b)),
                Inst::Select(c, a, b) => {
                    if reg(c) == Scalar::Bool(true) {
                        reg(a)
                    } else {
                        reg(b)
                    }
                }
                Inst::Convert(a) => reg(a).convert(ty),
                Inst::Guard(index, bound) => {
                    let (index, bound) = (reg(index).to_i64(), reg(bound).to_i64());
                    if index < 0 || index >= bound {
                        return Err(OutOfRange { point: 0, index, bound });
                    }
                    Scalar::I64(index)
                }
                Inst::Random(key, stream, index) => Scalar::U32(crate::random_bits(
                    reg(key).to_i64() as u64,
                    reg(stream).to_i64() as u64,
                    reg(index).to_i64() as u64,
                )),
            };
            regs.push(value);
        }
        Ok(())
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (inst, ty)) in self.insts.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            write!(f, "%{i}:{} = ", format!("{ty:?}").to_lowercase())?;
            match inst {
                Inst::Const(value) => write!(f, "{value}")?,
                Inst::Load(slot) => write!(f, "load {slot}")?,
                Inst::LoadAt(slot, index) => write!(f, "load {slot}[%{}]", index.0)?,
                Inst::Coordinate(axis) => write!(f, "axis {axis}")?,
                Inst::Run(scalar) => write!(f, "{scalar:?}")?,
                Inst::Reduced(k) => write!(f, "reduced {k}")?,
                Inst::Unary(op, a) => write!(f, "{op:?} %{}", a.0)?,
                Inst::Binary(op, a, b) => write!(f, "{op:?} %{} %{}", a.0, b.0)?,
                Inst::Compare(op, a, b) => write!(f, "{op:?} %{} %{}", a.0, b.0)?,
                Inst::Select(a, b, c) => write!(f, "select %{} %{} %{}", a.0, b.0, c.0)?,
                Inst::Convert(a) => write!(f, "convert %{}", a.0)?,
                Inst::Guard(a, b) => write!(f, "guard %{} < %{}", a.0, b.0)?,
                Inst::Random(a, b, c) => write!(f, "random %{} %{} %{}", a.0, b.0, c.0)?,
            }
        }
        let outputs: Vec<String> = self.outputs.iter().map(|reg| format!("%{}", reg.0)).collect();
        write!(f, " -> {}", outputs.join(", "))
    }
}

/// Maximum length for a linear search for an equal instruction; longer expressions use a hash table. Most expressions
/// are short, and a table costs an allocation.
const MAX_LINEAR_SEARCH: usize = 16;

/// Number of searches without a hash table after [`Builder::from_expr`]. A table costs as much as some searches, and
/// few instructions follow most copies.
const SEARCHES_WITHOUT_TABLE: u8 = 8;

/// Number of slots of the first hash table.
const INITIAL_TABLE_SLOTS: usize = 256;

/// Mark of a free slot in the hash table. The table never contains the instruction with this index.
const FREE_SLOT: u16 = u16::MAX;

/// Builder of an [`Expr`]: shares equal instructions, folds constants, and drops dead instructions.
#[derive(Debug, Default)]
pub struct Builder {
    insts: Vec<(Inst, Type)>,
    /// Open-addressing hash table with linear probing: indices of instructions by their hash. The number of slots is a
    /// power of two, and at least half of the slots are free. Empty up to [`MAX_LINEAR_SEARCH`] instructions, and while
    /// searches without a table remain.
    table: Vec<u16>,
    /// Number of remaining searches without a table.
    searches_without_table: u8,
}

impl Builder {
    /// Creates a builder of an empty expression.
    #[must_use]
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Creates a builder with the instructions of an expression, each in the same register.
    #[must_use]
    pub fn from_expr(expr: Expr) -> Builder {
        Builder { insts: expr.insts, table: Vec::new(), searches_without_table: SEARCHES_WITHOUT_TABLE }
    }

    /// Returns true if there is no instruction.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.insts.is_empty()
    }

    /// Returns the type of a register.
    #[must_use]
    pub fn ty(&self, reg: Reg) -> Type {
        self.insts[usize::from(reg.0)].1
    }

    /// Returns the instruction that defines a register.
    #[must_use]
    pub fn inst(&self, reg: Reg) -> Inst {
        self.insts[usize::from(reg.0)].0
    }

    /// Returns the register of an equal instruction, or adds the instruction without simplification.
    ///
    /// # Panics
    /// Panics if the expression has more than 65 536 instructions. No lowering comes near this number.
    pub fn push(&mut self, inst: Inst, ty: Type) -> Reg {
        let index = if self.searches_linearly() {
            self.insts.iter().position(|&entry| entry == (inst, ty))
        } else {
            self.find_in_table(inst, ty)
        };
        let index = index.unwrap_or_else(|| self.append(inst, ty));
        Reg(u16::try_from(index).expect("an expression has fewer than 65 536 instructions"))
    }

    /// Returns true if the next search is linear. Otherwise there is a table.
    fn searches_linearly(&mut self) -> bool {
        if !self.table.is_empty() {
            return false;
        }
        if self.insts.len() <= MAX_LINEAR_SEARCH {
            return true;
        }
        let remain = self.searches_without_table > 0;
        match remain {
            true => self.searches_without_table -= 1,
            false => self.build_table(),
        }
        remain
    }

    /// Looks up the index of an instruction in the hash table.
    fn find_in_table(&self, inst: Inst, ty: Type) -> Option<usize> {
        let last = self.table.len() - 1;
        let mut index = inst.hash_bits(ty) as usize & last;
        while self.table[index] != FREE_SLOT {
            let entry = usize::from(self.table[index]);
            if self.insts[entry] == (inst, ty) {
                return Some(entry);
            }
            index = (index + 1) & last;
        }
        None
    }

    fn append(&mut self, inst: Inst, ty: Type) -> usize {
        let count = self.insts.len();
        self.insts.push((inst, ty));
        if count < MAX_LINEAR_SEARCH || count >= usize::from(FREE_SLOT) || self.searches_without_table > 0 {
            return count;
        }
        match 2 * count >= self.table.len() {
            true => self.build_table(),
            false => self.insert_into_table(count),
        }
        count
    }

    /// Builds a hash table of all instructions.
    fn build_table(&mut self) {
        let count = self.insts.len().min(usize::from(FREE_SLOT));
        self.table = vec![FREE_SLOT; (2 * count).next_power_of_two().max(INITIAL_TABLE_SLOTS)];
        (0..count).for_each(|index| self.insert_into_table(index));
    }

    /// Inserts an instruction into the hash table.
    fn insert_into_table(&mut self, index: usize) {
        let (inst, ty) = self.insts[index];
        let last = self.table.len() - 1;
        let mut position = inst.hash_bits(ty) as usize & last;
        while self.table[position] != FREE_SLOT {
            position = (position + 1) & last;
        }
        self.table[position] = index as u16;
    }

    /// Adds a constant of type `ty`.
    pub fn constant(&mut self, ty: Type, value: f64) -> Reg {
        self.push(Inst::Const(Scalar::from_f64(ty, value)), ty)
    }

    /// Adds an exact `I64` constant.
    pub fn int(&mut self, value: i64) -> Reg {
        self.push(Inst::Const(Scalar::I64(value)), Type::I64)
    }

    /// Adds the element of load `slot`, computed as `ty`.
    pub fn load(&mut self, slot: usize, ty: Type) -> Reg {
        self.push(Inst::Load(slot as u16), ty)
    }

    /// Adds a gathered load: element `index` of load `slot`, or zero out of bounds.
    pub fn load_at(&mut self, slot: usize, index: Reg, ty: Type) -> Reg {
        self.push(Inst::LoadAt(slot as u16, index), ty)
    }

    /// Adds the position along an axis of the iteration space.
    pub fn coordinate(&mut self, axis: usize) -> Reg {
        self.push(Inst::Coordinate(axis as u8), Type::I64)
    }

    /// Adds the row-major index (`I64`) of the current element in an iteration space of these sizes.
    pub fn element_number(&mut self, dims: &[usize]) -> Reg {
        let mut index = self.int(0);
        for (axis, &size) in dims.iter().enumerate() {
            let (size, coordinate) = (self.int(size as i64), self.coordinate(axis));
            let scaled = self.mul(index, size);
            index = self.add(scaled, coordinate);
        }
        index
    }

    /// Adds a scalar of the run (`U64`).
    pub fn run_scalar(&mut self, scalar: RunScalar) -> Reg {
        self.push(Inst::Run(scalar), Type::U64)
    }

    /// Adds the result of reduction `k`, of type `ty`.
    pub fn reduced(&mut self, k: usize, ty: Type) -> Reg {
        self.push(Inst::Reduced(k as u8), ty)
    }

    fn constant_value(&self, reg: Reg) -> Option<Scalar> {
        match self.inst(reg) {
            Inst::Const(value) => Some(value),
            _ => None,
        }
    }

    fn is_constant(&self, reg: Reg, expected: f64) -> bool {
        self.constant_value(reg).is_some_and(|value| value.to_f64() == expected)
    }

    /// Adds a function of one scalar.
    pub fn unary(&mut self, op: UnaryOp, a: Reg) -> Reg {
        let ty = self.ty(a);
        if let Some(value) = self.constant_value(a) {
            return self.push(Inst::Const(Scalar::unary(op, value)), ty);
        }
        match (op, self.inst(a)) {
            (UnaryOp::Neg, Inst::Unary(UnaryOp::Neg, inner))
            | (UnaryOp::Not, Inst::Unary(UnaryOp::Not, inner)) => inner,
            (UnaryOp::ToF16 | UnaryOp::ToBf16, Inst::Unary(before, _)) if before == op => a,
            _ => self.push(Inst::Unary(op, a), ty),
        }
    }

    /// Adds a function of two scalars of one type. Simplifications (`x * 1`, `x + 0`, ...) keep every bit of an
    /// ordinary result.
    pub fn binary(&mut self, op: BinaryOp, a: Reg, b: Reg) -> Reg {
        let ty = self.ty(a);
        debug_assert_eq!(ty, self.ty(b), "{op:?} of two types");
        if let (Some(x), Some(y)) = (self.constant_value(a), self.constant_value(b)) {
            return self.push(Inst::Const(Scalar::binary(op, x, y)), ty);
        }
        match op {
            BinaryOp::Add if self.is_constant(a, 0.0) => return b,
            BinaryOp::Add | BinaryOp::Sub if self.is_constant(b, 0.0) => return a,
            BinaryOp::Mul if self.is_constant(a, 1.0) => return b,
            BinaryOp::Mul | BinaryOp::Div | BinaryOp::Pow if self.is_constant(b, 1.0) => return a,
            BinaryOp::Mul if self.is_constant(a, -1.0) => return self.unary(UnaryOp::Neg, b),
            BinaryOp::Mul if self.is_constant(b, -1.0) => return self.unary(UnaryOp::Neg, a),
            _ => {}
        }
        self.push(Inst::Binary(op, a, b), ty)
    }

    /// Adds `a + b`.
    pub fn add(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Add, a, b)
    }

    /// Adds `a - b`.
    pub fn sub(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Sub, a, b)
    }

    /// Adds `a * b`.
    pub fn mul(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Mul, a, b)
    }

    /// Adds `a / b`.
    pub fn div(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Div, a, b)
    }

    /// Adds a comparison.
    pub fn compare(&mut self, op: CompareOp, a: Reg, b: Reg) -> Reg {
        debug_assert_eq!(self.ty(a), self.ty(b), "{op:?} of two types");
        if let (Some(x), Some(y)) = (self.constant_value(a), self.constant_value(b)) {
            return self.push(Inst::Const(Scalar::compare(op, x, y)), Type::Bool);
        }
        self.push(Inst::Compare(op, a, b), Type::Bool)
    }

    /// Adds a selection: `yes` if `condition` holds, else `no`.
    pub fn select(&mut self, condition: Reg, yes: Reg, no: Reg) -> Reg {
        debug_assert_eq!(self.ty(yes), self.ty(no), "select of two types");
        if let Some(value) = self.constant_value(condition) {
            return if value == Scalar::Bool(true) { yes } else { no };
        }
        if yes == no {
            return yes;
        }
        let ty = self.ty(yes);
        self.push(Inst::Select(condition, yes, no), ty)
    }

    /// Adds a conversion of `a` to `ty`.
    pub fn convert(&mut self, a: Reg, ty: Type) -> Reg {
        if self.ty(a) == ty {
            return a;
        }
        if let Some(value) = self.constant_value(a) {
            return self.push(Inst::Const(value.convert(ty)), ty);
        }
        self.push(Inst::Convert(a), ty)
    }

    /// Adds a guard: `index` (`I64`), with a check that it is in `0..bound`. The run fails if the check fails.
    pub fn guard(&mut self, index: Reg, bound: i64) -> Reg {
        let bound = self.int(bound);
        self.push(Inst::Guard(index, bound), Type::I64)
    }

    /// Adds an instruction through its own method ([`Builder::unary`], ...), which folds constants and simplifies.
    pub fn fold(&mut self, inst: Inst, ty: Type) -> Reg {
        match inst {
            Inst::Unary(op, a) => self.unary(op, a),
            Inst::Binary(op, a, b) => self.binary(op, a, b),
            Inst::Compare(op, a, b) => self.compare(op, a, b),
            Inst::Select(condition, yes, no) => self.select(condition, yes, no),
            Inst::Convert(a) => self.convert(a, ty),
            other => self.push(other, ty),
        }
    }

    /// Appends another expression, with registers of this builder in place of its loads. Returns its result registers.
    ///
    /// `load` receives the slot and the type of each load, and returns the register that replaces it.
    pub fn inline(
        &mut self,
        other: &Expr,
        mut load: impl FnMut(&mut Builder, usize, Type) -> Reg,
    ) -> Vec<Reg> {
        let regs = self.copy(other, |b, inst, ty| match inst {
            Inst::Load(slot) => load(b, usize::from(slot), ty),
            other => b.fold(other, ty),
        });
        other.outputs.iter().map(|reg| regs[usize::from(reg.0)]).collect()
    }

    /// Copies an expression into this builder and returns the new registers. `leaf` receives each instruction with
    /// renumbered operands, adds it, and returns its register.
    pub fn copy(&mut self, expr: &Expr, mut leaf: impl FnMut(&mut Builder, Inst, Type) -> Reg) -> Vec<Reg> {
        self.insts.reserve(expr.insts.len());
        let mut regs: Vec<Reg> = Vec::with_capacity(expr.insts.len());
        for &(inst, ty) in &expr.insts {
            let inst = inst.map_operands(|reg| regs[usize::from(reg.0)]);
            regs.push(leaf(self, inst, ty));
        }
        regs
    }

    /// Finishes the copy of `expr`. `regs` are the registers that [`Builder::copy`] returned. Also returns the
    /// reductions of `expr` with their new registers. Dead instructions are dropped.
    #[must_use]
    pub fn finish_copy(self, expr: &Expr, reductions: &[Reduction], regs: &[Reg]) -> (Expr, Vec<Reduction>) {
        let outputs: Vec<Reg> = expr.outputs.iter().map(|reg| regs[usize::from(reg.0)]).collect();
        self.finish_reducing(&outputs, reductions, regs)
    }

    /// Finishes a copied expression with the results `outputs` instead of its own; see [`Builder::finish_copy`].
    #[must_use]
    pub fn finish_reducing(
        self,
        outputs: &[Reg],
        reductions: &[Reduction],
        regs: &[Reg],
    ) -> (Expr, Vec<Reduction>) {
        let values: Vec<Reg> =
            reductions.iter().map(|reduction| regs[usize::from(reduction.value.0)]).collect();
        let (expr, values) = self.finish_keeping(outputs, &values);
        let renumbered =
            reductions.iter().zip(values).map(|(Reduction { op, .. }, value)| Reduction { op: *op, value });
        (expr, renumbered.collect())
    }

    /// Finishes the expression with these results. Dead instructions are dropped. The registers in `saved`
    /// remain, for example the values of reductions, which are no results. Also returns the new registers of `saved`.
    #[must_use]
    pub fn finish_keeping(self, outputs: &[Reg], saved: &[Reg]) -> (Expr, Vec<Reg>) {
        let full = Expr { insts: self.insts, outputs: Vec::new() };
        let roots: SmallVec<[Reg; 16]> = outputs.iter().chain(saved).copied().chain(full.guards()).collect();
        let needed = full.dependencies_of(&roots);
        if needed.iter().all(|&needed| needed) {
            return (Expr { insts: full.insts, outputs: outputs.to_vec() }, saved.to_vec());
        }
        let mut new: SmallVec<[Reg; 64]> = SmallVec::from_elem(Reg(0), needed.len());
        let mut insts = Vec::with_capacity(needed.iter().filter(|&&needed| needed).count());
        for (i, &(inst, ty)) in full.insts.iter().enumerate() {
            if needed[i] {
                new[i] = Reg(insts.len() as u16);
                insts.push((inst.map_operands(|reg| new[usize::from(reg.0)]), ty));
            }
        }
        let renumbered = |regs: &[Reg]| regs.iter().map(|reg| new[usize::from(reg.0)]).collect::<Vec<_>>();
        (Expr { insts, outputs: renumbered(outputs) }, renumbered(saved))
    }

    /// Finishes the expression with these results. Dead instructions are dropped.
    #[must_use]
    pub fn finish(self, outputs: &[Reg]) -> Expr {
        self.finish_keeping(outputs, &[]).0
    }
}
