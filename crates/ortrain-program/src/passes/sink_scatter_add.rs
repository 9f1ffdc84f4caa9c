//! Moves scattered sums after the maps that read them.
//!
//! The gradient of an embedding is zero except for sums in a few rows, and it is added to an accumulated gradient. The
//! direct lowering takes three passes over all rows. This pass moves the sums across every map that only adds their
//! target to other values. The sums then update the result of the map, and touch only the indexed rows.

use ortrain_expr::{BinaryOp, DType, Inst, Reg, Scalar, Type};

use super::{Changed, Draft, Outcome, Target};
use crate::operand::single_result;
use crate::rewrite::inline_nest::{is_injective, is_same_access, with_constants};
use crate::scheduled::VersionCounter;
use crate::uses::PositionSet;
use crate::{
    Buffer, BufferId, BufferLocation, GradientModes, Instruction, Load, Nest, Operand, ScatterAdd,
    ScheduledInstruction,
};

/// Moves sums after the maps that read their targets, one map at a time.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let mut new_versions = VersionCounter::after(&draft.instructions);
    let (mut at, mut changes) = (0, 0);
    while at < draft.instructions.len() {
        if let Some(sunk) = sink_sums(draft, at, &mut new_versions) {
            draft.instructions = sunk;
            changes += 1;
        } else {
            at += 1;
        }
    }
    Ok(Changed(changes))
}

/// Returns the instructions with the sums at `at` moved after the maps that read them, if the sums have no other
/// readers.
fn sink_sums(
    draft: &Draft,
    at: usize,
    new_versions: &mut VersionCounter,
) -> Option<Vec<ScheduledInstruction>> {
    let Draft { instructions, buffers, .. } = draft;
    let ScheduledInstruction {
        instruction: Instruction::ScatterAdd(sums),
        gradient_modes: entries,
        versions,
        ..
    } = &instructions[at]
    else {
        return None;
    };
    let target = sums.target.buffer;
    let (source, index_buffer) = (sums.source.buffer, sums.index.buffer);
    let buffer = |id: BufferId| &buffers[id.0 as usize];
    let in_a_plane = |id: BufferId| matches!(buffer(id).location, BufferLocation::Plane(..));
    if sums.overwrites
        || draft.is_visible(target)
        || !matches!(buffer(target).dtype, DType::F32 | DType::F64)
        || in_a_plane(source)
        || in_a_plane(index_buffer)
        // The source stays live longer, and the target is dropped: this must not increase memory.
        || buffer(source).bytes() > buffer(target).bytes()
    {
        return None;
    }
    let uses = draft.uses();
    let others =
        |positions: &PositionSet| positions.iter().filter(|&index| index != at).collect::<Vec<usize>>();
    let (writers, readers) = (others(uses.writers(target)), others(uses.readers(target)));
    let mut modes = GradientModes::NONE;
    for &index in &readers {
        let other = &instructions[index];
        let map = flexible_map(other)?;
        let goes_along = entries.and(other.gradient_modes) == other.gradient_modes
            && modes.and(other.gradient_modes).is_empty();
        if index < at || !goes_along || !only_adds_target(map, target, buffers) {
            return None;
        }
        modes = modes.or(other.gradient_modes);
    }
    let range = at + 1..*readers.last()? + 1;
    let is_changed = |id: BufferId| uses.writers(id).within(range.clone()).next().is_some();
    if writers.iter().any(|&index| index > at) || is_changed(source) || is_changed(index_buffer) {
        return None;
    }
    let starts_at_zero = writers.iter().all(|&index| flexible_map(&instructions[index]).is_some_and(is_zero));
    let mut result = Vec::with_capacity(instructions.len() + readers.len());
    for (index, scheduled) in instructions.iter().enumerate() {
        match &scheduled.instruction {
            _ if index == at => {}
            Instruction::Nest(map) if readers.contains(&index) => {
                let rest = if starts_at_zero { without_zeros(map, target)? } else { Some((**map).clone()) };
                let to = single_result(map)?;
                let version = scheduled.versions.written_version(to)?;
                let result_of_map = Operand { buffer: to, access: sums.target.access.clone() };
                let sums = ScatterAdd { target: result_of_map, ..(**sums).clone() };
                let mut versions_of_sums =
                    versions.clone().with_read_of(to, &scheduled.versions).with_write(to, version);
                if let Some(map) = rest {
                    // The map reads the target before the sums, and the sums update the result of the map.
                    let before = new_versions.next();
                    let new_versions_read = scheduled.versions.clone().with_read_of(target, versions);
                    result.push(
                        scheduled.with_instruction(
                            Instruction::from(map),
                            &new_versions_read.with_write(to, before),
                        ),
                    );
                    versions_of_sums = versions_of_sums.with_read(to, before);
                }
                let sum = ScheduledInstruction {
                    gradient_modes: scheduled.gradient_modes,
                    ..instructions[at].clone()
                };
                result.push(sum.with_instruction(Instruction::from(sums), &versions_of_sums));
            }
            _ => result.push(scheduled.clone()),
        }
    }
    Some(result)
}

/// Returns the map of an instruction, if passes may change its space.
fn flexible_map(scheduled: &ScheduledInstruction) -> Option<&Nest> {
    scheduled.instruction.as_map().filter(|map| map.segments.is_none())
}

/// Returns true if a map fills its results with zeros.
fn is_zero(map: &Nest) -> bool {
    let expr = &map.expr;
    let zero = |reg: &Reg| match expr.insts()[usize::from(reg.0)].0 {
        Inst::Const(value) => value.to_f64() == 0.0,
        _ => false,
    };
    expr.outputs().iter().all(zero)
}

/// Returns the load of a buffer, if there is exactly one.
fn only_load_of(map: &Nest, id: BufferId) -> Option<(usize, &Operand)> {
    let loads = map.loads.iter().enumerate();
    let mut matching =
        loads.filter_map(|(slot, load)| Some((slot, load.operand().filter(|from| from.buffer == id)?)));
    matching.next().filter(|_| matching.next().is_none())
}

/// Returns true if a map stores, element by element, a buffer or the sum of the buffer and other values.
fn only_adds_target(map: &Nest, target: BufferId, buffers: &[Buffer]) -> bool {
    let (Some((slot, load)), [store]) = (only_load_of(map, target), map.stores.as_slice()) else {
        return false;
    };
    let (dims, expr) = (&map.dims, &map.expr);
    let (from, to) = (&buffers[target.0 as usize], &buffers[store.buffer.0 as usize]);
    let elements: usize = dims.iter().product();
    if !is_same_access(&load.access, &store.access, dims)
        || !is_injective(&load.access, dims)
        || elements != from.len
        || (from.len, from.dtype) != (to.len, to.dtype)
        || expr.can_fail()
    {
        return false;
    }
    let reads = |inst: &Inst| matches!(*inst, Inst::Load(s) | Inst::LoadAt(s, _) if usize::from(s) == slot);
    let depends = |reg: Reg| {
        let needed = expr.dependencies_of(&[reg]);
        expr.insts().iter().zip(needed).any(|((inst, _), needed)| needed && reads(inst))
    };
    let mut reg = expr.outputs()[0];
    loop {
        match expr.insts()[usize::from(reg.0)] {
            (Inst::Load(s), ty) => return usize::from(s) == slot && ty == Type::of(from.dtype),
            (Inst::Binary(BinaryOp::Add, a, b), _) => {
                let [in_a, in_b] = [a, b].map(depends);
                if in_a == in_b {
                    return false;
                }
                reg = if in_a { a } else { b };
            }
            _ => return false,
        }
    }
}

/// Returns a map without its load of zeros. The inner `None` means that nothing remains: the map would store an
/// unchanged value. The outer `None` means that the rewrite is impossible.
fn without_zeros(map: &Nest, zeros: BufferId) -> Option<Option<Nest>> {
    let is_zeros =
        |load: &Load| load.operand().is_some_and(|from| from.buffer == zeros).then_some(Scalar::F64(0.0));
    let rest = with_constants(map, &map.loads.iter().map(is_zeros).collect::<Vec<_>>())?;
    let store = &rest.stores[0];
    let is_same = match rest.expr.insts()[usize::from(rest.expr.outputs()[0].0)] {
        (Inst::Load(slot), _) => rest.loads[usize::from(slot)].operand().is_some_and(|load| {
            load.buffer == store.buffer && is_same_access(&load.access, &store.access, &rest.dims)
        }),
        _ => false,
    };
    Some((!is_same).then_some(rest))
}
