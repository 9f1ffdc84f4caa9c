//! Adapters as parts of their weights: floats are rounded once, and quantized weights are quantized again.

use ortrain_graph::{Graph, Tensor};
use ortrain_onnx::GraphProto;

use super::stored::StoredWeight;
use super::targets::{AdapterTarget, Change};
use super::weights::{in_layout_of, lengths_of_rows, merge_error, product_of_factors};
use crate::Error;

/// Adapter that is added to a weight.
#[derive(Clone, Debug)]
pub struct Delta {
    /// Factors.
    pub factors: [Tensor; 2],
    /// Magnitudes of the rows (DoRA).
    pub magnitude: Option<Tensor>,
    /// Factor of the product of the factors.
    pub scale: f64,
}

/// Weight with adapters.
#[derive(Clone, Debug)]
pub struct MergedWeight {
    /// New values of constants of the graph.
    pub constants: Vec<(String, Tensor)>,
    /// Largest difference between an element and the exact sum.
    pub largest_error: f64,
    /// Root of the mean of the squares of these differences.
    pub rms_error: f64,
    /// True if a convolution has groups no longer: the first factor of its adapter reads all channels.
    pub is_ungrouped: bool,
}

/// Returns the weight of a layer with adapters. Unchanged blocks of a quantized weight keep their bits.
///
/// # Errors
/// Returns an error if the sizes of the factors do not fit, or if the layout of the weight is unknown. Also if a sum is
/// infinite or NaN for a quantized weight.
pub fn merge_weight(graph: &Graph, target: &AdapterTarget, deltas: &[Delta]) -> Result<MergedWeight, Error> {
    let find = |name: &str| graph.find(name).and_then(|id| graph.value(id).content().cloned());
    let weight = find(&target.weight).ok_or_else(|| merge_error(target, "the weight is no constant"))?;
    if target.has_integers() {
        if target.groups > 1 {
            return Err(merge_error(
                target,
                "the convolution has groups, and its weight consists of integers",
            ));
        }
        let stored = StoredWeight::find(graph, target)?;
        let old = stored.elements();
        let mut change = vec![0.0; old.len()];
        for delta in deltas {
            let part = stored
                .in_order(target, product_of_factors(target, (&delta.factors[0], &delta.factors[1]))?)?;
            add_scaled(&mut change, &part, delta.scale);
        }
        let sums: Vec<f64> = old.iter().zip(&change).map(|(old, change)| old + change).collect();
        if sums.iter().any(|sum| !(*sum as f32).is_finite()) {
            return Err(merge_error(target, "the sum has elements that are infinite or NaN"));
        }
        let changed: Vec<bool> = change.iter().map(|change| *change != 0.0).collect();
        let (new, constants) = stored.quantize(&sums, &changed);
        return Ok(MergedWeight::new(constants, &sums, &new, false));
    }
    if target.groups > 1 {
        return ungrouped(target, &weight, deltas);
    }
    let mut sums = weight.to_f64();
    for Delta { factors: [a, b], magnitude, scale } in deltas {
        let part = in_layout_of(target, weight.dims(), product_of_factors(target, (a, b))?)?;
        if part.len() != sums.len() {
            return Err(merge_error(target, "the sizes of the factors do not fit the weight"));
        }
        add_scaled(&mut sums, &part, *scale);
        let Some(magnitude) = magnitude else { continue };
        let (lengths, rows) = lengths_of_rows(target, &weight, &sums)?;
        let magnitude = magnitude.to_f64();
        if magnitude.len() != lengths.len() {
            return Err(merge_error(target, "the sizes of the magnitudes do not fit the weight"));
        }
        for (sum, &row) in sums.iter_mut().zip(&rows) {
            *sum *= magnitude[row] / lengths[row];
        }
    }
    Ok(rounded(target, &weight, weight.dims().to_vec(), &sums, false))
}

/// Returns the merged weight of a convolution with groups: `[outputs, inputs, window...]` instead of
/// `[outputs, inputs / groups, window...]`.
fn ungrouped(target: &AdapterTarget, weight: &Tensor, deltas: &[Delta]) -> Result<MergedWeight, Error> {
    let of_group = target.inputs / target.groups * target.cells();
    let is_direct = target.changes.iter().all(|change| *change == Change::Cast);
    if !is_direct || weight.len() != target.outputs * of_group {
        return Err(merge_error(target, "the layout of the weight of a convolution with groups is unknown"));
    }
    let inputs = of_group * target.groups;
    let mut sums = vec![0.0; target.outputs * inputs];
    let old = weight.to_f64();
    for (row, (line, old)) in sums.chunks_exact_mut(inputs).zip(old.chunks_exact(of_group)).enumerate() {
        let group = row / (target.outputs / target.groups);
        line[group * of_group..(group + 1) * of_group].copy_from_slice(old);
    }
    for Delta { factors: [a, b], scale, .. } in deltas {
        add_scaled(&mut sums, &product_of_factors(target, (a, b))?, *scale);
    }
    let dims = [&[target.outputs, target.inputs], target.window.as_slice()].concat();
    Ok(rounded(target, weight, dims, &sums, true))
}

fn rounded(
    target: &AdapterTarget,
    weight: &Tensor,
    dims: Vec<usize>,
    sums: &[f64],
    is_ungrouped: bool,
) -> MergedWeight {
    let new = Tensor::from_f64(weight.dtype(), dims, sums);
    let elements = new.to_f64();
    MergedWeight::new(vec![(target.weight.clone(), new)], sums, &elements, is_ungrouped)
}

fn add_scaled(sums: &mut [f64], part: &[f64], scale: f64) {
    for (sum, part) in sums.iter_mut().zip(part) {
        *sum += scale * part;
    }
}

impl MergedWeight {
    fn new(constants: Vec<(String, Tensor)>, sums: &[f64], new: &[f64], is_ungrouped: bool) -> MergedWeight {
        let (mut largest_error, mut squares) = (0.0_f64, 0.0_f64);
        for (sum, new) in sums.iter().zip(new) {
            let error = (new - sum).abs();
            largest_error = largest_error.max(error);
            squares += error * error;
        }
        let rms_error = (squares / sums.len().max(1) as f64).sqrt();
        MergedWeight { constants, largest_error, rms_error, is_ungrouped }
    }
}

/// Makes the convolutions that read a weight directly or after a conversion convolutions without groups.
pub fn remove_groups(graph: &mut GraphProto, target: &AdapterTarget) {
    for node in graph.node.iter_mut().filter(|node| node.input.get(1) == Some(&target.read)) {
        node.attribute.retain(|attribute| attribute.name != "group");
    }
}
