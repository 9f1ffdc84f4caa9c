//! Context of an operator during inference of types and shapes.

use ortrain_graph::{DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::{Error, OpError};

/// Symbol of a size of -1, which Reshape infers. Files do not use this name for an axis.
pub(crate) const OPEN_SIZE: &str = "<open>";

/// Converts numbers to sizes. Returns `None` if a number is not a size.
pub(crate) fn to_sizes(numbers: Vec<i64>) -> Option<Vec<Dim>> {
    let size = |number: i64| match number {
        -1 => Some(Dim::symbol(OPEN_SIZE)),
        _ => usize::try_from(number).ok().map(Dim::Known),
    };
    numbers.into_iter().map(size).collect()
}

/// Inference result for one output.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inferred {
    pub(crate) ty: ValueType,
    pub(crate) sizes: Option<Vec<Dim>>,
    pub(crate) content: Option<Tensor>,
}

/// Passes that operators apply to their subgraphs. Passes call operators, so the caller of an operator hands them over.
#[derive(Clone, Copy)]
pub(crate) struct SubgraphPasses {
    /// Infers the types of a subgraph with typed inputs, and folds constants. Returns true if a declared shape or a
    /// branch contradicts the inferred types.
    pub(crate) infer: fn(&mut Graph) -> Result<bool, Error>,
    /// Forgets the declared shapes of all values of a subgraph except its inputs.
    pub(crate) forget_shapes: fn(&mut Graph),
}

/// One node during inference of types and shapes. Shapes may be symbolic or unknown.
pub struct Infer<'a> {
    /// Passes for subgraphs of the node.
    pub(crate) passes: SubgraphPasses,
    graph: &'a Graph,
    node: &'a Node,
    pub(crate) outputs: Vec<Inferred>,
    /// Subgraphs with inferred types, by attribute.
    pub(crate) subgraphs: Vec<(&'static str, Graph)>,
    /// True if a declared shape or a branch contradicts an inferred shape.
    pub(crate) contradicts: bool,
}

/// Returns the number of elements of a shape. Returns `None` if the number is unknown or overflows.
pub(crate) fn element_count(shape: &Shape) -> Option<usize> {
    shape.iter().try_fold(1_usize, |count, dim| count.checked_mul(dim.known()?))
}

impl<'a> Infer<'a> {
    pub(crate) fn new(graph: &'a Graph, node: &'a Node, passes: SubgraphPasses) -> Infer<'a> {
        Infer {
            passes,
            graph,
            node,
            outputs: vec![Inferred::default(); node.outputs.len()],
            subgraphs: Vec::new(),
            contradicts: false,
        }
    }

    /// Returns the node.
    #[must_use]
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// Returns the graph, with types inferred up to the node.
    pub(crate) fn graph(&self) -> &'a Graph {
        self.graph
    }

    /// Returns the node that produces input `k`, and the index of its output.
    #[must_use]
    pub fn producer_of(&self, k: usize) -> Option<(&'a Node, usize)> {
        let id = self.node.inputs.get(k).copied().flatten()?;
        let port_of = |node: &'a Node| Some((node, node.outputs.iter().position(|&port| port == Some(id))?));
        self.graph.nodes.iter().find_map(port_of)
    }

    /// Returns the shape of any value, if at least its rank is known.
    #[must_use]
    pub fn shape_of(&self, value: ValueId) -> Option<&'a Shape> {
        self.graph.value(value).ty.shape()
    }

    /// Returns the shape that the graph declares for output `k`, if any.
    #[must_use]
    pub fn declared_shape(&self, k: usize) -> Option<&'a Shape> {
        self.shape_of(self.node.outputs.get(k).copied().flatten()?)
    }

    /// Checks the number of inputs and outputs.
    ///
    /// # Errors
    /// Returns an error if there are too few or too many, or if a required input is missing.
    pub fn check_arity(&self, min_inputs: usize, max_inputs: usize, outputs: usize) -> Result<(), OpError> {
        let actual = self.node.inputs.len();
        if actual < min_inputs || actual > max_inputs {
            let expected = if min_inputs == max_inputs {
                min_inputs.to_string()
            } else {
                format!("{min_inputs} to {max_inputs}")
            };
            return Err(OpError::invalid(format!("expected {expected} inputs, got {actual}")));
        }
        if let Some(missing) = self.node.inputs[..min_inputs].iter().position(Option::is_none) {
            return Err(OpError::invalid(format!("input {missing} is missing")));
        }
        if self.node.outputs.len() > outputs {
            let output_count = self.node.outputs.len();
            return Err(OpError::invalid(format!("expected at most {outputs} outputs, got {output_count}")));
        }
        Ok(())
    }

    /// Returns true if input `k` is present.
    #[must_use]
    pub fn has_input(&self, k: usize) -> bool {
        self.node.inputs.get(k).copied().flatten().is_some()
    }

    /// Returns true if output `k` is used.
    #[must_use]
    pub fn has_output(&self, k: usize) -> bool {
        self.node.outputs.get(k).copied().flatten().is_some()
    }

    /// Returns the type of input `k`.
    #[must_use]
    pub fn ty(&self, k: usize) -> &'a ValueType {
        match self.node.inputs.get(k).copied().flatten() {
            Some(id) => &self.graph.value(id).ty,
            None => &ValueType::Unknown,
        }
    }

    /// Returns the element type of input `k`, which must be a tensor.
    ///
    /// # Errors
    /// Returns an error if the type is unknown or a sequence.
    pub fn dtype(&self, k: usize) -> Result<DType, OpError> {
        match self.ty(k) {
            ValueType::Tensor(dtype, _) => Ok(*dtype),
            ValueType::Sequence(_) => {
                Err(OpError::invalid(format!("input {k} is a sequence, expected a tensor")))
            }
            ValueType::Unknown => {
                Err(OpError::invalid(format!("the type of input {k} is not declared anywhere")))
            }
        }
    }

    /// Returns the element type of input `k`, which must satisfy `accepts`.
    ///
    /// # Errors
    /// Returns an error for another element type.
    pub fn expect_dtype(
        &self,
        k: usize,
        expected: &str,
        accepts: impl Fn(DType) -> bool,
    ) -> Result<DType, OpError> {
        let dtype = self.dtype(k)?;
        if accepts(dtype) {
            return Ok(dtype);
        }
        Err(OpError::invalid(format!("input {k} is of type {dtype}, expected {expected}")))
    }

    /// Checks that all `inputs` that are present have one element type, and returns this type.
    ///
    /// # Errors
    /// Returns an error if the types differ.
    pub fn expect_same_dtype(&self, inputs: impl IntoIterator<Item = usize>) -> Result<DType, OpError> {
        let mut first: Option<(usize, DType)> = None;
        for k in inputs {
            if !self.has_input(k) {
                continue;
            }
            let dtype = self.dtype(k)?;
            match first {
                None => first = Some((k, dtype)),
                Some((other, expected)) if expected != dtype => {
                    return Err(OpError::invalid(format!(
                        "input {other} is of type {expected}, but input {k} is of type {dtype}; insert a Cast"
                    )));
                }
                Some(_) => {}
            }
        }
        first.map(|(_, dtype)| dtype).ok_or_else(|| OpError::invalid("it has no inputs"))
    }

    /// Returns the shape of input `k`, if at least its rank is known.
    #[must_use]
    pub fn shape(&self, k: usize) -> Option<&'a Shape> {
        self.ty(k).shape()
    }

    /// Returns the content of input `k`, if it is constant.
    #[must_use]
    pub fn constant(&self, k: usize) -> Option<&'a Tensor> {
        self.graph.value(self.node.inputs.get(k).copied().flatten()?).content()
    }

    /// Returns the integers of input `k`, if they are constant.
    #[must_use]
    pub fn ints(&self, k: usize) -> Option<Vec<i64>> {
        match self.constant(k) {
            Some(tensor) => tensor.to_i64(),
            None => self.sizes(k)?.iter().map(|dim| dim.known().map(|size| size as i64)).collect(),
        }
    }

    /// Returns the elements of input `k` as sizes, if they are constant or computed from shapes. An element -1 becomes
    /// an open size. Other negative numbers are not sizes.
    #[must_use]
    pub fn sizes(&self, k: usize) -> Option<Vec<Dim>> {
        let value = self.graph.value(self.node.inputs.get(k).copied().flatten()?);
        if let Some(sizes) = &value.sizes {
            return Some(sizes.clone());
        }
        to_sizes(value.content()?.to_i64()?)
    }

    /// Sets the type of output `k`. `None`: the rank is unknown.
    pub fn set_output(&mut self, k: usize, dtype: DType, shape: Option<Shape>) {
        if let Some(entry) = self.outputs.get_mut(k) {
            entry.ty = ValueType::Tensor(dtype, shape);
        }
    }

    /// Sets the content of output `k`, which depends on no input.
    pub fn set_output_content(&mut self, k: usize, content: &Tensor) {
        if let Some(entry) = self.outputs.get_mut(k) {
            entry.content = Some(content.clone());
        }
    }

    /// Sets the type of output `k` to any type.
    pub fn set_output_type(&mut self, k: usize, ty: ValueType) {
        if let Some(entry) = self.outputs.get_mut(k) {
            entry.ty = ty;
        }
    }

    /// Sets the elements of output `k`, if they are sizes. Its type must be set separately.
    pub fn set_output_sizes(&mut self, k: usize, sizes: Option<Vec<Dim>>) {
        if let Some(entry) = self.outputs.get_mut(k) {
            entry.sizes = sizes;
        }
    }

    /// Replaces the subgraph in this attribute by one with inferred types.
    pub fn set_output_subgraph(&mut self, attribute: &'static str, graph: Graph) {
        self.subgraphs.push((attribute, graph));
    }

    /// Returns an unknown size: a symbol named after output `k` and the axis.
    #[must_use]
    pub fn unknown_dim(&self, k: usize, axis: usize) -> Dim {
        let name = self.node.outputs.get(k).copied().flatten().map_or("?", |id| self.graph.name_of(id));
        Dim::symbol(&format!("{name}.{axis}"))
    }

    /// Returns a shape of unknown sizes for output `k`.
    #[must_use]
    pub fn unknown_shape(&self, k: usize, rank: usize) -> Shape {
        // A rank may come from a file. One axis above the limit suffices: the check of the shape then reports an error.
        (0..rank.min(MAX_AXES + 1)).map(|axis| self.unknown_dim(k, axis)).collect()
    }

    /// Returns the shape that `inputs` broadcast to, if all ranks are known.
    ///
    /// # Errors
    /// Returns an error if sizes contradict each other.
    pub fn broadcast(&self, inputs: impl IntoIterator<Item = usize>) -> Result<Option<Shape>, OpError> {
        let mut result = Shape::scalar();
        for k in inputs {
            let Some(shape) = self.shape(k) else { return Ok(None) };
            result = broadcast(&result, shape)?;
        }
        Ok(Some(result))
    }
}

/// Returns the shape that two shapes broadcast to (ONNX, "multidirectional broadcasting").
///
/// # Errors
/// Returns an error if two known sizes differ and neither is 1.
pub fn broadcast(a: &Shape, b: &Shape) -> Result<Shape, OpError> {
    let rank = a.rank().max(b.rank());
    let at = |shape: &Shape, axis: usize| {
        let lead = rank - shape.rank();
        if axis < lead { Dim::Known(1) } else { shape[axis - lead].clone() }
    };
    (0..rank)
        .map(|axis| match (at(a, axis), at(b, axis)) {
            (x, y) if x == y => Ok(x),
            (x, y) if y.is_one() => Ok(x),
            (x, y) if x.is_one() => Ok(y),
            (Dim::Known(x), Dim::Known(y)) => Err(OpError::invalid(format!(
                "shapes {a} and {b} do not broadcast: axis {axis} is {x} in one and {y} in the other"
            ))),
            // A known size other than 1 wins: the symbol is either equal to it or 1.
            (Dim::Known(x), Dim::Symbol(_)) | (Dim::Symbol(_), Dim::Known(x)) => Ok(Dim::Known(x)),
            (Dim::Symbol(x), Dim::Symbol(y)) => Ok(Dim::broadcast_of(&x, &y)),
        })
        .collect()
}

/// Converts an axis that may count from the end to an axis that counts from the front.
///
/// # Errors
/// Returns an error if the axis is outside `-rank..rank`.
pub fn normalize_axis(axis: i64, rank: usize) -> Result<usize, OpError> {
    let from_front = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    usize::try_from(from_front)
        .ok()
        .filter(|&axis| axis < rank)
        .ok_or_else(|| OpError::invalid(format!("axis {axis} is out of range for rank {rank}")))
}

/// Converts axes to distinct axes that count from the front, in ascending order.
///
/// # Errors
/// Returns an error if an axis is out of range or occurs twice.
pub fn normalize_axes(axes: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
    let mut normal = axes.iter().map(|&axis| normalize_axis(axis, rank)).collect::<Result<Vec<_>, _>>()?;
    normal.sort_unstable();
    if normal.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(OpError::invalid(format!("axes {axes:?} name an axis of rank {rank} twice")));
    }
    Ok(normal)
}

/// Maximum number of axes of a tensor, as in NumPy and onnxruntime. An expression supports fewer than 256 coordinates.
pub(crate) const MAX_AXES: usize = 64;
