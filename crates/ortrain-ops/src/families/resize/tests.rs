use ortrain_graph::{Attrs, DType, Dim, Graph, Shape, Tensor, ValueType};

use super::sampling::{ResizeAttributes, ResizeInputs};
use crate::passes;
use crate::registry::NEWEST_OPSET;
use crate::testing::{
    Failure, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
    gradient_graph, one_node_graph, run, run_node,
};

const RESIZE: (&str, &str) = ("", "Resize");

fn scales(values: &[f32]) -> Tensor {
    Tensor::f32(&[values.len()], values)
}

fn sizes(values: &[i64]) -> Tensor {
    Tensor::i64(&[values.len()], values)
}

fn mode(name: &str) -> Attrs {
    Attrs::new().with("mode", name)
}

fn coordinates(attrs: Attrs, name: &str) -> Attrs {
    attrs.with("coordinate_transformation_mode", name)
}

/// Inputs after the first.
#[derive(Default)]
struct ListInputs {
    roi: Option<Tensor>,
    scales: Option<Tensor>,
    sizes: Option<Tensor>,
}

impl ListInputs {
    fn scales(values: &[f32]) -> ListInputs {
        ListInputs { scales: Some(scales(values)), ..ListInputs::default() }
    }

    fn sizes(values: &[i64]) -> ListInputs {
        ListInputs { sizes: Some(sizes(values)), ..ListInputs::default() }
    }

    fn with_roi(self, roi: &[f32]) -> ListInputs {
        ListInputs { roi: Some(scales(roi)), ..self }
    }

    fn inputs<'a>(&'a self, x: &'a Tensor) -> [Option<&'a Tensor>; 4] {
        [Some(x), self.roi.as_ref(), self.scales.as_ref(), self.sizes.as_ref()]
    }

    /// Builds a graph with constant roi, scales and sizes, as in most files.
    fn graph(&self, x: &Tensor, attrs: &Attrs) -> Graph {
        let inputs = self.inputs(x);
        let mut graph = one_node_graph(NEWEST_OPSET, RESIZE, &inputs, 1, attrs.clone()).expect("valid");
        let lists = inputs[1..].iter().copied().flatten();
        for (id, list) in graph.inputs.split_off(1).into_iter().zip(lists) {
            graph.value_mut(id).constant = Some(list.clone());
        }
        reinfer(&mut graph);
        graph
    }

    fn run(&self, x: &Tensor, attrs: &Attrs) -> Tensor {
        run(&self.graph(x, attrs), std::slice::from_ref(x)).expect("the graph runs").remove(0)
    }
}

fn reinfer(graph: &mut Graph) {
    let y = graph.outputs[0];
    graph.value_mut(y).ty = ValueType::Unknown;
    passes::infer::infer(graph).expect("valid");
}

/// Replaces sizes by symbols.
fn symbolic(mut graph: Graph, names: &[Option<&str>]) -> Graph {
    let x = graph.inputs[0];
    let shape = graph.value(x).ty.shape().expect("known").clone();
    let dims: Shape =
        shape.iter().zip(names).map(|(dim, name)| name.map_or_else(|| dim.clone(), Dim::symbol)).collect();
    graph.value_mut(x).ty = ValueType::Tensor(DType::F64, Some(dims));
    reinfer(&mut graph);
    graph
}

fn op_names(graph: &Graph) -> Vec<&str> {
    graph.nodes.iter().map(|node| &*node.op).collect()
}

fn gradient_of(graph: &Graph, x: &Tensor) -> Graph {
    let y = run(graph, std::slice::from_ref(x)).expect("the graph runs").remove(0);
    gradient_graph(graph, &[Some(generic_tensor(y.dims(), 12))], &[0])
}

/// Values computed by hand from the formulas.
#[test]
fn values_along_one_axis() {
    let x = f64s(&[4], &[1.0, 2.0, 3.0, 4.0]);
    let linear = mode("linear");
    let nearest = |name: &str| coordinates(mode("nearest").with("nearest_mode", name), "asymmetric");
    let double = [1.0, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75, 4.0];
    for (attrs, lists, expected) in [
        (linear.clone(), ListInputs::scales(&[2.0]), &double[..]),
        (linear.clone(), ListInputs::sizes(&[8]), &double),
        (coordinates(linear.clone(), "half_pixel_symmetric"), ListInputs::scales(&[2.0]), &double),
        (
            coordinates(linear.clone(), "align_corners"),
            ListInputs::sizes(&[7]),
            &[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
        ),
        (coordinates(linear.clone(), "align_corners"), ListInputs::sizes(&[1]), &[1.0]),
        (
            coordinates(linear.clone(), "asymmetric"),
            ListInputs::scales(&[1.5]),
            &[1.0, 5.0 / 3.0, 7.0 / 3.0, 3.0, 11.0 / 3.0, 4.0],
        ),
        (coordinates(linear.clone(), "pytorch_half_pixel"), ListInputs::sizes(&[1]), &[1.0]),
        (linear.clone(), ListInputs::sizes(&[1]), &[2.5]),
        // Scale 0.5: two elements each, without and with antialiasing of the elements between.
        (linear.clone(), ListInputs::scales(&[0.5]), &[1.5, 3.5]),
        (linear.clone().with("antialias", 1i64), ListInputs::scales(&[0.5]), &[1.625, 3.375]),
        (nearest("floor"), ListInputs::scales(&[1.5]), &[1.0, 1.0, 2.0, 3.0, 3.0, 4.0]),
        (nearest("ceil"), ListInputs::scales(&[1.5]), &[1.0, 2.0, 3.0, 3.0, 4.0, 4.0]),
        (
            nearest("round_prefer_floor"),
            ListInputs::scales(&[2.0]),
            &[1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
        ),
        (nearest("round_prefer_ceil"), ListInputs::scales(&[2.0]), &[1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 4.0]),
        (
            coordinates(mode("nearest"), "tf_half_pixel_for_nn").with("nearest_mode", "floor"),
            ListInputs::scales(&[0.5]),
            &[2.0, 4.0],
        ),
        (
            coordinates(linear.clone(), "tf_crop_and_resize").with("extrapolation_value", 9.0f32),
            ListInputs::sizes(&[4]).with_roi(&[0.5, 1.25]),
            &[2.5, 3.25, 4.0, 9.0],
        ),
        (
            coordinates(linear.clone(), "tf_crop_and_resize"),
            ListInputs::sizes(&[1]).with_roi(&[0.0, 1.0]),
            &[2.5],
        ),
        // Inputs that exporters omit with empty lists.
        (
            linear.clone(),
            ListInputs { scales: Some(scales(&[])), ..ListInputs::sizes(&[8]) }.with_roi(&[]),
            &double,
        ),
    ] {
        assert_close(&lists.run(&x, &attrs), &f64s(&[expected.len()], expected), 1e-15);
    }
    // Away from the ends, the cubic through a line is the line.
    for a in [-0.75f32, -0.5] {
        let got = ListInputs::scales(&[2.0]).run(&x, &mode("cubic").with("cubic_coeff_a", a)).to_f64();
        assert!((got[3] + got[4] - 5.0).abs() < 1e-12 && got[3] < got[4], "{got:?}");
    }
    // Positions outside do not count if they are excluded.
    let half = mode("cubic").with("exclude_outside", 1i64);
    let got = ListInputs::scales(&[0.5]).run(&f64s(&[4], &[1.0; 4]), &half);
    assert_close(&got, &f64s(&[2], &[1.0; 2]), 1e-15);
}

#[test]
fn sizes_that_keep_the_aspect_ratio() {
    let x = generic_tensor(&[2, 4, 6], 1);
    for (policy, expected_dims) in
        [("stretch", [2, 8, 3]), ("not_larger", [2, 2, 3]), ("not_smaller", [2, 8, 12])]
    {
        let attrs = mode("nearest").with("keep_aspect_ratio_policy", policy).with("axes", vec![1i64, -1]);
        assert_eq!(ListInputs::sizes(&[8, 3]).run(&x, &attrs).dims(), expected_dims, "{policy}");
    }
}

#[test]
fn every_type() {
    for dtype in DType::ALL {
        let x = Tensor::from_slice(DType::F32, &[3], &[0f32, 1.0, 1.0]);
        let to = Attrs::new().with("to", i64::from(dtype.to_onnx()));
        let x = run_node(("", "Cast"), &[Some(&x)], 1, to).expect("the graph runs").remove(0);
        let got = ListInputs::scales(&[2.0]).run(&x, &mode("nearest"));
        assert_eq!((got.dtype(), got.to_f64()), (dtype, vec![0.0, 0.0, 1.0, 1.0, 1.0, 1.0]));
    }
    let wide = Tensor::i64(&[2], &[i64::MAX, i64::MIN + 1]);
    assert_eq!(
        ListInputs::sizes(&[3]).run(&wide, &mode("nearest")),
        Tensor::i64(&[3], &[i64::MAX, i64::MAX, i64::MIN + 1])
    );
    // Results are truncated; a cubic that overshoots is limited to the range.
    let x = Tensor::from_slice(DType::U8, &[4], &[0u8, 0, 255, 255]);
    let got = ListInputs::scales(&[2.0]).run(&x, &mode("linear")).to_f64();
    assert_eq!(got, [0.0, 0.0, 0.0, 63.0, 191.0, 255.0, 255.0, 255.0]);
    let got = ListInputs::scales(&[2.0]).run(&x, &mode("cubic")).to_f64();
    assert_eq!((got[2], got[5]), (0.0, 255.0));
    let x = Tensor::from_slice(DType::I32, &[2], &[-3i32, 4]);
    assert_eq!(ListInputs::sizes(&[1]).run(&x, &mode("linear")).to_i64(), Some(vec![0]));
}

/// An infinity does not affect a neighbour that is copied exactly.
#[test]
fn elements_without_weight_do_not_leak() {
    let x = f64s(&[3], &[1.0, f64::INFINITY, 3.0]);
    let attrs = coordinates(mode("linear"), "align_corners");
    assert_eq!(ListInputs::sizes(&[3]).run(&x, &attrs).to_f64(), x.to_f64());
    let got = ListInputs::sizes(&[5]).run(&x, &attrs).to_f64();
    assert_eq!((got[0], got[4]), (1.0, 3.0));
}

/// Combinations of attributes, each with inputs for the tests.
fn attribute_combinations() -> Vec<(Attrs, Vec<ListInputs>)> {
    let mut combinations = Vec::new();
    let names = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_half_pixel_for_nn",
        "tf_crop_and_resize",
    ];
    for name in names {
        let mut methods: Vec<Attrs> = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple"]
            .iter()
            .map(|&nearest| mode("nearest").with("nearest_mode", nearest))
            .collect();
        for smooth in [mode("linear"), mode("cubic"), mode("cubic").with("cubic_coeff_a", -0.4f32)] {
            for flags in [&[][..], &["antialias"], &["exclude_outside"], &["antialias", "exclude_outside"]] {
                let with = |attrs: Attrs, name: &&str| attrs.with(name, 1i64);
                methods.push(flags.iter().fold(smooth.clone(), with));
            }
        }
        for attrs in methods {
            let mut lists = vec![
                ListInputs::scales(&[1.0, 2.0, 2.0]),
                ListInputs::scales(&[1.0, 0.5, 1.4]),
                ListInputs::scales(&[1.0, 3.0, 1.0]),
                ListInputs::sizes(&[1, 7, 3]),
            ];
            let attrs = coordinates(attrs, name);
            if name == "tf_crop_and_resize" {
                let roi = [0.0, 0.1, -0.2, 1.0, 0.9, 1.3];
                lists = lists.into_iter().map(|list| list.with_roi(&roi)).collect();
                combinations.push((attrs.with("extrapolation_value", -1.5f32), lists));
            } else {
                combinations.push((attrs, lists));
            }
        }
    }
    combinations
}

/// Every implementation of a map (few pieces, a table, several axes) equals its matrix, and the gradient equals the
/// transpose.
#[test]
fn sampling_equals_its_matrices() {
    let x = generic_tensor(&[1, 4, 5], 3);
    for (attrs, lists) in attribute_combinations() {
        let settings = ResizeAttributes::new(&attrs).expect("valid");
        for lists in lists {
            let resize_inputs = ResizeInputs {
                roi: lists.roi.as_ref().map(Tensor::to_f64),
                scales: lists.scales.as_ref().map(Tensor::to_f64),
                sizes: lists.sizes.as_ref().and_then(Tensor::to_i64),
            };
            let plans = settings.plan(x.dims(), &resize_inputs).expect("valid");
            // Each axis as a full matrix, with flags of its rows outside of the input.
            let matrices: Vec<(Vec<f64>, Vec<bool>)> = plans
                .iter()
                .map(|plan| match settings.sampling(plan).expect("small") {
                    Some((map, outside)) => (map.matrix(false), outside),
                    None => {
                        let (rows, columns) = (plan.target, plan.source);
                        let unit = |k: usize| f64::from(u8::from(k / columns == k % columns));
                        ((0..rows * columns).map(unit).collect(), vec![false; rows])
                    }
                })
                .collect();
            let [a, b, c]: [usize; 3] =
                plans.iter().map(|plan| plan.target).collect::<Vec<_>>().try_into().expect("rank 3");
            let data = x.to_f64();
            let mut expected = Vec::new();
            for i in 0..a * b * c {
                let at = [i / (b * c), i / c % b, i % c];
                if (0..3).any(|axis| matrices[axis].1[at[axis]]) {
                    expected.push(-1.5);
                    continue;
                }
                let mut sum = 0.0;
                for (k, value) in data.iter().enumerate() {
                    let from = [k / 20, k / 5 % 4, k % 5];
                    let weight = |axis: usize| matrices[axis].0[at[axis] * x.dims()[axis] + from[axis]];
                    sum += weight(0) * weight(1) * weight(2) * value;
                }
                expected.push(sum);
            }
            let got = lists.run(&x, &attrs);
            assert_close(&got, &f64s(&[a, b, c], &expected), 1e-12);
        }
    }
}

#[test]
fn gradients_of_known_sizes_use_plain_operators() {
    let x = generic_tensor(&[1, 4, 5], 4);
    for (k, (attrs, lists)) in attribute_combinations().into_iter().enumerate() {
        // Every combination with one list each, a different list each time.
        let graph = lists[k % lists.len()].graph(&x, &attrs);
        check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        let gradient = gradient_of(&graph, &x);
        assert!(gradient.nodes.iter().all(|node| node.domain.is_empty()), "{gradient}");
    }
}

#[test]
fn gradients_of_symbolic_sizes_use_resize_grad() {
    let x = generic_tensor(&[1, 4, 5], 5);
    for (k, (attrs, lists)) in attribute_combinations().into_iter().enumerate() {
        let list = &lists[k % lists.len()];
        let graph = symbolic(list.graph(&x, &attrs), &[Some("N"), Some("H"), Some("W")]);
        let gradient = gradient_of(&graph, &x);
        assert!(op_names(&gradient).contains(&"ResizeGrad"), "{gradient}");
        check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        // With known sizes the two forms are equal.
        let mut plain = gradient.clone();
        let (id, shape) = (plain.inputs[0], Shape::known(x.dims()));
        plain.value_mut(id).ty = ValueType::Tensor(DType::F64, Some(shape));
        check_decomposition(&plain, std::slice::from_ref(&x), 1e-12);
    }
    let graph =
        symbolic(ListInputs::scales(&[1.0, 2.0, 2.0]).graph(&x, &mode("linear")), &[None, Some("H"), None]);
    let error =
        passes::decompose::standardise(&mut gradient_of(&graph, &x)).expect_err("refused").to_string();
    assert!(error.contains("only if sizes, scales and roi are constant"), "{error}");
}

/// The sizes of unchanged axes may be unknown.
#[test]
fn gradients_with_symbolic_batch() {
    let x = generic_tensor(&[2, 3, 4, 2], 6);
    for (scale, expected) in [
        (&[1.0, 1.0, 2.0, 2.0][..], &["Reshape", "ReduceSum"][..]),
        (&[1.0, 1.0, 3.0, 0.5], &["MatMul", "Reshape", "ReduceSum"]),
        (&[1.0, 1.5, 0.5, 1.0], &["Transpose", "MatMul", "Transpose", "MatMul"]),
    ] {
        let graph =
            symbolic(ListInputs::scales(scale).graph(&x, &mode("nearest")), &[Some("N"), None, None, None]);
        assert_eq!(op_names(&gradient_of(&graph, &x)), *expected);
        check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
    }
    // One unknown size after an axis that is split.
    let graph = symbolic(
        ListInputs::scales(&[1.0, 2.0, 1.0, 1.0]).graph(&x, &mode("nearest")),
        &[Some("N"), None, Some("H"), None],
    );
    assert_eq!(op_names(&gradient_of(&graph, &x)), ["Reshape", "ReduceSum"]);
    check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
    // A Reshape can infer only one of two unknown sizes.
    let graph = symbolic(
        ListInputs::scales(&[1.0, 2.0, 1.0, 1.0]).graph(&x, &mode("nearest")),
        &[None, None, Some("H"), Some("W")],
    );
    assert_eq!(op_names(&gradient_of(&graph, &x)), ["ResizeGrad"]);
    check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
}

/// As exporters write it: the leading sizes are computed from the sizes of the input.
#[test]
fn gradients_with_sizes_computed_from_batch() {
    let x = generic_tensor(&[3, 2, 4, 5], 6);
    let (mut graph, ids) = crate::testing::graph(&[&x]);
    let add = |graph: &mut Graph, op: &str, inputs: &[ortrain_graph::ValueId], attrs: Attrs| {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        crate::testing::add(graph, ("", op), op, &inputs, 1, attrs)[0]
    };
    let shape = add(&mut graph, "Shape", &[ids[0]], Attrs::new());
    let [start, end] = [0, 2].map(|at| graph.add_constant("bound", Tensor::i64(&[1], &[at])));
    let lead = add(&mut graph, "Slice", &[shape, start, end], Attrs::new());
    let rest = graph.add_constant("rest", sizes(&[3, 8]));
    let list = add(&mut graph, "Concat", &[lead, rest], Attrs::new().with("axis", 0i64));
    let inputs = [Some(ids[0]), None, None, Some(list)];
    graph.outputs.clear();
    crate::testing::add(&mut graph, RESIZE, "y", &inputs, 1, mode("linear"));
    let dims: Shape =
        [Dim::symbol("N"), Dim::symbol("C"), Dim::Known(4), Dim::Known(5)].into_iter().collect();
    graph.value_mut(ids[0]).ty = ValueType::Tensor(DType::F64, Some(dims));
    passes::infer::infer(&mut graph).expect("valid");
    assert_eq!(op_names(&gradient_of(&graph, &x)), ["MatMul", "MatMul"]);
    check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
}

/// Sizes, scales and roi from graph inputs are read when a program is built.
#[test]
fn lists_as_graph_inputs() {
    let x = generic_tensor(&[1, 4], 7);
    let crop = coordinates(mode("linear"), "tf_crop_and_resize");
    for (lists, attrs) in [
        (ListInputs::scales(&[1.0, 1.7]), mode("linear")),
        (ListInputs::sizes(&[2, 3]), mode("cubic")),
        (ListInputs::sizes(&[2, 3]), mode("linear").with("keep_aspect_ratio_policy", "not_larger")),
        (ListInputs::sizes(&[2, 3]).with_roi(&[0.0, 0.2, 1.0, 0.9]), crop),
    ] {
        let inputs = lists.inputs(&x);
        let graph = one_node_graph(NEWEST_OPSET, RESIZE, &inputs, 1, attrs.clone()).expect("valid");
        let feeds: Vec<Tensor> = inputs.iter().copied().flatten().cloned().collect();
        assert_eq!(run(&graph, &feeds).expect("the graph runs")[0], lists.run(&x, &attrs));
        check_gradients(&graph, &feeds, &[0], &[0]);
    }
}

#[test]
fn empty_and_single_pixel_inputs() {
    let x = generic_tensor(&[2, 3], 8);
    assert_eq!(ListInputs::scales(&[1.0, 1.0]).run(&x, &mode("cubic")), x);
    assert_eq!(ListInputs::sizes(&[0, 6]).run(&x, &mode("linear")).dims(), [0, 6]);
    let empty = f64s(&[0, 3], &[]);
    assert_eq!(ListInputs::scales(&[2.0, 2.0]).run(&empty, &mode("linear")).dims(), [0, 6]);
    let graph = ListInputs::scales(&[2.0, 2.0]).graph(&empty, &mode("linear"));
    let gradient = gradient_graph(&graph, &[Some(f64s(&[0, 6], &[]))], &[0]);
    assert_eq!(run(&gradient, &[empty]).expect("the graph runs")[0].dims(), [0, 3]);
    // An image of one pixel.
    let pixel = f64s(&[1, 1], &[5.0]);
    for name in ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"] {
        for method in ["nearest", "linear", "cubic"] {
            let got = ListInputs::sizes(&[2, 3]).run(&pixel, &coordinates(mode(method), name));
            assert_close(&got, &f64s(&[2, 3], &[5.0; 6]), 1e-15);
        }
    }
}

#[test]
fn older_versions() {
    let x = generic_tensor(&[1, 2, 4], 9);
    let factors = [1.0f32, 2.0, 1.5];
    let attribute = Attrs::new().with("scales", factors.to_vec());
    for method in ["nearest", "linear"] {
        let simple = coordinates(mode(method), "asymmetric").with("nearest_mode", "floor");
        let expected = ListInputs::scales(&factors).run(&x, &simple);
        let attrs = attribute.clone().with("mode", method);
        let graph =
            one_node_graph(7, ("", "Upsample"), &[Some(&x)], 1, attrs).expect("the graph can be read");
        assert_eq!(run(&graph, std::slice::from_ref(&x)).expect("the graph runs")[0], expected);
        for (opset, op) in [(7, "Upsample"), (8, "Upsample"), (9, "Upsample"), (10, "Resize"), (12, "Resize")]
        {
            assert_eq!(op_names(&check_downgrade(&graph, std::slice::from_ref(&x), opset)), [op]);
            let mut gradient = gradient_of(&graph, &x);
            passes::infer::infer(&mut gradient).expect("valid");
            check_downgrade(&gradient, std::slice::from_ref(&x), opset);
        }
        let list = scales(&factors);
        for (opset, op) in [(9, "Upsample"), (10, "Resize")] {
            let inputs = [Some(&x), Some(&list)];
            let graph =
                one_node_graph(opset, ("", op), &inputs, 1, mode(method)).expect("the graph can be read");
            let feeds = [x.clone(), list.clone()];
            assert_eq!(run(&graph, &feeds).expect("the graph runs")[0], expected);
            check_downgrade(&graph, &feeds, opset);
        }
    }
    // Along an axis that shrinks, opset 10 uses the element above.
    let line = f64s(&[5], &[0.0, 1.0, 2.0, 3.0, 4.0]);
    let fewer = scales(&[0.6]);
    let graph = one_node_graph(10, RESIZE, &[Some(&line), Some(&fewer)], 1, mode("nearest"))
        .expect("the graph can be read");
    let line_feeds = [line.clone(), fewer.clone()];
    assert_eq!(run(&graph, &line_feeds).expect("the graph runs")[0].to_f64(), [0.0, 2.0, 4.0]);
    let error = passes::versions::downgrade(&mut graph.clone(), 11).expect_err("refused").to_string();
    assert!(error.contains("all at least 1 or all at most 1"), "{error}");

    for (attrs, lists, oldest) in [
        (mode("linear"), ListInputs::scales(&[1.0, 2.0, 0.5]), 11),
        (mode("cubic"), ListInputs::sizes(&[1, 3, 3]), 11),
        (mode("linear").with("axes", vec![-1i64, 1]), ListInputs::scales(&[2.0, 0.5]), 11),
        (mode("linear").with("axes", vec![2i64]), ListInputs::sizes(&[7]), 11),
        (
            coordinates(mode("linear").with("axes", vec![2i64]), "tf_crop_and_resize"),
            ListInputs::sizes(&[7]).with_roi(&[0.1, 0.9]),
            11,
        ),
        (mode("linear").with("antialias", 1i64), ListInputs::scales(&[1.0, 1.0, 0.5]), 18),
        (mode("nearest").with("keep_aspect_ratio_policy", "not_larger"), ListInputs::sizes(&[1, 2, 2]), 18),
        (coordinates(mode("nearest"), "half_pixel_symmetric"), ListInputs::sizes(&[1, 2, 2]), 19),
    ] {
        let graph = lists.graph(&x, &attrs);
        for opset in [oldest, 13.max(oldest), 18.max(oldest), 28] {
            check_downgrade(&graph, std::slice::from_ref(&x), opset);
        }
        let error =
            passes::versions::downgrade(&mut graph.clone(), oldest - 1).expect_err("refused").to_string();
        assert!(error.contains(&format!("needs opset {oldest} or newer")), "{error}");
    }
}

#[test]
fn rejects_invalid_inputs() {
    let x = generic_tensor(&[2, 3], 10);
    let crop = coordinates(mode("linear"), "tf_crop_and_resize");
    let cases: Vec<(ListInputs, Attrs, &str)> = vec![
        (ListInputs::default(), mode("linear"), "neither scales nor sizes are given"),
        (
            ListInputs { sizes: Some(sizes(&[1, 1])), ..ListInputs::scales(&[1.0, 1.0]) },
            mode("linear"),
            "both scales and sizes",
        ),
        (ListInputs::scales(&[2.0]), mode("linear"), "scales has 1 elements for 2 axes, expected 2"),
        (ListInputs::sizes(&[1, 2, 3]), mode("linear"), "sizes has 3 elements for 2 axes, expected 2"),
        (
            ListInputs::scales(&[2.0, 0.0]),
            mode("linear"),
            "the scale of axis 1 must be a number above 0, got 0",
        ),
        (
            ListInputs::scales(&[-1.0, 1.0]),
            mode("linear"),
            "the scale of axis 0 must be a number above 0, got -1",
        ),
        (
            ListInputs::scales(&[f32::NAN, 1.0]),
            mode("linear"),
            "the scale of axis 0 must be a number above 0, got NaN",
        ),
        (
            ListInputs::scales(&[f32::INFINITY, 1.0]),
            mode("linear"),
            "the scale of axis 0 must be a number above 0, got inf",
        ),
        (ListInputs::scales(&[1e30, 1.0]), mode("linear"), "makes axis 0 too long to count"),
        (ListInputs::scales(&[1e9, 1e9]), mode("linear"), "too large to address"),
        (ListInputs::sizes(&[1 << 40, 1 << 40]), mode("linear"), "too large to address"),
        (ListInputs::sizes(&[1, 1 << 30]), mode("linear"), "which needs more than 16777216 weights"),
        (ListInputs::sizes(&[-2, 3]), mode("linear"), "the size of axis 0 must be at least 0, got -2"),
        (ListInputs::sizes(&[2, 3]), crop.clone(), "roi is missing"),
        (
            ListInputs::sizes(&[2, 3]).with_roi(&[0.0, 1.0]),
            crop.clone(),
            "roi has 2 elements for 2 axes, expected 4",
        ),
        (
            ListInputs::sizes(&[2, 3]).with_roi(&[0.0, 0.0, 1.0, f32::NAN]),
            crop.clone(),
            "roi of axis 1 must have finite bounds, got 0 and NaN",
        ),
        (
            ListInputs::scales(&[2.0, 2.0]),
            mode("quintic"),
            "mode must be one of nearest, linear, cubic, got \"quintic\"",
        ),
        (ListInputs::scales(&[2.0, 2.0]), coordinates(mode("linear"), "polar"), "got \"polar\""),
        (ListInputs::scales(&[2.0, 2.0]), mode("nearest").with("antialias", 1i64), "antialias requires mode"),
        (
            ListInputs::scales(&[2.0, 2.0]),
            mode("linear").with("axes", vec![0i64, -2]),
            "axis 0 is named twice",
        ),
        (
            ListInputs::scales(&[2.0]),
            mode("linear").with("axes", vec![2i64]),
            "axis 2 is out of range for rank 2",
        ),
    ];
    for (lists, attrs, sentence) in cases {
        let failure = run_node(RESIZE, &lists.inputs(&x), 1, attrs).expect_err(sentence);
        let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
        assert!(error.to_string().contains(sentence), "{error}");
    }
    let empty = f64s(&[0, 3], &[]);
    let failure = run_node(RESIZE, &ListInputs::sizes(&[1, 3]).inputs(&empty), 1, mode("linear"));
    assert!(matches!(failure, Err(Failure::Prepare(_))));
    let error =
        one_node_graph(10, ("", "Upsample"), &[Some(&x)], 1, Attrs::new()).expect_err("refused").to_string();
    assert!(error.contains("Upsample was removed in opset 10; use Resize"), "{error}");
    let smaller = Attrs::new().with("scales", vec![1.0f32, 0.5]);
    let error =
        one_node_graph(7, ("", "Upsample"), &[Some(&x)], 1, smaller).expect_err("refused").to_string();
    assert!(error.contains("scales must be at least 1, got 0.5"), "{error}");
}
