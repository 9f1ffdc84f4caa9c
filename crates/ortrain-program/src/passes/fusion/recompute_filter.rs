//! Quick test that rejects unprofitable recomputations without building them.
//!
//! Nearly every value of a long expression could be recomputed, and recomputation rarely pays. Building each fused
//! expression is expensive. This test only looks at the instructions that would be added.

use std::cell::OnceCell;
use std::hash::{Hash, Hasher};

use ortrain_expr::{Inst, Reg, Type};
use rustc_hash::{FxHashSet, FxHasher};
use smallvec::SmallVec;

use crate::operand::loaded_buffers;
use crate::rewrite::inline_nest::is_injective;
use crate::target::FusionWeights;
use crate::weight::{max_load_weight, operation_weight};
use crate::{Buffer, BufferId, Instruction, Load, Nest};

/// Maximum number of points. Beyond it, the sums of weights are not exact.
const MAX_POINTS: usize = 1 << 40;

/// Returns a value number for each instruction of an expression. It depends on the operations and the loaded buffers,
/// but not on the access. Instructions that fusion would merge have equal numbers.
fn value_numbers(nest: &Nest) -> Vec<u64> {
    let mut numbers: Vec<u64> = Vec::with_capacity(nest.expr.insts().len());
    for &(inst, ty) in nest.expr.insts() {
        let mut hasher = FxHasher::default();
        ty.hash(&mut hasher);
        match inst {
            Inst::Load(slot) | Inst::LoadAt(slot, _) => {
                matches!(inst, Inst::Load(_)).hash(&mut hasher);
                nest.loads[usize::from(slot)].operand().map(|operand| operand.buffer).hash(&mut hasher);
            }
            other => other.map_operands(|_| Reg(0)).hash(&mut hasher),
        }
        inst.operands().for_each(|reg| numbers[usize::from(reg.0)].hash(&mut hasher));
        numbers.push(hasher.finish());
    }
    numbers
}

/// Value numbers of an expression, computed on demand: most tests end without them.
pub(super) type ValueNumbers = OnceCell<FxHashSet<u64>>;

/// Returns true if an instruction provably does not get lighter when it computes `value` instead of loading it. The
/// map computes `value` as its result `result`. The test compares the weight of the added operations with the weight
/// of the removed loads. `false` means unknown. `own_numbers` are the value numbers of the instruction.
///
/// An instruction without reductions counts each operation once, on all points or on one point. If the value is not
/// yet computed, no operation that uses the value merges with another operation. Nothing else gets lighter.
pub(super) fn cannot_save_weight(
    instruction: &Instruction,
    own_numbers: &ValueNumbers,
    value: BufferId,
    (map, result): (&Nest, usize),
    machine: (&[Buffer], &FusionWeights),
) -> bool {
    let Some(nest) = instruction.flexible_nest() else { return false };
    let expr = &map.expr;
    let points = |nest: &Nest| nest.dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    let Some(total) = points(nest).filter(|&total| total <= MAX_POINTS) else { return false };
    // Coordinates become other instructions if the spaces differ.
    let uses_coordinate = |(inst, _): &(Inst, Type)| matches!(inst, Inst::Coordinate(_));
    let is_map = nest.inner == 0 && nest.reductions.is_empty() && !nest.expr.can_fail();
    if !is_map || expr.insts().iter().any(uses_coordinate) {
        return false;
    }
    let root = expr.outputs()[result];
    // If every element is read at one point, a value that varies over elements varies over points too.
    let loads = nest.loads.iter().enumerate();
    let slots: SmallVec<[usize; 4]> = loads
        .filter(|(_, load)| load.operand().is_some_and(|from| from.buffer == value))
        .map(|(slot, _)| slot)
        .collect();
    let covers_dims = |load: &Load| load.access().is_some_and(|access| is_injective(access, &nest.dims));
    let covers_points =
        points(map) == Some(total) && slots.iter().all(|&slot| covers_dims(&nest.loads[slot]));
    let load_varies: SmallVec<[bool; 32]> = map
        .loads
        .iter()
        .map(|load| {
            load.access().is_some_and(|access| {
                map.dims.iter().zip(&access.strides).any(|(&dim, &stride)| dim > 1 && stride != 0)
            })
        })
        .collect();
    let mut varies: Vec<bool> = Vec::with_capacity(expr.insts().len());
    for (inst, _) in expr.insts() {
        let varying = match *inst {
            Inst::Load(slot) => load_varies[usize::from(slot)],
            _ => inst.operands().any(|reg| varies[usize::from(reg.0)]),
        };
        varies.push(varying);
    }
    // The users of the value must be evaluated as often as before.
    if total > 1 && !(covers_points && varies[usize::from(root.0)]) {
        return false;
    }
    let needed = expr.dependencies_of(&[root]);
    let removed = max_load_weight(nest, &slots, machine);
    // Returns true if the added operations are as heavy as the removed loads.
    let adds_too_much = |is_added: &dyn Fn(usize) -> bool| {
        let mut added = 0u64;
        (expr.insts().iter().enumerate()).any(|(k, &(inst, ty))| {
            if needed[k] && is_added(k) {
                let evaluated = if varies[k] { total as u64 } else { 1 };
                added = added.saturating_add(operation_weight(inst, ty).saturating_mul(evaluated));
            }
            added >= removed
        })
    };
    // Operations on a buffer that the instruction does not load are surely added.
    let is_own =
        |load: &Load| load.operand().is_none_or(|from| loaded_buffers(nest).any(|own| own == from.buffer));
    let load_is_own: SmallVec<[bool; 32]> = map.loads.iter().map(is_own).collect();
    let mut is_foreign: Vec<bool> = Vec::with_capacity(expr.insts().len());
    for (inst, _) in expr.insts() {
        let of_load = match *inst {
            Inst::Load(slot) | Inst::LoadAt(slot, _) => !load_is_own[usize::from(slot)],
            _ => false,
        };
        is_foreign.push(of_load || inst.operands().any(|reg| is_foreign[usize::from(reg.0)]));
    }
    if is_foreign[usize::from(root.0)] && adds_too_much(&|k| is_foreign[k]) {
        return true;
    }
    let own_numbers = own_numbers.get_or_init(|| value_numbers(nest).into_iter().collect());
    let numbers = value_numbers(map);
    if own_numbers.contains(&numbers[usize::from(root.0)]) {
        return false;
    }
    adds_too_much(&|k| !own_numbers.contains(&numbers[k]))
}
