//! Inner products, and the interface of instructions that are matrix products.

use ortrain_expr::{Precision, Scalar};

use crate::expr::AnalyzedNest;
use crate::kernel::Kernel;
use crate::nest;
use crate::repr::{Repr, Value};

/// Returns true if adjacent elements in memory are terms of one line of a factor. The arguments are its strides between
/// lines and between terms.
pub(crate) fn are_terms_adjacent(lines: isize, terms: isize) -> bool {
    let (lines, terms) = (lines.unsigned_abs(), terms.unsigned_abs());
    terms != 0 && (lines == 0 || terms < lines)
}

/// Inner product under construction.
pub(crate) struct InnerProduct {
    precision: Precision,
    total: Value,
    /// Sum of the products of first terms alone, if factors have several terms.
    first: Option<Value>,
}

/// Splits a factor into its terms for a precision.
pub(crate) fn split_terms(kernel: &mut Kernel<'_>, precision: Precision, factor: Value) -> Vec<Value> {
    let names: &[&str] = match precision {
        Precision::F32 => return vec![factor],
        Precision::Bf16 => &["to_bf16"],
        Precision::Bf16x3 => &["first_term", "second_term"],
        Precision::Bf16x6 => &["first_term", "second_term", "third_term"],
    };
    let factor = kernel.define(factor).text;
    let term = |name: &&str| Value::new(format!("{name}({factor})"), Repr::F32);
    names.iter().map(term).map(|term| kernel.define(term)).collect()
}

impl InnerProduct {
    pub(crate) fn new(kernel: &mut Kernel<'_>, precision: Precision) -> InnerProduct {
        InnerProduct::with_repr(kernel, precision, Repr::F32)
    }

    /// Creates an inner product of another type than 32-bit floats. A vector has several inner products, of one left
    /// factor and several right factors. In 64-bit floats, factors are not split.
    pub(crate) fn with_repr(kernel: &mut Kernel<'_>, precision: Precision, repr: Repr) -> InnerProduct {
        let (zero, precision) = match repr {
            Repr::F64 => (Scalar::F64(0.0), Precision::F32),
            _ => (Scalar::F32(0.0), precision),
        };
        let zero = kernel.constant(zero, repr);
        let total = kernel.variable(&zero);
        let first = (precision.terms() > 1).then(|| kernel.variable(&zero));
        InnerProduct { precision, total, first }
    }

    /// Returns one of several inner products.
    pub(crate) fn component(&self, name: &str) -> InnerProduct {
        let part = |sum: &Value| Value::new(format!("{}.{name}", sum.text), Repr::F32);
        InnerProduct { total: part(&self.total), first: self.first.as_ref().map(part), ..*self }
    }

    /// Returns the number of sums per inner product.
    pub(crate) fn sums_per_product(precision: Precision) -> usize {
        precision.terms().min(2)
    }

    /// Adds a product.
    pub(crate) fn add(&self, kernel: &mut Kernel<'_>, a: Value, b: Value) {
        let [a, b] = [a, b].map(|factor| split_terms(kernel, self.precision, factor));
        self.add_terms(kernel, &a, &b);
    }

    /// Adds the product of two factors that are already split into terms.
    pub(crate) fn add_terms(&self, kernel: &mut Kernel<'_>, a: &[Value], b: &[Value]) {
        let product = |i: usize, j: usize| format!("{} * {}", a[i].text, b[j].text);
        if let Some(first) = &self.first {
            kernel.line(&format!("{0} = {0} + {1};", first.text, product(0, 0)));
        }
        for &(i, j) in self.precision.products() {
            kernel.line(&format!("{0} = {0} + {1};", self.total.text, product(i, j)));
        }
    }

    /// Returns the sums so far: the total, then the sum of first terms if factors have several terms.
    pub(crate) fn sums(&self) -> impl Iterator<Item = &Value> {
        [&self.total].into_iter().chain(&self.first)
    }

    /// Adds the sums of another part of the same product.
    pub(crate) fn add_sums(&self, kernel: &mut Kernel<'_>, sums: &[Value]) {
        for (sum, other) in self.sums().zip(sums) {
            kernel.line(&format!("{0} = {0} + {1};", sum.text, other.text));
        }
    }

    pub(crate) fn result(&self, kernel: &Kernel<'_>) -> Value {
        let total = &self.total.text;
        let text = match &self.first {
            None => total.clone(),
            Some(first) => kernel.select(&format!("is_nan({total})"), &first.text, total),
        };
        Value::new(text, self.total.repr)
    }
}

/// Side of the left factor of a product.
pub(crate) const LEFT: usize = 0;
/// Side of the right factor of a product.
pub(crate) const RIGHT: usize = 1;

/// Factors of a batch of matrix products, as kernels load them.
///
/// A line is a row of the left factor or a column of the right one: the elements of a factor that one result element
/// needs. Loads have two parts, so that values shared by a line or by a term are computed once.
pub(crate) trait MatmulOperands {
    /// Returns the sizes of the batch axes.
    fn batch(&self) -> Vec<usize>;

    /// Returns the rows and columns of a product, and the length of the sums.
    fn sides(&self) -> [usize; 3];

    /// Returns the precision of the factors.
    fn precision(&self) -> Precision;

    /// Returns true if elements of the left factor are expensive. They are then computed once for many columns, or not
    /// shared at all.
    fn is_costly(&self) -> bool {
        false
    }

    /// Prints the result at a point of the epilogue, from the summed product.
    fn finish_value(
        &self,
        _kernel: &mut Kernel<'_>,
        _at: &[String],
        product: Value,
    ) -> Result<Value, String> {
        Ok(product)
    }

    /// Finishes the result at a point of the epilogue, from the summed product.
    fn finish(
        &self,
        kernel: &mut Kernel<'_>,
        epilogue: &AnalyzedNest<'_>,
        at: Vec<String>,
        product: Value,
    ) -> Result<(), String> {
        let result = self.finish_value(kernel, &at, product)?;
        nest::finish_map(kernel, epilogue, at, vec![result])
    }

    /// Returns true if adjacent elements in memory are terms of one line, not the same term of adjacent lines.
    fn runs_along_terms(&self, side: usize) -> bool;

    /// Defines the values that all elements of a line share, and returns their names.
    fn define_line(
        &self,
        _kernel: &mut Kernel<'_>,
        _side: usize,
        batch: &[String],
        line: &str,
    ) -> Vec<String> {
        batch.iter().cloned().chain([line.to_owned()]).collect()
    }

    /// Defines the values that all elements of a term share, and returns their names.
    fn define_term(&self, _kernel: &mut Kernel<'_>, _side: usize, term: &str) -> Vec<String> {
        vec![term.to_owned()]
    }

    /// Prints an element of a factor, from the shared values of its line and its term. It may start a block for
    /// existing elements; other elements are zero.
    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String>;

    /// Returns the point of the epilogue's space for an element of the product.
    fn point(&self, _kernel: &mut Kernel<'_>, batch: &[String], position: [&str; 2]) -> Vec<String> {
        batch.iter().cloned().chain(position.map(String::from)).collect()
    }
}

/// Prints an element of a factor, or zero if a condition fails or the element does not exist.
pub(crate) fn element_if(
    kernel: &mut Kernel<'_>,
    factors: &dyn MatmulOperands,
    side: usize,
    condition: Option<&str>,
    [line, term]: [&[String]; 2],
) -> Result<Value, String> {
    let value = kernel.variable(&Value::new("0.0f", Repr::F32));
    let depth = kernel.depth();
    if let Some(condition) = condition {
        kernel.begin_if(condition);
    }
    let loaded = factors.element(kernel, side, line, term)?;
    let loaded = kernel.as_repr(&loaded, Repr::F32);
    kernel.assign(&value, &loaded);
    kernel.close_to(depth);
    Ok(value)
}
