//! Products of matrices: `C = A·B`, with a nest over the finished product.
//!
//! The product is cut into blocks of C, each a task that goes through all of k on its own: nothing is shared, and
//! every sum has one order. Blocks of A and B are packed into panels, and kept while the next task of the same worker
//! needs them again; operands that are read once anyway are read where they lie. A micro-kernel (one file per level)
//! multiplies panel by panel. A finished block goes through the epilogue while it is in cache.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod micro;
pub(crate) mod pack;
mod portable;
mod thin;

use std::fmt;

use ortrain_expr::{Access, DType, Inst, Nest, OutOfRange, Type};

use crate::isa::Isa;
use crate::pool::Pool;
use crate::tape::walk::Walk;
use crate::tape::{ALIGN, Drive, Failure, Plan, Site, Tape};
use crate::views::{Bases, Parts, RunScalars, Scratch};
use micro::{Micro, Real};
use pack::{Block, pack};
use thin::Thin;

/// A product of matrices, or of batches of them.
///
/// Its space is that of the epilogue: batch axes, then m, then n. Transposed operands are a matter of strides.
#[derive(Clone, Debug)]
pub struct GemmDesc {
    /// Length of the sums.
    pub k: usize,
    /// A, over the batch axes, m and k.
    pub a: Access,
    /// B, over the batch axes, k and n.
    pub b: Access,
    /// What becomes of the product. Its load 0 is the product itself: it has no buffer, its access says only the type
    /// (`F32`, or `F64` if both operands are). The other loads and the stores are buffers.
    pub epilogue: Nest,
}

/// A compiled [`GemmDesc`].
pub struct GemmKernel {
    engine: Box<dyn Engine>,
}

impl fmt::Debug for GemmKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmKernel").finish_non_exhaustive()
    }
}

trait Engine: Send + Sync {
    fn shape(&self) -> &Shape;
    /// # Safety
    /// The contract of [`GemmKernel::run`].
    unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        parts: Parts,
    ) -> Result<(), OutOfRange>;
}

/// Depth of a block: a panel of B of that depth stays in the first-level cache.
const DEPTH: usize = 256;
/// Panels of A in a block: together with a panel of B they stay in the second-level cache.
const ROW_PANELS: usize = 16;
/// Columns of a block.
const COLUMNS: usize = 512;
/// Bytes up to which a packed operand is kept over all of k.
const KEEP: usize = 2 << 20;
/// Multiplications of a block that make it worth a task of its own.
const GRAIN: usize = 1 << 19;
/// Tasks that are plenty for any number of cores.
const PLENTY: usize = 16;
/// Panels of the other operand up to which one is read where it lies.
const FEW: usize = 2;

/// How the product is cut, and where things lie in a worker's scratch memory. Depends on the description alone.
#[derive(Debug)]
struct Shape {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    /// Rows and columns of a block.
    rows: usize,
    cols: usize,
    a: Operand,
    b: Operand,
    buffers: usize,
    tape: Tape,
    /// Store straight from the micro-kernel: the product is stored as it is, and columns are adjacent.
    direct: Option<Direct>,
    /// Few rows, multiplied without packing B.
    thin: bool,
    block_at: usize,
    corner_at: usize,
    bytes: usize,
}

/// A or B.
#[derive(Debug)]
struct Operand {
    dtype: DType,
    offset: isize,
    batch: Walk,
    /// Steps across the panels and along k.
    line: isize,
    depth: isize,
    /// Whether it is packed (else it is read where it lies).
    packed: bool,
    /// Whether a packed block covers all of k, and may be used by the next task.
    whole: bool,
    /// Where the packed block lies in scratch memory.
    at: usize,
}

#[derive(Debug)]
struct Direct {
    offset: isize,
    batch: Walk,
    row: isize,
}

impl GemmKernel {
    /// Compiles a product.
    ///
    /// # Errors
    /// What is wrong with the description: accesses out of bounds, operands that are not floats of one compute type,
    /// an epilogue that reduces or is not well typed.
    pub fn new(desc: &GemmDesc, isa: Isa) -> Result<GemmKernel, String> {
        let double = match (desc.a.dtype, desc.b.dtype) {
            (DType::F64, DType::F64) => true,
            (a, b) if Type::of(a) == Type::F32 && Type::of(b) == Type::F32 => false,
            (a, b) => return Err(format!("a product of {a} and {b}")),
        };
        let engine: Box<dyn Engine> = if double {
            let micro = f64::micro(isa);
            Box::new(Product { micro, shape: Shape::new::<f64>(desc, isa, micro)? })
        } else {
            let micro = f32::micro(isa);
            Box::new(Product { micro, shape: Shape::new::<f32>(desc, isa, micro)? })
        };
        Ok(GemmKernel { engine })
    }

    /// Whether a run can fail (the epilogue holds a guard).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.engine.shape().tape.can_fail
    }

    /// Bytes of scratch memory for a run on so many threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        threads.max(1) * self.engine.shape().bytes
    }

    /// Computes the product and its epilogue. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// `bases` holds the start of each buffer: A, B, the epilogue's loads but the first, its stores.
    ///
    /// # Errors
    /// The first guard of the epilogue that fails, in index order. Stores have been made all the same.
    ///
    /// # Panics
    /// When `bases` or `scratch` are not what the kernel asked for.
    ///
    /// # Safety
    /// As [`crate::NestKernel::run`], where A and B are loads too, which no store may overlap.
    pub unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        let shape = self.engine.shape();
        assert_eq!(bases.len(), shape.buffers, "one pointer for each buffer");
        let parts = scratch.part(0, shape.bytes, pool);
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, scalars, pool, parts) }
    }
}

impl Shape {
    fn new<T: Real>(desc: &GemmDesc, isa: Isa, micro: Micro<T>) -> Result<Shape, String> {
        let Micro { mr, nr, .. } = micro;
        let nest = &desc.epilogue;
        let Some(axes) = nest.dims.len().checked_sub(2) else {
            return Err("a product has at least two axes".to_owned());
        };
        if nest.inner != 0 {
            return Err("an epilogue reduces nothing".to_owned());
        }
        let real = if T::BYTES == 8 { DType::F64 } else { DType::F32 };
        if nest.loads.first().is_none_or(|load| load.dtype != real) {
            return Err(format!("load 0 of the epilogue is the product, of type {real}"));
        }
        let (batch_dims, m, n, k) = (&nest.dims[..axes], nest.dims[axes], nest.dims[axes + 1], desc.k);
        let outside: Vec<usize> = (0..axes).collect();
        let plan =
            Plan { nest, drive: Drive::Map, outside: &outside, along: &[axes, axes + 1], product: true };
        let tape = Tape::new(&plan, isa)?;
        let batch: usize = batch_dims.iter().product();

        let operand = |access: &Access, rows: usize, columns: usize, across: usize| {
            let mut dims = nest.dims.clone();
            (dims[axes], dims[axes + 1]) = (rows, columns);
            if access.strides.len() != dims.len() {
                return Err(format!("strides {:?} for {} axes", access.strides, dims.len()));
            }
            if let Some((low, high)) = access.reach(&dims)
                && (low < 0 || high >= access.len as isize)
            {
                return Err(format!("elements {low}..={high} of a buffer of {}", access.len));
            }
            let batch = batch_dims.iter().copied().zip(access.strides.iter().copied());
            Ok(Operand {
                dtype: access.dtype,
                offset: access.offset as isize,
                batch: Walk::new(batch)?,
                line: access.strides[axes + across],
                depth: access.strides[axes + 1 - across],
                packed: true,
                whole: false,
                at: 0,
            })
        };
        let mut a = operand(&desc.a, m, k, 0)?;
        let mut b = operand(&desc.b, k, n, 1)?;

        let thin =
            m <= thin::ROWS && (b.line == 1 || b.depth == 1) && (m * T::BYTES).saturating_mul(k) <= KEEP;
        let mut rows = (mr * ROW_PANELS).min(m.next_multiple_of(mr)).max(mr);
        let mut cols = COLUMNS.min(n.next_multiple_of(nr)).max(nr);
        let half = |size: usize, unit: usize| size.div_ceil(2).next_multiple_of(unit);
        loop {
            let tasks = batch * m.div_ceil(rows) * n.div_ceil(cols);
            let work = (rows * cols).saturating_mul(k);
            if tasks >= PLENTY || work < 2 * GRAIN {
                break;
            }
            if cols > 2 * rows && half(cols, nr) < cols {
                cols = half(cols, nr);
            } else if !thin && half(rows, mr) < rows {
                rows = half(rows, mr);
            } else if half(cols, nr) < cols {
                cols = half(cols, nr);
            } else {
                break;
            }
        }
        a.packed = a.dtype != real || cols > FEW * nr;
        b.packed = b.dtype != real || b.line != 1 || rows > FEW * mr;

        let mut bytes = tape.frame + size_of::<Kept>().next_multiple_of(ALIGN);
        let mut room = |elements: usize| {
            let at = bytes;
            bytes += (elements * T::BYTES).next_multiple_of(ALIGN);
            at
        };
        if thin {
            a.at = room(m * k);
        } else {
            for (operand, lines) in [(&mut a, rows), (&mut b, cols)] {
                operand.whole = operand.packed && (lines * T::BYTES).saturating_mul(k) <= KEEP;
                // Even where B is read in place, its last, narrow panel is packed.
                let lines = if operand.packed { lines } else { nr };
                operand.at = room(lines * if operand.whole { k } else { k.min(DEPTH) });
            }
        }
        let direct = Shape::direct(nest, axes)?;
        let block_at = room(if direct.is_some() && !thin { 0 } else { rows * cols });
        let corner_at = room(mr * nr);
        Ok(Shape {
            batch,
            m,
            n,
            k,
            rows,
            cols,
            a,
            b,
            buffers: 1 + nest.loads.len() + nest.stores.len(),
            tape,
            direct,
            thin,
            block_at,
            corner_at,
            bytes,
        })
    }

    /// Where to store straight to, if the epilogue is nothing but a store of the product.
    fn direct(nest: &Nest, axes: usize) -> Result<Option<Direct>, String> {
        let [store] = nest.stores.as_slice() else { return Ok(None) };
        let product = nest.expr.outputs()[0];
        let (inst, ty) = nest.expr.insts()[usize::from(product.0)];
        let plain = inst == Inst::Load(0)
            && ty == Type::of(nest.loads[0].dtype)
            && store.dtype == nest.loads[0].dtype
            && (store.strides[axes + 1] == 1 || nest.dims[axes + 1] == 1)
            && nest.loads.len() == 1
            && !nest.expr.can_fail();
        if !plain {
            return Ok(None);
        }
        let batch = nest.dims[..axes].iter().copied().zip(store.strides.iter().copied());
        Ok(Some(Direct { offset: store.offset as isize, batch: Walk::new(batch)?, row: store.strides[axes] }))
    }
}

struct Product<T: 'static> {
    micro: Micro<T>,
    shape: Shape,
}

/// Which blocks a worker has packed, so that the next task may use them again.
#[repr(C)]
struct Kept {
    a: (isize, usize),
    b: (isize, usize),
}

/// No block starts there.
const NOTHING: (isize, usize) = (0, usize::MAX);

/// One task.
struct Task<'a, T> {
    batch: usize,
    rows: (usize, usize),
    cols: (usize, usize),
    scratch: *mut u8,
    bases: &'a [*mut u8],
    /// The block of the product: where it lies, and the step from row to row.
    c: *mut T,
    c_row: isize,
}

impl<T: Real + Send + Sync> Engine for Product<T> {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        parts: Parts,
    ) -> Result<(), OutOfRange> {
        let shape = &self.shape;
        for worker in 0..parts.workers {
            // SAFETY: both lie at the start of the worker's scratch memory.
            unsafe {
                parts.of(worker).cast::<Failure>().write(Failure::NONE);
                let kept = Kept { a: NOTHING, b: NOTHING };
                parts.of(worker).add(shape.tape.frame).cast::<Kept>().write(kept);
            }
        }
        let bases = Bases(bases);
        let (row_blocks, col_blocks) = (shape.m.div_ceil(shape.rows), shape.n.div_ceil(shape.cols));
        pool.run(shape.batch * row_blocks * col_blocks, parts.workers, &|task, worker| {
            // Rows go first, so that a block of B serves many tasks.
            let (row_block, rest) = (task % row_blocks, task / row_blocks);
            let (col_block, batch) = (rest % col_blocks, rest / col_blocks);
            let part = |block: usize, size: usize, end: usize| (block * size, size.min(end - block * size));
            // SAFETY: tasks have distinct blocks of the product, and a worker has its own scratch memory.
            unsafe {
                self.task(
                    &{ bases },
                    scalars,
                    batch,
                    part(row_block, shape.rows, shape.m),
                    part(col_block, shape.cols, shape.n),
                    parts.of(worker),
                );
            }
        });
        // SAFETY: all tasks are done.
        let failures = (0..parts.workers).map(|worker| unsafe { parts.of(worker).cast::<Failure>().read() });
        failures.min().unwrap_or(Failure::NONE).result()
    }
}

impl<T: Real> Product<T> {
    unsafe fn task(
        &self,
        bases: &Bases<'_>,
        scalars: RunScalars,
        batch: usize,
        rows: (usize, usize),
        cols: (usize, usize),
        scratch: *mut u8,
    ) {
        let shape = &self.shape;
        // SAFETY: the caller's contract, and the layout made by `Shape::new`.
        unsafe {
            let (c, c_row) = match &shape.direct {
                Some(direct) => {
                    let base = bases.0[2].cast::<T>();
                    let offset = direct.offset + direct.batch.offset(batch) + rows.0 as isize * direct.row;
                    (base.wrapping_offset(offset).wrapping_add(cols.0), direct.row)
                }
                None => (scratch.add(shape.block_at).cast::<T>(), cols.1 as isize),
            };
            let task = Task { batch, rows, cols, scratch, bases: bases.0, c, c_row };
            if shape.thin {
                self.multiply_thin(&task);
            } else {
                self.multiply(&task);
            }
            if shape.direct.is_none() {
                self.finish(&task, scalars);
            }
        }
    }

    /// Computes a block of a thin product.
    unsafe fn multiply_thin(&self, task: &Task<'_, T>) {
        let Shape { k, a, b, tape, block_at, direct, .. } = &self.shape;
        let &Task { rows, cols, scratch, .. } = task;
        let start = |operand: &Operand, base: *mut u8, first: usize| {
            let element = operand.offset + operand.batch.offset(task.batch) + first as isize * operand.line;
            base.wrapping_offset(element * operand.dtype.size() as isize).cast_const()
        };
        // SAFETY: the caller's contract, and the layout made by `Shape::new`.
        unsafe {
            let kept = &mut (*scratch.add(tape.frame).cast::<Kept>()).a;
            let (packed, block) = (scratch.add(a.at).cast::<T>(), scratch.add(*block_at).cast::<T>());
            let key = (a.offset + a.batch.offset(task.batch), rows.0);
            if *kept != key {
                let at = start(a, task.bases[0], rows.0);
                let lines = Block { at, line_step: a.line, depth_step: a.depth, lines: rows.1, depth: *k };
                pack(tape.isa, a.dtype, lines, 1, packed);
                *kept = key;
            }
            let thin = Thin {
                a: packed.cast_const(),
                b: start(b, task.bases[1], cols.0),
                line: b.line,
                depth: b.depth,
                rows: rows.1,
                cols: cols.1,
                k: *k,
                c: block,
            };
            thin::multiply(tape.isa, b.dtype, thin);
            if direct.is_some() {
                for i in 0..rows.1 {
                    let to = task.c.wrapping_offset(i as isize * task.c_row).cast::<u8>();
                    std::ptr::copy_nonoverlapping(block.add(i * cols.1).cast(), to, cols.1 * T::BYTES);
                }
            }
        }
    }

    /// Computes a block of the product.
    unsafe fn multiply(&self, task: &Task<'_, T>) {
        let Shape { k, a, b, tape, .. } = &self.shape;
        let &Task { rows, cols, scratch, c, c_row, .. } = task;
        if *k == 0 {
            for i in 0..rows.1 {
                // SAFETY: the block has these elements; all zero bits are zero.
                unsafe {
                    let c = c.wrapping_offset(i as isize * c_row).cast::<u8>();
                    c.write_bytes(0, cols.1 * T::BYTES);
                }
            }
            return;
        }
        // SAFETY: the layout made by `Shape::new`.
        let kept = unsafe { &mut *scratch.add(tape.frame).cast::<Kept>() };
        for depth in (0..*k).step_by(DEPTH) {
            let n = DEPTH.min(k - depth);
            // SAFETY: the caller's contract.
            unsafe {
                let a = self.prepare(task, a, task.bases[0], rows, (depth, n), &mut kept.a, self.micro.mr);
                let b = self.prepare(task, b, task.bases[1], cols, (depth, n), &mut kept.b, self.micro.nr);
                self.panels(task, a, b, n, depth > 0);
            }
        }
    }

    /// An operand's block over some depths: packed if it must be.
    unsafe fn prepare(
        &self,
        task: &Task<'_, T>,
        operand: &Operand,
        base: *mut u8,
        (first, lines): (usize, usize),
        (depth, n): (usize, usize),
        kept: &mut (isize, usize),
        panel: usize,
    ) -> Lines<T> {
        let Operand { dtype, line, depth: step, .. } = *operand;
        let matrix = operand.offset + operand.batch.offset(task.batch);
        let at = |first: usize, depth: usize| {
            let element = matrix + first as isize * line + depth as isize * step;
            base.wrapping_offset(element * dtype.size() as isize).cast_const()
        };
        // SAFETY: the layout made by `Shape::new`.
        let packed = unsafe { task.scratch.add(operand.at).cast::<T>() };
        let padded = lines.next_multiple_of(panel);
        let block = |first, lines, depth, n| Block {
            at: at(first, depth),
            line_step: line,
            depth_step: step,
            lines,
            depth: n,
        };
        // SAFETY: the elements are the operand's, and there is room for whole panels.
        unsafe {
            if operand.whole {
                let key = (matrix, first);
                if *kept != key {
                    for depth in (0..self.shape.k).step_by(DEPTH) {
                        let n = DEPTH.min(self.shape.k - depth);
                        let to = packed.add(depth * padded);
                        pack(self.shape.tape.isa, dtype, block(first, lines, depth, n), panel, to);
                    }
                    *kept = key;
                }
                return Lines::packed(packed.add(depth * padded), panel, n);
            }
            if operand.packed {
                pack(self.shape.tape.isa, dtype, block(first, lines, depth, n), panel, packed);
                return Lines::packed(packed, panel, n);
            }
            let mut found = Lines {
                at: at(first, depth).cast(),
                line,
                depth: step,
                panel: panel as isize * line,
                last: std::ptr::null(),
            };
            // A micro-kernel reads whole panels of B.
            let narrow = lines % panel;
            if panel == self.micro.nr && narrow > 0 {
                pack(
                    self.shape.tape.isa,
                    dtype,
                    block(first + lines - narrow, narrow, depth, n),
                    panel,
                    packed,
                );
                found.last = packed;
            }
            found
        }
    }

    /// Multiplies panel by panel.
    unsafe fn panels(&self, task: &Task<'_, T>, a: Lines<T>, b: Lines<T>, depth: usize, add: bool) {
        let Micro { mr, nr, run } = self.micro;
        let (rows, cols) = (task.rows.1, task.cols.1);
        // SAFETY: the layout made by `Shape::new`.
        let corner = unsafe { task.scratch.add(self.shape.corner_at).cast::<T>() };
        for j in (0..cols).step_by(nr) {
            let narrow = cols - j < nr;
            let (b_at, b_row) = if narrow && !b.last.is_null() {
                (b.last, nr as isize)
            } else {
                (b.at.wrapping_offset((j / nr) as isize * b.panel), b.depth)
            };
            for i in (0..rows).step_by(mr) {
                let a_at = a.at.wrapping_offset((i / mr) as isize * a.panel);
                let there = mr.min(rows - i);
                let c = task.c.wrapping_offset(i as isize * task.c_row).wrapping_add(j);
                let run = run[there - 1];
                // SAFETY: rows before `rows` are there, columns are padded to whole panels in B, and the result goes
                // to whole panels only.
                unsafe {
                    if !narrow {
                        run(depth, a_at, a.line, a.depth, b_at, b_row, c, task.c_row, add);
                        continue;
                    }
                    run(depth, a_at, a.line, a.depth, b_at, b_row, corner, nr as isize, false);
                    for i in 0..there {
                        let c = c.wrapping_offset(i as isize * task.c_row);
                        for j in 0..cols - j {
                            let value = *corner.add(i * nr + j);
                            let c = c.add(j);
                            c.write_unaligned(if add { c.read_unaligned().plus(value) } else { value });
                        }
                    }
                }
            }
        }
    }

    /// Runs the epilogue over a finished block.
    unsafe fn finish(&self, task: &Task<'_, T>, scalars: RunScalars) {
        let Shape { tape, n, .. } = &self.shape;
        let (rows, cols) = (task.rows, task.cols);
        let run = |first: usize, count: usize, mut product: *const T| {
            let mut start = first;
            while start < first + count {
                let n = tape.tile.min(first + count - start);
                let site = Site {
                    tape,
                    bases: &task.bases[1..],
                    scalars,
                    frame: task.scratch,
                    product: product.cast(),
                };
                // SAFETY: the caller's contract; slot 0 is never taken from `bases`, so that slots count from B on.
                unsafe { site.run(&tape.stages[0].body, task.batch, start, n) };
                start += n;
                product = product.wrapping_add(n);
            }
        };
        let site =
            Site { tape, bases: &task.bases[1..], scalars, frame: task.scratch, product: std::ptr::null() };
        // SAFETY: the caller's contract.
        unsafe { site.run(&tape.once, 0, 0, tape.tile) };
        if cols.1 == *n {
            run(rows.0 * n, rows.1 * n, task.c);
        } else {
            for i in 0..rows.1 {
                run((rows.0 + i) * n + cols.0, cols.1, task.c.wrapping_add(i * cols.1));
            }
        }
    }
}

/// The panels of an operand's block.
#[derive(Clone, Copy)]
struct Lines<T> {
    at: *const T,
    /// Steps from line to line and from depth to depth within a panel, and from panel to panel.
    line: isize,
    depth: isize,
    panel: isize,
    /// The last panel, if it is narrow and packed by itself.
    last: *const T,
}

impl<T> Lines<T> {
    fn packed(at: *const T, panel: usize, depth: usize) -> Lines<T> {
        Lines { at, line: 1, depth: panel as isize, panel: (panel * depth) as isize, last: std::ptr::null() }
    }
}
