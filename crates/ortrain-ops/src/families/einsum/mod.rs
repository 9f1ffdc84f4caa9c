//! Sums of products in Einstein notation: `Einsum`.
//!
//! Source: ONNX Einsum-12 and 28 (<https://onnx.ai/onnx/operators/onnx__Einsum.html>); 28 adds bfloat16. A term names
//! the axes of an operand by letters. A repeated letter selects the diagonal; `...` stands for axes that broadcast.
//! Letters that are not in the result are summed. Without `->` the result has the axes of the ellipsis, followed by the
//! letters that occur once, in ASCII order. Axes of size 1 broadcast to other axes of the same letter, as in NumPy.
//!
//! The operator is a composition: operands are contracted in pairs, from the left. Axes of a single operand that are
//! not needed later are summed first. Shared axes that are not needed later become the inner axis of a MatMul; other
//! shared axes become its batch axes. Without inner axes the product is a Mul.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::Class;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::cast;
use crate::support::sizes::{
    self, Size, axis_positions, dtype_of, insert_axes, permute_axes, reduce_sum_axes, remove_axes,
    reshape_to, shape_of, size_of,
};

/// Name of an axis: a letter, or an axis of the ellipsis, counted from the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Ellipsis(usize),
    Letter(char),
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Ellipsis(_) => f.write_str("..."),
            Label::Letter(letter) => write!(f, "{letter}"),
        }
    }
}

/// Parsed term; `None` is the ellipsis.
type Term = Vec<Option<char>>;

/// Parsed equation.
#[derive(Debug, PartialEq)]
struct Equation {
    operands: Vec<Term>,
    result: Option<Term>,
}

impl Equation {
    fn parse(text: &str) -> Result<Equation, OpError> {
        let wrong = |what: &str| OpError::invalid(format!("equation {text:?} {what}"));
        let plain: String = text.chars().filter(|&c| c != ' ').collect();
        let term = |text: &str| -> Result<Term, OpError> {
            let mut labels = Vec::new();
            let mut rest = text;
            while let Some(c) = rest.chars().next() {
                if let Some(after) = rest.strip_prefix("...") {
                    if labels.contains(&None) {
                        return Err(wrong("has \"...\" twice in one term"));
                    }
                    labels.push(None);
                    rest = after;
                } else if c.is_ascii_alphabetic() {
                    labels.push(Some(c));
                    rest = &rest[1..];
                } else {
                    return Err(wrong(&format!("has {c:?} in a term; only letters and \"...\" are allowed")));
                }
            }
            Ok(labels)
        };
        let (operands, result) = match plain.split_once("->") {
            Some((operands, result)) => (operands, Some(term(result)?)),
            None => (plain.as_str(), None),
        };
        let operands = operands.split(',').map(term).collect::<Result<Vec<Term>, _>>()?;
        if let Some(result) = &result {
            for (k, label) in result.iter().enumerate() {
                let Some(letter) = label else { continue };
                if result[..k].contains(label) {
                    return Err(wrong(&format!("has {letter:?} twice in its result")));
                }
                if !operands.iter().any(|operand| operand.contains(label)) {
                    return Err(wrong(&format!("has {letter:?} in its result but in no operand")));
                }
            }
        }
        Ok(Equation { operands, result })
    }

    /// Returns the labels of all operands and of the result, for operands of these ranks.
    fn labels(&self, ranks: &[usize]) -> Result<(Vec<Vec<Label>>, Vec<Label>), OpError> {
        if self.operands.len() != ranks.len() {
            return Err(OpError::invalid(format!(
                "the equation has {} terms for {} inputs",
                self.operands.len(),
                ranks.len()
            )));
        }
        let mut max_dots = 0;
        let mut operands = Vec::new();
        for (k, (term, &rank)) in self.operands.iter().zip(ranks).enumerate() {
            let letters = term.iter().flatten().count();
            let dots = term.contains(&None);
            if rank < letters || (!dots && rank > letters) {
                let suffix = if dots { " or more" } else { "" };
                return Err(OpError::invalid(format!(
                    "input {k} has {rank} axes, but its term needs {letters}{suffix}"
                )));
            }
            max_dots = max_dots.max(rank - letters);
            operands.push(expand_ellipsis(term, rank - letters));
        }
        let result = match &self.result {
            Some(term) => expand_ellipsis(term, max_dots),
            None => {
                let mut letters: Vec<char> = self.operands.iter().flatten().flatten().copied().collect();
                letters.sort_unstable();
                let once = |&&letter: &&char| letters.iter().filter(|&&other| other == letter).count() == 1;
                let letters = letters.iter().filter(once).map(|&letter| Label::Letter(letter));
                (0..max_dots).rev().map(Label::Ellipsis).chain(letters).collect()
            }
        };
        Ok((operands, result))
    }
}

/// Returns the labels of a term, with `dots` labels in place of its ellipsis.
fn expand_ellipsis(term: &Term, dots: usize) -> Vec<Label> {
    let labels = |label: &Option<char>| match label {
        Some(letter) => vec![Label::Letter(*letter)],
        None => (0..dots).rev().map(Label::Ellipsis).collect(),
    };
    term.iter().flat_map(labels).collect()
}

/// Returns the size of each label: a known size other than 1 if possible, otherwise the first size that is not 1.
fn infer_label_sizes(operands: &[Vec<Label>], shapes: &[Shape]) -> Result<Vec<(Label, Dim)>, OpError> {
    let mut sizes: Vec<(Label, Dim)> = Vec::new();
    for (labels, shape) in operands.iter().zip(shapes) {
        for (&label, dim) in labels.iter().zip(shape.iter()) {
            let Some((_, old)) = sizes.iter_mut().find(|(other, _)| *other == label) else {
                sizes.push((label, dim.clone()));
                continue;
            };
            match (old.known(), dim.known()) {
                (Some(a), Some(b)) if a != b && a != 1 && b != 1 => {
                    return Err(OpError::invalid(format!(
                        "axes named {:?} have sizes {a} and {b}",
                        label.to_string()
                    )));
                }
                (Some(1), _) => *old = dim.clone(),
                (None, Some(size)) if size != 1 => *old = dim.clone(),
                _ => {}
            }
        }
    }
    Ok(sizes)
}

struct Einsum {
    equation: Equation,
}

impl Op for Einsum {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let count = cx.node().inputs.len();
        cx.check_arity(count.max(1), usize::MAX, 1)?;
        cx.expect_dtype(0, "a number", DType::is_number)?;
        let dtype = cx.expect_same_dtype(0..count)?;
        let shapes: Option<Vec<Shape>> = (0..count).map(|k| cx.shape(k).cloned()).collect();
        let shape = match shapes {
            Some(shapes) => {
                let ranks: Vec<usize> = shapes.iter().map(Shape::rank).collect();
                let (operands, result) = self.equation.labels(&ranks)?;
                let sizes = infer_label_sizes(&operands, &shapes)?;
                let size_of = |label: &Label| {
                    sizes.iter().find(|(other, _)| other == label).map(|(_, dim)| dim.clone())
                };
                result.iter().map(size_of).collect()
            }
            None => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

/// Operand or intermediate product: a value and the labels of its axes, each once.
struct Factor {
    value: ValueId,
    labels: Vec<Label>,
    /// Sizes of the axes, as far as the graph knows them.
    dims: Vec<Dim>,
}

impl Factor {
    fn has(&self, label: Label) -> bool {
        self.labels.contains(&label)
    }

    fn axis(&self, label: Label) -> usize {
        self.labels.iter().position(|&other| other == label).expect("asked for its own labels")
    }

    /// Keeps the labels and sizes for which `keep` returns true. The value must already be without the other axes.
    fn retain_axes(&mut self, keep: impl Fn(Label) -> bool) {
        let keep_flags: Vec<bool> = self.labels.iter().map(|&label| keep(label)).collect();
        let mut at = keep_flags.iter();
        self.labels.retain(|_| *at.next().expect("as many"));
        let mut at = keep_flags.iter();
        self.dims.retain(|_| *at.next().expect("as many"));
    }

    /// Sums over the axes with these labels.
    fn sum_axes(&mut self, rw: &mut Rewrite<'_>, gone: &[Label]) {
        let axes: Vec<i64> = gone.iter().map(|&label| self.axis(label) as i64).collect();
        self.value = reduce_sum_axes(rw, self.value, &axes);
        self.retain_axes(|label| !gone.contains(&label));
    }

    /// Permutes the axes to `order`, which contains all labels.
    fn permute(&mut self, rw: &mut Rewrite<'_>, order: &[Label]) {
        let axes: Vec<usize> = order.iter().map(|&label| self.axis(label)).collect();
        self.value = permute_axes(rw, self.value, &axes);
        self.dims = axes.iter().map(|&axis| self.dims[axis].clone()).collect();
        self.labels = order.to_vec();
    }

    /// Replaces repeated labels by diagonals. Other elements are replaced by zeros before the sum, so their values have
    /// no influence.
    fn take_diagonals(&mut self, rw: &mut Rewrite<'_>, dtype: DType) -> Result<(), OpError> {
        while let Some(second) = (0..self.labels.len()).find(|&k| self.labels[..k].contains(&self.labels[k]))
        {
            let first = self.axis(self.labels[second]);
            let (a, b) = (&self.dims[first], &self.dims[second]);
            if a.known().zip(b.known()).is_some_and(|(a, b)| a != b) {
                return Err(OpError::invalid(format!(
                    "axes named {:?} have sizes {a} and {b}; a diagonal needs equal sizes",
                    self.labels[second].to_string()
                )));
            }
            let size = match a.known().or(b.known()) {
                Some(size) => Size::Number(size as i64),
                None => {
                    let shape = rw.add("Shape", &[self.value], Attrs::new());
                    Size::Value(sizes::slice_axis(rw, shape, 0, first as i64, first as i64 + 1, 1))
                }
            };
            let indices = axis_positions(rw, size);
            let rank = self.labels.len() as i64;
            // Position along the axis `axis` of an operand: each later axis has size 1.
            let across = |rw: &mut Rewrite<'_>, axis: usize| {
                let later_axes: Vec<i64> = (1..rank - axis as i64).collect();
                insert_axes(rw, indices, &later_axes)
            };
            let (rows, columns) = (across(rw, first), across(rw, second));
            let on = rw.add("Equal", &[rows, columns], Attrs::new());
            let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
            let chosen = rw.add("Where", &[on, self.value, zero], Attrs::new());
            self.value = reduce_sum_axes(rw, chosen, &[second as i64]);
            self.labels.remove(second);
            let dim = self.dims.remove(second);
            if self.dims[first].known().is_none() {
                self.dims[first] = dim;
            }
        }
        Ok(())
    }
}

/// Returns the size of a label for a new shape. An unknown size is read from an operand with this label.
fn label_size(rw: &mut Rewrite<'_>, inputs: &[(ValueId, Vec<Label>)], label: Label, dim: &Dim) -> Size {
    if let Some(size) = dim.known() {
        return Size::Number(size as i64);
    }
    for (value, labels) in inputs {
        let Some(axis) = labels.iter().position(|&other| other == label) else { continue };
        let is_one = rw.shape(*value).is_some_and(|shape| shape[axis].is_one());
        if !is_one {
            return size_of(rw, *value, axis);
        }
    }
    Size::Number(1)
}

/// Multiplies two factors. The result has the labels for which `is_needed` returns true, and possibly more labels to be
/// summed later.
fn contract(
    rw: &mut Rewrite<'_>,
    inputs: &[(ValueId, Vec<Label>)],
    mut a: Factor,
    mut b: Factor,
    is_needed: impl Fn(Label) -> bool,
) -> Factor {
    let dim_of = |factor: &Factor, label: Label| factor.dims[factor.axis(label)].clone();
    let shared: Vec<Label> = a.labels.iter().copied().filter(|&label| b.has(label)).collect();
    // Axes of the ellipsis may broadcast at run time, which is impossible for an inner axis.
    let inner = |label: Label| {
        let certain = matches!(label, Label::Letter(_)) || dim_of(&a, label) == dim_of(&b, label);
        !is_needed(label) && certain
    };
    let (inner, stack): (Vec<Label>, Vec<Label>) = shared.iter().copied().partition(|&label| inner(label));
    let exclusive_labels = |factor: &Factor, other: &Factor| -> Vec<Label> {
        factor.labels.iter().copied().filter(|&label| !other.has(label)).collect()
    };
    let (rows, columns) = (exclusive_labels(&a, &b), exclusive_labels(&b, &a));
    let broadcast = |label: &Label| {
        let (left_dim, other) = (dim_of(&a, *label), dim_of(&b, *label));
        if left_dim.is_one() || (left_dim.known().is_none() && other.known().is_some() && !other.is_one()) {
            other
        } else {
            left_dim
        }
    };
    let stack_dims: Vec<Dim> = stack.iter().map(broadcast).collect();
    let own_dims = |factor: &Factor, labels: &[Label]| -> Vec<Dim> {
        labels.iter().map(|&l| dim_of(factor, l)).collect()
    };
    let mut labels: Vec<Label> = stack.clone();
    labels.extend(rows.iter().chain(&columns));
    let dims = [stack_dims, own_dims(&a, &rows), own_dims(&b, &columns)].concat();
    if inner.is_empty() || (rows.is_empty() && columns.is_empty()) {
        // Element-wise product: missing axes have size 1 in the other factor.
        let order = [stack.as_slice(), &rows, &columns, &inner].concat();
        let aligned = |rw: &mut Rewrite<'_>, factor: &mut Factor| {
            let present: Vec<Label> = order.iter().copied().filter(|&label| factor.has(label)).collect();
            factor.permute(rw, &present);
            let first = order.iter().position(|&label| factor.has(label)).unwrap_or(order.len());
            // Leading axes of size 1 may be omitted.
            let missing: Vec<i64> =
                (first..order.len()).filter(|&k| !factor.has(order[k])).map(|k| (k - first) as i64).collect();
            insert_axes(rw, factor.value, &missing)
        };
        let (left, right) = (aligned(rw, &mut a), aligned(rw, &mut b));
        let value = rw.add("Mul", &[left, right], Attrs::new());
        let gone: Vec<i64> = (labels.len()..order.len()).map(|axis| axis as i64).collect();
        return Factor { value: reduce_sum_axes(rw, value, &gone), labels, dims };
    }
    let sizes = |rw: &mut Rewrite<'_>, factor: &Factor, labels: &[Label]| -> Vec<Size> {
        labels.iter().map(|&label| label_size(rw, inputs, label, &dim_of(factor, label))).collect()
    };
    let (row_sizes, inner_sizes, column_sizes) =
        (sizes(rw, &a, &rows), sizes(rw, &a, &inner), sizes(rw, &b, &columns));
    a.permute(rw, &[stack.as_slice(), &rows, &inner].concat());
    b.permute(rw, &[stack.as_slice(), &inner, &columns].concat());
    let total_size = |rw: &mut Rewrite<'_>, sizes: &[Size]| {
        sizes.iter().fold(Size::Number(1), |product, &size| sizes::multiply_sizes(rw, product, size))
    };
    let [m, k, n] = [&row_sizes, &inner_sizes, &column_sizes].map(|sizes| total_size(rw, sizes));
    let front = vec![Size::SameAxis; stack.len()];
    // Reshapes to a stack of matrices. Factors that are matrices already remain unchanged.
    let matrices = |rw: &mut Rewrite<'_>, value: ValueId, counts: [usize; 2], sizes: [Size; 2]| {
        if counts == [1, 1] { value } else { reshape_to(rw, value, &[front.as_slice(), &sizes].concat()) }
    };
    let left = matrices(rw, a.value, [rows.len(), inner.len()], [m, k]);
    let right = matrices(rw, b.value, [inner.len(), columns.len()], [k, n]);
    let mut value = rw.add("MatMul", &[left, right], Attrs::new());
    if [rows.len(), columns.len()] != [1, 1] {
        value = reshape_to(rw, value, &[front, row_sizes, column_sizes].concat());
    }
    Factor { value, labels, dims }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let equation = parse_equation(rw.node())?;
    let count = rw.node().inputs.len();
    let values = (0..count).map(|k| rw.required_input(k)).collect::<Result<Vec<ValueId>, _>>()?;
    let mut shapes = Vec::new();
    for (k, &value) in values.iter().enumerate() {
        shapes.push(shape_of(rw, value, &format!("input {k}"))?);
    }
    let ranks: Vec<usize> = shapes.iter().map(Shape::rank).collect();
    let (operands, result) = equation.labels(&ranks)?;
    let sizes = infer_label_sizes(&operands, &shapes)?;
    let dtype =
        dtype_of(rw, *values.first().ok_or_else(|| OpError::invalid("it has no inputs"))?, "input 0")?;
    let through = arithmetic_dtype(dtype);
    let inputs: Vec<(ValueId, Vec<Label>)> = values.iter().copied().zip(operands.iter().cloned()).collect();
    let mut factors = Vec::new();
    for ((value, labels), shape) in inputs.iter().zip(shapes) {
        let value = cast(rw.patch().1, *value, dtype, through);
        let mut factor = Factor { value, labels: labels.clone(), dims: shape.to_vec() };
        factor.take_diagonals(rw, through)?;
        // An axis of size 1 that broadcasts to a longer axis of the same label is removed: the product stays the same.
        let short = |k: usize| {
            let longer = sizes.iter().any(|(label, dim)| *label == factor.labels[k] && !dim.is_one());
            factor.dims[k].is_one() && longer
        };
        let short: Vec<usize> = (0..factor.labels.len()).filter(|&k| short(k)).collect();
        let gone: Vec<Label> = short.iter().map(|&k| factor.labels[k]).collect();
        let axes: Vec<i64> = short.iter().map(|&k| k as i64).collect();
        factor.value = remove_axes(rw, factor.value, &axes);
        factor.retain_axes(|label| !gone.contains(&label));
        factors.push(factor);
    }
    let mut rest = factors.into_iter();
    let mut total = rest.next().ok_or_else(|| OpError::invalid("it has no inputs"))?;
    let mut rest: std::collections::VecDeque<Factor> = rest.collect();
    loop {
        let is_unique = |label: Label, rest: &std::collections::VecDeque<Factor>| {
            !result.contains(&label) && !rest.iter().any(|factor| factor.has(label))
        };
        let gone: Vec<Label> =
            total.labels.iter().copied().filter(|&label| is_unique(label, &rest)).collect();
        total.sum_axes(rw, &gone);
        let Some(mut next) = rest.pop_front() else { break };
        let gone: Vec<Label> = next
            .labels
            .iter()
            .copied()
            .filter(|&label| is_unique(label, &rest) && !total.has(label))
            .collect();
        next.sum_axes(rw, &gone);
        total = contract(rw, &inputs, total, next, |label| !is_unique(label, &rest));
    }
    total.permute(rw, &result);
    let value = cast(rw.patch().1, total.value, through, dtype);
    rw.replace_output(0, value);
    Ok(())
}

/// Returns the type for sums and products: ONNX does not define them for narrow integers. Truncation at the end gives
/// the same result as truncation at every step.
fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::I8 | DType::I16 => DType::I32,
        DType::U8 | DType::U16 => DType::U32,
        _ => dtype,
    }
}

fn parse_equation(node: &Node) -> Result<Equation, OpError> {
    Equation::parse(Attrs::required("equation", node.attrs.string("equation")?)?)
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Einsum { equation: parse_equation(node)? }))
}

/// Decomposes the operator for opsets before 12.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 12 { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Einsum", &[12, 28], build)
            .class(Class::Contraction)
            .composition(decompose)
            .downgrade(downgrade)
            .later_types(&[(28, &[DType::BF16])]),
    ]
}

#[cfg(test)]
mod tests;
