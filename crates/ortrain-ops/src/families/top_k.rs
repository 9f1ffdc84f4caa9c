//! TopK: the largest or smallest elements along an axis, sorted, and their indices.
//!
//! TopK-1, 10, 11, 24 of ONNX (<https://onnx.ai/onnx/operators/onnx__TopK.html>). `K` is an attribute before opset 10
//! and an input from this opset on; its value must be known when a program is built. Of equal elements the one with the
//! lower index comes first; NaN is larger than every number. The result is sorted even if `sorted` is 0.
//!
//! A bitonic network sorts the indices along the axis. In each pass every element is compared with one other, and both
//! are swapped if necessary. For an axis of `2^b` elements there are about `b^2 / 2` passes, and every pass is a map.
//! Axes of more than 16 384 elements, and axes with a size that depends on values, are sorted on the host, in the same
//! order. The gradient is scattered to the indices.

use std::sync::Arc;

use ortrain_expr::{BinaryOp, CompareOp, Reg, Scalar, Steps, UnaryOp};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Tensor};
use ortrain_program::{BufferId, HostFunction};

use crate::OpError;
use crate::class::Class;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, NestBuilder, split_at_axis};
use crate::op::{Definition, Op, Placement, ValueRequirement};
use crate::rewrite::{Rewrite, ints_input_to_attribute};
use crate::support::element_indices::add_elements_gradient;

/// Maximum length of an axis that a network sorts. For `2^b` elements it has about `b^2 / 2` passes over all elements;
/// one thread sorts longer axes faster.
const MAX_NETWORK_LEN: usize = 1 << 14;

#[derive(Clone, Copy, Debug)]
struct TopK {
    axis: i64,
    largest: bool,
    /// True if the host sorts.
    on_host: bool,
}

/// Lines of `size` elements that are sorted, `[before, size, after]`, with their indices padded to a power of two.
struct SortedLines {
    before: usize,
    size: usize,
    after: usize,
    padded: usize,
}

/// Element of a comparison: its index, and its value.
#[derive(Clone, Copy)]
struct Candidate {
    index: Reg,
    value: Reg,
}

impl TopK {
    /// Returns true if `a` comes before `b`. Indices after the end come last.
    fn emit_comes_before(&self, nest: &mut NestBuilder, size: usize, a: Candidate, b: Candidate) -> Reg {
        let e = &mut nest.b;
        let end = e.int(size as i64);
        let (low, high) = if self.largest { (b.value, a.value) } else { (a.value, b.value) };
        let mut precedes = e.compare(CompareOp::Lt, low, high);
        let mut equal = e.compare(CompareOp::Eq, a.value, b.value);
        if e.ty(a.value).is_float() {
            let [a_nan, b_nan] = [a.value, b.value].map(|value| {
                let same = e.compare(CompareOp::Eq, value, value);
                e.unary(UnaryOp::Not, same)
            });
            let (more, less) = if self.largest { (a_nan, b_nan) } else { (b_nan, a_nan) };
            let is_not_nan = e.unary(UnaryOp::Not, less);
            let by_nan = e.binary(BinaryOp::And, more, is_not_nan);
            precedes = e.binary(BinaryOp::Or, precedes, by_nan);
            let both = e.binary(BinaryOp::And, a_nan, b_nan);
            equal = e.binary(BinaryOp::Or, equal, both);
        }
        let earlier = e.compare(CompareOp::Lt, a.index, b.index);
        let by_index = e.binary(BinaryOp::And, equal, earlier);
        let wins = e.binary(BinaryOp::Or, precedes, by_index);
        let (a_inside, b_inside) =
            (e.compare(CompareOp::Lt, a.index, end), e.compare(CompareOp::Lt, b.index, end));
        let is_other_outside = e.unary(UnaryOp::Not, b_inside);
        let ahead = e.binary(BinaryOp::Or, wins, is_other_outside);
        e.binary(BinaryOp::And, a_inside, ahead)
    }

    /// Loads the element of a line with this index.
    fn load_candidate(
        cx: &Lower<'_>,
        nest: &mut NestBuilder,
        lines: &SortedLines,
        data: BufferId,
        index: Reg,
    ) -> Candidate {
        let (o, i) = (nest.b.coordinate(0), nest.b.coordinate(1));
        let at = element_index(nest, lines, o, i, index);
        Candidate { index, value: nest.gather(cx, data, at) }
    }

    /// Emits one pass of the network: each position is compared with the position that differs in the bit `distance`.
    /// Lines are sorted upwards or downwards alternately in blocks of `block` positions.
    fn emit_pass(
        &self,
        cx: &mut Lower<'_>,
        lines: &SortedLines,
        (from, to): (BufferId, BufferId),
        (block, distance): (usize, usize),
    ) -> Result<(), OpError> {
        let data = cx.input(0);
        let space = [lines.before, lines.after, lines.padded];
        let mut nest = cx.nest(&space, 0);
        let own_element = nest.load(from, cx.contiguous_access(from, &space));
        let b = &mut nest.b;
        let coordinate = b.coordinate(2);
        let (distance, block, zero) = (b.int(distance as i64), b.int(block as i64), b.int(0));
        let partner = b.binary(BinaryOp::Xor, coordinate, distance);
        let (o, i) = (b.coordinate(0), b.coordinate(1));
        let (afters, padded) = (b.int(lines.after as i64), b.int(lines.padded as i64));
        let line = b.mul(o, afters);
        let line = b.add(line, i);
        let start = b.mul(line, padded);
        let at = b.add(start, partner);
        let other = nest.gather(cx, from, at);
        let a = TopK::load_candidate(cx, &mut nest, lines, data, own_element);
        let z = TopK::load_candidate(cx, &mut nest, lines, data, other);
        let first = self.emit_comes_before(&mut nest, lines.size, a, z);
        let b = &mut nest.b;
        let (turn, side) =
            (b.binary(BinaryOp::And, coordinate, block), b.binary(BinaryOp::And, coordinate, distance));
        let (up, low) = (b.compare(CompareOp::Eq, turn, zero), b.compare(CompareOp::Eq, side, zero));
        // The lower position of an upward block takes the first element, as does the higher position of a downward
        // block.
        let takes_first = b.compare(CompareOp::Eq, up, low);
        let keeps_own = b.compare(CompareOp::Eq, takes_first, first);
        let winner = b.select(keeps_own, own_element, other);
        nest.store_contiguous(cx, to, winner);
        cx.emit(nest.instruction())
    }

    /// Sorts the indices of every line.
    fn emit_sort(&self, cx: &mut Lower<'_>, lines: &SortedLines) -> Result<BufferId, OpError> {
        let space = [lines.before, lines.after, lines.padded];
        let count = space.iter().product();
        let mut order = cx.alloc_temp("order", DType::I64, count);
        let mut nest = cx.nest(&space, 0);
        let index = nest.b.coordinate(2);
        nest.store_contiguous(cx, order, index);
        cx.emit(nest.instruction())?;
        let mut block = 2;
        while block <= lines.padded {
            let mut distance = block / 2;
            while distance > 0 {
                let next = cx.alloc_temp(&format!("order_{block}_{distance}"), DType::I64, count);
                self.emit_pass(cx, lines, (order, next), (block, distance))?;
                order = next;
                distance /= 2;
            }
            block *= 2;
        }
        Ok(order)
    }
}

/// Returns the position of element `index` of line `(o, i)`.
fn element_index(nest: &mut NestBuilder, lines: &SortedLines, o: Reg, i: Reg, index: Reg) -> Reg {
    let b = &mut nest.b;
    let (sizes, afters) = (b.int(lines.size as i64), b.int(lines.after as i64));
    let line = b.mul(o, sizes);
    let row = b.add(line, index);
    let start = b.mul(row, afters);
    b.add(start, i)
}

impl Op for TopK {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 2)?;
        let dtype = cx.expect_dtype(0, "a number type", DType::is_number)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let count = match (cx.ints(1), cx.sizes(1).as_deref()) {
            (Some(numbers), _) => match numbers.as_slice() {
                &[count] if count >= 0 => Some(Dim::Known(count as usize)),
                other => {
                    return Err(OpError::invalid(format!(
                        "K must be one number of at least 0, got {other:?}"
                    )));
                }
            },
            (None, Some([size])) => Some(size.clone()),
            _ => None,
        };
        let shape = match cx.shape(0) {
            Some(shape) => {
                let axis = normalize_axis(self.axis, shape.rank())?;
                if let (Some(count), Some(size)) = (count.as_ref().and_then(Dim::known), shape[axis].known())
                    && count > size
                {
                    return Err(OpError::invalid(format!(
                        "K is {count}, but axis {axis} of {shape} has size {size}"
                    )));
                }
                let mut dims = shape.clone();
                dims.0[axis] = count.unwrap_or_else(|| cx.unknown_dim(0, axis));
                Some(dims)
            }
            None => None,
        };
        cx.set_output(0, dtype, shape.clone());
        cx.set_output(1, DType::I64, shape);
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        if k == 1 { ValueRequirement::ForShapes } else { ValueRequirement::Never }
    }

    fn placement(&self) -> Placement {
        if self.on_host { Placement::Host(Arc::new(*self)) } else { Placement::Program }
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, indices) = (cx.input(0)?, cx.output(1, "indices"));
        let gradient = add_elements_gradient(cx, g, x, indices, self.axis);
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let axis = normalize_axis(self.axis, dims.len())?;
        let (before, size, after) = split_at_axis(&dims, axis);
        let padded = size.max(1).checked_next_power_of_two().ok_or_else(|| {
            OpError::unsupported(format!("an axis of {size} elements is too long to be sorted"))
        })?;
        let lines = SortedLines { before, size, after, padded };
        let order = self.emit_sort(cx, &lines)?;
        let count = if cx.has_output(0) { cx.out_dims(0)[axis] } else { cx.out_dims(1)[axis] };
        let data = cx.input(0);
        let mut nest = cx.nest(&[before, count, after], 0);
        let strides = [(after * padded) as isize, 1, padded as isize];
        let index = nest.load_strided(cx, order, 0, &strides);
        if cx.has_output(1) {
            let indices = cx.output(1);
            nest.store_contiguous(cx, indices, index);
        }
        if cx.has_output(0) {
            let (o, i) = (nest.b.coordinate(0), nest.b.coordinate(2));
            let at = element_index(&mut nest, &lines, o, i, index);
            let value = nest.gather(cx, data, at);
            let values = cx.output(0);
            nest.store_contiguous(cx, values, value);
        }
        cx.emit(nest.instruction())
    }
}

/// Maps an element to an integer with the same order: NaN comes last, and is equal to itself.
fn sort_key(value: Scalar) -> u64 {
    const SIGN: u64 = 1 << 63;
    match value {
        Scalar::I64(value) => value as u64 ^ SIGN,
        Scalar::I32(value) => i64::from(value) as u64 ^ SIGN,
        Scalar::U64(value) => value,
        Scalar::U32(value) => u64::from(value),
        Scalar::Bool(value) => u64::from(value),
        Scalar::F32(_) | Scalar::F64(_) => {
            let value = value.to_f64();
            if value.is_nan() {
                return u64::MAX;
            }
            // Both zeros are equal.
            let bits = (value + 0.0).to_bits();
            if bits & SIGN == 0 { bits | SIGN } else { !bits }
        }
    }
}

impl HostFunction for TopK {
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let [input, count] = inputs else {
            return Err(format!("expected a tensor and a number, got {} values", inputs.len()));
        };
        let axis = normalize_axis(self.axis, input.dims().len()).map_err(|error| error.to_string())?;
        let (before, size, after) = split_at_axis(input.dims(), axis);
        let count = match count.to_i64().as_deref() {
            Some(&[count]) if (0..=size as i64).contains(&count) => count as usize,
            other => {
                let dims = input.dims();
                return Err(format!(
                    "K is {:?}, but axis {axis} of {dims:?} has size {size}",
                    other.unwrap_or_default()
                ));
            }
        };
        let (dtype, width) = (input.dtype(), input.dtype().size());
        let mut dims = input.dims().to_vec();
        dims[axis] = count;
        let (mut values, mut indices) =
            (vec![0; before * count * after * width], vec![0i64; before * count * after]);
        let mut line: Vec<(u64, usize)> = Vec::with_capacity(size);
        let steps = Steps::default();
        let compare = |a: &(u64, usize), b: &(u64, usize)| {
            steps.step();
            a.cmp(b)
        };
        for (o, i) in (0..before).flat_map(|o| (0..after).map(move |i| (o, i))) {
            let at = |k: usize| ((o * size + k) * after + i) * width;
            line.clear();
            line.extend((0..size).map(|k| {
                steps.step();
                let rank = sort_key(Scalar::read(dtype, &input.data()[at(k)..at(k) + width]));
                (if self.largest { !rank } else { rank }, k)
            }));
            if count < size {
                line.select_nth_unstable_by(count, compare);
            }
            let first = &mut line[..count];
            first.sort_unstable_by(compare);
            for (rank_in_row, &(_, k)) in first.iter().enumerate() {
                let to = (o * count + rank_in_row) * after + i;
                indices[to] = k as i64;
                values[to * width..][..width].copy_from_slice(&input.data()[at(k)..at(k) + width]);
            }
        }
        let values = Tensor::new(dtype, dims.clone(), values.into()).map_err(|error| error.to_string())?;
        Ok(vec![values, Tensor::i64(&dims, &indices)])
    }
}

fn build(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    // The result is sorted in every case.
    node.attrs.int("sorted")?;
    let axis = node.attrs.int("axis")?.unwrap_or(-1);
    let shape = node.inputs.first().copied().flatten().and_then(|x| graph.value(x).ty.shape());
    let on_host = shape.is_some_and(|shape| {
        let size = normalize_axis(axis, shape.rank()).map(|axis| shape[axis].known());
        size.is_ok_and(|size| size.is_none_or(|size| size > MAX_NETWORK_LEN))
    });
    Ok(Box::new(TopK { axis, largest: node.attrs.int("largest")?.unwrap_or(1) != 0, on_host }))
}

/// Converts the attribute `k` of opsets before 10 to an input.
fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 10 {
        return Ok(());
    }
    let count = Attrs::required("k", rw.attrs().int("k")?)?;
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("k");
    let count = rw.ints("k", &[count]);
    let x = rw.required_input(0)?;
    rw.emit_same_op(&[Some(x), Some(count)], attrs);
    Ok(())
}

/// Checks attributes: before opset 11 the largest elements are returned, sorted.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 11 {
        return Ok(());
    }
    if rw.attrs().int("largest")? == Some(0) {
        return Err(OpError::unsupported("the smallest elements need opset 11 or newer"));
    }
    let mut attrs = rw.attrs().clone();
    let named = attrs.0.remove("largest").is_some() | attrs.0.remove("sorted").is_some();
    let inputs = rw.node().inputs.to_vec();
    if rw.version() >= 10 {
        if named {
            rw.emit_same_op(&inputs, attrs);
        }
        return Ok(());
    }
    let Some(count) = rw.input(1) else { return Ok(()) };
    match rw.constant_of(count).and_then(Tensor::to_i64).as_deref() {
        Some(&[count]) => {
            rw.emit_same_op(&inputs[..1], attrs.with("k", count));
            Ok(())
        }
        _ => ints_input_to_attribute(rw, "k", 1),
    }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "TopK", &[1, 10, 11, 24], build)
            .class(Class::TopK)
            .inputs_without_gradient(&[1])
            .upgrade(upgrade)
            .downgrade(downgrade),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Failure, add, check_downgrade, check_gradients, f64s, generic_tensor, graph, one_node_graph, run,
        run_node,
    };

    const TOP_K: (&str, &str) = ("", "TopK");

    fn run_top_k(x: &Tensor, k: i64, attrs: Attrs) -> (Vec<f64>, Vec<i64>) {
        let k = Tensor::i64(&[1], &[k]);
        let got = run_node(TOP_K, &[Some(x), Some(&k)], 2, attrs).expect("the graph runs");
        (got[0].to_f64(), got[1].to_i64().expect("integers"))
    }

    #[test]
    fn largest_and_smallest_with_ties() {
        let x = f64s(&[7], &[2.0, 5.0, -1.0, 5.0, 2.0, 7.0, 0.0]);
        assert_eq!(run_top_k(&x, 4, Attrs::new()), (vec![7.0, 5.0, 5.0, 2.0], vec![5, 1, 3, 0]));
        let smallest = Attrs::new().with("largest", 0i64);
        assert_eq!(run_top_k(&x, 4, smallest), (vec![-1.0, 0.0, 2.0, 2.0], vec![2, 6, 0, 4]));
        assert_eq!(run_top_k(&x, 0, Attrs::new()), (vec![], vec![]));
        let bytes = Tensor::from_slice(DType::U8, &[3], &[200u8, 3, 201]);
        assert_eq!(run_top_k(&bytes, 2, Attrs::new()), (vec![201.0, 200.0], vec![2, 0]));
    }

    #[test]
    fn sorts_nan() {
        let nan = f64::NAN;
        let x = f64s(&[4], &[nan, 1.0, nan, f64::INFINITY]);
        assert_eq!(run_top_k(&x, 4, Attrs::new()).1, [0, 2, 3, 1]);
        assert_eq!(run_top_k(&x, 4, Attrs::new().with("largest", 0i64)).1, [1, 3, 0, 2]);
        let lowest = f64s(&[3], &[f64::NEG_INFINITY; 3]);
        assert_eq!(run_top_k(&lowest, 3, Attrs::new()).1, [0, 1, 2]);
    }

    /// Every size around powers of two, along a middle axis, compared with a sort.
    #[test]
    fn sizes_and_axes() {
        for size in [1, 2, 3, 4, 5, 8, 9, 16, 31, 33] {
            let x = generic_tensor(&[2, size, 3], size as u32);
            let elements = x.to_f64();
            let (values, indices) = run_top_k(&x, size as i64, Attrs::new().with("axis", 1i64));
            for (o, i) in (0..2).flat_map(|o| (0..3).map(move |i| (o, i))) {
                let at = |k: usize| (o * size + k) * 3 + i;
                let mut order: Vec<usize> = (0..size).collect();
                order.sort_by(|&a, &b| elements[at(b)].total_cmp(&elements[at(a)]));
                for (k, &from) in order.iter().enumerate() {
                    assert_eq!((values[at(k)], indices[at(k)]), (elements[at(from)], from as i64));
                }
            }
        }
    }

    /// Both implementations give the same order: ties, zeros of both signs, NaN, infinities, integers that no float
    /// represents.
    #[test]
    fn host_and_network_agree() {
        let special =
            [f64::NAN, 0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, 1.0, -1.0, 1.0, f64::NAN, 3.5, -0.0, 0.0];
        let integers =
            [i64::MIN, i64::MAX, -1, 0, 1, i64::MAX - 1, i64::MIN + 1, 0, (1 << 53) + 1, 1 << 53, 7, 7];
        let small: Vec<u8> = (0..12u8).map(|k| k.wrapping_mul(97)).collect();
        for x in [
            f64s(&[2, 3, 2], &special),
            Tensor::i64(&[2, 3, 2], &integers),
            Tensor::from_slice(DType::U8, &[2, 3, 2], &small),
        ] {
            for (axis, largest, count) in [(0, 1, 2), (1, 0, 2), (1, 1, 3), (2, 0, 0), (-1, 1, 1)] {
                let attrs = Attrs::new().with("axis", axis).with("largest", i64::from(largest));
                let k = Tensor::i64(&[1], &[count]);
                let network = run_node(TOP_K, &[Some(&x), Some(&k)], 2, attrs).expect("the graph runs");
                let host = TopK { axis, largest: largest != 0, on_host: true };
                assert_eq!(
                    host.call(&[x.clone(), k]).expect("the graph runs"),
                    network,
                    "{x:?} along {axis}"
                );
            }
        }
        let error = TopK { axis: 0, largest: true, on_host: true }
            .call(&[f64s(&[2], &[0.0; 2]), Tensor::i64(&[1], &[3])]);
        assert_eq!(error.expect_err("refused"), "K is [3], but axis 0 of [2] has size 2");
    }

    /// A network would need two hundred passes over a million elements.
    #[test]
    fn a_million_elements() {
        const SIZE: usize = 1_000_000;
        let numbers: Vec<f64> = (0..SIZE).map(|k| ((k * 7_919) % SIZE) as f64).collect();
        let (values, indices) = run_top_k(&f64s(&[SIZE], &numbers), SIZE as i64, Attrs::new());
        assert!(values.iter().enumerate().all(|(k, &value)| value == (SIZE - 1 - k) as f64));
        assert!(indices.iter().zip(&values).all(|(&k, &value)| numbers[k as usize] == value));
        let graph = constant_count(&f64s(&[SIZE], &numbers), 5, Attrs::new());
        let op = build(&graph, &graph.nodes[0]).expect("valid");
        assert!(matches!(op.placement(), Placement::Host(_)));
    }

    fn constant_count(x: &Tensor, count: i64, attrs: Attrs) -> Graph {
        let (mut graph, ids) = graph(&[x]);
        let count = graph.add_constant("k", Tensor::i64(&[1], &[count]));
        add(&mut graph, TOP_K, "y", &[Some(ids[0]), Some(count)], 2, attrs);
        crate::passes::infer::infer(&mut graph).expect("valid");
        graph
    }

    #[test]
    fn gradients_and_versions() {
        let x = generic_tensor(&[3, 5], 2);
        for (count, attrs) in [
            (2, Attrs::new()),
            (3, Attrs::new().with("axis", 0i64)),
            (2, Attrs::new().with("largest", 0i64).with("sorted", 0i64)),
        ] {
            let smallest = attrs.0.contains_key("largest");
            let graph = constant_count(&x, count, attrs);
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            check_downgrade(&graph, std::slice::from_ref(&x), 11);
            if smallest {
                let error = crate::passes::versions::downgrade(&mut graph.clone(), 10).expect_err("refused");
                assert!(error.to_string().contains("need opset 11 or newer"), "{error}");
                continue;
            }
            check_downgrade(&graph, std::slice::from_ref(&x), 10);
            let written = check_downgrade(&graph, std::slice::from_ref(&x), 9);
            assert_eq!(written.nodes[0].attrs.int("k").expect("an int"), Some(count));
        }
        let old = Attrs::new().with("k", 2i64);
        let graph = one_node_graph(7, TOP_K, &[Some(&x)], 2, old).expect("the node is valid");
        assert_eq!(run(&graph, std::slice::from_ref(&x)).expect("the graph runs")[0].dims(), [3, 2]);
    }

    #[test]
    fn rejects_too_large_k() {
        let x = generic_tensor(&[2, 3], 1);
        for (k, message) in [
            (4, "K is 4, but axis 1 of [2, 3] has size 3"),
            (-1, "K must be one number of at least 0, got [-1]"),
        ] {
            let k = Tensor::i64(&[1], &[k]);
            let failure = run_node(TOP_K, &[Some(&x), Some(&k)], 2, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
