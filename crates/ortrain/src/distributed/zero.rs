//! Division of the optimizer state among ranks: ZeRO stage 1.

use std::ops::Range;
use std::sync::Arc;

use ortrain_graph::DType;

use crate::state::layout::{OwnedPlane, PlaneLayout, StateLayout, TensorLayout};

/// The part of each rank has a multiple of this number of elements.
const ALIGNMENT: usize = 32;

/// Trained tensor in the order of names.
struct NamedTensor<'a> {
    plane: usize,
    dtype: DType,
    tensor: &'a TensorLayout,
    /// Number of the first element, counted over all tensors without gaps.
    first: usize,
    elements: usize,
}

/// Returns the trained tensors in the order of names, and the number of elements of each rank.
fn named_tensors(layout: &StateLayout, ranks: usize) -> (Vec<NamedTensor<'_>>, usize) {
    let mut tensors: Vec<NamedTensor<'_>> = (layout.trainable.iter().enumerate())
        .flat_map(|(plane, of)| {
            of.tensors.iter().map(move |tensor| NamedTensor {
                plane,
                dtype: of.dtype,
                tensor,
                first: 0,
                elements: tensor.dims.iter().product(),
            })
        })
        .collect();
    tensors.sort_by(|a, b| a.tensor.name.cmp(&b.tensor.name));
    let mut total = 0;
    for tensor in &mut tensors {
        tensor.first = total;
        total += tensor.elements;
    }
    let block = ALIGNMENT * ranks;
    (tensors, (total + block - total % block) / ranks)
}

/// Returns the ranges of elements of each plane that each rank updates: by rank, then by plane. The ranges of all ranks
/// cover the planes, gaps included.
///
/// Source: `ZeROOptimizerGraphBuilder` of onnxruntime-training 1.15, which divides the elements without gaps.
pub(crate) fn zero_ranges(layout: &StateLayout, ranks: usize) -> Vec<Vec<Range<usize>>> {
    let (tensors, chunk) = named_tensors(layout, ranks);
    // The part of a rank starts at the first element with a number in the part, or at the end of the plane.
    let start = |rank: usize, plane: usize| -> usize {
        let dtype = layout.trainable[plane].dtype;
        let end = layout.trainable[plane].bytes / dtype.size();
        let boundary = rank * chunk;
        if rank == 0 {
            return 0;
        }
        let of_plane = tensors.iter().filter(|tensor| tensor.plane == plane);
        let next = of_plane.into_iter().find(|tensor| tensor.first + tensor.elements > boundary);
        next.map_or(end, |tensor| {
            tensor.tensor.offset / tensor.dtype.size() + boundary.saturating_sub(tensor.first)
        })
    };
    let planes = 0..layout.trainable.len();
    (0..ranks)
        .map(|rank| {
            planes
                .clone()
                .map(|plane| {
                    let end = layout.trainable[plane].bytes / layout.trainable[plane].dtype.size();
                    let stop = if rank + 1 == ranks { end } else { start(rank + 1, plane) };
                    start(rank, plane)..stop
                })
                .collect()
        })
        .collect()
}

/// Returns the parts of the planes in these ranges, with their tensors.
pub(crate) fn owned_planes(layout: &StateLayout, ranges: &[Range<usize>]) -> Arc<Vec<OwnedPlane>> {
    let owned = |(plane, range): (&PlaneLayout, &Range<usize>)| {
        let size = plane.dtype.size();
        let tensors = plane.tensors.iter().filter_map(|tensor| {
            let first = tensor.offset / size;
            let elements: usize = tensor.dims.iter().product();
            let (start, stop) = (first.max(range.start), (first + elements).min(range.end));
            (start < stop).then(|| TensorLayout {
                name: tensor.name.clone(),
                dims: if stop - start == elements { tensor.dims.clone() } else { vec![stop - start] },
                offset: (start - range.start) * size,
            })
        });
        let layout =
            PlaneLayout { dtype: plane.dtype, bytes: range.len() * size, tensors: tensors.collect() };
        OwnedPlane { start: range.start, layout }
    };
    Arc::new(layout.trainable.iter().zip(ranges).map(owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a layout with alternating tensors of float32 and float64.
    fn layout(sizes: &[usize]) -> StateLayout {
        let mut planes =
            [DType::F32, DType::F64].map(|dtype| PlaneLayout { dtype, bytes: 0, tensors: vec![] });
        for (k, &size) in sizes.iter().enumerate() {
            let plane = &mut planes[k % 2];
            let tensor =
                TensorLayout { name: format!("{k:03}").into(), dims: vec![size], offset: plane.bytes };
            plane.bytes += (size * plane.dtype.size()).next_multiple_of(256);
            plane.tensors.push(tensor);
        }
        StateLayout { trainable: planes.into(), frozen: vec![] }
    }

    /// Returns the rank of each element of a tensor: its number among the elements of all tensors, divided by the part
    /// of a rank.
    fn owners(sizes: &[usize], ranks: usize) -> Vec<Vec<usize>> {
        let total: usize = sizes.iter().sum();
        let chunk = (total / (32 * ranks) + 1) * 32;
        let mut numbers = 0..;
        sizes
            .iter()
            .map(|&size| numbers.by_ref().take(size).map(|number: usize| number / chunk).collect())
            .collect()
    }

    #[test]
    fn each_element_has_the_owner_of_its_number() {
        let cases: [&[usize]; 6] =
            [&[100], &[64, 0, 32], &[1, 1, 1], &[1000, 7, 500, 3, 64], &[5, 4000, 1], &[96, 32, 64, 64]];
        for sizes in cases {
            for ranks in 1..6 {
                let layout = layout(sizes);
                let (ranges, owners) = (zero_ranges(&layout, ranks), owners(sizes, ranks));
                for (plane, of) in layout.trainable.iter().enumerate() {
                    // The ranges cover the plane without gaps.
                    let mut end = 0;
                    for range in ranges.iter().map(|of_rank| &of_rank[plane]) {
                        assert_eq!(range.start, end, "{sizes:?} on {ranks} ranks");
                        end = range.end;
                    }
                    assert_eq!(end, of.bytes / of.dtype.size());
                }
                for (rank, of_rank) in ranges.iter().enumerate() {
                    for (plane, own) in owned_planes(&layout, of_rank).iter().enumerate() {
                        for tensor in &own.layout.tensors {
                            let k: usize = tensor.name.parse().unwrap();
                            let of = &layout.trainable[plane];
                            let complete = of.tensors.iter().find(|other| other.name == tensor.name).unwrap();
                            let size = of.dtype.size();
                            let start = own.start + tensor.offset / size - complete.offset / size;
                            let elements = start..start + tensor.dims[0];
                            let expected = owners[k].iter().enumerate().filter(|(_, owner)| **owner == rank);
                            let expected: Vec<usize> = expected.map(|(element, _)| element).collect();
                            assert_eq!(
                                elements.collect::<Vec<usize>>(),
                                expected,
                                "{sizes:?}, {rank}/{ranks}"
                            );
                        }
                        let missing = owners.iter().enumerate().filter(|(k, of)| {
                            k % 2 == plane
                                && of.contains(&rank)
                                && !own.layout.tensors.iter().any(|tensor| *tensor.name == *format!("{k:03}"))
                        });
                        assert_eq!(missing.count(), 0, "{sizes:?}, {rank}/{ranks}");
                    }
                }
            }
        }
    }
}
