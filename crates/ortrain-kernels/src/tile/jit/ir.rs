//! Vector instructions of a group of operations. Each value has 32 bits or a truth value in every lane.
//!
//! A program is a machine of [`ortrain_expr::elementary`], as vector code is ([`crate::vecmath`]). Both give the same bits.
//! A test compares them.

use std::hash::{Hash, Hasher};

use ortrain_expr::coefficients::SQRT_HALF_BITS;
use ortrain_expr::elementary::{self, Machine};
use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, UnaryOp};
use rustc_hash::FxHashMap;

use crate::isa::Kind as Level;
use crate::tile::op::Slot;
use crate::vecmath::ROUNDING_OFFSET;

/// Index of a value. A value has 32 bits or a truth value in each lane.
pub(crate) type Value = u16;

/// Vector instruction that computes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum VectorInst {
    /// The same bits in every lane.
    Constant(u32),
    /// One value of the frame, in every lane.
    FrameBroadcast(Slot),
    /// A tile register.
    Tile(Slot),
    /// A tile register of truth values.
    Truths(Slot),
    /// Contiguous elements of callers' memory, by the index of their pointer.
    Memory(u8),
    /// Contiguous bytes of callers' memory as integers, by the index of their pointer. True for signed bytes.
    Bytes(u8, bool),
    /// One element of callers' memory in every lane, by the index of its pointer.
    MemoryBroadcast(u8),
    /// Partial results of a fold: index of the fold, and one of its two sets.
    Sum(u8, SumSet),
    Binary(VectorBinaryOp, Value, Value),
    Sqrt(Value),
    Floor(Value),
    Round(Value),
    /// Conversion from a signed integer.
    FromInteger(Value),
    /// Conversion to a signed integer, towards zero. The least integer if the result does not fit.
    ToInteger(Value),
    ShiftLeft(Value, u8),
    /// Arithmetic shift, which keeps the sign.
    ShiftRight(Value, u8),
    /// `a * b + c` in one rounding.
    MulAdd(Value, Value, Value),
    Compare(Comparison, Value, Value),
    /// Operation on truth values.
    Logic(Logic, Value, Value),
    /// Selection by a truth value.
    Select(Value, Value, Value),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum VectorBinaryOp {
    Add,
    Sub,
    Mul,
    Div,
    /// `a < b ? a : b`.
    Min,
    /// `a > b ? a : b`.
    Max,
    And,
    Or,
    Xor,
    AddInteger,
    SubInteger,
    /// `a * 2^b` for an integer `b`. Some machines have no such instruction.
    Scale,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Comparison {
    Equal,
    Unordered,
    NotEqual,
    Less,
    LessOrEqual,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Logic {
    And,
    Or,
    Xor,
}

/// Set of partial results: of the current round, or of the other round if two rounds are computed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SumSet {
    This,
    Second,
}

/// Store of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Effect {
    Tile(Slot, Value),
    /// Stores the value of a single index.
    FrameScalar(Slot, Value),
    Truths(Slot, Value),
    Memory(u8, Value),
    /// Stores the lowest byte of each lane.
    Bytes(u8, Value),
    /// Replaces the partial results of a fold.
    Sum(u8, Value),
}

/// Reduction over all indices. The function leaves 16 partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fold {
    pub(super) op: ReduceOp,
    /// Register of the partial results.
    pub(super) slot: Slot,
}

impl Effect {
    pub(super) fn value(self) -> Value {
        match self {
            Effect::Tile(_, value)
            | Effect::FrameScalar(_, value)
            | Effect::Truths(_, value)
            | Effect::Memory(_, value)
            | Effect::Bytes(_, value)
            | Effect::Sum(_, value) => value,
        }
    }
}

impl VectorInst {
    pub(super) fn operands(self) -> impl Iterator<Item = Value> {
        let [a, b, c] = match self {
            VectorInst::Constant(_)
            | VectorInst::FrameBroadcast(_)
            | VectorInst::Tile(_)
            | VectorInst::Truths(_)
            | VectorInst::Memory(_)
            | VectorInst::Bytes(..)
            | VectorInst::MemoryBroadcast(_)
            | VectorInst::Sum(..) => [None; 3],
            VectorInst::Sqrt(a)
            | VectorInst::Floor(a)
            | VectorInst::Round(a)
            | VectorInst::FromInteger(a)
            | VectorInst::ToInteger(a)
            | VectorInst::ShiftLeft(a, _)
            | VectorInst::ShiftRight(a, _) => [Some(a), None, None],
            VectorInst::Binary(_, a, b) | VectorInst::Compare(_, a, b) | VectorInst::Logic(_, a, b) => {
                [Some(a), Some(b), None]
            }
            VectorInst::MulAdd(a, b, c) | VectorInst::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        [a, b, c].into_iter().flatten()
    }

    /// Returns true if the value is a truth value in each lane.
    pub(super) fn is_truth(self) -> bool {
        matches!(self, VectorInst::Truths(_) | VectorInst::Compare(..) | VectorInst::Logic(..))
    }
}

/// Program of vector instructions. Operands come before their users, and equal instructions share one value.
#[derive(Clone, Debug)]
pub(super) struct VectorProgram {
    pub(super) insts: Vec<VectorInst>,
    pub(super) effects: Vec<Effect>,
    pub(super) folds: Vec<Fold>,
    /// For each pointer: bytes from a piece to the next piece, if the next piece is prefetched.
    pub(super) prefetch_steps: Vec<Option<i32>>,
    value_of_inst: FxHashMap<VectorInst, Value>,
    /// Instructions of the machine.
    pub(super) level: Level,
    /// True if [`VectorBinaryOp::Scale`] is an instruction.
    has_scale: bool,
}

/// Programs are equal if they compute the same.
impl PartialEq for VectorProgram {
    fn eq(&self, other: &VectorProgram) -> bool {
        self.insts == other.insts
            && self.effects == other.effects
            && self.folds == other.folds
            && self.prefetch_steps == other.prefetch_steps
            && self.level == other.level
    }
}

impl Eq for VectorProgram {}

impl Hash for VectorProgram {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.insts, &self.effects, &self.folds, &self.prefetch_steps, self.level).hash(state);
    }
}

const SIGN: u32 = 1 << 31;

impl VectorProgram {
    pub(super) fn new(level: Level, has_scale: bool) -> VectorProgram {
        VectorProgram {
            insts: Vec::new(),
            effects: Vec::new(),
            folds: Vec::new(),
            prefetch_steps: Vec::new(),
            value_of_inst: FxHashMap::default(),
            level,
            has_scale,
        }
    }

    /// Converts the program into a key for comparisons. No instruction may be added afterwards.
    pub(super) fn into_key(self) -> VectorProgram {
        VectorProgram { value_of_inst: FxHashMap::default(), ..self }
    }

    pub(super) fn push(&mut self, lane: VectorInst) -> Value {
        if let Some(&known) = self.value_of_inst.get(&lane) {
            return known;
        }
        self.insts.push(lane);
        let value = (self.insts.len() - 1) as Value;
        self.value_of_inst.insert(lane, value);
        value
    }

    fn push_bits(&mut self, bits: u32) -> Value {
        self.push(VectorInst::Constant(bits))
    }

    fn push_number(&mut self, value: f32) -> Value {
        self.push_bits(value.to_bits())
    }

    fn push_binary(&mut self, two: VectorBinaryOp, a: Value, b: Value) -> Value {
        self.push(VectorInst::Binary(two, a, b))
    }

    fn test(&mut self, test: Comparison, a: Value, b: Value) -> Value {
        self.push(VectorInst::Compare(test, a, b))
    }

    fn is_constant_number(&self, a: Value) -> bool {
        matches!(self.insts[usize::from(a)], VectorInst::Constant(bits) if !f32::from_bits(bits).is_nan())
    }

    /// Returns the maximum or the minimum: NaN if an operand is NaN, and the first of equal operands.
    fn min_or_max(&mut self, two: VectorBinaryOp, a: Value, b: Value) -> Value {
        // The machine instruction returns its second operand if the operands are equal or unordered.
        let extreme = self.push_binary(two, b, a);
        if self.is_constant_number(b) {
            return extreme;
        }
        let (sum, unordered) = (self.add(a, b), self.test(Comparison::Unordered, a, b));
        self.choose(unordered, sum, extreme)
    }

    pub(super) fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Option<Value> {
        Some(match op {
            BinaryOp::Add => self.add(a, b),
            BinaryOp::Sub => self.sub(a, b),
            BinaryOp::Mul => self.mul(a, b),
            BinaryOp::Div => self.push_binary(VectorBinaryOp::Div, a, b),
            BinaryOp::Min => self.min_or_max(VectorBinaryOp::Min, a, b),
            BinaryOp::Max => self.min_or_max(VectorBinaryOp::Max, a, b),
            BinaryOp::Pow | BinaryOp::Rem | BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => return None,
        })
    }

    /// Reduces a value over all indices.
    pub(super) fn fold(&mut self, op: ReduceOp, slot: Slot, value: Value) {
        let fold = self.folds.len() as u8;
        self.folds.push(Fold { op, slot });
        let sum = self.push(VectorInst::Sum(fold, SumSet::This));
        let sum = self.reduce(op, sum, value);
        self.effects.push(Effect::Sum(fold, sum));
    }

    /// Builds the program that joins the two sets of partial results of the folds.
    pub(super) fn join_folds(&self) -> VectorProgram {
        let mut lanes = VectorProgram::new(self.level, self.has_scale);
        for (k, fold) in self.folds.iter().enumerate() {
            let [left, other] =
                [SumSet::This, SumSet::Second].map(|set| lanes.push(VectorInst::Sum(k as u8, set)));
            let sum = lanes.reduce(fold.op, left, other);
            lanes.effects.push(Effect::Sum(k as u8, sum));
        }
        lanes
    }

    pub(super) fn reduce(&mut self, op: ReduceOp, a: Value, b: Value) -> Value {
        match op {
            ReduceOp::Sum => self.add(a, b),
            ReduceOp::Prod => self.mul(a, b),
            ReduceOp::Min => self.min_or_max(VectorBinaryOp::Min, a, b),
            ReduceOp::Max => self.min_or_max(VectorBinaryOp::Max, a, b),
        }
    }

    pub(super) fn logic(&mut self, op: BinaryOp, a: Value, b: Value) -> Option<Value> {
        let logic = match op {
            BinaryOp::And => Logic::And,
            BinaryOp::Or => Logic::Or,
            BinaryOp::Xor => Logic::Xor,
            _ => return None,
        };
        Some(self.push(VectorInst::Logic(logic, a, b)))
    }

    pub(super) fn compare(&mut self, op: CompareOp, a: Value, b: Value) -> Value {
        let test = match op {
            CompareOp::Eq => Comparison::Equal,
            CompareOp::Lt => Comparison::Less,
            CompareOp::Le => Comparison::LessOrEqual,
        };
        self.test(test, a, b)
    }

    /// Returns true in each lane with a number other than zero.
    pub(super) fn is_nonzero(&mut self, a: Value) -> Value {
        let zero = self.push_number(0.0);
        self.test(Comparison::NotEqual, a, zero)
    }

    /// Returns 1 for true, and 0 for false.
    pub(super) fn truth_to_f32(&mut self, a: Value) -> Value {
        let (one, zero) = (self.push_number(1.0), self.push_number(0.0));
        self.choose(a, one, zero)
    }

    /// Returns an `i32` or a `u32` as a float.
    pub(super) fn integer_to_f32(&mut self, a: Value, is_signed: bool) -> Value {
        let is_small = matches!(self.insts[usize::from(a)], VectorInst::Bytes(_, false));
        if is_signed || is_small {
            return self.push(VectorInst::FromInteger(a));
        }
        // Both halves are exact, and the sum rounds once.
        let mask = self.push_bits(0xffff);
        let high = self.push(VectorInst::ShiftRight(a, 16));
        let halves = [high, a].map(|half| self.push_binary(VectorBinaryOp::And, half, mask));
        let [high, low] = halves.map(|half| self.push(VectorInst::FromInteger(half)));
        let unit = self.push_number(65_536.0);
        self.mul_add(high, unit, low)
    }

    /// Returns a number that a float never exceeds, if one is known. NaN does not exceed any number.
    fn upper_bound(&self, a: Value) -> Option<f32> {
        match self.insts[usize::from(a)] {
            VectorInst::Constant(bits) => Some(f32::from_bits(bits)).filter(|number| !number.is_nan()),
            VectorInst::Binary(VectorBinaryOp::Min, a, b) => {
                [a, b].into_iter().filter_map(|operand| self.upper_bound(operand)).reduce(f32::min)
            }
            VectorInst::Binary(VectorBinaryOp::Max, a, b) => {
                Some(self.upper_bound(a)?.max(self.upper_bound(b)?))
            }
            _ => None,
        }
    }

    /// Returns a float as an `i32` or a `u32`, towards zero: the nearest integer of the type if it does not fit, and zero
    /// for NaN.
    pub(super) fn f32_to_integer(&mut self, a: Value, is_signed: bool) -> Value {
        const HALF_RANGE: f32 = 2_147_483_648.0;
        let (zero, half_range) = (self.push_number(0.0), self.push_number(HALF_RANGE));
        let fits = self.upper_bound(a).is_some_and(|bound| bound < HALF_RANGE);
        if fits && is_signed {
            let whole = self.push(VectorInst::ToInteger(a));
            let unordered = self.test(Comparison::Unordered, a, a);
            return self.choose(unordered, zero, whole);
        }
        if fits {
            // The machine instruction returns its second operand if the first is NaN.
            let a = self.push_binary(VectorBinaryOp::Max, a, zero);
            return self.push(VectorInst::ToInteger(a));
        }
        if is_signed {
            let whole = self.push(VectorInst::ToInteger(a));
            let (is_large, largest) =
                (self.test(Comparison::LessOrEqual, half_range, a), self.push_bits(i32::MAX as u32));
            let whole = self.choose(is_large, largest, whole);
            let unordered = self.test(Comparison::Unordered, a, a);
            return self.choose(unordered, zero, whole);
        }
        // The machine instruction returns its second operand if the first is NaN.
        let a = self.push_binary(VectorBinaryOp::Max, a, zero);
        let (low, rest) = (self.push(VectorInst::ToInteger(a)), self.sub(a, half_range));
        let (high, sign) = (self.push(VectorInst::ToInteger(rest)), self.push_bits(SIGN));
        let high = self.push_binary(VectorBinaryOp::Xor, high, sign);
        let is_high = self.test(Comparison::LessOrEqual, half_range, a);
        let whole = self.choose(is_high, high, low);
        let (limit, largest) = (self.push_number(2.0 * HALF_RANGE), self.push_bits(u32::MAX));
        let is_large = self.test(Comparison::LessOrEqual, limit, a);
        self.choose(is_large, largest, whole)
    }

    pub(super) fn unary(&mut self, op: UnaryOp, a: Value) -> Option<Value> {
        Some(match op {
            UnaryOp::Neg => self.negative(a),
            UnaryOp::Abs => self.magnitude(a),
            UnaryOp::Sign => {
                let (zero, one) = (self.push_number(0.0), self.push_number(1.0));
                let unit = self.with_sign(one, a);
                let (none, unordered) =
                    (self.test(Comparison::Equal, a, zero), self.test(Comparison::Unordered, a, a));
                let unit = self.choose(none, a, unit);
                self.choose(unordered, a, unit)
            }
            UnaryOp::Floor => self.push(VectorInst::Floor(a)),
            UnaryOp::Round => self.push(VectorInst::Round(a)),
            UnaryOp::Sqrt => self.push(VectorInst::Sqrt(a)),
            UnaryOp::Rsqrt => {
                let (one, root) = (self.push_number(1.0), self.push(VectorInst::Sqrt(a)));
                self.push_binary(VectorBinaryOp::Div, one, root)
            }
            UnaryOp::Exp => elementary::exp(self, a),
            UnaryOp::Log => elementary::log(self, a),
            UnaryOp::Tanh => elementary::tanh(self, a),
            UnaryOp::Sigmoid => elementary::sigmoid(self, a),
            UnaryOp::Erf => elementary::erf(self, a),
            UnaryOp::ToF16 => self.nearest_f16(a),
            UnaryOp::ToBf16 => self.nearest_bf16(a),
            UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Atan | UnaryOp::Not => return None,
        })
    }

    /// Rounds `bits` to the bits above the lowest `dropped` bits. Ties go to even.
    fn round_bits(&mut self, bits: Value, dropped: u8) -> Value {
        let (one, half) = (self.push_bits(1), self.push_bits((1 << (dropped - 1)) - 1));
        let last = self.push(VectorInst::ShiftRight(bits, dropped));
        let last = self.push_binary(VectorBinaryOp::And, last, one);
        let (above, mantissa) =
            (self.push_binary(VectorBinaryOp::AddInteger, bits, half), self.push_bits(!0 << dropped));
        let above = self.push_binary(VectorBinaryOp::AddInteger, above, last);
        self.push_binary(VectorBinaryOp::And, above, mantissa)
    }

    /// Makes a NaN quiet, and clears its lowest `dropped` bits, which a narrower type cannot store.
    fn quiet_nan(&mut self, nan: Value, dropped: u8) -> Value {
        let (mask, quiet) = (self.push_bits(!0 << dropped), self.push_bits(0x7fc0_0000));
        let masked = self.push_binary(VectorBinaryOp::And, nan, mask);
        self.push_binary(VectorBinaryOp::Or, masked, quiet)
    }

    fn nearest_bf16(&mut self, x: Value) -> Value {
        let (rounded, quiet) = (self.round_bits(x, 16), self.quiet_nan(x, 16));
        let unordered = self.test(Comparison::Unordered, x, x);
        self.choose(unordered, quiet, rounded)
    }

    /// As `F16::nearest`.
    fn nearest_f16(&mut self, x: Value) -> Value {
        let magnitude = self.magnitude(x);
        let (normal, quiet) = (self.round_bits(magnitude, 13), self.quiet_nan(magnitude, 13));
        let (threshold, half) = (self.push_number(2f32.powi(-14)), self.push_number(0.5));
        let subnormal = self.add(magnitude, half);
        let subnormal = self.sub(subnormal, half);
        let (is_small, limit) =
            (self.test(Comparison::Less, magnitude, threshold), self.push_number(65520.0));
        let (is_large, infinity) =
            (self.test(Comparison::LessOrEqual, limit, magnitude), self.push_number(f32::INFINITY));
        let result = self.choose(is_small, subnormal, normal);
        let result = self.choose(is_large, infinity, result);
        let unordered = self.test(Comparison::Unordered, x, x);
        let result = self.choose(unordered, quiet, result);
        self.with_sign(result, x)
    }
}

/// The same operations as the vector code in [`crate::vecmath`], so that both compute the same bits.
impl Machine for VectorProgram {
    type Number = Value;
    type Truth = Value;
    /// The sum of the number and [`ROUNDING_OFFSET`].
    type Rounded = Value;

    fn number(&mut self, value: f32) -> Value {
        self.push_number(value)
    }

    fn add(&mut self, a: Value, b: Value) -> Value {
        self.push_binary(VectorBinaryOp::Add, a, b)
    }

    fn sub(&mut self, a: Value, b: Value) -> Value {
        self.push_binary(VectorBinaryOp::Sub, a, b)
    }

    fn mul(&mut self, a: Value, b: Value) -> Value {
        self.push_binary(VectorBinaryOp::Mul, a, b)
    }

    fn div(&mut self, a: Value, b: Value) -> Value {
        self.push_binary(VectorBinaryOp::Div, a, b)
    }

    fn mul_add(&mut self, a: Value, b: Value, c: Value) -> Value {
        self.push(VectorInst::MulAdd(a, b, c))
    }

    fn negative(&mut self, a: Value) -> Value {
        let sign = self.push_bits(SIGN);
        self.push_binary(VectorBinaryOp::Xor, a, sign)
    }

    fn magnitude(&mut self, a: Value) -> Value {
        let mask = self.push_bits(!SIGN);
        self.push_binary(VectorBinaryOp::And, a, mask)
    }

    fn negative_magnitude(&mut self, a: Value) -> Value {
        let sign = self.push_bits(SIGN);
        self.push_binary(VectorBinaryOp::Or, a, sign)
    }

    fn with_sign(&mut self, a: Value, sign: Value) -> Value {
        let mask = self.push_bits(SIGN);
        let (magnitude, sign) = (self.magnitude(a), self.push_binary(VectorBinaryOp::And, sign, mask));
        self.push_binary(VectorBinaryOp::Or, magnitude, sign)
    }

    /// The machine instruction returns its second operand if one is NaN.
    fn clamp_max(&mut self, a: Value, bound: f32) -> Value {
        let bound = self.push_number(bound);
        self.push_binary(VectorBinaryOp::Min, bound, a)
    }

    /// As [`Machine::clamp_max`].
    fn clamp_min(&mut self, a: Value, bound: f32) -> Value {
        let bound = self.push_number(bound);
        self.push_binary(VectorBinaryOp::Max, bound, a)
    }

    fn is_less(&mut self, a: Value, bound: f32) -> Value {
        let bound = self.push_number(bound);
        self.test(Comparison::Less, a, bound)
    }

    fn is_zero(&mut self, a: Value) -> Value {
        let zero = self.push_number(0.0);
        self.test(Comparison::Equal, a, zero)
    }

    fn is_nonnegative(&mut self, a: Value) -> Value {
        let zero = self.push_number(0.0);
        self.test(Comparison::LessOrEqual, zero, a)
    }

    fn is_positive_infinity(&mut self, a: Value) -> Value {
        let infinity = self.push_number(f32::INFINITY);
        self.test(Comparison::Equal, a, infinity)
    }

    fn is_nan(&mut self, a: Value) -> Value {
        self.test(Comparison::Unordered, a, a)
    }

    fn choose(&mut self, truth: Value, yes: Value, no: Value) -> Value {
        self.push(VectorInst::Select(truth, yes, no))
    }

    fn round_product(&mut self, a: Value, factor: f32) -> Value {
        let (factor, offset) = (self.push_number(factor), self.push_number(ROUNDING_OFFSET));
        self.mul_add(a, factor, offset)
    }

    fn integer(&mut self, a: Value) -> Value {
        let offset = self.push_number(ROUNDING_OFFSET);
        self.sub(a, offset)
    }

    fn scale(&mut self, a: Value, power: Value) -> Value {
        if self.has_scale {
            // One instruction. Like the two multiplications below, it rounds once, if at all.
            let n = self.integer(power);
            return self.push_binary(VectorBinaryOp::Scale, a, n);
        }
        let offset = self.push_number(ROUNDING_OFFSET);
        let n = self.push_binary(VectorBinaryOp::SubInteger, power, offset);
        let half = self.push(VectorInst::ShiftRight(n, 1));
        let rest = self.push_binary(VectorBinaryOp::SubInteger, n, half);
        let bias = self.push_bits(127);
        let mut power_of_two = |n: Value| {
            let exponent = self.push_binary(VectorBinaryOp::AddInteger, n, bias);
            self.push(VectorInst::ShiftLeft(exponent, 23))
        };
        let (half, rest) = (power_of_two(half), power_of_two(rest));
        let a = self.mul(a, half);
        self.mul(a, rest)
    }

    fn split(&mut self, a: Value) -> (Value, Value) {
        let subnormal = self.is_less(a, f32::MIN_POSITIVE);
        let (factor, shift, zero) =
            (self.push_number(16_777_216.0), self.push_number(-24.0), self.push_number(0.0));
        let scaled = self.mul(a, factor);
        let scaled = self.choose(subnormal, scaled, a);
        let correction = self.choose(subnormal, shift, zero);
        let root = self.push_bits(SQRT_HALF_BITS);
        let shifted = self.push_binary(VectorBinaryOp::SubInteger, scaled, root);
        let exponent = self.push(VectorInst::ShiftRight(shifted, 23));
        let mask = self.push_bits(0x007f_ffff);
        let mantissa = self.push_binary(VectorBinaryOp::And, shifted, mask);
        let mantissa = self.push_binary(VectorBinaryOp::AddInteger, mantissa, root);
        let exponent = self.push(VectorInst::FromInteger(exponent));
        (mantissa, self.add(exponent, correction))
    }
}
