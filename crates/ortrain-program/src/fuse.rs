//! Fusion and order of instructions.

use std::collections::BTreeSet;

use ortrain_expr::{Access, Builder, Dims, Inst, Nest, Reg, Strides};

use crate::{Buffer, BufferId, Entries, Instruction, Loop, Place, Step};

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

/// Expressions do not grow past this: longer ones need more registers than stay in the nearest cache.
const LONGEST_EXPRESSION: usize = 192;

/// Nests do not read more buffers than this after fusion.
const MOST_LOADS: usize = 32;

/// Merges element-wise maps into what makes their operand: another map, the epilogue of a matrix product, or the
/// map that follows a reduction. The merged instruction stands where the map stood.
pub(crate) fn fuse(instructions: &mut Vec<Instruction>, buffers: &[Buffer], outputs: &[BufferId]) {
    let mut work = Fusion::new(std::mem::take(instructions), buffers, outputs);
    for consumer in 0..work.instructions.len() {
        // What was merged may itself fit behind another producer.
        while let Some((producer, merged)) = work.candidate(consumer) {
            work.replace(producer, merged);
        }
    }
    instructions.extend(work.instructions.into_iter().flatten());
}

/// Instructions while they are fused, and who reads and writes each buffer.
struct Fusion<'a> {
    instructions: Vec<Option<Instruction>>,
    buffers: &'a [Buffer],
    is_output: Vec<bool>,
    readers: Vec<BTreeSet<usize>>,
    writers: Vec<Vec<usize>>,
    /// Instructions that write state, ascending.
    state_writers: Vec<usize>,
}

impl<'a> Fusion<'a> {
    fn new(instructions: Vec<Instruction>, buffers: &'a [Buffer], outputs: &[BufferId]) -> Fusion<'a> {
        let mut work = Fusion {
            instructions: Vec::with_capacity(instructions.len()),
            buffers,
            is_output: vec![false; buffers.len()],
            readers: vec![BTreeSet::new(); buffers.len()],
            writers: vec![Vec::new(); buffers.len()],
            state_writers: Vec::new(),
        };
        for output in outputs {
            work.is_output[output.0 as usize] = true;
        }
        for (index, instruction) in instructions.into_iter().enumerate() {
            for id in instruction.step.reads() {
                work.readers[id.0 as usize].insert(index);
            }
            let writes = instruction.step.writes();
            if writes.iter().any(|&id| !is_work(buffers, id)) {
                work.state_writers.push(index);
            }
            for id in writes {
                work.writers[id.0 as usize].push(index);
            }
            work.instructions.push(Some(instruction));
        }
        work
    }

    fn step(&self, index: usize) -> Option<&Step> {
        self.instructions[index].as_ref().map(|instruction| &instruction.step)
    }

    /// A producer whose only result is read by maps alone, one per entry, of which `consumer` is the first; with the
    /// steps that replace those.
    fn candidate(&self, consumer: usize) -> Option<(usize, Vec<(usize, Step)>)> {
        let Some(Step::Map(map)) = self.step(consumer) else { return None };
        map.reads.iter().find_map(|&id| self.producer_of(id, consumer))
    }

    fn producer_of(&self, id: BufferId, consumer: usize) -> Option<(usize, Vec<(usize, Step)>)> {
        let slot = id.0 as usize;
        if !is_work(self.buffers, id) || self.is_output[slot] {
            return None;
        }
        let [producer] = self.writers[slot][..] else { return None };
        let made = self.step(producer)?;
        let readers = &self.readers[slot];
        if producer >= consumer || readers.first() != Some(&consumer) || made.writes().len() != 1 {
            return None;
        }
        // A step that fails has changed nothing: what can fail never writes state itself.
        let writes_state = |k: &usize| self.state_writers.binary_search(k).is_ok();
        if made.can_fail() && readers.iter().any(writes_state) {
            return None;
        }
        // Several readers are fine if no entry runs two of them.
        let mut seen = Entries::NONE;
        for &reader in readers {
            let entries = self.instructions[reader].as_ref()?.entries;
            if !seen.and(entries).is_empty() {
                return None;
            }
            seen = seen.or(entries);
        }
        if !self.unchanged_between(made, producer, *readers.last()?) {
            return None;
        }
        let merged = readers.iter().map(|&reader| match self.step(reader) {
            Some(Step::Map(map)) => merge(made, map, id).map(|step| (reader, step)),
            _ => None,
        });
        Some((producer, merged.collect::<Option<Vec<_>>>()?))
    }

    /// Whether what a step reads is still the same where the last reader of its result stands.
    fn unchanged_between(&self, step: &Step, producer: usize, reader: usize) -> bool {
        let reads = step.reads();
        let written_between = |list: &[usize]| list.iter().any(|&k| k > producer && k < reader);
        if reads.iter().any(|id| is_work(self.buffers, *id) && written_between(&self.writers[id.0 as usize]))
        {
            return false;
        }
        let in_state: Vec<BufferId> = reads.into_iter().filter(|&id| !is_work(self.buffers, id)).collect();
        if in_state.is_empty() {
            return true;
        }
        let overlaps = |a: BufferId, b: BufferId| {
            let (x, y) = (&self.buffers[a.0 as usize], &self.buffers[b.0 as usize]);
            match (x.place, y.place) {
                (Place::Plane(p, from), Place::Plane(q, other)) => {
                    p == q && from < other + y.bytes() && other < from + x.bytes()
                }
                _ => false,
            }
        };
        let between = self.state_writers.iter().filter(|&&k| k > producer && k < reader);
        !between
            .filter_map(|&k| self.step(k))
            .flat_map(Step::writes)
            .any(|written| in_state.iter().any(|&read| overlaps(read, written)))
    }

    /// Puts merged steps where the maps stood and takes the producer out.
    fn replace(&mut self, producer: usize, merged: Vec<(usize, Step)>) {
        let Some(old) = self.instructions[producer].take() else { return };
        for id in old.step.reads() {
            self.readers[id.0 as usize].remove(&producer);
        }
        for id in old.step.writes() {
            self.writers[id.0 as usize].clear();
            self.readers[id.0 as usize].clear();
        }
        for (reader, step) in merged {
            for id in step.reads() {
                self.readers[id.0 as usize].insert(reader);
            }
            if let Some(instruction) = &mut self.instructions[reader] {
                instruction.step = step;
            }
        }
    }
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
        Step::Conv(c) => &c.epilogue,
        Step::Window(_) | Step::ScatterAdd(_) => return None,
    };
    let length = first.nest.expr.insts().len() + map.nest.expr.insts().len();
    if length > LONGEST_EXPRESSION || first.reads.len() + map.reads.len() > MOST_LOADS {
        return None;
    }
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
        let virtual_loads = usize::from(matches!(producer, Step::MatMul(_) | Step::Conv(_)));
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
        Step::Conv(c) => Step::Conv(Box::new(crate::Conv { epilogue: merged, ..(**c).clone() })),
        Step::Window(_) | Step::ScatterAdd(_) => return None,
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
