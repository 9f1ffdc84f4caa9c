//! Check that the rows of a batch are independent: a larger batch has the same results as batches of the model's
//! own size.

use std::sync::Arc;

use ortrain_expr::random_bits;
use ortrain_graph::{DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_ops::Role;
use ortrain_ops::passes::infer::infer;
use ortrain_program::{Backend, GradientMode, InputView, Scalars, Workspace};
use rustc_hash::FxHashSet;

use crate::exec::executable_cache::ExecutableCache;
use crate::{ErrorKind, Result, default_backend};

/// Number of batches of the model's own size in the larger batch.
pub(crate) const BATCH_COUNT: usize = 2;
/// Size of symbolic axes in the random inputs.
const SYMBOLIC_AXIS_SIZE: usize = 6;
/// Seed of the random inputs.
const SEED: u64 = 23;
/// Tolerance by type, relative to the largest magnitude. It is larger than the effect of a different summation order.
const RELATIVE_TOLERANCES: [(DType, f64); 3] = [(DType::F16, 0.03), (DType::BF16, 0.1), (DType::F32, 1e-3)];
/// Maximum elements of all inputs, and maximum bytes of a run. Larger models are not compared.
const MAX_ELEMENTS_AND_BYTES: (usize, usize) = (1 << 28, 1 << 34);
/// Divisor of the number of elements: up to this share may differ, because a rounding error may change a selection.
const MISMATCH_DIVISOR: usize = 50;

/// Returns the reason why the rows of a batch are not independent, as the end of a sentence.
///
/// Returns `None` if the results are equal, or if the model does not run on random inputs. `single` is the
/// graph for the batch size of the model, which is `batch`. `batched` is the graph for a batch with
/// [`BATCH_COUNT`] times more rows in the inputs named in `batched_inputs`.
///
/// # Errors
/// Returns an error if there is no backend.
pub(crate) fn find_dependence(
    mut single: Graph,
    mut batched: Graph,
    batched_inputs: &FxHashSet<String>,
    batch: usize,
) -> Result<Option<String>> {
    let backend = default_backend()?;
    if infer(&mut single).is_err() || infer(&mut batched).is_err() {
        return Ok(None);
    }
    let Some(inputs) = draw_inputs(&single, batched_inputs) else { return Ok(None) };
    let compared = |names: &[String], inside: bool| -> Option<std::result::Result<Vec<bool>, String>> {
        let mut parts = Vec::with_capacity(BATCH_COUNT);
        for part in 0..BATCH_COUNT {
            let rows: Vec<Tensor> = inputs.iter().map(|input| input.batch_rows(part)).collect();
            parts.push(run_graph(&single, names, &rows, &backend).ok()?);
        }
        let input_tensors: Vec<Tensor> = inputs.iter().map(|input| input.tensor.clone()).collect();
        let batched_results = match run_graph(&batched, names, &input_tensors, &backend) {
            Ok(results) => results,
            Err(error) if error.kind() == ErrorKind::MemoryLimit => return None,
            Err(error) => return Some(Err(error.to_string())),
        };
        let agree = |k: usize| {
            let parts: Option<Vec<&Tensor>> = parts.iter().map(|results| results[k].as_ref()).collect();
            parts
                .zip(batched_results[k].as_ref())
                .is_none_or(|(parts, batched_value)| values_agree(&parts, batched_value, batch, inside))
        };
        Some(Ok((0..names.len()).map(agree).collect()))
    };
    let differing = |names: Vec<String>, agree: Vec<bool>| {
        names.into_iter().zip(agree).find_map(|(name, agrees)| (!agrees).then_some(name))
    };
    let outputs = common_float_names(&single, &batched, single.outputs.iter().copied());
    let output = match compared(&outputs, false) {
        None => return Ok(None),
        Some(Err(reason)) => return Ok(Some(reason)),
        Some(Ok(agree)) => differing(outputs, agree),
    };
    let Some(output) = output else { return Ok(None) };
    let common = common_float_names(&single, &batched, single.nodes.iter().flat_map(Node::present_outputs));
    let first = match compared(&common, true) {
        Some(Ok(agree)) => differing(common, agree),
        _ => None,
    };
    let id = single.find(&first.unwrap_or(output));
    let producer = single.nodes.iter().find(|node| node.present_outputs().any(|output| Some(output) == id));
    let label = producer.map(|node| single.node_label(node)).unwrap_or_default();
    Ok(Some(format!("{label} computes other values for a row in a larger batch than for the row alone")))
}

/// Input of the model with the rows of [`BATCH_COUNT`] batches.
struct Input {
    tensor: Tensor,
    /// True if each batch has its own rows.
    is_batched: bool,
}

impl Input {
    /// Returns the input of one of the batches.
    fn batch_rows(&self, part: usize) -> Tensor {
        if !self.is_batched {
            return self.tensor.clone();
        }
        let mut dims = self.tensor.dims().to_vec();
        dims[0] /= BATCH_COUNT;
        let bytes = self.tensor.data().len() / BATCH_COUNT;
        let data = self.tensor.data().slice(part * bytes..(part + 1) * bytes);
        Tensor::new(self.tensor.dtype(), dims, data).expect("whole rows")
    }
}

/// Generates random inputs: floats from -1 to 1, and integers and booleans of 0 or 1, which are valid indices
/// of most tables. Returns `None` if an input has another type or an unknown rank, or if the inputs are too large.
fn draw_inputs(graph: &Graph, batched_inputs: &FxHashSet<String>) -> Option<Vec<Input>> {
    let mut remaining = MAX_ELEMENTS_AND_BYTES.0;
    let inputs = graph.inputs.iter().enumerate().map(|(stream, &id)| {
        let ValueType::Tensor(dtype, Some(shape)) = &graph.value(id).ty else { return None };
        let mut dims: Vec<usize> =
            shape.iter().map(|dim| dim.known().unwrap_or(SYMBOLIC_AXIS_SIZE)).collect();
        let is_batched = batched_inputs.contains(graph.name_of(id));
        if is_batched {
            let rows = dims.first_mut()?;
            *rows = rows.checked_mul(BATCH_COUNT)?;
        }
        let bits = |index: usize| random_bits(SEED, stream as u64, index as u64);
        let len = dims.iter().try_fold(1usize, |len, &size| len.checked_mul(size))?;
        remaining = remaining.checked_sub(len)?;
        let drawn = if dtype.is_float() {
            let elements: Vec<f32> = (0..len).map(|k| bits(k) as f32 / (1u32 << 31) as f32 - 1.0).collect();
            Tensor::f32(&dims, &elements).converted(*dtype)
        } else if dtype.is_integer() || *dtype == DType::Bool {
            let elements: Vec<i64> = (0..len).map(|k| i64::from(bits(k) >> 31)).collect();
            Tensor::i64(&dims, &elements).converted(*dtype)
        } else {
            return None;
        };
        Some(Input { tensor: drawn, is_batched })
    });
    inputs.collect()
}

/// Returns the names of those `values` of `single` that are float tensors in both graphs.
fn common_float_names(single: &Graph, batched: &Graph, values: impl Iterator<Item = ValueId>) -> Vec<String> {
    let is_float = |graph: &Graph, id: ValueId| {
        let ty = &graph.value(id).ty;
        ty.shape().is_some() && ty.dtype().is_some_and(DType::is_float)
    };
    let names = values.filter(|&id| is_float(single, id)).map(|id| single.name_of(id).to_owned());
    names.filter(|name| batched.find(name).is_some_and(|id| is_float(batched, id))).collect()
}

/// Runs a graph on `inputs` and returns the values with these `names`.
fn run_graph(
    graph: &Graph,
    names: &[String],
    inputs: &[Tensor],
    backend: &Arc<dyn Backend>,
) -> Result<Vec<Option<Tensor>>> {
    let mut graph = graph.clone();
    graph.outputs = names.iter().filter_map(|name| graph.find(name)).collect();
    graph.remove_unused();
    let roles = vec![Role::User; graph.inputs.len()];
    let mut results = vec![None; names.len()];
    let run_inputs: Vec<InputView<'_>> = inputs.iter().map(InputView::from).collect();
    ExecutableCache::new(graph, roles, backend.clone()).run(
        &mut Workspace::with_limit(backend.clone(), Some(MAX_ELEMENTS_AND_BYTES.1), 0),
        &[],
        GradientMode::Accumulate,
        Scalars::default(),
        &run_inputs,
        &mut |at, value| {
            results[at] = Some(value.to_tensor()?);
            Ok(())
        },
    )?;
    Ok(results)
}

/// Returns true if a value of the larger batch has the same rows as the values of the single batches.
///
/// Values that do not have rows count as equal: for example, a sum over all rows has the same shape in every
/// batch. With `inside`, the value is an intermediate value, and the axis of rows may be a product of another axis
/// and the batch axis.
fn values_agree(parts: &[&Tensor], batched: &Tensor, batch: usize, inside: bool) -> bool {
    let dims = parts[0].dims();
    if dims.len() != batched.dims().len() {
        return false;
    }
    if parts.iter().any(|part| part.dims() != dims) {
        // The sizes depend on the data.
        return true;
    }
    let mut grown = (0..dims.len()).filter(|&axis| dims[axis] != batched.dims()[axis]);
    let Some(axis) = grown.next() else {
        let may_be_a_row = batch == 1 && dims.len() > 1 && dims[0] == 1;
        return !may_be_a_row
            || parts.iter().all(|part| are_close(&part.to_f64(), &batched.to_f64(), batched.dtype()));
    };
    if grown.next().is_some() {
        // Two axes are larger: each row is combined with every row.
        return true;
    }
    if batched.dims()[axis] != BATCH_COUNT * dims[axis] {
        return false;
    }
    let elements = batched.to_f64();
    let parts: Vec<Vec<f64>> = parts.iter().map(|part| part.to_f64()).collect();
    let front: usize = dims[..axis].iter().product();
    let max_rows = if inside { dims[axis] } else { 1 };
    (1..=max_rows).filter(|&outer| dims[axis].is_multiple_of(outer)).any(|outer| {
        let blocks = front * outer;
        let len = parts[0].len() / blocks.max(1);
        let concatenated: Vec<f64> = (0..blocks)
            .flat_map(|block| parts.iter().flat_map(move |part| &part[block * len..(block + 1) * len]))
            .copied()
            .collect();
        are_close(&concatenated, &elements, batched.dtype())
    })
}

/// Returns true if almost all elements are equal up to rounding.
fn are_close(a: &[f64], b: &[f64], dtype: DType) -> bool {
    let share = RELATIVE_TOLERANCES.iter().find(|(ty, _)| *ty == dtype).map_or(1e-6, |(_, share)| *share);
    let largest =
        a.iter().filter(|value| value.is_finite()).fold(0.0, |maximum: f64, value| maximum.max(value.abs()));
    let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= share * largest;
    let differing = a.iter().zip(b).filter(|(a, b)| !same(**a, **b)).count();
    a.len() == b.len() && differing * MISMATCH_DIVISOR <= a.len()
}
