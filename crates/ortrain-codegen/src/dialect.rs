//! Kernel languages.

use ortrain_expr::Scalar;

use crate::launch::KernelSource;
use crate::repr::Repr;

/// Language for kernels. It covers the differences between languages; calls and operators are the same in all
/// languages.
///
/// Functions that are called by name (`exp_f32`, `add_pair`, …) are defined in [`Dialect::library`].
pub trait Dialect: std::fmt::Debug + Sync {
    /// Returns true if the language has 64-bit floats. All instructions then support them.
    fn has_float64(&self) -> bool;

    /// Returns the name of a type.
    fn type_name(&self, repr: Repr) -> &'static str;

    /// Returns the literal of a constant, from a scalar of the type.
    fn constant(&self, value: Scalar, repr: Repr) -> String;

    /// Returns a value of 64 bits, from its two words.
    fn two_words(&self, repr: Repr, low: &str, high: &str) -> String;

    /// Returns a vector of floats, from one part per float or from one part for all.
    fn floats(&self, repr: Repr, parts: &[String]) -> String;

    /// Returns one float of an element of a shared array, by a computed index.
    fn component(&self, array: &str, at: &str, part: &str) -> String;

    /// Defines a constant name.
    fn define(&self, name: &str, repr: Repr, value: &str) -> String;

    /// Defines a mutable variable.
    fn variable(&self, name: &str, repr: Repr, value: &str) -> String;

    /// Returns `yes` if the condition holds, or else `no`. Both are evaluated.
    fn select(&self, condition: &str, yes: &str, no: &str) -> String;

    /// Returns the head of a loop over `from <= name < to` (32-bit signed integers), with the opening brace.
    fn loop_head(&self, name: &str, from: &str, to: &str) -> String;

    /// Returns the word of a binding at an index (a 32-bit signed integer).
    fn word(&self, binding: &DeclaredBinding, at: &str) -> String;

    /// Returns four words of a binding of quads, at the index of the quad.
    fn quad(&self, binding: &DeclaredBinding, at: &str) -> String;

    /// Defines a name for four words: `NAME.x`, `NAME.y`, `NAME.z`, `NAME.w`.
    fn define_quad(&self, name: &str, value: &str) -> String;

    /// Returns the statement that writes four words.
    fn set_quad(&self, binding: &DeclaredBinding, at: &str, words: &[String; 4]) -> String;

    /// Returns the statement that writes a word.
    fn set_word(&self, binding: &DeclaredBinding, at: &str, value: &str) -> String;

    /// Returns the statements that write the bits in `mask` of a word. Other bits stay unchanged, even under concurrent
    /// writes.
    fn set_bits(&self, binding: &DeclaredBinding, at: &str, mask: &str, value: &str) -> String;

    /// Returns the statement that sets a word to the minimum of the word and a value. The binding is atomic.
    fn min_word(&self, binding: &DeclaredBinding, at: &str, value: &str) -> String;

    /// Returns a barrier for all invocations of a group. Earlier writes to shared arrays are visible after it.
    fn barrier(&self) -> String;

    /// Returns a barrier that also covers accesses to bindings.
    fn binding_barrier(&self) -> String;

    /// Returns the source that precedes kernels: the functions that they call.
    fn library(&self, kernels: &[&KernelSource]) -> String;

    /// Returns the source of kernels with their library, as a compiler expects it.
    ///
    /// [`KernelSource::name`] is the name of the entry point of a kernel. A module of [`Wgsl`](crate::Wgsl) has one
    /// kernel, because its bindings belong to the module.
    fn module(&self, kernels: &[&KernelSource]) -> String {
        kernels.iter().fold(self.library(kernels), |module, kernel| module + &kernel.text)
    }

    /// Returns a kernel with one invocation for each `id` below `points`. `row` is the number of groups of
    /// [`GROUP_SIZE`] invocations per row of groups.
    fn kernel(&self, name: &str, bindings: &[DeclaredBinding], body: &str, points: u64, row: u32) -> String;

    /// Returns a kernel of `groups` whole groups of [`GROUP_SIZE`] invocations, with `row` groups per row of groups.
    ///
    /// In the body, `group` is the index of the group: an unsigned integer that is uniform in the group. `lane` is the
    /// index of the invocation in its group, a signed integer. Elements of a shared array are written `NAME[INDEX]`;
    /// their initial value is undefined.
    fn kernel_of_groups(
        &self,
        name: &str,
        bindings: &[DeclaredBinding],
        shared: &[SharedArray],
        body: &str,
        groups: u64,
        row: u32,
    ) -> String;
}

/// Number of invocations of a group.
pub const GROUP_SIZE: u32 = 256;

/// Maximum bytes of the shared arrays of a group: the guarantee of WebGPU, section 3.6.2 of its specification.
pub const MAX_SHARED_BYTES: usize = 16 << 10;

/// Array that the invocations of a group share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedArray {
    /// Name in the source.
    pub name: String,
    /// Type of the elements.
    pub repr: Repr,
    /// Number of elements.
    pub len: usize,
}

impl SharedArray {
    /// Returns the bytes of the array.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.repr.bytes()
    }
}

/// Binding as a kernel declares it: an array of words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredBinding {
    /// Name in the source.
    pub name: String,
    /// True if words are written partially, or by several invocations.
    pub atomic: bool,
    /// True if the binding is an array of quads of words, which are read and written as a whole.
    pub is_wide: bool,
}
