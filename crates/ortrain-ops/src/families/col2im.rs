//! Rearrangement of column blocks into an image, with sums where blocks overlap: `Col2Im`.
//!
//! Col2Im-18 of ONNX (<https://onnx.ai/onnx/operators/onnx__Col2Im.html>), PyTorch's `fold` for any number of axes.
//!
//! The operator is a composition. A scatter adds each element of a block to its pixel. Elements in the padding are
//! added to an extra row, which is removed afterwards. Therefore the gradient gathers the blocks again, and narrow
//! floats are summed in float32.
//!
//! Limits: the number of axes of the image must be known.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::sizes::{
    Size, add_op, add_sizes, as_vector, concat_sizes, divide_sizes, dtype_of, insert_axes, multiply_sizes,
    permute_axes, range_positions, reshape_to, size_of, slice_axis, slice_between, subtract_sizes,
};

const DATA: usize = 0;
const IMAGE: usize = 1;
const BLOCK: usize = 2;

/// Positions of the blocks in the image, by axis.
struct BlockGeometry {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// Padding before each axis, followed by the padding after each axis.
    pads: Vec<i64>,
}

/// Exclusive limit of sizes, strides, dilations and pads. Positions computed from smaller numbers do not overflow.
const MAX_EXTENT: i64 = 1 << 31;

impl BlockGeometry {
    fn read(attrs: &Attrs, axes: usize) -> Result<BlockGeometry, OpError> {
        let list = |name: &str, count: usize, min: i64| -> Result<Vec<i64>, OpError> {
            let Some(list) = attrs.ints(name)? else { return Ok(vec![min; count]) };
            if list.len() != count {
                return Err(OpError::invalid(format!(
                    "{name} has {} elements; {count} are needed for an image of {axes} axes",
                    list.len()
                )));
            }
            match list.iter().find(|number| !(min..MAX_EXTENT).contains(number)) {
                Some(bad) => Err(OpError::invalid(format!("{name} cannot contain {bad}"))),
                None => Ok(list.to_vec()),
            }
        };
        Ok(BlockGeometry {
            strides: list("strides", axes, 1)?,
            dilations: list("dilations", axes, 1)?,
            pads: list("pads", 2 * axes, 0)?,
        })
    }

    /// Returns the number of blocks along an axis; 0 if no block fits.
    fn block_count(&self, axis: usize, image: i64, block: i64) -> i64 {
        let axes = self.strides.len();
        let padded = image.saturating_add(self.pads[axis]).saturating_add(self.pads[axes + axis]);
        let reach = self.dilations[axis].saturating_mul(block - 1).saturating_add(1);
        if padded < reach { 0 } else { (padded - reach) / self.strides[axis] + 1 }
    }
}

struct Col2ImOp;

/// Returns the number of axes of the image.
fn axis_count(image: Option<&Shape>, block: Option<&Shape>) -> Result<Option<usize>, OpError> {
    for shape in [image, block].into_iter().flatten() {
        if shape.rank() != 1 {
            return Err(OpError::invalid(format!("sizes must be a vector, got shape {shape}")));
        }
    }
    let count = |shape: Option<&Shape>| shape.and_then(|shape| shape[0].known());
    match (count(image), count(block)) {
        (Some(a), Some(b)) if a != b => {
            Err(OpError::invalid(format!("the image has {a} axes, but the blocks have {b}")))
        }
        (Some(0), _) | (_, Some(0)) => Err(OpError::invalid("the image has no axes")),
        (a, b) => Ok(a.or(b)),
    }
}

impl Op for Col2ImOp {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        let dtype = cx.expect_dtype(DATA, "a number", DType::is_number)?;
        for k in [IMAGE, BLOCK] {
            cx.expect_dtype(k, "int64", |dtype| dtype == DType::I64)?;
        }
        if let Some(shape) = cx.shape(DATA).filter(|shape| shape.rank() != 3) {
            return Err(OpError::invalid(format!(
                "input 0 must have shape [N, C * block elements, blocks], got {shape}"
            )));
        }
        let Some(axes) = axis_count(cx.shape(IMAGE), cx.shape(BLOCK))? else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        let op = BlockGeometry::read(&cx.node().attrs, axes)?;
        let numbers = |k: usize, min: i64| match cx.ints(k) {
            Some(sizes) => match sizes.iter().find(|&&size| !(min..MAX_EXTENT).contains(&size)) {
                Some(bad) => Err(OpError::invalid(format!("input {k} contains the invalid size {bad}"))),
                None => Ok(Some(sizes)),
            },
            None => Ok(None),
        };
        let (image, block) = (numbers(IMAGE, 0)?, numbers(BLOCK, 1)?);
        let data = cx.shape(DATA);
        let elements = block
            .as_ref()
            .map(|block| block.iter().fold(1i64, |product, &size| product.saturating_mul(size)));
        let mut channels = None;
        if let (Some(elements), Some(axis_size)) = (elements, data.and_then(|data| data[1].known())) {
            let row_count = axis_size as i64;
            if row_count % elements != 0 {
                return Err(OpError::invalid(format!(
                    "axis 1 of input 0 has size {row_count}, which is not a multiple of the block size {elements}"
                )));
            }
            channels = Some((row_count / elements) as usize);
        }
        if let (Some(image), Some(block)) = (&image, &block)
            && let Some(block_total) = data.and_then(|data| data[2].known())
        {
            let counts: Vec<i64> =
                (0..axes).map(|axis| op.block_count(axis, image[axis], block[axis])).collect();
            let required = counts.iter().fold(1i64, |product, &count| product.saturating_mul(count));
            if block_total as i64 != required {
                return Err(OpError::invalid(format!(
                    "input 0 has {block_total} blocks, but an image of shape {image:?} has {counts:?} blocks of shape \
                     {block:?}"
                )));
            }
        }
        let sizes = cx.sizes(IMAGE);
        let batch = data.map_or_else(|| cx.unknown_dim(0, 0), |data| data[0].clone());
        let channels = channels.map_or_else(|| cx.unknown_dim(0, 1), Dim::Known);
        let size = |axis: usize| match &sizes {
            Some(sizes) => sizes[axis].clone(),
            None => cx.unknown_dim(0, 2 + axis),
        };
        cx.set_output(0, dtype, Some([batch, channels].into_iter().chain((0..axes).map(size)).collect()));
        Ok(())
    }
}

/// Returns the elements of a list of sizes.
fn read_sizes(rw: &mut Rewrite<'_>, k: usize, axes: usize) -> Result<Vec<Size>, OpError> {
    let list = rw.required_input(k)?;
    if let Some(known) = rw.constant_of(list).and_then(Tensor::to_i64) {
        return Ok(known.into_iter().map(Size::Number).collect());
    }
    let at = |axis: usize| axis as i64;
    Ok((0..axes).map(|axis| Size::Value(slice_axis(rw, list, 0, at(axis), at(axis) + 1, 1))).collect())
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let data = rw.required_input(DATA)?;
    let shape = |k: usize| rw.input(k).and_then(|id| rw.shape(id));
    let axes = axis_count(shape(IMAGE), shape(BLOCK))?.ok_or_else(|| {
        OpError::unsupported("the rank of the image must be known; declare the shape of input 1")
    })?;
    let op = BlockGeometry::read(rw.attrs(), axes)?;
    let dtype = dtype_of(rw, data, "input 0")?;
    let (image, block) = (read_sizes(rw, IMAGE, axes)?, read_sizes(rw, BLOCK, axes)?);
    let product = |rw: &mut Rewrite<'_>, sizes: &[Size]| {
        sizes.iter().fold(Size::Number(1), |total, &size| multiply_sizes(rw, total, size))
    };
    let (elements, pixels) = (product(rw, &block), product(rw, &image));

    // For each element of each block, its position in the image and a flag that is true inside of the image. The shape
    // is `[elements of a block, blocks]`. The loop adds one axis at a time.
    let mut target: Option<(ValueId, ValueId)> = None;
    let (mut rows, mut columns) = (Size::Number(1), Size::Number(1));
    for axis in 0..axes {
        let spread = op.dilations[axis];
        let less = subtract_sizes(rw, block[axis], Size::Number(1));
        let reach = multiply_sizes(rw, less, Size::Number(spread));
        let padded = add_sizes(rw, image[axis], Size::Number(op.pads[axis] + op.pads[axes + axis] - 1));
        let span = subtract_sizes(rw, padded, reach);
        let steps = divide_sizes(rw, span, Size::Number(op.strides[axis]));
        let count = add_sizes(rw, steps, Size::Number(1));
        let scaled = |rw: &mut Rewrite<'_>, size: Size, by: i64| {
            let indices = range_positions(rw, size);
            let by = rw.constant("step", Tensor::i64(&[], &[by]));
            add_op(rw, "Mul", &[indices, by])
        };
        let within = scaled(rw, block[axis], spread);
        let within = insert_axes(rw, within, &[1]);
        let starts = scaled(rw, count, op.strides[axis]);
        let padded = add_op(rw, "Add", &[within, starts]);
        let before = rw.constant("before", Tensor::i64(&[], &[op.pads[axis]]));
        let at = add_op(rw, "Sub", &[padded, before]);
        let (lower_bound, size) = (rw.constant("least", Tensor::i64(&[], &[-1])), as_vector(rw, image[axis]));
        let (from, to) = (add_op(rw, "Less", &[lower_bound, at]), add_op(rw, "Less", &[at, size]));
        let inside = add_op(rw, "And", &[from, to]);
        (rows, columns) = (multiply_sizes(rw, rows, block[axis]), multiply_sizes(rw, columns, count));
        let Some((all_at, all_inside)) = target else {
            target = Some((at, inside));
            continue;
        };
        // Combines the positions of the previous axes with each position of this axis.
        let both = |rw: &mut Rewrite<'_>, name: &str, a: ValueId, b: ValueId| {
            let (a, b) = (insert_axes(rw, a, &[1, 3]), insert_axes(rw, b, &[0, 2]));
            let pairs = add_op(rw, name, &[a, b]);
            reshape_to(rw, pairs, &[rows, columns])
        };
        let lines = add_op(rw, "Mul", &[all_at, size]);
        target = Some((both(rw, "Add", lines, at), both(rw, "And", all_inside, inside)));
    }
    let Some((at, inside)) = target else { return Err(OpError::invalid("the image has no axes")) };
    let beyond = as_vector(rw, pixels);
    let row = add_op(rw, "Where", &[inside, at, beyond]);
    let entry_count = multiply_sizes(rw, rows, columns);
    let row = reshape_to(rw, row, &[entry_count]);
    let row = insert_axes(rw, row, &[1]);

    let (batch, channel_rows) = (size_of(rw, data, 0), size_of(rw, data, 1));
    let channels = divide_sizes(rw, channel_rows, elements);
    let parts = reshape_to(rw, data, &[batch, channels, rows, columns]);
    let parts = permute_axes(rw, parts, &[2, 3, 0, 1]);
    let updates = reshape_to(rw, parts, &[entry_count, batch, channels]);
    let buffer_len = add_sizes(rw, pixels, Size::Number(1));
    let empty = concat_sizes(rw, &[buffer_len, batch, channels]);
    let zero = Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0));
    let empty = rw.add("ConstantOfShape", &[empty], zero);
    let summed = rw.add("ScatterND", &[empty, row, updates], Attrs::new().with("reduction", "add"));
    let visible = slice_between(rw, summed, 0, Size::Number(0), pixels);
    let transposed = permute_axes(rw, visible, &[1, 2, 0]);
    let shape: Vec<Size> = [batch, channels].into_iter().chain(image).collect();
    let result = reshape_to(rw, transposed, &shape);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Col2ImOp))
}

/// Decomposes the operator for opsets 16 and 17. The decomposition needs sums of scatters, which opset 16 introduced.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if (16..18).contains(&rw.version()) { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "Col2Im", &[18], build).composition(decompose).downgrade(downgrade)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, add, assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s,
        generic_tensor, graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("", "Col2Im");

    struct Case {
        image: &'static [i64],
        block: &'static [i64],
        strides: &'static [i64],
        dilations: &'static [i64],
        pads: &'static [i64],
    }

    const CASES: [Case; 5] = [
        Case { image: &[5, 5], block: &[1, 5], strides: &[1, 1], dilations: &[1, 1], pads: &[0; 4] },
        Case { image: &[5, 6], block: &[3, 2], strides: &[2, 1], dilations: &[1, 2], pads: &[1, 0, 2, 1] },
        Case { image: &[4], block: &[3], strides: &[1], dilations: &[1], pads: &[2, 1] },
        Case { image: &[3, 2, 4], block: &[2, 1, 3], strides: &[1, 2, 1], dilations: &[1; 3], pads: &[0; 6] },
        // Each block has an element in the padding.
        Case { image: &[2, 2], block: &[2, 2], strides: &[1, 1], dilations: &[3, 3], pads: &[1; 4] },
    ];

    impl Case {
        fn attrs(&self) -> Attrs {
            let list = |numbers: &[i64]| numbers.to_vec();
            Attrs::new()
                .with("strides", list(self.strides))
                .with("dilations", list(self.dilations))
                .with("pads", list(self.pads))
        }

        fn counts(&self) -> Vec<i64> {
            let op = BlockGeometry::read(&self.attrs(), self.image.len()).expect("valid");
            (0..self.image.len())
                .map(|axis| op.block_count(axis, self.image[axis], self.block[axis]))
                .collect()
        }

        fn inputs(&self, batch: usize, channels: usize) -> [Tensor; 3] {
            let all = |sizes: &[i64]| sizes.iter().product::<i64>() as usize;
            let list = |sizes: &[i64]| Tensor::i64(&[sizes.len()], sizes);
            let data = generic_tensor(&[batch, channels * all(self.block), all(&self.counts())], 1);
            [data, list(self.image), list(self.block)]
        }

        /// Computes the image by the definition: adds each element of each block at its position.
        fn expected(&self, data: &Tensor, channels: usize) -> Tensor {
            let axes = self.image.len();
            let split = |mut rest: i64, sizes: &[i64]| -> Vec<i64> {
                let mut at = vec![0; sizes.len()];
                for axis in (0..sizes.len()).rev() {
                    at[axis] = rest % sizes[axis];
                    rest /= sizes[axis];
                }
                at
            };
            let (counts, values) = (self.counts(), data.to_f64());
            let (elements, blocks): (i64, i64) = (self.block.iter().product(), counts.iter().product());
            let pixels: i64 = self.image.iter().product();
            let batch = data.dims()[0];
            let mut result = vec![0.0; batch * channels * pixels as usize];
            for (k, value) in values.iter().enumerate() {
                let k = k as i64;
                let (within, block) = (split(k / blocks % elements, self.block), split(k % blocks, &counts));
                let at: Vec<i64> = (0..axes)
                    .map(|a| within[a] * self.dilations[a] + block[a] * self.strides[a] - self.pads[a])
                    .collect();
                if (0..axes).all(|a| (0..self.image[a]).contains(&at[a])) {
                    let pixel = (0..axes).fold(0, |all, a| all * self.image[a] + at[a]);
                    result[((k / blocks / elements) * pixels + pixel) as usize] += value;
                }
            }
            let mut dims = vec![batch, channels];
            dims.extend(self.image.iter().map(|&size| size as usize));
            f64s(&dims, &result)
        }
    }

    #[test]
    fn blocks_of_any_number_of_axes() {
        for case in &CASES {
            let inputs = case.inputs(2, 3);
            let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
            let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 1, case.attrs()).expect("valid");
            let expected = case.expected(&inputs[0], 3);
            assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, 1e-14);
            check_gradients(&graph, &inputs, &[0], &[0]);
            check_decomposition(&graph, &inputs, 0.0);
            assert_eq!(check_downgrade(&graph, &inputs, 18).nodes.len(), 1);
            check_downgrade(&graph, &inputs, 16);
            let empty = [Tensor::filled(DType::F64, &[0, inputs[0].dims()[1], inputs[0].dims()[2]], 0.0)];
            let args = [empty[0].clone(), inputs[1].clone(), inputs[2].clone()];
            let ports = [Some(&args[0]), Some(&args[1]), Some(&args[2])];
            let got = run_node(OP, &ports, 1, case.attrs()).expect("it runs").remove(0);
            assert_eq!((got.dims()[0], &got.dims()[1..]), (0, &expected.dims()[1..]));
        }
    }

    #[test]
    fn constant_sizes_and_symbolic_batch() {
        let case = &CASES[1];
        let inputs = case.inputs(2, 3);
        let (mut symbolic, ids) = graph(&[&inputs[0]]);
        let dims = inputs[0].dims();
        let shape = [Dim::symbol("batch"), Dim::Known(dims[1]), Dim::Known(dims[2])].into_iter().collect();
        symbolic.value_mut(ids[0]).ty = ortrain_graph::ValueType::Tensor(DType::F64, Some(shape));
        let image = symbolic.add_constant("image", inputs[1].clone());
        let block = symbolic.add_constant("block", inputs[2].clone());
        add(&mut symbolic, OP, "y", &[Some(ids[0]), Some(image), Some(block)], 1, case.attrs());
        crate::passes::infer::infer(&mut symbolic).expect("valid");
        let args = [inputs[0].clone()];
        assert_close(&run(&symbolic, &args).expect("it runs")[0], &case.expected(&inputs[0], 3), 1e-14);
        check_gradients(&symbolic, &args, &[0], &[0]);
    }

    #[test]
    fn all_number_types() {
        let case = &CASES[1];
        for dtype in [DType::I32, DType::U8, DType::I64, DType::F16, DType::BF16, DType::F32] {
            let mut inputs = case.inputs(1, 2);
            let full: Vec<f64> = (0..inputs[0].len()).map(|k| (k % 5) as f64).collect();
            inputs[0] = f64s(inputs[0].dims(), &full);
            let expected = cast_tensor(&case.expected(&inputs[0], 2), dtype);
            inputs[0] = cast_tensor(&inputs[0], dtype);
            let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
            assert_eq!(run_node(OP, &ports, 1, case.attrs()).expect("it runs")[0], expected);
        }
    }

    #[test]
    fn rejects_mismatched_inputs() {
        let none = Attrs::new;
        for (data, image, block, attrs, message) in [
            (vec![1, 6], vec![4, 4], vec![2, 2], none(), "must have shape [N, C * block elements, blocks]"),
            (vec![1, 6, 9], vec![4, 4], vec![2, 2], none(), "not a multiple of the block size 4"),
            (vec![1, 4, 8], vec![4, 4], vec![2, 2], none(), "[4, 4] has [3, 3] blocks of shape [2, 2]"),
            (vec![1, 4, 9], vec![4, 4], vec![2, 2, 1], none(), "the image has 2 axes, but the blocks have 3"),
            (vec![1, 4, 9], vec![4, -4], vec![2, 2], none(), "input 1 contains the invalid size -4"),
            (vec![1, 4, 9], vec![4, 4], vec![2, 0], none(), "input 2 contains the invalid size 0"),
            (
                vec![1, 4, 9],
                vec![4, 4],
                vec![2, 2],
                none().with("strides", vec![0i64, 1]),
                "strides cannot contain 0",
            ),
            (
                vec![1, 4, 9],
                vec![4, 4],
                vec![2, 2],
                none().with("pads", vec![1i64]),
                "pads has 1 elements; 4 are needed",
            ),
            (
                vec![1, 4, 9],
                vec![4, 4],
                vec![2, 2],
                none().with("pads", vec![i64::MAX, 0, 0, 0]),
                "pads cannot contain",
            ),
        ] {
            let list = |sizes: &[i64]| Tensor::i64(&[sizes.len()], sizes);
            let inputs = [generic_tensor(&data, 1), list(&image), list(&block)];
            let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
            let failure = run_node(OP, &ports, 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
