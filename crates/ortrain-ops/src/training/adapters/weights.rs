//! Shapes of factors, and their product in the layout of a weight.

use ortrain_graph::Tensor;

use super::targets::{AdapterTarget, Change, LayerKind};
use crate::Error;

/// Shapes of the factors of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactorShapes {
    /// `[rank, inputs]`, followed by the sizes of the window of a convolution. `[directions, rank, inputs]` for a
    /// recurrent layer.
    pub a: Vec<usize>,
    /// `[outputs, rank]`; for a convolution `[outputs, rank / groups]`, followed by ones. `[directions, outputs, rank]` for
    /// a recurrent layer.
    pub b: Vec<usize>,
}

impl AdapterTarget {
    /// Checks that a rank has an effect in all of its rows.
    ///
    /// # Errors
    /// Returns an error if the rank is zero, or larger than the rank of the weight.
    pub fn check_rank(&self, rank: usize) -> Result<(), Error> {
        let largest = self.max_rank();
        if (1..=largest).contains(&rank) {
            return Ok(());
        }
        Err(Error::Adapter(format!(
            "the rank must be from 1 to {largest} for the weight {:?} of {}, got {rank}; choose a smaller rank, or \
             exclude the weight",
            self.weight, self.node
        )))
    }

    /// Returns the shapes of the factors of a rank.
    ///
    /// # Errors
    /// Returns an error if the rank is zero, or no multiple of the groups.
    pub fn factor_shapes(&self, rank: usize) -> Result<FactorShapes, Error> {
        if rank == 0 {
            return Err(Error::Adapter(format!(
                "the adapter of the weight {:?} has the rank 0",
                self.weight
            )));
        }
        if !rank.is_multiple_of(self.groups) {
            return Err(Error::Adapter(format!(
                "the rank must be a multiple of the {} groups of {}, got {rank}",
                self.groups, self.node
            )));
        }
        if self.kind == LayerKind::Recurrent {
            let (a, b) = ([self.directions, rank, self.inputs], [self.directions, self.outputs, rank]);
            return Ok(FactorShapes { a: a.into(), b: b.into() });
        }
        let mut a = vec![rank, self.inputs];
        let mut b = vec![self.outputs, rank / self.groups];
        a.extend(&self.window);
        b.extend(self.window.iter().map(|_| 1));
        Ok(FactorShapes { a, b })
    }
}

/// Returns the lengths of the rows of a weight plus `scale` times the product of two factors.
///
/// # Errors
/// Returns an error if the weight consists of integers, or if the sizes do not fit.
pub fn row_lengths(
    target: &AdapterTarget,
    weight: &Tensor,
    factors: (&Tensor, &Tensor),
    scale: f64,
) -> Result<Vec<f64>, Error> {
    let sums = adapted_weight(target, weight, factors, scale)?;
    Ok(lengths_of_rows(target, weight, &sums)?.0)
}

/// Returns a weight of floats with the scaled product of two factors added. Each element is rounded once.
///
/// # Errors
/// Returns an error if the weight consists of integers, if its layout is unknown, or if the factors do not fit it.
pub fn add_delta(
    target: &AdapterTarget,
    weight: &Tensor,
    factors: (&Tensor, &Tensor),
    scale: f64,
) -> Result<Tensor, Error> {
    let sums = adapted_weight(target, weight, factors, scale)?;
    Ok(Tensor::from_f64(weight.dtype(), weight.dims().to_vec(), &sums))
}

/// Returns the elements of a weight as a matrix `[outputs, inputs]`; the window of a convolution belongs to the inputs.
///
/// # Errors
/// Returns an error if the weight consists of integers, or if its layout is unknown.
pub fn weight_matrix(target: &AdapterTarget, weight: &Tensor) -> Result<Vec<f64>, Error> {
    if !weight.dtype().is_float() || target.has_integers() {
        return Err(Error::Adapter(format!(
            "the weight {:?} of {} consists of integers",
            target.weight, target.node
        )));
    }
    let positions = in_layout_of(target, weight.dims(), (0..weight.len()).collect())?;
    let mut matrix = vec![0.0; weight.len()];
    for (element, at) in weight.to_f64().into_iter().zip(positions) {
        matrix[at] = element;
    }
    Ok(matrix)
}

pub(super) fn merge_error(target: &AdapterTarget, reason: &str) -> Error {
    Error::Adapter(format!("the adapter of {:?} cannot be merged: {reason}", target.weight))
}

/// Returns a weight plus `scale` times the product of two factors, in the layout of the weight.
fn adapted_weight(
    target: &AdapterTarget,
    weight: &Tensor,
    (a, b): (&Tensor, &Tensor),
    scale: f64,
) -> Result<Vec<f64>, Error> {
    if !weight.dtype().is_float() || target.has_integers() {
        return Err(merge_error(target, "the weight consists of integers"));
    }
    if weight.len() != target.outputs * target.inputs * target.cells() {
        return Err(merge_error(target, SIZES_DIFFER));
    }
    let delta = product_of_factors(target, (a, b))?;
    let delta = in_layout_of(target, weight.dims(), delta)?;
    Ok(weight.to_f64().iter().zip(&delta).map(|(weight, delta)| weight + scale * delta).collect())
}

const SIZES_DIFFER: &str = "the sizes of the factors do not fit the weight";

/// Returns the product of two factors as a matrix `[outputs, inputs]`. Groups of a convolution do not make its rows shorter.
/// The directions of a recurrent layer are one below another.
pub(super) fn product_of_factors(
    target: &AdapterTarget,
    (a, b): (&Tensor, &Tensor),
) -> Result<Vec<f64>, Error> {
    let rank = target.rank_of(a);
    let (outputs, inputs) = (target.directions * target.outputs, target.inputs * target.cells());
    // Each part has rows of `A` and columns of `B` of its own.
    let is_recurrent = target.kind == LayerKind::Recurrent;
    let (parts, of_part) =
        if is_recurrent { (target.directions, rank) } else { (target.groups, rank / target.groups) };
    let fits = a.len() == parts * of_part * inputs
        && b.len() == outputs * of_part
        && (is_recurrent || rank.is_multiple_of(parts))
        && outputs.is_multiple_of(parts);
    if !fits {
        return Err(merge_error(target, SIZES_DIFFER));
    }
    let (a, b) = (a.to_f64(), b.to_f64());
    let mut product = vec![0.0; outputs * inputs];
    for (row, line) in product.chunks_exact_mut(inputs).enumerate() {
        let part = row / (outputs / parts);
        for k in 0..of_part {
            let factor = b[row * of_part + k];
            for (sum, x) in line.iter_mut().zip(&a[(part * of_part + k) * inputs..]) {
                *sum += factor * x;
            }
        }
    }
    Ok(product)
}

/// Returns the lengths of the rows of a matrix in the layout of a weight, and the row of each element.
pub(super) fn lengths_of_rows(
    target: &AdapterTarget,
    weight: &Tensor,
    elements: &[f64],
) -> Result<(Vec<f64>, Vec<usize>), Error> {
    let inputs = elements.len() / target.outputs;
    let rows = (0..elements.len()).map(|at| at / inputs).collect();
    let rows = in_layout_of(target, weight.dims(), rows)?;
    let mut lengths = vec![0.0_f64; target.outputs];
    for (element, &row) in elements.iter().zip(&rows) {
        lengths[row] += element * element;
    }
    Ok((lengths.into_iter().map(f64::sqrt).collect(), rows))
}

/// Returns the elements of a matrix `[outputs, inputs]` in the layout of the constant of a weight, which has the sizes
/// `of_constant`.
pub(super) fn in_layout_of<T: Copy>(
    target: &AdapterTarget,
    of_constant: &[usize],
    elements: Vec<T>,
) -> Result<Vec<T>, Error> {
    let mut elements = elements;
    let mut dims = vec![target.outputs, elements.len() / target.outputs];
    if target.has_outputs_last {
        elements = transposed(&elements, &dims, &[1, 0]);
        dims.reverse();
    } else if target.kind == LayerKind::Recurrent {
        dims = vec![target.directions, target.outputs, target.inputs];
    } else if !target.window.is_empty() {
        dims = [&[target.outputs, target.inputs], target.window.as_slice()].concat();
    }
    for change in &target.changes {
        match change {
            Change::Transpose(order) if order.len() == dims.len() => {
                let mut inverse = vec![0; order.len()];
                for (i, &axis) in order.iter().enumerate() {
                    *inverse.get_mut(axis).ok_or_else(|| merge_error(target, "an axis does not exist"))? = i;
                }
                elements = transposed(&elements, &dims, &inverse);
                dims = inverse.iter().map(|&axis| dims[axis]).collect();
            }
            Change::Transpose(_) => {
                return Err(merge_error(target, "a transposition does not fit the weight"));
            }
            Change::Reshape { from } => dims.clone_from(from),
            Change::Cast | Change::Dequantize => {}
        }
    }
    if dims != of_constant {
        return Err(merge_error(target, "the layout of the weight is unknown"));
    }
    Ok(elements)
}

/// Returns the elements in another order of the axes: axis `i` of the result is axis `order[i]`.
fn transposed<T: Copy>(elements: &[T], dims: &[usize], order: &[usize]) -> Vec<T> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    let sizes: Vec<usize> = order.iter().map(|&axis| dims[axis]).collect();
    (0..elements.len())
        .map(|mut rest| {
            let mut at = 0;
            for (&size, &axis) in sizes.iter().zip(order).rev() {
                at += rest % size * strides[axis];
                rest /= size;
            }
            elements[at]
        })
        .collect()
}
