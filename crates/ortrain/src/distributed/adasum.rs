//! Adasum of two vectors.
//!
//! Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2021.

use bytemuck::{AnyBitPattern, NoUninit};
use ortrain_graph::DType;
use ortrain_program::Memory;

use crate::Result;
use crate::state::PlaneLayout;

/// Bytes of two planes that are combined at once.
const CHUNK_BYTES: usize = 1 << 16;

/// Squared norm below which a vector counts as zero: the square root of the smallest normal `f64`.
const ZERO_NORM: f64 = 1.491_668_146_240_041_3e-154;

/// Element of a plane.
trait Element: NoUninit + AnyBitPattern {
    fn to_f64(self) -> f64;
    fn from_f64(value: f64) -> Self;
}

impl Element for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}

impl Element for f64 {
    fn to_f64(self) -> f64 {
        self
    }

    fn from_f64(value: f64) -> f64 {
        value
    }
}

/// Replaces the tensors of a plane by their Adasum with the tensors of another plane. Two ranks that exchange their
/// planes compute the same bits.
///
/// The Adasum of `a` and `b` is `(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b`, computed in `f64`.
pub(crate) fn adasum_in_place(layout: &PlaneLayout, plane: &Memory, other: &Memory) -> Result<()> {
    for tensor in &layout.tensors {
        let bytes = tensor.dims.iter().product::<usize>() * layout.dtype.size();
        let range = (tensor.offset, bytes);
        match layout.dtype {
            DType::F64 => combine_tensor::<f64>(range, plane, other)?,
            _ => combine_tensor::<f32>(range, plane, other)?,
        }
    }
    Ok(())
}

fn combine_tensor<T: Element>((offset, bytes): (usize, usize), plane: &Memory, other: &Memory) -> Result<()> {
    let chunks = || (0..bytes).step_by(CHUNK_BYTES).map(|at| (offset + at, CHUNK_BYTES.min(bytes - at)));
    let read = |memory: &Memory, (at, len): (usize, usize)| -> Result<Vec<T>> {
        Ok(bytemuck::pod_collect_to_vec(&memory.to_vec(at, len)?))
    };
    let (mut dot, mut own_norm, mut other_norm) = (0.0, 0.0, 0.0);
    for chunk in chunks() {
        for (own, other) in read(plane, chunk)?.into_iter().zip(read(other, chunk)?) {
            let (own, other) = (own.to_f64(), other.to_f64());
            dot += own * other;
            own_norm += own * own;
            other_norm += other * other;
        }
    }
    let factor = |norm: f64| if norm < ZERO_NORM { 1.0 } else { 1.0 - dot / (2.0 * norm) };
    let (own_factor, other_factor) = (factor(own_norm), factor(other_norm));
    for chunk in chunks() {
        let mut combined = read(plane, chunk)?;
        for (own, other) in combined.iter_mut().zip(read(other, chunk)?) {
            *own = T::from_f64(own_factor * own.to_f64() + other_factor * other.to_f64());
        }
        plane.write(chunk.0, bytemuck::cast_slice(&combined))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::TensorLayout;

    fn plane(values: &[f64], dtype: DType) -> (PlaneLayout, Memory) {
        let memory = Memory::new(64 + values.len() * dtype.size());
        for (k, &value) in values.iter().enumerate() {
            match dtype {
                DType::F64 => memory.write(64 + 8 * k, &value.to_le_bytes()).unwrap(),
                _ => memory.write(64 + 4 * k, &(value as f32).to_le_bytes()).unwrap(),
            }
        }
        let tensor = TensorLayout { name: "w".into(), dims: vec![values.len()], offset: 64 };
        (PlaneLayout { dtype, bytes: memory.len(), tensors: vec![tensor] }, memory)
    }

    fn adasum(a: &[f64], b: &[f64], dtype: DType) -> Vec<f64> {
        let ((layout, own), (_, other)) = (plane(a, dtype), plane(b, dtype));
        adasum_in_place(&layout, &own, &other).unwrap();
        let bytes = own.to_vec(64, a.len() * dtype.size()).unwrap();
        match dtype {
            DType::F64 => bytemuck::pod_collect_to_vec(&bytes),
            _ => bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from).collect(),
        }
    }

    #[test]
    fn orthogonal_vectors_are_added_and_equal_ones_remain() {
        for dtype in [DType::F32, DType::F64] {
            assert_eq!(adasum(&[1.0, 0.0], &[0.0, 2.0], dtype), [1.0, 2.0]);
            assert_eq!(adasum(&[1.0, 3.0], &[1.0, 3.0], dtype), [1.0, 3.0]);
            assert_eq!(adasum(&[0.0, 0.0], &[1.0, 3.0], dtype), [1.0, 3.0]);
        }
    }

    #[test]
    fn both_ranks_compute_the_same_bits() {
        let values = |seed: f64| -> Vec<f64> { (0..40_000).map(|k| (seed * f64::from(k)).sin()).collect() };
        let (a, b) = (values(0.7), values(1.3));
        let first = adasum(&a, &b, DType::F32);
        assert_eq!(first, adasum(&b, &a, DType::F32));
        let dot: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
        let [na, nb] = [&a, &b].map(|v| v.iter().map(|x| x * x).sum::<f64>());
        for (k, &found) in first.iter().enumerate() {
            let expected = (1.0 - dot / (2.0 * na)) * a[k] + (1.0 - dot / (2.0 * nb)) * b[k];
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }
}
