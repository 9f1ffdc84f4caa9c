//! Lays matrices that many products of few rows read in panels, once.
//!
//! A recurrent net multiplies its state with the same weights at every step. A product of so few rows is over before
//! packing would have paid, and reading the columns of a block where they lie touches a new page at every depth, for
//! every few rows again. Laid out so that the columns of a panel are adjacent at each depth, and the depths follow each
//! other, they are read in a row. Such a product is one of each panel.

use ortrain_expr::{Access, Builder, DType, Inst, Precision, Strides, Type};
use rustc_hash::FxHashMap;

use super::Changed;
use super::remove_unused::remove_unused;
use crate::buffer::cells;
use crate::draft::Draft;
use crate::error::ProgramError;
use crate::operand::only_moves;
use crate::rewrite::splice::inline;
use crate::scheduled::NewVersions;
use crate::target::{Panels, Target};
use crate::versions::Versions;
use crate::{
    Buffer, BufferId, BufferIds, Entries, Instruction, Load, MatMul, Nest, Operand, Place,
    ScheduledInstruction,
};

/// Products that read the same elements of a buffer between two writes to it.
struct Group {
    product: MatMul,
    readers: Vec<usize>,
    entries: Entries,
}

pub(super) fn run(draft: &mut Draft, target: &Target) -> Result<Changed, ProgramError> {
    let Some(panels) = target.panels else { return Ok(Changed(0)) };
    let changes = lay_panels(panels, &mut draft.instructions, &mut draft.buffers);
    // A map that moved elements to where a matrix was read may have become one into panels.
    Ok(Changed(changes + remove_unused(draft)))
}

/// Lays matrices in panels; returns their number.
fn lay_panels(
    shape: Panels,
    instructions: &mut Vec<ScheduledInstruction>,
    buffers: &mut Vec<Buffer>,
) -> usize {
    let cells = cells(buffers);
    let cell = |id: BufferId| cells[id.0 as usize];
    let mut open: FxHashMap<(Operand, [usize; 2]), Group> = FxHashMap::default();
    let mut groups: Vec<Group> = Vec::new();
    for (at, scheduled) in instructions.iter().enumerate() {
        if let Instruction::MatMul(product) = &scheduled.instruction
            && fits(product, shape)
        {
            let key = (product.b.clone(), [product.k, product.n]);
            let group = open.entry(key).or_insert_with(|| Group {
                product: (**product).clone(),
                readers: Vec::new(),
                entries: Entries::NONE,
            });
            group.readers.push(at);
            group.entries = group.entries.or(scheduled.entries);
        }
        for written in scheduled.instruction.writes() {
            groups.extend(
                open.extract_if(|key, _| cell(key.0.buffer) == cell(written)).map(|(_, group)| group),
            );
        }
    }
    groups.extend(open.into_values());
    groups.retain(|group| group.readers.len() >= shape.products);
    // Maps of hashes have no order.
    groups.sort_unstable_by_key(|group| group.readers[0]);

    let mut new_versions = NewVersions::after(instructions.iter());
    let mut maps: Vec<ScheduledInstruction> = Vec::with_capacity(groups.len());
    for (k, group) in groups.iter().enumerate() {
        let panels = BufferId((buffers.len() + k) as u32);
        let map = Instruction::Nest(layout(&group.product, panels, shape.columns));
        let given = group.readers.iter().try_fold(Versions::default(), |given, &reader| {
            given.reading_also(&instructions[reader].versions.of_instruction(&map))
        });
        let given = given.expect("nothing writes a matrix between the products of a group");
        let Instruction::Nest(nest) = &map else { unreachable!("a layout is a nest") };
        let (instruction, given) = match moved(instructions, group, nest, cell) {
            Some((source, given)) => (Instruction::Nest(source), given),
            None => (map, given),
        };
        let versions = given.of_instruction(&instruction).with_write(panels, new_versions.next());
        let node = instructions[group.readers[0]].node.clone();
        maps.push(ScheduledInstruction { instruction, entries: group.entries, node, versions });
    }
    for (Group { product, readers, .. }, map) in groups.iter().zip(&maps) {
        let Some((panels, version)) = map.versions.writes().next() else { continue };
        let old = &buffers[product.b.buffer.0 as usize];
        let (label, len) = (format!("{} in panels", old.label).into(), product.k * product.n);
        buffers.push(Buffer { label, dtype: old.dtype, len, place: Place::Work(0) });
        for &reader in readers {
            let ScheduledInstruction { instruction, versions, .. } = &mut instructions[reader];
            if let Instruction::MatMul(product) = instruction {
                read_panels(product, panels, shape.columns);
            }
            *versions = versions.clone().with_read(panels, version).of_instruction(instruction);
        }
    }
    // From the last on, so that places stay what they are.
    for (group, map) in groups.iter().zip(maps).rev() {
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

/// The map that copies B of a product into panels.
fn layout(product: &MatMul, panels: BufferId, columns: usize) -> Nest {
    let dims = [product.n / columns, product.k, columns];
    let dtype = product.b.access.dtype;
    let mut b = Builder::new();
    let element = b.load(0, Type::of(dtype));
    Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(parted(&product.b, columns))],
        expr: b.finish(&[element]),
        reductions: Vec::new(),
        stores: vec![Operand::whole(panels, dtype, &dims)],
    }
}

/// The map into panels that reads what another map reads which does nothing but move elements to where it reads them, if
/// these products alone want them there; and the versions that the other map was given.
fn moved(
    instructions: &[ScheduledInstruction],
    group: &Group,
    map: &Nest,
    cell: impl Fn(BufferId) -> usize,
) -> Option<(Nest, Versions)> {
    let (value, first) = (group.product.b.buffer, group.readers[0]);
    let touches = |ids: BufferIds, of: BufferId| ids.into_iter().any(|id| cell(id) == cell(of));
    let writes = |at: &usize| touches(instructions[*at].instruction.writes(), value);
    let mut writers = (0..instructions.len()).filter(writes);
    let (maker, None) = (writers.next()?, writers.next()) else { return None };
    let ScheduledInstruction { instruction, entries, versions, .. } = &instructions[maker];
    let guest = instruction.as_map()?;
    let others = instructions
        .iter()
        .enumerate()
        .any(|(at, scheduled)| !group.readers.contains(&at) && touches(scheduled.instruction.reads(), value));
    let source = guest.loads.first()?.operand()?.buffer;
    let moves = guest.stores.len() == 1 && only_moves(guest);
    let stays = maker < first
        && !instructions[maker..first].iter().any(|other| touches(other.instruction.writes(), source));
    (moves && stays && !others && entries.and(group.entries) == group.entries)
        .then(|| inline(map, 0, guest, true))
        .flatten()
        .map(|map| (map, versions.clone()))
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
