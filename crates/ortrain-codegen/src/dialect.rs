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
}

impl Repr {
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

    /// The statement that writes a word.
    fn set_word(&self, binding: &Declared, at: &str, value: &str) -> String;

    /// The statements that write those bits of a word which are set in `mask`; others stay, whoever writes them meanwhile.
    fn set_bits(&self, binding: &Declared, at: &str, mask: &str, value: &str) -> String;

    /// The statement that makes a word the least of what it is and a value. The binding is atomic.
    fn lower_word(&self, binding: &Declared, at: &str, value: &str) -> String;

    /// The functions that kernels may call.
    fn prelude(&self) -> &str;

    /// A kernel of one invocation for each `id` below `points`, `row` groups of [`GROUP`] to a row of groups.
    fn kernel(&self, bindings: &[Declared], body: &str, points: u64, row: u32) -> String;
}

/// Invocations of a group.
pub const GROUP: u32 = 256;

/// A binding as a kernel declares it: an array of words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name in the source.
    pub name: String,
    /// True if words are written in part, or by several invocations.
    pub atomic: bool,
}

/// The items of a prelude that a text needs, in the order in which they stand there. An item starts with `fn NAME(` at the
/// start of a line.
pub(crate) fn needed_items(prelude: &str, text: &str) -> String {
    let mut items: Vec<(&str, &str)> = Vec::new();
    let starts: Vec<usize> = prelude.match_indices("\nfn ").map(|(at, _)| at + 1).collect();
    for (k, &start) in starts.iter().enumerate() {
        let item = &prelude[start..starts.get(k + 1).copied().unwrap_or(prelude.len())];
        // Comments between functions belong to neither.
        let end = item.find("\n//").map_or(item.len(), |at| at + 1);
        let name = &item[3..item.find('(').unwrap_or(3)];
        items.push((name, &item[..end]));
    }
    let mut wanted = vec![false; items.len()];
    let mut open = vec![text];
    while let Some(text) = open.pop() {
        for (k, &(name, item)) in items.iter().enumerate() {
            if !wanted[k] && calls(text, name) {
                wanted[k] = true;
                open.push(item);
            }
        }
    }
    items.iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|((_, item), _)| *item).collect()
}

/// True if a text calls a function.
fn calls(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        text[at + name.len()..].starts_with('(') && !text[..at].ends_with(is_part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_bring_what_they_call() {
        let prelude = "\nfn a() { b(); }\n// A word.\nfn b() { }\nfn c() { a(); }\nfn ab() { }\n";
        assert_eq!(needed_items(prelude, "x = a();"), "fn a() { b(); }\nfn b() { }\n");
        assert_eq!(needed_items(prelude, "x = ab() + a;"), "fn ab() { }\n");
    }
}
