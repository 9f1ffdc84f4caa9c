//! The loops of tile programs: one per operation and type, over tile registers, compiled per level.
//!
//! Registers are scratch memory of one worker, so slices over registers are sound. The result of an operation is never
//! the register of one of its operands, except where a function says so.

use std::marker::PhantomData;

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, Type, UnaryOp};

use super::number::{Bf16, F16, Float, Float16, Number, with_number};
use crate::isa::portable::Portable;
use crate::isa::{Isa, Level, Work};

trait Function1 {
    type A: Copy;
    type Out;
    fn call<L: Level>(a: Self::A) -> Self::Out;

    /// True if [`Function1::rare`] handles some arguments instead of `call`.
    const HAS_RARE: bool = false;

    /// Returns the result for a rare argument, and `None` for every other argument. Need not become vector code.
    #[inline(always)]
    fn rare(_: Self::A) -> Option<Self::Out> {
        None
    }
}

trait Function2 {
    type A: Copy;
    type Out;
    fn call<L: Level>(a: Self::A, b: Self::A) -> Self::Out;
}

/// Operand of an operation: a value for each index, contiguous at any alignment, or one value for all indices.
///
/// The operand may be in callers' memory, which is only read through raw pointers.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) at: *const u8,
    pub(crate) is_uniform: bool,
}

/// An operand of known type. `ONE` is true if the operand is one value for all indices.
#[derive(Clone, Copy)]
struct Values<T, const ONE: bool>(*const T);

impl<T: Copy, const ONE: bool> Values<T, ONE> {
    fn new(operand: Operand) -> Values<T, ONE> {
        debug_assert_eq!(operand.is_uniform, ONE);
        Values(operand.at.cast())
    }

    /// # Safety
    /// The operand has a value for index `i`.
    #[inline(always)]
    unsafe fn get(self, i: usize) -> T {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(if ONE { 0 } else { i }).read_unaligned() }
    }
}

struct Loop1<'a, F: Function1>(Values<F::A, false>, &'a mut [F::Out]);

impl<F: Function1> Work for Loop1<'_, F> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (i, d) in self.1.iter_mut().enumerate() {
            // SAFETY: the operand of a loop has a value for each result.
            *d = F::call::<L>(unsafe { self.0.get(i) });
        }
        if !F::HAS_RARE {
            return;
        }
        for (i, d) in self.1.iter_mut().enumerate() {
            // SAFETY: as above.
            if let Some(result) = F::rare(unsafe { self.0.get(i) }) {
                *d = result;
            }
        }
    }
}

struct Loop2<'a, F: Function2, const A: bool, const B: bool>(
    Values<F::A, A>,
    Values<F::A, B>,
    &'a mut [F::Out],
);

impl<F: Function2, const A: bool, const B: bool> Work for Loop2<'_, F, A, B> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        if self.2.is_empty() {
            return;
        }
        // SAFETY: operands have a value for each result, and there is at least one result.
        let (a, b) = unsafe { (self.0.get(0), self.1.get(0)) };
        for (i, d) in self.2.iter_mut().enumerate() {
            // SAFETY: as above.
            let a = if A { a } else { unsafe { self.0.get(i) } };
            // SAFETY: as above.
            let b = if B { b } else { unsafe { self.1.get(i) } };
            *d = F::call::<L>(a, b);
        }
    }
}

/// `d = F(d, b)`.
struct AccumulateLoop<'a, F: Function2<Out = <F as Function2>::A>>(Values<F::A, false>, &'a mut [F::A]);

impl<F: Function2<Out = <F as Function2>::A>> Work for AccumulateLoop<'_, F> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (i, d) in self.1.iter_mut().enumerate() {
            // SAFETY: the operand of a loop has a value for each result.
            *d = F::call::<L>(*d, unsafe { self.0.get(i) });
        }
    }
}

macro_rules! function1 {
    ($name:ident, $bound:ident, $t:ident => $out:ty, |$a:ident| $e:expr) => {
        struct $name<T>(PhantomData<T>);
        impl<$t: $bound> Function1 for $name<$t> {
            type A = $t;
            type Out = $out;
            #[inline(always)]
            fn call<L: Level>($a: $t) -> $out {
                $e
            }
        }
    };
}

macro_rules! function2 {
    ($name:ident, $t:ident => $out:ty, |$a:ident, $b:ident| $e:expr) => {
        struct $name<T>(PhantomData<T>);
        impl<$t: Number> Function2 for $name<$t> {
            type A = $t;
            type Out = $out;
            #[inline(always)]
            fn call<L: Level>($a: $t, $b: $t) -> $out {
                $e
            }
        }
    };
}

function1!(Neg, Number, T => T, |a| a.negated());
function1!(Abs, Number, T => T, |a| a.magnitude());
function1!(Sign, Number, T => T, |a| a.sign());
function1!(Floor, Number, T => T, |a| a.rounded_down::<L>());
function1!(Round, Number, T => T, |a| a.rounded::<L>());
function1!(Exp, Float, T => T, |a| a.exp::<L>());
function1!(Log, Float, T => T, |a| a.log::<L>());
function1!(Sqrt, Float, T => T, |a| a.sqrt());
function1!(Rsqrt, Float, T => T, |a| a.rsqrt());
function1!(Atan, Float, T => T, |a| a.atan::<L>());
function1!(Erf, Float, T => T, |a| a.erf::<L>());
function1!(Tanh, Float, T => T, |a| a.tanh::<L>());
function1!(Sigmoid, Float, T => T, |a| a.sigmoid::<L>());

macro_rules! circular {
    ($name:ident, $call:ident, $large:ident) => {
        struct $name<T>(PhantomData<T>);
        impl<T: Float> Function1 for $name<T> {
            type A = T;
            type Out = T;
            #[inline(always)]
            fn call<L: Level>(a: T) -> T {
                a.$call::<L>()
            }
            const HAS_RARE: bool = true;
            #[inline(always)]
            fn rare(a: T) -> Option<T> {
                a.needs_range_reduction().then(|| a.$large())
            }
        }
    };
}

circular!(Sin, sin, sin_large);
circular!(Cos, cos, cos_large);

function2!(Add, T => T, |a, b| a.add(b));
function2!(Sub, T => T, |a, b| a.sub(b));
function2!(Mul, T => T, |a, b| a.mul(b));
function2!(Div, T => T, |a, b| a.div(b));
function2!(Rem, T => T, |a, b| a.remainder(b));
function2!(Pow, T => T, |a, b| a.power::<L>(b));
function2!(Min, T => T, |a, b| a.smaller(b));
function2!(Max, T => T, |a, b| a.larger(b));
function2!(Eq, T => u8, |a, b| u8::from(a == b));
function2!(Lt, T => u8, |a, b| u8::from(a < b));
function2!(Le, T => u8, |a, b| u8::from(a <= b));

macro_rules! truth {
    ($name:ident, |$a:ident, $b:ident| $e:expr) => {
        struct $name;
        impl Function2 for $name {
            type A = u8;
            type Out = u8;
            #[inline(always)]
            fn call<L: Level>($a: u8, $b: u8) -> u8 {
                $e
            }
        }
    };
}

// Truth values are 0 and 1.
truth!(And, |a, b| a & b);
truth!(Or, |a, b| a | b);
truth!(Xor, |a, b| a ^ b);
truth!(EqTruth, |a, b| a ^ b ^ 1);
truth!(LtTruth, |a, b| (a ^ 1) & b);
truth!(LeTruth, |a, b| (a ^ 1) | b);

macro_rules! bits {
    ($name:ident, $trait:ident, |$a:ident, $b:ident| $e:expr) => {
        struct $name<T>(PhantomData<T>);
        impl<T: Number + std::ops::$trait<Output = T>> Function2 for $name<T> {
            type A = T;
            type Out = T;
            #[inline(always)]
            fn call<L: Level>($a: T, $b: T) -> T {
                $e
            }
        }
    };
}

bits!(BitAnd, BitAnd, |a, b| a & b);
bits!(BitOr, BitOr, |a, b| a | b);
bits!(BitXor, BitXor, |a, b| a ^ b);

struct Not;
impl Function1 for Not {
    type A = u8;
    type Out = u8;
    #[inline(always)]
    fn call<L: Level>(a: u8) -> u8 {
        a ^ 1
    }
}

struct RoundTo<N>(PhantomData<N>);
impl<N: Float16> Function1 for RoundTo<N> {
    type A = f32;
    type Out = f32;
    #[inline(always)]
    fn call<L: Level>(a: f32) -> f32 {
        N::nearest(a)
    }
}

/// Returns a register as a slice.
///
/// # Safety
/// `at` must be aligned for `T` and point to `n` initialised values. Nothing may write these values while the slice
/// lives.
#[inline(always)]
pub(crate) unsafe fn values<'a, T>(at: *const u8, n: usize) -> &'a [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(at.cast::<T>(), n) }
}

/// Returns a register as a mutable slice. The memory holds plain data of some type, so any bits are a valid `T`.
///
/// # Safety
/// `at` must be aligned for `T` and point to `n` values. Nothing else may access these values while the slice lives.
#[inline(always)]
pub(crate) unsafe fn values_mut<'a, T>(at: *mut u8, n: usize) -> &'a mut [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(at.cast::<T>(), n) }
}

/// Returns true if binary operations of a type accept an operand that is one value for all indices.
pub(crate) fn takes_one(ty: Type) -> bool {
    ty.is_float()
}

/// `d = op(a)`.
///
/// # Safety
/// `a` has `n` values of type `ty`. `d` is a register of `n` values of type `ty`, and does not overlap `a`.
pub(crate) unsafe fn unary(isa: Isa, op: UnaryOp, ty: Type, a: *const u8, d: *mut u8, n: usize) {
    let a = Operand { at: a, is_uniform: false };
    macro_rules! go {
        ($f:ty) => {{
            // SAFETY: the caller's contract.
            let d = unsafe { values_mut(d, n) };
            isa.run(Loop1::<$f>(Values::new(a), d))
        }};
    }
    macro_rules! number {
        ($f:ident) => {
            with_number!(ty, T => go!($f<T>), bool => unreachable!("{op:?} of bool: rejected at compile time"))
        };
    }
    macro_rules! float {
        ($f:ident) => {
            match ty {
                Type::F32 => go!($f<f32>),
                Type::F64 => go!($f<f64>),
                _ => unreachable!("{op:?} of {ty:?}: rejected at compile time"),
            }
        };
    }
    match op {
        UnaryOp::Neg => number!(Neg),
        UnaryOp::Abs => number!(Abs),
        UnaryOp::Sign => number!(Sign),
        UnaryOp::Floor => number!(Floor),
        UnaryOp::Round => number!(Round),
        UnaryOp::Exp => float!(Exp),
        UnaryOp::Log => float!(Log),
        UnaryOp::Sqrt => float!(Sqrt),
        UnaryOp::Rsqrt => float!(Rsqrt),
        UnaryOp::Sin => float!(Sin),
        UnaryOp::Cos => float!(Cos),
        UnaryOp::Atan => float!(Atan),
        UnaryOp::Erf => float!(Erf),
        UnaryOp::Tanh => float!(Tanh),
        UnaryOp::Sigmoid => float!(Sigmoid),
        UnaryOp::ToF16 => go!(RoundTo<F16>),
        UnaryOp::ToBf16 => go!(RoundTo<Bf16>),
        UnaryOp::Not => go!(Not),
    }
}

/// Runs a loop over two operands; one of them may be a single float.
macro_rules! loop2 {
    ($isa:expr, $f:ty, $ty:expr, $a:expr, $b:expr, $d:expr) => {
        match ($a.is_uniform, $b.is_uniform) {
            (false, true) if takes_one($ty) => {
                $isa.run(Loop2::<$f, false, true>(Values::new($a), Values::new($b), $d))
            }
            (true, false) if takes_one($ty) => {
                $isa.run(Loop2::<$f, true, false>(Values::new($a), Values::new($b), $d))
            }
            _ => $isa.run(Loop2::<$f, false, false>(Values::new($a), Values::new($b), $d)),
        }
    };
}

/// `d = op(a, b)`.
///
/// # Safety
/// - `a` and `b` have `n` values of type `ty` each. If [`takes_one`], one of the two, but not both, may be a single
///   value.
/// - `d` is a register of `n` values, and overlaps neither `a` nor `b`.
pub(crate) unsafe fn binary(isa: Isa, op: BinaryOp, ty: Type, a: Operand, b: Operand, d: *mut u8, n: usize) {
    macro_rules! number {
        ($f:ident) => {
            with_number!(ty, T => {
                // SAFETY: the caller's contract.
                let d = unsafe { values_mut::<T>(d, n) };
                loop2!(isa, $f<T>, ty, a, b, d)
            }, bool => unreachable!("{op:?} of bool: rejected at compile time"))
        };
    }
    macro_rules! truth {
        ($f:ident) => {{
            // SAFETY: the caller's contract.
            let d = unsafe { values_mut::<u8>(d, n) };
            isa.run(Loop2::<$f, false, false>(Values::new(a), Values::new(b), d))
        }};
    }
    macro_rules! bits {
        ($f:ident) => {
            match ty {
                Type::I32 => bits!($f, i32),
                Type::I64 => bits!($f, i64),
                Type::U32 => bits!($f, u32),
                Type::U64 => bits!($f, u64),
                _ => unreachable!("{op:?} of {ty:?}: rejected at compile time"),
            }
        };
        ($f:ident, $t:ty) => {{
            // SAFETY: the caller's contract.
            let d = unsafe { values_mut::<$t>(d, n) };
            isa.run(Loop2::<$f<$t>, false, false>(Values::new(a), Values::new(b), d))
        }};
    }
    match op {
        BinaryOp::Add => number!(Add),
        BinaryOp::Sub => number!(Sub),
        BinaryOp::Mul => number!(Mul),
        BinaryOp::Div if ty == Type::U32 => {
            // SAFETY: the caller's contract.
            let d = unsafe { values_mut(d, n) };
            isa.run(DivideU32(Values::new(a), Values::new(b), d));
        }
        BinaryOp::Div => number!(Div),
        BinaryOp::Rem => number!(Rem),
        BinaryOp::Pow => number!(Pow),
        BinaryOp::Min => number!(Min),
        BinaryOp::Max => number!(Max),
        BinaryOp::And if ty == Type::Bool => truth!(And),
        BinaryOp::Or if ty == Type::Bool => truth!(Or),
        BinaryOp::Xor if ty == Type::Bool => truth!(Xor),
        BinaryOp::And => bits!(BitAnd),
        BinaryOp::Or => bits!(BitOr),
        BinaryOp::Xor => bits!(BitXor),
    }
}

/// `d = a op b`, as truth values.
///
/// # Safety
/// As [`binary`], but `d` is a register of `n` truth values.
pub(crate) unsafe fn compare(
    isa: Isa,
    op: CompareOp,
    ty: Type,
    a: Operand,
    b: Operand,
    d: *mut u8,
    n: usize,
) {
    // SAFETY: the caller's contract.
    let d = unsafe { values_mut::<u8>(d, n) };
    macro_rules! go {
        ($f:ident, $truth:ident) => {
            with_number!(
                ty,
                T => loop2!(isa, $f<T>, ty, a, b, d),
                bool => isa.run(Loop2::<$truth, false, false>(Values::new(a), Values::new(b), d))
            )
        };
    }
    match op {
        CompareOp::Eq => go!(Eq, EqTruth),
        CompareOp::Lt => go!(Lt, LtTruth),
        CompareOp::Le => go!(Le, LeTruth),
    }
}

/// Branch-free selection: on masks of noise, branches are mispredicted half of the time.
trait Chosen: Copy {
    fn chosen(truth: u8, yes: Self, no: Self) -> Self;
}

macro_rules! chosen {
    ($($t:ty)*) => {$(
        impl Chosen for $t {
            #[inline(always)]
            fn chosen(truth: u8, yes: $t, no: $t) -> $t {
                let mask = <$t>::from(truth != 0).wrapping_neg();
                no ^ ((yes ^ no) & mask)
            }
        }
    )*};
}

chosen! { u8 u32 u64 }

struct Choose<'a, T, const A: bool, const B: bool>(&'a [u8], Values<T, A>, Values<T, B>, &'a mut [T]);

impl<T: Chosen, const A: bool, const B: bool> Work for Choose<'_, T, A, B> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        if self.3.is_empty() {
            return;
        }
        // SAFETY: operands have a value for each result, and there is at least one result.
        let (a, b) = unsafe { (self.1.get(0), self.2.get(0)) };
        for (i, (d, &c)) in self.3.iter_mut().zip(self.0).enumerate() {
            // SAFETY: as above.
            let a = if A { a } else { unsafe { self.1.get(i) } };
            // SAFETY: as above.
            let b = if B { b } else { unsafe { self.2.get(i) } };
            *d = T::chosen(c, a, b);
        }
    }
}

/// `d = c ? a : b`.
///
/// # Safety
/// - `c` is a register of `n` truth values.
/// - `a` and `b` have `n` values of `width` bytes each, or one value.
/// - `d` is a register of `n` values of `width` bytes, and overlaps neither `a` nor `b` nor `c`.
pub(crate) unsafe fn select(
    isa: Isa,
    width: usize,
    c: *const u8,
    a: Operand,
    b: Operand,
    d: *mut u8,
    n: usize,
) {
    macro_rules! go {
        ($t:ty) => {{
            // SAFETY: the caller's contract.
            let (c, d) = unsafe { (values::<u8>(c, n), values_mut::<$t>(d, n)) };
            match (a.is_uniform, b.is_uniform) {
                (false, false) => {
                    isa.run(Choose(c, Values::<_, false>::new(a), Values::<_, false>::new(b), d))
                }
                (false, true) => isa.run(Choose(c, Values::<_, false>::new(a), Values::<_, true>::new(b), d)),
                (true, false) => isa.run(Choose(c, Values::<_, true>::new(a), Values::<_, false>::new(b), d)),
                (true, true) => isa.run(Choose(c, Values::<_, true>::new(a), Values::<_, true>::new(b), d)),
            }
        }};
    }
    match width {
        1 => go!(u8),
        4 => go!(u32),
        _ => go!(u64),
    }
}

struct Cast<A, B>(PhantomData<(A, B)>);

macro_rules! casts {
    ($($a:ident => $($b:ident)*;)*) => {$($(
        impl Function1 for Cast<$a, $b> {
            type A = $a;
            type Out = $b;
            #[inline(always)]
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "one body for all pairs")]
            fn call<L: Level>(a: $a) -> $b {
                a as $b
            }
        }
    )*)*};
}

casts! {
    f32 => f32 f64 i64 u32 u64;
    f64 => f32 f64 i32 i64 u32 u64;
    i32 => f32 f64 i32 i64 u32 u64;
    i64 => f32 f64 i32 i64 u32 u64;
    u32 => f32 f64 i32 i64 u32 u64;
    u64 => f32 f64 i32 i64 u32 u64;
    u8 => f32 f64 i32 i64 u32 u64;
}

impl Function1 for Cast<f32, i32> {
    type A = f32;
    type Out = i32;
    /// Converts as `as` does, with vector instructions: `as` itself does not become vector code.
    #[inline(always)]
    fn call<L: Level>(a: f32) -> i32 {
        const END: f32 = 2_147_483_648.0;
        let above = if a > -END { a } else { -END };
        let within = if above < END { above } else { 0.0 };
        // SAFETY: -END <= within < END, and `within` is not NaN.
        let integer = unsafe { within.to_int_unchecked::<i32>() };
        let integer = if a >= END { i32::MAX } else { integer };
        if a.is_nan() { 0 } else { integer }
    }
}

struct ToTruth<A>(PhantomData<A>);

impl<T: Number> Function1 for ToTruth<T> {
    type A = T;
    type Out = u8;
    #[inline(always)]
    fn call<L: Level>(a: T) -> u8 {
        u8::from(a != T::ZERO)
    }
}

/// `d = a`, converted.
///
/// # Safety
/// `a` has `n` values of type `from`. `d` is a register of `n` values of type `to`, and does not overlap `a`.
pub(crate) unsafe fn convert(isa: Isa, from: Type, to: Type, a: *const u8, d: *mut u8, n: usize) {
    macro_rules! go {
        ($f:ty, $a:ty, $b:ty) => {{
            // SAFETY: the caller's contract.
            let d = unsafe { values_mut::<$b>(d, n) };
            isa.run(Loop1::<$f>(Values::new(Operand { at: a, is_uniform: false }), d))
        }};
    }
    with_number!(from,
        A => with_number!(to, B => go!(Cast<A, B>, A, B), bool => go!(ToTruth<A>, A, u8)),
        bool => with_number!(to, B => go!(Cast<u8, B>, u8, B), bool => {
            // SAFETY: the caller's contract.
            unsafe { values_mut::<u8>(d, n).copy_from_slice(values::<u8>(a, n)) }
        })
    );
}

/// Fills `d` with the value at `a`.
///
/// # Safety
/// `a` points to one value of `width` bytes. `d` is a register of `n` values of `width` bytes, and does not overlap
/// `a`.
pub(crate) unsafe fn splat(width: usize, a: *const u8, d: *mut u8, n: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        match width {
            1 => values_mut::<u8>(d, n).fill(*a),
            // The value may be in callers' memory, at any alignment.
            4 => values_mut::<u32>(d, n).fill(a.cast::<u32>().read_unaligned()),
            _ => values_mut::<u64>(d, n).fill(a.cast::<u64>().read_unaligned()),
        }
    }
}

/// Quotients of u32. If every divisor is the same power of two, as in a selection of upper bits, quotients are shifts.
struct DivideU32<'a>(Values<u32, false>, Values<u32, false>, &'a mut [u32]);

impl Work for DivideU32<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Self(a, b, d) = self;
        if d.is_empty() {
            return;
        }
        // SAFETY: operands have a value for each result, and there is at least one result.
        let by = unsafe { b.get(0) };
        // SAFETY: as above.
        let differ = (0..d.len()).fold(0, |differ, i| differ | (unsafe { b.get(i) } ^ by));
        if differ == 0 && by.is_power_of_two() {
            let bits = by.trailing_zeros();
            for (i, d) in d.iter_mut().enumerate() {
                // SAFETY: as above.
                *d = unsafe { a.get(i) } >> bits;
            }
        } else {
            for (i, d) in d.iter_mut().enumerate() {
                // SAFETY: as above.
                *d = unsafe { a.get(i).div(b.get(i)) };
            }
        }
    }
}

/// Number of partial results of a reduction inside of a tile: independent chains, joined as a tree.
const LANES: usize = 16;
/// Number of partial results that keeps the adders busy, if a tile has enough values.
const WIDE_LANES: usize = 2 * LANES;

struct Fold<T: Copy, F> {
    values: Values<T, false>,
    n: usize,
    neutral: T,
    with: PhantomData<F>,
}

impl<T: Number, F: Function2<A = T, Out = T>> Fold<T, F> {
    /// Adds values `from..` to the lanes while there is a value for every lane. Returns the index of the first value
    /// that is left.
    #[inline(always)]
    fn add<L: Level, const N: usize>(&self, mut from: usize, lanes: &mut [T; N]) -> usize {
        while from + N <= self.n {
            for (i, lane) in lanes.iter_mut().enumerate() {
                // SAFETY: the fold has `n` values.
                *lane = F::call::<L>(*lane, unsafe { self.values.get(from + i) });
            }
            from += N;
        }
        from
    }
}

/// Halves the lanes until `left` remain.
#[inline(always)]
fn fold_lanes<L: Level, F: Function2<Out = <F as Function2>::A>>(lanes: &mut [F::A], left: usize) {
    let mut width = lanes.len() / 2;
    while width >= left {
        for i in 0..width {
            lanes[i] = F::call::<L>(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
}

impl<T: Number, F: Function2<A = T, Out = T>> Work for Fold<T, F> {
    type Out = T;
    #[inline(always)]
    fn work<L: Level>(self) -> T {
        let mut lanes = [self.neutral; LANES];
        let mut done = 0;
        if self.n >= 2 * WIDE_LANES {
            let mut lane_values = [self.neutral; WIDE_LANES];
            done = self.add::<L, WIDE_LANES>(0, &mut lane_values);
            fold_lanes::<L, F>(&mut lane_values, LANES);
            lanes.copy_from_slice(&lane_values[..LANES]);
        }
        done = self.add::<L, LANES>(done, &mut lanes);
        for (i, lane) in (done..self.n).zip(&mut lanes) {
            // SAFETY: the fold has `n` values.
            *lane = F::call::<L>(*lane, unsafe { self.values.get(i) });
        }
        fold_lanes::<L, F>(&mut lanes, 1);
        lanes[0]
    }
}

macro_rules! with_reduction {
    ($op:expr, $ty:expr, $t:ident, $f:ident, $neutral:ident => $e:expr) => {
        with_number!($ty, $t => match $op {
            ReduceOp::Sum => { type $f = Add<$t>; const $neutral: $t = <$t as Number>::ZERO; $e }
            ReduceOp::Prod => { type $f = Mul<$t>; const $neutral: $t = <$t as Number>::ONE; $e }
            ReduceOp::Max => { type $f = Max<$t>; const $neutral: $t = <$t as Number>::LOWEST; $e }
            ReduceOp::Min => { type $f = Min<$t>; const $neutral: $t = <$t as Number>::GREATEST; $e }
        }, bool => unreachable!("a reduction of bool: rejected at compile time"))
    };
}

/// Reduces a register to `d`, in an order that depends on `n` alone.
///
/// # Safety
/// `a` has `n` values of type `ty`. `d` is valid for a write of one value of type `ty`.
pub(crate) unsafe fn fold(isa: Isa, op: ReduceOp, ty: Type, a: *const u8, d: *mut u8, n: usize) {
    with_reduction!(op, ty, T, F, NEUTRAL => {
        let values = Values::new(Operand { at: a, is_uniform: false });
        let total = isa.run(Fold::<T, F> { values, n, neutral: NEUTRAL, with: PhantomData });
        // SAFETY: the caller's contract.
        unsafe { *d.cast::<T>() = total }
    });
}

/// Returns the sum of numbers, in the order of [`fold`].
#[inline(always)]
pub(crate) fn sum<L: Level>(numbers: &[f32]) -> f32 {
    let values = Values::new(Operand { at: numbers.as_ptr().cast(), is_uniform: false });
    Fold::<f32, Add<f32>> { values, n: numbers.len(), neutral: f32::ZERO, with: PhantomData }.work::<L>()
}

/// Joins partial results, as [`fold`] does at its end. The result is the same at every level, and the work is too small
/// for a call.
#[inline]
pub(crate) fn join_lanes(op: ReduceOp, mut lanes: [f32; LANES]) -> f32 {
    match op {
        ReduceOp::Sum => fold_lanes::<Portable, Add<f32>>(&mut lanes, 1),
        ReduceOp::Prod => fold_lanes::<Portable, Mul<f32>>(&mut lanes, 1),
        ReduceOp::Max => fold_lanes::<Portable, Max<f32>>(&mut lanes, 1),
        ReduceOp::Min => fold_lanes::<Portable, Min<f32>>(&mut lanes, 1),
    }
    lanes[0]
}

/// `d = d op b`, element by element.
///
/// # Safety
/// `b` has `n` values of type `ty`. `d` is a register of `n` values of type `ty`, and does not overlap `b`.
pub(crate) unsafe fn accumulate(isa: Isa, op: ReduceOp, ty: Type, b: *const u8, d: *mut u8, n: usize) {
    with_reduction!(op, ty, T, F, _NEUTRAL => {
        // SAFETY: the caller's contract.
        let d = unsafe { values_mut::<T>(d, n) };
        isa.run(AccumulateLoop::<F>(Values::new(Operand { at: b, is_uniform: false }), d));
    });
}

/// Fills `d` with the neutral element of a reduction.
///
/// # Safety
/// `d` is a register of `n` values of type `ty`.
pub(crate) unsafe fn neutral(op: ReduceOp, ty: Type, d: *mut u8, n: usize) {
    with_reduction!(op, ty, T, _F, NEUTRAL => {
        // SAFETY: the caller's contract.
        unsafe { values_mut::<T>(d, n).fill(NEUTRAL) }
    });
}
