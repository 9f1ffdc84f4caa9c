//! Assignment of the axes of a nest to loops, and of work to stages.

use ortrain_expr::{Inst, Load, Nest, Reg, Type};
use smallvec::SmallVec;

use super::op::Kind;

/// Loop order of a tile program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoopOrder {
    /// Every point is independent.
    Map,
    /// Tiles run along the reduced axes.
    Row,
    /// Tiles run along the axes that are not reduced. The driver steps through the reduced axes.
    Col,
}

/// Assignment of the axes of a nest to loops.
pub(crate) struct LoopPlan<'a> {
    pub(crate) nest: &'a Nest,
    pub(crate) loop_order: LoopOrder,
    /// Axes that the driver steps through.
    pub(crate) outer_axes: &'a [usize],
    /// Axes that tiles run along.
    pub(crate) tile_axes: &'a [usize],
}

impl LoopPlan<'_> {
    /// Selects the work that the first stage does for later stages, over segments. `overlaps` tells for a store and a
    /// load if the two may share elements.
    pub(super) fn first_stage_outputs(&self, overlaps: &dyn Fn(usize, usize) -> bool) -> FirstStageOutputs {
        let nest = self.nest;
        let mut ahead = FirstStageOutputs::default();
        let Some(segments) = &nest.segments else { return ahead };
        if nest.reductions.is_empty() || nest.expr.can_fail() {
            return ahead;
        }
        let insts = nest.expr.insts();
        // For each instruction: true if the value varies along a segment, needs a reduction, is expensive.
        let mut about: Vec<(bool, bool, bool)> = Vec::with_capacity(insts.len());
        for &(inst, ty) in insts {
            let (mut along, mut late, mut slow) = (false, false, false);
            for operand in inst.operands() {
                let of = about[usize::from(operand.0)];
                (along, late, slow) = (along | of.0, late | of.1, slow | of.2);
            }
            match inst {
                Inst::Load(slot) => {
                    along = match &nest.loads[usize::from(slot)] {
                        Load::Buffer(access) => access.strides[1] != 0,
                        Load::Accumulator(_) => true,
                    }
                }
                Inst::Coordinate(axis) => along = axis == 1,
                Inst::Reduced(_) => late = true,
                Inst::Unary(op, _) => slow |= along && Kind::Unary(op, ty).cost() > 1,
                Inst::Binary(op, ..) => slow |= along && Kind::Binary(op, ty).cost() > 1,
                _ => {}
            }
            about.push((along, late, slow));
        }
        let of = |reg: Reg| about[usize::from(reg.0)];
        let outputs = nest.expr.outputs();
        let (late, early): (Vec<Reg>, Vec<Reg>) =
            nest.reductions.iter().map(|reduction| reduction.value).partition(|&value| of(value).1);
        let is_early = |&store: &usize| {
            matches!(of(outputs[store]), (true, false, _)) && nest.stores[store].strides[1] != 0
        };
        ahead.stored = (0..outputs.len()).filter(is_early).collect();
        loop {
            // Marks the instructions that later stages need, from their outputs back to their loads.
            ahead.saved.clear();
            let stored = ahead.stored.iter().map(|&store| outputs[store]);
            let available =
                nest.expr.dependencies_of(&early.iter().copied().chain(stored).collect::<Vec<_>>());
            let mut needed = vec![false; insts.len()];
            let later = (0..outputs.len()).filter(|store| !ahead.stored.contains(store));
            for root in late.iter().copied().chain(later.map(|store| outputs[store])) {
                needed[usize::from(root.0)] = true;
            }
            for (i, &(inst, ty)) in insts.iter().enumerate().rev() {
                if !needed[i] {
                    continue;
                }
                let is_slow = matches!(about[i], (true, false, true)) && ty == Type::F32;
                if is_slow && available[i] && segments.max_len() <= MAX_SAVED_SEGMENT {
                    ahead.saved.push(Reg(i as u16));
                } else {
                    inst.operands().for_each(|operand| needed[usize::from(operand.0)] = true);
                }
            }
            let is_saved = |i: usize| ahead.saved.iter().any(|reg| usize::from(reg.0) == i);
            let read: Vec<usize> = (insts.iter().enumerate())
                .filter(|&(i, _)| needed[i] && !is_saved(i))
                .filter_map(|(_, &(inst, _))| match inst {
                    Inst::Load(slot) | Inst::LoadAt(slot, _) => Some(usize::from(slot)),
                    _ => None,
                })
                .collect();
            let before = ahead.stored.len();
            // A store that moves to a later stage makes that stage read more. Other early stores may overwrite these
            // elements.
            ahead.stored.retain(|store| !read.iter().any(|&load| overlaps(*store, load)));
            if ahead.stored.len() == before {
                return ahead;
            }
        }
    }

    /// Returns true if a load is the first accumulator: the completed block at [`ExecContext::product`]. Further
    /// accumulators are row-major over the iteration space, at addresses of their own.
    pub(super) fn is_product(&self, slot: u16) -> bool {
        slot == 0 && self.has_product()
    }

    pub(super) fn has_product(&self) -> bool {
        self.nest.num_accumulators() > 0
    }
}

/// Work that the first stage does for later stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct FirstStageOutputs {
    /// Values that later stages load instead of recomputing them, because they need a division, a root or the like. No
    /// register keeps them between stages, and storing and loading them costs less.
    pub(super) saved: SmallVec<[Reg; 2]>,
    /// Stores of the nest that need no reduction, if no later stage reads their elements. Their operands are already
    /// computed in the first stage.
    pub(super) stored: SmallVec<[usize; 4]>,
}

/// Maximum number of elements of a segment with values saved between stages: 16 MiB of working memory for each value. A
/// longer segment fits no cache, and neither would its saved values.
const MAX_SAVED_SEGMENT: usize = 4 << 20;
