//! Scatter: adds or writes elements at indexed positions. Scatter-add is the gradient of a gather.

use ortrain_expr::DType;

use crate::isa::{Isa, Level, Work};
use crate::pool::Pool;
use crate::scratch::BaseAddresses;
use crate::tile::number::{Bf16, F16, Number, Stored};

/// `out[o, index[j], i] += src[o, j, i]` for all o, j, i: contiguous buffers of shapes `[outer, size, inner]`,
/// `[count]` and `[outer, count, inner]`.
///
/// A negative index counts from the end. An index that is still out of range adds nothing. Sums to one element are in
/// the order of j, each rounded to the type of the buffer (`F16` and `BF16` are added as `F32`). With `overwrites`, elements
/// are written instead of added, in the same order: the last one wins.
#[derive(Clone, Copy, Debug)]
pub struct ScatterDesc {
    /// Product of the axes before the indexed one.
    pub outer: usize,
    /// Size of the indexed axis.
    pub size: usize,
    /// Number of indices.
    pub count: usize,
    /// Product of the axes after the indexed one.
    pub inner: usize,
    /// Type of `out` and `src`: a float, `I32` or `I64`; with `overwrites` any type.
    pub dtype: DType,
    /// Type of the indices: `I32` or `I64`.
    pub index: DType,
    /// True if elements are written instead of added.
    pub overwrites: bool,
}

/// Compiled [`ScatterDesc`].
#[derive(Clone, Copy, Debug)]
pub struct ScatterKernel {
    desc: ScatterDesc,
    isa: Isa,
    /// Number of adjacent inner elements of one task.
    width: usize,
}

/// Approximate number of elements of a task.
const MIN_TASK_WORK: usize = 32 * 1024;
/// Minimum number of adjacent elements of a task. With fewer elements, reading indices would take most of the time.
const MIN_TASK_WIDTH: usize = 64;

impl ScatterKernel {
    /// Returns the name of the algorithm.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        if self.desc.overwrites {
            "rows written in the order of the indices"
        } else {
            "rows added in the order of the indices"
        }
    }

    /// Compiles a scatter.
    ///
    /// # Errors
    /// Returns an error if the operation is not defined for the types, or if a buffer is too large to count.
    pub fn new(desc: ScatterDesc, isa: Isa) -> Result<ScatterKernel, String> {
        let adds = matches!(
            desc.dtype,
            DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::I32 | DType::I64
        );
        if !desc.overwrites && !adds {
            return Err(format!("adding {} is not supported", desc.dtype));
        }
        if !matches!(desc.index, DType::I32 | DType::I64) {
            return Err(format!("indices of type {} are not supported", desc.index));
        }
        let elements = |axis: usize| desc.outer.checked_mul(axis)?.checked_mul(desc.inner)?.checked_mul(8);
        if elements(desc.size).is_none() || elements(desc.count).is_none() {
            return Err("a buffer is too large to count".to_owned());
        }
        let width = (MIN_TASK_WORK / desc.count.max(1))
            .max(MIN_TASK_WIDTH)
            .next_multiple_of(MIN_TASK_WIDTH)
            .min(desc.inner.max(1));
        Ok(ScatterKernel { desc, isa, width })
    }

    /// Runs the scatter. Allocates nothing, needs no scratch memory, and gives the same bits on any number of threads.
    ///
    /// # Safety
    /// The pointers are the starts of buffers of the description's shapes and types, with any alignment. They are valid
    /// for reads, and `out` for writes, until the run is over. `out` overlaps neither of the others. No other code
    /// accesses `out`, and no other code writes to the others.
    pub unsafe fn run(&self, out: *mut u8, indices: *const u8, src: *const u8, pool: &Pool) {
        let ScatterDesc { outer, size, count, inner, dtype, index, overwrites: last } = self.desc;
        if outer * size * inner == 0 || count == 0 {
            return;
        }
        let parts = inner.div_ceil(self.width);
        let pointers = [out, indices.cast_mut(), src.cast_mut()];
        let bases = BaseAddresses(&pointers);
        pool.run(outer * parts, usize::MAX, &|task, _| {
            let (o, part) = (task / parts, task % parts);
            let [out, indices, src] = *{ bases }.0 else { unreachable!("three buffers") };
            let first = part * self.width;
            let width = self.width.min(inner - first);
            let at =
                |base: *mut u8, lines: usize| base.wrapping_add((o * lines * inner + first) * dtype.size());
            macro_rules! go {
                ($work:ident, $s:ty, $i:ty) => {
                    self.isa.run($work(Column::<$s, $i> {
                        out: at(out, size).cast(),
                        indices: indices.cast_const().cast(),
                        src: at(src, count).cast_const().cast(),
                        size,
                        count,
                        width,
                        step: inner,
                    }))
                };
            }
            macro_rules! by_index {
                ($work:ident, $s:ty) => {
                    if index == DType::I32 { go!($work, $s, i32) } else { go!($work, $s, i64) }
                };
            }
            match (last, dtype, dtype.size()) {
                (false, DType::F32, _) => by_index!(Add, f32),
                (false, DType::F64, _) => by_index!(Add, f64),
                (false, DType::F16, _) => by_index!(Add, F16),
                (false, DType::BF16, _) => by_index!(Add, Bf16),
                (false, DType::I32, _) => by_index!(Add, i32),
                (false, DType::I64, _) => by_index!(Add, i64),
                (true, _, 1) => by_index!(Write, u8),
                (true, _, 2) => by_index!(Write, u16),
                (true, _, 4) => by_index!(Write, u32),
                (true, _, 8) => by_index!(Write, u64),
                (_, other, _) => unreachable!("adding {other}: rejected at compile time"),
            }
        });
    }
}

/// Column of the buffers: `width` elements of each line.
struct Column<S, I> {
    out: *mut S,
    indices: *const I,
    src: *const S,
    size: usize,
    count: usize,
    width: usize,
    step: usize,
}

impl<S, I: Copy + Into<i64>> Column<S, I> {
    /// Calls `f` with each line of the source and the indexed line of the output, in order.
    ///
    /// # Safety
    /// The contract of [`ScatterKernel::run`]; no other thread writes to this column of the output.
    #[inline(always)]
    unsafe fn for_each_line(&self, mut f: impl FnMut(*mut S, *const S)) {
        for j in 0..self.count {
            // SAFETY: by the contract there are `count` indices.
            let index: i64 = unsafe { self.indices.add(j).read_unaligned() }.into();
            let index = if index < 0 { index.wrapping_add(self.size as i64) } else { index };
            if index < 0 || index >= self.size as i64 {
                continue;
            }
            // SAFETY: both lines are inside of their buffers.
            unsafe { f(self.out.add(index as usize * self.step), self.src.add(j * self.step)) }
        }
    }
}

/// Adds source lines to the indexed lines.
struct Add<S, I>(Column<S, I>);

impl<S: Stored<Computed: Number>, I: Copy + Into<i64>> Work for Add<S, I> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let width = self.0.width;
        // SAFETY: guaranteed by the caller of `ScatterKernel::run`; lines have `width` elements.
        unsafe {
            self.0.for_each_line(|out, src| {
                for i in 0..width {
                    let sum = out.add(i).read_unaligned().decode().add(src.add(i).read_unaligned().decode());
                    out.add(i).write_unaligned(S::encode(sum));
                }
            });
        }
    }
}

/// Writes source lines to the indexed lines.
struct Write<S, I>(Column<S, I>);

impl<S: Copy, I: Copy + Into<i64>> Work for Write<S, I> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let width = self.0.width;
        // SAFETY: guaranteed by the caller of `ScatterKernel::run`; lines have `width` elements.
        unsafe {
            self.0.for_each_line(|out, src| {
                for i in 0..width {
                    out.add(i).write_unaligned(src.add(i).read_unaligned());
                }
            });
        }
    }
}
