use ortrain_graph::ValueType;

use super::*;
use crate::NEWEST_OPSET;
use crate::testing::{
    Failure, add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
    graph, one_node_graph, run, run_node,
};

const EINSUM: (&str, &str) = ("", "Einsum");

/// Float64 sums of a few products, added in another order.
const TOLERANCE: f64 = 1e-12;

fn equation(text: &str) -> Attrs {
    Attrs::new().with("equation", text)
}

/// Computes a sum over all indices by the definition. Only axes of the ellipsis may broadcast.
fn expected(text: &str, inputs: &[Tensor]) -> Tensor {
    let equation = Equation::parse(text).expect("an equation");
    let ranks: Vec<usize> = inputs.iter().map(|tensor| tensor.dims().len()).collect();
    let (operands, result) = equation.labels(&ranks).expect("labels");
    let shapes: Vec<Shape> = inputs.iter().map(|tensor| Shape::known(tensor.dims())).collect();
    let mut sizes = infer_label_sizes(&operands, &shapes).expect("sizes");
    // The labels of the result come first, so that its elements are computed in order.
    sizes.sort_by_key(|(label, _)| result.iter().position(|other| other == label).unwrap_or(usize::MAX));
    let counts: Vec<usize> = sizes.iter().map(|(_, dim)| dim.known().expect("a number")).collect();
    let dims = &counts[..result.len()];
    let mut y = vec![0.0; dims.iter().product()];
    let inner: usize = counts[result.len()..].iter().product();
    let elements: Vec<Vec<f64>> = inputs.iter().map(Tensor::to_f64).collect();
    for k in 0..y.len() * inner {
        let mut rest = k;
        let mut index = vec![0; counts.len()];
        for axis in (0..counts.len()).rev() {
            index[axis] = rest % counts[axis];
            rest /= counts[axis];
        }
        let mut product = 1.0;
        for ((labels, tensor), values) in operands.iter().zip(inputs).zip(&elements) {
            let at = labels.iter().zip(tensor.dims()).fold(0, |at, (label, &size)| {
                let label_axis = sizes.iter().position(|(other, _)| other == label).expect("there");
                at * size + if size == 1 { 0 } else { index[label_axis] }
            });
            product *= values[at];
        }
        y[k / inner.max(1)] += product;
    }
    f64s(dims, &y)
}

/// Equations with shapes of their operands.
const CASES: &[(&str, &[&[usize]])] = &[
    ("ij->ji", &[&[2, 3]]),
    ("ij->i", &[&[2, 3]]),
    ("ij->", &[&[2, 3]]),
    ("ij", &[&[2, 3]]),
    ("ba", &[&[2, 3]]),
    ("aB", &[&[2, 3]]),
    ("ii", &[&[3, 3]]),
    ("ii->i", &[&[3, 3]]),
    ("iii->i", &[&[2, 2, 2]]),
    ("ijij->ji", &[&[2, 3, 2, 3]]),
    ("iji->j", &[&[2, 3, 2]]),
    ("...ii ->...i", &[&[2, 4, 3, 3]]),
    ("i...->...", &[&[2, 4, 3]]),
    ("...", &[&[2, 3]]),
    ("...->", &[&[2, 3]]),
    ("->", &[&[]]),
    ("i,i", &[&[4], &[4]]),
    ("i,i->i", &[&[4], &[4]]),
    ("i,j->ij", &[&[4], &[3]]),
    ("i,j->ji", &[&[4], &[3]]),
    ("i,j->", &[&[4], &[3]]),
    (",ij->ij", &[&[], &[2, 3]]),
    ("ij , ->ji", &[&[2, 3], &[]]),
    ("bij, bjk -> bik", &[&[2, 3, 4], &[2, 4, 2]]),
    ("bhqd,bhkd->bhqk", &[&[2, 3, 2, 4], &[2, 3, 5, 4]]),
    ("bhqk,bkhd->bqhd", &[&[2, 3, 2, 5], &[2, 5, 3, 4]]),
    ("bqhd,hde->bqe", &[&[2, 2, 3, 4], &[3, 4, 5]]),
    ("bqe,hde->bqhd", &[&[2, 2, 5], &[3, 4, 5]]),
    ("ij,ij->i", &[&[2, 3], &[2, 3]]),
    ("ij,ji->", &[&[2, 3], &[3, 2]]),
    ("ij,jk,kl->il", &[&[2, 3], &[3, 4], &[4, 2]]),
    ("ij,ik,il->jkl", &[&[2, 3], &[2, 4], &[2, 2]]),
    ("a,ab,abc->c", &[&[2], &[2, 3], &[2, 3, 4]]),
    ("...ij,...jk->...ik", &[&[2, 3, 4], &[2, 4, 2]]),
    ("...ij,...jk->...ik", &[&[3, 1, 2, 3], &[2, 3, 2]]),
    ("...ij,jk->...ik", &[&[5, 2, 3], &[3, 2]]),
    ("i...,i...->...", &[&[2, 3, 1], &[2, 1, 4]]),
    ("i...,i...", &[&[2, 3, 1], &[2, 1, 4]]),
    ("i...,i...->", &[&[2, 3, 1], &[2, 1, 4]]),
    ("i...j,j->i", &[&[2, 3, 4], &[4]]),
    ("ii,ij->j", &[&[3, 3], &[3, 2]]),
    ("ij,k->j", &[&[2, 3], &[4]]),
    ("ij,ij->ji", &[&[1, 3], &[2, 3]]),
    ("ij,jk->ik", &[&[2, 1], &[3, 4]]),
    ("ij,jk->ik", &[&[2, 3], &[1, 4]]),
];

fn operands(shapes: &[&[usize]]) -> Vec<Tensor> {
    shapes.iter().enumerate().map(|(k, dims)| generic_tensor(dims, 3 + k as u32)).collect()
}

fn einsum_graph(text: &str, inputs: &[Tensor]) -> Graph {
    let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
    one_node_graph(NEWEST_OPSET, EINSUM, &ports, 1, equation(text)).expect("it is read")
}

#[test]
fn all_equations_match_reference() {
    for (text, shapes) in CASES {
        let inputs = operands(shapes);
        let got = run(&einsum_graph(text, &inputs), &inputs).expect(text);
        assert_close(&got[0], &expected(text, &inputs), TOLERANCE);
    }
}

#[test]
fn gradients() {
    for (text, shapes) in CASES {
        let inputs = operands(shapes);
        let targets: Vec<usize> = (0..inputs.len()).collect();
        check_gradients(&einsum_graph(text, &inputs), &inputs, &targets, &[0]);
    }
}

/// Returns a graph of one node with symbolic sizes, except for 1. `name(operand, axis, label)` names the symbols.
fn symbolic_graph(text: &str, inputs: &[Tensor], name: impl Fn(usize, usize, Label) -> String) -> Graph {
    let (mut symbolic, ids) = graph(&inputs.iter().collect::<Vec<_>>());
    let ranks: Vec<usize> = inputs.iter().map(|tensor| tensor.dims().len()).collect();
    let (labels, _) = Equation::parse(text).expect("an equation").labels(&ranks).expect("labels");
    for (k, (&id, tensor)) in ids.iter().zip(inputs).enumerate() {
        let dim = |(axis, &size): (usize, &usize)| match size {
            1 => Dim::Known(1),
            _ => Dim::symbol(&name(k, axis, labels[k][axis])),
        };
        let shape: Shape = tensor.dims().iter().enumerate().map(dim).collect();
        symbolic.value_mut(id).ty = ValueType::Tensor(DType::F64, Some(shape));
    }
    let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
    add(&mut symbolic, EINSUM, "y", &ports, 1, equation(text));
    crate::passes::infer::infer(&mut symbolic).expect("valid");
    symbolic
}

/// All sizes are determined at run time, including sizes of the ellipsis and of flattened axes.
#[test]
fn symbolic_sizes() {
    for (text, shapes) in CASES {
        let inputs = operands(shapes);
        let separate = symbolic_graph(text, &inputs, |k, axis, _| format!("d{k}_{axis}"));
        let alike = symbolic_graph(text, &inputs, |_, _, label| format!("{label:?}"));
        for mut plain in [separate, alike.clone()] {
            crate::passes::node::decompose_node(&mut plain, 0).expect("it decomposes");
            crate::passes::infer::infer(&mut plain).expect(text);
            let got = run(&plain, &inputs).expect(text);
            assert_close(&got[0], &expected(text, &inputs), TOLERANCE);
        }
        let targets: Vec<usize> = (0..inputs.len()).collect();
        check_gradients(&alike, &inputs, &targets, &[0]);
    }
}

#[test]
fn decomposes_and_downgrades() {
    for (text, shapes) in CASES {
        let inputs = operands(shapes);
        let graph = einsum_graph(text, &inputs);
        check_decomposition(&graph, &inputs, TOLERANCE);
        let old = check_downgrade(&graph, &inputs, 11);
        assert!(old.nodes.iter().all(|node| &*node.op != "Einsum"), "{old}");
        assert_eq!(check_downgrade(&graph, &inputs, 12).nodes.len(), 1);
    }
}

/// Matrix products decompose into the minimum number of nodes.
#[test]
fn matrix_products_use_minimal_nodes() {
    for (text, shapes, ops) in [
        ("bij,bjk->bik", &[&[2, 3, 4][..], &[2, 4, 2]][..], &["MatMul"][..]),
        ("bhqd,bhkd->bhqk", &[&[2, 3, 2, 4], &[2, 3, 5, 4]], &["Transpose", "MatMul"]),
        ("ij,j->i", &[&[2, 3], &[3]], &["Reshape", "MatMul", "Reshape"]),
    ] {
        let inputs = operands(shapes);
        let mut graph = einsum_graph(text, &inputs);
        crate::passes::node::decompose_node(&mut graph, 0).expect("it decomposes");
        assert_eq!(graph.nodes.iter().map(|node| &*node.op).collect::<Vec<_>>(), ops);
    }
}

#[test]
fn empty_axes() {
    for (text, shapes) in [
        ("bij,bjk->bik", &[&[0, 3, 4][..], &[0, 4, 2]][..]),
        ("bij,bjk->bik", &[&[2, 3, 0], &[2, 0, 2]]),
        ("bqhd,hde->bqe", &[&[2, 0, 3, 4], &[3, 4, 5]]),
        ("bqhd,hde->bqe", &[&[0, 2, 3, 4], &[3, 4, 5]]),
        ("ii->i", &[&[0, 0]]),
    ] {
        let inputs = operands(shapes);
        let got = run(&einsum_graph(text, &inputs), &inputs).expect(text);
        assert_close(&got[0], &expected(text, &inputs), TOLERANCE);
    }
}

/// Infinities and NaN outside of the diagonal have no influence.
#[test]
fn diagonal_ignores_other_elements() {
    let x = f64s(&[2, 2], &[1.0, f64::NAN, f64::INFINITY, 2.0]);
    let got = run_node(EINSUM, &[Some(&x)], 1, equation("ii->i")).expect("it runs");
    assert_eq!(got[0].to_f64(), [1.0, 2.0]);
}

#[test]
fn integers_wrap() {
    let a = Tensor::from_slice(DType::I8, &[2, 2], &[100i8, 100, -3, 4]);
    let b = Tensor::from_slice(DType::I8, &[2], &[1i8, 1]);
    let got = run_node(EINSUM, &[Some(&a), Some(&b)], 1, equation("ij,j->i")).expect("it runs");
    assert_eq!(got[0].to_vec::<i8>(), [200u8 as i8, 1]);
    let a = Tensor::i64(&[2, 2], &[1, 2, 3, 4]);
    let got = run_node(EINSUM, &[Some(&a), Some(&a)], 1, equation("ij,jk")).expect("it runs");
    assert_eq!(got[0].to_vec::<i64>(), [7, 10, 15, 22]);
}

#[test]
fn rejects_invalid_equations() {
    let (square, wide, vector) =
        (generic_tensor(&[2, 2], 1), generic_tensor(&[2, 3], 2), generic_tensor(&[4], 3));
    for (text, inputs, words) in [
        ("ij-", &[&square][..], "equation \"ij-\" has '-' in a term; only letters and \"...\" are allowed"),
        ("i1", &[&square], "has '1' in a term"),
        ("......", &[&square], "has \"...\" twice in one term"),
        ("ij->ii", &[&square], "has 'i' twice in its result"),
        ("ij->k", &[&square], "has 'k' in its result but in no operand"),
        ("ij", &[&square, &square], "the equation has 1 terms for 2 inputs"),
        ("ijk", &[&square], "input 0 has 2 axes, but its term needs 3"),
        ("ijk...", &[&square], "input 0 has 2 axes, but its term needs 3 or more"),
        ("i", &[&square], "input 0 has 2 axes, but its term needs 1"),
        ("ij,j", &[&wide, &vector], "axes named \"j\" have sizes 3 and 4"),
        ("ii", &[&wide], "axes named \"i\" have sizes 2 and 3"),
        ("...,...", &[&wide, &vector], "axes named \"...\" have sizes 3 and 4"),
    ] {
        let ports: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        let error = one_node_graph(28, EINSUM, &ports, 1, equation(text)).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
        assert!(error.contains("node \"y\" (Einsum)"), "{error}");
    }
    let bools = Tensor::from_slice(DType::Bool, &[1], &[1u8]);
    for (input, attrs, words) in [
        (&square, Attrs::new(), "attribute \"equation\" is missing"),
        (&bools, equation("i"), "expected a number"),
    ] {
        let message = match run_node(EINSUM, &[Some(input)], 1, attrs) {
            Err(Failure::Prepare(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(message.contains(words), "{message}");
    }
    let one = f64s(&[1, 3], &[1.0, 2.0, 3.0]);
    let message =
        match run_node(EINSUM, &[Some(&one), Some(&generic_tensor(&[3, 3], 1))], 1, equation("ii,jk->i")) {
            Err(Failure::Prepare(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
    assert!(
        message.contains("axes named \"i\" have sizes 1 and 3; a diagonal needs equal sizes"),
        "{message}"
    );
}
