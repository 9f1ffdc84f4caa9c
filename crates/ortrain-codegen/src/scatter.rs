//! Sums at given rows: one invocation per element of the target, which looks for its row in the order of the indices.

use ortrain_expr::{DType, ReduceOp};
use ortrain_program::ScatterAdd;

use crate::dialect::Repr;
use crate::kernel::{Value, float64};
use crate::launch::Launch;
use crate::lower::Context;
use crate::points::coordinates;
use crate::reduce::combine;

pub(crate) fn launches(cx: &Context<'_>, s: &ScatterAdd) -> Result<Vec<Launch>, String> {
    let ScatterAdd { outer, rows, count, inner, last, .. } = *s;
    let dtype = s.target.access.dtype;
    if dtype == DType::F64 {
        return Err(float64());
    }
    let mut kernel = cx.kernel();
    let at = coordinates(&mut kernel, "id", &[outer, rows, inner]);
    let to = format!("({} * {rows} + {}) * {inner} + {}", at[0], at[1], at[2]);
    let to = kernel.define(Value::new(to, Repr::I32)).text;
    let old = kernel.load(s.target.buffer, &to)?;
    let total = kernel.variable(&old);
    let depth = kernel.depth();
    let j = kernel.counted("0", &count.to_string());
    let index = kernel.load(s.index.buffer, &j)?;
    let index = kernel.define(index);
    // Counted from the end where it is negative.
    let from_end = format!("({} - {rows})", at[1]);
    let meets = match index.repr {
        Repr::I32 => format!("{0} == {1} || {0} == {from_end}", index.text, at[1]),
        _ => format!(
            "eq_pair({0}, pair_of_i32({1})) || eq_pair({0}, pair_of_i32({from_end}))",
            index.text, at[1]
        ),
    };
    kernel.when(&meets);
    let from = format!("({} * {count} + {j}) * {inner} + {}", at[0], at[2]);
    let from = kernel.load(s.source.buffer, &from)?;
    let new = if last { from } else { combine(&kernel, ReduceOp::Sum, &total, &from) };
    let new = match dtype {
        DType::F16 => Value::new(format!("to_f16({})", new.text), Repr::F32),
        DType::BF16 => Value::new(format!("to_bf16({})", new.text), Repr::F32),
        _ => new,
    };
    kernel.assign(&total, &new);
    kernel.close_to(depth);
    kernel.store(s.target.buffer, &to, &total)?;
    Ok(vec![cx.finish(kernel, [outer, rows, inner].iter().map(|&size| size as u64).product())?])
}
