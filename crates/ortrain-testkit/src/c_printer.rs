//! C printer of maps: an interpreter of programs that is independent of the backends.
//!
//! It implements the semantics of nests and expressions without any backend code. It therefore shows that
//! their semantics suffice to print a program in another language. The test `c_printer` compiles the output
//! and compares it with the reference evaluator.

use std::fmt::Write;

use ortrain_expr::{Access, CompareOp, Inst, RunScalar, Scalar, Type};
use ortrain_program::{Load, Nest};

/// Prints a C function with this name that computes a map; [`PRELUDE`] must precede it. Returns `None` for a
/// nest that is no pure map: a nest with reductions, segments or accumulators.
///
/// In `int name(void **buffers, const uint64_t *run, int64_t *failed)`, operand `k` of [`Nest::operands`] is
/// `buffers[k]`, and `run` points to the seed and the number of training steps. The function returns 0, or 1
/// after a failed guard: then `failed` holds the point, the index and its bound
/// ([`ortrain_expr::OutOfRange`]).
#[must_use]
pub fn print_map(nest: &Nest, name: &str) -> Option<String> {
    if !nest.is_map() || nest.segments.is_some() || nest.num_accumulators() > 0 {
        return None;
    }
    let mut c = format!("int {name}(void **buffers, const uint64_t *run, int64_t *failed) {{\n");
    let mut point = "0".to_owned();
    for (axis, size) in nest.dims.iter().enumerate() {
        c += &format!("for (I64 i{axis} = 0; i{axis} < {size}; ++i{axis})\n");
        point = format!("({point}) * {size} + i{axis}");
    }
    c += "{\n";
    for (k, &(inst, ty)) in nest.expr.insts().iter().enumerate() {
        if let Inst::Guard(index, bound) = inst {
            let (index, bound) = (index.0, bound.0);
            let _ = writeln!(c, "if (r{index} < 0 || r{index} >= r{bound})");
            let _ = writeln!(c, "return failed[0] = {point}, failed[1] = r{index}, failed[2] = r{bound}, 1;");
        }
        let _ = writeln!(c, "const {ty:?} r{k} = {};", value(nest, inst, ty)?);
    }
    for (k, (store, result)) in nest.stores.iter().zip(nest.expr.outputs()).enumerate() {
        let (dtype, at) = (store.access.dtype, position(&store.access));
        let result = converted(format!("r{}", result.0), nest.expr.ty(*result), Type::of(dtype));
        let _ = writeln!(c, "write_{dtype:?}(buffers[{}], {at}, {result});", nest.loads.len() + k);
    }
    Some(c + "}\nreturn 0;\n}\n")
}

/// Prints the value of an instruction, in terms of earlier ones.
fn value(nest: &Nest, inst: Inst, ty: Type) -> Option<String> {
    let access = |slot: u16| nest.loads.get(usize::from(slot)).and_then(Load::access);
    Some(match inst {
        Inst::Const(value) => constant(value.convert(ty)),
        Inst::Load(slot) => {
            let from = access(slot)?;
            let element = format!("read_{:?}(buffers[{slot}], {})", from.dtype, position(from));
            converted(element, Type::of(from.dtype), ty)
        }
        Inst::LoadAt(slot, index) => {
            let (Access { dtype, offset, len, .. }, index) = (access(slot)?, index.0);
            let element = format!("read_{dtype:?}(buffers[{slot}], {offset} + r{index})");
            let inside = format!("r{index} >= 0 && r{index} < {}", len.saturating_sub(*offset));
            converted(format!("({inside} ? {element} : 0)"), Type::of(*dtype), ty)
        }
        Inst::Coordinate(axis) => format!("i{axis}"),
        Inst::Run(RunScalar::Seed) => "run[0]".into(),
        Inst::Run(RunScalar::TrainStep) => "run[1]".into(),
        Inst::Reduced(_) => return None,
        Inst::Unary(op, a) => format!("{op:?}_{ty:?}(r{})", a.0),
        Inst::Binary(op, a, b) => format!("{op:?}_{ty:?}(r{}, r{})", a.0, b.0),
        Inst::Compare(CompareOp::Eq, a, b) => format!("r{} == r{}", a.0, b.0),
        Inst::Compare(CompareOp::Lt, a, b) => format!("r{} < r{}", a.0, b.0),
        Inst::Compare(CompareOp::Le, a, b) => format!("r{} <= r{}", a.0, b.0),
        Inst::Select(which, a, b) => format!("r{} ? r{} : r{}", which.0, a.0, b.0),
        Inst::Convert(a) => converted(format!("r{}", a.0), nest.expr.ty(a), ty),
        Inst::Guard(index, _) => format!("r{}", index.0),
        Inst::Random(key, stream, index) => format!("random_bits(r{}, r{}, r{})", key.0, stream.0, index.0),
    })
}

/// Prints the index of an element at the current loop indices.
fn position(access: &Access) -> String {
    let steps = access.strides.iter().enumerate().filter(|(_, stride)| **stride != 0);
    steps.fold(access.offset.to_string(), |at, (axis, stride)| format!("{at} + i{axis} * {stride}"))
}

/// Prints a conversion: a cast, except for conversions that C leaves undefined.
fn converted(value: String, from: Type, to: Type) -> String {
    match (from, to) {
        _ if from == to => value,
        (Type::F32 | Type::F64, Type::I32 | Type::I64 | Type::U32 | Type::U64) => {
            format!("{to:?}_of({value})")
        }
        _ => format!("({to:?})({value})"),
    }
}

fn constant(value: Scalar) -> String {
    match value {
        Scalar::F32(v) if v.is_finite() => format!("{v:?}f"),
        Scalar::F64(v) if v.is_finite() => format!("{v:?}"),
        Scalar::F32(_) | Scalar::F64(_) if value.to_f64().is_nan() => "NAN".into(),
        Scalar::F32(_) | Scalar::F64(_) => if value.to_f64() > 0.0 { "INFINITY" } else { "-INFINITY" }.into(),
        _ => format!("({:?})UINT64_C({})", value.ty(), value.bits()),
    }
}

/// C code that printed functions require: types, memory accesses, and operations that C leaves undefined or
/// does not have.
///
/// It is C99 with IEEE 754 arithmetic. Compile it without contraction of products and sums, and link the
/// mathematical library.
pub const PRELUDE: &str = r"
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef float F32;
typedef double F64;
typedef int32_t I32;
typedef int64_t I64;
typedef uint32_t U32;
typedef uint64_t U64;
typedef bool Bool;

#define UNARY(T, OP, VALUE) static inline T OP##_##T(T a) { return (T)(VALUE); }
#define BINARY(T, OP, VALUE) static inline T OP##_##T(T a, T b) { return (T)(VALUE); }

/* Functions of one float are computed in double and rounded once. */
#define FLOATS(T) \
  UNARY(T, Neg, -a) UNARY(T, Abs, fabs(a)) UNARY(T, Sign, a == 0 || isnan(a) ? a : copysign(1, a)) \
  UNARY(T, Exp, exp(a)) UNARY(T, Log, log(a)) UNARY(T, Sqrt, sqrt(a)) UNARY(T, Rsqrt, 1 / sqrt(a)) \
  UNARY(T, Sin, sin(a)) UNARY(T, Cos, cos(a)) UNARY(T, Atan, atan(a)) UNARY(T, Erf, erf(a)) \
  UNARY(T, Tanh, tanh(a)) UNARY(T, Sigmoid, 1 / (1 + exp(-(double)a))) \
  UNARY(T, Floor, floor(a)) UNARY(T, Round, rint(a)) \
  BINARY(T, Add, a + b) BINARY(T, Sub, a - b) BINARY(T, Mul, a * b) BINARY(T, Div, a / b) \
  BINARY(T, Rem, fmod(a, b)) BINARY(T, Pow, pow(a, b)) \
  BINARY(T, Min, isnan(a) || isnan(b) ? a + b : a <= b ? a : b) \
  BINARY(T, Max, isnan(a) || isnan(b) ? a + b : a >= b ? a : b)
FLOATS(F32)
FLOATS(F64)

static inline I64 integer_power(I64 base, I64 exponent) {
  if (exponent < 0 || exponent > UINT32_MAX)
    return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
  U64 power = 1, square = (U64)base;
  for (; exponent > 0; exponent /= 2, square *= square)
    if (exponent % 2 == 1) power *= square;
  return (I64)power;
}

/* Integers wrap: U is the unsigned type of the size of T. The quotient of the least integer by -1 is no number of C. */
#define INTEGERS(T, U) \
  UNARY(T, Neg, 0 - (U)a) UNARY(T, Abs, a < 0 ? 0 - (U)a : (U)a) UNARY(T, Sign, (a > 0) - (a < 0)) \
  UNARY(T, Floor, a) UNARY(T, Round, a) \
  BINARY(T, Add, (U)a + (U)b) BINARY(T, Sub, (U)a - (U)b) BINARY(T, Mul, (U)a * (U)b) \
  BINARY(T, Div, b == 0 ? 0 : (T)-1 < 0 && b == (T)-1 ? 0 - (U)a : (U)(a / b)) \
  BINARY(T, Rem, b == 0 || ((T)-1 < 0 && b == (T)-1) ? 0 : a % b) \
  BINARY(T, Pow, integer_power((I64)a, (I64)b)) BINARY(T, Min, a < b ? a : b) BINARY(T, Max, a > b ? a : b) \
  BINARY(T, And, a & b) BINARY(T, Or, a | b) BINARY(T, Xor, a ^ b)
INTEGERS(I32, U32)
INTEGERS(I64, U64)
INTEGERS(U32, U32)
INTEGERS(U64, U64)

UNARY(Bool, Not, !a) BINARY(Bool, And, a && b) BINARY(Bool, Or, a || b) BINARY(Bool, Xor, a != b)

/* Floats become integers by truncation; NaN becomes 0, and what is too large the integer that is nearest to it. */
#define OF_FLOAT(T, LEAST, MOST) static inline T T##_of(double x) { \
  return isnan(x) ? 0 : x <= (double)LEAST ? LEAST : x >= (double)MOST ? MOST : (T)x; }
OF_FLOAT(I32, INT32_MIN, INT32_MAX)
OF_FLOAT(I64, INT64_MIN, INT64_MAX)
OF_FLOAT(U32, 0, UINT32_MAX)
OF_FLOAT(U64, 0, UINT64_MAX)

static inline F32 from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  const double size = exponent == 31 ? (digits ? NAN : INFINITY)
    : exponent > 0 ? ldexp(digits + 1024, exponent - 25) : ldexp(digits, -24);
  return (F32)(bits >> 15 ? -size : size);
}

static inline uint16_t to_f16(F32 value) {
  const double size = fabs(value);
  const int sign = signbit(value) ? 0x8000 : 0, exponent = size < 0x1p-14 ? -14 : size < 0x1p16 ? ilogb(size) : 16;
  if (isnan(value)) return 0x7e00;
  if (exponent > 15) return (uint16_t)(sign | 0x7c00);
  return (uint16_t)(sign | (((exponent + 14) << 10) + (int)nearbyint(ldexp(size, 10 - exponent))));
}

static inline F32 from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  F32 value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static inline uint16_t to_bf16(F32 value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

UNARY(F32, ToF16, from_f16(to_f16(a))) UNARY(F32, ToBf16, from_bf16(to_bf16(a)))

/* Elements in memory: E is how one is stored, T the type in which it is computed. */
#define ELEMENTS(D, E, T, FROM, TO) \
  static inline T read_##D(const void *buffer, I64 at) { return FROM(((const E *)buffer)[at]); } \
  static inline void write_##D(void *buffer, I64 at, T value) { ((E *)buffer)[at] = TO(value); }
ELEMENTS(F16, uint16_t, F32, from_f16, to_f16)
ELEMENTS(BF16, uint16_t, F32, from_bf16, to_bf16)
ELEMENTS(F32, float, F32, (F32), (float))
ELEMENTS(F64, double, F64, (F64), (double))
ELEMENTS(I8, int8_t, I32, (I32), (int8_t))
ELEMENTS(I16, int16_t, I32, (I32), (int16_t))
ELEMENTS(I32, int32_t, I32, (I32), (int32_t))
ELEMENTS(I64, int64_t, I64, (I64), (int64_t))
ELEMENTS(U8, uint8_t, U32, (U32), (uint8_t))
ELEMENTS(U16, uint16_t, U32, (U32), (uint16_t))
ELEMENTS(U32, uint32_t, U32, (U32), (uint32_t))
ELEMENTS(U64, uint64_t, U64, (U64), (uint64_t))
ELEMENTS(Bool, uint8_t, Bool, (Bool), (uint8_t))

/* Word index % 4 of block index / 4 by Philox4x32-10. */
static inline U32 random_bits(U64 key, U64 stream, U64 index) {
  U32 words[4] = {(U32)(index / 4), (U32)(index / 4 >> 32), (U32)stream, (U32)(stream >> 32)};
  U32 low = (U32)key, high = (U32)(key >> 32);
  for (int round = 0; round < 10; ++round, low += 0x9E3779B9, high += 0xBB67AE85) {
    const U64 even = (U64)0xD2511F53 * words[0], odd = (U64)0xCD9E8D57 * words[2];
    words[0] = (U32)(odd >> 32) ^ words[1] ^ low;
    words[2] = (U32)(even >> 32) ^ words[3] ^ high;
    words[1] = (U32)odd;
    words[3] = (U32)even;
  }
  return words[index % 4];
}
";
