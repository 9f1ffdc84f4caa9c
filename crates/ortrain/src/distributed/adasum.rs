//! Adasum of two vectors.
//!
//! Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2021.

use ortrain_graph::DType;
use ortrain_program::Memory;

use crate::Result;
use crate::state::layout::PlaneLayout;

/// Elements of a plane that are read at once. They fit into a cache.
const CHUNK: usize = 1 << 12;

/// Squared norm below which a vector counts as zero: the square root of the smallest normal `f64`.
const ZERO_NORM: f64 = 1.491_668_146_240_041_3e-154;

/// Elements of a chunk of a plane of float32 or float64.
struct Chunk {
    values: [f64; CHUNK],
    /// Elements of a float32 plane.
    narrow: [f32; CHUNK],
}

impl Chunk {
    fn new() -> Chunk {
        Chunk { values: [0.0; CHUNK], narrow: [0.0; CHUNK] }
    }

    /// Reads elements.
    fn read(&mut self, memory: &Memory, dtype: DType, offset: usize, count: usize) -> Result<&[f64]> {
        let Chunk { values, narrow } = self;
        if dtype == DType::F32 {
            memory.read(offset, bytemuck::cast_slice_mut(&mut narrow[..count]))?;
            values.iter_mut().zip(&narrow[..count]).for_each(|(value, &narrow)| *value = f64::from(narrow));
        } else {
            memory.read(offset, bytemuck::cast_slice_mut(&mut values[..count]))?;
        }
        Ok(&values[..count])
    }

    /// Writes elements, rounded to the type of the plane.
    fn write(&mut self, memory: &Memory, dtype: DType, offset: usize, count: usize) -> Result<()> {
        let Chunk { values, narrow } = self;
        if dtype == DType::F32 {
            narrow.iter_mut().zip(&values[..count]).for_each(|(narrow, &value)| *narrow = value as f32);
            memory.write(offset, bytemuck::cast_slice(&narrow[..count]))?;
        } else {
            memory.write(offset, bytemuck::cast_slice(&values[..count]))?;
        }
        Ok(())
    }
}

/// Returns the offset and the number of elements of each chunk of a part of a plane.
fn chunks(offset: usize, elements: usize, dtype: DType) -> impl Iterator<Item = (usize, usize)> {
    let chunk = move |first: usize| (offset + first * dtype.size(), CHUNK.min(elements - first));
    (0..elements).step_by(CHUNK).map(chunk)
}

/// Combines the elements of two planes of float32 or float64, and writes the results to a plane.
///
/// Sums and differences of float32 elements in `f64` are rounded once, as in float32.
pub(crate) fn combine_planes(
    dtype: DType,
    (a, b): (&Memory, &Memory),
    result: &Memory,
    combine: impl Fn(f64, f64) -> f64,
) -> Result<()> {
    let (mut first, mut second) = (Chunk::new(), Chunk::new());
    for (offset, count) in chunks(0, result.len() / dtype.size(), dtype) {
        first.read(a, dtype, offset, count)?;
        let second = second.read(b, dtype, offset, count)?;
        first.values.iter_mut().zip(second).for_each(|(a, b)| *a = combine(*a, *b));
        first.write(result, dtype, offset, count)?;
    }
    Ok(())
}

/// Replaces the tensors of a plane by their Adasum with the tensors of another plane. Two ranks that exchange their
/// planes compute the same bits.
///
/// The Adasum of `a` and `b` is `(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b`, computed in `f64`.
pub(crate) fn adasum_in_place(layout: &PlaneLayout, plane: &Memory, other: &Memory) -> Result<()> {
    let dtype = layout.dtype;
    let (mut own, mut others) = (Chunk::new(), Chunk::new());
    for tensor in &layout.tensors {
        let elements = tensor.dims.iter().product::<usize>();
        let (mut dot, mut own_norm, mut other_norm) = (0.0, 0.0, 0.0);
        for (offset, count) in chunks(tensor.offset, elements, dtype) {
            let own = own.read(plane, dtype, offset, count)?;
            for (own, other) in own.iter().zip(others.read(other, dtype, offset, count)?) {
                dot += own * other;
                own_norm += own * own;
                other_norm += other * other;
            }
        }
        let factor = |norm: f64| if norm < ZERO_NORM { 1.0 } else { 1.0 - dot / (2.0 * norm) };
        let (own_factor, other_factor) = (factor(own_norm), factor(other_norm));
        for (offset, count) in chunks(tensor.offset, elements, dtype) {
            own.read(plane, dtype, offset, count)?;
            let others = others.read(other, dtype, offset, count)?;
            for (own, other) in own.values.iter_mut().zip(others) {
                *own = own_factor * *own + other_factor * other;
            }
            own.write(plane, dtype, offset, count)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::layout::TensorLayout;

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
