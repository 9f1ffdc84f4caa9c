//! Instruction for pooling.

use ortrain_expr::{DType, IndexKind, SlidingAxis, WindowPass, WindowShape, product_of_sizes};

use super::body::{Body, contiguous_fault};
use crate::buffer::{Buffer, BufferId};
use crate::cost::Traffic;
use crate::operand::{Operand, Use};

/// Pooling, or a gradient of pooling. All operands are whole buffers, row-major.
#[derive(Clone, Debug)]
pub struct Window {
    /// Pass (maximum, sum or a gradient) and sizes.
    pub shape: WindowShape,
    /// Input.
    pub source: Operand,
    /// Positions of the maxima, one for each output element. The maximum optionally writes them, its gradient reads
    /// them, and sums have none.
    pub index: Option<WindowIndex>,
    /// Output, of the source's type.
    pub target: Operand,
}

/// Positions of the maxima of a [`Window`].
#[derive(Clone, Debug)]
pub struct WindowIndex {
    /// Representation of a position. A pass converts positions to window cells if only gradients read them.
    pub kind: IndexKind,
    /// Buffer of the positions.
    pub operand: Operand,
}

impl WindowIndex {
    /// Creates positions that are element indices.
    #[must_use]
    pub fn with_element_positions(operand: Operand) -> WindowIndex {
        WindowIndex { kind: IndexKind::Element, operand }
    }
}

impl Window {
    fn index_use(&self) -> Use {
        if self.shape.pass == WindowPass::MaxGradient { Use::Read } else { Use::Write }
    }
}

impl Body for Window {
    fn name(&self) -> &'static str {
        "Window"
    }

    fn describe_sizes(&self) -> String {
        let WindowShape { pass, planes, axes } = &self.shape;
        let sizes = |size: fn(&SlidingAxis) -> usize| axes.iter().map(size).collect::<Vec<_>>();
        let (inputs, windows) = (sizes(|axis| axis.input), sizes(|axis| axis.kernel));
        format!("{pass:?} {planes} planes {inputs:?}, window {windows:?}")
    }

    fn buffers(&self, each: &mut dyn FnMut(BufferId, Use)) {
        let index = self.index.as_ref().map(|index| index.operand.buffer);
        let (read, written) = if self.index_use().reads() { (index, None) } else { (None, index) };
        [Some(self.source.buffer), read].into_iter().flatten().for_each(|id| each(id, Use::Read));
        [Some(self.target.buffer), written].into_iter().flatten().for_each(|id| each(id, Use::Write));
    }

    fn buffers_mut(&mut self, each: &mut dyn FnMut(&mut BufferId, Use)) {
        let index_use = self.index_use();
        each(&mut self.source.buffer, Use::Read);
        each(&mut self.target.buffer, Use::Write);
        self.index.iter_mut().for_each(|index| each(&mut index.operand.buffer, index_use));
    }

    fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        if let Some(fault) = self.shape.validate() {
            return Some(fault);
        }
        let buffer = |operand: &Operand| &buffers[operand.buffer.0 as usize];
        let [source, target] = self.shape.operands().map(Some);
        let (from, to) = (buffer(&self.source), buffer(&self.target));
        if from.dtype == DType::Bool {
            return Some(format!("expected numbers, but {:?} has the type {}", from.label, from.dtype));
        }
        if (Some(from.len), Some(to.len)) != (source, target) || from.dtype != to.dtype {
            return Some(format!(
                "got {} {} to {} {}, expected {source:?} to {target:?} elements",
                from.len, from.dtype, to.len, to.dtype
            ));
        }
        let outputs = self.shape.planes * self.shape.plane_outputs();
        let fits = |index: &WindowIndex| {
            let Buffer { len, dtype, .. } = buffer(&index.operand);
            *len == outputs && self.shape.has_positions(index.kind, *dtype)
        };
        let index_fits = match self.shape.pass {
            WindowPass::Max => self.index.as_ref().is_none_or(fits),
            WindowPass::MaxGradient => self.index.as_ref().is_some_and(fits),
            WindowPass::Sum | WindowPass::SumGradient => self.index.is_none(),
        };
        if !index_fits {
            return Some("the positions do not fit the windows".into());
        }
        contiguous_fault(
            [&self.source, &self.target].into_iter().chain(self.index.iter().map(|index| &index.operand)),
            buffers,
        )
    }

    fn traffic(&self, traffic: &mut Traffic<'_>) {
        self.buffers(&mut |id, used| match used.writes() {
            true => traffic.add_write(id, u64::MAX),
            false => traffic.add_read(id, u64::MAX),
        });
    }

    fn flops(&self) -> u64 {
        let WindowShape { pass, planes, axes } = &self.shape;
        match pass {
            WindowPass::MaxGradient => product_of_sizes([*planes, self.shape.plane_outputs()]),
            WindowPass::Max | WindowPass::Sum | WindowPass::SumGradient => {
                axes.iter().map(SlidingAxis::pairs_over_input).fold(*planes as u64, u64::saturating_mul)
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.shape.operands()[1] == 0
    }
}
