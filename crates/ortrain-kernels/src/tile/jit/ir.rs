//! Vector instructions of a group of operations. Each value has 32 bits or a truth value in every lane.
//!
//! Elementary functions use the same operations in the same order as [`crate::vecmath`], so that both give the same
//! bits. A test compares them.

use std::hash::{Hash, Hasher};

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, UnaryOp};
use rustc_hash::FxHashMap;

use crate::tile::Slot;

/// Index of a value. A value has 32 bits or a truth value in each lane.
pub(crate) type Value = u16;

/// Vector instruction that computes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lane {
    /// The same bits in every lane.
    Constant(u32),
    /// One value of the frame, in every lane.
    One(Slot),
    /// A tile register.
    Tile(Slot),
    /// A tile register of truth values.
    Truths(Slot),
    /// Contiguous elements of callers' memory, by the index of their pointer.
    There(u8),
    /// One element of callers' memory in every lane, by the index of its pointer.
    Single(u8),
    /// Partial results of a fold: index of the fold, and one of its two sets.
    Sum(u8, Set),
    Two(Two, Value, Value),
    Root(Value),
    Floor(Value),
    /// Conversion from a signed integer.
    Float(Value),
    Left(Value, u8),
    /// Arithmetic shift, which keeps the sign.
    Right(Value, u8),
    /// `a * b + c` in one rounding.
    MulAdd(Value, Value, Value),
    Test(Test, Value, Value),
    /// Operation on truth values.
    Logic(Logic, Value, Value),
    /// Selection by a truth value.
    Select(Value, Value, Value),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Two {
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
    /// `a * 2^b` for an integer `b`. Only at AVX-512.
    Scale,
}

/// A comparison, by its predicate in the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Test {
    Equal = 0,
    Unordered = 3,
    NotEqual = 4,
    Less = 17,
    LessOrEqual = 18,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Logic {
    And,
    Or,
    Xor,
}

/// Set of partial results: of the current round, or of the other round if two rounds are computed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Set {
    This,
    Other,
}

/// Store of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Effect {
    Tile(Slot, Value),
    /// Stores the value of a single index.
    One(Slot, Value),
    Truths(Slot, Value),
    There(u8, Value),
    /// Replaces the partial results of a fold.
    Sum(u8, Value),
}

/// Reduction over all indices. The function leaves 16 partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fold {
    pub(super) op: ReduceOp,
    /// Register of the partial results.
    pub(super) place: Slot,
}

impl Effect {
    pub(super) fn value(self) -> Value {
        match self {
            Effect::Tile(_, value)
            | Effect::One(_, value)
            | Effect::Truths(_, value)
            | Effect::There(_, value)
            | Effect::Sum(_, value) => value,
        }
    }
}

impl Lane {
    pub(super) fn operands(self) -> impl Iterator<Item = Value> {
        let [a, b, c] = match self {
            Lane::Constant(_)
            | Lane::One(_)
            | Lane::Tile(_)
            | Lane::Truths(_)
            | Lane::There(_)
            | Lane::Single(_)
            | Lane::Sum(..) => [None; 3],
            Lane::Root(a) | Lane::Floor(a) | Lane::Float(a) | Lane::Left(a, _) | Lane::Right(a, _) => {
                [Some(a), None, None]
            }
            Lane::Two(_, a, b) | Lane::Test(_, a, b) | Lane::Logic(_, a, b) => [Some(a), Some(b), None],
            Lane::MulAdd(a, b, c) | Lane::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        [a, b, c].into_iter().flatten()
    }

    /// Returns true if the value is a truth value in each lane.
    pub(super) fn is_truth(self) -> bool {
        matches!(self, Lane::Truths(_) | Lane::Test(..) | Lane::Logic(..))
    }
}

/// Program of vector instructions. Operands come before their users, and equal instructions share one value.
#[derive(Clone, Debug)]
pub(super) struct Lanes {
    pub(super) all: Vec<Lane>,
    pub(super) effects: Vec<Effect>,
    pub(super) folds: Vec<Fold>,
    /// For each pointer: bytes from a piece to the next piece, if the next piece is prefetched.
    pub(super) steps: Vec<Option<i32>>,
    known: FxHashMap<Lane, Value>,
    /// True for vectors of AVX-512.
    pub(super) wide: bool,
}

/// Programs are equal if they compute the same.
impl PartialEq for Lanes {
    fn eq(&self, other: &Lanes) -> bool {
        self.all == other.all
            && self.effects == other.effects
            && self.folds == other.folds
            && self.steps == other.steps
            && self.wide == other.wide
    }
}

impl Eq for Lanes {}

impl Hash for Lanes {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.all, &self.effects, &self.folds, &self.steps, self.wide).hash(state);
    }
}

const SIGN: u32 = 1 << 31;

impl Lanes {
    pub(super) fn new(wide: bool) -> Lanes {
        Lanes {
            all: Vec::new(),
            effects: Vec::new(),
            folds: Vec::new(),
            steps: Vec::new(),
            known: FxHashMap::default(),
            wide,
        }
    }

    /// Converts the program into a key for comparisons. No instruction may be added afterwards.
    pub(super) fn finished(self) -> Lanes {
        Lanes { known: FxHashMap::default(), ..self }
    }

    pub(super) fn push(&mut self, lane: Lane) -> Value {
        if let Some(&known) = self.known.get(&lane) {
            return known;
        }
        self.all.push(lane);
        let value = (self.all.len() - 1) as Value;
        self.known.insert(lane, value);
        value
    }

    fn bits(&mut self, bits: u32) -> Value {
        self.push(Lane::Constant(bits))
    }

    fn number(&mut self, number: f32) -> Value {
        self.bits(number.to_bits())
    }

    fn two(&mut self, two: Two, a: Value, b: Value) -> Value {
        self.push(Lane::Two(two, a, b))
    }

    fn add(&mut self, a: Value, b: Value) -> Value {
        self.two(Two::Add, a, b)
    }

    fn sub(&mut self, a: Value, b: Value) -> Value {
        self.two(Two::Sub, a, b)
    }

    fn mul(&mut self, a: Value, b: Value) -> Value {
        self.two(Two::Mul, a, b)
    }

    fn mul_add(&mut self, a: Value, b: Value, c: Value) -> Value {
        self.push(Lane::MulAdd(a, b, c))
    }

    fn test(&mut self, test: Test, a: Value, b: Value) -> Value {
        self.push(Lane::Test(test, a, b))
    }

    fn select(&mut self, truth: Value, a: Value, b: Value) -> Value {
        self.push(Lane::Select(truth, a, b))
    }

    fn magnitude(&mut self, a: Value) -> Value {
        let mask = self.bits(!SIGN);
        self.two(Two::And, a, mask)
    }

    /// Returns `a` with the sign of `sign`.
    fn with_sign(&mut self, a: Value, sign: Value) -> Value {
        let mask = self.bits(SIGN);
        let (magnitude, sign) = (self.magnitude(a), self.two(Two::And, sign, mask));
        self.two(Two::Or, magnitude, sign)
    }

    /// Evaluates a polynomial, highest power first, as `vecmath::polynomial`.
    fn polynomial(&mut self, x: Value, coefficients: &[f32]) -> Value {
        let mut sum = self.number(coefficients[0]);
        for &coefficient in &coefficients[1..] {
            let coefficient = self.number(coefficient);
            sum = self.mul_add(sum, x, coefficient);
        }
        sum
    }

    fn is_number(&self, a: Value) -> bool {
        matches!(self.all[usize::from(a)], Lane::Constant(bits) if !f32::from_bits(bits).is_nan())
    }

    /// Returns the maximum or the minimum: NaN if an operand is NaN, and the first of equal operands.
    fn extreme(&mut self, two: Two, a: Value, b: Value) -> Value {
        // The machine instruction returns its second operand if the operands are equal or unordered.
        let extreme = self.two(two, b, a);
        if self.is_number(b) {
            return extreme;
        }
        let (sum, unordered) = (self.add(a, b), self.test(Test::Unordered, a, b));
        self.select(unordered, sum, extreme)
    }

    pub(super) fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Option<Value> {
        Some(match op {
            BinaryOp::Add => self.add(a, b),
            BinaryOp::Sub => self.sub(a, b),
            BinaryOp::Mul => self.mul(a, b),
            BinaryOp::Div => self.two(Two::Div, a, b),
            BinaryOp::Min => self.extreme(Two::Min, a, b),
            BinaryOp::Max => self.extreme(Two::Max, a, b),
            BinaryOp::Pow | BinaryOp::Rem | BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => return None,
        })
    }

    /// Reduces a value over all indices.
    pub(super) fn fold(&mut self, op: ReduceOp, place: Slot, value: Value) {
        let fold = self.folds.len() as u8;
        self.folds.push(Fold { op, place });
        let sum = self.push(Lane::Sum(fold, Set::This));
        let sum = self.reduce(op, sum, value);
        self.effects.push(Effect::Sum(fold, sum));
    }

    /// Builds the program that joins the two sets of partial results of these folds.
    pub(super) fn join(folds: &[Fold], wide: bool) -> Lanes {
        let mut lanes = Lanes::new(wide);
        for (k, fold) in folds.iter().enumerate() {
            let [one, other] = [Set::This, Set::Other].map(|set| lanes.push(Lane::Sum(k as u8, set)));
            let sum = lanes.reduce(fold.op, one, other);
            lanes.effects.push(Effect::Sum(k as u8, sum));
        }
        lanes
    }

    pub(super) fn reduce(&mut self, op: ReduceOp, a: Value, b: Value) -> Value {
        match op {
            ReduceOp::Sum => self.add(a, b),
            ReduceOp::Prod => self.mul(a, b),
            ReduceOp::Min => self.extreme(Two::Min, a, b),
            ReduceOp::Max => self.extreme(Two::Max, a, b),
        }
    }

    pub(super) fn logic(&mut self, op: BinaryOp, a: Value, b: Value) -> Option<Value> {
        let logic = match op {
            BinaryOp::And => Logic::And,
            BinaryOp::Or => Logic::Or,
            BinaryOp::Xor => Logic::Xor,
            _ => return None,
        };
        Some(self.push(Lane::Logic(logic, a, b)))
    }

    pub(super) fn compare(&mut self, op: CompareOp, a: Value, b: Value) -> Value {
        let test = match op {
            CompareOp::Eq => Test::Equal,
            CompareOp::Lt => Test::Less,
            CompareOp::Le => Test::LessOrEqual,
        };
        self.test(test, a, b)
    }

    pub(super) fn choose(&mut self, truth: Value, a: Value, b: Value) -> Value {
        self.select(truth, a, b)
    }

    /// Returns true in each lane with a number other than zero.
    pub(super) fn truth(&mut self, a: Value) -> Value {
        let zero = self.number(0.0);
        self.test(Test::NotEqual, a, zero)
    }

    /// Returns 1 for true, and 0 for false.
    pub(super) fn number_of_truth(&mut self, a: Value) -> Value {
        let (one, zero) = (self.number(1.0), self.number(0.0));
        self.select(a, one, zero)
    }

    pub(super) fn unary(&mut self, op: UnaryOp, a: Value) -> Option<Value> {
        Some(match op {
            UnaryOp::Neg => {
                let sign = self.bits(SIGN);
                self.two(Two::Xor, a, sign)
            }
            UnaryOp::Abs => self.magnitude(a),
            UnaryOp::Sign => {
                let (zero, one) = (self.number(0.0), self.number(1.0));
                let unit = self.with_sign(one, a);
                let (none, unordered) = (self.test(Test::Equal, a, zero), self.test(Test::Unordered, a, a));
                let unit = self.select(none, a, unit);
                self.select(unordered, a, unit)
            }
            UnaryOp::Floor => self.push(Lane::Floor(a)),
            UnaryOp::Sqrt => self.push(Lane::Root(a)),
            UnaryOp::Rsqrt => {
                let (one, root) = (self.number(1.0), self.push(Lane::Root(a)));
                self.two(Two::Div, one, root)
            }
            UnaryOp::Exp => self.exp(a),
            UnaryOp::Log => self.log(a),
            UnaryOp::Tanh => self.tanh(a),
            UnaryOp::Sigmoid => self.sigmoid(a),
            UnaryOp::Erf => self.erf(a),
            UnaryOp::ToF16 => self.nearest_f16(a),
            UnaryOp::ToBf16 => self.nearest_bf16(a),
            UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Atan | UnaryOp::Not => return None,
        })
    }

    /// Rounds `bits` to the bits above the lowest `dropped` bits. Ties go to even.
    fn rounded_bits(&mut self, bits: Value, dropped: u8) -> Value {
        let (one, half) = (self.bits(1), self.bits((1 << (dropped - 1)) - 1));
        let last = self.push(Lane::Right(bits, dropped));
        let last = self.two(Two::And, last, one);
        let (above, kept) = (self.two(Two::AddInteger, bits, half), self.bits(!0 << dropped));
        let above = self.two(Two::AddInteger, above, last);
        self.two(Two::And, above, kept)
    }

    /// Makes a NaN quiet, and clears its lowest `dropped` bits, which a narrower type cannot store.
    fn quiet(&mut self, nan: Value, dropped: u8) -> Value {
        let (kept, quiet) = (self.bits(!0 << dropped), self.bits(0x7fc0_0000));
        let kept = self.two(Two::And, nan, kept);
        self.two(Two::Or, kept, quiet)
    }

    fn nearest_bf16(&mut self, x: Value) -> Value {
        let (rounded, quiet) = (self.rounded_bits(x, 16), self.quiet(x, 16));
        let unordered = self.test(Test::Unordered, x, x);
        self.select(unordered, quiet, rounded)
    }

    /// As `F16::nearest`.
    fn nearest_f16(&mut self, x: Value) -> Value {
        let magnitude = self.magnitude(x);
        let (normal, quiet) = (self.rounded_bits(magnitude, 13), self.quiet(magnitude, 13));
        let (least, half) = (self.number(2f32.powi(-14)), self.number(0.5));
        let subnormal = self.add(magnitude, half);
        let subnormal = self.sub(subnormal, half);
        let (is_small, limit) = (self.test(Test::Less, magnitude, least), self.number(65520.0));
        let (is_large, infinity) =
            (self.test(Test::LessOrEqual, limit, magnitude), self.number(f32::INFINITY));
        let result = self.select(is_small, subnormal, normal);
        let result = self.select(is_large, infinity, result);
        let unordered = self.test(Test::Unordered, x, x);
        let result = self.select(unordered, quiet, result);
        self.with_sign(result, x)
    }

    fn exp(&mut self, x: Value) -> Value {
        use crate::vecmath::ROUND;
        use ortrain_expr::coefficients::{EXP, EXP_LEAST, LN2_HIGH, LN2_LOW};
        let (most, least) = (self.number(89.0), self.number(EXP_LEAST));
        let clamped = self.two(Two::Min, most, x);
        let clamped = self.two(Two::Max, least, clamped);
        let (log2_e, round) = (self.number(std::f32::consts::LOG2_E), self.number(ROUND));
        let rounded = self.mul_add(clamped, log2_e, round);
        let n = self.sub(rounded, round);
        let (high, low) = (self.number(-LN2_HIGH), self.number(-LN2_LOW));
        let r = self.mul_add(n, high, clamped);
        let r = self.mul_add(n, low, r);
        let q = self.polynomial(r, &EXP);
        let (square, one) = (self.mul(r, r), self.number(1.0));
        let p = self.mul_add(q, square, r);
        let p = self.add(p, one);
        if self.wide {
            // One instruction. Like the two multiplications below, it rounds once, if at all.
            return self.two(Two::Scale, p, n);
        }
        let n = self.two(Two::SubInteger, rounded, round);
        let half = self.push(Lane::Right(n, 1));
        let rest = self.two(Two::SubInteger, n, half);
        let bias = self.bits(127);
        let mut power = |n: Value| {
            let exponent = self.two(Two::AddInteger, n, bias);
            self.push(Lane::Left(exponent, 23))
        };
        let (half, rest) = (power(half), power(rest));
        let p = self.mul(p, half);
        self.mul(p, rest)
    }

    fn log(&mut self, x: Value) -> Value {
        use ortrain_expr::coefficients::{LN2_HIGH, LN2_LOW, LOG, SQRT_HALF_BITS};
        let (zero, one, two) = (self.number(0.0), self.number(1.0), self.number(2.0));
        // As `vecmath::split`.
        let least = self.number(f32::MIN_POSITIVE);
        let subnormal = self.test(Test::Less, x, least);
        let factor = self.number(16_777_216.0);
        let scaled = self.mul(x, factor);
        let scaled = self.select(subnormal, scaled, x);
        let shift = self.number(-24.0);
        let correction = self.select(subnormal, shift, zero);
        let root = self.bits(SQRT_HALF_BITS);
        let shifted = self.two(Two::SubInteger, scaled, root);
        let exponent = self.push(Lane::Right(shifted, 23));
        let mask = self.bits(0x007f_ffff);
        let m = self.two(Two::And, shifted, mask);
        let m = self.two(Two::AddInteger, m, root);
        let k = self.push(Lane::Float(exponent));
        let k = self.add(k, correction);

        let f = self.sub(m, one);
        let sum = self.add(two, f);
        let s = self.two(Two::Div, f, sum);
        let z = self.mul(s, s);
        let r = self.polynomial(z, &LOG);
        let r = self.mul(z, r);
        let half = self.number(0.5);
        let half_square = self.mul(half, f);
        let half_square = self.mul(half_square, f);
        let (high, low) = (self.number(LN2_HIGH), self.number(LN2_LOW));
        let small = self.add(half_square, r);
        let small = self.mul(s, small);
        let small = self.mul_add(k, low, small);
        let rest = self.sub(small, half_square);
        let rest = self.add(rest, f);
        let y = self.mul_add(k, high, rest);
        let infinity = self.number(f32::INFINITY);
        let infinite = self.test(Test::Equal, x, infinity);
        let y = self.select(infinite, x, y);
        let (least, none) = (self.number(f32::NEG_INFINITY), self.test(Test::Equal, x, zero));
        let y = self.select(none, least, y);
        let (defined, nan) = (self.test(Test::LessOrEqual, zero, x), self.number(f32::NAN));
        self.select(defined, y, nan)
    }

    fn tanh(&mut self, x: Value) -> Value {
        use ortrain_expr::coefficients::{TANH, TANH_SMALL};
        let t = self.magnitude(x);
        let z = self.mul(x, x);
        let p = self.polynomial(z, &TANH);
        let small = self.mul(p, z);
        let small = self.mul_add(small, x, x);
        let twice = self.add(t, t);
        let e = self.exp(twice);
        let (one, two) = (self.number(1.0), self.number(2.0));
        let sum = self.add(e, one);
        let rest = self.two(Two::Div, two, sum);
        let large = self.sub(one, rest);
        let bound = self.number(TANH_SMALL);
        let is_small = self.test(Test::Less, t, bound);
        let y = self.select(is_small, small, large);
        self.with_sign(y, x)
    }

    fn sigmoid(&mut self, x: Value) -> Value {
        let (sign, zero, one) = (self.bits(SIGN), self.number(0.0), self.number(1.0));
        let below = self.two(Two::Or, x, sign);
        let e = self.exp(below);
        let negative = self.test(Test::Less, x, zero);
        let numerator = self.select(negative, e, one);
        let sum = self.add(one, e);
        let y = self.two(Two::Div, numerator, sum);
        let unordered = self.test(Test::Unordered, x, x);
        self.select(unordered, x, y)
    }

    fn erf(&mut self, x: Value) -> Value {
        use ortrain_expr::coefficients::{ERF, ERF_END, ERF_LARGE, ERF_SMALL};
        let t = self.magnitude(x);
        let z = self.mul(x, x);
        let p = self.polynomial(z, &ERF);
        let small = self.mul_add(p, x, x);
        let end = self.number(ERF_END);
        let clamped = self.two(Two::Min, end, t);
        let one = self.number(1.0);
        let past = self.sub(clamped, one);
        let q = self.polynomial(past, &ERF_LARGE);
        let sign = self.bits(SIGN);
        let below = self.two(Two::Xor, z, sign);
        let e = self.exp(below);
        let large = self.mul_add(e, q, one);
        let bound = self.number(ERF_SMALL);
        let is_small = self.test(Test::Less, t, bound);
        let y = self.select(is_small, small, large);
        self.with_sign(y, x)
    }
}
