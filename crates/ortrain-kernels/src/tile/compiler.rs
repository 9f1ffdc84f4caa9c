//! Compiler of tile programs.

use std::ops::Range;
use std::sync::Arc;

use ortrain_expr::{Access, BinaryOp, DType, Expr, Inst, Load, ReduceOp, Reg, Scalar, Type};

use super::check::check;
use super::jit::{CodeMemory, Group};
use super::loop_plan::{FirstStageOutputs, LoopOrder, LoopPlan};
use super::memory::StridedView;
use super::op::{DIRECT_BIT, DIRECT_PRODUCT, Kind, Op, RegisterKind, Slot};
use super::ops;
use super::program::{Code, StageReduction, TileProgram};
use super::shared::Compiler;
use crate::isa::Isa;

/// Bytes of tile registers that fit into the first-level cache.
const TILE_CACHE_BYTES: usize = 24 * 1024;

/// Maximum bytes of tile registers to keep a whole row between the stages, instead of recomputing it.
const MAX_FUSED_ROW_BYTES: usize = 96 * 1024;

/// Bytes of 16 partial results.
pub(super) const LANES_BYTES: usize = 64;

pub(super) const MAX_TILE: usize = 1024;

pub(super) const MIN_TILE: usize = 64;

/// Section of a tile program that contains an operation. Sections are ordered as they run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Section {
    Once,
    Pre(usize),
    Body(usize),
    Post,
}

pub(super) struct TileCompiler<'a> {
    pub(super) plan: &'a LoopPlan<'a>,
    pub(super) expr: &'a Expr,
    pub(super) loads: &'a [StridedView],
    pub(super) piece: usize,
    /// Values that the first stage saves and later stages load.
    pub(super) saved: &'a [Reg],
    /// For each instruction: true if its value varies along the tile, and true if it varies with the outer index.
    pub(super) varies: Vec<(bool, bool)>,
    pub(super) registers: Vec<(RegisterKind, Section)>,
    pub(super) lists: Vec<(Section, Vec<Op>)>,
    /// Register of each instruction that is already emitted, and register of its copy over a tile.
    pub(super) value: Vec<Option<Slot>>,
    pub(super) splat: Vec<Option<Slot>>,
    pub(super) totals: Vec<Vec<StageReduction>>,
    /// Type and register of the result of each reduction.
    pub(super) reduced: Vec<Option<(Type, Slot)>>,
    pub(super) groups: Vec<Group>,
    /// Work per element, in additions.
    pub(super) cost: usize,
}

impl TileProgram {
    /// Compiles an expression.
    pub(crate) fn new<'a>(
        plan: &LoopPlan<'_>,
        compiler: impl Into<Compiler<'a>>,
    ) -> Result<TileProgram, String> {
        TileProgram::with_overlaps(plan, compiler, &|_, _| true)
    }

    /// Compiles an expression. `overlaps` tells for a store and a load if the two may share elements.
    pub(crate) fn with_overlaps<'a>(
        plan: &LoopPlan<'_>,
        compiler: impl Into<Compiler<'a>>,
        overlaps: &dyn Fn(usize, usize) -> bool,
    ) -> Result<TileProgram, String> {
        let compiler = compiler.into();
        let nest = plan.nest;
        check(nest)?;
        if nest.segments.is_some() && (plan.has_product() || plan.loop_order != LoopOrder::Row) {
            return Err("segments are not supported in this loop".to_owned());
        }
        let mut dims = nest.dims.clone();
        if nest.segments.is_some() {
            // An axis of size 1 counts as constant, but not with segments: an empty segment lacks the only index of the
            // axis.
            dims[1] = dims[1].max(2);
        }
        let reach = |access: &Access| StridedView::new(access, &dims, plan.outer_axes, plan.tile_axes);
        let load = |load: &Load| match load {
            Load::Buffer(access) => reach(access),
            Load::Accumulator(dtype) => reach(&Access::contiguous(*dtype, &nest.dims)),
        };
        let mut loads = nest.loads.iter().map(load).collect::<Result<Vec<_>, _>>()?;
        let mut stores = nest.stores.iter().map(reach).collect::<Result<Vec<_>, _>>()?;
        let ahead = plan.first_stage_outputs(overlaps);
        if let [_, along] = *nest.dims {
            let index_access = Access {
                strides: [0, 1].into_iter().collect(),
                ..Access::contiguous(DType::F32, &[1, along])
            };
            for _ in &ahead.saved {
                loads.push(reach(&index_access)?);
                stores.push(reach(&index_access)?);
            }
        }
        let index = reach(&Access::contiguous(DType::U8, &nest.dims))?;
        let make = |memory: Option<&_>| Code::new(plan, compiler.isa(), memory, (&loads, &stores), &ahead);
        let code = compiler.get_or_compile(plan, &ahead, make)?;
        loads.truncate(nest.loads.len() + code.num_saved);
        stores.truncate(nest.stores.len() + code.num_saved);
        Ok(TileProgram { loads, stores, index, code })
    }
}

impl Code {
    /// Compiles a plan, with machine code if there is memory for it.
    pub(super) fn new(
        plan: &LoopPlan<'_>,
        isa: Isa,
        memory: Option<&Arc<CodeMemory>>,
        (loads, stores): (&[StridedView], &[StridedView]),
        ahead: &FirstStageOutputs,
    ) -> Result<Code, String> {
        let nest = plan.nest;
        let along = match &nest.segments {
            Some(segments) => segments.max_len(),
            None => plan.tile_axes.iter().map(|&axis| nest.dims[axis]).product(),
        };

        // A row that fits is computed once, and its tile registers keep it through all stages.
        if plan.loop_order == LoopOrder::Row && !nest.reductions.is_empty() && along <= 4 * MAX_TILE {
            let draft = TileCompiler::new(plan, (loads, stores), usize::MAX, None)?;
            let tile = along.next_multiple_of(16).max(16);
            if along <= MIN_TILE || draft.bytes(tile, draft.assign_slots().1) <= MAX_FUSED_ROW_BYTES {
                return Ok(draft.finish(isa, memory, stores, tile));
            }
        }
        // Pieces shorter than this are better copied together into a tile.
        const LONG_PIECE: usize = 192;
        let pieces = loads.iter().filter_map(StridedView::contiguous_len);
        // The drivers of matrix products and of `Col` split their tiles themselves, without `TileProgram::tiles`.
        let cut_elsewhere = plan.has_product() || plan.loop_order == LoopOrder::Col;
        let piece = if cut_elsewhere { usize::MAX } else { pieces.min().unwrap_or(usize::MAX) };
        let piece = if piece < LONG_PIECE { usize::MAX } else { piece };
        let draft = TileCompiler::new(plan, (loads, stores), piece, Some(ahead))?;
        // The difference of two slot sizes gives the bytes that one index of a tile takes.
        let slots = draft.assign_slots().1;
        let bytes = slots * (draft.slot_bytes(2 * MIN_TILE) - draft.slot_bytes(MIN_TILE));
        let per_index = bytes.div_ceil(MIN_TILE).max(1);
        let tile = (TILE_CACHE_BYTES / per_index).clamp(MIN_TILE, MAX_TILE) / MIN_TILE * MIN_TILE;
        Ok(draft.finish(isa, memory, stores, tile.min(along.next_multiple_of(16).max(16))))
    }
}

impl<'a> TileCompiler<'a> {
    /// `piece`: see [`Code::piece`]. `ahead`: `None` if later stages reuse the values of a body.
    pub(super) fn new(
        plan: &'a LoopPlan<'a>,
        (loads, stores): (&'a [StridedView], &[StridedView]),
        piece: usize,
        ahead: Option<&'a FirstStageOutputs>,
    ) -> Result<TileCompiler<'a>, String> {
        let nest = plan.nest;
        let expr = &nest.expr;
        let count = expr.insts().len();
        let mut draft = TileCompiler {
            plan,
            expr,
            loads,
            piece,
            saved: ahead.map_or(&[], |ahead| ahead.saved.as_slice()),
            varies: Vec::with_capacity(count),
            registers: Vec::new(),
            lists: vec![(Section::Once, Vec::new())],
            value: vec![None; count],
            splat: vec![None; count],
            totals: Vec::new(),
            reduced: vec![None; nest.reductions.len()],
            groups: Vec::new(),
            cost: 0,
        };

        for &(inst, _) in expr.insts() {
            let varies = draft.variance(inst);
            draft.varies.push(varies);
        }
        // A reduction runs in the stage after the reductions that it needs.
        let mut reduction_stage: Vec<usize> = Vec::new();
        for reduction in &nest.reductions {
            let needed = expr.dependencies_of(&[reduction.value]);
            let before = expr.insts().iter().zip(&needed).filter_map(|(&(inst, _), &needed)| match inst {
                Inst::Reduced(k) if needed => Some(reduction_stage[usize::from(k)] + 1),
                _ => None,
            });
            let stage = before.max().unwrap_or(0);
            reduction_stage.push(stage);
        }
        let stored_ahead = ahead.map_or(&[][..], |ahead| &ahead.stored);
        let last = reduction_stage.iter().map(|stage| stage + 1).max().unwrap_or(0);

        let stores_per_row: Vec<bool> = stores[..nest.stores.len()]
            .iter()
            .map(|store| plan.loop_order != LoopOrder::Map && draft.is_per_row(store))
            .collect();
        for stage in 0..=last {
            draft.totals.push(Vec::new());
            draft.lists.push((Section::Pre(stage), Vec::new()));
            draft.lists.push((Section::Body(stage), Vec::new()));
            let mut roots: Vec<Reg> = nest
                .reductions
                .iter()
                .zip(&reduction_stage)
                .filter(|(_, at)| **at == stage)
                .map(|(reduction, _)| reduction.value)
                .collect();
            let slots = (0..expr.outputs().len()).filter(|slot| {
                let is_stored_early = stored_ahead.contains(slot);
                stage == 0 && is_stored_early || stage == last && !is_stored_early
            });
            roots.extend(draft.saved.iter().filter(|_| stage == 0));
            roots.extend(slots.clone().map(|slot| expr.outputs()[slot]));
            if stage == last {
                // A guard is a side effect, and runs even if its result is unused.
                let guards = expr.insts().iter().enumerate();
                roots.extend(
                    guards
                        .filter(|(_, entry)| matches!(entry.0, Inst::Guard(..)))
                        .map(|(i, _)| Reg(i as u16)),
                );
            }
            draft.compute(stage, &roots);
            for (k, reduction) in nest.reductions.iter().enumerate() {
                if reduction_stage[k] == stage {
                    draft.reduce(stage, k, reduction.op, reduction.value);
                }
            }
            if stage == last {
                draft.lists.push((Section::Post, Vec::new()));
            }
            let mut sections = Vec::new();
            for slot in slots {
                let reg = expr.outputs()[slot];
                sections.push(draft.emit_output(stage, slot, &stores[slot], reg, stores_per_row[slot])?);
            }
            for (k, reg) in draft.saved.iter().enumerate().filter(|_| stage == 0) {
                let a = draft.value[usize::from(reg.0)].expect("a value of the first stage");
                let kind = Kind::Store((nest.stores.len() + k) as u16);
                sections.push((
                    Section::Body(0),
                    Op { kind, is_uniform: false, d: a, a: [a, 0, 0], uniform_operands: [false; 3] },
                ));
            }
            // Stores come after all loads, because a store may overwrite an element that is loaded through an equal
            // access.
            for (section, op) in sections {
                draft.section_ops(section).push(op);
            }
            if ahead.is_some() {
                draft.forget_section(Section::Body(stage));
            }
        }
        let bodies = draft.lists.iter().filter(|(section, _)| matches!(section, Section::Body(_)));
        let work = bodies.flat_map(|(_, list)| list).filter(|op| !op.is_uniform).map(|op| op.kind.cost());
        draft.cost = work.sum::<usize>().max(1);
        Ok(draft)
    }

    fn variance(&self, inst: Inst) -> (bool, bool) {
        let LoopPlan { nest, loop_order: drive, tile_axes: along, .. } = *self.plan;
        match inst {
            Inst::Load(slot) if self.plan.is_product(slot) => (true, true),
            Inst::Load(slot) => {
                let reach = &self.loads[usize::from(slot)];
                (!reach.along.is_constant(), !reach.outside.is_constant())
            }
            Inst::Coordinate(axis) if nest.dims[usize::from(axis)] == 1 => (false, false),
            Inst::Coordinate(axis) => {
                let along = along.contains(&usize::from(axis));
                (along, !along)
            }
            // In `Col` a tile runs along the axes that are not reduced. In `Row` there is one value for each outer
            // index.
            Inst::Reduced(_) => (drive == LoopOrder::Col, drive != LoopOrder::Col),
            other => other.operands().fold((false, false), |(along, outside), reg| {
                let varies = self.varies[usize::from(reg.0)];
                (along | varies.0, outside | varies.1)
            }),
        }
    }

    /// Returns true if a store writes the same element for all indices of the reduced axes.
    fn is_per_row(&self, store: &StridedView) -> bool {
        match self.plan.loop_order {
            LoopOrder::Map => false,
            LoopOrder::Row => store.along.is_constant(),
            LoopOrder::Col => store.outside.is_constant(),
        }
    }

    /// Returns the section of an instruction that is first needed in `stage`.
    fn section_of(&self, inst: usize, stage: usize) -> Section {
        match (self.plan.loop_order, self.varies[inst]) {
            (_, (false, false)) => Section::Once,
            (LoopOrder::Row, (false, true)) | (LoopOrder::Col, (true, false)) => Section::Pre(stage),
            _ => Section::Body(stage),
        }
    }

    fn section_ops(&mut self, section: Section) -> &mut Vec<Op> {
        let list = self.lists.iter_mut().find(|(at, _)| *at == section);
        &mut list.expect("sections are made with their stage").1
    }

    fn new_register(&mut self, size: RegisterKind, section: Section) -> Slot {
        self.registers.push((size, section));
        (self.registers.len() - 1) as Slot
    }

    pub(super) fn push(
        &mut self,
        section: Section,
        kind: Kind,
        is_uniform: bool,
        ty: Type,
        a: [Slot; 3],
    ) -> Slot {
        self.push_with(section, kind, is_uniform, ty, a, [false; 3])
    }

    fn push_with(
        &mut self,
        section: Section,
        kind: Kind,
        uniform: bool,
        ty: Type,
        a: [Slot; 3],
        ones: [bool; 3],
    ) -> Slot {
        let d =
            self.new_register(if uniform { RegisterKind::Uniform } else { RegisterKind::Tile(ty) }, section);
        self.section_ops(section).push(Op { kind, is_uniform: uniform, d, a, uniform_operands: ones });
        d
    }

    /// Emits the instructions that `roots` need and that are not emitted yet.
    pub(super) fn compute(&mut self, stage: usize, roots: &[Reg]) {
        let mut needed = vec![false; self.expr.insts().len()];
        for root in roots {
            needed[usize::from(root.0)] = true;
        }
        // Load of a value that the first stage has saved.
        let keep_inst = |i: usize| {
            let k = self.saved.iter().position(|reg| usize::from(reg.0) == i).filter(|_| stage > 0)?;
            Some(Inst::Load((self.plan.nest.loads.len() + k) as u16))
        };
        let used_insts: Vec<Option<Inst>> = (0..needed.len()).map(keep_inst).collect();
        for (i, (inst, _)) in self.expr.insts().iter().enumerate().rev() {
            let numbers = matches!(inst, Inst::Binary(..)) && self.linear_index_axes(Reg(i as u16)).is_some();
            if needed[i] && self.value[i].is_none() && !numbers && used_insts[i].is_none() {
                for operand in inst.operands() {
                    needed[usize::from(operand.0)] = true;
                }
            }
        }
        for (i, &(inst, ty)) in self.expr.insts().iter().enumerate() {
            if needed[i] && self.value[i].is_none() {
                let section = self.section_of(i, stage);
                let value = self.emit(i, used_insts[i].unwrap_or(inst), ty, section, stage);
                self.value[i] = Some(value);
            }
        }
    }

    /// Returns the axes, as positions along a tile, that have their elements numbered by `reg` in row-major order, as
    /// in `(i * size + j) * size + k`.
    fn linear_index_axes(&self, reg: Reg) -> Option<Range<usize>> {
        let inst = |reg: Reg| self.expr.insts()[usize::from(reg.0)].0;
        match inst(reg) {
            Inst::Coordinate(axis) => {
                let at = self.plan.tile_axes.iter().position(|&other| other == usize::from(axis))?;
                Some(at..at + 1)
            }
            Inst::Binary(BinaryOp::Add, before, last) => {
                let (Inst::Coordinate(axis), Inst::Binary(BinaryOp::Mul, before, size)) =
                    (inst(last), inst(before))
                else {
                    return None;
                };
                let Inst::Const(Scalar::I64(size)) = inst(size) else { return None };
                let (before, last) = (self.linear_index_axes(before)?, self.linear_index_axes(last)?);
                let dim = self.plan.nest.dims[usize::from(axis)];
                (usize::try_from(size) == Ok(dim) && before.end == last.start)
                    .then_some(before.start..last.end)
            }
            _ => None,
        }
    }

    /// Returns the operation for the linear index over the axes `of` among `axes`.
    fn coordinate_op(&self, axes: &[usize], of: Range<usize>, along: bool) -> Kind {
        let size = |axes: &[usize]| axes.iter().map(|&axis| self.plan.nest.dims[axis]).product::<usize>();
        // An axis with one index has coordinate zero. An axis without indices never runs.
        let dim = size(&axes[of.clone()]).max(1);
        let after = if dim == 1 { 1 } else { size(&axes[of.end..]).max(1) };
        Kind::Coordinate { along, after, dim }
    }

    /// Emits one instruction, after its operands.
    pub(super) fn emit(&mut self, i: usize, inst: Inst, ty: Type, section: Section, stage: usize) -> Slot {
        let is_uniform = !self.varies[i].0;
        if let (Inst::Binary(..), Some(axes)) = (inst, self.linear_index_axes(Reg(i as u16))) {
            let kind = self.coordinate_op(self.plan.tile_axes, axes, !is_uniform);
            return self.push(section, kind, is_uniform, ty, [0; 3]);
        }
        let mut a = [0; 3];
        let mut ones = [false; 3];
        for (k, reg) in inst.operands().enumerate() {
            // A uniform operand need not be copied over a tile if the operation reads one value.
            let takes_one = match inst {
                Inst::Binary(..) | Inst::Compare(..) => ops::takes_one(self.expr.ty(reg)),
                Inst::Select(..) => k > 0,
                _ => false,
            };
            ones[k] =
                !is_uniform && takes_one && !self.varies[usize::from(reg.0)].0 && !ones[..k].contains(&true);
            a[k] = self.operand(reg, is_uniform || ones[k], stage);
        }
        let of = |reg: Reg| self.expr.ty(reg);
        let (kind, op_type) = match inst {
            Inst::Const(value) => (Kind::Const(value.convert(ty).bits()), ty),
            Inst::Run(scalar) => (Kind::Run(scalar), Type::U64),
            Inst::Coordinate(axis) => {
                let along = self.plan.tile_axes.contains(&usize::from(axis));
                let axes = if along { self.plan.tile_axes } else { self.plan.outer_axes };
                let at = axes.iter().take_while(|&&other| other != usize::from(axis)).count();
                (self.coordinate_op(axes, at..at + 1, along && !is_uniform), Type::I64)
            }
            Inst::Load(slot) => {
                let load = &self.loads[usize::from(slot)];
                let stored = Type::of(load.dtype);
                // A value that each row has once is read directly by its users: in machine code, often by one function.
                // If rows have several elements, a store to such a value has one element per row too, and runs after
                // all loads.
                let has_long_axis = self.plan.tile_axes.iter().any(|&axis| self.plan.nest.dims[axis] > 1);
                let plain = load.dtype == DType::F32 && ty == Type::F32;
                if is_uniform && plain && has_long_axis && section != Section::Once {
                    return self
                        .new_register(RegisterKind::DirectUniform(DIRECT_BIT | Slot::from(slot)), section);
                }
                let operand_type = match slot {
                    _ if self.plan.is_product(slot) => Some(DIRECT_PRODUCT),
                    _ => {
                        let target_slot = !is_uniform
                            && load.contiguous_len().is_some_and(|piece| piece.is_multiple_of(self.piece));
                        target_slot.then_some(DIRECT_BIT | Slot::from(slot))
                    }
                };
                match operand_type {
                    Some(target_slot) if stored == ty => {
                        return self.new_register(RegisterKind::Direct(target_slot), section);
                    }
                    Some(target_slot) => {
                        a[0] = self.new_register(RegisterKind::Direct(target_slot), section);
                        (Kind::Copy(stored), stored)
                    }
                    None => (Kind::Load(slot), stored),
                }
            }
            Inst::LoadAt(slot, _) => (Kind::LoadAt(slot), Type::of(self.loads[usize::from(slot)].dtype)),
            Inst::Reduced(k) => {
                let (reduced_type, result) =
                    self.reduced[usize::from(k)].expect("reduced in an earlier stage");
                if reduced_type == ty {
                    return result;
                }
                a[0] = result;
                (Kind::Convert(reduced_type, ty), ty)
            }
            Inst::Unary(op, _) => (Kind::Unary(op, ty), ty),
            Inst::Binary(op, ..) => (Kind::Binary(op, ty), ty),
            Inst::Compare(op, x, _) => (Kind::Compare(op, of(x)), Type::Bool),
            Inst::Select(..) => (Kind::Select(ty), ty),
            Inst::Convert(x) if of(x) == ty => return a[0],
            Inst::Convert(x) => (Kind::Convert(of(x), ty), ty),
            Inst::Guard(..) => (Kind::Guard(i as u16), Type::I64),
            Inst::Random(..) => (Kind::Random, Type::U32),
        };
        let result_slot = self.push_with(section, kind, is_uniform, op_type, a, ones);
        if op_type == ty {
            result_slot
        } else {
            self.push(section, Kind::Convert(op_type, ty), is_uniform, ty, [result_slot, 0, 0])
        }
    }

    /// Returns the register of a value that is already emitted: as one value, or over the tile.
    pub(super) fn operand(&mut self, reg: Reg, is_uniform: bool, stage: usize) -> Slot {
        let i = usize::from(reg.0);
        let value = self.value[i].expect("operands come before users");
        if is_uniform || self.varies[i].0 {
            return value;
        }
        if let Some(splat) = self.splat[i] {
            return splat;
        }
        let section = self.section_of(i, stage);
        let ty = self.expr.ty(reg);
        let splat = self.push(section, Kind::Splat(ty), false, ty, [value, 0, 0]);
        self.splat[i] = Some(splat);
        splat
    }

    pub(super) fn reduce(&mut self, stage: usize, k: usize, op: ReduceOp, value: Reg) {
        let ty = self.expr.ty(value);
        let a = self.operand(value, false, stage);
        let (kind, state, result) = match self.plan.loop_order {
            LoopOrder::Col => (Kind::Accumulate(op, ty), RegisterKind::Tile(ty), RegisterKind::Tile(ty)),
            _ => (Kind::Fold(op, ty), RegisterKind::PairwiseSum, RegisterKind::Uniform),
        };
        // State and result live as long as the whole tile program.
        let state = self.new_register(state, Section::Once);
        let result = self.new_register(result, Section::Once);
        self.section_ops(Section::Body(stage)).push(Op {
            kind,
            is_uniform: false,
            d: state,
            a: [a, 0, 0],
            uniform_operands: [false; 3],
        });
        self.totals[stage].push(StageReduction { op, ty, reduction_index: k, state, result });
        self.reduced[k] = Some((ty, result));
    }

    /// Emits an output into a register. Returns the operation that stores it, and the section of that operation.
    fn emit_output(
        &mut self,
        stage: usize,
        slot: usize,
        store: &StridedView,
        reg: Reg,
        stores_per_row: bool,
    ) -> Result<(Section, Op), String> {
        let (along, outside) = self.varies[usize::from(reg.0)];
        let section = if stores_per_row { Section::Post } else { Section::Body(stage) };
        let is_per_row = stores_per_row && self.plan.loop_order == LoopOrder::Row;
        if stores_per_row && (if is_per_row { along } else { outside }) {
            return Err(format!("store {slot} has one element per row, but its value changes along the row"));
        }
        let mut a = self.operand(reg, is_per_row, stage);
        let (ty, stored) = (self.expr.ty(reg), Type::of(store.dtype));
        if ty != stored {
            a = self.push(section, Kind::Convert(ty, stored), is_per_row, stored, [a, 0, 0]);
        } else if matches!(
            self.registers[a as usize].0,
            RegisterKind::Direct(_) | RegisterKind::DirectUniform(_)
        ) {
            a = self.push(section, Kind::Copy(ty), is_per_row, ty, [a, 0, 0]);
        }
        // A store produces no value; its result register is never written.
        Ok((
            section,
            Op {
                kind: Kind::Store(slot as u16),
                is_uniform: is_per_row,
                d: a,
                a: [a, 0, 0],
                uniform_operands: [false; 3],
            },
        ))
    }
}
