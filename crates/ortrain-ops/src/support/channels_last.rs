//! Images with the channels on the last axis, for operators that expect the channels on the second one.

use ortrain_graph::{Attrs, Shape, ValueId};

use crate::rewrite::Rewrite;

/// Direction of a move of the channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channels {
    /// From the last axis to the second one.
    ToSecondAxis,
    /// From the second axis to the last one.
    ToLastAxis,
}

impl Channels {
    /// Returns the axis of the input that becomes each axis of the result.
    fn order(self, rank: usize) -> Vec<usize> {
        match self {
            Channels::ToSecondAxis => [0, rank - 1].into_iter().chain(1..rank - 1).collect(),
            Channels::ToLastAxis => [0].into_iter().chain(2..rank).chain([1]).collect(),
        }
    }

    /// Returns the shape with the channels moved. The rank must be at least 2.
    pub(crate) fn move_shape(self, shape: &Shape) -> Shape {
        self.order(shape.rank()).into_iter().map(|axis| shape[axis].clone()).collect()
    }

    /// Adds a `Transpose` that moves the channels of a value of this rank, which must be at least 2.
    pub(crate) fn move_value(self, rw: &mut Rewrite<'_>, value: ValueId, rank: usize) -> ValueId {
        let order: Vec<i64> = self.order(rank).into_iter().map(|axis| axis as i64).collect();
        rw.add("Transpose", &[value], Attrs::new().with("perm", order))
    }
}
