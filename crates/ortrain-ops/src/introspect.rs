//! Facts about operators: accepted inputs, gradients and placement. They are derived from the implementation by trial,
//! so that no separate table has to be maintained.
//!
//! A sample node of the operator is built: missing attributes get values, and inputs are tried until the operator
//! accepts them. If this search fails, the definition provides a sample.

use ortrain_graph::{Attr, AttrError, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::class::Traits;
use crate::op::{Definition, NO_GRADIENT, Placement};
use crate::passes::{differentiate::backpropagate, infer::infer, versions::upgrade};
use crate::registry::{NEWEST_OPSET, build};
use crate::sample::Sample;
use crate::{Error, OpError};

/// Way in which the nodes of an operator run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Runs {
    /// An expression of each element: a row of a table, which determines gradient and instruction.
    Row,
    /// Instructions of its own.
    Instructions,
    /// Other operators.
    Decomposition,
    /// A function on the host: the shapes of its results depend on values.
    Host,
    /// Schedules that are selected, repeated or suspended.
    ControlFlow,
}

/// Gradients that an operator propagates to its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// Every float input gets a gradient.
    Full,
    /// Only these float inputs get a gradient.
    Partial(Vec<usize>),
    /// There is no gradient, because it is zero almost everywhere.
    Zero,
    /// There is no gradient: the operator has no float inputs or outputs, or is part of training itself.
    None,
}

/// Facts about an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorInfo {
    /// Way in which the operator runs.
    pub runs: Runs,
    /// Gradients that the operator propagates.
    pub gradient: Gradient,
    /// Accepted element types of each input.
    pub types: Vec<Vec<DType>>,
    /// True if the operator accepts any number of inputs.
    pub variadic: bool,
}

/// Maximum number of inputs in a trial.
const MAX_INPUTS: usize = 16;

/// Maximum number of required inputs.
const MAX_REQUIRED_INPUTS: usize = 6;

/// Maximum number of outputs in a trial.
const MAX_OUTPUTS: usize = 8;

/// Maximum number of generated attributes.
const MAX_ATTRIBUTES: usize = 8;

/// Ranks in a trial.
const RANKS: [usize; 5] = [2, 3, 4, 1, 0];

/// Returns the candidate types of an input during the search; the last one omits the input.
fn candidate_types() -> [Option<ValueType>; 6] {
    let of = |dtype| Some(ValueType::Tensor(dtype, None));
    let sequence = Some(ValueType::Sequence(DType::F32));
    [of(DType::F32), of(DType::I64), of(DType::Bool), of(DType::I32), sequence, None]
}

/// Generates an attribute of a kind.
fn generate_attribute(kind: &str) -> Option<Attr> {
    Some(match kind {
        "INT" => Attr::Int(1),
        "FLOAT" => Attr::Float(1.0),
        "STRING" => Attr::String(String::new()),
        "INTS" => Attr::Ints(vec![1]),
        "FLOATS" => Attr::Floats(vec![1.0]),
        "TENSOR" => Attr::Tensor(Tensor::scalar(DType::F32, 1.0)),
        _ => return None,
    })
}

/// Replaces the element type.
fn with_dtype(ty: &ValueType, dtype: DType) -> ValueType {
    match ty {
        ValueType::Tensor(_, shape) => ValueType::Tensor(dtype, shape.clone()),
        ValueType::Sequence(_) => ValueType::Sequence(dtype),
        ValueType::Unknown => ValueType::Unknown,
    }
}

/// Generator of nodes of one operator.
#[derive(Clone, Copy)]
struct Probe<'a> {
    definition: &'a Definition,
    /// Opset version of the nodes.
    version: i64,
    outputs: usize,
}

impl Probe<'_> {
    /// Builds a graph of one node, and the values of its inputs.
    fn build_graph(&self, sample: &Sample) -> Result<(Graph, Vec<Option<ValueId>>), Error> {
        let (mut graph, ids) = self.written_graph(sample);
        if self.definition.since.last() != Some(&self.version) {
            upgrade(&mut graph)?;
        }
        infer(&mut graph)?;
        Ok((graph, ids))
    }

    /// Builds the graph as in a file: in its own version, without types.
    fn written_graph(&self, sample: &Sample) -> (Graph, Vec<Option<ValueId>>) {
        let mut graph = Graph::new("introspect");
        graph.opsets.insert(String::new(), NEWEST_OPSET);
        graph.opsets.insert("com.microsoft".into(), 1);
        graph.opsets.insert(self.definition.domain.to_owned(), self.version);
        let ids: Vec<Option<ValueId>> = (sample.inputs.iter().enumerate())
            .map(|(k, ty)| ty.as_ref().map(|ty| graph.add_value(&format!("x{k}"), ty.clone())))
            .collect();
        graph.inputs = ids.iter().copied().flatten().collect();
        let declared = sample.output.clone().unwrap_or_default();
        let outputs: Vec<Option<ValueId>> =
            (0..self.outputs).map(|k| Some(graph.add_value(&format!("y{k}"), declared.clone()))).collect();
        graph.outputs = outputs.iter().copied().flatten().collect();
        let definition = self.definition;
        let mut node = Node::new(definition.domain, definition.name, &ids, &outputs, sample.attrs.clone());
        node.captures = sample.captures;
        graph.nodes.push(node);
        (graph, ids)
    }

    /// Returns the first variant of the sample that is accepted with inputs of known shapes, all of one rank and size
    /// if possible.
    fn with_shapes(&self, sample: &Sample) -> Option<Sample> {
        let is_open = |k: &usize| matches!(sample.inputs[*k], Some(ValueType::Tensor(_, None)));
        let open: Vec<usize> = (0..sample.inputs.len()).filter(is_open).collect();
        let with = |size: Size, digits: &[usize]| {
            let mut tried = sample.clone();
            for (&k, &digit) in open.iter().zip(digits) {
                tried.inputs[k] = tried.inputs[k].as_ref().map(|ty| size.with_rank(ty, RANKS[digit]));
            }
            self.build_accepted(&mut tried).map(|_| tried)
        };
        let known = [Size::Known(4), Size::Known(2), Size::Known(1)];
        let alike = known.into_iter().flat_map(|size| (0..RANKS.len()).map(move |digit| (size, digit)));
        let sample_found = alike.into_iter().find_map(|(size, digit)| with(size, &vec![digit; open.len()]));
        if sample_found.is_some() || open.len() > MAX_REQUIRED_INPUTS {
            return sample_found;
        }
        let count = RANKS.len().pow(open.len() as u32);
        let digits = |code: usize| -> Vec<usize> {
            (0..open.len()).map(|k| code / RANKS.len().pow(k as u32) % RANKS.len()).collect()
        };
        known.into_iter().find_map(|size| (0..count).find_map(|code| with(size, &digits(code))))
    }

    /// Builds the graph of a sample; missing attributes are generated.
    fn build_accepted(&self, sample: &mut Sample) -> Option<(Graph, Vec<Option<ValueId>>)> {
        for _ in 0..=MAX_ATTRIBUTES {
            let error = match self.build_graph(sample) {
                Ok(found) => return Some(found),
                Err(Error::Node { source: OpError::Attr(error), .. }) => error,
                Err(_) => return None,
            };
            let (name, attr) = match error {
                AttrError::Missing { name } => (name, generate_attribute("INT")),
                AttrError::WrongKind { name, expected, .. } => (name, generate_attribute(expected)),
                _ => return None,
            };
            sample.attrs.0.insert(name, attr?);
        }
        None
    }

    /// Returns a sample with the minimum number of inputs.
    fn minimal_sample(&self) -> Option<Sample> {
        let mut initial = self.definition.sample.map(|sample| sample(self.definition)).unwrap_or_default();
        if !initial.inputs.is_empty() {
            return self.build_accepted(&mut initial).map(|_| initial);
        }
        let choices = candidate_types();
        for count in 0..=MAX_REQUIRED_INPUTS {
            let mut digits = vec![0; count];
            loop {
                let inputs = digits.iter().map(|&digit: &usize| choices[digit].clone()).collect();
                let mut sample = Sample { inputs, ..initial.clone() };
                if self.build_accepted(&mut sample).is_some() {
                    return Some(sample);
                }
                let Some(at) = digits.iter().rposition(|&digit| digit + 1 < choices.len()) else { break };
                digits[at] += 1;
                digits[at + 1..].fill(0);
            }
        }
        None
    }

    /// Extends a sample by all further inputs that the operator accepts.
    fn maximal_sample(&self, minimal: &Sample) -> Sample {
        let mut sample = minimal.clone();
        let mut input_count = sample.inputs.len();
        // Captures of subgraphs come last.
        while sample.captures == 0 && sample.inputs.len() < MAX_INPUTS {
            let next = candidate_types().into_iter().find_map(|choice| {
                let mut longer = sample.clone();
                longer.inputs.push(choice);
                self.build_accepted(&mut longer).map(|_| longer)
            });
            let Some(longer) = next else { break };
            sample = longer;
            if sample.inputs.last().is_some_and(Option::is_some) {
                input_count = sample.inputs.len();
            }
        }
        sample.inputs.truncate(input_count);
        sample
    }

    /// Returns the element types that input `k` accepts. Other inputs of the same type change with it if necessary.
    fn accepted_types(&self, sample: &Sample, k: usize) -> Vec<DType> {
        let Some(Some(input_type)) = sample.inputs.get(k) else { return Vec::new() };
        let alike: Vec<usize> = (0..sample.inputs.len())
            .filter(|&j| sample.inputs[j].as_ref().is_some_and(|ty| ty.dtype() == input_type.dtype()))
            .collect();
        let mut groups = vec![vec![k], alike.clone()];
        groups.extend(alike.iter().filter(|&&j| j != k).map(|&j| vec![k, j]));
        // An attribute may be an element type, for example the type of the input.
        let mut attrs = vec![sample.attrs.clone()];
        attrs.extend(self.dtype_attributes(sample).iter().flat_map(|name| {
            DType::ALL.map(|dtype| sample.attrs.clone().with(name, i64::from(dtype.to_onnx())))
        }));
        let accepts = |dtype: DType| {
            groups.iter().any(|group| {
                let mut changed = sample.clone();
                for &j in group {
                    changed.inputs[j] = changed.inputs[j].as_ref().map(|ty| with_dtype(ty, dtype));
                }
                attrs.iter().any(|attrs| {
                    changed.attrs.clone_from(attrs);
                    self.build_accepted(&mut changed.clone()).is_some()
                })
            })
        };
        DType::ALL.into_iter().filter(|&dtype| accepts(dtype)).collect()
    }

    /// Returns the attributes that determine the element type of the first output.
    fn dtype_attributes(&self, sample: &Sample) -> Vec<String> {
        let output = |sample: &Sample| {
            let (graph, _) = self.build_graph(sample).ok()?;
            graph.value(*graph.outputs.first()?).ty.dtype()
        };
        let before = output(sample);
        let gives_type = |name: &str| {
            DType::ALL.into_iter().filter(|&dtype| Some(dtype) != before).any(|dtype| {
                let attrs = sample.attrs.clone().with(name, i64::from(dtype.to_onnx()));
                output(&Sample { attrs, ..sample.clone() }) == Some(dtype)
            })
        };
        let numbers = sample.attrs.0.iter().filter(|(_, attr)| matches!(attr, Attr::Int(_)));
        numbers.map(|(name, _)| name.to_string()).filter(|name| gives_type(name)).collect()
    }

    /// Returns the inputs that get gradients from a node, if it can be differentiated.
    fn propagated_gradients(&self, sample: &Sample, constants: bool) -> Propagation {
        let Some((mut graph, ids)) = self.build_accepted(&mut sample.clone()) else {
            return Propagation::NotHere;
        };
        if constants {
            for id in ids.iter().copied().flatten() {
                let value = graph.value_mut(id);
                if let ValueType::Tensor(DType::I64, Some(shape)) = &value.ty
                    && let Some(dims) = shape.concrete()
                {
                    value.constant = Some(Tensor::filled(DType::I64, &dims, 1.0));
                }
            }
            if infer(&mut graph).is_err() {
                return Propagation::NotHere;
            }
        }
        let is_float = |graph: &Graph, id: ValueId| graph.value(id).ty.dtype().is_some_and(DType::is_float);
        let mut seeds = Vec::new();
        for output in graph.outputs.clone() {
            if is_float(&graph, output) {
                let ty = graph.value(output).ty.clone();
                seeds.push((output, graph.add_value("dy", ty)));
            }
        }
        let float_inputs: Vec<usize> =
            (0..ids.len()).filter(|&k| ids[k].is_some_and(|id| is_float(&graph, id))).collect();
        let targets: Vec<ValueId> = float_inputs.iter().filter_map(|&k| ids[k]).collect();
        match backpropagate(&mut graph, &seeds, &targets) {
            Ok(found) => {
                let with_gradient =
                    float_inputs.into_iter().zip(found).filter(|(_, gradient)| gradient.is_some());
                Propagation::To(with_gradient.map(|(k, _)| k).collect())
            }
            Err(Error::Node { source: OpError::Unsupported(reason), .. })
                if reason.starts_with(NO_GRADIENT) =>
            {
                Propagation::Never
            }
            Err(_) => Propagation::NotHere,
        }
    }

    /// Returns the inputs that get gradients, with the best ranks.
    fn differentiable_inputs(&self, minimal: &Sample, maximal: &Sample) -> Option<Vec<usize>> {
        let mut best: Option<BestSample> = None;
        // Starts with the minimum number of inputs that can be differentiated,
        let mut count = minimal.inputs.len();
        while best.is_none() && count <= maximal.inputs.len() {
            best = self.best_ranks(maximal, count);
            count += 1;
        }
        let mut best = best?;
        // then adds further inputs one by one.
        for k in best.sample.inputs.len()..maximal.inputs.len() {
            let mut next: Option<BestSample> = None;
            for (size, rank) in sizes_and_ranks() {
                let mut sample = best.sample.clone();
                sample.inputs.push(maximal.inputs[k].as_ref().map(|ty| size.with_rank(ty, rank)));
                self.update_best(&mut next, sample, best.constants);
            }
            match next {
                Some(next) => {
                    let before = std::mem::take(&mut best.inputs_with_grad);
                    best = next;
                    // A present input may replace another one.
                    best.inputs_with_grad.extend(before);
                    best.inputs_with_grad.sort_unstable();
                    best.inputs_with_grad.dedup();
                }
                None => best.sample.inputs.push(None),
            }
        }
        Some(best.inputs_with_grad)
    }

    /// Returns the ranks of the first `count` inputs for which the maximum number of inputs gets gradients.
    fn best_ranks(&self, maximal: &Sample, count: usize) -> Option<BestSample> {
        let mut fewer = maximal.clone();
        fewer.inputs.truncate(count);
        let is_float =
            |ty: &Option<ValueType>| ty.as_ref().and_then(ValueType::dtype).is_some_and(DType::is_float);
        let floats = fewer.inputs.iter().filter(|ty| is_float(ty)).count();
        let is_open = |k: &usize| matches!(fewer.inputs[*k], Some(ValueType::Tensor(_, None)));
        let open: Vec<usize> = (0..count).filter(is_open).collect();
        if open.len() > MAX_REQUIRED_INPUTS {
            return None;
        }
        let mut best: Option<BestSample> = None;
        for constants in [false, true] {
            for size in &SIZES {
                let mut digits = vec![0; open.len()];
                loop {
                    let mut sample = fewer.clone();
                    for (&k, &digit) in open.iter().zip(&digits) {
                        sample.inputs[k] =
                            sample.inputs[k].as_ref().map(|ty| size.with_rank(ty, RANKS[digit]));
                    }
                    let possible = self.update_best(&mut best, sample, constants);
                    if !possible || best.as_ref().is_some_and(|best| best.inputs_with_grad.len() == floats) {
                        return best;
                    }
                    let Some(at) = digits.iter().rposition(|&digit| digit + 1 < RANKS.len()) else { break };
                    digits[at] += 1;
                    digits[at + 1..].fill(0);
                }
            }
            if best.is_some() {
                break;
            }
        }
        best
    }

    /// Updates the best sample if a node has gradients for more inputs. Returns false if the operator has no gradient.
    fn update_best(&self, best: &mut Option<BestSample>, sample: Sample, constants: bool) -> bool {
        match self.propagated_gradients(&sample, constants) {
            Propagation::To(inputs_with_grad)
                if best.as_ref().is_none_or(|best| inputs_with_grad.len() > best.inputs_with_grad.len()) =>
            {
                *best = Some(BestSample { sample, constants, inputs_with_grad });
                true
            }
            Propagation::To(_) | Propagation::NotHere => true,
            Propagation::Never => false,
        }
    }
}

/// Gradients that a node propagates.
enum Propagation {
    /// Gradients of these inputs.
    To(Vec<usize>),
    /// No gradient: the node is invalid, or has no gradient for inputs like these.
    NotHere,
    /// No gradient: the operator has none.
    Never,
}

/// Sample with gradients for the maximum number of inputs so far.
struct BestSample {
    sample: Sample,
    /// True if its indices are constants.
    constants: bool,
    inputs_with_grad: Vec<usize>,
}

/// Size of all axes.
#[derive(Clone, Copy)]
enum Size {
    Symbol,
    Known(usize),
}

/// Sizes in a trial.
const SIZES: [Size; 4] = [Size::Symbol, Size::Known(2), Size::Known(1), Size::Known(4)];

fn sizes_and_ranks() -> impl Iterator<Item = (Size, usize)> {
    SIZES.into_iter().flat_map(|size| RANKS.map(|rank| (size, rank)))
}

impl Size {
    /// Sets the rank of a type, if it is unknown.
    fn with_rank(self, ty: &ValueType, rank: usize) -> ValueType {
        let dim = match self {
            Size::Symbol => Dim::symbol("n"),
            Size::Known(size) => Dim::Known(size),
        };
        match ty {
            ValueType::Tensor(dtype, None) => {
                ValueType::Tensor(*dtype, Some((0..rank).map(|_| dim.clone()).collect::<Shape>()))
            }
            ty => ty.clone(),
        }
    }
}

impl Definition {
    /// Returns the versions that models may have.
    #[must_use]
    pub fn versions(&self) -> &'static [i64] {
        match self.since.iter().position(|&version| self.domain.is_empty() && version > NEWEST_OPSET) {
            Some(end) => &self.since[..end],
            None if self.is_always_rewritten => &self.since[..self.since.len() - 1],
            None => self.since,
        }
    }

    /// Returns graphs of one node of the operator, as files of each version have them: with the minimum and with the
    /// maximum number of inputs. The shapes are known if the operator accepts this. The graphs are neither upgraded,
    /// nor do they have types of results.
    #[must_use]
    pub fn samples(&self) -> Vec<Graph> {
        let mut graphs = Vec::new();
        for &version in self.versions() {
            let probe = (1..=4).find_map(|outputs| {
                let introspect = Probe { definition: self, version, outputs };
                introspect.minimal_sample().map(|candidate| (introspect, candidate))
            });
            let Some((introspect, minimal)) = probe else { continue };
            let maximal =
                if self.is_always_rewritten { minimal.clone() } else { introspect.maximal_sample(&minimal) };
            let both = if maximal.inputs.len() > minimal.inputs.len() {
                vec![minimal, maximal]
            } else {
                vec![minimal]
            };
            for mut sample in both {
                // Required attributes are generated.
                if introspect.build_accepted(&mut sample).is_some() {
                    let sample = introspect.with_shapes(&sample).unwrap_or(sample);
                    graphs.push(introspect.written_graph(&sample).0);
                }
            }
        }
        graphs
    }

    /// Returns the facts about the operator; `None` if no sample is found that it accepts.
    #[must_use]
    pub fn operator_info(&self) -> Option<OperatorInfo> {
        let version = *self.versions().last()?;
        let (introspect, minimal) = (1..=4).find_map(|outputs| {
            let introspect = Probe { definition: self, version, outputs };
            introspect.minimal_sample().map(|sample| (introspect, sample))
        })?;
        // The inputs of a node that is always rewritten are not checked.
        let mut maximal =
            if self.is_always_rewritten { minimal.clone() } else { introspect.maximal_sample(&minimal) };
        let variadic = maximal.captures == 0 && maximal.inputs.len() == MAX_INPUTS;
        let mut typed = maximal.inputs.len() - maximal.captures;
        if variadic {
            // Two inputs represent any number of inputs.
            maximal.inputs.truncate(minimal.inputs.len().max(1) + 1);
            typed = minimal.inputs.len().max(1);
        }
        let input_count = maximal.inputs.len() - maximal.captures;
        let types: Vec<Vec<DType>> = (0..typed).map(|k| introspect.accepted_types(&maximal, k)).collect();
        let (graph, _) = introspect.build_accepted(&mut maximal.clone())?;
        let runs = if self.is_always_rewritten {
            Runs::Decomposition
        } else if self.is_elementwise_row {
            Runs::Row
        } else if !self.has_instructions {
            Runs::Decomposition
        } else {
            match build(&graph, &graph.nodes[0]).ok()?.placement() {
                Placement::Program => Runs::Instructions,
                Placement::Composition => Runs::Decomposition,
                Placement::Host(_) => Runs::Host,
                Placement::If { .. } | Placement::Repeat(_) | Placement::Yield => Runs::ControlFlow,
            }
        };
        let mut differentiable = introspect.differentiable_inputs(&minimal, &maximal).unwrap_or_default();
        // Some inputs only affect further outputs.
        let wider =
            (introspect.outputs + 1..=MAX_OUTPUTS).rev().map(|outputs| Probe { outputs, ..introspect });
        let wider = wider.into_iter().find(|wider| wider.build_accepted(&mut maximal.clone()).is_some());
        if let Some(wider) = wider {
            differentiable.extend(wider.differentiable_inputs(&minimal, &maximal).unwrap_or_default());
            differentiable.sort_unstable();
            differentiable.dedup();
        }
        let floats =
            |k: &usize| types.get(*k).is_some_and(|types| types.iter().any(|dtype| dtype.is_float()));
        let float_inputs: Vec<usize> = (0..input_count).filter(floats).collect();
        let gradient = if differentiable.iter().any(|&k| k >= input_count)
            || (!differentiable.is_empty() && (variadic || differentiable == float_inputs))
        {
            Gradient::Full
        } else if !differentiable.is_empty() {
            Gradient::Partial(differentiable)
        } else if self.traits.has(Traits::PASSES_QUANTIZED) {
            Gradient::Full
        } else if !float_inputs.is_empty() && (self.is_composition)(&graph.nodes[0]) {
            // The gradient of the decomposition; the search did not find suitable shapes.
            Gradient::Full
        } else if self.traits.has(Traits::ZERO_DERIVATIVE) {
            Gradient::Zero
        } else {
            Gradient::None
        };
        Some(OperatorInfo { runs, gradient, types, variadic })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;

    fn info_of(name: &str) -> OperatorInfo {
        Registry::standard().find("", name).and_then(Definition::operator_info).expect("it is known")
    }

    #[test]
    fn every_operator_has_info() {
        let definitions = Registry::standard().file_definitions();
        let unknown: Vec<&str> = definitions
            .iter()
            .filter(|definition| definition.operator_info().is_none())
            .map(|definition| definition.name)
            .collect();
        assert!(unknown.is_empty(), "give a sample of {unknown:?}");
    }

    #[test]
    fn operator_info_is_correct() {
        let floats = vec![DType::F32, DType::F16, DType::F64, DType::BF16];
        let conv = info_of("Conv");
        assert_eq!((conv.runs, conv.gradient), (Runs::Instructions, Gradient::Full));
        assert_eq!(conv.types, vec![floats.clone(); 3]);
        let gather = info_of("Gather");
        assert_eq!(gather.types, [DType::ALL.to_vec(), vec![DType::I32, DType::I64]]);
        assert_eq!(info_of("Floor").gradient, Gradient::Zero);
        assert_eq!(info_of("Shape").gradient, Gradient::None);
        assert_eq!(info_of("Dropout").gradient, Gradient::Partial(vec![0]));
        let sum = info_of("Sum");
        assert_eq!((sum.runs, sum.variadic, sum.types), (Runs::Row, true, vec![floats]));
        assert_eq!(info_of("SwiGLU").runs, Runs::Decomposition);
        assert_eq!(info_of("Scatter").runs, Runs::Decomposition);
        assert_eq!(info_of("NonZero").runs, Runs::Host);
        for name in ["If", "Loop", "Scan"] {
            assert_eq!(
                (info_of(name).runs, info_of(name).gradient),
                (Runs::ControlFlow, Gradient::Full),
                "{name}"
            );
        }
    }
}
