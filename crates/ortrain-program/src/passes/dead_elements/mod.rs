//! Eliminates dead elements: elements that nothing reads, and elements that are zero.
//!
//! For example, a classifier looks only at the first token of each sentence. The last layer of its transformer is then
//! needed for this token only, and its gradient is zero for the others. The graph does not express this: layers compute
//! all tokens, from which a slice is taken, and gradients are zeros with an updated slice.
//!
//! This pass narrows the program:
//!
//! - sums skip terms that are zero, and do not read the factors of these terms;
//! - instructions compute only the elements that are read; if most of a result is zero, the result is a fill and a
//!   smaller instruction;
//! - buffers shrink to the elements that are written or read.
//!
//! The sets of read elements and of possibly nonzero elements are [`StridedRange`]s of a buffer. They refer to
//! positions in memory, independent of the axes of an instruction.

mod product;
mod strided_range;

use std::sync::Arc;

use ortrain_expr::{Access, Builder, Inst, ReduceOp, Scalar, Type, zero_registers};
use smallvec::{SmallVec, smallvec};

use super::remove_unused::remove_unused;
use super::{Changed, Draft, Outcome, Target};
use crate::operand::single_result;
use crate::rewrite::inline_nest::{is_injective, with_constants};
use crate::scheduled::VersionCounter;
use crate::versions::Versions;
use crate::{
    Buffer, BufferId, GradientModes, Instruction, Load, MatMul, Nest, Operand, ScheduledInstruction, Use,
    is_work,
};
use product::narrow_product;
use strided_range::{AxisSlices, NarrowedSpace, StridedRange, hull, reaching_slices, remaining_fraction};

/// Parts of an instruction that are zero and can be skipped.
#[derive(Default)]
struct Zeros {
    /// Terms of its sums that are possibly nonzero: slices of reduced axes. The reduced axis of a product is the third
    /// axis after the batch.
    terms: AxisSlices,
    /// For each result the part that is possibly nonzero. Unlisted results are unknown.
    results: Vec<NonzeroPart>,
    /// Loads of its nest that are zero at every point.
    loads: Vec<usize>,
}

/// Part of a space with possibly nonzero values.
#[derive(Clone, Debug, PartialEq)]
enum NonzeroPart {
    /// Points in these slices; all points if there is no slice.
    Points(AxisSlices),
    Nowhere,
}

impl NonzeroPart {
    fn anywhere() -> NonzeroPart {
        NonzeroPart::Points(AxisSlices::new())
    }

    fn fraction(&self) -> f64 {
        match self {
            NonzeroPart::Points(cuts) => remaining_fraction(cuts),
            NonzeroPart::Nowhere => 0.0,
        }
    }

    /// Returns the part with the slices of some axes only.
    fn restrict_to_axes(&self, axes: impl Fn(usize) -> bool) -> NonzeroPart {
        match self {
            NonzeroPart::Points(cuts) => {
                NonzeroPart::Points(cuts.iter().filter(|slice| axes(slice.axis)).copied().collect())
            }
            NonzeroPart::Nowhere => NonzeroPart::Nowhere,
        }
    }
}

/// Narrows instructions, which are in order of execution.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let zeros = find_zeros(draft);
    let changes = narrow_instructions(draft, zeros);
    compact_buffers(draft);
    Ok(Changed(changes + remove_unused(draft)))
}

/// Returns the whole range for each buffer that is visible outside of the program's intermediate values, or is in one
/// of `lists`, and the empty range for other buffers.
fn visible_ranges(buffers: &[Buffer], lists: &[&[BufferId]]) -> Vec<StridedRange> {
    let band = |(k, buffer): (u32, &Buffer)| {
        let id = BufferId(k);
        let is_visible = !is_work(buffers, id) || lists.iter().any(|list| list.contains(&id));
        if is_visible { StridedRange::full(buffer.len) } else { StridedRange::empty(buffer.len) }
    };
    (0..).zip(buffers).map(band).collect()
}

/// Returns the nest of an instruction if its space can be narrowed.
fn narrowable_nest(instruction: &Instruction) -> Option<&Nest> {
    let is_fixed = matches!(
        instruction,
        Instruction::Conv(_) | Instruction::QuantizedMatMul(_) | Instruction::IntegerProduct(_)
    );
    instruction.flexible_nest().filter(|_| !is_fixed)
}

// --- Zeros -----------------------------------------------------------------------------------------------------------

/// Returns the zeros of each instruction.
fn find_zeros(draft: &Draft) -> Vec<Zeros> {
    let Draft { instructions, buffers, inputs, .. } = draft;
    // Elements that are possibly nonzero so far.
    let mut written = visible_ranges(buffers, &[inputs]);
    let mut zeros = Vec::with_capacity(instructions.len());
    for ScheduledInstruction { instruction, .. } in instructions {
        let nest_zeros = match instruction {
            Instruction::Nest(nest) if nest.segments.is_none() => zeros_of_nest(nest, &written),
            Instruction::MatMul(m) => zeros_of_product(m, &written),
            _ => Zeros::default(),
        };
        for (k, id) in instruction.writes().into_iter().enumerate() {
            let (id, len) = (id.0 as usize, buffers[id.0 as usize].len);
            if written[id].is_full() {
                continue;
            }
            let reached_part = match (nest_zeros.results.get(k), instruction.flexible_nest()) {
                (Some(NonzeroPart::Nowhere), _) => StridedRange::empty(len),
                (Some(NonzeroPart::Points(cuts)), Some(nest)) if cuts.is_empty() => {
                    StridedRange::reached_by(&nest.stores[k].access, &nest.dims)
                }
                (Some(NonzeroPart::Points(cuts)), Some(nest)) => {
                    let left = NarrowedSpace::new(&nest.dims, cuts);
                    StridedRange::reached_by(&left.access(&nest.stores[k].access), &left.dims())
                }
                _ => StridedRange::full(len),
            };
            written[id] = written[id].hull(reached_part, len);
        }
        zeros.push(nest_zeros);
    }
    zeros
}

/// Returns the part of an access with possibly nonzero elements.
fn nonzero_part(access: &Access, dims: &[usize], written: StridedRange) -> NonzeroPart {
    if !written.is_full() && StridedRange::reached_by(access, dims).is_disjoint_from(written) {
        return NonzeroPart::Nowhere;
    }
    NonzeroPart::Points(reaching_slices(dims, access, written))
}

/// Returns the possibly nonzero part of each load of a nest; accumulators are unknown.
fn nonzero_parts_of_loads(nest: &Nest, written: &[StridedRange]) -> Vec<NonzeroPart> {
    let part = |(slot, load): (usize, &Load)| match load {
        Load::Buffer(from) if !nest.is_gathered(slot) => {
            nonzero_part(&from.access, &nest.dims, written[from.buffer.0 as usize])
        }
        _ => NonzeroPart::anywhere(),
    };
    nest.loads.iter().enumerate().map(part).collect()
}

/// Returns for each load true if it is zero outside of a part.
fn zero_outside(parts: &[NonzeroPart], part: &NonzeroPart) -> Vec<bool> {
    parts
        .iter()
        .map(|other| *other == NonzeroPart::Nowhere || other == part && *part != NonzeroPart::anywhere())
        .collect()
}

/// Returns the distinct parts outside of which something is zero.
fn distinct_parts(parts: &[NonzeroPart]) -> SmallVec<[&NonzeroPart; 4]> {
    let mut distinct: SmallVec<[&NonzeroPart; 4]> = SmallVec::new();
    for part in parts {
        if *part != NonzeroPart::anywhere() && !distinct.contains(&part) {
            distinct.push(part);
        }
    }
    distinct
}

/// Narrows the possibly nonzero part of each result of a nest.
fn narrow_results(nest: &Nest, parts: &[NonzeroPart], results: &mut [NonzeroPart]) {
    let nowhere = NonzeroPart::Nowhere;
    for part in distinct_parts(parts).into_iter().chain([&nowhere]) {
        let zero = zero_registers(nest, &zero_outside(parts, part), true);
        for (result, reg) in results.iter_mut().zip(nest.expr.outputs()) {
            if zero[usize::from(reg.0)] && part.fraction() < result.fraction() {
                result.clone_from(part);
            }
        }
    }
}

/// Returns the loads that read only zeros.
fn zero_loads(parts: &[NonzeroPart]) -> Vec<usize> {
    (0..parts.len()).filter(|&slot| parts[slot] == NonzeroPart::Nowhere).collect()
}

fn zeros_of_nest(nest: &Nest, written: &[StridedRange]) -> Zeros {
    if nest.expr.can_fail() {
        return Zeros::default();
    }
    let parts = nonzero_parts_of_loads(nest, written);
    let mut results = vec![NonzeroPart::anywhere(); nest.expr.outputs().len()];
    let mut terms = AxisSlices::new();
    let is_zero = |(inst, _): &(Inst, Type)| matches!(inst, Inst::Const(value) if value.to_f64() == 0.0);
    if parts.iter().all(|part| *part == NonzeroPart::anywhere()) && !nest.expr.insts().iter().any(is_zero) {
        // No result is zero without a zero operand.
        return Zeros { terms, results, loads: Vec::new() };
    }
    let outer_rank = nest.dims.len() - nest.inner;
    let outer: Vec<NonzeroPart> =
        parts.iter().map(|part| part.restrict_to_axes(|axis| axis < outer_rank)).collect();
    if nest.inner > 0 && consists_of_sums(nest) {
        let inner: Vec<NonzeroPart> =
            parts.iter().map(|part| part.restrict_to_axes(|axis| axis >= outer_rank)).collect();
        for part in distinct_parts(&inner) {
            let zero = zero_registers(nest, &zero_outside(&inner, part), false);
            let left_out = nest.reductions.iter().all(|reduction| zero[usize::from(reduction.value.0)]);
            if let NonzeroPart::Points(cuts) = part
                && left_out
                && remaining_fraction(cuts) < remaining_fraction(&terms)
            {
                terms.clone_from(cuts);
            }
        }
    }
    narrow_results(nest, &outer, &mut results);
    Zeros { terms, results, loads: zero_loads(&parts) }
}

/// Returns true if the results of a nest are constant along its reduced axes and consist of sums.
fn consists_of_sums(nest: &Nest) -> bool {
    let outer_rank = nest.dims.len() - nest.inner;
    let is_per_row = |strides: &[isize]| strides[outer_rank..].iter().all(|&stride| stride == 0);
    let needed = nest.expr.dependencies_of(nest.expr.outputs());
    nest.reductions.iter().all(|reduction| reduction.op == ReduceOp::Sum)
        && nest.stores.iter().all(|store| is_per_row(&store.access.strides))
        && nest.expr.insts().iter().zip(needed).filter(|&(_, needed)| needed).all(
            |((inst, _), _)| match *inst {
                Inst::Load(slot) => {
                    nest.loads[usize::from(slot)].access().is_some_and(|a| is_per_row(&a.strides))
                }
                Inst::Coordinate(axis) => usize::from(axis) < outer_rank,
                _ => true,
            },
        )
}

fn zeros_of_product(m: &MatMul, written: &[StridedRange]) -> Zeros {
    let nest = &m.epilogue;
    if nest.expr.can_fail() {
        return Zeros::default();
    }
    let mut parts = nonzero_parts_of_loads(nest, written);
    let mut loads = zero_loads(&parts);
    let (rows, columns, sums) = (m.batch.len(), m.batch.len() + 1, m.batch.len() + 2);
    // Axes of the factors, as axes of the product and its sums.
    let factors = [(&m.a, [rows, sums]), (&m.b, [sums, columns])];
    let mut terms = AxisSlices::new();
    let mut results = vec![NonzeroPart::anywhere(); nest.expr.outputs().len()];
    for ((factor, last), dims) in factors.into_iter().zip(m.spaces()) {
        let mut part = nonzero_part(&factor.access, &dims, written[factor.buffer.0 as usize]);
        if let NonzeroPart::Points(cuts) = &mut part {
            for slice in cuts.iter_mut().filter(|slice| slice.axis >= rows) {
                slice.axis = last[slice.axis - rows];
            }
            let term_slices: AxisSlices = cuts.iter().filter(|slice| slice.axis == sums).copied().collect();
            if remaining_fraction(&term_slices) < remaining_fraction(&terms) {
                terms = term_slices;
            }
        }
        if part == NonzeroPart::Nowhere && !loads.contains(&0) {
            loads.push(0);
        }
        parts[0] = part.restrict_to_axes(|axis| axis != sums);
        narrow_results(nest, &parts, &mut results);
    }
    Zeros { terms, results, loads }
}

// --- Leaving out -----------------------------------------------------------------------------------------------------

/// Minimum factor by which zeros must shrink a space. The other elements of the result need a fill.
const MIN_GAIN_OF_ZEROS: f64 = 2.0;

/// Demand for elements of buffers, during a walk over the instructions from last to first.
struct Demand {
    /// Number of instructions that write each buffer.
    writers: Vec<usize>,
    /// Elements of each buffer that later instructions read.
    required: Vec<StridedRange>,
    /// Elements that are overwritten, in some gradient modes, before any read.
    overwritten: Vec<Option<(StridedRange, GradientModes)>>,
}

impl Demand {
    fn new(instructions: &[ScheduledInstruction], buffers: &[Buffer], outputs: &[BufferId]) -> Demand {
        let mut writers = vec![0; buffers.len()];
        for id in instructions.iter().flat_map(|scheduled| scheduled.instruction.writes()) {
            writers[id.0 as usize] += 1;
        }
        Demand {
            writers,
            required: visible_ranges(buffers, &[outputs]),
            overwritten: vec![None; buffers.len()],
        }
    }

    /// Adds new buffers, which hold copies of factors.
    fn add_buffers(&mut self, buffers: &[Buffer]) {
        let new = &buffers[self.required.len()..];
        self.required.extend(new.iter().map(|buffer| StridedRange::empty(buffer.len)));
        self.overwritten.resize(buffers.len(), None);
    }

    /// Returns true if the only result of a map is dead because a later instruction overwrites it.
    fn is_overwritten(&self, scheduled: &ScheduledInstruction, buffers: &[Buffer]) -> bool {
        let ScheduledInstruction { instruction, gradient_modes: entries, .. } = scheduled;
        let Some(map) = instruction.as_map() else { return false };
        let Some(id) = single_result(map) else { return false };
        let sees_it = |(band, later): (StridedRange, GradientModes)| {
            !band.contains(self.required[id.0 as usize]) || later.and(*entries) != *entries
        };
        is_work(buffers, id) && !map.expr.can_fail() && !self.overwritten[id.0 as usize].is_none_or(sees_it)
    }

    /// Records the writes of an instruction.
    fn write(&mut self, instruction: &Instruction, entries: GradientModes) {
        for id in instruction.writes() {
            self.overwritten[id.0 as usize] = None;
        }
        let Some(nest) = narrowable_nest(instruction) else { return };
        for Operand { buffer, access } in &nest.stores {
            let id = buffer.0 as usize;
            if self.writers[id] > 1 {
                self.overwritten[id] = filled_range(access, &nest.dims).map(|band| (band, entries));
            }
        }
    }

    /// Records the reads of an instruction.
    fn read(&mut self, instruction: &Instruction, buffers: &[Buffer]) {
        visit_ranges(instruction, buffers, Use::Read, |k, band| {
            extend_range(&mut self.required[k], band, buffers[k].len);
            self.overwritten[k] = None;
        });
    }

    /// Returns the part of its space that an instruction must compute, and the results that need a fill with zeros
    /// before.
    fn required_part(
        &self,
        instruction: &Instruction,
        nest: &Nest,
        zeros: &Zeros,
        buffers: &[Buffer],
    ) -> (AxisSlices, SmallVec<[BufferId; 2]>) {
        let (dims, outer_rank) = (&nest.dims, nest.dims.len() - nest.inner);
        let (mut part, mut fills): (Option<AxisSlices>, _) = (None, SmallVec::new());
        for (k, &Operand { buffer: id, access: ref store }) in nest.stores.iter().enumerate() {
            let range = self.required[id.0 as usize];
            if range.is_empty() {
                continue;
            }
            let mut cuts = reaching_slices(dims, store, range);
            cuts.retain(|slice| slice.axis < outer_rank);
            let may_fill = instruction.as_map().is_none()
                && self.writers[id.0 as usize] == 1
                && is_work(buffers, id)
                && !instruction.reads().contains(&id);
            if let Some(NonzeroPart::Points(other)) = zeros.results.get(k)
                && may_fill
                && remaining_fraction(other) * MIN_GAIN_OF_ZEROS <= remaining_fraction(&cuts)
            {
                let left = NarrowedSpace::new(dims, other);
                if !filled_range(&left.access(store), &left.dims()).is_some_and(|band| band.contains(range)) {
                    fills.push(id);
                }
                cuts.clone_from(other);
            }
            part = Some(part.map_or_else(|| cuts.clone(), |part| hull(&part, &cuts)));
        }
        (part.unwrap_or_default(), fills)
    }
}

/// Narrows every instruction to the elements that are read and possibly nonzero.
fn narrow_instructions(draft: &mut Draft, zeros: Vec<Zeros>) -> usize {
    let Draft { instructions, buffers, outputs, .. } = draft;
    let mut changes = 0;
    let mut demand = Demand::new(instructions, buffers, outputs);
    let mut new_versions = VersionCounter::after(instructions.iter());
    let mut reversed: Vec<ScheduledInstruction> = Vec::with_capacity(instructions.len());
    for (mut scheduled, zeros) in std::mem::take(instructions).into_iter().zip(zeros).rev() {
        if demand.is_overwritten(&scheduled, buffers) {
            changes += 1;
            continue;
        }
        demand.write(&scheduled.instruction, scheduled.gradient_modes);
        let changes_before = changes;
        let mut before: SmallVec<[Nest; 2]> = SmallVec::new();
        if let Some(nest) = narrowable_nest(&scheduled.instruction)
            && !nest.expr.can_fail()
        {
            let (cuts, fills) = demand.required_part(&scheduled.instruction, nest, &zeros, buffers);
            before.extend(fills.into_iter().map(|id| zero_fill(id, &buffers[id.0 as usize])));
            if !(cuts.is_empty() && zeros.terms.is_empty() && zeros.loads.is_empty()) {
                changes += 1;
                let instruction = remove_zero_loads(&scheduled.instruction, nest, &zeros.loads);
                let (instruction, copies) = narrow_instruction(instruction, &cuts, &zeros.terms, buffers);
                demand.add_buffers(buffers);
                before.extend(copies);
                scheduled.instruction = instruction;
            }
        }
        demand.read(&scheduled.instruction, buffers);
        let at = reversed.len();
        let versions = if before.is_empty() { Versions::default() } else { scheduled.versions.clone() };
        for map in before {
            let (to, version) = (map.stores[0].buffer, new_versions.next());
            scheduled.versions = scheduled.versions.with_read(to, version);
            let narrowed =
                scheduled.with_instruction(Instruction::from(map), &versions.clone().with_write(to, version));
            demand.read(&narrowed.instruction, buffers);
            reversed.push(narrowed);
        }
        if changes > changes_before || reversed.len() > at {
            scheduled.versions = scheduled.versions.restrict_to(&scheduled.instruction);
        }
        reversed.insert(at, scheduled);
    }
    reversed.reverse();
    *instructions = reversed;
    changes
}

/// Returns an instruction without loads of zeros. If the product is zero, the epilogue becomes a map.
fn remove_zero_loads(instruction: &Instruction, nest: &Nest, zeros: &[usize]) -> Instruction {
    let zero = |slot: usize| zeros.contains(&slot).then_some(Scalar::F64(0.0));
    let values: Vec<Option<Scalar>> = (0..nest.loads.len()).map(zero).collect();
    match if zeros.is_empty() { None } else { with_constants(nest, &values) } {
        None => instruction.clone(),
        Some(fewer) if fewer.num_accumulators() == 0 => Instruction::from(fewer),
        Some(fewer) => instruction.with_nest(fewer),
    }
}

/// Returns the range that a store fills completely, if the store leaves no gaps.
fn filled_range(store: &Access, dims: &[usize]) -> Option<StridedRange> {
    let band = StridedRange::reached_by(store, dims);
    // Stores with stride zero write the same element repeatedly.
    let moves = |(&dim, &stride)| if stride == 0 { 1 } else { dim };
    let dims: ortrain_expr::Dims = dims.iter().zip(&store.strides).map(moves).collect();
    let elements: usize = dims.iter().product();
    (is_injective(store, &dims) && band.count(store.len) == elements).then_some(band)
}

/// Extends a range of a buffer of `len` elements by another range.
fn extend_range(band: &mut StridedRange, other: &dyn Fn() -> StridedRange, len: usize) {
    if !band.is_full() {
        *band = band.hull(other(), len);
    }
}

/// Calls `each` with the ranges of buffers, by index, that an instruction reads or writes.
fn visit_ranges(
    instruction: &Instruction,
    buffers: &[Buffer],
    used: Use,
    mut each: impl FnMut(usize, &dyn Fn() -> StridedRange),
) {
    let Some(nest) = narrowable_nest(instruction) else {
        let ids = if used.reads() { instruction.reads() } else { instruction.writes() };
        let full = |id: BufferId| StridedRange::full(buffers[id.0 as usize].len);
        return ids.into_iter().for_each(|id| each(id.0 as usize, &|| full(id)));
    };
    let mut reach = |Operand { buffer, access }: &Operand, dims: Option<&[usize]>| {
        let band =
            || dims.map_or(StridedRange::full(access.len), |dims| StridedRange::reached_by(access, dims));
        each(buffer.0 as usize, &band);
    };
    if used.writes() {
        return nest.stores.iter().for_each(|store| reach(store, Some(&nest.dims)));
    }
    if let Instruction::MatMul(m) = instruction {
        [&m.a, &m.b].into_iter().zip(m.spaces()).for_each(|(factor, dims)| reach(factor, Some(&dims)));
    }
    for (slot, load) in nest.loads.iter().enumerate() {
        let dims = (!nest.is_gathered(slot)).then_some(&nest.dims[..]);
        load.operand().into_iter().for_each(|from| reach(from, dims));
    }
}

/// Returns a map that fills a buffer with zeros.
fn zero_fill(id: BufferId, buffer: &Buffer) -> Nest {
    let mut b = Builder::new();
    let zero = b.constant(Type::of(buffer.dtype), 0.0);
    let contiguous = Operand::contiguous(id, buffer.dtype, &[buffer.len]);
    Nest::elementwise(smallvec![buffer.len], Vec::new(), b.finish(&[zero]), vec![contiguous])
}

/// Narrows an instruction to a part of its space and to some terms of its sums. Returns also the maps that copy
/// operands for it. Parts that cannot be skipped stay.
fn narrow_instruction(
    instruction: Instruction,
    cuts: &AxisSlices,
    terms: &AxisSlices,
    buffers: &mut Vec<Buffer>,
) -> (Instruction, SmallVec<[Nest; 2]>) {
    if cuts.is_empty() && terms.is_empty() {
        return (instruction, SmallVec::new());
    }
    if let Instruction::MatMul(m) = &instruction {
        let narrow = narrow_product(m, cuts, terms, buffers);
        return narrow.unwrap_or_else(|| (instruction, SmallVec::new()));
    }
    let nest = instruction.flexible_nest().expect("an instruction with a nest");
    let cuts = cuts.iter().chain(terms).copied().collect();
    (instruction.with_nest(NarrowedSpace::new(&nest.dims, &cuts).nest(nest)), SmallVec::new())
}

// --- Buffers ---------------------------------------------------------------------------------------------------------

/// Shrinks buffers to the ranges that are used.
fn compact_buffers(draft: &mut Draft) {
    let Draft { instructions, buffers, inputs, outputs, .. } = draft;
    let mut used = visible_ranges(buffers, &[inputs, outputs]);
    for ScheduledInstruction { instruction, .. } in instructions.iter() {
        for kind in [Use::Read, Use::Write] {
            visit_ranges(instruction, buffers, kind, |k, band| {
                extend_range(&mut used[k], band, buffers[k].len);
            });
        }
    }
    let band_of = |id: BufferId| Some(used[id.0 as usize]).filter(|band| !band.is_full() && !band.is_empty());
    for ScheduledInstruction { instruction, .. } in instructions.iter_mut() {
        let mut holds_a_band = false;
        instruction.buffers(&mut |id, _| holds_a_band |= band_of(id).is_some());
        if !holds_a_band || narrowable_nest(instruction).is_none() {
            continue;
        }
        let compact = |operand: &mut Operand, dims: &[usize]| {
            if let Some(band) = band_of(operand.buffer) {
                operand.access = band.compact(&operand.access, dims);
            }
        };
        if let Instruction::MatMul(m) = instruction {
            let m = Arc::make_mut(m);
            let [a_space, b_space] = m.spaces();
            compact(&mut m.a, &a_space);
            compact(&mut m.b, &b_space);
        }
        if let Some(nest) = instruction.nest_mut() {
            let dims = nest.dims.clone();
            nest.operands_mut().for_each(|operand| compact(operand, &dims));
        }
    }
    for (buffer, band) in buffers.iter_mut().zip(used) {
        if !band.is_empty() {
            buffer.len = band.count(buffer.len);
        }
    }
}
