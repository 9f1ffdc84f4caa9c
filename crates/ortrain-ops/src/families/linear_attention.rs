//! Attention with a state of constant size in place of stored keys: `LinearAttention`.
//!
//! LinearAttention-27 of ONNX (<https://onnx.ai/onnx/operators/onnx__LinearAttention.html>). Each head has a state
//! matrix, which is carried from position to position. At each position
//!
//! - `gated` rules multiply the state by the exponential of the decay;
//! - `delta` rules subtract from the value the product of key and state, and multiply the difference by beta;
//! - the outer product of key and value is added to the state;
//! - the result is the query times the new state.
//!
//! Query heads may share a head of keys and values. `chunk_size` is a hint without effect. The state is computed in
//! float32, or in float64 for float64 inputs.
//!
//! The operator is a composition around a Scan. So every input has a gradient, the past state included.
//!
//! Limits: the ranks of the inputs must be known.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op, Placement};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::arithmetic_dtype;
use crate::support::sizes::{
    Size, add_op, as_number, cast, concat_sizes, divide_sizes, dtype_of, multiply_sizes, reshape_to,
    scalar_constant, size_of,
};

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const PAST: usize = 3;
const DECAY: usize = 4;
const BETA: usize = 5;

struct LinearAttention {
    query_heads: usize,
    kv_heads: usize,
    is_gated: bool,
    is_delta: bool,
    /// Factor of the results. `None` means `1 / sqrt(key size)`.
    scale: Option<f32>,
}

impl LinearAttention {
    fn read(node: &Node) -> Result<LinearAttention, OpError> {
        let attrs = &node.attrs;
        let heads = |name: &'static str| {
            let count = Attrs::required(name, attrs.int(name)?)?;
            usize::try_from(count)
                .ok()
                .filter(|&count| count > 0)
                .ok_or_else(|| OpError::invalid(format!("{name} must be positive, got {count}")))
        };
        let (query_heads, heads) = (heads("q_num_heads")?, heads("kv_num_heads")?);
        if query_heads % heads != 0 {
            return Err(OpError::invalid(format!(
                "the number of query heads, {query_heads}, must be a multiple of the number of key and value heads, \
                 {heads}"
            )));
        }
        let (gated, delta) = match attrs.string("update_rule")?.unwrap_or("gated_delta") {
            "linear" => (false, false),
            "gated" => (true, false),
            "delta" => (false, true),
            "gated_delta" => (true, true),
            other => {
                return Err(OpError::invalid(format!(
                    "update_rule must be \"linear\", \"gated\", \"delta\" or \"gated_delta\", got {other:?}"
                )));
            }
        };
        let scale = attrs.float("scale")?.filter(|&scale| scale != 0.0);
        Ok(LinearAttention { query_heads, kv_heads: heads, is_gated: gated, is_delta: delta, scale })
    }
}

impl Op for LinearAttention {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 6, 2)?;
        let dtype = cx.expect_dtype(QUERY, "a float type", DType::is_float)?;
        cx.expect_same_dtype([QUERY, KEY, VALUE, DECAY, BETA])?;
        for (k, needed, name) in [(DECAY, self.is_gated, "decay"), (BETA, self.is_delta, "beta")] {
            if cx.has_input(k) != needed {
                let what = if needed { "needs" } else { "does not use" };
                return Err(OpError::invalid(format!("update_rule {what} {name} (input {k})")));
            }
        }
        let state = match cx.has_input(PAST) {
            true => cx.expect_dtype(PAST, "a float type", DType::is_float)?,
            false => dtype,
        };
        let wrong = |k: usize, shape: &Shape, required: &str| {
            OpError::invalid(format!("input {k} has shape {shape}; {required} is needed"))
        };
        let [batch, length] = [0, 1].map(|axis| {
            let dims = [QUERY, KEY, VALUE].into_iter().filter_map(|k| cx.shape(k)?.get(axis).cloned());
            dims.max_by_key(|dim| dim.known().is_some())
        });
        let fits = |dim: &Dim, expected_size: Option<&Dim>| match (
            dim.known(),
            expected_size.and_then(Dim::known),
        ) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        // Checks an input of packed heads, and returns the size of one head.
        let packed = |k: usize, heads: usize| {
            let Some(shape) = cx.shape(k) else { return Ok(None) };
            if shape.rank() != 3 || !fits(&shape[0], batch.as_ref()) || !fits(&shape[1], length.as_ref()) {
                return Err(wrong(
                    k,
                    shape,
                    "[batch, length, heads * size] with equal batch and length for all inputs",
                ));
            }
            match shape[2].known() {
                Some(width) if width % heads != 0 => {
                    Err(wrong(k, shape, &format!("a last axis with {heads} heads of equal size")))
                }
                width => Ok(width.map(|width| width / heads)),
            }
        };
        let (of_query, of_key) = (packed(QUERY, self.query_heads)?, packed(KEY, self.kv_heads)?);
        let (of_value, of_decay) = (packed(VALUE, self.kv_heads)?, packed(DECAY, self.kv_heads)?);
        packed(BETA, 1)?;
        let size = of_query.or(of_key);
        if let (Some(a), Some(b)) = (of_query, of_key)
            && a != b
        {
            return Err(OpError::invalid(format!("the queries have head size {a}, but the keys {b}")));
        }
        if let (Some(decay_size), Some(size), Some(shape)) = (of_decay, size, cx.shape(DECAY))
            && decay_size != 1
            && decay_size != size
        {
            return Err(wrong(DECAY, shape, "one element for each head or for each element of a key"));
        }
        if let Some(shape) = cx.shape(BETA)
            && shape[2].known().is_some_and(|count| count != 1 && count != self.kv_heads)
        {
            return Err(wrong(BETA, shape, "one element in all or one for each head"));
        }
        let known =
            |size: Option<usize>, axis: usize| size.map_or_else(|| cx.unknown_dim(1, axis), Dim::Known);
        let state_shape: Shape = [
            batch.clone().unwrap_or_else(|| cx.unknown_dim(1, 0)),
            Dim::Known(self.kv_heads),
            known(size, 2),
            known(of_value, 3),
        ]
        .into_iter()
        .collect();
        if let Some(past) = cx.shape(PAST)
            && (past.rank() != 4
                || past
                    .iter()
                    .zip(state_shape.iter())
                    .any(|(dim, expected_dim)| !fits(dim, Some(expected_dim))))
        {
            return Err(wrong(PAST, past, &state_shape.to_string()));
        }
        let width = of_value.map_or_else(|| cx.unknown_dim(0, 2), |size| Dim::Known(size * self.query_heads));
        let shape = batch.zip(length).map(|(batch, length)| [batch, length, width].into_iter().collect());
        cx.set_output(0, dtype, shape);
        cx.set_output(1, state, Some(state_shape));
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement::Composition
    }
}

/// Builds the body of the Scan: it computes the next state and the result from the state and the elements of one
/// position.
///
/// All names begin with `prefix`, so that they are unique in the outer graph.
fn build_scan_body(op: &LinearAttention, prefix: &str) -> Graph {
    let mut body = Graph::new("position");
    let names = ["state", "query", "key", "key_down", "value"].into_iter();
    let names = names.chain(op.is_gated.then_some("decay")).chain(op.is_delta.then_some("beta"));
    let named = |name: &str| format!("{prefix}/{name}");
    let inputs: Vec<ValueId> = names.map(|name| body.add_value(&named(name), ValueType::Unknown)).collect();
    let add = |body: &mut Graph, op: &str, name: &str, inputs: [ValueId; 2]| {
        let output = body.add_value(&named(name), ValueType::Unknown);
        body.nodes.push(Node::new("", op, &inputs.map(Some), &[Some(output)], Attrs::new()));
        output
    };
    let [mut state, query, key, key_down, mut value] = [0, 1, 2, 3, 4].map(|k| inputs[k]);
    if op.is_gated {
        state = add(&mut body, "Mul", "faded", [state, inputs[5]]);
    }
    if op.is_delta {
        let known = add(&mut body, "MatMul", "known", [key, state]);
        let news = add(&mut body, "Sub", "news", [value, known]);
        value = add(&mut body, "Mul", "rated", [news, inputs[inputs.len() - 1]]);
    }
    let product = add(&mut body, "Mul", "product", [key_down, value]);
    let next = add(&mut body, "Add", "next", [state, product]);
    let result = add(&mut body, "MatMul", "result", [query, next]);
    body.inputs = inputs;
    body.outputs = vec![next, result];
    body
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = LinearAttention::read(rw.node())?;
    let (query, key, value) = (rw.required_input(QUERY)?, rw.required_input(KEY)?, rw.required_input(VALUE)?);
    let dtype = dtype_of(rw, query, "the queries")?;
    let ty = arithmetic_dtype(dtype);
    let (query_heads, heads) = (Size::Number(op.query_heads as i64), Size::Number(op.kv_heads as i64));
    let group = Size::Number((op.query_heads / op.kv_heads) as i64);
    let head_size = |rw: &mut Rewrite<'_>, value: ValueId, heads: Size| {
        let width = size_of(rw, value, 2);
        divide_sizes(rw, width, heads)
    };
    let (size, of_value) = (head_size(rw, query, query_heads), head_size(rw, value, heads));
    let one = Size::Number(1);
    let scan_input = |rw: &mut Rewrite<'_>, value: ValueId, last: [Size; 3]| {
        let value = reshape_to(rw, value, &[Size::SameAxis, Size::SameAxis, last[0], last[1], last[2]]);
        cast(rw, value, dtype, ty)
    };
    // `[batch, length, heads, rows, columns]`.
    let mut scanned = vec![
        scan_input(rw, query, [heads, group, size]),
        scan_input(rw, key, [heads, one, size]),
        scan_input(rw, key, [heads, size, one]),
        scan_input(rw, value, [heads, one, of_value]),
    ];
    if let Some(decay) = rw.input(DECAY) {
        let rows = head_size(rw, decay, heads);
        let decay = scan_input(rw, decay, [heads, rows, one]);
        scanned.push(add_op(rw, "Exp", &[decay]));
    }
    if let Some(beta) = rw.input(BETA) {
        let heads = size_of(rw, beta, 2);
        scanned.push(scan_input(rw, beta, [heads, one, one]));
    }
    let (state, state_dtype) = match rw.input(PAST) {
        Some(past) => {
            let state_dtype = dtype_of(rw, past, "the past state")?;
            (cast(rw, past, state_dtype, ty), state_dtype)
        }
        None => {
            let batch = size_of(rw, query, 0);
            let shape = concat_sizes(rw, &[batch, heads, size, of_value]);
            let zero = Attrs::new().with("value", Tensor::filled(ty, &[1], 0.0));
            (rw.add("ConstantOfShape", &[shape], zero), dtype)
        }
    };
    let count = scanned.len();
    let first = rw.node().present_outputs().next();
    let prefix = first.map_or_else(String::new, |id| rw.patch().0.name_of(id).to_owned());
    let attrs = Attrs::new()
        .with("num_scan_inputs", count as i64)
        .with("scan_input_axes", vec![1i64; count])
        .with("scan_output_axes", vec![1i64])
        .with("body", build_scan_body(&op, &prefix));
    let inputs: Vec<Option<ValueId>> = std::iter::once(state).chain(scanned).map(Some).collect();
    let outputs = rw.add_node("", "Scan", &inputs, 2, attrs);
    let scale = match (op.scale, size) {
        (Some(scale), _) => scalar_constant(rw, ty, f64::from(scale)),
        (None, Size::Number(size)) => scalar_constant(rw, ty, 1.0 / (size as f64).sqrt()),
        (None, size) => {
            let size = as_number(rw, size, ty);
            let (root, one) = (add_op(rw, "Sqrt", &[size]), scalar_constant(rw, ty, 1.0));
            add_op(rw, "Div", &[one, root])
        }
    };
    let result = add_op(rw, "Mul", &[outputs[1], scale]);
    let result = cast(rw, result, ty, dtype);
    let width = multiply_sizes(rw, query_heads, of_value);
    let result = reshape_to(rw, result, &[Size::SameAxis, Size::SameAxis, width]);
    rw.replace_output(0, result);
    if rw.has_output(1) {
        let present = cast(rw, outputs[0], ty, state_dtype);
        rw.replace_output(1, present);
    }
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(LinearAttention::read(node)?))
}

/// Decomposes the operator for opsets before 27.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 27 { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "LinearAttention", &[27], build)
            .composition(decompose)
            .downgrade(downgrade)
            .sample(|_| {
                let of = |dims: &[usize]| Some(ValueType::tensor(DType::F32, dims));
                let (rows, state, rates) = (of(&[1, 2, 2]), of(&[1, 1, 2, 2]), of(&[1, 2, 1]));
                let inputs = vec![rows.clone(), rows.clone(), rows, state, rates.clone(), rates];
                Sample { inputs, ..Sample::default() }
            }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, add, assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s,
        generic_tensor, graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("", "LinearAttention");
    const RULES: [&str; 4] = ["linear", "gated", "delta", "gated_delta"];
    const BATCH: usize = 2;
    const LENGTH: usize = 3;
    const QUERY_HEADS: usize = 4;
    const HEADS: usize = 2;
    const SIZE: usize = 3;
    const VALUE_SIZE: usize = 2;

    fn attrs(rule: &str) -> Attrs {
        Attrs::new()
            .with("q_num_heads", QUERY_HEADS as i64)
            .with("kv_num_heads", HEADS as i64)
            .with("update_rule", rule)
    }

    /// Returns the inputs of an update rule. With `per_element` each key element has a decay and each head a beta; otherwise
    /// each head has a decay, and beta is one number.
    fn inputs(rule: &str, past: bool, per_element: bool) -> [Option<Tensor>; 6] {
        let packed = |width: usize, seed: u32| generic_tensor(&[BATCH, LENGTH, width], seed);
        [
            Some(packed(QUERY_HEADS * SIZE, 1)),
            Some(packed(HEADS * SIZE, 2)),
            Some(packed(HEADS * VALUE_SIZE, 3)),
            past.then(|| generic_tensor(&[BATCH, HEADS, SIZE, VALUE_SIZE], 4)),
            rule.starts_with("gated").then(|| packed(if per_element { HEADS * SIZE } else { HEADS }, 5)),
            rule.ends_with("delta").then(|| packed(if per_element { HEADS } else { 1 }, 6)),
        ]
    }

    /// Computes the results by the definition, position by position.
    fn expected(args: &[Option<Tensor>; 6], scale: f64) -> [Tensor; 2] {
        let elements = |k: usize| args[k].as_ref().map(Tensor::to_f64);
        let [query, key, value] = [0, 1, 2].map(|k| elements(k).expect("there"));
        let (decay, beta) = (elements(DECAY), elements(BETA));
        let states = BATCH * HEADS * SIZE * VALUE_SIZE;
        let mut state = elements(PAST).unwrap_or_else(|| vec![0.0; states]);
        let mut result = vec![0.0; BATCH * LENGTH * QUERY_HEADS * VALUE_SIZE];
        for b in 0..BATCH {
            for t in 0..LENGTH {
                let row = b * LENGTH + t;
                for h in 0..HEADS {
                    let at = |i: usize, j: usize| ((b * HEADS + h) * SIZE + i) * VALUE_SIZE + j;
                    let key = &key[(row * HEADS + h) * SIZE..][..SIZE];
                    let mut value = value[(row * HEADS + h) * VALUE_SIZE..][..VALUE_SIZE].to_vec();
                    if let Some(decay) = &decay {
                        let each = decay.len() / (BATCH * LENGTH * HEADS);
                        for i in 0..SIZE {
                            let rate = decay[(row * HEADS + h) * each + i % each];
                            for j in 0..VALUE_SIZE {
                                state[at(i, j)] *= rate.exp();
                            }
                        }
                    }
                    if let Some(beta) = &beta {
                        let count = beta.len() / (BATCH * LENGTH);
                        for j in 0..VALUE_SIZE {
                            let known: f64 = (0..SIZE).map(|i| key[i] * state[at(i, j)]).sum();
                            value[j] = (value[j] - known) * beta[row * count + h % count];
                        }
                    }
                    for i in 0..SIZE {
                        for j in 0..VALUE_SIZE {
                            state[at(i, j)] += key[i] * value[j];
                        }
                    }
                    for g in 0..QUERY_HEADS / HEADS {
                        let head = h * (QUERY_HEADS / HEADS) + g;
                        let query = &query[(row * QUERY_HEADS + head) * SIZE..][..SIZE];
                        for j in 0..VALUE_SIZE {
                            let sum: f64 = (0..SIZE).map(|i| query[i] * state[at(i, j)]).sum();
                            result[(row * QUERY_HEADS + head) * VALUE_SIZE + j] = scale * sum;
                        }
                    }
                }
            }
        }
        let shape = [BATCH, LENGTH, QUERY_HEADS * VALUE_SIZE];
        [f64s(&shape, &result), f64s(&[BATCH, HEADS, SIZE, VALUE_SIZE], &state)]
    }

    #[test]
    fn update_rules_and_gradients() {
        for rule in RULES {
            for (past, per_element) in [(false, false), (true, true)] {
                let args = inputs(rule, past, per_element);
                let ports: Vec<Option<&Tensor>> = args.iter().map(Option::as_ref).collect();
                let (attrs, scale) = match per_element {
                    true => (attrs(rule).with("scale", 0.5f32), 0.5),
                    false => (attrs(rule), 1.0 / (SIZE as f64).sqrt()),
                };
                let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 2, attrs).expect("valid");
                let inputs: Vec<Tensor> = args.iter().flatten().cloned().collect();
                for (got, expected_output) in
                    run(&graph, &inputs).expect("it runs").iter().zip(&expected(&args, scale))
                {
                    assert_close(got, expected_output, 1e-13);
                }
                let all: Vec<usize> = (0..inputs.len()).collect();
                check_gradients(&graph, &inputs, &all, &[0, 1]);
                check_decomposition(&graph, &inputs, 0.0);
                assert_eq!(check_downgrade(&graph, &inputs, 27).nodes.len(), 1);
                check_downgrade(&graph, &inputs, 11);
            }
        }
    }

    #[test]
    fn symbolic_sizes() {
        let args = inputs("gated_delta", true, false);
        let inputs: Vec<Tensor> = args.iter().flatten().cloned().collect();
        let (mut symbolic, ids) = graph(&inputs.iter().collect::<Vec<_>>());
        for (k, &id) in ids.iter().enumerate() {
            let names: &[&str] = match k {
                PAST => &["n", "h", "k", "v"],
                0 => &["n", "t", "q"],
                DECAY => &["n", "t", "d"],
                BETA => &["n", "t", "b"],
                _ => &["n", "t", if k == KEY { "w" } else { "x" }],
            };
            let shape = names.iter().map(|name| Dim::symbol(name)).collect();
            symbolic.value_mut(id).ty = ValueType::Tensor(DType::F64, Some(shape));
        }
        let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
        add(&mut symbolic, OP, "y", &ports, 2, attrs("gated_delta"));
        crate::passes::infer::infer(&mut symbolic).expect("valid");
        let expected_outputs = expected(&args, 1.0 / (SIZE as f64).sqrt());
        for (got, expected_output) in run(&symbolic, &inputs).expect("it runs").iter().zip(&expected_outputs)
        {
            assert_close(got, expected_output, 1e-13);
        }
        check_gradients(&symbolic, &inputs, &[0, 1, 2, 3, 4, 5], &[0]);
    }

    #[test]
    fn state_of_other_dtype() {
        let args = inputs("gated_delta", true, true);
        let mut narrow = args.clone().map(|tensor| tensor.map(|tensor| cast_tensor(&tensor, DType::F16)));
        narrow[PAST] = args[PAST].as_ref().map(|past| cast_tensor(past, DType::F32));
        let ports: Vec<Option<&Tensor>> = narrow.iter().map(Option::as_ref).collect();
        let got = run_node(OP, &ports, 2, attrs("gated_delta")).expect("it runs");
        assert_eq!([got[0].dtype(), got[1].dtype()], [DType::F16, DType::F32]);
        let wide = narrow.clone().map(|tensor| tensor.map(|tensor| cast_tensor(&tensor, DType::F64)));
        let expected_outputs = expected(&wide, 1.0 / (SIZE as f64).sqrt());
        assert_close(&got[1], &cast_tensor(&expected_outputs[1], DType::F32), 1e-5);
        assert_close(&got[0], &cast_tensor(&expected_outputs[0], DType::F16), 2e-3);
    }

    #[test]
    fn rejects_invalid_nodes() {
        let with = |name: &str, value: i64| attrs("linear").with(name, value);
        let shaped = |k: usize, dims: &[usize]| {
            let mut args = inputs("gated_delta", true, true);
            args[k] = Some(generic_tensor(dims, 1));
            args
        };
        for (arguments, attrs, message) in [
            (
                inputs("linear", false, false),
                with("q_num_heads", 3),
                "the number of query heads, 3, must be a multiple of the number of key and value heads, 2",
            ),
            (inputs("linear", false, false), with("kv_num_heads", 0), "kv_num_heads must be positive, got 0"),
            (inputs("linear", false, false), attrs("square"), "or \"gated_delta\", got \"square\""),
            (inputs("linear", false, false), attrs("gated"), "update_rule needs decay (input 4)"),
            (inputs("delta", false, false), attrs("linear"), "update_rule does not use beta (input 5)"),
            (shaped(KEY, &[2, 3, 8]), attrs("gated_delta"), "the queries have head size 3, but the keys 4"),
            (
                shaped(KEY, &[2, 4, 6]),
                attrs("gated_delta"),
                "[batch, length, heads * size] with equal batch and length for all inputs",
            ),
            (shaped(VALUE, &[2, 3, 5]), attrs("gated_delta"), "a last axis with 2 heads of equal size"),
            (shaped(PAST, &[2, 2, 3, 3]), attrs("gated_delta"), "[2, 2, 3, 2] is needed"),
            (
                shaped(DECAY, &[2, 3, 4]),
                attrs("gated_delta"),
                "one element for each head or for each element of a key",
            ),
            (shaped(BETA, &[2, 3, 3]), attrs("gated_delta"), "one element in all or one for each head"),
        ] {
            let ports: Vec<Option<&Tensor>> = arguments.iter().map(Option::as_ref).collect();
            let failure = run_node(OP, &ports, 2, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
