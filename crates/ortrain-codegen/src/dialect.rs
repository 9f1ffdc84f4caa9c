//! The languages that kernels are printed in.

use ortrain_expr::Scalar;

/// The type of a printed value. Types that only exist in memory are none of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Repr {
    /// 32-bit float.
    F32,
    /// 32-bit signed integer: also a 64-bit one that is known to fit.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// Truth value.
    Bool,
    /// 64-bit signed integer: a pair of words.
    I64,
    /// 64-bit unsigned integer: a pair of words.
    U64,
    /// 64-bit float: its bits, a pair of words that functions compute with.
    F64,
    /// Two 32-bit floats, `NAME.x` and `NAME.y`. The product of a float and of such, and sums of them, are written as those of
    /// floats are.
    F32x2,
    /// Four 32-bit floats: those and `NAME.z`, `NAME.w`.
    F32x4,
}

impl Repr {
    /// So many floats in one: 2 or 4.
    ///
    /// # Panics
    /// With another number.
    #[must_use]
    pub fn floats(count: usize) -> Repr {
        match count {
            2 => Repr::F32x2,
            4 => Repr::F32x4,
            _ => unreachable!("floats come by two or four, and not by {count}"),
        }
    }

    /// Bytes of a value in a shared array.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Repr::F32x4 => 16,
            Repr::I64 | Repr::U64 | Repr::F64 | Repr::F32x2 => 8,
            _ => 4,
        }
    }

    /// True for an integer that is a pair of words.
    #[must_use]
    pub fn is_pair(self) -> bool {
        matches!(self, Repr::I64 | Repr::U64)
    }
}

/// A language for kernels. What differs between languages is here; expressions of calls and operators are the same in all.
///
/// Functions that are called by name (`exp_f32`, `add_pair`, …) are those of [`Dialect::prelude`].
pub trait Dialect: std::fmt::Debug + Sync {
    /// The name of a type.
    fn type_name(&self, repr: Repr) -> &'static str;

    /// A constant that is given as a scalar of the type.
    fn constant(&self, value: Scalar, repr: Repr) -> String;

    /// A value of several floats, from each of them or from one for all.
    fn floats(&self, repr: Repr, parts: &[String]) -> String;

    /// One of the floats of an element of a shared array, by a number that is computed.
    fn part_of(&self, array: &str, at: &str, part: &str) -> String;

    /// The definition of a name that keeps its value.
    fn define(&self, name: &str, repr: Repr, value: &str) -> String;

    /// The definition of a name whose value changes.
    fn variable(&self, name: &str, repr: Repr, value: &str) -> String;

    /// `yes` where a condition holds, else `no`. Both are computed.
    fn select(&self, condition: &str, yes: &str, no: &str) -> String;

    /// The head of a loop over `from <= name < to`, of 32-bit signed integers, up to its opening brace.
    fn counted(&self, name: &str, from: &str, to: &str) -> String;

    /// The word of a binding with a number (a 32-bit signed integer).
    fn word(&self, binding: &Declared, at: &str) -> String;

    /// Four words of a binding of quads, by the number of the quad.
    fn quad(&self, binding: &Declared, at: &str) -> String;

    /// The definition of a name for four words, each of which is then `NAME.x`, `NAME.y`, `NAME.z`, `NAME.w`.
    fn define_quad(&self, name: &str, value: &str) -> String;

    /// The statement that writes four words.
    fn set_quad(&self, binding: &Declared, at: &str, words: &[String; 4]) -> String;

    /// The statement that writes a word.
    fn set_word(&self, binding: &Declared, at: &str, value: &str) -> String;

    /// The statements that write those bits of a word which are set in `mask`; others stay, whoever writes them meanwhile.
    fn set_bits(&self, binding: &Declared, at: &str, mask: &str, value: &str) -> String;

    /// The statement that makes a word the least of what it is and a value. The binding is atomic.
    fn lower_word(&self, binding: &Declared, at: &str, value: &str) -> String;

    /// The statement where all invocations of a group wait for each other: what any has written to shared arrays before, all
    /// see behind it.
    fn barrier(&self) -> String;

    /// The same for what is read from and written to bindings.
    fn binding_barrier(&self) -> String;

    /// The functions that kernels may call.
    fn prelude(&self) -> &str;

    /// A kernel of one invocation for each `id` below `points`, `row` groups of [`GROUP`] to a row of groups.
    fn kernel(&self, bindings: &[Declared], body: &str, points: u64, row: u32) -> String;

    /// A kernel of so many whole groups of [`GROUP`] invocations, `row` of them to a row of groups.
    ///
    /// In the body `group` is the number of the group, an unsigned integer that is the same for the whole group, and `lane`
    /// that of the invocation in its group, a signed one. Elements of a shared array are read and written as `NAME[PLACE]`;
    /// they hold anything at first.
    fn kernel_of_groups(
        &self,
        bindings: &[Declared],
        shared: &[Shared],
        body: &str,
        groups: u64,
        row: u32,
    ) -> String;
}

/// Invocations of a group.
pub const GROUP: u32 = 256;

/// Bytes that the arrays of a group have, at most: what WebGPU promises, section 3.6.2 of its specification.
pub const SHARED: usize = 16 << 10;

/// An array that the invocations of a group share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Its name in the source.
    pub name: String,
    /// The type of its elements.
    pub repr: Repr,
    /// The number of its elements.
    pub len: usize,
}

impl Shared {
    /// Bytes of the array.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.repr.bytes()
    }
}

/// A binding as a kernel declares it: an array of words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name in the source.
    pub name: String,
    /// True if words are written in part, or by several invocations.
    pub atomic: bool,
    /// True if it is an array of quads of words, which are read and written as a whole.
    pub is_wide: bool,
}
