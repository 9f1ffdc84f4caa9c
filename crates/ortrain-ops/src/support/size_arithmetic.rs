//! Element-wise arithmetic of sizes.

use ortrain_graph::{DType, Dim};

use crate::infer::Infer;

/// Sets the elements of an element-wise result if both operands are sizes.
pub(crate) fn infer_size_arithmetic(cx: &mut Infer<'_>, name: &str) {
    let small = cx.shape(0).is_some_and(|s| s.rank() <= 1) && cx.shape(1).is_some_and(|s| s.rank() <= 1);
    let integer = cx.dtype(0).is_ok_and(|dtype| dtype == DType::I64);
    let sign = match name {
        "Add" => "+",
        "Sub" => "-",
        "Mul" => "*",
        "Div" => "/",
        _ => return,
    };
    let (true, true, Some(a), Some(b)) = (small, integer, cx.sizes(0), cx.sizes(1)) else { return };
    let len = if a.len() == 1 { b.len() } else { a.len() };
    let at = |sizes: &[Dim], k: usize| if sizes.len() == 1 { sizes[0].clone() } else { sizes[k].clone() };
    if b.len() != len && b.len() != 1 {
        return;
    }
    let combine = |x: Dim, y: Dim| -> Option<Dim> {
        match (&x, &y) {
            (Dim::Known(p), Dim::Known(q)) => match sign {
                "+" => p.checked_add(*q),
                "-" => p.checked_sub(*q),
                "*" => p.checked_mul(*q),
                _ => p.checked_div(*q),
            }
            .map(Dim::Known),
            (_, Dim::Known(0)) if sign == "+" || sign == "-" => Some(x),
            (Dim::Known(0), _) if sign == "+" => Some(y),
            (_, Dim::Known(1)) if sign == "*" || sign == "/" => Some(x),
            (Dim::Known(1), _) if sign == "*" => Some(y),
            _ => Some(Dim::formula(format!("({x}{sign}{y})"))),
        }
    };
    let sizes: Option<Vec<Dim>> = (0..len).map(|k| combine(at(&a, k), at(&b, k))).collect();
    cx.set_output_sizes(0, sizes);
}
