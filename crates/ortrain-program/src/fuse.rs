//! Fusion and order of instructions.

use ortrain_expr::{Access, Builder, Dims, Inst, Nest, Reg, Strides};

use crate::{Buffer, BufferId, Instruction, Loop, Place, Step};

fn is_work(buffers: &[Buffer], id: BufferId) -> bool {
    matches!(buffers[id.0 as usize].place, Place::Work(_))
}

/// Drops instructions whose results nobody needs. Those that write state or can fail stay.
pub(crate) fn remove_unused(instructions: &mut Vec<Instruction>, buffers: &[Buffer], outputs: &[BufferId]) {
    let mut needed = vec![false; buffers.len()];
    for output in outputs {
        needed[output.0 as usize] = true;
    }
    let mut keep = vec![false; instructions.len()];
    for (index, instruction) in instructions.iter().enumerate().rev() {
        let step = &instruction.step;
        keep[index] =
            step.can_fail() || step.writes().iter().any(|&id| !is_work(buffers, id) || needed[id.0 as usize]);
        if keep[index] {
            for id in step.reads() {
                needed[id.0 as usize] = true;
            }
        }
    }
    let mut kept = keep.into_iter();
    instructions.retain(|_| kept.next() == Some(true));
}

/// Merges element-wise maps into what makes their operand: another map, the epilogue of a matrix product, or the
/// map that follows a reduction. The merged instruction stands where the map stood.
pub(crate) fn fuse(instructions: &mut Vec<Instruction>, buffers: &[Buffer], outputs: &[BufferId]) {
    let mut consumer = 0;
    while consumer < instructions.len() {
        match candidate(instructions, buffers, outputs, consumer) {
            Some((producer, readers, merged)) => {
                for (reader, step) in readers.iter().zip(merged) {
                    instructions[*reader].step = step;
                }
                instructions.remove(producer);
                // The merged map may now fit behind another producer.
                consumer = readers[0] - 1;
            }
            None => consumer += 1,
        }
    }
}

/// A producer whose only result is read by maps alone, one per entry, of which `consumer` is the first; with the
/// steps that replace them.
fn candidate(
    instructions: &[Instruction],
    buffers: &[Buffer],
    outputs: &[BufferId],
    consumer: usize,
) -> Option<(usize, Vec<usize>, Vec<Step>)> {
    let Step::Map(map) = &instructions[consumer].step else { return None };
    for &id in &map.reads {
        if !is_work(buffers, id) || outputs.contains(&id) {
            continue;
        }
        let Some(producer) = instructions[..consumer].iter().rposition(|i| i.step.writes().contains(&id))
        else {
            continue;
        };
        let writers = instructions.iter().filter(|i| i.step.writes().contains(&id)).count();
        let readers: Vec<usize> =
            (0..instructions.len()).filter(|&k| instructions[k].step.reads().contains(&id)).collect();
        if writers != 1 || readers[0] != consumer || instructions[producer].step.writes().len() != 1 {
            continue;
        }
        // A step that fails has changed nothing: what can fail never writes state itself.
        let writes_state = |k: &usize| instructions[*k].step.writes().iter().any(|&id| !is_work(buffers, id));
        if instructions[producer].step.can_fail() && readers.iter().any(writes_state) {
            continue;
        }
        // Several readers are fine if no entry runs two of them.
        let mut seen = instructions[consumer].entries;
        let disjoint = readers[1..].iter().all(|&k| {
            let fresh = seen.and(instructions[k].entries).is_empty();
            seen = seen.or(instructions[k].entries);
            fresh
        });
        if !disjoint || !unchanged_between(instructions, buffers, producer, *readers.last()?) {
            continue;
        }
        let merged: Option<Vec<Step>> = readers
            .iter()
            .map(|&k| match &instructions[k].step {
                Step::Map(map) => merge(&instructions[producer].step, map, id),
                _ => None,
            })
            .collect();
        if let Some(merged) = merged {
            return Some((producer, readers, merged));
        }
    }
    None
}

/// Whether what the producer reads is still the same where the last reader stands.
fn unchanged_between(
    instructions: &[Instruction],
    buffers: &[Buffer],
    producer: usize,
    reader: usize,
) -> bool {
    let overlaps = |a: BufferId, b: BufferId| {
        let (x, y) = (&buffers[a.0 as usize], &buffers[b.0 as usize]);
        match (x.place, y.place) {
            (Place::Plane(p, from), Place::Plane(q, other)) => {
                p == q && from < other + y.bytes() && other < from + x.bytes()
            }
            _ => a == b,
        }
    };
    let reads = instructions[producer].step.reads();
    !instructions[producer + 1..reader]
        .iter()
        .flat_map(|i| i.step.writes())
        .any(|written| reads.iter().any(|&read| overlaps(read, written)))
}

/// The sizes without ones: spaces that agree in them are walked in the same order.
fn squeezed(dims: &[usize]) -> Vec<usize> {
    dims.iter().copied().filter(|&dim| dim != 1).collect()
}

/// Re-expresses an access over `from` as one over `to`, which differs by axes of size 1 (and by trailing axes that
/// the access does not move along).
fn restride(access: &Access, from: &[usize], to: &[usize]) -> Access {
    let mut moving =
        from.iter().zip(&access.strides).filter(|&(&dim, _)| dim != 1).map(|(_, &stride)| stride);
    let strides: Strides =
        to.iter().map(|&dim| if dim == 1 { 0 } else { moving.next().unwrap_or(0) }).collect();
    Access { strides, ..access.clone() }
}

/// The producer with the map behind it, if they walk the same space.
fn merge(producer: &Step, map: &Loop, value: BufferId) -> Option<Step> {
    let first = match producer {
        Step::Map(l) | Step::Row(l) | Step::Col(l) => l,
        Step::MatMul(m) => &m.epilogue,
        Step::ScatterAdd(_) => return None,
    };
    let space: Dims = first.nest.dims.clone();
    let stored = &first.nest.stores[0];
    // A reduction's result per outer point can be followed by a map over the outer points.
    let walked = if first.nest.inner > 0 {
        let inner = &stored.strides[space.len() - first.nest.inner..];
        if inner.iter().zip(first.nest.inner_dims()).any(|(&stride, &dim)| stride != 0 || dim == 0) {
            return None;
        }
        first.nest.outer_dims()
    } else {
        &space[..]
    };
    if squeezed(walked) != squeezed(&map.nest.dims) || map.nest.dims.contains(&0) {
        return None;
    }
    let here = |access: &Access| {
        let mut moved = restride(access, &map.nest.dims, walked);
        moved.strides.resize(space.len(), 0);
        moved
    };
    // The map must read the value exactly as it was written, and nothing by computed index or coordinate.
    let moved_store = {
        let mut access = stored.clone();
        for (stride, &dim) in access.strides.iter_mut().zip(&space) {
            if dim == 1 {
                *stride = 0;
            }
        }
        access
    };
    for (slot, (access, &id)) in map.nest.loads.iter().zip(&map.reads).enumerate() {
        if id == value
            && (here(access) != moved_store
                || map
                    .nest
                    .expr
                    .insts()
                    .iter()
                    .any(|(inst, _)| matches!(inst, Inst::LoadAt(s, _) if usize::from(*s) == slot)))
        {
            return None;
        }
    }
    let uses_coordinates =
        |nest: &Nest| nest.expr.insts().iter().any(|(inst, _)| matches!(inst, Inst::Coordinate(_)));
    if uses_coordinates(&map.nest) && space != map.nest.dims {
        return None;
    }

    let mut loads = first.nest.loads.clone();
    let mut reads = first.reads.clone();
    let mut b = Builder::new();
    // The producer's own loads keep their slots.
    let mut kept: Vec<Reg> = Vec::new();
    for &(inst, ty) in first.nest.expr.insts() {
        let reg = b.push(inst.map_operands(|reg| kept[usize::from(reg.0)]), ty);
        kept.push(reg);
    }
    let result = kept[usize::from(first.nest.expr.outputs()[0].0)];
    let mut slots: Vec<usize> = Vec::new();
    for (access, &id) in map.nest.loads.iter().zip(&map.reads) {
        let access = here(access);
        let virtual_loads = usize::from(matches!(producer, Step::MatMul(_)));
        let known = (virtual_loads..loads.len()).find(|&k| reads[k] == id && loads[k] == access);
        slots.push(if id == value {
            usize::MAX
        } else if let Some(known) = known {
            known
        } else {
            loads.push(access);
            reads.push(id);
            loads.len() - 1
        });
    }
    // As stored and loaded again: a narrow type in between rounds, which must stay.
    let between = map.nest.loads.iter().zip(&map.reads).find(|&(_, &id)| id == value)?.0.dtype;
    if matches!(
        between,
        ortrain_expr::DType::F16
            | ortrain_expr::DType::BF16
            | ortrain_expr::DType::I8
            | ortrain_expr::DType::U8
            | ortrain_expr::DType::I16
            | ortrain_expr::DType::U16
    ) {
        return None;
    }
    let mut renumbered: Vec<Reg> = Vec::new();
    for &(inst, ty) in map.nest.expr.insts() {
        let at = |reg: Reg| renumbered[usize::from(reg.0)];
        let reg = match inst {
            Inst::Load(slot) if slots[usize::from(slot)] == usize::MAX => {
                let stored_as = b.convert(result, ortrain_expr::Type::of(between));
                b.convert(stored_as, ty)
            }
            Inst::Load(slot) => b.load(slots[usize::from(slot)], ty),
            Inst::LoadAt(slot, index) => b.load_at(slots[usize::from(slot)], at(index), ty),
            other => b.push(other.map_operands(at), ty),
        };
        renumbered.push(reg);
    }
    let results: Vec<Reg> =
        map.nest.expr.outputs().iter().map(|reg| renumbered[usize::from(reg.0)]).collect();
    let reduced: Vec<Reg> = first.nest.reductions.iter().map(|r| kept[usize::from(r.value.0)]).collect();
    let (expr, reduced) = b.finish_keeping(&results, &reduced);
    let mut reductions = first.nest.reductions.clone();
    for (reduction, value) in reductions.iter_mut().zip(reduced) {
        reduction.value = value;
    }
    let nest = Nest {
        dims: space.clone(),
        inner: first.nest.inner,
        loads,
        expr,
        reductions,
        stores: map.nest.stores.iter().map(here).collect(),
    };
    let merged = Loop { nest, reads, writes: map.writes.clone() };
    Some(match producer {
        Step::Map(_) => Step::Map(merged),
        Step::Row(_) => Step::Row(merged),
        Step::Col(_) => Step::Col(merged),
        Step::MatMul(m) => Step::MatMul(Box::new(crate::MatMul { epilogue: merged, ..(**m).clone() })),
        Step::ScatterAdd(_) => return None,
    })
}

/// Orders instructions so that nothing that can fail comes after a write to state: first what failing instructions
/// need and they themselves, then the rest. Within each part the order stays.
pub(crate) fn order(instructions: &mut Vec<Instruction>, buffers: &[Buffer]) {
    let writes_state = |i: &Instruction| i.step.writes().iter().any(|&id| !is_work(buffers, id));
    let Some(last_failing) = instructions.iter().rposition(|i| i.step.can_fail()) else { return };
    if !instructions[..last_failing].iter().any(writes_state) {
        return;
    }
    let mut early = vec![false; instructions.len()];
    let mut wanted: Vec<bool> = vec![false; buffers.len()];
    for (index, instruction) in instructions.iter().enumerate().rev() {
        let produces =
            instruction.step.writes().iter().any(|&id| is_work(buffers, id) && wanted[id.0 as usize]);
        if instruction.step.can_fail() || produces {
            early[index] = true;
            for id in instruction.step.reads() {
                wanted[id.0 as usize] = true;
            }
        }
    }
    let (first, rest): (Vec<_>, Vec<_>) =
        std::mem::take(instructions).into_iter().zip(early).partition(|(_, early)| *early);
    instructions.extend(first.into_iter().chain(rest).map(|(instruction, _)| instruction));
}
