//! Division of the gradients into buckets, which ranks sum one after the other.

use std::ops::Range;
use std::sync::Arc;

use ortrain_graph::DType;
use ortrain_program::Memory;

use super::communicator::{Collective, Operand, Reduction};
use crate::Result;
use crate::state::layout::StateLayout;

/// Minimum bytes of a bucket, except for the last one of a plane. Smaller messages take almost the same time.
const MIN_BUCKET_BYTES: usize = 1 << 20;

/// Contiguous part of a gradient plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// Index among the gradient planes.
    pub(crate) plane: usize,
    pub(crate) dtype: DType,
    pub(crate) elements: Range<usize>,
}

impl Bucket {
    /// Returns the range in bytes.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.elements.start * self.dtype.size()..self.elements.end * self.dtype.size()
    }

    /// Returns the sum over all ranks.
    pub(crate) fn sum(&self, planes: &[Arc<Memory>]) -> Result<Collective> {
        let operand = Operand::new(&planes[self.plane], self.dtype, self.elements.clone())?;
        Ok(Collective::AllReduce { operand, reduction: Reduction::Sum })
    }
}

/// Divides the gradient planes into buckets that cover the planes. `position` is the position of the node that computes
/// the gradient of a parameter.
///
/// The buckets are in the order in which the nodes complete them. The order follows from the layout and the graph alone,
/// not from shapes of batches: all ranks sum the same buckets in the same order.
pub(crate) fn buckets(layout: &StateLayout, position: &dyn Fn(&str) -> usize) -> Vec<Bucket> {
    let mut buckets: Vec<(usize, Bucket)> = Vec::new();
    for (plane, of) in layout.trainable.iter().enumerate() {
        let size = of.dtype.size();
        let (mut start, mut last) = (0, 0);
        for (k, tensor) in of.tensors.iter().enumerate() {
            last = last.max(position(&tensor.name));
            let end = of.tensors.get(k + 1).map_or(of.bytes, |next| next.offset);
            if end - start >= MIN_BUCKET_BYTES || end == of.bytes {
                let elements = start / size..end / size;
                buckets.push((last, Bucket { plane, dtype: of.dtype, elements }));
                (start, last) = (end, 0);
            }
        }
    }
    // The sort is stable: buckets with the same position keep the order of the planes.
    buckets.sort_by_key(|(last, _)| *last);
    buckets.into_iter().map(|(_, bucket)| bucket).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::layout::{PlaneLayout, TensorLayout};

    fn plane(dtype: DType, sizes: &[(&str, usize)]) -> PlaneLayout {
        let mut offset = 0;
        let tensor = |&(name, bytes): &(&str, usize)| {
            let layout = TensorLayout { name: name.into(), dims: vec![bytes / dtype.size()], offset };
            offset += bytes.next_multiple_of(256);
            layout
        };
        let tensors = sizes.iter().map(tensor).collect();
        PlaneLayout { dtype, bytes: offset, tensors }
    }

    #[test]
    fn buckets_cover_the_planes_in_the_order_of_the_graph() {
        let large = MIN_BUCKET_BYTES;
        let layout = StateLayout {
            trainable: vec![
                plane(DType::F32, &[("a", large), ("b", 40), ("c", large), ("d", 8)]),
                plane(DType::F64, &[("e", 16)]),
            ],
            frozen: vec![],
        };
        let order = ["d", "c", "e", "b", "a"];
        let position = |name: &str| order.iter().position(|known| *known == name).unwrap();
        let found = buckets(&layout, &position);
        let ranges: Vec<(usize, Range<usize>)> = found.iter().map(|b| (b.plane, b.bytes())).collect();
        let middle = large..2 * large + 256;
        let expected = [(0, middle.end..middle.end + 256), (1, 0..256), (0, middle), (0, 0..large)];
        assert_eq!(ranges, expected);
    }

    #[test]
    fn empty_planes_have_no_buckets() {
        let layout = StateLayout { trainable: vec![plane(DType::F32, &[])], frozen: vec![] };
        assert!(buckets(&layout, &|_| 0).is_empty());
    }
}
