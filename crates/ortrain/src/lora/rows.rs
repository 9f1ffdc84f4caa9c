//! Weights of adapters for each row of a batch, as an input of the model.

use ortrain_graph::{DType, Dim, Shape, ValueType};
use ortrain_onnx::ModelProto;
use ortrain_ops::training::{
    AdaptedLayer, AdapterTarget, LayerKind, RowAxis, RowForm, adapted_layers, add_row_columns, weigh_rows,
};

use super::activate::names;
use super::notes::set_rows;
use super::{Prepared, adapter_error, no_adapter_error};
use crate::model::graph::opset_of;
use crate::{Error, ModelSource, Result};

/// Input with the weights.
const INPUT: &str = "adapter_weights";
/// Size of the first axis of the input: the number of rows, or 1.
const ROWS: &str = "adapter_rows";
/// First version of `ai.onnx` with the operator that repeats weights.
const MIN_OPSET: i64 = 8;

/// Returns a model with the input `adapter_weights`: the factor of each adapter for each row of the batch.
///
/// The input has the shape `[rows, adapters]`, or `[1, adapters]` for all rows, and the type float32. `adapters` are the
/// names of its columns; by default all adapters in alphabetical order. The rows are the first axis
/// of the first input of the model. A layer may merge rows and positions into one axis, if the positions of a row follow
/// each other.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, with_row_adapters};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// let model = with_row_adapters(ModelSource::from_proto(&model)?, &[])?;
/// assert_eq!(model.graph.unwrap().input.last().unwrap().name, "adapter_weights");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, has no adapter of a name or a value with the name of the input, or if an adapter has
/// magnitudes (DoRA). If the result of a layer has no axis with the rows.
pub fn with_row_adapters(model: ModelSource, adapters: &[String]) -> Result<ModelProto> {
    let mut prepared = Prepared::new(model)?;
    let opset = opset_of(&prepared.model.proto);
    if opset < MIN_OPSET {
        return Err(Error::Argument(format!(
            "adapters for each row need opset {MIN_OPSET}, and {} has opset {opset}; convert the model first",
            prepared.label
        )));
    }
    if prepared.typed.find(INPUT).is_some() {
        return Err(Error::Argument(format!("{} has a value {INPUT:?} already", prepared.label)));
    }
    let layers = adapted_layers(prepared.graph()?);
    let columns = if adapters.is_empty() { names(&layers) } else { adapters.to_vec() };
    for (at, name) in columns.iter().enumerate() {
        if !layers.iter().any(|layer| layer.adapter == *name) {
            return Err(no_adapter_error(&prepared.label, name, &layers));
        }
        if columns[..at].contains(name) {
            return Err(Error::Argument(format!("the adapter {name:?} has two columns; name it once")));
        }
    }
    if columns.is_empty() {
        return Err(Error::Argument(format!("{} has no adapters; add one first", prepared.label)));
    }
    let rows = rows_of(&prepared)?;
    let targets = prepared.targets()?;
    for layer in layers.iter().filter(|layer| columns.contains(&layer.adapter)) {
        if prepared.magnitude(&layer.weight, &layer.adapter).is_some() {
            return Err(Error::Argument(format!(
                "the adapter {:?} has magnitudes (DoRA), which have no weight for a row",
                layer.adapter
            )));
        }
        let form = form_of(&prepared, &targets, layer, &rows)?;
        weigh_rows(prepared.graph()?, layer, INPUT, &form).map_err(adapter_error)?;
    }
    add_row_columns(prepared.graph()?, INPUT, &columns);
    let shape = [Dim::symbol(ROWS), Dim::Known(columns.len())].into_iter().collect();
    let input = prepared.typed.add_value(INPUT, ValueType::Tensor(DType::F32, Some(shape)));
    let declaration = prepared.typed.value_info(input);
    prepared.graph()?.input.push(declaration);
    for name in &columns {
        set_rows(&mut prepared.model.proto, name, INPUT);
    }
    Ok(prepared.model.proto)
}

/// Returns the number of rows: the first size of the first input.
fn rows_of(prepared: &Prepared) -> Result<Dim> {
    let graph = &prepared.typed;
    let mut inputs = graph.inputs.iter().filter(|&&id| graph.value(id).content().is_none());
    let shape = inputs.next().and_then(|&id| graph.value(id).ty.shape());
    shape.and_then(|shape| shape.first()).cloned().ok_or_else(|| {
        Error::Argument(format!("the first input of {} has no axis with the rows of a batch", prepared.label))
    })
}

/// Returns the rows of the result of a layer.
fn form_of(
    prepared: &Prepared,
    targets: &[AdapterTarget],
    layer: &AdaptedLayer,
    rows: &Dim,
) -> Result<RowForm> {
    let graph = &prepared.typed;
    let is_recurrent =
        |target: &&AdapterTarget| target.kind == LayerKind::Recurrent && target.is_layer_of(layer);
    if let Some(target) = targets.iter().find(is_recurrent) {
        return Err(Error::Argument(format!(
            "{} cannot have adapters for each row: it is recurrent, and all rows share its weight; leave the adapter {:?} \
             out of the columns",
            target.node, layer.adapter
        )));
    }
    let ty = graph.find(&layer.value).map(|id| &graph.value(id).ty);
    let fail = |reason: String| {
        Err(Error::Argument(format!(
            "{} cannot have adapters for each row: the result {:?} of an adapted layer {reason}",
            prepared.label, layer.value
        )))
    };
    let Some((dtype, shape)) = ty.and_then(|ty| Some((ty.dtype()?, ty.shape()?))) else {
        return fail("has an unknown shape".into());
    };
    match row_axis(shape, rows, &input_sizes(prepared)) {
        Some(axis) => Ok(RowForm { rank: shape.rank(), axis, dtype }),
        None => {
            fail(format!("has the shape {shape}, in which no axis has the {rows} rows of the first input"))
        }
    }
}

/// Returns all sizes of the inputs.
fn input_sizes(prepared: &Prepared) -> Vec<Dim> {
    let graph = &prepared.typed;
    let shapes = graph.inputs.iter().filter_map(|&id| graph.value(id).ty.shape());
    shapes.flat_map(|shape| shape.iter().cloned()).collect()
}

/// Returns the axis of a shape with the rows. A first axis of a computed size has several positions of each row.
fn row_axis(shape: &Shape, rows: &Dim, inputs: &[Dim]) -> Option<RowAxis> {
    if let Some(axis) = shape.iter().position(|dim| dim == rows) {
        return Some(RowAxis::Axis(axis));
    }
    let is_merged = match (shape.first()?, rows) {
        (Dim::Known(size), Dim::Known(rows)) => *rows > 0 && size.is_multiple_of(*rows),
        (Dim::Known(_), Dim::Symbol(_)) => false,
        (first @ Dim::Symbol(_), _) => !inputs.contains(first),
    };
    is_merged.then_some(RowAxis::Merged)
}
