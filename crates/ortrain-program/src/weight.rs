//! Weight of instructions: an estimate of their run time. Fusion applies a rewrite if it lowers the total weight. See
//! [`FusionWeights`].

use ortrain_expr::{Access, BinaryOp, Inst, Reg, Type, UnaryOp, product_of_sizes};
use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::instruction::Instruction;
use crate::operand::Nest;
use crate::target::FusionWeights;

/// Returns the weight of an operation on one element. An addition of four-byte elements has weight 1.
pub(crate) fn operation_weight(inst: Inst, ty: Type) -> u64 {
    let wide = if matches!(ty, Type::F64 | Type::I64 | Type::U64) { 2 } else { 1 };
    wide * match inst {
        Inst::Const(_) | Inst::Load(_) | Inst::Run(_) | Inst::Reduced(_) => 0,
        Inst::Unary(op, _) => match op {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Not => 1,
            UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round | UnaryOp::ToF16 | UnaryOp::ToBf16 => 2,
            UnaryOp::Sqrt => 4,
            UnaryOp::Rsqrt => 8,
            _ => 16,
        },
        Inst::Binary(op, ..) => match op {
            BinaryOp::Div if ty.is_float() => 4,
            BinaryOp::Div | BinaryOp::Rem => 8,
            BinaryOp::Pow => 32,
            _ => 1,
        },
        Inst::Compare(..) | Inst::Select(..) | Inst::Convert(_) => 1,
        Inst::Coordinate(_) | Inst::Guard(..) => 2,
        Inst::LoadAt(..) => 4,
        Inst::Random(..) => 40,
    }
}

/// Returns the weight of an instruction.
pub(crate) fn weight(instruction: &Instruction, buffers: &[Buffer], weights: &FusionWeights) -> u64 {
    // Fusion does not change the arithmetic of instructions without a nest.
    let extra = instruction.nest().map_or(0, |nest| non_traffic_weight(nest, weights));
    weights.instruction_start.saturating_add(instruction.bytes_over(buffers)).saturating_add(extra)
}

/// Returns an upper bound of the weight that a nest without reductions saves if these loads are removed. All loads read
/// one buffer.
pub(crate) fn max_load_weight(nest: &Nest, slots: &[usize], machine: (&[Buffer], &FusionWeights)) -> u64 {
    let (buffers, weights) = machine;
    let operand = |slot: &usize| nest.loads[*slot].operand();
    let Some(first) = slots.first().and_then(operand) else { return 0 };
    let buffer = &buffers[first.buffer.0 as usize];
    let gathered = nest.gathered_loads();
    let (mut elements, mut walks) = (0u64, 0u64);
    for (&slot, access) in slots.iter().filter_map(|slot| Some((slot, &operand(slot)?.access))) {
        let is_gathered = gathered.contains(&(slot as u16));
        let reached_elements =
            if is_gathered { nest.points_along(u64::MAX) } else { nest.elements_reached_by(access) };
        elements = elements.saturating_add(reached_elements);
        walks =
            walks.saturating_add(count_strided_runs(access, &nest.dims, 0).saturating_mul(weights.run_step));
    }
    elements.min(buffer.len as u64).saturating_mul(buffer.dtype.size() as u64).saturating_add(walks)
}

/// Returns the number of passes over a row that evaluate each operation of a nest's expression.
fn evaluation_counts(nest: &Nest) -> SmallVec<[u64; 32]> {
    let insts = nest.expr.insts();
    if nest.reductions.is_empty() && !nest.expr.can_fail() {
        // There is one pass, and it evaluates every operation.
        return SmallVec::from_elem(1, insts.len());
    }
    // Independent reductions share a pass; the last pass computes the results.
    let mut pass_of: SmallVec<[usize; 8]> = SmallVec::new();
    let mut roots: SmallVec<[(usize, Reg); 16]> = SmallVec::new();
    for reduction in &nest.reductions {
        // The first reduction does not depend on other reductions.
        let pass = if pass_of.is_empty() { 0 } else { earliest_pass(nest, reduction.value, &pass_of) };
        pass_of.push(pass);
        roots.push((pass, reduction.value));
    }
    let last = pass_of.iter().max().map_or(0, |pass| pass + 1);
    roots.extend(nest.expr.outputs().iter().map(|&output| (last, output)));
    let mut needed = SmallVec::from_elem(0u64, insts.len());
    for pass in 0..=last {
        let roots: SmallVec<[Reg; 8]> =
            roots.iter().filter(|root| root.0 == pass).map(|root| root.1).collect();
        let mask = nest.expr.dependencies_of(&roots);
        needed.iter_mut().zip(mask).for_each(|(n, needed)| *n += u64::from(needed));
    }
    needed
}

/// Returns the first pass that can compute a value: the pass after all reductions that the value needs.
fn earliest_pass(nest: &Nest, value: Reg, pass_of: &[usize]) -> usize {
    let needed = nest.expr.dependencies_of(&[value]);
    let needed = nest.expr.insts().iter().zip(&needed).filter(|&(_, &needed)| needed);
    let depends_on_later = |((inst, _), _): (&(Inst, Type), &bool)| match *inst {
        Inst::Reduced(k) => pass_of.get(usize::from(k)).map(|pass| pass + 1),
        _ => None,
    };
    needed.filter_map(depends_on_later).max().unwrap_or(0)
}

/// Returns the weight of arithmetic, repeated reads and steps between strided runs. The start of the instruction and
/// the minimum traffic are not included.
fn non_traffic_weight(nest: &Nest, weights: &FusionWeights) -> u64 {
    let (passes, axes) = (evaluation_counts(nest), nest.dependent_axes());
    let points = nest.points_along(u64::MAX);
    let outer = product_of_sizes(nest.outer_dims().iter().copied());
    let outer_rank = nest.dims.len() - nest.inner;
    let inner_axes =
        (outer_rank..nest.dims.len().min(64)).fold(0u64, |axis_mask, axis| axis_mask | 1 << axis);
    let mut weight = 0u64;
    for ((&(inst, ty), &axes), &needed) in nest.expr.insts().iter().zip(&axes).zip(&passes) {
        let evaluated = if axes == 0 {
            1
        } else if nest.inner > 0 && axes & inner_axes == 0 {
            outer
        } else {
            points
        };
        weight = weight
            .saturating_add(operation_weight(inst, ty).saturating_mul(evaluated).saturating_mul(needed));
    }
    weight = weight.saturating_add(points.saturating_mul(nest.reductions.len() as u64));

    // Later passes read the rows again.
    let loads = nest.loads.iter().enumerate();
    let loads: SmallVec<[(usize, &Access); 8]> =
        loads.filter_map(|(slot, load)| Some((slot, load.access()?))).collect();
    let bytes = |access: &Access| nest.elements_reached_by(access).saturating_mul(access.dtype.size() as u64);
    let passes_over = |slot: usize| {
        let uses = nest.expr.insts().iter().zip(&passes);
        let of_slot = uses.filter(|((inst, _), _)| matches!(inst, Inst::Load(s) if usize::from(*s) == slot));
        of_slot.map(|(_, &needed)| needed).max().unwrap_or(0)
    };
    let along_rows = |access: &Access| {
        let strides = access.strides[outer_rank..].iter().zip(nest.inner_dims());
        strides.into_iter().any(|(&stride, &dim)| stride != 0 && dim > 1)
    };
    if nest.inner > 0 {
        let rows = if outer < weights.min_parallel_rows { 1 } else { outer.max(1) };
        let resident = loads.iter().filter(|(_, access)| along_rows(access));
        let resident = resident.fold(0u64, |sum, (_, access)| sum.saturating_add(bytes(access)));
        let share =
            if resident / rows <= weights.max_cached_row_bytes { weights.cached_read_divisor } else { 1 };
        for &(slot, access) in loads.iter().filter(|(_, access)| along_rows(access)) {
            let repeats = passes_over(slot).saturating_sub(1);
            weight = weight.saturating_add(bytes(access).saturating_mul(repeats) / share);
        }
    }

    for access in nest.operands().map(|operand| &operand.access) {
        if nest.inner > 0 && !along_rows(access) {
            continue;
        }
        let runs = count_strided_runs(access, &nest.dims, if nest.inner == 0 { 0 } else { outer_rank });
        let last = nest.dims.iter().rposition(|&dim| dim > 1);
        let is_constant = last.is_some_and(|axis| access.strides[axis] == 0);
        weight = weight.saturating_add(
            runs.saturating_mul(weights.run_step)
                / if is_constant { weights.single_element_divisor } else { 1 },
        );
    }
    weight
}

/// Returns the number of evenly strided runs of elements in an access: at least one per row. A row spans the axes from
/// `outer_rank` on.
fn count_strided_runs(access: &Access, dims: &[usize], outer_rank: usize) -> u64 {
    let mut run: Option<(u64, isize)> = None;
    let mut axis = dims.len();
    while axis > outer_rank {
        let (dim, stride) = (dims[axis - 1], access.strides[axis - 1]);
        match run {
            _ if dim == 1 => {}
            None => run = Some((dim as u64, stride)),
            Some((len, step)) if step.checked_mul(len as isize) == Some(stride) => {
                run = Some((len.saturating_mul(dim as u64), step));
            }
            Some(_) => break,
        }
        axis -= 1;
    }
    product_of_sizes(dims[..axis].iter().copied())
}
