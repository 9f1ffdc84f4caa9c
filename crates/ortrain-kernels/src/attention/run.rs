//! Execution of an attention kernel: computes the output or the gradients of each head, block by block of queries.

use super::product::{LeftFactor, Product};
use super::rows::{BiasRows, MaxMagnitude, Rows, Softmax, SoftmaxGradient, VisibleKeys};
use super::{
    CompiledNest, Computed, Engine, Gradients, Kernel, MASKED_BIAS, MAX_BUFFERS, MAX_UNBIASED_SCORE, Operand,
    Partition, Pass, Pointwise, VISIBLE_BIAS,
};
use crate::gemm::micro::Target;
use crate::gemm::pack::{Block, pack};
use crate::isa::{Level, Work};
use crate::pool::Pool;
use crate::scratch::{BaseAddresses, RunScalars, ScratchParts};
use crate::tile::ExecContext;
use crate::tile::number::Number;

/// Context of the work on one head: buffers and scratch memory.
#[derive(Clone, Copy)]
struct Task<'a> {
    bases: &'a [*mut u8],
    scalars: RunScalars,
    /// Scratch memory of the worker.
    scratch: *mut u8,
    head: usize,
}

impl Task<'_> {
    /// Returns the address of an offset in the worker's scratch memory.
    fn at<T>(&self, offset: usize) -> *mut T {
        self.scratch.wrapping_add(offset).cast()
    }
}

impl<T: Computed + Send + Sync> Engine for Kernel<T> {
    fn partition(&self) -> &Partition {
        &self.partition
    }

    unsafe fn run(&self, bases: &[*mut u8], scalars: RunScalars, pool: &Pool, parts: ScratchParts) {
        let &Partition { heads, queries, keys, parts: count, part, group, .. } = &self.partition;
        let bases = BaseAddresses(bases);
        let pieces = heads * count;
        pool.run(pieces.div_ceil(group), parts.workers, &|task, worker| {
            let bases = { bases }.0;
            for piece in task * group..pieces.min((task + 1) * group) {
                let (head, index) = (piece / count, piece % count);
                let task = Task { bases, scalars, scratch: parts.worker_part(worker), head };
                let first = index * part;
                let end = queries.min(first + part);
                // SAFETY: the caller's contract; pieces have distinct results, and each worker has its own scratch
                // memory.
                unsafe {
                    match &self.pass {
                        Pass::Output(output) => self.compute_output(&task, output, (first, end)),
                        Pass::Gradients(gradients) => {
                            let sums = if count > 1 { parts.shared_part() } else { task.scratch };
                            self.compute_gradients(&task, gradients, (first, end), (sums, piece));
                        }
                    }
                }
            }
        });
        let Pass::Gradients(gradients) = &self.pass else { return };
        if count == 1 {
            return;
        }
        pool.run(heads, parts.workers, &|head, worker| {
            let task = Task { bases: { bases }.0, scalars, scratch: parts.worker_part(worker), head };
            for (nest, at, elements) in self.summed_gradients(gradients) {
                let Some(nest) = nest else { continue };
                let len = keys * elements;
                // SAFETY: all tasks are done, and only this task accesses these sums.
                unsafe {
                    let sums = parts.shared_part().add(at).cast::<T>().add(head * count * len);
                    let all_sums = std::slice::from_raw_parts_mut(sums, count * len);
                    let (total, more) = all_sums.split_at_mut(len);
                    for part in more.chunks_exact(len) {
                        self.isa.run(AddRow { to: total, from: part });
                    }
                    self.run_nest(&task, nest, (0, keys), sums, std::ptr::null(), std::ptr::null_mut());
                }
            }
        });
    }
}

/// Adds one row of numbers to another.
struct AddRow<'a, T> {
    to: &'a mut [T],
    from: &'a [T],
}

impl<T: Number> Work for AddRow<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = to.add(from);
        }
    }
}

impl<T: Computed> Kernel<T> {
    /// Returns the gradients that are sums over queries, with the offset of the sums and the number of elements of a
    /// key or value.
    fn summed_gradients<'a>(
        &self,
        gradients: &'a Gradients,
    ) -> [(Option<&'a CompiledNest>, usize, usize); 2] {
        [
            (gradients.k.as_ref(), self.layout.k_sums, self.partition.size),
            (gradients.v.as_ref(), self.layout.v_sums, self.partition.width),
        ]
    }

    /// Returns the address of the first element of a query (or key) of an operand.
    fn line_address(&self, task: &Task<'_>, operand: &Operand, line: usize) -> *const T {
        let at = operand.offset + operand.batch.offset(task.head) + line as isize * operand.line;
        task.bases[operand.buffer].cast::<T>().wrapping_offset(at).cast_const()
    }

    /// Packs lines of an operand as a right factor, at scratch offset `to`. The columns of the factor are the lines if
    /// `is_transposed`, and otherwise the elements of the lines.
    ///
    /// # Safety
    /// The operand has the lines, and `to` has the capacity of whole panels.
    unsafe fn pack_factor(
        &self,
        task: &Task<'_>,
        operand: &Operand,
        (first, lines): (usize, usize),
        elements: usize,
        is_transposed: bool,
        to: usize,
    ) {
        let at = self.line_address(task, operand, first).cast();
        let &Operand { line, step, .. } = operand;
        let block = if is_transposed {
            Block { at, line_step: line, depth_step: step, lines, depth: elements }
        } else {
            Block { at, line_step: step, depth_step: line, lines: elements, depth: lines }
        };
        // SAFETY: the caller's contract.
        unsafe { pack(self.isa, T::DTYPE, block, self.micro.nr, task.at::<T>(to)) };
    }

    /// Computes a block of a product, of `rows` rows and `cols` columns. `b` is the scratch offset of the packed right
    /// factor, and `pitch` the depth of its panels.
    ///
    /// # Safety
    /// As [`Product::run`].
    unsafe fn multiply(
        &self,
        task: &Task<'_>,
        [rows, cols, depth]: [usize; 3],
        a: LeftFactor<T>,
        (b, pitch): (usize, usize),
        (c, add): (Target<T>, bool),
    ) {
        let (b, corner) = (task.at::<T>(b).cast_const(), task.at(self.layout.corner));
        // SAFETY: the caller's contract.
        unsafe { Product { rows, cols, depth, a, b, pitch, c, add, corner }.run(self.isa, self.micro) };
    }

    /// Returns the destination of a result from line `line` on. The result goes directly to its buffer if the epilogue
    /// only stores it, and otherwise to `block`, the input of the epilogue.
    fn result_destination(
        &self,
        task: &Task<'_>,
        nest: &CompiledNest,
        line: usize,
        block: *mut T,
    ) -> Target<T> {
        match &nest.direct_store {
            Some(operand) => {
                Target { at: self.line_address(task, operand, line).cast_mut(), row: operand.line }
            }
            None => Target { at: block, row: nest.elements as isize },
        }
    }

    /// Runs the epilogue of a result that was not stored directly.
    ///
    /// # Safety
    /// As [`Kernel::run_nest`].
    unsafe fn run_epilogue(
        &self,
        task: &Task<'_>,
        nest: &CompiledNest,
        lines: (usize, usize),
        block: *const T,
    ) {
        if nest.direct_store.is_none() {
            // SAFETY: the caller's contract.
            unsafe { self.run_nest(task, nest, lines, block, std::ptr::null(), std::ptr::null_mut()) };
        }
    }

    /// Returns the scores of a block, limited to the first `keys` keys.
    fn score_rows(&self, at: *mut T, rows: usize, keys: usize) -> Rows<T> {
        Rows { at, rows, pitch: self.partition.keys, keys }
    }

    /// Returns the lines of an operand from line `line` on. The elements of a line must be adjacent.
    fn bias_rows(&self, task: &Task<'_>, operand: &Operand, line: usize) -> BiasRows<T> {
        BiasRows { at: self.line_address(task, operand, line), row: operand.line }
    }

    /// Returns true if products may skip masked keys. Their weights must be exactly zero. The other factors must be
    /// finite, so that the products with these weights are zero too.
    ///
    /// # Safety
    /// The contract of [`super::AttentionKernel::run`].
    unsafe fn can_skip_masked_keys(
        &self,
        task: &Task<'_>,
        (first, end): (usize, usize),
        gradients: Option<&Gradients>,
    ) -> bool {
        let &Partition { keys, size, width, .. } = &self.partition;
        let (Pointwise::Added(scale, _), Pointwise::Identity) = (&self.scores, &self.weights) else {
            return false;
        };
        let one_by_one = |gradients: &Gradients| {
            matches!((&gradients.weights, &gradients.softmax), (Pointwise::Identity, Pointwise::Identity))
                && !matches!(gradients.scores, Pointwise::Program(_))
        };
        let output_gradient = gradients.map(|gradients| &gradients.output_gradient);
        let mut operands = [&self.q, &self.k, &self.v].into_iter().chain(output_gradient);
        if !gradients.is_none_or(one_by_one) || operands.any(|operand| operand.step != 1) {
            return false;
        }
        let max_abs = |operand: &Operand, (first, end): (usize, usize), elements: usize| {
            self.isa.run(MaxMagnitude(self.bias_rows(task, operand, first), [end - first, elements]))
        };
        let constant = T::from_constant;
        let scores = max_abs(&self.q, (first, end), size).mul(max_abs(&self.k, (0, keys), size));
        let values = max_abs(&self.v, (0, keys), width);
        // Bound on the difference of two sums of `width` products each, with a margin.
        let sums =
            output_gradient.map_or(T::ONE, |operand| max_abs(operand, (first, end), width)).mul(values);
        let sums = sums.mul(constant(4.0 * width as f64));
        scores.mul(constant(scale.abs() * size as f64)) <= constant(MAX_UNBIASED_SCORE)
            && sums.mul(T::ZERO) == T::ZERO
    }

    /// Returns the number of leading keys that the queries of a block see; all later keys are masked. Returns the
    /// number of all keys if the bias does not show this, or if `hides` is false.
    ///
    /// # Safety
    /// As [`Kernel::can_skip_masked_keys`].
    unsafe fn count_visible_keys(
        &self,
        task: &Task<'_>,
        (first, rows): (usize, usize),
        hides: bool,
    ) -> usize {
        let keys = self.partition.keys;
        let (Pointwise::Added(_, operand), true) = (&self.scores, hides) else { return keys };
        let [masked, open, limit] = [MASKED_BIAS, VISIBLE_BIAS, -MASKED_BIAS].map(T::from_constant);
        let added = self.bias_rows(task, operand, first);
        let rows = if added.row == 0 { 1 } else { rows };
        self.isa.run(VisibleKeys { added, rows, keys, masked, open, limit })
    }

    /// Runs a nest over some lines of its space. Three blocks hold values for these lines: the first accumulator
    /// (`block`), the second accumulator (`next`), and the result of a nest without a store (`to`).
    ///
    /// # Safety
    /// The contract of [`super::AttentionKernel::run`]; the blocks have elements for all lines, and `to` may be
    /// `block`.
    unsafe fn run_nest(
        &self,
        task: &Task<'_>,
        nest: &CompiledNest,
        (first, lines): (usize, usize),
        block: *const T,
        next: *const T,
        to: *mut T,
    ) {
        let tape = &nest.program;
        let elements = nest.elements;
        let (first, count) = (first * elements, lines * elements);
        let mut slots = [std::ptr::null_mut(); MAX_BUFFERS];
        slots[nest.num_accumulators..][..nest.buffers]
            .copy_from_slice(&task.bases[nest.buffer..][..nest.buffers]);
        // Accesses count elements from the first head on, so the start of a block is moved back.
        let before = task.head * nest.head_elements + first;
        if nest.num_accumulators > 1 {
            slots[1] = next.wrapping_sub(before).cast_mut().cast();
        }
        if nest.to_block {
            slots[nest.loads] = to.wrapping_sub(before).cast();
        }
        let site = |product: *const T| ExecContext {
            program: tape,
            bases: &slots,
            scalars: task.scalars,
            frame: task.at(nest.frame),
            product: product.cast(),
        };
        // SAFETY: the caller's contract, and the layout of `Kernel::new`. The operations of `per_run` read only values
        // that are the same at every index.
        unsafe {
            site(block).run(&tape.per_run, 0, 0, tape.tile);
            for (start, n) in tape.tiles(first, first + count) {
                site(block.add(start - first)).run(&tape.stages[0].body, task.head, start, n);
            }
        }
    }

    /// Computes the softmax of a block of queries over the keys that they see, and the weights of the values, in
    /// scratch memory.
    ///
    /// # Safety
    /// The contract of [`super::AttentionKernel::run`]; the keys are packed.
    unsafe fn compute_weights(&self, task: &Task<'_>, block: (usize, usize), visible: usize) {
        let (Partition { keys, size, .. }, layout) = (&self.partition, &self.layout);
        let (first, rows) = block;
        let softmax: *mut T = task.at(layout.softmax);
        // SAFETY: the caller's contract, and the layout of `Kernel::new`.
        unsafe {
            let a = LeftFactor {
                at: self.line_address(task, &self.q, first),
                row: self.q.line,
                depth: self.q.step,
            };
            let c = Target { at: softmax, row: *keys as isize };
            self.multiply(task, [rows, visible, *size], a, (layout.k_transposed, *size), (c, false));
            let (scale, added) = match &self.scores {
                Pointwise::Identity => (T::ONE, None),
                Pointwise::Scale(factor) => (T::from_constant(*factor), None),
                Pointwise::Added(factor, operand) => {
                    (T::from_constant(*factor), Some(self.bias_rows(task, operand, first)))
                }
                Pointwise::Program(taped) => {
                    self.run_nest(task, taped, block, softmax, std::ptr::null(), softmax);
                    (T::ONE, None)
                }
            };
            self.isa.run(Softmax { rows: self.score_rows(softmax, rows, visible), scale, added });
            if let Pointwise::Program(nest) = &self.weights {
                self.run_nest(task, nest, block, softmax, std::ptr::null(), task.at(layout.weights));
            }
        }
    }

    /// Computes the output for some queries of a head: first query and end.
    unsafe fn compute_output(&self, task: &Task<'_>, output: &CompiledNest, (first, end): (usize, usize)) {
        let (&Partition { keys, size, width, rows, .. }, layout) = (&self.partition, &self.layout);
        // SAFETY: the caller's contract, and the layout of `Kernel::new`.
        unsafe {
            let hides = self.can_skip_masked_keys(task, (first, end), None);
            self.pack_factor(task, &self.k, (0, keys), size, true, layout.k_transposed);
            self.pack_factor(task, &self.v, (0, keys), width, false, layout.v);
            for at in (first..end).step_by(rows) {
                let block = (at, rows.min(end - at));
                let visible = self.count_visible_keys(task, block, hides);
                self.compute_weights(task, block, visible);
                let (a, result) = (self.weights_factor(task), task.at(layout.result));
                let to = self.result_destination(task, output, at, result);
                self.multiply(task, [block.1, width, visible], a, (layout.v, keys), (to, false));
                self.run_epilogue(task, output, block, result);
            }
        }
    }

    /// Returns the weights of the values as a left factor.
    fn weights_factor(&self, task: &Task<'_>) -> LeftFactor<T> {
        let at = task.at::<T>(self.layout.weights).cast_const();
        LeftFactor { at, row: self.partition.keys as isize, depth: 1 }
    }

    /// Computes the gradients for some queries of a head. The gradients of keys and values are summed in the memory
    /// `sums`; `piece` is the index of this part's sums in it.
    unsafe fn compute_gradients(
        &self,
        task: &Task<'_>,
        gradients: &Gradients,
        (first, end): (usize, usize),
        (sums, piece): (*mut u8, usize),
    ) {
        let (&Partition { keys, size, width, rows, parts, .. }, layout) = (&self.partition, &self.layout);
        let output_gradient = &gradients.output_gradient;
        let piece = if parts > 1 { piece } else { 0 };
        let sums_at = |offset: usize, elements: usize| {
            sums.wrapping_add(offset).cast::<T>().wrapping_add(piece * keys * elements)
        };
        let (k_sums, v_sums) = (sums_at(layout.k_sums, size), sums_at(layout.v_sums, width));
        let needs_scores = gradients.q.is_some() || gradients.k.is_some();
        let hides = {
            // SAFETY: the caller's contract.
            unsafe { self.can_skip_masked_keys(task, (first, end), Some(gradients)) }
        };
        // Adds a block's contribution to the gradients of the visible keys. The first block overwrites them, and sets
        // the gradients of the masked keys to zero.
        let add_up =
            |[visible, elements, rows]: [usize; 3], a: LeftFactor<T>, b: usize, to: Target<T>, add: bool| {
                // SAFETY: the caller's contract, and the layout of `Kernel::new`.
                unsafe {
                    self.multiply(task, [visible, elements, rows], a, (b, rows), (to, add));
                    for line in if add { keys..keys } else { visible..keys } {
                        let at = to.at.wrapping_offset(line as isize * to.row);
                        (0..elements).for_each(|i| at.add(i).write_unaligned(T::ZERO));
                    }
                }
            };
        let sums_to = |nest: &CompiledNest, sums: *mut T| match parts {
            1 => self.result_destination(task, nest, 0, sums),
            _ => Target { at: sums, row: nest.elements as isize },
        };
        // SAFETY: the caller's contract, and the layout of `Kernel::new`.
        unsafe {
            self.pack_factor(task, &self.k, (0, keys), size, true, layout.k_transposed);
            if needs_scores {
                self.pack_factor(task, &self.v, (0, keys), width, true, layout.v_transposed);
            }
            if gradients.q.is_some() {
                self.pack_factor(task, &self.k, (0, keys), size, false, layout.k);
            }
            for at in (first..end).step_by(rows) {
                let block = (at, rows.min(end - at));
                let rows = block.1;
                let visible = self.count_visible_keys(task, block, hides);
                self.compute_weights(task, block, visible);
                let weights = self.weights_factor(task);
                let add = at > first;
                if let Some(nest) = &gradients.v {
                    self.pack_factor(
                        task,
                        output_gradient,
                        block,
                        width,
                        false,
                        layout.output_gradient_block,
                    );
                    let to = sums_to(nest, v_sums);
                    add_up(
                        [visible, width, rows],
                        weights.transpose(),
                        layout.output_gradient_block,
                        to,
                        add,
                    );
                }
                if !needs_scores {
                    continue;
                }
                self.compute_scores_gradient(task, gradients, block, visible);
                let at = task.at::<T>(layout.gradients).cast_const();
                let scores = LeftFactor { at, row: keys as isize, depth: 1 };
                if let Some(nest) = &gradients.k {
                    self.pack_factor(task, &self.q, block, size, false, layout.q_block);
                    let to = sums_to(nest, k_sums);
                    add_up([visible, size, rows], scores.transpose(), layout.q_block, to, add);
                }
                if let Some(nest) = &gradients.q {
                    let result = task.at(layout.result);
                    let to = self.result_destination(task, nest, block.0, result);
                    self.multiply(task, [rows, size, visible], scores, (layout.k, keys), (to, false));
                    self.run_epilogue(task, nest, block, result);
                }
            }
            if parts == 1 {
                for (nest, sums) in [(&gradients.k, k_sums), (&gradients.v, v_sums)] {
                    if let Some(taped) = nest {
                        self.run_epilogue(task, taped, (0, keys), sums);
                    }
                }
            }
        }
    }

    /// Computes the gradients of the scores of a block of queries and their visible keys, in scratch memory.
    unsafe fn compute_scores_gradient(
        &self,
        task: &Task<'_>,
        gradients: &Gradients,
        block: (usize, usize),
        visible: usize,
    ) {
        let (&Partition { keys, width, .. }, layout) = (&self.partition, &self.layout);
        let (first, rows) = block;
        let output_gradient = &gradients.output_gradient;
        let (softmax, to) = (task.at::<T>(layout.softmax), task.at::<T>(layout.gradients));
        // SAFETY: the caller's contract, and the layout of `Kernel::new`.
        unsafe {
            let a = LeftFactor {
                at: self.line_address(task, output_gradient, first),
                row: output_gradient.line,
                depth: output_gradient.step,
            };
            let c = Target { at: to, row: keys as isize };
            self.multiply(task, [rows, visible, width], a, (layout.v_transposed, width), (c, false));
            if let Pointwise::Program(nest) = &gradients.weights {
                self.run_nest(task, nest, block, to, softmax, to);
            }
            // The softmax may be overwritten: the weights of the values, which may share its memory, were used before.
            if let Pointwise::Program(nest) = &gradients.softmax {
                self.run_nest(task, nest, block, softmax, std::ptr::null(), softmax);
            }
            let scale = match &gradients.scores {
                Pointwise::Scale(factor) => T::from_constant(*factor),
                _ => T::ONE,
            };
            let (softmax, to_rows) =
                (self.score_rows(softmax, rows, visible), self.score_rows(to, rows, visible));
            self.isa.run(SoftmaxGradient { softmax, gradients: to_rows, scale });
            if let Pointwise::Program(nest) = &gradients.scores {
                self.run_nest(task, nest, block, to, std::ptr::null(), to);
            }
        }
    }
}
