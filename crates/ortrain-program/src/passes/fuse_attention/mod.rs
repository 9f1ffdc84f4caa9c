//! Attention fusion: recognizes the instructions of an attention and replaces them.
//!
//! The forward pass is a product, element-wise maps, a softmax over rows, maps again, and a second product. The
//! backward pass has instructions of the same kinds. If the intermediate values have no other consumers, one
//! instruction replaces the forward pass, and one replaces the backward pass.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use ortrain_expr::{Access, BinaryOp, Builder, DType, Dims, Inst, ReduceOp, Reg, Type, UnaryOp};

use super::remove_unused::remove_unused;
use super::{Changed, Draft, Outcome, Target};
use crate::editor::{Change, Editor, join_node_names};
use crate::operand::{
    batched_matrix_dims, loaded_buffers, only_moves_elements, single_result, stored_buffers,
};
use crate::rewrite::index_map::Embedding;
use crate::rewrite::inline_nest::{Link, append, inline, is_same_access};
use crate::versions::Versions;
use crate::{
    Attention, AttentionGradients, AttentionPass, BufferId, GradientModes, Instruction, Load, MatMul, Nest,
    Operand, ScheduledInstruction,
};

/// Maximum number of maps between two instructions.
const MAX_MAPS: usize = 8;

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let mut changes = 0;
    if draft.instructions.iter().any(|scheduled| match_softmax(&scheduled.instruction).is_some()) {
        let mut work = Editor::new(draft);
        for at in 0..work.len() {
            if let Some(attention) = work.find_attention(at) {
                work.apply_change(attention);
                changes += 1;
            }
        }
        draft.instructions = work.finish();
    }
    // The fusion leaves unused instructions.
    Ok(Changed(changes + remove_unused(draft)))
}

/// Returns the nest and the length of its rows, if the instruction reduces only the innermost axis and all operands are
/// row-major.
fn match_row_reduction(instruction: &Instruction) -> Option<(&Nest, usize)> {
    let (Instruction::Nest(_), nest) = (instruction, instruction.flexible_nest()?) else { return None };
    let &[keys] = nest.inner_dims() else { return None };
    let dtype = nest.stores.first()?.access.dtype;
    let row_major = Access::contiguous(dtype, &nest.dims);
    let is_row_major = |operand: &Operand| {
        operand.access.len == row_major.len && is_same_access(&operand.access, &row_major, &nest.dims)
    };
    let fits = matches!(dtype, DType::F32 | DType::F64) && nest.operands().all(is_row_major);
    (fits && nest.stores.len() == 1).then_some((nest, keys))
}

/// Returns the operands of `reg`, if the operation `op` computes it.
fn operands(nest: &Nest, reg: Reg, op: BinaryOp) -> Option<[Reg; 2]> {
    match nest.expr.insts()[usize::from(reg.0)].0 {
        Inst::Binary(found, a, b) if found == op => Some([a, b]),
        _ => None,
    }
}

fn is_instruction(nest: &Nest, reg: Reg, inst: Inst) -> bool {
    nest.expr.insts()[usize::from(reg.0)].0 == inst
}

/// Recognizes a softmax over rows: returns its operand, its result, and the length of a row.
fn match_softmax(instruction: &Instruction) -> Option<(BufferId, BufferId, usize)> {
    let (nest, keys) = match_row_reduction(instruction)?;
    let ([Load::Buffer(from)], [maximum, sum]) = (nest.loads.as_slice(), nest.reductions.as_slice()) else {
        return None;
    };
    let [power, total] = operands(nest, nest.expr.outputs()[0], BinaryOp::Div)?;
    let Inst::Unary(UnaryOp::Exp, shifted) = nest.expr.insts()[usize::from(power.0)].0 else { return None };
    let [x, largest] = operands(nest, shifted, BinaryOp::Sub)?;
    let fits = (maximum.op, sum.op) == (ReduceOp::Max, ReduceOp::Sum)
        && (maximum.value, sum.value) == (x, power)
        && is_instruction(nest, x, Inst::Load(0))
        && is_instruction(nest, largest, Inst::Reduced(0))
        && is_instruction(nest, total, Inst::Reduced(1))
        && nest.expr.ty(x) == Type::of(from.access.dtype);
    fits.then(|| (from.buffer, nest.stores[0].buffer, keys))
}

/// Recognizes the gradient of the softmax `y` over rows: returns the gradients of its result and of its operand.
fn match_softmax_gradient(instruction: &Instruction, y: BufferId) -> Option<(BufferId, BufferId)> {
    let (nest, _) = match_row_reduction(instruction)?;
    let ([Load::Buffer(a), Load::Buffer(b)], [sum]) = (nest.loads.as_slice(), nest.reductions.as_slice())
    else {
        return None;
    };
    let (output_gradient, slots) = match [a.buffer == y, b.buffer == y] {
        [false, true] => (a.buffer, [0, 1]),
        [true, false] => (b.buffer, [1, 0]),
        _ => return None,
    };
    let [g_load, y_load] = slots.map(Inst::Load);
    let either = |found: [Reg; 2], x: &dyn Fn(Reg) -> bool, y: &dyn Fn(Reg) -> bool| {
        x(found[0]) && y(found[1]) || x(found[1]) && y(found[0])
    };
    let (is_g, is_y) =
        (|reg: Reg| is_instruction(nest, reg, g_load), |reg: Reg| is_instruction(nest, reg, y_load));
    let rest = |reg: Reg| {
        operands(nest, reg, BinaryOp::Sub)
            .is_some_and(|[g, s]| is_g(g) && is_instruction(nest, s, Inst::Reduced(0)))
    };
    let fits = sum.op == ReduceOp::Sum
        && either(operands(nest, sum.value, BinaryOp::Mul)?, &is_g, &is_y)
        && either(operands(nest, nest.expr.outputs()[0], BinaryOp::Mul)?, &is_y, &rest);
    fits.then(|| (output_gradient, nest.stores[0].buffer))
}

/// Transposes the last two axes of an access.
fn transpose_access(access: &Access) -> Access {
    let mut access = access.clone();
    let axes = access.strides.len();
    access.strides.swap(axes - 2, axes - 1);
    access
}

/// Transposes the last two axes of an operand.
fn transpose_operand(operand: &Operand) -> Operand {
    operand.with_access(transpose_access(&operand.access))
}

/// Transposes the last two axes of a nest's iteration space.
fn transpose_nest(nest: &Nest) -> Nest {
    let axes = nest.dims.len();
    let mut transposed = nest.map_operands(transpose_operand);
    transposed.dims.swap(axes - 2, axes - 1);
    let mut b = Builder::new();
    let regs = b.copy(&nest.expr, |b, inst, ty| match inst {
        Inst::Coordinate(axis) if usize::from(axis) == axes - 2 => b.coordinate(axes - 1),
        Inst::Coordinate(axis) if usize::from(axis) == axes - 1 => b.coordinate(axes - 2),
        other => b.push(other, ty),
    });
    (transposed.expr, transposed.reductions) = b.finish_copy(&nest.expr, &nest.reductions, &regs);
    transposed
}

/// Returns the product with `id` as left factor. If `id` is the right factor, the product is transposed.
fn with_left_factor(m: &MatMul, id: BufferId) -> Option<MatMul> {
    match [m.a.buffer == id, m.b.buffer == id] {
        [true, false] => Some(m.clone()),
        [false, true] => Some(MatMul {
            a: transpose_operand(&m.b),
            b: transpose_operand(&m.a),
            m: m.n,
            n: m.m,
            epilogue: transpose_nest(&m.epilogue),
            ..m.clone()
        }),
        _ => None,
    }
}

/// Index space of the scores of an attention.
struct Space {
    batch: Dims,
    queries: usize,
    dims: Dims,
    contiguous: Access,
    entries: GradientModes,
}

impl Space {
    fn batched_dims(&self, sizes: [usize; 2]) -> Dims {
        batched_matrix_dims(&self.batch, sizes)
    }

    /// Returns true if two operands over batch and `sizes` access the same elements.
    fn are_equal(&self, a: &Operand, b: &Operand, sizes: [usize; 2]) -> bool {
        a.buffer == b.buffer && is_same_access(&a.access, &b.access, &self.batched_dims(sizes))
    }

    /// Returns the operand that accesses a whole buffer in row-major order.
    fn contiguous_operand(&self, buffer: BufferId) -> Operand {
        Operand { buffer, access: self.contiguous.clone() }
    }

    /// Returns true if an access over the space covers a buffer in row-major order.
    fn is_contiguous(&self, access: &Access) -> bool {
        access.len == self.contiguous.len && is_same_access(access, &self.contiguous, &self.dims)
    }

    /// Returns true if an access over the transposed space covers a buffer in the row-major order of the space.
    fn is_contiguous_transposed(&self, access: &Access) -> bool {
        self.is_contiguous(&transpose_access(access))
    }
}

/// Returns the instruction for one pass of an attention.
fn with_pass(of: &Attention, pass: AttentionPass) -> Instruction {
    Instruction::from(Attention { pass, ..of.clone() })
}

/// Attention instruction that replaces other instructions.
struct Replacement {
    position: usize,
    instruction: Instruction,
    /// Positions of the replaced instructions that write the results.
    producers: Vec<usize>,
    /// Positions of the replaced instructions that compute intermediate values. They must become unused.
    removed: Vec<usize>,
}

/// Instructions from the gradient of the attention's output to the gradient of the softmax: a product and maps.
struct GradientSource {
    product: usize,
    of_weights: Nest,
    output_gradient: Operand,
}

impl Editor<'_> {
    fn product(&self, at: usize, space: &Space) -> Option<&MatMul> {
        let ScheduledInstruction { instruction, gradient_modes: entries, .. } = self.slots[at].as_ref()?;
        let Instruction::MatMul(m) = instruction else { return None };
        (m.batch == space.batch && *entries == space.entries).then_some(m)
    }

    /// Returns the position of the product that produces a buffer, through at most `maps` element-wise maps.
    fn find_source_product(&self, id: BufferId, keys: usize, maps: usize) -> Option<usize> {
        let maker = self.only_writer(id)?;
        match self.instruction_at(maker)? {
            Instruction::MatMul(m) => {
                (m.n == keys && single_result(&m.epilogue) == Some(id)).then_some(maker)
            }
            Instruction::Nest(map) if maps > 0 && map.is_map() && map.segments.is_none() => {
                let len = self.buffers[id.0 as usize].len;
                let mut full_loads =
                    loaded_buffers(map).filter(|read| self.buffers[read.0 as usize].len == len);
                full_loads.find_map(|read| self.find_source_product(read, keys, maps - 1))
            }
            _ => None,
        }
    }

    /// Merges the element-wise maps from `sources` to `value` into one nest over the space of the scores. The sources
    /// become its accumulators. The nest stores neither intermediate values nor its result.
    fn collect_maps(&self, value: BufferId, sources: &[BufferId], space: &Space) -> Option<Nest> {
        let dtype = space.contiguous.dtype;
        let mut b = Builder::new();
        let outputs: Vec<Reg> = (0..sources.len()).map(|slot| b.load(slot, Type::of(dtype))).collect();
        let loads = vec![Load::Accumulator(dtype); sources.len()];
        let host = |outputs: &[Reg], b: Builder, stores: Vec<Operand>| {
            Nest::elementwise(space.dims.clone(), loads, b.finish(outputs), stores)
        };
        if value == sources[0] {
            return Some(host(&outputs[..1], b, Vec::new()));
        }
        let host = host(&outputs, b, sources.iter().map(|&id| space.contiguous_operand(id)).collect());
        let mut map = self.producing_map(value)?;
        let mut tried: Vec<BufferId> = sources.to_vec();
        for _ in 0..MAX_MAPS * MAX_MAPS {
            let is_full = |id: &BufferId| self.buffers[id.0 as usize].len == space.contiguous.len;
            let Some(id) = loaded_buffers(&map).find(|id| !tried.contains(id) && is_full(id)) else { break };
            tried.push(id);
            let Some(before) = self.producing_map(id) else { continue };
            loop {
                let slot = loaded_buffers(&map).position(|read| read == id);
                let Some(inlined) = slot.and_then(|slot| inline(&map, slot, &before, false)) else { break };
                map = inlined;
            }
        }
        let slot = loaded_buffers(&map).position(|read| read == sources[0])?;
        let keeps = vec![false; host.stores.len()];
        let mut merged = append(&host, &map, Link::Result(0, slot), &keeps, false)?;
        let fits = merged.dims == space.dims
            && matches!(merged.stores.as_slice(), [store] if space.is_contiguous(&store.access))
            && !merged.expr.can_fail();
        merged.stores.clear();
        fits.then_some(merged)
    }

    /// Returns the operand before any maps that only move elements. The new operand has the same elements.
    fn trace_moves(&self, operand: Operand, dims: &[usize]) -> Operand {
        let mut traced = operand;
        while let Some(map) = self.producing_map(traced.buffer) {
            let [Load::Buffer(source)] = map.loads.as_slice() else { break };
            if !only_moves_elements(&map) || source.access.dtype != traced.access.dtype {
                break;
            }
            let stored = &map.stores[0].access;
            let Some(embedding) = Embedding::new(dims, &traced.access, &map, stored, false) else { break };
            traced = source.with_access(embedding.access(&source.access));
        }
        traced
    }

    /// Appends to an epilogue the following maps that only move its result. Adds their positions to `removed`.
    fn append_moves(&self, mut nest: Nest, entries: GradientModes, removed: &mut Vec<usize>) -> Nest {
        while let Some((longer, reader)) = self.append_move(&nest, entries) {
            nest = longer;
            removed.push(reader);
        }
        nest
    }

    /// Appends to an epilogue the following map, if it only moves the result. Also returns the position of the map.
    fn append_move(&self, nest: &Nest, entries: GradientModes) -> Option<(Nest, usize)> {
        let value = single_result(nest).filter(|&value| self.is_work(value) && !self.is_output(value))?;
        let reader = self.readers(value).only()?;
        let scheduled = self.slots[reader].as_ref()?;
        let map = scheduled.instruction.as_map().filter(|map| only_moves_elements(map))?;
        // A buffer with several writers, each for a part, is not supported.
        let fits =
            scheduled.gradient_modes == entries && self.only_writer(single_result(map)?) == Some(reader);
        let longer = || append(nest, map, Link::Result(0, 0), &[false], false);
        fits.then(longer).flatten().map(|longer| (longer, reader))
    }

    /// Recognizes the attention around the softmax at a position.
    fn find_attention(&self, at: usize) -> Option<Change> {
        let scheduled = self.slots[at].as_ref()?;
        let (operand, softmax, keys) = match_softmax(&scheduled.instruction)?;
        let entries = scheduled.gradient_modes;
        if self.only_writer(softmax) != Some(at) {
            return None;
        }
        let scores_at = self.find_source_product(operand, keys, MAX_MAPS)?;
        let Instruction::MatMul(scores) = self.instruction_at(scores_at)? else { return None };
        let dims = batched_matrix_dims(&scores.batch, [scores.m, keys]);
        let dtype = scores.a.access.dtype;
        let row_major = Access::contiguous(dtype, &dims);
        let space =
            Space { batch: scores.batch.clone(), queries: scores.m, dims, contiguous: row_major, entries };
        let product = single_result(&scores.epilogue)?;
        let fits = matches!(dtype, DType::F32 | DType::F64)
            && scores.b.access.dtype == dtype
            && self.buffers[softmax.0 as usize].len == space.contiguous.len
            && self.slots[scores_at].as_ref()?.gradient_modes == entries
            && scores.epilogue.stores.iter().all(|store| space.is_contiguous(&store.access));
        if !fits || scores.k == 0 {
            return None;
        }
        // Scale and mask follow the epilogue of the product.
        let after = self.collect_maps(operand, &[product], &space)?;
        let mut before = scores.epilogue.clone();
        before.stores = vec![space.contiguous_operand(product)];
        let of_scores = append(&before, &after, Link::Result(0, 0), &[false], false)?;
        let size = scores.k;
        let q = self.trace_moves(scores.a.clone(), &space.batched_dims([space.queries, size]));
        let k = self.trace_moves(transpose_operand(&scores.b), &space.batched_dims([keys, size]));

        // The attention weights (the softmax after further maps) and their product with the values.
        let (weights, sums_at, sums) = self.find_consumer(softmax, &space, |value, reader| {
            let view = self.product(reader, &space).and_then(|m| with_left_factor(m, value))?;
            (view.m == space.queries && space.is_contiguous(&view.a.access)).then_some(view)
        })?;
        let width = sums.n;
        let of_weights = self.collect_maps(weights, &[softmax], &space)?;
        let v = self.trace_moves(sums.b, &space.batched_dims([keys, width]));
        let forward = Attention {
            batch: space.batch.clone(),
            queries: space.queries,
            keys,
            size,
            width,
            q,
            k,
            v,
            scores: of_scores,
            weights: of_weights,
            pass: AttentionPass::Output(Box::new(sums.epilogue.clone())),
        };
        let mut makers = vec![sums_at];
        let gradients = self.find_gradients(&forward, &space, [softmax, weights], sums_at)?;
        let output = self.append_moves(sums.epilogue, entries, &mut makers);
        let output = Replacement {
            position: sums_at,
            instruction: with_pass(&forward, AttentionPass::Output(Box::new(output))),
            producers: makers,
            removed: vec![scores_at, at],
        };
        self.build_change(&[Some(output), gradients].into_iter().flatten().collect::<Vec<_>>(), &space)
    }

    /// Returns the change that inserts the replacements. Returns `None` if a removed instruction still has readers, or
    /// if an operand is not available.
    fn build_change(&self, new: &[Replacement], space: &Space) -> Option<Change> {
        let entries = space.entries;
        let live: Vec<usize> =
            new.iter().flat_map(|new| new.instruction.reads()).map(|id| self.alias_class(id)).collect();
        let mut removed_nodes: BTreeSet<usize> =
            new.iter().flat_map(|new| new.producers.iter().copied()).collect();
        let mut fresh: Vec<usize> = removed_nodes.iter().copied().collect();
        while let Some(at) = fresh.pop() {
            for id in self.instruction_at(at)?.reads() {
                let Some(maker) = self.only_writer(id).filter(|maker| !removed_nodes.contains(maker)) else {
                    continue;
                };
                let is_dead = |id: &BufferId| {
                    self.is_work(*id)
                        && !self.is_output(*id)
                        && !live.contains(&self.alias_class(*id))
                        && self.readers(*id).iter().all(|reader| removed_nodes.contains(&reader))
                };
                let instruction = self.instruction_at(maker)?;
                if !instruction.can_fail() && instruction.writes().iter().all(is_dead) {
                    removed_nodes.insert(maker);
                    fresh.push(maker);
                }
            }
        }
        let mut change: Change = removed_nodes.iter().map(|&at| (at, None)).collect();
        for Replacement { position, instruction, producers: makers, removed: inside } in new {
            let reads = instruction.reads();
            let first = new.iter().flat_map(|new| &new.removed).copied().min()?;
            // A work buffer is written once, before this position. Another buffer does not change from the first
            // removed instruction on.
            let is_defined = |&id: &BufferId| {
                if self.is_work(id) && !self.is_input(id) {
                    self.only_writer(id)
                        .is_some_and(|maker| maker < *position && !removed_nodes.contains(&maker))
                } else {
                    self.is_unchanged_between(&[id], first, *position, entries)
                }
            };
            let fits = inside.iter().all(|at| removed_nodes.contains(at))
                && reads.iter().all(is_defined)
                && instruction
                    .writes()
                    .iter()
                    .all(|&id| self.only_writer(id).is_some_and(|at| makers.contains(&at)));
            if !fits || instruction.validate(self.buffers).is_some() {
                return None;
            }
            // The new instructions cannot fail.
            let nodes = inside.iter().chain(makers).filter_map(|&at| self.slots[at].as_ref());
            let node = join_node_names(nodes.map(|scheduled| &*scheduled.node));
            let replaced = change.iter_mut().find(|(at, _)| at == position)?;
            let versions = self.versions_of_attention(instruction, &removed_nodes, *position)?;
            let instruction = instruction.clone();
            replaced.1 = Some(ScheduledInstruction { instruction, gradient_modes: entries, node, versions });
        }
        Some(change)
    }

    /// Returns the versions of the buffers that an attention reads and writes, as recorded by the replaced
    /// instructions. Returns `None` if the instructions read different versions of a buffer.
    fn versions_of_attention(
        &self,
        instruction: &Instruction,
        removed: &BTreeSet<usize>,
        position: usize,
    ) -> Option<Versions> {
        let mut versions = Versions::default();
        for read in instruction.reads() {
            let readers =
                self.readers(read).iter().filter(|reader| *reader <= position || removed.contains(reader));
            for reader in readers.filter_map(|reader| self.slots[reader].as_ref()) {
                versions = versions.merge_reads(&reader.versions.only_read_of(read))?;
            }
        }
        let makers = removed.iter().filter_map(|&maker| self.slots[maker].as_ref());
        for (written, version) in makers.flat_map(|maker| maker.versions.writes()) {
            versions = versions.with_write(written, version);
        }
        Some(versions.restrict_to(instruction))
    }

    /// Recognizes the gradients of an attention. Returns `Some(None)` if there are no gradients, and `None` if an
    /// instruction does not match the pattern.
    fn find_gradients(
        &self,
        forward: &Attention,
        space: &Space,
        [softmax, weights]: [BufferId; 2],
        sums_at: usize,
    ) -> Option<Option<Replacement>> {
        let &Attention { queries, keys, size, width, .. } = forward;
        let dims = |sizes: [usize; 2]| space.batched_dims(sizes);
        let (mut makers, mut inside): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        let (mut q, mut k, mut v) = (None, None, None);
        let mut gradient_operand: Option<Operand> = None;
        let equal = |a: &Operand, b: &Operand, sizes: [usize; 2]| space.are_equal(a, b, sizes);
        for reader in self.readers(weights).iter().filter(|&reader| reader != sums_at) {
            let Some(view) = self.product(reader, space).and_then(|m| with_left_factor(m, weights)) else {
                continue;
            };
            let fits = (view.m, view.n) == (keys, width)
                && space.is_contiguous_transposed(&view.a.access)
                && v.is_none();
            if !fits {
                return None;
            }
            gradient_operand = Some(self.trace_moves(view.b, &dims([queries, width])));
            makers.push(reader);
            v = Some(self.append_moves(view.epilogue, space.entries, &mut makers));
        }
        // The gradient of the softmax: its factor, its position, and the gradients of the result and of the operand.
        let gradient = self.find_consumer(softmax, space, |value, reader| {
            match_softmax_gradient(self.instruction_at(reader)?, value)
        });
        let mut of_scores = self.collect_maps(softmax, &[softmax], space)?;
        let mut of_softmax = of_scores.clone();
        let mut of_weights = self.collect_maps(softmax, &[softmax, softmax], space)?;
        if let Some((scaled_gradient, at, (from, of_operand))) = gradient {
            let source = self.find_gradient_source(at, [from, softmax], forward, space)?;
            of_softmax = self.collect_maps(scaled_gradient, &[softmax], space)?;
            if gradient_operand
                .as_ref()
                .is_some_and(|known| !equal(known, &source.output_gradient, [queries, width]))
            {
                return None;
            }
            gradient_operand = Some(source.output_gradient);
            of_weights = source.of_weights;
            inside.extend([source.product, at]);
            let mut product = None;
            for (value, reader) in self.consuming_products(of_operand, space)? {
                if product.replace(value).is_some_and(|known| known != value) {
                    return None;
                }
                let view = with_left_factor(self.product(reader, space)?, value)?;
                let of_q = (view.m, view.n) == (queries, size) && space.is_contiguous(&view.a.access);
                let of_k = (view.m, view.n) == (keys, size) && space.is_contiguous_transposed(&view.a.access);
                let reads = |other: &Operand, lines: usize| {
                    let right = self.trace_moves(view.b.clone(), &dims([lines, size]));
                    equal(&right, other, [lines, size])
                };
                makers.push(reader);
                let gradient = if of_q && q.is_none() && reads(&forward.k, keys) {
                    &mut q
                } else if of_k && k.is_none() && reads(&forward.q, queries) {
                    &mut k
                } else {
                    return None;
                };
                *gradient = Some(self.append_moves(view.epilogue, space.entries, &mut makers));
            }
            of_scores = self.collect_maps(product?, &[of_operand], space)?;
        }
        let (Some(gradient_operand), Some(&position)) =
            (gradient_operand, makers.iter().chain(&inside).min())
        else {
            return Some(None);
        };
        let (weights, softmax, scores) = (of_weights, of_softmax, of_scores);
        let gradients =
            AttentionGradients { output_gradient: gradient_operand, weights, softmax, scores, q, k, v };
        let instruction = with_pass(forward, AttentionPass::Gradients(Box::new(gradients)));
        Some(Some(Replacement { position, instruction, producers: makers, removed: inside }))
    }

    /// Recognizes the instructions from the gradient of the attention's output to the softmax gradient at `at`.
    fn find_gradient_source(
        &self,
        at: usize,
        [of_softmax, softmax]: [BufferId; 2],
        forward: &Attention,
        space: &Space,
    ) -> Option<GradientSource> {
        if self.slots[at].as_ref()?.gradient_modes != space.entries {
            return None;
        }
        let &Attention { queries, keys, width, .. } = forward;
        let product = self.find_source_product(of_softmax, keys, MAX_MAPS)?;
        let m = self.product(product, space)?;
        let nest = &m.epilogue;
        let is_plain = is_instruction(nest, nest.expr.outputs()[0], Inst::Load(0))
            && nest.stores.iter().all(|store| space.is_contiguous(&store.access));
        let of_weight = single_result(nest).filter(|_| is_plain && (m.m, m.k) == (queries, width))?;
        let v = self.trace_moves(transpose_operand(&m.b), &space.batched_dims([keys, width]));
        let output_gradient = self.trace_moves(m.a.clone(), &space.batched_dims([queries, width]));
        let of_weights = self.collect_maps(of_softmax, &[of_weight, softmax], space)?;
        space.are_equal(&v, &forward.v, [keys, width]).then_some(GradientSource {
            product,
            of_weights,
            output_gradient,
        })
    }

    /// Returns the products that read a value, directly or through maps, as pairs of operand and position. Returns
    /// `None` if the value has other readers.
    fn consuming_products(&self, value: BufferId, space: &Space) -> Option<Vec<(BufferId, usize)>> {
        let mut values = vec![value];
        let mut products = Vec::new();
        let mut next = 0;
        while let Some(&value) = values.get(next) {
            next += 1;
            for reader in self.readers(value).iter() {
                match self.instruction_at(reader)? {
                    Instruction::MatMul(_) => products.push((value, reader)),
                    Instruction::Nest(map)
                        if values.len() < MAX_MAPS && map.is_map() && map.segments.is_none() =>
                    {
                        let result = single_result(map)?;
                        if self.buffers[result.0 as usize].len != space.contiguous.len {
                            return None;
                        }
                        values.push(result);
                    }
                    _ => return None,
                }
            }
        }
        Some(products)
    }

    /// Returns the first consumer of `value`, directly or through maps, that satisfies `is_it`: its operand, its
    /// position, and the result of `is_it`.
    fn find_consumer<T>(
        &self,
        value: BufferId,
        space: &Space,
        is_it: impl Fn(BufferId, usize) -> Option<T>,
    ) -> Option<(BufferId, usize, T)> {
        let mut values = vec![value];
        let mut next = 0;
        while let Some(&value) = values.get(next) {
            next += 1;
            for reader in self.readers(value).iter() {
                if let Some(consumer) = is_it(value, reader) {
                    return Some((value, reader, consumer));
                }
                if let Some(map) = self.map_at(reader)
                    && values.len() < MAX_MAPS
                {
                    let is_full = |id: &BufferId| self.buffers[id.0 as usize].len == space.contiguous.len;
                    let more = stored_buffers(map).filter(is_full).filter(|id| !values.contains(id));
                    let more: Vec<BufferId> = more.collect();
                    values.extend(more);
                }
            }
        }
        None
    }
}
