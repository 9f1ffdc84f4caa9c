//! Packs matrices into panels once, if many products of few rows read them.
//!
//! A recurrent network multiplies its state by the same weights at every step. Packing in each product does not pay for
//! few rows. Without packing, the columns of a register block touch a new page at every depth, again for every few
//! rows. In a panel, the columns are adjacent at each depth, and the depths follow each other: memory access is
//! sequential. Such a product becomes a batch of products, one per panel.

use std::sync::Arc;

use ortrain_expr::{Access, DType, Inst, Precision, Strides};
use rustc_hash::FxHashMap;

use super::remove_unused::remove_unused;
use super::{Changed, Draft, Outcome};
use crate::buffer::add_work;
use crate::operand::only_moves_elements;
use crate::rewrite::inline_nest::inline;
use crate::scheduled::VersionCounter;
use crate::target::{Panels, Target};
use crate::uses::DefUse;
use crate::versions::Versions;
use crate::{Buffer, BufferId, GradientModes, Instruction, MatMul, Nest, Operand, ScheduledInstruction};

/// Right factor of products, with the length of the sums and the number of columns.
type Matrix = (Operand, [usize; 2]);

/// Products that read the same matrix between two writes to its buffer.
struct Group {
    readers: Vec<usize>,
    entries: GradientModes,
}

pub(super) fn run(draft: &mut Draft, target: &Target) -> Outcome {
    let Some(panels) = target.panels else { return Ok(Changed(0)) };
    let changes = pack_panels(panels, draft);
    // A map that only rearranged a matrix is possibly fused into the packing and now unused.
    Ok(Changed(changes + remove_unused(draft)))
}

/// Packs matrices into panels; returns their number.
fn pack_panels(shape: Panels, draft: &mut Draft) -> usize {
    let uses = draft.uses();
    let Draft { instructions, buffers, .. } = draft;
    let mut open: FxHashMap<Matrix, Group> = FxHashMap::default();
    let mut groups: Vec<(Matrix, Group)> = Vec::new();
    for (at, scheduled) in instructions.iter().enumerate() {
        if let Instruction::MatMul(product) = &scheduled.instruction
            && profits_from_panels(product, shape)
        {
            let key = (product.b.clone(), [product.k, product.n]);
            let group = open
                .entry(key)
                .or_insert_with(|| Group { readers: Vec::new(), entries: GradientModes::NONE });
            group.readers.push(at);
            group.entries = group.entries.or(scheduled.gradient_modes);
        }
        for written in scheduled.instruction.writes() {
            groups
                .extend(open.extract_if(|(b, _), _| uses.alias_class(b.buffer) == uses.alias_class(written)));
        }
    }
    groups.extend(open);
    groups.retain(|(_, group)| group.readers.len() >= shape.min_products);
    // Hash maps have no order.
    groups.sort_unstable_by_key(|(_, group)| group.readers[0]);

    let mut new_versions = VersionCounter::after(instructions.iter());
    let mut maps: Vec<ScheduledInstruction> = Vec::with_capacity(groups.len());
    for ((b, sides), group) in &groups {
        let Group { readers, entries } = group;
        let Buffer { label, dtype, .. } = &buffers[b.buffer.0 as usize];
        let (label, dtype) = (format!("{label} in panels"), *dtype);
        let (panels, version) = (add_work(buffers, label, dtype, sides[0] * sides[1]), new_versions.next());
        let merged = readers.iter().try_fold(Versions::default(), |merged, &reader| {
            merged.merge_reads(&instructions[reader].versions.only_read_of(b.buffer))
        });
        let merged = merged.expect("nothing writes a matrix between the products of a group");
        let dims = [sides[1] / shape.columns, sides[0], shape.columns];
        let map = Nest::copy(
            &dims,
            split_columns(b, shape.columns),
            Operand::contiguous(panels, b.access.dtype, &dims),
        );
        let (map, merged) =
            pack_through_move(instructions, &uses, b.buffer, group, &map).unwrap_or((map, merged));
        let first = ScheduledInstruction { gradient_modes: *entries, ..instructions[readers[0]].clone() };
        maps.push(first.with_instruction(Instruction::from(map), &merged.with_write(panels, version)));
        for &reader in readers {
            let ScheduledInstruction { instruction, versions, .. } = &mut instructions[reader];
            if let Instruction::MatMul(product) = instruction {
                batch_by_panels(Arc::make_mut(product), panels, shape.columns);
            }
            *versions = versions.clone().with_read(panels, version).restrict_to(instruction);
        }
    }
    // Insertion from the last position on keeps the earlier positions valid.
    for ((_, group), map) in groups.iter().zip(maps).rev() {
        instructions.insert(group.readers[0], map);
    }
    groups.len()
}

/// Returns true if a product profits from panels, given enough products of the same matrix.
fn profits_from_panels(product: &MatMul, shape: Panels) -> bool {
    let nest = &product.epilogue;
    let is_f32 = |factor: &Operand| factor.access.dtype == DType::F32;
    product.batch.is_empty()
        && product.precision == Precision::F32
        && product.rounded == [None; 2]
        && (shape.rows.0..=shape.rows.1).contains(&product.m)
        && product.n.is_multiple_of(shape.columns)
        && product.n.saturating_mul(product.k) >= shape.min_elements
        && is_f32(&product.a)
        && is_f32(&product.b)
        // The rewrite permutes the space.
        && !nest.expr.can_fail()
        && !nest.expr.insts().iter().any(|(inst, _)| matches!(inst, Inst::Coordinate(_)))
}

/// Converts an operand over rows and columns to one over panels, rows and the columns of a panel.
fn split_columns(operand: &Operand, columns: usize) -> Operand {
    let (row, column) = (operand.access.strides[0], operand.access.strides[1]);
    let strides: Strides = [columns as isize * column, row, column].into_iter().collect();
    operand.with_access(Access { strides, ..operand.access.clone() })
}

/// Packs straight from the source of a rearranging map if these products are its only consumers. Returns the packing
/// map and the versions of the rearranging map.
fn pack_through_move(
    instructions: &[ScheduledInstruction],
    uses: &DefUse,
    value: BufferId,
    group: &Group,
    map: &Nest,
) -> Option<(Nest, Versions)> {
    let first = group.readers[0];
    let maker = uses.writers(value).only().filter(|&maker| maker < first)?;
    let ScheduledInstruction { instruction, gradient_modes: entries, versions, .. } = &instructions[maker];
    let guest = instruction.as_map().filter(|guest| guest.stores.len() == 1 && only_moves_elements(guest))?;
    let source = guest.loads.first()?.operand()?.buffer;
    let fits = entries.and(group.entries) == group.entries
        && uses.writers(source).within(maker..first).next().is_none()
        && uses.readers(value).iter().all(|reader| group.readers.contains(&reader));
    fits.then(|| inline(map, 0, guest, true)).flatten().map(|map| (map, versions.clone()))
}

/// Converts a product to a batch of products, one per panel.
fn batch_by_panels(product: &mut MatMul, panels: BufferId, columns: usize) {
    let MatMul { batch, n, k, a, b, epilogue, .. } = product;
    let count = *n / columns;
    batch.push(count);
    *n = columns;
    a.access.strides.insert(0, 0);
    *b = Operand::contiguous(panels, b.access.dtype, &[count, *k, columns]);
    epilogue.dims = [count, epilogue.dims[0], columns].into_iter().collect();
    epilogue.operands_mut().for_each(|operand| *operand = split_columns(operand, columns));
}
