//! Older versions of BatchNormalization, and its decompositions.

use ortrain_graph::{Attrs, DType, Shape, Tensor, ValueId};

use crate::OpError;
use crate::families::batch_norm::channels::{
    reduce_to_channels, reduced_axes, sum_channels, unknown_rank_error, unsqueeze_channels,
};
use crate::rewrite::Rewrite;
use crate::support::casts::cast;
use crate::support::formula::formula;
use crate::support::onnx_decomposition::NodeSink;

/// Upgrades a node from before opset 14.
pub(super) fn upgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 14 {
        return Ok(());
    }
    let training = (1..rw.node().outputs.len()).any(|k| rw.has_output(k));
    let flat = rw.version() < 9 && rw.attrs().int("spatial")?.unwrap_or(1) == 0;
    if !training && !flat {
        return Ok(());
    }
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("spatial");
    if training {
        attrs = attrs.with("training_mode", 1i64);
    }
    let mut inputs: Vec<ValueId> = (0..5).map(|k| rw.required_input(k)).collect::<Result<_, _>>()?;
    let (shape, parameter_shape) = (inputs[0], inputs[1]);
    if flat {
        inputs[0] = rw.add("Flatten", &[inputs[0]], Attrs::new().with("axis", 1i64));
        let all = rw.ints("all", &[-1]);
        for input in &mut inputs[1..] {
            *input = rw.add("Reshape", &[*input, all], Attrs::new());
        }
    }
    // Before opset 14 the statistics of the batch were outputs 3 and 4.
    let saved: Vec<usize> = [3, 4].into_iter().filter(|&k| rw.is_output_used(k)).collect();
    if !saved.is_empty() {
        let rank = if flat { Some(2) } else { rw.shape(inputs[0]).map(Shape::rank) };
        let rank = rank.ok_or_else(unknown_rank_error)?;
        let (mean, var) = emit_statistics(rw.patch().1, inputs[0], rank);
        for k in saved {
            let value = if k == 3 { mean } else { var };
            let value = if rank == 1 { value } else { squeeze_to_channels(rw, value, rank) };
            let value = if flat { reshape_like(rw, value, parameter_shape) } else { value };
            rw.replace_output(k, value);
        }
    }
    let ports: Vec<Option<ValueId>> = inputs.into_iter().map(Some).collect();
    let outputs = rw.add_node("", "BatchNormalization", &ports, if training { 3 } else { 1 }, attrs);
    for (k, value) in outputs.into_iter().enumerate() {
        if rw.has_output(k) {
            let like = if k == 0 { shape } else { parameter_shape };
            let value = if flat { reshape_like(rw, value, like) } else { value };
            rw.replace_output(k, value);
        }
    }
    Ok(())
}

/// Reshapes a value to the shape of another.
pub(super) fn reshape_like(rw: &mut Rewrite<'_>, value: ValueId, like: ValueId) -> ValueId {
    let shape = rw.add("Shape", &[like], Attrs::new());
    rw.add("Reshape", &[value, shape], Attrs::new().with("allowzero", 1i64))
}

/// Reduces statistics with all axes kept to one element for each channel.
pub(super) fn squeeze_to_channels(rw: &mut Rewrite<'_>, value: ValueId, rank: usize) -> ValueId {
    let axes = reduced_axes(rank);
    let axes = rw.ints("axes", &axes);
    rw.add("Squeeze", &[value, axes], Attrs::new())
}

/// Adds the mean and variance of each channel, with all axes kept.
pub(super) fn emit_statistics(to: &mut impl NodeSink, x: ValueId, rank: usize) -> (ValueId, ValueId) {
    let mean = reduce_to_channels(to, "ReduceMean", x, rank, true);
    let centred = to.emit("Sub", &[Some(x), Some(mean)], Attrs::new());
    let square = to.emit("Mul", &[Some(centred), Some(centred)], Attrs::new());
    (mean, reduce_to_channels(to, "ReduceMean", square, rank, true))
}

/// Downgrades a node.
///
/// Before opset 15 scale and bias have the type of `X`. Before opset 14 the statistics also have this type, and the
/// number of outputs selects the training mode.
pub(super) fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    // A node with five outputs is already a result of this rewrite.
    if rw.version() >= 15 || rw.node().outputs.len() > 3 {
        return Ok(());
    }
    let training = rw.attrs().int("training_mode")?.unwrap_or(0) != 0;
    let mut inputs: Vec<ValueId> = (0..5).map(|k| rw.required_input(k)).collect::<Result<_, _>>()?;
    let as_data = if rw.version() < 14 { 1..5 } else { 1..3 };
    let types: Vec<Option<DType>> = inputs.iter().map(|&input| rw.dtype(input)).collect();
    let mut casts = Vec::new();
    for k in as_data {
        if let (Some(from), Some(to)) = (types[k], types[0])
            && from != to
        {
            inputs[k] = cast(rw.patch().1, inputs[k], from, to);
            casts.push(k);
        }
    }
    let old = rw.version() < 14;
    let has_statistics = rw.has_output(1) || rw.has_output(2);
    if !old && casts.is_empty() && (training || !has_statistics) {
        return Ok(());
    }
    let mut attrs = rw.attrs().clone();
    if old {
        attrs.0.remove("training_mode");
    }
    let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    let count = match (training, old) {
        (true, true) => 5,
        (true, false) => 3,
        (false, _) => 1,
    };
    let outputs = rw.add_node("", "BatchNormalization", &ports, count, attrs);
    rw.replace_output(0, outputs[0]);
    for k in 1..3 {
        if !rw.has_output(k) {
            continue;
        }
        let running = rw.required_input(k + 2)?;
        let value = match (training, types[k + 2], types[0]) {
            (false, ..) => running,
            (true, Some(target), Some(from)) if old => cast(rw.patch().1, outputs[k], from, target),
            _ => outputs[k],
        };
        rw.replace_output(k, value);
    }
    Ok(())
}

/// Decomposes [`BatchNormInternal`](INTERNAL) into operators of `ai.onnx`. The updated statistics are ordinary results
/// there.
pub(super) fn decompose_internal(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let attrs = rw.attrs().clone();
    let training = attrs.int("training_mode")?.unwrap_or(1);
    let ports: Vec<Option<ValueId>> = (0..5).map(|k| rw.input(k)).collect();
    if training == 0 || !(rw.has_output(3) || rw.has_output(4)) {
        let outputs = if training == 0 { 1 } else { 3 };
        let attrs = attrs.with("training_mode", training);
        let results = rw.add_node("", "BatchNormalization", &ports, outputs, attrs);
        for (k, value) in results.into_iter().enumerate() {
            rw.replace_output(k, value);
        }
        return Ok(());
    }
    let [x, scale, bias, old_mean, old_var] = [
        rw.required_input(0)?,
        rw.required_input(1)?,
        rw.required_input(2)?,
        rw.required_input(3)?,
        rw.required_input(4)?,
    ];
    let rank = rw.shape(x).map(Shape::rank).ok_or_else(unknown_rank_error)?;
    let dtype = |value| rw.dtype(value).ok_or_else(|| OpError::invalid("the type of an input is not known"));
    let (narrow, scale_ty, statistics_ty) = (dtype(x)?, dtype(scale)?, dtype(old_mean)?);
    let epsilon = attrs.float("epsilon")?.unwrap_or(1e-5);
    let momentum = f64::from(attrs.float("momentum")?.unwrap_or(0.9));
    let none = Attrs::new;
    let (mean, var) = emit_statistics(rw.patch().1, x, rank);
    let epsilon = rw.constant("epsilon", Tensor::scalar(narrow, f64::from(epsilon)));
    let root = formula(rw, [var, epsilon], |[var, epsilon]| (var + epsilon).sqrt());
    let normal = formula(rw, [x, mean, root], |[x, mean, root]| (x - mean) / root);
    let mut parameter = |value: ValueId| {
        let value = cast(rw.patch().1, value, scale_ty, narrow);
        unsqueeze_channels(rw.patch().1, value, rank)
    };
    let (scale, bias) = (parameter(scale), parameter(bias));
    let y = formula(rw, [normal, scale, bias], |[normal, scale, bias]| normal * scale + bias);
    rw.replace_output(0, y);
    let of_channels = |rw: &mut Rewrite<'_>, value: ValueId| {
        let value = if rank == 1 { value } else { squeeze_to_channels(rw, value, rank) };
        cast(rw.patch().1, value, narrow, statistics_ty)
    };
    for (k, batch, old) in [(1, mean, old_mean), (2, var, old_var)] {
        if !rw.has_output(k) {
            continue;
        }
        let batch = of_channels(rw, batch);
        let keep = rw.constant("momentum", Tensor::scalar(statistics_ty, momentum));
        let take = rw.constant("rest", Tensor::scalar(statistics_ty, 1.0 - momentum));
        let new = formula(rw, [old, keep, batch, take], |[old, keep, batch, take]| old * keep + batch * take);
        rw.replace_output(k, new);
    }
    if rw.has_output(3) {
        let saved = of_channels(rw, mean);
        rw.replace_output(3, saved);
    }
    if rw.has_output(4) {
        let one = rw.constant("one", Tensor::scalar(narrow, 1.0));
        let inverse = rw.add("Div", &[one, root], none());
        let saved = of_channels(rw, inverse);
        rw.replace_output(4, saved);
    }
    Ok(())
}

/// Decomposes [`BatchNormalizationGrad`](GRADIENT) into operators of `ai.onnx`.
pub(super) fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let [g, x, scale, mean, inverse] = [
        rw.required_input(0)?,
        rw.required_input(1)?,
        rw.required_input(2)?,
        rw.required_input(3)?,
        rw.required_input(4)?,
    ];
    let rank = rw.shape(x).or(rw.shape(g)).map(Shape::rank).ok_or_else(unknown_rank_error)?;
    let dtype = |value| rw.dtype(value).ok_or_else(|| OpError::invalid("the type of an input is not known"));
    let (narrow, scale_ty, statistics_ty) = (dtype(x)?, dtype(scale)?, dtype(mean)?);
    let none = Attrs::new;
    let mut parameter = |value: ValueId, from: DType| {
        let value = cast(rw.patch().1, value, from, narrow);
        unsqueeze_channels(rw.patch().1, value, rank)
    };
    let (middle, inv) = (parameter(mean, statistics_ty), parameter(inverse, statistics_ty));
    let factor = parameter(scale, scale_ty);
    let normal = formula(rw, [x, middle, inv], |[x, middle, inv]| (x - middle) * inv);
    let product = rw.add("Mul", &[g, normal], none());
    if rw.has_output(0) {
        let share = reduce_to_channels(rw.patch().1, "ReduceMean", g, rank, true);
        let slope = reduce_to_channels(rw.patch().1, "ReduceMean", product, rank, true);
        let along = rw.add("Mul", &[normal, slope], none());
        let rest = rw.add("Sub", &[g, share], none());
        let rest = rw.add("Sub", &[rest, along], none());
        let gradient = formula(rw, [factor, inv, rest], |[factor, inv, rest]| factor * inv * rest);
        rw.replace_output(0, gradient);
    }
    for (k, value) in [(1, product), (2, g)] {
        if rw.has_output(k) {
            let sum = sum_channels(rw.patch().1, value, rank);
            let sum = if narrow == scale_ty { sum } else { cast(rw.patch().1, sum, narrow, scale_ty) };
            rw.replace_output(k, sum);
        }
    }
    Ok(())
}
