//! Scattered sums of rows, in the order of the indices: one invocation per element of the target. With many indices,
//! the indices of each row are first linked into a chain, so that each element visits only its own indices.

use ortrain_expr::{DType, ReduceOp};
use ortrain_program::ScatterAdd;

use crate::context::Context;
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value};
use crate::thread_index::define_coordinates;
use crate::thread_reduction::combine;

/// Maximum number of indices without chains: each element of the target searches all indices.
const MAX_UNCHAINED_INDICES: usize = 32;

pub(crate) fn launches(cx: &Context<'_>, s: &ScatterAdd) -> Result<Vec<Launch>, String> {
    cx.float_repr(s.target.access.dtype)?;
    match s.count <= MAX_UNCHAINED_INDICES {
        true => Ok(vec![plain_launch(cx, s)?]),
        false => Chains { s, first: cx.reserve(s.rows + s.count) }.launches(cx),
    }
}

/// Prints the row of an index; -1 for an index out of range.
fn target_row(kernel: &mut Kernel<'_>, s: &ScatterAdd, j: &str) -> Result<String, String> {
    let rows = s.rows;
    let index = kernel.load(s.index.buffer, j);
    let index = kernel.define(index);
    let low = kernel.as_repr(&index, Repr::I32).text;
    let low = kernel.int(low);
    // Negative indices count from the end.
    let row = kernel.select(&format!("{low} < 0"), &format!("({low} + {rows})"), &low);
    let row = kernel.int(row);
    let mut is_row = format!("{row} >= 0 && {row} < {rows}");
    if index.repr.is_pair() {
        is_row += &format!(" && eq_pair({}, pair_of_i32({low}))", index.text);
    }
    let row = kernel.select(&format!("({is_row})"), &row, "-1");
    Ok(kernel.int(row))
}

/// Adds an element of the source to the total, or replaces the total by it.
fn add_source(
    kernel: &mut Kernel<'_>,
    s: &ScatterAdd,
    at: &[String],
    j: &str,
    total: &Value,
) -> Result<(), String> {
    let ScatterAdd { count, inner, overwrites: last, .. } = *s;
    let from = format!("({} * {count} + {j}) * {inner} + {}", at[0], at[2]);
    let from = kernel.load(s.source.buffer, &from);
    let new = if last { from } else { combine(kernel, ReduceOp::Sum, total, &from) };
    let new = match s.target.access.dtype {
        DType::F16 => Value::new(format!("to_f16({})", new.text), Repr::F32),
        DType::BF16 => Value::new(format!("to_bf16({})", new.text), Repr::F32),
        _ => new,
    };
    kernel.assign(total, &new);
    Ok(())
}

/// Returns the launch with an invocation for each element of the target. `sum` adds to the element.
fn element_launch(
    cx: &Context<'_>,
    s: &ScatterAdd,
    sum: impl FnOnce(&mut Kernel<'_>, &[String], &Value) -> Result<(), String>,
) -> Result<Launch, String> {
    let ScatterAdd { outer, rows, inner, .. } = *s;
    let mut kernel = cx.kernel();
    let at = define_coordinates(&mut kernel, "id", &[outer, rows, inner]);
    let to = kernel.int(format!("({} * {rows} + {}) * {inner} + {}", at[0], at[1], at[2]));
    let old = kernel.load(s.target.buffer, &to);
    let total = kernel.variable(&old);
    let depth = kernel.depth();
    sum(&mut kernel, &at, &total)?;
    kernel.close_to(depth);
    kernel.store(s.target.buffer, &to, &total);
    cx.finish(kernel, [outer, rows, inner].iter().map(|&size| size as u64).product())
}

/// Returns the launch in which each element searches all indices.
fn plain_launch(cx: &Context<'_>, s: &ScatterAdd) -> Result<Launch, String> {
    element_launch(cx, s, |kernel, at, total| {
        let j = kernel.begin_loop("0", &s.count.to_string());
        let row = target_row(kernel, s, &j)?;
        kernel.begin_if(&format!("{row} == {}", at[1]));
        add_source(kernel, s, at, &j, total)
    })
}

/// Chains in scratch memory: the first index of each row, then for each index the next index of the same row. The
/// number of indices marks the end of a chain.
struct Chains<'s> {
    s: &'s ScatterAdd,
    /// Offset in scratch memory.
    first: usize,
}

impl Chains<'_> {
    /// Returns the scratch offset of the first index of a row.
    fn head_offset(&self, row: &str) -> String {
        format!("{} + {row}", self.first)
    }

    /// Returns the scratch offset of the next index after `j`.
    fn next_offset(&self, j: &str) -> String {
        format!("{} + {j}", self.first + self.s.rows)
    }

    fn launches(&self, cx: &Context<'_>) -> Result<Vec<Launch>, String> {
        Ok(vec![self.clear(cx)?, self.link(cx)?, self.follow(cx)?])
    }

    /// Returns the launch that initializes an empty chain for each row.
    fn clear(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let mut kernel = cx.kernel();
        let row = kernel.int("int_of(id)".into());
        kernel.set_scratch(&self.head_offset(&row), &Value::new(self.s.count.to_string(), Repr::I32));
        cx.finish(kernel, self.s.rows as u64)
    }

    /// Returns the launch that links each index to the next index of its row. The first index of a row becomes its
    /// head.
    fn link(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let count = self.s.count;
        let mut kernel = cx.kernel();
        let j = kernel.int("int_of(id)".into());
        let row = target_row(&mut kernel, self.s, &j)?;
        let is_first = kernel.variable(&Value::new("true", Repr::Bool));
        let next = kernel.variable(&Value::new(count.to_string(), Repr::I32));
        let depth = kernel.depth();
        let k = kernel.begin_loop("0", &count.to_string());
        let other = target_row(&mut kernel, self.s, &k)?;
        kernel.begin_if(&format!("{other} == {row}"));
        let first = format!("({} && {k} >= {j})", is_first.text);
        kernel.assign(&is_first, &Value::new(first, Repr::Bool));
        kernel.begin_if(&format!("{k} > {j} && {k} < {}", next.text));
        kernel.assign(&next, &Value::new(k, Repr::I32));
        kernel.close_to(depth);
        kernel.set_scratch(&self.next_offset(&j), &next);
        kernel.begin_if(&format!("{} && {row} >= 0", is_first.text));
        kernel.set_scratch(&self.head_offset(&row), &Value::new(j, Repr::I32));
        cx.finish(kernel, count as u64)
    }

    /// Returns the launch in which each element follows the chain of its row.
    fn follow(&self, cx: &Context<'_>) -> Result<Launch, String> {
        element_launch(cx, self.s, |kernel, at, total| {
            let head = kernel.scratch(&self.head_offset(&at[1]), Repr::I32);
            let j = kernel.variable(&head);
            kernel.begin_loop("0", &self.s.count.to_string());
            kernel.line(&format!("if ({} >= {}) {{ break; }}", j.text, self.s.count));
            add_source(kernel, self.s, at, &j.text, total)?;
            let next = kernel.scratch(&self.next_offset(&j.text), Repr::I32);
            kernel.assign(&j, &next);
            Ok(())
        })
    }
}
