use ortrain_graph::{Tensor, ValueType};

use super::*;
use crate::testing::*;

fn test_image(dims: &[usize]) -> Tensor {
    let len = dims.iter().product::<usize>();
    let elements: Vec<f64> = (0..len).map(|i| ((i * 7919 + 13) % 101) as f64 / 10.0 - 5.0).collect();
    f64s(dims, &elements)
}

fn pool(op: &str, x: &Tensor, attrs: Attrs) -> Tensor {
    run_node(("", op), &[Some(x)], 1, attrs).expect("the graph runs").remove(0)
}

#[test]
fn max_pool_and_indices() {
    let x = f64s(&[1, 1, 2, 4], &[1.0, 5.0, 2.0, 2.0, 3.0, 4.0, 2.0, 0.0]);
    let attrs = Attrs::new().with("kernel_shape", vec![2i64, 2]).with("strides", vec![2i64, 2]);
    let outputs = run_node(("", "MaxPool"), &[Some(&x)], 2, attrs.clone()).expect("the graph runs");
    assert_eq!(outputs[0].to_f64(), [5.0, 2.0]);
    assert_eq!(outputs[1].to_f64(), [1.0, 2.0], "the first of several");
    let outputs =
        run_node(("", "MaxPool"), &[Some(&x)], 2, attrs.with("storage_order", 1i64)).expect("the graph runs");
    assert_eq!(outputs[1].to_f64(), [2.0, 4.0], "down the columns");
}

#[test]
fn average_divides_by_window_elements() {
    let x = f64s(&[1, 1, 3], &[1.0, 2.0, 6.0]);
    let attrs = Attrs::new().with("kernel_shape", vec![2i64]).with("pads", vec![1i64, 1]);
    assert_eq!(pool("AveragePool", &x, attrs.clone()).to_f64(), [1.0, 1.5, 4.0, 6.0]);
    let with_padding = attrs.with("count_include_pad", 1i64);
    assert_eq!(pool("AveragePool", &x, with_padding).to_f64(), [0.5, 1.5, 4.0, 3.0]);
    // A window that extends beyond the end counts the elements inside.
    let ceil = Attrs::new()
        .with("kernel_shape", vec![2i64])
        .with("strides", vec![2i64])
        .with("ceil_mode", 1i64)
        .with("count_include_pad", 1i64);
    assert_eq!(pool("AveragePool", &x, ceil).to_f64(), [1.5, 6.0]);
}

#[test]
fn global_pools() {
    let x = test_image(&[2, 3, 4, 5]);
    let planes = x.to_f64();
    let largest: Vec<f64> =
        planes.chunks(20).map(|plane| plane.iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect();
    let mean: Vec<f64> = planes.chunks(20).map(|plane| plane.iter().sum::<f64>() / 20.0).collect();
    assert_eq!(pool("GlobalMaxPool", &x, Attrs::new()).to_f64(), largest);
    assert_close(&pool("GlobalAveragePool", &x, Attrs::new()), &f64s(&[2, 3, 1, 1], &mean), 1e-12);
}

#[test]
fn gradients() {
    let kernel = || Attrs::new().with("kernel_shape", vec![3i64, 2]);
    let wide = || kernel().with("strides", vec![2i64, 3]).with("pads", vec![1i64, 0, 1, 1]);
    let cases: [(&str, Attrs); 13] = [
        ("MaxPool", kernel()),
        ("MaxPool", wide().with("ceil_mode", 1i64)),
        ("MaxPool", kernel().with("storage_order", 1i64).with("dilations", vec![2i64, 2])),
        ("AveragePool", kernel()),
        ("AveragePool", wide()),
        ("AveragePool", wide().with("count_include_pad", 1i64).with("ceil_mode", 1i64)),
        ("AveragePool", kernel().with("auto_pad", "SAME_LOWER").with("dilations", vec![1i64, 2])),
        ("AveragePool", wide().with("ceil_mode", 1i64)),
        ("AveragePool", wide().with("auto_pad", "SAME_UPPER")),
        ("AveragePool", wide().with("auto_pad", "SAME_LOWER").with("count_include_pad", 1i64)),
        // Some windows only cover padding.
        ("AveragePool", kernel().with("pads", vec![4i64, 0, 3, 2])),
        ("GlobalMaxPool", Attrs::new()),
        ("GlobalAveragePool", Attrs::new()),
    ];
    for (op, attrs) in cases {
        let x = test_image(&[2, 2, 6, 7]);
        let graph =
            one_node_graph(crate::NEWEST_OPSET, ("", op), &[Some(&x)], 1, attrs.clone()).expect("right");
        check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        // The same in plain ONNX, and with symbolic sizes.
        let y = run(&graph, std::slice::from_ref(&x)).expect("the graph runs").remove(0);
        let seed = [Some(generic_tensor(y.dims(), 3))];
        let known = gradient_graph(&graph, &seed, &[0]);
        let expected = run(&known, std::slice::from_ref(&x)).expect("the graph runs").remove(0);
        for axes in [&[][..], &[0], &[2, 3], &[3], &[0, 1, 2, 3]] {
            let named = gradient_graph(&with_symbolic_sizes(&graph, 0, axes), &seed, &[0]);
            let got =
                run(&named, std::slice::from_ref(&x)).unwrap_or_else(|e| panic!("{op} {attrs:?}: {e:?}"));
            assert_close(&got[0], &expected, 1e-12);
            check_decomposition(&named, std::slice::from_ref(&x), 1e-12);
        }
    }
}

/// The first of several equal elements, and of several NaNs, gets the whole gradient, with known and symbolic sizes.
#[test]
fn first_maximum_gets_gradient() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    for (elements, at) in [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([nan, 3.0, nan, 2.0], 0),
        ([inf, 3.0, nan, nan], 2),
        ([-inf, -inf, -inf, -inf], 0),
        ([-0.0, 0.0, -1.0, 0.0], 0),
    ] {
        let x = f64s(&[1, 1, 4], &elements);
        let graph = one_node_graph(crate::NEWEST_OPSET, ("", "GlobalMaxPool"), &[Some(&x)], 1, Attrs::new());
        let graph = graph.expect("the graph is valid");
        let mut expected = [0.0; 4];
        expected[at] = 2.5;
        for axes in [&[][..], &[2]] {
            let seed = [Some(f64s(&[1, 1, 1], &[2.5]))];
            let named = gradient_graph(&with_symbolic_sizes(&graph, 0, axes), &seed, &[0]);
            let got = run(&named, std::slice::from_ref(&x)).expect("the graph runs");
            assert_eq!(got[0].to_f64(), expected, "{elements:?} {axes:?}");
            check_decomposition(&named, std::slice::from_ref(&x), 0.0);
        }
    }
}

/// Gradient nodes as onnxruntime-training writes them. MaxPoolGrad takes the shape from the node that made the indices,
/// AveragePoolGrad from its declared result.
#[test]
fn onnxruntime_gradients_decompose() {
    let x = test_image(&[2, 3, 5, 6]);
    let attrs = || Attrs::new().with("kernel_shape", vec![3i64, 2]).with("pads", vec![1i64, 1, 0, 0]);
    let y = pool("MaxPool", &x, attrs());
    let inputs = [x.clone(), generic_tensor(y.dims(), 5)];
    for batch in [Dim::Known(2), Dim::symbol("N")] {
        let (mut largest, ids) = graph(&[&inputs[0], &inputs[1]]);
        let ty = |dims: &[usize]| {
            let rest = dims[1..].iter().map(|&size| Dim::Known(size));
            ValueType::Tensor(DType::F64, Some([batch.clone()].into_iter().chain(rest).collect()))
        };
        largest.value_mut(ids[0]).ty = ty(x.dims());
        largest.value_mut(ids[1]).ty = ty(y.dims());
        let index = add(&mut largest, ("", "MaxPool"), "y", &[Some(ids[0])], 2, attrs())[1];
        largest.outputs.clear();
        add(&mut largest, ("", "MaxPoolGrad"), "dx", &[Some(ids[1]), Some(index)], 1, attrs());
        let mut average = largest.clone();
        crate::passes::infer::infer(&mut largest).expect("the graph is valid");
        check_decomposition(&largest, &inputs, 1e-12);

        average.nodes.clear();
        average.outputs.clear();
        let dx = add(&mut average, ("", "AveragePoolGrad"), "da", &[Some(ids[1])], 1, attrs())[0];
        average.value_mut(dx).ty = ty(x.dims());
        crate::passes::infer::infer(&mut average).expect("the graph is valid");
        check_decomposition(&average, &inputs, 1e-12);

        // The decomposition needs a scatter that adds.
        let mut old = largest.clone();
        crate::passes::decompose::standardise(&mut old).expect("the graph decomposes");
        crate::passes::versions::downgrade(&mut old.clone(), 16).expect("it is there");
        let error = crate::passes::versions::downgrade(&mut old, 15).expect_err("refused").to_string();
        assert!(error.contains("ScatterElements") && error.contains("opset 16 or newer"), "{error}");
    }
}

/// Opsets without a scatter reduction get one scatter for each group of windows without overlap.
#[test]
fn gradients_before_scatter_reduction() {
    let x = test_image(&[2, 3, 7, 6]);
    for (kernel, attrs, oldest) in [
        ([2, 2], Attrs::new().with("strides", vec![2i64, 2]), 9),
        ([3, 2], Attrs::new().with("strides", vec![2i64, 1]).with("pads", vec![1i64, 0, 1, 1]), 9),
        // Dilations came with opset 10.
        ([2, 2], Attrs::new().with("dilations", vec![2i64, 3]), 10),
        ([7, 6], Attrs::new(), 9),
    ] {
        let attrs = attrs.with("kernel_shape", kernel.to_vec());
        let pooled = one_node_graph(28, ("", "MaxPool"), &[Some(&x)], 1, attrs).expect("valid");
        for opset in [15, 11, oldest] {
            check_decomposed_gradients(&pooled, std::slice::from_ref(&x), &[0], opset);
        }
    }
    let pooled = one_node_graph(28, ("", "GlobalMaxPool"), &[Some(&x)], 1, Attrs::new()).expect("valid");
    check_decomposed_gradients(&pooled, &[x], &[0], 9);
}

/// If no node made the indices, MaxPoolGrad has its declared shape.
#[test]
fn max_pool_gradient_with_input_indices() {
    let (g, index) = (f64s(&[1, 1, 3], &[1.0, 2.0, 4.0]), Tensor::i64(&[1, 1, 3], &[1, 1, 3]));
    let (mut unpooled, ids) = graph(&[&g, &index]);
    let attrs = Attrs::new().with("kernel_shape", vec![2i64]);
    let dx = add(&mut unpooled, ("", "MaxPoolGrad"), "dx", &[Some(ids[0]), Some(ids[1])], 1, attrs)[0];
    unpooled.value_mut(dx).ty = ValueType::tensor(DType::F64, &[1, 1, 4]);
    crate::passes::infer::infer(&mut unpooled).expect("the graph is valid");
    let got = run(&unpooled, &[g.clone(), index.clone()]).expect("the graph runs");
    assert_close(&got[0], &f64s(&[1, 1, 4], &[0.0, 3.0, 0.0, 4.0]), 0.0);
    check_decomposition(&unpooled, &[g, index], 0.0);
}

#[test]
fn gradients_of_unknown_shape_do_not_decompose() {
    let (g, index) = (test_image(&[1, 1, 2]), Tensor::i64(&[1, 1, 2], &[0, 1]));
    let attrs = || Attrs::new().with("kernel_shape", vec![2i64]);
    let (mut lost, ids) = graph(&[&g, &index]);
    add(&mut lost, ("", "MaxPoolGrad"), "dx", &[Some(ids[0]), Some(ids[1])], 1, attrs());
    crate::passes::infer::infer(&mut lost).expect("the graph is valid");
    let error = crate::passes::decompose::standardise(&mut lost).expect_err("refused").to_string();
    assert!(error.contains("MaxPoolGrad") && error.contains("no node of the graph computes"), "{error}");
    let (mut open, ids) = graph(&[&g]);
    let dx = add(&mut open, ("", "AveragePoolGrad"), "dx", &[Some(ids[0])], 1, attrs())[0];
    let dims = [Dim::Known(1), Dim::Known(1), Dim::symbol("L")];
    open.value_mut(dx).ty = ValueType::Tensor(DType::F64, Some(dims.into_iter().collect()));
    crate::passes::infer::infer(&mut open).expect("the graph is valid");
    let error = crate::passes::decompose::standardise(&mut open).expect_err("refused").to_string();
    assert!(error.contains("AveragePoolGrad") && error.contains("[1, 1, L]"), "{error}");
}

#[test]
fn rejects_invalid_nodes() {
    let x = test_image(&[1, 1, 1]);
    let ints = |name: &str, list: &[i64]| Attrs::new().with(name, list);
    for (op, attrs, needle) in [
        ("MaxPool", Attrs::new(), "kernel_shape is missing"),
        (
            "MaxPool",
            ints("kernel_shape", &[2]),
            "a window of 2 does not fit 1 elements with padding of 0 before",
        ),
        ("AveragePool", ints("kernel_shape", &[1, 1]), "kernel_shape [1, 1] for an input of shape [1, 1, 1]"),
        (
            "AveragePool",
            ints("kernel_shape", &[1]).with("strides", &[0i64][..]),
            "strides must be at least 1, got [0]",
        ),
        ("MaxPool", ints("kernel_shape", &[2]).with("dilations", &[i64::MAX][..]), "does not fit"),
        (
            "AveragePool",
            ints("kernel_shape", &[3]).with("dilations", &[i64::MAX][..]).with("auto_pad", "SAME_UPPER"),
            "too large to count",
        ),
        (
            "MaxPool",
            ints("kernel_shape", &[1]).with("storage_order", 2i64),
            "storage_order must be 0 or 1, got 2",
        ),
    ] {
        let error =
            one_node_graph(crate::NEWEST_OPSET, ("", op), &[Some(&x)], 1, attrs).expect_err("refused");
        let message = error.to_string();
        assert!(
            message.contains(needle) && message.contains(op) && message.contains("[1, 1, 1]"),
            "{message}"
        );
    }
}

/// The time does not depend on the size of the window.
#[test]
fn huge_windows_are_fast() {
    let x = f64s(&[1, 1, 2], &[1.0, 2.0]);
    let attrs = Attrs::new().with("kernel_shape", vec![1i64 << 40]).with("auto_pad", "SAME_UPPER");
    assert_eq!(pool("AveragePool", &x, attrs.clone()).to_f64(), [1.5, 1.5]);
    assert_eq!(pool("MaxPool", &x, attrs).to_f64(), [2.0, 2.0]);
}

#[test]
fn downgrade_names_required_opset() {
    let x = test_image(&[1, 2, 5, 5]);
    let kernel = || Attrs::new().with("kernel_shape", vec![2i64, 2]);
    for (op, attrs, outputs, oldest) in [
        ("MaxPool", kernel().with("ceil_mode", 1i64), 1, 10),
        ("MaxPool", kernel().with("dilations", vec![2i64, 1]), 1, 10),
        ("AveragePool", kernel().with("dilations", vec![1i64, 2]), 1, 19),
        ("AveragePool", kernel().with("ceil_mode", 1i64), 1, 10),
        ("MaxPool", kernel(), 2, 8),
    ] {
        let graph = one_node_graph(crate::NEWEST_OPSET, ("", op), &[Some(&x)], outputs, attrs)
            .expect("the graph is valid");
        check_downgrade(&graph, std::slice::from_ref(&x), oldest);
        let error = crate::passes::versions::downgrade(&mut graph.clone(), oldest - 1).expect_err("too old");
        assert!(error.to_string().contains(&format!("opset {oldest} or newer")), "{error}");
    }
    let plain = kernel().with("ceil_mode", 0i64).with("dilations", vec![1i64, 1]);
    for op in ["MaxPool", "AveragePool"] {
        let graph = one_node_graph(crate::NEWEST_OPSET, ("", op), &[Some(&x)], 1, plain.clone())
            .expect("the graph is valid");
        let old = check_downgrade(&graph, std::slice::from_ref(&x), 7);
        assert!(old.nodes[0].attrs.0.keys().eq(["kernel_shape"]), "{old}");
    }
}
