//! Shapes of factors, and their product in the layout of a weight.

use ortrain_graph::Tensor;

use super::targets::{AdapterTarget, Change};
use crate::Error;

/// Shapes of the factors of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactorShapes {
    /// `[rank, inputs]`, followed by the sizes of the window of a convolution.
    pub a: Vec<usize>,
    /// `[outputs, rank]`; for a convolution `[outputs, rank / groups]`, followed by ones.
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
        let mut a = vec![rank, self.inputs];
        let mut b = vec![self.outputs, rank / self.groups];
        a.extend(&self.window);
        b.extend(self.window.iter().map(|_| 1));
        Ok(FactorShapes { a, b })
    }
}

/// Returns a weight plus `scale` times the product of two factors. Each element is rounded once.
///
/// # Errors
/// Returns an error if the weight consists of integers, if the layer has groups, or if the sizes do not fit.
pub fn add_delta(
    target: &AdapterTarget,
    weight: &Tensor,
    (a, b): (&Tensor, &Tensor),
    scale: f64,
) -> Result<Tensor, Error> {
    let fail = |reason: &str| {
        Error::Adapter(format!("the adapter of {:?} cannot be merged: {reason}", target.weight))
    };
    if !weight.dtype().is_float() || target.has_integers() {
        return Err(fail("the weight consists of integers"));
    }
    if target.groups > 1 {
        return Err(fail("the first factor reads all channels, and the convolution has groups"));
    }
    let rank = a.dims().first().copied().unwrap_or(0);
    let cells: usize = target.window.iter().product();
    let (outputs, inputs) = (target.outputs, target.inputs * cells);
    if a.len() != rank * inputs || b.len() != outputs * rank || weight.len() != outputs * inputs {
        return Err(fail("the sizes of the factors do not fit the weight"));
    }
    let (a, b) = (a.to_f64(), b.to_f64());
    let mut delta = vec![0.0; outputs * inputs];
    for (row, line) in delta.chunks_exact_mut(inputs).enumerate() {
        for k in 0..rank {
            let factor = b[row * rank + k];
            for (sum, x) in line.iter_mut().zip(&a[k * inputs..]) {
                *sum += factor * x;
            }
        }
    }
    let mut dims = vec![outputs, inputs];
    if target.has_outputs_last {
        delta = transposed(&delta, &dims, &[1, 0]);
        dims = vec![inputs, outputs];
    } else if !target.window.is_empty() {
        dims = [&[outputs, target.inputs], target.window.as_slice()].concat();
    }
    for change in &target.changes {
        match change {
            Change::Transpose(order) if order.len() == dims.len() => {
                let mut inverse = vec![0; order.len()];
                for (i, &axis) in order.iter().enumerate() {
                    *inverse.get_mut(axis).ok_or_else(|| fail("an axis does not exist"))? = i;
                }
                delta = transposed(&delta, &dims, &inverse);
                dims = inverse.iter().map(|&axis| dims[axis]).collect();
            }
            Change::Transpose(_) => return Err(fail("a transposition does not fit the weight")),
            Change::Reshape { from } => dims.clone_from(from),
            Change::Cast | Change::Dequantize => {}
        }
    }
    if dims != weight.dims() {
        return Err(fail("the layout of the weight is unknown"));
    }
    let sums: Vec<f64> =
        weight.to_f64().iter().zip(&delta).map(|(weight, delta)| weight + scale * delta).collect();
    Ok(Tensor::from_f64(weight.dtype(), dims, &sums))
}

/// Returns the elements in another order of the axes: axis `i` of the result is axis `order[i]`.
fn transposed(elements: &[f64], dims: &[usize], order: &[usize]) -> Vec<f64> {
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
