//! Convolution and its gradients.
//!
//! Sources: ONNX Conv-1, 11, 22 (the versions differ only in element types) and `ConvGrad` of `com.microsoft`.
//! `ConvGrad` computes the gradients of image, filter and bias from the gradient of the result.
//!
//! Supported: any number of spatial axes, groups, strides and dilations. Sums are accumulated in float32 (float64 for
//! float64). An empty batch has an empty result and zero filter gradients. Empty kernels, and kernels larger than the
//! padded image, are an error. `auto_pad` becomes explicit padding once the sizes are known.

use ortrain_expr::ConvPass;
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::convolution::{
    Conv, emit_channel_sums, emit_conv, filter_gradient, image_gradient, infer_gradients, kernel_dims,
    sum_over_channels,
};

/// Gradients of a convolution. Inputs: gradient of the result, image and filter. Outputs: gradients of image, filter
/// and bias.
struct ConvGrad(Conv);

impl Op for Conv {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        let (dtype, shape) = self.infer_result(cx)?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, w) = (cx.input(0)?, cx.input(1)?);
        // The reference computes wrong gradients with `auto_pad`, so the padding becomes explicit.
        let attrs = self.explicit_padding_attrs(&cx.node().attrs, cx.shape(x), cx.shape(w))?;
        let required = [cx.needs_grad(0), cx.needs_grad(1), cx.needs_grad(2)];
        let gradients = cx.add_node_with_optional_outputs(
            "com.microsoft",
            "ConvGrad",
            &[g, x, w].map(Some),
            &required,
            attrs,
        );
        for (k, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                cx.set_grad(k, gradient);
            }
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let shape = self.shape(ConvPass::Output, &cx.dims(0), &cx.dims(1))?;
        let (image, filter) = (cx.input(0), cx.input(1));
        let bias = cx.has_input(2).then(|| cx.input(2));
        emit_conv(cx, 0, shape, image, filter, bias)
    }
}

impl Op for ConvGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 3)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 1, 2])?;
        let result = self.0.result_shape(cx, 1, 2)?;
        infer_gradients(cx, dtype, result.as_ref())
    }

    /// Adds second-order gradients. All three outputs are linear in each of their inputs, so their gradients are
    /// convolutions again.
    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let (dy, x, w) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
        let attrs = self.0.explicit_padding_attrs(&cx.node().attrs, cx.shape(x), cx.shape(w))?;
        let [gx, gw, gb] = [0, 1, 2].map(|k| cx.output_grad(k));
        if cx.needs_grad(0) {
            let mut parts = Vec::new();
            if let Some(gx) = gx {
                let inputs: Vec<ValueId> = [gx, w].into_iter().chain(gb).collect();
                parts.push(cx.add("Conv", &inputs, attrs.clone()));
            }
            if let Some(gw) = gw {
                let inputs: Vec<ValueId> = [x, gw].into_iter().chain(gb.filter(|_| gx.is_none())).collect();
                parts.push(cx.add("Conv", &inputs, attrs.clone()));
            }
            if let (Some(gb), true) = (gb, parts.is_empty()) {
                let rank = cx.shape(dy).or(cx.shape(x)).or(cx.shape(w)).map(Shape::rank);
                let rank = rank.ok_or_else(|| OpError::unsupported("the rank of the image must be known"))?;
                let mut per_channel = vec![1; rank - 1];
                per_channel[0] = -1;
                let per_channel = cx.ints("per_channel", &per_channel);
                let gb = cx.add("Reshape", &[gb, per_channel], Attrs::new());
                let shape = cx.shape_of(dy);
                parts.push(cx.add("Expand", &[gb, shape], Attrs::new()));
            }
            let gradient = match parts[..] {
                [] => None,
                [one] => Some(one),
                _ => Some(cx.add("Sum", &parts, Attrs::new())),
            };
            if let Some(gradient) = gradient {
                cx.set_grad(0, gradient);
            }
        }
        let of_conv = |cx: &mut Grad<'_>, inputs: [ValueId; 3], k: usize| {
            let mut output_mask = [false; 3];
            output_mask[k] = true;
            let outputs = cx.add_node_with_optional_outputs(
                "com.microsoft",
                "ConvGrad",
                &inputs.map(Some),
                &output_mask,
                attrs.clone(),
            );
            outputs[k].expect("the output was requested")
        };
        if let (true, Some(gw)) = (cx.needs_grad(1), gw) {
            let gradient = of_conv(cx, [dy, x, gw], 0);
            cx.set_grad(1, gradient);
        }
        if let (true, Some(gx)) = (cx.needs_grad(2), gx) {
            let gradient = of_conv(cx, [dy, gx, w], 1);
            cx.set_grad(2, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (image, filter) = (cx.dims(1), cx.dims(2));
        let [dy, x, w] = [0, 1, 2].map(|k| cx.input(k));
        if cx.has_output(0) {
            emit_conv(cx, 0, self.0.shape(ConvPass::InputGradient, &image, &filter)?, dy, w, None)?;
        }
        if cx.has_output(1) {
            emit_conv(cx, 1, self.0.shape(ConvPass::FilterGradient, &image, &filter)?, dy, x, None)?;
        }
        if cx.has_output(2) {
            emit_channel_sums(cx, 2, 0)?;
        }
        Ok(())
    }
}

/// Decomposes `ConvGrad` into ConvTranspose, Conv and ReduceSum.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let conv = Conv::read(rw.node())?;
    let (dy, x, w) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let (image, filter) = (rw.shape(x).cloned(), rw.shape(w).cloned());
    let filter = filter.ok_or_else(|| OpError::unsupported("the rank of the filter must be known"))?;
    let rank = filter.rank();
    let kernel = kernel_dims(&conv.sliding, Some(&filter), rank)?;
    if rw.has_output(0) || rw.has_output(1) {
        let windows = conv.explicit_windows(image.as_ref(), &kernel).ok_or_else(|| {
            OpError::unsupported(
                "with auto_pad, the sizes of image and filter must be known to write the gradient in plain ONNX",
            )
        })?;
        if rw.has_output(0) {
            let gradient = image_gradient(rw, (dy, x, w), &kernel, conv.groups, &windows);
            rw.replace_output(0, gradient);
        }
        if rw.has_output(1) {
            let gradient = filter_gradient(rw, (dy, x), &filter, conv.groups, &windows)?;
            rw.replace_output(1, gradient);
        }
    }
    if rw.has_output(2) {
        let gradient = sum_over_channels(rw, dy, rank);
        rw.replace_output(2, gradient);
    }
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Conv::read(node)?))
}

fn build_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ConvGrad(Conv::read(node)?)))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Conv", &[1, 11, 22], build)
            .class(Class::Convolution)
            .traits(Traits::UNBOUNDED)
            .later_types(&[(22, &[DType::BF16])])
            .weights(&[1, 2]),
        Definition::new("com.microsoft", "ConvGrad", &[1], build_grad).decompose(decompose_grad),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;

    use super::*;
    use crate::passes;
    use crate::testing::{
        add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        gradient_graph, graph, ints, one_node_graph, run, run_node, with_symbolic_sizes,
    };

    const CONV: (&str, &str) = ("", "Conv");
    const GRAD: (&str, &str) = ("com.microsoft", "ConvGrad");

    /// Computes a convolution by the definition, with a padded copy of the image. `pads` are before and after each
    /// axis.
    fn reference_conv(
        x: &Tensor,
        w: &Tensor,
        groups: usize,
        steps: &[[usize; 2]],
        pads: &[[usize; 2]],
    ) -> Tensor {
        let (xd, wd) = (x.dims(), w.dims());
        let axes = xd.len() - 2;
        let flat = |dims: &[usize], at: &[usize]| dims.iter().zip(at).fold(0, |p, (dim, i)| p * dim + i);
        let counted = |dims: &[usize]| -> Vec<Vec<usize>> {
            (0..dims.iter().product())
                .map(|mut k: usize| {
                    let mut at = vec![0; dims.len()];
                    for axis in (0..dims.len()).rev() {
                        at[axis] = k % dims[axis];
                        k /= dims[axis];
                    }
                    at
                })
                .collect()
        };
        let mut padded_dims = xd.to_vec();
        (0..axes).for_each(|k| padded_dims[k + 2] += pads[k][0] + pads[k][1]);
        let mut padded = vec![0.0; padded_dims.iter().product()];
        for (at, value) in counted(xd).into_iter().zip(x.to_f64()) {
            let moved: Vec<usize> =
                at.iter().enumerate().map(|(k, i)| i + if k > 1 { pads[k - 2][0] } else { 0 }).collect();
            padded[flat(&padded_dims, &moved)] = value;
        }
        let mut yd = vec![xd[0], wd[0]];
        yd.extend((0..axes).map(|k| {
            let [stride, dilation] = steps[k];
            (padded_dims[k + 2] - (wd[k + 2] - 1) * dilation - 1) / stride + 1
        }));
        let weights = w.to_f64();
        let value = |at: Vec<usize>| -> f64 {
            let group = at[1] / (wd[0] / groups);
            let terms = counted(&wd[1..]).into_iter().map(|cell| {
                let mut from = vec![at[0], group * wd[1] + cell[0]];
                from.extend((0..axes).map(|k| at[k + 2] * steps[k][0] + cell[k + 1] * steps[k][1]));
                let filter: Vec<usize> = [at[1]].into_iter().chain(cell).collect();
                padded[flat(&padded_dims, &from)] * weights[flat(wd, &filter)]
            });
            terms.sum()
        };
        let values: Vec<f64> = counted(&yd).into_iter().map(value).collect();
        f64s(&yd, &values)
    }

    fn node_graph(node: (&str, &str), inputs: &[&Tensor], outputs: usize, attrs: Attrs) -> Graph {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        one_node_graph(28, node, &inputs, outputs, attrs).expect("valid")
    }

    fn error_message(node: (&str, &str), inputs: &[&Tensor], attrs: Attrs) -> String {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        one_node_graph(28, node, &inputs, 1, attrs).expect_err("refused").to_string()
    }

    #[test]
    fn hand_computed_values() {
        let x = f64s(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0]);
        let w = f64s(&[2, 1, 2], &[1.0, 10.0, 0.0, -1.0]);
        let b = f64s(&[2], &[100.0, 0.5]);
        let inputs = [Some(&x), Some(&w), Some(&b)];
        let attrs = ints(&[("pads", &[1, 0]), ("strides", &[2])]);
        let y = run_node(CONV, &inputs, 1, attrs).expect("it runs");
        assert_close(&y[0], &f64s(&[1, 2, 2], &[110.0, 132.0, -0.5, -2.5]), 0.0);
        // An image of two rows as two groups of one channel each, with dilation 2.
        let x = f64s(&[1, 2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let attrs = ints(&[("dilations", &[2])]).with("group", 2i64);
        let y = run_node(CONV, &[Some(&x), Some(&w), None], 1, attrs).expect("it runs");
        assert_close(&y[0], &f64s(&[1, 2, 1], &[31.0, -6.0]), 0.0);
    }

    /// Image, filter, groups, stride and dilation of each axis, padding of each axis.
    type Case = (&'static [usize], &'static [usize], usize, &'static [[usize; 2]], &'static [[usize; 2]]);

    const CASES: [Case; 9] = [
        (&[2, 1, 5], &[1, 1, 3], 1, &[[1, 1]], &[[0, 0]]),
        (&[2, 3, 7], &[4, 3, 2], 1, &[[2, 1]], &[[0, 0]]),
        (&[1, 4, 6], &[6, 2, 3], 2, &[[3, 2]], &[[2, 1]]),
        (&[2, 2, 4, 5], &[3, 2, 3, 3], 1, &[[1, 1], [1, 1]], &[[1, 1], [1, 1]]),
        (&[2, 3, 5, 4], &[6, 1, 2, 3], 3, &[[2, 1], [1, 1]], &[[0, 1], [2, 0]]),
        (&[1, 2, 6, 6], &[2, 2, 3, 2], 1, &[[2, 2], [3, 1]], &[[0, 0], [1, 0]]),
        (&[1, 2, 1, 1], &[2, 2, 3, 3], 1, &[[2, 1], [1, 1]], &[[1, 1], [1, 1]]),
        (&[1, 2, 3, 4, 3], &[2, 1, 2, 2, 1], 2, &[[1, 1], [2, 1], [1, 3]], &[[0, 0], [1, 1], [0, 0]]),
        (&[2, 1, 2, 3, 2, 3], &[2, 1, 1, 2, 2, 2], 1, &[[1, 1], [1, 1], [1, 1], [2, 1]], &[[0, 0]; 4]),
    ];

    fn attrs_of(&(_, _, groups, steps, pads): &Case) -> Attrs {
        let of = |list: &[[usize; 2]], k: usize| list.iter().map(|pair| pair[k] as i64).collect::<Vec<i64>>();
        Attrs::new()
            .with("group", groups as i64)
            .with("strides", of(steps, 0))
            .with("dilations", of(steps, 1))
            .with("pads", [of(pads, 0), of(pads, 1)].concat())
    }

    #[test]
    fn all_attributes_match_reference() {
        for case in CASES {
            let (x, w) = (generic_tensor(case.0, 1), generic_tensor(case.1, 2));
            let expected = reference_conv(&x, &w, case.2, case.3, case.4);
            let y = run_node(CONV, &[Some(&x), Some(&w)], 1, attrs_of(&case)).expect("it runs");
            assert_close(&y[0], &expected, 1e-12);
        }
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        for case in CASES {
            let (x, w, b) =
                (generic_tensor(case.0, 1), generic_tensor(case.1, 2), generic_tensor(&case.1[..1], 3));
            let conv = node_graph(CONV, &[&x, &w, &b], 1, attrs_of(&case));
            check_gradients(&conv, &[x, w, b], &[0, 1, 2], &[0]);
        }
    }

    #[test]
    fn gradients_of_gradients() {
        for case in CASES {
            let (x, w) = (generic_tensor(case.0, 1), generic_tensor(case.1, 2));
            let dy = generic_tensor(reference_conv(&x, &w, case.2, case.3, case.4).dims(), 3);
            let args = [dy, x, w];
            let inputs: Vec<&Tensor> = args.iter().collect();
            let grad = node_graph(GRAD, &inputs, 3, attrs_of(&case));
            check_gradients(&grad, &args, &[0, 1, 2], &[0, 1, 2]);
            if case.0.len() == 3 {
                check_gradients(&grad, &args, &[0, 1], &[1, 2]);
                check_gradients(&grad, &args, &[0], &[2]);
            }
        }
    }

    #[test]
    fn gradients_decompose_into_plain_onnx() {
        for case in CASES {
            let (x, w) = (generic_tensor(case.0, 1), generic_tensor(case.1, 2));
            let dy = generic_tensor(reference_conv(&x, &w, case.2, case.3, case.4).dims(), 3);
            let args = [dy, x, w];
            let inputs: Vec<&Tensor> = args.iter().collect();
            let grad = node_graph(GRAD, &inputs, 3, attrs_of(&case));
            check_decomposition(&grad, &args, 1e-12);
        }
    }

    #[test]
    fn symbolic_sizes() {
        for case in CASES {
            let (x, w, b) =
                (generic_tensor(case.0, 1), generic_tensor(case.1, 2), generic_tensor(&case.1[..1], 3));
            let conv = node_graph(CONV, &[&x, &w, &b], 1, attrs_of(&case));
            let inputs = [x, w, b];
            let y = run(&conv, &inputs).expect("it runs").remove(0);
            let expected = gradient_graph(&conv, &[Some(generic_tensor(y.dims(), 4))], &[0, 1, 2]);
            let expected = run(&expected, &inputs).expect("it runs");
            let all: Vec<usize> = (0..case.0.len()).filter(|&axis| axis != 1).collect();
            for axes in [&all[..1], &all[1..], &all] {
                let named = with_symbolic_sizes(&conv, 0, axes);
                let mut plain = gradient_graph(&named, &[Some(generic_tensor(y.dims(), 4))], &[0, 1, 2]);
                assert_eq!(run(&plain, &inputs).expect("it runs"), expected);
                passes::decompose::standardise(&mut plain).expect("it decomposes");
                for (got, expected) in run(&plain, &inputs).expect("plain runs").iter().zip(&expected) {
                    assert_close(got, expected, 1e-12);
                }
            }
        }
    }

    #[test]
    fn padding_is_explicit_in_gradients() {
        let (x, w) = (generic_tensor(&[1, 1, 6, 5], 1), generic_tensor(&[1, 1, 3, 2], 2));
        for (mode, steps, pads) in [
            ("SAME_UPPER", [1, 1], [1, 0, 1, 1]),
            ("SAME_LOWER", [1, 1], [1, 1, 1, 0]),
            ("SAME_UPPER", [2, 3], [0, 0, 1, 0]),
            ("SAME_LOWER", [2, 4], [1, 1, 0, 0]),
            ("VALID", [1, 2], [0, 0, 0, 0]),
        ] {
            let attrs = ints(&[("strides", &steps)]).with("auto_pad", mode);
            let conv = node_graph(CONV, &[&x, &w], 1, attrs.clone());
            let inputs = [x.clone(), w.clone()];
            check_gradients(&conv, &inputs, &[0, 1], &[0]);
            let y = run(&conv, &inputs).expect("it runs").remove(0);
            let seed = [Some(generic_tensor(y.dims(), 3))];
            let emitted = |graph: &Graph| {
                let gradient = gradient_graph(graph, &seed, &[0, 1]);
                let attrs =
                    gradient.nodes.iter().find(|node| &*node.op == "ConvGrad").map(|node| node.attrs.clone());
                attrs.expect("it is emitted")
            };
            let emitted_attrs = emitted(&conv);
            assert_eq!(emitted_attrs.ints("pads").expect("ints"), Some(&pads[..]), "{mode} {steps:?}");
            assert_eq!(emitted_attrs.string("auto_pad").expect("a text"), Some("NOTSET"));
            // Without the sizes, the padding is only known for stride 1.
            let named = emitted(&with_symbolic_sizes(&conv, 0, &[2, 3]));
            let is_determined = steps == [1, 1] || mode == "VALID";
            assert_eq!(
                named.string("auto_pad").expect("a text") == Some("NOTSET"),
                is_determined,
                "{mode} {steps:?}"
            );
            let mut plain = gradient_graph(&with_symbolic_sizes(&conv, 0, &[2, 3]), &seed, &[0, 1]);
            assert_eq!(passes::decompose::standardise(&mut plain).is_ok(), is_determined, "{mode} {steps:?}");
        }
    }

    #[test]
    fn computes_only_required_gradients() {
        let (x, w, b) =
            (generic_tensor(&[1, 2, 4], 1), generic_tensor(&[2, 2, 3], 2), generic_tensor(&[2], 3));
        let conv = node_graph(CONV, &[&x, &w, &b], 1, Attrs::new());
        for (targets, instructions) in
            [(&[0][..], [true, false, false]), (&[1], [false, true, false]), (&[2], [false, false, true])]
        {
            let graph = gradient_graph(&conv, &[Some(generic_tensor(&[1, 2, 2], 4))], targets);
            let node = graph.nodes.iter().find(|node| &*node.op == "ConvGrad").expect("it is emitted");
            let outputs: Vec<bool> =
                (0..3).map(|k| node.outputs.get(k).is_some_and(Option::is_some)).collect();
            assert_eq!(outputs, instructions);
        }
    }

    /// Returns the names of the instructions that a graph is lowered to.
    fn instruction_names(graph: &Graph, inputs: &[Tensor]) -> Vec<&'static str> {
        let roles = vec![crate::Role::User; inputs.len()];
        let schedule = crate::Specialiser::new(graph.clone(), roles).schedule(inputs).expect("it is made");
        let program = schedule.single_program().expect("one program");
        program.instructions.iter().map(|scheduled| scheduled.instruction.name()).collect()
    }

    #[test]
    fn emits_minimal_instructions() {
        let (x, w, b) =
            (generic_tensor(&[2, 2, 4], 1), generic_tensor(&[2, 2, 3], 2), generic_tensor(&[2], 3));
        let inputs = [x, w, b];
        let mut conv = node_graph(CONV, &[&inputs[0], &inputs[1], &inputs[2]], 1, Attrs::new());
        let gradients = |targets: &[usize]| {
            let graph = gradient_graph(&conv, &[Some(generic_tensor(&[2, 2, 2], 4))], targets);
            instruction_names(&graph, &inputs)
        };
        assert_eq!(gradients(&[0]), ["Conv"]);
        assert_eq!(gradients(&[1]), ["Conv"]);
        assert_eq!(gradients(&[2]), ["Reduce"]);
        // Bias and activation are fused into the convolution.
        let y = conv.outputs[0];
        conv.outputs.clear();
        add(&mut conv, ("", "Relu"), "relu", &[Some(y)], 1, Attrs::new());
        assert_eq!(instruction_names(&conv, &inputs), ["Conv"]);
    }

    #[test]
    fn narrow_floats_are_summed_in_float32() {
        for (dtype, unit) in [(DType::F16, 2048.0), (DType::BF16, 256.0)] {
            // In the narrow type the small addends would be lost beside the large one.
            let x = Tensor::filled(dtype, &[1, 8, 1], 0.5);
            let (mut graph, ids) = graph(&[&x]);
            let weights = f64s(&[1, 8, 1], &[2.0 * unit, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
            let wide = graph.add_constant("wide", weights);
            let cast = Attrs::new().with("to", i64::from(dtype.to_onnx()));
            let w = add(&mut graph, ("", "Cast"), "w", &[Some(wide)], 1, cast)[0];
            graph.outputs.clear();
            add(&mut graph, CONV, "y", &[Some(ids[0]), Some(w)], 1, Attrs::new());
            let y = run(&graph, &[x]).expect("it runs").remove(0);
            assert_eq!((y.dtype(), y.to_f64()), (dtype, vec![unit + 8.0]), "7 is rounded to even");
        }
    }

    #[test]
    fn empty_batch_gradients_are_zero() {
        for groups in [1, 2] {
            let (x, w, b) = (
                generic_tensor(&[0, 2, 4], 1),
                generic_tensor(&[2, 2 / groups, 3], 2),
                generic_tensor(&[2], 3),
            );
            let conv = node_graph(CONV, &[&x, &w, &b], 1, Attrs::new().with("group", groups as i64));
            let zeros = f64s(w.dims(), &vec![0.0; w.len()]);
            let inputs = [x, w, b];
            assert_eq!(run(&conv, &inputs).expect("it runs")[0].dims(), [0, 2, 2]);
            let expected = [f64s(&[0, 2, 4], &[]), zeros, f64s(&[2], &[0.0; 2])];
            for named in [&[][..], &[0]] {
                let conv = with_symbolic_sizes(&conv, 0, named);
                let mut graph = gradient_graph(&conv, &[Some(generic_tensor(&[0, 2, 2], 4))], &[0, 1, 2]);
                assert_eq!(run(&graph, &inputs).expect("it runs"), expected);
                passes::decompose::standardise(&mut graph).expect("it decomposes");
                assert_eq!(run(&graph, &inputs).expect("plain runs"), expected);
            }
        }
    }

    #[test]
    fn all_opsets_are_equivalent() {
        let (x, w) = (generic_tensor(&[1, 2, 5], 1), generic_tensor(&[2, 2, 3], 2));
        let conv = node_graph(CONV, &[&x, &w], 1, ints(&[("pads", &[1, 1])]));
        for opset in [7, 10, 11, 21] {
            let old = check_downgrade(&conv, &[x.clone(), w.clone()], opset);
            assert_eq!(&*old.nodes[0].op, "Conv");
        }
    }

    #[test]
    fn partially_known_shapes() {
        let (x, w) = (generic_tensor(&[2, 2, 5, 6], 1), generic_tensor(&[4, 2, 3, 3], 2));
        let attrs = ints(&[("pads", &[1, 0, 1, 0]), ("strides", &[1, 2])]);
        let named = with_symbolic_sizes(&node_graph(CONV, &[&x, &w], 1, attrs), 0, &[0, 2, 3]);
        let shape = named.value(named.outputs[0]).ty.shape().expect("a rank").to_string();
        assert_eq!(shape, "[s0, 4, s2, y.3]");
    }

    #[test]
    fn rejects_invalid_shapes() {
        let x = generic_tensor(&[1, 4, 5, 5], 1);
        let w = generic_tensor(&[6, 4, 3, 3], 2);
        let refused = |x: &Tensor, w: &Tensor, attrs: Attrs| error_message(CONV, &[x, w], attrs);
        for (message, fragment) in [
            (refused(&x, &generic_tensor(&[6, 4, 3], 2), Attrs::new()), "must have the same number of axes"),
            (
                refused(&generic_tensor(&[4, 4], 1), &generic_tensor(&[4, 4], 2), Attrs::new()),
                "at least one spatial axis",
            ),
            (
                refused(&x, &generic_tensor(&[6, 3, 3, 3], 2), Attrs::new()),
                "an image of shape [1, 4, 5, 5] has 4 channels, but a filter of shape [6, 3, 3, 3] takes 3 in each of \
                 1 group",
            ),
            (refused(&x, &w, Attrs::new().with("group", 2i64)), "takes 4 in each of 2 groups"),
            (
                refused(&x, &generic_tensor(&[5, 2, 3, 3], 2), Attrs::new().with("group", 2i64)),
                "5 result channels cannot be divided into 2 groups",
            ),
            (refused(&x, &w, Attrs::new().with("group", 0i64)), "group must be at least 1, got 0"),
            (refused(&x, &w, Attrs::new().with("group", i64::MAX)), "cannot be divided"),
            (
                refused(&x, &w, ints(&[("kernel_shape", &[3, 2])])),
                "kernel_shape [3, 2] does not match a filter of shape",
            ),
            (refused(&x, &w, ints(&[("kernel_shape", &[3])])), "must have 2 elements"),
            (refused(&x, &generic_tensor(&[6, 4, 3, 0], 2), Attrs::new()), "has no cells"),
            (
                refused(&x, &generic_tensor(&[1, 4, 1, (1 << 20) + 1], 2), Attrs::new()),
                "a filter has 1048577 cells for each channel, [1, 1048577]; at most 1048576 are supported",
            ),
            (refused(&x, &generic_tensor(&[6, 4, 6, 1], 2), Attrs::new()), "a window of 6 does not fit 5"),
            (refused(&generic_tensor(&[1, 4, 1, 1], 1), &w, Attrs::new()), "a window of 3 does not fit 1"),
            (refused(&x, &w, ints(&[("dilations", &[3, 1])])), "a window of 3, dilated by 3, does not fit 5"),
            (refused(&x, &w, ints(&[("dilations", &[i64::MAX, 1])])), "does not fit 5"),
            (refused(&x, &w, ints(&[("strides", &[0, 1])])), "strides must be at least 1, got [0, 1]"),
            (refused(&x, &w, ints(&[("strides", &[1, -1])])), "strides must be at least 1, got [1, -1]"),
            (refused(&x, &w, ints(&[("pads", &[1, 1])])), "must have 4 elements"),
            (refused(&x, &w, ints(&[("pads", &[0, 0, 0, -1])])), "pads must be at least 0"),
            (refused(&x, &w, ints(&[("pads", &[i64::MAX, 0, i64::MAX, 0])])), "too large to count"),
            (
                refused(&x, &w, ints(&[("pads", &[1 << 40, 1 << 40, 0, 0])])),
                "the padding is at most 16777216 at each end",
            ),
            (
                error_message(CONV, &[&x, &w, &generic_tensor(&[5], 3)], Attrs::new()),
                "the bias has shape [5], but the result has 6 channels",
            ),
            (
                error_message(CONV, &[&x, &w, &generic_tensor(&[6, 1], 3)], Attrs::new()),
                "the bias has shape [6, 1]",
            ),
            (error_message(CONV, &[&x], Attrs::new()), "expected 2 to 3 inputs, got 1"),
            (
                error_message(GRAD, &[&generic_tensor(&[1, 6, 3, 2], 3), &x, &w], Attrs::new()),
                "the gradient has shape [1, 6, 3, 2], but the result has shape [1, 6, 3, 3]",
            ),
        ] {
            assert!(message.contains(fragment), "{message}");
            assert!(message.starts_with("node \"y\""), "{message}");
        }
        let message = refused(&x, &Tensor::i64(&[6, 4, 3, 3], &[0; 216]), Attrs::new());
        assert!(message.contains("insert a Cast"), "{message}");
    }
}
