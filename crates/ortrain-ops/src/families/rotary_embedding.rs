//! Rotary position embeddings: `RotaryEmbedding` of ONNX and of `com.microsoft`.
//!
//! Sources: ONNX RotaryEmbedding-23 (<https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html>); ONNX Runtime's
//! contributed operator, version 1 (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>). The
//! contributed operator has its positions before the caches, and accepts one number, the first position.
//!
//! Elements of each head form pairs `(a, b)`: neighbours if the node is `interleaved`, otherwise one element from each
//! half. A pair becomes `(a cos - b sin, a sin + b cos)`; elements after `rotary_embedding_dim` are unchanged. Cosines
//! and sines are looked up by position, or are inputs for each position of the data. The operator runs as its
//! decomposition; caches have gradients as the data does.
//!
//! Limits: the rank of the data must be known. The factor `scale` of `com.microsoft` must be 1; ONNX Runtime ignores
//! this attribute.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::sizes::{
    Size, axis_positions, divide_sizes, insert_axes, multiply_sizes, reshape_to, shape_of, size_of,
    slice_axis, slice_between,
};

const MICROSOFT: &str = "com.microsoft";
const ROTARY: &str = "RotaryEmbedding";

struct Rotary {
    /// Input indices of cosines, sines and positions.
    cosines: usize,
    sines: usize,
    positions: usize,
    interleaved: bool,
    /// Number of rotated elements of each head; `None`: all.
    rotated: Option<i64>,
    heads: Option<i64>,
}

impl Rotary {
    fn read(node: &Node) -> Result<Rotary, OpError> {
        let attrs = &node.attrs;
        let positive = |name: &str| match attrs.int(name)?.unwrap_or(0) {
            0 => Ok(None),
            number if number > 0 => Ok(Some(number)),
            number => Err(OpError::invalid(format!("{name} must be positive, got {number}"))),
        };
        let rotated = positive("rotary_embedding_dim")?;
        if let Some(odd) = rotated.filter(|count| count % 2 != 0) {
            return Err(OpError::invalid(format!("rotary_embedding_dim must be even, got {odd}")));
        }
        let microsoft = !node.domain.is_empty();
        let scale = attrs.float("scale")?.unwrap_or(1.0);
        if microsoft && scale != 1.0 {
            return Err(OpError::unsupported(format!(
                "scale is {scale}, but only 1 is supported; the meaning of other values is not documented"
            )));
        }
        let [cosines, sines, positions] = if microsoft { [2, 3, 1] } else { [1, 2, 3] };
        Ok(Rotary {
            cosines,
            sines,
            positions,
            interleaved: attrs.int("interleaved")?.unwrap_or(0) != 0,
            rotated,
            heads: positive("num_heads")?,
        })
    }

    /// Returns the number of heads and the size of a head for data with three axes; `None` if unknown. `half` is the
    /// last axis of a cache.
    fn head_count_and_size(&self, width: &Dim, half: Option<&Dim>) -> Result<[Option<usize>; 2], OpError> {
        let width = width.known();
        if let Some(heads) = self.heads {
            let heads = heads as usize;
            return match width {
                Some(width) if width % (2 * heads) != 0 => Err(OpError::invalid(format!(
                    "a width of {width} cannot be split into {heads} heads of even size"
                ))),
                width => Ok([Some(heads), width.map(|width| width / heads)]),
            };
        }
        if self.cosines == 1 || self.rotated.is_some() {
            return Err(OpError::invalid("num_heads is missing; an input with three axes needs it"));
        }
        // The caches cover complete heads.
        let size = half.and_then(Dim::known).map(|half| 2 * half);
        match (width, size) {
            (Some(width), Some(size)) if size == 0 || width % size != 0 => {
                Err(OpError::invalid(format!("a width of {width} cannot be split into heads of size {size}")))
            }
            (width, size) => Ok([width.zip(size).map(|(width, size)| width / size), size]),
        }
    }
}

impl Op for Rotary {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let microsoft = self.cosines != 1;
        cx.check_arity(if microsoft { 4 } else { 3 }, 4, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.expect_same_dtype([0, self.cosines, self.sines])?;
        if cx.has_input(self.positions) {
            cx.expect_dtype(self.positions, "int64", |dtype| dtype == DType::I64)?;
        }
        let shape = cx.shape(0).cloned();
        let cache = cx.shape(self.cosines);
        let looked_up = cx.has_input(self.positions);
        for k in [self.cosines, self.sines] {
            let Some(cache_shape) = cx.shape(k) else { continue };
            let expected_rank = if looked_up { 2 } else { 3 };
            if cache_shape.rank() != expected_rank {
                let (layout, preposition) = if looked_up {
                    ("[positions, half]", "with")
                } else {
                    ("[batch, length, half]", "without")
                };
                return Err(OpError::invalid(format!(
                    "input {k} has shape {cache_shape}, expected {layout} {preposition} positions"
                )));
            }
        }
        if let Some(shape) = &shape {
            let size = match &shape[..] {
                [_, _, width] => self.head_count_and_size(width, cache.and_then(|cache| cache.last()))?[1],
                [_, _, _, size] => size.known(),
                _ => {
                    return Err(OpError::invalid(format!(
                        "input 0 has shape {shape}, expected [batch, length, width] or [batch, heads, length, \
                         size]"
                    )));
                }
            };
            let rotated = self.rotated.map(|count| count as usize).or(size);
            if let (Some(rotated), Some(size)) = (rotated, size)
                && (rotated > size || rotated % 2 != 0)
            {
                return Err(OpError::invalid(format!(
                    "{rotated} elements of heads of size {size} cannot be rotated in pairs"
                )));
            }
            for k in [self.cosines, self.sines] {
                let half = cx.shape(k).and_then(|cache_dims| cache_dims.last()).and_then(Dim::known);
                if let (Some(rotated), Some(half), Some(actual)) = (rotated, half, cx.shape(k))
                    && rotated / 2 != half
                {
                    return Err(OpError::invalid(format!(
                        "input {k} has shape {actual}, but for {rotated} rotated elements the size of its last axis \
                         must be {}",
                        rotated / 2
                    )));
                }
            }
        }
        if let Some(positions_shape) = cx.shape(self.positions) {
            let is_single = microsoft
                && positions_shape.rank() == 1
                && positions_shape[0].known().is_none_or(|count| count == 1);
            if !is_single && positions_shape.rank() != 2 {
                let also = if microsoft { " or one element" } else { "" };
                return Err(OpError::invalid(format!(
                    "input {} has shape {positions_shape}, expected positions of shape [batch, length]{also}",
                    self.positions
                )));
            }
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = Rotary::read(rw.node())?;
    let (x, cosines, sines) =
        (rw.required_input(0)?, rw.required_input(op.cosines)?, rw.required_input(op.sines)?);
    let shape = shape_of(rw, x, "the data")?;
    let flat = shape.rank() == 3;
    // As `[batch, length, heads, size]`: cosines and sines get an axis for the heads. Data with four axes keeps its
    // order.
    let length = size_of(rw, x, if flat { 1 } else { 2 });
    let (mut value, size) = if flat {
        let half = rw.shape(cosines).and_then(|shape| shape.last().cloned());
        let [heads, size] = op.head_count_and_size(&shape[2], half.as_ref())?;
        let width = size_of(rw, x, 2);
        let known_size = |size: Option<usize>| size.map(|size| Size::Number(size as i64));
        let size = match (known_size(size), known_size(heads)) {
            (Some(size), _) => size,
            (None, Some(heads)) => divide_sizes(rw, width, heads),
            (None, None) => {
                let last = if rw.input(op.positions).is_some() { 1 } else { 2 };
                let half = size_of(rw, cosines, last);
                multiply_sizes(rw, Size::Number(2), half)
            }
        };
        let heads = known_size(heads).unwrap_or_else(|| divide_sizes(rw, width, size));
        (reshape_to(rw, x, &[Size::SameAxis, Size::SameAxis, heads, size]), size)
    } else {
        (x, size_of(rw, x, 3))
    };
    let heads_axis = if flat { 2i64 } else { 1 };

    let positions = match rw.input(op.positions) {
        Some(first_position) if shape_of(rw, first_position, "the positions")?.rank() == 1 => {
            // The first of consecutive positions: `[1, length]`.
            let along = axis_positions(rw, length);
            let shifted = rw.add("Add", &[along, first_position], Attrs::new());
            Some(insert_axes(rw, shifted, &[0]))
        }
        positions => positions,
    };
    let [cosines, sines] = [cosines, sines].map(|cache| {
        let cache_rows = match positions {
            Some(positions) => rw.add("Gather", &[cache, positions], Attrs::new().with("axis", 0i64)),
            None => cache,
        };
        insert_axes(rw, cache_rows, &[heads_axis])
    });

    let rotated = op.rotated.map_or(size, Size::Number);
    let rest = (rotated != size).then(|| slice_between(rw, value, 3, rotated, Size::Number(i64::MAX)));
    if rest.is_some() {
        value = slice_between(rw, value, 3, Size::Number(0), rotated);
    }
    let half = divide_sizes(rw, rotated, Size::Number(2));
    let [a, b] = if op.interleaved {
        [0, 1].map(|first| slice_axis(rw, value, 3, first, i64::MAX, 2))
    } else {
        let first = slice_between(rw, value, 3, Size::Number(0), half);
        [first, slice_between(rw, value, 3, half, Size::Number(i64::MAX))]
    };
    let product = |rw: &mut Rewrite<'_>, x: ValueId, y: ValueId| rw.add("Mul", &[x, y], Attrs::new());
    let (a_cos, b_sin) = (product(rw, a, cosines), product(rw, b, sines));
    let (a_sin, b_cos) = (product(rw, a, sines), product(rw, b, cosines));
    let real = rw.add("Sub", &[a_cos, b_sin], Attrs::new());
    let imaginary = rw.add("Add", &[a_sin, b_cos], Attrs::new());
    let joined = |rw: &mut Rewrite<'_>, parts: &[ValueId], axis: i64| {
        rw.add("Concat", parts, Attrs::new().with("axis", axis))
    };
    let mut result = if op.interleaved {
        let pairs = [real, imaginary].map(|part| insert_axes(rw, part, &[4]));
        let pairs = joined(rw, &pairs, 4);
        reshape_to(rw, pairs, &[Size::SameAxis, Size::SameAxis, Size::SameAxis, rotated])
    } else {
        joined(rw, &[real, imaginary], 3)
    };
    if let Some(rest) = rest {
        result = joined(rw, &[result, rest], 3);
    }
    if flat {
        let width = size_of(rw, x, 2);
        result = reshape_to(rw, result, &[Size::SameAxis, Size::SameAxis, width]);
    }
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Rotary::read(node)?))
}

/// Writes the decomposition for opsets before 23.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 23 { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", ROTARY, &[23], build).composition(decompose).downgrade(downgrade),
        Definition::new(MICROSOFT, ROTARY, &[1], build).composition(decompose),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Tensor, ValueType};

    use super::*;
    use crate::testing::{
        add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        graph, one_node_graph, run,
    };

    const STANDARD: (&str, &str) = ("", ROTARY);
    const CONTRIBUTED: (&str, &str) = (MICROSOFT, ROTARY);
    const BATCH: usize = 2;
    const HEADS: usize = 2;
    const LENGTH: usize = 2;
    const SIZE: usize = 6;
    /// Tolerance of a few products in float64, in another order.
    const TOLERANCE: f64 = 1e-12;

    /// Rotates one element of `[batch, length, heads, size]` by the definition; `angle(batch, position, pair)` returns
    /// cosine and sine.
    fn rotated(
        at: impl Fn([usize; 4]) -> f64,
        count: usize,
        interleaved: bool,
        angle: impl Fn(usize, usize, usize) -> (f64, f64),
        [b, t, h, k]: [usize; 4],
    ) -> f64 {
        if k >= count {
            return at([b, t, h, k]);
        }
        let half = count / 2;
        let (pair, second) = if interleaved { (k / 2, k % 2 == 1) } else { (k % half, k >= half) };
        let (first, other) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
        let (cos, sin) = angle(b, t, pair);
        let (x, y) = (at([b, t, h, first]), at([b, t, h, other]));
        if second { x * sin + y * cos } else { x * cos - y * sin }
    }

    struct Case {
        flat: bool,
        interleaved: bool,
        count: i64,
        positions: Option<Tensor>,
    }

    impl Case {
        fn all_cases() -> Vec<Case> {
            let mut cases = Vec::new();
            for flat in [false, true] {
                for interleaved in [false, true] {
                    for count in [0, 4] {
                        let positions_input = Tensor::i64(&[BATCH, LENGTH], &[0, 4, 2, 2]);
                        for positions in [None, Some(positions_input)] {
                            cases.push(Case { flat, interleaved, count, positions });
                        }
                    }
                }
            }
            cases
        }

        fn half(&self) -> usize {
            if self.count == 0 { SIZE / 2 } else { self.count as usize / 2 }
        }

        /// Returns data, cosines, sines, positions.
        fn inputs(&self) -> Vec<Tensor> {
            let data: &[usize] =
                if self.flat { &[BATCH, LENGTH, HEADS * SIZE] } else { &[BATCH, HEADS, LENGTH, SIZE] };
            let cache = |seed| match self.positions {
                Some(_) => generic_tensor(&[5, self.half()], seed),
                None => generic_tensor(&[BATCH, LENGTH, self.half()], seed),
            };
            [generic_tensor(data, 1), cache(2), cache(3)].into_iter().chain(self.positions.clone()).collect()
        }

        fn attrs(&self) -> Attrs {
            let attrs = Attrs::new()
                .with("interleaved", i64::from(self.interleaved))
                .with("rotary_embedding_dim", self.count);
            if self.flat { attrs.with("num_heads", HEADS as i64) } else { attrs }
        }

        fn expected(&self, inputs: &[Tensor]) -> Tensor {
            let elements: Vec<Vec<f64>> = inputs[..3].iter().map(Tensor::to_f64).collect();
            let index = |[b, t, h, k]: [usize; 4]| match self.flat {
                true => ((b * LENGTH + t) * HEADS + h) * SIZE + k,
                false => ((b * HEADS + h) * LENGTH + t) * SIZE + k,
            };
            let rows = self.positions.as_ref().and_then(Tensor::to_i64);
            let angle = |b: usize, t: usize, pair: usize| {
                let row = b * LENGTH + t;
                let row = rows.as_ref().map_or(row, |positions| positions[row] as usize);
                (elements[1][row * self.half() + pair], elements[2][row * self.half() + pair])
            };
            let mut y = elements[0].clone();
            for b in 0..BATCH {
                for t in 0..LENGTH {
                    for h in 0..HEADS {
                        for k in 0..SIZE {
                            let at = [b, t, h, k];
                            let value = |at| elements[0][index(at)];
                            y[index(at)] = rotated(value, 2 * self.half(), self.interleaved, angle, at);
                        }
                    }
                }
            }
            f64s(inputs[0].dims(), &y)
        }

        fn graph(&self, inputs: &[Tensor]) -> Graph {
            let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
            one_node_graph(23, STANDARD, &ports, 1, self.attrs()).expect("valid")
        }
    }

    #[test]
    fn all_forms_and_gradients() {
        for case in Case::all_cases() {
            let inputs = case.inputs();
            let graph = case.graph(&inputs);
            assert_close(
                &run(&graph, &inputs).expect("the graph runs")[0],
                &case.expected(&inputs),
                TOLERANCE,
            );
            check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
            check_decomposition(&graph, &inputs, TOLERANCE);
            assert_eq!(check_downgrade(&graph, &inputs, 23).nodes.len(), 1);
            check_downgrade(&graph, &inputs, 14);
        }
    }

    #[test]
    fn symbolic_sizes() {
        for case in Case::all_cases() {
            let inputs = case.inputs();
            let (mut symbolic, ids) = graph(&inputs.iter().collect::<Vec<_>>());
            for (k, (&id, tensor)) in ids.iter().zip(&inputs).enumerate() {
                let name = |axis: usize| match (k, axis) {
                    (0 | 3, 0) | (1 | 2, 0) if k == 0 || k == 3 || case.positions.is_none() => {
                        "batch".to_owned()
                    }
                    (0, axis) if axis == if case.flat { 1 } else { 2 } => "length".to_owned(),
                    (3, 1) => "length".to_owned(),
                    (1 | 2, 1) if case.positions.is_none() => "length".to_owned(),
                    _ => format!("d{}_{axis}", k.clamp(0, 1)),
                };
                let shape = (0..tensor.dims().len()).map(|axis| Dim::symbol(&name(axis))).collect();
                symbolic.value_mut(id).ty = ValueType::Tensor(tensor.dtype(), Some(shape));
            }
            let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
            add(&mut symbolic, STANDARD, "y", &ports, 1, case.attrs());
            crate::passes::infer::infer(&mut symbolic).expect("valid");
            let mut plain = symbolic.clone();
            crate::passes::node::decompose_node(&mut plain, 0).expect("the graph decomposes");
            assert_close(
                &run(&plain, &inputs).expect("the graph runs")[0],
                &case.expected(&inputs),
                TOLERANCE,
            );
            if case.count > 0 {
                check_gradients(&symbolic, &inputs, &[0, 1, 2], &[0]);
            }
        }
    }

    #[test]
    fn contributed_operator() {
        let position_table = Tensor::i64(&[BATCH, LENGTH], &[1, 2, 1, 2]);
        for flat in [false, true] {
            let case = Case { flat, interleaved: true, count: 0, positions: Some(position_table.clone()) };
            let case_inputs = case.inputs();
            // One number is the first position; the number of heads follows from the caches.
            for positions in [position_table.clone(), Tensor::i64(&[1], &[1])] {
                let inputs =
                    [case_inputs[0].clone(), positions, case_inputs[1].clone(), case_inputs[2].clone()];
                let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
                let mut attrs = case.attrs();
                attrs.0.remove("num_heads");
                let graph = one_node_graph(14, CONTRIBUTED, &ports, 1, attrs).expect("valid");
                assert_close(
                    &run(&graph, &inputs).expect("the graph runs")[0],
                    &case.expected(&case_inputs),
                    TOLERANCE,
                );
                check_gradients(&graph, &inputs, &[0, 2, 3], &[0]);
                check_decomposition(&graph, &inputs, TOLERANCE);
            }
        }
    }

    #[test]
    fn rejects_invalid_inputs() {
        let case = Case { flat: true, interleaved: false, count: 0, positions: None };
        let valid = case.inputs();
        let looked_up = Case { positions: Some(Tensor::i64(&[BATCH, LENGTH], &[0; 4])), ..case };
        let positioned = looked_up.inputs();
        let none = Attrs::new;
        for (op, inputs, attrs, fragment) in [
            (STANDARD, valid.clone(), none(), "num_heads is missing"),
            (STANDARD, valid.clone(), none().with("num_heads", -1i64), "num_heads must be positive, got -1"),
            (
                STANDARD,
                valid.clone(),
                none().with("num_heads", 4i64),
                "a width of 12 cannot be split into 4 heads",
            ),
            (
                STANDARD,
                valid.clone(),
                none().with("num_heads", 2i64).with("rotary_embedding_dim", 3i64),
                "rotary_embedding_dim must be even, got 3",
            ),
            (
                STANDARD,
                valid.clone(),
                none().with("num_heads", 2i64).with("rotary_embedding_dim", 8i64),
                "8 elements of heads of size 6 cannot be rotated in pairs",
            ),
            (
                STANDARD,
                valid.clone(),
                none().with("num_heads", 2i64).with("rotary_embedding_dim", 2i64),
                "input 1 has shape [2, 2, 3], but for 2 rotated elements the size of its last axis must be 1",
            ),
            (
                STANDARD,
                [valid.clone(), vec![Tensor::i64(&[BATCH, LENGTH], &[0; 4])]].concat(),
                none().with("num_heads", 2i64),
                "input 1 has shape [2, 2, 3], expected [positions, half] with positions",
            ),
            (
                STANDARD,
                positioned[..3].to_vec(),
                none().with("num_heads", 2i64),
                "input 1 has shape [5, 3], expected [batch, length, half] without positions",
            ),
            (
                STANDARD,
                [positioned[..3].to_vec(), vec![Tensor::i64(&[1], &[0])]].concat(),
                none().with("num_heads", 2i64),
                "input 3 has shape [1], expected positions of shape [batch, length]",
            ),
            (
                STANDARD,
                vec![generic_tensor(&[2, 3], 1), valid[1].clone(), valid[2].clone()],
                none(),
                "input 0 has shape [2, 3], expected [batch, length, width] or [batch, heads, length, size]",
            ),
            (
                CONTRIBUTED,
                vec![valid[0].clone(), Tensor::i64(&[1], &[0]), positioned[1].clone(), positioned[2].clone()],
                none().with("scale", 2.0f32),
                "scale is 2, but only 1 is supported",
            ),
        ] {
            let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
            let error = one_node_graph(23, op, &ports, 1, attrs).expect_err("refused").to_string();
            assert!(error.contains(fragment), "{error}");
            assert!(error.contains("node \"y\"") && error.contains("RotaryEmbedding"), "{error}");
        }
    }
}
