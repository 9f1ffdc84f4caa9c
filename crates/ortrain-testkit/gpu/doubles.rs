//! 64-bit floats on the device: bitwise equal to the reference evaluator, also if kernels compute them with integer
//! arithmetic.

use super::nests::{Results, Space, assert_agrees, differences, program};
use ortrain_expr::{
    BinaryOp, Builder, CompareOp, DType, Inst, ReduceOp, Reg, Scalar, Segments, Type, UnaryOp,
};

fn bytes_of(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Deterministic pseudorandom bits.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0xd129_42bf_3f4d_c0a5).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 32)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ (mixed >> 29)
    }

    /// Returns a number with this exponent: with few significant bits, with a run of ones, or with random bits.
    fn value_with_exponent(&mut self, exponent: u64) -> f64 {
        let digits = match self.next() % 4 {
            0 => self.next() << (26 + self.next() % 26),
            1 => u64::MAX << (self.next() % 52),
            _ => self.next(),
        };
        f64::from_bits((self.next() & 1 << 63) | exponent << 52 | digits & ((1 << 52) - 1))
    }
}

/// Returns numbers at the ends of the range and around one, their neighbours, and NaN.
fn specials() -> Vec<f64> {
    let sizes = [
        0.0,
        f64::from_bits(1),
        f64::from_bits(3),
        f64::from_bits((1 << 52) - 1),
        f64::MIN_POSITIVE,
        f64::MIN_POSITIVE.next_up(),
        f64::EPSILON / 2.0,
        f64::EPSILON,
        0.5,
        1f64.next_down(),
        1.0,
        1f64.next_up(),
        1.5,
        2.0,
        3.0,
        9_007_199_254_740_991.0,
        9_007_199_254_740_992.0,
        9_007_199_254_740_993.5,
        f64::MAX / 2.0,
        f64::MAX.next_down(),
        f64::MAX,
        f64::INFINITY,
        f64::NAN,
        f64::from_bits(0x7ff0_0000_0000_0001),
    ];
    sizes.into_iter().flat_map(|size| [size, -size]).collect()
}

/// Number of random pairs of each kind.
const PAIRS: usize = 8_000;

/// Returns all pairs of special numbers, and random pairs. Their exponents are arbitrary, close to each other, or such
/// that a product or quotient is at an end of the range.
fn pairs() -> (Vec<f64>, Vec<f64>) {
    let specials = specials();
    let mut pairs: Vec<(f64, f64)> =
        specials.iter().flat_map(|&a| specials.iter().map(move |&b| (a, b))).collect();
    let mut bits = Bits(1);
    for _ in 0..PAIRS {
        let exponent = bits.next() % 2048;
        let small = 1 + bits.next() % 1022;
        let around =
            |bits: &mut Bits, max_delta: u64| (bits.next() % (2 * max_delta + 1)) as i64 - max_delta as i64;
        let to = |middle: u64, by: i64| (middle as i64 + by).clamp(0, 2046) as u64;
        let others = [
            (exponent, bits.next() % 2048),
            (exponent, to(exponent, around(&mut bits, 60))),
            (exponent, to(exponent, around(&mut bits, 2))),
            (small, to(1022 - small, around(&mut bits, 58))),
            (small, to(small + 1022, around(&mut bits, 58))),
            (small + 1022, to(3070 - (small + 1022), around(&mut bits, 3))),
        ];
        pairs.extend(others.map(|(a, b)| (bits.value_with_exponent(a), bits.value_with_exponent(b))));
    }
    pairs.into_iter().unzip()
}

#[test]
fn functions_of_two_numbers() {
    let (a, b) = pairs();
    let binary = [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Div, BinaryOp::Min, BinaryOp::Max];
    let compares = [CompareOp::Eq, CompareOp::Lt, CompareOp::Le];
    let program = program(&Space::one_segment(a.len()), &[DType::F64; 2], |e, regs| {
        let (x, y) = (regs[0], regs[1]);
        let mut each: Vec<(Reg, DType)> = binary.iter().map(|&op| (e.binary(op, x, y), DType::F64)).collect();
        each.extend(compares.iter().map(|&op| (e.compare(op, x, y), DType::Bool)));
        let less = e.compare(CompareOp::Lt, x, y);
        each.push((e.select(less, y, x), DType::F64));
        Results { each, ..Results::default() }
    });
    assert_agrees(&program, &[bytes_of(&a), bytes_of(&b)], |k, at| {
        let names =
            binary.iter().map(|op| format!("{op:?}")).chain(compares.iter().map(|op| format!("{op:?}")));
        let name = names.chain(["Select".to_owned()]).nth(k).expect("a result");
        format!("{name} of {:?} ({:#x}) and {:?} ({:#x})", a[at], a[at].to_bits(), b[at], b[at].to_bits())
    });
}

/// Returns numbers of each exponent, and numbers around critical values: powers of two, the ends of integer types, and
/// midpoints between narrower floats.
fn numbers() -> Vec<f64> {
    let mut bits = Bits(2);
    let mut numbers = specials();
    numbers.extend((0..8 * 2048).map(|k| bits.value_with_exponent(k / 8)));
    for power in 0..=66 {
        let middle = 2f64.powi(power);
        let neighbors = [-1.0, -0.5, 0.5, 1.0].map(|by| middle + by);
        let candidates = neighbors.into_iter().chain([middle, middle.next_up(), middle.next_down()]);
        numbers.extend(candidates.flat_map(|x| [x, -x, x.next_up(), x.next_down()]));
    }
    let narrow = (0..8_000).map(|_| f64::from(f32::from_bits(bits.next() as u32)));
    let ends =
        [f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x7f_ffff), 0.0].map(f64::from);
    for x in narrow.chain(ends).filter(|x| x.is_finite()).collect::<Vec<f64>>() {
        // A midpoint between two 32-bit floats differs from the lower one in bit 28. Half of the smallest subnormal
        // rounds to zero.
        let half = f64::from_bits(x.to_bits() + (1 << 28));
        let under = x / 2.0;
        numbers.extend([x, half, half.next_up(), half.next_down(), under, under.next_up()]);
    }
    numbers
}

#[test]
fn functions_of_one_number() {
    let a = numbers();
    let functions = [
        UnaryOp::Neg,
        UnaryOp::Abs,
        UnaryOp::Sign,
        UnaryOp::Floor,
        UnaryOp::Round,
        UnaryOp::Sqrt,
        UnaryOp::Rsqrt,
        UnaryOp::ToF16,
        UnaryOp::ToBf16,
    ];
    let program = program(&Space::one_segment(a.len()), &[DType::F64], |e, regs| {
        let each = functions.iter().map(|&op| (e.unary(op, regs[0]), DType::F64)).collect();
        Results { each, ..Results::default() }
    });
    assert_agrees(&program, &[bytes_of(&a)], |k, at| {
        format!("{:?} of {:?} ({:#x})", functions[k], a[at], a[at].to_bits())
    });
}

const ALL: [DType; 13] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::U64,
    DType::I32,
    DType::U32,
    DType::I16,
    DType::U16,
    DType::I8,
    DType::U8,
    DType::Bool,
];

/// Conversion to every type: by an instruction, and by a store.
#[test]
fn doubles_become_other_types() {
    let a = numbers();
    let program = program(&Space::one_segment(a.len()), &[DType::F64], |e, regs| {
        let converted = ALL.map(|to| (e.convert(regs[0], Type::of(to)), to));
        let stored = ALL.map(|to| (regs[0], to));
        Results { each: converted.into_iter().chain(stored).collect(), ..Results::default() }
    });
    assert_agrees(&program, &[bytes_of(&a)], |k, at| {
        format!("{:?} ({:#x}) as {}", a[at], a[at].to_bits(), ALL[k % 13])
    });
}

#[test]
fn other_types_become_doubles() {
    let mut bits = Bits(3);
    for from in ALL {
        let mut words: Vec<u64> = (0..20_000).map(|k| bits.next() >> (k % 64)).collect();
        words.extend((0..=64).flat_map(|power| {
            let middle = if power == 64 { 0 } else { 1u64 << power };
            [middle, middle.wrapping_sub(1), middle.wrapping_add(1), middle.wrapping_neg(), middle | 1 << 63]
        }));
        // Near midpoints between two floats, with all 64 bits in use.
        words.extend((0x3f0..0x410).flat_map(|low| [1 << 63 | low, 1 << 63 | 0x800 | low, !0xfff | low]));
        // Floats of each exponent, too.
        words.extend((0..2048u64).map(|k| k << 52 | bits.next() >> 12));
        words.extend((0..256u64).map(|k| k << 23 | bits.next() >> 41));
        let mask = if from == DType::Bool { 1 } else { u64::MAX };
        let bytes =
            words.iter().flat_map(|word| (word & mask).to_le_bytes().into_iter().take(from.size())).collect();
        let program = program(&Space::one_segment(words.len()), &[from], |e, regs| {
            let wide = e.convert(regs[0], Type::F64);
            // Also an integer that is known to be small.
            let column = e.coordinate(1);
            let small = e.convert(column, Type::F64);
            let each = vec![(wide, DType::F64), (regs[0], DType::F64), (small, DType::F64)];
            Results { each, ..Results::default() }
        });
        assert_agrees(&program, &[bytes], |_, at| format!("{:#x} of {from} as float64", words[at]));
    }
}

/// Returns rows for reductions: numbers of many magnitudes and both signs, subnormal numbers, and special numbers.
fn rows(count: usize, len: usize) -> Vec<f64> {
    let mut bits = Bits(4);
    let specials = specials();
    let sample = |at: usize| match at / len % 4 {
        0 => bits.value_with_exponent(0),
        1 if at.is_multiple_of(5) => specials[bits.next() as usize % specials.len()],
        _ => {
            let exponent = 1013 + bits.next() % 20;
            bits.value_with_exponent(exponent)
        }
    };
    (0..count * len).map(sample).collect()
}

const REDUCTIONS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];

/// Returns all reductions, a second pass that depends on the first, and a clip by the norm at each point.
fn reduced(e: &mut Builder, regs: &[Reg]) -> Results {
    let x = regs[0];
    let square = e.mul(x, x);
    let mut reductions: Vec<(ReduceOp, Reg)> = REDUCTIONS.iter().map(|&op| (op, x)).collect();
    reductions.push((ReduceOp::Sum, square));
    let totals: Vec<Reg> = (0..reductions.len()).map(|k| e.reduced(k, Type::F64)).collect();
    let norm = e.unary(UnaryOp::Sqrt, totals[4]);
    let size = e.constant(Type::F64, 36.0);
    let mean = e.div(totals[0], size);
    let centered = e.sub(x, mean);
    reductions.push((ReduceOp::Sum, centered));
    let rest = e.reduced(5, Type::F64);
    let limit = e.constant(Type::F64, 0.7);
    let is_large = e.compare(CompareOp::Lt, limit, norm);
    let one = e.constant(Type::F64, 1.0);
    let share = e.div(limit, norm);
    let factor = e.select(is_large, share, one);
    let clipped = e.mul(x, factor);
    let by_row = totals.into_iter().chain([norm, rest]).map(|reg| (reg, DType::F64)).collect();
    Results {
        each: vec![(clipped, DType::F64), (clipped, DType::F32)],
        by_row,
        reductions,
        ..Results::default()
    }
}

#[test]
fn rows_are_reduced() {
    // Longer rows are summed by groups, in another order than the reference.
    let space = Space { rows: 60, len: 32, segments: None };
    let values = rows(space.rows, space.len);
    let program = program(&space, &[DType::F64], reduced);
    assert_agrees(&program, &[bytes_of(&values)], |k, at| format!("result {k} at {at}"));
}

#[test]
fn segments_are_reduced() {
    let ends = [0, 1, 36, 36, 100, 137, 600, 1990];
    // Gaps between the segments.
    let segments = Segments::new(ends.windows(2).map(|pair| pair[0] + (pair[1] - pair[0]) / 9..pair[1]));
    let space = Space { rows: segments.len(), len: 2000, segments: Some(segments.clone()) };
    let values = rows(50, 40);
    let program = program(&space, &[DType::F64], reduced);
    let mut actual = differences(&program, &[bytes_of(&values)]);
    // Nothing is stored outside of segments. The first two results have an element at every point.
    actual.retain(|difference| {
        difference.result > 1 || segments.iter().any(|range| range.contains(&difference.at))
    });
    assert!(actual.is_empty(), "{} differ: {:?}", actual.len(), actual[0]);
}

/// Loads by computed index, zero out of range; constants of each kind.
#[test]
fn elements_are_gathered() {
    let a: Vec<f64> = specials();
    let mut bits = Bits(5);
    let numbers: Vec<i64> = a.iter().map(|_| (bits.next() % 64) as i64 - 8).collect();
    let constants = [f64::from_bits(0x8000_0000_0000_0001), -0.1, f64::NEG_INFINITY, f64::NAN, 1e300];
    let program = program(&Space::one_segment(a.len()), &[DType::F64, DType::I64], |e, regs| {
        let gathered = e.load_at(0, regs[1], Type::F64);
        let mut each = vec![(gathered, DType::F64)];
        let column = e.coordinate(1);
        for (k, &constant) in constants.iter().enumerate() {
            let value = e.push(Inst::Const(Scalar::F64(constant)), Type::F64);
            let at = e.int(k as i64);
            let is_there = e.compare(CompareOp::Le, at, column);
            each.push((e.select(is_there, value, gathered), DType::F64));
        }
        Results { each, tables: vec![0], ..Results::default() }
    });
    let indices = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    assert_agrees(&program, &[bytes_of(&a), indices], |k, at| {
        format!("result {k} at {at}, of number {}", numbers[at])
    });
}
