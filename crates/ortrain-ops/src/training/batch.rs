//! Fixed batch sizes inside of a model: constant shapes that contain the batch size.

use ortrain_graph::{DType, Graph, Node, Tensor, ValueId, tensor_to_proto};
use ortrain_onnx::{AttributeProto, AttributeType, NodeProto, TensorProto};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::class::{Class, Traits};
use crate::passes::node::{fold_node, forget_shapes, infer_node};
use crate::registry::{class_of, has_traits};

/// Replacement of a constant that fixes the batch size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenShape {
    /// This shape, in which the size of the batch is inferred from the reshaped value.
    Shape(Vec<i64>),
    /// Shape of the batch size, followed by these sizes.
    BatchThen(Vec<i64>),
    /// First slice of the constant along this axis: all slices are equal, and one broadcasts to any batch.
    FirstSlice(usize),
    /// First slice of the constant along its first axis, repeated for each row of the batch. The shape is the batch
    /// size, followed by these sizes.
    RepeatedRows(Vec<i64>),
    /// No replacement: the input is removed, and defaults to zero.
    Omitted,
}

/// Input of a node that fixes the batch size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedBatch {
    /// First output of the node, which identifies the node.
    pub output: String,
    /// Label of the node in messages.
    pub node: String,
    /// Index of the input.
    pub input: usize,
    /// Replacement of the input.
    pub open: OpenShape,
}

/// Axis that contains the batch merged with other axes: `outer` elements before the batch, `inner` elements after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MergedBatch {
    outer: usize,
    inner: usize,
}

/// Axis that contains only the batch.
const BATCH_ONLY: MergedBatch = MergedBatch { outer: 1, inner: 1 };

/// Returns the nodes of a graph for one batch size that fix the size where they could leave it open. `other` is the
/// same graph for batches of `size`. Both graphs get inferred types and folded constants.
#[must_use]
pub fn find_fixed_batches(
    graph: &mut Graph,
    other: &mut Graph,
    batch: usize,
    size: usize,
) -> Vec<FixedBatch> {
    let mut graph_inputs: FxHashSet<ValueId> = graph.inputs.iter().copied().collect();
    let mut shares = FxHashMap::default();
    let mut fixed = Vec::new();
    for graph in [&mut *graph, &mut *other] {
        forget_shapes(graph);
    }
    // Errors for the other size are reported when all nodes are open.
    let known =
        |graph: &mut Graph, index: usize| infer_node(graph, index).and_then(|()| fold_node(graph, index));
    for index in 0..graph.nodes.len() {
        let _ = known(graph, index);
        let node = &graph.nodes[index];
        let both = NodeInBoth { graph, other, node, batch, size, input_dependent: &graph_inputs };
        let mut open: Vec<(usize, OpenShape)> = both.open_reshape(&mut shares).into_iter().collect();
        open.extend(both.open_shapes());
        open.extend(both.open_constants());
        open.extend(both.open_concat_inputs());
        if node.present_inputs().any(|id| graph_inputs.contains(&id)) || !open.is_empty() {
            graph_inputs.extend(node.present_outputs());
        }
        for (input, open) in open {
            let both = NodeInBoth { graph, other, node, batch, size, input_dependent: &graph_inputs };
            let constant = match &open {
                OpenShape::Shape(shape) => Some(Tensor::i64(&[shape.len()], shape)),
                OpenShape::BatchThen(rest) => {
                    Some(Tensor::i64(&[rest.len() + 1], &[&[size as i64], &rest[..]].concat()))
                }
                OpenShape::FirstSlice(axis) => {
                    both.content(input).and_then(|constant| first_slice(constant, *axis))
                }
                OpenShape::RepeatedRows(rest) => {
                    both.content(input).and_then(|constant| repeat_first_slice(constant, size, rest))
                }
                OpenShape::Omitted => None,
            };
            other.nodes[index].inputs[input] = constant.map(|tensor| other.add_constant("open", tensor));
            if let Some(output) = node.present_outputs().next() {
                let output = graph.name_of(output).to_owned();
                fixed.push(FixedBatch { output, node: graph.node_label(node), input, open });
            }
        }
        let _ = known(other, index);
    }
    fixed
}

/// Node in the graphs for two batch sizes.
struct NodeInBoth<'a> {
    graph: &'a Graph,
    other: &'a Graph,
    node: &'a Node,
    batch: usize,
    size: usize,
    /// Values that depend on inputs of the model.
    input_dependent: &'a FxHashSet<ValueId>,
}

impl NodeInBoth<'_> {
    fn input(&self, k: usize) -> Option<ValueId> {
        self.node.inputs.get(k).copied().flatten()
    }

    fn depends_on_input(&self, k: usize) -> bool {
        self.input(k).is_some_and(|id| self.input_dependent.contains(&id))
    }

    /// Returns the content of an input that depends on no input of the model.
    fn content(&self, k: usize) -> Option<&Tensor> {
        let id = self.input(k).filter(|id| !self.input_dependent.contains(id))?;
        self.graph.value(id).content()
    }

    /// Returns the sizes in an input, if they are constant.
    fn constant_sizes(&self, k: usize) -> Option<Vec<i64>> {
        self.content(k)?.to_i64()
    }

    /// Returns the open shape of a Reshape, if the node fixes the batch size; records axes that merge the batch with
    /// others.
    fn open_reshape(&self, shares: &mut FxHashMap<usize, MergedBatch>) -> Option<(usize, OpenShape)> {
        let merges = matches!(class_of(self.node), Class::Reshape | Class::Flatten);
        if !merges || !self.depends_on_input(0) {
            return None;
        }
        let sizes = self.constant_sizes(1);
        let zero_is_a_size = self.node.attrs.int("allowzero").ok().flatten().unwrap_or(0) != 0;
        let before = known_dims(self.graph, self.input(0));
        let after = known_dims(self.graph, self.node.present_outputs().next());
        let (Some(before), Some(after), Some(grown)) = (before, after, known_dims(self.other, self.input(0)))
        else {
            return self.open_leading_reshape(sizes?, zero_is_a_size);
        };
        let mut axes = (0..before.len()).filter(|&axis| grown.get(axis) != Some(&before[axis]));
        let (axis, None) = (axes.next()?, axes.next()) else { return None };
        let product = |a: usize, b: usize| a as u128 * b as u128;
        if before.len() != grown.len() || product(before[axis], self.size) != product(grown[axis], self.batch)
        {
            return None;
        }
        let share = if before[axis] == self.batch { BATCH_ONLY } else { *shares.get(&before[axis])? };
        let outer = before[..axis].iter().product::<usize>() * share.outer;
        let hint = sizes.as_ref().and_then(|listed| listed.iter().position(|&size| size == -1));
        let (batch_position, share) = batch_axis(&after, outer, self.batch, hint)?;
        if share != BATCH_ONLY {
            shares.insert(after[batch_position], share);
        }
        let listed_sizes = sizes?;
        let is_unchanged = |k: usize| grown.get(k) == before.get(k);
        let follows = match listed_sizes[batch_position] {
            0 => !zero_is_a_size && !is_unchanged(batch_position),
            -1 => (0..listed_sizes.len()).all(|k| listed_sizes[k] != 0 || zero_is_a_size || is_unchanged(k)),
            _ => false,
        };
        let open = |k: usize| if k == batch_position { -1 } else { after[k] as i64 };
        (!follows).then(|| (1, OpenShape::Shape((0..after.len()).map(open).collect())))
    }

    /// Returns the open shape if other sizes are unknown: only the first axis may be the batch.
    fn open_leading_reshape(&self, mut sizes: Vec<i64>, zero_is_a_size: bool) -> Option<(usize, OpenShape)> {
        if sizes.first() != Some(&(self.batch as i64)) {
            return None;
        }
        if !sizes.contains(&-1) {
            sizes[0] = -1;
        } else if self.has_batch() && !zero_is_a_size {
            sizes[0] = 0;
        } else {
            return None;
        }
        Some((1, OpenShape::Shape(sizes)))
    }

    fn makes_integers(&self) -> bool {
        let dtype = self.node.present_outputs().next().and_then(|id| self.graph.value(id).ty.dtype());
        dtype.is_some_and(DType::is_integer)
    }

    /// Returns true if the first axis of the first input is the batch.
    fn has_batch(&self) -> bool {
        let shape = self.input(0).and_then(|id| self.graph.value(id).ty.shape());
        self.depends_on_input(0)
            && shape.is_some_and(|shape| shape.rank() > 0 && shape[0].known() == Some(self.batch))
    }

    /// Returns the inputs of other nodes that fix the batch size, with their replacements.
    fn open_shapes(&self) -> Vec<(usize, OpenShape)> {
        let sizes =
            |k: usize| self.constant_sizes(k).filter(|sizes| sizes.first() == Some(&(self.batch as i64)));
        match class_of(self.node) {
            Class::Expand => match sizes(1) {
                Some(shape) if self.batch > 1 || !self.has_batch() => {
                    let repeated = self.content(0).is_some_and(|data| {
                        data.dims().len() == shape.len()
                            && data.dims()[0] == self.batch
                            && has_equal_slices(data, 0)
                    });
                    let data = (self.batch > 1 && repeated).then_some((0, OpenShape::FirstSlice(0)));
                    let shape = (1, OpenShape::BatchThen(shape[1..].to_vec()));
                    data.into_iter().chain([shape]).collect()
                }
                Some(mut shape) => {
                    // A size of one broadcasts to any batch.
                    shape[0] = 1;
                    vec![(1, OpenShape::Shape(shape))]
                }
                None => Vec::new(),
            },
            // An integer vector is a vector of sizes: its length may equal the batch size by chance.
            Class::Fill if self.batch > 1 => match sizes(0) {
                Some(shape) if shape.len() > 1 || !self.makes_integers() => {
                    vec![(0, OpenShape::BatchThen(shape[1..].to_vec()))]
                }
                _ => Vec::new(),
            },
            // Initial states of zeros, [directions, batch, width], are the default.
            Class::Recurrent { states } => (states.iter().copied())
                .filter(|&k| {
                    let content = self.input(k).and_then(|id| self.graph.value(id).content());
                    content.is_some_and(|state| {
                        state.dims().get(1) == Some(&self.batch)
                            && state.to_f64().iter().all(|&element| element == 0.0)
                    })
                })
                .map(|k| (k, OpenShape::Omitted))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the constants that repeat the same slice for each row of the batch, and broadcast with a value that
    /// depends on it.
    fn open_constants(&self) -> Vec<(usize, OpenShape)> {
        let expands = class_of(self.node) == Class::Expand;
        if self.batch == 1 || !(expands || has_traits(self.node, Traits::BROADCASTS)) {
            return Vec::new();
        }
        // Shapes to which constants are broadcast, for both sizes.
        let shape = |graph: &Graph, k: usize| {
            if !expands {
                return known_dims(graph, self.input(k));
            }
            let sizes = graph.value(self.input(k)?).content()?.to_i64()?;
            sizes.iter().map(|&size| usize::try_from(size).ok()).collect()
        };
        let shape_pairs: Vec<(Vec<usize>, Vec<usize>)> = (0..self.node.inputs.len())
            .filter(|&k| self.depends_on_input(k))
            .filter_map(|k| Some((shape(self.graph, k)?, shape(self.other, k)?)))
            .collect();
        let opened = (0..self.node.inputs.len()).filter_map(|k| {
            let constant = self.content(k)?;
            let axis = (0..constant.dims().len()).find(|&axis| {
                let trailing_axes = constant.dims().len() - axis;
                let grows = shape_pairs.iter().any(|(before_dims, after_dims)| {
                    before_dims.len() == after_dims.len()
                        && before_dims.len() >= trailing_axes
                        && before_dims[before_dims.len() - trailing_axes] == self.batch
                        && after_dims[after_dims.len() - trailing_axes] == self.size
                });
                grows && constant.dims()[axis] == self.batch && has_equal_slices(constant, axis)
            })?;
            Some((k, OpenShape::FirstSlice(axis)))
        });
        opened.collect()
    }

    /// Returns the constants with equal rows for the batch that a Concat joins to a value that depends on it (the class
    /// token).
    fn open_concat_inputs(&self) -> Vec<(usize, OpenShape)> {
        let axis = self.node.attrs.int("axis").ok().flatten().unwrap_or(0);
        if class_of(self.node) != Class::Join || axis == 0 {
            return Vec::new();
        }
        let grows = |k: usize| {
            let first = |graph| known_dims(graph, self.input(k)).and_then(|dims| dims.first().copied());
            self.depends_on_input(k)
                && first(self.graph) == Some(self.batch)
                && first(self.other) == Some(self.size)
        };
        let inputs = 0..self.node.inputs.len();
        if !inputs.clone().any(grows) {
            return Vec::new();
        }
        let opened = inputs.filter_map(|k| {
            let constant = self.content(k)?;
            let (&first, rest) = constant.dims().split_first()?;
            let rest = rest.iter().map(|&size| size as i64).collect();
            (first == self.batch && has_equal_slices(constant, 0))
                .then_some((k, OpenShape::RepeatedRows(rest)))
        });
        opened.collect()
    }
}

/// Repeats the first slice of a tensor along its first axis `size` times.
fn repeat_first_slice(tensor: &Tensor, size: usize, rest: &[i64]) -> Option<Tensor> {
    let part = first_slice(tensor, 0)?;
    let dims = std::iter::once(Some(size)).chain(rest.iter().map(|&size| usize::try_from(size).ok()));
    Tensor::new(tensor.dtype(), dims.collect::<Option<_>>()?, part.data().repeat(size).into()).ok()
}

/// Returns the sizes of a value, if all are known.
fn known_dims(graph: &Graph, id: Option<ValueId>) -> Option<Vec<usize>> {
    graph.value(id?).ty.shape()?.concrete()
}

/// Returns the number of blocks before an axis of a tensor, and the bytes of each slice along the axis.
fn blocks_and_slice_bytes(tensor: &Tensor, axis: usize) -> (usize, usize) {
    let blocks = tensor.dims()[..axis].iter().product::<usize>().max(1);
    let pieces = blocks * tensor.dims()[axis];
    (blocks, tensor.data().len() / pieces.max(1))
}

/// Returns true if all slices of a tensor along an axis are equal.
fn has_equal_slices(tensor: &Tensor, axis: usize) -> bool {
    let (blocks, piece) = blocks_and_slice_bytes(tensor, axis);
    if piece == 0 {
        return false;
    }
    let block = tensor.data().len() / blocks;
    tensor.data().chunks(block).all(|block| block.chunks(piece).all(|part| part == &block[..piece]))
}

/// Returns the first slice of a tensor along an axis.
fn first_slice(tensor: &Tensor, axis: usize) -> Option<Tensor> {
    let (blocks, piece) = blocks_and_slice_bytes(tensor, axis);
    let block = tensor.data().len() / blocks;
    let bytes: Vec<u8> =
        tensor.data().chunks(block.max(1)).flat_map(|block| &block[..piece]).copied().collect();
    let mut dims = tensor.dims().to_vec();
    dims[axis] = 1;
    Tensor::new(tensor.dtype(), dims, bytes.into()).ok()
}

/// Builds a node with its constant that computes the first slice of a value along an axis, named `result`.
#[must_use]
pub fn first_slice_nodes(value: &str, axis: usize, result: &str) -> (NodeProto, TensorProto) {
    let zero = format!("{result}/zero");
    let node = NodeProto {
        op_type: "Gather".into(),
        name: result.into(),
        input: vec![value.to_owned(), zero.clone()],
        output: vec![result.to_owned()],
        attribute: vec![axis_attribute(axis)],
        ..NodeProto::default()
    };
    (node, tensor_to_proto(&zero, &Tensor::i64(&[1], &[0])))
}

fn axis_attribute(axis: usize) -> AttributeProto {
    AttributeProto {
        name: "axis".into(),
        r#type: AttributeType::Int as i32,
        i: axis as i64,
        ..AttributeProto::default()
    }
}

/// Returns the axis of a shape that contains the batch, and the sizes merged with it. `outer` elements precede the
/// batch; `hint` is the axis with an inferred size.
fn batch_axis(
    dims: &[usize],
    outer: usize,
    batch: usize,
    hint: Option<usize>,
) -> Option<(usize, MergedBatch)> {
    let mut candidates = Vec::new();
    let mut before = 1;
    for (axis, &size) in dims.iter().enumerate() {
        if before != 0 && outer.is_multiple_of(before) {
            let front = outer / before;
            if size != 0 && front != 0 && size.is_multiple_of(front * batch) {
                candidates.push((axis, MergedBatch { outer: front, inner: size / (front * batch) }));
            }
        }
        before *= size;
    }
    // A batch of one could be part of several axes. In a matrix it is part of the rows. Otherwise it is merged with the
    // axes after it (the heads of an attention).
    let exact = candidates.iter().find(|(_, share)| *share == BATCH_ONLY);
    let hinted = || candidates.iter().find(|(axis, _)| Some(*axis) == hint);
    let usual = || if dims.len() == 2 { candidates.first() } else { candidates.last() };
    exact.or_else(hinted).or_else(usual).copied()
}

/// Builds nodes with their constants that compute a shape named `result`: the size of the first axis of a value,
/// followed by `rest`.
#[must_use]
pub fn batch_shape_nodes(value: &str, rest: &[i64], result: &str) -> (Vec<NodeProto>, Vec<TensorProto>) {
    let named = |suffix: &str| format!("{result}/{suffix}");
    let node = |op: &str, inputs: Vec<String>, output: String| NodeProto {
        op_type: op.into(),
        name: output.clone(),
        input: inputs,
        output: vec![output],
        ..NodeProto::default()
    };
    let concat = node("Concat", vec![named("first"), named("rest")], result.to_owned());
    let nodes = vec![
        node("Shape", vec![value.to_owned()], named("sizes")),
        node("Gather", vec![named("sizes"), named("zero")], named("first")),
        NodeProto { attribute: vec![axis_attribute(0)], ..concat },
    ];
    let constants = vec![
        tensor_to_proto(&named("zero"), &Tensor::i64(&[1], &[0])),
        tensor_to_proto(&named("rest"), &Tensor::i64(&[rest.len()], rest)),
    ];
    (nodes, constants)
}
