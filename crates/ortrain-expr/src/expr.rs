//! Scalar expressions in SSA form.

use std::fmt;

use smallvec::SmallVec;

use crate::{DType, Mode, Reduction, Scalar};

/// The type a scalar is computed in. `f16` and `bf16` are computed as `F32`; narrow integers as the wider one of
/// their signedness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 32-bit signed integer, wrapping.
    I32,
    /// 64-bit signed integer, wrapping.
    I64,
    /// 32-bit unsigned integer, wrapping.
    U32,
    /// 64-bit unsigned integer, wrapping.
    U64,
    /// Truth value.
    Bool,
}

impl Type {
    /// The type in which elements of `dtype` are computed.
    #[must_use]
    pub fn of(dtype: DType) -> Type {
        match dtype {
            DType::F16 | DType::BF16 | DType::F32 => Type::F32,
            DType::F64 => Type::F64,
            DType::I8 | DType::I16 | DType::I32 => Type::I32,
            DType::I64 => Type::I64,
            DType::U8 | DType::U16 | DType::U32 => Type::U32,
            DType::U64 => Type::U64,
            DType::Bool => Type::Bool,
        }
    }

    /// The element type that keeps all bits of a value.
    #[must_use]
    pub fn storage(self) -> DType {
        match self {
            Type::F32 => DType::F32,
            Type::F64 => DType::F64,
            Type::I32 => DType::I32,
            Type::I64 => DType::I64,
            Type::U32 => DType::U32,
            Type::U64 => DType::U64,
            Type::Bool => DType::Bool,
        }
    }

    /// Whether the type is a float.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Type::F32 | Type::F64)
    }
}

/// A register: the result of one instruction of an [`Expr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u16);

/// A function of one scalar. Results have the argument's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnaryOp {
    /// Negation; wraps for integers.
    Neg,
    /// Absolute value; wraps for integers.
    Abs,
    /// -1, 0 or 1; NaN for NaN.
    Sign,
    /// Natural exponential.
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// `1 / sqrt(x)`.
    Rsqrt,
    /// Sine, of radians.
    Sin,
    /// Cosine, of radians.
    Cos,
    /// Inverse tangent, in radians.
    Atan,
    /// Gauss error function.
    Erf,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// Largest integer not above.
    Floor,
    /// Logical negation.
    Not,
    /// The nearest number of [`DType::F16`], of `F32` alone: what comes back of a store of that type.
    ToF16,
    /// The nearest number of [`DType::BF16`], of `F32` alone: what comes back of a store of that type.
    ToBf16,
}

impl UnaryOp {
    /// The function that rounds to a float narrower than `F32`; `None` for other types.
    #[must_use]
    pub fn rounding_to(dtype: DType) -> Option<UnaryOp> {
        match dtype {
            DType::F16 => Some(UnaryOp::ToF16),
            DType::BF16 => Some(UnaryOp::ToBf16),
            _ => None,
        }
    }
}

/// A function of two scalars of one type, with a result of that type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinaryOp {
    /// Sum.
    Add,
    /// Difference.
    Sub,
    /// Product.
    Mul,
    /// Quotient; for integers truncated, and 0 where the divisor is 0.
    Div,
    /// Remainder with the sign of the dividend; for integers 0 where the divisor is 0.
    Rem,
    /// Power; for integers wrapping, and 0 for negative exponents unless the base is 1 or -1.
    Pow,
    /// The smaller; NaN if either is NaN.
    Min,
    /// The larger; NaN if either is NaN.
    Max,
    /// Logical and; for integers bit by bit.
    And,
    /// Logical or; for integers bit by bit.
    Or,
    /// Logical exclusive or; for integers bit by bit.
    Xor,
}

/// A comparison of two scalars of one type; false where either is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompareOp {
    /// Equal.
    Eq,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
}

/// A scalar that is the same for a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunScalar {
    /// The seed of random numbers (`U64`).
    Seed,
    /// The number of train steps done so far (`U64`).
    TrainStep,
}

/// One instruction of an [`Expr`]. Operands are earlier registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inst {
    /// A constant.
    Const(Scalar),
    /// The element of load `slot` at the current index, converted to the register's type.
    Load(u16),
    /// Element `index` (`I64`, counted from the load's offset) of load `slot`; zero where it lies outside.
    LoadAt(u16, Reg),
    /// The position along an axis of the iteration space (`I64`).
    Coordinate(u8),
    /// A scalar of the run.
    Run(RunScalar),
    /// The result of a reduction of the nest.
    Reduced(u8),
    /// A function of one scalar.
    Unary(UnaryOp, Reg),
    /// A function of two scalars.
    Binary(BinaryOp, Reg, Reg),
    /// A comparison (`Bool`).
    Compare(CompareOp, Reg, Reg),
    /// The second where the first (`Bool`) holds, else the third. The other one's NaN does not leak.
    Select(Reg, Reg, Reg),
    /// Conversion to the register's type: floats to integers truncate and saturate (NaN gives 0), anything to `Bool`
    /// is "not zero".
    Convert(Reg),
    /// The first (`I64`), after checking `0 <= first < second`; if not, the whole run fails and commits nothing.
    Guard(Reg, Reg),
    /// 32 random bits (`U32`) from key, stream and index (all `U64`); see [`crate::random_bits`].
    Random(Reg, Reg, Reg),
}

impl Inst {
    /// The operand registers.
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

    /// A number that equal instructions share, and different ones hardly ever.
    fn digest(self, ty: Type) -> u64 {
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
        // An odd number without any pattern; its upper digits are mixed best.
        let mixed = (rest ^ ((kind << 8 | ty as u64) << 48)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 32)
    }

    /// The same instruction with its operands replaced.
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

/// A pure function of scalars: instructions in SSA form and the registers that are its results.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Expr {
    insts: Vec<(Inst, Type)>,
    outputs: Vec<Reg>,
}

impl Expr {
    /// The instructions with the types of their registers, operands before users.
    #[must_use]
    pub fn insts(&self) -> &[(Inst, Type)] {
        &self.insts
    }

    /// The result registers.
    #[must_use]
    pub fn outputs(&self) -> &[Reg] {
        &self.outputs
    }

    /// The type of a register.
    #[must_use]
    pub fn ty(&self, reg: Reg) -> Type {
        self.insts[usize::from(reg.0)].1
    }

    /// The guards: they are effects, which stay even if nothing uses their values.
    pub fn guards(&self) -> impl Iterator<Item = Reg> {
        let guards = self.insts.iter().enumerate().filter(|(_, (inst, _))| matches!(inst, Inst::Guard(..)));
        guards.map(|(k, _)| Reg(k as u16))
    }

    /// Whether a run of it can fail (it holds a [`Inst::Guard`]).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.insts.iter().any(|(inst, _)| matches!(inst, Inst::Guard(..)))
    }

    /// The same expression with its loads numbered otherwise, each with a number of its own.
    #[must_use]
    pub fn with_slots(mut self, number: impl Fn(u16) -> u16) -> Expr {
        for (inst, _) in &mut self.insts {
            if let Inst::Load(slot) | Inst::LoadAt(slot, _) = inst {
                *slot = number(*slot);
            }
        }
        self
    }

    /// `true` for each register that `roots` need.
    #[must_use]
    pub fn needed_by(&self, roots: &[Reg]) -> SmallVec<[bool; 64]> {
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

/// What an expression is evaluated against: one point of a nest.
pub trait Evaluation {
    /// The element of load `slot` here.
    fn load(&mut self, slot: usize) -> Scalar;
    /// Element `index` of load `slot`; zero outside.
    fn load_at(&mut self, slot: usize, index: i64) -> Scalar;
    /// The position along an axis.
    fn coordinate(&mut self, axis: usize) -> i64;
    /// A scalar of the run.
    fn run_scalar(&mut self, scalar: RunScalar) -> u64;
    /// The result of a reduction.
    fn reduced(&mut self, k: usize) -> Scalar;
}

/// A guard that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// The point of the nest, counted row-major; 0 where an expression alone is evaluated.
    pub point: usize,
    /// The index.
    pub index: i64,
    /// Its exclusive upper bound.
    pub bound: i64,
}

impl Expr {
    /// The results at one point, by the reference semantics.
    ///
    /// # Errors
    /// The first guard that fails.
    pub fn evaluate(&self, mode: Mode, at: &mut impl Evaluation) -> Result<Vec<Scalar>, OutOfRange> {
        let mut regs = Vec::new();
        self.evaluate_into(mode, &vec![true; self.insts.len()], at, &mut regs)?;
        Ok(self.outputs.iter().map(|reg| regs[usize::from(reg.0)]).collect())
    }

    /// The registers that are `needed`, into `regs` (others hold a placeholder).
    ///
    /// # Errors
    /// The first guard that fails.
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
            // Widened: what is computed in f32 is computed in f64.
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

/// Expressions up to this length are searched for an equal instruction one by one, longer ones by a table: most
/// expressions are short, and a table costs an allocation.
const SEARCHED: usize = 16;

/// Places of the first table.
const PLACES: usize = 256;

/// A place where nothing stands. No instruction has this number: there are fewer than 65 536.
const FREE: u16 = u16::MAX;

/// Builds an [`Expr`]: shares equal instructions, folds constants, drops what no result needs.
#[derive(Debug, Default)]
pub struct Builder {
    insts: Vec<(Inst, Type)>,
    /// Numbers of instructions by their hash, each at the first free place from there on; a power of two of places, of
    /// which half are free. Empty up to [`SEARCHED`] instructions.
    table: Vec<u16>,
}

impl Builder {
    /// An empty expression.
    #[must_use]
    pub fn new() -> Builder {
        Builder::default()
    }

    /// The instructions of an expression, each in its register.
    #[must_use]
    pub fn of(expr: &Expr) -> Builder {
        let mut builder = Builder { insts: Vec::with_capacity(2 * expr.insts.len()), table: Vec::new() };
        expr.insts.iter().for_each(|&(inst, ty)| {
            builder.append(inst, ty);
        });
        builder
    }

    /// The type of a register.
    #[must_use]
    pub fn ty(&self, reg: Reg) -> Type {
        self.insts[usize::from(reg.0)].1
    }

    /// The instruction that made a register.
    #[must_use]
    pub fn inst(&self, reg: Reg) -> Inst {
        self.insts[usize::from(reg.0)].0
    }

    /// Adds an instruction as it is, or finds the equal one.
    ///
    /// # Panics
    /// When an expression grows past 65 535 instructions, which no lowering comes near.
    pub fn push(&mut self, inst: Inst, ty: Type) -> Reg {
        let index = if self.table.is_empty() {
            self.insts.iter().position(|&entry| entry == (inst, ty))
        } else {
            self.number_of(inst, ty)
        };
        let index = index.unwrap_or_else(|| self.append(inst, ty));
        Reg(u16::try_from(index).expect("an expression has fewer than 65 536 instructions"))
    }

    /// The number of an instruction, by the table.
    fn number_of(&self, inst: Inst, ty: Type) -> Option<usize> {
        let last = self.table.len() - 1;
        let mut place = inst.digest(ty) as usize & last;
        while self.table[place] != FREE {
            let number = usize::from(self.table[place]);
            if self.insts[number] == (inst, ty) {
                return Some(number);
            }
            place = (place + 1) & last;
        }
        None
    }

    fn append(&mut self, inst: Inst, ty: Type) -> usize {
        let number = self.insts.len();
        self.insts.push((inst, ty));
        if number < SEARCHED || number >= usize::from(FREE) {
            return number;
        }
        if 2 * number >= self.table.len() {
            self.table = vec![FREE; (2 * self.table.len()).max(PLACES)];
            (0..number).for_each(|number| self.enter(number));
        }
        self.enter(number);
        number
    }

    /// Puts an instruction into the table.
    fn enter(&mut self, number: usize) {
        let (inst, ty) = self.insts[number];
        let last = self.table.len() - 1;
        let mut place = inst.digest(ty) as usize & last;
        while self.table[place] != FREE {
            place = (place + 1) & last;
        }
        self.table[place] = number as u16;
    }

    /// A constant of type `ty`.
    pub fn constant(&mut self, ty: Type, value: f64) -> Reg {
        self.push(Inst::Const(Scalar::from_f64(ty, value)), ty)
    }

    /// An exact `I64` constant.
    pub fn int(&mut self, value: i64) -> Reg {
        self.push(Inst::Const(Scalar::I64(value)), Type::I64)
    }

    /// The element of load `slot`, computed as `ty`.
    pub fn load(&mut self, slot: usize, ty: Type) -> Reg {
        self.push(Inst::Load(slot as u16), ty)
    }

    /// Element `index` of load `slot`; zero where it lies outside.
    pub fn load_at(&mut self, slot: usize, index: Reg, ty: Type) -> Reg {
        self.push(Inst::LoadAt(slot as u16, index), ty)
    }

    /// The position along an axis of the iteration space.
    pub fn coordinate(&mut self, axis: usize) -> Reg {
        self.push(Inst::Coordinate(axis as u8), Type::I64)
    }

    /// The number (`I64`) of the element of a space of these sizes, in row-major order.
    pub fn element_number(&mut self, dims: &[usize]) -> Reg {
        let mut number = self.int(0);
        for (axis, &size) in dims.iter().enumerate() {
            let (size, here) = (self.int(size as i64), self.coordinate(axis));
            let scaled = self.mul(number, size);
            number = self.add(scaled, here);
        }
        number
    }

    /// A scalar of the run (`U64`).
    pub fn run_scalar(&mut self, scalar: RunScalar) -> Reg {
        self.push(Inst::Run(scalar), Type::U64)
    }

    /// The result of reduction `k`, of type `ty`.
    pub fn reduced(&mut self, k: usize, ty: Type) -> Reg {
        self.push(Inst::Reduced(k as u8), ty)
    }

    fn value(&self, reg: Reg) -> Option<Scalar> {
        match self.inst(reg) {
            Inst::Const(value) => Some(value),
            _ => None,
        }
    }

    fn is(&self, reg: Reg, number: f64) -> bool {
        self.value(reg).is_some_and(|value| value.to_f64() == number)
    }

    /// A function of one scalar.
    pub fn unary(&mut self, op: UnaryOp, a: Reg) -> Reg {
        let ty = self.ty(a);
        if let Some(value) = self.value(a) {
            return self.push(Inst::Const(Scalar::unary(op, value)), ty);
        }
        match (op, self.inst(a)) {
            (UnaryOp::Neg, Inst::Unary(UnaryOp::Neg, inner))
            | (UnaryOp::Not, Inst::Unary(UnaryOp::Not, inner)) => inner,
            (UnaryOp::ToF16 | UnaryOp::ToBf16, Inst::Unary(before, _)) if before == op => a,
            _ => self.push(Inst::Unary(op, a), ty),
        }
    }

    /// A function of two scalars of one type. Only rewrites that keep every bit of an ordinary result are made
    /// (`x * 1`, `x + 0`, ...).
    pub fn binary(&mut self, op: BinaryOp, a: Reg, b: Reg) -> Reg {
        let ty = self.ty(a);
        debug_assert_eq!(ty, self.ty(b), "{op:?} of two types");
        if let (Some(x), Some(y)) = (self.value(a), self.value(b)) {
            return self.push(Inst::Const(Scalar::binary(op, x, y)), ty);
        }
        match op {
            BinaryOp::Add if self.is(a, 0.0) => return b,
            BinaryOp::Add | BinaryOp::Sub if self.is(b, 0.0) => return a,
            BinaryOp::Mul if self.is(a, 1.0) => return b,
            BinaryOp::Mul | BinaryOp::Div | BinaryOp::Pow if self.is(b, 1.0) => return a,
            BinaryOp::Mul if self.is(a, -1.0) => return self.unary(UnaryOp::Neg, b),
            BinaryOp::Mul if self.is(b, -1.0) => return self.unary(UnaryOp::Neg, a),
            _ => {}
        }
        self.push(Inst::Binary(op, a, b), ty)
    }

    /// `a + b`.
    pub fn add(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Add, a, b)
    }

    /// `a - b`.
    pub fn sub(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Sub, a, b)
    }

    /// `a * b`.
    pub fn mul(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Mul, a, b)
    }

    /// `a / b`.
    pub fn div(&mut self, a: Reg, b: Reg) -> Reg {
        self.binary(BinaryOp::Div, a, b)
    }

    /// A comparison.
    pub fn compare(&mut self, op: CompareOp, a: Reg, b: Reg) -> Reg {
        debug_assert_eq!(self.ty(a), self.ty(b), "{op:?} of two types");
        if let (Some(x), Some(y)) = (self.value(a), self.value(b)) {
            return self.push(Inst::Const(Scalar::compare(op, x, y)), Type::Bool);
        }
        self.push(Inst::Compare(op, a, b), Type::Bool)
    }

    /// `yes` where `condition`, else `no`.
    pub fn select(&mut self, condition: Reg, yes: Reg, no: Reg) -> Reg {
        debug_assert_eq!(self.ty(yes), self.ty(no), "select of two types");
        if let Some(value) = self.value(condition) {
            return if value == Scalar::Bool(true) { yes } else { no };
        }
        if yes == no {
            return yes;
        }
        let ty = self.ty(yes);
        self.push(Inst::Select(condition, yes, no), ty)
    }

    /// `a` as `ty`.
    pub fn convert(&mut self, a: Reg, ty: Type) -> Reg {
        if self.ty(a) == ty {
            return a;
        }
        if let Some(value) = self.value(a) {
            return self.push(Inst::Const(value.convert(ty)), ty);
        }
        self.push(Inst::Convert(a), ty)
    }

    /// `index` (`I64`), checked to lie in `0..bound`; the run fails if it does not.
    pub fn guard(&mut self, index: Reg, bound: i64) -> Reg {
        let bound = self.int(bound);
        self.push(Inst::Guard(index, bound), Type::I64)
    }

    /// Appends an instruction as the function that makes it does: of constants it is one.
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

    /// Appends another expression whose loads are given as registers here; returns its results.
    ///
    /// `load` is asked for each of its loads (slot and type).
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

    /// Appends an expression. `leaf` gets each instruction, its operands moved, and says what it becomes; the registers are
    /// returned.
    pub fn copy(&mut self, expr: &Expr, mut leaf: impl FnMut(&mut Builder, Inst, Type) -> Reg) -> Vec<Reg> {
        self.insts.reserve(expr.insts.len());
        let mut regs: Vec<Reg> = Vec::with_capacity(expr.insts.len());
        for &(inst, ty) in &expr.insts {
            let inst = inst.map_operands(|reg| regs[usize::from(reg.0)]);
            regs.push(leaf(self, inst, ty));
        }
        regs
    }

    /// The expression that [`Builder::copy`] has appended, with its reductions; what neither of them needs is dropped.
    #[must_use]
    pub fn finish_copy(self, expr: &Expr, reductions: &[Reduction], regs: &[Reg]) -> (Expr, Vec<Reduction>) {
        let outputs: Vec<Reg> = expr.outputs.iter().map(|reg| regs[usize::from(reg.0)]).collect();
        self.finish_reducing(&outputs, reductions, regs)
    }

    /// The same with other results.
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
        let moved =
            reductions.iter().zip(values).map(|(Reduction { op, .. }, value)| Reduction { op: *op, value });
        (expr, moved.collect())
    }

    /// The expression with these results; what they do not need is dropped. Also says where each of `keep` went
    /// (reductions' values, for instance, are needed though they are not results).
    #[must_use]
    pub fn finish_keeping(self, outputs: &[Reg], keep: &[Reg]) -> (Expr, Vec<Reg>) {
        let whole = Expr { insts: self.insts, outputs: Vec::new() };
        let roots: SmallVec<[Reg; 16]> = outputs.iter().chain(keep).copied().chain(whole.guards()).collect();
        let needed = whole.needed_by(&roots);
        let mut new: SmallVec<[Reg; 64]> = SmallVec::from_elem(Reg(0), needed.len());
        let mut insts = Vec::with_capacity(needed.iter().filter(|&&needed| needed).count());
        for (i, &(inst, ty)) in whole.insts.iter().enumerate() {
            if needed[i] {
                new[i] = Reg(insts.len() as u16);
                insts.push((inst.map_operands(|reg| new[usize::from(reg.0)]), ty));
            }
        }
        let moved = |regs: &[Reg]| regs.iter().map(|reg| new[usize::from(reg.0)]).collect::<Vec<_>>();
        (Expr { insts, outputs: moved(outputs) }, moved(keep))
    }

    /// The expression with these results.
    #[must_use]
    pub fn finish(self, outputs: &[Reg]) -> Expr {
        self.finish_keeping(outputs, &[]).0
    }
}
