//! The loops behind a tape: one per operation and type, over tile registers, compiled per level.
//!
//! Registers are scratch memory of one worker, so slices over them are sound; an operation's result is never the
//! register of one of its operands, except where a function says so.

use std::marker::PhantomData;

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, Type, UnaryOp, philox4x32_10};

use super::number::{Float, Number, with_number};
use crate::isa::{Isa, Level, Work};

trait Function1 {
    type A: Copy;
    type Out;
    fn call<L: Level>(a: Self::A) -> Self::Out;
}

trait Function2 {
    type A: Copy;
    type Out;
    fn call<L: Level>(a: Self::A, b: Self::A) -> Self::Out;
}

struct Loop1<'a, F: Function1>(&'a [F::A], &'a mut [F::Out]);

impl<F: Function1> Work for Loop1<'_, F> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (d, &a) in self.1.iter_mut().zip(self.0) {
            *d = F::call::<L>(a);
        }
    }
}

struct Loop2<'a, F: Function2>(&'a [F::A], &'a [F::A], &'a mut [F::Out]);

impl<F: Function2> Work for Loop2<'_, F> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for ((d, &a), &b) in self.2.iter_mut().zip(self.0).zip(self.1) {
            *d = F::call::<L>(a, b);
        }
    }
}

/// `d = F(d, b)`.
struct Onto<'a, F: Function2<Out = <F as Function2>::A>>(&'a [F::A], &'a mut [F::A]);

impl<F: Function2<Out = <F as Function2>::A>> Work for Onto<'_, F> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (d, &b) in self.1.iter_mut().zip(self.0) {
            *d = F::call::<L>(*d, b);
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
function1!(Exp, Float, T => T, |a| a.exp::<L>());
function1!(Log, Float, T => T, |a| a.log::<L>());
function1!(Sqrt, Float, T => T, |a| a.sqrt());
function1!(Erf, Float, T => T, |a| a.erf::<L>());
function1!(Tanh, Float, T => T, |a| a.tanh::<L>());
function1!(Sigmoid, Float, T => T, |a| a.sigmoid::<L>());

function2!(Add, T => T, |a, b| a.plus(b));
function2!(Sub, T => T, |a, b| a.minus(b));
function2!(Mul, T => T, |a, b| a.times(b));
function2!(Div, T => T, |a, b| a.over(b));
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

struct Not;
impl Function1 for Not {
    type A = u8;
    type Out = u8;
    #[inline(always)]
    fn call<L: Level>(a: u8) -> u8 {
        a ^ 1
    }
}

/// A register as a slice.
///
/// # Safety
/// `at` must be aligned for `T` and point to `n` initialised values that nobody writes while the slice lives.
#[inline(always)]
pub(crate) unsafe fn values<'a, T>(at: *const u8, n: usize) -> &'a [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(at.cast::<T>(), n) }
}

/// A register as a slice to write to. What it held before is plain data of some type, so any value is a valid one.
///
/// # Safety
/// `at` must be aligned for `T` and point to `n` values that nobody else touches while the slice lives.
#[inline(always)]
pub(crate) unsafe fn values_mut<'a, T>(at: *mut u8, n: usize) -> &'a mut [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(at.cast::<T>(), n) }
}

/// `d = op(a)`.
///
/// # Safety
/// `a` and `d` are registers of `n` values of type `ty` that do not overlap.
pub(crate) unsafe fn unary(isa: Isa, op: UnaryOp, ty: Type, a: *const u8, d: *mut u8, n: usize) {
    macro_rules! go {
        ($f:ident, $t:ty) => {{
            // SAFETY: the caller's contract.
            let (a, d) = unsafe { (values::<$t>(a, n), values_mut::<$t>(d, n)) };
            isa.run(Loop1::<$f<$t>>(a, d))
        }};
    }
    macro_rules! number {
        ($f:ident) => {
            with_number!(ty, T => go!($f, T), bool => unreachable!("{op:?} of truth: checked when compiled"))
        };
    }
    macro_rules! float {
        ($f:ident) => {
            match ty {
                Type::F32 => go!($f, f32),
                Type::F64 => go!($f, f64),
                _ => unreachable!("{op:?} of {ty:?}: checked when compiled"),
            }
        };
    }
    match op {
        UnaryOp::Neg => number!(Neg),
        UnaryOp::Abs => number!(Abs),
        UnaryOp::Sign => number!(Sign),
        UnaryOp::Floor => number!(Floor),
        UnaryOp::Exp => float!(Exp),
        UnaryOp::Log => float!(Log),
        UnaryOp::Sqrt => float!(Sqrt),
        UnaryOp::Erf => float!(Erf),
        UnaryOp::Tanh => float!(Tanh),
        UnaryOp::Sigmoid => float!(Sigmoid),
        UnaryOp::Not => {
            // SAFETY: the caller's contract.
            let (a, d) = unsafe { (values::<u8>(a, n), values_mut::<u8>(d, n)) };
            isa.run(Loop1::<Not>(a, d));
        }
    }
}

/// `d = op(a, b)`.
///
/// # Safety
/// `a`, `b` and `d` are registers of `n` values of type `ty`; `d` does not overlap the others.
pub(crate) unsafe fn binary(
    isa: Isa,
    op: BinaryOp,
    ty: Type,
    a: *const u8,
    b: *const u8,
    d: *mut u8,
    n: usize,
) {
    macro_rules! number {
        ($f:ident) => {
            with_number!(ty, T => {
                // SAFETY: the caller's contract.
                let (a, b, d) = unsafe { (values::<T>(a, n), values::<T>(b, n), values_mut::<T>(d, n)) };
                isa.run(Loop2::<$f<T>>(a, b, d))
            }, bool => unreachable!("{op:?} of truth: checked when compiled"))
        };
    }
    macro_rules! truth {
        ($f:ident) => {{
            // SAFETY: the caller's contract.
            let (a, b, d) = unsafe { (values::<u8>(a, n), values::<u8>(b, n), values_mut::<u8>(d, n)) };
            isa.run(Loop2::<$f>(a, b, d))
        }};
    }
    match op {
        BinaryOp::Add => number!(Add),
        BinaryOp::Sub => number!(Sub),
        BinaryOp::Mul => number!(Mul),
        BinaryOp::Div => number!(Div),
        BinaryOp::Rem => number!(Rem),
        BinaryOp::Pow => number!(Pow),
        BinaryOp::Min => number!(Min),
        BinaryOp::Max => number!(Max),
        BinaryOp::And => truth!(And),
        BinaryOp::Or => truth!(Or),
        BinaryOp::Xor => truth!(Xor),
    }
}

/// `d = a op b`, as truth.
///
/// # Safety
/// `a` and `b` are registers of `n` values of type `ty`, `d` one of `n` truth values that does not overlap them.
pub(crate) unsafe fn compare(
    isa: Isa,
    op: CompareOp,
    ty: Type,
    a: *const u8,
    b: *const u8,
    d: *mut u8,
    n: usize,
) {
    // SAFETY: the caller's contract.
    let d = unsafe { values_mut::<u8>(d, n) };
    macro_rules! go {
        ($f:ident, $truth:ident) => {
            with_number!(ty, T => {
                // SAFETY: the caller's contract.
                let (a, b) = unsafe { (values::<T>(a, n), values::<T>(b, n)) };
                isa.run(Loop2::<$f<T>>(a, b, d))
            }, bool => {
                // SAFETY: the caller's contract.
                let (a, b) = unsafe { (values::<u8>(a, n), values::<u8>(b, n)) };
                isa.run(Loop2::<$truth>(a, b, d))
            })
        };
    }
    match op {
        CompareOp::Eq => go!(Eq, EqTruth),
        CompareOp::Lt => go!(Lt, LtTruth),
        CompareOp::Le => go!(Le, LeTruth),
    }
}

struct Choose<'a, T>(&'a [u8], &'a [T], &'a [T], &'a mut [T]);

impl<T: Copy> Work for Choose<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (((d, &c), &a), &b) in self.3.iter_mut().zip(self.0).zip(self.1).zip(self.2) {
            *d = if c != 0 { a } else { b };
        }
    }
}

/// `d = c ? a : b`.
///
/// # Safety
/// `c` is a register of `n` truth values, the others are of `n` values of `width` bytes; `d` overlaps none.
pub(crate) unsafe fn select(
    isa: Isa,
    width: usize,
    c: *const u8,
    a: *const u8,
    b: *const u8,
    d: *mut u8,
    n: usize,
) {
    macro_rules! go {
        ($t:ty) => {{
            // SAFETY: the caller's contract.
            let (c, a, b) = unsafe { (values::<u8>(c, n), values::<$t>(a, n), values::<$t>(b, n)) };
            // SAFETY: the caller's contract.
            let d = unsafe { values_mut::<$t>(d, n) };
            isa.run(Choose(c, a, b, d))
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
    f32 => f32 f64 i32 i64 u32 u64;
    f64 => f32 f64 i32 i64 u32 u64;
    i32 => f32 f64 i32 i64 u32 u64;
    i64 => f32 f64 i32 i64 u32 u64;
    u32 => f32 f64 i32 i64 u32 u64;
    u64 => f32 f64 i32 i64 u32 u64;
    u8 => f32 f64 i32 i64 u32 u64;
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
/// `a` is a register of `n` values of type `from`, `d` one of `n` values of type `to`; they do not overlap.
pub(crate) unsafe fn convert(isa: Isa, from: Type, to: Type, a: *const u8, d: *mut u8, n: usize) {
    macro_rules! go {
        ($f:ty, $a:ty, $b:ty) => {{
            // SAFETY: the caller's contract.
            let (a, d) = unsafe { (values::<$a>(a, n), values_mut::<$b>(d, n)) };
            isa.run(Loop1::<$f>(a, d))
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
/// `a` points to one value of `width` bytes, `d` is a register of `n` of them that does not overlap it.
pub(crate) unsafe fn splat(width: usize, a: *const u8, d: *mut u8, n: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        match width {
            1 => values_mut::<u8>(d, n).fill(*a),
            4 => values_mut::<u32>(d, n).fill(*a.cast::<u32>()),
            _ => values_mut::<u64>(d, n).fill(*a.cast::<u64>()),
        }
    }
}

struct Philox<'a>(&'a [u64], &'a [u64], &'a [u64], &'a mut [u32]);

impl Work for Philox<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (((d, &key), &stream), &index) in self.3.iter_mut().zip(self.0).zip(self.1).zip(self.2) {
            *d = philox4x32_10(key, stream, index);
        }
    }
}

/// Random bits.
///
/// # Safety
/// `key`, `stream` and `index` are registers of `n` 64-bit values, `d` one of `n` 32-bit values that overlaps none.
pub(crate) unsafe fn random(
    isa: Isa,
    key: *const u8,
    stream: *const u8,
    index: *const u8,
    d: *mut u8,
    n: usize,
) {
    // SAFETY: the caller's contract.
    let (key, stream, index, d) =
        unsafe { (values::<u64>(key, n), values(stream, n), values(index, n), values_mut(d, n)) };
    isa.run(Philox(key, stream, index, d));
}

/// Partial results of a reduction inside a tile: so many independent chains, joined as a tree.
const LANES: usize = 16;

struct Fold<'a, T, F>(&'a [T], T, PhantomData<F>);

impl<T: Number, F: Function2<A = T, Out = T>> Work for Fold<'_, T, F> {
    type Out = T;
    #[inline(always)]
    fn work<L: Level>(self) -> T {
        let mut lanes = [self.1; LANES];
        let mut chunks = self.0.chunks_exact(LANES);
        for chunk in &mut chunks {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane = F::call::<L>(*lane, value);
            }
        }
        for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
            *lane = F::call::<L>(*lane, value);
        }
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] = F::call::<L>(lanes[i], lanes[i + width]);
            }
            width /= 2;
        }
        lanes[0]
    }
}

macro_rules! with_reduction {
    ($op:expr, $ty:expr, $t:ident, $f:ident, $neutral:ident => $e:expr) => {
        with_number!($ty, $t => match $op {
            ReduceOp::Sum => { type $f = Add<$t>; const $neutral: $t = <$t as Number>::ZERO; $e }
            ReduceOp::Prod => { type $f = Mul<$t>; const $neutral: $t = <$t as Number>::ONE; $e }
            ReduceOp::Max => { type $f = Max<$t>; const $neutral: $t = <$t as Number>::LEAST; $e }
            ReduceOp::Min => { type $f = Min<$t>; const $neutral: $t = <$t as Number>::GREATEST; $e }
        }, bool => unreachable!("a reduction of truth: checked when compiled"))
    };
}

/// Reduces a register to `d`, in an order that depends on `n` alone.
///
/// # Safety
/// `a` is a register of `n` values of type `ty`, `d` has room for one.
pub(crate) unsafe fn fold(isa: Isa, op: ReduceOp, ty: Type, a: *const u8, d: *mut u8, n: usize) {
    with_reduction!(op, ty, T, F, NEUTRAL => {
        // SAFETY: the caller's contract.
        unsafe { *d.cast::<T>() = isa.run(Fold::<T, F>(values(a, n), NEUTRAL, PhantomData)) }
    });
}

/// `d = d op b`, element by element.
///
/// # Safety
/// `b` and `d` are registers of `n` values of type `ty` that do not overlap.
pub(crate) unsafe fn accumulate(isa: Isa, op: ReduceOp, ty: Type, b: *const u8, d: *mut u8, n: usize) {
    with_reduction!(op, ty, T, F, _NEUTRAL => {
        // SAFETY: the caller's contract.
        let (b, d) = unsafe { (values::<T>(b, n), values_mut::<T>(d, n)) };
        isa.run(Onto::<F>(b, d));
    });
}

/// Fills `d` with what a reduction starts from.
///
/// # Safety
/// `d` is a register of `n` values of type `ty`.
pub(crate) unsafe fn neutral(op: ReduceOp, ty: Type, d: *mut u8, n: usize) {
    with_reduction!(op, ty, T, _F, NEUTRAL => {
        // SAFETY: the caller's contract.
        unsafe { values_mut::<T>(d, n).fill(NEUTRAL) }
    });
}
