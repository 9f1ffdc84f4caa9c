//! Clamping to bounds: `Clip`.
//!
//! Clip-6, 11, 12, 13 of ONNX. The result is `min(max(x, low), high)`. If the low bound is above the high one, the
//! result is the high bound everywhere. NaN stays NaN.
//!
//! Before opset 11 the bounds are attributes, in the type of the input. From opset 11 on they are optional scalar
//! inputs. The type of a value is unknown when a model is read. Bounds that are attributes therefore remain attributes
//! until a model is written for a newer opset.
//!
//! Gradients: the input gets the gradient where it is within the bounds, ends included. Each bound gets the gradient of
//! the elements that it replaces. If the low bound is above the high one, the high bound gets the whole gradient.

use ortrain_expr::{BinaryOp, Builder, CompareOp, Inst, Reg, Scalar, Type};
use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::class::Traits;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

const LOW: usize = 1;
const HIGH: usize = 2;

/// Numbers clamped to bounds.
struct Clip {
    /// Bounds that are attributes, by the index of the equivalent input.
    attributes: [Option<f32>; 3],
}

/// Bounds of an expression, if present.
#[derive(Clone, Copy, Default)]
struct Bounds {
    low: Option<Reg>,
    high: Option<Reg>,
}

impl Bounds {
    fn clip(self, b: &mut Builder, x: Reg) -> Reg {
        let raised = self.low.map_or(x, |low| b.binary(BinaryOp::Max, x, low));
        self.high.map_or(raised, |high| b.binary(BinaryOp::Min, raised, high))
    }

    /// Returns the gradient of input `k`: `x` (0), the low bound or the high bound. `g` is the gradient of the result.
    fn gradient(self, b: &mut Builder, k: usize, x: Reg, g: Reg) -> Reg {
        let zero = b.constant(b.ty(x), 0.0);
        let conditions = match k {
            LOW => {
                let below = self.low.map(|low| b.compare(CompareOp::Lt, x, low));
                let ordered = self.low.zip(self.high).map(|(low, high)| b.compare(CompareOp::Le, low, high));
                [below, ordered]
            }
            HIGH => {
                let above = self.high.map(|high| b.compare(CompareOp::Lt, high, x));
                // If the low bound is above the high one, the high bound replaces every element.
                let swapped = self.low.zip(self.high).map(|(low, high)| b.compare(CompareOp::Lt, high, low));
                let clipped = match (above, swapped) {
                    (Some(above), Some(swapped)) => Some(b.binary(BinaryOp::Or, above, swapped)),
                    (above, _) => above,
                };
                [clipped, None]
            }
            _ => {
                let from = self.low.map(|low| b.compare(CompareOp::Le, low, x));
                let to = self.high.map(|high| b.compare(CompareOp::Le, x, high));
                [from, to]
            }
        };
        select_where_all(b, conditions, g, zero)
    }
}

/// Returns `g` where all conditions hold, and `zero` elsewhere.
fn select_where_all(b: &mut Builder, conditions: [Option<Reg>; 2], g: Reg, zero: Reg) -> Reg {
    match conditions {
        [Some(first), Some(other)] => {
            let both = b.binary(BinaryOp::And, first, other);
            b.select(both, g, zero)
        }
        [Some(first), None] | [None, Some(first)] => b.select(first, g, zero),
        [None, None] => g,
    }
}

impl Op for Clip {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 3, 1)?;
        cx.expect_dtype(0, "a number type", DType::is_number)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        for k in [LOW, HIGH] {
            let Some(shape) = cx.shape(k) else { continue };
            if shape.rank() > 1 || shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1)) {
                return Err(OpError::invalid(format!("input {k} has shape {shape}; one number is needed")));
            }
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, y) = (cx.input(0)?, cx.output(0, "y"));
        let dtype = cx.dtype(x)?;
        let mut bounds = [None; 3];
        for k in [LOW, HIGH] {
            bounds[k] = match (cx.optional_input(k), self.attributes[k]) {
                (Some(bound), _) => Some(bound),
                (None, Some(value)) => Some(cx.constant("bound", Tensor::scalar(dtype, f64::from(value)))),
                (None, None) => None,
            };
        }
        for k in 0..3 {
            if !cx.needs_grad(k) {
                continue;
            }
            let mut b = Builder::new();
            let ty = Type::of(dtype);
            let mut loads: Vec<ValueId> = vec![x, g];
            let (value, arriving) = (b.load(0, ty), b.load(1, ty));
            let mut load = |bound: Option<ValueId>| {
                bound.map(|bound| {
                    loads.push(bound);
                    b.load(loads.len() - 1, ty)
                })
            };
            let regs = Bounds { low: load(bounds[LOW]), high: load(bounds[HIGH]) };
            let gradient = regs.gradient(&mut b, k, value, arriving);
            if gradient == arriving {
                cx.set_grad(k, g);
                continue;
            }
            let gradient = cx.emit_as_onnx(&b.finish(&[gradient]), &loads, dtype)?;
            let gradient = cx.sum_to(gradient, cx.input(k)?, y)?;
            cx.set_grad(k, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, dtype) = (cx.dims(0), cx.dtype(0));
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&dims, 0);
        let x = nest.load_broadcast(input, dtype, &dims);
        let ty = nest.b.ty(x);
        let mut bound = |cx: &mut Lower<'_>, k: usize| {
            let known: Option<Scalar> = match (cx.constant(k), self.attributes[k]) {
                (Some(tensor), _) => Scalar::read_all(dtype, tensor.data()).pop(),
                (None, Some(value)) if !cx.has_input(k) => Some(Scalar::from_f64(ty, f64::from(value))),
                _ => None,
            };
            if let Some(known) = known {
                return Some(nest.b.push(Inst::Const(known.convert(ty)), ty));
            }
            cx.has_input(k).then(|| {
                let buffer = cx.input(k);
                nest.load_strided(cx, buffer, 0, &vec![0; dims.len()])
            })
        };
        let bounds = Bounds { low: bound(cx, LOW), high: bound(cx, HIGH) };
        let y = bounds.clip(&mut nest.b, x);
        nest.store_contiguous(cx, output, y);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Clip { attributes: [None, node.attrs.float("min")?, node.attrs.float("max")?] }))
}

/// Upgrades a node from before opset 11: a missing bound is the end of the range of float32.
fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 11 {
        return Ok(());
    }
    let x = rw.required_input(0)?;
    let bound = |name: &str, default: f32| Ok::<_, OpError>(rw.attrs().float(name)?.unwrap_or(default));
    let attrs = Attrs::new().with("min", bound("min", f32::MIN)?).with("max", bound("max", f32::MAX)?);
    rw.emit_same_op(&[Some(x)], attrs);
    Ok(())
}

fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let mut attrs = Attrs::new();
    let mut inputs = vec![Some(x)];
    for (k, name) in [(LOW, "min"), (HIGH, "max")] {
        let attribute = rw.attrs().float(name)?;
        if rw.version() >= 11 {
            inputs.push(match (rw.input(k), attribute) {
                (Some(bound), _) => Some(bound),
                (None, Some(value)) => {
                    let dtype = rw.dtype(x);
                    let dtype = dtype.ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
                    Some(rw.constant(name, Tensor::scalar(dtype, f64::from(value))))
                }
                (None, None) => None,
            });
            continue;
        }
        let value = match rw.input(k) {
            None => attribute,
            Some(bound) => {
                let bound_value = rw.constant_of(bound).and_then(|tensor| tensor.to_f64().first().copied());
                let message = format!("{name} is computed at run time, which needs opset 11 or newer");
                Some(bound_value.ok_or_else(|| OpError::unsupported(message))? as f32)
            }
        };
        if let Some(value) = value {
            attrs = attrs.with(name, value);
        }
    }
    while inputs.last() == Some(&None) {
        inputs.pop();
    }
    let integers = rw.dtype(x).is_some_and(|dtype| !dtype.is_float());
    if integers && rw.version() < 12 {
        return Err(OpError::unsupported("bounds of integers need opset 12 or newer"));
    }
    if inputs.as_slice() != rw.node().inputs.as_slice() || attrs != *rw.attrs() {
        rw.emit_same_op(&inputs, attrs);
    }
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Clip", &[6, 11, 12, 13], build)
            .traits(Traits::PREPARES.and(Traits::KEEPS_SCORES).and(Traits::FOLLOWS_HEAD))
            .inputs_without_gradient(&[1, 2])
            .upgrade(upgrade)
            .downgrade(downgrade),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    const CLIP: (&str, &str) = ("", "Clip");
    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;

    fn graph_of(inputs: &[Option<&Tensor>]) -> Graph {
        one_node_graph(NEWEST_OPSET, CLIP, inputs, 1, Attrs::new()).expect("valid")
    }

    /// Returns the graph with constant bounds, as in most models.
    fn with_constant_bounds(graph: &Graph, bounds: &[&Tensor]) -> Graph {
        let mut graph = graph.clone();
        for (id, &bound) in graph.inputs.split_off(1).into_iter().zip(bounds) {
            graph.value_mut(id).constant = Some(bound.clone());
        }
        graph
    }

    #[test]
    fn optional_bounds() {
        let x = f64s(&[5], &[-2.0, -0.5, 0.0, 3.0, NAN]);
        let (low, high) = (f64s(&[], &[-1.0]), f64s(&[1], &[2.0]));
        for (bounds, expected) in [
            ([None, None], [-2.0, -0.5, 0.0, 3.0]),
            ([Some(&low), None], [-1.0, -0.5, 0.0, 3.0]),
            ([None, Some(&high)], [-2.0, -0.5, 0.0, 2.0]),
            ([Some(&low), Some(&high)], [-1.0, -0.5, 0.0, 2.0]),
            // The low bound is above the high one.
            ([Some(&high), Some(&low)], [-1.0; 4]),
        ] {
            let inputs = [Some(&x), bounds[0], bounds[1]];
            let graph = graph_of(&inputs);
            let args: Vec<Tensor> = inputs.iter().copied().flatten().cloned().collect();
            let got = run(&graph, &args).expect("it runs").remove(0).to_f64();
            assert_eq!(got[..4], expected, "{bounds:?}");
            assert!(got[4].is_nan());
            let present: Vec<&Tensor> = bounds.iter().copied().flatten().collect();
            let fixed = with_constant_bounds(&graph, &present);
            let got = run(&fixed, &args[..1]).expect("it runs").remove(0).to_f64();
            assert_eq!(got[..4], expected, "{bounds:?}, constant");
        }
    }

    #[test]
    fn integers_are_exact() {
        let (low, high) = (i64::MIN + 1, i64::MAX - 1);
        let x = Tensor::i64(&[3], &[i64::MIN, 5, i64::MAX]);
        let (low, high) = (Tensor::i64(&[], &[low]), Tensor::i64(&[], &[high]));
        let graph = graph_of(&[Some(&x), Some(&low), Some(&high)]);
        let expected = Tensor::i64(&[3], &[i64::MIN + 1, 5, i64::MAX - 1]);
        assert_eq!(run(&graph, &[x.clone(), low.clone(), high.clone()]).expect("it runs")[0], expected);
        assert_eq!(run(&with_constant_bounds(&graph, &[&low, &high]), &[x]).expect("it runs")[0], expected);
        for dtype in [DType::U8, DType::I8, DType::U64, DType::F16, DType::BF16] {
            let (x, high) = (Tensor::filled(dtype, &[2], 100.0), Tensor::filled(dtype, &[], 7.0));
            let got = run_node(CLIP, &[Some(&x), None, Some(&high)], 1, Attrs::new()).expect("it runs");
            assert_eq!(got[0], Tensor::filled(dtype, &[2], 7.0));
        }
    }

    #[test]
    fn gradients() {
        let x = generic_tensor(&[3, 4], 1);
        let (low, high) = (f64s(&[], &[-0.6]), f64s(&[1], &[0.9]));
        for bounds in [[None, None], [Some(&low), None], [None, Some(&high)], [Some(&low), Some(&high)]] {
            let inputs = [Some(&x), bounds[0], bounds[1]];
            let args: Vec<Tensor> = inputs.iter().copied().flatten().cloned().collect();
            let graph = graph_of(&inputs);
            let targets: Vec<usize> = (0..args.len()).collect();
            check_gradients(&graph, &args, &targets, &[0]);
            let weights = [Some(generic_tensor(&[3, 4], 2))];
            check_decomposition(&gradient_graph(&graph, &weights, &targets), &args, 0.0);
            let present: Vec<&Tensor> = bounds.iter().copied().flatten().collect();
            check_gradients(&with_constant_bounds(&graph, &present), &args[..1], &[0], &[0]);
        }
    }

    #[test]
    fn gradients_at_the_bounds() {
        let x = f64s(&[6], &[-1.0, 2.0, -5.0, 5.0, NAN, 0.0]);
        let seed = f64s(&[6], &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]);
        let gradients = |low: f64, high: f64| {
            let (low, high) = (f64s(&[], &[low]), f64s(&[], &[high]));
            let graph = graph_of(&[Some(&x), Some(&low), Some(&high)]);
            let gradient = gradient_graph(&graph, &[Some(seed.clone())], &[0, 1, 2]);
            let got = run(&gradient, &[x.clone(), low, high]).expect("it runs");
            got.iter().map(Tensor::to_f64).collect::<Vec<_>>()
        };
        // Both ends are within the bounds. Each bound gets the gradient of the elements that it replaces. NaN is
        // outside.
        let within = vec![1.0, 2.0, 0.0, 0.0, 0.0, 32.0];
        assert_eq!(gradients(-1.0, 2.0), [within, vec![4.0], vec![8.0]]);
        // The low bound is above the high one, which replaces every element.
        assert_eq!(gradients(2.0, -1.0), [vec![0.0; 6], vec![0.0], vec![63.0]]);
        // An infinite gradient of a replaced element has no influence on the input's gradient.
        let (x, low) = (f64s(&[2], &[-5.0, 5.0]), f64s(&[], &[0.0]));
        let graph = graph_of(&[Some(&x), Some(&low)]);
        let gradient = gradient_graph(&graph, &[Some(f64s(&[2], &[INF, 1.0]))], &[0]);
        assert_eq!(run(&gradient, &[x, low]).expect("it runs")[0].to_f64(), [0.0, 1.0]);
    }

    #[test]
    fn older_versions() {
        let x = generic_tensor(&[6], 3);
        let bounded = |value: &str, bound: f32| Attrs::new().with(value, bound);
        for (attrs, low, high) in [
            (bounded("min", -0.5).with("max", 0.5f32), -0.5, 0.5),
            (bounded("min", -0.5), -0.5, INF),
            (bounded("max", 0.25), -INF, 0.25),
            (Attrs::new(), -INF, INF),
        ] {
            for opset in [7, 10] {
                let graph =
                    one_node_graph(opset, CLIP, &[Some(&x)], 1, attrs.clone()).expect("it can be read");
                let got = run(&graph, std::slice::from_ref(&x)).expect("it runs").remove(0);
                let expected: Vec<f64> = x.to_f64().iter().map(|x| x.clamp(low, high)).collect();
                assert_eq!(got.to_f64(), expected);
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
                for target in [opset, 11, 13] {
                    check_downgrade(&graph, std::slice::from_ref(&x), target);
                }
                let seed = Tensor::filled(DType::F64, &[6], 1.0);
                let mut gradient = gradient_graph(&graph, &[Some(seed)], &[0]);
                passes::infer::infer(&mut gradient).expect("valid");
                check_downgrade(&gradient, std::slice::from_ref(&x), opset);
            }
        }
        // The missing bound is the largest finite number, so infinity is clamped.
        let distant = Tensor::f32(&[1], &[f32::INFINITY]);
        let graph = one_node_graph(7, CLIP, &[Some(&distant)], 1, Attrs::new()).expect("it can be read");
        assert_eq!(run(&graph, &[distant]).expect("it runs")[0], Tensor::f32(&[1], &[f32::MAX]));

        let low = f64s(&[], &[0.5]);
        let graph = graph_of(&[Some(&x), Some(&low)]);
        let fixed = with_constant_bounds(&graph, &[&low]);
        let old = check_downgrade(&fixed, std::slice::from_ref(&x), 10);
        assert_eq!(old.nodes[0].attrs, bounded("min", 0.5));
        let error = passes::versions::downgrade(&mut graph.clone(), 10).expect_err("refused").to_string();
        assert!(error.contains("min is computed at run time, which needs opset 11 or newer"), "{error}");
    }

    #[test]
    fn rejects_invalid_bounds() {
        let x = generic_tensor(&[2], 1);
        let (two, other) = (generic_tensor(&[2], 2), Tensor::f32(&[], &[0.0]));
        for (bound, sentence) in
            [(&two, "input 1 has shape [2]; one number is needed"), (&other, "insert a Cast")]
        {
            let failure = run_node(CLIP, &[Some(&x), Some(bound)], 1, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(sentence), "{error}");
        }
        let flags = Tensor::filled(DType::Bool, &[1], 1.0);
        assert!(run_node(CLIP, &[Some(&flags)], 1, Attrs::new()).is_err());
    }
}
