//! Matrix products with packed integers: each element is decoded where it is loaded.

use ortrain_expr::{Precision, QuantizedNumbers, Scalar};
use ortrain_program::{QuantizedFactor, QuantizedMatMul};

use crate::context::Context;
use crate::expr::position;
use crate::inner_product::{InnerProduct, LEFT, MatmulOperands, are_terms_adjacent};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::matmul::rounded;
use crate::matmul_strategy;
use crate::repr::{Repr, Value};

pub(crate) fn launches(cx: &Context<'_>, m: &QuantizedMatMul) -> Result<Vec<Launch>, String> {
    let factors = DecodedFactors(m);
    let plain = |kernel: &mut Kernel<'_>, at: &[String]| {
        let sum = InnerProduct::new(kernel, m.precision);
        let depth = kernel.depth();
        let l = kernel.begin_loop("0", &m.k.to_string());
        let a = kernel.load(m.a.buffer, &position(&m.a, &[at[0].clone(), l.clone()]));
        let b = decoded_element(kernel, &m.b, &l, &at[1]);
        sum.add(kernel, a, b);
        kernel.close_to(depth);
        Ok(vec![sum.result(kernel)])
    };
    matmul_strategy::launches(cx, &factors, &m.epilogue, &plain)
}

/// Prints the element of a factor at a row and a column.
fn decoded_element(kernel: &mut Kernel<'_>, b: &QuantizedFactor, row: &str, column: &str) -> Value {
    let matrix = &b.matrix;
    let (line, at) = if b.has_lines_of_columns { (column, row) } else { (row, column) };
    let position = kernel.int(format!("({line}) * {} + {at}", matrix.line_len()));
    let per_byte = matrix.integers_per_byte();
    let byte = kernel.load(b.bytes, &format!("({position} / {per_byte})")).text;
    let integer = if per_byte == 1 {
        byte
    } else {
        let mut index = format!("({position} % {per_byte})");
        if matrix.is_high_first {
            index = format!("({} - {index})", per_byte - 1);
        }
        let mask = (1u32 << matrix.bits) - 1;
        format!("(({byte} >> bits_of_int({index} * {})) & {mask}u)", matrix.bits)
    };
    let integer = kernel.define(Value::new(integer, Repr::U32));
    let block = kernel.int(format!("{position} / {}", matrix.block));
    let number = match (&matrix.numbers, b.zero_points) {
        (QuantizedNumbers::Table(numbers), _) => selected(kernel, &integer.text, numbers),
        (QuantizedNumbers::Distances { zero_point }, zero_points) => {
            let own = match zero_points {
                Some(id) => kernel.load(id, &block),
                None => kernel.constant(Scalar::F32(*zero_point), Repr::F32),
            };
            format!("({} - {})", kernel.as_repr(&integer, Repr::F32).text, own.text)
        }
    };
    let scale = kernel.load(b.scales, &block).text;
    let element = Value::new(format!("({number} * {scale})"), Repr::F32);
    kernel.define(rounded(element, b.rounded))
}

/// Prints the number of a table at an index, as a tree of selections by the bits of the index.
fn selected(kernel: &Kernel<'_>, index: &str, numbers: &[f32]) -> String {
    match numbers {
        [number] => kernel.constant(Scalar::F32(*number), Repr::F32).text,
        _ => {
            let (low, high) = numbers.split_at(numbers.len() / 2);
            let (low, high) = (selected(kernel, index, low), selected(kernel, index, high));
            kernel.select(&format!("(({index} & {}u) != 0u)", numbers.len() / 2), &high, &low)
        }
    }
}

/// Factors of a product with packed integers.
struct DecodedFactors<'m>(&'m QuantizedMatMul);

impl MatmulOperands for DecodedFactors<'_> {
    fn batch(&self) -> Vec<usize> {
        Vec::new()
    }

    fn sides(&self) -> [usize; 3] {
        [self.0.m, self.0.n, self.0.k]
    }

    fn precision(&self) -> Precision {
        self.0.precision
    }

    fn runs_along_terms(&self, side: usize) -> bool {
        let strides = &self.0.a.access.strides;
        if side == LEFT { are_terms_adjacent(strides[0], strides[1]) } else { self.0.b.has_lines_of_columns }
    }

    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let QuantizedMatMul { a, b, .. } = self.0;
        Ok(if side == LEFT {
            kernel.load(a.buffer, &position(a, &[line[0].clone(), term[0].clone()]))
        } else {
            decoded_element(kernel, b, &term[0], &line[0])
        })
    }
}
