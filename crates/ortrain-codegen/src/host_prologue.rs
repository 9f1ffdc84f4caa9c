//! Host prologue: the part of a program that the host runs before the device. It depends on inputs alone.
//!
//! - Numbers in float64, for a device without float64. For example, an optimizer computes rates and corrections from
//!   its settings, a few for each tensor.
//! - Guards of labels and indices. A run with an invalid input ends before the device starts, and no run waits for the
//!   device to validate its inputs.

use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, Dims, Expr, Inst, Reg, Segments, Strides, Type};
use ortrain_program::{
    Buffer, BufferId, BufferLocation, GradientModes, Instruction, Load, Nest, Operand, Program,
    ProgramBuilder, ScheduledInstruction, align,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::dialect::Dialect;

/// Host part of a program, which runs before the device part.
#[derive(Debug)]
pub struct HostPart {
    /// Program of the host.
    pub program: Program,
    /// Inputs of the whole program that the host part reads, in the order of its inputs.
    pub inputs: Vec<BufferId>,
    /// Buffers of the device part that receive the host's results, in the order of its outputs.
    pub results: Vec<BufferId>,
    /// Positions of the instructions of the device part with guards that the host has checked.
    pub checked: Vec<usize>,
}

/// Splits a program into a device part and a host part; returns `None` if the host has nothing to do. In a language
/// without float64, the host part also computes numbers in float64. The device part keeps all buffers of the program,
/// followed by buffers for the results of the host.
#[must_use]
pub fn split_host_part(program: &Program, dialect: &dyn Dialect) -> Option<(Program, HostPart)> {
    let moves_float64 = !dialect.has_float64();
    let writes = program.instructions.iter().flat_map(|scheduled| scheduled.instruction.writes());
    let mut host = HostBuilder { written: writes.collect(), ..HostBuilder::default() };
    let mut rest = program.clone();
    rest.instructions.clear();
    // The host cannot check values that the caller supplies later, at the yield.
    let mut is_host_computed = true;
    for scheduled in program.instructions.iter().flat_map(ScheduledInstruction::split_group) {
        let mut device_part = scheduled.clone();
        if let Some(nest) = scheduled.instruction.nest().filter(|nest| moves_float64 && uses_float64(nest)) {
            if matches!(scheduled.instruction, Instruction::Nest(_)) && host.can_compute(program, nest) {
                host.move_nest(program, &mut rest, nest, &scheduled.node)?;
                continue;
            }
            if let Some(nest) = host.move_subexpressions(program, &mut rest, nest, &scheduled.node) {
                device_part.instruction = scheduled.instruction.with_nest(nest);
            }
        }
        is_host_computed &= !matches!(scheduled.instruction, Instruction::Yield(_));
        if is_host_computed
            && device_part.gradient_modes == GradientModes::ALL
            && device_part.instruction.can_fail()
            && let Some(nest) = device_part.instruction.nest()
            && host.add_check(program, nest, &scheduled.node).is_some()
        {
            host.checked.push(rest.instructions.len());
        }
        rest.instructions.push(device_part);
    }
    if host.results.is_empty() && host.checked.is_empty() {
        return None;
    }
    let HostBuilder { builder, inputs, results, checked, .. } = host;
    let (program_inputs, own): (Vec<_>, Vec<_>) = inputs.into_iter().unzip();
    let (program_results, host_results): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    let program = builder.finish(own, host_results).ok()?;
    Some((rest, HostPart { program, inputs: program_inputs, results: program_results, checked }))
}

/// Returns true if a nest reads, writes or computes float64.
fn uses_float64(nest: &Nest) -> bool {
    let stored = nest.operands().any(|operand| operand.access.dtype == DType::F64);
    stored || nest.expr.insts().iter().any(|&(_, ty)| ty == Type::F64)
}

/// Host part under construction.
#[derive(Default)]
struct HostBuilder {
    builder: ProgramBuilder,
    /// Host buffer for each known buffer of the program.
    known: FxHashMap<BufferId, BufferId>,
    /// Buffers of the program and of the host.
    inputs: Vec<(BufferId, BufferId)>,
    results: Vec<(BufferId, BufferId)>,
    /// Buffers that instructions write. The host knows an input among them only at the beginning.
    written: FxHashSet<BufferId>,
    /// Positions of device instructions with guards that the host checks.
    checked: Vec<usize>,
}

impl HostBuilder {
    /// Returns true if the host knows the content of a buffer.
    fn knows(&self, program: &Program, id: BufferId) -> bool {
        let is_constant = matches!(program.buffer(id).location, BufferLocation::Constant(_));
        is_constant
            || self.known.contains_key(&id)
            || (program.inputs.contains(&id) && !self.written.contains(&id))
    }

    /// Returns true if the host can compute a whole nest. The nest must be the only writer of its results.
    fn can_compute(&self, program: &Program, nest: &Nest) -> bool {
        let is_only_writer = |id: BufferId| {
            let writes = program.instructions.iter().flat_map(|scheduled| scheduled.instruction.writes());
            let is_work = matches!(program.buffer(id).location, BufferLocation::Work(_));
            is_work && !program.inputs.contains(&id) && writes.filter(|&written| written == id).count() == 1
        };
        nest.is_map()
            && nest.segments.is_none()
            && nest
                .loads
                .iter()
                .all(|load| load.operand().is_some_and(|from| self.knows(program, from.buffer)))
            && nest.stores.iter().all(|to| is_only_writer(to.buffer))
    }

    /// Returns the host's buffer for an input, a constant, or a result of an earlier host instruction.
    fn source_buffer(&mut self, program: &Program, id: BufferId) -> BufferId {
        if let Some(&known) = self.known.get(&id) {
            return known;
        }
        let from = program.buffer(id);
        let host_buffer = match from.location {
            BufferLocation::Constant(number) => {
                self.builder.constant(&from.label, &program.constants[number])
            }
            BufferLocation::Work(_) | BufferLocation::Plane(..) => {
                let new_buffer = self.builder.work(&from.label, from.dtype, from.len);
                self.inputs.push((id, new_buffer));
                new_buffer
            }
        };
        self.known.insert(id, host_buffer);
        host_buffer
    }

    /// Adds a result of the host, in a buffer of the device part without other users.
    fn add_result(&mut self, rest: &mut Program, id: BufferId) -> BufferId {
        let buffer = &mut rest.buffers[id.0 as usize];
        let start = align(rest.work_bytes);
        buffer.location = BufferLocation::Work(start);
        rest.work_bytes = align(start + buffer.bytes());
        let host_buffer = self.builder.work(&buffer.label, buffer.dtype, buffer.len);
        self.known.insert(id, host_buffer);
        self.results.push((id, host_buffer));
        host_buffer
    }

    /// Moves a nest to the host.
    fn move_nest(
        &mut self,
        program: &Program,
        rest: &mut Program,
        nest: &Nest,
        node: &Arc<str>,
    ) -> Option<()> {
        let mut host_nest = nest.clone();
        for from in host_nest.load_operands_mut() {
            from.buffer = self.source_buffer(program, from.buffer);
        }
        for to in &mut host_nest.stores {
            to.buffer = self.add_result(rest, to.buffer);
        }
        self.builder.emit(Instruction::from(host_nest), GradientModes::ALL, node).ok()
    }

    /// Adds a check of the guards of a nest to the host part, over only the axes along which their operands vary.
    /// Returns `None`, without changes, if the host does not know an operand. A failed point is the first such point of
    /// the nest, with zeros along the other axes.
    fn add_check(&mut self, program: &Program, nest: &Nest, node: &Arc<str>) -> Option<()> {
        if nest.segments.is_some() {
            return None;
        }
        let insts = nest.expr.insts();
        let guards: Vec<Reg> = nest.expr.guards().collect();
        let needed = nest.expr.dependencies_of(&guards);
        let is_known = |slot: u16| {
            let from = nest.loads[usize::from(slot)].operand();
            from.is_some_and(|from| self.knows(program, from.buffer))
        };
        let mut differs = vec![false; nest.dims.len()];
        for (&(inst, _), _) in insts.iter().zip(&needed).filter(|(_, needed)| **needed) {
            match inst {
                Inst::Load(slot) if is_known(slot) => {
                    let from = nest.loads[usize::from(slot)].operand()?;
                    let strides = differs.iter_mut().zip(&from.access.strides);
                    strides.for_each(|(differs, &stride)| *differs |= stride != 0);
                }
                Inst::LoadAt(slot, _) if is_known(slot) => {}
                Inst::Coordinate(axis) => *differs.get_mut(usize::from(axis))? = true,
                Inst::Load(_) | Inst::LoadAt(..) | Inst::Reduced(_) | Inst::Random(..) => return None,
                _ => {}
            }
        }
        let mut builder = Builder::new();
        let mut at = 0;
        let regs = builder.copy(&nest.expr, |b, inst, ty| {
            at += 1;
            if needed[at - 1] { b.push(inst, ty) } else { b.constant(ty, 0.0) }
        });
        let outputs: Vec<Reg> = guards.iter().map(|guard| regs[usize::from(guard.0)]).collect();
        let (mut loads, expr) = compact_loads(&nest.loads, builder.finish(&outputs), |_| false);
        for load in &mut loads {
            if let Load::Buffer(from) = load {
                from.buffer = self.source_buffer(program, from.buffer);
            }
        }
        let sizes = nest.dims.iter().zip(&differs);
        let dims: Dims = sizes.map(|(&size, &differs)| if differs { size } else { size.min(1) }).collect();
        let points = dims.iter().product();
        let stores = guards.iter().map(|guard| {
            let dtype = insts[usize::from(guard.0)].1.storage();
            let to = self.builder.work("checked", dtype, points);
            Operand::contiguous(to, dtype, &dims)
        });
        let stores = stores.collect();
        self.builder
            .emit(Instruction::from(Nest::elementwise(dims, loads, expr, stores)), GradientModes::ALL, node)
            .ok()
    }

    /// Moves the float64 subexpressions of a nest that are constant per segment to the host. Returns the nest that
    /// reads their values. Returns `None` if there are no such subexpressions, or if a store is in float64.
    fn move_subexpressions(
        &mut self,
        program: &Program,
        rest: &mut Program,
        nest: &Nest,
        node: &Arc<str>,
    ) -> Option<Nest> {
        let count = nest.segments.as_ref().map_or(1, Segments::len);
        let along = |strides: &Strides| match (&nest.segments, strides.first()) {
            (Some(_), Some(&stride)) => stride,
            _ => 0,
        };
        let is_slow = |access: &Access| {
            let segment_axes = usize::from(nest.segments.is_some());
            access.strides.iter().skip(segment_axes).all(|&stride| stride == 0)
        };
        let insts = nest.expr.insts();
        let is_known = |slot: u16| {
            let from = nest.loads[usize::from(slot)].operand();
            from.is_some_and(|from| is_slow(&from.access) && self.knows(program, from.buffer))
        };
        let mut slow: Vec<bool> = Vec::with_capacity(insts.len());
        for (inst, _) in insts {
            slow.push(match *inst {
                Inst::Load(slot) => is_known(slot),
                Inst::LoadAt(slot, index) => slow[usize::from(index.0)] && is_known(slot),
                Inst::Coordinate(axis) => axis == 0 && nest.segments.is_some(),
                Inst::Reduced(_) | Inst::Random(..) => false,
                other => other.operands().all(|reg| slow[usize::from(reg.0)]),
            });
        }
        if nest.stores.iter().any(|to| to.access.dtype == DType::F64) {
            return None;
        }
        let edge: Vec<usize> = (0..insts.len()).filter(|&k| slow[k] && is_boundary(nest, &slow, k)).collect();
        if edge.is_empty() {
            return None;
        }

        // Nest of the host.
        let mut builder = Builder::new();
        let mut at = 0;
        let regs = builder.copy(&nest.expr, |b, inst, ty| {
            at += 1;
            if slow[at - 1] { b.push(inst, ty) } else { b.constant(ty, 0.0) }
        });
        let outputs: Vec<Reg> = edge.iter().map(|&k| regs[k]).collect();
        let (loads, expr) = compact_loads(&nest.loads, builder.finish(&outputs), |_| false);
        let mut host_loads = Vec::with_capacity(loads.len());
        for load in loads {
            let from = load.operand()?;
            let buffer = self.source_buffer(program, from.buffer);
            let strides = [along(&from.access.strides)].into_iter().collect();
            host_loads
                .push(Load::Buffer(Operand { buffer, access: Access { strides, ..from.access.clone() } }));
        }
        let mut loads = nest.loads.clone();
        let mut stores = Vec::with_capacity(edge.len());
        for &k in &edge {
            let dtype = insts[k].1.storage();
            let id = BufferId(rest.buffers.len() as u32);
            let label = format!("{node}/number {}", stores.len()).into();
            rest.buffers.push(Buffer { label, dtype, len: count, location: BufferLocation::Work(0) });
            stores.push(Operand::contiguous(self.add_result(rest, id), dtype, &[count]));
            let mut strides: Strides = nest.dims.iter().map(|_| 0).collect();
            if let (Some(_), Some(first)) = (&nest.segments, strides.first_mut()) {
                *first = 1;
            }
            loads.push(Load::Buffer(Operand {
                buffer: id,
                access: Access { dtype, offset: 0, strides, len: count },
            }));
        }
        let dims = Dims::from_slice(&[count]);
        let instruction = Instruction::from(Nest::elementwise(dims, host_loads, expr, stores));
        self.builder.emit(instruction, GradientModes::ALL, node).ok()?;

        // Nest of the device.
        let mut builder = Builder::new();
        let mut at = 0;
        let regs = builder.copy(&nest.expr, |b, inst, ty| {
            at += 1;
            match edge.iter().position(|&k| k == at - 1) {
                Some(stored) => b.load(nest.loads.len() + stored, ty),
                None => b.push(inst, ty),
            }
        });
        let (expr, reductions) = builder.finish_copy(&nest.expr, &nest.reductions, &regs);
        let (loads, expr) = compact_loads(&loads, expr, Load::is_accumulator);
        Some(Nest { loads, expr, reductions, ..nest.clone() })
    }
}

/// Returns true for a register that the host passes to the device: a conversion from float64, or a float64 value that
/// the device uses in float64. `slow` marks the registers that the host can compute.
fn is_boundary(nest: &Nest, slow: &[bool], k: usize) -> bool {
    let insts = nest.expr.insts();
    let current = Reg(k as u16);
    match insts[k] {
        (Inst::Const(_) | Inst::Load(_), Type::F64) => false,
        (_, Type::F64) => {
            let users = insts.iter().zip(slow).filter(|(_, slow)| !**slow);
            users.flat_map(|((inst, _), _)| inst.operands()).any(|reg| reg == current)
                || nest.expr.outputs().contains(&current)
                || nest.reductions.iter().any(|reduction| reduction.value == current)
        }
        (inst, _) => inst.operands().any(|reg| nest.expr.ty(reg) == Type::F64),
    }
}

/// Returns the loads that an expression reads or that satisfy `is_required`, and the expression with renumbered loads.
fn compact_loads(loads: &[Load], expr: Expr, is_required: impl Fn(&Load) -> bool) -> (Vec<Load>, Expr) {
    let read: FxHashSet<u16> = (expr.insts().iter())
        .filter_map(|(inst, _)| match *inst {
            Inst::Load(slot) | Inst::LoadAt(slot, _) => Some(slot),
            _ => None,
        })
        .collect();
    let is_used = |slot: &u16| read.contains(slot) || is_required(&loads[usize::from(*slot)]);
    let used: Vec<u16> = (0..loads.len() as u16).filter(is_used).collect();
    let renumber = |slot: u16| used.iter().position(|&known| known == slot).map_or(slot, |at| at as u16);
    let loads = used.iter().map(|&slot| loads[usize::from(slot)].clone()).collect();
    (loads, expr.with_slots(renumber))
}
