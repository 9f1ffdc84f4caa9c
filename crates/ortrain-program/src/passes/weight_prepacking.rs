//! Lays matrices that many products of few rows read in panels, once.
//!
//! A recurrent net multiplies its state with the same weights at every step. A product of so few rows is over before
//! packing would have paid, and reading the columns of a block where they lie touches a new page at every depth, for
//! every few rows again. Laid out so that the columns of a panel are adjacent at each depth, and the depths follow each
//! other, they are read in a row. Such a product is one of each panel.

use std::sync::Arc;

use ortrain_expr::{Access, DType, Inst, Precision, Strides};
use rustc_hash::FxHashMap;

use super::remove_unused::remove_unused;
use super::{Changed, Draft, Outcome};
use crate::buffer::add_work;
use crate::operand::only_moves;
use crate::rewrite::inline_nest::inline;
use crate::scheduled::NewVersions;
use crate::target::{Panels, Target};
use crate::uses::Uses;
use crate::versions::Versions;
use crate::{Buffer, BufferId, GradientModes, Instruction, MatMul, Nest, Operand, ScheduledInstruction};

/// The right factor of products, with the length of their sums and the number of their columns.
type Matrix = (Operand, [usize; 2]);

/// Products that read the same matrix between two writes to its buffer.
struct Group {
    readers: Vec<usize>,
    entries: GradientModes,
}

pub(super) fn run(draft: &mut Draft, target: &Target) -> Outcome {
    let Some(panels) = target.panels else { return Ok(Changed(0)) };
    let changes = lay_panels(panels, draft);
    // A map that moved elements to where a matrix was read may have become one into panels.
    Ok(Changed(changes + remove_unused(draft)))
}

/// Lays matrices in panels; returns their number.
fn lay_panels(shape: Panels, draft: &mut Draft) -> usize {
    let uses = draft.uses();
    let Draft { instructions, buffers, .. } = draft;
    let mut open: FxHashMap<Matrix, Group> = FxHashMap::default();
    let mut groups: Vec<(Matrix, Group)> = Vec::new();
    for (at, scheduled) in instructions.iter().enumerate() {
        if let Instruction::MatMul(product) = &scheduled.instruction
            && fits(product, shape)
        {
            let key = (product.b.clone(), [product.k, product.n]);
            let group = open
                .entry(key)
                .or_insert_with(|| Group { readers: Vec::new(), entries: GradientModes::NONE });
            group.readers.push(at);
            group.entries = group.entries.or(scheduled.entries);
        }
        for written in scheduled.instruction.writes() {
            groups.extend(open.extract_if(|(b, _), _| uses.cell(b.buffer) == uses.cell(written)));
        }
    }
    groups.extend(open);
    groups.retain(|(_, group)| group.readers.len() >= shape.products);
    // Maps of hashes have no order.
    groups.sort_unstable_by_key(|(_, group)| group.readers[0]);

    let mut new_versions = NewVersions::after(instructions.iter());
    let mut maps: Vec<ScheduledInstruction> = Vec::with_capacity(groups.len());
    for ((b, sides), group) in &groups {
        let Group { readers, entries } = group;
        let Buffer { label, dtype, .. } = &buffers[b.buffer.0 as usize];
        let (label, dtype) = (format!("{label} in panels"), *dtype);
        let (panels, version) = (add_work(buffers, label, dtype, sides[0] * sides[1]), new_versions.next());
        let seen = readers.iter().try_fold(Versions::default(), |seen, &reader| {
            seen.reading_also(&instructions[reader].versions.read_of(b.buffer))
        });
        let seen = seen.expect("nothing writes a matrix between the products of a group");
        let dims = [sides[1] / shape.columns, sides[0], shape.columns];
        let map = Nest::copy(&dims, parted(b, shape.columns), Operand::whole(panels, b.access.dtype, &dims));
        let (map, seen) = moved(instructions, &uses, b.buffer, group, &map).unwrap_or((map, seen));
        let first = ScheduledInstruction { entries: *entries, ..instructions[readers[0]].clone() };
        maps.push(first.with(Instruction::from(map), &seen.with_write(panels, version)));
        for &reader in readers {
            let ScheduledInstruction { instruction, versions, .. } = &mut instructions[reader];
            if let Instruction::MatMul(product) = instruction {
                read_panels(Arc::make_mut(product), panels, shape.columns);
            }
            *versions = versions.clone().with_read(panels, version).of_instruction(instruction);
        }
    }
    // From the last on, so that places stay what they are.
    for ((_, group), map) in groups.iter().zip(maps).rev() {
        instructions.insert(group.readers[0], map);
    }
    groups.len()
}

/// Whether a product would be better off with panels, if there are many like it.
fn fits(product: &MatMul, shape: Panels) -> bool {
    let nest = &product.epilogue;
    let is_f32 = |factor: &Operand| factor.access.dtype == DType::F32;
    product.batch.is_empty()
        && product.precision == Precision::F32
        && product.rounded == [None; 2]
        && (shape.rows.0..=shape.rows.1).contains(&product.m)
        && product.n.is_multiple_of(shape.columns)
        && product.n.saturating_mul(product.k) >= shape.elements
        && is_f32(&product.a)
        && is_f32(&product.b)
        // The space gets another order.
        && !nest.expr.can_fail()
        && !nest.expr.insts().iter().any(|(inst, _)| matches!(inst, Inst::Coordinate(_)))
}

/// An access over rows and columns, as one over panels, rows and the columns of a panel.
fn parted(operand: &Operand, columns: usize) -> Operand {
    let (row, column) = (operand.access.strides[0], operand.access.strides[1]);
    let strides: Strides = [columns as isize * column, row, column].into_iter().collect();
    operand.with_access(Access { strides, ..operand.access.clone() })
}

/// The map into panels that reads what another map reads which does nothing but move elements to where it reads them, if
/// these products alone want them there; and the versions that the other map was given.
fn moved(
    instructions: &[ScheduledInstruction],
    uses: &Uses,
    value: BufferId,
    group: &Group,
    map: &Nest,
) -> Option<(Nest, Versions)> {
    let first = group.readers[0];
    let maker = uses.writers(value).only().filter(|&maker| maker < first)?;
    let ScheduledInstruction { instruction, entries, versions, .. } = &instructions[maker];
    let guest = instruction.as_map().filter(|guest| guest.stores.len() == 1 && only_moves(guest))?;
    let source = guest.loads.first()?.operand()?.buffer;
    let fits = entries.and(group.entries) == group.entries
        && uses.writers(source).within(maker..first).next().is_none()
        && uses.readers(value).iter().all(|reader| group.readers.contains(&reader));
    fits.then(|| inline(map, 0, guest, true)).flatten().map(|map| (map, versions.clone()))
}

/// Makes a product one of each panel.
fn read_panels(product: &mut MatMul, panels: BufferId, columns: usize) {
    let MatMul { batch, n, k, a, b, epilogue, .. } = product;
    let count = *n / columns;
    batch.push(count);
    *n = columns;
    a.access.strides.insert(0, 0);
    *b = Operand::whole(panels, b.access.dtype, &[count, *k, columns]);
    epilogue.dims = [count, epilogue.dims[0], columns].into_iter().collect();
    epilogue.operands_mut().for_each(|operand| *operand = parted(operand, columns));
}
