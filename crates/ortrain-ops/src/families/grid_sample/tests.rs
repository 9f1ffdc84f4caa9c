//! Tests of GridSample against a reference implementation.

use ortrain_graph::ValueType;

use super::*;
use crate::registry::NEWEST_OPSET;
use crate::testing::{
    Failure, add, assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s,
    generic_tensor, gradient_graph, graph, one_node_graph, run, run_node,
};

const OP: (&str, &str) = ("", "GridSample");
const MODES: [&str; 3] = ["nearest", "linear", "cubic"];
const PADDINGS: [&str; 3] = ["zeros", "border", "reflection"];

fn attrs(mode: &str, padding: &str, aligned: bool) -> Attrs {
    Attrs::new().with("mode", mode).with("padding_mode", padding).with("align_corners", i64::from(aligned))
}

/// Returns every combination of mode, padding mode and `align_corners`.
fn attribute_combinations() -> Vec<(&'static str, &'static str, bool)> {
    let mut result = Vec::new();
    for mode in MODES {
        for padding in PADDINGS {
            result.extend([(mode, padding, false), (mode, padding, true)]);
        }
    }
    result
}

/// Reference implementation for one axis, as the specification defines it.
struct ReferenceAxis {
    size: f64,
    align_corners: bool,
    padding: &'static str,
}

impl ReferenceAxis {
    fn borders(&self) -> (f64, f64) {
        if self.align_corners { (0.0, self.size - 1.0) } else { (-0.5, self.size - 0.5) }
    }

    fn reflect(&self, mut x: f64) -> f64 {
        let (min, max) = self.borders();
        while x < min || x > max {
            x = if x < min { 2.0 * min - x } else { 2.0 * max - x };
        }
        x
    }

    /// Returns the element at index `at` after padding; `None` for zeros outside.
    fn element(&self, at: f64) -> Option<usize> {
        match self.padding {
            "zeros" => (0.0..self.size).contains(&at).then_some(at as usize),
            "border" => Some(at.clamp(0.0, self.size - 1.0) as usize),
            _ => Some(self.reflect(at) as usize),
        }
    }

    /// Returns the elements that contribute to the value at a coordinate, and their weights.
    fn taps(&self, mode: &str, coordinate: f64) -> Vec<(Option<usize>, f64)> {
        let mut x = if self.align_corners {
            (coordinate + 1.0) / 2.0 * (self.size - 1.0)
        } else {
            ((coordinate + 1.0) * self.size - 1.0) / 2.0
        };
        if mode == "nearest" {
            x = x.round_ties_even();
        }
        let (min, max) = self.borders();
        if x < min || x > max {
            x = match self.padding {
                // `element` clips the index of each tap.
                "border" if mode == "cubic" => x,
                "border" => x.clamp(0.0, self.size - 1.0),
                "reflection" => self.reflect(x),
                _ => x,
            };
        }
        let kernel = |d: f64| match mode {
            "linear" => 1.0 - d,
            _ if d <= 1.0 => (1.25 * d - 2.25) * d * d + 1.0,
            _ => ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0,
        };
        let base = x.floor();
        let offsets: &[f64] = match mode {
            "nearest" => return vec![(self.element(x), 1.0)],
            "linear" => &[0.0, 1.0],
            _ => &[-1.0, 0.0, 1.0, 2.0],
        };
        offsets.iter().map(|k| (self.element(base + k), kernel((x - base - k).abs()))).collect()
    }
}

fn expected(x: &Tensor, grid: &Tensor, (mode, padding, aligned): (&str, &'static str, bool)) -> Tensor {
    let (dims, grid_dims) = (x.dims(), grid.dims());
    let axes = dims.len() - 2;
    let points: usize = grid_dims[1..=axes].iter().product();
    let elements: usize = dims[2..].iter().product();
    let (values, positions) = (x.to_f64(), grid.to_f64());
    let mut result = Vec::new();
    for row in 0..dims[0] * dims[1] {
        let values = &values[row * elements..][..elements];
        for point in 0..points {
            let position = &positions[(row / dims[1] * points + point) * axes..][..axes];
            let mut taps = vec![(Some(0), 1.0)];
            for axis in 0..axes {
                let size = dims[2 + axis];
                let line = ReferenceAxis { size: size as f64, align_corners: aligned, padding };
                let axis_taps = line.taps(mode, position[axes - 1 - axis]);
                let both = |&(at, weight): &(Option<usize>, f64)| {
                    axis_taps
                        .iter()
                        .map(|&(k, w)| (at.zip(k).map(|(at, k)| at * size + k), weight * w))
                        .collect::<Vec<_>>()
                };
                taps = taps.iter().flat_map(both).collect();
            }
            result.push(taps.iter().map(|&(at, weight)| at.map_or(0.0, |at| values[at]) * weight).sum());
        }
    }
    let mut shape = dims[..2].to_vec();
    shape.extend(&grid_dims[1..=axes]);
    f64s(&shape, &result)
}

/// Returns images, volumes and lines, each with a grid of points inside and outside.
fn inputs() -> Vec<[Tensor; 2]> {
    vec![
        [generic_tensor(&[2, 2, 3, 4], 1), generic_tensor(&[2, 2, 2, 2], 2)],
        [generic_tensor(&[1, 1, 3, 2, 2], 3), generic_tensor(&[1, 2, 1, 1, 3], 4)],
        [generic_tensor(&[2, 1, 5], 5), generic_tensor(&[2, 3, 1], 6)],
    ]
}

#[test]
fn every_mode_and_its_gradients() {
    for inputs in inputs() {
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let planes = inputs[0].dims().len() == 4;
        for case @ (mode, padding, aligned) in attribute_combinations() {
            let graph =
                one_node_graph(NEWEST_OPSET, OP, &ports, 1, attrs(mode, padding, aligned)).expect("valid");
            let got = run(&graph, &inputs).expect("it runs").remove(0);
            assert_close(&got, &expected(&inputs[0], &inputs[1], case), 1e-12);
            // With `nearest` the gradient of the grid is zero.
            let through: &[usize] = if mode == "nearest" { &[0] } else { &[0, 1] };
            check_gradients(&graph, &inputs, through, &[0]);
            check_decomposition(&graph, &inputs, 0.0);
            assert_eq!(check_downgrade(&graph, &inputs, 20).nodes.len(), 1);
            assert_eq!(check_downgrade(&graph, &inputs, 16).nodes.len() == 1, planes);
            check_downgrade(&graph, &inputs, 13);
        }
    }
}

#[test]
fn symbolic_sizes() {
    let inputs = &inputs()[0];
    for case @ (mode, padding, aligned) in attribute_combinations() {
        let (mut symbolic, ids) = graph(&[&inputs[0], &inputs[1]]);
        for (k, names) in [["n", "c", "h", "w"], ["n", "e", "f", ""]].into_iter().enumerate() {
            let dim = |name: &str| if name.is_empty() { Dim::Known(2) } else { Dim::symbol(name) };
            let shape = names.into_iter().map(dim).collect();
            symbolic.value_mut(ids[k]).ty = ValueType::Tensor(DType::F64, Some(shape));
        }
        let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        add(&mut symbolic, OP, "y", &ports, 1, attrs(mode, padding, aligned));
        crate::passes::infer::infer(&mut symbolic).expect("valid");
        let got = run(&symbolic, inputs).expect("it runs").remove(0);
        assert_close(&got, &expected(&inputs[0], &inputs[1], case), 1e-12);
        // `every_mode_and_its_gradients` checks the gradients of the other modes.
        if mode == "linear" {
            check_gradients(&symbolic, inputs, &[0, 1], &[0]);
        }
    }
}

/// Checks the gradient of the grid where `border` clips, where `reflection` reflects, and where `zeros` begin.
#[test]
fn gradients_at_the_border() {
    let x = f64s(&[1, 1, 1, 3], &[1.0, 3.0, 7.0]);
    let slope = |coordinate: f64, padding: &str, aligned: bool| {
        let grid = f64s(&[1, 1, 1, 2], &[coordinate, 0.0]);
        let ports = [Some(&x), Some(&grid)];
        let graph =
            one_node_graph(NEWEST_OPSET, OP, &ports, 1, attrs("linear", padding, aligned)).expect("valid");
        let seed = Some(f64s(&[1, 1, 1, 1], &[1.0]));
        let gradient = gradient_graph(&graph, &[seed], &[1]);
        run(&gradient, &[x.clone(), grid.clone()]).expect("it runs")[0].to_f64()[0]
    };
    // Outside, and on the edge.
    for coordinate in [-1.5, -1.0, 1.0, 2.0] {
        assert_eq!(slope(coordinate, "border", true), 0.0);
    }
    assert_eq!(slope(0.5, "border", true), 4.0);
    // Reflection negates the gradient beyond the border.
    assert_eq!((slope(0.5, "reflection", true), slope(1.5, "reflection", true)), (4.0, -4.0));
    // Beyond the centre of the last element the value fades to zero.
    let coordinate = 1.0 - 0.1;
    assert_close(&f64s(&[], &[slope(coordinate, "zeros", false)]), &f64s(&[], &[-7.0 * 1.5]), 1e-12);
}

#[test]
fn nonfinite_coordinates() {
    let x = generic_tensor(&[1, 2, 3, 3], 1);
    let grid = f64s(&[1, 1, 3, 2], &[f64::NAN, 0.0, f64::INFINITY, 0.0, 1e300, -1e300]);
    for (mode, padding, aligned) in attribute_combinations() {
        let got = run_node(OP, &[Some(&x), Some(&grid)], 1, attrs(mode, padding, aligned)).expect("it runs");
        assert_eq!(got[0].dims(), [1, 2, 1, 3]);
        if mode == "linear" {
            assert!(got[0].to_f64()[0].is_nan());
        }
    }
    // With one element and `align_corners` the axis has length 0.
    let x = f64s(&[1, 1, 1, 1], &[3.0]);
    let grid = f64s(&[1, 1, 1, 2], &[5.0, -7.0]);
    let got =
        run_node(OP, &[Some(&x), Some(&grid)], 1, attrs("linear", "reflection", true)).expect("it runs");
    assert_eq!(got[0].to_f64(), [3.0]);
}

#[test]
fn other_dtypes() {
    let [x, grid] = &inputs()[0];
    for (case @ (mode, padding, aligned), tolerance) in
        [(("linear", "border", false), 0.05), (("nearest", "zeros", true), 0.0)]
    {
        for (dtype, grid_dtype) in [
            (DType::F32, DType::F64),
            (DType::F16, DType::F16),
            (DType::BF16, DType::F32),
            (DType::I32, DType::F32),
        ] {
            let scaled: Vec<f64> = x.to_f64().iter().map(|x| (x * 20.0).round()).collect();
            let (x, grid) = (cast_tensor(&f64s(x.dims(), &scaled), dtype), cast_tensor(grid, grid_dtype));
            let expected_output =
                expected(&cast_tensor(&x, DType::F64), &cast_tensor(&grid, DType::F64), case);
            let got =
                run_node(OP, &[Some(&x), Some(&grid)], 1, attrs(mode, padding, aligned)).expect("it runs");
            let expected_output = cast_tensor(&expected_output, dtype);
            let tolerance = if dtype == DType::I32 { 0.0 } else { tolerance };
            assert_close(&got[0], &expected_output, tolerance);
        }
    }
    let flags = Tensor::from_slice(DType::Bool, &[1, 1, 1, 2], &[0u8, 1]);
    let grid = f64s(&[1, 1, 2, 2], &[-0.5, 0.0, 0.5, 0.0]);
    let got =
        run_node(OP, &[Some(&flags), Some(&grid)], 1, attrs("nearest", "zeros", false)).expect("it runs");
    assert_eq!(got[0].to_f64(), [0.0, 1.0]);
}

#[test]
fn mode_names_before_opset_20() {
    let inputs = &inputs()[0];
    let ports = [Some(&inputs[0]), Some(&inputs[1])];
    for (old, new) in [("bilinear", "linear"), ("bicubic", "cubic"), ("nearest", "nearest")] {
        let graph = one_node_graph(16, OP, &ports, 1, attrs(old, "zeros", false)).expect("it is read");
        let got = run(&graph, inputs).expect("it runs").remove(0);
        assert_close(&got, &expected(&inputs[0], &inputs[1], (new, "zeros", false)), 1e-12);
    }
    let error =
        one_node_graph(16, OP, &ports, 1, attrs("linear", "zeros", false)).expect_err("refused").to_string();
    assert!(error.contains("or \"bicubic\" before opset 20, got \"linear\""), "{error}");
    let error = one_node_graph(20, OP, &ports, 1, attrs("bilinear", "zeros", false))
        .expect_err("refused")
        .to_string();
    assert!(error.contains("mode must be \"nearest\", \"linear\" or \"cubic\", got \"bilinear\""), "{error}");
}

#[test]
fn rejects_mismatched_shapes() {
    for (x, grid, message) in [
        (vec![1, 1, 3, 3], vec![1, 2, 2, 3], "[N, C, D1, ..., Dr] and [N, E1, ..., Er, r] are needed"),
        (vec![1, 1], vec![1, 2], "are needed"),
        (vec![2, 1, 3, 3], vec![1, 2, 2, 2], "input 0 has batch size 2, but input 1 has batch size 1"),
        (vec![1, 1, 0, 3], vec![1, 2, 2, 2], "has no elements to sample"),
    ] {
        let failure =
            run_node(OP, &[Some(&generic_tensor(&x, 1)), Some(&generic_tensor(&grid, 1))], 1, Attrs::new());
        let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
        assert!(error.to_string().contains(message), "{error}");
    }
}
