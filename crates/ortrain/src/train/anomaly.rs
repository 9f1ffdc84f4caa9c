//! Location of the first NaN or infinity of a step.

use std::sync::Arc;

use ortrain_graph::{DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_ops::passes::updates::writes_state;
use ortrain_program::{
    Backend, DeviceError, GradientMode, InputView, Memory, OutputView, Scalars, Workspace, index_of,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Result;
use crate::exec::executable_cache::ExecutableCache;
use crate::state::binding::Planes;
use crate::state::layout::StateLayout;
use crate::train::not_finite::NotFinite;

/// Maximum depth of nested nodes (loops, branches) that the search inlines.
const MAX_INLINING_DEPTH: usize = 16;

/// The first NaN and the first infinity of a tensor, each with its position among the elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct FirstNonFinite {
    nan: Option<usize>,
    infinity: Option<(usize, f64)>,
}

impl FirstNonFinite {
    /// Searches the elements of a tensor of type `dtype`.
    fn scan(dtype: DType, bytes: &[u8]) -> FirstNonFinite {
        let mut values = FirstNonFinite::default();
        let mut look = |at: usize, value: f64| {
            if value.is_nan() {
                values.nan.get_or_insert(at);
            } else if value.is_infinite() {
                values.infinity.get_or_insert((at, value));
            }
        };
        match dtype {
            DType::F32 => {
                let elements = bytes.chunks_exact(4).enumerate();
                for (at, bits) in elements {
                    let value = f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
                    if !value.is_finite() {
                        look(at, value.into());
                    }
                }
            }
            DType::F64 | DType::F16 | DType::BF16 => {
                let tensor = Tensor::new(dtype, vec![bytes.len() / dtype.size()], bytes.to_vec().into());
                for (at, value) in tensor.iter().flat_map(Tensor::to_f64).enumerate() {
                    look(at, value);
                }
            }
            _ => {}
        }
        values
    }

    fn is_finite(self) -> bool {
        self == FirstNonFinite::default()
    }

    /// Returns the NaN, or else the infinity.
    fn nan_or_infinity(self) -> Option<(usize, f64)> {
        self.nan.map(|at| (at, f64::NAN)).or(self.infinity)
    }

    /// Returns the finding as part of a report.
    fn to_report(self, tensor: &str, dims: &[usize]) -> Option<NotFinite> {
        let (at, value) = self.nan_or_infinity()?;
        let (tensor, index) = (tensor.to_owned(), index_of(at, dims));
        Some(NotFinite { node: None, backward: false, tensor, index, value })
    }
}

/// Checks a result of a step: the loss, which is the first one, for NaN and infinities; others for NaN only.
pub(crate) fn check_result(
    at: usize,
    name: &str,
    value: OutputView<'_>,
) -> std::result::Result<Option<NotFinite>, DeviceError> {
    if !value.dtype.is_float() {
        return Ok(None);
    }
    let values = FirstNonFinite::scan(value.dtype, value.to_tensor()?.data());
    // Scores may be masked by infinities.
    let finite_or_nan = if at == 0 { values } else { FirstNonFinite { infinity: None, ..values } };
    let tensor = if at == 0 { "the loss".to_owned() } else { format!("{name:?}") };
    Ok(finite_or_nan.to_report(&tensor, value.dims))
}

/// Checks the gradients and the running statistics that a step updates. The planes hold trainable parameters,
/// then frozen ones, then gradients.
pub(crate) fn check_planes(layout: &StateLayout, planes: &Planes<'_>) -> Result<Option<NotFinite>> {
    let gradients = planes.iter().skip(layout.trainable.len() + layout.frozen.len());
    let gradients = layout.trainable.iter().zip(gradients).map(|pair| (pair, "the gradient of "));
    let frozen = planes.iter().skip(layout.trainable.len());
    let frozen = layout.frozen.iter().zip(frozen).map(|pair| (pair, ""));
    for ((plane, memory), label) in gradients.chain(frozen) {
        for tensor in &plane.tensors {
            let bytes =
                memory.to_vec(tensor.offset, tensor.dims.iter().product::<usize>() * plane.dtype.size())?;
            let values = FirstNonFinite::scan(plane.dtype, &bytes);
            if let Some(report) = values.to_report(&format!("{label}{:?}", tensor.name), &tensor.dims) {
                return Ok(Some(report));
            }
        }
    }
    Ok(None)
}

/// The step to repeat: all its inputs, with copies of the memory that it writes.
pub(crate) struct Replay<'a> {
    pub(crate) executables: &'a ExecutableCache,
    pub(crate) backend: &'a Arc<dyn Backend>,
    pub(crate) planes: &'a [&'a Memory],
    pub(crate) gradient_mode: GradientMode,
    pub(crate) scalars: Scalars,
    pub(crate) inputs: &'a [InputView<'a>],
    /// Names and dimensions of the inputs in planes.
    pub(crate) layout: &'a StateLayout,
}

/// Findings of a run.
struct ReplayValues {
    /// Values with a NaN or infinity, with their dimensions.
    found: FxHashMap<ValueId, (FirstNonFinite, Vec<usize>)>,
    /// Inputs and outputs of nodes with subgraphs.
    subgraph_values: FxHashMap<ValueId, Tensor>,
}

fn has_subgraphs(node: &Node) -> bool {
    Graph::subgraphs(node).next().is_some()
}

impl Replay<'_> {
    /// Returns the origin of the first NaN or infinity that reaches the loss or a gradient.
    ///
    /// Runs the step with every value as a result, then follows the values with NaN or infinity backwards. If
    /// the origin is a node with subgraphs, the search inlines its body and starts again.
    ///
    /// # Errors
    /// If the step fails.
    pub(crate) fn trace_origin(&self) -> Result<Vec<NotFinite>> {
        let mut replayed = self.replay(self.executables)?;
        let mut path = trace_backwards(self.executables.graph(), &replayed.found);
        let mut inlined: Option<ExecutableCache> = None;
        for _ in 0..MAX_INLINING_DEPTH {
            let runners = inlined.as_ref().unwrap_or(self.executables);
            let outer = path.iter().filter_map(|(_, node)| *node);
            let next = outer.filter(|&node| has_subgraphs(&runners.graph().nodes[node])).find_map(|node| {
                runners.with_node_inlined(
                    node,
                    &|id| replayed.subgraph_values.get(&id).cloned(),
                    self.backend.clone(),
                )
            });
            let Some(next) = next else { break };
            // If the inlined graph cannot run, or its sums in another order are finite, the node itself is
            // the answer.
            let Ok(inside) = self.replay(&next) else { break };
            let longer = trace_backwards(next.graph(), &inside.found);
            if longer.is_empty() {
                break;
            }
            (replayed, path, inlined) = (inside, longer, Some(next));
        }
        Ok(path.into_iter().map(|(report, _)| report).collect())
    }

    /// Runs a graph of the step with every value as a result.
    fn replay(&self, runners: &ExecutableCache) -> Result<ReplayValues> {
        let graph = runners.graph();
        let of_loops = graph.nodes.iter().filter(|node| has_subgraphs(node));
        let captured: FxHashSet<ValueId> =
            of_loops.flat_map(|node| node.present_inputs().chain(node.present_outputs())).collect();
        let node_outputs: Vec<ValueId> = (graph.nodes.iter().flat_map(Node::present_outputs))
            .filter(|&id| matches!(&graph.value(id).ty, ValueType::Tensor(_, shape) if shape.is_some() || captured.contains(&id)))
            .filter(|&id| {
                let dtype = graph.value(id).ty.dtype();
                dtype.is_some_and(|dtype| dtype.is_float() || captured.contains(&id))
            })
            .collect();
        let mut result =
            ReplayValues { found: self.non_finite_inputs(runners)?, subgraph_values: FxHashMap::default() };
        for (id, input) in runners.user_inputs().zip(self.inputs).filter(|(id, _)| captured.contains(id)) {
            let tensor = Tensor::new(input.dtype, input.dims.to_vec(), input.to_host()?.into_owned().into());
            result.subgraph_values.extend(tensor.ok().map(|tensor| (id, tensor)));
        }
        for &id in &captured {
            result.subgraph_values.extend(graph.value(id).content().map(|tensor| (id, tensor.clone())));
        }
        // A separate workspace without the memory limit of the module: the step runs once, for the diagnosis.
        runners.with_outputs(node_outputs.clone(), self.backend.clone()).run(
            &mut Workspace::new(self.backend.clone()),
            self.planes,
            self.gradient_mode,
            self.scalars,
            self.inputs,
            &mut |at, value| {
                let Some(&id) = node_outputs.get(at) else { return Ok(()) };
                let tensor = value.to_tensor()?;
                let finding = if value.dtype.is_float() {
                    FirstNonFinite::scan(value.dtype, tensor.data())
                } else {
                    FirstNonFinite::default()
                };
                if !finding.is_finite() {
                    result.found.insert(id, (finding, value.dims.to_vec()));
                }
                if captured.contains(&id) {
                    result.subgraph_values.insert(id, tensor);
                }
                Ok(())
            },
        )?;
        Ok(result)
    }

    /// Returns the inputs and parameters of the step that have a NaN or infinity.
    fn non_finite_inputs(
        &self,
        runners: &ExecutableCache,
    ) -> Result<FxHashMap<ValueId, (FirstNonFinite, Vec<usize>)>> {
        let mut inputs_found = FxHashMap::default();
        let graph = runners.graph();
        for (id, input) in runners.user_inputs().zip(self.inputs) {
            let finding = FirstNonFinite::scan(input.dtype, &input.to_host()?);
            if !finding.is_finite() {
                inputs_found.insert(id, (finding, input.dims.to_vec()));
            }
        }
        let planes = self.layout.trainable.iter().chain(&self.layout.frozen).zip(self.planes);
        for (plane, memory) in planes {
            for tensor in &plane.tensors {
                let Some(id) = graph.find(&tensor.name) else { continue };
                let bytes = memory
                    .to_vec(tensor.offset, tensor.dims.iter().product::<usize>() * plane.dtype.size())?;
                let finding = FirstNonFinite::scan(plane.dtype, &bytes);
                if !finding.is_finite() {
                    inputs_found.insert(id, (finding, tensor.dims.clone()));
                }
            }
        }
        Ok(inputs_found)
    }
}

/// Returns the first value with a NaN or infinity on the paths to the loss and to written state, then the
/// first with NaN. Each has the node that computed it.
fn trace_backwards(
    graph: &Graph,
    found: &FxHashMap<ValueId, (FirstNonFinite, Vec<usize>)>,
) -> Vec<(NotFinite, Option<usize>)> {
    // Values with NaN or infinity that pass it on. (A mask of infinities before a softmax does not.)
    let mut reaching: FxHashSet<ValueId> = FxHashSet::default();
    reaching.extend(graph.outputs.first().filter(|id| found.contains_key(id)));
    let mut forward: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    for node in graph.nodes.iter().rev() {
        if writes_state(graph, node) || node.present_outputs().any(|id| reaching.contains(&id)) {
            reaching.extend(node.present_inputs().filter(|id| found.contains_key(id)));
        }
        if node.present_outputs().any(|id| forward.contains(&id)) {
            forward.extend(node.present_inputs());
        }
    }
    let report = |id: ValueId, node: Option<usize>| {
        let (finding, dims) = found.get(&id)?;
        let mut report = finding.to_report(graph.name_of(id), dims)?;
        report.node = node.map(|node| graph.node_label(&graph.nodes[node]));
        report.backward = node.is_some() && !forward.contains(&id);
        Some((report, node))
    };
    // In execution order.
    let input_ids = graph.inputs.iter().map(|&id| (id, None));
    let nodes = graph.nodes.iter().enumerate();
    let output_ids = nodes.flat_map(|(at, node)| node.present_outputs().map(move |id| (id, Some(at))));
    let mut candidates = input_ids.chain(output_ids).filter(|(id, _)| reaching.contains(id));
    let Some(first) = candidates.next() else { return Vec::new() };
    let has_nan = |id: ValueId| found.get(&id).is_some_and(|(finding, _)| finding.nan.is_some());
    let first_nan = if has_nan(first.0) { None } else { candidates.find(|&(id, _)| has_nan(id)) };
    [Some(first), first_nan].into_iter().flatten().filter_map(|(id, node)| report(id, node)).collect()
}
